"""Data of a user's function, ``dataset=my_package.module:load``; docs/examples has synthetic.py."""

from pathlib import Path

import numpy as np
import pytest

from pbfl_flwr.config import Scalar, changed, parse
from pbfl_flwr.data import Pool, client_data, load_pool
from pbfl_flwr.errors import PbflError
from tests.small_runs import pbfl

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_data.py").write_text(
        "import random\n"
        "import numpy as np\n"
        "import torch\n"
        "X = np.arange(8.0).reshape(4, 2)\n"
        "def named(settings): return {'x': X, 'y': ['dog', 'cat', 'cat', 'dog'], 'client': ['b', 'a', 'b', 'b']}\n"
        "def tensors(settings):\n"
        "    return {'x': torch.tensor(X), 'y': torch.tensor([0, 2, 2, 0]), 'classes': ['a', 'b', 'c']}\n"
        "def stored(settings): return {**tensors(settings), 'classes': np.array([b'c', b'k\\xc3\\xa4', b'b'])}\n"
        "def noisy(settings):\n"
        "    return {'x': np.random.rand(4, 2) + random.random() + torch.rand(1).item(), 'y': [0, 1, 0, 1]}\n"
        "def nothing(settings): return None\n"
        "def pair(settings): return X, [0, 1, 0, 1]\n"
        "def unlabelled(settings): return {'x': X}\n"
        "def more(settings): return {'x': X, 'y': [0, 1, 0, 1], 'z': X}\n"
        "def ragged(settings): return {'x': [[1, 2], [3]], 'y': [0, 1]}\n"
        "def short(settings): return {'x': X, 'y': [0, 1, 0]}\n"
        "def fractions(settings): return {'x': X, 'y': [0.5, 1, 0, 1]}\n"
        "def infinite(settings): return {'x': X + np.inf, 'y': [0, 1, 0, 1]}\n"
        "def outside(settings): return {'x': X, 'y': [0, 1, 2, 1], 'classes': ['a', 'b']}\n"
        "def alike(settings): return {'x': X, 'y': [0, 1, 1, 1], 'classes': ['a', 'a ']}\n"
        "def unnamed(settings): return {**tensors(settings), 'classes': ['a', '', 'c']}\n"
        "def raises(settings): return settings.colours\n"
    )


def of(name: str, **keys: Scalar) -> Pool:
    return load_pool(parse({"dataset": name, **keys}).data)


def test_names_and_natural_clients() -> None:
    pool = of("own_data:named")
    assert pool.inputs.dtype == np.float32
    assert (pool.label_names, pool.labels.tolist()) == (("cat", "dog"), [1, 0, 0, 1])
    assert pool.owner is not None
    assert pool.owner.tolist() == [1, 0, 1, 1]
    assert of("own_data:named", labels="emu,dog,cat").labels.tolist() == [1, 2, 2, 1]


def test_tensors_and_names_of_the_numbers() -> None:
    pool = of("own_data:tensors")
    assert pool.inputs.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (pool.label_names, pool.labels.tolist()) == (("a", "b", "c"), [0, 2, 2, 0])
    assert of("own_data:stored").label_names == ("c", "k\u00e4", "b")


def test_its_randomness_comes_from_the_seed_of_the_partition_alone() -> None:
    first = of("own_data:noisy")
    np.random.seed(5)
    assert np.array_equal(of("own_data:noisy").inputs, first.inputs)
    assert not np.array_equal(of("own_data:noisy", **{"partition-seed": 2}).inputs, first.inputs)


def test_the_example_is_dealt_to_its_clients() -> None:
    settings = parse({"dataset": "synthetic:load", "partition": "natural"}).data
    pool = load_pool(settings)
    assert (pool.input_shape, pool.num_classes) == ((60,), 10)
    assert pool.owner is not None
    sizes = np.bincount(pool.owner)
    assert (len(sizes), sizes.min() >= 50) == (30, True)
    third = client_data(settings, 30, 3)
    assert len(third.train) + len(third.test) == sizes[3]
    variances = pool.inputs[pool.owner == sizes.argmax()].var(axis=0)  # j^-1.2
    assert np.allclose(variances, np.arange(1, 61) ** -1.2, rtol=0.2)


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{EXAMPLES}:{Path.cwd()}")
    keys = {
        "dataset": "synthetic:load",
        "partition": "natural",
        "num-clients": 3,
        "models": "mlp-8",
        "feature-dim": 8,
    }
    sets = [
        word
        for key, value in {**keys, "num-server-rounds": 1}.items()
        for word in ("--set", f"{key}={value}")
    ]
    done = pbfl("run", *sets, "--run-dir", str(tmp_path / "run"), "--workers", "1")
    assert done.exit_code == 0, done.output
    assert "fedproto on synthetic:load, natural, 3 clients" in done.output


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_date:named", "cannot import 'own_date' .*PYTHONPATH"),
        ("own_data:none", "'own_data' has no function 'none'"),
        ("own_data:nothing", "the function returned NoneType; must be a dict of the arrays x, y"),
        ("own_data:pair", "the function returned tuple; must be a dict"),
        ("own_data:unlabelled", "the function returned a dict of x; must be a dict"),
        ("own_data:more", "the function returned a dict of x, y, z; must be a dict"),
        ("own_data:ragged", "the function returned what is no array .*; must be a dict"),
        ("own_data:short", "own_data:short' has 4 inputs and 3 labels"),
        ("own_data:fractions", r"the result of own_data:fractions: y\[0\]: 0.5 is not a whole number"),
        (
            "own_data:infinite",
            r"own_data:infinite' holds NaN, infinity or a number beyond float32 \(3.4e38\), first in row 0",
        ),
        ("own_data:outside", "the result of own_data:outside: y has the label 2; must be 0..1"),
        ("own_data:alike", r"classes are \['a', 'a'\]; must be 2 to 10000 different names"),
        ("own_data:unnamed", r"classes\[1\]: the cell is empty; a class is expected"),
        ("own_data:raises", r"raises\(settings\) raised AttributeError: .*'colours' \(own_data.py:22\)"),
    ],
)
def test_nonsense_is_refused_in_a_line(name: str, says: str) -> None:
    with pytest.raises(PbflError, match=says) as error:
        of(name)
    assert "\n" not in str(error.value)


def test_settings_of_another_machine_name_no_code() -> None:
    foreign = parse({"dataset": "own_data:named"}).allowing(())
    for settings in (
        foreign,
        changed(foreign, {"seed": 1}),
        type(foreign).model_validate_json(foreign.model_dump_json()),
    ):
        with pytest.raises(PbflError, match="dataset = 'own_data:named' names code to import"):
            load_pool(settings.data)
    assert len(load_pool(foreign.allowing(["own_data:named"]).data).labels) == 4
