"""Networks apart from one another and from their types: copies, altered layers, lost ties, training without traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from io import BytesIO
from itertools import combinations
from pickle import Pickler, PicklingError
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError


def is_copyable(model: nn.Module) -> bool:
    """Return whether ``copy.deepcopy`` gives an equal network that has nothing in common with this one.

    Not if it holds functions that have no name in their module (lambdas, functions within functions, methods of classes
    within functions): a deep copy shares them, and what they refer to is the original's. Nor if a tensor has hooks or
    attributes, which copies lose, or a parameter shares memory with another tensor, of which its copy is apart.
    """
    inspector = _Inspector(BytesIO())
    try:
        inspector.dump(model)
        deepcopy(model)
        return not any(_overlapping(inspector.tensors.values()))
    except Exception:  # of whatever it holds
        return False


def is_altered(module: nn.Module) -> bool:
    """Return whether this one layer has hooks, or functions in place of its type's: it computes something else."""
    return any(
        value if name.endswith("_hooks") else callable(getattr(type(module), name, None))
        for name, value in vars(module).items()
    )


@contextmanager
def ties_kept(name: str, model: nn.Module) -> Iterator[None]:
    """Within the context the network may be moved to another device or layout, which gives each tensor its own memory.

    Args:
        name: of the network, for the error.
        model: its parameters and buffers keep their names.

    Raises:
        PbflError: naming a parameter or buffer that lay in the memory of another one, and no longer does.
    """
    before = _tied_names(model)
    yield
    if lost := sorted(before - _tied_names(model)):
        one, other = lost[0]
        raise PbflError(
            f"model '{name}': '{other}' lies in the memory of '{one}', and would be apart from it on this device or in "
            f"this layout; must be one tensor under both names, or be computed from '{one}' where it is used"
        )


def _tied_names(model: nn.Module) -> set[tuple[str, str]]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(tensor): name for name, tensor in named.items()}
    return {(names[id(one)], names[id(other)]) for one, other in _overlapping(named.values())}


def _overlapping(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all pairs of a parameter and another tensor that have an element of memory in common.

    Buffers that are views of one another, such as a mask that several layers have, may be apart.
    """
    sharing = defaultdict[tuple[torch.device, int], list[Tensor]](list)
    for tensor in tensors:
        # Sparse, fake and wrapped tensors have no address; it is 0 on the meta device and of empty ones.
        with suppress(RuntimeError):
            if address := tensor.untyped_storage().data_ptr():
                sharing[tensor.device, address].append(tensor)
    for together in sharing.values():
        for pair in combinations(together, 2):
            if any(isinstance(tensor, nn.Parameter) for tensor in pair) and _overlap(*pair):
                yield pair


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common; true for elements of different sizes."""
    if one.element_size() != other.element_size():
        return True
    (first, last), (other_first, other_last) = _extent(one), _extent(other)
    if last < other_first or other_last < first:  # as cuDNN lays out the weights of a recurrent network
        return False
    met = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    of_one, of_other = (met.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (one, other))
    of_one.fill_(True)
    return bool(of_other.any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the places of a tensor's first and last element in its storage."""
    first = int(tensor.storage_offset())
    return first, first + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


class _Inspector(Pickler):
    """Raises at what a deep copy shares or loses; pickle refuses functions without a name by itself.

    Attributes:
        tensors: all that were met, by identity.
    """

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, obj: Any) -> str | None:
        """Stand in for tensors, so that nothing large is written."""
        if not isinstance(obj, Tensor):
            return None
        if vars(obj) or obj._backward_hooks or obj._post_accumulate_grad_hooks:
            raise PicklingError("a tensor with hooks or attributes")
        self.tensors[id(obj)] = obj
        return "tensor"

    def reducer_override(self, obj: Any) -> Any:
        """Take bound methods apart, of which pickle writes the name without looking at the function."""
        if isinstance(obj, BuiltinMethodType) and not isinstance(obj.__self__, ModuleType | type | None):
            raise PicklingError("a built-in method of an object, which copies share")
        return (partial, (obj.__func__, obj.__self__)) if isinstance(obj, MethodType) else NotImplemented


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Within the context the network may be trained; then its weights, buffers, modes and attributes are as before.

    Graphs of gradients that were made within the context can still be used. What an attribute refers to, such as a
    list, is not restored.
    """
    tied = {id(tensor) for pair in _overlapping([*model.parameters(), *model.buffers()]) for tensor in pair}
    weights = [
        (tensor, tensor.requires_grad, tensor.detach().clone())
        for tensor in (*model.parameters(), *(buffer for buffer in model.buffers() if id(buffer) in tied))
    ]
    modules = [(module, module.training, dict(vars(module))) for module in model.modules()]
    buffers = [
        (module, *named)
        for module, *_ in modules
        for named in module.named_buffers(recurse=False, remove_duplicate=False)
        if id(named[1]) not in tied
    ]
    others = {id(buffer): buffer.detach().clone() for *_, buffer in buffers}
    for module, name, buffer in buffers:
        setattr(module, name, others[id(buffer)])
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        for module, training, attributes in modules:
            module.training = training  # which is no attribute of a scripted one
            vars(module).clear()
            vars(module).update(attributes)
        for parameter, trained, weight in weights:
            parameter.requires_grad_(trained)
            parameter.data.copy_(weight)  # unseen by graphs, which need these very values
