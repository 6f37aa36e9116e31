"""The table of contents: every method is one page, and this is where it is found."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pbfl_flwr.config import Group, Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Method
from pbfl_flwr.methods import (
    fedala,
    fedavg,
    fedcpd,
    feddistill,
    fedfa,
    fedgen,
    fedgh,
    fedkd,
    fednh,
    fedpa,
    fedper,
    fedproto,
    fedprox,
    fedrep,
    fedtgp,
    feduv,
    fesem,
    fml,
    gfpl,
    lg_fedavg,
    local,
    protonorm,
    tinyproto,
)
from pbfl_flwr.prototypes.privacy import unprotected
from pbfl_flwr.prototypes.sums import MOST_CLIENTS


@dataclass(frozen=True)
class Entry:
    """One method.

    Attributes:
        summary: one line for ``pbfl list methods``.
        build: the page's builder.
        section: the method's own settings, ``<name>.<key>``; None if it has none.
    """

    summary: str
    build: Callable[[Settings], Method[Any, Any, Any]]
    section: type[Group] | None = None


METHODS: dict[str, Entry] = {
    "local": Entry("every client for itself; nothing travels", local.build),
    "fedavg": Entry("weights averaged by samples; one architecture", fedavg.build),
    "fedprox": Entry("FedAvg with a spring to the received weights", fedprox.build, fedprox.Config),
    "fedper": Entry("the body averaged, heads at home", fedper.build, fedper.Config),
    "fedrep": Entry("as FedPer, head and body trained one after the other", fedrep.build, fedrep.Config),
    "fedala": Entry("FedAvg, the head taken over weight by weight", fedala.build, fedala.Config),
    "fesem": Entry("several global models, a client follows the nearest", fesem.build, fesem.Config),
    "feduv": Entry("FedAvg with varied outputs and spread features", feduv.build, feduv.Config),
    "fednh": Entry(
        "FedAvg with a classifier of unit vectors that follows class means", fednh.build, fednh.Config
    ),
    "fedfa": Entry("FedAvg with shared anchors for features and classifier", fedfa.build, fedfa.Config),
    "lg-fedavg": Entry("the classifier averaged, bodies at home", lg_fedavg.build),
    "fedgen": Entry("the classifier averaged and taught by a generator", fedgen.build, fedgen.Config),
    "fedpa": Entry("averaged weights, prototypes and an adversarial generator", fedpa.build, fedpa.Config),
    "fedgh": Entry("the server trains the classifier on prototypes", fedgh.build, fedgh.Config),
    "feddistill": Entry("class means of outputs averaged and distilled", feddistill.build, feddistill.Config),
    "fml": Entry("mutual learning with an averaged auxiliary network", fml.build, fml.Config),
    "fedkd": Entry("mentor and averaged mentee, singular values on the wire", fedkd.build, fedkd.Config),
    "fedproto": Entry("class means averaged, features pulled towards them", fedproto.build),
    "fedtgp": Entry("prototypes trained on the server with an adaptive margin", fedtgp.build, fedtgp.Config),
    "tinyproto": Entry(
        "sparse prototypes with adaptive scaling, on FedProto or FedTGP", tinyproto.build, tinyproto.Config
    ),
    "protonorm": Entry("prototypes aligned on the sphere, upscaled by the client", protonorm.build),
    "fedcpd": Entry("FedRep with prototypes and a memory of feature maps", fedcpd.build, fedcpd.Config),
    "gfpl": Entry(
        "Gaussian mixtures fused by distance, heads retrained on samples of them", gfpl.build, gfpl.Config
    ),
}

PROTECTED = (
    "fedproto",
    "fedtgp",
    "tinyproto",
    "protonorm",
    "fedgh",
)  # methods whose uploads are prototypes alone

SECTIONS: dict[str, type[Group]] = {name: entry.section for name, entry in METHODS.items() if entry.section}


def build_method(settings: Settings) -> Method[Any, Any, Any]:
    """Return the method that the configuration names.

    Raises:
        PbflError: if there is none of that name, or if its settings contradict each other.
    """
    name = settings.run.method
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        raise PbflError(f"method = '{name}': allowed is one of {', '.join(METHODS)}{hint}")
    method = METHODS[name].build(settings)
    if not method.protects_uploads and (asked := unprotected(settings.privacy)):
        raise PbflError(
            f"{', '.join(asked)}: method '{name}' sends {method.up.__name__}, which these settings cannot protect; "
            f"they apply to {', '.join(PROTECTED)}"
        )
    asked_clients = max(1, round(settings.run.fraction_train * settings.run.num_clients))
    if settings.privacy.secure_aggregation and not 3 <= asked_clients <= MOST_CLIENTS:
        raise PbflError(
            f"secure-aggregation = true needs at least 3 clients in a round and at most {MOST_CLIENTS}, found "
            f"{asked_clients} (num-clients, fraction-train)"
        )
    return method


def privacy_notes(settings: Settings, method: Method[Any, Any, Any]) -> list[str]:
    """Return a line where the default protection of the group ``privacy`` does not reach a method's uploads."""
    least = settings.privacy.min_class_count
    single = any("single samples" in reveal.what for reveal in method.reveals())
    if method.protects_uploads or least == 1 or not single:
        return []
    return [
        f"min-class-count = {least} does not apply: method '{method.name}' sends {method.up.__name__}, which show "
        "single samples (pbfl privacy)"
    ]
