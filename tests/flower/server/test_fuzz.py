"""1,000 malformed uploads over several methods: the server stays up, its memory bounded, the aggregate the clean one's.

Every upload here must be rejected. What is merely another number is not malformed: the checksum finds it when it came
about on the way, nothing finds it when a client means it (the robust rules are for that).
"""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from safetensors.torch import load, save
from torch import Tensor

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.errors import LONGEST
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.methods.gfpl.payload import Mixtures
from pbfl_flwr.payloads import Prototypes, Upload, Weights
from pbfl_flwr.task import Task
from pbfl_flwr.util.memory import peak_memory
from tests.flower.inprocess import Fault, InProcessGrid, reply_of, same_tensors, scripted, silent

TASK = Task(num_classes=6, feature_dim=8, input_shape=(1, 16, 16))
ROUNDS, CLIENTS = 12, 21
BAD = tuple(client for client in range(CLIENTS) if client % 3)  # 14 of 21: in 12 rounds 168 uploads a method
COMMON: dict[str, Scalar] = {"num-clients": CLIENTS, "feature-dim": 8, "join-timeout": 0.2}

Mutation = Callable[[dict[str, Tensor], random.Random], RecordDict]


def table(seed: int, counts: bool = False, total: bool = False) -> Prototypes:
    g = torch.Generator().manual_seed(seed)
    present = torch.rand(6, generator=g) < 0.6
    present[seed % 6] = True
    values = torch.randn(6, 8, generator=g) * present[:, None]
    n = torch.randint(1, 50, (6,), generator=g) * present
    return Prototypes(values, present, n if counts else None, int(n.sum()) if total else None)


def weights(strategy: MethodStrategy, seed: int) -> Weights:
    g = torch.Generator().manual_seed(seed)
    named = {name: torch.randn(t.shape, generator=g) for name, t in strategy.state.tensors.items()}
    return Weights(named, 1 + seed % 7)


def mixtures(seed: int) -> Mixtures:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randperm(6, generator=g)[:5]
    return Mixtures(
        labels, torch.ones(5), torch.randn(5, 8, generator=g), torch.rand(5, 8, generator=g) + 0.1
    )


METHODS: dict[str, tuple[dict[str, Scalar], Callable[[MethodStrategy, int], Upload]]] = {
    "mean": ({"method": "fedproto"}, lambda s, i: table(i)),
    "weighted": ({"method": "fedproto", "aggregation": "weighted"}, lambda s, i: table(i, counts=True)),
    "ppa": ({"method": "fedproto", "aggregation": "ppa"}, lambda s, i: table(i, total=True)),
    "median": ({"method": "fedproto", "aggregation": "median"}, lambda s, i: table(i)),
    "fedavg": ({"method": "fedavg", "models": "mlp5"}, weights),
    "gfpl": (
        {"method": "gfpl", "gfpl.start": 1, "gfpl.interval": 1, "gfpl.components": 2},
        lambda s, i: mixtures(i),
    ),
}

# Ways to spoil an upload ------------------------------------------------------------------------------------


def report() -> MetricRecord:
    return Report(10, 4, 1, {"head": 2}, 0.5, metrics={"loss.ce": 1.0}).to_record()


def of(data: bytes) -> RecordDict:
    return wire.content(wire.with_checksum(data), report())


def of_tensors(tensors: dict[str, Tensor]) -> RecordDict:
    return of(save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def pick(tensors: dict[str, Tensor], rng: random.Random, floating: bool | None = None) -> str:
    names = sorted(n for n, t in tensors.items() if floating is None or t.is_floating_point() == floating)
    return rng.choice(names)


def flipped(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    """Bytes change on the way, after the checksum was taken."""
    record = wire.with_checksum(save(tensors))
    array = record["s"]
    data = bytearray(array.data)
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if bytes(data) == array.data:
        data[0] ^= 1
    return wire.content(
        ArrayRecord({"s": Array(array.dtype, array.shape, array.stype, bytes(data))}), report()
    )


def truncated(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    data = save(tensors)
    return of(data[: rng.randrange(len(data))])


def noise(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    return of(rng.randbytes(rng.randrange(300)))


def wrong_dtype(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    name = pick(tensors, rng)
    other = [torch.complex64, torch.bool] if rng.random() < 0.5 else [torch.float8_e4m3fn]
    return of_tensors({**tensors, name: tensors[name].to(torch.float32).to(rng.choice(other))})


def wrong_shape(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    name = pick(tensors, rng)
    result = tensors[name]
    change = rng.choice(
        [lambda t: t[None], lambda t: torch.cat([t.flatten()] * 3), lambda t: t.flatten()[:0]]
    )
    return of_tensors({**tensors, name: change(result)})


def not_a_number(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    name = pick(tensors, rng, floating=True)
    result = tensors[name].clone()
    result.view(-1)[rng.randrange(result.numel())] = rng.choice(
        [float("nan"), float("inf"), -float("inf"), 1e30]
    )
    return of_tensors({**tensors, name: result})


def missing(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    gone = pick(tensors, rng)
    return of_tensors({name: tensor for name, tensor in tensors.items() if name != gone})


def renamed(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    old = pick(tensors, rng)
    return of_tensors({rng.choice(["x", old + "x", ""]) if n == old else n: t for n, t in tensors.items()})


def extra(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    return of_tensors({**tensors, "one-more": torch.zeros(rng.choice([0, 1, 1000]))})


def wrong_number(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    """A label out of range or negative, a count that is negative or enormous."""
    name = pick(tensors, rng, floating=False)
    result = tensors[name].to(torch.int64)
    result.view(-1)[rng.randrange(result.numel())] = rng.choice([-1, -(2**62), 2**62])
    return of_tensors({**tensors, name: result})


def doubled(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    """All rows twice; for what is no table, all names twice."""
    if "labels" in tensors and "weights" not in tensors:
        return of_tensors({n: torch.cat([t, t]) for n, t in tensors.items()})
    return of_tensors({**tensors, **{n + ".again": t.clone() for n, t in tensors.items()}})


def claimed(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    """A header that claims what is not there."""
    header: Any = {
        name: {
            "dtype": rng.choice(["F32", "F64", "U8", "I64", "BF16"]),
            "shape": rng.choice([[2**62], [2**31, 2**31], [10**9, 8], [0, 2**63], [-1], [1] * 5000, None]),
            "data_offsets": rng.choice([[0, 2**62], [0, 0], [2**40, 2**41], [8, 0], None]),
        }
        for name in tensors
    }
    text = json.dumps(header).encode()
    length = rng.choice([len(text), 2**62, 2**64 - 1, wire.MAX_HEADER + 1, 2**26])
    return of(length.to_bytes(8, "little") + text + bytes(rng.choice([0, 64])))


def wrong_records(tensors: dict[str, Tensor], rng: random.Random) -> RecordDict:
    good = of_tensors(tensors)
    kind = rng.randrange(4)
    values: list[str | int | bytes] = ["y", 1, b"z", ""]
    records: list[ConfigRecord | ArrayRecord] = [
        ConfigRecord({"x": b"y" * 10**6}),
        wire.with_checksum(save(tensors)),
    ]
    if kind == 0:
        del good[rng.choice(["p", "m"])]
    elif kind == 1:
        good[rng.choice(["p", "m"])] = ConfigRecord({"x": rng.choice(values)})
    elif kind == 2:
        good[rng.choice(["q", "c", "x" * 5000])] = rng.choice(records)
    else:
        good["m"] = MetricRecord({**dict(report()), **rng.choice(REPORTS)})
    return good


REPORTS: list[dict[str, Any]] = [
    {"n": [10]},
    {"n": [-1, 4, 1, 0]},
    {"n": [2**62, 4, 1, 0]},
    {"c": [9] * 5},
    {"c": 3},
    {"c": []},
    {"c": -(2**62)},
    {"n": [-5] * 4},
    {"n": [float("inf")] * 6},
    {"t": [1e300] * 3},
    {"t": [float("nan")] * 7},
    {"loss.ce": float("inf")},
    {"loss.ce": 10**300},
    {"x" * 10**5: 1.0},
    {f"metric-{i}": 0.0 for i in range(200)},
]

MUTATIONS: list[Mutation] = [
    flipped, truncated, noise, wrong_dtype, wrong_shape, not_a_number, missing, renamed, extra, wrong_number, doubled,
    claimed, wrong_records,
]  # fmt: skip


@pytest.mark.parametrize("name", list(METHODS))
def test_malformed_uploads_change_nothing(name: str) -> None:
    keys, make = METHODS[name]
    settings = parse({**COMMON, **keys, "num-server-rounds": ROUNDS}, SECTIONS)
    rng = random.Random(f"fuzz {name}")
    made: list[str] = []

    def run(malformed: bool) -> MethodStrategy:
        strategy = MethodStrategy(settings)

        def answer(client: int, server_round: int) -> RecordDict:
            upload = make(strategy, 100 * server_round + client)
            if client not in BAD:
                return reply_of(upload)
            mutation = MUTATIONS[(len(made)) % len(MUTATIONS)]
            made.append(mutation.__name__)
            tensors = {n: t.clone() for n, t in load(wire.encode(upload)["s"].data).items()}
            return mutation(tensors, rng)

        app = scripted(TASK, answer, str(keys.get("models", "cnn4")))
        rounds = () if malformed else (*range(1, ROUNDS + 1), -1)
        faults: dict[tuple[int, int], Fault] = {
            (client, number): silent for client in BAD for number in rounds
        }
        strategy.start(InProcessGrid(app, {}, CLIENTS, order=1, faults=faults))
        return strategy

    clean = run(False)
    before = peak_memory()
    poisoned = run(True)
    grown = peak_memory() - before

    assert len(made) >= ROUNDS * len(BAD)  # where a last scoring follows, there are more
    good = [client for client in range(CLIENTS) if client not in BAD]
    accepted = []
    for line in poisoned.history:
        assert line.trained == good, [
            (made[len(BAD) * (line.round - 1) + BAD.index(c)], line.round)
            for c in set(line.trained) - set(good)
        ]
        accepted += [c for c in line.trained if c in BAD]
        for failure in line.failures:
            assert failure.reason.startswith("upload rejected: ")
            assert "\n" not in failure.reason
            assert len(failure.reason) < 2 * LONGEST
    assert accepted == []
    assert same_tensors(poisoned.state.to_tensors(), clean.state.to_tensors())
    json.dumps([record.to_json() for record in poisoned.history], allow_nan=False)
    assert grown < 200, f"{grown:.0f} MiB more than before"


def test_reply_above_the_limit_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MiB is allowed; neither 2 MiB of payload, 2 MiB beside it nor 1.6 MiB in memory reach the reader."""
    read: list[int] = []

    def reading(data: bytes) -> dict[str, Tensor]:
        read.append(len(data))
        return load(data)

    monkeypatch.setattr(wire, "tensors_in", reading)

    def answer(client: int, server_round: int) -> RecordDict:
        if client == 0:
            return reply_of(table(0))
        if client == 1:
            return of(bytes(2 * 2**20))
        if client == 2:  # 0.4 MB that become 1.6
            rows = {"rows": torch.zeros(400, 1000, dtype=torch.int8), "rows#scale": torch.ones(400)}
            return of(save({**rows, "labels": torch.arange(10)}))
        if client == 3:  # 0.2 MB that become 1.6
            return of(save({**table(1).to_tensors(), "counts": torch.ones(200_000, dtype=torch.uint8)}))
        content = reply_of(table(1))
        content["m"] = MetricRecord({**dict(report()), "more": [0] * 2**18})
        return content

    settings = parse({**COMMON, "num-clients": 5, "num-server-rounds": 1, "max-upload-mb": 1}, SECTIONS)
    strategy = MethodStrategy(settings)
    strategy.start(InProcessGrid(scripted(TASK, answer), {}, 5))
    assert strategy.history[0].trained == [0]
    assert len(strategy.history[0].failures) == 4
    for failure in strategy.history[0].failures:
        assert "must be at most 1048576 (max-upload-mb)" in failure.reason
    assert max(read) < 2**16
