"""A network's body through torch.compile: each stage and the neck in place, so that names and weights stay.

The head stays as it is: methods read and replace it. A copy of a network is not compiled. What is computed is the same
up to the order of floating-point sums. ``reduce-overhead`` records CUDA graphs, one for every shape of a batch; on a
CPU it is ``default``.
"""

from __future__ import annotations

import inspect
import os
import shutil
from typing import Literal

import torch
from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel

Mode = Literal["off", "default", "reduce-overhead", "cuda-graph"]


def check_compiler(mode: Mode, device: torch.device) -> None:
    """Look for what the mode will need.

    Raises:
        PbflError: if this torch would let all networks of a process share eight compilations, if there is no C++
            compiler for the CPU, or no GPU for a CUDA graph.
    """
    if mode == "cuda-graph" and device.type != "cuda":
        raise PbflError(
            f"compile = 'cuda-graph' records what a GPU does and this client has device '{device}'; "
            "allowed here are 'off' and 'default'"
        )
    if mode in ("off", "cuda-graph"):
        return
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        raise PbflError(
            f"compile = '{mode}': torch {torch.__version__} has no isolate_recompiles; allowed here is 'off'"
        )
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise PbflError(f"compile = '{mode}': no C++ compiler '{compiler}' was found; install it or set CXX")
    if device.type == "cuda" and "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        raise PbflError(
            f"compile = '{mode}': no C compiler was found, with which Triton starts its kernels; install gcc or set CC"
        )


def begin_batch(mode: Mode, device: torch.device) -> None:
    """Say that nothing of the batch before is read any more, where recordings write their results over the last ones.

    By itself torch takes every compiled part's call for a new batch unless a backward pass is to come: in evaluation,
    and behind a frozen body, the second part would find its input gone.
    """
    if mode == "reduce-overhead" and device.type == "cuda":
        torch.compiler.cudagraph_mark_step_begin()


def compile_body(model: nn.Module, mode: Mode) -> None:
    """Have a network's body compiled when it is first used; of somebody else's model the layers beside the head."""
    if mode in ("off", "cuda-graph"):
        return
    if isinstance(model, SplitModel):
        parts = [*model.stages, model.neck]
    else:
        parts = [child for name, child in model.named_children() if name != "head"]
    begin_batch(mode, next(model.parameters()).device)  # from now on nothing else begins one
    for part in parts:
        part.compile(mode=None if mode == "default" else mode, isolate_recompiles=True)
