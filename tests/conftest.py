"""What every test relies on."""

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def a_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decoded data goes into a place of the tests' own, and lines break where a test says so (make sets COLUMNS)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PBFL_HOME", str(tmp_path_factory.mktemp("pbfl-home")))
        patch.delenv("COLUMNS", raising=False)
        yield
