"""Read a pickled dict of NumPy arrays without letting the file run code or access memory.

``numpy.load(allow_pickle=True)`` executes whatever a file says. NumPy's own classes are no safer: an array and a dtype
accept any state from a pickle, and bytes declared as objects become pointers. Here the few names that arrays of numbers
need resolve to the stand-ins below, which check their arguments; every other name is refused before it is called.
"""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.data.sources.files import UNREADABLE, check_memory
from pbfl_flwr.errors import PbflError

_NUMBERS = re.compile(r"[iu][1248]|f[248]")


class _Dtype:
    """Stand-in for a dtype of plain numbers, or of the object that the whole file is."""

    def __init__(self, name: object, align: object = False, copy: object = True) -> None:
        if not isinstance(name, str) or not (_NUMBERS.fullmatch(name) or name in ("O", "O8")):
            shown = repr(name[:40]) if isinstance(name, str) else f"a {type(name).__name__}"
            raise pickle.UnpicklingError(f"it uses the dtype {shown}; only numbers are allowed")
        self.dtype: np.dtype[Any] = np.dtype(name)

    def __setstate__(self, state: object) -> None:
        """Take the byte order; refuse names, fields, a shape and other flags, which change what the bytes mean."""
        order = state[1] if isinstance(state, tuple) and len(state) == 8 else None
        dtype = self.dtype.newbyteorder(order) if order in ("<", ">", "|") else self.dtype
        if dtype.__reduce__()[2] != state:
            raise pickle.UnpicklingError(f"it changes the dtype {dtype}; only numbers are allowed")
        self.dtype = dtype


class _Array:
    """Stand-in for an array: ``value`` is an array of numbers, or the one object in an object array without axes."""

    value: Any

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Build the array from the arguments of NumPy's ``ndarray.__setstate__``."""
        _, shape, dtype, fortran, data = state
        if not all(type(side) is int and side >= 0 for side in shape):
            raise pickle.UnpicklingError("the shape of an array does not consist of whole numbers from 0")
        if not dtype.dtype.hasobject:
            self.value = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if fortran else "C")
        elif isinstance(data, list) and shape == ():
            (self.value,) = data
        else:
            raise pickle.UnpicklingError("it holds an array of objects; only arrays of numbers are allowed")


def _ndarray(*arguments: object) -> None:
    """Stand-in for the class ``ndarray``, which files name and never call."""
    raise pickle.UnpicklingError("it calls ndarray, which could expose memory")


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    return _Array()


def _frombuffer(data: object, dtype: object, shape: object, order: object) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


def _scalar(dtype: object, data: object) -> _Array:
    return _frombuffer(data, dtype, (), "C")


_ALLOWED = {
    ("numpy", "ndarray"): _ndarray,
    ("numpy", "dtype"): _Dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
}


class _Dict(dict[str, Any]):
    """A dict whose keys are strings: hashing deeply nested tuples overflows the stack."""

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise pickle.UnpicklingError(f"a key of a dict is a {type(key).__name__}; it must be a string")
        super().__setitem__(key, value)


# The unpickler in Python, not the faster one in C, where a number in the file sets the memo's length and opcodes cannot
# be removed. An array is a few opcodes, whatever its size.
class _ArrayUnpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it calls {f'{module}.{name}'[:80]}; only NumPy arrays are allowed")
        return _ALLOWED[module, name]

    def load_empty_dictionary(self) -> None:
        self.stack.append(_Dict())

    def refuse_opcode(self) -> None:
        raise pickle.UnpicklingError("it holds a set or an old form of a dict; only NumPy arrays are allowed")

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Array | _Dtype):
            raise pickle.UnpicklingError(f"it sets the state of a {type(self.stack[-1]).__name__}")
        self.stack[-1].__setstate__(state)

    # Python's own handler allocates as many zeros as the file claims before it reads them.
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]
    dispatch[pickle.EMPTY_DICT[0]] = load_empty_dictionary
    dispatch[pickle.BUILD[0]] = load_build
    for _opcode in (
        pickle.EMPTY_SET,
        pickle.ADDITEMS,
        pickle.FROZENSET,
        pickle.DICT,
    ):  # hash what they are given
        dispatch[_opcode[0]] = refuse_opcode


def _content(loaded: Any, budget: list[int]) -> Any:
    """Return what was loaded with arrays in place of stand-ins.

    Args:
        loaded: by :class:`_ArrayUnpickler`.
        budget: bytes that are left. An object counts each time that it is referenced: nested lists of the same list
            would otherwise grow without bound.
    """
    budget[0] -= loaded.nbytes if isinstance(loaded, np.ndarray) else 1
    if budget[0] < 0:
        raise pickle.UnpicklingError("the same object is referenced too often")
    match loaded:
        case _Array():
            return _content(loaded.value, budget)
        case dict():
            return {key: _content(value, budget) for key, value in loaded.items()}
        case list() | tuple():
            return [_content(value, budget) for value in loaded]
    return loaded


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
                version, header = np.lib.format.read_magic(file), np.lib.format
                read_header = (
                    header.read_array_header_1_0 if version == (1, 0) else header.read_array_header_2_0
                )
                shape, _, dtype = read_header(file)
                if shape != () or not dtype.hasobject:
                    raise ValueError(
                        f"it holds {dtype} of shape {shape} where one pickled object is expected"
                    )
                content = _content(_ArrayUnpickler(file).load(), [size])
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
