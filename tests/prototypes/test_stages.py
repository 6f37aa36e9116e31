import torch

from pbfl_flwr.prototypes.stages import scale_by_counts


def test_scale_by_counts_by_hand():
    scaled = scale_by_counts(torch.tensor([[1.0, -2.0], [0.5, 0.0], [0.0, 0.0]]), torch.tensor([3, 4, 0]))
    assert scaled.tolist() == [[3, -6], [2, 0], [0, 0]]
    assert scaled.dtype == torch.float32
