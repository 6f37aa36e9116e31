"""Clients that come back: of a run that goes on, or on another node in the middle of one. Others may join it."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from flwr.serverapp import Grid

from pbfl_flwr.errors import LONGEST, PbflError
from pbfl_flwr.flower.server.admission import Admission
from pbfl_flwr.flower.server.hello import checked_roster, greet, refusals, wait_for_nodes
from pbfl_flwr.flower.server.roster import Member, Roster
from pbfl_flwr.flower.server.waiting import OnWait, ignore
from pbfl_flwr.flower.storage.history import RunRefused

SAME = ("task", "labels", "columns", "architecture", "weights", "parameters")  # of a client that comes back
OF_A_RUN = ("simulated", "name", "configured_data", *SAME)  # of the clients of a run that goes on


def resume_hello(
    grid: Grid,
    recorded: Iterable[Mapping[str, Any]],
    experiment: str,
    timeout: float,
    join_timeout: float,
    least: int,
    on_wait: OnWait = ignore,
) -> tuple[Roster, list[str]]:
    """Say hello to the clients of a run that goes on; who is missing may come later, and nobody else is asked.

    Args:
        grid: Flower's.
        recorded: who took part, as run.json has them.
        experiment: id of the run.
        timeout: seconds to wait for the answers.
        join_timeout: seconds to wait for the nodes.
        least: clients of the run without which it does not go on.
        on_wait: is told how many nodes have joined, as long as that takes.

    Returns:
        All clients of the run, those that are missing on no node, and a line for every other node.

    Raises:
        RunRefused: naming the first client that came back as another one, or if run.json is damaged or of another
            version.
        PbflError: if fewer than ``least`` came, naming who is missing, or if two nodes are one client.
    """
    try:
        began = {int(was["client"]): Member.recorded(was) for was in recorded}
    except (KeyError, TypeError, ValueError) as error:
        raise RunRefused(f"run.json does not say who took part as this version has it: {error}") from None
    numbers = {member.label: client for client, member in began.items()}
    came, silent = _all_that_come(grid, numbers, experiment, timeout, join_timeout, on_wait)
    back = [replace(member, client=numbers[member.label]) for member in came if member.label in numbers]
    strange = [_stranger(member) for member in came if member.label not in numbers]
    strange += [f"node {node}: {reason}" for node, reason in silent.items()]
    there = checked_roster(back) if back else Roster({})
    if len(there.members) < least:
        missing = ", ".join(sorted(set(numbers) - {member.label for member in back}))
        others = ", ".join(sorted({member.label for member in came} - set(numbers)))
        needed = f"this run goes on with at least {least} of its {len(began)} clients; missing: {missing}"
        instead = f"; others came: {others}" if others else ""
        raise PbflError("\n".join([f"{needed}{instead}", *refusals(silent, len(came) + len(silent))]))
    unchanged(there, [was for was in recorded if int(was["client"]) in there.members])
    return Roster(dict(sorted({**began, **there.members}.items()))), strange


def _all_that_come(
    grid: Grid, labels: Collection[str], experiment: str, timeout: float, join_timeout: float, on_wait: OnWait
) -> tuple[list[Member], dict[int, str]]:
    """Greet nodes until all of these clients have come or the time is over; strangers do not shorten the waiting."""
    end = time.monotonic() + join_timeout
    came: list[Member] = []
    silent: dict[int, str] = {}
    while True:
        strangers = len(silent) + sum(member.label not in labels for member in came)
        left = max(0.0, end - time.monotonic())
        nodes = wait_for_nodes(grid, len(labels) + strangers, left, on_wait, least=0)
        new = sorted(set(nodes) - {member.node for member in came} - set(silent))
        if not new:
            return came, silent
        greeted, quiet = greet(grid, new, experiment, timeout)
        came = [member for member in came if member.node in nodes]  # or it may be here again, on another node
        came, silent = came + greeted, silent | quiet
        if set(labels) <= {member.label for member in came}:
            return came, silent


def _stranger(member: Member) -> str:
    return f"client-id {member.label} on node {member.node} is none of this run"


def greet_new_nodes(
    grid: Grid,
    roster: Roster,
    online: Collection[int],
    failed: Collection[int],
    experiment: str,
    timeout: float,
    admission: Admission | None = None,
    unasked: Collection[int] = (),
) -> tuple[Roster, dict[int, str]]:
    """Greet nodes that are not in the roster: clients whose SuperNode was started again and has another node id now.

    A client moves to a new node if its old one is gone or failed in the last round; otherwise two nodes claim the same
    client, and the new one is not asked anything. Others become clients of the run if they may join it.

    Args:
        grid: Flower's.
        roster: so far.
        online: ids of the nodes that are connected.
        failed: clients that failed in the last round.
        experiment: id of the run.
        timeout: seconds to wait for the answers.
        admission: who may join the run; None if nobody may.
        unasked: nodes that are not greeted.

    Returns:
        The roster with new nodes for old clients and with those that joined, and node -> why for the others.
    """
    new = sorted(set(online) - {member.node for member in roster.members.values()} - set(unasked))
    if not new:
        return roster, {}
    came, silent = greet(grid, new, experiment, timeout)
    refused = {node: f"node {node}: {reason}" for node, reason in silent.items()}
    # Whoever answered first: own numbers are kept before names take what is free.
    for member in sorted(came, key=lambda member: (member.name, member.client, member.node)):
        client = next(
            (number for number, known in roster.members.items() if known.label == member.label), None
        )
        try:
            if client is None:
                roster = _joined(roster, member, admission)
            else:
                back = _moved(replace(member, client=client), roster.members[client], online, failed)
                roster = Roster({**roster.members, client: back})
                failed = set(failed) - {client}  # not on this node: a second one does not get it
        except PbflError as error:
            refused[member.node] = str(error)
    return roster, refused


def _joined(roster: Roster, member: Member, admission: Admission | None) -> Roster:
    if admission is None:
        raise PbflError(_stranger(member))
    try:
        return admission.admitted(roster, member)
    except PbflError as error:
        raise PbflError(f"{_stranger(member)} and cannot join it: {error}") from None


def _moved(now: Member, old: Member, online: Collection[int], failed: Collection[int]) -> Member:
    """Return the client on its new node, if it is the one that it was and its old node lets it go."""
    differ = [key for key in SAME if getattr(now, key) != getattr(old, key)]
    if differ:
        raise PbflError(
            f"client {now.label} came back with another {differ[0]}: {getattr(now, differ[0])}, it had "
            f"{getattr(old, differ[0])}"
        )
    if old.node in online and old.client not in failed:
        raise PbflError(f"client-id {now.label} is used by two nodes, {old.node} and {now.node}")
    return now


def unchanged(roster: Roster, recorded: Iterable[Mapping[str, Any]]) -> None:
    """Check that the clients of a run that goes on are those with which it began.

    Args:
        roster: who came.
        recorded: who came then, as run.json has them.

    Raises:
        RunRefused: naming the first client that differs.
    """
    for was in recorded:
        member = roster.members[int(was["client"])]
        now = json.loads(json.dumps(asdict(member)))
        for key in OF_A_RUN:
            if now[key] != was.get(key, now[key]):
                raise RunRefused(
                    f"client {member.label}: a run that goes on keeps its clients, but this one has {key} = "
                    f"{str(now[key])[:LONGEST]}, it had {str(was[key])[:LONGEST]}"
                )
