"""What ``labels`` means: the same for every format."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import load_pool
from pbfl_flwr.data.labels import numbers_of
from pbfl_flwr.errors import PbflError


def arrays(place: Path, ids: list[int]) -> str:
    np.savez(place / "a.npz", x=np.zeros((len(ids), 2)), y=np.array(ids))
    return "npz"


def texts(place: Path, ids: list[int]) -> str:
    np.savez(place / "a.npz", x=np.zeros((len(ids), 2)), y=np.array([*map(str, ids)]))
    return "npz"


def table(place: Path, ids: list[int]) -> str:
    (place / "a.csv").write_text("a,label\n" + "".join(f"0,{number}\n" for number in ids))
    return "table"


def folders(place: Path, ids: list[int]) -> str:
    for number in ids:
        (place / "a" / str(number)).mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(place / "a" / str(number) / "0.png")
    return "image-folder"


def pflib(place: Path, ids: list[int]) -> str:
    (place / "a").mkdir()
    (place / "a" / "config.json").write_text(json.dumps({"num_clients": 1, "num_classes": 4}))
    for part in ("train", "test"):
        (place / "a" / part).mkdir()
        content = {"x": np.zeros((len(ids), 2)), "y": np.array(ids)}
        np.savez(place / "a" / part / "0.npz", data=np.array(content, dtype=object))
    return "pflib"


def saved(place: Path, ids: list[int]) -> str:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("flwr_datasets")
    datasets.Dataset.from_dict({"a": [0.0] * len(ids), "label": ids}).save_to_disk(place / "a")
    return "flwr-datasets"


def saved_names(place: Path, ids: list[int]) -> str:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("flwr_datasets")
    label = datasets.ClassLabel(names=[f"{number} " for number in range(max(ids), -1, -1)])
    features = datasets.Features({"a": datasets.Value("float32"), "label": label})
    columns = {"a": [0.0] * len(ids), "label": [f"{number} " for number in ids]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(place / "a")
    return "flwr-datasets"


@pytest.fixture(params=[arrays, texts, table, folders, pflib, saved, saved_names])
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[list[int], str], list[int]]:
    """The numbers of ascending classes under ``labels``."""

    def numbers(ids: list[int], labels: str) -> list[int]:
        dataset = request.param(tmp_path, ids)
        path = next(entry for entry in tmp_path.iterdir() if entry.stem == "a")
        pool = load_pool(DataSettings(dataset=dataset, data_dir=str(path), labels=labels))
        assert pool.label_names == tuple(labels.split(","))
        return [int(number) for number in pool.labels[: len(ids)]]

    return numbers


def test_numbers_among_the_names_are_names(read: Callable[[list[int], str], list[int]]) -> None:
    assert read([1, 2, 3], "1,2,3,4") == [0, 1, 2]


def test_numbers_are_positions_in_other_names(read: Callable[[list[int], str], list[int]]) -> None:
    assert read([0, 1, 3], "emu,dog,cow,cat") == [0, 1, 3]


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        ([0, 1], "1,2,3,4", r"class '0': by name it is none of labels \(1, 2, 3, 4\), by position '1'; must"),
        (
            [1, 3],
            "cat,3,1,emu",
            r"class '1': by name it is number 2 of labels .*, by position '3'; must be a",
        ),
        ([1, 5], "1,2,3,4", r"has the class '5'; labels allows 1, 2, 3, 4$"),
        (
            [1, 4],
            "cat,dog,emu,cow",
            r"class '4'; labels allows cat, dog, emu, cow, or positions in it, 0\.\.3$",
        ),
    ],
)
def test_what_could_mean_two_things_or_nothing_is_refused(
    read: Callable[[list[int], str], list[int]], ids: list[int], labels: str, message: str
) -> None:
    with pytest.raises(PbflError, match=message):
        read(ids, labels)


def test_both_readings_of_a_list_may_agree() -> None:
    assert numbers_of(["0", "2"], ("0", "cat", "2"), "here") == [0, 2]
    assert numbers_of(["01"], ("00", "01"), "here") == [1]
    assert numbers_of([], ("a", "b"), "here") == []
    with pytest.raises(PbflError, match=r"here has the class '-1', '0'; labels allows a, b$"):
        numbers_of(["-1", "0"], ("a", "b"), "here")
