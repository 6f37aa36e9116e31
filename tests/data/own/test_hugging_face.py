"""Datasets in Hugging Face's format: the same samples and the same partitions as Flower's own library gives."""

from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbfl_flwr.config import DataSettings, parse
from pbfl_flwr.data import check_data, kind_of, load_pool
from pbfl_flwr.errors import PbflError
from pbfl_flwr.methods import SECTIONS

datasets = pytest.importorskip("datasets")
flwr_datasets = pytest.importorskip("flwr_datasets")
PIL = pytest.importorskip("PIL.Image")


def settings(path: Path | str, **keys: Any) -> DataSettings:
    return DataSettings(dataset="flwr-datasets", data_dir=str(path), **{"partition": "natural", **keys})


def pictures(rows: int, seed: int = 0) -> Any:
    """Grey pictures of 4x6 pixels with ten classes and writers."""
    rng = np.random.default_rng(seed)
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=[f"digit {digit}" for digit in range(10)]),
            "writer": datasets.Value("string"),
        }
    )
    columns = {
        "image": [PIL.fromarray(rng.integers(0, 255, (6, 4), dtype=np.uint8)) for _ in range(rows)],
        "label": [int(label) for label in rng.integers(0, 10, rows)],
        "writer": [f"writer {row % 7}" for row in range(rows)],
    }
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    parts = datasets.DatasetDict({"train": pictures(120), "test": pictures(30, seed=1)})
    parts.save_to_disk(tmp_path / "pictures")
    return tmp_path / "pictures"


def test_pictures_and_the_names_of_classes(saved: Path) -> None:
    pool = load_pool(settings(saved))
    assert (pool.inputs.shape, str(pool.inputs.dtype), pool.num_train) == ((150, 1, 6, 4), "uint8", 120)
    assert pool.label_names[3] == "digit 3"
    train = datasets.load_from_disk(str(saved))["train"]
    assert np.array_equal(pool.inputs[17, 0], np.asarray(train[17]["image"]))
    assert pool.labels[:120].tolist() == train["label"][:]
    assert kind_of(saved) == "flwr-datasets"


def test_an_input_shape_resizes_pictures(saved: Path) -> None:
    assert load_pool(settings(saved, input_shape="3,8,8")).input_shape == (3, 8, 8)


def test_official_test_samples(saved: Path) -> None:
    partition = check_data(settings(saved, partition="iid", test_split="official"), 4)
    assert sum(len(split.train) for split in partition.splits) == 120
    assert sum(len(split.test) for split in partition.splits) == 30


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "DirichletPartitioner",
            {"num_partitions": 5, "partition_by": "label", "alpha": 0.3, "min_partition_size": 2},
        ),
        (
            "PathologicalPartitioner",
            {"num_partitions": 5, "partition_by": "label", "num_classes_per_partition": 3},
        ),
        ("NaturalIdPartitioner", {"partition_by": "writer"}),
        ("IidPartitioner", {"num_partitions": 5}),
    ],
)
def test_partitions_equal_those_of_a_federated_dataset(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    pictures(120).to_parquet(str(tmp_path / "data" / "train.parquet"))
    partitioner = getattr(flwr_datasets.partitioner, name)
    theirs = flwr_datasets.FederatedDataset(
        dataset=str(tmp_path / "data"), partitioners={"train": partitioner(**options)}
    )
    text = ",".join(f"{key.replace('_', '-')}={value!r}" for key, value in options.items())
    pool = load_pool(settings(tmp_path / "data", partitioner=name, partitioner_settings=text))
    assert pool.owner is not None
    for client in range(len(np.unique(pool.owner))):
        expected = sorted(np.asarray(row["image"]).tobytes() for row in theirs.load_partition(client))
        assert sorted(image.tobytes() for image in pool.inputs[pool.owner == client]) == expected
    assert theirs.partitioners["train"].num_partitions == len(np.unique(pool.owner))


def test_a_folder_is_only_read(saved: Path) -> None:
    before = {*saved.rglob("*")}
    for name, options in (
        ("NaturalIdPartitioner", "partition-by='writer'"),
        ("IidPartitioner", "num-partitions=3"),
    ):
        load_pool(settings(saved, partitioner=name, partitioner_settings=options))
    assert {*saved.rglob("*")} == before


def test_partitions_leave_out_the_test_split(saved: Path) -> None:
    text = "num-partitions=3"
    pool = load_pool(settings(saved, partitioner="IidPartitioner", partitioner_settings=text))
    assert len(pool.labels) == 120
    assert pool.notes == ("30 samples are not used: IidPartitioner deals 'train', maybe not all of it",)
    counts = check_data(settings(saved, partitioner="IidPartitioner", partitioner_settings=text), 3).counts
    assert counts.sum(axis=1).tolist() == [40, 40, 40]


def test_numbers_become_features_and_client_a_natural_client(tmp_path: Path) -> None:
    columns = {"a": [1, 2, 3], "b": [0.5, 1.5, 2.5], "kind": ["x", "y", "x"], "client": ["u", "v", "u"]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "table")
    pool = load_pool(settings(tmp_path / "table", label_column="kind"))
    assert (pool.columns, pool.inputs.tolist()) == (("a", "b"), [[1, 0.5], [2, 1.5], [3, 2.5]])
    assert (pool.label_names, pool.labels.tolist()) == (("x", "y"), [0, 1, 0])
    assert pool.owner is not None
    assert pool.owner.tolist() == [0, 1, 0]
    assert pool.owner_names == ("u", "v")


def test_clients_are_not_the_classes_though_only_they_are_a_class_label(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "a": datasets.Value("float32"),
            "kind": datasets.Value("int64"),
            "client": datasets.ClassLabel(names=["u", "v"]),
        }
    )
    columns = {"a": [1, 2, 3], "kind": [1, 0, 1], "client": [0, 1, 0]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "table")
    with pytest.raises(
        PbflError, match="set label-column to the column with the classes; it has a, kind, client"
    ):
        load_pool(settings(tmp_path / "table"))


def test_arrays_keep_their_shape(tmp_path: Path) -> None:
    windows = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    datasets.Dataset.from_dict({"window": windows.tolist(), "label": [0, 1, 0, 1]}).save_to_disk(
        tmp_path / "w"
    )
    assert np.array_equal(load_pool(settings(tmp_path / "w")).inputs, windows)


@pytest.mark.parametrize(
    ("others", "names", "shape"),
    [({"a": [0.5, 1.5]}, ("a", "kind"), (2,)), ({"a": [[0.5, 1, 2], [1.5, 1, 2]]}, (), (3,))],
)
def test_a_classlabel_that_is_not_the_label_is_a_number(
    tmp_path: Path, others: dict[str, Any], names: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    rows = datasets.Dataset.from_dict({**others, "kind": [1, 0], "label": [0, 1]})
    for column in ("kind", "label"):
        rows = rows.cast_column(column, datasets.ClassLabel(names=["u", "v"]))
    rows.save_to_disk(tmp_path / "t")
    pool = load_pool(settings(tmp_path / "t"))
    assert (pool.columns, pool.input_shape) == (names, shape)
    if names:
        assert pool.inputs.tolist() == [[0.5, 1], [1.5, 0]]


def test_names_of_a_classlabel_keep_their_order_and_lose_spaces(tmp_path: Path) -> None:
    label = datasets.ClassLabel(names=["2", "10", "b ", "b"])
    rows = datasets.Dataset.from_dict({"a": [1, 2, 3], "label": [1, 3, 2]}).cast_column("label", label)
    rows.save_to_disk(tmp_path / "t")
    pool = load_pool(settings(tmp_path / "t"))
    assert (pool.label_names, pool.labels.tolist()) == (("2", "10", "b"), [1, 2, 2])


@pytest.mark.parametrize(
    "saved_with",
    [{"type": kind} for kind in ("torch", "numpy", "pandas", "arrow")] + [{"columns": ["image"]}],
)
@pytest.mark.parametrize("label", ["label", "number"])
def test_the_format_of_a_dataset_changes_nothing(
    tmp_path: Path, saved_with: dict[str, Any], label: str
) -> None:
    rows = pictures(30).add_column("number", [row % 3 for row in range(30)])
    rows.save_to_disk(tmp_path / "plain")
    rows.with_format(**saved_with).save_to_disk(tmp_path / "formatted")
    dealt = {"partitioner": "IidPartitioner", "partitioner_settings": "num-partitions=3"}
    for keys in ({}, dealt):
        plain, formatted = (
            load_pool(settings(tmp_path / name, label_column=label, **keys))
            for name in ("plain", "formatted")
        )
        assert (formatted.label_names, formatted.fingerprint) == (plain.label_names, plain.fingerprint)


@pytest.mark.parametrize("parts", [["train", "test"], ["train", "unused"]])
def test_a_split_without_samples_is_no_split(tmp_path: Path, parts: list[str]) -> None:
    rows = datasets.Dataset.from_dict({"a": [1, 2, 3], "label": [0, 1, 0]})
    datasets.DatasetDict({parts[0]: rows, parts[1]: rows.select([])}).save_to_disk(tmp_path / "t")
    pool = load_pool(settings(tmp_path / "t"))
    assert (len(pool.labels), pool.num_train) == (3, 3)
    rows.select([]).save_to_disk(tmp_path / "empty")
    with pytest.raises(PbflError, match="empty has samples in no split; must be in 'train'"):
        load_pool(settings(tmp_path / "empty"))


LISTS = (
    "distribution-array=[[0.5,0.5],[0.5,0.5],[1.0,0.0]],num-partitions=3,num-unique-labels-per-partition=2,"
    "partition-by='label',preassigned-num-samples-per-label=1"
)


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("SizePartitioner", "partition-sizes=[40,20]", [40, 20]),
        ("InnerDirichletPartitioner", "partition-sizes=[35,25],partition-by='label',alpha=[1,2,3]", [35, 25]),
        ("DistributionPartitioner", LISTS, [20, 29, 11]),
        (
            "ShardPartitioner",
            "num-partitions=3,partition-by='label',num-shards-per-partition=2",
            [20, 20, 20],
        ),
        ("ContinuousPartitioner", "num-partitions=3,partition-by='a',strictness=0.5", [20, 20, 20]),
        ("NaturalIdPartitioner", "partition-by='writer'", [20, 20, 20]),
        ("GroupedNaturalIdPartitioner", "partition-by='writer',group-size=2", [40, 20]),
        ("LinearPartitioner", "num-partitions=3", [10, 20, 30]),
        ("SquarePartitioner", "num-partitions=2", [12, 48]),
        ("ExponentialPartitioner", "num-partitions=2", [16, 44]),
    ],
)
def test_all_partitioners_that_deal_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, options: str, sizes: list[int]
) -> None:
    table: dict[str, list[Any]] = {"a": [*range(60)], "label": [row % 3 for row in range(60)]}
    if "writer" in options:
        table["writer"] = [*"xyz"] * 20
    datasets.Dataset.from_dict(table).save_to_disk(tmp_path / "t")
    capfd.readouterr()
    pool = load_pool(settings(tmp_path / "t", partitioner=name, partitioner_settings=options))
    assert pool.owner is not None
    assert (np.bincount(pool.owner).tolist(), pool.columns) == (sizes, ("a",))
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("IidPartitioner", "num-partitions=20", "refuses this: Index 9 out of range .*'train' has 9 samples"),
        (
            "ShardPartitioner",
            "num-partitions=3,partition-by='label',num-shards-per-partition=9",
            "refuses this: .*zero; 'train' has 9 samples",
        ),
        ("SizePartitioner", "partition-sizes=[9,1]", "refuses this: The sum of partition sizes"),
        ("VerticalEvenPartitioner", "num-partitions=2", "deals columns, and clients have rows"),
        ("IdToSizeFncPartitioner", "num-partitions=2", "refuses this: .*partition_id_to_size_fn"),
        ("Partitioner", "", "has no such class"),
    ],
)
def test_a_partitioner_that_fails_gives_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, options: str, message: str
) -> None:
    (tmp_path / "set").mkdir()
    rows = "".join(f"{row},{row % 3}\n" for row in range(9))
    (tmp_path / "set" / "train.csv").write_text(f"a,label\n{rows}")  # read with a progress bar
    with pytest.raises(PbflError, match=message) as error:
        load_pool(settings(tmp_path / "set", partitioner=name, partitioner_settings=options))
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_what_a_partitioner_warns_of_becomes_a_note(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"a": [1, 2, 3], "label": [0, 1, 0]}).save_to_disk(tmp_path / "t")
    options = {"partitioner": "SizePartitioner", "partitioner_settings": "partition-sizes=[1,1]"}
    notes = load_pool(settings(tmp_path / "t", **options)).notes
    assert [note.partition(":")[0] for note in notes] == ["SizePartitioner", "1 samples are not used"]


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ({"client": ["u", None]}, {}, "row 2, column 'client': the cell is empty; a client is expected"),
        (
            {"client": ["u", "v"]},
            {"client": ["w", ""]},
            "row 4, column 'client': the cell is empty; a client",
        ),
        ({"label": [0.5, 1.0]}, {}, "column 'label' holds 0.5, which is not a class; set label-column"),
        ({"label": ["x", None]}, {}, "row 2, column 'label': the cell is empty; a class is expected"),
        ({"a": [1.0, None]}, {}, "row 2, column 'a': the cell is empty or not finite"),
        ({"b": [1.0, 2.0]}, {"a": [1.0, 2.0]}, "'test' has no column 'b', which 'train' has"),
        ({"label": ("x", "y")}, {"label": ("y", "x")}, "'train' and 'test' do not have the same classes"),
        ({"label": (None, "x", "y")}, {}, "row 1, column 'label': the cell is empty; a class is expected"),
        ({"label": (-1, "x", "y")}, {}, "row 1, column 'label': -1 stands for no class; a class is expected"),
    ],
)
def test_a_cell_without_a_value_is_named(
    tmp_path: Path, train: dict[str, Any], test: dict[str, Any], message: str
) -> None:
    def part(columns: dict[str, Any]) -> Any:
        filled = {"a": [1.0, 2.0], "label": ["x", "y"], **columns}
        features = None
        if isinstance(names := filled["label"], tuple):
            kept = [name for name in names if isinstance(name, str)]
            filled["label"] = [0 if names[0] in kept else names[0], 1]
            features = datasets.Features(
                {"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=kept)}
            )
        return datasets.Dataset.from_dict(filled, features=features)

    parts = {"train": part(train), **({"test": part(test)} if test else {})}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "t")
    with pytest.raises(PbflError, match=message):
        load_pool(settings(tmp_path / "t"))


def test_of_sixteen_bits_the_high_byte_is_kept(tmp_path: Path) -> None:
    grey = np.array([[0, 255, 256], [4096, 32768, 65535]], dtype=np.uint16)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    for name, array in (("whole", grey), ("float", grey.astype(np.float32))):
        columns = {"image": [_tiff(array)] * 2, "label": [0, 1]}
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / name)
    pool = load_pool(settings(tmp_path / "whole", partition="iid"))
    assert pool.inputs[1, 0].tolist() == [[0, 0, 1], [16, 128, 255]]
    with pytest.raises(
        PbflError, match="float: number 1 is an image of mode F, whose value range is unknown"
    ):
        load_pool(settings(tmp_path / "float", partition="iid"))


def _tiff(array: Any) -> dict[str, Any]:
    return {"bytes": _encoded(array, "TIFF"), "path": None}


def _encoded(array: Any, kind: str) -> bytes:
    content = BytesIO()
    PIL.fromarray(array).save(content, format=kind)
    return content.getvalue()


def _images(path: Path, images: list[bytes | None], **feature: Any) -> Path:
    cells = [image and {"bytes": image, "path": None} for image in images]
    features = datasets.Features({"image": datasets.Image(**feature), "label": datasets.Value("int64")})
    columns = {"image": cells, "label": [row % 2 for row in range(len(images))]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(path)
    return path


NOISE = np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)
PNG = _encoded(NOISE, "PNG")
SECOND_CHUNK = PNG.index(b"IDAT", PNG.index(b"IDAT") + 4)


@pytest.mark.parametrize("row", [1, 2])
@pytest.mark.parametrize(
    ("image", "message"),
    [
        (None, r"t, row {row}, column 'image': the cell holds no image"),
        (b"text", r"t: number {row} is not a readable image: cannot identify"),
        (PNG[:5000], r"t: number {row} is not a readable image: image file is truncated"),
        (
            PNG[:SECOND_CHUNK] + b"\1\2\3\4" + PNG[SECOND_CHUNK + 4 :],
            r"t: number {row} is not a readable image: broken PNG file",
        ),
    ],
    ids=["none", "text", "truncated", "broken"],
)
def test_an_image_that_is_missing_or_damaged_is_named(
    tmp_path: Path, row: int, image: bytes | None, message: str
) -> None:
    images = [PNG, PNG, PNG]
    path = _images(tmp_path / "t", [*images[: row - 1], image, *images[row:]])
    with pytest.raises(PbflError, match=message.format(row=row)):
        load_pool(settings(path))


def test_images_saved_as_bytes_are_decoded(tmp_path: Path) -> None:
    pool = load_pool(settings(_images(tmp_path / "t", [PNG, PNG], decode=False)))
    assert np.array_equal(pool.inputs[1], NOISE.transpose(2, 0, 1))


def test_a_note_says_that_images_lost_their_colours(tmp_path: Path) -> None:
    grey, colours = (_encoded(pixels, "PNG") for pixels in (NOISE[:4, :4, 0], NOISE[:4, :4]))
    path = _images(tmp_path / "grey-first", [grey, colours, grey, colours])
    pool = load_pool(settings(path))
    assert (pool.input_shape, pool.notes) == (
        (1, 4, 4),
        ("2 of 4 images lost their colours, since the first image is grey",),
    )
    assert load_pool(settings(path, input_shape="1,4,4")).notes == ()
    pool = load_pool(settings(_images(tmp_path / "colours-first", [colours, grey])))
    assert (pool.input_shape, pool.notes) == ((3, 4, 4), ())


def test_refuses_an_image_of_too_many_pixels(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(PbflError, match=r"pictures: Image size \(24 pixels\); must be at most 20 pixels"):
        load_pool(settings(saved))


def test_bad_input_gives_one_line(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(PbflError, match=r"label-column = 'kind': .* it has image, label, writer"):
        load_pool(settings(saved, label_column="kind"))
    with pytest.raises(PbflError, match="flwr-datasets has no such class; must be one of Cont"):
        load_pool(settings(saved, partitioner="Dirichlet"))
    with pytest.raises(PbflError, match=r"'DirichletPartitioner' refuses this: .*alpha"):
        load_pool(
            settings(saved, partitioner="DirichletPartitioner", partitioner_settings="num-partitions=3")
        )
    (tmp_path / "nothing").mkdir()
    with pytest.raises(PbflError, match="cannot be read"):
        load_pool(settings(tmp_path / "nothing"))
    datasets.Dataset.from_dict({"said": ["good", "bad day"], "label": [1, 0]}).save_to_disk(tmp_path / "t")
    with pytest.raises(PbflError, match=r"columns said: must be numbers, .* or an image, not string"):
        load_pool(settings(tmp_path / "t"))
    times = {"at": [datetime(2024, 1, 1), datetime(2024, 1, 2)], "code": ["001", "002"], "label": [1, 0]}
    datasets.Dataset.from_dict(times).save_to_disk(tmp_path / "times")
    with pytest.raises(PbflError, match=r"columns at, code: must be .*, not string and timestamp\[us\]"):
        load_pool(settings(tmp_path / "times"))
    datasets.Dataset.from_dict({"x": [[["1"]], [["2"]]], "label": [1, 0]}).save_to_disk(tmp_path / "texts")
    with pytest.raises(PbflError, match=r"columns x: must be .*, not string"):
        load_pool(settings(tmp_path / "texts"))
    with pytest.raises(PbflError, match="is on the hub; set download=true"):
        load_pool(settings("hf://someone/something"))
    with pytest.raises(PbflError, match="needs dataset = 'flwr-datasets' and partition = 'natural'"):
        parse({"partitioner": "IidPartitioner"}, SECTIONS)
    datasets.Dataset.from_dict({"a": ["u", "v"], "label": [0, 1]}).save_to_disk(tmp_path / "words")
    with pytest.raises(PbflError, match="columns a: must be numbers"):
        load_pool(settings(tmp_path / "words"))
    datasets.DatasetDict({"all": pictures(3)}).save_to_disk(tmp_path / "all")
    with pytest.raises(PbflError, match="has samples in all; must be in 'train'"):
        load_pool(settings(tmp_path / "all"))


def test_an_id_is_loaded_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PBFL_HOME", str(tmp_path))
    asked = []

    def load(name: str) -> Any:
        asked.append(name)
        return datasets.DatasetDict({"train": pictures(10)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(load_pool(settings("hf://someone/pictures", download=True)).labels) == 10
    assert asked == ["someone/pictures"]


def test_the_only_classlabel_has_the_classes(tmp_path: Path) -> None:
    kinds = datasets.ClassLabel(names=["b", "a"])
    features = datasets.Features({"x": datasets.Value("float32"), "kind": kinds})
    datasets.Dataset.from_dict({"x": [1.0, 2.0], "kind": [1, 0]}, features=features).save_to_disk(
        tmp_path / "k"
    )
    pool = load_pool(settings(tmp_path / "k"))
    assert (pool.columns, pool.label_names, pool.labels.tolist()) == (("x",), ("b", "a"), [1, 0])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"x": [[1.0], [2.0]], "z": [[1.0, 2.0], [3.0, 4.0]]},
            "several columns of inputs: x, z; must be one",
        ),
        ({"client": ["a", "b"]}, "has no column besides 'label'"),
    ],
)
def test_one_column_of_arrays_or_any_of_numbers(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    datasets.Dataset.from_dict({**columns, "label": [1, 0]}).save_to_disk(tmp_path / "set")
    with pytest.raises(PbflError, match=message):
        load_pool(settings(tmp_path / "set"))
