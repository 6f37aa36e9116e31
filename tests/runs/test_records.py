"""Records name the first field that is wrong, and where."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.runs import directory
from pbfl_flwr.runs.directory import RunDirectory, installed_versions
from pbfl_flwr.runs.records import Change, PartitionRecord, Record, RoundRecord, RunRecord
from pbfl_flwr.util.atomic_files import DamagedState
from tests.small_runs import columns, edit, entry, pbfl, write_lines, write_run


def changed(**changes: Any) -> bytes:
    """A line of rounds.jsonl with changes; None removes a field."""
    line = {**entry(1, 0.5, 0.5), **changes}
    return json.dumps({key: value for key, value in line.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("kind", "content", "reason"),
    [
        (PartitionRecord, b"{", "content: Invalid JSON"),
        (PartitionRecord, b"[]", "content: "),
        (PartitionRecord, b'{"counts": 5}', "counts: "),
        (PartitionRecord, b'{"majority": "most"}', "majority: "),
        (RunRecord, b"\xff", "content: Invalid JSON"),
        (RunRecord, b'{"configuration": 5, "experiment": "x"}', "version: "),
        (RoundRecord, b"null", "content: "),
        (RoundRecord, changed(accuracy_of_round=None), "accuracy_of_round: "),
        (RoundRecord, changed(failures="many"), "failures: "),
        (RoundRecord, changed(accuracy={"head": {}}), "accuracy.head.weighted: "),
        (RoundRecord, changed(**{"of-another-version": 1}), "of-another-version: "),
    ],
)
def test_rejects_content_that_is_damaged_or_of_another_version(
    kind: type[Record], content: bytes, reason: str
) -> None:
    with pytest.raises(DamagedState) as error:
        kind.from_json(content, "a file")
    assert str(error.value).startswith(f"a file is damaged, or was written by another version: {reason}")
    assert "\n" not in str(error.value)


def test_a_run_of_another_version_is_refused_in_a_line(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    edit(path / "run.json", version=1)
    shown = pbfl("show", path)
    assert shown.exit_code == 2
    (line,) = shown.stderr.splitlines()
    assert line.endswith(
        "run.json is damaged, or was written by another version: version: 1 is not read here, only 2"
    )


def test_a_run_names_the_versions_that_made_it(tmp_path: Path) -> None:
    other = RunDirectory(write_run(tmp_path / "other", [entry(1, 0.5, 0.5)])).record()
    (place := tmp_path / "run").mkdir()
    run = RunDirectory(place)
    run.start(**other.model_dump(exclude={"version", "versions"}), versions=installed_versions())
    packages = {name: version(name) for name in ("pbfl-flwr", "flwr", "torch", "numpy")}
    made_with = {"python": platform.python_version(), **packages}
    assert made_with.items() <= run.record().versions.items()


def test_names_the_file_and_line_of_a_damaged_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    with (run / "rounds.jsonl").open("ab") as file:
        file.write(b"\xff\n")
    with pytest.raises(DamagedState, match=f"{run / 'rounds.jsonl'}, line 2 is damaged"):
        RunDirectory(run).round_records()


def test_histories_are_read_by_line_and_bounded_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, history = RunDirectory(tmp_path), tmp_path / "clients.jsonl"
    write_lines(history, *(columns(number, [{"head": 3}]) for number in range(1, 6)))
    longest = max(map(len, history.read_bytes().splitlines(keepends=True)))
    monkeypatch.setattr(directory, "LONGEST_LINE", longest)
    assert [record.round for record in run.client_records()] == [1, 2, 3, 4, 5]
    with history.open("ab") as file:
        file.write(b"x" * longest)  # may become a line
        file.flush()
        assert len(run.client_records()) == 5
        file.write(b"x")
    one_by_one = run.each_client_record()
    assert [next(one_by_one).round for _ in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(DamagedState, match=f"line 6 is longer than {longest} bytes"):
        next(one_by_one)


def test_of_the_changes_of_a_round_that_is_made_again_the_last_one_holds(tmp_path: Path) -> None:
    """A resumed run that ends before its first round is resumed from the same round."""
    run = RunDirectory(write_run(tmp_path / "run", [entry(1, 0.5, 0.5), entry(2, 0.5, 0.5)]))
    for number, rate, changes in (
        (1, 0.1, {}),
        (3, 0.2, {3: 0.2}),
        (3, 0.3, {3: 0.3}),
        (3, 0.1, {}),  # as before
        (3, 0.2, {3: 0.2}),
        (5, 0.2, {3: 0.2}),
        (5, 0.1, {3: 0.2, 5: 0.1}),
        (4, 0.2, {3: 0.2}),  # from an earlier checkpoint
    ):
        now = Change(from_round=number, method={"rate": rate}, code={})
        run.update(**run.record().continued(now))
        record = run.record()
        assert record.method == {"rate": 0.1}
        assert [(change.from_round, change.method["rate"]) for change in record.changes] == [*changes.items()]
