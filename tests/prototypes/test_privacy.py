"""What leaves the device: sensitivities by brute force, ε against an integral, every stage by hand."""

import itertools
import math
import re
from typing import Any, cast

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from pbfl_flwr.config import PrivacySettings, Scalar, parse
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client
from pbfl_flwr.methods import SECTIONS, build_method, using
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.prototypes.class_means import class_means, class_sums
from pbfl_flwr.prototypes.privacy import (
    Release,
    clip_norms,
    delta_of,
    epsilon_of,
    gaussian,
)
from pbfl_flwr.task import Task

C = 1.5
TASK = Task(num_classes=2, feature_dim=2, input_shape=(1, 1, 1))
# Features of up to twice the clipping norm in eight directions, and none at all.
GRID = [(0.0, 0.0)] + [
    (r * math.cos(a * math.pi / 4), r * math.sin(a * math.pi / 4)) for a in range(8) for r in (C, 2 * C)
]


def client_of(labels: list[int], memory: dict[str, Tensor] | None = None) -> Client:
    shard = Shard(torch.zeros(len(labels), 1, 1, 1), torch.tensor(labels, dtype=torch.int64))
    data = ClientData(shard, shard, 2, ("a", "b"), torch.ones(1, 1, 1), torch.zeros(1, 1, 1))
    return Client(0, 1, TASK, cast(SplitModel, None), data, memory=memory or {})


def table(stage: Release, samples: list[tuple[tuple[float, float], int]]) -> tuple[Tensor, Tensor]:
    """What a client with these features and labels sends."""
    features = torch.tensor([feature for feature, _ in samples], dtype=torch.float64).reshape(-1, 2)
    labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
    if stage.of_samples is not None:
        features = stage.of_samples(features)
    sums, counts = class_sums(features, labels, 2)
    released = stage.table(client_of(labels.tolist()), class_means(sums, counts), counts).payload
    return released.values, released.present


def stage_of(scaled: bool, **keys: Any) -> Release:
    return Release(PrivacySettings(**{"min_class_count": 1, "dp_clip": C, **keys}), scaled)


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_one_sample_moves_a_table_by_at_most_the_sensitivity(m: int, scaled: bool) -> None:
    """Every data set of up to three samples of a class, out of five features, and every one that has one more."""
    stage = stage_of(scaled, dp_unit="sample", min_class_count=m)
    allowed = stage.sensitivity(2)
    points = [GRID[0], GRID[1], GRID[2], GRID[9], GRID[10]]  # 0, and C and 2C in two opposite directions
    largest = 0.0
    for size in range(4):
        for base in itertools.combinations_with_replacement(points, size):
            before = table(stage, [(point, 0) for point in base])
            for more in points:
                after = table(stage, [(point, 0) for point in (*base, more)])
                if torch.equal(before[1], after[1]):
                    largest = max(largest, float(torch.linalg.vector_norm(after[0] - before[0])))
    assert largest == pytest.approx(allowed)  # never more, and it is reached


def test_a_sample_changes_the_row_of_its_class_only() -> None:
    stage = stage_of(True, dp_unit="sample")
    base = [(GRID[3], 0), (GRID[5], 1)]
    difference = table(stage, [*base, (GRID[9], 1)])[0] - table(stage, base)[0]
    assert torch.equal(difference[0], torch.zeros(2, dtype=torch.float64))
    assert float(torch.linalg.vector_norm(difference)) == pytest.approx(C)


@pytest.mark.parametrize("scaled", [False, True])
def test_two_clients_differ_by_at_most_the_sensitivity(scaled: bool) -> None:
    """Whatever the two hold and their networks make of it: K rows of norm C each."""
    stage = stage_of(scaled)
    allowed = stage.sensitivity(2)
    assert allowed == 2 * C * math.sqrt(2)
    tables = [table(stage, [(a, 0), (b, 1)]) for a in GRID for b in GRID]
    largest = max(
        float(torch.linalg.vector_norm(left[0] - right[0]))
        for left, right in itertools.product(tables, repeat=2)
    )
    assert largest == pytest.approx(allowed)


# Accounting -------------------------------------------------------------------------------------------------


def integrated(epsilon: float, mu: float) -> float:
    """∫ max(p - e^ε·q, 0) of p = N(μ, 1) and q = N(0, 1): what δ is, without the closed form."""
    start = epsilon / mu + mu / 2  # where the two densities meet
    return float(
        integrate.quad(
            lambda x: stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x), start, start + 40
        )[0]
    )


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (1.0, 20), (5.0, 20), (20.0, 300), (0.7, 3)])
@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_epsilon_agrees_with_the_integral(noise: float, releases: int, delta: float) -> None:
    epsilon = epsilon_of(noise, releases, delta)
    assert integrated(epsilon, math.sqrt(releases) / noise) == pytest.approx(delta, rel=1e-4)


def test_published_values() -> None:
    # Balle and Wang's own example: ε = 1 at δ = 1e-5 needs σ = 3.730632 at sensitivity 1.
    assert epsilon_of(3.730632, 1, 1e-5) == pytest.approx(1.0, abs=1e-5)
    assert delta_of(0.0, 1.0) == pytest.approx(2 * stats.norm.cdf(0.5) - 1)  # total variation distance


def test_releases_add_up() -> None:
    assert epsilon_of(2.0, 9, 1e-5) == pytest.approx(epsilon_of(2.0 / 3, 1, 1e-5))
    assert epsilon_of(2.0, 0, 1e-5) == 0.0
    assert epsilon_of(1e6, 1, 1e-5) == 0.0  # δ alone covers it
    result = [epsilon_of(1.0, releases, 1e-5) for releases in (1, 2, 10, 1000, 100_000)]
    assert result == sorted(result)
    assert math.isfinite(result[-1])


# Stages -----------------------------------------------------------------------------------------------------


def test_clipping_by_hand() -> None:
    rows = clip_norms(torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]), 2.5)
    torch.testing.assert_close(rows, torch.tensor([[1.5, 2.0], [0.3, 0.4], [0.0, 0.0]]))


def test_a_class_of_one_sample_stays_at_home() -> None:
    means = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    stage = Release(PrivacySettings(min_class_count=2))
    sent = stage.table(client_of([0, 0, 0, 1]), means, torch.tensor([3, 1]))
    assert sent.payload.present.tolist() == [True, False]
    assert sent.payload.values.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert sent.payload.counts is not None
    assert sent.payload.counts.tolist() == [3, 0]
    assert sent.metrics == {"held-back": 1.0}
    # Three samples of which the training has seen one: its mean is a raw feature as well.
    seen_once = stage.table(client_of([0, 0, 0, 1]), means, torch.tensor([1, 1]))
    assert not seen_once.payload.present.any()


def test_noise_has_its_deviation_and_is_never_the_same() -> None:
    numbers = gaussian(400, 100)
    assert stats.kstest(numbers.flatten().numpy(), "norm").pvalue > 1e-6
    assert not torch.equal(numbers, gaussian(400, 100))
    stage = stage_of(True, dp_noise=3.0)
    assert stage.sensitivity(2) == pytest.approx(2 * C * math.sqrt(2))
    client, means = client_of([0, 0]), torch.zeros(2, 2)
    first, second = (stage.table(client, means, torch.tensor([2, 0])).payload.values for _ in range(2))
    assert not torch.equal(first, second)
    seeded = stage_of(True, dp_noise=3.0, dp_randomness="seed")
    first, second = (seeded.table(client, means, torch.tensor([2, 0])).payload.values for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_noise_is_finite_for_every_draw(byte: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pbfl_flwr.prototypes.privacy.os.urandom", lambda size: byte * size)
    # The outermost of 2^52 numbers on either side, u = 2^-53: Φ^-1(u) is -8.2095; half the sum of four is twice that.
    assert float(gaussian(1, 1)) == pytest.approx(16.419 if byte == b"\xff" else -16.419, abs=1e-3)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_rows_that_are_sent_bear_the_whole_noise(scaled: bool) -> None:
    stage, means = stage_of(scaled, dp_noise=0.5), torch.full((2, 20_000), 0.25 * C)
    rows = stage.table(client_of([0, 0, 0, 1]), means, torch.tensor([3, 1])).payload.values.double()
    sigma = (
        0.5 * 2 * C * math.sqrt(2)
    )  # z·2C·√K; both rows are clipped to C first, so that an entry is C/√20000
    assert rows.std(1).tolist() == pytest.approx([sigma, sigma], rel=0.05)
    assert rows.mean(1).tolist() == pytest.approx([0, 0], abs=0.05 * sigma)
    assert float((rows[0] * rows[1]).mean()) == pytest.approx(
        0, abs=0.05 * sigma**2
    )  # every entry has its own
    # Noise of a seed can be taken off again: what is left are the clipped rows.
    seeded, client = stage_of(scaled, dp_noise=0.5, dp_randomness="seed"), client_of([0, 0, 0, 1])
    rows = seeded.table(client, means, torch.tensor([3, 1])).payload.values
    noise = sigma * torch.randn(2, 20_000, generator=client.generator("privacy"), dtype=torch.float64)
    left = torch.full((2, 20_000), C / 20_000**0.5, dtype=torch.float64)
    torch.testing.assert_close(rows - noise, left, atol=2e-6, rtol=0)  # float32 of numbers near 8


def test_features_are_clipped_where_a_sample_is_the_unit_and_there_is_a_bound() -> None:
    assert stage_of(False).of_samples is None  # of clients
    assert stage_of(False, dp_unit="sample", dp_clip=0.0).of_samples is None
    clipped = stage_of(False, dp_unit="sample").of_samples
    assert clipped is not None
    torch.testing.assert_close(clipped(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6 * C, 0.8 * C]]))


def test_absent_classes_get_no_noise_where_they_are_not_sent() -> None:
    sent = (
        stage_of(False, dp_noise=3.0)
        .table(client_of([0, 0]), torch.zeros(2, 2), torch.tensor([2, 0]))
        .payload
    )
    assert sent.present.tolist() == [True, False]
    assert sent.values[1].tolist() == [0.0, 0.0]


def test_the_client_counts_its_releases() -> None:
    stage, memory = stage_of(False, dp_noise=3.0), dict[str, Tensor]()
    for releases in (1, 2, 3):
        sent = stage.table(client_of([0, 0], memory), torch.zeros(2, 2), torch.tensor([2, 0]))
        memory = dict(sent.memory)
        assert sent.metrics == {"epsilon": epsilon_of(3.0, releases, 1e-5)}


# Configuration ----------------------------------------------------------------------------------------------

NOISE: dict[str, Scalar] = {"dp-clip": 1.0, "dp-noise": 1.0}
SEEN_TWICE_OR_NEVER: list[dict[str, Scalar]] = [
    {"collect": "trajectory"},
    {"collect": "last-epoch"},
    {"drop-last": "always"},
    {"drop-last": "always", "method": "fedgh"},
]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dp-noise": 1.0}, "dp-noise needs a clipping norm"),
        ({"dp-noise": 1e-320, "dp-clip": 1.0}, "hides nothing; must be 0, or at least 1e-06"),
        ({**NOISE, "dp-delta": 1e-320}, "must be greater than or equal to 0.000000000000001"),
        ({"dp-noise": 1.0, "dp-clip": 1.0, "aggregation": "weighted"}, "sends exact counts"),
        ({"dp-noise": 1.0, "dp-clip": 1.0, "aggregation": "ppa"}, "sends n_i exactly; set total-examples"),
        ({**NOISE, "method": "tinyproto"}, "sends n_i exactly; set aps-scale to a number"),
        ({**NOISE, "dp-unit": "sample", "protocol": "htfl"}, "needs every sample exactly once"),
        ({"dp-clip": 1.0, "dp-unit": "sample", "protocol": "htfl"}, "needs every sample exactly once"),
        *(
            ({"dp-clip": 1.0, "dp-unit": "sample", **alone}, "needs every sample exactly once")
            for alone in SEEN_TWICE_OR_NEVER
        ),
        ({**NOISE, "method": "fedavg"}, "dp-clip = 1.0, dp-noise = 1.0: method 'fedavg'"),
        ({"dp-clip": 1.0, "method": "gfpl"}, "dp-clip = 1.0: method 'gfpl' sends Mixtures"),
        (
            {"min-class-count": 3, "method": "fedcpd"},
            "apply to fedgh, fedproto, fedtgp, tinyproto, protonorm",
        ),
    ],
)
def test_rejects_settings_whose_privacy_cannot_be_guaranteed(keys: dict[str, Scalar], message: str) -> None:
    with pytest.raises(PbflError, match=re.escape(message)) as error:
        build_method(parse(keys, SECTIONS))
    assert "\n" not in str(error.value)


def test_a_minimum_that_some_protocol_has_asks_for_no_protection() -> None:
    for count in (1, 2):
        build_method(parse({"min-class-count": count, "method": "fedavg"}, SECTIONS))


def test_who_uses_the_settings() -> None:
    assert using("dp-noise") == ["fedgh", "fedproto", "fedtgp", "tinyproto", "protonorm"]
