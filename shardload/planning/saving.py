"""Which chunks does a new file get, who writes which, in which round, and which parts of shards travel there?

Pure: integers in, frozen dataclasses out. Ranks with the same integers make the same plan.

1. `plan_write_layout` decides how one array goes: a `WriteLayout`. If each chunk lies in one shard, a holder of that shard
   writes it, and nothing travels. Otherwise chunks are grouped into blocks, which all ranks share out in the file's order, and
   parts of shards travel to the owners, by a `Schedule`.
2. `plan_save_rounds` cuts the work of all arrays into rounds under the staging cap. Each rank takes part in each round, so a
   round is the same list of arrays on every rank.
3. `plan_chunks` and its like choose the chunks of a new array.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardload.planning.region import Grid, Region, aligned, plan_blocks
from shardload.planning.schedule import Owners, Schedule
from shardload.planning.shards import Shards
from shardload.planning.staging import Item, RoundMemory, least_memory, plan_memory, plan_rounds

_LEAST_RUN_NBYTES = 64 << 10  # of a contiguous array: shorter runs are collected by one rank
_BLOCK_NBYTES, _MOST_FILE_NBYTES = 4 << 20, 64 << 20
_PACKS = 6


@dataclass(frozen=True)
class StoredArray:
    """How one array will be stored, as far as planning asks.

    Attributes
    ----------
    shape : tuple of int
        Without padding.
    chunks : tuple of int or None
        Elements of a chunk along each axis; None for a contiguous array.
    itemsize : int
        Bytes per element.
    is_packed : bool
        Whether chunks are compressed or changed otherwise, so that encoding is work.
    files : tuple of int or None
        Elements of a file along each axis, if several chunks share one (Zarr's shards).
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    itemsize: int
    is_packed: bool
    files: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class WriteLayout:
    """How one array goes from its shards to the file.

    Attributes
    ----------
    array : StoredArray
        The array.
    units : Grid
        What one rank writes: blocks of chunks, chunks, or files of them; of a contiguous array, runs of the file.
    chunks : Grid
        What is encoded at once: the chunks; of a contiguous array, the units.
    shards : Shards
        Which rank holds which shard.
    schedule : Schedule or None
        Which rank owns which unit, if parts of shards travel to the owners. None: each unit lies in one shard, and a rank that
        holds that writes it.
    growth : int
        How many times larger a chunk may be when elements that are stored already have been added to it.
    """

    array: StoredArray
    units: Grid
    chunks: Grid
    shards: Shards
    schedule: Schedule | None = None
    growth: int = 1

    @property
    def unit_nbytes(self) -> int:
        """Bytes of the largest unit."""
        return math.prod(map(min, self.units.cell, self.units.shape)) * self.array.itemsize * self.growth

    @cached_property
    def most_units(self) -> int:
        """Upper bound on the units of one rank."""
        if self.schedule is not None:
            return self.schedule.most_blocks
        of_shard = math.prod(-(-n // c) for n, c in zip(self.shards.shard_shape, self.units.cell, strict=True))
        n_holders = self.shards.n_holders or 1
        return -(-of_shard // n_holders) * self.shards.most_held

    def units_of(self, rank: int) -> Iterator[tuple[int, int]]:
        """The units that a rank writes, each with its shard, if none travels: the ranks that hold a shard take turns."""
        for shard in self.shards.shards_of(rank):
            region, holders = self.shards.region(shard).intersect(Region.whole(self.units.shape)), self.shards.holders(shard)
            if region is not None:
                for unit in itertools.islice(self.units.meeting(region), holders.index(rank), None, len(holders)):
                    yield unit, shard

    def nbytes_of(self, rank: int) -> int:
        """Bytes of the units that a rank writes."""
        units: Iterable[int] = (unit for unit, _ in self.units_of(rank))
        if self.schedule is not None:
            units = self.schedule.blocks_of(rank)
        return sum(self.units.region(unit).size for unit in units) * self.array.itemsize


def plan_write_layout(
    array: StoredArray,
    shards: Shards,
    n_ranks: int,
    n_nodes: int = 1,
    cap_nbytes: int = 1 << 62,
    first: tuple[int, ...] | None = None,
) -> WriteLayout:
    """How one array goes from its shards to the file.

    Parameters
    ----------
    array : StoredArray
        How it will be stored.
    shards : Shards
        Which rank holds which shard. `Shards.shape_global` may have padding.
    n_ranks : int
        Number of ranks of the job.
    n_nodes : int
        Number of machines that they are on.
    cap_nbytes : int
        Staging memory: blocks are smaller if it is small.
    first : tuple of int, optional
        Where the array's first element is in the array of the file, if it is appended to one that has chunks: the first chunk
        may have elements already.
    """
    block_nbytes = max(1, min(_BLOCK_NBYTES, cap_nbytes // SHARE_OF_CAP))
    phase = (0,) * len(array.shape)
    if 0 in array.shape:
        nothing = Grid(array.shape, tuple(max(1, n) for n in array.shape), phase)
        return WriteLayout(array, nothing, nothing, shards)
    page = page_nbytes(n_nodes)
    if array.chunks is None:
        runs = _runs_in_shards(array, shards, page, block_nbytes)
        if runs is not None:
            return WriteLayout(array, runs, runs, shards)
        cell, fits = plan_rows(array.shape, array.itemsize, block_nbytes, page)
        rows = Grid(array.shape, cell, phase)
        rows_owners = Owners(max(1, min(n_ranks, rows.n_cells))) if fits else Owners()
        return WriteLayout(array, rows, rows, shards, Schedule(rows, shards, array.itemsize, n_ranks, rows_owners))
    phase = phase if first is None else tuple(k % c for k, c in zip(first, array.chunks, strict=True))
    chunks = units = Grid(array.shape, array.chunks, phase)
    # A block has this many times its bytes when its first chunks have been completed.
    growth = math.prod(-(-c // min(c, n)) for c, n, p in zip(array.chunks, array.shape, phase, strict=True) if p)
    if array.files is not None and n_nodes > 1:  # a file has chunks at any byte, so one rank writes all of it
        begins = (0,) * len(array.shape) if first is None else first
        units = Grid(array.shape, array.files, tuple(k % c for k, c in zip(begins, array.files, strict=True)))
        if math.prod(array.files) * array.itemsize > _MOST_FILE_NBYTES:
            blocks = plan_blocks(chunks, array.itemsize * growth, max_nbytes=block_nbytes, n_owners=1, per_owner=1)
            schedule = Schedule(blocks, shards, array.itemsize, n_ranks, Owners())
            return WriteLayout(array, blocks, chunks, shards, schedule, growth)
    # Where they are, the ranks that hold it must be enough to encode it: more than half of all, or encoding is no work.
    are_enough = not array.is_packed or 2 * shards.n_holding > n_ranks
    if are_enough and not any(units.phase) and _is_inside(units, shards):
        return WriteLayout(array, units, chunks, shards)
    n_owners = max(1, min(n_ranks, units.n_cells))
    blocks = plan_blocks(units, array.itemsize * growth, max_nbytes=block_nbytes, n_owners=n_owners, per_owner=1)
    owners = Owners(max(1, min(n_owners, blocks.n_cells)))
    return WriteLayout(array, blocks, chunks, shards, Schedule(blocks, shards, array.itemsize, n_ranks, owners), growth)


def _is_inside(chunks: Grid, shards: Shards) -> bool:
    """True if each chunk lies in one shard."""
    axes = zip(shards.shard_shape, chunks.cell, chunks.shape, shards.cuts, strict=True)
    return all(cut == 1 or s % c == 0 or s >= n for s, c, n, cut in axes)


def _runs_in_shards(array: StoredArray, shards: Shards, page: int, most_nbytes: int) -> Grid | None:
    """Cells of a contiguous array that are runs of the file and lie in one shard; None if they would be too short, or if two
    nodes would write to a page.
    """
    shape, extent = array.shape, [min(s, n) for s, n in zip(shards.shard_shape, array.shape, strict=True)]
    last = max((k for k, n in enumerate(shape) if extent[k] < n), default=-1)
    if last < 0 and math.prod(shape) * array.itemsize <= most_nbytes:
        return Grid(shape, shape, (0,) * len(shape))  # one rank writes all of it
    least_nbytes = min(_LEAST_RUN_NBYTES, most_nbytes)
    cell = [1 if axis < last else extent[axis] for axis in range(len(shape))]
    for axis in range(max(0, last), len(shape)):
        row = math.prod(cell[axis + 1 :]) * array.itemsize
        if row > most_nbytes:
            cell[axis] = 1
            continue
        most_rows = min(cell[axis], most_nbytes // row)
        sizes = [n for n in range(1, most_rows + 1) if (axis != last or cell[axis] % n == 0) and n * row % page == 0]
        cell[axis] = max(sizes, default=0)
        if not cell[axis] or (axis and shape[axis] * row % page) or (last >= 0 and cell[axis] * row < least_nbytes):
            return None
        break
    return Grid(shape, tuple(cell), (0,) * len(cell))


# --- memory and rounds


def count_packs(moving_nbytes: int, part_nbytes: int) -> int:
    """Number of buffers in which parts are packed.

    >>> count_packs(6000, 1000), count_packs(2500, 1000), count_packs(0, 0)
    (6, 2, 2)
    """
    return max(1, min(_PACKS, moving_nbytes // part_nbytes)) if part_nbytes else 2


def part_nbytes(layouts: Sequence[WriteLayout]) -> int:
    """Bytes of the largest part that travels; 0 if none does."""
    return max((aligned(layout.schedule.max_part_nbytes) for layout in layouts if layout.schedule is not None), default=0)


def _sizes(layouts: Sequence[WriteLayout]) -> tuple[int, int, int]:
    """Bytes of the largest unit, of the largest chunk that is work to encode, and of a buffer of each kind."""
    unit = max((layout.unit_nbytes for layout in layouts), default=0)
    packed = [layout.array for layout in layouts if layout.array.chunks is not None and layout.array.is_packed]
    chunk = max((math.prod(array.chunks or ()) * array.itemsize for array in packed), default=0)
    return unit, chunk, 2 * part_nbytes(layouts)


def least_save_memory(layouts: Sequence[WriteLayout]) -> int:
    """Fewest bytes of staging memory with which these arrays can be saved."""
    return least_memory(*_sizes(layouts))


def plan_save_memory(layouts: Sequence[WriteLayout], cap_nbytes: int, n_threads: int) -> RoundMemory:
    """How the memory under a cap is used. The cap is at least `least_save_memory`."""
    return plan_memory(cap_nbytes, *_sizes(layouts), n_threads, _PACKS * part_nbytes(layouts))


def plan_save_rounds(layouts: Sequence[WriteLayout], round_nbytes: int) -> list[list[Item]]:
    """The rounds of a save, the same for all ranks: `Item.units` are places among the units of each rank."""
    units = ((number, range(layout.most_units), aligned(layout.unit_nbytes)) for number, layout in enumerate(layouts))
    return list(plan_rounds(units, round_nbytes))


# --- which chunks does a new array get?

SHARE_OF_CAP = 32  # of the staging memory, for one chunk: five rounds of it, buffers for parts of it, and scratch memory
_MOST_CHUNK_NBYTES, _LEAST_CHUNK_NBYTES = 4 << 20, 1 << 18
_FACTORS = (2, 3, 5, 7)
_LEAST_ROWS = 512  # of a chunk along an axis that can grow, if rows are short: a time axis gets no chunk for each step
_MOST_ROWS = 4  # times the bytes that are asked for, if rows have to begin at pages


def plan_chunks(shape: Sequence[int], itemsize: int, shards: Shards, cap_nbytes: int = 1 << 62) -> tuple[int, ...]:
    """Chunks of at most 4 MiB (less if the staging memory is small), each inside one shard if shards are not much smaller than
    that and can be divided.

    Examples
    --------
    Pencils of 512^3 float32 on 2 x 2 ranks; then small shards, which are joined:

    >>> import numpy as np
    >>> from shardload.planning.shards import plan_shards
    >>> pencils = plan_shards((512, 512, 512), [(0,), (1,), ()], np.arange(4).reshape(2, 2))
    >>> plan_chunks((512, 512, 512), 4, pencils)
    (64, 128, 128)
    >>> plan_chunks((64, 64), 4, plan_shards((64, 64), [(0,), ()], np.arange(64)))
    (64, 64)
    """
    cell = [max(1, min(n, s)) for n, s in zip(shape, shards.shard_shape, strict=True)]
    is_cut = [c > 1 for c in shards.cuts]
    most_nbytes = max(itemsize, min(_MOST_CHUNK_NBYTES, cap_nbytes // SHARE_OF_CAP))
    while math.prod(cell) * itemsize > most_nbytes:
        axis, step = _next_cut(cell, is_cut)
        cell[axis] = -(-cell[axis] // step)
    # Join small shards: the last axes first, whose chunks then are runs of the file.
    for axis in reversed(range(len(cell))):
        while cell[axis] < shape[axis] and 2 * math.prod(cell) * itemsize <= min(2 * _LEAST_CHUNK_NBYTES, most_nbytes):
            cell[axis] = min(shape[axis], 2 * cell[axis])
    return tuple(cell)


def _next_cut(cell: Sequence[int], is_cut: Sequence[bool]) -> tuple[int, int]:
    """The axis to make shorter, the longest that can be, and by which factor: one that divides it if a mesh axis cuts it."""
    for axis in sorted(range(len(cell)), key=lambda k: -cell[k]):
        if cell[axis] == 1:
            break
        if not is_cut[axis]:
            return axis, 2
        for factor in _FACTORS:
            if cell[axis] % factor == 0:
                return axis, factor
    return max(range(len(cell)), key=lambda k: cell[k]), 2


def page_nbytes(n_nodes: int) -> int:
    """Where parts of a file begin that ranks write: at pages if they are on several nodes, whose clients (of Lustre, NFS) may
    lose each other's bytes in a page; else anywhere.
    """
    return 4096 if n_nodes > 1 else 1


def growing_chunks(shape: Sequence[int], axis: int, itemsize: int) -> tuple[int, ...]:
    """Chunks for an array that was in one piece and shall be able to grow along an axis: as few rows of that axis as are worth
    a chunk, whole along the others up to 4 MiB.

    >>> growing_chunks((8760, 721, 1440), 0, 4), growing_chunks((30, 721, 720), 0, 4), growing_chunks((8760,), 0, 8)
    ((1, 721, 1440), (1, 721, 720), (8760,))
    >>> growing_chunks((100, 2), 0, 8), growing_chunks((3, 4000, 4000), 0, 4)
    ((512, 2), (1, 1000, 1000))
    """
    cell = [1 if k == axis else max(1, n) for k, n in enumerate(shape)]
    while math.prod(cell) * itemsize > _MOST_CHUNK_NBYTES and max(cell) > 1:
        longest = max(range(len(cell)), key=lambda k: cell[k])
        cell[longest] = -(-cell[longest] // 2)
    rows = _LEAST_CHUNK_NBYTES // (math.prod(cell) * itemsize)
    cell[axis] = max(1, min(rows, max(shape[axis], _LEAST_ROWS)))
    return tuple(cell)


def plan_rows(shape: tuple[int, ...], itemsize: int, most_nbytes: int, page: int = 1) -> tuple[tuple[int, ...], bool]:
    """Units of a contiguous array, which are runs of the file, of about so many bytes; and whether all begin at multiples of
    `page` bytes.

    >>> plan_rows((512, 512, 512), 4, 4 << 20), plan_rows((3, 5), 8, 4 << 20), plan_rows((3, 5), 8, 4 << 20, page=4096)
    (((4, 512, 512), True), ((3, 5), True), ((3, 5), True))
    """
    for axis in range(len(shape)):
        row = max(1, math.prod(shape[axis + 1 :]) * itemsize)
        if row > most_nbytes:
            continue
        step, n = page // math.gcd(row, page), most_nbytes // row
        paged = n // step * step or (step if step * row <= _MOST_ROWS * most_nbytes else 0)
        n = min(paged or n, shape[axis])
        fits = not axis and n == shape[axis]  # one unit, which begins where the array does
        fits = fits or (paged > 0 and (not axis or not shape[axis] * row % page))
        return ((1,) * axis + (n,) + tuple(shape[axis + 1 :])), fits
    return (1,) * len(shape), page == 1
