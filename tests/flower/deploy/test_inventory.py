"""Registering the keys of a folder, against a SuperLink that answers as Flower's does."""

import errno
import os
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.deploy import certificates as security
from pbfl_flwr.flower.deploy import processes
from pbfl_flwr.flower.deploy.inventory import Device, Inventory, read_keys, register
from tests.flower.server.test_membership import member
from tests.small_runs import pbfl


class Link:
    """What ``flwr supernode`` answers; node ids are 101, 102, ... in the order of registration."""

    def __init__(self) -> None:
        self.keys: dict[bytes, str] = {}
        self.names: dict[str, str] = {}
        self.status: dict[str, str] = {}

    def __call__(self, *words: str) -> dict[str, Any]:
        assert words[0] == "supernode"
        assert "json" in words
        if words[1] == "list":
            every = {"offline-at": "2026-11-26 18:28:13Z"}
            return {"nodes": [{"node-id": node, "status": s, **every} for node, s in self.status.items()]}
        if words[1] == "unregister":
            self.status[words[2]] = "unregistered"
            return {"success": True}
        key = Path(words[2]).read_bytes()
        if key in self.keys:
            raise PbflError("flwr supernode: [code: 23] Public key already in use.")
        node = self.keys[key] = str(101 + len(self.keys))
        self.names[node], self.status[node] = words[-1], "registered"
        return {"success": True, "node-id": int(node)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    security.make_keys(tmp_path / "keys", ["b", "a"])
    return tmp_path / "keys"


def devices(folder: Path) -> dict[str, Device]:
    return {device.name: device for device in Inventory.read(folder / "i.json").devices}


def new_key(folder: Path, name: str) -> None:
    for file in (folder / name, folder / f"{name}.pub"):
        file.unlink()
    security.make_keys(folder, [name])


def test_registers_every_key_once_and_says_when_a_device_was_seen(folder: Path) -> None:
    link = Link()
    assert register(folder, folder / "i.json", link, "devices") == ["2 keys registered"]
    assert {link.names[device.node]: name for name, device in devices(folder).items()} == {
        "--name=a": "a",
        "--name=b": "b",
    }
    link.status[devices(folder)["a"].node] = "offline"
    link.status[devices(folder)["b"].node] = "online"
    security.make_keys(folder, ["c"])
    assert register(folder, folder / "i.json", link) == ["1 keys registered"]
    assert {name: device.status for name, device in devices(folder).items()} == {
        "a": "offline",
        "b": "online",
        "c": "registered",
    }
    assert devices(folder)["a"].last_seen == "2026-11-26 18:28:13Z"
    assert devices(folder)["b"].last_seen > devices(folder)["a"].last_seen
    assert devices(folder)["c"].row == ["c", "registered", "-", "-", "-", devices(folder)["c"].node]


def test_a_changed_key_replaces_the_old_one(folder: Path) -> None:
    link = Link()
    register(folder, folder / "i.json", link)
    before = devices(folder)
    new_key(folder, "a")
    lines = register(folder, folder / "i.json", link)
    assert lines == ["a: has another key now; the old one is unregistered", "1 keys registered"]
    after = devices(folder)
    assert (link.status[before["a"].node], link.status[after["a"].node]) == ("unregistered", "registered")
    assert after["b"] == before["b"]


def test_the_old_key_is_unregistered_although_its_replacement_failed_at_first(folder: Path) -> None:
    link = Link()
    register(folder, folder / "i.json", link)
    old = devices(folder)["a"].node
    new_key(folder, "a")

    def down(*words: str) -> dict[str, Any]:
        if words[1] == "register":
            raise PbflError("flwr supernode: no answer")
        return link(*words)

    lines = register(folder, folder / "i.json", down)
    assert lines[:2] == ["a: no answer", "0 keys registered"]
    new_key(folder, "a")
    lines = register(folder, folder / "i.json", link)
    assert lines == ["a: has another key now; the old one is unregistered", "1 keys registered"]
    assert link.status[old] == "unregistered"


def test_a_name_keeps_the_nodes_of_its_earlier_keys(folder: Path) -> None:
    link, file = Link(), folder / "i.json"
    register(folder, file, link)
    first = (folder / "a.pub").read_bytes()
    new_key(folder, "a")
    second = (folder / "a.pub").read_bytes()
    register(folder, file, link)
    node = devices(folder)["a"].node
    (folder / "a.pub").write_bytes(first)  # a mistake
    line = "a: its key was unregistered, and Flower takes none twice; give the device a new key"
    assert register(folder, file, link)[:2] == [line, "0 keys registered"]
    (folder / "a.pub").write_bytes(second)
    assert register(folder, file, link) == ["0 keys registered"]
    assert (devices(folder)["a"].node, link.status[node]) == (node, "registered")
    (folder / "a.pub").unlink()
    assert register(folder, file, link)[1:] == [f"registered without a key in {folder}: node {node} (a)"]
    (folder / "a.pub").write_bytes(second)
    assert register(folder, file, link) == ["0 keys registered"]
    assert devices(folder)["a"].node == node
    (folder / "a.pub").unlink()
    link("supernode", "unregister", node, "--format", "json")
    register(folder, file, link)
    assert "a" not in devices(folder)


def test_an_interrupt_loses_no_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, registered = Link(), Event()

    def interrupted(*words: str) -> dict[str, Any]:
        if words[-1] == "--name=a":
            registered.wait(10)
            raise KeyboardInterrupt
        result = link(*words)
        if words[1] == "register":
            registered.set()
        return result

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        register(folder, folder / "i.json", interrupted)
    assert {name: device.node for name, device in devices(folder).items()} == {"a": "", "b": "101"}


def test_nothing_is_registered_if_the_inventory_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("pbfl_flwr.flower.deploy.inventory.write_atomically", read_only)
    link = Link()
    with pytest.raises(OSError, match="Read-only"):
        register(folder, folder / "i.json", link)
    assert not link.keys


def test_an_unregistered_key_is_not_asked_for_its_node(folder: Path) -> None:
    link = Link()
    register(folder, folder / "i.json", link)
    node = devices(folder)["a"].node
    link("supernode", "unregister", node, "--format", "json")
    line = "a: its key was unregistered, and Flower takes none twice; give the device a new key"
    for _ in range(2):
        assert register(folder, folder / "i.json", link) == [line, "0 keys registered"]
        assert (devices(folder)["a"].node, devices(folder)["a"].status) == (node, "")


@pytest.mark.parametrize(("fails", "at"), [("unregister", 1), ("list", 2)])
def test_what_was_registered_is_written_although_a_later_call_fails(
    folder: Path, fails: str, at: int
) -> None:
    link = Link()
    register(folder, folder / "i.json", link)
    old = devices(folder)["a"].node
    new_key(folder, "a")
    security.make_keys(folder, ["c"])
    asked: list[str] = []

    def failing(*words: str) -> dict[str, Any]:
        asked.append(words[1])
        if words[1] == fails and asked.count(fails) == at:
            raise PbflError("flwr supernode: no answer")
        return link(*words)

    if fails == "list":
        with pytest.raises(PbflError, match="no answer"):
            register(folder, folder / "i.json", failing)
    else:
        lines = register(folder, folder / "i.json", failing)
        assert lines == [
            f"a: has another key now; the old one, node {old}, is still registered: no answer",
            "2 keys registered",
            f"registered without a key in {folder}: node {old} (a)",
        ]
        assert (
            register(folder, folder / "i.json", link)[0]
            == "a: has another key now; the old one is unregistered"
        )
    assert {link.names[device.node]: name for name, device in devices(folder).items()} == {
        f"--name={name}": name for name in "abc"
    }
    assert devices(folder)["a"].node != old
    assert register(folder, folder / "i.json", link)[0] == "0 keys registered"


def test_a_run_says_which_node_a_key_has_and_what_runs_there(folder: Path) -> None:
    link = Link()
    register(folder, folder / "i.json", link)
    nodes = {name: device.node for name, device in devices(folder).items()}
    (folder / "i.json").unlink()
    lines = register(folder, folder / "i.json", link)
    assert lines[:2] == [
        f"{name}: [code: 23] Public key already in use.; --run tells its node, if it took part in a run"
        for name in "ab"
    ]
    assert lines[-1] == f"registered without a key in {folder}: node 101, 102"
    clients = [
        member(name, int(nodes[name]), **{"code-version": "0.1.0"}).with_key(key, name)
        for name, key in read_keys(folder).items()
    ]
    assert register(folder, folder / "i.json", link, clients=clients) == ["0 keys registered"]
    assert {name: device.node for name, device in devices(folder).items()} == nodes
    assert devices(folder)["a"].version == "0.1.0"
    assert devices(folder)["a"].architecture == clients[0].architecture


def test_network_and_version_are_of_the_run_that_is_named(folder: Path) -> None:
    link, file = Link(), folder / "i.json"
    security.make_keys(folder, ["c"])
    register(folder, file, link)
    nodes = {name: device.node for name, device in devices(folder).items()}
    clients = [
        member(name, int(nodes[name]), **{"code-version": "0.1.0"}).with_key(key, name)
        for name, key in read_keys(folder).items()
    ]
    (folder / "c.pub").unlink()  # out of service, and still registered

    def shown() -> dict[str, list[str]]:
        return {name: device.row[3:5] for name, device in devices(folder).items()}

    register(folder, file, link, clients=clients)
    of_run = [clients[0].architecture, "0.1.0"]
    assert shown() == dict.fromkeys("abc", of_run)
    register(folder, file, link)  # without a run: as before
    assert shown() == dict.fromkeys("abc", of_run)
    register(folder, file, link, clients=clients[:1])
    assert shown() == {"a": of_run, "b": ["-", "-"], "c": ["-", "-"]}
    assert {name: device.node for name, device in devices(folder).items()} == nodes
    register(folder, file, link, clients=[])
    assert shown() == {name: ["-", "-"] for name in "abc"}


def test_the_command_fails_if_a_key_is_not_registered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    monkeypatch.setattr(processes, "flwr", lambda words: link(*words))
    done = pbfl("deploy", "register", folder)
    assert (done.exit_code, "2 keys registered" in done.output) == (0, True)
    (folder / "inventory.json").unlink()
    refused = pbfl("deploy", "register", folder)
    assert (refused.exit_code, "a: [code: 23] Public key already in use." in refused.output) == (1, True)


def test_refuses_a_folder_without_keys_and_a_file_that_is_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PbflError, match="has no public keys"):
        read_keys(tmp_path)
    (folder / "c.pub").write_text("hello")
    with pytest.raises(PbflError, match=r"c\.pub is not a public key"):
        register(folder, folder / "i.json", Link())
    key = Ed25519PrivateKey.generate().public_key()
    (folder / "c.pub").write_bytes(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    with pytest.raises(PbflError, match=r"c\.pub is no key of an elliptic curve"):
        register(folder, folder / "i.json", Link())
