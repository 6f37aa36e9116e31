"""Run directories read for statistics and pictures; runs that differ only in the seed form a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.errors import PbflError, expanded
from pbfl_flwr.experiments.results.accuracies import client_series, honest, label_names, series
from pbfl_flwr.runs.directory import RunDirectory

NEUTRAL = frozenset(
    {
        "seed",
        "run-dir",
        "state-dir",
        "resume",
        "keep-best",
        "round-timeout",
        "join-timeout",
        "threads",
        "device",
    }
)
LONGEST_LABEL = 40


@dataclass(frozen=True, eq=False)
class Record:
    """A run with at least one finished round.

    Attributes:
        directory: the run directory.
        about: content of run.json.
        rounds: entries of rounds.jsonl.
        clients: entries of clients.jsonl up to the last round in ``rounds``.
        counts: samples of each class on each client (M, K); None if clients bring their own data.
        newcomers: entries of newcomers.jsonl for the clients that came after the last of these rounds.
        allowed: code named by the run that may be imported, as my_package.module:function.
        by: the requested predictor; empty means the headline.
    """

    directory: RunDirectory
    about: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    clients: Sequence[Mapping[str, Any]]
    counts: NDArray[np.int64] | None
    newcomers: Sequence[Mapping[str, Any]] = ()
    allowed: frozenset[str] = frozenset()
    by: str = ""

    @classmethod
    def load(cls, path: Path, allowed: Iterable[str] = (), by: str = "") -> Record:
        """Read a run directory; the arguments are those of the class.

        Raises:
            PbflError: if there is no run, it is damaged, or no round is finished.
        """
        directory = RunDirectory(path)
        about, rounds = directory.read(), directory.rounds()
        if not rounds:
            raise PbflError(f"'{path}' has no finished round yet; there is nothing to report")
        counts = directory.partition_counts()
        table = None if counts is None else np.array(counts, dtype=np.int64)
        newcomers = directory.newcomers(len(rounds))
        # clients.jsonl is written before rounds.jsonl, so it may have one round more.
        clients = [line for line in directory.client_rounds() if line["round"] <= rounds[-1]["round"]]
        return cls(directory, about, rounds, clients, table, newcomers, frozenset(allowed), by)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration, flat."""
        found: Mapping[str, Any] = self.about["configuration"]
        return found

    @property
    def headline(self) -> str:
        """The predictor that the method reports."""
        return str(self.about["headline"])

    @property
    def predictor(self) -> str:
        """The predictor whose accuracies are shown: the requested one, or the headline."""
        return self.by or self.headline

    @property
    def moment(self) -> str:
        """When clients were scored, "before" or "after" their training."""
        return str(self.about["moment"])

    @cached_property
    def data(self) -> str | None:
        """Hash of the partitioned samples; None in runs of older versions."""
        return self.directory.data()

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The K class names; class numbers if clients gave no names."""
        return label_names(self.about)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {member["client"]: member["name"] for member in self.about["clients"] if member.get("name")}

    def client_name(self, client: int) -> str:
        """Return a client's name, or its id if it has none, which identifies it across runs.

        A device with a name may have a different id in another run.
        """
        return self._names.get(client, str(client))

    def accuracies(self, predictor: str | None = None) -> dict[int, float]:
        """Return client -> accuracy (0 to 1) on its test samples in the last round, for clients that were scored.

        Malicious clients are excluded, as in all accuracies of a run.

        Args:
            predictor: by default :attr:`predictor`.
        """
        if not self.clients:
            return {}
        return self._accuracies(self.clients[-1].get("final", self.clients[-1]), predictor or self.predictor)

    def _accuracies(self, line: Mapping[str, Any], name: str) -> dict[int, float]:
        return {
            client: correct[name] / tests
            for client, correct, tests in zip(line["client"], line["correct"], line["num_test"], strict=True)
            if tests and name in correct and client not in self.about.get("malicious", [])
        }

    def client_curves(self) -> dict[int, list[tuple[int, float]]]:
        """Return client -> [(round, test accuracy from 0 to 1)] for the rounds it was scored in; none for malicious."""
        found: dict[int, list[tuple[int, float]]] = {}
        for at, line in client_series(self.rounds, self.clients):
            for client, share in self._accuracies(line, self.predictor).items():
                found.setdefault(client, []).append((at, share))
        return found

    @property
    def scored(self) -> frozenset[int]:
        """The clients that the last accuracy covers, from the last round in which the predictor was scored."""
        last = [self.clients[-1]["final"]] if self.clients and "final" in self.clients[-1] else []
        found = (self._accuracies(line, self.predictor) for line in (*last, *reversed(self.clients)))
        return frozenset(next((each for each in found if each), {}))

    def newcomer_accuracy(self) -> float | None:
        """Return the new clients' sample-weighted accuracy after all their own rounds; None if there is none."""
        scored = series(self.newcomers)[-1][1] if self.newcomers else {}
        return float(scored[self.predictor]["weighted"]) if self.predictor in scored else None

    @property
    def honest(self) -> frozenset[int]:
        """Ids of the clients that the accuracies can cover: participants that are not malicious."""
        return honest(self.about)

    def curve(self, predictor: str | None = None) -> list[tuple[int, float]]:
        """Return (round, sample-weighted accuracy) for the rounds in which the predictor was scored."""
        name = predictor or self.predictor
        return [(at, found[name]["weighted"]) for at, found in series(self.rounds) if name in found]


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one configuration, one per seed.

    Attributes:
        label: its name in tables and pictures.
        records: at least one.
    """

    label: str
    records: tuple[Record, ...]

    @property
    def by(self) -> str:
        """The requested predictor; empty means each run's headline."""
        return self.first.by

    @property
    def first(self) -> Record:
        """The run shown where only one of the group can be."""
        return self.records[0]

    def by_seed(self) -> dict[int, Record]:
        """Return seed -> run."""
        return {record.seed: record for record in self.records}


def load(paths: Iterable[Path], allowed: Sequence[str] = (), by: str = "") -> list[Group]:
    """Read runs and group those that differ only in the seed.

    Args:
        paths: of run directories.
        allowed: see :class:`Record`.
        by: see :class:`Record`.

    Raises:
        PbflError: if a path holds no run with a finished round, or is given twice.
    """
    places = [expanded(path).absolute() for path in paths]
    if twice := [place for number, place in enumerate(places) if place in places[:number]]:
        raise PbflError(f"'{twice[0]}' is given twice; allowed is once")
    keyed: dict[tuple[object, int], list[Record]] = {}
    for place in places:
        record = Record.load(place, allowed, by)
        key = frozenset(item for item in record.config.items() if item[0] not in NEUTRAL)
        repetition = 0  # a second run with the same seed goes into another group
        while any(record.seed == other.seed for other in keyed.get((key, repetition), [])):
            repetition += 1
        keyed.setdefault((key, repetition), []).append(record)
    found = [tuple(sorted(records, key=lambda record: record.seed)) for records in keyed.values()]
    return [Group(label, records) for label, records in zip(_labels(found), found, strict=True)]


def same_data(one: Record, other: Record) -> bool:
    """Whether two runs have the same samples on the same clients, as far as their files record it."""
    keys = [*DataSettings.key_names(), "num-clients"]
    if any(one.config.get(key) != other.config.get(key) for key in keys):
        return False
    hashes = [one.data, other.data]
    if None not in hashes and hashes[0] != hashes[1]:
        return False
    if one.counts is None or other.counts is None:
        return one.counts is other.counts
    return np.array_equal(one.counts, other.counts)


def changed_weights(records: Iterable[Record]) -> list[str]:
    """Return the models whose pretrained weights differ between the runs that start from them."""
    begun: dict[str, set[frozenset[str]]] = {}
    for record in records:
        known: dict[str, set[str]] = {}
        for member in record.about["clients"]:
            if member.get("weights"):
                known.setdefault(str(member["architecture"]), set()).add(str(member["weights"]))
        for name, hashes in known.items():
            begun.setdefault(name, set()).add(frozenset(hashes))
    return [name for name, found in begun.items() if len(found) > 1]


def changed_files(records: Sequence[Record]) -> str:
    """Return a text on how runs that differ only in the seed differ in data or pretrained weights; empty if not."""
    data = [] if all(same_data(records[0], record) for record in records) else ["data"]
    return ", ".join([*data, *(f"weights of {name}" for name in changed_weights(records))])


def changed_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return a sentence on the rows whose runs differ in data or pretrained weights; empty if there are none.

    Args:
        rows: (label, result of :func:`changed_files`).
    """
    told = [f"{label} ({what})" for label, what in rows if what]
    return [f"Runs of one row that differ in more than the seed: {'; '.join(told)}."] if told else []


def mean_over_seeds(group: Group, seeds: Iterable[int]) -> dict[str, float]:
    """Return client name -> mean last accuracy over these runs, for the clients that all of them scored."""
    each = [
        {run.client_name(client): share for client, share in sorted(run.accuracies().items())}
        for run in map(group.by_seed().__getitem__, seeds)
    ]
    first = each[0] if each else {}
    return {who: fmean(found[who] for found in each) for who in first if all(who in found for found in each)}


def _labels(groups: Sequence[tuple[Record, ...]]) -> list[str]:
    """Return a unique label for each group.

    Tried in this order: the labels of a comparison if all runs have one; the method's name with the keys that differ
    among groups of this method; directory names, without the seed if a comparison named them and they stay unique.
    """
    given = [_comparison_label(records) for records in groups]
    if _usable(given):
        return given
    labels = []
    for records in groups:
        config = records[0].config
        alike = [other[0].config for other in groups if other[0].config["method"] == config["method"]]
        keys = sorted(
            key
            for key in config
            if key not in NEUTRAL and any(other.get(key) != config[key] for other in alike)
        )
        told = ", ".join(f"{key}={config[key]}" for key in keys)
        labels.append(f"{config['method']} ({told})" if told else str(config["method"]))
    if _usable(labels):
        return labels
    places = [records[0].path for records in groups]
    short = [label or place.name for label, place in zip(given, places, strict=True)]
    names = [f"{place.parent.name}/{name}" for place, name in zip(places, short, strict=True)]
    for tried in (short, names):
        if len(set(tried)) == len(tried):
            return tried
    return [f"{place.parent.name}/{place.name}" for place in places]  # seeds of one label with other keys


def _usable(labels: Sequence[str]) -> bool:
    return len(set(labels)) == len(labels) and all(0 < len(label) <= LONGEST_LABEL for label in labels)


def _comparison_label(records: Sequence[Record]) -> str:
    """Return the label of a comparison's runs, whose directories are <label>-seed<seed>; empty for other runs."""
    ends = [(record.path.name, f"-seed{record.seed}") for record in records]
    names = {name.removesuffix(end) if name.endswith(end) else "" for name, end in ends}
    return names.pop() if len(names) == 1 else ""
