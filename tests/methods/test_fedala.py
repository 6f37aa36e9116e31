from dataclasses import replace

import pytest
import torch
from torch import nn

from pbfl_flwr.methods.averaging import copies
from pbfl_flwr.payloads import Weights

UPPER = ("head.weight", "head.bias")


def with_memory(make_client, amount, own=None, round=2, **training):
    """A client whose own head and A are given: A is ``amount`` everywhere."""
    fresh = make_client(architecture="cnn4")
    own = own or {name: tensor + 1.0 for name, tensor in copies(dict(fresh.model.named_parameters())).items()}
    memory = {f"own.{name}": own[name] for name in UPPER}
    memory |= {f"ala.{name}": torch.full_like(own[name], amount) for name in UPPER}
    return make_client(architecture="cnn4", round=round, memory=memory, **training), own


@pytest.mark.parametrize("amount", [0.0, 1.0])
def test_a_of_one_is_the_global_model_and_of_zero_the_own_head(make_method, make_client, task, amount):
    method = make_method("fedala", models="cnn4", own={"rate": 0.0})  # A does not move
    client, own = with_memory(make_client, amount)
    received = method.init(task, 5)
    method.install(client, received)
    for name, parameter in client.model.named_parameters():
        expected = own[name] if name in UPPER and amount == 0.0 else received.tensors[name]
        assert torch.equal(parameter, expected)  # lower tensors are always the global ones


def test_first_participation_takes_the_global_model(make_method, make_client, task):
    method = make_method("fedala", models="cnn4")
    client, received = make_client(architecture="cnn4"), method.init(task, 5)
    method.install(client, received)
    for name, parameter in client.model.named_parameters():
        assert torch.equal(parameter, received.tensors[name])
    update = method.local_update(client, received)
    assert {name for name in update.memory if name.startswith("ala.")} == set()
    for name in UPPER:
        assert torch.equal(update.memory[f"own.{name}"], update.payload.tensors[name])


@pytest.mark.parametrize(
    ("own", "passes"),
    [({"threshold": 1e-30, "max_epochs": 15}, 15), ({"threshold": 1e9, "window": 3}, 4)],  # calm: more than 3
)
def test_passes_are_bounded_and_more_than_the_window(make_method, make_client, task, own, passes):
    method = make_method("fedala", models="cnn4", own=own)
    state = method.init(task, 5)
    first = method.local_update(make_client(architecture="cnn4"), state)
    assert "ala.passes" not in first.metrics
    again = method.local_update(make_client(architecture="cnn4", round=2, memory=first.memory), state)
    assert again.metrics["ala.passes"] == passes


def test_scoring_before_training_does_not_apply_it_twice(make_method, make_client, task):
    method = make_method("fedala", models="cnn2", own={"max_epochs": 3})  # cnn2 has dropout
    state = method.init(task, 5)
    memory = method.local_update(make_client(architecture="cnn2"), state).memory
    uploads = []
    for scored_before in (False, True):
        client = make_client(architecture="cnn2", round=2, memory=memory)
        if scored_before:
            method.install(client, state)
        torch.manual_seed(0)
        uploads.append(method.local_update(client, state).payload.tensors)
    assert all(torch.equal(tensor, uploads[1][name]) for name, tensor in uploads[0].items())


def test_the_mixing_weights_do_not_depend_on_the_random_state(make_method, make_client, task):
    method = make_method("fedala", models="cnn2", own={"max_epochs": 3})  # cnn2 has dropout
    state, installed = method.init(task, 5), []
    memory = method.local_update(make_client(architecture="cnn2"), state).memory
    for seed in (0, 1):
        client = make_client(architecture="cnn2", round=2, memory=memory)
        torch.manual_seed(seed)
        method.install(client, state)
        installed.append(copies(dict(client.model.named_parameters())))
    assert all(torch.equal(tensor, installed[1][name]) for name, tensor in installed[0].items())


class HeadFirst(nn.Module):
    """Somebody's model that declares its classifier before its body."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(256, 6))

    def features(self, inputs):
        return self.body(inputs)


def test_the_last_tensors_are_the_classifiers_in_any_order_of_declaration(make_method, make_client):
    client = replace(make_client(), model=HeadFirst())
    memory = make_method("fedala").local_update(client, Weights(copies(client.model.state_dict()))).memory
    assert set(memory) == {"own.head.weight", "own.head.bias"}


def second_round(make_method, make_client, task, network):
    architecture = f"tests.methods.tiny_nets:{network}"
    method = make_method("fedala", models=architecture, own={"max_epochs": 2, "tensors": 0})
    first = method.local_update(make_client(architecture=architecture), method.init(task, 5))
    return method.local_update(
        make_client(architecture=architecture, round=2, memory=first.memory), method.init(task, 6)
    )


def test_takes_networks_that_cannot_be_copied(make_method, make_client, task):
    plain, other = (
        second_round(make_method, make_client, task, name).memory for name in ("Plain", "by_function")
    )
    assert all(torch.equal(tensor, other[name]) for name, tensor in plain.items())
    assert not bool((plain["ala.body.1.weight"] == 1).all())
    assert second_round(make_method, make_client, task, "weight_normed").metrics["ala.passes"] == 2


def test_passes_over_batches_follow_a_literal_loop(make_method, make_client, task):
    # Two rounds as the paper's Algorithm 1 has them: A until the window of losses is calm, then one pass on the same A.
    own = {"rate": 5.0, "sample_share": 1.0, "window": 3, "threshold": 0.002}
    method = make_method("fedala", models="cnn4", own=own)
    labels = (0, 0, 1, 1, 2, 2, 0, 1, 2)  # batches of 4, 4 and 1
    first = make_client(0, "cnn4", labels, batch_size=4, learning_rate=0.1)
    memory = method.local_update(first, method.init(task, 5)).memory
    mine = {name: memory[f"own.{name}"] for name in UPPER}
    amounts = {name: torch.ones_like(tensor) for name, tensor in mine.items()}
    for number, seed in ((2, 6), (5, 7)):
        received = method.init(task, seed)
        trial = make_client(0, "cnn4").model
        data, losses = first.data.train, []
        while True:
            for start in range(0, len(labels), 4):
                mixed = {
                    name: mine[name] + (received.tensors[name] - mine[name]) * amounts[name] for name in UPPER
                }
                trial.load_state_dict({**received.tensors, **mixed})
                trial.zero_grad()
                logits = trial(data.inputs[start : start + 4])
                loss = nn.functional.cross_entropy(logits, data.labels[start : start + 4])
                loss.backward()
                for name in UPPER:
                    slope = trial.get_parameter(name).grad * (received.tensors[name] - mine[name])
                    amounts[name] = (amounts[name] - 5.0 * slope).clamp(0, 1)
            losses.append(float(loss.detach()))
            calm = len(losses) > 3 and float(torch.tensor(losses[-3:]).std(unbiased=False)) < 0.002
            if number > 2 or calm:
                break
        client = make_client(0, "cnn4", labels, number, memory, batch_size=4, learning_rate=0.1)
        update = method.local_update(client, received)
        assert update.metrics["ala.passes"] == len(losses)
        memory = update.memory
        for name in UPPER:
            torch.testing.assert_close(memory[f"ala.{name}"], amounts[name], atol=1e-4, rtol=0)
            mine[name] = memory[f"own.{name}"]
    assert 0.0 < float(amounts["head.weight"].mean()) < 1.0


def test_mixes_weights_of_any_type_and_leaves_unused_ones_alone(make_method, make_client, task):
    odd = "tests.methods.tiny_nets:Odd"
    method = make_method("fedala", models=odd, own={"tensors": 0, "max_epochs": 2})
    sent = {name: tensor.float() for name, tensor in method.init(task, 5).tensors.items()}  # as the wire does
    memory = method.local_update(make_client(architecture=odd), Weights(sent)).memory
    assert memory["own.body.1.weight"].dtype is torch.float64
    received = Weights({name: tensor + 0.1 for name, tensor in sent.items()})
    amounts = method.local_update(make_client(architecture=odd, round=2, memory=memory), received).memory
    assert bool((amounts["ala.spare.weight"] == 1).all())  # its gradient is 0
    assert not bool((amounts["ala.body.1.weight"] == 1).all())
