"""The table with one row per pair of configurations, compared over the runs that they have in common.

Clients of a run share a server and a partition, so they are no independent units: a test over them finds differences
between a method and itself. Runs are the units; how many clients a difference is found on is said beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.notes import accuracy_name, unscored_lines
from pbfl_flwr.experiments.results import (
    WINDOW,
    FinishedRun,
    RunGroup,
    Statistic,
    mean_over_seeds,
    same_data,
    same_networks,
    span,
)
from pbfl_flwr.experiments.statistics import CONFIDENCE, Paired, holm, paired, signs
from pbfl_flwr.experiments.tables import Sheet

COLUMNS = (
    "first − second",
    "runs",
    "difference",
    "unweighted",
    f"{CONFIDENCE:.0%} interval",
    "p",
    "p (Holm)",
    "clients better / equal / worse",
    "remark",
)
OTHER_CLIENTS = (
    "Accuracies cover different clients (fraction-train, fraction-evaluate, failures), so not compared"
)
AT = {
    "last": "the last round",
    "best": "the best round, chosen on test data, which flatters",
    "window": f"the last {WINDOW} scored rounds, their mean",
}


@dataclass(frozen=True)
class Asked:
    """Which pairs a table has.

    Attributes:
        against: label of the row that each other one is compared with; empty: the one of method local, else the first.
        pairs: FIRST/SECOND, two labels each, instead of that.
        planned: label -> method of the rows that are compared, also of those without a finished run; empty: of all
            rows.
    """

    against: str = ""
    pairs: tuple[str, ...] = ()
    planned: Mapping[str, str] = field(default_factory=dict)

    def check(self, labels: Sequence[str]) -> None:
        """Raise PbflError if a label is unknown or both forms are given."""
        if self.against and self.pairs:
            raise PbflError("--against and --pair: each says which pairs are compared; give one of the two")
        if self.against and self.against not in labels:
            raise PbflError(f"--against {self.against}: must be one of {', '.join(labels)}")
        for text in self.pairs:
            if _both(text, labels) is None:
                raise PbflError(
                    f"--pair {text}: must be FIRST/SECOND, two different ones of {', '.join(labels)}"
                )

    def of(self, groups: Sequence[RunGroup]) -> list[tuple[RunGroup, RunGroup]]:
        """Return the pairs of the rows with an accuracy that are asked for, first and second."""
        rows = {
            group.label: group
            for group in groups
            if group.scores and (not self.planned or group.label in self.planned)
        }
        if self.pairs:
            asked = [_both(text, [*rows]) for text in self.pairs]
            return [(rows[one], rows[other]) for one, other in filter(None, asked)]
        reference = self.reference(groups)
        return [
            (group, rows[reference])
            for label, group in rows.items()
            if reference in rows and label != reference
        ]

    def reference(self, groups: Sequence[RunGroup]) -> str:
        """Return the label that the others are compared with, also if it is in no row; empty if there is none."""
        if self.pairs:
            return ""
        methods = self.planned or {group.label: str(group.first.config["method"]) for group in groups}
        unscored = {group.label for group in groups if not group.scores}
        known = [label for label in methods if label not in unscored]
        alone = (label for label in known if methods[label] == "local")
        return self.against or next(alone, next(iter(known), ""))


def _both(text: str, labels: Sequence[str]) -> tuple[str, str] | None:
    """Return the two labels in FIRST/SECOND, either of which may have a slash; None if they are not there."""
    found = [(one, other) for one in labels for other in labels if text == f"{one}/{other}" and one != other]
    return found[0] if found else None


EVERY_AGAINST_ONE = Asked()


def paired_sheet(
    groups: Sequence[RunGroup], title: str = "Paired comparison", asked: Asked = EVERY_AGAINST_ONE
) -> Sheet:
    """Return the table of the pairs asked for, on the same partitions and with the same seeds."""
    alone = [group for group in groups if not group.scores]
    pairs, reference = asked.of(groups), asked.reference(groups)
    rows: list[tuple[str, tuple[str, ...], Paired, tuple[str, ...]]] = []
    skipped: dict[str, list[str]] = {}
    partitions: list[list[int]] = []  # of each row
    single = False  # whether a row has one run a side
    for one, other in pairs:
        label, seeds = f"{one.label} − {other.label}", sorted({*one.by_seed()} & {*other.by_seed()})
        common = [(one.by_seed()[seed], other.by_seed()[seed]) for seed in seeds]
        if reason := _incomparable(one, other, common):
            skipped.setdefault(reason, []).append(label)
            continue
        dealt = sorted({partition for partition, _ in seeds})
        partitions.append(dealt)
        units = (
            [[pair for pair in common if pair[0].seeds[0] == partition] for partition in dealt]
            if len(dealt) > 1
            else [[pair] for pair in common]
        )
        weighted, plain = (paired(*_means(units, statistic)) for statistic in ("weighted", "mean"))
        runs = f"{len(common)} on {len(dealt)} partitions" if len(dealt) > 1 else str(len(common))
        clients = None if len(dealt) > 1 else _signs(one, other, seeds)
        remarks = _differences(one, other, common)
        if weighted.difference * plain.difference < 0:
            unweighted = "" if plain.p is None else f" (unweighted: p {probability(plain.p)})"
            remarks.append(f"weighted and unweighted differ in sign{unweighted}")
        single = single or len(units) == 1
        if len(units) == 1 and clients is not None:
            agreeing = clients[(weighted.difference <= 0) + (weighted.difference < 0)]
            remarks.append(f"consistent over clients of this run: {agreeing} of {sum(clients)}")
        elif len(units) > 1 and weighted.p is None:
            remarks.append("all runs differ by the same")
        cells = (runs, f"{100 * plain.difference:+.2f}", " / ".join(map(str, clients)) if clients else "-")
        rows.append((label, cells, weighted, tuple(remarks)))
    adjusted = holm([row[2].p for row in rows])
    shown = tuple(_row(*row, p) for row, p in zip(rows, adjusted, strict=True))
    notes = unscored_lines(((group.label, group.first.predictor) for group in alone), ", so in no pair")
    notes += [
        f"{reason}: {'every pair' if 1 < len(labels) == len(pairs) else '; '.join(labels)}."
        for reason, labels in skipped.items()
    ]
    tested = [dealt for dealt, p in zip(partitions, adjusted, strict=True) if p is not None]
    unfinished = reference in asked.planned and reference not in {group.label for group in groups}
    why = f": {reference}, the reference, has no finished run" if unfinished else ""
    about = _about(groups, tested, single) if shown else [f"No two rows are compared{why}."]
    return Sheet(title, COLUMNS, shown, (*about, *notes), text_last=True)


def probability(p: float | None) -> str:
    """Format a p-value; a dash for None."""
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _about(groups: Sequence[RunGroup], tested: Sequence[Sequence[int]], untested: bool) -> list[str]:
    """Return what the columns mean, and what the tests hold for.

    Args:
        groups: the rows of the table of runs.
        tested: the partitions of each test.
        untested: whether a pair has one run a side.
    """
    tests, several = len(tested), any(len(dealt) > 1 for dealt in tested)
    single = {dealt[0] for dealt in tested if len(dealt) == 1}
    first = groups[0].first if groups else None
    lines = [
        f"Difference: first minus second, in percentage points of the {accuracy_name(first.by if first else '')} in "
        f"{AT[first.at if first else 'last']}, weighted by samples; unweighted: of the mean over clients."
    ]
    if not tests:
        if untested:
            lines.append("With one run a side there is no interval and no p; --seeds makes several.")
    elif several:
        lines.append(
            f"Interval ({CONFIDENCE:.0%}) and p: paired t-test over the partitions, each the mean of its runs."
        )
        if single:
            lines.append("Of a pair on one partition it is over the runs, and holds for this partition.")
    elif len(single) > 1:
        lines.append(
            f"Interval ({CONFIDENCE:.0%}) and p: paired t-test over the runs, of the weighted difference. The runs "
            "of a pair share one partition, so this holds for the pair's partition."
        )
    else:
        lines.append(
            f"Interval ({CONFIDENCE:.0%}) and p: paired t-test over the runs, of the weighted difference. The runs "
            "share one partition, so this holds for this partition."
        )
    if tests:
        lines.append(f"p (Holm): adjusted for the {tests} test{'' if tests == 1 else 's'} of this table.")
    lines.append(
        "Clients: each one's mean over the common runs. They learn from each other, so their numbers are no test."
    )
    return lines


def _incomparable(
    one: RunGroup, other: RunGroup, common: Sequence[tuple[FinishedRun, FinishedRun]]
) -> str | None:
    """Return why two rows are not compared; None if they can be."""
    if not all(same_data(a, b) for a, b in common or [(one.first, other.first)]):
        return "Different data on the clients, so not compared"
    if not common:
        return "No common seed, so not compared"
    if any(run.score is None for pair in common for run in pair):
        return "Not scored for every seed, so not compared"
    if any(_coverage(a) != _coverage(b) for a, b in common):
        return OTHER_CLIENTS
    return None


def _means(
    units: Sequence[Sequence[tuple[FinishedRun, FinishedRun]]], statistic: Statistic
) -> tuple[list[float], list[float]]:
    """Return each unit's mean accuracy of the first and of the second."""
    first, second = (
        [fmean(pair[side].compared(statistic) for pair in unit) for unit in units] for side in (0, 1)
    )
    return first, second


def _signs(one: RunGroup, other: RunGroup, seeds: Sequence[tuple[int, int]]) -> tuple[int, int, int] | None:
    """Return on how many clients the first is better, equal and worse; None if no client is in all runs."""
    first, second = mean_over_seeds(one, seeds), mean_over_seeds(other, seeds)
    clients = [who for who in first if who in second]
    if not clients:
        return None
    return signs([first[who] for who in clients], [second[who] for who in clients])


def _row(
    label: str, about: tuple[str, ...], found: Paired, remarks: tuple[str, ...], adjusted: float | None
) -> tuple[str, ...]:
    runs, plain, clients = about
    interval = "-"
    if found.low is not None and found.high is not None:
        interval = f"{100 * found.low:+.2f} to {100 * found.high:+.2f}"
    difference = f"{100 * found.difference:+.2f}"
    p = (probability(found.p), probability(adjusted))
    return (label, runs, difference, plain, interval, *p, clients, "; ".join(remarks))


def _coverage(run: FinishedRun) -> list[set[str]]:
    """Return the clients that a run's accuracies can cover, and those that the compared one covers, by name."""
    everyone = {client.client for client in run.about.clients}
    return [{run.client_name(client) for client in clients} for clients in (everyone, run.scored)]


def _differences(
    one: RunGroup, other: RunGroup, common: Sequence[tuple[FinishedRun, FinishedRun]]
) -> list[str]:
    """Return remarks on what else differs in two groups: predictor, moment of scoring, rounds, networks, clients."""
    heads = [group.first.predictor for group in (one, other)]
    moments = [group.first.about.moment for group in (one, other)]
    rounds = [[len(pair[side].rounds) for pair in common] for side in (0, 1)]
    remarks = [" vs. ".join(heads)] if len({*heads}) > 1 else []
    methods = [str(group.first.config["method"]) for group in (one, other)]
    if heads[0] == heads[1] not in PREDICTORS and methods[0] != methods[1]:
        remarks.append(f"{heads[0]} of {methods[0]} vs. {heads[1]} of {methods[1]}, which each define it")
    remarks += [f"scored {moments[0]} vs. {moments[1]} local training"] if len({*moments}) > 1 else []
    if len({number for numbers in rounds for number in numbers}) > 1:
        remarks.append(f"{' vs. '.join(map(span, rounds))} rounds")
    models = [group.first.config["models"] for group in (one, other)]
    if models[0] == models[1] and not all(same_networks(a, b) for a, b in common):
        remarks.append("other networks on the clients")
    if one.first.at == "window" and any(_presence(a) != _presence(b) for a, b in common):
        remarks.append("scored over other clients in some rounds")
    return remarks


def _presence(run: FinishedRun) -> dict[str, float]:
    """Return client name -> share of the compared rounds in which it was scored."""
    numbers = {number for number, _ in run.points}
    return {
        run.client_name(client): sum(number in numbers for number, _ in curve) / len(numbers)
        for client, curve in run.client_curves().items()
    }
