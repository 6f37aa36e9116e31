"""Separation of global prototypes: cosine similarity (CPS, Fig. 2), distance and margin (ProtoNorm, Fig. 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics.pairwise import cosine_similarity, euclidean_distances

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.artefacts import global_prototypes
from pbfl_flwr.experiments.pictures.style import (
    DIVERGING,
    Picture,
    canvas,
    curve,
    curve_axes,
    heatmap_picture,
    name_ticks,
    of_available,
    of_each_run,
    titled_picture,
)
from pbfl_flwr.experiments.results import RunGroup


def similarities(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosine similarities (K, K) between rows (K, d), with NaN on the diagonal."""
    similarities: NDArray[np.float64] = cosine_similarity(values)
    np.fill_diagonal(similarities, np.nan)
    return similarities


def distances(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Euclidean distances (K, K) between rows (K, d), with NaN on the diagonal."""
    distances: NDArray[np.float64] = euclidean_distances(values)
    np.fill_diagonal(distances, np.nan)
    return distances


def margins(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each row's distance to its nearest neighbour divided by the largest such distance: (K,), at most 1."""
    nearest: NDArray[np.float64] = np.nanmin(distances(values), axis=1)
    return nearest / nearest.max() if nearest.max() > 0 else nearest


@of_each_run
def matrices(group: RunGroup) -> Iterator[Picture]:
    """Yield for every run the matrices of cosine similarities and of distances."""
    values, classes = _present(group)
    label_names = group.first.about.label_names  # made anew at each access
    names = [label_names[label] for label in classes]
    cosine, distance = similarities(values), distances(values)
    for kind, unit, matrix, limits, colours in (
        ("Cosine similarity", "cosine similarity", cosine, (-1.0, 1.0), DIVERGING),
        ("Distance", "Euclidean distance", distance, (0.0, None), "cividis"),
    ):
        yield heatmap_picture(
            f"{kind.split()[0].lower()}-of-prototypes",
            f"{kind} of global prototypes: {group.label}",
            "Every pair of classes after the last round, in all d dimensions.",
            matrix,
            height=3.1,
            xlabel="class",
            ylabel="class",
            unit=unit,
            rows=names,
            columns=names,
            limits=limits,
            colours=colours,
        )


def per_class(groups: Sequence[RunGroup]) -> Iterator[Picture | PbflError]:
    """Yield two pictures with all runs: each class's mean similarity to the others, and its normalised margin."""
    rows, reasons = of_available(groups, _present)
    yield from reasons
    if not rows:
        return
    labels = [group.first.about.label_names for _, group, _ in rows]
    shared = all(of_run == labels[0] for of_run in labels)
    names = labels[0] if shared else [str(number) for number in range(max(map(len, labels)))]
    figure, (axes,) = canvas()
    for number, group, (values, classes) in rows:
        cosine = similarities(values)
        mean = np.nanmean(cosine, axis=1)
        band = np.nanmin(cosine, axis=1), np.nanmax(cosine, axis=1)
        curve(axes, classes, mean, group.label, number, band, markevery=1)
    curve_axes(axes, "class", "cosine similarity to the others")
    name_ticks(axes.xaxis, names)
    yield titled_picture(
        "similarity-per-class",
        "Similarity of each global prototype to the others",
        "Mean cosine similarity of a class's prototype to all others; band: minimum to maximum. Lower is better "
        "separated.",
        figure,
    )
    figure, (axes,) = canvas()
    for number, group, (values, classes) in rows:
        margin = margins(values)
        curve(axes, classes, margin, group.label, number, markevery=1)
    curve_axes(axes, "class", "margin / largest margin")
    name_ticks(axes.xaxis, names)
    axes.set_ylim(0, 1.05)
    yield titled_picture(
        "margin-per-class",
        "Normalised margin of each global prototype",
        "Distance to the nearest other prototype, relative to the largest such distance of the run: evenly spread if "
        "all are near 1.",
        figure,
    )


def _present(group: RunGroup) -> tuple[NDArray[np.float64], list[int]]:
    """Return the rows of the classes that have a prototype, and the numbers of these classes.

    Raises:
        PbflError: if there are fewer than two, or as in :func:`global_prototypes`.
    """
    prototypes = global_prototypes(group.first)
    if prototypes.num_present < 2:
        raise PbflError("fewer than two classes have a prototype")
    classes = prototypes.present.nonzero().flatten().tolist()
    return prototypes.values.numpy()[classes].astype(float), classes
