"""The models that clients keep: finds a client's state file, and reads the model in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from pbfl_flwr.errors import PbflError, abbreviate
from pbfl_flwr.payloads import part_of
from pbfl_flwr.runs.client_store import EXPERIMENT, ClientStore
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.saved_model import Card, fault
from pbfl_flwr.runs.tensor_files import load_tensors
from pbfl_flwr.util.atomic_files import NODE
from pbfl_flwr.util.paths import files_in

UNKEPT = "; a client's state is stored once it has trained, with FedAvg and its kind only if client-states = 'always'"
STATE = ".safetensors"
MAX_FILES = 100_000  # clients of a run


@dataclass(frozen=True)
class SavedModel:
    """A client's stored model: the card, the network's state, and the prototypes by predictor's name."""

    card: Card
    weights: dict[str, Tensor]
    prototypes: dict[str, Tensor]


def state_file(path: Path, client: str) -> Path:
    """Return the state file of a client.

    Args:
        path: the file itself, a run directory, a device's state directory, or one experiment in it.
        client: its number, name or natural id, of a directory; "" takes the only client.

    Raises:
        PbflError: if none or, without a client, several match, or a client of a file is asked for.
    """
    if path.is_file():
        if client:
            raise PbflError(
                f"--client {client}: {path} is the state of one client; name its directory, or no client"
            )
        return path
    folder = _experiment(path)
    place = folder if folder.is_dir() else path  # a run without states has no such folder
    if client:
        who: int | str = int(client) if client.isdecimal() else _numbers(path).get(client, client)
        homes = [folder, *_of_nodes(folder)]
        files = [file for home in homes if (file := ClientStore(home, "", who, "").path).is_file()]
        if not files:
            raise PbflError(f"{place} holds no client {client}; it holds {_shown(_in(folder))}{UNKEPT}")
        return files[0]
    files = _in(folder)
    if len(files) != 1:
        raise PbflError(
            f"{place} holds {_shown(files)}; {'select one with --client' if files else UNKEPT[2:]}"
        )
    return files[0]


def states_of(run: Path) -> list[Path]:
    """Return the last states of all clients in a run directory."""
    return _in(_experiment(run))


def _numbers(path: Path) -> dict[str, int]:
    """Return natural id -> number of a run's clients."""
    clients = RunDirectory(path).record().clients if (path / "run.json").is_file() else []
    return {client.natural_id: client.client for client in clients if client.natural_id}


def _in(folder: Path) -> list[Path]:
    found = (file for home in (folder, *_of_nodes(folder)) for file in files_in(home, STATE))
    if len(files := list(islice(found, MAX_FILES + 1))) > MAX_FILES:
        raise PbflError(f"{folder} holds more than {MAX_FILES} states")
    return sorted(files)


def _of_nodes(folder: Path) -> list[Path]:
    """Return the state directories of the devices of ``pbfl deploy local``, one each."""
    return sorted(folder.parent.glob(f"{NODE}*/{folder.name}"))


def _experiment(path: Path) -> Path:
    if (path / "run.json").is_file():
        record = RunDirectory(path).record()
        root = Path(str(record.configuration.get("state-dir") or path / "clients"))
        return root / record.experiment
    if not path.is_dir():
        raise PbflError(
            f"{path} does not exist; expected is a run directory, a state directory or a state file"
        )
    if files_in(path, STATE):
        return path
    runs = [folder for folder in path.iterdir() if EXPERIMENT.fullmatch(folder.name)]  # not lost+found
    folders = [folder for folder in runs if files_in(folder, STATE)]
    if not folders:
        raise PbflError(f"{path} holds neither a run nor client states{UNKEPT}")
    if len(folders) > 1:
        newest = sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)
        names = abbreviate([str(folder) for folder in newest])
        raise PbflError(f"{path} holds the states of several runs; choose one of them, newest first: {names}")
    return folders[0]


def _shown(files: Sequence[Path]) -> str:
    names = []
    for file in files:
        kind, _, rest = file.stem.partition("-")
        names.append(str(int(rest)) if kind == "client" and rest.isdecimal() else rest)
    return f"the clients {', '.join(names)}" if names else "no client"


def read_state(file: Path) -> SavedModel:
    """Read a client's state file.

    Raises:
        PbflError: if it is damaged, or lacks the card.
    """
    tensors, metadata = load_tensors(file)
    if not metadata.get("card"):
        raise PbflError(
            f"{file} does not describe its model's inputs: it is no client state, or is from a method whose "
            "clients predict with two networks (fedmrl), or from an app whose data lacks class names or normalisation "
            "by channel, or exceeds the limits of a card"
        )
    try:
        card = Card.model_validate_json(metadata["card"])
    except ValidationError as error:
        raise PbflError(f"{file}: its card is damaged ({fault(error)})") from None
    prototypes = part_of(tensors, "prototypes")
    for name in [key.removesuffix(".candidates") for key in prototypes if key.endswith(".candidates")]:
        if f"{name}.rows" not in prototypes:  # rows equal to the global ones are stored once
            if "global.rows" not in prototypes:
                raise PbflError(f"{file}: its prototypes '{name}' are missing")
            prototypes[f"{name}.rows"] = prototypes["global.rows"]
    return SavedModel(card, part_of(tensors, "model"), prototypes)
