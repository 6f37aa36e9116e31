"""Accuracy by class, and by class and client (runs with ``per-class``)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.pictures.style import (
    COLOURS,
    Picture,
    canvas,
    curve_axes,
    curve_style,
    heatmap_picture,
    name_ticks,
    of_each_run,
    titled_picture,
)
from pbfl_flwr.experiments.results import FinishedRun, RunGroup


@of_each_run
def accuracy_by_class(group: RunGroup) -> Iterator[Picture]:
    """Yield the class accuracies of every predictor in the last round, above the number of test samples per class."""
    run = group.first
    if not run.by_class:
        _reject_unscored(group)
        return
    predictor = run.predictor_by_class
    shown = run.by_class[predictor][1]
    tested = np.array(shown.tested)
    figure, (axes, below) = canvas(height=3.9, rows=2)
    places = np.arange(len(tested))
    for place, (name, (_, accuracy)) in enumerate(run.by_class.items()):
        each = 100 * np.array(accuracy.by_class, dtype=float)  # NaN for classes without test samples
        offset = 0.6 * ((place + 0.5) / len(run.by_class) - 0.5)  # so that equal accuracies do not overlap
        axes.plot(places + offset, each, label=name, **{**curve_style(place), "linestyle": "none"})
    below.bar(places, tested, color=COLOURS[-1], width=0.7)
    for part, what in ((axes, "accuracy (%)"), (below, "test samples")):
        curve_axes(part, "class", what)
        part.grid(visible=False, axis="x")
        part.set_xlim(-0.6, len(tested) - 0.4)
        name_ticks(part.xaxis, run.about.label_names)
    axes.set_ylim(-6, 106)
    yield titled_picture(
        "accuracy-by-class",
        f"Accuracy by class: {group.label}",
        "Accuracy of each class in the last round over the pooled test samples of all scored clients, for every "
        f"predictor; below, the number of these samples. Predictor '{predictor}': accuracy "
        f"{100 * shown.weighted:.1f} %, balanced accuracy {100 * (shown.balanced or 0.0):.1f} %. First seed.",
        figure,
    )


@of_each_run
def clients_by_class(group: RunGroup) -> Iterator[Picture]:
    """Yield a heatmap of the shown predictor's accuracy by class and client, from the last round it was scored in."""
    run = group.first
    by_client = _by_client(run)
    if by_client is None:
        _reject_unscored(group)
        return
    clients, matrix = by_client
    yield heatmap_picture(
        "clients-by-class",
        f"Accuracy by class and client: {group.label}",
        f"Accuracy of '{run.predictor}' in the last round on each client's test samples of each class; blank: "
        "no test samples. First seed.",
        100 * matrix.T,
        xlabel="client",
        ylabel="class",
        unit="accuracy (%)",
        rows=run.about.label_names,
        columns=[run.client_name(client) for client in clients],
        limits=(0, 100),
    )


def _by_client(run: FinishedRun) -> tuple[list[int], NDArray[np.float64]] | None:
    """Return (clients, accuracies (M, K)) of the shown predictor, from the last round in which it was scored.

    NaN where a client has no test samples of a class.
    """
    for columns in run.latest_clients():
        pairs = zip(columns.client, columns.by_class, strict=False)
        named = {
            client: counts
            for client, counts in pairs
            if run.predictor in counts.get("right", {}) and sum(counts["tested"])
        }
        if named:
            clients = sorted(named)
            matrix = np.full((len(clients), len(run.about.label_names)), np.nan)
            for row, client in enumerate(clients):
                counts = named[client]
                tested, right = np.array(counts["tested"]), np.array(counts["right"][run.predictor])
                some = tested > 0
                matrix[row, np.array(counts["classes"])[some]] = right[some] / tested[some]
            return clients, matrix
    return None


def _reject_unscored(group: RunGroup) -> None:
    """Raise PbflError if a run with ``per-class`` has no accuracies by class; other runs need none."""
    if group.first.config.get("per-class"):
        raise PbflError(f"no client was scored{f' by {group.by}' if group.by else ''}")
