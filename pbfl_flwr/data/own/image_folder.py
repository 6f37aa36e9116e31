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
from collections.abc import Callable, Mapping, Sequence
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
    train, names, ignored = labelled_files(train_dir, settings.dataset, numbered)
    direct, deep = _by_depth(train_dir, train)
    if not settings.classes and (
        parts := names if all(map(_is_part, names)) else sorted(filter(_is_part, deep))
    ):
        raise PbflError(
            f"dataset '{settings.dataset}': {train_dir} holds {', '.join(parts)}, which would become the "
            "classes; must be train/<class>/* and test/<class>/*, in lower case, or labels must be set to all classes"
        )
    if deep and not direct:
        raise PbflError(
            f"dataset '{settings.dataset}': the folders of {train_dir} hold only folders, e.g. "
            f"{train[0][0].parent.relative_to(train_dir)}; must be <class>/* with images. If it is <client>/<class>/*, "
            "a simulation reads it with partition = natural, and a device is given the folder of one client"
        )
    classes = settings.classes or names
    test: list[tuple[Path, int]] = []
    if train_dir != root:
        ignored += _loose_images(root)
    if train_dir != root and (root / "test").is_dir():

        def as_in_train(names: Sequence[str], folder: Path) -> list[int]:
            if unknown := sorted(set(names) - set(classes)):
                raise PbflError(
                    f"dataset '{settings.dataset}': {folder} has classes that train/ lacks: {unknown[:5]}"
                )
            return by_name(names, classes, str(folder))

        test, _, of_test = labelled_files(root / "test", settings.dataset, numbered or as_in_train)
        ignored += of_test
    channels, side = image_size(settings)

    def decode(allocate: Allocate) -> Pool:
        samples = ((open_image(path), label) for path, label in [*train, *test])
        inputs, labels, notes = decode_images(samples, len(train) + len(test), allocate, side, root, channels)
        return Pool(inputs, labels, classes, num_train=len(train), notes=notes)

    pool = cached(settings, (path for path, _ in [*train, *test]), decode)
    notes = (*pool.notes, *_ignored_files(ignored))  # about what the cache's key does not cover
    unread = sorted(path.name for path in _folders(root) if path.name not in ("train", "test"))
    if unread and train_dir != root:
        notes = (*notes, f"folders ignored next to train and test: {abbreviate(unread)}")
    return replace(pool, notes=notes)


def _of_clients(settings: DataSettings, root: Path) -> Pool:
    """Return the images of ``<client>/<class>/*``; classes are those of all clients."""
    folders = sorted(_folders(root))
    names = {class_name(path.name) for folder in folders for path in _folders(folder)}
    classes = settings.classes or tuple(sorted(names))

    def numbered(names: Sequence[str], folder: Path) -> list[int]:
        return numbers_of(names, classes, str(folder))

    read = [labelled_files(folder, settings.dataset, numbered) for folder in folders]
    samples = [files for files, *_ in read]
    sizes = [len(files) for files in samples]
    depths = [_by_depth(folder, files) for folder, files in zip(folders, samples, strict=True)]
    sure: set[str] = set(settings.classes)
    if not sure and not all(map(_is_part, classes)):
        sure.update(*(direct for direct, _ in depths))  # a class is one of all clients
    reasons = (_not_of_a_client(folder.name, *of, sure) for folder, of in zip(folders, depths, strict=True))
    if found := next(filter(None, reasons), "" if folders else "no client"):
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
    ignored = _loose_images(root) + sum(number for *_, number in read)
    return replace(pool, notes=(*pool.notes, *_ignored_files(ignored)))


def _by_depth(folder: Path, files: Sequence[tuple[Path, int]]) -> tuple[set[str], dict[str, Path]]:
    """Return the classes with images directly in their folder; and those with images only below, each with a place."""
    depth = len(folder.parts)
    direct = {class_name(path.parts[depth]) for path, _ in files if len(path.parts) == depth + 2}
    places = {class_name(path.parts[depth]): path.parent for path, _ in files}
    return direct, {name: place for name, place in places.items() if name not in direct}


def _not_of_a_client(client: str, direct: set[str], deep: Mapping[str, Path], sure: set[str]) -> str:
    """Return what shows that a folder is not a client's, or that its folders are not the classes; else empty.

    Args:
        client: its name.
        direct: its classes with images directly in their folder.
        deep: the others with images, and a place of these.
        sure: what are classes: ``labels``, or the names with images directly in a folder of some client.
    """
    if _is_part(client):
        return f"a folder '{client}'"
    if not direct and not deep:
        return f"no image in the folders of '{client}'"
    doubtful = sorted({*direct, *deep} - sure)
    remedy = "is a class, set labels to all classes"
    if parts := [*filter(_is_part, doubtful)]:
        return f"a folder '{client}/{parts[0]}'; if that {remedy}"
    if len(doubtful) == len(direct) + len(deep):
        return f"images only further down, e.g. in {deep[doubtful[0]]}; if '{doubtful[0]}' {remedy}"
    return ""


def _is_part(name: str) -> bool:
    return name.casefold() in _PARTS


def _ignored_files(number: int) -> list[str]:
    """Return the note on that many files that are not read; empty if there are none."""
    kinds = ", ".join(SUFFIXES)
    note = (
        f"{number} files ignored that are not images ({kinds}), whose names begin with a dot, or that are images "
        "beside the folders of classes"
    )
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
) -> tuple[list[tuple[Path, int]], tuple[str, ...], int]:
    """Return (path, label) of every image below ``folder/<class>``, the classes, and the number of ignored files.

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
    ignored = _loose_images(folder) + sum(number for _, number in found.values())
    return samples, tuple(folder_of), ignored


def _loose_images(folder: Path) -> int:
    """Return the number of images directly in a folder of folders."""
    names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    return sum(name[0] != "." and name.lower().endswith(SUFFIXES) for name in names)


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
