"""Clients that send false prototypes: Flower mods, one for each kind of attack.

    PYTHONPATH=docs/examples pbfl run fedproto-digits --set mods=attacker:sign_flip --set aggregation=median

A share of a simulation's clients falsifies the rows of its upload (a row is what a client sends for one class) in every
round. They train like all others, and their own networks and memories are their own. The accuracies of such a run are
over all its clients; :func:`attackers` says whom to leave out.

Source: known attacks on gradients and weights, here on class rows: flipped signs (Li et al. 2019, RSA), scaling
(Bagdasaryan et al. 2020, "How To Backdoor Federated Learning"), Gaussian noise (Blanchard et al. 2017, Krum); permuted
rows correspond to flipped labels of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire

SHARE = 0.2  # of the clients, rounded

Upload = dict[str, Tensor]
"""What travels: ``labels`` (n,), their ``rows`` (n, width) and, with some rules, ``counts`` (n,) and ``n`` (1,)."""


def attackers(num_clients: int, seed: int) -> list[int]:
    """Return the clients that attack, ascending, drawn from the run's seed: those of a smaller SHARE and some more."""
    order = np.random.default_rng(seeds.derive(seed, "malicious")).permutation(num_clients)
    return sorted(order[: round(SHARE * num_clients)].tolist())


def attacker(falsify: Callable[[Upload], Upload]) -> Mod:
    """Return the mod whose attackers falsify their uploads so."""

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply, node, run = call_next(message, context), context.node_config, context.run_config
        chosen = attackers(int(node["num-partitions"]), int(run.get("seed", 0)))
        if message.metadata.message_type == "train" and node["partition-id"] in chosen:
            upload = wire.decode_tensors(reply.content.array_records[wire.PAYLOAD])
            if "rows" not in upload:
                raise PbflError("attacker: needs a method that uploads class prototypes, e.g. 'fedproto'")
            dtype = cast(wire.WireDtype, run.get("wire-dtype", "float32"))
            reply.content[wire.PAYLOAD] = wire.encode_tensors(falsify(upload), dtype)
        return reply

    return mod


def flipped(upload: Upload) -> Upload:
    """-c for every row c."""
    return {**upload, "rows": -upload["rows"]}


def scaled(factor: float) -> Callable[[Upload], Upload]:
    """factor·c for every row c; the factor may be negative."""
    return lambda upload: {**upload, "rows": factor * upload["rows"]}


def randomised(upload: Upload) -> Upload:
    """A random Gaussian direction of length ‖c‖ for every row c; torch is seeded for mods."""
    rows = upload["rows"]
    drawn, lengths = torch.randn(rows.shape), rows.norm(dim=1, keepdim=True)
    return {**upload, "rows": drawn / drawn.norm(dim=1, keepdim=True) * lengths}


def permuted(upload: Upload) -> Upload:
    """Each row, with its count, under the name of the next class that the client holds, the highest as the lowest."""
    held = upload["rows"].any(dim=1).nonzero().flatten()
    moved = {name: upload[name] for name in ("rows", "counts") if name in upload}
    return {**upload, **{name: t.index_copy(0, held, t[held].roll(1, 0)) for name, t in moved.items()}}


sign_flip = attacker(flipped)
scale_10 = attacker(scaled(10.0))
noise = attacker(randomised)
permute = attacker(permuted)
