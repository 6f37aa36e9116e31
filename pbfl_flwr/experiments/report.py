"""Self-contained HTML report of one or several runs: sortable tables, pictures, configuration, failures.

The content of a run directory is untrusted, e.g. device names and failure reasons: the template escapes all of it, and
the page's content security policy forbids all other scripts and all requests.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import per_class
from pbfl_flwr.experiments.console import kilobytes
from pbfl_flwr.experiments.results import (
    NEUTRAL,
    Group,
    Record,
    accuracy_name,
    coverage_lines,
    partial_coverage,
    participants,
    scores,
    titled,
)
from pbfl_flwr.experiments.show import (
    UNKNOWN,
    failure_lines,
    joined_lines,
    paper_scalars,
    settings_line,
    unknown_lines,
)
from pbfl_flwr.experiments.summaries import OTHER_NOTE, paired_sheet, summary_sheet
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.runs.directory import ERROR
from pbfl_flwr.runs.records import ClientRecord
from pbfl_flwr.util.atomic_files import write_atomically

TEMPLATES = "experiments/templates"
NUMBER = re.compile(r"[<+−-]?\s*\d")
NEEDED = "pbfl report needs matplotlib and jinja2: pip install 'pbfl-flwr[report]'"


@dataclass(frozen=True)
class Overview:
    """A run in the list at the top of the page.

    Attributes:
        label: of its group.
        path: its directory.
        line: the run's settings.
        warnings: missing rounds, error, warnings of the last round, devices that joined, failures.
    """

    label: str
    path: str
    line: str
    warnings: tuple[str, ...]


def write(groups: Sequence[Group], out: Path, *, png: bool = False, svg: bool = False) -> list[Path]:
    """Write the page, and optionally each picture as a file.

    Args:
        groups: the runs, see :func:`pbfl_flwr.experiments.results.load`.
        out: the page; pictures are written to ``<stem>-pictures`` in the same directory.
        png: write every picture as PNG.
        svg: write every picture as SVG.

    Returns:
        The files written, the page first.

    Raises:
        PbflError: if matplotlib or jinja2 is not installed, or the page cannot be written.
    """
    try:
        from pbfl_flwr.experiments import pictures
        from pbfl_flwr.experiments.pictures import style
    except ModuleNotFoundError as error:
        raise PbflError(f"{NEEDED} ({error})") from None
    sections = pictures.draw(groups)
    written = [out]
    write_atomically(out, page(groups, sections).encode())
    folder = out.with_name(f"{out.stem}-pictures")
    for picture in [picture for section in sections for picture in section.pictures]:
        if png:
            written.append(folder / f"{picture.name}.png")
            write_atomically(written[-1], style.png(picture))
        if svg:
            written.append(folder / f"{picture.name}.svg")
            write_atomically(written[-1], style.svg(picture).encode())
    return written


def page(groups: Sequence[Group], sections: Sequence[Any]) -> str:
    """Return the page.

    Args:
        groups: the runs.
        sections: result of :func:`pbfl_flwr.experiments.pictures.draw` for these runs.

    Raises:
        PbflError: if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise PbflError(f"{NEEDED} ({error})") from None
    from markupsafe import Markup

    from pbfl_flwr.experiments.pictures.style import inline_svg

    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = _source("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sheets = [summary_sheet(groups), accuracy_sheet(groups), cost_sheet(groups)]
    if len(groups) > 1:
        sheets.insert(1, paired_sheet(groups))
    sheets += per_class.sheets(
        [per_class.Scored(g.label, g.first.about, g.first.rounds, g.by) for g in groups]
    )
    return environment.get_template("report.html").render(
        title=titled(", ".join(group.label for group in groups), groups[0].by),
        overviews=overviews(groups),
        sheets=sheets,
        clients=client_sheet(groups),
        sections=sections,
        # Only these are not escaped: matplotlib escapes text in its drawings, style and script are package files.
        drawing=lambda picture: Markup(inline_svg(picture)),
        style=Markup(_source("report.css")),
        script=Markup(script),
        script_hash=digest,
        configuration=configuration_sheet(groups),
        versions=version_sheet(groups),
        numeric=is_numeric,
    )


def overviews(groups: Sequence[Group]) -> list[Overview]:
    """Return settings and warnings of every run."""
    runs = []
    for group in groups:
        for record in group.records:
            warnings = []
            wanted, done = record.about.last_round, len(record.rounds)
            if done < wanted:
                warnings.append(f"{done} of {wanted} rounds are finished")
            if (error := record.path / ERROR).exists():
                warnings.append(f"ended with: {error.read_text(encoding='utf-8', errors='replace').strip()}")
            warnings += [f"last round: {warning}" for warning in record.rounds[-1].warnings]
            warnings += joined_lines(record.rounds)
            warnings += failure_lines([*record.rounds, *record.new_clients])
            line = settings_line(record.about, done)
            runs.append(Overview(group.label, str(record.path), line, tuple(warnings)))
    return runs


def accuracy_sheet(groups: Sequence[Group]) -> Sheet:
    """Return the table of every predictor's accuracies in the last, best and validation-chosen round, first seed."""
    rows = []
    twice = any(entry.other_accuracy for group in groups for entry in group.first.rounds)
    for group in groups:
        record = group.first
        for name, score in scores(record.rounds).items():
            cells: list[str] = []
            for point in (score.last, score.best, score.chosen, *([score.other] if twice else [])):
                cells += ["-", "-"] if point is None else [f"{100 * point[1].weighted:.2f}", str(point[0])]
            even = (f"{100 * getattr(score.last[1], key):.2f}" for key in ("mean", "std", "worst"))
            predictor = f"{name} (primary)" if name == record.primary_predictor else name
            rows.append((group.label, predictor, *cells, *even))
    columns = (
        "run",
        "predictor",
        "last",
        "round",
        "best (on test data)",
        "round",
        "validation-chosen",
        "round",
        *(("at the other moment", "round") if twice else ()),
        "mean of clients",
        "std over clients",
        "worst decile",
    )
    few = [
        (group.label, partial_coverage([(group.first.about, scores(group.first.rounds))])) for group in groups
    ]
    notes = (
        "Sample-weighted accuracy on the clients' test data in %, with its round; the three rightmost columns are for "
        "the last round. First seed of each configuration.",
        *coverage_lines(few),
        *([OTHER_NOTE] if twice else []),
    )
    return Sheet("Predictors and rounds", columns, tuple(rows), notes, text_columns=2)


def cost_sheet(groups: Sequence[Group]) -> Sheet:
    """Return the table of costs per round, mean over the rounds of the first seed."""
    rows = []
    for group in groups:
        rounds, paper = group.first.rounds, group.first.partition.paper_scalars
        clients = participants(group.first.about)
        # 0 if clients do not report it: client-report=none.
        peak = max(record.peak_mb for record in rounds)
        rows.append(
            (
                group.label,
                kilobytes(fmean(record.bytes_up.payload for record in rounds) / clients),
                kilobytes(fmean(record.bytes_down.payload for record in rounds) / clients),
                kilobytes(fmean(record.bytes_up.total + record.bytes_down.total for record in rounds)),
                paper_scalars(paper),
                f"{fmean(record.seconds.total for record in rounds):.2f}",
                f"{peak:.0f}" if peak else "-",
            )
        )
    columns = (
        "run",
        "payload up, mean over all clients",
        "payload down, mean over all clients",
        "bytes with Flower's objects, all clients",
        "scalars by the paper's formula, all participants",
        "seconds",
        "peak memory of a worker, MB",
    )
    notes = (
        "Mean over rounds, first seed.",
        *unknown_lines(g.first.partition.paper_scalars for g in groups),
    )
    return Sheet("Cost per round", columns, tuple(rows), notes)


def client_sheet(groups: Sequence[Group]) -> Sheet:
    """Return the table of clients: id, name, architecture, device, sample counts, and last accuracy in every run."""
    accuracies: list[dict[str, float]] = []
    clients: dict[str, ClientRecord] = {}
    for record in (group.first for group in groups):
        accuracies.append(
            {record.client_name(client): share for client, share in record.accuracies().items()}
        )
        for client in record.about.clients:
            clients.setdefault(client.label, client)
    rows = []
    for label, client in sorted(clients.items(), key=lambda item: item[1].client):
        last = (f"{100 * shares[label]:.2f}" if label in shares else "-" for shares in accuracies)
        what = (client.name, client.architecture, client.device)
        rows.append((str(client.client), *what, str(client.num_train), str(client.num_test), *last))
    if not any(row[1] for row in rows):
        rows = [(row[0], *row[2:]) for row in rows]
    named = ("name",) if any(client.name for client in clients.values()) else ()
    columns = (
        "client",
        *named,
        "network",
        "device",
        "training samples",
        "test samples",
        *(f"{group.label}, %" for group in groups),
    )
    note = (
        f"{accuracy_name(groups[0].by).capitalize()} in the last round, first seed of each configuration; ids, "
        "networks, devices and sample counts are from the first run with this client."
    )
    return Sheet("Clients", columns, tuple(rows), (note,), text_columns=0)


def configuration_sheet(groups: Sequence[Group]) -> Sheet:
    """Return the table of resolved configurations, keys that differ between runs first."""
    configs = [group.first.config for group in groups]
    keys = list(dict.fromkeys(key for config in configs for key in config))

    def differs(key: str) -> bool:
        return key not in NEUTRAL and len({str(config.get(key)) for config in configs}) > 1

    rows = [
        (key, *("-" if key not in config else _value(config[key]) for config in configs))
        for key in sorted(keys, key=lambda key: not differs(key))
    ]
    note = f"{sum(map(differs, keys))} keys differ; they are listed first."
    title = "Configuration"
    columns = ("key", *(group.label for group in groups))
    return Sheet(title, columns, tuple(rows), (note,) if len(groups) > 1 else (), len(columns))


def version_sheet(groups: Sequence[Group]) -> Sheet:
    """Return the table of software versions of the runs."""
    versions = [group.first.about.versions for group in groups]
    names = dict.fromkeys(name for installed in versions for name in installed)
    rows = tuple((name, *(installed.get(name, "-") for installed in versions)) for name in names)
    return Sheet("Versions", ("", *(group.label for group in groups)), rows, (), 1 + len(groups))


def is_numeric(sheet: Sheet, column: int) -> bool:
    """Whether a column is right-aligned and sorted numerically."""
    cells = [row[column] for row in sheet.rows if row[column] not in ("", "-", UNKNOWN)]
    return column >= sheet.text_columns and bool(cells) and all(NUMBER.match(cell) for cell in cells)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'


def _source(name: str) -> str:
    return files("pbfl_flwr").joinpath(TEMPLATES, name).read_text(encoding="utf-8")


__all__ = ["Overview", "Record", "page", "write"]
