"""Run a published table on a machine that is lent for minutes, and bring the records home in a small archive.

    python benchmarks/lent_machine.py run --seconds 540 --out runs/protonorm --archive records.tar.xz \\
        protonorm-table1 --block cifar10 --scale paper --only FedTGP,FedDistill --set device=cuda
    python benchmarks/lent_machine.py collect records.tar.xz --out runs/protonorm

``run`` calls ``pbfl reproduce`` with the arguments that are not its own and interrupts it when the time is over; called
again on the same machine it resumes. The archive has all files of the runs but the states, which can only be resumed
where they are. ``collect`` adds the finished runs of archives to a directory, and ``pbfl reproduce --out`` on it prints
the table.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pbfl_flwr.runs.directory import RunDirectory

GRACE = 30.0
"""Seconds from the interruption to the kill, after which the runs end by themselves."""
STATES_AND_LOCKS = ("*.safetensors", "clients", ".*")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", allow_abbrev=False)
    run.add_argument("--seconds", type=float, required=True, help="end the table after this time")
    run.add_argument("--archive", type=Path, required=True)
    run.add_argument("--out", type=Path, required=True)
    gather = commands.add_parser("collect")
    gather.add_argument("archives", type=Path, nargs="+")
    gather.add_argument("--out", type=Path, required=True)
    chosen, arguments = parser.parse_known_args()
    if chosen.command == "run":
        code = reproduce([*arguments, "--out", str(chosen.out)], chosen.seconds)
        if chosen.out.is_dir():  # it is not if the arguments were refused
            archive(chosen.out, chosen.archive)
        return code
    if arguments:
        parser.error(f"unrecognized arguments: {' '.join(arguments)}")
    for file in chosen.archives:
        collect(file, chosen.out)
    return 0


def reproduce(arguments: Sequence[str], seconds: float) -> int:
    """Run ``pbfl reproduce``, interrupt it after this time, and return its exit code."""
    process = subprocess.Popen([sys.executable, "-m", "pbfl_flwr.cli", "reproduce", *arguments])
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # as Ctrl-C, it leaves the runs ready to be resumed
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def archive(out: Path, file: Path) -> None:
    """Write a directory's records, without states and locks, and print how far its runs are."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "records"
        shutil.copytree(out, copy, ignore=shutil.ignore_patterns(*STATES_AND_LOCKS))
        with tarfile.open(file, "w:xz") as records:
            records.add(copy, arcname=".")
    for run in runs_in(out):
        print(f"{run.path.relative_to(out)}: {progress(run)}")
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")


def collect(file: Path, out: Path) -> None:
    """Add the finished runs of an archive that the directory does not have."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        with tarfile.open(file) as records:
            records.extractall(scratch, filter="data")
        for run in runs_in(Path(scratch)):
            name = run.path.relative_to(scratch)
            if (out / name).exists():
                print(f"{name}: is there, {progress(RunDirectory(out / name))}")
            elif not run.result():
                print(f"{name}: left out, {progress(run)}")
            else:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                print(f"{name}: added, {progress(run)}")
                run.path.rename(out / name)


def runs_in(out: Path) -> list[RunDirectory]:
    """Return the runs below a directory."""
    return [RunDirectory(file.parent) for file in sorted(out.rglob("run.json"))]


def progress(run: RunDirectory) -> str:
    """Return how many rounds a run has, and whether they are all."""
    state = "finished" if run.result() else "unfinished"
    return f"{len(run.round_records())} of {run.record().last_round} rounds, {state}"


if __name__ == "__main__":
    sys.exit(main())
