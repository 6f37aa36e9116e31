"""The precision in which a network's body computes its products."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def set_precision(model: ModuleT, precision: str) -> ModuleT:
    """Set the precision of a network in place and return it.

    Args:
        model: for ``bfloat16`` a :class:`SplitModel`, where body and head are separate.
        precision: ``bfloat16`` computes the body's products in it (torch's autocast); parameters, features and head
            stay float32. ``float32`` leaves the network as built.

    Raises:
        PbflError: if ``bfloat16`` is requested for another network.
    """
    if precision == "bfloat16":
        if not isinstance(model, SplitModel):
            raise PbflError(
                f"precision = 'bfloat16': {type(model).__name__} is not a pbfl_flwr.models.contract.SplitModel; "
                "allowed for it is 'float32'"
            )
        model.reduced = torch.bfloat16
    return model
