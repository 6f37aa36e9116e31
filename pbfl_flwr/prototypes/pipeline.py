"""The prototype pipeline: one slot per stage; every method of the family is a choice of stages.

::

    client   fit (cross-entropy + λ·regularisation) -> class sums, counts -> means c̄_ij
             -> [hold back] -> [scale by n_ij] -> [mask: compress to s] -> [clip, noise]  ~~Prototypes~~>
    server   combine (mean | weighted | PPA | APS | median | trimmed mean) -> [keep stale]
             -> [train: FedTGP] -> [align: PA] -> [mask: compress to s]                   ~~Prototypes~~>
    client   [mask: expand to d] -> [scale: γ of PU, μ of APS] -> regularise (next loss), nearest

Whether stages fit together is checked when the pipeline is built. The server's stages after ``combine`` work in d
dimensions (zeros outside the mask), so that PA and FedTGP are the same with and without sparsification; values that
they create outside the mask are not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from pbfl_flwr import seeds
from pbfl_flwr.config import PROTECTIONS, STAGES, Settings
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Method, Moment, Nearest, Predictor, Round, Update, head_scores
from pbfl_flwr.payloads import Prototypes, RejectedPayload, joined, part_of
from pbfl_flwr.prototypes import aggregation, rules
from pbfl_flwr.prototypes.alignment import align
from pbfl_flwr.prototypes.class_means import Collector, released_means
from pbfl_flwr.prototypes.masks import Sparsity
from pbfl_flwr.prototypes.privacy import Release, release
from pbfl_flwr.prototypes.regularizer import proportional_weights, prototype_regularizer
from pbfl_flwr.prototypes.stages import Stages, resolved
from pbfl_flwr.prototypes.trainable import (
    ServerTraining,
    initial_state,
    stack_uploads,
    train_prototypes,
)
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import fit, forward
from pbfl_flwr.util.user_code import returned


@dataclass(frozen=True)
class PipelineState:
    """The server's state.

    Attributes:
        broadcast: the global prototypes as they travel, (K, s).
        combined: the aggregate of the uploads before training and alignment, (K, s); source of classes
            that nobody sends in a round.
        ages: (K,) int64, rounds since a class was last uploaded.
        trained: the parameters of FedTGP's generator, None without it.
        metrics: of the last aggregation.
    """

    broadcast: Prototypes
    combined: Prototypes
    ages: Tensor
    trained: Mapping[str, Tensor] | None
    metrics: Mapping[str, float]

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything under prefixed names; see :class:`pbfl_flwr.payloads.Payload`."""
        tensors = joined(broadcast=self.broadcast, combined=self.combined)
        if self.trained is not None:
            tensors |= {f"trained.{name}": tensor for name, tensor in self.trained.items()}
        tensors |= {
            f"figure.{name}": torch.tensor(value, dtype=torch.float64) for name, value in self.metrics.items()
        }
        return {**tensors, "ages": self.ages}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> PipelineState:
        """Rebuild the state of a checkpoint."""
        trained = part_of(tensors, "trained")
        return cls(
            Prototypes.from_tensors(part_of(tensors, "broadcast"), task),
            Prototypes.from_tensors(part_of(tensors, "combined"), task),
            tensors["ages"],
            trained or None,
            {name: float(value) for name, value in part_of(tensors, "figure").items()},
        )


@dataclass(frozen=True)
class Pipeline(Method[PipelineState, Prototypes, Prototypes]):
    """A method made of the stages above, built by :func:`pipeline`.

    Attributes:
        stages: the choice for each slot.
        server_training: FedTGP's settings, or None.
        regularizer: R of the loss CE + λ·R; called like the default.
        mask_seed: seed of the masks, the only thing about them that clients must agree on.
        release: which parts of a client's table leave the device.
    """

    name: str
    stages: Stages
    server_training: ServerTraining | None = None
    regularizer: Callable[..., Tensor] = field(default=prototype_regularizer, repr=False)
    mask_seed: int = 0
    primary_predictor: str = "global"
    moment: Moment = "after"
    release: Release = field(default_factory=Release, repr=False)
    predicts = ("head", "global", "global-local", "local")
    uses = frozenset((*STAGES, *PROTECTIONS))

    state = PipelineState
    down = Prototypes
    up = Prototypes

    @cached_property
    def sparsity(self) -> Sparsity:
        """The dimensions of a row that travel."""
        return Sparsity(self.stages.cps_dim, self.stages.cps_scheme, self.mask_seed)

    # Client -----------------------------------------------------------------------------------------------

    def local_update(self, client: Client, down: Prototypes) -> Update[Prototypes]:
        """Train with prototype regularisation, then send the local ones."""
        stages = self.stages
        targets = self._targets(client, down)  # (K, d)
        has_prototypes, present = down.num_present > 0, down.present.to(client.device)
        beta = proportional_weights(client.data.counts).to(client.device)  # β_i of CPKD
        table = self.sparsity.masks(client.task) if stages.cps_regularizer == "masked" else None
        inside = None if table is None else table.to(client.device)
        # The papers' norm is taken between class means; CPKD's sample form between samples.
        per_class = stages.cpkd == "class" or (stages.regularizer_form == "l2" and stages.cpkd == "off")
        collector = Collector(client, stages.collect)

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            features, logits = forward(client.model, inputs)
            collector.add(features, labels)
            terms = {"ce": nn.functional.cross_entropy(logits, labels)}
            if has_prototypes:
                distance = self.regularizer(
                    features,
                    labels,
                    targets,
                    present,
                    form=stages.regularizer_form,
                    class_weights=None if stages.cpkd == "off" else beta,
                    per_class=per_class,
                    masks=inside,
                )
                distance = returned(self.regularizer, distance, Tensor)
                terms["regularizer"] = stages.regularizer_weight * distance
            return terms

        report = fit(client, loss, after_epoch=collector.close_epoch)
        values, present_here, seen = collector.sums().means()
        sent = released_means(client, self.release, values)
        released = self.release.table(
            client, sent, seen, lambda rows: self.sparsity.compress(rows, client.task)
        )
        upload = released.payload
        if not stages.rule.counts:
            upload = replace(upload, counts=None)
        if not stages.sends_total:
            upload = replace(upload, num_examples=None)
        memory = {"prototypes": values, "present": present_here, **report.optimizer, **released.memory}
        return Update(upload, memory, {**report.metrics(), **released.metrics})

    def predictors(self, client: Client, down: Prototypes) -> dict[str, Predictor]:
        """The head; nearest global prototype, among all classes and among the client's own; nearest local prototype."""
        predictors: dict[str, Predictor] = {"head": head_scores}
        local_classes = client.data.counts > 0
        if down.num_present:
            targets = self._targets(client, down)
            predictors["global"] = Nearest(targets, down.present)
            if bool((down.present & local_classes).any()):
                predictors["global-local"] = Nearest(targets, down.present & local_classes)
        if "present" in client.memory and bool(client.memory["present"].any()):
            predictors["local"] = Nearest(client.memory["prototypes"], client.memory["present"])
        return predictors

    def _targets(self, client: Client, down: Prototypes) -> Tensor:
        """Return global prototypes in d dimensions, scaled for the regularisation: γ·c_j (PU), μ·c_j (APS) or c_j."""
        return (self.received(down, client.task).values * self.stages.upscale).to(client.device)

    # Server -----------------------------------------------------------------------------------------------

    def init(self, task: Task, seed: int) -> PipelineState:
        """No class has a prototype yet; FedTGP's generator is newly initialised."""
        nobody = Prototypes.empty(task.num_classes, self.sparsity.width(task))
        trained = None
        if self.server_training is not None:
            trained = initial_state(task.num_classes, task.feature_dim, seed)
        return PipelineState(nobody, nobody, torch.zeros(task.num_classes, dtype=torch.int64), trained, {})

    def broadcast(self, state: PipelineState, client: int) -> Prototypes:
        """The global prototypes."""
        return state.broadcast

    def aggregate(
        self, state: PipelineState, uploads: Mapping[int, Prototypes], round_info: Round
    ) -> PipelineState:
        """Combine, keep classes that nobody sent, train, align, compress."""
        task, stages = round_info.task, self.stages
        nobody = Prototypes.empty(task.num_classes, self.sparsity.width(task))
        fresh = stages.rule.combine(uploads, round_info, stages) if uploads else nobody
        before = rules.at_scale_of(fresh.num_examples, state.combined)
        combined, ages = aggregation.keep_stale(before, fresh, state.ages, stages.stale)
        combined = replace(combined, num_examples=fresh.num_examples or before.num_examples)
        values = self.dense(combined, task).values
        present, trained = combined.present, state.trained
        metrics = {"oldest-prototype": float(ages.max())}
        if self.server_training is not None and trained is not None:
            trained, values, shown = self._train(trained, uploads or {0: nobody}, round_info)
            metrics |= shown
            if self.server_training.absent == "keep":
                present = torch.ones_like(present)
        if stages.alignment != "off":
            aligned = align(
                values, present, stages.alignment, seed=seeds.derive(round_info.seed, "alignment")
            )
            values = aligned.values
            metrics |= aligned.metrics()
        values = torch.where(present[:, None], values, torch.zeros_like(values))
        rows = self.sparsity.compress(values, task)
        down = Prototypes(rows.to(torch.float32), present, None, combined.num_examples)
        return PipelineState(down, combined, ages, trained, metrics)

    def _train(
        self, trained: Mapping[str, Tensor], uploads: Mapping[int, Prototypes], round_info: Round
    ) -> tuple[Mapping[str, Tensor], Tensor, dict[str, float]]:
        """Train FedTGP's generator on all uploaded vectors; n-scaled ones are rescaled to the features' scale."""
        assert self.server_training is not None
        dense = [self.dense(up, round_info.task) for up in uploads.values()]
        scale = self.stages.rule.scale
        factor = None if scale is None else scale(uploads, round_info, self.stages)
        vectors, labels = stack_uploads(dense, factor, self.stages.rule.summed)
        return train_prototypes(
            trained,
            vectors,
            labels,
            self.server_training,
            seeds.generator(round_info.seed, "fedtgp", round_info.number),
        )

    @property
    def server_device(self) -> str:
        """Where FedTGP's generator is trained."""
        return self.server_training.device if self.server_training else "cpu"

    def streams(self) -> bool:
        """True for sums; medians, trimmed means and FedTGP's training need all uploads at once."""
        return self.server_training is None and self.stages.rule.streams

    def validate(self, upload: Prototypes, state: PipelineState, task: Task) -> None:
        """Check the rows' width, and that exactly the rows and counts that the rule needs were sent."""
        width, rule = self.sparsity.width(task), self.stages.aggregation
        if upload.values.shape[1] != width:
            raise RejectedPayload(f"rows are {upload.values.shape[1]} wide, expected {width}")
        if (upload.counts is not None) != self.stages.rule.counts:
            raise RejectedPayload(
                f"counts are {'missing' if upload.counts is None else 'not part'} of rule '{rule}'"
            )
        if (upload.num_examples is not None) != self.stages.sends_total:
            fault = "missing" if upload.num_examples is None else "not part"
            raise RejectedPayload(f"the number of examples is {fault} of rule '{rule}'")

    def report(self, state: PipelineState) -> dict[str, float]:
        """Metrics of the last aggregation: solver, margin, training, ages."""
        return dict(state.metrics)

    def warnings(self, num_rounds: int, state: PipelineState | None = None) -> list[str]:
        """Warn of settings without effect, upscaled prototypes that are no unit vectors, and what did not converge."""
        if state is not None:
            return _unconverged(state.metrics)
        lines = self.stages.idle()
        if self.stages.rule.scaled and self.stages.wire_dtype == "float16":
            lines.append(
                f"wire-dtype = 'float16' ends at 65504, and the rows of aggregation = '{self.stages.aggregation}' grow "
                "with the samples of a class; 'bfloat16' has as many bytes and does not end there"
            )
        if self.stages.alignment == "off" and self.stages.upscale != 1:
            lines.append(
                f"upscale = {self.stages.upscale:g} multiplies prototypes that are not normalised, since alignment = "
                "'off'; ProtoNorm scales unit vectors (alignment = 'unit' only normalises)"
            )
        return lines

    # Both -------------------------------------------------------------------------------------------------

    def dense(self, sent: Prototypes, task: Task) -> Prototypes:
        """Expand prototypes as they travel (K, s) to d dimensions, zero outside the masks."""
        return replace(sent, values=self.sparsity.expand(sent.values, task))

    def received(self, down: Prototypes, task: Task) -> Prototypes:
        """Return a broadcast's prototypes in d dimensions, at the features' scale: μ·c_j (APS), else c_j."""
        dense = self.dense(down, task)
        summed = self.stages.rule.aps and self.server_training is None
        if summed and self.stages.alignment == "off" and down.num_present:
            factors = rules.mu(self.stages, down, down.num_examples)
            dense = replace(dense, values=dense.values * factors.unsqueeze(1))
        return dense

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that the masks exist, and that "simplex" can place K prototypes in d dimensions."""
        self.sparsity.masks(task)
        if self.stages.alignment == "simplex" and task.num_classes > task.feature_dim + 1:
            raise PbflError(
                f"alignment = 'simplex' needs num classes <= feature-dim + 1, found K={task.num_classes} and "
                f"feature-dim={task.feature_dim}; must be 'thomson'"
            )

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """Σ_i (K_i + K)·s: up K_i rows, down K rows, for each of M clients."""
        rows = sum(classes + task.num_classes for classes in class_counts)
        return float(rows * self.sparsity.width(task))


def _unconverged(metrics: Mapping[str, float]) -> list[str]:
    """Return a warning if the server's training or the alignment's solver has not converged."""
    warnings = []
    if metrics.get("server-converged") == 0:
        warnings.append(
            "the training of the server's prototypes has not converged: their loss is not below 0.001 "
            "(server-loss); more server-epochs or rounds may help"
        )
    if metrics.get("alignment-converged") == 0:
        warnings.append(
            "the alignment solver has not converged: it stopped at its maximum number of iterations "
            "(alignment-iterations)"
        )
    return warnings


def pipeline(
    settings: Settings,
    name: str,
    named: Stages,
    *,
    primary_predictor: str = "global",
    server_training: ServerTraining | None = None,
    regularizer: Callable[..., Tensor] = prototype_regularizer,
) -> Pipeline:
    """Return the method.

    Args:
        settings: of the run.
        name: of the method.
        named: the stages of the named method, used where the configuration says "auto".
        primary_predictor: the predictor that is reported first.
        server_training: FedTGP's settings, or None.
        regularizer: see :class:`Pipeline`.

    Raises:
        PbflError: if two stages do not fit together.
    """
    stages = resolved(settings, named)
    if server_training is not None and not stages.rule.trains:
        allowed = ", ".join(name for name, rule in rules.RULES.items() if rule.trains)
        raise PbflError(
            f"aggregation = '{stages.aggregation}': {name} trains its prototypes on every upload instead of "
            f"combining them; must be one of {allowed}, which scale the uploads in different ways"
        )
    stage = release(
        settings.privacy,
        stages.aggregation,
        sends_total=stages.sends_total,
        once=stages.collect == "post" and settings.training.drop_last != "always",
    )
    masks_from = seeds.derive(settings.run.seed, "masks") % 2**32
    return Pipeline(name, stages, server_training, regularizer, masks_from, primary_predictor, release=stage)
