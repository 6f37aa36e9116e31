"""A card that is none: tensors that say they are on ``cuda:0``, are computed on the CPU, and mix with no others.

Code for a GPU goes wrong where tensors of two devices meet: a mask made on the CPU, a memory that was read from disk,
a prototype that was just decoded. On a machine without a card that would never show. Within :func:`card`, tensors
moved to ``cuda`` are of the class ``OnCard``; every operation looks whether all that it is given is there, refuses
what CUDA refuses, and computes what the CPU computes, bit for bit. Where torch is told so (``set_sync_debug_mode``),
what makes the CPU wait for the card is refused as torch refuses it. Not pretended: speed, how much memory there is,
streams and the threads of a backward pass, CUDA's own kernels and which of them torch takes there (cuDNN's recurrent
layers, fused attention), autocast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
}  # CUDA takes indices from the CPU
# Single numbers of the CPU enter elementwise kernels, but no others: not cat, stack, index_add_, products of matrices.
TAKES_NUMBERS = {
    *INDEXING,
    aten.masked_fill_.Tensor,
    aten.masked_fill.Tensor,
    aten.fill_.Tensor,
    aten.copy_.default,
}


class OnCard(Tensor):
    """A tensor on the card; ``on_cpu`` is where it is computed."""

    on_cpu: Tensor
    operations = 0  # since the process began
    may_not_wait = False
    device = property(lambda self: CUDA)  # also below the mode that stands between Python and torch

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> OnCard:
        made: OnCard = torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            layout=on_cpu.layout,
            device=torch.device("cpu"),
        )
        made.on_cpu = on_cpu
        return made

    def __repr__(self, *, tensor_contents=None):
        return f"OnCard({self.on_cpu})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        OnCard.operations += 1
        if OnCard.may_not_wait and waits(func, args):
            raise RuntimeError("called a synchronizing CUDA operation")
        together = (args[0], args[2:]) if func in INDEXING else (args, kwargs)
        if func is aten.scatter.src and torch._C._current_graph_task_id() != -1:
            together = (
                args[1:],
                kwargs,
            )  # for a maximum's gradient torch 2.11 makes zeros where the wrapper is
        if func is not aten.copy_.default:
            _all_on_card(func, together)
        result = func(*tree_map_only(Tensor, _on_cpu, args), **tree_map_only(Tensor, _on_cpu, kwargs))
        if func is aten.copy_.default and not isinstance(args[0], OnCard):
            return args[0]  # from the card to the CPU
        return return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, _carded, result))


def _all_on_card(func: Any, item: Any) -> None:
    if isinstance(item, (list, tuple)):
        for part in item:
            _all_on_card(func, part)
    elif isinstance(item, dict):
        _all_on_card(func, tuple(item.values()))
    elif isinstance(item, torch.Generator) or (
        isinstance(item, Tensor)
        and not isinstance(item, OnCard)
        and not (item.dim() == 0 and _takes_numbers(func))
    ):
        raise RuntimeError(f"{func}: {type(item).__name__} on the CPU and tensors on the card")


def _takes_numbers(func: Any) -> bool:
    return (
        torch.Tag.pointwise in func.tags
        or func in TAKES_NUMBERS
        or "_foreach" in str(func)
        or "_fused" in str(func)
    )


def _on_cpu(item: Any) -> Any:
    return item.on_cpu if isinstance(item, OnCard) else item


def _carded(item: Any) -> Any:
    return OnCard(item) if isinstance(item, Tensor) and not isinstance(item, OnCard) else item


class _Move(torch.autograd.Function):
    """To the card or from it, with gradients going the other way."""

    @staticmethod
    def forward(context: Any, moved: Tensor, on_card: bool) -> Tensor:
        if OnCard.may_not_wait:
            raise RuntimeError("called a synchronizing CUDA operation")
        context.on_card = on_card
        return OnCard(moved.detach().clone()) if on_card else _on_cpu(moved).detach().clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _move(gradients[0], not context.on_card), None


def _move(tensor: Tensor, on_card: bool) -> Tensor:
    if isinstance(tensor, OnCard) is on_card:
        return tensor
    moved: Tensor = _Move.apply(tensor, on_card)
    return moved


# By their data they need the CPU to wait, or make shapes that depend on numbers.
WAIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def waits(func: Any, args: Any) -> bool:
    """Whether the CPU has to wait for the card before an operation is over."""
    if func in INDEXING:  # elsewhere an index says how much there is
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(WAIT & set(func.tags))


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Machine(TorchFunctionMode):
    """Stands between Python and torch where a device is asked for or named."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first: Any = args[0] if args else None
        if func == torch.Tensor.device.__get__:
            return CUDA if isinstance(first, OnCard) else func(*args, **kwargs)
        if func in (torch.Tensor.cpu, torch.Tensor.cuda):
            return _move(first, func is torch.Tensor.cuda)
        if func is torch.Tensor.to:
            return self._to(first, list(args[1:]), kwargs)
        if func in (torch.Tensor.numpy, torch.Tensor.tolist) and isinstance(first, OnCard):
            if func is torch.Tensor.tolist and not OnCard.may_not_wait:
                return first.on_cpu.tolist()
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is torch.nn.functional.one_hot and isinstance(first, OnCard):
            return OnCard(
                func(first.on_cpu, *args[1:], **kwargs)
            )  # within torch it makes numbers "like its input"
        if _is_cuda(kwargs.get("device")):  # a new tensor on the card
            if kwargs.get("generator") is not None:
                raise RuntimeError(f"{func}: a generator on the CPU for a tensor on the card")
            kwargs["device"] = "cpu"
            result = func(*tree_map_only(Tensor, _on_cpu, args), **tree_map_only(Tensor, _on_cpu, kwargs))
            if func in (torch.tensor, torch.as_tensor):  # numbers of Python's, which are copied
                return _move(result, True)
            return tree_map_only(Tensor, OnCard, result)
        return func(*args, **kwargs)

    def _to(self, tensor: Tensor, rest: list[Any], kwargs: dict[str, Any]) -> Tensor:
        on_card = isinstance(tensor, OnCard)
        if "device" in kwargs:
            on_card = _is_cuda(kwargs.pop("device")) if kwargs["device"] is not None else on_card
        others = []
        for item in rest:
            if isinstance(item, (str, torch.device)):
                on_card = _is_cuda(item)
            elif isinstance(item, Tensor):
                on_card = isinstance(item, OnCard)
                others.append(item.dtype)
            elif item is not None:
                others.append(item)
        converted = torch.Tensor.to(tensor, *_without_flags(others), **kwargs) if others or kwargs else tensor
        return _move(converted, on_card)


def _without_flags(words: Sequence[Any]) -> list[Any]:
    """Return the arguments without non_blocking and copy, which may stand behind a device."""
    return [word for word in words if not isinstance(word, bool)]


def _grouped(tensors: Any, with_indices: bool = False) -> Any:
    """Say of tensors on the card that they are there, where torch asks below Python."""
    result = _group_tensors_by_device_and_dtype(tensors, with_indices)
    place = [CUDA if isinstance(tensors[0][0], OnCard) else device for device, _ in result]
    return dict(zip(zip(place, (dtype for _, dtype in result), strict=True), result.values(), strict=True))


def _set_waiting(mode: int | str) -> None:
    OnCard.may_not_wait = mode in (2, "error")


@contextmanager
def card() -> Iterator[None]:
    """Let this process have a card for a while."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            patch("torch.cuda.get_rng_state", lambda device: torch.get_rng_state()),
            patch("torch.cuda.set_rng_state", lambda state, device: None),
            patch("torch.cuda.get_sync_debug_mode", lambda: 2 * OnCard.may_not_wait),
            patch("torch.cuda.set_sync_debug_mode", _set_waiting),
            patch("torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", _grouped),
            patch("torch.optim.optimizer._group_tensors_by_device_and_dtype", _grouped),
            _Machine(),
        ):
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
