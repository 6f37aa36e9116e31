"""docs/examples/attacker.py: who attacks, what is sent by hand, and what becomes of it in a run."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pbfl_flwr.config import parse
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.payloads import Payload, Prototypes
from tests.flower.inprocess import NUM_CLIENTS, federation, plain

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
KINDS = ("sign_flip", "scale_10", "noise", "permute")

# Classes 0, 2 and 3 are held; class 3's row has the length 5.
UPLOAD = {
    "labels": torch.tensor([0, 2, 3]),
    "rows": torch.tensor([[1.0, -2.0], [0, 4], [3, 4]]),
    "counts": torch.tensor([7, 1, 3]),
    "n": torch.tensor([11]),
}


@pytest.fixture
def attacker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which clients import as well."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("attacker")


class Recorder(MethodStrategy):
    """Keeps every round's uploads."""

    def aggregate_fit(self, server_round: int, uploads: Mapping[int, Payload], *late: Any) -> Any:
        self.seen = {**getattr(self, "seen", {}), server_round: dict(uploads)}
        return super().aggregate_fit(server_round, uploads, *late)


def uploads(directory: Path, mods: str = "", **keys: Any) -> dict[int, dict[int, Prototypes]]:
    strategy = federation(directory, strategy=Recorder, mods=mods, **keys).run().strategy
    assert isinstance(strategy, Recorder)
    return strategy.seen


@pytest.mark.parametrize(
    ("kind", "rows", "counts"),
    [
        (lambda module: module.flipped, [[-1, 2], [0, -4], [-3, -4]], [7, 1, 3]),
        (lambda module: module.scaled(10), [[10, -20], [0, 40], [30, 40]], [7, 1, 3]),
        (lambda module: module.scaled(-0.5), [[-0.5, 1], [0, -2], [-1.5, -2]], [7, 1, 3]),
        # class 0 goes out as 2, 2 as 3, 3 as 0
        (lambda module: module.permuted, [[3, 4], [1, -2], [0, 4]], [3, 7, 1]),
    ],
    ids=["sign-flip", "scale by 10", "scale by -0.5", "permute"],
)
def test_kinds_by_hand(
    attacker: Any, kind: Callable[[Any], Any], rows: list[list[float]], counts: list[int]
) -> None:
    before = UPLOAD["rows"].clone()
    sent = kind(attacker)(UPLOAD)
    assert sent["rows"].tolist() == rows
    assert sent["counts"].tolist() == counts
    assert sent["labels"].tolist() == [0, 2, 3]
    assert sent["n"].tolist() == [11]
    assert torch.equal(UPLOAD["rows"], before), "the client's own rows stay"


def test_noise_has_the_length_of_the_row_and_no_direction_of_it(attacker: Any) -> None:
    def lie(rows: Tensor) -> Tensor:
        torch.manual_seed(0)
        sent: Tensor = attacker.randomised({"rows": rows})["rows"]
        return sent

    torch.testing.assert_close(lie(UPLOAD["rows"]).norm(dim=1), torch.tensor([5**0.5, 4, 5]))
    cosines = lie(torch.eye(200)).diagonal()  # each with its own true row
    assert cosines.abs().max() < 0.35  # of 200 with a deviation of 1/√200 = 0.07
    assert abs(float(cosines.mean())) < 0.02


def test_one_class_has_nothing_to_swap_with_and_a_zero_row_is_not_held(attacker: Any) -> None:
    one = {"rows": torch.tensor([[0.0, 0], [2, 1]])}
    assert torch.equal(attacker.permuted(one)["rows"], one["rows"])
    nobody = {"rows": torch.zeros(0, 2)}
    assert torch.equal(attacker.permuted(nobody)["rows"], nobody["rows"])


def test_attackers_depend_on_the_seed_the_share_and_the_number_of_clients(
    attacker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = attacker.attackers(20, 0)
    assert len(few) == 4
    assert few == sorted(set(few))
    assert len({tuple(attacker.attackers(20, seed)) for seed in range(10)}) > 5
    chosen = [client for seed in range(500) for client in attacker.attackers(20, seed)]
    assert all(70 < chosen.count(client) < 130 for client in range(20))  # 100 ± 3.4 standard deviations
    monkeypatch.setattr(attacker, "SHARE", 0.5)
    assert set(few) < set(attacker.attackers(20, 0)) < set(range(20))


@pytest.mark.parametrize("method", ["fedproto", "fedgh", "feddistill"])
def test_only_attackers_falsify_uploads(
    tmp_path: Path, attacker: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(attacker, "SHARE", 0.4)
    true = uploads(tmp_path / "a", method=method, num_server_rounds=1)
    false = uploads(tmp_path / "b", "attacker:sign_flip", method=method, num_server_rounds=1)
    chosen = attacker.attackers(NUM_CLIENTS, 0)
    assert len(chosen) == 2
    for client, upload in false[1].items():
        sign = -1 if client in chosen else 1
        assert torch.equal(upload.values, sign * true[1][client].values)
        assert torch.equal(upload.present, true[1][client].present)


def test_repeated_falsified_reply_is_the_same(tmp_path: Path, attacker: Any) -> None:
    keys: dict[str, Any] = {"mods": "attacker:noise", "num_server_rounds": 1}
    first = federation(tmp_path, strategy=Recorder, on_disk=True, **keys).run()
    again = federation(tmp_path, strategy=Recorder, **{**keys, "run-dir": first.config["run-dir"]})
    again.strategy.experiment = first.strategy.experiment
    again.run()
    assert isinstance(first.strategy, Recorder)
    assert isinstance(again.strategy, Recorder)
    for client, upload in first.strategy.seen[1].items():
        assert torch.equal(upload.values, again.strategy.seen[1][client].values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_attacks_do_not_depend_on_order_or_resume(
    tmp_path: Path, attacker: Any, kind: str, dtype: str
) -> None:
    keys: dict[str, Any] = {"num_server_rounds": 3, "mods": f"attacker:{kind}", "wire_dtype": dtype}
    one = federation(tmp_path / "a", **keys).run()
    other = federation(tmp_path / "b", order=5, **keys).run()
    federation(tmp_path / "c", on_disk=True, **{**keys, "num_server_rounds": 2}).run()
    resumed = federation(tmp_path / "c", on_disk=True, resume=True, **keys).run()
    assert one.fingerprint == other.fingerprint == resumed.fingerprint
    failures = [[line.failures for line in run.strategy.history] for run in (one, other, resumed)]
    assert failures[0] == failures[1] == failures[2]
    assert any(failures[0]) == (kind == "scale_10"), "rows that became too long are implausible"


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_send_class_rows(method: str) -> None:
    """Those that docs/faults.md names."""
    settings = parse({"method": method, "models": "cnn4"}, SECTIONS)
    rows = ("fedproto", "fedtgp", "tinyproto", "protonorm", "fedgh", "feddistill", "fedl2g")
    assert issubclass(build_method(settings).up, Prototypes) == (method in rows)


def test_attacker_fails_with_a_method_that_uploads_no_class_rows(tmp_path: Path, attacker: Any) -> None:
    run = federation(tmp_path, "fedavg", mods="attacker:permute", num_server_rounds=1).run()
    (failure,) = plain(run.strategy.history[0].failures)
    assert failure["client"] in attacker.attackers(NUM_CLIENTS, 0)
    assert failure["reason"].startswith("attacker: needs a method that uploads class prototypes")
