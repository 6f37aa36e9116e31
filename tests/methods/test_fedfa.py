import pytest
import torch
from torch.nn import functional as F

from pbfl_flwr.method import Round
from pbfl_flwr.methods.averaging import load_parameters
from pbfl_flwr.methods.fedfa import RunningAnchors, anchor_loss, initial_anchors
from pbfl_flwr.payloads import RejectedPayload, Weights
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import batches, take
from tests.pretend_card import CUDA, card


def test_anchors_at_the_start():
    anchors = initial_anchors(4, 6, seed=0)
    assert torch.equal(anchors @ anchors.T, torch.eye(4))  # different basis vectors
    assert torch.equal(anchors.sum(1), torch.ones(4))
    assert not torch.equal(anchors, initial_anchors(4, 6, seed=1))
    torch.testing.assert_close(initial_anchors(9, 4, seed=0).norm(dim=1), torch.ones(9))  # K > d


def test_anchor_loss_by_hand():
    # Class 0 twice at distances² 1 and 9, class 2 once at 4, K = 3: ((1 + 9)/2 + 4)/3 = 3
    features = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 2.0]])
    anchors = torch.tensor([[0.0, 0.0], [9.0, 9.0], [2.0, 0.0]])
    assert float(anchor_loss(features, torch.tensor([0, 0, 2]), anchors)) == 3.0


def test_anchor_loss_does_not_wait_for_a_gpu():
    with card():
        features, labels = torch.ones(3, 2).to(CUDA), torch.tensor([0, 0, 2]).to(CUDA)
        torch.cuda.set_sync_debug_mode("error")
        try:
            anchor_loss(features, labels, features)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("biased", "expected"), [(False, 2.5), (True, 1.5)])
def test_running_anchors_by_hand(biased, expected):
    # Class 0 is in one of two batches with mean 4, its anchor is 1: ½·1 + ½·4 = 2.5, or ½·1 + ½·4/2 = 1.5.
    # Class 1 is in both, means 2 and 6, anchor 1: ½ + ½·4 = 2.5. Class 2 is in none.
    running = RunningAnchors(torch.ones(3, 1), 0.5, biased)
    running.add(torch.tensor([[3.0], [5.0], [2.0]]), torch.tensor([0, 0, 1]))
    running.add(torch.tensor([[6.0]]), torch.tensor([1]))
    running.close_epoch()
    assert running.anchors.flatten().tolist() == [expected, 2.5, 1.0]
    running.add(torch.tensor([[4.5]]), torch.tensor([1]))
    running.close_epoch()
    assert running.anchors.flatten().tolist() == [expected, 3.5, 1.0]  # the next epoch starts from nothing


def test_a_step_by_hand(make_method, make_client, task):
    # One batch of all samples: an SGD step on CE + λ·anchor loss, then an Adam step of the head on the anchors.
    method = make_method("fedfa", models="cnn4", own={"anchor_weight": 0.4, "calibration_rate": 0.01})
    state = method.init(task, 3)
    client = make_client(architecture="cnn4", batch_size=8, batch_order="fixed", learning_rate=0.1)
    twin = make_client(architecture="cnn4")
    method.install(twin, state)
    A, inputs, labels = state.tensors["anchors"], twin.data.train.inputs, twin.data.train.labels
    z = twin.model.features(inputs)
    (F.cross_entropy(twin.model.head(z), labels) + 0.4 * anchor_loss(z, labels, A)).backward()
    with torch.no_grad():
        for parameter in twin.model.parameters():
            parameter -= 0.1 * parameter.grad
    adam = torch.optim.Adam(twin.model.head.parameters(), lr=0.01)
    adam.zero_grad()
    F.cross_entropy(twin.model.head(A), torch.arange(4)).backward()
    adam.step()
    upload = method.local_update(client, state).payload
    for name, parameter in twin.model.named_parameters():
        torch.testing.assert_close(upload.tensors[name], parameter.detach(), atol=1e-5, rtol=1e-4)
    for j in range(3):
        moved = 0.5 * A[j] + 0.5 * z[labels == j].mean(0).detach()
        torch.testing.assert_close(upload.tensors["anchors"][j], moved, atol=1e-5, rtol=1e-4)
    assert torch.equal(upload.tensors["anchors"][3], A[3])  # a class it lacks


def test_anchors_move_once_an_epoch(make_method, make_client, task):
    # A network that stands still has the same mean m in every epoch: ½·A + ½·m after one, ¼·A + ¾·m after two.
    method = make_method("fedfa", models="cnn4", own={"calibration_rate": 0.0})
    state, moved = method.init(task, 3), []
    for epochs in (1, 2):
        client = make_client(architecture="cnn4", local_epochs=epochs, batch_size=8, learning_rate=1e-12)
        moved.append(method.local_update(client, state).payload.tensors["anchors"] - state.tensors["anchors"])
    assert float(moved[0].norm()) > 0.1
    torch.testing.assert_close(moved[1], 1.5 * moved[0])


def test_a_round_of_batches_follows_the_reference_loop(make_method, make_client, task):
    # Adam's moments go on from batch to batch, a class's epoch mean is over all batches.
    method = make_method("fedfa", models="cnn4", own={"anchor_mean": "all-batches"})
    state, keys = method.init(task, 3), {"learning_rate": 0.1, "batch_size": 3, "drop_last": "never"}
    client, oracle = (make_client(architecture="cnn4", local_epochs=2, **keys) for _ in range(2))
    upload = method.local_update(client, state).payload
    network, A = oracle.model.train(), state.tensors["anchors"]
    load_parameters(network, {name: t for name, t in state.tensors.items() if name != "anchors"})
    sgd = torch.optim.SGD(network.parameters(), lr=0.1)
    adam = torch.optim.Adam(network.head.parameters(), lr=0.001)
    order, moved = oracle.generator("fit"), A.clone()
    for _ in range(2):
        sums, number = torch.zeros_like(A), 0
        for index in batches(8, oracle.training, order):
            x, y = take(oracle.data, oracle.data.train, index, oracle.device)
            z = network.features(x)
            loss = F.cross_entropy(network.head(z), y)
            for b, label in enumerate(y.tolist()):
                loss = loss + 0.1 / 4 * (z[b] - A[label]).square().sum() / int((y == label).sum())
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            adam.zero_grad()
            F.cross_entropy(network.head(A), torch.arange(4)).backward()
            adam.step()
            for label in set(y.tolist()):
                sums[label] += z[y == label].mean(0).detach()
            number += 1
        for label in (0, 1, 2):
            moved[label] = 0.5 * moved[label] + 0.5 * sums[label] / number
    torch.testing.assert_close(upload.tensors["anchors"], moved, atol=1e-6, rtol=1e-5)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(upload.tensors[name], parameter.detach(), atol=1e-5, rtol=1e-4)


def test_server_averages_anchors_with_the_weights(make_method, task):
    method = make_method("fedfa", models="cnn4")
    state = Weights({"anchors": torch.zeros(4, 6)})
    uploads = {
        i: Weights({"anchors": torch.full((4, 6), v)}, n) for i, (v, n) in enumerate([(1.0, 1), (5.0, 3)])
    }
    after = method.aggregate(state, uploads, Round(1, task, 2))
    assert torch.equal(after.tensors["anchors"], torch.full((4, 6), 4.0))  # (1·1 + 3·5)/4, absent classes too


def test_without_anchor_loss_and_calibration_it_is_fedavg(make_method, make_client, task):
    off = make_method("fedfa", models="cnn4", own={"anchor_weight": 0.0, "calibration_rate": 0.0})
    plain = make_method("fedavg", models="cnn4")
    one, other = (
        m.local_update(make_client(architecture="cnn4"), m.init(task, 0)).payload.tensors
        for m in (off, plain)
    )
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, atol=1e-6, rtol=1e-5)


def test_an_upload_without_anchors_is_rejected(make_method, task):
    method = make_method("fedfa", models="cnn4")
    state = method.init(task, 0)
    bare = {name: tensor for name, tensor in state.tensors.items() if name != "anchors"}
    with pytest.raises(RejectedPayload, match="anchors"):
        method.validate(Weights(bare, 3), state, task)


def test_cost(make_method):
    # 2·M·(|w| + K·d), 4-layer CNN on CIFAR-10
    method = make_method("fedfa", models="cnn4", feature_dim=512)
    assert method.paper_scalars(Task(10, 512, (3, 32, 32)), [10] * 20, []) == 40 * (878_538 + 5_120)
