"""pbfl clean: on what real runs leave behind."""

import gc
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from pbfl_flwr.data import Pool, cache
from pbfl_flwr.experiments import cleanup
from pbfl_flwr.flower.engines.grid import federate
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.runs.client_store import ClientState, ClientStore
from pbfl_flwr.runs.directory import STATES_REMOVED, RunDirectory
from pbfl_flwr.runs.locks import lock_of
from tests.flower.engines.test_grid import KEYS
from tests.small_runs import entry, pbfl

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
    about = json.loads((run / "run.json").read_text())
    about["configuration"] |= {key.replace("_", "-"): value for key, value in keys.items()}
    (run / "run.json").write_text(json.dumps(about))


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
    shown = pbfl("clean", "--states", *NOW)
    assert shown.exit_code == 0
    assert f"{size / 1000:.1f} kB  runs/a: clients' states of a finished run" in shown.stdout
    assert shown.stdout.splitlines()[-1] == f"would remove {size / 1000:.1f} kB; remove with --yes"
    assert tree(runs) == before

    removed = pbfl("clean", "--states", *NOW, "--yes")
    assert removed.stdout.splitlines()[-1] == f"removed {size / 1000:.1f} kB"
    gone = before.keys() - tree(runs).keys()
    assert gone == {name for name in before if name.startswith("a/clients/") or name == "a/clients"}
    assert tree(runs).keys() - before.keys() == {f"a/{STATES_REMOVED}"}
    assert pbfl("show", runs / "a").exit_code == 0
    wanted = ("--set", "num-server-rounds=3", "--engine", "processes")
    for refused in (
        pbfl("run", "--resume", runs / "a", *wanted),
        pbfl("export", runs / "a", "--client", 0, "--out", runs / "out"),
    ):
        assert refused.exit_code == 2
        assert "its clients' states were removed by pbfl clean" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert pbfl("clean", "--states", *NOW, "--yes").stdout.splitlines() == ["nothing to remove"]


def test_the_server_does_not_go_on_without_the_clients_states(runs: Path) -> None:
    pbfl("clean", "--states", *NOW, "--yes")
    config = RunDirectory(runs / "a").record().configuration
    more = {**config, "num-server-rounds": 3, "run-dir": str(runs / "a"), "resume": True}
    with pytest.raises(Exception, match="its clients' states were removed"):
        federate(runs / "a", more, 3, Resources(workers=1))


def test_nothing_is_removed_without_being_asked_for(runs: Path) -> None:
    (runs / "a" / ".run.json.1234.tmp").write_bytes(b"{")
    before = tree(runs)
    result = pbfl("clean", *NOW, "--yes")
    assert before.keys() - tree(runs).keys() == {"a/.run.json.1234.tmp"}
    assert "1 B  runs/a: torn temporary files" in result.stdout
    assert "kB, clients' states (--states): runs/a" in result.stdout


@pytest.mark.parametrize("held", ["engine", "server", "client"])
def test_what_is_in_use_is_left(runs: Path, held: str) -> None:
    run = runs / "a"
    unfinished = runs / "b"
    shutil.copytree(run, unfinished)
    (unfinished / "rounds.jsonl").unlink()
    before = tree(runs)
    found = [one for one in cleanup.scan([runs]) if isinstance(one, cleanup.Removable)]
    locks = [
        {
            "engine": lock_of(place),
            "server": FileLock(place / ".server.lock"),
            "client": FileLock(next(place.glob("clients/*/.client-00001.lock"))),
        }[held]
        for place in (run, unfinished)
    ]
    for lock in locks:
        lock.acquire()
    result = pbfl("clean", "--states", "--unfinished", *NOW, "--yes")
    assert "is in use: runs/a, runs/b" in result.stdout
    assert "nothing to remove" in result.stdout
    # Somebody may begin between the look and the removal.
    assert [left.reason for find in found if (left := cleanup.remove(find))] == ["is in use"] * 2
    assert tree(runs) == before


def test_files_of_others_stay(runs: Path) -> None:
    (folder,) = (runs / "a" / "clients").iterdir()
    (folder / "notes.txt").write_text("mine")
    shutil.copy(
        folder / "client-00000.safetensors", folder / "client-00007.safetensors"
    )  # says it is client 0
    (folder / "client-00008.safetensors").write_bytes(b"no tensors")
    (runs / "other").mkdir()
    (runs / "other" / "run.json").write_text('{"configuration": {"x": 1}, "experiment": "e"}')
    (runs / "other" / "rounds.jsonl").write_text("")
    result = pbfl("clean", "--states", "--unfinished", *NOW, "--yes")
    assert {path.name for path in folder.iterdir()} == {
        "notes.txt",
        "client-00007.safetensors",
        "client-00008.safetensors",
    }
    assert "is not this project's: runs/a/clients/" in result.stdout
    assert "left runs/other/run.json is damaged, or was written by another version" in result.stdout
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
    result = pbfl("clean", "--states", "--unfinished", *NOW, "--yes")
    assert tree(made) == before
    assert outside.exists()
    assert (folder / "client-00000.safetensors").is_symlink()
    assert [file.name for file in states(runs / "a")] == ["client-00000.safetensors"]
    assert (runs / "b" / "clients").is_symlink()
    assert "is a symbolic link: runs/link" in result.stdout


def test_older_than_is_by_the_newest_file(runs: Path) -> None:
    for file in states(runs / "a"):
        os.utime(file, (time.time() - 10 * DAY,) * 2)
    for file in (runs / "a").glob("clients/*/.*.lock"):
        os.utime(file, (time.time() - 10 * DAY,) * 2)
    asked = ("clean", "--states", "--older-than")
    assert "runs/a: clients' states" in pbfl(*asked, "9d").stdout
    assert "changed more recently than --older-than: runs/a" in pbfl(*asked, "11d").stdout
    os.utime(states(runs / "a")[1], (time.time() - 2 * DAY,) * 2)
    assert "changed more recently than --older-than: runs/a" in pbfl(*asked, "9d").stdout
    assert "runs/a: clients' states" in pbfl("clean", "--states").stdout  # a day is the default


def test_a_run_without_a_round_goes_whole_and_one_that_can_go_on_stays(runs: Path) -> None:
    shutil.copytree(runs / "a", runs / "begun")
    (runs / "begun" / "rounds.jsonl").write_text("")
    shutil.copytree(runs / "begun", runs / "kept")
    (runs / "kept" / "notes.txt").write_text("mine")
    for name in (".lock", "flower.log"):  # before there is a run.json
        (runs / "early").mkdir(exist_ok=True)
        (runs / "early" / name).touch()
    change(runs / "a", num_server_rounds=5)
    before = tree(runs / "a")
    result = pbfl("clean", runs, "--states", "--unfinished", *NOW, "--yes")
    assert sorted(path.name for path in runs.iterdir()) == ["a", "kept"]
    assert [path.name for path in (runs / "kept").iterdir()] == ["notes.txt"]
    assert f"is not this project's: {runs}/kept/notes.txt" in result.stdout
    assert f"clients' states of runs that can be resumed: {runs}/a" in result.stdout
    assert tree(runs / "a") == before


def test_clients_that_come_after_the_last_round_belong_to_the_run(runs: Path) -> None:
    change(runs / "a", new_clients=1, new_client_rounds=2)
    asked = ("clean", "--states", *NOW)
    lines = [json.dumps(entry(number, 0.5, 0.5, after=2)) + "\n" for number in (3, 4)]
    (runs / "a" / "new-clients.jsonl").write_text(lines[0])
    assert "runs that can be resumed: runs/a" in pbfl(*asked).stdout
    (runs / "a" / "new-clients.jsonl").write_text("".join(lines))
    experiment = json.loads((runs / "a" / "run.json").read_text())["experiment"]
    save(runs / "a" / "clients", f"{experiment}-new-2", 2, days=2)
    assert "runs/a: clients' states" in pbfl(*asked).stdout
    pbfl(*asked, "--yes")
    assert not (runs / "a" / "clients").exists()


def test_a_device_keeps_its_newest_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # not where somebody has runs of their own
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    state = tmp_path / "home" / "state"
    old, older = save(state, "e2", "site-a", 20), save(state, "e1", 3, 40)
    newest = save(state, "e3", "site-a", 3)
    torn = newest.with_name(".named-site-a.safetensors.tmp")
    first = state / "e4" / ".named-site-a.safetensors.tmp"  # killed while it saved its first state
    first.parent.mkdir()
    for file in (torn, first):
        file.write_bytes(b"half")
        os.utime(file, (time.time() - 3 * DAY,) * 2)
    shown = pbfl("clean", "--states", "--older-than", "30d").stdout
    assert f"{older.parent}: a device's state of an older run" in shown
    assert f"changed more recently than --older-than: {newest.parent}, {old.parent}, {first.parent}" in shown
    assert f"the newest state, whose run may continue: {newest.parent}" in shown
    with ClientStore(older.parent, "e1", 3, "cnn2").locked():
        result = pbfl("clean", state, "--states", *NOW, "--yes")
    assert f"is in use: {older.parent}" in result.stdout
    assert not old.parent.exists()
    assert older.exists()
    assert newest.exists()
    assert not torn.exists()
    assert not first.exists()
    first.parent.rmdir()
    assert f"changed more recently than --older-than: {older.parent}" in pbfl("clean", "--states").stdout
    pbfl("clean", state, "--states", *NOW, "--yes")
    assert [path.name for path in state.iterdir()] == ["e3"]
    assert pbfl("clean", state, "--states", *NOW, "--yes").stdout.splitlines()[-1] == "nothing to remove"


def test_decoded_data_goes_when_nobody_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBFL_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    decoded = 0

    def decode(_: object) -> Pool:
        nonlocal decoded
        decoded += 1
        rows = np.arange(4, dtype=np.int64)
        return Pool(np.zeros((4, 1, 2, 2), np.uint8), rows % 2, ("a", "b"), 4, owner=rows % 2)

    pool = cache.cached("tiny", (), decode)
    (entry,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert {file.name for file in entry.iterdir()} <= set(cache.FILES)
    shutil.copytree(entry, entry.with_name(entry.name + ".partial"))
    mine = tmp_path / "cache" / "tiny-0123456789abcdef"
    shutil.copytree(entry, mine)
    (mine / "notes.txt").write_text("mine")
    assert f"is in use: {entry}" in pbfl("clean", "--cache", *NOW, "--yes").stdout
    assert sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()) == sorted(
        [entry.name, mine.name]
    )
    del pool
    gc.collect()
    result = pbfl("clean", "--cache", *NOW, "--yes")
    assert f"{entry}: decoded data" in result.stdout
    assert f"is not an entry of the cache: {mine}" in result.stdout
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [mine.name]
    cache.cached("tiny", (), decode)
    assert decoded == 2


def test_ages_in_minutes_hours_days_and_weeks() -> None:
    assert [cleanup.parse_age(text) for text in ("90m", "12h", "1d", "2w")] == [5400, DAY / 2, DAY, 14 * DAY]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--older-than", "soon"], "--older-than soon: must be a whole number with m, h, d or w"),
        (["nowhere"], "'nowhere' is not a directory"),
    ],
)
def test_what_is_not_understood_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = pbfl("clean", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
