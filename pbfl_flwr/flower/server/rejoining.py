"""Clients that reconnect, to a resumed run or on another node during a run; other devices may join then."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from flwr.serverapp import Grid

from pbfl_flwr.errors import LONGEST, PbflError
from pbfl_flwr.flower.server.admission import Admission
from pbfl_flwr.flower.server.handshake import checked_roster, refusals, send_hello, wait_for_nodes
from pbfl_flwr.flower.server.roster import Member, Roster
from pbfl_flwr.flower.server.waiting import OnWait, ignore
from pbfl_flwr.runs.directory import RunRefused

UNCHANGED = ("task", "labels", "columns", "architecture", "weights", "parameters")  # when a client reconnects
UNCHANGED_ON_RESUME = ("simulated", "name", "configured_data", *UNCHANGED)


def resume_hello(
    grid: Grid,
    recorded: Iterable[Mapping[str, Any]],
    experiment: str,
    timeout: float,
    join_timeout: float,
    least: int,
    on_wait: OnWait = ignore,
) -> tuple[Roster, list[str]]:
    """Send a hello to the clients of a resumed run; missing ones may reconnect later, other nodes are refused.

    Args:
        grid: Flower's.
        recorded: the run's clients, as in run.json.
        experiment: id of the run.
        timeout: seconds to wait for the replies.
        join_timeout: seconds to wait for the nodes.
        least: number of the run's clients that it needs to continue.
        on_wait: called with lines on how many nodes have joined, while waiting.

    Returns:
        All clients of the run, missing ones with node NO_NODE, and a line for every refused node.

    Raises:
        RunRefused: if a client has changed, naming the first, or if run.json is damaged or of another version.
        PbflError: if fewer than ``least`` connected, naming the missing ones, or if two nodes have the same client id.
    """
    try:
        known = {int(entry["client"]): Member.recorded(entry) for entry in recorded}
    except (KeyError, TypeError, ValueError) as error:
        raise RunRefused(f"run.json does not list the clients in the form of this version: {error}") from None
    numbers = {member.label: client for client, member in known.items()}
    members, failed = _hello_to_all(grid, numbers, experiment, timeout, join_timeout, on_wait)
    back = [replace(member, client=numbers[member.label]) for member in members if member.label in numbers]
    refused = [_not_in_run(member) for member in members if member.label not in numbers]
    refused += [f"node {node}: {reason}" for node, reason in failed.items()]
    present = checked_roster(back) if back else Roster({})
    if len(present.members) < least:
        missing = ", ".join(sorted(set(numbers) - {member.label for member in back}))
        others = ", ".join(sorted({member.label for member in members} - set(numbers)))
        needed = f"resuming this run needs at least {least} of its {len(known)} clients; missing: {missing}"
        instead = f"; other clients connected: {others}" if others else ""
        raise PbflError("\n".join([f"{needed}{instead}", *refusals(failed, len(members) + len(failed))]))
    check_unchanged(present, [entry for entry in recorded if int(entry["client"]) in present.members])
    return Roster(dict(sorted({**known, **present.members}.items()))), refused


def _hello_to_all(
    grid: Grid, labels: Collection[str], experiment: str, timeout: float, join_timeout: float, on_wait: OnWait
) -> tuple[list[Member], dict[int, str]]:
    """Send hellos until all of these clients have replied or the timeout passes; other nodes do not count."""
    end = time.monotonic() + join_timeout
    members: list[Member] = []
    failed: dict[int, str] = {}
    while True:
        others = len(failed) + sum(member.label not in labels for member in members)
        left = max(0.0, end - time.monotonic())
        nodes = wait_for_nodes(grid, len(labels) + others, left, on_wait, least=0)
        new = sorted(set(nodes) - {member.node for member in members} - set(failed))
        if not new:
            return members, failed
        new_members, new_failed = send_hello(grid, new, experiment, timeout)
        # Others may have reconnected elsewhere.
        members = [member for member in members if member.node in nodes]
        members, failed = members + new_members, failed | new_failed
        if set(labels) <= {member.label for member in members}:
            return members, failed


def _not_in_run(member: Member) -> str:
    return f"client-id {member.label} on node {member.node} is not part of this run"


def hello_to_new_nodes(
    grid: Grid,
    roster: Roster,
    online: Collection[int],
    failed: Collection[int],
    experiment: str,
    timeout: float,
    admission: Admission | None = None,
    skipped: Collection[int] = (),
) -> tuple[Roster, dict[int, str]]:
    """Send a hello to nodes that are not in the roster, e.g. a restarted SuperNode, which has a new node id.

    A client moves to a new node if its old one is disconnected or failed in the last round; otherwise two nodes claim
    the same client, and the new one is refused. Other clients join the run if they may.

    Args:
        grid: Flower's.
        roster: so far.
        online: ids of the connected nodes.
        failed: clients that failed in the last round.
        experiment: id of the run.
        timeout: seconds to wait for the replies.
        admission: decides who may join the run; None if no one may.
        skipped: nodes that get no hello.

    Returns:
        The roster with moved and joined clients, and node -> reason for refused nodes.
    """
    new = sorted(set(online) - {member.node for member in roster.members.values()} - set(skipped))
    if not new:
        return roster, {}
    members, silent = send_hello(grid, new, experiment, timeout)
    refused = {node: f"node {node}: {reason}" for node, reason in silent.items()}
    # Independent of the order of replies; clients with their own numbers come before names, which get free numbers.
    for member in sorted(members, key=lambda member: (member.name, member.client, member.node)):
        client = next(
            (number for number, known in roster.members.items() if known.label == member.label), None
        )
        try:
            if client is None:
                roster = _joined(roster, member, admission)
            else:
                back = _moved(replace(member, client=client), roster.members[client], online, failed)
                roster = Roster({**roster.members, client: back})
                failed = set(failed) - {client}  # so a second new node cannot take over the same client
        except PbflError as error:
            refused[member.node] = str(error)
    return roster, refused


def _joined(roster: Roster, member: Member, admission: Admission | None) -> Roster:
    if admission is None:
        raise PbflError(_not_in_run(member))
    try:
        return admission.admitted(roster, member)
    except PbflError as error:
        raise PbflError(f"{_not_in_run(member)} and cannot join it: {error}") from None


def _moved(new: Member, old: Member, online: Collection[int], failed: Collection[int]) -> Member:
    """Return the client on its new node, if its properties are unchanged and its old node is no longer in use."""
    changed = [key for key in UNCHANGED if getattr(new, key) != getattr(old, key)]
    if changed:
        raise PbflError(
            f"client {new.label} reconnected with another {changed[0]}: {getattr(new, changed[0])}, it had "
            f"{getattr(old, changed[0])}"
        )
    if old.node in online and old.client not in failed:
        raise PbflError(f"client-id {new.label} is used by two nodes, {old.node} and {new.node}")
    return new


def check_unchanged(roster: Roster, recorded: Iterable[Mapping[str, Any]]) -> None:
    """Check that the clients of a resumed run have the same properties as when it began.

    Args:
        roster: the clients now.
        recorded: the same clients as in run.json.

    Raises:
        RunRefused: naming the first client that differs.
    """
    for old in recorded:
        member = roster.members[int(old["client"])]
        new = json.loads(json.dumps(asdict(member)))
        for key in UNCHANGED_ON_RESUME:
            if new[key] != old.get(key, new[key]):
                raise RunRefused(
                    f"client {member.label}: a resumed run keeps its clients, but this one has {key} = "
                    f"{str(new[key])[:LONGEST]}, it had {str(old[key])[:LONGEST]}"
                )
