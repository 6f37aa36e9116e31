"""``pbfl deploy local``: checks the configuration of a local deployment, then runs it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import field_validator
from rich.console import Console

from pbfl_flwr.config import Scalar, Settings
from pbfl_flwr.data import LoadedData, own_data
from pbfl_flwr.errors import PbflError, expanded
from pbfl_flwr.experiments.console import say
from pbfl_flwr.experiments.execute.runner import follow_run
from pbfl_flwr.experiments.plan import configuration
from pbfl_flwr.experiments.results import NODES, resume_words
from pbfl_flwr.flower.client.device import share_of_cores
from pbfl_flwr.flower.deploy import private_network
from pbfl_flwr.flower.deploy.local_federation import Deployment, check, complete, node_config
from pbfl_flwr.models.build import check_models
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.records import Record
from pbfl_flwr.util.atomic_files import write_atomically
from pbfl_flwr.util.user_code import code_in

DEFAULT_COUNT = 3


class NodesRecord(Record):
    """The content of nodes.json: the configuration of every SuperNode, and whether TLS and authentication are used."""

    nodes: list[dict[str, bool | int | float | str]]
    secure: bool

    @field_validator("nodes")
    @classmethod
    def _have_ids(cls, nodes: list[dict[str, Scalar]]) -> list[dict[str, Scalar]]:
        if not all({"client-id", "state-dir"} <= {*node} for node in nodes):
            raise ValueError("every SuperNode must have a client-id and a state-dir")
        return nodes


@dataclass(frozen=True)
class Plan:
    """A checked federation, ready to start: its absolute directory, requested and parsed keys, and SuperNodes."""

    run_dir: Path
    config: Mapping[str, Scalar]
    settings: Settings
    nodes: Sequence[Mapping[str, Scalar]]
    secure: bool


def plan(
    preset: str | None,
    assignments: Iterable[str],
    nodes: Sequence[str],
    count: int | None,
    run_dir: Path | None,
    *,
    secure: bool = True,
) -> Plan:
    """Return the requested federation.

    Args:
        preset: see :func:`pbfl_flwr.experiments.plan.configuration.gather`.
        assignments: likewise.
        nodes: configuration of the first SuperNodes, in the syntax of ``--node-config``.
        count: number of SuperNodes; None means num-clients if given, else the length of ``nodes``, else three.
        run_dir: where the run is written, None for the default.
        secure: whether to use TLS and SuperNode authentication.

    Raises:
        PbflError: one line per problem.
    """
    requested = configuration.gather(preset, assignments)
    wanted = requested.values.get("num-clients")
    if count is not None and wanted not in (None, count):
        raise PbflError(
            f"-n {count} and num-clients = {wanted}: every client has one SuperNode; give one of the two"
        )
    requested.values["num-clients"] = count or wanted or len(nodes) or DEFAULT_COUNT
    settings = configuration.check(requested)
    directory = configuration.run_directory(settings, run_dir)
    configured = [node_config(text) for text in nodes]
    states = Path(settings.run.state_dir or directory / "clients")
    full = complete(configured, settings.run.num_clients, states)
    if settings.training.threads == "auto":  # on a device all cores; here the SuperNodes share one machine's
        share = max(1, share_of_cores() // len(full))
        full = [{"threads": share, **node} for node in full]
    _check(settings, full)
    return Plan(directory, requested.values, settings, full, secure)


def resumed(run: Path, assignments: Iterable[str], allowed: Collection[str] = ()) -> Plan:
    """Return the federation with which to resume a run; only keys that do not change results may be assigned.

    ``allowed`` is code that may be imported although only the run's files name it.

    Raises:
        PbflError: if there is no such run, it was not started by pbfl deploy local, its files name other code, or the
            changes would change its results.
    """
    directory = expanded(run).absolute()
    given = configuration.gather(None, assignments)
    allowed = {*allowed, *code_in(given.values.values())}
    recorded, file = RunDirectory(directory).record().configuration, directory / NODES
    if not file.exists():
        raise PbflError(
            f"'{directory}' was not made by pbfl deploy local: it has no {NODES}; try pbfl run --resume"
        )
    record = NodesRecord.from_json(RunDirectory(directory).read(NODES), file)
    configuration.check_allowed(f"'{directory}'", allowed, recorded, *record.nodes)
    requested = configuration.resumed(directory, given, allowed, devices=True)
    settings = configuration.check(requested)
    nodes = [_moved(node, Path(str(recorded["run-dir"])), directory) for node in record.nodes]
    _check(settings, nodes)
    return Plan(directory, requested.values, settings, nodes, record.secure)


def _moved(node: Mapping[str, Scalar], before: Path, now: Path) -> dict[str, Scalar]:
    """Return a SuperNode's configuration with its state beside the run, if it was there before the run was moved."""
    state = Path(str(node["state-dir"]))
    return {
        **node,
        "state-dir": str(now / state.relative_to(before) if state.is_relative_to(before) else state),
    }


def start(app: Path, plan: Plan, console: Console) -> int:
    """Run the federation and print a line per round.

    Returns:
        As :func:`pbfl_flwr.experiments.execute.runner.simulate`.

    Raises:
        PbflError: if Flower cannot be started or refuses the run.
    """
    record = NodesRecord(nodes=[dict(node) for node in plan.nodes], secure=plan.secure)
    guard = "TLS, SuperNode authentication" if plan.secure else "insecure"
    guard += ", in a network of its own" * private_network.inside()
    deployment = Deployment(
        plan.run_dir, plan.nodes, secure=plan.secure, tell=lambda line: say(console, line, "yellow")
    )

    def submit() -> str:
        # The directory is locked by now, so the file is not another run's.
        content = json.dumps(record.to_json(), indent=1) + "\n"
        write_atomically(plan.run_dir / NODES, content.encode())
        run_id = deployment.submit(app, {**plan.config, "run-dir": str(plan.run_dir)})
        say(console, f"SuperLink {deployment.fleet_address} ({guard}), {len(plan.nodes)} SuperNodes")
        return run_id

    rounds = plan.settings.run.num_server_rounds
    resume_with = f"pbfl deploy local {resume_words(plan.run_dir, plan.config, plan.nodes)}"
    return follow_run(deployment, submit, rounds, console, resume_with)


def _check(settings: Settings, nodes: Sequence[Mapping[str, Scalar]]) -> None:
    """Check every SuperNode's configuration, its own data, and that its model accepts this data."""
    for index, (node_settings, node) in enumerate(zip(check(settings, nodes), nodes, strict=True)):
        if "data-path" not in node:
            continue
        files = node.get("data-client", node["client-id"])
        try:
            data = own_data(node_settings.data, files if isinstance(files, int) else None)
            task = data.task(node_settings.models.feature_dim)
            check_models(node_settings.models.models, task, node_settings.code)
        except PbflError as error:
            raise PbflError(f"--node {index}: {error}") from None
    if not any("data-path" in node or "model" in node for node in nodes):
        configuration.preflight(settings, None, LoadedData())
