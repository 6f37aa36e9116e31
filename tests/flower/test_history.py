"""Accuracies over clients."""

import pytest

from pbfl_flwr.flower.books import summarise
from pbfl_flwr.flower.report import Report


def report(num_test: int, correct: int, **others: int) -> Report:
    return Report(10, num_test, 1, {"head": correct, **others}, 0.5)


def test_the_metric_of_the_references_weighs_clients_by_their_test_samples() -> None:
    found = summarise({0: report(1, 1), 1: report(3, 0)})["head"]
    assert found == {"weighted": 0.25, "mean": 0.5, "std": 0.5, "worst": 0.0, "clients": 2}  # 1/4, not 1/2


def test_the_worst_tenth_is_a_mean_of_clients() -> None:
    twenty = {i: report(10, min(i, 10)) for i in range(20)}  # accuracies 0, 0.1, 0.2, ..., 1, 1, ...
    assert summarise(twenty)["head"]["worst"] == pytest.approx(0.05)  # the two worst, (0 + 0.1)/2


def test_who_has_no_test_samples_or_cannot_be_asked_is_left_out() -> None:
    found = summarise({0: report(4, 2), 1: report(0, 0), 2: report(4, 3, **{"global": 1})})
    assert found["head"]["clients"] == 2
    assert (found["global"]["weighted"], found["global"]["clients"]) == (0.25, 1)
    assert summarise({1: report(0, 0)}) == {}
