"""User-defined methods, named in the configuration as ``my_package.module:build``."""

from __future__ import annotations

import sys
from typing import Any

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Method
from pbfl_flwr.util.user_code import call_user_function, import_function, own_code


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
            complete :class:`Method`.
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
    return method
