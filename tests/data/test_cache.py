import os
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import cache
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.errors import PbflError
from pbfl_flwr.util import paths

SET = DataSettings(dataset="set")


class Decoder:
    """Counts how often it is asked."""

    def __init__(self, wait: float = 0.0) -> None:
        self.calls = 0
        self.wait = threading.Event()
        self.seconds = wait

    def __call__(self, allocate: cache.Allocate) -> Pool:
        self.calls += 1
        self.wait.wait(self.seconds)
        inputs = allocate((4, 2, 3), np.uint8)
        inputs[:] = np.arange(24).reshape(4, 2, 3)
        return Pool(
            inputs, np.array([0, 1, 0, 1]), ("no", "yes"), 3,
            owner=np.array([0, 0, 1, 1]), owner_names=("ada", "bob"), notes=("a note",),
        )  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(b"12345678")
    return path


def test_home_is_the_environment_variable_or_a_folder_of_the_user(monkeypatch):
    monkeypatch.setenv("PBFL_HOME", "/somewhere")
    assert paths.home() == Path("/somewhere")
    monkeypatch.delenv("PBFL_HOME")
    assert paths.home() == Path("~/.pbfl").expanduser()


def test_decoded_once_and_read_back_as_a_memory_map(source, home):
    decode = Decoder()
    first = cache.cached(SET, [source], decode)
    again = cache.cached(SET, [source], decode)
    assert decode.calls == 1
    for pool in (first, again):
        assert isinstance(pool.inputs, np.memmap)
        assert np.array_equal(pool.inputs, np.arange(24).reshape(4, 2, 3))
        assert pool.owner_names == ("ada", "bob")
        assert pool.labels.tolist() == [0, 1, 0, 1]
        assert pool.owner is not None
        assert pool.owner.tolist() == [0, 0, 1, 1]
        assert (pool.label_names, pool.num_train, pool.in_train) == (("no", "yes"), 3, None)
        assert pool.notes == ("a note",)
    folders = [path for path in (home / "cache").iterdir() if path.is_dir()]
    assert len(folders) == 1
    assert folders[0].name.startswith("set-")
    names = ["inputs.npy", "labels.npy", "meta.json", "owner.npy"]
    assert sorted(path.name for path in folders[0].iterdir()) == names


def test_decodes_a_changed_source_again(source):
    decode = Decoder()
    cache.cached(SET, [source], decode)
    source.write_bytes(b"123456789")  # another size
    cache.cached(SET, [source], decode)
    os.utime(source, (1, 1))  # another modification time
    cache.cached(SET, [source], decode)
    shutil.copy2(source, source.with_name("other.bin"))  # another path
    cache.cached(SET, [source.with_name("other.bin")], decode)
    assert decode.calls == 4


def test_decodes_again_where_a_setting_may_be_read_by_the_decoder(source):
    decode = Decoder()
    for settings in (
        SET,
        SET.model_copy(update={"labels": "a,b"}),
        SET.model_copy(update={"partition_seed": 9}),
    ):
        cache.cached(settings, [source], decode)
    assert decode.calls == 2


def test_many_at_once_decode_once(source):
    decode = Decoder(wait=0.2)
    barrier = threading.Barrier(4)

    def work(_: int) -> int:
        barrier.wait()
        return int(cache.cached(SET, [source], decode).inputs.sum())

    with ThreadPoolExecutor(4) as workers:
        assert list(workers.map(work, range(4))) == [276] * 4  # 0 + ... + 23
    assert decode.calls == 1


def test_a_decoder_that_fails_leaves_nothing_and_can_be_tried_again(source, home):
    def broken(allocate: cache.Allocate) -> Pool:
        allocate((2, 2), np.float32)
        raise PbflError("no good")

    with pytest.raises(PbflError, match="no good"):
        cache.cached(SET, [source], broken)
    assert not [path for path in (home / "cache").iterdir() if path.is_dir()]
    assert len(cache.cached(SET, [source], Decoder()).labels) == 4


def test_the_rest_of_a_killed_process_is_swept_away(source, home):
    entry = home / "cache" / f"set-{cache._fingerprint(SET, [source], ())}"
    leftover = entry.with_name(entry.name + ".partial")
    leftover.mkdir(parents=True)
    (leftover / "inputs.npy").write_bytes(b"half")
    assert len(cache.cached(SET, [source], Decoder()).labels) == 4
    assert not leftover.exists()


# Damaged, or a file whose content was lost: nothing, or half of its header.
DAMAGES = {
    "garbage": lambda file: b"garbage",
    "nothing": lambda file: b"",
    "half": lambda file: file[:40] + bytes(99),
}


@pytest.mark.parametrize("file", ["inputs.npy", "labels.npy", "owner.npy"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_named(source, home, file, damage):
    cache.cached(SET, [source], Decoder())
    entry = next(path for path in (home / "cache").iterdir() if path.is_dir())
    (entry / file).write_bytes(DAMAGES[damage]((entry / file).read_bytes()))
    with pytest.raises(PbflError, match=f"{entry} is damaged"):
        cache.cached(SET, [source], Decoder())


def test_an_entry_of_another_user_is_not_damaged(source, monkeypatch):
    cache.cached(SET, [source], Decoder())

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cache, "_column", denied)
    with pytest.raises(PbflError, match=r"owner\.npy cannot be read \(Permission denied\); set PBFL_HOME"):
        cache.cached(SET, [source], Decoder())


def test_arrays_of_different_lengths_are_a_damaged_entry(source, home):
    cache.cached(SET, [source], Decoder())
    entry = next(path for path in (home / "cache").iterdir() if path.is_dir())
    np.save(entry / "labels.npy", np.array([0, 1]))
    with pytest.raises(PbflError, match=f"{entry} is damaged .its arrays are of different lengths"):
        cache.cached(SET, [source], Decoder())


def test_an_entry_is_on_the_disk_before_it_has_its_name(source, monkeypatch):
    written: set[int] = set()
    sync, replace = os.fsync, os.replace

    def note(descriptor: int) -> None:
        sync(descriptor)
        if stat.S_ISREG((status := os.fstat(descriptor)).st_mode):
            written.add(status.st_ino)

    def check(partial: Path, entry: Path) -> None:
        assert {file.stat().st_ino for file in Path(partial).iterdir()} == written
        replace(partial, entry)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    assert len(cache.cached(SET, [source], Decoder()).labels) == 4


def test_rejects_a_missing_source(source):
    link = source.with_name("link.bin")
    link.symlink_to(source.with_name("nowhere.bin"))
    with pytest.raises(PbflError, match=r"link\.bin cannot be read \(No such file or directory\)"):
        cache.cached(SET, [source, link], Decoder())


def test_rejects_a_full_disk_before_writing(source):
    def huge(allocate: cache.Allocate) -> Pool:
        inputs = allocate((10**12, 10**4), np.uint8)
        return Pool(inputs, np.zeros(10**12, np.int64), ("a", "b"), 1)

    with pytest.raises(PbflError, match=r"MiB are\s+free; the environment variable PBFL_HOME"):
        cache.cached(SET, [source], huge)


def test_a_home_that_cannot_be_written_is_named(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "file"))
    with pytest.raises(
        PbflError, match=r"cannot write the cache of decoded data at .*PBFL_HOME can set another directory"
    ):
        cache.cached(SET, [source], Decoder())


def test_a_shard_of_neighbouring_rows_is_not_a_copy(source):
    from pbfl_flwr.data.clients import materialise
    from pbfl_flwr.data.contract import Split

    pool = cache.cached(SET, [source], Decoder())
    near = materialise(pool, Split(np.array([1, 2]), np.array([3, 0])))
    assert near.train.inputs.data_ptr() == pool.inputs[1:].ctypes.data
    assert near.train.inputs.tolist() == pool.inputs[1:3].tolist()
    assert near.test.inputs.tolist() == pool.inputs[[3, 0]].tolist()
    near.train.inputs[:] = 0  # a view of a private mapping: the cache stays as it is
    assert cache.cached(SET, [source], Decoder()).inputs[1].tolist() == [[6, 7, 8], [9, 10, 11]]


def test_reads_paths_that_are_not_utf8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.bin"))
    try:
        path.write_bytes(b"1234")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    assert cache.cached(SET, [path], Decoder()).labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff"])
def test_an_entry_whose_description_is_damaged_is_named(source: Path, home: Path, content: bytes) -> None:
    cache.cached(SET, [source], Decoder())
    entry = next(path for path in (home / "cache").iterdir() if path.is_dir())
    (entry / "meta.json").write_bytes(content)
    with pytest.raises(PbflError, match=f"{entry} is damaged"):
        cache.cached(SET, [source], Decoder())
