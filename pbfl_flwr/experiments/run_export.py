"""Export of a run: a JSON document, or CSV with a line per client, round and predictor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pbfl_flwr.config import PREDICTORS
from pbfl_flwr.experiments.results import client_series, participants, scores, series
from pbfl_flwr.experiments.show import rounds_of_new_client_lines
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.runs.directory import ERROR, RunDirectory, last_round

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
POINTS = {"last": "last", "best": "best", "validation-chosen": "chosen", "other-moment": "other"}


def as_json(run_dir: Path) -> str:
    """Return a run's settings, accuracies (from 0 to 1), costs and failures as a JSON document.

    Raises:
        PbflError: if there is no run, or it is damaged.
    """
    run = RunDirectory(run_dir)
    about, rounds = run.read(), run.rounds()
    new_client_lines = run.new_client_lines(len(rounds))
    error = run_dir / ERROR
    said = error.read_text(encoding="utf-8", errors="replace").strip() if error.exists() else None
    document = {
        "run": str(run_dir),
        "result-hash": run.result() or None,
        "settings": {
            key: about.get(key) for key in ("configuration", "primary_predictor", "moment", "versions")
        },
        "rounds": {"done": len(rounds), "wanted": last_round(about)},
        "ended-with": said,
        "accuracies": _accuracies(rounds),
        "new-clients": _of_new_clients(about, new_client_lines),
        "majority": {"clients": run.majority(), "new-clients": run.new_client_majority()},
        "costs": _costs(about, rounds, run.paper_scalars()) if rounds else None,
        "notes": rounds[-1].get("notes", []) if rounds else [],
        "failures": [*_failures(rounds), *_failures(new_client_lines)],
    }
    return json.dumps(document, indent=1) + "\n"


def as_csv(run_dir: Path) -> str:
    """Return CSV with a line per client, round and predictor; without malicious clients, as in all accuracies.

    The round is the one whose model was scored: 0 is before the first. New clients' own rounds are numbered on from
    the last round of the run.

    Raises:
        PbflError: if there is no run, or it is damaged.
    """
    run = RunDirectory(run_dir)
    about, rounds = run.read(), run.rounds()
    new_client_lines = run.new_client_lines(len(rounds))
    found = client_series(rounds, run.client_rounds())
    found += client_series(new_client_lines, [line["columns"] for line in new_client_lines])
    rows = tuple(row for number, line in found for row in _client_rows(about, number, line))
    return Sheet("", CLIENTS, rows).csv()


def _accuracies(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: {title: _point(getattr(score, point)) for title, point in POINTS.items()}
        for name, score in scores(rounds).items()
    }


def _point(point: tuple[int, Mapping[str, float]] | None) -> dict[str, Any] | None:
    return None if point is None else {"round": point[0], **point[1]}


def _of_new_clients(
    about: Mapping[str, Any], new_client_lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the new clients' rounds, and their accuracies by their own round number; None without new clients."""
    if not (wanted := rounds_of_new_client_lines(about)):
        return None
    after = new_client_lines[0]["after"] if new_client_lines else 0
    found: dict[str, list[dict[str, Any]]] = {}
    for number, accuracy in series(new_client_lines):
        for name, statistics in accuracy.items():
            found.setdefault(name, []).append({"round": number - after, **statistics})
    return {"rounds": {"done": len(new_client_lines), "wanted": wanted}, "accuracies": found}


def _costs(
    about: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], paper: float | None
) -> dict[str, Any]:
    """Return the cost per round: bytes and seconds are means over rounds, summed over clients."""
    ways = {"up": "bytes_up", "down": "bytes_down"}
    spent = {  # this and the memory are 0 if clients do not report them: client-report=none
        name: fmean(line["seconds"]["clients"][name] for line in rounds)
        for name in rounds[0]["seconds"]["clients"]
    }
    kinds = {"payload": "payload", "with-reports": "ours", "with-flower": "total"}
    return {
        "clients": participants(about),
        "bytes": {
            way: {kind: fmean(line[key][name] for line in rounds) for kind, name in kinds.items()}
            for way, key in ways.items()
        },
        "scalars-of-the-last-round": rounds[-1]["scalars"],
        "scalars-by-the-papers-formula": paper,
        "seconds": fmean(line["seconds"]["total"] for line in rounds),
        "seconds-of-clients": spent if any(spent.values()) else None,
        "peak-mb": max(line["peak_mb"] for line in rounds) or None,
        "gpu-mb": max(line.get("gpu_mb", 0.0) for line in rounds) or None,
    }


def _failures(rounds: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for entry in rounds:
        for failure in [*entry["failures"], *entry.get("final", {}).get("failures", [])]:
            yield {"round": entry["round"], "new-client": "after" in entry, **failure}


def _client_rows(about: Mapping[str, Any], number: int, line: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    members = {member["client"]: member for member in about["clients"]}
    trains = line.get("num_train", [""] * len(line["client"]))
    counters = zip(line["client"], trains, line["num_test"], line["correct"], strict=True)
    for client, train, tests, correct in counters:
        if client in about.get("malicious", []) or not tests:
            continue
        member = members[client]
        who = (str(client), str(member.get("name") or ""), str(member["architecture"]))
        for name in PREDICTORS:
            if name in correct:
                right = (name, str(correct[name]), f"{correct[name] / tests:.6f}")
                yield (str(number), *who, str(train), str(tests), *right)
