"""What run.json and a line of rounds.jsonl and clients.jsonl hold.

Every program that writes or reads them uses these classes. ``VERSION`` stands in run.json and grows when a field
changes its name or meaning; a run of another version is refused, and its ``versions`` say which pbfl-flwr reads it. The
module imports neither torch nor Flower, so that commands that only read a run start fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator
from pydantic_core import PydanticCustomError

from pbfl_flwr.errors import PbflError, printable
from pbfl_flwr.task import Task
from pbfl_flwr.util.atomic_files import DamagedState
from pbfl_flwr.util.source_hash import code_hashes

VERSION = 2
NOT_CONNECTED = "its node is not connected"  # reason of a failure
BUSY = "still busy with round"  # likewise, followed by the number
REPEATED = "round repeated because too many nodes were unreachable"  # warning


class Record(BaseModel):
    """Base of all records: immutable, read from and written to JSON by field name."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | bytes, source: object) -> Self:
        """Return the record that a JSON object holds, parsed or as bytes; the error names its source.

        Raises:
            DamagedState: if it is not such a record; names the first field that is wrong.
        """
        try:
            if isinstance(content, bytes):
                return cls.model_validate_json(content)
            return cls.model_validate(content)
        except PbflError as error:  # of the task
            raise DamagedState(f"{source} is damaged: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = printable(".".join(map(str, first["loc"]))) or "content"
            raise DamagedState(
                f"{source} is damaged, or was written by another version: {where}: {printable(first['msg'])}"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, without optional fields that hold their default."""
        return self.model_dump(mode="json", exclude_defaults=True)


class Accuracy(Record):
    """Accuracy of one predictor over clients with test samples.

    Attributes:
        weighted: correct samples over all samples, as in most published tables.
        mean, std: over clients; population standard deviation.
        worst: mean of the worst decile of the clients, at least one.
        clients: number of clients scored.
        balanced, macro_f1: over all test samples; None unless all clients counted by class (``per-class``).
        balanced_mean, macro_f1_mean: unweighted means over clients, likewise.
        by_class, tested: accuracy over all test samples and number of samples of each class (K entries), likewise; an
            accuracy is None for a class without test samples.
        auc_macro, auc_micro: areas under the ROC curve, see :class:`pbfl_flwr.training.class_metrics.Areas`: means over
            clients, weighted by samples; None unless all clients report them (``auc``).
    """

    weighted: float
    mean: float
    std: float
    worst: float
    clients: int
    balanced: float | None = None
    balanced_mean: float | None = None
    macro_f1: float | None = None
    macro_f1_mean: float | None = None
    by_class: list[float | None] | None = None
    tested: list[int] | None = None
    auc_macro: float | None = None
    auc_micro: float | None = None


class Failure(Record):
    """A client that failed in a round: its number, its name if it has one, and the reason."""

    client: int
    name: str = ""
    reason: str

    @property
    def label(self) -> str:
        """The client's name, or its number if it has none."""
        return self.name or str(self.client)

    @property
    def unasked(self) -> bool:
        """Whether the client got no message in the round, so that it has sent nothing either."""
        return self.reason == NOT_CONNECTED or self.reason.startswith(BUSY)


class Bytes(Record):
    """Bytes of messages.

    Attributes:
        payload: encoded payloads.
        application: payloads, reports and configuration, as encoded.
        total: all of Flower's objects for these messages, before transport headers and encryption.
    """

    payload: int
    application: int
    total: int

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            payload=self.payload + other.payload,
            application=self.application + other.application,
            total=self.total + other.total,
        )


class Scalars(Record):
    """Numbers that carry information, sent by and to all clients of a round."""

    up: int
    down: int


class Seconds(Record):
    """Wall-clock time of a round: in total, on aggregation, and by step, summed over clients."""

    total: float
    aggregate: float
    clients: dict[str, float]


class Accuracies(Record):
    """Accuracies by predictor, on test data and, with ``validation-share``, on validation data."""

    accuracy: dict[str, Accuracy]
    validation: dict[str, Accuracy] = {}


class FinalScores(Accuracies):
    """The scoring after the last training, if clients are scored before local training."""

    failures: list[Failure]


class RoundRecord(Accuracies):
    """A line of rounds.jsonl.

    Attributes:
        round: from 1.
        accuracy_of_round: number of the round whose broadcast or training was scored.
        test_loss: mean cross-entropy over test samples; None if nobody was scored.
        client_metrics: of the method, mean over the clients that trained, weighted by training samples.
        server_metrics: of the method.
        trained: clients whose uploads of this round were aggregated.
        ages: rounds since each class was last uploaded (K entries), -1 if never; None if uploads are not by class.
        warnings: for the user.
        failures: the clients that did not complete their task.
        bytes_up, bytes_down: summed over clients, with all tries of a repeated round; up includes replies to earlier
            rounds, which came too late. The final scoring's are not counted: costs are those of a round.
        scalars: summed over clients, of the try that counted.
        seconds: see :class:`Seconds`.
        peak_mb: largest resident memory of a client process.
        gpu_mb: largest GPU memory reserved by a client process.
        joined: labels of clients that joined the run since the round before.
        final: the final scoring.
    """

    round: int
    accuracy_of_round: int
    test_loss: float | None
    client_metrics: dict[str, float | None]
    server_metrics: dict[str, float | None]
    trained: list[int]
    ages: list[int] | None = None
    warnings: list[str]
    failures: list[Failure]
    bytes_up: Bytes
    bytes_down: Bytes
    scalars: Scalars
    seconds: Seconds
    peak_mb: float
    gpu_mb: float = 0.0
    joined: list[str] = []
    final: FinalScores | None = None

    def unscored(self) -> RoundRecord:
        """Return the round as if nobody had been scored in it."""
        return self.model_copy(update={"accuracy": {}, "validation": {}, "test_loss": None})

    @property
    def all_failures(self) -> list[Failure]:
        """The failures of the round and of its final scoring."""
        return [*self.failures, *(self.final.failures if self.final else [])]

    @property
    def latest(self) -> Accuracies:
        """The final scoring if there was one, else this round's."""
        return self.final or self


class ClientsRecord(Record):
    """A line of clients.jsonl: a column for each counter, an entry for each client that completed its task.

    Attributes:
        round: from 1.
        client: their numbers.
        num_train, num_test: numbers of samples.
        participations: rounds trained in, including this one.
        correct: predictor -> number of correct test samples.
        num_validation, correct_validation: the same of validation samples; empty if no client has any.
        by_class: see :meth:`pbfl_flwr.training.class_metrics.ByClass.brief`, with ``per-class``.
        test_loss: mean cross-entropy on the test samples, None for a client that was not scored.
        metrics: of the method.
        seconds: step of the client's work -> a column of seconds.
        final: of the final scoring.
    """

    round: int
    client: list[int]
    num_train: list[int]
    num_test: list[int]
    participations: list[int]
    correct: list[dict[str, int]]
    num_validation: list[int] = []
    correct_validation: list[dict[str, int]] = []
    by_class: list[dict[str, Any]] = []
    test_loss: list[float | None]
    metrics: list[dict[str, float]]
    seconds: dict[str, list[float]]
    final: ClientsRecord | None = None

    def unscored(self) -> ClientsRecord:
        """Return the round as if nobody had been scored in it."""
        nothing: list[dict[str, int]] = [{} for _ in self.client]
        update = {
            "correct": nothing,
            "correct_validation": nothing if self.correct_validation else [],
            "by_class": nothing if self.by_class else [],
            "test_loss": [None for _ in self.client],
        }
        return self.model_copy(update=update)


class ClientRecord(Record):
    """A client's properties, from its reply in the last handshake.

    Attributes:
        client, node: its number 0..M-1, and the id of the node that it runs on (a string in JSON, for its size).
        name: of a device that has one; the server then assigns the number, which is -1 until it has.
        simulated: whether it is one of the simulation's virtual nodes.
        configured_data: whether it uses the configured dataset and partition, not its own data or an app's.
        task, labels: K, d, input shape and the class names.
        columns: hash of the feature names; empty if there are no names.
        architecture, parameters: its network, and the number of (body, head) parameters.
        device: on which it trains.
        num_train, num_test, num_validation: numbers of samples; its reports may not count more.
        code_version: version of pbfl-flwr that it runs; empty if it sent none.
        weights: hash of its body's pretrained initial weights; empty if there are none.
        key: hash of its node's public key, of which Flower's server has proof; empty in a simulation.
        natural_id: of the person or device whose samples a simulated client has; empty if they have none.
        deal: which samples are whose, see :meth:`pbfl_flwr.data.LoadedData.deal`.
        registered: name under which the operator registered that key; empty if Flower knows none.
    """

    client: int
    name: str = ""
    node: int
    simulated: bool
    configured_data: bool
    task: Task
    labels: tuple[str, ...]
    architecture: str
    parameters: tuple[int, int]
    device: str
    num_train: int
    num_test: int
    num_validation: int = 0
    columns: str = ""
    code_version: str = ""
    weights: str = ""
    key: str = ""
    natural_id: str = ""
    deal: str = ""
    registered: str = ""

    @field_serializer("node", when_used="json")
    def _node_as_text(self, node: int) -> str:
        return str(node)

    @property
    def label(self) -> str:
        """Readable name of this client: its name, or its number if it has none."""
        return self.name or str(self.client)

    @property
    def title(self) -> str:
        """What tables and messages call this client: its natural id, which identifies nobody, or its label."""
        return self.natural_id or self.label

    def numbered(self, number: int) -> ClientRecord:
        """Return this client with another number."""
        return self.model_copy(update={"client": number})

    def on_node(self, node: int) -> ClientRecord:
        """Return this client on another node."""
        return self.model_copy(update={"node": node})

    def counting(self, other: ClientRecord) -> ClientRecord:
        """Return this client with the numbers of samples of another record."""
        counts = ("num_train", "num_test", "num_validation")
        return self.model_copy(update={name: getattr(other, name) for name in counts})

    def with_key(self, key: str, registered: str) -> ClientRecord:
        """Return this client with its node's key, and the name under which that is registered."""
        return self.model_copy(update={"key": key, "registered": registered})


class Change(Record):
    """What differs in the later rounds of a resumed run.

    Attributes:
        from_round: the first round that was made so.
        method, code, versions: as in :class:`RunRecord`.
    """

    from_round: int
    method: dict[str, bool | int | float | str]
    code: dict[str, str]
    versions: dict[str, str] = {}


class RunRecord(Record):
    """The content of run.json.

    Attributes:
        version: of these records.
        configuration: kebab-case keys, all of them; "auto" where the method decides.
        method: settings of the method as it was built for round 1, where "auto" has its value.
        code: hash of the source of every function of a user's that took part, by its name my_package.module:function,
            see :mod:`pbfl_flwr.util.source_hash`; of the server's process, devices have their own.
        changes: method, code and versions of later rounds, where they differ from those before.
        versions: of packages, Python and the operating system; of pbfl-flwr with a hash of its code.
        experiment: the name under which clients keep their state.
        primary_predictor: by which the run is reported.
        moment: when clients are scored, "before" or "after" local training.
        clients: in ascending client order.
        joined: labels of the clients that joined after round 1.
        ended_after: the last round if early stopping ended the run; None if not.
        warnings: of sinks that were left out.
    """

    version: int
    configuration: dict[str, bool | int | float | str]
    method: dict[str, bool | int | float | str] = {}
    code: dict[str, str] = {}
    changes: list[Change] = []
    versions: dict[str, str]
    experiment: str
    primary_predictor: str
    moment: str
    clients: list[ClientRecord] = Field(min_length=1)
    joined: list[str] = []
    ended_after: int | None = None
    warnings: list[str] = []

    @field_validator("version")
    @classmethod
    def _is_current(cls, version: int) -> int:
        if version != VERSION:
            raise PydanticCustomError("version", f"{version} is not read here, only {VERSION}")
        return version

    @property
    def latest(self) -> Change:
        """What the last rounds were made with, and since which round."""
        return self.before(math.inf)

    def before(self, number: float) -> Change:
        """Return what the rounds before a round were made with, and since which one; for round 1, the first."""
        first = Change(from_round=1, method=self.method, code=self.code, versions=self.versions)
        return [first, *(change for change in self.changes if change.from_round < number)][-1]

    def continued(self, now: Change) -> dict[str, Any]:
        """Return the fields that change if the rounds from ``now.from_round`` on are made so."""
        if now.from_round == 1:
            return {"method": now.method, "code": now.code, "versions": now.versions, "changes": []}
        changes = [change for change in self.changes if change.from_round < now.from_round]
        same = self.before(now.from_round).model_copy(update={"from_round": now.from_round}) == now
        return {"changes": changes if same else [*changes, now]}

    @property
    def edited(self) -> tuple[str, ...]:
        """The functions of the user's that were edited since the last rounds, as far as their source is here."""
        made_with = self.latest.code
        return tuple(name for name, now in code_hashes(made_with).items() if made_with[name] != now)

    @property
    def last_round(self) -> int:
        """Number of the run's last round: num-server-rounds, or the round of early stopping."""
        if self.ended_after is not None:
            return self.ended_after
        return int(self.configuration["num-server-rounds"])

    def is_extra(self, number: int, last: int) -> bool:
        """Whether clients were scored in a round only because a shorter run ended with it, which then was continued.

        Args:
            number: of the round.
            last: number of the last round so far.
        """
        every = int(self.configuration.get("evaluate-every", 1))
        return self.moment == "after" and number % every != 0 and number < last

    @property
    def task(self) -> Task:
        """The task, on which all clients agreed."""
        return self.clients[0].task

    @property
    def simulated(self) -> bool:
        """Whether the run is a simulation; devices have data that the simulation engine has not."""
        return all(client.simulated for client in self.clients)

    @property
    def own_data(self) -> bool:
        """Whether the clients brought their own data instead of the configured dataset."""
        return not any(client.configured_data for client in self.clients)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The K class names; class numbers if clients gave no names."""
        names = self.clients[0].labels or range(self.task.num_classes)
        return tuple(" ".join(printable(str(name)).split()) for name in names)


class PartitionRecord(Record):
    """The content of partition.json: the samples of each class on each client, and values that follow from them.

    Attributes:
        counts: (M, K).
        warnings: on the partition.
        majority: accuracy of always predicting a client's most frequent training class.
        paper_scalars: scalars sent per round according to the paper's formula; None if there is none.
        data: hash of the dataset's samples.
    """

    counts: list[list[int]] | None = None
    warnings: list[str] = []
    majority: float | None = None
    paper_scalars: float | None = None
    data: str | None = None
