"""What pbfl_flwr.testing finds: its checks fail where a method does what it may not."""

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pbfl_flwr.config import Settings, key_of
from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.method import Client, Method, Predictor, Round, Update
from pbfl_flwr.methods.feddistill import FedDistill
from pbfl_flwr.methods.fedproto import build as fedproto
from pbfl_flwr.payloads import Logits, RejectedPayload, Weights
from pbfl_flwr.prototypes.pipeline import Pipeline
from pbfl_flwr.task import Task
from pbfl_flwr.testing import check_method, client, contract, uploads
from tests.methods.conftest import settings_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


class ChangesBroadcast(FedDistill):
    """A client scales what all of them were sent."""

    def local_update(self, client: Client, down: Logits) -> Update[Logits]:
        down.values.mul_(2)
        return super().local_update(client, down)


class ChangesData(FedDistill):
    """A client gives some samples another class."""

    def local_update(self, client: Client, down: Logits) -> Update[Logits]:
        client.data.train.labels[:1] = 0
        return super().local_update(client, down)


class ChangesUploads(FedDistill):
    """The server scales what it was sent."""

    def aggregate(self, state: Any, uploads: Any, round_info: Round) -> Any:
        new = super().aggregate(state, uploads, round_info)
        for upload in uploads.values():
            upload.values.mul_(2)
        return new


class Draws(FedDistill):
    """The server draws from the global generator."""

    def aggregate(self, state: Any, uploads: Any, round_info: Round) -> Any:
        new = super().aggregate(state, uploads, round_info)
        noisy = replace(new.table, values=new.table.values + torch.rand(()))
        return replace(new, table=noisy)


class ChecksInPlace(FedDistill):
    """The server empties what it checks: no other check finds it, as those see uploads that were checked before."""

    def validate(self, upload: Logits, state: Any, task: Task) -> None:
        upload.values.zero_()


class ScalesFeatures(FedDistill):
    """A predictor scales what the others read."""

    def predictors(self, client: Client, down: Logits) -> dict[str, Predictor]:
        return {"head": lambda features, logits: logits.div_(2)}


class LosesClasses(FedDistill):
    """The server's table ends with the last class that it knows."""

    def aggregate(self, state: Any, uploads: Any, round_info: Round) -> Any:
        new = super().aggregate(state, uploads, round_info)
        table = replace(new.table, values=new.table.values[:-1], present=new.table.present[:-1])
        return replace(new, table=table)


class CannotResume(FedDistill):
    """What is only called on resuming forgets its result."""

    def resumed(self, state: Any) -> Any:
        self.warnings(1, state)


class WarnsOfWhatIsLost(FedDistill):
    """A warning hangs on what no tensor of the state holds."""

    def aggregate(self, state: Any, uploads: Any, round_info: Round) -> Any:
        new = super().aggregate(state, uploads, round_info)
        object.__setattr__(new, "rounds", round_info.number)
        return new

    def warnings(self, num_rounds: int, state: Any = None) -> list[str]:
        return [f"round {state.rounds}"] if hasattr(state, "rounds") else []


@dataclass(frozen=True)
class Latest:
    """The last upload of every client, in the order in which they first came."""

    tables: Mapping[int, Logits]

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the values by client."""
        return {str(client): table.values for client, table in self.tables.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: Task) -> "Latest":
        """Rebuild it."""
        present = torch.ones(task.num_classes, dtype=torch.bool)
        return cls({int(name): Logits(values, present) for name, values in tensors.items()})


class AddsAsTheyCame(Method[Latest, Logits, Logits]):
    """The sum hangs on the order of the clients, which a checkpoint has not."""

    name, state, down, up = "latest", Latest, Logits, Logits

    def init(self, task: Task, seed: int) -> Latest:
        return Latest({9: Logits.empty(task.num_classes, task.num_classes)})

    def broadcast(self, state: Latest, client: int) -> Logits:
        total = sum(table.values for table in state.tables.values())
        assert isinstance(total, Tensor)
        return Logits(total / len(state.tables), torch.ones(len(total), dtype=torch.bool))

    def local_update(self, client: Client, down: Logits) -> Update[Logits]:
        noise = torch.randn(down.values.shape, generator=client.generator("mine"))
        return Update(Logits(down.values + noise, down.present))

    def aggregate(self, state: Latest, uploads: Mapping[int, Logits], round_info: Round) -> Latest:
        mean = self.broadcast(state, 0)
        moved = {number: replace(up, values=mean.values + 0.01 * up.values) for number, up in uploads.items()}
        return Latest({**state.tables, **moved})


def adds_as_they_came(settings: Settings) -> AddsAsTheyCame:
    """Return the method."""
    return AddsAsTheyCame()


def _built(method: type[FedDistill]) -> Callable[[Settings], FedDistill]:
    return lambda settings: method(form="ce-soft")


changes_broadcast, changes_data, changes_uploads, draws = map(
    _built, (ChangesBroadcast, ChangesData, ChangesUploads, Draws)
)
checks_in_place, scales_features, loses_classes = map(_built, (ChecksInPlace, ScalesFeatures, LosesClasses))
cannot_resume, warns_of_what_is_lost = map(_built, (CannotResume, WarnsOfWhatIsLost))


class Attached(FedDistill):
    """Uploads and memory that hang on the network's graph, which neither wire nor disk keeps."""

    def local_update(self, client: Client, down: Logits) -> Update[Logits]:
        update = super().local_update(client, down)
        weight = next(client.model.parameters())
        table = replace(update.payload, values=update.payload.values + 0 * weight.sum())
        return replace(update, payload=table, memory={"weight": 2 * weight})


attached = _built(Attached)


def of_an_app(settings: Settings) -> FedDistill:
    """A method with a key of an app's."""
    return FedDistill(form="ce-soft", weight=float(settings.app["my_share"]))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("changes_broadcast", "^a client changes the broadcast, which others get, too: down.values$"),
        ("changes_data", "^client.data.train.labels is changed; only client.model may be"),
        ("changes_uploads", r"^aggregate\(\) changes what it is given: uploads.0.values$"),
        ("draws", r"^aggregate\(\) gives another state.table.values of the same input: it draws from"),
        ("checks_in_place", r"^validate\(\) changes what it is given: upload.values$"),
        ("scales_features", r"predictor 'head' changes its features or logits in place"),
        (
            "loses_classes",
            r"^LosesClasses.aggregate .*'values' is of shape \(9, 10\); must be .* K = 10 rows",
        ),
        ("cannot_resume", r"^CannotResume.resumed \(test_testing.py:\d+\) returned None; must return a"),
        ("warns_of_what_is_lost", r"as on resuming, warnings\(\) gives other lines$"),
        (
            "adds_as_they_came",
            r"as on resuming, aggregate\(\) gives another '\d', with other clients in every",
        ),
    ],
)
def test_a_method_that_does_what_it_may_not_is_found(name: str, says: str) -> None:
    with pytest.raises((AssertionError, PbflError), match=says):
        check_method(f"{__name__}:{name}")


def test_a_method_may_leave_its_results_in_the_graph() -> None:
    check_method("tests.testing.test_testing:attached")
    _, sent = uploads(Attached(form="ce-soft"), [client()])
    assert not sent[0].values.requires_grad


def test_an_example_does_what_every_method_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    torch.manual_seed(3)
    check_method("feddyn:build", method_settings="alpha=0.2")
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))  # the user's generator is left as it was


def test_a_server_that_an_upload_crashes_is_told_what_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    feddyn = importlib.import_module("feddyn")
    monkeypatch.setattr(feddyn.FedDyn, "validate", Method.validate)  # which accepts all
    with pytest.raises(
        AssertionError, match=r"^validate\(\) accepts an upload with another 'w\..* raises \w+Error"
    ):
        check_method("feddyn:build")


def test_a_method_gets_the_keys_that_it_cannot_do_without() -> None:
    """Its own and its app's; those of an app keep their underscores."""
    keys: dict[str, Any] = {"app.my_share": 0.5}
    with pytest.raises(PbflError, match="KeyError: 'my_share'"):
        check_method(f"{__name__}:of_an_app")
    check_method(f"{__name__}:of_an_app", **keys)
    assert client(**keys).training.batch_size == 4


def test_the_page_on_methods_has_a_test_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    (block,) = re.findall(
        r"```python\n(.*?)```", (EXAMPLES.parent / "add-a-method.md").read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(compile(block, "docs/add-a-method.md", "exec"), names)
    for name in ("test_contract", "test_uploads"):
        names[name]()


def test_a_client_has_the_samples_of_its_labels() -> None:
    made = client((2, 0, 0), id=5, learning_rate=0.3, architecture="cnn4")
    assert made.data.train.labels.tolist() == [2, 0, 0]
    assert (made.id, made.training.learning_rate, made.training.batch_size) == (5, 0.3, 4)
    assert made.model.features(made.data.train.inputs).shape == (3, 6)
    again = client((2, 0, 0), id=5, architecture="cnn4")
    assert torch.equal(made.data.train.inputs, again.data.train.inputs)
    wide = client((0, 1), task=Task(7, 3, (5,)), architecture="mlp-8")
    assert wide.model.head(wide.model.features(wide.data.train.inputs)).shape == (2, 7)


def test_a_client_has_token_ids_where_the_task_has_a_vocabulary() -> None:
    task = Task(4, 8, (12,), vocabulary_size=50)
    made = client(architecture="fasttext", task=task)
    made.data.check()
    assert made.data.task(8) == task
    assert made.model(made.data.prepare(made.data.train.inputs)).shape == (8, 4)


def test_the_seed_of_a_client_is_that_of_its_weights_and_draws() -> None:
    plain, other = client(), client(seed=5)
    assert (plain.seed, other.seed) == (0, 5)
    assert not torch.equal(*(next(one.model.parameters()) for one in (plain, other)))
    assert torch.equal(plain.data.train.inputs, other.data.train.inputs)


@pytest.mark.parametrize("keys", [{"feature_dim": 9}, {"models": "cnn4"}, {"dataset": "digits"}])
def test_a_key_that_a_client_would_ignore_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(PbflError, match=f"'{key_of(*keys)}' has no effect here; must be an argument"):
        client(**keys)


def test_two_clients_with_one_id_are_refused() -> None:
    with pytest.raises(PbflError, match="two clients have the id 0"):
        uploads(FedDistill(form="ce-soft"), [client(), client((1, 1))])


def test_uploads_are_those_that_the_server_gets() -> None:
    method = fedproto(settings_of("fedproto"))
    assert isinstance(method, Pipeline)
    state, sent = uploads(method, [client((0, 0, 1, 1), id=3), client((2, 2), id=1)])
    assert [*sent] == [1, 3]
    assert sent[3].present.tolist() == [True, True, False, False]
    after = method.aggregate(state, sent, Round(1, client().task, 2))
    assert after.broadcast.present.tolist() == [True, True, True, False]
    trained = client((0, 0, 1, 1), id=3)
    _, later = uploads(method, [trained], after)
    assert not torch.equal(later[3].values, sent[3].values)


def test_an_upload_that_the_server_would_leave_out_is_refused() -> None:
    class Wrong(FedDistill):
        def local_update(self, client: Client, down: Logits) -> Update[Logits]:
            update = super().local_update(client, down)
            return replace(update, payload=replace(update.payload, num_examples=3))

    with pytest.raises(RejectedPayload, match="unexpected counts"):
        uploads(Wrong(), [client()])


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_on_the_wire_is_no_fault_of_a_payload(stored: torch.dtype) -> None:
    """Whatever type it stores its numbers in; another number is one."""
    rows = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).to(stored)
    kinds: tuple[wire.WireDtype, ...] = ("float32", "float16", "bfloat16", "int8")
    for dtype in kinds:
        received = Weights(wire.decode_tensors(wire.encode_tensors({"f": rows}, dtype)))
        contract._close(Weights({"f": rows}), received, dtype, "up")
        received.tensors["f"][3] += 1
        with pytest.raises(
            AssertionError, match=f"up: tensor 'w.f' is not the same after wire-dtype={dtype}"
        ):
            contract._close(Weights({"f": rows}), received, dtype, "up")
