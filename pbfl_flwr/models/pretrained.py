"""Pretrained bodies: weights stored on a machine under a label, which initialise a network.

::

    <home>/weights/imagenet/resnet18.safetensors      for models=resnet18@imagenet

A configuration names labels, never paths, so that each machine chooses where its files are, and a server cannot make
a device read any other file. A file holds the body's parameters and buffers under the names of this project's model;
:mod:`pbfl_flwr.models.checkpoints` converts them. Classifiers are initialised at random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import HEAD_PREFIX, SplitModel
from pbfl_flwr.models.registry import ModelName
from pbfl_flwr.util.paths import weights_file

POSITIONS = "pos_embedding"  # of a vision transformer: one row for the class token and one per patch


def file_of(name: str) -> Path | None:
    """Return the weights file that a model's name refers to, None if its weights are random or set by its own code.

    Raises:
        PbflError: if the name is invalid.
    """
    parts = ModelName.parse(name)
    return weights_file(parts.body, parts.label) if parts.label else None


def digest(name: str) -> str:
    """Return a short hash of a model's pretrained weights, "" if its initial weights are random.

    Raises:
        PbflError: if the file cannot be read.
    """
    if (file := file_of(name)) is None:
        return ""
    try:
        return _hashed(file)
    except OSError as error:
        raise PbflError(_missing(name, file, error)) from None


def _hashed(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def load_pretrained(model: SplitModel, name: str) -> None:
    """Copy the weights that the model's name refers to into its body; without a label do nothing.

    A first convolution over one channel gets the sum over the file's three channels: its response to a grey image
    equals that of the original to the image in all three. A vision transformer's position embeddings are interpolated
    for other image sizes, as by torchvision.

    Args:
        model: freshly built.
        name: the model's name.

    Raises:
        PbflError: if the file is missing or damaged, or holds another body than the model's.
    """
    if (file := file_of(name)) is None:
        return
    try:
        stored = load_file(file)
    except OSError as error:
        raise PbflError(_missing(name, file, error)) from None
    except SafetensorError as error:
        raise PbflError(f"model '{name}': {file} is damaged ({error}); store the weights again") from None
    body = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith(HEAD_PREFIX)}
    if odd := sorted(set(body) ^ set(stored)):
        side = "lacks" if odd[0] in body else "also has"
        raise PbflError(f"model '{name}': {file} belongs to another network: it {side} '{odd[0]}'")
    with torch.no_grad():
        for key, tensor in body.items():
            tensor.copy_(_fitting(name, key, stored, tensor.shape))


def _fitting(name: str, key: str, stored: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    tensor = stored[key]
    if tensor.shape == shape:
        return tensor
    if tensor.dim() == 4 and tensor.shape[1] == 3 and shape == (len(tensor), 1, *tensor.shape[2:]):
        return tensor.sum(1, keepdim=True)
    if key.endswith(POSITIONS) and tensor.shape[::2] == shape[::2]:
        return _interpolated(tensor, shape[1])
    actual, wanted = ("x".join(map(str, sides)) for sides in (tensor.shape, shape))
    raise PbflError(
        f"model '{name}': the stored weights have shape {actual} in '{key}', this run needs {wanted}; they were "
        "trained with another feature-dim or for other inputs"
    )


def _interpolated(positions: Tensor, length: int) -> Tensor:
    from torchvision.models.vision_transformer import interpolate_embeddings

    side = round((length - 1) ** 0.5)
    name = f"encoder.{POSITIONS}"
    embedding: Tensor = interpolate_embeddings(side, 1, {name: positions})[name]
    return embedding


def _missing(name: str, file: Path, error: OSError) -> str:
    label, body = file.parent.name, file.stem
    if not isinstance(error, FileNotFoundError):
        return f"model '{name}': {file} cannot be read ({error.strerror})"
    labels = sorted(other.parent.name for other in file.parent.parent.glob(f"*/{file.name}"))
    stored = f"labels stored for it here: {', '.join(labels)}" if labels else "none are stored for it here"
    return (
        f"model '{name}': there are no weights of {body} under the label '{label}' on this machine ({file}); "
        f"{stored}; 'pbfl weights' stores those of torchvision's models"
    )
