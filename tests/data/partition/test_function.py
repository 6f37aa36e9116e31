"""Partitions by a user's function, ``partition=my_package.module:split``; docs/examples has quantity.py."""

from pathlib import Path

import numpy as np
import pytest

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.data import Partition, check_data, client_data, load_pool
from pbfl_flwr.errors import PbflError

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_split.py").write_text(
        "import random\n"
        "import numpy as np\n"
        "import torch\n"
        "number = 3\n"
        "def thirds(labels, M, draw): return [range(i, 9, M) for i in range(M)]\n"
        "def noisy(labels, M, draw):\n"
        "    first = random.randrange(500) + np.random.randint(500) + int(torch.randint(500, ()))\n"
        "    return [[first + i] for i in range(M)]\n"
        "def spoils(labels, M, draw): labels[:] = 0; return thirds(labels, M, draw)\n"
        "def nothing(labels, M, draw): return None\n"
        "def few(labels, M, draw): return [[0], [1]]\n"
        "def fractions(labels, M, draw): return [[0.5]] * M\n"
        "def masks(labels, M, draw): return [labels == i for i in range(M)]\n"
        "def ragged(labels, M, draw): return [[[1, 2], [3]]] * M\n"
        "def outside(labels, M, draw): return [[i, 1797] for i in range(M)]\n"
        "def negative(labels, M, draw): return [[i, -1 - i] for i in range(M)]\n"
        "def shared(labels, M, draw): return [[i, 7] for i in range(M)]\n"
        "def twice(labels, M, draw): return [[i, i] for i in range(M)]\n"
        "def empty(labels, M, draw): return [[0, 1], [2], []]\n"
        "def raises(labels, M, draw): return labels.colours\n"
        "def takes_one(labels): return None\n"
    )


def dealt(name: str, clients: int = 3, **keys: Scalar) -> Partition:
    return check_data(parse({"partition": name, **keys}).data, clients)


def rows_of(partition: Partition) -> list[list[int]]:
    return [sorted([*split.train.tolist(), *split.test.tolist()]) for split in partition.splits]


def test_every_client_has_the_samples_that_the_function_gave_it() -> None:
    partition = dealt("own_split:thirds")
    assert rows_of(partition) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert partition.notes == ("1,788 of 1,797 samples go to no client",)
    assert partition.counts.sum() == 9
    settings = parse({"partition": "own_split:thirds", "train-share": 0.5}).data
    data = client_data(settings, 3, 1)
    labels = load_pool(settings).labels
    assert sorted([*data.train.labels.tolist(), *data.test.labels.tolist()]) == sorted(
        labels[[1, 4, 7]].tolist()
    )


def test_the_example_deals_numbers_of_samples() -> None:
    """The shares of 0.5 to 5 clients' part, and each client's classes in proportion."""
    partition = dealt("quantity:split", 10)
    sizes = partition.counts.sum(axis=1)
    assert (sizes.sum(), sizes.min() >= 10, sizes.max() > 2 * 180) == (1797, True, True)
    assert sorted(row for rows in rows_of(partition) for row in rows) == [*range(1797)]
    largest = partition.counts[sizes.argmax()] / sizes.max()
    assert abs(largest - 0.1).max() < 0.05
    assert rows_of(dealt("quantity:split", 10)) == rows_of(partition)
    assert rows_of(dealt("quantity:split", 10, **{"partition-seed": 2})) != rows_of(partition)


def test_its_randomness_comes_from_the_seed_of_the_partition_alone() -> None:
    first = rows_of(dealt("own_split:noisy"))
    np.random.seed(5)
    assert rows_of(dealt("own_split:noisy")) == first
    assert rows_of(dealt("own_split:noisy", **{"partition-seed": 2})) != first


def test_the_labels_are_its_own_copy() -> None:
    assert (dealt("own_split:spoils").counts == dealt("own_split:thirds").counts).all()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_splits:thirds", "cannot import 'own_splits' .*PYTHONPATH"),
        ("own_split:number", "'own_split' has no function 'number'"),
        ("own_split:nothing", "the function returned NoneType, expected 3 lists or arrays of indices"),
        ("own_split:few", "the function returned list of length 2, expected 3 lists or arrays"),
        (
            "own_split:fractions",
            r"the function returned list of length 3 with float64 \(\d+,\) for client 0, expected 3 lists or arrays",
        ),
        (
            "own_split:masks",
            r"list of length 3 with bool \(1797,\) for client 0, expected 3 lists or arrays of indices, whole numbers",
        ),
        ("own_split:ragged", "the function returned list of length 3, expected 3 lists or arrays of indices"),
        ("own_split:outside", "it deals the index 1797; must be 0..1796"),
        ("own_split:negative", "it deals the index -1; must be 0..1796"),
        ("own_split:shared", "it deals the index 7 3 times, to client 0, 1, 2; must be once at most"),
        ("own_split:twice", "it deals the index 0 2 times, to client 0; must be once at most"),
        ("own_split:empty", "client 2 gets 0 samples; must be min-samples = 1 or more"),
        ("own_split:raises", r"generator\) raised AttributeError: .*'colours' \(own_split.py:20\)"),
        ("own_split:takes_one", r"raised TypeError: .*\(own_split.py:21\)"),
    ],
)
def test_nonsense_is_refused_in_a_line(name: str, says: str) -> None:
    with pytest.raises(PbflError, match=f"^partition = '{name}': .*{says}") as error:
        dealt(name)
    assert "\n" not in str(error.value)


def test_a_name_that_is_no_partition_is_refused() -> None:
    for name in ("random", "", "a:", 3):
        with pytest.raises(PbflError, match=r"^partition = .*: must be 'dirichlet', "):
            parse({"partition": name})


def test_settings_of_another_machine_name_no_code() -> None:
    with pytest.raises(PbflError, match="partition = 'own_split:thirds' names code to import"):
        check_data(parse({"partition": "own_split:thirds"}).allowing(()).data, 3)
