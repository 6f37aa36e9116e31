"""What follows a run: the file that grows, and what is handed to Flower."""

import json
import os
import pty
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from pbfl_flwr.config import Scalar
from pbfl_flwr.experiments.execute import runner, several
from pbfl_flwr.experiments.execute.progress import Follower
from pbfl_flwr.experiments.execute.runner import interruptible
from pbfl_flwr.experiments.plan import configuration
from pbfl_flwr.experiments.plan.configuration import RequestedKeys
from pbfl_flwr.experiments.results import resume_words
from pbfl_flwr.flower.deploy.local_federation import Deployment
from pbfl_flwr.flower.deploy.processes import Processes, signals_ignored
from pbfl_flwr.flower.engines.placement import Resources, Slot
from pbfl_flwr.runs.directory import RunDirectory
from tests.small_runs import edit, entry, planned_of, printed, terminal, write_lines, write_run


def test_a_round_is_told_once_also_when_the_history_is_cut_and_made_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)])
    follower = Follower(run, 3, console := terminal())
    follower.update()
    history = run / "rounds.jsonl"

    def add(number: int, score: float) -> None:
        write_lines(history, entry(number, 0.25, score))
        follower.update()

    add(2, 0.625)
    with history.open("a") as file:
        file.write(json.dumps(entry(3, 0.25, 0.5))[:50])  # the run was killed while it wrote
    follower.update()
    history.write_text(history.read_text().splitlines()[0] + "\n")  # its checkpoint did not know round 2
    follower.update()
    add(2, 0.75)
    add(3, 0.875)
    lines = [line for line in printed(console) if "round " in line]
    assert [line.split("accuracy")[1].split("%")[0].strip() for line in lines] == ["62.5", "75.0", "87.5"]
    assert [line.split()[1] for line in lines] == ["2/3", "2/3", "3/3"], "though its record says 1"


def test_rounds_of_a_run_that_is_resumed_for_more_are_told_of_as_many(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)])
    follower = Follower(run, 0, console := terminal())
    follower.update()
    configuration = json.loads((run / "run.json").read_text())["configuration"]
    edit(run / "run.json", configuration={**configuration, "num-server-rounds": 4})
    write_lines(run / "rounds.jsonl", entry(2, 0.25, 0.5))
    follower.update()
    (line,) = [line for line in printed(console) if "round 2/" in line]
    assert line.split()[1] == "2/4"
    assert "left 0:0" in line


def test_a_score_is_over_those_who_have_joined_by_then(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)])
    follower = Follower(run, 3, console := terminal())
    follower.update()
    clients = json.loads((run / "run.json").read_text())["clients"]
    everybody = len(clients)
    edit(run / "run.json", clients=[*clients, {**clients[0], "client": everybody}])
    joins = {**entry(2, 0.25, 0.5), "joined": ["3"]}
    for scored in joins["accuracy"].values():
        scored["clients"] = everybody
    write_lines(run / "rounds.jsonl", joins)
    follower.update()
    assert f"over {everybody} of {everybody + 1})" in "\n".join(printed(console))


def test_what_a_run_says_of_its_rounds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], **{"num-server-rounds": 12})
    follower = Follower(run, 12, console := terminal(), "a")

    def told(*lines: dict[str, Any]) -> list[str]:
        write_lines(run / "rounds.jsonl", *lines)
        follower.update()
        return printed(console)

    assert told() == ["a: 2 clients (cnn4 x2) on cpu; inputs 1x16x16, K = 3, d = 4"]
    slow, quick = {"total": 60.0}, {"total": 10.0}
    lines = [entry(n, 0.25, 0.5, seconds=slow if n < 7 else quick, warnings=["late"]) for n in range(1, 10)]
    lines[8] |= {"failures": [{"client": 1, "reason": "boom"}, {"client": 0, "reason": "boom"}]}
    found = told(*lines)
    assert found[-2].endswith("10.0 s  left 0:30")  # three rounds, the median of the last five is 10 s
    assert found[-1] == "a:   2 clients (1, 0) failed: boom"
    assert found.count("a:   warning: late") == 1


def test_whom_the_server_waits_for_is_told_once(tmp_path: Path) -> None:
    run = RunDirectory(write_run(tmp_path / "run", [entry(1, 0.25, 0.5)]))
    run.set_waiting("left by a server that was killed")
    follower = Follower(run.path, 3, console := terminal())
    for line in ("left by a server that was killed", "", *["round 2: 61 s"] * 2, "round 2: 122 s", ""):
        run.set_waiting(line)
        follower.update()
    told = [line.strip() for line in printed(console) if "killed" in line or " s" in line]
    assert told == ["round 2: 61 s", "round 2: 122 s"]


@pytest.mark.parametrize(("keys", "threads"), [({}, 3), ({"threads": "auto"}, 3), ({"threads": 1}, 1)])
def test_a_run_says_how_many_threads_it_has(
    keys: dict[str, Scalar], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: dict[str, Any] = {}

    class Engine:
        def __init__(self, run_dir: Path) -> None: ...

        def submit(self, app: Path, config: dict[str, Scalar], clients: int, resources: Resources) -> str:
            handed.update(config)
            return "1"

    monkeypatch.setattr(runner, "FlowerSimulation", Engine)
    monkeypatch.setattr(runner, "follow_run", lambda link, submit, *others: int(submit()))
    resources = Resources(3, engine="flower")
    runner.simulate(tmp_path, tmp_path / "run", RequestedKeys(keys), resources, Console())
    assert handed == {"threads": threads, "run-dir": str(tmp_path / "run")}


def test_under_nohup_a_run_goes_on_without_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible(), signals_ignored():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


LOST = """
import signal, sys, time
from pathlib import Path
from pbfl_flwr.experiments.execute.runner import interruptible
signal.signal(signal.SIGHUP, signal.SIG_DFL)
try:
    with interruptible():
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("this goes nowhere", flush=True)
    Path(sys.argv[1]).write_text("cleared up")
"""


def test_a_lost_terminal_does_not_disturb_the_clearing_up(tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", LOST, str(tmp_path / "said")])
    while b"ready" not in os.read(terminal, 100):
        pass
    os.close(terminal)  # as when the connection breaks
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "said").read_text() == "cleared up"


@pytest.mark.parametrize(
    "fault",
    [KeyError("classes"), SystemExit("I leave"), FileNotFoundError(2, "No such file", "table.csv")],
)
def test_an_exception_of_a_methods_own_code_ends_its_run_alone(
    fault: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def federation() -> None:
        raise fault

    code = runner.run_in_this_thread(
        tmp_path / "run", federation, 1, console := terminal(), "pbfl run --resume run"
    )
    assert code == 1
    [line] = [line for line in printed(console) if line.startswith("the run failed: ")]
    assert line.startswith(f"the run failed: {type(fault).__name__}: ")
    assert "(test_runner.py:" in line
    assert ("Traceback" in capsys.readouterr().err) == (not isinstance(fault, OSError))


@pytest.mark.parametrize("during", [["enter"], ["submit"], ["wait"], ["wait", "stop"]])
@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_ends_with_a_line_whenever_it_comes(
    during: list[str], begun: bool, tmp_path: Path
) -> None:
    """Also while Flower starts, and a second one while the run is stopped."""
    met: list[str] = []

    class Link(Deployment):
        def __enter__(self) -> Self:
            meet("enter")
            return self

        def __exit__(self, *_: object) -> None: ...

        def ended(self) -> bool:
            meet("wait")
            return False

        def stop(self, run_id: str) -> None:
            meet("stop")

    def meet(step: str) -> str:
        met.append(step)
        if step in during:
            raise KeyboardInterrupt
        return "1"

    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)]) if begun else tmp_path / "run"
    link, submit = Link(run, []), partial(meet, "submit")
    assert runner.follow_run(link, submit, 3, console := terminal(), "pbfl --resume") == runner.INTERRUPTED
    told = "interrupted; resume with: pbfl --resume" if begun else "interrupted before the run began"
    assert printed(console)[-1] == told
    assert met[-1] == ("stop" if "wait" in during else during[0])


def test_a_run_interrupted_while_it_is_resumed_goes_on_with_the_keys_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)])
    given = ["num-server-rounds=9", "sinks=tensorboard,mlflow", "new-code=true"]
    requested = configuration.resumed(run, configuration.gather(None, given))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pbfl_flwr.flower.engines.local.run_here", interrupted)
    resources = Resources(cpus_per_client=2)
    runner.simulate(tmp_path, run, requested, resources, console := terminal())
    keys = "--set num-server-rounds=9 --set new-code=true --set sinks=tensorboard,mlflow"
    options = " ".join(resources.options)
    told = f"interrupted; resume with: pbfl run --resume {run} {keys} --set threads=2 {options}"
    assert "".join(printed(console)).endswith(told.strip())
    edit(run / "run.json", configuration=requested.values)
    assert resume_words(run, requested.values) == f"--resume {run}"


class EndedLink(Deployment):
    """A link whose run has ended, without any process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ended(self) -> bool:
        return True


def test_a_run_whose_superlink_was_killed_is_failed_and_can_be_resumed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)])
    (run / "flower.log").write_text(
        "round 1\n" + '2026 INFO [uvicorn.access] "POST /v1/runtime/x HTTP/1.1" 200\n' * 20
    )
    code = runner.follow_run(EndedLink(run, []), lambda: "1", 3, console := terminal(), "pbfl --resume")
    assert code == runner.FAILED
    told = printed(console)
    assert "the run failed: Flower's SuperLink ended during the run; the last lines of" in " ".join(told)
    assert told[-2:] == ["round 1", "1 rounds are saved; resume with: pbfl --resume"]


FULL = "round 2: 0 valid replies: client 0: a.safetensors cannot be written (No space left on device)"
REFUSED = "resuming needs 2 clients; missing: 0\nclient 0: its task has changed"
OTHER = "'classes'"


@pytest.mark.parametrize(
    ("text", "log", "own"),
    [
        (FULL, "INFO: round 1\n", True),  # the log is on the same disk
        (REFUSED, f"Traceback\npbfl_flwr.runs.directory.RunRefused: {REFUSED}\n", True),
        (OTHER, f"Traceback\nKeyError: {OTHER}\n", False),
    ],
)
def test_a_reason_that_flower_alone_knows_needs_no_log(
    text: str, log: str, own: bool, tmp_path: Path
) -> None:
    class Link(EndedLink):
        def outcome(self, run_id: str) -> tuple[str, str]:
            return "finished:failed", f"ServerApp failed with exception: {text}"

    run = write_run(tmp_path / "run", [entry(1, 0.25, 0.5)])
    (run / "flower.log").write_text(log)
    code = runner.follow_run(Link(run, []), lambda: "1", 3, console := terminal(), "pbfl --resume")
    assert code == runner.FAILED
    told = "\n".join(printed(console))
    assert told.endswith("\n1 rounds are saved; resume with: pbfl --resume")
    said = told.rpartition("the run failed: ")[2].splitlines()[:-1]
    assert said == text.splitlines() if own else said[-1] == log.splitlines()[-1]


@pytest.mark.parametrize("library", ["flwr.supercore.exit", "ray._private.worker"])
def test_the_exit_after_a_signal_is_no_error_of_the_method(library: str, tmp_path: Path) -> None:
    federation = partial(exec, "raise SystemExit(0)", {"__name__": library})
    with pytest.raises(SystemExit):
        runner.run_in_this_thread(tmp_path / "run", federation, 1, terminal(), "")


def test_a_run_that_cannot_be_started_leaves_no_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Processes] = []
    close = Processes.close

    def closing(processes: Processes) -> None:
        closed.append(processes)
        close(processes)

    monkeypatch.setattr(Processes, "close", closing)
    (planned,) = planned_of({"A": {}}, [], [0], [], tmp_path)
    with pytest.raises(FileNotFoundError):
        several._start(planned, ["/no/such/program"], Slot(1), Follower(planned.directory, 1, terminal()))
    assert len(closed) == 1
