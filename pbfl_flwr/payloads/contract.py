"""The interface of payloads, and the validation of received tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from safetensors.torch import save
from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import Task

MAX_MAGNITUDE = 1e8  # count-scaled features are far smaller
MAX_COUNT = 2**40  # bound on a number of samples
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class RejectedPayload(ValueError):
    """A payload that must not be used; the message names the first fault found."""


class OutOfRange(RejectedPayload):
    """A payload with numbers that are not finite or too large, as a training that diverges leaves them."""


@dataclass(frozen=True)
class Magnitudes:
    """How large the numbers of an upload are; see :mod:`pbfl_flwr.payloads.plausibility`.

    Attributes:
        rows: class -> root mean square of what was sent for it.
        tensors: name -> root mean square of a tensor that does not belong to a class.
        samples: number of samples that the upload claims, 0 if it claims none.
        once: whether a sample counts once, however often the client drew it.
    """

    rows: Mapping[int, float] = field(default_factory=dict)
    tensors: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    once: bool = True


class Serializable(Protocol):
    """What can be written as named tensors: the server's state in a checkpoint, a payload in a message."""

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the named tensors, ragged and contiguous."""
        ...

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Self:
        """Rebuild it, dense.

        Raises:
            RejectedPayload: if a tensor is missing, of a wrong shape, not finite or contradicts another one.
        """
        ...


class Payload(Serializable, Protocol):
    """The interface of all payloads; the apps encode and decode them without knowing the method."""

    def scalars(self) -> int:
        """Return how many numbers travel, the papers' measure of cost (without labels and counts)."""
        ...


class Upload(Payload, Protocol):
    """A payload that clients send; it says which classes it is about, and how large its numbers are."""

    def classes(self, task: Task) -> list[int] | None:
        """Return the classes present in this upload, ascending; None if it is not organised by class."""
        ...

    def magnitudes(self) -> Magnitudes:
        """Return how large its numbers are, to be compared with those of the other clients."""
        ...


@dataclass(frozen=True)
class Nothing:
    """The empty payload, for methods that send nothing in this direction."""

    def to_tensors(self) -> dict[str, Tensor]:
        """Return no tensors."""
        return {}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Nothing:
        """Return the empty payload; raise RejectedPayload if there is any tensor."""
        if tensors:
            raise RejectedPayload(f"expected an empty payload, got {sorted(tensors)}")
        return cls()

    def scalars(self) -> int:
        """Return 0."""
        return 0

    def classes(self, task: Task) -> None:
        """Return None: nothing is sent."""
        return None

    def magnitudes(self) -> Magnitudes:
        """Return no magnitudes."""
        return Magnitudes()


def root_mean_square(tensor: Tensor) -> float:
    """Return the root mean square of a tensor's elements, 0 if it has none."""
    return float(torch.linalg.vector_norm(tensor)) / math.sqrt(max(1, tensor.numel()))


def joined(**parts: Serializable) -> dict[str, Tensor]:
    """Return the tensors of several parts in one mapping, each under ``<name>.``."""
    tensors: dict[str, Tensor] = {}
    for name, part in parts.items():
        tensors |= under(name, part.to_tensors())
    return tensors


def part_of(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors of one part of a joined payload, under their own names."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under ``<prefix>.<name>``, of which :func:`part_of` gives them back.

    Raises:
        PbflError: if a name is no text, as which it would come back.
    """
    _check_names(tensors)
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _check_names(tensors: Mapping[str, Tensor]) -> None:
    if odd := [name for name in tensors if not isinstance(name, str)]:
        raise PbflError(f"{odd[0]!r} is the name of a tensor; must be a text")


def check_storable(what: str, tensor: Tensor) -> None:
    """Check that a tensor can last from round to round, in a safetensors file.

    Args:
        what: the beginning of the message.
        tensor: of any shape.

    Raises:
        PbflError: if safetensors does not have its layout or dtype.
    """
    storable = tensor.layout is torch.strided
    try:
        save({"": torch.empty(0, dtype=tensor.dtype)})
    except (KeyError, RuntimeError, ValueError):
        storable = False
    if not storable:
        raise PbflError(
            f"{what} is {tensor.layout} of {tensor.dtype}, which safetensors does not store from round to round; must "
            "be dense, of another type"
        )


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU, copied if they share memory: safetensors files cannot hold views.

    Raises:
        PbflError: if a name is no text.
    """
    _check_names(tensors)
    copies: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        if copy.untyped_storage().data_ptr() in addresses:
            copy = copy.clone()
        addresses.add(copy.untyped_storage().data_ptr())
        copies[name] = copy
    return copies


def floats(tensors: Mapping[str, Tensor], name: str, dimensions: int | None, limit: float) -> Tensor:
    """Return a tensor of finite, bounded numbers as float32.

    Args:
        tensors: the received tensors.
        name: of the tensor to return.
        dimensions: required number of dimensions; None allows any.
        limit: bound on the absolute values.

    Raises:
        OutOfRange: if it is not finite or exceeds the limit.
        RejectedPayload: if it is missing, not floating point, or has other dimensions.
    """
    if name not in tensors:
        raise RejectedPayload(f"'{name}' is missing")
    tensor = tensors[name]
    if tensor.dtype not in FLOATS:
        raise RejectedPayload(f"'{name}' is {tensor.dtype}, expected floating point of 16 to 64 bits")
    if dimensions is not None and tensor.dim() != dimensions:
        raise RejectedPayload(f"'{name}' has {tensor.dim()} dimensions, expected {dimensions}")
    if tensor.numel():
        ends = torch.aminmax(tensor)  # one pass, and propagates NaN
        low, high = ends.min.item(), ends.max.item()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise OutOfRange(f"'{name}' holds NaN or infinity")
        if (largest := max(-low, high)) > limit:
            raise OutOfRange(f"'{name}' holds {largest:.3g}, must be at most {limit:.0e}")
    return tensor.float()


def integers(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a 1-d tensor of integers in the dtype in which it was sent.

    Raises:
        RejectedPayload: if it is missing, not integer or not 1-d.
    """
    if name not in tensors:
        raise RejectedPayload(f"'{name}' is missing")
    tensor = tensors[name]
    if tensor.dtype not in INTEGERS or tensor.dim() != 1:
        raise RejectedPayload(f"'{name}' must be a list of whole numbers")
    return tensor


def whole_numbers(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the tensor of :func:`integers` as int64."""
    return integers(tensors, name).long()


def num_examples_of(tensors: Mapping[str, Tensor]) -> int:
    """Return n_i, sent as ``n``.

    Raises:
        RejectedPayload: if it is not one whole number from 0 to MAX_COUNT - 1.
    """
    number = whole_numbers(tensors, "n")
    if len(number) != 1 or not 0 <= int(number) < MAX_COUNT:
        raise RejectedPayload("the number of examples must be one whole number from 0")
    return int(number)


def first_outside(labels: Tensor, num_classes: int) -> int:
    """Return the first label outside 0..K-1."""
    return int(labels[(labels < 0) | (labels >= num_classes)][0])


def no_others(tensors: Mapping[str, Tensor], names: set[str]) -> None:
    """Check that there are no tensors besides those of these names.

    Raises:
        RejectedPayload: naming the others.
    """
    if others := tensors.keys() - names:
        raise RejectedPayload(f"unexpected tensors {sorted(others)}")
