"""Weights of networks as payloads: collected by name, checked against the state, averaged.

Parameters only: BatchNorm's running statistics and counters are buffers, which stay on the client and are never
averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from pbfl_flwr.config import Settings
from pbfl_flwr.config.keys import Weighting as Weighting
from pbfl_flwr.models.contract import body_names, head_names
from pbfl_flwr.payloads import RejectedPayload, Weights

Part = Literal["all", "body", "stages", "head"]
"""A part of the network; ``stages`` is the body without its neck, i.e. without a hidden layer before the head."""


def weighting_of(settings: Settings, habit: Weighting) -> Weighting:
    """Return how averages are weighted: as configured (or set by the protocol), else the method's default."""
    return habit if settings.conventions.weighting == "auto" else settings.conventions.weighting


def shared_parameters(model: nn.Module, part: Part) -> dict[str, nn.Parameter]:
    """Return the shared parameters of the network by the names under which they travel.

    Those are the network's own names, except in a head: there the layer is removed (``head.1.weight`` becomes
    ``head.weight``) if names stay unique, else numbered among the layers with parameters (``head.0.weight``), so that
    heads with and without dropout before the same layers have the same names.
    """
    parameters = dict(model.named_parameters())
    if part == "all":
        return parameters
    if part == "body":
        return {name: parameters[name] for name in body_names(model)}
    if part == "stages":
        return {name: parameter for name, parameter in parameters.items() if name.startswith("stages.")}
    names = head_names(model)
    parts = [(layer, leaf) for layer, _, leaf in (name.rpartition(".") for name in names)]
    sent = [f"head.{leaf}" for _, leaf in parts]
    if len(set(sent)) < len(sent):
        numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layer for layer, _ in parts))}
        sent = [f"head.{numbers[layer]}.{leaf}" for layer, leaf in parts]
    return dict(zip(sent, (parameters[name] for name in names), strict=True))


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached, contiguous copies on the CPU."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def copy_into(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Copy every tensor into the parameter of the same name.

    Raises:
        KeyError: if there is no such parameter.
    """
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters on the CPU."""
    return copies(dict(model.named_parameters()))


def load_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the named tensors into the network.

    Raises:
        KeyError: if the network has no such parameter.
    """
    copy_into(dict(model.named_parameters()), tensors)


def average(state: Weights, uploads: Mapping[int, Weights], weighting: Weighting) -> Weights:
    """Return Σ_i (n_i/Σn)·w_i, or the unweighted mean; the state itself if the total weight is 0.

    Args:
        state: gives the tensors' names and shapes.
        uploads: by client; each is read once.
        weighting: by n_i, or uniform.
    """
    sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.tensors.items()}
    total = 0.0
    for upload in uploads.values():
        weight = float(upload.num_examples if weighting == "samples" else 1)
        total += weight
        for name, tensor in upload.tensors.items():
            sums[name].add_(tensor, alpha=weight)
    if total == 0:
        return state
    return Weights({name: (tensor / total).to(torch.float32) for name, tensor in sums.items()})


def same_shapes(upload: Weights, state: Weights) -> None:
    """Check that an upload has every tensor of the state, in its shape, and no other.

    Raises:
        RejectedPayload: naming the first difference.
    """
    if different := set(upload.tensors) ^ set(state.tensors):
        raise RejectedPayload(f"tensor '{min(different)}' is missing or unexpected")
    for name, tensor in upload.tensors.items():
        if tensor.shape != state.tensors[name].shape:
            raise RejectedPayload(
                f"tensor '{name}' has shape {tuple(tensor.shape)}, expected {tuple(state.tensors[name].shape)}"
            )
