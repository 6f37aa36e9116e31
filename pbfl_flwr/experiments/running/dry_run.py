"""What a run would be, as a preset that ``pbfl run`` reads: ``pbfl run --dry-run``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pbfl_flwr.config import Scalar, Settings, parse
from pbfl_flwr.flower.engines.flwr_engine import toml
from pbfl_flwr.method import resolved_moment
from pbfl_flwr.methods import SECTIONS, build_method

PLACES = ("run-dir", "resume")  # of one run, not of a configuration


def page(settings: Settings, wishes: Mapping[str, Scalar], notes: Iterable[str]) -> str:
    """Return the whole configuration as TOML: what differs from the defaults, then the rest.

    Args:
        settings: of the run, protocol applied.
        wishes: what was asked for; what differs beyond it, the protocol has set.
        notes: what is said before a run starts; comments at the top.
    """
    method = build_method(settings)
    predictor = settings.evaluation.predictor
    scored = method.headline if predictor == "auto" else predictor
    moment = resolved_moment(settings.evaluation, method)
    values = {key: value for key, value in settings.as_dict().items() if key not in PLACES}
    usual = parse({"method": settings.run.method}, SECTIONS).as_dict()
    different = [key for key, value in values.items() if key == "method" or value != usual.get(key)]
    by_protocol = [key for key in different if wishes.get(key, "auto") == "auto" and key != "method"]
    lines = [
        *(f"# {line}" for note in notes for line in note.splitlines()),
        f"# the headline is predictor '{scored}', {moment} local training",
        "",
        "# the method, and what differs from the defaults",
        *(toml({key: values[key]}).rstrip() for key in different if key not in by_protocol),
    ]
    if by_protocol:
        lines += ["", f"# what protocol = '{settings.run.protocol}' makes of auto"]
        lines += [toml({key: values[key]}).rstrip() for key in by_protocol]
    lines += ["", "# all other keys, as they are by default; what is auto follows the method or the data"]
    lines += [toml({key: values[key]}).rstrip() for key in values if key not in different]
    return "\n".join(lines) + "\n"
