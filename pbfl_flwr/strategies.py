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

from pathlib import Path
from typing import ClassVar, Literal

from pbfl_flwr.config import Alignment, Auto, Scalar, Settings, key_of, parse
from pbfl_flwr.config.parsing import named_values
from pbfl_flwr.config.toml import toml
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.server.app import serve
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.methods.external import config_of
from pbfl_flwr.util.user_code import is_external, own_code

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
    "serve",
    "strategy_of",
]


def configure(method: str, **keys: Scalar) -> Settings:
    """Return checked settings of a method.

    Args:
        method: its name in METHODS, or ``my_package.module:build``.
        keys: run-config keys, with underscores. The method's own need no prefix, except where there is a common key of
            the same name: ``**{"fml.max-grad-norm": 5.0}``, or of a method of your own ``method_settings="..."``.
            Keys of an app, ``**{"app.noise": 0.1}``, are handed on in ``Settings.app``.

    Raises:
        PbflError: naming every key that is unknown, has an invalid value, or may be the method's or the common one.
    """
    if is_external(method):
        values = {key_of(keyword): value for keyword, value in keys.items()}
        return parse({"method": method, **_with_own_settings(method, values)}, SECTIONS)
    names = {keyword: key_of(keyword) for keyword in keys}
    if method in SECTIONS:
        own = set(SECTIONS[method].key_names()) - set(Settings().as_dict())
        names = {key: f"{method}.{name}" if name in own else name for key, name in names.items()}
    return parse({"method": method, **{name: keys[key] for key, name in names.items()}}, SECTIONS)


def _placed(method: str, directory: Path | None, keys: dict[str, Scalar]) -> Settings:
    """Return settings whose clients keep their states in the run's directory, unless a key names another one."""
    place: dict[str, Scalar] = {"run_dir": str(Path(directory).absolute())} if directory else {}
    return configure(method, **{**place, **keys})


def _with_own_settings(method: str, values: dict[str, Scalar]) -> dict[str, Scalar]:
    """Return run-config keys with those that only the user's method has as ``method-settings``."""
    text = str(values.get("method-settings", ""))
    try:
        named = named_values(text)
    except ValueError:
        return values  # refused with all other keys
    config, common = config_of(own_code(method, [method])), Settings().as_dict()
    own = {key: value for key, value in values.items() if config is not None and key in config.key_names()}
    if either := [key for key in own if key in common and key not in named]:
        raise PbflError(
            "\n".join(
                f"{key} = {own[key]!r}: both '{method}' and the run configuration have this key; "
                f"method_settings='{key}=...' sets the method's, and then {key.replace('-', '_')}=... the other one"
                for key in either
            )
        )
    only = {key: value for key, value in own.items() if key not in common}
    settings = [*([text] if text else []), *toml(only).splitlines()]
    others = {key: value for key, value in values.items() if key not in only}
    return {**others, "method-settings": ",".join(settings)}


class NamedStrategy(MethodStrategy):
    """The strategy of one method.

    Args:
        num_clients: M.
        directory: where the run is written, by simulated clients too; None keeps in memory what is the server's.
        keys: any other run-config key, with underscores: ``regularizer_weight`` (λ), ``aggregation``, ``cps_dim`` (s),
            ``cpkd``, ``learning_rate``, ... as in :func:`configure`.

    Raises:
        PbflError: naming every key that is unknown or has an invalid value.

    Attributes:
        method_name: its name in METHODS.
    """

    method_name: ClassVar[str]

    def __init__(self, *, num_clients: int, directory: Path | None = None, **keys: Scalar) -> None:
        super().__init__(
            _placed(self.method_name, directory, {"num_clients": num_clients, **keys}), directory
        )


class FedProto(NamedStrategy):
    """FedProto, and with CPS, PPA and CPKD its sparse, count-private and class-proportional variants."""

    method_name = "fedproto"


class FedTGP(NamedStrategy):
    """FedTGP: prototypes trained on the server.

    Args:
        server_epochs: S.
        margin_cap: τ.
        num_clients, directory, keys: see :class:`NamedStrategy`.
    """

    method_name = "fedtgp"

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        server_epochs: int = 100,
        margin_cap: float = 100.0,
        **keys: Scalar,
    ) -> None:
        own: dict[str, Scalar] = {"server_epochs": server_epochs, "margin_cap": margin_cap}
        super().__init__(num_clients=num_clients, directory=directory, **own, **keys)


class TinyProto(NamedStrategy):
    """TinyProto-FP and -FT: sparse prototypes with adaptive scaling.

    Args:
        base: "fedproto" or "fedtgp".
        aps_scale: μ; "auto" is 0.9·K/n with the K classes that have a row, and no row longer than the average one
            times K/n.
        num_clients, directory, keys: see :class:`NamedStrategy`.
    """

    method_name = "tinyproto"

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        base: Literal["fedproto", "fedtgp"] = "fedproto",
        aps_scale: float | Auto = "auto",
        **keys: Scalar,
    ) -> None:
        own: dict[str, Scalar] = {"base": base, "aps_scale": aps_scale}
        super().__init__(num_clients=num_clients, directory=directory, **own, **keys)


class ProtoNorm(NamedStrategy):
    """ProtoNorm: prototype alignment and upscaling.

    Args:
        upscale: γ.
        alignment: the solver.
        num_clients, directory, keys: see :class:`NamedStrategy`.
    """

    method_name = "protonorm"

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        upscale: float | Auto = "auto",
        alignment: Alignment | Auto = "auto",
        **keys: Scalar,
    ) -> None:
        own: dict[str, Scalar] = {"upscale": upscale, "alignment": alignment}
        super().__init__(num_clients=num_clients, directory=directory, **own, **keys)


class GFPL(NamedStrategy):
    """GFPL: Gaussian mixtures of features, pseudo-features, a dual classifier.

    Args:
        components: n, Gaussians per class on a client.
        samples: r, pseudo-features per class.
        start: t1, no exchange before this round.
        interval: S_T, exchange in rounds divisible by it.
        threshold: S_C, components closer than this are fused.
        num_clients, directory, keys: see :class:`NamedStrategy`.
    """

    method_name = "gfpl"

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
        own: dict[str, Scalar] = {"components": components, "samples": samples, "start": start}
        own |= {"interval": interval, "threshold": threshold}
        super().__init__(num_clients=num_clients, directory=directory, **own, **keys)


class FedCPD(NamedStrategy):
    """FedCPD: FedRep with memory distillation, alignment and contrast of prototypes.

    Args:
        align_weight: α.
        contrast_weight: β.
        distill_weight: γ.
        base: method to which the losses are added.
        num_clients, directory, keys: see :class:`NamedStrategy`; ``models`` names one architecture for all.
    """

    method_name = "fedcpd"

    def __init__(
        self,
        *,
        num_clients: int,
        directory: Path | None = None,
        align_weight: float = 0.002,
        contrast_weight: float = 0.1,
        distill_weight: float = 1.0,
        base: Literal["fedrep", "fedavg"] = "fedrep",
        **keys: Scalar,
    ) -> None:
        own: dict[str, Scalar] = {"align_weight": align_weight, "contrast_weight": contrast_weight}
        own |= {"distill_weight": distill_weight, "base": base}
        super().__init__(num_clients=num_clients, directory=directory, **own, **keys)


def strategy_of(
    method: str, *, num_clients: int, directory: Path | None = None, **keys: Scalar
) -> MethodStrategy:
    """Return the strategy of any method.

    Args:
        method: its name in METHODS, as ``pbfl list methods`` prints it, or ``my_package.module:build``.
        num_clients: M.
        directory: as in :class:`NamedStrategy`.
        keys: any other run-config key, as in :func:`configure`.

    Raises:
        PbflError: as :func:`configure`.
    """
    return MethodStrategy(_placed(method, directory, {"num_clients": num_clients, **keys}), directory)
