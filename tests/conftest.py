"""What every test relies on."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from pbfl_flwr.methods import METHODS

torch.set_num_threads(1)
hypothesis.settings.register_profile("busy-machine", deadline=None)
hypothesis.settings.load_profile("busy-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--method my_package.module:build`` tries the contract of methods on that one alone; may be repeated."""
    parser.addoption("--method", action="append", default=[], help="instead of METHODS, for tests/methods")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whatever takes ``any_method`` is asked of every method."""
    if "any_method" in metafunc.fixturenames:
        metafunc.parametrize("any_method", metafunc.config.getoption("method") or [*METHODS], scope="module")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let every worker of xdist begin with its share of the slow tests, those with the longest timeout first.

    Each begins with a contiguous share of all tests. Tests of one ``xdist_group`` share a fixture and stay together.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for test in filter(slow, items):
        groups.setdefault(group(test), []).append(test)
    count = getattr(config, "workerinput", {}).get("workercount", 1)
    shares: list[list[pytest.Item]] = [[] for _ in range(count)]
    for number, tests in enumerate(sorted(groups.values(), key=lambda tests: -timeout(tests[0]))):
        shares[number % count] += tests
    quick = [test for test in items if not slow(test)]
    end = 0
    for number, share in enumerate(shares):
        size = len(items) * (number + 1) // count - len(items) * number // count
        share += quick[end : (end := end + max(0, size - len(share)))]
    items[:] = [test for share in shares for test in share] + quick[end:]


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the system refuse to list directories, which root could."""

    def refuse(*folders: Path) -> None:
        def refusing(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def listed(path: Any) -> Any:
                if Path(path) in folders:
                    raise PermissionError(13, "Permission denied", str(path))
                return read(path)

            return listed

        for name in ("listdir", "scandir"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name)))

    return refuse


def slow(test: pytest.Item) -> bool:
    return test.get_closest_marker("slow") is not None


def timeout(test: pytest.Item) -> float:
    mark = test.get_closest_marker("timeout")
    return 0.0 if mark is None else mark.args[0]


def group(test: pytest.Item) -> str:
    mark = test.get_closest_marker("xdist_group")
    return test.nodeid if mark is None else mark.args[0]


@pytest.fixture(scope="session", autouse=True)
def a_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decoded data goes into a place of the tests' own, and lines break where a test says so (make sets COLUMNS).

    Files are not flushed to the disk, which no test outlives.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        patch.setenv("PBFL_HOME", str(tmp_path_factory.mktemp("pbfl-home")))
        patch.delenv("COLUMNS", raising=False)
        yield
