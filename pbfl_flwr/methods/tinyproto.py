"""TinyProto: sparse prototypes with adaptive scaling, on FedProto (-FP) or FedTGP (-FT).

Lee and Choi, "Communication-Efficient Heterogeneous Federated Learning with Sparse Prototypes in
Resource-Constrained Environments" (TinyProto), AAAI 2026.

Round: as the base method, with two stages. CPS gives every class a mask of s out of d dimensions; regularisation
works on all d (zeros outside the mask), so that features become structurally sparse, and only the s masked numbers
travel. APS sends n_ij·c̄_ij; the server sums, and the client uses μ·Σ_i n_ij·c̄_ij.
Travels: up K_i·s, down K·s numbers a client; the masks follow from a seed.
Predicts: the class of the nearest local prototype (the paper's equation 12); the nearest global is scored as well.
Differs from the paper: the printed server equation divides by |N_j|, but then no printed μ gives prototypes of the
features' size; the released code's sum does, and is the default (aggregation="aps-mean" is the printed form). μ is
aps-scale; "auto" is 0.9·K/n, as the paper's CIFAR values are, and no row longer than the average one times K/n. λ = 10
with the mean square, as in the released code, not the text's 1 with a norm. How -FT scales uploads has two readings: by
μ·|N_j| (the default, as in the CPS paper), or by a μ of its own alone (aggregation="aps-mean"), as the released script
starts it.
Differs from the reference: the released code never regularises when sparsification is on and returns after the
first class; both are taken for bugs. Its masks are blocks of d/K dimensions, which gives fewer than s ones where K
does not divide d (cps-scheme="block"); here masks are allocated by dimension with exactly s ones.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pbfl_flwr.config import Settings, parse_section
from pbfl_flwr.methods import fedtgp
from pbfl_flwr.prototypes.pipeline import Pipeline, pipeline
from pbfl_flwr.prototypes.stages import Stages


class Config(fedtgp.Config):
    """Settings ``tinyproto.*``: the base, and FedTGP's settings for the base FedTGP."""

    base: Literal["fedproto", "fedtgp"] = Field(
        "fedproto", description="base method: fedproto (TinyProto-FP) or fedtgp (TinyProto-FT)"
    )


def build(settings: Settings) -> Pipeline:
    """Return the method."""
    config = parse_section(Config, settings)
    training = fedtgp.server_training(config, settings) if config.base == "fedtgp" else None
    named = Stages(aggregation="aps-sum", cps_dim=50)
    return pipeline(settings, "tinyproto", named, primary_predictor="local", server_training=training)
