"""Everything to be known about this project on a GPU, in parts that take less than ten minutes each.

    python benchmarks/gpu.py --part methods|behaviour|round|stacking|paper [--out gpu.json]

* ``methods``: every method trains three rounds on the card and on the CPU; accuracies may differ by TOLERANCE.
* ``behaviour``: a batch that does not fit, two workers on one card, ``device=cuda`` without a card, a SuperNode on
  the CPU and one on the card in one federation.
* ``round``: a round of FedProto (20 clients, batch 32) with 1, 2, 4 and 8 processes on the card, beside a plain eager
  loop on the same card (``local_training.py``), for heterogeneous-4 and small-4.
* ``stacking``: clients of one architecture trained as one model (``stacking.py``), eager and as a CUDA graph.
* ``paper``: 20 clients, four networks, 300 rounds at the size of CIFAR-10, on random images: seconds.

Data are made, nothing is read but the package. Prints ratios and writes one JSON. Without a card only ``--device cpu``
works, which tries the script itself at a small size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import NO_CARD, introduce, write

from pbfl_flwr.methods import METHODS
from pbfl_flwr.models.registry import FAMILIES

HERE = Path(__file__).parent
TOLERANCE = 0.05  # of the accuracy of 450 test samples, after three rounds
ONE_ARCHITECTURE = {
    "fedavg", "fedprox", "fedper", "fedrep", "fedala", "fesem", "feduv", "fednh", "fedfa", "fedpa", "fedcpd"
}  # fmt: skip


def pbfl(
    *settings: str, device: str, share: float = 0.25, workers: int = 4, visible: bool = True
) -> tuple[int, list[dict[str, Any]], float, str]:
    """Run a federation; return exit code, the lines of rounds.jsonl, seconds and the end of its output."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "pbfl_flwr.cli",
            "run",
            "--engine",
            "processes",
            "--run-dir",
            str(run),
        ]
        command += ["--workers", str(workers), "--set", f"device={device}"]
        command += ["--gpus-per-client", str(share)] if device == "cuda" and visible else []
        for setting in settings:
            command += ["--set", setting]
        environment = os.environ | ({} if visible else {"CUDA_VISIBLE_DEVICES": ""})
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        taken = time.perf_counter() - begin
        lines = run / "rounds.jsonl"
        rounds = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        return done.returncode, rounds, taken, (done.stdout + done.stderr)[-400:]


def methods(device: str) -> dict[str, Any]:
    """Return every method's accuracy on the card and on the CPU."""
    figures: dict[str, Any] = {}
    for name in METHODS if device == "cuda" else ("fedproto", "fedavg"):
        settings = [f"method={name}", "num-clients=4", "num-server-rounds=3"]
        settings += ["models=cnn4"] if name in ONE_ARCHITECTURE else []
        settings += ["gfpl.start=1", "gfpl.interval=1"] if name == "gfpl" else []
        accuracy: dict[str, Any] = {}
        for place in dict.fromkeys((device, "cpu")):
            code, rounds, _, output = pbfl(*settings, device=place)
            accuracy[place] = rounds[-1]["accuracy"]["head"]["weighted"] if code == 0 else output
        agree = all(isinstance(value, float) for value in accuracy.values()) and (
            abs(accuracy[device] - accuracy["cpu"]) <= TOLERANCE
        )
        figures[name] = {**accuracy, "agree": agree}
        print(f"{name:12} {accuracy} {'agree' if agree else 'DIFFER'}", flush=True)
    return figures


def behaviour(device: str) -> dict[str, Any]:
    """Return exit codes and the ends of the outputs of what must fail or be shared."""
    small = ("num-clients=4", "num-server-rounds=2")
    cases: dict[str, dict[str, Any]] = {
        "two workers on one card": {"settings": small, "device": device, "share": 0.5, "workers": 2},
        "device=cuda without a card": {"settings": small, "device": "cuda", "visible": False},
    }
    if device == "cuda":
        huge = (*small, "models=resnet152", "batch-size=100000", "eval-batch-size=100000", "local-epochs=1")
        cases["a batch that does not fit"] = {"settings": huge, "device": device, "share": 1.0, "workers": 1}
    figures = {}
    for name, case in cases.items():
        code, rounds, taken, output = pbfl(*case.pop("settings"), **case)
        figures[name] = {"exit code": code, "rounds": len(rounds), "seconds": taken, "output": output}
        print(f"{name}: exit code {code}, {len(rounds)} rounds\n    {output.strip()[-300:]}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pbfl_flwr.cli",
            "deploy",
            "local",
            "-n",
            "2",
            "--run-dir",
            f"{folder}/run",
        ]
        command += ["--set", "num-server-rounds=2", "--node", "device='cpu'", "--node", f"device='{device}'"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        output = (done.stdout + done.stderr)[-400:]
    figures["SuperNodes on different devices"] = {"exit code": done.returncode, "output": output}
    print(f"SuperNodes on different devices: exit code {done.returncode}\n    {output.strip()[-300:]}")
    return figures


def script(name: str, *arguments: str) -> dict[str, Any]:
    """Run another benchmark of this folder and return its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        subprocess.run([sys.executable, str(HERE / name), *arguments, "--out", str(out)], check=True)
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def one_round(device: str) -> dict[str, Any]:
    """Return samples per second of the plain loop and of ours, by the number of processes on the card."""
    processes = (1, 2, 4, 8) if device == "cuda" else (2,)
    only = ["--clients", "20"] if device == "cuda" else ["--clients", "2", "--only", "small-4"]
    return {
        str(workers): script("local_training.py", "--device", device, "--workers", str(workers), *only)
        for workers in processes
    }


def stacking(device: str) -> dict[str, Any]:
    """Return seconds of stacked and single training, by architecture."""
    architectures = FAMILIES["small-4"] if device == "cuda" else ("cnn4",)
    clients = "5" if device == "cuda" else "2"  # small-4 on 20 clients is five of each
    return {
        name: script(
            "stacking.py", "--architecture", name, "--clients", clients, "--device", device, "--graph"
        )
        for name in architectures
    }


def paper(device: str) -> dict[str, Any]:
    """Return the seconds of a run at the size of the papers' CIFAR-10 columns, on random images."""
    rounds, count = (300, 60_000) if device == "cuda" else (2, 600)
    with tempfile.TemporaryDirectory() as folder:
        generator = np.random.default_rng(0)
        file = Path(folder) / "random.npz"
        images = generator.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        np.savez(file, x=images, y=generator.integers(0, 10, count))
        models = "heterogeneous-4" if device == "cuda" else "small-4"
        settings = ("num-clients=20", f"num-server-rounds={rounds}", f"models={models}", "dataset=npz")
        code, lines, taken, output = pbfl(*settings, f"data-dir={file}", device=device)
    print(f"{len(lines)} rounds in {taken:.0f} s{'' if code == 0 else ': ' + output}")
    return {"rounds": len(lines), "seconds": taken, "exit code": code}


PARTS = {"methods": methods, "behaviour": behaviour, "round": one_round, "stacking": stacking, "paper": paper}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(NO_CARD)
        return 0
    introduce(torch.get_num_threads())
    figures = PARTS[chosen.part](chosen.device)
    write(chosen.out, torch.get_num_threads(), part=chosen.part, figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
