"""Files of other tools that hold pickles: what NumPy writes is read, and what wants more is refused in a line."""

import base64
import json
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbfl_flwr.data.own.restricted_pickle import load_arrays
from pbfl_flwr.errors import PbflError

HEADER = np.lib.format.magic(1, 0) + (118).to_bytes(2, "little")
HEADER += "{'descr': '|O', 'fortran_order': False, 'shape': (), }".ljust(117).encode() + b"\n"
ROOT = Path(__file__).parents[3]

# Of {"x": np.asfortranarray(np.arange(6, dtype="f4").reshape(2, 3)), "y": np.array([2, 1])}, by np.savez_compressed.
BY_NUMPY_1_26 = (
    "P)h>@EdT%j2mk;8ApjF%P~!jp|NsC0|NjU86aZvlbYU)TaCrd$5CHT600000002V)00000005<pOH0E*6oqdRpYc`S^&MX%h0>LaB0>WN7Y0)a2"
    "z4QnS4p8wdM6Vx*g`k8?b<)!Kh;UnF2tn=W`=v_-1B|vkM|Ex9K6E2?6{##<ZDUp*5sljHv&S5>AwWTaTEL2Y=tiKL(lBEY*q?IsVDtUVqdWRsNI"
    "Q6c0k-xJ8IFUNr)MXFT}M2KcpnGsfduJMBmANk<(y+e3i3M7~+h9vx>$QCLxE$9aqG;Iu8J~GR}`jLtHR$QPG4t$Gk3zx~|`SGo_bSp}1s?pK-Z"
    "|D@q!9!&MKwl(ObAM9#o<hR}FT_`nS>>uy}(X41W7;P$lp26ujU1I1lyRLw&wRR!o**in-K;7i3k#XT$Cjd6bpJxHL31|Fr*0Ul3~%`%=ONXfuch"
    "V=fz&a81Y$7eL)CNG{-ys#pZ;-yvk0Z>Z;0xbhA000080000X025+R;zI!d0Q3O>00;m800000000000Du7i0001FVRT_GZg6=}O9ci10000100"
    "96t0001e0RR9100"
)

ARRAYS: dict[str, Any] = {
    "C order": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "Fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "a part of an array": np.arange(24).reshape(4, 6)[::2, 1:5:2],
    "big-endian": np.arange(5, dtype=">i4"),
    "no samples": np.zeros((0, 3, 4), np.float32),
    "no axis": np.array(2.5),
    "half": np.arange(3, dtype=np.float16),
    "bytes": np.arange(256, dtype=np.uint8),
    "a scalar": np.float32(1.5),
    "a big-endian scalar": np.array([7], dtype=">i8")[0],
}
LISTS: dict[str, Any] = {
    "numbers": [[0, 1, 255], [70_000, -1, 2**40]],
    "a tuple": (True, 0.5),
    "arrays": [np.arange(2), np.arange(2.0)],
    "scalars": [np.int8(1), np.float64(2)],
    "nothing": [],
}


def store(path: Path, body: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.npy", HEADER + body)
    return path


def assert_same(array: np.ndarray[Any, Any], expected: Any) -> None:
    assert type(array) is np.ndarray
    assert array.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=")
    assert array.shape == expected.shape
    assert np.array_equal(array, expected)


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("name", [*ARRAYS, *LISTS])
def test_reads_what_numpy_writes(tmp_path: Path, name: str, protocol: int) -> None:
    value = ARRAYS[name] if name in ARRAYS else LISTS[name]
    content = {"x": value, "y": value, "more": "text"}  # the second one of a dtype refers to the first
    body = pickle.dumps(np.array(content, dtype=object), protocol=protocol)
    if protocol == 3:  # names end with a line there
        body = body.replace(b"numpy._core", b"numpy.core")  # as NumPy 1 calls it
    for array in load_arrays(store(tmp_path / "0.npz", body), "data", ("x", "y")):
        assert_same(array, value if name in ARRAYS else np.array(value, np.float64))


def test_reads_files_of_numpy_1_and_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "1.npz").write_bytes(base64.b85decode(BY_NUMPY_1_26))
    x, y = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)), np.array([2, 1])
    np.savez_compressed(tmp_path / "2.npz", data=np.array({"x": x, "y": y}))
    for name in ("1.npz", "2.npz"):
        for array, expected in zip(load_arrays(tmp_path / name, "data", ("x", "y")), (x, y), strict=True):
            assert_same(array, expected)


def test_refuses_a_file_larger_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "0.npz", data=np.array({"x": np.zeros(2**21, np.uint8)}))
    assert (tmp_path / "0.npz").stat().st_size < 2**14
    monkeypatch.setattr("os.sysconf", lambda name: 1024)
    with pytest.raises(PbflError, match=r"0\.npz holds 2 MiB, more than this machine's memory of 1 MiB"):
        load_arrays(tmp_path / "0.npz", "data", "x")


# hostile files ----------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def number(value: int) -> bytes:
    return pickle.LONG1 + bytes([9]) + value.to_bytes(9, "little", signed=True)


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def row(*parts: bytes) -> bytes:
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + row(*arguments) + pickle.REDUCE


def raw(data: bytes) -> bytes:
    return pickle.BINBYTES + struct.pack("<I", len(data)) + data


NO, YES, NONE, BUILD = pickle.NEWFALSE, pickle.NEWTRUE, pickle.NONE, pickle.BUILD
ADDRESS = raw(b"A" * 8)
NDARRAY = named("numpy", "ndarray")
MULTIARRAY = "numpy.core.multiarray"


def dtype(name: str, *state: bytes) -> bytes:
    made = call(named("numpy", "dtype"), text(name), NO, YES)
    return made + row(*state) + BUILD if state else made


def state_of(order: str = "<", subarray: bytes = NONE, flags: int = 0) -> Any:
    minus = number(-1)
    return number(3), text(order), subarray, NONE, NONE, minus, minus, number(flags)


OBJECTS = dtype("O8", *state_of("|", flags=63))
FLOATS = dtype("f8", *state_of())


def array(kind: bytes, data: bytes, shape: bytes = row(number(1))) -> bytes:
    made = call(named(MULTIARRAY, "_reconstruct"), NDARRAY, row(number(0)), raw(b"b"))
    return made + row(number(1), shape, kind, NO, data) + BUILD


def wrapped(content: bytes) -> bytes:
    """An object array of no axis, as np.savez makes one of a dict."""
    return array(OBJECTS, pickle.EMPTY_LIST + content + pickle.APPEND, row())


def put(index: int) -> bytes:
    return pickle.BINPUT + bytes([index])


def get(index: int) -> bytes:
    return pickle.BINGET + bytes([index])


DOUBLED = pickle.EMPTY_LIST + put(0) + pickle.POP
for depth in range(60):
    DOUBLED += pickle.EMPTY_LIST + 2 * (get(depth) + pickle.APPEND) + put(depth + 1) + pickle.POP

OBJECT_ARRAY = "an array of objects; only arrays of numbers are allowed"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "an array over an address": (call(NDARRAY, row(), text("O"), ADDRESS), "calls ndarray"),
    "objects that are not marked": (array(dtype("O8", *state_of("|")), ADDRESS), "changes the dtype object"),
    "objects as bytes": (array(OBJECTS, ADDRESS), OBJECT_ARRAY),
    "an object from bytes": (call(named(MULTIARRAY, "scalar"), OBJECTS, ADDRESS), OBJECT_ARRAY),
    "objects from a buffer": (
        call(named("numpy._core.numeric", "_frombuffer"), ADDRESS, OBJECTS, row(number(1)), text("C")),
        OBJECT_ARRAY,
    ),
    "fields": (dtype("V8"), "uses the dtype 'V8'; only numbers are allowed"),
    "a dtype of a dtype": (
        call(named("numpy", "dtype"), OBJECTS, NO, YES), "uses the dtype a _Dtype"
    ),
    "a dtype within": (
        dtype("f8", *state_of(subarray=row(OBJECTS, row(number(1))))), "changes the dtype float64"
    ),
    "flags": (dtype("f8", *state_of(flags=1)), "changes the dtype float64"),
    "too few bytes": (array(FLOATS, ADDRESS, row(number(10**15))), "cannot reshape array of size 1"),
    "fewer than none": (array(FLOATS, ADDRESS, row(number(-1))), "does not consist of whole numbers from 0"),
    "another class": (
        call(named(MULTIARRAY, "_reconstruct"), named("numpy", "dtype"), row(), raw(b"b")), "another class"
    ),
    "a function that is changed": (
        named(MULTIARRAY, "_reconstruct") + row(NONE, pickle.EMPTY_DICT) + BUILD, "missing 1 required positional"
    ),
    "a class that is changed": (named("numpy", "dtype") + pickle.EMPTY_DICT + BUILD, "missing 1 required positional"),
    "bytes without end": (call(named("builtins", "bytes"), number(10**15)), "calls builtins.bytes; only NumPy arrays"),
    "an attribute of a function": (named(MULTIARRAY, "_reconstruct.__globals__"), "only NumPy arrays are allowed"),
    "a set": (pickle.EMPTY_SET, "must hold a dict with x"),
    "a long memo": (NONE + pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 2), "a memo longer than the file"),
    "a deep list": (
        wrapped(10**5 * pickle.EMPTY_LIST + (10**5 - 1) * pickle.APPEND), "maximum recursion depth"
    ),
    "lists that double": (wrapped(DOUBLED + get(60)), "referenced too often"),
    "an array many times": (
        wrapped(
            pickle.EMPTY_LIST + array(FLOATS, raw(bytes(8000)), row(number(1000))) + put(0) + pickle.APPEND
            + 1000 * (get(0) + pickle.APPEND)
        ),
        "referenced too often",
    ),
    "an array in itself": (
        call(named(MULTIARRAY, "_reconstruct"), NDARRAY, row(number(0)), raw(b"b")) + put(0)
        + row(number(1), row(), OBJECTS, NO, pickle.EMPTY_LIST + get(0) + pickle.APPEND) + BUILD,
        "referenced too often",
    ),
    "more bytes than there are": (pickle.BYTEARRAY8 + struct.pack("<Q", 2**35), "bytes in a bytearray8, but only 1"),
    "nothing": (b"", "pickle exhausted before seeing STOP"),
}  # fmt: skip

ASK = """
import json, sys
from pathlib import Path
from pbfl_flwr.data.own.restricted_pickle import load_arrays
from pbfl_flwr.errors import PbflError

for name in sorted(Path(sys.argv[1]).iterdir()):
    print(json.dumps([name.stem]), end="", flush=True)
    try:
        load_arrays(name, "data", "x")
        print(json.dumps("was read"), flush=True)
    except PbflError as error:
        print(json.dumps(str(error)), flush=True)
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of every hostile file, by a process of its own: one that dies must not take the tests with it."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, (body, _) in HOSTILE.items():
        store(folder / f"{name}.npz", b"\x80\x05" + body + pickle.STOP * bool(body))
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = (line.partition("]") for line in done.stdout.splitlines())
    return {json.loads(f"{name}]")[0]: verdict for name, _, verdict in lines}


@pytest.mark.parametrize("name", HOSTILE)
def test_refuses_a_hostile_file_in_one_line(verdicts: dict[str, str], name: str) -> None:
    verdict = json.loads(verdicts.get(name) or '"the process died"')
    assert f"{name}.npz is refused: " in verdict
    assert HOSTILE[name][1] in verdict
    assert "\n" not in verdict


@pytest.mark.parametrize("protocol", [3, 5])
def test_survives_any_changed_byte(tmp_path: Path, protocol: int) -> None:
    content = {"x": np.arange(4.0).reshape(2, 2), "y": [np.int8(1), np.array(2)]}
    body = pickle.dumps(np.array(content, dtype=object), protocol=protocol)
    load_arrays(store(tmp_path / "0.npz", body), "data", ("x", "y"))
    refused = 0
    for position in range(len(body)):
        for bits in (0xFF, 1 << position % 8):
            changed = body[:position] + bytes([body[position] ^ bits]) + body[position + 1 :]
            try:
                load_arrays(store(tmp_path / "0.npz", changed), "data", ("x", "y"))
            except PbflError:
                refused += 1
    assert refused > len(body)
