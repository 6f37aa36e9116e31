"""Predictors that a user's method names, from the client's report to the tables."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pbfl_flwr.config import PREDICTORS, in_order
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import results
from pbfl_flwr.experiments.pairs import paired_sheet
from pbfl_flwr.experiments.summary import comparison_sheet, summary_csv
from pbfl_flwr.flower.client.saving import _prototypes
from pbfl_flwr.flower.messages.report import Report, Requested, reported, requested, seconds_in
from pbfl_flwr.method import Nearest
from pbfl_flwr.payloads import RejectedPayload
from pbfl_flwr.training.class_metrics import Areas, ByClass
from tests.flower.inprocess import Federation, federation, numbers
from tests.small_runs import pbfl, rows_of

METHOD = """
from pbfl_flwr.method import head_scores
from pbfl_flwr.methods.local import Local

class Two(Local):
    predicts = ("head", "last", "{name}")
    primary_predictor = "{name}"

    def predictors(self, client, down):
        return {{"last": lambda features, logits: -logits, "{name}": head_scores, "head": head_scores}}

def build(settings):
    return Two()
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for module, name in (("two_one", "cosine"), ("two_other", "cosine")):
        (tmp_path / f"{module}.py").write_text(METHOD.format(name=name))


def run(tmp_path: Path, module: str, **keys: Any) -> Federation:
    method = f"{module}:build"
    return federation(tmp_path / module, method, models="cnn4", on_disk=True, **keys).run()


def test_the_order_is_that_of_the_package_and_then_by_name() -> None:
    assert in_order(["z", "local", "a", "head"]) == ("head", "local", "a", "z")
    assert reported(["head", "global"]) == PREDICTORS == ("head", "global", "global-local", "local", "etf")
    assert reported(["head", "z", "a"]) == (*PREDICTORS, "a", "z")


def test_a_report_has_places_for_them_after_the_others() -> None:
    places = reported(["head", "cosine"])
    counts = ByClass([3, 1], {"head": [2, 0], "cosine": [3, 1]}, {"head": [3, 1], "cosine": [3, 1]})
    areas = {"head": Areas(0.5, 0.75), "cosine": Areas(1.0, 1.0)}
    right = {"head": 2, "cosine": 4}
    sent = Report(
        9, 4, 1, right, metrics={}, num_validation=2, validation={"cosine": 1}, by_class=counts, areas=areas,
        predictors=places,
    )  # fmt: skip
    record = sent.to_record()
    assert numbers(record, "c") == [2, -1, -1, -1, -1, 4]
    assert numbers(record, "v") == [2, -1, -1, -1, -1, -1, 1]
    assert numbers(record, "k") == [3, 1, 2, 0, 3, 1, 3, 1, 3, 1]
    assert Report.from_record(record, Requested(2, True, predictors=places)) == sent
    assert seconds_in(record) == 0.0
    with pytest.raises(RejectedPayload, match="lacks 'c' of length 5"):
        Report.from_record(record)


def test_the_report_of_the_packages_methods_has_no_place_for_others() -> None:
    assert numbers(Report(9, 4, 1, {"head": 2, "etf": 1}).to_record(), "c") == [2, -1, -1, -1, 1]
    assert requested.__defaults__ == ((), True)


def test_a_run_its_files_and_its_tables(tmp_path: Path) -> None:
    done = run(tmp_path, "two_one")
    (last,) = {tuple(line.accuracy) for line in done.strategy.history}
    assert last == ("head", "cosine", "last")
    accuracy = done.strategy.history[-1].accuracy
    assert accuracy["cosine"] == accuracy["head"] != accuracy["last"]
    groups = results.load([done.directory.path])
    assert groups[0].first.predictor == "cosine"
    (row,) = rows_of(comparison_sheet("", groups))
    assert row["cosine"] == row["head"]
    (figures,) = csv.DictReader(summary_csv(groups).splitlines())
    assert figures["predictor.cosine"] == figures["head"] == figures["last"] != figures["predictor.last"]
    assert float(figures["predictor.last"]) == pytest.approx(100 * accuracy["last"].weighted, abs=1e-4)
    by_last = results.load([done.directory.path], by="last")
    assert by_last[0].first.figures["last"] == pytest.approx(100 * accuracy["last"].weighted)
    shown = pbfl("show", done.directory.path, "--format", "json")
    assert {*json.loads(shown.output)["accuracies"]} == {"head", "cosine", "last"}
    lines = pbfl("show", done.directory.path, "--format", "csv").output.splitlines()
    assert {line.split(",")[6] for line in lines[1:]} == {"head", "cosine", "last"}


def test_the_primary_predictor_may_be_one_of_them(tmp_path: Path) -> None:
    assert run(tmp_path, "two_one", predictor="last").strategy.primary_predictor == "last"
    with pytest.raises(PbflError, match=r"predictor = 'mine': .* one of auto, head, last, cosine$"):
        run(tmp_path, "two_one", predictor="mine")


def test_methods_that_share_a_name_are_compared_with_a_remark(tmp_path: Path) -> None:
    places = [run(tmp_path, module).directory.path for module in ("two_one", "two_other")]
    groups = results.load(places)
    (pair,) = rows_of(paired_sheet(groups))
    remark = "cosine of two_other:build vs. cosine of two_one:build, which each define it"
    assert remark in pair["remark"]
    notes = comparison_sheet("", groups).notes
    assert (
        "Predictor cosine is not the same in two_one:build and two_other:build, which each define it."
        in notes
    )
    (of_heads,) = rows_of(paired_sheet(results.load(places, by="head")))
    assert "which each define it" not in of_heads["remark"]


def test_a_table_by_one_of_them(tmp_path: Path) -> None:
    place, out = run(tmp_path, "two_one").directory.path, tmp_path / "page.html"
    assert pbfl("report", place, "--by", "last", "--out", out).exit_code == 0
    assert "by last" in out.read_text()
    refused = pbfl("report", place, "--by", "nobody", "--out", out)
    assert refused.exit_code == 2
    assert (
        "--by nobody: must be one of head, global, global-local, local, etf, cosine, last" in refused.stderr
    )
    (tmp_path / "both.toml").write_text('[runs.A]\nmethod = "two_one:build"\n[runs.B]\nmethod = "local"\n')
    words = [
        "compare",
        tmp_path / "both.toml",
        "--set",
        "models=cnn4",
        "--out",
        tmp_path / "out",
        "--dry-run",
    ]
    assert pbfl(*words, "--by", "cosine").exit_code == 0
    refused = pbfl(*words, "--by", "cosin")
    assert refused.exit_code == 2
    assert "--by cosin: must be one of head, global, global-local, local, etf, cosine, last" in refused.stderr


def test_only_a_plain_nearest_is_exported() -> None:
    class Cosine(Nearest):
        def __call__(self, features: Tensor, logits: Tensor) -> Tensor:
            return features @ self.prototypes.T

    table = torch.eye(3, 4), torch.ones(3, dtype=torch.bool)
    tables = _prototypes({"global": Nearest(*table), "cosine": Cosine(*table)})
    assert sorted(tables) == ["global.candidates", "global.rows"]
