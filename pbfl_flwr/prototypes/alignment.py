"""ProtoNorm's Prototype Alignment (PA): spread the global prototypes over the unit sphere.

Source: ProtoNorm, Section 4.1 and Algorithm 1, and its published code (repository ProtoNorm). Two solvers
lower the energy E = Σ_{j<k} ln(1/‖C_j - C_k‖) over unit rows C, whose force is F_j = -∂E/∂C_j =
Σ_{k!=j} (C_j - C_k)/‖C_j - C_k‖².

On the sphere F_j·C_j = (K-1)/2 for every configuration. The mean force in the published stopping rule is therefore
a constant plus a second-order term: it stops changing once the tangential force is below about sqrt((K-1)·5e-5), after
20 to 30 steps for K = 10 and d = 512, some 220 for K = 100 and d = 10, however far the optimum still is.

All pairs are computed at once by a Gram matrix instead of all K² differences: memory O(K² + K·d). For two rows so close
that this loses precision, the pair is computed from its difference.

For K <= d + 1 the optimum is known: the regular simplex, all distances sqrt(2K/(K-1)), with
E = -(K(K-1)/4)·ln(2K/(K-1)). By Jensen's inequality no E is lower, since ln is concave and
Σ_{j<k} ‖C_j - C_k‖² = K² - ‖Σ_j C_j‖² <= K².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from pbfl_flwr.config.keys import Solver
from pbfl_flwr.errors import PbflError

COINCIDENT = 1e-7  # rows closer than this are treated as identical and get a perturbation of length JITTER
JITTER = 1e-6
SOFTENING = 1e-10  # added to squared distances in the force, as in ProtoNorm's published code
PAIRS_AT_ONCE = 4096
# The Thomson solver, as in ProtoNorm's published code: η is multiplied by STEP_DECAY in step 0 and every DECAY_EVERY
# steps after it; from step FIRST_TEST on, mean forces are compared, and PATIENCE consecutive steps in which the mean
# force, rounded to 4 decimals, is unchanged end it.
STEP, STEP_DECAY, DECAY_EVERY, MOMENTUM = 0.1, 0.95, 10, 0.9
FIRST_TEST, PATIENCE, MAX_STEPS = 10, 10, 500


@dataclass(frozen=True)
class Geometry:
    """How spread out unit prototypes are; all zero for fewer than two.

    Attributes:
        energy: E.
        min_distance, mean_distance, max_distance: of all pairs.
        margin: the largest distance of a prototype to its nearest neighbour (FedTGP's δ before the cap,
            ProtoNorm's "maximum margin"); the smallest such distance is ``min_distance``.
    """

    energy: float = 0.0
    min_distance: float = 0.0
    mean_distance: float = 0.0
    max_distance: float = 0.0
    margin: float = 0.0


def geometry(units: Tensor) -> Geometry:
    """Return energy and distances of unit rows (K, d), in float64."""
    num_rows = len(units)
    if num_rows < 2:
        return Geometry()
    squared = squared_distances(units.detach().to("cpu", torch.float64)).clamp_min_(1e-300)
    nearest = squared.clone().fill_diagonal_(math.inf).min(dim=1).values.sqrt()
    squared.fill_diagonal_(1.0)
    energy = -0.25 * float(squared.log().sum())  # each pair is counted twice, and ln D = ½ ln D²
    distances = squared.sqrt_().fill_diagonal_(0.0)
    return Geometry(
        energy=energy,
        min_distance=float(nearest.min()),
        mean_distance=float(distances.sum()) / (num_rows * (num_rows - 1)),
        max_distance=float(distances.max()),
        margin=float(nearest.max()),
    )


@dataclass(frozen=True)
class Alignment:
    """Aligned prototypes, and how they were found.

    Attributes:
        values: (K, d) float32, unit rows for present classes and zero rows for absent ones.
        iterations: number of steps; 0 for the closed form.
        converged: whether the stopping rule ended it, not the bound on the steps.
        replaced: number of rows replaced: zero rows by a random direction, duplicates by a perturbed copy.
        before: geometry of the normalised prototypes, after these replacements.
        after: geometry of the result.
    """

    values: Tensor
    iterations: int
    converged: bool
    replaced: int
    before: Geometry
    after: Geometry

    def metrics(self) -> dict[str, float]:
        """Return everything except the values as flat numbers for the history."""
        metrics = {
            "alignment-iterations": float(self.iterations),
            "alignment-converged": float(self.converged),
            "alignment-replaced": float(self.replaced),
        }
        for moment, shape in (("before", self.before), ("after", self.after)):
            for name, value in asdict(shape).items():
                metrics[f"alignment-{name.replace('_', '-')}-{moment}"] = value
        return metrics


def align(
    prototypes: Tensor,
    present: Tensor,
    solver: Solver = "thomson",
    *,
    max_steps: int = MAX_STEPS,
    seed: int = 0,
    watch: Callable[[Tensor], None] | None = None,
) -> Alignment:
    """Spread the prototypes of the present classes over the unit sphere.

    "unit" is only the first line of Algorithm 1: rows get length 1. "thomson" is Algorithm 1 as published, with a
    Gram matrix instead of all K² differences: memory O(K² + K·d) and, since forces never leave the span of the
    initial rows, iterations on K·min(K, d) numbers. It runs in float64 on the CPU (in float32 the rounded mean force
    can stop changing at another step) and in float32 elsewhere. "simplex" is the regular simplex closest to the
    normalised prototypes.

    Absent classes are ignored; the input is not changed.

    Args:
        prototypes: (K, d) aggregated prototypes c_j.
        present: (K,) bool.
        solver: "unit", "thomson" or "simplex".
        max_steps: bound on the Thomson steps; the default is the published code's, the text gives none.
        seed: of the vectors that replace zero rows and of the perturbation of identical ones.
        watch: called with the unit rows of the present classes, in coordinates of their span, before the first and
            after every Thomson step.

    Returns:
        Unit prototypes on the input's device, the number of steps, and the geometry before and after.

    Raises:
        PbflError: if "simplex" is used for more than d + 1 classes.
    """
    device = prototypes.device
    rows = prototypes.detach()[present].to("cpu", torch.float64)
    num_rows, dim = rows.shape
    if solver == "simplex" and num_rows > dim + 1:
        raise PbflError(
            f"alignment simplex needs at most feature-dim + 1 classes, but there are {num_rows} classes and "
            f"feature-dim is {dim}; use thomson"
        )
    basis, start, replaced = _prepare(rows, seed)
    steps, converged = 0, True
    if num_rows < 2 or solver == "unit":
        moved = start
    elif solver == "simplex":
        moved = _nearest_simplex(start)
    else:
        working = start.to(device, torch.float64 if device.type == "cpu" else torch.float32)
        moved, steps, converged = _thomson(working, max_steps, watch)
        moved = moved.to("cpu", torch.float64)
    values = torch.zeros(prototypes.shape, dtype=torch.float32)
    values[present.cpu()] = (moved if basis is None else moved @ basis.T).to(torch.float32)
    return Alignment(values.to(device), steps, converged, replaced, geometry(start), geometry(moved))


def _prepare(rows: Tensor, seed: int) -> tuple[Tensor | None, Tensor, int]:
    """Return distinct unit rows, in as few coordinates as possible.

    Zero rows get a random direction; rows identical to an earlier one are perturbed.

    Returns:
        An orthonormal basis (d, K) of the rows' span, the rows' coordinates (K, K) in it, and the number of replaced
        rows. With K >= d the basis is None and the coordinates are the rows themselves.
    """
    random = torch.Generator().manual_seed(seed)
    empty = ~rows.any(1)
    if bool(empty.any()):
        rows = rows.clone()
        rows[empty] = torch.randn(int(empty.sum()), rows.shape[1], generator=random, dtype=rows.dtype)
    units = normalised(rows)
    basis, coordinates = _span(units)
    replaced = int(empty.sum())
    if len(units) < 2:
        return basis, coordinates, replaced
    coincident = (squared_distances(coordinates) < COINCIDENT**2).tril(-1).any(1)
    if bool(coincident.any()):
        noise = torch.randn(int(coincident.sum()), rows.shape[1], generator=random, dtype=rows.dtype)
        units[coincident] += JITTER * normalised(noise)
        basis, coordinates = _span(normalised(units))
        replaced += int((coincident & ~empty).sum())
    return basis, coordinates, replaced


def _span(units: Tensor) -> tuple[Tensor | None, Tensor]:
    if len(units) >= units.shape[1]:
        return None, units
    basis, triangle = torch.linalg.qr(units.T)
    return basis, triangle.T.contiguous()


def _thomson(
    units: Tensor, max_steps: int, watch: Callable[[Tensor], None] | None
) -> tuple[Tensor, int, bool]:
    """Algorithm 1 with the published schedule and stopping rule."""
    if watch is not None:
        watch(units)
    velocity = torch.zeros_like(units)
    step = STEP
    previous, unchanged = math.nan, 0
    for t in range(max_steps):
        force = forces(units)
        velocity.mul_(MOMENTUM).add_(force, alpha=step)
        units = normalised(units + velocity)
        if watch is not None:
            watch(units)
        if t % DECAY_EVERY == 0:
            step *= STEP_DECAY
        if t >= FIRST_TEST:
            size = round(float(torch.linalg.vector_norm(force, dim=1).mean()), 4)
            unchanged = unchanged + 1 if size == previous else 0
            previous = size
            if unchanged == PATIENCE:
                return units, t + 1, True
    return units, max_steps, False


def _nearest_simplex(units: Tensor) -> Tensor:
    """Return the regular simplex that maximises Σ_j C*_j·C_j (orthogonal Procrustes).

    Every regular simplex is sqrt(K/(K-1))·H·Qᵀ, with H (K, K-1) any orthonormal basis of the complement of
    the ones vector and Q (d, K-1) orthonormal; the best Q is the orthogonal factor of Hᵀ·C. Its SVD yields
    full orthonormal factors at any rank, so prototypes in a lower-dimensional subspace need no special case.
    """
    num_rows = len(units)
    order = torch.arange(1, num_rows, dtype=units.dtype)
    helmert = torch.tril(
        torch.ones(num_rows - 1, num_rows, dtype=units.dtype)
    )  # rows (1, .., 1, -i, 0, .., 0)
    helmert[torch.arange(num_rows - 1), torch.arange(1, num_rows)] = -order
    helmert /= torch.sqrt(order * (order + 1)).unsqueeze(1)
    left, _, right = torch.linalg.svd(helmert @ units, full_matrices=False)
    simplex: Tensor = math.sqrt(num_rows / (num_rows - 1)) * (helmert.T @ (left @ right))
    return simplex


def forces(units: Tensor) -> Tensor:
    """Return F_j = Σ_{k!=j} (C_j - C_k) / (‖C_j - C_k‖² + 1e-10) (ProtoNorm, Eq. 11) in O(K² + K·d) memory.

    F is W's graph Laplacian times C, with W_jk = 1/(‖C_j - C_k‖² + 1e-10). Both that product and the squared
    distances lose precision when rows are close. So rows are centred first, which helps if all rows are close
    together, and single close pairs are computed from their difference.
    """
    centred, squared, close = _distances_and_close_pairs(units)
    squared.add_(SOFTENING).fill_diagonal_(math.inf)
    inverse = squared.reciprocal_()
    for j, k in close:
        inverse[j, k] = inverse[k, j] = 0
    total = torch.addmm(inverse.sum(1, keepdim=True) * centred, inverse, centred, alpha=-1)
    for j, k in close:
        difference = units[j] - units[k]
        push = difference / ((difference**2).sum(1, keepdim=True) + SOFTENING)
        total.index_add_(0, j, push).index_add_(0, k, push, alpha=-1)
    return total


def squared_distances(units: Tensor) -> Tensor:
    """Return ‖C_j - C_k‖² of all pairs (K, K)."""
    _, squared, close = _distances_and_close_pairs(units)
    for j, k in close:
        squared[j, k] = squared[k, j] = ((units[j] - units[k]) ** 2).sum(1)
    return squared


def _distances_and_close_pairs(units: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]]]:
    """Return centred rows, squared distances by Gram matrix, and blocks of pairs j < k where these are imprecise."""
    centred = units - units.mean(0)
    squares = (centred * centred).sum(1)
    squared = torch.addmm(squares.unsqueeze(1) + squares, centred, centred.T, alpha=-2)
    # A Gram distance has an error of about eps·(‖x_j‖² + ‖x_k‖²); below this limit less than half its digits are right.
    limit = 2 * float(squares.max()) * math.sqrt(torch.finfo(units.dtype).eps)
    close: list[tuple[Tensor, ...]] = []
    if float(squared.fill_diagonal_(math.inf).amin()) < limit:
        pairs = (squared < limit).triu().nonzero()
        close = [block.unbind(1) for block in pairs.split(PAIRS_AT_ONCE)]
    return centred, squared.fill_diagonal_(0.0), close


def normalised(rows: Tensor) -> Tensor:
    """Return rows at unit length."""
    units: Tensor = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return units
