"""The hash of what a run came to: the same where the results are, another where anything of them differs."""

import json
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.run_export import as_csv
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.result_hash import result_hash
from pbfl_flwr.util.atomic_files import DamagedState
from tests.flower.inprocess import federation
from tests.small_runs import pbfl

SERVER = ("checkpoint.safetensors", "prototypes.safetensors", "best.safetensors")


def test_runs_with_the_same_seed_have_equal_hashes(tmp_path: Path) -> None:
    runs = [federation(tmp_path / str(order), on_disk=True, order=order).run() for order in (1, 2)]
    one, two = (run.directory for run in runs)
    assert one.result() == two.result() == result_hash(one, 2)
    assert f"result hash {one.result()}" in pbfl("show", one.path).stdout
    for name in SERVER:
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes(), name
    other = federation(tmp_path / "other", on_disk=True, seed=1).run()
    assert other.directory.result() not in ("", one.result())


def changed(run: RunDirectory, change: Any, rounds: int = 2) -> str:
    lines = [json.loads(line) for line in (run.path / "clients.jsonl").read_text().splitlines()]
    change(lines)
    (run.path / "clients.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return result_hash(run, rounds)


def test_hash_covers_results_only(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True).run().directory
    before = run.result()
    assert changed(run, lambda lines: lines[0].update(seconds={}, test_loss=[], num_train=[7])) == before

    def turned(lines: list[dict[str, Any]]) -> None:
        for column in ("client", "correct"):
            lines[0][column].reverse()

    assert changed(run, turned) == before, "who answered first is no result"
    assert changed(run, lambda lines: lines[0]["correct"][0].update(head=10**6)) != before
    (run.path / "checkpoint.safetensors").write_bytes(b"\0")
    with pytest.raises(DamagedState, match=r"checkpoint\.safetensors cannot be read"):
        result_hash(run, 2)


def test_hash_covers_the_final_scoring_of_the_last_round_only(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True, evaluate_moment="before").run().directory
    before = run.result()

    def better(lines: list[dict[str, Any]]) -> None:
        lines[1]["final"]["correct"][0].update(head=10**6)

    assert changed(run, lambda lines: lines[0].update(final=lines[1]["final"])) == before
    assert changed(run, better) != before


def test_hash_covers_the_last_round_also_where_only_every_second_is_scored(tmp_path: Path) -> None:
    run = federation(tmp_path, on_disk=True, num_server_rounds=3, evaluate_every=2).run().directory
    before = run.result()
    assert result_hash(run, 3) == before
    assert changed(run, lambda lines: lines[2]["correct"][0].update(head=10**6), 3) != before


def test_prolonged_run_has_each_accuracy_once(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"evaluate_moment": "before"}
    whole = federation(tmp_path / "whole", on_disk=True, num_server_rounds=3, **keys).run().directory
    federation(tmp_path / "parts", on_disk=True, **keys).run()
    parts = federation(tmp_path / "parts", on_disk=True, num_server_rounds=3, resume=True, **keys).run()
    assert [record.final is not None for record in parts.directory.client_records()] == [False, True, True]
    rows = as_csv(parts.directory.path)
    assert rows == as_csv(whole.path)
    assert len({tuple(row.split(",")[:7]) for row in rows.splitlines()}) == len(rows.splitlines())


def test_prolonged_run_has_the_same_hash_where_its_end_scored_clients_that_had_not_trained(
    tmp_path: Path,
) -> None:
    keys: dict[str, Any] = {"evaluate_every": 2, "fraction_train": 0.5, "on_disk": True}
    whole = federation(tmp_path / "whole", num_server_rounds=4, **keys).run().directory
    federation(tmp_path / "parts", num_server_rounds=3, **keys).run()
    parts = federation(tmp_path / "parts", num_server_rounds=4, resume=True, **keys).run().directory
    assert [len(run.client_records()[2].client) for run in (whole, parts)] == [2, 5]
    assert parts.result() == whole.result()


@pytest.mark.parametrize("moment", ["after", "before"])
def test_only_finished_runs_have_a_hash(tmp_path: Path, moment: str) -> None:
    """Scored before training, the shorter run ended with a last scoring that the whole one does not have."""
    keys: dict[str, Any] = {"evaluate_moment": moment}
    whole = federation(tmp_path / "whole", on_disk=True, num_server_rounds=3, **keys).run().directory.result()
    first = federation(tmp_path / "parts", on_disk=True, **keys).run().directory
    assert first.result() not in ("", whole)
    again = federation(tmp_path / "parts", on_disk=True, num_server_rounds=3, resume=True, **keys)
    again.strategy.prepare(again.grid)
    assert first.result() == "", "it goes on"
    assert again.run().directory.result() == whole
    with pytest.raises(PbflError, match="has 3 rounds already"):
        federation(tmp_path / "parts", on_disk=True, resume=True, **keys).run()
    assert first.result() == whole, "a refused run leaves it as it was"
