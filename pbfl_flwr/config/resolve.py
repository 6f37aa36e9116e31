"""Validate flat keys into settings, and replace "auto" by the protocol's values."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pbfl_flwr.config.keys import (
    CHANGEABLE,
    GROUPS,
    PLACES,
    ConventionSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    PrivacySettings,
    PrototypeSettings,
    RunSettings,
    TrainingSettings,
)
from pbfl_flwr.config.parsing import Group, Scalar, named_values
from pbfl_flwr.errors import PbflError, in_utf8
from pbfl_flwr.util.user_code import code_in

G = TypeVar("G", bound=Group)

APP = "app."
"""Prefix of the keys that an app has for itself; this project only hands them on, see :attr:`Settings.app`."""

LARGEST = 1e18  # number of a key: float32 holds a product of two, Flower sends whole numbers of 64 bits

# One row per key, one column per protocol: the behaviour of the published code bases (sources: the method cards).
# A row "<method>.<key>" overrides it for one method.
PROTOCOLS: dict[str, dict[str, str | int]] = {
    "batch-order": {"clean": "shuffled", "htfl": "fixed", "pfl": "shuffled", "fedproto": "shuffled"},
    "drop-last": {"clean": "small", "htfl": "always", "pfl": "always", "fedproto": "always"},
    "layout": {"clean": "channels-last", "htfl": "contiguous", "pfl": "contiguous", "fedproto": "contiguous"},
    "initial-weights": {"clean": "alike", "htfl": "alike", "pfl": "alike", "fedproto": "own"},
    "collect": {"clean": "post", "htfl": "trajectory", "pfl": "trajectory", "fedproto": "last-epoch"},
    "fedtgp.collect": {"clean": "post", "htfl": "before", "pfl": "post", "fedproto": "post"},
    "protonorm.collect": {"clean": "post", "htfl": "before", "pfl": "post", "fedproto": "post"},
    "fedproto.predictor": {"clean": "auto", "htfl": "auto", "pfl": "auto", "fedproto": "global-local"},
    "evaluate-moment": {"clean": "auto", "htfl": "before", "pfl": "before", "fedproto": "auto"},
    # Scored after training by choice, the codes score the averaged network; see their pages.
    "fedpa.evaluate-moment": {"clean": "auto", "htfl": "auto", "pfl": "auto", "fedproto": "auto"},
    "feduv.evaluate-moment": {"clean": "auto", "htfl": "auto", "pfl": "auto", "fedproto": "auto"},
    "weighting": {"clean": "auto", "htfl": "auto", "pfl": "auto", "fedproto": "uniform"},
    "kl-reduction": {"clean": "batchmean", "htfl": "mean", "pfl": "mean", "fedproto": "batchmean"},
    "detach-teacher": {"clean": "yes", "htfl": "no", "pfl": "no", "fedproto": "yes"},
    "min-class-count": {"clean": 2, "htfl": 1, "pfl": 1, "fedproto": 1},
}
# "auto" leaves the value to the method; see the method's page.


def key_of(keyword: str) -> str:
    """Return the key that a keyword of a Python function stands for; an app's own keys stay as they are."""
    return keyword if keyword.startswith(APP) else keyword.replace("_", "-")


class Settings(BaseModel):
    """The whole run configuration.

    Attributes:
        run, data, models, training, evaluation, conventions, prototypes, privacy: the groups of
            keys, with the protocol applied.
        method_section: the keys ``<method>.<key>`` of the chosen method, without the prefix.
        app: the keys ``app.<key>`` of an app or of functions of a user's, without the prefix; nothing here reads them.
        allowed: functions ``my_package.module:function`` that may be imported; None for all that the keys name, as in a
            configuration that was written in this process.
    """

    model_config = ConfigDict(frozen=True)

    run: RunSettings = RunSettings()
    data: DataSettings = DataSettings()
    models: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    conventions: ConventionSettings = ConventionSettings()
    prototypes: PrototypeSettings = PrototypeSettings()
    privacy: PrivacySettings = PrivacySettings()
    method_section: dict[str, Scalar] = {}
    app: dict[str, Scalar] = {}
    allowed: frozenset[str] | None = None

    @property
    def code(self) -> frozenset[str]:
        """The functions that may be imported because the owner of this process has named them."""
        return code_in(self.as_dict().values()) if self.allowed is None else self.allowed

    def allowing(self, names: Iterable[str]) -> Settings:
        """Return these settings, which came from another machine or a file, with the functions allowed here."""
        allowed = frozenset(names)
        return self.model_copy(update={"allowed": allowed, "data": self.data.allowing(allowed)})

    def as_dict(self) -> dict[str, Scalar]:
        """Return the configuration as flat run-config keys."""
        flat: dict[str, Scalar] = {}
        for name in GROUPS:
            flat.update(getattr(self, name).model_dump(by_alias=True))
        flat.update({f"{self.run.method}.{key}": value for key, value in self.method_section.items()})
        flat.update({f"{APP}{key}": value for key, value in self.app.items()})
        return flat

    def relevant(self) -> dict[str, Scalar]:
        """Return the keys that affect results, see :func:`relevant`."""
        return relevant(self.as_dict())

    def fingerprint(self) -> str:
        """Return a hash of all keys that affect results."""
        return hashlib.sha256(json.dumps(self.relevant(), sort_keys=True).encode()).hexdigest()[:16]


def parse(run_config: Mapping[str, Scalar], sections: Mapping[str, type[Group]] | None = None) -> Settings:
    """Check a flat run configuration and apply the protocol.

    Args:
        run_config: kebab-case keys, as Flower hands them over or as a preset file gives them.
        sections: method name -> the group of its ``<method>.<key>`` settings; keys of the other methods
            are checked as well, to find typos.

    Raises:
        PbflError: with one line for every invalid key: the key, its value and what it must be.
    """
    sections = sections or {}
    known = {key: name for name, group in GROUPS.items() for key in group.key_names()}
    by_table: dict[str, dict[str, Scalar]] = {}
    problems: list[str] = []
    for name, value in run_config.items():
        prefix, _, key = name.rpartition(".")
        if name.startswith(APP) and name != APP:
            table, key = APP, name.removeprefix(APP)
        elif name in known:
            table = known[name]
        elif prefix in sections and key in sections[prefix].key_names():
            table = f"{prefix}."
        else:
            problems.append(_unknown(name, known, sections))
            continue
        try:
            _check_storable(name, value, own=table == APP)
        except PbflError as error:
            problems.append(str(error))
            continue
        by_table.setdefault(table, {})[key] = int(value) if _is_whole(value) else value
    problems = [*dict.fromkeys(problems)]
    groups: dict[str, Any] = {
        name: _parse_group(group, by_table.get(name, {}), "", problems) for name, group in GROUPS.items()
    }
    method = str(run_config.get("method", RunSettings().method))
    own = {
        name: _parse_group(sections[name], by_table.get(f"{name}.", {}), f"{name}.", problems)
        for name in sections  # whose values are imported when they are asked for
        if name == method or f"{name}." in by_table
    }
    section = chosen.model_dump(by_alias=True) if (chosen := own.get(method)) else {}
    groups |= {"method_section": section, "app": by_table.get(APP, {})}
    if problems or (problems := _conflicts(settings := Settings(**groups))):
        raise PbflError("\n".join(problems))
    settings = _apply_protocol(settings)
    return settings.model_copy(update={"data": settings.data.allowing(settings.code)})


def changed(
    settings: Settings, changes: Mapping[str, Scalar], sections: Mapping[str, type[Group]] | None = None
) -> Settings:
    """Return settings with other values of some keys, checked as :func:`parse` does.

    Raises:
        PbflError: with one line for every invalid key.
    """
    other = parse({**settings.as_dict(), **changes}, sections)
    return other if settings.allowed is None else other.allowing(settings.allowed)


def relevant(configuration: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the keys of a flat configuration that affect results: without PLACES and CHANGEABLE keys.

    data-dir is included: for arrays, tables and folders nothing else identifies the data before it is read.
    """
    without = {*PLACES, *CHANGEABLE}
    return {key: value for key, value in configuration.items() if key not in without}


def completed(
    recorded: Mapping[str, Scalar], sections: Mapping[str, type[Group]] | None = None
) -> dict[str, Scalar]:
    """Return a recorded configuration with all keys; one that it lacks is newer than the record, and at its default.

    ``sections`` as in :func:`parse`.
    """
    chosen = {key: recorded[key] for key in ("method", "protocol") if key in recorded}
    return {**parse(chosen, sections).as_dict(), **recorded}


def _is_whole(value: object) -> bool:
    """Whether this is an integer of any type, NumPy's included, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_storable(name: str, value: Scalar, *, own: bool) -> None:
    """Check that a value can be sent and recorded.

    Args:
        name: of the key.
        value: of the key.
        own: whether it is a key of an app, which no group bounds.

    Raises:
        PbflError: saying what it must be.
    """
    if isinstance(value, str):
        in_utf8(name, value)
    elif own and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise PbflError(f"{name} = {value}: must be a number of at most 64 bits")
    elif own and isinstance(value, float) and not math.isfinite(value):
        raise PbflError(f"{name} = {value}: must be a finite number")


def _conflicts(settings: Settings) -> list[str]:
    """Return a line for every key whose value conflicts with another key."""
    run, data, training = settings.run, settings.data, settings.training
    min_clients = f"min-clients = {run.min_clients}"
    lines = {
        f"method-settings = {run.method_settings!r}: needs a method of your own (my_package.module:build); settings of "
        f"'{run.method}' are keys of their own, see `pbfl list keys`": run.method_settings
        and ":" not in run.method,
        f"momentum = {training.momentum:g}: optimizer = '{training.optimizer}' has no such setting; must be 0, or "
        "optimizer = 'sgd'": training.momentum and training.optimizer != "sgd",
        f"partitioner = '{data.partitioner}': needs dataset = 'flwr-datasets' and partition = 'natural'": (
            data.partitioner and (data.dataset, data.partition) != ("flwr-datasets", "natural")
        ),
        f"{min_clients}: must be at most num-clients = {run.num_clients}": run.min_clients > run.num_clients,
        f"min-replies = {run.min_replies}: must be at most {run.trained}, the clients that train in a round "
        f"(fraction-train = {run.fraction_train:g} of {run.min_clients or run.num_clients})": (
            run.min_replies > run.trained
        ),
    }
    return [line for line, conflicting in lines.items() if conflicting]


def parse_section(group: type[G], settings: Settings) -> G:
    """Return the chosen method's own settings as its typed group.

    Raises:
        PbflError: with one line for every invalid key in ``method-settings``; METHODS' sections were checked before.
    """
    if settings.method_section:
        return group.model_validate(settings.method_section)
    values = named_values(settings.run.method_settings)
    names = ", ".join(group.key_names())
    unknown = [key for key in values if key not in group.key_names()]
    problems = [f"method-settings: unknown key '{key}'; must be one of {names}" for key in unknown]
    known = {key: value for key, value in values.items() if key not in unknown}
    parsed = _parse_group(group, known, "method-settings: ", problems)
    if parsed is None or problems:
        raise PbflError("\n".join(problems))
    return parsed


def _apply_protocol(settings: Settings) -> Settings:
    """Return the settings with "auto" replaced wherever the protocol has a value."""
    resolved: dict[str, Group] = {}
    for name in GROUPS:
        group: Group = getattr(settings, name)
        changes: dict[str, Scalar] = {}
        for field in type(group).model_fields:
            key, value = field.replace("_", "-"), getattr(group, field)
            row = PROTOCOLS.get(f"{settings.run.method}.{key}", PROTOCOLS.get(key))
            if row is not None and value == "auto":
                changes[field] = row[settings.run.protocol]
        resolved[name] = group.model_copy(update=changes)
    return settings.model_copy(update=resolved)


# pydantic's names of types -> those of `pbfl list keys`
PLAIN = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
}


def _parse_group(group: type[G], values: Mapping[str, Scalar], prefix: str, problems: list[str]) -> G | None:
    """Return a group of these values, or None after appending a line for every invalid one."""
    try:
        parsed = group.model_validate(values)
        for key, value in parsed.model_dump(by_alias=True).items():
            if isinstance(value, int | float) and value > LARGEST:
                problems.append(f"{prefix}{key} = {value!r}: must be at most {LARGEST:g}")
        return parsed
    except ValidationError as error:
        by_key: dict[str, list[str]] = {}
        for problem in error.errors():
            message = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            by_key.setdefault(str(problem["loc"][0]), []).append(PLAIN.get(message, message))
        for key, messages in by_key.items():
            form = " or ".join(dict.fromkeys(messages))
            value = f"{values[key]!r}: must be {form}" if key in values else "?: it has no default"
            problems.append(f"{prefix}{key} = {value}")
    return None


def _unknown(name: str, known: Mapping[str, str], sections: Mapping[str, type[Group]]) -> str:
    """Return the message for a key that there is not, by full name; ``known`` are those of GROUPS."""
    prefix, dot, key = name.partition(".")
    if dot and key in known:  # a [table] of a TOML file adds its prefix to all keys below it
        return (
            f"unknown key '{name}'; '{key}' is a common key: in a file move it above the first [table], with "
            f"--set omit '{prefix}.'"
        )
    if dot and prefix not in sections:
        return f"unknown section '{prefix}.'; sections are {', '.join(map(repr, sorted(sections)))}"
    names = [f"{prefix}.{own}" for own in sections[prefix].key_names()] if dot else [*known]
    # "rounds" has more letters in common with "run-dir" than with "num-server-rounds".
    longer = [known for known in names if f"-{name}-" in f"-{known}-"]
    close = longer or difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else "; `pbfl list keys` shows them all"
    return f"unknown key '{name}'{hint}"
