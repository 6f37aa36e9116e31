"""Files as an exported model reads them, and outputs that are no prediction."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.runs.saved_model import Card
from pbfl_flwr.serving import predict
from pbfl_flwr.serving.exported import Exported


def card(shape: tuple[int, ...], **fields: Any) -> Card:
    one = (1.0,) * shape[0]
    usual: dict[str, Any] = {"images": False, "labels": ("a", "b"), "columns": ()}
    return Card(
        method="local", client="0", architecture="cnn4", round=1, participations=1, num_classes=2, feature_dim=4,
        input_shape=shape, scale=one, shift=one, **{**usual, **fields},
    )  # fmt: skip


def test_an_image_that_is_wider_than_high_is_read_as_it_is(tmp_path: Path) -> None:
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (read,) = predict._image(card((3, 4, 6), images=True), tmp_path / "a.png")
    assert np.array_equal(read, pixels.transpose(2, 0, 1))


def test_rows_of_a_table_take_the_shape_that_the_model_was_trained_with(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,c,d\n1,2,3,4\n5,6,7,8\n")
    rows = predict._rows(card((1, 2, 2), columns=("a", "b", "c", "d")), tmp_path / "t.csv")
    assert rows.tolist() == [[[[1, 2], [3, 4]]], [[[5, 6], [7, 8]]]]


def test_negative_token_ids_are_refused_in_a_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.full((2, 5), -1))
    with pytest.raises(PbflError, match=r"x holds -1 to -1; must be ids 0\.\.9"):
        predict._arrays(card((5,), vocabulary_size=10), tmp_path / "x.npz")


def test_outputs_that_are_not_finite_are_no_prediction() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((len(x), 2), float("nan")), x

    broken: Any = Broken()
    with pytest.raises(PbflError, match="not finite"):
        Exported(card((2,)), broken, {}).probabilities(np.zeros((3, 2)))
