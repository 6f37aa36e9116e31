"""Compile a network's body with torch.compile: each stage and the neck in place, which keeps names and weights.

The head is not compiled: methods read and replace it. Nor are copies of a network. Results are equal up to the order of
floating-point sums. ``reduce-overhead`` records CUDA graphs, one for every batch shape; on a CPU it equals
``default``.
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
    """Check the requirements of a compilation mode.

    Raises:
        PbflError: if this torch would limit all networks of a process to eight compilations in total, if there is no
            C++ compiler for the CPU or C compiler for the GPU, or no GPU for a CUDA graph.
    """
    if mode == "cuda-graph" and device.type != "cuda":
        raise PbflError(
            f"compile = 'cuda-graph' needs a GPU, and this client has device '{device}'; allowed here are 'off' and "
            "'default'"
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
            f"compile = '{mode}': no C compiler was found, which Triton needs to launch its kernels; install "
            "gcc or set CC"
        )


def begin_batch(mode: Mode, device: torch.device) -> None:
    """Mark the start of a batch: results of the previous one may be overwritten by recorded CUDA graphs.

    By default torch takes every call of a compiled part for a new batch unless a backward pass is pending: in
    evaluation, and after a frozen body, the second part's input would be overwritten.
    """
    if mode == "reduce-overhead" and device.type == "cuda":
        torch.compiler.cudagraph_mark_step_begin()


def compile_body(model: nn.Module, mode: Mode) -> None:
    """Compile a network's body on first use; of an external model, the layers other than the head."""
    if mode in ("off", "cuda-graph"):
        return
    if isinstance(model, SplitModel):
        parts = [*model.stages, model.neck]
    else:
        parts = [child for name, child in model.named_children() if name != "head"]
    begin_batch(mode, next(model.parameters()).device)  # from now on only this function marks batches
    for part in parts:
        part.compile(mode=None if mode == "default" else mode, isolate_recompiles=True)
