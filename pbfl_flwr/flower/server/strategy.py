"""Every method as a Flower strategy: sample, broadcast, decode, aggregate, and report failures.

::

    start -> hello round (collect the clients, check that they are compatible) -> for every round:
             configure_train -> grid -> aggregate_train -> aggregate_fit(server_round, uploads)

One message makes a client train and evaluate; clients that do not train in a round are evaluated in the same phase.
``aggregate_fit`` needs neither grid nor nodes, so a unit test can call it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from pbfl_flwr.config import Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import classes_counted
from pbfl_flwr.flower.secagg.server import SecureRounds
from pbfl_flwr.flower.server import notes, run_log, stop_conditions
from pbfl_flwr.flower.server.availability import Availability
from pbfl_flwr.flower.server.early_stopping import best_round_line, early_stop_note, patience_exhausted
from pbfl_flwr.flower.server.instructions import Instructions
from pbfl_flwr.flower.server.new_clients import NewClientRounds, new_clients
from pbfl_flwr.flower.server.recorder import Recorder
from pbfl_flwr.flower.server.replies import Outcome, Phase, read
from pbfl_flwr.flower.server.roster import Roster
from pbfl_flwr.flower.server.round_records import client_columns, final_scores, round_line, updated_ages
from pbfl_flwr.flower.server.startup import collect_clients
from pbfl_flwr.flower.server.waiting import polling
from pbfl_flwr.method import Method, Moment, Round, resolved_moment
from pbfl_flwr.methods import build_method, check_method
from pbfl_flwr.payloads import Payload
from pbfl_flwr.prototypes.attacks import malicious
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.sinks import check
from pbfl_flwr.task import Task

MAX_REPEATS = 3  # of one round, because nodes became unreachable during it


class MethodStrategy(Strategy):
    """One method of METHODS as a Flower strategy.

    Args:
        settings: the run configuration.
        directory: where the run is written; None keeps everything in memory.
        method: by default the one named in the settings.

    Attributes:
        state: the method's state after the last finished round.
        history: the lines of rounds.jsonl, one dictionary per round.
        new_client_lines: the lines of new-clients.jsonl, for new clients after the last round.
    """

    def __init__(
        self, settings: Settings, directory: Path | None = None, method: Method[Any, Any, Any] | None = None
    ) -> None:
        self.settings = settings
        self.method = method or build_method(settings)
        check_method(settings, self.method)
        self.run = RunDirectory(directory) if directory else None
        self.state: Any = None
        self.history: list[dict[str, Any]] = []
        self.new_client_lines: list[dict[str, Any]] = []
        self.done = 0
        self.experiment = f"{settings.fingerprint()}-{uuid.uuid4().hex[:8]}"
        self.moment: Moment = resolved_moment(settings.evaluation, self.method)
        predictor = settings.evaluation.predictor
        self.primary_predictor = self.method.primary_predictor if predictor == "auto" else predictor
        self.task: Task | None = None
        self._secure = SecureRounds(settings, self.method) if settings.privacy.secure_aggregation else None
        self._recorder = Recorder(self.run, settings, self.primary_predictor) if self.run else None
        self._availability: Availability | None = None
        self._phase: Phase | None = None
        self._scored_state: Any = None  # the state that clients evaluated in this round
        self._client_columns: dict[str, Any] = {}  # this round's line of clients.jsonl
        self._participations: dict[int, int] = {}  # client -> rounds trained in, as last reported
        self._round_started = 0.0
        self._num_rounds = settings.run.num_server_rounds

    @property
    def roster(self) -> Roster | None:
        """All clients and their nodes; None before the hello round."""
        return self._availability.roster if self._availability else None

    @property
    def participants(self) -> Roster:
        """The clients of the regular rounds: all but the new clients, which train afterwards."""
        assert self.roster is not None, "prepare comes first"
        return self.roster.without(new_clients(self.settings))

    @property
    def _instructions(self) -> Instructions:
        malicious_clients = frozenset(malicious(self.settings))
        finished = self.history[: self.done]  # a repeated round already has a line, too
        best = best_round_line(finished, self.primary_predictor) if self.settings.run.keep_best else None
        number = 0 if best is None else int(best["round"])
        dtype = self.settings.prototypes.wire_dtype
        return Instructions(self.method, self.experiment, dtype, malicious_clients, number)

    # Before the first round ---------------------------------------------------------------------------------

    def summary(self) -> None:
        """Log the configuration in one line, and warnings about it."""
        run_log.log_start(self.settings, self.method, self._num_rounds)

    def prepare(self, grid: Grid) -> None:
        """Run the hello round, check compatibility, start or resume the run directory.

        Raises:
            PbflError: before any training, naming everything that is incompatible.
        """
        run = self.settings.run
        previous = self._recorder.previous() if self._recorder else None
        check(run.sinks)
        if run.sinks and self.run is None:
            raise PbflError(f"sinks = '{run.sinks}': they need a run directory, this strategy has none")
        if previous is not None:
            self.experiment = str(previous["experiment"])
        recorded = None if previous is None else previous["clients"]
        self._availability = collect_clients(
            grid, run, self.experiment, self._check_roster, recorded, self._set_waiting
        )
        self._set_waiting("")
        roster = self._availability.roster
        self._check_roster(roster)
        run_log.log_experimental(self.settings)
        self.begin(roster.task)
        if self._recorder is None:
            return
        if previous is None:
            facts = {
                "experiment": self.experiment,
                "primary_predictor": self.primary_predictor,
                "moment": self.moment,
            }
            self._recorder.begin(facts, roster.members.values())
        elif resumed := self._recorder.resume(self.method.state, roster.task, self._num_rounds):
            state, self.done, self.history = resumed
            self.state = self.method.resumed(state)
            for columns in self._recorder.run.client_rounds():
                self._record_participations(columns)
        if previous is not None:
            noted = {label for line in self.history for label in line.get("joined", [])}
            joined = previous.get("joined", [])
            self._availability.note_joined([label for label in joined if label not in noted])

    def _check_roster(self, roster: Roster) -> None:
        self.method.check(roster.task, roster.architectures)

    def begin(self, task: Task) -> None:
        """Set the method's initial state; :meth:`prepare` calls this, and so does a test without a grid."""
        self.task = task
        self.state = self.method.init(task, self.settings.run.seed)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation.

        Args:
            grid: Flower's.
            initial_arrays: unused; the initial state is the method's.
            num_rounds: total number of rounds; by default num-server-rounds. A resumed run makes the remaining ones.
            timeout: seconds to wait for a round's replies; by default round-timeout.
            train_config: unused; messages carry the round and the experiment.
            evaluate_config: unused, likewise.
            evaluate_fn: called after each round with the broadcast arrays.

        Raises:
            PbflError: before round 1, if configuration and clients are incompatible.
            RunEnded: if fewer than min-replies clients answered a round, or a simulation worker died.
        """
        self._num_rounds = num_rounds or self.settings.run.num_server_rounds
        self.summary()
        timeout = timeout or self.settings.run.round_timeout
        grid = polling(grid, lambda node: (self.roster or Roster({})).node_label(node), self._set_waiting)
        with nullcontext() if self.run is None else self.run.locked():
            self._set_waiting("")  # a killed server may have left a line
            if self._availability is None:
                self.prepare(grid)
            try:
                return self._rounds(grid, timeout, evaluate_fn)
            except PbflError:
                if self.history and self.history[-1]["round"] > self.done:
                    self.state = self._scored_state  # the round will be repeated: undo its aggregation
                raise
            finally:
                self._set_waiting("")
                if self._recorder is not None:
                    self._recorder.close()

    def _set_waiting(self, line: str) -> None:
        """Publish in the run directory what the server waits for; an empty line means nothing."""
        if self.run is not None:
            self.run.set_waiting(line)

    def _rounds(
        self,
        grid: Grid,
        timeout: float,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> Result:
        assert self._availability is not None, "prepare comes first"
        availability, result = self._availability, Result()
        nothing, unused = ArrayRecord(), ConfigRecord()
        repeats = 0  # of the current round
        self._end_early()  # a resumed run may already have exhausted its patience
        if self.done >= self._num_rounds:
            log(INFO, "nothing to do: %s of %s rounds are already finished", self.done, self._num_rounds)
        while self.done < self._num_rounds:
            server_round = self.done + 1
            messages = list(self.configure_train(server_round, nothing, unused, grid))
            replies = list(self._exchange(grid, messages, timeout))
            availability.collect(grid)
            try:
                arrays, metrics = self.aggregate_train(server_round, replies)
            except stop_conditions.NodesUnreachable as error:
                repeats += 1
                if repeats > MAX_REPEATS or self._secure is not None:  # a SecAgg+ mask is valid for one sum
                    raise
                run = self.settings.run
                log(WARNING, "%s. Waiting up to %.0f s for nodes", error, run.join_timeout)
                if not availability.wait_for_nodes(
                    grid, len(messages), run.min_replies, run.join_timeout, self._set_waiting
                ):
                    raise
                availability.undo_round(self.history[-1].get("joined", []))
                continue
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            self._end_early()
            messages = list(self.configure_evaluate(server_round, nothing, unused, grid))
            if messages:
                scores = self.aggregate_evaluate(
                    server_round, grid.send_and_receive(messages, timeout=timeout)
                )
                if scores is not None:
                    result.evaluate_metrics_clientapp[server_round] = scores
            self._finish_round(server_round)
            repeats = 0
            if evaluate_fn and (found := evaluate_fn(server_round, result.arrays)) is not None:
                result.evaluate_metrics_serverapp[server_round] = found
        run = self.settings.run
        early = self.done < run.num_server_rounds and patience_exhausted(
            self.history, self.primary_predictor, run.patience
        )
        if self._recorder is not None and early:  # not if the caller requested fewer rounds
            self._recorder.mark_early_stop(self.done)
        self._train_new_clients(grid, timeout)
        return result

    def _end_early(self) -> None:
        """End the run after the last round of the history if patience is exhausted."""
        if patience_exhausted(self.history, self.primary_predictor, self.settings.run.patience) is not None:
            self._num_rounds = self.history[-1]["round"]

    def _train_new_clients(self, grid: Grid, timeout: float) -> None:
        """Let the new clients train with the final state; rounds of theirs that are already recorded are kept."""
        if not self.settings.run.new_clients:
            return
        assert self._availability is not None
        assert self.task is not None
        after = self._num_rounds
        self.new_client_lines = self.run.new_client_lines(after) if self.run else []
        new_client_lines = NewClientRounds(
            self.settings,
            self._instructions,
            self._availability,
            self.task,
            self.moment,
            self.primary_predictor,
            after,
        )
        for line in new_client_lines.rounds(grid, self.state, len(self.new_client_lines), timeout):
            new_client_lines.log_and_check(line)
            self.new_client_lines.append(line)
            if self._recorder is not None:
                self._recorder.add_new_client_round(line)
                for warning in self._recorder.warnings():
                    log(WARNING, "%s", warning)

    # A round ------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return training messages for the sampled clients and evaluation messages for (some of) the others."""
        if self._availability is None:
            self.prepare(grid)
        assert self._availability is not None
        self._round_started = time.perf_counter()
        run = self.settings.run
        self._scored_state = self.state
        absent = self._absent(grid, server_round)
        roster = self.participants
        training = set(roster.sample(run.fraction_train, run.seed, server_round, absent))
        evaluating = set(roster.scored(run.fraction_evaluate, run.seed, server_round, training)) - set(absent)
        kinds = {**dict.fromkeys(training, "train"), **dict.fromkeys(evaluating, "evaluate")}
        return self._messages(kinds, server_round, absent)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return evaluation messages for all clients after the last round if scoring is before training, else none."""
        if self.moment != "before" or server_round != self._num_rounds or self._availability is None:
            return []
        absent = self._absent(grid, server_round)
        kinds = {client: "evaluate" for client in self.participants.members if client not in absent}
        return self._messages(kinds, server_round, absent)

    def _absent(self, grid: Grid, server_round: int) -> dict[int, str]:
        """Return participant -> why it cannot get a message now; records clients that have just joined."""
        assert self._availability is not None
        before = self._availability.roster.members
        absent = self._availability.absent(grid, server_round)
        members = self._availability.roster.members
        if self._recorder is not None and len(members) > len(before):
            labels = [member.label for client, member in members.items() if client not in before]
            self._recorder.joined(members.values(), labels)
        return {client: why for client, why in absent.items() if client in self.participants.members}

    def _messages(
        self, kinds: Mapping[int, str], server_round: int, absent: Mapping[int, str]
    ) -> list[Message]:
        roster = self.roster
        assert roster is not None
        self._phase = self._instructions.phase(self.state, roster, kinds, server_round, absent)
        return [message for message, _ in self._phase.messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Drop and log invalid replies, aggregate the rest, and update the history.

        Raises:
            RunEnded: see :meth:`start`.
        """
        received = list(replies)
        assert self._phase is not None, "configure_train comes first"
        assert self.task is not None
        phase, outcome = self._phase, self._read(received)
        started = time.perf_counter()
        if len(outcome.trained) >= self.settings.run.min_replies:
            uploads = outcome.uploads if self._secure is None else self._secure.as_sum(outcome.uploads)
            # A subclass may override aggregate_fit without the parameter for late uploads.
            self.aggregate_fit(server_round, uploads, *((outcome.shares,) if outcome.shares else ()))
        aggregated = time.perf_counter() - started
        # The line of a repeated round is replaced.
        self.history = [entry for entry in self.history if entry["round"] < server_round]
        before = self.history[-1].get("ages") if self.history else None
        ages = updated_ages(before, outcome.classes, self.task.num_classes)
        line = round_line(
            server_round, phase, outcome, self.method, self.state, self.moment, aggregated, ages
        )
        line["notes"] += self._notes(line, phase, outcome)
        self._write_joined(line)
        run_log.log_round(line, phase, outcome)
        self.history.append(line)
        self._client_columns = client_columns(server_round, phase, outcome)
        self._handle_failures(phase, outcome)
        stop_conditions.need_workers(self.participants, phase, outcome, received)
        stop_conditions.need_replies(self.settings.run.min_replies, phase, outcome, received)
        broadcast = self.method.broadcast(self.state, min(phase.training))
        metrics = MetricRecord(
            {"bytes-up": line["bytes_up"]["total"], "bytes-down": line["bytes_down"]["total"]}
        )
        for name, found in line["accuracy"].items():
            metrics[f"accuracy-{name}"] = found["weighted"]
        return wire.encode(broadcast), metrics

    def _write_joined(self, line: dict[str, Any]) -> None:
        if self._availability is not None and (joined := self._availability.joined()):
            line["joined"] = [*line.get("joined", []), *joined]

    def _handle_failures(self, phase: Phase, outcome: Outcome) -> None:
        """Remember the clients that failed, and end the run if failure-policy is "stop"."""
        assert self._availability is not None
        self._availability.set_failed(outcome.failures)
        if self.settings.run.failure_policy == "stop":
            stop_conditions.need_success(phase, outcome)

    def _notes(self, line: Mapping[str, Any], phase: Phase, outcome: Outcome) -> list[str]:
        """Return the notes on this round that need information from earlier ones."""
        found = self._availability.notes() if self._availability else []
        found += notes.lost_state(phase, outcome, self._participations)
        assert self.roster is not None
        labels = next(iter(self.roster.members.values())).labels
        found += notes.missing_classes(labels, line.get("ages"))
        if self._num_rounds == line["round"] > 1 and self.settings.evaluation.predictor != "auto":
            found += notes.not_scored(self.primary_predictor, self.method.name, line["accuracy"])
        patience = self.settings.run.patience
        if (best := patience_exhausted([*self.history, line], self.primary_predictor, patience)) is not None:
            found.append(early_stop_note(best, patience))
        return found + (self._recorder.warnings() if self._recorder else [])

    def aggregate_fit(
        self, server_round: int, uploads: Mapping[int, Payload], shares: Mapping[int, float] | None = None
    ) -> Any:
        """Run the method's server half on typed uploads and return the new state.

        Args:
            server_round: from 1.
            uploads: client id -> upload, already validated.
            shares: client id -> weight of a late upload; 1 for all others.

        Raises:
            RunEnded: if the aggregate is not finite; the state is then unchanged.
        """
        assert self.task is not None, "begin(task) or prepare(grid) comes first"
        run = self.settings.run
        M = len(self.participants.members) if self.roster else run.participants
        at = Round(server_round, self.task, M, run.seed, dict(shares or {}), run.participants)
        if list(uploads) != sorted(uploads):
            uploads = dict(sorted(uploads.items()))
        state = self.method.aggregate(self.state, uploads, at)
        stop_conditions.need_finite(self.method.broadcast(state, min(uploads, default=0)), server_round)
        self.state = state
        return self.state

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Add the scores of the final evaluation to the last round."""
        assert self._phase is not None
        outcome = self._read(list(replies))
        self._handle_failures(self._phase, outcome)
        line = self.history[-1]
        final = line["final"] = final_scores(self._phase, outcome)
        # On clients that connected since training.
        found = self._availability.notes() if self._availability else []
        if found:
            line["notes"] += found
            run_log.log_notes(line["round"], found)
        self._write_joined(line)
        self._client_columns["final"] = client_columns(server_round, self._phase, outcome)
        return MetricRecord({f"accuracy-{name}": of["weighted"] for name, of in final["accuracy"].items()})

    def _exchange(self, grid: Grid, messages: list[Message], timeout: float) -> Iterable[Message]:
        if self._secure is None:
            return grid.send_and_receive(messages, timeout=timeout)
        assert self._phase is not None
        return self._secure.exchange(grid, self._phase, timeout)

    def _read(self, replies: list[Message]) -> Outcome:
        assert self._phase is not None
        assert self.task is not None
        run, phase, max_bytes = self.settings.run, self._phase, self.settings.run.max_upload_mb * 2**20
        if self._secure is not None:  # SecAgg+ has no late replies
            return self._secure.read(replies, phase, self.state, self.task, max_bytes)
        assert self._availability is not None
        late = self._availability.settle(phase, replies)
        counted = classes_counted(self.settings.evaluation, self.task)
        return read(
            replies, phase, self.method, self.state, self.task, max_bytes, late, run.stale_weight, counted
        )

    def _record_participations(self, columns: Mapping[str, Any]) -> None:
        """Remember in how many rounds the clients of a finished round have trained."""
        self._participations |= zip(columns["client"], columns["participations"], strict=True)

    def _finish_round(self, server_round: int) -> None:
        self._set_waiting("")
        self.history[-1]["seconds"]["total"] = time.perf_counter() - self._round_started
        self.done = server_round
        self._record_participations(self._client_columns)
        line = self.history[-1]
        run_log.log_scores(line, self.primary_predictor, self._num_rounds)
        if self._recorder is not None:
            broadcast = self.method.broadcast(self.state, min(self.roster.members) if self.roster else 0)
            self._recorder.add(line, self._client_columns, self.state, self._scored_state, broadcast)
