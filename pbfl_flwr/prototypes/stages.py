"""The settings of the pipeline's slots, with every "auto" resolved and checked to fit together; scaling."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from pbfl_flwr.config import Settings
from pbfl_flwr.config.keys import (
    Alignment,
    Auto,
    Collect,
    Cpkd,
    NonNegative,
    Positive,
    PrototypeSettings,
    RegularizerForm,
)
from pbfl_flwr.errors import PbflError
from pbfl_flwr.prototypes.rules import Rule, rule_named
from pbfl_flwr.util.user_code import own_code


class Stages(PrototypeSettings):
    """The settings of the slots without "auto", by default FedProto's.

    The default λ = 10 belongs to the form that is a mean over B·d elements, which every released code base uses
    (FedProto's own with λ = 1, or 0.1 on CIFAR-10); the λ = 1 or 0.1 of the papers' texts belongs to a norm
    (``regularizer-form="l2"``).
    """

    regularizer_weight: NonNegative = 10.0
    regularizer_form: RegularizerForm = "mse"
    collect: Collect = "post"
    aggregation: str = "mean"
    cps_dim: Annotated[int, Field(ge=0)] = 0
    cpkd: Cpkd = "off"
    aps_scale: Positive | Auto = "auto"  # auto: from the reported n
    alignment: Alignment = "off"
    upscale: NonNegative = 1.0

    @property
    def rule(self) -> Rule:
        """The aggregation rule.

        Raises:
            PbflError: as :func:`~pbfl_flwr.prototypes.rules.rule_named`.
        """
        return rule_named(self.aggregation)

    @property
    def sends_total(self) -> bool:
        """Whether uploads have n_i."""
        if self.aggregation == "ppa":
            return self.total_examples == 0
        return self.rule.aps and self.aps_scale == "auto"

    def idle(self) -> list[str]:
        """Return a line for every setting that has no effect because of another one."""
        needs = {
            "trim_share": ("aggregation = 'trimmed-mean'", self.aggregation == "trimmed-mean"),
            "aps_scale": ("aggregation = 'aps-sum' or 'aps-mean'", self.rule.aps),
            "total_examples": ("aggregation = 'ppa'", self.aggregation == "ppa"),
            "cps_scheme": ("cps-dim above 0", self.cps_dim > 0),
            "cps_regularizer": ("cps-dim above 0", self.cps_dim > 0),
        }
        plain = Stages()
        return [
            f"{name.replace('_', '-')} = {getattr(self, name)!r} has no effect without {what}"
            for name, (what, met) in needs.items()
            if not met and getattr(self, name) != getattr(plain, name)
        ]


def resolved(settings: Settings, named: Stages) -> Stages:
    """Return the stages of a configuration.

    Args:
        settings: of the run.
        named: the stages of the named method, used where the configuration says "auto".

    Raises:
        PbflError: if two stages do not fit together.
    """
    overrides = {name: value for name, value in settings.prototypes if value != "auto"}
    stages = Stages.model_validate({**named.model_dump(), **overrides})
    stages = stages.model_copy(update={"aggregation": own_code(stages.aggregation, settings.code)})
    rule_named(stages.aggregation)
    if stages.cps_dim > settings.models.feature_dim:
        raise PbflError(
            f"cps-dim = {stages.cps_dim}: must be at most feature-dim = {settings.models.feature_dim}"
        )
    return stages


def scale_by_counts(values: Tensor, counts: Tensor) -> Tensor:
    """Return n_ij·c̄_ij, which a client sends instead of prototype and count.

    Source: PPA, Eq. 11; TinyProto (APS), Eq. 10. The server needs only sums and thus learns no counts. For full
    (K, d) and compressed (K, s) prototypes; an absent class has the count 0 and stays a zero row.

    Args:
        values: (K, width) local prototypes.
        counts: (K,) n_ij.
    """
    return values * counts.to(values.device, values.dtype).unsqueeze(1)
