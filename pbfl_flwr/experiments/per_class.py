"""Class-balanced metrics and per-class accuracies of runs with ``per-class``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.errors import abbreviate
from pbfl_flwr.experiments.console import print_blocks, say
from pbfl_flwr.experiments.results import label_names, other_moment, scores
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.runs.records import Accuracy, RoundRecord, RunRecord

MOST = 20  # classes shown in a terminal
BALANCE = ("weighted", "balanced", "macro_f1", "balanced_mean", "macro_f1_mean")


@dataclass(frozen=True, eq=False)
class Scored:
    """A run's data for these tables.

    Attributes:
        label: its row label among other runs; empty for a single run.
        about: content of run.json.
        rounds: of the run.
        by: the requested predictor; empty means the primary predictor.
    """

    label: str
    about: RunRecord
    rounds: Sequence[RoundRecord]
    by: str = ""

    @cached_property
    def last(self) -> dict[str, tuple[int, Accuracy]]:
        """Predictor -> (round, accuracy) of its last evaluation, for predictors counted by class."""
        scored = scores(self.rounds)
        return {name: score.last for name, score in scored.items() if score.last[1].by_class is not None}

    @cached_property
    def other(self) -> dict[str, tuple[int, Accuracy]]:
        """The same as :attr:`last` at the moment at which the primary predictor is not scored."""
        points = {name: score.other for name, score in scores(self.rounds).items()}
        return {
            name: point
            for name, point in points.items()
            if point is not None and point[1].by_class is not None
        }

    @cached_property
    def predictor(self) -> str:
        """The requested predictor or the primary predictor; the first predictor counted by class if that one is not."""
        named = self.by or self.about.primary_predictor
        return named if named in self.last else next(iter(self.last))


def balance_sheet(runs: Sequence[Scored]) -> Sheet | None:
    """Return the table of accuracy, balanced accuracy and macro-F1, one row per predictor; None if no run has them."""
    rows = []
    for run in runs:
        moments = [(name, point, "") for name, point in run.last.items()]
        elsewhen = f", {other_moment(run.about)}"
        moments += [(name, point, elsewhen) for name, point in run.other.items()]
        for name, (number, accuracy), moment in moments:
            primary = name == run.about.primary_predictor and not moment
            label = f"{name} (primary)" if primary else name + moment
            cells = (f"{100 * getattr(accuracy, key):.2f}" for key in BALANCE)
            rows.append((run.label, label, str(number), *cells))
    if not rows:
        return None
    columns = (
        "run",
        "predictor",
        "round",
        "accuracy",
        "balanced",
        "macro-F1",
        "balanced, mean of clients",
        "macro-F1, mean of clients",
    )
    notes = (
        "Last round, %. Accuracy is sample-weighted; balanced accuracy is the mean of the class accuracies, macro-F1 "
        "the mean of the class F1 scores. Both over the pooled test samples of all clients, and as the unweighted mean "
        "over clients, each over the classes in its test data (macro-F1: or in its predictions)."
        + _first_seed(runs),
    )
    return Sheet("Class-balanced metrics", columns, tuple(rows), notes, text_columns=2)


def class_sheet(runs: Sequence[Scored]) -> Sheet | None:
    """Return the table of class accuracies in the last round, a row per class; None if no run has them."""
    counted = [run for run in runs if run.last]
    predictors = [name for name in PREDICTORS if any(name in run.last for run in counted)]
    by = counted[0].by if counted else ""
    rows, untested = [], []
    for run in counted:
        last, tested = run.last, run.last[run.predictor][1].tested or []
        for label, name in enumerate(label_names(run.about)):
            if not any((accuracy.tested or [])[label] for _, accuracy in last.values()):
                untested.append(f"{run.label}: {name}" if run.label else name)
                continue
            each = ((last[one][1].by_class or [])[label] if one in last else None for one in predictors)
            cells = ("-" if value is None else f"{100 * value:.2f}" for value in each)
            rows.append((run.label, name, str(tested[label]), *cells))
    if not rows:
        return None
    notes = [
        "Last round, %, over the pooled test samples of all clients; the numbers of test samples are those of "
        f"{by or 'the primary predictor'}.{_first_seed(counted)}"
    ]
    if untested:
        notes.append(f"Without test samples: {abbreviate(untested, MOST)}.")
    columns = ("run", "class", "test samples", *predictors)
    return Sheet("Accuracy by class", columns, tuple(rows), tuple(notes), text_columns=2)


def _first_seed(runs: Sequence[Scored]) -> str:
    """Return the note that the first seed is shown; empty for a single run, which has no label."""
    return " First seed of each configuration." if any(run.label for run in runs) else ""


def sheets(runs: Sequence[Scored]) -> list[Sheet]:
    """Return those of the two tables for which a run has data."""
    return [sheet for sheet in (balance_sheet(runs), class_sheet(runs)) if sheet is not None]


def show(about: RunRecord, rounds: Sequence[RoundRecord], console: Console) -> None:
    """Print both tables of a run; nothing without ``per-class``.

    Args:
        about: content of run.json.
        rounds: of the run.
        console: to print to.
    """
    run = Scored("", about, rounds)
    for sheet in sheets([run]):
        rows = [row[1:] for row in sheet.rows]  # without the label
        head, notes = sheet.columns[1:], list(sheet.notes)
        if sheet.title == "Accuracy by class" and len(rows) > MOST:
            at = head.index(run.predictor)
            notes.insert(
                0, f"Shown: the {MOST} of {len(rows)} classes with the lowest accuracy of '{run.predictor}'."
            )
            known = [row for row in rows if row[at] != "-"]
            rows = sorted(known, key=lambda row: float(row[at]))[:MOST]
        say(console, f"{sheet.title[0].lower()}{sheet.title[1:]}, %", "italic")
        print_blocks(console, head, rows, words=1)
        for note in notes:
            say(console, note)


__all__ = ["Scored", "balance_sheet", "class_sheet", "sheets", "show"]
