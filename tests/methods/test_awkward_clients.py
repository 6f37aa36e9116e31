"""Every method with clients as they come: without samples, with one, with one class, late, away for rounds."""

from typing import Any

import pytest

from pbfl_flwr.methods import build_method
from pbfl_flwr.testing.clients import rebuilt
from pbfl_flwr.testing.contract import awkward_clients
from tests.methods.conftest import TASK, settings_of

MORE: dict[str, dict[str, Any]] = {
    "tinyproto": {"cps_dim": 3},
    "gfpl": {"own": {"start": 1, "interval": 1}},
    "fedl2g": {"own": {"warm_up_rounds": 0}},
}
ARCHITECTURES = {"clean": "tests.methods.tiny_nets:normed", "htfl": "cnn4"}  # the first with BatchNorm


@pytest.mark.parametrize("protocol", ARCHITECTURES)
def test_every_method_copes_with_awkward_clients(any_method, protocol):
    more = dict(MORE.get(any_method, {}))
    own = {f"{any_method}.{key}": value for key, value in more.pop("own", {}).items()}
    updates = awkward_clients(any_method, models=ARCHITECTURES[protocol], protocol=protocol, **more, **own)
    for samples, update in updates:
        assert ("idle" in update.metrics) == (samples < 2)  # nor has BatchNorm a variance over one


def test_the_optimizers_state_goes_on_with_the_client(any_method, make_client):
    """The number of Adam's steps is twice as high after two rounds."""
    method = build_method(settings_of(any_method, models="cnn4", **MORE.get(any_method, {})))
    kept = {"optimizer": "adam", "optimizer_state": "kept"}
    client = make_client(0, "cnn4", **kept)
    down = rebuilt(method.broadcast(method.init(TASK, 0), 0), TASK)
    first = method.local_update(client, down).memory
    again = make_client(0, "cnn4", round=2, memory=first, **kept)
    second = method.local_update(again, down).memory
    steps = {name: int(made) for name, made in first.items() if name.startswith("step.")}
    assert steps
    assert all(steps.values())
    assert {name: int(second[name]) for name in steps} == {name: 2 * made for name, made in steps.items()}
