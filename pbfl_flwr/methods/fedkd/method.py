"""FedKD: a large private mentor and a small shared mentee teach each other; the mentee is sent compressed.

Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature Communications 2022.

Round: on every batch h, z are the mentor's features and logits, h_a, u the mentee's, and D = CE(z, y) + CE(u, y). The
mentor minimises CE(z, y) + [KL(p(u) ‖ p(z)) + H]/D, the mentee CE(u, y) + [KL(p(z) ‖ p(u)) + H]/D, H the mean square of
h - W·h_a over B·d with a private map W (d, d). The server averages the uploads, and both ways every matrix is truncated
to the singular values that hold the share T_start + (T_end - T_start)·t/T of its energy.
Travels: the mentee's parameters as factors; the mentor, W and BatchNorm's buffers stay.
Predicts: the logits of the mentor.
Differs from the paper: h is the feature vector alone, where the paper aligns hidden states and attention heatmaps of
Transformers; a tensor is sent dense if its factors would not be smaller. A client that did not take part in the
previous round receives the whole mentee, since it lacks the base of an update; after a resume every client does.
Differs from the references: by default updates are factorised, as in the paper; protocol "htfl" and "pfl" factorise the
parameters themselves (fedkd.compression = "as-coded"), whose spectrum is flat, convolutions kernel by kernel, and a
tensor that needs its full rank becomes zero. D and the teachers are detached unless detach-teacher = "no".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pbfl_flwr import seeds
from pbfl_flwr.config import Auto, Group, Settings, parse_section
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Method, Round, Update
from pbfl_flwr.methods.averaging import Weighting, average, parameters_of, weighting_of
from pbfl_flwr.methods.fedkd.lowrank import Scheme, check_shapes, compress, expand
from pbfl_flwr.methods.mutual import (
    CLIP,
    Conventions,
    auxiliary_network,
    auxiliary_scalars,
    buffers_of,
    check_auxiliary,
    conventions_of,
    one_architecture,
)
from pbfl_flwr.methods.sharing import initial
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.registry import without_weights
from pbfl_flwr.payloads import LowRank, RejectedPayload, Weights, joined, part_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.loop import fit, forward
from pbfl_flwr.training.optimizers import param_group

PUBLISHED_RATIO = 0.8932  # payload / parameters, the constant in all published costs of FedKD
SMALLEST_LOSS = 1e-6  # bound on D: a client with one class can reach a cross-entropy of exactly zero


class Config(Group):
    """Settings ``fedkd.*``."""

    auxiliary: str = Field("cnn4", description="architecture of the mentee, the same on all clients")
    auxiliary_learning_rate: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto", description="learning rate of the mentee; auto: learning-rate"
    )
    energy_start: float = Field(
        0.95, gt=0, le=1, description="T_start, share of the energy Σσ² kept in the first round"
    )
    energy_end: float = Field(
        0.98, gt=0, le=1, description="T_end, share of the energy Σσ² kept at the end of the schedule"
    )
    schedule_rounds: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto", description="rounds in which the share goes from start to end; auto: num-server-rounds"
    )
    compression: Literal["auto", "safe", "as-coded"] = Field(
        "auto",
        description="safe: SVD of updates; as-coded: SVD of the parameters, as in HtFLlib; auto: safe under "
        "protocol clean and fedproto",
    )
    max_grad_norm: float = Field(
        CLIP, ge=0, description="bound on the norm of each of the three gradients; 0 is off"
    )


@dataclass(frozen=True)
class MenteeState:
    """The server's state.

    Attributes:
        weights: the mentee as clients hold it after receiving this state.
        update: the compressed change from the previous version (or, as coded, the parameters); None before round 1.
        version: of the weights; 0 before round 1.
        holders: clients known to hold the previous version.
    """

    weights: Weights
    update: LowRank | None = None
    version: int = 0
    holders: tuple[int, ...] = ()

    @cached_property
    def whole(self) -> LowRank:
        """The uncompressed weights, for clients that do not hold the previous version."""
        return LowRank(self.weights.tensors, version=self.version)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every tensor."""
        return {name: tensor.shape for name, tensor in self.weights.tensors.items()}

    @property
    def zeroed(self) -> list[str]:
        """Names of the matrices that are entirely zero, in the order of a file's, so also after a resume."""
        return sorted(name for name, t in self.weights.tensors.items() if t.dim() > 1 and not bool(t.any()))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything under prefixed names; see :class:`pbfl_flwr.payloads.Payload`."""
        update = {} if self.update is None else joined(update=self.update)
        holders = torch.tensor(self.holders, dtype=torch.int64)
        return {
            **joined(weights=self.weights),
            **update,
            "holders": holders,
            "at": torch.tensor([self.version]),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> MenteeState:
        """Rebuild the state of a checkpoint."""
        update = part_of(tensors, "update")
        return cls(
            Weights.from_tensors(part_of(tensors, "weights"), task),
            LowRank.from_tensors(update, task) if update else None,
            int(tensors["at"]),
            tuple(tensors["holders"].tolist()),
        )


@dataclass(frozen=True)
class FedKD(Method[MenteeState, LowRank, LowRank]):
    """See the module."""

    config: Config
    auxiliary: str
    conventions: Conventions
    scheme: Scheme
    rounds: int
    weighting: Weighting = "uniform"
    name: str = "fedkd"

    state = MenteeState
    down = LowRank
    up = LowRank

    def init(self, task: Task, seed: int) -> MenteeState:
        """Return a newly initialised mentee."""
        return MenteeState(initial(self.auxiliary, task, seed, "all"))

    def broadcast(self, state: MenteeState, client: int) -> LowRank:
        """Return the compressed update to clients that hold its base (or need none), to others the whole mentee."""
        if state.update is None or (state.update.base >= 0 and client not in state.holders):
            return state.whole
        return state.update

    def resumed(self, state: MenteeState) -> MenteeState:
        """Assume that no client holds the mentee: if all selected clients had lost it, updates would end the run."""
        return replace(state, holders=())

    def energy(self, number: int) -> float:
        """Return the share of Σσ² kept in a round, T_start + (T_end - T_start)·t/T with t = 0 in the first."""
        progress = min(1.0, (number - 1) / self.rounds)
        return self.config.energy_start + (self.config.energy_end - self.config.energy_start) * progress

    # Client -----------------------------------------------------------------------------------------------

    def local_update(self, client: Client, down: LowRank) -> Update[LowRank]:
        """Train mentor and mentee on the labels and on each other's logits and features."""
        received = self._received(client, down)
        mentor, mentee = client.model, auxiliary_network(self.auxiliary, client, received)
        projection = self._projection(client)
        teacher, divergence = self.conventions.teacher, self.conventions.divergence
        distance, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy

        def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            (h, z), (h_a, u) = forward(mentor, inputs), forward(mentee, inputs)
            ce, ce_a = cross_entropy(z, labels), cross_entropy(u, labels)
            D = teacher(ce + ce_a).clamp_min(SMALLEST_LOSS)
            return {
                "ce": ce,
                "distillation": divergence(z, u) / D,
                "hidden": distance(h, projection(teacher(h_a))) / D,
                "aux-ce": ce_a,
                "aux-distillation": divergence(u, z) / D,
                "aux-hidden": distance(teacher(h), projection(h_a)) / D,
            }

        clip, rate = self.config.max_grad_norm, self.config.auxiliary_learning_rate
        param_groups = [
            param_group(mentor, max_grad_norm=clip),
            param_group(mentee, None if rate == "auto" else rate, clip),
            param_group(projection, max_grad_norm=clip),
        ]
        report = fit(client, loss, param_groups=param_groups, extra_modules=[mentee])
        upload = self._upload(client, parameters_of(mentee), received, down.version)
        memory = {
            **buffers_of(mentee),
            **report.optimizer,
            "projection": projection.weight.detach().cpu().clone(),
        }
        if self.scheme == "safe":
            memory |= {f"received.{name}": tensor for name, tensor in received.items()}
            memory["received-version"] = torch.tensor([down.version])
        lost = sum(factors.sigma.shape[-1] == 0 for factors in upload.factors.values())
        share = upload.scalars() / sum(tensor.numel() for tensor in received.values())
        return Update(
            upload, memory, {**report.metrics(), "sent-share": share, "zeroed-tensors": float(lost)}
        )

    def _received(self, client: Client, down: LowRank) -> dict[str, Tensor]:
        """Return the mentee's parameters: those in the message, or those in memory plus the update in the message."""
        reference = build_model(without_weights(self.auxiliary), client.task, 0)
        change = expand(down, {name: p.shape for name, p in reference.named_parameters()})
        if down.base < 0:
            return change
        stored = part_of(client.memory, "received")
        version = int(client.memory["received-version"]) if stored else -1
        if version == down.version:
            return stored  # received before; only the upload was lost
        if version != down.base:
            raise PbflError(
                f"client {client.id} received an update of mentee version {down.base}, but holds "
                f"{version if stored else 'none'}; the server sends the whole mentee in the next round"
            )
        return {name: stored[name] + change[name] for name in change}

    def _upload(
        self, client: Client, trained: Mapping[str, Tensor], received: Mapping[str, Tensor], version: int
    ) -> LowRank:
        safe = self.scheme == "safe"
        return compress(
            {name: trained[name] - received[name] for name in trained} if safe else trained,
            self.energy(client.round),
            self.scheme,
            base=version if safe else -1,
            version=version,
            num_examples=len(client.data.train.labels),
        )

    def _projection(self, client: Client) -> nn.Linear:
        """Return W from memory, else newly initialised from the run's seed, like all networks."""
        d = client.task.feature_dim
        with seeds.seeded(client.seed):
            projection = nn.Linear(d, d, bias=False)
        if "projection" in client.memory:
            with torch.no_grad():
                projection.weight.copy_(client.memory["projection"])
        return projection.to(client.device)

    # Server -----------------------------------------------------------------------------------------------

    def aggregate(self, state: MenteeState, uploads: Mapping[int, LowRank], round_info: Round) -> MenteeState:
        """Average and compress; the new mentee is what clients can rebuild from the compressed form."""
        if not uploads:
            return state
        expanded = {i: Weights(expand(up, state.shapes), up.num_examples) for i, up in uploads.items()}
        safe = self.scheme == "safe"
        nothing = {name: torch.zeros_like(tensor) for name, tensor in state.weights.tensors.items()}
        mean = average(Weights(nothing) if safe else state.weights, expanded, self.weighting).tensors
        update = compress(
            mean,
            self.energy(round_info.number),
            self.scheme,
            base=state.version if safe else -1,
            version=round_info.number,
        )
        rebuilt = expand(update, state.shapes)
        if safe:
            rebuilt = {name: state.weights.tensors[name] + rebuilt[name] for name in rebuilt}
        return MenteeState(Weights(rebuilt), update, round_info.number, tuple(uploads))

    def validate(self, upload: LowRank, state: MenteeState, task: Task) -> None:
        """Check the shapes of all tensors, and that an update is relative to the version that was sent."""
        check_shapes(upload, state.shapes)
        expected = state.version if self.scheme == "safe" else -1
        if upload.base != expected:
            raise RejectedPayload(f"relative to version {upload.base}, expected {expected}")

    def report(self, state: MenteeState) -> dict[str, float]:
        """Size of the compressed broadcast as a share of the mentee's parameters, and its number of zero matrices."""
        if state.update is None:
            return {}
        share, lost = state.update.scalars() / state.weights.scalars(), len(state.zeroed)
        return {"sent-share": share, "zeroed-tensors": float(lost)}

    def warnings(self, num_rounds: int, state: MenteeState | None = None) -> list[str]:
        """Warn if matrices of the mentee have become zero."""
        if state is None or state.update is None or not (lost := state.zeroed):
            return []
        return [
            f"{len(lost)} matrices of the mentee became zero, since as-coded compression drops those that need "
            f"their full rank ({', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}); fedkd.compression = 'safe' "
            "keeps them"
        ]

    def auxiliary_architectures(self) -> tuple[str, ...]:
        """The auxiliary network."""
        return (self.auxiliary,)

    def check(self, task: Task, architectures: Sequence[str]) -> None:
        """Check that the mentee accepts the task's inputs and, as coded, has only 1-, 2- and 4-d parameters."""
        check_auxiliary("fedkd.auxiliary", self.auxiliary, task)
        if self.scheme == "as-coded":
            for name, parameter in build_model(without_weights(self.auxiliary), task, 0).named_parameters():
                if parameter.dim() not in (1, 2, 4):
                    raise PbflError(
                        f"fedkd.compression = 'as-coded' cannot factorise '{name}' of '{self.auxiliary}', which has "
                        f"{parameter.dim()} axes; must be 'safe'"
                    )

    def paper_scalars(self, task: Task, class_counts: Sequence[int]) -> float:
        """2·M·(|θ_a| + |φ_a|)·0.8932; the share actually sent is in the run's log."""
        return 2 * len(class_counts) * auxiliary_scalars(self.auxiliary, task) * PUBLISHED_RATIO


def build(settings: Settings) -> FedKD:
    """Return the method.

    Raises:
        PbflError: if compressed updates would be rounded on the wire, since the rounding errors accumulate.
    """
    config = parse_section(Config, settings)
    habit: Scheme = "as-coded" if settings.run.protocol in ("htfl", "pfl") else "safe"
    scheme = habit if config.compression == "auto" else config.compression
    if scheme == "safe" and settings.prototypes.wire_dtype != "float32":
        raise PbflError(
            f"wire-dtype = '{settings.prototypes.wire_dtype}': fedkd.compression = 'safe' sends updates, whose "
            "rounding errors would accumulate over the rounds; must be 'float32', or fedkd.compression "
            "'as-coded'"
        )
    rounds = settings.run.num_server_rounds if config.schedule_rounds == "auto" else config.schedule_rounds
    return FedKD(
        config,
        one_architecture("fedkd.auxiliary", config.auxiliary, settings.code),
        conventions_of(settings),
        scheme,
        rounds,
        weighting_of(settings, "uniform"),
    )
