"""One CA and one certificate for the server, and key pairs for the devices.

Certificates are X.509 on the curve P-256; device keys are in OpenSSH format on P-384, as Flower's SuperNode
authentication requires. Nothing here needs Flower.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.atomic_files import write_atomically

CA_CERTIFICATE, CA_KEY = "ca.pem", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.pem", "server.key"
KEY_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
CA_DAYS = 3650
BACKDATED = timedelta(days=1)  # so that a device whose clock is slow does not refuse a new certificate
LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


# Certificates ---------------------------------------------------------------------------------------------------


def make_certificates(directory: Path, hosts: Sequence[str], days: int) -> None:
    """Write a new certificate authority, valid for ten years, and a server certificate signed by it.

    ``hosts`` are the names and IP addresses under which devices reach the server; its certificate is valid for so many
    ``days``. Keys are readable by their owner only.

    Raises:
        PbflError: if a host is no valid name or address, or if a file exists or cannot be written; nothing is written
            then.
    """
    names = _alternatives(hosts)
    key, subject = ec.generate_private_key(ec.SECP256R1()), _name(f"pbfl CA {os.urandom(4).hex()}")
    usage = {name: name in ("key_cert_sign", "crl_sign") for name in KEY_USAGES}
    more = ((x509.BasicConstraints(ca=True, path_length=0), True), (x509.KeyUsage(**usage), True))
    ca = _signed(subject, key.public_key(), subject, key, _in_days(CA_DAYS), more)
    files = {CA_CERTIFICATE: ca.public_bytes(Encoding.PEM), CA_KEY: _pem(key)}
    advice = "--renew replaces the server's certificate; a new CA needs another directory"
    _write_new(directory, files | _of_server(names, days, ca, key), (CA_KEY, SERVER_KEY), advice)


def renew_certificate(directory: Path, hosts: Sequence[str], days: int) -> None:
    """Replace the server's certificate and key; the CA, and with it the devices' ca.pem, stays.

    The new certificate ends at the latest with the CA's.

    Raises:
        PbflError: if a host is no valid name or address, or if the CA is missing, has another key or has expired.
    """
    names = _alternatives(hosts)
    ca = read_certificate(directory / CA_CERTIFICATE)
    if ca.not_valid_after_utc <= datetime.now(UTC):
        raise PbflError(
            f"{directory / CA_CERTIFICATE} expired on {ca.not_valid_after_utc:%Y-%m-%d}; make a new CA in another "
            "directory, whose ca.pem every device needs"
        )
    try:
        key = load_pem_private_key(_read(directory / CA_KEY), None)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise PbflError(f"{directory / CA_KEY} is not a private key ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise PbflError(f"{directory / CA_KEY} is not the key of {directory / CA_CERTIFICATE}")
    _write(directory, _of_server(names, days, ca, key), private=(SERVER_KEY,))


def read_certificate(path: Path) -> x509.Certificate:
    """Return the first certificate of a PEM file.

    Raises:
        PbflError: if there is none.
    """
    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError as error:
        raise PbflError(f"{path} holds no PEM certificate ({error})") from None


def alternatives(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses in a certificate's subjectAltName extension."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _of_server(
    names: Sequence[x509.GeneralName], days: int, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey
) -> dict[str, bytes]:
    """Return the server's new key and certificate, by file name."""
    key = ec.generate_private_key(ec.SECP256R1())
    more = (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(names), False),
    )
    end = min(_in_days(days), ca.not_valid_after_utc)
    certificate = _signed(_name(str(names[0].value)[:64]), key.public_key(), ca.subject, ca_key, end, more)
    return {SERVER_KEY: _pem(key), SERVER_CERTIFICATE: certificate.public_bytes(Encoding.PEM)}


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    end: datetime,
    more: Iterable[tuple[x509.ExtensionType, bool]],
) -> x509.Certificate:
    """Return a certificate with ``more`` extensions, each with whether it is critical."""
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    builder = builder.not_valid_before(datetime.now(UTC) - BACKDATED).not_valid_after(end)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    for extension, critical in (
        (x509.SubjectKeyIdentifier.from_public_key(key), False),
        (authority, False),
        *more,
    ):
        builder = builder.add_extension(extension, critical)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _in_days(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def _alternatives(hosts: Sequence[str]) -> list[x509.GeneralName]:
    if not hosts:
        raise PbflError("--host is missing: the names and IP addresses under which devices reach the server")
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            labels = host.split(".")  # a numeric last label means a mistyped IP address
            if len(host) > 253 or labels[-1].isdigit() or not all(map(LABEL.fullmatch, labels)):
                raise PbflError(
                    f"--host {host!r}: must be a name like fl.example.org or an IP address, without a port"
                ) from None
            names.append(x509.DNSName(host))
    return names


# Keys of devices ------------------------------------------------------------------------------------------------


def make_keys(directory: Path, names: Sequence[str]) -> None:
    """Write a key pair for every device: NAME (private, readable by the owner only) and NAME.pub.

    Raises:
        PbflError: if a name is invalid or repeated, or if a file exists or cannot be written; nothing is written then.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name) or name.endswith(".pub"):
            raise PbflError(
                f"name {name!r}: must be 1 to 64 letters, digits, '.', '-' and '_', not ending in .pub"
            )
    if len(set(names)) < len(names):
        raise PbflError(f"names {', '.join(names)}: must differ")
    pairs: dict[str, bytes] = {}
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        pairs |= {name: private, f"{name}.pub": public + f" {name}\n".encode()}
    _write_new(directory, pairs, names, "keys are not replaced; choose another name or directory")


def readable_by_others(path: Path) -> bool:
    """Whether a private file may be accessed by anyone but its owner; always False outside POSIX."""
    return os.name == "posix" and bool(path.stat().st_mode & 0o077)


def _write(directory: Path, files: Mapping[str, bytes], private: Collection[str]) -> None:
    """Write files (name -> content), overwriting existing ones; those named in ``private`` are for their owner only."""
    for name, data in files.items():
        write_atomically(directory / name, data, private=name in private)


def _write_new(directory: Path, files: Mapping[str, bytes], private: Collection[str], advice: str) -> None:
    """Write all files or none: some, e.g. half of a pair, would be refused the next time.

    Raises:
        PbflError: if one exists, which ``advice`` is for, or cannot be written.
    """
    if existing := [str(directory / name) for name in files if os.path.lexists(directory / name)]:
        raise PbflError(f"{', '.join(existing)}: already exists; {advice}")
    with ExitStack() as undo:
        for name in files:
            undo.callback((directory / name).unlink, missing_ok=True)
        _write(directory, files, private)
        undo.pop_all()


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PbflError(f"{path} cannot be read ({error.strerror})") from None
