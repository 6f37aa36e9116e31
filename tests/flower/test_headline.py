"""What a run says whose headline predictor its method does not have."""

from pathlib import Path

import pytest

from tests.flower.inprocess import federation


@pytest.mark.parametrize(("predictor", "said"), [("global", 1), ("head", 0), ("auto", 0)])
def test_a_predictor_that_the_method_lacks_is_named(predictor: str, said: int, tmp_path: Path) -> None:
    history = federation(tmp_path, "local", predictor=predictor).run().strategy.history
    found = [note for line in history for note in line["notes"] if note.startswith("predictor = ")]
    assert len(found) == said
    assert all("method 'local' was not scored so" in note and "there are head" in note for note in found)
