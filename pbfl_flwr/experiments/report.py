"""Self-contained HTML report of one or several runs: tables, pictures, configuration, failures.

The content of a run directory is untrusted, e.g. device names and failure reasons: the template escapes all of it, and
the page's content security policy forbids all scripts and requests.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from pbfl_flwr.config import NEUTRAL
from pbfl_flwr.errors import FEW, PbflError, abbreviate, printable
from pbfl_flwr.experiments.notes import titled
from pbfl_flwr.experiments.pairs import EVERY_AGAINST_ONE, Asked, paired_sheet
from pbfl_flwr.experiments.results import FinishedRun, RunGroup
from pbfl_flwr.experiments.run_tables import accuracy_sheet, class_sheets, client_sheet
from pbfl_flwr.experiments.show import settings_line, warning_lines
from pbfl_flwr.experiments.summary import (
    COSTS,
    FAIRNESS,
    MEMORY,
    ROUNDS,
    RUN,
    SEEDS,
    Column,
    accuracy_note,
    moment_column,
    predictor_column,
    summary_sheet,
)
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.util.atomic_files import write_atomically
from pbfl_flwr.util.extras import require

TEMPLATES = "experiments/templates"
LONGEST_TITLE = 150  # characters of labels in the page's title, if there are several


def write(
    groups: Sequence[RunGroup],
    out: Path,
    asked: Asked = EVERY_AGAINST_ONE,
    formats: Collection[str] = (),
) -> list[Path]:
    """Write the page, and each picture as a file of every format in ``<stem>-pictures`` beside the page.

    Args:
        groups: of runs.
        out: the page.
        asked: the pairs in it.
        formats: among png, svg and pdf.

    Returns:
        The files written, the page first.

    Raises:
        PbflError: if the extra ``report`` is not installed, or the page cannot be written.
    """
    require("pbfl report", "matplotlib", "jinja2", "sklearn")
    from pbfl_flwr.experiments import pictures
    from pbfl_flwr.experiments.pictures import style

    if out.is_dir():  # known before minutes of drawing
        raise PbflError(f"{out} cannot be written (Is a directory)")
    sections = pictures.draw(groups)
    written = [out]
    write_atomically(out, page(groups, sections, asked).encode())
    folder = out.with_name(f"{out.stem}-pictures")
    for picture in [picture for section in sections for picture in section.pictures]:
        for kind in style.KINDS:
            if kind in formats:
                written.append(folder / f"{picture.name}.{kind}")
                write_atomically(written[-1], style.file_of(picture, kind))
    return written


def page(groups: Sequence[RunGroup], sections: Sequence[Any], asked: Asked = EVERY_AGAINST_ONE) -> str:
    """Return the page of runs and of what :func:`pbfl_flwr.experiments.pictures.draw` returned for them."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    from pbfl_flwr.experiments.pictures import style

    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pairs = [paired_sheet(groups, asked=asked)] if len(groups) > 1 else []
    sheets = [
        fairness_sheet(groups),
        *pairs,
        accuracy_sheet(groups),
        cost_sheet(groups),
        *class_sheets(groups),
    ]
    return environment.get_template("report.html").render(
        title=titled(_named([group.label for group in groups]), groups[0].by),
        overviews=overviews(groups),
        sheets=sheets,
        clients=client_sheet(groups),
        sections=sections,
        image=lambda picture: base64.b64encode(style.file_of(picture, "svg")).decode(),
        style=Markup(_source("report.css")),  # a file of the package, so not escaped
        configuration=configuration_sheet(groups),
        versions=version_sheet(groups),
    )


def overviews(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return label, path, line of settings and warnings of every run: missing rounds, error, who joined, failures."""
    overviews = []
    for group in groups:
        for run in group.runs:
            warnings = []
            wanted, done = run.about.last_round, len(run.rounds)
            if done < wanted:
                warnings.append(f"{done} of {wanted} rounds are finished")
            if error := RunDirectory(run.path).error():
                warnings.append(f"ended with: {error}")
            warnings += warning_lines(run)
            line = settings_line(run.about, done)
            overviews.append({"label": group.label, "path": run.path, "line": line, "warnings": warnings})
    return overviews


def fairness_sheet(groups: Sequence[RunGroup]) -> Sheet:
    """Return the table of accuracies and their distribution over clients, one row per configuration."""
    lead = [RUN, predictor_column(groups), *moment_column(groups)]
    columns: list[Column] = [SEEDS, ROUNDS, *FAIRNESS]
    return summary_sheet("Accuracy and fairness", groups, lead, columns, [accuracy_note(groups)])


def cost_sheet(groups: Sequence[RunGroup]) -> Sheet:
    """Return the table of costs per round, one row per configuration."""
    note = (
        "Mean over rounds and seeds. Payload: mean over all clients; all bytes: with Flower's objects, of all clients; "
        "the paper's scalars: of all clients."
    )
    return summary_sheet("Cost per round", groups, [RUN], [*COSTS, MEMORY], [note], about_runs=False)


def configuration_sheet(groups: Sequence[RunGroup]) -> Sheet:
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


def version_sheet(groups: Sequence[RunGroup]) -> Sheet:
    """Return the table of software versions of the runs, with those of later rounds of resumed runs."""
    versions = [_versions(group.first) for group in groups]
    names = dict.fromkeys(name for installed in versions for name in installed)
    rows = tuple((name, *(installed.get(name, "-") for installed in versions)) for name in names)
    return Sheet("Versions", ("", *(group.label for group in groups)), rows, (), 1 + len(groups))


def _versions(run: FinishedRun) -> dict[str, str]:
    texts, before = dict(run.about.versions), run.about.versions
    for change in run.about.changes:
        if change.from_round <= run.rounds[-1].round:
            for name, version in change.versions.items():
                if version != before.get(name):
                    texts[name] = f"{texts.get(name, '-')}; from round {change.from_round} on {version}"
            before = change.versions or before
    return texts


def _named(labels: Sequence[str]) -> str:
    """Return the labels, of many or long ones the first and how many more there are."""
    fitting = sum(end <= LONGEST_TITLE for end in accumulate(map(len, labels)))
    return abbreviate(labels, max(1, min(FEW, fitting)))


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'


def _shown(value: object) -> object:
    """Return a template's value; of text what may be shown."""
    return printable(value, lines=True) if type(value) is str else value  # a Markup is ours


def _source(name: str) -> str:
    return files("pbfl_flwr").joinpath(TEMPLATES, name).read_text(encoding="utf-8")
