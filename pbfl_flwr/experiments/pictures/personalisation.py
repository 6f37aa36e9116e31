"""Personalisation of networks: classifier rows against label counts (CPS, Fig. 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.artefacts import client_states
from pbfl_flwr.experiments.pictures.style import (
    Picture,
    canvas,
    heatmap,
    of_each_run,
    titled_picture,
)
from pbfl_flwr.experiments.results import FinishedRun, RunGroup
from pbfl_flwr.models.contract import HEAD_PREFIX
from pbfl_flwr.util.user_code import is_external


def normalised_columns(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (M, K) with every column min-max normalised to 0..1; a constant column becomes zero."""
    low, high = values.min(axis=0), values.max(axis=0)
    stretched: NDArray[np.float64] = (values - low) / np.where(high > low, high - low, 1.0)
    return stretched


@of_each_run
def head_norms(group: RunGroup) -> Iterator[Picture]:
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


def _head_rows(run: FinishedRun) -> tuple[NDArray[np.float64], list[int]]:
    """Return the row norms of the last layer (M, K) and the clients' ids (M,).

    Raises:
        PbflError: if networks are not on this machine, or the matrix with a row per class is unknown, as in an
            external model with several matrices in its head.
    """
    rows, clients = [], []
    for client, state in client_states(run):
        heads = _head_matrices(state.model)
        known = len(heads) == 1 or (heads and not is_external(run.architecture(client)))
        if not known or heads[-1].dim() != 2 or len(heads[-1]) != len(run.about.label_names):
            raise PbflError("a client's classifier is not one matrix with a row per class")
        rows.append(torch.linalg.vector_norm(heads[-1], dim=1).numpy())
        clients.append(client)
    return np.array(rows), clients


def _head_matrices(model: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the classifier's weights in the order of its layers; the stored order is alphabetical."""
    names = [name for name, tensor in model.items() if tensor.dim() > 1 and tensor.is_floating_point()]
    heads = [name for name in names if name.startswith(HEAD_PREFIX)]
    heads.sort(key=lambda name: [_place(part) for part in name.split(".")])
    return [model[name].double() for name in heads]


def _place(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)
