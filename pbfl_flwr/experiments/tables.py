"""What a run came to, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from pbfl_flwr.config import PREDICTORS, announced
from pbfl_flwr.experiments.figures import kilobytes, say
from pbfl_flwr.experiments.narrow import print_blocks
from pbfl_flwr.experiments.runner import go_on_with
from pbfl_flwr.flower.history import ERROR, RunDirectory

STATISTICS = ("weighted", "mean", "std", "worst")


@dataclass(frozen=True)
class Scores:
    """A predictor's accuracies over the run.

    Attributes:
        last: (round, statistics) of the last round.
        best: (round, statistics) of the round with the highest accuracy, sample-weighted unless asked otherwise.
        chosen: (round, statistics) on the test data of the round with the highest sample-weighted accuracy on the
            clients' validation samples; None where nothing was held out.
        other: (round, statistics) of the last scoring at the other moment (both-moments), over the clients that
            trained; None where there was none.
    """

    last: tuple[int, Mapping[str, float]]
    best: tuple[int, Mapping[str, float]]
    chosen: tuple[int, Mapping[str, float]] | None = None
    other: tuple[int, Mapping[str, float]] | None = None


def series(rounds: Sequence[Mapping[str, Any]], on: str = "accuracy") -> list[tuple[int, Mapping[str, Any]]]:
    """Return (round, predictor -> statistics) in the order of the rounds.

    Args:
        rounds: what rounds.jsonl holds. Where clients are scored before their training, an entry's accuracy is the
            round's before it (round 0: the initial models) and the last entry holds the last round's as "final".
        on: "accuracy" (on test data) or "validation".
    """
    found = [(entry["accuracy_of_round"], entry.get(on, {})) for entry in rounds]
    if rounds and "final" in rounds[-1]:
        found.append((rounds[-1]["round"], rounds[-1]["final"].get(on, {})))
    return found


def scores(rounds: Sequence[Mapping[str, Any]], by: str = "weighted") -> dict[str, Scores]:
    """Return predictor -> scores.

    Args:
        rounds: what rounds.jsonl holds.
        by: the statistic by which the best round is chosen.
    """
    found = {}
    validated = dict(series(rounds, "validation"))
    for name in PREDICTORS:
        points = [(number, accuracy[name]) for number, accuracy in series(rounds) if name in accuracy]
        held_out = {at: validated[at][name]["weighted"] for at, _ in points if name in validated.get(at, {})}
        chosen = max(held_out, key=lambda at: held_out[at], default=None)
        if points:
            best = max(points, key=lambda point: point[1][by])
            found[name] = Scores(
                points[-1],
                best,
                None if chosen is None else (chosen, dict(points)[chosen]),
                next((point for point in reversed(_other(rounds, name))), None),
            )
    return found


def _other(rounds: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, Mapping[str, float]]]:
    """Return (round, a predictor's statistics) at the other moment: after a round, or of the broadcast before it."""
    return [
        (2 * entry["round"] - 1 - entry["accuracy_of_round"], entry["other"][name])
        for entry in rounds
        if name in entry.get("other", {})
    ]


def show(run_dir: Path, console: Console) -> None:
    """Print a run's settings, accuracies, costs and failures.

    Args:
        run_dir: its directory.
        console: where to.

    Raises:
        PbflError: if there is no run.
    """
    run = RunDirectory(run_dir)
    about, rounds = run.read(), run.rounds()
    newcomers = run.newcomers(len(rounds))
    say(console, str(run_dir), "bold")
    say(console, settings_line(about, len(rounds)))
    if rounds:
        if found := scores(rounds):
            console.print(accuracy_table(found, about["headline"], other_moment(about)))
            for sentence in few_lines([("", few_clients([(about, found)]))]):
                say(console, sentence)
        else:
            say(console, "no accuracies: no client has said any")
        for sentence in majority_lines([run.majority()]):
            say(console, sentence)
        if newcomers:
            console.print(newcomer_table(about, newcomers))
            for sentence in majority_lines([run.newcomer_majority()], "a new client"):
                say(console, sentence)
        if any(member.get("name") for member in about["clients"]):
            say(console, "clients, accuracy on their own test data, %")
            print_blocks(console, *client_rows(about, run.client_rounds()), words=2)
        console.print(cost_table(about, rounds, run.paper_scalars()))
        answers = [*run.client_rounds(), *(line["columns"] for line in newcomers)]
        if line := privacy_line(about["configuration"], answers):
            say(console, line)
        for note in rounds[-1].get("notes", []):
            say(console, f"last round: {note}", "yellow")
        for line in failure_lines([*rounds, *newcomers]):
            say(console, line, "yellow")
    wanted, wanted_of_newcomers = about["configuration"]["num-server-rounds"], rounds_of_newcomers(about)
    if len(rounds) < wanted:
        say(console, f"{len(rounds)} of {wanted} rounds; go on with: {go_on_with(run_dir, about)}")
    elif len(newcomers) < wanted_of_newcomers:
        done = f"{len(newcomers)} of {wanted_of_newcomers} rounds of the new clients"
        say(console, f"{done}; go on with: {go_on_with(run_dir, about)}")
    if (error := run_dir / ERROR).exists():
        say(console, f"it ended with: {error.read_text(encoding='utf-8').strip()}", "red")


def majority_lines(shares: Iterable[float | None], who: str = "a client") -> list[str]:
    """Return what the skew of the labels alone scores, in a sentence; none where it is not known.

    Args:
        shares: what :meth:`RunDirectory.majority` says of every run; several partitions are named side by side.
        who: of whom.
    """
    known = sorted({f"{100 * share:.2f}" for share in shares if share is not None})
    said = (
        f"Always answering {who}'s most frequent training class: {', '.join(known)} %, weighted by samples."
    )
    return [said] if known else []


def settings_line(about: Mapping[str, Any], num_rounds: int) -> str:
    """Return what was run, in a line.

    Args:
        about: what run.json holds.
        num_rounds: rounds that were finished.
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
    if not all(member["simulated"] for member in members):  # a device may have named another one
        models = ", ".join(dict.fromkeys(member["architecture"] for member in members))
    liars = about.get("malicious", [])
    attack = f"; {announced(config['attack'], liars)}" if liars else ""
    clients = f"{config['num-clients']} clients"
    if new := config.get("new-clients", 0):
        clients += f" ({new} of them new after the last round)"
    return (
        f"{config['method']} on {data}, {clients}, "
        f"models {models}, d = {config['feature-dim']}, {num_rounds} rounds, "
        f"protocol {config['protocol']}, seed {config['seed']}, scored {about['moment']} local training"
        f"{attack}"
    )


def other_moment(about: Mapping[str, Any]) -> str:
    """Return the moment that is not the headline's of a run, whose run.json is given."""
    return "after training" if about["moment"] == "before" else "before training"


def accuracy_table(found: Mapping[str, Scores], headline: str, other: str) -> Table:
    """Return the table of accuracies, last and best round of every predictor.

    Args:
        found: predictor -> scores.
        headline: the predictor that is reported.
        other: what the moment is called that is not the headline's.
    """
    table = Table(title="accuracy on the clients' test data, %", title_justify="left")
    table.add_column("predictor", no_wrap=True)
    table.add_column("round", justify="right")
    for name in ("weighted", "mean", "std", "worst 10%"):
        table.add_column(name, justify="right")
    for name, score in found.items():
        style = "bold" if name == headline else ""
        label = f"{name} (headline)" if name == headline else name
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


def participants(about: Mapping[str, Any]) -> int:
    """Return how many clients take part in the rounds of a run, whose run.json is given."""
    return len(about["clients"]) - int(about["configuration"].get("new-clients", 0))


def honest(about: Mapping[str, Any]) -> frozenset[int]:
    """Return the clients over which a run's accuracies may be: those that take part in the rounds and do not lie."""
    return frozenset(range(participants(about))) - frozenset(about.get("malicious", []))


def few_clients(runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Scores]]]) -> dict[str, str]:
    """Return predictor -> "n of M", over how many clients its accuracies are, where they are not over all of them.

    Args:
        runs: (run.json, predictor -> scores) of each run of a row.
    """
    found: dict[str, set[int]] = {}
    everybody = 0
    for about, scored in runs:
        everybody = max(everybody, len(honest(about)))
        for name, score in scored.items():
            points = [point[1] for point in (score.last, score.best, score.chosen) if point is not None]
            found.setdefault(name, set()).update(int(at["clients"]) for at in points if "clients" in at)
    return {
        name: f"{span(numbers)} of {everybody}"
        for name, numbers in found.items()
        if numbers and min(numbers) < everybody
    }


def few_lines(rows: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return which accuracies of a table are over some of the clients only, in a sentence; none where none are.

    Args:
        rows: label and what :func:`few_clients` says of it; labels stand in the sentence where rows differ.
    """
    told: dict[str, list[str]] = {}
    for label, few in rows:
        said = ", ".join(f"{name} over {numbers}" for name, numbers in few.items())
        told.setdefault(said, []).append(label)
    parts = [
        said if len(labels) == len(rows) else f"{', '.join(labels)}: {said}"
        for said, labels in told.items()
        if said
    ]
    return [f"Accuracies that are not over all clients taking part: {'; '.join(parts)}."] if parts else []


def span(numbers: Iterable[int]) -> str:
    """Return a number, or the lowest and the highest of several."""
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]}–{found[-1]}"


def rounds_of_newcomers(about: Mapping[str, Any]) -> int:
    """Return how many rounds the new clients of a run train after its last one; 0 where there are none."""
    config = about["configuration"]
    return int(config["new-client-rounds"]) if config.get("new-clients") else 0


def newcomer_table(about: Mapping[str, Any], newcomers: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of new clients: what they score after so many rounds of their own.

    Args:
        about: what run.json holds.
        newcomers: what newcomers.jsonl holds of one end of the run, at least one entry.
    """
    found, after = series(newcomers), newcomers[0]["after"]
    asked = [name for name in PREDICTORS if any(name in accuracy for _, accuracy in found)]
    clients = about["configuration"]["new-clients"]
    who = f"{clients} new client{'' if clients == 1 else 's'}, who came after round {after}"
    title = f"{who}: accuracy, %, weighted by samples"
    table = Table(title=title, title_justify="left")
    table.add_column("rounds of their own", justify="right")
    for name in asked:
        label = f"{name} (headline)" if name == about["headline"] else name
        table.add_column(label, justify="right")
    for number, accuracy in found:
        cells = (f"{100 * accuracy[name]['weighted']:.2f}" if name in accuracy else "-" for name in asked)
        table.add_row(str(number - after), *cells)
    return table


def client_rows(
    about: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) on named clients: what each one is, and its accuracy in % when it was last scored.

    Args:
        about: what run.json holds.
        clients: what clients.jsonl holds.
    """
    last: dict[int, tuple[int, int, Mapping[str, int]]] = {}
    for entry in clients:
        counters = zip(entry["client"], entry["num_test"], entry["correct"], strict=True)
        last |= {client: (entry["round"], tested, correct) for client, tested, correct in counters}
    asked = [name for name in PREDICTORS if any(name in correct for _, _, correct in last.values())]
    rows = []
    for member in about["clients"]:
        number, tested, correct = last.get(member["client"], (0, 0, {}))
        scores = (f"{100 * correct[n] / tested:.2f}" if tested and n in correct else "-" for n in asked)
        who = member.get("name") or str(member["client"])
        sizes = (str(member["num_train"]), str(member["num_test"]), str(number or "-"))
        rows.append([who, member["architecture"], *sizes, *scores])
    return ["client", "model", "train", "test", "round", *asked], rows


def cost_table(about: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], paper: float | None) -> Table:
    """Return the table of costs: bytes a round and client, numbers that travel, seconds.

    Args:
        about: what run.json holds.
        rounds: what rounds.jsonl holds, at least one entry.
        paper: scalars by the paper's formula; None where they are not known.
    """
    clients = participants(about)
    table = Table(title="cost of a round, mean over the rounds", title_justify="left")
    for name in ("", "up", "down", "both"):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    labels = {
        "payload": "bytes, mean over all clients: payload",
        "ours": "  with reports",
        "total": "  with Flower's objects",
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
    table.add_row("  by the paper's formula, all taking part", "", "", paper_scalars(paper))
    mean = fmean(entry["seconds"]["total"] for entry in rounds)
    table.add_row("seconds", "", "", f"{mean:.2f}", end_section=True)
    spent = {
        key: fmean(entry["seconds"]["clients"][key] for entry in rounds)
        for key in rounds[0]["seconds"]["clients"]
    }
    table.add_row("  of clients, summed", "", "", f"{sum(spent.values()):.2f}")
    table.add_row("  peak memory of a worker", "", "", f"{max(entry['peak_mb'] for entry in rounds):.0f} MB")
    return table


def privacy_line(configuration: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what the noise of the uploads is worth, None without noise.

    Args:
        configuration: of the run.
        clients: what clients.jsonl holds.
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
        f"ε = {last[worst]:.3g} for client {worst}, {fmean(last.values()):.3g} in the mean"
    )


def paper_scalars(found: float | None) -> str:
    """Return the paper's count of the scalars that travel in a round, or why it is not known."""
    return "unknown (no formula, or K_i are the devices' own)" if found is None else f"{found:,.0f}"


def failure_lines(rounds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for every client and reason; new clients last, by rounds of their own.

    Args:
        rounds: what rounds.jsonl holds, and, if wanted, newcomers.jsonl.
    """
    found: dict[tuple[bool, int, str, str], list[int]] = {}
    for entry in rounds:
        new = "after" in entry
        for failure in [*entry["failures"], *entry.get("final", {}).get("failures", [])]:
            who = new, failure["client"], failure.get("name", str(failure["client"])), failure["reason"]
            found.setdefault(who, []).append(entry["round"] - entry.get("after", 0))
    for (new, _, client, reason), numbers in sorted(found.items()):
        own = " of its own" if new else ""
        where = (
            f"round {numbers[0]}{own}"
            if len(numbers) == 1
            else f"{len(numbers)} rounds{own}, first {numbers[0]}"
        )
        yield f"{'new ' if new else ''}client {client} failed in {where}: {reason}"
