import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pbfl_flwr.errors import PbflError
from pbfl_flwr.prototypes import alignment
from pbfl_flwr.prototypes.alignment import (
    Geometry,
    align,
    forces,
    geometry,
    squared_distances,
)


def relu_like(num_classes, dim, seed=0):
    """Starts like aggregated ReLU features: non-negative, with a common part."""
    random = torch.Generator().manual_seed(seed)
    common, spread = torch.rand(dim, generator=random), torch.rand(dim, generator=random)
    return torch.randn(num_classes, dim, generator=random).relu() * spread + 0.5 * common


def gaussian(num_classes, dim, seed=0):
    return torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(seed))


def everybody(rows):
    return torch.ones(len(rows), dtype=torch.bool)


def literal_forces(units):
    """Eq. 11 as it stands: all K² differences."""
    difference = units.unsqueeze(1) - units.unsqueeze(0)
    inverse = 1 / ((difference**2).sum(-1) + 1e-10)
    inverse.fill_diagonal_(0)
    return (inverse.unsqueeze(-1) * difference).sum(1)


def literal_alignment(prototypes, max_steps=500):
    """Algorithm 1 with the published schedule and stopping rule, in broadcast form; also returns the steps."""
    units = prototypes / prototypes.norm(dim=1, keepdim=True)
    velocity, step = torch.zeros_like(units), 0.1
    previous, unchanged = None, 0
    for t in range(max_steps):
        force = literal_forces(units)
        velocity = 0.9 * velocity + step * force
        units = units + velocity
        units = units / units.norm(dim=1, keepdim=True)
        if t % 10 == 0:
            step *= 0.95
        mean_force = f"{float(force.norm(dim=1).mean()):.4f}"
        if t > 10:
            unchanged = unchanged + 1 if mean_force == previous else 0
            if unchanged == 10:
                return units, t + 1
        previous = mean_force
    return units, max_steps


def literal_energy(units):
    units = units.double()
    return sum(
        -math.log(float((units[j] - units[k]).norm()))
        for j in range(len(units))
        for k in range(j + 1, len(units))
    )


def simplex_energy(num_classes):
    return -num_classes * (num_classes - 1) / 4 * math.log(2 * num_classes / (num_classes - 1))


@pytest.mark.parametrize(
    ("num_classes", "dtype"), [(10, "float32"), (10, "float64"), (100, "float32"), (200, "float32")]
)
def test_thomson_agrees_with_the_published_algorithm(num_classes, dtype):
    start = relu_like(num_classes, 512)
    expected, steps = literal_alignment(start.to(getattr(torch, dtype)))
    result = align(start, everybody(start))
    assert result.iterations == steps
    assert 20 <= steps <= 40
    assert result.converged
    torch.testing.assert_close(result.values, expected.float(), atol=1e-5, rtol=0)
    assert result.after.energy == pytest.approx(literal_energy(expected), abs=1e-4)
    units = torch.nn.functional.normalize(start.double(), dim=1)
    assert result.before.energy == pytest.approx(literal_energy(units), abs=1e-4)


def test_thomson_agrees_when_there_are_more_classes_than_dimensions():
    start = gaussian(12, 4).double()
    expected, steps = literal_alignment(start, 40)
    result = align(start, everybody(start), max_steps=40)
    assert result.iterations == steps
    torch.testing.assert_close(result.values, expected.float(), atol=1e-5, rtol=0)


def test_the_bound_on_steps_is_reported():
    start = gaussian(12, 4)
    bounded = align(start, everybody(start), max_steps=3)
    assert bounded.iterations == 3
    assert not bounded.converged


@settings(max_examples=40)
@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 10_000))
@example(10, 2, 1330)  # two points 3e-4 apart, just above the limit under which pairs are computed exactly
def test_forces_are_eq_11_and_their_radial_part_is_constant(num_classes, dim, seed):
    units = gaussian(num_classes, dim, seed).double()
    units /= units.norm(dim=1, keepdim=True)
    force = forces(units)
    expected = literal_forces(units)
    # A distance by the Gram matrix is wrong by 4 eps or less, which counts where the closest pair is not done exactly.
    rounding = 4 * torch.finfo(torch.float64).eps / max(float(torch.pdist(units).min()) ** 2, 3e-8)
    assert float((force - expected).norm()) <= max(1e-9, rounding) * float(expected.norm())
    radial = (force * units).sum(1)
    torch.testing.assert_close(radial, torch.full_like(radial, (num_classes - 1) / 2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("gap", [1e-1, 1e-2, 1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 2e-3)])
def test_forces_of_close_pairs_are_exact(gap, dtype, tolerance):
    units = relu_like(8, 64).double()
    units[1] = units[0] + gap * gaussian(1, 64, 5).double()[0] / 8
    units[6:8] = units[5] + gap * gaussian(2, 64, 6).double() / 8
    units = (units / units.norm(dim=1, keepdim=True)).to(dtype)
    expected = literal_forces(units.double())  # of the very same rounded points
    error = (forces(units).double() - expected).norm(dim=1)
    assert bool((error <= tolerance * expected.norm(dim=1)).all())


def test_forces_of_a_table_that_is_one_cluster_are_exact():
    units = relu_like(1, 64).double() + 1e-4 * gaussian(40, 64).double()
    units /= units.norm(dim=1, keepdim=True)
    expected = literal_forces(units)
    torch.testing.assert_close(forces(units), expected, rtol=1e-7, atol=1e-7 * float(expected.abs().max()))


@pytest.mark.parametrize("at_once", [1, 4, 5, 4096])
def test_close_pairs_are_mended_on_both_sides_however_many_at_a_time(at_once, monkeypatch):
    monkeypatch.setattr(alignment, "PAIRS_AT_ONCE", at_once)
    units = relu_like(8, 64).double()
    units[1:4] = units[0] + 1e-6 * gaussian(3, 64).double()  # 6 close pairs and, with rows 6 and 7, a seventh
    units[6] = units[7] + 1e-6
    literal = ((units.unsqueeze(1) - units.unsqueeze(0)) ** 2).sum(2)
    torch.testing.assert_close(squared_distances(units), literal, rtol=1e-7, atol=0)
    error = (forces(units) - literal_forces(units)).norm(dim=1)
    assert bool((error <= 1e-7 * literal_forces(units).norm(dim=1)).all())


@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5, 1e-8, 0.0])
@pytest.mark.parametrize("solver", ["thomson", "simplex"])
def test_near_coincident_prototypes_do_not_blow_up(gap, solver):
    start = relu_like(10, 64).double()
    start[1] = start[0] + gap * gaussian(1, 64, 1).double()[0]
    report = align(start, everybody(start), solver)
    assert math.isfinite(report.before.energy)
    assert report.after.energy < simplex_energy(10) + 0.2
    assert report.after.min_distance > 1.35
    assert report.replaced == (1 if gap < 1e-7 else 0)


@pytest.mark.parametrize("solver", ["thomson", "simplex"])
def test_two_equal_prototypes_become_opposite(solver):
    start = torch.ones(2, 4)
    report = align(start, everybody(start), solver)
    assert report.replaced == 1
    torch.testing.assert_close(report.values[0], -report.values[1], atol=1e-3, rtol=0)


def test_zero_rows_get_a_seeded_direction():
    start = relu_like(5, 16)
    start[[1, 3]] = 0
    first = align(start, everybody(start), seed=4)
    assert first.replaced == 2
    torch.testing.assert_close(first.values.norm(dim=1), torch.ones(5))
    assert torch.equal(first.values, align(start, everybody(start), seed=4).values)
    assert not torch.equal(first.values, align(start, everybody(start), seed=5).values)
    assert start[1].abs().sum() == 0


@pytest.mark.parametrize("solver", ["thomson", "simplex"])
def test_absent_classes_take_no_part(solver):
    start = relu_like(8, 32)
    present = torch.tensor([True, False, True, True, False, True, True, False])
    start[~present] = float("nan")
    result = align(start, present, solver)
    alone = align(start[present], everybody(start[present]), solver)
    assert torch.equal(result.values[present], alone.values)
    assert torch.equal(result.values[~present], torch.zeros(3, 32))
    assert result.metrics() == alone.metrics()
    assert result.values.dtype == torch.float32


@pytest.mark.parametrize("solver", ["thomson", "simplex"])
def test_one_class_or_none_is_left_in_its_direction(solver):
    start = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    one = align(start, torch.tensor([True, False]), solver)
    torch.testing.assert_close(one.values, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    assert one.iterations == 0
    none = align(start, torch.tensor([False, False]), solver)
    assert none.values.abs().sum() == 0
    assert none.after.energy == 0


@pytest.mark.parametrize(
    ("num_classes", "dim", "distance", "energy"),
    [
        (2, 512, 2.0, -math.log(2)),
        (3, 2, math.sqrt(3), -3 * math.log(math.sqrt(3))),  # K = d + 1: the triangle
        (10, 512, 1.490712, -17.96642),
        (100, 512, 1.421338, -1740.41385),
        (102, 512, math.sqrt(204 / 101), -1810.57515),
        (200, 512, 1.417763, -6946.68924),
        (65, 64, math.sqrt(130 / 64), None),
    ],
)
def test_simplex_is_regular(num_classes, dim, distance, energy):
    start = relu_like(num_classes, dim)
    result = align(start, everybody(start), "simplex")
    distances = torch.pdist(result.values.double())
    assert float(distances.min()) == pytest.approx(distance, abs=1e-6)
    assert float(distances.max()) == pytest.approx(distance, abs=1e-6)
    torch.testing.assert_close(result.values.norm(dim=1), torch.ones(num_classes), atol=1e-6, rtol=0)
    assert float(result.values.sum(0).abs().max()) < 1e-5
    expected = simplex_energy(num_classes) if energy is None else energy
    assert result.after.energy == pytest.approx(expected, abs=1e-5)
    assert result.after.margin == pytest.approx(distance, abs=1e-6)


def test_simplex_is_the_nearest_one():
    start = relu_like(6, 9).double()
    start /= start.norm(dim=1, keepdim=True)
    best = align(start, everybody(start), "simplex").values.double()
    closeness = float((best * start).sum())
    for seed in range(20):  # turned by a rotation of any size, it is never closer
        generator = gaussian(9, 9, seed).double() * 0.3 ** (seed % 5)
        rotation = torch.linalg.matrix_exp(generator - generator.T)
        assert float((best @ rotation * start).sum()) <= closeness + 1e-6
    torch.testing.assert_close(align(best, everybody(best), "simplex").values, best.float())  # a fixed point


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_simplex_of_prototypes_in_a_subspace(rank):
    start = gaussian(6, rank) @ gaussian(rank, 9, 1)
    result = align(start, everybody(start), "simplex")
    torch.testing.assert_close(torch.pdist(result.values), torch.full((15,), math.sqrt(12 / 5)))


@settings(max_examples=15)
@given(st.integers(2, 9), st.integers(8, 20), st.integers(0, 1000))
def test_thomson_is_not_below_the_simplex(num_classes, dim, seed):
    start = gaussian(num_classes, dim, seed)
    lowest = align(start, everybody(start), "simplex").after.energy
    assert lowest <= align(start, everybody(start)).after.energy + 1e-9


def test_the_solver_is_watched_from_the_start_to_the_end():
    start, seen = gaussian(7, 3), []
    result = align(start, everybody(start), watch=lambda units: seen.append(units.clone()))
    assert len(seen) == 1 + result.iterations
    torch.testing.assert_close(seen[0].float(), start / start.norm(dim=1, keepdim=True))
    assert torch.equal(seen[-1].float(), result.values)


def test_geometry_by_hand():
    # a square on the unit circle: 4 sides of √2, 2 diagonals of 2
    square = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    shape = geometry(square)
    assert shape.energy == pytest.approx(-4 * math.log(math.sqrt(2)) - 2 * math.log(2))
    assert shape.min_distance == pytest.approx(math.sqrt(2))
    assert shape.mean_distance == pytest.approx((4 * math.sqrt(2) + 2 * 2) / 6)
    assert shape.max_distance == pytest.approx(2)
    # without (0, -1), (-1, 0) and (1, 0) and (0, 1): every nearest neighbour is √2 away; one alone moves the margin
    lopsided = torch.tensor([[1.0, 0.0], [0.8, 0.6], [-1.0, 0.0]])
    assert geometry(lopsided).margin == pytest.approx(math.sqrt(1.8**2 + 0.6**2))  # of (-1, 0), to (0.8, 0.6)
    assert geometry(lopsided).min_distance == pytest.approx(math.sqrt(0.2**2 + 0.6**2))


def test_a_single_prototype_has_no_geometry():
    assert geometry(torch.tensor([[0.6, 0.8]])) == Geometry(0.0, 0.0, 0.0, 0.0, 0.0) == Geometry()


def test_user_errors_are_named():
    with pytest.raises(PbflError, match="6 classes and feature-dim is 4"):
        align(gaussian(6, 4), everybody(gaussian(6, 4)), "simplex")


def test_unit_is_the_length_alone() -> None:
    rows = torch.tensor([[3.0, 4.0], [9.0, 9.0], [0.0, 5.0]])
    actual = align(rows, torch.tensor([True, False, True]), "unit")
    torch.testing.assert_close(actual.values, torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, 1.0]]))
    assert (actual.iterations, actual.converged) == (0, True)
    assert actual.before == actual.after
