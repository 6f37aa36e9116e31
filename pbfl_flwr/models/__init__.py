"""The models: one family a file, one contract (:class:`SplitModel`), one table of contents.

Every model answers ``features(x) -> (B, d)`` and ``head(features) -> (B, K)``. A new one is a function
``build(task) -> SplitModel`` whose docstring starts with one line about it, and an entry in ``MODELS``; the
contract tests find it there. Builders import torchvision when they run: that takes seconds, and on a device every
message has a new process.
"""

import difflib
from collections.abc import Callable

import torch

from pbfl_flwr.config import TrainingSettings, choices
from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.arrangement import arrange
from pbfl_flwr.models.cnn import cnn2, cnn4
from pbfl_flwr.models.compilation import check_compiler, compile_body
from pbfl_flwr.models.contract import (
    SplitModel,
    body_names,
    count_parameters,
    has_batch_norm,
    head_names,
    is_still,
    random_inputs,
)
from pbfl_flwr.models.dry_forward import dry_forward
from pbfl_flwr.models.efficientnet import efficientnet_b0
from pbfl_flwr.models.external import build_external, is_external
from pbfl_flwr.models.mlp import mlp5
from pbfl_flwr.models.mobilenet import mobilenet_v2
from pbfl_flwr.models.resnet import resnet4, resnet6, resnet8, resnet18
from pbfl_flwr.models.sensor import har_cnn
from pbfl_flwr.models.shufflenet import shufflenet_v2
from pbfl_flwr.models.text import fasttext, textcnn
from pbfl_flwr.task import Task

Builder = Callable[[Task], SplitModel]

MODELS: dict[str, Builder] = {
    "cnn2": cnn2,
    "cnn4": cnn4,
    "efficientnet-b0": efficientnet_b0,
    "fasttext": fasttext,
    "har-cnn": har_cnn,
    "mlp5": mlp5,
    "mobilenet-v2": mobilenet_v2,
    "resnet4": resnet4,
    "resnet6": resnet6,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "shufflenet-v2": shufflenet_v2,
    "textcnn": textcnn,
}

# In the order of client ids, modulo.
FAMILIES: dict[str, tuple[str, ...]] = {
    "heterogeneous-4": ("resnet8", "mobilenet-v2", "shufflenet-v2", "efficientnet-b0"),  # Ht0 of HtFLlib
    "small-4": ("cnn4", "resnet4", "resnet6", "resnet8"),
    "text-2": ("fasttext", "textcnn"),
}

__all__ = [
    "FAMILIES",
    "MODELS",
    "Builder",
    "SplitModel",
    "architecture_of",
    "architectures",
    "arrange",
    "body_names",
    "build_model",
    "check_compiler",
    "check_models",
    "check_named",
    "compile_body",
    "count_parameters",
    "description",
    "dry_forward",
    "has_batch_norm",
    "head_names",
    "is_still",
    "random_inputs",
]


def description(name: str) -> str:
    """Return one line about a model of the table: the first of its builder's docstring."""
    return (MODELS[name].__doc__ or "").strip().partition("\n")[0]


def architectures(spec: str) -> tuple[str, ...]:
    """Return the architectures of a federation, in the order of client ids (modulo).

    Args:
        spec: a family, a model, ``my_package.module:function``, or a comma list of them. Nothing is imported.

    Raises:
        PbflError: if a name is unknown; with the closest one and all that are allowed.
    """
    names: list[str] = []
    for item in (part.strip() for part in spec.split(",")):
        if item in FAMILIES:
            names.extend(FAMILIES[item])
        elif item in MODELS or is_external(item):
            names.append(item)
        else:
            raise PbflError(f"models = '{spec}': {_unknown(item)}")
    return tuple(names)


def architecture_of(spec: str, client: int) -> str:
    """Return the architecture of one client: number ``client`` modulo the length of the list.

    Args:
        spec: see :func:`architectures`.
        client: client id, from 0.
    """
    names = architectures(spec)
    return names[client % len(names)]


def build_model(name: str, task: Task, seed: int) -> SplitModel:
    """Return a freshly initialised model; equal (name, task, seed) gives equal weights.

    The global random state of torch is as before afterwards. Of somebody else's model only ``features`` and
    ``head`` are promised, see :func:`pbfl_flwr.models.external.build_external`; its weights repeat if it
    draws them from torch's CPU generator.

    Args:
        name: one of ``MODELS``, or ``my_package.module:function``.
        task: K, d and the shape of inputs.
        seed: of the initial weights.

    Raises:
        PbflError: if the name is unknown, the architecture cannot take the input, or an external model is not
            there or does not answer ``features`` and ``head``.
    """
    if name not in MODELS and not is_external(name):
        raise PbflError(f"models = '{name}': {_unknown(name)}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
        return MODELS[name](task) if name in MODELS else build_external(name, task)


def check_models(spec: str, task: Task) -> None:
    """Build every architecture once and send two inputs through it.

    Args:
        spec: see :func:`architectures`.
        task: K, d and the shape of inputs.

    Raises:
        PbflError: for the first architecture that does not fit, with model, layer, expected and found shape.
    """
    for name in dict.fromkeys(architectures(spec)):
        dry_forward(name, build_model(name, task, seed=0), task)


def check_named(training: TrainingSettings) -> None:
    """Check that what is said of single architectures names ones that there are.

    Raises:
        PbflError: for the first that is unknown.
    """
    for key, text in (("layout", training.layout), ("precision", training.precision)):
        for name in choices(text):
            if name and name not in MODELS and not is_external(name):
                raise PbflError(f"{key} = '{text}': {_unknown(name)}")


def _unknown(item: str) -> str:
    close = difflib.get_close_matches(item, [*FAMILIES, *MODELS], n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    return (
        f"unknown model '{item}'{hint} allowed are the families {', '.join(FAMILIES)}, "
        f"the models {', '.join(MODELS)}, my_package.module:function, or a comma list"
    )
