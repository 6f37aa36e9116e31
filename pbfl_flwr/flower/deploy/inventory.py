"""The devices of a SuperLink by name: registers their public keys, and keeps what is known of them in one file.

Flower's commands print node ids, not names, and its list has no keys: which id a key got is known from its registration
or from a run in which the device took part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from pydantic import Field

from pbfl_flwr.errors import PbflError, reading
from pbfl_flwr.flower.messages.identity import digest_of_key
from pbfl_flwr.runs.records import ClientRecord, Record
from pbfl_flwr.util.atomic_files import write_atomically

COLUMNS = ("name", "status", "last seen", "network", "pbfl-flwr", "node")
KEY_TAKEN = "[code: 23]"
Flwr = Callable[..., dict[str, Any]]
"""Runs ``flwr`` with these words, with --format json, and returns what it prints; raises PbflError if it fails."""


class Device(Record):
    """What is known of a device.

    Attributes:
        name: of its key, which is its client-id.
        key: hash of its public key, as in run.json.
        node: Flower's id, as text; empty if its key was not registered by this command and was in no run.
        earlier: hash of each earlier key -> its node, which Flower tells only once.
        status: Flower's: registered, online, offline; empty if the SuperLink does not know the node.
        last_seen: time in UTC; empty if it was never online.
        architecture, version: its network and pbfl-flwr's version in the last run that was looked at; empty if it was
            not in that run.
    """

    name: str
    key: str
    node: str = ""
    earlier: Mapping[str, str] = Field(default_factory=dict)
    status: str = ""
    last_seen: str = ""
    architecture: str = ""
    version: str = ""

    def with_key(self, key: str) -> Device:
        """Return the device with this key, which may be an earlier one."""
        if key == self.key:
            return self
        nodes = {**self.earlier, **({self.key: self.node} if self.node else {})}
        node = nodes.pop(key, "")
        return Device(name=self.name, key=key, node=node, earlier=nodes)

    @property
    def row(self) -> list[str]:
        """The cells of the table."""
        cells = (self.name, self.status, self.last_seen, self.architecture, self.version, self.node)
        return [cell or "-" for cell in cells]


class Inventory(Record):
    """The devices, by name."""

    devices: list[Device]

    @classmethod
    def read(cls, file: Path) -> Inventory:
        """Return the content of a file, which need not exist.

        Raises:
            PbflError: if it is damaged.
        """
        with reading(str(file)):
            return cls.from_json(file.read_bytes(), file) if file.exists() else cls(devices=[])

    def write(self, file: Path) -> None:
        """Write the file, all or nothing."""
        write_atomically(file, (json.dumps(self.to_json(), indent=1) + "\n").encode())


def register(
    folder: Path, file: Path, flwr: Flwr, link: str = "", clients: Sequence[ClientRecord] | None = None
) -> list[str]:
    """Register the public keys of a folder that are not registered yet, under their names, and write the inventory.

    A key that has replaced another one of the same name is registered before that one is unregistered. The inventory
    keeps a name without a key in the folder while a node of it is registered.

    Args:
        folder: with NAME.pub of every device.
        file: the inventory.
        flwr: asks the SuperLink.
        link: name of its connection; empty: the default one.
        clients: of the last run, which say node, network and version; None: what is known of them is kept.

    Returns:
        What was done or could not be done, a line each; the inventory is written in any case.

    Raises:
        OSError: if the inventory cannot be written; nothing is registered then.
        PbflError: if the folder has no keys, one cannot be read, or the SuperLink cannot be asked.
    """
    keys = read_keys(folder)
    known = {device.name: device for device in Inventory.read(file).devices}
    asked = [*([link] if link else []), "--format", "json"]
    nodes, gone = _nodes(flwr, asked)
    devices = {name: known.get(name, Device(name=name, key=key)).with_key(key) for name, key in keys.items()}
    if clients is not None:
        members = {client.key: client for client in clients}
        known, devices = (
            {name: _of_run(device, members) for name, device in group.items()} for group in (known, devices)
        )
    new = [name for name, device in devices.items() if device.node not in nodes]

    def add(name: str) -> str:
        """Register a key, remember its node, which Flower tells only once, and return why it is not registered."""
        device = devices[name]
        try:
            result = flwr("supernode", "register", str(folder / f"{name}.pub"), *asked, f"--name={name}")
            devices[name] = device.model_copy(update={"node": str(result["node-id"])})
            return ""
        except PbflError as error:
            reason = str(error).removeprefix("flwr supernode: ")
            if device.node not in gone:
                devices[name] = device.model_copy(update={"node": ""})
            elif KEY_TAKEN in reason:
                return f"{name}: its key was unregistered, and Flower takes none twice; give the device a new key"
            taken = "; --run tells its node, if it took part in a run" if KEY_TAKEN in reason else ""
            return f"{name}: {reason}{taken}"

    Inventory(devices=[*known.values()]).write(file)  # it must be writable before a key is registered
    lines: list[str] = []
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # every call starts a process
            failed = [reason for reason in pool.map(add, new) if reason]
        lines += failed
        for name, device in devices.items():
            if not device.node or device.node in gone:
                continue
            for node in (node for node in device.earlier.values() if node in nodes):
                lines.append(f"{name}: has another key now; {_without(flwr, node, asked)}")
        lines.append(f"{len(new) - len(failed)} keys registered")
        nodes, _ = _nodes(flwr, asked)
    finally:
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}"
        kept = [
            d for d in known.values() if d.name not in keys and nodes.keys() & {d.node, *d.earlier.values()}
        ]
        every = [_seen(device, nodes, now) for device in (*devices.values(), *kept)]
        Inventory(devices=sorted(every, key=lambda device: device.name)).write(file)
    names = {node: device.name for device in every for node in (device.node, *device.earlier.values())}
    if strangers := sorted(set(nodes) - {device.node for device in devices.values()}):
        shown = [f"{node} ({names[node]})" if node in names else node for node in strangers]
        lines.append(f"registered without a key in {folder}: node {', '.join(shown)}")
    return lines


def read_keys(folder: Path) -> dict[str, str]:
    """Return name -> hash of every public key NAME.pub in a folder, in ascending order of the names.

    Raises:
        PbflError: if there is none, or one cannot be read.
    """
    keys: dict[str, str] = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            public = load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise PbflError(f"{path} is not a public key ({error}); must be as pbfl keys writes it") from None
        if not isinstance(public, EllipticCurvePublicKey):  # Flower takes no other
            raise PbflError(f"{path} is no key of an elliptic curve; must be as pbfl keys writes it")
        keys[path.stem] = digest_of_key(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    if not keys:
        raise PbflError(f"{folder} has no public keys; must be a folder with NAME.pub of every device")
    return keys


def _without(flwr: Flwr, node: str, asked: Sequence[str]) -> str:
    """Unregister the node of a replaced key, and return whether that key is still registered."""
    try:
        flwr("supernode", "unregister", node, *asked)
        return "the old one is unregistered"
    except PbflError as error:
        return f"the old one, node {node}, is still registered: {str(error).removeprefix('flwr supernode: ')}"


def _nodes(flwr: Flwr, asked: Sequence[str]) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """Return node id -> what Flower lists of it, of those that are registered, and the ids of those that were."""
    listed = {node["node-id"]: node for node in flwr("supernode", "list", *asked)["nodes"]}
    gone = {number for number, node in listed.items() if node["status"] in ("unregistered", "deleted")}
    return {number: node for number, node in listed.items() if number not in gone}, gone


def _of_run(device: Device, members: Mapping[str, ClientRecord]) -> Device:
    """Return a device with what a run says of it."""
    if (member := members.get(device.key)) is None:
        return device.model_copy(update={"architecture": "", "version": ""})
    seen = {"architecture": member.architecture, "version": member.code_version}
    return device.model_copy(update={**seen, "node": str(member.node)})


def _seen(device: Device, nodes: Mapping[str, Mapping[str, Any]], now: str) -> Device:
    """Return a device with its status; one that is online is seen ``now``."""
    if (node := nodes.get(device.node)) is None:
        return device.model_copy(update={"status": ""})
    seen = {"online": now, "offline": str(node["offline-at"])}.get(node["status"], "")
    return device.model_copy(update={"status": node["status"], "last_seen": seen})
