"""The table with one row per pair of configurations, compared on the same clients and over the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.experiments.notes import accuracy_name, unscored_lines
from pbfl_flwr.experiments.results import FinishedRun, RunGroup, mean_over_seeds, same_data, span
from pbfl_flwr.experiments.statistics import CONFIDENCE, Paired, holm, paired
from pbfl_flwr.experiments.tables import Sheet

PAIRED_NOTES = (
    "Difference: first minus second, in percentage points of the last round's {accuracy}; interval: "
    f"{CONFIDENCE:.0%} percentile bootstrap of the mean difference, 10,000 resamples, fixed seed; p: two-sided "
    "Wilcoxon signed-rank test; p (Holm): adjusted for the number of rows with the same unit (clients or seeds).",
    "Over clients: one value per client, its mean accuracy over the common seeds. Clients of a run learn from each "
    "other, so the result holds for this partition and these seeds only. Over seeds: sample-weighted accuracy per run.",
)

OTHER_CLIENTS = (
    "Accuracies cover different clients (fraction-train, fraction-evaluate, failures), so not "
    "compared over seeds"
)
NO_CLIENT = "No client scored by both in every common seed, so not compared over clients"


def paired_sheet(groups: Sequence[RunGroup], title: str = "Paired comparison") -> Sheet:
    """Return the table that compares every pair of groups on the same partition, over clients and over seeds."""
    rows: list[tuple[str, str, Paired, str]] = []
    skipped: dict[str, list[str]] = {}
    alone = [group for group in groups if not group.scores]
    pairs = list(combinations([group for group in groups if group not in alone], 2))
    for one, other in pairs:
        label = f"{one.label} − {other.label}"
        seeds = sorted(set(one.by_seed()) & set(other.by_seed()))
        common = [(one.by_seed()[seed], other.by_seed()[seed]) for seed in seeds]
        if not all(same_data(a, b) for a, b in common or [(one.first, other.first)]):
            skipped.setdefault("Different data on the clients, so not compared", []).append(label)
            continue
        odd = "; ".join(_differences(one, other, seeds))
        first, second = mean_over_seeds(one, seeds), mean_over_seeds(other, seeds)
        if clients := [who for who in first if who in second]:
            comparison = paired([first[who] for who in clients], [second[who] for who in clients])
            rows.append((label, "clients", comparison, odd))
        elif seeds:
            skipped.setdefault(NO_CLIENT, []).append(label)
        if any(_coverage(a) != _coverage(b) for a, b in common):
            skipped.setdefault(OTHER_CLIENTS, []).append(label)
        elif len(seeds) > 1 and _scored(one) and _scored(other):
            last = [[_last(group, seed) for seed in seeds] for group in (one, other)]
            rows.append((label, "seeds", paired(*last), odd))
        elif len(seeds) > 1:
            skipped.setdefault("Not scored for every seed, so not compared over seeds", []).append(label)
        elif seeds:
            skipped.setdefault("Only one common seed, so not compared over seeds", []).append(label)
        else:
            skipped.setdefault("No common seed, so not compared", []).append(label)
    notes = unscored_lines(((group.label, group.first.predictor) for group in alone), ", so in no pair")
    notes += [
        f"{reason}: {'every pair' if 1 < len(labels) == len(pairs) else '; '.join(labels)}."
        for reason, labels in skipped.items()
    ]
    adjusted: dict[int, float | None] = {}
    for kind in ("clients", "seeds"):
        chosen = [number for number, row in enumerate(rows) if row[1] == kind]
        adjusted |= dict(zip(chosen, holm([rows[number][2].p for number in chosen]), strict=True))
    columns = (
        "first − second",
        "over",
        "n",
        "difference",
        f"{CONFIDENCE:.0%} interval",
        "p",
        "p (Holm)",
        "better / equal / worse",
        "remark",
    )
    cells = tuple(_paired_row(row, adjusted[number]) for number, row in enumerate(rows))
    about = [note.format(accuracy=accuracy_name(groups[0].by if groups else "")) for note in PAIRED_NOTES]
    return Sheet(title, columns, cells, (*about, *notes), text_columns=2)


def probability(p: float | None) -> str:
    """Format a p-value; a dash for None."""
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _paired_row(row: tuple[str, str, Paired, str], adjusted: float | None) -> tuple[str, ...]:
    label, over, comparison, unlike = row
    interval = "-"
    if comparison.low is not None and comparison.high is not None:
        interval = f"{100 * comparison.low:+.2f} to {100 * comparison.high:+.2f}"
    remarks = [unlike] if unlike else []
    if comparison.p is None:
        remarks.append("no pair differs")
    elif comparison.too_few:
        remarks.append(
            f"too few pairs that differ: p cannot be below {comparison.smallest_p:.3g}, not informative"
        )
    return (
        label,
        over,
        str(comparison.n),
        f"{100 * comparison.difference:+.2f}",
        interval,
        probability(comparison.p),
        probability(adjusted),
        f"{comparison.better} / {comparison.equal} / {comparison.worse}",
        "; ".join(remarks),
    )


def _coverage(run: FinishedRun) -> list[set[str]]:
    """Return the clients that a run's accuracies can cover, and those that the last one covers, by name."""
    everyone = {client.client for client in run.about.clients}
    return [{run.client_name(client) for client in clients} for clients in (everyone, run.scored)]


def _differences(one: RunGroup, other: RunGroup, seeds: Sequence[int]) -> list[str]:
    """Return remarks on what else differs in two groups: predictor, moment of scoring, rounds."""
    heads = [group.first.predictor for group in (one, other)]
    moments = [group.first.about.moment for group in (one, other)]
    rounds = [[len(group.by_seed()[seed].rounds) for seed in seeds] for group in (one, other)]
    remarks = [" vs. ".join(heads)] if len({*heads}) > 1 else []
    methods = [str(group.first.config["method"]) for group in (one, other)]
    if heads[0] == heads[1] not in PREDICTORS and methods[0] != methods[1]:
        remarks.append(f"{heads[0]} of {methods[0]} vs. {heads[1]} of {methods[1]}, which each define it")
    remarks += [f"scored {moments[0]} vs. {moments[1]} local training"] if len({*moments}) > 1 else []
    if len({number for numbers in rounds for number in numbers}) > 1:
        remarks.append(f"{' vs. '.join(map(span, rounds))} rounds")
    return remarks


def _scored(group: RunGroup) -> bool:
    """Whether the group was scored for every seed."""
    return len(group.scores) == len(group.runs)


def _last(group: RunGroup, seed: int) -> float:
    run = group.by_seed()[seed]
    return run.scores[run.predictor].last[1].weighted
