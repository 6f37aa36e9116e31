"""What a configuration lets the server and others see, from what payloads, methods and messages declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from pbfl_flwr.config import Settings
from pbfl_flwr.flower import roster, wire
from pbfl_flwr.methods import build_method, privacy_notes
from pbfl_flwr.payloads import Reveal
from pbfl_flwr.payloads.reveals import PRESENCE
from pbfl_flwr.prototypes.privacy import epsilon_of

MESSAGES = ("hello", "upload", "report", "broadcast")
STYLES = {"in clear": "red", "blurred": "yellow", "hidden": "green"}


def disclosures(settings: Settings) -> list[Reveal]:
    """Return everything that a client's messages, and the broadcast, tell under this configuration."""
    said = [*roster.REVEALS, *wire.REVEALS]
    if settings.privacy.client_report == "none":
        said = [one.but("hidden", "not sent") if "client-report" in one.hide else one for one in said]
    method = build_method(settings)
    found = [*said, *method.reveals()]
    if any(one.what == PRESENCE.what for one in found):
        dense = settings.privacy.dense_uploads or settings.privacy.secure_aggregation
        found.append(
            wire.SIZE.but("hidden", "every upload has a row for every class") if dense else wire.SIZE
        )
    return sorted(found, key=lambda one: MESSAGES.index(one.message))


def about(settings: Settings) -> dict[str, Any]:
    """Return the whole answer of ``pbfl privacy``, ready for JSON."""
    keys, method = settings.privacy, build_method(settings)
    answer: dict[str, Any] = {
        "method": method.name,
        "reveals": [asdict(one) for one in disclosures(settings)],
        "notes": privacy_notes(settings, method),
    }
    if keys.dp_noise:
        rounds = settings.run.num_server_rounds
        answer["epsilon"] = {
            "delta": keys.dp_delta,
            "unit": keys.dp_unit,
            "one release": epsilon_of(keys.dp_noise, 1, keys.dp_delta),
            f"{rounds} releases": epsilon_of(keys.dp_noise, rounds, keys.dp_delta),
            "covers": "the rows" if keys.dense_uploads else "the rows, given which classes are sent",
        }
    return answer


def table(reveals: Sequence[Mapping[str, str]]) -> Table:
    """Return what :func:`about` found, for the terminal."""
    found = Table(
        title="what a client's messages tell the server, and the broadcast all clients", title_justify="left"
    )
    for name in ("message", "what", "state", "how", "hidden by"):
        found.add_column(name, overflow="fold", no_wrap=name in ("message", "state"))
    last = ""
    for one in reveals:
        found.add_row(
            one["message"] if one["message"] != last else "",
            Text(one["what"]),
            Text(one["state"], STYLES[one["state"]]),
            Text(one["how"]),
            Text("" if one["state"] == "hidden" else one["hide"] or "nothing"),
        )
        last = one["message"]
    return found


def lines(answer: Mapping[str, Any]) -> list[str]:
    """Return what :func:`about` found beside the table."""
    found = list(answer["notes"])
    if "epsilon" in answer:
        cost = answer["epsilon"]
        spent = ", ".join(f"ε = {cost[name]:.3g} after {name}" for name in cost if "release" in name)
        covered = f"covers {cost['covers']}, not hello and report"
        found.append(f"noise: {spent} at δ = {cost['delta']:g}, unit {cost['unit']}; {covered}")
    return found
