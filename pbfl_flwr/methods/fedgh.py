"""FedGH: the server trains the global classifier on the clients' prototypes.

Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023.

Round: each client copies the global head φ, runs E epochs of SGD on cross-entropy over its whole network, and sends
c̄_ij, the mean feature of each of its classes. The server continues training φ by SGD on the cross-entropy of all
received pairs (c̄_ij, j), S epochs in shuffled batches.
Travels: down the head (K·d + K), up K_i·d numbers a client; no counts, no weights.
Predicts: the logits of the client's own body under the head that was just broadcast, before local training.
Differs from the paper: in its code the server's optimiser holds a client's network, so that the global header never
changes; here the header is optimised, as in HtFLlib. Prototypes are means over samples, in its code over batches; a
step is on a batch of prototypes, in its code on a single one.
Differs from the reference: the order in which the server sees the prototypes. Prototypes are taken over all training
samples; protocol "htfl" and "pfl" leave out the incomplete last batch (drop-last), as HtFLlib does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from pbfl_flwr import seeds
from pbfl_flwr.config import PROTECTIONS, Auto, Group, Settings, parse_section
from pbfl_flwr.method import Client, Method, Moment, Round, Update
from pbfl_flwr.methods.sharing import check_heads, initial, receive
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.payloads import Prototypes, RejectedPayload, Weights
from pbfl_flwr.prototypes.class_means import class_sums_of, released_means
from pbfl_flwr.prototypes.privacy import Release, release
from pbfl_flwr.prototypes.trainable import stack_uploads
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import classification, fit
from pbfl_flwr.training.optimizers import SGD, ParamGroup


class Config(Group):
    """Settings ``fedgh.*``."""

    server_epochs: int = Field(1, ge=1, le=100_000, description="S, server epochs per round")
    server_learning_rate: float = Field(0.01, gt=0, description="learning rate of the server's SGD")
    server_batch_size: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto", description="prototypes per batch on the server; auto: batch-size"
    )


@dataclass(frozen=True)
class FedGH(Method[Weights, Weights, Prototypes]):
    """See the module."""

    architecture: str
    epochs: int = 1
    learning_rate: float = 0.01
    batch_size: int = 32
    name: str = "fedgh"
    moment: Moment = "before"
    release: Release = field(default_factory=Release, repr=False)
    uses = frozenset(PROTECTIONS)

    state = Weights
    down = Weights
    up = Prototypes

    def init(self, task: Task, seed: int) -> Weights:
        """Return the head of a newly initialised network."""
        return initial(self.architecture, task, seed, "head")

    def install(self, client: Client, down: Weights) -> None:
        """Head <- φ."""
        receive(client, down, "head")

    def local_update(self, client: Client, down: Weights) -> Update[Prototypes]:
        """Head <- φ, train on cross-entropy, send class means of the trained network."""
        self.install(client, down)
        report = fit(client, classification(client.model))
        values, _, seen = class_sums_of(client).means()
        sent = self.release.table(client, released_means(client, self.release, values), seen)
        metrics = {**report.metrics(), **sent.metrics}
        upload = replace(sent.payload, counts=None, num_examples=None)
        return Update(upload, {**report.optimizer, **sent.memory}, metrics)

    def aggregate(self, state: Weights, uploads: Mapping[int, Prototypes], round_info: Round) -> Weights:
        """Train the head on the prototypes; without any it is not changed."""
        if not any(upload.num_present for upload in uploads.values()):
            return state
        vectors, labels = stack_uploads(uploads.values())  # (N, d), (N,)
        order = seeds.generator(round_info.seed, "fedgh", round_info.number)
        weight = nn.Parameter(state.tensors["head.weight"].clone())
        bias = nn.Parameter(state.tensors["head.bias"].clone())
        sgd = SGD([ParamGroup((weight, bias))], self.learning_rate, fused=False)
        for _ in range(self.epochs):
            for batch in torch.randperm(len(labels), generator=order).split(self.batch_size):
                logits = nn.functional.linear(vectors[batch], weight, bias)
                sgd.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(logits, labels[batch]))
                sgd.step()
        return Weights({"head.weight": weight.detach(), "head.bias": bias.detach()})

    def validate(self, upload: Prototypes, state: Weights, task: Task) -> None:
        """Check that rows have width d and come without counts."""
        if upload.values.shape[1] != task.feature_dim:
            raise RejectedPayload(f"rows are {upload.values.shape[1]} wide, expected {task.feature_dim}")
        if upload.counts is not None or upload.num_examples is not None:
            raise RejectedPayload("unexpected counts: FedGH sends none")

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that all heads are linear."""
        check_heads(self.name, task, [self.architecture, *architectures])

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """Σ_i (K_i·d + K·d + K)."""
        d, K = task.feature_dim, task.num_classes
        return float(sum(classes * d + K * d + K for classes in class_counts))


def build(settings: Settings) -> FedGH:
    """Return the method."""
    config = parse_section(Config, settings)
    batch = config.server_batch_size
    return FedGH(
        architectures(settings.models.models, settings.code)[0],
        config.server_epochs,
        config.server_learning_rate,
        settings.training.batch_size if batch == "auto" else batch,
        release=release(
            settings.privacy,
            "mean",
            sends_total=False,
            once=settings.training.drop_last != "always",
        ),
    )
