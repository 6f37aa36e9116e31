"""Tables of features: what is read, and the one line for everything that is not."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import check_data, load_pool
from pbfl_flwr.data.own.table import features
from pbfl_flwr.errors import PbflError


def settings(path: Path, **keys: Any) -> DataSettings:
    return DataSettings(dataset="table", data_dir=str(path), partition="iid", **keys)


def write(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_csv_with_a_label_column(tmp_path: Path) -> None:
    pool = load_pool(settings(write(tmp_path, "a,label,b\n1,dog,2.5\n-3,cat,4e2\n\n5,dog,0\n")))
    assert pool.inputs.tolist() == [[1.0, 2.5], [-3.0, 400.0], [5.0, 0.0]]
    assert (pool.label_names, pool.labels.tolist(), pool.columns) == (("cat", "dog"), [1, 0, 1], ("a", "b"))
    scale, shift = pool.affine()
    assert (float(scale.max()), float(shift.max())) == (1.0, 0.0)  # fed as they are


@pytest.mark.parametrize("separator", [";", "\t"])
def test_the_last_column_other_separators_and_whole_classes(tmp_path: Path, separator: str) -> None:
    text = "\ufeffa,b,kind\n1,2,1.0\n3,4,0.0\n5,6,10.0\n".replace(",", separator)
    pool = load_pool(settings(write(tmp_path, text)))
    assert (pool.label_names, pool.labels.tolist()) == (("0", "1", "10"), [1, 0, 2])


def test_the_last_column_is_not_the_class_if_it_is_client(tmp_path: Path) -> None:
    path = write(tmp_path, "a,kind,client\n1,x,zoe\n2,y,ada\n")
    pool = load_pool(settings(path))
    assert (pool.columns, pool.label_names, pool.owner_names) == (("a",), ("x", "y"), ("ada", "zoe"))
    assert load_pool(settings(write(tmp_path, "a,client\n1,u\n2,v\n"), label_column="client")).owner is None
    with pytest.raises(PbflError, match="has no feature column besides 'a'"):
        load_pool(settings(tmp_path / "t.csv"))


def test_separators_inside_quoted_names_do_not_count(tmp_path: Path) -> None:
    pool = load_pool(settings(write(tmp_path, '"length, cm";"width, cm";label\n1;2;x\n3;4;y\n')))
    assert (pool.columns, pool.inputs.tolist()) == (("length, cm", "width, cm"), [[1, 2], [3, 4]])


def test_a_name_in_two_forms_is_one_class(tmp_path: Path) -> None:
    path = write(tmp_path, "a,label\n1,Ka\u0308fer\n2,K\u00e4fer \n3,Wal\n")
    pool = load_pool(settings(path))
    assert (pool.label_names, pool.labels.tolist()) == (("K\u00e4fer", "Wal"), [0, 0, 1])
    pool = load_pool(settings(path, labels="Wal,Ka\u0308fer"))
    assert (pool.label_names, pool.labels.tolist()) == (("Wal", "K\u00e4fer"), [1, 1, 0])


def test_a_named_label_column_and_a_shape(tmp_path: Path) -> None:
    path = write(tmp_path, "kind,a,b,c,d\nx,1,2,3,4\ny,5,6,7,8\n")
    pool = load_pool(settings(path, label_column="kind", input_shape="1,2,2"))
    assert pool.inputs.tolist() == [[[[1, 2], [3, 4]]], [[[5, 6], [7, 8]]]]
    with pytest.raises(PbflError, match=r"input-shape = '3,2' needs 6 numbers, .* has 4 feature columns"):
        load_pool(settings(path, label_column="kind", input_shape="3,2"))


def test_all_names_of_the_federation(tmp_path: Path) -> None:
    path = write(tmp_path, "a,label\n1,dog\n2,dog\n")
    pool = load_pool(settings(path, labels="cat, dog,emu"))
    assert (pool.label_names, pool.labels.tolist()) == (("cat", "dog", "emu"), [1, 1])
    with pytest.raises(
        PbflError, match=r"column 'label' has 1 classes; must be 2 to 10000; set labels to all"
    ):
        load_pool(settings(path))
    with pytest.raises(PbflError, match="has the class 'dog'; labels allows cat, emu"):
        load_pool(settings(path, labels="cat,emu"))


def test_a_client_column_gives_natural_clients(tmp_path: Path) -> None:
    path = write(tmp_path, "a,client,label\n1,zoe,x\n2,ada,y\n3,zoe,y\n4,ada,x\n")
    result = settings(path).model_copy(update={"partition": "natural"})
    assert check_data(result, 2).counts.tolist() == [[1, 1], [1, 1]]
    assert check_data(result, 2).natural_ids == ("ada", "zoe")
    pool = load_pool(result)
    assert pool.columns == ("a",)
    assert pool.owner is not None
    assert pool.owner.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no columns"),
        ("a\n1\n", "has 1 columns; must be 2 or more"),
        ("a,label\n", "has no rows"),
        ("a,label\n1,x\n,y\n", "row 2, column 'a': the cell is empty; must be a number"),
        ("a,label\n1,x\nNaN,y\n", "row 2, column 'a': the cell is empty"),
        ("a,label\n1,x\ninf,y\n", "row 2, column 'a': 'inf' is not a finite number"),
        ("a,label\n1,x\n1e39,y\n", "row 2, column 'a': '1e+39' is beyond float32 (3.4e38); must"),
        ("a,b,label\n1,2,x\n3,four,y\n", "row 2, column 'b': 'four' is not a finite number"),
        ("a;b;label\n1,5;2;x\n", "row 1, column 'a': '1,5' is not a finite number"),
        ("a,label\n1,x\n2,\n", "row 2, column 'label': the cell is empty; a class is expected"),
        ("a,label\n1,x\n2\n", "row 2, column 'label': the cell is empty"),
        ("a,client,label\n1,u,x\n2, ,y\n", "row 2, column 'client': the cell is empty; a client is expected"),
        ("a,client,label\n1,1,x\n2,0.5,y\n", "column 'client' holds 0.5, which is not a client"),
        (
            "a,b\n1,0.5\n2,0.7\n",
            "column 'b' holds 0.5, which is not a class; set label-column to the right one",
        ),
        ("1.5,2,3\n1,2,3\n", "'1.5' is not a column name"),
        (",a,label\n0,1,x\n", "column 1 has no name; remove it if it is an index"),
        ("Unnamed: 0,a,label\n0,1,x\n1,1,y\n", "column 'Unnamed: 0' looks like a pandas index"),
        ("a,__index_level_0__,label\n0,1,x\n1,1,y\n", "column '__index_level_0__' looks like a pandas"),
        ("a,a,label\n0,1,x\n", "has two columns 'a'"),
        ("client,label\nz,x\n", "has no feature column besides 'label'"),
        ('a,label\n"1,x\n', "is not a readable table"),
        (b"a,label\n\xff\xfe,1\n", "is not a readable table"),
    ],
)
def test_rejects_wrong_tables(tmp_path: Path, text: str | bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PbflError) as error:
        load_pool(settings(tmp_path / "t.csv"))
    assert message in str(error.value)
    assert str(tmp_path / "t.csv") in str(error.value)


def test_names_the_row_of_a_fault_far_down(tmp_path: Path) -> None:
    rows = [f"{i},{i % 2}" for i in range(9000)]
    rows[8500] = "?,1"
    with pytest.raises(PbflError, match="row 8501, column 'a'"):
        load_pool(settings(write(tmp_path, "\n".join(["a,label", *rows]))))


def test_columns_are_found_by_name_for_prediction(tmp_path: Path) -> None:
    path = write(tmp_path, "b,note,a\n1,hi,2\n3,ho,4\n")
    assert features(path, ["a", "b"]).tolist() == [[2.0, 1.0], [4.0, 3.0]]
    with pytest.raises(PbflError, match="has no column 'c'; it has b, note, a"):
        features(path, ["a", "c"])
    one = write(tmp_path, "a\n3\n4\n")  # no class is needed
    assert features(one, ["a"]).tolist() == features(one, None).tolist() == [[3.0], [4.0]]
    with pytest.raises(PbflError, match="has no feature column; it has label"):
        features(write(tmp_path, "label\nx\n"), None, without=("label",))
    with pytest.raises(PbflError, match="has no columns; they are separated by"):
        features(write(tmp_path, ""), None)


def test_parquet_is_the_same_table(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    columns = {
        "a": [1, -3, 5],
        "flag": [True, False, True],
        "b": [2.5, 400.0, 0.0],
        "label": ["dog", "cat", "dog"],
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    pool = load_pool(settings(tmp_path / "t.parquet"))
    assert pool.inputs.tolist() == [[1.0, 1.0, 2.5], [-3.0, 0.0, 400.0], [5.0, 1.0, 0.0]]
    assert (pool.label_names, pool.labels.tolist()) == (("cat", "dog"), [1, 0, 1])
    assert pool.columns == ("a", "flag", "b")
    for number, (column, message) in enumerate(
        {
            "none": ([1, None, 2], "row 2, column 'x': the cell is empty"),
            "text": (["a", "b", "c"], "row 1, column 'x': 'a' is not a finite number"),
            "date": (np.array(["2020-01-01"] * 3, "datetime64[D]"), "column 'x': '2020-01-01"),
            "list": ([[1], [2], [3]], "column 'x' holds lists; must be numbers or names"),
        }.values()
    ):
        file = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"x": column, "label": ["u", "v", "u"]}), file)
        with pytest.raises(PbflError) as error:
            load_pool(settings(file))
        assert message in str(error.value)
    for column, message in (
        ([1, None, 2], "row 2, column 'client': the cell is empty; a client is expected"),
        ([1.0, 0.5, 2.0], "column 'client' holds 0.5, which is not a client"),
        ([b"u", b"\xff", b"u"], r"row 2, column 'client': b'\xff' is not UTF-8; a client is expected"),
        ([[1], [2], [3]], "column 'client' holds lists; must be numbers or names"),
    ):
        columns = {"x.y": [1, 2, 3], "client": column, "label": [b"u", b"v", b"u"]}
        pq.write_table(pa.table(columns), tmp_path / "client.parquet")
        with pytest.raises(PbflError) as error:
            load_pool(settings(tmp_path / "client.parquet"))
        assert message in str(error.value)
    (tmp_path / "noise.parquet").write_bytes(b"PAR1 no such thing")
    with pytest.raises(PbflError, match="is not a readable table"):
        load_pool(settings(tmp_path / "noise.parquet"))


@pytest.mark.parametrize("column", ["label", "client", "x"])
def test_parquet_of_a_few_bytes_is_not_read_as_terabytes(tmp_path: Path, column: str) -> None:
    """It holds a text once, and that a hundred thousand rows have it."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    count = 100_000
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), ["w" * 10_000_000])
    columns = {"a": np.zeros(count), "label": np.arange(count) % 2, column: long}
    pq.write_table(pa.table(columns), file := tmp_path / "t.parquet", store_schema=False)
    assert file.stat().st_size < 600_000
    with pytest.raises(PbflError, match=r"t\.parquet holds 953,674 MiB, more than this machine's memory"):
        load_pool(settings(file))


def test_a_long_text_among_numbers_takes_its_own_room_alone(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,label\n" + "0.5,x\n" * 3000 + f"{'w' * 100_000},y\n", encoding="utf-8")
    tracemalloc.start()
    try:
        with pytest.raises(PbflError, match=r"row 3001, column 'a': 'w+' is not a finite number"):
            load_pool(DataSettings(dataset="table", data_dir=str(tmp_path / "a.csv")))
        assert tracemalloc.get_traced_memory()[1] < 50e6  # as an array of strings 1.2 GB
    finally:
        tracemalloc.stop()


def test_words_that_pandas_takes_for_missing_are_classes(tmp_path: Path) -> None:
    pool = load_pool(settings(write(tmp_path, "a,label,client\n1,NA,null\n2,None,NA\n3,null,None\n")))
    assert (pool.label_names, pool.labels.tolist()) == (("NA", "None", "null"), [0, 1, 2])
    assert pool.owner_names == ("NA", "None", "null")


def test_a_label_column_or_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "a,label\n1,x\n2,y\n")
    with pytest.raises(PbflError, match=r"^label-column = 'kind': .* has no such column; it has a, label$"):
        load_pool(settings(path, label_column="kind"))
    for other in (tmp_path, write(tmp_path, "a,label\n1,x\n", "t.txt")):
        with pytest.raises(PbflError, match=r"is not a table; must be a file that ends in \.csv"):
            load_pool(settings(other))
