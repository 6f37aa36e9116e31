"""A run directory that somebody else wrote: nothing outside of it is shown, nothing hangs, a list goes on."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import report, results, status
from pbfl_flwr.runs.directory import ERROR, WAITING, RunDirectory
from pbfl_flwr.runs.tensor_files import load_tensors
from pbfl_flwr.util.atomic_files import DamagedState, read_regular
from tests.small_runs import edit, entry, pbfl, write_run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="has neither pipes nor links for everybody")
SECRET = "nobody else may read this"
FILES = ("run.json", "rounds.jsonl", "clients.jsonl", "partition.json", ERROR, WAITING)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory of two runs, "a" and "b"; the tests spoil "a"."""
    for name in "ab":
        write_run(tmp_path / "runs" / name, [entry(1, 0.5, 0.5)])
    return tmp_path / "runs"


def secret(file: Path) -> None:
    outside = file.parent.parent.parent / "secret"
    outside.write_text(SECRET)
    outside.chmod(0o600)
    file.symlink_to(outside)


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def huge(file: Path) -> None:
    with file.open("wb") as made:
        made.truncate(2**40)  # a hole, which takes no room


SPOILS: list[Callable[[Path], None]] = [secret, endless, huge, os.mkfifo, os.mkdir]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: str(spoil.__name__))
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_the_run_is_not_read(runs: Path, name: str, spoil: Callable[[Path], None]) -> None:
    (runs / "a" / name).unlink(missing_ok=True)
    spoil(runs / "a" / name)
    begin = time.monotonic()
    for command in (["list", runs], ["show", runs / "a"], ["watch", runs / "a", "--once"]):
        result = pbfl(*command)
        assert SECRET not in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
    assert time.monotonic() - begin < 20
    (one, other) = status.below(runs)
    assert other["state"] in ("finished", "stopped")
    assert one["path"] == str(runs / "a")


def test_a_report_shows_no_private_file(runs: Path) -> None:
    secret(runs / "a" / ERROR)
    report.write(results.load([runs / "a"]), runs / "report.html")
    content = (runs / "report.html").read_text()
    assert SECRET not in content
    assert "is a link, which is not followed" in content


def test_reading_a_file_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    with pytest.raises(DamagedState, match="5 bytes; must be at most 4"):
        read_regular(tmp_path / "file", 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 4)
    os.mkfifo(tmp_path / "pipe")
    done = threading.Event()

    def read() -> None:
        with pytest.raises(DamagedState, match="not a regular file"):
            read_regular(tmp_path / "pipe", 4)
        with pytest.raises(DamagedState, match="is not a regular file"):
            load_tensors(tmp_path / "pipe")
        done.set()

    threading.Thread(target=read, daemon=True).start()
    assert done.wait(10)


@pytest.mark.parametrize(
    "task",
    [
        {"num_classes": 10**18},
        {"feature_dim": 10**12},
        {"input_shape": [10**9, 10**9]},
        {"input_shape": [1] * 10**5},
        {"vocabulary_size": 10**18},
        {"num_classes": -1},
        {"num_classes": 10**4000},
    ],
)
def test_sizes_nobody_has_are_one_line(runs: Path, task: dict[str, Any]) -> None:
    (first, *others) = json.loads((runs / "a" / "run.json").read_text())["clients"]
    edit(runs / "a" / "run.json", clients=[{**first, "task": {**first["task"], **task}}, *others])
    with pytest.raises(PbflError, match="is damaged"):
        RunDirectory(runs / "a").record()
    assert [run["state"] for run in status.below(runs)] == ["unreadable", "finished"]
    result = pbfl("show", runs / "a")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_a_directory_with_very_many_entries_is_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_ENTRIES", 20)
    crowded = runs / "crowded"
    for number in range(21):
        (crowded / str(number)).mkdir(parents=True)
    with pytest.raises(PbflError, match="has more than 20 entries"):
        status.for_a_report([crowded])
    assert [run["state"] for run in status.below(runs)] == ["finished", "finished", "unreadable"]
    assert pbfl("report", crowded).exit_code == 2
