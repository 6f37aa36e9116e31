"""What travels: round trips for every table, and nothing but RejectedPayload for everything else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods.gfpl.payload import Mixtures
from pbfl_flwr.payloads import (
    MAX_COUNT,
    Factors,
    LowRank,
    Nothing,
    Payload,
    Prototypes,
    RejectedPayload,
    Weights,
    WeightsAndPrototypes,
    joined,
    part_of,
    separate,
)
from pbfl_flwr.task import Task

TASK = Task(num_classes=5, feature_dim=4, input_shape=(2,))
KINDS: list[type[Payload]] = [Prototypes, Weights, Mixtures, Nothing]


@st.composite
def tables(draw: st.DrawFn) -> Prototypes:
    K, width = TASK.num_classes, draw(st.integers(1, TASK.feature_dim))
    present = torch.tensor(draw(st.lists(st.booleans(), min_size=K, max_size=K)))
    numbers = st.floats(-1e8, 1e8, width=32)
    rows = draw(st.lists(st.lists(numbers, min_size=width, max_size=width), min_size=K, max_size=K))
    values = torch.tensor(rows) * present[:, None]
    counts = None
    if draw(st.booleans()):
        n = draw(st.lists(st.integers(1, MAX_COUNT - 1), min_size=K, max_size=K))
        counts = torch.tensor(n) * present
    return Prototypes(values, present, counts, draw(st.none() | st.integers(0, MAX_COUNT - 1)))


@given(tables())
@settings(max_examples=60)
def test_prototypes_come_back_as_they_were(table: Prototypes) -> None:
    back = Prototypes.from_tensors(table.to_tensors(), TASK)
    assert torch.equal(back.values, table.values)
    assert torch.equal(back.present, table.present)
    assert (back.counts is None) == (table.counts is None)
    if back.counts is not None and table.counts is not None:
        assert torch.equal(back.counts, table.counts)
    assert back.num_examples == table.num_examples
    assert back.scalars() == table.scalars() == int(table.present.sum()) * table.values.shape[1]
    assert len(table.to_tensors()["rows"]) == table.num_present, "absent classes do not travel"


DTYPES = [torch.float32, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
NAMES = ["labels", "rows", "counts", "n", "weights", "means", "stds", "w.a", "w.", "x"]


@st.composite
def anything(draw: st.DrawFn) -> dict[str, Tensor]:
    result = {}
    for name in draw(st.sets(st.sampled_from(NAMES), max_size=5)):
        shape = draw(st.lists(st.integers(0, 6), max_size=3))
        value = draw(st.sampled_from([0.0, 1.0, 3.0, -1.0, 1e30, float("nan"), float("inf")]))
        dtype = draw(st.sampled_from(DTYPES))
        result[name] = torch.full(shape, value).nan_to_num(7.0, 7.0).to(dtype)
        if dtype.is_floating_point:
            result[name] = torch.full(shape, value).to(dtype)
    return result


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(tensors=anything())
@settings(max_examples=150)
def test_of_anything_at_all_only_a_valid_payload_comes_out(
    kind: type[Payload], tensors: dict[str, Tensor]
) -> None:
    try:
        payload = kind.from_tensors(tensors, TASK)
    except RejectedPayload:
        return
    assert payload.scalars() >= 0
    again = kind.from_tensors(payload.to_tensors(), TASK)
    for name, tensor in payload.to_tensors().items():
        assert torch.isfinite(tensor).all()
        assert torch.equal(again.to_tensors()[name], tensor)


def test_empty_prototypes_have_a_shape() -> None:
    empty = Prototypes.empty(5, 3)
    back = Prototypes.from_tensors(empty.to_tensors(), TASK)
    assert back.values.shape == (5, 3)
    assert (back.num_present, back.scalars()) == (0, 0)
    assert Nothing.from_tensors(Nothing().to_tensors(), TASK).scalars() == 0
    with pytest.raises(RejectedPayload, match=r"expected an empty payload, got \['x'\]"):
        Nothing.from_tensors({"x": torch.ones(1)}, TASK)


def test_many_classes_have_wide_labels() -> None:
    task = replace(TASK, num_classes=1000)
    present = torch.zeros(1000, dtype=torch.bool)
    present[[0, 256, 999]] = True
    table = Prototypes(torch.ones(1000, 2) * present[:, None], present)
    assert table.to_tensors()["labels"].dtype == torch.int32
    assert torch.equal(Prototypes.from_tensors(table.to_tensors(), task).present, present)


@pytest.mark.parametrize(
    "n", [torch.tensor([-1]), torch.tensor([MAX_COUNT]), torch.tensor([1, 2]), torch.tensor(1)]
)
def test_the_number_of_examples_is_one_whole_number(n: Tensor) -> None:
    good = Prototypes.empty(5, 3).to_tensors()
    for kind, tensors in ((Prototypes, {**good, "n": n}), (Weights, {"n": n})):
        with pytest.raises(RejectedPayload, match="whole number"):
            kind.from_tensors(tensors, TASK)


def test_weights_travel_under_their_names() -> None:
    sent = Weights({"a.weight": torch.randn(2, 3), "b": torch.tensor(2.0)}, 7)
    assert set(sent.to_tensors()) == {"w.a.weight", "w.b", "n"}
    back = Weights.from_tensors(sent.to_tensors(), TASK)
    assert back.num_examples == 7
    assert back.scalars() == 7  # 2·3 + 1 weights
    assert all(torch.equal(back.tensors[name], sent.tensors[name]) for name in sent.tensors)


@pytest.mark.parametrize("values", [[1.0, 1e9], [-1e9, 1.0], [1e9, 1e9], [-1e9, -1e9]])
def test_numbers_of_either_sign_are_bounded(values: list[float]) -> None:
    with pytest.raises(RejectedPayload, match=r"'w.x' holds 1e\+09, must be at most 1e\+08"):
        Weights.from_tensors({"w.x": torch.tensor(values), "n": torch.tensor([1])}, TASK)


def test_payloads_of_payloads() -> None:
    parts: dict[str, Payload] = {"one": Prototypes.empty(5, 3), "two": Weights({"one.x": torch.ones(2)}, 1)}
    tensors = joined(**parts)
    assert set(part_of(tensors, "one")) == {"labels", "rows"}
    assert Weights.from_tensors(part_of(tensors, "two"), TASK).tensors["one.x"].sum() == 2


def test_separate_tensors_own_their_memory() -> None:
    rows = torch.arange(6.0).reshape(2, 3)
    result = separate({"a": rows, "b": rows, "row": rows[1], "t": rows.T})
    assert all(
        torch.equal(result[name], tensor) for name, tensor in (("a", rows), ("row", rows[1]), ("t", rows.T))
    )
    assert len({tensor.untyped_storage().data_ptr() for tensor in result.values()}) == 4
    assert all(tensor.is_contiguous() for tensor in result.values())


def test_lists_that_are_too_long_are_refused_in_a_short_line() -> None:
    many = torch.full((100_000,), 2**40)
    for kind, tensors in (
        (Prototypes, {"labels": many, "rows": torch.zeros(100_000, 1)}),
        (Weights, {"n": many}),
        (LowRank, {"about": many}),
    ):
        with pytest.raises(RejectedPayload) as error:
            kind.from_tensors(tensors, TASK)
        assert len(str(error.value)) < 120


def test_low_rank_weights_are_as_large_as_their_product() -> None:
    """Also of factors that are no decomposition: with equal singular vectors one is far larger than its values say."""
    one = torch.ones(8, 4)
    factors = Factors(one, torch.full((4,), 0.5), one.T.contiguous())
    upload = LowRank.from_tensors(LowRank({}, {"w": factors}, num_examples=3).to_tensors(), TASK)
    assert upload.magnitudes().tensors == {"w": 2.0}


def test_uploads_name_the_classes_that_they_contain() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    dense = Prototypes(rows, torch.ones(5, dtype=torch.bool))
    sparse = Prototypes(rows, torch.tensor([True, False, False, False, False]))
    components = Mixtures(torch.tensor([3, 1, 3]), torch.ones(3), torch.zeros(3, 4), torch.ones(3, 4))
    weights = Weights({"x": torch.ones(2)}, 1)
    for upload, classes in (
        (dense, [0, 2]),
        (sparse, [0]),
        (WeightsAndPrototypes(weights, sparse), [0]),
        (components, [1, 3]),
        (weights, None),
        (LowRank({}), None),
        (Nothing(), None),
    ):
        assert upload.classes(TASK) == classes


@pytest.mark.parametrize(
    ("counts", "n", "samples"),
    [(None, None, 0), ([5, 2], None, 7), (None, 9, 9), ([5, 2], 9, 9), ([5, 2], 6, 7)],
)
def test_a_table_claims_all_the_samples_that_it_counts(
    counts: list[int] | None, n: int | None, samples: int
) -> None:
    rows, present = torch.tensor([[1.0, 7.0], [-3.0, 3.0]]), torch.ones(2, dtype=torch.bool)
    table = Prototypes(rows, present, None if counts is None else torch.tensor(counts), n)
    assert table.magnitudes().rows == pytest.approx({0: 5.0, 1: 3.0})
    assert table.magnitudes().samples == samples
    weights = Weights({"a": torch.tensor([[1.0, 7.0]]), "b": torch.zeros(0)}, 8)
    both = WeightsAndPrototypes(weights, table).magnitudes()
    assert both.rows == table.magnitudes().rows
    assert both.tensors == weights.magnitudes().tensors == pytest.approx({"a": 5.0, "b": 0.0})
    assert both.samples == max(8, samples)


def test_sizes_of_what_is_sent_in_parts_are_those_of_the_whole() -> None:
    components = Mixtures(
        torch.tensor([3, 1, 3]),
        torch.tensor([40.0, 50.0, 10.0]),
        torch.tensor([[1.0, 7.0], [0.0, 0.0], [0.0, 0.0]]),
        torch.tensor([[0.0, 0.0], [3.0, 3.0], [1.0, 7.0]]),
    )
    assert components.magnitudes().rows == pytest.approx({1: 3.0, 3: 5.0})
    assert components.magnitudes().samples == 99
    u, sigma, v = torch.linalg.svd(torch.randn(6, 9), full_matrices=False)
    factors = Factors(u[:, :2], sigma[:2], v[:2])
    sizes = LowRank({"b": torch.full((3,), -2.0)}, {"w": factors}, num_examples=4).magnitudes()
    size = float((u[:, :2] @ torch.diag(sigma[:2]) @ v[:2]).square().mean().sqrt())
    assert sizes.tensors == pytest.approx({"b": 2.0, "w": size})
    assert sizes.samples == 4


def test_names_of_tensors_are_texts_as_which_they_come_back() -> None:
    tensors: Any = {3: torch.ones(1)}
    for stored in (
        lambda: Weights(tensors).to_tensors(),
        lambda: LowRank(tensors).to_tensors(),
        lambda: separate(tensors),
    ):
        with pytest.raises(PbflError, match=r"^3 is the name of a tensor; must be a text$"):
            stored()
