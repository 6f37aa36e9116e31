"""Results of a run as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from pbfl_flwr.config import PREDICTORS, AttackSettings, Scalar
from pbfl_flwr.errors import FEW
from pbfl_flwr.experiments import per_class
from pbfl_flwr.experiments.console import clients_named, kilobytes, print_blocks, print_whole, say
from pbfl_flwr.experiments.results import (
    Scores,
    client_series,
    coverage_lines,
    majority_lines,
    new_client_rounds,
    other_moment,
    partial_coverage,
    participants,
    resume_command,
    scores,
    series,
)
from pbfl_flwr.runs.directory import ERROR, RunDirectory
from pbfl_flwr.runs.records import Accuracy, ClientsRecord, NewClientsRecord, RoundRecord, RunRecord

UNKNOWN = "unknown"


def show_run(run_dir: Path, console: Console) -> None:
    """Print a run's settings, accuracies, costs and failures.

    Args:
        run_dir: the run directory.
        console: to print to.

    Raises:
        PbflError: if there is no run.
    """
    run = RunDirectory(run_dir)
    about, rounds = run.record(), run.round_records()
    new_clients, partition = run.new_client_records(len(rounds)), run.partition()
    say(console, str(run_dir), "bold")
    say(console, settings_line(about, len(rounds)))
    if rounds:
        if scored := scores(rounds):
            print_whole(console, accuracy_table(scored, about.primary_predictor, other_moment(about)))
            for sentence in coverage_lines([("", partial_coverage([(about, scored)]))]):
                say(console, sentence)
        else:
            say(console, "no accuracies: no client has reported any")
        for sentence in majority_lines([partition.majority]):
            say(console, sentence)
        per_class.show(about, rounds, console)
        if new_clients:
            print_whole(console, new_client_table(about, new_clients))
            for sentence in majority_lines([partition.new_client_majority], "a new client"):
                say(console, sentence)
        clients = run.client_records()
        if any(client.name for client in about.clients):
            say(console, "clients, accuracy on their own test data, %")
            print_blocks(console, *client_rows(about, client_series(rounds, clients)), words=2)
        console.print(cost_table(about, rounds, partition.paper_scalars))
        for sentence in unknown_lines([partition.paper_scalars]):
            say(console, sentence)
        columns = [*clients, *(record.columns for record in new_clients)]
        if line := privacy_line(about.configuration, columns):
            say(console, line)
        for warning in rounds[-1].warnings:
            say(console, f"last round: {warning}", "yellow")
        for line in [*joined_lines(rounds), *failure_lines([*rounds, *new_clients])]:
            say(console, line, "yellow")
    wanted, wanted_new_client_rounds = about.last_round, new_client_rounds(about)
    if len(rounds) < wanted:
        say(console, f"{len(rounds)} of {wanted} rounds; resume with: {resume_command(run_dir, about)}")
    elif len(new_clients) < wanted_new_client_rounds:
        done = f"{len(new_clients)} of {wanted_new_client_rounds} rounds of the new clients"
        say(console, f"{done}; resume with: {resume_command(run_dir, about)}")
    if result := run.result():
        say(console, f"result hash {result}")
    if (error := run_dir / ERROR).exists():
        say(console, f"ended with: {error.read_text(encoding='utf-8').strip()}", "red")


def settings_line(about: RunRecord, num_rounds: int) -> str:
    """Return one line that describes the run.

    Args:
        about: content of run.json.
        num_rounds: number of finished rounds.
    """
    config = about.configuration
    detail = {
        "dirichlet": f"({config['dirichlet-alpha']})",
        "pathological": f"({config['classes-per-client']} classes)",
        "way-shot": f"({config['ways']} ways, {config['shots']} shots)",
    }.get(str(config["partition"]), "")
    data = f"{config['dataset']}, {config['partition']}{detail}"
    if not any(client.configured_data for client in about.clients):
        data = "the clients' own data"
    models = config["models"]
    if not all(client.simulated for client in about.clients):  # a device may use another one
        models = ", ".join(dict.fromkeys(client.architecture for client in about.clients))
    malicious = about.malicious
    attack = f"; {AttackSettings.from_flat(config).notice(malicious)}" if malicious else ""
    clients = f"{config['num-clients']} clients"
    if new := config.get("new-clients", 0):
        clients += f" ({new} of them new after the last round)"
    return (
        f"{config['method']} on {data}, {clients}, "
        f"models {models}, d = {config['feature-dim']}, {num_rounds} round{'' if num_rounds == 1 else 's'}, "
        f"protocol {config['protocol']}, seed {config['seed']}, scored {about.moment} local training"
        f"{attack}"
    )


def accuracy_table(scored: Mapping[str, Scores], primary_predictor: str, other: str) -> Table:
    """Return the table of accuracies: last, best, validation-chosen and other-moment round of every predictor.

    Args:
        scored: predictor -> scores.
        primary_predictor: the predictor that the method reports.
        other: name of the moment at which the primary predictor is not scored.
    """
    table = Table(title="accuracy on the clients' test data, %", title_justify="left")
    table.add_column("predictor", no_wrap=True)
    for name in ("round", "weighted", "mean", "std", "worst 10%"):
        table.add_column(name, justify="right")
    for name, score in scored.items():
        style = "bold" if name == primary_predictor else ""
        label = f"{name} (primary)" if name == primary_predictor else name
        number, last = score.last
        table.add_row(label, str(number), *_statistics(last), style=style)
        for title, point in (
            ("best (chosen on test data)", score.best),
            ("validation-chosen", score.chosen),
            (other, score.other),
        ):
            if point is not None:
                table.add_row(title, str(point[0]), *_statistics(point[1]), style=style)
        table.add_section()
    return table


def _statistics(accuracy: Accuracy) -> list[str]:
    values = (accuracy.weighted, accuracy.mean, accuracy.std, accuracy.worst)
    return [f"{100 * value:.2f}" for value in values]


def new_client_table(about: RunRecord, new_clients: Sequence[NewClientsRecord]) -> Table:
    """Return the table of the new clients' accuracies after each of their own rounds.

    Args:
        about: content of run.json.
        new_clients: rounds with the same ``after``, at least one.
    """
    points, after = series(new_clients), new_clients[0].after
    predictors = [name for name in PREDICTORS if any(name in accuracy for _, accuracy in points)]
    clients = about.configuration["new-clients"]
    who = f"{clients} new client{'' if clients == 1 else 's'} after round {after}"
    title = f"{who}: sample-weighted accuracy, %"
    table = Table(title=title, title_justify="left")
    table.add_column("own rounds", justify="right")
    for name in predictors:
        label = f"{name} (primary)" if name == about.primary_predictor else name
        table.add_column(label, justify="right")
    for number, accuracy in points:
        cells = (f"{100 * accuracy[name].weighted:.2f}" if name in accuracy else "-" for name in predictors)
        table.add_row(str(number - after), *cells)
    return table


def client_rows(
    about: RunRecord, points: Iterable[tuple[int, ClientsRecord]]
) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of the client table: name, model, sample counts and last scored accuracy in %.

    Args:
        about: content of run.json.
        points: result of :func:`.client_series`.
    """
    last: dict[int, tuple[int, int, Mapping[str, int]]] = {}
    for number, columns in points:
        counters = zip(columns.client, columns.num_test, columns.correct, strict=True)
        last |= {client: (number, tested, correct) for client, tested, correct in counters}
    predictors = [name for name in PREDICTORS if any(name in correct for _, _, correct in last.values())]
    rows = []
    for client in about.clients:
        number, tested, correct = last.get(client.client, (0, 0, {}))
        scores = (f"{100 * correct[n] / tested:.2f}" if tested and n in correct else "-" for n in predictors)
        sizes = (str(client.num_train), str(client.num_test), str(number) if tested else "-")
        rows.append([client.label, client.architecture, *sizes, *scores])
    return ["client", "model", "train", "test", "round", *predictors], rows


def cost_table(about: RunRecord, rounds: Sequence[RoundRecord], paper: float | None) -> Table:
    """Return the cost table: bytes per round and client, scalars sent, seconds, memory.

    Args:
        about: content of run.json.
        rounds: of the run, at least one.
        paper: scalars by the paper's formula; None if unknown.
    """
    clients = participants(about)
    table = Table(title="cost per round, mean over rounds", title_justify="left")
    for name in ("", "up", "down", "both"):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    labels = {
        "payload": "bytes, mean over all clients: payload",
        "application": "  including reports",
        "total": "  including Flower's objects",
    }
    for kind, label in labels.items():
        up = fmean(getattr(record.bytes_up, kind) for record in rounds) / clients
        down = fmean(getattr(record.bytes_down, kind) for record in rounds) / clients
        table.add_row(label, kilobytes(up), kilobytes(down), kilobytes(up + down))
    last = rounds[-1].scalars
    table.add_row(
        "scalars, all clients, last round", f"{last.up:,}", f"{last.down:,}", f"{last.up + last.down:,}"
    )
    table.add_row("  by the paper's formula, all participants", "", "", paper_scalars(paper))
    mean = fmean(record.seconds.total for record in rounds)
    table.add_row("seconds", "", "", f"{mean:.2f}", end_section=True)
    # Both are 0 if clients do not report them: client-report=none.
    peak = max(record.peak_mb for record in rounds)
    spent = fmean(sum(record.seconds.clients.values()) for record in rounds)
    table.add_row("  sum over clients", "", "", f"{spent:.2f}" if spent else "-")
    table.add_row("peak memory of a worker", "", "", f"{peak:.0f} MB" if peak else "-")
    if gpu := max(record.gpu_mb for record in rounds):
        table.add_row("  on its GPU, without the CUDA context", "", "", f"{gpu:.0f} MB")
    return table


def privacy_line(configuration: Mapping[str, Scalar], clients: Sequence[ClientsRecord]) -> str | None:
    """Return a line with the differential privacy budget ε that the uploads have spent; None without noise.

    Args:
        configuration: of the run.
        clients: their counters in every round.
    """
    last: dict[int, float] = {}
    for columns in clients:
        for client, metrics in zip(columns.client, columns.metrics, strict=True):
            if "epsilon" in metrics:
                last[client] = metrics["epsilon"]
    if not last:
        return None
    worst = max(last, key=lambda client: last[client])
    return (
        f"differential privacy of the prototypes (clip {configuration['dp-clip']:g}, noise "
        f"{configuration['dp-noise']:g}, unit {configuration['dp-unit']}): at δ = {configuration['dp-delta']:g} "
        f"ε = {last[worst]:.3g} for client {worst}, {fmean(last.values()):.3g} on average"
    )


def paper_scalars(count: float | None) -> str:
    """Format the paper's count of scalars per round; "unknown" for None."""
    return UNKNOWN if count is None else f"{count:,.0f}"


def unknown_lines(counts: Iterable[float | None]) -> list[str]:
    """Return a sentence on why a paper's count of scalars is unknown; empty if all are known."""
    if all(count is not None for count in counts):
        return []
    return [
        "The paper's scalars are unknown: no formula, or it needs class counts that devices do not report."
    ]


def joined_lines(rounds: Sequence[RoundRecord]) -> list[str]:
    """Return a line on the devices that joined during the run; empty if there were none."""
    joined = [f"client {who} in round {record.round}" for record in rounds for who in record.joined]
    return (
        [f"joined during the run: {', '.join(joined)}; accuracies of earlier rounds exclude them"]
        if joined
        else []
    )


def failure_lines(rounds: Sequence[RoundRecord]) -> Iterator[str]:
    """Yield a line per client and failure reason; new clients last, with their own round numbers.

    Args:
        rounds: of a run, optionally followed by those of its new clients.
    """
    by_client: dict[tuple[bool, int, str, str], list[int]] = {}
    for record in rounds:
        after = record.after if isinstance(record, NewClientsRecord) else None
        for failure in record.all_failures:
            who = after is not None, failure.client, failure.label, failure.reason
            by_client.setdefault(who, []).append(record.round - (after or 0))
    by_reason: dict[tuple[bool, str], list[tuple[str, list[int]]]] = {}
    for (new, _, client, reason), numbers in sorted(by_client.items()):
        by_reason.setdefault((new, reason), []).append((client, numbers))
    for (new, reason), failed in by_reason.items():
        kind = "new client" if new else "client"
        together = sorted({number for _, numbers in failed for number in numbers})
        lines = [([client], numbers) for client, numbers in failed]
        if len(lines) > FEW:
            lines = [([client for client, _ in failed], together)]
        for clients, numbers in lines:
            yield f"{clients_named(clients, kind)} failed in {_when(numbers, new)}: {reason}"


def _when(numbers: Sequence[int], new: bool) -> str:
    own = " of its own" if new else ""
    if len(numbers) == 1:
        return f"round {numbers[0]}{own}"
    return f"{len(numbers)} rounds{own}, first {numbers[0]}"
