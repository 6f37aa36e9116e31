"""Bounds on the norm of uploaded class rows, by the median norm of each class, before aggregation.

Source: Sun et al. 2019, "Can You Really Backdoor Federated Learning?", here per class, and by the holders' median norm
instead of a constant that must be known in advance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pbfl_flwr.payloads import Prototypes


def bounds_of(lengths: Tensor, factor: float) -> Tensor:
    """Return the largest norm that a row of each class may have, (K,) float64; infinite for classes without holders.

    The median is over the holders, i.e. rows that are not zero; for an even number it is the lower of the two middle
    values. So of two holders one bounds the other, where their mean would allow everything below twice itself.

    Args:
        lengths: (N, K) norms of every upload's rows, 0 for absent classes.
        factor: c > 0; the bound is c times the median.
    """
    lengths_of_holders = torch.where(lengths > 0, lengths, torch.nan)
    return (factor * lengths_of_holders.nanmedian(dim=0).values).nan_to_num(nan=torch.inf)


class Bounded(Mapping[int, Prototypes]):
    """Uploads whose rows are scaled down to their class's bound, on access, if they are longer.

    The constructor iterates over the uploads once and keeps K norms of each, so they may be decoded one at a time.

    Args:
        uploads: at least one, (K, w) each.
        factor: c; see :func:`bounds_of`.

    Attributes:
        cut: number of rows that are scaled.
    """

    def __init__(self, uploads: Mapping[int, Prototypes], factor: float) -> None:
        self._uploads = uploads
        lengths = torch.stack([_lengths(upload) for upload in uploads.values()])
        bounds = bounds_of(lengths, factor)
        long = lengths > bounds
        self._factors = dict(zip(uploads, (bounds / lengths).where(long, 1.0), strict=True))
        self.cut = int(long.sum())

    def __getitem__(self, client: int) -> Prototypes:
        upload, factors = self._uploads[client], self._factors[client]
        if bool((factors == 1).all()):
            return upload
        rows = upload.values.double() * factors.to(upload.values.device)[:, None]
        return replace(upload, values=rows.to(upload.values.dtype))

    def __iter__(self) -> Iterator[int]:
        return iter(self._uploads)

    def __len__(self) -> int:
        return len(self._uploads)


def bounded(
    uploads: Mapping[int, Prototypes], factor: float
) -> tuple[Mapping[int, Prototypes], dict[str, float]]:
    """Return the bounded uploads and metrics for the log; with a factor of 0, the uploads unchanged and no metrics."""
    if not (factor and uploads):
        return uploads, {}
    limited = Bounded(uploads, factor)
    return limited, {"bounded-rows": float(limited.cut)}


def _lengths(upload: Prototypes) -> Tensor:
    """Return ‖row‖ of every class (K,) float64, 0 for absent ones."""
    lengths: Tensor = torch.linalg.vector_norm(upload.values.cpu().double(), dim=1)
    return lengths * upload.present.cpu()
