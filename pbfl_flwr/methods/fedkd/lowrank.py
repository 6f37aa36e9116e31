"""Compression of weights by truncated singular value decomposition (SVD).

A matrix W (P, Q) is sent as its k largest singular triples, W ≈ U·diag(σ)·V: k·(P + Q + 1) numbers, where k is the
smallest that keeps more than the share ``energy`` of Σσ². Source: FedKD (Wu et al. 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from pbfl_flwr.payloads import Factors, LowRank, RejectedPayload

Scheme = Literal["safe", "as-coded"]


def compress(
    tensors: Mapping[str, Tensor],
    energy: float,
    scheme: Scheme,
    *,
    base: int = -1,
    version: int = 0,
    num_examples: int = 0,
) -> LowRank:
    """Return tensors with their matrices truncated.

    "safe": a convolution (O, I, h, w) is the matrix (O, I·h·w); 1 <= k <= rank; a tensor stays dense if its factors
    would not be smaller, so that never more is sent than without compression. The relative error of a tensor is below
    sqrt(1 - energy).
    "as-coded" is HtFLlib and PFLlib: a convolution is O·I matrices (h, w) with one k for all; k = rank is never tried,
    and where it would be needed k is 0, i.e. the whole tensor becomes zero; tensors never stay dense for size.

    Args:
        tensors: name -> tensor.
        energy: share of Σσ² to keep, in (0, 1].
        scheme: see above.
        base: see :class:`LowRank`.
        version: see :class:`LowRank`.
        num_examples: see :class:`LowRank`.
    """
    dense: dict[str, Tensor] = {}
    factors: dict[str, Factors] = {}
    for name, tensor in tensors.items():
        factorised = None
        if tensor.dim() > 1 and len(tensor) > 1 and bool(tensor.any()):
            factorised = truncated(tensor, energy, scheme)
        if factorised is None:
            dense[name] = tensor
        else:
            factors[name] = factorised
    return LowRank(dense, factors, base, version, num_examples)


def truncated(tensor: Tensor, energy: float, scheme: Scheme) -> Factors | None:
    """Return the truncated SVD of a tensor with at least two axes; None if it should stay dense.

    Computed on the CPU in float64; the factors are float32.
    """
    wide = tensor.detach().cpu().double()
    matrices = wide if scheme == "as-coded" else wide.flatten(1)
    u, sigma, v = torch.linalg.svd(matrices, full_matrices=False)
    energies = sigma.square().reshape(-1, sigma.shape[-1]).sum(0).cumsum(0)  # over all matrices of a batch
    enough = energies > energy * energies[-1]  # never true at energy 1: compared with its own last value
    rank = len(energies)
    if scheme == "as-coded":
        first = enough[:-1].nonzero()
        k = int(first[0]) + 1 if len(first) else 0
    else:
        k = int(enough.nonzero()[0]) + 1 if bool(enough.any()) else rank
        if k * (u.shape[0] + v.shape[1] + 1) >= tensor.numel():
            return None
    return Factors(u[..., :k].float(), sigma[..., :k].float(), v[..., :k, :].float())


def expand(payload: LowRank, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Rebuild the tensors of a payload, in the order and with the shapes of ``shapes``.

    Raises:
        RejectedPayload: if a tensor is missing, unexpected or of another shape.
    """
    check_shapes(payload, shapes)
    return {
        name: payload.dense[name] if name in payload.dense else payload.factors[name].product().reshape(shape)
        for name, shape in shapes.items()
    }


def check_shapes(payload: LowRank, shapes: Mapping[str, torch.Size]) -> None:
    """Check that a payload has exactly the tensors of ``shapes``; a convolution may be given as a matrix.

    Raises:
        RejectedPayload: naming the first difference.
    """
    payload_shapes = {name: tuple(tensor.shape) for name, tensor in payload.dense.items()}
    payload_shapes |= {name: factors.shape for name, factors in payload.factors.items()}
    if different := set(payload_shapes) ^ set(shapes):
        raise RejectedPayload(f"tensor '{min(different)}' is missing or unexpected")
    for name, shape in shapes.items():
        as_matrix = (shape[0], shape[1:].numel()) if name in payload.factors else tuple(shape)
        if payload_shapes[name] not in (tuple(shape), as_matrix):
            raise RejectedPayload(
                f"tensor '{name}' has shape {payload_shapes[name]}, expected {tuple(shape)}"
            )
