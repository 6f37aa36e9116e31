"""The server's part of a round with many uploads: check, decode, aggregate; seconds and memory.

    python benchmarks/server_aggregation.py [--uploads 10000] [--out server_aggregation.json]

K = 100 classes, s = 50 numbers per class, all classes present, as TinyProto sends them. Covers all of the server's work
on replies: ``check`` measures their size, decodes and validates them; ``decode`` is the second decoding, one upload at
a time during the sum; ``aggregate`` is the sum itself. CPU seconds of one thread, median of the repeats. Memory is the
growth of the process, without the bytes that Flower handed over; a method that needs all uploads at once
(``median``) is listed for comparison.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity
from machine import introduce, write

from pbfl_flwr.config import parse
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.messages.report import Report
from pbfl_flwr.flower.server.phase import Phase, RoundPlan
from pbfl_flwr.flower.server.replies import ReplyRules, read
from pbfl_flwr.method import Round
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.payloads.plausibility import Plausibility
from pbfl_flwr.runs.records import ClientRecord
from pbfl_flwr.task import Task

K, S, D = 100, 50, 500
TASK = Task(K, D, (3, 32, 32))
CLIENT = ClientRecord(
    client=0,
    node=1,
    simulated=True,
    configured_data=True,
    task=TASK,
    labels=(),
    architecture="cnn4",
    parameters=(0, 0),
    device="cpu",
    num_train=100,
    num_test=33,
)
RULES = ("mean", "weighted", "ppa", "aps-sum", "median")


def replies(rule: str, number: int) -> tuple[Phase, list[Message]]:
    """Return a round's requests and replies, the replies in reverse order."""
    generator = torch.Generator().manual_seed(0)
    asked, answers = [], []
    present = torch.ones(K, dtype=torch.bool)
    report = Report(100, 33, 1, {"head": 20, "global": 19}, 0.5, metrics={"loss.ce": 1.2})
    for client in range(number):
        question = Message(wire.content(), dst_node_id=client + 1, message_type="train", group_id="1")
        question.metadata.__dict__["_message_id"] = f"{client:064d}"
        counts = torch.randint(1, 9, (K,), generator=generator) if rule == "weighted" else None
        total = 100 if rule in ("ppa", "aps-sum") else None
        upload = Prototypes(torch.randn(K, S, generator=generator), present, counts, total)
        asked.append((question, client))
        answers.append(Message(wire.content(wire.encode(upload), report.to_record()), reply_to=question))
    plan = RoundPlan(1, dict.fromkeys(range(number), "train"))
    declared = dict.fromkeys(range(number), CLIENT)
    return Phase(asked, plan, {}, 0, time.perf_counter(), declared=declared), answers[::-1]


def measure(rule: str, number: int, repeats: int) -> dict[str, Any]:
    """Return medians over the repeats; memory is from the first, before any reuse."""
    settings = parse(
        {"method": "fedproto", "aggregation": rule, "cps-dim": S, "feature-dim": D, "num-clients": number},
        SECTIONS,
    )
    method = build_method(settings)
    state = method.init(TASK, 0)
    rules = replace(ReplyRules.of(settings, method, TASK), plausibility=Plausibility())
    phase, answers = replies(rule, number)
    gc.collect()
    before, grown = resident_mb(), 0.0
    checks, both, decodes = [], [], []
    for repeat in range(repeats):
        begin = time.process_time()
        outcome = read(answers, phase, rules, state)
        checked = time.process_time()
        method.aggregate(state, outcome.uploads, Round(1, TASK, number))
        ended = time.process_time()
        if len(outcome.uploads) != number:
            raise SystemExit(f"{rule}: {next(iter(outcome.failures.values()))}")
        if repeat == 0:
            grown = resident_mb() - before
        checks.append(checked - begin)
        both.append(ended - checked)
        begin = time.process_time()
        for _ in outcome.uploads.values():
            pass
        decodes.append(time.process_time() - begin)
        del outcome
    decode = median(decodes)
    return {
        "rule": rule,
        "uploads": number,
        "streams": method.streams(),
        "check": median(checks),
        "decode": decode,
        "aggregate": median(both) - decode,
        "grown_mb": grown,
        "received_mb": sum(
            len(array.data) for a in answers for array in a.content.array_records[wire.PAYLOAD].values()
        )
        / 2**20,
    }


def resident_mb() -> float:
    """Return the resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--uploads", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # required by messages
    introduce(1)
    print(f"{arguments.uploads} uploads, K = {K}, s = {S}")
    print(f"{'rule':>9} {'check':>9} {'decode':>9} {'aggregate':>9} {'decode+aggregate':>17} {'memory':>9}")
    rows = []
    for rule in arguments.rules.split(","):
        row = measure(rule, arguments.uploads, arguments.repeats)
        rows.append(row)
        print(
            f"{rule:>9} {row['check']:>7.2f} s {row['decode']:>7.2f} s {row['aggregate']:>7.2f} s "
            f"{row['decode'] + row['aggregate']:>15.2f} s {row['grown_mb']:>6.0f} MB"
        )
    write(arguments.out, 1, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
