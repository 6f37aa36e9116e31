"""Seeds are functions of their parts and leave global random states alone."""

import random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from pbfl_flwr.seeds import derive, generator, seed_code, seeded


def test_seed_is_a_function_of_its_parts() -> None:
    assert derive(0, "batches", 3, 1) == derive(0, "batches", 3, 1)
    parts = [
        (0, "a", 1, 11),
        (0, "a", 11, 1),
        (0, "a", 111),
        (0, "a1", 11),
        (1, "a", 1, 11),
        (0, "a", "1", 11),
    ]
    assert len({derive(*part) for part in parts}) == len(parts)
    assert 0 <= derive(2**62, "x") < 2**63


def test_accepts_integers_of_numpy_and_rejects_floats() -> None:
    three: Any = np.array(3)[()]
    half: Any = np.array(0.5)[()]
    assert derive(three, "x") == derive(3, "x")
    with pytest.raises(TypeError):
        derive(half, "x")


def test_generators_leave_the_global_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = torch.rand(3, generator=generator(1, "x"))
    assert torch.equal(first, torch.rand(3, generator=generator(1, "x")))
    assert torch.equal(before, torch.get_rng_state())


def test_seeded_restores_the_global_state_and_leaves_cards_alone() -> None:
    before = torch.get_rng_state()
    with patch("torch.cuda.manual_seed_all") as seed_cards:
        with seeded(5):
            first = torch.rand(3)
        with pytest.raises(ValueError, match="built wrongly"), seeded(6):
            raise ValueError("built wrongly")
    seed_cards.assert_not_called()
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(before, torch.get_rng_state())


def test_all_generators_are_seeded_and_restored() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), float(torch.rand(1))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    undisturbed = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with seeded(derive(5, "x")):
        first = draws()
    assert draws() == undisturbed
    with pytest.raises(ValueError, match="of a mod"), seeded(derive(5, "x")):
        raise ValueError(f"of a mod, {draws()}")
    with seeded(derive(5, "x")):
        assert draws() == first
    with seeded(derive(5, "y")):
        assert not set(draws()) & set(first)


def test_seed_code_is_torch_manual_seed() -> None:
    torch.manual_seed(derive(1, "layers", 4))
    expected = torch.rand(5)
    seed_code(torch.device("cpu"), 1, "layers", 4)
    assert torch.equal(torch.rand(5), expected)
    with patch("torch.cuda.manual_seed_all") as cards:
        seed_code(torch.device("cpu"), 1, "layers", 4)
        assert not cards.called
        seed_code(torch.device("cuda"), 1, "layers", 4)
        cards.assert_called_once_with(derive(1, "layers", 4))
