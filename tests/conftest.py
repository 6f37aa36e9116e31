"""What every test relies on."""

from collections.abc import Iterator
from itertools import groupby

import pytest
import torch

from pbfl_flwr.methods import METHODS

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--method my_package.module:build`` tries the contract of methods on that one alone; may be repeated."""
    parser.addoption("--method", action="append", default=[], help="instead of METHODS, for tests/methods")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whatever takes ``any_method`` is asked of every method."""
    if "any_method" in metafunc.fixturenames:
        metafunc.parametrize("any_method", metafunc.config.getoption("method") or [*METHODS], scope="module")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lay what waits for processes evenly between the modules, or one of xdist's workers would get it all.

    Each worker begins with a contiguous share. Tests of one ``xdist_group`` share a fixture and stay together.
    """
    modules = [
        [*tests] for _, tests in groupby((test for test in items if not slow(test)), lambda test: test.path)
    ]
    waiting = [[*tests] for _, tests in groupby(filter(slow, items), group)]
    modules_left, step = iter(modules), sum(map(len, modules)) / max(1, len(waiting))
    spread: list[pytest.Item] = []
    passed = 0
    for number, tests in enumerate(waiting):
        while passed < number * step:
            module = next(modules_left)
            spread += module
            passed += len(module)
        spread += tests
    items[:] = spread + [test for module in modules_left for test in module]


def slow(test: pytest.Item) -> bool:
    return test.get_closest_marker("slow") is not None


def group(test: pytest.Item) -> str:
    mark = test.get_closest_marker("xdist_group")
    return test.nodeid if mark is None else mark.args[0]


@pytest.fixture(scope="session", autouse=True)
def a_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decoded data goes into a place of the tests' own, and lines break where a test says so (make sets COLUMNS)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PBFL_HOME", str(tmp_path_factory.mktemp("pbfl-home")))
        patch.delenv("COLUMNS", raising=False)
        yield
