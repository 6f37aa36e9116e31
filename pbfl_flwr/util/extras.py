"""What only an extra installs: a device has the base dependencies alone, and whatever needs more says so in one line.

Imports of these modules stand in the functions that need them, behind :func:`require`.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import cast

from pbfl_flwr.errors import PbflError, printable

EXTRAS = {  # module -> extra of pyproject.toml that installs it
    "torchvision": "experiments",
    "sklearn": "experiments",
    "scipy": "privacy",
    "pandas": "tables",
    "pyarrow": "parquet",
    "flwr_datasets": "flwr-datasets",
    "ray": "simulation",
    "matplotlib": "report",
    "jinja2": "report",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus_client": "prometheus",
}


def lacking(who: str, *modules: str) -> str:
    """Return the line that says what to install for the first of the modules that is not there; "" if all are.

    Args:
        who: what needs them, e.g. a key with its value, a command, a file.
        modules: keys of :data:`EXTRAS`; none is imported.
    """
    for module in modules:
        if find_spec(module) is None:
            return f"{who} needs {module}, which is not installed: pip install 'pbfl-flwr[{EXTRAS[module]}]'"
    return ""


def require(who: str, *modules: str) -> None:
    """Check that modules are installed.

    Args:
        who: see :func:`lacking`.
        modules: likewise.

    Raises:
        PbflError: saying what to install.
    """
    if line := lacking(who, *modules):
        raise PbflError(line)


def torchvision_for(who: str) -> ModuleType:
    """Return torchvision; the import takes 2 s, as long as torch's.

    Args:
        who: see :func:`lacking`.

    Raises:
        PbflError: if torchvision is not installed, or was built for another version of torch.
    """
    require(who, "torchvision")
    try:
        import torchvision
    except (ImportError, OSError, RuntimeError) as error:
        found = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchvision"))
        raise PbflError(
            f"{who} needs a torchvision that was built for the torch that is installed; found {found} "
            f"({printable(str(error))}); install both anew, from the same index"
        ) from None
    return cast(ModuleType, torchvision)
