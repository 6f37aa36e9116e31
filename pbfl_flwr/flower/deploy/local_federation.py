"""A secured federation on this machine: SuperLink and SuperNodes as processes connected over the loopback interface.

It runs the same commands as real devices (docs/deploy.md), with temporary certificates. The SuperNodes' keys stay in
the run directory: a resumed run knows its clients by them.
:func:`superlink_options` and :func:`supernode_options` give their options.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pbfl_flwr.config import Scalar, Settings
from pbfl_flwr.config.toml import parse_toml, toml
from pbfl_flwr.data import names_file
from pbfl_flwr.errors import PbflError, expanded, in_utf8, writing
from pbfl_flwr.flower.client.device import client_id_of, own_settings
from pbfl_flwr.flower.deploy import certificates as security
from pbfl_flwr.flower.deploy.processes import free_port
from pbfl_flwr.flower.deploy.superlink import ManagedSuperLink
from pbfl_flwr.flower.flower_version import has_one_port
from pbfl_flwr.util.atomic_files import NODE

KEY_VALUE = re.compile(r"""\s*([^\s=]+)=('[^']*'|"[^"]*"|\S+)(?=\s|$)""")
KEYS = "keys"  # in the run directory
PATHS = ("data-path", "state-dir", "labels")  # labels: names themselves, or a file of them


def superlink_options(fleet_address: str, certificates: Path | None) -> list[str]:
    """Return flower-superlink's options except those of its Control API (--host, --port).

    With a directory of certificates: TLS on all ports, and authentication of SuperNodes by key; else it is insecure.
    Flower versions with a single port do not use the address.
    """
    options = ["--insecure"]
    if certificates is not None:
        options = [
            *("--ssl-ca-certfile", str(certificates / security.CA_CERTIFICATE)),
            *("--ssl-certfile", str(certificates / security.SERVER_CERTIFICATE)),
            *("--ssl-keyfile", str(certificates / security.SERVER_KEY)),
            "--enable-supernode-auth",
        ]
    return options if has_one_port() else [*options, "--fleet-api-address", fleet_address]


def supernode_options(
    superlink: str, port: int, node_config: Path, ca: Path | None, key: Path | None
) -> list[str]:
    """Return flower-supernode's options.

    Without TLS where ``ca`` is None, without authentication where ``key`` is. The port is its own, on the loopback
    interface, and must differ between SuperNodes of a machine.
    """
    trust = ["--root-certificates", str(ca)] if ca else ["--insecure"]
    authentication = ["--auth-supernode-private-key", str(key)] if key else []
    address = ["--superlink", superlink, "--port", str(port)]
    return [*trust, *authentication, *address, "--node-config", str(node_config)]


def node_config(text: str) -> dict[str, Scalar]:
    """Parse ``key=value key='text'`` like ``flower-supernode --node-config``, but refuse what Flower would ignore.

    Raises:
        PbflError: giving the invalid part and what is allowed.
    """
    if rest := KEY_VALUE.sub("", text).strip():
        raise PbflError(
            f"node configuration {text} at '{rest}': must be key=value, without spaces around the ="
        )
    pairs = [f"{key} = {value}" for key, value in KEY_VALUE.findall(text)]
    try:
        config: dict[str, Any] = parse_toml("\n".join(pairs))
        if invalid := [
            key for key, value in config.items() if not isinstance(value, bool | int | float | str)
        ]:
            raise ValueError(f"{invalid[0]} is a {type(config[invalid[0]]).__name__}")
    except ValueError as error:  # of TOML, too
        raise PbflError(
            f"node configuration {text}: every key must be given once, with one number, true, false or text in "
            f"quotes, key='text' ({error})"
        ) from None
    return config


def complete(nodes: Sequence[Mapping[str, Scalar]], count: int, directory: Path) -> list[dict[str, Scalar]]:
    """Return the complete configuration of every SuperNode: with client id, state directory and absolute paths.

    Configurations are given for the first SuperNodes; the others get the defaults, with state directories in
    ``directory``.

    Raises:
        PbflError: if more configurations were given than there are SuperNodes.
    """
    if len(nodes) > count:
        raise PbflError(
            f"--node was given {len(nodes)} times: must be up to {count}, the number of SuperNodes"
        )
    complete_nodes = []
    for index in range(count):
        node: dict[str, Scalar] = {"client-id": index, "state-dir": str(directory / f"{NODE}{index}")}
        if index < len(nodes):
            node |= nodes[index]
        for key in PATHS:
            if key in node and (key != "labels" or names_file(str(node[key])) is not None):
                node[key] = str(expanded(str(node[key])).absolute())
        complete_nodes.append(node)
    return complete_nodes


def check(settings: Settings, nodes: Sequence[Mapping[str, Scalar]]) -> list[Settings]:
    """Return every SuperNode's own settings.

    Raises:
        PbflError: naming a node whose configuration is not allowed, or two with the same client id.
    """
    node_settings = []
    owners: dict[Scalar, int] = {}
    for index, node in enumerate(nodes):
        other = owners.setdefault(node["client-id"], index)
        if other != index:
            raise PbflError(f"--node {other} and --node {index}: both are client-id {node['client-id']}")
        try:
            client_id_of(node)
            for key, value in node.items():
                in_utf8(key, str(value))
            node_settings.append(own_settings(settings, node))
        except PbflError as error:
            raise PbflError(f"--node {index}: {error}") from None
    return node_settings


class Deployment(ManagedSuperLink):
    """SuperLink and SuperNodes on this machine, as a context manager.

    Args:
        run_dir: absolute; Flower's logs are written there (flower.log, supernode-0.log, ...).
        nodes: each SuperNode's configuration, see :func:`complete`.
        secure: use TLS on all ports, and admit only SuperNodes with registered keys.
        tell: called with a line when a SuperNode ends by itself.
    """

    def __init__(
        self,
        run_dir: Path,
        nodes: Sequence[Mapping[str, Scalar]],
        *,
        secure: bool = True,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(run_dir)
        self.fleet_address = ""
        self._nodes = nodes
        self._secure = secure
        self._tell = tell
        self._supernodes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def certificates(self) -> Path | None:
        """Directory of certificates and keys; None without TLS."""
        return self._scratch / "security" if self._secure else None

    @property
    def ca(self) -> Path | None:
        """The authority's certificate, which devices also need; None without TLS."""
        return self.certificates and self.certificates / security.CA_CERTIFICATE

    def key(self, index: int) -> Path | None:
        """Return the private key of a SuperNode; None without authentication."""
        return self.run_dir / KEYS / f"node-{index}" if self._secure else None

    def submit(self, app: Path, config: Mapping[str, Scalar]) -> str:
        """Submit the app and return Flower's run id.

        Raises:
            PbflError: if Flower refuses the run.
        """
        return self._run(app, config)

    def ended(self) -> bool:
        """Whether the run seems to have ended, or a SuperNode has; :meth:`outcome` gives the status."""
        return super().ended() or any(process.poll() is not None for process in self._supernodes.values())

    def outcome(self, run_id: str) -> tuple[str, str]:
        """Return Flower's (status, details) of the run; calls ``tell`` for SuperNodes that have ended.

        Raises:
            PbflError: if a SuperNode ended before the run began, or if all SuperNodes or the SuperLink have ended.
        """
        status = super().outcome(run_id)
        for index, process in list(self._supernodes.items()):
            if process.poll() is not None:
                del self._supernodes[index]
                line = (
                    f"SuperNode {index} ended with exit code {process.returncode}, see {self.log_of(index)}"
                )
                if not (self.run_dir / "run.json").exists() or not self._supernodes:
                    raise PbflError(line)
                self._tell(line)
        return status

    def log_of(self, index: int) -> Path:
        """Return the file with a SuperNode's output."""
        return self.run_dir / f"supernode-{index}.log"

    def start_node(
        self, index: int, node: Mapping[str, Scalar], key: Path | None, ca: Path | None
    ) -> subprocess.Popen[bytes]:
        """Start one SuperNode.

        Its number is used in the names of its log and FLWR_HOME; key and CA as in :func:`supernode_options`.
        """
        home = self._scratch / f"node-{index}"
        file = home / "node.toml"
        with writing(home):
            home.mkdir(exist_ok=True)
            file.write_text(toml(node), encoding="utf-8")
        options = supernode_options(self.fleet_address, free_port(), file, ca, key)
        return self._spawn("flower-supernode", *options, log=self.log_of(index), home=home.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._supernodes.values():  # in parallel, since each takes seconds to disconnect
            process.terminate()
        super().__exit__(kind, error, trace)

    def _prepare(self) -> None:
        if self.certificates:
            with writing(self.certificates):
                security.make_certificates(self.certificates, ["127.0.0.1", "localhost"], days=30)
            keys = [key for index in range(len(self._nodes)) if (key := self.key(index))]
            new = [key for key in keys if not key.with_name(f"{key.name}.pub").exists()]
            with writing(self.run_dir / KEYS):
                for key in new:
                    key.unlink(missing_ok=True)  # its pair was not finished, and never used
                security.make_keys(self.run_dir / KEYS, [key.name for key in new])

    def _options(self, address: str) -> list[str]:
        self.fleet_address = address if has_one_port() else f"127.0.0.1:{free_port()}"
        return superlink_options(self.fleet_address, self.certificates)

    def _complete(self) -> None:
        for index, node in enumerate(self._nodes):
            if key := self.key(index):
                name = f"--name={node['client-id']}"  # binds the client-id to the key
                self._flwr("supernode", "register", f"{key}.pub", name, "--format", "json")
            self.log_of(index).unlink(missing_ok=True)
            self._supernodes[index] = self.start_node(index, node, key, self.ca)
