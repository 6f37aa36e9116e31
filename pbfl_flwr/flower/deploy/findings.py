"""The result of a check of a device or the server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


OK, WARNING, FAILED = Status


@dataclass(frozen=True)
class Finding:
    """The result of a check, one line of output.

    Attributes:
        what: subject of the check.
        status: its outcome.
        message: the result in words; the fields are the keys of ``pbfl doctor --json``.
        advice: what to do; empty if nothing.
    """

    what: str
    status: Status
    message: str
    advice: str = ""
