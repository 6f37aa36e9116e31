"""The table with one row per configuration: accuracies over its seeds, costs, and notes below it.

``compare``, ``sweep``, ``reproduce`` and the report choose their columns from the same list and write the same CSV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.experiments.console import kilobytes
from pbfl_flwr.experiments.notes import (
    accuracy_name,
    coverage_lines,
    majority_lines,
    unscored_lines,
)
from pbfl_flwr.experiments.results import Group, same_data, span
from pbfl_flwr.experiments.statistics import best_decile
from pbfl_flwr.experiments.tables import Sheet, mean_cell
from pbfl_flwr.runs.records import RoundRecord

MOMENT_NOTE = "Scored: before or after local training in a round."
BEST_NOTE = (
    "“Best” is chosen on the test data and therefore biased upwards; the validation-chosen round needs "
    "validation-share."
)
OTHER_NOTE = (
    "The other moment is before local training for a run scored after it, and vice versa; it covers the clients that "
    "trained in the last round."
)
NEW_NOTE = (
    "New clients took no part in the rounds: sample-weighted accuracy after all their own rounds afterwards."
)
BALANCE_NOTE = (
    "Balanced accuracy (mean of the class accuracies) and macro-F1 (mean of the class F1 scores): last round, by the "
    "predictor of the row, over the pooled test samples of all clients."
)
FAIRNESS_NOTE = (
    "Over clients, last round: unweighted mean, population standard deviation (0 is perfectly fair), mean of the worst "
    "and of the best tenth (at least one client), lowest client."
)
PAPER_NOTE = "The paper's scalars are unknown without a formula, or where it needs class counts of devices."


@dataclass(frozen=True)
class Text:
    """A column of text: its title in tables, its key in the CSV file, and the text of a row."""

    title: str
    key: str
    cell: Callable[[Group], str]


@dataclass(frozen=True)
class Figures:
    """A column of figures, one per run.

    Attributes:
        title: in tables.
        key: in the CSV file, which has their mean and, under ``<key>_sd``, their sample standard deviation.
        values: of a row; empty if no run has one.
        form: formats their mean; by default it is shown with the standard deviation.
        optional: whether the column is left out if no row has values.
        note: below a table with this column.
    """

    title: str
    key: str
    values: Callable[[Group], Sequence[float]]
    form: Callable[[float], str] | None = None
    optional: bool = False
    note: str = ""

    def cell(self, group: Group) -> str:
        """Return the text of a row."""
        values = self.values(group)
        if self.form is None:
            return mean_cell(values)
        return self.form(fmean(values)) if values else "-"


Column = Text | Figures


def _accuracies(point: str, statistic: str = "") -> Callable[[Group], list[float]]:
    """Return the function that reads the accuracy in a :class:`Scores` attribute of every run, in %."""

    def values(group: Group) -> list[float]:
        points = (getattr(score, point) for score in group.scores)
        name = statistic or group.first.statistic
        return _percents(getattr(point[1], name) for point in points if point is not None)

    return values


def _percents(shares: Iterable[float | None]) -> list[float]:
    return [100 * share for share in shares if share is not None]


def _over_clients(statistic: Callable[[Sequence[float]], float]) -> Callable[[Group], list[float]]:
    """Return the function that applies a statistic to the clients' last accuracies in every run, in %."""

    def values(group: Group) -> list[float]:
        each = [list(run.accuracies().values()) for run in group.runs]
        return _percents(statistic(shares) for shares in each if shares)

    return values


def _per_round(
    value: Callable[[RoundRecord], float], *, per_client: bool = False
) -> Callable[[Group], list[float]]:
    """Return the function that reads every run's mean over rounds, divided by the number of participants if asked."""

    def values(group: Group) -> list[float]:
        means = [(fmean(map(value, run.rounds)), run.about.num_participants) for run in group.runs]
        return [mean / clients if per_client else mean for mean, clients in means]

    return values


def _predictor_column(name: str) -> Figures:
    def values(group: Group) -> list[float]:
        last = (run.scores[name].last[1] for run in group.runs if name in run.scores)
        return _percents(getattr(accuracy, group.first.statistic) for accuracy in last)

    return Figures(name, name, values, optional=True)


def _partition(name: str) -> Callable[[Group], list[float]]:
    return lambda group: _percents(getattr(run.partition, name) for run in group.runs)


def _new_clients(group: Group) -> list[float]:
    return _percents(run.new_client_accuracy() for run in group.runs)


def _paper_scalars(group: Group) -> list[float]:
    counts = (run.partition.paper_scalars for run in group.runs)
    return [count for count in counts if count is not None]


def _peak_memory(group: Group) -> list[float]:
    """Return the peak memory of a worker in MB; empty if clients do not report it: client-report=none."""
    peaks = [max(record.peak_mb for record in run.rounds) for run in group.runs]
    return [peak for peak in peaks if peak]


def _scored_clients(group: Group) -> str:
    """Return the number of clients that the accuracies cover: all honest participants, or "n of M"."""
    known = str(len(group.first.about.honest)) if group.scores else ""
    return group.coverage.get(group.first.predictor, known)


RUN = Text("run", "run", lambda group: group.label)
SCORED = Text("scored", "scored", lambda group: group.first.about.moment)
SEEDS = Text("seeds", "seeds", lambda group: str(len(group.scores)))
ROUNDS = Text("rounds", "rounds", lambda group: span(len(run.rounds) for run in group.runs))
CLIENTS = Text("clients", "clients", _scored_clients)
LAST = Figures("last", "last", _accuracies("last"))
BEST = Figures("best (on test data)", "best", _accuracies("best"), note=BEST_NOTE)
CHOSEN = Figures("validation-chosen", "validation_chosen", _accuracies("chosen"), optional=True)
OTHER = Figures("at the other moment", "other_moment", _accuracies("other"), optional=True, note=OTHER_NOTE)
MEAN = Figures("mean of clients", "mean", _accuracies("last", "mean"))
STD = Figures("std over clients", "std", _accuracies("last", "std"))
BEST_STD = Figures("std over clients, best round", "best_std", _accuracies("best", "std"))
WORST = Figures("worst decile", "worst", _accuracies("last", "worst"))
BEST_DECILE = Figures("best decile", "best_decile", _over_clients(best_decile))
LOWEST = Figures("lowest client", "lowest", _over_clients(min), note=FAIRNESS_NOTE)
BALANCED = Figures(
    "balanced accuracy", "balanced", _accuracies("last", "balanced"), optional=True, note=BALANCE_NOTE
)
MACRO_F1 = Figures("macro-F1", "macro_f1", _accuracies("last", "macro_f1"), optional=True)
AUC_MACRO = Figures("AUC macro", "auc_macro", _accuracies("last", "auc_macro"), optional=True)
AUC_MICRO = Figures("AUC micro", "auc_micro", _accuracies("last", "auc_micro"), optional=True)
NEW = Figures("new clients", "new_clients", _new_clients, optional=True, note=NEW_NOTE)
BY_PREDICTOR = tuple(map(_predictor_column, PREDICTORS))
MAJORITY = Figures("majority class", "majority", _partition("majority"))
NEW_MAJORITY = Figures(
    "new clients' majority class", "new_clients_majority", _partition("new_client_majority")
)
UP = Figures(
    "payload up", "up", _per_round(lambda record: record.bytes_up.payload, per_client=True), kilobytes
)
DOWN = Figures(
    "payload down", "down", _per_round(lambda record: record.bytes_down.payload, per_client=True), kilobytes
)
TOTAL = Figures(
    "all bytes per round",
    "total",
    _per_round(lambda record: record.bytes_up.total + record.bytes_down.total),
    kilobytes,
)
PAPER = Figures("paper's scalars", "paper", _paper_scalars, "{:,.0f}".format, note=PAPER_NOTE)
SECONDS = Figures(
    "s per round",
    "seconds",
    _per_round(lambda record: record.seconds.total),
    lambda seconds: f"{seconds:.1f}",
)
MEMORY = Figures("peak memory of a worker, MB", "peak_mb", _peak_memory, lambda megabytes: f"{megabytes:.0f}")

ACCURACIES = (
    LAST,
    BEST,
    CHOSEN,
    OTHER,
    STD,
    WORST,
    BALANCED,
    MACRO_F1,
    AUC_MACRO,
    AUC_MICRO,
    NEW,
    *BY_PREDICTOR,
)
COSTS = (UP, DOWN, TOTAL, PAPER, SECONDS)
FAIRNESS = (LAST, BEST, CHOSEN, MEAN, STD, WORST, BEST_DECILE, LOWEST, NEW)
IN_CSV: tuple[Column, ...] = (
    SCORED, CLIENTS, SEEDS, ROUNDS, LAST, BEST, STD, BEST_STD, WORST, MEAN, BEST_DECILE, LOWEST, *COSTS, MEMORY,
    *BY_PREDICTOR, CHOSEN, OTHER, NEW, MAJORITY, NEW_MAJORITY, AUC_MACRO, AUC_MICRO, BALANCED, MACRO_F1,
)  # fmt: skip


def predictor_column(groups: Sequence[Group]) -> Text:
    """Return the column of the predictor that each row is by."""
    title = "by" if groups and groups[0].by else "primary predictor"
    return Text(title, "predictor", lambda group: group.first.predictor)


def moment_column(groups: Sequence[Group]) -> list[Column]:
    """Return the column that says when a row was scored, if the rows differ in it."""
    return [SCORED] if len({group.first.about.moment for group in groups}) > 1 else []


def summary_sheet(
    title: str,
    groups: Sequence[Group],
    lead: Sequence[Column],
    columns: Sequence[Column],
    notes: Sequence[str],
    *,
    about_runs: bool = True,
) -> Sheet:
    """Return the table with one row per group.

    Args:
        title: of the table.
        groups: its rows.
        lead: the leftmost columns, aligned as text.
        columns: the others; optional ones are left out if no row has values.
        notes: further lines below it, before those of the columns and on the runs.
        about_runs: whether to add :func:`run_notes`.
    """
    shown = [
        column
        for column in columns
        if isinstance(column, Text) or not column.optional or any(map(column.values, groups))
    ]
    every = [*lead, *shown]
    rows = tuple(tuple(column.cell(group) for column in every) for group in groups)
    below = [
        *notes,
        *(column.note for column in every if isinstance(column, Figures) and column.note),
        *(run_notes(groups) if about_runs else []),
    ]
    return Sheet(title, tuple(column.title for column in every), rows, tuple(below), len(lead))


def run_notes(groups: Sequence[Group]) -> list[str]:
    """Return the notes on what the runs of a table cover and how those of one row differ."""
    counts = {group.label: (len(group.scores), len(group.runs)) for group in groups}
    partly = [f"{label}, {n} of {of} seeds" for label, (n, of) in counts.items() if 0 < n < of]
    mixed = [group.label for group in groups if len({len(run.rounds) for run in group.runs}) > 1]
    changed = [group.label for group in groups if not all(same_data(group.first, run) for run in group.runs)]
    partitions = [run.partition for group in groups for run in group.runs]
    return [
        *([MOMENT_NOTE] if moment_column(groups) else []),
        *([f"Runs with different numbers of rounds in one row: {'; '.join(mixed)}."] if mixed else []),
        *([f"Runs of one row on different data: {'; '.join(changed)}."] if changed else []),
        *unscored_lines((group.label, group.first.predictor) for group in groups if not group.scores),
        *([f"Not scored for every seed: {'; '.join(partly)}."] if partly else []),
        *coverage_lines([(group.label, group.coverage) for group in groups]),
        *majority_lines(partition.majority for partition in partitions),
        *majority_lines((partition.new_client_majority for partition in partitions), "a new client"),
    ]


def accuracy_note(groups: Sequence[Group]) -> str:
    """Return the note on what the accuracies of a table are."""
    name = accuracy_name(groups[0].by if groups else "").capitalize()
    return (
        f"{name} in %; last, best and validation-chosen are sample-weighted. "
        "± is the sample standard deviation over seeds."
    )


def comparison_sheet(title: str, groups: Sequence[Group], lead: Sequence[Column] = (RUN,)) -> Sheet:
    """Return the table of a comparison or sweep: accuracies, then costs; ``lead`` are the columns that name a row."""
    first = [*lead, predictor_column(groups), *moment_column(groups)]
    note = (
        f"{accuracy_note(groups)} Columns named after predictors are last-round accuracies; payload is per round, the "
        "mean over all clients, including those not selected; the paper's scalars are summed over all participating "
        "clients."
    )
    return summary_sheet(title, groups, first, [SEEDS, ROUNDS, *ACCURACIES, *COSTS], [note])


def csv_text(groups: Sequence[Group], lead: Sequence[Column] = (RUN,)) -> str:
    """Return all columns as CSV with plain numbers: means and ``<key>_sd``; unknown values are empty."""
    columns: list[Column] = [*lead, predictor_column(groups), *IN_CSV]
    keys: list[str] = []
    for column in columns:
        keys += [column.key] if isinstance(column, Text) else [column.key, f"{column.key}_sd"]
    rows: list[tuple[str, ...]] = []
    for group in groups:
        cells: list[str] = []
        for column in columns:
            if isinstance(column, Text):
                cells.append(column.cell(group))
            else:
                cells += mean_and_deviation(column.values(group))
        rows.append(tuple(cells))
    return Sheet("", tuple(keys), tuple(rows)).csv()


def mean_and_deviation(values: Sequence[float]) -> tuple[str, str]:
    """Return mean and sample standard deviation as plain numbers; empty if undefined."""
    if not values:
        return "", ""
    return f"{fmean(values):.4f}", f"{stdev(values):.4f}" if len(values) > 1 else ""


def table_files(sheet: Sheet, groups: Sequence[Group], lead: Sequence[Column] = (RUN,)) -> dict[str, str]:
    """Return file name -> content of table.md and table.tex as shown, and of table.csv with all columns."""
    return {**sheet.files("table"), "table.csv": csv_text(groups, lead)}
