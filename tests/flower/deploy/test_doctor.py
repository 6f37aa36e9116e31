"""The doctor, against Flower's own Fleet API with TLS in this process, and on recorded outputs of SuperNodes."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.cli.flower_superlink import _run_fleet_api_grpc_rere
from flwr.superlink.federation import NoOpFederationManager

from pbfl_flwr.flower.deploy import admission, connection, doctor
from pbfl_flwr.flower.deploy import certificates as security
from pbfl_flwr.flower.deploy.doctor import CheckTargets
from pbfl_flwr.flower.deploy.findings import Finding, Status
from tests.small_runs import pbfl


@pytest.fixture(scope="module")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A Fleet API with TLS and SuperNode authentication, and the registered key pair ``known``."""
    files = tmp_path_factory.mktemp("security")
    security.make_certificates(files, ["127.0.0.1"], 60)
    security.make_keys(files, ["known"])
    public = serialization.load_ssh_public_key((files / "known.pub").read_bytes())
    assert isinstance(public, ec.EllipticCurvePublicKey)
    objects = ObjectStoreFactory()
    states = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), objects)
    states.state().create_node("", "", public_key_to_bytes(public), 0)
    ca, certificate, key = ((files / name).read_bytes() for name in ("ca.pem", "server.pem", "server.key"))
    server = _run_fleet_api_grpc_rere(
        "127.0.0.1:0", states, objects, True, (ca, certificate, key), [NodeAuthServerInterceptor(states)]
    )
    yield SimpleNamespace(address=server.bound_address, files=files)
    server.stop(None)


def said(name: str) -> str:
    """What a SuperNode printed, without the lines of its web server."""
    return (Path(__file__).parent / "supernode_outputs" / f"{name}.txt").read_text()


def findings_by_subject(targets: CheckTargets) -> dict[str, Finding]:
    return {finding.what: finding for finding in doctor.check_connection(targets)}


def test_reports_what_a_supernode_would_meet(superlink: SimpleNamespace, tmp_path: Path) -> None:
    address, ca, key = superlink.address, superlink.files / "ca.pem", superlink.files / "known"
    findings = findings_by_subject(CheckTargets(address, ca, key))
    assert {what: finding.status for what, finding in findings.items()} == dict.fromkeys(
        ("superlink", "supernode", "tls", "key"), Status.OK
    )
    security.make_certificates(tmp_path, ["127.0.0.1"], 60)
    foreign = findings_by_subject(CheckTargets(address, tmp_path / "ca.pem", key))["supernode"]
    assert foreign.status is Status.FAILED
    assert foreign.message.endswith("unable to get local issuer certificate")
    if os.name == "posix":
        security.make_keys(tmp_path, ["open"])
        (tmp_path / "open").chmod(0o644)
        assert doctor.check_key_file(tmp_path / "open").status is Status.WARNING
        public = doctor.check_key_file(tmp_path / "open.pub")
        assert (public.status, public.message) == (
            Status.FAILED,
            f"{tmp_path / 'open.pub'} is not a private key that Flower can read",
        )


KEY = Path("site-a")


@pytest.mark.parametrize(
    ("name", "code", "status", "words"),
    [
        ("admitted", None, Status.OK, "admits this device as node 2354141738751265943"),
        ("unknown-key", 1, Status.FAILED, "not registered.*pbfl deploy register, with site-a.pub"),
        ("wrong-clock", 0, Status.FAILED, r"a clock .* \d\d:\d\d:\d\d UTC; .*timedatectl set-ntp true"),
        ("control", 1, Status.FAILED, "this is the Control API, .*port 9092"),
        ("control-insecure", 1, Status.FAILED, "this is the Control API, .*port 9092"),
        ("foreign-ca", 1, Status.FAILED, "refused: unable to get local issuer certificate; .*ca.pem"),
        (
            "foreign-ca-flower-1.42",
            1,
            Status.FAILED,
            "refused: unable to get local issuer certificate; .*ca.pem",
        ),
        ("clock-of-1970", 1, Status.FAILED, "certificate is not yet valid; set the clock: timedatectl"),
        ("other-host", 1, Status.FAILED, "for other names .*pbfl certs --renew with a --host"),
        ("tls-to-plain", 1, Status.FAILED, "no TLS on this port"),
        ("insecure-to-tls", 1, Status.FAILED, "leave out --insecure and give --ca"),
        ("damaged-key", 1, Status.FAILED, "Unable to parse the private key file; pbfl keys"),
        ("damaged-ca", 1, Status.FAILED, "--ca holds no PEM certificate"),
        ("no-ca", 1, Status.FAILED, "--ca is not a file; copy the server's ca.pem"),
        ("silent", 1, Status.FAILED, "nothing answers a TLS handshake; is this the SuperLink's address"),
        (
            "nobody-listens",
            1,
            Status.FAILED,
            "ended with exit code 1: failed to connect .*Connection refused",
        ),
    ],
)
def test_translates_what_a_supernode_says(name: str, code: int | None, status: Status, words: str) -> None:
    finding = admission.translated(said(name), code, KEY, insecure=name == "insecure-to-tls")
    assert finding.status is status
    assert re.search(words, f"{finding.message}; {finding.advice}"), finding


def test_without_a_key_it_tells_whether_the_superlink_asks_for_one() -> None:
    assert admission.translated(said("no-key"), 1, None, insecure=False).status is Status.OK
    for insecure, words in ((False, "as it does anybody"), (True, "without TLS: anyone on the network path")):
        finding = admission.translated(said("admitted"), None, None, insecure)
        assert finding.status is Status.WARNING
        assert words in finding.message


@pytest.mark.parametrize(("then", "status"), [("admitted", Status.OK), ("unknown-key", Status.FAILED)])
def test_asks_again_when_a_killed_supernode_is_forgotten(
    then: str, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([(said("unknown-key"), 1), (said(then), None)])
    monkeypatch.setattr(admission, "FORGOTTEN_SECONDS", 0.0)
    monkeypatch.setattr(admission, "answer", lambda options: next(answers))
    told: list[str] = []
    finding = admission.check_admission("x:9092", None, KEY, False, told.append)
    assert finding.status is status
    assert finding.message.endswith("still counted as online") is (status is Status.OK)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("admitted", "admits this device .*, but process 7 .* is not connected; restart that SuperNode"),
        ("unknown-key", "refuses a second SuperNode with this key: process 7 here uses it"),
    ],
)
def test_a_supernode_of_this_machine_is_online_or_hangs(
    output: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "answer", lambda options: (said(output), None))
    monkeypatch.setattr(admission, "user_of", lambda key: 7)
    finding = admission.check_admission("x:9092", None, KEY, False, print)
    assert finding.status is Status.WARNING
    assert re.search(words, f"{finding.message}; {finding.advice}"), finding


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_finds_the_supernode_that_uses_a_key(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    (tmp_path / "flower-supernode").write_text("print(flush=True); input()")
    words = [sys.executable, "flower-supernode", "--auth-supernode-private-key", "key"]
    with subprocess.Popen(words, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        assert admission.user_of(tmp_path / "key") == process.pid
        assert admission.user_of(tmp_path / "flower-supernode") is None
        process.communicate(b"\n")
    assert admission.user_of(tmp_path / "key") is None


def test_warns_before_the_certificate_expires(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    security.make_certificates(tmp_path, ["127.0.0.1"], 5)
    shown = security.read_certificate(tmp_path / "server.pem")
    monkeypatch.setattr(connection, "server_certificate", lambda *_, **__: shown)
    finding = doctor.check_certificate("127.0.0.1:1", tmp_path / "ca.pem")
    assert finding.status is Status.WARNING
    end = datetime.now(UTC) + timedelta(days=5)
    assert finding.message == f"verified, for 127.0.0.1, until {end:%Y-%m-%d}"
    assert "--renew on the server" in finding.advice


def test_reports_unreachable_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    taken.close()
    assert "refuses" in doctor.check_address("superlink", f"127.0.0.1:{port}").message
    assert "HOST:PORT" in doctor.check_address("superlink", "127.0.0.1").message

    def dropped(*_: Any) -> None:
        raise OSError(113, "No route to host")

    with monkeypatch.context() as here:
        here.setattr(socket, "create_connection", dropped)
        finding = doctor.check_address("superlink", "127.0.0.1:9092")
    assert finding.message == "127.0.0.1:9092 (127.0.0.1) does not answer (No route to host)"
    assert finding.advice.startswith("a firewall or a wrong route")
    assert "is not found" in doctor.check_address("superlink", "nobody.invalid:1").message
    for name in ("a..b", "x" * 64):
        message = doctor.check_address("superlink", f"{name}:9092").message
        assert message == f"the name '{name}' is not found (not a valid host name)"


def test_control_api_answers_with_or_without_tls() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        assert doctor.check_control_api(address, None, insecure=True).status is Status.OK
        finding = doctor.check_control_api(address, Path(__file__), insecure=False)
        assert finding.message.startswith(f"--ca = '{__file__}' cannot be read: ")
        finding = doctor.check_control_api(address, None, insecure=False)
        server.shutdown()
    assert finding.status is Status.FAILED
    assert finding.message.startswith(f"{address} is not a Control API ([SSL")


def test_rejects_unknown_device() -> None:
    result = pbfl("doctor", "--device", "cuad")
    assert result.exit_code == 2
    assert result.stderr == "error: --device cuad: must be one of auto, cpu, cuda, mps\n"


def test_gpu_must_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70e9, 80e9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    with monkeypatch.context() as here:
        here.setattr(torch, "ones", lambda n, device: torch.full((n,), 1.0))
        assert doctor.check_gpu("auto") == Finding("gpu", Status.OK, "H100, 70.0 of 80.0 GB free")

    def lacking(n: int, device: str) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(torch, "ones", lacking)
    finding = doctor.check_gpu("auto")
    assert finding.status is Status.FAILED
    assert "no kernel image is available for execution" in finding.message
    assert "torch build for this GPU" in finding.advice


@pytest.mark.parametrize(("wanted", "status"), [("auto", Status.WARNING), ("cuda", Status.FAILED)])
def test_reports_old_driver(wanted: str, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    finding = doctor.check_gpu(wanted)
    assert finding.status is status
    assert "cannot use the 2 in this machine: CUDA initialization: The NVIDIA driver" in finding.message


def test_checks_state_directory_and_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "pi"))
    finding = doctor.check_state_dir(Path("~/state"))
    assert f"{tmp_path / 'pi' / 'state'} can be made in {tmp_path}" in finding.message
    assert not (tmp_path / "pi").exists()
    (tmp_path / "file").touch()
    assert doctor.check_state_dir(tmp_path / "file" / "state").status is Status.FAILED
    (tmp_path / "state").symlink_to(tmp_path / "usb" / "state")
    finding = doctor.check_state_dir(tmp_path / "state")
    assert finding.status is Status.FAILED
    assert finding.advice == f"it is a link to {tmp_path / 'usb' / 'state'}: is the disk there mounted?"

    for number, advice in ((errno.ENOSPC, "free space: "), (errno.EROFS, "its file system is read-only: ")):
        with patch.object(os, "fsync", side_effect=OSError(number, os.strerror(number))):
            finding = doctor.check_state_dir(tmp_path)
        assert finding.message == f"{tmp_path} cannot be written ({os.strerror(number)})"
        assert finding.advice.startswith(advice)

    def usage(free: float) -> Callable[[Path], SimpleNamespace]:
        return lambda path: SimpleNamespace(free=free)

    for free, status in ((5e9, Status.OK), (5e8, Status.WARNING), (5e6, Status.FAILED)):
        monkeypatch.setattr(shutil, "disk_usage", usage(free))
        assert doctor.check_state_dir(tmp_path).status is status

    look = os.stat

    def denied(path: Any = "", **more: Any) -> Any:
        if "dir" in more or Path(path).parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **more)

    monkeypatch.setattr(os, "stat", denied)
    monkeypatch.setattr(os, "lstat", lambda path, **more: denied(path, **more, follow_symlinks=False))
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", denied)
    finding = doctor.check_state_dir(tmp_path / "new")
    assert finding.status is Status.FAILED
    assert finding.message == f"{tmp_path} cannot be written (Permission denied)"


def test_checks_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))
    assert doctor.check_home() == Finding("home", Status.OK, f"{tmp_path / 'home'} can be made in {tmp_path}")
    (tmp_path / "file").touch()
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "file" / "home"))
    finding = doctor.check_home()
    assert finding.status is Status.FAILED
    assert finding.message == f"{tmp_path / 'file'} cannot be written (Not a directory)"
    assert finding.advice == "data cannot be decoded into it: set PBFL_HOME to another place"
    (tmp_path / "used" / "cache").mkdir(parents=True)
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "used"))
    monkeypatch.setattr(doctor, "_write_error", lambda place: OSError(errno.EROFS, "Read-only file system"))
    assert doctor.check_home().status is Status.WARNING  # what was decoded is still there
    subjects = {finding.what for finding in doctor.examine(CheckTargets(state_dir=tmp_path))}
    assert {"state-dir", "home"} <= subjects


@pytest.mark.skipif(os.name != "posix", reason="users without a home are POSIX's")
def test_reports_user_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PBFL_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", nobody)
    finding = doctor.check_home()
    assert finding.status is Status.FAILED
    assert "set the environment variable PBFL_HOME" in finding.message


def test_installed_versions_fit() -> None:
    assert {finding.what: finding.status for finding in doctor.check_versions()} == dict.fromkeys(
        ("python", "flwr", "torch", "pbfl-flwr"), Status.OK
    )


def test_exit_code_reports_failure(superlink: SimpleNamespace) -> None:
    files = superlink.files
    common = ["doctor", "--superlink", superlink.address, "--ca", files / "ca.pem", "--json"]
    good = pbfl(*common, "--key", files / "known")
    assert good.exit_code == 0, good.output
    bad = pbfl(*common, "--key", files / "nowhere")
    assert bad.exit_code == 1
    failed = [line for line in json.loads(bad.stdout) if line["status"] == "failed"]
    assert [line["what"] for line in failed] == ["key"]
    assert "cannot be read" in failed[0]["message"]
    table = pbfl("doctor", "--key", files / "nowhere")
    assert table.exit_code == 1
    assert "cannot be read" in table.stdout.replace("\n", " ")
