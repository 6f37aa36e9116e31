"""The table of a comparison: a row a label over its seeds, and the pairs of runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.experiments.comparing.compare import Planned, finished
from pbfl_flwr.experiments.results.accuracies import (
    few_clients,
    few_lines,
    honest,
    majority_lines,
    participants,
    scores,
    span,
    titled,
    unscored_lines,
)
from pbfl_flwr.experiments.results.records import Group, Record, changed_files, changed_lines
from pbfl_flwr.experiments.results.summaries import MOMENT_NOTE, NEW_NOTE, OTHER_NOTE, paired_sheet
from pbfl_flwr.experiments.text.numbers import kilobytes
from pbfl_flwr.experiments.text.table_formats import Sheet, figure, plain
from pbfl_flwr.experiments.text.tables import paper_scalars, unknown_lines
from pbfl_flwr.flower.storage.atomic_files import write_atomically
from pbfl_flwr.flower.storage.history import RunDirectory

BALANCED = ("balanced accuracy", "macro-F1")
BALANCE_NOTE = (
    "Balanced accuracy and macro-F1, the mean F1 score of the classes, give every class the same weight: last round, "
    "by the predictor of the row, over the test samples of all clients together."
)
PLAIN = (
    "headline",
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
    """One label, all its seeds.

    Attributes:
        label: of the runs.
        headline: their predictor, or the one that was asked for instead.
        runs, rounds: how many finished runs, one a seed, and how many rounds each: "18–37" where patience ended some.
        last, best: headline accuracies (sample-weighted, %), one a seed in which it was scored.
        others: predictor -> last accuracies.
        chosen: the same at the validation-chosen round; empty without validation data.
        spread: deviation over clients, last round.
        worst: mean of the worst tenth of the clients, last round.
        up, down: bytes a client and round, payload.
        total: bytes a round, all clients and both ways, Flower's objects included.
        paper: scalars by the paper's formula; None where they are not known.
        seconds: a round.
        other: headline accuracies at the other moment; empty where clients are scored once.
        new: headline accuracies of the new clients after their own rounds; empty where there are none.
        majority: what the skew of the labels alone scores, one a seed; None where it is not known.
        newcomer_majority: the same of the new clients.
        few: predictor -> over how many of the clients its accuracies are, see :func:`.few_clients`.
        moment: when clients were scored, before or after their training.
        clients: how many the accuracies are to be over: those that take part and do not lie.
        balanced, macro_f1: the same accuracies with every class the same weight; empty without per-class.
        mixed: in what its runs differ beside the seed, see :func:`.changed_files`.
    """

    label: str
    headline: str
    runs: int
    rounds: str
    last: list[float]
    best: list[float]
    chosen: list[float]
    others: dict[str, list[float]]
    spread: list[float]
    worst: list[float]
    up: float
    down: float
    total: float
    paper: float | None
    seconds: float
    other: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    majority: list[float | None] = field(default_factory=list)
    newcomer_majority: list[float | None] = field(default_factory=list)
    few: Mapping[str, str] = field(default_factory=dict)
    moment: str = ""
    clients: int = 0
    balanced: list[float] = field(default_factory=list)
    macro_f1: list[float] = field(default_factory=list)
    mixed: str = ""

    @property
    def seeds(self) -> int:
        """Over how many seeds the accuracies are."""
        return len(self.last)

    @property
    def plain_paper(self) -> str:
        """The paper's scalars as other programs read them; nothing where they are not known."""
        return "" if self.paper is None else f"{self.paper:.0f}"

    def plain(self) -> list[str]:
        """Return the mean figures in the order of :data:`PLAIN`, as other programs read them."""
        accuracies = [
            f"{fmean(of):.4f}" if of else "" for of in (self.last, self.best, self.spread, self.worst)
        ]
        bytes_ = [f"{number:.4f}" for number in (self.up, self.down, self.total)]
        clients = self.few.get(self.headline, str(self.clients) if self.last else "")
        return [
            self.headline,
            self.moment,
            clients,
            str(self.seeds),
            self.rounds,
            *accuracies,
            *bytes_,
        ]

    def further(self) -> list[str]:
        """Return deviations over seeds and all other accuracies in the order of :data:`FURTHER`; they are in %, too."""
        accuracies = [*(self.others.get(name, []) for name in PREDICTORS), self.chosen, self.other, self.new]
        majorities = (self.majority, self.newcomer_majority)
        shares = ([100 * share for share in of if share is not None] for of in majorities)
        return [
            plain(self.last)[1],
            plain(self.best)[1],
            *(figure for values in accuracies for figure in plain(values)),
            *(plain(values)[0] for values in shares),
            *plain(self.balanced),
            *plain(self.macro_f1),
        ]


def rows(planned: Sequence[Planned], by: str = "") -> list[Row]:
    """Return a row for every label that has a finished run.

    Args:
        planned: the runs.
        by: the predictor of all rows; nothing is the headline of each run.
    """
    found = []
    for label in dict.fromkeys(run.label for run in planned):
        done = [RunDirectory(run.directory) for run in planned if run.label == label and finished(run)]
        if done:
            found.append(_row(label, done, by))
    return found


def _row(label: str, runs: Sequence[RunDirectory], by: str) -> Row:
    abouts, histories = [run.read() for run in runs], [run.rounds() for run in runs]
    headline = by or str(abouts[0]["headline"])
    all_scores = [scores(history) for history in histories]
    # None where clients report nothing, have no test samples, or prototypes came after the last scoring.
    scored = [found[headline] for found in all_scores if headline in found]
    balanced, macro_f1 = (
        [100 * found.last[1][key] for found in scored if key in found.last[1]]
        for key in ("balanced", "macro_f1")
    )
    entries: list[Mapping[str, Any]] = [entry for history in histories for entry in history]
    clients, records = participants(abouts[0]), [Record.load(run.path, by=by) for run in runs]
    return Row(
        label,
        headline,
        len(runs),
        span(map(len, histories)),
        [100 * found.last[1]["weighted"] for found in scored],
        [100 * found.best[1]["weighted"] for found in scored],
        [100 * at[1]["weighted"] for found in scored if (at := found.chosen) is not None],
        {
            name: [100 * found[name].last[1]["weighted"] for found in all_scores if name in found]
            for name in PREDICTORS
            if any(name in found for found in all_scores)
        },
        [100 * found.last[1]["std"] for found in scored],
        [100 * found.last[1]["worst"] for found in scored],
        fmean(entry["bytes_up"]["payload"] for entry in entries) / clients,
        fmean(entry["bytes_down"]["payload"] for entry in entries) / clients,
        fmean(entry["bytes_up"]["total"] + entry["bytes_down"]["total"] for entry in entries),
        runs[0].paper_scalars(),
        fmean(entry["seconds"]["total"] for entry in entries),
        [100 * at[1]["weighted"] for found in scored if (at := found.other) is not None],
        [100 * a for record in records if (a := record.newcomer_accuracy()) is not None],
        [run.majority() for run in runs],
        [run.newcomer_majority() for run in runs],
        few_clients(zip(abouts, all_scores, strict=True)),
        str(abouts[0]["moment"]),
        len(honest(abouts[0])),
        balanced,
        macro_f1,
        changed_files(records),
    )


def table(title: str, found: Sequence[Row], by: str = "") -> Sheet:
    """Return the table: accuracies in %, sample-weighted over all clients; ± over seeds where there are several.

    Args:
        title: of the comparison.
        found: what :func:`rows` returned.
        by: as there.
    """
    names = [name for name in PREDICTORS if any(name in row.others for row in found)]
    chosen, new = any(row.chosen for row in found), any(row.new for row in found)
    twice, counted = any(row.other for row in found), any(row.balanced for row in found)
    moments, lengths = unlike(found)
    head = [
        "run",
        "by" if by else "headline",
        *(["scored"] if moments else []),
        *(["rounds"] if lengths else []),
    ]
    head += ["last", "best (on test data)", *(["validation-chosen"] if chosen else [])]
    head += ["at the other moment"] if twice else []
    head += ["std over clients", "worst decile", *(BALANCED if counted else [])]
    head += [*(["new clients"] if new else []), *names]
    head += ["payload up", "payload down", "all bytes a round", "paper's scalars", "s a round"]
    lines = []
    for row in found:
        cells = [row.label, row.headline, *([row.moment] if moments else [])]
        cells += [row.rounds] if lengths else []
        cells += [figure(row.last), figure(row.best)]
        cells += [figure(row.chosen)] if chosen else []
        cells += [figure(row.other)] if twice else []
        cells += [figure(row.spread), figure(row.worst)]
        cells += [figure(row.balanced), figure(row.macro_f1)] if counted else []
        cells += [figure(row.new)] if new else []
        cells += [figure(row.others.get(name, [])) for name in names]
        cells += [kilobytes(row.up), kilobytes(row.down), kilobytes(row.total), paper_scalars(row.paper)]
        lines.append((*cells, f"{row.seconds:.1f}"))
    rounds = sorted({row.rounds for row in found}, key=lambda said: int(said.partition("–")[0]))
    note = f"Rounds: {', '.join(rounds)}. Seeds: {max((row.runs for row in found), default=0)}. "
    note += (
        "The columns named after predictors are last-round accuracies; payload is a round's mean over all "
    )
    note += "clients, also those that were not asked; the paper's scalars are for all clients taking part. "
    note += "± is the sample deviation over seeds."
    notes = (note, *unknown_lines(row.paper for row in found), *remarks(found))
    return Sheet(titled(title, by), tuple(head), tuple(lines), notes, text_columns=3 if moments else 2)


def unlike(found: Sequence[Row]) -> tuple[bool, bool]:
    """Return whether rows were scored at different moments, and whether they have different numbers of rounds."""
    return len({row.moment for row in found}) > 1, len({row.rounds for row in found}) > 1


def _half_scored(found: Sequence[Row]) -> list[str]:
    """Return of each row whose accuracies are over some of its seeds alone over how many they are."""
    return [f"{row.label}, {row.seeds} of {row.runs} seeds" for row in found if 0 < row.seeds < row.runs]


def remarks(found: Sequence[Row]) -> list[str]:
    """Return what is to be said below a table: over whom it is, what other moments, new clients and skew mean.

    Args:
        found: its rows.
    """
    return [
        *([MOMENT_NOTE] if unlike(found)[0] else []),
        *changed_lines((row.label, row.mixed) for row in found),
        *unscored_lines((row.label, row.headline) for row in found if not row.last),
        *([f"Not scored in every seed: {'; '.join(half)}."] if (half := _half_scored(found)) else []),
        *few_lines([(row.label, row.few) for row in found]),
        *([BALANCE_NOTE] if any(row.balanced for row in found) else []),
        *([OTHER_NOTE] if any(row.other for row in found) else []),
        *([NEW_NOTE] if any(row.new for row in found) else []),
        *majority_lines(share for row in found for share in row.majority),
        *majority_lines((share for row in found for share in row.newcomer_majority), "a new client"),
    ]


def write(out: Path, title: str, found: Sequence[Row], groups: Sequence[Group], by: str = "") -> None:
    """Write table.md, table.tex and table.csv (plain numbers), and the comparison of pairs as paired.*.

    Args:
        out: the directory.
        title: of the comparison.
        found: the rows.
        groups: their runs.
        by: the predictor of all of them; nothing is the headline of each run.
    """
    sheet = table(title, found, by)
    write_atomically(out / "table.md", sheet.markdown().encode())
    write_atomically(out / "table.tex", sheet.latex().encode())
    lines = tuple(
        (row.label, *row.plain(), row.plain_paper, f"{row.seconds:.2f}", *row.further()) for row in found
    )
    figures = Sheet(title, ("run", *PLAIN, "paper", "seconds", *FURTHER), lines)
    write_atomically(out / "table.csv", figures.csv().encode())
    pairs(title, groups).write(out / "paired")


def pairs(title: str, groups: Sequence[Group]) -> Sheet:
    """Return the comparison of every two labels."""
    return paired_sheet(groups, titled(f"{title}: pairs", groups[0].by if groups else ""))


def groups(planned: Sequence[Planned], by: str = "") -> list[Group]:
    """Return the finished runs of every label that has one; the arguments are those of :func:`rows`."""
    found = []
    for label in dict.fromkeys(run.label for run in planned):
        done = [run.directory for run in planned if run.label == label and finished(run)]
        if done:
            found.append(Group(label, tuple(Record.load(directory, by=by) for directory in done)))
    return found
