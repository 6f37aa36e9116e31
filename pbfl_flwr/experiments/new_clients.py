"""What a federation is worth to clients that were not in it: they train with a finished run's last broadcast.

Nothing is sent, and the run does not change. No sample of theirs was in the run:

* With ``partition`` natural, and where a dataset's files fix the clients, they are the clients after the run's.
* Otherwise they are the first clients of a second deal, of samples that the run left out (``max-samples``, or a
  ``way-shot`` partition): drawn and dealt to as many clients by the same settings, with ``partition-seed`` + 1.

Networks and seeds are those of further clients: their numbers follow the run's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pbfl_flwr import calls, seeds
from pbfl_flwr.config import DataSettings, Settings, in_order, parse
from pbfl_flwr.data import ClientData, LoadedData, Partition, Pool, Split, make_partition
from pbfl_flwr.data.clients import materialise
from pbfl_flwr.data.partition.assign import thinned
from pbfl_flwr.errors import PbflError, reading
from pbfl_flwr.experiments.artefacts import check_allowed, method_of
from pbfl_flwr.experiments.notes import majority_lines
from pbfl_flwr.experiments.results import FinishedRun
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.flower.client.device import choose_device, make_deterministic
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.method import Client, Method
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.cpu_convolutions import optimize_layout
from pbfl_flwr.models.isolation import ties_kept
from pbfl_flwr.models.precision import set_precision
from pbfl_flwr.models.registry import architecture_of
from pbfl_flwr.payloads import Payload
from pbfl_flwr.runs.directory import CHECKPOINT, RunDirectory
from pbfl_flwr.runs.tensor_files import load_tensors
from pbfl_flwr.training.evaluation import Scores, evaluate

MOMENTS = ("before", "after")
Round = tuple[Scores, Scores]
"""A client's scores before and after the local training of a round."""


def new_client_sheet(run: FinishedRun, clients: int, rounds: int) -> Sheet:
    """Let new clients train with the run's last broadcast, the same in every round; return their accuracies.

    Raises:
        PbflError: if the checkpoint is missing or damaged, the run names code that was not allowed, or there are no
            samples for so many new clients.
    """
    settings, method, task, file = (
        parse(run.config, SECTIONS).allowing(run.allowed),
        method_of(run),
        run.about.task,
        RunDirectory(run.path).state_file(CHECKPOINT),
    )
    with reading(str(file)):
        tensors, metadata = load_tensors(file)
        state, done = method.state.from_tensors(tensors, task), int(metadata["round"])
    pool, partition = unseen(run, settings, clients)
    played: list[list[Round]] = []
    trained: list[int] = []
    for number, split in enumerate(partition.splits, start=settings.run.num_clients):
        check_allowed(run, architecture_of(settings.models.models, number))
        seed = seeds.derive(settings.data.partition_seed, "validation", number)
        data = materialise(pool, split, settings.data.validation_share, seed)
        trained.append(len(data.train))
        sent = wire.encode(calls.broadcast(method, state, number, task), settings.prototypes.wire_dtype)
        client = _client(settings, number, done, data, run)
        played.append([*_rounds(method, client, wire.decode(sent, method.down, task), rounds)])
    columns = {
        f"{name}, {MOMENTS[moment]}": [_accuracy(each, moment, name) for each in zip(*played, strict=True)]
        for name in in_order(
            name for each in played for scores in each for one in scores for name in one.correct
        )
        for moment in range(len(MOMENTS))
        if any(name in scores[moment].correct for each in played for scores in each)
    }
    rows = [
        (str(number), *cells) for number, *cells in zip(range(1, rounds + 1), *columns.values(), strict=True)
    ]
    notes = (
        "Sample-weighted accuracy in %, before and after the local training of a round with the broadcast.",
        f"Training samples: {', '.join(map(str, trained))}; "
        f"test samples: {', '.join(str(len(split.test)) for split in partition.splits)}.",
        *majority_lines([partition.majority(pool.labels)], "a new client"),
    )
    title = f"{clients} new client{'s' * (clients > 1)} after round {done}"
    return Sheet(title, ("own round", *columns), tuple(rows), notes, 0)


def _client(settings: Settings, number: int, done: int, data: ClientData, run: FinishedRun) -> Client:
    """Return a client with its initial weights that has not trained yet."""
    training, seed, task = settings.training, settings.run.seed, run.about.task
    device = choose_device(training.device)
    if device.type == "cuda":
        make_deterministic()
    own = seeds.derive(seed, "weights", number) if settings.models.initial_weights == "own" else seed
    architecture = architecture_of(settings.models.models, number, settings.code)
    model = build_model(architecture, task, own)
    with ties_kept(architecture, model):
        model = set_precision(optimize_layout(model, training.layout), training.precision).to(device)
    return Client(number, done, task, model, data.on(device), training, settings.evaluation, seed)


def _rounds(method: Method[Any, Any, Any], client: Client, down: Payload, rounds: int) -> Iterator[Round]:
    """Yield the scores of each round, which are those that the ClientApp would report.

    A method may predict with other networks at the one moment than at the other, so it is told which it is.
    """
    settings = [client.evaluation.model_copy(update={"evaluate_moment": moment}) for moment in MOMENTS]
    for number in range(client.round + 1, client.round + 1 + rounds):
        client = replace(client, round=number, evaluation=settings[0])
        client.model.eval()
        seeds.seed_code(client.device, client.seed, "layers", client.key, number)
        method.install(client, down)
        before = evaluate(client, calls.predictors(method, client, down), method.predicts)
        client = replace(client, evaluation=settings[1])
        client = replace(client, memory=calls.local_update(method, client, down).memory)
        yield before, evaluate(client, calls.predictors(method, client, down), method.predicts)


def _accuracy(each: Sequence[Round], moment: int, predictor: str) -> str:
    scored = [scores[moment] for scores in each if predictor in scores[moment].correct]
    tests = sum(scores.num_samples for scores in scored)
    return f"{100 * sum(scores.correct[predictor] for scores in scored) / tests:.2f}" if tests else "-"


def unseen(run: FinishedRun, settings: Settings, clients: int) -> tuple[Pool, Partition]:
    """Return the dataset, and the new clients' rows, of which the run had none."""
    data, M = settings.data.model_copy(update={"download": False}), settings.run.num_clients
    if run.counts is None:
        raise PbflError(f"{run.path}: its clients brought their own data, so there is none for new clients")
    check_allowed(run, data.dataset)
    check_allowed(run, data.partition)
    loaded = LoadedData()
    with reading("the dataset"):
        pool = loaded.pool(data)
    if not loaded.is_of_run(data, M, run.partition.data, run.about.clients[0].deal):
        raise PbflError(
            f"{run.path}: the samples of dataset '{data.dataset}' are not those with which it began"
        )
    if data.partition == "natural" or pool.in_train is not None:
        try:
            partition = make_partition(pool, data, M + clients)
        except PbflError as error:
            raise PbflError(f"--clients {clients}, beside the {M} of the run: {error}") from None
        return pool, replace(
            partition,
            splits=partition.splits[M:],
            counts=partition.counts[M:],
            natural_ids=partition.natural_ids[M:],
        )
    return pool, _second_deal(pool, data, M, clients)


def _second_deal(pool: Pool, data: DataSettings, M: int, clients: int) -> Partition:
    used = np.concatenate(
        [rows for split in make_partition(pool, data, M).splits for rows in (split.train, split.test)]
    )
    left, total = np.setdiff1d(np.arange(len(pool.labels)), used), len(pool.labels)
    if clients > M:
        raise PbflError(f"--clients {clients}: must be at most {M}, the number of the run's clients")
    if len(left) < len(used):
        raise PbflError(
            f"the run used {len(used):,} of the {total:,} samples of dataset '{data.dataset}'; new clients need "
            f"as many others, so it must leave half of them, e.g. max-samples = {total // 2}"
        )
    again = data.model_copy(update={"partition_seed": data.partition_seed + 1})
    try:
        deal = make_partition(thinned(pool, left), again, M)
    except PbflError as error:
        raise PbflError(
            f"the run left {len(left):,} samples, which cannot be dealt as its own were, to {M} clients: {error}"
        ) from None
    splits = tuple(Split(left[split.train], left[split.test]) for split in deal.splits[:clients])
    return Partition(splits, deal.counts[:clients], deal.notes)
