"""A disk that is really full: a small tmpfs, filled to its last page. Skipped where nothing may be mounted."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pbfl_flwr.config import Scalar
from pbfl_flwr.errors import PbflError
from pbfl_flwr.runs.client_store import load_tensors
from tests.flower.inprocess import (
    NUM_CLIENTS,
    Federation,
    after_round,
    federation,
    plain,
    same_tensors,
    silent,
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if not sys.platform.startswith("linux"):
        pytest.skip("mounts a tmpfs")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Write until nothing more goes in, and return the file that takes all the room."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    assert shutil.disk_usage(disk).free == 0
    return ballast


def rounds_kept(place: Path) -> dict[str, tuple[int, int]]:
    """Return (round, participations) by file name."""
    found = {}
    for path in place.rglob("client-*.safetensors"):
        about = load_tensors(path)[1]
        found[path.name] = int(about["round"]), int(about["participations"])
    return found


def test_a_device_without_room_says_so_and_goes_on_when_there_is_some(tmp_path: Path, disk: Path) -> None:
    """Client 2's disk is full in rounds 2 and 3: it keeps round 1, the others go on; then it has room again."""

    def nodes(common: Path, last: Path) -> list[dict[str, Scalar]]:
        places = {2: last}
        return [
            {"client-id": i, "model": "cnn4", "state-dir": str(places.get(i, common))}
            for i in range(NUM_CLIENTS)
        ]

    found = federation(tmp_path / "a", num_server_rounds=4, node_configs=nodes(tmp_path / "others", disk))
    with after_round(1, lambda: fill(disk)), after_round(3, lambda: (disk / "ballast").unlink()):
        found.run()
    path = next(disk.rglob("client-00002.safetensors"))
    for line in found.strategy.history[1:3]:
        assert plain(line.failures) == [
            {
                "client": 2,
                "reason": f"{path} cannot be written (No space left on device); its previous content is kept",
            }
        ]
    assert found.strategy.history[3].failures == []
    assert rounds_kept(disk) == {"client-00002.safetensors": (4, 2)}
    assert not list(disk.rglob("*.tmp"))
    # As if it had not been reached in the two rounds.
    without = federation(
        tmp_path / "b",
        num_server_rounds=4,
        node_configs=nodes(tmp_path / "again", tmp_path / "again"),
        faults={(2, 2): silent, (2, 3): silent},
    ).run()
    assert same_tensors(found.strategy.state.to_tensors(), without.strategy.state.to_tensors())


def test_a_server_without_room_ends_in_one_line_and_is_resumed_when_there_is_some(
    tmp_path: Path, disk: Path
) -> None:
    def run(place: Path, **keys: Any) -> Federation:
        return federation(
            place, on_disk=True, num_server_rounds=3, state_dir=str(tmp_path / place.name), **keys
        )

    full = r"^[^\n]*cannot be written \(No space left on device\)[^\n]*$"
    whole = run(tmp_path / "whole").run()
    with after_round(1, lambda: fill(disk)), pytest.raises(PbflError, match=full):
        run(disk).run()
    with pytest.raises(PbflError, match=full):
        run(disk, resume=True).run()
    assert load_tensors(disk / "run" / "checkpoint.safetensors")[1]["round"] == "1"
    (disk / "ballast").unlink()
    assert run(disk, resume=True).run().fingerprint == whole.fingerprint
    assert not list(disk.rglob("*.tmp"))
