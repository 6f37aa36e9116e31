"""How the server combines local prototypes: streaming sums, two robust rules per class.

Every rule takes the uploads of one round, dense (K, width) with ``present``, and returns the global
prototypes c_j in float32 (sums are in float64). A class that nobody sent is a zero row with ``present``
False; N_j is the set of clients that sent class j. The sums need O(K·width) memory for any number of clients,
so uploads may come from a generator; the robust rules need all uploads at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from pbfl_flwr.config.keys import Stale
from pbfl_flwr.errors import PbflError
from pbfl_flwr.payloads import Prototypes


def mean(uploads: Iterable[Prototypes]) -> Prototypes:
    """Return c_j = (1/|N_j|) Σ_{i in N_j} c̄_ij.

    Source: CPS paper, Eq. 4; ProtoNorm, Eq. 7; TinyProto, Eq. 9; all published code. The server learns no
    counts, only which classes a client holds.

    Raises:
        ValueError: if there is no upload or the shapes differ.
    """
    return _Sum.of(uploads).mean()


def mean_and_holders(uploads: Iterable[Prototypes]) -> tuple[Prototypes, Tensor]:
    """Return :func:`mean` and |N_j| (K,) int64 in one pass."""
    total = _Sum.of(uploads)
    return total.mean(), total.holders


def weighted(uploads: Iterable[Prototypes]) -> Prototypes:
    """Return c_j = Σ_{i in N_j} (n_ij / Σ_i n_ij) c̄_ij, the mean over all samples of the class.

    Source: the intention of FedProto (Tan et al. 2022); CPS paper, Eq. 9 without its factor 1/|N_j|. The server
    learns every n_ij, i.e. each client's class distribution.

    Raises:
        ValueError: if an upload has no counts, or the count 0 for a class that it holds.
    """
    return _Sum.of(uploads, by_counts=True).mean()


def weighted_shrunk(uploads: Iterable[Prototypes]) -> Prototypes:
    """Return c_j = (1/|N_j|) Σ_{i in N_j} (n_ij / Σ_i n_ij) c̄_ij, exactly as printed.

    Source: CPS paper, Eq. 9; ProtoNorm, Eq. 3; TinyProto, Eq. 4. Weights that already sum to one are divided
    by |N_j| once more, which shrinks a prototype by the number of its holders. The server learns every n_ij.

    Raises:
        ValueError: if an upload has no counts, or the count 0 for a class that it holds.
    """
    total = _Sum.of(uploads, by_counts=True)
    return total.result(total.rows / (total.weights * total.holders.clamp_min(1)).unsqueeze(1))


def ppa(
    uploads: Iterable[Prototypes],
    num_classes: int,
    num_examples: float | None = None,
) -> Prototypes:
    """Return c_j = (K/n) Σ_{i in N_j} u_ij, where the clients sent u_ij = n_ij·c̄_ij.

    Source: PPA, Eq. 10 and 11. The server learns no counts, only the constants K and n. (The norm of u_ij
    still hints at n_ij.) With n_j = Σ_i n_ij this is K·n_j/n times
    the mean over all samples of the class: exactly that mean if classes are balanced, else scaled by the
    class's size.

    Args:
        uploads: count-scaled local prototypes.
        num_classes: K.
        num_examples: n, samples of all clients in this sum, or its expectation; None means the sum of the
            uploads' n_i, at least 1.

    Raises:
        PbflError: if n is not positive.
        ValueError: if the uploads do not have K rows.
    """
    total = _Sum.of(uploads)
    if (rows := len(total.rows)) != num_classes:
        raise ValueError(f"the uploads have {rows} rows; must be num_classes = {num_classes}")
    n = max(1, total.examples) if num_examples is None else num_examples
    if not n > 0:
        raise PbflError(f"PPA divides by the number of examples, which is {n}; it must be positive")
    return total.result(total.rows * (num_classes / n))


def aps(
    uploads: Iterable[Prototypes],
    scale: float,
    form: Literal["sum", "mean"] = "sum",
) -> Prototypes:
    """Return APS's global prototypes of count-scaled uploads u_ij = n_ij·c̄_ij.

    "sum" is c_j = μ Σ_{i in N_j} u_ij, as in the published code (which multiplies the mean by |N_j|·μ), and
    the only form for which the published μ gives prototypes of the features' size. "mean" is c_j = (μ/|N_j|)
    Σ u_ij, TinyProto, Eq. 10 with the client's μ of Eq. 11 already applied; pass ``scale=1`` if the client
    applies it. "sum" with μ = K/n is PPA. The server learns no counts. ``num_examples`` of the result is n_t, the
    sum of the uploads' n_i, None if they have none.

    Args:
        uploads: count-scaled local prototypes.
        scale: μ > 0.
        form: "sum" or "mean".

    Raises:
        PbflError: if μ is not positive and finite.
    """
    if not (scale > 0 and math.isfinite(scale)):
        raise PbflError(f"aps-scale is {scale}; it must be positive and finite")
    total = _Sum.of(uploads)
    rows = total.rows if form == "sum" else total.mean_rows()
    n_t = max(1, total.examples) if total.brings_examples else None
    return replace(total.result(rows * scale), num_examples=n_t)


def coordinate_median(uploads: Iterable[Prototypes]) -> Prototypes:
    """Return the median of every coordinate over the clients that hold the class.

    Source: Yin et al. 2018 (Byzantine-robust distributed learning), per class, so that absent classes do not
    count as zeros. For an even number of holders the two middle values are averaged; with two holders it is the
    mean. The server learns no counts.

    Raises:
        ValueError: if there is no upload or the shapes differ.
    """
    return per_class(uploads, _median)


def trimmed_mean(uploads: Iterable[Prototypes], share: float) -> Prototypes:
    """Return the mean of every coordinate without its ⌊share·|N_j|⌋ smallest and largest values.

    Source: Yin et al. 2018, per class over its holders. A class with fewer than 1/share holders is not
    trimmed. The server learns no counts.

    Args:
        uploads: local prototypes.
        share: fraction of the holders trimmed on each side, 0 <= share < 0.5.

    Raises:
        PbflError: if the share is outside its range.
        ValueError: if there is no upload or the shapes differ.
    """
    if not 0 <= share < 0.5:
        raise PbflError(f"trim-share is {share}; must be 0 <= trim-share < 0.5")

    def trimmed(rows: Tensor) -> Tensor:
        cut = math.floor(share * len(rows) + 1e-9)  # e.g. 0.29·100 is 28.999999999999996
        return rows.sort(dim=0).values[cut : len(rows) - cut].mean(0)

    return per_class(uploads, trimmed)


def keep_stale(
    previous: Prototypes | None,
    fresh: Prototypes,
    ages: Tensor | None = None,
    mode: Stale = "keep",
) -> tuple[Prototypes, Tensor]:
    """Merge this round's prototypes into the server's table.

    Under partial participation it can happen that nobody sends a class. "keep" overwrites only the classes that
    were sent; "drop" is the published code: the table has only this round's classes.

    Args:
        previous: the table so far, or None in the first round.
        fresh: this round's global prototypes.
        ages: (K,) int64 of the table so far, as returned by the previous call; None if unknown.
        mode: "keep" or "drop".

    Returns:
        The new table, and its ages (K,) int64: 0 for a class of this round, the number of rounds since its
        last upload for a kept one, -1 for a class without a prototype.
    """
    new_ages = torch.where(fresh.present, 0, -1)
    if previous is None or mode == "drop":
        return Prototypes(fresh.values.clone(), fresh.present.clone()), new_ages
    stale = previous.present & ~fresh.present
    values = torch.where(stale.unsqueeze(1), previous.values, fresh.values)
    previous_ages = ages if ages is not None else torch.where(previous.present, 0, -1)
    return Prototypes(values, previous.present | fresh.present), torch.where(
        stale, previous_ages + 1, new_ages
    )


class _Sum:
    """Σ_i w_ij·c̄_ij, Σ_i w_ij and |N_j|, in float64, and Σ_i n_i, one upload at a time; w_ij = 1, or n_ij."""

    def __init__(self, shape: torch.Size) -> None:
        self.rows = torch.zeros(shape, dtype=torch.float64)
        self.weights = torch.zeros(shape[0], dtype=torch.float64)
        self.holders = torch.zeros(shape[0], dtype=torch.int64)
        self.whole = 0  # number of uploads with all classes
        self.examples = 0
        self.brings_examples = False
        self._all = torch.ones(shape[0], dtype=torch.bool)
        self._values = torch.empty(shape, dtype=torch.float64)  # buffer for one upload

    @classmethod
    def of(cls, uploads: Iterable[Prototypes], by_counts: bool = False) -> _Sum:
        total: _Sum | None = None
        for index, upload in enumerate(uploads):
            if total is None:
                total = cls(upload.values.shape)
            _check_shape(upload, total.rows.shape)
            whole = torch.equal(upload.present.cpu(), total._all)
            counts = _counts(upload, index, whole) if by_counts else None
            if whole:
                total._add_whole(upload, counts)
            else:
                total._add(upload, counts)
            if upload.num_examples is not None:
                total.examples += upload.num_examples
                total.brings_examples = True
        if total is None:
            raise ValueError("no uploads to aggregate")
        total.holders += total.whole
        if not by_counts:
            total.weights = total.holders.to(torch.float64)
        return total

    def _add_whole(self, upload: Prototypes, counts: Tensor | None) -> None:
        """Add an upload that has all classes, without indexing; holders are added at the end."""
        self.whole += 1
        values = self._values.copy_(upload.values)
        if counts is None:
            self.rows.add_(values)
        else:
            self.rows.addcmul_(values, counts.unsqueeze(1))
            self.weights += counts

    def _add(self, upload: Prototypes, counts: Tensor | None) -> None:
        present, values = upload.present.cpu(), upload.values.cpu()
        weights = present.to(torch.float64)
        if counts is not None:
            weights *= counts
        labels = present.nonzero().flatten()
        rows = values.index_select(0, labels).to(torch.float64)
        self.rows.index_add_(0, labels, rows.mul_(weights[labels].unsqueeze(1)))
        self.weights += weights
        self.holders += present

    def mean_rows(self) -> Tensor:
        return self.rows / torch.where(self.holders > 0, self.weights, 1).unsqueeze(1)

    def mean(self) -> Prototypes:
        return self.result(self.mean_rows())

    def result(self, rows: Tensor) -> Prototypes:
        present = self.holders > 0
        return Prototypes(torch.where(present.unsqueeze(1), rows, 0).to(torch.float32), present)


def _counts(upload: Prototypes, index: int, whole: bool) -> Tensor:
    """Return n_ij (K,) float64, checked to be positive where class j is present."""
    if upload.counts is None:
        raise ValueError(f"upload {index} has no counts, which count-weighted aggregation needs")
    counts = upload.counts.cpu().double()
    if (counts if whole else counts.where(upload.present.cpu(), 1.0)).min().item() < 1:
        raise ValueError(f"upload {index} has a prototype with a count below 1")
    return counts


def per_class(uploads: Iterable[Prototypes], rule: Callable[[Tensor], Tensor]) -> Prototypes:
    """Combine the rows of every class over the clients that hold it.

    Args:
        uploads: local prototypes.
        rule: the rows (|N_j|, width) float64 of a class, in client order -> its row (width,).

    Raises:
        ValueError: if there is no upload or the shapes differ.
    """
    everything = list(uploads)
    if not everything:
        raise ValueError("no uploads to aggregate")
    shape = everything[0].values.shape
    for upload in everything:
        _check_shape(upload, shape)
    present = torch.stack([upload.present.cpu() for upload in everything])
    values = torch.zeros(shape)
    for label in present.any(0).nonzero().flatten().tolist():
        holders = present[:, label].nonzero().flatten().tolist()
        rows = torch.stack([everything[holder].values[label].to("cpu", torch.float64) for holder in holders])
        values[label] = rule(rows).to(torch.float32)
    return Prototypes(values, present.any(0))


def _median(rows: Tensor) -> Tensor:
    ordered = rows.sort(dim=0).values
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


def _check_shape(upload: Prototypes, shape: torch.Size) -> None:
    if upload.values.shape != shape:
        raise ValueError(f"an upload has shape {tuple(upload.values.shape)}, others have {tuple(shape)}")
