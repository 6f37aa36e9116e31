"""Settings of a federation that contradict each other are refused before anything starts, in one line."""

from typing import Any

import pytest

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import SECTIONS, build_method


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"min-clients": 21}, "min-clients = 21: must be at most num-clients = 20"),
        ({"min-clients": 2, "min-replies": 3}, r"min-replies = 3: must be at most 2, .* = 1 of 2\)"),
        ({"predictor": "etf"}, "^predictor = 'etf': method 'fedproto' has no .* one of auto, head, global"),
    ],
)
def test_rejects_settings_that_contradict_each_other(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(PbflError, match=reason) as error:
        build_method(parse(keys, SECTIONS))
    assert "\n" not in str(error.value)
