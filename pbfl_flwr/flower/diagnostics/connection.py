"""Whether the SuperLink can be used from here: address, TLS, key, clock and Control API, each as a finding.

Asking the SuperLink about a key leaves the SuperLink as it is.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from pbfl_flwr import security
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.diagnostics.findings import Finding, Status, Wanted
from pbfl_flwr.flower.diagnostics.fleet import (
    ANSWER_SECONDS,
    BAD_INTERVAL,
    CLOCK,
    OTHER_VERSION,
    UNKNOWN_KEY,
    Fleet,
)

EXPIRES_SOON = timedelta(days=30)


def network(wanted: Wanted) -> list[Finding]:
    """Address, TLS, key and clock, each only if what it builds on is there."""
    found: list[Finding] = []
    key: ec.EllipticCurvePrivateKey | None = None
    if wanted.key is not None:
        try:
            key = security.read_node_key(wanted.key)
        except PbflError as error:
            found.append(Finding("key", Status.FAILED, str(error), "pbfl keys makes one"))
        else:
            if security.readable_by_others(wanted.key):
                advice = f"chmod 600 {wanted.key}"
                found.append(Finding("key", Status.WARNING, f"{wanted.key} is readable by others", advice))
    certificate = None
    if wanted.superlink is not None:
        reached = reachable("superlink", wanted.superlink)
        found.append(reached)
        if reached.status is Status.OK:
            usable, certificate, lines = transport(wanted.superlink, wanted.ca, wanted.insecure)
            found += lines
            if usable:
                fleet = Fleet(wanted.superlink, wanted.ca, insecure=wanted.insecure, key=key)
                found += [about_key(fleet)] if key else []
                found.append(about_clock(fleet))
    if certificate is not None:
        found.append(clock_by_certificate(certificate))
    if wanted.control is not None:
        found += control(wanted.control, wanted.ca, wanted.insecure)
    return found


def reachable(what: str, address: str) -> Finding:
    """Whether a name is found and a port answers."""
    try:
        host, port = security.split_address(address)
        ip = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except PbflError as error:
        return Finding(what, Status.FAILED, str(error))
    except (socket.gaierror, UnicodeError) as error:  # the latter for a label that is empty or too long
        advice = "check the spelling, DNS, or /etc/hosts"
        said = error.strerror if isinstance(error, socket.gaierror) else "no name can be like this"
        return Finding(what, Status.FAILED, f"the name '{host}' is not found ({said})", advice)
    try:
        socket.create_connection((host, port), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        advice = "is the SuperLink running, is the port right, does it listen on more than 127.0.0.1?"
        return Finding(what, Status.FAILED, f"{address} ({ip}) refuses connections", advice)
    except OSError as error:
        advice = "a firewall or a wrong route; open this port on the server for this device"
        return Finding(what, Status.FAILED, f"{address} ({ip}) does not answer ({error})", advice)
    return Finding(what, Status.OK, f"{address} ({ip}) answers")


def transport(
    address: str, ca: Path | None, insecure: bool
) -> tuple[bool, x509.Certificate | None, list[Finding]]:
    """Return (whether one can go on, the server's certificate, findings) of TLS, or of doing without."""
    try:
        hands = security.shake_hands(address, ca, ANSWER_SECONDS)
    except PbflError as error:
        return False, None, [Finding("tls", Status.FAILED, str(error))]
    if insecure:
        if hands.certificate is not None:
            advice = "leave out --insecure and give --ca"
            return (
                False,
                None,
                [Finding("tls", Status.FAILED, "--insecure, but the server speaks TLS", advice)],
            )
        said = "not used: everybody on the way can read and change what is sent"
        return True, None, [Finding("tls", Status.WARNING, said, "for trying only; see pbfl certs")]
    if hands.refusal is not None or hands.certificate is None:
        advice = "" if hands.certificate is None else "on the server: pbfl certs; on the device: its ca.pem"
        return (
            False,
            hands.certificate,
            [Finding("tls", Status.FAILED, hands.refusal or "no certificate", advice)],
        )
    end, of_all = security.end_of_trust(hands.certificate, ca)
    said = f"verified, for {', '.join(security.alternatives(hands.certificate))}, until {end:%Y-%m-%d}"
    if of_all:
        said += ", when the CA ends"
    if end - datetime.now(UTC) < EXPIRES_SOON:
        advice = (
            "--force on the server, and its ca.pem on every device" if of_all else "--renew on the server"
        )
        return True, hands.certificate, [Finding("tls", Status.WARNING, said, f"pbfl certs {advice}")]
    return True, hands.certificate, [Finding("tls", Status.OK, said)]


def about_key(fleet: Fleet) -> Finding:
    """Whether the SuperLink knows the key."""
    answer = fleet.ask()
    if answer == BAD_INTERVAL:
        return Finding("key", Status.OK, "registered (asked the Fleet API with this key's signature)")
    if answer == UNKNOWN_KEY:
        advice = (
            "on the server: flwr supernode register KEY.pub; a SuperLink without --database forgets keys when it "
            "is started again"
        )
        return Finding("key", Status.FAILED, "the SuperLink does not know it: it is not registered", advice)
    if answer == CLOCK:
        return Finding(
            "key", Status.WARNING, "not known whether it is registered: the clock is refused first"
        )
    return Finding("key", Status.FAILED, f"the Fleet API says: {answer}")


def about_clock(fleet: Fleet) -> Finding:
    """How far this clock is from the SuperLink's, by the timestamps that it takes."""
    advice = "set the clock: timedatectl set-ntp true"
    answer = fleet.ask()
    if answer == CLOCK:
        said = (
            f"refused: more than {SYSTEM_TIME_TOLERANCE} s ahead of the SuperLink's clock, or more than "
            f"{TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE} s behind"
        )
        return Finding("clock", Status.FAILED, said, advice)
    if answer == OTHER_VERSION:
        said = "the SuperLink's Flower is of another version than this one"
        return Finding("flwr", Status.FAILED, said, "install the SuperLink's minor version here")
    if answer not in (BAD_INTERVAL, UNKNOWN_KEY):
        return Finding("clock", Status.FAILED, f"the Fleet API says: {answer}")
    ahead = SYSTEM_TIME_TOLERANCE - latest_accepted(lambda shift: fleet.ask(shift) != CLOCK)
    side = "ahead of" if ahead > 0 else "behind"
    said = f"{abs(ahead):.1f} s {side} the SuperLink's (by the timestamps that its Fleet API takes)"
    if abs(ahead) > SYSTEM_TIME_TOLERANCE / 2:
        return Finding("clock", Status.WARNING, said, advice)
    return Finding("clock", Status.OK, said)


def latest_accepted(accepts: Callable[[float], bool], precision: float = 0.1) -> float:
    """Return the largest shift (seconds) of a timestamp that is accepted, given that 0 is.

    Args:
        accepts: whether a timestamp shifted by so much is accepted; true up to a bound and false beyond.
        precision: seconds.
    """
    low, high = 0.0, float(TIMESTAMP_TOLERANCE + 4 * SYSTEM_TIME_TOLERANCE)
    while high - low > precision:
        middle = (low + high) / 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return (low + high) / 2


def clock_by_certificate(certificate: x509.Certificate) -> Finding:
    """Whether this clock is at least past the making of the server's certificate: a bound that needs no SuperLink."""
    made, now = certificate.not_valid_before_utc, datetime.now(UTC)
    said = f"this clock says {now:%Y-%m-%d %H:%M} UTC, the server's certificate is valid from {made:%Y-%m-%d %H:%M}"
    if now < made:
        return Finding("date", Status.FAILED, said, "set the clock: timedatectl set-ntp true")
    return Finding("date", Status.OK, said)


def control(address: str, ca: Path | None, insecure: bool) -> list[Finding]:
    """Whether the Control API can be reached from here, and whether it should be; its Date gives the clock's offset."""
    what = "control-api"
    reached = reachable(what, address)
    if reached.status is not Status.OK:
        return [reached]
    host, port = security.split_address(address)
    try:
        answer = _head(host, port, ca, insecure)
    except (OSError, http.client.HTTPException) as error:
        advice = "is it the SuperLink's --port, and is --insecure (not) meant?"
        return [Finding(what, Status.FAILED, f"{address} is no Control API ({error})", advice)]
    found = []
    address_of = ipaddress.ip_address(socket.getaddrinfo(host, port)[0][4][0])
    if address_of.is_loopback:
        found.append(Finding(what, Status.OK, f"{address} answers"))
    else:
        said = f"{address} answers to this machine: whoever reaches it can run code on server and devices"
        found.append(Finding(what, Status.WARNING, said, "on the server: --host 127.0.0.1, or a firewall"))
    if answer is not None:
        offset = (datetime.now(UTC) - answer).total_seconds()
        status = Status.OK if abs(offset) <= SYSTEM_TIME_TOLERANCE else Status.WARNING
        direction = "ahead of" if offset > 0 else "behind"
        said = f"{abs(offset):.0f} s {direction} the Control API's (by its HTTP Date, to the second)"
        found.append(Finding("clock", status, said))
    return found


def _head(host: str, port: int, ca: Path | None, insecure: bool) -> datetime | None:
    """Return the Date of the Control API's answer."""
    connection = (
        http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
        if insecure
        else http.client.HTTPSConnection(
            host, port, timeout=ANSWER_SECONDS, context=ssl.create_default_context(cafile=ca)
        )
    )
    try:
        connection.request("GET", "/health")
        date = connection.getresponse().getheader("Date")
    finally:
        connection.close()
    return parsedate_to_datetime(date) if date else None
