"""User-supplied models, named in the configuration as ``my_package.module:function``."""

from typing import cast

from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import call_user_function


def build_external(spec: str, task: Task) -> SplitModel:
    """Import the module, call the function with the task and check its result.

    The module is third-party code and runs with full rights; it is only imported because the configuration
    names it.

    Returns:
        The model as the function made it. Only ``features`` and ``head`` are guaranteed: without ``stages``
        there are no feature maps, and logits are ``head(features(x))`` whatever its ``forward`` does.

    Raises:
        PbflError: if module or function are missing or raise, or the model has no ``features`` or ``head``.
    """
    model = call_user_function("models", spec, "task", task)
    if not isinstance(model, nn.Module):
        raise PbflError(
            f"models = '{spec}': the function returned {type(model).__name__}, expected a torch.nn.Module"
        )
    if not callable(getattr(model, "features", None)):
        raise PbflError(f"model '{spec}' has no method features(x) that returns (B, {task.feature_dim})")
    if not isinstance(getattr(model, "head", None), nn.Module):
        raise PbflError(
            f"model '{spec}' has no submodule head that maps (B, {task.feature_dim}) to (B, {task.num_classes}); a "
            "method does not count: the head's weights are found by the name prefix 'head.'"
        )
    return cast(SplitModel, model)
