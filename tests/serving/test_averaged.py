"""The server's network, exported: the weights that it averaged, with the clients' running statistics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pbfl_flwr.config import parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client
from pbfl_flwr.methods import METHODS, SECTIONS, build_method
from pbfl_flwr.models.build import build_model
from pbfl_flwr.payloads import part_of
from pbfl_flwr.runs.tensor_files import load_tensors, save_tensors
from pbfl_flwr.serving.averaged import averaged
from pbfl_flwr.serving.export import export
from pbfl_flwr.serving.exported import open_exported
from pbfl_flwr.serving.states import read_state, state_file, states_of
from pbfl_flwr.task import Task
from tests.flower.inprocess import NUM_CLIENTS, Federation, configuration, federation, tiny_client
from tests.small_runs import pbfl

WHOLE = {"fedavg", "fedprox", "fedala", "feduv", "fednh", "fedfa", "fedpa"}


def ran(place: Path, method: str = "fedavg", **keys: Any) -> Federation:
    kept = {"models": "cnn4", "client_states": "always"}
    return federation(place, method, on_disk=True, **{**kept, **keys}).run()


def exported(run: Path, out: Path, *options: str) -> tuple[int, str]:
    result = pbfl("export", run, "--global", "--out", out, *options)
    return result.exit_code, " ".join((result.output + (result.stderr or "")).split())


@pytest.fixture(scope="module")
def kept_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of three rounds without BatchNorm, and one of two rounds with it."""
    place = tmp_path_factory.mktemp("runs")
    plain = ran(place / "cnn4", num_server_rounds=3, learning_rate=0.3)
    return {"cnn4": plain.directory.path, "resnet4": ran(place / "resnet4", models="resnet4").directory.path}


@pytest.fixture
def runs(kept_runs: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Copies of both that a test may change."""
    return {name: shutil.copytree(run, tmp_path / f"{name}-run") for name, run in kept_runs.items()}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_whole_network_is_what_clients_would_be_scored_with(name: str, tmp_path: Path) -> None:
    method = build_method(parse(configuration(tmp_path, name, models="resnet4"), SECTIONS))
    task = Task(10, 64, (1, 16, 16))
    state = method.init(task, 3)
    actual = method.network(state)
    assert bool(actual) == (name in WHOLE)
    if not actual or name == "fedala":  # whose clients take over a part of it only
        return
    client = Client(0, 1, task, build_model("resnet4", task, 99), tiny_client(0))
    method.install(client, method.broadcast(state, 0))
    expected = dict(client.model.named_parameters())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_a_classifier_with_hidden_layers_keeps_its_own_names(tmp_path: Path) -> None:
    """Where only the classifier travels its third layer is head.2, which here is the second one's own name."""
    run = ran(tmp_path, models="cnn4+64-10", num_server_rounds=1).directory.path
    actual, state = averaged(run).weights, part_of(load_tensors(run / "checkpoint.safetensors")[0], "w")
    assert [name for name in actual if name.startswith("head.2")] == ["head.2.weight", "head.2.bias"]
    assert actual.keys() == state.keys()
    assert all(torch.equal(actual[name], state[name]) for name in actual)


def test_buffers_of_own_models_that_have_two_names_or_are_not_kept(tmp_path: Path) -> None:
    own = "tests.methods.tiny_nets:Twice"
    run = ran(tmp_path, models=own, num_server_rounds=1).directory.path
    actual = averaged(run, allowed_code=frozenset({own})).weights
    means = [load_tensors(file)[0]["model.mean"] for file in states_of(run)]
    assert "one" not in actual
    assert len({float(mean) for mean in means}) > 1
    assert min(means) < actual["mean"] < max(means)
    assert torch.equal(actual["mean"], actual["again"])


def test_without_batch_norm_it_scores_as_the_clients_did(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["cnn4"]
    export(averaged(run), tmp_path / "out")
    model = open_exported(tmp_path / "out")
    assert (model.card.client, model.card.round, model.card.architecture) == ("", 3, "cnn4")
    final = json.loads((run / "clients.jsonl").read_text().splitlines()[-1])["final"]
    for client in range(NUM_CLIENTS):
        test = tiny_client(client).test
        guessed = model.probabilities(test.inputs.numpy()).argmax(1)
        assert int((guessed == test.labels).sum()) == final["correct"][final["client"].index(client)]["head"]


def test_running_statistics_are_the_clients_weighted_mean(runs: dict[str, Path]) -> None:
    run = runs["resnet4"]
    weights = averaged(run).weights
    about = json.loads((run / "run.json").read_text())
    files = states_of(run)
    clients = [part_of(load_tensors(file)[0], "model") for file in files]
    names = [name for name in weights if name.endswith(("running_mean", "running_var"))]
    assert names
    samples = [client["num_train"] for client in about["clients"]]
    for counts in (samples, [3, 1, 0, 0, 0]):
        members = [{**client, "num_train": n} for client, n in zip(about["clients"], counts, strict=True)]
        (run / "run.json").write_text(json.dumps({**about, "clients": members}))
        share = torch.tensor([float(n) for n in counts])
        mean = averaged(run).weights
        for name in names:
            stacked = torch.stack([client[name] for client in clients])
            torch.testing.assert_close(mean[name], torch.tensordot(share / share.sum(), stacked, dims=1))
            assert not torch.equal(stacked[0], stacked[2])
    state = part_of(load_tensors(run / "checkpoint.safetensors")[0], "w")
    assert "head.weight" in state
    assert all(torch.equal(weights[name], tensor) for name, tensor in state.items())
    for client, n in zip(about["clients"], [3, 1, 0, 0, 0], strict=True):
        client["num_train"] = n
    (run / "run.json").write_text(json.dumps(about))
    for file in files[:2]:
        file.unlink()
    with pytest.raises(PbflError, match=r"^--global: none of the clients has training samples, so"):
        averaged(run)


def test_the_best_one(runs: dict[str, Path]) -> None:
    run = runs["cnn4"]
    best, about = load_tensors(run / "best.safetensors")
    model = averaged(run, best=True)
    assert model.card.round == int(about["round"])
    assert any(torch.equal(model.weights["head.weight"], tensor) for tensor in best.values())
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    scores = [line["accuracy"]["head"]["weighted"] for line in lines]
    scores.append(lines[-1]["final"]["accuracy"]["head"]["weighted"])
    assert scores.index(max(scores)) == model.card.round  # of equals the first
    save_tensors(run / "best.safetensors", best, {"accuracy": about["accuracy"]})
    with pytest.raises(
        PbflError, match=r"best.safetensors does not hold a server state of method 'fedavg': 'round'$"
    ):
        averaged(run, best=True)


def test_the_command(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["resnet4"]
    code, output = exported(run, tmp_path / "all")
    assert (code, output.split(": ")[0]) == (0, "the server, fedavg, resnet4 after round 2")
    others = [file for file in states_of(run) if file.stem != "client-00003"]
    for file in others:
        file.unlink()
    assert exported(run, tmp_path / "three")[0] == 0
    weights = load_file(tmp_path / "three" / "model.safetensors")
    (left,) = states_of(run)
    client = part_of(load_tensors(left)[0], "model")
    names = [name for name in client if name.endswith("running_mean")]
    assert all(torch.equal(weights[name], client[name]) for name in names)
    every = load_file(tmp_path / "all" / "model.safetensors")
    assert not any(torch.equal(weights[name], every[name]) for name in names)
    left.unlink()
    code, output = exported(run, tmp_path / "none")
    assert code == 2
    assert "holds no client state" in output


@pytest.mark.parametrize("method", ["fedproto", "fedrep"])
def test_a_server_without_a_complete_network_is_one_line(method: str, tmp_path: Path) -> None:
    run = ran(tmp_path, method, num_server_rounds=1).directory.path
    code, output = exported(run, tmp_path / "out")
    assert code == 2
    assert f"--global: the server of '{method}' holds no complete network; export a client's with" in output
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_go_together_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    code, output = exported(runs["cnn4"], tmp_path / "out", "--client", "1")
    assert code == 2
    assert "options beside --global must be" in output
    best = pbfl("export", runs["cnn4"], "--client", 1, "--best", "--out", tmp_path / "out")
    assert best.exit_code == 2
    assert "--best: must be used with --global" in best.stderr
    assert not (tmp_path / "out").exists()


def test_clients_of_another_run_or_with_other_inputs_are_refused(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = runs["cnn4"]
    with pytest.raises(PbflError, match="is not a run directory"):
        averaged(tmp_path)
    file = states_of(run)[3]
    tensors, about = load_tensors(file)
    card = {**json.loads(about["card"]), "shift": [0.25]}
    save_tensors(file, tensors, {**about, "card": json.dumps(card)})
    with pytest.raises(
        PbflError, match=r"^--global: clients 0 and 3 differ in shift; must be the same in all"
    ):
        averaged(run)
    shutil.copy(states_of(runs["resnet4"])[0], states_of(run)[0])
    with pytest.raises(
        PbflError, match=r"client 0 with resnet4 is not one of the run's clients; in the run it has cnn4$"
    ):
        averaged(run)


def test_of_devices_that_ran_on_this_machine(runs: dict[str, Path]) -> None:
    """``pbfl deploy local`` gives every device a state directory below the run's."""
    run = runs["resnet4"]
    expected = averaged(run).weights
    for number, file in enumerate(states_of(run)):
        home = run / "clients" / f"node-{number}" / file.parent.name
        home.mkdir(parents=True)
        file.rename(home / file.name)
    weights = averaged(run).weights
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert read_state(state_file(run, "3")).card.client == "3"
    with pytest.raises(PbflError, match="holds no client 7; it holds the clients 0, 1, 2, 3, 4"):
        state_file(run, "7")
    file = state_file(run / "clients" / "node-2", "")
    shutil.copy(file, run / "clients" / "node-3" / file.parent.name)
    with pytest.raises(PbflError, match=r"client 2 has two states, one is .*node-3.*; remove the older one$"):
        averaged(run)
