"""FedCPD's contrast by hand; tests/prototypes/test_regularizer.py has what holds for all losses on prototypes."""

import math

import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods.fedcpd.losses import contrast
from tests.prototypes.test_regularizer import LABELS, PRESENT, PROTOTYPES, features


def test_contrast_is_cross_entropy_over_cosines_of_available_classes():
    z = torch.tensor([[1.0, 0.0], [3.0, 3.0], [5.0, 1.0]])
    labels = torch.tensor([0, 1, 2])  # class 2 has no prototype: its sample adds nothing
    # cosines with (1,0) and (0,1): (1, 0) and (√½, √½); τ = 0.5
    expected = (math.log(1 + math.exp(-2)) + math.log(2)) / 3
    assert float(contrast(z, labels, PROTOTYPES, PRESENT, 0.5)) == pytest.approx(expected, rel=1e-5)
    longer = PROTOTYPES * torch.tensor([[10.0], [0.1], [1.0]])
    torch.testing.assert_close(
        contrast(z, labels, longer, PRESENT, 0.5), contrast(z, labels, PROTOTYPES, PRESENT, 0.5)
    )


def test_contrast_with_one_class_is_zero_and_zero_norms_are_harmless():
    only = torch.tensor([False, True, False])
    z = features()
    value = contrast(z, LABELS, PROTOTYPES, only, 0.5)
    assert float(value.detach()) == 0
    assert torch.isfinite(torch.autograd.grad(value, z)[0]).all()
    zero = torch.zeros(2, 2, requires_grad=True)
    value = contrast(zero, torch.tensor([0, 1]), PROTOTYPES * 0, PRESENT, 0.5)
    assert float(value.detach()) == pytest.approx(math.log(2))
    assert torch.isfinite(torch.autograd.grad(value, zero)[0]).all()


def test_user_errors_are_named():
    with pytest.raises(PbflError, match="temperature of the contrastive loss is 0"):
        contrast(features(), LABELS, PROTOTYPES, PRESENT, 0)
