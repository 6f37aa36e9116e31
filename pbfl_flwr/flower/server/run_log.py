"""The server's log lines: at the start of a run and for each round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from typing import Any

from flwr.common import log

from pbfl_flwr.config import Settings
from pbfl_flwr.flower.server.replies import Outcome, Phase
from pbfl_flwr.method import Method
from pbfl_flwr.methods import privacy_notes
from pbfl_flwr.prototypes.attacks import malicious


def log_start(settings: Settings, method: Method[Any, Any, Any], num_rounds: int) -> None:
    """Log the configuration in one line, and warnings about it."""
    run, models = settings.run, settings.models
    log(
        INFO,
        "%s: %s clients, %s, d=%s",
        method.name,
        f"{run.min_clients} to {run.num_clients}" if run.min_clients else run.num_clients,
        models.models,
        models.feature_dim,
    )
    warnings = [
        *settings.training.config_warnings(),
        *privacy_notes(settings, method),
        *method.config_warnings(num_rounds),
    ]
    for warning in warnings:
        log(WARNING, "%s", warning)


def log_experimental(settings: Settings) -> None:
    """Warn about injected faults and malicious clients."""
    if faults := settings.faults.injected():
        log(
            WARNING, "faults are injected: %s", ", ".join(f"{kind} {rate:g}" for kind, rate in faults.items())
        )
    if malicious_clients := malicious(settings):
        log(WARNING, "%s", settings.attack.notice(malicious_clients))


def log_round(line: Mapping[str, Any], phase: Phase, outcome: Outcome) -> None:
    """Log a round's late uploads, failures and notes.

    Args:
        line: of rounds.jsonl.
        phase: the messages sent.
        outcome: the result of the phase.
    """
    number = line["round"]
    for client, item in outcome.late.items():
        result = item.reason or f"counts {item.weight:.3g}"
        log(
            INFO,
            "round %s: client %s, upload of round %s: %s",
            number,
            phase.client_label(client),
            item.round,
            result,
        )
    for client, reason in outcome.failures.items():
        log(WARNING, "round %s: client %s failed: %s", number, phase.client_label(client), reason)
    log_notes(number, line["notes"])


def log_notes(server_round: int, notes: Iterable[str]) -> None:
    """Log the notes on a round."""
    for note in notes:
        log(WARNING, "round %s: %s", server_round, note)


def log_scores(line: Mapping[str, Any], primary_predictor: str, num_rounds: int) -> None:
    """Log the accuracy of a finished round.

    Args:
        line: of rounds.jsonl.
        primary_predictor: the predictor that is reported.
        num_rounds: of the run.
    """
    log(
        INFO,
        "round %s/%s: accuracy %s (%s), %s clients trained, %.1f s",
        line["round"],
        num_rounds,
        accuracy(line, primary_predictor),
        primary_predictor,
        len(line["trained"]),
        line["seconds"]["total"],
    )


def accuracy(line: Mapping[str, Any], primary_predictor: str) -> str:
    """Return a round's weighted accuracy as text, after the final scoring if there was one."""
    scored = line.get("final", line)["accuracy"].get(primary_predictor)
    return f"{100 * scored['weighted']:.1f} %" if scored else "not scored yet"
