"""Every preset, comparison and reproduction that comes with the package: read, checked, dealt, and run for a round.

Data that is not on the machine is stood in for by noise with the same shape, classes and sizes.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pbfl_flwr.config import DataSettings, Settings, parse
from pbfl_flwr.data import ClientData, Pool, Shard
from pbfl_flwr.data.partition.assign import make_partition
from pbfl_flwr.experiments.plan import comparison as compare
from pbfl_flwr.experiments.plan import configuration
from pbfl_flwr.experiments.plan import reproduction as reproduce
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.models.build import check_models
from pbfl_flwr.models.registry import FAMILIES, architectures
from pbfl_flwr.task import Task
from tests.flower.inprocess import SHORT, federation

Keys = dict[str, Any]

# Input shape, classes, training and test samples.
SETS: dict[str, tuple[tuple[int, ...], int, int, int]] = {
    "digits": ((1, 16, 16), 10, 1797, 0),
    "mnist": ((1, 28, 28), 10, 60_000, 10_000),
    "fashion-mnist": ((1, 28, 28), 10, 60_000, 10_000),
    "cifar10": ((3, 32, 32), 10, 50_000, 10_000),
    "cifar100": ((3, 32, 32), 100, 50_000, 10_000),
    "gtsrb": ((3, 32, 32), 43, 26_640, 12_630),
    "flowers102": ((3, 64, 64), 102, 8_189, 0),
    "tiny-imagenet": ((3, 64, 64), 200, 110_000, 0),
    "femnist": ((1, 28, 28), 62, 736_000, 81_851),
    "ag-news": ((200,), 4, 120_000, 7_600),
    "har": ((9, 128), 6, 10_299, 0),
}
PEOPLE = {"har": 30}
TOKENS = {"ag-news": 32_000}
EXCHANGED: Keys = {"gfpl.start": 1, "gfpl.interval": 1}  # in the one round there is


def shipped() -> Iterator[tuple[str, Keys]]:
    """(where it stands, its keys) of every run of every file, reproductions at both scales."""
    for name in configuration.presets():
        yield f"preset {name}", configuration.gather(name, []).values
    for name in compare.comparisons():
        for label, keys in compare.read(name)[1].items():
            yield f"{name} {label}", keys
    for name in reproduce.reproductions():
        paper = reproduce.read(name)
        for block in paper.blocks:
            for label, keys in paper.runs_of(block).items():
                yield f"{name} {block} {label}", keys
            for label, keys in paper.runs_of(block, "small").items():
                yield f"{name} {block} {label} small", keys


RUNS = list(shipped())


@lru_cache(maxsize=8)
def stand_in(dataset: str) -> Pool:
    """As many labels as the dataset has, in its order, and no inputs."""
    _, classes, train, test = SETS[dataset]
    labels = np.concatenate([np.sort(np.arange(size) % classes) for size in (train, test)])
    owner = np.arange(len(labels)) // classes % PEOPLE[dataset] if dataset in PEOPLE else None
    return Pool(np.zeros((0, 1), np.float32), labels, tuple(str(k) for k in range(classes)), train, owner)


def short(keys: Keys) -> Keys:
    """The run cut down to two clients that take part, one round, few features, and small networks of as many kinds."""
    kinds = set(architectures(str(keys["models"])))
    text, windows = kinds <= {*FAMILIES["text-2"]}, kinds <= {*FAMILIES["sensor-4"]}
    small = "resnet4" if kinds == {"resnet18"} else "cnn4,resnet4"
    if text or windows or (len(kinds) == 1 and kinds != {"resnet18"}):
        small = str(keys["models"])
    classes = SETS[str(keys["dataset"])][1]
    cut: Keys = {"num-clients": 2, "num-server-rounds": 1, "batch-size": 4, "models": small, "device": "cpu"}
    cut["feature-dim"] = 16 if classes < 16 else 128
    if keys.get("cps-dim") or (keys["method"] == "tinyproto" and "cps-dim" not in keys):
        cut["cps-dim"] = 8
    shorter = EXCHANGED if keys["method"] == "gfpl" else SHORT.get(str(keys["method"]), {})
    cut |= {key: value for key, value in shorter.items() if not ((text or windows) and value == "cnn2")}
    return {**keys, **cut}


def distinct() -> list[tuple[str, Keys]]:
    """The runs that differ in more than data, networks, conventions and the size of numbers: the first of each."""
    ignored = {*DataSettings.key_names(), "feature-dim", "cps-scheme", "drop-last", "local-epochs"}
    ignored |= {"models", "initial-weights", "protocol", "evaluate-moment", "predictor"}
    first: dict[str, tuple[str, Keys]] = {}
    for where, keys in RUNS:
        cut = short(keys)
        kinds = {k: v if isinstance(v, bool | str) else v != 0 for k, v in cut.items() if k not in ignored}
        first.setdefault(str(sorted(kinds.items())), (where, cut))
    return list(first.values())


def noise(settings: Settings, client: int) -> ClientData:
    """Twelve training and four test samples of three classes, as the configured dataset's."""
    shape, classes, _, _ = SETS[settings.data.dataset]
    words = 40 if settings.data.dataset in TOKENS else 0
    generator = torch.Generator().manual_seed(client)

    def shard(size: int) -> Shard:
        most, kind = (words, torch.int32) if words else (256, torch.uint8)
        inputs = torch.randint(0, most, (size, *shape), dtype=kind, generator=generator)
        return Shard(inputs, (torch.arange(size) % 3 + 2 * client) % classes)

    names = tuple(str(k) for k in range(classes))
    scale = torch.full((shape[0], *(1 for _ in shape[1:])), 1 / 127.5)
    shift = -torch.ones(scale.shape)
    return ClientData(shard(12), shard(4), classes, names, scale, shift, vocabulary_size=words)


def test_every_key_of_every_run_is_allowed() -> None:
    for where, keys in RUNS:
        settings = configuration.check(configuration.RequestedKeys(keys))
        assert settings.data.dataset in SETS, where
        assert build_method(settings).name == keys["method"], where


def test_every_partition_can_be_dealt() -> None:
    settings = {(parse(keys, SECTIONS).data, int(keys["num-clients"])) for _, keys in RUNS}
    for data, num_clients in settings:
        counts = make_partition(stand_in(data.dataset), data, num_clients).counts
        assert (counts.sum(axis=1) >= data.min_samples).all()


def test_every_network_takes_its_data() -> None:
    settings = [parse(keys, SECTIONS) for _, keys in RUNS]
    wanted = {
        (s.models.models, *SETS[s.data.dataset][:2], s.models.feature_dim, TOKENS.get(s.data.dataset, 0))
        for s in settings
    }
    largest = {(models, shape): (classes, dim, size) for models, shape, classes, dim, size in sorted(wanted)}
    for (models, shape), (classes, dim, size) in largest.items():
        check_models(models, Task(classes, dim, shape, size))


@pytest.mark.parametrize(
    ("where", "keys"), distinct(), ids=lambda item: item if isinstance(item, str) else ""
)
def test_a_round_of_every_run(where: str, keys: Keys, tmp_path: Path) -> None:
    run = federation(tmp_path, data=noise, **keys).run()
    (line,) = run.strategy.history
    assert line.failures == []
    assert line.trained == [0, 1]
    accuracy = line.latest.accuracy
    assert accuracy
    assert {scored.clients for scored in accuracy.values()} == {2}
