"""Which datasets may be read without the HDF5 library, and how? Only those whose bytes in the file are surely the values.

1. `stored_file` accepts a file if HDF5 itself would only read those bytes: a plain file that is opened for reading only. (A
   writer keeps chunks in memory that are not in the file yet.)
2. `swap_size` compares the dataset's type in the file with the two types (one per byte order) that NumPy knows.
3. If there is any doubt, this module refuses, and the library reads.

Reads are positional, on a duplicate of HDF5's own descriptor. So they read the same open file even if it was renamed or
replaced since, threads share no file offset, and no lock of HDF5 or Python is held. If the caller closes the file during a
load, the duplicate's number cannot come to mean another file.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import h5py
import ml_dtypes
import numpy as np

from shardload.storage.local import LocalFile

_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def open_to_read(path: str) -> h5py.File:
    """``h5py.File(path, "r")``. HDF5 does not try again if a signal comes while it opens or locks the file."""
    while True:
        try:
            return h5py.File(path, "r")
        except InterruptedError:
            continue


def stored_file(file: h5py.File) -> LocalFile | None:
    """The bytes of a plain file that is open for reading only; None for any other file."""
    below = file.id
    is_plain = below.get_access_plist().get_driver() == h5py.h5fd.SEC2
    is_plain = is_plain and below.get_intent() == h5py.h5f.ACC_RDONLY  # not SWMR either
    return LocalFile(os.dup(below.get_vfd_handle())) if is_plain else None


def has_signature(descriptor: int) -> bool:
    """True if an open file is one of HDF5."""
    file = LocalFile(os.dup(descriptor))
    return signature_at(file.read_at_most, lambda: file.nbytes) is not None


def signature_at(read: Callable[[int, int], bytes], nbytes: Callable[[], int]) -> int | None:
    """Where HDF5's signature is: at byte 0, 512, 1024, 2048, ... None if nowhere."""
    at = 0
    while at == 0 or at < nbytes():
        if read(at, len(_SIGNATURE)) == _SIGNATURE:
            return at
        at = 2 * at or 512
    return None


def file_number(identifier: Any) -> Any:
    """HDF5's number of the file that an object is in; another one than that of the open file, if one is mounted in it."""
    return h5py.h5o.get_info(identifier).fileno


BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


@functools.lru_cache(maxsize=64)
def type_in_file(dtype: np.dtype[Any]) -> Any:
    """HDF5's type for values of `dtype`. A bfloat16 is a float of 16 bits with the exponent of a float32."""
    if dtype not in (BFLOAT16, BFLOAT16.newbyteorder()):
        return h5py.h5t.py_create(dtype, logical=True)
    kind = (h5py.h5t.IEEE_F16LE if dtype.isnative == (sys.byteorder == "little") else h5py.h5t.IEEE_F16BE).copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    return kind


def type_of_values(kind: Any) -> np.dtype[Any]:
    """NumPy's type for values of a type in the file: h5py's, which takes bfloat16 for float32, but for that."""
    found: np.dtype[Any] = kind.dtype
    for one in (BFLOAT16, BFLOAT16.newbyteorder()) if kind.get_class() == h5py.h5t.FLOAT and kind.get_size() == 2 else ():
        found = one if kind.equal(type_in_file(one)) else found
    return found


def swap_size(in_file: Any, dtype: np.dtype[Any]) -> int | None:
    """How bytes of the type `in_file` (h5py's identifier) become values of `dtype`, a native type.

    Returns
    -------
    int or None
        0: they are the same. n > 1: reverse each group of n bytes (the real or imaginary part of a complex number is a group).
        None: HDF5 has to convert them, or may have to.
    """
    part = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    for is_native in (True, False):
        if any(in_file.equal(one) for one in _known_types(dtype, is_native)):
            return 0 if is_native or part == 1 else part
    return None


@functools.lru_cache(maxsize=64)
def _known_types(dtype: np.dtype[Any], is_native: bool) -> tuple[Any, ...]:
    """HDF5's types in the file whose values NumPy can take as they are, or with their bytes reversed."""
    known = [type_in_file(dtype if is_native else dtype.newbyteorder())]
    order = "LE" if is_native == (sys.byteorder == "little") else "BE"
    if dtype.kind == "u":
        known.append(getattr(h5py.h5t, f"STD_B{8 * dtype.itemsize}{order}"))  # bit fields
    if dtype.kind == "c":
        name = f"COMPLEX_IEEE_F{4 * dtype.itemsize}{order}"  # the complex type of HDF5 2.0
        known += [getattr(h5py.h5t, name)] if hasattr(h5py.h5t, name) else []
    return tuple(known)
