"""What is written belongs to its owner alone, whatever the umask, and never goes where a link points."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import cache
from pbfl_flwr.data.contract import Partition, Pool, Split
from pbfl_flwr.data.own.pflib import export_pfl_directory
from pbfl_flwr.flower.engines.local import federate
from pbfl_flwr.flower.engines.placement import Resources
from pbfl_flwr.models.build import build_model
from pbfl_flwr.runs.saved_model import Card
from pbfl_flwr.serving.export import export
from pbfl_flwr.serving.states import SavedModel
from pbfl_flwr.util.atomic_files import create_private, make_directory, write_atomically
from tests.flower.engines.test_local import KEYS
from tests.flower.inprocess import federation

pytestmark = pytest.mark.skipif(os.name != "posix", reason="has other permissions")


@pytest.fixture(params=[0, 0o022], autouse=True)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(*roots: Path) -> list[str]:
    """Return the roots and their files that another account could read, and what else there it could write."""
    found = [path for root in roots for path in (root, *root.rglob("*"))]
    assert len(found) > len(roots)
    inner = {path for path in found if path.is_dir()}.difference(roots)
    return [f"{path} {mode(path):o}" for path in found if mode(path) & (0o022 if path in inner else 0o077)]


def test_a_private_file_does_not_inherit_the_mode_of_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    file.chmod(0o666)
    write_atomically(file, b"new")
    assert (mode(file), file.read_bytes()) == (0o600, b"new")


@pytest.mark.parametrize("locked", [False, True])
def test_links_are_replaced_and_not_followed(tmp_path: Path, locked: bool) -> None:
    """Neither that of the file nor one in the place of a temporary file."""
    other = tmp_path / "other"
    other.write_bytes(b"theirs")
    file = tmp_path / "file"
    for name in ("file", ".file.tmp", f".file.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(other)
    write_atomically(file, b"ours", locked=locked)
    assert (file.is_symlink(), file.read_bytes(), other.read_bytes()) == (False, b"ours", b"theirs")
    with pytest.raises(OSError, match="exists"):
        create_private(tmp_path / f".file.{os.getpid()}.tmp")


def test_temporary_names_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    replace = Path.replace

    def noting(self: Path, target: Path) -> Path:
        names.append(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", noting)
    for _ in range(3):
        write_atomically(tmp_path / "file", b"content")
    assert len(set(names)) == 3
    assert min(map(len, names)) >= len(".file..tmp") + 16


def test_a_directory_is_private_and_its_parents_cannot_be_written(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o700
    assert not mode(tmp_path / "a") & 0o022
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "a" / "b", exist_ok=False)


def test_decoded_data_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    source = tmp_path / "source"
    source.write_bytes(b"private")
    source.chmod(0o600)

    def decode(allocate: cache.Allocate) -> Pool:
        inputs = allocate((4, 3), np.uint8)
        inputs[:] = 1
        return Pool(
            inputs,
            np.array([0, 1, 0, 1]),
            ("no", "yes"),
            3,
            owner=np.zeros(4, int),
            in_train=np.ones(4, bool),
        )

    for name, allocates in (("mapped", True), ("saved", False)):
        cache.cached(
            DataSettings(dataset=name),
            [source],
            decode if allocates else lambda _: decode(lambda s, t: np.ones(s, t)),
        )
    assert open_to_others(tmp_path / "home" / "cache") == []
    assert len(list((tmp_path / "home").rglob("*.npy"))) == 8


def test_a_partition_written_for_other_tools_is_private(tmp_path: Path) -> None:
    pool = Pool(np.ones((4, 3), np.float32), np.array([0, 1, 0, 1]), ("no", "yes"), 4)
    split = Split(np.array([0, 1]), np.array([2]))
    export_pfl_directory(Partition((split,), np.array([[2, 1]])), pool, tmp_path / "out")
    assert open_to_others(tmp_path / "out") == []


def test_an_export_is_private(tmp_path: Path) -> None:
    card = Card(
        method="fedproto", client="a", architecture="mlp5", round=1, participations=1, num_classes=2,
        feature_dim=8, input_shape=(3,), labels=("no", "yes"), columns=(), images=False, scale=(1.0,) * 3,
        shift=(0.0,) * 3,
    )  # fmt: skip
    model = build_model("mlp5", card.task, 1)
    out = tmp_path / "out"
    out.mkdir(mode=0o700)
    export(SavedModel(card, model.state_dict(), {"global.rows": torch.zeros(2, 8)}), out)
    assert open_to_others(out) == []


def test_a_run_is_private(tmp_path: Path) -> None:
    """With its clients' states, records, logs, reasons and results."""
    federation(tmp_path, data=None, on_disk=True, num_server_rounds=1).run()
    assert open_to_others(tmp_path / "run") == []


def test_a_run_in_local_processes_is_private(tmp_path: Path) -> None:
    """With its log, which the run's own engine writes."""
    federate(tmp_path / "run", {**KEYS, "num-server-rounds": 1}, 3, Resources(workers=1))
    assert (tmp_path / "run" / "flower.log").stat().st_size > 0
    assert open_to_others(tmp_path / "run") == []
