"""Results of a run as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from pbfl_flwr.config import PREDICTORS, AttackSettings
from pbfl_flwr.errors import FEW
from pbfl_flwr.experiments import per_class
from pbfl_flwr.experiments.console import clients_named, kilobytes, print_blocks, print_whole, say
from pbfl_flwr.experiments.results import (
    Scores,
    client_series,
    coverage_lines,
    majority_lines,
    other_moment,
    partial_coverage,
    participants,
    scores,
    series,
)
from pbfl_flwr.experiments.running.runner import resume_command
from pbfl_flwr.runs.directory import ERROR, RunDirectory, last_round

STATISTICS = ("weighted", "mean", "std", "worst")
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
    about, rounds = run.read(), run.rounds()
    new_client_lines = run.new_client_lines(len(rounds))
    say(console, str(run_dir), "bold")
    say(console, settings_line(about, len(rounds)))
    if rounds:
        if found := scores(rounds):
            print_whole(console, accuracy_table(found, about["primary_predictor"], other_moment(about)))
            for sentence in coverage_lines([("", partial_coverage([(about, found)]))]):
                say(console, sentence)
        else:
            say(console, "no accuracies: no client has reported any")
        for sentence in majority_lines([run.majority()]):
            say(console, sentence)
        per_class.show(about, rounds, console)
        if new_client_lines:
            print_whole(console, new_client_table(about, new_client_lines))
            for sentence in majority_lines([run.new_client_majority()], "a new client"):
                say(console, sentence)
        if any(member.get("name") for member in about["clients"]):
            say(console, "clients, accuracy on their own test data, %")
            columns = client_series(rounds, run.client_rounds())
            print_blocks(console, *client_rows(about, columns), words=2)
        paper = run.paper_scalars()
        console.print(cost_table(about, rounds, paper))
        for sentence in unknown_lines([paper]):
            say(console, sentence)
        answers = [*run.client_rounds(), *(line["columns"] for line in new_client_lines)]
        if line := privacy_line(about["configuration"], answers):
            say(console, line)
        for note in rounds[-1].get("notes", []):
            say(console, f"last round: {note}", "yellow")
        for line in [*joined_lines(rounds), *failure_lines([*rounds, *new_client_lines])]:
            say(console, line, "yellow")
    wanted, wanted_new_client_rounds = last_round(about), rounds_of_new_client_lines(about)
    if len(rounds) < wanted:
        say(console, f"{len(rounds)} of {wanted} rounds; resume with: {resume_command(run_dir, about)}")
    elif len(new_client_lines) < wanted_new_client_rounds:
        done = f"{len(new_client_lines)} of {wanted_new_client_rounds} rounds of the new clients"
        say(console, f"{done}; resume with: {resume_command(run_dir, about)}")
    if result := run.result():
        say(console, f"result hash {result}")
    if (error := run_dir / ERROR).exists():
        say(console, f"ended with: {error.read_text(encoding='utf-8').strip()}", "red")


def settings_line(about: Mapping[str, Any], num_rounds: int) -> str:
    """Return one line that describes the run.

    Args:
        about: content of run.json.
        num_rounds: number of finished rounds.
    """
    config = about["configuration"]
    detail = {
        "dirichlet": f"({config['dirichlet-alpha']})",
        "pathological": f"({config['classes-per-client']} classes)",
        "way-shot": f"({config['ways']} ways, {config['shots']} shots)",
    }.get(config["partition"], "")
    members = about["clients"]
    data = f"{config['dataset']}, {config['partition']}{detail}"
    if not any(member["configured_data"] for member in members):
        data = "the clients' own data"
    models = config["models"]
    if not all(member["simulated"] for member in members):  # a device may use another one
        models = ", ".join(dict.fromkeys(member["architecture"] for member in members))
    malicious = about.get("malicious", [])
    attack = f"; {AttackSettings.from_flat(config).notice(malicious)}" if malicious else ""
    clients = f"{config['num-clients']} clients"
    if new := config.get("new-clients", 0):
        clients += f" ({new} of them new after the last round)"
    return (
        f"{config['method']} on {data}, {clients}, "
        f"models {models}, d = {config['feature-dim']}, {num_rounds} round{'' if num_rounds == 1 else 's'}, "
        f"protocol {config['protocol']}, seed {config['seed']}, scored {about['moment']} local training"
        f"{attack}"
    )


def accuracy_table(found: Mapping[str, Scores], primary_predictor: str, other: str) -> Table:
    """Return the table of accuracies: last, best, validation-chosen and other-moment round of every predictor.

    Args:
        found: predictor -> scores.
        primary_predictor: the predictor that the method reports.
        other: name of the moment at which the primary predictor is not scored.
    """
    table = Table(title="accuracy on the clients' test data, %", title_justify="left")
    table.add_column("predictor", no_wrap=True)
    for name in ("round", "weighted", "mean", "std", "worst 10%"):
        table.add_column(name, justify="right")
    for name, score in found.items():
        style = "bold" if name == primary_predictor else ""
        label = f"{name} (primary)" if name == primary_predictor else name
        number, last = score.last
        table.add_row(label, str(number), *(f"{100 * last[key]:.2f}" for key in STATISTICS), style=style)
        for title, point in (
            ("best (chosen on test data)", score.best),
            ("validation-chosen", score.chosen),
            (other, score.other),
        ):
            if point is not None:
                values = (f"{100 * point[1][key]:.2f}" for key in STATISTICS)
                table.add_row(title, str(point[0]), *values, style=style)
        table.add_section()
    return table


def rounds_of_new_client_lines(about: Mapping[str, Any]) -> int:
    """Return the number of rounds that new clients train after the run's last round; 0 without new clients."""
    config = about["configuration"]
    return int(config["new-client-rounds"]) if config.get("new-clients") else 0


def new_client_table(about: Mapping[str, Any], new_client_lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of the new clients' accuracies after each of their own rounds.

    Args:
        about: content of run.json.
        new_client_lines: entries of new-clients.jsonl with the same ``after``, at least one.
    """
    found, after = series(new_client_lines), new_client_lines[0]["after"]
    asked = [name for name in PREDICTORS if any(name in accuracy for _, accuracy in found)]
    clients = about["configuration"]["new-clients"]
    who = f"{clients} new client{'' if clients == 1 else 's'} after round {after}"
    title = f"{who}: sample-weighted accuracy, %"
    table = Table(title=title, title_justify="left")
    table.add_column("own rounds", justify="right")
    for name in asked:
        label = f"{name} (primary)" if name == about["primary_predictor"] else name
        table.add_column(label, justify="right")
    for number, accuracy in found:
        cells = (f"{100 * accuracy[name]['weighted']:.2f}" if name in accuracy else "-" for name in asked)
        table.add_row(str(number - after), *cells)
    return table


def client_rows(
    about: Mapping[str, Any], found: Iterable[tuple[int, Mapping[str, Any]]]
) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of the client table: name, model, sample counts and last scored accuracy in %.

    Args:
        about: content of run.json.
        found: result of :func:`.client_series`.
    """
    last: dict[int, tuple[int, int, Mapping[str, int]]] = {}
    for at, line in found:
        counters = zip(line["client"], line["num_test"], line["correct"], strict=True)
        last |= {client: (at, tested, correct) for client, tested, correct in counters}
    asked = [name for name in PREDICTORS if any(name in correct for _, _, correct in last.values())]
    rows = []
    for member in about["clients"]:
        number, tested, correct = last.get(member["client"], (0, 0, {}))
        scores = (f"{100 * correct[n] / tested:.2f}" if tested and n in correct else "-" for n in asked)
        who = member.get("name") or str(member["client"])
        sizes = (str(member["num_train"]), str(member["num_test"]), str(number) if tested else "-")
        rows.append([who, member["architecture"], *sizes, *scores])
    return ["client", "model", "train", "test", "round", *asked], rows


def cost_table(about: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], paper: float | None) -> Table:
    """Return the cost table: bytes per round and client, scalars sent, seconds, memory.

    Args:
        about: content of run.json.
        rounds: entries of rounds.jsonl, at least one.
        paper: scalars by the paper's formula; None if unknown.
    """
    clients = participants(about)
    table = Table(title="cost per round, mean over rounds", title_justify="left")
    for name in ("", "up", "down", "both"):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    labels = {
        "payload": "bytes, mean over all clients: payload",
        "ours": "  including reports",
        "total": "  including Flower's objects",
    }
    for key, label in labels.items():
        up, down = (
            fmean(entry[way][key] for entry in rounds) / clients for way in ("bytes_up", "bytes_down")
        )
        table.add_row(label, kilobytes(up), kilobytes(down), kilobytes(up + down))
    last = rounds[-1]["scalars"]
    table.add_row(
        "scalars, all clients, last round",
        f"{last['up']:,}",
        f"{last['down']:,}",
        f"{last['up'] + last['down']:,}",
    )
    table.add_row("  by the paper's formula, all participants", "", "", paper_scalars(paper))
    mean = fmean(entry["seconds"]["total"] for entry in rounds)
    table.add_row("seconds", "", "", f"{mean:.2f}", end_section=True)
    # Both are 0 if clients do not report them: client-report=none.
    peak = max(entry["peak_mb"] for entry in rounds)
    spent = fmean(sum(entry["seconds"]["clients"].values()) for entry in rounds)
    table.add_row("  sum over clients", "", "", f"{spent:.2f}" if spent else "-")
    table.add_row("peak memory of a worker", "", "", f"{peak:.0f} MB" if peak else "-")
    if gpu := max(entry.get("gpu_mb", 0.0) for entry in rounds):
        table.add_row("  on its GPU, without the CUDA context", "", "", f"{gpu:.0f} MB")
    return table


def privacy_line(configuration: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a line with the differential privacy budget ε that the uploads have spent; None without noise.

    Args:
        configuration: of the run.
        clients: entries of clients.jsonl.
    """
    last: dict[int, float] = {}
    for entry in clients:
        for client, metrics in zip(entry["client"], entry["metrics"], strict=True):
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


def paper_scalars(found: float | None) -> str:
    """Format the paper's count of scalars per round; "unknown" for None."""
    return UNKNOWN if found is None else f"{found:,.0f}"


def unknown_lines(counts: Iterable[float | None]) -> list[str]:
    """Return a sentence on why a paper's count of scalars is unknown; empty if all are known."""
    if all(count is not None for count in counts):
        return []
    return [
        "The paper's scalars are unknown: no formula, or it needs class counts that devices do not report."
    ]


def joined_lines(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line on the devices that joined during the run; empty if there were none."""
    found = [f"client {who} in round {entry['round']}" for entry in rounds for who in entry.get("joined", [])]
    return (
        [f"joined during the run: {', '.join(found)}; accuracies of earlier rounds exclude them"]
        if found
        else []
    )


def failure_lines(rounds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per client and failure reason; new clients last, with their own round numbers.

    Args:
        rounds: entries of rounds.jsonl, optionally followed by those of new-clients.jsonl.
    """
    found: dict[tuple[bool, int, str, str], list[int]] = {}
    for entry in rounds:
        new = "after" in entry
        for failure in [*entry["failures"], *entry.get("final", {}).get("failures", [])]:
            who = new, failure["client"], failure.get("name", str(failure["client"])), failure["reason"]
            found.setdefault(who, []).append(entry["round"] - entry.get("after", 0))
    by_reason: dict[tuple[bool, str], list[tuple[str, list[int]]]] = {}
    for (new, _, client, reason), numbers in sorted(found.items()):
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
