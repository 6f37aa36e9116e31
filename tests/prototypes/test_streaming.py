"""A sum over uploads reads every upload once."""

from collections.abc import Iterator, Mapping

import pytest

from pbfl_flwr.config import parse
from pbfl_flwr.method import Round
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.task import Task
from tests.prototypes.tables import upload

TASK = Task(num_classes=3, feature_dim=2, input_shape=(2,))


SENT = {
    1: upload({0: [1.0, 2.0], 1: [5.0, 5.0]}, [1, 7, 0], 8, 3),
    5: upload({0: [4.0, 8.0], 2: [-1.0, 0.0]}, [2, 0, 3], 5, 3),
}


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
    uploads = ReadOnce(SENT)
    state = method.aggregate(method.init(TASK, 0), uploads, Round(1, TASK, 2, 0))
    assert state.broadcast.num_present == 3
    assert uploads.reads == 2 or not method.streams()
    assert method.streams() == (
        keys.get("method") != "fedtgp" and keys["aggregation"] not in ("median", "trimmed-mean")
    )
