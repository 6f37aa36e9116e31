"""New clients: what they are given is what the run's clients were sent, and none of their samples was in the run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import Partition, check_data, export_pfl_directory, load_pool
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.new_clients import new_client_sheet, unseen
from pbfl_flwr.experiments.results import FinishedRun
from pbfl_flwr.flower.server.phase import RoundPlan
from tests.flower.inprocess import KINDS, Federation, federation
from tests.small_runs import pbfl

TOLD = "Sample-weighted accuracy in %, before and after the local training of a round with the broadcast."


def digits(place: Path, **keys: Any) -> Federation:
    """A finished run of four clients on 400 of the digits."""
    keys = {"max_samples": 400, "num_clients": 4, "models": "cnn4,cnn2", "num_server_rounds": 1, **keys}
    return federation(place, data=None, on_disk=True, **keys).run()


def finished(run: Federation) -> FinishedRun:
    return FinishedRun.load(run.directory.path)


def rows_of(partition: Partition) -> list[int]:
    return [int(row) for split in partition.splits for row in (*split.train, *split.test)]


@pytest.mark.parametrize("partition", ["dirichlet", "pathological", "way-shot", "iid"])
def test_no_sample_of_new_clients_was_in_the_run(tmp_path: Path, partition: str) -> None:
    shots = {"shots": 10, "ways": 3, "max_samples": 0} if partition == "way-shot" else {"min_samples": 10}
    run = digits(tmp_path, partition=partition, **shots)
    settings = run.strategy.settings
    used = rows_of(check_data(settings.data, 4))
    pool, deal = unseen(finished(run), settings, 4)
    new = rows_of(deal)
    assert len(new) == len(set(new))
    assert not set(new) & set(used)
    assert len(new) == len(used) or partition in ("way-shot", "pathological")  # these leave some out
    assert deal.counts.sum(axis=1).tolist() == [len(split.train) + len(split.test) for split in deal.splits]
    assert np.bincount(pool.labels[new]).sum() == deal.counts.sum()
    assert [split.train.tolist() for split in unseen(finished(run), settings, 2)[1].splits] == [
        split.train.tolist() for split in deal.splits[:2]
    ]


@pytest.mark.parametrize("method", KINDS)
def test_they_are_the_next_clients_and_do_what_a_client_does(tmp_path: Path, method: str) -> None:
    """Clients 3 and 4 of a dataset whose files fix the clients, against the ClientApp, asked after the last round."""
    dealt = DataSettings(max_samples=500)
    export_pfl_directory(check_data(dealt, 5), load_pool(dealt), tmp_path / "files")
    keys: dict[str, Any] = {"data": None, "dataset": "pflib", "data_dir": str(tmp_path / "files")}
    keys |= {"gfpl.start": 2, "gfpl.interval": 2} if method == "gfpl" else {}
    keys |= {"wire_dtype": "int8", "initial_weights": "own"} if method == "fedproto" else {}
    keys |= {"validation_share": 0.2} if method == "fedavg" else {}
    run = federation(tmp_path / "run", method, num_clients=3, on_disk=True, **keys).run()
    sheet = new_client_sheet(finished(run), 2, 2)
    table = {title: [row[place] for row in sheet.rows] for place, title in enumerate(sheet.columns)}
    assert table.pop("own round") == ["1", "2"]
    assert sheet.title == "2 new clients after round 2"

    more = federation(tmp_path / "more", method, num_clients=5, on_disk=True, **keys)
    moment = more.strategy.moment
    more.strategy.prepare(more.grid)
    compared = 0
    for number in (3, 4):
        phase = more.strategy._messages(RoundPlan(number, {3: "train", 4: "train"}), run.strategy.state)
        replies = more.grid.send_and_receive([message for message, _ in phase.messages], timeout=10)
        exchange = more.strategy._read(phase, list(replies), run.strategy.state)
        reports = list(exchange.reports.values())
        assert exchange.failures == {}
        for name in reports[0].correct or {}:
            hits = sum((report.correct or {})[name] for report in reports)
            share = 100 * hits / sum(report.num_test for report in reports)
            assert table[f"{name}, {moment}"][number - 3] == f"{share:.2f}"
            compared += 1
    assert compared >= 2
    train, test = ([str(getattr(report, name)) for report in reports] for name in ("num_train", "num_test"))
    sizes = f"Training samples: {', '.join(train)}; test samples: {', '.join(test)}."
    assert sheet.notes[:2] == (TOLD, sizes)
    assert sheet.notes[2].startswith("Always predicting a new client's most frequent training class: ")


def test_a_score_is_that_of_its_moment_whenever_the_run_scored(tmp_path: Path) -> None:
    """FedMRL's clients predict with the shared network that they were sent, or after training with their own of it."""
    keys = {"fedmrl.auxiliary": "cnn2", "learning_rate": 0.1, "local_epochs": 3}
    sheets = [
        new_client_sheet(
            finished(digits(tmp_path / moment, method="fedmrl", evaluate_moment=moment, **keys)), 4, 2
        )
        for moment in ("before", "after")
    ]
    assert sheets[0].columns == ("own round", "head, before", "head, after")
    assert sheets[0].rows == sheets[1].rows


def test_the_command_prints_the_table_and_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    path = digits(tmp_path).directory.path
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    done = pbfl("new-clients", path, "--clients", 1, "--rounds", 2)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "1 new client after round 1" in lines
    assert [line.split()[0] for line in lines if line.strip()[:2] in ("1 ", "2 ")][-2:] == ["1", "2"]
    assert TOLD in " ".join(done.stdout.split())
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    again = pbfl("new-clients", path, "--clients", 1, "--rounds", 2)
    assert again.stdout == done.stdout


@pytest.mark.parametrize(
    ("keys", "clients", "reason"),
    [
        (
            {"max_samples": 1000},
            2,
            r"used 1,000 of the 1,797 samples of .*'digits'; .* e\.g\. max-samples = 898$",
        ),
        (
            {"partition": "way-shot", "ways": 3, "shots": 35, "test_shots": 5, "max_samples": 0},
            1,
            r"left 1,\d+ samples, which cannot be dealt as its own were, to 4 clients: shots = 35,",
        ),
        ({}, 5, r"^--clients 5: must be at most 4, the number of the run's clients$"),
    ],
)
def test_too_few_samples_are_one_line(
    tmp_path: Path, keys: dict[str, Any], clients: int, reason: str
) -> None:
    with pytest.raises(PbflError, match=reason):
        new_client_sheet(finished(digits(tmp_path, **keys)), clients, 1)


def test_too_few_clients_in_the_files_are_a_line_on_the_option_that_was_given(tmp_path: Path) -> None:
    dealt = DataSettings(max_samples=200)
    export_pfl_directory(check_data(dealt, 3), load_pool(dealt), tmp_path / "files")
    keys = {"dataset": "pflib", "data_dir": str(tmp_path / "files"), "max_samples": 0, "num_clients": 3}
    reason = (
        "^--clients 2, beside the 3 of the run: num-clients = 5: the dataset's files hold 3 clients, no more "
    )
    with pytest.raises(PbflError, match=reason):
        new_client_sheet(finished(digits(tmp_path / "run", **keys)), 2, 1)


def test_what_cannot_be_played_is_one_line(tmp_path: Path) -> None:
    path = digits(tmp_path).directory.path

    def refused() -> str:
        done = pbfl("new-clients", path)
        assert done.exit_code == 2
        return " ".join(done.stderr.split())

    facts = json.loads((path / "partition.json").read_text())
    (path / "partition.json").write_text(json.dumps({**facts, "data": "0" * 12}))
    assert "the samples of dataset 'digits' are not those with which it began" in refused()
    (path / "partition.json").unlink()
    assert "its clients brought their own data" in refused()
    (path / "checkpoint.safetensors").unlink()
    assert "checkpoint.safetensors cannot be read" in refused()
    about = json.loads((path / "run.json").read_text())
    about["configuration"]["method"] = "strange_page:build"
    (path / "run.json").write_text(json.dumps(about))
    assert "'strange_page:build' is code to be allowed: --import strange_page:build" in refused()
