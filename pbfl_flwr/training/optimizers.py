"""SGD, Adam and AdamW over groups of parameters, through torch's functional optimisers.

Bit-identical to ``torch.optim.SGD``, ``Adam`` and ``AdamW``. Those import torch's compiler in their first step: some
870 modules, three seconds of CPU time, which a device would pay at every message because each has a new process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

FUSED = ("cpu", "cuda")  # device types for which torch has fused optimiser kernels

State = dict[nn.Parameter, dict[str, Tensor]]


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that are updated together.

    Attributes:
        parameters: of one or more networks.
        learning_rate: η; None means the optimiser's.
        max_grad_norm: a bound on the gradient's norm besides the optimiser's; 0 is off.
    """

    parameters: tuple[nn.Parameter, ...]
    learning_rate: float | None = None
    max_grad_norm: float = 0.0


def param_group(
    module: nn.Module, learning_rate: float | None = None, max_grad_norm: float = 0.0
) -> ParamGroup:
    """Return all parameters of a module as one group."""
    return ParamGroup(tuple(module.parameters()), learning_rate, max_grad_norm)


@dataclass(eq=False)
class Optimizer(ABC):
    """An optimiser; parameters without a gradient are not updated.

    Attributes:
        groups: disjoint groups of parameters.
        learning_rate: η of the groups that have none of their own.
        weight_decay: of all groups.
        max_grad_norm: bound to which the norm of a group's gradient is clipped; 0 is off.
        state: parameter -> the optimiser's state under the names in ``state_names``, changed in place; parameters may
            be missing.
        fused: use torch's fused kernels, bit-identical to ``torch.optim`` with ``fused=True``; otherwise, and if a
            parameter is not dense, to its default on a CPU.
    """

    state_names: ClassVar[tuple[str, ...]]
    """Names of the tensors in a parameter's state."""

    groups: Sequence[ParamGroup]
    learning_rate: float
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    state: State = field(default_factory=dict)
    fused: bool = True

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, group by group."""
        return [parameter for group in self.groups for parameter in group.parameters]

    @cached_property
    def _dense(self) -> bool:
        return all(map(is_dense, self.parameters))

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients of each group and update its parameters."""
        for group in self.groups:
            rate = self.learning_rate if group.learning_rate is None else group.learning_rate
            bounds = [bound for bound in (self.max_grad_norm, group.max_grad_norm) if bound > 0]
            if bounds:
                nn.utils.clip_grad_norm_(group.parameters, min(bounds))
            updated = {p: p.grad for p in group.parameters if p.grad is not None}
            if updated:
                fused = self.fused and self._dense and next(iter(updated)).device.type in FUSED
                self._update(list(updated), list(updated.values()), rate, fused)

    @abstractmethod
    def _update(
        self, updated: list[nn.Parameter], gradients: list[Tensor], learning_rate: float, fused: bool
    ) -> None:
        """Update the given parameters of a group (at least one)."""


@dataclass(eq=False)
class SGD(Optimizer):
    """θ <- θ - η·b with b <- momentum·b + g + weight_decay·θ.

    Attributes:
        state: b under the name ``momentum``.
        momentum: 0 is plain SGD, without state.
    """

    state_names = ("momentum",)

    momentum: float = 0.0

    def _update(
        self, updated: list[nn.Parameter], gradients: list[Tensor], learning_rate: float, fused: bool
    ) -> None:
        if self.momentum:  # b starts at zero
            self.state.update({p: {"momentum": torch.zeros_like(p)} for p in updated if p not in self.state})
        sgd(
            list[Tensor](updated),
            gradients,
            [self.state[p]["momentum"] for p in updated] if self.momentum else [],
            fused=fused,
            foreach=False,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@dataclass(eq=False)
class Adam(Optimizer):
    """Adam with the usual β₁ = 0.9, β₂ = 0.999, ε = 1e-8.

    Attributes:
        weight_decay: weight_decay·θ is added to the gradient; if decoupled, η·weight_decay·θ is subtracted from θ.
        state: ``step`` (a scalar), ``exp_avg`` and ``exp_avg_sq``.
        decoupled: use AdamW.
    """

    state_names = ("step", "exp_avg", "exp_avg_sq")

    decoupled: bool = False

    def _update(
        self, updated: list[nn.Parameter], gradients: list[Tensor], learning_rate: float, fused: bool
    ) -> None:
        self.state.update({p: _init_state(p, fused) for p in updated if p not in self.state})
        states = [self.state[parameter] for parameter in updated]
        (adamw if self.decoupled else adam)(
            list[Tensor](updated),
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=not fused and any(parameter.is_cuda for parameter in updated),
            fused=fused,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
        )


def is_dense(parameter: Tensor) -> bool:
    """Whether a parameter fills its part of memory, in any order of its axes.

    One made of some columns of another tensor does not. Fused kernels for a CPU take every parameter for one that does
    and would add its gradients to the wrong elements.
    """
    stride_if_dense = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != stride_if_dense:
            return False
        stride_if_dense *= size
    return True


def _init_state(parameter: Tensor, fused: bool) -> dict[str, Tensor]:
    """Return the initial state. The fused kernel on a GPU needs ``step`` on the GPU."""
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=parameter.device if fused else "cpu"), **moments}
