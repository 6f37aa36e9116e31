"""Crops and flips of training images: which windows are drawn, and that nothing but training sees them."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from pbfl_flwr.config import EvaluationSettings, TrainingSettings, parse
from pbfl_flwr.errors import PbflError
from pbfl_flwr.method import Client
from pbfl_flwr.models.build import build_model
from pbfl_flwr.prototypes.class_means import class_sums_of
from pbfl_flwr.task import Task
from pbfl_flwr.training.augmentation import Augmentation, check_augmentation
from pbfl_flwr.training.loop import classification, fit, fixed_features, forward
from tests.flower.inprocess import federation, tiny_client
from tests.methods.test_inputs import windows as windows_of

HEIGHT, WIDTH = 16, 8  # of which an eighth are two rows and one column


def images(count: int) -> Tensor:
    """Pixels that all differ, and none of which is black."""
    pixels = torch.arange(1, 3 * HEIGHT * WIDTH + 1, dtype=torch.int32)
    return pixels.reshape(1, 3, HEIGHT, WIDTH).repeat(count, 1, 1, 1)


def changed(kinds: str, samples: Tensor, seed: int = 0) -> Tensor:
    augmentation = Augmentation(
        TrainingSettings(augmentation=kinds), samples, torch.Generator().manual_seed(seed)
    )
    return augmentation(samples, torch.arange(len(samples)))


def windows() -> list[Tensor]:
    """All crops of the image with black margins of an eighth, as torchvision cuts them."""
    padded = vision.pad(images(1)[0], [1, 2, 1, 2])
    return [vision.crop(padded, top, left, HEIGHT, WIDTH) for top in range(5) for left in range(3)]


@pytest.mark.parametrize(
    ("kinds", "possible"),
    [
        ("crop", windows()),
        ("flip", [images(1)[0], vision.horizontal_flip(images(1)[0])]),
        ("flip, crop", [*windows(), *map(vision.horizontal_flip, windows())]),
    ],
)
def test_every_change_is_drawn_and_equally_often(kinds: str, possible: list[Tensor]) -> None:
    names = {tuple(image.flatten().tolist()): place for place, image in enumerate(possible)}
    drawn = Counter(names[tuple(image.flatten().tolist())] for image in changed(kinds, images(6000)))
    expected = 6000 / len(possible)
    assert len(drawn) == len(possible)
    assert sum((count - expected) ** 2 / expected for count in drawn.values()) < 3 * len(
        possible
    )  # chi-squared


def test_samples_keep_their_own_change_in_whichever_batch_they_come() -> None:
    samples = torch.rand(6, 3, HEIGHT, WIDTH)
    augmentation = Augmentation(
        TrainingSettings(augmentation="crop,flip"), samples, torch.Generator().manual_seed(0)
    )
    index = torch.tensor([4, 1, 5])
    whole = augmentation(samples, torch.arange(6))
    assert torch.equal(augmentation(samples[index], index), whole[index])
    assert torch.equal(augmentation(samples[2:4], slice(2, 4)), whole[2:4])


def client(**keys: object) -> Client:
    data = tiny_client(2)
    task = data.task(8)
    settings = TrainingSettings(batch_size=4, batch_order="shuffled", drop_last="never", learning_rate=0.05)
    model = build_model("cnn4", task, 0)
    return Client(2, 1, task, model, data, settings.model_copy(update=keys), EvaluationSettings(), 3)


def trained(who: Client) -> dict[str, Tensor]:
    fit(who, classification(who.model))
    return {name: tensor.clone() for name, tensor in who.model.state_dict().items()}


def test_training_sees_other_images_in_every_epoch_and_the_same_ones_again_with_the_seed() -> None:
    seen: list[Tensor] = []

    def watched(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        seen.append(inputs.clone())
        return {"ce": torch.nn.functional.cross_entropy(forward(who.model, inputs)[1], labels)}

    who = client(augmentation="crop,flip", batch_order="fixed", local_epochs=2)
    fit(who, watched)
    first, second = torch.cat(seen[: len(seen) // 2]), torch.cat(seen[len(seen) // 2 :])
    plain = who.data.prepare(who.data.train.inputs)
    assert first.shape == second.shape == plain.shape
    assert all((a != b).any() for a, b in ((first, second), (first, plain)))
    assert first.min() >= plain.min()  # margins are black before images are normalised
    once, again = trained(client(augmentation="crop")), trained(client(augmentation="crop"))
    assert all(torch.equal(once[name], again[name]) for name in once)
    without = trained(client())
    assert any(not torch.equal(once[name], without[name]) for name in once)


def test_prototypes_after_training_are_of_the_images_as_they_are() -> None:
    plain, augmented = client(), client(augmentation="crop,flip")
    assert torch.equal(class_sums_of(plain).means()[0], class_sums_of(augmented).means()[0])


def test_a_heads_features_are_not_computed_once_where_images_change() -> None:
    assert fixed_features(client()) is not None
    assert fixed_features(client(augmentation="flip")) is None


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (Task(6, 8, (9, 128)), "inputs are numbers of shape (9, 128)"),
        (Task(6, 8, (9, 1, 128)), "inputs are numbers of shape (9, 1, 128)"),
        (Task(6, 8, (9, 128, 1)), "inputs are numbers of shape (9, 128, 1)"),
        (Task(4, 8, (32,), 100), "inputs are token ids of shape (32,)"),
        (Task(4, 8, (2, 8, 8), 100), "inputs are token ids of shape (2, 8, 8)"),
    ],
)
def test_augmentation_of_inputs_that_are_no_images_is_rejected(task: Task, named: str) -> None:
    check_augmentation("", task)
    check_augmentation("flip", Task(6, 8, (1, 2, 2)))
    with pytest.raises(PbflError, match=r"augmentation = 'flip': .*it must be ''") as refused:
        check_augmentation("flip", task)
    assert named in str(refused.value)


@pytest.mark.parametrize("given", ["rotate", "crop,crop", "crop flip"])
def test_an_unknown_change_is_refused(given: str) -> None:
    with pytest.raises(
        PbflError, match=f"augmentation = '{given}': must be empty, or a comma list of crop, flip"
    ):
        parse({"augmentation": given})


def test_a_federation_says_before_its_first_round_that_its_data_are_no_images(tmp_path: Path) -> None:
    with pytest.raises(PbflError, match="augmentation = 'crop': inputs are numbers of shape"):
        federation(tmp_path, "fedproto", data=windows_of, models="har-cnn", augmentation="crop").run()
