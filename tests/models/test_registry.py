"""Names to architectures, architectures to models, and models of other packages."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pbfl_flwr.errors import PbflError
from pbfl_flwr.flower.server.roster import ARCHITECTURE
from pbfl_flwr.models.build import build_model, check_models
from pbfl_flwr.models.contract import body_names, count_parameters, head_names
from pbfl_flwr.models.registry import (
    ARCHITECTURES,
    FAMILIES,
    ModelName,
    architecture_of,
    architectures,
    base_and_sizes,
)
from pbfl_flwr.task import Task
from pbfl_flwr.util.user_code import own_code

TASK = Task(num_classes=10, feature_dim=24, input_shape=(1, 16, 16))


def test_families_consist_of_models_and_names_are_unique() -> None:
    assert {base_and_sizes(name)[0] for family in FAMILIES.values() for name in family} <= set(ARCHITECTURES)
    assert not set(FAMILIES) & set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("small-4", ("cnn4", "resnet4", "resnet6", "resnet8")),
        ("cnn4, mlp,cnn4", ("cnn4", "mlp", "cnn4")),
        ("cnn2,nets.zoo:build", ("cnn2", "nets.zoo:build")),
        ("htfe-txt-5-1,transformer-2-3", (*FAMILIES["htfe-txt-5-1"], "transformer-2-3")),
        ("small-4@x", ("cnn4@x", "resnet4@x", "resnet6@x", "resnet8@x")),
        ("htfe-img-8-htc-img-4@x", ("cnn4@x", "googlenet@x+512")),
    ],
)
def test_clients_take_a_list_in_turn(spec: str, names: tuple[str, ...]) -> None:
    assert architectures(spec)[: len(names)] == names
    count = len(architectures(spec))
    assert [architecture_of(spec, count + client) for client in range(len(names))] == [*names]


@pytest.mark.parametrize(
    ("name", "base", "sizes", "parts"),
    [
        ("resnet8+512-256", "resnet8", (), ("resnet8", "", (512, 256))),
        ("mlp+9", "mlp", (), ("mlp", "", (9,))),
        ("cnn4-512", "cnn4", (512,), ("cnn4-512", "", ())),
        ("mlp-500-20@a.b_c-1+3", "mlp", (500, 20), ("mlp-500-20", "a.b_c-1", (3,))),
        ("efficientnet-b0+1-2-3-4-5-6-7-8", "efficientnet-b0", (), ("efficientnet-b0", "", (1, 2, 3, 4, 5, 6, 7, 8))),
    ],
)  # fmt: skip
def test_parts_of_a_name(name: str, base: str, sizes: tuple[int, ...], parts: tuple[Any, ...]) -> None:
    assert base_and_sizes(name) == (base, sizes)
    assert ModelName.parse(name) == ModelName(*parts)
    assert str(ModelName.parse(name)) == name
    assert ARCHITECTURE.fullmatch(name)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet-8", "unknown model 'resnet-8'; did you mean 'resnet8'? must be one of the families and models"),
        ("HtFE-img-8", "did you mean 'htfe-img-8'?"),
        ("cnn4,,resnet8", "models = 'cnn4,,resnet8': unknown model ''"),
        ("nets.zoo:", "unknown model 'nets.zoo:'"),
        ("../nets:build", "unknown model '../nets:build'"),
        ("cnn2-3", "unknown model 'cnn2-3'"),
        ("cnn4-0", "after 'cnn4' must follow 0 to 1 whole numbers from 1 to 65,536 (width of the hidden layer)"),
        ("cnn4-3-3", "'cnn4-3-3'"),
        ("mlp-", "unknown model 'mlp-'; did you mean 'mlp'?"),
        ("mlp-0", "model 'mlp-0': after 'mlp' must follow 0 to 8 whole numbers from 1 to 65,536"),
        ("mlp-65537", "'mlp-65537'"),
        ("mlp-1-1-1-1-1-1-1-1-1", "0 to 8 whole numbers"),
        ("transformer-8", "2 whole numbers from 1 to 65,536 (heads, layers), e.g. transformer-8-2"),
        ("transformer-8-2-1", "'transformer-8-2-1'"),
        *((f"cnn4+{wrong}", "after '+' must follow 1 to 8 whole numbers from 1 to 65,536")
          for wrong in ("", "0", "032", "32-", "65537", "9" * 5000, "3.5", "32+16", "1-1-1-1-1-1-1-1-1")),
        ("cnn5+32", "unknown model 'cnn5'; did you mean 'cnn4'?"),
        ("cnn5@x", "unknown model 'cnn5'"),
        ("small-4+32", "'small-4' is a family; must be a comma list of models"),
        ("nets.zoo:build+32", "a function of your own must build the classifier itself; must be 'nets.zoo:build'"),
        ("nets.zoo:build@x", "a function of your own must load its weights itself; must be 'nets.zoo:build'"),
        *((wrong, "after '@' must follow a label of 1 to 64 letters")
          for wrong in ("cnn4@", "cnn4@../../etc", "cnn4@a@b", "small-4@")),
    ],
)  # fmt: skip
def test_names_of_no_model_are_refused_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(PbflError) as caught:
        architectures(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_family_is_not_one_model() -> None:
    with pytest.raises(PbflError, match="unknown model 'small-4'"):
        build_model("small-4", TASK, seed=0)


@pytest.mark.parametrize("name", ["cnn4", "resnet8", "efficientnet-b0"])
def test_equal_seeds_give_equal_weights_and_the_global_state_stays(name: str) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = build_model(name, TASK, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(456)
    again = build_model(name, TASK, seed=5).state_dict()
    other = build_model(name, TASK, seed=6).state_dict()

    assert list(first) == list(again)
    assert all(torch.equal(first[key], again[key]) for key in first)
    head = "head.weight" if "head.weight" in first else "head.1.weight"
    body = next(key for key in first if first[key].dim() > 1)
    assert not torch.equal(first[head], other[head])
    assert not torch.equal(first[body], other[body])


EXTERNAL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, task):
        super().__init__()
        self.head = nn.Linear(task.feature_dim, task.num_classes)
        self.hidden = nn.Linear(256, task.feature_dim)
    def features(self, x): return self.hidden(x.flatten(1)).tanh()
def build(task): return Net(task)
def without_features(task): return nn.Sequential(nn.Flatten(), nn.Linear(256, task.num_classes))
def without_head(task):
    net = Net(task)
    del net.head
    return net
def narrow(task):
    net = Net(task)
    net.hidden = nn.Linear(200, task.feature_dim)
    return net
def double(task):
    net = Net(task)
    net.hidden = net.hidden.double()
    return net
def head_is_a_method(task):
    net = nn.Sequential(nn.Flatten())
    net.features, net.head = net.forward, lambda features: features
    return net
def nothing(task): return None
def raises(task): channels, height, width, depth = task.input_shape
def raises_in_torch(task): return nn.Linear("wide", 3)
def raises_later(task):
    net = Net(task)
    net.features = lambda x: net.hiden(x)
    return net
def takes_nothing(): return None
def says(task):
    from pbfl_flwr.errors import PbflError
    raise PbflError("I want colours")
value = 3
def head_of_another(task):
    net = Net(task)
    del net.head
    net.layers = nn.Sequential(net.hidden, nn.Linear(task.feature_dim, task.num_classes))
    net.head = net.layers[1]
    return net
def head_is_a_property(task):
    class Adapter(nn.Module):
        head = property(lambda self: self.fc)
        features = Net.features
    net = Adapter()
    net.hidden, net.fc = nn.Linear(256, task.feature_dim), nn.Linear(task.feature_dim, task.num_classes)
    return net
def head_is_unregistered(task):
    net = Net(task)
    del net.head
    net.__dict__["head"] = nn.Linear(task.feature_dim, task.num_classes)
    return net
def head_in_another(task):
    net = Net(task)
    net.layers = nn.Sequential(net.hidden, net.head)
    return net
"""


@pytest.fixture
def external(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "somebodys_nets.py").write_text(EXTERNAL)
    (tmp_path / "somebodys_broken_nets.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "somebodys_raising_nets.py").write_text("\nraise KeyError('colours')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "somebodys_nets"
    sys.modules.pop("somebodys_nets", None)


def test_external_model_by_module_and_function(external: str) -> None:
    spec = f"cnn4,{external}:build"
    check_models(spec, TASK, [f"{external}:build"])
    check_models(f"{external}:head_in_another", TASK, [f"{external}:head_in_another"])
    name = architecture_of(spec, 1, [f"{external}:build"])
    model = build_model(name, TASK, seed=4)
    again = build_model(name, TASK, seed=4)

    assert torch.equal(model.get_parameter("head.weight"), again.get_parameter("head.weight"))
    assert model.head(model.features(torch.zeros(2, 1, 16, 16))).shape == (2, 10)
    assert head_names(model) == ["head.weight", "head.bias"]
    assert body_names(model) == ["hidden.weight", "hidden.bias"]
    assert count_parameters(model) == (256 * 24 + 24, 24 * 10 + 10)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{}:without_features", r"has no method features\(x\) that returns \(B, 24\)"),
        ("{}:without_head", r"has no submodule head that maps \(B, 24\) to \(B, 10\)"),
        ("{}:head_is_a_method", r"no submodule head .* a method does not count"),
        ("{}:head_of_another", r"a weight of head is named 'layers.1.weight', but methods find"),
        (
            "{}:head_is_a_property",
            r"a weight of head is named 'fc.weight', but methods find the classifier by",
        ),
        (
            "{}:head_is_unregistered",
            r"a weight of head is not registered, but methods find the classifier by",
        ),
        ("{}:nothing", r"nothing \(\w+.py:\d+\) returned None; must return a Module"),
        ("{}:raises", r": raises\(task\) raised ValueError: not enough .* \(somebodys_nets\.py:29\)$"),
        ("{}:raises_in_torch", r": raises_in_torch\(task\) raised TypeError: .* \(somebodys_nets\.py:30\)$"),
        ("{}:raises_later", r"features: raised AttributeError: .*'hiden' \(somebodys_nets\.py:33\)$"),
        (
            "{}:takes_nothing",
            r"takes_nothing\(task\) raised TypeError: .* was given \(somebodys_nets\.py:35\)$",
        ),
        ("{}:double", r"layer hidden, Linear\(.* does not accept input .*dtype"),
        (
            "somebodys_raising_nets:build",
            r"importing .* raised KeyError: 'colours' \(somebodys_raising_nets\.py:2\)$",
        ),
        ("{}:narrow", r"layer hidden, Linear\(in_features=200, .* does not accept input of shape \(2, 256\)"),
        ("{}:misspelt", "'{}' has no function 'misspelt'"),
        ("{}:value", "'{}' has no function 'value'"),
        ("package_that_is_not_there:build", "cannot import 'package_that_is_not_there'"),
        (
            "somebodys_broken_nets:build",
            "cannot import 'somebodys_broken_nets' .*a_package_that_is_not_there",
        ),
    ],
)
def test_rejects_invalid_external_models(external: str, spec: str, message: str) -> None:
    with pytest.raises(PbflError, match=message.replace("{}", external)) as caught:
        check_models(spec.format(external), TASK, [spec.format(external)])
    assert spec.format(external) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_passes_on_what_an_external_model_refuses(external: str) -> None:
    with pytest.raises(PbflError, match=r"^I want colours$"):
        build_model(own_code(f"{external}:says", [f"{external}:says"]), TASK, seed=0)


def test_no_code_is_imported_unless_named(external: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"imported {name}")

    monkeypatch.setattr("importlib.import_module", refuse)
    assert architectures(f"{external}:build") == (f"{external}:build",)
    build_model("cnn4", TASK, seed=0)
    with pytest.raises(PbflError, match=f"AssertionError: imported {external}"):
        build_model(own_code(f"{external}:build", [f"{external}:build"]), TASK, seed=0)


@pytest.mark.parametrize("name", ["cnn4", "resnet4"])
def test_pooling_before_the_relu_gives_the_bits_of_pooling_after_it(name: str) -> None:
    inputs = torch.randn(8, *TASK.input_shape, generator=torch.Generator().manual_seed(2))
    actual: list[list[torch.Tensor]] = []
    for swapped in (False, True):
        model = build_model(name, TASK, seed=0)
        for stage in model.modules() if swapped else ():
            layers = list(stage.children()) if isinstance(stage, nn.Sequential) else []
            if len(layers) > 1 and isinstance(layers[-1], nn.ReLU) and isinstance(layers[-2], nn.MaxPool2d):
                assert isinstance(stage, nn.Sequential)
                stage[-2], stage[-1] = layers[-1], layers[-2]
        kinds = [type(module) for module in model.modules()]
        assert (kinds.index(nn.MaxPool2d) > kinds.index(nn.ReLU)) == swapped
        features = model.features(inputs)
        model.head(features).square().sum().backward()
        actual.append([features, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(*pair) for pair in zip(*actual, strict=True))


def test_the_page_of_models_names_every_family_with_its_networks_and_every_model() -> None:
    families = {first.strip("`"): second for first, second, _ in rows_of_the_page("Families")}
    assert families == {name: ", ".join(members) for name, members in FAMILIES.items()}
    models = [
        row[0] for title in ("Images", "Sensor windows", "Tables", "Text") for row in rows_of_the_page(title)
    ]
    assert sorted(name.strip(" `") for cell in models for name in cell.split(",")) == sorted(ARCHITECTURES)


def test_the_page_of_models_counts_the_bodies_parameters() -> None:
    task = Task(num_classes=10, feature_dim=512, input_shape=(3, 32, 32))
    rows = rows_of_the_page("Images")
    assert len(rows) > 10
    for name, _, counted in rows:
        with torch.device("meta"):
            model = build_model(name.strip("`"), task, seed=0)
        assert (name, counted) == (name, f"{count_parameters(model)[0]:,}")


def rows_of_the_page(title: str) -> list[list[str]]:
    """Return the rows of a section's table, without their heads."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
