"""What the server says of a run in the log: before it starts, of a round, and after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from typing import Any

from flwr.common import log

from pbfl_flwr.config import Settings, announced
from pbfl_flwr.flower.server.replies import Outcome, Phase
from pbfl_flwr.method import Method
from pbfl_flwr.methods import privacy_notes
from pbfl_flwr.prototypes.attacks import malicious


def log_start(settings: Settings, method: Method[Any, Any, Any], num_rounds: int) -> None:
    """Say in one line what is about to happen, and what a person should hear beforehand."""
    run, models = settings.run, settings.models
    log(
        INFO,
        "%s: %s clients, %s, d=%s",
        method.name,
        f"{run.min_clients} to {run.num_clients}" if run.min_clients else run.num_clients,
        models.models,
        models.feature_dim,
    )
    said = [
        *settings.training.forewarnings(),
        *privacy_notes(settings, method),
        *method.forewarnings(num_rounds),
    ]
    for note in said:
        log(WARNING, "%s", note)


def log_experimental(settings: Settings) -> None:
    """Say which faults are injected and who lies on purpose."""
    if settings.run.faults:
        log(WARNING, "faults are injected: %s", settings.run.faults)
    if settings.run.attack:
        log(WARNING, "%s", announced(settings.run.attack, malicious(settings)))


def log_round(line: Mapping[str, Any], phase: Phase, outcome: Outcome) -> None:
    """Say what came late in a round, who failed, and its notes.

    Args:
        line: of rounds.jsonl.
        phase: what was sent.
        outcome: what came back.
    """
    number = line["round"]
    for client, item in outcome.late.items():
        said = item.reason or f"counts {item.weight:.3g}"
        log(
            INFO,
            "round %s: client %s, upload of round %s: %s",
            number,
            phase.called(client),
            item.round,
            said,
        )
    for client, reason in outcome.failures.items():
        log(WARNING, "round %s: client %s failed: %s", number, phase.called(client), reason)
    log_notes(number, line["notes"])


def log_notes(server_round: int, notes: Iterable[str]) -> None:
    """Say what is to be noted of a round."""
    for note in notes:
        log(WARNING, "round %s: %s", server_round, note)


def log_scores(line: Mapping[str, Any], headline: str, num_rounds: int) -> None:
    """Say how a finished round went.

    Args:
        line: of rounds.jsonl.
        headline: the predictor that is reported.
        num_rounds: of the run.
    """
    log(
        INFO,
        "round %s/%s: accuracy %s (%s), %s clients trained, %.1f s",
        line["round"],
        num_rounds,
        accuracy(line, headline),
        headline,
        len(line["trained"]),
        line["seconds"]["total"],
    )


def accuracy(line: Mapping[str, Any], headline: str) -> str:
    """Return a round's weighted accuracy in words, that of the last scoring where there was one."""
    scored = line.get("final", line)["accuracy"].get(headline)
    return f"{100 * scored['weighted']:.1f} %" if scored else "not scored yet"
