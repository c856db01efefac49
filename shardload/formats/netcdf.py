"""What does the netCDF library not read, though HDF5 holds it? Names, types, and attributes of several axes. What does HDF5 not
hold? Long attributes, and those that it keeps for itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["NETCDF_TYPES", "RESERVED", "refused_by_hdf5", "refused_by_netcdf", "unreadable_name"]

RESERVED = {"CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties"}
NETCDF_TYPES = {"i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"}
_MOST_ATTR_NBYTES = 65_350  # name and values; with its type an attribute has less than 64 KiB in a file that every HDF5 reads
_MOST_NAME_NBYTES = 255  # the library cuts a longer one off, without an end of the text


def unreadable_name(name: str) -> str | None:
    """Why the library, or ncdump, does not read a name, in words that follow "a name"; None if they do."""
    if (nbytes := len(name.encode(errors="replace"))) > _MOST_NAME_NBYTES:
        return f"of {nbytes} bytes"
    return "that begins with a space or control character" if name and name[0] <= " " else None


def refused_by_hdf5(key: str, value: Any) -> str | None:
    """Why HDF5 cannot hold an attribute, or not beside its array, in words that follow "is"; None if it can, or says so itself.

    Text by itself may have any length: it is stored elsewhere in the file.

    >>> refused_by_hdf5("table", np.zeros(9000)), refused_by_hdf5("history", "x" * 72000)
    ('of 72,005 bytes; in HDF5 an attribute that is no text has less than 64 KiB', None)
    """
    if key in RESERVED or not key:
        return "without a name" if not key else "of a name that HDF5 and netCDF keep for themselves"
    if getattr(value, "shape", ()) is None:  # h5py.Empty
        return None
    try:
        found = np.asarray(value, dtype=object if isinstance(value, str) else None)
    except ValueError:  # lists of different lengths
        return None
    texts = found.reshape(-1).tolist() if found.dtype.kind in "OU" else []
    if "\0" in key or any(isinstance(one, str) and "\0" in one for one in texts):
        return "text with a zero byte, which ends it in HDF5"
    if isinstance(value, str | bytes):
        return None
    nbytes = found.size * 16 if found.dtype.kind in "OU" else found.nbytes  # of each text, where it is
    nbytes += len(key.encode(errors="replace"))
    if nbytes <= _MOST_ATTR_NBYTES:
        return None
    return f"of {nbytes:,} bytes; in HDF5 an attribute that is no text has less than 64 KiB"


def refused_by_netcdf(key: str, value: Any) -> str | None:
    """Why the netCDF library cannot show an attribute, in words that follow "is"; None if it can.

    HDF5 holds all of these. The library does not open a file with an attribute of two axes at all, and shows none of a type
    that it does not have.

    >>> refused_by_netcdf("box", np.eye(3)), refused_by_netcdf("units", "m")
    ('an array of 2 axes; in netCDF4 an attribute has one', None)
    """
    if (why := unreadable_name(key)) is not None:
        return f"one with a name {why}"
    if isinstance(value, str | bytes) or getattr(value, "shape", ()) is None:  # h5py.Empty
        return None
    try:
        found = np.asarray(value)
    except ValueError:  # lists of different lengths
        return "no array: its rows have different lengths"
    if found.ndim > 1:
        return f"an array of {found.ndim} axes; in netCDF4 an attribute has one"
    is_known = found.dtype.kind in "bOSU" or f"{found.dtype.kind}{found.dtype.itemsize}" in NETCDF_TYPES
    return None if is_known else f"{found.dtype.name}, which netCDF4 does not have"
