"""Read a pickled object array without letting the file run code or access memory.

``numpy.load(allow_pickle=True)`` executes whatever a file says. NumPy's own classes are no safer: an array and a dtype
accept any state from a pickle, and bytes declared as objects become pointers. Here a file gets neither: the names that
it may use resolve to stand-ins, which only record the arguments; afterwards arrays of plain numbers and text are built
from these records. Everything else is refused before it is called.
"""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.data.sources.files import UNREADABLE, check_memory
from pbfl_flwr.errors import PbflError

_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_BUILTINS = ("builtins", "__builtin__")
_PLAIN = re.compile(r"\?|b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SU][1-9]\d{0,5}")
_OBJECTS = ("O", "O4", "O8")
# The opcodes in pickles of NumPy arrays in dicts and lists.
_OPCODES = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1,
    pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8,
    pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8, pickle.BYTEARRAY8,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
    pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE,
    pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BUILD,
)  # fmt: skip


class _Dtype:
    """Stand-in for a dtype: plain numbers, text, or objects, whose arrays are built from lists."""

    def __init__(self, name: object, align: object = False, copy: object = True) -> None:
        if not isinstance(name, str) or not (_PLAIN.fullmatch(name) or name in _OBJECTS):
            shown = repr(name[:40]) if isinstance(name, str) else f"a {type(name).__name__}"
            raise pickle.UnpicklingError(f"it uses the dtype {shown}; only numbers and text are allowed")
        self.dtype: np.dtype[Any] = np.dtype(object if name in _OBJECTS else name)

    def restore(self, state: object) -> None:
        """Record the byte order; refuse a state with names, fields, other flags or a shape."""
        order = state[1] if isinstance(state, tuple) and len(state) == 8 else None
        dtype = self.dtype.newbyteorder(order) if order in ("<", ">", "|") else self.dtype
        if dtype.__reduce__()[2] != state:
            raise pickle.UnpicklingError(
                f"it changes the dtype {self.dtype}; only numbers and text are allowed"
            )
        self.dtype = dtype


class _Array:
    """Stand-in for an array, with arguments that :class:`_Found` has yet to check."""

    def __init__(self, data: Any, dtype: Any, shape: Any = (), order: Any = "C") -> None:
        self.data, self.dtype, self.shape, self.order = data, dtype, shape, order

    def restore(self, state: object) -> None:
        """Record the arguments of an array's ``__setstate__``."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("the state of an array is not in NumPy's format")
        _, self.shape, self.dtype, fortran, self.data = state
        self.order = "F" if fortran else "C"


class _Scalar(_Array):
    """Stand-in for a NumPy scalar."""


class _Dict(dict[str | int, Any]):
    """A dict whose keys are str or int: hashing deeply nested tuples overflows the stack."""

    def __setitem__(self, key: str | int, value: Any) -> None:
        if not isinstance(key, str | int):
            raise pickle.UnpicklingError(
                f"a key of a dict is a {type(key).__name__}; allowed are strings and whole numbers"
            )
        super().__setitem__(key, value)


def _ndarray(*_: object) -> None:
    """Stand-in for the class ``ndarray``, which files name and never call."""
    raise pickle.UnpicklingError("it calls ndarray, which could expose memory; only NumPy arrays are allowed")


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    if kind is not _ndarray:
        raise pickle.UnpicklingError("it uses another class of arrays; only NumPy arrays are allowed")
    return _Array(None, None)


def _frombuffer(data: object, dtype: object, shape: object, order: object) -> _Array:
    return _Array(data, dtype, shape, order)


def _scalar(dtype: object, data: object) -> _Scalar:
    return _Scalar(data, dtype)


def _encode(text: object, encoding: object) -> object:
    """Return text unchanged: bytes in pickles of protocol 2, which :class:`_Found` encodes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError("it uses another encoding than latin1; only bytes are allowed")
    return text


def _bytes() -> bytes:
    """Return empty bytes, which pickles of protocol 2 write as a call of ``bytes``."""
    return b""


_GIVEN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ndarray,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    **{(module, "bytes"): _bytes for module in _BUILTINS},
    **{(module, "_reconstruct"): _reconstruct for module in _MULTIARRAY},
    **{(module, "scalar"): _scalar for module in _MULTIARRAY},
    **{(module, "_frombuffer"): _frombuffer for module in _NUMERIC},
}


# The unpickler in Python, not the faster one in C, where a number in the file sets the memo's length and opcodes cannot
# be removed. An array is a few opcodes, whatever its size.
class _ArrayUnpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GIVEN:
            raise pickle.UnpicklingError(f"it calls {f'{module}.{name}'[:80]}; only NumPy arrays are allowed")
        return _GIVEN[module, name]

    def load_empty_dictionary(self) -> None:
        self.stack.append(_Dict())

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not callable(function) or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError(
                f"it calls a {type(function).__name__}; only NumPy arrays are allowed"
            )
        try:
            self.stack.append(function(*arguments))
        except TypeError as error:
            raise pickle.UnpicklingError(
                f"it calls NumPy with arguments that build no array ({error})"
            ) from error

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Array | _Dtype):
            raise pickle.UnpicklingError(
                f"it sets the state of a {type(self.stack[-1]).__name__}; only NumPy arrays may have one"
            )
        self.stack[-1].restore(state)

    # Python's own handler allocates as many zeros as the file claims before it reads them.
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]
    dispatch[pickle.EMPTY_DICT[0]] = load_empty_dictionary
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build


class _Found:
    """Builds the content from the stand-ins.

    Args:
        size: of the file in bytes, the limit for the content. An object that is referenced several times counts each
            time: nested lists of the same list would otherwise grow without bound.
    """

    def __init__(self, size: int) -> None:
        self._room = size

    def plain(self, found: Any) -> Any:
        """Return the content with stand-ins replaced by arrays, also within dicts, lists and tuples."""
        self._take(1)
        match found:
            case _Scalar():
                return self._array(found)[()]
            case _Array():
                return self._array(found)
            case dict():
                return {key: self.plain(value) for key, value in found.items()}
            case list() | tuple():
                return type(found)(self.plain(each) for each in found)
        return found

    def _array(self, found: _Array) -> NDArray[Any]:
        shape, data = found.shape, found.data
        if not isinstance(found.dtype, _Dtype) or not isinstance(shape, tuple):
            raise pickle.UnpicklingError("an array has no dtype or no shape")
        if not all(type(side) is int and side >= 0 for side in shape):
            raise pickle.UnpicklingError("the shape of an array does not consist of whole numbers from 0")
        values: NDArray[Any]
        if found.dtype.dtype.hasobject:
            values = self._objects(data)
        else:
            values = np.frombuffer(
                data.encode("latin1") if isinstance(data, str) else data, found.dtype.dtype
            )
            self._take(values.nbytes)
        return values.reshape(shape, order=found.order)

    def _objects(self, data: object) -> NDArray[Any]:
        if not isinstance(data, list):
            raise pickle.UnpicklingError(
                "it holds memory addresses of objects; only NumPy arrays are allowed"
            )
        values = np.empty(len(data), dtype=object)
        for place, each in enumerate(data):
            values[place] = self.plain(each)
        return values

    def _take(self, room: int) -> None:
        self._room -= room
        if self._room < 0:
            raise pickle.UnpicklingError("the same object is referenced too often")


def load_object_array(path: Path, key: str) -> Any:
    """Return the Python object that ``np.savez(path, key=object)`` stored; arrays, dicts and lists only.

    Raises:
        PbflError: if the file is unreadable or larger than the memory, lacks the key, or names anything but NumPy
            arrays of plain numbers and text.
    """
    name = f"{key}.npy"
    try:
        with zipfile.ZipFile(path) as archive:
            if name not in archive.namelist():
                raise PbflError(f"{path} has no array '{key}'")
            size = archive.getinfo(name).file_size
            check_memory(size, path)
            with archive.open(name) as file:
                return _load(file, size)
    except (
        *UNREADABLE,
        TypeError,
        AttributeError,
        IndexError,
        struct.error,
        pickle.UnpicklingError,
    ) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PbflError(f"{path} is refused: {reason}") from error


def _load(file: IO[bytes], size: int) -> Any:
    version = np.lib.format.read_magic(file)
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read_header(file)
    if shape != () or not dtype.hasobject:
        raise ValueError(f"it holds {dtype} of shape {shape} where one pickled object is expected")
    try:
        found = _ArrayUnpickler(file).load()
    except EOFError as error:
        raise pickle.UnpicklingError("it is truncated") from error
    except KeyError as error:
        raise pickle.UnpicklingError(f"it has the opcode {error}, which no array needs") from error
    content = _Found(size).plain(found)
    if not isinstance(content, np.ndarray) or content.shape != ():
        raise ValueError("it holds no array where one pickled object is expected")
    return content.item()  # an object array of shape ()
