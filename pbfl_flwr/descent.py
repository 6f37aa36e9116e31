"""Stochastic gradient descent over parts of a network, and Adam, by torch's functional forms of them.

The same bits as ``torch.optim.SGD`` and ``torch.optim.Adam``, whose first step, though, imports torch's compiler: some
870 modules, three seconds of a processor. On a device every message has a new process, which would pay for that each
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate and a bound on the norm of their gradient.

    Attributes:
        parameters: at least one.
        learning_rate: η; a tensor on the parameters' device where a recorded step must not hold its number.
        max_grad_norm: 0 is no bound.
    """

    parameters: tuple[nn.Parameter, ...]
    learning_rate: float | Tensor
    max_grad_norm: float = 0.0


class Descent:
    """θ <- θ - η·b with b <- momentum·b + g + weight_decay·θ; a parameter without a gradient stays as it is.

    Args:
        groups: every parameter in one of them.
        momentum: 0 is plain descent, which keeps no b.
        weight_decay: of all groups.
        buffers: b by parameter, of those that have one already; changed in place.
        fused: one kernel for a step, which rounds as ``torch.optim.SGD(fused=True)`` does; without it as by default on
            a CPU.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        buffers: Mapping[nn.Parameter, Tensor] | None = None,
        *,
        fused: bool = True,
    ) -> None:
        self.groups = list(groups)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.buffers = dict(buffers or {})
        self._fused = fused

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
            fused=self._fused and moved[0].device.type in ("cpu", "cuda"),
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


class AdamDescent:
    """Adam with its usual β₁ = 0.9, β₂ = 0.999, ε = 1e-8, a parameter without a gradient stays as it is.

    Args:
        parameters: at least one.
        learning_rate: α.
        weight_decay: added to the gradient, times the parameter.
        moments: by parameter, of those that have some already, ``step``, ``exp_avg`` and ``exp_avg_sq``;
            changed in place.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        learning_rate: float,
        weight_decay: float = 0.0,
        moments: Mapping[nn.Parameter, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.moments = dict(moments or {})

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move along the gradients."""
        moved = [parameter for parameter in self.parameters if parameter.grad is not None]
        self.moments.update(
            {parameter: _at_rest(parameter) for parameter in moved if parameter not in self.moments}
        )
        kept = [self.moments[parameter] for parameter in moved]
        adam(
            list[Tensor](moved),
            [parameter.grad for parameter in moved if parameter.grad is not None],
            [of["exp_avg"] for of in kept],
            [of["exp_avg_sq"] for of in kept],
            [],
            [of["step"] for of in kept],
            foreach=any(parameter.is_cuda for parameter in moved),
            fused=False,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
        )


def _at_rest(parameter: Tensor) -> dict[str, Tensor]:
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros(()), **moments}
