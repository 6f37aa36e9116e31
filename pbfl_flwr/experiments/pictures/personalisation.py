"""Personalisation of networks: classifier rows against label counts (CPS, Fig. 3), layers against their mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.artefacts import client_states
from pbfl_flwr.experiments.pictures.style import (
    GRID,
    Picture,
    canvas,
    heatmap,
    heatmap_picture,
    of_each_run,
    titled_picture,
)
from pbfl_flwr.experiments.results import FinishedRun, Group
from pbfl_flwr.models.contract import HEAD_PREFIX
from pbfl_flwr.util.user_code import is_external


def normalised_columns(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (M, K) with every column min-max normalised to 0..1; a constant column becomes zero."""
    low, high = values.min(axis=0), values.max(axis=0)
    stretched: NDArray[np.float64] = (values - low) / np.where(high > low, high - low, 1.0)
    return stretched


@of_each_run
def head_norms(group: Group) -> Iterator[Picture]:
    """Yield the clients' label counts above the norms of their classifiers' rows."""
    run = group.first
    if run.counts is None:
        raise PbflError("clients bring their own data, whose labels are not counted")
    norms, clients = _head_rows(run)
    matrices = [normalised_columns(values) for values in (run.counts[clients].astype(float), norms)]
    figure, panels = canvas(5.0, rows=2)
    for axes, matrix, unit in zip(panels, matrices, ("label count", "norm of the row"), strict=True):
        heatmap(
            axes,
            matrix.T,
            xlabel="client",
            ylabel="class",
            unit=f"{unit}, normalised",
            rows=run.about.label_names,
            columns=[str(client) for client in clients],
            limits=(0.0, 1.0),
        )
    distance = float(np.linalg.norm(matrices[1] - matrices[0]))
    yield titled_picture(
        "head-norms",
        f"Label counts and norms of the classifier's rows: {group.label}",
        "Above: number of samples of each class. Below: L2 norm of the class's row of classifier weights. Both min-max "
        f"normalised over clients. Frobenius distance: {distance:.2f} (lower: the classifier reflects the client's "
        "label distribution more).",
        figure,
    )


@of_each_run
def layer_distances(group: Group) -> Iterator[Picture]:
    """Yield for every run each client's layer distances to the mean over clients with the same architecture."""
    distances = _distances(group.first)
    deepest = max(len(layers) for layers in distances.values())
    order = sorted(distances, key=lambda client: (group.first.architecture(client), client))
    matrix = np.full((deepest, len(order)), np.nan)
    for column, client in enumerate(order):
        matrix[: len(distances[client]), column] = distances[client]
    names = [group.first.architecture(client) for client in order]
    parts = "; ".join(f"{name} x {count}" for name, count in Counter(names).items())
    picture = heatmap_picture(
        "layer-distances",
        f"Distance of layers to their mean: {group.label}",
        "Frobenius distance of a layer's weights to their mean over the clients with the same architecture, "
        f"relative to the norm of that mean. From left to right: {parts}. Without clients whose architecture no "
        "other has; blank: no such layer.",
        matrix,
        xlabel="client, by architecture",
        ylabel="layer, from the input",
        unit="relative distance",
        rows=[str(layer + 1) for layer in range(deepest)],
        columns=[str(client) for client in order],
        limits=(0.0, None),
    )
    for place in range(1, len(names)):
        if names[place] != names[place - 1]:
            picture.figure.axes[0].axvline(place - 0.5, color=GRID, linewidth=2)
    yield picture


def _head_rows(run: FinishedRun) -> tuple[NDArray[np.float64], list[int]]:
    """Return the row norms of the last layer (M, K) and the clients' ids (M,).

    Raises:
        PbflError: if networks are not on this machine, or the matrix with a row per class is unknown, as in an
            external model with several matrices in its head.
    """
    rows, clients = [], []
    for client, state in client_states(run):
        heads = [tensor for name, tensor in _matrices(state.model).items() if name.startswith(HEAD_PREFIX)]
        known = len(heads) == 1 or (heads and not is_external(run.architecture(client)))
        if not known or heads[-1].dim() != 2 or len(heads[-1]) != len(run.about.label_names):
            raise PbflError("a client's classifier is not one matrix with a row per class")
        rows.append(torch.linalg.vector_norm(heads[-1], dim=1).numpy())
        clients.append(client)
    return np.array(rows), clients


def _distances(run: FinishedRun) -> dict[int, list[float]]:
    """Return client -> relative distance of each weight matrix to its mean; in two passes, one network in memory."""
    sums: dict[str, dict[str, Tensor]] = {}
    counts: Counter[str] = Counter()
    for client, state in client_states(run):
        counts[architecture := run.architecture(client)] += 1
        total = sums.setdefault(architecture, {})
        for name, weight in _matrices(state.model).items():
            total[name] = total[name] + weight if name in total else weight
    distances = {}
    for client, state in client_states(run):
        architecture = run.architecture(client)
        if (count := counts[architecture]) > 1:
            means = {name: tensor / count for name, tensor in sums[architecture].items()}
            distances[client] = [
                float((weight - means[name]).norm() / means[name].norm().clamp(min=1e-12))
                for name, weight in _matrices(state.model).items()
            ]
    if not distances:
        raise PbflError("no two clients have the same architecture")
    return distances


def _matrices(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the layers' weights in order from input to classifier; the stored order is alphabetical."""
    names = [name for name, tensor in model.items() if tensor.dim() > 1 and tensor.is_floating_point()]
    depth = {"stages": 0, "neck": 1, "head": 2}
    names.sort(
        key=lambda name: (depth.get(name.split(".")[0], 1), [_place(part) for part in name.split(".")])
    )
    return {name: model[name].double() for name in names}


def _place(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)
