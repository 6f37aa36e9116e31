"""Builds and checks a run's configuration from a preset and ``--set``, before anything is started."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from itertools import chain, count
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, StringConstraints, ValidationError

from pbfl_flwr.config import CHANGEABLE, GROUPS, HUB, DataSettings, Scalar, Settings, parse
from pbfl_flwr.config.toml import flatten, parse_toml
from pbfl_flwr.data import DATASETS, LoadedData, Partition, load_pool, names_file, read_names
from pbfl_flwr.data.clients import num_held_out
from pbfl_flwr.data.own.inspection import swapped_axes_warning
from pbfl_flwr.errors import PbflError, expanded, in_utf8, writing
from pbfl_flwr.experiments.results import named_code, resume_command
from pbfl_flwr.flower.engines.placement import Machine, Resources, places
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.models.registry import architecture_of, architectures
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.early_stopping import check_patience
from pbfl_flwr.sinks import check as check_sinks
from pbfl_flwr.util.atomic_files import make_directory
from pbfl_flwr.util.extras import require
from pbfl_flwr.util.user_code import code_in, is_external

if TYPE_CHECKING:  # imports torch, which commands that only read do not need
    from pbfl_flwr.method import Method

PATHS = ("run-dir", "state-dir", "data-dir")
TEXTS = frozenset[str]().union(*(group.text_keys() for group in GROUPS.values()))
PRESETS = "experiments/presets"
Schema = TypeVar("Schema", bound=BaseModel)
DirectoryName = Annotated[str, StringConstraints(pattern=r"^[^./\\\x00][^/\\\x00]*$")]


def presets() -> list[str]:
    """Return the names of the presets that come with the package."""
    return shipped(PRESETS)


@dataclass(frozen=True)
class RequestedKeys:
    """The requested keys of a run, flat and unparsed, and a line for each problem found while reading them."""

    values: dict[str, Scalar]
    problems: tuple[str, ...] = ()


def gather(preset: str | None, assignments: Iterable[str]) -> RequestedKeys:
    """Return the preset's keys, overridden by ``key=value`` assignments.

    Args:
        preset: a TOML file, or the name of a preset that comes with the package; nested tables become a.b.
        assignments: see :func:`value`.

    Raises:
        PbflError: if the preset cannot be read.
    """
    tables = {} if preset is None else read_toml("preset", preset, PRESETS)
    if "runs" in tables or "runs-of" in tables:
        raise PbflError(
            f"preset '{preset}' has several runs; must be the keys of one, else see `pbfl compare`"
        )
    requested = flatten(tables)
    problems = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            problems.append(f"--set {assignment}: must be key=value, e.g. --set num-server-rounds=5")
            continue
        requested[key.strip()] = value(key.strip(), text.strip())
    checked = scalars(requested)
    return RequestedKeys(checked.values, (*problems, *checked.problems))


def scalars(requested: Mapping[str, Any]) -> RequestedKeys:
    """Return the keys of a preset or of a row of a table, with a problem for each that is no scalar or names a run."""
    values: dict[str, Scalar] = {}
    problems = []
    for key, content in requested.items():
        if not isinstance(content, bool | int | float | str):
            problems.append(f"{key} = {content!r}: must be one number, true, false or text")
        else:
            values[key] = content
    if values.get("resume") is True:
        problems.append(
            "resume = true: names no run; give --resume RUN (compare, sweep and reproduce resume automatically)"
        )
    return RequestedKeys(absolute(values), tuple(problems))


def absolute(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the keys with absolute paths and the names in a file of ``labels``: workers run in other directories."""
    if (file := names_file(str(values.get("labels", "")))) is not None:
        values = {**values, "labels": read_names(file)}
    return {
        key: str(expanded(str(value)).absolute())
        if key in PATHS and not isinstance(value, bool) and value != "" and not str(value).startswith(HUB)
        else value
        for key, value in values.items()
    }


def check(requested: RequestedKeys) -> Settings:
    """Return the parsed configuration; all bad keys and unknown names are reported together.

    Raises:
        PbflError: one line per problem.
    """
    config, problems = requested.values, list(requested.problems)
    method, dataset, models = (config.get(key) for key in ("method", "dataset", "models"))
    names: list[Callable[[], object]] = []  # looked up also if other keys are wrong
    if isinstance(method, str) and method not in METHODS and not is_external(method):
        names.append(lambda: build_method(parse({"method": method})))
    if isinstance(dataset, str) and dataset not in DATASETS and not is_external(dataset):
        names.append(lambda: load_pool(DataSettings(dataset=dataset)))
    if isinstance(models, str):
        names.append(lambda: architectures(models))
    try:
        settings = parse(config, SECTIONS)
        build_method(settings)
    except PbflError as error:
        problems.append(str(error))
    for look_up in names:
        try:
            look_up()
        except PbflError as error:
            problems.append(str(error))
    if problems:
        raise PbflError("\n".join(dict.fromkeys(problems)))
    return settings


@dataclass(frozen=True)
class Checked:
    """What was built to check a configuration.

    Attributes:
        partition: of the data.
        method: of the run.
    """

    partition: Partition
    method: Method[Any, Any, Any]


def preflight(settings: Settings, resources: Resources | None, loaded: LoadedData) -> Checked:
    """Import the mods, load and partition the data, and try every architecture on it.

    Args:
        settings: of the run.
        resources: of its workers; None for devices, each of which has its own.
        loaded: where the data is kept, for the run.

    Raises:
        PbflError: one line on what does not fit.
    """
    from pbfl_flwr.flower.client.mods import configured_mods
    from pbfl_flwr.flower.server.roster import check_server_device
    from pbfl_flwr.models.build import check_models
    from pbfl_flwr.training.augmentation import check_augmentation

    clients = settings.run.num_clients
    if resources is not None:
        _check_resources(settings, resources)
    check_sinks(settings.run.sinks)
    configured_mods(settings)
    if settings.evaluation.auc:
        require("auc = true", "sklearn")
    if settings.privacy.dp_noise:
        require("dp-noise", "scipy")
    partition = loaded.partition(settings.data, clients)
    run, share = settings.run, settings.data.validation_share
    validated = any(num_held_out(len(split.train), share) for split in partition.splits)
    check_patience(run.patience, run.patience_on, validated=validated)
    pool = loaded.pool(settings.data)
    task = pool.task(settings.models.feature_dim)
    check_augmentation(settings.training.augmentation, task)
    models, code = settings.models.models, settings.code
    check_models(models, task, code)
    names = [architecture_of(models, client, code) for client in range(clients)]
    method = build_method(settings)
    check_server_device(method)
    method.check(task, names)
    return Checked(partition, method)


def data_warnings(settings: Settings, loaded: LoadedData) -> list[str]:
    """Return warnings about data that can be trained on but looks wrong."""
    mixed = swapped_axes_warning(loaded.pool(settings.data))
    return [f"data: {mixed}"] if mixed else []


def config_warnings(
    settings: Settings, requested: RequestedKeys, checked: Checked, loaded: LoadedData
) -> list[str]:
    """Return the warnings before a run: on data, keys without effect, training and method."""
    name = settings.run.method
    others = [
        key for key in requested.values if key.partition(".")[0] in METHODS and not key.startswith(f"{name}.")
    ]
    return [
        *(f"data: {note}" for note in checked.partition.notes),
        *data_warnings(settings, loaded),
        *(f"{key}: without effect, the method is '{name}'" for key in others),
        *training_warnings(settings, checked.method),
    ]


def training_warnings(settings: Settings, method: Method[Any, Any, Any]) -> list[str]:
    """Return the warnings on training and method before a run."""
    from pbfl_flwr import calls

    run = settings.run
    in_all = calls.warnings(method, run.num_server_rounds)
    in_few = calls.warnings(method, min(1 + run.patience, run.num_server_rounds)) if run.patience else []
    early = f"patience = {run.patience}: the run may end as early as one with"
    return [
        *settings.training.config_warnings(),
        *(f"{method.name}: {note}" for note in in_all),
        *(f"{method.name}: {early} {note}" for note in in_few if not in_all),
    ]


def check_allowed(source: str, allowed: Collection[str], *keys: Mapping[str, Scalar]) -> None:
    """Check that of the code that keys in files name, all may be imported here.

    Raises:
        PbflError: naming the rest, and the option that allows it.
    """
    if names := sorted(frozenset[str]().union(*map(named_code, keys)) - {*allowed}):
        options = " ".join(f"--import {name}" for name in names)
        raise PbflError(f"{source} names code to import; if it is yours: {options}")


def _is_below(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())


def resumed(
    run: Path, requested: RequestedKeys, allowed: Iterable[str] = (), *, devices: bool = False
) -> RequestedKeys:
    """Return the configuration with which to resume a run; CHANGEABLE keys may differ.

    Args:
        run: its directory, which somebody else may have written.
        requested: keys given here.
        allowed: code that may be imported although only run.json names it, as my_package.module:function.
        devices: whether it is one of SuperNodes.

    Raises:
        PbflError: if there is no run, if it is a run of devices and ``devices`` is False, if it names code or a
            state-dir elsewhere that are not given here, if it has more rounds than requested, if the changes would
            change the results, or if code was edited without new-code.
    """
    about = RunDirectory(run).record()
    if not devices and not about.simulated:
        raise PbflError(
            f"'{run}' is a run of devices with data of their own; resume it with {resume_command(run, about)}"
        )
    recorded = about.configuration
    if Path(str(requested.values.get("run-dir", run))).resolve() != run.resolve():
        raise PbflError("--resume and run-dir: a resumed run stays in its directory; give one of the two")
    check_allowed(f"'{run}'", {*allowed, *code_in(requested.values.values())}, recorded)
    state_dir = str(recorded.get("state-dir", ""))
    if state_dir and not {"state-dir"} & {*requested.values} and not _is_below(Path(state_dir), run):
        raise PbflError(
            f"'{run}': its clients keep their state elsewhere; if that is right: --set state-dir={quote(state_dir)}"
        )
    changed = RequestedKeys(
        {**recorded, "new-code": False, **requested.values, "run-dir": str(run), "resume": True},
        requested.problems,
    )
    wanted = check(changed)
    RunDirectory(run).check_states(wanted.run.state_dir)
    now, then = wanted.relevant(), check(RequestedKeys(recorded)).relevant()
    if now != then:
        different = [
            f"{key} = {value}" for key, value in requested.values.items() if now.get(key) != then.get(key)
        ]
        raise PbflError(
            f"{', '.join(different)}: cannot change when a run is resumed; only these can: "
            f"{', '.join(CHANGEABLE)}"
        )
    if (edited := about.edited) and not wanted.run.new_code:
        raise PbflError(
            f"{', '.join(edited)}: edited since the run was made; --set new-code=true goes on with it, and run.json "
            "says from which round on"
        )
    rounds = wanted.run.num_server_rounds
    if (done := RunDirectory(run).finished_rounds()) > rounds:
        raise PbflError(
            f"num-server-rounds = {rounds}: the run has {done} rounds already; must be {done} or more"
        )
    return changed


def is_complete(directory: RunDirectory, settings: Settings, done: int) -> bool:
    """Whether a run is finished and its ``done`` rounds are as many as requested, or it ended early with this patience.

    Without its result hash it is not: it was killed after its last round, and resuming settles it.
    """
    about, wanted = directory.record(), settings.run.num_server_rounds
    if about.ended_after is not None and (settings.run.patience, settings.run.patience_on) == (
        about.configuration.get("patience", 0),
        about.configuration.get("patience-on", "validation"),
    ):
        wanted = min(wanted, about.ended_after)
    return bool(directory.result()) and done == wanted


def run_directory(settings: Settings, wanted: Path | None) -> Path:
    """Return the absolute directory of a new run.

    Raises:
        PbflError: if it already holds a run, or it or a directory above is a file.
    """
    chosen = chosen_directory(settings, wanted)
    if chosen is None:
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{settings.run.method}-{settings.data.dataset}"
        return _unused(Path("runs").absolute() / name.replace(":", "-"))
    path = expanded(chosen).absolute()
    in_utf8("run-dir", str(path))
    check_no_file(f"run-dir = '{path}'", path)
    if (path / "run.json").exists():
        raise PbflError(
            f"run-dir = '{path}' already holds a run; choose another one, or --resume {quote(str(path))}"
        )
    return path


def check_no_file(what: str, path: Path) -> None:
    """Check that a directory can be made.

    Raises:
        PbflError: beginning with ``what``, if it or a directory above is a file.
    """
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise PbflError(f"{what}: {place} is a file; must be a directory")


def chosen_directory(settings: Settings, wanted: Path | None) -> Path | None:
    """Return the directory that the user chose for a run; None if it is named by date, method and dataset."""
    return wanted or (Path(settings.run.run_dir) if settings.run.run_dir else None)


def create_directory(directory: Path, *, chosen: bool) -> Path:
    """Create a run's directory and return it; if it exists by now and was not chosen, one with a number appended.

    Raises:
        PbflError: if it cannot be created.
    """
    created = directory
    with writing(directory):
        while True:
            try:
                make_directory(created, exist_ok=chosen)
                return created
            except FileExistsError:
                if chosen:
                    raise
                created = _unused(directory)


def _unused(path: Path) -> Path:
    """Return the path, with the lowest number from 2 appended that makes it unused if it exists."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(candidate for candidate in chain([path], numbered) if not candidate.exists())


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat keys of nested tables; later ones take precedence."""
    return {key: value for table in tables for key, value in flatten(table).items()}


def _check_resources(settings: Settings, resources: Resources) -> None:
    """Refuse resources for which Flower would start no worker."""
    if settings.training.device == "cuda" and not resources.gpus_per_client:
        raise PbflError("device = 'cuda': clients see no GPU; add --gpus-per-client, e.g. 0.25")
    if settings.training.device == "mps":
        from pbfl_flwr.flower.client.device import choose_device

        choose_device("mps")
    places(Machine.here(resources), resources)


def shipped(folder: str) -> list[str]:
    """Return the names of the TOML files in a folder of the package."""
    items = files("pbfl_flwr").joinpath(folder).iterdir()
    return sorted(item.name.removesuffix(".toml") for item in items if item.name.endswith(".toml"))


def read_toml(kind: str, name: str, folder: str) -> dict[str, Any]:
    """Return the tables of a TOML file, or of the file of this name in a folder of the package.

    Raises:
        PbflError: if it does not exist, cannot be read, or is not TOML.
    """
    path = expanded(name)
    if not path.is_file() and name not in (names := shipped(folder)):
        raise PbflError(f"{kind} '{name}': no such file; must be a TOML file or one of {', '.join(names)}")
    file = path if path.is_file() else files("pbfl_flwr").joinpath(folder, f"{name}.toml")
    try:
        return parse_toml(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise PbflError(f"{kind} '{name}' cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PbflError(f"{kind} '{name}' is not TOML: {error}") from None


def read_file(kind: str, name: str, folder: str, schema: type[Schema]) -> Schema:
    """Return a TOML file's content after checking its form; the arguments are those of :func:`read_toml`.

    Raises:
        PbflError: as :func:`read_toml`, and one line for everything that is not of this form.
    """
    known = ", ".join(field.alias or key for key, field in schema.model_fields.items())
    plain = {
        "extra_forbidden": f"unknown; must be one of {known}, and the runs' keys stand in tables",
        "string_pattern_mismatch": "must be the name of a directory, without / or \\ and with no . in front",
    }
    try:
        return schema.model_validate(read_toml(kind, name, folder))
    except ValidationError as error:
        raise PbflError(
            "\n".join(
                ": ".join(
                    [
                        f"{kind} '{name}'",
                        *filter(None, [".".join(map(str, line["loc"]))]),
                        plain.get(line["type"], line["msg"]),
                    ]
                )
                for line in error.errors()
            )
        ) from None


def value(key: str, text: str) -> Any:
    """Return the value of an assignment's right side: a TOML value, or else the text itself.

    The value of a key of texts is the text as it is written, unless that is a TOML text or list.
    """
    try:
        read = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if read.keys() != {"value"} or (key in TEXTS and not isinstance(read["value"], str | list)):
        return text
    return read["value"]
