"""What is known of an array that grows along an axis, in any format? Where what comes begins, and which old values it needs.

What comes is planned as an array of its own. It begins where a file of chunks (or, without such files, a chunk) begins that has
room for more: at row `base` of the old array. So its chunks are those of the old one, and its first one may have rows already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardload.formats.contract.array import json_value
from shardload.formats.sink import Encoder
from shardload.planning.region import Region
from shardload.values.decoding import PACKING, packed_by, typed

UNITS = ("units", "calendar")
_BOUNDS = ("bounds", "climatology")  # the arrays of bounds of a coordinate, in CF: they have its units
HOW_TO_GROW = (
    "Make a file that can: `shardload copy OLD NEW --unlimited AXIS`; or with unlimited= in shardload.save, "
    "maxshape=(None, ...) in h5py, an unlimited dimension in netCDF4, unlimited_dims= in xarray"
)
"""What to type for an HDF5 or netCDF4 array that cannot grow along an axis."""


def meaning_of(dtype: np.dtype[Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """What stored numbers mean, by the attributes of their array, as plain JSON: what is appended must mean the same.

    >>> meaning_of(np.dtype("i2"), {"units": "K", "scale_factor": 0.5, "title": "t"})
    {'attrs': {'units': 'K'}, 'packed': ['scale_factor=0.5'], 'bounds': []}
    """
    packing = {key: typed(attrs[key]) for key in PACKING if attrs.get(key) is not None}
    bounds = list(_texts_of(attrs, _BOUNDS).values())
    meaning = _texts_of(attrs, (*UNITS, "dtype"))
    return {"attrs": meaning, "packed": packed_by(dtype, packing), "bounds": bounds}


def units_of(attrs: Mapping[str, Any]) -> dict[str, str]:
    """The attributes without which numbers mean nothing."""
    return _texts_of(attrs, UNITS)


def _texts_of(attrs: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    told = {key: json_value(attrs[key]) for key in keys if key in attrs}
    return {key: text for key, text in told.items() if isinstance(text, str)}


class Growing(Encoder):
    """An array that grows: an `Encoder` of what comes, counted from `base` on.

    Attributes
    ----------
    axis : int
        The axis.
    stored_shape : tuple of int
        The shape that the array has.
    old_shape : tuple of int
        The shape of what stays of it: the same, unless rows are replaced.
    base : int
        Where what comes begins, in the old array.
    """

    axis: int
    stored_shape: tuple[int, ...]
    old_shape: tuple[int, ...]
    base: int

    def begin(self, known: Mapping[str, Any], axis: int, unit: int, n_new: int) -> tuple[int, ...]:
        """Set the attributes; returns the shape of what comes. `unit` is how many rows are written as a whole."""
        self.axis, self.old_shape = axis, tuple(int(n) for n in known["shape"])
        self.stored_shape = tuple(int(n) for n in known.get("stored_shape", self.old_shape))
        self.base = self.old // unit * unit
        shape = list(self.old_shape)
        shape[axis] = self.old + n_new - self.base
        return tuple(shape)

    @property
    def old(self) -> int:
        """How many old rows stay."""
        return self.old_shape[self.axis]

    @property
    def unit(self) -> int:
        """Rows of a chunk."""
        return (self.spec.chunks or self.spec.shape)[self.axis]

    @property
    def new_shape(self) -> tuple[int, ...]:
        """The shape that the array will have."""
        shape = list(self.spec.shape)
        shape[self.axis] += self.base
        return tuple(shape)

    def in_file(self, region: Region) -> Region:
        """A region of what comes, as one of the array."""
        return region.moved([self.base * (axis == self.axis) for axis in range(region.ndim)])

    def beside(self, index: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The chunks that have old rows alone, and are in one file with this one, if it is the first in that file with a new
        row: who writes it writes them, too.
        """
        return []
