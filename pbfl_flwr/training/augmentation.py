"""Random crops and flips of training images: drawn once per epoch, applied on the device that holds the samples.

Equivalent to torchvision's ``RandomCrop(32, padding=4)`` and ``RandomHorizontalFlip()`` in the CIFAR loaders of many
papers' code. Only the inputs of :func:`pbfl_flwr.training.loop.fit` are augmented: prototypes collected after training,
FedALA's mixing weights and all scores use the original images.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pbfl_flwr.config import TrainingSettings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import Task


def check_augmentation(kinds: str, task: Task) -> None:
    """Check that inputs are images if augmentation is on.

    Raises:
        PbflError: if they are not; the message says what they are.
    """
    images = len(task.input_shape) == 3 and min(task.input_shape[1:]) > 1 and not task.vocabulary_size
    if kinds and not images:
        what = "token ids" if task.vocabulary_size else "numbers"
        raise PbflError(
            f"augmentation = '{kinds}': inputs are {what} of shape {task.input_shape}; without "
            "images (channels, height, width) it must be ''"
        )


class Augmentation:
    """The augmentation of one epoch over n samples, drawn independently for each sample.

    A crop is a random window of the image's own size in the image zero-padded by an eighth of its side (4 pixels at
    32x32; 0 is black in 8-bit images). A flip mirrors left and right with probability 1/2.

    Args:
        settings: with ``augmentation``.
        images: (n, C, H, W), as they are stored.
        random: CPU generator from which crops and flips are drawn.
    """

    def __init__(self, settings: TrainingSettings, images: Tensor, random: torch.Generator) -> None:
        kinds = settings.augmentations
        count, (height, width) = len(images), images.shape[2:]
        self._margins = [(side + 4) // 8 if "crop" in kinds else 0 for side in (height, width)]
        starts = [torch.randint(0, 2 * margin + 1, (count, 1), generator=random) for margin in self._margins]
        mirrored = torch.randint(0, 2 if "flip" in kinds else 1, (count, 1), generator=random).bool()
        columns = torch.arange(width)
        # (n, H) and (n, W): source rows and columns in the padded image
        self._rows = (starts[0] + torch.arange(height)).to(images.device)
        self._columns = (starts[1] + torch.where(mirrored, columns.flip(0), columns)).to(images.device)

    def __call__(self, images: Tensor, index: Tensor | slice) -> Tensor:
        """Return ``images`` (B, C, H, W), the samples at ``index``, augmented."""
        down, right = self._margins
        padded = functional.pad(images, (right, right, down, down))
        rows, columns = self._rows[index, :, None], self._columns[index, None, :]
        places = (rows * padded.shape[3] + columns).flatten(1)[:, None]  # (B, 1, H·W)
        return padded.flatten(2).gather(2, places.expand(-1, images.shape[1], -1)).view_as(images)
