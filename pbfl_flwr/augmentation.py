"""Random crops and flips of training images: drawn for a whole epoch at once, cut where the samples lie.

As torchvision's ``RandomCrop(32, padding=4)`` and ``RandomHorizontalFlip()`` do it in the CIFAR loaders of many papers'
code. Only what :func:`pbfl_flwr.training.fit` trains on is changed: prototypes that are collected after training,
FedALA's mixing weights and all scores are of the images as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pbfl_flwr.config import TrainingSettings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.task import Task


def check_augmentation(kinds: str, task: Task) -> None:
    """Check that inputs are images if they are to be cropped or flipped.

    Raises:
        PbflError: saying what they are.
    """
    images = len(task.input_shape) == 3 and min(task.input_shape[1:]) > 1 and not task.vocabulary_size
    if kinds and not images:
        what = "token ids" if task.vocabulary_size else "numbers"
        raise PbflError(
            f"augmentation = '{kinds}': inputs are {what} of shape {task.input_shape}; allowed is '' "
            "where they are no images (channels, height, width)"
        )


class Augmentation:
    """The changes of one pass over n samples, each sample its own.

    A crop is a window of the image's own size in the image with an eighth of each side added around it, of the value 0,
    which is black in 8-bit images: 4 pixels at 32x32. A flip mirrors left and right, in half of the cases.

    Args:
        settings: with ``augmentation``.
        images: (n, C, H, W), as they are stored.
        random: draws the changes, on the CPU.
    """

    def __init__(self, settings: TrainingSettings, images: Tensor, random: torch.Generator) -> None:
        kinds = settings.augmentations
        count, (height, width) = len(images), images.shape[2:]
        self._margins = [(side + 4) // 8 if "crop" in kinds else 0 for side in (height, width)]
        starts = [torch.randint(0, 2 * margin + 1, (count, 1), generator=random) for margin in self._margins]
        mirrored = torch.randint(0, 2 if "flip" in kinds else 1, (count, 1), generator=random).bool()
        columns = torch.arange(width)
        # (n, H) and (n, W), in the image with its margins
        self._rows = (starts[0] + torch.arange(height)).to(images.device)
        self._columns = (starts[1] + torch.where(mirrored, columns.flip(0), columns)).to(images.device)

    def __call__(self, images: Tensor, index: Tensor | slice) -> Tensor:
        """Return the samples ``index``, which are ``images`` (B, C, H, W), changed."""
        down, right = self._margins
        padded = functional.pad(images, (right, right, down, down))
        rows, columns = self._rows[index, :, None], self._columns[index, None, :]
        places = (rows * padded.shape[3] + columns).flatten(1)[:, None]  # (B, 1, H·W)
        return padded.flatten(2).gather(2, places.expand(-1, images.shape[1], -1)).view_as(images)
