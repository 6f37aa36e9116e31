"""FedAvg: the model is averaged.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

Round: each client copies the global weights w, runs E epochs of SGD on cross-entropy, and answers its weights.
The server averages them, w <- Σ_i (n_i/Σn)·w_i.
Travels: all parameters, both ways, and n_i. BatchNorm's buffers stay on the client.
Predicts: the logits of the global model, scored when it arrives, before local training.
Differs from the references: PFLlib and HtFLlib do the same; Flower's own FedAvg and FedProto's repository
average the BatchNorm buffers too. ``weighting="uniform"`` is the latter's unweighted mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pbfl_flwr.config import Settings
from pbfl_flwr.method import Client, Method, Moment, Round, Update
from pbfl_flwr.models import architectures, build_model
from pbfl_flwr.payloads import Weights
from pbfl_flwr.task import Task
from pbfl_flwr.training import classification, fit
from pbfl_flwr.weights import Weighting, average, load_parameters, parameters_of, same_shapes, weighting_of


@dataclass(frozen=True)
class FedAvg(Method[Weights, Weights, Weights]):
    """See the module."""

    architecture: str
    weighting: Weighting = "samples"
    name: str = "fedavg"
    moment: Moment = "before"

    state = Weights
    down = Weights
    up = Weights
    same_architecture = True

    def init(self, task: Task, seed: int) -> Weights:
        """Return w_0, the weights that every client would start from by itself."""
        return Weights(parameters_of(build_model(self.architecture, task, seed)))

    def install(self, client: Client, down: Weights) -> None:
        """Copy w into the client's network."""
        load_parameters(client.model, down.tensors)

    def local_update(self, client: Client, down: Weights) -> Update[Weights]:
        """w_i <- w, then cross-entropy."""
        self.install(client, down)
        report = fit(client, classification(client.model))
        upload = Weights(parameters_of(client.model), len(client.data.train.labels))
        return Update(upload, report.optimizer, report.metrics())

    def aggregate(self, state: Weights, uploads: Mapping[int, Weights], at: Round) -> Weights:
        """Average."""
        return average(state, uploads, self.weighting)

    def validate(self, upload: Weights, state: Weights, task: Task) -> None:
        """Every tensor of the state, in its shape, and no other."""
        same_shapes(upload, state)

    def paper_scalars(
        self, task: Task, class_counts: Sequence[int], parameters: Sequence[tuple[int, int]]
    ) -> float:
        """2·M·|w|."""
        return float(sum(2 * (body + head) for body, head in parameters))


def build(settings: Settings) -> FedAvg:
    """Return the method."""
    return FedAvg(architectures(settings.models.models)[0], weighting_of(settings, "samples"))
