"""Records name the first field that is wrong, and where."""

import json
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.records import PartitionRecord, Record, RoundRecord, RunRecord
from pbfl_flwr.util.atomic_files import DamagedState
from tests.small_runs import entry, write_run


@pytest.mark.parametrize(
    ("kind", "content", "reason"),
    [
        (PartitionRecord, b"{", "content: Invalid JSON"),
        (PartitionRecord, b"[]", "content: "),
        (PartitionRecord, b'{"counts": 5}', "counts: "),
        (PartitionRecord, b'{"majority": "most"}', "majority: "),
        (RunRecord, b"\xff", "content: Invalid JSON"),
        (RoundRecord, b"null", "content: "),
        (RunRecord, b'{"configuration": 5, "experiment": "x"}', "version: "),
    ],
)
def test_rejects_damaged_content(kind: type[Record], content: bytes, reason: str) -> None:
    with pytest.raises(DamagedState) as error:
        kind.from_json(content, "a file")
    assert str(error.value).startswith(f"a file is damaged, or was written by another version: {reason}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "name", "change", "field"),
    [
        (RunRecord, "run.json", {"primary_predictor": None}, "primary_predictor"),
        (RunRecord, "run.json", {"clients": None}, "clients"),
        (RoundRecord, "rounds.jsonl", {"accuracy_of_round": None}, "accuracy_of_round"),
        (RoundRecord, "rounds.jsonl", {"failures": "many"}, "failures"),
        (RoundRecord, "rounds.jsonl", {"accuracy": {"head": {}}}, "accuracy.head.weighted"),
        (RoundRecord, "rounds.jsonl", {"of-another-version": 1}, "of-another-version"),
    ],
)
def test_rejects_records_of_another_version(
    tmp_path: Path, kind: type[Record], name: str, change: dict[str, Any], field: str
) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    content = {**json.loads((run / name).read_text()), **change}
    with pytest.raises(
        DamagedState, match=f"a file is damaged, or was written by another version: {field}: "
    ):
        kind.from_json({key: value for key, value in content.items() if value is not None}, "a file")


def test_names_the_file_and_line_of_a_damaged_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    with (run / "rounds.jsonl").open("ab") as file:
        file.write(b"\xff\n")
    with pytest.raises(DamagedState, match=f"{run / 'rounds.jsonl'}, line 2 is damaged"):
        RunDirectory(run).round_records()
