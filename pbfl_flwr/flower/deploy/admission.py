"""Whether a SuperLink admits a device: a SuperNode is started with the device's arguments, and its words translated.

Only Flower's own command is asked, so that the answer is what the device will meet. The SuperNode waits for no message:
it is ended as soon as it is admitted, and says goodbye to the SuperLink then.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pbfl_flwr.errors import PbflError, expanded, printable
from pbfl_flwr.flower.deploy.findings import FAILED, OK, WARNING, Finding
from pbfl_flwr.flower.deploy.processes import Processes, executable, free_port

WHAT = "supernode"
RETRY_SECONDS = 3  # for which it tries again to connect, before it says why it cannot
DEADLINE = 120.0  # seconds; a small device imports Flower in half a minute
FORGOTTEN_SECONDS = 65.0  # a SuperNode without a goodbye counts as online for 60 s after its last heartbeat
ADMITTED = re.compile(r"SuperNode ID: (\d+)")
REFUSED, UNKNOWN_TO_ALL = "[code: 2004]", "[code: 2001]"
REASON = re.compile(r"Exit Code: \d+\n(?:Failed to initialize the connection to the SuperLink\.\n)?(.+)")
CLOCK = "set the clock: timedatectl set-ntp true, or date -u -s 'YYYY-MM-DD HH:MM:SS'"
CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        "selected ALPN property|http1.x server",
        "this is the Control API, for flwr",
        "devices need the Fleet API: port 9092, or what --fleet-api-address of the SuperLink says",
    ),
    ("(certificate is not yet valid|certificate has expired)", "the server's {0}", f"{CLOCK}; or pbfl certs"),
    (
        r"CERTIFICATE_VERIFY_FAILED(?:\] certificate verify failed)?: ([^:(\n]*[^:(\s])",
        "the server's certificate is refused: {0}",
        "on the device: the server's ca.pem",
    ),
    (
        "Hostname Verification",
        "the server's certificate is for other names and addresses",
        "on the server: pbfl certs --renew with a --host for this one",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "no TLS on this port",
        "was the server started with --insecure? it must not be, with keys",
    ),
    ("Socket closed", "the server closes connections without TLS", "leave out --insecure and give --ca"),
    (
        "Failed to create security handshaker",
        "--ca holds no PEM certificate",
        "copy the server's ca.pem again, unchanged",
    ),
    (
        "--root-certificates` does not point to a file",
        "--ca is not a file",
        "copy the server's ca.pem to this device",
    ),
    (
        "Handshake read failed",
        "the port accepts connections, but nothing answers a TLS handshake",
        "is this the SuperLink's address? else a proxy or firewall on the way, or a link that loses large packets",
    ),
    ("(Unable to parse the private key file)", "{0}", "pbfl keys makes one"),
)
"""Words of Flower and gRPC, as a regular expression; what they mean, with the groups of the expression; what to do."""


def check_admission(
    superlink: str, ca: Path | None, key: Path | None, insecure: bool, tell: Callable[[str], None]
) -> Finding:
    """Start a SuperNode with these arguments, and end it when the SuperLink has answered.

    One that is refused is started again after a minute, since a SuperNode that was killed counts as online for so long.

    Args:
        superlink: HOST:PORT of the Fleet API.
        ca: certificate of the authority that signed the SuperLink's; None: the system's.
        key: the device's private key; None: a new one, as ``flower-supernode`` makes it.
        insecure: without TLS.
        tell: called with a line before the pause.
    """
    options = ["--superlink", superlink, *(["--insecure"] if insecure else [])]
    options += ["--root-certificates", str(expanded(ca))] if ca and not insecure else []
    options += ["--auth-supernode-private-key", str(expanded(key))] if key else []
    try:
        output, code = answer(options)
        process = user_of(key) if key else None
        if REFUSED not in output:
            finding = translated(output, code, key, insecure)
            if process and finding.status is OK:
                message = f"{finding.message}, but process {process} here uses its key and is not connected"
                return Finding(WHAT, WARNING, message, "restart that SuperNode")
            return finding
        if process:
            message = (
                f"the SuperLink refuses a second SuperNode with this key: process {process} here uses it"
            )
            advice = "if the server does not list it as online, stop it and run pbfl doctor again"
            return Finding(WHAT, WARNING, message, advice)
        tell(
            f"refused; a SuperNode that was killed counts as online for 60 s: asking again in "
            f"{FORGOTTEN_SECONDS:.0f} s"
        )
        time.sleep(FORGOTTEN_SECONDS)
        output, code = answer(options)
    except PbflError as error:
        return Finding(WHAT, FAILED, str(error))
    finding = translated(output, code, key, insecure)
    return (
        replace(finding, message=f"{finding.message}; before, it still counted as online")
        if finding.status is OK
        else finding
    )


def answer(options: Sequence[str]) -> tuple[str, int | None]:
    """Return what a SuperNode with these options printed, and its exit code, None if it had to be ended.

    Raises:
        PbflError: if Flower is not installed.
    """
    command = [executable("flower-supernode"), *options, "--isolation", "process", "--port", str(free_port())]
    command += ["--max-wait-time", str(RETRY_SECONDS)]
    scratch = Path(tempfile.mkdtemp(prefix="pbfl-"))
    own = {"FLWR_HOME": str(scratch), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    processes = Processes(scratch)
    try:
        with (scratch / "output").open("w+b") as output:
            process = processes.start(command, Path.cwd(), {**os.environ, **own}, output)
            end = time.monotonic() + DEADLINE
            text = ""
            while process.poll() is None and not ADMITTED.search(text) and time.monotonic() < end:
                time.sleep(0.1)
                text = (scratch / "output").read_text(encoding="utf-8", errors="replace")
            code = process.poll()
            processes.end()
            return (scratch / "output").read_text(encoding="utf-8", errors="replace"), code
    finally:
        processes.close()


def translated(output: str, code: int | None, key: Path | None, insecure: bool) -> Finding:
    """Return what a SuperNode's output and exit code mean; see :func:`answer` and :func:`check_admission`."""
    if admitted := ADMITTED.search(output):
        return _admitted(admitted[1], key, insecure)
    if REFUSED in output and key:
        message = "the key is not registered, or another SuperNode with it is online"
        advice = f"on the server: pbfl deploy register, with {key.name}.pub among the keys"
        return Finding(WHAT, FAILED, message, advice)
    if UNKNOWN_TO_ALL in output:
        message = "the SuperLink admits registered keys only"
        return Finding(WHAT, OK, message, "on a device, give --key")
    if code == 0:
        message = (
            "ended at once without a reason: the usual cause is a clock that is more than 5 s ahead of the server's or "
            f"305 s behind; this device's is {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        )
        return Finding(WHAT, FAILED, message, f"compare it with the server's: date -u; {CLOCK}")
    for words, meaning, advice in CAUSES:
        if found := re.search(words, output):
            return Finding(WHAT, FAILED, printable(meaning.format(*found.groups())), advice)
    said = REASON.search(output)
    lines = [line for line in output.splitlines() if line.strip()]
    last = said[1] if said else lines[-1] if lines else "nothing"
    ended = f"no answer within {DEADLINE:.0f} s" if code is None else f"ended with exit code {code}"
    return Finding(WHAT, FAILED, f"{ended}: {printable(last)}")


def _admitted(node: str, key: Path | None, insecure: bool) -> Finding:
    message = f"the SuperLink admits this device as node {node}"
    if insecure:
        message += ", without TLS: anyone on the network path can read and change what is sent"
        return Finding(WHAT, WARNING, message, "for tests only; see pbfl certs")
    if key is None:
        message += ", without a registered key, as it does anybody"
        return Finding(WHAT, WARNING, message, "on the server: flower-superlink --enable-supernode-auth")
    return Finding(WHAT, OK, message)


def user_of(key: Path) -> int | None:
    """Return the process id of a SuperNode of this machine that uses a key; None if none is seen, and outside Linux."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(word.endswith("flower-supernode") for word in words[:2]):
                given = words[words.index("--auth-supernode-private-key") + 1]
                if (process / "cwd" / given).samefile(key):
                    return int(process.name)
        except (OSError, ValueError, IndexError):  # ended meanwhile, another user's, or without a key
            continue
    return None
