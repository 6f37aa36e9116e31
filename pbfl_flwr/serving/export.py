"""Export a client's personalised model for use elsewhere.

::

    DIR/card.json               what it is: method, client, round, K, d, input shape, labels, normalisation, file hashes
        model.safetensors       the network's state, under its own names
        prototypes.safetensors  <predictor>.rows (K, d) and <predictor>.candidates (K,), where the method has prototypes
        model.pt2               torch.export program: raw inputs (B, ...) float32, or token ids (B, length) int64, ->
                                logits (B, K), features (B, d)
        model.onnx              the same, where the packages onnx and onnxscript are installed

A program that torch cannot make of the network is left out; nothing here reads it.

The model is the one that the client kept after its last local training, or a server's
(:mod:`pbfl_flwr.serving.averaged`). Its global prototypes are those that the client received for that training, its
local ones the result of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import textwrap
import warnings
from contextlib import ExitStack, redirect_stderr, suppress
from io import BytesIO, StringIO
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save

from pbfl_flwr.errors import LONGEST, PbflError, pass_on_exit, printable, text_of, writing
from pbfl_flwr.payloads import separate
from pbfl_flwr.runs.saved_model import Card
from pbfl_flwr.serving.network import Served, rebuild
from pbfl_flwr.serving.states import SavedModel
from pbfl_flwr.util.atomic_files import create_private, make_directory, write_atomically
from pbfl_flwr.util.extras import lacking
from pbfl_flwr.util.user_code import explained, user_line

CARD, WEIGHTS, PROTOTYPES, PROGRAM, ONNX = (
    "card.json",
    "model.safetensors",
    "prototypes.safetensors",
    "model.pt2",
    "model.onnx",
)
FORMAT = 1


class Written(NamedTuple):
    """What an export has written.

    Attributes:
        files: their names.
        notes: why a program is not among them, a line each.
    """

    files: list[str]
    notes: list[str]


def export(model: SavedModel, directory: Path, allowed_code: frozenset[str] = frozenset()) -> Written:
    """Write the files.

    Args:
        model: see :func:`pbfl_flwr.serving.states.read_state`.
        directory: a new or an empty folder.
        allowed_code: see :func:`pbfl_flwr.serving.network.rebuild`.

    Raises:
        PbflError: if the directory holds files or cannot be written, or the network cannot be rebuilt; then nothing of
            it is left.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PbflError(f"--out {directory} already holds files; must be a new directory")
    served = rebuild(model.card, model.weights, allowed_code, str(directory))
    made = not directory.exists()
    with writing(directory):
        make_directory(directory)
    with ExitStack() as undo:
        undo.callback(_remove, directory, made)
        written = _write(model, served, directory)
        undo.pop_all()
    return written


def lacking_for_onnx() -> str:
    """Return the line that says what to install to write ONNX; "" if it is written."""
    return lacking("ONNX", "onnx", "onnxscript")


def _remove(directory: Path, made: bool) -> None:
    with suppress(OSError):  # what others have put there meanwhile stays
        for name in (CARD, WEIGHTS, PROTOTYPES, PROGRAM, ONNX):
            (directory / name).unlink(missing_ok=True)
        if made:
            directory.rmdir()


def _write(model: SavedModel, served: Served, directory: Path) -> Written:
    write_atomically(directory / WEIGHTS, save(separate(model.weights)))
    if model.prototypes:
        write_atomically(directory / PROTOTYPES, save(separate(model.prototypes)))
    notes = _programs(served, model.card, directory)
    hashes = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())
    }
    content = {"format": FORMAT, "card": model.card.model_dump(mode="json"), "sha256": hashes}
    write_atomically(directory / CARD, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return Written([CARD, *hashes], notes)


def _programs(served: Served, card: Card, directory: Path) -> list[str]:
    """Write the programs and return why one of them cannot be made, a line each."""
    example = torch.zeros(2, *card.input_shape, dtype=torch.int64 if card.vocabulary_size else torch.float32)
    batch = {"inputs": {0: torch.export.Dim("batch", min=1)}}
    for name in ("torch.fx", "torch.onnx"):  # they warn of what is refused, and that torchvision is lacking
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():  # from torch's own code
        warnings.simplefilter("ignore")
        stored = BytesIO()
        try:
            with redirect_stderr(StringIO()):  # where torch prints the graph that it could not finish
                program = torch.export.export(served, (example,), dynamic_shapes=batch)
                torch.export.save(program, stored)
        except (Exception, SystemExit) as error:  # the network's code and torch's may raise anything
            pass_on_exit(error)
            return [f"no {PROGRAM}, {ONNX}: torch.export refuses {_refusal(card.architecture, error)}"]
        write_atomically(directory / PROGRAM, stored.getvalue())
        if line := lacking_for_onnx():
            return [line]
        try:
            onnx_program = torch.onnx.export(
                program,
                (),
                input_names=["inputs"],
                output_names=["logits", "features"],
                dynamic_shapes=batch,  # already in the program; sets the axis's name
                verbose=False,
            )
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__:  # the texts around it say how to report it to torch
                cause = cause.__cause__
            return [f"no {ONNX}: torch.onnx.export refuses {_refusal(card.architecture, cause)}"]
        assert onnx_program is not None
        what = f"{card.architecture} cannot be written as {ONNX}:"
        with explained(what, card.architecture), writing(directory):
            onnx_program.save(create_private(directory / ONNX))
    return []


def _refusal(architecture: str, error: BaseException) -> str:
    """Return the network and the first line of torch's reason, without its advice on torch's own settings."""
    reason, *_ = re.split(r"\n| For more information", text_of(error).strip(), maxsplit=1)
    if "Constraints violated (batch)" in reason:
        reason += " It must take any number of samples, as x.shape[0], not len(x)"
    line = textwrap.shorten(printable(f"{type(error).__name__}: {reason}"), LONGEST, placeholder=" ...")
    return f"{architecture}: {line.removesuffix(':')}{user_line(error, architecture)}"
