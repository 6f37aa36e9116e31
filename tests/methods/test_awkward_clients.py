"""Every method with clients as they come: without samples, with one, with one class, late, away for rounds.

No Flower here: the method's two halves, with every payload and state rebuilt from its tensors as the wire and the
disk do.
"""

import copy
from typing import Any

import pytest
import torch

from pbfl_flwr.method import Round
from pbfl_flwr.methods import build_method
from pbfl_flwr.training.evaluation import evaluate
from tests.methods.conftest import TASK, settings_of

# Batches of 4 leave 1 sample over; client 3 begins in round 7, and in round 8 only client 2 is there.
LABELS = {0: (0, 0, 1, 1, 2, 2, 0, 1, 1), 1: (3,), 2: (), 3: (2, 2, 2, 2, 2)}
PRESENT = {1: (0, 2), 2: (1, 2), 7: (0, 1, 3), 8: (2,)}
MORE: dict[str, dict[str, Any]] = {
    "tinyproto": {"cps_dim": 3},
    "gfpl": {"own": {"start": 1, "interval": 1}},
    "fedl2g": {"own": {"warm_up_rounds": 0}},
}
ARCHITECTURES = {"clean": "tests.methods.tiny_nets:normed", "htfl": "cnn4"}  # the first with BatchNorm


def rebuilt(payload):
    """The payload as it arrives."""
    return type(payload).from_tensors(payload.to_tensors(), TASK)


def finite(payload):
    return all(bool(torch.isfinite(t).all()) for t in payload.to_tensors().values() if t.is_floating_point())


@pytest.mark.parametrize("protocol", ARCHITECTURES)
def test_every_method_copes_with_awkward_clients(any_method, protocol, make_client):
    architecture = ARCHITECTURES[protocol]
    keys = {"models": architecture, "protocol": protocol, **MORE.get(any_method, {})}
    method = build_method(settings_of(any_method, **keys))
    state = method.init(TASK, 0)
    memories: dict[int, Any] = {}
    networks: dict[int, Any] = {}
    for number, present in PRESENT.items():
        uploads = {}
        for i, labels in LABELS.items():
            training = {"protocol": protocol, "batch_size": 4}
            client = make_client(i, architecture, labels, number, memories.get(i), **training)
            if i in networks:
                client.model.load_state_dict(networks[i])
            before = copy.deepcopy(client.model.state_dict())
            down = rebuilt(method.broadcast(state, i))
            method.install(client, down)
            evaluate(client, method.predictors(client, down))  # raises at scores that are not finite
            client.model.load_state_dict(before)
            if i not in present:
                continue
            update = method.local_update(client, down)
            assert ("idle" in update.metrics) == (len(labels) < 2)  # nor has BatchNorm a variance over one
            uploads[i] = rebuilt(update.payload)
            method.validate(uploads[i], state, TASK)
            assert finite(uploads[i])
            memories[i], networks[i] = update.memory, client.model.state_dict()
        state = rebuilt(method.aggregate(state, uploads, Round(number, TASK, len(LABELS))))
        assert finite(state)


def test_the_optimizers_state_goes_on_with_the_client(any_method, make_client):
    """The number of Adam's steps is twice as high after two rounds."""
    method = build_method(settings_of(any_method, models="cnn4", **MORE.get(any_method, {})))
    kept = {"optimizer": "adam", "optimizer_state": "kept"}
    client = make_client(0, "cnn4", **kept)
    down = rebuilt(method.broadcast(method.init(TASK, 0), 0))
    first = method.local_update(client, down).memory
    again = make_client(0, "cnn4", round=2, memory=first, **kept)
    second = method.local_update(again, down).memory
    steps = {name: int(made) for name, made in first.items() if name.startswith("step.")}
    assert steps
    assert all(steps.values())
    assert {name: int(second[name]) for name in steps} == {name: 2 * made for name, made in steps.items()}
