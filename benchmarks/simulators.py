"""The benchmarks of two other simulators on the same cores: theirs in turn with the same federation here.

    python benchmarks/simulators.py pfl [--python VENV/bin/python --clone CLONE] [--states /dev/shm] [--repeats 2]
    python benchmarks/simulators.py blazefl [...]

``pfl``: github.com/apple/pfl-research, its CIFAR-10 benchmark: FedAvg, 1,000 clients of 50 images, 50 of them a round,
batches of ten, its CNN; needs pfl, pyyaml and h5py. ``blazefl``: github.com/blazefl/benchmarks: FedAvg, 100 clients of
500 images of two classes, all in every round, five epochs, batches of 50, its CNN; needs blazefl[contrib], torchvision
and hydra-core. Both see random images of CIFAR-10's shape, since only times are compared. ``--states`` is where ours
keeps the clients' states, which they have none of: flushing them to a busy disk may take as long as training. Seconds
of a round: medians over the rounds after the first for ``pfl``, the mean of all five for ``blazefl``, which prints no
others.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median

import numpy as np
from machine import introduce, write
from torch import nn

from pbfl_flwr.config import Scalar
from pbfl_flwr.models.contract import SplitModel
from pbfl_flwr.task import Task

TRAIN, TEST = 50_000, 10_000
COMMON: dict[str, Scalar] = {"method": "fedavg", "dataset": "npz", "train-share": TRAIN / (TRAIN + TEST)}
PFL: dict[str, Scalar] = {
    "num-clients": 1000,
    "fraction-train": 0.05,
    "fraction-evaluate": 0.0,
    "partition": "iid",
    "models": "simulators:simple_cnn",
    "feature-dim": 128,
    "batch-size": 10,
    "learning-rate": 0.1,
    "weighting": "uniform",
    "num-server-rounds": 8,
    "evaluate-every": 8,  # theirs, too, scores after the last round only
}
BLAZEFL: dict[str, Scalar] = {
    "num-clients": 100,
    "partition": "pathological",
    "classes-per-client": 2,
    "models": "simulators:lenet",
    "feature-dim": 84,
    "batch-size": 50,
    "local-epochs": 5,
    "learning-rate": 0.1,
    "num-server-rounds": 5,
}
# Stands in for torchvision's CIFAR10, which would download; Python imports it at its start.
RANDOM_CIFAR10 = """
import os, numpy, torchvision

class CIFAR10:
    def __init__(self, root, train, download):
        with numpy.load(os.environ["IMAGES"]) as images:
            part = slice(50_000) if train else slice(50_000, None)
            self.data, self.targets = images["x"][part].transpose(0, 2, 3, 1), images["y"][part].tolist()

    def __len__(self):
        return len(self.targets)

torchvision.datasets.CIFAR10 = CIFAR10
"""


def simple_cnn(task: Task) -> SplitModel:
    """``simple_cnn`` of pfl-research, 1.6 million weights for images of 3x32x32; here it pools before the second ReLU.

    That changes no output, and is how this project's own networks are written.
    """
    channels, height, width = task.input_shape
    flat = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    convolutions = [nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU()]
    stage = nn.Sequential(*convolutions, nn.Dropout(0.25))
    neck = nn.Sequential(nn.Flatten(), nn.Linear(flat, task.feature_dim), nn.ReLU(), nn.Dropout(0.5))
    return SplitModel(task, [stage], neck, nn.Linear(task.feature_dim, task.num_classes))


def lenet(task: Task) -> SplitModel:
    """``CNN`` of BlazeFL's benchmark, 62,006 weights; pools before ReLU, likewise."""
    first = nn.Sequential(nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU())
    neck = nn.Sequential(
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, task.feature_dim), nn.ReLU()
    )
    return SplitModel(task, [first, second], neck, nn.Linear(task.feature_dim, task.num_classes))


def write_images(folder: Path) -> None:
    """Write the same images for all."""
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (TRAIN + TEST, 3, 32, 32), dtype=np.uint8)
    y = np.arange(TRAIN + TEST) % 10
    np.savez(folder / "images.npz", x=x, y=y)
    for name, part in {"train": slice(TRAIN), "test": slice(TRAIN, None)}.items():
        content = (x[part].transpose(0, 2, 3, 1), y[part].reshape(-1, 1))
        (folder / f"cifar10_{name}.p").write_bytes(pickle.dumps(content))
    (folder / "sitecustomize.py").write_text(RANDOM_CIFAR10)


def ours(folder: Path, run_dir: Path, keys: Mapping[str, Scalar], options: list[str]) -> list[float]:
    """Return the seconds of the rounds of ``pbfl run``."""
    command = [sys.executable, "-m", "pbfl_flwr.cli", "run", "--run-dir", str(run_dir), *options]
    for key, value in {**COMMON, **keys, "data-dir": str(folder / "images.npz")}.items():
        command += ["--set", f"{key}={value}"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
    records = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    return [record["seconds"]["total"] for record in records]


def theirs(command: list[str | Path], folder: Path, path: Path, threads: int) -> None:
    """Run another simulator with this number of threads in each of its processes."""
    environment = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(path)}
    environment |= {"IMAGES": str(folder / "images.npz")}
    process = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if process.returncode:
        raise SystemExit(process.stderr)


def pfl(folder: Path, python: Path, clone: Path, workers: int) -> float:
    """Return the seconds of a round of pfl-research's own benchmark, a process of that many threads."""
    benchmark, rounds = clone / "benchmarks/image_classification", str(PFL["num-server-rounds"])
    command: list[str | Path] = [
        python,
        benchmark / "pytorch/train.py",
        "--args_config",
        benchmark / "configs/baseline.yaml",
    ]
    numbers = ["--central_num_iterations", rounds, "--evaluation_frequency", rounds]
    theirs([*command, "--data_path", folder, *numbers], folder, clone / "benchmarks", workers)
    with (folder / "metrics.csv").open() as file:
        seconds = [float(row["Duration of iteration (s)"]) for row in csv.DictReader(file)]
    return median(seconds[1:])


def blazefl(folder: Path, python: Path, clone: Path, workers: int) -> float:
    """Return the seconds of a round of BlazeFL's own benchmark, in processes of one thread; it scores 10,000 images."""
    places = [
        f"{name}={folder / name}" for name in ("dataset_root_dir", "share_dir", "state_dir", "hydra.run.dir")
    ]
    number = f"num_parallels={workers}"
    options = ["model_name=CNN", "execution_mode=MULTI_PROCESS", number, *places]
    theirs([python, clone / "blazefl-case/main.py", *options], folder, folder, 1)
    printed = (folder / "hydra.run.dir/main.log").read_text()
    total = re.findall(r"BENCHMARK_RESULT_TIME: ([\d.]+)", printed)[-1]
    return float(total) / int(BLAZEFL["num-server-rounds"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=("pfl", "blazefl"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--engine", choices=("processes", "ray", "flower"), default="processes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--states", type=Path)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--clone", type=Path)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    introduce(1)
    seconds: dict[str, list[float]] = {"ours": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_images(folder)
        options = ["--engine", chosen.engine, "--workers", str(chosen.workers)]
        keys = PFL if chosen.benchmark == "pfl" else BLAZEFL
        for repeat in range(chosen.repeats):
            with tempfile.TemporaryDirectory(dir=chosen.states) as states:  # 2 GB with ``pfl``
                rounds = ours(folder, folder / str(repeat), {**keys, "state-dir": states}, options)
            if chosen.benchmark == "pfl":
                seconds["ours"].append(median(rounds[1:-1]))  # after the last one all clients are scored
            else:
                seconds["ours"].append(fmean(rounds))
            if chosen.python:
                run = pfl if chosen.benchmark == "pfl" else blazefl
                value = run(folder, chosen.python.absolute(), chosen.clone.absolute(), chosen.workers)
                seconds.setdefault(chosen.benchmark, []).append(value)
            print({name: round(values[-1], 2) for name, values in seconds.items()}, flush=True)
    if chosen.python:
        ratio = median(seconds[chosen.benchmark]) / median(seconds["ours"])
        print(f"{chosen.benchmark} / ours: {ratio:.2f}")
    write(chosen.out, 1, seconds=seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
