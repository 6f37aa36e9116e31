"""METHODS, the table of all methods, one module each; builds and checks the configured method."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pbfl_flwr.config import PREDICTOR_NAME, PROTECTIONS, STAGES, Group, Settings, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.user_code import is_external

if TYPE_CHECKING:
    from pbfl_flwr.method import Method


@dataclass(frozen=True)
class Entry:
    """One method; its module is imported on first use, since that takes seconds.

    Attributes:
        summary: one line for ``pbfl list methods``.
        module: of this package, with ``build`` and, if the method has settings of its own, ``Config``.
        own_keys: whether it has settings of its own, ``<method>.<key>``.
    """

    summary: str
    module: str
    own_keys: bool = False

    @property
    def build(self) -> Callable[[Settings], Method[Any, Any, Any]]:
        """The module's ``build`` function."""
        build: Callable[[Settings], Method[Any, Any, Any]] = self._module().build
        return build

    @property
    def section(self) -> type[Group] | None:
        """The class of the method's own settings; None if it has none."""
        config: type[Group] | None = self._module().Config if self.own_keys else None
        return config

    def _module(self) -> Any:
        return import_module(f"{__name__}.{self.module}")


METHODS: dict[str, Entry] = {
    "local": Entry("no communication; each client trains alone", "local"),
    "fedavg": Entry("averages the weights, weighted by sample counts; one architecture", "fedavg"),
    "fedprox": Entry(
        "FedAvg with a proximal term: penalises the distance to the received weights",
        "fedprox",
        own_keys=True,
    ),
    "fedper": Entry("averages the body; each client keeps its own head", "fedper", own_keys=True),
    "fedrep": Entry("FedPer that trains the head first, then the body", "fedrep", own_keys=True),
    "fedala": Entry(
        "FedAvg with learned element-wise mixing of local and global head", "fedala", own_keys=True
    ),
    "fesem": Entry(
        "clustered FL: several global models, each client assigned to the nearest", "fesem", own_keys=True
    ),
    "feduv": Entry(
        "FedAvg with regularisers for classifier variance and feature uniformity", "feduv", own_keys=True
    ),
    "fednh": Entry(
        "FedAvg with a normalised classifier of unit rows, updated from class means", "fednh", own_keys=True
    ),
    "fedfa": Entry(
        "FedAvg with shared feature anchors that also calibrate the classifier", "fedfa", own_keys=True
    ),
    "lg-fedavg": Entry("averages the classifier; each client keeps its own body", "lg_fedavg"),
    "fedgen": Entry(
        "averages the classifier; a server-trained generator regularises the clients",
        "generative.fedgen",
        own_keys=True,
    ),
    "fedpa": Entry(
        "averages weights and prototypes; adversarially trained feature generator",
        "generative.fedpa",
        own_keys=True,
    ),
    "fedgh": Entry(
        "the server trains the global classifier on the clients' prototypes", "fedgh", own_keys=True
    ),
    "feddistill": Entry("averages per-class mean outputs and distils from them", "feddistill", own_keys=True),
    "fml": Entry(
        "mutual learning of each client's network and an averaged auxiliary network", "fml", own_keys=True
    ),
    "fedkd": Entry(
        "mutual distillation of a private mentor and a shared mentee sent SVD-compressed",
        "fedkd.method",
        own_keys=True,
    ),
    "fedmrl": Entry(
        "fuses each client's features with those of a small averaged network; both classify the result",
        "fedmrl",
        own_keys=True,
    ),
    "fedl2g": Entry(
        "clients learn guiding vectors for features or logits, by what a step helps their own loss",
        "fedl2g",
        own_keys=True,
    ),
    "fedproto": Entry("averages class means (prototypes); features are regularised towards them", "fedproto"),
    "fedtgp": Entry(
        "the server trains prototypes with an adaptive-margin contrastive loss", "fedtgp", own_keys=True
    ),
    "tinyproto": Entry(
        "sparse prototypes with adaptive scaling, on FedProto or FedTGP", "tinyproto", own_keys=True
    ),
    "protonorm": Entry("spreads prototypes on the unit sphere; clients scale them up", "protonorm"),
    "fedcpd": Entry(
        "FedRep with prototype losses and distillation from the previous feature maps",
        "fedcpd.method",
        own_keys=True,
    ),
    "gfpl": Entry(
        "exchanges Gaussian mixtures of features; retrains heads on samples from them",
        "gfpl.method",
        own_keys=True,
    ),
}


class _Sections(Mapping[str, type[Group]]):
    """Method name -> class of its own settings; a module is imported when its settings are looked up."""

    def __getitem__(self, name: str) -> type[Group]:
        if name not in self or (section := METHODS[name].section) is None:
            raise KeyError(name)
        return section

    def __contains__(self, name: object) -> bool:
        return name in METHODS and METHODS[str(name)].own_keys

    def __iter__(self) -> Iterator[str]:
        return (name for name, entry in METHODS.items() if entry.own_keys)

    def __len__(self) -> int:
        return sum(entry.own_keys for entry in METHODS.values())


SECTIONS: Mapping[str, type[Group]] = _Sections()


def build_method(settings: Settings) -> Method[Any, Any, Any]:
    """Return the configured method: one of METHODS, or ``my_package.module:build``.

    Raises:
        PbflError: if there is no such method, or if its settings contradict each other.
    """
    name = settings.run.method
    if name not in METHODS and not is_external(name):
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        raise PbflError(
            f"method = '{name}': must be one of {', '.join(METHODS)}, or my_package.module:build{hint}"
        )
    method = _built(settings)
    check_method(settings, method)
    _check(settings, method)
    return method


def check_method(settings: Settings, method: Method[Any, Any, Any]) -> None:
    """Check ``predicts`` and ``primary_predictor`` of the method, and the settings that not every method supports.

    Raises:
        PbflError: naming the key or attribute and what is allowed.
    """
    if odd := [name for name in method.predicts if name == "auto" or not re.fullmatch(PREDICTOR_NAME, name)]:
        raise PbflError(
            f"method '{method.name}': predicts contains {odd[0]!r}; must be up to 40 letters, digits, '-' and '_', a "
            "letter first, and not auto"
        )
    if method.primary_predictor not in method.predicts:
        raise PbflError(
            f"method '{method.name}': primary_predictor = '{method.primary_predictor}': must be one listed in "
            f"predicts: {', '.join(method.predicts)}"
        )
    predictor = settings.evaluation.predictor
    if predictor not in ("auto", *method.predicts):
        raise PbflError(
            f"predictor = '{predictor}': method '{method.name}' has no such predictor with these settings; must be "
            f"one of auto, {', '.join(method.predicts)}"
        )


def _built(settings: Settings) -> Method[Any, Any, Any]:
    if settings.run.method in METHODS:
        return METHODS[settings.run.method].build(settings)
    from pbfl_flwr.methods.external import build_external

    return build_external(settings)


def _check(settings: Settings, method: Method[Any, Any, Any]) -> None:
    """Check that a method supports all stages and privacy settings that the configuration asks for.

    Raises:
        PbflError: naming the settings that it does not support.
    """
    from pbfl_flwr.payloads import Nothing

    values, run = settings.as_dict(), settings.run
    defaults = parse({"method": run.method, "protocol": run.protocol}).as_dict()
    unused = [key for key in STAGES if key not in method.uses and values[key] != defaults[key]]
    if unused:
        raise PbflError(
            "\n".join(
                f"{key} = {values[key]!r}: method '{run.method}' has no such stage; must be "
                f"{defaults[key]!r}, the default"
                for key in unused
            )
        )
    # A number above its default asks for protection; settings of noise do nothing without it.
    needless = {"min-class-count"} if method.up is Nothing else set()  # no class is sent, however small
    others = [key for key in PROTECTIONS if key not in method.uses | needless and values[key] != "auto"]
    if asked := [key for key in others if float(values[key]) > float(defaults[key])]:
        raise PbflError(
            f"{', '.join(f'{key} = {values[key]!r}' for key in asked)}: method '{run.method}' sends "
            f"{method.up.__name__}, which these settings cannot protect; they apply to {', '.join(using(asked[0]))}"
        )


def using(key: str) -> list[str]:
    """Return the names of the methods that use a key; imports all of them, which takes seconds."""
    return [name for name in METHODS if key in _built(parse({"method": name}, SECTIONS)).uses]
