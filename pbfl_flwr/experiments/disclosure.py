"""What a configuration reveals to the server and to other clients, from declarations of payloads, methods, messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from pbfl_flwr.config import Settings
from pbfl_flwr.experiments.console import print_hanging, say
from pbfl_flwr.flower.messages import report, traffic
from pbfl_flwr.flower.server import handshake
from pbfl_flwr.methods import build_method, privacy_notes
from pbfl_flwr.payloads import Reveal
from pbfl_flwr.payloads.reveals import PRESENCE
from pbfl_flwr.prototypes.privacy import epsilon_of

MESSAGES = ("handshake", "upload", "report", "broadcast")
STYLES = {"in clear": "red", "blurred": "yellow", "hidden": "green"}


def disclosures(settings: Settings) -> list[Reveal]:
    """Return everything that a client's messages and the broadcast reveal under this configuration."""
    counted = settings.evaluation.per_class
    by_class = report.BY_CLASS if counted else report.BY_CLASS.but("hidden", "not sent")
    reveals = [*handshake.REVEALS, *report.REVEALS, by_class]
    if settings.privacy.client_report == "none":
        reveals = [one.but("hidden", "not sent") if "client-report" in one.hide else one for one in reveals]
    method = build_method(settings)
    reveals = [*reveals, *method.reveals()]
    if any(one.what == PRESENCE.what for one in reveals):
        dense = settings.privacy.dense_uploads
        reveals.append(
            traffic.SIZE.but("hidden", "every upload has a row for every class") if dense else traffic.SIZE
        )
    return sorted(reveals, key=lambda one: MESSAGES.index(one.message))


def about(settings: Settings) -> dict[str, Any]:
    """Return the complete result of ``pbfl privacy``, serialisable as JSON."""
    keys, method = settings.privacy, build_method(settings)
    answer: dict[str, Any] = {
        "method": method.name,
        "reveals": [asdict(one) for one in disclosures(settings)],
        "notes": privacy_notes(settings, method),
    }
    if keys.dp_noise:
        run = settings.run
        most = {run.num_server_rounds, *([run.new_client_rounds] if run.new_clients else [])}
        answer["epsilon"] = {
            "delta": keys.dp_delta,
            "unit": keys.dp_unit,
            "one release": epsilon_of(keys.dp_noise, 1, keys.dp_delta),
            **{
                f"{times} releases": epsilon_of(keys.dp_noise, times, keys.dp_delta) for times in sorted(most)
            },
            "covers": "the rows" if keys.dense_uploads else "the rows, given which classes are sent",
        }
    return answer


def show(answer: Mapping[str, Any], console: Console) -> None:
    """Print the result of :func:`about`: what each message reveals, in which form, and which setting hides it."""
    say(console, "what a client's messages reveal to the server, and the broadcast to all clients")
    indent = max(map(len, STYLES)) + 4
    last = ""
    for one in answer["reveals"]:
        if one["message"] != last:
            say(console, one["message"], "bold")
            last = one["message"]
        against = "" if one["state"] == "hidden" else f"; hidden by: {one['hide'] or 'no setting'}"
        text = f"{one['what']}: {one['how']}{against}"
        print_hanging(console, f"  {one['state']}", text, indent, STYLES[one["state"]])
    for line in answer["notes"]:
        say(console, line)
    if cost := answer.get("epsilon"):
        spent = ", ".join(f"ε = {cost[name]:.3g} after {name}" for name in cost if "release" in name)
        covered = f"covers {cost['covers']}, not handshake and report"
        say(console, f"noise: {spent} at δ = {cost['delta']:g}, unit {cost['unit']}; {covered}")
