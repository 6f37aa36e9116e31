"""Clients scored twice, before and after their training."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pbfl_flwr.experiments import show
from pbfl_flwr.experiments.report import accuracy_sheet
from pbfl_flwr.experiments.results import load, scores
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.methods import METHODS
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.sinks import steps
from tests.flower.inprocess import Federation, federation, same_tensors


@pytest.mark.parametrize(
    ("method", "moment"),
    [*((method, "after") for method in sorted(METHODS)), *((m, "before") for m in ("fedala", "tinyproto"))],
)
def test_the_other_moment_is_what_a_run_that_reports_it_reports(
    tmp_path: Path, method: str, moment: str
) -> None:
    other = {"before": "after", "after": "before"}[moment]

    def of(name: str, **keys: Any) -> Federation:
        return federation(tmp_path / name, method, num_clients=3, **keys).run()

    twice, reported = (
        of("twice", evaluate_moment=moment, both_moments=True),
        of("other", evaluate_moment=other),
    )
    states = [run.strategy.state.to_tensors() for run in (twice, reported)]
    assert same_tensors(*states), "training must not notice"
    found = [line.other_accuracy for line in twice.strategy.history]
    assert found == [line.accuracy for line in reported.strategy.history]
    assert all(line.other_accuracy == {} for line in reported.strategy.history)


def test_who_is_only_scored_is_scored_once(tmp_path: Path) -> None:
    found = federation(tmp_path, both_moments=True, fraction_train=0.4, on_disk=True).run()
    for line, columns in zip(found.strategy.history, found.directory.client_records(), strict=True):
        assert line.accuracy["head"].clients == 5
        assert line.other_accuracy["head"].clients == 2
        scored = dict(zip(columns.client, columns.correct_other, strict=True))
        assert {client for client, correct in scored.items() if correct} == set(line.trained)


def test_tables_name_the_moment_and_its_round(tmp_path: Path) -> None:
    after = federation(tmp_path / "after", both_moments=True, on_disk=True).run()
    before = federation(tmp_path / "before", "fedavg", both_moments=True, on_disk=True).run()
    for run, said, at in ((after, "before training", 1), (before, "after training", 2)):
        history = run.strategy.history
        console = Console(width=120, record=True)
        show.show_run(run.directory.path, console)
        last = history[-1].other_accuracy["head"]
        figures = [f"{100 * getattr(last, name):.2f}" for name in ("weighted", "mean", "std", "worst")]
        rows = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
        assert [*said.split(), str(at), *figures] in rows
        assert (at, last) == scores(history)["head"].other
        columns = dict(steps(history[-1]))
        assert columns[at]["other-moment/head/weighted"] == last.weighted
    sheet = accuracy_sheet(load([after.directory.path]))
    at = sheet.columns.index("at the other moment")
    head = next(row for row in sheet.rows if row[1] == "head")
    assert head[at : at + 2] == (
        f"{100 * after.strategy.history[-1].other_accuracy['head'].weighted:.2f}",
        "1",
    )


def test_a_report_with_more_right_than_tested_is_rejected() -> None:
    record = Report(4, 3, correct={"head": 1}, other={"head": 3}).to_record()
    assert Report.from_record(record).other == {"head": 3}
    record["o"] = [4, -1, -1, -1, -1]
    with pytest.raises(RejectedPayload, match="contradict"):
        Report.from_record(record)
    record["o"] = [1]
    with pytest.raises(RejectedPayload, match="lacks 'o' of length 5"):
        Report.from_record(record)
