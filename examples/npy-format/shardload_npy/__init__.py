"""How do I obtain values from a NumPy ``.npy`` file? By mapping it into memory.

1. `read_header` takes the header apart, as NumPy's format specification (NEP 1) has it, and compares the file's length with it.
   Nothing in the file is ever unpickled.
2. `NpySource` maps the values, in C or Fortran order, and copies regions out of the map; NumPy swaps bytes on the way.
"""

from __future__ import annotations

import ast
import math
import os
from typing import Any

import numpy as np

from shardload.formats import (
    STRICT,
    Access,
    ArrayInfo,
    Format,
    OpenFile,
    Region,
    Source,
    check_request,
    native_dtype,
    refusal,
    state_of,
    unaddressable,
)

__all__ = ["FORMAT", "NpyFormat", "NpySource", "read_header"]

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 1 << 16  # NumPy's own is some hundred bytes, unless there are many fields
_NAME = "/"  # the file is itself one array


def read_header(descriptor: int) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Type, shape, whether in Fortran order, and where the values begin.

    Raises
    ------
    ValueError
        If the header is damaged, or the file is not as long as it says.
    """
    head = os.pread(descriptor, 12, 0)
    if len(head) < 10 or not head.startswith(_MAGIC):
        raise ValueError(f"it starts with {head[:6]!r}, expected {_MAGIC!r}")
    version = (head[6], head[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version[0]}.{version[1]} of the format; 1.0 to 3.0 are known")
    n = 2 if version == (1, 0) else 4
    start, nbytes = 8 + n, int.from_bytes(head[8 : 8 + n], "little")
    if nbytes > _LONGEST_HEADER:
        raise ValueError(f"a header of {nbytes} bytes; {_LONGEST_HEADER} are the most")
    text = os.pread(descriptor, nbytes, start)
    if len(text) < nbytes:
        raise ValueError("the file ends in its header")
    try:
        found = ast.literal_eval(text.decode("utf-8" if version == (3, 0) else "latin1").strip())
        dtype = np.lib.format.descr_to_dtype(found["descr"])
        shape, is_fortran = found["shape"], found["fortran_order"]
    except (KeyError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"the header cannot be understood ({type(error).__name__}: {error})") from None
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"the shape is {shape!r}; expected a tuple of lengths")
    if not isinstance(is_fortran, bool):
        raise ValueError(f"fortran_order is {is_fortran!r}; expected True or False")
    start += nbytes
    expected, size = start + math.prod(shape) * dtype.itemsize, os.fstat(descriptor).st_size
    if not dtype.hasobject and size != expected:
        raise ValueError(f"the file has {size} bytes, expected {expected} for an array of {shape} {dtype}")
    return dtype, shape, is_fortran, start


class NpySource(Source):
    """One open ``.npy`` file.

    Parameters
    ----------
    path : str
        Of the file.
    access : Access
        What the caller allows.
    """

    def __init__(self, path: str, access: Access = STRICT) -> None:
        self._path, self._array = path, None
        self._file = os.fdopen(access.open_file(path), "rb", buffering=0)
        self._opened_in = state_of(self._file.fileno())
        try:
            dtype, shape, is_fortran, start = read_header(self._file.fileno())
            refused = refusal(dtype) or unaddressable(shape, None)
            self._info = ArrayInfo(
                path=path,
                dataset=_NAME,
                format="NumPy .npy",
                shape=shape,
                dtype=dtype.name if refused else native_dtype(dtype).name,
                nbytes_stored=None if dtype.hasobject else math.prod(shape) * dtype.itemsize,
                refused=refused,
            )
            self._dtype, self._nbytes = native_dtype(dtype), os.fstat(self._file.fileno()).st_size
            if refused is None:
                self._array = self._map(dtype, shape, "F" if is_fortran else "C", start)
        except BaseException:
            self.close()
            raise

    def _map(self, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any, start: int) -> np.ndarray[Any, Any]:
        if math.prod(shape) == 0:  # nothing can be mapped
            return np.empty(shape, dtype)
        return np.memmap(self._file, dtype, "r", start, shape, order)

    @property
    def info(self) -> ArrayInfo:
        """Shape, dtype and the rest."""
        return self._info

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values, in native byte order."""
        return self._dtype

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        """Copy the values of `region` out of the map."""
        check_request(self._info, self._dtype, region, out)
        if self._array is None:
            raise ValueError(f"{self._info} was closed")
        # To look at a map of what was cut off would end the process.
        if region.size and os.fstat(self._file.fileno()).st_size < self._nbytes:
            raise OSError(f"the file was cut since it was opened, from {self._nbytes} bytes")
        out[...] = self._array[region.slices()]

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """What `numpy.load` gives for these slices."""
        return np.asarray(np.load(self._path, mmap_mode="r" if region.size else None, allow_pickle=False)[region.slices()])

    def state(self) -> tuple[int, ...] | None:
        """Of the open file."""
        return None if self._file.closed else state_of(self._file.fileno())

    def opened_in(self) -> tuple[int, ...] | None:
        """As it was before the header was read."""
        return self._opened_in

    def close(self) -> None:
        """Give back the map and the file."""
        self._array = None
        self._file.close()


class NpyFormat(Format):
    """NumPy's ``.npy`` files, each of which is one array."""

    name = "NumPy .npy"

    def claims_path(self, path: str) -> bool:
        """Whether the file begins as NumPy's do."""
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read(len(_MAGIC)) == _MAGIC
        except OSError:
            return False

    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        """A file, of which nothing is read yet."""
        return NpyFile(path, access)


class NpyFile(OpenFile):
    """A ``.npy`` file. Its one array opens it.

    Parameters
    ----------
    path : str
        Of the file.
    access : Access
        What the caller allows.
    """

    def __init__(self, path: str, access: Access) -> None:
        self._path, self._access = path, access

    def list_arrays(self) -> list[ArrayInfo]:
        """The one array."""
        source = self.open(_NAME)
        source.close()
        return [source.info]

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Source:
        """Open the one array, ``"/"``."""
        if dataset != _NAME:
            raise KeyError(dataset)
        return NpySource(self._path, self._access)


FORMAT = NpyFormat()
