"""Accuracy and bytes over the rounds, accuracy against bytes, and how evenly clients are served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
from matplotlib.axes import Axes

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.experiments.pictures.style import (
    COLOURS,
    Picture,
    canvas,
    finished,
    key_below,
    lines,
    logarithmic,
    look,
    marked,
)
from pbfl_flwr.experiments.results.accuracies import accuracy_by
from pbfl_flwr.experiments.results.artefacts import NotThere
from pbfl_flwr.experiments.results.records import Group, Record
from pbfl_flwr.experiments.text.numbers import kilobytes

MOST_LINES = 50  # clients in one picture
Curve = Sequence[tuple[int, float]]
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def accuracy_over_rounds(groups: Sequence[Group]) -> Iterator[Picture | NotThere]:
    """Yield the curves of the predictor that is shown; of one configuration alone, those of all predictors."""
    figure, (axes,) = canvas()
    said = []
    if len(groups) == 1:
        title, names = f"Accuracy over rounds: {groups[0].label}", list(PREDICTORS)
        curves = {name: [dict(record.curve(name)) for record in groups[0].records] for name in names}
    else:
        title = "Accuracy over rounds"
        curves = {group.label: [dict(record.curve()) for record in group.records] for group in groups}
        for group in groups:
            if not any(curves[group.label]):
                yield NotThere(f"{group.label}: no client was scored by '{group.first.predictor}'")
    drawn = {label: found for label, found in curves.items() if any(found)}
    if not drawn:
        yield NotThere("no client was scored")
        return
    for number, (label, found) in enumerate(drawn.items()):
        rounds, each = _shared(found)
        _band(axes, rounds, 100 * each, label, number)
        if len(rounds):
            said.append(f"{label} ends at {100 * each[:, -1].mean():.1f} % in round {rounds[-1]}")
    lines(axes, "round", "accuracy (%)", whole=True)
    key_below(figure, axes)
    reported = groups[0].by or "the headline predictor of each run"
    what = "all predictors" if len(groups) == 1 else reported
    yield finished(
        "accuracy-over-rounds",
        title,
        f"Test accuracy weighted by samples, {what}. {_seeds(groups)}{_cut(drawn)}",
        f"Curves of accuracy over rounds. {'; '.join(said)}.",
        figure,
    )


def bytes_over_rounds(groups: Sequence[Group]) -> Iterator[Picture | NotThere]:
    """Yield the payload that has travelled, all clients and both ways, over the rounds."""
    figure, (axes,) = canvas()
    totals = {group.label: _travelled(group.first) for group in groups}
    scale, unit = _unit(max(found[-1] for found in totals.values()))
    for number, group in enumerate(groups):
        rounds = [entry["round"] for entry in group.first.rounds]
        shown = np.array(totals[group.label]) / scale
        axes.plot(rounds, shown, label=group.label, markevery=marked(len(rounds)), **look(number))
    lines(axes, "round", f"bytes so far ({unit})", whole=True)
    axes.set_ylim(bottom=0)
    key_below(figure, axes)
    said = "; ".join(f"{label} {kilobytes(found[-1])}" for label, found in totals.items())
    yield finished(
        "bytes-over-rounds",
        "Bytes over rounds",
        "Encoded payloads of all clients, up and down, added up; without Flower's own objects, which the table of "
        "costs has. The first seed of each configuration.",
        f"Curves of the bytes that have travelled. In the end: {said}.",
        figure,
    )


def accuracy_against_bytes(groups: Sequence[Group]) -> Iterator[Picture | NotThere]:
    """Yield what accuracy was reached by the time so much had travelled."""
    figure, (axes,) = canvas()
    totals = {group.label: _travelled(group.first) for group in groups}
    scale, unit = _unit(max(found[-1] for found in totals.values()))
    said = []
    for number, group in enumerate(groups):
        record = group.first
        at = dict(zip((entry["round"] for entry in record.rounds), totals[group.label], strict=True))
        points = [(at[done] / scale, 100 * value) for done, value in record.curve() if done in at]
        if not points or not at[max(at)]:
            yield NotThere(f"{group.label}: nothing travelled" if points else f"{group.label}: not scored")
            continue
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, label=group.label, markevery=marked(len(xs)), **look(number))
        said.append(f"{group.label} {ys[-1]:.1f} % for {kilobytes(at[max(at)])}")
    if not said:
        return
    lines(axes, f"bytes so far, all clients ({unit})", "accuracy (%)")
    if max(found[-1] for found in totals.values()) > 20 * min(
        found[0] for found in totals.values() if found[0]
    ):
        logarithmic(axes.xaxis)
    key_below(figure, axes)
    yield finished(
        "accuracy-against-bytes",
        "Accuracy against bytes",
        f"{_accuracy(groups)}, weighted by samples, when so many bytes of payload had travelled (up and down, all "
        "clients; a logarithmic axis where the range is wide). The first seed of each configuration.",
        f"Curves of accuracy against bytes. In the end: {'; '.join(said)}.",
        figure,
    )


def accuracy_of_clients(groups: Sequence[Group]) -> Iterator[Picture | NotThere]:
    """Yield the clients' accuracies in the last round, sorted: a flat curve is a fair method."""
    figure, (axes,) = canvas()
    said = []
    for number, group in enumerate(groups):
        values = sorted(group.first.accuracies().values())
        if not values:
            yield NotThere(
                f"{group.label}: no client was scored by '{group.first.predictor}' in the last round"
            )
            continue
        places = range(1, len(values) + 1)
        shown = [100 * value for value in values]
        axes.plot(places, shown, label=group.label, markevery=marked(len(values)), **look(number))
        said.append(f"{group.label} {shown[0]:.0f} to {shown[-1]:.0f} %")
    if not said:
        return
    lines(axes, "clients, from the worst to the best", "accuracy (%)", whole=True)
    key_below(figure, axes)
    yield finished(
        "accuracy-of-clients",
        "Accuracy of the clients, sorted",
        f"{_accuracy(groups)} of every client in the last round, each run sorted by itself: the flatter, the fairer. "
        "The first seed of each configuration.",
        f"Sorted accuracies of the clients: {'; '.join(said)}.",
        figure,
    )


def clients_over_rounds(groups: Sequence[Group]) -> Iterator[Picture | NotThere]:
    """Yield for every run a thin line a client, and what all of them reach together."""
    for number, group in enumerate(groups):
        record = group.first
        curves, together = record.client_curves(), record.curve()
        if not curves or not together:
            yield NotThere(f"{group.label}: no client was scored by '{record.predictor}'")
            continue
        figure, (axes,) = canvas()
        for place, curve in enumerate(_evenly(curves)):
            _thin(axes, curve, "" if place else "a client")
        rounds, shares = zip(*together, strict=True)
        bold = {**look(1), "linestyle": "-"}
        axes.plot(
            rounds, [100 * share for share in shares], label="all", markevery=marked(len(rounds)), **bold
        )
        lines(axes, "round", "accuracy (%)", whole=True)
        axes.set_ylim(-3, 103)
        key_below(figure, axes)
        some = f"{MOST_LINES} of the {len(curves)} clients, evenly from the worst to the best"
        who = some if len(curves) > MOST_LINES else f"{len(curves)} clients"
        last = sorted(100 * curve[-1][1] for curve in curves.values())
        yield finished(
            f"clients-over-rounds-{number}",
            f"Accuracy of each client over rounds: {group.label}",
            f"{_accuracy(groups)} of {who}, each on its own test data; the thick line is of all, weighted by samples. "
            "The first seed.",
            f"A curve a client, which end between {last[0]:.0f} and {last[-1]:.0f} %; all together reach "
            f"{100 * shares[-1]:.1f} %.",
            figure,
        )


def _evenly(curves: Mapping[int, Curve]) -> list[Curve]:
    """Return as many curves as can be told apart, of clients from the worst to the best when they were last scored."""
    ranked = sorted(curves.values(), key=lambda curve: curve[-1][1])
    places = np.linspace(0, len(ranked) - 1, min(len(ranked), MOST_LINES)).round()
    return [ranked[int(place)] for place in places]


def _thin(axes: Axes, curve: Curve, label: str) -> None:
    rounds, shares = zip(*curve, strict=True)
    shown = [100 * share for share in shares]
    dot = "o" if len(curve) == 1 else ""
    axes.plot(
        rounds, shown, label=label, color=COLOURS[0], linewidth=0.7, alpha=0.45, marker=dot, markersize=2
    )


def _accuracy(groups: Sequence[Group]) -> str:
    return accuracy_by(groups[0].by).capitalize()


def _travelled(record: Record) -> list[int]:
    return list(
        accumulate(entry["bytes_up"]["payload"] + entry["bytes_down"]["payload"] for entry in record.rounds)
    )


def _unit(largest: float) -> tuple[float, str]:
    return next((scale, unit) for scale, unit in UNITS if largest >= scale or scale == 1.0)


def _shared(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], np.ndarray]:
    """Return the rounds that every seed has, and its values there (seeds, rounds)."""
    filled = [curve for curve in curves if curve]
    rounds = sorted(set.intersection(*(set(curve) for curve in filled)))
    return rounds, np.array([[curve[at] for at in rounds] for curve in filled])


def _band(axes: Axes, rounds: Sequence[int], each: np.ndarray, label: str, number: int) -> None:
    axes.plot(rounds, each.mean(axis=0), label=label, markevery=marked(len(rounds)), **look(number))
    if len(each) > 1:
        colour = look(number)["color"]
        axes.fill_between(rounds, each.min(axis=0), each.max(axis=0), color=colour, alpha=0.18, linewidth=0)


def _cut(curves: Mapping[str, Sequence[Mapping[int, float]]]) -> str:
    """Return which curves end before some of their seeds do, in a sentence; nothing where none does."""
    cut = [label for label, found in curves.items() if len({max(curve) for curve in found if curve}) > 1]
    said = " Seeds have different numbers of rounds, and a curve those that all of its seeds have"
    return f"{said}: {'; '.join(cut)}." if cut else ""


def _seeds(groups: Sequence[Group]) -> str:
    most = max(len(group.records) for group in groups)
    return (
        "One seed."
        if most == 1
        else f"Mean of up to {most} seeds; the band reaches from the lowest to the highest."
    )
