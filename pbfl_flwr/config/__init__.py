"""The run configuration: flat kebab-case keys in, frozen objects out.

All keys, types and ranges are defined here (:mod:`~pbfl_flwr.config.keys`). Flower rejects unknown keys but not wrong
types; here all invalid keys are reported at once, each with its value and what is allowed
(:mod:`~pbfl_flwr.config.resolve`). The value ``"auto"`` stands for the choice of the method (or the protocol); it is
resolved before round 1 and the resolved value is written into the result.
"""

from pbfl_flwr.config.attack import ATTACKS, Attack, announced
from pbfl_flwr.config.choices import choices
from pbfl_flwr.config.faults import FAULTS, FaultRates
from pbfl_flwr.config.group import Group
from pbfl_flwr.config.keys import (
    GROUPS,
    USUAL_RATE,
    Auto,
    ConventionSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    PrivacySettings,
    PrototypeSettings,
    RunSettings,
    TrainingSettings,
)
from pbfl_flwr.config.resolve import CHANGEABLE, PROTOCOLS, Settings, parse, parse_section
from pbfl_flwr.config.texts import Scalar, class_name, class_names
from pbfl_flwr.config.values import MAX_CLASSES, PREDICTORS, AbsolutePath

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
