"""GFPL: prototypes are Gaussian mixtures, and clients retrain their heads on features drawn from them.

Lu et al., "GFPL: Generative Federated Prototype Learning for Resource-Constrained and Data-Imbalanced Vision Task".

Round: each client minimises CE + λ·½(hᵀz_y - 1)² with h the normalised projection of f(x) and Z a fixed equiangular
tight frame (ETF). In rounds t >= t1 with t mod S_T = 0 it also answers one mixture of n diagonal Gaussians a class,
which the server fuses where their Bhattacharyya distance is below S_C. In the next round the client, extractor
frozen, first retrains projection and head with the same loss on r pseudo-features a class drawn from the fused ones.
Travels: in those rounds up Σ_j n·(2d+1) numbers a client, then down those of the fused mixtures; otherwise nothing.
Predicts: the logits; "etf" is argmax_j hᵀz_j.
Differs from the paper: it retrains after the download at the end of round t; with one message a round that is the
start of round t+1, the same order of steps, but scores are taken after the epochs that follow. Algorithm 2 nests
the exchange in the loop over batches and retrains the projection alone where Section 4.2 says projection and head
(gfpl.retrain); the latter is the default. Component weights are π_c·n_ij (gfpl.weight), since the paper's π_c alone
would make a class of 3 samples count like one of 300. d = K is allowed (the paper asks for d > K). Left open there
and set here: EM and its start, deviations of single samples, seeds of clusters (prototypes/mixture.py), one epoch.
There is no reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr import seeds
from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Method, Predictor, Round, Update, head_scores
from pbfl_flwr.payloads import Mixtures, RejectedPayload, joined, under
from pbfl_flwr.prototypes.frame import dot_regression, equiangular_frame, frame_scores
from pbfl_flwr.prototypes.mixture import Distance, Weight, fit_mixtures, fuse, sample
from pbfl_flwr.task import Task
from pbfl_flwr.training import FitReport, Loss, each_feature, fit, forward, part


class Config(Group):
    """Settings ``gfpl.*``; the defaults are the paper's."""

    components: int = Field(4, ge=1, le=256, description="n, Gaussians of a class on a client")
    samples: int = Field(16, ge=1, le=100_000, description="r, pseudo-features of a class")
    start: int = Field(10, ge=1, description="t1, no exchange before this round")
    interval: int = Field(10, ge=1, description="S_T, exchange in rounds that it divides")
    threshold: float = Field(1.0, ge=0, description="S_C, components nearer than this are fused; 0: none")
    distance: Distance = Field("sum", description="compare D_B as printed (grows with d), or D_B/d")
    weight: Weight = Field("count", description="of a component: π·n_ij, or π alone (no count travels)")
    dot_weight: float = Field(2.0, ge=0, description="λ, weight of the dot regression")
    retrain: Literal["both", "projection"] = Field("both", description="projection and head, or projection")
    retrain_epochs: int = Field(1, ge=1, description="passes over the pseudo-features")
    clamp: bool = Field(False, description="set negative entries of pseudo-features to 0, as after a ReLU")
    dual_classifier: bool = Field(True, description="projection and ETF (DCS); false: head and CE only")
    pseudo_features: bool = Field(True, description="exchange and retraining (PFG); false: nothing travels")


@dataclass(frozen=True)
class GfplState:
    """What the server knows.

    Attributes:
        broadcast: the fused mixtures after an exchange, empty after any other round.
        held: the last upload of every client, where classes nobody sends any more live on (stale="keep").
        owners: (N,) int64, the client of each component held.
    """

    broadcast: Mixtures
    held: Mixtures
    owners: Tensor

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything under prefixed names; see :class:`pbfl_flwr.payloads.Payload`."""
        return {**joined(broadcast=self.broadcast, held=self.held), "owners": self.owners}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> GfplState:
        """Rebuild the state of a checkpoint."""
        broadcast, held = (Mixtures.from_tensors(under(tensors, k), task) for k in ("broadcast", "held"))
        return cls(broadcast, held, tensors["owners"])

    def scalars(self) -> int:
        """Return the scalars of the broadcast."""
        return self.broadcast.scalars()


@dataclass(frozen=True)
class Gfpl(Method[GfplState, Mixtures, Mixtures]):
    """See the module."""

    config: Config = Config()
    stale: Literal["keep", "drop"] = "keep"
    name: str = "gfpl"

    state = GfplState
    down = Mixtures
    up = Mixtures

    # Client -----------------------------------------------------------------------------------------------

    def local_update(self, client: Client, down: Mixtures) -> Update[Mixtures]:
        """Retrain on what came down, fit E epochs, and answer mixtures if this is a round of exchange."""
        projection = _projection(client) if self.config.dual_classifier else None
        networks = [client.model] if projection is None else [client.model, projection]
        metrics: dict[str, float] = {}
        if down.num_components:
            retrained = self._retrain(client, networks, projection, down)
            metrics |= {f"retrain-{name}": value for name, value in retrained.metrics().items()}
        loss = self._loss(client, projection, lambda inputs: forward(client.model, inputs))
        report = fit(client, loss, parts=[part(network) for network in networks], companions=networks[1:])
        metrics |= report.metrics()
        upload = Mixtures.empty(client.task.feature_dim)
        batches = list(each_feature(client, client.data.train)) if self.exchanges(client.round) else []
        if batches:
            features, labels = (torch.cat(column) for column in zip(*batches, strict=True))
            seed = seeds.derive(client.seed, "gfpl", client.id, client.round)
            fitted = fit_mixtures(
                features, labels, self.config.components, seed=seed, weight=self.config.weight
            )
            upload, metrics = fitted.mixtures, metrics | fitted.figures()
        kept = {} if projection is None else projection.state_dict(prefix="projection.")
        return Update(upload, {**kept, **report.optimizer}, metrics)

    def _loss(
        self,
        client: Client,
        projection: nn.Linear | None,
        classify: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Loss:
        """L_CE + λ·L_DR (Eq. 13 and 14); ``classify`` answers features and logits."""
        Z = None if projection is None else self._frame(client)

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            features, logits = classify(inputs)
            terms = {"ce": nn.functional.cross_entropy(logits, labels)}
            if projection is not None and Z is not None:
                terms["dot"] = self.config.dot_weight * dot_regression(projection(features), labels, Z)
            return terms

        return loss

    def _retrain(
        self, client: Client, networks: list[nn.Module], projection: nn.Linear | None, down: Mixtures
    ) -> FitReport:
        """L_retrain on pseudo-features; they enter behind the extractor, which therefore gets no gradient."""
        features, labels = sample(down, self.config.samples, client.generator("pseudo-features"))
        if self.config.clamp:
            features = features.clamp_min(0)
        head = client.model.head
        return fit(
            replace(client, memory={}),  # momentum kept from the local epochs is not the retraining's
            self._loss(client, projection, lambda z: (z, head(z))),  # type: ignore[operator]
            parts=[
                part(network)
                for network in networks
                if self.config.retrain == "both" or network is projection
            ],
            companions=networks[1:],
            source=(features.to(client.device), labels.to(client.device)),
            epochs=self.config.retrain_epochs,
            phase="retrain",
        )

    def predictors(self, client: Client, down: Mixtures) -> dict[str, Predictor]:
        """Head; the fixed frame, once there is a projection."""
        found: dict[str, Predictor] = {"head": head_scores}
        if self.config.dual_classifier and under(client.memory, "projection"):
            projection, Z = _projection(client), self._frame(client)
            found["etf"] = lambda features, logits: frame_scores(projection(features), Z)
        return found

    def _frame(self, client: Client) -> Tensor:
        task = client.task
        return equiangular_frame(task.num_classes, task.feature_dim, client.seed).to(client.device)

    # Server -----------------------------------------------------------------------------------------------

    def init(self, task: Task, seed: int) -> GfplState:
        """Return no mixtures."""
        nothing = Mixtures.empty(task.feature_dim)
        return GfplState(nothing, nothing, torch.zeros(0, dtype=torch.int64))

    def broadcast(self, state: GfplState, client: int) -> Mixtures:
        """The fused mixtures in the round after an exchange."""
        return state.broadcast

    def aggregate(self, state: GfplState, uploads: Mapping[int, Mixtures], at: Round) -> GfplState:
        """Fuse what every client sent last (Algorithm 1)."""
        d = at.task.feature_dim
        if not self.exchanges(at.number):
            return replace(state, broadcast=Mixtures.empty(d))
        old = ~torch.isin(state.owners, torch.tensor(list(uploads), dtype=torch.int64))
        if self.stale == "drop":
            old = torch.zeros_like(old)
        held = Mixtures.concatenated([state.held.chosen(old), *uploads.values()], d)
        sent = [torch.full((up.num_components,), i, dtype=torch.int64) for i, up in uploads.items()]
        fused = fuse([held], d, threshold=self.config.threshold, distance=self.config.distance)
        return GfplState(fused, held, torch.cat([state.owners[old], *sent]))

    def validate(self, upload: Mixtures, state: GfplState, task: Task) -> None:
        """At most n components a class; shares of a class add up to 1 where no count travels."""
        most = int(torch.bincount(upload.labels, minlength=1).max())
        if most > self.config.components:
            raise RejectedPayload(f"{most} components of a class, allowed are {self.config.components}")
        totals = torch.zeros(task.num_classes).index_add_(0, upload.labels, upload.weights)
        if self.config.weight == "pi" and bool(((totals - 1).abs() > 0.02)[upload.labels].any()):
            raise RejectedPayload("the weights of a class do not add up to 1")

    def report(self, state: GfplState) -> dict[str, float]:
        """Components held and sent down; after an exchange also how many classes nobody has."""
        fused = state.broadcast
        figures = {"components-held": state.held.num_components, "components-sent": fused.num_components}
        return {name: float(number) for name, number in figures.items()}

    # Both -------------------------------------------------------------------------------------------------

    def exchanges(self, number: int) -> bool:
        """Return whether mixtures go up in a round: t >= t1 and t mod S_T = 0."""
        config = self.config
        return config.pseudo_features and number >= config.start and number % config.interval == 0

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """The frame must exist."""
        if self.config.dual_classifier:
            equiangular_frame(task.num_classes, task.feature_dim, 0)

    def paper_scalars(
        self, task: Task, class_counts: Sequence[int], parameters: Sequence[tuple[int, int]]
    ) -> float:
        """Σ_i K_i·n·(2d+1)/S_T, uploads as in the paper's table; what comes down depends on what was fused."""
        numbers = sum(class_counts) * self.config.components * (2 * task.feature_dim + 1)
        return numbers / self.config.interval if self.config.pseudo_features else 0.0


def _projection(client: Client) -> nn.Linear:
    """Return l(ω3) as the client keeps it; at first all clients have the same."""
    d = client.task.feature_dim
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seeds.derive(client.seed, "projection"))
        projection = nn.Linear(d, d)
    if kept := under(client.memory, "projection"):
        projection.load_state_dict(kept)
    return projection.to(client.device)


def build(settings: Settings) -> Gfpl:
    """Return the method.

    Raises:
        PbflError: if there is nothing to retrain.
    """
    config = parse_section(Config, settings)
    if config.pseudo_features and config.retrain == "projection" and not config.dual_classifier:
        raise PbflError(
            "gfpl.retrain = 'projection': there is none with gfpl.dual-classifier = false; use 'both'"
        )
    return Gfpl(config, settings.prototypes.stale)
