import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Round
from pbfl_flwr.payloads import part_of
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import own_code
from tests.methods.conftest import play

OFF = {"align_weight": 0.0, "contrast_weight": 0.0, "distill_weight": 0.0}
SMALL = {"fusion_width": 4}
CLIENTS = {0: (0, 0, 1, 1, 0, 1, 0, 1), 1: (1, 2, 1, 2, 2, 2, 1, 2)}  # nobody holds class 3


@pytest.mark.parametrize(
    ("on", "term"), [("align_weight", "align"), ("contrast_weight", "contrast"), ("distill_weight", "memory")]
)
def test_components_one_by_one(make_method, make_client, on, term):
    alone = make_method("fedcpd", own={**OFF, **SMALL, on: 0.5}, models="cnn4")
    first, second = play(alone, make_client, CLIENTS, 2, "cnn4")
    assert set(first.updates[0].metrics) == {"loss.head-ce", "loss.ce"}  # no teacher and no prototype yet
    assert set(second.updates[0].metrics) == {"loss.head-ce", "loss.ce", f"loss.{term}"}
    body = second.state.weights.tensors
    assert all(
        name.startswith(("stages.", "neck.")) for name in body
    )  # head, attention and memory stay at home
    *_, off = play(make_method("fedcpd", own=OFF, models="cnn4"), make_client, CLIENTS, 2, "cnn4")
    assert any(not torch.equal(tensor, off.state.weights.tensors[name]) for name, tensor in body.items())


def test_the_teacher_is_the_clients_own_last_body_with_its_buffers(make_method, make_client):
    method = make_method("fedcpd", own=SMALL, models="resnet4")
    *_, last = play(method, make_client, CLIENTS, 2, "resnet4")
    for i in CLIENTS:
        teacher = part_of(last.memories[i], "teacher")
        trained = {name: t for name, t in last.networks[i].items() if name.startswith("stages.")}
        assert {f"stages.{name}" for name in teacher} == set(trained)
        assert all(torch.equal(tensor, trained[f"stages.{name}"]) for name, tensor in teacher.items())


def test_a_class_that_nobody_sends_keeps_its_prototype(make_method, make_client, task):
    method, here = make_method("fedcpd", own=SMALL, models="cnn4"), {1: (0, 1), 2: (1,)}
    first, second = play(method, make_client, CLIENTS, 2, "cnn4", present=here.__getitem__)
    rows = second.state.prototypes
    assert rows.present.tolist() == [True, True, True, False]
    assert torch.equal(rows.values[0], first.state.prototypes.values[0])
    assert not torch.equal(rows.values[1], first.state.prototypes.values[1])
    assert method.aggregate(second.state, {}, Round(3, task, 2)) is second.state


@pytest.mark.parametrize("model", ["mlp5", "vit-b-32"])
def test_a_model_without_maps_is_refused_unless_memory_is_off(make_method, model):
    task = Task(4, 6, (1, 32, 32))
    with pytest.raises(PbflError, match=rf"'{model}' does not have.*distill-weight = 0"):
        make_method("fedcpd", models=model).check(task, [model])
    if model == "vit-b-32":
        return
    make_method("fedcpd", models=model, own={"distill_weight": 0.0}).check(task, [model])
    windows = Task(4, 6, (3, 50))
    with pytest.raises(PbflError, match="'har-gru' does not have"):
        make_method("fedcpd", models="har-gru").check(windows, ["har-gru"])
    make_method("fedcpd", models="har-resnet").check(windows, ["har-resnet"])


@pytest.mark.parametrize("altered", ["of_unit_features", "with_other_maps"])
def test_a_model_that_computes_maps_or_features_by_itself_is_refused(make_method, task, altered):
    model = own_code(f"tests.methods.tiny_nets:{altered}", [f"tests.methods.tiny_nets:{altered}"])
    with pytest.raises(PbflError, match=rf"'{model}' computes its maps or features otherwise"):
        make_method("fedcpd", models=model).check(task, [model])
    make_method("fedcpd", models=model, own={"distill_weight": 0.0}).check(task, [model])
