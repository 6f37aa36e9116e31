"""Tables of a reproduction: our results next to the paper's, as Markdown and CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from pbfl_flwr.experiments.notes import titled
from pbfl_flwr.experiments.plan.planned_runs import PlannedRun, finished_groups
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
    moment_column,
    summary_csv,
    summary_sheet,
)
from pbfl_flwr.experiments.tables import Sheet, Tables


def difference(paper: Reproduction, block: str, group: Group) -> float | None:
    """Return our mean minus the paper's value in percentage points; None if either is missing."""
    values = (BEST if paper.round == "best" else LAST).values(group)
    published = paper.published_cell(block, group.label)
    return fmean(values) - published[0] if values and published else None


def tables(
    paper: Reproduction, scale: Scale, planned: Iterable[PlannedRun], missing: Mapping[str, str], by: str = ""
) -> Tables:
    """Return the tables of all blocks, with what differs from the paper.

    ``missing`` are the blocks that were left out, with the reason; ``by`` is as in :class:`FinishedRun`.
    """
    runs: dict[str, list[PlannedRun]] = {}
    for run in planned:
        runs.setdefault(run.block, []).append(run)
    blocks = {block: finished_groups(of_block, by, paper.accuracy) for block, of_block in runs.items()}
    over = "sample-weighted" if paper.accuracy == "weighted" else "mean over clients"
    spread = {
        "clients": "± over clients",
        "seeds": "± is the sample standard deviation over seeds",
        "none": "the paper has no ±, ours is the sample standard deviation over seeds",
    }[paper.spread]
    shown: list[Sheet | str] = [
        f"**{paper.title}**, {titled(f'scale {scale}', by)}",
        "",
        f"{paper.paper}. {paper.table}",
        "",
        f"Accuracy in %, {over}; the {paper.round} round is compared; {spread}.",
        "",
    ]
    if scale == "small":
        shown += ["At scale small our results are not comparable with the paper's.", ""]
    if by:
        shown += [f"Our results are all by {by}, the paper's by each method's own predictor.", ""]
    for block, groups in blocks.items():
        shown += [_sheet(paper, block, groups, runs[block]), ""]
    shown += [f"**{block}** was left out: {why}" for block, why in missing.items()] + [""] * bool(missing)
    if different := changes(paper, [run for of_block in runs.values() for run in of_block]):
        shown += ["Differs from the full setting:", "", *(f"* {line}" for line in different), ""]
    shown += ["Differs from the paper:", "", *(f"* {line}" for line in paper.deviations)]
    shown += ["", f"The paper's hardware: {paper.hardware}."]
    text = "\n".join(part if isinstance(part, str) else part.markdown().rstrip("\n") for part in shown)
    return Tables(shown, {"table.md": f"{text}\n", "table.csv": _csv(paper, blocks)})


def _sheet(paper: Reproduction, block: str, groups: Sequence[Group], planned: Sequence[PlannedRun]) -> Sheet:
    def gap(group: Group) -> str:
        points = difference(paper, block, group)
        return "-" if points is None else f"{points:+.2f}"

    def published(group: Group) -> str:
        return " ± ".join(f"{value:.2f}" for value in paper.published_cell(block, group.label)) or "-"

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


def _csv(paper: Reproduction, blocks: Mapping[str, Sequence[Group]]) -> str:
    """Return one line per row, plain numbers."""
    parts = [
        summary_csv(groups, _csv_columns(paper, block)).partition("\n") for block, groups in blocks.items()
    ]
    return f"{parts[0][0]}\n{''.join(rows for _, _, rows in parts)}"


def _csv_columns(paper: Reproduction, block: str) -> list[Text]:
    """Return the leading columns of table.csv: block, run, and the published values."""

    def published(position: int) -> Callable[[Group], str]:
        def cell(group: Group) -> str:
            values = paper.published_cell(block, group.label)
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
