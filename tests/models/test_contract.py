"""Every model of the table answers features, then head. A new model needs no edit here if it takes images."""

from functools import partial
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import nn

from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import (
    SplitModel,
    body_names,
    count_parameters,
    has_batch_norm,
    head_names,
    random_inputs,
)
from pbfl_flwr.models.cpu_convolutions import optimize_layout
from pbfl_flwr.models.precision import set_precision
from pbfl_flwr.models.registry import ARCHITECTURES
from tests.models.kinds import (
    EXAMPLES,
    LONGER,
    TEXTS,
    VISION_TRANSFORMERS,
    WINDOWS,
    WITHOUT_PLACES,
    is_one_of,
    shapes,
    takes_images,
    task_of,
    width,
)

B, K = 3, 7
NAMES = [name for name in EXAMPLES if name not in LONGER]
CASES = [(name, shape) for name in NAMES for shape in shapes(name)]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_features_then_head(name: str, shape: tuple[int, ...]) -> None:
    d = width(name, 33)
    task = task_of(name, d, shape)
    model = build_model(name, task, seed=1).eval()
    x = random_inputs(task, B, seed=2)

    with torch.no_grad():
        features = model.features(x)
        logits = model(x)
        maps = model.feature_maps(x)
        from_maps = model.neck(maps[-1] if maps else x)

    assert isinstance(model, SplitModel)
    assert (model.feature_dim, model.num_classes) == (d, K)
    assert features.shape == (B, d)
    assert logits.shape == (B, K)
    assert torch.isfinite(logits).all()
    assert torch.equal(logits, model.head(features))
    assert torch.equal(features, from_maps)
    least = 0 if name in VISION_TRANSFORMERS else 1 if is_one_of(name, TEXTS | WITHOUT_PLACES) else 2
    assert len(maps) == len(model.stages) >= least
    for before, after in pairwise(maps):
        assert after.dim() == before.dim()
        assert after.shape[2:].numel() <= before.shape[2:].numel(), "maps must not grow"
    # A stage that works in place would change the map before it.
    with torch.no_grad():
        current = x.clone()
        for stage, result in zip(model.stages, maps, strict=True):
            current = stage(current.clone())
            assert torch.equal(current, result)


@pytest.mark.parametrize("name", [*NAMES, "cnn2+40", "efficientnet-b0+40", "lstm+40"])
def test_every_parameter_learns_and_features_stay_as_they_were(name: str) -> None:
    task = task_of(name, 512, shapes(name)[-1])
    model = build_model(name, task, seed=1).train()
    x = random_inputs(task, 4, seed=2)

    features = model.features(x)
    kept = features.detach().clone()
    logits = model.head(features)
    assert torch.equal(features, kept), "a head that drops in place would change the features"
    (nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3])) + features.square().mean()).backward()

    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_names_tell_body_and_head_apart(name: str) -> None:
    d = width(name, 20)
    with torch.device("meta"):
        model = build_model(name, task_of(name, d, shapes(name)[0]), seed=1)

    parameters = dict(model.named_parameters())
    assert sorted(body_names(model) + head_names(model)) == sorted(parameters)
    # The head is one linear layer with bias: K·d + K numbers.
    assert sorted(tuple(parameters[n].shape) for n in head_names(model)) == [(K,), (K, d)]
    assert {k for k in model.state_dict() if k.startswith("head.")} == set(head_names(model))
    head = {id(p) for p in model.head.parameters()}
    assert {n for n, p in parameters.items() if id(p) in head} == set(head_names(model))
    assert count_parameters(model)[1] == K * d + K
    assert sum(count_parameters(model)) == sum(p.numel() for p in model.parameters())
    plain = name in VISION_TRANSFORMERS or is_one_of(name, {"cnn2", "cnn4"})
    normalised = takes_images(name) and not plain
    assert has_batch_norm(model) == any("running_mean" in key for key in model.state_dict()) == normalised


@pytest.mark.parametrize("name", [name for name in EXAMPLES if is_one_of(name, TEXTS | WINDOWS)])
def test_reduced_precision_hands_on_float32(name: str) -> None:
    task = task_of(name, width(name, 6), shapes(name)[-1])
    plain, reduced = (build_model(name, task, seed=0).eval() for _ in range(2))
    set_precision(optimize_layout(reduced, "channels-last"), "bfloat16")
    x = random_inputs(task, 4)
    with torch.no_grad():
        features = reduced.features(x)
        assert features.dtype == torch.float32
        torch.testing.assert_close(features, plain.features(x), atol=0.05, rtol=0.05)


def test_summaries_are_first_lines_of_the_builders() -> None:
    for name, entry in ARCHITECTURES.items():
        builder = getattr(import_module(f"pbfl_flwr.models.{entry.module}"), name.replace("-", "_"))
        if not isinstance(builder, partial):  # which has no docstring of its own
            assert (builder.__doc__ or "").strip().partition("\n")[0] == entry.summary
        assert entry.summary.endswith(".")
    assert len({entry.summary for entry in ARCHITECTURES.values()}) == len(ARCHITECTURES)
