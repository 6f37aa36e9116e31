"""A long federation over TLS with keys that is disturbed on purpose, and the same one undisturbed.

    python benchmarks/long_federation.py [--rounds 500] [--seed 0] [--faults 0.3] [--out long.json] [--folder DIR]

The same command with the same DIR goes on after it was killed itself, which is one more fault: everything ends at once.

FedProto on five SuperNodes with digits of their own. In a share of the rounds, drawn from the seed, a SuperNode is
killed (SIGKILL, with its ClientApp), stopped (SIGSTOP) or cut off from the SuperLink, and comes back; at a quarter and
three quarters of the rounds the ServerApp is killed, at half of them the SuperLink, and the run is resumed. Afterwards
the federation is computed again in this process, where only the replies that were lost are left out. Prints what
happened and the memory of every kind of process, and exits with 1 if a round is missing or twice, if a figure or a bit
of the prototypes differs, or if a kind of process has grown by more than a tenth. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Error, Message
from flwr.supercore.task_identity import TaskIdentity
from machine import introduce, write
from scale import processes_below

from pbfl_flwr.config import DataSettings, Scalar, parse
from pbfl_flwr.data import load_pool
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.deploy.local_federation import Deployment, complete
from pbfl_flwr.flower.deploy.superlink import ENDED
from pbfl_flwr.flower.engines.local import RUN_ID, LocalGrid, in_this_process, run_immediately
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.records import RoundRecord
from pbfl_flwr.runs.tensor_files import load_tensors
from pbfl_flwr.util.atomic_files import DamagedState, write_atomically

ROOT = Path(__file__).parents[1]
NODES = 5
ALLOWED_GROWTH = 0.10
SEEN = "seen.pickle"
RETRY_SECONDS = 15.0  # RestartSec of the unit in docs/deploy.md
SAMPLE_SECONDS = 5.0
CONFIG: dict[str, Scalar] = {
    "num-clients": NODES,
    "models": "cnn2",
    "feature-dim": 32,
    "batch-size": 16,
    "learning-rate": 0.05,
    "momentum": 0.5,
    "optimizer-state": "kept",
    "threads": 1,
    "join-timeout": 600.0,
    "round-timeout": 180.0,
}
ROLES = {
    "flower-superlink": "SuperLink",
    "flwr-serverapp": "ServerApp",
    "flower-supernode": "SuperNode",
    "flwr-clientapp": "ClientApp",
    "flower-superexec": "SuperExec",
}


class Link:
    """The TCP connections of one SuperNode to the SuperLink, which can be cut."""

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self, cut: bool) -> None:
        self._cut = cut
        for connection in list(self._open) if cut else []:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            inner, _ = self._listener.accept()
            try:
                if self._cut or self.target is None:
                    raise ConnectionError
                outer = socket.create_connection(self.target)
            except OSError:
                inner.close()
                continue
            self._open |= {inner, outer}
            for source, sink in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        source.close()
        self._open.discard(source)


class Linked(Deployment):
    """A deployment whose SuperNodes connect through a :class:`Link` each, and can be killed and started again."""

    def __init__(self, run_dir: Path, nodes: list[dict[str, Scalar]], links: list[Link]) -> None:
        super().__init__(run_dir, nodes)
        self.links, self._due = links, dict.fromkeys(range(len(nodes)), 0.0)

    def start_node(
        self, index: int, node: Mapping[str, Scalar], key: Path | None, ca: Path | None
    ) -> subprocess.Popen[bytes]:
        superlink = self.fleet_address
        host, _, port = superlink.rpartition(":")
        self.links[index].target = (host, int(port))
        self.fleet_address = self.links[index].address
        try:
            return super().start_node(index, node, key, ca)
        finally:
            self.fleet_address = superlink

    def kill_node(self, index: int, seconds: float) -> None:
        """Kill a SuperNode with all that it started; it is started again after these seconds."""
        self.signal_node(index, signal.SIGKILL)
        self._supernodes.pop(index).wait()
        self._due[index] = time.monotonic() + seconds

    def signal_node(self, index: int, number: int) -> None:
        os.killpg(self._supernodes[index].pid, number)

    def runs(self, index: int) -> bool:
        return index in self._supernodes and self._supernodes[index].poll() is None

    def restart_nodes(self) -> None:
        """Start SuperNodes that have ended; Flower refuses a known key until it has noticed that its node is gone."""
        for index in [index for index in self._due if not self.runs(index)]:
            if self._due[index] <= time.monotonic():
                key = self.key(index)
                self._supernodes[index] = self.start_node(index, self._nodes[index], key, self.ca)
                self._due[index] = time.monotonic() + RETRY_SECONDS

    def kill_superlink(self) -> None:
        assert self._superlink is not None
        os.killpg(self._superlink.pid, signal.SIGKILL)
        self._superlink.wait()

    def run_ended(self) -> bool:
        """Whether the log of the run has ended, as it does with the run."""
        return self._follower is None or self._follower.poll() is not None


@dataclass
class Disturbed:
    """The disturbed federation and what was seen of it.

    Attributes:
        folder: of everything that it writes.
        rounds: to train.
        random: draws the faults.
        faults: share of the rounds with one.
        happened: kind of fault -> how often.
        trained: (client, round) whose state was seen on the client's disk.
        memory: role -> (rounds done, MiB of the largest process).
        seconds: that it has taken so far.
    """

    folder: Path
    rounds: int
    random: random.Random
    faults: float
    happened: Counter[str] = field(default_factory=Counter)
    trained: set[tuple[int, int]] = field(default_factory=set)
    memory: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0
    _comes_back: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _drawn: int = 1
    _sampled: float = 0.0

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def done(self) -> int:
        file = self.run_dir / "rounds.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def save(self) -> None:
        """Write what was seen, so that the script can go on after it was killed."""
        seen = (
            self.random.getstate(),
            self.happened,
            self.trained,
            dict(self.memory),
            self.seconds,
            self._drawn,
        )
        write_atomically(self.folder / SEEN, pickle.dumps(seen))

    def load(self) -> None:
        """Continue with what an earlier process of this script saw."""
        if (file := self.folder / SEEN).exists():
            state, self.happened, self.trained, memory, self.seconds, self._drawn = pickle.loads(
                file.read_bytes()
            )
            self.random.setstate(state)
            self.memory.update(memory)
            self.happened["everything killed"] += 1

    def run(self, nodes: list[dict[str, Scalar]]) -> None:
        links = [Link() for _ in nodes]
        kills = [
            ("ServerApp", self.rounds // 4),
            ("SuperLink", self.rounds // 2),
            ("ServerApp", 3 * self.rounds // 4),
        ]
        config = {**CONFIG, "num-server-rounds": self.rounds, "run-dir": str(self.run_dir)}
        kills = [kill for kill in kills if kill[1] > self.done()]
        while self.done() < self.rounds:
            with Linked(self.run_dir, nodes, links) as deployment:
                while self.done() < self.rounds:
                    run_id = deployment.submit(ROOT, {**config, "resume": self.done() > 0})
                    kind, number = kills[0] if kills else ("", self.rounds)
                    self._until(deployment, run_id, number)
                    if kills and self.done() < self.rounds:
                        kills.pop(0)
                        self._kill_server(deployment, run_id, kind)
                        if kind == "SuperLink":
                            break
                for link in links:
                    link.cut(False)
                self._comes_back.clear()

    def _until(self, deployment: Linked, run_id: str, number: int) -> None:
        """Disturb the run until this many rounds are done."""
        while (done := self.done()) < number:
            deployment.restart_nodes()
            self._disturb(deployment, done)
            self._observe(done)
            if deployment.run_ended() and deployment.outcome(run_id)[0] in ENDED and self.done() < number:
                raise RuntimeError(f"the run ended in round {done + 1}:\n{deployment.tail()}")
            time.sleep(0.5)

    def _kill_server(self, deployment: Linked, run_id: str, kind: str) -> None:
        time.sleep(self.random.uniform(0, 10))
        self.happened[f"{kind} killed"] += 1
        print(f"round {self.done() + 1}: {kind} killed", flush=True)
        if kind == "SuperLink":
            deployment.kill_superlink()
            return
        for pid, role, _ in processes_below(os.getpid(), ROLES):
            if role == "ServerApp":
                os.kill(pid, signal.SIGKILL)
        deployment.stop(run_id)

    def _disturb(self, deployment: Linked, done: int) -> None:
        now = time.monotonic()
        for item in [item for item in self._comes_back if item[0] <= now]:
            self._comes_back.remove(item)
            with contextlib.suppress(ProcessLookupError, KeyError):
                item[1]()
        while self._drawn <= done:
            self._drawn += 1
            if self.random.random() >= self.faults:
                continue
            kind, index = self.random.choice(["killed", "stopped", "cut off"]), self.random.randrange(NODES)
            seconds = self.random.uniform(2, 90)
            if self._comes_back or not all(deployment.runs(index) for index in range(NODES)):
                continue  # one at a time, so that most replies come
            self.happened[f"SuperNode {kind}"] += 1
            print(f"round {done + 1}: SuperNode {index} {kind} for {seconds:.0f} s", flush=True)
            if kind == "killed":
                deployment.kill_node(index, seconds)
            elif kind == "stopped":
                deployment.signal_node(index, signal.SIGSTOP)
                again = partial(deployment.signal_node, index, signal.SIGCONT)
                self._comes_back.append((now + seconds, again))
            else:
                deployment.links[index].cut(True)
                self._comes_back.append((now + seconds, partial(deployment.links[index].cut, False)))

    def _observe(self, done: int) -> None:
        for client in range(NODES):
            for file in (self.run_dir / "clients" / f"node-{client}").rglob("client-*.safetensors"):
                with contextlib.suppress(DamagedState):  # it was replaced meanwhile
                    self.trained.add((client, int(load_tensors(file)[1]["round"])))
        if time.monotonic() - self._sampled >= SAMPLE_SECONDS:
            if self._sampled:
                self.seconds += time.monotonic() - self._sampled
            self._sampled = time.monotonic()
            largest: dict[str, float] = {}
            for _, role, size in processes_below(os.getpid(), ROLES):
                largest[role] = max(size, largest.get(role, 0.0))
            for role, size in largest.items():
                self.memory[role].append((done, size))
            self.save()


def devices(folder: Path) -> list[dict[str, Scalar]]:
    """Write the digits of every SuperNode, 16 of each class, and return the nodes' configurations."""
    pool = load_pool(DataSettings(dataset="digits"))
    nodes: list[dict[str, Scalar]] = []
    for index in range(NODES):
        rows = [np.flatnonzero(pool.labels == label)[30 * index :][:16] for label in range(10)]
        chosen = np.concatenate(rows)
        np.savez(folder / f"digits-{index}.npz", x=pool.inputs[chosen], y=pool.labels[chosen])
        nodes.append({"data-path": str(folder / f"digits-{index}.npz")})
    return nodes


def undisturbed(
    folder: Path,
    rounds: int,
    given: list[dict[str, Scalar]],
    records: list[RoundRecord],
    trained: set[tuple[int, int]],
) -> MethodStrategy:
    """Compute the federation in this process; only replies that were lost are left out.

    Args:
        folder: for the states of its clients.
        rounds: to train.
        given: what the operators of the nodes configured.
        records: of the disturbed federation.
        trained: (client, round) whose state reached the client's disk, whether or not its reply arrived.
    """
    nodes = complete(given, NODES, folder)
    config = {**CONFIG, "num-server-rounds": rounds, "run-dir": str(folder)}
    lost = {(client, r.round) for r in records for client in set(range(NODES)) - set(r.trained)}
    app = in_this_process(make_client_app())

    def handle(message: Message, context: Context) -> Message:
        client = int(str(context.node_config["partition-id"]))
        number = int(message.metadata.group_id) if message.metadata.message_type == "train" else 0
        missing = Message(Error(code=5, reason="left out"), reply_to=message)
        if (client, number) in lost - trained:
            return missing
        device = Context(RUN_ID, context.node_id, {**nodes[client]}, context.state, context.run_config)
        reply = app(message, device)
        return missing if (client, number) in lost else reply

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = RUN_ID
    torch.set_num_threads(1)
    strategy = MethodStrategy(parse(config, SECTIONS))
    strategy.start(LocalGrid(handle, run_immediately, config, NODES))
    return strategy


def differences(run_dir: Path, records: list[RoundRecord], expected: MethodStrategy) -> list[str]:
    """Return what differs from the undisturbed federation: rounds and figures, and the prototypes."""
    wrong = [
        f"round {record.round}: {name}"
        for record, other in zip(records, expected.history, strict=False)
        for name in ("round", "trained", "accuracy", "test_loss", "client_metrics", "ages")
        if getattr(record, name) != getattr(other, name)
    ]
    saved, _ = load_tensors(run_dir / "checkpoint.safetensors")
    tensors = expected.state.to_tensors()
    if saved.keys() != tensors.keys() or not all(torch.equal(saved[name], tensors[name]) for name in saved):
        wrong.append("the prototypes")
    return wrong


def growth(samples: list[tuple[int, float]], rounds: int) -> tuple[float, float]:
    """Return the mean MiB over the second and over the last tenth of the rounds; NaN without samples."""
    window = max(1, rounds // 10)
    early = [size for done, size in samples if window <= done < 2 * window]
    late = [size for done, size in samples if done >= rounds - window]
    return (fmean(early), fmean(late)) if early and late else (float("nan"), float("nan"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=float, default=0.3, help="share of the rounds with one")
    parser.add_argument("--folder", type=Path, help="is kept; by default a temporary one")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    introduce(1)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="long-federation-"))
    folder.mkdir(parents=True, exist_ok=True)
    given = devices(folder)
    disturbed = Disturbed(folder, chosen.rounds, random.Random(chosen.seed), chosen.faults)
    disturbed.load()
    disturbed.run(complete(given, NODES, disturbed.run_dir / "clients"))
    records = RunDirectory(disturbed.run_dir).round_records()
    expected = undisturbed(folder / "undisturbed", chosen.rounds, given, records, disturbed.trained)
    wrong = differences(disturbed.run_dir, records, expected)
    if [record.round for record in records] != list(range(1, chosen.rounds + 1)):
        wrong.append("rounds are missing or twice")
    lost = sum(NODES - len(record.trained) for record in records)
    figures: dict[str, Any] = {
        "rounds": len(records),
        "hours": disturbed.seconds / 3600,
        "seconds a round, median": median(record.seconds.total for record in records),
        "replies lost": lost,
        "replies": NODES * len(records),
        **disturbed.happened,
        "differences": wrong,
    }
    print(json.dumps(figures, indent=1))
    print(f"{'process':<12}{'early, MB':>12}{'late, MB':>12}{'growth':>9}")
    memory, steady = {}, True
    for role, samples in sorted(disturbed.memory.items()):
        early, late = growth(samples, chosen.rounds)
        memory[role] = {"early": early, "late": late}
        steady &= late / early - 1 <= ALLOWED_GROWTH  # False without samples, too
        print(f"{role:<12}{early:>12.0f}{late:>12.0f}{100 * (late / early - 1):>8.1f}%")
    write(chosen.out, 1, seed=chosen.seed, **figures, memory=memory)
    return int(bool(wrong) or not steady)


if __name__ == "__main__":
    sys.exit(main())
