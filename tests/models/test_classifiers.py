"""Classifiers with hidden layers: ``resnet8+512-256``."""

import pytest
import torch
from torch import nn

from pbfl_flwr.methods.averaging import shared_parameters
from pbfl_flwr.models.build import build_model, check_models
from pbfl_flwr.models.contract import count_parameters, head_names, is_deterministic, random_inputs
from pbfl_flwr.task import Task
from tests.models.kinds import shapes, task_of, width

K, D = 7, 20
GREY = (1, 28, 28)


@pytest.mark.parametrize(
    "name", ["cnn2", "efficientnet-b0", "resnet8", "mlp5", "har-gru", "fasttext", "transformer-8-2"]
)
def test_features_then_a_deeper_head(name: str) -> None:
    d = width(name, D)
    task = task_of(name, d, shapes(name)[0])
    check_models(f"{name}+17-9", task)
    model, linear = build_model(f"{name}+17-9", task, seed=1), build_model(name, task, seed=1)
    x = random_inputs(task, 64, seed=2)

    # d·17 + 17, 17·9 + 9, 9·K + K
    assert count_parameters(model) == (count_parameters(linear)[0], d * 17 + 17 + 17 * 9 + 9 + 9 * K + K)
    assert [n for n, p in model.named_parameters() if n.startswith("head.")] == head_names(model)
    others = {key: tensor for key, tensor in linear.state_dict().items() if not key.startswith("head.")}
    same = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith("head.")}
    assert list(same) == list(others)
    assert all(torch.equal(same[key], others[key]) for key in same), "the body begins with other weights"

    model.eval()
    with torch.no_grad():
        features = model.features(x)
        logits = model(x)
        layers = [layer for layer in model.head.children() if isinstance(layer, nn.Linear)]
        hidden = layers[1](layers[0](features).relu()).relu()
        assert torch.equal(logits, layers[2](hidden))
    assert float(logits.min()) < 0 < float(logits.max()), "logits end in no ReLU"
    assert is_deterministic(model) == is_deterministic(linear)


def test_the_same_classifier_travels_under_the_same_names_with_and_without_dropout() -> None:
    task = Task(num_classes=10, feature_dim=50, input_shape=GREY)
    with_dropout, without = (
        shared_parameters(build_model(f"{name}+8-6", task, 0), "head") for name in ("cnn2", "cnn4")
    )
    assert (
        list(with_dropout)
        == list(without)
        == [f"head.{n}.{leaf}" for n in range(3) for leaf in ("weight", "bias")]
    )
    assert [tuple(t.shape) for t in without.values()] == [(8, 50), (8,), (6, 8), (6,), (10, 6), (10,)]
    assert [t.shape for t in with_dropout.values()] == [t.shape for t in without.values()]
