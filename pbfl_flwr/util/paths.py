"""Where files that outlast a run are stored on this machine."""

import os
from pathlib import Path

from pbfl_flwr.errors import expanded, reading


def home() -> Path:
    """Return the project's directory: the environment variable PBFL_HOME, else ~/.pbfl.

    Raises:
        PbflError: if there is neither PBFL_HOME nor a home directory.
    """
    return expanded(os.environ.get("PBFL_HOME") or "~/.pbfl").absolute()


def files_in(folder: Path, suffix: str) -> list[Path]:
    """Return the files with a suffix in a directory in ascending order, none if there is no such directory.

    Raises:
        PbflError: if it may not be read, unlike :meth:`Path.glob`, which takes it for empty.
    """
    with reading(str(folder)):
        return sorted(file for file in folder.iterdir() if file.suffix == suffix) if folder.is_dir() else []


def weights_file(architecture: str, label: str) -> Path:
    """Return the path of an architecture's pretrained weights under a label; the file need not exist.

    Args:
        architecture: a model's name, without "+" and classifier.
        label: of the weights.
    """
    return home() / "weights" / label / f"{architecture}.safetensors"


def stored_weights() -> dict[str, Path]:
    """Return the pretrained weights on this machine: model@label -> file."""
    files = sorted((home() / "weights").glob("*/*.safetensors"))
    return {f"{file.stem}@{file.parent.name}": file for file in files}


def run_directory(run_dir: str, run_id: int) -> Path:
    """Return the directory of a run; without run-dir both sides find the same one by Flower's run id."""
    return Path(run_dir) if run_dir else home() / "runs" / str(run_id)
