"""User-defined methods, named in the configuration as ``my_package.module:build``."""

from __future__ import annotations

import reprlib
import sys
from typing import Any, get_args

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.errors import PbflError, printable
from pbfl_flwr.method import Method, Moment
from pbfl_flwr.util.user_code import call_user_function, import_function, own_code

FUNCTIONS = tuple(name for name in vars(Method) if name[0] != "_" and callable(getattr(Method, name)))


def config_of(spec: str) -> type[Group] | None:
    """Import a method's module and return the class of its settings, ``Config``; None if it has none.

    Raises:
        PbflError: as :func:`~pbfl_flwr.util.user_code.import_function`.
    """
    import_function("method", spec)
    config = getattr(sys.modules[spec.partition(":")[0]], "Config", None)
    return config if isinstance(config, type) and issubclass(config, Group) else None


def build_external(settings: Settings) -> Method[Any, Any, Any]:
    """Import the module, check ``method-settings`` with its ``Config`` and call its builder with the settings.

    Raises:
        PbflError: if the module or builder is missing or raises, ``method-settings`` are invalid, or the result is no
            complete :class:`Method`, with attributes of the right kinds.
    """
    spec = own_code(settings.run.method, settings.code)
    if settings.run.method_settings:
        if (config := config_of(spec)) is None:
            raise PbflError(
                f"method-settings = {settings.run.method_settings!r}: '{spec}' takes no settings, since its module "
                "has no class Config(Group)"
            )
        parse_section(config, settings)
    method = call_user_function("method", spec, "settings", settings, kind=Method)  # type: ignore[type-abstract]
    stored = ("to_tensors", "from_tensors")
    declared = (
        (("name", "state", "down", "up"), method),
        (stored, getattr(method, "state", None)),
        ((*stored, "scalars"), getattr(method, "down", None)),
        ((*stored, "scalars", "classes", "magnitudes"), getattr(method, "up", None)),
    )
    for names, owner in declared:
        if lacking := [name for name in names if not hasattr(owner, name)]:
            of = owner if isinstance(owner, type) else type(owner)
            raise PbflError(f"method = '{spec}': {of.__name__} lacks the attribute {', '.join(lacking)}")
    _check_kinds(spec, method)
    return method


def _check_kinds(spec: str, method: Method[Any, Any, Any]) -> None:
    """Check what a method declares: most of it is only compared or iterated, so another kind would pass unseen."""
    declared = (
        (("name", "primary_predictor", "server_device"), _is_text, "a text"),
        (("state", "down", "up"), lambda value: isinstance(value, type), "a class"),
        (("predicts",), _are_names, 'a tuple of texts, of a single one ("head",)'),
        (
            ("moment",),
            lambda value: _is_text(value) and value in get_args(Moment),
            " or ".join(map(repr, get_args(Moment))),
        ),
        (
            ("same_architecture", "keeps_nothing", "unit_features"),
            lambda value: isinstance(value, bool),
            "True or False",
        ),
        (("uses",), _are_names, "a frozenset of texts"),
        (FUNCTIONS, callable, "a method"),
    )
    for names, fits, expected in declared:
        for name in names:
            if not fits(value := getattr(method, name)):
                raise PbflError(
                    f"method = '{spec}': {type(method).__name__}.{name} = {printable(reprlib.repr(value))}: must be "
                    f"{expected}"
                )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_names(value: object) -> bool:
    return isinstance(value, tuple | list | set | frozenset) and all(map(_is_text, value))
