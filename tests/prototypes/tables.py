"""Small tables of prototypes, written as their rows."""

import torch

from pbfl_flwr.payloads import Prototypes


def upload(
    rows: dict[int, list[float]],
    counts: list[int] | None = None,
    num_examples: int | None = None,
    num_classes: int = 4,
) -> Prototypes:
    """Return the prototypes of these classes, two numbers each."""
    values, present = torch.zeros(num_classes, 2), torch.zeros(num_classes, dtype=torch.bool)
    for label, row in rows.items():
        values[label], present[label] = torch.tensor(row), True
    return Prototypes(values, present, None if counts is None else torch.tensor(counts), num_examples)
