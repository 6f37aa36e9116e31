"""Shares: an upload that came too late counts for less; and a sum reads every upload once."""

from collections.abc import Iterator, Mapping

import pytest
import torch

from pbfl_flwr.config import parse
from pbfl_flwr.method import Round
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.methods.averaging import average
from pbfl_flwr.payloads import Prototypes, Weights
from pbfl_flwr.prototypes import aggregation
from pbfl_flwr.task import Task
from tests.prototypes.tables import upload

TASK = Task(num_classes=3, feature_dim=2, input_shape=(2,))


# Class 0: both, class 1: the one in time, class 2: the late one, with s = 1/2.
IN_TIME = upload({0: [1.0, 2.0], 1: [5.0, 5.0]}, [1, 7, 0], 8, 3)
LATE = upload({0: [4.0, 8.0], 2: [-1.0, 0.0]}, [2, 0, 3], 5, 3)
BOTH, SHARES = [IN_TIME, LATE], [1.0, 0.5]


def test_a_late_upload_counts_for_its_share() -> None:
    # mean of class 0: (1·1 + 0.5·4)/1.5 = 2; a class that only the late client holds keeps its value
    assert aggregation.mean(BOTH, SHARES).values.tolist() == [[2, 4], [5, 5], [-1, 0]]
    # by counts: weights 1·1 and 0.5·2: (1 + 4)/2 = 2.5
    assert aggregation.weighted(BOTH, SHARES).values.tolist() == [[2.5, 5], [5, 5], [-1, 0]]
    # the printed equation divides once more by |N_j| = 2, 1, 1
    assert aggregation.weighted_shrunk(BOTH, SHARES).values.tolist() == [[1.25, 2.5], [5, 5], [-1, 0]]
    # PPA: K/n with n = 8 + 0.5·5 = 10.5; class 0: 1 + 0.5·4 = 3
    expected = torch.tensor([[3.0, 6.0], [5.0, 5.0], [-0.5, 0.0]]) * 3 / 10.5
    torch.testing.assert_close(aggregation.ppa(BOTH, 3, None, SHARES).values, expected)
    # APS: sums 3, 5, -0.5; means over Σs: 3/1.5, 5/1, -0.5/0.5
    sums = aggregation.aps(BOTH, 2.0, "sum", SHARES)
    assert sums.values[:, 0].tolist() == [6, 10, -1]
    assert sums.num_examples == 10  # round(10.5), to the even one
    assert aggregation.aps(BOTH, 2.0, "mean", SHARES).values[:, 0].tolist() == [4, 10, -2]


def test_average_counts_late_weights_for_their_share() -> None:
    state = Weights({"w": torch.zeros(2)})
    uploads = {0: Weights({"w": torch.tensor([1.0, 0.0])}, 3), 4: Weights({"w": torch.tensor([4.0, 8.0])}, 2)}
    # by samples: weights 3 and 0.5·2: (3 + 4)/4, 8/4; uniform: 1 and 0.5: (1 + 2)/1.5, 4/1.5
    assert average(state, uploads, "samples", {4: 0.5}).tensors["w"].tolist() == [1.75, 2.0]
    torch.testing.assert_close(
        average(state, uploads, "uniform", {4: 0.5}).tensors["w"], torch.tensor([2.0, 8 / 3])
    )


class ReadOnce(Mapping[int, Prototypes]):
    """Uploads that count how often each is asked for."""

    def __init__(self, uploads: dict[int, Prototypes]) -> None:
        self.uploads = uploads
        self.reads = 0

    def __getitem__(self, client: int) -> Prototypes:
        self.reads += 1
        return self.uploads[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self.uploads)

    def __len__(self) -> int:
        return len(self.uploads)


@pytest.mark.parametrize(
    "keys",
    [
        {"aggregation": "mean"},
        {"aggregation": "weighted"},
        {"aggregation": "weighted-shrunk"},
        {"aggregation": "ppa"},
        {"aggregation": "ppa", "total-examples": 26},
        {"aggregation": "aps-sum"},
        {"aggregation": "aps-mean", "aps-scale": 0.5},
        {"aggregation": "median"},
        {"aggregation": "trimmed-mean"},
        {"method": "fedtgp"},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_a_method_that_streams_reads_every_upload_once(keys: dict[str, str]) -> None:
    method = build_method(parse({"feature-dim": 2, "num-clients": 2, "cps-dim": 0, **keys}, SECTIONS))
    uploads = ReadOnce({1: IN_TIME, 5: LATE})
    round_info = Round(1, TASK, 2, 0, {5: 0.5} if method.streams() else {})
    state = method.aggregate(method.init(TASK, 0), uploads, round_info)
    assert state.broadcast.num_present == 3
    assert uploads.reads == 2 or not method.streams()
    assert method.streams() == (
        keys.get("method") != "fedtgp" and keys["aggregation"] not in ("median", "trimmed-mean")
    )
