"""FeSEM: several global models; each client follows the one closest to its weights.

Long et al., "Multi-Center Federated Learning: Clients Clustering for Better Personalization", World Wide Web 2023.

Round: each client copies its centre c_{r_i}, runs E epochs of SGD on cross-entropy and sends its weights. The server
lowers (1/M)·Σ_i ‖w_i - c_{r_i}‖²: E-step r_i = argmin_k ‖w_i - c_k‖₂ for the clients that answered, M-step c_k = mean
of those assigned to k. In round 1 all start from the same weights w_0; the first clusters are k-means on w_i - w_0.
Travels: all parameters of one model, both ways, and n_i.
Predicts: the logits of the client's centre, scored when it arrives, before local training.
Differs from the paper: the first centres come from k-means++ on the first trained weights; random models would be
equally far from all clients that start alike. GFPL's comparison does not state C; 2 is that of its source (below).
Differs from the references: the official code clusters every 10 rounds on one layer's kernel and skips small clusters;
here every round, on all parameters (fesem.distance="head": only the head), and a centre without members is kept. The
FeSEM in FedProto's repository, the source of GFPL's row, is another method: it averages two fixed groups of clients,
by their number of classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from pbfl_flwr import seeds
from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.method import Client, Method, Moment, Round, Update
from pbfl_flwr.methods.averaging import Weighting, average, same_shapes, weighting_of
from pbfl_flwr.methods.sharing import answer, initial, receive, shared_scalars
from pbfl_flwr.models.contract import HEAD_PREFIX
from pbfl_flwr.models.registry import architectures
from pbfl_flwr.payloads import RejectedPayload, Weights, joined, part_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import classification, fit
from pbfl_flwr.util.extras import require

NOBODY = -1  # in Centres.assigned: a client that never answered
SAME = 1e-12  # squared distance of equal updates through rounding, relative to their squared lengths


class Config(Group):
    """Settings ``fesem.*``."""

    centres: int = Field(2, ge=1, le=1000, description="C, number of global models")
    distance: Literal["all", "head"] = Field(
        "all", description="which parameters the distance is computed over"
    )


@dataclass(frozen=True)
class Centres:
    """The server's state.

    Attributes:
        weights: the global models c_1 to c_C; only w_0 before the first clustering.
        assigned: (M,) int64, r_i or NOBODY; of length 0 before the first clustering.
    """

    weights: tuple[Weights, ...]
    assigned: Tensor

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the models under their indices, and the assignment of clients."""
        return {
            **joined(**{str(k): centre for k, centre in enumerate(self.weights)}),
            "assigned": self.assigned,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> Centres:
        """Rebuild the state of a checkpoint.

        Raises:
            RejectedPayload: if a client is assigned to a model that does not exist.
        """
        numbers = sorted({int(name.partition(".")[0]) for name in tensors if name != "assigned"})
        centres = tuple(Weights.from_tensors(part_of(tensors, str(k)), task) for k in numbers)
        assigned = tensors["assigned"].to(torch.int64)
        if assigned.numel() and not NOBODY <= int(assigned.min()) <= int(assigned.max()) < len(centres):
            raise RejectedPayload(f"assigned model outside 0..{len(centres) - 1}")
        return cls(centres, assigned)

    def sizes(self) -> Tensor:
        """Return the number of clients assigned to each model, (C,)."""
        return torch.bincount(self.assigned[self.assigned >= 0], minlength=len(self.weights))

    def of(self, client: int) -> Weights:
        """Return a client's model; for a client that never answered, the one with the most clients."""
        has_centre = client < len(self.assigned) and int(self.assigned[client]) != NOBODY
        return self.weights[int(self.assigned[client]) if has_centre else int(self.sizes().argmax())]


@dataclass(frozen=True)
class FeSEM(Method[Centres, Weights, Weights]):
    """See the module."""

    architecture: str
    centres: int = 2
    distance: Literal["all", "head"] = "all"
    weighting: Weighting = "uniform"
    name: str = "fesem"
    moment: Moment = "before"

    state = Centres
    down = Weights
    up = Weights
    same_architecture = True

    def init(self, task: Task, seed: int) -> Centres:
        """w_0 for everybody."""
        return Centres((initial(self.architecture, task, seed, "all"),), torch.zeros(0, dtype=torch.int64))

    def broadcast(self, state: Centres, client: int) -> Weights:
        """The client's centre."""
        return state.of(client)

    def install(self, client: Client, down: Weights) -> None:
        """w_i <- c_{r_i}."""
        receive(client, down, "all")

    def local_update(self, client: Client, down: Weights) -> Update[Weights]:
        """w_i <- c_{r_i}, then cross-entropy."""
        self.install(client, down)
        report = fit(client, classification(client.model))
        return Update(answer(client, "all"), report.optimizer, report.metrics())

    def aggregate(self, state: Centres, uploads: Mapping[int, Weights], round_info: Round) -> Centres:
        """E-step and M-step over the clients that answered."""
        if not uploads:
            return state
        clients = list(uploads)
        if len(state.assigned):
            clusters = self._distances(uploads.values(), state.weights).argmin(dim=1)
            centres = state.weights
        else:
            clusters = self._first_clusters(list(uploads.values()), state.weights[0], round_info)
            centres = state.weights * self.centres
        size = max(round_info.num_clients, 1 + max(clients), len(state.assigned))  # clients may have joined
        assigned = torch.full((size,), NOBODY, dtype=torch.int64)
        assigned[: len(state.assigned)] = state.assigned
        assigned[clients] = clusters
        members = [
            {i: uploads[i] for i, k in zip(clients, clusters.tolist(), strict=True) if k == centre}
            for centre in range(len(centres))
        ]
        moved = [average(c, those, self.weighting) for c, those in zip(centres, members, strict=True)]
        return Centres(tuple(moved), assigned)

    def _counts(self, name: str) -> bool:
        return self.distance == "all" or name.startswith(HEAD_PREFIX)

    def _distances(self, uploads: Iterable[Weights], centres: Sequence[Weights]) -> Tensor:
        """Return ‖w_i - c_k‖², (N, C) float64."""
        return torch.tensor(
            [
                [
                    sum(
                        float((tensor.double() - centre.tensors[name].double()).square().sum())
                        for name, tensor in upload.tensors.items()
                        if self._counts(name)
                    )
                    for centre in centres
                ]
                for upload in uploads
            ],
            dtype=torch.float64,
        )

    def _first_clusters(self, uploads: Sequence[Weights], start: Weights, round_info: Round) -> Tensor:
        """Return (N,) int64 cluster indices: k-means with k-means++ initialisation on w_i - w_0.

        k-means runs on N coordinates with the same pairwise distances, computed from the inner products, so that its
        cost does not depend on the size of the network.
        """
        from sklearn.cluster import KMeans

        N = len(uploads)
        inner = torch.zeros(N, N, dtype=torch.float64)
        for name, origin in start.tensors.items():
            if self._counts(name):
                rows = torch.stack([upload.tensors[name].flatten() for upload in uploads]).double()
                rows -= origin.flatten().double()
                inner += rows @ rows.T
        values, vectors = torch.linalg.eigh(inner)
        values[values < SAME * values.max()] = 0.0  # rounding errors; their square roots could reach 1e-8
        coordinates = vectors * values.sqrt()  # (N, N)
        squares = inner.diagonal()[:, None] + inner.diagonal()
        alike = squares - 2 * inner <= SAME * squares
        different = len(alike.byte().argmax(dim=1).unique())  # maps each client to the first equal one
        seed = seeds.derive(round_info.seed, "fesem") % 2**32
        means = KMeans(min(self.centres, different), n_init=10, random_state=seed).fit(coordinates.numpy())
        return torch.from_numpy(means.labels_).to(torch.int64)

    def validate(self, upload: Weights, state: Centres, task: Task) -> None:
        """Check that names and shapes of the tensors are those of the models."""
        same_shapes(upload, state.weights[0])

    def report(self, state: Centres) -> dict[str, float]:
        """Number of clients assigned to each model."""
        return {f"centre-{k}.clients": float(size) for k, size in enumerate(state.sizes().tolist())}

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that all clients have the server's architecture, and that scikit-learn is there."""
        require("method = 'fesem'", "sklearn")
        super().check(task, [self.architecture, *architectures])

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·|w|: a client receives one model."""
        return shared_scalars(self.architecture, task, len(class_counts), "all")


def build(settings: Settings) -> FeSEM:
    """Return the method."""
    config = parse_section(Config, settings)
    architecture = architectures(settings.models.models, settings.code)[0]
    return FeSEM(architecture, config.centres, config.distance, weighting_of(settings, "uniform"))
