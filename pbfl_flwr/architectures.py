"""The names of architectures: what the key ``models`` may say, and which client has which. No torch here.

:mod:`pbfl_flwr.models` builds them; a test compares the tables.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from pbfl_flwr.config import TrainingSettings, choices
from pbfl_flwr.errors import PbflError
from pbfl_flwr.own_code import is_external

ARCHITECTURES: dict[str, str] = {
    "cnn2": "CNN of FedProto and GFPL: 5x5 convolutions to 10 and 20 channels, hidden layer d; from 16x16 pixels.",
    "cnn4": "4-layer CNN (FedAvgCNN): 5x5 convolutions to 32 and 64 channels, hidden layer d; from 16x16 pixels.",
    "efficientnet-b0": "EfficientNet-B0 of torchvision, no pretrained weights; a = 1280, 4,007,548 body parameters.",
    "fasttext": "FastText for token ids: the mean embedding of all places, padding included, hidden layer d.",
    "har-cnn": "1-D CNN for sensor windows (channels, length): 32, 64 and 128 channels, hidden layer d.",
    "mlp": "Perceptron for tables: hidden layers of the widths in its name (mlp-500-200), hidden layer d.",
    "mlp5": "5-layer perceptron: flattened input-16-8-4-d, classifier; d = 2 shows prototypes in the plane.",
    "mobilenet-v2": "MobileNetV2 of torchvision, no pretrained weights; a = 1280, 2,223,872 body parameters.",
    "resnet4": "ResNet-4: stem and one residual block of width 64; a = 64.",
    "resnet6": "ResNet-6: stem and residual blocks of width 64 and 128; a = 128.",
    "resnet8": "ResNet-8: stem and residual blocks of width 64, 128 and 256; a = 256, 1,232,704 body parameters.",
    "resnet18": "ResNet-18 of torchvision, no pretrained weights; a = 512, 11,176,512 body parameters.",
    "shufflenet-v2": "ShuffleNetV2 x1.0 of torchvision, no pretrained weights; a = 1024, 1,253,604 body parameters.",
    "textcnn": "TextCNN for token ids: 100 channels each of width 3, 4 and 5 over embeddings, hidden layer d; "
    "from 5 tokens.",
}


@dataclass(frozen=True)
class Sizes:
    """Whole numbers from 1 that follow an architecture's name, each after a hyphen: ``mlp-500-200``.

    Attributes:
        meaning: of them, in their order.
        least, most: how many there are.
        example: a whole name.
    """

    meaning: str
    least: int
    most: int
    example: str


SIZED: dict[str, Sizes] = {
    "mlp": Sizes("widths of hidden layers", 0, 8, "mlp-500-200"),
}
LARGEST = 65_536  # a number in a name
CLASSIFIER = Sizes("widths of the classifier's hidden layers", 1, 8, "resnet8+512-256")
"""What follows the "+" in a name, for every architecture."""
_SIZED_NAME = re.compile(r"(\D[\w-]*?)((?:-\d+)*)")

# In the order of client ids, modulo.
FAMILIES: dict[str, tuple[str, ...]] = {
    "heterogeneous-4": ("resnet8", "mobilenet-v2", "shufflenet-v2", "efficientnet-b0"),  # Ht0 of HtFLlib
    "small-4": ("cnn4", "resnet4", "resnet6", "resnet8"),
    "table-4": ("mlp", "mlp-500", "mlp-1000-500", "mlp-1000-500-200"),  # widths of HtFLlib's MLPs
    "text-2": ("fasttext", "textcnn"),
}


def body_and_classifier(name: str) -> tuple[str, tuple[int, ...]]:
    """Return a name without what follows its "+", and the widths of the classifier's hidden layers: none if linear.

    Raises:
        PbflError: if there is a "+" and what follows it are not such widths, or the model is somebody's own.
    """
    body, plus, widths = name.partition("+")
    if not plus:
        return name, ()
    if is_external(body):
        raise PbflError(
            f"model '{name}': a function of your own builds the classifier, too; allowed is '{body}'"
        )
    if body in FAMILIES:
        raise PbflError(
            f"model '{name}': '{body}' is a family; allowed is a comma list of models, each with its own classifier"
        )
    return body, _whole_numbers(name, "+", widths, CLASSIFIER)


def base_and_sizes(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the entry of ARCHITECTURES that a name is about, and the numbers of its body in the name.

    Raises:
        PbflError: if there is no such entry, or the numbers are not what it takes.
    """
    body, _ = body_and_classifier(name)
    if body in ARCHITECTURES and body not in SIZED:
        return body, ()
    match = _SIZED_NAME.fullmatch(body)
    if match is None or match[1] not in SIZED:
        raise PbflError(unknown(body))
    return match[1], _whole_numbers(body, match[1], match[2].removeprefix("-"), SIZED[match[1]])


def _whole_numbers(name: str, before: str, text: str, takes: Sizes) -> tuple[int, ...]:
    found = text.split("-") if text else []
    fits = all(re.fullmatch("[1-9][0-9]{0,4}", number) and int(number) <= LARGEST for number in found)
    if not fits or not takes.least <= len(found) <= takes.most:
        count = str(takes.least) if takes.least == takes.most else f"{takes.least} to {takes.most}"
        raise PbflError(
            f"model '{name}': allowed after '{before}' are {count} whole numbers from 1 to {LARGEST:,} "
            f"({takes.meaning}), e.g. {takes.example}"
        )
    return tuple(map(int, found))


def examples() -> list[str]:
    """Return a name that can be built for every entry of ARCHITECTURES."""
    return [SIZED[name].example if name in SIZED else name for name in ARCHITECTURES]


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
        else:
            _check_name("models", spec, item)
            names.append(item)
    return tuple(names)


def architecture_of(spec: str, client: int) -> str:
    """Return the architecture of one client: number ``client`` modulo the length of the list.

    Args:
        spec: see :func:`architectures`.
        client: client id, from 0.
    """
    names = architectures(spec)
    return names[client % len(names)]


def check_named(training: TrainingSettings) -> None:
    """Check that what is said of single architectures names ones that there are.

    Raises:
        PbflError: for the first that is unknown.
    """
    for key, text in (("layout", training.layout), ("precision", training.precision)):
        for name in choices(text):
            if name:
                _check_name(key, text, name)


def _check_name(key: str, text: str, name: str) -> None:
    if is_external(name):
        return
    try:
        base_and_sizes(name)
    except PbflError as error:
        raise PbflError(f"{key} = '{text}': {error}") from None


def unknown(item: str) -> str:
    """Return what to say of a name that is none: the closest one, and what is allowed."""
    close = difflib.get_close_matches(item, [*FAMILIES, *ARCHITECTURES], n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    return (
        f"unknown model '{item}'{hint} allowed are the families {', '.join(FAMILIES)}, the models that "
        "'pbfl list models' lists, my_package.module:function, or a comma list"
    )
