"""A round under secure aggregation: Flower's SecAgg+ between our own messages.

::

    server   SecAggPlusWorkflow                        client   secaggplus_mod around the train handler
             setup        --- parameters of the sum -->         makes key pairs
             share keys   --- public keys ----------->          Shamir shares, encrypted for each neighbour
             collect      --- broadcast, shares ----->          trains, is scored, answers its table under masks
             unmask       --- who answered ---------->          shares that take the masks off the sum
    Σ_i of the tables -> one upload that stands for all -> Method.aggregate

The server's code gets keys, encrypted shares, a masked vector and the report from a client, never its table. The
workflow asks a strategy of the older interface for instructions and hands it the results: :class:`_Face`, filled with
what this round's own messages say.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import (
    FitIns,
    FitRes,
    NDArray,
    Parameters,
    Scalar,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid

from pbfl_flwr.config import Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.legacy import (
    TrainingOnly,
    parameters_of,
    report_of,
    summed,
    summing,
    workflow_of,
)
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report, classes_counted
from pbfl_flwr.flower.messages.traffic import Traffic, weigh
from pbfl_flwr.flower.server.replies import Outcome, Phase, error_reason, read, rejection_reason
from pbfl_flwr.method import Method
from pbfl_flwr.payloads import Payload
from pbfl_flwr.task import Task


class SecureRounds:
    """The training messages of every round under secure aggregation.

    Args:
        settings: the run configuration.
        method: whose uploads are summed.

    Raises:
        PbflError: if they cannot be.
    """

    def __init__(self, settings: Settings, method: Method[Any, Any, Any]) -> None:
        self.settings, self.method = settings, method
        self.bound = summing(method).bound
        self._metered: _Meter | None = None
        self._face: _Face | None = None

    def exchange(self, grid: Grid, phase: Phase, timeout: float) -> list[Message]:
        """Run the protocol for the training messages of a phase, and return the replies to its other messages.

        Raises:
            PbflError: if Flower's workflow breaks, which one client's malformed answer can bring about.
        """
        training = [message for message, client in phase.messages if client in phase.training]
        others = [message for message, client in phase.messages if client not in phase.training]
        self._face = None
        if training:
            number = int(str(training[0].content.config_records[wire.CONFIG]["round"]))
            self._metered, self._face = _Meter(grid), _Face(training, grid)
            workflow = workflow_of(self.settings.privacy, self.bound, len(training), timeout)
            empty = Context(0, 0, {}, RecordDict(), {})
            context = LegacyContext(empty, ServerConfig(1), self._face, SimpleClientManager())
            context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord(
                {WorkflowKey.CURRENT_ROUND: number}
            )
            context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
            with _boundary(number):
                workflow(cast(Grid, self._metered), context)  # it sends and receives, nothing else
        return list(grid.send_and_receive(others, timeout=timeout)) if others else []

    def as_sum(self, uploads: Mapping[int, Payload]) -> dict[int, Payload]:
        """Return the one upload that stands for the sum, under the first client's number."""
        return {min(uploads): uploads[min(uploads)]} if uploads else {}

    def read(
        self, replies: list[Message], phase: Phase, state: Payload, task: Task, max_bytes: int
    ) -> Outcome:
        """Return what came of a phase: reports, traffic, who fell out and why; the arguments are those of replies.read.

        The upload of every client that was added is the one that stands for their sum.

        Raises:
            PbflError: if the sum is none.
        """
        rest = replace(phase, messages=[pair for pair in phase.messages if pair[1] not in phase.training])
        counted = classes_counted(self.settings.evaluation, task)
        outcome = read(replies, rest, self.method, state, task, max_bytes, classes=counted)
        if not phase.training or self._face is None or self._metered is None:
            return outcome  # a last scoring is in clear
        clients = {message.metadata.dst_node_id: c for message, c in phase.messages if c in phase.training}
        waited = time.perf_counter() - phase.started
        found: dict[int, Report] = {}
        for node, result in self._face.results.items():
            try:
                found[clients[node]] = report_of(result.metrics, counted)
            except Exception as error:  # the boundary, as replies.read has it
                outcome.failures[clients[node]] = f"its report cannot be read: {rejection_reason(error)}"
        for node, client in clients.items():
            if node not in self._face.results:
                reason = (
                    self._metered.faults.get(node)
                    or f"no answer within {waited:.0f} s, or the protocol was halted"
                )
                outcome.failures[client] = reason
        if self._face.mean is not None:
            # The sum has every client that sent a masked vector, also one whose report is bad.
            M = self.settings.run.num_clients
            with _boundary(phase.number):
                total = summed(self.method, self._face.mean, len(self._face.results), task, M)
            outcome.uploads = dict.fromkeys(sorted(found), total)
            outcome.scalars_up += len(self._face.results) * total.values.numel()
        outcome.reports = dict(sorted({**outcome.reports, **found}.items()))
        outcome.failures = dict(sorted(outcome.failures.items()))
        for node, client in clients.items():
            phase.down[client] = self._metered.down.get(node, Traffic())
            outcome.up[client] = self._metered.up.get(node, Traffic())
        return outcome


@contextmanager
def _boundary(number: int) -> Iterator[None]:
    """End the run in one line where a client's answer breaks the protocol; under masks nobody knows whose."""
    try:
        yield
    except Exception as error:
        raise PbflError(
            f"round {number}: secure aggregation broke: {rejection_reason(error)}; one client's malformed answer is "
            f"enough for that. Rounds up to {number - 1} are kept and can be resumed"
        ) from error


class _Face(TrainingOnly):
    """Hands the workflow this round's instructions, and keeps what comes back."""

    def __init__(self, messages: Iterable[Message], grid: Grid) -> None:
        self._asked, self._grid = list(messages), grid
        self.results: dict[int, FitRes] = {}
        self.mean: NDArray | None = None

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        return None

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        found: list[tuple[ClientProxy, FitIns]] = []
        for message in self._asked:
            asked = cast(dict[str, Scalar], {**message.content.config_records[wire.CONFIG]})
            payload = parameters_of(message.content.array_records[wire.PAYLOAD])
            proxy = GridClientProxy(message.metadata.dst_node_id, self._grid, 0)
            found.append((proxy, FitIns(payload, asked)))
        return found

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        self.results = {proxy.node_id: result for proxy, result in results}
        if results:
            self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}


class _Meter:
    """Stands before the grid, counts bytes and remembers errors, by node."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.up: dict[int, Traffic] = {}
        self.down: dict[int, Traffic] = {}
        self.faults: dict[int, str] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        asked = list(messages)
        replies = list(self._grid.send_and_receive(asked, timeout=timeout))
        nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in asked}
        for message in asked:
            node = message.metadata.dst_node_id
            self.down[node] = self.down.get(node, Traffic()) + _weigh(message)
        for reply in replies:
            node = nodes[reply.metadata.reply_to_message_id]
            self.up[node] = self.up.get(node, Traffic()) + _weigh(reply)
            if reply.has_error():
                self.faults.setdefault(node, error_reason(reply))
        return replies


def _weigh(message: Message) -> Traffic:
    """Return the bytes of a message; a masked vector is a payload, though it stands among the settings."""
    weight = weigh(message)
    if not message.has_content():
        return weight
    protocol = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
    masked = protocol.get(Key.MASKED_PARAMETERS, [])
    parts = [part for part in masked if isinstance(part, bytes)] if isinstance(masked, list) else []
    return replace(weight, payload=weight.payload + sum(map(len, parts)))
