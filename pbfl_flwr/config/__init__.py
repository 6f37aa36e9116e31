"""The run configuration: flat kebab-case keys in, frozen objects out.

This is the one place that knows keys, types and ranges (:mod:`~pbfl_flwr.config.keys`). Flower refuses unknown keys but
not wrong types; here every bad key is found at once and named with its value and what is allowed
(:mod:`~pbfl_flwr.config.resolve`). A value ``"auto"`` means "what the method (or the protocol) says"; it is resolved
before round 1 and the resolved value is written into the result.
"""

from pbfl_flwr.config.attack import ATTACKS, Attack, announced
from pbfl_flwr.config.choices import choices
from pbfl_flwr.config.faults import FAULTS, FaultRates
from pbfl_flwr.config.keys import (
    GROUPS,
    MAX_CLASSES,
    PREDICTORS,
    USUAL_RATE,
    AbsolutePath,
    Auto,
    ConventionSettings,
    DataSettings,
    EvaluationSettings,
    Group,
    ModelSettings,
    PrivacySettings,
    PrototypeSettings,
    RunSettings,
    TrainingSettings,
)
from pbfl_flwr.config.resolve import CHANGEABLE, PROTOCOLS, Settings, parse, parse_section
from pbfl_flwr.config.texts import Scalar, class_name, class_names

__all__ = [
    "ATTACKS",
    "CHANGEABLE",
    "FAULTS",
    "GROUPS",
    "MAX_CLASSES",
    "PREDICTORS",
    "PROTOCOLS",
    "USUAL_RATE",
    "AbsolutePath",
    "Attack",
    "Auto",
    "ConventionSettings",
    "DataSettings",
    "EvaluationSettings",
    "FaultRates",
    "Group",
    "ModelSettings",
    "PrivacySettings",
    "PrototypeSettings",
    "RunSettings",
    "Scalar",
    "Settings",
    "TrainingSettings",
    "announced",
    "choices",
    "class_name",
    "class_names",
    "parse",
    "parse_section",
]
