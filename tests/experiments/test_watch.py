"""Watching: what is shown is what the directory says, from before it exists until the run has ended."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from pbfl_flwr.experiments import status
from pbfl_flwr.experiments.execute import progress
from pbfl_flwr.experiments.execute.progress import follow
from pbfl_flwr.runs.directory import ERROR, RESULT, SERVER_LOCK, WAITING, RunDirectory
from pbfl_flwr.runs.locks import RUN_LOCK, claim, lock_of
from tests.small_runs import HASH, edit, entry, pbfl, printed, records, terminal, write_run


def shown(view: status.RunStatus) -> str:
    status.show_status(view, console := terminal())  # wide enough for a path of any length
    return "\n".join(printed(console))


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    view = status.snapshot(tmp_path / "later")
    assert view.state == "waiting"
    assert "does not exist yet" in shown(view)
    (tmp_path / "later").mkdir()
    assert "has no run.json yet" in shown(status.snapshot(tmp_path / "later"))


def test_the_pace_is_the_median_of_the_last_five_rounds(tmp_path: Path) -> None:
    slow, quick = {"total": 60.0}, {"total": 10.0}
    lines = [entry(n, 0.5, 0.5, seconds=slow if n < 7 else quick) for n in range(1, 10)]
    run = write_run(tmp_path / "run", lines, **{"num-server-rounds": 12})
    with lock_of(run):
        view = status.snapshot(run)
    assert view.state == "running"
    assert "9 of 12 rounds, 0:10 per round, 0:30 left" in shown(view)


def test_whom_the_server_waits_for_is_shown(tmp_path: Path) -> None:
    RunDirectory(tmp_path).set_waiting("waiting for nodes: 2 of 3 have joined, 61 s so far")
    assert "waiting for nodes: 2 of 3 have joined, 61 s so far" in shown(status.snapshot(tmp_path))
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], **{"num-server-rounds": 2})
    (run / WAITING).write_text("round 2: 1 of 2 have answered; waiting for client 1\x1b[2J, 60 s so far")
    with lock_of(run):
        assert "waiting for client 1, 60 s so far" in shown(status.snapshot(run))
    RunDirectory(run).set_waiting("")
    assert "waiting" not in shown(status.snapshot(run))


with_flock = pytest.mark.skipif(os.name != "posix", reason="locks are checked by flock")


@with_flock
@pytest.mark.parametrize("name", [RUN_LOCK, SERVER_LOCK])
def test_a_run_without_a_first_line_is_over_when_nobody_holds_its_lock(tmp_path: Path, name: str) -> None:
    with FileLock(tmp_path / name):
        assert status.snapshot(tmp_path).state == "waiting"
    (tmp_path / name).touch()
    view = status.snapshot(tmp_path)
    assert view.state == "stopped"
    assert "the run was stopped or killed before it began; start it again" in shown(view)
    with lock_of(tmp_path):  # it is started again
        assert status.snapshot(tmp_path).state == "waiting"


@with_flock
def test_a_run_is_over_when_nobody_holds_a_lock_of_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], **{"num-server-rounds": 5})
    for name in (RUN_LOCK, SERVER_LOCK):
        (run / name).touch()
        assert status.snapshot(run).state == "stopped"
    for name in (
        RUN_LOCK,
        SERVER_LOCK,
    ):  # of the command alone while it starts or ends, of the server without pbfl
        with FileLock(run / name):
            assert status.snapshot(run).state == "running"
    view = status.snapshot(run)
    text = shown(view)
    assert "1 of 5 rounds, 0:02 per round" in text
    assert "left" not in text
    assert f"no process works on it: it was stopped or killed; resume with pbfl run --resume {run}" in text
    RunDirectory(run).write_line(ERROR, "boom")
    assert "left" not in shown(status.snapshot(run))
    result = pbfl("watch", run, "--once")
    assert result.exit_code == 1
    done = write_run(tmp_path / "done", [entry(1, 0.5, 0.5)])
    (done / RUN_LOCK).touch()
    assert status.snapshot(done).state == "finished"
    (done / RESULT).unlink()  # it was killed after its last round
    assert status.snapshot(done).state == "stopped"
    assert f"1 of 1 rounds; resume with: pbfl run --resume {done}" in pbfl("show", done).stdout
    assert not pbfl("report", done, "--out", tmp_path / "r.html").exit_code


@with_flock
def test_looking_at_a_lock_refuses_nobody(tmp_path: Path) -> None:
    """Somebody who only looks has it for an instant; a run that begins waits that long."""
    import fcntl

    looked = (tmp_path / RUN_LOCK).open("w")
    fcntl.flock(looked, fcntl.LOCK_SH)
    threading.Timer(0.1, looked.close).start()
    claim(lock := lock_of(tmp_path), tmp_path)
    assert lock.is_locked
    lock.release()


@with_flock
def test_a_stopped_run_has_a_minute_to_be_gone_on_with(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], **{"num-server-rounds": 2})
    (run / RUN_LOCK).touch()
    seconds = iter(range(0, 1000, 25))
    assert follow(run, terminal(), 0.01, lambda: float(next(seconds))) == "stopped"
    assert next(seconds) == 100

    def somebody_else() -> None:
        time.sleep(0.2)
        with lock_of(run):
            time.sleep(0.2)
            RunDirectory(run).add_round(*records(2))
            RunDirectory(run).write_line(RESULT, HASH)

    other = threading.Thread(target=somebody_else)
    other.start()
    assert follow(run, terminal(), 0.05) == "finished"
    other.join()


@with_flock
def test_a_failed_run_has_a_minute_to_be_started_again(tmp_path: Path) -> None:
    """A server removes the error of the attempt before only once it has started."""
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], **{"num-server-rounds": 2})
    (run / ERROR).write_text("only 4 nodes joined\n")
    seconds = iter(range(0, 1000, 25))
    assert follow(run, terminal(), 0.01, lambda: float(next(seconds))) == "failed"
    assert next(seconds) == 100

    def started_again() -> None:
        time.sleep(0.2)
        with lock_of(run):
            (run / ERROR).unlink()
            time.sleep(0.2)
            (run / ERROR).write_text("0 valid replies\n")

    other, console = threading.Thread(target=started_again), terminal()
    other.start()
    assert follow(run, console, 0.05) == "failed"  # at once
    other.join()
    text = "\n".join(printed(console))
    assert text.index("ended with: only 4 nodes joined") < text.index("ended with: 0 valid replies")


def test_the_two_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5), entry(2, 0.5, 0.5)], **{"num-server-rounds": 2})
    assert status.snapshot(run).state == "finished"
    assert "2 of 2 rounds, finished" in shown(status.snapshot(run))
    (run / ERROR).write_text("round 3: 0 valid replies\n")
    assert (
        status.snapshot(run).state == "finished"
    )  # all rounds are there: a resumed run did not come further
    configuration = json.loads((run / "run.json").read_text())["configuration"]
    edit(run / "run.json", configuration={**configuration, "num-server-rounds": 3})
    view = status.snapshot(run)
    assert view.state == "failed"
    assert "ended with: round 3: 0 valid replies" in shown(view)


def test_it_prints_every_round_until_the_run_ends(tmp_path: Path) -> None:
    def somebody_else() -> None:
        time.sleep(0.2)
        made = write_run(tmp_path / "made", [entry(1, 0.5, 0.25)], **{"num-server-rounds": 2})
        run = RunDirectory(made.rename(tmp_path / "run"))  # a real run's files are there whole or not at all
        time.sleep(0.2)
        run.add_round(*records(2))
        run.write_line(RESULT, HASH)

    other = threading.Thread(target=somebody_else)
    other.start()
    console = terminal()
    assert follow(tmp_path / "run", console, 0.05) == "finished"
    other.join()
    lines = printed(console)
    assert "does not exist yet" in lines[0]
    assert [line.split("  ")[0] for line in lines[2:4]] == ["round 1/2", "round 2/2"]
    assert lines[-1] == "2 of 2 rounds, finished"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], **{"num-server-rounds": 2})
    with lock_of(run):
        result = pbfl("watch", run, "--once")
    assert result.exit_code == 0
    assert "1 of 2 rounds" in result.output
    (run / ERROR).write_text("no luck")
    monkeypatch.setattr(progress, "STOPPED_SECONDS", 0.5)
    followed = pbfl("watch", run)
    assert followed.exit_code == 1
    assert followed.stdout.endswith("ended with: no luck\n")


def test_a_directory_of_runs_is_not_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "table" / "run", [entry(1, 0.5, 0.5)])
    for directory in (tmp_path, tmp_path / "table"):
        for words in (["watch", directory], ["watch", directory, "--once"]):
            result = pbfl(*words)
            assert result.exit_code == 2
            assert (
                result.stderr
                == f"error: '{directory}' is a directory of runs; must be one of them, e.g. {run}\n"
            )
