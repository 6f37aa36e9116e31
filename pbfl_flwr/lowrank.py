"""Weights as truncated singular value decompositions: how they are compressed, and how they travel.

A matrix W (P, Q) is sent as its k largest singular triples, W ≈ U·diag(σ)·V, which is k·(P + Q + 1) numbers. k is
the smallest for which the triples hold more than the share ``energy`` of Σσ². Source: FedKD (Wu et al. 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from pbfl_flwr.payloads import MAX_MAGNITUDE, RejectedPayload, finite_floats, whole_numbers
from pbfl_flwr.task import Task

Scheme = Literal["safe", "as-coded"]


@dataclass(frozen=True)
class Factors:
    """A truncated decomposition; leading axes are a batch of matrices with a common k.

    Attributes:
        u: (..., P, k).
        sigma: (..., k), singular values, descending.
        v: (..., k, Q), rows are right singular vectors.
    """

    u: Tensor
    sigma: Tensor
    v: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what it stands for, (..., P, Q)."""
        return (*self.u.shape[:-1], self.v.shape[-1])

    def product(self) -> Tensor:
        """Return U·diag(σ)·V, (..., P, Q) float32."""
        return ((self.u.double() * self.sigma.double().unsqueeze(-2)) @ self.v.double()).to(torch.float32)

    def scalars(self) -> int:
        """Return how many numbers it has."""
        return self.u.numel() + self.sigma.numel() + self.v.numel()


@dataclass(frozen=True)
class LowRank:
    """Named tensors of a network, some as they are and some factorised.

    Attributes:
        dense: name -> tensor.
        factors: name -> factors; a convolution's may be those of its (O, I·h·w) matrix.
        base: what the tensors are to be added to: the version of the weights that the receiver must hold; -1 if
            they stand for themselves.
        version: the weights that the receiver holds afterwards (down), or was given (up).
        num_examples: n_i; 0 on the way down.
    """

    dense: Mapping[str, Tensor]
    factors: Mapping[str, Factors] = field(default_factory=dict)
    base: int = -1
    version: int = 0
    num_examples: int = 0

    def to_tensors(self) -> dict[str, Tensor]:
        """Return ``d.<name>``, or ``u.``, ``s.`` and ``v.<name>``, and the three whole numbers."""
        sent = {f"d.{name}": tensor.detach().contiguous() for name, tensor in self.dense.items()}
        for name, factors in self.factors.items():
            sent[f"u.{name}"] = factors.u.contiguous()
            sent[f"s.{name}"] = factors.sigma.contiguous()
            sent[f"v.{name}"] = factors.v.contiguous()
        return {**sent, "about": torch.tensor([self.base, self.version, self.num_examples])}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> LowRank:
        """Rebuild the payload; every triple must be whole and fit together. See :class:`~pbfl_flwr.payloads.Payload`."""
        about = whole_numbers(tensors, "about").tolist()
        if len(about) != 3 or about[0] < -1 or min(about[1:]) < 0 or max(about) >= 2**40:
            raise RejectedPayload(f"'about' is {about}, expected base >= -1, version >= 0 and n >= 0")
        names: dict[str, set[str]] = {kind: set() for kind in "dusv"}
        for key in tensors:
            kind, dot, name = key.partition(".")
            if key != "about" and (not dot or kind not in names):
                raise RejectedPayload(f"unexpected tensor '{key}'")
            if key != "about":
                names[kind].add(name)
        if broken := (names["u"] ^ names["s"]) | (names["u"] ^ names["v"]):
            raise RejectedPayload(f"the factors of '{min(broken)}' are not complete")
        if twice := names["d"] & names["u"]:
            raise RejectedPayload(f"'{min(twice)}' is sent twice")
        dense = {name: finite_floats(tensors, f"d.{name}", None, MAX_MAGNITUDE) for name in sorted(names["d"])}
        factors = {name: _factors(tensors, name) for name in sorted(names["u"])}
        return cls(dense, factors, *about)

    def scalars(self) -> int:
        """Return how many numbers travel, dense ones and factors."""
        whole = sum(tensor.numel() for tensor in self.dense.values())
        return whole + sum(factors.scalars() for factors in self.factors.values())


def _factors(tensors: Mapping[str, Tensor], name: str) -> Factors:
    u, sigma, v = (finite_floats(tensors, f"{kind}.{name}", None, MAX_MAGNITUDE) for kind in "usv")
    fits = u.dim() >= 2 and v.dim() == u.dim() and sigma.dim() == u.dim() - 1
    fits = fits and u.shape[:-2] == v.shape[:-2] == sigma.shape[:-1]
    if not fits or not u.shape[-1] == sigma.shape[-1] == v.shape[-2]:
        raise RejectedPayload(
            f"the factors of '{name}' do not fit: {tuple(u.shape)}, {tuple(sigma.shape)}, {tuple(v.shape)}"
        )
    if bool((sigma < 0).any()):
        raise RejectedPayload(f"'{name}' has a negative singular value")
    return Factors(u, sigma, v)


def compress(
    tensors: Mapping[str, Tensor],
    energy: float,
    scheme: Scheme,
    *,
    base: int = -1,
    version: int = 0,
    num_examples: int = 0,
) -> LowRank:
    """Return tensors with their matrices truncated.

    "safe": a convolution (O, I, h, w) is the matrix (O, I·h·w); 1 <= k <= rank; a tensor stays dense where factors would
    not be smaller. The relative error of a tensor is below sqrt(1 - energy), and never is more sent than before.
    "as-coded" is HtFLlib and PFLlib: a convolution is O·I matrices (h, w) with one k for all; k = rank is never tried, and
    where it would be needed k is 0: the whole tensor becomes zero; nothing stays dense for being larger.

    Args:
        tensors: name -> tensor.
        energy: share of Σσ² that is kept, in (0, 1].
        scheme: see above.
        base: see :class:`LowRank`, like the two that follow.
        version: likewise.
        num_examples: likewise.
    """
    dense: dict[str, Tensor] = {}
    factors: dict[str, Factors] = {}
    for name, tensor in tensors.items():
        found = None
        if tensor.dim() > 1 and len(tensor) > 1 and bool(tensor.any()):
            found = truncated(tensor, energy, scheme)
        if found is None:
            dense[name] = tensor
        else:
            factors[name] = found
    return LowRank(dense, factors, base, version, num_examples)


def truncated(tensor: Tensor, energy: float, scheme: Scheme) -> Factors | None:
    """Return the truncated decomposition of a tensor with two or more axes; None where it should stay dense.

    It runs on the CPU in float64; the factors are float32.
    """
    wide = tensor.detach().cpu().double()
    matrices = wide if scheme == "as-coded" else wide.flatten(1)
    u, sigma, v = torch.linalg.svd(matrices, full_matrices=False)
    squares = sigma.square().reshape(-1, sigma.shape[-1]).sum(0)  # over all matrices of a batch
    enough = squares.cumsum(0) > energy * squares.sum()
    rank = len(squares)
    if scheme == "as-coded":
        first = enough[:-1].nonzero()
        k = int(first[0]) + 1 if len(first) else 0
    else:
        k = int(enough.nonzero()[0]) + 1 if bool(enough.any()) else rank
        if k * (u.shape[0] + v.shape[1] + 1) >= tensor.numel():
            return None
    return Factors(u[..., :k].float(), sigma[..., :k].float(), v[..., :k, :].float())


def expand(payload: LowRank, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the tensors that a payload stands for, in the order and shape of ``shapes``.

    Raises:
        RejectedPayload: if a tensor is missing, unexpected or of another shape.
    """
    check_shapes(payload, shapes)
    return {
        name: payload.dense[name] if name in payload.dense else payload.factors[name].product().reshape(shape)
        for name, shape in shapes.items()
    }


def check_shapes(payload: LowRank, shapes: Mapping[str, torch.Size]) -> None:
    """Check that a payload has exactly the tensors of ``shapes``; a convolution may come as a matrix.

    Raises:
        RejectedPayload: naming the first difference.
    """
    found = {name: tuple(tensor.shape) for name, tensor in payload.dense.items()}
    found |= {name: factors.shape for name, factors in payload.factors.items()}
    if different := set(found) ^ set(shapes):
        raise RejectedPayload(f"tensor '{min(different)}' is missing or unexpected")
    for name, shape in shapes.items():
        as_matrix = (shape[0], shape[1:].numel()) if name in payload.factors else tuple(shape)
        if found[name] not in (tuple(shape), as_matrix):
            raise RejectedPayload(f"tensor '{name}' has shape {found[name]}, expected {tuple(shape)}")
