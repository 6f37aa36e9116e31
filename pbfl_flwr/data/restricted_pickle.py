"""Read a pickled object array without letting the file run code.

``numpy.load(allow_pickle=True)`` executes whatever a file says. Here only what NumPy needs to rebuild arrays
can be named by the file; everything else is refused before it is called.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from pbfl_flwr.errors import PbflError

_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # bytes in pickles of protocol 2 and below
    *((module, name) for module in _MULTIARRAY for name in ("_reconstruct", "scalar")),
    *((module, "_frombuffer") for module in _NUMERIC),
    *(
        ("builtins", name)
        for name in ("dict", "list", "tuple", "bytes", "bytearray", "int", "float", "str", "bool")
    ),
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it wants to call {module}.{name}, and only NumPy arrays are allowed"
            )
        return super().find_class(module, name)


def load_object_array(path: Path, key: str) -> Any:
    """Return the Python object that ``np.savez(path, key=object)`` stored; arrays, dicts and lists only.

    Raises:
        PbflError: if the file is unreadable, has no such key, or names anything but NumPy arrays.
    """
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            return _load(file)
    except KeyError as error:
        raise PbflError(f"{path} has no array '{key}'") from error
    except (OSError, EOFError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise PbflError(f"{path} is not a readable dataset file: {error}") from error
    except (RuntimeError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError) as error:
        raise PbflError(f"{path} is refused: {error}") from error


def _load(file: IO[bytes]) -> Any:
    version = np.lib.format.read_magic(file)
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read_header(file)
    if shape != () or not dtype.hasobject:
        raise ValueError(f"it holds {dtype} of shape {shape} where one pickled object is expected")
    content = _ArrayUnpickler(file).load()
    return content.item()  # an object array of shape ()
