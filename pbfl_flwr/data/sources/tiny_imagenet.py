"""Tiny ImageNet in its own folder layout: 200 classes, 3x64x64, 100,000 + 10,000 images.

``train/<wnid>/images/*.JPEG`` is the official training part, ``val/images`` with ``val/val_annotations.txt``
the official test part (the dataset's own ``test/`` has no labels). Classes are numbered in the order of their
wnids; their names come from ``words.txt`` if present.
"""

from __future__ import annotations

from pathlib import Path

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.own.image_folder import labelled_files
from pbfl_flwr.data.own.images import decode_images, open_image
from pbfl_flwr.data.sources.files import data_root, missing
from pbfl_flwr.errors import PbflError

SIDE = 64


def tiny_imagenet(settings: DataSettings) -> Pool:
    """Return train and val; searches data-dir and data-dir/tiny-imagenet-200.

    Raises:
        PbflError: if it is not found, or if an annotation names an unknown class or a missing image.
    """
    root = data_root(settings)
    places = (root, root / "tiny-imagenet-200")
    base = next((place for place in places if (place / "val" / "val_annotations.txt").is_file()), None)
    if base is None or not (base / "train").is_dir():
        raise missing(settings, [place / "val" / "val_annotations.txt" for place in places], None)
    train, names, _ = labelled_files(base / "train", settings.dataset)
    wnids = list(names)
    annotations = base / "val" / "val_annotations.txt"
    val = _val_files(annotations, wnids)
    words = base / "words.txt"

    def decode(allocate: Allocate) -> Pool:
        samples = ((open_image(path), label) for path, label in [*train, *val])
        inputs, labels, _ = decode_images(samples, len(train) + len(val), allocate, (SIDE, SIDE), base)
        return Pool(inputs, labels, _names(words, wnids), num_train=len(train))

    sources = [annotations, *(path for path, _ in [*train, *val]), *([words] if words.is_file() else [])]
    return cached(settings, sources, decode)


def _val_files(annotations: Path, wnids: list[str]) -> list[tuple[Path, int]]:
    numbers = {wnid: number for number, wnid in enumerate(wnids)}
    files = []
    for number, line in enumerate(annotations.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in numbers:
            raise PbflError(
                f"{annotations}, line {number}: {line[:60]!r}; must be <file> TAB <a wnid of train/> ..."
            )
        path = annotations.parent / "images" / fields[0]
        if not path.is_file():
            raise PbflError(f"{annotations}, line {number}: there is no {path}")
        files.append((path, numbers[fields[1]]))
    return files


def _names(words: Path, wnids: list[str]) -> tuple[str, ...]:
    table: dict[str, str] = {}
    if words.is_file():
        table = dict(
            line.split("\t", 1) for line in words.read_text(encoding="utf-8").splitlines() if "\t" in line
        )
    return tuple(table.get(wnid, wnid) for wnid in wnids)
