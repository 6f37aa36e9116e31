"""Tables of statistics over runs: one row per method, and one row per pair of methods on the same clients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from pbfl_flwr.experiments.results import (
    Group,
    Record,
    Scores,
    accuracy_name,
    changed_files,
    changed_lines,
    changed_weights,
    coverage_lines,
    majority_lines,
    mean_over_seeds,
    partial_coverage,
    same_data,
    scores,
    span,
    unscored_lines,
)
from pbfl_flwr.experiments.statistics import CONFIDENCE, Paired, fairness, holm, paired
from pbfl_flwr.experiments.tables import Sheet, mean_cell

SUMMARY_NOTES = (
    "{accuracy} in %; last, best and validation-chosen are sample-weighted. "
    "± is the sample standard deviation over seeds.",
    "“Best” is chosen on the test data and therefore biased upwards; the validation-chosen round needs "
    "validation-share.",
    "Over clients, last round: unweighted mean, population standard deviation (0 is perfectly fair), mean of the worst "
    "and of the best tenth (at least one client), lowest client.",
)
NEW_NOTE = (
    "New clients took no part in the rounds: sample-weighted accuracy after all their own rounds afterwards."
)
OTHER_NOTE = (
    "The other moment is before local training for a run scored after it, and vice versa; it covers the clients that "
    "trained in the last round."
)
MOMENT_NOTE = "Scored: before or after local training in a round."
PAIRED_NOTES = (
    "Difference: first minus second, in percentage points of the last round's {accuracy}; interval: "
    f"{CONFIDENCE:.0%} percentile bootstrap of the mean difference, 10,000 resamples, fixed seed; p: two-sided "
    "Wilcoxon signed-rank test; p (Holm): adjusted for the number of rows with the same unit (clients or seeds).",
    "Over clients: one value per client, its mean accuracy over the common seeds. Clients of a run learn from each "
    "other, so the result holds for this partition and these seeds only. Over seeds: sample-weighted accuracy per run.",
)

OTHER_CLIENTS = (
    "Accuracies cover different clients (new-clients, attack, fraction-train, fraction-evaluate, failures), so not "
    "compared over seeds"
)
NO_CLIENT = "No client scored by both in every common seed, so not compared over clients"


def summary_sheet(groups: Sequence[Group], title: str = "Accuracy and fairness") -> Sheet:
    """Return the table of accuracy (last, best, validation-chosen) and fairness over clients, one row per group."""
    rows = []
    moments = len({group.first.moment for group in groups}) > 1
    mixed = [group.label for group in groups if len({len(record.rounds) for record in group.records}) > 1]
    new = any(record.new_clients for group in groups for record in group.records)
    for group in groups:
        shown = [scores(record.rounds)[record.predictor] for record in group.records if _scored(group)]
        even = [
            fairness(list(record.accuracies().values())) for record in group.records if record.accuracies()
        ]
        chosen = [score.chosen for score in shown if score.chosen is not None]
        rounds = span(len(record.rounds) for record in group.records)
        cells = [
            mean_cell([100 * score.last[1].weighted for score in shown]),
            mean_cell([100 * score.best[1].weighted for score in shown]),
            mean_cell([100 * accuracy.weighted for _, accuracy in chosen]),
            mean_cell([100 * one.mean for one in even]),
            mean_cell([100 * one.deviation for one in even]),
            mean_cell([100 * one.worst_decile for one in even]),
            mean_cell([100 * one.best_decile for one in even]),
            mean_cell([100 * one.lowest for one in even]),
        ]
        if new:
            cells.append(
                mean_cell([100 * a for r in group.records if (a := r.new_client_accuracy()) is not None])
            )
        seeds = str(sum(bool(_shown_scores(record)) for record in group.records))
        scored = [group.first.moment] if moments else []
        rows.append((group.label, group.first.predictor, *scored, seeds, rounds, *cells))
    columns = (
        "run",
        "by" if groups[0].by else "primary predictor",
        *(["scored"] if moments else []),
        "seeds",
        "rounds",
        "last",
        "best (on test data)",
        "validation-chosen",
        "mean of clients",
        "std over clients",
        "worst decile",
        "best decile",
        "lowest client",
        *(["new clients"] if new else []),
    )
    partitions = [record.partition for group in groups for record in group.records]
    few = [
        (group.label, partial_coverage((record.about, _shown_scores(record)) for record in group.records))
        for group in groups
    ]
    accuracy = accuracy_name(groups[0].by if groups else "")
    notes = (
        *(note.format(accuracy=accuracy.capitalize()) for note in SUMMARY_NOTES),
        *([MOMENT_NOTE] if moments else []),
        *([f"Runs with different numbers of rounds in one row: {'; '.join(mixed)}."] if mixed else []),
        *changed_lines((group.label, changed_files(group.records)) for group in groups),
        *unscored_lines((group.label, group.first.predictor) for group in groups if _unscored(group)),
        *(
            [f"Not scored for every seed, so not shown: {'; '.join(half)}."]
            if (half := _half_scored(groups))
            else []
        ),
        *coverage_lines(few),
        *([NEW_NOTE] if new else []),
        *majority_lines(partition.majority for partition in partitions),
        *majority_lines((partition.new_client_majority for partition in partitions), "a new client"),
    )
    return Sheet(title, columns, tuple(rows), notes, text_columns=3 if moments else 2)


def paired_sheet(groups: Sequence[Group], title: str = "Paired comparison") -> Sheet:
    """Return the table that compares every pair of groups on the same partition, over clients and over seeds."""
    rows: list[tuple[str, str, Paired, str]] = []
    skipped: dict[str, list[str]] = {}
    alone = [group for group in groups if _unscored(group)]
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


def _coverage(record: Record) -> list[set[str]]:
    """Return the clients that a run's accuracies can cover, and those that the last one covers, by name."""
    return [{record.client_name(client) for client in clients} for clients in (record.honest, record.scored)]


def _differences(one: Group, other: Group, seeds: Sequence[int]) -> list[str]:
    """Return remarks on what else differs in two groups: predictor, moment of scoring, rounds, pretrained weights."""
    heads, moments = ([getattr(g.first, name) for g in (one, other)] for name in ("predictor", "moment"))
    rounds = [[len(group.by_seed()[seed].rounds) for seed in seeds] for group in (one, other)]
    remarks = [" vs. ".join(heads)] if len({*heads}) > 1 else []
    remarks += [f"scored {moments[0]} vs. {moments[1]} local training"] if len({*moments}) > 1 else []
    if len({number for numbers in rounds for number in numbers}) > 1:
        remarks.append(f"{' vs. '.join(map(span, rounds))} rounds")
    if names := changed_weights(group.by_seed()[seed] for group in (one, other) for seed in seeds):
        remarks.append(f"different weights of {', '.join(names)}")
    return remarks


def _shown_scores(record: Record) -> dict[str, Scores]:
    """Return {predictor: scores} of the predictor that is shown; empty if it was never scored."""
    return {name: score for name, score in scores(record.rounds).items() if name == record.predictor}


def _scored(group: Group) -> bool:
    return all(map(_shown_scores, group.records))


def _unscored(group: Group) -> bool:
    return not any(map(_shown_scores, group.records))


def _half_scored(groups: Sequence[Group]) -> list[str]:
    return [group.label for group in groups if not _scored(group) and not _unscored(group)]


def _last(group: Group, seed: int) -> float:
    record = group.by_seed()[seed]
    return scores(record.rounds)[record.predictor].last[1].weighted
