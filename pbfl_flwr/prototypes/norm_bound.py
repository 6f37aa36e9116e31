"""Norm bounding: limits the norm of uploaded class rows, by the median norm of each class, before aggregation.

Source: norm bounding (Sun et al. 2019, "Can You Really Backdoor Federated Learning?"), here per class, and by the
holders' median norm instead of a constant that must be known in advance.
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
    held = torch.where(lengths > 0, lengths, torch.nan)
    return (factor * held.nanmedian(dim=0).values).nan_to_num(nan=torch.inf)


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
        self._bounds = bounds_of(lengths, factor)
        self.cut = int((lengths > self._bounds).sum())

    def __getitem__(self, client: int) -> Prototypes:
        upload = self._uploads[client]
        lengths = _lengths(upload)
        long = lengths > self._bounds
        if not bool(long.any()):
            return upload
        shrink = (self._bounds / lengths).where(long, 1.0)
        rows = upload.values.double() * shrink.to(upload.values.device)[:, None]
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
    found = Bounded(uploads, factor)
    return found, {"bounded-rows": float(found.cut)}


def _lengths(upload: Prototypes) -> Tensor:
    """Return ‖row‖ of every class (K,) float64, 0 for absent ones."""
    lengths: Tensor = torch.linalg.vector_norm(upload.values.cpu().double(), dim=1)
    return lengths * upload.present.cpu()
