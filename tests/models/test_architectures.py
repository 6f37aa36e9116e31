"""Each family against the numbers published for it."""

import math

import pytest
import torch
from torch import nn
from torchvision import models

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.build import build_model
from pbfl_flwr.models.contract import count_parameters
from pbfl_flwr.models.layers import impose_width
from pbfl_flwr.task import Task
from tests.models.kinds import task_of

RGB = (3, 32, 32)
GREY = (1, 28, 28)
V = 11


@pytest.mark.parametrize(
    ("name", "shape", "d", "body"),
    [
        ("resnet8", RGB, 500, 1_232_704),
        ("shufflenet-v2", RGB, 500, 1_253_604),
        ("mobilenet-v2", RGB, 500, 2_223_872),
        ("efficientnet-b0", RGB, 500, 4_007_548),
        # stem 7·7·3·64 + 2·64 = 9,536; block 2·(3·3·64·64 + 2·64) = 73,984
        ("resnet4", RGB, 500, 9_536 + 73_984),
        # + block 64->128: 9·64·128 + 9·128·128 + 64·128 (shortcut) + 3·2·128 = 230,144
        ("resnet6", RGB, 500, 9_536 + 73_984 + 230_144),
        # + block 256->512: 9·256·512 + 9·512·512 + 256·512 + 3·2·512 = 3,673,088
        ("resnet10", RGB, 500, 1_232_704 + 3_673_088),
        # torchvision's published numbers, less those of the classifier, (a + 1)·1000
        ("resnet18", RGB, 512, 11_689_512 - 513_000),
        ("resnet34", RGB, 512, 21_797_672 - 513_000),
        ("resnet50", RGB, 512, 25_557_032 - 2_049_000),
        ("resnet101", RGB, 512, 44_549_160 - 2_049_000),
        ("resnet152", RGB, 512, 60_192_808 - 2_049_000),
        ("googlenet", RGB, 512, 6_624_904 - 1_025_000),
        ("vit-b-16", (3, 224, 224), 512, 86_567_656 - 769_000),
        ("vit-b-32", (3, 224, 224), 512, 88_224_232 - 769_000),
        # of 14·14 and 7·7 places 2·2 and 1 are left, each with 768 numbers
        ("vit-b-16", RGB, 512, 86_567_656 - 769_000 - 192 * 768),
        ("vit-b-32", RGB, 512, 88_224_232 - 769_000 - 48 * 768),
        # 25·c·32 + 32, 25·32·64 + 64, F·d + d with F = 64·5·5, 64·4·4, 64·13·13
        ("cnn4", RGB, 512, 873_408),
        ("cnn4", GREY, 512, 576_896),
        ("cnn4", (3, 64, 64), 512, 5_592_000),
        ("cnn4", RGB, 500, 854_196),
        ("cnn4-512", RGB, 64, 873_408),
        ("cnn4-512", RGB, 1024, 873_408),
        # 25·10 + 10, 25·10·20 + 20, 320·50 + 50
        ("cnn2", GREY, 50, 21_330),
        # 2·16 + 16, 16·8 + 8, 8·4 + 4, 4·2 + 2
        ("mlp5", (2,), 2, 230),
        # 5·20 + 20, 20·7 + 7, 7·3 + 3
        ("mlp-20-7", (5,), 3, 291),
        # 5·3 + 3
        ("mlp", (5,), 3, 18),
        # 9·9·32 + 32, 5·32·64 + 64, 3·64·128 + 128, 128·64 + 64
        ("har-cnn", (9, 128), 64, 45_888),
        # three gates of 9 inputs, 64 outputs and two biases; LayerNorm 2·64; 64·32 + 32
        ("har-gru", (9, 128), 32, 3 * 64 * (9 + 64 + 2) + 128 + 2_080),
        # stem 9·9·32 + 2·32; blocks 2·5·32² + 4·32; 5·32·64 + 5·64² + 4·64 + 32·64; 5·64·128 + 5·128² + 4·128 + 64·128
        ("har-resnet", (9, 128), 64, 2_656 + 10_368 + 33_024 + 131_584),
        # 9·9·32 + 32, 9·32·64 + 64
        ("harcnn-1-1", (9, 128), 64, 2_624),
        ("harcnn-2-3", (9, 1, 128), 64, 2_624 + 18_496),
        # 5·9·32 + 32, 5·32·64 + 64, 5·64·128 + 128
        ("harcnn-3-1", (9, 128), 64, 1_472 + 10_304 + 41_088),
        # an embedding of V = 11 tokens, here d = 6; d·d + d
        ("fasttext", (9,), 6, V * 6 + 42),
        # three convolutions d·w·100 + 100 of width 3, 4, 5; 300·d + d
        ("textcnn", (9,), 6, V * 6 + 6 * 12 * 100 + 300 + 300 * 6 + 6),
        ("text-logistic", (9,), 6, V * 6),
        # a layer has 4 gates (a GRU 3) of d·d for the input, d·d for the state and two biases
        ("lstm", (9,), 6, V * 6 + 2 * 4 * (2 * 36 + 12)),
        ("gru", (9,), 6, V * 6 + 2 * 3 * (2 * 36 + 12)),
        ("bilstm", (9,), 6, V * 6 + 2 * 4 * (2 * 36 + 12) + 2 * 36 + 6),
        # of each layer: queries, keys, values and output, the perceptron, two normalisations
        ("transformer-3-2", (9,), 6, V * 6 + 2 * (4 * 42 + (6 * 2048 + 2048) + (2048 * 6 + 6) + 4 * 6)),
    ],
)
def test_body_parameters(name: str, shape: tuple[int, ...], d: int, body: int) -> None:
    with torch.device("meta"):
        model = build_model(name, task_of(name, d, shape, num_classes=10), seed=0)
    assert count_parameters(model) == (body, 10 * d + 10)


@pytest.mark.parametrize(
    ("name", "classifier", "width"),
    [
        ("googlenet", "fc", 1024),
        ("resnet18", "fc", 512),
        ("resnet50", "fc", 2048),
        ("vit-b-32", "heads", 768),
    ],
)
def test_features_are_bit_for_bit_torchvisions(name: str, classifier: str, width: int) -> None:
    """With the same seed: HtFLlib builds torchvision's networks and replaces their classifier."""
    more = {"image_size": 32} if name == "vit-b-32" else {}
    more |= {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    with seeds.seeded(4):
        theirs = models.get_model(name.replace("-", "_"), weights=None, num_classes=10, **more)
    setattr(theirs, classifier, nn.Identity())
    ours = build_model(name, Task(num_classes=10, feature_dim=width, input_shape=RGB), seed=4)
    images = torch.randn(2, *RGB, generator=torch.Generator().manual_seed(0))
    result = []
    for net in (theirs.train(), ours.train().features):  # in evaluation GoogLeNet's are zeros but for 1e-11
        with seeds.seeded(5), torch.no_grad():
            result.append(net(images))
    assert torch.equal(*result)
    assert float(result[0].abs().max()) > 0.1


@pytest.mark.parametrize(
    ("name", "buffers"),
    [("resnet8", 2_697), ("mobilenet-v2", 34_164), ("shufflenet-v2", 16_236), ("efficientnet-b0", 42_065)],
)
def test_batch_norm_buffers(name: str, buffers: int) -> None:
    with torch.device("meta"):
        model = build_model(name, Task(num_classes=10, feature_dim=500, input_shape=RGB), seed=0)
    assert sum(b.numel() for b in model.buffers()) == buffers


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # 32x32: the stem quarters the side, each further width halves it
        ("resnet8", [(64, 8), (64, 8), (128, 4), (256, 2)]),
        ("resnet18", [(64, 8), (64, 8), (128, 4), (256, 2), (512, 1)]),
        ("resnet50", [(64, 8), (256, 8), (512, 4), (1024, 2), (2048, 1)]),
        # the stem quarters the side, and before every later group the map is halved
        ("googlenet", [(64, 8), (192, 4), (480, 4), (832, 2), (1024, 1)]),
        ("shufflenet-v2", [(24, 8), (116, 4), (232, 2), (464, 1), (1024, 1)]),
        (
            "mobilenet-v2",
            [(32, 16), (16, 16), (24, 8), (32, 4), (64, 2), (96, 2), (160, 1), (320, 1), (1280, 1)],
        ),
        (
            "efficientnet-b0",
            [(32, 16), (16, 16), (24, 8), (40, 4), (80, 2), (112, 2), (192, 1), (320, 1), (1280, 1)],
        ),
        ("cnn4", [(32, 14), (64, 5)]),
        ("cnn2", [(10, 14), (20, 5)]),
    ],
)
def test_feature_maps_of_32x32(name: str, sizes: list[tuple[int, int]]) -> None:
    model = build_model(name, Task(num_classes=10, feature_dim=64, input_shape=RGB), seed=0).eval()
    with torch.no_grad():
        maps = model.feature_maps(torch.zeros(2, *RGB))
    assert [tuple(m.shape) for m in maps] == [(2, channels, side, side) for channels, side in sizes]


@pytest.mark.parametrize(
    ("a", "d"), [(1024, 500), (1280, 500), (256, 500), (256, 512), (64, 50), (7, 3), (3, 7), (5, 1)]
)
def test_pooling_to_d_is_the_loop_of_the_references(a: int, d: int) -> None:
    vectors = torch.randn(2, a, generator=torch.Generator().manual_seed(a), dtype=torch.float64)
    expected = torch.zeros(2, d, dtype=torch.float64)
    for t in range(d):
        start, end = math.floor(t * a / d), math.ceil((t + 1) * a / d)
        expected[:, t] = vectors[:, start:end].mean(dim=1)

    assert impose_width(a, a) == []
    (pooling,) = impose_width(a, d)
    torch.testing.assert_close(pooling(vectors), expected, rtol=0, atol=1e-12)


def test_d_is_imposed_after_the_penultimate_activation_with_nothing_between() -> None:
    wide = build_model("resnet8", Task(num_classes=10, feature_dim=256, input_shape=RGB), seed=3).eval()
    narrow = build_model("resnet8", Task(num_classes=10, feature_dim=100, input_shape=RGB), seed=3).eval()
    x = torch.randn(2, *RGB, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(nn.AdaptiveAvgPool1d(100)(wide.features(x)), narrow.features(x))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("mobilenet-v2", ["neck.2"]),
        ("googlenet", ["neck.2"]),
        ("efficientnet-b0", ["head.0"]),
        ("cnn2", ["stages.1.1", "head.0"]),
    ],
)
def test_dropout_stands_where_the_references_have_it(name: str, where: list[str]) -> None:
    model = build_model(name, Task(num_classes=10, feature_dim=50, input_shape=GREY), seed=0)
    dropouts = [n for n, m in model.named_modules() if isinstance(m, nn.Dropout | nn.Dropout2d)]
    assert dropouts == where


@pytest.mark.parametrize(
    ("name", "channels", "side", "deviation", "tolerance"),
    [
        # Kaiming: variance 2 / (out channels · kernel area), whatever the input channels
        *(
            (name, channels, 32, math.sqrt(2 / fan_out), 0.15)
            for name, fan_out in (("resnet8", 64 * 49), ("mobilenet-v2", 32 * 9), ("efficientnet-b0", 32 * 9))
            for channels in (1, 3)
        ),
        # truncated normal numbers: of deviation 0.01, and of 1 over the root of the fan-in, 1·16·16
        ("googlenet", 1, 15, 0.01, 0.05),
        ("vit-b-16", 1, 16, 1 / 16, 0.05),
    ],
)
def test_the_first_convolution_is_drawn_as_published(
    name: str, channels: int, side: int, deviation: float, tolerance: float
) -> None:
    model = build_model(
        name, Task(num_classes=10, feature_dim=50, input_shape=(channels, side, side)), seed=0
    )
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    assert first.in_channels == channels
    assert float(first.weight.detach().std()) == pytest.approx(deviation, rel=tolerance)
    assert first.bias is None or not first.bias.any()


CONVOLUTIONS = "layer {} (5x5 convolution, 2x2 max-pooling): expected a map of at least 6x6, found {} "
PATCHES = "first layer: expected square images divisible into {0}x{0} patches, e.g. {1}x{1}, found {2} "
NO_IMAGE = "first layer: expected images (channels, height, width), found input shape (9, 128)"
IMAGE_MODELS = (
    "resnet4",
    "shufflenet-v2",
    "mobilenet-v2",
    "efficientnet-b0",
    "cnn4",
    "googlenet",
    "vit-b-16",
)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        # 8 -> (8-4)/2 = 2, 15 -> (15-4)//2 = 5: both below the 6 that a 5x5 convolution and a 2x2 pooling need
        *((name, (1, 8, 8), CONVOLUTIONS.format("stages.1", "2x2")) for name in ("cnn4", "cnn2")),
        ("cnn4", (1, 15, 16), CONVOLUTIONS.format("stages.1", "5x6")),
        ("cnn4", (1, 4, 9), CONVOLUTIONS.format("stages.0", "4x9")),
        ("googlenet", (3, 14, 32), "first layer: expected images of at least 15x15 pixels, found 14x32 "),
        ("vit-b-16", (1, 28, 28), PATCHES.format(16, 32, "28x28")),
        ("vit-b-16", (3, 32, 64), PATCHES.format(16, 32, "32x64")),
        ("vit-b-32", (3, 48, 48), PATCHES.format(32, 64, "48x48")),
        *((name, (9, 128), NO_IMAGE) for name in IMAGE_MODELS),
    ],
)
def test_inputs_of_another_size_or_kind_are_one_line(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(PbflError) as caught:
        build_model(name, Task(num_classes=10, feature_dim=50, input_shape=shape), seed=0)
    assert str(caught.value).startswith(f"model '{name}', {message}")
    assert f"input shape {shape}" in str(caught.value)
    assert "\n" not in str(caught.value)
    if name.startswith("cnn") and len(shape) == 3:
        assert str(caught.value).endswith("needs images of at least 16x16 pixels")


def test_googlenet_takes_images_from_15_pixels_on() -> None:
    model = build_model("googlenet", Task(num_classes=10, feature_dim=50, input_shape=(3, 15, 15)), 0).eval()
    assert model.features(torch.zeros(2, 3, 15, 15)).shape == (2, 50)


def test_a_network_for_which_there_is_no_memory_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(num_classes=10, feature_dim=50, input_shape=GREY)
    monkeypatch.setattr(
        "pbfl_flwr.models.mlp.mlp", lambda *_: torch.empty(2**60)
    )  # torch itself refuses 4 EiB
    with pytest.raises(PbflError) as caught:
        build_model("mlp-9-9", task, seed=0)
    assert str(caught.value) == ("model 'mlp-9-9': not enough memory for its weights; use a smaller model")


def test_mlp5_features_take_both_signs_and_cnn4_features_do_not() -> None:
    x = torch.randn(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    task = Task(num_classes=6, feature_dim=8, input_shape=GREY)
    with torch.no_grad():
        assert float(build_model("mlp5", task, seed=0).features(x).min()) < 0
        assert float(build_model("cnn4", task, seed=0).features(x).min()) >= 0
