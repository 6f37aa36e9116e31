from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.method import Round
from pbfl_flwr.methods.averaging import load_parameters
from pbfl_flwr.methods.fedkd.lowrank import compress, expand
from pbfl_flwr.methods.fedkd.method import MenteeState
from pbfl_flwr.models.build import build_model
from pbfl_flwr.payloads import LowRank, RejectedPayload, Weights
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import take
from tests.methods.conftest import dealt

WHOLE = {"energy_start": 1.0, "energy_end": 1.0}


def same(one, other, atol=0.0):
    return one.keys() == other.keys() and all(
        torch.allclose(one[n], other[n], rtol=0, atol=atol) for n in one
    )


def first_map(seed):
    """W as it is on every client at first."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(6, 6, bias=False).weight.detach()


def load(network, parameters):
    load_parameters(network, parameters)
    return network


def test_energy_moves_from_start_to_end(make_method):
    # T = 4 rounds: 0.95 + 0.03·t/4, t = 0..3, and the end value beyond
    method = make_method("fedkd", num_server_rounds=4)
    assert [round(method.energy(number), 6) for number in (1, 2, 3, 4, 5, 6)] == [
        0.95,
        0.9575,
        0.965,
        0.9725,
        0.98,
        0.98,
    ]
    assert make_method("fedkd", own={"schedule_rounds": 2}).energy(2) == pytest.approx(0.965)


@pytest.mark.parametrize("protocol", ["clean", "htfl"])
def test_a_round_follows_the_equations(make_method, make_client, task, protocol):
    keys = {"protocol": protocol, "learning_rate": 0.1}
    own = {**WHOLE, "compression": "safe", "auxiliary_learning_rate": 0.05, "max_grad_norm": 0.05}
    method = make_method("fedkd", own={**own, "auxiliary": "mlp5"}, **keys)
    client, oracle = make_client(architecture="cnn4", **keys), make_client(architecture="cnn4", **keys)
    state = method.init(task, 5)
    update = method.local_update(client, method.broadcast(state, 0))
    upload = update.payload

    detached = protocol == "clean"
    w, a = oracle.model, build_model("mlp5", task, 0)
    load_parameters(a, state.weights.tensors)
    W = nn.Linear(6, 6, bias=False)
    W.weight.data.copy_(first_map(oracle.seed))
    steps = [(w, 0.1), (a, 0.05), (W, 0.1)]
    optimisers = [torch.optim.SGD(network.parameters(), lr=rate) for network, rate in steps]
    cut = (lambda t: t.detach()) if detached else (lambda t: t)

    def kl(student, teacher):
        pointwise = F.kl_div(F.log_softmax(student, 1), F.softmax(cut(teacher), 1), reduction="none")
        return pointwise.sum(1).mean() if detached else pointwise.mean()

    for x, y in dealt(oracle):
        h, h_a = w.features(x), a.features(x)
        z, u = w.head(h), a.head(h_a)
        D = cut(F.cross_entropy(z, y) + F.cross_entropy(u, y))
        loss_w = F.cross_entropy(z, y) + kl(z, u) / D + F.mse_loss(h, W(cut(h_a))) / D
        loss_a = F.cross_entropy(u, y) + kl(u, z) / D + F.mse_loss(cut(h), W(h_a)) / D
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss_w.backward(retain_graph=True)
        loss_a.backward()
        for network, _ in steps:
            assert nn.utils.clip_grad_norm_(network.parameters(), 0.05) > 0.05
        for optimiser in optimisers:
            optimiser.step()
    for one, other in zip(client.model.parameters(), w.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(update.memory["projection"], W.weight, atol=1e-5)
    assert (upload.base, upload.version, upload.num_examples) == (0, 0, 8)
    assert update.metrics["sent-share"] == upload.scalars() / state.weights.scalars()
    assert update.metrics["zeroed-tensors"] == 0
    change = expand(upload, state.shapes)  # at energy 1 the exact update
    for name, parameter in a.named_parameters():
        assert torch.allclose(change[name], parameter - state.weights.tensors[name], atol=1e-5)


def rounds(method, make_client, task, numbers, present):
    """Run rounds in which the listed clients take part; return the states and every client's last memory."""
    states = [method.init(task, 1)]
    memories: dict[int, Any] = {}
    received: dict[tuple[int, int], LowRank] = {}
    for number in numbers:
        uploads = {}
        for i in present(number):
            client = make_client(i, round=number, memory=memories.get(i), learning_rate=0.1)
            down = LowRank.from_tensors(method.broadcast(states[-1], i).to_tensors(), task)
            received[number, i] = down
            update = method.local_update(client, down)
            memories[i] = update.memory
            upload = LowRank.from_tensors(update.payload.to_tensors(), task)
            method.validate(upload, states[-1], task)
            assert upload.version == states[-1].version
            uploads[i] = upload
        states.append(method.aggregate(states[-1], uploads, Round(number, task, 2)))
    return states, memories, received


def test_clients_rebuild_exactly_what_the_server_holds(make_method, make_client, task):
    method = make_method("fedkd", own={"auxiliary": "cnn4", "energy_start": 0.6, "energy_end": 0.6})
    states, memories, received = rounds(method, make_client, task, [1, 2, 3], lambda _: (0, 1))
    assert received[1, 0].base == -1
    assert [received[number, 0].base for number in (2, 3)] == [0, 1]
    assert received[3, 0].factors
    assert received[3, 0].scalars() < states[0].weights.scalars()
    for i in (0, 1):
        held = {n.removeprefix("held."): t for n, t in memories[i].items() if n.startswith("held.")}
        assert same(held, dict(states[2].weights.tensors))
        assert int(memories[i]["held-version"]) == 2


def test_who_missed_a_round_gets_the_whole_mentee(make_method, make_client, task):
    method = make_method("fedkd", own={"energy_start": 0.6})
    states, memories, received = rounds(
        method, make_client, task, [1, 2, 3], lambda number: (0,) if number == 2 else (0, 1)
    )
    assert received[3, 0].base == 1
    assert received[3, 1].base == -1
    assert received[3, 1].version == received[3, 0].version == states[2].version == 2
    assert same(dict(received[3, 1].dense), dict(states[2].weights.tensors))
    held = {n.removeprefix("held."): t for n, t in memories[1].items() if n.startswith("held.")}
    assert same(held, dict(states[2].weights.tensors))


def test_an_update_to_something_else_is_refused_and_a_repeated_one_is_not_applied_twice(
    make_method, make_client, task
):
    method = make_method("fedkd", own={"energy_start": 0.6})
    states, memories, received = rounds(method, make_client, task, [1, 2], lambda _: (0, 1))
    with pytest.raises(PbflError, match="update of mentee version 0, but holds none"):
        method.local_update(make_client(0, round=2), received[2, 0])
    later = method.aggregate(states[2], {}, Round(3, task, 2))
    assert later is states[2]
    repeated = make_client(0, round=3, memory=memories[0])
    update = method.local_update(repeated, received[2, 0])  # its answer to round 2 was lost on the way
    assert same(
        {n: t for n, t in update.memory.items() if n.startswith("held.")},
        {n: t for n, t in memories[0].items() if n.startswith("held.")},
    )


def test_as_coded_sends_parameters_and_stands_for_itself(make_method, make_client, task):
    method = make_method("fedkd", protocol="htfl", own={"energy_start": 0.5, "energy_end": 0.5})
    states, memories, received = rounds(method, make_client, task, [1, 2], lambda _: (0, 1))
    assert received[2, 0].base == -1
    assert set(received[2, 0].factors) == {
        name for name, tensor in states[0].weights.tensors.items() if tensor.dim() > 1
    }
    assert not [name for name in memories[0] if name.startswith("held")]
    still = method.local_update(make_client(learning_rate=1e-12), method.broadcast(states[0], 0)).payload
    torch.testing.assert_close(still.dense["head.bias"], states[0].weights.tensors["head.bias"])
    assert method.broadcast(states[1], 7) is states[1].update  # everybody can read it
    share = states[1].update.scalars() / states[1].weights.scalars()
    assert method.report(states[1]) == {"sent-share": share, "zeroed-tensors": 0.0}
    assert method.round_warnings(states[1]) == []


def test_matrices_that_as_coded_loses_are_said(make_method, make_client, task):
    """At energy 1 every matrix needs its full rank; the clients' zeros travel as they are from then on."""
    method = make_method("fedkd", protocol="htfl", own={"energy_start": 1.0, "energy_end": 1.0})
    state = method.init(task, 0)
    update = method.local_update(make_client(0), method.broadcast(state, 0))
    matrices = [name for name, tensor in state.weights.tensors.items() if tensor.dim() > 1]
    assert update.metrics["zeroed-tensors"] == len(matrices)
    after = method.aggregate(state, {0: update.payload}, Round(1, task, 1))
    assert (after.zeroed, after.update.factors) == (matrices, {})
    assert method.report(after)["zeroed-tensors"] == len(matrices)
    assert method.round_warnings(state) == []
    (note,) = method.round_warnings(after)
    assert f"{len(matrices)} matrices of the mentee became zero" in note
    assert matrices[0] in note
    assert method.round_warnings(MenteeState.from_tensors(after.to_tensors(), task)) == [note]


def test_lost_matrices_cross_the_wire_as_int8(make_method, make_client, task):
    method = make_method("fedkd", protocol="htfl", wire_dtype="int8", own={"energy_start": 1.0})
    sent = method.local_update(make_client(0), method.broadcast(method.init(task, 0), 0)).payload
    found = wire.decode(wire.encode(sent, "int8"), LowRank, task)
    assert {name: factors.shape for name, factors in found.factors.items()} == {
        name: factors.shape for name, factors in sent.factors.items()
    }
    assert all(not bool(factors.product().any()) for factors in found.factors.values())


def test_the_map_is_the_same_on_all_clients_at_first_and_each_keeps_its_own(make_method, make_client, task):
    method = make_method("fedkd", own={"auxiliary": "mlp5"})
    down = method.broadcast(method.init(task, 0), 0)
    still = {"learning_rate": 1e-12}
    for i in (0, 1):
        found = method.local_update(make_client(i, **still), down).memory["projection"]
        torch.testing.assert_close(found, first_map(0))
    kept = {"projection": torch.eye(6)}
    again = method.local_update(make_client(0, round=2, memory=kept, **still), down)
    torch.testing.assert_close(again.memory["projection"], torch.eye(6))


def test_who_was_away_in_the_first_round_gets_the_whole_mentee(make_method, make_client, task):
    method = make_method("fedkd", own={"energy_start": 0.6})
    (_, state), _, _ = rounds(method, make_client, task, [5], lambda _: (0,))
    assert (state.version, state.update.version, state.update.base) == (5, 5, 0)
    assert method.broadcast(state, 0) is state.update
    assert method.broadcast(state, 1).base == -1


def test_energies_are_those_of_the_round_on_both_sides(make_method, make_client, task):
    own = {"auxiliary": "cnn4", "energy_start": 0.5, "energy_end": 1.0, "schedule_rounds": 2}
    method, whole = make_method("fedkd", own=own), make_method("fedkd", own={**WHOLE, "auxiliary": "cnn4"})
    state, sizes = method.init(task, 0), []
    for number, energy in ((1, 0.5), (2, 0.75), (3, 1.0)):
        exact, sent = (
            m.local_update(make_client(round=number, learning_rate=0.1), m.broadcast(state, 0)).payload
            for m in (whole, method)
        )
        expected = compress(expand(exact, state.shapes), energy, "safe", base=0, num_examples=8)
        assert same(sent.to_tensors(), expected.to_tensors())
        after = method.aggregate(state, {0: exact}, Round(number, task, 1)).update
        expected = compress(expand(exact, state.shapes), energy, "safe", base=0, version=number)
        assert same(after.to_tensors(), expected.to_tensors())
        sizes.append(sent.scalars())
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(("weighting", "mean"), [("uniform", 3.0), ("samples", 4.0)])
def test_how_updates_are_weighted(make_method, task, weighting, mean):
    # 1 with n = 1 and 5 with n = 3: (1 + 5)/2, or (1·1 + 3·5)/4
    method = make_method("fedkd", weighting=weighting, own={**WHOLE, "auxiliary": "mlp5"})
    state = method.init(task, 0)
    sent = {
        i: LowRank(
            {n: torch.full_like(t, v) for n, t in state.weights.tensors.items()}, base=0, num_examples=count
        )
        for i, (v, count) in enumerate(((1.0, 1), (5.0, 3)))
    }
    after = method.aggregate(state, sent, Round(1, task, 2)).weights.tensors
    for name, tensor in state.weights.tensors.items():
        torch.testing.assert_close(after[name], tensor + mean)


@pytest.mark.parametrize("lost", [3, 4])
def test_up_to_three_lost_matrices_are_named(make_method, task, lost):
    method = make_method("fedkd", protocol="htfl")
    tensors = dict(method.init(task, 0).weights.tensors)
    names = [name for name, tensor in tensors.items() if tensor.dim() > 1][:lost]
    tensors |= {name: torch.zeros_like(tensors[name]) for name in [*names, "head.bias"]}  # a bias may be zero
    (note,) = method.round_warnings(MenteeState(Weights(tensors), LowRank(tensors), 1))
    assert f"{lost} matrices of the mentee became zero" in note
    assert f"({', '.join(names[:3])}{', ...' if lost == 4 else ''});" in note


@pytest.mark.parametrize("compression", ["safe", "as-coded"])
def test_clients_without_samples_leave_the_mentee(make_method, task, compression):
    method = make_method("fedkd", weighting="samples", own={**WHOLE, "compression": compression})
    state = method.init(task, 0)
    sent = LowRank(state.weights.tensors, base=0 if compression == "safe" else -1)  # n_i = 0
    after = method.aggregate(state, {0: sent, 1: sent}, Round(1, task, 2)).weights.tensors
    kept = state.weights.tensors if compression == "safe" else _cut(state, method, task)
    assert same(after, kept, atol=1e-6)


def _cut(state, method, task):
    """The state's own tensors as the scheme sends them."""
    return expand(compress(state.weights.tensors, method.energy(1), method.scheme), state.shapes)


def test_a_resumed_server_sends_the_whole_mentee(make_method, make_client, task):
    method = make_method("fedkd", own={"energy_start": 0.6})
    states, _, _ = rounds(method, make_client, task, [1], lambda _: (0,))
    for state in states:
        again = MenteeState.from_tensors(state.to_tensors(), task)
        assert (again.holders, again.version) == (state.holders, state.version)
        for client in (0, 1):  # it may have lost the version that it had
            resumed = method.broadcast(method.resumed(again), client)
            assert same(resumed.to_tensors(), state.whole.to_tensors())


def test_a_saturated_client_does_not_divide_by_zero(make_method, make_client, task):
    method = make_method("fedkd", own={"auxiliary": "mlp5"})
    client, start = (make_client(labels=(1,) * 8, batch_size=8) for _ in range(2))
    start = start.model
    state = method.init(task, 0)
    biased = {**state.weights.tensors, "head.bias": torch.tensor([0.0, 1e4, 0.0, 0.0])}
    with torch.no_grad():
        client.model.head.bias.copy_(biased["head.bias"])
    update = method.local_update(client, LowRank(biased))
    assert update.metrics["loss.ce"] == 0
    x, _ = take(client.data, client.data.train, slice(None), client.device)
    h, h_a = start.features(x), load(build_model("mlp5", task, 0), biased).features(x)
    apart = F.mse_loss(h, F.linear(h_a, first_map(client.seed)))
    assert update.metrics["loss.hidden"] == pytest.approx(apart.item() / 1e-6, rel=1e-4)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in client.model.parameters())


def test_what_does_not_fit_is_refused(make_method, task):
    with pytest.raises(PbflError, match=r"wire-dtype = 'int8'.*must be 'float32'"):
        make_method("fedkd", wire_dtype="int8")
    coded = make_method("fedkd", protocol="htfl", own={"auxiliary": "har-cnn"})
    with pytest.raises(PbflError, match="'as-coded' cannot factorise"):
        coded.check(Task(4, 6, (3, 50)), ["har-cnn"])
    with pytest.raises(PbflError, match=r"fedkd\.auxiliary = 'small-4'"):
        make_method("fedkd", own={"auxiliary": "small-4"})
    method = make_method("fedkd")
    state = method.init(task, 0)
    for base in (-1, 1):
        with pytest.raises(RejectedPayload, match=f"relative to version {base}, expected 0"):
            method.validate(LowRank(state.weights.tensors, base=base), state, task)
    with pytest.raises(RejectedPayload, match="missing or unexpected"):
        method.validate(LowRank({"head.bias": torch.zeros(4)}, base=0), state, task)
    coded = make_method("fedkd", protocol="htfl", wire_dtype="float16")  # rounding does not add up
    coded.check(task, ["cnn4"])
    coded.validate(LowRank(state.weights.tensors), replace(state, version=3), task)
