"""Run directories, read for statistics and pictures; runs that differ in their seed alone are one group."""

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
from pbfl_flwr.flower.storage.history import RunDirectory

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
    """One run with at least one finished round.

    Attributes:
        directory: its files.
        about: run.json.
        rounds: rounds.jsonl.
        clients: clients.jsonl, as far as rounds.jsonl goes.
        newcomers: newcomers.jsonl, of the clients that came after the last of these rounds.
        counts: samples of each class on each client (M, K), None where they are the devices' own.
        allowed: code that may be imported because the run names it, as my_package.module:function.
        by: the predictor that its accuracies are asked for by; nothing is the headline.
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
        # A round's clients are written down before the round itself, so there may be more of them.
        clients = [line for line in directory.client_rounds() if line["round"] <= rounds[-1]["round"]]
        return cls(directory, about, rounds, clients, table, newcomers, frozenset(allowed), by)

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.directory.path

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration, flat."""
        found: Mapping[str, Any] = self.about["configuration"]
        return found

    @property
    def headline(self) -> str:
        """The predictor that the run reports."""
        return str(self.about["headline"])

    @property
    def predictor(self) -> str:
        """The predictor whose accuracies are shown: the one that was asked for, or the headline."""
        return self.by or self.headline

    @property
    def moment(self) -> str:
        """When clients were scored, before or after their training."""
        return str(self.about["moment"])

    @cached_property
    def data(self) -> str | None:
        """The hash of the samples that were dealt, None in runs of a time without hashes."""
        return self.directory.data()

    @property
    def seed(self) -> int:
        """The run's."""
        return int(self.config["seed"])

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The K names; numbers where clients gave none."""
        return label_names(self.about)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {member["client"]: member["name"] for member in self.about["clients"] if member.get("name")}

    def called(self, client: int) -> str:
        """Return what a client is called in every run: its name, or its number if it has none.

        A device with a name may have another number in another run.
        """
        return self._names.get(client, str(client))

    def accuracies(self, predictor: str | None = None) -> dict[int, float]:
        """Return client -> share of correct test samples in the last round, of the clients that were scored.

        Malicious ones are left out, as in all accuracies of a run.

        Args:
            predictor: by default the one that is shown.
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
        """Return client -> (round, share of correct test samples) as far as it was scored, without malicious ones."""
        found: dict[int, list[tuple[int, float]]] = {}
        for at, line in client_series(self.rounds, self.clients):
            for client, share in self._accuracies(line, self.predictor).items():
                found.setdefault(client, []).append((at, share))
        return found

    @property
    def scored(self) -> frozenset[int]:
        """The clients over which the last accuracy is, of the last round in which it was scored."""
        last = [self.clients[-1]["final"]] if self.clients and "final" in self.clients[-1] else []
        found = (self._accuracies(line, self.predictor) for line in (*last, *reversed(self.clients)))
        return frozenset(next((each for each in found if each), {}))

    def newcomer_accuracy(self) -> float | None:
        """Return the new clients' sample-weighted accuracy after all of their own rounds, None without any."""
        scored = series(self.newcomers)[-1][1] if self.newcomers else {}
        return float(scored[self.predictor]["weighted"]) if self.predictor in scored else None

    @property
    def honest(self) -> frozenset[int]:
        """The clients over which the run's accuracies may be: those that take part in the rounds and do not lie."""
        return honest(self.about)

    def curve(self, predictor: str | None = None) -> list[tuple[int, float]]:
        """Return (round, sample-weighted accuracy) as far as the predictor was scored."""
        name = predictor or self.predictor
        return [(at, found[name]["weighted"]) for at, found in series(self.rounds) if name in found]


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one configuration, a seed each.

    Attributes:
        label: its name in tables and pictures.
        records: at least one.
    """

    label: str
    records: tuple[Record, ...]

    @property
    def by(self) -> str:
        """The predictor that its accuracies are asked for by; nothing is the headline of each run."""
        return self.first.by

    @property
    def first(self) -> Record:
        """The run that stands for the group where only one can be shown."""
        return self.records[0]

    def by_seed(self) -> dict[int, Record]:
        """Return seed -> run."""
        return {record.seed: record for record in self.records}


def load(paths: Iterable[Path], allowed: Sequence[str] = (), by: str = "") -> list[Group]:
    """Read runs and group those that differ in the seed alone.

    Args:
        paths: of run directories.
        allowed: see :class:`Record`.
        by: see there.

    Raises:
        PbflError: for a path that holds no run with a finished round, or stands there twice.
    """
    places = [expanded(path).absolute() for path in paths]
    if twice := [place for number, place in enumerate(places) if place in places[:number]]:
        raise PbflError(f"'{twice[0]}' is given twice; once is enough")
    keyed: dict[tuple[object, int], list[Record]] = {}
    for place in places:
        record = Record.load(place, allowed, by)
        key = frozenset(item for item in record.config.items() if item[0] not in NEUTRAL)
        repetition = 0  # the same seed again is no further seed, but a group of its own
        while any(record.seed == other.seed for other in keyed.get((key, repetition), [])):
            repetition += 1
        keyed.setdefault((key, repetition), []).append(record)
    found = [tuple(sorted(records, key=lambda record: record.seed)) for records in keyed.values()]
    return [Group(label, records) for label, records in zip(_labels(found), found, strict=True)]


def same_data(one: Record, other: Record) -> bool:
    """Whether two runs hold the same samples on the same clients, as far as their files say."""
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
    """Return the models whose pretrained weights are not the same in all runs that begin with them."""
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
    """Return in what runs of the same keys, a seed each, differ all the same: files that have changed between them."""
    data = [] if all(same_data(records[0], record) for record in records) else ["data"]
    return ", ".join([*data, *(f"weights of {name}" for name in changed_weights(records))])


def changed_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return which rows are over runs whose files had changed, in a sentence; none where none are.

    Args:
        rows: label and what :func:`changed_files` says of its runs.
    """
    told = [f"{label} ({what})" for label, what in rows if what]
    return [f"Runs of one row that differ in more than the seed: {'; '.join(told)}."] if told else []


def mean_over_seeds(group: Group, seeds: Iterable[int]) -> dict[str, float]:
    """Return what a client is called -> last accuracy, mean over those runs, of the clients that all of them scored."""
    each = [
        {run.called(client): share for client, share in sorted(run.accuracies().items())}
        for run in map(group.by_seed().__getitem__, seeds)
    ]
    first = each[0] if each else {}
    return {who: fmean(found[who] for found in each) for who in first if all(who in found for found in each)}


def _labels(groups: Sequence[tuple[Record, ...]]) -> list[str]:
    """Return labels that tell groups apart.

    They are those of a comparison where all runs have one; else the method's name, else with the keys that differ,
    else names of directories, without the seed where a comparison made them and they stay different.
    """
    given = [_given(records) for records in groups]
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


def _given(records: Sequence[Record]) -> str:
    """Return the label that a comparison gave to runs, whose directories are <label>-seed<seed>; or nothing."""
    ends = [(record.path.name, f"-seed{record.seed}") for record in records]
    names = {name.removesuffix(end) if name.endswith(end) else "" for name, end in ends}
    return names.pop() if len(names) == 1 else ""
