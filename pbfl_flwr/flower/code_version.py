"""The version of pbfl-flwr's code that a process runs: that in the app sent by the server, or the installed one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import pbfl_flwr
from pbfl_flwr.runs.records import ClientRecord

# Parts of the package that are not sent to devices; same as fab-exclude in pyproject.toml.
NOT_SENT = ("flower/api.py", "cli", "experiments", "serving", "flower/engines", "flower/deploy", "testing")


@lru_cache(maxsize=1)
def code_version() -> str:
    """Return the version and a hash of the code that clients and servers run."""
    root = Path(pbfl_flwr.__file__).parent
    excluded = {root / part for part in NOT_SENT}
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        if excluded.isdisjoint({file, *file.parents}):
            name = file.relative_to(root)
            digest.update(f"{name.as_posix()} {file.stat().st_size} ".encode() + file.read_bytes())
    return f"{pbfl_flwr.__version__}-{digest.hexdigest()[:8]}"


def differing_code_versions(members: Iterable[ClientRecord]) -> list[str]:
    """Return a line for every code version that differs from the server's, with the clients that run it."""
    labels: dict[str, list[str]] = {}
    for member in members:
        if member.code_version and member.code_version != code_version():
            labels.setdefault(member.code_version, []).append(member.label)
    return [
        f"pbfl-flwr {other} on client {', '.join(clients)}, {code_version()} on the server: install the same one, or "
        "start the run with the app that brings its own code"
        for other, clients in labels.items()
    ]
