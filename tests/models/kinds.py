"""A name for every architecture, and the inputs that it takes."""

from pbfl_flwr.models.registry import ARCHITECTURES, base_and_sizes
from pbfl_flwr.task import Task

EXAMPLES = [entry.sizes.example if entry.sizes else name for name, entry in ARCHITECTURES.items()]
WINDOWS = {"har-cnn", "har-gru", "har-resnet", "harcnn"}
TEXTS = {"bilstm", "fasttext", "gru", "lstm", "text-logistic", "textcnn", "transformer"}
WITHOUT_PLACES = {"bilstm", "gru", "har-gru", "lstm", "transformer"}  # a stage makes one state of a sequence
TABLES = {"mlp", "mlp5"}
VISION_TRANSFORMERS = {"vit-b-16", "vit-b-32"}
LONGER = {"resnet34", "resnet101", "resnet152", "vit-b-32"}
"""The same layers as resnet18, resnet50 or vit-b-16 have: what is asked of layers need not be asked of them."""
IMAGE_SHAPES: list[tuple[int, ...]] = [(1, 8, 8), (4, 20, 28)]
FROM_16_PIXELS: list[tuple[int, ...]] = [(3, 16, 16), (1, 20, 28)]
ONE_SHAPE: dict[str, tuple[int, ...]] = {
    "resnet50": (3, 32, 32),
    "vit-b-16": (1, 16, 16),
    "vit-b-32": (3, 64, 64),
}
"""What large networks are tried on: that takes a second each."""


def is_one_of(name: str, kind: set[str]) -> bool:
    """Return whether an architecture, whatever the numbers in its name, is of this kind."""
    return base_and_sizes(name)[0] in kind


def takes_images(name: str) -> bool:
    """Return whether an architecture is made for images."""
    return not is_one_of(name, WINDOWS | TEXTS | TABLES)


def shapes(name: str) -> list[tuple[int, ...]]:
    """Return inputs that an architecture takes."""
    if is_one_of(name, TABLES):
        return [(2,), (1, 8, 8)]
    if is_one_of(name, WINDOWS):
        return [(9, 128), (9, 1, 128), (3, 50)]
    if is_one_of(name, TEXTS):
        return [(5,), (40,)]
    if name in ONE_SHAPE:
        return [ONE_SHAPE[name]]
    return FROM_16_PIXELS if is_one_of(name, {"cnn2", "cnn4", "googlenet"}) else IMAGE_SHAPES


def width(name: str, d: int) -> int:
    """Return the width from d on that an architecture takes: a transformer's heads divide it."""
    base, sizes = base_and_sizes(name)
    return -(-d // sizes[0]) * sizes[0] if base == "transformer" else d


def task_of(name: str, d: int, shape: tuple[int, ...], num_classes: int = 7) -> Task:
    """Return a task for it."""
    return Task(num_classes, d, shape, vocabulary_size=11 if is_one_of(name, TEXTS) else 0)
