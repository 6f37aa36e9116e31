"""What a run leaves behind: its configuration, every round, a checkpoint, the best state; on disk and in sinks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from pbfl_flwr.config import Settings
from pbfl_flwr.data import check_data, load_pool
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server.early_stopping import Score, score_of
from pbfl_flwr.flower.server.roster import Member
from pbfl_flwr.flower.storage import checkpoint
from pbfl_flwr.flower.storage.atomic_files import UnsavedState, flush_directory
from pbfl_flwr.flower.storage.history import OTHER_CONFIGURATION, Dealt, RunDirectory, RunRefused
from pbfl_flwr.flower.storage.result_hash import result_hash
from pbfl_flwr.methods import build_method
from pbfl_flwr.payloads import Payload
from pbfl_flwr.prototypes.attacks import malicious
from pbfl_flwr.sinks import Sinks
from pbfl_flwr.task import Task


class Recorder:
    """Writes one run.

    Args:
        run: its directory.
        settings: the run configuration.
        headline: the predictor by whose accuracy one state is better than another.
    """

    def __init__(self, run: RunDirectory, settings: Settings, headline: str) -> None:
        self.run, self._settings, self._headline = run, settings, headline
        self._fingerprint = settings.fingerprint()
        self._best: Score = (False, -1.0)
        self._last = settings.run.num_server_rounds
        self._experiment = ""  # until the run has begun
        self._sinks: Sinks | None = None
        self._warnings: list[str] = []

    def previous(self) -> dict[str, Any] | None:
        """Return run.json of the run that is to go on, None for a new one; from here on the directory is this run's.

        Raises:
            RunRefused: if it was made with another configuration, or if a new one finds a run.
            PbflError: if there is none to go on with.
        """
        if not self._settings.run.resume:
            self.run.begin_locked()
            self.run.forget_error()
            return None
        about = self.run.read()
        self._experiment = str(about["experiment"])
        self.run.check_states()
        # The checkpoint says so too, but there may be none yet while clients have already trained.
        if not str(about["experiment"]).startswith(f"{self._fingerprint}-"):
            raise RunRefused(OTHER_CONFIGURATION.format(self.run.path))
        state_dir, kept = self._settings.run.state_dir, about["configuration"].get("state-dir", "")
        if state_dir != kept:  # it changes no result while the clients find in it what they left
            raise RunRefused(
                f"state-dir = '{state_dir}': run-dir = '{self.run.path}' was made with '{kept}', where its clients' "
                "state is"
            )
        self.run.forget_error()
        return about

    def begin(self, facts: Mapping[str, Any], members: Iterable[Member]) -> None:
        """Write down a new run before its first round, and in a simulation who holds what; run.json last, as its seal.

        Raises:
            PbflError: if the directory holds a run already, or a sink cannot be opened.
        """
        known = list(members)
        attack = {"malicious": list(malicious(self._settings))} if self._settings.run.attack else {}
        self.run.begin_locked()
        if all(member.simulated and member.configured_data for member in known):
            self.run.write_partition(_dealt(self._settings, known))
        self._experiment = str(facts["experiment"])
        self.run.start(self._settings.as_dict(), {**facts, **attack, "clients": _listed(known)})
        self._open_sinks()

    def joined(self, members: Iterable[Member], labels: Sequence[str]) -> None:
        """Write down who takes part, before those who have joined are asked anything.

        Args:
            members: all.
            labels: of those who have joined now.

        Raises:
            UnsavedState: if the system refuses it.
        """
        self.run.update_clients(_listed(members), labels)

    def resume(
        self, kind: type[Payload], task: Task, num_rounds: int
    ) -> tuple[Payload, int, list[dict[str, Any]]] | None:
        """Return (state, finished rounds, history) of a run that goes on, None if no round was finished.

        Args:
            kind: of the method's state.
            task: what all clients agree on.
            num_rounds: how far it is to go.

        Raises:
            RunRefused: if the checkpoint is of another configuration, or has more rounds already, or if a simulation
                would deal other samples than it began with.
            PbflError: if it is damaged.
        """
        data, began = self._settings.data, self.run.data()
        if began is not None and began != load_pool(data).fingerprint():
            raise RunRefused(
                f"data-dir = '{data.data_dir}': the samples of dataset = '{data.dataset}' are not those with which "
                f"run-dir = '{self.run.path}' began"
            )
        resumed = checkpoint.resume(self.run, kind, task, self._fingerprint)
        done = resumed[1] if resumed else 0
        if done > num_rounds:
            raise RunRefused(
                f"num-server-rounds = {num_rounds}: the run has {done} rounds already; allowed is from there"
            )
        self.run.unseal()
        self.run.resume(self._settings.as_dict())
        self._open_sinks()
        if resumed is None:
            return None
        history = self.run.rounds()
        self._best = max(
            (score for line in history for score, _ in self._scores(line)), default=(False, -1.0)
        )
        log(INFO, "resumed after round %s", done)
        return *resumed, history

    def add(
        self,
        line: Mapping[str, Any],
        clients: Mapping[str, Any],
        state: Payload,
        scored: Payload,
        broadcast: Payload,
    ) -> None:
        """Write down a finished round; it is on the disk when this returns.

        Args:
            line: of rounds.jsonl.
            clients: of clients.jsonl.
            state: after the round.
            scored: with which the clients were scored in it.
            broadcast: what clients get next, for others to read.

        Raises:
            UnsavedState: if the system refuses it.
        """
        number = int(line["round"])
        self._flush_states()
        self.run.add_round(line, clients)
        for score, final in self._scores(line):
            if score > self._best:
                self._best = score
                best, after = (state, number) if final else (scored, number - 1)
                checkpoint.save_best(self.run, best, after, score[1], self._headline)
        checkpoint.save(self.run, state, broadcast, number, self._fingerprint)
        if self._sinks is not None:
            self._warn(self._sinks.log(line))

    def mark_end(self, after: int) -> None:
        """Write down that patience ends the run after this round.

        Raises:
            UnsavedState: if the system refuses it.
        """
        self._last = after
        self.run.mark_end(after)

    def add_newcomers(self, line: Mapping[str, Any]) -> None:
        """Keep a round of the clients that came after the last one.

        Raises:
            UnsavedState: if the system refuses it.
        """
        self._flush_states()
        self.run.add_newcomers(line)
        if self._sinks is not None:
            self._warn(self._sinks.log_newcomers(line))

    def _flush_states(self) -> None:
        """Have what simulated clients saved in this round outlast a power cut; there is nothing of others here.

        Raises:
            UnsavedState: if the system refuses it.
        """
        root = Path(self._settings.run.state_dir or self.run.path / "clients")
        for folder in root.glob(f"{self._experiment}*"):  # those of new clients, too
            try:
                flush_directory(folder)
            except OSError as error:
                raise UnsavedState(f"{folder} may not outlast a power cut ({error.strerror})") from None

    def warnings(self) -> list[str]:
        """Return what went wrong in sinks since the last call."""
        said, self._warnings = self._warnings, []
        return said

    def close(self) -> None:
        """Seal the run if it is finished, and let the sinks write what they still hold."""
        self._seal()
        if self._sinks is not None:
            self._warn(self._sinks.close())

    def _seal(self) -> None:
        run = self._settings.run
        rounds, newcomers = self._last, run.new_client_rounds if run.new_clients else 0
        try:
            if len(self.run.rounds()) >= rounds and len(self.run.newcomers(rounds)) >= newcomers:
                self.run.seal(found := result_hash(self.run, rounds))
                log(INFO, "result hash %s", found)
        except PbflError as error:  # the results are there all the same
            log(WARNING, "no result hash: %s", error)

    def _open_sinks(self) -> None:
        self._sinks = Sinks(self._settings.run.sinks, self.run.path, self.run.read())

    def _warn(self, warnings: list[str]) -> None:
        for warning in warnings:
            log(WARNING, "%s", warning)
        self._warnings += warnings

    def _scores(self, line: Mapping[str, Any]) -> list[tuple[Score, bool]]:
        """Return (score, whether of a last scoring) of a round."""
        entries = ((line, False), (line.get("final", {}), True))
        scores = [(score_of(entry, self._headline), final) for entry, final in entries]
        return [(score, final) for score, final in scores if score is not None]


def _listed(members: Iterable[Member]) -> list[dict[str, Any]]:
    return [{**asdict(member), "node": str(member.node)} for member in members]


def _dealt(settings: Settings, members: Sequence[Member]) -> Dealt:
    """Return what follows from the partition of a simulation alone; the scores leave malicious clients out."""
    partition, pool = check_data(settings.data, settings.run.num_clients), load_pool(settings.data)
    taking, liars = settings.run.participants, malicious(settings)
    honest = [split for client, split in enumerate(partition.splits[:taking]) if client not in liars]
    majority, of_newcomers = (
        replace(partition, splits=tuple(splits)).majority(pool.labels)
        for splits in (honest, partition.splits[taking:])
    )
    held = (partition.counts[:taking] > 0).sum(axis=1).tolist()
    parameters = [member.parameters for member in members[:taking]]
    return Dealt(
        counts=partition.counts.tolist(),
        notes=list(partition.notes),
        majority=majority,
        newcomer_majority=of_newcomers,
        paper_scalars=build_method(settings).paper_scalars(members[0].task, held, parameters),
        data=pool.fingerprint(),
    )
