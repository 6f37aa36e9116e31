"""What a device of a federation takes: memory of its processes, seconds of a message, size of its environment.

    python benchmarks/device_footprint.py [--python VENV/bin/python] [--models cnn4,resnet8] [--rounds 2] [--out f.json]

FedProto through ``pbfl deploy local`` with one SuperNode, once for each model, on random images of the device's own.
``--python`` is the environment to measure, by default this one. Memory is read from /proc every tenth of a second,
hence Linux only: the largest resident set of each kind of process, and of the whole device the largest sum, once of
resident sets (RSS) and once with every page of a file counted once: the PSS of a device alone, while here its server
shares torch's pages. A message is the life of a ClientApp's process; its CPU seconds are all cores'.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from machine import introduce, write

SUPERNODE, SUPEREXEC, CLIENT = "flower-supernode", "flower-superexec", "flwr-clientapp"
MB = 2**20
TICKS = os.sysconf("SC_CLK_TCK")
WAIT = 0.1


@dataclass
class Memory:
    """Resident bytes of a process: those of its own, and of every file the pages that it uses."""

    private: int = 0
    files: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def resident(self) -> int:
        return self.private + sum(self.files.values())


@dataclass
class Seen:
    """The largest values of the processes of a device, in bytes, and each message's [seconds, CPU seconds]."""

    processes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    resident: int = 0
    alone: int = 0
    messages: dict[int, list[float]] = field(default_factory=dict)


def memory_of(pid: int) -> Memory:
    """Read /proc/PID/smaps; pages of a file that the process has changed are its own."""
    memory, file, of_file = Memory(), "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            file = words[5] if len(words) > 5 and words[5].startswith("/") else ""
        elif words[0] == "Rss:":
            of_file = 1024 * int(words[1])
        elif words[0] == "Anonymous:":
            own = 1024 * int(words[1]) if file else of_file
            memory.private += own
            if file:
                memory.files[file] += of_file - own
    return memory


def device_processes(root: int) -> dict[int, tuple[str, list[int]]]:
    """Return process id -> (kind, [user ticks, system ticks, start]) of the device below the command ``root``."""
    found: dict[int, tuple[str, int, list[int]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has ended
            kind = next((kind for kind in (SUPERNODE, SUPEREXEC, CLIENT) if kind in command), "")
            found[int(entry.name)] = (kind, int(words[1]), [int(words[n]) for n in (11, 12, 19)])
    below = {root}
    while more := {pid for pid, (_, parent, _) in found.items() if parent in below} - below:
        below |= more
    device = {pid for pid in below if pid in found and found[pid][0] == SUPERNODE}
    while more := {pid for pid, (_, parent, _) in found.items() if parent in device} - device:
        device |= more  # the server has a SuperExec, too
    return {pid: (found[pid][0], found[pid][2]) for pid in device if found[pid][0]}


def look(root: int, seen: Seen) -> None:
    """Update what was seen by the state of this moment."""
    files: dict[str, int] = defaultdict(int)
    resident = private = 0
    for pid, (kind, (user, system, start)) in device_processes(root).items():
        try:
            memory = memory_of(pid)
        except OSError:
            continue
        seen.processes[kind] = max(seen.processes[kind], memory.resident)
        resident += memory.resident
        private += memory.private
        for file, size in memory.files.items():
            files[file] = max(files[file], size)
        if kind == CLIENT:
            seen.messages[pid] = [
                time.clock_gettime(time.CLOCK_BOOTTIME) - start / TICKS,
                (user + system) / TICKS,
            ]
    seen.resident = max(seen.resident, resident)
    seen.alone = max(seen.alone, private + sum(files.values()))


def measure(python: Path, model: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run a federation with one device and return what it took."""
    rng = np.random.default_rng(0)
    shape = [int(side) for side in chosen.input_shape.split(",")]
    seen = Seen()
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data.npz"
        images = rng.integers(0, 256, (chosen.samples, *shape), dtype=np.uint8)
        np.savez(data, x=images, y=np.arange(chosen.samples) % 10)
        command = [str(python), "-m", "pbfl_flwr.cli", "deploy", "local", "-n", "1"]
        command += ["--run-dir", f"{scratch}/run", "--set", f"num-server-rounds={chosen.rounds}"]
        command += ["--set", f"eval-batch-size={chosen.eval_batch_size}"]
        command += ["--node", f"data-path='{data}' model='{model}' threads={chosen.threads}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            look(process.pid, seen)
            time.sleep(WAIT)
    if process.returncode:
        raise SystemExit(process.returncode)
    later = [*seen.messages.values()][1:]  # the first message brings the app, which is unpacked
    return {
        "model": model,
        **{f"{kind} MB": size / MB for kind, size in sorted(seen.processes.items())},
        "device RSS MB": seen.resident / MB,
        "device PSS MB": seen.alone / MB,
        "s a message": median(seconds for seconds, _ in later),
        "CPU s a message": median(seconds for _, seconds in later),
    }


def size_of(python: Path) -> float:
    """Return the bytes on disk of the environment of an interpreter, in MB."""
    prefix = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    files = {
        (status.st_dev, status.st_ino): status.st_blocks for status in map(os.lstat, Path(prefix).rglob("*"))
    }
    return sum(files.values()) * 512 / MB


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--models", default="cnn4,resnet4,resnet6,resnet8")
    parser.add_argument("--input-shape", default="1,28,28")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eval-batch-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    introduce(chosen.threads)
    python = chosen.python.absolute()
    asked = "import torch; print(torch.__version__)"
    build = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    disk = size_of(python)
    print(f"{python}: torch {build}, {disk:,.0f} MB on disk")
    rows = []
    for model in chosen.models.split(","):
        rows.append(measure(python, model, chosen))
        print(
            ", ".join(f"{n} {v:.1f}" if isinstance(v, float) else f"{n} {v}" for n, v in rows[-1].items()),
            flush=True,
        )
    write(chosen.out, chosen.threads, build=build, disk=disk, devices=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
