"""The methods as ready Flower strategies, for other people's apps.

::

    from pbfl_flwr.strategies import TinyProto

    strategy = TinyProto(base="fedtgp", cps_dim=50, num_clients=10)   # ServerApp: strategy.start(grid)
    app = make_client_app(my_data, strategy.settings)                 # ClientApp: pbfl_flwr.flower.client

Both sides take the same settings, since a method is one page with both halves. Every other key of the run
configuration can be given too, with underscores: ``TinyProto(..., learning_rate=0.05, models="resnet8")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pbfl_flwr.config import Scalar, Settings, parse
from pbfl_flwr.flower.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS

Aggregation = Literal[
    "auto", "mean", "weighted", "weighted-shrunk", "ppa", "aps-sum", "aps-mean", "median", "trimmed-mean"
]
Alignment = Literal["auto", "off", "thomson", "simplex", "lbfgs"]
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
        PbflError: naming every key that is unknown or has a value that is not allowed.
    """
    flat = {key.replace("_", "-"): value for key, value in keys.items()}
    own = {f"{method}.{key.replace('_', '-')}": value for key, value in (section or {}).items()}
    return parse({"method": method, **flat, **own}, SECTIONS)


class FedProto(MethodStrategy):
    """FedProto, and with CPS, PPA and CPKD the sparse, count-private and proportional variants of it.

    Args:
        num_clients: M.
        directory: where the run is written; None keeps everything in memory.
        pull_weight: λ.
        aggregation: how the server combines prototypes.
        cps_dim: s, dimensions of a class that travel; 0 is off.
        cpkd: class-proportional pull.
        keys: any other run-config key, with underscores.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        pull_weight: float | Literal["auto"] = "auto",
        aggregation: Aggregation = "auto",
        cps_dim: int | Literal["auto"] = "auto",
        cpkd: Cpkd = "auto",
        **keys: Scalar,
    ) -> None:
        stages: dict[str, Scalar] = {
            "pull_weight": pull_weight,
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
        pull_weight, aggregation, cps_dim, cpkd: see :class:`FedProto`.
        keys: any other run-config key, with underscores.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        server_epochs: int = 100,
        margin_cap: float = 100.0,
        pull_weight: float | Literal["auto"] = "auto",
        aggregation: Aggregation = "auto",
        cps_dim: int | Literal["auto"] = "auto",
        cpkd: Cpkd = "auto",
        **keys: Scalar,
    ) -> None:
        own: dict[str, Scalar] = {"server-epochs": server_epochs, "margin-cap": margin_cap}
        stages: dict[str, Scalar] = {
            "pull_weight": pull_weight,
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
        pull_weight: λ.
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
        pull_weight: float | Literal["auto"] = "auto",
        **keys: Scalar,
    ) -> None:
        stages: dict[str, Scalar] = {"cps_dim": cps_dim, "aps_scale": aps_scale, "pull_weight": pull_weight}
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
        pull_weight: λ.
        keys: any other run-config key, with underscores.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        upscale: float | Literal["auto"] = "auto",
        alignment: Alignment = "auto",
        pull_weight: float | Literal["auto"] = "auto",
        **keys: Scalar,
    ) -> None:
        stages: dict[str, Scalar] = {"upscale": upscale, "alignment": alignment, "pull_weight": pull_weight}
        super().__init__(configure("protonorm", {"num_clients": num_clients, **stages, **keys}), directory)
