"""Methods outside of the package, ``method=my_package.module:build``; docs/examples has feddyn.py and cosproto.py."""

import sys
from bdb import BdbQuit
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from pbfl_flwr import calls
from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan.configuration import RequestedKeys, check
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.method import Method, Round, Update, head_scores
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.payloads import Prototypes, RejectedPayload, Weights, WeightsAndPrototypes
from pbfl_flwr.payloads.contract import Magnitudes
from pbfl_flwr.payloads.metrics import Part
from pbfl_flwr.training.class_metrics import Areas, ByClass
from pbfl_flwr.training.evaluation import evaluate
from pbfl_flwr.training.loop import fit
from pbfl_flwr.training.trial import try_step
from tests.flower.inprocess import federation
from tests.methods.conftest import TASK, settings_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A module that is no good method's page."""
    (tmp_path / "no_page.py").write_text(
        "from pbfl_flwr.methods.fedproto import build\n"
        "def nothing(settings): return None\n"
        "number = 3\n"
        "from pbfl_flwr.methods.local import Local\n"
        "class Silent(Local):\n"
        "    up = int  # no payload\n"
        "def silent(settings): return Silent()\n"
        "class Named(Local):\n"
        "    predicts = ('head', 'my own')\n"
        "def named(settings): return Named()\n"
        "class Headed(Local):\n"
        "    primary_predictor = 'global'\n"
        "def headed(settings): return Headed()\n"
        "def raises(settings): return settings.run.colours\n"
        "def takes_two(settings, more): return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def feddyn(**keys):
    return build_method(settings_of("feddyn:build", models="mlp5", **keys))


def test_its_settings_come_from_one_key():
    assert feddyn().alpha == 0.1
    assert feddyn(method_settings="alpha=0.5").alpha == 0.5
    settings = settings_of("feddyn:build", method_settings="alpha=0.5")
    assert parse(settings.as_dict(), SECTIONS) == settings  # what devices and resumed runs read
    assert settings.fingerprint() != settings_of("feddyn:build").fingerprint()


def test_feddyn_by_hand():
    """α = 0.5, M = 4, w = 1; clients answer 2 and 4, so the mean is 3, h = -0.5·(2/4)·(3 - 1) = -0.5, w = 3 + 1."""
    method = feddyn(method_settings="alpha=0.5")
    fresh = method.init(TASK, 0)
    ones = {name: torch.ones_like(w) for name, w in fresh.weights.tensors.items()}
    state = type(fresh)(Weights(ones), fresh.drift)
    uploads = {i: Weights({name: i * one for name, one in ones.items()}) for i in (2, 4)}
    new = method.aggregate(state, uploads, Round(1, TASK, 4))
    assert all(bool((w == 4).all()) for w in new.weights.tensors.values())
    assert all(bool((h == -0.5).all()) for h in new.drift.tensors.values())


def test_feddyn_remembers_its_gradient(make_client):
    method = feddyn()
    down = method.broadcast(method.init(TASK, 0), 0)
    first = method.local_update(make_client(), down)
    second = method.local_update(make_client(round=2, memory=first.memory), down)
    for name, w in down.tensors.items():
        g = -0.1 * (first.payload.tensors[name] - w)
        torch.testing.assert_close(first.memory[f"g.{name}"], g)
        g = g - 0.1 * (second.payload.tensors[name] - w)
        torch.testing.assert_close(second.memory[f"g.{name}"], g)
    assert first.metrics["loss.linear"] == 0
    assert second.metrics["loss.linear"] != 0


def test_cosproto_by_hand():
    """z at 0, 90 and 60 degrees to its prototype, and one of a class without."""
    method: Any = build_method(settings_of("cosproto:build", models="mlp5"))
    features = torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.5, 0.75**0.5], [1.0, 1.0]])
    labels, prototypes = torch.tensor([0, 0, 0, 1]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    known = (features, labels, prototypes, torch.tensor([True, False]))
    assert float(method.regularizer(*known)) == pytest.approx((0 + 1 + 0.5 + 0) / 4)
    half = torch.tensor([0.5, 1.0])
    assert float(method.regularizer(*known, class_weights=half)) == pytest.approx(1.5 / 8)
    first = torch.tensor([[True, False], [True, True]])
    assert float(method.regularizer(*known, masks=first)) == pytest.approx((0 + 1 + 0 + 0) / 4)


def test_moving_averages_by_hand():
    """m = 0.75: old 4 and new 8 give 5; a new class starts where its holders are, one that nobody sent stays."""
    for name, width in (("emaproto", 6), ("varproto", 12)):
        method = build_method(settings_of(f"{name}:build", method_settings="momentum=0.75"))
        present = {"old": [1, 0, 1, 0], "new": [1, 1, 0, 0]}
        old, new = (
            method.up(
                torch.full((4, width), size) * torch.tensor(is_there).unsqueeze(1), torch.tensor(is_there) > 0
            )
            for size, is_there in ((4.0, present["old"]), (8.0, present["new"]))
        )
        result = method.aggregate(old, {0: new, 1: new}, Round(2, TASK, 2))
        assert result.values[:, 0].tolist() == [5, 8, 4, 0]
        assert result.present.tolist() == [True, True, True, False]
        assert method.aggregate(old, {}, Round(2, TASK, 2)) is old


def test_varproto_sends_variances_and_draws_from_them(make_client):
    method = build_method(settings_of("varproto:build"))
    moments = sys.modules["varproto"].Moments
    nothing = method.init(TASK, 0)
    upload = method.local_update(client := make_client(labels=(0, 0, 0, 1)), nothing).payload
    z = client.model.features(client.data.train.inputs).detach()
    torch.testing.assert_close(upload.means[0], z[:3].mean(0))
    torch.testing.assert_close(upload.variances[0], z[:3].var(0, unbiased=False), atol=1e-5, rtol=1e-4)
    assert upload.variances[1].tolist() == [0] * 6  # of one sample
    with pytest.raises(RejectedPayload, match="a variance is negative"):
        method.validate(moments(upload.values - 1, upload.present), nothing, TASK)
    metrics = method.local_update(make_client(labels=(2, 2, 3, 3)), upload).metrics
    assert metrics["loss.regularizer"] == 0  # no prototype of its classes
    assert metrics["loss.pseudo"] > 0
    same = method.local_update(make_client(labels=(0, 0, 1, 1)), upload).metrics
    assert 0 < same["loss.regularizer"] < float((z - z.mean(0)).square().sum() + upload.values.square().sum())


@pytest.mark.parametrize(
    ("name", "keys", "term"),
    [
        ("feddyn", "alpha=0.2", "prox"),
        ("cosproto", "weight=2.0", "regularizer"),
        ("emaproto", "momentum=0.9", "all"),
        ("varproto", "weight=0.5,momentum=0.9", "pseudo"),
    ],
)
def test_the_examples_run(tmp_path, name, keys, term):
    run = federation(tmp_path, f"{name}:build", method_settings=keys).run()
    history = run.strategy.history
    assert [line.failures for line in history] == [[], []]
    assert 0 < (history[1].client_metrics[f"loss.{term}"] or 0) < 4
    if name == "cosproto":
        assert "global" in history[1].accuracy
        broadcast = run.strategy.state.broadcast
        lengths = torch.linalg.vector_norm(broadcast.values[broadcast.present], dim=1)
        torch.testing.assert_close(lengths, torch.ones(broadcast.num_present))


def test_a_breakpoint_without_a_terminal_is_explained(tmp_path, monkeypatch):
    def stop(self, client, down):
        raise BdbQuit

    started = federation(tmp_path, "feddyn:build")
    monkeypatch.setattr(sys.modules["feddyn"].FedDyn, "local_update", stop)
    with pytest.raises(
        PbflError, match=r"a breakpoint\(\) was quit with q, or has no terminal here; with one worker"
    ):
        started.run()


def forgets(*arguments: object, **named: object) -> None:
    """What a user wrote without a return."""


FORGETS = rf"forgets \(test_external.py:{forgets.__code__.co_firstlineno}\) returned None; must return "


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("init", "a Dynamics"),
        ("broadcast", "a Weights"),
        ("local_update", "an Update"),
        ("predictors", "functions by name, each from features and logits to scores"),
        ("aggregate", "a Dynamics"),
        ("report", "numbers by name"),
        ("warnings", "a list of texts"),
        ("auxiliary_architectures", "a tuple"),
    ],
)
def test_a_function_that_returns_nothing_is_named_with_its_place(tmp_path, monkeypatch, name, expected):
    started = federation(tmp_path, "feddyn:build")
    monkeypatch.setattr(sys.modules["feddyn"].FedDyn, name, forgets)
    with pytest.raises(PbflError, match=FORGETS + expected):
        started.run()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"payload": None}, "with the payload None; must return one with a Weights$"),
        ({"payload": 3}, "with the payload 3; must "),
        ({"memory": None}, "with the memory None; must return one with tensors by name$"),
        ({"memory": {"kept": 3}}, "with the memory {'kept': 3}; "),
        (
            {"memory": {3: torch.ones(1)}},
            r"with the memory {3: tensor.*}; must return one with tensors by name$",
        ),
        (
            {"memory": {"a": torch.eye(2).to_sparse()}},
            "whose memory 'a' is torch.sparse_coo of torch.float32, which",
        ),
        (
            {"memory": {"a": torch.ones(1, dtype=torch.complex128)}},
            "whose memory 'a' is torch.strided of torch.compl",
        ),
        ({"metrics": None}, "with the metrics None; must return one with numbers by name$"),
        ({"metrics": {"x": torch.ones(1)}}, "whose metric 'x' is of type Tensor; must be a number$"),
        ({"metrics": {"n": 0.5}}, "whose metric 'n' must have another name than n, c, t, v, k, g, a$"),
    ],
)
def test_an_update_of_other_parts_is_refused(make_client, monkeypatch, change, says):
    method = feddyn()
    whole = type(method).local_update
    monkeypatch.setattr(type(method), "local_update", lambda *arguments: replace(whole(*arguments), **change))
    down = method.broadcast(method.init(TASK, 0), 0)
    with pytest.raises(PbflError, match=rf"<lambda> \(test_external.py:\d+\) returned an Update {says}"):
        calls.local_update(method, make_client(), down)


@pytest.mark.parametrize("which", ["init", "broadcast", "local_update", "aggregate"])
@pytest.mark.parametrize("part", ["values", "present"])
def test_a_table_with_fewer_rows_than_classes_is_refused(make_client, monkeypatch, which, part):
    """On the wire the missing classes would only be absent ones."""
    table = Prototypes.empty(TASK.num_classes, TASK.feature_dim)
    few: Any = replace(table, **{part: getattr(table, part)[:2]})
    method, one = build_method(settings_of("emaproto:build", models="mlp5")), make_client()
    made: Any = few
    if which == "local_update":
        monkeypatch.setattr(type(method), "up", WeightsAndPrototypes)
        made = Update(WeightsAndPrototypes(Weights({}), few))
    monkeypatch.setattr(type(method), which, lambda *arguments: made)
    made_by = {
        "init": lambda: calls.first_state(method, TASK, 0),
        "broadcast": lambda: calls.broadcast(method, table, 0, TASK),
        "local_update": lambda: calls.local_update(method, one, table),
        "aggregate": lambda: calls.as_state(
            method, method.aggregate(table, {}, Round(1, TASK, 0)), method.aggregate, TASK
        ),
    }
    with pytest.raises(
        PbflError, match=rf"<lambda> \(.* a table whose '{part}' is of shape \(2,.*; .* K = 4 rows"
    ):
        made_by[which]()


NUMBERS = r"Magnitudes that are no numbers; must have rows by class, tensors by name, and whole samples$"


@pytest.mark.parametrize(
    ("name", "returns", "says"),
    [
        ("scalars", None, "None; must return a whole number$"),
        ("scalars", 4.5, "4.5; must return a whole number$"),
        ("classes", 4, r"4; must return class ids from 0 to 3, or None$"),
        ("classes", [4], r"\[4\]; must return class ids"),
        ("classes", ["1"], r"\['1'\]; must return class ids"),
        ("magnitudes", None, "None; must return a Magnitudes$"),
        ("magnitudes", Magnitudes({0: cast(Any, "x")}), NUMBERS),
        ("magnitudes", Magnitudes(cast(Any, torch.ones(3))), NUMBERS),
        ("magnitudes", Magnitudes(tensors={"a": cast(Any, torch.ones(3))}), NUMBERS),
        ("magnitudes", Magnitudes(samples=cast(Any, None)), NUMBERS),
    ],
)
def test_what_a_payload_says_of_itself_wrongly_is_named_before_round_1(
    make_client, monkeypatch, name, returns, says
):
    monkeypatch.setattr(Prototypes, name, lambda *arguments: returns)
    method = build_method(settings_of("emaproto:build", models="mlp5"))
    with pytest.raises(PbflError, match=rf"method 'emaproto' on 2 .*<lambda> \(.*\) returned {says}"):
        try_step("mlp5", method, make_client())


def test_a_payload_that_says_wrong_things_only_of_some_uploads_loses_these(tmp_path, monkeypatch):
    """It may be the upload that is odd, here one of four classes; the others count."""
    monkeypatch.setattr(Prototypes, "classes", lambda upload, task: [1 // (1 - (upload.num_present == 4))])
    run = federation(tmp_path, "emaproto:build").run()
    failed = {failure.client: failure.reason for failure in run.strategy.history[-1].failures}
    assert failed
    assert all(reason.startswith("upload rejected: ZeroDivisionError") for reason in failed.values())
    assert run.strategy.history[-1].trained


def test_metrics_of_the_server_have_texts_for_names():
    with (
        patch.object(Method, "report", lambda self, state: {3: 0.5}),
        pytest.raises(PbflError, match=r"returned {3: 0.5}; must return numbers by name"),
    ):
        calls.report(feddyn(), None)


def test_losses_and_regularisers_that_return_nothing_are_named(make_client):
    forgotten: Any = forgets
    with pytest.raises(PbflError, match=FORGETS + "its terms by name, each a tensor$"):
        fit(make_client(), forgotten)
    cosproto: Any = build_method(settings_of("cosproto:build", models="mlp5"))
    method = replace(cosproto, regularizer=forgets)
    table = Prototypes(torch.ones(4, 6), torch.ones(4, dtype=torch.bool))
    with pytest.raises(PbflError, match=FORGETS + "a Tensor$"):
        method.local_update(make_client(), table)


def test_predictors_without_functions_or_scores_are_refused(make_client):
    method, forgotten = feddyn(), cast(Any, forgets)
    with pytest.raises(PbflError, match=FORGETS + "a Tensor$"):
        evaluate(make_client(), {"head": forgotten})
    down = method.broadcast(method.init(TASK, 0), 0)
    with (
        patch.object(type(method), "predictors", lambda self, client, down: {"head": None}),
        pytest.raises(PbflError, match=r"<lambda> .* returned {'head': None}; must return functions"),
    ):
        calls.predictors(method, make_client(), down)


def test_a_prediction_that_no_report_has_room_for_is_refused(make_client):
    with pytest.raises(ValueError, match=r"predictor 'mine': must be one of head, global, "):
        evaluate(make_client(), {"head": head_scores, "mine": head_scores})
    both = evaluate(make_client(), {"head": head_scores, "mine": head_scores}, ("head", "mine"))
    assert both.correct["mine"] == both.correct["head"]


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"c": 0.5}, r"^metric 'c' must have another name than n, c, t, v, k, g, a$"),
        ({"loss.ce": 1.0, "k": 0.5}, "^metric 'k' must "),
        ({"mine": torch.tensor(0.5)}, "^metric 'mine' is of type Tensor; must be a number$"),
        ({"mine": [0.5]}, "^metric 'mine' is of type list; "),
        ({"mine": True}, "^metric 'mine' is of type bool; "),
        ({"mine": 2**63}, "^metric 'mine' is a whole number of more than 64 bits; must be a float$"),
        ({str(i): 0.5 for i in range(94)}, "^metrics are 94; must be at most 93$"),
        ({3: 0.5}, "^metric 3 must have a printable name of 1 to 100 characters$"),
        ({"a\nb": 0.5}, r"^metric 'a\\nb' must have a printable name "),
    ],
)
def test_a_metric_that_a_report_would_swallow_is_refused(metrics, says):
    with pytest.raises(PbflError, match=says):
        Report(10, 4, metrics=metrics).to_record()


def test_no_metric_may_have_the_name_of_a_field_of_the_report():
    counts = ByClass([4], {"head": [1]}, {"head": [4]})
    areas = {"head": Areas(0.5, 0.5)}
    report = Report(
        10, 4, 1, {"head": 1}, num_validation=1, validation={}, by_class=counts, gpu_mb=1.0, areas=areas
    )
    assert set(report.to_record()) == {*Part}


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("moment", "Before", "'Before': must be 'after' or 'before'"),
        ("moment", None, "None: must be 'after' or 'before'"),
        ("name", 3, "3: must be a text"),
        ("state", Weights({}), r"Weights.*: must be a class"),
        ("predicts", "head", r"""'head': must be a tuple of texts, of a single one \("head",\)"""),
        ("predicts", ("head", 3), r"\('head', 3\): must be a tuple of texts.*"),
        ("unit_features", "no", "'no': must be True or False"),
        ("uses", "stale", "'stale': must be a frozenset of texts"),
        ("server_device", lambda self: "cuda", ".*: must be a text"),
        ("streams", True, "True: must be a method"),
    ],
)
def test_an_attribute_of_another_kind_is_refused(monkeypatch, attribute, value, says):
    settings = settings_of("emaproto:build")
    monkeypatch.setattr(type(build_method(settings)), attribute, value)
    with pytest.raises(
        PbflError, match=rf"^method = 'emaproto:build': EmaProto\.{attribute} = {says}$"
    ) as error:
        build_method(settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"method": "fedyn:build"}, "method = 'fedyn:build': cannot import 'fedyn' .*PYTHONPATH"),
        ({"method": "feddyn:bild"}, "'feddyn' has no function 'bild'"),
        ({"method": "no_page:number"}, "'no_page' has no function 'number'"),
        ({"method": "no_page:nothing"}, r"nothing \(no_page.py:2\) returned None; must return a Method$"),
        (
            {"method": "no_page:silent"},
            "int lacks the attribute to_tensors, from_tensors, scalars, classes, magn",
        ),
        ({"method": "no_page:named"}, "'local': predicts contains 'my own'; must be up to 40 letters"),
        (
            {"method": "feddyn:build", "predictor": "mine"},
            "predictor = 'mine': .* no such predictor .*; must be one of auto, head$",
        ),
        ({"method": "no_page:headed"}, "primary_predictor = 'global': must be one listed in predicts: head$"),
        (
            {"method": "no_page:raises"},
            r"raises\(settings\) raised AttributeError: .*'colours' \(no_page.py:14\)$",
        ),
        ({"method": "no_page:takes_two"}, r"missing 1 required .*'more' \(no_page.py:15\)$"),
        ({"method": "no_page:build", "method-settings": "a=1"}, "its module has no class Config"),
        ({"method": "feddyn:build", "method-settings": "alpha=0"}, "alpha = 0: must be greater than 0"),
        ({"method": "feddyn:build", "method-settings": "mu=1"}, "unknown key 'mu'; must be one of alpha"),
        ({"method": "feddyn:build", "method-settings": "alpha"}, "must be a comma list of name=value"),
        ({"method": "feddyn:build", "method-settings": "alpha=[1]"}, "must be a comma list of name=value"),
        (
            {"method": "fedproto", "method-settings": "alpha=1"},
            "needs a method of your own .* are keys of their own",
        ),
        ({"method": "feddyn:build", "aggregation": "ppa"}, "has no such stage"),
        ({"method": "feddyn:build", "dp-noise": 1.0}, "which these settings cannot protect"),
        (
            {"method": "feddyn:build", "min-class-count": 5},
            "min-class-count = 5: .*which these settings cannot protect",
        ),
        (
            {"method": "gfpl", "protocol": "htfl", "min-class-count": 2},  # the default of another protocol
            "min-class-count = 2: .*which these settings cannot protect",
        ),
        ({"method": "feddyn:"}, "must be one of local, .*, or my_package.module:build"),
    ],
)
def test_what_does_not_fit_is_one_line(page, keys, says):
    with pytest.raises(PbflError, match=says) as error:
        check(RequestedKeys({"models": "cnn4", **keys}))
    assert "\n" not in str(error.value)


def test_what_sends_nothing_holds_back_every_class() -> None:
    check(RequestedKeys({"method": "local", "protocol": "htfl", "min-class-count": 2}))
    with pytest.raises(PbflError, match=r"dp-noise = 1\.0: method 'local' sends Nothing, which"):
        check(RequestedKeys({"method": "local", "dp-noise": 1.0}))
