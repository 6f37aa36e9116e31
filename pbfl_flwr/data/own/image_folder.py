"""Images in one folder per class.

data-dir holds ``train/<class>/*`` and optionally ``test/<class>/*``, or just ``<class>/*``; with ``partition``
"natural" ``<client>/<class>/*``. Classes are numbered in the order of their names, files are read in the order of
theirs (as torchvision's ``ImageFolder``). All images become RGB of the size of the first one; others are resized
(bilinear, aspect ratio not kept) and a note gives their number; the EXIF orientation is applied. ``labels`` lists all
classes, including those without a folder here; ``input-shape`` sets the size, and 1 channel for grey. Names that begin
with a dot (``.git``, ``._a.png``) are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings, class_name
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.labels import by_name, numbers_of, owner_names
from pbfl_flwr.data.own.images import SUFFIXES, decode_images, open_image
from pbfl_flwr.data.sources.files import given_path, walk
from pbfl_flwr.errors import PbflError, abbreviate

Numbered = Callable[[Sequence[str], Path], Sequence[int]]
"""(names of class folders, the folder that holds them) -> the number of each class."""

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
    if settings.partition == "natural":
        return _of_clients(settings, root)
    train_dir = root / "train" if (root / "train").is_dir() else root
    numbered = _numbered(settings)
    train, others_by_class = labelled_files(train_dir, settings.dataset, numbered)
    if not settings.classes and {name.casefold() for name in others_by_class} <= _PARTS:
        raise PbflError(
            f"dataset '{settings.dataset}': {train_dir} holds {', '.join(others_by_class)}, which would become the "
            "classes; must be train/<class>/* and test/<class>/*, in lower case"
        )
    if train and all(path.parent.parent != train_dir for path, _ in train):
        raise PbflError(
            f"dataset '{settings.dataset}': the folders of {train_dir} hold only folders, e.g. "
            f"{train[0][0].parent.relative_to(train_dir)}; must be <class>/* with images. If it is <client>/<class>/*, "
            "a simulation reads it with partition = natural, and a device is given the folder of one client"
        )
    classes = settings.classes or tuple(others_by_class)
    test: list[tuple[Path, int]] = []
    test_others_by_class: dict[str, int] = {}
    if train_dir != root and (root / "test").is_dir():

        def as_in_train(names: Sequence[str], folder: Path) -> list[int]:
            if unknown := sorted(set(names) - set(classes)):
                raise PbflError(
                    f"dataset '{settings.dataset}': {folder} has classes that train/ lacks: {unknown[:5]}"
                )
            return by_name(names, classes, str(folder))

        test, test_others_by_class = labelled_files(root / "test", settings.dataset, numbered or as_in_train)
    channels, side = image_size(settings)

    def decode(allocate: Allocate) -> Pool:
        samples = ((open_image(path), label) for path, label in [*train, *test])
        inputs, labels, notes = decode_images(samples, len(train) + len(test), allocate, side, root, channels)
        return Pool(inputs, labels, classes, num_train=len(train), notes=notes)

    pool = cached(settings, (path for path, _ in [*train, *test]), decode)
    others = sum(others_by_class.values()) + sum(test_others_by_class.values())
    notes = (*pool.notes, *ignored_files(others))  # about what the cache's key does not cover
    unread = sorted(path.name for path in _folders(root) if path.name not in ("train", "test"))
    if unread and train_dir != root:
        notes = (*notes, f"folders ignored next to train and test: {abbreviate(unread)}")
    return replace(pool, notes=notes)


def _of_clients(settings: DataSettings, root: Path) -> Pool:
    """Return the images of ``<client>/<class>/*``; classes are those of all clients."""
    folders = sorted(_folders(root))
    class_folders = {path for folder in folders for path in _folders(folder)}
    classes = settings.classes or tuple(sorted({class_name(path.name) for path in class_folders}))

    def numbered(names: Sequence[str], folder: Path) -> list[int]:
        return numbers_of(names, classes, str(folder))

    read = [labelled_files(folder, settings.dataset, numbered) for folder in folders]
    samples = [files for files, _ in read]
    sizes = [len(files) for files in samples]
    parts = [folder for folder in folders if folder.name.casefold() in _PARTS]
    if not settings.classes and all(folder.name.casefold() in _PARTS for folder in class_folders):
        parts += sorted(class_folders)
    found = ""
    if parts:
        found = f"a folder '{parts[0].relative_to(root)}'"
    elif not sizes:
        found = "no client"
    elif not all(sizes):
        found = f"no image in the folders of '{folders[sizes.index(0)].name}'"
    elif not any(path.parent in class_folders for files in samples for path, _ in files):
        found = f"images only further down, e.g. in {samples[0][0][0].parent.relative_to(root)}"
    if found:
        raise PbflError(
            f"partition = natural: {root} must be <client>/<class>/* with images, no train and test; it has {found}"
        )
    channels, side = image_size(settings)

    def decode(allocate: Allocate) -> Pool:
        images = ((open_image(path), label) for files in samples for path, label in files)
        inputs, labels, notes = decode_images(images, sum(sizes), allocate, side, root, channels)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        clients = owner_names([folder.name for folder in folders])
        return Pool(inputs, labels, classes, sum(sizes), owner, clients, notes=notes)

    pool = cached(settings, (path for files in samples for path, _ in files), decode, classes)
    others = sum(sum(others_by_class.values()) for _, others_by_class in read)
    return replace(pool, notes=(*pool.notes, *ignored_files(others)))


def ignored_files(number: int) -> list[str]:
    """Return the note on that many files that are no images; empty if there are none."""
    kinds = ", ".join(SUFFIXES)
    note = f"{number} files ignored that are not images ({kinds}) or whose names begin with a dot"
    return [note] if number else []


def _numbered(settings: DataSettings) -> Numbered | None:
    """Return how class folders are numbered by ``labels``; None if it is not set."""
    classes = settings.classes
    return (lambda names, folder: numbers_of(names, classes, str(folder))) if classes else None


def _folders(place: Path) -> list[Path]:
    return [Path(entry) for entry in os.scandir(place) if entry.is_dir() and entry.name[0] != "."]


def image_size(settings: DataSettings, channels: int | None = 3) -> tuple[int | None, tuple[int, int] | None]:
    """Return the target (channels, (width, height)) of images; None: those of the first one.

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
    folder: Path, dataset: str, numbered: Numbered | None = None
) -> tuple[list[tuple[Path, int]], dict[str, int]]:
    """Return (path, label) of every image below ``folder/<class>``, and class -> number of its other files.

    Args:
        folder: parent of the class folders.
        dataset: named in errors.
        numbered: numbers the classes, whose folders may be empty; None: in the order of their names.

    Raises:
        PbflError: if there is no class folder, a class has two folders or, without ``numbered``, no image.
    """
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
        of_names = range(len(folder_of)) if numbered is None else numbered([*folder_of], folder)
        numbers = {path.name: number for path, number in zip(folder_of.values(), of_names, strict=True)}
        found = {name: _images(folder, name) for name in sorted(numbers)}
        if numbered is None and not all(paths for paths, _ in found.values()):
            empty = ", ".join(name for name, (paths, _) in found.items() if not paths)
            raise FileNotFoundError(f"no image for the classes {empty}")
    except OSError as error:
        raise PbflError(
            f"dataset '{dataset}': {error}; {folder} should hold <class>/* with images "
            f"({', '.join(SUFFIXES)})"
        ) from error
    samples = [(path, numbers[name]) for name, (paths, _) in found.items() for path in paths]
    return samples, {name: found[path.name][1] for name, path in folder_of.items()}


def _images(folder: Path, name: str) -> tuple[list[Path], int]:
    """Return the images below ``folder/name``, and the number of its other files.

    Links are followed, in the order of torchvision's ``ImageFolder``.
    """
    files = [
        os.path.join(place, file) for place, names in sorted(walk(folder / name)) for file in sorted(names)
    ]
    images = [
        Path(path)
        for path in files
        if path.lower().endswith(SUFFIXES) and f"{os.sep}." not in path[len(str(folder)) :]
    ]
    return images, len(files) - len(images)
