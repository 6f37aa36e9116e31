"""Processes of one's own: none is left, and nobody else's is touched."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.deploy import processes, superlink, watchdog
from pbfl_flwr.flower.deploy.processes import Processes, free_port
from pbfl_flwr.flower.deploy.superlink import ManagedSuperLink

pytestmark = pytest.mark.skipif(os.name != "posix", reason="has no process groups")
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
LEAVES_A_CHILD = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
)


def test_process_group_is_ended_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its leader was waited for its number may be somebody else's."""
    ended: list[int] = []
    original = watchdog.end_group

    def ending(group: int, reap: Any) -> None:
        ended.append(group)
        original(group, reap)

    monkeypatch.setattr(watchdog, "end_group", ending)
    processes = Processes()
    with (tmp_path / "log").open("wb") as log:
        first = processes.start([sys.executable, "-c", LEAVES_A_CHILD], tmp_path, os.environ, log)
        second = processes.start(SLEEP, tmp_path, os.environ, log)
    first.wait(30)
    processes.sweep()
    assert ended == [first.pid]
    with pytest.raises(ProcessLookupError):
        os.killpg(first.pid, 0)  # its child, too
    processes.close()
    assert ended == [first.pid, second.pid]
    assert second.returncode is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_is_known_when_a_signal_comes_while_it_is_started(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            forked.append(self)
            signal.raise_signal(number)

    known = Processes()
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(number, signal.default_int_handler)
    try:
        with (tmp_path / "log").open("wb") as log, pytest.raises(KeyboardInterrupt):
            known.start(SLEEP, tmp_path, os.environ, log)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    known.close()
    assert [process.returncode for process in forked] == [-signal.SIGTERM]


def sleeping() -> subprocess.Popen[bytes]:
    """Start a process that is collected as soon as it ends; until then its group would exist."""
    process = subprocess.Popen(SLEEP, start_new_session=True)
    threading.Thread(target=process.wait, daemon=True).start()
    return process


def ignores_sigterm(pid: int) -> bool:
    ignored = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line)
    return bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_watchdog_ignores_sigterm_and_leaves_ended_groups_alone() -> None:
    """A cluster sends SIGTERM to every process of a job."""
    ended, other = sleeping(), sleeping()
    command = [sys.executable, "-I", watchdog.__file__]
    watching = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
    while not ignores_sigterm(watching.pid):
        time.sleep(0.05)
    watching.terminate()
    # Its input ends without a word: whoever wrote it is gone.
    watching.communicate(f"{ended.pid}\n{other.pid}\n-{ended.pid}\n-99999\n", timeout=30)
    try:
        assert watching.returncode == 0
        assert other.wait(30) < 0
        assert ended.poll() is None
    finally:
        for process in (ended, other):
            process.kill()
            process.wait()


def test_the_process_that_serves_rounds_is_started_last(tmp_path: Path) -> None:
    """And ended first: else it completes its round without the clients that have ended."""
    started: list[str] = []

    class Link(ManagedSuperLink):
        def _options(self, address: str) -> list[str]:
            return []

        def _start(self) -> str:
            started.append("superlink")
            return "127.0.0.1:1"

        def _complete(self) -> None:
            started.append("supernodes")

        def _spawn(self, name: str, *arguments: str, **_: Any) -> Any:
            started.append(f"{name} {' '.join(arguments)}")

    with Link(tmp_path):
        assert started == [
            "superlink",
            "supernodes",
            "flower-superexec --insecure --runtime-api-address 127.0.0.1:1",
        ]


ENDS_SOON = "import time; time.sleep(0.3)"  # as a SuperLink that finds its port taken
SERVES = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere it cannot be told")
def test_another_superlink_that_takes_the_port_is_not_taken_for_the_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Link(ManagedSuperLink):
        def _options(self, address: str) -> list[str]:
            return []

        def _spawn(self, name: str, *arguments: str, **_: Any) -> subprocess.Popen[bytes]:
            started.append(subprocess.Popen([*commands.pop(0), arguments[-1]]))
            return started[-1]

    commands = [[sys.executable, "-I", "-c", code] for code in (SERVES, ENDS_SOON)]
    started: list[subprocess.Popen[bytes]] = []
    port = free_port()
    monkeypatch.setattr(superlink, "free_port", lambda: port)
    link = Link(tmp_path)
    link._scratch = tmp_path
    (tmp_path / "home").mkdir()
    try:
        assert link._start() == f"127.0.0.1:{port}"
        assert link._start() is None
    finally:
        started[0].kill()
        started[0].wait()


def test_watchdog_ends_the_last_one_first() -> None:
    slow = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit()))"
    server = subprocess.Popen(
        [*SLEEP[:2], f"{slow}; print(flush=True); {SLEEP[2]}"], stdout=-1, start_new_session=True
    )
    client = subprocess.Popen(SLEEP, start_new_session=True)
    assert server.stdout is not None
    server.stdout.readline()
    order: list[int] = []
    waiting = [
        threading.Thread(target=lambda each=each: order.append((each.wait(), each.pid)[1]))
        for each in (server, client)
    ]
    for thread in waiting:
        thread.start()
    subprocess.run(
        [sys.executable, "-I", watchdog.__file__],
        input=f"{client.pid}\n{server.pid}\n",
        text=True,
        timeout=30,
    )
    for thread in waiting:
        thread.join(30)
    assert order == [server.pid, client.pid]


def test_processes_end_without_their_watchdog(tmp_path: Path) -> None:
    """Also the last word to it, which nobody reads."""
    processes = Processes()
    with (tmp_path / "log").open("wb") as log:
        started = processes.start(SLEEP, tmp_path, os.environ, log)
    assert processes._watchdog is not None
    processes._watchdog.kill()
    processes._watchdog.wait()
    processes.close()
    assert started.returncode is not None


@pytest.mark.parametrize(
    ("said", "code", "reason"),
    [
        (
            json.dumps(
                {"success": False, "error-message": "Using SuperLink: x (y:1)\n Listing\n\nNot there.\n"}
            ),
            0,
            "Not there.",
        ),
        ("Usage: flwr\n\nno such command\nx", 2, "no such command x"),
        ("", 3, "exit code 3"),
        (
            "Exit Code: 5\nNo key\n\nFor more information, visit: <https://flower.ai/5.html>",
            1,
            "Exit Code: 5 No key",
        ),
    ],
)
def test_what_flower_refuses_is_one_line(
    said: str, code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flower = tmp_path / "flwr"
    flower.write_text(f"#!{sys.executable}\nprint({said!r})\nraise SystemExit({code})\n")
    flower.chmod(0o755)
    monkeypatch.setattr(processes, "executable", lambda name: str(tmp_path / name))
    with pytest.raises(PbflError) as refused:
        processes.flwr(["supernode", "list"])
    assert str(refused.value) == f"flwr supernode: {reason}"
