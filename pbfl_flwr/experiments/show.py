"""Results of a run as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from pbfl_flwr.config import Scalar
from pbfl_flwr.data.datasets import dealt
from pbfl_flwr.errors import FEW
from pbfl_flwr.experiments.console import clients_named, say
from pbfl_flwr.experiments.notes import majority_lines
from pbfl_flwr.experiments.results import FinishedRun, RunGroup, resume_command
from pbfl_flwr.experiments.run_tables import (
    accuracy_sheet,
    class_sheets,
    client_sheet,
    cost_sheet,
)
from pbfl_flwr.runs.directory import RunDirectory
from pbfl_flwr.runs.locks import in_use
from pbfl_flwr.runs.records import REPEATED, ClientsRecord, RoundRecord, RunRecord
from pbfl_flwr.util.extras import lacking


def show_run(run_dir: Path, console: Console) -> None:
    """Print a run's settings, accuracies, costs and failures.

    Raises:
        PbflError: if there is no run.
    """
    directory = RunDirectory(run_dir)
    running = in_use(run_dir)  # before the files are read
    about, done = directory.record(), directory.finished_rounds()
    say(console, str(run_dir), "bold")
    say(console, settings_line(about, done))
    if done:
        _show_results(FinishedRun.load(run_dir), console)
    result = directory.result()
    if not result or done < about.last_round:
        rest = "running" if running else f"resume with: {resume_command(run_dir, about)}"
        say(console, f"{done} of {about.last_round} rounds; {rest}")
    if result:
        say(console, f"result hash {result}")
    if (error := directory.error()) and not running:
        say(console, f"ended with: {error}", "red")


def _show_results(run: FinishedRun, console: Console) -> None:
    group = RunGroup("", (run,))
    if run.scores:
        accuracy_sheet([group]).without_first_column().show(console)
    else:
        say(console, "no accuracies: no client has reported any")
    for sentence in majority_lines([run.partition.majority]):
        say(console, sentence)
    for sheet in class_sheets([group]):
        sheet.without_first_column().show(console)
    if any(client.name or client.natural_id for client in run.about.clients):
        client_sheet([group]).show(console)
    cost_sheet(run).show(console)
    if line := privacy_line(run.config, run.rounds, run.clients):
        say(console, line)
    for line in warning_lines(run):
        say(console, line, "yellow")


def warning_lines(run: FinishedRun) -> list[str]:
    """Return the warnings of the run and its last round, what changed and who joined meanwhile, and who failed."""
    warnings = [*run.about.warnings, *(f"last round: {warning}" for warning in run.rounds[-1].warnings)]
    if edits := run.edits:
        warnings.append(f"code was edited during the run: other from round {', '.join(map(str, edits))} on")
    joined = [f"client {who} in round {record.round}" for record in run.rounds for who in record.joined]
    if joined:
        warnings.append(
            f"joined during the run: {', '.join(joined)}; accuracies of earlier rounds exclude them"
        )
    return [*warnings, *failure_lines(run.rounds)]


def settings_line(about: RunRecord, num_rounds: int) -> str:
    """Return one line that describes a run with this number of finished rounds."""
    config = about.configuration
    data = f"{config['dataset']}, {dealt(config)}"
    if about.own_data:
        data = "the clients' own data"
    models = config["models"]
    if not about.simulated:  # a device may use another one
        models = ", ".join(dict.fromkeys(client.architecture for client in about.clients))
    wanted, there = int(config["num-clients"]), len(about.clients)
    number = f"{there} of {wanted}" if there < wanted else f"{wanted}"
    mods = f"; mods {config['mods']}" if config.get("mods") else ""
    return (
        f"{config['method']} on {data}, {number} clients, "
        f"models {models}, d = {config['feature-dim']}, {num_rounds} round{'' if num_rounds == 1 else 's'}, "
        f"protocol {config['protocol']}, seed {config['seed']}, scored {about.moment} local training"
        f"{mods}"
    )


def privacy_line(
    configuration: Mapping[str, Scalar], rounds: Sequence[RoundRecord], clients: Sequence[ClientsRecord]
) -> str | None:
    """Return a line with the differential privacy budget ε that the uploads have spent; None without noise.

    "At most", if uploads were lost or rejected, each of which may have been a release that somebody saw: until its next
    report, which counts it if it was, a client that failed in a round counts as having made one. A report whose count
    is too low, of a client that lost its state or has an older one, adds its own release to those known before; no
    report counts its failures before that.
    """
    known: Counter[int] = Counter()  # client -> releases according to its reports
    possible: Counter[int] = Counter()  # client -> failures that no report has settled
    forgotten: Counter[int] = Counter()  # client -> those that none will
    last: dict[int, int] = {}  # client -> the count of its last report
    told: dict[int, tuple[int, float]] = {}  # client -> its highest count with an ε, and that ε
    by_round = {columns.round: columns for columns in clients}
    for record in rounds if configuration["dp-noise"] else ():
        if (columns := by_round.get(record.round)) is not None:
            for client, count, metrics in zip(
                columns.client, columns.participations, columns.metrics, strict=True
            ):
                own, more = int("epsilon" in metrics), count - last.get(client, 0)
                known[client] += max(own, more)
                last[client] = count
                failures = possible.pop(client, 0)
                if more < own:
                    forgotten[client] += failures
                if own:
                    told[client] = max(told.get(client, (0, 0.0)), (count, metrics["epsilon"]))
        tried = REPEATED in record.warnings  # it may have answered the try before
        possible.update(failure.client for failure in record.failures if tried or not failure.unasked)
    possible += forgotten
    releases = known + possible  # without those of 0
    if not releases:
        return None
    budget = {client: told.get(client, (0, 0.0))[1] for client in releases}
    untold = [client for client, count in releases.items() if count != told.get(client, (0, 0.0))[0]]
    missing = lacking("counting the releases that no ε covers", "scipy") if untold else ""
    if untold and not missing:
        from pbfl_flwr.prototypes.privacy import epsilon_of

        noise, delta = float(configuration["dp-noise"]), float(configuration["dp-delta"])
        budget |= {client: epsilon_of(noise, releases[client], delta) for client in untold}
    worst = max(budget, key=lambda client: budget[client])
    bound = "at least " if missing else "at most " if possible else ""
    return (
        f"differential privacy of the prototypes (clip {configuration['dp-clip']:g}, noise "
        f"{configuration['dp-noise']:g}, unit {configuration['dp-unit']}): at δ = {configuration['dp-delta']:g} "
        f"ε = {bound}{budget[worst]:.3g} for client {worst}, {fmean(budget.values()):.3g} on average"
        + (missing and f"; {missing}")
    )


def failure_lines(rounds: Sequence[RoundRecord]) -> Iterator[str]:
    """Yield a line per client and failure reason, with the rounds."""
    by_client: dict[tuple[int, str, str], list[int]] = {}
    for record in rounds:
        for failure in record.all_failures:
            by_client.setdefault((failure.client, failure.label, failure.reason), []).append(record.round)
    by_reason: dict[str, list[tuple[str, list[int]]]] = {}
    for (_, client, reason), numbers in sorted(by_client.items()):
        by_reason.setdefault(reason, []).append((client, numbers))
    for reason, failed in by_reason.items():
        together = sorted({number for _, numbers in failed for number in numbers})
        lines = [([client], numbers) for client, numbers in failed]
        if len(lines) > FEW:
            lines = [([client for client, _ in failed], together)]
        for clients, numbers in lines:
            yield f"{clients_named(clients)} failed in {_when(numbers)}: {reason}"


def _when(numbers: Sequence[int]) -> str:
    return f"round {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} rounds, first {numbers[0]}"
