"""The settings of the pipeline's slots, with every "auto" resolved and checked to fit together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pbfl_flwr.config import Auto, Group, Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.prototypes.alignment import Solver

Collect = Literal["post", "trajectory", "last-epoch", "before"]
APS_RULES = ("aps-sum", "aps-mean")
SCALED_RULES = ("ppa", *APS_RULES)
WEIGHTED_RULES = ("weighted", "weighted-shrunk")
TRAINED_RULES = ("mean", "ppa", "aps-sum")  # rules that make a difference to FedTGP's training
ROBUST_RULES = ("median", "trimmed-mean")


class Stages(Group):
    """The settings of the slots, as :class:`~pbfl_flwr.config.PrototypeSettings` explains them; by default FedProto's.

    The default λ = 10 belongs to the form that is a mean over B·d elements, which every released code base uses;
    the λ = 1 or 0.1 of the papers' texts belongs to a norm (``regularizer-form="l2"``).
    """

    regularizer_weight: float = Field(10.0, ge=0)  # λ
    regularizer_form: Literal["mse", "l2"] = "mse"
    collect: Collect = "post"
    aggregation: Literal[
        "mean", "weighted", "weighted-shrunk", "ppa", "aps-sum", "aps-mean", "median", "trimmed-mean"
    ] = "mean"
    trim_share: float = Field(0.2, ge=0, lt=0.5)
    norm_bound: float = Field(0.0, ge=0)  # c; 0 is off
    cps_dim: int = Field(0, ge=0)  # s; 0 is off
    cps_scheme: Literal["dimension", "block"] = "dimension"
    cps_regularizer: Literal["full", "masked"] = "full"
    cpkd: Literal["off", "sample", "class"] = "off"
    aps_scale: Annotated[float, Field(gt=0)] | Auto = "auto"  # μ; auto: from the reported n
    ppa_total: Literal["reported", "known"] = "reported"
    total_examples: int = Field(0, ge=0)
    alignment: Literal["off"] | Solver = "off"
    upscale: float = Field(1.0, ge=0)  # γ
    stale: Literal["keep", "drop"] = "keep"

    @property
    def sends_counts(self) -> bool:
        """Whether uploads have n_ij."""
        return self.aggregation in WEIGHTED_RULES

    @property
    def sends_total(self) -> bool:
        """Whether uploads have n_i."""
        if self.aggregation == "ppa":
            return self.ppa_total == "reported"
        return self.aggregation in APS_RULES and self.aps_scale == "auto"

    def idle(self) -> list[str]:
        """Return a line for every setting that has no effect because of another one."""
        needs = {
            "trim_share": ("aggregation = 'trimmed-mean'", self.aggregation == "trimmed-mean"),
            "aps_scale": ("aggregation = 'aps-sum' or 'aps-mean'", self.aggregation in APS_RULES),
            "ppa_total": ("aggregation = 'ppa'", self.aggregation == "ppa"),
            "total_examples": (
                "aggregation = 'ppa' with ppa-total = 'known'",
                (self.aggregation, self.ppa_total) == ("ppa", "known"),
            ),
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
    given = settings.prototypes.model_dump(include=set(Stages.model_fields))
    said = {name: value for name, value in given.items() if value != "auto"}
    stages = Stages.model_validate({**named.model_dump(), **said})
    if stages.aggregation == "ppa" and stages.ppa_total == "known" and stages.total_examples < 1:
        raise PbflError(
            "ppa-total = 'known' needs total-examples, the training samples of all clients together, >= 1"
        )
    if stages.norm_bound and stages.aggregation in SCALED_RULES:
        raise PbflError(
            f"norm-bound = {stages.norm_bound}: with aggregation = '{stages.aggregation}' rows are scaled by sample "
            "counts, so their norms differ between honest clients; allowed are rules for means: 'mean', "
            "'weighted', 'median', ..."
        )
    if stages.norm_bound and settings.privacy.secure_aggregation:
        raise PbflError(
            f"norm-bound = {stages.norm_bound}: with secure-aggregation the server sees no single rows; allowed "
            "is 0"
        )
    if stages.cps_dim > settings.models.feature_dim:
        raise PbflError(
            f"cps-dim = {stages.cps_dim}: allowed is up to feature-dim = {settings.models.feature_dim}"
        )
    return stages
