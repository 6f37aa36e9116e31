"""The training loop and the pass over features that all methods use.

A client's shard is a contiguous tensor; batches are taken by index and normalised on the device, and nothing here
handles a single sample in Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pbfl_flwr.config import TrainingSettings
from pbfl_flwr.data import ClientData, Shard
from pbfl_flwr.errors import PbflError, abbreviate
from pbfl_flwr.method import Client
from pbfl_flwr.models.contract import SplitModel, has_batch_norm, is_deterministic
from pbfl_flwr.training.augmentation import Augmentation
from pbfl_flwr.training.optimizers import SGD, Adam, Optimizer, ParamGroup, State, param_group
from pbfl_flwr.util.user_code import wrong_result

Loss = Callable[..., Mapping[str, Tensor]]
"""(inputs (B, ...), labels (B,), tensors from ``draw``) -> named loss terms; their sum is minimised."""


REMEDY = "lower learning-rate, set max-grad-norm, or scale large inputs"
SMALLEST_FILLED = 32  # the smallest batch of a GPU in evaluation


class Diverged(PbflError):
    """A loss or a weight is not finite: the client's update is useless and must not be stored."""


@dataclass(frozen=True)
class FitReport:
    """Result of :func:`fit`.

    Attributes:
        steps: number of optimiser steps.
        samples: samples seen, summed over all epochs.
        losses: mean of every loss term over the steps.
        optimizer: the optimiser's state if the settings keep it, by parameter name; parameters outside the client's
            network are named by their position.
    """

    steps: int
    samples: int
    losses: dict[str, float]
    optimizer: dict[str, Tensor]

    def metrics(self) -> dict[str, float]:
        """Return the losses under their names in the log; also ``idle`` = 1 if there was no step."""
        losses = {f"loss.{name}": value for name, value in self.losses.items()}
        return losses if self.steps else {**losses, "idle": 1.0}

    def then(self, later: FitReport) -> FitReport:
        """Return the combined report of two passes; where both have an entry, the later one is used."""
        return FitReport(
            self.steps + later.steps,
            self.samples + later.samples,
            {**self.losses, **later.losses},
            {**self.optimizer, **later.optimizer},
        )


def forward(model: SplitModel, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return (features (B, d), logits (B, K)) of a network that follows the model contract."""
    features: Tensor = model.features(inputs)
    logits: Tensor = model.head(features)
    return features, logits


def classification(model: SplitModel) -> Loss:
    """Return the plain loss: cross-entropy of the logits, averaged over the batch."""

    def loss(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"ce": nn.functional.cross_entropy(forward(model, inputs)[1], labels)}

    return loss


def fit(
    client: Client,
    loss: Loss,
    *,
    param_groups: Sequence[ParamGroup] | None = None,
    extra_modules: Sequence[nn.Module] = (),
    source: tuple[Tensor, Tensor] | None = None,
    draw: Callable[[], tuple[Tensor, ...]] | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    phase: str = "fit",
    after_step: Callable[[], None] | None = None,
    after_epoch: Callable[[], None] | None = None,
) -> FitReport:
    """Train on the client's data, augmented if the settings say so, with the configured optimiser.

    If a network has BatchNorm, batches of one sample are skipped.

    Args:
        client: its network is changed in place.
        loss: computes the named loss terms of one batch.
        param_groups: parameters to update; by default the client's whole network. The others get no gradient, but
            BatchNorm statistics are updated in the whole network, as in the references.
        extra_modules: other networks that take part; put into training mode as well.
        source: (features (n, d), labels) on the client's device to train the head on, instead of the client's data.
        draw: called before every step; its tensors are passed to the loss after the batch.
        epochs: passes over the data; by default ``local-epochs``.
        max_steps: upper bound on the number of steps; None is no bound.
        phase: name of this pass, so that two passes in a round draw different batches.
        after_step: called after every optimiser step.
        after_epoch: called after every pass over the data.

    Raises:
        PbflError: if none of the parameters to update can be trained.
        Diverged: if a mean loss term or a final weight is not finite.
    """
    settings, data, model = client.training, client.data, client.model
    parts = [param_group(model)] if param_groups is None else list(param_groups)
    factor = rate_factor(settings, client.round)
    groups = [_scaled(group, factor) for group in parts if group.parameters]
    if not groups:
        return FitReport(0, 0, {}, {})
    names = _names(model, groups)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise PbflError(f"it trains {abbreviate([*names])}: at least one must have requires_grad = True")
    optimizer = _optimizer(settings, groups, factor)
    if settings.optimizer_state == "kept":
        optimizer.state = _remembered(optimizer.state_names, names, client.memory)
    order, changes = client.generator(phase), client.generator(f"{phase} augmentation")
    for network in (model, *extra_modules):
        network.train()
    passed = model if source is None else model.head  # the part of the network that batches go through
    smallest = 2 if any(has_batch_norm(network) for network in (passed, *extra_modules)) else 1
    trained_on = data.train.labels if source is None else source[1]
    totals: dict[str, Tensor] = {}

    def learn(*batch: Tensor) -> None:
        terms = loss(*batch)
        if not steps:
            _check_terms(loss, terms)
        optimizer.zero_grad()
        torch.stack(list(terms.values())).sum().backward()
        optimizer.step()
        for name, value in terms.items():
            _add(totals, name, value.detach())

    steps = samples = 0
    graphs = settings.cuda_graphs and client.device.type == "cuda"
    with (
        _gradients_of(optimizer, model),
        client.recordings.graphed(learn, client.device, (model, *extra_modules))
        if graphs
        else nullcontext(learn) as step,
    ):
        for _ in range(settings.local_epochs if epochs is None else epochs):
            if steps == max_steps:
                break
            augmented = None
            if settings.augmentation and source is None:
                augmented = Augmentation(settings, data.train.inputs, changes)
            for index in batches(len(trained_on), settings, order, trained_on.device):
                if len(index) < smallest:
                    continue  # BatchNorm has no variance over one sample
                if steps == max_steps:
                    break
                if source is None:
                    batch = take(data, data.train, index, client.device, settings.layout, augmented)
                else:
                    batch = source[0][index], source[1][index]
                step(*batch, *(draw() if draw is not None else ()))
                if after_step is not None:
                    after_step()
                steps, samples = steps + 1, samples + len(index)
            if after_epoch is not None:
                after_epoch()
    losses = {name: float(total) / steps for name, total in totals.items()}
    _check_finite(losses, optimizer.parameters, steps)
    state = _to_remember(optimizer.state, names) if settings.optimizer_state == "kept" else {}
    return FitReport(steps, samples, losses, state)


def _check_terms(loss: Loss, terms: object) -> None:
    """Check what a loss has returned.

    Raises:
        PbflError: naming the function, if they are no tensors by name.
    """
    if not (
        isinstance(terms, Mapping) and terms and all(isinstance(term, Tensor) for term in terms.values())
    ):
        raise wrong_result(loss, terms, "its terms by name, each a tensor")


def _names(model: SplitModel, groups: Sequence[ParamGroup]) -> dict[str, nn.Parameter]:
    """Return trained parameters by name: the network's under their own, others as ``beside.<position among them>``."""
    trained = [parameter for group in groups for parameter in group.parameters]
    identities = {id(parameter) for parameter in trained}
    names = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in identities}
    in_network = {id(parameter) for parameter in names.values()}
    others = (parameter for parameter in trained if id(parameter) not in in_network)
    return names | {f"beside.{place}": parameter for place, parameter in enumerate(others)}


@contextmanager
def _gradients_of(optimizer: Optimizer, model: SplitModel) -> Iterator[None]:
    """Within the context only trained parameters of the network get gradients; afterwards all gradients are cleared."""
    trained = {id(parameter) for parameter in optimizer.parameters}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in trained]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        yield
    finally:
        optimizer.zero_grad()
        for parameter in frozen:
            parameter.requires_grad_(True)


def _check_finite(losses: Mapping[str, float], parameters: Sequence[nn.Parameter], steps: int) -> None:
    """Check the result of a number of steps.

    Raises:
        Diverged: if a loss term or a weight is not finite.
    """
    if bad := [name for name, value in losses.items() if not math.isfinite(value)]:
        raise Diverged(
            f"loss term '{bad[0]}' is not finite after {steps} steps; {REMEDY}, or lower its weight"
        )
    sums = [parameter.detach().sum() for parameter in parameters]  # much faster than checking every element
    if not sums or bool(torch.stack(sums).isfinite().all()):  # synchronises with a GPU only once
        return
    # The sum of finite numbers may overflow.
    if not all(bool(parameter.isfinite().all()) for parameter in parameters):
        raise Diverged(f"a weight is not finite after {steps} steps; {REMEDY}")


def rate_factor(settings: TrainingSettings, number: int) -> float:
    """Return the factor on learning rates in round t: decay^(t-1) · ½·(1 + cos(π·(t-1)/R)).

    The cosine is that of ``torch.optim.lr_scheduler.CosineAnnealingLR``, stepped after every round: 0 only after the
    step that follows round R. Round R itself trains with ½·(1 - cos(π/R)), and so do later rounds; with R = 1 all have
    the whole rate.
    """
    decayed = settings.learning_rate_decay ** (number - 1)
    if not (rounds := settings.learning_rate_cosine):
        return decayed
    return decayed * (1 + math.cos(math.pi * (min(number, rounds) - 1) / rounds)) / 2


def batches(
    num_samples: int, settings: TrainingSettings, order: torch.Generator, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """Yield the index tensors of one epoch; the order is drawn on the CPU and moved to the samples' device once.

    ``batch-order`` "fixed" keeps the stored order. ``drop-last`` "small" drops an incomplete last batch unless the
    client has less than one batch; "always" drops it (a small client then makes no step); "never" keeps it.

    Args:
        num_samples: n; indices are 0..n-1.
        settings: with ``batch-size``, ``batch-order`` and ``drop-last``.
        order: CPU generator for the order of the samples.
        device: of the samples.
    """
    fixed = settings.batch_order == "fixed"
    index = torch.arange(num_samples) if fixed else torch.randperm(num_samples, generator=order)
    complete = num_samples - num_samples % settings.batch_size
    drop = settings.drop_last == "always" or (settings.drop_last != "never" and complete > 0)
    used = index[:complete] if drop else index
    if len(used):
        yield from used.to(device).split(settings.batch_size)


def complete_batches(client: Client) -> Shard:
    """Return the training samples; under ``drop-last`` "always" without the last n_i mod B in stored order."""
    shard, settings = client.data.train, client.training
    if settings.drop_last != "always":
        return shard
    complete = len(shard) - len(shard) % settings.batch_size
    return Shard(shard.inputs[:complete], shard.labels[:complete])


def take(
    data: ClientData,
    shard: Shard,
    index: Tensor | slice,
    device: torch.device,
    layout: str = "contiguous",
    changed: Callable[[Tensor, Tensor | slice], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (normalised float inputs (B, ...), labels (B,)) of the selected samples on the device.

    Args:
        data: defines how inputs are normalised.
        shard: samples of it.
        index: of the selected samples.
        device: for the results.
        layout: memory layout of images: "contiguous" or "channels-last".
        changed: (stored samples, index) -> samples to use instead, i.e. the augmentation.
    """
    inputs = shard.inputs[index]
    inputs = data.prepare((inputs if changed is None else changed(inputs, index)).to(device))
    if inputs.dim() == 4 and layout == "channels-last":
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return inputs, shard.labels[index].to(device)


def each_batch(client: Client, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs (F, ...), labels (B,)) over a shard, in large batches, with the network in evaluation mode.

    On a CPU F = B. On a GPU the last batch is filled with samples of the shard, F >= B, and what a network says of the
    rows from B on is to be discarded: cuDNN takes seconds for a network and a batch size that it has not met.
    """
    client.model.eval()
    count, size = len(shard.labels), client.evaluation.eval_batch_size
    fill = client.device.type == "cuda"
    if fill:
        size = _filled_size(count, size)
    for start in range(0, count, size):
        index: Tensor | slice = slice(start, start + size)
        if fill and start + size > count:
            index = torch.arange(start, start + size, device=shard.labels.device) % count
        inputs, labels = take(client.data, shard, index, client.device, client.training.layout)
        yield inputs, labels[: count - start]


def _filled_size(count: int, largest: int) -> int:
    """Return the size of a GPU's batches: a power of two for a shard below the largest, so that sizes are few."""
    return min(largest, max(SMALLEST_FILLED, 1 << (count - 1).bit_length()))


@torch.no_grad()
def each_feature(client: Client, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (features (B, d), labels (B,)) over a shard in evaluation mode, in large batches."""
    for inputs, labels in each_batch(client, shard):
        yield client.model.features(inputs)[: len(labels)], labels


def fixed_features(client: Client) -> tuple[Tensor, Tensor] | None:
    """Return (features (n, d), labels (n,)) of the training data, for training a head on a frozen body.

    None if the frozen body's features may vary between passes, if samples are augmented, or if there are none.
    """
    if (
        not is_deterministic(client.model)
        or client.training.augmentation
        or not len(client.data.train.labels)
    ):
        return None
    features, labels = zip(*each_feature(client, client.data.train), strict=True)
    return torch.cat(features), torch.cat(labels)


def _add(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Add to a running sum in place; reduced precision is summed in float32."""
    if name not in totals:
        wide = torch.promote_types(value.dtype, torch.float32)
        totals[name] = torch.zeros((), dtype=wide, device=value.device)
    totals[name].add_(value)


def _scaled(group: ParamGroup, factor: float) -> ParamGroup:
    """Return the group with its own learning rate, if it has one, multiplied by ``factor``."""
    rate = group.learning_rate
    return group if rate is None else replace(group, learning_rate=rate * factor)


def _optimizer(settings: TrainingSettings, groups: Sequence[ParamGroup], factor: float) -> Optimizer:
    common = (groups, settings.learning_rate * factor, settings.weight_decay, settings.max_grad_norm)
    if settings.optimizer == "sgd":
        return SGD(*common, momentum=settings.momentum)
    return Adam(*common, decoupled=settings.optimizer == "adamw")


def _to_remember(state: State, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": t for name, p in names.items() if p in state for kind, t in state[p].items()}


def _remembered(
    kinds: Sequence[str], names: Mapping[str, nn.Parameter], memory: Mapping[str, Tensor]
) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Return copies of the optimiser state from ``memory``; moments get the memory layout of their parameter."""
    stored = {
        p: {kind: memory[f"{kind}.{name}"] for kind in kinds}
        for name, p in names.items()
        if all(f"{kind}.{name}" in memory for kind in kinds)
    }
    return {p: {kind: _laid_out(p, tensor) for kind, tensor in state.items()} for p, state in stored.items()}


def _laid_out(parameter: nn.Parameter, stored: Tensor) -> Tensor:
    if stored.shape != parameter.shape:  # Adam's step counter
        return stored.to(parameter.device, copy=True)
    return torch.zeros_like(parameter).copy_(stored)
