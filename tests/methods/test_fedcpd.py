from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Round
from pbfl_flwr.methods.fedcpd.attention import MapDistillation, MapMemory, convolutional
from pbfl_flwr.models.build import head_names
from pbfl_flwr.payloads import Prototypes, RejectedPayload, Weights, WeightsAndPrototypes, part_of
from pbfl_flwr.prototypes.regularizer import alignment_loss, contrast
from pbfl_flwr.runs.client_store import ClientState, ClientStore
from pbfl_flwr.task import Task

OFF = {"align_weight": 0.0, "contrast_weight": 0.0, "distill_weight": 0.0}
SMALL = {"fusion_width": 4}
CLIENTS = {0: (0, 0, 1, 1, 0, 1, 0, 1), 1: (1, 2, 1, 2, 2, 2, 1, 2)}  # nobody holds class 3


def run(
    method, make_client, task, rounds, architecture="cnn4", through=lambda client, memory: memory, **training
):
    """Return the state, the clients and the last metrics after some rounds of two clients."""
    state = method.init(task, 3)
    memories: dict[int, Any] = {}
    models: dict[int, Any] = {}
    metrics: dict[int, Any] = {}
    for number in range(1, rounds + 1):
        uploads = {}
        for i, labels in CLIENTS.items():
            memory = through(i, memories.get(i, {}))
            client = make_client(i, architecture, labels, number, memory, **training)
            if i in models:
                client.model.load_state_dict(models[i])
            torch.manual_seed(10 * number + i)  # dropout
            update = method.local_update(client, method.broadcast(state, i))
            uploads[i], memories[i], metrics[i] = update.payload, update.memory, update.metrics
            models[i] = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
        state = method.aggregate(state, uploads, Round(number, task, 2))
    return state, models, memories, metrics


@pytest.mark.parametrize("base", ["fedrep", "fedavg"])
@pytest.mark.parametrize("architecture", ["cnn2", "resnet4"])  # dropout; BatchNorm
def test_with_all_off_it_is_its_base_bit_for_bit(make_method, make_client, task, architecture, base):
    runs = [
        run(make_method(name, own=own, models=architecture), make_client, task, 3, architecture)
        for name, own in (("fedcpd", {"base": base, **OFF}), (base, {}))
    ]
    (state, models, memories, _), (other_state, other_models, _, _) = runs
    assert all(torch.equal(t, other_state.tensors[name]) for name, t in state.weights.tensors.items())
    for i in CLIENTS:
        assert all(torch.equal(tensor, other_models[i][name]) for name, tensor in models[i].items())
        assert memories[i] == {}  # nothing is remembered and no prototype travels
    assert state.prototypes.num_present == 0


@pytest.mark.parametrize(
    ("on", "term"), [("align_weight", "align"), ("contrast_weight", "contrast"), ("distill_weight", "memory")]
)
def test_components_one_by_one(make_method, make_client, task, on, term):
    alone = make_method("fedcpd", own={**OFF, **SMALL, on: 0.5}, models="cnn4")
    first = run(alone, make_client, task, 1)
    assert set(first[3][0]) == {"loss.head-ce", "loss.ce"}  # no teacher and no prototype yet
    second = run(alone, make_client, task, 2)
    assert set(second[3][0]) == {"loss.head-ce", "loss.ce", f"loss.{term}"}
    off = run(make_method("fedcpd", own=OFF, models="cnn4"), make_client, task, 2)
    assert any(
        not torch.equal(t, off[0].weights.tensors[name]) for name, t in second[0].weights.tensors.items()
    )


def test_the_loss_is_the_papers(make_method, make_client, task):
    # One batch of all samples in stored order: the logged terms are those at the received body.
    own = {"align_weight": 0.3, "contrast_weight": 0.7, "distill_weight": 2.0, "temperature": 0.4, **SMALL}
    method = make_method("fedcpd", own=own, models="cnn4")
    settings = {"batch_size": 8, "batch_order": "fixed"}
    state, _, memories, _ = run(method, make_client, task, 1, **settings)
    client = make_client(0, "cnn4", CLIENTS[0], 2, memories[0], **settings)
    received = make_client(0, "cnn4", CLIENTS[0], 2, **settings)
    method.install(received, state)
    inputs, labels, P = received.data.train.inputs, received.data.train.labels, state.prototypes.values
    z = received.model.features(inputs).detach()
    align = sum(float((z[b] - P[labels[b]]).square().sum()) for b in range(8)) / 8
    pcl = 0.0
    for b in range(8):
        scores = [float(F.cosine_similarity(z[b], P[c], dim=0)) / 0.4 for c in (0, 1, 2)]  # 3: nobody has it
        pcl -= (scores[int(labels[b])] - float(torch.tensor(scores).logsumexp(0))) / 8
    distillation = MapDistillation([32, 64], width=4)
    distillation.load_state_dict(part_of(memories[0], "distillation"))
    teacher = MapMemory(received.model.stages, part_of(memories[0], "teacher"), distillation.attention)
    with torch.no_grad():
        memory = float(distillation(convolutional(received.model.feature_maps(inputs)), *teacher(inputs)))
    metrics = method.local_update(client, state).metrics
    assert metrics["loss.align"] == pytest.approx(0.3 * align, rel=1e-4)
    assert metrics["loss.contrast"] == pytest.approx(0.7 * pcl, rel=1e-4)
    assert metrics["loss.memory"] == pytest.approx(2.0 * memory, rel=1e-4)


def test_on_fedavg_a_step_descends_the_same_loss_in_the_whole_network(make_method, make_client, task):
    own = {"base": "fedavg", "align_weight": 0.1, "contrast_weight": 0.7, "distill_weight": 0.0}
    method = make_method("fedcpd", own=own, models="cnn4")
    settings = {"batch_size": 8, "batch_order": "fixed"}
    state = run(method, make_client, task, 1, **settings)[0]
    client, other = (make_client(0, "cnn4", CLIENTS[0], 2, **settings) for _ in range(2))
    upload = method.local_update(client, state).payload
    other.model.load_state_dict(state.weights.tensors)  # head and body are what was averaged
    inputs, labels, P = other.data.train.inputs, other.data.train.labels, state.prototypes.values
    z = other.model.features(inputs)
    scores = torch.stack([F.cosine_similarity(z, P[c][None]) / 0.5 for c in (0, 1, 2)], dim=1)
    loss = F.cross_entropy(other.model.head(z), labels) + 0.7 * F.cross_entropy(scores, labels)
    (loss + 0.1 * (z - P[labels]).square().sum(1).mean()).backward()
    for name, parameter in other.model.named_parameters():
        expected = parameter.detach() - 0.01 * parameter.grad
        assert torch.allclose(upload.weights.tensors[name], expected, atol=1e-6)


def test_no_term_but_cross_entropy_reaches_the_head(make_client):
    client = make_client(architecture="cnn4")
    inputs, labels = client.data.train.inputs, client.data.train.labels
    maps = client.model.feature_maps(inputs)
    z = client.model.neck(maps[-1])
    P, present = torch.randn(4, 6), torch.ones(4, dtype=torch.bool)
    distillation = MapDistillation([32, 64], width=4)
    teacher = MapMemory(client.model.stages, client.model.stages.state_dict(), distillation.attention)
    loss = alignment_loss(z, labels, P, present) + contrast(z, labels, P, present, 0.5)
    (loss + distillation(maps, *teacher(inputs))).backward()
    assert client.model.head.weight.grad is None
    assert client.model.stages[0][0].weight.grad is not None


def test_the_last_own_body_is_the_memory_and_survives_a_restart(make_method, make_client, task, tmp_path):
    method = make_method("fedcpd", own=SMALL, models="resnet4")

    def restart(i, memory):
        store = ClientStore(tmp_path, "x", i, "resnet4")
        store.save(ClientState(1, 1, {}, memory, {}, {}))
        loaded = ClientStore(tmp_path, "x", i, "resnet4").load()
        assert loaded is not None
        return loaded.memory

    straight = run(method, make_client, task, 3, "resnet4")
    restarted = run(method, make_client, task, 3, "resnet4", restart)
    for i in CLIENTS:
        teacher = part_of(straight[2][i], "teacher")
        trained = {name: t for name, t in straight[1][i].items() if name.startswith("stages.")}
        assert {f"stages.{name}" for name in teacher} == set(trained)
        for name, tensor in teacher.items():
            assert torch.equal(tensor, trained[f"stages.{name}"])  # its own after training, buffers too
        assert all(torch.equal(t, restarted[2][i][name]) for name, t in straight[2][i].items())
        assert all(torch.equal(t, restarted[1][i][name]) for name, t in straight[1][i].items())
    for name, tensor in straight[0].weights.tensors.items():
        assert torch.equal(tensor, restarted[0].weights.tensors[name])


def test_head_attention_and_memory_stay_at_home(make_method, make_client, task):
    method = make_method("fedcpd", own=SMALL, models="cnn4")
    state, models, _, _ = run(method, make_client, task, 2)
    assert not set(state.weights.tensors) & set(head_names(make_client(architecture="cnn4").model))
    assert all(name.startswith(("stages.", "neck.")) for name in state.weights.tensors)
    assert state.prototypes.present.tolist() == [True, True, True, False]
    assert models[0]["head.weight"].shape == (4, 6)


def test_server_averages_bodies_by_samples_and_prototypes_by_holders(make_method, task):
    method = make_method("fedcpd", models="cnn4")

    def upload(value, n, classes):
        present = torch.tensor([j in classes for j in range(4)])
        table = Prototypes(torch.full((4, 6), value) * present[:, None], present)
        return WeightsAndPrototypes(Weights({"w": torch.tensor([value])}, n), table)

    zero = WeightsAndPrototypes(Weights({"w": torch.zeros(1)}), Prototypes.empty(4, 6))
    state = method.aggregate(zero, {0: upload(1.0, 1, {0, 1}), 1: upload(5.0, 3, {1})}, Round(1, task, 2))
    assert float(state.weights.tensors["w"]) == 4.0  # (1·1 + 3·5)/4
    assert state.prototypes.values[:, 0].tolist() == [1.0, 3.0, 0.0, 0.0]  # class 1: (1 + 5)/2
    later = method.aggregate(state, {1: upload(7.0, 3, {1})}, Round(2, task, 2))
    assert later.prototypes.values[:, 0].tolist() == [1.0, 7.0, 0.0, 0.0]  # nobody sent class 0: kept
    assert method.aggregate(later, {}, Round(3, task, 2)) is later


def test_one_class_and_one_sample(make_method, make_client, task):
    method = make_method("fedcpd", own=SMALL, models="cnn4")
    state = method.init(task, 0)
    for labels in [(1, 1, 1, 1, 1), (2,)]:
        memory: dict[str, Tensor] = {}
        for number in (1, 2):
            client = make_client(0, "cnn4", labels, number, memory)
            update = method.local_update(client, state)
            memory, state = (
                update.memory,
                method.aggregate(state, {0: update.payload}, Round(number, task, 1)),
            )
            assert all(value == value for value in update.metrics.values())
    assert state.prototypes.present.tolist() == [False, True, True, False]


def test_cost_is_bodies_and_prototypes(make_method):
    # 4-layer CNN on 28x28: |θ| = 832 + 51,264 + 1024·512 + 512 = 576,896; ΣK_i = 106 for 20 clients
    method = make_method("fedcpd", models="cnn4", feature_dim=512)
    held = [5] * 14 + [6] * 6
    cost = method.paper_scalars(Task(10, 512, (1, 28, 28)), held, [(0, 0)] * 20)
    assert cost == 2 * 20 * 576_896 + (106 + 200) * 512


@pytest.mark.parametrize("model", ["mlp5", "vit-b-32"])
def test_a_model_without_maps_is_refused_unless_memory_is_off(make_method, model):
    task = Task(4, 6, (1, 32, 32))
    with pytest.raises(PbflError, match=rf"'{model}' does not have.*distill-weight = 0"):
        make_method("fedcpd", models=model).check(task, [model])
    make_method("fedcpd", models=model, own={"distill_weight": 0.0}).check(task, [model])
    windows = Task(4, 6, (3, 50))
    with pytest.raises(PbflError, match="'har-gru' does not have"):
        make_method("fedcpd", models="har-gru").check(windows, ["har-gru"])
    make_method("fedcpd", models="har-resnet").check(windows, ["har-resnet"])


def test_a_narrow_prototype_is_rejected(make_method, task):
    method = make_method("fedcpd", models="cnn4")
    state = method.init(task, 0)
    narrow = WeightsAndPrototypes(
        state.weights, Prototypes(torch.ones(4, 2), torch.ones(4, dtype=torch.bool))
    )
    with pytest.raises(RejectedPayload, match="2 wide, expected 6"):
        method.validate(narrow, state, task)
    sent = WeightsAndPrototypes.from_tensors(state.to_tensors(), task)
    assert sent.scalars() == state.scalars() == state.weights.scalars()
    with pytest.raises(RejectedPayload, match="other"):
        WeightsAndPrototypes.from_tensors({**state.to_tensors(), "other": torch.zeros(1)}, task)
