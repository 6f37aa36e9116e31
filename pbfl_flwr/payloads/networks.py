"""Payloads of network weights: dense, with prototypes, or as low-rank factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from pbfl_flwr.payloads.classes import Prototypes
from pbfl_flwr.payloads.contract import (
    MAX_MAGNITUDE,
    Magnitudes,
    RejectedPayload,
    floats,
    joined,
    no_others,
    num_examples_of,
    part_of,
    root_mean_square,
    under,
    whole_numbers,
)
from pbfl_flwr.task import Task


@dataclass(frozen=True)
class Weights:
    """Named floating-point tensors of a network or of a part of it (never BatchNorm counters).

    Attributes:
        tensors: name -> tensor; names are the network's own.
        num_examples: n_i, the weight of this upload in the average; 0 in a broadcast.
    """

    tensors: Mapping[str, Tensor]
    num_examples: int = 0

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors under ``w.<name>`` and n_i."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        return {**under("w", tensors), "n": torch.tensor([self.num_examples])}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Weights:
        """Rebuild the mapping; every tensor must be finite. See :class:`Payload`."""
        n = num_examples_of(tensors)
        named = {key: value for key, value in tensors.items() if key.startswith("w.")}
        no_others(tensors, {"n", *named})
        return cls({key[2:]: floats(named, key, None, MAX_MAGNITUDE) for key in named}, n)

    def scalars(self) -> int:
        """Return the number of weights."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    def classes(self, task: Task) -> None:
        """Return None: weights are not organised by class."""
        return None

    def magnitudes(self) -> Magnitudes:
        """Return the size of every tensor, and n_i."""
        sizes = {name: root_mean_square(tensor) for name, tensor in self.tensors.items()}
        return Magnitudes(tensors=sizes, samples=self.num_examples)


@dataclass(frozen=True)
class WeightsAndPrototypes:
    """Weights of a network or of a part of it, and one vector per class.

    Attributes:
        weights: see :class:`Weights`.
        prototypes: see :class:`Prototypes`.
    """

    weights: Weights
    prototypes: Prototypes

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of both, under ``weights.`` and ``prototypes.``."""
        return joined(weights=self.weights, prototypes=self.prototypes)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Self:
        """Rebuild both; see :class:`Payload`."""
        weights, prototypes = part_of(tensors, "weights"), part_of(tensors, "prototypes")
        if len(weights) + len(prototypes) != len(tensors):
            prefixes = ("weights.", "prototypes.")
            raise RejectedPayload(
                f"unexpected tensors {sorted(n for n in tensors if not n.startswith(prefixes))}"
            )
        return cls(Weights.from_tensors(weights, task), Prototypes.from_tensors(prototypes, task))

    def scalars(self) -> int:
        """Return the scalars of both."""
        return self.weights.scalars() + self.prototypes.scalars()

    def classes(self, task: Task) -> list[int]:
        """Return the classes that have a prototype; see :meth:`Prototypes.classes`."""
        return self.prototypes.classes(task)

    def magnitudes(self) -> Magnitudes:
        """Return the sizes of both, and the larger number of samples."""
        weights, prototypes = self.weights.magnitudes(), self.prototypes.magnitudes()
        return Magnitudes(prototypes.rows, weights.tensors, max(weights.samples, prototypes.samples))


@dataclass(frozen=True)
class Factors:
    """A truncated singular value decomposition; leading axes are a batch of matrices with a common k.

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
        """Shape of the product, (..., P, Q)."""
        return (*self.u.shape[:-1], self.v.shape[-1])

    def product(self) -> Tensor:
        """Return U·diag(σ)·V, (..., P, Q) float32."""
        return ((self.u.double() * self.sigma.double().unsqueeze(-2)) @ self.v.double()).to(torch.float32)

    def scalars(self) -> int:
        """Return the number of scalars in the three factors."""
        return self.u.numel() + self.sigma.numel() + self.v.numel()


@dataclass(frozen=True)
class LowRank:
    """Named tensors of a network, some dense and some factorised.

    Attributes:
        dense: name -> tensor.
        factors: name -> factors; a convolution's may be those of its (O, I·h·w) matrix.
        base: version of the weights to which the tensors are added, which the receiver must hold; -1 if the tensors
            are the weights themselves.
        version: of the weights that the receiver holds afterwards (down), or that the sender had received (up).
        num_examples: n_i; 0 in a broadcast.
    """

    dense: Mapping[str, Tensor]
    factors: Mapping[str, Factors] = field(default_factory=dict)
    base: int = -1
    version: int = 0
    num_examples: int = 0

    def to_tensors(self) -> dict[str, Tensor]:
        """Return ``d.<name>``, or ``u.``, ``s.`` and ``v.<name>``, and base, version and n_i as ``about``."""
        tensors = under("d", {name: tensor.detach().contiguous() for name, tensor in self.dense.items()})
        for name, factors in self.factors.items():
            tensors[f"u.{name}"] = factors.u.contiguous()
            tensors[f"s.{name}"] = factors.sigma.contiguous()
            tensors[f"v.{name}"] = factors.v.contiguous()
        return {**tensors, "about": torch.tensor([self.base, self.version, self.num_examples])}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> LowRank:
        """Rebuild the payload; factors must be complete and have matching shapes. See :class:`Payload`."""
        numbers = whole_numbers(tensors, "about")[:4].tolist()
        if len(numbers) != 3 or numbers[0] < -1 or min(numbers[1:]) < 0 or max(numbers) >= 2**40:
            raise RejectedPayload(f"'about' is {numbers}, expected base >= -1, version >= 0 and n >= 0")
        names: dict[str, set[str]] = {kind: set() for kind in "dusv"}
        for key in tensors:
            kind, dot, name = key.partition(".")
            if key != "about" and (not dot or kind not in names):
                raise RejectedPayload(f"unexpected tensor '{key}'")
            if key != "about":
                names[kind].add(name)
        if broken := (names["u"] ^ names["s"]) | (names["u"] ^ names["v"]):
            raise RejectedPayload(f"the factors of '{min(broken)}' are incomplete")
        if twice := names["d"] & names["u"]:
            raise RejectedPayload(f"'{min(twice)}' is sent twice")
        dense = {name: floats(tensors, f"d.{name}", None, MAX_MAGNITUDE) for name in sorted(names["d"])}
        factors = {name: _factors(tensors, name) for name in sorted(names["u"])}
        return cls(dense, factors, *numbers)

    def scalars(self) -> int:
        """Return the number of scalars that travel, in dense tensors and factors."""
        whole = sum(tensor.numel() for tensor in self.dense.values())
        return whole + sum(factors.scalars() for factors in self.factors.values())

    def classes(self, task: Task) -> None:
        """Return None: weights are not organised by class."""
        return None

    def magnitudes(self) -> Magnitudes:
        """Return the size of every dense tensor and of every product of factors, and n_i."""
        sizes = {name: root_mean_square(tensor) for name, tensor in self.dense.items()}
        for name, factors in self.factors.items():
            # Their singular values are not enough: nothing makes u and v orthogonal.
            sizes[name] = root_mean_square(factors.product())
        return Magnitudes(tensors=sizes, samples=self.num_examples)


def _factors(tensors: Mapping[str, Tensor], name: str) -> Factors:
    u, sigma, v = (floats(tensors, f"{kind}.{name}", None, MAX_MAGNITUDE) for kind in "usv")
    fits = u.dim() >= 2 and v.dim() == u.dim() and sigma.dim() == u.dim() - 1
    fits = fits and u.shape[:-2] == v.shape[:-2] == sigma.shape[:-1]
    if not fits or not u.shape[-1] == sigma.shape[-1] == v.shape[-2]:
        raise RejectedPayload(
            f"the factors of '{name}' do not fit: {tuple(u.shape)}, {tuple(sigma.shape)}, {tuple(v.shape)}"
        )
    if bool((sigma < 0).any()):
        raise RejectedPayload(f"'{name}' has a negative singular value")
    if any(side.numel() and float(side.abs().max()) > 1.01 for side in (u, v)):
        raise RejectedPayload(f"'{name}' has a singular vector of norm above 1")
    return Factors(u, sigma, v)
