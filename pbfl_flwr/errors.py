"""PbflError, the exception for everything a user can fix: a wrong key, missing data, an invalid shape."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LONGEST = 500  # characters of foreign text (e.g. another library's message) in one of our lines
FEW = 5  # names listed in a message before "and N more"
OUT_OF_MEMORY_HINT = (
    "lower batch-size or eval-batch-size, or have fewer clients share a GPU (--gpus-per-client)"
)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "can't start new thread")  # of torch, of Python
# What may not pass from foreign text to a terminal, a log or a file: ANSI escape sequences, control characters, marks
# that change the direction of text or take no room, tags, halves of surrogate pairs (which cannot be encoded).
UNPRINTABLE = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]"
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
BREAKS = re.compile("[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+")  # where str.splitlines begins a line, and tabs


class PbflError(Exception):
    """An error that the user can fix; the message is one line: what is wrong, where, and what is allowed.

    The command line prints the message without a traceback.
    """


class QuotesData(PbflError):
    """An error whose text may quote a client's data, so that a device keeps it in its own log.

    Attributes:
        told: what the server is told instead.
    """

    def __init__(self, text: str, told: str = "") -> None:
        super().__init__(text)  # alone, for pickle, which sets the attribute itself
        self.told = f"{told}; see the device's log"


def printable(text: str, *, lines: bool = False) -> str:
    """Return text that came from elsewhere so that it can be shown, logged and handed on.

    It can neither steer a terminal, nor forge a line of a log, nor look like another text.

    Args:
        text: from another machine, a file, another library.
        lines: whether it may have several lines, and tabs; otherwise these become spaces.
    """
    if lines:
        return UNPRINTABLE.sub("", text).replace("\u2028", "\n").replace("\u2029", "\n")
    return UNPRINTABLE.sub("", BREAKS.sub(" ", text))


def in_utf8(what: str, text: str) -> str:
    """Return a text unchanged if it can be encoded as UTF-8, to be stored and sent.

    Raises:
        PbflError: if it cannot, e.g. a file name whose bytes are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PbflError(f"{what} = {text!r}: must be text in UTF-8; rename what has this name") from None
    return text


def pass_on_exit(error: BaseException) -> None:
    """Raise the SystemExit again with which Flower or Ray answers a signal, since it must end this process.

    One that user code raised, e.g. by ``sys.exit()``, is that code's error like any other.
    """
    if isinstance(error, SystemExit):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] in ("flwr", "ray"):
            raise error


def format_exception(error: BaseException, *, text: bool = True) -> str:
    """Return an unexpected error in one line, with the file and line that raised it.

    Args:
        error: that was raised.
        text: whether to include its text, which may quote data.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = type(error).__name__ + f": {' '.join(printable(text_of(error)).split())}" * text
    advice = f"; {OUT_OF_MEMORY_HINT}" if is_out_of_memory(error) else ""
    if isinstance(error, MemoryError) or any(each in text_of(error) for each in NO_MEMORY):
        advice = "; this machine has too little memory, or this process a limit on memory or threads"
    return f"{message[:LONGEST]} ({Path(frame.filename).name}:{frame.lineno}){advice}"


def text_of(error: BaseException) -> str:
    """Return the text of an unexpected error, which that of a user's code may be unable to give."""
    try:
        return str(error)
    except Exception as another:
        return f"its text raises {type(another).__name__}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a GPU ran out of memory: torch's own error, or that of a CUDA library."""
    messages = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED", "_DEVICE_ALLOCATION_FAILED")
    return type(error).__name__ == "OutOfMemoryError" or any(
        message in text_of(error) for message in messages
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of the system means that a disk, or the user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in DISK_FULL


def tells_full_disk(text: str) -> bool:
    """Whether the text of an error, ours or the system's, names a full disk as :func:`is_disk_full` means it."""
    return any(os.strerror(number) in text for number in DISK_FULL)


def abbreviate(names: Sequence[str], most: int = FEW) -> str:
    """Return the first names of a list, and how many more there are, in one line."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def expanded(path: Path | str) -> Path:
    """Return a path with ~ expanded to the home directory.

    Raises:
        PbflError: if the home directory is unknown, as in a container whose user has no entry in /etc/passwd.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0].removeprefix("~")
    if user:
        raise PbflError(
            f"'{path}': there is no user '{user}'; must be a path that does not start with '~{user}'"
        )
    raise PbflError(
        f"'{path}': this user has no home directory, neither in HOME nor in /etc/passwd; set the environment "
        "variable PBFL_HOME to a directory for this project's files, or set HOME"
    )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn errors raised while reading files into one line that names the file and where reading failed.

    Args:
        what: the thing that is read, for messages.

    Raises:
        PbflError: instead of an OSError, or of a LookupError, TypeError, ValueError, AttributeError or ArithmeticError,
            e.g. for a missing key.
        OSError: if a disk is full, which no reading can find.
    """
    try:
        yield
    except OSError as error:
        if is_disk_full(error):  # of what is written or printed meanwhile
            raise
        raise PbflError(f"{error.filename or what} cannot be read ({error.strerror or error})") from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PbflError(
            f"{what} is damaged, or was written by another version: {format_exception(error)}"
        ) from error


@contextmanager
def quoting_data(what: str) -> Iterator[None]:
    """Turn an error about a client's data into one whose text stays on a device.

    Args:
        what: the data that cannot be used, for the server.

    Raises:
        QuotesData: instead of a PbflError.
    """
    try:
        yield
    except PbflError as error:
        cause, kind = error.__cause__, ""
        if isinstance(cause, Exception) and cause.__traceback__:
            kind = f": {format_exception(cause, text=False)}"
        raise QuotesData(str(error), f"{what} cannot be used{kind}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError raised while writing into one line that names the path.

    Raises:
        PbflError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise PbflError(f"{path} cannot be written ({error.strerror or error})") from None
