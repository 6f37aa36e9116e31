"""FedTGP's trainable global prototypes: a small network on the server whose outputs are the prototypes.

Source: FedTGP (Zhang et al. 2024), adaptive-margin-enhanced contrastive learning, as in its published code
(repository FedTGP).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pbfl_flwr import seeds
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.training.optimizers import SGD, param_group
from pbfl_flwr.util.cuda_graph import Recordings

Margin = Literal["nearest", "farthest"]
CONVERGED_LOSS = 1e-3  # FedTGP's README: the final server loss should be below this


class PrototypeGenerator(nn.Module):
    """TGP: one embedding per class through Linear -> ReLU -> Linear, all of width d; K·d + 2(d² + d) parameters.

    Args:
        num_classes: K.
        feature_dim: d.
    """

    def __init__(self, num_classes: int, feature_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, feature_dim)  # N(0, 1)
        self.hidden = nn.Linear(feature_dim, feature_dim)
        self.output = nn.Linear(feature_dim, feature_dim)

    def forward(self) -> Tensor:
        """Return the prototypes of all classes, (K, d)."""
        prototypes: Tensor = self.output(F.relu(self.hidden(self.embedding.weight)))
        return prototypes


@dataclass(frozen=True)
class ServerTraining:
    """Settings of FedTGP's server-trained prototypes.

    Attributes:
        epochs: S, passes over the uploaded prototypes in a round.
        batch_size, learning_rate: of the server's SGD.
        margin_cap: τ, upper bound of the adaptive margin.
        margin: which two classes define it; see :func:`adaptive_margin`.
        absent: whether a class that nobody ever sent is part of prediction and regularisation ("keep") or not
            ("exclude").
        device: where it is trained. On a GPU an epoch is one CUDA graph; sums have another order than on a CPU.
    """

    epochs: int = 100
    batch_size: int = 32
    learning_rate: float = 0.01
    margin_cap: float = 100.0
    margin: Margin = "nearest"
    absent: Literal["exclude", "keep"] = "exclude"
    device: Literal["cpu", "cuda"] = "cpu"


def initial_state(num_classes: int, feature_dim: int, seed: int) -> dict[str, Tensor]:
    """Return the parameters of a new generator (PyTorch's defaults); the global random state is restored."""
    with seeds.seeded(seed):
        network = PrototypeGenerator(num_classes, feature_dim)
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def stack_uploads(
    uploads: Iterable[Prototypes], scale: Tensor | None = None, summed: bool = True
) -> tuple[Tensor, Tensor]:
    """Collect all local prototypes of a round as training vectors.

    Under PPA and APS the uploads are n_ij·c̄_ij and are rescaled to the features' scale: each is multiplied
    by scale·|N_j|, with scale K/n (PPA on FedTGP, CPS paper's appendix) or μ (APS), by μ alone if APS takes the mean.
    The mean over the holders of a class is then exactly the PPA (APS) prototype, hence the factor |N_j| for sums.

    Args:
        uploads: local prototypes, full or expanded to (K, d).
        scale: (K,) K/n or μ of every class; None takes the vectors as they are.
        summed: whether that prototype is a sum over the holders, not their mean.

    Returns:
        vectors (N, d) float32 and labels (N,) int64, in the order of uploads, then of classes.

    Raises:
        ValueError: if there is no upload.
    """
    tables = list(uploads)
    if not tables:
        raise ValueError("no uploads to train prototypes on")
    labels = torch.cat([table.present.nonzero().flatten() for table in tables])
    vectors = torch.cat([table.values[table.present] for table in tables])
    if scale is not None:
        holders = torch.stack([table.present for table in tables]).sum(0)
        factors = scale[labels] * (holders[labels] if summed else torch.ones_like(labels))
        vectors = (vectors.double() * factors.unsqueeze(1)).to(torch.float32)
    return vectors, labels


def adaptive_margin(means: Tensor, present: Tensor, cap: float, of: Margin = "nearest") -> float:
    """Return δ = min(max_j gap_j, τ) over the classes present.

    "nearest" is the published code, gap_j = min_{k != j} ‖Q_j - Q_k‖₂ (also ProtoNorm's reading, Section 6.1);
    "farthest" is the paper's equation 9 as printed, gap_j = max_{k != j} ‖Q_j - Q_k‖₂: the largest distance of any two
    classes. With fewer than two classes δ = τ.

    Args:
        means: (K, d) Q_j, the clients' mean prototype of every class.
        present: (K,) bool.
        cap: τ.
        of: "nearest" or "farthest" other class.
    """
    rows = means[present].double()
    if len(rows) < 2:
        return cap
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    if of == "nearest":
        distances.fill_diagonal_(math.inf)
        distances = distances.min(dim=1).values
    return min(float(distances.max()), cap)


def margin_logits(vectors: Tensor, prototypes: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Return -(‖c̄_b - P_k‖₂ + δ·[k = y_b]) (B, K): the true class's logit is lowered by exactly δ.

    Squared distances come from a Gram matrix as in the published code, but are clamped at 1e-12 before the root:
    rounding can make them negative, and the root's derivative at zero is infinite.

    Args:
        vectors: (B, d) c̄_b.
        prototypes: (K, d) P.
        labels: (B,) y.
        margin: δ.
    """
    squared = (vectors**2).sum(1, keepdim=True) + (prototypes**2).sum(1) - 2 * vectors @ prototypes.T
    distances = squared.clamp_min(1e-12).sqrt()
    return -(distances + margin * F.one_hot(labels, len(prototypes)).to(distances.dtype))


def train_prototypes(
    state: Mapping[str, Tensor],
    vectors: Tensor,
    labels: Tensor,
    settings: ServerTraining,
    generator: torch.Generator,
) -> tuple[dict[str, Tensor], Tensor, dict[str, float]]:
    """Train the generator on this round's local prototypes and return the global ones.

    Each epoch shuffles all (c̄_ij, j), takes batches (including an incomplete last one) and steps on the
    cross-entropy of :func:`margin_logits` over all K outputs, so a class that nobody holds is trained only as a
    negative. The optimiser is plain SGD, as published.

    Args:
        state: the generator's parameters after the previous round, not changed.
        vectors: (N, d) local prototypes; without any, the generator is not trained.
        labels: (N,) their classes.
        settings: of the training.
        generator: for the order of the vectors, on the CPU; there the result depends only on it and the other
            arguments.

    Returns:
        The new parameters, the prototypes (K, d) float32 of all K classes, and metrics for the history: the last
        epoch's mean loss, the margin δ, whether the loss is below 1e-3, as FedTGP's README requires, and the epochs
        trained.
    """
    num_classes, feature_dim = state["embedding.weight"].shape
    device = torch.device(settings.device)
    network = PrototypeGenerator(num_classes, feature_dim)
    network.load_state_dict(dict(state))
    network.to(device)
    vectors = vectors.detach().to(torch.float32)
    labels = labels.to(torch.int64)
    sums = torch.zeros(num_classes, feature_dim, dtype=torch.float64).index_add_(0, labels, vectors.double())
    holders = torch.bincount(labels, minlength=num_classes)
    means = sums / holders.clamp_min(1).unsqueeze(1)
    margin = adaptive_margin(means, holders > 0, settings.margin_cap, settings.margin)
    vectors, labels = vectors.to(device), labels.to(device)
    optimizer = SGD([param_group(network)], settings.learning_rate, fused=False)
    losses = torch.zeros(
        math.ceil(len(vectors) / settings.batch_size), device=device
    )  # of an epoch's batches

    def epoch(order: Tensor) -> None:
        for place, batch in enumerate(torch.split(order, settings.batch_size)):
            logits = margin_logits(vectors[batch], network(), labels[batch], margin)
            batch_loss = F.cross_entropy(logits, labels[batch])
            optimizer.zero_grad()
            torch.autograd.backward(batch_loss)
            optimizer.step()
            losses[place] = batch_loss.detach()

    trained = settings.epochs if len(vectors) else 0
    graphs = device.type == "cuda"
    with Recordings().graphed(epoch, device) if graphs else nullcontext(epoch) as run_epoch:
        for _ in range(trained):
            run_epoch(torch.randperm(len(vectors), generator=generator).to(device))
    loss = 0.0
    for batch, mean in zip(torch.split(labels, settings.batch_size), losses.tolist(), strict=False):
        loss += mean * len(batch) / len(vectors)
    network.cpu()
    tensors = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    with torch.no_grad():
        prototypes = network()
    metrics = {
        "server-loss": loss,
        "server-margin": margin,
        "server-converged": float(trained > 0 and loss < CONVERGED_LOSS),
        "server-epochs": float(trained),
    }
    return tensors, prototypes, metrics
