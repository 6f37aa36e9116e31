"""``pbfl certs``, ``keys``, ``doctor`` and ``deploy``: federations of real devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import (
    COMPLETED,
    FAILED,
    GIVEN,
    REFUSED,
    AppDirectory,
    Assignments,
    NewRunDir,
    Resumed,
    checkout,
    ended,
    running,
)
from pbfl_flwr.errors import PbflError, writing
from pbfl_flwr.experiments.text.numbers import hang, say, screen

deploy = typer.Typer(help="Federations of SuperLink and SuperNodes.", no_args_is_help=True)


def certs(
    out: Annotated[Path, typer.Option("--out", click_type=GIVEN, metavar="DIR", help="Where the files go.")],
    hosts: Annotated[
        list[str],
        typer.Option(
            "--host",
            metavar="NAME_OR_IP",
            help="How devices reach the server, without port; may be repeated.",
        ),
    ],
    days: Annotated[
        int, typer.Option("--days", min=1, max=3650, help="How long the server's certificate is valid.")
    ] = 365,
    ca_days: Annotated[
        int, typer.Option("--ca-days", min=1, max=36500, help="How long a new CA is valid; it ends all.")
    ] = 3650,
    renew: Annotated[
        bool, typer.Option("--renew", help="Keep the CA of DIR, replace the server's certificate and key.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace everything in DIR.")] = False,
) -> None:
    """Make a certificate authority and a server certificate for TLS."""
    from pbfl_flwr import security

    console = screen()
    try:
        if renew and force:
            raise PbflError(
                "--renew and --force: one keeps the CA, the other replaces it; give one of the two"
            )
        with writing(out):
            if renew:
                security.renew_certificate(out, hosts, days)
            else:
                security.make_certificates(out, hosts, days, ca_days=ca_days, force=force)
        server = security.read_certificate(out / security.SERVER_CERTIFICATE)
        end, of_all = security.end_of_trust(server, out / security.CA_CERTIFICATE)
    except PbflError as error:
        raise ended(error, REFUSED) from None
    names = ", ".join(security.alternatives(server))
    say(console, f"certificate for {names}, valid until {end:%Y-%m-%d}")
    if of_all:
        said = (
            "with it the CA ends: before that, --force makes a new one, whose ca.pem every device then needs"
        )
        say(console, said, "yellow")
    for file, place in (
        (security.CA_CERTIFICATE, "to every device and to whoever calls flwr; not secret"),
        (security.SERVER_CERTIFICATE, "stays on the server; not secret"),
        (security.SERVER_KEY, "stays on the server; secret"),
        (security.CA_KEY, "off the server, to a safe place; secret, needed for --renew only"),
    ):
        say(console, f"  {out / file}: {place}")


def keys(
    out: Annotated[Path, typer.Option("--out", click_type=GIVEN, metavar="DIR", help="Where the files go.")],
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="A name for each device.")],
) -> None:
    """Make a key pair for each device, for Flower's SuperNode authentication."""
    from pbfl_flwr import security

    console = screen()
    try:
        with writing(out):
            security.make_keys(out, names)
    except PbflError as error:
        raise ended(error, REFUSED) from None
    for name in names:
        say(console, f"  {out / name}: to device {name} and nowhere else; secret")
        say(console, f"  {out / name}.pub: to the server: flwr supernode register {out / name}.pub")


def doctor(
    superlink: Annotated[
        str | None,
        typer.Option("--superlink", metavar="HOST:PORT", help="Fleet API, where SuperNodes connect."),
    ] = None,
    ca: Annotated[Path | None, typer.Option("--ca", metavar="FILE", help="ca.pem of pbfl certs.")] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="This device's private key, of pbfl keys.")
    ] = None,
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="HOST:PORT", help="Control API; only the server should reach it."),
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", metavar="DIR", help="Where this device keeps its state.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="What training should run on: auto, cpu, cuda, mps.")
    ] = "auto",
    insecure: Annotated[bool, typer.Option("--insecure", help="Expect a SuperLink without TLS.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of the table.")] = False,
) -> None:
    """Look whether this machine can take part: versions, address, TLS, key, clock, disk, memory, GPU."""
    import json
    from dataclasses import asdict

    from pbfl_flwr.flower.diagnostics.doctor import examine
    from pbfl_flwr.flower.diagnostics.findings import CheckTargets, Status

    try:
        found = examine(CheckTargets(superlink, ca, key, control, state_dir, device, insecure))
    except PbflError as error:
        raise ended(error, REFUSED) from None
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=1))
    else:
        colours = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red"}
        console, width = screen(), max(len(finding.what) for finding in found)
        for finding in found:
            head = f"{finding.status:<{max(map(len, Status))}}  {finding.what:<{width}}  "
            said = "; ".join(filter(None, (finding.said, finding.advice)))
            hang(console, head, said, len(head), colours[finding.status])
    failed = any(finding.status is Status.FAILED for finding in found)
    raise typer.Exit(FAILED if failed else COMPLETED)


def app(
    out: Annotated[Path, typer.Argument(metavar="DIR", click_type=GIVEN, help="A new directory for it.")],
    app_dir: AppDirectory = None,
) -> None:
    """Write an app of a few kB for slow links: devices then run the pbfl-flwr that is installed on them."""
    from pbfl_flwr.flower.engines.bundle import slim

    try:
        source = checkout(app_dir)
        with writing(out):
            slim(source, out)
    except PbflError as error:
        raise ended(error, REFUSED) from None
    said = f"flwr run {out} instead of the checkout; server and devices need the same pbfl-flwr, a run says if not"
    say(screen(), said)


@deploy.command()
def local(
    count: Annotated[
        int | None, typer.Option("-n", "--supernodes", min=1, help="SuperNodes, one a client.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="PRESET.toml", help="As in pbfl run.")
    ] = None,
    assignments: Assignments = None,
    method: Annotated[
        str | None, typer.Option("--method", help="The same as --set method=..., see pbfl list methods.")
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="CONFIG",
            help="What a SuperNode brings, e.g. \"model='resnet8' data-path='a.npz'\"; repeated, in order.",
        ),
    ] = None,
    run_dir: NewRunDir = None,
    resume: Resumed = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and keys; to compare and to look for faults.")
    ] = False,
    app_dir: AppDirectory = None,
) -> None:
    """Run a whole secured federation on this machine: SuperLink and SuperNodes as processes of their own."""
    from pbfl_flwr.experiments.running import deployment
    from pbfl_flwr.experiments.text import tables

    console = screen()
    try:
        source = checkout(app_dir)
        wanted = [*(assignments or []), *([f"method={method}"] if method else [])]
        if resume is None:
            plan = deployment.plan(preset, wanted, nodes or [], count, run_dir, secure=not insecure)
        elif nodes or count or preset or run_dir or insecure:
            raise PbflError(
                "--resume: a resumed federation keeps its SuperNodes; only --set may stand beside it"
            )
        else:
            plan = deployment.resumed(resume, wanted)
        with writing(plan.run_dir):
            plan.run_dir.mkdir(parents=True, exist_ok=True)
    except PbflError as error:
        raise ended(error, REFUSED) from None
    with running():
        code = deployment.start(source, plan, console)
    if code == COMPLETED:
        tables.show(plan.run_dir, console)
    raise typer.Exit(code)
