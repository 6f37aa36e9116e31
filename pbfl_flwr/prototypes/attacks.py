"""Simulated malicious clients: which clients of a run are malicious, and what they send instead of their class rows.

They train like all others and falsify only what leaves the device, after all stages that protect it; their own network
and memory are honest. Only in simulations: a device refuses a run with an attack
(:mod:`pbfl_flwr.flower.client.device`).

Source: known attacks on gradients and weights, here on class rows: flipped signs (Li et al. 2019, RSA), scaling
(Bagdasaryan et al. 2020, "How To Backdoor Federated Learning"), Gaussian noise (Blanchard et al. 2017, Krum); permuted
rows correspond to flipped labels of samples.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pbfl_flwr import seeds
from pbfl_flwr.config import AttackSettings, Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Update
from pbfl_flwr.payloads import Payload, Prototypes


def malicious(settings: Settings) -> tuple[int, ...]:
    """Return the ids of malicious clients, ascending: round(share·M) of the participating clients, drawn from the seed.

    Empty without an attack. They are the same for every kind of attack, and a smaller share gives a subset of those of
    a larger one.

    Raises:
        PbflError: if this would be no client, or all.
    """
    run, attack = settings.run, settings.attack
    if attack.kind == "none":
        return ()
    number = round(attack.share * run.participants)
    if not 0 < number < run.participants:
        raise PbflError(
            f"attack.share = {attack.share:g}: that is {number} of {run.participants} clients; must leave at least "
            "one malicious and one honest client"
        )
    order = np.random.default_rng(seeds.derive(run.seed, "malicious")).permutation(run.participants)
    return tuple(sorted(order[:number].tolist()))


def falsified(upload: Prototypes, attack: AttackSettings, generator: torch.Generator) -> Prototypes:
    """Return what a malicious client sends for c̄_ij; which classes it sends, and n_i, are not changed.

    ``sign-flip``: -c̄_ij. ``scale``: factor·c̄_ij. ``noise``: a random Gaussian direction of length ‖c̄_ij‖, drawn for
    every row. ``permute``: each row, with its count, is sent as that of the next higher class that the client holds,
    the highest as the lowest; with one class nothing changes. A zero row, which is an absent class in a dense upload,
    stays zero and does not count as held. Rows are in the form in which they travel: n-scaled, or compressed by
    a mask, so that under class-wise masks a permuted row is expanded by another class's mask.

    Args:
        upload: the honest one.
        attack: kind and factor.
        generator: for the noise, on the CPU.
    """
    rows = upload.values
    if attack.kind == "sign-flip":
        return replace(upload, values=-rows)
    if attack.kind == "scale":
        return replace(upload, values=rows * attack.factor)
    if attack.kind == "noise":
        drawn = torch.randn(rows.shape, generator=generator, dtype=torch.float64).to(rows.device)
        lengths = torch.linalg.vector_norm(rows.double(), dim=1, keepdim=True)
        noise = drawn / torch.linalg.vector_norm(drawn, dim=1, keepdim=True) * lengths
        return replace(upload, values=noise.to(rows.dtype))
    labels = (upload.present & (rows != 0).any(dim=1)).nonzero().flatten()
    values, counts = rows.clone(), upload.counts
    values[labels] = rows[labels].roll(1, 0)
    if counts is not None:
        counts = counts.clone()
        counts[labels] = counts[labels].roll(1, 0)
    return replace(upload, values=values, counts=counts)


def attacked(settings: Settings, client: Client, update: Update[Payload]) -> Update[Payload]:
    """Return the update that a client sends under the run's settings: falsified if it is malicious, else unchanged."""
    if client.id not in malicious(settings) or not isinstance(update.payload, Prototypes):
        return update
    return replace(update, payload=falsified(update.payload, settings.attack, client.generator("attack")))


def check_attack(settings: Settings, sent: type[Payload]) -> None:
    """Check that the configured attack is possible with a method's uploads.

    Args:
        settings: of the run.
        sent: type of the uploads.

    Raises:
        PbflError: if these are no class rows, or if no client or all of them would be malicious.
    """
    if malicious(settings) and not issubclass(sent, Prototypes):
        raise PbflError(
            f"attack.kind = '{settings.attack.kind}': method '{settings.run.method}' sends {sent.__name__}; needs a "
            "method that uploads class prototypes, e.g. 'fedproto'"
        )
