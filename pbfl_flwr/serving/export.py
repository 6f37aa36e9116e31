"""Export a client's personalised model for use elsewhere.

::

    DIR/card.json               what it is: method, client, round, K, d, input shape, labels, normalisation, file hashes
        model.safetensors       the network's state, under its own names
        prototypes.safetensors  <predictor>.rows (K, d) and <predictor>.candidates (K,), where the method has prototypes
        model.pt2               torch.export program: raw inputs (B, ...) float32, or token ids (B, length) int64, ->
                                logits (B, K), features (B, d)
        model.onnx              the same, where the packages onnx and onnxscript are installed

The model is the one that the client kept after its last local training, or a server's
(:mod:`pbfl_flwr.serving.averaged`). Its global prototypes are those that the client received for that training, its
local ones the result of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from safetensors.torch import save

from pbfl_flwr.errors import PbflError, writing
from pbfl_flwr.payloads import separate
from pbfl_flwr.runs.saved_model import Card
from pbfl_flwr.serving.network import Served, rebuild
from pbfl_flwr.serving.states import SavedModel
from pbfl_flwr.util.atomic_files import create_private, make_directory, write_atomically
from pbfl_flwr.util.extras import lacking
from pbfl_flwr.util.user_code import explained

CARD, WEIGHTS, PROTOTYPES, PROGRAM, ONNX = (
    "card.json",
    "model.safetensors",
    "prototypes.safetensors",
    "model.pt2",
    "model.onnx",
)
FORMAT = 1


def export(model: SavedModel, directory: Path, allowed_code: frozenset[str] = frozenset()) -> list[str]:
    """Write the files and return their names.

    Args:
        model: see :func:`pbfl_flwr.serving.states.read_state`.
        directory: a new or an empty folder.
        allowed_code: see :func:`pbfl_flwr.serving.network.rebuild`.

    Raises:
        PbflError: if the directory holds files, or the network cannot be rebuilt or exported; then nothing of it is
            left.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PbflError(f"--out {directory} already holds files; must be a new directory")
    served = rebuild(model.card, model.weights, allowed_code, str(directory))
    made = not directory.exists()
    with writing(directory):
        make_directory(directory)
    with ExitStack() as undo:
        undo.callback(_remove, directory, made)
        names = _write(model, served, directory)
        undo.pop_all()
    return names


def lacking_for_onnx() -> str:
    """Return the line that says what to install to write ONNX; "" if it is written."""
    return lacking("ONNX", "onnx", "onnxscript")


def _remove(directory: Path, made: bool) -> None:
    with suppress(OSError):  # what others have put there meanwhile stays
        for name in (CARD, WEIGHTS, PROTOTYPES, PROGRAM, ONNX):
            (directory / name).unlink(missing_ok=True)
        if made:
            directory.rmdir()


def _write(model: SavedModel, served: Served, directory: Path) -> list[str]:
    write_atomically(directory / WEIGHTS, save(separate(model.weights)))
    if model.prototypes:
        write_atomically(directory / PROTOTYPES, save(separate(model.prototypes)))
    _programs(served, model.card, directory)
    hashes = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())
    }
    content = {"format": FORMAT, "card": model.card.model_dump(mode="json"), "sha256": hashes}
    write_atomically(directory / CARD, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return [CARD, *hashes]


def _programs(served: Served, card: Card, directory: Path) -> None:
    example = torch.zeros(2, *card.input_shape, dtype=torch.int64 if card.vocabulary_size else torch.float32)
    batch = {"inputs": {0: torch.export.Dim("batch", min=1)}}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that it lacks torchvision
    what = f"{card.architecture} cannot be exported as a torch.export program:"
    with warnings.catch_warnings(), explained(what, card.architecture):  # from torch's own code
        warnings.simplefilter("ignore")
        program = torch.export.export(served, (example,), dynamic_shapes=batch)
        with writing(directory):
            torch.export.save(program, create_private(directory / PROGRAM))
        if not lacking_for_onnx():
            onnx_program = torch.onnx.export(
                program,
                (),
                input_names=["inputs"],
                output_names=["logits", "features"],
                dynamic_shapes=batch,  # already in the program; sets the axis's name
                verbose=False,
            )
            assert onnx_program is not None
            with writing(directory):
                onnx_program.save(create_private(directory / ONNX))
