"""Which elements of an array are meant, how is it cut into equal cells, and which chunks form a block?

A `Region` is a half-open box of array elements in absolute global coordinates. It is validated once, when it is made. After
that it is never clamped, and no coordinate is negative: two regions are the same elements exactly if they are equal.

A `Grid` describes the cuts into chunks, blocks and shards. Each axis is cut independently of the others, so every question is
answered axis by axis, and a grid of a billion cells takes no more memory than one of ten.

Small chunks are read and copied together, as a box of the file's grid (`cut_box`). Its values are decoded into one buffer,
chunk after chunk. Along each axis a region is cut at most into three stretches: what it has of its first chunk, whole chunks,
and what it has of its last chunk. So however many chunks there are, a few copies with strides move a region out of the buffer.

A block is a group of chunks that a rank reads or writes at once (`plan_blocks`).

No I/O, no MPI, no JAX: integers in, integers out.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


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


Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


class Cells(ABC):
    """An array cut into numbered cells. Subclasses say where a cell lies (`bounds`), and which cells a region meets."""

    __slots__ = ()

    counts: tuple[int, ...]
    """Number of cells along each axis."""

    @abstractmethod
    def bounds(self, number: int) -> list[tuple[int, int]]:
        """Where a cell starts and stops along each axis, by its number in C order."""

    @abstractmethod
    def meeting_axes(self, region: Region) -> Sequence[Sequence[int]]:
        """The cells that share an element with a region, along each axis, ascending."""

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return math.prod(self.counts)

    def region(self, number: int) -> Region:
        """The elements of a cell."""
        bounds = self.bounds(number)
        return Region(tuple([a for a, _ in bounds]), tuple([b for _, b in bounds]))

    def index(self, number: int) -> tuple[int, ...]:
        """A cell's position along each axis."""
        return unravel(number, self.counts)

    def meeting(self, region: Region) -> Iterator[int]:
        """Numbers of the cells that share an element with a region, ascending."""
        return numbers_of(self.meeting_axes(region), self.counts)

    def cut(self, region: Region) -> Iterator[tuple[int, Region]]:
        """The cells that share an element with a region, ascending: their numbers, and the elements that they share.

        >>> [(number, str(common)) for number, common in Grid((10,), (4,), (0,)).cut(Region((3,), (5,)))]
        [(0, '[3:4]'), (1, '[4:5]')]
        """
        for number in self.meeting(region):
            common = self.region(number).intersect(region)
            if common is not None:
                yield number, common

    def n_meeting(self, region: Region) -> int:
        """How many cells share an element with a region."""
        return math.prod(map(len, self.meeting_axes(region)))


@dataclass(frozen=True, slots=True)
class Grid(Cells):
    """An array cut into equal cells along every axis; the first and the last cell of an axis may be cut short.

    Parameters
    ----------
    shape : tuple of int
        Shape of the array.
    cell : tuple of int
        Shape of a cell, at least 1 along each axis.
    phase : tuple of int
        Elements of the first cell that lie before the array (a selection may begin inside a chunk); less than `cell`.

    Examples
    --------
    >>> g = Grid(shape=(10, 6), cell=(4, 6), phase=(1, 0))
    >>> g.counts
    (3, 1)
    >>> [str(g.region(i)) for i in range(g.n_cells)]
    ['[0:3, 0:6]', '[3:7, 0:6]', '[7:10, 0:6]']
    >>> list(g.meeting(Region((2, 0), (4, 6))))
    [0, 1]
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    phase: tuple[int, ...]
    counts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Number of cells along each axis; 0 along an empty axis."""

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.cell) == len(self.phase):
            raise ValueError(f"grid of shape {self.shape} has cell {self.cell} and phase {self.phase}")
        if any(c < 1 or not 0 <= p < c or n < 0 for n, c, p in zip(self.shape, self.cell, self.phase, strict=True)):
            raise ValueError(f"grid of shape {self.shape} cannot have cell {self.cell} and phase {self.phase}")
        axes = zip(self.shape, self.cell, self.phase, strict=True)
        # Used for each part of a plan, so computed once.
        object.__setattr__(self, "counts", tuple(-(-(n + p) // c) if n else 0 for n, c, p in axes))

    def bounds(self, number: int) -> list[tuple[int, int]]:
        """See `Cells`."""
        bounds = []
        for count, n, c, p in zip(
            reversed(self.counts), reversed(self.shape), reversed(self.cell), reversed(self.phase), strict=True
        ):
            number, i = divmod(number, count)
            low = i * c - p
            bounds.append((max(0, low), min(n, low + c)))
        bounds.reverse()
        return bounds

    def around(self, numbers: range) -> Region:
        """The smallest box around cells whose numbers follow each other, at least one.

        >>> str(Grid((10, 6), (4, 3), (0, 0)).around(range(1, 2))), str(Grid((10, 6), (4, 3), (0, 0)).around(range(1, 3)))
        ('[0:4, 3:6]', '[0:8, 0:6]')
        """
        first, last = self.index(numbers.start), self.index(numbers.stop - 1)
        axis = next((k for k, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), len(first))
        low, high = self.region(numbers.start), self.region(numbers.stop - 1)  # up to that axis, cells are the same
        inner_shape = self.shape[axis + 1 :]
        return Region((*low.start[: axis + 1], *(0,) * len(inner_shape)), (*high.stop[: axis + 1], *inner_shape))

    def meeting_axes(self, region: Region) -> list[range]:
        """See `Cells`; a range along each axis."""
        axes = zip(region.start, region.stop, self.cell, self.phase, strict=True)
        return [range((a + p) // c, -(-(b + p) // c) if b > a else (a + p) // c) for a, b, c, p in axes]


def strides(shape: Sequence[int]) -> list[int]:
    """The distance in C order between neighbours along each axis.

    >>> strides((2, 3, 4))
    [12, 4, 1]
    """
    return [math.prod(shape[k + 1 :]) for k in range(len(shape))]


def numbers_of(axes: Sequence[Sequence[int]], shape: Sequence[int]) -> Iterator[int]:
    """The C-order numbers of a product of positions along each axis, ascending.

    >>> list(numbers_of([(1, 2), (0, 3)], (3, 4)))
    [4, 7, 8, 11]
    """
    steps = [[i * stride for i in axis] for axis, stride in zip(axes, strides(shape), strict=True)]
    return map(sum, itertools.product(*steps))


def ravel(index: Sequence[int], shape: Sequence[int]) -> int:
    """The C-order number of an index along each axis: the inverse of `unravel`.

    >>> ravel((1, 1, 1), (2, 3, 4))
    17
    """
    number = 0
    for i, n in zip(index, shape, strict=True):
        number = number * n + i
    return number


def unravel(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index along each axis of a C-order number.

    >>> unravel(17, (2, 3, 4))
    (1, 1, 1)
    """
    index = []
    for n in reversed(shape):
        number, i = divmod(number, n)
        index.append(i)
    return tuple(reversed(index))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some of the elements that a region has along one axis: from each of `n` chunks the same `length` elements.

    Attributes
    ----------
    chunk, n : int
        First chunk, counted from the first one in the buffer, and number of chunks.
    start, length : int
        First element inside each chunk, and number of elements.
    at : int
        First element, counted from the start of the region.
    """

    chunk: int
    n: int
    start: int
    length: int
    at: int


def stretches(start: int, stop: int, cell: int, first: int) -> list[Stretch]:
    """Cut the elements from `start` to `stop` of an axis with chunks of `cell` elements; the buffer begins with chunk `first`.

    >>> stretches(3, 14, 4, 0)  # doctest: +NORMALIZE_WHITESPACE
    [Stretch(chunk=0, n=1, start=3, length=1, at=0),
     Stretch(chunk=1, n=2, start=0, length=4, at=1),
     Stretch(chunk=3, n=1, start=0, length=2, at=9)]
    >>> stretches(5, 7, 4, 1)
    [Stretch(chunk=0, n=1, start=1, length=2, at=0)]
    """
    result, position = [], start
    while position < stop:
        chunk, inside = divmod(position, cell)
        n = 1 if inside or stop - position < cell else (stop - position) // cell
        length = cell if n > 1 else min(cell - inside, stop - position)
        result.append(Stretch(chunk - first, n, inside, length, position - start))
        position += n * length
    return result


def cut_box(axes: Sequence[range], most: int) -> Iterator[tuple[range, ...]]:
    """Cut a box of chunks into boxes of at most `most` chunks and about equal size, in C order.

    >>> list(cut_box([range(2), range(3, 6)], 2))
    [(range(0, 1), range(3, 5)), (range(0, 1), range(5, 6)), (range(1, 2), range(3, 5)), (range(1, 2), range(5, 6))]
    >>> [len(rows) * len(columns) for rows, columns in cut_box([range(4), range(5)], 12)]
    [10, 10]
    """
    steps, most_cells = [1] * len(axes), max(1, most)
    for k in reversed(range(len(axes))):
        n = max(1, len(axes[k]))
        steps[k] = -(-n // -(-n // most_cells))
        if steps[k] < n:
            break
        most_cells //= n
    return itertools.product(
        *([axis[i : i + step] for i in range(0, len(axis), step)] for axis, step in zip(axes, steps, strict=True))
    )


# --- blocks of chunks, and runs of the file

# Enough blocks per owner that an uneven last one costs at most a quarter, and that reading overlaps sending.
BLOCKS_PER_OWNER = 4

# Runs that start at most this far apart are read together with the gaps (`formats.hdf5.source`): reading this much more
# takes less time than another system call (docs/design/decode.md).
NEAR_NBYTES = 32 << 10

LONGEST_ROW_NBYTES = 1 << 20  # of a run that stands for a chunk
ALIGNMENT = 64  # bytes: of values in a staging buffer, and of pieces
_MOST_CHUNKS = 1 << 14  # in a block: each chunk takes some hundred bytes of Python objects, in addition to its own bytes


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def most_chunks(chunk_nbytes: int, max_nbytes: int) -> int:
    """How many chunks a block of at most `max_nbytes` may meet. Each is decoded as a whole, however little of it is wanted.

    >>> most_chunks(1000, 4096), most_chunks(1 << 30, 4096), most_chunks(1, 1 << 40)
    (4, 1, 16384)
    """
    return max(1, min(_MOST_CHUNKS, max_nbytes // max(1, aligned(chunk_nbytes))))


def plan_row_chunks(shape: Sequence[int], itemsize: int, row_nbytes: int = LONGEST_ROW_NBYTES) -> tuple[int, ...]:
    """Shape of stand-in chunks for an array that has none: runs of the last axis, at most `row_nbytes` long.

    >>> plan_row_chunks((512, 512, 512), 4), plan_row_chunks((10**9,), 4)
    ((1, 1, 512), (262144,))
    """
    if not shape:
        return ()
    return (1,) * (len(shape) - 1) + (max(1, min(shape[-1], row_nbytes // itemsize)),)


def plan_blocks(
    chunks: Grid,
    itemsize: int,
    *,
    max_nbytes: int,
    n_owners: int | None = None,
    within: Sequence[int] | None = None,
    max_cells: int = 1 << 62,
    per_owner: int = BLOCKS_PER_OWNER,
    per_object: Sequence[int] | None = None,
) -> Grid:
    """Group chunks into blocks, which a rank reads or writes at once.

    A block consists of whole chunks, contiguous in the file's (C) order. It has at most `max_nbytes` (but at least one chunk),
    and is small enough that each owner has several blocks.

    Parameters
    ----------
    chunks : Grid
        The array cut into the file's chunks.
    itemsize : int
        Bytes per element.
    max_nbytes : int
        Cap on a block.
    n_owners : int, optional
        Number of ranks that share the blocks; None if each rank reads its own shards.
    within : sequence of int, optional
        Shape of the shards, if only the part of a block inside a shard is wanted: the caps then count only that part.
    max_cells : int
        Cap on the number of chunks that one block meets, because each chunk has a cost beside its bytes.
    per_owner : int
        Fewest blocks for each owner. With fewer than `BLOCKS_PER_OWNER` all owners have equally many blocks, or there are as
        many blocks as otherwise.
    per_object : sequence of int, optional
        Chunks along each axis of an object in a store: a block lies in one, where a cube of chunks mostly is one run of bytes.

    Examples
    --------
    >>> planes = Grid((512, 512, 512), (1, 512, 512), (0, 0, 0))
    >>> plan_blocks(planes, 4, max_nbytes=16 << 20, n_owners=8).cell
    (16, 512, 512)
    >>> plan_blocks(planes, 4, max_nbytes=64 << 20, n_owners=8, per_owner=1).cell
    (64, 512, 512)
    >>> plan_blocks(Grid((8, 8), (1, 1), (0, 0)), 4, max_nbytes=16, n_owners=1, per_object=(4, 4)).cell
    (2, 2)
    """
    counts = chunks.counts
    extent = chunks.shape if within is None else [min(n, w) for n, w in zip(chunks.shape, within, strict=True)]
    cell_size = [min(c, e) for c, e in zip(chunks.cell, extent, strict=True)]
    most = max(1, min(max_cells, max_nbytes // max(1, math.prod(cell_size) * itemsize)))
    reach = list(counts)  # chunks along each axis that one block can meet: all of them, or those that one shard meets
    if within is not None:
        reach = [min(n, -(-e // c) + 1) for n, e, c in zip(counts, extent, chunks.cell, strict=True)]
    if per_object is not None:
        grouped = _cube(per_object, most if n_owners is None else min(most, chunks.n_cells // (BLOCKS_PER_OWNER * n_owners)))
    elif n_owners is None:
        grouped = _group(counts, reach, most)
    else:
        for n in range(min(per_owner, BLOCKS_PER_OWNER), BLOCKS_PER_OWNER + 1):
            grouped = _group(counts, reach, max(1, min(most, chunks.n_cells // (n * n_owners))))
            if math.prod(-(-n // g) for n, g in zip(counts, grouped, strict=True)) % n_owners == 0:
                break
    cell = tuple(g * c for g, c in zip(grouped, chunks.cell, strict=True))
    return Grid(chunks.shape, cell, chunks.phase)


def _group(counts: Sequence[int], reach: Sequence[int], most: int) -> list[int]:
    """How many chunks along each axis form a block that meets at most `most` of them: contiguous in the file's order."""
    grouped = [1] * len(counts)
    for axis in reversed(range(len(counts))):
        if reach[axis] > most:
            n_groups = -(-counts[axis] // most)
            grouped[axis] = -(-counts[axis] // n_groups)  # even groups instead of full ones and a small last one
            break
        grouped[axis] = max(1, counts[axis])
        most //= max(1, reach[axis])
    return grouped


def _cube(per_object: Sequence[int], most: int) -> list[int]:
    """How many chunks along each axis form a block of at most `most` of them: nearly a cube, and a divisor of the object.

    >>> _cube((4, 4, 4), 20), _cube((3, 10), 31), _cube((4, 4), 1)
    ([4, 2, 2], [3, 10], [1, 1])
    """
    cube, axes = [1] * len(per_object), list(range(len(per_object)))
    while axes:
        axis = axes.pop(0)
        rest = per_object[axis] // cube[axis]
        factor = next((k for k in range(2, rest + 1) if rest % k == 0), most + 1)
        if math.prod(cube) * factor <= most:
            cube[axis] *= factor
            axes.append(axis)
    return cube


def count_runs(shape: Sequence[int], extent: Sequence[int]) -> int:
    """The number of contiguous runs of the file that a box is made of.

    >>> count_runs((8, 8, 8), (4, 8, 8)), count_runs((8, 8, 8), (8, 4, 8)), count_runs((8, 8, 8), (8, 8, 4))
    (1, 8, 64)
    """
    runs, whole = 1, True
    for n, e in zip(reversed(shape), reversed(extent), strict=True):
        if not whole:
            runs *= min(n, e)
        whole = whole and e >= n
    return runs


def run_stride(shape: Sequence[int], extent: Sequence[int]) -> int:
    """Elements from the start of one run of a box to the start of the next.

    A run is what the box has of the last axis that is cut and all axes after it. The next run is one step further along the
    last earlier axis of which the box has more than one element.

    >>> run_stride((8, 8, 8), (4, 8, 8)), run_stride((8, 8, 8), (8, 4, 8)), run_stride((8, 8, 8), (8, 8, 4))
    (512, 64, 8)
    """
    cut = [k for k, (n, e) in enumerate(zip(shape, extent, strict=True)) if e < n]
    if not cut:
        return 0
    steps = [k for k in range(cut[-1]) if extent[k] > 1]
    return math.prod(shape[steps[-1] + 1 :] if steps else shape[cut[-1] :])


def run_of(shape: tuple[int, ...], region: Region) -> tuple[int, int] | None:
    """Where a region that is contiguous in an array in C order starts, and its length, in elements; None if it has several
    pieces, or none.

    >>> run_of((4, 6), Region((1, 0), (3, 6))), run_of((4, 6), Region((1, 2), (3, 4))), run_of((4, 6), Region((1, 2), (2, 4)))
    ((6, 12), None, (8, 2))
    """
    start, length, step, is_cut = 0, 1, 1, False
    for a, b, n in zip(region.start[::-1], region.stop[::-1], shape[::-1], strict=True):
        if b == a or (is_cut and b - a > 1):
            return None
        start, length, step, is_cut = start + a * step, length * (b - a), step * n, is_cut or b - a < n
    return start, length
