"""``pbfl weights``: store pretrained weights on this machine, for the models of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.architectures import LABEL
from pbfl_flwr.cli.common import GIVEN, ended
from pbfl_flwr.errors import PbflError, expanded
from pbfl_flwr.experiments.text.numbers import kilobytes, say, screen
from pbfl_flwr.places import weights_file


def weights(
    label: Annotated[str, typer.Argument(metavar="LABEL", help="What they are called, e.g. imagenet.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Whose they are, e.g. resnet18.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            click_type=GIVEN,
            help="A .pth or .safetensors file: torchvision's for this model, or this project's own; or what "
            "`pbfl export` wrote.",
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Put them in the place of those that have this label.")
    ] = False,
) -> None:
    """Keep pretrained weights on this machine, with which the bodies of models=MODEL@LABEL then begin."""
    from pbfl_flwr.flower.storage.atomic_files import write_atomically
    from pbfl_flwr.models.checkpoints import as_file, body_of, check_takeable, read_checkpoint

    try:
        if not LABEL.fullmatch(label):
            raise PbflError(f"label '{label}': allowed are 1 to 64 letters, digits, '.', '_', '-'")
        check_takeable(model)
        kept = weights_file(model, label)
        if kept.exists() and not replace:
            raise PbflError(
                f"{model} has weights under the label '{label}' ({kept}); --replace overwrites them"
            )
        source = expanded(file)
        source = source / "model.safetensors" if source.is_dir() else source
        body = body_of(model, read_checkpoint(source), str(source))
        write_atomically(kept, content := as_file(body))
    except PbflError as error:
        raise ended(error) from None
    say(screen(), f"{kilobytes(len(content))} kept at {kept}; models={model}@{label} begins with them")
