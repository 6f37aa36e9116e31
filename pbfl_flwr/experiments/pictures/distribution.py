"""Label distribution over clients (ProtoNorm, Fig. 7 and 8; CPS, Fig. 3a)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pbfl_flwr.data.datasets import dealt
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.pictures.style import Picture, heatmap_picture
from pbfl_flwr.experiments.results import RunGroup


def label_distribution(groups: Sequence[RunGroup]) -> Iterator[Picture | PbflError]:
    """Yield a heatmap of samples, class x client, for every different partition."""
    seen: list[RunGroup] = []
    for number, group in enumerate(groups):
        run = group.first
        if run.counts is None:
            yield PbflError(f"{group.label}: clients bring their own data, whose labels are not counted")
            continue
        if any(_alike(group, other) for other in seen):
            continue
        seen.append(group)
        sharing = [other.label for other in groups if _alike(group, other)]
        counts = run.counts.astype(float)  # (M, K)
        config = run.config
        named = any(client.natural_id for client in run.about.clients)
        yield heatmap_picture(
            f"label-distribution-{number}",
            "Label distribution over clients",
            f"{config['dataset']}, {dealt(config)}; training, validation and test samples together; "
            f"blank: none. Runs: {', '.join(sharing)}.",
            np.where(counts > 0, counts, np.nan).T,
            xlabel="client",
            ylabel="class",
            unit="samples",
            rows=run.about.label_names,
            columns=[run.client_name(client) for client in range(len(counts))] if named else None,
        )


def _alike(one: RunGroup, other: RunGroup) -> bool:
    """Whether two runs have the same dataset and class counts per client; validation shares may differ."""
    first, second = one.first, other.first
    if first.counts is None or second.counts is None or first.config["dataset"] != second.config["dataset"]:
        return False
    return np.array_equal(first.counts, second.counts)
