"""Results of runs: accuracies over rounds and clients; runs that differ only in the seed form a group."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import CHANGEABLE, NEUTRAL, PREDICTORS, DataSettings, Scalar, completed, in_order
from pbfl_flwr.config.toml import written
from pbfl_flwr.data import same_deal
from pbfl_flwr.data.contract import same_samples
from pbfl_flwr.errors import PbflError, expanded
from pbfl_flwr.experiments.statistics import best_decile
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.early_stopping import Score, answered, best
from pbfl_flwr.runs.records import (
    Accuracy,
    Bytes,
    Change,
    ClientRecord,
    ClientsRecord,
    PartitionRecord,
    RoundRecord,
    RunRecord,
    Scalars,
)
from pbfl_flwr.util.atomic_files import DamagedState
from pbfl_flwr.util.user_code import code_in, is_external

Statistic = Literal["weighted", "mean"]
Round = Literal["last", "best", "window"]
"""Which accuracy of a run is compared: of the last round, of the best one, or the mean of the last WINDOW scored,
without the initial networks."""
WINDOW = 10
STATISTICS = ("mean", "std", "worst", "balanced", "macro_f1", "auc_macro", "auc_micro")
LONGEST_LABEL = 40
DATA_KEYS = tuple(key for key in (*DataSettings.key_names(), "num-clients") if key not in NEUTRAL)
SEEDED = {*NEUTRAL, "partition-seed"}  # runs that differ in these keys alone are repetitions
NODES = "nodes.json"  # the SuperNodes' configuration in the run directory, from pbfl deploy local


@dataclass(frozen=True)
class RunScores:
    """A predictor's accuracies over a run.

    Attributes:
        last: (round, accuracy) of the last round.
        best: (round, accuracy) of the round with the highest test accuracy, sample-weighted by default; see
            :func:`~pbfl_flwr.runs.early_stopping.best`.
        chosen: (round, accuracy) on the test data in the round with the highest sample-weighted accuracy on the
            clients' validation samples; None without validation samples.
        validation, validation_last: (round, accuracy) on those samples in that round and in the last one.
    """

    last: tuple[int, Accuracy]
    best: tuple[int, Accuracy]
    chosen: tuple[int, Accuracy] | None = None
    validation: tuple[int, Accuracy] | None = None
    validation_last: tuple[int, Accuracy] | None = None


@dataclass(frozen=True)
class Costs:
    """What a round costs all clients together, as means over the rounds of a run.

    Attributes:
        up, down: field of :class:`~pbfl_flwr.runs.records.Bytes` -> bytes.
        scalars: numbers that carry information, in the last round.
        seconds: wall-clock time.
        steps: step of a client's work -> seconds, summed over clients.
        peak_mb, gpu_mb: largest resident and GPU memory of a client process in any round; None if unknown.
    """

    up: Mapping[str, float]
    down: Mapping[str, float]
    scalars: Scalars
    seconds: float
    steps: Mapping[str, float]
    peak_mb: float | None
    gpu_mb: float | None


def series(
    rounds: Sequence[RoundRecord], on: Literal["accuracy", "validation"] = "accuracy"
) -> list[tuple[int, Mapping[str, Accuracy]]]:
    """Return (round, predictor -> accuracy) in round order.

    Args:
        rounds: of a run. If clients are scored before their training, a record has the accuracy of the previous round
            (round 0: the initial models), and the last record has that of the last round as ``final``.
        on: test data or validation data.
    """
    points: list[tuple[int, Mapping[str, Accuracy]]]
    points = [(record.accuracy_of_round, getattr(record, on)) for record in rounds]
    if rounds and (final := rounds[-1].final):
        points.append((rounds[-1].round, getattr(final, on)))
    return points


def client_series(
    rounds: Sequence[RoundRecord], clients: Sequence[ClientsRecord]
) -> list[tuple[int, ClientsRecord]]:
    """Return (round of the accuracies, every client's counters) in round order.

    Args:
        rounds: of a run; the clients' records of other rounds are ignored.
        clients: of the run. As in :func:`series`, ``final`` is used only in the last record: an extended run may have
            an earlier one, and the record after it has the same round's accuracies.
    """
    numbers = {record.round: record.accuracy_of_round for record in rounds}
    records = [record for record in clients if record.round in numbers]
    points = [(numbers[record.round], record) for record in records]
    if records and (final := records[-1].final):
        points.append((records[-1].round, final))
    return points


def histories(run: RunDirectory) -> tuple[list[RoundRecord], list[ClientsRecord]]:
    """Return the finished rounds of a run with the clients' counters, scored as if it had been made at once.

    Raises:
        PbflError: if there is no run, or it is damaged.
    """
    about, rounds = run.record(), run.round_records()
    last = len(rounds)
    clients = run.client_records()[:last]  # written before rounds.jsonl, so it may have one round more
    if clients and len(clients) < last:
        raise DamagedState(
            f"{run.path / 'clients.jsonl'} ends with round {len(clients)}, rounds.jsonl with {last}; copy a run after "
            "its end"
        )
    return (
        [record.unscored() if about.is_extra(record.round, last) else record for record in rounds],
        [record.unscored() if about.is_extra(record.round, last) else record for record in clients],
    )


def scores(rounds: Sequence[RoundRecord], by: Statistic = "weighted") -> dict[str, RunScores]:
    """Return predictor -> scores; a statistic selects the best round."""
    by_predictor = {}
    on_test, on_validation = series(rounds), dict(series(rounds, "validation"))
    final = rounds[-1].round if rounds and rounds[-1].final else None
    for name in in_order(name for _, accuracies in on_test for name in accuracies):
        tested = {number: accuracies for number, accuracies in on_test if name in accuracies}
        validated = {
            number: on_validation[number] for number in tested if name in on_validation.get(number, {})
        }
        highest, chosen = best(_ranks(tested, name, final, by)), best(_ranks(validated, name, final))
        if highest is not None:
            last, last_validated = max(tested), max(validated, default=None)
            by_predictor[name] = RunScores(
                (last, tested[last][name]),
                (highest, tested[highest][name]),
                None if chosen is None else (chosen, tested[chosen][name]),
                None if chosen is None else (chosen, validated[chosen][name]),
                None if last_validated is None else (last_validated, validated[last_validated][name]),
            )
    return by_predictor


def _ranks(
    scored: Mapping[int, Mapping[str, Accuracy]],
    predictor: str,
    final: int | None,
    by: Statistic = "weighted",
) -> dict[int, Score]:
    """Return round -> what it is compared by with the others, in round order.

    ``final`` is the round of the final scoring, None if there was none.
    """
    ranks = {}
    for number, accuracies in scored.items():
        found = accuracies[predictor]
        ranks[number] = Score(False, found.clients, getattr(found, by), answered(accuracies), number == final)
    return ranks


def costs(rounds: Sequence[RoundRecord]) -> Costs:
    """Return what a round costs; there must be at least one."""

    def mean(sizes: Sequence[Bytes]) -> dict[str, float]:
        return {kind: fmean(getattr(size, kind) for size in sizes) for kind in Bytes.model_fields}

    steps = rounds[0].seconds.clients
    return Costs(
        up=mean([record.bytes_up for record in rounds]),
        down=mean([record.bytes_down for record in rounds]),
        scalars=rounds[-1].scalars,
        seconds=fmean(record.seconds.total for record in rounds),
        steps={step: fmean(record.seconds.clients[step] for record in rounds) for step in steps},
        peak_mb=max(record.peak_mb for record in rounds) or None,  # 0: unknown
        gpu_mb=max(record.gpu_mb for record in rounds) or None,
    )


def column_of(predictor: str) -> str:
    """Return the key of a predictor's last accuracy in :attr:`FinishedRun.figures`.

    One that a user's method names has a prefix, since its name may be another figure's.
    """
    return predictor if predictor in PREDICTORS else f"predictor.{predictor}"


def resume_command(run_dir: Path, about: RunRecord) -> str:
    """Return the command that resumes a run."""
    if about.simulated:
        return f"pbfl run {resume_words(run_dir, about.configuration)}"
    if (run_dir / NODES).exists():
        return f"pbfl deploy local {resume_words(run_dir, about.configuration, _nodes(run_dir))}"
    return f"flwr run, with the same configuration, run-dir='{run_dir.absolute()}' and resume=true"


def named_code(keys: Mapping[str, Scalar]) -> frozenset[str]:
    """Return the functions that a run's or a SuperNode's keys may name; what belongs to the data names none."""
    return code_in(value for key, value in keys.items() if key not in ("labels", "label-column"))


def resume_words(
    run_dir: Path, configuration: Mapping[str, Scalar], nodes: Iterable[Mapping[str, Scalar]] = ()
) -> str:
    """Return the options that resume a run and repeat what is not taken from its files.

    That is code, paths elsewhere, and values of CHANGEABLE keys that a resumed run has not recorded yet.

    Args:
        run_dir: the run directory.
        configuration: the run's keys.
        nodes: the keys of its SuperNodes, from ``pbfl deploy local``.

    Raises:
        PbflError: if it is to be resumed and has no record.
    """
    words = ["--resume", str(run_dir)]
    for name in sorted(named_code(configuration).union(*map(named_code, nodes))):
        words += ["--import", name]
    if state_dir := configuration.get("state-dir"):
        words += ["--set", f"state-dir={state_dir}"]
    recorded = RunDirectory(run_dir).record().configuration if configuration.get("resume") else configuration
    for key in CHANGEABLE:
        if key in configuration and (value := configuration[key]) != recorded.get(key):
            words += ["--set", f"{key}={value if isinstance(value, str) else written(value)}"]
    return shlex.join(words)


def _nodes(run_dir: Path) -> list[dict[str, Scalar]]:
    """Return the keys of the SuperNodes of :data:`NODES`, none if there is no such file or it is damaged."""
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError, PbflError):
        return [dict(node) for node in json.loads(RunDirectory(run_dir).read(NODES))["nodes"]]
    return []


def span(numbers: Iterable[int]) -> str:
    """Return "n", or "lowest–highest" of several different numbers."""
    different = sorted(set(numbers))
    return str(different[0]) if len(different) == 1 else f"{different[0]}–{different[-1]}"


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run with at least one finished round.

    Attributes:
        path: the run directory.
        about: content of run.json.
        rounds: finished rounds.
        clients: the clients' counters up to the last of these rounds.
        partition: content of partition.json.
        allowed: code named by the run that may be imported, as my_package.module:function.
        by: the requested predictor; empty means the primary predictor.
        statistic: the accuracy that is tabulated: sample-weighted, or the unweighted mean over clients.
        at: the round whose accuracy is compared.
    """

    path: Path
    about: RunRecord
    rounds: Sequence[RoundRecord]
    clients: Sequence[ClientsRecord]
    partition: PartitionRecord
    allowed: frozenset[str] = frozenset()
    by: str = ""
    statistic: Statistic = "weighted"
    at: Round = "last"

    @classmethod
    def load(
        cls,
        path: Path,
        allowed: Iterable[str] = (),
        by: str = "",
        statistic: Statistic = "weighted",
        at: Round = "last",
    ) -> FinishedRun:
        """Read a run directory; the arguments are those of the class.

        Raises:
            PbflError: if there is no run, it is damaged, or no round is finished.
        """
        directory = RunDirectory(path)
        about, (rounds, clients) = directory.record(), histories(directory)
        if not rounds:
            why = (
                f", it failed: {reason}"
                if (reason := directory.error())
                else " yet; there is nothing to report"
            )
            raise PbflError(f"'{path}' has no finished round{why}")
        partition = directory.partition()
        return cls(path, about, rounds, clients, partition, frozenset(allowed), by, statistic, at)

    @property
    def config(self) -> Mapping[str, Scalar]:
        """The configuration, flat; see :class:`~pbfl_flwr.runs.records.RunRecord`."""
        return self.about.configuration

    @cached_property
    def counts(self) -> NDArray[np.int64] | None:
        """Samples of each class on each client (M, K); None if clients bring their own data."""
        counts = self.partition.counts
        return None if counts is None else np.array(counts, dtype=np.int64)

    @property
    def predictor(self) -> str:
        """The predictor whose accuracies are shown: the requested one, or the primary predictor."""
        return self.by or self.about.primary_predictor

    @property
    def edits(self) -> list[int]:
        """The rounds from which on it was made with other code of the user's than before."""
        before, rounds = self.about.code, []
        for change in self.about.changes:
            if change.code != before and change.from_round <= self.rounds[-1].round:
                rounds.append(change.from_round)
            before = change.code
        return rounds

    @property
    def rebuilt(self) -> bool:
        """Whether the method, as it was built, depends on the number of rounds, and the run began with another."""
        stages: list[RunRecord | Change] = [self.about, *self.about.changes]
        return any(one.method != two.method and one.code == two.code for one, two in pairwise(stages))

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def seeds(self) -> tuple[int, int]:
        """The seed of the partition, and the run's own."""
        return int(self.config["partition-seed"]), self.seed

    @cached_property
    def scores(self) -> dict[str, RunScores]:
        """Predictor -> scores."""
        return scores(self.rounds, self.statistic)

    @property
    def score(self) -> RunScores | None:
        """Scores by the shown predictor.

        It is missing if clients report nothing, have no test samples, or there were no prototypes at the last scoring.
        """
        return self.scores.get(self.predictor)

    @property
    def coverage(self) -> dict[str, str]:
        """Predictor -> "n of M clients", with the rounds if these differ, where accuracies do not cover all clients."""
        total, covered = len(self.about.clients), {}
        for name, score in self.scores.items():
            points = {"last": score.last, "best": score.best, "validation-chosen": score.chosen}
            numbers = {kind: point[1].clients for kind, point in points.items() if point is not None}
            if min(numbers.values()) < total:
                covered[name] = ", ".join(
                    f"{number} of {total} in the {kind} round"
                    for kind, number in numbers.items()
                    if number < total
                )
                if len(set(numbers.values())) == 1:
                    covered[name] = f"{numbers['last']} of {total}"
        return covered

    @cached_property
    def points(self) -> list[tuple[int, Accuracy]]:
        """(round, accuracy) by the shown predictor, of the round that is compared or of all in the window."""
        if self.score is None:
            return []
        if self.at == "window":
            return self._window
        return [self.score.best if self.at == "best" else self.score.last]

    @property
    def _window(self) -> list[tuple[int, Accuracy]]:
        name = self.predictor
        scored = [(number, accuracy[name]) for number, accuracy in series(self.rounds) if name in accuracy]
        trained = [point for point in scored if point[0]]  # not the initial networks, which few methods score
        return (trained or scored)[-WINDOW:]

    def compared(self, statistic: Statistic = "weighted") -> float:
        """Return the accuracy (0 to 1) of :attr:`points`, of which there must be some."""
        return fmean(getattr(accuracy, statistic) for _, accuracy in self.points)

    @cached_property
    def costs(self) -> Costs:
        """What a round costs."""
        return costs(self.rounds)

    def travelled(self) -> dict[int, int]:
        """Return round -> payload of all clients in both directions until its end, in bytes."""
        sizes = (record.bytes_up.payload + record.bytes_down.payload for record in self.rounds)
        return dict(zip((record.round for record in self.rounds), accumulate(sizes), strict=True))

    @cached_property
    def by_class(self) -> dict[str, tuple[int, Accuracy]]:
        """Predictor -> (round, accuracy) when it was last scored, of the predictors counted by class."""
        points = {name: score.last for name, score in self.scores.items()}
        return {name: point for name, point in points.items() if point[1].by_class is not None}

    @property
    def predictor_by_class(self) -> str:
        """The shown predictor, or the first one counted by class if that one is not; some must be."""
        return self.predictor if self.predictor in self.by_class else next(iter(self.by_class))

    @cached_property
    def figures(self) -> dict[str, float]:
        """The run as a row of table.csv: key -> figure, without those that are unknown.

        Accuracies are in %, by the shown predictor on test data, ``validation`` (in the validation-chosen round) and
        ``validation_last`` on validation data; bytes (``up`` and ``down``: the payload of a client), scalars,
        ``seconds`` and ``peak_mb`` are per round. Besides, the rounds of ``last``, ``best``, ``validation_chosen`` and
        those two, with ``_round`` in their names.
        """
        costs, clients = self.costs, len(self.about.clients)
        shares: dict[str, float | None] = {
            "majority": self.partition.majority,
            **{
                column_of(name): getattr(score.last[1], self.statistic) for name, score in self.scores.items()
            },
        }
        row: dict[str, float | None] = {
            "up": costs.up["payload"] / clients,
            "down": costs.down["payload"] / clients,
            "total": costs.up["total"] + costs.down["total"],
            "paper": self.partition.paper_scalars,
            "seconds": costs.seconds,
            "peak_mb": costs.peak_mb,
        }
        if accuracies := list(self.accuracies().values()):
            shares |= {"best_decile": best_decile(accuracies), "lowest": min(accuracies)}
        if score := self.score:
            points: dict[str, tuple[int, Accuracy] | None] = {
                "last": score.last,
                "best": score.best,
                "validation_chosen": score.chosen,
                "validation": score.validation,
                "validation_last": score.validation_last,
            }
            for name, point in points.items():
                if point is not None:
                    row[f"{name}_round"], shares[name] = point[0], getattr(point[1], self.statistic)
            shares |= {name: getattr(score.last[1], name) for name in STATISTICS}
            shares["window"] = fmean(getattr(accuracy, self.statistic) for _, accuracy in self._window)
            shares["best_std"] = score.best[1].std
        row |= {name: None if share is None else 100 * share for name, share in shares.items()}
        return {name: figure for name, figure in row.items() if figure is not None}

    @cached_property
    def _clients(self) -> dict[int, ClientRecord]:
        return {client.client: client for client in self.about.clients}

    def client_name(self, client: int) -> str:
        """Return a client's name, or its id if it has none, which identifies it across runs.

        A device with a name may have a different id in another run.
        """
        return self._clients[client].title if client in self._clients else str(client)

    def architecture(self, client: int) -> str:
        """Return a client's architecture."""
        return self._clients[client].architecture

    def accuracies(self, predictor: str | None = None) -> dict[int, float]:
        """Return client -> accuracy (0 to 1) on its test samples in the last round with scores, for those scored."""
        scored = (columns for columns in self.latest_clients() if any(columns.correct) or not columns.client)
        latest = next(scored, None)
        return {} if latest is None else self._accuracies(latest, predictor or self.predictor)

    def _accuracies(self, columns: ClientsRecord, name: str) -> dict[int, float]:
        counters = zip(columns.client, columns.correct, columns.num_test, strict=True)
        return {
            client: correct[name] / tests for client, correct, tests in counters if tests and name in correct
        }

    def client_curves(self) -> dict[int, list[tuple[int, float]]]:
        """Return client -> [(round, test accuracy from 0 to 1)] for the rounds it was scored in."""
        curves: dict[int, list[tuple[int, float]]] = {}
        for number, columns in client_series(self.rounds, self.clients):
            for client, share in self._accuracies(columns, self.predictor).items():
                curves.setdefault(client, []).append((number, share))
        return curves

    def compared_accuracies(self) -> dict[int, float]:
        """Return client -> its accuracy (0 to 1) in the round that is compared, or its mean over the window."""
        if self.at == "last":
            return self.accuracies()
        numbers = {number for number, _ in self.points}
        curves = {
            client: [share for number, share in curve if number in numbers]
            for client, curve in self.client_curves().items()
        }
        return {client: fmean(shares) for client, shares in curves.items() if shares}

    @property
    def scored(self) -> frozenset[int]:
        """The clients that the compared accuracy covers: of the last, from where the predictor was last scored."""
        if self.at != "last":
            return frozenset(self.compared_accuracies())
        accuracies = (self._accuracies(columns, self.predictor) for columns in self.latest_clients())
        return frozenset(next((each for each in accuracies if each), {}))

    def latest_clients(self) -> list[ClientsRecord]:
        """Return the clients' counters, the latest first: the final scoring if there was one, then every round."""
        final = self.clients[-1].final if self.clients else None
        return [*([final] if final else []), *reversed(self.clients)]

    def curve(self, predictor: str | None = None) -> list[tuple[int, float]]:
        """Return (round, sample-weighted accuracy) for the rounds in which the predictor was scored."""
        name = predictor or self.predictor
        return [
            (number, accuracy[name].weighted) for number, accuracy in series(self.rounds) if name in accuracy
        ]


@dataclass(frozen=True, eq=False)
class RunGroup:
    """The runs of one configuration, one per seed and at least one, with its name in tables and pictures."""

    label: str
    runs: tuple[FinishedRun, ...]

    @property
    def by(self) -> str:
        """The requested predictor; empty means each run's primary predictor."""
        return self.first.by

    @property
    def first(self) -> FinishedRun:
        """The run shown where only one of the group can be."""
        return self.runs[0]

    @property
    def scores(self) -> list[RunScores]:
        """Scores by the shown predictor, of the runs in which it was scored."""
        return [run.score for run in self.runs if run.score is not None]

    @property
    def coverage(self) -> dict[str, str]:
        """Predictor -> "n of M clients" for predictors whose accuracies do not cover all clients."""
        covered: dict[str, set[int]] = {}
        for run in self.runs:
            for name, score in run.scores.items():
                points = [point[1] for point in (score.last, score.best, score.chosen) if point is not None]
                covered.setdefault(name, set()).update(accuracy.clients for accuracy in points)
        total = max(len(run.about.clients) for run in self.runs)
        return {
            name: f"{span(numbers)} of {total}" for name, numbers in covered.items() if min(numbers) < total
        }

    def by_seed(self) -> dict[tuple[int, int], FinishedRun]:
        """Return (partition seed, seed) -> run."""
        return {run.seeds: run for run in self.runs}


def load(
    paths: Iterable[Path], allowed: Sequence[str] = (), by: str = "", at: Round = "last"
) -> list[RunGroup]:
    """Read runs and group those of one task that differ only in their seeds.

    The other arguments are those of :class:`FinishedRun`.

    Raises:
        PbflError: if a path holds no run with a finished round, or is given twice.
    """
    places = [expanded(path).absolute() for path in paths]
    if twice := [place for number, place in enumerate(places) if place in places[:number]]:
        raise PbflError(f"'{twice[0]}' is given twice; name it once")
    keyed: dict[object, list[FinishedRun]] = {}
    order: dict[Path, int] = {place: number for number, place in enumerate(places)}
    for record in with_the_same_keys([FinishedRun.load(place, allowed, by, at=at) for place in places]):
        keys = frozenset(item for item in record.config.items() if item[0] not in SEEDED)
        first = record.about.clients[0]  # clients may bring their own data, which no key names
        keyed.setdefault((keys, first.task, first.labels), []).append(record)
    groups = [group for records in keyed.values() for group in _repetitions(records)]
    groups.sort(key=lambda records: order[records[0].path])
    ordered = [tuple(sorted(records, key=lambda record: record.seeds)) for records in groups]
    return [RunGroup(label, records) for label, records in zip(_labels(ordered), ordered, strict=True)]


def _repetitions(records: Sequence[FinishedRun]) -> list[list[FinishedRun]]:
    """Return groups of runs of one configuration, no two of a group with the same seeds.

    If any two have, several that one directory holds under one label of a comparison stay together: of two comparisons
    with fewer and more seeds, each keeps its own.
    """
    if len({record.seeds for record in records}) == len(records):
        return [[*records]]

    def place_of(record: FinishedRun) -> tuple[Path, str]:
        return record.path.parent, _comparison_label([record])

    together = {place for place, number in Counter(map(place_of, records)).items() if number > 1}
    groups: dict[tuple[object, int], list[FinishedRun]] = {}
    for record in records:
        place, repetition = place_of(record), 0
        key = place if place in together else None
        while any(record.seeds == other.seeds for other in groups.get((key, repetition), [])):
            repetition += 1
        groups.setdefault((key, repetition), []).append(record)
    return [*groups.values()]


def with_the_same_keys(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs with every key in their configurations, if some records are older than a key of others."""
    keys = {(str(run.config["method"]), frozenset(run.config)) for run in runs}
    common = {frozenset(key for key in names if not key.startswith(f"{method}.")) for method, names in keys}
    if len(common) == 1 and len(keys) == len({method for method, _ in keys}):
        return [*runs]
    from pbfl_flwr.methods import SECTIONS  # the sections' modules take seconds to import

    every = [completed(run.config, SECTIONS) for run in runs]
    return [
        replace(run, about=run.about.model_copy(update={"configuration": configuration}))
        for run, configuration in zip(runs, every, strict=True)
    ]


def data_keys(run: FinishedRun, *, place: bool = True) -> tuple[Scalar | None, ...]:
    """Return the values of the keys that say which samples are on which client, and in which place they lie."""
    return tuple(run.config.get(key) for key in DATA_KEYS if place or key != "data-dir")


def same_data(one: FinishedRun, other: FinishedRun) -> bool:
    """Whether two runs have the same samples on the same clients, as far as their files record it."""
    # What a user's function gives may differ in rounding.
    exact = not is_external(str(one.config["dataset"]))
    fingerprints = [run.partition.data for run in (one, other)]
    place = not (exact and all(fingerprints))
    if data_keys(one, place=place) != data_keys(other, place=place):
        return False
    deals = [run.about.clients[0].deal for run in (one, other)]
    if all(deals) and not same_deal(*deals):
        return False
    if exact and not same_samples(*fingerprints):
        return False
    if one.counts is None or other.counts is None:
        return one.counts is other.counts and _declared_alike(
            one, other, lambda c: (c.task, c.labels, c.columns, c.num_train, c.num_test, c.num_validation)
        )
    return np.array_equal(one.counts, other.counts)


def same_networks(one: FinishedRun, other: FinishedRun) -> bool:
    """Whether clients had the same networks in both runs; a device may have one that no key of the run names."""
    return _declared_alike(one, other, lambda client: (client.architecture, client.weights))


def _declared_alike(one: FinishedRun, other: FinishedRun, declared: Callable[[ClientRecord], object]) -> bool:
    """Whether clients declared the same in both runs; one that is only in one of them is left out."""
    first, second = ({client.title: declared(client) for client in run.about.clients} for run in (one, other))
    return all(first[title] == second[title] for title in first.keys() & second.keys())


def mean_over_seeds(group: RunGroup, seeds: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Return client name -> mean compared accuracy over these runs, for the clients that all of them scored."""
    each = [
        {run.client_name(client): share for client, share in sorted(run.compared_accuracies().items())}
        for run in map(group.by_seed().__getitem__, seeds)
    ]
    first = each[0] if each else {}
    return {
        who: fmean(shares[who] for shares in each) for who in first if all(who in shares for shares in each)
    }


def _labels(groups: Sequence[tuple[FinishedRun, ...]]) -> list[str]:
    """Return a unique label for each group.

    Tried in this order: the labels of a comparison if all runs have one; the method's name with the keys that differ
    among groups of this method; directory names, without the seed if a comparison named them and they stay unique;
    paths below the directory that all have in common.
    """
    named = [_comparison_label(records) for records in groups]
    if _usable(named):
        return named
    labels = []
    for records in groups:
        config = records[0].config
        alike = [other[0].config for other in groups if other[0].config["method"] == config["method"]]
        keys = sorted(
            key
            for key in config
            if key not in SEEDED and any(other.get(key) != config[key] for other in alike)
        )
        different = ", ".join(f"{key}={config[key]}" for key in keys)
        labels.append(f"{config['method']} ({different})" if different else str(config["method"]))
    if _usable(labels):
        return labels
    places = [records[0].path for records in groups]
    short = [label or place.name for label, place in zip(named, places, strict=True)]
    names = [f"{place.parent.name}/{name}" for place, name in zip(places, short, strict=True)]
    ends = [f"{place.parent.name}/{place.name}" for place in places]  # seeds of one label with other keys
    for tried in (short, names, ends):
        if len(set(tried)) == len(tried):
            return tried
    common = os.path.commonpath([place.parent for place in places])  # copies of one directory
    return [place.relative_to(common).as_posix() for place in places]


def _usable(labels: Sequence[str]) -> bool:
    return len(set(labels)) == len(labels) and all(0 < len(label) <= LONGEST_LABEL for label in labels)


def _comparison_label(records: Sequence[FinishedRun]) -> str:
    """Return the label of a comparison's runs, whose directories are <label>-seed<seed>; empty for other runs."""
    ends = [(record.path.name, f"-seed{record.seed}") for record in records]
    names = {name.removesuffix(end) if name.endswith(end) else "" for name, end in ends}
    return names.pop() if len(names) == 1 else ""
