"""Who reads what, and who needs which part of it?

Pure: integers in, frozen dataclasses out. No JAX, no MPI, no files; ranks that hold the same integers hold the same plan.

1. An array is cut three ways, each a `Grid`: by the file into chunks, by the readers into blocks (whole chunks, so that no
   chunk is decoded twice), by the sharding into shards. Each axis is cut independently of the others.
2. `Shards` is the sharding's cut together with the ranks that hold each shard.
3. `Schedule` says, for one rank at a time and at the cost of its own work alone, which blocks it reads and where each part
   goes (`reads`), and which parts it gets from whom, in the order in which they are sent (`incoming`). The owner of a block is
   a formula, so no rank ever lists what the others do. Parts are made when they are looked at: a block that a million ranks
   share is planned as fast as one that two share.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from shardload.planning.grid import Grid
from shardload.planning.region import Region
from shardload.planning.shards import RankBoxes, Shards, plan_shards

__all__ = [
    "MAX_MESSAGE_NBYTES",
    "NEAR_NBYTES",
    "Block",
    "Grid",
    "Part",
    "Parts",
    "RankBoxes",
    "Schedule",
    "Shards",
    "count_runs",
    "plan_blocks",
    "plan_direct",
    "plan_row_chunks",
    "plan_shards",
    "run_stride",
]

# MPI counts are C ints, and some transports are slow or wrong near their limits: half of 2 GiB is safe everywhere.
MAX_MESSAGE_NBYTES = 1 << 30

# Enough blocks per reader that the uneven last one costs at most a quarter, and that reading overlaps sending.
BLOCKS_PER_READER = 4

# Runs that start no further apart are read with what lies between them, as sources.hdf5_contiguous does.
NEAR_NBYTES = 32 << 10

# Lists of parts up to this length are kept once they were gone through: they are gone through several times.
_MAX_KEPT = 4096

IntArray = np.ndarray[Any, np.dtype[np.int64]]


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
        In `StagedBlock.parts` the rank that gets them, in `Schedule.incoming` the rank that sends them.
    """

    region: Region
    shard: int
    rank: int


class Parts(Sequence[Part]):
    """Parts in order, made when they are looked at and, where they are many, not kept. Equal to any sequence of the same parts.

    Parameters
    ----------
    make : callable
        Makes the part at a place.
    places : range
        The places.
    """

    __slots__ = ("_kept", "_make", "_places")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, make: Callable[[int], Part], places: range) -> None:
        self._make, self._places = make, places
        self._kept: tuple[Part, ...] | None = None

    def __iter__(self) -> Iterator[Part]:
        if len(self._places) > _MAX_KEPT:
            return map(self._make, self._places)
        if self._kept is None:
            self._kept = tuple(map(self._make, self._places))
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, key: int) -> Part: ...
    @overload
    def __getitem__(self, key: slice) -> Parts: ...
    def __getitem__(self, key: int | slice) -> Part | Parts:
        if self._kept is not None and not isinstance(key, slice):
            return self._kept[key]
        found = self._places[key]
        return Parts(self._make, found) if isinstance(found, range) else self._make(found)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"Parts({list(self)})"


class Incoming(Mapping[int, Sequence[Part]]):
    """The parts from each sender, ascending by sender; like `Parts`, made when they are looked at.

    Parameters
    ----------
    make : callable
        Makes the part at a place.
    runs : mapping of int to range
        The places of each sender's parts.
    """

    __slots__ = ("_make", "_runs")

    def __init__(self, make: Callable[[int], Part], runs: Mapping[int, range]) -> None:
        self._make, self._runs = make, runs

    def __getitem__(self, sender: int) -> Parts:
        return Parts(self._make, self._runs[sender])

    def __iter__(self) -> Iterator[int]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"Incoming({dict(self)})"


@dataclass(frozen=True, slots=True)
class Block:
    """One block to be read, and where its parts go, in the order in which they are sent."""

    region: Region
    parts: Sequence[Part]


@dataclass(frozen=True, eq=False)
class Schedule:
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
    is_merged : bool
        Where every rank reads what it holds: whether it reads a block once for all of its shards, or once for each.
    """

    blocks: Grid
    shards: Shards
    itemsize: int
    n_ranks: int
    n_readers: int
    root: int = 0
    max_message_nbytes: int = 1 << 62
    is_merged: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.n_readers <= self.n_ranks or not 0 <= self.root < self.n_ranks:
            raise ValueError(f"{self.n_readers} readers of {self.n_ranks} ranks with root {self.root}")

    @property
    def is_direct(self) -> bool:
        """Whether every rank reads its own shards."""
        return self.n_readers == 0

    @property
    def max_block_size(self) -> int:
        """Elements that no `Block` exceeds: a cell of the grid, or what a shard, or a rank, has of it where that is read."""
        return math.prod(map(min, self.blocks.cell, self.blocks.shape, self.extent))

    @property
    def extent(self) -> tuple[int, ...]:
        """Along each axis, what reads are cut from: the array, a shard where each is read by itself, or what a rank has."""
        if not self.is_direct:
            return self.blocks.shape
        return self.shards.reach if self.is_merged else self.shards.shard_shape

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

    def is_owner(self, rank: int) -> bool:
        """Whether a rank has anything to read."""
        return bool(self.shards.shards_of(rank)) if self.is_direct else len(self.blocks_of(rank)) > 0

    def true_region(self, shard: int) -> Region | None:
        """The elements of a shard that the array really has: without padding; None where all of it is padding."""
        return self.shards.region(shard).intersect(Region.whole(self.blocks.shape))

    def reads(self, rank: int) -> Iterator[Block]:
        """What a rank reads, block by block in file order, and where each part goes."""
        if self.is_direct:
            yield from self._direct_reads(rank)
            return
        for block in self.blocks_of(rank):
            yield Block(self.blocks.region(block), self._outgoing(block))

    def _outgoing(self, block: int) -> Sequence[Part]:
        shards, region = self.shards, self.blocks.region(block)
        n_holders = shards.n_holders
        if n_holders is None or not self._is_never_split:
            return tuple(
                Part(piece, shard, holder)
                for shard in shards.grid.meeting(region)
                for holder in shards.holders(shard)
                for piece in self._messages(region, shard)
            )
        met, counts, bounds = shards.grid.meeting_axes(region), shards.cuts, self.blocks.bounds(block)

        def make(i: int) -> Part:
            i, k = divmod(i, n_holders)
            shard, stride = 0, 1
            for axis, count in zip(reversed(met), reversed(counts), strict=True):
                i, step = divmod(i, len(axis))
                shard, stride = shard + axis[step] * stride, stride * count
            return self._part(bounds, shard, shards.holder(shard, k))

        return Parts(make, range(math.prod(map(len, met)) * n_holders))

    def _direct_reads(self, rank: int) -> Iterator[Block]:
        if self.is_merged:
            yield from self._merged_reads(rank)
            return
        for shard in self.shards.shards_of(rank):
            held = self.true_region(shard)
            for block in self.blocks.meeting(held) if held else ():
                region = self.blocks.region(block).intersect(held) if held else None
                if region is not None:
                    yield Block(region, (Part(region, shard, rank),))

    def _merged_reads(self, rank: int) -> Iterator[Block]:
        """Each block once, with a part for each shard that it meets. Between the parts there may be gaps."""
        block, shard = (found.tolist() for found in self._arriving(rank))
        for number, pairs in itertools.groupby(zip(block, shard, strict=True), key=operator.itemgetter(0)):
            bounds = self.blocks.bounds(number)
            parts = tuple(self._part(bounds, met, rank) for _, met in pairs)
            start = tuple(map(min, zip(*(part.region.start for part in parts), strict=True)))
            stop = tuple(map(max, zip(*(part.region.stop for part in parts), strict=True)))
            yield Block(Region(start, stop), parts)

    def incoming(self, rank: int) -> Mapping[int, Sequence[Part]]:
        """What a rank gets from each other rank, in the order in which that rank sends it."""
        if self.is_direct:
            return {}
        block, shard = self._arriving(rank)
        owner = self.owners(block)
        # Owners ascend with blocks, so what one sender sends is a run.
        starts = np.flatnonzero(np.diff(owner, prepend=-1)).tolist()
        runs = {
            sender: range(a, b) for sender, a, b in zip(owner[starts].tolist(), starts, [*starts, len(owner)][1:], strict=True)
        }
        runs.pop(rank, None)
        if not self._is_never_split:
            return {
                sender: [
                    Part(region, int(shard[k]), sender)
                    for k in run
                    for region in self._messages(self.blocks.region(int(block[k])), int(shard[k]))
                ]
                for sender, run in runs.items()
            }

        def make(k: int) -> Part:
            return self._part(self.blocks.bounds(int(block[k])), int(shard[k]), int(owner[k]))

        return Incoming(make, runs)

    def _arriving(self, rank: int) -> tuple[IntArray, IntArray]:
        """The (block, shard) pairs that meet, of the shards that a rank holds, in the order of blocks, then shards."""
        blocks, shards = [], []
        for shard in self.shards.shards_of(rank):
            held = self.true_region(shard)
            if held is not None:
                met = self.blocks.meeting_array(held)
                blocks.append(met)
                shards.append(np.full(len(met), shard))
        if not blocks:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        block, shard_ = np.concatenate(blocks), np.concatenate(shards)
        if len(blocks) > 1:
            order = np.lexsort((shard_, block))
            block, shard_ = block[order], shard_[order]
        return block, shard_

    def owners(self, blocks: IntArray) -> IntArray:
        """`owner` of many blocks."""
        if self.n_readers == 1:
            return np.full(blocks.shape, self.root)
        readers = ((blocks + 1) * self.n_readers - 1) // self.blocks.n_cells
        return readers * self.n_ranks // self.n_readers

    def _part(self, block: list[tuple[int, int]], shard: int, rank: int) -> Part:
        """What a block, by its bounds, and a shard that it meets have in common, where that is one message."""
        met = list(zip(block, self.shards.grid.bounds(shard), strict=True))
        start = tuple([max(a, c) for (a, _), (c, _) in met])
        return Part(Region(start, tuple([min(b, d) for (_, b), (_, d) in met])), shard, rank)

    @cached_property
    def _is_never_split(self) -> bool:
        """Whether a part is one message, however large it is."""
        part = map(min, self.blocks.cell, self.blocks.shape, self.shards.shard_shape)
        return math.prod(part) * self.itemsize <= min(self.max_message_nbytes, MAX_MESSAGE_NBYTES)

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


def plan_blocks(
    chunks: Grid,
    itemsize: int,
    *,
    max_nbytes: int,
    n_readers: int,
    within: Sequence[int] | None = None,
    max_cells: int = 1 << 62,
) -> Grid:
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
        Shape of the shards, where only the parts of blocks inside a shard are read: the caps then count those.
    max_cells : int
        Cap on the chunks that one read meets, where each costs something beside its bytes.

    Examples
    --------
    >>> planes = Grid((512, 512, 512), (1, 512, 512), (0, 0, 0))
    >>> plan_blocks(planes, 4, max_nbytes=16 << 20, n_readers=8).cell
    (16, 512, 512)
    """
    counts = chunks.counts
    extent = chunks.shape if within is None else [min(n, w) for n, w in zip(chunks.shape, within, strict=True)]
    cell_size = [min(c, e) for c, e in zip(chunks.cell, extent, strict=True)]
    room = max(1, min(max_cells, max_nbytes // max(1, math.prod(cell_size) * itemsize)))
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


def plan_direct(
    chunks: Grid,
    shards: Shards,
    itemsize: int,
    n_ranks: int,
    *,
    has_chunks: bool,
    file_itemsize: int,
    max_nbytes: int,
    max_cells: int = 1 << 62,
) -> Schedule:
    """Every rank reads what it holds; what several shards of a rank need is read once, where reading it apart costs more.

    That is so where a chunk may lie in two shards, and where runs are so near each other that what lies between is read too.
    Else each shard is read by itself: without a copy where it lies in the file as in memory, and the first is there early.

    Parameters
    ----------
    chunks, has_chunks : Grid, bool
        The file's chunks, or stand-ins where it has none.
    shards : Shards
        Which rank holds which.
    itemsize, file_itemsize : int
        Bytes per element as they travel, and in the file.
    n_ranks : int
        Ranks in the job.
    max_nbytes, max_cells : int
        Caps on a block: bytes, and chunks in it.
    """

    def cut(is_merged: bool) -> Schedule:
        within = shards.reach if is_merged else shards.shard_shape
        caps: dict[str, Any] = dict(max_nbytes=max_nbytes, max_cells=max_cells)
        blocks = plan_blocks(chunks, max(itemsize, file_itemsize), n_readers=0, within=within, **caps)
        return Schedule(blocks, shards, itemsize, n_ranks, 0, is_merged=is_merged)

    if shards.most_held == 1:
        return cut(False)
    extent = shards.shard_shape
    if has_chunks:
        axes = zip(shards.cuts, extent, chunks.cell, chunks.phase, strict=True)
        return cut(any(n > 1 and (phase or e % cell) for n, e, cell, phase in axes))
    is_near = run_stride(chunks.shape, extent) * file_itemsize <= NEAR_NBYTES
    return cut(count_runs(chunks.shape, extent) > 1 and is_near)


def count_runs(shape: Sequence[int], extent: Sequence[int]) -> int:
    """Contiguous runs of the file that a box of it is made of.

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
    """Elements from the start of one run of a box to the next: one step along the last axis before the last that is cut.

    A run is what the box has of that axis and all after it. An axis of which it has one element is no step.

    >>> run_stride((8, 8, 8), (4, 8, 8)), run_stride((8, 8, 8), (8, 4, 8)), run_stride((8, 8, 8), (8, 8, 4))
    (512, 64, 8)
    """
    cut = [k for k, (n, e) in enumerate(zip(shape, extent, strict=True)) if e < n]
    if not cut:
        return 0
    steps = [k for k in range(cut[-1]) if extent[k] > 1]
    return math.prod(shape[steps[-1] + 1 :] if steps else shape[cut[-1] :])
