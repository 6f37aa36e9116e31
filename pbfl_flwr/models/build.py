"""Models: one module per family, one contract (:class:`SplitModel`), one table (:mod:`pbfl_flwr.models.registry`).

Every model has ``features(x) -> (B, d)`` and ``head(features) -> (B, K)``. A new one is a function
``build(task) -> SplitModel`` whose docstring starts with a one-line description, and an entry in ``ARCHITECTURES``;
the contract tests then cover it. Models with sizes in their names, such as ``mlp-500-200``, are built by
``build(task, *sizes)``. Builders give a linear head; a "+" in a name (``resnet8+512-256``) replaces it by a deeper
one, an "@" (``resnet18@imagenet``) initialises the body with weights stored on this machine
(:mod:`pbfl_flwr.models.pretrained`). Modules are imported when one of their models is built, torchvision only by
builders: the import takes seconds, and on a device every message starts a new process.
"""

from collections.abc import Collection
from importlib import import_module
from typing import cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import HEAD_PREFIX, SplitModel
from pbfl_flwr.models.dry_forward import dry_forward
from pbfl_flwr.models.layers import deeper_head
from pbfl_flwr.models.pretrained import load_pretrained
from pbfl_flwr.models.registry import ARCHITECTURES, ModelName, architectures, base_and_sizes
from pbfl_flwr.payloads import check_storable
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import call_user_function, explained, is_external


def build_model(name: str, task: Task, seed: int) -> SplitModel:
    """Return a freshly initialised model; equal (name, task, seed) gives equal weights, given equal pretrained ones.

    torch's global random state is left unchanged. External models only guarantee ``features`` and ``head``: without
    ``stages`` there are no feature maps, and logits are ``head(features(x))`` whatever their ``forward`` does. Their
    weights are reproducible if drawn from torch's CPU generator.

    Args:
        name: one of ``ARCHITECTURES``, with its sizes if it takes some, optionally followed by "@" and the label of
            pretrained weights, and by "+" and the classifier's hidden widths (which leave the body's weights
            unchanged); or ``my_package.module:function`` as :func:`pbfl_flwr.models.registry.architectures` returns it.
        task: K, d and the shape of inputs.
        seed: of the initial weights.

    Raises:
        PbflError: if the name is unknown, the architecture cannot take the input, memory does not suffice, pretrained
            weights are missing or do not fit, or an external model is missing or lacks ``features`` or ``head``.
    """
    if is_external(name):
        with seeds.seeded(seed):
            return _build_external(name, task)
    try:
        (base, sizes), widths = base_and_sizes(name), ModelName.parse(name).widths
    except PbflError as error:
        raise PbflError(f"models = '{name}': {error}") from None
    try:
        with seeds.seeded(seed):
            module = import_module(f"pbfl_flwr.models.{ARCHITECTURES[base].module}")
            model: SplitModel = getattr(module, base.replace("-", "_"))(task, *sizes)
            if widths:
                model.head = deeper_head(model.head, widths, task)
    except RuntimeError as error:
        if "you tried to allocate" not in str(error):  # torch's allocator has no exception class of its own
            raise
        raise PbflError(f"model '{name}': not enough memory for its weights; use a smaller model") from None
    load_pretrained(model, name)
    return model


def _build_external(spec: str, task: Task) -> SplitModel:
    """Import the module, call the function with the task and check its result.

    The module is third-party code and runs with full rights; it is only imported because the owner of this process
    names it.

    Raises:
        PbflError: if the name is no :class:`~pbfl_flwr.util.user_code.UserCode`, module or function are missing or
            raise, the model has no ``features`` or ``head``, or its state cannot be stored and loaded.
    """
    model = call_user_function("models", spec, "task", task, kind=nn.Module)
    if not callable(getattr(model, "features", None)):
        raise PbflError(f"model '{spec}' has no method features(x) that returns (B, {task.feature_dim})")
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Module):
        raise PbflError(
            f"model '{spec}' has no submodule head that maps (B, {task.feature_dim}) to (B, {task.num_classes}); a "
            "method does not count: the head's weights are found by the name prefix 'head.'"
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(tensor): name for name, tensor in tensors.items()}
    of_head = [names.get(id(tensor), "") for tensor in (*head.parameters(), *head.buffers())]
    if other := [name for name in of_head if not name.startswith(HEAD_PREFIX)]:
        found = f"named '{other[0]}'" if other[0] else "not registered"
        raise PbflError(
            f"model '{spec}': a weight of head is {found}, but methods find the classifier by the name prefix 'head.': "
            "set self.head itself, before any module that contains or shares it, not as a property or by a wrapper"
        )
    if lazy := [name for name, tensor in tensors.items() if is_lazy(tensor)]:
        raise PbflError(
            f"model '{spec}': '{lazy[0]}' has no shape until the first input; its layer must be built with its "
            "sizes, not lazily"
        )
    _check_state(spec, model)
    return cast(SplitModel, model)


def _check_state(spec: str, model: nn.Module) -> None:
    """Check that the network's state_dict can be stored, and loads back as before every round."""
    with explained(f"model '{spec}' cannot load its own state_dict, as it must before every round:", spec):
        state = model.state_dict()
        for name, kept in state.items():
            if not isinstance(kept, Tensor):
                raise PbflError(
                    f"model '{spec}': '{name}' of its state_dict is of type {type(kept).__name__}; must be a tensor, "
                    "as all that lasts from round to round"
                )
            check_storable(f"model '{spec}': '{name}' of its state_dict", kept)
            state[name] = kept.clone()
        model.load_state_dict(state)


def check_models(spec: str, task: Task, code: Collection[str] = ()) -> None:
    """Build every architecture once and run a forward pass with two inputs.

    Args:
        spec: see :func:`~pbfl_flwr.models.registry.architectures`.
        task: K, d and the shape of inputs.
        code: as ``spec``.

    Raises:
        PbflError: for the first architecture that does not fit, with model, layer, expected and actual shape.
    """
    for name in dict.fromkeys(architectures(spec, code)):
        dry_forward(name, build_model(name, task, seed=0), task)
