"""Data, prototypes and features in the plane, for d = 2 (ProtoNorm, Fig. 1, 2 and 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from pbfl_flwr.data import LoadedData
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.artefacts import (
    client_states,
    data_of,
    global_prototypes,
    network,
    saved_class_means,
    target_scale,
)
from pbfl_flwr.experiments.pictures.style import (
    COLOURS,
    MARKERS,
    Picture,
    canvas,
    curve_axes,
    legend_below,
    legend_name,
    of_each_run,
    titled_picture,
)
from pbfl_flwr.experiments.results import FinishedRun, RunGroup, same_data

MOST_POINTS = 500  # per picture
SHOWN_CLIENTS = 2


def data_points(groups: Sequence[RunGroup]) -> Iterator[Picture | PbflError]:
    """Yield the test samples of all clients, for two-dimensional inputs; runs with the same data share a picture."""
    distinct: list[RunGroup] = []
    for group in groups:
        if not any(same_data(group.first, other.first) for other in distinct):
            distinct.append(group)
    return _data_points(distinct)


@of_each_run
def _data_points(group: RunGroup) -> Iterator[Picture]:
    run = group.first
    shape = run.about.task.input_shape
    if shape != (2,):
        raise PbflError(f"inputs of shape {'x'.join(map(str, shape))}; drawn only for shape 2")
    loaded = LoadedData()
    shards = [data_of(run, client.client, loaded).test for client in run.about.clients]
    inputs, labels = torch.cat([s.inputs for s in shards]), torch.cat([s.labels for s in shards])
    figure, (axes,) = canvas(3.6)
    _points(axes, inputs, labels, run.about.label_names)
    _plane(figure, axes, "x", "y", run.about.label_names)
    yield titled_picture(
        "data-points",
        f"Test samples: {run.config['dataset']}",
        f"Up to {MOST_POINTS} of {len(labels)} test samples of all clients, by class.",
        figure,
    )


@of_each_run
def feature_planes(group: RunGroup) -> Iterator[Picture]:
    """Yield every run's global and local prototypes, and the features of test samples of its two largest clients."""
    run = group.first
    if (width := run.about.task.feature_dim) != 2:
        raise PbflError(f"features have {width} dimensions; drawn only for feature-dim = 2")
    yield _prototype_plane(run, group.label)
    yield from _client_planes(run, group.label)


def _prototype_plane(run: FinishedRun, label: str) -> Picture:
    prototypes = global_prototypes(run)
    scale = target_scale(run)
    figure, (axes,) = canvas(3.6)
    for k in prototypes.present.nonzero().flatten().tolist():
        x, y = (scale * prototypes.values[k]).tolist()
        axes.plot([0, x], [0, y], color=_colour(k), linestyle="--", linewidth=1.4)
    means = [saved_class_means(state) for _, state in client_states(run)]
    points = torch.cat([values[present] for values, present in means])
    labels = torch.cat([present.nonzero().flatten() for _, present in means])
    near = max(_reach(points), 1.2 * float((scale * prototypes.values).norm(dim=1).max()))
    inside = points.norm(dim=1) <= near
    _points(axes, points[inside], labels[inside], run.about.label_names, size=16)
    title = f"Prototypes in the plane of features: {label}"
    _plane(figure, axes, "feature 1", "feature 2", run.about.label_names)
    outside = f" {int((~inside).sum())} outliers are not shown." if not bool(inside.all()) else ""
    times = f", scaled by {scale:g} (upscaling)" if scale != 1 else ""
    return titled_picture(
        "prototype-plane",
        title,
        f"Dashed: global prototypes{times}. Points: class means of {len(means)} clients.{outside}",
        figure,
    )


def _client_planes(run: FinishedRun, label: str) -> Iterator[Picture]:
    sizes = {client.client: client.num_test for client in run.about.clients}
    chosen = sorted(sizes, key=lambda client: (-sizes[client], client))[:SHOWN_CLIENTS]
    loaded = LoadedData()
    for client, state in client_states(run):
        if client not in chosen:
            continue
        model, data = network(run, client, state), data_of(run, client, loaded)
        samples = _some(len(data.test))
        with torch.no_grad():
            features = model.features(data.prepare(data.test.inputs[samples]))
        values, present = saved_class_means(state)
        figure, (axes,) = canvas(3.6)
        for k in present.nonzero().flatten().tolist():
            axes.plot([0, float(values[k, 0])], [0, float(values[k, 1])], color=_colour(k), linewidth=1.4)
        _points(axes, features, data.test.labels[samples], run.about.label_names)
        title = f"Features of client {run.client_name(client)}: {label}"
        _plane(figure, axes, "feature 1", "feature 2", run.about.label_names)
        yield titled_picture(
            f"features-{client}",
            title,
            f"Lines: the client's own class means. Points: {len(samples)} of its {len(data.test)} test samples.",
            figure,
        )


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)]


def _some(count: int) -> Tensor:
    """Return at most MOST_POINTS evenly spaced indices."""
    return torch.linspace(0, max(0, count - 1), min(count, MOST_POINTS)).long()


def _points(axes: Axes, points: Tensor, labels: Tensor, names: Sequence[str], size: float = 7) -> None:
    chosen = _some(len(labels))
    xy: NDArray[np.float64] = points[chosen].double().numpy()
    classes = labels[chosen].numpy()
    for k in np.unique(classes):
        axes.scatter(
            xy[classes == k, 0],
            xy[classes == k, 1],
            s=size,
            color=_colour(k),
            marker=MARKERS[(k // len(COLOURS)) % len(MARKERS)],
            linewidths=0,
            label=legend_name(names[k]),
        )


def _plane(figure: Figure, axes: Axes, xlabel: str, ylabel: str, names: Sequence[str]) -> None:
    curve_axes(axes, xlabel, ylabel)
    axes.set_aspect("equal", adjustable="datalim")
    legend_below(figure, axes, [legend_name(name) for name in names], marker_scale=2.5)


def _reach(points: Tensor) -> float:
    """Return a radius that contains nearly all points (n, 2), so that outliers do not determine the scale."""
    radii = torch.linalg.vector_norm(points.double(), dim=1)
    return 2.5 * float(radii.median()) + 1e-6
