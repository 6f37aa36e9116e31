"""Hashes of users' code, by which a run's record says with which code it was made.

The source of ``my_package.module:function`` is the module's file and those of all modules that it imports, also inside
functions; without the standard library, installed packages and this package. Of an installed module only files of its
own top-level package count. Comments and layout do not count, nor does what is imported by a computed name.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path

from pbfl_flwr.errors import PbflError

INSTALLED = {"site-packages", "dist-packages"}
OURS = __name__.partition(".")[0]
# Attributes of an imported module's spec, of which a reload makes a new one.
HASH = "_pbfl_source_hash"  # of its source and that of all that it imports
SOURCE = "_pbfl_source"  # its own


def remember_source(module: str) -> None:
    """Keep the source with which a module, and what it imports, has been imported; the files may be edited later."""
    spec = _spec_of(module)
    if spec is None or hasattr(spec, HASH):
        return
    sources = _sources(module)
    setattr(spec, HASH, _hash(sources))
    for name, source in sources.items():
        imported = _spec_of(name)
        if imported is not None and not hasattr(imported, SOURCE):
            setattr(imported, SOURCE, source)


def _spec_of(module: str) -> ModuleSpec | None:
    """Return the spec of a module that is imported, None if it is not."""
    return getattr(sys.modules.get(module), "__spec__", None)


def code_hashes(names: Iterable[str]) -> dict[str, str]:
    """Return ``my_package.module:function`` -> hash of its source as this process has imported it, or would.

    Names without a source here are left out: of devices' own modules, and of ``__main__``.
    """
    hashes = {}
    for name in sorted(names):
        module = name.partition(":")[0]
        hashes[name] = getattr(_spec_of(module), HASH, None) or source_hash(module)
    return {name: found for name, found in hashes.items() if found}


def check_unedited(names: Iterable[str]) -> None:
    """Check that processes which are started now import the same code as this one.

    Raises:
        PbflError: naming code that was edited since this process imported it.
    """
    for name, imported in code_hashes(names).items():
        sources = _sources(name.partition(":")[0])
        edited = any(getattr(_spec_of(each), SOURCE, source) != source for each, source in sources.items())
        if edited or _hash(sources) != imported:
            raise PbflError(
                f"'{name}': its source was edited since this process imported it; start again, or reload what was "
                "edited and then what imports that"
            )


def source_hash(module: str) -> str:
    """Return the hash of a module's source as it is now; empty if there is none."""
    return _hash(_sources(module))


def _hash(sources: Mapping[str, bytes]) -> str:
    return hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:16] if sources else ""


def _sources(module: str) -> dict[str, bytes]:
    """Return the source of a module and of all that it imports, by their names."""
    own, waiting = module.partition(".")[0], [module]
    sources: dict[str, bytes] = {}
    while waiting:
        name = waiting.pop()
        if name in sources or (file := _file_of(name, own)) is None:
            continue
        with suppress(OSError):
            sources[name] = file.read_bytes()
            with suppress(SyntaxError, ValueError, RecursionError):  # a compiled module has no such source
                tree = ast.parse(sources[name])
                sources[name] = ast.unparse(tree).encode()
                package = name if file.name == "__init__.py" else name.rpartition(".")[0]
                for imported in _imported(tree, package):
                    parts = imported.split(".")
                    waiting += [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return sources


def _file_of(module: str, own: str) -> Path | None:
    """Return a module's file if it is a user's, or in the top-level package ``own``; imports nothing."""
    top, *below = module.split(".")
    if top in (OURS, "__main__") or (top != own and top in sys.stdlib_module_names):
        return None
    with suppress(ImportError, ValueError, AttributeError):  # of odd modules
        spec = find_spec(top)
        if spec is None:
            return None
        files = [Path(spec.origin)] if spec.origin and not below else []
        for place in spec.submodule_search_locations or [] if below else []:
            path = Path(place, *below)
            files += [path / "__init__.py", path.with_name(f"{path.name}.py")]
        found = next((file for file in files if file.is_file()), None)
        return found if found is not None and (top == own or not INSTALLED & {*found.parts}) else None
    return None


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the names of all modules, and of what may be one, that a module of a package imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # beyond the top-level package
                relative = "." * node.level + (node.module or "")
                origin = resolve_name(relative, package) if node.level else relative
                yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))
