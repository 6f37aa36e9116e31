"""What an upload of class rows reveals to the server under the privacy settings."""

from __future__ import annotations

from dataclasses import replace

from pbfl_flwr.config import PrivacySettings
from pbfl_flwr.payloads.reveals import COUNTS, HOLDER, MEANS, PRESENCE, SINGLE, TOTAL, Reveal
from pbfl_flwr.prototypes.stages import WEIGHTED_RULES

MASKED = "masked by SecAgg+ (its strength: docs/privacy.md); the server learns only"


def revealed(
    keys: PrivacySettings, rule: str, *, minimum: int, scaled: bool, sends_total: bool
) -> tuple[Reveal, ...]:
    """Return presence, rows, single samples, counts, n_i and the single holder's row, with the effect of the settings.

    Args:
        keys: the privacy settings.
        rule: the server's aggregation rule.
        minimum: m, number of samples below which a class is held back.
        scaled: whether rows are n_ij·c̄_ij, not means.
        sends_total: whether uploads have n_i.
    """
    noisy = f"noise of {keys.dp_noise:g} times the sensitivity, unit {keys.dp_unit}" if keys.dp_noise else ""
    presence, rows, single, counts = PRESENCE, MEANS, SINGLE, COUNTS
    if scaled:
        rows = replace(
            rows,
            what="sums of features of each class",
            how="the rows n_ij·c̄_ij; divided by n_ij, class means",
        )
    if keys.dense_uploads and noisy:
        presence = presence.but("hidden", noisy)
    elif keys.dense_uploads:
        presence = presence.but(
            "blurred", "a zero row still marks an absent class; only the message's size is hidden"
        )
    if noisy:
        rows, single = rows.but("blurred", noisy), single.but("blurred", noisy)
    elif keys.dp_clip:
        rows = replace(rows, how=f"{rows.how}; norms are clipped to {keys.dp_clip:g}")
    if minimum > 1:
        single = single.but("hidden", f"classes of fewer than {minimum} samples are not sent")
    if scaled:
        how = "not sent, but the norm of n_ij·c̄_ij reveals most of them within 10 % (docs/privacy.md)"
        how = f"{how}; {noisy}" if noisy else how
        counts = replace(counts.but("blurred", how), hide="dp-noise, secure-aggregation, or count-bucket")
    elif rule not in WEIGHTED_RULES:
        counts = counts.but("hidden", f"rule '{rule}' sends none")
    total = TOTAL if sends_total else TOTAL.but("hidden", "not part of the upload")
    if keys.count_bucket != "off":
        said = f"rounded to {'powers of two' if keys.count_bucket == 'powers' else keys.count_bucket}"
        counts, total = (
            one if one.state == "hidden" else one.but("blurred", f"{one.how}; {said}")
            for one in (counts, total)
        )
    if keys.secure_aggregation:
        holders, added, samples = "how many clients hold a class", "the sum of all rows", "Σ n_i"
        presence, rows, single, counts, total = (
            one if one.state == "hidden" else one.but("hidden", f"{MASKED} {learnt}")
            for one, learnt in (
                (presence, holders),
                (rows, added),
                (single, added),
                (counts, samples),
                (total, samples),
            )
        )
    return presence, rows, single, counts, total, HOLDER
