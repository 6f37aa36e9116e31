"""Shared code of methods in which every client trains an auxiliary network besides its own (FML, FedKD).

::

    server   a ---------------------------------------------------------> every client
    client   own network w_i and a teach each other on every batch: L(w_i | a) + L(a | w_i), one step each
    server   a <- mean of a_i

The auxiliary network has the same architecture everywhere; clients' own networks may differ and never leave the client.
The rest of the auxiliary network's state_dict (BatchNorm's buffers) stays on the client, in its memory under ``aux.``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from pbfl_flwr.config import Settings
from pbfl_flwr.config.keys import KlReduction
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client
from pbfl_flwr.methods.averaging import load_parameters
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import SplitModel, count_parameters
from pbfl_flwr.models.dry_forward import dry_forward
from pbfl_flwr.models.isolation import ties_kept
from pbfl_flwr.models.registry import architectures, without_weights
from pbfl_flwr.payloads import part_of
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import import_function, is_external

AUXILIARY = "aux"
CLIP = 10.0  # norm of both gradients, "prevents divergence on specific tasks" in HtFLlib and PFLlib


@dataclass(frozen=True)
class Conventions:
    """Details of mutual distillation in which the code bases differ.

    Attributes:
        reduction: "batchmean" sums over classes; "mean" divides by K as well, as torch's default does.
        detach: whether gradients stop at the teacher's output.
    """

    reduction: KlReduction = "batchmean"
    detach: bool = True

    def teacher(self, output: Tensor) -> Tensor:
        """Return the student's target: the teacher's output, detached if ``detach``."""
        return output.detach() if self.detach else output

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return KL(p(teacher) ‖ p(student)) of logits (B, K)."""
        target = self.teacher(teacher).softmax(dim=1)
        summed = nn.functional.kl_div(student.log_softmax(dim=1), target, reduction="batchmean")
        return summed if self.reduction == "batchmean" else summed / student.shape[1]


def conventions_of(settings: Settings) -> Conventions:
    """Return the conventions set by the configuration or its protocol."""
    conventions = settings.conventions
    return Conventions(
        "mean" if conventions.kl_reduction == "mean" else "batchmean", conventions.detach_teacher != "no"
    )


def one_architecture(key: str, value: str, code: Collection[str]) -> str:
    """Return the name of the auxiliary architecture.

    Args:
        key: the configuration key, for messages.
        value: of the key.
        code: functions that may be imported.

    Raises:
        PbflError: if the value does not name exactly one, or code that may not be imported.
    """
    names = architectures(value, code, key)
    if len(names) != 1:
        raise PbflError(f"{key} = '{value}': must be one architecture, found {', '.join(names)}")
    if is_external(names[0]):
        import_function(key, names[0])
    return names[0]


def auxiliary_network(architecture: str, client: Client, parameters: Mapping[str, Tensor]) -> SplitModel:
    """Return the auxiliary network on the client's device, with the given weights and the client's own buffers.

    Raises:
        PbflError: if the weights are not those of the architecture.
    """
    network = build_model(architecture, client.task, 0)
    expected = {name: p.shape for name, p in network.named_parameters()}
    if expected != {name: tensor.shape for name, tensor in parameters.items()}:
        raise PbflError(f"the received weights are not those of the auxiliary network '{architecture}'")
    load_parameters(network, parameters)
    kept = part_of(client.memory, AUXILIARY)
    network.load_state_dict({name: kept.get(name, new) for name, new in network.state_dict().items()})
    with ties_kept(architecture, network):
        return network.to(client.device)


def buffers_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the auxiliary network's state_dict without its parameters, for the client's memory."""
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    kept = {name: tensor for name, tensor in network.state_dict().items() if name not in parameters}
    return {f"{AUXILIARY}.{name}": tensor.detach().clone() for name, tensor in kept.items()}


def check_auxiliary(key: str, architecture: str, task: Task) -> None:
    """Check before round 1 that the auxiliary network accepts the task's inputs.

    Raises:
        PbflError: naming the key and what is incompatible.
    """
    try:
        dry_forward(architecture, build_model(architecture, task, 0), task)
    except PbflError as error:
        raise PbflError(f"{key}: {error}") from None


def auxiliary_scalars(architecture: str, task: Task) -> int:
    """Return |θ_a| + |φ_a|, the number of parameters of the auxiliary network."""
    return sum(count_parameters(build_model(without_weights(architecture), task, 0)))
