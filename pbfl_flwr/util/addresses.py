"""Network addresses as users write them."""

from __future__ import annotations

from pbfl_flwr.errors import PbflError

HOST_AND_PORT = "HOST:PORT, e.g. fl.example.org:9092"


def split_address(address: str, what: str = "address", form: str = HOST_AND_PORT) -> tuple[str, int]:
    """Return (host, port) of HOST:PORT or [IPv6]:PORT.

    Args:
        address: to split.
        what: it belongs to, for messages.
        form: that it must have, for messages.

    Raises:
        PbflError: if it is no such address.
    """
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise PbflError(f"{what} {address!r}: must be {form}")
    return host, int(port)
