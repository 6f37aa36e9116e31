"""A bound on the length of uploaded class rows, by the median length of each class: before any rule combines them.

Source: norm bounding (Sun et al. 2019, "Can You Really Backdoor Federated Learning?"), here per class, and by the
holders' median length instead of a number that somebody must know beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pbfl_flwr.payloads import Prototypes


def bounds_of(lengths: Tensor, factor: float) -> Tensor:
    """Return the largest length that a row of each class may have, (K,) float64; infinite where nobody holds it.

    The median is over the holders, those whose row is not zero; of an even number it is the lower of the two in the
    middle. So of two holders one bounds the other, where their mean would let through whatever is below twice it.

    Args:
        lengths: (N, K) of every upload's rows, 0 where it has none.
        factor: c > 0; the bound is c times the median.
    """
    held = torch.where(lengths > 0, lengths, torch.nan)
    return (factor * held.nanmedian(dim=0).values).nan_to_num(nan=torch.inf)


class Bounded(Mapping[int, Prototypes]):
    """Uploads with rows that are not longer than their class's bound; a longer one is scaled to it when asked for.

    Building it goes through the uploads once and keeps K lengths of each, so they may be decoded one at a time.

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
    """Return the uploads under the bound, and what the log says of it; as they are, and nothing, for a factor of 0."""
    if not (factor and uploads):
        return uploads, {}
    found = Bounded(uploads, factor)
    return found, {"bounded-rows": float(found.cut)}


def _lengths(upload: Prototypes) -> Tensor:
    """Return ‖row‖ of every class (K,) float64, 0 for absent ones."""
    lengths: Tensor = torch.linalg.vector_norm(upload.values.cpu().double(), dim=1)
    return lengths * upload.present.cpu()
