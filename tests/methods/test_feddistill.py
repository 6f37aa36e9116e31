from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pbfl_flwr.flower.messages import wire
from pbfl_flwr.method import Round
from pbfl_flwr.methods.feddistill import distillation
from pbfl_flwr.payloads import Logits, RejectedPayload
from pbfl_flwr.task import Task
from tests.methods.conftest import dealt, descend


def rows(**given):
    """Logits with the rows given as c0=[...]."""
    table = Logits.empty(4, 4)
    values, present = table.values.clone(), table.present.clone()
    for name, row in given.items():
        values[int(name[1:])], present[int(name[1:])] = torch.tensor(row), True
    return Logits(values, present)


def gradient(form, z, table, label=0):
    logits = torch.tensor([z], requires_grad=True)
    distillation(logits, torch.tensor([label]), table, form).backward()
    assert logits.grad is not None
    return logits.grad[0]


def test_gradients_by_hand():
    # At z = 0, s = (5, -3, -2): cross-entropy with softmax(s) has the gradient p(z) - p(s), bounded by 1. Raw logits
    # as targets would give p(z)·Σs - s = (-5, 3, 2).
    s = [5.0, -3.0, -2.0]
    table = Logits(torch.tensor([s, s, s]), torch.tensor([True, True, True]))
    uniform = torch.full((3,), 1 / 3)
    assert torch.allclose(gradient("ce-soft", [0.0] * 3, table), uniform - torch.tensor(s).softmax(0))
    raw = torch.zeros(1, 3, requires_grad=True)
    torch.nn.functional.cross_entropy(raw, torch.tensor([s])).backward()
    assert raw.grad is not None
    assert torch.allclose(raw.grad[0], torch.tensor([-5.0, 3.0, 2.0]), atol=1e-6)
    # mean square over B·K = 3 entries: 2·(z - s)/3
    assert torch.allclose(gradient("mse", [0.0] * 3, table), -2 * torch.tensor(s) / 3)
    # probabilities as they are: p(z) - s
    half = Logits(torch.tensor([[0.5, 0.5, 0.0]] * 3), torch.tensor([True] * 3))
    assert torch.allclose(gradient("paper", [0.0] * 3, half), uniform - torch.tensor([0.5, 0.5, 0.0]))


@pytest.mark.parametrize("protocol", ["clean", "htfl"])
def test_outputs_are_collected_on_the_way_before_each_step(make_method, make_client, protocol):
    method = make_method("feddistill", protocol=protocol)
    training = {"local_epochs": 2, "protocol": protocol, "learning_rate": 0.5}
    client, oracle = make_client(**training), make_client(**training)
    upload = method.local_update(client, Logits.empty(4, 4)).payload
    seen: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    for x, y in dealt(oracle, epochs=2):
        z = oracle.model(x)
        for output, label in zip(z.detach(), y.tolist(), strict=True):
            seen[label].append(output.softmax(0) if protocol == "clean" else output)
        descend(torch.nn.functional.cross_entropy(z, y), oracle.model.parameters(), 0.5)
    assert upload.present.tolist() == [True, True, True, False]
    for label, outputs in seen.items():
        assert torch.allclose(upload.values[label], torch.stack(outputs).mean(0), atol=1e-5)


def test_mean_over_holders_and_the_own_part_taken_out(make_method, task):
    # Class 0: clients 0 and 1 hold it; class 1: client 1 alone.
    one, other = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]
    uploads = {0: rows(c0=one), 1: rows(c0=other, c1=other), 2: rows()}
    soft, paper = make_method("feddistill", protocol="htfl"), make_method("feddistill")
    state = soft.aggregate(soft.init(task, 0), uploads, Round(1, task, 3))
    assert state.table.values[0].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert soft.broadcast(state, 0) is state.table
    assert state.table.scalars() == 2 * 4  # of the two rows
    state = paper.aggregate(paper.init(task, 0), uploads, Round(1, task, 3))
    assert paper.broadcast(state, 2) is state.table  # sent nothing: the mean of all
    to_0, to_1 = paper.broadcast(state, 0), paper.broadcast(state, 1)
    assert to_0.values[0].tolist() == other
    assert to_0.values[1].tolist() == other
    assert to_1.values[0].tolist() == one
    assert to_1.present.tolist() == [True, False, False, False]  # of class 1 it is the only holder
    assert not to_1.values[1].any()
    assert paper.aggregate(state, {}, Round(2, task, 3)) is state


def test_the_server_keeps_the_rows_that_travelled_and_no_others(make_method, task):
    """In the paper's form, where it takes them out of the mean again; also through a checkpoint."""
    one, other = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]
    method, uploads = make_method("feddistill"), {0: rows(c1=one), 1: rows(c1=other, c3=one), 2: rows()}
    state = method.aggregate(method.init(task, 0), uploads, Round(1, task, 3))
    assert {client: kept["rows"].tolist() for client, kept in state.sent.items()} == {
        0: [one],
        1: [other, one],
    }
    resumed = method.state.from_tensors(state.to_tensors(), task)
    for client, upload in uploads.items():
        assert torch.equal(resumed.rows_of(client).values, upload.values)
        assert torch.equal(resumed.rows_of(client).present, upload.present)


def test_a_class_without_uploads_is_kept_with_its_holders_or_dropped(make_method, task):
    one, other = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]
    for stale, expected in (("keep", [True, True, False, False]), ("drop", [False, True, False, False])):
        method = make_method("feddistill", stale=stale)
        state = method.init(task, 0)
        state = method.aggregate(state, {0: rows(c0=one), 1: rows(c0=other)}, Round(1, task, 2))
        state = method.aggregate(state, {0: rows(c1=one)}, Round(2, task, 2))
        assert state.table.present.tolist() == expected
        assert method.broadcast(state, 1).present.tolist() == expected
        if stale == "keep":
            assert method.broadcast(state, 0).values[0].tolist() == other
            assert method.broadcast(state, 1).values[0].tolist() == one


def test_the_mean_of_the_others_is_not_negative(make_method, task):
    """Three clients of which one alone gives a class any weight: for the others 0, not what rounding leaves."""
    method = make_method("feddistill")
    for share in range(1, 10):
        sent = {i: rows(c0=[share / 10 if i == 0 else 0.0, 0.0, 0.0, 1.0]) for i in range(3)}
        state = method.aggregate(method.init(task, 0), sent, Round(1, task, 3))
        assert method.broadcast(state, 0).values.min() == 0


@pytest.mark.parametrize("protocol", ["clean", "htfl"])
def test_the_term_is_weighed(make_method, make_client, protocol):
    """One step: of the loss, and of what the distillation adds to it, γ times as much."""
    table = rows(c1=[0.1, 0.7, 0.1, 0.1])  # a row of one class is enough
    result = {}
    for weight in (0.0, 1.0, 3.0):
        method = make_method("feddistill", protocol=protocol, own={"distillation_weight": weight})
        client = make_client(batch_size=8, learning_rate=0.1)
        update = method.local_update(client, table)
        result[weight] = update.metrics["loss.distillation"], client.model.head.bias.detach()
    assert result[1.0][0] > 0
    assert result[3.0][0] == pytest.approx(3 * result[1.0][0])
    assert result[0.0][0] == 0
    one, three = (result[weight][1] - result[0.0][1] for weight in (1.0, 3.0))
    torch.testing.assert_close(three, 3 * one, rtol=1e-3, atol=1e-6)


def test_a_client_that_makes_no_step_sends_nothing(make_method, make_client):
    method, client = make_method("feddistill", protocol="htfl"), make_client(labels=(0, 1), protocol="htfl")
    assert method.local_update(client, Logits.empty(4, 4)).payload.num_present == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize(("K", "own"), [(2, 0.999), (400, 0.4), (1000, 0.3)])
def test_rows_may_be_rounded_on_the_wire(make_method, K, own, dtype):
    # In int8 the other classes' 0.6/399 of 0.4 is less than half a step: they become 0, and the row adds up to 0.4.
    task, method = Task(K, 6, (1, 16, 16)), make_method("feddistill")
    values = torch.full((K, K), (1 - own) / (K - 1)).fill_diagonal_(own)
    sent = Logits(values, torch.ones(K, dtype=torch.bool))
    method.validate(wire.decode(wire.encode(sent, dtype), Logits, task), method.init(task, 0), task)


@pytest.mark.parametrize(
    "row",
    [[2.0, 0, 0, 0], [0.5, 0.2, 0, 0], [1.2, -0.2, 0, 0], [0.0] * 4, [1.0, -0.2, 0.2, 0], [1.03, 0, 0, 0]],
)
def test_a_row_that_is_no_distribution_is_refused(make_method, task, row):
    paper = make_method("feddistill")
    with pytest.raises(RejectedPayload, match="not a probability distribution"):
        paper.validate(rows(c0=row), paper.init(task, 0), task)


def test_uploads_are_checked(make_method, task):
    paper = make_method("feddistill")
    state = paper.init(task, 0)
    paper.validate(rows(), state, task)
    for more in ({"counts": torch.zeros(4, dtype=torch.int64)}, {"num_examples": 8}):
        with pytest.raises(RejectedPayload, match="unexpected counts: FedDistill sends none"):
            paper.validate(replace(rows(), **more), state, task)
    narrow = {"labels": torch.tensor([0], dtype=torch.uint8), "rows": torch.zeros(1, 3)}
    with pytest.raises(RejectedPayload, match=r"3 wide, must be 4\.\.4"):
        Logits.from_tensors(narrow, task)
