"""Which classes are answered right, and on which clients (runs with ``per-class``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.experiments.pictures.style import (
    COLOURS,
    Picture,
    canvas,
    class_axis,
    finished,
    heatmap,
    key_below,
    lines,
    look,
)
from pbfl_flwr.experiments.results.artefacts import NotThere
from pbfl_flwr.experiments.results.per_class import Scored
from pbfl_flwr.experiments.results.records import Group, Record


def accuracy_by_class(groups: Sequence[Group]) -> Iterator[Picture | NotThere]:
    """Yield the last accuracies of the classes by every predictor, and below them the test samples of each class."""
    for number, group in enumerate(groups):
        record = group.first
        run = Scored(group.label, record.about, record.rounds, record.by)
        if not run.last:
            yield from _not_scored(group)
            continue
        tested = np.array(run.last[run.predictor][1]["tested"])
        figure, (axes, below) = canvas(height=3.9, rows=2)
        places, said = np.arange(len(tested)), []
        for place, (name, (_, found)) in enumerate(run.last.items()):
            each = 100 * np.array(found["by_class"], dtype=float)  # NaN where there are no samples
            beside = 0.6 * ((place + 0.5) / len(run.last) - 0.5)  # or else equal accuracies hide one another
            axes.plot(places + beside, each, label=name, **{**look(place), "linestyle": "none"})
            said.append(f"{name} {np.nanmin(each):.0f} to {np.nanmax(each):.0f} %")
        below.bar(places, tested, color=COLOURS[-1], width=0.7)
        for part, what in ((axes, "accuracy (%)"), (below, "test samples")):
            lines(part, "class", what)
            part.grid(visible=False, axis="x")
            part.set_xlim(-0.6, len(tested) - 0.4)
            class_axis(part, record.label_names)
        axes.set_ylim(-6, 106)
        key_below(figure, axes)
        balance = run.last[run.predictor][1]
        yield finished(
            f"accuracy-by-class-{number}",
            f"Accuracy by class: {group.label}",
            "Accuracy of each class in the last round over the test samples of all clients together, every predictor, "
            f"and how many those samples are. Predictor '{run.predictor}': {100 * balance['weighted']:.1f} % of the "
            f"samples, {100 * balance['balanced']:.1f} % in the mean of the classes. First seed.",
            f"Accuracies of {len(tested)} classes, from the lowest to the highest: {'; '.join(said)}. A class has "
            f"{tested.min()} to {tested.max()} test samples.",
            figure,
        )


def clients_by_class(groups: Sequence[Group]) -> Iterator[Picture | NotThere]:
    """Yield a heatmap of the accuracy, class x client, by the predictor that is shown, in the last round."""
    for number, group in enumerate(groups):
        record = group.first
        found = _by_client(record)
        if found is None:
            yield from _not_scored(group)
            continue
        clients, matrix = found
        figure, (axes,) = canvas()
        heatmap(
            axes,
            100 * matrix.T,
            xlabel="client",
            ylabel="class",
            unit="accuracy (%)",
            rows=record.label_names,
            columns=[str(client) for client in clients],
            limits=(0, 100),
        )
        known = 100 * matrix[~np.isnan(matrix)]
        yield finished(
            f"clients-by-class-{number}",
            f"Accuracy by class and client: {group.label}",
            f"Accuracy of '{record.predictor}' in the last round on each client's test samples of each class; blank: "
            "it has none. First seed.",
            f"Heatmap of {matrix.shape[1]} classes by {matrix.shape[0]} clients; {len(known)} cells have test samples, "
            f"their mean is {known.mean():.0f} %.",
            figure,
        )


def _by_client(record: Record) -> tuple[list[int], NDArray[np.float64]] | None:
    """Return (clients, accuracies (M, K)) by the predictor that is shown, of the last round in which it was scored.

    Liars are left out.
    """
    last: list[Any] = (
        [record.clients[-1]["final"]] if record.clients and "final" in record.clients[-1] else []
    )
    liars = record.about.get("malicious", [])
    for line in (*last, *reversed(record.clients)):
        pairs = zip(line["client"], line.get("by_class", []), strict=False)
        named = {
            client: counts
            for client, counts in pairs
            if record.predictor in counts.get("right", {}) and sum(counts["tested"]) and client not in liars
        }
        if named:
            clients = sorted(named)
            matrix = np.full((len(clients), len(record.label_names)), np.nan)
            for row, client in enumerate(clients):
                counts = named[client]
                tested, right = np.array(counts["tested"]), np.array(counts["right"][record.predictor])
                held = tested > 0
                matrix[row, np.array(counts["classes"])[held]] = right[held] / tested[held]
            return clients, matrix
    return None


def _not_scored(group: Group) -> Iterator[NotThere]:
    """Yield why there is nothing, of a run that was asked for it."""
    if group.first.config.get("per-class"):
        yield NotThere(f"{group.label}: no client was scored{f' by {group.by}' if group.by else ''}")
