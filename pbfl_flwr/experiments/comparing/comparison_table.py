"""Tables of a comparison: one row per label over its seeds, and paired comparisons of all labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.experiments.comparing.compare import Planned, finished
from pbfl_flwr.experiments.console import kilobytes
from pbfl_flwr.experiments.results import (
    Group,
    Record,
    changed_files,
    changed_lines,
    coverage_lines,
    honest,
    majority_lines,
    partial_coverage,
    participants,
    scores,
    span,
    titled,
    unscored_lines,
)
from pbfl_flwr.experiments.show import paper_scalars, unknown_lines
from pbfl_flwr.experiments.summaries import MOMENT_NOTE, NEW_NOTE, OTHER_NOTE, paired_sheet
from pbfl_flwr.experiments.tables import Sheet, csv_mean_sd, mean_cell
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.records import Accuracy
from pbfl_flwr.util.atomic_files import write_atomically

BALANCED = ("balanced accuracy", "macro-F1")
BALANCE_NOTE = (
    "Balanced accuracy (mean of the class accuracies) and macro-F1 (mean of the class F1 scores): last round, by the "
    "predictor of the row, over the pooled test samples of all clients."
)
PLAIN = (
    "primary_predictor",
    "scored",
    "clients",
    "seeds",
    "rounds",
    "last",
    "best",
    "std",
    "worst",
    "up",
    "down",
    "total",
)
FURTHER = (
    "last_sd",
    "best_sd",
    *(f"{name}{suffix}" for name in PREDICTORS for suffix in ("", "_sd")),
    "validation_chosen",
    "validation_chosen_sd",
    "other_moment",
    "other_moment_sd",
    "new_clients",
    "new_clients_sd",
    "majority",
    "new_clients_majority",
    "balanced",
    "balanced_sd",
    "macro_f1",
    "macro_f1_sd",
)


@dataclass(frozen=True)
class Row:
    """Results of one label over all its seeds.

    Attributes:
        label: of the runs.
        primary_predictor: the predictor of the row: the requested one, or the runs' primary predictor.
        runs: number of finished runs, one per seed.
        rounds: their number of rounds; a range such as "18–37" if they differ.
        last, best: primary predictor's accuracies (sample-weighted, %), one per seed in which it was scored.
        chosen: the same at the validation-chosen round; empty without validation data.
        others: predictor -> last accuracies.
        spread, best_spread: standard deviation over clients in the last and in the best round.
        worst: mean of the worst tenth of the clients, last round.
        up, down: payload bytes per client and round.
        total: bytes per round, all clients and both directions, including Flower's objects.
        paper: scalars by the paper's formula; None if unknown.
        seconds: per round.
        other: primary predictor's accuracies at the other moment; empty if clients are scored at one moment only.
        new: primary predictor's accuracies of the new clients after their own rounds; empty without new clients.
        majority: accuracy of always predicting a client's majority class, one per seed; None if unknown.
        new_client_majority: the same for the new clients.
        coverage: predictor -> number of clients that its accuracies cover, see :func:`.partial_coverage`.
        moment: when clients were scored, before or after their training.
        clients: number of participating clients that are not malicious.
        balanced, macro_f1: balanced accuracy and macro-F1 in %, one per seed; empty without per-class.
        mixed: how the runs' files differ, see :func:`.changed_files`; empty if they do not.
    """

    label: str
    primary_predictor: str
    runs: int
    rounds: str
    last: list[float]
    best: list[float]
    chosen: list[float]
    others: dict[str, list[float]]
    spread: list[float]
    best_spread: list[float]
    worst: list[float]
    up: float
    down: float
    total: float
    paper: float | None
    seconds: float
    other: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    majority: list[float | None] = field(default_factory=list)
    new_client_majority: list[float | None] = field(default_factory=list)
    coverage: Mapping[str, str] = field(default_factory=dict)
    moment: str = ""
    clients: int = 0
    balanced: list[float] = field(default_factory=list)
    macro_f1: list[float] = field(default_factory=list)
    mixed: str = ""

    @property
    def seeds(self) -> int:
        """Number of seeds with accuracies."""
        return len(self.last)

    @property
    def csv_paper(self) -> str:
        """The paper's scalars for CSV; empty if unknown."""
        return "" if self.paper is None else f"{self.paper:.0f}"

    def csv_cells(self) -> list[str]:
        """Return the CSV cells of :data:`PLAIN`, with means over seeds."""
        accuracies = [
            f"{fmean(of):.4f}" if of else "" for of in (self.last, self.best, self.spread, self.worst)
        ]
        bytes_ = [f"{number:.4f}" for number in (self.up, self.down, self.total)]
        clients = self.coverage.get(self.primary_predictor, str(self.clients) if self.last else "")
        return [
            self.primary_predictor,
            self.moment,
            clients,
            str(self.seeds),
            self.rounds,
            *accuracies,
            *bytes_,
        ]

    def further(self) -> list[str]:
        """Return the CSV cells of :data:`FURTHER`: deviations over seeds and other accuracies, in %."""
        accuracies = [*(self.others.get(name, []) for name in PREDICTORS), self.chosen, self.other, self.new]
        majorities = (self.majority, self.new_client_majority)
        shares = ([100 * share for share in of if share is not None] for of in majorities)
        return [
            csv_mean_sd(self.last)[1],
            csv_mean_sd(self.best)[1],
            *(figure for values in accuracies for figure in csv_mean_sd(values)),
            *(csv_mean_sd(values)[0] for values in shares),
            *csv_mean_sd(self.balanced),
            *csv_mean_sd(self.macro_f1),
        ]


def rows(planned: Sequence[Planned], by: str = "") -> list[Row]:
    """Return a row for every label that has a finished run.

    Args:
        planned: the runs.
        by: the predictor of all rows; empty means each run's primary predictor.
    """
    table_rows = []
    for label in dict.fromkeys(run.label for run in planned):
        done = [RunDirectory(run.directory) for run in planned if run.label == label and finished(run)]
        if done:
            table_rows.append(results_of(label, done, by))
    return table_rows


def results_of(
    label: str, runs: Sequence[RunDirectory], by: str, accuracy: Literal["weighted", "mean"] = "weighted"
) -> Row:
    """Return the row of finished runs that differ only in the seed.

    Args:
        label: of the runs.
        runs: at least one.
        by: the predictor of the row; empty means the runs' primary predictor.
        accuracy: the statistic of the last and the best round, and of the other predictors.
    """

    def share(of: Accuracy) -> float:
        return 100 * float(getattr(of, accuracy))

    records = [Record.load(run.path, by=by) for run in runs]
    about, partitions = records[0].about, [record.partition for record in records]
    primary_predictor = records[0].predictor
    all_scores = [scores(record.rounds, accuracy) for record in records]
    # Missing if clients report nothing, have no test samples, or there were no prototypes yet at the last scoring.
    scored = [by_name[primary_predictor] for by_name in all_scores if primary_predictor in by_name]
    last = [score.last[1] for score in scored]
    rounds = [entry for record in records for entry in record.rounds]
    clients = participants(about)
    return Row(
        label,
        primary_predictor,
        len(runs),
        span(len(record.rounds) for record in records),
        [share(of) for of in last],
        [share(score.best[1]) for score in scored],
        [100 * score.chosen[1].weighted for score in scored if score.chosen is not None],
        {
            name: [share(by_name[name].last[1]) for by_name in all_scores if name in by_name]
            for name in PREDICTORS
            if any(name in by_name for by_name in all_scores)
        },
        [100 * of.std for of in last],
        [100 * score.best[1].std for score in scored],
        [100 * of.worst for of in last],
        fmean(entry.bytes_up.payload for entry in rounds) / clients,
        fmean(entry.bytes_down.payload for entry in rounds) / clients,
        fmean(entry.bytes_up.total + entry.bytes_down.total for entry in rounds),
        partitions[0].paper_scalars,
        fmean(entry.seconds.total for entry in rounds),
        [100 * score.other[1].weighted for score in scored if score.other is not None],
        [100 * a for record in records if (a := record.new_client_accuracy()) is not None],
        [partition.majority for partition in partitions],
        [partition.new_client_majority for partition in partitions],
        partial_coverage(
            (record.about, by_name) for record, by_name in zip(records, all_scores, strict=True)
        ),
        about.moment,
        len(honest(about)),
        [100 * of.balanced for of in last if of.balanced is not None],
        [100 * of.macro_f1 for of in last if of.macro_f1 is not None],
        changed_files(records),
    )


Column = tuple[str, Callable[[Row], str]]
"""Title, and the cell of a row."""


def leading_columns(table_rows: Sequence[Row], by: str) -> list[Column]:
    """Return the text columns after a row's label: the predictor and, if rows differ in it, when they were scored."""
    predictor: Column = ("by" if by else "primary predictor", lambda row: row.primary_predictor)
    scored: Column = ("scored", lambda row: row.moment)
    return [predictor, *([scored] if differing(table_rows)[0] else [])]


def result_columns(table_rows: Sequence[Row]) -> list[Column]:
    """Return the columns of accuracies and bytes that at least one row has.

    Columns named after predictors are last-round accuracies.
    """

    def mean(title: str, values: Callable[[Row], Sequence[float]], *, always: bool = False) -> list[Column]:
        shown = always or any(values(row) for row in table_rows)
        return [(title, lambda row: mean_cell(values(row)))] if shown else []

    def last_of(name: str) -> Callable[[Row], Sequence[float]]:
        return lambda row: row.others.get(name, [])

    return [
        *mean("last", lambda row: row.last, always=True),
        *mean("best (on test data)", lambda row: row.best, always=True),
        *mean("validation-chosen", lambda row: row.chosen),
        *mean("at the other moment", lambda row: row.other),
        *mean("std over clients", lambda row: row.spread, always=True),
        *mean("worst decile", lambda row: row.worst, always=True),
        *mean(BALANCED[0], lambda row: row.balanced),
        *mean(BALANCED[1], lambda row: row.macro_f1),
        *mean("new clients", lambda row: row.new),
        *(column for name in PREDICTORS for column in mean(name, last_of(name))),
        ("payload up", lambda row: kilobytes(row.up)),
        ("payload down", lambda row: kilobytes(row.down)),
        ("all bytes per round", lambda row: kilobytes(row.total)),
    ]


SECONDS: Column = ("s per round", lambda row: f"{row.seconds:.1f}")


def sheet(
    title: str, columns: Sequence[Column], table_rows: Sequence[Row], notes: Sequence[str], text_columns: int
) -> Sheet:
    """Return the table with these columns, a line per row."""
    cells = tuple(tuple(cell(row) for _, cell in columns) for row in table_rows)
    return Sheet(title, tuple(name for name, _ in columns), cells, tuple(notes), text_columns)


def table(title: str, table_rows: Sequence[Row], by: str = "") -> Sheet:
    """Return the table: sample-weighted accuracies in %, ± over seeds if there are several.

    Args:
        title: of the comparison.
        table_rows: result of :func:`rows`.
        by: as for :func:`rows`.
    """
    lead: list[Column] = [("run", lambda row: row.label), *leading_columns(table_rows, by)]
    lengths: list[Column] = [("rounds", lambda row: row.rounds)] if differing(table_rows)[1] else []
    paper: Column = ("paper's scalars", lambda row: paper_scalars(row.paper))
    rounds = sorted({row.rounds for row in table_rows}, key=lambda text: int(text.partition("–")[0]))
    note = f"Rounds: {', '.join(rounds)}. Seeds: {max((row.runs for row in table_rows), default=0)}. "
    note += (
        "Columns named after predictors are last-round accuracies; payload is per round, the mean over all clients, "
        "including those not selected; the paper's scalars are summed over all participating clients. "
    )
    note += "± is the sample standard deviation over seeds."
    notes = (note, *unknown_lines(row.paper for row in table_rows), *remarks(table_rows))
    columns = [*lead, *lengths, *result_columns(table_rows), paper, SECONDS]
    return sheet(titled(title, by), columns, table_rows, notes, len(lead))


def differing(table_rows: Sequence[Row]) -> tuple[bool, bool]:
    """Return (whether rows were scored at different moments, whether they have different numbers of rounds)."""
    return len({row.moment for row in table_rows}) > 1, len({row.rounds for row in table_rows}) > 1


def _half_scored(table_rows: Sequence[Row]) -> list[str]:
    """Return "label, n of m seeds" for each row that was scored for only some of its seeds."""
    return [f"{row.label}, {row.seeds} of {row.runs} seeds" for row in table_rows if 0 < row.seeds < row.runs]


def remarks(table_rows: Sequence[Row]) -> list[str]:
    """Return the notes below a table: coverage of clients and seeds, and the meaning of its columns.

    Args:
        table_rows: its rows.
    """
    return [
        *([MOMENT_NOTE] if differing(table_rows)[0] else []),
        *changed_lines((row.label, row.mixed) for row in table_rows),
        *unscored_lines((row.label, row.primary_predictor) for row in table_rows if not row.last),
        *([f"Not scored for every seed: {'; '.join(half)}."] if (half := _half_scored(table_rows)) else []),
        *coverage_lines([(row.label, row.coverage) for row in table_rows]),
        *([BALANCE_NOTE] if any(row.balanced for row in table_rows) else []),
        *([OTHER_NOTE] if any(row.other for row in table_rows) else []),
        *([NEW_NOTE] if any(row.new for row in table_rows) else []),
        *majority_lines(share for row in table_rows for share in row.majority),
        *majority_lines((share for row in table_rows for share in row.new_client_majority), "a new client"),
    ]


def write(out: Path, title: str, table_rows: Sequence[Row], groups: Sequence[Group], by: str = "") -> None:
    """Write table.md, table.tex and table.csv (plain numbers), and the paired comparison as paired.*.

    Args:
        out: the directory.
        title: of the comparison.
        table_rows: the rows.
        groups: their runs.
        by: the predictor of all rows; empty means each run's primary predictor.
    """
    whole = table(title, table_rows, by)
    write_atomically(out / "table.md", whole.markdown().encode())
    write_atomically(out / "table.tex", whole.latex().encode())
    lines = tuple(
        (row.label, *row.csv_cells(), row.csv_paper, f"{row.seconds:.2f}", *row.further())
        for row in table_rows
    )
    csv_sheet = Sheet(title, ("run", *PLAIN, "paper", "seconds", *FURTHER), lines)
    write_atomically(out / "table.csv", csv_sheet.csv().encode())
    pairs(title, groups).write(out / "paired")


def pairs(title: str, groups: Sequence[Group]) -> Sheet:
    """Return the table that compares every pair of labels."""
    return paired_sheet(groups, titled(f"{title}: pairs", groups[0].by if groups else ""))


def groups(planned: Sequence[Planned], by: str = "") -> list[Group]:
    """Return the finished runs of every label that has any; the arguments are those of :func:`rows`."""
    by_label = []
    for label in dict.fromkeys(run.label for run in planned):
        done = [run.directory for run in planned if run.label == label and finished(run)]
        if done:
            by_label.append(Group(label, tuple(Record.load(directory, by=by) for directory in done)))
    return by_label
