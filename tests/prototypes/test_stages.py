import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.prototypes.stages import default_aps_scale, scale_by_counts


def test_scale_by_counts_by_hand():
    scaled = scale_by_counts(torch.tensor([[1.0, -2.0], [0.5, 0.0], [0.0, 0.0]]), torch.tensor([3, 4, 0]))
    assert scaled.tolist() == [[3, -6], [2, 0], [0, 0]]
    assert scaled.dtype == torch.float32


@pytest.mark.parametrize(
    ("num_classes", "num_examples", "published"),
    [(10, 60_000, 1.5e-4), (100, 60_000, 1.5e-3), (200, 110_000, 1.636e-3)],  # Tiny: published 1.5e-3
)
def test_default_aps_scale_is_near_the_published_constants(num_classes, num_examples, published):
    assert default_aps_scale(num_classes, num_examples) == pytest.approx(published, rel=1e-3)


def test_default_aps_scale_refuses_no_examples():
    with pytest.raises(PbflError, match="number of examples n is 0"):
        default_aps_scale(10, 0)
