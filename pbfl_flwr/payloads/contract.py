"""The contract of everything that travels, and the checks that arriving tensors go through."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from pbfl_flwr.payloads.reveals import Reveal
from pbfl_flwr.task import Task

MAX_MAGNITUDE = 1e8  # larger entries are a fault or an attack: a count-scaled feature stays far below
MAX_COUNT = 2**40  # of samples
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


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


class Upload(Payload, Protocol):
    """A payload that clients send: it says what it reveals."""

    reveals: ClassVar[tuple[Reveal, ...]]


@dataclass(frozen=True)
class Nothing:
    """The empty payload: the method has nothing to say in this direction."""

    reveals: ClassVar[tuple[Reveal, ...]] = ()

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


def floats(tensors: Mapping[str, Tensor], name: str, dimensions: int | None, limit: float) -> Tensor:
    """Return a tensor of finite numbers up to a limit as float32.

    Args:
        tensors: what came.
        name: of the one that is wanted.
        dimensions: how many it must have; None allows any number.
        limit: of its largest absolute value.

    Raises:
        RejectedPayload: if it is missing, not floating point, of other dimensions, not finite or too large.
    """
    if name not in tensors:
        raise RejectedPayload(f"'{name}' is missing")
    tensor = tensors[name]
    if tensor.dtype not in FLOATS:
        raise RejectedPayload(f"'{name}' is {tensor.dtype}, expected floating point of 16 to 64 bits")
    if dimensions is not None and tensor.dim() != dimensions:
        raise RejectedPayload(f"'{name}' has {tensor.dim()} dimensions, expected {dimensions}")
    if tensor.numel():
        ends = torch.aminmax(tensor)  # one pass; NaN comes through
        low, high = ends.min.item(), ends.max.item()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise RejectedPayload(f"'{name}' holds NaN or infinity")
        if (largest := max(-low, high)) > limit:
            raise RejectedPayload(f"'{name}' holds {largest:.3g}, allowed is up to {limit:.0e}")
    return tensor.float()


def integers(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a list of whole numbers in the type in which it travelled.

    Raises:
        RejectedPayload: if it is missing or anything else.
    """
    if name not in tensors:
        raise RejectedPayload(f"'{name}' is missing")
    tensor = tensors[name]
    if tensor.dtype not in INTEGERS or tensor.dim() != 1:
        raise RejectedPayload(f"'{name}' must be a list of whole numbers")
    return tensor


def whole_numbers(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the same as int64."""
    return integers(tensors, name).long()


def num_examples_of(tensors: Mapping[str, Tensor]) -> int:
    """Return n_i, sent as ``n``.

    Raises:
        RejectedPayload: if it is no whole number from 0, or absurdly large.
    """
    sent = whole_numbers(tensors, "n")
    if len(sent) != 1 or not 0 <= int(sent) < MAX_COUNT:
        raise RejectedPayload("the number of examples must be one whole number from 0")
    return int(sent)


def first_outside(labels: Tensor, num_classes: int) -> int:
    """Return the first label outside 0..K-1."""
    return int(labels[(labels < 0) | (labels >= num_classes)][0])


def no_others(tensors: Mapping[str, Tensor], known: set[str]) -> None:
    """Check that nothing else was sent.

    Raises:
        RejectedPayload: naming what was.
    """
    if others := tensors.keys() - known:
        raise RejectedPayload(f"unexpected tensors {sorted(others)}")
