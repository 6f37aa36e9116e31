"""Traces a training step on copies of its tensors: which existing tensors it reads and writes, and its operations.

A CUDA graph reads and writes the memory it was recorded on. So that one recording serves every client with the same
architecture, a step is recorded on *static copies* of all tensors that exist before the step (weights, running
statistics, momentum, prototypes, the batch). Another client's step is first run once on static copies of its own. If it
consists of the same operations, on tensors of the same shapes and with the same constants, the recording is valid
for it too: its tensors are copied in, the recording is replayed, and the written tensors are copied back. Methods need
not declare which tensors their loss reads: these are found below autograd, through which every operation passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pbfl_flwr.errors import PbflError

Run = Callable[[], None]

Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""A view of memory: storage, offset, shape, strides and dtype of a tensor."""
Signature = tuple[Hashable, ...]
"""A step's operations in order, each with its constants and with the shapes and origins of its tensors."""


class NotReplayable(PbflError):
    """A training step that cannot be recorded.

    Args:
        why: the part of it that cannot be recorded.
    """

    def __init__(self, why: str) -> None:
        super().__init__(
            f"compile = 'cuda-graph': a training step could not be recorded ({why}); allowed is 'off'"
        )
        self.why = why


RUNNING = {"running_mean", "running_var"}  # written by BatchNorm; not all of its schemas declare that


class StaticCopies(TorchDispatchMode):
    """Dispatch mode in which operations use static copies of tensors that existed before it.

    Args:
        first: tensors that are copied first, in this order, whether or not they are read.

    Attributes:
        originals: the existing tensors, in order of first use.
        tensors: their static copies, made at first use.
    """

    def __init__(self, *first: Tensor) -> None:
        begin: Callable[[], None] = super().__init__  # untyped in torch
        begin()
        self.originals: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self._numbers: dict[Place, int] = {}  # original's place -> index of its static copy
        self._copies: dict[int, int] = {}  # storage of a static copy -> its index
        self._complete = False
        self._forget()
        for tensor in first:
            self._replaced(tensor)

    def _forget(self) -> None:
        self._made: dict[int, int] = {}  # storage -> number of operations up to its creation
        self._written: set[int] = set()
        self._operations: list[tuple[Hashable, ...]] = []

    def again(self) -> StaticCopies:
        """Return a mode with the same static copies for another pass, which may not read any other existing tensor."""
        other = copy(self)
        other._complete = True
        other._forget()
        return other

    def bring_back(self) -> None:
        """Copy the written static copies to their originals."""
        copy_some(self.tensors, self.originals, self.written)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = each_tensor(self._replaced, (args, kwargs or {}))
        if func is torch.ops.aten.detach.default:
            return func(*args)  # computes nothing; how often autograd calls it depends on other modes
        self._operations.append((func, self._said(args), self._said(tuple(kwargs.items()))))
        self._note_written(func, args, kwargs)
        found = func(*args, **kwargs)
        return each_tensor(self._given_back, found)

    @property
    def last(self) -> str:
        """Name of the last operation."""
        return str(self._operations[-1][0]) if self._operations else "it"

    @property
    def signature(self) -> Signature:
        """The operations; one recording is valid for all steps with the same signature."""
        return tuple(self._operations)

    @property
    def written(self) -> list[int]:
        """Indices of the static copies that the step has written.

        Raises:
            NotReplayable: if one shares memory with another tensor of the step: their copies would diverge.
        """
        shared: dict[int, int] = {}
        for storage, *_ in self._numbers:
            shared[storage] = shared.get(storage, 0) + 1
        for (storage, *_), number in self._numbers.items():
            if number in self._written and shared[storage] > 1:
                raise NotReplayable("it writes to a tensor that it also reads through another view")
        return sorted(self._written)

    def _replaced(self, item: Tensor) -> Tensor:
        """Return the static copy of a tensor that existed before the step; CPU scalars and other tensors unchanged."""
        if item.dim() == 0 and item.device.type == "cpu":
            return item
        storage = _storage(item)
        if storage in self._made or storage in self._copies:
            return item
        place = _place(item)
        if place not in self._numbers:
            if self._complete:
                raise NotReplayable("it reads tensors that the previous step did not read")
            self._numbers[place] = len(self.tensors)
            self.originals.append(item)
            self.tensors.append(item.detach().clone())
            self._copies[_storage(self.tensors[-1])] = self._numbers[place]
        return self.tensors[self._numbers[place]]

    def _given_back(self, item: Tensor) -> Tensor:
        """Return the original for a static copy: autograd expects an in-place operation to return its argument."""
        number = self._copies.get(_storage(item))
        if number is None:
            self._made[_storage(item)] = len(self._operations)
            return item
        return self.originals[number] if item is self.tensors[number] else item

    def _said(self, item: Any) -> Hashable:
        if isinstance(item, (list, tuple)):
            return tuple(self._said(part) for part in item)
        if isinstance(item, (torch.UntypedStorage, torch.TypedStorage)):  # storages have no static copies
            raise NotReplayable(
                "it accesses a tensor's storage directly, as cuDNN's recurrent layers do with their weights"
            )
        if not isinstance(item, Tensor):
            return (type(item), str(item))
        storage, *form = _place(item)
        if storage in self._copies:
            return ("copy", self._copies[storage], *form)
        if storage in self._made:
            return ("made", self._made[storage], *form)
        return ("number", float(item), item.dtype)  # a CPU scalar, the only tensor without a static copy

    def _note_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for argument, value in _arguments(func, args, kwargs):
            if argument.name in RUNNING or (argument.alias_info is not None and argument.alias_info.is_write):
                each_tensor(self._mark_written, value)

    def _mark_written(self, tensor: Tensor) -> None:
        if (number := self._copies.get(_storage(tensor))) is not None:
            self._written.add(number)


@torch.no_grad()
def copy_some(here: Sequence[Tensor], there: Sequence[Tensor], places: Sequence[int]) -> None:
    """Copy the tensors at the given indices of one list to the same indices of another, one launch per dtype.

    Given several dtypes at once, torch copies tensor by tensor; BatchNorm has integer counters among its floats.
    """
    of_type: dict[torch.dtype, list[int]] = {}
    for place in places:
        of_type.setdefault(here[place].dtype, []).append(place)
    for alike in of_type.values():
        torch._foreach_copy_([there[place] for place in alike], [here[place] for place in alike])


def each_tensor(change: Callable[[Tensor], Any], item: Any) -> Any:
    """Apply a function to every tensor in an operation's arguments or results; torch's tree_map takes twice as long."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, (list, tuple)):
        return type(item)([each_tensor(change, part) for part in item])
    if isinstance(item, dict):
        return {key: each_tensor(change, part) for key, part in item.items()}
    return item


def _arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            yield argument, args[place]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _place(tensor: Tensor) -> Place:
    return _storage(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype
