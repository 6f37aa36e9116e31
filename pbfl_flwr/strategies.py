"""The methods as Flower strategies, for use in other apps.

::

    from pbfl_flwr.strategies import TinyProto, make_client_app

    strategy = TinyProto(base="fedtgp", cps_dim=50, num_clients=10)   # in your ServerApp: strategy.start(grid)
    app = make_client_app(my_data, strategy.settings)                 # your ClientApp

Server and clients use the same settings. Any other key of the run configuration can be given as well, with underscores:
``TinyProto(..., learning_rate=0.05, models="resnet8")``. The prototype methods have classes with typed keywords;
:func:`strategy_of` makes the strategy of any method by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pbfl_flwr.config import Scalar, Settings, parse
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS

__all__ = [
    "GFPL",
    "FedCPD",
    "FedProto",
    "FedTGP",
    "MethodStrategy",
    "ProtoNorm",
    "TinyProto",
    "configure",
    "make_client_app",
    "strategy_of",
]

Aggregation = Literal[
    "auto", "mean", "weighted", "weighted-shrunk", "ppa", "aps-sum", "aps-mean", "median", "trimmed-mean"
]
Alignment = Literal["auto", "off", "unit", "thomson", "simplex", "lbfgs"]
Cpkd = Literal["auto", "off", "sample", "class"]


def configure(
    method: str, keys: Mapping[str, Scalar], section: Mapping[str, Scalar] | None = None
) -> Settings:
    """Return checked settings of a method.

    Args:
        method: its name in METHODS.
        keys: run-config keys, with underscores.
        section: the method's own settings, without the prefix.

    Raises:
        PbflError: naming every key that is unknown or has an invalid value.
    """
    flat = {key.replace("_", "-"): value for key, value in keys.items()}
    own = {f"{method}.{key.replace('_', '-')}": value for key, value in (section or {}).items()}
    return parse({"method": method, **flat, **own}, SECTIONS)


class FedProto(MethodStrategy):
    """FedProto, and with CPS, PPA and CPKD its sparse, count-private and class-proportional variants.

    Args:
        num_clients: M.
        directory: where the run is written; None keeps everything in memory.
        regularizer_weight: λ.
        aggregation: how the server combines prototypes.
        cps_dim: s, number of dimensions of a prototype that are sent; 0 sends all.
        cpkd: class-proportional knowledge distillation.
        keys: any other run-config key, with underscores.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        regularizer_weight: float | Literal["auto"] = "auto",
        aggregation: Aggregation = "auto",
        cps_dim: int | Literal["auto"] = "auto",
        cpkd: Cpkd = "auto",
        **keys: Scalar,
    ) -> None:
        stages: dict[str, Scalar] = {
            "regularizer_weight": regularizer_weight,
            "aggregation": aggregation,
            "cps_dim": cps_dim,
            "cpkd": cpkd,
        }
        super().__init__(configure("fedproto", {"num_clients": num_clients, **stages, **keys}), directory)


class FedTGP(MethodStrategy):
    """FedTGP: prototypes trained on the server.

    Args:
        num_clients: M.
        directory: where the run is written; None keeps everything in memory.
        server_epochs: S.
        margin_cap: τ.
        regularizer_weight, aggregation, cps_dim, cpkd: see :class:`FedProto`.
        keys: any other run-config key, with underscores.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        server_epochs: int = 100,
        margin_cap: float = 100.0,
        regularizer_weight: float | Literal["auto"] = "auto",
        aggregation: Aggregation = "auto",
        cps_dim: int | Literal["auto"] = "auto",
        cpkd: Cpkd = "auto",
        **keys: Scalar,
    ) -> None:
        own: dict[str, Scalar] = {"server-epochs": server_epochs, "margin-cap": margin_cap}
        stages: dict[str, Scalar] = {
            "regularizer_weight": regularizer_weight,
            "aggregation": aggregation,
            "cps_dim": cps_dim,
            "cpkd": cpkd,
        }
        super().__init__(configure("fedtgp", {"num_clients": num_clients, **stages, **keys}, own), directory)


class TinyProto(MethodStrategy):
    """TinyProto-FP and -FT: sparse prototypes with adaptive scaling.

    Args:
        base: "fedproto" or "fedtgp".
        num_clients: M.
        directory: where the run is written; None keeps everything in memory.
        cps_dim: s.
        aps_scale: μ; "auto" is 0.9·K/n.
        regularizer_weight: λ.
        keys: any other run-config key, with underscores.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        base: Literal["fedproto", "fedtgp"] = "fedproto",
        directory: Path | None = None,
        cps_dim: int | Literal["auto"] = "auto",
        aps_scale: float | Literal["auto"] = "auto",
        regularizer_weight: float | Literal["auto"] = "auto",
        **keys: Scalar,
    ) -> None:
        stages: dict[str, Scalar] = {
            "cps_dim": cps_dim,
            "aps_scale": aps_scale,
            "regularizer_weight": regularizer_weight,
        }
        super().__init__(
            configure("tinyproto", {"num_clients": num_clients, **stages, **keys}, {"base": base}), directory
        )


class ProtoNorm(MethodStrategy):
    """ProtoNorm: prototype alignment and upscaling.

    Args:
        num_clients: M.
        directory: where the run is written; None keeps everything in memory.
        upscale: γ.
        alignment: the solver.
        regularizer_weight: λ.
        keys: any other run-config key, with underscores.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        upscale: float | Literal["auto"] = "auto",
        alignment: Alignment = "auto",
        regularizer_weight: float | Literal["auto"] = "auto",
        **keys: Scalar,
    ) -> None:
        stages: dict[str, Scalar] = {
            "upscale": upscale,
            "alignment": alignment,
            "regularizer_weight": regularizer_weight,
        }
        super().__init__(configure("protonorm", {"num_clients": num_clients, **stages, **keys}), directory)


class GFPL(MethodStrategy):
    """GFPL: Gaussian mixtures of features, pseudo-features, a dual classifier.

    Args:
        num_clients: M.
        directory: where the run is written; None keeps everything in memory.
        components: n, Gaussians per class on a client.
        samples: r, pseudo-features per class.
        start: t1, no exchange before this round.
        interval: S_T, exchange in rounds divisible by it.
        threshold: S_C, components closer than this are fused.
        keys: any other run-config key, with underscores.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        components: int = 4,
        samples: int = 16,
        start: int = 10,
        interval: int = 10,
        threshold: float = 1.0,
        **keys: Scalar,
    ) -> None:
        own: dict[str, Scalar] = {
            "components": components,
            "samples": samples,
            "start": start,
            "interval": interval,
            "threshold": threshold,
        }
        super().__init__(configure("gfpl", {"num_clients": num_clients, **keys}, own), directory)


class FedCPD(MethodStrategy):
    """FedCPD: FedRep with memory distillation, alignment and contrast of prototypes.

    Args:
        num_clients: M.
        directory: where the run is written; None keeps everything in memory.
        align_weight: α.
        contrast_weight: β.
        distill_weight: γ.
        base: method to which the losses are added.
        keys: any other run-config key, with underscores; ``models`` names one architecture for all.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        align_weight: float = 0.02,
        contrast_weight: float = 1.0,
        distill_weight: float = 1.0,
        base: Literal["fedrep", "fedavg"] = "fedrep",
        **keys: Scalar,
    ) -> None:
        own: dict[str, Scalar] = {
            "align-weight": align_weight,
            "contrast-weight": contrast_weight,
            "distill-weight": distill_weight,
            "base": base,
        }
        super().__init__(configure("fedcpd", {"num_clients": num_clients, **keys}, own), directory)


def strategy_of(
    method: str,
    *,
    num_clients: int,
    directory: Path | None = None,
    section: Mapping[str, Scalar] | None = None,
    **keys: Scalar,
) -> MethodStrategy:
    """Return the strategy of any method.

    Args:
        method: its name in METHODS, as ``pbfl list methods`` prints it.
        num_clients: M.
        directory: where the run is written; None keeps everything in memory.
        section: the method's own settings, without its prefix: ``{"server_epochs": 5}`` for ``fedgh.server-epochs``.
        keys: any other run-config key, with underscores.

    Raises:
        PbflError: naming every key that is unknown or has an invalid value.
    """
    return MethodStrategy(configure(method, {"num_clients": num_clients, **keys}, section), directory)
