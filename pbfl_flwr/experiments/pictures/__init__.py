"""The papers' figures, drawn from run directories: one module per kind, and ``SECTIONS``, the table of all.

A kind yields pictures, or the reason why it cannot draw one. Needs matplotlib (``pip install 'pbfl-flwr[report]'``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.pictures import (
    alignment,
    by_class,
    distribution,
    features,
    personalisation,
    progress,
    prototypes,
    similarity,
)
from pbfl_flwr.experiments.pictures.style import Picture, styled
from pbfl_flwr.experiments.results import RunGroup

Kind = Callable[[Sequence[RunGroup]], Iterator[Picture | PbflError]]

SECTIONS: dict[str, tuple[Kind, ...]] = {
    "Data": (distribution.label_distribution, features.data_points),
    "Progress and cost": (
        progress.accuracy_over_rounds,
        progress.accuracy_of_clients,
        progress.clients_over_rounds,
        progress.bytes_over_rounds,
        progress.accuracy_against_bytes,
    ),
    "Classes": (by_class.accuracy_by_class, by_class.clients_by_class),
    "Prototypes": (
        prototypes.local_heatmaps,
        prototypes.global_heatmaps,
        similarity.matrices,
        similarity.per_class,
    ),
    "Alignment": (alignment.within_a_phase, alignment.over_rounds),
    "Personalisation": (personalisation.head_norms,),
    "Features": (features.feature_planes,),
}


@dataclass(frozen=True)
class Section:
    """The pictures under one heading, and a line for each reason why one could not be drawn."""

    title: str
    pictures: tuple[Picture, ...]
    left_out: tuple[str, ...]


def draw(groups: Sequence[RunGroup]) -> list[Section]:
    """Draw all pictures for which the runs' files have the data."""
    sections = []
    with styled():
        for title, kinds in SECTIONS.items():
            drawn = [item for kind in kinds for item in kind(groups)]
            pictures = tuple(item for item in drawn if isinstance(item, Picture))
            reasons = dict.fromkeys(str(item) for item in drawn if not isinstance(item, Picture))
            sections.append(Section(title, pictures, tuple(reasons)))
    return sections


__all__ = ["SECTIONS", "Picture", "Section", "draw"]
