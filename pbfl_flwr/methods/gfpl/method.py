"""GFPL: prototypes are Gaussian mixtures, and clients retrain their heads on features drawn from them.

Lu et al., "GFPL: Generative Federated Prototype Learning for Resource-Constrained and Data-Imbalanced Vision Task".

Round: each client minimises CE + λ·½(hᵀz_y - 1)², h the normalised projection of f(x), Z a fixed equiangular tight
frame. In rounds t >= t1 with t mod S_T = 0 it also sends n diagonal Gaussians a class; the server fuses those
closer than S_C in Bhattacharyya distance. The next round begins with the same loss on r pseudo-features a class,
drawn from the fused mixtures, for projection and head only.
Travels: Σ_j n·(2d+1) numbers a client in such a round, the fused mixtures down in the next, otherwise nothing.
Predicts: the logits; "etf" is argmax_j hᵀz_j.
Differs from the paper: in its text retraining follows the download, at the end of round t; with one message a round it
is at the start of round t+1, the same order of steps, but scores include the epochs that follow. Algorithm 2 exchanges
in every round from t1 on and nests both in the loop over batches. It retrains only the projection, Section 4.2
projection and head (gfpl.retrain). The weight of a component is not printed: π_c·n_ij, since π_c alone counts 3 samples
like 300 (gfpl.weight). d = K is allowed. For what it leaves open (EM's start, single samples, cluster seeds) see
methods/gfpl/mixture.py. No authors' code is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr.config import Group, Settings, parse_section
from pbfl_flwr.config.keys import Stale
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Method, Predictor, Round, Update, head_scores
from pbfl_flwr.methods.gfpl.etf import dot_regression, equiangular_frame, frame_scores, projection_layer
from pbfl_flwr.methods.gfpl.mixture import Distance, MixtureState, Weight, fit_mixtures, fuse, sample
from pbfl_flwr.methods.gfpl.payload import Mixtures
from pbfl_flwr.payloads import RejectedPayload, part_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import FitReport, each_feature, fit, forward
from pbfl_flwr.training.optimizers import param_group
from pbfl_flwr.util.extras import require

Dual = tuple[nn.Linear, Tensor]  # l(ω3) and Z


class Config(Group):
    """Settings ``gfpl.*``; the defaults are the paper's."""

    components: int = Field(4, ge=1, le=256, description="n, mixture components per class and client")
    samples: int = Field(16, ge=1, le=100_000, description="r, pseudo-features drawn per class")
    start: int = Field(10, ge=1, description="t1, first round in which mixtures may be exchanged")
    interval: int = Field(
        10, ge=1, description="S_T, mixtures are exchanged in rounds that are multiples of it"
    )
    threshold: float = Field(1.0, ge=0, description="S_C, components closer than this are merged; 0: none")
    distance: Distance = Field(
        "sum", description="compare the distance D_B as printed (it grows with d), or D_B/d"
    )
    weight: Weight = Field(
        "count", description="weight of a component: π·n_ij, or π alone (no counts are sent)"
    )
    dot_weight: float = Field(2.0, ge=0, description="λ, weight of the dot-regression loss")
    retrain: Literal["both", "projection"] = Field(
        "both",
        description="what is retrained on pseudo-features: projection and head, or only the projection",
    )
    dual_classifier: bool = Field(
        True, description="use a projection with a fixed frame (DCS); false: only the head with cross-entropy"
    )
    cross_entropy: bool = Field(
        True, description="use the cross-entropy; false: only dot regression (Figure 2)"
    )
    pseudo_features: bool = Field(
        True, description="exchange mixtures and retrain on pseudo-features (PFG); false: no communication"
    )


@dataclass(frozen=True)
class Gfpl(Method[MixtureState, Mixtures, Mixtures]):
    """See the module."""

    config: Config = field(default_factory=Config)
    stale: Stale = "keep"
    primary_predictor: str = "head"
    predicts: tuple[str, ...] = ("head", "etf")
    name: str = "gfpl"
    _frames: dict[tuple[int, int, int], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    state = MixtureState
    down = Mixtures
    up = Mixtures
    uses = frozenset({"stale"})

    def local_update(self, client: Client, down: Mixtures) -> Update[Mixtures]:
        """Retrain on received mixtures, train E epochs, and send mixtures in rounds of exchange."""
        d, config = client.task.feature_dim, self.config
        dual = self._dual(client) if config.dual_classifier else None
        metrics: dict[str, float] = {}
        if down.num_components:
            metrics = {f"retrain-{k}": v for k, v in self._train(client, dual, down).metrics().items()}
        report = self._train(client, dual)
        upload = Mixtures.empty(d)
        if self.exchanges(client.round):
            batches, random = each_feature(client, client.data.train), client.generator("mixtures")
            seed = random.initial_seed()
            upload, of_fit = fit_mixtures(batches, d, config.components, seed, config.weight)
            metrics |= of_fit
        projection = dual[0].state_dict(prefix="projection.") if dual else {}
        return Update(upload, {**projection, **report.optimizer}, {**metrics, **report.metrics()})

    def _train(self, client: Client, dual: Dual | None, down: Mixtures | None = None) -> FitReport:
        """Minimise L_train on the data (Eq. 13), or L_retrain on pseudo-features (Eq. 14), which bypass the body."""
        config, model = self.config, client.model

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            features, logits = forward(model, inputs) if down is None else (inputs, model.head(inputs))
            terms = {"ce": nn.functional.cross_entropy(logits, labels)} if config.cross_entropy else {}
            if dual:
                terms["dot"] = config.dot_weight * dot_regression(dual[0](features), labels, dual[1])
            return terms

        extra_modules = dual[:1] if dual else ()
        param_groups = [param_group(network) for network in (model, *extra_modules)]
        if down is None:
            return fit(client, loss, param_groups=param_groups, extra_modules=extra_modules)
        features, labels = sample(down, config.samples, client.generator("pseudo-features"))
        every = client.training.model_copy(update={"drop_last": "never"})  # all r·K' of them, Eq. 14
        afresh = replace(client, training=every, memory={})  # without the optimiser state of the local epochs
        return fit(
            afresh,
            loss,
            param_groups=param_groups if config.retrain == "both" else param_groups[1:],
            extra_modules=extra_modules,
            source=(features.to(client.device), labels.to(client.device)),
            epochs=1,
            phase="retrain",
        )

    def _dual(self, client: Client) -> Dual:
        """Return the projection l(ω3) from the client's memory, or its initial state, and Z."""
        d = client.task.feature_dim
        projection = projection_layer(d, client.seed, part_of(client.memory, "projection")).to(client.device)
        key = (client.task.num_classes, d, client.seed)
        if key not in self._frames:
            self._frames[key] = equiangular_frame(*key)
        return projection, self._frames[key].to(client.device)

    def predictors(self, client: Client, down: Mixtures) -> dict[str, Predictor]:
        """The head; the fixed frame as well, once the client has a projection."""
        if not part_of(client.memory, "projection"):
            return {"head": head_scores}
        projection, Z = self._dual(client)
        return {"head": head_scores, "etf": lambda features, logits: frame_scores(projection(features), Z)}

    def init(self, task: Task, seed: int) -> MixtureState:
        """Return no mixtures."""
        return MixtureState.empty(task.feature_dim)

    def broadcast(self, state: MixtureState, client: int) -> Mixtures:
        """Return the fused mixtures in the round after an exchange, else nothing."""
        return state.broadcast

    def aggregate(
        self, state: MixtureState, uploads: Mapping[int, Mixtures], round_info: Round
    ) -> MixtureState:
        """Fuse the last upload of every client (Algorithm 1) in rounds of exchange."""
        if not self.exchanges(round_info.number):
            return state.silent()
        state, config = state.received(uploads, self.stale), self.config
        fused = fuse(
            [state.latest], round_info.task.feature_dim, threshold=config.threshold, distance=config.distance
        )
        return replace(state, broadcast=fused)

    def validate(self, upload: Mixtures, state: MixtureState, task: Task) -> None:
        """Check that a class has at most n components and, if no counts travel, weights with sum 1."""
        most = int(torch.bincount(upload.labels, minlength=1).max())
        if most > self.config.components:
            raise RejectedPayload(f"{most} components of a class, must be at most {self.config.components}")
        totals = torch.zeros(task.num_classes).index_add_(0, upload.labels, upload.weights)[upload.labels]
        if self.config.weight == "pi" and bool(((totals - 1).abs() > 0.02).any()):
            raise RejectedPayload("the weights of a class do not add up to 1")

    def report(self, state: MixtureState) -> dict[str, float]:
        """Components and classes that the server holds, and components in its next broadcast."""
        latest, sent = state.latest, state.broadcast.num_components
        metrics = {"components-stored": latest.num_components, "components-sent": sent}
        return {**metrics, "classes-stored": len(latest.labels.unique())}

    def exchanges(self, number: int) -> bool:
        """Return whether mixtures are uploaded in a round: t >= t1 and t mod S_T = 0."""
        c = self.config
        return c.pseudo_features and number >= c.start and number % c.interval == 0

    def warnings(self, num_rounds: int, state: MixtureState | None = None) -> list[str]:
        """Warn if the run ends before clients retrain on pseudo-features."""
        c = self.config
        first = math.ceil(c.start / c.interval) * c.interval
        if state is None and c.pseudo_features and num_rounds <= first:
            return [
                f"num-server-rounds = {num_rounds}: the first exchange of mixtures is in round {first} and takes "
                "effect in the next one, so clients never use each other's mixtures; gfpl.start and gfpl.interval "
                "set the rounds of exchange"
            ]
        return []

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that the frame exists for this K and d."""
        if self.config.dual_classifier:
            equiangular_frame(task.num_classes, task.feature_dim, 0)

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """Σ_i K_i·n·(2d+1)/S_T: uploads only, as in the paper's table; downloads depend on the fusion."""
        numbers = sum(class_counts) * self.config.components * (2 * task.feature_dim + 1)
        return numbers / self.config.interval if self.config.pseudo_features else 0.0


def build(settings: Settings) -> Gfpl:
    """Return the method.

    Raises:
        PbflError: if its settings leave nothing to train or retrain, or scikit-learn is not installed.
    """
    require("method = 'gfpl'", "sklearn")
    config = parse_section(Config, settings)
    if config.retrain == "projection" and not config.dual_classifier:
        raise PbflError(
            "gfpl.retrain = 'projection': there is no projection with gfpl.dual-classifier = false; use 'both'"
        )
    if not config.cross_entropy and not (config.dual_classifier and config.dot_weight):
        raise PbflError(
            "gfpl.cross-entropy = false: with gfpl.dual-classifier = false or gfpl.dot-weight = 0 no loss is "
            "left"
        )
    primary_predictor = "head" if config.cross_entropy else "etf"
    predicts = ("head", "etf") if config.dual_classifier else ("head",)
    return Gfpl(config, settings.prototypes.stale, primary_predictor, predicts)
