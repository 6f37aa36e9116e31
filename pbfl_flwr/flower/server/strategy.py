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
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from pbfl_flwr import calls, seeds
from pbfl_flwr.config import Settings, changed
from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.traffic import NO_BYTES
from pbfl_flwr.flower.server import inflation, recorder, results, rounds, stopping
from pbfl_flwr.flower.server.grid import polling
from pbfl_flwr.flower.server.membership import Membership
from pbfl_flwr.flower.server.phase import Kind, Phase, RoundPlan, phase_of, plan_of
from pbfl_flwr.flower.server.recorder import recorder_of
from pbfl_flwr.flower.server.replies import Replies, ReplyRules, read
from pbfl_flwr.flower.server.roster import NOBODY, Roster, check_roster
from pbfl_flwr.flower.server.rounds import FinishedRound
from pbfl_flwr.flower.server.schedule import schedule_of
from pbfl_flwr.method import Moment, Round, resolved_moment
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.payloads import Payload, Serializable, separate
from pbfl_flwr.runs.directory import RunDirectory, RunRefused
from pbfl_flwr.runs.early_stopping import Score, early_stop_warning, score_on, scores_on
from pbfl_flwr.runs.records import REPEATED, ClientsRecord, RoundRecord
from pbfl_flwr.runs.tensor_files import checksum_of
from pbfl_flwr.sinks import Ending
from pbfl_flwr.sinks import check as check_sinks
from pbfl_flwr.task import Task
from pbfl_flwr.util.source_hash import check_unedited

MAX_REPEATS = 3  # of one round, because nodes became unreachable during it


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
        self.directory = RunDirectory(directory) if directory else None
        self.state: Any = None
        self.history: list[RoundRecord] = []
        self.done = 0
        self.experiment = f"{settings.fingerprint()}-{uuid.uuid4().hex[:8]}"
        self.task: Task | None = None
        self.membership: Membership | None = None
        self._recorder = recorder_of(self.directory, loaded or LoadedData())
        self._participations: dict[int, int] = {}  # client -> rounds trained in, as last reported
        self._reported: dict[int, int] = {}  # client -> the round of that report
        self._samples: dict[int, tuple[int, int]] = {}  # client -> training and test samples in that report
        self._phase: Phase | None = None  # of configure_train, for aggregate_train
        self._digest = (
            ""  # of the last checkpoint's state; the first state is made anew, on another CPU with other bits
        )
        self._configure(settings)

    def _configure(self, settings: Settings) -> None:
        """Set the settings and what is built from them."""
        self.settings, self.method = settings, build_method(settings)
        self.moment: Moment = resolved_moment(settings.evaluation, self.method)
        self.schedule = schedule_of(settings, self.moment)
        chosen = settings.evaluation.predictor
        self.primary_predictor = self.method.primary_predictor if chosen == "auto" else chosen
        self._recorder.configure(settings, self.method, self.primary_predictor)

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
        """Those by which ``patience`` ends the run."""
        return self._scores_of(self.settings)

    def _scores_of(self, settings: Settings) -> dict[int, Score]:
        """Those of the rounds that are scored with these settings; a shorter run also scored its last one."""
        schedule = schedule_of(settings, self.moment)
        scored = (record for record in self.history if schedule.is_scored(record.round))
        return scores_on(scored, settings.run.patience_on, self.primary_predictor)

    @property
    def _last_round(self) -> int:
        """The round after which the run ends, according to the rounds so far."""
        return self.schedule.last_round(self._scores, self.done)

    @property
    def finished(self) -> bool:
        """Whether it has made all its rounds."""
        return self.membership is not None and self.done >= self._last_round

    # Before the first round ---------------------------------------------------------------------------------

    def summary(self) -> None:
        """Log the configuration in one line, and warnings about it."""
        recorder.log_start(self.settings, self.method)

    def prepare(self, grid: Grid, *, check_done: Callable[[], None] | None = None) -> None:
        """Run the handshake, check compatibility, start or resume the run directory.

        Args:
            grid: Flower's.
            check_done: called when it is known how many rounds are ``done``, before the run directory is written.

        Raises:
            PbflError: before any training, naming everything that is incompatible.
        """
        run = self.settings.run
        check_unedited(self.settings.code)
        previous = self._recorder.previous()
        check_sinks(run.sinks)
        inflation.bound(run.max_upload_mb * 2**20)
        if run.sinks and self.directory is None:
            raise PbflError(f"sinks = '{run.sinks}': they need a run directory, this strategy has none")
        if previous is not None:
            self.experiment = previous.experiment
        check = partial(check_roster, self.method, self.settings)
        membership = Membership(run, self.experiment, check, self._recorder.set_waiting)
        membership.collect(grid, None if previous is None else previous.clients)
        roster = membership.roster
        recorder.log_declared(self.settings, roster.clients.values())
        self.begin(roster.task)
        if previous is None:
            if check_done:
                check_done()
            self._recorder.begin(self.experiment, self.moment, roster.clients.values())
        else:
            if resumed := self._recorder.resume(self.method.state, roster.task):
                # A repeated round is known by it, though `resumed` may change what clients are sent.
                self._digest = digest_of(resumed.state)
                state = self.method.resumed(resumed.state)
                self.state = calls.as_state(self.method, state, self.method.resumed, roster.task)
                self.done = resumed.done
                self.history = resumed.history
                for clients in resumed.clients:
                    self._count_participations(clients)
            if check_done:
                check_done()
            self._recorder.reopen(self.done, roster.clients.values())
            recorded = {label for record in self.history for label in record.joined}
            membership.add_joined([label for label in previous.joined if label not in recorded])
        self.membership = membership  # only now: after an error, another start prepares again

    def _check_scored_last(self, settings: Settings) -> None:
        """Refuse to end a run without scoring its final state, if it has made its rounds with other settings.

        Raises:
            RunRefused: if nothing remains to be done, but the last round was not made as the last, or there are more.
        """
        run, schedule = settings.run, schedule_of(settings, self.moment)
        recorder.need_all_rounds(run.num_server_rounds, self.done)
        scores = self._scores_of(settings)
        if not self.done or self.done < schedule.last_round(scores, self.done):
            return
        last = self.history[-1]
        # After training everybody may have been scored in the round itself, unless evaluate-every left it out.
        due = self.done % schedule.every != 0 and any(record.accuracy for record in self.history)
        if last.final is None if self.moment == "before" else due and not last.accuracy:
            early = f" and patience = {run.patience}" if run.patience else ""
            raise RunRefused(
                f"num-server-rounds = {run.num_server_rounds}{early}: the run would end with its {self.done} rounds, "
                "whose last one was not made as the last, so nobody has scored the final state; must allow another "
                "round"
            )

    def begin(self, task: Task) -> None:
        """Set the method's initial state; :meth:`prepare` calls this, and so does a test without a grid."""
        self.task = task
        seed = self.settings.run.seed
        with seeds.seeded(seeds.derive(seed, "server", 0)):  # a user's method may draw from global generators
            self.state = calls.first_state(self.method, task, seed)

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
            num_rounds: total number of rounds, instead of the key num-server-rounds. A resumed run makes the remaining
                ones.
            timeout: seconds to wait for a round's replies, instead of the key round-timeout.
            train_config: unused; messages carry the round and the experiment.
            evaluate_config: unused, likewise.
            evaluate_fn: called after each round with the broadcast arrays; returns metrics or None.

        Raises:
            PbflError: before round 1, if an argument is invalid or configuration and clients are incompatible; if
                ``evaluate_fn`` returns anything else.
            RunEnded: if fewer than min-replies clients answered a round, or a simulation worker died.
        """
        given = {"num-server-rounds": num_rounds, "round-timeout": timeout}
        changes = {key: value for key, value in given.items() if value is not None}
        settings = changed(self.settings, changes, SECTIONS) if changes else self.settings
        result, written = Result(), self._recorder
        grid = polling(grid, lambda node: (self.roster or NOBODY).node_label(node), written.set_waiting)
        with written.locked():
            if self.membership is not None:
                check_unedited(settings.code)
                self._check_scored_last(settings)
                written.go_on(self.done)
            if changes:
                self._configure(settings)
            self.summary()
            written.set_waiting("")  # a killed server may have left a line
            if self.membership is None:
                self.prepare(grid, check_done=lambda: self._check_scored_last(self.settings))
            ending: Ending = "failed"
            try:
                if self.done >= self._last_round:
                    log(INFO, "nothing to do: %s of %s rounds are finished", self.done, self._last_round)
                while self.done < self._last_round:
                    record = self._commit(self._round(grid, self.done + 1))
                    results.add_to(result, record, self._next_arrays())
                    if evaluate_fn is not None:
                        results.add_metrics(result, self.done, evaluate_fn(self.done, result.arrays))
                if self._last_round < self.schedule.num_rounds:
                    written.end_early(self.done)
                ending = "finished"
            except (KeyboardInterrupt, SystemExit):
                ending = "killed"
                raise
            finally:
                written.close(ending)
        return result

    # A round ------------------------------------------------------------------------------------------------

    def _round(self, grid: Grid, number: int) -> FinishedRound:
        """Return a round that is exchanged, checked and aggregated, but not yet committed.

        Raises:
            RunEnded: see :meth:`start`; the strategy's state is then that of the round before.
        """
        started = time.perf_counter()

        def check(replies: Replies) -> None:
            stopping.check_replies(replies, self._clients.roster, self.settings)

        replies = self._exchange_until(grid, lambda: self._plan(grid, number), self.state, check)
        return self._finished(replies, started, grid)

    def _exchange_until(
        self,
        grid: Grid,
        plan: Callable[[], RoundPlan],
        state: Serializable,
        check: Callable[[Replies], None],
    ) -> Replies:
        """Broadcast a state and return the replies, which the check accepts.

        If too many nodes become unreachable meanwhile, it is repeated once they are back; clients that have trained
        answer again without training again.

        Raises:
            RunEnded: what the check raises, for unreachable nodes only after MAX_REPEATS more tries.
        """
        run, repeats = self.settings.run, 0
        while True:
            replies = self._exchange(grid, plan(), state)
            try:
                check(replies)
                return replies
            except stopping.NodesUnreachable as error:
                repeats += 1
                if replies.phase.training:  # the final scoring's are no round's costs
                    self._clients.lost_up += sum(replies.up.values(), NO_BYTES)
                    self._clients.lost_down += sum(replies.phase.down.values(), NO_BYTES)
                if repeats > MAX_REPEATS:
                    raise
                log(WARNING, "%s. Waiting up to %.0f s for nodes", error, run.join_timeout)
                target = max(len(replies.phase.messages), run.min_replies)
                if self._clients.wait_for_nodes(grid, target) < run.min_replies:
                    raise
                if REPEATED not in self._clients.warnings:
                    self._clients.warnings.append(REPEATED)

    def _plan(self, grid: Grid, number: int) -> RoundPlan:
        """Sample the clients that train, and those of the others that are only scored."""
        scored, absent = self.schedule.is_scored(number), self._absent(grid, number)
        return plan_of(number, self._clients.roster, self.settings.run, absent, scored)

    def _absent(self, grid: Grid, number: int) -> dict[int, str]:
        """Return which clients cannot get a message now, and why; records clients that have just joined."""
        members = self._clients
        before = len(members.joined)
        absent = members.absent(grid, number)
        if joined := members.joined[before:]:  # written before they get a message
            self._recorder.add_clients(members.roster.clients.values(), joined)
        return absent

    def _exchange(self, grid: Grid, plan: RoundPlan, state: Serializable) -> Replies:
        """Broadcast a state in the messages of a plan and read the replies."""
        phase, timeout = self._messages(plan, state), self.settings.run.round_timeout
        messages = list(grid.send_and_receive([message for message, _ in phase.messages], timeout=timeout))
        self._clients.collect_overdue(grid)
        return self._read(phase, messages, state)

    def _messages(self, plan: RoundPlan, state: Serializable) -> Phase:
        dtype, timeout = self.settings.prototypes.wire_dtype, self.settings.run.round_timeout
        roster, task = self._clients.roster, self._task
        return phase_of(plan, self.method, state, roster, task, self.experiment, dtype, timeout, self._digest)

    def _read(self, phase: Phase, messages: Sequence[Message], state: Serializable) -> Replies:
        """Decode and validate replies, and remember which clients failed or are late."""
        self._clients.overdue.answered(messages)  # in a second try of the round
        self._clients.overdue.add(phase.unanswered(messages))
        rules = ReplyRules.of(self.settings, self.method, self._task, phase.plan.scored)
        replies = read(messages, phase, rules, state)
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
            RunEnded: if clients would reject the next broadcast, e.g. since it is not finite.
        """
        run = self.settings.run
        M = len(self._clients.roster.clients) if self.membership else run.num_clients
        round_info = Round(server_round, self._task, M, run.seed, run.num_clients)
        if list(uploads) != sorted(uploads):
            uploads = dict(sorted(uploads.items()))
        with seeds.seeded(seeds.derive(run.seed, "server", server_round)):
            state = self.method.aggregate(self.state, uploads, round_info)
        calls.as_state(self.method, state, self.method.aggregate, self._task)
        broadcast = calls.broadcast(self.method, state, min(uploads, default=0), self._task)
        stopping.need_usable(broadcast, self.method.down, self._task, server_round)
        return state

    def _finished(self, replies: Replies, started: float, grid: Grid | None = None) -> FinishedRound:
        """Aggregate a checked round, score a last time if the run ends with it, and make its records.

        Without a grid there is no last scoring, and patience ends nothing. ``started`` is the
        :func:`time.perf_counter` of the round's begin.

        Raises:
            RunEnded: if the aggregate cannot be saved or sent, e.g. since it is not finite, or nobody is scored, see
                :meth:`_final_scoring`.
        """
        number, members, method = replies.phase.number, self._clients, self.method
        aggregating = time.perf_counter()
        state = self.aggregate_fit(number, replies.uploads)
        calls.as_state(method, state, self.aggregate_fit, self._task)
        state = stopping.as_saved(state, method.state, self._task, number)
        calls.as_state(method, state, method.state.from_tensors, self._task)
        stopping.need_usable(self._broadcast(state), method.down, self._task, number)
        aggregated = time.perf_counter() - aggregating

        accuracies = rounds.scores(replies)
        on = self.settings.run.patience_on
        score = score_on(accuracies, on, self.primary_predictor)
        so_far = self._scores if score is None else {**self._scores, number: score}
        ends_early = grid is not None and self.schedule.ends_early(so_far, number)
        is_last = ends_early or number == self.schedule.num_rounds
        final = None
        if grid is not None and self.moment == "before" and is_last:
            final = self._final_scoring(grid, number, state)

        last_ages = self.history[-1].ages if self.history else None
        ages = rounds.updated_ages(last_ages, replies.classes, self._task.num_classes)
        trained, reported = self._participations, self._reported
        warnings = [
            *calls.warnings(method, self.schedule.num_rounds, state),
            *rounds.warnings(replies, trained, reported, ages, members.roster, method.keeps_nothing),
            *rounds.changed_data(replies, self._samples),
        ]
        if self.schedule.num_rounds == number > 1 and self.settings.evaluation.predictor != "auto":
            warnings += rounds.not_scored(self.primary_predictor, method.name, accuracies.accuracy)
        if ends_early and number < self.schedule.num_rounds:
            warnings.append(early_stop_warning(so_far, on, self.moment, self.schedule.patience))
        total = time.perf_counter() - started
        metrics, lost = calls.report(method, state), (members.lost_up, members.lost_down)
        record = RoundRecord(
            **rounds.round_fields(replies, self.moment, metrics, aggregated, total, final, lost),
            warnings=[*warnings, *members.warnings],
            ages=ages,
            joined=list(members.joined),
        )
        counted = self._participations if method.keeps_nothing else {}  # others count themselves
        return FinishedRound(record, rounds.clients_record(replies, counted, final), state)

    def _final_scoring(self, grid: Grid, number: int, state: Serializable) -> Replies:
        """Score all clients with the final state.

        Raises:
            RunEnded: see :func:`stopping.check_scored`; the round is not committed then.
        """

        def plan() -> RoundPlan:
            absent = self._absent(grid, number)
            kinds: dict[int, Kind] = dict.fromkeys(self._clients.roster.clients.keys() - absent, "evaluate")
            return RoundPlan(number, kinds, absent)

        def check(replies: Replies) -> None:
            stopping.check_scored(replies, self._clients.roster, self.settings.run)

        return self._exchange_until(grid, plan, state, check)

    def _commit(self, finished: FinishedRound) -> RoundRecord:
        """Make a finished round count: on disk first, then in memory.

        Raises:
            UnsavedState: if it cannot be written.
        """
        record = finished.record
        self._recorder.add(finished, self.state, self._broadcast(finished.state))
        self.state, self.done = finished.state, record.round
        self._digest = digest_of(self.state)
        self.history.append(record)
        self._count_participations(finished.clients)
        self._clients.recorded()
        self._recorder.log_in_sinks(record)
        clients = len(self._clients.roster.clients)
        recorder.log_record(record, self.primary_predictor, self._last_round, clients)
        return record

    def _count_participations(self, clients: ClientsRecord) -> None:
        """Remember in how many rounds the clients of a finished round have trained, and their numbers of samples."""
        self._participations |= zip(clients.client, clients.participations, strict=True)
        self._reported |= dict.fromkeys(clients.client, clients.round)
        samples = zip(clients.num_train, clients.num_test, strict=True)
        self._samples |= zip(clients.client, samples, strict=True)

    def _broadcast(self, state: Serializable) -> Payload:
        """Return what the first client would be sent in the next round."""
        return calls.broadcast(self.method, state, min(self._clients.roster.clients), self._task)

    def _next_arrays(self) -> ArrayRecord:
        """Return the next broadcast to the first client as bytes."""
        return wire.encode(self._broadcast(self.state))

    # Flower's hooks, for a loop other than start -----------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return training messages for the sampled clients and evaluation messages for (some of) the others.

        Raises:
            RunRefused: if it is not the round after the last one that counted, or as :meth:`aggregate_train`.
        """
        with self._recorder.locked():
            if self.membership is None:
                self.prepare(grid, check_done=lambda: self._need_next(server_round))
            else:
                self._need_next(server_round)
                self._recorder.go_on(self.done)
            self._phase = self._messages(self._plan(grid, server_round), self.state)
        return [message for message, _ in self._phase.messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Drop and log invalid replies, aggregate the rest, and commit the round.

        Raises:
            RunEnded: see :meth:`start`; nothing has changed then.
            RunRefused: if another server has made rounds of the run meanwhile, or is at it, or if another run is in its
                place.
        """
        self._need_next(server_round)
        if self._phase is None or self._phase.number != server_round:
            raise RuntimeError(f"configure_train comes first, of round {server_round}")
        with self._recorder.locked():
            self._recorder.go_on(self.done)
            received = self._read(self._phase, list(replies), self.state)
            stopping.check_replies(received, self._clients.roster, self.settings)
            record = self._commit(self._finished(received, self._phase.started))
            if self.done == self.schedule.num_rounds:
                self._recorder.close("finished")
        return self._next_arrays(), results.train_metrics(record)

    def _need_next(self, server_round: int) -> None:
        if server_round != self.done + 1:
            raise RunRefused(
                f"server_round = {server_round}: {self.done} rounds have counted; must be {self.done + 1}"
            )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: clients are scored in the training phase."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None, since nobody is asked."""
        return None


def digest_of(state: Serializable) -> str:
    """Return a short hash of a server's state: equal bits, equal hash."""
    return checksum_of(separate(state.to_tensors()), {})
