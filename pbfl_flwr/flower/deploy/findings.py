"""The targets and findings of the checks of ``pbfl doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Status(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """The result of a check, one line of output.

    Attributes:
        what: subject of the check.
        status: its outcome.
        said: what was found; the fields are the keys of ``pbfl doctor --json``.
        advice: what to do; empty if nothing.
    """

    what: str
    status: Status
    said: str
    advice: str = ""


@dataclass(frozen=True)
class CheckTargets:
    """What to check; None skips a check.

    Attributes:
        superlink: HOST:PORT of the Fleet API.
        ca: certificate of the authority that signed the SuperLink's.
        key: the device's private key.
        control: HOST:PORT of the Control API.
        state_dir: the device's state directory.
        device: on which to train, as in the run-config key.
        insecure: expect a SuperLink without TLS.
    """

    superlink: str | None = None
    ca: Path | None = None
    key: Path | None = None
    control: str | None = None
    state_dir: Path | None = None
    device: str = "auto"
    insecure: bool = False
