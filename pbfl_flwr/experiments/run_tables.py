"""Tables about single runs, with the first seed of each configuration: predictors, costs, clients, classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pbfl_flwr.config import in_order
from pbfl_flwr.errors import abbreviate
from pbfl_flwr.experiments.console import kilobytes
from pbfl_flwr.experiments.notes import accuracy_name, coverage_lines
from pbfl_flwr.experiments.results import (
    FinishedRun,
    RunGroup,
)
from pbfl_flwr.experiments.summary import (
    AUC_MACRO,
    AUC_MICRO,
    BEST,
    CHOSEN,
    LAST,
    MEAN,
    PAPER_NOTE,
    RUN,
    STD,
    VALIDATION,
    VALIDATION_LAST,
    WORST,
    Figures,
    Text,
    summary_sheet,
)
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.runs.records import ClientRecord, ClientsRecord

MOST = 20  # classes named in a note
FIRST_SEED = " First seed of each configuration."
BALANCE = ("weighted", "balanced", "macro_f1", "balanced_mean", "macro_f1_mean")


def accuracy_sheet(groups: Sequence[RunGroup]) -> Sheet:
    """Return the table of every predictor's accuracies in the last, best and validation-chosen round."""
    rows = [
        RunGroup(group.label, (replace(group.first, by=name),))
        for group in groups
        for name in group.first.scores
    ]
    columns = [
        column
        for accuracy in (LAST, BEST, CHOSEN)
        for column in (accuracy, Figures("round", f"{accuracy.key}_round", "{:.0f}".format, optional=True))
    ]
    predictor = Text("predictor", "predictor", lambda group: _marked(group.first.predictor, group.first))
    notes = (
        "Sample-weighted accuracy on the clients' test data in %, with its round; the rightmost columns are for "
        f"the last round.{FIRST_SEED if len(groups) > 1 else ''}",
        *coverage_lines([(group.label, group.first.coverage) for group in groups]),
    )
    columns += [VALIDATION, VALIDATION_LAST, MEAN, STD, WORST, AUC_MACRO, AUC_MICRO]
    return summary_sheet("Predictors and rounds", rows, [RUN, predictor], columns, notes, about_runs=False)


def _marked(predictor: str, run: FinishedRun) -> str:
    return f"{predictor} (primary)" if predictor == run.about.primary_predictor else predictor


def cost_sheet(run: FinishedRun) -> Sheet:
    """Return the table of a run's costs per round: bytes, scalars, seconds, memory."""
    costs, clients, paper = run.costs, len(run.about.clients), run.partition.paper_scalars
    rows = []
    labels = {
        "payload": "bytes, mean over all clients: payload",
        "application": "  including reports",
        "total": "  including Flower's objects",
    }
    for kind, label in labels.items():
        up, down = costs.up[kind] / clients, costs.down[kind] / clients
        rows.append((label, kilobytes(up), kilobytes(down), kilobytes(up + down)))
    last, peak, gpu = costs.scalars, costs.peak_mb, costs.gpu_mb
    rows += [
        ("scalars, all clients, last round", f"{last.up:,}", f"{last.down:,}", f"{last.up + last.down:,}"),
        ("  by the paper's formula, all clients", "", "", "-" if paper is None else f"{paper:,.0f}"),
        ("seconds", "", "", f"{costs.seconds:.2f}"),
        ("  sum over clients", "", "", f"{sum(costs.steps.values()):.2f}"),
        ("peak memory of a worker", "", "", "-" if peak is None else f"{peak:.0f} MB"),
    ]
    if gpu is not None:
        rows.append(("  on its GPU, without the CUDA context", "", "", f"{gpu:.0f} MB"))
    notes = () if paper is not None else (PAPER_NOTE,)
    return Sheet("Cost per round, mean over rounds", ("", "up", "down", "both"), tuple(rows), notes)


def client_sheet(groups: Sequence[RunGroup]) -> Sheet:
    """Return the table of clients: id, name, architecture, device, sample counts, and last accuracy in every run."""
    accuracies: list[dict[str, float]] = []
    clients: dict[str, tuple[ClientRecord, list[int]]] = {}  # with their numbers of samples
    for run in (group.first for group in groups):
        curves = run.client_curves().items()
        accuracies.append({run.client_name(client): curve[-1][1] for client, curve in curves})
        counted = {
            number: sizes for columns in reversed(run.latest_clients()) for number, *sizes in _sizes(columns)
        }
        for client in run.about.clients:
            clients.setdefault(
                client.title, (client, counted.get(client.client, [client.num_train, client.num_test]))
            )
    named = any(client.name or client.natural_id for client, _ in clients.values())
    rows = []
    for label, (client, sizes) in sorted(clients.items(), key=lambda item: item[1][0].client):
        last = (f"{100 * shares[label]:.2f}" if label in shares else "-" for shares in accuracies)
        who = (str(client.client), client.name or client.natural_id) if named else (str(client.client),)
        what = (client.architecture, client.device, *map(str, sizes))
        rows.append((*who, *what, *last))
    head = ("client", "name") if named else ("client",)
    heads = (f"{group.label or group.first.predictor}, %" for group in groups)
    columns = (*head, "network", "device", "training samples", "test samples", *heads)
    note = f"{accuracy_name(groups[0].by).capitalize()} when each client was last scored."
    if len(groups) > 1:
        note += (
            " First seed of each configuration; ids, networks, devices and sample counts are from the first run with "
            "this client."
        )
    return Sheet("Clients", columns, tuple(rows), (note,), text_columns=3 + named)


def _sizes(columns: ClientsRecord) -> Iterable[tuple[int, int, int]]:
    """Return (client, numbers of training and test samples) of those that answered in a round."""
    return zip(columns.client, columns.num_train, columns.num_test, strict=True)


def balance_sheet(groups: Sequence[RunGroup]) -> Sheet | None:
    """Return the table of accuracy, balanced accuracy and macro-F1, one row per predictor; None if no run has them."""
    rows = []
    for group in groups:
        run = group.first
        for name, (number, accuracy) in run.by_class.items():
            figures = (f"{100 * getattr(accuracy, key):.2f}" for key in BALANCE)
            rows.append((group.label, _marked(name, run), str(number), *figures))
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
    note = (
        "Last round, %. Accuracy is sample-weighted; balanced accuracy is the mean of the class accuracies, macro-F1 "
        "the mean of the class F1 scores. Both over the pooled test samples of all scored clients, and as the "
        "unweighted mean over them, each over the classes in its test data (macro-F1: or in its predictions)."
    )
    note += FIRST_SEED if len(groups) > 1 else ""
    return Sheet("Class-balanced metrics", columns, tuple(rows), (note,), text_columns=2)


def class_sheet(groups: Sequence[RunGroup]) -> Sheet | None:
    """Return the table of class accuracies in the last round, a row per class; None if no run has them."""
    counted = [group for group in groups if group.first.by_class]
    predictors = in_order(name for group in counted for name in group.first.by_class)
    rows, untested = [], []
    for group in counted:
        run, last = group.first, group.first.by_class
        tested = last[run.predictor_by_class][1].tested or []
        for label, name in enumerate(run.about.label_names):
            if not any((accuracy.tested or [])[label] for _, accuracy in last.values()):
                untested.append(f"{group.label}: {name}" if group.label else name)
                continue
            each = ((last[one][1].by_class or [])[label] if one in last else None for one in predictors)
            cells = ("-" if value is None else f"{100 * value:.2f}" for value in each)
            rows.append((group.label, name, str(tested[label]), *cells))
    if not rows:
        return None
    notes = [
        "Last round, %, over the pooled test samples of all scored clients; the numbers of test samples are "
        f"those of {counted[0].by or 'the primary predictor'}.{FIRST_SEED if len(groups) > 1 else ''}"
    ]
    if untested:
        notes.append(f"Without test samples of scored clients: {abbreviate(untested, MOST)}.")
    columns = ("run", "class", "test samples", *predictors)
    return Sheet("Accuracy by class", columns, tuple(rows), tuple(notes), text_columns=2)


def class_sheets(groups: Sequence[RunGroup]) -> list[Sheet]:
    """Return those of the two tables by class for which a run has data."""
    return [sheet for sheet in (balance_sheet(groups), class_sheet(groups)) if sheet is not None]
