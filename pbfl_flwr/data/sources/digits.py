"""1,797 real handwritten digits that scikit-learn ships; nothing is downloaded.

Source: scikit-learn ``load_digits``, the test part of the UCI "Optical Recognition of Handwritten Digits". The
8x8 images with values 0..16 are scaled to uint8 0..255 and every pixel is repeated to 2x2. The resulting 1x16x16
inputs suit every image model but vit-b-32, including those with two unpadded 5x5 convolutions.
"""

import numpy as np

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.sources.files import check_no_path
from pbfl_flwr.util.extras import require


def digits(settings: DataSettings) -> Pool:
    """Return 1,797 images, 1x16x16 uint8, 10 classes, no official test part.

    Raises:
        PbflError: if data-dir is set.
    """
    check_no_path(settings)
    # Cached, since importing scikit-learn takes a second in every process of a run and for every message.
    return cached(settings, (), _decode)


def _decode(allocate: Allocate) -> Pool:
    require("dataset 'digits'", "sklearn")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # (N, 8, 8), values were 0..16
    images = images.repeat(2, axis=1).repeat(2, axis=2)[:, None]
    labels = bunch.target.astype(np.int64)
    return Pool(images, labels, tuple("0123456789"), num_train=len(labels))
