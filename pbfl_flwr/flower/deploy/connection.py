"""The certificate that a server shows at its address."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from cryptography import x509

from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.addresses import split_address

ANSWER_SECONDS = 10.0  # to connect, and for each answer


def server_certificate(address: str, ca: Path | None) -> x509.Certificate:
    """Connect with TLS and return the server's certificate.

    ``ca`` is the PEM file of the authority, None means the system's.

    Raises:
        PbflError: if the address cannot be reached or does not use TLS, if ``ca`` holds no certificate, or if the
            server's is refused.
    """
    host, port = split_address(address)
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise PbflError(f"{ca} holds no PEM certificate ({error}): copy it again, unchanged") from None
    context.set_alpn_protocols(["h2", "http/1.1"])  # gRPC servers close connections that do not offer HTTP/2
    try:
        plain = socket.create_connection((host, port), ANSWER_SECONDS)
    except OSError as error:
        raise PbflError(f"{address} cannot be reached ({error.strerror or error})") from None
    try:
        with plain, context.wrap_socket(plain, server_hostname=host) as secured:
            return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
    except ssl.SSLCertVerificationError as error:
        raise PbflError(f"the certificate is refused: {error.verify_message}") from None
    except OSError as error:
        raise PbflError(f"no TLS on this port ({error}): was the server started with --insecure?") from None
