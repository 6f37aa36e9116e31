"""User code, named in the configuration as ``my_package.module:function``.

It runs with full rights, so a name becomes code only as a :class:`UserCode`, which :func:`own_code` makes of a name
that the owner of this process has allowed: by the configuration that was written here, on a device by its
``--node-config``. A name from a message or a file is a plain text, and nothing imports it.
"""

import importlib
import inspect
import os
import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from pbfl_flwr.errors import LONGEST, PbflError, pass_on_exit, printable, text_of
from pbfl_flwr.util.source_hash import remember_source

T = TypeVar("T")
SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class UserCode(str):
    """``my_package.module:function`` that this process may import; only :func:`own_code` makes one.

    It equals the plain text and is lost when it is written anywhere, so none comes out of a message or a file.
    """

    __slots__ = ()


def own_code(name: str, allowed: Collection[str]) -> str:
    """Return the name as a :class:`UserCode` if it has that form and is allowed, else unchanged.

    Args:
        name: of a function, or of anything else that a setting may name.
        allowed: names that the owner of this process has allowed, see :attr:`pbfl_flwr.config.Settings.code`.
    """
    return UserCode(name) if name in allowed and is_external(name) else str(name)


def code_in(texts: Iterable[object]) -> frozenset[str]:
    """Return all names of the form ``my_package.module:function`` in comma lists."""
    entries = (entry.strip() for text in texts if isinstance(text, str) for entry in text.split(","))
    return frozenset(entry for entry in entries if is_external(entry))


def is_external(name: str) -> bool:
    """Return whether the name has the form ``my_package.module:function``; imports nothing."""
    return SPEC.fullmatch(name) is not None


def interpreter() -> list[str]:
    """Return the words before ``-m`` that start a Python which imports modules from where this process does.

    The script ``pbfl`` does not import from its working directory, ``python -m`` would do it before all others.
    """
    return [sys.executable] if {"", os.getcwd()} & {*sys.path} else [sys.executable, "-P"]


def import_named(key: str, spec: str) -> object:
    """Import the module and return what is named there, None if there is no such name.

    Args:
        key: the configuration key, for messages.
        spec: ``my_package.module:name``, a :class:`UserCode`.

    Raises:
        PbflError: if it may not be imported here, there is no such module, or importing the module raises.
    """
    if not isinstance(spec, UserCode):
        raise PbflError(
            f"{key} = '{spec}' names code to import; a process imports only what its own configuration names, a device "
            "what its own --node-config names as model, as dataset or in allow-code"
        )
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PbflError(
            f"{key} = '{spec}': cannot import '{module_name}' ({text_of(error)}); is it installed, or is its directory "
            "in PYTHONPATH?"
        ) from error
    except (Exception, SystemExit) as error:  # user code may raise anything
        pass_on_exit(error)
        raise PbflError(
            f"{key} = '{spec}': importing '{module_name}' raised {describe_user_error(error, spec)}"
        ) from error
    remember_source(module_name)
    found: object = getattr(module, name, None)
    return found


def import_function(key: str, spec: str) -> Callable[..., object]:
    """Import the module and return the function.

    Args:
        key: the configuration key, for messages.
        spec: ``my_package.module:function``, a :class:`UserCode`.

    Raises:
        PbflError: as :func:`import_named`, or if there is no such function.
    """
    function = import_named(key, spec)
    module_name, _, function_name = spec.partition(":")
    if not callable(function) and module_name == "__main__":
        raise PbflError(
            f"{key} = '{spec}': '__main__' of this process has no function '{function_name}'; functions defined in "
            "a notebook or prompt exist only in that process: use one worker, or move the function to a file next "
            "to the notebook"
        )
    if not callable(function):
        raise PbflError(f"{key} = '{spec}': '{module_name}' has no function '{function_name}'")
    user_function: Callable[..., object] = function
    return user_function


def call_user_function(key: str, spec: str, what: str, *arguments: object, kind: type[T]) -> T:
    """Import the module, call the function and return its result.

    ``kind`` is the type that the result must have; the others as in :func:`called`.

    Raises:
        PbflError: as :func:`import_function` and :func:`called`, or if the result is of another type.
    """
    function = import_function(key, spec)
    result = called(function, key, spec, what, *arguments)
    try:
        return returned(function, result, kind)
    except PbflError as error:
        raise PbflError(f"{key} = '{spec}': {error}") from None


def called(function: Callable[..., T], key: str, spec: str, what: str, *arguments: object) -> T:
    """Call a user's function and return its result.

    Args:
        function: to call.
        key: the configuration key, for messages.
        spec: ``my_package.module:function``, for messages.
        what: names of the arguments, for messages.
        arguments: of the function.

    Raises:
        PbflError: if the function raises; a PbflError of its own is passed on unchanged.
    """
    name = spec.partition(":")[2]
    with explained(f"{key} = '{spec}': {name}({what}) raised", spec, function):
        return function(*arguments)


def place_of(function: object) -> str:
    """Return the file and line where a function, or the class of another callable object, is defined.

    It begins with a space, and is empty for code that was not written in Python.
    """
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__name__"):
        function = type(function).__call__ if callable(function) else None
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""


def returned(function: object, value: object, kind: type[T]) -> T:
    """Return what a function of a user's has returned.

    Args:
        function: that returned it.
        value: what it returned.
        kind: the type that it must have.

    Raises:
        PbflError: naming the function and where it is defined, if the value is of another type.
    """
    if not isinstance(value, kind):
        raise wrong_result(function, value, _with_article(kind.__name__))
    return value


def named(function: object) -> str:
    """Return the name of a function, or of the class of another callable object, and where it is defined."""
    return f"{getattr(function, '__qualname__', type(function).__name__)}{place_of(function)}"


def wrong_result(function: object, value: object, expected: str, part: str = "") -> PbflError:
    """Return the error for a function that returned something else than expected, or with such a ``part``."""
    plain = value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))
    found = printable(reprlib.repr(value)) if plain else _with_article(type(value).__name__)
    return PbflError(f"{named(function)} returned {part}{found}; must return {expected}")


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


@contextmanager
def explained(what: str, spec: str, function: object = None) -> Iterator[None]:
    """Within the context an exception of user code becomes one line.

    Args:
        what: its beginning, for example what was called.
        spec: as in :func:`describe_user_error`.
        function: that is called; its place is named if no user code is in the traceback.

    Raises:
        PbflError: instead of any other exception; its own are passed on unchanged.
    """
    try:
        yield
    except PbflError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        pass_on_exit(error)
        otherwise = "" if function is None else place_of(function)
        raise PbflError(f"{what} {describe_user_error(error, spec, otherwise)}") from error


def describe_user_error(error: BaseException, spec: str, otherwise: str = "") -> str:
    """Return an exception of user code in one line, with the last line of that code in the traceback.

    Args:
        error: the exception; it may come from a library that the user code called.
        spec: ``my_package.module:function``; all of ``my_package`` counts as user code.
        otherwise: replaces the location if no user code is in the traceback.
    """
    message = f"{type(error).__name__}: {' '.join(printable(text_of(error)).split())}"
    return message[:LONGEST].removesuffix(": ") + (user_line(error, spec) or otherwise)


def user_line(error: BaseException, spec: str) -> str:
    """Return the last line of user code in the traceback of an exception, as :func:`place_of` names one.

    It is empty if there is none; ``spec`` as in :func:`describe_user_error`.
    """
    package = re.split("[.:]", spec)[0]
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
            where = f" ({Path(frame.f_code.co_filename).name}:{line})"
    return where
