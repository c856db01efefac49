"""Which elements of a file's array did the caller ask for?

A `Selection` converts regions of the selected array to regions of the file. `select_axes` makes one from a NumPy-style index.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np

from shardload.planning.region import Region

__all__ = ["Selection", "select_axes"]


@dataclass(frozen=True, slots=True)
class Selection:
    """The elements of a file's array that make up the selected array.

    Parameters
    ----------
    region : Region
        The selected box, in the coordinates of the file's array.
    kept : tuple of int
        The file's axes that the selected array keeps, in order; an axis that is indexed by an integer is dropped.
    """

    region: Region
    kept: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the selected array."""
        shape = self.region.shape
        return tuple(shape[k] for k in self.kept)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the selected array starts in the file, along each kept axis."""
        return tuple(self.region.start[k] for k in self.kept)

    def to_file(self, region: Region) -> Region:
        """The same elements in the file's coordinates (dropped axes come back with length 1).

        >>> s = select_axes((slice(10, 20), 3), (100, 8))
        >>> s.to_file(Region((0,), (5,)))
        Region(start=(10, 3), stop=(15, 4))
        """
        start, stop = list(self.region.start), list(self.region.stop)
        for k, a, b, offset in zip(self.kept, region.start, region.stop, self.offset, strict=True):
            start[k], stop[k] = a + offset, b + offset
        return Region(tuple(start), tuple(stop))

    def drop_axes(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A view of an array with the file's axes, without the dropped axes (which have length 1).

        >>> select_axes((slice(10, 20), 3), (100, 8)).drop_axes(np.zeros((5, 1))).shape
        (5,)
        """
        if len(self.kept) == data.ndim:
            return data
        kept = set(self.kept)
        index: Any = (*(slice(None) if k in kept else 0 for k in range(data.ndim)), ...)  # an array, also when 0-d
        view: np.ndarray[Any, Any] = data[index]
        return view


Index = slice | SupportsIndex | EllipsisType


def select_axes(index: Index | tuple[Index, ...] | None, shape: Sequence[int]) -> Selection:
    """Make a selection from a NumPy-style basic index (slices with step 1, integers, one ``...``) of an array of `shape`.

    As in NumPy, negative numbers count from the end, a slice that reaches past the end stops there, and an integer out of range
    is an error. Other NumPy indices (steps, masks, lists, new axes) are refused.

    Raises
    ------
    ValueError, IndexError
        If the index is not supported. The text names the axis, what was found and what is possible.

    Examples
    --------
    >>> s = select_axes((-1, ..., slice(2, None)), (5, 6, 7))
    >>> s.shape, s.region, s.kept
    ((6, 5), Region(start=(4, 0, 2), stop=(5, 6, 7)), (1, 2))
    """
    if index is None:
        parts: list[Index] = []
    elif isinstance(index, tuple):
        parts = list(index)
    else:
        parts = [index]
    if sum(p is Ellipsis for p in parts) > 1:
        raise ValueError("select has more than one '...'; one stands for all the axes that are not named")
    named = sum(p is not Ellipsis for p in parts)
    if named > len(shape):
        raise IndexError(f"select names {named} axes, but the array has {len(shape)}: shape {tuple(shape)}")
    rest: list[Index] = [slice(None)] * (len(shape) - named)
    where = next((i for i, p in enumerate(parts) if p is Ellipsis), None)
    parts = parts + rest if where is None else parts[:where] + rest + parts[where + 1 :]

    start, stop, kept = [], [], []
    for axis, (part, size) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            if part.step not in (None, 1):
                raise ValueError(f"select has step {part.step} on axis {axis}; only step 1 is possible: load all and slice")
            try:
                low, high, _ = part.indices(size)
            except TypeError:
                raise ValueError(f"select has {part} on axis {axis}; the bounds of a slice are integers") from None
            start.append(low)
            stop.append(max(low, high))
            kept.append(axis)
            continue
        try:
            i = operator.index(None if isinstance(part, bool) else part)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(f"select has {part!r} on axis {axis}; each axis takes a slice with step 1 or an integer") from None
        if not -size <= i < size:
            raise IndexError(f"select has {part!r} on axis {axis}, which has {size} elements")
        start.append(i % size)
        stop.append(i % size + 1)
    return Selection(Region(tuple(start), tuple(stop)), tuple(kept))
