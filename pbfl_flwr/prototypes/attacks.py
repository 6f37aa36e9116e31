"""Malicious clients on purpose: who lies in a run, and what they send in the place of their class rows.

They train as everybody does, and lie in what leaves the device, after every stage that protects it; their own network
and memory are honest. In a simulation only: a device refuses a run that asks it to lie
(:mod:`pbfl_flwr.flower.client.device`).

Source: attacks that are known of gradients and weights, here on class rows: flipped signs (Li et al. 2019, RSA),
scaling (Bagdasaryan et al. 2020, "How To Backdoor Federated Learning"), Gaussian noise (Blanchard et al. 2017, Krum);
swapped rows are what flipped labels are among samples.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pbfl_flwr import seeds
from pbfl_flwr.config import Attack, Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Update
from pbfl_flwr.payloads import Payload, Prototypes


def malicious(settings: Settings) -> tuple[int, ...]:
    """Return who lies in a run, ascending: share·M clients (of those that take part), rounded, drawn from its seed.

    Nobody without an attack. The same for every kind of attack, and those of a smaller share are among those of a
    larger one.

    Raises:
        PbflError: if the share of this many clients is none of them, or all.
    """
    run = settings.run
    if not run.attack:
        return ()
    found = round(Attack.parse(run.attack).share * run.participants)
    if not 0 < found < run.participants:
        raise PbflError(
            f"attack = '{run.attack}': that is {found} of {run.participants} clients; allowed is a share of "
            "which at least one of them lies, and one does not"
        )
    order = np.random.default_rng(seeds.derive(run.seed, "malicious")).permutation(run.participants)
    return tuple(sorted(order[:found].tolist()))


def falsified(upload: Prototypes, attack: Attack, generator: torch.Generator) -> Prototypes:
    """Return what a malicious client sends for c̄_ij; which classes it sends, and n_i, stay.

    ``sign-flip``: -c̄_ij. ``scale``: factor·c̄_ij. ``noise``: a Gaussian direction of the length ‖c̄_ij‖, new for every
    row. ``permute``: the row of each class, with its count, under the name of the next higher class that the client
    holds, that of the highest under the lowest; a client with one class has nothing to swap. A zero row, which is an
    absent class of a dense upload, stays zero and is not held. The rows are as they travel: n-scaled, or compressed by
    a mask, so that under class-wise masks a permuted row is read through another class's mask.

    Args:
        upload: the honest one.
        attack: what is done to it.
        generator: of the noise, on the CPU.
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
    held = (upload.present & (rows != 0).any(dim=1)).nonzero().flatten()
    values, counts = rows.clone(), upload.counts
    values[held] = rows[held].roll(1, 0)
    if counts is not None:
        counts = counts.clone()
        counts[held] = counts[held].roll(1, 0)
    return replace(upload, values=values, counts=counts)


def attacked(settings: Settings, client: Client, update: Update[Payload]) -> Update[Payload]:
    """Return a client's update as the run configuration wants it sent: falsified if it is malicious, else as it is."""
    if client.id not in malicious(settings) or not isinstance(update.payload, Prototypes):
        return update
    attack = Attack.parse(settings.run.attack)
    return replace(update, payload=falsified(update.payload, attack, client.generator("attack")))


def check_attack(settings: Settings, sent: type[Payload]) -> None:
    """Check that a method's clients can lie as the configuration wants it.

    Args:
        settings: of the run.
        sent: what they upload.

    Raises:
        PbflError: if that is no rows of classes, or if none or all of the clients would lie.
    """
    if malicious(settings) and not issubclass(sent, Prototypes):
        raise PbflError(
            f"attack = '{settings.run.attack}': method '{settings.run.method}' sends {sent.__name__}; allowed is a "
            "method whose uploads are rows of classes, e.g. 'fedproto'"
        )
