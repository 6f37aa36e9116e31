"""Certificates and keys, seen by others than their makers: OpenSSL through Python's ssl, Flower's own loaders."""

import errno
import os
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.deploy import certificates as security
from pbfl_flwr.flower.deploy.connection import server_certificate
from pbfl_flwr.util.addresses import split_address


@contextmanager
def server(directory: Path, *, talks_tls: bool = True) -> Iterator[str]:
    """A server on the loopback interface that shakes hands with everybody and says nothing more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem", directory / "server.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with plain:
                try:
                    if talks_tls:
                        context.wrap_socket(plain, server_side=True).close()
                    else:
                        plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                except OSError:
                    continue

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_certificate_is_accepted_under_its_names_with_its_ca(tmp_path: Path) -> None:
    security.make_certificates(tmp_path, ["fl.example.org", "127.0.0.1", "::1"], 30)
    with server(tmp_path) as address:
        certificate = server_certificate(address, tmp_path / "ca.pem")
    assert security.alternatives(certificate) == ["fl.example.org", "127.0.0.1", "::1"]
    left = certificate.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_private_files_belong_to_their_owner(tmp_path: Path) -> None:
    security.make_certificates(tmp_path, ["localhost"], 30)
    security.make_keys(tmp_path, ["a", "b"])
    assert {name: mode(tmp_path / name) for name in ("ca.key", "server.key", "a", "b")} == dict.fromkeys(
        ("ca.key", "server.key", "a", "b"), 0o600
    )
    (tmp_path / "a").chmod(0o640)
    assert security.readable_by_others(tmp_path / "a")
    assert not security.readable_by_others(tmp_path / "b")


def test_gives_the_reason_of_a_refused_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(served: str, ca: str | None, *, talks_tls: bool = True) -> str:
        with server(tmp_path / served, talks_tls=talks_tls) as address, pytest.raises(PbflError) as error:
            server_certificate(address, tmp_path / ca / "ca.pem" if ca else None)
        return str(error.value)

    security.make_certificates(tmp_path / "good", ["127.0.0.1"], 30)
    security.make_certificates(tmp_path / "foreign", ["127.0.0.1"], 30)
    security.make_certificates(tmp_path / "elsewhere", ["fl.example.org", "10.0.0.5"], 30)
    monkeypatch.setattr(security, "BACKDATED", timedelta(days=9))
    security.make_certificates(tmp_path / "old", ["127.0.0.1"], -2)
    monkeypatch.setattr(security, "BACKDATED", timedelta(days=-1))
    security.make_certificates(tmp_path / "early", ["127.0.0.1"], 30)
    refused = "the certificate is refused: "
    assert reason("good", "foreign") == f"{refused}unable to get local issuer certificate"
    assert reason("good", None) == f"{refused}unable to get local issuer certificate"
    assert "certificate is not valid for '127.0.0.1'" in reason("elsewhere", "elsewhere")
    assert reason("old", "old") == f"{refused}certificate has expired"
    assert reason("early", "early") == f"{refused}certificate is not yet valid"
    assert reason("good", "good", talks_tls=False).startswith("no TLS on this port ([SSL")


def test_damaged_copy_of_the_ca_is_reported(tmp_path: Path) -> None:
    security.make_certificates(tmp_path, ["127.0.0.1"], 30)
    ca = (tmp_path / "ca.pem").read_text()
    with server(tmp_path) as address:
        for copy in ("  " + ca, ca + ca[:300]):  # from a file that indents it; two, the second cut short
            (tmp_path / "copy.pem").write_text(copy)
            with pytest.raises(PbflError, match=r"copy.pem holds no PEM certificate .*: copy it again"):
                server_certificate(address, tmp_path / "copy.pem")


def test_renewed_certificate_is_accepted_with_the_old_ca(tmp_path: Path) -> None:
    security.make_certificates(tmp_path, ["fl.example.org"], 30)
    ca = (tmp_path / "ca.pem").read_bytes()
    security.renew_certificate(tmp_path, ["127.0.0.1"], 60)
    assert (tmp_path / "ca.pem").read_bytes() == ca
    with server(tmp_path) as address:
        server_certificate(address, tmp_path / "ca.pem")
    other = tmp_path / "other"
    security.make_certificates(other, ["127.0.0.1"], 30)
    (other / "ca.key").replace(tmp_path / "ca.key")
    with pytest.raises(PbflError, match="is not the key of"):
        security.renew_certificate(tmp_path, ["127.0.0.1"], 60)


def test_certificate_ends_at_the_latest_with_its_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def days_left(name: str) -> int:
        end = security.read_certificate(tmp_path / name).not_valid_after_utc
        return round((end - datetime.now(UTC)) / timedelta(days=1))

    security.make_certificates(tmp_path / "usual", ["127.0.0.1"], 30)
    assert (days_left("usual/ca.pem"), days_left("usual/server.pem")) == (3650, 30)
    monkeypatch.setattr(security, "CA_DAYS", 2)
    security.make_certificates(tmp_path, ["127.0.0.1"], 1)
    assert (days_left("ca.pem"), days_left("server.pem")) == (2, 1)
    security.renew_certificate(tmp_path, ["127.0.0.1"], 365)
    assert days_left("server.pem") == 2
    renewed, ca = (security.read_certificate(tmp_path / name) for name in ("server.pem", "ca.pem"))
    assert renewed.not_valid_after_utc == ca.not_valid_after_utc
    monkeypatch.setattr(security, "BACKDATED", timedelta(days=9))
    monkeypatch.setattr(security, "CA_DAYS", -2)
    security.make_certificates(tmp_path / "old", ["127.0.0.1"], 1)
    before = (tmp_path / "old/server.pem").read_bytes()
    with pytest.raises(PbflError, match=r"ca\.pem expired on .*; make a new CA in another directory"):
        security.renew_certificate(tmp_path / "old", ["127.0.0.1"], 365)
    assert (tmp_path / "old/server.pem").read_bytes() == before


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    security.make_certificates(tmp_path, ["localhost"], 30)
    security.make_keys(tmp_path, ["a"])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(
        PbflError, match="already exists; --renew replaces the server's certificate; a new CA"
    ):
        security.make_certificates(tmp_path, ["localhost"], 30)
    with pytest.raises(PbflError, match="keys are not replaced"):
        security.make_keys(tmp_path, ["b", "a"])
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "ca.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PbflError, match=r"ca\.pem: already exists; --renew replaces"):
        security.make_certificates(tmp_path / "new", ["localhost"], 30)


def test_keys_are_read_as_by_flower(tmp_path: Path) -> None:
    security.make_keys(tmp_path, ["site-a"])
    private = serialization.load_ssh_private_key((tmp_path / "site-a").read_bytes(), None)
    public = serialization.load_ssh_public_key((tmp_path / "site-a.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == public
    assert private.curve.name == "secp384r1"


HOSTS = (
    "",
    "a b",
    "-x.org",
    "host:9092",
    "https://x.org",
    "x" * 64,
    "*.org",
    "192.168.1.300",
    "192.168.001.5",
    "10",
)


@pytest.mark.parametrize("host", HOSTS)
def test_rejects_invalid_hosts(host: str, tmp_path: Path) -> None:
    with pytest.raises(PbflError, match="--host"):
        security.make_certificates(tmp_path / "new", [host], 30)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("last", ["c.pub", "server.pem"])
def test_a_full_disk_leaves_no_half_of_a_pair(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security.make_keys(tmp_path, ["a"])
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}

    def make() -> None:
        if last == "c.pub":
            security.make_keys(tmp_path, ["b", "c"])
        else:
            security.make_certificates(tmp_path, ["localhost"], 30)

    def full(descriptor: int) -> None:
        if any(tmp_path.glob(f".{last}.*.tmp")):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(PbflError, match=rf"{last} cannot be written \(No space left on device\)"):
            make()
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    make()


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".a", "a.pub", "-a"])
def test_rejects_invalid_names_of_keys(name: str, tmp_path: Path) -> None:
    with pytest.raises(PbflError, match="name"):
        security.make_keys(tmp_path, [name])


def test_parses_addresses() -> None:
    assert split_address("fl.example.org:9092") == ("fl.example.org", 9092)
    assert split_address("[::1]:9092") == ("::1", 9092)
    for wrong in ("fl.example.org", ":9092", "x:0", "x:65536", "x:port"):
        with pytest.raises(PbflError, match="HOST:PORT"):
            split_address(wrong)
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    with pytest.raises(PbflError, match="cannot be reached"):
        server_certificate(f"127.0.0.1:{port}", None)
