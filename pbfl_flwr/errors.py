"""The one exception for everything a user can put right: a wrong key, missing data, an impossible shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class PbflError(Exception):
    """One clear line for the person at the keyboard: what is wrong, where, and what is allowed.

    Raised before anything starts. The command line prints the text without a traceback.
    """


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one line what the system refuses where something is to be written.

    Raises:
        PbflError: in the place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise PbflError(f"{path} cannot be written ({error.strerror or error})") from None
