import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pbfl_flwr.methods.fedcpd.losses import alignment_loss, contrast
from pbfl_flwr.prototypes.regularizer import proportional_weights, prototype_regularizer

PROTOTYPES = torch.tensor([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]])
PRESENT = torch.tensor([True, True, False])  # the row of class 2 is no prototype
LABELS = torch.tensor([0, 0, 1, 2])
BETA = torch.tensor([1.0, 0.5, 0.25])


def features():
    # errors: (3, 4), (-1, 0), (0, -2), and none for class 2
    return torch.tensor([[4.0, 4.0], [0.0, 0.0], [0.0, 0.0], [7.0, 7.0]], requires_grad=True)


@pytest.mark.parametrize(
    ("form", "per_class", "weights", "expected"),
    [
        ("mse", False, None, (25 + 1 + 4 + 0) / (4 * 2)),
        ("mse", False, BETA, (25 + 1 + 0.5 * 4) / (4 * 2)),
        ("mse", True, None, ((25 + 1) / 2 + 4 + 0) / 2 / 3),  # three classes in the batch
        ("mse", True, BETA, ((25 + 1) / 2 + 0.5 * 4) / 2 / 3),
        ("l2", False, None, (5 + 1 + 2 + 0) / 4),
        ("l2", False, BETA, (5 + 1 + 0.5 * 2) / 4),
        ("l2", True, None, math.hypot(1, 2) + 2),  # class 0: mean (2, 2) to (1, 0)
        ("l2", True, BETA, math.hypot(1, 2) + 0.5 * 2),
    ],
)
def test_regularizer_by_hand(form, per_class, weights, expected):
    z = features()
    value = prototype_regularizer(
        z, LABELS, PROTOTYPES, PRESENT, form=form, per_class=per_class, class_weights=weights
    )
    assert float(value.detach()) == pytest.approx(expected, rel=1e-6)
    (gradient,) = torch.autograd.grad(value, z)
    assert torch.isfinite(gradient).all()
    assert gradient[3].tolist() == [0, 0]
    assert gradient[0].abs().sum() > 0


def test_prototypes_get_no_gradient():
    prototypes = PROTOTYPES.clone().requires_grad_()
    z = features()
    torch.autograd.backward(
        prototype_regularizer(z, LABELS, prototypes, PRESENT) + contrast(z, LABELS, prototypes, PRESENT, 0.5)
    )
    assert prototypes.grad is None


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(["mse", "l2"]), st.booleans(), st.booleans())
def test_losses_and_gradients_are_finite_whichever_classes_are_absent(
    seed, form, per_class, on_the_prototype
):
    random = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(4, 3, generator=random)
    present = torch.rand(4, generator=random) < 0.5
    prototypes[~present] = float("nan")
    labels = torch.randint(4, (6,), generator=random)
    z = torch.randn(6, 3, generator=random)
    if on_the_prototype:
        z = torch.where(present[labels][:, None], prototypes[labels], z)
    z.requires_grad_()
    counts = torch.randint(0, 9, (4,), generator=random)
    for value in (
        prototype_regularizer(
            z,
            labels,
            prototypes,
            present,
            form=form,
            per_class=per_class,
            class_weights=proportional_weights(counts),
        ),
        contrast(z, labels, prototypes, present, 0.1),
        alignment_loss(z, labels, prototypes, present),
    ):
        assert torch.isfinite(value)
        (gradient,) = torch.autograd.grad(value, z)
        assert torch.isfinite(gradient).all()
        assert (gradient[~present[labels]] == 0).all()


def test_no_prototype_at_all_is_a_zero_with_a_graph():
    nobody = torch.zeros(3, dtype=torch.bool)
    for loss in (
        lambda z: prototype_regularizer(z, LABELS, PROTOTYPES, nobody),
        lambda z: prototype_regularizer(z, LABELS, PROTOTYPES, nobody, form="l2", per_class=True),
        lambda z: contrast(z, LABELS, PROTOTYPES, nobody, 0.5),
        lambda z: alignment_loss(z, LABELS, PROTOTYPES, nobody),
    ):
        z = features()
        value = loss(z)
        assert float(value.detach()) == 0
        assert torch.equal(torch.autograd.grad(value, z)[0], torch.zeros(4, 2))


def test_proportional_weights_by_hand():
    weights = proportional_weights(torch.tensor([50, 0, 100, 1]))
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.0, 1.0, 0.01]))
    assert proportional_weights(torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]
    assert proportional_weights(torch.tensor([0, 7])).tolist() == [0, 1]
