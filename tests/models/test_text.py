"""fastText and TextCNN: parameters, and the features by hand."""

import pytest
import torch
from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models import arrange, build_model, check_models, count_parameters, random_inputs
from pbfl_flwr.task import Task

V, D, L = 50, 6, 9
TEXT = Task(num_classes=4, feature_dim=D, input_shape=(L,), vocabulary_size=V)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("fasttext", V * D + D * D + D),
        # three convolutions D·w·100 + 100 of width 3, 4, 5; 300·D + D
        ("textcnn", V * D + D * 12 * 100 + 300 + 300 * D + D),
    ],
)
def test_body_parameters(name: str, body: int) -> None:
    assert count_parameters(build_model(name, TEXT, 0)) == (body, 4 * D + 4)


def test_fasttext_averages_all_places() -> None:
    model = build_model("fasttext", TEXT, 0).eval()
    table, hidden = model.stages[0].weight, model.neck[2]
    ids = torch.tensor([[3, 7, 7] + [0] * 6])
    expected = (table[3] + 2 * table[7]) / L @ hidden.weight.T + hidden.bias  # padding is zero and is counted
    torch.testing.assert_close(model.features(ids)[0], expected)
    assert torch.equal(model.features(ids.int()), model.features(ids))


def test_textcnn_takes_the_largest_answer_over_all_places() -> None:
    model = build_model("textcnn", TEXT, 0).eval()
    ids = random_inputs(TEXT, 1)
    words = model.stages[0].weight[ids[0]]  # (L, d)
    answers = []
    for conv in model.neck[0].convolutions:
        width = conv.kernel_size[0]
        windows = [words[p : p + width].T for p in range(L - width + 1)]
        scores = torch.stack([(conv.weight * window).sum((1, 2)) + conv.bias for window in windows])
        answers.append(scores.clamp(min=0).max(dim=0).values)
    expected = model.neck[2](torch.cat(answers))
    torch.testing.assert_close(model.features(ids)[0], expected)
    assert isinstance(model.neck[1], nn.Dropout)
    assert model.neck[1].p == 0.8


@pytest.mark.parametrize("name", ["fasttext", "textcnn"])
def test_the_embedding_of_padding_stays_zero(name: str) -> None:
    model = build_model(name, TEXT, 0).train()
    ids = random_inputs(TEXT, 4)
    ids[:, 5:] = 0
    model(ids).square().sum().backward()
    embedding = model.stages[0]
    assert not embedding.weight[0].any()
    assert not embedding.weight.grad[0].any()
    assert embedding.weight.grad[ids[0, 0]].any()


@pytest.mark.parametrize("name", ["fasttext", "textcnn"])
def test_reduced_precision_hands_on_float32(name: str) -> None:
    plain, reduced = (build_model(name, TEXT, 0).eval() for _ in range(2))
    arrange(reduced, "channels-last", "bfloat16")
    ids = random_inputs(TEXT, 4)
    with torch.no_grad():
        found = reduced.features(ids)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, plain.features(ids), atol=0.05, rtol=0.05)


def test_text_models_refuse_numbers_and_images_refuse_text() -> None:
    with pytest.raises(
        PbflError, match=r"'fasttext', first layer: expected token ids .* found numbers of shape"
    ):
        check_models("text-2", Task(4, D, (L,)))
    with pytest.raises(PbflError, match=r"'textcnn': expected 5 tokens or more, found 4"):
        check_models("textcnn", Task(4, D, (4,), V))
    with pytest.raises(
        PbflError, match=r"'resnet4', first layer: expected images .* found input shape \(9,\)"
    ):
        check_models("resnet4", TEXT)
    check_models("text-2", TEXT)
