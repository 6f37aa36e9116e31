"""The CIFAR-10 benchmark of pfl-research: FedAvg, 1,000 clients of 50 images, 50 a round, batches of ten, its CNN.

    python benchmarks/simulators.py [--rounds 6] [--repeats 2] [--engine processes] [--workers 2]
        [--states /dev/shm] [--pfl VENV/bin/python --pfl-research CLONE]

Random images of that shape, since only times are compared. With a Python that has pfl, pyyaml and h5py installed, and a
clone of github.com/apple/pfl-research, its ``benchmarks/image_classification/pytorch/train.py`` runs in turn with ours.
``--states`` is where ours keeps the clients' states, which pfl has none of: flushing them to a busy disk may take as
long as training. Medians over the rounds after the first, without pfl's scoring on the test set and without ours of all
clients after the last round.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from machine import introduce, write
from torch import nn

from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.task import Task

CLIENTS, TRAIN, TEST = 1000, 50_000, 10_000
HIDDEN = 128


def cnn(task: Task) -> SplitModel:
    """``simple_cnn`` of pfl-research, 1.6 million weights for images of 3x32x32; here it pools before the second ReLU.

    That changes no output, and is how this project's own networks are written.
    """
    channels, height, width = task.input_shape
    flat = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    convolutions = [nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU()]
    stage = nn.Sequential(*convolutions, nn.Dropout(0.25))
    neck = nn.Sequential(nn.Flatten(), nn.Linear(flat, HIDDEN), nn.ReLU(), nn.Dropout(0.5))
    return SplitModel(task, [stage], neck, nn.Linear(HIDDEN, task.num_classes))


def write_images(folder: Path) -> None:
    """Write the same images for both sides."""
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (TRAIN + TEST, 3, 32, 32), dtype=np.uint8)
    y = np.arange(TRAIN + TEST) % 10
    np.savez(folder / "images.npz", x=x, y=y)
    parts = {"train": slice(TRAIN), "test": slice(TRAIN, None)}
    for name, part in parts.items():
        content = (x[part].transpose(0, 2, 3, 1), y[part].reshape(-1, 1))
        (folder / f"cifar10_{name}.p").write_bytes(pickle.dumps(content))


def ours(folder: Path, run_dir: Path, rounds: int, options: list[str]) -> float:
    """Return the seconds of a round of ``pbfl run``."""
    command = [sys.executable, "-m", "pbfl_flwr.cli", "run", "--run-dir", str(run_dir), *options]
    for key, value in {
        "method": "fedavg",
        "dataset": "npz",
        "data-dir": folder / "images.npz",
        "num-clients": CLIENTS,
        "fraction-train": 0.05,
        "fraction-evaluate": 0.0,
        "partition": "iid",
        "train-share": TRAIN / (TRAIN + TEST),
        "models": "simulators:cnn",
        "feature-dim": HIDDEN,
        "batch-size": 10,
        "learning-rate": 0.1,
        "weighting": "uniform",
        "num-server-rounds": rounds + 2,
    }.items():
        command += ["--set", f"{key}={value}"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
    records = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    return float(median(record["seconds"]["total"] for record in records[1:-1]))


def pfl(folder: Path, python: Path, clone: Path, rounds: int) -> float:
    """Return the seconds of a round of pfl-research's own benchmark."""
    code = clone.absolute() / "benchmarks"
    command = [str(python.absolute()), str(code / "image_classification/pytorch/train.py")]
    command += [
        "--args_config",
        str(code / "image_classification/configs/baseline.yaml"),
        "--data_path",
        str(folder),
    ]
    command += ["--central_num_iterations", str(rounds + 1), "--evaluation_frequency", str(rounds + 1)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(code)
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stderr)
    with (folder / "metrics.csv").open() as file:
        seconds = [float(row["Duration of iteration (s)"]) for row in csv.DictReader(file)]
    return median(seconds[1:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--engine", choices=("processes", "ray", "flower"), default="processes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--states", type=Path)
    parser.add_argument("--pfl", type=Path)
    parser.add_argument("--pfl-research", type=Path)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    introduce(1)
    seconds: dict[str, list[float]] = {"ours": []}
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir=chosen.states) as states:
        folder = Path(scratch)
        write_images(folder)
        options = ["--engine", chosen.engine, "--workers", str(chosen.workers)]
        options += ["--set", f"state-dir={states}"]
        for repeat in range(chosen.repeats):
            seconds["ours"].append(ours(folder, folder / str(repeat), chosen.rounds, options))
            if chosen.pfl:
                its = pfl(folder, chosen.pfl, chosen.pfl_research, chosen.rounds)
                seconds.setdefault("pfl-research", []).append(its)
            print({name: values[-1] for name, values in seconds.items()}, flush=True)
    if chosen.pfl:
        print(f"pfl-research / ours: {median(seconds['pfl-research']) / median(seconds['ours']):.2f}")
    write(chosen.out, 1, seconds=seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
