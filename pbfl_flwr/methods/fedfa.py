"""FedFA: features are regularised towards anchors that all clients share, and the classifier is calibrated on them.

Zhou et al., "FedFA: Federated Learning with Feature Anchors to Align Features and Classifiers for Heterogeneous Data",
IEEE Transactions on Mobile Computing 2023.

Round: each client copies the weights w and anchors A (K x d). Every batch makes one SGD step on
CE + λ·(1/K)·Σ_b ‖z_b - A_{y_b}‖²/n_{y_b}, n_j the batch's samples of class j, then one Adam step of the classifier on
the anchors themselves, CE(head(A), 0..K-1). After each epoch a copy of its own classes' anchors moves halfway to the
epoch's mean features; the client sends weights and that copy. The server averages both, Σ_i n_i/Σn.
Travels: all parameters and the K·d anchors, both ways, and n_i.
Predicts: the logits of the global model, scored when it arrives.
Differs from the paper: nothing known in the equations; weight decay and learning rate decay are the run's settings.
Differs from the reference: a class's epoch mean is taken over the batches that hold the class; the code divides by all
batches, which moves anchors of rare classes towards zero (fedfa.anchor-mean="all-batches").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from pbfl_flwr import seeds
from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client, Update
from pbfl_flwr.methods.averaging import load_parameters
from pbfl_flwr.methods.sharing import SharedWeights, answer
from pbfl_flwr.payloads import Weights
from pbfl_flwr.prototypes.class_means import class_means, class_sums
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import fit, forward
from pbfl_flwr.training.optimizers import Adam, param_group

ANCHORS = ".anchors"  # name of A in the payload's weights; a network's own names do not begin with a dot


class Config(Group):
    """Settings ``fedfa.*``."""

    anchor_weight: float = Field(
        0.1, ge=0, description="λ, weight of the regularisation of features towards the anchors"
    )
    anchor_momentum: float = Field(
        0.5, ge=0, le=1, description="share of the old anchor when it is updated after an epoch"
    )
    calibration_rate: float = Field(
        0.001, ge=0, description="learning rate of Adam for the classifier calibration; 0 is off"
    )
    anchor_mean: Literal["holding-batches", "all-batches"] = Field(
        "holding-batches",
        description="mean feature of a class in an epoch: over the batches that contain it, or over all (reference)",
    )


def initial_anchors(num_classes: int, feature_dim: int, seed: int) -> Tensor:
    """Return the initial A (K, d): K different standard basis vectors; normalised Gaussian rows if K > d."""
    random = seeds.generator(seed, "fedfa")
    if num_classes <= feature_dim:
        return torch.eye(feature_dim)[torch.randperm(feature_dim, generator=random)[:num_classes]]
    return F.normalize(torch.randn(num_classes, feature_dim, generator=random), dim=1)


def anchor_loss(features: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """Return (1/K)·Σ_b ‖z_b - A_{y_b}‖²/n_{y_b}, n_j the samples of class j in the batch."""
    # torch.bincount would wait for a GPU.
    counts = labels.new_zeros(len(anchors)).index_add_(0, labels, torch.ones_like(labels))
    return ((features - anchors[labels]).square().sum(dim=1) / counts[labels]).sum() / len(anchors)


class RunningAnchors:
    """The client's copy of the anchors, updated after every epoch.

    Args:
        anchors: A as received, (K, d).
        momentum: weight of the old anchor.
        biased: divide an epoch's sum of batch means by all batches, not only those that hold the class.
    """

    def __init__(self, anchors: Tensor, momentum: float, biased: bool = False) -> None:
        self.anchors, self.momentum, self.biased = anchors.clone(), momentum, biased
        # Changed in place only, and on the device, since a CUDA graph adds to them.
        self.sums = torch.zeros_like(anchors)
        self.holding = torch.zeros(len(anchors), dtype=torch.int64, device=anchors.device)
        self.batches = torch.zeros((), dtype=torch.int64, device=anchors.device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add the class means of a batch of features (B, d)."""
        sums, counts = class_sums(features, labels, len(self.anchors))
        self.sums += class_means(sums, counts)
        self.holding += counts > 0
        self.batches += 1

    def close_epoch(self) -> None:
        """A_j <- momentum·A_j + (1-momentum)·m_j for the classes seen in the epoch."""
        divisor = self.batches.expand_as(self.holding) if self.biased else self.holding.clamp_min(1)
        moved = self.momentum * self.anchors + (1 - self.momentum) * self.sums / divisor[:, None]
        self.anchors = torch.where((self.holding > 0)[:, None], moved, self.anchors)
        for total in (self.sums, self.holding, self.batches):
            total.zero_()


@dataclass(frozen=True)
class FedFA(SharedWeights):
    """See the module."""

    config: Config = field(default_factory=Config)

    def init(self, task: Task, seed: int) -> Weights:
        """A newly initialised network and anchors."""
        weights = super().init(task, seed)
        anchors = initial_anchors(task.num_classes, task.feature_dim, seed)
        return replace(weights, tensors={**weights.tensors, ANCHORS: anchors})

    def install(self, client: Client, down: Weights) -> None:
        """w_i <- w."""
        load_parameters(client.model, self.network(down))

    def network(self, state: Weights) -> Mapping[str, Tensor]:
        """Return w."""
        return {name: tensor for name, tensor in state.tensors.items() if name != ANCHORS}

    def local_update(self, client: Client, down: Weights) -> Update[Weights]:
        """Train with anchor loss and calibration; send weights and moved anchors."""
        self.install(client, down)
        config, model = self.config, client.model
        anchors = down.tensors[ANCHORS].to(client.device)  # A, fixed in this round
        running = RunningAnchors(anchors, config.anchor_momentum, config.anchor_mean == "all-batches")
        adam = Adam([param_group(model.head)], config.calibration_rate, fused=False)
        every_class = torch.arange(len(anchors), device=client.device)

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            features, logits = forward(model, inputs)
            running.add(features.detach(), labels)
            anchor_term = config.anchor_weight * anchor_loss(features, labels, anchors)
            return {"ce": nn.functional.cross_entropy(logits, labels), "anchors": anchor_term}

        def calibrate() -> None:
            if config.calibration_rate:
                scores: Tensor = model.head(anchors)
                adam.zero_grad()
                nn.functional.cross_entropy(scores, every_class).backward()
                adam.step()

        report = fit(client, loss, after_step=calibrate, after_epoch=running.close_epoch)
        upload = answer(client, self.part)
        upload = replace(upload, tensors={**upload.tensors, ANCHORS: running.anchors.cpu()})
        return Update(upload, report.optimizer, report.metrics())

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·(|w| + K·d)."""
        anchors = 2 * len(class_counts) * task.num_classes * task.feature_dim
        return super().paper_scalars(task, class_counts) + anchors


def build(settings: Settings) -> FedFA:
    """Return the method."""
    return FedFA.configured("fedfa", settings, config=parse_section(Config, settings))
