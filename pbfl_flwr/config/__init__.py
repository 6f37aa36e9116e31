"""The run configuration: flat kebab-case keys in, frozen objects out.

Every key is declared once, with type, range, default and meaning (:mod:`~pbfl_flwr.config.keys`). Flower rejects
unknown keys but not wrong types; here all invalid keys are reported at once, each with its value and what it must be
(:mod:`~pbfl_flwr.config.resolve`). The value ``"auto"`` stands for the choice of the method (or the protocol); it is
resolved before round 1. run.json has the configuration, and the settings of the method as it was built.
"""

from pbfl_flwr.config.keys import (
    CHANGEABLE,
    GROUPS,
    NEUTRAL,
    PREDICTOR_NAME,
    PREDICTORS,
    PROTECTIONS,
    SILENT,
    STAGES,
    USUAL_RATE,
    Alignment,
    Auto,
    ConventionSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    PrivacySettings,
    PrototypeSettings,
    RunSettings,
    TrainingSettings,
    in_order,
)
from pbfl_flwr.config.parsing import (
    HUB,
    MAX_CLASSES,
    Group,
    Scalar,
    class_name,
    comma_list,
    named_arguments,
)
from pbfl_flwr.config.resolve import (
    PROTOCOLS,
    Settings,
    changed,
    completed,
    key_of,
    parse,
    parse_section,
    relevant,
)

__all__ = [
    "CHANGEABLE",
    "GROUPS",
    "HUB",
    "MAX_CLASSES",
    "NEUTRAL",
    "PREDICTORS",
    "PREDICTOR_NAME",
    "PROTECTIONS",
    "PROTOCOLS",
    "SILENT",
    "STAGES",
    "USUAL_RATE",
    "Alignment",
    "Auto",
    "ConventionSettings",
    "DataSettings",
    "EvaluationSettings",
    "Group",
    "ModelSettings",
    "PrivacySettings",
    "PrototypeSettings",
    "RunSettings",
    "Scalar",
    "Settings",
    "TrainingSettings",
    "changed",
    "class_name",
    "comma_list",
    "completed",
    "in_order",
    "key_of",
    "named_arguments",
    "parse",
    "parse_section",
    "relevant",
]
