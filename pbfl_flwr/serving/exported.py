"""Read an exported model.

The network is rebuilt from ``model.safetensors`` and the name of its architecture. ``model.pt2`` is for other programs
and never read here: loading it may unpickle, which can execute arbitrary code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Nearest
from pbfl_flwr.payloads import part_of
from pbfl_flwr.runs.saved_model import Card, fault
from pbfl_flwr.runs.tensor_files import LARGEST_FILE
from pbfl_flwr.serving.export import CARD, FORMAT, PROTOTYPES, WEIGHTS
from pbfl_flwr.serving.network import Served, rebuild
from pbfl_flwr.util.atomic_files import read_regular

HEAD = "head"
MAX_CARD_BYTES = 2**26
BATCH = 256


@dataclass(frozen=True)
class Exported:
    """An exported model, ready for prediction.

    Attributes:
        card: its description.
        served: the network.
        prototypes: predictor -> (rows (K, d), candidates (K,)).
    """

    card: Card
    served: Served
    prototypes: Mapping[str, tuple[Tensor, Tensor]]

    @torch.inference_mode()
    def probabilities(self, inputs: NDArray[Any], by: str = HEAD) -> Tensor:
        """Return the probability of every class, (N, K).

        Args:
            inputs: (N, *input_shape) as stored: images 0 to 255, token ids and other numbers as they are.
            by: ``head``, the softmax of the logits, or a predictor that has prototypes: the softmax of negative squared
                distances to them; a class without a prototype has probability 0.

        Raises:
            PbflError: if there is no such predictor, or the outputs are not finite.
        """
        if by != HEAD and by not in self.prototypes:
            raise PbflError(f"--by {by}: this model has {', '.join([HEAD, *self.prototypes])}")
        predictor = Nearest(*self.prototypes[by]) if by != HEAD else None
        batches, dtype = [], np.int64 if self.card.vocabulary_size else np.float32
        for start in range(0, len(inputs), BATCH):
            batch = torch.from_numpy(np.ascontiguousarray(inputs[start : start + BATCH], dtype=dtype))
            logits, features = self.served(batch)
            batches.append(
                (logits if predictor is None else predictor(features, logits)).double().softmax(dim=1)
            )
        table = torch.cat(batches) if batches else torch.empty(0, self.card.num_classes)
        if not bool(torch.isfinite(table).all()):
            raise PbflError("the model's outputs are not finite for these inputs")
        return table


def open_exported(directory: Path, allowed_code: frozenset[str] = frozenset()) -> Exported:
    """Load an exported model.

    Args:
        directory: see :mod:`pbfl_flwr.serving.export`.
        allowed_code: see :func:`pbfl_flwr.serving.network.rebuild`.

    Raises:
        PbflError: if something is missing, damaged or inconsistent.
    """
    card, hashes = _card(directory / CARD)
    served = rebuild(card, _tensors(directory / WEIGHTS, hashes), allowed_code, str(directory))
    tables = _tensors(directory / PROTOTYPES, hashes) if PROTOTYPES in hashes else {}
    prototypes = {}
    for name in sorted({key.rpartition(".")[0] for key in tables}):
        part = part_of(tables, name)
        rows, candidates = part.get("rows", torch.empty(0)), part.get("candidates", torch.empty(0))
        expected = (card.num_classes, card.feature_dim)
        fits = tuple(rows.shape) == expected and candidates.shape == expected[:1]
        if not fits or candidates.dtype is not torch.bool or not bool(torch.isfinite(rows).all()):
            raise PbflError(
                f"{directory / PROTOTYPES}: the prototypes '{name}' are not finite numbers of shape {expected}"
            )
        prototypes[name] = rows, candidates
    return Exported(card, served, prototypes)


def _card(path: Path) -> tuple[Card, dict[str, str]]:
    try:
        content = json.loads(read_regular(path, MAX_CARD_BYTES, linked=True))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT}")
        card = Card.model_validate_json(json.dumps(content["card"]))
        return card, {str(name): str(value) for name, value in content["sha256"].items()}
    except FileNotFoundError:
        raise PbflError(f"{path.parent} is not an exported model: it has no {CARD}") from None
    except ValidationError as error:
        raise PbflError(f"{path}: {fault(error)}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PbflError(f"{path} cannot be read ({error})") from None


def _tensors(path: Path, hashes: Mapping[str, str]) -> dict[str, Tensor]:
    try:
        data = read_regular(path, LARGEST_FILE, linked=True)
        if hashlib.sha256(data).hexdigest() != hashes.get(path.name):
            raise ValueError(f"its sha256 is not the one in {CARD}")
        return load(data)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise PbflError(f"{path} cannot be read ({error})") from None
