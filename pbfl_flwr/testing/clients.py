"""Small clients with data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pbfl_flwr import calls
from pbfl_flwr.config import DataSettings, ModelSettings, Scalar, key_of, parse
from pbfl_flwr.data import ClientData, Shard, load_pool
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client, Method
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.models.build import build_model
from pbfl_flwr.payloads import separate
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import own_code

TASK = Task(num_classes=4, feature_dim=6, input_shape=(1, 16, 16))  # every image network takes 16x16 pixels

# Training samples and test samples of each class. Client 1 has one training sample, client 3 one class; class 9 is held
# by nobody and tested by client 0.
SPLITS: tuple[tuple[dict[int, int], dict[int, int]], ...] = (
    ({0: 9, 1: 6, 2: 5}, {0: 3, 1: 3, 9: 2}),
    ({0: 1}, {0: 2, 4: 1}),
    ({1: 12, 3: 6, 4: 4, 5: 3}, {1: 4, 3: 2}),
    ({6: 10}, {6: 4}),
    ({5: 7, 7: 8, 8: 6, 2: 2}, {5: 2, 7: 2, 8: 2}),
)


def client(
    labels: Sequence[int] = (0, 0, 1, 1, 2, 2, 0, 1),
    *,
    id: int = 0,
    architecture: str = "mlp5",
    round: int = 1,
    memory: Mapping[str, Tensor] | None = None,
    task: Task = TASK,
    **keys: Scalar,
) -> Client:
    """Return a client with one sample for each label, drawn around the label's number.

    Its first three samples are its test samples, too. Equal arguments give equal clients: weights depend on the
    architecture and the key ``seed``, data on the id.

    Args:
        labels: (n,) of the training samples, 0..K-1.
        id: of the client.
        architecture: of its network, also ``my_package.module:function``.
        round: the server's round number, from 1.
        memory: what it keeps from its last round.
        task: K, d, the shape of inputs and the vocabulary, whose token ids lie around the label's number, too.
        keys: of the run configuration, with underscores, e.g. ``learning_rate=0.1``, except those of networks and
            data; batches have 4 samples.

    Raises:
        PbflError: if the network or a key is unknown, or a key is one of networks or data.
    """
    given = {key_of(keyword): value for keyword, value in keys.items()}
    for key in sorted(given.keys() & {*ModelSettings.key_names(), *DataSettings.key_names()}):
        raise PbflError(
            f"client: the key '{key}' has no effect here; must be an argument: the network is architecture, d and the "
            "shape of inputs are of task, samples are of labels"
        )
    random = torch.Generator().manual_seed(100 + id)
    y = torch.tensor(labels, dtype=torch.int64)
    x = torch.randn(len(y), *task.input_shape, generator=random) + y.view(-1, *(1 for _ in task.input_shape))
    if task.vocabulary_size:
        x = x.round().long() % task.vocabulary_size
    shape = (task.input_shape[0], *(1 for _ in task.input_shape[1:]))
    data = ClientData(
        Shard(x, y),
        Shard(x[:3], y[:3]),
        task.num_classes,
        tuple(map(str, range(task.num_classes))),
        torch.ones(shape),
        torch.zeros(shape),
        vocabulary_size=task.vocabulary_size,
    )
    own: dict[str, Scalar] = {"method": "local", "batch-size": 4}
    settings = parse({**own, **given}, SECTIONS)
    seed = settings.run.seed
    model = build_model(own_code(architecture, [architecture]), task, 7 + seed)
    return Client(id, round, task, model, data, settings.training, settings.evaluation, seed, memory or {})


def uploads(
    method: Method[Any, Any, Any], clients: Iterable[Client], state: Any = None
) -> tuple[Any, dict[int, Any]]:
    """Train clients and return the server's state before, and client -> its upload as the server gets it.

    Broadcasts and uploads are rebuilt from their tensors, and uploads are checked, as on their way.

    Args:
        method: of all.
        clients: at least one, each with an id of its own; their networks are changed. What they keep is not returned.
        state: of the server; None: a new one.

    Raises:
        PbflError: if two clients have the same id, or a function of the method returns something else than it must.
        RejectedPayload: if the server would leave an upload out.
    """
    sent: dict[int, Any] = {}
    for one in clients:
        if one.id in sent:
            raise PbflError(f"uploads: two clients have the id {one.id}; each must have one of its own")
        state = calls.first_state(method, one.task, one.seed) if state is None else state
        down = rebuilt(calls.broadcast(method, state, one.id, one.task), one.task)
        sent[one.id] = rebuilt(calls.local_update(method, one, down).payload, one.task)
        method.validate(sent[one.id], state, one.task)
    return state, dict(sorted(sent.items()))


def rebuilt(payload: Any, task: Task) -> Any:
    """Return a payload as it arrives."""
    return type(payload).from_tensors(separate(payload.to_tensors()), task)


def tiny_client(number: int) -> ClientData:
    """Digits, dealt as SPLITS says; the same samples every time."""
    pool = load_pool(DataSettings(dataset="digits"))
    labels = torch.from_numpy(pool.labels)

    def shard(wanted: Mapping[int, int], skip: int) -> Shard:
        rows = [(labels == j).nonzero().flatten()[skip : skip + n] for j, n in wanted.items()]
        index = torch.cat(rows)
        return Shard(torch.from_numpy(pool.inputs)[index].contiguous(), labels[index])

    train, test = SPLITS[number]
    scale, shift = pool.affine()
    # Clients take different samples of a class that two of them hold.
    return ClientData(
        shard(train, 20 * number), shard(test, 100 + 5 * number), 10, pool.label_names, scale, shift
    )
