"""Check that the resident memory of no process grows over a thousand rounds.

    python benchmarks/soak.py [--rounds 1000] [--settle 50] [--out soak.json]

FedProto, eight clients with mlp5 on the digits, through ``pbfl run``. The largest process of each role is sampled every
two seconds; its growth is the mean over the last tenth of the rounds against the mean over an equally long window after
the first ``--settle`` rounds. Exits with 1 if one has grown by more than a tenth.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from machine import introduce, write
from scale import resident_mb

ALLOWED_GROWTH = 0.10


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--settle", type=int, default=50)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    settings = {
        "num-clients": 8,
        "num-server-rounds": chosen.rounds,
        "models": "mlp5",
        "feature-dim": 64,
        "batch-size": 8,
    }
    introduce(1)
    samples: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [
            sys.executable,
            "-m",
            "pbfl_flwr.cli",
            "run",
            "--engine",
            "flower",
            "--run-dir",
            str(folder),
        ]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            history = folder / "rounds.jsonl"
            done = history.read_bytes().count(b"\n") if history.exists() else 0
            for name, size in resident_mb(process.pid).items():
                samples[name].append((done, size))
            time.sleep(2)
    if process.returncode:
        return process.returncode
    window = max(1, (chosen.rounds - chosen.settle) // 10)
    figures, worst = {}, 0.0
    print(f"{'process':<40}{'early, MB':>12}{'late, MB':>12}{'growth':>9}")
    for name, seen in sorted(samples.items()):
        early = [mb for done, mb in seen if chosen.settle <= done < chosen.settle + window]
        late = [mb for done, mb in seen if done >= chosen.rounds - window]
        if early and late:
            growth = fmean(late) / fmean(early) - 1
            worst = max(worst, growth)
            figures[name] = {"early": fmean(early), "late": fmean(late), "growth": growth}
            print(f"{name:<40}{fmean(early):>12.0f}{fmean(late):>12.0f}{100 * growth:>8.1f}%")
    write(chosen.out, 1, rounds=chosen.rounds, processes=figures)
    if not figures:
        print("too few samples to tell")
        return 1
    return int(worst > ALLOWED_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
