"""Which names and attributes does HDF5 hold, but the netCDF library not read? Which can HDF5 itself not hold?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardload.formats.contract.array import is_added

RESERVED = {"CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties"}
NETCDF_TYPES = {"i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"}
_MOST_ATTR_NBYTES = 65_350  # name and values; with its type an attribute has less than 64 KiB in a file that every HDF5 reads
_MOST_NAME_NBYTES = 255  # the library cuts a longer name, and loses the end of the text


def unreadable_name(name: str) -> str | None:
    """Why the library, or ncdump, does not read a name, in words that follow "a name"; None if they do."""
    if (nbytes := len(name.encode(errors="replace"))) > _MOST_NAME_NBYTES:
        return f"of {nbytes} bytes"
    return "that begins with a space or control character" if name and name[0] <= " " else None


def refused_attribute(key: str, value: Any, *, is_netcdf: bool = False) -> str | None:
    """Why HDF5 cannot hold an attribute, or netCDF programs cannot show it, in words that follow "is"; None if they can.

    Text may have any length: HDF5 stores it elsewhere in the file. HDF5 holds attributes of several axes and of all types. But
    the netCDF library does not open a file that has an attribute of two axes, and does not show one of a type that it lacks.

    >>> refused_attribute("table", np.zeros(9000)), refused_attribute("history", "x" * 72000)
    ('of 72,005 bytes; in HDF5 an attribute that is no text has less than 64 KiB', None)
    >>> refused_attribute("box", np.eye(3), is_netcdf=True)
    'an array of 2 axes; in netCDF4 an attribute has one'
    """
    if key in RESERVED or not key:
        return "without a name" if not key else "of a name that HDF5 and netCDF keep for themselves"
    if is_netcdf and (reason := unreadable_name(key)) is not None:
        return f"one with a name {reason}"
    if value is None or np.ma.is_masked(value):  # HDF5 would write what is behind the mask
        return f"{'None' if value is None else 'masked in part'}, which HDF5 does not have"
    if isinstance(value, Mapping):
        return "a dict, which HDF5 does not have: json.dumps makes text of it"
    if getattr(value, "shape", ()) is None:  # h5py.Empty
        return None
    try:
        array = np.asarray(value, dtype=object if isinstance(value, str) else None)
    except ValueError:
        return "no array: its rows have different lengths"
    except Exception as error:  # of a traced array, of one on other processes, of one on a GPU that is not JAX's
        return f"no array: {str(error).partition(chr(10))[0]}"
    texts = array.reshape(-1).tolist() if array.dtype.kind in "OU" else []
    if "\0" in key or any(isinstance(text, str) and "\0" in text for text in texts):
        return "text with a zero byte, which ends it in HDF5"
    if isinstance(value, str | bytes):
        return None
    if is_added(array.dtype):
        return f"{array.dtype.name}, which HDF5 would hold as bytes without a meaning; float32 has a type there"
    is_netcdf_type = array.dtype.kind in "bOSU" or f"{array.dtype.kind}{array.dtype.itemsize}" in NETCDF_TYPES
    if is_netcdf and array.ndim > 1:
        return f"an array of {array.ndim} axes; in netCDF4 an attribute has one"
    if is_netcdf and not is_netcdf_type:
        return f"{array.dtype.name}, which netCDF4 does not have"
    nbytes = array.size * 16 if array.dtype.kind in "OU" else array.nbytes  # of each text, where it is
    nbytes += len(key.encode(errors="replace"))
    if nbytes <= _MOST_ATTR_NBYTES:
        return None
    return f"of {nbytes:,} bytes; in HDF5 an attribute that is no text has less than 64 KiB"
