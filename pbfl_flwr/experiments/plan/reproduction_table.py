"""Tables of a reproduction: our results next to the paper's, as Markdown and CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from pbfl_flwr.experiments.notes import titled
from pbfl_flwr.experiments.plan.comparison import Planned, finished_groups
from pbfl_flwr.experiments.plan.reproduction import Reproduction, Scale, changes
from pbfl_flwr.experiments.results import Group
from pbfl_flwr.experiments.summary import (
    BEST,
    BEST_STD,
    BY_PREDICTOR,
    LAST,
    ROUNDS,
    RUN,
    SECONDS,
    SEEDS,
    STD,
    Column,
    Figures,
    Text,
    csv_text,
    moment_column,
    summary_sheet,
)
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.util.atomic_files import write_atomically

Blocks = Mapping[str, Sequence[Group]]
"""Block -> the finished runs of each of its rows."""


def finished_blocks(paper: Reproduction, planned: Mapping[str, Sequence[Planned]], by: str = "") -> Blocks:
    """Return the finished runs of every block and label that has any.

    Args:
        paper: the published table.
        planned: the runs of each block.
        by: the predictor of all rows; empty means each run's primary predictor.
    """
    return {block: finished_groups(runs, by, paper.accuracy) for block, runs in planned.items()}


def difference(paper: Reproduction, block: str, group: Group) -> float | None:
    """Return our mean minus the paper's value in percentage points; None if either is missing."""
    values = (BEST if paper.round == "best" else LAST).values(group)
    published = paper.blocks[block].published[group.label]
    return fmean(values) - published[0] if values and published else None


def markdown(
    paper: Reproduction,
    scale: Scale,
    planned: Mapping[str, Sequence[Planned]],
    blocks: Blocks,
    missing: Mapping[str, str],
    by: str = "",
) -> str:
    """Return the tables of all blocks and the list of differences from the paper.

    Args:
        paper: the published table.
        scale: of the runs.
        planned: the runs of each block.
        blocks: result of :func:`finished_blocks`.
        missing: block -> why it was left out.
        by: as for :func:`finished_blocks`.
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
    for block, runs in planned.items():
        lines += [_table(paper, block, blocks.get(block, []), runs).markdown()]
    lines += [f"**{block}** was left out: {why}" for block, why in missing.items()] + [""] * bool(missing)
    if different := changes(paper, planned):
        lines += ["Differs from the full setting:", "", *(f"* {line}" for line in different), ""]
    lines += ["Differs from the paper:", "", *(f"* {line}" for line in paper.deviations)]
    lines += ["", f"The paper's hardware: {paper.hardware}."]
    return "\n".join(lines) + "\n"


def _table(paper: Reproduction, block: str, groups: Sequence[Group], planned: Sequence[Planned]) -> Sheet:
    def gap(group: Group) -> str:
        points = difference(paper, block, group)
        return "-" if points is None else f"{points:+.2f}"

    def published(group: Group) -> str:
        return " ± ".join(f"{value:.2f}" for value in paper.blocks[block].published[group.label]) or "-"

    def accuracy(column: Figures, deviation: Figures) -> Callable[[Group], str]:
        """Return the cell whose ± is over clients if the paper's is, else over seeds."""

        def cell(group: Group) -> str:
            if paper.spread != "clients" or not group.scores:
                return column.cell(group)
            return f"{fmean(column.values(group)):.2f} ± {fmean(deviation.values(group)):.2f}"

        return cell

    compared_by = Text("compared by", "predictor", lambda group: group.first.predictor)
    columns: list[Column] = [
        Text("paper", "paper", published),
        Text("ours, best round", "best", accuracy(BEST, BEST_STD)),
        Text("ours, last round", "last", accuracy(LAST, STD)),
        Text("difference", "difference", gap),
        *BY_PREDICTOR,
        ROUNDS,
        SEEDS,
        SECONDS,
    ]
    repeated = paper.spread == "clients" and any(
        len(column.values(group)) > 1 for column in BY_PREDICTOR for group in groups
    )
    over_seeds = ", ± over seeds" if repeated else ""
    present = {group.label for group in groups}
    missing = [label for label in dict.fromkeys(run.label for run in planned) if label not in present]
    notes = [
        *([f"Columns named after predictors are last-round accuracies{over_seeds}."] if groups else []),
        *([f"Not finished: {', '.join(missing)}."] if missing else []),
        *filter(None, [paper.blocks[block].remark]),
    ]
    return summary_sheet(
        f"{paper.title}, {block}", groups, [RUN, compared_by, *moment_column(groups)], columns, notes
    )


def write(out: Path, paper: Reproduction, text: str, blocks: Blocks) -> None:
    """Write table.md (the text) and table.csv (one line per row, plain numbers)."""
    write_atomically(out / "table.md", text.encode())
    parts = [csv_text(groups, _csv_columns(paper, block)) for block, groups in blocks.items()]
    head = parts[0].partition("\n")[0]
    rows = "".join(part.partition("\n")[2] for part in parts)
    write_atomically(out / "table.csv", f"{head}\n{rows}".encode())


def _csv_columns(paper: Reproduction, block: str) -> list[Text]:
    """Return the leading columns of table.csv: block, run, and the published values."""

    def published(position: int) -> Callable[[Group], str]:
        def cell(group: Group) -> str:
            values = paper.blocks[block].published[group.label]
            return f"{values[position]:.2f}" if position < len(values) else ""

        return cell

    def gap(group: Group) -> str:
        points = difference(paper, block, group)
        return "" if points is None else f"{points:.4f}"

    return [
        Text("", "block", lambda group: block),
        RUN,
        Text("", "published", published(0)),
        Text("", "published_spread", published(1)),
        Text("", "difference", gap),
    ]
