"""A round under secure aggregation: Flower's SecAgg+ between our own messages.

::

    server   SecAggPlusWorkflow                        client   secaggplus_mod around the train handler
             setup        --- parameters of the sum -->         makes key pairs
             share keys   --- public keys ----------->          Shamir shares, encrypted for each neighbour
             collect      --- broadcast, shares ----->          trains, evaluates, sends its masked table
             unmask       --- who replied ----------->          shares that remove the masks from the sum
    Σ_i of the tables -> one upload for the sum -> Method.aggregate

The server receives keys, encrypted shares, a masked vector and the report from a client, never its table. The workflow
needs a strategy of Flower's older interface: :class:`_WorkflowStrategy` passes this round's messages to it and keeps
the results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import FitIns, FitRes, NDArray, Parameters, Scalar, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.compat.common.recorddict_compat import arrayrecord_to_parameters
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import Strategy
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid

from pbfl_flwr.config import Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.messages.traffic import NO_BYTES, weigh
from pbfl_flwr.flower.secagg.messages import REPORT, summing
from pbfl_flwr.flower.server.exchange import Phase
from pbfl_flwr.flower.server.replies import Exchange, ReplyRules, error_reason, read, rejection_reason
from pbfl_flwr.method import Method
from pbfl_flwr.payloads import Prototypes, Serializable
from pbfl_flwr.prototypes import secure_sums as sums
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.runs.records import Bytes
from pbfl_flwr.task import Task


class SecureRounds:
    """The training messages of every round under secure aggregation.

    Raises:
        PbflError: if they cannot be summed.
    """

    def __init__(self, settings: Settings, method: Method[Any, Any, Any]) -> None:
        self.settings, self.method = settings, summing(method)

    def exchange(
        self, grid: Grid, phase: Phase, timeout: float, rules: ReplyRules, state: Serializable
    ) -> Exchange:
        """Run the protocol for the training messages of a phase, send its other messages, and read the replies.

        The result has one upload, which represents the sum, under the lowest number of the clients in it.

        The bytes that the protocol sends are added to the phase. The timeout, in seconds, is for each of the protocol's
        stages and for the other messages.

        Raises:
            PbflError: if Flower's workflow fails, which one client's malformed reply can cause, or the sum is invalid.
        """
        training = [(message, client) for message, client in phase.messages if client in phase.training]
        others = [(message, client) for message, client in phase.messages if client not in phase.training]
        metered, strategy = _MeteredGrid(grid), _WorkflowStrategy([message for message, _ in training], grid)
        if training:
            # For a plain sum of vectors within ±R, see prototypes/secure_sums.py.
            workflow = SecAggPlusWorkflow(
                1.0,
                self.settings.privacy.secure_threshold,
                max_weight=1.0,
                clipping_range=self.method.bound,
                quantization_range=2 ** sums.bits(len(training)),
                modulus_range=2**32,
                timeout=timeout,
            )
            empty = Context(0, 0, {}, RecordDict(), {})
            context = LegacyContext(empty, ServerConfig(1), cast(Strategy, strategy), SimpleClientManager())
            current = ConfigRecord({WorkflowKey.CURRENT_ROUND: phase.number})
            context.state.config_records[MAIN_CONFIGS_RECORD] = current
            context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
            with _errors_as_one_line(phase.number):
                workflow(cast(Grid, metered), context)  # uses only send_and_receive
        replies = list(grid.send_and_receive([m for m, _ in others], timeout=timeout)) if others else []
        exchange = read(replies, replace(phase, messages=others), rules, state)
        exchange.phase = phase
        if not training:
            return exchange  # the final scoring is not encrypted
        clients = {message.metadata.dst_node_id: client for message, client in training}
        waited = time.perf_counter() - phase.started
        reports: dict[int, Report] = {}
        results, mean = strategy.results, strategy.mean
        for node, result in results.items():
            try:
                record = MetricRecord(json.loads(str(result.metrics[REPORT])))
                reports[clients[node]] = Report.from_record(record, rules.requested)
            except Exception as error:  # trust boundary, as in replies.read
                exchange.failures[clients[node]] = f"its report cannot be read: {rejection_reason(error)}"
        for node, client in clients.items():
            if node not in results:
                no_answer = f"no answer within {waited:.0f} s, or the protocol was halted"
                exchange.failures[client] = metered.errors.get(node) or no_answer
        if mean is not None:
            # The sum includes every client that sent a masked vector, even if its report is invalid.
            M = self.settings.run.num_clients
            with _errors_as_one_line(phase.number):
                total = summed(self.method, mean, len(results), rules.task, M)
            exchange.uploads = {min(reports): total} if reports else {}
            exchange.scalars_up += len(results) * total.values.numel()
        exchange.reports = dict(sorted({**exchange.reports, **reports}.items()))
        exchange.failures = dict(sorted(exchange.failures.items()))
        for node, client in clients.items():
            phase.down[client] = metered.down.get(node, NO_BYTES)
            exchange.up[client] = metered.up.get(node, NO_BYTES)
        return exchange


def summed(pipeline: Pipeline, mean: NDArray, clients: int, task: Task, num_clients: int) -> Prototypes:
    """Return the upload that represents the sum of all uploads.

    ``mean`` is that of the clients' vectors, as computed by Flower.

    Raises:
        RejectedPayload: if the vector is not a sum of tables.
    """
    total = np.asarray(mean, dtype=np.float64) * clients
    return pipeline.summed(sums.from_vector(total, task.num_classes, clients, pipeline.bound), num_clients)


@contextmanager
def _errors_as_one_line(number: int) -> Iterator[None]:
    """Turn any exception of the protocol into a one-line PbflError; because of the masks, the client is unknown."""
    try:
        yield
    except Exception as error:
        raise PbflError(
            f"round {number}: secure aggregation failed: {rejection_reason(error)}; one client's malformed reply can "
            f"cause this. Rounds up to {number - 1} are kept and can be resumed"
        ) from error


class _WorkflowStrategy:
    """What the workflow calls of a strategy: gives it this round's training messages, and keeps its results."""

    def __init__(self, messages: Iterable[Message], grid: Grid) -> None:
        self._messages, self._grid = list(messages), grid
        self.results: dict[int, FitRes] = {}
        self.mean: NDArray | None = None

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        instructions: list[tuple[ClientProxy, FitIns]] = []
        for message in self._messages:
            config = cast(dict[str, Scalar], {**message.content.config_records[wire.CONFIG]})
            record = message.content.array_records[wire.PAYLOAD]
            payload = arrayrecord_to_parameters(record, keep_input=True)  # with the checksum in tensor_type
            proxy = GridClientProxy(message.metadata.dst_node_id, self._grid, 0)
            instructions.append((proxy, FitIns(payload, config)))
        return instructions

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


class _MeteredGrid:
    """Wraps the grid; counts bytes and records errors, by node."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.up: dict[int, Bytes] = {}
        self.down: dict[int, Bytes] = {}
        self.errors: dict[int, str] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        batch = list(messages)
        replies = list(self._grid.send_and_receive(batch, timeout=timeout))
        nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in batch}
        for message in batch:
            node = message.metadata.dst_node_id
            self.down[node] = self.down.get(node, NO_BYTES) + _weigh(message)
        for reply in replies:
            node = nodes[reply.metadata.reply_to_message_id]
            self.up[node] = self.up.get(node, NO_BYTES) + _weigh(reply)
            if reply.has_error():
                self.errors.setdefault(node, error_reason(reply))
        return replies


def _weigh(message: Message) -> Bytes:
    """Return the size of a message; a masked vector, which is sent in a ConfigRecord, counts as payload."""
    size = weigh(message)
    if not message.has_content():
        return size
    protocol = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
    masked = protocol.get(Key.MASKED_PARAMETERS, [])
    parts = [part for part in masked if isinstance(part, bytes)] if isinstance(masked, list) else []
    return size.model_copy(update={"payload": size.payload + sum(map(len, parts))})
