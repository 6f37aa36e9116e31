"""Tables of a reproduction: our results next to the paper's, as Markdown and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.experiments.comparing import comparison_table
from pbfl_flwr.experiments.comparing.compare import Planned, finished
from pbfl_flwr.experiments.comparing.comparison_table import results_of
from pbfl_flwr.experiments.comparing.reproduce import Reproduction, Scale, changes
from pbfl_flwr.experiments.results import changed_lines, coverage_lines, titled, unscored_lines
from pbfl_flwr.experiments.summaries import MOMENT_NOTE
from pbfl_flwr.experiments.tables import Sheet, csv_mean_sd, mean_cell
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.util.atomic_files import write_atomically


@dataclass(frozen=True, kw_only=True)
class Row(comparison_table.Row):
    """One row of a block: the results of the finished runs, beside the published values.

    Attributes:
        block: its column in the published table.
        published: see :data:`pbfl_flwr.experiments.comparing.reproduce.Cell`.
    """

    block: str
    published: list[float]

    def compared(self, paper: Reproduction) -> list[float]:
        """Return the values to compare with the paper's: of the best or the last round."""
        return self.best if paper.round == "best" else self.last

    def difference(self, paper: Reproduction) -> float | None:
        """Return our mean minus the paper's value in percentage points; None if either is missing."""
        values = self.compared(paper)
        return fmean(values) - self.published[0] if values and self.published else None


def rows(paper: Reproduction, planned: Mapping[str, Sequence[Planned]], by: str = "") -> list[Row]:
    """Return a row for every block and label that has a finished run.

    Args:
        paper: the published table.
        planned: the runs of each block.
        by: the predictor of all rows; empty means each run's primary predictor.
    """
    table_rows = []
    for name, runs in planned.items():
        for label in dict.fromkeys(run.label for run in runs):
            done = [RunDirectory(run.directory) for run in runs if run.label == label and finished(run)]
            if done:
                row = results_of(label, done, by, paper.accuracy)
                table_rows.append(Row(**vars(row), block=name, published=paper.blocks[name].published[label]))
    return table_rows


def markdown(
    paper: Reproduction,
    scale: Scale,
    planned: Mapping[str, Sequence[Planned]],
    table_rows: Sequence[Row],
    missing: Mapping[str, str],
    by: str = "",
) -> str:
    """Return the tables of all blocks and the list of differences from the paper.

    Args:
        paper: the published table.
        scale: of the runs.
        planned: the runs of each block.
        table_rows: result of :func:`rows`.
        missing: block -> why it was left out.
        by: as for :func:`rows`.
    """
    over = "sample-weighted" if paper.accuracy == "weighted" else "mean over clients"
    spread = {
        "clients": "± over clients",
        "seeds": "± is the sample standard deviation over seeds",
        "none": "the paper has no ±, ours is the sample standard deviation over seeds",
    }[paper.spread]
    lines = [f"**{paper.title}**, {titled(f'scale {scale}', by)}", "", f"{paper.paper}. {paper.table}", ""]
    lines += [f"Accuracy in %, {over}; the {paper.round} round is compared; {spread}.", ""]
    if scale == "small":
        lines += ["At scale small our results are not comparable with the paper's.", ""]
    if by:
        lines += [f"Our results are all by {by}, the paper's by each method's own predictor.", ""]
    for name, runs in planned.items():
        lines += [_table(paper, name, [row for row in table_rows if row.block == name], runs).markdown()]
    lines += [f"**{name}** was left out: {why}" for name, why in missing.items()] + [""] * bool(missing)
    if different := changes(paper, planned):
        lines += ["Differs from the full setting:", "", *(f"* {line}" for line in different), ""]
    lines += ["Differs from the paper:", "", *(f"* {line}" for line in paper.deviations)]
    lines += ["", f"The paper's hardware: {paper.hardware}."]
    return "\n".join(lines) + "\n"


def _table(paper: Reproduction, block: str, table_rows: Sequence[Row], runs: Sequence[Planned]) -> Sheet:
    names = [name for name in PREDICTORS if any(name in row.others for row in table_rows)]
    moments = len({row.moment for row in table_rows}) > 1
    head = [
        "run",
        "compared by",
        *(["scored"] if moments else []),
        "paper",
        "ours, best round",
        "ours, last round",
        "difference",
        *names,
    ]
    lines = []
    for row in table_rows:
        gap = row.difference(paper)
        cells = [row.label, row.primary_predictor, *([row.moment] if moments else [])]
        cells += [" ± ".join(f"{value:.2f}" for value in row.published) or "-"]
        cells += [_cell(row.best, row.best_spread, paper), _cell(row.last, row.spread, paper)]
        cells += [
            "-" if gap is None else f"{gap:+.2f}",
            *(mean_cell(row.others.get(name, [])) for name in names),
        ]
        lines.append((*cells, row.rounds, str(len(row.best)), f"{row.seconds:.1f}"))
    repeated = any(len(values) > 1 for row in table_rows for values in row.others.values())
    over_seeds = ", ± over seeds" if repeated and paper.spread == "clients" else ""
    notes = [f"Columns named after predictors are last-round accuracies{over_seeds}."] if table_rows else []
    notes += [MOMENT_NOTE] if moments else []
    notes += changed_lines((row.label, row.mixed) for row in table_rows)
    notes += unscored_lines((row.label, row.primary_predictor) for row in table_rows if not row.last)
    notes += coverage_lines([(row.label, row.coverage) for row in table_rows])
    done = {row.label for row in table_rows}
    if to_do := [label for label in dict.fromkeys(run.label for run in runs) if label not in done]:
        notes.append(f"Not finished: {', '.join(to_do)}.")
    notes += [paper.blocks[block].remark] if paper.blocks[block].remark else []
    columns = (*head, "rounds", "seeds", "s per round")
    return Sheet(
        f"{paper.title}, {block}", columns, tuple(lines), tuple(notes), text_columns=3 if moments else 2
    )


def _cell(values: Sequence[float], spreads: Sequence[float], paper: Reproduction) -> str:
    if not values or paper.spread != "clients":
        return mean_cell(values)
    return f"{fmean(values):.2f} ± {fmean(spreads):.2f}"


def write(out: Path, paper: Reproduction, text: str, table_rows: Sequence[Row]) -> None:
    """Write table.md (the text) and table.csv (one line per row, plain numbers)."""
    write_atomically(out / "table.md", text.encode())
    head = (
        "block run rule scored clients paper paper_spread best best_spread last last_spread difference rounds "
        "seeds seconds best_sd last_sd"
    )
    predictors = [f"{name}{suffix}" for name in PREDICTORS for suffix in ("", "_sd")]
    lines = []
    for row in table_rows:
        gap = row.difference(paper)
        printed = ([f"{value:.2f}" for value in row.published] + ["", ""])[:2]
        values = [
            *_mean_and_spread(paper, row.best, row.best_spread),
            *_mean_and_spread(paper, row.last, row.spread),
        ]
        rest = [
            "" if gap is None else f"{gap:.4f}",
            row.rounds,
            str(len(row.best)),
            f"{row.seconds:.2f}",
        ]
        clients = row.coverage.get(row.primary_predictor, str(row.clients) if row.last else "")
        rest += [csv_mean_sd(row.best)[1], csv_mean_sd(row.last)[1]]
        rest += [cell for name in PREDICTORS for cell in csv_mean_sd(row.others.get(name, []))]
        lines.append(
            (row.block, row.label, row.primary_predictor, row.moment, clients, *printed, *values, *rest)
        )
    sheet = Sheet(paper.title, (*head.split(), *predictors), tuple(lines))
    write_atomically(out / "table.csv", sheet.csv().encode())


def _mean_and_spread(
    paper: Reproduction, values: Sequence[float], spreads: Sequence[float]
) -> tuple[str, str]:
    """Return mean and standard deviation for CSV, the latter over clients or seeds, as in the paper."""
    mean, over_seeds = csv_mean_sd(values)
    return mean, f"{fmean(spreads):.4f}" if values and paper.spread == "clients" else over_seeds
