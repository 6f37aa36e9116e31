"""Pretrained bodies: weights that somebody keeps on a machine under a label, with which a network begins.

::

    <home>/weights/imagenet/resnet18.safetensors      for models=resnet18@imagenet

A configuration names labels and never paths, so that each machine keeps its files where it likes, and a server can make
no device read anything else. A file holds the body's parameters and buffers under the names of this project's model;
:mod:`pbfl_flwr.models.checkpoints` puts it there. Classifiers begin with random weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pbfl_flwr.architectures import body_and_classifier, fresh_and_label
from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import HEAD_PREFIX, SplitModel
from pbfl_flwr.places import weights_file

POSITIONS = "pos_embedding"  # of a vision transformer: a row for the class token and one for each patch


def file_of(name: str) -> Path | None:
    """Return the file that a model's name speaks of, None if its weights are random or its code's own.

    Raises:
        PbflError: if the name is none.
    """
    fresh, label = fresh_and_label(name)
    return weights_file(body_and_classifier(fresh)[0], label) if label else None


def digest(name: str) -> str:
    """Return a short hash of the weights with which a model of this name begins, "" if they are random.

    Raises:
        PbflError: if the file is not there.
    """
    if (file := file_of(name)) is None:
        return ""
    try:
        at = file.stat()
        return _hashed(file, at.st_mtime_ns, at.st_size)
    except OSError as error:
        raise PbflError(_missing(name, file, error)) from None


@lru_cache(maxsize=64)
def _hashed(file: Path, written: int, size: int) -> str:
    """Return the hash of a file; a process of many clients reads it once, and again if it was written anew."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def begin_pretrained(model: SplitModel, name: str) -> None:
    """Copy the weights that the model's name speaks of into its body; nothing if it speaks of none.

    A first convolution over one channel takes the sum of the three that a file has: it sees what it would of the gray
    image in all three. The places of a vision transformer's patches are interpolated for another size of images, as by
    torchvision.

    Args:
        model: freshly built.
        name: of it.

    Raises:
        PbflError: if the file is not there or damaged, or holds another body than the model's.
    """
    if (file := file_of(name)) is None:
        return
    try:
        kept = load_file(file)
    except OSError as error:
        raise PbflError(_missing(name, file, error)) from None
    except SafetensorError as error:
        raise PbflError(f"model '{name}': {file} is damaged ({error}); put the weights there again") from None
    body = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith(HEAD_PREFIX)}
    if odd := sorted(set(body) ^ set(kept)):
        side = "lacks" if odd[0] in body else "has, and the model has not,"
        raise PbflError(f"model '{name}': {file} is of another network: it {side} '{odd[0]}'")
    with torch.no_grad():
        for key, tensor in body.items():
            tensor.copy_(_fitting(name, key, kept, tensor.shape))


def _fitting(name: str, key: str, kept: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    tensor = kept[key]
    if tensor.shape == shape:
        return tensor
    if tensor.dim() == 4 and tensor.shape[1] == 3 and shape == (len(tensor), 1, *tensor.shape[2:]):
        return tensor.sum(1, keepdim=True)
    if key.endswith(POSITIONS) and tensor.shape[::2] == shape[::2]:
        return _interpolated(tensor, shape[1])
    found, wanted = ("x".join(map(str, sides)) for sides in (tensor.shape, shape))
    raise PbflError(
        f"model '{name}': the kept weights have {found} numbers in '{key}', this run needs {wanted}; they were trained "
        "with another feature-dim or for other inputs"
    )


def _interpolated(positions: Tensor, length: int) -> Tensor:
    from torchvision.models.vision_transformer import interpolate_embeddings

    side = round((length - 1) ** 0.5)
    name = f"encoder.{POSITIONS}"
    done: Tensor = interpolate_embeddings(side, 1, {name: positions})[name]
    return done


def _missing(name: str, file: Path, error: OSError) -> str:
    label, body = file.parent.name, file.stem
    if not isinstance(error, FileNotFoundError):
        return f"model '{name}': {file} cannot be read ({error.strerror})"
    there = sorted(other.parent.name for other in file.parent.parent.glob(f"*/{file.name}"))
    labels = f"kept for it here: {', '.join(there)}" if there else "none are kept for it here"
    return (
        f"model '{name}': there are no weights of {body} under the label '{label}' on this machine ({file}); {labels}; "
        f"'pbfl weights {label} {body} FILE' keeps them"
    )
