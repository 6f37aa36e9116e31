"""Apply an exported model to files: images, arrays, tables."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.data.own.columns import CLIENT, LABEL, SUFFIXES
from pbfl_flwr.data.own.image_folder import one_image
from pbfl_flwr.data.own.images import SUFFIXES as IMAGES
from pbfl_flwr.data.own.npz import read_arrays
from pbfl_flwr.data.own.table import features
from pbfl_flwr.data.sources.files import walk
from pbfl_flwr.errors import PbflError
from pbfl_flwr.runs.saved_model import Card
from pbfl_flwr.serving.exported import HEAD, Exported
from pbfl_flwr.util.csv_text import csv_text

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prediction:
    """The prediction for one input: file, row in it (from 1; 0 for an image), class, and probabilities (K,)."""

    file: str
    row: int
    label: str
    probability: float
    probabilities: tuple[float, ...]


def predict(model: Exported, files: Sequence[Path], by: str = HEAD) -> Iterator[Prediction]:
    """Yield a prediction for every image and every row, in the order of the files.

    A warning is logged for a folder that also has other files.

    Args:
        model: see :func:`pbfl_flwr.serving.exported.open_exported`.
        files: images, folders of images, ``.npz`` files with ``x``, CSV or Parquet files.
        by: see :meth:`pbfl_flwr.serving.exported.Exported.probabilities`.

    Raises:
        PbflError: for a file that cannot be read or does not fit the model's input.
    """
    labels = model.card.labels
    for file, first, inputs in _inputs(model.card, files):
        for row, row_probabilities in enumerate(model.probabilities(inputs, by), start=first):
            best = int(row_probabilities.argmax())
            yield Prediction(
                file, row, labels[best], float(row_probabilities[best]), tuple(row_probabilities.tolist())
            )


def _inputs(card: Card, files: Sequence[Path]) -> Iterator[tuple[str, int, NDArray[Any]]]:
    """Yield (file, number of the first row, inputs (N, *input_shape))."""
    for path in files:
        suffix = path.suffix.lower()
        if path.is_dir():
            found = [Path(place, name) for place, names in walk(path) for name in names]
            images = sorted(file for file in found if _is_image(file, path))
            if not images:
                raise PbflError(f"{path} holds no images")
            if ignored := len(found) - len(images):
                kinds = ", ".join(IMAGES)
                log.warning(
                    "%s: %d files ignored that are not images (%s) or whose names begin with a dot",
                    path,
                    ignored,
                    kinds,
                )
            yield from _inputs(card, images)
        elif not path.is_file():
            raise PbflError(f"there is no {path}")
        elif suffix in IMAGES:
            yield str(path), 0, _image(card, path)
        elif suffix == ".npz":
            yield str(path), 1, _arrays(card, path)
        elif suffix in SUFFIXES:
            yield str(path), 1, _rows(card, path)
        else:
            formats = f"images, .npz, {', '.join(SUFFIXES)}, and folders of images"
            raise PbflError(f"{path}: must be one of {formats}")


def _is_image(path: Path, folder: Path) -> bool:
    """Return whether an image folder would read this file: an image suffix, and no name begins with a dot."""
    visible = not any(part.startswith(".") for part in path.relative_to(folder).parts)
    return visible and path.suffix.lower() in IMAGES


def _image(card: Card, path: Path) -> NDArray[Any]:
    if not card.images or len(card.input_shape) != 3 or card.input_shape[0] not in (1, 3):
        kind = "images" if card.images else "token ids" if card.vocabulary_size else "numbers"
        raise PbflError(f"{path} is an image, but this model takes {kind} of shape {card.input_shape}")
    return one_image(path, card.input_shape[0], (card.input_shape[2], card.input_shape[1]))[None]


def _arrays(card: Card, path: Path) -> NDArray[Any]:
    x = read_arrays(path, "predict", ("x",))["x"]
    if card.images and x.ndim == 3 and card.input_shape[0] == 1:
        x = x[:, None]
    kinds = "u" if card.images else "iu" if card.vocabulary_size else "biuf"
    if x.shape[1:] != card.input_shape or x.dtype.kind not in kinds or (card.images and x.dtype != np.uint8):
        kind = "uint8" if card.images else "token ids" if card.vocabulary_size else "numbers"
        raise PbflError(
            f"{path}: x is {x.dtype} {x.shape}, this model takes {kind} {('N', *card.input_shape)}"
        )
    if not (np.abs(x) <= np.finfo(np.float32).max).all():
        raise PbflError(
            f"{path}: x holds NaN, infinity or a number beyond float32 (3.4e38); must be finite numbers"
        )
    if card.vocabulary_size and len(x) and not (x.min() >= 0 and x.max() < card.vocabulary_size):
        raise PbflError(f"{path}: x holds {x.min()} to {x.max()}; must be ids 0..{card.vocabulary_size - 1}")
    return x


def _rows(card: Card, path: Path) -> NDArray[Any]:
    if card.images:
        raise PbflError(f"{path} is a table, but this model takes images of shape {card.input_shape}")
    if card.vocabulary_size:
        raise PbflError(f"{path} is a table, but this model takes token ids of shape {card.input_shape}")
    values = features(path, card.columns or None, without=(LABEL, CLIENT))
    if values.shape[1] != math.prod(card.input_shape):
        raise PbflError(
            f"{path} has {values.shape[1]} columns, this model takes {math.prod(card.input_shape)} in the order "
            "used in training"
        )
    return values.reshape(-1, *card.input_shape)


def written(predictions: Sequence[Prediction], labels: Sequence[str], form: str) -> str:
    """Return predictions as text.

    Args:
        predictions: the predictions.
        labels: class names.
        form: ``table`` for people; ``csv`` with a header; ``json``, a list with the probabilities of all classes.
    """
    if form == "json":
        entries = [
            {**asdict(each), "probabilities": dict(zip(labels, each.probabilities, strict=True))}
            for each in predictions
        ]
        return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"
    rows = [("file", "row", "class", "probability")]
    rows += [(p.file, str(p.row) if p.row else "", p.label, f"{p.probability:.6f}") for p in predictions]
    if form == "csv":
        return csv_text(rows)
    width = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(size) for cell, size in zip(row, width, strict=True)).rstrip() + "\n"
        for row in rows
    )
