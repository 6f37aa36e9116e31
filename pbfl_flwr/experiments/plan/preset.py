"""The resolved configuration of a run as a preset that ``pbfl run`` reads: ``pbfl run --dry-run``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pbfl_flwr.config import Scalar, Settings, parse
from pbfl_flwr.config.toml import toml
from pbfl_flwr.method import Method, resolved_moment, settings_in
from pbfl_flwr.methods import SECTIONS

OF_ONE_RUN = ("run-dir", "resume")  # keys that are not part of a preset


def as_preset(
    settings: Settings, method: Method[Any, Any, Any], requested: Mapping[str, Scalar], notes: Iterable[str]
) -> str:
    """Return the configuration as a preset in TOML: first the keys that differ from their defaults, then the rest.

    Args:
        settings: of the run, with the protocol applied.
        method: built from them.
        requested: the requested keys; other keys that differ from their defaults were set by the protocol.
        notes: warnings before the run, written as comments at the top.
    """
    predictor = settings.evaluation.predictor
    scored = method.primary_predictor if predictor == "auto" else predictor
    moment = resolved_moment(settings.evaluation, method)
    values = {key: value for key, value in settings.as_dict().items() if key not in OF_ONE_RUN}
    usual = parse({"method": settings.run.method}, SECTIONS).as_dict()
    different = [key for key, value in values.items() if key == "method" or value != usual.get(key)]
    by_protocol = [key for key in different if requested.get(key, "auto") == "auto" and key != "method"]
    lines = [
        *(f"# {line}" for note in notes for line in note.splitlines()),
        f"# the primary predictor is predictor '{scored}', {moment} local training",
        "",
        "# the method, and keys that differ from their defaults",
        *(toml({key: values[key]}).rstrip() for key in different if key not in by_protocol),
    ]
    if by_protocol:
        lines += ["", f"# keys that are auto, as resolved by protocol = '{settings.run.protocol}'"]
        lines += [toml({key: values[key]}).rstrip() for key in by_protocol]
    lines += ["", "# all other keys, at their defaults; auto follows the method or the data"]
    lines += [toml({key: values[key]}).rstrip() for key in values if key not in different]
    lines += [
        "",
        "# the method as it is built:",
        *(f"# {line}" for line in toml(settings_in(method)).splitlines()),
    ]
    return "\n".join(lines) + "\n"
