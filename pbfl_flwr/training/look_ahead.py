"""One step of SGD ahead: how a tensor that a loss reads changes another loss after the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from pbfl_flwr.data import Shard
from pbfl_flwr.method import Client
from pbfl_flwr.models.contract import SplitModel, has_batch_norm
from pbfl_flwr.models.isolation import restored
from pbfl_flwr.training.loop import Loss, batches, take

Batches = Sequence[tuple[Tensor, Tensor]]
"""At least one, each of (inputs (B, ...), labels (B,))."""


def look_ahead(
    model: SplitModel,
    learnt: tuple[Callable[[SplitModel], Loss], Batches],
    judged: tuple[Callable[[SplitModel], Loss], Batches],
    rate: float,
    tensor: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return ∂J(θ')/∂v, a second-order gradient, and J(θ'), with θ' = θ - η·∇L(θ, v).

    The network stays as it is, its buffers included; both losses see it in training mode.

    Args:
        model: gives θ, its parameters that can be trained.
        learnt: network -> its loss, which reads ``tensor``; L is the mean of the terms' sum over these batches.
        judged: likewise J.
        rate: η.
        tensor: v, of any shape, which requires a gradient.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with restored(model), _differentiable_twice(model):
        slopes = torch.autograd.grad(
            _mean(learnt[0](model.train()), learnt[1]), parameters, create_graph=True, materialize_grads=True
        )
    with restored(model):
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.data.sub_(rate * slope.detach())  # unseen by the graph of the slopes
        value = _mean(judged[0](model.train()), judged[1])
        wanted = torch.autograd.grad(value, parameters, materialize_grads=True)
    change = torch.stack([(w * slope).sum() for w, slope in zip(wanted, slopes, strict=True)]).sum()
    (gradient,) = torch.autograd.grad(-rate * change, tensor, materialize_grads=True)
    return gradient, value.detach()


def some_batches(client: Client, shard: Shard, most: int) -> Batches:
    """Return up to so many batches in random order; none of one sample if the network has BatchNorm.

    Args:
        client: whose settings and generator are used.
        shard: of its samples.
        most: number of batches.
    """
    settings = client.training.model_copy(update={"batch_order": "shuffled", "drop_last": "small"})
    order, smallest = client.generator("look ahead"), 2 if has_batch_norm(client.model) else 1
    rows = [i for i in batches(len(shard), settings, order, shard.labels.device) if len(i) >= smallest]
    return [take(client.data, shard, i, client.device, client.training.layout) for i in rows[:most]]


def _mean(loss: Loss, batches: Batches) -> Tensor:
    sums = [torch.stack([*loss(*batch).values()]).sum() for batch in batches]
    return torch.stack(sums).mean()


@contextmanager
def _differentiable_twice(model: nn.Module) -> Iterator[None]:
    """Within the context fused kernels that have no second derivative are not used: attention, cuDNN's recurrence."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with ExitStack() as context:
        context.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            context.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield
