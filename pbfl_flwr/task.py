"""What all clients of one federation agree on."""

import math
from dataclasses import dataclass

from pbfl_flwr.errors import PbflError

MAX_AXES = 4  # of an input that is read from a file


MAX_SIZE = 10**6  # of K and V
MAX_WIDTH = 65_536  # of d
MAX_VALUES = 10**8  # of one input


@dataclass(frozen=True)
class Task:
    """What all clients agree on; everything else (architecture, data, device) may differ between clients.

    Attributes:
        num_classes: K, the number of classes of the whole federation; labels are 0..K-1.
        feature_dim: d, the width of the features (penultimate activations) of every model.
        input_shape: shape of one input without the batch axis, e.g. (3, 32, 32).
        vocabulary_size: V if inputs are token ids 0..V-1; 0 if they are numeric.

    Raises:
        PbflError: if K < 2, d < 1, V < 0 or a side of the input is not positive, or one is too large to be true.
    """

    num_classes: int
    feature_dim: int
    input_shape: tuple[int, ...]
    vocabulary_size: int = 0

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise PbflError(f"num_classes is {self.num_classes}; a classification task needs at least 2")
        if self.feature_dim < 1:
            raise PbflError(f"feature-dim is {self.feature_dim}; must be a whole number from 1")
        if not self.input_shape or min(self.input_shape) < 1:
            raise PbflError(f"input shape {self.input_shape} has an axis of length 0")
        if self.vocabulary_size < 0:
            raise PbflError(f"a vocabulary of {self.vocabulary_size} tokens; must be a whole number from 0")
        # A task may come from a device or a file: nothing is allocated for one that nobody has.
        for what, size, most in (
            ("num_classes", self.num_classes, MAX_SIZE),
            ("feature-dim", self.feature_dim, MAX_WIDTH),
            ("vocabulary size", self.vocabulary_size, MAX_SIZE),
            ("number of axes of an input", len(self.input_shape), 2 * MAX_AXES),
            ("number of values of an input", math.prod(self.input_shape[: 2 * MAX_AXES]), MAX_VALUES),
        ):
            if size > most:
                raise PbflError(
                    f"{what} is {size if size < 10**18 else 'above 10^18'}; must be at most {most}"
                )
