"""Which elements of an array are meant?

A `Region` is a half-open box of array elements in absolute global coordinates. It is validated once, when it is made. After
that it is never clamped, and no coordinate is negative: two regions are the same elements exactly if they are equal.

No I/O, no MPI, no JAX: integers in, integers out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
        """The region of an array of `shape` that a tuple of slices names; JAX passes such tuples to its callbacks.

        ``slice(None)`` is the whole axis. A step other than 1 and bounds outside the axis are refused: they cannot come from a
        sharding, so something is wrong.

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
        """The elements in both regions, or None if there are none.

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

    def meets(self, other: Region) -> bool:
        """True if the two have elements in common: a third of the time of `intersect`.

        >>> Region((0,), (4,)).meets(Region((4,), (8,))), Region((0,), (5,)).meets(Region((4,), (8,)))
        (False, True)
        """
        for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True):
            if a >= d or c >= b or a >= b or c >= d:
                return False
        return True

    def contains(self, other: Region) -> bool:
        """True if every element of `other` is in this region."""
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

    def moved(self, steps: Sequence[int]) -> Region:
        """The region so many elements further along each axis.

        >>> str(Region((4, 2), (6, 3)).moved((-1, 5)))
        '[3:5, 7:8]'
        """
        start = tuple(a + s for a, s in zip(self.start, steps, strict=True))
        return Region(start, tuple(b + s for b, s in zip(self.stop, steps, strict=True)))

    def split(self, max_size: int) -> Iterator[Region]:
        """Cut into regions of at most `max_size` elements, in C order. Most of them are whole runs of the leading axis.

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
        """The region as a NumPy index: ``[0:4, 8:16]``."""
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"
