"""The pipeline's slots in every combination, run and by hand."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Round
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.payloads import Prototypes, RejectedPayload
from pbfl_flwr.prototypes import masks, rules
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.prototypes.regularizer import prototype_regularizer
from pbfl_flwr.prototypes.trainable import PrototypeGenerator, train_prototypes
from pbfl_flwr.task import Task
from tests.flower.inprocess import federation, plain

TASK = Task(num_classes=4, feature_dim=8, input_shape=(1, 16, 16))
HELD = {0: [0, 1], 1: [1, 2], 2: [1, 3]}
COUNTS = {0: [5, 1], 1: [9, 4], 2: [2, 7]}
N = {i: sum(n) for i, n in COUNTS.items()}  # 6, 13, 9


def method(name: str = "fedproto", **keys: Scalar) -> Pipeline:
    dotted = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    pipeline = build_method(parse({"method": name, "feature-dim": 8, **dotted}, SECTIONS))
    assert isinstance(pipeline, Pipeline)
    return pipeline


def uploads(width: int = 8, scaled: bool = False, total: bool = False) -> dict[int, Prototypes]:
    """The clients' means (or n_ij times them), 1, 9 and 2 samples of class 1."""
    sent = {}
    for i, classes in HELD.items():
        values = torch.zeros(4, width)
        rows = torch.randn(2, width, generator=torch.Generator().manual_seed(i))
        values[classes] = rows * torch.tensor(COUNTS[i])[:, None] if scaled else rows
        present = torch.zeros(4, dtype=torch.bool)
        present[classes] = True
        sent[i] = Prototypes(values, present, None, N[i] if total else None)
    return sent


def round_info(number: int = 1) -> Round:
    return Round(number, TASK, num_clients=3, seed=0)


def run(pipeline: Pipeline, sent: dict[int, Prototypes]) -> Prototypes:
    state = pipeline.aggregate(pipeline.init(TASK, 0), sent, round_info())
    return pipeline.broadcast(state, 0)


def client(counts: list[int] = [3, 2, 0, 0]) -> Client:  # noqa: B006
    labels = torch.tensor([j for j, n in enumerate(counts) for _ in range(n)])
    shard = Shard(torch.randn(len(labels), 1, 16, 16, generator=torch.Generator().manual_seed(5)), labels)
    data = ClientData(shard, shard, 4, ("a", "b", "c", "d"), torch.ones(1, 1, 1), torch.zeros(1, 1, 1))
    return Client(0, 2, TASK, build_model("cnn2", TASK, 0), data, parse({}).training)


# All combinations -------------------------------------------------------------------------------------------


COMBINATIONS = [("fedproto", *on) for on in itertools.product([False, True], repeat=3)]


@pytest.mark.parametrize(
    ("base", "cps", "ppa", "cpkd"),
    [*COMBINATIONS, ("fedtgp", False, False, False), ("fedtgp", True, True, True)],
)
def test_every_combination_runs(tmp_path: Path, base: str, cps: bool, ppa: bool, cpkd: bool) -> None:
    keys: dict[str, Any] = {
        "cps_dim": 16 if cps else 0,
        "aggregation": "ppa" if ppa else "mean",
        "cpkd": "sample" if cpkd else "off",
        "min_class_count": 1,
    }
    if base == "fedtgp":
        keys["fedtgp.server-epochs"] = 3
    played = federation(tmp_path, base, num_clients=3, **keys).run()
    history, state = played.strategy.history, played.strategy.state
    assert [line.failures for line in history] == [[], []]
    assert (history[1].client_metrics["loss.regularizer"] or 0) > 0
    assert "loss.regularizer" not in history[0].client_metrics
    width = 16 if cps else 64
    class_counts = [3, 1, 4]  # classes 0, 1, 2; 0; 1, 3, 4, 5
    assert state.broadcast.values.shape == (10, width)
    assert state.broadcast.present.tolist() == [True] * 6 + [False] * 4
    assert plain(history[1].scalars) == {"up": sum(class_counts) * width, "down": 3 * 6 * width}
    assert (state.broadcast.num_examples is None) or ppa
    assert ("server-loss" in history[1].server_metrics) == (base == "fedtgp")


# When prototypes are collected ------------------------------------------------------------------------------


def class_means(network: SplitModel, shard: Shard, samples: int) -> Tensor:
    """The plain means, in evaluation mode, over the first so many samples."""
    with torch.no_grad():
        features = network.eval().features(shard.inputs[:samples])
    rows = [features[shard.labels[:samples] == j].mean(0) for j in range(2)]
    return torch.stack(rows)


def test_prototypes_of_the_network_before_or_after_its_training() -> None:
    for collect in ("before", "post"):
        pipeline, one = method(collect=collect), client()
        fresh = build_model("cnn2", TASK, 0)
        sent = pipeline.local_update(one, Prototypes.empty(4, 8)).payload
        expected = class_means(fresh if collect == "before" else one.model, one.data.train, 5)
        assert torch.allclose(sent.values[:2], expected, atol=1e-6), collect
    assert not torch.allclose(class_means(fresh, one.data.train, 5), expected, atol=1e-6)


def test_of_all_epochs_or_the_last_one_only() -> None:
    """The epochs' order is drawn alike, so what two epochs have seen is what one has and what the second adds."""

    def sent(collect: str, epochs: int) -> Tensor:
        training = parse({"batch-size": 2, "local-epochs": epochs}).training
        torch.manual_seed(0)  # of dropout
        update = method(collect=collect, min_class_count=1).local_update(
            replace(client(), training=training), Prototypes.empty(4, 8)
        )
        return update.payload.values[:2]

    first, both, last = sent("trajectory", 1), sent("trajectory", 2), sent("last-epoch", 2)
    assert torch.equal(sent("last-epoch", 1), first)
    torch.testing.assert_close((first + last) / 2, both)
    assert not torch.allclose(first, last)


def test_the_last_samples_that_are_never_trained_on_are_not_collected_either() -> None:
    # 3 + 2 samples in batches of 2: the fifth, of class 1, is left out where drop-last is "always"
    for protocol, samples in (("htfl", 4), ("clean", 5)):
        training = parse({"protocol": protocol, "batch-size": 2}).training
        one = replace(client(), training=training)
        sent = method(collect="before", min_class_count=1).local_update(one, Prototypes.empty(4, 8)).payload
        expected = class_means(build_model("cnn2", TASK, 0), one.data.train, samples)
        assert torch.allclose(sent.values[:2], expected, atol=1e-6), protocol


def test_fedtgps_generator_is_drawn_from_the_runs_seed_as_networks_are() -> None:
    state = method("fedtgp").init(TASK, 7)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        embedding = torch.nn.Embedding(4, 8)
    assert state.trained is not None
    assert torch.equal(state.trained["embedding.weight"], embedding.weight)


# Against NumPy ----------------------------------------------------------------------------------------------


def summed(sent: dict[int, Prototypes]) -> np.ndarray:
    total: np.ndarray = np.sum([up.values.double().numpy() for up in sent.values()], axis=0)
    return total


@pytest.mark.parametrize("answering", [[0, 1, 2], [0, 2], [1]])
@pytest.mark.parametrize(
    ("keys", "factor"),  # of what all rows together, or the mean of those of a class, are multiplied by
    [
        ({"aggregation": "mean"}, None),
        ({"aggregation": "aps-mean"}, None),
        ({"aggregation": "ppa"}, lambda sent: 4 / sum(N[i] for i in sent)),
        ({"aggregation": "ppa", "total_examples": 64}, lambda sent: 4 / (64 * len(sent) / 3)),
        ({"aggregation": "aps-sum"}, lambda sent: 1.0),
        ({"aggregation": "aps-sum", "aps_scale": 0.5}, lambda sent: 3 / len(sent)),
    ],
    ids=lambda given: "-".join(map(str, given.values())) if isinstance(given, dict) else "",
)
def test_rules_give_what_their_formulas_say(
    keys: dict[str, Any], factor: Callable[[list[int]], float] | None, answering: list[int]
) -> None:
    pipeline = method(**keys)
    sent = {i: up for i, up in uploads(scaled=True, total=True).items() if i in answering}
    rows, held = torch.from_numpy(summed(sent)), torch.stack([up.present for up in sent.values()]).sum(0)
    expected = rows * factor(answering) if factor else rows / held.clamp_min(1)[:, None]
    if not pipeline.stages.sends_total:
        sent = {i: replace(up, num_examples=None) for i, up in sent.items()}
    together = run(pipeline, sent)
    assert torch.equal(together.present, held > 0)
    np.testing.assert_allclose(together.values, expected, rtol=1e-6)


def one(label: int, n: int, total: int | None, mean: float = 1.0) -> Prototypes:
    """n samples of one class whose mean is ``mean`` everywhere, n-scaled."""
    values, present = torch.zeros(4, 8), torch.zeros(4, dtype=torch.bool)
    values[label], present[label] = n * mean, True
    return Prototypes(values, present, None, total)


def test_a_single_prototype_regularises_and_none_does_not() -> None:
    for down, regularised in ((Prototypes.empty(4, 8), False), (one(1, 1, None), True)):
        assert ("loss.regularizer" in method().local_update(client(), down).metrics) == regularised


@pytest.mark.parametrize("cpkd", ["off", "sample", "class"])
@pytest.mark.parametrize("form", ["mse", "l2"])
def test_the_norm_is_between_class_means_unless_cpkd_weighs_samples(form: str, cpkd: str) -> None:
    asked: list[bool] = []

    def regularizer(*given: Any, per_class: bool, **named: Any) -> Tensor:
        asked.append(per_class)
        return prototype_regularizer(*given, per_class=per_class, **named)

    pipeline = replace(method(regularizer_form=form, cpkd=cpkd), regularizer=regularizer)
    pipeline.local_update(client(), one(1, 1, None))
    assert set(asked) == {cpkd == "class" or (form, cpkd) == ("l2", "off")}


@pytest.mark.parametrize("rule", ["ppa", "aps-sum", "aps-mean"])
def test_the_number_of_examples_is_of_all_samples_also_of_a_class_held_back(rule: str) -> None:
    pipeline = method(aggregation=rule, min_class_count=3)
    sent = pipeline.local_update(client([3, 2, 0, 0]), Prototypes.empty(4, 8)).payload
    assert sent.present.tolist() == [True, False, False, False]
    assert sent.num_examples == 5


@pytest.mark.parametrize("form", ["aps-sum", "aps-mean"])
def test_a_kept_sum_keeps_its_scale_when_another_number_of_samples_or_nobody_answers(form: str) -> None:
    # class 1 is seen in round 1 only: half of all samples, so that μ·c_1 is 0.9/(100·1/2)·50 = 0.9 then and after
    # rounds over 1,000, no and 200 samples; of a mean, n is that of all three clients, of whom one answers: 0.3
    size = {"aps-sum": 0.9, "aps-mean": 0.3}[form]
    pipeline, mine = method(aggregation=form), client()
    state = pipeline.init(TASK, 0)
    for number, n in ((1, 100), (2, 1000), (3, 0), (4, 200)):
        sent = {0: one(0, n // 2, n)} if n else {}
        if number == 1:
            sent = {
                0: Prototypes(
                    sent[0].values + one(1, 50, n).values, torch.tensor([True, True, False, False]), None, n
                )
            }
        state = pipeline.aggregate(state, sent, round_info(number))
        targets = pipeline._targets(mine, pipeline.broadcast(state, 0))
        torch.testing.assert_close(targets[:2], torch.full((2, 8), size))
    assert state.ages.tolist()[:2] == [0, 3]


@pytest.mark.parametrize(
    ("base", "form", "size"), [("fedproto", "sum", 3.0), ("fedtgp", "sum", 3.0), ("fedtgp", "mean", 1.0)]
)
def test_a_scale_that_is_a_number_is_for_all_clients(
    base: str, form: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # μ = 0.1, three clients of 10 samples: μ·Σ = 3; two of them answer: 0.1·20·3/2 = 3 as well; the mean is always 1
    keys: dict[str, Scalar] = {"aggregation": f"aps-{form}", "aps_scale": 0.1, "cps_dim": 0}
    pipeline, mine = method("tinyproto", tinyproto__base=base, **keys), client()
    vectors: list[Tensor] = []
    if base == "fedtgp":
        import pbfl_flwr.prototypes.pipeline as module

        def train(state: Any, given: Tensor, *others: Any, **named: Any) -> Any:
            vectors.append(given)
            return train_prototypes(state, given, *others, **named)

        monkeypatch.setattr(module, "train_prototypes", train)
    for answered in (3, 2, 1):
        sent = {i: one(0, 10, None) for i in range(answered)}
        down = run(pipeline, sent)
        if base == "fedtgp":
            torch.testing.assert_close(vectors[-1], torch.full((answered, 8), size))
        else:
            torch.testing.assert_close(pipeline._targets(mine, down)[0], torch.full((8,), size))


@pytest.mark.parametrize("answering", [3, 2, 1])
def test_an_automatic_scale_of_a_mean_is_for_all_clients(answering: int) -> None:
    # n = 30 whoever answers, all of one class: 0.9/30
    pipeline = method("tinyproto", tinyproto__base="fedtgp", aggregation="aps-mean", cps_dim=0)
    sent: dict[int, Prototypes] = {i: one(0, 10, 10) for i in range(answering)}
    assert rules.aps_mean_scale(sent, round_info(), pipeline.stages)[0] == pytest.approx(0.03)


def test_warns_of_settings_without_effect() -> None:
    idle: dict[str, Scalar] = {
        "trim_share": 0.1,
        "aps_scale": 0.5,
        "cps_scheme": "block",
        "total_examples": 60,
    }
    message = method("fedproto", **idle).warnings(5)
    assert [line.partition(" has no effect without ")[::2] for line in message] == [
        ("trim-share = 0.1", "aggregation = 'trimmed-mean'"),
        ("aps-scale = 0.5", "aggregation = 'aps-sum' or 'aps-mean'"),
        ("total-examples = 60", "aggregation = 'ppa'"),
        ("cps-scheme = 'block'", "cps-dim above 0"),
    ]
    assert method("fedproto", aggregation="trimmed-mean", trim_share=0.1).warnings(5) == []
    assert method("tinyproto", aps_scale=0.5, cps_scheme="block", cps_dim=1).warnings(5) == []
    assert method("fedproto", cps_dim=1, cps_regularizer="masked").warnings(5) == []
    assert method("fedtgp").warnings(5) == method("protonorm").warnings(5) == []


def test_warns_of_sums_in_float16() -> None:
    (message,) = method("fedproto", aggregation="aps-sum", wire_dtype="float16").warnings(5)
    assert message.startswith("wire-dtype = 'float16' ends at 65504, and the rows of aggregation = 'aps-sum'")
    assert method("fedproto", aggregation="aps-sum", wire_dtype="bfloat16").warnings(5) == []
    assert method("fedproto", wire_dtype="float16").warnings(5) == []


def test_warns_of_upscaling_prototypes_that_are_not_normalised() -> None:
    for keys in ({}, {"alignment": "unit"}, {"alignment": "off", "upscale": 1}):
        assert method("protonorm", **keys).warnings(5) == []
    (message,) = method("protonorm", alignment="off").warnings(5)
    assert message.startswith("upscale = 100 multiplies prototypes that are not normalised, since alignment")


# Alignment with sparsification ------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["thomson", "simplex"])
def test_alignment_works_in_all_dimensions_and_sends_the_mask(solver: str) -> None:
    sparse = method("protonorm", alignment=solver, cps_dim=6)
    down = run(sparse, uploads(6))
    assert down.values.shape == (4, 6)
    table = masks.allocate_masks(4, 8, 6, scheme="dimension", seed=sparse.mask_seed)
    expanded = masks.expand(down.values, table)
    assert bool((expanded.norm(dim=1) <= 1 + 1e-5).all())
    assert bool((expanded[~table] == 0).all())


def test_the_simplex_has_room_for_one_class_more_than_dimensions() -> None:
    pipeline = method("protonorm", alignment="simplex")
    pipeline.check(Task(9, 8, (1,)), ["cnn4"])
    with pytest.raises(
        PbflError, match=r"alignment = 'simplex' needs num classes <= feature-dim \+ 1, found K=10"
    ):
        pipeline.check(Task(10, 8, (1,)), ["cnn4"])
    method("protonorm").check(Task(10, 8, (1,)), ["cnn4"])


# Classes that nobody sends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", ["keep", "drop"])
def test_a_class_without_uploads_is_kept_or_dropped(stale: str) -> None:
    pipeline = method(stale=stale)
    first = pipeline.aggregate(pipeline.init(TASK, 0), uploads(), round_info(1))
    second = pipeline.aggregate(first, {0: uploads()[0]}, round_info(2))  # classes 0 and 1 only
    kept = stale == "keep"
    assert second.broadcast.present.tolist() == [True, True, kept, kept]
    assert second.ages.tolist() == ([0, 0, 1, 1] if kept else [0, 0, -1, -1])
    assert torch.equal(second.broadcast.values[2], first.broadcast.values[2] if kept else torch.zeros(8))


@pytest.mark.parametrize("absent", ["exclude", "keep"])
def test_what_fedtgp_makes_of_classes_that_nobody_ever_sent_is_sent_or_not(absent: str) -> None:
    pipeline = method("fedtgp", fedtgp__absent=absent, fedtgp__server_epochs=2)
    state = pipeline.aggregate(pipeline.init(TASK, 0), {0: uploads()[0]}, round_info())  # classes 0 and 1
    down = pipeline.broadcast(state, 0)
    assert state.trained is not None
    network = PrototypeGenerator(4, 8)
    network.load_state_dict(dict(state.trained))
    outputs = network().detach()
    assert bool((outputs.norm(dim=1) > 0.1).all())
    sent = 4 if absent == "keep" else 2
    assert down.present.tolist() == [label < sent for label in range(4)]
    assert torch.equal(down.values[:sent], outputs[:sent])
    assert bool((down.values[sent:] == 0).all())
    assert state.ages.tolist() == [0, 0, -1, -1]
    predicted = pipeline.predictors(client(), down)["global"](outputs, torch.zeros(4, 4)).argmax(1)
    assert predicted[:sent].tolist() == [*range(sent)]
    assert int(predicted.max()) < sent


def test_local_predictions_are_of_own_classes_only() -> None:
    mine = client([3, 0, 2, 0])
    down = run(method(), {0: uploads()[0]})  # global prototypes of classes 0 and 1
    predictors = method().predictors(mine, down)
    assert set(predictors) == {"head", "global", "global-local"}
    features, logits = torch.randn(5, 8), torch.zeros(5, 4)
    assert set(predictors["global"](features, logits).argmax(1).tolist()) <= {0, 1}
    assert set(predictors["global-local"](features, logits).argmax(1).tolist()) == {0}
    assert set(method().predictors(mine, Prototypes.empty(4, 8))) == {"head"}
    assert method("tinyproto", cps_dim=2).primary_predictor == "local"


# What does not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"cps_dim": 9}, "cps-dim = 9: must be at most feature-dim = 8"),
        (
            {"name": "fedtgp", "aggregation": "median"},
            "'median': fedtgp trains its prototypes on every upload",
        ),
        ({"name": "fedtgp", "aggregation": "weighted"}, "must be one of mean, ppa, aps-sum"),
    ],
)
def test_stages_that_do_not_fit_are_refused_when_built(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(PbflError) as error:
        method(**keys)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "examples", "text"),
    [
        ({"cps_dim": 2}, None, "rows are 8 wide, expected 2"),
        ({"aggregation": "weighted"}, None, "counts are missing of rule 'weighted'"),
        ({"aggregation": "ppa"}, None, "the number of examples is missing of rule 'ppa'"),
        ({}, 3, "the number of examples is not part of rule 'mean'"),
    ],
)
def test_uploads_are_checked_against_the_rule(keys: dict[str, Any], examples: int | None, text: str) -> None:
    pipeline = method(**keys)
    with pytest.raises(RejectedPayload, match=text):
        pipeline.validate(replace(uploads()[0], num_examples=examples), pipeline.init(TASK, 0), TASK)


# Published costs --------------------------------------------------------------------------------------------


def published_cost(num_classes: int, sum_held: int, s: int, name: str, **keys: Scalar) -> float:
    """Millions of scalars a round: 20 clients that hold ``sum_held`` classes together, d = 500."""
    task = Task(num_classes, 500, (3, 32, 32))
    held = [sum_held // 20] * 19
    held.append(sum_held - sum(held))
    config: dict[str, Scalar] = {"method": name, "feature-dim": 500, "cps-dim": s, **keys}
    scalars = build_method(parse(config, SECTIONS)).paper_scalars(task, held)
    assert scalars is not None
    return scalars / 1e6


@pytest.mark.parametrize(
    ("num_classes", "sum_held", "dense", "sparse", "half"),
    [  # Σ(K_i + K)·s with ΣK_i of the Dirichlet(0.1) partitions; what the tables of CPS and TinyProto print
        (10, 102, "0.15", "0.02", "0.08"),  # CIFAR-10: 302
        (43, 332, "0.60", "0.06", None),  # GTSRB: 1192
        (100, 921, "1.46", "0.15", "0.73"),  # CIFAR-100: 2921
        (102, 691, "1.37", "0.14", None),  # Flowers-102: 2731
        (200, 1853, "2.93", "0.29", "1.46"),  # Tiny-ImageNet: 5853
    ],
)
def test_the_published_costs_come_out(
    num_classes: int, sum_held: int, dense: str, sparse: str, half: str | None
) -> None:
    for name in ("fedproto", "fedtgp"):
        assert printed(published_cost(num_classes, sum_held, 0, name)) == dense
        assert printed(published_cost(num_classes, sum_held, 50, name)) == sparse
        if half is not None:
            assert printed(published_cost(num_classes, sum_held, 250, name)) == half
        tiny = published_cost(num_classes, sum_held, 50, "tinyproto", **{"tinyproto.base": name})
        assert printed(tiny) == sparse
    assert printed(published_cost(num_classes, sum_held, 0, "protonorm")) == dense


def printed(millions: float) -> str:
    """Two decimals, halves up, as in the tables."""
    return f"{math.floor(millions * 100 + 0.5) / 100:.2f}"


def test_warns_of_training_and_alignment_that_have_not_converged() -> None:
    plain = method()
    state = plain.init(TASK, 0)
    converged = replace(state, metrics={"server-converged": 1.0, "alignment-converged": 1.0})
    assert plain.warnings(5, state) == plain.warnings(5, converged) == []
    (message,) = plain.warnings(5, replace(state, metrics={"server-converged": 0.0}))
    assert "their loss is not below 0.001" in message
    (message,) = plain.warnings(5, replace(state, metrics={"alignment-converged": 0.0}))
    assert "stopped at its maximum number of iterations" in message


def sums_of(class_sizes: Sequence[int]) -> Prototypes:
    """Rows of n_j·c̄_j with means of equal length."""
    means = torch.nn.functional.normalize(torch.rand(len(class_sizes), 8), dim=1)
    return Prototypes(
        means * torch.tensor(class_sizes)[:, None], torch.ones(len(class_sizes)).bool(), None, None
    )


def test_an_automatic_scale_is_the_published_one_on_balanced_sets() -> None:
    summed = method(aggregation="aps-sum")
    # the paper's constants for CIFAR-10, CIFAR-100 and (published 1.5e-3) Tiny-ImageNet
    for num_classes, n, published in ((10, 60_000, 1.5e-4), (100, 60_000, 1.5e-3), (200, 110_000, 1.636e-3)):
        even = sums_of([n // num_classes] * num_classes)
        torch.testing.assert_close(
            rules.mu(summed.stages, even, n), torch.full((num_classes,), published), rtol=1e-3, atol=0
        )
    nothing = Prototypes(torch.zeros(4, 8), torch.ones(4).bool(), None, None)
    torch.testing.assert_close(rules.mu(summed.stages, nothing, 100), torch.full((4,), 0.9 * 4 / 100))


def test_with_an_automatic_scale_no_class_becomes_longer_than_the_features_mean_length() -> None:
    summed = method(aggregation="aps-sum")
    uneven = sums_of([700, 200, 100])  # K/n = 0.003: the largest class keeps its length
    torch.testing.assert_close(rules.mu(summed.stages, uneven, 1000), torch.tensor([1 / 700, 0.0027, 0.0027]))
    sizes, lengths = torch.tensor([150.0, 40.0, 10.0]), torch.tensor([1.0, 3.0, 2.0])
    for _ in range(50):  # features follow their prototypes
        mean_length = float((sizes * lengths).sum() / sizes.sum())
        sums = Prototypes(torch.diag(sizes * lengths), torch.ones(3).bool(), None, None)
        lengths = rules.mu(summed.stages, sums, 200) * sizes * lengths
        assert lengths.max() <= mean_length * (1 + 1e-5)


def test_an_automatic_scale_is_never_guessed() -> None:
    summed = method(aggregation="aps-sum")
    with pytest.raises(RejectedPayload, match="needs the number of examples n"):
        rules.mu(summed.stages, sums_of([1, 2]), None)
