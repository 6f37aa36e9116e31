"""Accuracy and bytes over rounds, accuracy against bytes, and the distribution of accuracy over clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from pbfl_flwr.config import PREDICTORS, in_order
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.notes import accuracy_name
from pbfl_flwr.experiments.pictures.style import (
    COLOURS,
    Picture,
    canvas,
    curve,
    curve_axes,
    logarithmic,
    of_each_run,
    titled_picture,
)
from pbfl_flwr.experiments.results import RunGroup

MOST_LINES = 50  # clients in one picture
Curve = Sequence[tuple[int, float]]


def accuracy_over_rounds(groups: Sequence[RunGroup]) -> Iterator[Picture | PbflError]:
    """Yield accuracy curves of each configuration's shown predictor; for one configuration, of all predictors."""
    figure, (axes,) = canvas()
    if len(groups) == 1:
        title = f"Accuracy over rounds: {groups[0].label}"
        names = in_order([*PREDICTORS, *(name for run in groups[0].runs for name in run.scores)])
        curves = {name: [dict(run.curve(name)) for run in groups[0].runs] for name in names}
    else:
        title = "Accuracy over rounds"
        curves = {group.label: [dict(run.curve()) for run in group.runs] for group in groups}
        for group in groups:
            if not any(curves[group.label]):
                yield PbflError(f"{group.label}: no client was scored by '{group.first.predictor}'")
    drawn = {label: per_seed for label, per_seed in curves.items() if any(per_seed)}
    if not drawn:
        yield PbflError("no client was scored")
        return
    lowest = 100.0
    for number, (label, per_seed) in enumerate(curves.items()):
        if label not in drawn:
            continue  # its number stays its own, so that a run looks alike in all pictures
        rounds, each = _shared(per_seed)
        each = 100 * each
        band = (each.min(axis=0), each.max(axis=0)) if len(each) > 1 else ()
        curve(axes, rounds, each.mean(axis=0), label, number, band)
        lowest = float(each[:, len(rounds) // 20 :].min(initial=lowest))  # seeds may share no round
    curve_axes(axes, "round", "accuracy (%)", whole=True)
    axes.set_ylim(
        bottom=lowest - (axes.get_ylim()[1] - lowest) / 20
    )  # the start would flatten a long run's end
    reported = groups[0].by or "the primary predictor of each run"
    what = "all predictors" if len(groups) == 1 else reported
    yield titled_picture(
        "accuracy-over-rounds",
        title,
        f"Sample-weighted test accuracy, {what}; the first twentieth of the rounds may lie below the picture. "
        f"{_seeds(groups)}{_cut(drawn)}",
        figure,
    )


def bytes_over_rounds(groups: Sequence[RunGroup]) -> Iterator[Picture | PbflError]:
    """Yield the cumulative payload over rounds, all clients and both directions."""
    figure, (axes,) = canvas()
    for number, group in enumerate(groups):
        travelled = group.first.travelled()
        curve(axes, [*travelled], [*travelled.values()], group.label, number)
    curve_axes(axes, "round", "cumulative bytes", whole=True)
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    axes.set_ylim(bottom=0)
    yield titled_picture(
        "bytes-over-rounds",
        "Bytes over rounds",
        "Cumulative encoded payloads of all clients, up and down; without Flower's own objects, which the cost table "
        "has. First seed of each configuration.",
        figure,
    )


def accuracy_against_bytes(groups: Sequence[RunGroup]) -> Iterator[Picture | PbflError]:
    """Yield accuracy against the cumulative payload, all clients and both directions."""
    figure, (axes,) = canvas()
    totals = [group.first.travelled() for group in groups]
    for number, (group, at) in enumerate(zip(groups, totals, strict=True)):
        points = [(at[done], 100 * value) for done, value in group.first.curve() if done in at]
        if not points or not at[max(at)]:
            yield PbflError(
                f"{group.label}: nothing was transmitted" if points else f"{group.label}: not scored"
            )
            continue
        xs, ys = zip(*points, strict=True)
        curve(axes, xs, ys, group.label, number)
    if not axes.lines:
        return
    curve_axes(axes, "cumulative bytes, all clients", "accuracy (%)")
    sizes = [size for at in totals for size in at.values() if size]  # nothing may travel in the first rounds
    if max(sizes) > 20 * min(sizes):
        logarithmic(axes.xaxis)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    yield titled_picture(
        "accuracy-against-bytes",
        "Accuracy against bytes",
        f"Sample-weighted {accuracy_name(groups[0].by)} against the cumulative payload (up and down, all clients; "
        "logarithmic axis if the range is wide). First seed of each configuration.",
        figure,
    )


def accuracy_of_clients(groups: Sequence[RunGroup]) -> Iterator[Picture | PbflError]:
    """Yield the clients' accuracies in the last round, sorted: the flatter the curve, the fairer the method."""
    figure, (axes,) = canvas()
    for number, group in enumerate(groups):
        values = sorted(group.first.accuracies().values())
        if not values:
            yield PbflError(
                f"{group.label}: no client was scored by '{group.first.predictor}' in the last round"
            )
            continue
        shown = [100 * value for value in values]
        curve(axes, range(1, len(values) + 1), shown, group.label, number)
    if not axes.lines:
        return
    curve_axes(axes, "clients, from the worst to the best", "accuracy (%)", whole=True)
    yield titled_picture(
        "accuracy-of-clients",
        "Accuracy of the clients, sorted",
        f"{_accuracy(groups)} of every client in the last round, sorted within each run: the flatter, the fairer. "
        "First seed of each configuration.",
        figure,
    )


@of_each_run
def clients_over_rounds(group: RunGroup) -> Iterator[Picture]:
    """Yield for every run a thin accuracy curve per client, and the sample-weighted accuracy over all clients."""
    run = group.first
    curves, together = run.client_curves(), run.curve()
    if not curves or not together:
        raise PbflError(f"no client was scored by '{run.predictor}'")
    figure, (axes,) = canvas()
    for place, points in enumerate(_evenly(curves)):
        _thin(axes, points, "" if place else "one client")
    rounds, shares = zip(*together, strict=True)
    curve(axes, rounds, [100 * share for share in shares], "all", 1, linestyle="-")
    curve_axes(axes, "round", "accuracy (%)", whole=True)
    axes.set_ylim(-3, 103)
    some = f"{MOST_LINES} of the {len(curves)} clients, evenly spaced from the worst to the best"
    who = some if len(curves) > MOST_LINES else f"{len(curves)} clients"
    yield titled_picture(
        "clients-over-rounds",
        f"Accuracy of each client over rounds: {group.label}",
        f"{_accuracy([group])} of {who}, each on its own test data; thick line: all clients, sample-weighted. "
        "First seed.",
        figure,
    )


def _evenly(curves: Mapping[int, Curve]) -> list[Curve]:
    """Return at most MOST_LINES curves, evenly spaced over the clients ranked by last accuracy."""
    ranked = sorted(curves.values(), key=lambda curve: curve[-1][1])
    places = np.linspace(0, len(ranked) - 1, min(len(ranked), MOST_LINES)).round()
    return [ranked[int(place)] for place in places]


def _thin(axes: Axes, points: Curve, label: str) -> None:
    rounds, shares = zip(*points, strict=True)
    shown = [100 * share for share in shares]
    dot = "o" if len(points) == 1 else ""
    axes.plot(
        rounds, shown, label=label, color=COLOURS[0], linewidth=0.7, alpha=0.45, marker=dot, markersize=2
    )


def _accuracy(groups: Sequence[RunGroup]) -> str:
    return accuracy_name(groups[0].by).capitalize()


def _shared(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], np.ndarray]:
    """Return the rounds that all seeds have, and the values there (seeds, rounds)."""
    filled = [curve for curve in curves if curve]
    rounds = sorted(set.intersection(*(set(curve) for curve in filled)))
    return rounds, np.array([[curve[at] for at in rounds] for curve in filled])


def _cut(curves: Mapping[str, Sequence[Mapping[int, float]]]) -> str:
    """Return a sentence on the curves whose seeds end in different rounds; empty if there are none."""
    cut = [
        label for label, of_label in curves.items() if len({max(curve) for curve in of_label if curve}) > 1
    ]
    sentence = " Seeds with different numbers of rounds, drawn for the rounds that all seeds have"
    return f"{sentence}: {'; '.join(cut)}." if cut else ""


def _seeds(groups: Sequence[RunGroup]) -> str:
    most = max(len(group.runs) for group in groups)
    return "One seed." if most == 1 else f"Mean of up to {most} seeds; band: minimum to maximum."
