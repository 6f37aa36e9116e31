"""Class-wise Prototype Sparsification (CPS): which s of a class's d dimensions travel.

Source: "Structured sparse prototypes" (CPS), Definitions 1 and 2 and Section 4.1; TinyProto, Section 4.1.
Masks m_j in {0,1}^d are a function of (K, d, s, scheme, seed), so that only a seed must be agreed on, not a
matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pbfl_flwr.config.keys import CpsScheme
from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import Task

Masks = NDArray[np.uint8]
Random = np.random.RandomState  # its streams are the same in all versions of NumPy, and so on all clients


def allocate_masks(
    num_classes: int,
    feature_dim: int,
    size: int,
    *,
    scheme: CpsScheme = "dimension",
    seed: int,
    swaps: int = 1000,
) -> Tensor:
    """Allocate the K masks with the largest total pairwise Hamming distance, then raise the smallest distance.

    Why the total is maximal. Let load_t = Σ_j m_jt be the number of classes that use dimension t. A pair of masks
    differs at t iff exactly one of the two has a one there, so Σ_{j<k} H(m_j, m_k) = Σ_t load_t·(K - load_t),
    while Σ_t load_t = K·s is fixed. x(K - x) is strictly concave: moving a one from a column of load a to a
    column of load b <= a - 2 raises the sum by 2(a - b - 1) > 0, and because a > b some row has a one in the
    first column and none in the second, so the move exists and keeps the row at s ones. Hence the total is
    maximal iff the column loads differ by at most one. The allocation has such loads by construction, and
    every later step moves ones in pairs that keep all row sums and all column loads.

    Algorithm. For K <= d, as many columns as possible are cyclic orbits (a set T of rows shifted through Z_K:
    all its columns and all its rows have |T| ones), whose difference multisets are evened out, so that any
    two masks share about the same number of dimensions. The remaining columns are dealt: each class takes the
    least loaded ones, ties broken at random. For K > d all columns are dealt. Classes and dimensions are then
    permuted, identical masks are made distinct if C(d, s) >= K allows it, and at most ``swaps`` seeded
    swaps lower the largest number of dimensions that two masks share. Iterations are counted, not timed, so that
    the result depends only on the arguments.

    Scheme "block" is that of the published code: l = ⌊d/K⌋ consecutive dimensions are a block, a class
    gets p = ⌊K·s/d⌋ of the K blocks (the code's p = int(K·ρ/100) with the percentage ρ = 100·s/d). A mask
    then has p·l ones, which can be fewer than s (s = 50 of d = 500 gives 44 for K = 43 and 40 for K = 102 and
    K = 200), and the last d - K·l dimensions are never used. Scheme "dimension" gives exactly s and leaves no
    dimension unused that K·s ones can reach.

    Args:
        num_classes: K.
        feature_dim: d.
        size: s, number of dimensions of a class that travel.
        scheme: "dimension" or "block".
        seed: of ties, permutations and swaps.
        swaps: bound on the attempts to raise the smallest distance; 0 keeps the construction.

    Returns:
        (K, d) bool; every row has s ones (p·l ones under "block"), column loads differ by at most one (under
        "block" those of the K·l dimensions in use).

    Raises:
        PbflError: if s is outside 1..d, or under "block" if K > d or no whole block fits into s.
    """
    if not 1 <= size <= feature_dim:
        raise PbflError(f"cps-dim is {size}; must be 1..{feature_dim} (feature-dim)")
    random = Random(seed)
    if scheme == "dimension":
        masks = _allocate(num_classes, feature_dim, size, random, swaps)
    else:
        if num_classes > feature_dim:
            raise PbflError(
                f"cps-scheme block needs a dimension for every class, but there are {num_classes} classes and "
                f"feature-dim is {feature_dim}; use cps-scheme dimension"
            )
        width = feature_dim // num_classes
        blocks = num_classes * size // feature_dim
        if blocks == 0:
            raise PbflError(
                f"cps-dim is {size}, smaller than one of the {num_classes} blocks of cps-scheme block; must be "
                f"{-(-feature_dim // num_classes)}..{feature_dim}, or cps-scheme dimension"
            )
        masks = np.zeros((num_classes, feature_dim), np.uint8)
        codes = _allocate(num_classes, num_classes, blocks, random, swaps)
        masks[:, : num_classes * width] = codes.repeat(width, axis=1)
    return torch.from_numpy(masks.astype(np.bool_))


def compress(values: Tensor, masks: Tensor) -> Tensor:
    """Return the entries inside the masks in increasing index order (CPS, Eq. 8): (K, d) -> (K, s).

    Raises:
        ValueError: if the masks do not have the same number of ones in every row.
    """
    if len(sizes := masks.sum(dim=1).unique()) > 1:
        raise ValueError(f"masks have {int(sizes[0])} to {int(sizes[-1])} ones a row; must have equally many")
    return values.masked_select(masks.to(values.device)).reshape(len(values), -1)


def expand(rows: Tensor, masks: Tensor) -> Tensor:
    """Return c̃_j, zero outside the mask (CPS, Eq. 7): (K, s) -> (K, d).

    ``expand(compress(c, m), m)`` is c⊙m.
    """
    return rows.new_zeros(masks.shape).masked_scatter(masks.to(rows.device), rows)


@dataclass(frozen=True)
class Sparsity:
    """The dimensions that travel in a run; server and clients derive the same masks, each once.

    Attributes:
        size: s; 0 and d mean all dimensions.
        scheme: how the masks are allocated.
        seed: of the masks, the only thing about them that clients must agree on.
    """

    size: int
    scheme: CpsScheme
    seed: int
    _allocated: dict[tuple[int, int], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def masks(self, task: Task) -> Tensor | None:
        """Return the masks (K, d) bool, which must not be changed; None if all dimensions travel.

        Raises:
            PbflError: if there are no masks of this size.
        """
        if self.size in (0, task.feature_dim):
            return None
        K, d = task.num_classes, task.feature_dim
        if (K, d) not in self._allocated:  # it takes seconds for many classes
            self._allocated[K, d] = allocate_masks(K, d, self.size, scheme=self.scheme, seed=self.seed)
        return self._allocated[K, d]

    def width(self, task: Task) -> int:
        """Return the length of a sent row; under scheme "block" it can be below s."""
        table = self.masks(task)
        return task.feature_dim if table is None else int(table[0].sum())

    def compress(self, rows: Tensor, task: Task) -> Tensor:
        """Return the entries of rows that travel: (K, d) -> (K, width)."""
        table = self.masks(task)
        return rows if table is None else compress(rows, table)

    def expand(self, sent: Tensor, task: Task) -> Tensor:
        """Return sent rows with zeros outside the masks: (K, width) -> (K, d)."""
        table = self.masks(task)
        return sent if table is None else expand(sent, table)


def _allocate(rows: int, columns: int, ones: int, random: Random, swaps: int) -> Masks:
    """Return a (rows, columns) matrix with ``ones`` ones per row and column loads that differ by at most one."""
    masks = _orbits_and_deal(rows, columns, ones, random)
    masks = masks[random.permutation(rows)][:, random.permutation(columns)]
    if rows > 1 and ones < columns:
        if math.comb(columns, ones) >= rows:
            _make_distinct(masks, ones, random)
        _spread(masks, random, swaps)
    return masks


def _orbits_and_deal(rows: int, columns: int, ones: int, random: Random) -> Masks:
    load, extra = divmod(rows * ones, columns)
    orbits = columns // rows
    larger = min(orbits, extra // rows)  # orbits with load + 1 ones per column
    if extra - larger * rows > columns - orbits * rows:
        orbits -= 1  # the remaining columns are too few for the load + 1 columns that fill no whole orbit
    sizes = [load + 1] * larger + [load] * (orbits - larger)
    parts = [_cyclic(members, rows) for members in _even_difference_sets(sizes, rows, random)]
    loose = columns - orbits * rows
    if loose:
        parts.append(_deal(rows, loose, ones - sum(sizes), random))
    return np.concatenate(parts, axis=1)


def _cyclic(members: NDArray[np.bool_], order: int) -> Masks:
    """Return the (order, order) matrix whose column x is the row set T + x."""
    shifts = (np.arange(order)[:, None] - np.arange(order)) % order
    cyclic: Masks = members[shifts].astype(np.uint8)
    return cyclic


def _even_difference_sets(sizes: list[int], order: int, random: Random) -> list[NDArray[np.bool_]]:
    """Choose one subset of Z_order per size, so that all differences occur about equally often over all sets.

    Two masks j and k share as many dimensions of an orbit as T has pairs with difference j - k, so even
    differences give even overlaps. A fixed number of times, a random member is replaced by the element that
    minimises the sum of squares of the histogram of differences.
    """
    sets = []
    for size in sizes:
        members = np.zeros(order, np.bool_)
        members[random.permutation(order)[:size]] = True
        sets.append(members)
    counts = np.zeros(
        order
    )  # how often each difference occurs; that of a member to itself is never read below

    def differences(members: NDArray[np.bool_], of: int) -> NDArray[np.intp]:
        others = np.flatnonzero(members)
        return np.concatenate([(of - others) % order, (others - of) % order])

    for members in sets:
        positions = np.flatnonzero(members)
        counts += np.bincount(((positions[:, None] - positions) % order).ravel(), minlength=order)
    movable = [members for members, size in zip(sets, sizes, strict=True) if 1 < size < order]
    for _ in range(400 if movable else 0):
        members = movable[random.randint(len(movable))]
        positions = np.flatnonzero(members)
        out = int(positions[random.randint(len(positions))])
        counts -= np.bincount(differences(members, out), minlength=order)
        members[out] = False
        rest = np.flatnonzero(members)
        load = counts[(np.arange(order)[:, None] - rest) % order]
        cost = load.sum(1) + random.random_sample(order) * 0.5
        cost[rest] = np.inf
        into = int(cost.argmin())
        counts += np.bincount(differences(members, into), minlength=order)
        members[into] = True
    return sets


def _deal(rows: int, columns: int, ones: int, random: Random) -> Masks:
    """Let every row take the least loaded columns, ties at random: after each row loads differ by at most one."""
    masks = np.zeros((rows, columns), np.uint8)
    loads = np.zeros(columns)
    for row in masks:
        if ones:
            taken = np.argpartition(loads + random.random_sample(columns) * 0.5, ones - 1)[:ones]
            row[taken] = 1
            loads[taken] += 1
    return masks


def _make_distinct(masks: Masks, ones: int, random: Random) -> None:
    """Replace repeated rows by unused ones, then even out the column loads without repeating a row.

    The second step always reaches even loads: if column a has two ones more than column b, more rows have
    (1, 0) there than (0, 1); exchanging the two bits maps the former injectively, so at least one of them becomes
    a row that does not exist yet. Every such move lowers the sum of squared loads.
    """
    rows, columns = masks.shape
    patterns: set[bytes] = set()
    repeated: list[int] = []
    for index, row in enumerate(masks):
        if row.tobytes() in patterns:
            repeated.append(index)
        patterns.add(row.tobytes())
    if not repeated:
        return
    unused = _unused_rows(columns, ones, patterns, len(repeated), rows, random)
    for index, row in zip(repeated, unused, strict=True):
        masks[index] = row
        patterns.add(row.tobytes())
    while True:
        loads = masks.sum(0, dtype=np.int64)
        heavy, light = int(loads.argmax()), int(loads.argmin())
        if loads[heavy] - loads[light] <= 1:
            return
        for index in np.flatnonzero(masks[:, heavy] > masks[:, light]).tolist():
            moved = masks[index].copy()
            moved[heavy], moved[light] = 0, 1
            if moved.tobytes() not in patterns:
                patterns.remove(masks[index].tobytes())
                patterns.add(moved.tobytes())
                masks[index] = moved
                break


def _unused_rows(
    columns: int, ones: int, patterns: set[bytes], needed: int, rows: int, random: Random
) -> list[Masks]:
    unused: dict[bytes, Masks] = {}
    if math.comb(columns, ones) <= 4 * rows:
        for positions in combinations(range(columns), ones):
            row = np.zeros(columns, np.uint8)
            row[list(positions)] = 1
            if row.tobytes() not in patterns:
                unused[row.tobytes()] = row
        candidates = list(unused.values())
        return [candidates[index] for index in random.permutation(len(candidates))[:needed]]
    while len(unused) < needed:  # at least three in four draws are unused
        row = np.zeros(columns, np.uint8)
        row[random.permutation(columns)[:ones]] = 1
        if row.tobytes() not in patterns:
            unused[row.tobytes()] = row
    return list(unused.values())


def _spread(masks: Masks, random: Random, swaps: int) -> None:
    """Lower the largest overlap of two rows by swaps that keep row sums and column loads.

    Rows j and k have the largest overlap. Row j gives a shared column t to a row l that lacks it and takes a column u
    of l that j lacks. A swap is accepted only if afterwards no pair with j or l overlaps as much as the worst pair
    did, so that every accepted swap reduces the number of worst pairs.
    """
    overlaps = (masks.astype(np.float32) @ masks.astype(np.float32).T).astype(np.int16)
    np.fill_diagonal(overlaps, -1)
    peaks = overlaps.max(1)  # exact where equal to the worst overlap, elsewhere an upper bound
    worst = int(peaks.max())
    floor = _unavoidable_overlap(masks)
    for _ in range(swaps):
        if worst <= floor:
            return
        j = int(random.choice(np.flatnonzero(peaks == worst)))
        k = int(random.choice(np.flatnonzero(overlaps[j] == worst)))
        t = int(random.choice(np.flatnonzero(masks[j] & masks[k])))
        critical = overlaps[j] - masks[:, t] >= worst - 1
        takes = (masks[j] | masks[critical].any(0)) == 0  # columns u that create no new worst pair with j
        users = masks[:, t].astype(np.bool_)
        users[j] = False
        gives = (overlaps[users] < worst - 1).all(0) & (masks[:, t] == 0)  # rows l that can take t
        givers = np.flatnonzero(gives)
        givers = givers[random.permutation(len(givers))[:32]]
        pairs = np.argwhere(masks[givers] & takes)
        if not len(pairs):
            continue
        giver, u = pairs[random.randint(len(pairs))]
        row_l = givers[giver]
        change = masks[:, u].astype(np.int16) - masks[:, t]
        change[[j, row_l]] = 0  # the overlap of j and l does not change
        overlaps[j] += change
        overlaps[:, j] += change
        overlaps[row_l] -= change
        overlaps[:, row_l] -= change
        masks[j, t], masks[j, u], masks[row_l, t], masks[row_l, u] = 0, 1, 1, 0
        touched = peaks == worst
        peaks[touched] = overlaps[touched].max(1)
        if not (peaks == worst).any():
            peaks = overlaps.max(1)
            worst = int(peaks.max())


def _unavoidable_overlap(masks: Masks) -> int:
    """Return the mean overlap of two rows, rounded up: fixed by the loads, and a lower bound on the largest one."""
    loads = masks.sum(0, dtype=np.int64)
    pairs = len(masks) * (len(masks) - 1) // 2
    return -(-int((loads * (loads - 1) // 2).sum()) // pairs)
