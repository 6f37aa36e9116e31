"""From a preset and ``--set`` to a configuration that is known to work, before anything is started."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.resources import files
from itertools import chain, count
from pathlib import Path
from shlex import quote
from typing import Any

from pbfl_flwr.architectures import architecture_of, architectures, check_named, fresh
from pbfl_flwr.config import CHANGEABLE, DataSettings, Scalar, Settings, parse
from pbfl_flwr.data import DATASETS, Partition, check_data, load_pool
from pbfl_flwr.data.windows import mixed_up
from pbfl_flwr.errors import PbflError, expanded, in_utf8, writing
from pbfl_flwr.experiments.running.runner import go_on_with, simulated
from pbfl_flwr.flower.engines.placement import Machine, Resources, places
from pbfl_flwr.flower.storage.history import ENDED, RunDirectory
from pbfl_flwr.methods import METHODS, SECTIONS, build_method, privacy_notes
from pbfl_flwr.own_code import is_external
from pbfl_flwr.sinks import check as check_sinks

PATHS = ("run-dir", "state-dir", "data-dir")
PRESETS = "experiments/presets"


def presets() -> list[str]:
    """Return the names of the presets that come with the package."""
    return shipped(PRESETS)


@dataclass(frozen=True)
class Wishes:
    """What a person asked for: the keys that differ from the defaults, and what could not be read.

    Attributes:
        values: flat kebab-case keys.
        problems: one line each.
    """

    values: dict[str, Scalar]
    problems: tuple[str, ...] = ()


def gather(preset: str | None, assignments: Iterable[str]) -> Wishes:
    """Return the preset's keys, overridden by ``key=value`` assignments.

    Args:
        preset: a TOML file, or the name of a preset that comes with the package; nested tables become a.b.
        assignments: a value is read as a TOML scalar; a bare word is a string.

    Raises:
        PbflError: if the preset cannot be read.
    """
    found = flatten(read_toml("preset", preset, PRESETS)) if preset else {}
    problems = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            problems.append(f"--set {assignment}: allowed is key=value, e.g. --set num-server-rounds=5")
            continue
        found[key.strip()] = value(text.strip())
    values: dict[str, Scalar] = {}
    for key, given in found.items():
        if not isinstance(given, bool | int | float | str):
            problems.append(f"{key} = {given!r}: allowed is one number, true, false or text")
        else:
            values[key] = given
    if values.get("resume") is True:
        problems.append(
            "resume = true: of which run? allowed is --resume RUN (compare, sweep and reproduce go on by themselves)"
        )
    return Wishes(absolute(values), tuple(problems))


def absolute(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the keys with paths made absolute, since the workers run in other directories."""
    return {
        key: str(expanded(str(value)).absolute())
        if key in PATHS and not isinstance(value, bool) and value != ""
        else value
        for key, value in values.items()
    }


def check(wishes: Wishes) -> Settings:
    """Return the parsed configuration; all bad keys and unknown names are found at once.

    Raises:
        PbflError: one line each.
    """
    config, problems = wishes.values, list(wishes.problems)
    settings = Settings()
    try:
        settings = parse(config, SECTIONS)
        build_method(settings)
    except PbflError as error:
        problems.append(str(error))
    if not any(line.startswith("method = ") for line in problems):
        problems += _unknown_method(config.get("method"))
    problems += _complaint(lambda: check_named(settings.training))
    problems += _unknown_dataset(config.get("dataset")) + _unknown_model(config.get("models"))
    if problems:
        raise PbflError("\n".join(problems))
    return settings


def preflight(settings: Settings, resources: Resources) -> Partition:
    """Load and deal the data, try every architecture on it, and return the partition.

    Raises:
        PbflError: one line on what does not fit.
    """
    from pbfl_flwr.augmentation import check_augmentation
    from pbfl_flwr.models import build_model, check_models
    from pbfl_flwr.replay import check_layers, check_replayable

    clients = settings.run.num_clients
    _check_resources(settings, resources)
    check_sinks(settings.run.sinks)
    partition = check_data(settings.data, clients)
    pool = load_pool(settings.data)
    task = pool.task(settings.models.feature_dim)
    check_augmentation(settings.training.augmentation, task)
    check_models(settings.models.models, task)
    names = [architecture_of(settings.models.models, client) for client in range(clients)]
    method = build_method(settings)
    method.check(task, names)
    check_replayable(settings.training.compile, method.name, method.replayable)
    if settings.training.compile == "cuda-graph":
        for name in dict.fromkeys([*names, *method.beside()]):
            check_layers(name, build_model(fresh(name), task, 0))
    return partition


def suspicions(settings: Settings) -> list[str]:
    """Return what looks wrong with the data though they can be trained on."""
    mixed = mixed_up(load_pool(settings.data))
    return [f"data: {mixed}"] if mixed else []


def forewarnings(settings: Settings, wishes: Wishes, partition: Partition) -> list[str]:
    """Return what is said before a run starts: of the data, of keys without effect, of privacy, of the method."""
    method = build_method(settings)
    name = settings.run.method
    others = [key for key in wishes.values if "." in key and not key.startswith(f"{name}.")]
    return [
        *(f"data: {note}" for note in partition.notes),
        *suspicions(settings),
        *(f"{key}: without effect, the method is '{name}'" for key in others),
        *(f"privacy: {note}" for note in privacy_notes(settings, method)),
        *of_training(settings),
    ]


def of_training(settings: Settings) -> list[str]:
    """Return what a person should hear of the training and the method before a run starts, also as one of many."""
    method, run = build_method(settings), settings.run
    in_all = method.forewarnings(run.num_server_rounds)
    in_few = method.forewarnings(min(1 + run.patience, run.num_server_rounds)) if run.patience else []
    early = f"patience = {run.patience}: the run may end as early as one with"
    return [
        *settings.training.forewarnings(),
        *(f"{method.name}: {note}" for note in in_all),
        *(f"{method.name}: {early} {note}" for note in in_few if not in_all),
    ]


def resumed(run: Path, wishes: Wishes, *, devices: bool = False) -> Wishes:
    """Return the configuration of a run that is to go on.

    Args:
        run: its directory.
        wishes: what is to differ; only how far to go and how long to wait may.
        devices: whether SuperNodes are to go on with it, not the simulation engine.

    Raises:
        PbflError: if there is no run, if it is one of devices and they are not to go on with it, if it has more rounds
            than are wanted, or if the changes would give other results.
    """
    about = RunDirectory(run).read()
    RunDirectory(run).check_states()
    if not devices and not simulated(about):
        raise PbflError(
            f"'{run}' is a run of devices with data of their own; go on with {go_on_with(run, about)}"
        )
    recorded: dict[str, Scalar] = about["configuration"]
    kept = recorded.get("state-dir", "")  # the clients' own networks; elsewhere they would begin anew
    if (state_dir := wishes.values.get("state-dir", kept)) != kept:
        raise PbflError(
            f"state-dir = '{state_dir}': a resumed run keeps its clients' state where it is, "
            f"{f'state-dir = {kept!r}' if kept else 'in its own directory'}"
        )
    changed = Wishes({**recorded, **wishes.values, "run-dir": str(run), "resume": True}, wishes.problems)
    wanted = check(changed)
    now, then = wanted.relevant(), check(Wishes(recorded)).relevant()
    if now != then:
        different = [
            f"{key} = {value}" for key, value in wishes.values.items() if now.get(key) != then.get(key)
        ]
        raise PbflError(
            f"{', '.join(different)}: a resumed run keeps what changes its results; allowed are {', '.join(CHANGEABLE)}"
        )
    rounds = wanted.run.num_server_rounds
    if (done := len(RunDirectory(run).rounds())) > rounds:
        raise PbflError(
            f"num-server-rounds = {rounds}: the run has {done} rounds already; allowed is from there"
        )
    return changed


def complete(run: Path, settings: Settings) -> bool:
    """Whether a run came to its end and has all the rounds that are wanted."""
    there = RunDirectory(run)
    about, wanted = there.read(), settings.run.num_server_rounds
    if settings.run.patience == about["configuration"].get("patience", 0):
        wanted = min(wanted, about.get(ENDED, wanted))
    return bool(there.result()) and len(there.rounds()) == wanted


def run_directory(settings: Settings, wanted: Path | None) -> Path:
    """Return where a new run is written, absolute.

    Raises:
        PbflError: if there is a run already.
    """
    chosen = chosen_directory(settings, wanted)
    if chosen is None:
        name = (
            f"{datetime.now():%Y%m%d-%H%M%S}-{settings.run.method.replace(':', '-')}-{settings.data.dataset}"
        )
        return _unused(Path("runs").absolute() / name)
    path = expanded(chosen).absolute()
    in_utf8("run-dir", str(path))
    if (path / "run.json").exists():
        raise PbflError(
            f"run-dir = '{path}' already holds a run; choose another one, or --resume {quote(str(path))}"
        )
    return path


def chosen_directory(settings: Settings, wanted: Path | None) -> Path | None:
    """Return the directory that a person chose for a run; None where it gets one by date and name."""
    return wanted or (Path(settings.run.run_dir) if settings.run.run_dir else None)


def made(directory: Path, *, chosen: bool) -> Path:
    """Make a run's directory and return it: another one if nobody chose it and somebody has made it since.

    Raises:
        PbflError: if it cannot be made.
    """
    found = directory
    with writing(directory):
        while True:
            try:
                found.mkdir(parents=True, exist_ok=chosen)
                return found
            except FileExistsError:
                if chosen:
                    raise
                found = _unused(directory)


def _unused(path: Path) -> Path:
    """Return the path, or with the first number behind it that makes it new."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(candidate for candidate in chain([path], numbered) if not candidate.exists())


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as flat keys a.b, as Flower does."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _check_resources(settings: Settings, resources: Resources) -> None:
    """Refuse what Flower would only answer with an empty pool of workers."""
    for key, value, needs in (
        ("device", settings.training.device, "cuda"),
        ("compile", settings.training.compile, "cuda-graph"),
    ):
        if value == needs and not resources.gpus_per_client:
            raise PbflError(f"{key} = '{value}': clients see no GPU; add --gpus-per-client, e.g. 0.25")
    if settings.training.device == "mps":
        from pbfl_flwr.flower.client.device import choose_device

        choose_device("mps")
    places(Machine.here(resources), resources)


def _unknown_method(name: object) -> list[str]:
    if not isinstance(name, str) or name in METHODS or is_external(name):
        return []
    return _complaint(lambda: build_method(parse({"method": name})))


def _unknown_dataset(name: object) -> list[str]:
    if not isinstance(name, str) or name in DATASETS:
        return []
    return _complaint(lambda: load_pool(DataSettings(dataset=name)))


def _unknown_model(spec: object) -> list[str]:
    return _complaint(lambda: architectures(spec)) if isinstance(spec, str) else []


def _complaint(ask: Callable[[], object]) -> list[str]:
    try:
        ask()
    except PbflError as error:
        return [str(error)]
    return []


def shipped(folder: str) -> list[str]:
    """Return the names of the TOML files that come with the package in a folder of it."""
    items = files("pbfl_flwr").joinpath(folder).iterdir()
    return sorted(item.name.removesuffix(".toml") for item in items if item.name.endswith(".toml"))


def read_toml(kind: str, name: str, folder: str) -> dict[str, Any]:
    """Return a TOML file's tables.

    Args:
        kind: what it is, for messages.
        name: a path, or the name of one that comes with the package.
        folder: where those lie in the package.

    Raises:
        PbflError: if there is none, or it is no TOML.
    """
    path = expanded(name)
    if path.is_file():
        read = partial(path.read_text, encoding="utf-8")
    elif name in shipped(folder):
        read = partial(files("pbfl_flwr").joinpath(folder, f"{name}.toml").read_text, encoding="utf-8")
    else:
        allowed = ", ".join(shipped(folder))
        raise PbflError(f"{kind} '{name}': no such file; allowed is a TOML file or one of {allowed}")
    try:
        return tomllib.loads(read())
    except UnicodeDecodeError as error:
        raise PbflError(f"{kind} '{name}' is no TOML: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise PbflError(f"{kind} '{name}' cannot be read ({error.strerror})") from None
    except tomllib.TOMLDecodeError as error:
        raise PbflError(f"{kind} '{name}' is no TOML: {error}") from None


def value(text: str) -> Any:
    """Return what an assignment's right side says: a TOML value, or else the words themselves."""
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return read["value"] if read.keys() == {"value"} else text
