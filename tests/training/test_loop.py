"""The one SGD loop: what it trains on, in which order, what it leaves alone, and what it refuses to hand on."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pbfl_flwr.config import EvaluationSettings, TrainingSettings
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import EXCLUDED, Client, Nearest, WithInputs, head_scores
from pbfl_flwr.models.dry_forward import dry_forward
from pbfl_flwr.task import Task
from pbfl_flwr.training import loop as training
from pbfl_flwr.training.evaluation import evaluate
from pbfl_flwr.training.loop import (
    Diverged,
    FitReport,
    _check_finite,
    batches,
    classification,
    complete_batches,
    each_feature,
    fit,
    forward,
    rate_factor,
)
from pbfl_flwr.training.optimizers import ParamGroup, param_group
from tests.pretend_card import CUDA, OnCard, card

TASK = Task(num_classes=3, feature_dim=5, input_shape=(4,))
SETTINGS = TrainingSettings(batch_size=4, learning_rate=0.1, batch_order="shuffled", drop_last="small")


class Net(nn.Module):
    """The smallest network of the contract; with a BatchNorm if asked."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            norm: list[nn.Module] = [nn.BatchNorm1d(5)] if normalised else []
            self.body = nn.Sequential(nn.Linear(4, 5), *norm, nn.ReLU())
            self.head = nn.Linear(5, 3)

    def features(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.body(inputs)
        return result


def net(who: Client) -> Net:
    assert isinstance(who.model, Net)
    return who.model


def first(who: Client) -> nn.Linear:
    layer = net(who).body[0]
    assert isinstance(layer, nn.Linear)
    return layer


def data(n: int = 10, test: int = 6) -> ClientData:
    g = torch.Generator().manual_seed(1)
    labels = torch.arange(n + test) % 3
    inputs = torch.randn(n + test, 4, generator=g)
    one, zero = torch.ones(4), torch.zeros(4)
    return ClientData(
        Shard(inputs[:n], labels[:n]), Shard(inputs[n:], labels[n:]), 3, ("a", "b", "c"), one, zero
    )


def client(model: Any = None, n: int = 10, round: int = 1, **keys: Any) -> Client:
    settings = SETTINGS.model_copy(update=keys)
    network: Any = Net() if model is None else model
    return Client(0, round, TASK, network, data(n), settings, EvaluationSettings(), seed=3)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


# Batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "rule", "sizes"),
    [
        (10, "small", [4, 4]),  # the incomplete batch of 2 is dropped
        (10, "always", [4, 4]),
        (10, "never", [4, 4, 2]),
        (3, "small", [3]),  # fewer than one batch: kept
        (3, "always", []),
        (3, "never", [3]),
        (8, "small", [4, 4]),
        (8, "never", [4, 4]),
        (0, "small", []),
        (0, "never", []),
    ],
)
def test_the_incomplete_batch(n: int, rule: str, sizes: list[int]) -> None:
    settings = SETTINGS.model_copy(update={"drop_last": rule})
    result = list(batches(n, settings, torch.Generator().manual_seed(0)))
    assert [len(index) for index in result] == sizes
    used = torch.cat(result).tolist() if result else []
    assert len(set(used)) == len(used)


def test_a_fixed_order_is_the_stored_one() -> None:
    fixed = SETTINGS.model_copy(update={"batch_order": "fixed"})
    order = torch.Generator().manual_seed(0)
    before = order.get_state()
    for _ in range(2):
        assert torch.cat(list(batches(10, fixed, order))).tolist() == list(range(8))
    assert torch.equal(order.get_state(), before)
    epochs = [torch.cat(list(batches(10, SETTINGS, order))).tolist() for _ in range(2)]
    assert epochs[0] != epochs[1] != list(range(8))


def test_the_order_depends_on_client_round_and_phase_only() -> None:
    def weights_after(who: Client, phase: str = "fit") -> Tensor:
        torch.rand(1)  # the global generator does not matter
        fit(who, classification(who.model), phase=phase)
        return next(who.model.parameters()).detach().clone()

    base = weights_after(client())
    assert torch.equal(base, weights_after(client()))
    assert not torch.equal(base, weights_after(client(round=2)))
    assert not torch.equal(base, weights_after(replace(client(), id=1)))
    assert not torch.equal(base, weights_after(replace(client(), seed=4)))
    assert not torch.equal(base, weights_after(client(), "second"))


def test_networks_that_were_scored_train_in_training_mode() -> None:
    who, companion = client(Net(normalised=True), n=4, batch_order="fixed"), Net(normalised=True)
    evaluate(who, {"head": lambda features, logits: logits})
    companion.eval()
    moved = 0.1 * first(who)(who.data.train.inputs).mean(0)  # BatchNorm's share of a batch, off from 0

    def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        networks: list[Any] = [net(who), companion]
        both = [nn.functional.cross_entropy(forward(one, inputs)[1], labels) for one in networks]
        return {"ce": torch.stack(both).sum()}

    fit(who, loss, extra_modules=[companion], epochs=1)
    for one in (net(who), companion):
        assert isinstance(one.body[1], nn.BatchNorm1d)
        torch.testing.assert_close(one.body[1].running_mean, moved)


def test_batchnorm_never_meets_a_single_sample() -> None:
    for normalised, steps in ((False, 2), (True, 1)):  # 5 samples in batches of 4 and 1
        who = client(Net(normalised), n=5, drop_last="never")
        report = fit(who, classification(who.model))
        assert (report.steps, report.samples) == (steps, 5 if steps == 2 else 4)
    pair = client(Net(True), n=6, drop_last="never")  # 4 and 2
    assert fit(pair, classification(pair.model)).samples == 6
    alone = client(Net(True), n=1)
    assert fit(alone, classification(alone.model)) == FitReport(0, 0, {}, {})
    # A companion with BatchNorm counts as well.
    plain = client(n=1)
    assert fit(plain, classification(plain.model), extra_modules=[Net(True)]).steps == 0


def test_epochs_steps_and_another_source() -> None:
    who = client(local_epochs=3)
    assert fit(who, classification(who.model)).steps == 6
    assert fit(who, classification(who.model), epochs=1).steps == 2
    assert fit(who, classification(who.model), max_steps=5).steps == 5
    assert fit(who, classification(who.model), max_steps=0).steps == 0
    assert fit(who, classification(who.model), epochs=0).steps == 0
    seen: list[int] = []
    source = (torch.randn(20, 4), torch.zeros(20, dtype=torch.int64))
    report = fit(who, classification(who.model), source=source, epochs=1, after_step=lambda: seen.append(1))
    assert (report.steps, report.samples, len(seen)) == (5, 20, 5)


def test_calls_after_every_step_and_after_every_epoch() -> None:
    calls = list[str]()
    for max_steps, expected in ((None, "sspssp"), (3, "sspsp"), (2, "ssp"), (1, "sp")):
        who = client()
        calls.clear()
        report = fit(
            who,
            classification(who.model),
            epochs=2,
            max_steps=max_steps,
            after_step=lambda: calls.append("s"),
            after_epoch=lambda: calls.append("p"),
        )
        assert "".join(calls) == expected
        assert report.samples == 4 * expected.count("s")
    calls.clear()
    alone = client(Net(True), n=1)  # a pass, though BatchNorm takes no step
    fit(alone, classification(alone.model), epochs=2, after_epoch=lambda: calls.append("p"))
    assert calls == ["p", "p"]


def test_losses_are_means_over_the_steps() -> None:
    who, sizes = client(drop_last="never"), list[int]()

    def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        sizes.append(len(inputs))
        return {"size": 0 * first(who).bias.sum() + len(inputs), "one": torch.ones(())}

    assert fit(who, loss).losses == {"size": 10 / 3, "one": 1.0}  # 4, 4 and 2 samples
    assert sizes == [4, 4, 2]


def test_terms_of_low_precision_are_summed_in_float32() -> None:
    totals: dict[str, Tensor] = {}
    for _ in range(300):  # bfloat16 ends at 256 + 1 = 256
        training._add(totals, "ce", torch.ones((), dtype=torch.bfloat16))
    assert totals["ce"].item() == 300


def test_under_drop_last_always_the_last_samples_of_the_store_are_left_out() -> None:
    for rule, n, kept in (("always", 10, 8), ("always", 3, 0), ("small", 10, 10), ("never", 10, 10)):
        shard = complete_batches(client(n=n, drop_last=rule))
        assert torch.equal(shard.inputs, data(n).train.inputs[:kept])
        assert torch.equal(shard.labels, data(n).train.labels[:kept])


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_batches_are_normalised_and_laid_out(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.arange(4 * 3 * 2 * 2, dtype=torch.float32).reshape(4, 3, 2, 2)
    shard, two, one = (
        Shard(images, torch.tensor([0, 1, 2, 0])),
        torch.full((3, 1, 1), 2.0),
        torch.ones(3, 1, 1),
    )
    held = ClientData(shard, shard, 3, ("a", "b", "c"), two, one)
    met = list[Tensor]()
    who = replace(client(batch_order="fixed", layout=layout), data=held)

    def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        met.append(inputs)
        return {"ce": first(who).bias.sum()}

    fit(who, loss)

    def features(inputs: Tensor) -> Tensor:
        met.append(inputs)
        return inputs.flatten(1)

    monkeypatch.setattr(who.model, "features", features)
    list(each_feature(who, held.train))
    for inputs in met:
        assert torch.equal(inputs, 2 * images + 1)
        memory = torch.channels_last if layout == "channels-last" else torch.contiguous_format
        assert inputs.is_contiguous(memory_format=memory)
    vectors = client(layout=layout)
    assert fit(vectors, classification(vectors.model)).steps == 2


def test_reports_add_up() -> None:
    one = FitReport(
        3, 12, {"ce": 0.5, "regularizer": 1.0}, {"momentum.a": torch.ones(1), "momentum.b": torch.ones(1)}
    )
    two = FitReport(1, 1, {"ce": 0.25}, {"momentum.b": torch.zeros(1)})
    both = one.then(two)
    assert (both.steps, both.samples, both.losses) == (4, 13, {"ce": 0.25, "regularizer": 1.0})
    assert {name: t.item() for name, t in both.optimizer.items()} == {"momentum.a": 1, "momentum.b": 0}
    assert two.metrics() == {"loss.ce": 0.25}
    assert FitReport(0, 0, {}, {}).metrics() == {"idle": 1.0}


# What is trained --------------------------------------------------------------------------------------------


def test_frozen_parts_keep_their_bits() -> None:
    who = client(weight_decay=0.1, momentum=0.9)
    before = weights(who.model)
    fit(who, classification(who.model), param_groups=[param_group(net(who).head)])
    assert changed(before, who.model) == {"head.weight", "head.bias"}
    assert all(parameter.requires_grad for parameter in who.model.parameters())
    assert all(parameter.grad is None for parameter in who.model.parameters())
    for nothing in ([], [ParamGroup(())]):
        assert fit(who, classification(who.model), param_groups=nothing) == FitReport(0, 0, {}, {})


def test_frozen_parts_are_thawed_after_an_error() -> None:
    who = client()

    def broken(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        assert not first(who).weight.requires_grad
        raise OSError("boom")

    with pytest.raises(OSError, match="boom"):
        fit(who, broken, param_groups=[param_group(net(who).head)])
    assert all(parameter.requires_grad for parameter in who.model.parameters())


def test_parts_have_their_own_rates() -> None:
    who = client(n=4)
    before = weights(who.model)
    head = tuple(net(who).head.parameters())
    fit(who, classification(who.model), param_groups=[param_group(net(who).body, 0.0), ParamGroup(head)])
    assert changed(before, who.model) == {"head.weight", "head.bias"}


def norm_of_step(bound: float, per_part: float = 0.0) -> float:
    who = client(n=4, max_grad_norm=bound)
    before = nn.utils.parameters_to_vector(who.model.parameters()).detach().clone()

    def steep(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"ce": 1000 * classification(who.model)(inputs, labels)["ce"]}

    fit(who, steep, param_groups=[param_group(who.model, None, per_part)])
    after = nn.utils.parameters_to_vector(who.model.parameters()).detach()
    return float((after - before).norm())


def test_the_rate_falls_along_half_a_cosine() -> None:
    # R = 4: ½·(1 + cos(π·t/4)) for t = 0..3, then as in the fourth round
    share = [rate_factor(TrainingSettings(learning_rate_cosine=4), number) for number in (1, 2, 3, 4, 5, 9)]
    assert share == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.146447, 0.146447], abs=1e-6)
    assert [rate_factor(TrainingSettings(learning_rate_cosine=1), number) for number in (1, 2)] == [1.0, 1.0]
    both = TrainingSettings(learning_rate_cosine=4, learning_rate_decay=0.5)
    assert rate_factor(both, 3) == pytest.approx(0.5 * 0.25)
    schedule = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    annealed = torch.optim.lr_scheduler.CosineAnnealingLR(schedule, 7)
    for number in range(1, 8):
        left = rate_factor(TrainingSettings(learning_rate_cosine=7), number)
        assert left == pytest.approx(annealed.get_last_lr()[0], abs=1e-9)
        schedule.step()
        annealed.step()


@pytest.mark.parametrize(
    ("falling", "share"), [({"learning_rate_cosine": 4}, 1 / 2), ({"learning_rate_decay": 0.5}, 1 / 4)]
)
def test_the_rate_of_a_round_is_that_of_every_part(falling: dict[str, Any], share: float) -> None:
    decayed, smaller = client(round=3, **falling), client(round=3, learning_rate=0.1 * share)
    for who, rate in ((decayed, 0.4), (smaller, 0.4 * share)):
        parts = [param_group(net(who).body), param_group(net(who).head, rate)]
        fit(who, classification(who.model), param_groups=parts)
    assert not changed(weights(smaller.model), decayed.model)
    assert rate_factor(TrainingSettings(**falling), 1) == 1.0


def test_the_gradient_is_clipped() -> None:
    # One step of η = 0.1 along a gradient of norm c moves the weights by 0.1·c.
    assert norm_of_step(0.0) > 10
    assert norm_of_step(0.5) == pytest.approx(0.05, rel=1e-3)
    assert norm_of_step(0.0, per_part=2.0) == pytest.approx(0.2, rel=1e-3)
    assert norm_of_step(0.5, per_part=2.0) == norm_of_step(2.0, per_part=0.5) == norm_of_step(0.5)


# Momentum ---------------------------------------------------------------------------------------------------


ADAM = {"weight_decay": 0.1, "learning_rate": 0.02}
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    ("keys", "kinds", "theirs"),
    [
        (
            {"momentum": 0.9, "weight_decay": 0.01},
            ("momentum",),
            partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
        ),
        ({"optimizer": "adam", **ADAM}, MOMENTS, partial(torch.optim.Adam, lr=0.02, weight_decay=0.1)),
        ({"optimizer": "adamw", **ADAM}, MOMENTS, partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_stored_optimizer_states_make_rounds_one_uninterrupted_descent(
    keys: dict[str, Any], kinds: tuple[str, ...], theirs: Callable[..., torch.optim.Optimizer]
) -> None:
    model: Any = Net()
    memory: Mapping[str, Tensor] = {}
    for number in (1, 2, 3):
        who = replace(client(model, round=number, optimizer_state="kept", **keys), memory=memory)
        memory = fit(who, classification(model)).optimizer
    assert set(memory) == {f"{kind}.{name}" for kind in kinds for name, _ in model.named_parameters()}
    assert memory.get("step.head.weight", torch.tensor(6)) == 6  # two batches a round

    twin: Any = Net()
    optimizer = theirs(twin.parameters())
    shard = data().train
    for number in (1, 2, 3):
        for index in torch.randperm(10, generator=client(round=number).generator("fit"))[:8].split(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(forward(twin, shard.inputs[index])[1], shard.labels[index]).backward()
            optimizer.step()
    for (name, result), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6, msg=name)

    fresh: Any = Net()
    for number in (1, 2, 3):
        assert fit(client(fresh, round=number, **keys), classification(fresh)).optimizer == {}
    assert not torch.allclose(fresh.head.weight, twin.head.weight, atol=1e-3)


def test_states_of_another_optimizer_are_ignored() -> None:
    kept = client(optimizer="adam", optimizer_state="kept")
    moments = fit(kept, classification(kept.model)).optimizer
    halved = {key: tensor for key, tensor in moments.items() if not key.startswith("exp_avg_sq.")}
    moving = client(momentum=0.9, optimizer_state="kept")
    momentum = fit(moving, classification(moving.model)).optimizer
    cases: list[tuple[dict[str, Any], Mapping[str, Tensor]]] = [
        ({"optimizer": "sgd", "optimizer_state": "kept"}, moments),
        ({"optimizer": "adam", "optimizer_state": "kept"}, halved),
        ({"momentum": 0.9}, momentum),  # its own, but no longer asked for
    ]
    for keys, remembered in cases:
        with_it, without = replace(client(**keys), memory=remembered), client(**keys)
        for who in (with_it, without):
            fit(who, classification(who.model))
        assert not changed(weights(without.model), with_it.model)


@pytest.mark.parametrize("keys", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_training_leaves_the_clients_memory_unchanged(keys: dict[str, Any]) -> None:
    model: Any = Net()
    first = fit(client(model, optimizer_state="kept", **keys), classification(model)).optimizer
    kept = {name: tensor.clone() for name, tensor in first.items()}
    second = replace(client(model, round=2, optimizer_state="kept", **keys), memory=first)
    fit(second, classification(model))
    assert all(torch.equal(first[name], tensor) for name, tensor in kept.items())


def test_a_stored_state_gets_the_memory_layout_of_its_parameter() -> None:
    """A store keeps tensors contiguous; torch's fused kernels pair them with the parameter's numbers by place."""
    kept = torch.arange(16.0).reshape(2, 2, 2, 2)
    weight = nn.Parameter(torch.zeros(2, 2, 2, 2).contiguous(memory_format=torch.channels_last))
    result = training._laid_out(weight, kept)
    assert torch.equal(result, kept)
    assert result.stride() == weight.stride() != kept.stride()
    assert not result.requires_grad


def test_momentum_of_a_part_of_the_parameters_can_be_gone_on_with() -> None:
    """A buffer of zeros is what SGD starts from, so parameters without one are as in a first step."""
    model: Any = Net()
    head = fit(
        client(model, momentum=0.9, optimizer_state="kept"),
        classification(model),
        param_groups=[param_group(model.head)],
    ).optimizer
    assert set(head) == {"momentum.head.weight", "momentum.head.bias"}
    who = replace(client(model, n=4, round=2, momentum=0.9, optimizer_state="kept"), memory=head)
    twin: Any = Net()
    twin.load_state_dict(model.state_dict())
    fit(who, classification(model))
    fit(client(twin, n=4, round=2), classification(twin))  # one step of plain SGD
    torch.testing.assert_close(model.body[0].weight, twin.body[0].weight)
    assert not torch.allclose(model.head.weight, twin.head.weight)


def test_momentum_of_other_parameters_is_stored_by_index() -> None:
    model, companion = Net(), nn.Linear(1, 1, bias=False)

    def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"companion": companion.weight.sum()}

    param_groups, weights = [param_group(model), param_group(companion)], list[float]()
    memory: Mapping[str, Tensor] = {}
    with torch.no_grad():
        companion.weight.zero_()
    for number in (1, 2):
        who = client(model, n=4, round=number, momentum=0.5, optimizer_state="kept", learning_rate=1.0)
        memory = fit(replace(who, memory=memory), loss, param_groups=param_groups).optimizer
        weights.append(companion.weight.item())
    # one step a round: b = 1, then 0.5·1 + 1
    assert weights == [-1.0, -2.5]
    assert {name: b.item() for name, b in memory.items()} == {"momentum.beside.0": 1.5}


# Divergence -------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_refused() -> None:
    who = client(n=4)

    def split(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        ce = classification(who.model)(inputs, labels)["ce"]
        return {"ce": ce, "extra": ce * float("nan")}

    with pytest.raises(Diverged, match=r"loss term 'extra' is not finite after 1 steps; lower learning-rate"):
        fit(who, split)


def test_a_last_step_into_infinity_is_refused_as_well() -> None:
    who = client(n=4, learning_rate=3e38)  # the only loss is finite, the weights after it are not

    def steep(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"ce": 1e4 * classification(who.model)(inputs, labels)["ce"]}

    with pytest.raises(Diverged, match="a weight is not finite after 1 steps; lower learning-rate"):
        fit(who, steep)
    who = client(n=4)
    with pytest.raises(Diverged, match="a weight is not finite after 1 steps"):
        fit(who, steep, param_groups=[param_group(net(who).body), param_group(net(who).head, 3e38)])
    assert first(who).weight.isfinite().all()


def test_large_finite_weights_whose_sum_overflows_are_accepted() -> None:
    large = nn.Parameter(torch.full((8,), 3e38))
    assert not large.sum().isfinite()
    _check_finite({"ce": 1.0}, [large], 1)
    with pytest.raises(Diverged, match="a weight is not finite after 1 steps"):
        _check_finite({"ce": 1.0}, [large, nn.Parameter(torch.tensor([1.0, float("inf"), -float("inf")]))], 1)


# Evaluation -------------------------------------------------------------------------------------------------


class Cached(Net):
    """Keeps a table that it makes when it is first used, as networks with positions of tokens do."""

    table: Tensor | None = None

    def features(self, inputs: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.0, 5)
        return super().features(inputs) * self.table


def test_a_table_cached_in_evaluation_can_be_used_in_training() -> None:
    who = client(Cached())
    dry_forward("cached", who.model, TASK)
    evaluate(who, {"head": head_scores})
    assert fit(who, classification(who.model)).steps == 2


def test_one_pass_scores_every_predictor() -> None:
    who = client()
    who = replace(who, evaluation=EvaluationSettings(eval_batch_size=4))
    perfect = iter(list(data().test.labels.split(4)))

    def oracle(features: Tensor, logits: Tensor) -> Tensor:
        return nn.functional.one_hot(next(perfect), 3).float()

    def never(features: Tensor, logits: Tensor) -> Tensor:
        return torch.full((len(features), 3), EXCLUDED)  # ties: class 0 wins

    result = evaluate(who, {"head": lambda features, logits: logits, "global": oracle, "local": never})
    assert result.num_samples == 6
    assert result.correct["global"] == 6
    assert result.correct["local"] == int((data().test.labels == 0).sum())
    with torch.no_grad():
        logits = forward(who.model, data().test.inputs)[1]
    assert result.correct["head"] == int((logits.argmax(1) == data().test.labels).sum())
    assert result.loss == pytest.approx(
        float(nn.functional.cross_entropy(logits, data().test.labels)), rel=1e-5
    )


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_scores_must_be_finite_all_of_them(odd: float) -> None:
    def one_is_odd(features: Tensor, logits: Tensor) -> Tensor:
        scores = logits.clone()
        scores[-1, 1] = odd
        return scores

    remedy = (
        "a class that .* score EXCLUDED, not -inf; else lower" if odd == -math.inf else "lower learning-rate"
    )
    with pytest.raises(Diverged, match=f"^predictor 'local' gives scores that are not finite; {remedy}"):
        evaluate(client(), {"head": lambda features, logits: logits, "local": one_is_odd})


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_predictor_that_changes_what_others_read_is_refused(which: int) -> None:
    def changing(*read: Tensor) -> Tensor:
        read[which][:1] *= 2  # a view of it
        return read[-1]

    changed = WithInputs(changing) if which == 2 else changing
    fault = f"^predictor 'global' changes its {'inputs, ' * (which == 2)}features or logits in place"
    with pytest.raises(PbflError, match=fault):
        evaluate(client(), {"head": head_scores, "global": changed, "local": head_scores})


def test_scores_must_be_of_shape_b_by_k() -> None:
    with pytest.raises(
        ValueError, match=r"predictor 'head' returns scores of shape \(6, 2\), expected \(B, K\)"
    ):
        evaluate(client(), {"head": lambda features, logits: logits[:, :2]})


def test_without_test_samples_nothing_is_scored() -> None:
    who = replace(client(), data=data(10, 0))
    result = evaluate(who, {"head": lambda features, logits: logits})
    assert (result.num_samples, result.correct, result.loss) == (0, {"head": 0}, 0.0)


def test_features_come_in_order_and_in_evaluation_mode() -> None:
    who = client(Net(normalised=True), n=9)
    who = replace(who, evaluation=EvaluationSettings(eval_batch_size=4))
    before = weights(who.model)
    parts = list(each_feature(who, who.data.train))
    assert [len(labels) for _, labels in parts] == [4, 4, 1]
    assert torch.equal(torch.cat([labels for _, labels in parts]), data(9).train.labels)
    assert not changed(before, who.model)
    assert not any(features.requires_grad for features, _ in parts)


@pytest.mark.parametrize(
    ("n", "largest", "sizes"),
    [
        (9, 4, [4, 4, 4]),
        (9, 64, [32]),  # no smaller ones, so that sizes are few
        (33, 64, [64]),
        (64, 64, [64]),
        (130, 64, [64, 64, 64]),
        (0, 64, []),
    ],
)
def test_batches_of_a_card_are_filled_in_evaluation(
    n: int, largest: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN takes seconds for every new batch size."""
    on_cpu = replace(client(n=n), evaluation=EvaluationSettings(eval_batch_size=largest))
    on_cpu = replace(on_cpu, data=replace(on_cpu.data, test=on_cpu.data.train))
    predictors: dict[str, Any] = {
        "head": head_scores,
        "nearest": Nearest(torch.eye(3, 5), torch.ones(3, dtype=torch.bool)),
        "local": WithInputs(lambda inputs, features, logits: inputs[:, :3]),
    }
    expected = torch.cat(
        [features for features, _ in each_feature(on_cpu, on_cpu.data.train)] or [torch.zeros(0, 5)]
    )
    met = list[int]()
    with card():
        model: Any = Net().to(CUDA)
        who = replace(on_cpu, model=model, data=on_cpu.data.on(CUDA))
        features_of = model.features

        def features(inputs: Tensor) -> Tensor:
            met.append(len(inputs))
            result: Tensor = features_of(inputs)
            return result

        monkeypatch.setattr(model, "features", features)
        parts = list(each_feature(who, who.data.train))
        scores = evaluate(who, predictors, ("nearest",))
        found = torch.cat([features.cpu() for features, _ in parts] or [torch.zeros(0, 5)])
        labels = torch.cat([labels.cpu() for _, labels in parts] or [torch.zeros(0)])
    assert met == sizes * 2
    assert torch.allclose(found, expected)
    assert labels.tolist() == on_cpu.data.train.labels.tolist()
    of_cpu = evaluate(on_cpu, predictors, ("nearest",))
    assert (scores.num_samples, scores.correct) == (n, of_cpu.correct)
    assert scores.loss == pytest.approx(of_cpu.loss)


def test_areas_need_no_float64_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's have none."""

    def refused(tensor: Tensor) -> Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(OnCard, "double", refused)
    on_cpu = replace(client(n=30), evaluation=EvaluationSettings(auc=True))
    on_cpu = replace(on_cpu, data=replace(on_cpu.data, test=on_cpu.data.train))
    with card():
        model: Any = Net().to(CUDA)
        model.load_state_dict(on_cpu.model.state_dict())
        scores = evaluate(replace(on_cpu, model=model, data=on_cpu.data.on(CUDA)), {"head": head_scores})
    assert scores.areas == evaluate(on_cpu, {"head": head_scores}).areas


def test_nearest_prefers_the_nearest_candidate() -> None:
    table = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]])
    scores = Nearest(table, torch.tensor([True, True, False]))(torch.tensor([[1.0, 0.0]]), torch.zeros(1, 3))
    # squared distances of (1, 0): 1, 4 + 16 = 20, and 0 for the class that is no candidate
    assert scores.tolist() == [[-1.0, -20.0, pytest.approx(EXCLUDED)]]
