"""The table with one row per configuration: accuracies over its seeds, costs, and notes below it.

``compare``, ``sweep``, ``reproduce`` and the report choose their columns from the same list and write the same CSV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from pbfl_flwr.config import PREDICTORS, in_order
from pbfl_flwr.experiments.console import kilobytes
from pbfl_flwr.experiments.notes import (
    accuracy_name,
    coverage_lines,
    majority_lines,
    unscored_lines,
)
from pbfl_flwr.experiments.results import (
    WINDOW,
    FinishedRun,
    RunGroup,
    column_of,
    data_keys,
    same_data,
    same_networks,
    span,
)
from pbfl_flwr.experiments.tables import Sheet, mean_cell
from pbfl_flwr.util.csv_text import csv_text

MOMENT_NOTE = "Scored: before or after local training in a round."
BEST_NOTE = (
    "“Best” is chosen on the test data and therefore biased upwards; the validation-chosen round needs "
    "validation-share."
)
VALIDATION_NOTE = (
    "“On validation data”: in the validation-chosen round, which was chosen by it; choose runs by it, too."
)
BALANCE_NOTE = (
    "Balanced accuracy (mean of the class accuracies) and macro-F1 (mean of the class F1 scores): last round, by the "
    "predictor of the row, over the pooled test samples of all scored clients."
)
FAIRNESS_NOTE = (
    "Over clients, last round: unweighted mean, population standard deviation (0 is perfectly fair), mean of the worst "
    "and of the best tenth (at least one client), lowest client."
)
PAPER_NOTE = "The paper's scalars are unknown without a formula, or where it needs class counts of devices."


@dataclass(frozen=True)
class Text:
    """A column of text.

    Attributes:
        title: in tables.
        key: in the CSV file.
        cell: returns the text of a row.
        number: returns it for the CSV file, if it is another one there.
    """

    title: str
    key: str
    cell: Callable[[RunGroup], str]
    number: Callable[[RunGroup], str] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the CSV file."""
        return (self.key,)

    def plain(self, group: RunGroup) -> tuple[str, ...]:
        """Return a row's cells in the CSV file."""
        return ((self.number or self.cell)(group),)


@dataclass(frozen=True)
class Figures:
    """A column of figures, one per run.

    Attributes:
        title: in tables.
        key: in :attr:`FinishedRun.figures`; the CSV file has their mean and, under ``<key>_sd``, their sample standard
            deviation.
        form: formats their mean; by default it is shown with the standard deviation.
        optional: whether the column is left out if no row has values.
        note: below a table with this column.
    """

    title: str
    key: str
    form: Callable[[float], str] | None = None
    optional: bool = False
    note: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the CSV file."""
        return (self.key, f"{self.key}_sd")

    def values(self, group: RunGroup) -> list[float]:
        """Return the figures of the runs that have one."""
        return [run.figures[self.key] for run in group.runs if self.key in run.figures]

    def cell(self, group: RunGroup) -> str:
        """Return the text of a row."""
        values = self.values(group)
        if self.form is None:
            return mean_cell(values)
        return self.form(fmean(values)) if values else "-"

    def plain(self, group: RunGroup) -> tuple[str, ...]:
        """Return mean and sample standard deviation of a row as plain numbers; empty if undefined."""
        values = self.values(group)
        return (
            f"{fmean(values):.4f}" if values else "",
            f"{stdev(values):.4f}" if len(values) > 1 else "",
        )


Column = Text | Figures


def _scored_clients(group: RunGroup) -> str:
    """Return the number of clients that the accuracies cover: all, or "n of M"."""
    known = str(len(group.first.about.clients)) if group.scores else ""
    return group.coverage.get(group.first.predictor, known)


RUN = Text("run", "run", lambda group: group.label)
SCORED = Text("scored", "scored", lambda group: group.first.about.moment)
SEEDS = Text("seeds", "seeds", lambda group: str(len(group.scores)))
ROUNDS = Text("rounds", "rounds", lambda group: span(len(run.rounds) for run in group.runs))
CLIENTS = Text("clients", "clients", _scored_clients)
LAST = Figures("last", "last")
BEST = Figures("best (on test data)", "best", note=BEST_NOTE)
MEAN_OF_WINDOW = Figures(f"mean of the last {WINDOW} scored", "window")
CHOSEN = Figures("validation-chosen", "validation_chosen", optional=True)
VALIDATION = Figures("on validation data", "validation", optional=True, note=VALIDATION_NOTE)
VALIDATION_LAST = Figures("on validation data, last", "validation_last", optional=True)
MEAN = Figures("mean of clients", "mean")
STD = Figures("std over clients", "std")
BEST_STD = Figures("std over clients, best round", "best_std")
WORST = Figures("worst decile", "worst")
BEST_DECILE = Figures("best decile", "best_decile")
LOWEST = Figures("lowest client", "lowest", note=FAIRNESS_NOTE)
BALANCED = Figures("balanced accuracy", "balanced", optional=True, note=BALANCE_NOTE)
MACRO_F1 = Figures("macro-F1", "macro_f1", optional=True)
AUC_MACRO = Figures("AUC macro", "auc_macro", optional=True)
AUC_MICRO = Figures("AUC micro", "auc_micro", optional=True)
BY_PREDICTOR = tuple(Figures(name, name, optional=True) for name in PREDICTORS)
MAJORITY = Figures("majority class", "majority")
UP = Figures("payload up", "up", kilobytes)
DOWN = Figures("payload down", "down", kilobytes)
TOTAL = Figures("all bytes per round", "total", kilobytes)
PAPER = Figures("paper's scalars", "paper", "{:,.0f}".format, note=PAPER_NOTE)
SECONDS = Figures("s per round", "seconds", "{:.1f}".format)
MEMORY = Figures("peak memory of a worker, MB", "peak_mb", "{:.0f}".format)

ACCURACIES = (
    LAST,
    BEST,
    MEAN_OF_WINDOW,
    CHOSEN,
    VALIDATION,
    VALIDATION_LAST,
    STD,
    WORST,
    BALANCED,
    MACRO_F1,
    AUC_MACRO,
    AUC_MICRO,
    *BY_PREDICTOR,
)
COSTS = (UP, DOWN, TOTAL, PAPER, SECONDS)
FAIRNESS = (LAST, BEST, MEAN_OF_WINDOW, CHOSEN, MEAN, STD, WORST, BEST_DECILE, LOWEST)
IN_CSV: tuple[Column, ...] = (
    SCORED, CLIENTS, SEEDS, ROUNDS, LAST, BEST, STD, BEST_STD, WORST, MEAN, BEST_DECILE, LOWEST, *COSTS, MEMORY,
    *BY_PREDICTOR, CHOSEN, VALIDATION, VALIDATION_LAST, MEAN_OF_WINDOW, MAJORITY, AUC_MACRO, AUC_MICRO, BALANCED,
    MACRO_F1,
)  # fmt: skip


def own_predictors(groups: Sequence[RunGroup]) -> list[Figures]:
    """Return a column for each predictor that a method of a user's has added."""
    scored = in_order(name for group in groups for run in group.runs for name in run.scores)
    return [Figures(name, column_of(name), optional=True) for name in scored if name not in PREDICTORS]


def predictor_column(groups: Sequence[RunGroup]) -> Text:
    """Return the column of the predictor that each row is by."""
    title = "by" if groups and groups[0].by else "primary predictor"
    return Text(title, "predictor", lambda group: group.first.predictor)


def moment_column(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the column that says when a row was scored, if the rows differ in it."""
    return [SCORED] if len({group.first.about.moment for group in groups}) > 1 else []


def summary_sheet(
    title: str,
    groups: Sequence[RunGroup],
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
    if not any(group.first.at == "window" for group in groups):
        shown = [column for column in shown if column is not MEAN_OF_WINDOW]
    every = [*lead, *shown]
    rows = tuple(tuple(column.cell(group) for column in every) for group in groups)
    below = [
        *notes,
        *(column.note for column in every if isinstance(column, Figures) and column.note),
        *(run_notes(groups) if about_runs else []),
    ]
    return Sheet(title, tuple(column.title for column in every), rows, tuple(below), len(lead))


def run_notes(groups: Sequence[RunGroup]) -> list[str]:
    """Return the notes on what the runs of a table cover and how those of one row differ."""
    counts = {group.label: (len(group.scores), len(group.runs)) for group in groups}
    partly = [f"{label}, {n} of {of} seeds" for label, (n, of) in counts.items() if 0 < n < of]
    mixed = [group.label for group in groups if len({len(run.rounds) for run in group.runs}) > 1]
    changed = [
        group.label
        for group in groups
        if not all(
            same_data(one, other)
            for one in group.runs
            for other in group.runs
            if one.seeds[0] == other.seeds[0]
        )
    ]
    firsts: dict[tuple[object, ...], RunGroup] = {}  # by data keys
    pairs = [(firsts.setdefault(data_keys(group.first), group), group) for group in groups]
    other = [f"{two.label} than {one.label}" for one, two in pairs if not same_data(one.first, two.first)]
    rebuilt = [group.label for group in groups if any(run.rebuilt for run in group.runs)]
    edited = [group.label for group in groups if any(run.edits for run in group.runs)]
    codes = {group.label: [run.about.latest.code for run in group.runs] for group in groups}
    several = [label for label, used in codes.items() if any(code != used[0] for code in used)]
    otherwise = [
        group.label
        for group in groups
        if group.label not in mixed and not all(_built_alike(group.first, run) for run in group.runs)
    ]
    networks = [
        group.label for group in groups if not all(same_networks(group.first, run) for run in group.runs)
    ]
    partitions = [run.partition for group in groups for run in group.runs]
    return [
        *([MOMENT_NOTE] if moment_column(groups) else []),
        *([f"Runs with different numbers of rounds in one row: {'; '.join(mixed)}."] if mixed else []),
        *([f"Runs of one row on different data: {'; '.join(changed)}."] if changed else []),
        *([f"Rows on other data, though with the same keys: {'; '.join(other)}."] if other else []),
        *(
            [f"Runs of one row with other networks on the clients: {'; '.join(networks)}."]
            if networks
            else []
        ),
        *(
            [f"Begun with another number of rounds, on which the method depends: {'; '.join(rebuilt)}."]
            if rebuilt
            else []
        ),
        *([f"Code edited during a run, see pbfl show: {'; '.join(edited)}."] if edited else []),
        *([f"Code edited between the runs of one row: {'; '.join(several)}."] if several else []),
        *([f"Runs of one row whose method has other settings: {'; '.join(otherwise)}."] if otherwise else []),
        *unscored_lines((group.label, group.first.predictor) for group in groups if not group.scores),
        *([f"Not scored for every seed: {'; '.join(partly)}."] if partly else []),
        *coverage_lines([(group.label, group.coverage) for group in groups]),
        *majority_lines(partition.majority for partition in partitions),
        *shared_names(groups),
    ]


def _built_alike(one: FinishedRun, other: FinishedRun) -> bool:
    """Whether the methods of two runs have the same settings, "auto" as what it stood for, except for seeds."""
    first, second = (
        {name: value for name, value in run.about.latest.method.items() if not name.endswith("seed")}
        for run in (one, other)
    )
    return first == second


def shared_names(groups: Sequence[RunGroup]) -> list[str]:
    """Return a sentence for each predictor of users' methods that several methods have, each with a rule of its own."""
    methods: dict[str, dict[str, None]] = {}
    for run in (run for group in groups for run in group.runs):
        for name in run.scores:
            methods.setdefault(name, {})[str(run.config["method"])] = None
    return [
        f"Predictor {name} is not the same in {' and '.join(methods[name])}, which each define it."
        for name in in_order(methods)
        if name not in PREDICTORS and len(methods[name]) > 1
    ]


def accuracy_note(groups: Sequence[RunGroup]) -> str:
    """Return the note on what the accuracies of a table are."""
    name = accuracy_name(groups[0].by if groups else "").capitalize()
    return (
        f"{name} in %; last, best and validation-chosen are sample-weighted. "
        "± is the sample standard deviation over seeds."
    )


def comparison_sheet(title: str, groups: Sequence[RunGroup], lead: Sequence[Column] = (RUN,)) -> Sheet:
    """Return the table of a comparison or sweep: accuracies, then costs; ``lead`` are the columns that name a row."""
    first = [*lead, predictor_column(groups), *moment_column(groups)]
    note = (
        f"{accuracy_note(groups)} Columns named after predictors are last-round accuracies; payload is per round, the "
        "mean over all clients, including those not selected; the paper's scalars are summed over all clients."
    )
    return summary_sheet(
        title, groups, first, [SEEDS, ROUNDS, *ACCURACIES, *own_predictors(groups), *COSTS], [note]
    )


def summary_csv(groups: Sequence[RunGroup], lead: Sequence[Column] = (RUN,)) -> str:
    """Return all columns as CSV with plain numbers: means and ``<key>_sd``; unknown values are empty."""
    columns: list[Column] = [*lead, predictor_column(groups), *IN_CSV, *own_predictors(groups)]
    head = [key for column in columns for key in column.keys]
    return csv_text(
        [head, *([cell for column in columns for cell in column.plain(group)] for group in groups)]
    )


def table_files(sheet: Sheet, groups: Sequence[RunGroup], lead: Sequence[Column] = (RUN,)) -> dict[str, str]:
    """Return file name -> content of table.md and table.tex as shown, and of table.csv with all columns."""
    return {**sheet.files("table"), "table.csv": summary_csv(groups, lead)}
