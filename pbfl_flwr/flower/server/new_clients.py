"""New clients after the last round: measures what the federation gives to clients that did not take part.

Each new client trains for some rounds with the server's final broadcast and is scored; its uploads are not used, so
the server's state does not change. Its own state is stored under another experiment name than that of the run, so it
is new again if the run is continued for more rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any

from flwr.common import log
from flwr.serverapp import Grid

from pbfl_flwr.config import Settings
from pbfl_flwr.flower.messages.report import classes_counted
from pbfl_flwr.flower.server.availability import Availability
from pbfl_flwr.flower.server.instructions import Instructions
from pbfl_flwr.flower.server.replies import Outcome, Phase, read
from pbfl_flwr.flower.server.round_records import client_columns, final_scores, round_line
from pbfl_flwr.flower.server.run_log import accuracy
from pbfl_flwr.flower.server.stop_conditions import RunEnded
from pbfl_flwr.method import Moment
from pbfl_flwr.payloads import Payload
from pbfl_flwr.task import Task


def new_clients(settings: Settings) -> frozenset[int]:
    """Return the clients that train only after the last round: those with the highest numbers."""
    clients = settings.run.num_clients
    return frozenset(range(clients - settings.run.new_clients, clients))


@dataclass(frozen=True)
class NewClientRounds:
    """Trains and evaluates the new clients of a run whose regular rounds are finished.

    Attributes:
        settings: the run configuration.
        instructions: builds the messages, as in the run.
        availability: knows the nodes of all clients.
        task: what all clients agree on.
        moment: when clients are scored.
        primary_predictor: the predictor that is reported.
        after: number of the run's last round.
    """

    settings: Settings
    instructions: Instructions
    availability: Availability
    task: Task
    moment: Moment
    primary_predictor: str
    after: int

    def rounds(self, grid: Grid, state: Payload, done: int, timeout: float) -> Iterator[dict[str, Any]]:
        """Train the new clients and yield a line per round, in the format of rounds.jsonl.

        ``round`` continues the run's round numbers, ``after`` is the run's last round, ``columns`` holds the clients'
        counters. If clients are scored before training, the last line has a ``final`` scoring.

        Args:
            grid: Flower's.
            state: of the server.
            done: rounds that they have already trained, in a resumed run.
            timeout: seconds to wait for a round's replies.
        """
        last = self.after + self.settings.run.new_client_rounds
        for number in range(self.after + done + 1, last + 1):
            started = time.perf_counter()
            phase, outcome = self._exchange(grid, state, number, "train", timeout)
            line = round_line(number, phase, outcome, self.instructions.method, state, self.moment, 0.0)
            line |= {"after": self.after, "columns": client_columns(number, phase, outcome)}
            if self.moment == "before" and number == last:
                phase, outcome = self._exchange(grid, state, number, "evaluate", timeout)
                line["final"] = final_scores(phase, outcome)
                line["columns"]["final"] = client_columns(number, phase, outcome)
            line["seconds"]["total"] = time.perf_counter() - started
            yield line

    def log_and_check(self, line: Mapping[str, Any]) -> None:
        """Log a round's accuracy and failures.

        Raises:
            RunEnded: if a client failed and failure-policy is "stop".
        """
        run = self.settings.run
        log(
            INFO,
            "new clients, round %s/%s: accuracy %s (%s)",
            line["round"] - self.after,
            run.new_client_rounds,
            accuracy(line, self.primary_predictor),
            self.primary_predictor,
        )
        for failure in [*line["failures"], *line.get("final", {}).get("failures", [])]:
            text = f"new client {failure.get('name', failure['client'])} failed: {failure['reason']}"
            log(WARNING, "%s", text)
            if run.failure_policy == "stop":
                raise RunEnded(f"{text}; failure-policy is 'stop'. All rounds are kept and can be resumed")

    def _exchange(
        self, grid: Grid, state: Payload, number: int, kind: str, timeout: float
    ) -> tuple[Phase, Outcome]:
        clients = new_clients(self.settings)
        absent = self.availability.absent(grid, number, check=number == self.after + 1)
        absent = {client: why for client, why in absent.items() if client in clients}
        kinds = dict.fromkeys(sorted(clients - set(absent)), kind)
        instructions = replace(
            self.instructions, experiment=f"{self.instructions.experiment}-new-{self.after}"
        )
        phase = instructions.phase(state, self.availability.roster, kinds, number, absent)
        replies = list(grid.send_and_receive([message for message, _ in phase.messages], timeout=timeout))
        self.availability.settle(phase, replies)  # late uploads of the run's last round are discarded
        max_bytes = self.settings.run.max_upload_mb * 2**20
        counted = classes_counted(self.settings.evaluation, self.task)
        outcome = read(replies, phase, instructions.method, state, self.task, max_bytes, classes=counted)
        self.availability.set_failed(outcome.failures)
        return phase, outcome
