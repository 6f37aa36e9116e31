"""With its own parts switched off, or for one client alone, a method is the one that it extends."""

from dataclasses import replace

import pytest
import torch

from pbfl_flwr.method import Round
from tests.methods.conftest import play

CPD_OFF = {"align_weight": 0.0, "contrast_weight": 0.0, "distill_weight": 0.0}
TWO_CLIENTS = {0: (0, 0, 1, 1, 0, 1, 0, 1), 1: (1, 2, 1, 2, 2, 2, 1, 2)}


@pytest.mark.parametrize(
    ("name", "own", "base", "architecture", "exactly"),
    [
        ("fedprox", {"mu": 0.0}, "fedavg", "cnn4", True),
        ("feduv", {"variance_weight": 0.0, "uniformity_weight": 0.0}, "fedavg", "cnn4", False),
        ("fedfa", {"anchor_weight": 0.0, "calibration_rate": 0.0}, "fedavg", "cnn4", False),
        # a dropout, BatchNorm
        *(("fedcpd", {"base": b, **CPD_OFF}, b, a, True) for b in ("fedrep", "fedavg") for a in ("cnn2", "resnet4")),
        ("gfpl", {"dual_classifier": False, "pseudo_features": False}, "local", "cnn4", True),
        ("fml", {"alpha": 1.0, "beta": 1.0}, "local", "mlp5", False),
        ("fesem", {"centres": 1}, "fedavg", "cnn4", True),
    ],
)  # fmt: skip
def test_switched_off_it_is_its_base(make_method, make_client, name, own, base, architecture, exactly):
    keys = {"weighting": "uniform"} if name == "fesem" else {}
    ends = []
    for method in (
        make_method(name, own=own, models=architecture),
        make_method(base, models=architecture, **keys),
    ):
        *_, last = play(method, make_client, TWO_CLIENTS, 3, architecture, local_epochs=2, momentum=0.5)
        ends.append(last)
    for i in TWO_CLIENTS:
        for parameter, value in ends[1].networks[i].items():
            result = ends[0].networks[i][parameter]
            assert (
                torch.equal(result, value) if exactly else torch.allclose(result, value, atol=1e-5, rtol=1e-5)
            )
        if name in ("fedcpd", "gfpl"):  # nothing is remembered or sent for the parts that are off
            assert ends[0].memories[i].keys() == ends[1].memories[i].keys()
            assert ends[0].updates[i].metrics == ends[1].updates[i].metrics
    if name == "fedcpd":
        assert ends[0].state.prototypes.num_present == 0
    if name == "gfpl":
        assert [update.payload.num_components for update in ends[0].updates.values()] == [0, 0]


@pytest.mark.parametrize("name", ["lg-fedavg", "feddistill"])
def test_one_client_alone_trains_as_locally(make_method, make_client, task, name):
    """LG-FedAvg in any number of rounds, FedDistill in the first."""
    method, local = make_method(name), make_method("local")
    together, alone = make_client(), make_client()
    state = method.init(task, 0)
    if name == "lg-fedavg":
        head = {f"head.{key}": tensor.clone() for key, tensor in together.model.head.state_dict().items()}
        state = replace(state, tensors=head)
    for number in range(1, 4 if name == "lg-fedavg" else 2):
        together, alone = replace(together, round=number), replace(alone, round=number)
        update = method.local_update(together, method.broadcast(state, 0))
        state = method.aggregate(state, {0: update.payload}, Round(number, task, 1))
        assert update.metrics == local.local_update(alone, local.init(task, 0)).metrics
    for one, other in zip(together.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)
