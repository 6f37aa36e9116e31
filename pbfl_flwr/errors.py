"""The one exception for everything a user can put right: a wrong key, missing data, an impossible shape."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LONGEST = 500  # characters of what others say, in a line of ours
FEW = 5  # clients that a line names
TOO_FULL = "lower batch-size or eval-batch-size, or have fewer clients share a GPU (--gpus-per-client)"
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)  # a colour, or what else steers a terminal


class PbflError(Exception):
    """One clear line for the person at the keyboard: what is wrong, where, and what is allowed.

    Raised before anything starts. The command line prints the text without a traceback.
    """


class Unreadable(PbflError):
    """What the system does not let one read, whatever it holds."""


def printable(text: str) -> str:
    """Return text without control characters but tab and line feed: what others say must not steer a terminal."""
    return CONTROL.sub("", text)


def in_utf8(what: str, text: str) -> str:
    """Return a text that is to be written down and sent, as UTF-8.

    Raises:
        PbflError: if it has bytes in it that are none, as the name of a file may.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PbflError(f"{what} = {text!r}: allowed is a name in UTF-8; rename it") from None
    return text


def pointed(error: Exception) -> str:
    """Return in one line what nobody foresaw, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = f"{type(error).__name__}: {' '.join(printable(str(error)).split())}"
    advice = f"; {TOO_FULL}" if of_full_card(error) else ""
    return f"{said[:LONGEST]} ({Path(frame.filename).name}:{frame.lineno}){advice}"


def of_full_card(error: Exception) -> bool:
    """Whether a GPU had too little memory: torch's own complaint, or that of a library which asks CUDA itself."""
    said = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED", "_DEVICE_ALLOCATION_FAILED")
    return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in said)


def some(names: Sequence[str], most: int = FEW) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def expanded(path: Path | str) -> Path:
    """Return a path with ~ as the home directory that it stands for.

    Raises:
        PbflError: if nobody knows which one that is, as in a container whose user has no entry in /etc/passwd.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0].removeprefix("~")
    if user:
        raise PbflError(f"'{path}': there is no user '{user}'; allowed is a path that begins otherwise")
    raise PbflError(
        f"'{path}': this user has no home directory, neither in HOME nor in /etc/passwd; set the environment variable "
        "PBFL_HOME to a directory for what this project keeps, or set HOME"
    )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Say in one line that files hold something else than their reader takes, and where it noticed.

    Args:
        what: that is read.

    Raises:
        Unreadable: in the place of an OSError.
        PbflError: in the place of what Python says of a missing key, or of a value of another type.
    """
    try:
        yield
    except OSError as error:
        raise Unreadable(f"{error.filename or what} cannot be read ({error.strerror or error})") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PbflError(f"{what} is damaged, or of another version: {pointed(error)}") from error


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
