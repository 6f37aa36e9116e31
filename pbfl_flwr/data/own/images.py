"""Decode image files into one uint8 array.

Pillow is imported where it is used: most devices need none of its 5 MB, in a process for every message.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.data.cache import Allocate
from pbfl_flwr.data.contract import Rows
from pbfl_flwr.errors import PbflError

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Of image files, as for torchvision's ``ImageFolder``."""
_UNREADABLE = (OSError, SyntaxError, ValueError)  # what Pillow raises of a damaged file


@contextmanager
def small_enough(where: Path) -> Iterator[None]:
    """Refuse images of more than Pillow's ``MAX_IMAGE_PIXELS`` as they are opened, before they are decoded.

    Raises:
        PbflError: naming where the image is, its size and the bound.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        size = str(error).partition(" exceeds")[0]  # "Image size (169000000 pixels)"
        raise PbflError(
            f"{where}: {size}; must be at most {Image.MAX_IMAGE_PIXELS} pixels, make it smaller first"
        ) from error


def open_image(path: Path) -> Image.Image:
    """Return the image of a file as RGB, with its EXIF orientation applied.

    Raises:
        PbflError: if it cannot be read, or is too large.
    """
    from PIL import Image, ImageOps

    try:
        with small_enough(path), Image.open(path) as image:
            image.load()
            with suppress(SyntaxError):  # damaged EXIF data in a readable image
                ImageOps.exif_transpose(image, in_place=True)
            return _as_mode(_eight_bits(image, str(path)), "RGB")
    except _UNREADABLE as error:
        raise PbflError(f"{path} is not a readable image: {error}") from error


def _as_mode(image: Image.Image, mode: str) -> Image.Image:
    return image if image.mode == mode else image.convert(mode)  # which would copy it


def _eight_bits(image: Image.Image, where: str) -> Image.Image:
    """Convert an image to values 0..255: of 16 bits the high byte, as Pillow does for colour images.

    Raises:
        PbflError: if the range of its values is not known.
    """
    from PIL import Image

    # Pillow scales the values of a PGM with more than 8 bits to 65535.
    sixteen = image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM")
    if image.mode in ("I", "F") and not sixteen:
        raise PbflError(
            f"{where} is an image of mode {image.mode}, whose value range is unknown; must be 8 or 16 bits "
            "per channel"
        )
    if sixteen:  # convert() would clip at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    # From RGBA the colours are the same, without Pillow's warning.
    return image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image


def decode_images(
    samples: Iterable[tuple[Image.Image, int]],
    total: int,
    allocate: Allocate,
    side: tuple[int, int] | None,
    where: Path,
    channels: int | None = 3,
) -> tuple[NDArray[Any], Rows, tuple[str, ...]]:
    """Decode images as RGB or grey, all of one size.

    Args:
        samples: (image, label) in the order of the rows.
        total: their number N.
        allocate: creates the array of inputs.
        side: (width, height) in pixels; None: the size of the first image. Other images are resized with PIL's
            bilinear filter, as by torchvision's ``Resize``, without keeping their aspect ratio.
        where: named in errors.
        channels: 3 is RGB, 1 is grey; None: grey if the first image is.

    Returns:
        inputs (N, channels, height, width) uint8, labels (N,), and notes if images were resized with ``side`` None, or
        made grey with ``channels`` None.

    Raises:
        PbflError: naming an image that cannot be read, or whose range of values is not known.
    """
    from PIL import Image

    labels = np.empty(total, dtype=np.int64)
    inputs: NDArray[Any] | None = None
    row, resized, greyed, target, depth = 0, 0, 0, side, channels
    try:
        for image, label in samples:
            labels[row] = label
            grey = Image.getmodebase(image.mode) == "L"  # also with transparency, or of 16 bits
            depth = depth or (1 if grey else 3)
            greyed += depth == 1 and not grey
            converted = _as_mode(
                _eight_bits(image, f"{where}: number {row + 1}"), "L" if depth == 1 else "RGB"
            )
            target = target or converted.size
            if inputs is None:
                inputs = allocate((total, depth, target[1], target[0]), np.uint8)
            if converted.size != target:
                converted = converted.resize(target, Image.Resampling.BILINEAR)
                resized += 1
            inputs[row] = np.asarray(converted).reshape(target[1], target[0], depth).transpose(2, 0, 1)
            del image, converted  # before the next one is decoded
            row += 1
    except _UNREADABLE as error:
        raise PbflError(f"{where}: number {row + 1} is not a readable image: {error}") from error
    if inputs is None or target is None:
        raise PbflError(f"no image in {where}")
    notes: tuple[str, ...] = ()
    if side is None and resized:
        size = f"{target[0]}x{target[1]}"
        notes = (f"{resized} of {total} images were resized to {size}, the size of the first image",)
    if channels is None and greyed:
        notes = (*notes, f"{greyed} of {total} images lost their colours, since the first image is grey")
    return inputs, labels, notes
