import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from shlex import quote
from typing import Any

import click
import pytest
import typer

from pbfl_flwr.cli import app
from pbfl_flwr.cli.common import INTERRUPTED, INTERRUPTED_NOTE, NON_EMPTY_PATH, running
from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.config.toml import flatten, toml
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import show
from pbfl_flwr.experiments.console import clock, kilobytes
from pbfl_flwr.experiments.execute import deployment
from pbfl_flwr.experiments.execute.progress import round_line
from pbfl_flwr.experiments.plan import configuration, planned_runs
from pbfl_flwr.experiments.plan import reproduction as reproduce
from pbfl_flwr.experiments.results import resume_command
from pbfl_flwr.flower.deploy import local_federation
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.prototypes.privacy import epsilon_of
from pbfl_flwr.runs.directory import RunDirectory, RunRefused
from pbfl_flwr.runs.locks import lock_of
from pbfl_flwr.runs.records import NOT_CONNECTED, REPEATED, ClientsRecord
from pbfl_flwr.util import extras
from tests.real_runs import sets
from tests.small_runs import (
    columns,
    edit,
    entry,
    over,
    pbfl,
    refused,
    rounds_of,
    terminal,
    unread,
    without_room,
    write_lines,
    write_run,
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))


def parameters(command: click.Command) -> list[click.Parameter]:
    """Those of a command, or of all commands of a group."""
    below = command.commands.values() if isinstance(command, click.Group) else []
    return [*command.params, *(one for each in below for one in parameters(each))]


def test_no_path_may_be_empty() -> None:
    paths = [one for one in parameters(typer.main.get_command(app)) if "Path" in type(one.type).__name__]
    assert len(paths) > 30
    assert {type(one.type) for one in paths} == {type(NON_EMPTY_PATH)}


def test_every_argument_has_a_help_text() -> None:
    every = parameters(typer.main.get_command(app))
    arguments = [one for one in every if one.param_type_name == "argument"]
    assert len(arguments) > 10
    assert all(getattr(one, "help", None) for one in arguments)
    assert "A run directory." in pbfl("watch", "--help").stdout


@pytest.mark.parametrize("interval", ["nan", "inf", "1e12"])
def test_an_interval_without_an_end_is_not_taken_for_a_damaged_run(interval: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    result = pbfl("watch", run, "--interval", interval)
    assert result.exit_code == 2
    assert f"--interval {float(interval):g}: must be at most 3600" in result.output


def test_all_bad_keys_are_told_at_once_and_nothing_starts(tmp_path: Path) -> None:
    wrong = (
        "lerning-rate=3 seed=abc fraction-train=1.5 fedtgp.epochs=3 method=fedprot dataset=digit models=cnn5"
    )
    assignments = [*wrong.split(), "batch-size=[1, 2]", "nonsense"]
    result = pbfl("run", *sets(*assignments))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == len(assignments)
    for name in [
        "learning-rate",
        "seed",
        "fraction-train",
        "fedtgp.epochs",
        "fedproto",
        "digits",
        "cnn4",
        "batch-size",
    ]:
        assert name in result.stderr
    assert not (tmp_path / "runs").exists()


EMPTY = "'': must be a path, . for the current directory"
TABLES = ("compare table.toml", "sweep fedproto-digits --set cps-dim=8,16")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run nowhere.toml", "preset 'nowhere.toml'"),
        ("run ''", "preset '': no such file"),
        ("keys --out keys " + "x" * 65, "must be 1 to 64 letters"),
        ("run --set dataset=npz --set data-dir=nowhere.npz", "nowhere.npz"),
        ("run --set models=har-cnn", "har-cnn"),
        ("run --set method=fedavg", "one architecture"),
        ("run --set device=cuda", "--gpus-per-client"),
        ("run --set data-dir=~nobody-of-that-name/x", "there is no user 'nobody-of-that-name'"),
        ("run --cpus-per-client 5000", "--cpus-per-client 5000"),
        ("run --resume nowhere", "no run.json"),
        ("run --set resume=true", "names no run; give --resume RUN"),
        ("run --resume nowhere --run-dir there", "--resume and --run-dir"),
        ("run --app . --engine flower", "is not a checkout"),
        ("run --app .", "--app: not used with --engine processes, whose clients run the installed package"),
        ("run --ray-address auto", "--ray-address: only with --engine ray, not processes"),
        ("run --run-dir ''", f"error: --run-dir {EMPTY}"),
        *((f"{words} ''", f"error: {EMPTY}") for words in ("show", "watch --once", "report", "report runs")),
        ("deploy local -n 2 --set num-clients=3", "-n 2 and num-clients = 3"),
        ("deploy local -n 1 --node \"model='cnn4'\" --node \"model='cnn4'\"", "--node was given 2 times"),
        ("deploy local --node model=cnn4", "text in quotes, key='text'"),
        ("deploy local --node \"modle='cnn4'\"", "--node 0: --node-config: unknown key 'modle'"),
        ("deploy local --node \"data-path='nowhere.npz'\"", "--node 0: "),
        ("deploy local --node client-id=1 --node client-id=1", "--node 0 and --node 1: both are client-id 1"),
        ("deploy local --method fedprot", "fedproto"),
        ("deploy local --run-dir r\udcfc", "must be text in UTF-8; rename what has this name"),
        ("deploy local --resume nowhere", "no run.json"),
        ("deploy local --resume nowhere -n 2", "--resume: "),
        (
            "list keys learning-rat3",
            "'learning-rat3': in no key's name or description; the groups are run, data, models",
        ),
        ("list methods foo", "'foo': not found in methods; must be one of local, fedavg"),
        ("list runs", "error: runs cannot be read (No such file or directory)"),
        ("list runs .", "error: '.' holds no run: no run.json in it or up to 3 levels below it"),
        ("show .", "error: '.' is not a run directory: it has no run.json"),
        *(
            (f"run --set num-server-rounds=1 --run-dir file/x{dry}", "file is a file; must be a directory")
            for dry in ("", " --dry-run")
        ),
        *(
            (f"{words} --out {out}", "file is a file; must be a directory")
            for words in TABLES
            for out in ("file", "file/x")
        ),
        *(
            (f"{words} table.toml", "'table.toml' has several runs; must be the keys of one")
            for words in ("run", "sweep")
        ),
        (
            f"{TABLES[0]} --seeds 0 --set seed=3",
            "--set seed: each run gets its seed from a list; must be --seeds",
        ),
        (
            f"{TABLES[0]} --seeds 0 --deal-anew --set partition-seed=3",
            "--set partition-seed: --deal-anew sets it",
        ),
        (
            "sweep fedproto-digits --set run-dir=a,b",
            "/a': runs are named by their rows; must be --out",
        ),
        (
            f"{TABLES[0]} --set run-dir=a",
            "/a': runs are named by their rows; must be --out",
        ),
        (
            "reproduce fedcpd-table1 --set seed=3",
            "--set seed: each run gets its seed from a list; must be --seeds",
        ),
        ("deploy local --run-dir file/x", "file is a file; must be a directory"),
        ("certs --host fl.example.org --out file/x", "cannot be written"),
        ("keys site-a --out file/x", "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_one_line(words: str, said: str) -> None:
    Path("file").touch()
    Path("table.toml").write_text('[runs.A]\nmethod = "local"\n')
    assert said in refused(*shlex.split(words))
    assert not Path("runs").exists()


@pytest.mark.skipif(os.name != "posix", reason="the home directory is HOME's or that of /etc/passwd")
@pytest.mark.parametrize("command", ["weights mine resnet18 file", "watch ~/run"])
def test_a_user_without_a_home_is_told_so(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "PBFL_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert re.search("this user has no home directory.*PBFL_HOME", refused(*command.split()))


def test_a_dry_run_prints_a_preset_and_starts_nothing(tmp_path: Path) -> None:
    wanted = [
        "protocol=htfl",
        "method=fedtgp",
        "fedtgp.server-epochs=7",
        "data-dir=",
        "tinyproto.base=fedtgp",
    ]
    result = pbfl("run", "fedproto-digits", *sets(*wanted), "--run-dir", "there", "--dry-run")
    assert result.exit_code == 0
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "there").exists()
    lines = result.stdout.splitlines()
    assert "# tinyproto.base: without effect, the method is 'fedtgp'" in lines
    assert "# the primary predictor is predictor 'global', before local training" in lines
    assert "# server_training.learning_rate = 0.05" in lines
    ordered = [
        'method = "fedtgp"',
        "fedtgp.server-epochs = 7",
        "# keys that are auto, as resolved by protocol = 'htfl'",
    ]
    ordered += ['collect = "before"', "momentum = 0.0"]
    assert [line for line in lines if line in ordered] == ordered
    own = configuration.gather("fedproto-digits", wanted[:3])
    (tmp_path / "mine.toml").write_text(result.stdout)
    again = configuration.check(configuration.gather("mine.toml", []))
    assert again.as_dict() == configuration.check(own).as_dict(), "every key is said, also the method's"
    assert pbfl("run", "--set", "models=har-cnn", "--dry-run").stdout == ""


def test_a_dry_run_of_a_resumed_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)], **{"num-server-rounds": 2})
    before = (run / "run.json").read_bytes()
    result = pbfl("run", "--resume", run, "--set", "num-server-rounds=5", "--dry-run")
    assert result.exit_code == 0
    preset = tomllib.loads(result.stdout)
    assert preset["num-server-rounds"] == 5
    assert not {"resume", "run-dir"} & set(preset)
    assert (run / "run.json").read_bytes() == before


def test_versions_in_a_line() -> None:
    result = pbfl("--version")
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    for package in ("pbfl-flwr", "flwr", "torch"):
        assert f"{package} {version(package)}, " in line
    assert line.endswith(f"Python {python_version()}")


def test_values_are_toml_scalars_and_bare_words() -> None:
    values: dict[str, Scalar] = {
        "3": 3,
        "0.5": 0.5,
        "1e-3": 0.001,
        ".1": 0.1,
        "-1.": -1.0,
        "../.5": "../.5",
        "true": True,
        "fedproto": "fedproto",
        "": "",
    }
    values |= {"'x y'": "x y", "cnn4,resnet8": "cnn4,resnet8", "a=b": "a=b"}
    assignments = [f"{number}={text}" for number, text in enumerate(values)]
    assert [*configuration.gather(None, assignments).values.values()] == [*values.values()]


@pytest.mark.parametrize("text", ["2024_11_29", "2024-11-29", "1e3", "007", "0x10", "true", "'a b'", '"1e3"'])
def test_the_value_of_a_key_of_texts_is_as_written(text: str) -> None:
    plain = text.strip("\"'")
    values = configuration.gather(None, [f"run-dir={text}", f"label-column={text}"]).values
    assert values == {"run-dir": str(Path(plain).absolute()), "label-column": plain}


def test_set_overrides_the_preset_and_tables_are_flattened(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text('seed = 4\nmethod = "tinyproto"\ndata-dir = "there"\n[tinyproto]\nbase = "fedtgp"\n')
    assert configuration.gather(str(preset), ["seed=5"]).values == {
        "seed": 5,
        "method": "tinyproto",
        "data-dir": str(tmp_path / "there"),
        "tinyproto.base": "fedtgp",
    }


def test_configuration_survives_the_toml_that_flower_reads() -> None:
    config: dict[str, Scalar] = {
        "a": 'qu"ote\\ \n ü',
        "b": True,
        "c": 1e-5,
        "d": 7,
        "tinyproto.base": "fedproto",
    }
    assert flatten(tomllib.loads(toml(config))) == config


def test_federation_config() -> None:
    assert Resources(2, 0.25).federation(7, 3) == (
        "num-supernodes=7 client-resources-num-cpus=2 client-resources-num-gpus=0.25 init-args-num-cpus=6"
    )


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of every printed line that is not empty."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    return [line for line in lines if line != [""]]


def test_show(tmp_path: Path) -> None:
    rounds = [
        entry(1, 0.25, None),
        entry(2, 0.75, 0.875, failures=[{"client": 1, "reason": "out of paper"}]),
        entry(3, 0.5, 0.625, failures=[{"client": 1, "reason": "out of paper"}]),
    ]
    result = pbfl("show", write_run(tmp_path / "run", rounds))
    assert result.exit_code == 0
    text = result.stdout
    rows = cells_of(text)
    assert rows[2] == ["Predictors and rounds"]
    assert rows[3][:5] == ["predictor", "last", "round", "best (on test data)", "round"]
    assert rows[3][5:] == ["mean of clients", "std over clients", "worst decile"]
    assert ["head", "50.00", "3", "75.00", "2", "50.00", "12.50", "37.50"] in rows
    assert ["global (primary)", "62.50", "3", "87.50", "2", "62.50", "12.50", "50.00"] in rows
    assert ["bytes, mean over all clients: payload", "100 B", "300 B", "400 B"] in rows
    assert ["including Flower's objects", "200 B", "400 B", "600 B"] in rows
    assert ["scalars, all clients, last round", "12", "20", "32"] in rows
    assert ["by the paper's formula, all clients", "36"] in rows
    assert "client 1 failed in 2 rounds, first 2: out of paper" in text
    assert "resume with" not in text


def test_show_says_what_else_is_to_be_known_of_a_run(tmp_path: Path) -> None:
    lines_of = [over(1, entry(1, 0.5, 0.5)), entry(2, 0.5, 0.5, warnings=["held back"])]
    run = write_run(tmp_path / "run", lines_of, **{"num-server-rounds": 3})
    (run / "partition.json").write_text(json.dumps({"counts": [[5, 3, 0], [0, 0, 8]], "warnings": []}))
    lines = pbfl("show", run).stdout.splitlines()
    assert lines[0] == str(run)
    assert lines[1].startswith("fedproto on digits, dirichlet(0.1), 2 clients, models ")
    assert ", 2 rounds, protocol " in lines[1]
    assert "last round: held back" in lines
    assert f"2 of 3 rounds; resume with: pbfl run --resume {run}" in lines
    with lock_of(run):
        assert "2 of 3 rounds; running" in pbfl("show", run).stdout.splitlines()
    unscored = write_run(tmp_path / "unscored", [entry(1, 0.5, None, accuracy={})])
    text = pbfl("show", unscored).stdout
    assert "no accuracies: no client has reported any" in text
    assert ", 1 round, protocol " in text


def test_the_noise_is_told_of_the_client_for_whom_it_is_worth_least() -> None:
    lines = [
        columns(1, [{}] * 3, metrics=[{"epsilon": 1.0}, {"epsilon": 2.0}, {}], participations=[1, 1, 0]),
        columns(2, [{}] * 2, metrics=[{"epsilon": 4.0}, {}], participations=[2, 1]),
    ]
    rounds = rounds_of(entry(1, 0.5, 0.5), entry(2, 0.5, 0.5))
    answers = [ClientsRecord.from_json(line, "a line") for line in lines]
    config: dict[str, Scalar] = {"dp-clip": 1.0, "dp-noise": 2.0, "dp-unit": "sample", "dp-delta": 1e-5}
    said = show.privacy_line(config, rounds, answers)
    assert said is not None
    assert said.endswith("at δ = 1e-05 ε = 4 for client 0, 3 on average")
    assert show.privacy_line({**config, "dp-noise": 0.0}, rounds, answers) is None


def test_uploads_that_were_not_accepted_count_as_releases_until_the_client_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failed(number: int, **reasons: str) -> dict[str, Any]:
        failures = [{"client": int(client[1:]), "reason": reason} for client, reason in reasons.items()]
        return entry(number, 0.5, 0.5, failures=failures)

    config: dict[str, Scalar] = {"dp-clip": 1.0, "dp-noise": 2.0, "dp-unit": "sample", "dp-delta": 1e-5}
    two, three = (epsilon_of(2.0, releases, 1e-5) for releases in (2, 3))

    def line(*third: dict[str, Any]) -> str:
        """Client 1 is never accepted; client 0 was, and then reports that its failure in round 2 was no release."""
        reports = [
            columns(1, [{}], metrics=[{"epsilon": 1.0}]),
            {**columns(2, []), "seconds": {}},
            columns(3, [{}], metrics=[{"epsilon": 1.5}], participations=[2]),
        ]
        answers = [ClientsRecord.from_json(each, "a line") for each in reports]
        first = failed(1, c1="upload rejected: a number")
        second = failed(2, c0="no answer within 9 s", c1=NOT_CONNECTED)
        said = show.privacy_line(config, rounds_of(first, second, *third), answers[: 2 + len(third)])
        assert said is not None
        return said.partition("ε = ")[2]

    assert line().startswith(f"at most {two:.3g} for client 0, ")
    busy = failed(3, c1="still busy with round 1")
    assert line(busy).startswith(f"at most {epsilon_of(2.0, 1, 1e-5):.3g} for client 1, ")
    repeated = {**busy, "warnings": [REPEATED]}  # it may have answered the first try
    assert line(repeated).startswith(f"at most {two:.3g} for client 1, ")
    assert line(failed(3, c1="lost"), failed(4, c1="lost")).startswith(f"at most {three:.3g} for client 1, ")
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    assert line().startswith("at least 1 for client 0, ")
    assert line().endswith("needs scipy, which is not installed: pip install 'pbfl-flwr[privacy]'")


@pytest.mark.parametrize(
    ("counts", "releases"),
    [([1, 2, 1], 3), ([1, 2, 2], 3), ([1, 2, 1, 2, 3], 5), ([2, 4, 1], 5)],
    ids=["lost", "older", "lost and further", "lost after uploads that were lost"],
)
def test_releases_before_a_client_lost_its_state_still_count(counts: list[int], releases: int) -> None:
    config: dict[str, Scalar] = {"dp-clip": 1.0, "dp-noise": 2.0, "dp-unit": "sample", "dp-delta": 1e-5}
    answers = [
        ClientsRecord.from_json(
            columns(
                number, [{}], metrics=[{"epsilon": epsilon_of(2.0, count, 1e-5)}], participations=[count]
            ),
            "a line",
        )
        for number, count in enumerate(counts, start=1)
    ]
    rounds = rounds_of(*(entry(number, 0.5, 0.5) for number in range(1, 1 + len(counts))))
    said = str(show.privacy_line(config, rounds, answers))
    assert f"ε = {epsilon_of(2.0, releases, 1e-5):.3g} for client 0, " in said


@pytest.mark.parametrize(
    ("reported", "counts", "releases"),
    [({"epsilon": 1.0}, [1, 2], [3, 4]), ({}, [0, 1], [2, 3])],
    ids=["trains", "is first only scored"],
)
def test_an_upload_that_was_not_accepted_before_a_client_lost_its_state_counts_as_a_release(
    reported: dict[str, float], counts: list[int], releases: list[int]
) -> None:
    config: dict[str, Scalar] = {"dp-clip": 1.0, "dp-noise": 2.0, "dp-unit": "sample", "dp-delta": 1e-5}
    reports = [
        columns(1, [{}], metrics=[{"epsilon": 1.0}]),
        {**columns(2, []), "seconds": {}},
        columns(3, [{}], metrics=[reported], participations=[counts[0]]),
        columns(4, [{}], metrics=[{"epsilon": 1.0}], participations=[counts[1]]),
    ]
    failed = entry(2, 0.5, 0.5, failures=[{"client": 0, "reason": "no answer within 9 s"}])
    answers = [ClientsRecord.from_json(each, "a line") for each in reports]
    rounds = rounds_of(entry(1, 0.5, 0.5), failed, entry(3, 0.5, 0.5), entry(4, 0.5, 0.5))
    for number, expected in zip((3, 4), releases, strict=True):
        said = show.privacy_line(config, rounds[:number], answers[:number])
        assert f"ε = at most {epsilon_of(2.0, expected, 1e-5):.3g} for client 0, " in str(said)


def test_costs_are_means_over_the_rounds(tmp_path: Path) -> None:
    def sizes(payload: int) -> dict[str, int]:
        return {"payload": payload, "application": payload + 20, "total": payload + 40}

    def seconds(total: float) -> dict[str, Any]:
        return {"total": total, "clients": {"fit": total, "evaluate": 1.0}}

    rounds = [
        entry(1, 0.5, 0.5, bytes_up=sizes(100), bytes_down=sizes(500), seconds=seconds(1.0), peak_mb=900.0),
        entry(2, 0.5, 0.5, bytes_up=sizes(300), bytes_down=sizes(900), seconds=seconds(4.0), peak_mb=100.0),
    ]
    rounds[0]["gpu_mb"] = 1536.0
    rounds[1]["scalars"] = {"up": 1200, "down": 7}
    text = pbfl("show", write_run(tmp_path / "run", rounds)).stdout
    rows = cells_of(text)
    for row in (
        ["bytes, mean over all clients: payload", "100 B", "350 B", "450 B"],  # (100 + 300)/2 of two clients
        ["including reports", "110 B", "360 B", "470 B"],
        ["scalars, all clients, last round", "1,200", "7", "1,207"],
        ["seconds", "2.50"],
        ["sum over clients", "3.50"],
        ["peak memory of a worker", "900 MB"],
        ["on its GPU, without the CUDA context", "1536 MB"],
    ):
        assert row in rows
    costs = json.loads(pbfl("show", tmp_path / "run", "--format", "json").stdout)["costs"]
    assert (costs["peak-mb"], costs["gpu-mb"]) == (900.0, 1536.0)


def test_the_title_says_what_devices_brought(tmp_path: Path) -> None:
    keys = {"num-server-rounds": 3, "feature-dim": 64}
    about = RunDirectory(write_run(tmp_path / "run", [], **keys)).record()
    devices = [
        client.model_copy(update={"configured_data": False, "simulated": False, "architecture": architecture})
        for client, architecture in zip(about.clients, ("cnn2", "mlp5"), strict=True)
    ]
    line = show.settings_line(about.model_copy(update={"clients": devices}), 3)
    assert "fedproto on the clients' own data, 2 clients, models cnn2, mlp5, d = 64" in line
    few = show.settings_line(about.model_copy(update={"clients": devices[:1]}), 3)
    assert "fedproto on the clients' own data, 1 of 2 clients, models cnn2, d = 64" in few
    simulated = show.settings_line(about, 3)
    assert "fedproto on digits, dirichlet(0.1), 2 clients, models small-4, d = 64" in simulated
    for changed, words in (
        ({"dataset": "pflib", "partition": "dirichlet"}, "pflib, clients and splits of its files"),
        ({"dataset": "flwr-datasets", "partition": "natural"}, "flwr-datasets, natural"),
        ({"partition": "natural", "partitioner": "IidPartitioner"}, "digits, natural(IidPartitioner)"),
        ({"partition": "iid"}, "digits, iid"),
    ):
        configuration = {**about.configuration, **changed}
        line = show.settings_line(about.model_copy(update={"configuration": configuration}), 3)
        assert f"fedproto on {words}, 2 clients, models" in line


def test_a_count_that_is_not_known_has_a_reason_below(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)])
    assert "The paper's scalars are unknown" not in pbfl("show", run).stdout
    edit(run / "partition.json", paper_scalars=None)
    text = pbfl("show", run).stdout
    assert ["by the paper's formula, all clients", "-"] in cells_of(text)
    assert text.count("The paper's scalars are unknown without a formula") == 1


def test_memory_that_is_unknown_is_no_cost_of_zero(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5, peak_mb=0.0)])
    assert json.loads(pbfl("show", run, "--format", "json").stdout)["costs"]["peak-mb"] is None
    text = pbfl("show", run).stdout
    assert " 0 MB " not in text
    assert "GPU" not in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_between_two_runs_a_signal_is_an_interruption(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def cleaning_up() -> Iterator[None]:
        """Clean up, while the signal comes once more, as timeout sends it."""
        try:
            yield
        finally:
            signal.raise_signal(number)
            print("cleaned up")

    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(typer.Exit) as ended, running(INTERRUPTED_NOTE), cleaning_up():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert ended.value.exit_code == INTERRUPTED
    assert capsys.readouterr().out == f"cleaned up\n{INTERRUPTED_NOTE}\n"


@pytest.mark.parametrize("words", ["list keys", "show run --format csv", "watch run --once"])
def test_what_nobody_reads_is_no_error(words: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run", [entry(1, 0.5, 0.25)])
    assert unread(*words.split()) == (0, "")


def test_runs_are_made_though_nobody_reads_their_lines(tmp_path: Path) -> None:
    words = ["--engine", "processes", "--workers", 1, "--out", tmp_path / "sweep"]
    small = sets("num-clients=2", "num-server-rounds=1", "max-samples=100", "seed=0,1")
    assert unread("sweep", *words, *small) == (0, "")
    for seed in (0, 1):
        assert len(RunDirectory(tmp_path / "sweep" / f"all-seed{seed}").round_records()) == 1
    assert (tmp_path / "sweep" / "table.md").exists()


def test_show_for_other_programs(tmp_path: Path) -> None:
    failures = [{"client": 1, "reason": "out of paper"}]
    first, last = entry(1, 0.25, None, accuracy_of_round=0), entry(2, 0.5, 0.75, accuracy_of_round=1)
    final = {"accuracy": entry(2, 0.625, 0.875)["accuracy"], "failures": []}
    run = write_run(tmp_path / "run", [first, {**last, "failures": failures, "final": final}])
    about = edit(run / "run.json", moment="before")
    one, other = about["clients"]
    edit(run / "run.json", clients=[one, {**other, "name": "site-\x1b[31mb"}])

    def line(number: int, *correct: dict[str, int]) -> dict[str, Any]:
        return columns(number, list(correct), num_train=[6, 5], num_test=[2, 4])

    clients = [
        line(1, {"head": 1}, {"head": 0}),
        {**line(2, {"head": 1, "global": 2}, {}), "final": line(2, {"head": 2}, {"head": 3})},
        line(3, {"head": 0}, {"head": 0}),  # torn off before its line of rounds.jsonl
    ]
    write_lines(run / "clients.jsonl", *clients)
    found = json.loads(pbfl("show", run, "--format", "json").stdout)
    assert found["settings"]["configuration"] == about["configuration"]
    assert (found["settings"]["primary_predictor"], found["settings"]["moment"]) == ("global", "before")
    assert found["rounds"] == {"done": 2, "wanted": 2}
    scored = found["accuracies"]["head"]
    assert (scored["last"]["round"], scored["last"]["weighted"]) == (2, 0.625)
    assert (scored["best"]["weighted"], scored["validation-chosen"]) == (0.625, None)
    assert found["costs"]["bytes"]["up"] == {"payload": 200, "with-reports": 220, "with-flower": 400}
    assert (found["costs"]["scalars-by-the-papers-formula"], found["costs"]["seconds"]) == (36.0, 2.0)
    assert found["majority"] == 0.7512
    assert found["failures"] == [{"round": 2, **failures[0]}]
    shown = [line.split() for line in pbfl("show", run).stdout.splitlines()]
    assert ["0", "cnn4", "cpu", "6", "2", "100.00"] in shown  # of the last scoring, after round 2
    lines = pbfl("show", run, "--format", "csv").stdout.splitlines()
    assert lines == [
        "round,client,name,architecture,num_train,num_test,predictor,correct,accuracy",
        "0,0,,cnn4,6,2,head,1,0.500000",
        "0,1,site-b,cnn4,5,4,head,0,0.000000",
        "1,0,,cnn4,6,2,head,1,0.500000",
        "1,0,,cnn4,6,2,global,2,1.000000",
        "2,0,,cnn4,6,2,head,2,1.000000",
        "2,1,site-b,cnn4,5,4,head,3,0.750000",
    ]
    begun = write_run(tmp_path / "begun", [], **{"num-server-rounds": 3})
    found = json.loads(pbfl("show", begun, "--format", "json").stdout)
    assert (found["rounds"], found["costs"]) == ({"done": 0, "wanted": 3}, None)
    assert len(pbfl("show", begun, "--format", "csv").stdout.splitlines()) == 1


def test_runs_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["rate=1e-05", "rate=0.01-seed2", "rate=0.01-seed10", "rate=0.05", "rate=0.1", "rate=5"]
    for name in reversed(names):
        write_run(tmp_path / name, [entry(1, 0.5, 0.25)])
    listed = [Path(line.split()[0]).name for line in pbfl("show", tmp_path).stdout.splitlines()[2:]]
    assert listed == names


def test_many_runs_are_a_list(tmp_path: Path) -> None:
    lines = [entry(1, 0.5, 0.25), entry(2, 0.5, 0.75)]
    for seed in (2, 10):
        write_run(tmp_path / "runs" / "mine" / f"A-seed{seed}", lines, seed=seed)
    write_run(tmp_path / "runs" / "b", lines[:1], method="local", **{"num-server-rounds": 4})
    failed = write_run(tmp_path / "runs" / "c", [], **{"num-server-rounds": 4})
    (failed / "error.txt").write_text("no")
    damaged = write_run(tmp_path / "runs" / "deep" / "er" / "d", lines)
    (damaged / "run.json").write_text("{")
    (tmp_path / "runs" / "mine" / "table.md").write_text("")
    result = pbfl("list", "runs")
    assert result.exit_code == 0
    found = [line.split() for line in result.stdout.splitlines()]
    assert found[0] == ["run", "method", "dataset", "seed", "rounds", "primary", "predictor", "last", "state"]
    assert found[2:] == [
        ["runs/b", "local", "digits", "0", "1/4", "global", "25.00", "stopped"],
        ["runs/c", "fedproto", "digits", "0", "0/4", "global", "-", "failed"],
        ["runs/deep/er/d", "-", "-", "-", "0/0", "-", "-", "unreadable"],
        ["runs/mine/A-seed2", "fedproto", "digits", "2", "2/2", "global", "75.00", "finished"],
        ["runs/mine/A-seed10", "fedproto", "digits", "10", "2/2", "global", "75.00", "finished"],
    ]
    assert pbfl("show", "runs").stdout == result.stdout == pbfl("list", "runs", "runs").stdout
    objects = json.loads(pbfl("show", "runs/mine", "--format", "json").stdout)
    assert [(each["seed"], each["last"], each["state"]) for each in objects] == [
        (2, 0.75, "finished"),
        (10, 0.75, "finished"),
    ]
    text = pbfl("show", "runs/mine", "--format", "csv").stdout
    assert text.splitlines()[1] == "runs/mine/A-seed2,fedproto,digits,2,2,2,global,0.75,finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("words", [["--help"], ["list", "keys"]])
def test_words_that_find_no_room_are_a_line(words: list[str]) -> None:
    assert without_room(*words) == (1, "error: a file or what is printed: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("words", [["show"], ["show", "--format", "csv"], ["watch", "--once"]])
def test_results_that_find_no_room_do_not_pass_for_a_run_that_cannot_be_read(
    words: list[str], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    assert without_room(*words, run) == (1, "error: a file or what is printed: No space left on device\n")


@pytest.mark.skipif(os.name == "nt", reason="Windows does not remove a directory in use")
def test_a_removed_current_directory_is_a_line(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    command = f'rmdir ../gone; "{sys.executable}" -m pbfl_flwr.cli run'
    done = subprocess.run(["sh", "-c", command], cwd=gone, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (
        1,
        "error: the current directory was removed; must be one that exists\n",
    )


def test_a_path_that_the_system_refuses_is_a_line(tmp_path: Path) -> None:
    far = tmp_path / ("x" * 300)
    command = [sys.executable, "-m", "pbfl_flwr.cli", "check-data", str(far)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, f"error: {far}: File name too long\n")


def test_a_closed_output_is_no_error() -> None:
    command = f'"{sys.executable}" -m pbfl_flwr.cli list methods >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_letters_that_the_output_lacks_are_written_as_their_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "K\u00e4fer", [entry(1, 0.5, 0.5)])
    command = [sys.executable, "-m", "pbfl_flwr.cli", "show", str(run)]
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=narrow, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/K\\xe4fer\n")


def test_runs_that_the_system_refuses_are_unreadable_in_lists_and_one_line_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("closed", "locked", "mine", ".closed"):
        write_run(tmp_path / "runs" / name, [entry(1, 0.5, 0.5)])

    def refuse(name: str, folders: set[str]) -> None:
        method = getattr(Path, name)

        def refusing(path: Path, *arguments: Any, **keywords: Any) -> Any:
            if folders & {*path.parts} and path.name not in folders:
                raise PermissionError(13, "Permission denied", str(path))
            return method(path, *arguments, **keywords)

        monkeypatch.setattr(Path, name, refusing)

    real = os.open

    def opening(path: Any, *arguments: Any, **keywords: Any) -> int:
        if {"closed", "locked"} & {*Path(path).parts[:-1]}:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", opening)
    refuse("read_bytes", {"closed", "locked"})
    refuse("stat", {"closed", ".closed"})  # may not even be entered
    for words in (["show", "runs/locked"], ["watch", "runs/locked", "--once"], ["report", "runs/locked"]):
        line = refused(*words)
        assert line.startswith("error: ")
        assert line.endswith("runs/locked/run.json cannot be read (Permission denied)")
    assert "left out, unreadable: runs/closed, runs/locked\n" in pbfl("report", "runs").stdout
    lines = [line.split() for line in pbfl("list", "runs").stdout.splitlines()[2:]]
    assert [(line[0], line[-1]) for line in lines] == [
        ("runs/closed", "unreadable"),
        ("runs/locked", "unreadable"),
        ("runs/mine", "finished"),
    ]
    monkeypatch.setattr(Path, "iterdir", lambda path: (path / "run.json").read_bytes())
    assert "cannot be read (Permission denied)" in refused("list", "runs", "runs/closed")


def test_round_line() -> None:
    def line_of(entry: dict[str, Any], num_rounds: int, num_clients: int = 0) -> str:
        return round_line(rounds_of(entry)[0], num_rounds, "global", num_clients)

    assert line_of(entry(7, 0.25, 0.8125), 20) == (
        "round  7/20  accuracy 81.2 % (global, weighted)  loss 0.250  up 400 B  down 800 B  2.0 s"
    )
    assert "25.0 % (head, weighted) before training" in line_of(entry(1, 0.25, None, accuracy_of_round=0), 9)
    assert "75.0 % (global, weighted, over 1 of 2)" in line_of(over(1, entry(1, 0.5, 0.75)), 9, 2)
    assert "75.0 % (global, weighted)" in line_of(entry(1, 0.5, 0.75), 9, 2)


def test_many_clients_that_fail_alike_are_one_line() -> None:
    def failures(*clients: int) -> list[dict[str, Any]]:
        return [{"client": client, "reason": "gone"} for client in clients]

    few = [entry(1, 0.5, 0.5, failures=failures(0, 1)), entry(2, 0.5, 0.5, failures=failures(1))]
    assert list(show.failure_lines(rounds_of(*few))) == [
        "client 0 failed in round 1: gone",
        "client 1 failed in 2 rounds, first 1: gone",
    ]
    mixed = [entry(3, 0.5, 0.5, failures=failures(0)), entry(1, 0.5, 0.5, failures=failures(9, 2))]
    assert list(show.failure_lines(rounds_of(*mixed))) == [
        "client 0 failed in round 3: gone",
        "client 2 failed in round 1: gone",
        "client 9 failed in round 1: gone",
    ]
    odd = {"client": 1, "reason": "boom"}
    many = [entry(1, 0.5, 0.5, failures=[*failures(*range(7)), odd])]
    assert list(show.failure_lines(rounds_of(*many))) == [
        "7 clients (0, 1, 2, 3, 4 and 2 more) failed in round 1: gone",
        "client 1 failed in round 1: boom",
    ]


def test_figures() -> None:
    sizes = {
        999: "999 B",
        999.6: "1.0 kB",
        41_234: "41.2 kB",
        999_960: "1.0 MB",
        3.1e6: "3.1 MB",
        2.5e12: "2500.0 GB",
    }
    assert {size: kilobytes(size) for size in sizes} == sizes
    assert [clock(s) for s in (42.4, 59.6, 3723)] == ["0:42", "1:00", "1:02:03"]


def test_a_resumed_run_keeps_what_changes_results(tmp_path: Path) -> None:
    keys = {"tinyproto.base": "fedtgp", "cps-dim": 2}
    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)], method="tinyproto", **keys)
    requested = configuration.resumed(run, configuration.RequestedKeys({"num-server-rounds": 30}))
    settings = configuration.check(requested)
    assert settings.run.resume
    assert settings.run.num_server_rounds == 30
    assert settings.method_section["base"] == "fedtgp"
    # What may differ, or is as it was, is not to blame.
    wanted: dict[str, Scalar] = {
        "num-server-rounds": 30,
        "seed": 4,
        "cps-dim": 2,
        "collect": "auto",
        "threads": 1,
    }
    wanted["batch-size"] = 5
    with pytest.raises(PbflError, match=r"^seed = 4, batch-size = 5: cannot change when a run is resumed"):
        configuration.resumed(run, configuration.RequestedKeys(wanted))
    with pytest.raises(PbflError, match=r"state-dir = '/elsewhere': .* where it is, in its own directory"):
        configuration.resumed(run, configuration.RequestedKeys({"state-dir": "/elsewhere"}))


def test_a_run_is_not_resumed_for_fewer_rounds_than_it_has(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5), entry(2, 0.5, 0.5)])
    configuration.resumed(run, configuration.RequestedKeys({"num-server-rounds": 2}))
    said = refused("run", "--resume", run, "--set", "num-server-rounds=1")
    assert "num-server-rounds = 1: the run has 2 rounds already" in said


def test_a_finished_run_that_is_resumed_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(*arguments: object) -> int:
        raise AssertionError("nothing is to be started")

    monkeypatch.setattr("pbfl_flwr.experiments.execute.runner.simulate", simulate)
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.75), entry(2, 0.25, 0.5)])
    (run / "result.txt").write_text("f387460871ab\n")
    result = pbfl("run", "--resume", run)
    assert result.exit_code == 0
    assert "all rounds are finished; to run more: --set num-server-rounds=<more>" in result.stdout
    assert "result hash f387460871ab" in result.stdout
    (run / "result.txt").unlink()  # it was stopped before its end
    settings = configuration.check(configuration.resumed(run, configuration.gather(None, [])))
    assert not configuration.is_complete(RunDirectory(run), settings, 2)


def test_a_run_of_devices_is_no_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)], **{"num-server-rounds": 9})
    (run / "error.txt").write_text("round 2: 0 valid replies\n")
    text = pbfl("show", run).stdout
    assert f"1 of 9 rounds; resume with: pbfl run --resume {run}" in text
    assert "ended with: round 2: 0 valid replies" in text
    (run / "error.txt").unlink()
    clients = json.loads((run / "run.json").read_text())["clients"]
    edit(run / "run.json", clients=[{**client, "simulated": False} for client in clients])
    said = refused("run", "--resume", run)
    assert "is a run of devices" in said
    assert "resume it with flwr run, with the same configuration" in said
    monkeypatch.chdir(tmp_path)
    assert f"run-dir='{run}' and resume=true" in pbfl("show", "run").stdout
    (run / "nodes.json").write_text("{}")
    assert f"resume it with pbfl deploy local --resume {run}" in refused("run", "--resume", run)
    assert f"resume with: pbfl deploy local --resume {run}" in pbfl("show", run).stdout
    assert f"resume with pbfl deploy local --resume {run}" in pbfl("watch", run, "--once").stdout


def test_runs_that_begin_in_the_same_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = configuration.check(configuration.gather(None, []))
    first = configuration.run_directory(settings, None)
    name = first.name
    made = [configuration.create_directory(first, chosen=False) for _ in range(3)]
    assert [path.name for path in made] == [name, f"{name}-2", f"{name}-3"]
    assert all(path.is_dir() for path in made)
    assert configuration.create_directory(first, chosen=True) == first


def test_what_is_to_be_typed_can_be_typed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "an odd 'name", [entry(1, 0.25, 0.5)])
    said = refused("run", "--run-dir", run)
    assert f"already holds a run; choose another one, or --resume {quote(str(run))}" in said
    assert resume_command(run, RunDirectory(run).record()) == f"pbfl run --resume {quote(str(run))}"


def test_certificates_and_keys_say_what_goes_where(tmp_path: Path) -> None:
    result = pbfl("certs", "--out", tmp_path / "s", "--host", "fl.example.org", "--days", 90)
    assert result.exit_code == 0
    assert "certificate for fl.example.org, valid until" in result.stdout
    assert [line.split(":")[0].strip() for line in result.stdout.splitlines()[1:]] == [
        str(tmp_path / "s" / name) for name in ("ca.pem", "server.pem", "server.key", "ca.key")
    ]
    assert pbfl("certs", "--out", tmp_path / "s", "--host", "fl.example.org").exit_code == 2
    assert pbfl("certs", "--out", tmp_path / "s", "--host", "fl.example.org", "--renew").exit_code == 0
    result = pbfl("keys", "--out", tmp_path / "k", "a", "b")
    assert result.exit_code == 0
    assert f"{tmp_path / 'k' / 'b'}: stays on device b" in " ".join(result.stdout.split())
    assert "b.pub: copy to the server, into a folder for pbfl deploy register" in " ".join(
        result.stdout.split()
    )
    assert pbfl("keys", "--out", tmp_path / "k", "b").exit_code == 2


def test_who_cannot_be_exported_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    assert "holds no client ²" in refused("export", run, "--client", "²", "--out", tmp_path / "out")


@pytest.mark.parametrize("words", ["show", "watch --once", "report"])
def test_a_damaged_run_is_one_line(tmp_path: Path, words: str) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    (run / "rounds.jsonl").write_bytes(b"{}\n")
    said = refused(*words.split(), run)
    assert said.startswith(f"error: {run / 'rounds.jsonl'}")
    assert "is damaged, or was written by another version: accuracy: " in said


def test_a_run_says_over_how_many_clients_its_accuracies_are(tmp_path: Path) -> None:
    said = "Accuracies that do not cover all participating clients"
    assert said not in pbfl("show", write_run(tmp_path / "all", [entry(1, 0.5, 0.5)])).stdout
    few = write_run(tmp_path / "few", [over(1, entry(1, 0.5, 0.5), "head")])
    assert f"{said}: head over 1 of 2." in pbfl("show", few).stdout
    away = over(1, entry(2, 0.75, 0.5), "head")  # one client failed
    best = write_run(tmp_path / "best", [entry(1, 0.5, 0.5), away, entry(3, 0.5, 0.5)])
    assert f"{said}: head over 1 of 2 in the best round." in pbfl("show", best).stdout


def test_a_resumed_run_cannot_be_told_to_go_elsewhere(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], **{"num-server-rounds": 2})
    said = "a resumed run stays in its directory; give one of the two"
    assert refused("run", "--resume", run, "--set", "run-dir=other") == f"error: --resume and run-dir: {said}"
    assert pbfl("run", "--resume", run, "--set", f"run-dir={run}", "--dry-run").exit_code == 0


def test_no_shell_need_expand_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None does in --option=~/x."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert pbfl("keys", "--out=~/k", "site").exit_code == 0
    assert pbfl("certs", "--out=~/c", "--host", "fl.example.org").exit_code == 0
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"k", "c"}
    findings = json.loads(pbfl("doctor", "--key=~/k/site", "--json").stdout)
    assert next(each["status"] for each in findings if each["what"] == "key") == "ok"
    assert not (tmp_path / "~").exists()
    run = write_run(tmp_path / "~me/run", [entry(1, 0.5, 0.5)])
    assert str(run.relative_to(tmp_path)) in pbfl("show", "./~me/run").stdout
    assert "there is no user" not in pbfl("watch", "./~me/run", "--once").output
    assert pbfl("run", "--dry-run", "--resume", "./~me/run", "--set", "num-server-rounds=2").exit_code == 0


def test_resuming_writes_nowhere_else_because_the_run_says_so(tmp_path: Path) -> None:
    """Somebody else may have written the directory."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    keys = {"num-server-rounds": 2}
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], **keys, **{"state-dir": str(elsewhere)})
    given = f"--set state-dir={elsewhere}"
    said = f"error: '{run}': its clients keep their state elsewhere; if that is right: {given}"
    assert refused("run", "--resume", run) == said
    back = write_run(
        tmp_path / "back", [entry(1, 0.5, 0.5)], **keys, **{"state-dir": str(run / "../elsewhere")}
    )
    assert "its clients keep their state elsewhere" in refused("run", "--resume", back)
    assert f"pbfl run --resume {run} {given}" in pbfl("show", run).stdout
    assert pbfl("run", "--resume", run, *given.split(), "--dry-run").exit_code == 0

    linked = write_run(tmp_path / "linked", [entry(1, 0.5, 0.5)], **keys)
    (linked / "clients").symlink_to(elsewhere)
    must = "is a link; must be a folder of the run itself, which writes there"
    assert refused("run", "--resume", linked) == f"error: '{linked / 'clients'}' {must}"
    (linked / "clients").unlink()
    (linked / "clients").mkdir()
    (linked / "clients/e").symlink_to(elsewhere)
    assert refused("run", "--resume", linked) == f"error: '{linked / 'clients/e'}' {must}"
    (linked / "clients/e").unlink()
    within = write_run(
        tmp_path / "within", [entry(1, 0.5, 0.5)], **keys, **{"state-dir": str(tmp_path / "within/states")}
    )
    (within / "states").mkdir()
    (within / "states/e").symlink_to(elsewhere)
    assert refused("run", "--resume", within) == f"error: '{within / 'states/e'}' {must}"
    (linked / "mlruns").symlink_to(elsewhere)
    assert refused("run", "--resume", linked) == f"error: '{linked / 'mlruns'}' {must}"
    (linked / "mlruns").unlink()
    (linked / "mlruns/1/2/metrics").mkdir(parents=True)
    (linked / "mlruns/1/2/metrics/trained").symlink_to(elsewhere / "made")
    assert refused("run", "--resume", linked) == f"error: '{linked / 'mlruns/1/2/metrics/trained'}' {must}"
    (linked / "mlruns/1/2/metrics/trained").unlink()
    (linked / "notes").symlink_to(elsewhere)  # nothing is written there
    assert pbfl("run", "--resume", linked, "--dry-run").exit_code == 0
    (linked / ".lock").unlink(missing_ok=True)
    (linked / ".lock").symlink_to(elsewhere / "made")
    failed = pbfl("run", "--resume", linked)
    assert failed.exit_code == 1
    assert f"the run failed: {linked} cannot be written (Too many levels of symbolic links)" in failed.output
    assert not [*elsewhere.iterdir()]


def test_a_run_cannot_steer_the_terminal(tmp_path: Path) -> None:
    reason = "\x1b]0;title\x07\x1b[2Jgone"
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5, failures=[{"client": 1, "reason": reason}])])
    for command in (["show", run], ["watch", run, "--once"]):
        result = pbfl(*command)
        assert "client 1 failed" in result.stdout
        assert ": ]0;titlegone" in result.stdout
        assert "\x1b" not in result.stdout
    assert "\x1b" not in pbfl("show", tmp_path / "\x1b[2Jnowhere").stderr


@pytest.mark.parametrize("content", [b"{", b'{"nodes": [{}], "secure": true}'])
def test_resuming_with_damaged_supernodes_is_one_line(tmp_path: Path, content: bytes) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    (run / "nodes.json").write_bytes(content)
    assert f"{run / 'nodes.json'} is damaged" in refused("deploy", "local", "--resume", run)


def test_the_supernodes_of_a_moved_run_find_their_states(tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    write_run(before, [entry(1, 0.5, 0.5)], **{"run-dir": str(before), "num-server-rounds": 2})
    nodes = local_federation.complete([{"state-dir": "/elsewhere"}], 2, before / "clients")
    (before / "nodes.json").write_text(json.dumps({"nodes": nodes, "secure": True}))
    before.rename(now)
    found = [node["state-dir"] for node in deployment.resumed(now, []).nodes]
    assert found == ["/elsewhere", str(now / "clients" / "node-1")]


def test_a_deployment_in_a_directory_in_use_leaves_its_supernodes_alone(tmp_path: Path) -> None:
    (nodes := tmp_path / "nodes.json").write_text("of the run that uses it")
    node: dict[str, Scalar] = {"client-id": 0, "state-dir": "/elsewhere"}
    other = deployment.Plan(tmp_path, {}, parse({"num-clients": 1}), [node], secure=False)
    with lock_of(tmp_path), pytest.raises(RunRefused, match="in use by another run"):
        deployment.start(tmp_path, other, terminal())
    assert nodes.read_text() == "of the run that uses it"


@pytest.mark.parametrize("command", ["run", "deploy local"])
def test_resuming_a_run_in_use_is_refused(command: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = write_run(path, [entry(1, 0.5, 0.5)], **{"run-dir": str(path), "num-server-rounds": 2})
    if command == "deploy local":
        nodes = local_federation.complete([], 2, run / "clients")
        (run / "nodes.json").write_text(json.dumps({"nodes": nodes, "secure": False}))
    with lock_of(run):
        assert "is in use by another run" in refused(*command.split(), "--resume", run)


@pytest.mark.parametrize(
    "words", ["compare all-methods-fashion-mnist", "reproduce fedcpd-table1", "sweep --set seed=0,1"]
)
def test_commands_of_several_runs_take_workers(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(planned: object, resources: Resources, loaded: object) -> None:
        raise PbflError(f"{resources.workers} workers, engine: {resources.engine}")

    monkeypatch.setattr(planned_runs, "preflight", told)
    monkeypatch.setattr(reproduce, "absent", lambda planned: {})  # Fashion-MNIST, where it is not installed
    done = pbfl(*words.split(), "--workers", 3, "--engine", "flower")
    assert done.exit_code == 2
    assert "3 workers, engine: flower" in done.output
