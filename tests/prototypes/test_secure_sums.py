"""Tables as vectors that can be summed under masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pbfl_flwr.payloads import Prototypes, RejectedPayload
from pbfl_flwr.prototypes import secure_sums as sums


def test_table_survives_its_vector() -> None:
    values = torch.tensor([[1.0, -2.0], [0.0, 0.0], [300.0, 4.0]])
    upload = Prototypes(values, torch.tensor([True, False, True]), None, 12)
    vector, clipped = sums.to_vector(upload, 100.0)
    assert clipped == 1
    assert len(vector) == 3 * 2 + 3 + 1
    total = sums.from_vector(2 * vector, 3, 2, 100.0)
    assert total.rows.tolist() == [[2.0, -4.0], [0.0, 0.0], [200.0, 8.0]]
    assert total.holders.tolist() == [2, 0, 2]
    assert total.num_examples == 24
    vector, clipped = sums.to_vector(replace(upload, num_examples=sums.MOST_SAMPLES + 1), 300.0)
    assert clipped == 1
    assert sums.from_vector(vector, 3, 1, 300.0).num_examples == sums.MOST_SAMPLES


def test_rejects_a_vector_that_is_no_sum() -> None:
    with pytest.raises(RejectedPayload, match="not a table of 3 classes"):
        sums.from_vector(np.zeros(9), 3, 2, 100.0)
    with pytest.raises(RejectedPayload, match="the masks did not cancel"):
        sums.from_vector(np.full(10, 37.0), 3, 2, 100.0)


@pytest.mark.parametrize(("clients", "bits"), [(2, 30), (3, 29), (4, 29), (5, 28), (20, 26), (1000, 21)])
def test_sum_fits_into_31_bits(clients: int, bits: int) -> None:
    assert sums.bits(clients) == bits
    assert clients * 2**bits <= 2**31
