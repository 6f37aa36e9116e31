"""Magnitude of every prototype dimension, showing the zeros that CPS makes (CPS, Fig. 1; TinyProto, Fig. 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.experiments.artefacts import NotAvailable, global_prototypes, local_prototypes
from pbfl_flwr.experiments.pictures.style import Picture, canvas, heatmap, titled_picture
from pbfl_flwr.experiments.results import Group

HOW = "Magnitude of each dimension, relative to the largest in its row; blank: zero."


def local_heatmaps(groups: Sequence[Group]) -> Iterator[Picture | NotAvailable]:
    """Yield for every run all clients' uploads of one class, above its global prototype."""
    for number, group in enumerate(groups):
        run = group.first
        try:
            globals_, locals_ = global_prototypes(run), local_prototypes(run)
        except NotAvailable as error:
            yield NotAvailable(f"{group.label}: {error}")
            continue
        holders = (
            np.sum([sent.present.numpy() for sent in locals_.values()], axis=0) * globals_.present.numpy()
        )
        chosen = int(holders.argmax())
        rows = np.array(
            [sent.values[chosen].numpy() for sent in locals_.values()] + [globals_.values[chosen].numpy()]
        )
        names = [f"L{client}" for client in locals_] + ["G"]
        zero = _zero_share(rows[-1:])
        figure, (axes,) = canvas()
        heatmap(
            axes,
            _magnitudes(rows),
            xlabel="dimension",
            ylabel="prototype",
            unit="relative magnitude",
            rows=names,
        )
        title = f"Prototypes of class {run.label_names[chosen]}: {group.label}"
        yield titled_picture(
            f"prototypes-of-a-class-{number}",
            title,
            f"L: a client's last upload, G: the global prototype. {HOW} The class is the one that most clients hold.",
            f"Heatmap of {len(locals_)} local prototypes and the global one in {rows.shape[1]} dimensions; "
            f"{holders[chosen]} clients hold the class; {zero:.0%} of the global prototype is zero.",
            figure,
        )


def global_heatmaps(groups: Sequence[Group]) -> Iterator[Picture | NotAvailable]:
    """Yield a heatmap of all global prototypes for every run."""
    for number, group in enumerate(groups):
        try:
            prototypes = global_prototypes(group.first)
        except NotAvailable as error:
            yield NotAvailable(f"{group.label}: {error}")
            continue
        values = prototypes.values.numpy()
        figure, (axes,) = canvas()
        heatmap(
            axes,
            _magnitudes(values),
            xlabel="dimension",
            ylabel="class",
            unit="relative magnitude",
            rows=group.first.label_names,
        )
        title = f"Global prototypes: {group.label}"
        yield titled_picture(
            f"global-prototypes-{number}",
            title,
            f"After the last round. {HOW}",
            f"Heatmap of {prototypes.num_present} prototypes in {values.shape[1]} dimensions; "
            f"{_zero_share(values[prototypes.present.numpy()]):.0%} of the values are zero.",
            figure,
        )


def _magnitudes(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return |rows| divided by each row's maximum, NaN where zero."""
    magnitude = np.abs(rows.astype(float))
    largest = magnitude.max(axis=1, keepdims=True)
    return np.where(magnitude > 0, magnitude / np.where(largest > 0, largest, 1.0), np.nan)


def _zero_share(rows: NDArray[np.float32]) -> float:
    return float((rows == 0).mean()) if rows.size else 0.0
