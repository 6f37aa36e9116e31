"""Seeds depend on what they are for, and on nothing else."""

import numpy as np
import pytest
import torch

from pbfl_flwr.seeds import derive, generator


def test_a_seed_is_a_function_of_its_parts() -> None:
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


def test_numbers_of_numpy_are_numbers() -> None:
    three, half = np.array(3)[()], np.array(0.5)[()]
    assert derive(three, "x") == derive(3, "x")
    with pytest.raises(TypeError):
        derive(half, "x")


def test_generators_are_their_own() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = torch.rand(3, generator=generator(1, "x"))
    assert torch.equal(first, torch.rand(3, generator=generator(1, "x")))
    assert torch.equal(before, torch.get_rng_state())
