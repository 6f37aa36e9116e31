"""What the doctor looks at, and what it says of a thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Status(StrEnum):
    """How a thing is."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One line of the answer.

    Attributes:
        what: was looked at.
        status: how it is.
        said: what was found.
        advice: what to do, empty if nothing.
    """

    what: str
    status: Status
    said: str
    advice: str = ""


@dataclass(frozen=True)
class Wanted:
    """What to look at; None leaves a thing out.

    Attributes:
        superlink: HOST:PORT of the Fleet API.
        ca: certificate of the authority that signed the SuperLink's.
        key: the device's private key.
        control: HOST:PORT of the Control API.
        state_dir: where the device keeps its state.
        device: what training should run on, as the run-config key.
        insecure: expect a SuperLink without TLS.
    """

    superlink: str | None = None
    ca: Path | None = None
    key: Path | None = None
    control: str | None = None
    state_dir: Path | None = None
    device: str = "auto"
    insecure: bool = False
