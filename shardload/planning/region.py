"""Which elements?

A `Region` is a half-open box of array elements in absolute global coordinates. It is validated once, when it is made, and
after that nothing clamps it and nothing in it is negative: two regions are the same elements exactly when they are equal.
A `Selection` says which elements of a file make up the array that the caller asked for, and turns regions of that array
into regions of the file.

No I/O, no MPI, no JAX: integers in, integers out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np

__all__ = ["Region", "Selection", "padding_of", "select_axes"]


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A half-open n-d box: elements ``start[k] <= i_k < stop[k]`` along every axis ``k``.

    Parameters
    ----------
    start, stop : tuple of int
        Absolute global coordinates, in elements, one per axis.

    Raises
    ------
    ValueError
        If the lengths differ, a coordinate is negative, or a stop lies before its start.

    Examples
    --------
    >>> a = Region((0, 4), (8, 8))
    >>> a.shape, a.size
    ((8, 4), 32)
    >>> a.intersect(Region((6, 0), (10, 5)))
    Region(start=(6, 4), stop=(8, 5))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"region start {self.start} and stop {self.stop} have different lengths")
        for a, b in zip(self.start, self.stop):  # noqa: B905 - a load makes thousands of regions; see above
            if not 0 <= a <= b:
                raise ValueError(f"region [{self.start}, {self.stop}) is not 0 <= start <= stop on every axis")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """The region of all elements of an array of `shape`.

        >>> Region.whole((2, 3))
        Region(start=(0, 0), stop=(2, 3))
        """
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def from_index(cls, index: Sequence[slice], shape: Sequence[int]) -> Region:
        """The region that a tuple of slices, as JAX hands to its callbacks, names in an array of `shape`.

        ``slice(None)`` is the whole axis. A step other than 1, or bounds outside the axis, are refused: they cannot come
        from a sharding, so they are a sign of something wrong.

        >>> Region.from_index((slice(None), slice(4, 8)), (3, 8))
        Region(start=(0, 4), stop=(3, 8))
        """
        if len(index) != len(shape):
            raise ValueError(f"index {tuple(index)} has {len(index)} axes, the array has {len(shape)}")
        start, stop = [], []
        for part, size in zip(index, shape, strict=True):
            if not isinstance(part, slice) or part.step not in (None, 1):
                raise ValueError(f"index {tuple(index)} is not made of slices with step 1")
            low = 0 if part.start is None else operator.index(part.start)
            high = size if part.stop is None else operator.index(part.stop)
            if not 0 <= low <= high <= size:
                raise ValueError(f"index {tuple(index)} reaches outside an array of shape {tuple(shape)}")
            start.append(low)
            stop.append(high)
        return cls(tuple(start), tuple(stop))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple([b - a for a, b in zip(self.start, self.stop)])  # noqa: B905 - their lengths were compared

    @property
    def size(self) -> int:
        """Number of elements; 1 for a 0-d region."""
        n = 1
        for a, b in zip(self.start, self.stop):  # noqa: B905 - their lengths were compared
            n *= b - a
        return n

    def intersect(self, other: Region) -> Region | None:
        """The elements in both, or None where there are none.

        >>> Region((0,), (4,)).intersect(Region((4,), (8,))) is None
        True
        """
        if len(self.start) != len(other.start):
            raise ValueError(f"regions {self} and {other} have different numbers of axes")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        for a, b in zip(start, stop):  # noqa: B905 - their lengths were compared
            if a >= b:
                return None
        return Region(start, stop)

    def contains(self, other: Region) -> bool:
        """Whether every element of `other` is one of these."""
        for a, b, c, d in zip(self.start, other.start, other.stop, self.stop, strict=True):  # noqa: SIM110 - half the time
            if a > b or c > d:
                return False
        return True

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """This region as NumPy slices, relative to `origin` (the start of the buffer that holds it; default: zeros).

        >>> Region((4, 2), (6, 3)).slices(origin=(4, 0))
        (slice(0, 2, None), slice(2, 3, None))
        """
        base = (0,) * self.ndim if origin is None else origin
        return tuple([slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, base, strict=True)])

    def split(self, max_size: int) -> Iterator[Region]:
        """Cut into regions of at most `max_size` elements, in C order; most are whole runs of the leading axis.

        >>> list(Region((0, 0), (3, 4)).split(8))
        [Region(start=(0, 0), stop=(2, 4)), Region(start=(2, 0), stop=(3, 4))]
        """
        if max_size < 1:
            raise ValueError(f"cannot split {self} into regions of at most {max_size} elements")
        if self.size <= max_size:
            yield self
            return
        axis = next(k for k, n in enumerate(self.shape) if n > 1)
        step = max(1, max_size // math.prod(self.shape[axis + 1 :]))
        for low in range(self.start[axis], self.stop[axis], step):
            high = min(low + step, self.stop[axis])
            start = (*self.start[:axis], low, *self.start[axis + 1 :])
            stop = (*self.stop[:axis], high, *self.stop[axis + 1 :])
            yield from Region(start, stop).split(max_size)

    def __str__(self) -> str:
        """As NumPy would index it: ``[0:4, 8:16]``."""
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def padding_of(region: Region, true: Region | None) -> Iterator[Region]:
    """What of a shard is padding, as regions that do not overlap; `true` is what the array has of it, None for nothing.

    >>> [str(t) for t in padding_of(Region((0, 0), (4, 4)), Region((0, 0), (3, 2)))]
    ['[3:4, 0:4]', '[0:3, 2:4]']
    """
    if true is None:
        if region.size:
            yield region
        return
    for axis, (end, stop) in enumerate(zip(true.stop, region.stop, strict=True)):
        if end < stop:
            start = (*region.start[:axis], end, *region.start[axis + 1 :])
            tail = Region(start, (*true.stop[:axis], *region.stop[axis:]))
            if tail.size:
                yield tail


@dataclass(frozen=True, slots=True)
class Selection:
    """Which elements of a file's array make up the array that was asked for.

    Parameters
    ----------
    region : Region
        The box of the file's array that is used, in the file's coordinates.
    kept : tuple of int
        The file's axes that the selected array keeps, in order; an axis picked by an integer is dropped.
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
        """A view of an array with the file's axes (dropped ones of length 1), without those that are dropped.

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
    """Read a NumPy-style basic index (slices with step 1, integers, one ``...``) over an array of `shape`.

    Negative numbers count from the end, and a slice that reaches past the end stops there, as in NumPy. An integer out of
    range is an error, as in NumPy. What NumPy would read another way (steps, masks, lists, new axes) is refused.

    Raises
    ------
    ValueError, IndexError
        With the axis, what was found and what is possible.

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
