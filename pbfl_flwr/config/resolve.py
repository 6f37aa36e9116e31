"""Validate flat keys into settings, and replace "auto" by the protocol's values."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pbfl_flwr.config.choices import completed
from pbfl_flwr.config.group import Group
from pbfl_flwr.config.keys import (
    GROUPS,
    ConventionSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    PrivacySettings,
    PrototypeSettings,
    RunSettings,
    TrainingSettings,
)
from pbfl_flwr.config.texts import Scalar, named_values
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
        run, data, models, training, evaluation, conventions, prototypes, privacy: the groups of keys, with the
            protocol applied.
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
    method_section: dict[str, Scalar] = {}

    def as_dict(self) -> dict[str, Scalar]:
        """Return the configuration as flat run-config keys."""
        flat: dict[str, Scalar] = {}
        for name in GROUPS:
            flat.update(getattr(self, name).model_dump(by_alias=True))
        flat.update({f"{self.run.method}.{key}": value for key, value in self.method_section.items()})
        return flat

    def relevant(self) -> dict[str, Scalar]:
        """Return the keys that affect results: without output locations and CHANGEABLE keys.

        data-dir is included: for arrays, tables and folders nothing else identifies the data before it is read.
        """
        own = {"run-dir", "state-dir", "resume", *CHANGEABLE}
        return {key: value for key, value in self.as_dict().items() if key not in own}

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
        PbflError: with one line for every invalid key: the key, its value and what is allowed.
    """
    sections = sections or {}
    run_config = {key: int(value) if _whole(value) else value for key, value in run_config.items()}
    top = {key: value for key, value in run_config.items() if "." not in key}
    known = {key: name for name, group in GROUPS.items() for key in group.key_names()}
    problems = [_unknown(key, [*known, *sections]) for key in top if key not in known]
    groups: dict[str, Any] = {}
    for name, group in GROUPS.items():
        mine = {key: value for key, value in top.items() if known.get(key) == name}
        if (parsed := _parse_group(group, mine, "", problems)) is not None:
            groups[name] = parsed
    chosen = str(top.get("method", RunSettings().method))
    section_values: dict[str, Scalar] = {}
    by_section: dict[str, dict[str, Scalar]] = {}
    for key, value in run_config.items():
        if "." in key:
            prefix, _, rest = key.partition(".")
            by_section.setdefault(prefix, {})[rest] = value
    for prefix, values in by_section.items():
        own = sections[prefix].key_names() if prefix in sections else []
        misplaced = [key for key in values if key in known and key not in own]
        problems += [_misplaced(key, prefix) for key in misplaced]
        values = {key: value for key, value in values.items() if key not in misplaced}
        if prefix not in sections:
            if values:
                problems.append(f"unknown section '{prefix}.'; sections are {_listed(sections)}")
            continue
        parsed_section = _parse_group(sections[prefix], values, f"{prefix}.", problems)
        if prefix == chosen and parsed_section is not None:
            section_values = parsed_section.model_dump(by_alias=True)
    if chosen in sections and not section_values:
        section_values = sections[chosen]().model_dump(by_alias=True)
    if problems or (
        problems := _disagreements(settings := Settings(**groups, method_section=section_values))
    ):
        raise PbflError("\n".join(problems))
    return _apply_protocol(settings)


def _whole(value: object) -> bool:
    """Whether this is an integer of any type, NumPy's included, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _disagreements(settings: Settings) -> list[str]:
    """Return a line for every key whose value conflicts with another key."""
    run, found = settings.run, []
    if run.method_settings and ":" not in run.method:
        found.append(
            f"method-settings = {run.method_settings!r}: allowed only with a method of your own "
            f"(my_package.page:build); `pbfl list keys {run.method}.` shows the settings of '{run.method}'"
        )
    if settings.training.momentum and settings.training.optimizer != "sgd":
        found.append(
            f"momentum = {settings.training.momentum:g}: optimizer = '{settings.training.optimizer}' has no such "
            "setting; allowed is 0, or optimizer = 'sgd'"
        )
    if run.min_clients > run.num_clients:
        found.append(f"min-clients = {run.min_clients}: allowed is up to num-clients = {run.num_clients}")
    if run.min_clients and run.new_clients:
        found.append(
            f"min-clients = {run.min_clients}: with new-clients = {run.new_clients} all clients must have joined "
            "when the run starts; allowed is 0"
        )
    if run.min_clients and settings.privacy.secure_aggregation:
        found.append(
            f"min-clients = {run.min_clients}: with secure-aggregation = true all clients must have joined when the "
            "run starts; allowed is 0"
        )
    if run.new_clients >= run.num_clients:
        found.append(
            f"new-clients = {run.new_clients}: allowed is up to {run.num_clients - 1}, since at least one of "
            f"num-clients = {run.num_clients} must take part in the rounds"
        )
    elif run.min_replies > run.trained:
        found.append(
            f"min-replies = {run.min_replies}: allowed is up to {run.trained}, the clients that train in a round "
            f"(fraction-train = {run.fraction_train:g} of {run.min_clients or run.participants})"
        )
    if run.new_clients and settings.privacy.secure_aggregation:
        found.append(
            f"new-clients = {run.new_clients}: with secure-aggregation = true no client may train alone; "
            "allowed is 0"
        )
    if settings.privacy.client_report == "none":
        silent = "with client-report = 'none' clients report no scores"
        if run.new_clients:
            found.append(f"new-clients = {run.new_clients}: {silent}; allowed is 0")
        if run.patience:
            found.append(f"patience = {run.patience}: {silent}; allowed is 0")
        if run.keep_best:
            found.append(f"keep-best = true: {silent}; allowed is false")
        if settings.evaluation.both_moments:
            found.append(f"both-moments = true: {silent}; allowed is false")
        if settings.evaluation.per_class:
            found.append(f"per-class = true: {silent}; allowed is false")
    return found


def parse_section(group: type[G], settings: Settings) -> G:
    """Return the chosen method's own settings as its typed group.

    Raises:
        PbflError: with one line for every invalid key in ``method-settings``; METHODS' sections were checked before.
    """
    if settings.method_section:
        return group.model_validate(settings.method_section)
    values = named_values(settings.run.method_settings)
    allowed = ", ".join(group.key_names())
    unknown = [key for key in values if key not in group.key_names()]
    problems = [f"method-settings: unknown key '{key}'; allowed are {allowed}" for key in unknown]
    known = {key: value for key, value in values.items() if key not in unknown}
    found = _parse_group(group, known, "method-settings: ", problems)
    if found is None or problems:
        raise PbflError("\n".join(problems))
    return found


def _apply_protocol(settings: Settings) -> Settings:
    changes: dict[str, dict[str, str | int]] = {
        "models": {},
        "training": {},
        "prototypes": {},
        "evaluation": {},
        "conventions": {},
        "privacy": {},
    }
    for key, usual in PROTOCOLS.items():
        row = PROTOCOLS.get(f"{settings.run.method}.{key}", usual)
        field = key.replace("-", "_")
        for name, changed in changes.items():
            group = getattr(settings, name)
            value = getattr(group, field, None)
            if value == "auto":
                changed[field] = row[settings.run.protocol]
            elif field == "layout" and isinstance(value, str):
                changed[field] = completed(value, str(row[settings.run.protocol]))
    resolved = {name: getattr(settings, name).model_copy(update=changed) for name, changed in changes.items()}
    return settings.model_copy(update=resolved)


# pydantic's names of types -> those of `pbfl list keys`
PLAIN = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
}


def _parse_group(group: type[G], values: Mapping[str, Scalar], prefix: str, problems: list[str]) -> G | None:
    names = group.key_names()
    unknown = [key for key in values if key not in names]  # Python's field names are not keys
    problems += [_unknown(prefix + key, [prefix + name for name in names]) for key in unknown]
    try:
        found = group.model_validate({key: value for key, value in values.items() if key in names})
    except ValidationError as error:
        by_key: dict[str, list[str]] = {}
        for problem in error.errors():
            message = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            by_key.setdefault(str(problem["loc"][0]), []).append(PLAIN.get(message, message))
        for key, messages in by_key.items():
            allowed = " or ".join(dict.fromkeys(messages))
            given = f"{values[key]!r}: allowed is {allowed}" if key in values else "?: it has no default"
            problems.append(f"{prefix}{key} = {given}")
        return None
    return None if unknown else found


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
