"""``pbfl weights``: store pretrained weights on this machine, for the models of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import NON_EMPTY_PATH
from pbfl_flwr.errors import PbflError, expanded
from pbfl_flwr.experiments.console import kilobytes, say, screen
from pbfl_flwr.models.registry import LABEL
from pbfl_flwr.util.paths import weights_file


def weights(
    label: Annotated[str, typer.Argument(metavar="LABEL", help="Label for the weights, e.g. imagenet.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model of the weights, e.g. resnet18.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            click_type=NON_EMPTY_PATH,
            help="A .pth or .safetensors file from torchvision for this model or from this project, or a directory "
            "written by `pbfl export`.",
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace existing weights with this label.")
    ] = False,
) -> None:
    """Store pretrained weights on this machine, from which the bodies of models=MODEL@LABEL start."""
    from pbfl_flwr.models.checkpoints import as_file, body_of, check_takeable, read_checkpoint
    from pbfl_flwr.util.atomic_files import write_atomically

    if not LABEL.fullmatch(label):
        raise PbflError(f"label '{label}': must be 1 to 64 letters, digits, '.', '_', '-'")
    check_takeable(model)
    target = weights_file(model, label)
    if target.exists() and not replace:
        raise PbflError(
            f"{model} already has weights with the label '{label}' ({target}); choose another label, or --replace"
        )
    source = expanded(file)
    source = source / "model.safetensors" if source.is_dir() else source
    body = body_of(model, read_checkpoint(source), str(source))
    write_atomically(target, content := as_file(body))
    say(screen(), f"{kilobytes(len(content))} stored in {target}; use them with models={model}@{label}")
