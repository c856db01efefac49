"""What does the netCDF library not read, though HDF5 holds it? Names, types, and attributes of several axes."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["NETCDF_TYPES", "refused_by_netcdf", "unreadable_name"]

NETCDF_TYPES = {"i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"}
_MOST_NAME_NBYTES = 255  # the library cuts a longer one off, without an end of the text


def unreadable_name(name: str) -> str | None:
    """Why the library, or ncdump, does not read a name, in words that follow "a name"; None if they do."""
    if (nbytes := len(name.encode(errors="replace"))) > _MOST_NAME_NBYTES:
        return f"of {nbytes} bytes"
    return "that begins with a space or control character" if name and name[0] <= " " else None


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
