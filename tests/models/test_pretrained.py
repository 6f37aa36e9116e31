"""Weights that somebody kept under a label: bodies begin with them, as the network that they come from goes on."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models.vision_transformer import interpolate_embeddings

from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.checkpoints import COUNTER, OF_TORCHVISION, as_file, body_of
from pbfl_flwr.models.contract import HEAD_PREFIX, SplitModel
from pbfl_flwr.models.pretrained import digest
from pbfl_flwr.task import Task
from pbfl_flwr.testing.contract import same_tensors
from pbfl_flwr.util.paths import weights_file
from tests.small_runs import pbfl

SMALL = Task(3, 16, (3, 32, 32))
ALIKE = ("resnet34", "resnet101", "resnet152", "vit-b-16")  # made by the functions that make the others


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the weights of each test apart."""
    monkeypatch.setenv("PBFL_HOME", str(tmp_path / "home"))


def theirs(architecture: str) -> nn.Module:
    """Return torchvision's network with statistics of its own, as training would leave it."""
    name = OF_TORCHVISION[architecture]
    more = {"aux_logits": True, "init_weights": False} if name == "googlenet" else {}
    torch.manual_seed(3)
    net: nn.Module = getattr(torchvision.models, name)(weights=None, **more)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return net.eval()


def without_classifier(net: nn.Module) -> nn.Module:
    for name in ("fc", "classifier", "heads"):
        if hasattr(net, name):
            setattr(net, name, nn.Identity())
    return net


def kept(name: str, label: str, model: nn.Module | dict[str, Tensor]) -> Path:
    """Keep the body of a network of this project under a label."""
    tensors = model.state_dict() if isinstance(model, nn.Module) else model
    file = weights_file(name, label)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(as_file(body(tensors)))
    return file


def body(model: SplitModel | dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = model.state_dict() if isinstance(model, nn.Module) else model
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD_PREFIX)}


@pytest.mark.parametrize("architecture", ALIKE)
def test_every_tensor_of_torchvisions_network_has_its_place(architecture: str) -> None:
    with torch.device("meta"):
        net = getattr(torchvision.models, OF_TORCHVISION[architecture])()
        ours = build_model(architecture, Task(7, 64, (3, 224, 224)), 0)
        taken = body_of(architecture, net.state_dict(), "torchvision's")
    assert {name: t.shape for name, t in taken.items()} == {name: t.shape for name, t in body(ours).items()}


@pytest.mark.parametrize("architecture", [name for name in OF_TORCHVISION if name not in ALIKE])
def test_the_body_gives_the_features_of_torchvisions_network(architecture: str) -> None:
    net, side = theirs(architecture), 224 if architecture.startswith("vit") else 64
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    taken = body_of(architecture, net.state_dict(), "torchvision's")
    with torch.no_grad():
        expected = without_classifier(net)(images)
        ours = build_model(architecture, Task(7, expected.shape[1], (3, side, side)), 0)
        lacking, strange = ours.load_state_dict(taken, strict=False)
        result = ours.eval().features(images)
    assert not strange
    assert all(name.startswith(HEAD_PREFIX) for name in lacking)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_a_model_with_a_label_begins_with_the_kept_body_and_a_classifier_of_its_seed() -> None:
    trained = build_model("resnet4", SMALL, 5)
    kept("resnet4", "mine", trained)
    wider = Task(9, 24, (3, 48, 48))  # other classes, other width, other images
    begun, random = build_model("resnet4@mine", wider, 1), build_model("resnet4", wider, 1)
    assert same_tensors(body(begun), body(trained))
    assert not same_tensors(body(begun), body(random))
    assert torch.equal(begun.get_parameter("head.weight"), random.get_parameter("head.weight"))
    assert same_tensors(body(build_model("resnet4@mine", wider, 2)), body(trained))
    deeper = build_model("resnet4@mine+32", wider, 1)
    assert same_tensors(body(deeper), body(trained))
    assert deeper.get_parameter("head.0.weight").shape == (32, 24)


def test_one_channel_is_seen_as_the_gray_image_in_all_three() -> None:
    kept("resnet4", "colour", build_model("resnet4", SMALL, 5))
    gray = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    one = build_model("resnet4@colour", Task(3, 16, (1, 32, 32)), 0).eval()
    three = build_model("resnet4@colour", SMALL, 0).eval()
    with torch.no_grad():
        torch.testing.assert_close(one.features(gray), three.features(gray.expand(-1, 3, -1, -1)))


def test_places_of_patches_are_interpolated_as_torchvision_does_it() -> None:
    net = theirs("vit-b-16")
    kept("vit-b-16", "tv", body_of("vit-b-16", net.state_dict(), "torchvision's"))
    begun = build_model("vit-b-16@tv", Task(3, 768, (3, 48, 48)), 0)
    expected = interpolate_embeddings(48, 16, dict(net.state_dict()))["encoder.pos_embedding"]
    assert expected.shape == (1, 10, 768)
    assert torch.equal(begun.state_dict()["neck.encoder.pos_embedding"], expected)


@pytest.mark.parametrize("architecture", ["mlp-20-10", "har-gru", "textcnn", "transformer-3-1", "cnn4"])
def test_models_of_every_input_begin_with_a_kept_body(architecture: str) -> None:
    kind = {"har-gru": Task(2, 12, (9, 64)), "textcnn": Task(2, 12, (16,), 30)}
    task = kind.get(architecture, Task(2, 12, (16,), 30) if "transformer" in architecture else SMALL)
    trained = build_model(architecture, task, 4)
    kept(architecture, "mine", trained)
    assert same_tensors(body(build_model(f"{architecture}@mine", task, 0)), body(trained))


def test_the_digest_is_of_the_weights_and_of_nothing_where_there_are_none() -> None:
    trained = build_model("resnet4", SMALL, 1)
    kept("resnet4", "a", trained)
    kept("resnet4", "b", build_model("resnet4", SMALL, 2))
    kept("resnet4", "c", {**trained.state_dict(), "head.bias": torch.ones(3)})
    assert digest("resnet4") == "" == digest("my.nets:small")
    assert len(digest("resnet4@a")) == 16
    assert digest("resnet4@a") == digest("resnet4@c+8") != digest("resnet4@b")
    before = digest("resnet4@a")
    kept("resnet4", "a", build_model("resnet4", SMALL, 3))
    assert digest("resnet4@a") != before


def test_weights_that_are_missing_or_do_not_fit_are_one_line() -> None:
    with pytest.raises(
        PbflError, match=r"no weights of cnn4 under the label 'x' .* none are stored for it here"
    ):
        build_model("cnn4@x", SMALL, 0)
    file = kept("cnn4", "y", build_model("cnn4", SMALL, 0))
    kept("resnet4", "gray", build_model("resnet4", Task(3, 16, (1, 32, 32)), 0))
    with pytest.raises(PbflError, match="stored for it here: y; 'pbfl weights' stores those of"):
        digest("cnn4@x")
    with pytest.raises(PbflError, match=r"have shape 16x1600 in 'neck.*weight', this run needs 24x1600"):
        build_model("cnn4@y", Task(3, 24, (3, 32, 32)), 0)
    with pytest.raises(
        PbflError, match=r"have shape 64x1x7x7 in 'stages.0.0.weight', this run needs 64x3x7x7"
    ):
        build_model("resnet4@gray", SMALL, 0)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(PbflError, match=r"is damaged .*; store the weights again"):
        build_model("cnn4@y", SMALL, 0)
    save_file(build_model("resnet4", SMALL, 0).state_dict(), file)
    with pytest.raises(PbflError, match=r"belongs to another network: it (lacks|also has)"):
        build_model("cnn4@y", SMALL, 0)


# What pbfl weights takes ------------------------------------------------------------------------------------------


def saved(content: object, path: Path) -> Path:
    torch.save(content, path)
    return path


def test_the_command_keeps_lists_and_replaces(tmp_path: Path) -> None:
    assert (none := pbfl("list", "weights")).exit_code == 0
    assert "no pretrained weights in" in none.stdout
    net = theirs("resnet18")
    first = saved({"state_dict": {f"module.{n}": t for n, t in net.state_dict().items()}}, tmp_path / "a.pth")
    done = pbfl("weights", "imagenet", "resnet18", first)
    assert done.exit_code == 0, done.stderr
    assert "use them with models=resnet18@imagenet" in " ".join(done.stdout.split())
    file = weights_file("resnet18", "imagenet")
    assert torch.equal(load_file(file)["stages.0.0.weight"], net.get_parameter("conv1.weight"))
    assert "resnet18@imagenet" in pbfl("list", "weights").stdout
    before = file.read_bytes()
    with torch.no_grad():
        net.get_parameter("conv1.weight").zero_()
    other = saved(net.state_dict(), tmp_path / "b.pt")
    refused = pbfl("weights", "imagenet", "resnet18", other)
    assert refused.exit_code == 2
    assert "--replace" in refused.stderr
    assert file.read_bytes() == before
    assert pbfl("weights", "imagenet", "resnet18", other, "--replace").exit_code == 0
    assert not load_file(file)["stages.0.0.weight"].any()
    save_file(net.state_dict(), tmp_path / "c.safetensors")
    assert pbfl("weights", "mine", "resnet18", tmp_path / "c.safetensors").exit_code == 0
    assert same_tensors(load_file(weights_file("resnet18", "mine")), load_file(file))
    refused = pbfl("weights", "none", "resnet18", tmp_path)
    assert "cannot be read (Is a directory)" in " ".join(refused.stderr.split())


def test_half_precision_is_kept_as_float32(tmp_path: Path) -> None:
    half = theirs("resnet18").half().state_dict()
    (tmp_path / "x.safetensors").write_bytes(as_file(body_of("resnet18", half, "x")))
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "x.safetensors").values()}
    assert dtypes == {torch.float32, torch.int64}


class Harmful:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harm"),))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": torch.zeros(2)}, "must be weights of torchvision's resnet18; it lacks"),
        *((content, "holds no named tensors") for content in ({"epoch": 3}, [torch.zeros(2)], {})),
        (Harmful(), "holds no weights that can be loaded without executing code"),
        (b"12345678 and more", "holds no weights that can be loaded"),  # as safetensors
        (b"\x80\x02X\x05", "holds no weights that can be loaded"),
        (b"PK\x03\x04" + bytes(60), "holds no weights that can be loaded"),
    ],
)  # fmt: skip
def test_files_that_hold_something_else(
    content: object, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / ("x.safetensors" if content == b"12345678 and more" else "x.pth")
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        saved(content, file)
    refused = pbfl("weights", "x", "resnet18", file)
    assert refused.exit_code == 2
    assert text in " ".join(refused.stderr.split())
    assert not (tmp_path / "harm").exists()
    assert not weights_file("resnet18", "x").exists()


@pytest.mark.parametrize(
    ("name", "of", "more", "message"),
    [
        ("resnet18", "theirs", {"layer1.0.bn3.bias": (3,)}, "torchvision's resnet18 has no 'layer1.0.bn3.bias'"),
        ("resnet18", "theirs", {"conv1.weight": (64, 1, 7, 7)}, "has shape (64, 1, 7, 7), in torchvision's resnet18"),
        ("resnet18", "ours", {}, "must be weights of torchvision's resnet18; it lacks 'conv1.weight'"),
        ("resnet34", "theirs", {}, "must be weights of torchvision's resnet34; it lacks 'layer1.2."),
    ],
)  # fmt: skip
def test_checkpoints_of_another_network(
    name: str, of: str, more: dict[str, tuple[int, ...]], message: str
) -> None:
    net = theirs("resnet18") if of == "theirs" else build_model("resnet18", SMALL, 0)
    tensors = {**net.state_dict(), **{key: torch.zeros(shape) for key, shape in more.items()}}
    with pytest.raises(PbflError, match=re.escape(message)):
        body_of(name, tensors, "x")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("a/b", "resnet18"), "label 'a/b': must be"),
        (
            ("x", "cnn4"),
            "model 'cnn4': weights are stored for torchvision's models; must be one of efficientnet-b0,",
        ),
        (("x", "small-4"), "model 'small-4': weights are stored for torchvision's models; must be one of"),
        (("x", "resnet18+32"), "weights are stored for a body only; must be 'resnet18'"),
        (("x", "resnet18@y"), "weights are stored for a body only; must be 'resnet18'"),
        (("x", "my.nets:small"), "must load its weights itself"),
        (("x", "resnet18"), "nothing.pth cannot be read (No such file or directory)"),
    ],
)
def test_words_that_are_wrong(words: tuple[str, str], text: str, tmp_path: Path) -> None:
    refused = pbfl("weights", *words, tmp_path / "nothing.pth")
    assert refused.exit_code == 2
    assert text in " ".join(refused.stderr.split())


def test_counters_that_older_files_lack_are_not_needed() -> None:
    tensors = theirs("resnet18").state_dict()
    older = {name: tensor for name, tensor in tensors.items() if not name.endswith(COUNTER)}
    assert len(older) < len(tensors)
    assert same_tensors(body_of("resnet18", older, "older"), body_of("resnet18", tensors, "torchvision's"))
