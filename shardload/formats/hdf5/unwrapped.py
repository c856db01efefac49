"""What does the HDF5 library know that h5py does not tell? Its functions are called past h5py, with h5py's identifiers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import h5py
from h5py._objects import phil

_PLAIN_EDGES = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS


def are_edges_plain(creation: Any) -> bool | None:
    """True if the chunks over a dataset's edge are not filtered, by its creation properties; None if HDF5 does not say."""
    options = number_of("H5Pget_chunk_opts", creation)
    return None if options is None else bool(options & _PLAIN_EDGES)


def number_of(function: str, identifier: Any) -> int | None:
    """The number that a function of HDF5 tells about an object; None if the library does not say.

    Parameters
    ----------
    function : str
        A function of an identifier and a pointer to an unsigned integer.
    identifier : h5py.h5d.DatasetID, h5py.h5p.PropDCID, ...
        The object.
    """
    ask, found = _function(function), ctypes.c_uint()
    with phil:
        return None if ask is None or ask(identifier.id, ctypes.byref(found)) < 0 else found.value


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    """A function of the library that h5py is linked with."""
    try:
        found = getattr(ctypes.CDLL(h5py.h5d.__file__), name)
    except (AttributeError, OSError):
        return None
    found.argtypes, found.restype = (ctypes.c_int64, ctypes.POINTER(ctypes.c_uint)), ctypes.c_int
    return found  # type: ignore[no-any-return]
