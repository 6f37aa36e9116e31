"""What travels between server and clients: frozen dataclasses with fixed shapes.

In memory a payload is dense: K rows, absent classes are zero rows with ``present`` False, never lists and
never infinities. On the wire it is ragged: ``to_tensors`` keeps only the rows of present classes and
``from_tensors`` checks everything that arrives before anybody can use it. What is encoded is what is counted:
``scalars`` is the paper's measure (numbers that carry information), bytes are counted in ``flower/wire.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from pbfl_flwr.task import Task

MAX_MAGNITUDE = 1e8  # larger entries are a fault or an attack: a count-scaled feature stays far below
MAX_COUNT = 2**40  # of samples
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class RejectedPayload(ValueError):
    """A payload that must not touch the state; the text names the first fault found."""


class Payload(Protocol):
    """What every payload can do; the apps encode and decode without knowing the method."""

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the named tensors that travel, ragged and contiguous."""
        ...

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Self:
        """Rebuild the dense payload.

        Raises:
            RejectedPayload: if a tensor is missing, of a wrong shape, not finite or contradicts another one.
        """
        ...

    def scalars(self) -> int:
        """Return how many numbers travel, the papers' measure of cost (no labels, no counts)."""
        ...


@dataclass(frozen=True)
class Nothing:
    """The empty payload: the method has nothing to say in this direction."""

    def to_tensors(self) -> dict[str, Tensor]:
        """Return no tensors."""
        return {}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Nothing:
        """Return the empty payload; anything sent along is a fault."""
        if tensors:
            raise RejectedPayload(f"expected an empty payload, got {sorted(tensors)}")
        return cls()

    def scalars(self) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True)
class Prototypes:
    """One vector a class, in the width that travels: d, or s under class-wise sparsification.

    Attributes:
        values: (K, width) float32; rows of absent classes are zero. Local prototypes are c̄_ij (or n_ij·c̄_ij
            where the method scales them), global ones c_j.
        present: (K,) bool; which classes have a prototype.
        counts: (K,) int64 n_ij, or None when the rule does not need them (then they never travel).
        num_examples: n_i, or None when the rule does not need it.
    """

    values: Tensor
    present: Tensor
    counts: Tensor | None = None
    num_examples: int | None = None

    max_magnitude: ClassVar[float] = MAX_MAGNITUDE

    @classmethod
    def widths(cls, task: Task) -> tuple[int, int]:
        """Return the narrowest and the widest row that may travel: 1..d."""
        return 1, task.feature_dim

    @classmethod
    def empty(cls, num_classes: int, width: int) -> Self:
        """Return a table in which no class is present."""
        return cls(torch.zeros(num_classes, width), torch.zeros(num_classes, dtype=torch.bool))

    @property
    def num_present(self) -> int:
        """How many classes have a prototype."""
        return int(self.present.sum())

    def to_tensors(self) -> dict[str, Tensor]:
        """Return labels (present classes, ascending), their rows, and counts where they are part of it."""
        labels = self.present.nonzero().flatten()
        small = self.present.numel() <= 256
        tensors = {
            "labels": labels.to(torch.uint8 if small else torch.int32),
            "rows": self.values[labels].contiguous(),
        }
        if self.counts is not None:
            tensors["counts"] = self.counts[labels].contiguous()
        if self.num_examples is not None:
            tensors["n"] = torch.tensor([self.num_examples])
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Self:
        """Rebuild the dense table from labels and rows; see :class:`Payload`."""
        labels = _whole_numbers(tensors, "labels")
        rows = _floats(tensors, "rows", dimensions=2, limit=cls.max_magnitude)
        K = task.num_classes
        if len(labels) != len(rows):
            raise RejectedPayload(f"{len(labels)} labels for {len(rows)} rows")
        narrowest, widest = cls.widths(task)
        if not narrowest <= rows.shape[1] <= widest:
            raise RejectedPayload(f"rows are {rows.shape[1]} wide, allowed is {narrowest}..{widest}")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < K:
            raise RejectedPayload(f"class id {_first_outside(labels, K)} is outside 0..{K - 1}")
        if len(labels.unique()) != len(labels):
            raise RejectedPayload("a class is sent twice")
        values = torch.zeros(K, rows.shape[1])
        values[labels] = rows
        present = torch.zeros(K, dtype=torch.bool)
        present[labels] = True
        counts = None
        if "counts" in tensors:
            sent = _whole_numbers(tensors, "counts")
            if len(sent) != len(labels):
                raise RejectedPayload(f"{len(sent)} counts for {len(labels)} rows")
            if len(sent) and int(sent.min()) < 1:
                raise RejectedPayload("a row with a count of zero or less")
            if len(sent) and int(sent.max()) >= MAX_COUNT:
                raise RejectedPayload(f"a count of {int(sent.max())}, allowed is less than {MAX_COUNT}")
            counts = torch.zeros(K, dtype=torch.int64)
            counts[labels] = sent
        total = _num_examples(tensors) if "n" in tensors else None
        _no_others(tensors, {"labels", "rows", "counts", "n"})
        return cls(values, present, counts, total)

    def scalars(self) -> int:
        """Return K_present · width."""
        return self.num_present * int(self.values.shape[1])


@dataclass(frozen=True)
class Logits(Prototypes):
    """One vector of class scores a class: prototypes in the space of outputs, of width K.

    Attributes:
        values: (K, K) float32; row c is what networks answer to samples of class c, logits or probabilities.
        present: (K,) bool; which classes have a row.
    """

    @classmethod
    def widths(cls, task: Task) -> tuple[int, int]:
        """Return K..K."""
        return task.num_classes, task.num_classes


@dataclass(frozen=True)
class Weights:
    """Named floating-point tensors of a network or of a part of it (never BatchNorm counters).

    Attributes:
        tensors: name -> tensor, in the network's own naming.
        num_examples: n_i, the weight of this upload in the average; 0 on the way down.
    """

    tensors: Mapping[str, Tensor]
    num_examples: int = 0

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors under ``w.<name>`` and n_i."""
        sent = {f"w.{name}": tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        return {**sent, "n": torch.tensor([self.num_examples])}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Weights:
        """Rebuild the mapping; every tensor must be finite. See :class:`Payload`."""
        n = _num_examples(tensors)
        named = {key: value for key, value in tensors.items() if key.startswith("w.")}
        _no_others(tensors, {"n", *named})
        return cls({key[2:]: _floats(named, key, None, MAX_MAGNITUDE) for key in named}, n)

    def scalars(self) -> int:
        """Return the number of weights."""
        return sum(tensor.numel() for tensor in self.tensors.values())


@dataclass(frozen=True)
class Mixtures:
    """Gaussian mixtures with diagonal covariance, any number of components a class; ragged in memory too.

    Attributes:
        labels: (N,) int64, the class each component belongs to.
        weights: (N,) float32 w > 0: the component's share of its class, or of its class's samples.
        means: (N, d) float32 μ.
        stds: (N, d) float32 σ >= 0, the roots of the covariance's diagonal.
    """

    labels: Tensor
    weights: Tensor
    means: Tensor
    stds: Tensor

    max_components: ClassVar[int] = 2**20

    @classmethod
    def empty(cls, width: int) -> Mixtures:
        """Return mixtures without components; nothing of them travels."""
        rows = torch.zeros(0, width)
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0), rows, rows)

    @classmethod
    def concatenated(cls, parts: Iterable[Mixtures], width: int) -> Mixtures:
        """Return all components of the parts, in their order."""
        found = [cls.empty(width), *parts]
        names = ("labels", "weights", "means", "stds")
        return cls(*(torch.cat([getattr(part, name) for part in found]) for name in names))

    @property
    def num_components(self) -> int:
        """N."""
        return len(self.labels)

    def chosen(self, index: Tensor) -> Mixtures:
        """Return the components of an index or a mask."""
        return Mixtures(self.labels[index], self.weights[index], self.means[index], self.stds[index])

    def present(self, num_classes: int) -> Tensor:
        """Return (K,) bool: which classes have a component."""
        return torch.bincount(self.labels, minlength=num_classes) > 0

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the four tensors, or none of them when there is no component."""
        if not self.num_components:
            return {}
        small = int(self.labels.max()) < 256
        return {
            "labels": self.labels.to(torch.uint8 if small else torch.int32),
            "weights": self.weights.contiguous(),
            "means": self.means.contiguous(),
            "stds": self.stds.contiguous(),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Mixtures:
        """Rebuild the components; see :class:`Payload`."""
        d = task.feature_dim
        if not tensors:
            return cls.empty(d)
        labels = _whole_numbers(tensors, "labels")
        weights = _floats(tensors, "weights", dimensions=1, limit=MAX_MAGNITUDE)
        means = _floats(tensors, "means", dimensions=2, limit=MAX_MAGNITUDE)
        stds = _floats(tensors, "stds", dimensions=2, limit=MAX_MAGNITUDE)
        _no_others(tensors, {"labels", "weights", "means", "stds"})
        N = len(labels)
        if not 1 <= N <= cls.max_components:
            raise RejectedPayload(f"{N} components, allowed are 1..{cls.max_components}")
        if len(weights) != N:
            raise RejectedPayload(f"{len(weights)} weights for {N} components")
        for name, rows in (("means", means), ("stds", stds)):
            if rows.shape != (N, d):
                raise RejectedPayload(f"'{name}' has shape {tuple(rows.shape)}, expected ({N}, {d})")
        if not 0 <= int(labels.min()) <= int(labels.max()) < task.num_classes:
            raise RejectedPayload(
                f"class id {_first_outside(labels, task.num_classes)} is outside 0..{task.num_classes - 1}"
            )
        if float(weights.min()) <= 0:
            raise RejectedPayload(f"a component's weight is {float(weights.min()):.3g}, it must be positive")
        if float(stds.min()) < 0:
            raise RejectedPayload(f"a standard deviation is {float(stds.min()):.3g}, it must not be negative")
        return cls(labels, weights, means, stds)

    def scalars(self) -> int:
        """Return N·(2d + 1)."""
        return self.num_components * (2 * int(self.means.shape[1]) + 1)


@dataclass(frozen=True)
class WeightsAndPrototypes:
    """Weights of a network or of a part of it, beside one vector a class.

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
        weights, prototypes = under(tensors, "weights"), under(tensors, "prototypes")
        if len(weights) + len(prototypes) != len(tensors):
            known = ("weights.", "prototypes.")
            raise RejectedPayload(
                f"unexpected tensors {sorted(n for n in tensors if not n.startswith(known))}"
            )
        return cls(Weights.from_tensors(weights, task), Prototypes.from_tensors(prototypes, task))

    def scalars(self) -> int:
        """Return the scalars of both."""
        return self.weights.scalars() + self.prototypes.scalars()


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
        """Rebuild the payload; every triple must be whole and fit together. See :class:`Payload`."""
        about = _whole_numbers(tensors, "about").tolist()
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
        dense = {name: _floats(tensors, f"d.{name}", None, MAX_MAGNITUDE) for name in sorted(names["d"])}
        factors = {name: _factors(tensors, name) for name in sorted(names["u"])}
        return cls(dense, factors, *about)

    def scalars(self) -> int:
        """Return how many numbers travel, dense ones and factors."""
        whole = sum(tensor.numel() for tensor in self.dense.values())
        return whole + sum(factors.scalars() for factors in self.factors.values())


def _factors(tensors: Mapping[str, Tensor], name: str) -> Factors:
    u, sigma, v = (_floats(tensors, f"{kind}.{name}", None, MAX_MAGNITUDE) for kind in "usv")
    fits = u.dim() >= 2 and v.dim() == u.dim() and sigma.dim() == u.dim() - 1
    fits = fits and u.shape[:-2] == v.shape[:-2] == sigma.shape[:-1]
    if not fits or not u.shape[-1] == sigma.shape[-1] == v.shape[-2]:
        raise RejectedPayload(
            f"the factors of '{name}' do not fit: {tuple(u.shape)}, {tuple(sigma.shape)}, {tuple(v.shape)}"
        )
    if bool((sigma < 0).any()):
        raise RejectedPayload(f"'{name}' has a negative singular value")
    if any(side.numel() and float(side.abs().max()) > 1.01 for side in (u, v)):
        raise RejectedPayload(f"'{name}' has a singular vector that is longer than 1")
    return Factors(u, sigma, v)


def class_counts(tensors: Mapping[str, Tensor], name: str, task: Task) -> Tensor:
    """Return a tensor that holds one count a class, (K,) int64.

    Raises:
        RejectedPayload: if it is missing, or not K whole numbers from 0.
    """
    counts = _whole_numbers(tensors, name)
    if len(counts) != task.num_classes or int(counts.min()) < 0 or int(counts.max()) >= MAX_COUNT:
        raise RejectedPayload(f"'{name}' must be {task.num_classes} whole numbers from 0")
    return counts


def joined(**parts: Payload) -> dict[str, Tensor]:
    """Return the tensors of several payloads as one, each under ``<name>.``; for payloads made of payloads."""
    return {
        f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.to_tensors().items()
    }


def under(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors of one part of a joined payload, by their own names."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors contiguous on the CPU, copied where two share memory: a safetensors file holds no views."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in taken:
            own = own.clone()
        taken.add(own.untyped_storage().data_ptr())
        found[name] = own
    return found


def _floats(tensors: Mapping[str, Tensor], name: str, dimensions: int | None, limit: float) -> Tensor:
    if name not in tensors:
        raise RejectedPayload(f"'{name}' is missing")
    tensor = tensors[name]
    if tensor.dtype not in _FLOATS:
        raise RejectedPayload(f"'{name}' is {tensor.dtype}, expected floating point of 16 to 64 bits")
    if dimensions is not None and tensor.dim() != dimensions:
        raise RejectedPayload(f"'{name}' has {tensor.dim()} dimensions, expected {dimensions}")
    if not bool(torch.isfinite(tensor).all()):
        raise RejectedPayload(f"'{name}' holds NaN or infinity")
    if tensor.numel() and float(tensor.abs().max()) > limit:
        raise RejectedPayload(f"'{name}' holds {float(tensor.abs().max()):.3g}, allowed is up to {limit:.0e}")
    return tensor.to(torch.float32)


def _whole_numbers(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise RejectedPayload(f"'{name}' is missing")
    tensor = tensors[name]
    if tensor.dtype not in _INTEGERS or tensor.dim() != 1:
        raise RejectedPayload(f"'{name}' must be a list of whole numbers")
    return tensor.to(torch.int64)


def _num_examples(tensors: Mapping[str, Tensor]) -> int:
    n = _whole_numbers(tensors, "n")
    if len(n) != 1 or not 0 <= int(n[0]) < MAX_COUNT:
        raise RejectedPayload("the number of examples must be one whole number from 0")
    return int(n[0])


def _first_outside(labels: Tensor, num_classes: int) -> int:
    return int(labels[(labels < 0) | (labels >= num_classes)][0])


def _no_others(tensors: Mapping[str, Tensor], known: set[str]) -> None:
    if others := set(tensors) - known:
        raise RejectedPayload(f"unexpected tensors {sorted(others)}")
