"""Rules of a user's, ``aggregation=my_package.module:rule``; docs/examples has geometric_median.py."""

from pathlib import Path

import pytest
import torch

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.plan.configuration import RequestedKeys, check
from pbfl_flwr.method import Round
from pbfl_flwr.methods import build_method
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.task import Task
from tests.flower.inprocess import copies, federation, same_tensors

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TASK = Task(2, 2, (1, 16, 16))
CORNERS = (
    [0.0, 0.0],
    [6.0, 0.0],
    [0.0, 6.0],
    [1.0, 1.0],
)  # class 0 of clients 0, 1, 2; class 1 of client 2 alone


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rules.py").write_text(
        "import random\n"
        "import numpy as np\n"
        "import torch\n"
        "from dataclasses import replace\n"
        "from pbfl_flwr.payloads import Prototypes\n"
        "from pbfl_flwr.prototypes.rules import RULES, Rule\n"
        "number = 3\n"
        "def mean(rows): return rows.mean(0)\n"
        "def numpys(rows): return rows.numpy().mean(0)\n"
        "def whole(rows): return rows\n"
        "def nothing(rows): return None\n"
        "def infinite(rows): return rows[0] / 0\n"
        "def raises(rows): return rows.colours\n"
        "def noisy(rows): return rows[0] + torch.rand(1) + random.random() + np.random.rand()\n"
        "counted = RULES['weighted']\n"
        "bare = Rule('', lambda uploads, round, stages: uploads[0].values)\n"
        "narrow = Rule('', lambda uploads, round, stages: replace(uploads[0], values=uploads[0].values[:, :1]))\n"
        "wrong = Rule('', lambda uploads, round, stages: uploads['a'])\n"
        "silent = Rule('', wrong.combine, sends='counts')\n"
    )


def combined(name: str, **keys: Scalar) -> torch.Tensor:
    """The broadcast (K, d) after a round in which three clients sent CORNERS."""
    config: dict[str, Scalar] = {"aggregation": name, "models": "cnn4", "feature-dim": 2, **keys}
    method = build_method(check(RequestedKeys(config)))
    assert isinstance(method, Pipeline)
    rows = torch.tensor(CORNERS)
    counts = torch.tensor([2, 2]) if method.stages.rule.counts else None
    one = torch.tensor([True, False])
    uploads = {
        client: Prototypes(torch.stack([rows[client], 0 * rows[0]]), one, counts) for client in range(2)
    }
    uploads[2] = Prototypes(rows[2:], torch.tensor([True, True]), counts)
    before = method.init(TASK, 0)
    return method.aggregate(before, uploads, Round(1, TASK, 3)).broadcast.values


def test_the_geometric_median_by_hand() -> None:
    """The point that sees the sides of a triangle with a right angle and equal legs of 6 under 120 degrees."""
    rows = combined("geometric_median:rule")
    fermat = 3 - 3**0.5
    torch.testing.assert_close(rows, torch.tensor([[fermat, fermat], [1.0, 1.0]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["own_rules:mean", "own_rules:numpys"])
def test_a_function_of_the_rows_gives_what_the_rule_of_the_package_gives(name: str) -> None:
    assert torch.equal(combined(name), combined("mean"))


def test_a_rule_says_what_clients_send() -> None:
    assert torch.equal(combined("own_rules:counted"), combined("weighted"))


def test_its_randomness_comes_from_the_run_and_the_round_alone() -> None:
    torch.manual_seed(1)
    first = combined("own_rules:noisy")
    torch.manual_seed(2)
    assert torch.equal(combined("own_rules:noisy"), first)


def test_a_run_with_a_rule_of_ones_own(tmp_path: Path) -> None:
    own = federation(tmp_path / "own", "fedproto", aggregation="own_rules:mean").run()
    built_in = federation(tmp_path / "built_in", "fedproto", aggregation="mean").run()
    assert [line.failures for line in own.strategy.history] == [[], []]
    assert same_tensors(copies(own.strategy.state), copies(built_in.strategy.state))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_rulez:mean", "cannot import 'own_rulez' .*PYTHONPATH"),
        ("own_rules:men", "'own_rules' has no function 'men'"),
        ("own_rules:number", "'own_rules' has no function 'number'"),
        (
            "own_rules:whole",
            r"for rows \(3, 2\) the function returned Tensor \(3, 2\), expected .* shape \(2,\), one",
        ),
        ("own_rules:nothing", "the function returned NoneType, expected finite numbers"),
        (
            "own_rules:infinite",
            r"the function returned Tensor with NaN or infinity \(2,\), expected finite numbers",
        ),
        ("own_rules:raises", r"raises\(rows\) raised AttributeError: .*'colours' \(own_rules.py:13\)"),
        (
            "own_rules:bare",
            r"combine returned Tensor \(2, 2\), expected Prototypes of finite values \(2, 2\)",
        ),
        (
            "own_rules:narrow",
            r"combine returned Prototypes of values Tensor \(2, 1\) and present Tensor \(2,\), expected Prototypes of "
            r"finite values \(2, 2\) and booleans present \(2,\)",
        ),
        ("own_rules:silent", "sends = 'counts': must be one of means, means and counts, sums"),
        ("own_rules:wrong", r"wrong\(uploads, round, stages\) raised KeyError: 'a' \(own_rules.py:18\)"),
    ],
)
def test_nonsense_is_refused_in_a_line(name: str, says: str) -> None:
    with pytest.raises(PbflError, match=f"^aggregation = '{name}': .*{says}") as error:
        combined(name)
    assert "\n" not in str(error.value)


def test_what_a_rule_is_not_for_is_refused() -> None:
    with pytest.raises(PbflError, match="fedtgp trains its prototypes on every upload"):
        combined("geometric_median:rule", method="fedtgp")
    with pytest.raises(PbflError, match="method 'local' has no such stage"):
        combined("geometric_median:rule", method="local")
    with pytest.raises(PbflError, match="rule 'own_rules:counted' sends exact counts with the rows"):
        combined("own_rules:counted", **{"dp-noise": 1.0, "dp-clip": 1.0})
