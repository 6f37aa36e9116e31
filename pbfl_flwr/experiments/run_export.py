"""Export of a run: a JSON document, or CSV with a line per client, round and predictor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pbfl_flwr.config import in_order
from pbfl_flwr.experiments.results import Costs, client_series, costs, histories, scores
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.records import Accuracy, ClientsRecord, RoundRecord, RunRecord
from pbfl_flwr.util.csv_text import csv_text

CLIENTS = (
    "round",
    "client",
    "name",
    "architecture",
    "num_train",
    "num_test",
    "predictor",
    "correct",
    "accuracy",
)
POINTS = {
    "last": "last",
    "best": "best",
    "validation-chosen": "chosen",
    "validation": "validation",
    "validation-last": "validation_last",
}
SIZES = {"payload": "payload", "with-reports": "application", "with-flower": "total"}


def as_json(run_dir: Path) -> str:
    """Return a run's settings, accuracies (from 0 to 1), costs and failures as a JSON document.

    Raises:
        PbflError: if there is no run, or it is damaged.
    """
    run = RunDirectory(run_dir)
    about, (rounds, _), partition = run.record(), histories(run), run.partition()
    document = {
        "run": str(run_dir),
        "result-hash": run.result() or None,
        "settings": about.model_dump(
            mode="json", include={"configuration", "primary_predictor", "moment", "versions", "changes"}
        ),
        "rounds": {"done": len(rounds), "wanted": about.last_round},
        "ended-with": run.error() or None,
        "accuracies": _accuracies(rounds),
        "majority": partition.majority,
        "costs": _costs(about, costs(rounds), partition.paper_scalars) if rounds else None,
        "warnings": [*about.warnings, *(rounds[-1].warnings if rounds else [])],
        "failures": list(_failures(rounds)),
    }
    return json.dumps(document, indent=1) + "\n"


def as_csv(run_dir: Path) -> str:
    """Return CSV with a line per client, round and predictor.

    The round is the one whose model was scored: 0 is before the first.

    Raises:
        PbflError: if there is no run, or it is damaged.
    """
    run = RunDirectory(run_dir)
    about, (rounds, clients) = run.record(), histories(run)
    points = client_series(rounds, clients)
    rows = (row for number, columns in points for row in _client_rows(about, number, columns))
    return csv_text([CLIENTS, *rows])


def _accuracies(rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    return {
        name: {title: _point(getattr(score, point)) for title, point in POINTS.items()}
        for name, score in scores(rounds).items()
    }


def _point(point: tuple[int, Accuracy] | None) -> dict[str, Any] | None:
    return None if point is None else {"round": point[0], **point[1].to_json()}


def _costs(about: RunRecord, costs: Costs, paper: float | None) -> dict[str, Any]:
    return {
        "clients": len(about.clients),
        "bytes": {
            way: {kind: sizes[name] for kind, name in SIZES.items()}
            for way, sizes in (("up", costs.up), ("down", costs.down))
        },
        "scalars-of-the-last-round": costs.scalars.to_json(),
        "scalars-by-the-papers-formula": paper,
        "seconds": costs.seconds,
        "seconds-of-clients": costs.steps,
        "peak-mb": costs.peak_mb,
        "gpu-mb": costs.gpu_mb,
    }


def _failures(rounds: Sequence[RoundRecord]) -> Iterator[dict[str, Any]]:
    for record in rounds:
        for failure in record.all_failures:
            yield {"round": record.round, **failure.to_json()}


def _client_rows(about: RunRecord, number: int, columns: ClientsRecord) -> Iterator[tuple[object, ...]]:
    clients = {client.client: client for client in about.clients}
    counters = zip(columns.client, columns.num_train, columns.num_test, columns.correct, strict=True)
    for client, train, tests, correct in counters:
        if not tests:
            continue
        who = (client, clients[client].name or clients[client].natural_id, clients[client].architecture)
        for name in in_order(correct):
            yield (number, *who, train, tests, name, correct[name], f"{correct[name] / tests:.6f}")
