"""Stochastic gradient descent over parts of a network, by torch's functional form of it.

The same bits as ``torch.optim.SGD``, whose first step, though, imports torch's compiler: some 870 modules, three
seconds of a processor. On a device every message has a new process, which would pay for that each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate and a bound on the norm of their gradient.

    Attributes:
        parameters: at least one.
        learning_rate: η.
        max_grad_norm: 0 is no bound.
    """

    parameters: tuple[nn.Parameter, ...]
    learning_rate: float
    max_grad_norm: float = 0.0


class Descent:
    """θ <- θ - η·b with b <- momentum·b + g + weight_decay·θ; a parameter without a gradient stays as it is.

    Args:
        groups: every parameter in one of them.
        momentum: 0 is plain descent, which keeps no b.
        weight_decay: of all groups.
        buffers: b by parameter, of those that have one already; changed in place.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        buffers: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.groups = list(groups)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.buffers = dict(buffers or {})

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them, group by group."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients of each group, then move along them."""
        for group in self.groups:
            if group.max_grad_norm > 0:
                nn.utils.clip_grad_norm_(group.parameters, group.max_grad_norm)
            self._move(group)

    def _move(self, group: Group) -> None:
        moved = [parameter for parameter in group.parameters if parameter.grad is not None]
        if not moved:
            return
        # torch wants the buffers of all or of none; zeros are what a parameter without one starts from.
        known = [self.buffers.get(parameter) for parameter in moved]
        if self.momentum and any(buffer is not None for buffer in known):
            known = [torch.zeros_like(p) if b is None else b for p, b in zip(moved, known, strict=True)]
        sgd(
            list[Tensor](moved),
            [parameter.grad for parameter in moved if parameter.grad is not None],
            known if self.momentum else [],
            fused=moved[0].device.type in ("cpu", "cuda"),
            foreach=False,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=group.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if self.momentum:  # the first step has made them
            self.buffers.update({p: b for p, b in zip(moved, known, strict=True) if b is not None})
