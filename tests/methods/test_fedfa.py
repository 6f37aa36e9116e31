import pytest
import torch
from torch.nn import functional as F

from pbfl_flwr.methods.averaging import load_parameters
from pbfl_flwr.methods.fedfa import RunningAnchors, anchor_loss, initial_anchors
from pbfl_flwr.util.user_code import own_code
from tests.methods.conftest import dealt, descend, same_weights
from tests.pretend_card import CUDA, card


def test_anchors_at_the_start():
    anchors = initial_anchors(4, 6, seed=0)
    assert torch.equal(anchors @ anchors.T, torch.eye(4))  # different basis vectors
    assert torch.equal(anchors.sum(1), torch.ones(4))
    assert not torch.equal(anchors, initial_anchors(4, 6, seed=1))
    torch.testing.assert_close(initial_anchors(9, 4, seed=0).norm(dim=1), torch.ones(9))  # K > d


def test_anchor_loss_does_not_wait_for_a_gpu():
    with card():
        features, labels = torch.ones(3, 2).to(CUDA), torch.tensor([0, 0, 2]).to(CUDA)
        torch.cuda.set_sync_debug_mode("error")
        try:
            anchor_loss(features, labels, features)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("biased", "expected"), [(False, 3.25), (True, 1.75)])
def test_running_anchors_by_hand(biased, expected):
    # Class 0 is in one of two batches with mean 4, its anchor is 1: ¼·1 + ¾·4 = 3.25, or ¼·1 + ¾·4/2 = 1.75.
    # Class 1 is in both, means 2 and 6, anchor 1: ¼ + ¾·4 = 3.25; then ¼·3.25 + ¾·5 = 4.5625. Class 2 is in none.
    running = RunningAnchors(torch.ones(3, 1), 0.25, biased)
    totals = [running.sums, running.holding, running.batches]
    running.add(torch.tensor([[3.0], [5.0], [2.0]]), torch.tensor([0, 0, 1]))
    running.add(torch.tensor([[6.0]]), torch.tensor([1]))
    running.close_epoch()
    assert running.anchors.flatten().tolist() == [expected, 3.25, 1.0]
    running.add(torch.tensor([[5.0]]), torch.tensor([1]))
    running.close_epoch()
    assert running.anchors.flatten().tolist() == [expected, 4.5625, 1.0]  # the next epoch starts from nothing
    # A CUDA graph goes on adding to these.
    assert all(a is b for a, b in zip(totals, [running.sums, running.holding, running.batches], strict=True))


def test_a_round_of_batches_follows_the_reference_loop(make_method, make_client, task):
    # Adam's moments go on from batch to batch, a class's epoch mean is over all batches.
    method = make_method("fedfa", models="cnn4", own={"anchor_mean": "all-batches"})
    state, keys = method.init(task, 3), {"learning_rate": 0.1, "batch_size": 3, "drop_last": "never"}
    client, oracle = (make_client(architecture="cnn4", local_epochs=2, **keys) for _ in range(2))
    upload = method.local_update(client, state).payload
    network, A = oracle.model.train(), state.tensors[".anchors"]
    load_parameters(network, {name: t for name, t in state.tensors.items() if name != ".anchors"})
    adam = torch.optim.Adam(network.head.parameters(), lr=0.001)
    dealt_batches, moved = list(dealt(oracle, epochs=2)), A.clone()
    for epoch in (dealt_batches[:3], dealt_batches[3:]):
        sums = torch.zeros_like(A)
        for x, y in epoch:
            z = network.features(x)
            loss = F.cross_entropy(network.head(z), y)
            for b, label in enumerate(y.tolist()):
                loss = loss + 0.1 / 4 * (z[b] - A[label]).square().sum() / int((y == label).sum())
            descend(loss, network.parameters(), 0.1)
            adam.zero_grad()
            F.cross_entropy(network.head(A), torch.arange(4)).backward()
            adam.step()
            for label in set(y.tolist()):
                sums[label] += z[y == label].mean(0).detach()
        for label in (0, 1, 2):
            moved[label] = 0.5 * moved[label] + 0.5 * sums[label] / len(epoch)
    torch.testing.assert_close(upload.tensors[".anchors"], moved, atol=1e-6, rtol=1e-5)
    same_weights(network, upload.tensors)


def test_a_networks_own_parameter_may_be_called_anchors(make_method, task):
    name = "tests.methods.tiny_nets:with_anchors"
    method = make_method("fedfa", models=own_code(name, [name]))
    state = method.init(task, 0)
    assert state.tensors["anchors"].shape == (task.feature_dim,)
    assert state.tensors[".anchors"].shape == (task.num_classes, task.feature_dim)
    assert "anchors" in method.network(state)
