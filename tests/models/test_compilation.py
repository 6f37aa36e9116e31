"""torch.compile of a network's body: the same function, the same names, nothing shared with a copy."""

import copy
import shutil

import pytest
import torch
from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models import arrange, begin_batch, build_model, check_compiler, compile_body
from pbfl_flwr.models.compilation import Mode
from pbfl_flwr.task import Task

CPU = torch.device("cpu")
TASK = Task(5, 24, (1, 16, 16))


def gradients(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(inputs).square().sum().backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_body_is_the_same_function(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default backend needs a C++ compiler and a minute; another one shows the same of names and copies."""
    plain, compiled = build_model("cnn2", TASK, 0).eval(), build_model("cnn2", TASK, 0).eval()
    compile_module = nn.Module.compile
    if backend == "inductor":
        check_compiler("default", CPU)
    else:
        monkeypatch.setattr(
            nn.Module,
            "compile",
            lambda self, **how: compile_module(
                self, backend=backend, isolate_recompiles=how["isolate_recompiles"]
            ),
        )
    compile_body(compiled, "default")
    for size in (8, 3):  # whole batches and the last one
        inputs = torch.randn(size, *TASK.input_shape, generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(compiled.features(inputs), plain.features(inputs))
        wanted, found = gradients(plain, inputs), gradients(compiled, inputs)
        assert list(found) == list(wanted)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    # Weights that are copied in are the ones it computes with.
    other = build_model("cnn2", TASK, 1).eval()
    compiled.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled.features(inputs), other.features(inputs))
    # A copy that is trained further leaves the original alone, and the other way round.
    trial = copy.deepcopy(compiled)
    with torch.no_grad():
        for parameter in trial.parameters():
            parameter.zero_()
    assert not trial.features(inputs).any()
    torch.testing.assert_close(compiled.features(inputs), other.features(inputs))


def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, object]] = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **how: seen.append((type(self).__name__, how["mode"]))
    )
    compile_body(build_model("cnn4", TASK, 0), "off")
    assert seen == []
    compile_body(build_model("cnn4", TASK, 0), "default")
    assert seen == [("Sequential", None)] * 3  # two stages and the neck
    seen.clear()
    own = nn.Module()
    own.conv, own.head = nn.Conv2d(1, 2, 3), nn.Linear(24, 5)
    compile_body(own, "reduce-overhead")
    assert seen == [("Conv2d", "reduce-overhead")]


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check_compiler("off", CPU)
    monkeypatch.setenv("CC", "some-compiler")
    check_compiler("default", torch.device("cuda"))
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(PbflError, match="compile = 'default': no C compiler was found"):
        check_compiler("default", torch.device("cuda"))
    with pytest.raises(
        PbflError, match=r"compile = 'default': no C\+\+ compiler 'no-such-compiler' was found"
    ):
        check_compiler("default", CPU)
    monkeypatch.setattr(torch, "compile", lambda model, mode=None: model)
    with pytest.raises(PbflError, match="has no isolate_recompiles; allowed here is 'off'"):
        check_compiler("default", CPU)


def test_an_arranged_network_is_one_graph() -> None:
    """What looks at tensors' numbers while it is traced would break it into pieces, each with its own launches."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    model = arrange(build_model("resnet8", Task(5, 24, (1, 32, 32)), 0), "channels-last").eval()
    inputs = torch.randn(2, 1, 32, 32)
    found = torch.compile(model.features, backend=backend)(inputs)
    torch.testing.assert_close(found, model.features(inputs))
    assert len(graphs) == 1


def test_recordings_of_several_parts_hear_when_a_batch_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    others: list[tuple[Mode, str]] = [
        ("off", "cuda"),
        ("cuda-graph", "cuda"),
        ("default", "cuda"),
        ("reduce-overhead", "cpu"),
    ]
    for mode, device in others:
        begin_batch(mode, torch.device(device))
    assert not begun
    begin_batch("reduce-overhead", torch.device("cuda"))
    assert begun == [1]
