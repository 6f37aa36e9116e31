"""Errors and warnings about a primary predictor that a method lacks or that no client could score."""

from pathlib import Path

import pytest

from pbfl_flwr.errors import PbflError
from tests.flower.inprocess import federation


def test_rejects_predictor_that_the_method_lacks(tmp_path: Path) -> None:
    message = (
        "predictor = 'etf': method 'fedproto' has no such predictor with these settings; must be one of auto, head, "
        "global, global-local, local"
    )
    with pytest.raises(PbflError, match=f"^{message}$"):
        federation(tmp_path, "fedproto", predictor="etf").run()


@pytest.mark.parametrize(("predictor", "num_warnings"), [("global", 1), ("head", 0), ("auto", 0)])
def test_warns_of_predictor_that_no_client_could_score(
    predictor: str, num_warnings: int, tmp_path: Path
) -> None:
    result = federation(tmp_path, "fedproto", predictor=predictor, min_class_count=1000).run()
    warnings = [warning for record in result.strategy.history for warning in record.warnings]
    about_predictor = [warning for warning in warnings if warning.startswith("predictor = ")]
    assert len(about_predictor) == num_warnings
    assert all(
        "method 'fedproto' has no scores of it" in warning and "there are scores of head" in warning
        for warning in about_predictor
    )
