"""Writes a run's configuration, rounds, checkpoints and best state to its directory and to the sinks."""

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
from pbfl_flwr.methods import build_method
from pbfl_flwr.payloads import Payload
from pbfl_flwr.prototypes.attacks import malicious
from pbfl_flwr.runs import checkpoint
from pbfl_flwr.runs.directory import OTHER_CONFIGURATION, PartitionFacts, RunDirectory, RunRefused
from pbfl_flwr.runs.result_hash import result_hash
from pbfl_flwr.sinks import Sinks
from pbfl_flwr.task import Task
from pbfl_flwr.util.atomic_files import UnsavedState, flush_directory


class Recorder:
    """Writes one run.

    Args:
        run: its directory.
        settings: the run configuration.
        primary_predictor: the predictor by whose accuracy one state is better than another.
    """

    def __init__(self, run: RunDirectory, settings: Settings, primary_predictor: str) -> None:
        self.run, self._settings, self._headline = run, settings, primary_predictor
        self._fingerprint = settings.fingerprint()
        self._best: Score = (False, -1.0)
        self._last_round = settings.run.num_server_rounds
        self._experiment = ""  # until the run has started
        self._sinks: Sinks | None = None
        self._warnings: list[str] = []

    def previous(self) -> dict[str, Any] | None:
        """Return run.json of the run to resume, None for a new run; the directory then belongs to this run.

        Raises:
            RunRefused: if it was made with another configuration, or if a new run finds an existing one.
            PbflError: if there is no run to resume.
        """
        if not self._settings.run.resume:
            self.run.check_new()
            self.run.clear_error()
            return None
        about = self.run.read()
        self._experiment = str(about["experiment"])
        self.run.check_states()
        # The checkpoint is checked as well, but clients may have trained before the first one was written.
        if not str(about["experiment"]).startswith(f"{self._fingerprint}-"):
            raise RunRefused(OTHER_CONFIGURATION.format(self.run.path))
        state_dir, previous = self._settings.run.state_dir, about["configuration"].get("state-dir", "")
        if state_dir != previous:  # not part of the fingerprint, but clients would not find their state
            raise RunRefused(
                f"state-dir = '{state_dir}': run-dir = '{self.run.path}' was made with '{previous}', which holds its "
                "clients' state"
            )
        self.run.clear_error()
        return about

    def begin(self, facts: Mapping[str, Any], members: Iterable[Member]) -> None:
        """Write a new run's files before its first round, run.json last; in a simulation also the partition.

        Raises:
            PbflError: if the directory already holds a run, or a sink cannot be opened.
        """
        clients = list(members)
        malicious_clients = malicious(self._settings)
        attack = {"malicious": list(malicious_clients)} if malicious_clients else {}
        self.run.check_new()
        if all(member.simulated and member.configured_data for member in clients):
            self.run.write_partition(_partition_facts(self._settings, clients))
        self._experiment = str(facts["experiment"])
        self.run.start(self._settings.as_dict(), {**facts, **attack, "clients": _entries(clients)})
        self._open_sinks()

    def joined(self, members: Iterable[Member], labels: Sequence[str]) -> None:
        """Write the new list of clients, before the joined clients get a message.

        Args:
            members: all clients.
            labels: of the clients that have just joined.

        Raises:
            UnsavedState: if writing fails.
        """
        self.run.update_clients(_entries(members), labels)

    def resume(
        self, kind: type[Payload], task: Task, num_rounds: int
    ) -> tuple[Payload, int, list[dict[str, Any]]] | None:
        """Return (state, finished rounds, history) of the run to resume, None if no round was finished.

        Args:
            kind: type of the method's state.
            task: what all clients agree on.
            num_rounds: total number of rounds.

        Raises:
            RunRefused: if the checkpoint is of another configuration or already has more rounds, or if a simulation's
                dataset has changed.
            PbflError: if the checkpoint is damaged.
        """
        data, fingerprint = self._settings.data, self.run.data()
        if fingerprint is not None and fingerprint != load_pool(data).fingerprint():
            raise RunRefused(
                f"data-dir = '{data.data_dir}': the samples of dataset = '{data.dataset}' are not those with which "
                f"run-dir = '{self.run.path}' began"
            )
        resumed = checkpoint.resume(self.run, kind, task, self._fingerprint)
        done = resumed[1] if resumed else 0
        if done > num_rounds:
            raise RunRefused(
                f"num-server-rounds = {num_rounds}: the run has {done} rounds already; allowed is {done} or more"
            )
        self.run.remove_result()
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
        """Write a finished round; it is on disk when this returns.

        Args:
            line: of rounds.jsonl.
            clients: line of clients.jsonl.
            state: after the round.
            scored: the state that clients evaluated in the round.
            broadcast: the next broadcast, for other programs to read.

        Raises:
            UnsavedState: if writing fails.
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

    def mark_early_stop(self, after: int) -> None:
        """Record that early stopping ends the run after this round.

        Raises:
            UnsavedState: if writing fails.
        """
        self._last_round = after
        self.run.mark_early_stop(after)

    def add_new_client_round(self, line: Mapping[str, Any]) -> None:
        """Write a round of the new clients.

        Raises:
            UnsavedState: if writing fails.
        """
        self._flush_states()
        self.run.add_new_client_round(line)
        if self._sinks is not None:
            self._warn(self._sinks.log_new_client_round(line))

    def _flush_states(self) -> None:
        """Flush the state files that simulated clients saved in this round; devices flush their own.

        Raises:
            UnsavedState: if flushing fails.
        """
        root = Path(self._settings.run.state_dir or self.run.path / "clients")
        for folder in root.glob(f"{self._experiment}*"):  # includes those of new clients
            try:
                flush_directory(folder)
            except OSError as error:
                raise UnsavedState(f"{folder} may be lost at a power failure ({error.strerror})") from None

    def warnings(self) -> list[str]:
        """Return the warnings of sinks since the last call."""
        found, self._warnings = self._warnings, []
        return found

    def close(self) -> None:
        """Write the result hash if the run is finished, and close the sinks."""
        self._seal()
        if self._sinks is not None:
            self._warn(self._sinks.close())

    def _seal(self) -> None:
        run = self._settings.run
        rounds, new_client_lines = self._last_round, run.new_client_rounds if run.new_clients else 0
        try:
            if (
                len(self.run.rounds()) >= rounds
                and len(self.run.new_client_lines(rounds)) >= new_client_lines
            ):
                self.run.write_result(found := result_hash(self.run, rounds))
                log(INFO, "result hash %s", found)
        except PbflError as error:  # the results are complete nevertheless
            log(WARNING, "no result hash: %s", error)

    def _open_sinks(self) -> None:
        self._sinks = Sinks(self._settings.run.sinks, self.run.path, self.run.read())

    def _warn(self, warnings: list[str]) -> None:
        for warning in warnings:
            log(WARNING, "%s", warning)
        self._warnings += warnings

    def _scores(self, line: Mapping[str, Any]) -> list[tuple[Score, bool]]:
        """Return the scores of a round, each with whether it is from the final scoring."""
        entries = ((line, False), (line.get("final", {}), True))
        scores = [(score_of(entry, self._headline), final) for entry, final in entries]
        return [(score, final) for score, final in scores if score is not None]


def _entries(members: Iterable[Member]) -> list[dict[str, Any]]:
    return [{**asdict(member), "node": str(member.node)} for member in members]


def _partition_facts(settings: Settings, members: Sequence[Member]) -> PartitionFacts:
    """Return the facts that depend only on a simulation's partition; scores leave out malicious clients."""
    partition, pool = check_data(settings.data, settings.run.num_clients), load_pool(settings.data)
    participants, malicious_clients = settings.run.participants, malicious(settings)
    honest = [
        split
        for client, split in enumerate(partition.splits[:participants])
        if client not in malicious_clients
    ]
    majority, new_client_majority = (
        replace(partition, splits=tuple(splits)).majority(pool.labels)
        for splits in (honest, partition.splits[participants:])
    )
    class_counts = (partition.counts[:participants] > 0).sum(axis=1).tolist()
    parameters = [member.parameters for member in members[:participants]]
    return PartitionFacts(
        counts=partition.counts.tolist(),
        notes=list(partition.notes),
        majority=majority,
        new_client_majority=new_client_majority,
        paper_scalars=build_method(settings).paper_scalars(members[0].task, class_counts, parameters),
        data=pool.fingerprint(),
    )
