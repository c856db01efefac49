"""Which values can JAX hold, and is a buffer fit for them?"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardload.formats.contract.array import ArrayInfo
from shardload.planning.region import Region

_MOST_ELEMENTS, _WIDEST = 2**63 - 1, 16  # bytes of complex128
_MOST_AXES = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32


_KINDS = {
    "f": "extended precision floats, which JAX does not have",
    "c": "extended precision complex numbers, which JAX does not have",
    "S": "strings",
    "U": "strings",
    "T": "variable-length strings",
    "O": "Python objects",
    "M": "dates: load them as the integers they are stored as",
    "m": "time spans: load them as the integers they are stored as",
}


_NOT_IN_JAX = re.compile("float6|b?complex")


def refusal(dtype: np.dtype[Any]) -> str | None:
    """Why values of `dtype` cannot become a `jax.Array`, in words that follow "holds"; None if they can.

    Booleans, integers, floats and complex numbers that JAX has are accepted in any byte order. So are the types of `ml_dtypes`
    (``bfloat16`` and smaller floats), which have the same NumPy kind as records.

    Examples
    --------
    >>> refusal(np.dtype(">f8")) is None
    True
    >>> refusal(np.dtype("S4"))
    'strings'
    """
    if dtype.kind in "biu" or (dtype.kind in "fc" and dtype.itemsize <= {"f": 8, "c": 16}[dtype.kind]):
        return None
    if dtype.subdtype is not None:
        return f"small arrays of shape {dtype.subdtype[1]} as elements"
    if dtype.names is not None:
        return f"records with fields {', '.join(dtype.names)}"
    if dtype.type.__module__ == "ml_dtypes":
        return f"numbers of type {dtype.name}, which JAX does not have" if _NOT_IN_JAX.match(dtype.name) else None
    return _KINDS.get(dtype.kind, "raw bytes without a type")


def is_added(dtype: np.dtype[Any]) -> bool:
    """True for a type that another package has added to NumPy: bfloat16 and smaller floats, which may have the kind of NumPy's.

    >>> is_added(np.dtype("float16"))
    False
    """
    return dtype.isbuiltin == 2


def dtype_text(dtype: np.dtype[Any]) -> str:
    """A type as text of which `np.dtype` makes it again. Added types have a name alone, without a byte order.

    >>> dtype_text(np.dtype(">f8"))
    '>f8'
    """
    return dtype.name if is_added(dtype) else dtype.str


def unaddressable(shape: Sequence[int], chunks: Sequence[int] | None) -> str | None:
    """Why no region of an array with this shape and these chunks can be loaded, in words that follow "holds"; None if it can.

    (A small region of an array that is too large as a whole can be loaded.)

    >>> unaddressable((2**62,), (4,)), unaddressable((1,) * 65, None)
    (None, 'an array of 65 axes; NumPy has 64 at most')
    """
    if len(shape) > _MOST_AXES:
        return f"an array of {len(shape)} axes; NumPy has {_MOST_AXES} at most"
    if max(shape, default=0) > _MOST_ELEMENTS:
        return f"an array with an axis of {max(shape)} elements, which 64 bits cannot count"
    if chunks is not None and _WIDEST * math.prod(max(1, n) for n in chunks) > _MOST_ELEMENTS:
        return f"chunks of shape {tuple(chunks)}, of which 64 bits cannot count the bytes"
    return None


def native_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in this machine's byte order, without metadata such as HDF5 enum names. A refused type is returned unchanged.

    >>> native_dtype(np.dtype(">f4")) == np.dtype("float32")
    True
    """
    return np.dtype(dtype.type) if refusal(dtype) is None else dtype


def cast_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Numbers in another type; None if that has them not. Floating point numbers are rounded.

    >>> cast_value(1e20, np.dtype("f4")), cast_value(300, np.dtype("u1")), cast_value(1e300, np.dtype("f4"))
    (np.float32(1e+20), None, None)
    """
    try:
        before = np.asarray(value)
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            after = before.astype(native_dtype(dtype))
        is_rounded = dtype.kind in "fc" and not (before.dtype.kind == "c" and dtype.kind == "f")
        same = np.isfinite(after) == np.isfinite(before) if is_rounded else (after == before)
    except (TypeError, ValueError, OverflowError):  # text, or an integer that is too large for any type
        return None
    return after[()] if np.all(same) else None


def check_request(info: ArrayInfo, dtype: np.dtype[Any], region: Region, out: np.ndarray[Any, Any]) -> None:
    """Raise ValueError unless `region` is inside the array and `out` is a buffer as `Source.read_into` requires.

    Without this check, libraries silently clamp a region that reaches outside the array, or broadcast into a buffer of another
    shape.
    """
    if region.ndim != len(info.shape) or not Region.whole(info.shape).contains(region):
        raise ValueError(f"region {region} reaches outside {info}, which has shape {info.shape}")
    if out.shape != region.shape or out.dtype != dtype:
        raise ValueError(
            f"the buffer for region {region} of {info} is {out.shape} {out.dtype}, expected {region.shape} {dtype}"
        )
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError(f"the buffer for region {region} of {info} must be C-contiguous and writable")


def settle_bools(values: np.ndarray[Any, Any]) -> None:
    """Make every byte of booleans 0 or 1, in place. Arrays of other types are not changed.

    A file can hold other bytes, if its writer took any number but 0 as true. NumPy does too. XLA expects 0 or 1, and its
    `where`, sums and comparisons give wrong results for other bytes.

    >>> values = np.array([0, 1, 2, 128], dtype="u1").view(bool)
    >>> settle_bools(values)
    >>> values.view("u1").tolist()
    [0, 1, 1, 1]
    """
    if values.dtype.kind == "b":
        number = values.view(np.uint8)
        np.minimum(number, 1, out=number)
