"""Every method as a Flower strategy: a round is planned, exchanged, read, checked, aggregated and recorded.

::

    start -> handshake -> for every round:
             plan       who trains, who is only scored, who is absent
             exchange   messages -> grid -> replies; one to an earlier round is named and discarded
             read       decode and validate; a bad reply costs its own client only
             check      too few replies, a lost worker: ends the run, or the round is repeated; nothing has changed yet
             aggregate  aggregate_fit(server_round, uploads)
             record     one line per file -> commit: disk, then memory

One message makes a client train and evaluate; clients that do not train in a round are evaluated in the same phase.
``aggregate_fit`` needs neither grid nor nodes, so a unit test can call it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from pbfl_flwr import seeds
from pbfl_flwr.config import Settings
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import NO_SCORES
from pbfl_flwr.flower.server import recorder, rounds, stopping
from pbfl_flwr.flower.server.grid import polling
from pbfl_flwr.flower.server.membership import Membership
from pbfl_flwr.flower.server.phase import Kind, Phase, RoundPlan, phase_of
from pbfl_flwr.flower.server.recorder import Recorder
from pbfl_flwr.flower.server.replies import Replies, ReplyRules, read
from pbfl_flwr.flower.server.roster import NOBODY, Roster
from pbfl_flwr.flower.server.rounds import FinishedRound
from pbfl_flwr.method import Moment, Round, resolved_moment
from pbfl_flwr.methods import build_method
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.payloads import Payload, Serializable
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.early_stopping import (
    Score,
    early_stop_warning,
    patience_exhausted,
    score_of,
    scores_by_round,
)
from pbfl_flwr.runs.records import ClientsRecord, RoundRecord, Scores
from pbfl_flwr.sinks import check
from pbfl_flwr.task import Task

MAX_REPEATS = 3  # of one round, because nodes became unreachable during it
REPEATED = "round repeated because too many nodes were unreachable"


class MethodStrategy(Strategy):
    """One method of METHODS as a Flower strategy.

    Args:
        settings: the run configuration.
        directory: where the run is written; None keeps everything in memory.
        loaded: data that this process has read before.

    Attributes:
        state: the method's state after the last finished round.
        history: a record per finished round, as in rounds.jsonl.
        done: number of finished rounds.
        task: what all clients agree on; None before the handshake.
        membership: the clients and their nodes; None before the handshake.
    """

    def __init__(
        self, settings: Settings, directory: Path | None = None, loaded: LoadedData | None = None
    ) -> None:
        self.settings = settings
        self.method = build_method(settings)
        self.directory = RunDirectory(directory) if directory else None
        self.state: Any = None
        self.history: list[RoundRecord] = []
        self.done = 0
        self.experiment = f"{settings.fingerprint()}-{uuid.uuid4().hex[:8]}"
        self.moment: Moment = resolved_moment(settings.evaluation, self.method)
        predictor = settings.evaluation.predictor
        self.primary_predictor = self.method.primary_predictor if predictor == "auto" else predictor
        self.task: Task | None = None
        self.membership: Membership | None = None
        self._recorder = None
        if self.directory is not None:
            self._recorder = Recorder(
                self.directory, settings, self.method, self.primary_predictor, loaded or LoadedData()
            )
        self._participations: dict[int, int] = {}  # client -> rounds trained in, as last reported
        self._num_rounds = settings.run.num_server_rounds
        self._phase: Phase | None = None  # of configure_train, for aggregate_train

    @property
    def roster(self) -> Roster | None:
        """All clients and their nodes; None before the handshake."""
        return self.membership.roster if self.membership else None

    @property
    def _clients(self) -> Membership:
        if self.membership is None:
            raise RuntimeError("prepare(grid) comes first")
        return self.membership

    @property
    def _scores(self) -> dict[int, Score]:
        return scores_by_round(self.history, self.primary_predictor)

    def _is_scored(self, number: int) -> bool:
        every = self.settings.evaluation.evaluate_every
        return rounds.is_scored(number, self.moment, every, self._num_rounds)

    def _ends_early(self, scores: Mapping[int, Score], number: int) -> bool:
        """Whether the run must end after this round; only a round in which clients are scored can tell."""
        return self._is_scored(number) and patience_exhausted(scores, number, self.settings.run.patience)

    @property
    def _last_round(self) -> int:
        """The round after which the run ends, according to the rounds so far."""
        ended = self._ends_early(self._scores, self.done)
        return self.done if ended else self._num_rounds

    # Before the first round ---------------------------------------------------------------------------------

    def summary(self) -> None:
        """Log the configuration in one line, and warnings about it."""
        recorder.log_start(self.settings, self.method, self._num_rounds)

    def prepare(self, grid: Grid) -> None:
        """Run the handshake, check compatibility, start or resume the run directory.

        Raises:
            PbflError: before any training, naming everything that is incompatible.
        """
        run = self.settings.run
        previous = self._recorder.previous() if self._recorder else None
        check(run.sinks)
        if run.sinks and self.directory is None:
            raise PbflError(f"sinks = '{run.sinks}': they need a run directory, this strategy has none")
        if previous is not None:
            self.experiment = previous.experiment
        membership = Membership(run, self.experiment, self._check_roster, self._set_waiting)
        membership.collect(grid, None if previous is None else previous.clients)
        self.membership, roster = membership, membership.roster
        self.begin(roster.task)
        if self._recorder is None:
            return
        if previous is None:
            self._recorder.begin(self.experiment, self.moment, roster.clients.values())
            return
        if resumed := self._recorder.resume(self.method.state, roster.task, self._num_rounds):
            state, self.done, self.history = resumed
            self.state = self.method.resumed(state)
            for clients in self._recorder.directory.client_records():
                self._count_participations(clients)
        recorded = {label for record in self.history for label in record.joined}
        membership.add_joined([label for label in previous.joined if label not in recorded])

    def _check_roster(self, roster: Roster) -> None:
        models, code = self.settings.models.models, self.settings.code
        own = {
            name: name for name in architectures(models, code)
        }  # of a declared name, only this one can be built
        self.method.check(roster.task, [own.get(name, name) for name in roster.architectures])

    def begin(self, task: Task) -> None:
        """Set the method's initial state; :meth:`prepare` calls this, and so does a test without a grid."""
        self.task = task
        seed = self.settings.run.seed
        with seeds.seeded(seeds.derive(seed, "server", 0)):  # a user's method may draw from global generators
            self.state = self.method.init(task, seed)

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
        run = self.settings.run
        self._num_rounds = num_rounds or run.num_server_rounds
        self.summary()
        timeout, result = timeout or run.round_timeout, Result()
        grid = polling(grid, lambda node: (self.roster or NOBODY).node_label(node), self._set_waiting)
        with nullcontext() if self.directory is None else self.directory.locked():
            self._set_waiting("")  # a killed server may have left a line
            if self.membership is None:
                self.prepare(grid)
            try:
                if self.done >= self._last_round:
                    log(INFO, "nothing to do: %s of %s rounds are finished", self.done, self._last_round)
                while self.done < self._last_round:
                    record = self._commit(self._round(grid, self.done + 1, timeout))
                    self._add_to(result, record)
                    scores = evaluate_fn(self.done, result.arrays) if evaluate_fn else None
                    if scores is not None:
                        result.evaluate_metrics_serverapp[self.done] = scores
                early = self._ends_early(self._scores, self.done)
                if self.directory is not None and early and self.done < run.num_server_rounds:
                    self.directory.update(ended_after=self.done)
            finally:
                self._set_waiting("")
                if self._recorder is not None:
                    self._recorder.close()
        return result

    def _set_waiting(self, line: str) -> None:
        """Publish in the run directory what the server waits for; an empty line means nothing."""
        if self.directory is not None:
            self.directory.set_waiting(line)

    def _add_to(self, result: Result, record: RoundRecord) -> None:
        result.arrays = wire.encode(self._broadcast(self.state))
        result.train_metrics_clientapp[record.round] = _train_metrics(record)
        if record.final is not None:
            result.evaluate_metrics_clientapp[record.round] = _accuracy_metrics(record.final)

    # A round ------------------------------------------------------------------------------------------------

    def _round(self, grid: Grid, number: int, timeout: float) -> FinishedRound:
        """Return a round that is exchanged, checked and aggregated, but not yet committed.

        If too many nodes become unreachable during it, it is repeated once they are back; clients that have trained
        answer again without training again.

        Raises:
            RunEnded: see :meth:`start`; the strategy's state is then that of the round before.
        """
        run, repeats = self.settings.run, 0
        while True:
            started = time.perf_counter()
            replies = self._exchange(grid, self._plan(grid, number), timeout, self.state)
            try:
                stopping.check_replies(replies, self._clients.roster, self.settings)
                break
            except stopping.NodesUnreachable as error:
                repeats += 1
                if repeats > MAX_REPEATS:
                    raise
                log(WARNING, "%s. Waiting up to %.0f s for nodes", error, run.join_timeout)
                target = max(len(replies.phase.messages), run.min_replies)
                if self._clients.wait_for_nodes(grid, target) < run.min_replies:
                    raise
                if REPEATED not in self._clients.warnings:
                    self._clients.warnings.append(REPEATED)
        return self._finished(replies, started, grid, timeout)

    def _plan(self, grid: Grid, number: int) -> RoundPlan:
        """Sample the clients that train, and those of the others that are only scored."""
        run, absent = self.settings.run, self._absent(grid, number)
        roster = self._clients.roster
        training = roster.sample(run.fraction_train, run.seed, number, absent)
        scored = roster.scored(run.fraction_evaluate, run.seed, number, training)
        due = self._is_scored(number)
        kinds: dict[int, Kind] = {client: "evaluate" for client in scored if due and client not in absent}
        return RoundPlan(number, {**kinds, **dict.fromkeys(training, "train")}, absent, scored=due)

    def _absent(self, grid: Grid, number: int) -> dict[int, str]:
        """Return which clients cannot get a message now, and why; records clients that have just joined."""
        members = self._clients
        before = len(members.joined)
        absent = members.absent(grid, number)
        if self.directory is not None and (
            joined := members.joined[before:]
        ):  # written before they get a message
            everyone = [*members.roster.clients.values()]
            # Also in run.json, since an unfinished round has no line.
            self.directory.update(clients=everyone, joined=[*self.directory.record().joined, *joined])
        return absent

    def _exchange(self, grid: Grid, plan: RoundPlan, timeout: float, state: Serializable) -> Replies:
        """Broadcast a state in the messages of a plan and read the replies. The timeout is in seconds."""
        phase = self._messages(plan, state)
        messages = list(grid.send_and_receive([message for message, _ in phase.messages], timeout=timeout))
        self._clients.collect_overdue(grid)
        return self._read(phase, messages, state)

    def _messages(self, plan: RoundPlan, state: Serializable) -> Phase:
        settings = self.settings
        return phase_of(
            plan,
            self.method,
            state,
            self._clients.roster,
            self.experiment,
            settings.prototypes.wire_dtype,
        )

    def _rules(self, plan: RoundPlan) -> ReplyRules:
        rules = ReplyRules.of(self.settings, self.method, self._task)
        return rules if plan.scored else replace(rules, requested=NO_SCORES)

    def _read(self, phase: Phase, messages: Sequence[Message], state: Serializable) -> Replies:
        """Decode and validate replies, and remember which clients failed or are late."""
        self._clients.overdue.add(phase.unanswered(messages))
        replies = read(messages, phase, self._rules(phase.plan), state)
        self._clients.failed = frozenset(replies.failures)
        recorder.log_failures(replies)
        return replies

    @property
    def _task(self) -> Task:
        if self.task is None:
            raise RuntimeError("begin(task) or prepare(grid) comes first")
        return self.task

    def aggregate_fit(self, server_round: int, uploads: Mapping[int, Payload]) -> Any:
        """Run the method's server half on typed uploads and return the new state; the strategy's is unchanged.

        Args:
            server_round: from 1.
            uploads: client id -> upload, already validated.

        Raises:
            RunEnded: if the aggregate is not finite.
        """
        run = self.settings.run
        M = len(self._clients.roster.clients) if self.membership else run.num_clients
        round_info = Round(server_round, self._task, M, run.seed, run.num_clients)
        if list(uploads) != sorted(uploads):
            uploads = dict(sorted(uploads.items()))
        with seeds.seeded(seeds.derive(run.seed, "server", server_round)):
            state = self.method.aggregate(self.state, uploads, round_info)
        stopping.need_finite(self.method.broadcast(state, min(uploads, default=0)), server_round)
        return state

    def _finished(
        self, replies: Replies, started: float, grid: Grid | None = None, timeout: float = 0.0
    ) -> FinishedRound:
        """Aggregate a checked round, score a last time if the run ends with it, and make its records.

        Without a grid there is no last scoring. ``started`` is the :func:`time.perf_counter` of the round's begin.

        Raises:
            RunEnded: if the aggregate is not finite, or a client fails in the scoring and failure-policy is "stop".
        """
        run, number, members = self.settings.run, replies.phase.number, self._clients
        aggregating = time.perf_counter()
        state = self.aggregate_fit(number, replies.uploads)
        aggregated = time.perf_counter() - aggregating

        scores = rounds.scores(replies)
        score = score_of(scores, self.primary_predictor)
        by_round = self._scores if score is None else {**self._scores, number: score}
        ends_early = self._ends_early(by_round, number)
        final = None
        if grid is not None and self.moment == "before" and (ends_early or number == self._num_rounds):
            final = self._final_scoring(grid, number, state, timeout)

        last_ages = self.history[-1].ages if self.history else None
        ages = rounds.updated_ages(last_ages, replies.classes, self._task.num_classes)
        labels = next(iter(members.roster.clients.values())).labels
        warnings = [
            *self.method.warnings(self._num_rounds, state),
            *rounds.upload_warnings(replies),
            *rounds.lost_states(replies, self._participations, self.method.keeps_nothing),
            *rounds.missing_classes(labels, ages),
        ]
        if self._num_rounds == number > 1 and self.settings.evaluation.predictor != "auto":
            warnings += rounds.not_scored(self.primary_predictor, self.method.name, scores.accuracy)
        if ends_early:
            warnings.append(early_stop_warning(by_round, self.moment, run.patience))
        total = time.perf_counter() - started
        metrics, late = self.method.report(state), members.late_bytes
        record = RoundRecord(
            **rounds.round_fields(replies, self.moment, metrics, aggregated, total, final, late),
            warnings=[*warnings, *members.warnings, *(self._recorder.warnings() if self._recorder else [])],
            ages=ages,
            joined=list(members.joined),
        )
        counted = self._participations if self.method.keeps_nothing else {}  # others count themselves
        return FinishedRound(record, rounds.clients_record(replies, counted, final), state)

    def _final_scoring(self, grid: Grid, number: int, state: Serializable, timeout: float) -> Replies:
        """Score all clients with the final state."""
        absent = self._absent(grid, number)
        kinds: dict[int, Kind] = dict.fromkeys(self._clients.roster.clients.keys() - absent, "evaluate")
        final = self._exchange(grid, RoundPlan(number, kinds, absent), timeout, state)
        stopping.need_success(final, self.settings.run)
        return final

    def _commit(self, finished: FinishedRound) -> RoundRecord:
        """Make a finished round count: on disk first, then in memory.

        Raises:
            UnsavedState: if it cannot be written.
        """
        record = finished.record
        self._set_waiting("")
        if self._recorder is not None:
            self._recorder.add(finished, self.state, self._broadcast(finished.state))
        self.state, self.done = finished.state, record.round
        self.history.append(record)
        self._count_participations(finished.clients)
        self._clients.recorded()
        recorder.log_record(record, self.primary_predictor, self._last_round)
        return record

    def _count_participations(self, clients: ClientsRecord) -> None:
        """Remember in how many rounds the clients of a finished round have trained."""
        self._participations |= zip(clients.client, clients.participations, strict=True)

    def _broadcast(self, state: Serializable) -> Payload:
        """Return what the first client would be sent in the next round."""
        broadcast: Payload = self.method.broadcast(state, min(self._clients.roster.clients))
        return broadcast

    # Flower's hooks, for a loop other than start: a thin face over the functions above -----------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return training messages for the sampled clients and evaluation messages for (some of) the others."""
        if self.membership is None:
            self.prepare(grid)
        self._phase = self._messages(self._plan(grid, server_round), self.state)
        return [message for message, _ in self._phase.messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Drop and log invalid replies, aggregate the rest, and commit the round.

        Raises:
            RunEnded: see :meth:`start`; nothing has changed then.
        """
        if self._phase is None:
            raise RuntimeError("configure_train comes first")
        read_replies = self._read(self._phase, list(replies), self.state)
        stopping.check_replies(read_replies, self._clients.roster, self.settings)
        metrics = _train_metrics(self._commit(self._finished(read_replies, self._phase.started)))
        return wire.encode(self._broadcast(self.state)), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: clients are scored in the training phase."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None, since nobody is asked."""
        return None


def _train_metrics(record: RoundRecord) -> MetricRecord:
    sizes = {"bytes-up": record.bytes_up.total, "bytes-down": record.bytes_down.total}
    return MetricRecord({**sizes, **_accuracy_metrics(record)})


def _accuracy_metrics(scores: Scores) -> MetricRecord:
    return MetricRecord({f"accuracy-{name}": of.weighted for name, of in scores.accuracy.items()})
