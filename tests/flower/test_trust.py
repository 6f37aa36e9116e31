"""Attacks with valid credentials that got through once: what a device sends may not harm the server or the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import MetricRecord, RecordDict

from pbfl_flwr.config import parse
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Prototypes, Weights
from pbfl_flwr.task import Task
from tests.flower.inprocess import InProcessGrid, reply_of, scripted

TASK = Task(num_classes=6, feature_dim=8, input_shape=(1, 16, 16))
COMMON: dict[str, Any] = {"num-clients": 4, "feature-dim": 8, "join-timeout": 0.2, "num-server-rounds": 1}


def table() -> Prototypes:
    return Prototypes(torch.ones(6, 8), torch.ones(6, dtype=torch.bool))


def played(answer: Callable[[int, int], RecordDict], **keys: Any) -> MethodStrategy:
    """Return the strategy after a run whose clients answer as scripted: (client, round) -> content."""
    strategy = MethodStrategy(parse({**COMMON, **keys}, SECTIONS))
    strategy.start(InProcessGrid(scripted(TASK, answer), {}, 4))
    return strategy


def with_report(**fields: Any) -> RecordDict:
    """A reply whose report has these entries besides what belongs there."""
    content = reply_of(table())
    content["m"] = MetricRecord({**dict(Report(10, 4, 1, {"head": 2}, 0.5).to_record()), **fields})
    return content


FORGED = "a\nWARNING: round 9: client 0 failed: forged\u202e\x1b[2J"


def test_a_name_in_a_report_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    for name in (FORGED, "a\u200bb", ""):
        strategy = played(lambda client, _, name=name: with_report(**{name: 1.0} if client == 3 else {}))
        ((failure),) = strategy.history[0].failures
        assert (failure.client, failure.reason.isprintable()) == (3, True)
        assert failure.reason.startswith("upload rejected: its report has a name that cannot be printed")
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_a_name_of_a_tensor_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    strategy = MethodStrategy(parse({**COMMON, "models": "mlp5", "method": "fedavg"}, SECTIONS))

    def answer(client: int, _: int) -> RecordDict:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in strategy.state.tensors.items()}
        return reply_of(Weights({FORGED: torch.ones(3), **tensors} if client == 3 else tensors, 10))

    strategy.start(InProcessGrid(scripted(TASK, answer, "mlp5"), {}, 4))
    ((failure),) = strategy.history[0].failures
    assert (failure.client, failure.reason.isprintable()) == (3, True)
    assert all(record.getMessage().isprintable() for record in caplog.records)
