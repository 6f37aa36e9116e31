"""Convert a torchvision model's checkpoint to the body of this project's model, for :mod:`.pretrained`.

Layers have the same order in both; a test compares the features of each model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import HEAD_PREFIX
from pbfl_flwr.models.layers import torchvision_models
from pbfl_flwr.models.pretrained import POSITIONS
from pbfl_flwr.models.registry import ModelName
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import is_external

OF_TORCHVISION = {
    "efficientnet-b0": "efficientnet_b0",
    "googlenet": "googlenet",
    "mobilenet-v2": "mobilenet_v2",
    "resnet18": "resnet18",
    "resnet34": "resnet34",
    "resnet50": "resnet50",
    "resnet101": "resnet101",
    "resnet152": "resnet152",
    "shufflenet-v2": "shufflenet_v2_x1_0",
    "vit-b-16": "vit_b_16",
    "vit-b-32": "vit_b_32",
}
BEHIND_THE_BODY = ("fc.", "classifier.", "heads.", "aux1.", "aux2.")  # in torchvision's models
COUNTER = "num_batches_tracked"  # of BatchNorm; old files lack it
NOMINAL = Task(2, 64, (3, 32, 32))  # tensor names do not depend on these sizes


def read_checkpoint(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a ``.safetensors`` file or of a torch.save file, which is loaded without executing code.

    A nested "state_dict", as many training scripts write, is unwrapped, and a "module." prefix of all names is removed.

    Raises:
        PbflError: if the file cannot be read or holds something else.
    """
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise PbflError(f"{file} cannot be read ({error.strerror or error})") from None
    except Exception as error:  # torch raises any type of exception for damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PbflError(
            f"{file} holds no weights that can be loaded without executing code ({reason}); must be a .safetensors "
            "file, or a file written by torch.save(model.state_dict(), FILE)"
        ) from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if (
        not isinstance(content, Mapping)
        or not content
        or not all(isinstance(t, Tensor) for t in content.values())
    ):
        raise PbflError(f"{file} holds no named tensors; must be a model's state_dict()")
    names = [str(name) for name in content]
    common = "module." if all(name.startswith("module.") for name in names) else ""
    return {str(name).removeprefix(common): tensor.contiguous() for name, tensor in content.items()}


def body_of(architecture: str, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the body's parameters and buffers under this project's names.

    Args:
        architecture: a model's name, see :func:`check_takeable`.
        tensors: of a checkpoint.
        where: source of the checkpoint, for messages.

    Raises:
        PbflError: if the checkpoint is of another network.
    """
    theirs = _their_shapes(architecture)
    if lacks := [name for name in theirs if name not in tensors and not name.endswith(COUNTER)]:
        raise PbflError(f"{where}: must be weights of torchvision's {architecture}; it lacks '{lacks[0]}'")
    if strange := sorted(n for n in set(tensors) - set(theirs) if not n.startswith(BEHIND_THE_BODY)):
        raise PbflError(f"{where}: torchvision's {architecture} has no '{strange[0]}'")
    body = {}
    for our_name, (their_name, shape) in zip(_our_names(architecture), theirs.items(), strict=True):
        tensor = tensors.get(their_name, torch.tensor(0))
        if tensor.shape != shape and not their_name.endswith(POSITIONS):
            raise PbflError(
                f"{where}: '{their_name}' has shape {tuple(tensor.shape)}, in torchvision's {architecture} "
                f"{tuple(shape)}"
            )
        body[our_name] = tensor
    return body


def as_file(body: Mapping[str, Tensor]) -> bytes:
    """Return a body as safetensors bytes, floating-point tensors as float32."""
    return save({name: t.float().contiguous() if t.is_floating_point() else t for name, t in body.items()})


def check_takeable(name: str) -> None:
    """Check that weights can be stored for a model of this name.

    Raises:
        PbflError: if it is none of torchvision's models, or includes a label, a classifier or code.
    """
    if is_external(name):
        raise PbflError(f"model '{name}': a function of your own must load its weights itself")
    if (plain := ModelName.parse(name).body) != name:
        raise PbflError(f"model '{name}': weights are stored for a body only; must be '{plain}'")
    if name not in OF_TORCHVISION:
        raise PbflError(
            f"model '{name}': weights are stored for torchvision's models; must be one of {', '.join(OF_TORCHVISION)}"
        )


def _our_names(architecture: str) -> list[str]:
    with torch.device("meta"):
        state = build_model(architecture, NOMINAL, 0).state_dict()
    return [name for name in state if not name.startswith(HEAD_PREFIX)]


def _their_shapes(architecture: str) -> dict[str, torch.Size]:
    models = torchvision_models(architecture)

    more = {"aux_logits": False, "init_weights": False} if architecture == "googlenet" else {}
    with torch.device("meta"):
        state = getattr(models, OF_TORCHVISION[architecture])(weights=None, **more).state_dict()
    return {name: tensor.shape for name, tensor in state.items() if not name.startswith(BEHIND_THE_BODY)}
