"""Stochastic gradient descent over parts of a network, and Adam and AdamW, by torch's functional forms of them.

The same bits as ``torch.optim.SGD``, ``Adam`` and ``AdamW``, whose first step, though, imports torch's compiler: some
870 modules, three seconds of a processor. On a device every message has a new process, which would pay for that each
time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

FUSED = ("cpu", "cuda")  # devices with one kernel for a step

State = Mapping[nn.Parameter, Mapping[str, Tensor]]


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


class Descent(ABC):
    """Moves parameters along their gradients; one without a gradient stays as it is.

    Args:
        groups: every parameter in one of them.
        weight_decay: of all groups.
        state: what the optimiser keeps of a parameter, by names of its own; of those that have something already.
        fused: one kernel for a step, which rounds as torch's classes with ``fused=True`` do; without it as they do by
            default on a CPU.
    """

    keeps: tuple[str, ...]
    """The names in the state of a parameter."""

    def __init__(
        self, groups: Sequence[Group], weight_decay: float, state: State | None, fused: bool
    ) -> None:
        self.groups = list(groups)
        self.weight_decay = weight_decay
        self.state = {parameter: dict(kept) for parameter, kept in (state or {}).items()}
        self.fused = fused

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
            moved = {p: p.grad for p in group.parameters if p.grad is not None}
            if moved:
                fused = self.fused and next(iter(moved)).device.type in FUSED
                self._move(list(moved), list(moved.values()), group.learning_rate, fused)

    @abstractmethod
    def _move(
        self, moved: list[nn.Parameter], gradients: list[Tensor], learning_rate: float | Tensor, fused: bool
    ) -> None:
        """Move at least one parameter of a group, each along its gradient."""


class SGD(Descent):
    """θ <- θ - η·b with b <- momentum·b + g + weight_decay·θ.

    Args:
        groups: every parameter in one of them.
        momentum: 0 is plain descent, which keeps no b.
        weight_decay: of all groups.
        state: b as ``momentum``, changed in place.
        fused: see :class:`Descent`.
    """

    keeps = ("momentum",)

    def __init__(
        self,
        groups: Sequence[Group],
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        state: State | None = None,
        *,
        fused: bool = True,
    ) -> None:
        super().__init__(groups, weight_decay, state, fused)
        self.momentum = momentum

    def _move(
        self, moved: list[nn.Parameter], gradients: list[Tensor], learning_rate: float | Tensor, fused: bool
    ) -> None:
        if self.momentum:  # zeros are what a first step starts from
            self.state.update({p: {"momentum": torch.zeros_like(p)} for p in moved if p not in self.state})
        sgd(
            list[Tensor](moved),
            gradients,
            [self.state[p]["momentum"] for p in moved] if self.momentum else [],
            fused=fused,
            foreach=False,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Adam(Descent):
    """Adam with its usual β₁ = 0.9, β₂ = 0.999, ε = 1e-8.

    Args:
        groups: every parameter in one of them.
        weight_decay: added to the gradient, times the parameter; decoupled it shrinks the parameter by η times that.
        state: ``step`` (a scalar), ``exp_avg`` and ``exp_avg_sq``, changed in place.
        decoupled: AdamW.
        fused: see :class:`Descent`.
    """

    keeps = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        groups: Sequence[Group],
        weight_decay: float = 0.0,
        state: State | None = None,
        *,
        decoupled: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__(groups, weight_decay, state, fused)
        self.decoupled = decoupled

    def _move(
        self, moved: list[nn.Parameter], gradients: list[Tensor], learning_rate: float | Tensor, fused: bool
    ) -> None:
        self.state.update({p: _at_rest(p, fused) for p in moved if p not in self.state})
        kept = [self.state[parameter] for parameter in moved]
        (adamw if self.decoupled else adam)(
            list[Tensor](moved),
            gradients,
            [of["exp_avg"] for of in kept],
            [of["exp_avg_sq"] for of in kept],
            [],
            [of["step"] for of in kept],
            foreach=not fused and any(parameter.is_cuda for parameter in moved),
            fused=fused,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
        )


def _at_rest(parameter: Tensor, fused: bool) -> dict[str, Tensor]:
    """Return the state before a first step; one kernel on a card reads the number of steps there."""
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=parameter.device if fused else "cpu"), **moments}
