"""An aggregation rule outside of the package: the geometric median of each class's rows (Weiszfeld 1937).

PYTHONPATH=docs/examples pbfl run fedproto-digits --set aggregation=geometric_median:rule
"""

import torch
from torch import Tensor

STEPS = 100
"""Largest number of steps; the search ends before when the point moves by less than a millionth."""


def rule(rows: Tensor) -> Tensor:
    """Return the point (width,) with the smallest sum of distances to the rows (|N_j|, width) of a class's holders."""
    median = rows.mean(0)
    for _ in range(STEPS):
        distances = torch.linalg.vector_norm(rows - median, dim=1).clamp_min(1e-9)
        before, median = median, (rows / distances[:, None]).sum(0) / (1 / distances).sum()
        if torch.linalg.vector_norm(median - before) < 1e-6:
            break
    return median
