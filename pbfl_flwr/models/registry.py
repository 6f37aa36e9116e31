"""The architectures: values of the key ``models``, their builders by name, and which client has which.

Does not import torch, so that commands that only list or check names start fast.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.user_code import UserCode, is_external, own_code


@dataclass(frozen=True)
class Sizes:
    """Positive integers that follow an architecture's name, each after a hyphen: ``mlp-500-200``.

    Attributes:
        meaning: what the integers mean, in their order.
        least, most: how many there may be.
        example: a complete name.
    """

    meaning: str
    least: int
    most: int
    example: str


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        module: module of this package with its builder, a function of the architecture's name (with underscores).
        summary: one line for ``pbfl list models``, the first of the builder's docstring if it has one.
        sizes: the integers in its name, if it takes some.
    """

    module: str
    summary: str
    sizes: Sizes | None = None


_SIZES = {
    "cnn4": Sizes("width of the hidden layer", 0, 1, "cnn4-512"),
    "harcnn": Sizes("blocks, at most 3, and the stride", 2, 2, "harcnn-2-1"),
    "mlp": Sizes("widths of hidden layers", 0, 8, "mlp-500-200"),
    "transformer": Sizes("heads, layers", 2, 2, "transformer-8-2"),
}
_SUMMARIES = {  # by module
    "mlp": {
        "mlp": "MLP for tables: hidden layers of the widths in its name (mlp-500-200), then a hidden layer d.",
        "mlp5": "5-layer MLP: hidden layers 16-8-4-d, classifier; with d = 2 prototypes can be plotted.",
    },
    "cnn": {
        "cnn2": "CNN of FedProto and GFPL: 5x5 convolutions, 10 and 20 channels; hidden layer d; from 16x16 pixels.",
        "cnn4": "4-layer CNN (FedAvgCNN): hidden layer d, or cnn4-512: 512 averaged to d; from 16x16 pixels.",
    },
    "resnet": {
        "resnet4": "ResNet-4: stem and one residual block of width 64; last layer 64.",
        "resnet6": "ResNet-6: stem and residual blocks of width 64 and 128; last layer 128.",
        "resnet8": "ResNet-8: stem and residual blocks of width 64, 128 and 256; last layer 256.",
        "resnet10": "ResNet-10: stem and residual blocks of width 64, 128, 256 and 512; last layer 512.",
        "resnet18": "ResNet-18 of torchvision; last layer 512.",
        "resnet34": "ResNet-34 of torchvision; last layer 512.",
        "resnet50": "ResNet-50 of torchvision; last layer 2048.",
        "resnet101": "ResNet-101 of torchvision; last layer 2048.",
        "resnet152": "ResNet-152 of torchvision; last layer 2048.",
    },
    "torchvision_bodies": {
        "efficientnet-b0": "EfficientNet-B0 of torchvision; last layer 1280.",
        "googlenet": "GoogLeNet of torchvision, no auxiliary heads; from 15x15 pixels; last layer 1024.",
        "mobilenet-v2": "MobileNetV2 of torchvision; last layer 1280.",
        "shufflenet-v2": "ShuffleNetV2 x1.0 of torchvision; last layer 1024.",
    },
    "vision_transformer": {
        "vit-b-16": "ViT-B/16 of torchvision: square images of 16x16 patches; last layer 768.",
        "vit-b-32": "ViT-B/32 of torchvision: square images of 32x32 patches; last layer 768.",
    },
    "sensor": {
        "har-cnn": "1-D CNN for sensor windows (channels, length): 32, 64 and 128 channels; hidden layer d.",
        "har-gru": "GRU for sensor windows: 64 units over pairs of readings, mean over time, hidden layer d.",
        "har-resnet": "1-D residual network for sensor windows: 32, 64 and 128 channels; last layer 128.",
        "harcnn": "HtFLlib's HARCNN for sensor windows, harcnn-BLOCKS-STRIDE; features average-pooled to d.",
    },
    "text": {
        "fasttext": "FastText for token ids: mean embedding over all positions, padding included; hidden layer d.",
        "text-logistic": "Logistic regression for token ids: mean embedding over all positions, no hidden layer.",
        "textcnn": "TextCNN for token ids: 100 convolutions each of width 3, 4, 5; hidden layer d; from 5 tokens.",
    },
    "recurrent": {
        "bilstm": "BiLSTM for token ids: width d per direction, hidden layer d on the two final states.",
        "gru": "GRU for token ids: two layers of width d, dropout 0.2; the state after the last token.",
        "lstm": "LSTM for token ids: two layers of width d, dropout 0.2; ReLU of the state after the last token.",
    },
    "transformer": {
        "transformer": "Transformer for token ids, transformer-HEADS-LAYERS: width d, MLP 2048; the output at <cls>.",
    },
}
ARCHITECTURES = {
    name: Architecture(module, summary, _SIZES.get(name))
    for module, summaries in _SUMMARIES.items()
    for name, summary in summaries.items()
}
LARGEST = 65_536  # bound on an integer in a name
CLASSIFIER = Sizes("widths of the classifier's hidden layers", 1, 8, "resnet8+512-256")
"""Format of the part after "+", for every architecture."""
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Format of the part after "@": the label of the stored weights with which the body is initialised."""
_SIZED_NAME = re.compile(r"(\D[\w-]*?)((?:-\d+)*)")

_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")

# In the order of client ids, modulo the length. Those with htfe, htm or htc in their names are HtFLlib's, in its order.
FAMILIES: dict[str, tuple[str, ...]] = {
    "heterogeneous-4": ("resnet8", "mobilenet-v2", "shufflenet-v2", "efficientnet-b0"),  # Ht0 of TinyProto
    "htfe-img-2": ("cnn4", "resnet18"),
    "htfe-img-3": ("resnet10", "resnet18", "resnet34"),
    "htfe-img-4": ("cnn4", "googlenet", "mobilenet-v2", "resnet18"),
    "htfe-img-5": ("googlenet", "mobilenet-v2", "resnet18", "resnet34", "resnet50"),
    "htfe-img-8": ("cnn4", "googlenet", "mobilenet-v2", *_RESNETS),
    "htfe-img-8-htc-img-4": (  # client i has body i mod 8 and classifier i mod 4
        *("cnn4", "googlenet+512", "mobilenet-v2+256", "resnet18+128"),
        *("resnet34", "resnet50+512", "resnet101+256", "resnet152+128"),
    ),
    "htfe-img-9": ("resnet4", "resnet6", "resnet8", "resnet10", *_RESNETS),
    "htm-img-10": ("cnn4", "googlenet", "mobilenet-v2", *_RESNETS, "vit-b-16", "vit-b-32"),
    "res34-htc-img-4": ("resnet34", "resnet34+512", "resnet34+256", "resnet34+128"),
    "htfe-sen-2": ("harcnn-2-1", "harcnn-2-2"),
    "htfe-sen-3": ("harcnn-2-1", "harcnn-2-2", "harcnn-2-3"),
    "htfe-sen-5": ("harcnn-2-1", "harcnn-2-2", "harcnn-2-3", "harcnn-1-1", "harcnn-3-1"),
    "htfe-sen-8": (
        *("harcnn-2-1", "harcnn-2-2", "harcnn-2-3"),
        *("harcnn-1-1", "harcnn-1-2", "harcnn-1-3", "harcnn-3-1", "harcnn-3-2"),
    ),
    "htfe-txt-2": ("fasttext", "text-logistic"),
    "htfe-txt-4": ("fasttext", "text-logistic", "lstm", "bilstm"),
    "htfe-txt-5-1": tuple(f"transformer-8-{layers}" for layers in (1, 2, 4, 8, 16)),
    "htfe-txt-5-2": tuple(f"transformer-{heads}-4" for heads in (1, 2, 4, 8, 16)),
    "htfe-txt-5-3": tuple(f"transformer-{both}-{both}" for both in (1, 2, 4, 8, 16)),
    "htfe-txt-6": ("fasttext", "lstm", "bilstm", "transformer-8-2", "text-logistic", "gru"),
    "sensor-4": ("har-cnn", "har-resnet", "har-gru", "harcnn-2-1"),
    "small-4": ("cnn4", "resnet4", "resnet6", "resnet8"),
    "table-4": ("mlp", "mlp-500", "mlp-1000-500", "mlp-1000-500-200"),  # widths of HtFLlib's MLPs
    "text-2": ("fasttext", "textcnn"),
}


@dataclass(frozen=True)
class ModelName:
    """The parts of a model's name, such as ``resnet18@imagenet+512-256``.

    Attributes:
        body: the architecture with its sizes, or ``my_package.module:function``.
        label: of the body's initial weights, "" if random.
        widths: of the classifier's hidden layers, empty if it is linear.
    """

    body: str
    label: str = ""
    widths: tuple[int, ...] = ()

    @classmethod
    def parse(cls, name: str) -> ModelName:
        """Split a name, whether or not its body is known.

        Raises:
            PbflError: if the part after "@" is no valid label, the part after "+" is no list of widths, or what has one
                of them is user code, or a family with widths.
        """
        front, plus, classifier = name.partition("+")
        body, at, label = front.partition("@")
        if is_external(body) and (at or plus):
            own = "load its weights" if at else "build the classifier"
            raise PbflError(f"model '{name}': a function of your own must {own} itself; must be '{body}'")
        if at and not LABEL.fullmatch(label):
            raise PbflError(
                f"model '{name}': after '@' must follow a label of 1 to 64 letters, digits, '.', '_', '-'; 'pbfl list "
                "weights' shows those stored on this machine"
            )
        if plus and body in FAMILIES:
            raise PbflError(
                f"model '{name}': '{body}' is a family; must be a comma list of models, each with its own classifier"
            )
        return cls(body, label, _whole_numbers(name, "+", classifier, CLASSIFIER) if plus else ())

    def __str__(self) -> str:
        at = f"@{self.label}" if self.label else ""
        plus = f"+{'-'.join(map(str, self.widths))}" if self.widths else ""
        return f"{self.body}{at}{plus}"


def without_weights(name: str) -> str:
    """Return the name without its label: the same network with random initial weights; user code unchanged."""
    if isinstance(name, UserCode):
        return name
    return str(replace(ModelName.parse(name), label=""))


def base_and_sizes(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the key in ARCHITECTURES that a name refers to, and the integers in the body's name.

    Raises:
        PbflError: if there is no such key, or the number or range of the integers is wrong.
    """
    body = ModelName.parse(name).body
    if body in ARCHITECTURES and ARCHITECTURES[body].sizes is None:
        return body, ()
    match = _SIZED_NAME.fullmatch(body)
    architecture = ARCHITECTURES.get(match[1]) if match else None
    if match is None or architecture is None or architecture.sizes is None:
        raise PbflError(unknown(body))
    return match[1], _whole_numbers(body, match[1], match[2].removeprefix("-"), architecture.sizes)


def _whole_numbers(name: str, before: str, text: str, takes: Sizes) -> tuple[int, ...]:
    numbers = text.split("-") if text else []
    fits = all(re.fullmatch("[1-9][0-9]{0,4}", number) and int(number) <= LARGEST for number in numbers)
    if not fits or not takes.least <= len(numbers) <= takes.most:
        count = str(takes.least) if takes.least == takes.most else f"{takes.least} to {takes.most}"
        raise PbflError(
            f"model '{name}': after '{before}' must follow {count} whole numbers from 1 to {LARGEST:,} "
            f"({takes.meaning}), e.g. {takes.example}"
        )
    return tuple(map(int, numbers))


def architectures(spec: str, code: Collection[str] = (), key: str = "models") -> tuple[str, ...]:
    """Return the architectures of a federation, in the order of client ids (modulo).

    Args:
        spec: a family, a model, ``my_package.module:function``, or a comma list of these. A label after a family
            applies to all its models. Nothing is imported.
        code: functions that may be imported; see :attr:`pbfl_flwr.config.Settings.code`. Others can only be compared.
        key: the configuration key, for messages.

    Raises:
        PbflError: if a name is unknown; the message suggests the closest one.
    """
    names: list[str] = []
    for item in (part.strip() for part in spec.split(",")):
        family, at, label = item.partition("@")
        members = FAMILIES.get(family, ()) if not at or LABEL.fullmatch(label) else ()
        models = [str(replace(ModelName.parse(name), label=label)) for name in members] or [item]
        if not is_external(models[0]):
            try:
                base_and_sizes(models[0])
            except PbflError as error:
                raise PbflError(f"{key} = '{spec}': {error}") from None
        names.extend(own_code(name, code) for name in models)
    return tuple(names)


def architecture_of(spec: str, client: int, code: Collection[str] = ()) -> str:
    """Return the architecture of one client: number ``client`` modulo the length of the list.

    Args:
        spec: see :func:`architectures`.
        client: client id, from 0.
        code: see :func:`architectures`.
    """
    names = architectures(spec, code)
    return names[client % len(names)]


def unknown(item: str) -> str:
    """Return the error message for an unknown name: the closest known one, and what is allowed."""
    close = difflib.get_close_matches(item.lower(), [*FAMILIES, *ARCHITECTURES], n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    return (
        f"unknown model '{item}'{hint} must be one of the families and models that 'pbfl list models' "
        "lists, my_package.module:function, or a comma list"
    )
