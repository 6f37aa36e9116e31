"""The bound on the length of uploaded rows, by hand, and what it is worth against a liar."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pbfl_flwr.config import AttackSettings, Scalar, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.replies import Uploads
from pbfl_flwr.method import Nearest, Round
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes import aggregation
from pbfl_flwr.prototypes.attacks import falsified
from pbfl_flwr.prototypes.norm_bounds import Bounded, bounded, bounds_of
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.seeds import generator
from pbfl_flwr.task import Task
from tests.prototypes.tables import upload

INF = float("inf")


# Lengths of class 0: 5, 10, 20; of class 1: 1, 4; of class 2: 0; nobody has class 3.
SENT = {
    0: upload({0: [3, 4], 1: [0, 1], 2: [0, 0]}),
    4: upload({0: [6, 8]}),
    7: upload({0: [12, 16], 1: [0, 4]}),
}


@pytest.mark.parametrize(
    ("lengths", "bounds"),
    [
        ([[5.0, 1, 0, 0], [10, 0, 0, 0], [20, 4, 0, 0]], [10, 1, INF, INF]),  # of 1 and 4 the lower
        ([[7.0, 3, 2, 0]], [7, 3, 2, INF]),  # one holder is its own median
        ([[2.0], [2], [2], [9]], [2]),  # ties
        ([[1.0], [2], [3], [4]], [2]),
    ],
)
def test_bounds_by_hand(lengths: list[list[float]], bounds: list[float]) -> None:
    assert bounds_of(torch.tensor(lengths, dtype=torch.float64), 1.0).tolist() == bounds
    assert bounds_of(torch.tensor(lengths, dtype=torch.float64), 1.5).tolist() == [1.5 * b for b in bounds]


def test_long_rows_are_scaled_and_others_left_alone() -> None:
    result = Bounded(SENT, 1.5)  # class 0 up to 15, class 1 up to 1.5
    assert list(result) == [0, 4, 7]
    assert result[0] is SENT[0]
    assert result[4] is SENT[4]
    assert result[7].values.tolist() == [[9, 12], [0, 1.5], [0, 0], [0, 0]]
    assert torch.equal(result[7].present, SENT[7].present)
    assert result.cut == 2
    assert SENT[7].values[0].tolist() == [12, 16], "what came stays as it is"
    at_the_bound = Bounded(SENT, 2.0)
    assert at_the_bound[7].values[0].tolist() == [12, 16]
    assert at_the_bound.cut == 1  # 4 in class 1


def test_no_bound_and_no_uploads() -> None:
    assert bounded(SENT, 0.0) == (SENT, {})
    assert bounded({}, 2.0) == ({}, {})
    assert bounded(SENT, 2.0)[1] == {"bounded-rows": 1.0}


# In the pipeline ----------------------------------------------------------------------------------------------

TASK = Task(num_classes=4, feature_dim=2, input_shape=(1, 16, 16))


def method(**keys: Scalar) -> Pipeline:
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    result = build_method(parse({"method": "fedproto", "feature-dim": 2, **given}, SECTIONS))
    assert isinstance(result, Pipeline)
    return result


def aggregate(sent: dict[int, Prototypes], **keys: Scalar) -> tuple[Tensor, dict[str, float]]:
    result = method(**keys)
    state = result.aggregate(result.init(TASK, 0), sent, Round(1, TASK, 8))
    return state.broadcast.values, result.report(state)


@pytest.mark.parametrize(
    ("rule", "row"),
    [
        ("mean", [6, 8]),  # (5 + 10 + 15)/3 along (0.6, 0.8)
        ("median", [6, 8]),
        ("trimmed-mean", [6, 8]),  # ⌊0.2·3⌋ = 0
    ],
)
def test_the_bound_comes_before_the_rule(rule: str, row: list[float]) -> None:
    values, figures = aggregate(SENT, aggregation=rule, norm_bound=1.5)
    assert values[0].tolist() == row
    assert values[1].tolist() == [0, 1.25]  # 1 and 1.5
    assert figures["bounded-rows"] == 2
    assert "bounded-rows" not in aggregate(SENT, aggregation=rule)[1]


def test_weighted_rules_weigh_bounded_rows() -> None:
    sent = {0: upload({0: [3, 4]}, [1, 0, 0, 0]), 1: upload({0: [30, 40]}, [3, 0, 0, 0])}
    values, _ = aggregate(sent, aggregation="weighted", norm_bound=1.0)  # both of length 5
    assert values[0].tolist() == [3, 4]


def test_the_bound_reaches_trained_prototypes() -> None:
    far = {0: SENT[0], 1: upload({0: [3e4, 4e4], 1: [0, 1e4]})}
    cut = {0: SENT[0], 1: upload({0: [3, 4], 1: [0, 1]})}
    quick: dict[str, Scalar] = {"method": "fedtgp", "fedtgp__server_epochs": 3}
    result, _ = aggregate(far, norm_bound=1.0, **quick)
    assert torch.equal(result, aggregate(cut, **quick)[0])
    assert not torch.equal(result, aggregate(far, **quick)[0])


def test_uploads_are_decoded_one_at_a_time() -> None:
    """The sums stream although the bound looks at every upload twice."""
    assert method(norm_bound=1.5).streams()
    streamed: Any = Uploads({client: wire.encode(one) for client, one in SENT.items()}, Prototypes, TASK)
    result = method(norm_bound=1.5)
    state = result.aggregate(result.init(TASK, 0), streamed, Round(1, TASK, 8))
    assert torch.equal(state.broadcast.values, aggregate(SENT, norm_bound=1.5)[0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"aggregation": "ppa"}, "with aggregation = 'ppa' rows are scaled by"),
        ({"method": "tinyproto"}, "with aggregation = 'aps-sum' rows are scaled by"),
        ({"method": "fedgh"}, "norm-bound = 2.0: method 'fedgh' has no such stage; must be 0.0, the default"),
        ({"method": "fedavg", "models": "cnn4"}, "method 'fedavg' has no such stage"),
    ],
)
def test_rejects_the_bound_for_rules_that_scale_rows(keys: dict[str, Scalar], message: str) -> None:
    with pytest.raises(PbflError) as error:
        build_method(parse({"norm-bound": 2.0, **keys}, SECTIONS))
    assert str(error.value).startswith("norm-bound = 2.0: ")
    assert message in str(error.value)


# What it is worth -----------------------------------------------------------------------------------------------


def test_robust_rules_and_the_bound_withstand_a_scaled_upload() -> None:
    """Five clients around (1, 0) and (-1, 0); one sends -10 times its rows."""
    shifts = (-0.2, -0.1, 0.0, 0.1, 0.2)
    honest = {client: upload({0: [1.0, shift], 1: [-1.0, shift]}) for client, shift in enumerate(shifts)}
    sent = {**honest, 2: falsified(honest[2], AttackSettings(kind="scale", factor=-10), generator(0))}

    def predicts(values: Tensor) -> list[int]:
        candidates = torch.tensor([True, True, False, False])
        scores = Nearest(values, candidates)(torch.tensor([[1.0, 0], [-1, 0]]), torch.zeros(2, 4))
        return [int(label) for label in scores.argmax(1)]

    assert predicts(aggregate(honest)[0]) == [0, 1]
    assert predicts(aggregate(sent)[0]) == [1, 0]  # (4 - 10)/5 = -1.2
    assert predicts(aggregate(sent, norm_bound=1.0)[0]) == [0, 1]  # about (4 - 1)/5 = 0.6
    assert predicts(aggregate(sent, aggregation="median")[0]) == [0, 1]
    assert predicts(aggregate(sent, aggregation="trimmed-mean")[0]) == [0, 1]
    left, all_there = aggregate(sent, norm_bound=1.0)[0][0], aggregation.mean(honest.values()).values[0]
    assert 0.55 < float(left[0]) < 0.65 < float(all_there[0]), "it bounds the harm and does not undo it"
