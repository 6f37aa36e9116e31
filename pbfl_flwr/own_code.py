"""Somebody's own code, named in the configuration as ``my_package.module:function``.

It runs with all rights and is only ever imported because a configuration names it; on a device only if its operator
does too (:mod:`pbfl_flwr.flower.device`).
"""

import importlib
import re
from collections.abc import Callable

from pbfl_flwr.errors import PbflError

SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_external(name: str) -> bool:
    """Return whether the name has the form ``my_package.module:function``; imports nothing."""
    return SPEC.fullmatch(name) is not None


def function_of(key: str, spec: str) -> Callable[..., object]:
    """Import the module and return the function. What the module itself raises is passed on as it is.

    Args:
        key: of the run configuration, for messages.
        spec: ``my_package.module:function``.

    Raises:
        PbflError: if there is no such module or function.
    """
    module_name, _, function_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PbflError(
            f"{key} = '{spec}': cannot import '{module_name}' ({error}); is it installed, or the directory that holds "
            "it in PYTHONPATH?"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise PbflError(f"{key} = '{spec}': '{module_name}' has no function '{function_name}'")
    found: Callable[..., object] = function
    return found
