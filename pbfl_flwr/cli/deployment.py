"""``pbfl certs``, ``keys``, ``doctor`` and ``deploy``: federations of real devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pbfl_flwr.cli.common import (
    COMPLETED,
    FAILED,
    NON_EMPTY_PATH,
    Allowed,
    AppDirectory,
    Assignments,
    NewRunDir,
    Resumed,
    checkout,
    need_resume,
    own_network,
    running,
)
from pbfl_flwr.errors import PbflError, expanded, writing
from pbfl_flwr.experiments.console import print_hanging, say, screen

deploy = typer.Typer(help="Federations of SuperLink and SuperNodes.", no_args_is_help=True)


def certs(
    out: Annotated[
        Path, typer.Option("--out", click_type=NON_EMPTY_PATH, metavar="DIR", help="Directory for the files.")
    ],
    hosts: Annotated[
        list[str],
        typer.Option(
            "--host",
            metavar="NAME_OR_IP",
            help="Name or IP address of the server for devices, without port; may be repeated.",
        ),
    ],
    days: Annotated[
        int, typer.Option("--days", min=1, max=3650, help="Validity of the server's certificate in days.")
    ] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Keep the CA of DIR, replace the server's certificate and key.")
    ] = False,
) -> None:
    """Create a certificate authority and a server certificate for TLS."""
    from pbfl_flwr.flower.deploy import certificates as security

    console = screen()
    with writing(out):
        if renew:
            security.renew_certificate(out, hosts, days)
        else:
            security.make_certificates(out, hosts, days)
    server = security.read_certificate(out / security.SERVER_CERTIFICATE)
    names = ", ".join(security.alternatives(server))
    say(console, f"certificate for {names}, valid until {server.not_valid_after_utc:%Y-%m-%d}")
    for file, place in (
        (security.CA_CERTIFICATE, "copy to every device and to users of flwr; not secret"),
        (security.SERVER_CERTIFICATE, "stays on the server; not secret"),
        (security.SERVER_KEY, "stays on the server; secret"),
        (security.CA_KEY, "move from the server to a safe place; secret, needed for --renew only"),
    ):
        say(console, f"  {out / file}: {place}")


def keys(
    out: Annotated[
        Path, typer.Option("--out", click_type=NON_EMPTY_PATH, metavar="DIR", help="Directory for the files.")
    ],
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="A name for each device.")],
) -> None:
    """Create a key pair for each device, for Flower's SuperNode authentication."""
    from pbfl_flwr.flower.deploy import certificates as security

    console = screen()
    with writing(out):
        security.make_keys(out, names)
    for name in names:
        say(
            console,
            f"  {out / name}: stays on device {name}; if this is another machine, move it there; secret",
        )
        say(
            console,
            f"  {out / name}.pub: copy to the server, into a folder for pbfl deploy register",
        )


def doctor(
    superlink: Annotated[
        str | None,
        typer.Option(
            "--superlink", metavar="HOST:PORT", help="Address of the Fleet API, to which SuperNodes connect."
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca", click_type=NON_EMPTY_PATH, metavar="FILE", help="CA certificate: ca.pem of pbfl certs."
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            click_type=NON_EMPTY_PATH,
            metavar="FILE",
            help="This device's private key, from pbfl keys.",
        ),
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(
            "--control",
            metavar="HOST:PORT",
            help="Address of the Control API, which only the server should reach.",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir", click_type=NON_EMPTY_PATH, metavar="DIR", help="This device's state directory."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="Device for training: auto, cpu, cuda, mps.")
    ] = "auto",
    insecure: Annotated[bool, typer.Option("--insecure", help="Expect a SuperLink without TLS.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Check whether this machine can take part: versions, disk, memory, GPU, and whether the SuperLink admits it.

    For that it starts a SuperNode with these arguments, and ends it as soon as the SuperLink has answered.
    """
    import json
    from dataclasses import asdict

    from pbfl_flwr.flower.deploy.doctor import CheckTargets, examine
    from pbfl_flwr.flower.deploy.findings import Status

    targets = CheckTargets(superlink, ca, key, control, state_dir, device, insecure)
    findings = examine(targets, lambda line: say(screen(stderr=True), line))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        colours = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red"}
        console, width = screen(), max(len(finding.what) for finding in findings)
        for finding in findings:
            head = f"{finding.status:<{max(map(len, Status))}}  {finding.what:<{width}}  "
            message = "; ".join(filter(None, (finding.message, finding.advice)))
            print_hanging(console, head, message, len(head), colours[finding.status])
    failed = any(finding.status is Status.FAILED for finding in findings)
    raise typer.Exit(FAILED if failed else COMPLETED)


@deploy.command()
def register(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="KEYS", click_type=NON_EMPTY_PATH, help="Folder with NAME.pub of each device."
        ),
    ],
    link: Annotated[
        str, typer.Argument(metavar="[SUPERLINK]", help="Its connection in Flower's config.toml.")
    ] = "",
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="RUN",
            click_type=NON_EMPTY_PATH,
            help="A run of these devices: their networks and versions.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            click_type=NON_EMPTY_PATH,
            help="Inventory; default KEYS/inventory.json.",
        ),
    ] = None,
) -> None:
    """Register the public keys of a folder with their names, write an inventory and print it; may be repeated.

    The exit code is 1 if a key could not be registered.
    """
    from pbfl_flwr.experiments.console import print_blocks
    from pbfl_flwr.flower.deploy import inventory
    from pbfl_flwr.flower.deploy.processes import flwr
    from pbfl_flwr.runs.directory import RunDirectory

    console, file = screen(), out or folder / "inventory.json"
    clients = None if run is None else RunDirectory(expanded(run)).record().clients
    with writing(file):
        lines = inventory.register(folder, file, lambda *words: flwr(words), link, clients)
    devices = inventory.Inventory.read(file).devices
    print_blocks(console, inventory.COLUMNS, [device.row for device in devices], words=len(inventory.COLUMNS))
    for line in lines:
        say(console, line)
    say(console, f"written to {file}")
    if not all(device.status for device in devices):
        raise typer.Exit(FAILED)


def app(
    out: Annotated[Path, typer.Argument(metavar="DIR", click_type=NON_EMPTY_PATH, help="A new directory.")],
    own: Annotated[
        bool, typer.Option("--own", help="Write an app to start one of your own from, with a test, instead.")
    ] = False,
    app_dir: AppDirectory = None,
) -> None:
    """Write a Flower app of a few kB for slow links, with which devices run their installed pbfl-flwr."""
    from pbfl_flwr.flower.deploy.bundle import own_app, slim

    source = checkout(app_dir)
    if own:
        with writing(out):
            own_app(source, out)
        say(screen(), f"run it with flwr run {out}, try it with python -m pytest {out} (needs pytest)")
        return
    with writing(out):
        slim(source, out)
    message = f"use flwr run {out}, not the checkout; server and devices need the same pbfl-flwr, which a run checks"
    say(screen(), message)


@deploy.command()
def local(
    count: Annotated[
        int | None, typer.Option("-n", "--supernodes", min=1, help="Number of SuperNodes, one per client.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="PRESET.toml", help="As in pbfl run.")
    ] = None,
    assignments: Assignments = None,
    method: Annotated[
        str | None, typer.Option("--method", help="Same as --set method=..., see pbfl list methods.")
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="CONFIG",
            help="Node config of a SuperNode, e.g. \"model='resnet8' data-path='a.npz'\"; repeat for the next ones.",
        ),
    ] = None,
    run_dir: NewRunDir = None,
    resume: Resumed = None,
    allowed: Allowed = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and keys, for comparison and debugging.")
    ] = False,
    app_dir: AppDirectory = None,
) -> None:
    """Run a secured federation on this machine, with SuperLink and SuperNodes as separate processes."""
    from pbfl_flwr.experiments.execute import deployment
    from pbfl_flwr.experiments.show import show_run
    from pbfl_flwr.util.atomic_files import make_directory

    console = screen()
    need_resume(allowed, resume)
    source = checkout(app_dir)
    settings = [*(assignments or []), *([f"method={method}"] if method else [])]
    if resume is None:
        plan = deployment.plan(preset, settings, nodes or [], count, run_dir, secure=not insecure)
    elif nodes or count or preset or run_dir or insecure:
        raise PbflError(
            "--resume: a resumed federation keeps its SuperNodes; options beside it must be --set, --method, "
            "--import, --app"
        )
    else:
        plan = deployment.resumed(resume, settings, allowed or [])
    own_network([plan.settings])
    with writing(plan.run_dir):
        make_directory(plan.run_dir)
    with running():
        code = deployment.start(source, plan, console)
    if code == COMPLETED:
        show_run(plan.run_dir, console)
    raise typer.Exit(code)
