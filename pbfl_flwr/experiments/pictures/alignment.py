"""Convergence of prototype alignment: within the last round, and over rounds (ProtoNorm, Fig. 3a and 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.artefacts import alignment_trajectory
from pbfl_flwr.experiments.pictures.style import (
    GRID,
    Picture,
    canvas,
    curve,
    curve_axes,
    logarithmic,
    of_available,
    titled_picture,
)
from pbfl_flwr.experiments.results import RunGroup

ITERATIONS = "alignment-iterations"
SMALLEST_GAP = 1e-9  # an energy closer than this to the optimum is equal to it up to rounding


def least_angle(distance: float) -> float:
    """Return the angle in degrees between unit vectors at a Euclidean distance."""
    return math.degrees(2 * math.asin(min(1.0, distance / 2)))


def optimum(num_rows: int, dim: int) -> tuple[float, float] | None:
    """Return (energy, pairwise distance) of the regular simplex, None if K > d + 1, where there is none."""
    if num_rows > dim + 1:
        return None
    squared = 2 * num_rows / (num_rows - 1)
    return -num_rows * (num_rows - 1) / 4 * math.log(squared), math.sqrt(squared)


def within_a_phase(groups: Sequence[RunGroup]) -> Iterator[Picture | PbflError]:
    """Yield distances and energy over the iterations of the last round's alignment."""
    trajectories, reasons = of_available(groups, lambda group: alignment_trajectory(group.first))
    yield from reasons
    if not trajectories:
        return
    figure, (axes,) = canvas(3.0)
    grey = ""
    for number, group, trajectory in trajectories:
        steps = range(len(trajectory.steps))
        mean = [at.mean_distance for at in trajectory.steps]
        low, high = (
            [getattr(at, name) for at in trajectory.steps] for name in ("min_distance", "max_distance")
        )
        curve(axes, steps, mean, group.label, number, (low, high))
        best = optimum(trajectory.num_rows, group.first.about.task.feature_dim)
        if best is not None:
            axes.axhline(best[1], color=GRID, linewidth=1.2, zorder=0)
            grey = " Grey: the regular simplex, which is optimal."
    curve_axes(axes, "iteration", "pairwise distance (unit sphere)", whole=True)
    yield titled_picture(
        "alignment-distances",
        "Distances of prototypes during alignment",
        "Mean pairwise distance in the last round, recomputed from the server's aggregate; band: minimum to maximum."
        + grey,
        figure,
    )
    figure, (axes,) = canvas(3.0)
    for number, group, trajectory in trajectories:
        best = optimum(trajectory.num_rows, group.first.about.task.feature_dim)
        floor = best[0] if best is not None else min(at.energy for at in trajectory.steps)
        gaps = [at.energy - floor for at in trajectory.steps]
        gaps = [gap for gap in gaps if gap > SMALLEST_GAP] or [SMALLEST_GAP]
        curve(axes, range(len(gaps)), gaps, group.label, number)
    curve_axes(axes, "iteration", "energy above the optimum", whole=True)
    logarithmic(axes.yaxis)
    yield titled_picture(
        "alignment-energy",
        "Thomson energy during alignment",
        "Σ ln(1/distance) over all pairs minus that of the regular simplex (if K > d + 1: minus the lowest value "
        "reached), last round.",
        figure,
    )


def over_rounds(groups: Sequence[RunGroup]) -> Iterator[Picture | PbflError]:
    """Yield the number of iterations and the smallest angles of every round's alignment."""
    figure, (above, below) = canvas(4.2, rows=2)
    for number, group in enumerate(groups):
        entries = [
            (
                run.round,
                {name: value for name, value in run.server_metrics.items() if value is not None},
            )
            for run in group.first.rounds
            if run.server_metrics.get(ITERATIONS) is not None
        ]
        if not entries:
            yield PbflError(f"{group.label}: {group.first.config['method']} does not align its prototypes")
            continue
        rounds = [number for number, _ in entries]
        steps = [metrics[ITERATIONS] for _, metrics in entries]
        curve(above, rounds, steps, group.label, number)
        angles = {
            when: [least_angle(metrics[f"alignment-min-distance-{when}"]) for _, metrics in entries]
            for when in ("before", "after")
        }
        curve(below, rounds, angles["after"], "", number, linestyle="-")
        curve(below, rounds, angles["before"], "", number, linestyle=":")
    if not above.lines:
        return
    curve_axes(above, "round", "iterations", whole=True)
    curve_axes(below, "round", "least angle (degrees)", whole=True)
    above.set_ylim(bottom=0)
    below.set_ylim(bottom=0)
    yield titled_picture(
        "alignment-over-rounds",
        "Alignment over rounds",
        "Above: iterations until the solver stopped. Below: the smallest angle between two prototypes, dotted before "
        "and solid after alignment.",
        figure,
    )
