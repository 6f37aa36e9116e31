"""Model card: what is needed besides the weights to use a trained network outside the federation."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pbfl_flwr.task import MAX_AXES, MAX_VALUES, Task


class Card(BaseModel):
    """A client's network: its origin, inputs and outputs.

    Attributes:
        method, client, architecture: as in the run; the client's number or name, "" for the server's network.
        natural_id: of the person or device whose samples a simulated client has; "" if there is none.
        round, participations: the last round in which it trained, and the number of rounds it trained in.
        num_classes, feature_dim, input_shape: K, d and the shape of one input.
        labels: names of the K classes.
        columns: names of the features, for tabular data.
        vocabulary_size: V if inputs are token ids 0..V-1, else 0.
        images: True for uint8 images; otherwise inputs are token ids if V > 0, else float32.
        scale, shift: one number per channel (the first axis): the network's input is x·scale + shift.
        unit_features: whether the head expects features of unit length.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    method: str
    client: str
    architecture: str
    round: int = Field(ge=0)
    participations: int = Field(ge=0)
    num_classes: int = Field(ge=2, le=10**6)
    feature_dim: int = Field(ge=1, le=65_536)
    input_shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, max_length=MAX_AXES)
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    vocabulary_size: int = Field(default=0, ge=0, le=10**6)
    images: bool
    scale: tuple[float, ...]
    shift: tuple[float, ...]
    unit_features: bool = False
    natural_id: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.labels) != self.num_classes:
            raise ValueError(f"{len(self.labels)} labels for {self.num_classes} classes")
        if not len(self.scale) == len(self.shift) == self.input_shape[0]:
            raise ValueError("scale and shift must have one number per channel")
        if math.prod(self.input_shape) > MAX_VALUES:
            raise ValueError(f"inputs have more than {MAX_VALUES} values")
        if self.columns and len(self.columns) != math.prod(self.input_shape):
            raise ValueError("there must be as many columns as an input has values")
        return self

    @property
    def task(self) -> Task:
        """K, d and the shape of an input."""
        return Task(self.num_classes, self.feature_dim, self.input_shape, self.vocabulary_size)


def fault(error: ValidationError) -> str:
    """Return the first validation error of a card in one line."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'card'}: {problem['msg']}"
