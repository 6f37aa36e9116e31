"""The check before round 1: one real step of the method with the client's own network, on two samples and on one."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pbfl_flwr import calls, seeds
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.errors import PbflError, QuotesData, format_exception, pass_on_exit
from pbfl_flwr.method import Client, Method
from pbfl_flwr.models.dry_forward import CHANGES_ITS_INPUT
from pbfl_flwr.payloads import separate
from pbfl_flwr.training.evaluation import evaluate, versions_of
from pbfl_flwr.util.user_code import describe_user_error, is_external

SIZES = (2, 1)  # samples; a client's last batch may have one


def try_step(architecture: str, method: Method[Any, Any, Any], client: Client) -> None:
    """Score and train as in the first round, with the client's first samples and what a new server would broadcast.

    The client's network is changed; the global random states are restored.

    Args:
        architecture: name of the client's network.
        method: of the run.
        client: in round 1, without memory.

    Raises:
        PbflError: if a step fails, if the head changes features in place, or if the step leaves the network with
            weights or buffers of other shapes than it was built with.
    """
    shapes = _shapes(client.model)
    gpus = [client.device] if client.device.type == "cuda" else []
    with seeds.restored(gpus):
        seeds.seed_code(client.device, client.seed, "trial", client.key)
        for size in SIZES:
            with _blamed_on(architecture, method, size), _features_kept(client.model):
                _step(method, _with_few_samples(client, size))
    after = _shapes(client.model)
    if changed := sorted(
        name for name in shapes.keys() | after.keys() if shapes.get(name) != after.get(name)
    ):
        name = changed[0]
        raise PbflError(
            f"model '{architecture}': '{name}' has the shape {after.get(name)} after a training step and "
            f"{shapes.get(name)} as built; what a network keeps between rounds must keep its shape"
        )


def _step(method: Method[Any, Any, Any], client: Client) -> None:
    down = calls.broadcast(
        method, calls.first_state(method, client.task, client.seed), client.id, client.task
    )
    method.install(client, down)
    evaluate(client, calls.predictors(method, client, down), method.predicts)
    update = calls.local_update(method, client, down)
    for kind, sent in ((method.down, down), (method.up, update.payload)):
        kind.from_tensors(separate(sent.to_tensors()), client.task)
        calls.scalars(sent)
    calls.classes(update.payload, client.task)
    calls.magnitudes(update.payload)
    changed = replace(client, memory=update.memory)
    evaluate(client, calls.predictors(method, changed, down), method.predicts)


@contextmanager
def _features_kept(model: nn.Module) -> Iterator[None]:
    """Refuse a head that changes features in place, be it only in training: prototypes are made of them, too."""
    head, versions = getattr(model, "head", None), []

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        versions.append(versions_of(inputs))

    def after(_: nn.Module, inputs: tuple[Any, ...], __: object) -> None:
        if versions_of(inputs) != versions.pop():
            raise PbflError(f"its head {CHANGES_ITS_INPUT}")

    hooks = []
    # A network of a user's may have a method for a head, or a scripted one, which takes no hooks.
    if isinstance(head, nn.Module) and not isinstance(head, torch.jit.ScriptModule):
        hooks = [head.register_forward_pre_hook(before), head.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_few_samples(client: Client, size: int) -> Client:
    # So small a change that nothing diverges that would not with whole batches: BatchNorm over two values multiplies
    # gradients, up to 316-fold a layer.
    changes = {
        "learning_rate": 1e-6,
        "max_grad_norm": 1.0,
        "local_epochs": 1,
        "batch_size": size,
        "drop_last": "never",
        "cuda_graphs": False,
    }
    return replace(
        client,
        data=_few(client.data, size),
        training=client.training.model_copy(update=changes),
    )


def _few(data: ClientData, size: int) -> ClientData:
    """Return data of so many samples, the client's first ones; blank ones if it has none."""
    source = data.train if len(data.train) else data.test
    if not len(source):
        inputs = source.inputs.new_zeros((1, *data.input_shape))
        source = Shard(inputs, source.labels.new_zeros(1))
    rows = torch.arange(size, device=source.labels.device) % len(source)
    shard = Shard(source.inputs[rows].contiguous(), source.labels[rows])
    return replace(data, train=shard, test=shard, validation=None)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@contextmanager
def _blamed_on(architecture: str, method: Method[Any, Any, Any], size: int) -> Iterator[None]:
    """Say of an error which network and method met it, with how many samples, and in which line of a user's code."""
    where = f"model '{architecture}', a step of method '{method.name}' on {size} sample{'s' * (size > 1)}"
    try:
        yield
    except BdbQuit:  # a breakpoint() of the user's
        raise
    except PbflError as error:
        raise PbflError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:  # users' networks and methods may raise anything
        pass_on_exit(error)
        of_user = is_external(architecture)
        reason = describe_user_error(error, architecture) if of_user else format_exception(error)
        raise QuotesData(f"{where}: {reason}", f"{where}: {format_exception(error, text=False)}") from error
