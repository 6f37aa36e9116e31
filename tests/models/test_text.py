"""Networks for texts: the features by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.build import build_model, check_models
from pbfl_flwr.models.contract import random_inputs
from pbfl_flwr.seeds import seeded
from pbfl_flwr.task import Task

V, D, L = 50, 6, 9
TEXT = Task(num_classes=4, feature_dim=D, input_shape=(L,), vocabulary_size=V)


def test_fasttext_averages_all_places() -> None:
    model: Any = build_model("fasttext", TEXT, 0).eval()
    table, hidden = model.stages[0].weight, model.neck[2]
    ids = torch.tensor([[3, 7, 7] + [0] * 6])
    expected = (table[3] + 2 * table[7]) / L @ hidden.weight.T + hidden.bias  # padding is zero and is counted
    torch.testing.assert_close(model.features(ids)[0], expected)
    assert torch.equal(model.features(ids.int()), model.features(ids))


def test_textcnn_takes_the_largest_answer_over_all_places() -> None:
    model: Any = build_model("textcnn", TEXT, 0).eval()
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


def test_logistic_regression_averages_all_places() -> None:
    model: Any = build_model("text-logistic", TEXT, 0).eval()
    table = model.stages[0].weight
    result = model.features(torch.tensor([[3, 7, 7] + [0] * 6]))
    torch.testing.assert_close(result[0], (table[3] + 2 * table[7]) / L)


def padded(*texts: list[int], length: int = L) -> Tensor:
    return torch.tensor([text + [0] * (length - len(text)) for text in texts])


def lstm_by_hand(layer: Any, words: Tensor) -> Tensor:
    """Return the output at every step, (length, d)."""
    state = cell = torch.zeros(D)
    steps = []
    for word in words:
        gates = layer.weight_ih_l0 @ word + layer.bias_ih_l0 + layer.weight_hh_l0 @ state + layer.bias_hh_l0
        taken, kept, new, shown = gates.split(D)
        cell = kept.sigmoid() * cell + taken.sigmoid() * new.tanh()
        state = shown.sigmoid() * cell.tanh()
        steps.append(state)
    return torch.stack(steps)


def gru_by_hand(layer: Any, words: Tensor) -> Tensor:
    """Return the output at every step, (length, d)."""
    state = torch.zeros(D)
    steps = []
    for word in words:
        of_word = (layer.weight_ih_l0 @ word + layer.bias_ih_l0).split(D)
        of_state = (layer.weight_hh_l0 @ state + layer.bias_hh_l0).split(D)
        reset, update = ((of_word[gate] + of_state[gate]).sigmoid() for gate in range(2))
        state = (1 - update) * (of_word[2] + reset * of_state[2]).tanh() + update * state
        steps.append(state)
    return torch.stack(steps)


WORDS = [1, 7, 0, 9, 7, 4]  # a zero within a text is no padding behind it


@pytest.mark.parametrize(("name", "layer_by_hand"), [("lstm", lstm_by_hand), ("gru", gru_by_hand)])
def test_two_recurrent_layers_by_hand(name: str, layer_by_hand: Any) -> None:
    model: Any = build_model(name, TEXT, 0).eval()
    stage = model.stages[0]
    first, second = stage.layers
    expected = layer_by_hand(second, layer_by_hand(first, stage.embedding.weight[WORDS]))[-1]
    torch.testing.assert_close(
        model.features(padded(WORDS, [5]))[0], expected.relu() if name == "lstm" else expected
    )
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.2, 0.2]


def test_bilstm_by_hand() -> None:
    model: Any = build_model("bilstm", TEXT, 0).eval()
    stage = model.stages[0]
    words = stage.embedding.weight[WORDS]
    forwards = lstm_by_hand(stage.forwards, words)[-1]
    backwards = lstm_by_hand(stage.backwards, words.flip(0))[-1]
    expected = model.neck(torch.cat([forwards, backwards]))
    torch.testing.assert_close(model.features(padded(WORDS, [5]))[0], expected)


def test_transformer_by_hand() -> None:
    """Two heads of three values, one layer, post-norm, for the first place alone."""
    model: Any = build_model("transformer-2-1", TEXT, 0).eval()
    stage = model.stages[0]
    layer = stage.layers.layers[0]
    waves = torch.tensor(
        [
            [wave(p / 10_000 ** (2 * i / D)) for i in range(D // 2) for wave in (math.sin, math.cos)]
            for p in range(len(WORDS))
        ]
    )
    words = stage.embedding.weight[WORDS] * D**0.5 + waves
    attention = layer.self_attn
    queries, keys, values = (words @ attention.in_proj_weight.T + attention.in_proj_bias).split(D, dim=1)
    heads = []
    seen = [place for place, word in enumerate(WORDS) if word != 0]
    for part in (slice(0, 3), slice(3, 6)):
        scores = keys[seen, part] @ queries[0, part] / 3**0.5
        heads.append(scores.softmax(0) @ values[seen, part])
    state = layer.norm1(words[0] + attention.out_proj(torch.cat(heads)))
    expected = layer.norm2(state + layer.linear2(layer.linear1(state).relu()))
    torch.testing.assert_close(model.features(padded(WORDS, [5]))[0], expected)
    assert (layer.linear1.out_features, layer.dropout.p, stage.dropout.p) == (2048, 0.1, 0.1)
    assert stage.embedding.weight.abs().max() <= 0.1


STATES = ["lstm", "gru", "bilstm", "transformer-3-2"]


@pytest.mark.parametrize("name", STATES)
def test_features_do_not_depend_on_how_far_a_text_is_padded(name: str) -> None:
    short, long = (build_model(name, Task(4, D, (length,), V), 0).eval() for length in (L, 3 * L))
    texts = [1, 7, 9], [1, *range(2, 2 + L - 1)]
    torch.testing.assert_close(short.features(padded(*texts)), long.features(padded(*texts, length=3 * L)))


@pytest.mark.parametrize("name", STATES)
def test_a_text_of_padding_alone_has_finite_features_and_gradients(name: str) -> None:
    model = build_model(name, TEXT, 0).train()
    model(padded([], [1, 2])).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", STATES)
def test_dropout_draws_from_the_seed(name: str) -> None:
    model = build_model(name, TEXT, 0).train()
    ids = random_inputs(TEXT, 4)
    result = []
    for seed in (1, 1, 2):
        with seeded(seed):
            result.append(model.features(ids))
    assert torch.equal(result[0], result[1])
    assert torch.equal(result[0], result[2]) == (name == "bilstm")  # which has no dropout


def test_bilstm_draws_what_one_bidirectional_lstm_draws() -> None:
    stage: Any = build_model("bilstm", TEXT, 5).stages[0]
    with seeded(5):
        nn.Embedding(V, D)
        one = nn.LSTM(D, D, bidirectional=True)
    drawn = [*stage.forwards.parameters(), *stage.backwards.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(drawn, one.parameters(), strict=True))


def test_a_transformer_says_which_numbers_it_takes() -> None:
    with pytest.raises(
        PbflError, match=r"'transformer-4-1': its 4 heads must divide feature-dim = 6; .* divisors of 6"
    ):
        check_models("transformer-4-1", TEXT)
    with pytest.raises(PbflError, match=r"'transformer-2-65': found 65 layers, must be at most 64"):
        check_models("transformer-2-65", TEXT)
    odd = Task(4, 5, (L,), V)  # the last sine has no cosine
    check_models("transformer-1-1,transformer-5-1", odd)


@pytest.mark.parametrize("name", ["fasttext", "textcnn", "text-logistic", *STATES])
def test_the_embedding_of_padding_stays_zero(name: str) -> None:
    model = build_model(name, TEXT, 0).train()
    ids = random_inputs(TEXT, 4)
    ids[:, 0], ids[:, 5:] = 1, 0
    model(ids).square().sum().backward()
    (embedding,) = (module for module in model.modules() if isinstance(module, nn.Embedding))
    assert not embedding.weight[0].any()
    assert embedding.weight.grad is not None
    assert not embedding.weight.grad[0].any()
    assert embedding.weight.grad[ids[0, 0]].any()


def test_text_models_refuse_numbers_and_images_refuse_text() -> None:
    with pytest.raises(
        PbflError, match=r"'fasttext', first layer: expected token ids .* found numbers of shape"
    ):
        check_models("text-2", Task(4, D, (L,)))
    for name in ("text-logistic", *STATES):
        with pytest.raises(PbflError, match=rf"'{name}', first layer: expected token ids .* found numbers"):
            check_models(name, Task(4, D, (L,)))
    with pytest.raises(PbflError, match=r"'textcnn': expected at least 5 tokens, found 4"):
        check_models("textcnn", Task(4, D, (4,), V))
    with pytest.raises(
        PbflError, match=r"'resnet4', first layer: expected images .* found input shape \(9,\)"
    ):
        check_models("resnet4", TEXT)
    check_models("text-2", TEXT)
