"""What every method must do, as functions that raise AssertionError.

Two rounds are run in one process with five clients of two architectures (of one, where the method needs that): one
client has a single class, one a single training sample, a class is tested that nobody holds. Then clients come as they
are in the field: without samples, with one, with one class, late, away for rounds.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pbfl_flwr import calls, seeds
from pbfl_flwr.config import Scalar, Settings, key_of, parse
from pbfl_flwr.data import ClientData
from pbfl_flwr.flower.client import app as client_module
from pbfl_flwr.flower.client.app import make_client_app
from pbfl_flwr.flower.client.worker import Worker
from pbfl_flwr.flower.engines.local import federate_app
from pbfl_flwr.flower.messages import wire
from pbfl_flwr.flower.server.strategy import MethodStrategy
from pbfl_flwr.method import Client, Method, Predictor, Round, Update, WithInputs
from pbfl_flwr.methods import SECTIONS, build_method
from pbfl_flwr.payloads import Payload, RejectedPayload, separate
from pbfl_flwr.runs.tensor_files import load_tensors, save_tensors
from pbfl_flwr.task import Task
from pbfl_flwr.testing.clients import SPLITS, TASK, client, rebuilt, tiny_client
from pbfl_flwr.training.evaluation import Scores, evaluate

NUM_CLIENTS = len(SPLITS)
# The largest relative error of a rounded number: half a unit in the last of 11 and of 8 binary digits.
RELATIVE = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134}  # half the distance of the numbers around zero

# Batches of 4 leave 1 sample over; client 3 begins in round 7, and in round 8 only client 2 is there.
LABELS = {0: (0, 0, 1, 1, 2, 2, 0, 1, 1), 1: (3,), 2: (), 3: (2, 2, 2, 2, 2)}
PRESENT = {1: (0, 2), 2: (1, 2), 7: (0, 1, 3), 8: (2,)}
RESTORED = "with a state restored from its tensors, as on resuming, "


def check_method(method: str, **keys: Scalar) -> None:
    """Check that a method does what every method must do; takes seconds. Global random states are restored.

    Args:
        method: ``my_package.module:build``, or a name in METHODS.
        keys: of the run configuration, with underscores, e.g. ``method_settings="alpha=0.2"``, or of an app,
            ``**{"app.noise": 0.1}``; ``models`` is one architecture, of all clients.

    Raises:
        AssertionError: at the first thing that it does not do, in one line.
        PbflError: if it cannot be built or run, e.g. since a function of it returns something else than it must, or a
            predictor changes what it reads.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with seeds.restored(gpus), TemporaryDirectory() as place:
        seen = played(method, Path(place), **keys)
        for number, check in enumerate(CHECKS):
            check(seen, Path(place) / str(number))
        again = played(method, Path(place) / "again", **keys)
        assert fingerprint(again.strategy) == fingerprint(seen.strategy), "the same seed gave other results"
        for _ in awkward_clients(method, **keys):
            pass


# A run ------------------------------------------------------------------------------------------------------


@dataclass
class Aggregation:
    """One call of a method's aggregate, with copies of what went in and of what was there afterwards."""

    state: Any
    uploads: dict[int, Payload]
    round_info: Round
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    result: Any


class Recorder(MethodStrategy):
    """Keeps what goes through ``aggregate_fit``."""

    def aggregate_fit(self, server_round: int, uploads: Mapping[int, Payload]) -> Any:
        """Aggregate, and keep what went in and came out."""
        state, before = self.state, copies({"state": self.state, "uploads": uploads})
        result = super().aggregate_fit(server_round, uploads)
        assert self.task is not None
        round_info = Round(server_round, self.task, self.settings.run.num_clients, self.settings.run.seed)
        after = copies({"state": state, "uploads": uploads})
        seen = Aggregation(state, dict(uploads), round_info, before, after, result)
        self.__dict__.setdefault("aggregations", []).append(seen)
        return result


@dataclass
class Played:
    """A finished run and what was seen in it.

    Attributes:
        strategy: a :class:`Recorder` that has run.
        scored: client, predictor, number B of samples and scores (B, K) of every batch.
        broadcasts: each with a copy of its tensors when it came.
        data: of the clients, likewise.
    """

    strategy: MethodStrategy
    scored: list[tuple[int, str, int, Tensor]] = field(default_factory=list)
    broadcasts: list[tuple[Payload, dict[str, Tensor]]] = field(default_factory=list)
    data: list[tuple[ClientData, dict[str, Tensor]]] = field(default_factory=list)

    @property
    def method(self) -> Method[Any, Any, Any]:
        """The method."""
        return self.strategy.method

    @property
    def aggregations(self) -> list[Aggregation]:
        """What the server did in each round."""
        actual: list[Aggregation] = self.strategy.__dict__["aggregations"]
        return actual

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context keep what clients are sent, what data they have, and how they score."""

        def watching(one: Client, predictors: Mapping[str, Predictor], predicts: tuple[str, ...]) -> Scores:
            def watched(name: str, predictor: Predictor) -> Predictor:
                def scores(*read: Tensor) -> Tensor:
                    actual: Tensor = predictor(*read)
                    self.scored.append((one.id, name, len(read[0]), actual))
                    return actual

                return WithInputs(scores) if isinstance(predictor, WithInputs) else scores

            return evaluate(one, {name: watched(name, p) for name, p in predictors.items()}, predicts)

        def decoded(*arguments: Any) -> Payload:
            down: Payload = broadcast(*arguments)
            self.broadcasts.append((down, copies(down)))
            return down

        def opened(*arguments: Any) -> ClientData:
            data = on(*arguments)
            self.data.append((data, copies(data)))
            return data

        broadcast, on = Worker.broadcast, ClientData.on
        with (
            patch.object(client_module, "evaluate", watching),
            patch.object(Worker, "broadcast", decoded),
            patch.object(ClientData, "on", opened),
        ):
            yield


def needs_one_architecture(method: str, own: Mapping[str, Scalar] | None = None) -> bool:
    """Return whether a method, with keys of its own, refuses clients with different networks."""
    one: dict[str, Scalar] = {"method": method, "models": "resnet4", "feature-dim": 64}
    return build_method(parse({**one, **(own or {})}, SECTIONS)).same_architecture


def configuration(method: str, **keys: Scalar) -> dict[str, Scalar]:
    """Return the run configuration of a tiny run: five clients, cnn4 and resnet4, d = 64, two short rounds."""
    own = {key_of(keyword): value for keyword, value in keys.items()}
    base: dict[str, Scalar] = {
        "method": method,
        "num-clients": NUM_CLIENTS,
        "num-server-rounds": 2,
        "feature-dim": 64,
        "batch-size": 8,
    }
    if "models" not in own:
        base["models"] = "resnet4" if needs_one_architecture(method, own) else "cnn4,resnet4"
    return {**base, **own}


def played(method: str, directory: Path, **keys: Scalar) -> Played:
    """Return a tiny run of a method, whose clients keep their states in the directory."""

    def data(settings: Settings, number: int) -> ClientData:
        return tiny_client(number)

    config = configuration(method, **{**keys, "state_dir": str(directory.absolute())})
    seen = Played(Recorder(parse(config, SECTIONS)))
    with seen.watching():
        federate_app(seen.strategy, make_client_app(data, seen.strategy.settings))
    return seen


def fingerprint(strategy: MethodStrategy) -> str:
    """Return a hash of the server's state and of every client's counters: equal bits, equal fingerprint."""
    digest = hashlib.sha256()
    for name, tensor in sorted(strategy.state.to_tensors().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for line in strategy.history:
        digest.update(repr((line.accuracy, line.test_loss, line.client_metrics, line.scalars)).encode())
    return digest.hexdigest()


# What must hold ---------------------------------------------------------------------------------------------


def every_client_takes_part_in_every_round(seen: Played, directory: Path) -> None:
    """Nobody fails, and everybody is scored."""
    for line in seen.strategy.history:
        for failure in line.failures:
            raise AssertionError(f"round {line.round}: client {failure.label} failed: {failure.reason}")
        assert line.trained == list(range(NUM_CLIENTS)), f"round {line.round}: only {line.trained} trained"
        for name, value in line.client_metrics.items():
            assert value is not None, f"round {line.round}: the metric '{name}' of the clients is not finite"
        assert line.accuracy, "no predictor was scored"


def clients_do_not_change_the_broadcast_that_they_share(seen: Played, directory: Path) -> None:
    """Other clients of a process get the same tensors."""
    assert len(seen.broadcasts) >= 2 * NUM_CLIENTS
    for down, before in seen.broadcasts:
        changed = unlike(copies(down), before)
        assert not changed, f"a client changes the broadcast, which others get, too: down{changed[0]}"


def clients_do_not_change_their_data(seen: Played, directory: Path) -> None:
    """A process may read them once for all rounds, or for every message."""
    for data, before in seen.data:
        for name, tensor in copies(data).items():
            assert torch.equal(tensor, before[name]), (
                f"client.data{name} is changed; only client.model may be"
            )


def scores_are_finite_and_of_shape_b_by_k(seen: Played, directory: Path) -> None:
    """For every predictor that the method names, and no other."""
    scored, predicts, primary = seen.scored, seen.method.predicts, seen.strategy.primary_predictor
    missing = set(range(NUM_CLIENTS)) - {number for number, *_ in scored}
    assert not missing, f"no predictor scored the clients {sorted(missing)}"
    for _, name, samples, scores in scored:
        assert name in predicts, f"predictors() has '{name}', which predicts has not: {predicts}"
        expected = (samples, 10)
        assert scores.shape == expected, (
            f"predictor '{name}' returns {tuple(scores.shape)}, must be (B, K) = {expected}"
        )
        assert torch.isfinite(scores).all(), f"predictor '{name}' gives scores that are not finite"
    assert primary in predicts, f"the primary predictor '{primary}' is not in predicts: {predicts}"
    assert primary in seen.strategy.history[-1].accuracy, (
        f"the primary predictor '{primary}' is not among predictors() in the last round"
    )


def payloads_cross_the_wire(seen: Played, directory: Path) -> None:
    """In every number format, with its rounding and no other change."""
    last = seen.aggregations[-1]
    task = last.round_info.task
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        for number, upload in last.uploads.items():
            back = wire.decode(wire.encode(upload, dtype), seen.method.up, task)
            _validate(seen.method, back, last.state, task)
            assert back.scalars() == upload.scalars(), (
                f"scalars() of an upload are {upload.scalars()} before and {back.scalars()} after its way"
            )
            _close(upload, back, dtype, f"up {number}")
            with _unchanged("broadcast()", state=last.result):
                down = seen.method.broadcast(last.result, number)
            _close(down, wire.decode(wire.encode(down, dtype), seen.method.down, task), dtype, "down")


def _validate(method: Method[Any, Any, Any], upload: Payload, state: Any, task: Task) -> None:
    with _unchanged("validate()", upload=upload, state=state):
        method.validate(upload, state, task)


@contextmanager
def _unchanged(what: str, **given: Any) -> Iterator[None]:
    before = copies(given)
    yield
    changed = unlike(copies(given), before)
    assert not changed, f"{what} changes what it is given: {changed[0].removeprefix('.')}"


def _close(sent: Payload, received: Payload, dtype: str, what: str) -> None:
    ours, theirs = sent.to_tensors(), received.to_tensors()
    odd = ours.keys() ^ theirs.keys()
    assert not odd, f"{what}: to_tensors() does not give the same names after from_tensors(): {sorted(odd)}"
    for name, tensor in ours.items():
        fault = f"{what}: tensor '{name}' is not the same after wire-dtype={dtype}"
        assert theirs[name].shape == tensor.shape, fault
        if not tensor.is_floating_point():
            assert torch.equal(theirs[name], tensor), fault
            continue
        own = torch.finfo(tensor.dtype).eps if tensor.dtype in (torch.float16, torch.bfloat16) else 0.0
        tensor = tensor.to(torch.float64)
        allowed = tensor.abs() * RELATIVE.get(dtype, 0.0) + SMALLEST.get(dtype, 0.0)
        if dtype == "int8" and tensor.dim() >= 2 and len(tensor):
            # Half a step of the row's largest entry / 127, float32's own rounding, and that of the payload's own type.
            row = tensor.flatten(1).abs().amax(dim=1) / 254 * (1 + 1e-5)
            allowed = row.reshape(-1, *[1] * (tensor.dim() - 1)) + own * tensor.abs()
        assert bool(((theirs[name] - tensor).abs() <= allowed).all()), fault


def aggregate_leaves_its_input_alone(seen: Played, directory: Path) -> None:
    """Neither the call nor the next round changes the old state or the uploads."""
    for aggregation in seen.aggregations:
        now = copies({"state": aggregation.state, "uploads": aggregation.uploads})
        for when, found in (("", aggregation.after), (" in a later round", now)):
            changed = unlike(found, aggregation.before)
            assert not changed, f"aggregate() changes what it is given{when}: {changed[0].removeprefix('.')}"


def aggregate_is_a_function_of_its_input(seen: Played, directory: Path) -> None:
    """Nothing hangs on the global generator."""
    last = seen.aggregations[-1]
    torch.manual_seed(12345)
    again = seen.method.aggregate(copy.deepcopy(last.state), copy.deepcopy(last.uploads), last.round_info)
    other = unlike(tensors_in(again), tensors_in(last.result))
    assert not other, (
        f"aggregate() gives another state{other[0]} of the same input: it draws from a global generator, or keeps "
        "something from call to call"
    )


def a_checkpoint_continues_with_the_same_bits(seen: Played, directory: Path) -> None:
    """Whatever the state is, its tensors are all of it."""
    method, task = seen.method, seen.aggregations[0].round_info.task
    run = seen.strategy.settings.run
    fresh, rounds = method.init(task, run.seed), run.num_server_rounds
    for state in (fresh, *(aggregation.result for aggregation in seen.aggregations)):
        restored = method.state.from_tensors(_through_a_file(state, directory), task)
        lost = unlike(restored.to_tensors(), state.to_tensors())
        assert not lost, f"the state loses its tensor '{lost[0]}' in from_tensors(state.to_tensors())"
        for number in range(NUM_CLIENTS):
            down = method.broadcast(restored, number).to_tensors()
            lost = unlike(down, method.broadcast(state, number).to_tensors())
            assert not lost, f"{RESTORED}broadcast() gives another '{lost[0]}'"
        with _unchanged("report()", state=state):
            after, before = method.report(restored), method.report(state)
        assert after.keys() == before.keys(), f"{RESTORED}report() has other names"
        for name in before:
            assert math.isclose(after[name], before[name], rel_tol=1e-6, abs_tol=1e-12) or (
                math.isnan(after[name]) and math.isnan(before[name])
            ), f"{RESTORED}report() has another '{name}'"
        before_round, after_round = method.warnings(rounds, state), method.warnings(rounds, restored)
        assert before_round == after_round, f"{RESTORED}warnings() gives other lines"
        calls.as_state(method, method.resumed(restored), method.resumed, task)
    last = seen.aggregations[-1]
    restored = method.state.from_tensors(_through_a_file(last.state, directory), task)
    went_on = method.aggregate(restored, last.uploads, last.round_info)
    lost = unlike(went_on.to_tensors(), last.result.to_tensors())
    assert not lost, f"{RESTORED}aggregate() gives another '{lost[0]}'"


def _through_a_file(state: Payload, directory: Path) -> dict[str, Tensor]:
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(directory / "state.safetensors", state.to_tensors(), {})
    return load_tensors(directory / "state.safetensors")[0]


def no_upload_crashes_the_server(seen: Played, directory: Path) -> None:
    """Mutated uploads are rejected or harmless; nothing but RejectedPayload comes out, no NaN goes in."""
    rng = random.Random(seen.strategy.settings.run.method)
    last, method = seen.aggregations[-1], seen.method
    victim = max(last.uploads, key=lambda number: last.uploads[number].scalars())
    tensors = last.uploads[victim].to_tensors()
    aggregated = 0
    for _ in range(120):
        mutant = _mutated(tensors, rng)
        try:
            upload = method.up.from_tensors(mutant, last.round_info.task)
            method.validate(upload, last.state, last.round_info.task)
            upload.scalars()
        except RejectedPayload:
            continue
        for name, tensor in upload.to_tensors().items():
            assert torch.isfinite(tensor).all(), (
                f"from_tensors() and validate() accept NaN or infinity in '{name}'"
            )
        if aggregated < 6:
            aggregated += 1
            try:
                state = method.aggregate(last.state, {**last.uploads, victim: upload}, last.round_info)
                method.report(state)
                method.broadcast(state, 0).scalars()
            except Exception as error:
                both = tensors.keys() & mutant.keys()
                changed = unlike(
                    {name: tensors[name] for name in both}, {name: mutant[name] for name in both}
                )
                what = ", ".join([*changed, *(tensors.keys() ^ mutant.keys())])
                raise AssertionError(
                    f"validate() accepts an upload with another '{what}', at which the server raises {error!r}"
                ) from error


def _mutated(tensors: Mapping[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    mutant = {name: tensor.clone() for name, tensor in tensors.items()}
    kind = rng.choice(["drop", "add", "value", "value", "shape", "dtype", "rows", "empty"])
    if not mutant or kind == "add":
        return {**mutant, "something": torch.ones(3)}
    name = rng.choice(sorted(mutant))
    tensor = mutant[name]
    if kind == "drop":
        del mutant[name]
    elif kind == "value" and tensor.numel():
        flat = tensor.flatten()
        where = rng.randrange(flat.numel())
        if tensor.is_floating_point():
            flat[where] = rng.choice([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, -1.0, 9e7])
        else:
            flat[where] = rng.choice([0, 1, 255 if tensor.dtype is torch.uint8 else -1, int(flat[0])])
        mutant[name] = flat.reshape(tensor.shape)
    elif kind == "shape":
        mutant[name] = rng.choice([tensor[None], tensor.flatten(), tensor.flatten()[:1].reshape(())])
    elif kind == "dtype":
        wanted = [torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
        mutant[name] = tensor.to(torch.float32).to(rng.choice(wanted))
    elif kind == "rows" and tensor.dim():
        mutant[name] = rng.choice([tensor[:-1], torch.cat([tensor, tensor[:1]])])
    elif kind == "empty":
        mutant[name] = tensor[:0] if tensor.dim() else torch.zeros(0)
    return mutant


CHECKS: tuple[Callable[[Played, Path], None], ...] = (
    every_client_takes_part_in_every_round,
    clients_do_not_change_the_broadcast_that_they_share,
    clients_do_not_change_their_data,
    scores_are_finite_and_of_shape_b_by_k,
    payloads_cross_the_wire,
    aggregate_leaves_its_input_alone,
    aggregate_is_a_function_of_its_input,
    a_checkpoint_continues_with_the_same_bits,
    no_upload_crashes_the_server,
)


def awkward_clients(method: str, **keys: Scalar) -> Iterator[tuple[int, Update[Any]]]:
    """Let clients come as they are in the field; yield each update with its number of training samples.

    No Flower here: the method's two halves, with every payload and state rebuilt from its tensors as the wire and the
    disk do.

    Args:
        method: as in :func:`check_method`.
        keys: of the run configuration, with underscores, or whole: ``**{"gfpl.start": 1}``; ``models`` is the
            architecture of all clients, by default cnn4.
    """
    own = {key_of(keyword): value for keyword, value in keys.items()}
    base: dict[str, Scalar] = {"feature-dim": 64, "batch-size": 4, "models": "cnn4"}
    config = {"method": method, **base, **own}
    settings = parse(config, SECTIONS)
    built = build_method(settings)
    architecture = str(config["models"])
    task = replace(TASK, feature_dim=settings.models.feature_dim)
    state = calls.first_state(built, task, 0)
    memories: dict[int, Any] = {}
    networks: dict[int, Any] = {}
    for number, present in PRESENT.items():
        uploads = {}
        for i, labels in LABELS.items():
            made = client(
                labels, id=i, architecture=architecture, round=number, memory=memories.get(i), task=task
            )
            one = replace(made, training=settings.training, evaluation=settings.evaluation)
            if i in networks:
                one.model.load_state_dict(networks[i])
            before = copy.deepcopy(one.model.state_dict())
            down = rebuilt(calls.broadcast(built, state, i, task), task)
            built.install(one, down)
            found = calls.predictors(built, one, down)
            evaluate(one, found, built.predicts)  # raises at scores that are not finite
            one.model.load_state_dict(before)
            if i not in present:
                continue
            update = calls.local_update(built, one, down)
            yield len(labels), update
            uploads[i] = rebuilt(update.payload, task)
            _validate(built, uploads[i], state, task)
            _check_finite(uploads[i], f"client {i}'s upload in round {number}")
            memories[i], networks[i] = separate(update.memory), one.model.state_dict()
        round_info = Round(number, task, len(LABELS))
        # A checkpoint has tensors in the order of their names, a state may have them in that of the clients' coming.
        restored = type(state).from_tensors(dict(sorted(state.to_tensors().items())), task)
        state = calls.as_state(built, built.aggregate(state, uploads, round_info), built.aggregate, task)
        went_on = built.aggregate(restored, uploads, round_info)
        lost = unlike(went_on.to_tensors(), state.to_tensors())
        assert not lost, f"{RESTORED}aggregate() gives another '{lost[0]}', with other clients in every round"
        _check_finite(state, f"the server's state after round {number}")


def _check_finite(payload: Any, what: str) -> None:
    for name, tensor in payload.to_tensors().items():
        finite = not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
        assert finite, f"{what}: '{name}' holds numbers that are not finite"


# Tensors ----------------------------------------------------------------------------------------------------


def tensors_in(thing: Any, name: str = "") -> dict[str, Tensor]:
    """Return every tensor within dataclasses, mappings and sequences, by path."""
    if isinstance(thing, Tensor):
        return {name: thing}
    inner: Sequence[tuple[str, Any]]
    if is_dataclass(thing) and not isinstance(thing, type):
        inner = [(one.name, getattr(thing, one.name)) for one in fields(thing)]
    elif isinstance(thing, Mapping):
        inner = [(str(key), value) for key, value in thing.items()]
    elif isinstance(thing, (list, tuple)):
        inner = [(str(index), value) for index, value in enumerate(thing)]
    else:
        return {}
    result: dict[str, Tensor] = {}
    for key, value in inner:
        result |= tensors_in(value, f"{name}.{key}")
    return result


def copies(thing: Any) -> dict[str, Tensor]:
    """Return copies of every tensor within something, by path."""
    return {name: tensor.detach().clone() for name, tensor in tensors_in(thing).items()}


def same_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether names, dtypes, shapes and bits agree."""
    return not unlike(left, right)


def unlike(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Return the names that only one of them has, or whose dtypes, shapes or bits differ, ascending."""
    both = left.keys() & right.keys()
    differ = {
        name
        for name in both
        if left[name].dtype != right[name].dtype
        or left[name].shape != right[name].shape
        or not torch.equal(left[name], right[name])
    }
    return sorted(differ | (left.keys() ^ right.keys()))
