"""State on disk: either the old file or the new one, checked when it is read, never overwritten when in doubt."""

import errno
import json
import os
import re
import signal
import stat
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server import recorder
from pbfl_flwr.runs import checkpoint, tensor_files
from pbfl_flwr.runs import client_store as store
from pbfl_flwr.runs.client_store import ClientState, ClientStore
from pbfl_flwr.runs.tensor_files import load_tensors, save_tensors
from pbfl_flwr.util import atomic_files as files
from pbfl_flwr.util.atomic_files import DamagedState, UnsavedState, write_atomically
from tests.flower.inprocess import Killed, federation

STATE = ClientState(
    round=3,
    participations=2,
    model={"a": torch.randn(3, 4), "steps": torch.tensor(7), "flag": torch.tensor([True, False])},
    memory={"momentum.a": torch.randn(3, 4), "none": torch.zeros(0, 5)},
    reply={"rows": torch.randn(2, 4), "labels": torch.tensor([1, 2], dtype=torch.uint8)},
    report={"n": [1, 2, 3], "loss.ce": 0.5},
)


@pytest.fixture
def client(tmp_path: Path) -> ClientStore:
    return ClientStore(tmp_path / "clients", "experiment-1", 4, "cnn4")


def loaded(client: ClientStore) -> ClientState:
    state = client.load()
    assert state is not None
    return state


def test_state_round_trip(client: ClientStore) -> None:
    assert client.load() is None
    client.save(STATE)
    state = loaded(client)
    assert (state.round, state.participations, state.report) == (3, 2, STATE.report)
    for part in ("model", "memory", "reply"):
        stored, expected = getattr(state, part), getattr(STATE, part)
        assert set(stored) == set(expected)
        for name, tensor in expected.items():
            assert stored[name].dtype == tensor.dtype
            assert torch.equal(stored[name], tensor)
    assert [file.name for file in client.directory.iterdir()] == ["client-00004.safetensors"]
    assert torch.equal(load_file(client.path)["model.a"], STATE.model["a"])  # other tools can read it
    with safe_open(client.path, framework="pt") as file:
        assert (file.metadata()["client"], json.loads(file.metadata()["report"])) == ("4", STATE.report)


def test_interrupt_while_reading_does_not_pass_for_a_damaged_file(
    client: ClientStore,
) -> None:
    """A library that drops the exception of a signal's handler would cost the client a round."""

    class Interrupted(BaseException):
        """As KeyboardInterrupt, which would end all tests where it escapes."""

    def interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        raise Interrupted

    def load_until_interrupted(attempt: int) -> None:  # what a loop's end raises leaves a with on Python 3.13
        while len(interrupts) == attempt:
            loaded(client)

    client.save(replace(STATE, model={f"weight-{number}": torch.ones(2) for number in range(300)}))
    interrupts: list[int] = []
    before = signal.signal(signal.SIGPROF, interrupt)
    try:
        for attempt in range(100):
            with suppress(Interrupted):  # which may also fall into what ignores it, such as a callback of gc
                signal.setitimer(signal.ITIMER_PROF, 1e-3 + attempt * 1e-4)
                load_until_interrupted(attempt)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def test_a_file_that_may_not_be_read_is_named_and_not_called_damaged(
    client: ClientStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.save(STATE)

    def refuse(path: Path, limit: int) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(tensor_files, "read_regular", refuse)
    with pytest.raises(PbflError) as caught:
        client.load()
    assert str(caught.value) == f"state file {client.path} cannot be read (Permission denied)"


def test_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    metadata = {f"key-{number}": 'ü "quoted"' for number in range(20)}
    tensors = {"b": torch.randn(3, 5), "a": torch.arange(3, dtype=torch.uint8), "ä": torch.zeros(0, 2)}
    files = [tmp_path / "one", tmp_path / "two"]
    for file, keys in zip(files, (sorted(metadata), sorted(metadata, reverse=True)), strict=True):
        save_tensors(file, tensors, {key: metadata[key] for key in keys})
    assert files[0].read_bytes() == files[1].read_bytes()
    header = int.from_bytes(files[0].read_bytes()[:8], "little")
    assert header % 8 == 0
    with pytest.raises(FileNotFoundError):
        load_tensors(tmp_path / "three")
    result, about = load_tensors(files[0])
    assert {name: tensor.tolist() for name, tensor in result.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    assert about == {**metadata, "schema": "2"}


def test_saves_views_and_strided_tensors(client: ClientStore) -> None:
    rows = torch.randn(4, 6)
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    client.save(replace(STATE, memory={"a": rows, "b": rows, "row": rows[1], "t": rows.T, "image": image}))
    for name, tensor in {"t": rows.T, "row": rows[1], "image": image}.items():
        assert torch.equal(loaded(client).memory[name], tensor)


@pytest.mark.skipif(os.name != "posix", reason="has other permissions")
def test_only_the_owner_can_read_state(client: ClientStore) -> None:
    """It holds class means and counts."""
    place = replace(client, directory=client.directory / "of" / "its-own")
    with place.locked():
        place.save(STATE)
    assert stat.S_IMODE(place.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(place.directory.parent.stat().st_mode) != 0o700


# Atomic writing ---------------------------------------------------------------------------------------------

FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("place", "step", "error", "raised"),
    [
        (os, "fsync", Killed(), Killed),
        (Path, "replace", Killed(), Killed),
        (os, "fsync", FULL, UnsavedState),
    ],
    ids=["killed before it is flushed", "killed before the rename", "full disk"],
)
def test_a_write_that_ends_early_leaves_the_old_file(
    client: ClientStore,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    step: str,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    client.save(STATE)
    before = client.path.read_bytes()

    def fails(*args: object, **keys: object) -> None:
        raise error

    monkeypatch.setattr(place, step, fails)
    with pytest.raises(raised) as caught:
        client.save(replace(STATE, round=4))
    monkeypatch.undo()
    assert client.path.read_bytes() == before
    assert loaded(client).round == 3
    if error is FULL:
        assert re.search(
            r"client-00004.safetensors cannot be written \(No space left[^\n]*$", str(caught.value)
        )
        assert [file.name for file in client.directory.iterdir()] == ["client-00004.safetensors"]
    client.save(replace(STATE, round=4))  # what was left behind is in nobody's way
    assert loaded(client).round == 4
    # Not even of room: a device may lose power a hundred times.
    assert [file.name for file in client.directory.iterdir()] == ["client-00004.safetensors"]


def test_data_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def watch(place: Any, step: str) -> None:
        real = getattr(place, step)

        def watched(*arguments: Any) -> Any:
            steps.append(step)
            return real(*arguments)

        monkeypatch.setattr(place, step, watched)

    watch(os, "fsync")
    watch(Path, "replace")
    write_atomically(tmp_path / "new" / "file", b"content")
    # the new directory's name, the file, its name, its directory
    assert steps == ["fsync", "fsync", "replace", "fsync"]
    assert (tmp_path / "new" / "file").read_bytes() == b"content"


@pytest.mark.parametrize(
    ("step", "number", "refused"),
    [("open", errno.EACCES, False), ("fsync", errno.EINVAL, False), ("fsync", errno.EIO, True)],
    ids=["Windows opens none", "the file system flushes none", "the disk fails"],
)
def test_error_of_flushing_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, refused: bool
) -> None:
    real = getattr(os, step)

    def fail(what: Any, *arguments: Any, **keys: Any) -> Any:
        if (isinstance(what, int) and stat.S_ISDIR(os.fstat(what).st_mode)) or os.path.isdir(what):
            raise OSError(number, os.strerror(number))
        return real(what, *arguments, **keys)

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(UnsavedState, match="may be lost at a power failure") if refused else nullcontext():
        write_atomically(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


# Damage and strangers ---------------------------------------------------------------------------------------


def forged(header: dict[str, Any]) -> bytes:
    """A file of a header alone."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


FORGED = {
    "without metadata": forged({"__metadata__": None}),
    "a type that torch lacks": forged({"a": {"dtype": "F4", "shape": [0], "data_offsets": [0, 0]}}),
    "a huge shape": forged({"a": {"dtype": "F32", "shape": [0, 2**62, 4], "data_offsets": [0, 0]}}),
    "a larger one": forged({"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}),
}


@pytest.mark.parametrize(
    "damage", ["empty", "half", "rubbish", "flipped", "directory", "unsigned", "relabelled", *FORGED]
)
def test_damaged_file_is_named_and_not_changed(client: ClientStore, damage: str) -> None:
    client.save(STATE)
    data = bytearray(client.path.read_bytes())
    if damage == "directory":
        client.path.unlink()
        client.path.mkdir()
    elif damage == "unsigned":
        save_file(dict(STATE.model), client.path)
    elif damage == "relabelled":  # a header that was edited: the checksum covers it too
        client.path.write_bytes(bytes(data).replace(b'"round":"3"', b'"round":"9"'))
    else:
        data[-3] ^= 16
        content = {
            "empty": b"",
            "half": bytes(data[: len(data) // 2]),
            "rubbish": b"x" * 500,
            "flipped": bytes(data),
            **FORGED,
        }
        client.path.write_bytes(content[damage])
    before = None if damage == "directory" else client.path.read_bytes()

    with pytest.raises(DamagedState) as error:
        client.load()

    assert str(client.path) in str(error.value)
    assert "\n" not in str(error.value)
    assert "move it away" in str(error.value)
    assert before is None or client.path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"experiment": "experiment-2"}, "is of experiment 'experiment-1', expected 'experiment-2'"),
        ({"architecture": "resnet8"}, "is of architecture 'cnn4', expected 'resnet8'"),
        ({"client": 5}, r"is of client '4', expected '5'"),
        ({}, "has schema '0', expected '2'"),
    ],
    ids=["experiment", "architecture", "client", "schema"],
)
def test_rejects_a_foreign_file(
    client: ClientStore, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], text: str
) -> None:
    if not change:
        monkeypatch.setattr(tensor_files, "SCHEMA", "0")
    client.save(STATE)
    monkeypatch.undo()
    other = replace(client, **change)
    client.path.rename(other.path)
    with pytest.raises(DamagedState, match=text):
        other.load()


@pytest.mark.parametrize(
    "change",
    [
        {"round": "three"},
        {"report": "{"},
        {"participations": None},
        *({store.SAME: same} for same in ("[]", "{", '{"a": "nowhere"}', '{"a": 3}', '{"a": ["b"]}')),
    ],
)
def test_rejects_file_without_parts_of_a_state(client: ClientStore, change: dict[str, str | None]) -> None:
    client.save(STATE)
    tensors, metadata = load_tensors(client.path)
    stored = {key: value for key, value in {**metadata, **change}.items() if value is not None}
    save_tensors(client.path, tensors, stored)  # whose checksum fits
    with pytest.raises(DamagedState, match="lacks parts of a client's state"):
        client.load()


def test_states_of_a_round_are_flushed_once_before_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client's file is flushed when it is written, the directory with all of their names once a round."""
    flushed: list[str] = []
    monkeypatch.setattr(files, "flush_directory", lambda path: flushed.append(f"{path.parent.name}, client"))
    monkeypatch.setattr(recorder, "flush_directory", lambda path: flushed.append(f"{path.parent.name}, all"))
    run = federation(tmp_path, on_disk=True, num_server_rounds=2)
    keep = checkpoint.stage

    def saving(*args: Any) -> None:
        flushed.append("checkpoint")
        keep(*args)

    monkeypatch.setattr(checkpoint, "stage", saving)
    run.run()
    states = [what for what in flushed if what.startswith("clients, ") or what == "checkpoint"]
    assert states == ["clients, all", "checkpoint"] * 2
    assert len(list((run.directory.path / "clients").glob("*/*.safetensors"))) == 5


def test_directory_that_cannot_be_flushed_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(recorder, "flush_directory", fails)
    run = federation(tmp_path, on_disk=True, num_server_rounds=1)
    with pytest.raises(UnsavedState, match=r"may be lost at a power failure \(Input/output error\)$"):
        run.run()
    assert not run.directory.round_records()


def test_uploaded_weights_are_stored_once(client: ClientStore) -> None:
    weight = torch.randn(40, 50)
    zeros, negative = torch.zeros(3), -torch.zeros(3)  # equal numbers of different bits
    model = {"body.0.weight": weight, "body.0.bias": zeros, "head.weight": torch.randn(5, 2)}
    reply = {
        "w.body.0.weight": weight.clone(),
        "w.body.0.bias": negative,
        "w.head.weight": model["head.weight"] + 1,
        "w.other": weight.clone(),
        "n": torch.tensor([7]),
    }
    client.save(replace(STATE, model=model, reply=reply))
    with safe_open(client.path, framework="pt") as file:
        stored = {name for name in file.keys() if name.startswith("reply.")}  # noqa: SIM118 - no mapping
    assert stored == {f"reply.{name}" for name in reply} - {"reply.w.body.0.weight"}
    again = loaded(client)
    assert again.reply.keys() == reply.keys()
    for name, tensor in reply.items():
        assert torch.equal(again.reply[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_reply_of_fedavg_is_restored_from_its_model(tmp_path: Path) -> None:
    run = federation(tmp_path, "fedavg", on_disk=True, models="resnet4", num_server_rounds=1)
    run.run()
    for file in sorted((run.directory.path / "clients").glob("*/*.safetensors")):
        tensors, about = load_tensors(file)
        assert [name for name in tensors if name.startswith("reply.")] == ["reply.n"]
        state = loaded(
            ClientStore(file.parent, about["experiment"], int(about["client"]), about["architecture"])
        )
        sent = {name.removeprefix("w."): tensor for name, tensor in state.reply.items() if name != "n"}
        assert sent.keys() == {name for name in state.model if "running" not in name and "num_b" not in name}
        assert all(torch.equal(tensor, state.model[name]) for name, tensor in sent.items())
