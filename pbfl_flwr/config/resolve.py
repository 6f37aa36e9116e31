"""Validate flat keys into settings, and replace "auto" by the protocol's values."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pbfl_flwr.config.keys import (
    GROUPS,
    AttackSettings,
    ConventionSettings,
    DataSettings,
    EvaluationSettings,
    FaultSettings,
    ModelSettings,
    PrivacySettings,
    PrototypeSettings,
    RunSettings,
    TrainingSettings,
)
from pbfl_flwr.config.parsing import Group, Scalar, named_values
from pbfl_flwr.errors import PbflError

G = TypeVar("G", bound=Group)

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
    "predictor": {"clean": "auto", "htfl": "auto", "pfl": "auto", "fedproto": "auto"},
    "fedproto.predictor": {"clean": "auto", "htfl": "auto", "pfl": "auto", "fedproto": "global-local"},
    "evaluate-moment": {"clean": "auto", "htfl": "before", "pfl": "before", "fedproto": "auto"},
    # No code base scores the averaged network of these two; see their pages.
    "fedpa.evaluate-moment": {"clean": "auto", "htfl": "auto", "pfl": "auto", "fedproto": "auto"},
    "feduv.evaluate-moment": {"clean": "auto", "htfl": "auto", "pfl": "auto", "fedproto": "auto"},
    "weighting": {"clean": "auto", "htfl": "auto", "pfl": "auto", "fedproto": "uniform"},
    "kl-reduction": {"clean": "batchmean", "htfl": "mean", "pfl": "mean", "fedproto": "batchmean"},
    "detach-teacher": {"clean": "yes", "htfl": "no", "pfl": "no", "fedproto": "yes"},
    "min-class-count": {"clean": 2, "htfl": 1, "pfl": 1, "fedproto": 1},
}
# "auto" leaves the value to the method; see the method's page.


# Keys that may change when a run is resumed.
CHANGEABLE = (
    "num-server-rounds",
    "patience",
    "keep-best",
    "round-timeout",
    "join-timeout",
    "failure-policy",
    "min-clients",
    "max-upload-mb",
    "threads",
    "sinks",
)


class Settings(BaseModel):
    """The whole run configuration.

    Attributes:
        run, data, models, training, evaluation, conventions, prototypes, privacy, faults, attack: the groups of
            keys, with the protocol applied.
        method_section: the keys ``<method>.<key>`` of the chosen method, without the prefix.
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
    faults: FaultSettings = FaultSettings()
    attack: AttackSettings = AttackSettings()
    method_section: dict[str, Scalar] = {}

    def as_dict(self) -> dict[str, Scalar]:
        """Return the configuration as flat run-config keys."""
        flat: dict[str, Scalar] = {}
        for name, group in GROUPS.items():
            values = getattr(self, name).model_dump(by_alias=True)
            flat.update({group.prefix + key: value for key, value in values.items()})
        flat.update({f"{self.run.method}.{key}": value for key, value in self.method_section.items()})
        return flat

    def relevant(self) -> dict[str, Scalar]:
        """Return the keys that affect results: without output locations and CHANGEABLE keys.

        data-dir is included: for arrays, tables and folders nothing else identifies the data before it is read.
        """
        without = {"run-dir", "state-dir", "resume", *CHANGEABLE}
        return {key: value for key, value in self.as_dict().items() if key not in without}

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
    prefixed = {name: group for name, group in GROUPS.items() if group.prefix}
    tables = [*prefixed, *sections]
    by_prefix: dict[str, dict[str, Scalar]] = {"": {}}
    for name, value in run_config.items():
        prefix, _, key = name.partition(".") if "." in name else ("", "", name)
        by_prefix.setdefault(prefix, {})[key] = int(value) if _is_whole(value) else value
    common = {key: name for name, group in GROUPS.items() if not group.prefix for key in group.key_names()}
    full_names = [group.prefix + key for group in GROUPS.values() for key in group.key_names()]
    top = by_prefix.pop("")
    problems = [
        _unknown(key, [*full_names, *(f"{name}." for name in sections)]) for key in top if key not in common
    ]
    groups: dict[str, Any] = {}
    for name, group in GROUPS.items():
        if not group.prefix:
            values = {key: value for key, value in top.items() if common.get(key) == name}
            groups[name] = _parse_group(group, values, "", problems)
    method = str(top.get("method", RunSettings().method))
    section: dict[str, Scalar] = {}
    for prefix, values in by_prefix.items():
        table = prefixed.get(prefix) or sections.get(prefix)
        keys = table.key_names() if table else []
        misplaced = [key for key in values if key in common and key not in keys]
        problems += [_misplaced(key, prefix) for key in misplaced]
        values = {key: value for key, value in values.items() if key not in misplaced}
        if table is None:
            if values:
                problems.append(f"unknown section '{prefix}.'; sections are {_listed(tables)}")
            continue
        parsed = _parse_group(table, values, f"{prefix}.", problems)
        if prefix in GROUPS:
            groups[prefix] = parsed
        elif prefix == method and parsed is not None:
            section = parsed.model_dump(by_alias=True)
    if method in sections and not section:
        section = sections[method]().model_dump(by_alias=True)
    if problems or (problems := _conflicts(settings := Settings(**groups, method_section=section))):
        raise PbflError("\n".join(problems))
    return _apply_protocol(settings)


def _is_whole(value: object) -> bool:
    """Whether this is an integer of any type, NumPy's included, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _conflicts(settings: Settings) -> list[str]:
    """Return a line for every key whose value conflicts with another key."""
    run, data, training = settings.run, settings.data, settings.training
    min_clients, new_clients = f"min-clients = {run.min_clients}", f"new-clients = {run.new_clients}"
    secure = "with secure-aggregation = true"
    secret = settings.privacy.secure_aggregation
    silent = settings.privacy.client_report == "none"
    no_scores = "with client-report = 'none' clients report no scores"
    lines = {
        f"method-settings = {run.method_settings!r}: needs a method of your own (my_package.module:build); `pbfl list "
        f"keys {run.method}.` shows the settings of '{run.method}'": run.method_settings
        and ":" not in run.method,
        f"momentum = {training.momentum:g}: optimizer = '{training.optimizer}' has no such setting; must be 0, or "
        "optimizer = 'sgd'": training.momentum and training.optimizer != "sgd",
        f"partitioner = '{data.partitioner}': needs dataset = 'flwr-datasets' and partition = 'natural'": (
            data.partitioner and (data.dataset, data.partition) != ("flwr-datasets", "natural")
        ),
        f"{min_clients}: must be at most num-clients = {run.num_clients}": run.min_clients > run.num_clients,
        f"{min_clients}: with {new_clients} all clients must have joined when the run starts; must be 0": (
            run.min_clients and run.new_clients
        ),
        f"{min_clients}: {secure} all clients must have joined when the run starts; must be 0": (
            run.min_clients and secret
        ),
        f"{new_clients}: must be at most {run.num_clients - 1}, since at least one of num-clients = "
        f"{run.num_clients} must take part in the rounds": run.new_clients >= run.num_clients,
        f"min-replies = {run.min_replies}: must be at most {run.trained}, the clients that train in a round "
        f"(fraction-train = {run.fraction_train:g} of {run.min_clients or run.participants})": (
            run.new_clients < run.num_clients and run.min_replies > run.trained
        ),
        f"{new_clients}: {secure} no client may train alone; must be 0": run.new_clients and secret,
        f"{new_clients}: {no_scores}; must be 0": silent and run.new_clients,
        f"patience = {run.patience}: {no_scores}; must be 0": silent and run.patience,
        f"keep-best = true: {no_scores}; must be false": silent and run.keep_best,
        f"both-moments = true: {no_scores}; must be false": silent and settings.evaluation.both_moments,
        f"per-class = true: {no_scores}; must be false": silent and settings.evaluation.per_class,
        f"auc = true: {no_scores}; must be false": silent and settings.evaluation.auc,
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
            if group.prefix or row is None:
                continue
            if value == "auto":
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
    """Return a group of these values, or None after appending a line for every invalid key."""
    names = group.key_names()
    unknown = [key for key in values if key not in names]  # Python's field names are not keys
    problems += [_unknown(prefix + key, [prefix + name for name in names]) for key in unknown]
    try:
        parsed = group.model_validate({key: value for key, value in values.items() if key in names})
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
    return None if unknown else parsed


def _unknown(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    hint = f"; did you mean '{close[0]}'?" if close else "; `pbfl list keys` shows them all"
    return f"unknown key '{key}'{hint}"


def _misplaced(key: str, prefix: str) -> str:
    """Return the message for a common key below a [table] of a TOML file, which adds the table's prefix."""
    return (
        f"unknown key '{prefix}.{key}'; '{key}' is a common key: in a file move it above the first [table], with "
        f"--set omit '{prefix}.'"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
