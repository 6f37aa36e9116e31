"""Who works where: CPUs and cards shared out among workers and among runs, no card twice."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.engines.flower_simulation import FlowerSimulation
from pbfl_flwr.flower.engines.placement import Machine, Resources, Slot, idle_cards, places, slots
from tests.small_runs import pbfl


def pretend_cards(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)


ONE, TWO, FIVE = ("0",), ("0", "1"), ("6", "7", "8", "9", "GPU-ab")


@pytest.mark.parametrize(
    ("cpus", "cards", "wishes", "expected"),
    [
        (4, (), Resources(), [""] * 4),
        (4, TWO, Resources(), [""] * 4),  # hidden
        (5, (), Resources(2), [""] * 2),
        (2, (), Resources(workers=5), [""] * 5),
        (2, (), Resources(4, workers=1), [""]),
        (9, ONE, Resources(1, 0.25), ["0"] * 4),
        (3, ONE, Resources(1, 0.25), ["0"] * 3),
        (9, ONE, Resources(1, 1 / 3), ["0"] * 3),
        (9, ONE, Resources(1, 0.7), ["0"]),
        (9, TWO, Resources(1, 0.7), ["0", "1"]),  # neither both on card 0
        (9, TWO, Resources(1, 0.6), ["0", "1"]),  # nor a third one on 0.4 of each
        (9, TWO, Resources(1, 0.3), ["0", "1"] * 3),
        (9, TWO, Resources(1, 0.4), ["0", "1"] * 2),
        (9, TWO, Resources(1, 0.4, 3), ["0", "1", "0"]),
        (9, TWO, Resources(1, 0.5, 9), ["0", "1"] * 2),
        (9, FIVE, Resources(1, 1), ["6", "7", "8", "9", "GPU-ab"]),
        (9, FIVE, Resources(1, 2), ["6,7", "8,9"]),
        (9, FIVE, Resources(1, 5), ["6,7,8,9,GPU-ab"]),
        (1, FIVE, Resources(1, 2), ["6,7"]),
    ],
)
def test_places_of_workers(cpus: int, cards: tuple[str, ...], wishes: Resources, expected: list[str]) -> None:
    assert places(Machine(cpus, cards), wishes) == expected


BAD_SHARES = (1.5, 1e-5, -1.0, float("nan"), float("inf"))


@pytest.mark.parametrize(
    ("cards", "wishes", "message"),
    [
        ((), Resources(5), "--cpus-per-client 5: must be at most 4, the CPUs here"),
        (
            (),
            Resources(1, 0.25),
            "--gpus-per-client 0.25: torch sees no CUDA device here; pbfl doctor says more",
        ),
        (ONE, Resources(1, 2), "--gpus-per-client 2: must be at most 1, the CUDA devices here"),
        *(
            (TWO, Resources(1, share), f"--gpus-per-client {share:g}: must be 0, a share")
            for share in BAD_SHARES
        ),
    ],
)
def test_rejects_impossible_resources(cards: tuple[str, ...], wishes: Resources, message: str) -> None:
    with pytest.raises(PbflError) as error:
        places(Machine(4, cards), wishes)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cpus", "cards", "wishes", "runs", "expected"),
    [
        (8, (), Resources(), 3, [Slot(2)] * 3),
        (2, (), Resources(), 3, []),
        (8, (), Resources(workers=3), 3, [Slot(3)] * 3),
        (8, ONE, Resources(1, 1), 4, []),
        (8, ONE, Resources(1, 1), 1, [Slot(1, "0")]),
        (8, TWO, Resources(1, 1), 2, [Slot(1, "0"), Slot(1, "1")]),
        (8, ONE, Resources(1, 0.25), 2, [Slot(2, "0")] * 2),  # half a card each
        (8, ONE, Resources(1, 0.25), 4, [Slot(1, "0")] * 4),
        (8, ONE, Resources(1, 0.25), 5, []),
        (12, TWO, Resources(1, 0.25), 3, [Slot(2, "0"), Slot(4, "1"), Slot(2, "0")]),
        (12, FIVE, Resources(1, 0.5), 2, [Slot(6, "6,8,GPU-ab"), Slot(4, "7,9")]),
        (12, FIVE, Resources(1, 2), 2, [Slot(1, "6,7"), Slot(1, "8,9")]),
        (12, FIVE, Resources(1, 2), 3, []),
        (12, FIVE, Resources(1, 2), 1, [Slot(2, "6,7,8,9")]),
        (12, TWO, Resources(1, 0.7), 3, []),
    ],
)
def test_slots_of_parallel_runs(
    cpus: int, cards: tuple[str, ...], wishes: Resources, runs: int, expected: list[Slot]
) -> None:
    assert slots(Machine(cpus, cards), wishes, runs) == expected


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 1 / 3, 0.4, 0.6, 0.7, 1, 2, 3])
def test_no_gpu_is_assigned_twice(share: float) -> None:
    """Runs that see the cards of their slots share them out among their workers, as worker_specs does."""
    for count in range(max(1, int(share)), 6):
        machine = Machine(16, tuple(map(str, range(count))))
        for workers in (None, 1, 3, 40):
            wishes = Resources(1, share, workers)
            for runs in range(1, 17):
                taken: Counter[str] = Counter()
                for slot in slots(machine, wishes, runs):
                    seen = Machine(16, tuple(slot.cards.split(",")))
                    result = places(seen, replace(wishes, workers=slot.workers))
                    assert len(result) == slot.workers >= 1
                    for place in result:
                        cards = place.split(",")
                        assert len(cards) == max(1, share)
                        taken.update(dict.fromkeys(cards, share if share < 1 else 1.0))
                assert all(total <= 1 + 1e-9 for total in taken.values()), (count, workers, runs, taken)


@pytest.mark.parametrize(
    ("named", "count", "expected"),
    [
        (None, 2, ("0", "1")),
        ("6, GPU-ab", 2, ("6", "GPU-ab")),
        ("0,1,2,3", 2, ("0", "1")),  # CUDA stops at the first that is not there
        ("", 0, ()),
        ("-1", 0, ()),
    ],
)
def test_detects_cpus_and_gpus(
    named: str | None, count: int, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cards(monkeypatch, count)
    monkeypatch.setattr("joblib.cpu_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert Machine.here(Resources(1, 0.5)) == Machine(3, expected)
    assert Machine.here(Resources()) == Machine(3)


@pytest.mark.parametrize(
    ("count", "usable", "share", "device", "words"),
    [
        (1, True, 0.0, "auto", "--gpus-per-client 0.25"),
        (1, False, 0.0, "auto", "torch cannot use it, and clients train on the CPU; pbfl doctor says why"),
        (0, False, 0.0, "auto", ""),
        (1, True, 0.5, "auto", ""),
        (1, True, 0.0, "cpu", ""),
    ],
)
def test_mentions_an_idle_gpu(
    count: int, usable: bool, share: float, device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver counts one that torch cannot use; clients would fall back to the CPU without a word."""
    pretend_cards(monkeypatch, count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Machine.here(Resources(1, 0.5)).cards == ("0",) * usable
    warning = idle_cards(Resources(1, share), device)
    assert words in warning
    assert bool(warning) == bool(words)


def test_commands_reject_too_many_gpus_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    message = "error: --gpus-per-client 2: must be at most 1, the CUDA devices here\n"
    for command in (["run", "--run-dir"], ["sweep", "--set", "seed=0,1", "--parallel", "2", "--out"]):
        result = pbfl(*command, tmp_path / "out", "--gpus-per-client", "2")
        assert (result.exit_code, result.stderr) == (2, message)
    assert not (tmp_path / "out").exists()


def test_engine_of_flower_starts_no_worker_without_room_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cards(monkeypatch, 2)
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    handed: list[str] = []
    monkeypatch.setattr(FlowerSimulation, "_run", lambda self, app, config, *more: handed.extend(more))
    engine = FlowerSimulation(tmp_path)
    # By Flower's own count 3 of them, of which one never starts.
    engine.submit(tmp_path, {}, 4, Resources(2, 0.6))
    engine.submit(tmp_path, {}, 4, Resources(2))
    assert [text.rpartition("=")[2] for text in handed if "=" in text] == ["4", "8"]
    assert all("init-args-num-cpus=" in text for text in handed if "=" in text)
