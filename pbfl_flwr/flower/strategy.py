"""Every method as a Flower strategy: sample, broadcast, decode, aggregate, and say who failed.

::

    start -> hello round (who is there, does it fit together) -> for every round:
             configure_train -> grid -> aggregate_train -> aggregate_fit(server_round, uploads)

A client trains and is scored in one message; clients that do not train in a round are scored in the same phase.
Training happens nowhere here, and ``aggregate_fit`` needs neither grid nor node: it can be called in a unit test.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from pbfl_flwr.config import Settings
from pbfl_flwr.data import check_data
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower import wire
from pbfl_flwr.flower.books import Outcome, Phase, aged, client_columns, named, read, round_line
from pbfl_flwr.flower.client import resolved_moment
from pbfl_flwr.flower.history import OTHER_CONFIGURATION, RunDirectory, on_validation, summarise
from pbfl_flwr.flower.late import Debts
from pbfl_flwr.flower.roster import Roster, meet, welcome_back, worker_died
from pbfl_flwr.flower.secure import SecureRounds
from pbfl_flwr.method import Method, Moment, Round
from pbfl_flwr.methods import build_method, privacy_notes
from pbfl_flwr.payloads import Payload
from pbfl_flwr.sinks import Sinks, check
from pbfl_flwr.task import Task

GREETING_SECONDS = 60.0  # for a node that comes in the middle of a run


class RunEnded(PbflError):
    """The run cannot go on; everything up to the last finished round is on disk and can be resumed."""


class MethodStrategy(Strategy):
    """One method of METHODS as a Flower strategy.

    Args:
        settings: the run configuration.
        directory: where the run is written; None keeps everything in memory.
        method: by default the one that the settings name.

    Attributes:
        state: the method's state after the last finished round.
        history: what rounds.jsonl holds, one dictionary a round.
    """

    def __init__(
        self, settings: Settings, directory: Path | None = None, method: Method[Any, Any, Any] | None = None
    ) -> None:
        self.settings = settings
        self.method = method or build_method(settings)
        self.run = RunDirectory(directory) if directory else None
        self.state: Any = None
        self.roster: Roster | None = None
        self.history: list[dict[str, Any]] = []
        self.done = 0
        self.experiment = f"{settings.fingerprint()}-{uuid.uuid4().hex[:8]}"
        self.moment: Moment = resolved_moment(settings, self.method)
        wanted = settings.evaluation.predictor
        self.headline = self.method.headline if wanted == "auto" else wanted
        self.task: Task | None = None
        self._secure = SecureRounds(settings, self.method) if settings.privacy.secure_aggregation else None
        self._phase: Phase | None = None
        self._debts = Debts()
        self._failed: set[int] = set()  # of the last round
        self._refused: set[str] = set()  # what was said of nodes that are not greeted as clients
        self._best = -1.0  # weighted headline accuracy
        self._scored: Any = None  # the state that clients were scored with in this round
        self._clients: dict[str, Any] = {}
        self._round_started = 0.0
        self._num_rounds = settings.run.num_server_rounds
        self._sinks: Sinks | None = None
        self._warnings: list[str] = []  # of sinks, for the next round's notes

    # Before the first round ---------------------------------------------------------------------------------

    def summary(self) -> None:
        """Log what is about to happen, one line."""
        run, models = self.settings.run, self.settings.models
        log(
            INFO,
            "%s: %s clients, %s, d=%s",
            self.method.name,
            run.num_clients,
            models.models,
            models.feature_dim,
        )
        for note in privacy_notes(self.settings, self.method):
            log(WARNING, "%s", note)

    def prepare(self, grid: Grid) -> None:
        """Meet the clients, check that all fits, start or resume the run directory.

        Raises:
            PbflError: before anything was trained, naming everything that does not fit.
        """
        run = self.settings.run
        check(run.sinks)
        if run.sinks and self.run is None:
            raise PbflError(f"sinks = '{run.sinks}': they need a run directory, this strategy has none")
        previous = self._previous()
        known = {m["name"]: m["client"] for m in (previous or {}).get("clients", []) if m.get("name")}
        hello = max(run.round_timeout, run.join_timeout)  # its first message finds a client process starting
        self.roster = meet(grid, run.num_clients, self.experiment, hello, run.join_timeout, known)
        task = self.roster.task
        self.method.check(task, self.roster.architectures)
        if run.stale_weight > 0 and (self._secure is not None or not self.method.streams()):
            raise PbflError(
                f"stale-weight = {run.stale_weight}: with these settings method '{self.method.name}' is no sum, in "
                "which an upload can count for less; allowed is 0 (off)"
            )
        if run.faults:
            log(WARNING, "faults are injected: %s", run.faults)
        self.begin(task)
        if run.min_replies > len(self.roster.members):
            raise PbflError(
                f"min-replies = {run.min_replies}: allowed is up to {len(self.roster.members)}, the clients"
            )
        if self.run is None:
            return
        if previous is None:
            members = [
                {**asdict(member), "node": str(member.node)} for member in self.roster.members.values()
            ]
            facts = {
                "experiment": self.experiment,
                "headline": self.headline,
                "moment": self.moment,
                "clients": members,
            }
            self.run.start(self.settings.as_dict(), facts)
            if all(member.simulated and member.configured_data for member in self.roster.members.values()):
                partition = check_data(self.settings.data, run.num_clients)
                self.run.write_partition(partition.counts.tolist(), list(partition.notes))
            self._sinks = Sinks(run.sinks, self.run.path, self.run.read())
            return
        if (resumed := self.run.resume(self.method.state, task, self.settings.fingerprint())) is not None:
            self.state, self.done = resumed
            self.history = self.run.rounds()
            figures = [figure for line in self.history for figure, _ in self._figures(line)]
            self._best = max(figures, default=-1.0)
            log(INFO, "resumed after round %s", self.done)
        if self.done > self._num_rounds:
            raise PbflError(
                f"num-server-rounds = {self._num_rounds}: the run has {self.done} rounds already; allowed is from there"
            )
        self.run.go_on(self.settings.as_dict())
        self._sinks = Sinks(run.sinks, self.run.path, self.run.read())

    def begin(self, task: Task) -> None:
        """Take the method's initial state; :meth:`prepare` does this, a test without a grid does it itself."""
        self.task = task
        self.state = self.method.init(task, self.settings.run.seed)

    def _previous(self) -> dict[str, Any] | None:
        if self.run is None or not self.settings.run.resume:
            return None
        about = self.run.read()
        self.experiment = str(about["experiment"])
        # The checkpoint says so too, but there may be none yet while clients have already trained.
        if not self.experiment.startswith(f"{self.settings.fingerprint()}-"):
            raise PbflError(OTHER_CONFIGURATION.format(self.run.path))
        return about

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
            initial_arrays: not used: the method's own initial state is what clients get first.
            num_rounds: rounds in all; by default num-server-rounds. A resumed run makes those that are missing.
            timeout: seconds to wait for a round's replies; by default round-timeout.
            train_config: not used: messages carry the round and the experiment.
            evaluate_config: not used, likewise.
            evaluate_fn: called after each round with the broadcast arrays.

        Raises:
            PbflError: before round 1, if something does not fit.
            RunEnded: if fewer than min-replies clients answered a round, or a simulation worker died.
        """
        self.summary()
        self._num_rounds = num_rounds or self.settings.run.num_server_rounds
        timeout = timeout or self.settings.run.round_timeout
        with nullcontext() if self.run is None else self.run.alone():
            if self.roster is None:
                self.prepare(grid)
            try:
                return self._rounds(grid, timeout, evaluate_fn)
            finally:
                if self._sinks is not None:
                    self._warn(self._sinks.close())

    def _rounds(
        self,
        grid: Grid,
        timeout: float,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> Result:
        result = Result()
        nothing, unused = ArrayRecord(), ConfigRecord()
        for server_round in range(self.done + 1, self._num_rounds + 1):
            asked = list(self.configure_train(server_round, nothing, unused, grid))
            replies = list(self._exchange(grid, asked, timeout))
            self._debts.collect(grid)
            arrays, metrics = self.aggregate_train(server_round, replies)
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            asked = list(self.configure_evaluate(server_round, nothing, unused, grid))
            if asked:
                scored = self.aggregate_evaluate(server_round, grid.send_and_receive(asked, timeout=timeout))
                if scored is not None:
                    result.evaluate_metrics_clientapp[server_round] = scored
            self._finish_round(server_round)
            if evaluate_fn and (found := evaluate_fn(server_round, result.arrays)) is not None:
                result.evaluate_metrics_serverapp[server_round] = found
        return result

    # A round ------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a training message for every sampled client and an evaluation message for (some of) the others."""
        if self.roster is None:
            self.prepare(grid)
        assert self.roster is not None
        self._round_started = time.perf_counter()
        run = self.settings.run
        self._scored = self.state
        absent = self._absent(grid, server_round)
        chosen = set(self.roster.sample(run.fraction_train, run.seed, server_round, absent))
        others = [client for client in self.roster.members if client not in chosen]
        scored = set(others[: round(run.fraction_evaluate * len(others))]) - set(absent)
        return self._ask(
            {**dict.fromkeys(chosen, "train"), **dict.fromkeys(scored, "evaluate")}, server_round, absent
        )

    def _absent(self, grid: Grid, server_round: int) -> dict[int, str]:
        """Return the clients that cannot be asked and why, having looked for those that came back.

        Only after a round in which somebody failed: a healthy federation is not asked for its nodes every round.
        """
        assert self.roster is not None
        self._debts.collect(grid)
        if not self._failed:
            return {}
        run, online = self.settings.run, set(grid.get_node_ids())
        before = self.roster
        self.roster, refused = welcome_back(
            grid, before, online, self._failed, self.experiment, min(run.join_timeout, GREETING_SECONDS)
        )
        for reason in sorted(set(refused) - self._refused):
            log(WARNING, "round %s: a new node is not asked: %s", server_round, reason)
        self._refused |= set(refused)
        for client, member in self.roster.members.items():
            if member.node != before.members[client].node:
                log(INFO, "round %s: client %s is back, on another node", server_round, member.label)
                self._debts.forget(client)
        gone = {
            client: "its node is not connected"
            for client, member in self.roster.members.items()
            if member.node not in online
        }
        busy = {c: f"still busy with round {owed}" for c, owed in self._debts.owing(server_round).items()}
        return {**busy, **gone}

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return nothing, but after the last round of runs that score before training: one last scoring."""
        if self.moment != "before" or server_round != self._num_rounds or self.roster is None:
            return []
        absent = self._absent(grid, server_round)
        kinds = {client: "evaluate" for client in self.roster.members if client not in absent}
        return self._ask(kinds, server_round, absent)

    def _ask(self, kinds: Mapping[int, str], server_round: int, absent: Mapping[int, str]) -> list[Message]:
        assert self.roster is not None
        messages, down, scalars, names = [], {}, 0, self.roster.names
        # One encoding for a broadcast that is the same object for all; kept beside it, since the id of an object that
        # is gone may be another's.
        encoded: dict[int, tuple[Payload, ArrayRecord]] = {}
        clients = sorted(kinds)
        for client in clients:
            payload = self.method.broadcast(self.state, client)
            if id(payload) not in encoded:
                encoded[id(payload)] = payload, wire.encode(payload, self.settings.prototypes.wire_dtype)
            config = ConfigRecord({"round": server_round, "experiment": self.experiment})
            if client in names:
                config["client"] = client  # a numbered one knows
            message = Message(
                wire.content(encoded[id(payload)][1], config=config),
                dst_node_id=self.roster.members[client].node,
                message_type=kinds[client],
                group_id=str(server_round),
            )
            down[client] = wire.weigh(message)
            scalars += payload.scalars()
            messages.append(message)
        training = {client for client, kind in kinds.items() if kind == "train"}
        sent = list(zip(messages, clients, strict=True))
        started = time.perf_counter()
        self._phase = Phase(sent, training, down, scalars, started, names, server_round, dict(absent))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Drop and name the bad replies, aggregate the rest, keep the books.

        Raises:
            RunEnded: see :meth:`start`.
        """
        received = list(replies)
        assert self._phase is not None, "configure_train comes first"
        assert self.task is not None
        phase, outcome = self._phase, self._read(received)
        called = {client: phase.names.get(client, str(client)) for client in outcome.failures}
        valid = len(outcome.trained)
        started = time.perf_counter()
        if valid >= self.settings.run.min_replies:
            uploads = outcome.uploads if self._secure is None else self._secure.one_for_all(outcome.uploads)
            late = (
                (outcome.shares,) if outcome.shares else ()
            )  # an own aggregate_fit need not know of late uploads
            self.aggregate_fit(server_round, uploads, *late)
        aggregated = time.perf_counter() - started
        before = self.history[-1].get("ages") if self.history else None
        ages = aged(before, outcome.classes, self.task.num_classes)
        line = round_line(
            server_round, phase, outcome, self.method, self.state, self.moment, aggregated, ages
        )
        line["notes"] += self._unheard_of(ages) + self._warnings
        self._warnings = []
        for client, item in outcome.late.items():
            said = item.reason or f"counts {item.weight:.3g}"
            who = phase.names.get(client, str(client))
            log(INFO, "round %s: client %s, upload of round %s: %s", server_round, who, item.round, said)
        for client, reason in outcome.failures.items():
            log(WARNING, "round %s: client %s failed: %s", server_round, called[client], reason)
        for note in line["notes"]:
            log(WARNING, "round %s: %s", server_round, note)
        self.history = [entry for entry in self.history if entry["round"] < server_round] + [line]
        self._clients = client_columns(server_round, phase, outcome)
        self._stop_at(server_round, outcome, phase)
        if any(worker_died(reply) for reply in received if reply.has_error()):
            raise RunEnded(
                f"round {server_round}: a simulation worker died (client "
                f"{', '.join(called.values())}); Flower cannot replace it. Rounds up to "
                f"{server_round - 1} are kept and can be resumed"
            )
        if valid < self.settings.run.min_replies:
            reasons = "; ".join(
                f"client {called[client]}: {reason}" for client, reason in list(outcome.failures.items())[:5]
            )
            raise RunEnded(
                f"round {server_round}: {valid} valid replies, min-replies is {self.settings.run.min_replies}: "
                f"{reasons}"
            )
        broadcast = self.method.broadcast(self.state, min(phase.training))
        figures = MetricRecord(
            {"bytes-up": line["bytes_up"]["total"], "bytes-down": line["bytes_down"]["total"]}
        )
        for name, found in line["accuracy"].items():
            figures[f"accuracy-{name}"] = found["weighted"]
        return wire.encode(broadcast), figures

    def _stop_at(self, server_round: int, outcome: Outcome, phase: Phase) -> None:
        """Remember who failed, and end the run if it is to end at the first."""
        self._failed = set(outcome.failures)
        if self.settings.run.failure_policy == "stop" and outcome.failures:
            client, reason = next(iter(outcome.failures.items()))
            raise RunEnded(
                f"round {server_round}: client {phase.names.get(client, client)} failed: {reason}; failure-policy is "
                f"'stop'. Rounds up to {server_round - 1} are kept and can be resumed"
            )

    def _unheard_of(self, ages: list[int] | None) -> list[str]:
        """Say of classes that nobody has sent for 10, 100, 1,000 rounds, once each."""
        assert self.roster is not None
        labels = next(iter(self.roster.members.values())).labels
        found = [label for label, age in zip(labels, ages or [], strict=False) if age in (10, 100, 1000)]
        return [f"nobody sent these classes for 10 rounds or more: {', '.join(found)}"] if found else []

    def aggregate_fit(
        self, server_round: int, uploads: Mapping[int, Payload], shares: Mapping[int, float] | None = None
    ) -> Any:
        """Run the method's server half on typed uploads and return the new state.

        Args:
            server_round: from 1.
            uploads: client id -> upload, already validated.
            shares: client id -> what a late upload counts; 1 for all others.

        Raises:
            RunEnded: if the aggregate is not finite; the old state stays.
        """
        assert self.task is not None, "begin(task) or prepare(grid) comes first"
        run = self.settings.run
        at = Round(server_round, self.task, run.num_clients, run.seed, dict(shares or {}))
        if list(uploads) != sorted(uploads):
            uploads = dict(sorted(uploads.items()))
        state = self.method.aggregate(self.state, uploads, at)
        _finite_broadcast(self.method, state, uploads, server_round)
        self.state = state
        return self.state

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Add the scores of a last evaluation to the round."""
        assert self._phase is not None
        outcome = self._read(list(replies))
        self._stop_at(server_round, outcome, self._phase)
        accuracy, held_out = summarise(outcome.reports), on_validation(outcome.reports)
        self.history[-1]["final"] = {
            "accuracy": accuracy,
            "failures": named(outcome.failures, self._phase.names),
        }
        if held_out:
            self.history[-1]["final"]["validation"] = summarise(held_out)
        self._clients["final"] = client_columns(server_round, self._phase, outcome)
        return MetricRecord({f"accuracy-{name}": found["weighted"] for name, found in accuracy.items()})

    def _exchange(self, grid: Grid, asked: list[Message], timeout: float) -> Iterable[Message]:
        if self._secure is None:
            return grid.send_and_receive(asked, timeout=timeout)
        assert self._phase is not None
        return self._secure.exchange(grid, self._phase, timeout)

    def _read(self, replies: list[Message]) -> Outcome:
        assert self._phase is not None
        assert self.task is not None
        run, phase, max_bytes = self.settings.run, self._phase, self.settings.run.max_upload_mb * 2**20
        if self._secure is not None:  # its protocol knows no late answers
            return self._secure.read(replies, phase, self.state, self.task, max_bytes)
        late = self._debts.take() if phase.training else []
        self._debts.note(phase.unanswered(replies))
        return read(replies, phase, self.method, self.state, self.task, max_bytes, late, run.stale_weight)

    def _finish_round(self, server_round: int) -> None:
        self.history[-1]["seconds"]["total"] = time.perf_counter() - self._round_started
        self.done = server_round
        line = self.history[-1]
        scored = line.get("final", line)["accuracy"].get(self.headline)
        log(
            INFO,
            "round %s/%s: accuracy %s (%s), %s clients trained, %.1f s",
            server_round,
            self._num_rounds,
            f"{100 * scored['weighted']:.1f} %" if scored else "not scored yet",
            self.headline,
            len(line["trained"]),
            line["seconds"]["total"],
        )
        if self.run is not None:
            self.run.add_round(self.history[-1], self._clients)
            self._keep_best(self.run)
            broadcast = self.method.broadcast(self.state, min(self.roster.members) if self.roster else 0)
            self.run.save_checkpoint(self.state, broadcast, server_round, self.settings.fingerprint())
        if self._sinks is not None:
            self._warn(self._sinks.log(line))

    def _warn(self, warnings: list[str]) -> None:
        for warning in warnings:
            log(WARNING, "%s", warning)
        self._warnings += warnings

    def _keep_best(self, run: RunDirectory) -> None:
        """Keep the state with which clients scored best so far, by validation data where they hold some out."""
        for figure, final in self._figures(self.history[-1]):
            if figure > self._best:
                self._best = figure
                run.save_best(self.state if final else self._scored, self.done, figure, self.headline)

    def _figures(self, line: Mapping[str, Any]) -> list[tuple[float, bool]]:
        """Return (weighted headline accuracy, whether of the last scoring) of a round."""
        found = []
        for entry, final in ((line, False), (line.get("final", {}), True)):
            scored = entry.get("validation") or entry.get("accuracy") or {}
            if self.headline in scored:
                found.append((float(scored[self.headline]["weighted"]), final))
        return found


def _finite_broadcast(
    method: Method[Any, Any, Any], state: Any, uploads: Mapping[int, Payload], server_round: int
) -> None:
    broadcast = method.broadcast(state, min(uploads, default=0))
    for name, tensor in broadcast.to_tensors().items():
        if not bool(torch.isfinite(tensor).all()):
            raise RunEnded(
                f"round {server_round}: after aggregation '{name}' of the broadcast holds NaN or infinity; lower the "
                f"learning rates. Rounds up to {server_round - 1} are kept"
            )
