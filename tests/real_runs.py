"""Commands as processes of their own, which a test may stop or kill, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MARK = "PBFL_TEST_RUN"
"""Environment variable that all processes of a run inherit; its value is the run directory."""
PBFL = [sys.executable, "-m", "pbfl_flwr.cli"]
"""The command, in a process that signals reach as from a terminal."""


def start(
    run_dir: Path, *arguments: object, program: list[str] = PBFL, cwd: Path = ROOT
) -> subprocess.Popen[str]:
    """Start ``pbfl`` with these arguments, its processes marked with run_dir."""
    environment = {**os.environ, MARK: str(run_dir), "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_default_signals,
    )


def _default_signals() -> None:
    """A shell without job control has background jobs ignore SIGINT, nohup SIGHUP; children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def left_behind(run_dir: Path, seconds: float = 0) -> list[str]:
    """Return the command lines of the run's processes that still live after so many seconds."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    end = time.monotonic() + seconds
    while (living := _living(f"{MARK}={run_dir}".encode())) and time.monotonic() < end:
        time.sleep(0.2)
    return living


def _living(mark: bytes) -> list[str]:
    result = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                result.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended, or it is somebody else's
    return result


def wait(condition: Callable[[], Any], what: str, seconds: float = 400.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.2)


def rounds_of(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "rounds.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_rounds(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    def finished() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return len(rounds_of(run_dir)) >= count

    wait(finished, f"round {count}")


def result_of(run_dir: Path) -> str:
    return (run_dir / "result.txt").read_text().strip()
