"""What FML and FedKD share, a network that each client trains besides its own, and FML."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.methods.averaging import load_parameters
from pbfl_flwr.methods.mutual import Conventions
from pbfl_flwr.models.build import build_model
from pbfl_flwr.payloads import RejectedPayload, Weights
from pbfl_flwr.task import Task
from tests.methods.conftest import dealt, same_weights
from tests.methods.tiny_nets import Plain


def test_divergence_and_its_reductions():
    # K = 2, student (0, 0), teacher (ln 3, 0): p = (3/4, 1/4); KL(p ‖ 1/2) = 3/4·ln(3/2) + 1/4·ln(1/2) = 0.130812
    student, teacher = torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]).log()
    batchmean, mean = Conventions("batchmean"), Conventions("mean")
    assert float(batchmean.divergence(student, teacher)) == pytest.approx(0.130812, abs=1e-6)
    z, u = torch.randn(5, 10), torch.randn(5, 10)
    assert torch.allclose(mean.divergence(z, u) * 10, batchmean.divergence(z, u))


@pytest.mark.parametrize("detach", [True, False])
def test_the_teacher_learns_unless_detached(detach):
    student, teacher = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    Conventions(detach=detach).divergence(student, teacher).backward()
    assert student.grad is not None
    assert student.grad.abs().max() > 0
    assert (teacher.grad is None) is detach


def test_a_round_follows_the_reference_loop(make_method, make_client, task):
    """Two optimisers, both losses backpropagated before either steps, both norms clipped on their own."""
    keys = {"protocol": "htfl", "learning_rate": 0.1}
    method = make_method("fml", own={"alpha": 0.3, "beta": 0.6, "max_grad_norm": 0.05}, **keys)
    client, oracle = make_client(**keys), make_client(**keys)
    state = method.init(task, 5)
    upload = method.local_update(client, state).payload
    assert upload.num_examples == 8

    w, a = oracle.model, build_model("cnn4", task, 0)
    load_parameters(a, state.tensors)
    step_w, step_a = torch.optim.SGD(w.parameters(), lr=0.1), torch.optim.SGD(a.parameters(), lr=0.1)

    def kl(log_student, teacher):
        return F.kl_div(log_student, teacher, reduction="none").mean()  # over B·K

    for x, y in dealt(oracle):
        z, u = w(x), a(x)
        loss_w = 0.3 * F.cross_entropy(z, y) + 0.7 * kl(F.log_softmax(z, 1), F.softmax(u, 1))
        loss_a = 0.6 * F.cross_entropy(u, y) + 0.4 * kl(F.log_softmax(u, 1), F.softmax(z, 1))
        step_w.zero_grad()
        step_a.zero_grad()
        loss_w.backward(retain_graph=True)
        loss_a.backward()
        for network in (w, a):
            assert nn.utils.clip_grad_norm_(network.parameters(), 0.05) > 0.05
        step_w.step()
        step_a.step()
    same_weights(a, upload.tensors)
    same_weights(w, client.model.state_dict())


class Counting(Plain):
    """Counts its training steps, in what its state holds besides tensors."""

    steps = 0

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return super().features(inputs)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.steps)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.steps = int(state)


@pytest.mark.parametrize("method", ["fml", "fedkd", "fedmrl"])
def test_all_that_the_auxiliary_network_keeps_lasts(make_client, method, task):
    name = f"{__name__}:Counting"
    built = build_method(parse({"method": method, f"{method}.auxiliary": name, "feature-dim": 6}, SECTIONS))
    down = built.broadcast(built.init(task, 0), 0)
    memory: Mapping[str, torch.Tensor] = {}
    for number in (1, 2):
        memory = built.local_update(make_client(round=number, memory=memory), down).memory
        assert int(memory["aux._extra_state"]) == 2 * number  # 8 samples in batches of 4


def test_what_does_not_fit_is_refused(make_method, make_client, task):
    with pytest.raises(PbflError, match=r"fml\.auxiliary = 'small-4': must be one architecture"):
        make_method("fml", own={"auxiliary": "small-4"})
    with pytest.raises(PbflError, match=r"fml\.auxiliary = 'cnn5': unknown model 'cnn5'"):
        make_method("fml", own={"auxiliary": "cnn5"})
    with pytest.raises(PbflError, match=r"fml\.auxiliary: model 'cnn4'"):
        make_method("fml").check(Task(4, 6, (2,)), ["mlp5"])
    method = make_method("fml")
    state = method.init(task, 0)
    with pytest.raises(PbflError, match="the received weights are not those of the auxiliary network 'cnn4'"):
        method.local_update(make_client(), make_method("fml", own={"auxiliary": "mlp5"}).init(task, 0))
    with pytest.raises(RejectedPayload, match="missing or unexpected"):
        method.validate(Weights({"head.bias": torch.zeros(4)}), state, task)


@pytest.fixture(params=["fml", "fedkd"])
def with_batchnorm(request, make_method):
    return make_method(request.param, own={"auxiliary": "resnet4"})


def test_buffers_of_the_auxiliary_network_stay_on_the_client(with_batchnorm, make_client, task):
    method, client = with_batchnorm, make_client()
    down = method.broadcast(method.init(task, 0), 0)
    update = method.local_update(client, down)
    assert not [name for name in update.payload.to_tensors() if "running" in name or "tracked" in name]
    buffers = {name for name in update.memory if name.startswith("aux.")}
    assert {name.rsplit(".")[-1] for name in buffers} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    again = method.local_update(replace(client, round=2, memory=update.memory), down)
    tracked = next(name for name in buffers if name.endswith("num_batches_tracked"))
    assert (int(update.memory[tracked]), int(again.memory[tracked])) == (2, 4)  # 8 samples in batches of 4


def test_a_batch_of_one_is_left_out_for_the_auxiliary_networks_batchnorm(with_batchnorm, make_client, task):
    # batches of 4 and 1; the client's own mlp5 would take both
    client = make_client(labels=(0, 1, 2, 0, 1), drop_last="never")
    down = with_batchnorm.broadcast(with_batchnorm.init(task, 0), 0)
    memory = with_batchnorm.local_update(client, down).memory
    assert {int(t) for name, t in memory.items() if name.endswith("num_batches_tracked")} == {1}
