"""``pbfl check-data``, ``vocabulary``, ``export`` and ``predict``: a device's data and model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import GIVEN, REFUSED, ended
from pbfl_flwr.errors import PbflError, expanded, writing
from pbfl_flwr.experiments.text.numbers import document, say, screen

SHELLS_OWN = '"$`\\!'  # special to a shell in double quotes
UNWRITABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # invalid in TOML, garbled by a terminal

DataPath = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="An .npz, CSV or Parquet file, an image folder, a PFLlib folder."),
]
Labels = Annotated[
    str, typer.Option("--labels", help="All class names, 'a,b,c', or a file with a name a line.")
]
LabelColumn = Annotated[str, typer.Option("--label-column", help="Column of a table that holds the classes.")]
InputShape = Annotated[
    str, typer.Option("--input-shape", help="'3,64,64': images are brought to it, rows of a table reshaped.")
]
TextColumn = Annotated[str, typer.Option("--text-column", help="Column of a table that holds the texts.")]
Code = Annotated[
    str,
    typer.Option(
        "--model", help="Allow this code, my_package.module:function, to be imported for the model."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check_data(
    path: DataPath,
    dataset: Annotated[
        str, typer.Option("--dataset", help="How it is read; default: by what lies there.")
    ] = "",
    labels: Labels = "",
    label_column: LabelColumn = "",
    input_shape: InputShape = "",
    text_column: TextColumn = "",
    vocabulary: Annotated[
        Path | None, typer.Option("--vocabulary", help="Of texts: the file with a token a line.")
    ] = None,
    files: Annotated[
        int | None, typer.Option("--data-client", min=0, help="Of a PFLlib folder, whose files.")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Try whether this architecture takes it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show what a device would bring: sizes, classes, split, and what would be refused (exit code 2)."""
    from pbfl_flwr.data import names_file
    from pbfl_flwr.data.inspection import inspect, settings_for
    from pbfl_flwr.models import check_models
    from pbfl_flwr.task import Task

    more = {
        "dataset": dataset,
        "labels": labels,
        "label-column": label_column,
        "input-shape": input_shape,
        "text-column": text_column,
    }
    found, refused = None, None
    try:
        more["vocabulary"] = str(expanded(vocabulary).absolute()) if vocabulary else ""
        settings = settings_for(path, **{key.replace("-", "_"): value for key, value in more.items()})
        found = inspect(settings, files)
        if model:
            check_models(model, Task(len(found.labels), 512, found.input_shape, found.vocabulary_size))
    except PbflError as error:
        refused = str(error)
    if as_json:
        known = {"path": str(path)} if found is None else found.as_dict()
        document(json.dumps({**known, "refused": refused}, indent=1) + "\n")
        if refused is not None:
            raise typer.Exit(REFUSED)
        return
    if found is not None:
        for line in found.lines():
            say(screen(), line)
    if found is None or refused is not None:
        raise ended(PbflError(f"refused: {refused}"))
    if (file := names_file(labels)) is not None:
        more["labels"] = str(file.absolute())
    keys = {"client-id": "NAME", "data-path": str(found.path), **more}
    say(screen(), f"ok: {_node_config({key: value for key, value in keys.items() if value})}")


def _node_config(keys: Mapping[str, str]) -> str:
    """Return a shell-quoted ``--node-config`` with these keys, or a message on the first key it cannot hold."""
    written = []
    for key, value in keys.items():
        if UNWRITABLE.search(value) or {"'", '"'} <= set(value):
            return (
                f"but --node-config cannot hold {key} = {value!r}: allowed are ' or \", not both, and no control "
                "characters; rename it"
            )
        quoted = '"' + value.replace("\\", "\\\\") + '"' if "'" in value else f"'{value}'"
        written.append(f"{key}={quoted}")
    text = " ".join(written)
    return "--node-config " + (shlex.quote(text) if set(text) & set(SHELLS_OWN) else f'"{text}"')


def vocabulary(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES...", help="CSV, TSV or Parquet with texts; .txt with one a line."),
    ],
    out: Annotated[Path, typer.Option("--out", click_type=GIVEN, metavar="FILE", help="A new file.")],
    most: Annotated[
        int, typer.Option("--most", min=5, help="Tokens, the four special ones among them.")
    ] = 32_000,
    text_column: TextColumn = "",
) -> None:
    """Make the vocabulary that devices with texts share: the most frequent tokens of texts that everybody may see."""
    from itertools import chain

    from pbfl_flwr.data import tokens
    from pbfl_flwr.data.texts import texts_of
    from pbfl_flwr.flower.storage.atomic_files import write_atomically

    try:
        if out.exists():
            raise PbflError(f"--out {out} is there already; allowed is a new file")
        words = tokens.vocabulary(chain.from_iterable(texts_of(file, text_column) for file in files), most)
        with writing(out):
            write_atomically(out, "".join(f"{word}\n" for word in words).encode())
    except PbflError as error:
        raise ended(error) from None
    say(screen(), f"{out}: {len(words)} tokens; give every device a copy (vocabulary='...' in --node-config)")


class Format(StrEnum):
    """Output formats of ``pbfl predict``."""

    table = "table"
    csv = "csv"
    json = "json"


def export(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A run, a device's state directory, or a state file.")
    ],
    out: Annotated[Path, typer.Option("--out", click_type=GIVEN, metavar="DIR", help="A new directory.")],
    client: Annotated[str, typer.Option("--client", metavar="ID", help="Number or name of the client.")] = "",
    model: Code = "",
    best: Annotated[
        bool, typer.Option("--best", help="As it was after the run's best round, where keep-best kept that.")
    ] = False,
    number: Annotated[
        int | None, typer.Option("--round", min=1, metavar="N", help="As it was after round N, likewise.")
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--global", help="The server's network instead: of FedAvg and others that average all of it."
        ),
    ] = False,
    like: Annotated[
        list[Path] | None,
        typer.Option(
            "--like",
            metavar="PATH",
            help="With --global, where the run holds no clients' states: a client's state or export. May be repeated.",
        ),
    ] = None,
) -> None:
    """Write a client's personalised model: safetensors, torch.export program, ONNX, prototypes, card."""
    from pbfl_flwr.serving import export as room
    from pbfl_flwr.serving.averaged import averaged

    console = screen()
    try:
        if best and number is not None:
            raise PbflError("--best and --round: allowed is one of the two")
        if whole and (client or number is not None):
            raise PbflError(
                "--global is the server's network; allowed with it are --best, --like and --model"
            )
        if like and not whole:
            raise PbflError("--like: allowed is with --global only")
        if whole:
            kept = averaged(
                expanded(path), [expanded(file) for file in like or ()], best=best, allowed_code=model
            )
        else:
            file = room.state_file(expanded(path), client)
            wanted = room.best_of(expanded(path)) if best else number
            kept = room.read_state(file if wanted is None else room.of_round(file, wanted))
        with writing(out):
            files = room.export(kept, expanded(out), model)
    except PbflError as error:
        raise ended(error) from None
    card, shape = kept.card, "x".join(map(str, kept.card.input_shape))
    say(
        console,
        f"{f'client {card.client}' if card.client else 'the server'}, {card.method}, {card.architecture} after round "
        f"{card.round}: inputs {shape}, "
        f"{card.num_classes} classes, d = {card.feature_dim}",
    )
    say(console, f"written to {out}: {', '.join(files)}")
    if room.ONNX not in files:
        say(console, "no ONNX: pip install 'pbfl-flwr[onnx]'")


def predict(
    model_dir: Annotated[Path, typer.Argument(metavar="EXPORTED", help="What pbfl export wrote.")],
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES...", help="Images, folders of images, .npz, CSV, Parquet, .txt."),
    ],
    by: Annotated[
        str, typer.Option("--by", help="head, or nearest prototype: global, global-local, local.")
    ] = "head",
    form: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.table,
    model: Code = "",
    text_column: TextColumn = "",
) -> None:
    """Print class and probability for every image, row and line."""
    from pbfl_flwr.serving.predict import open_exported, written
    from pbfl_flwr.serving.predict import predict as ask

    try:
        exported = open_exported(expanded(model_dir), model)
        found = list(ask(exported, files, by, text_column))
    except PbflError as error:
        raise ended(error) from None
    document(written(found, exported.card.labels, form.value))
