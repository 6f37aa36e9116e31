"""Attacks with valid credentials that got through once: what a device sends may not harm the server or the others."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from pbfl_flwr.config import parse
from pbfl_flwr.errors import LONGEST
from pbfl_flwr.flower.engines.local import Handler
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.payloads import Prototypes, Weights
from pbfl_flwr.runs.records import ClientRecord
from pbfl_flwr.task import Task
from tests.flower.inprocess import InProcessGrid, handshake_reply, reply_of, scripted

TASK = Task(num_classes=6, feature_dim=8, input_shape=(1, 16, 16))
COMMON: dict[str, Any] = {"num-clients": 4, "feature-dim": 8, "join-timeout": 0.2, "num-server-rounds": 1}


def table() -> Prototypes:
    return Prototypes(torch.ones(6, 8), torch.ones(6, dtype=torch.bool))


def played(answer: Callable[[int, int], RecordDict], **keys: Any) -> MethodStrategy:
    """Return the strategy after a run whose clients answer as scripted: (client, round) -> content."""
    strategy = MethodStrategy(parse({**COMMON, **keys}, SECTIONS))
    strategy.start(InProcessGrid(scripted(TASK, answer), {}, 4))
    return strategy


def declaring(
    *replies: dict[str, Any], answer: Callable[[int, int], RecordDict] = lambda client, _: reply_of(table())
) -> Handler:
    """Clients that declare these fields in the handshake, each instead of what belongs there."""
    usual = scripted(TASK, answer)

    def app(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if message.metadata.message_type != "query":
            return usual(message, context)
        changed = replies[client] if client < len(replies) else {}
        properties = {
            **handshake_reply(client, TASK),
            "simulated": False,
            "num-train": 10,
            "num-test": 4,
            **changed,
        }
        return Message(wire.content(config=ConfigRecord(properties)), reply_to=message)

    return app


def joined(*replies: dict[str, Any], **keys: Any) -> MethodStrategy:
    """Return the strategy after a run of one round of clients that declare these fields."""
    strategy = MethodStrategy(parse({**COMMON, "min-clients": 1, **keys}, SECTIONS))
    strategy.start(InProcessGrid(declaring(*replies), {}, 4))
    return strategy


def roster_of(strategy: MethodStrategy) -> Mapping[int, ClientRecord]:
    assert strategy.membership is not None
    return strategy.membership.roster.clients


def with_report(**fields: Any) -> RecordDict:
    """A reply whose report has these entries besides what belongs there."""
    content = reply_of(table())
    content["m"] = MetricRecord({**dict(Report(10, 4, 1, {"head": 2}, 0.5).to_record()), **fields})
    return content


FORGED = "a\nWARNING: round 9: client 0 failed: forged\u202e\x1b[2J"


@pytest.mark.parametrize("name", [FORGED, "a\u200bb", ""])
def test_a_name_in_a_report_forges_no_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy = played(lambda client, _: with_report(**{name: 1.0} if client == 3 else {}))
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


# Counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "what"),
    [
        (Report(10, 2**39, 1, {"head": 2**39}, 0.0), f"{2**39} test"),
        (Report(10, 9, 1, {"head": 9}, 0.0), "9 test"),
        (Report(21, 4, 1, {"head": 2}, 0.0), "21 training"),
        (
            Report(10, 4, 1, {"head": 2}, 0.0, num_validation=2**39, validation={"head": 2**39}),
            f"{2**39} validation",
        ),
    ],
)
def test_no_report_decides_the_accuracy(report: Report, what: str) -> None:
    """More than twice the samples that the client declared, all right: it would stop the run, and be saved as best."""
    strategy = MethodStrategy(parse(COMMON, SECTIONS))
    honest = Report(10, 4, 1, {"head": 1}, 0.5)
    app = declaring(answer=lambda client, _: reply_of(table(), report if client == 3 else honest))
    strategy.start(InProcessGrid(app, {}, 4))
    (record,) = strategy.history
    assert record.trained == [0, 1, 2]
    assert record.accuracy["head"].weighted == 0.25
    ((failure),) = record.failures
    assert failure.reason.startswith(
        f"upload rejected: its report counts {what} samples; when it joined it declared "
    )


def test_a_client_that_declares_nearly_all_test_samples_is_named() -> None:
    (warning,) = joined({"num-test": 10**9}).history[0].warnings
    assert warning.startswith(
        "client 0 declares 1000000000 of 1000000012 test samples: it decides the weighted acc"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num-train", -5), ("num-test", 2**40), ("num-test", 0.5), ("num-test", "4"), ("num-validation", -1),
        ("parameters", [100]), ("parameters", [-1, 10]), ("parameters", [100, 2**60]), ("parameters", [1] * 1000),
        ("num-classes", 10**7), ("num-classes", 1), ("num-classes", True), ("feature-dim", 10**9),
        ("input-shape", [1] * 20), ("input-shape", [10**6, 10**6]), ("input-shape", [0]), ("input-shape", []),
        ("vocabulary-size", 10**9), ("labels", ["a"]), ("labels", ["x" * 10**6] * 6), ("labels", "abcdef"),
        ("client", "x" * 100), ("architecture", "x" * 1000),
    ],
)  # fmt: skip
def test_fields_of_the_handshake_have_ranges(field: str, value: Any) -> None:
    """Such a client is refused alone, in one short line."""
    strategy = joined({field: value})
    assert len(roster_of(strategy)) == 3
    (warning,) = strategy.history[0].warnings
    assert warning.startswith("a new node is not used: ")
    assert len(warning) < 2 * LONGEST


def test_what_a_device_says_of_itself_is_short() -> None:
    texts = dict.fromkeys(("device", "columns", "code-version", "weights"), FORGED + "y" * 10**6)
    client = roster_of(joined(texts))[0]
    for text in (client.device, client.columns, client.code_version, client.weights):
        assert text.isprintable()
        assert len(text) <= 64
