from dataclasses import replace

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
from pbfl_flwr.payloads import LowRank, RejectedPayload
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import take
from tests.methods.conftest import dealt, play, same_weights

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


def test_energy_moves_from_start_to_end(make_method):
    # T = 4 rounds: 0.95 + 0.03·t/4, t = 0..3, and the end value beyond
    method = make_method("fedkd", num_server_rounds=4)
    energies = [round(method.energy(number), 6) for number in (1, 2, 3, 4, 5, 6)]
    assert energies == [0.95, 0.9575, 0.965, 0.9725, 0.98, 0.98]
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
    same_weights(w, client.model.state_dict())
    assert torch.allclose(update.memory["projection"], W.weight, atol=1e-5)
    assert (upload.base, upload.version, upload.num_examples) == (0, 0, 8)
    assert update.metrics["sent-share"] == upload.scalars() / state.weights.scalars()
    assert update.metrics["zeroed-tensors"] == 0
    change = expand(upload, state.shapes)  # at energy 1 the exact update
    for name, parameter in a.named_parameters():
        assert torch.allclose(change[name], parameter - state.weights.tensors[name], atol=1e-5)


LABELS = dict.fromkeys((0, 1), (0, 0, 1, 1, 2, 2, 0, 1))


def stored(memory):
    """The version of the mentee that a client keeps, and its tensors."""
    tensors = {
        name.removeprefix("received."): t for name, t in memory.items() if name.startswith("received.")
    }
    return int(memory["received-version"]), tensors


def test_clients_rebuild_exactly_what_the_server_has(make_method, make_client):
    method = make_method("fedkd", own={"auxiliary": "cnn4", "energy_start": 0.6, "energy_end": 0.6})
    first, second, third = play(method, make_client, LABELS, 3, learning_rate=0.1)
    assert [after.received[0].base for after in (first, second, third)] == [-1, 0, 1]
    assert third.received[0].factors
    assert third.received[0].scalars() < first.state.weights.scalars()
    for memory in third.memories.values():
        version, tensors = stored(memory)
        assert version == 2
        assert same(tensors, dict(second.state.weights.tensors))


def test_a_client_that_missed_a_round_gets_the_whole_mentee(make_method, make_client):
    method = make_method("fedkd", own={"energy_start": 0.6})
    absent_once = {1: (0, 1), 2: (0,), 3: (0, 1)}
    _, second, third = play(
        method, make_client, LABELS, 3, present=absent_once.__getitem__, learning_rate=0.1
    )
    assert (third.received[0].base, third.received[1].base) == (1, -1)
    assert third.received[1].version == third.received[0].version == second.state.version == 2
    assert same(dict(third.received[1].dense), dict(second.state.weights.tensors))
    assert same(stored(third.memories[1])[1], dict(second.state.weights.tensors))
    *_, late = play(method, make_client, LABELS, 5, present=lambda number: (0,) if number == 5 else ())
    assert (late.state.version, late.state.update.version, late.state.update.base) == (5, 5, 0)
    assert method.broadcast(late.state, 0) is late.state.update
    assert method.broadcast(late.state, 1).base == -1


def test_an_update_to_something_else_is_refused_and_a_repeated_one_is_not_applied_twice(
    make_method, make_client, task
):
    method = make_method("fedkd", own={"energy_start": 0.6})
    *_, after = play(method, make_client, LABELS, 2, learning_rate=0.1)
    with pytest.raises(PbflError, match="update of mentee version 0, but holds none"):
        method.local_update(make_client(0, round=2), after.received[0])
    assert method.aggregate(after.state, {}, Round(3, task, 2)) is after.state
    repeated = make_client(0, round=3, memory=after.memories[0])
    update = method.local_update(repeated, after.received[0])  # its answer to round 2 was lost on the way
    assert same(stored(update.memory)[1], stored(after.memories[0])[1])


def test_as_coded_sends_parameters_and_stands_for_itself(make_method, make_client, task):
    method = make_method("fedkd", protocol="htfl", own={"energy_start": 0.5, "energy_end": 0.5})
    start = method.init(task, 0)
    first, second = play(method, make_client, LABELS, 2, learning_rate=0.1)
    assert second.received[0].base == -1
    matrices = {name for name, tensor in start.weights.tensors.items() if tensor.dim() > 1}
    assert set(second.received[0].factors) == matrices
    assert not [name for name in second.memories[0] if name.startswith("received")]
    still = method.local_update(make_client(learning_rate=1e-12), method.broadcast(start, 0)).payload
    torch.testing.assert_close(still.dense["head.bias"], start.weights.tensors["head.bias"])
    assert method.broadcast(first.state, 7) is first.state.update  # everybody can read it
    share = first.state.update.scalars() / first.state.weights.scalars()
    assert method.report(first.state) == {"sent-share": share, "zeroed-tensors": 0.0}
    assert method.warnings(5, first.state) == []


def test_warns_of_matrices_that_as_coded_loses(make_method, make_client, task):
    """At energy 1 every matrix needs its full rank; the clients' zeros travel as they are from then on."""
    method = make_method("fedkd", protocol="htfl", own={"energy_start": 1.0, "energy_end": 1.0})
    state = method.init(task, 0)
    update = method.local_update(make_client(0), method.broadcast(state, 0))
    matrices = sorted(name for name, tensor in state.weights.tensors.items() if tensor.dim() > 1)
    assert update.metrics["zeroed-tensors"] == len(matrices)
    after = method.aggregate(state, {0: update.payload}, Round(1, task, 1))
    assert (after.zeroed, after.update.factors) == (matrices, {})
    assert method.report(after)["zeroed-tensors"] == len(matrices)
    assert method.warnings(5, state) == []
    (note,) = method.warnings(5, after)
    assert len(matrices) > 3
    assert note.startswith(f"{len(matrices)} matrices of the mentee became zero, since")
    assert f"({', '.join(matrices[:3])}, ...);" in note
    stored = dict(sorted(after.to_tensors().items()))  # as a file has them
    assert method.warnings(5, MenteeState.from_tensors(stored, task)) == [note]


def test_lost_matrices_cross_the_wire_as_int8(make_method, make_client, task):
    method = make_method("fedkd", protocol="htfl", wire_dtype="int8", own={"energy_start": 1.0})
    sent = method.local_update(make_client(0), method.broadcast(method.init(task, 0), 0)).payload
    result = wire.decode(wire.encode(sent, "int8"), LowRank, task)
    shapes = [{name: factors.shape for name, factors in one.factors.items()} for one in (result, sent)]
    assert shapes[0] == shapes[1]
    assert all(not bool(factors.product().any()) for factors in result.factors.values())


def test_each_client_keeps_its_own_map(make_method, make_client, task):
    method = make_method("fedkd", own={"auxiliary": "mlp5"})
    client = make_client(0, round=2, memory={"projection": torch.eye(6)}, learning_rate=1e-12)
    again = method.local_update(client, method.broadcast(method.init(task, 0), 0))
    torch.testing.assert_close(again.memory["projection"], torch.eye(6))


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


@pytest.mark.parametrize("compression", ["safe", "as-coded"])
def test_clients_without_samples_leave_the_mentee(make_method, task, compression):
    method = make_method("fedkd", weighting="samples", own={**WHOLE, "compression": compression})
    state = method.init(task, 0)
    sent = LowRank(state.weights.tensors, base=0 if compression == "safe" else -1)  # n_i = 0
    after = method.aggregate(state, {0: sent, 1: sent}, Round(1, task, 2)).weights.tensors
    cut = expand(compress(state.weights.tensors, method.energy(1), method.scheme), state.shapes)
    assert same(after, state.weights.tensors if compression == "safe" else cut, atol=1e-6)


def test_a_resumed_server_sends_the_whole_mentee(make_method, make_client, task):
    method = make_method("fedkd", own={"energy_start": 0.6})
    (after,) = play(method, make_client, LABELS, 1, present=lambda _: (0,), learning_rate=0.1)
    for state in (method.init(task, 0), after.state):
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
    mentee = build_model("mlp5", task, 0)
    load_parameters(mentee, biased)
    h, h_a = start.features(x), mentee.features(x)
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
