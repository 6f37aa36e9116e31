"""What is said of a primary predictor that a method does not have, or that nobody could be asked for."""

from pathlib import Path

import pytest

from pbfl_flwr.errors import PbflError
from tests.flower.inprocess import federation


def test_a_predictor_that_the_method_lacks_is_refused(tmp_path: Path) -> None:
    said = (
        "predictor = 'etf': method 'fedproto' has no such predictor with these settings; must be one of auto, head, "
        "global, global-local, local"
    )
    with pytest.raises(PbflError, match=f"^{said}$"):
        federation(tmp_path, "fedproto", predictor="etf").run()


@pytest.mark.parametrize(("predictor", "said"), [("global", 1), ("head", 0), ("auto", 0)])
def test_a_predictor_that_nobody_could_be_asked_for_is_named(
    predictor: str, said: int, tmp_path: Path
) -> None:
    found = federation(tmp_path, "fedproto", predictor=predictor, min_class_count=1000).run()
    notes = [note for line in found.strategy.history for note in line.warnings]
    told = [note for note in notes if note.startswith("predictor = ")]
    assert len(told) == said
    assert all(
        "method 'fedproto' has no scores of it" in note and "there are scores of head" in note
        for note in told
    )
