"""pbfl clean: on what real runs leave behind."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from filelock import FileLock

from pbfl_flwr.experiments import cleanup
from pbfl_flwr.flower.engines.grid import federate
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.runs.client_store import ClientState, ClientStore
from pbfl_flwr.runs.directory import STATES_REMOVED, RunDirectory
from pbfl_flwr.runs.locks import lock_of
from tests.flower.engines.test_grid import KEYS
from tests.small_runs import edit, entry, pbfl, refused, write_lines

NOW = ("--older-than", "0d")
DAY = 86_400


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of three clients and two rounds."""
    run = tmp_path_factory.mktemp("made") / "run"
    federate(run, {**KEYS, "num-server-rounds": 2}, 3, Resources(workers=1))
    return run


@pytest.fixture
def runs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a copy of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    shutil.copytree(made, tmp_path / "runs" / "a")
    return tmp_path / "runs"


def tree(path: Path) -> dict[str, bytes | None]:
    """Return everything below a directory: the content of files, None for directories."""
    return {
        str(one.relative_to(path)): one.read_bytes() if one.is_file() else None for one in path.rglob("*")
    }


def states(run: Path) -> list[Path]:
    return sorted(run.glob("clients/**/*.safetensors"))


def change(run: Path, **keys: object) -> None:
    """Change the configuration in a run's books."""
    configuration = json.loads((run / "run.json").read_text())["configuration"]
    changed = {key.replace("_", "-"): value for key, value in keys.items()}
    edit(run / "run.json", configuration={**configuration, **changed})


def save(directory: Path, experiment: str, client: int | str, days: float) -> Path:
    """Write a device's state as it is written there, so many days ago."""
    store = ClientStore(directory / experiment, experiment, client, "cnn2")
    with store.locked():
        store.save(ClientState(1, 1, {}))
    for file in store.directory.iterdir():
        os.utime(file, (time.time() - days * DAY,) * 2)
    return store.path


def test_a_finished_run_can_be_shown_without_its_clients_states(runs: Path) -> None:
    before, size = tree(runs), sum(file.stat().st_size for file in states(runs / "a"))
    assert len(states(runs / "a")) == 3
    shown = pbfl("clean", *NOW)
    assert shown.exit_code == 0
    assert f"{size / 1000:.1f} kB  runs/a" in shown.stdout
    assert shown.stdout.splitlines()[-1] == f"would remove {size / 1000:.1f} kB; remove with --yes"
    assert tree(runs) == before

    removed = pbfl("clean", *NOW, "--yes")
    assert removed.stdout.splitlines()[-1] == f"removed {size / 1000:.1f} kB"
    gone = before.keys() - tree(runs).keys()
    assert gone == {name for name in before if name.startswith("a/clients/") or name == "a/clients"}
    assert tree(runs).keys() - before.keys() == {f"a/{STATES_REMOVED}"}
    assert pbfl("show", runs / "a").exit_code == 0
    wanted = ("--set", "num-server-rounds=3", "--engine", "processes")
    export = ("export", runs / "a", "--client", 0, "--out", runs / "out")
    for words in (("run", "--resume", runs / "a", *wanted), export):
        assert "its clients' states were removed by pbfl clean" in refused(*words)
    assert pbfl("clean", *NOW, "--yes").stdout.splitlines() == ["nothing to remove"]


def test_the_server_does_not_go_on_without_the_clients_states(runs: Path) -> None:
    pbfl("clean", *NOW, "--yes")
    config = RunDirectory(runs / "a").record().configuration
    more = {**config, "num-server-rounds": 3, "run-dir": str(runs / "a"), "resume": True}
    with pytest.raises(Exception, match="its clients' states were removed"):
        federate(runs / "a", more, 3, Resources(workers=1))


@pytest.mark.parametrize("user", ["engine", "server", "client"])
def test_what_is_in_use_is_left(runs: Path, user: str) -> None:
    run = runs / "a"
    before = tree(runs)
    lock = {
        "engine": lock_of(run),
        "server": FileLock(run / ".server.lock"),
        "client": FileLock(next(run.glob("clients/*/.client-00001.lock"))),
    }[user]
    lock.acquire()
    result = pbfl("clean", *NOW, "--yes")
    assert "left runs/a: is in use" in result.stdout
    assert "nothing to remove" in result.stdout
    assert tree(runs) == before


def test_states_of_a_run_that_can_go_on_stay(runs: Path) -> None:
    change(runs / "a", num_server_rounds=5)
    before = tree(runs)
    result = pbfl("clean", runs, *NOW, "--yes")
    assert f"left {runs}/a: the run can be resumed" in result.stdout
    assert tree(runs) == before


def test_files_of_others_stay(runs: Path) -> None:
    (folder,) = (runs / "a" / "clients").iterdir()
    (folder / "notes.txt").write_text("mine")
    shutil.copy(folder / "client-00000.safetensors", folder / "copy.safetensors")
    for name in ("a", "b"):  # of no run's clients
        save(runs / "models", name, 0, days=2)
    (runs / "other").mkdir()
    (runs / "other" / "run.json").write_text('{"configuration": {"x": 1}, "experiment": "e"}')
    (runs / "other" / "rounds.jsonl").write_text("")
    result = pbfl("clean", *NOW, "--yes")
    assert {path.name for path in folder.iterdir()} == {"notes.txt", "copy.safetensors"}
    assert len(list((runs / "models").glob("*/client-00000.safetensors"))) == 2
    assert "runs/other/run.json is damaged, or was written by another version" in result.stdout
    assert {path.name for path in (runs / "other").iterdir()} == {"run.json", "rounds.jsonl"}


def test_symbolic_links_are_not_followed(runs: Path, made: Path, tmp_path: Path) -> None:
    before, outside = tree(made), tmp_path / "outside.safetensors"
    (runs / "link").symlink_to(made)
    (folder,) = (runs / "a" / "clients").iterdir()
    (folder / "client-00000.safetensors").rename(outside)
    (folder / "client-00000.safetensors").symlink_to(outside)
    shutil.copytree(runs / "a", runs / "b", symlinks=True)
    shutil.rmtree(runs / "b" / "clients")
    (runs / "b" / "clients").symlink_to(made / "clients")
    pbfl("clean", *NOW, "--yes")
    assert tree(made) == before
    assert outside.exists()
    assert (folder / "client-00000.safetensors").is_symlink()
    assert [file.name for file in states(runs / "a")] == ["client-00000.safetensors"]
    assert (runs / "b" / "clients").is_symlink()


def test_older_than_is_by_the_newest_file(runs: Path) -> None:
    for file in states(runs / "a"):
        os.utime(file, (time.time() - 10 * DAY,) * 2)
    asked = ("clean", "--older-than")
    assert "kB  runs/a" in pbfl(*asked, "9d").stdout
    assert "left runs/a: changed more recently than --older-than" in pbfl(*asked, "11d").stdout
    os.utime(states(runs / "a")[1], (time.time() - 2 * DAY,) * 2)
    assert "left runs/a: changed more recently than --older-than" in pbfl(*asked, "9d").stdout
    assert "kB  runs/a" in pbfl("clean").stdout  # a day is the default


def test_clients_that_come_after_the_last_round_belong_to_the_run(runs: Path) -> None:
    change(runs / "a", new_clients=1, new_client_rounds=2)
    asked = ("clean", *NOW)
    write_lines(runs / "a" / "new-clients.jsonl", entry(3, 0.5, 0.5, after=2))
    assert "left runs/a: the run can be resumed" in pbfl(*asked).stdout
    write_lines(runs / "a" / "new-clients.jsonl", entry(4, 0.5, 0.5, after=2))
    experiment = json.loads((runs / "a" / "run.json").read_text())["experiment"]
    save(runs / "a" / "clients", f"{experiment}-new-2", 2, days=2)
    assert "kB  runs/a" in pbfl(*asked).stdout
    pbfl(*asked, "--yes")
    assert not (runs / "a" / "clients").exists()


def test_a_device_keeps_its_newest_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # not where somebody has runs of their own
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    state = tmp_path / "home" / "state"
    oldest_run, old_run, newest_run = (f"{'0' * 16}-{number:08x}" for number in range(3))
    old, older = save(state, old_run, "site-a", 20), save(state, oldest_run, 3, 40)
    newest = save(state, newest_run, "site-a", 3)
    torn = old.with_name(".named-site-a.safetensors.tmp")
    torn.write_bytes(b"half")
    os.utime(torn, (time.time() - 20 * DAY,) * 2)
    shown = pbfl("clean", "--older-than", "30d").stdout
    assert f" B  {older.parent}" in shown
    assert f"left {old.parent}: changed more recently than --older-than" in shown
    assert f"left {newest.parent}: the newest state, whose run may continue" in shown
    with ClientStore(older.parent, oldest_run, 3, "cnn2").locked():
        result = pbfl("clean", state, *NOW, "--yes")
    assert f"left {older.parent}: is in use" in result.stdout
    assert not old.parent.exists()
    assert older.exists()
    assert newest.exists()
    pbfl("clean", state, *NOW, "--yes")
    assert [path.name for path in state.iterdir()] == [newest_run]
    assert pbfl("clean", state, *NOW, "--yes").stdout.splitlines()[-1] == "nothing to remove"


def test_ages_in_minutes_hours_days_and_weeks() -> None:
    assert [cleanup.parse_age(text) for text in ("90m", "12h", "1d", "2w")] == [5400, DAY / 2, DAY, 14 * DAY]
