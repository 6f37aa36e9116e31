"""What every test relies on."""

from collections.abc import Iterator

import pytest
import torch

from pbfl_flwr.methods import METHODS

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--method my_package.page:build`` tries the contract of methods on that one alone; may be repeated."""
    parser.addoption("--method", action="append", default=[], help="instead of METHODS, for tests/methods")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whatever takes ``any_method`` is asked of every method."""
    if "any_method" in metafunc.fixturenames:
        metafunc.parametrize("any_method", metafunc.config.getoption("method") or [*METHODS], scope="module")


@pytest.fixture(scope="session", autouse=True)
def a_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decoded data goes into a place of the tests' own, and lines break where a test says so (make sets COLUMNS)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PBFL_HOME", str(tmp_path_factory.mktemp("pbfl-home")))
        patch.delenv("COLUMNS", raising=False)
        yield
