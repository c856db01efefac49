"""Who reads what, and who needs which part of it?

Pure: integers in, frozen dataclasses out. No JAX, no MPI, no files; ranks that hold the same integers hold the same plan.

1. An array is cut three ways, each a `Grid`: by the file into chunks, by the readers into blocks (whole chunks, so that no
   chunk is decoded twice), by the sharding into shards. Each axis is cut independently of the others.
2. `Shards` is the sharding's cut together with the ranks that hold each shard.
3. `ReadPlan` says, for one rank at a time and at the cost of its own work alone, which blocks it reads and where each part
   goes (`reads`), and which parts it gets from whom, in the order in which they are sent (`incoming`). The owner of a block is
   a formula, so no rank ever lists what the others do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shardload.region import Region

__all__ = [
    "MAX_MESSAGE_NBYTES",
    "Grid",
    "Part",
    "Read",
    "ReadPlan",
    "Shards",
    "plan_blocks",
    "plan_row_chunks",
    "plan_shards",
]

# MPI counts are C ints, and some transports are slow or wrong near their limits: half of 2 GiB is safe everywhere.
MAX_MESSAGE_NBYTES = 1 << 30

# Enough blocks per reader that the uneven last one costs at most a quarter, and that reading overlaps sending.
BLOCKS_PER_READER = 4


@dataclass(frozen=True, slots=True)
class Grid:
    """An array cut into equal cells along every axis; the first and the last cell of an axis may be cut short.

    Parameters
    ----------
    shape : tuple of int
        The array, in elements.
    cell : tuple of int
        One cell, in elements, at least 1 along each axis.
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
    """Cells along each axis; 0 along an empty axis."""

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.cell) == len(self.phase):
            raise ValueError(f"grid of shape {self.shape} has cell {self.cell} and phase {self.phase}")
        if any(c < 1 or not 0 <= p < c or n < 0 for n, c, p in zip(self.shape, self.cell, self.phase, strict=True)):
            raise ValueError(f"grid of shape {self.shape} cannot have cell {self.cell} and phase {self.phase}")
        axes = zip(self.shape, self.cell, self.phase, strict=True)
        # Asked for once per part of a plan, so counted once.
        object.__setattr__(self, "counts", tuple(-(-(n + p) // c) if n else 0 for n, c, p in axes))

    @property
    def n_cells(self) -> int:
        """Cells in all."""
        return math.prod(self.counts)

    def region(self, number: int) -> Region:
        """The elements of a cell, by its number in C order."""
        index = self.index(number)
        axes = zip(index, self.shape, self.cell, self.phase, strict=True)
        bounds = [(max(0, i * c - p), min(n, (i + 1) * c - p)) for i, n, c, p in axes]
        return Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))

    def index(self, number: int) -> tuple[int, ...]:
        """A cell's position along each axis, by its number in C order."""
        index = []
        for count in reversed(self.counts):
            number, i = divmod(number, count)
            index.append(i)
        return tuple(reversed(index))

    def meeting_axes(self, region: Region) -> list[range]:
        """The cells that share an element with a region, as a range along each axis."""
        axes = zip(region.start, region.stop, self.cell, self.phase, strict=True)
        return [range((a + p) // c, -(-(b + p) // c) if b > a else (a + p) // c) for a, b, c, p in axes]

    def meeting(self, region: Region) -> Iterator[int]:
        """Numbers of the cells that share an element with a region, ascending."""
        counts = self.counts
        strides = [math.prod(counts[k + 1 :]) for k in range(len(counts))]
        steps = [[i * s for i in axis] for axis, s in zip(self.meeting_axes(region), strides, strict=True)]
        return map(sum, itertools.product(*steps))

    def n_meeting(self, region: Region) -> int:
        """How many cells share an element with a region."""
        return math.prod(len(axis) for axis in self.meeting_axes(region))


@dataclass(frozen=True, eq=False)
class Shards:
    """Which rank holds which shard: the sharding as plain integers.

    Parameters
    ----------
    shape_global : tuple of int
        The global array, padded where it was padded, so that every cut divides its axis.
    cuts : tuple of int
        Shards along each axis.
    ranks : ndarray of int, shape (prod(cuts), n_replicas)
        For each shard (C order over `cuts`) the ranks of the devices that hold it, a row entry per device.
    """

    shape_global: tuple[int, ...]
    cuts: tuple[int, ...]
    ranks: np.ndarray[Any, np.dtype[np.int64]]

    def __post_init__(self) -> None:
        if any(n % c for n, c in zip(self.shape_global, self.cuts, strict=True)):
            raise ValueError(f"shape {self.shape_global} is not divided by cuts {self.cuts}")
        if self.ranks.ndim != 2 or len(self.ranks) != math.prod(self.cuts):
            raise ValueError(f"rank table of shape {self.ranks.shape} does not fit cuts {self.cuts}")

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Elements of one shard along each axis."""
        return tuple(n // c for n, c in zip(self.shape_global, self.cuts, strict=True))

    @cached_property
    def grid(self) -> Grid:
        """The cut as a grid (of an array that is not empty)."""
        return Grid(self.shape_global, tuple(max(1, n) for n in self.shard_shape), (0,) * len(self.cuts))

    def region(self, shard: int) -> Region:
        """The elements of a shard, padding included."""
        index = np.unravel_index(shard, self.cuts) if self.cuts else ()
        start = tuple(int(i) * n for i, n in zip(index, self.shard_shape, strict=True))
        return Region(start, tuple(a + n for a, n in zip(start, self.shard_shape, strict=True)))

    def holders(self, shard: int) -> tuple[int, ...]:
        """The ranks that hold a shard, ascending, each once."""
        return tuple(sorted({int(r) for r in self.ranks[shard]}))

    def shards_of(self, rank: int) -> tuple[int, ...]:
        """The shards that a rank holds, ascending, each once."""
        return tuple(int(s) for s in np.flatnonzero((self.ranks == rank).any(axis=1)))


def plan_shards(shape_global: Sequence[int], axes: Sequence[Sequence[int]], ranks: np.ndarray[Any, Any]) -> Shards:
    """Cut an array over a mesh.

    Parameters
    ----------
    shape_global : sequence of int
        The array, every axis a multiple of the product of its mesh axes.
    axes : sequence of sequence of int
        For each array axis the mesh axes that cut it, major first; empty for an axis that is not cut.
    ranks : ndarray of int, shape of the mesh
        The rank of the device at each place of the mesh.

    Examples
    --------
    A mesh of 2 x 3 whose first axis cuts nothing: each shard is held by the two ranks of a mesh column.

    >>> s = plan_shards((6,), [(1,)], np.arange(6).reshape(2, 3))
    >>> s.cuts, s.holders(2), str(s.region(2))
    ((3,), (2, 5), '[4:6]')
    """
    used = [m for cut in axes for m in cut]
    unused = [m for m in range(ranks.ndim) if m not in used]
    cuts = tuple(math.prod(ranks.shape[m] for m in cut) for cut in axes)
    # Mesh axes in the order of the array axes they cut, the rest last: then a row is a shard and a column a replica.
    table = np.transpose(ranks, (*used, *unused)).reshape(math.prod(cuts), -1)
    return Shards(tuple(shape_global), cuts, np.ascontiguousarray(table, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Part:
    """Elements that go from one block to one piece.

    Attributes
    ----------
    region : Region
        The elements, in global coordinates: all inside the block and inside the shard.
    shard : int
        The shard whose piece they belong to.
    rank : int
        In `Read.parts` the rank that gets them, in `ReadPlan.incoming` the rank that sends them.
    """

    region: Region
    shard: int
    rank: int


@dataclass(frozen=True, slots=True)
class Read:
    """One block to be read, and where its parts go, in the order in which they are sent."""

    region: Region
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """Who reads what, and who needs which part of it.

    Parameters
    ----------
    blocks : Grid
        The true array (without padding) cut into blocks of whole chunks.
    shards : Shards
        The padded array cut into shards.
    itemsize : int
        Bytes per element as they travel.
    n_ranks, n_readers : int
        Ranks in the job, and how many of them read. `n_readers` = 0: every rank reads what it holds, nothing travels.
    root : int
        The rank that reads when there is one reader.
    max_message_nbytes : int
        Cap on a message, beside `MAX_MESSAGE_NBYTES`.
    """

    blocks: Grid
    shards: Shards
    itemsize: int
    n_ranks: int
    n_readers: int
    root: int = 0
    max_message_nbytes: int = 1 << 62

    def __post_init__(self) -> None:
        if not 0 <= self.n_readers <= self.n_ranks or not 0 <= self.root < self.n_ranks:
            raise ValueError(f"{self.n_readers} readers of {self.n_ranks} ranks with root {self.root}")

    @property
    def is_direct(self) -> bool:
        """Whether every rank reads its own shards."""
        return self.n_readers == 0

    @property
    def max_read_size(self) -> int:
        """Elements that no `Read` exceeds: a block, or as much of it as fits into a shard where only that is read."""
        reach = self.shards.shard_shape if self.is_direct else self.blocks.shape
        return math.prod(map(min, self.blocks.cell, self.blocks.shape, reach))

    def reader_rank(self, reader: int) -> int:
        """The rank of a reader: readers are spread evenly over the ranks, and so over the nodes."""
        return self.root if self.n_readers == 1 else reader * self.n_ranks // self.n_readers

    def owner(self, block: int) -> int:
        """The rank that reads a block. Each reader's blocks are contiguous in C order, which is the file's order."""
        return self.reader_rank(((block + 1) * self.n_readers - 1) // self.blocks.n_cells)

    def blocks_of(self, rank: int) -> range:
        """The blocks that a rank reads: the inverse of `owner`."""
        if self.is_direct:
            return range(0)
        if self.n_readers == 1:
            return range(self.blocks.n_cells if rank == self.root else 0)
        reader = -(-rank * self.n_readers // self.n_ranks)  # the first reader whose rank is not below this one
        if reader >= self.n_readers or self.reader_rank(reader) != rank:
            return range(0)
        n = self.blocks.n_cells
        return range(reader * n // self.n_readers, (reader + 1) * n // self.n_readers)

    def is_reader(self, rank: int) -> bool:
        """Whether a rank has anything to read."""
        return bool(self.shards.shards_of(rank)) if self.is_direct else len(self.blocks_of(rank)) > 0

    def true_region(self, shard: int) -> Region | None:
        """The elements of a shard that the array really has: without padding; None where all of it is padding."""
        return self.shards.region(shard).intersect(Region.whole(self.blocks.shape))

    def reads(self, rank: int) -> Iterator[Read]:
        """What a rank reads, block by block in file order, and where each part goes."""
        if self.is_direct:
            yield from self._direct_reads(rank)
            return
        grid = self.shards.grid
        for block in self.blocks_of(rank):
            region = self.blocks.region(block)
            parts = [
                Part(piece, shard, holder)
                for shard in grid.meeting(region)
                for holder in self.shards.holders(shard)
                for piece in self._messages(region, shard)
            ]
            yield Read(region, tuple(parts))

    def _direct_reads(self, rank: int) -> Iterator[Read]:
        for shard in self.shards.shards_of(rank):
            held = self.true_region(shard)
            for block in self.blocks.meeting(held) if held else ():
                region = self.blocks.region(block).intersect(held) if held else None
                if region is not None:
                    yield Read(region, (Part(region, shard, rank),))

    def incoming(self, rank: int) -> dict[int, list[Part]]:
        """What a rank gets from each other rank, in the order in which that rank sends it."""
        if self.is_direct:
            return {}
        arriving: list[tuple[int, int, int]] = []
        for shard in self.shards.shards_of(rank):
            held = self.true_region(shard)
            if held is not None:
                arriving += [(self.owner(block), block, shard) for block in self.blocks.meeting(held)]
        # A sender goes through its blocks in order, and through the shards of each block in order.
        parts: dict[int, list[Part]] = {}
        for sender, block, shard in sorted(arriving):
            if sender != rank:
                messages = self._messages(self.blocks.region(block), shard)
                parts.setdefault(sender, []).extend(Part(region, shard, sender) for region in messages)
        return parts

    def _messages(self, block: Region, shard: int) -> Iterator[Region]:
        region = block.intersect(self.shards.region(shard))
        cap = min(self.max_message_nbytes, MAX_MESSAGE_NBYTES)
        return iter(()) if region is None else region.split(max(1, cap // self.itemsize))


def plan_row_chunks(shape: Sequence[int], itemsize: int, row_nbytes: int = 1 << 20) -> tuple[int, ...]:
    """Stand-in chunks for an array that has none: runs of the last axis, at most `row_nbytes` long.

    >>> plan_row_chunks((512, 512, 512), 4), plan_row_chunks((10**9,), 4)
    ((1, 1, 512), (262144,))
    """
    if not shape:
        return ()
    return (1,) * (len(shape) - 1) + (max(1, min(shape[-1], row_nbytes // itemsize)),)


def plan_blocks(chunks: Grid, itemsize: int, *, max_nbytes: int, n_readers: int, within: Sequence[int] | None = None) -> Grid:
    """Group chunks into blocks: what one reader reads at once.

    A block is whole chunks, contiguous in the file's (C) order, at most `max_nbytes` (but at least one chunk), and small
    enough that each reader has several.

    Parameters
    ----------
    chunks : Grid
        The array cut into the file's chunks.
    itemsize : int
        Bytes per element.
    max_nbytes : int
        Cap on a block.
    n_readers : int
        How many ranks share the blocks; 0 where each reads its own shards.
    within : sequence of int, optional
        Shape of the shards, where only the parts of blocks inside a shard are read: the cap then counts those.

    Examples
    --------
    >>> planes = Grid((512, 512, 512), (1, 512, 512), (0, 0, 0))
    >>> plan_blocks(planes, 4, max_nbytes=16 << 20, n_readers=8).cell
    (16, 512, 512)
    """
    counts = chunks.counts
    extent = chunks.shape if within is None else [min(n, w) for n, w in zip(chunks.shape, within, strict=True)]
    cell_size = [min(c, e) for c, e in zip(chunks.cell, extent, strict=True)]
    room = max(1, max_nbytes // max(1, math.prod(cell_size) * itemsize))
    if n_readers:
        room = max(1, min(room, chunks.n_cells // (BLOCKS_PER_READER * n_readers)))
    grouped = [1] * len(counts)
    for axis in reversed(range(len(counts))):
        # Chunks along this axis that one read can meet: all of them, or those that one shard reaches into.
        reach = counts[axis] if within is None else min(counts[axis], -(-extent[axis] // chunks.cell[axis]) + 1)
        if reach > room:
            n_groups = -(-counts[axis] // room)
            grouped[axis] = -(-counts[axis] // n_groups)  # even groups, not full ones and a small last one
            break
        grouped[axis] = max(1, counts[axis])
        room //= max(1, reach)
    cell = tuple(g * c for g, c in zip(grouped, chunks.cell, strict=True))
    return Grid(chunks.shape, cell, chunks.phase)
