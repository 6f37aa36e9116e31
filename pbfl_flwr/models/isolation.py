"""Networks apart from one another: whether a deep copy is one, and training that leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from io import BytesIO
from pickle import Pickler, PicklingError
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn


def is_copyable(model: nn.Module) -> bool:
    """Return whether ``copy.deepcopy`` gives an equal network that has nothing in common with this one.

    Not if it holds functions that have no name in their module (lambdas, functions within functions, methods of classes
    within functions): a deep copy shares them, and what they refer to is the original's. Nor if a tensor has hooks or
    attributes, which copies lose.
    """
    try:
        _Inspector(BytesIO()).dump(model)
        deepcopy(model)
    except Exception:  # of whatever it holds
        return False
    return True


class _Inspector(Pickler):
    """Raises at what a deep copy shares or loses; pickle refuses functions without a name by itself."""

    def persistent_id(self, obj: Any) -> str | None:
        """Stand in for tensors, so that nothing large is written."""
        if not isinstance(obj, Tensor):
            return None
        if vars(obj) or obj._backward_hooks or obj._post_accumulate_grad_hooks:
            raise PicklingError("a tensor with hooks or attributes")
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
    weights = [(p, p.requires_grad, p.detach().clone()) for p in model.parameters()]
    modules = [(module, module.training, dict(vars(module))) for module in model.modules()]
    buffers = [
        (module, *named)
        for module, *_ in modules
        for named in module.named_buffers(recurse=False, remove_duplicate=False)
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
