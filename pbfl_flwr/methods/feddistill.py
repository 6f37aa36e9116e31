"""FedDistill (federated distillation, FD): class means of outputs are averaged and distilled.

Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under Non-IID
Private Data", 2018.

Round: each client minimises CE(z, y) + γ·D(z, s_y), where s_y is the other clients' mean output for the sample's class
(if there is none, its own detached output), and sends, for every class that it trained on, the mean of the outputs it
computed during training. The server averages over the holders of a class.
Travels: up K_i·K, down K·K numbers a client.
Predicts: the logits of the client's own model.
Differs from the paper: feddistill.loss = "paper" is its form: outputs are probabilities, D is the cross-entropy, and a
client's own contribution is removed from s. The paper assumes full participation; here a class that nobody sent in a
round keeps its row (stale="drop" forgets it).
Differs from the references: under protocol "htfl" and "pfl" outputs are logits and D is the cross-entropy with
softmax(s), own contribution included ("ce-soft"); "mse" is the squared error of their first versions. Their present
cross-entropy with raw logits is left out: its gradient p·Σs - s does not vanish at z = s, and training diverges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr.config import Auto, Group, Settings, parse_section
from pbfl_flwr.config.keys import Stale
from pbfl_flwr.method import Client, Method, Round, Update
from pbfl_flwr.payloads import Logits, RejectedPayload, joined, part_of
from pbfl_flwr.prototypes import aggregation
from pbfl_flwr.prototypes.class_means import ClassSums
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import fit, forward

Form = Literal["paper", "ce-soft", "mse"]


class Config(Group):
    """Settings ``feddistill.*``."""

    distillation_weight: float = Field(1.0, ge=0, description="γ, weight of the distillation term")
    loss: Literal[Auto, Form] = Field(
        "auto",
        description="which outputs are averaged and which loss distils them; auto: paper under protocol clean, "
        "else ce-soft",
    )


@dataclass(frozen=True)
class DistillState:
    """The server's state.

    Attributes:
        table: mean outputs over the holders of each class, (K, K).
        holders: (K,) int64 |N_c|, number of clients in each row's mean.
        sent: client -> its rows in the mean as the tensors ``labels`` and ``rows`` of a payload, present ones only, if
            the loss needs them removed again; else empty.
    """

    table: Logits
    holders: Tensor
    sent: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def rows_of(self, client: int) -> Logits:
        """Return a client's rows in the mean, (K, K); none is present if it has none there."""
        values, present = torch.zeros_like(self.table.values), torch.zeros_like(self.table.present)
        if client in self.sent:
            labels = self.sent[client]["labels"].long()
            values[labels], present[labels] = self.sent[client]["rows"], True
        return Logits(values, present)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything under prefixed names; see :class:`pbfl_flwr.payloads.Payload`."""
        sent = {f"sent-{client}.{key}": t for client, rows in self.sent.items() for key, t in rows.items()}
        return {**joined(table=self.table), "holders": self.holders, **sent}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> DistillState:
        """Rebuild the state of a checkpoint."""
        names = {key.partition(".")[0] for key in tensors if key.startswith("sent-")}
        sent = {
            int(name.removeprefix("sent-")): Logits.from_tensors(part_of(tensors, name), task).to_tensors()
            for name in names
        }
        table = Logits.from_tensors(part_of(tensors, "table"), task)
        return cls(table, tensors["holders"], dict(sorted(sent.items())))


def distillation(logits: Tensor, labels: Tensor, table: Logits, form: Form) -> Tensor:
    """Return D(z, s_y), mean over the batch; samples whose class has no row have no gradient.

    Args:
        logits: (B, K) z, attached to the graph.
        labels: (B,) y.
        table: (K, K) probabilities ("paper") or logits, on the device of the logits.
        form: "paper": cross-entropy with s; "ce-soft": with softmax(s); "mse": squared error, mean over B·K.
    """
    rows, outputs = table.values, logits.detach()
    if form != "mse":
        rows, outputs = (rows if form == "paper" else rows.softmax(dim=1)), outputs.softmax(dim=1)
    targets = torch.where(table.present[labels].unsqueeze(1), rows[labels], outputs)  # (B, K)
    return (
        nn.functional.mse_loss(logits, targets)
        if form == "mse"
        else nn.functional.cross_entropy(logits, targets)
    )


@dataclass(frozen=True)
class FedDistill(Method[DistillState, Logits, Logits]):
    """See the module."""

    weight: float = 1.0
    form: Form = "paper"
    stale: Stale = "keep"
    name: str = "feddistill"

    state = DistillState
    down = Logits
    up = Logits
    uses = frozenset({"stale"})

    def init(self, task: Task, seed: int) -> DistillState:
        """No class has a row yet."""
        K = task.num_classes
        return DistillState(Logits.empty(K, K), torch.zeros(K, dtype=torch.int64))

    def broadcast(self, state: DistillState, client: int) -> Logits:
        """Return the mean outputs; in the paper's form without those of this client."""
        if client not in state.sent:
            return state.table
        contribution = state.rows_of(client)
        others = state.holders - contribution.present.long()
        total = state.table.values.double() * state.holders.unsqueeze(1) - contribution.values
        present = others > 0
        rows = torch.where(present.unsqueeze(1), total / others.clamp_min(1).unsqueeze(1), 0.0)
        return Logits(rows.clamp_min(0).to(torch.float32), present)

    def local_update(self, client: Client, down: Logits) -> Update[Logits]:
        """Train on cross-entropy and distillation; the outputs of every batch, before its step, are summed."""
        K = client.task.num_classes
        table = Logits(down.values.to(client.device), down.present.to(client.device))
        outputs = ClassSums(K, K, client.device)

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = forward(client.model, inputs)[1]
            values = logits.detach()
            outputs.add(values.softmax(dim=1) if self.form == "paper" else values, labels)
            terms = {"ce": nn.functional.cross_entropy(logits, labels)}
            if down.num_present:
                terms["distillation"] = self.weight * distillation(logits, labels, table, self.form)
            return terms

        report = fit(client, loss)
        values, present, _ = outputs.means()
        return Update(Logits(values, present), report.optimizer, report.metrics())

    def aggregate(
        self, state: DistillState, uploads: Mapping[int, Logits], round_info: Round
    ) -> DistillState:
        """Average every class over the clients that sent it."""
        if not uploads:
            return state
        fresh, holders = aggregation.mean_and_holders(uploads.values())
        table, _ = aggregation.keep_stale(state.table, fresh, mode=self.stale)
        stale = table.present & ~fresh.present
        sent: dict[int, Mapping[str, Tensor]] = {}
        if self.form == "paper":
            nothing = self.init(round_info.task, 0).table
            for client in sorted({*state.sent, *uploads}):
                old, new = state.rows_of(client), uploads.get(client, nothing)
                rows = torch.where(stale.unsqueeze(1), old.values, new.values)
                present = torch.where(stale, old.present, new.present)
                if bool(present.any()):
                    sent[client] = Logits(rows, present).to_tensors()
        return DistillState(
            Logits(table.values, table.present), torch.where(stale, state.holders, holders), sent
        )

    def validate(self, upload: Logits, state: DistillState, task: Task) -> None:
        """Check that there are no counts and, in the paper's form, that every row is a distribution."""
        if upload.counts is not None or upload.num_examples is not None:
            raise RejectedPayload("unexpected counts: FedDistill sends none")
        if self.form != "paper":
            return
        rows = upload.values[upload.present]
        # int8 on the wire changes each of the K numbers by up to 1/254 of the row's largest
        most = rows.amax(1)
        apart = (rows.sum(1) - 1).abs() > 0.05 + task.num_classes * most / 254
        if bool((rows < -0.01).any()) or bool((most > 1.01).any()) or bool(apart.any()):
            raise RejectedPayload("a row is not a probability distribution")

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """Σ_i K·(K_i + K)."""
        return float(sum(task.num_classes * (classes + task.num_classes) for classes in class_counts))


def build(settings: Settings) -> FedDistill:
    """Return the method."""
    config = parse_section(Config, settings)
    form: Form = "paper" if settings.run.protocol == "clean" else "ce-soft"
    return FedDistill(
        config.distillation_weight, form if config.loss == "auto" else config.loss, settings.prototypes.stale
    )
