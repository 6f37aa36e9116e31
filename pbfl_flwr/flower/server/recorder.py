"""Writes a run's configuration, rounds, checkpoints and best state to its directory, to the sinks and to the log."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from pbfl_flwr import calls
from pbfl_flwr.config import CHANGEABLE, Settings, completed, relevant
from pbfl_flwr.data import LoadedData, same_deal
from pbfl_flwr.errors import PbflError, printable
from pbfl_flwr.flower.code_version import code_version
from pbfl_flwr.flower.messages.identity import dealt_otherwise
from pbfl_flwr.flower.server.replies import Replies
from pbfl_flwr.flower.server.roster import NO_NODE
from pbfl_flwr.flower.server.rounds import FinishedRound
from pbfl_flwr.flower.server.schedule import schedule_of
from pbfl_flwr.method import Method, resolved_moment, settings_in
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.payloads import Payload, Serializable
from pbfl_flwr.runs import checkpoint
from pbfl_flwr.runs.directory import ERROR, RESULT, RunDirectory, RunRefused, installed_versions
from pbfl_flwr.runs.early_stopping import Score, all_scores, best
from pbfl_flwr.runs.records import (
    Change,
    ClientRecord,
    ClientsRecord,
    PartitionRecord,
    RoundRecord,
    RunRecord,
)
from pbfl_flwr.runs.result_hash import result_hash
from pbfl_flwr.sinks import Ending, Sinks
from pbfl_flwr.task import Task
from pbfl_flwr.util.atomic_files import UnsavedState, flush_directory
from pbfl_flwr.util.source_hash import check_unedited, code_hashes

# Files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumed:
    """What a run to resume holds.

    Attributes:
        state: of the server after its last finished round.
        done: number of finished rounds.
        history, clients: the lines of rounds.jsonl and clients.jsonl.
    """

    state: Serializable
    done: int
    history: list[RoundRecord]
    clients: list[ClientsRecord]


class Recorder:
    """What is written of a run; this one writes nothing."""

    def configure(self, settings: Settings, method: Method[Any, Any, Any], primary_predictor: str) -> None:
        """Set the settings of the run; a run that has started goes on with other values of CHANGEABLE keys."""

    def locked(self) -> AbstractContextManager[object]:
        """Return a context in which no other process may write the run."""
        return nullcontext()

    def set_waiting(self, line: str) -> None:
        """Publish what the server waits for; an empty line means nothing."""

    def previous(self) -> RunRecord | None:
        """Return the record of the run to resume, None for a new run."""
        return None

    def begin(self, experiment: str, moment: str, clients: Iterable[ClientRecord]) -> None:
        """Write a new run before its first round."""

    def resume(self, kind: type[Serializable], task: Task) -> Resumed | None:
        """Return what the run to resume holds, None if no round was finished."""
        return None

    def reopen(self, done: int, clients: Iterable[ClientRecord]) -> None:
        """Record with what a run is resumed after ``done`` rounds, and open it."""

    def go_on(self, done: int) -> None:
        """Open a run again, without what is left of a round after the ``done`` finished ones."""

    def add_clients(self, everyone: Iterable[ClientRecord], joined: list[str]) -> None:
        """Write which clients have just joined: in run.json, since an unfinished round has no line."""

    def add(self, finished: FinishedRound, scored: Serializable, broadcast: Payload) -> None:
        """Write a finished round; it is on disk when this returns.

        ``scored`` is the state that clients were sent, and scored; ``broadcast`` is the next one, for other programs to
        read.
        """

    def log_in_sinks(self, record: RoundRecord) -> None:
        """Log a round in the sinks, which may take long."""

    def end_early(self, done: int) -> None:
        """Write that the run ends before its last configured round."""

    def close(self, ending: Ending) -> None:
        """Write the result hash if the run is finished, and close the sinks."""


def recorder_of(directory: RunDirectory | None, loaded: LoadedData) -> Recorder:
    """Return what writes a run into a directory, or writes nothing."""
    return Recorder() if directory is None else RunRecorder(directory, loaded)


class RunRecorder(Recorder):
    """Writes one run into its directory.

    By the accuracy of ``primary_predictor`` one state is better than another.
    """

    def __init__(self, directory: RunDirectory, loaded: LoadedData) -> None:
        self.directory, self._loaded = directory, loaded
        self._scores: dict[tuple[int, bool], Score] = {}  # of all rounds, see all_scores
        self._written = 0  # number of the last round in the histories
        self._experiment = ""  # of the run to resume, or once the run has begun
        self._sinks: Sinks | None = None  # while the run is open
        self._lock: os.stat_result | None = None  # the file that is locked

    def configure(self, settings: Settings, method: Method[Any, Any, Any], primary_predictor: str) -> None:
        """Set the settings of the run; a run that has started goes on with other values of CHANGEABLE keys."""
        self._settings, self._method, self._primary_predictor = settings, method, primary_predictor
        if self._sinks is not None:
            self._record_settings()

    def _record_settings(self, **others: Any) -> None:
        """Record the settings with which a run goes on, and other fields of run.json."""
        self.directory.remove(RESULT)
        now = Change(
            from_round=self.directory.finished_rounds() + 1,
            method=settings_in(self._method),  # may depend on the number of rounds
            code=self._code(),
            versions=_versions(),
        )
        record = self.directory.record()
        before = record.before(now.from_round).versions
        if changed := [
            f"{name} {now.versions.get(name, 'not installed')}, before {then}"
            for name, then in before.items()
            if now.versions.get(name) != then
        ]:
            log(WARNING, "from round %s on with %s; run.json says so", now.from_round, "; ".join(changed))
        configuration, continued = self._settings.as_dict(), record.continued(now)
        self.directory.update(configuration=configuration, ended_after=None, **continued, **others)

    def _code(self) -> dict[str, str]:
        check_unedited(self._settings.code)
        return code_hashes(self._settings.code)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Return a context in which no other process may write the run."""
        with self.directory.locked() as self._lock:
            yield

    @property
    def _is_in_place(self) -> bool:
        return self._lock is None or self.directory.is_in_place(self._lock)

    def set_waiting(self, line: str) -> None:
        """Publish what the server waits for; an empty line means nothing."""
        if self._is_in_place:
            self.directory.set_waiting(line)

    def previous(self) -> RunRecord | None:
        """Return run.json of the run to resume, None for a new run; the directory then belongs to this run.

        Raises:
            RunRefused: if it was made with another configuration, or if a new run finds an existing one.
            PbflError: if there is no run to resume.
        """
        if not self._settings.run.resume:
            self.directory.check_new()
            self.directory.remove(ERROR)
            return None
        previous = self.directory.record()
        self._experiment = previous.experiment
        self.directory.check_states(self._settings.run.state_dir)  # which is not compared below
        then, now = relevant(completed(previous.configuration, SECTIONS)), self._settings.relevant()
        if odd := [f"{key} = {value}" for key, value in then.items() if now.get(key) != value]:
            raise RunRefused(
                f"run-dir = '{self.directory.path}' was made with another configuration, {', '.join(odd)}; only "
                f"{', '.join(CHANGEABLE)} may differ when a run is resumed"
            )
        if (edited := previous.edited) and not self._settings.run.new_code:
            raise RunRefused(
                f"run-dir = '{self.directory.path}': {', '.join(edited)} was edited since; new-code = true goes on "
                "with it, and run.json says from which round on"
            )
        self.directory.remove(ERROR)
        return previous

    def begin(self, experiment: str, moment: str, clients: Iterable[ClientRecord]) -> None:
        """Write a new run's files before its first round, run.json last; in a simulation also the partition.

        Raises:
            PbflError: if the directory already holds a run, code was edited since it was imported, or a function gave
                the server other samples than the clients.
        """
        members, code = list(clients), self._code()
        self.directory.check_new()
        if all(client.simulated and client.configured_data for client in members):
            self.directory.write_partition(self._partition_record(members))
        self._experiment = experiment
        self.directory.start(
            configuration=self._settings.as_dict(),
            method=settings_in(self._method),
            code=code,
            versions=_versions(),
            experiment=experiment,
            primary_predictor=self._primary_predictor,
            moment=moment,
            clients=members,
        )
        self._open_sinks()

    def resume(self, kind: type[Serializable], task: Task) -> Resumed | None:
        """Return what the run to resume holds, None if no round was finished.

        Raises:
            RunRefused: if the checkpoint is of another run or already has more rounds, or if a simulation's
                dataset has changed.
            PbflError: if the checkpoint is damaged.
        """
        data, fingerprint = self._settings.data, self.directory.partition().data
        deal = ""  # which is compared in the handshake
        if not self._loaded.is_of_run(data, self._settings.run.num_clients, fingerprint, deal):
            raise RunRefused(
                f"data-dir = '{data.data_dir}': the samples of dataset = '{data.dataset}' are not those with which "
                f"run-dir = '{self.directory.path}' began"
            )
        resumed = checkpoint.resume(self.directory, kind, task, self._configuration)
        if resumed is None:
            return None
        done = resumed[1]
        need_all_rounds(self._settings.run.num_server_rounds, done)
        history = self.directory.round_records()
        self._scores, self._written = all_scores(history, self._primary_predictor), done
        return Resumed(*resumed, history, [*self.directory.client_records()])

    def reopen(self, done: int, clients: Iterable[ClientRecord]) -> None:
        """Record with what a run is resumed after ``done`` rounds, and open it."""
        self._record_settings(clients=self._present(clients))
        self._open_sinks()
        if done:
            log(INFO, "resumed after round %s", done)

    def go_on(self, done: int) -> None:
        """Open a run again, without what is left of a round after the ``done`` finished ones.

        Raises:
            RunRefused: if it has other rounds, as after an interruption just before one counted here or if another
                server made some, or if it is another run.
            DamagedState: if its histories are damaged.
            PbflError: if it is gone.
        """
        if self.directory.record().experiment != self._experiment:
            raise RunRefused(
                f"run-dir = '{self.directory.path}' holds another run now, in the place of this strategy's"
            )
        if (present := self.directory.finished_rounds()) != done:
            raise RunRefused(
                f"run-dir = '{self.directory.path}' has {present} rounds, this strategy {done}; make another one with "
                "resume = true"
            )

        self.directory.remove(ERROR)
        self.directory.truncate(done)
        if self._sinks is None:
            self._open_sinks()

    def add_clients(self, everyone: Iterable[ClientRecord], joined: list[str]) -> None:
        """Write which clients have just joined: in run.json, since an unfinished round has no line.

        Raises:
            RunRefused: if the directory was moved or removed; another run may be in its place.
            UnsavedState: if writing fails.
        """
        self._need_place()
        joined = [*self.directory.record().joined, *joined]
        self.directory.update(clients=self._present(everyone), joined=joined)

    def _need_place(self) -> None:
        if not self._is_in_place:
            raise RunRefused(
                f"run-dir = '{self.directory.path}' was moved or removed while the run was writing it; the run ended "
                f"before round {self._written + 1} counted"
            )

    def _present(self, clients: Iterable[ClientRecord]) -> list[ClientRecord]:
        """Return the clients as they are now, in ascending order; those that have not reconnected as they were."""
        known = {client.client: client for client in self.directory.record().clients}
        present = {client.client: client for client in clients if client.node != NO_NODE}
        return [client for _, client in sorted((known | present).items())]

    def end_early(self, done: int) -> None:
        """Write that the run ends before its last configured round; not into another that has taken its place."""
        if self._is_in_place:
            self.directory.update(ended_after=done)

    def add(self, finished: FinishedRound, scored: Serializable, broadcast: Payload) -> None:
        """Write a finished round; it is on disk when this returns.

        ``scored`` is the state that clients were sent, and scored; ``broadcast`` is the next one, for other programs to
        read.

        Raises:
            UnsavedState: if writing fails; the round does not count then.
            RunRefused: if the directory has the round, as after an interruption just before it counted here, or if it
                was moved or removed; another run may be in its place.
        """
        record, number = finished.record, finished.record.round
        self._need_place()
        if number <= self._written:
            raise RunRefused(f"run-dir = '{self.directory.path}' has round {number} already; resume the run")
        self.set_waiting("")
        self._flush_states()
        scores = self._due_scores() | all_scores([record], self._primary_predictor)
        better = None
        if (place := best(scores)) is not None and place[0] == number:
            state, after = (finished.state, number) if place[1] else (scored, number - 1)
            better = checkpoint.BestState(state, after, scores[place].accuracy, self._primary_predictor)
        checkpoint.stage(self.directory, finished.state, broadcast, number, self._configuration, better)
        self.directory.add_round(record, finished.clients)  # from here on the round counts
        self._scores, self._written = scores, number
        try:
            self.directory.settle(number)
        except UnsavedState as error:  # the next round tries again
            log(
                WARNING,
                "%s; the files of round %s are still in %s",
                error,
                number,
                self.directory.staged(number),
            )

    def _due_scores(self) -> dict[tuple[int, bool], Score]:
        """Return the scores so far without those of a shorter run's last round, which are in no table now."""
        moment = resolved_moment(self._settings.evaluation, self._method)
        schedule = schedule_of(self._settings, moment)
        return {
            (number, final): score
            for (number, final), score in self._scores.items()
            if not final and schedule.is_scored(number)
        }

    def log_in_sinks(self, record: RoundRecord) -> None:
        """Log a round in the sinks, which may take long."""
        if self._sinks is not None:
            self._warn(self._sinks.log(record))

    def _flush_states(self) -> None:
        """Flush the state files that simulated clients saved in this round; devices flush their own.

        Raises:
            UnsavedState: if flushing fails.
        """
        root = Path(self._settings.run.state_dir or self.directory.path / "clients")
        if (folder := root / self._experiment).is_dir():
            try:
                flush_directory(folder)
            except OSError as error:
                raise UnsavedState(f"{folder} may be lost at a power failure ({error.strerror})") from None

    def close(self, ending: Ending) -> None:
        """Write the result hash if the run is finished, and close the sinks.

        Raises:
            PbflError: if a finished run's hash cannot be written, so that resuming has to do it.
        """
        self.set_waiting("")
        unwritten: PbflError | None = None
        try:
            if self._is_in_place:
                self._finish()
        except PbflError as error:
            unwritten = error
        if self._sinks is not None:
            self._warn(self._sinks.close(ending))
            self._sinks = None
        if unwritten is not None and ending == "finished":  # otherwise the run ends with another error
            raise unwritten

    def _finish(self) -> None:
        """Put the last round's files in place, and write the result hash if all rounds are made."""
        rounds, done = self.directory.record().last_round, self.directory.finished_rounds()
        self.directory.settle(done)
        if done >= rounds:
            result = result_hash(self.directory, rounds)
            self.directory.write_line(RESULT, result)
            log(INFO, "result hash %s", result)

    @property
    def _configuration(self) -> str:
        """The hash of the configuration with which the run began, the first part of the experiment's name."""
        return self._experiment.partition("-")[0]

    def _partition_record(self, clients: Sequence[ClientRecord]) -> PartitionRecord:
        """Return the facts that depend only on a simulation's partition."""
        settings = self._settings
        partition = self._loaded.partition(settings.data, settings.run.num_clients)
        pool = self._loaded.pool(settings.data)
        if not same_deal(clients[0].deal, self._loaded.deal(settings.data, settings.run.num_clients)):
            raise PbflError(dealt_otherwise("the server", "the clients"))
        class_counts = (partition.counts > 0).sum(axis=1).tolist()
        return PartitionRecord(
            counts=partition.counts.tolist(),
            warnings=list(partition.notes),
            majority=partition.majority(pool.labels),
            paper_scalars=calls.paper_scalars(self._method, clients[0].task, class_counts),
            data=pool.fingerprint,
        )

    def _open_sinks(self) -> None:
        self._sinks = Sinks(self._settings.run.sinks, self.directory.path, self.directory.record())
        self._warn(self._sinks.left_out)

    def _warn(self, warnings: list[str]) -> None:
        """Log warnings of sinks and add them to run.json: a round's record is written before its sinks are."""
        for warning in warnings:
            log(WARNING, "%s", warning)
        if not warnings or not self._is_in_place:
            return
        after = f"after round {self._written}: " if self._written else ""
        with suppress(PbflError):  # it costs no run either that the disk is full, and the log has them
            known = self.directory.record().warnings
            self.directory.update(warnings=[*known, *(f"{after}{warning}" for warning in warnings)])


def need_all_rounds(num_rounds: int, done: int) -> None:
    """Check that a run goes on with at least as many rounds as are done.

    Raises:
        RunRefused: if not.
    """
    if done > num_rounds:
        raise RunRefused(
            f"num-server-rounds = {num_rounds}: the run has {done} rounds already; must be {done} or more"
        )


# Log --------------------------------------------------------------------------------------------------------


def log_start(settings: Settings, method: Method[Any, Any, Any]) -> None:
    """Log the configuration in one line, and warnings about it."""
    run, models = settings.run, settings.models
    clients = f"{run.min_clients} to {run.num_clients}" if run.min_clients else run.num_clients
    log(INFO, "%s: %s clients, %s, d=%s", method.name, clients, models.models, models.feature_dim)
    warnings = [
        *settings.training.config_warnings(),
        *calls.warnings(method, run.num_server_rounds),
    ]
    for warning in warnings:
        log(WARNING, "%s", warning)


def log_declared(settings: Settings, clients: Iterable[ClientRecord]) -> None:
    """Log the architectures that clients declare, if any is none of the configured ones."""
    declared = Counter(client.architecture for client in clients)
    if declared.keys() - {str(name) for name in architectures(settings.models.models, settings.code)}:
        log(
            INFO,
            "clients declare %s",
            ", ".join(f"{printable(name)} x{n}" for name, n in sorted(declared.items())),
        )


def log_failures(replies: Replies) -> None:
    """Log which clients failed."""
    phase = replies.phase
    for client, reason in replies.failures.items():
        log(WARNING, "round %s: client %s failed: %s", phase.number, phase.client_label(client), reason)


def log_record(record: RoundRecord, primary_predictor: str, num_rounds: int, num_clients: int) -> None:
    """Log the warnings and the accuracy of a finished round of ``num_rounds``, and if it is not over all clients."""
    for warning in record.warnings:
        log(WARNING, "round %s: %s", record.round, warning)
    accuracy = record.latest.accuracy.get(primary_predictor)
    few = accuracy is not None and accuracy.clients < num_clients
    log(
        INFO,
        "round %s/%s: accuracy %s (%s%s), %s clients trained, %.1f s",
        record.round,
        num_rounds,
        f"{100 * accuracy.weighted:.1f} %" if accuracy else "not scored yet",
        primary_predictor,
        f", over {accuracy.clients} of {num_clients}" if accuracy and few else "",
        len(record.trained),
        record.seconds.total,
    )


def _versions() -> dict[str, str]:
    """Return the versions of what makes the rounds, of this package with a hash of its code."""
    return installed_versions() | {"pbfl-flwr": code_version()}
