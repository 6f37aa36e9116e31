"""Certificates for the server, key pairs for the devices, and the certificate that a server shows.

Certificates are X.509 on the curve P-256; device keys are in OpenSSH format on P-384, as Flower's SuperNode
authentication requires. Nothing here needs Flower.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.atomic_files import write_atomically

CA_CERTIFICATE, CA_KEY = "ca.pem", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.pem", "server.key"
NODE_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
CA_DAYS = 3650
BACKDATED = timedelta(days=1)  # so that a device whose clock is slow does not refuse a new certificate
LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


# Certificates ---------------------------------------------------------------------------------------------------


def make_certificates(
    directory: Path, hosts: Sequence[str], days: int, *, ca_days: int = CA_DAYS, force: bool = False
) -> None:
    """Write a new certificate authority and a server certificate signed by it.

    ``hosts`` are the names and IP addresses under which devices reach the server. Its certificate is valid for so many
    days, and at the latest until the CA's ends; then, as after ``force`` has overwritten the files, every device needs
    the new ca.pem. Keys are readable by their owner only.

    Raises:
        PbflError: if a host is no valid name or address, or if a file exists.
    """
    names = _alternatives(hosts)
    files = [directory / name for name in (CA_CERTIFICATE, CA_KEY, SERVER_CERTIFICATE, SERVER_KEY)]
    if not force:
        _refuse_existing(
            files, "--force replaces them, --renew keeps the CA and replaces the server's certificate"
        )
    ca_key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pbfl CA {os.urandom(4).hex()}")])
    ca = (
        _builder(subject, subject, ca_key.public_key(), ca_key.public_key(), _in_days(ca_days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    authority = {CA_KEY: _pem(ca_key), CA_CERTIFICATE: ca.public_bytes(Encoding.PEM)}
    _write(directory, authority | _of_server(names, days, ca, ca_key), private=(CA_KEY, SERVER_KEY))


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
            f"{directory / CA_CERTIFICATE} expired on {ca.not_valid_after_utc:%Y-%m-%d}; --force makes a new CA, "
            "whose ca.pem every device needs"
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


def end_of_trust(certificate: x509.Certificate, ca: Path | None) -> tuple[datetime, bool]:
    """Return until when devices accept a certificate, and whether that is because the CA's certificate ends then.

    ``ca`` is the PEM file of the CAs that a device trusts; None means the system's, whose expiry is not checked.

    Raises:
        PbflError: if ``ca`` cannot be read.
    """
    trusted = x509.load_pem_x509_certificates(_read(ca)) if ca is not None else []
    end = certificate.not_valid_after_utc
    ends = [one.not_valid_after_utc for one in trusted if one.subject == certificate.issuer]
    return (max(ends), True) if ends and max(ends) <= end else (end, False)


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
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(names[0].value)[:64])])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    end = min(_in_days(days), ca.not_valid_after_utc)
    certificate = (
        _builder(subject, ca.subject, key.public_key(), ca_key.public_key(), end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(usage, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return {SERVER_KEY: _pem(key), SERVER_CERTIFICATE: certificate.public_bytes(Encoding.PEM)}


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - BACKDATED)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _in_days(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


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
        PbflError: if a name is invalid or repeated, or if a file exists; nothing is written then.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name) or name.endswith(".pub"):
            raise PbflError(f"name {name!r}: must be letters, digits, '.', '-' and '_', not ending in .pub")
    if len(set(names)) < len(names):
        raise PbflError(f"names {', '.join(names)}: must differ")
    files = [directory / file for name in names for file in (name, f"{name}.pub")]
    _refuse_existing(files, "keys are not replaced; choose another name or directory")
    pairs: dict[str, bytes] = {}
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        pairs |= {name: private, f"{name}.pub": public + f" {name}\n".encode()}
    _write(directory, pairs, private=names)


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a SuperNode's private key.

    Raises:
        PbflError: if it cannot be read or Flower does not accept it.
    """
    expected = "an OpenSSH private key on a NIST curve without a passphrase, as written by pbfl keys"
    try:
        key = load_ssh_private_key(_read(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise PbflError(f"{path} cannot be used as a key ({error}); must be {expected}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, NODE_CURVES):
        raise PbflError(f"{path} is another type of key; must be {expected}")
    return key


def readable_by_others(path: Path) -> bool:
    """Whether a private file may be accessed by anyone but its owner; always False outside POSIX."""
    return os.name == "posix" and bool(path.stat().st_mode & 0o077)


def _write(directory: Path, files: Mapping[str, bytes], private: Collection[str]) -> None:
    """Write files (name -> content), overwriting existing ones; those named in ``private`` are for their owner only."""
    for name, data in files.items():
        write_atomically(directory / name, data, private=name in private)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PbflError(f"{path} cannot be read ({error.strerror})") from None


def _refuse_existing(files: Iterable[Path], advice: str) -> None:
    if existing := [str(file) for file in files if os.path.lexists(file)]:
        raise PbflError(f"{', '.join(existing)}: already exists; {advice}")


# A connection ---------------------------------------------------------------------------------------------------


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of HOST:PORT or [IPv6]:PORT.

    Raises:
        PbflError: if it is no such address.
    """
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise PbflError(f"address {address!r}: must be HOST:PORT, e.g. fl.example.org:9092")
    return host, int(port)


def server_certificate(
    address: str, ca: Path | None, timeout: float = 10.0, *, verify: bool = True
) -> x509.Certificate:
    """Connect with TLS and return the server's certificate.

    ``ca`` is the PEM file of the authority, None means the system's. Without ``verify`` a certificate is accepted that
    it has not signed, of another host name, or out of date. The timeout, in seconds, is for connecting and for each
    answer.

    Raises:
        PbflError: if the address cannot be reached or does not use TLS, if ``ca`` holds no certificate, or if the
            server's is refused.
    """
    host, port = split_address(address)
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise PbflError(f"{ca} holds no PEM certificate ({error}): copy it again, unchanged") from None
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])  # gRPC servers close connections that do not offer HTTP/2
    try:
        plain = socket.create_connection((host, port), timeout)
    except OSError as error:
        raise PbflError(f"{address} cannot be reached ({error.strerror or error})") from None
    try:
        with plain, context.wrap_socket(plain, server_hostname=host) as secured:
            return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
    except ssl.SSLCertVerificationError as error:
        raise PbflError(f"the certificate is refused: {error.verify_message}") from None
    except OSError as error:
        raise PbflError(f"no TLS on this port ({error}): was the server started with --insecure?") from None
