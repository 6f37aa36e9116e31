"""Magnitude of every prototype dimension, showing the zeros that CPS makes (CPS, Fig. 1; TinyProto, Fig. 2)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.experiments.artefacts import global_prototypes, local_prototypes
from pbfl_flwr.experiments.pictures.style import Picture, heatmap_picture, of_each_run
from pbfl_flwr.experiments.results import RunGroup

HOW = "Magnitude of each dimension, relative to the largest in its row; blank: zero."


@of_each_run
def local_heatmaps(group: RunGroup) -> Iterator[Picture]:
    """Yield for every run all clients' uploads of one class, above its global prototype."""
    run = group.first
    globals_, locals_ = global_prototypes(run), local_prototypes(run)
    holders = np.sum([sent.present.numpy() for sent in locals_.values()], axis=0) * globals_.present.numpy()
    chosen = int(holders.argmax())
    rows = np.array(
        [sent.values[chosen].numpy() for sent in locals_.values()] + [globals_.values[chosen].numpy()]
    )
    yield heatmap_picture(
        "prototypes-of-a-class",
        f"Prototypes of class {run.about.label_names[chosen]}: {group.label}",
        f"L: a client's last upload, G: the global prototype. {HOW} The class is the one that most clients hold.",
        _magnitudes(rows),
        xlabel="dimension",
        ylabel="prototype",
        unit="relative magnitude",
        rows=[*(f"L{client}" for client in locals_), "G"],
    )


@of_each_run
def global_heatmaps(group: RunGroup) -> Iterator[Picture]:
    """Yield a heatmap of all global prototypes for every run."""
    yield heatmap_picture(
        "global-prototypes",
        f"Global prototypes: {group.label}",
        f"After the last round. {HOW}",
        _magnitudes(global_prototypes(group.first).values.numpy()),
        xlabel="dimension",
        ylabel="class",
        unit="relative magnitude",
        rows=group.first.about.label_names,
    )


def _magnitudes(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return |rows| divided by each row's maximum, NaN where zero."""
    magnitude = np.abs(rows.astype(float))
    largest = magnitude.max(axis=1, keepdims=True)
    return np.where(magnitude > 0, magnitude / np.where(largest > 0, largest, 1.0), np.nan)
