"""Images in one folder per class.

data-dir holds ``train/<class>/*`` and optionally ``test/<class>/*``, or just ``<class>/*``. Classes are
numbered in the order of their names, files are read in the order of theirs (as torchvision's ``ImageFolder``).
All images become RGB of the size of the first one; others are resized (bilinear, aspect ratio not kept) and a note
gives their number; the EXIF orientation is applied. ``labels`` lists all classes, including those without a folder
here; ``input-shape`` sets the size, and 1 channel for grey. Names that begin with a dot (``.git``, ``._a.png``) are
ignored.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings, class_name
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.labels import known_classes
from pbfl_flwr.data.own.images import decode_images, open_image
from pbfl_flwr.data.sources.files import files_under, given_path
from pbfl_flwr.errors import PbflError, abbreviate

_PARTS = {"train", "training", "test", "testing", "val", "valid", "validation"}
_WHAT = "a folder with train/<class>/* and optionally test/<class>/*, or <class>/*"


def image_folder(settings: DataSettings) -> Pool:
    """Return the images of data-dir as 3xHxW; ``test/`` is the official test part.

    Raises:
        PbflError: if data-dir is a file, there is no class folder, a class has no image, ``test/`` has a class that
            ``train/`` lacks, a class is not among ``labels``, or an image cannot be read.
    """
    root = given_path(settings, _WHAT)
    if not root.is_dir():
        raise PbflError(f"dataset '{settings.dataset}': {root} is a file; it should be {_WHAT}")
    train_dir = root / "train" if (root / "train").is_dir() else root
    names = list(settings.classes) or None
    train, class_folders = labelled_files(train_dir, settings.dataset, names)
    if names:
        known_classes(list(class_folders), settings.classes, str(train_dir))
    elif {name.casefold() for name in class_folders} <= _PARTS:
        raise PbflError(
            f"dataset '{settings.dataset}': {train_dir} holds {', '.join(class_folders)}, which would become the "
            "classes; must be train/<class>/* and test/<class>/*, in lower case"
        )
    classes = names or list(class_folders)
    test: list[tuple[Path, int]] = []
    tested: dict[str, Path] = {}
    if train_dir != root and (root / "test").is_dir():
        test, tested = labelled_files(root / "test", settings.dataset, classes)
        if unknown := sorted(set(tested) - set(classes)):
            raise PbflError(
                f"dataset '{settings.dataset}': {root / 'test'} has classes that train/ lacks: {unknown[:5]}"
            )
    channels, side = image_size(settings)

    def decode(allocate: Allocate) -> Pool:
        samples = ((open_image(path), label) for path, label in [*train, *test])
        inputs, labels, notes = decode_images(samples, len(train) + len(test), allocate, side, root, channels)
        folders = [*class_folders.values(), *tested.values()]
        from torchvision.datasets.folder import IMG_EXTENSIONS

        if ignored := sum(len(files_under(folder)) for folder in folders) - len(train) - len(test):
            kinds = ", ".join(IMG_EXTENSIONS)
            notes = (
                *notes,
                f"{ignored} files ignored that are not images ({kinds}) or whose names begin with a dot",
            )
        other = sorted(path.name for path in _folders(root) if path.name not in ("train", "test"))
        if other and train_dir != root:
            notes = (*notes, f"folders ignored next to train and test: {abbreviate(other)}")
        return Pool(inputs, labels, tuple(classes), num_train=len(train), notes=notes)

    return cached(settings, (path for path, _ in [*train, *test]), decode)


def _folders(place: Path) -> list[Path]:
    return [Path(entry) for entry in os.scandir(place) if entry.is_dir() and entry.name[0] != "."]


def image_size(settings: DataSettings, channels: int = 3) -> tuple[int, tuple[int, int] | None]:
    """Return the target (channels, (width, height)) of images; None: the size of the first one.

    Args:
        settings: ``input-shape``.
        channels: if that is not set.

    Raises:
        PbflError: if it is not the shape of an image.
    """
    if not settings.shape:
        return channels, None
    if len(settings.shape) != 3 or settings.shape[0] not in (1, 3):
        raise PbflError(
            f"input-shape = '{settings.input_shape}': images are channels,height,width with 1 or 3 channels"
        )
    channels, height, width = settings.shape
    return channels, (width, height)


def one_image(path: Path, channels: int, side: tuple[int, int]) -> NDArray[Any]:
    """Return an image decoded as in an image folder, (channels, height, width) uint8.

    Args:
        path: the file.
        channels: 3 is RGB, 1 is grey.
        side: (width, height) to resize to.

    Raises:
        PbflError: if it cannot be read.
    """
    image: NDArray[Any] = decode_images([(open_image(path), 0)], 1, np.empty, side, path, channels)[0][0]
    return image


def labelled_files(
    folder: Path, dataset: str, classes: list[str] | None = None
) -> tuple[list[tuple[Path, int]], dict[str, Path]]:
    """Return (path, label) of every image below ``folder/<class>``, and the folder of every class by its name.

    Args:
        folder: parent of the class folders.
        dataset: named in errors.
        classes: all class names in label order, some of which may be absent or empty; None: those found, sorted.

    Raises:
        PbflError: if there is no class folder, a class has two folders or, without ``classes``, no image.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    def taken(path: str) -> bool:
        below = path[len(str(folder)) :]
        return path.lower().endswith(IMG_EXTENSIONS) and f"{os.sep}." not in below

    try:
        named_folders = sorted((class_name(path.name), path) for path in _folders(folder))
        if not named_folders:
            raise FileNotFoundError("it has no class folder")
        folder_of = dict(named_folders)
        if twice := [name for name, path in named_folders if folder_of[name] != path]:
            raise PbflError(
                f"dataset '{dataset}': {folder} has two folders of the class '{twice[0]}', whose names differ only "
                "in spaces or Unicode form; must be one"
            )
        empty = classes is not None
        numbered = enumerate(folder_of if classes is None else classes)
        numbers = {folder_of[name].name: number for number, name in numbered if name in folder_of}
        samples = (
            make_dataset(str(folder), numbers, is_valid_file=taken, allow_empty=empty) if numbers else []
        )
    except OSError as error:
        raise PbflError(
            f"dataset '{dataset}': {error}; {folder} should hold <class>/* with images "
            f"({', '.join(IMG_EXTENSIONS)})"
        ) from error
    return [(Path(path), label) for path, label in samples], folder_of
