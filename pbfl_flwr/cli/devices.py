"""``pbfl check-data``, ``weights``, ``export`` and ``predict``: a device's data and models."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from pbfl_flwr.cli.common import NON_EMPTY_PATH, REFUSED
from pbfl_flwr.errors import PbflError, expanded, writing
from pbfl_flwr.experiments.console import document, kilobytes, say, screen

SHELLS_OWN = '"$`\\!'  # special to a shell in double quotes
UNWRITABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # invalid in TOML, garbled by a terminal

DataPath = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        click_type=NON_EMPTY_PATH,
        help="An .npz, CSV or Parquet file, an image folder, a PFLlib folder.",
    ),
]
Labels = Annotated[
    str, typer.Option("--labels", help="All class names, 'a,b,c', or a file with one name per line.")
]
LabelColumn = Annotated[str, typer.Option("--label-column", help="Column of a table with the classes.")]
InputShape = Annotated[
    str,
    typer.Option("--input-shape", help="E.g. 3,64,64: images are resized to it, rows of a table reshaped."),
]
Code = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="MODULE:FUNCTION",
        help="Code that may be imported for the model; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check_data(
    path: DataPath,
    dataset: Annotated[
        str, typer.Option("--dataset", help="Data format; default: detected from the files.")
    ] = "",
    labels: Labels = "",
    label_column: LabelColumn = "",
    input_shape: InputShape = "",
    files: Annotated[
        int | None,
        typer.Option("--data-client", min=0, help="For a PFLlib folder: the client whose files to read."),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="Check that this architecture accepts the data.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check a device's data: sizes, classes, split, and errors that would refuse it (exit code 2)."""
    from pbfl_flwr.data import names_file
    from pbfl_flwr.data.own.inspection import inspect, settings_for
    from pbfl_flwr.models.build import check_models
    from pbfl_flwr.models.registry import architectures
    from pbfl_flwr.task import Task
    from pbfl_flwr.util.user_code import code_in

    more = {
        "dataset": dataset,
        "labels": labels,
        "label-column": label_column,
        "input-shape": input_shape,
    }
    inspection, refused, network = None, None, ""
    try:
        settings = settings_for(path, **{key.replace("-", "_"): value for key, value in more.items()})
        inspection = inspect(settings, files)
        if model:
            code = code_in([model])
            check_models(
                model,
                Task(len(inspection.labels), 512, inspection.input_shape, inspection.vocabulary_size),
                code,
            )
            network = architectures(model, code)[0]  # a device has one
    except PbflError as error:
        refused = str(error)
    if as_json:
        known = {"path": str(path)} if inspection is None else inspection.as_dict()
        document(json.dumps({**known, "refused": refused}, indent=1) + "\n")
        if refused is not None:
            raise typer.Exit(REFUSED)
        return
    if inspection is not None:
        for line in inspection.lines():
            say(screen(), line)
    if inspection is None or refused is not None:
        raise PbflError(f"refused: {refused}")
    if (file := names_file(labels)) is not None:
        more["labels"] = str(file.absolute())
    keys = {
        "client-id": "NAME",
        "data-path": str(inspection.path),
        "data-client": inspection.data_client,
        **more,
        "model": network,
    }
    say(
        screen(),
        f"ok: {_node_config({key: value for key, value in keys.items() if value not in (None, '')})}",
    )


def _node_config(keys: Mapping[str, str | int | None]) -> str:
    """Return a shell-quoted ``--node-config`` with these keys, or a message on the first key it cannot hold."""
    written = []
    for key, value in keys.items():
        if not isinstance(value, str):
            written.append(f"{key}={value}")
            continue
        if UNWRITABLE.search(value) or {"'", '"'} <= set(value):
            return (
                f"but --node-config cannot contain {key} = {value!r}: must be values without control characters "
                "and with only one of ' and \"; rename it"
            )
        quoted = '"' + value.replace("\\", "\\\\") + '"' if "'" in value else f"'{value}'"
        written.append(f"{key}={quoted}")
    text = " ".join(written)
    return "--node-config " + (shlex.quote(text) if set(text) & set(SHELLS_OWN) else f'"{text}"')


def weights(
    label: Annotated[str, typer.Argument(metavar="LABEL", help="Label for the weights, e.g. imagenet.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model of the weights, e.g. resnet18.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            click_type=NON_EMPTY_PATH,
            help="A .pth or .safetensors file with torchvision's weights of this model.",
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace existing weights with this label.")
    ] = False,
) -> None:
    """Store pretrained weights on this machine, from which the bodies of models=MODEL@LABEL start."""
    from pbfl_flwr.models.checkpoints import as_file, body_of, check_takeable, read_checkpoint
    from pbfl_flwr.models.registry import LABEL
    from pbfl_flwr.util.atomic_files import write_atomically
    from pbfl_flwr.util.paths import weights_file

    if not LABEL.fullmatch(label):
        raise PbflError(f"label '{label}': must be 1 to 64 letters, digits, '.', '_', '-'")
    check_takeable(model)
    target = weights_file(model, label)
    if target.exists() and not replace:
        raise PbflError(
            f"{model} already has weights with the label '{label}' ({target}); choose another label, or --replace"
        )
    source = expanded(file)
    body = body_of(model, read_checkpoint(source), str(source))
    write_atomically(target, content := as_file(body))
    say(screen(), f"{kilobytes(len(content))} stored in {target}; use them with models={model}@{label}")


def export(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            click_type=NON_EMPTY_PATH,
            help="A run, a device's state directory, or a state file.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", click_type=NON_EMPTY_PATH, metavar="DIR", help="A new directory.")
    ],
    client: Annotated[
        str, typer.Option("--client", metavar="ID", help="Number, name or natural id of the client.")
    ] = "",
    models: Code = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--global",
            help="Export the server's network instead, for methods that average all of it, e.g. FedAvg.",
        ),
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="With --global: as it was sent for the round with the best scores.")
    ] = False,
) -> None:
    """Export a client's personalised model: safetensors, torch.export program, ONNX, prototypes, model card."""
    from pbfl_flwr.serving import export as exporting
    from pbfl_flwr.serving import states
    from pbfl_flwr.serving.averaged import averaged

    console = screen()
    if whole and client:
        raise PbflError("--global with --client: options beside --global must be --best or --model")
    if best and not whole:
        raise PbflError("--best: must be used with --global")
    if whole:
        saved = averaged(expanded(path), best=best, allowed_code=frozenset(models or []))
    else:
        saved = states.read_state(states.state_file(expanded(path), client))
    with writing(out):
        files, notes = exporting.export(saved, expanded(out), frozenset(models or []))
    card, shape = saved.card, "x".join(map(str, saved.card.input_shape))
    who = f"client {card.natural_id or card.client}" if card.client else "the server"
    say(
        console,
        f"{who}, {card.method}, {card.architecture} after round "
        f"{card.round}: inputs {shape}, "
        f"{card.num_classes} classes, d = {card.feature_dim}",
    )
    say(console, f"written to {out}: {', '.join(files)}")
    for note in notes:
        say(console, note)


def predict(
    model_dir: Annotated[
        Path,
        typer.Argument(
            metavar="EXPORTED", click_type=NON_EMPTY_PATH, help="Directory written by pbfl export."
        ),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES...",
            click_type=NON_EMPTY_PATH,
            help="Images, folders of images, .npz, CSV, Parquet.",
        ),
    ],
    by: Annotated[
        str, typer.Option("--by", help="head, or nearest prototype: global, global-local, local.")
    ] = "head",
    form: Annotated[
        Literal["table", "csv", "json"], typer.Option("--format", help="Output format.")
    ] = "table",
    models: Code = None,
) -> None:
    """Print class and probability of every image or row."""
    from pbfl_flwr.serving.exported import open_exported
    from pbfl_flwr.serving.predict import predict as ask
    from pbfl_flwr.serving.predict import written

    exported = open_exported(expanded(model_dir), frozenset(models or []))
    predictions = list(ask(exported, files, by))
    document(written(predictions, exported.card.labels, form))
