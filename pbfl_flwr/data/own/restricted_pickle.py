"""Read a pickled dict of NumPy arrays without letting the file run code or access memory.

``numpy.load(allow_pickle=True)`` executes whatever a file says. NumPy's own classes are no safer: an array and a dtype
accept any state from a pickle, and bytes declared as objects become pointers. Here the few names that arrays of numbers
need resolve to stand-ins that check their arguments; every other name is refused before it is called. What a file can
still do is to end this process, by keys that are nested too deeply to be hashed.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.data.sources.files import UNREADABLE, check_memory
from pbfl_flwr.errors import PbflError

_ALLOWED_DTYPE = re.compile(r"[iu][1248]|f[248]|O8?")  # numbers, and the object that the whole file is


class _Dtype:
    def __init__(self, name: object, align: object = False, copy: object = True) -> None:
        if not isinstance(name, str) or not _ALLOWED_DTYPE.fullmatch(name):
            shown = repr(name[:40]) if isinstance(name, str) else f"a {type(name).__name__}"
            raise pickle.UnpicklingError(f"it uses the dtype {shown}; only numbers are allowed")
        self.dtype: np.dtype[Any] = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        dtype = self.dtype.newbyteorder(state[1])
        if dtype.__reduce__()[2] != state:  # names, fields, a shape and flags change what the bytes mean
            raise pickle.UnpicklingError(f"it changes the dtype {dtype}; only numbers are allowed")
        self.dtype = dtype


class _Array:
    value: Any  # the array, or the one object in an array of objects without axes

    def __init__(self, *arguments: object) -> None:
        """Do nothing, as ``_reconstruct``, whose result gets its state later."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if min(shape, default=0) < 0:
            raise pickle.UnpicklingError("the shape of an array does not consist of whole numbers from 0")
        if not dtype.dtype.hasobject:
            self.value = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if fortran else "C")
        elif isinstance(data, list) and shape == ():
            (self.value,) = data
        else:
            raise pickle.UnpicklingError("it holds an array of objects; only arrays of numbers are allowed")


class _Ndarray(_Array):
    def __init__(self, *arguments: object) -> None:
        raise pickle.UnpicklingError("it calls ndarray, which could expose memory")  # files only name it


class _FromBuffer(_Array):
    def __init__(self, data: object, dtype: object, shape: object, order: object) -> None:
        self.__setstate__((1, shape, dtype, order == "F", data))


class _Scalar(_Array):
    def __init__(self, dtype: object, data: object) -> None:
        self.__setstate__((1, (), dtype, False, data))


_ALLOWED = {
    ("numpy", "ndarray"): _Ndarray,
    ("numpy", "dtype"): _Dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _FromBuffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it calls {f'{module}.{name}'[:80]}; only NumPy arrays are allowed")
        return _ALLOWED[module, name]


def _content(loaded: Any, budget: list[int]) -> Any:
    """Return what was loaded with arrays in place of stand-ins; ``budget`` has the bytes that are left.

    An object counts each time that it is referenced: lists of the same list twice would grow without bound.
    """
    budget[0] -= loaded.nbytes if isinstance(loaded, np.ndarray) else 1
    if budget[0] < 0:
        raise pickle.UnpicklingError("the same object is referenced too often")
    if isinstance(loaded, _Array):
        return _content(loaded.value, budget)
    if isinstance(loaded, dict):
        return {key: _content(value, budget) for key, value in loaded.items()}
    return [_content(value, budget) for value in loaded] if isinstance(loaded, list | tuple) else loaded


def load_arrays(path: Path, key: str, names: Sequence[str]) -> list[NDArray[Any]]:
    """Return entries of the dict that ``np.savez(path, key=dict)`` stored: arrays, or lists of numbers as float64.

    Args:
        path: the file.
        key: of the pickled dict in the file.
        names: keys of the dict.

    Raises:
        PbflError: if the file is unreadable or larger than the memory, lacks a key, or holds anything but arrays and
            lists of numbers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if f"{key}.npy" not in archive.namelist():
                raise PbflError(f"{path} has no array '{key}'")
            size = archive.getinfo(f"{key}.npy").file_size
            check_memory(size, path)
            with archive.open(f"{key}.npy") as file:
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                if shape != () or not dtype.hasobject:
                    raise ValueError(
                        f"it holds {dtype} of shape {shape} where one pickled object is expected"
                    )
                start = file.tell()
                if any(
                    "PUT" in code.name and (place or 0) > size for code, place, _ in pickletools.genops(file)
                ):
                    raise pickle.UnpicklingError("it asks for a memo longer than the file")
                file.seek(start)
                content = _content(_Unpickler(file).load(), [size])
        if not isinstance(content, dict) or not content.keys() >= set(names):
            raise ValueError(f"it must hold a dict with {' and '.join(names)}")
        values = [content[name] for name in names]
        # As float64: in an array of strings every entry takes the size of the longest.
        return [value if isinstance(value, np.ndarray) else np.asarray(value, np.float64) for value in values]
    except (
        *UNREADABLE,
        TypeError,
        LookupError,
        AttributeError,
        struct.error,
        pickle.UnpicklingError,
    ) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PbflError(f"{path} is refused: {reason}") from error
