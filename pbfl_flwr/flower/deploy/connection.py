"""Checks of the connection to a SuperLink: address, TLS, key, clock and Control API.

None of them changes the SuperLink's state.
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

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.deploy import certificates as security
from pbfl_flwr.flower.deploy.findings import CheckTargets, Finding, Status
from pbfl_flwr.flower.deploy.fleet import (
    ANSWER_SECONDS,
    BAD_INTERVAL,
    CLOCK,
    OTHER_VERSION,
    UNKNOWN_KEY,
    Fleet,
)

EXPIRES_SOON = timedelta(days=30)


def check_connection(targets: CheckTargets) -> list[Finding]:
    """Check address, TLS, key, clock and Control API; a check is skipped if one that it depends on failed."""
    found: list[Finding] = []
    key: ec.EllipticCurvePrivateKey | None = None
    if targets.key is not None:
        try:
            key = security.read_node_key(targets.key)
        except PbflError as error:
            found.append(Finding("key", Status.FAILED, str(error), "pbfl keys makes one"))
        else:
            if security.readable_by_others(targets.key):
                advice = f"chmod 600 {targets.key}"
                found.append(Finding("key", Status.WARNING, f"{targets.key} is readable by others", advice))
    certificate = None
    if targets.superlink is not None:
        address = check_address("superlink", targets.superlink)
        found.append(address)
        if address.status is Status.OK:
            usable, certificate, lines = check_tls(targets.superlink, targets.ca, targets.insecure)
            found += lines
            if usable:
                fleet = Fleet(targets.superlink, targets.ca, insecure=targets.insecure, key=key)
                found += [check_key(fleet)] if key else []
                found.append(check_clock(fleet))
    if certificate is not None:
        found.append(check_date(certificate))
    if targets.control is not None:
        found += check_control_api(targets.control, targets.ca, targets.insecure)
    return found


def check_address(what: str, address: str) -> Finding:
    """Check that the host name resolves and the port accepts connections."""
    try:
        host, port = security.split_address(address)
        ip = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except PbflError as error:
        return Finding(what, Status.FAILED, str(error))
    except (
        socket.gaierror,
        UnicodeError,
    ) as error:  # UnicodeError if a part of the name is empty or too long
        advice = "check the spelling, DNS, or /etc/hosts"
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a valid host name"
        return Finding(what, Status.FAILED, f"the name '{host}' is not found ({reason})", advice)
    try:
        socket.create_connection((host, port), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        advice = "is the SuperLink running, is the port right, does it listen on more than 127.0.0.1?"
        return Finding(what, Status.FAILED, f"{address} ({ip}) refuses connections", advice)
    except OSError as error:
        advice = "a firewall or a wrong route; open this port on the server for this device"
        return Finding(what, Status.FAILED, f"{address} ({ip}) does not answer ({error})", advice)
    return Finding(what, Status.OK, f"{address} ({ip}) answers")


def check_tls(
    address: str, ca: Path | None, insecure: bool
) -> tuple[bool, x509.Certificate | None, list[Finding]]:
    """Check TLS, or its absence if ``insecure``; return (whether the SuperLink is usable, certificate, findings)."""
    try:
        handshake = security.shake_hands(address, ca, ANSWER_SECONDS)
    except PbflError as error:
        return False, None, [Finding("tls", Status.FAILED, str(error))]
    if insecure:
        if handshake.certificate is not None:
            advice = "leave out --insecure and give --ca"
            return (
                False,
                None,
                [Finding("tls", Status.FAILED, "--insecure, but the server uses TLS", advice)],
            )
        result = "not used: anyone on the network path can read and change what is sent"
        return True, None, [Finding("tls", Status.WARNING, result, "for tests only; see pbfl certs")]
    if handshake.refusal is not None or handshake.certificate is None:
        advice = (
            "" if handshake.certificate is None else "on the server: pbfl certs; on the device: its ca.pem"
        )
        return (
            False,
            handshake.certificate,
            [Finding("tls", Status.FAILED, handshake.refusal or "no certificate", advice)],
        )
    end, ca_ends_first = security.end_of_trust(handshake.certificate, ca)
    result = f"verified, for {', '.join(security.alternatives(handshake.certificate))}, until {end:%Y-%m-%d}"
    if ca_ends_first:
        result += ", when the CA expires"
    if end - datetime.now(UTC) < EXPIRES_SOON:
        advice = (
            "--force on the server, and its ca.pem on every device"
            if ca_ends_first
            else "--renew on the server"
        )
        return True, handshake.certificate, [Finding("tls", Status.WARNING, result, f"pbfl certs {advice}")]
    return True, handshake.certificate, [Finding("tls", Status.OK, result)]


def check_key(fleet: Fleet) -> Finding:
    """Check that the key is registered with the SuperLink."""
    answer = fleet.probe()
    if answer == BAD_INTERVAL:
        return Finding("key", Status.OK, "registered (asked the Fleet API with this key's signature)")
    if answer == UNKNOWN_KEY:
        advice = (
            "on the server: flwr supernode register KEY.pub; a SuperLink without --database loses keys when it is "
            "restarted"
        )
        return Finding("key", Status.FAILED, "it is not registered with the SuperLink", advice)
    if answer == CLOCK:
        return Finding(
            "key", Status.WARNING, "unknown whether it is registered: the SuperLink refused the clock first"
        )
    return Finding("key", Status.FAILED, f"the Fleet API answers: {answer}")


def check_clock(fleet: Fleet) -> Finding:
    """Measure the offset of this clock from the SuperLink's, from the timestamps that it accepts."""
    advice = "set the clock: timedatectl set-ntp true"
    answer = fleet.probe()
    if answer == CLOCK:
        result = (
            f"refused: more than {SYSTEM_TIME_TOLERANCE} s ahead of the SuperLink's clock, or more than "
            f"{TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE} s behind"
        )
        return Finding("clock", Status.FAILED, result, advice)
    if answer == OTHER_VERSION:
        result = "the SuperLink's Flower is of another version than this one"
        return Finding("flwr", Status.FAILED, result, "install the SuperLink's minor version here")
    if answer not in (BAD_INTERVAL, UNKNOWN_KEY):
        return Finding("clock", Status.FAILED, f"the Fleet API answers: {answer}")
    ahead = SYSTEM_TIME_TOLERANCE - latest_accepted(lambda shift: fleet.probe(shift) != CLOCK)
    side = "ahead of" if ahead > 0 else "behind"
    result = f"{abs(ahead):.1f} s {side} the SuperLink's (by the timestamps that its Fleet API accepts)"
    if abs(ahead) > SYSTEM_TIME_TOLERANCE / 2:
        return Finding("clock", Status.WARNING, result, advice)
    return Finding("clock", Status.OK, result)


def latest_accepted(accepts: Callable[[float], bool], precision: float = 0.1) -> float:
    """Return the largest accepted shift of a timestamp in seconds, given that 0 is accepted.

    Args:
        accepts: whether a timestamp shifted by so many seconds is accepted; true up to a bound and false beyond.
        precision: seconds.
    """
    low, high = 0.0, float(TIMESTAMP_TOLERANCE + 4 * SYSTEM_TIME_TOLERANCE)
    while high - low > precision:
        middle = (low + high) / 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return (low + high) / 2


def check_date(certificate: x509.Certificate) -> Finding:
    """Check that this clock is past the start of the server certificate's validity; needs no reply of the SuperLink."""
    start, now = certificate.not_valid_before_utc, datetime.now(UTC)
    result = f"this clock says {now:%Y-%m-%d %H:%M} UTC, the server's certificate is valid from {start:%Y-%m-%d %H:%M}"
    if now < start:
        return Finding("date", Status.FAILED, result, "set the clock: timedatectl set-ntp true")
    return Finding("date", Status.OK, result)


def check_control_api(address: str, ca: Path | None, insecure: bool) -> list[Finding]:
    """Check whether the Control API is reachable and on the loopback interface; its Date gives the clock's offset."""
    what = "control-api"
    reachable = check_address(what, address)
    if reachable.status is not Status.OK:
        return [reachable]
    host, port = security.split_address(address)
    try:
        date = _response_date(host, port, ca, insecure)
    except (OSError, http.client.HTTPException) as error:
        advice = "is it the SuperLink's --port, and is --insecure set only for a server without TLS?"
        return [Finding(what, Status.FAILED, f"{address} is not a Control API ({error})", advice)]
    found = []
    ip = ipaddress.ip_address(socket.getaddrinfo(host, port)[0][4][0])
    if ip.is_loopback:
        found.append(Finding(what, Status.OK, f"{address} answers"))
    else:
        result = f"{address} is reachable from this machine: anyone who reaches it can run code on server and devices"
        found.append(Finding(what, Status.WARNING, result, "on the server: --host 127.0.0.1, or a firewall"))
    if date is not None:
        offset = (datetime.now(UTC) - date).total_seconds()
        status = Status.OK if abs(offset) <= SYSTEM_TIME_TOLERANCE else Status.WARNING
        direction = "ahead of" if offset > 0 else "behind"
        result = f"{abs(offset):.0f} s {direction} the Control API's (by its HTTP Date, to the second)"
        found.append(Finding("clock", status, result))
    return found


def _response_date(host: str, port: int, ca: Path | None, insecure: bool) -> datetime | None:
    """Return the Date header of the Control API's health endpoint."""
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
