"""Time and memory of a round against the number of clients or workers, through ``pbfl run``.

    python benchmarks/scale.py clients [--counts 20,100,1000] [--fraction 1.0] [--rounds 3] [--out scale.json]
    python benchmarks/scale.py workers [--counts 1,2] [--clients 20] [--rounds 3] [--gpus-per-client 0.25]

FedProto with cnn4 on Fashion-MNIST. ``clients`` divides the same 7,000 samples among more and more clients, so that
only the cost per client grows. Medians over the rounds after the first; memory is the largest resident set of a worker
and of the server process, from /proc, hence Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from machine import NO_CARD, card_options, introduce, write

# Part of a process's command line -> its role; the first match counts.
MARKS = {
    "ray::ClientAppActor": "worker",
    "spawn_main": "worker",
    "flwr-simulation": "server",
    "pbfl_flwr.cli": "command",
}


def processes_below(root: int, roles: Mapping[str, str]) -> list[tuple[int, str, float]]:
    """Return (process id, role, resident MiB) of the processes below ``root`` that have a role."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue  # it has ended
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    processes = []
    for pid in below:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().split()
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
        role = next((role for mark, role in roles.items() if any(mark in word for word in words)), "")
        if role:
            processes.append((pid, role, pages * 4096 / 2**20))
    return processes


def resident_mb(root: int) -> dict[str, float]:
    """Return role -> resident MiB of the largest process of that role below ``root``."""
    largest: dict[str, float] = {}
    for _, role, size in processes_below(root, MARKS):
        largest[role] = max(largest.get(role, 0.0), size)
    return largest


def run(folder: Path, clients: int, rounds: int, *options: str) -> dict[str, Any]:
    """Make a run and return its times and memory."""
    command = [sys.executable, "-m", "pbfl_flwr.cli", "run", "--run-dir", str(folder), *options]
    for key, value in {
        "dataset": "fashion-mnist",
        "max-samples": 7000,
        "models": "cnn4",
        "partition": "iid",
        "num-clients": clients,
        "num-server-rounds": rounds,
    }.items():
        command += ["--set", f"{key}={value}"]
    peak: dict[str, float] = {}
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        for name, size in resident_mb(process.pid).items():
            peak[name] = max(peak.get(name, 0.0), size)
        time.sleep(1)
    if process.returncode:
        raise SystemExit(process.returncode)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    later = lines[1:] or lines
    trained = median(len(line["trained"]) for line in later)
    seconds = median(line["seconds"]["total"] for line in later)
    busy = median(sum(line["seconds"]["clients"].values()) for line in later)
    return {
        "clients": clients,
        "trained a round": trained,
        "s a round": seconds,
        "ms a client": 1000 * seconds / trained,
        "worker s a round": busy,
        "command s": time.perf_counter() - begin,
        "worker MB": peak.get("worker", 0.0),
        "server MB": peak.get(
            "server", peak.get("command", 0.0)
        ),  # without Flower's engine one process is both
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("axis", choices=["clients", "workers"])
    parser.add_argument("--counts", default="")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--gpus-per-client", type=float, default=0.0, help="train on the card, this share a worker"
    )
    parser.add_argument("--engine", choices=("flower", "processes"), default="flower")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    counts = [
        int(count)
        for count in (chosen.counts or ("20,100,1000" if chosen.axis == "clients" else "1,2")).split(",")
    ]
    if (card := card_options(chosen.gpus_per_client)) is None:
        print(NO_CARD)
        return 0
    introduce(1)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for count in counts:
            clients = count if chosen.axis == "clients" else chosen.clients
            options = ["--set", f"fraction-train={chosen.fraction}", "--set", "fraction-evaluate=0.0", *card]
            options += ["--engine", chosen.engine]
            if chosen.axis == "workers":
                options += ["--workers", str(count)]
            row = {
                "workers": count if chosen.axis == "workers" else "all",
                **run(Path(scratch) / str(count), clients, chosen.rounds, *options),
            }
            if not found:
                print("".join(f"{key:>18}" for key in row))
            found.append(row)
            print(
                "".join(
                    f"{value:>18.1f}" if isinstance(value, float) else f"{value:>18}"
                    for value in row.values()
                ),
                flush=True,
            )
    write(chosen.out, 1, rows=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
