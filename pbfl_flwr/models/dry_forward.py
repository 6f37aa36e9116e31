"""A forward pass before round 1: a wrong shape becomes one clear error line instead of a failed round."""

import traceback

import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError, text_of
from pbfl_flwr.models.contract import SplitModel, random_inputs
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import explained

# Raised by torch for inputs that a layer does not accept.
SHAPE_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)
CHANGES_ITS_INPUT = (
    "changes its input in place, as a first layer with inplace=True does; others read it after this, so it must stay "
    "as it is"
)


def dry_forward(name: str, model: SplitModel, task: Task, batch: int = 2) -> None:
    """Run the model on a batch of random inputs, in evaluation mode and without gradients.

    The global random state is not touched; the model is left in evaluation mode.

    Args:
        name: the model's name, for the error.
        model: anything with ``features`` and ``head``.
        task: defines the inputs and the expected outputs.
        batch: B, number of inputs.

    Raises:
        PbflError: naming model, layer, its settings and the shape of its input, if a layer refuses its input, if
            features are not (B, d) or logits not (B, K), or if either is not float32 or holds NaN or infinity; if
            body or head changes its input in place; or with whatever else the model raised.
    """
    model.eval()
    inputs = random_inputs(task, batch)
    with torch.no_grad():
        for step, expected in (("features", task.feature_dim), ("head", task.num_classes)):
            version = inputs._version
            with explained(f"model '{name}', {step}: raised", name):
                try:
                    outputs = getattr(model, step)(inputs)
                except SHAPE_ERRORS as error:
                    where, refused = f"{step}:", _shape(inputs)
                    if call := _failing_call(model, error):
                        layer_name, layer, layer_input = call
                        where = f"layer {layer_name}, {type(layer).__name__}({layer.extra_repr()}),"
                        refused = "no positional input" if layer_input is None else _shape(layer_input)
                    reason = (text_of(error).strip() or type(error).__name__).splitlines()[0]
                    raise PbflError(
                        f"model '{name}', {where} does not accept input of shape {refused} ({reason})"
                    ) from error
            if inputs._version != version:
                raise PbflError(f"model '{name}', {step}: {CHANGES_ITS_INPUT}")
            if not isinstance(outputs, Tensor) or outputs.shape != (batch, expected):
                raise PbflError(
                    f"model '{name}', {step}: expected output {(batch, expected)}, found {_shape(outputs)}"
                )
            if outputs.dtype is not torch.float32:
                kind = str(outputs.dtype).removeprefix("torch.")
                raise PbflError(f"model '{name}', {step}: expected float32 numbers, found {kind}")
            if not bool(torch.isfinite(outputs).all()):
                raise PbflError(f"model '{name}', {step}: expected finite numbers, found NaN or infinity")
            inputs = outputs


def _failing_call(model: nn.Module, error: Exception) -> tuple[str, nn.Module, object] | None:
    """Return the innermost submodule whose call raised: its name, itself and its input; None if none was running."""
    names = {module: name for name, module in model.named_modules() if name}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        layer, args = frame.f_locals.get("self"), frame.f_locals.get("args")  # of nn.Module.__call__
        if isinstance(layer, nn.Module) and layer in names and args is not None:
            return names[layer], layer, args[0] if args else None
    return None


def _shape(value: object) -> str:
    if not isinstance(value, Tensor):
        return "None" if value is None else type(value).__name__
    return f"{tuple(value.shape)}{'' if value.is_floating_point() else ' of token ids'}"
