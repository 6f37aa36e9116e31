"""The aggregation rules: one entry each in RULES, from which everything else about a rule follows.

A rule of a user's, ``my_package.module:rule``, is a function of the rows of one class, or a :class:`Rule` like those.

PPA divides by n and APS multiplies by μ; both assume all clients. If only some answer, or a class is kept from
an earlier round, the scale is that of the samples actually in a sum. An n or μ in the configuration refers to its
num-clients, even before all of them have joined.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Round
from pbfl_flwr.payloads import Prototypes, RejectedPayload
from pbfl_flwr.prototypes import aggregation
from pbfl_flwr.util.user_code import called, import_function, import_named, is_external

if TYPE_CHECKING:
    from pbfl_flwr.prototypes.stages import Stages

Uploads = Mapping[int, Prototypes]
Combine = Callable[[Uploads, Round, "Stages"], Prototypes]
"""(at least one upload, the round, the stages) -> the aggregate; its num_examples is n_t if clients need it."""
Scale = Callable[[Uploads, Round, "Stages"], Tensor]
"""(uploads, the round, the stages) -> the factor of a scaled upload in FedTGP's training; of sums, times |N_j|."""
Sends = Literal["means", "means and counts", "sums"]
"""What clients send: c̄_ij; c̄_ij and n_ij; n_ij·c̄_ij."""
TELLS: dict[Sends, tuple[str, str]] = {
    "means": ("c̄_ij", "which classes the client has, and their mean features"),
    "means and counts": ("c̄_ij and n_ij", "the same, and the number of samples of each class"),
    "sums": (
        "n_ij·c̄_ij, and n_i unless `total-examples` or `aps-scale` is a number",
        "the same without n_ij, which the length of a row gives away",
    ),
}
"""What clients send, and what it tells the server, for docs/privacy.md."""


@dataclass(frozen=True)
class Rule:
    """An aggregation rule.

    Attributes:
        summary: one line for ``pbfl list rules``.
        combine: the server's function.
        sends: what clients send.
        scale: of sums; None if rows have the features' scale.
        streams: whether it reads one upload at a time.
        trains: whether it makes a difference to FedTGP's training, which takes the uploads themselves.
    """

    summary: str
    combine: Combine
    sends: Sends = "means"
    scale: Scale | None = None
    streams: bool = True
    trains: bool = False

    @property
    def counts(self) -> bool:
        """Whether clients send n_ij."""
        return self.sends == "means and counts"

    @property
    def scaled(self) -> bool:
        """Whether clients send n_ij·c̄_ij, not means."""
        return self.sends == "sums"

    @property
    def aps(self) -> bool:
        """Whether its scale is APS's μ, which clients apply to what the server broadcasts."""
        return self.scale is aps_scale or not self.summed

    @property
    def summed(self) -> bool:
        """Whether scaled rows are summed over the holders of a class, not averaged."""
        return self.scale is not aps_mean_scale


def _of_rows(function: Callable[[Iterable[Prototypes]], Prototypes]) -> Combine:
    """Return a rule that needs nothing but the uploads."""
    return lambda uploads, round_info, stages: function(uploads.values())


def _trimmed_mean(uploads: Uploads, round_info: Round, stages: Stages) -> Prototypes:
    return aggregation.trimmed_mean(uploads.values(), stages.trim_share)


def _ppa(uploads: Uploads, round_info: Round, stages: Stages) -> Prototypes:
    total = None if stages.sends_total else _expected_total(uploads, round_info, stages)
    return aggregation.ppa(uploads.values(), round_info.task.num_classes, total)


def _aps_sum(uploads: Uploads, round_info: Round, stages: Stages) -> Prototypes:
    return aggregation.aps(uploads.values(), _whole(uploads, round_info, stages), "sum")


def _aps_mean(uploads: Uploads, round_info: Round, stages: Stages) -> Prototypes:
    combined = aggregation.aps(uploads.values(), 1.0, "mean")  # μ is applied by the client
    everybody = _everybody(combined.num_examples or 0, uploads, round_info)
    return replace(combined, num_examples=everybody or None)


def ppa_scale(uploads: Uploads, round_info: Round, stages: Stages) -> Tensor:
    """Return PPA's K/n for every class (K,)."""
    num_classes = round_info.task.num_classes
    return torch.full((num_classes,), num_classes / _total(uploads, round_info, stages))


def aps_scale(uploads: Uploads, round_info: Round, stages: Stages) -> Tensor:
    """Return APS's μ of every class (K,); a configured one is for all clients."""
    sums = aggregation.aps(uploads.values(), 1.0, "sum")
    return mu(stages, sums, sums.num_examples) * _whole(uploads, round_info, stages)


def aps_mean_scale(uploads: Uploads, round_info: Round, stages: Stages) -> Tensor:
    """Return APS's μ of every class (K,) for a mean over the holders."""
    means = aggregation.aps(uploads.values(), 1.0, "mean")
    return mu(stages, means, _everybody(_total(uploads, round_info, stages), uploads, round_info))


RULES: dict[str, Rule] = {
    "mean": Rule("mean over the clients that hold the class", _of_rows(aggregation.mean), trains=True),
    "weighted": Rule(
        "mean over all samples of the class",
        _of_rows(aggregation.weighted),
        sends="means and counts",
    ),
    "weighted-shrunk": Rule(
        "that mean divided by the number of holders, as the papers print it",
        _of_rows(aggregation.weighted_shrunk),
        sends="means and counts",
    ),
    "ppa": Rule("PPA: K/n times the sum over all samples", _ppa, sends="sums", scale=ppa_scale, trains=True),
    "aps-sum": Rule(
        "APS as released: μ times the sum over all samples",
        _aps_sum,
        sends="sums",
        scale=aps_scale,
        trains=True,
    ),
    "aps-mean": Rule(
        "APS as printed: μ times the mean over the holders",
        _aps_mean,
        sends="sums",
        scale=aps_mean_scale,
        trains=True,
    ),
    "median": Rule(
        "median of every coordinate over the holders", _of_rows(aggregation.coordinate_median), streams=False
    ),
    "trimmed-mean": Rule(
        "mean of every coordinate without the extreme values (trim-share)", _trimmed_mean, streams=False
    ),
}


def rule_named(name: str) -> Rule:
    """Return the rule of this name.

    Raises:
        PbflError: if there is none, or it is code that may not be imported here, cannot be, or is no rule.
    """
    if is_external(name):
        return _own_rule(name)
    if name not in RULES:
        close = difflib.get_close_matches(name, RULES, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        raise PbflError(
            f"aggregation = '{name}': must be one of auto, {', '.join(RULES)}, or my_package.module:rule{hint}"
        )
    return RULES[name]


def _own_rule(spec: str) -> Rule:
    """Return a user's rule, with its function seeded and its result checked."""
    found = import_named("aggregation", spec)
    if isinstance(found, Rule):
        rule = found
        if rule.sends not in TELLS:
            raise PbflError(
                f"aggregation = '{spec}': sends = '{rule.sends}': must be one of {', '.join(TELLS)}"
            )
    else:
        of_class = import_function("aggregation", spec)

        def row(rows: Tensor) -> Tensor:
            return _row(called(of_class, "aggregation", spec, "rows", rows), rows, spec)

        rule = Rule("", _of_rows(lambda uploads: aggregation.per_class(uploads, row)), streams=False)

    def combine(uploads: Uploads, round_info: Round, stages: Stages) -> Prototypes:
        seed = seeds.derive(round_info.seed, "aggregation", round_info.number)
        arguments = (uploads, round_info, stages)
        with seeds.seeded(seed):
            combined = called(rule.combine, "aggregation", spec, "uploads, round, stages", *arguments)
        return _table(combined, next(iter(uploads.values())), spec)

    return replace(rule, combine=combine)


def _row(result: object, rows: Tensor, spec: str) -> Tensor:
    """Check what a user's function returned for the rows of a class."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not an array of numbers
        row = torch.as_tensor(result, dtype=rows.dtype).detach().cpu()
        if row.shape == rows.shape[1:] and bool(row.isfinite().all()):
            return row
    raise PbflError(
        f"aggregation = '{spec}': for rows {tuple(rows.shape)} the function returned {_shown(result)}, expected finite "
        f"numbers of shape {tuple(rows.shape[1:])}, one row for the class"
    )


def _shown(result: object) -> str:
    """Return the type of something that a user's function returned, its shape, and whether its numbers are finite."""
    if isinstance(result, Prototypes):
        return f"Prototypes of values {_shown(result.values)} and present {_shown(result.present)}"
    shape = getattr(result, "shape", None)
    finite = not isinstance(result, Tensor) or bool(result.isfinite().all())
    kind = f"{type(result).__name__}{'' if finite else ' with NaN or infinity'}"
    return kind if shape is None else f"{kind} {tuple(shape)}"


def _table(result: object, upload: Prototypes, spec: str) -> Prototypes:
    """Check what the function of a user's rule returned."""
    if isinstance(result, Prototypes):
        values, present = result.values, result.present
        fits = (values.shape, present.shape) == (upload.values.shape, upload.present.shape)
        if fits and present.dtype == torch.bool and bool(values.isfinite().all()):
            return replace(result, values=values.float())
    raise PbflError(
        f"aggregation = '{spec}': combine returned {_shown(result)}, expected Prototypes of finite values "
        f"{tuple(upload.values.shape)} and booleans present ({len(upload.present)},)"
    )


def at_scale_of(n_t: int | None, previous: Prototypes) -> Prototypes:
    """Rescale earlier sums over n samples to n_t samples, since clients multiply them by 0.9·K/n_t at most."""
    if not n_t or not previous.num_examples:
        return previous
    return replace(previous, values=previous.values * (n_t / previous.num_examples), num_examples=n_t)


def mu(stages: Stages, rows: Prototypes, num_examples: int | None) -> Tensor:
    """Return APS's μ of every class (K,): as configured, else 0.9·K/n, but no row longer than the average times K/n.

    0.9·K/n multiplies the mean of a class of average size by 0.9, as the paper's constants for balanced sets do, and
    that of a larger class by more, in every round. The limit ends that growth: sums are n_j·c̄_j, so that their average
    times K/n is the mean length of all samples' class means.

    Args:
        stages: with ``aps-scale``.
        rows: (K, s) the sums over the samples of each class, or the means over its holders.
        num_examples: n, the samples of the clients that the rows are from.

    Raises:
        RejectedPayload: if it is derived from n and n was not sent.
    """
    if stages.aps_scale != "auto":
        return torch.full((len(rows.values),), float(stages.aps_scale))
    if not num_examples:
        raise RejectedPayload(
            "aps-scale = 'auto' needs the number of examples n with the uploads, but none was sent"
        )
    lengths = rows.values.double().norm(dim=1)
    average = lengths[rows.present].mean()
    factors = torch.where(lengths > 0, average / lengths, torch.inf).clamp_max(0.9)
    return (factors * (int(rows.present.sum()) / num_examples)).float()


def _total(uploads: Uploads, round_info: Round, stages: Stages) -> float:
    """Return n_t, the number of training samples in this round's uploads."""
    if not stages.sends_total:
        return _expected_total(uploads, round_info, stages)
    return max(1, sum(upload.num_examples or 0 for upload in uploads.values()))


def _everybody(n_t: float, uploads: Uploads, round_info: Round) -> int:
    """Return n: a mean over holders does not grow with the number of answers, so μ is based on all clients' samples."""
    return round(n_t * round_info.num_clients / len(uploads))


def _expected_total(uploads: Uploads, round_info: Round, stages: Stages) -> float:
    return max(1, stages.total_examples * len(uploads) / round_info.configured_clients)


def _whole(uploads: Uploads, round_info: Round, stages: Stages) -> float:
    """Return the factor n/n_t from this round's sum to one over all clients, for a numeric μ: M / answers."""
    return 1.0 if stages.aps_scale == "auto" else round_info.configured_clients / len(uploads)
