"""Scaling of prototypes: by sample counts before the upload (PPA, APS), and by a constant after the download."""

from __future__ import annotations

from torch import Tensor

from pbfl_flwr.errors import PbflError


def scale_by_counts(values: Tensor, counts: Tensor) -> Tensor:
    """Return n_ij·c̄_ij, which a client sends instead of prototype and count.

    Source: PPA, Eq. 11; TinyProto (APS), Eq. 10. The server needs only sums and thus learns no counts. For full
    (K, d) and compressed (K, s) prototypes; an absent class has the count 0 and stays a zero row.

    Args:
        values: (K, width) local prototypes.
        counts: (K,) n_ij.
    """
    return values * counts.to(values.device, values.dtype).unsqueeze(1)


def upscale(values: Tensor, gamma: float) -> Tensor:
    """Return γ·ĉ_j (ProtoNorm's Prototype Upscaling, Eq. 15), or μ·c_j (TinyProto's APS at the client, Eq. 11).

    Args:
        values: (K, d) global prototypes.
        gamma: γ or μ, a constant on the client; 1 changes nothing.
    """
    return values * gamma


def default_aps_scale(num_classes: int, num_examples: int) -> float:
    """Return μ = 0.9·K/n, a starting value for data on which the TinyProto paper gives no μ.

    The published constants are 0.9·K/n for CIFAR-10 and CIFAR-100, 0.83·K/n for Tiny-ImageNet and 0.4-0.5·K/n for
    the skewed GTSRB and Flowers-102, with n all samples of all clients: with the sum at the server, APS is PPA
    with a tunable constant.

    Args:
        num_classes: K.
        num_examples: n, samples of all clients, counted as in the n_ij that scale the uploads.

    Raises:
        PbflError: if n is not positive.
    """
    if num_examples < 1:
        raise PbflError(
            f"aps-scale = 'auto' is 0.9·K/n, but the number of examples n is {num_examples}; allowed is 1 or "
            "more"
        )
    return 0.9 * num_classes / num_examples
