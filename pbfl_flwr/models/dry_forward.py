"""A forward pass before round 1: a wrong shape becomes one clear error line instead of a failed round."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel, random_inputs
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import describe_user_error

BATCH = 2
# Raised by torch for inputs that a layer does not accept.
SHAPE_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)


@dataclass(frozen=True)
class _Call:
    name: str
    layer: nn.Module
    inputs: object


def dry_forward(name: str, model: SplitModel, task: Task) -> None:
    """Run the model on a batch of two random inputs, in evaluation mode and without gradients.

    The global random state is not touched; the model is left in evaluation mode.

    Args:
        name: the model's name, for the error.
        model: anything with ``features`` and ``head``.
        task: defines the inputs and the expected outputs.

    Raises:
        PbflError: naming model and layer with expected and actual shape, if a layer refuses its input, if
            features are not (2, d) or logits not (2, K), or if either is not float32 or holds NaN or infinity; or
            with whatever else the model raised.
    """
    model.eval()
    inputs = random_inputs(task, BATCH)
    with torch.no_grad(), _running_layers(model) as running:
        for step, expected in (("features", task.feature_dim), ("head", task.num_classes)):
            try:
                outputs = getattr(model, step)(inputs)
            except SHAPE_ERRORS as error:
                raise PbflError(_refusal(name, step, running, inputs, error)) from error
            except PbflError:
                raise
            except Exception as error:  # external code may raise anything
                raise PbflError(
                    f"model '{name}', {step}: raised {describe_user_error(error, name)}"
                ) from error
            if not isinstance(outputs, Tensor) or outputs.shape != (BATCH, expected):
                raise PbflError(
                    f"model '{name}', {step}: expected output {(BATCH, expected)}, found {_shape(outputs)}"
                )
            if outputs.dtype is not torch.float32:
                kind = str(outputs.dtype).removeprefix("torch.")
                raise PbflError(f"model '{name}', {step}: expected float32 numbers, found {kind}")
            if not bool(torch.isfinite(outputs).all()):
                raise PbflError(f"model '{name}', {step}: expected finite numbers, found NaN or infinity")
            inputs = outputs


@contextmanager
def _running_layers(model: nn.Module) -> Iterator[list[_Call]]:
    """Maintain the stack of running submodules; after an error its last entry is the failing one."""
    running: list[_Call] = []
    handles = []
    for name, layer in model.named_modules():
        if not name:
            continue

        def enter(layer: nn.Module, args: tuple[object, ...], name: str = name) -> None:
            running.append(_Call(name, layer, args[0] if args else None))

        def leave(layer: nn.Module, args: tuple[object, ...], output: object) -> None:
            # Layers whose error the model caught may still be on top of the stack.
            while running.pop().layer is not layer:
                pass

        handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _refusal(name: str, step: str, running: list[_Call], inputs: Tensor, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if not running:
        return f"model '{name}', {step}: does not accept input of shape {_shape(inputs)} ({reason})"
    call = running[-1]
    expected, found = _expected(call.layer), _shape(call.inputs)
    if expected and (kinds := _unlike(call)):
        wish = "its weights are {}, its input is {}; allowed is one dtype for both, and inputs are float32"
        wish = wish.format(*kinds)
    elif expected:
        wish = f"expected {expected}, found {found}"
    else:
        wish = f"does not accept input of shape {found}"
    return f"model '{name}', layer {call.name} ({type(call.layer).__name__}): {wish} ({reason})"


def _expected(layer: nn.Module) -> str:
    match layer:
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            sides = []
            for axis, kernel in enumerate(layer.kernel_size):
                padding = 0 if isinstance(layer.padding, str) else layer.padding[axis]
                sides.append(f"{max(1, layer.dilation[axis] * (kernel - 1) + 1 - 2 * padding)} or more")
            return f"({', '.join(['B', str(layer.in_channels), *sides])})"
        case nn.BatchNorm1d():
            return f"(B, {layer.num_features}) or (B, {layer.num_features}, length)"
        case nn.BatchNorm2d():
            return f"(B, {layer.num_features}, height, width)"
        case nn.Linear():
            return f"(B, {layer.in_features})"
    return ""


def _unlike(call: _Call) -> tuple[str, str] | None:
    """Return the dtypes of a layer's weights and input if both are floating point and differ."""
    weights = next(call.layer.parameters(recurse=False), None)
    if weights is None or not isinstance(call.inputs, Tensor) or not call.inputs.is_floating_point():
        return None
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (weights, call.inputs)]
    return None if kinds[0] == kinds[1] else (kinds[0], kinds[1])


def _shape(value: object) -> str:
    if not isinstance(value, Tensor):
        return "no positional input" if value is None else type(value).__name__
    return f"{tuple(value.shape)}{'' if value.is_floating_point() else ' of token ids'}"
