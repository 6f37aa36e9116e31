"""FedALA: each client learns, weight by weight, how much of the global head to adopt.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023.

Round: the client copies the global weights, except for the last p tensors: these become θ̂ = θ_i + (θ - θ_i)⊙A.
A (initially 1, clipped to [0, 1]) is trained by SGD on the cross-entropy of the network with θ̂ over a random
contiguous slice of the client's data: the first time until the loss converges, later for one pass a round. Then the
client runs E epochs of SGD on cross-entropy over the whole network. The server averages, w <- Σ_i (n_i/Σn)·w_i.
Travels: all parameters, both ways, and n_i. A and the client's own last tensors stay.
Predicts: the logits of the network after this initialisation, before local training.
Differs from the paper: p counts parameter tensors from the end as in the published code, 2 being the last linear layer;
A is trained for at most fedala.max-epochs passes, where paper and code have no bound.
Differs from the references: PFLlib initialises all clients like this every round and keeps the result; here it is kept
only on clients that train. PFLlib detects its first round by comparing the first tensors, here by the client's memory.
A sees the incomplete last batch, which PFLlib dropped in 2023. A is computed twice, for scoring before training and for
training, from the same seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from pydantic import Field
from torch import Tensor

from pbfl_flwr import seeds
from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client, Update
from pbfl_flwr.methods.averaging import copies, load_parameters
from pbfl_flwr.methods.sharing import SharedWeights, answer
from pbfl_flwr.models.contract import body_names, has_batch_norm, head_names
from pbfl_flwr.models.isolation import restored
from pbfl_flwr.payloads import Weights, part_of
from pbfl_flwr.training.loop import classification, take


class Config(Group):
    """Settings ``fedala.*``."""

    tensors: int = Field(
        2, ge=0, description="p, number of parameter tensors, counted from the output, that are mixed; 0: all"
    )
    sample_share: float = Field(
        0.8, gt=0, le=1, description="s, share of the client's samples on which A is trained"
    )
    rate: float = Field(1.0, ge=0, description="η_A, learning rate of A")
    threshold: float = Field(
        0.1, gt=0, description="A has converged when the standard deviation of the last losses is below this"
    )
    window: int = Field(10, ge=2, description="number of last losses in that standard deviation")
    max_epochs: int = Field(
        100, ge=1, description="most passes to train A at the client's first participation"
    )


def mix(
    local: Mapping[str, Tensor], received: Mapping[str, Tensor], amounts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return θ̂ = θ_i + (θ - θ_i)⊙A, exactly θ where A is 1 and exactly θ_i where it is 0."""
    return {name: tensor.lerp(received[name], amounts[name]) for name, tensor in local.items()}


@dataclass(frozen=True)
class FedALA(SharedWeights):
    """See the module."""

    config: Config = field(default_factory=Config)

    def install(self, client: Client, down: Weights) -> None:
        """w_i <- w, but θ̂ for the last p tensors."""
        self._initialise(client, down)

    def local_update(self, client: Client, down: Weights) -> Update[Weights]:
        """Initialise and train; keep A and the client's own last tensors."""
        amounts, metrics = self._initialise(client, down)
        report = self.train(client, down)
        upload = answer(client, self.part)
        local = {name: upload.tensors[name] for name in self._mixed(client)}
        memory = {**{f"own.{name}": tensor for name, tensor in local.items()}, **report.optimizer}
        memory |= {f"ala.{name}": tensor for name, tensor in copies(amounts).items()}
        return Update(upload, memory, {**report.metrics(), **metrics})

    def _mixed(self, client: Client) -> list[str]:
        names = [*body_names(client.model), *head_names(client.model)]  # body first in every network
        return names[-self.config.tensors :]

    def _initialise(self, client: Client, down: Weights) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Initialise the client's network in place; return A (empty before the second participation) and metrics."""
        load_parameters(client.model, down.tensors)
        local = {name: t.to(client.device) for name, t in part_of(client.memory, "own").items()}
        if not local:
            return {}, {}
        received = {name: down.tensors[name].to(tensor) for name, tensor in local.items()}
        memory = part_of(client.memory, "ala")
        amounts = {
            name: memory[name].to(client.device) if memory else torch.ones_like(tensor)
            for name, tensor in local.items()
        }
        devices = [client.device] if client.device.type == "cuda" else []
        with seeds.restored(devices), restored(client.model):
            seeds.seed_code(client.device, client.seed, "ala-layers", client.key, client.round)
            passes = self._learn(client, local, received, amounts, once=bool(memory))
        load_parameters(client.model, mix(local, received, amounts))
        mean = torch.cat([a.flatten() for a in amounts.values()]).mean()
        return amounts, {"ala.mean": float(mean), "ala.passes": float(passes)}

    def _learn(
        self,
        client: Client,
        local: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        amounts: dict[str, Tensor],
        once: bool,
    ) -> int:
        """Train A in place, with the network as θ̂; return the number of passes."""
        config, size = self.config, client.training.batch_size
        trial = client.model.train().requires_grad_(False)
        upper = {name: p.requires_grad_(True) for name, p in trial.named_parameters() if name in local}
        load_parameters(trial, mix(local, received, amounts))
        n = len(client.data.train.labels)
        count = int(config.sample_share * n) or n
        start = int(torch.randint(n - count + 1, (1,), generator=client.generator("ala")))
        stops = range(start, start + count, size)
        slices = [slice(stop, min(stop + size, start + count)) for stop in stops]
        if has_batch_norm(trial):
            slices = [s for s in slices if s.stop - s.start > 1]
        ce, losses = classification(trial), list[float]()
        while slices and len(losses) < (1 if once else config.max_epochs):
            for chosen in slices:
                loss = ce(
                    *take(client.data, client.data.train, chosen, client.device, client.training.layout)
                )["ce"]
                gradients = torch.autograd.grad(loss, list(upper.values()), materialize_grads=True)
                for name, gradient in zip(upper, gradients, strict=True):
                    change = config.rate * gradient * (received[name] - local[name])
                    amounts[name] = (amounts[name] - change).clamp(0, 1)
                load_parameters(trial, mix(local, received, amounts))
            losses.append(float(loss.detach()))
            if len(losses) > config.window and statistics.pstdev(losses[-config.window :]) < config.threshold:
                break
        return len(losses)


def build(settings: Settings) -> FedALA:
    """Return the method."""
    return FedALA.configured("fedala", settings, config=parse_section(Config, settings))
