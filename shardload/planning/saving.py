"""Who writes which chunk of a new file, in which round, and which parts of shards travel there?

Pure: integers in, frozen dataclasses out. Ranks with the same integers make the same plan.

1. `plan_chunks` chooses chunks: of 1 to 4 MiB, and so that each lies in one shard where that is possible.
2. `plan_array` decides how one array goes. If each chunk lies in one shard, a holder of that shard writes it, and nothing
   travels (`Held`). Otherwise chunks are grouped into blocks, which all ranks share out in the file's order, and parts of
   shards travel to the owners (`Sent`, a `Schedule`).
3. `plan_rounds` cuts the work of all arrays into rounds under the staging cap. Each rank takes part in each round, so a round
   is the same list of arrays on every rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardload.planning.blocks import aligned, plan_blocks
from shardload.planning.grid import Grid, unravel
from shardload.planning.region import Region
from shardload.planning.schedule import Schedule
from shardload.planning.shards import Shards
from shardload.planning.strategies import Parallel, Root

__all__ = [
    "ROUNDS_HELD", "Held", "Item", "Memory", "Sent", "Unit", "least_memory", "plan_array", "plan_chunks", "plan_memory",
    "plan_rounds",
]  # fmt: skip

MOST_CHUNK_NBYTES, LEAST_CHUNK_NBYTES = 4 << 20, 1 << 18
_LEAST_RUN_NBYTES = 64 << 10  # of an array in one piece: shorter runs are collected by one rank
_BLOCK_NBYTES, _MOST_BLOCKS_OF_ROWS, _MOST_FILE_NBYTES = 4 << 20, 4, 64 << 20
_PAGE_NBYTES = 4096  # clients of Lustre and NFS on different nodes must not write to the same page
ROUNDS_HELD = 5  # three rounds of values, two of stored bytes: `jobs.writing.file.KEPT_ROUNDS`
_BLOCKS_IN_CAP = 32  # five rounds of one block, buffers for parts of it, and scratch memory
_SLOTS, _PACKS = 4, 2
_FACTORS = (2, 3, 5, 7)


@dataclass(frozen=True)
class Unit:
    """How one array will be stored, as far as planning asks.

    Attributes
    ----------
    shape : tuple of int
        Without padding.
    chunks : tuple of int or None
        Elements of a chunk along each axis; None for an array in one piece.
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

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.itemsize


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
    most = max(itemsize, min(MOST_CHUNK_NBYTES, cap_nbytes // _BLOCKS_IN_CAP))
    while math.prod(cell) * itemsize > most:
        axis, step = _next_cut(cell, is_cut)
        cell[axis] = -(-cell[axis] // step)
    # Join small shards: the last axes first, whose chunks then are runs of the file.
    for axis in reversed(range(len(cell))):
        while cell[axis] < shape[axis] and 2 * math.prod(cell) * itemsize <= min(2 * LEAST_CHUNK_NBYTES, most):
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


class _InRounds:
    """What is written in rounds of so many bytes, unit by unit."""

    @property
    def unit_nbytes(self) -> int:
        """Bytes of the largest unit."""
        raise NotImplementedError

    @property
    def most_units(self) -> int:
        """Units of the rank that has most, or an upper bound."""
        raise NotImplementedError

    def per_round(self, round_nbytes: int) -> int:
        """Units of a rank in a round."""
        return max(1, round_nbytes // max(1, self.unit_nbytes))

    def n_rounds(self, round_nbytes: int) -> int:
        """Rounds; the same on all ranks."""
        return -(-self.most_units // self.per_round(round_nbytes))


@dataclass(frozen=True, eq=False)
class Held(_InRounds):
    """An array of which each unit lies in one shard: a holder of that shard writes it.

    Attributes
    ----------
    units : Grid
        What one rank writes: the chunks; of an array in one piece, cells that are runs of the file.
    chunks : Grid
        What is encoded at once: the same, or if a unit is a file of several chunks, these.
    shards : Shards
        Which rank holds which shard.
    itemsize : int
        Bytes per element.
    """

    units: Grid
    chunks: Grid
    shards: Shards
    itemsize: int

    @property
    def unit_nbytes(self) -> int:
        """Bytes of the largest unit."""
        return math.prod(map(min, self.units.cell, self.units.shape)) * self.itemsize

    @cached_property
    def most_units(self) -> int:
        """Upper bound on the units of one rank."""
        of_shard = math.prod(-(-n // c) for n, c in zip(self.shards.shard_shape, self.units.cell, strict=True))
        n_holders = self.shards.table.n_holders or 1
        return -(-of_shard // n_holders) * self.shards.most_held

    def owner(self, unit: int) -> int:
        """The rank that writes a unit: the ranks that hold it take turns."""
        at = Region(tuple(self.units.region(unit).start), tuple(a + 1 for a in self.units.region(unit).start))
        shard = next(iter(self.shards.grid.meeting(at)))
        holders, held = self.shards.holders(shard), self._held(shard)
        place = 0
        if held is not None:
            for k, axis in zip(unravel(unit, self.units.counts), self.units.meeting_axes(held), strict=True):
                place = place * len(axis) + k - axis.start
        return holders[place % len(holders)]

    def units_of(self, rank: int) -> Iterator[tuple[int, int]]:
        """The units that a rank writes, each with its shard."""
        for shard in self.shards.shards_of(rank):
            held = self._held(shard)
            if held is not None:
                holders = self.shards.holders(shard)
                mine = holders.index(rank)
                for place, unit in enumerate(self.units.meeting(held)):
                    if place % len(holders) == mine:
                        yield unit, shard

    def size_of(self, rank: int) -> int:
        """Elements of the units that a rank writes."""
        found = 0
        for shard in self.shards.shards_of(rank):
            held, holders = self._held(shard), self.shards.holders(shard)
            if held is not None and len(holders) == 1:  # all units in the shard
                found += held.size
            elif held is not None:
                mine = itertools.islice(self.units.meeting(held), holders.index(rank), None, len(holders))
                found += sum(self.units.region(unit).size for unit in mine)
        return found

    def _held(self, shard: int) -> Region | None:
        return self.shards.region(shard).intersect(Region.whole(self.units.shape))

    @property
    def travels(self) -> bool:
        """False: what a rank writes it holds."""
        return False


@dataclass(frozen=True, eq=False)
class Sent(_InRounds):
    """An array of which parts travel to the owners of blocks.

    Attributes
    ----------
    chunks : Grid
        The chunks; of an array in one piece, the blocks.
    schedule : Schedule
        Blocks of whole chunks, their owners, and the shards.
    growth : int
        How many times larger a chunk may be when elements that are stored already have been added to it.
    """

    chunks: Grid
    schedule: Schedule
    growth: int = 1

    @property
    def unit_nbytes(self) -> int:
        """Bytes of the largest block."""
        return self.schedule.max_block_size * self.schedule.itemsize * self.growth

    @property
    def shards(self) -> Shards:
        """Which rank holds which shard."""
        return self.schedule.shards

    @cached_property
    def most_units(self) -> int:
        """Blocks of the rank that has most."""
        return -(-self.schedule.blocks.n_cells // self.schedule.strategy.n_owners_of(self.schedule.n_ranks))

    @property
    def travels(self) -> bool:
        """True."""
        return True


def plan_array(
    unit: Unit,
    shards: Shards,
    n_ranks: int,
    ranks_per_node: int | None = None,
    cap_nbytes: int = 1 << 62,
    first: tuple[int, ...] | None = None,
) -> Held | Sent:
    """How one array goes from its shards to the file.

    Parameters
    ----------
    unit : Unit
        How it will be stored.
    shards : Shards
        Which rank holds which shard. `Shards.shape_global` may have padding.
    n_ranks : int
        Number of ranks of the job.
    ranks_per_node : int, optional
        Ranks of a node if there are several nodes.
    cap_nbytes : int
        Staging memory: blocks are smaller if it is small.
    first : tuple of int, optional
        Where the array's first element is in the array of the file, if it is appended to one that has chunks: the first chunk
        may have elements already.
    """
    most = max(1, min(_BLOCK_NBYTES, cap_nbytes // _BLOCKS_IN_CAP))
    n_nodes = 1 if ranks_per_node is None else -(-n_ranks // ranks_per_node)
    phase = (0,) * len(unit.shape)
    if 0 in unit.shape:
        nothing = Grid(unit.shape, tuple(max(1, n) for n in unit.shape), phase)
        return Held(nothing, nothing, shards, unit.itemsize)
    page = _PAGE_NBYTES if n_nodes > 1 else 1
    if unit.chunks is None:
        held = _runs_in_shards(unit, shards, page, most)
        if held is not None:
            return Held(held, held, shards, unit.itemsize)
        cell, fits = _rows(unit, page, most)
        rows = Grid(unit.shape, cell, phase)
        rows_owners = Parallel(max(1, min(n_ranks, rows.n_cells)), ranks_per_node) if fits else Root(0)
        return Sent(rows, Schedule(rows, shards, unit.itemsize, n_ranks, rows_owners))
    phase = phase if first is None else tuple(k % c for k, c in zip(first, unit.chunks, strict=True))
    chunks = units = Grid(unit.shape, unit.chunks, phase)
    # A block has this many times its bytes when its first chunks have been completed.
    growth = math.prod(-(-c // min(c, n)) for c, n, p in zip(unit.chunks, unit.shape, phase, strict=True) if p)
    if unit.files is not None and n_nodes > 1:  # a file has chunks at any byte, so one rank writes all of it
        begins = (0,) * len(unit.shape) if first is None else first
        units = Grid(unit.shape, unit.files, tuple(k % c for k, c in zip(begins, unit.files, strict=True)))
        if math.prod(unit.files) * unit.itemsize > _MOST_FILE_NBYTES:
            blocks = plan_blocks(chunks, unit.itemsize * growth, max_nbytes=most, n_owners=1, per_owner=1)
            return Sent(chunks, Schedule(blocks, shards, unit.itemsize, n_ranks, Root(0)), growth)
    if not any(units.phase) and _is_inside(units, shards) and _is_spread(unit, shards, n_ranks):
        return Held(units, chunks, shards, unit.itemsize)
    n_owners = max(1, min(n_ranks, units.n_cells))
    blocks = plan_blocks(units, unit.itemsize * growth, max_nbytes=most, n_owners=n_owners, per_owner=1)
    owners = Parallel(max(1, min(n_owners, blocks.n_cells)), ranks_per_node)
    return Sent(chunks, Schedule(blocks, shards, unit.itemsize, n_ranks, owners), growth)


def _is_inside(chunks: Grid, shards: Shards) -> bool:
    """True if each chunk lies in one shard."""
    axes = zip(shards.shard_shape, chunks.cell, chunks.shape, shards.cuts, strict=True)
    return all(cut == 1 or s % c == 0 or s >= n for s, c, n, cut in axes)


def _is_spread(unit: Unit, shards: Shards, n_ranks: int) -> bool:
    """True if the ranks that hold the array are enough to encode it: more than half of all, or encoding is no work."""
    return not unit.is_packed or 2 * shards.table.n_holding > n_ranks


def _runs_in_shards(unit: Unit, shards: Shards, page: int, most_nbytes: int) -> Grid | None:
    """Cells of an array in one piece that are runs of the file and lie in one shard; None if they would be too short, or if two
    nodes would write to a page.
    """
    shape, held = unit.shape, [min(s, n) for s, n in zip(shards.shard_shape, unit.shape, strict=True)]
    last = max((k for k, n in enumerate(shape) if held[k] < n), default=-1)
    if last < 0 and unit.nbytes <= most_nbytes:
        return Grid(shape, shape, (0,) * len(shape))  # one rank writes all of it
    least = min(_LEAST_RUN_NBYTES, most_nbytes)
    cell = [1 if axis < last else held[axis] for axis in range(len(shape))]
    for axis in range(max(0, last), len(shape)):
        row = math.prod(cell[axis + 1 :]) * unit.itemsize
        if row > most_nbytes:
            cell[axis] = 1
            continue
        most = min(cell[axis], most_nbytes // row)
        sizes = [n for n in range(1, most + 1) if (axis != last or cell[axis] % n == 0) and n * row % page == 0]
        cell[axis] = max(sizes, default=0)
        if not cell[axis] or (axis and shape[axis] * row % page) or (last >= 0 and cell[axis] * row < least):
            return None
        break
    return Grid(shape, tuple(cell), (0,) * len(cell))


def _rows(unit: Unit, page: int, most_nbytes: int) -> tuple[tuple[int, ...], bool]:
    """Cells of an array in one piece that are runs of the file, of about so many bytes; and whether all begin at pages."""
    cell = list(unit.shape)
    for axis, size in enumerate(unit.shape):
        row = math.prod(cell[axis + 1 :]) * unit.itemsize
        if row > most_nbytes:
            cell[axis] = 1
            continue
        step = page // math.gcd(row, page)
        n = max(step, most_nbytes // row // step * step)
        if n * row > _MOST_BLOCKS_OF_ROWS * most_nbytes:
            return (*cell[:axis], max(1, most_nbytes // row), *cell[axis + 1 :]), False
        return (*cell[:axis], min(size, n), *cell[axis + 1 :]), page == 1 or not axis or size * row % page == 0
    return tuple(cell), True


# --- memory and rounds


@dataclass(frozen=True)
class Memory:
    """How a rank uses its staging memory.

    Attributes
    ----------
    round_nbytes : int
        Bytes of values of a round.
    n_slots, n_packs, slot_nbytes : int
        Buffers for parts that are sent.
    scratch_nbytes : int
        What the threads that encode take.
    """

    round_nbytes: int
    n_slots: int
    n_packs: int
    slot_nbytes: int
    scratch_nbytes: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return ROUNDS_HELD * self.round_nbytes + (self.n_slots + self.n_packs) * self.slot_nbytes + self.scratch_nbytes


def _least(arrays: Sequence[Held | Sent], units: Sequence[Unit], n_threads: int) -> Memory:
    largest = max((one.unit_nbytes for one in arrays), default=0)
    part = max((aligned(one.schedule.max_part_nbytes) for one in arrays if isinstance(one, Sent)), default=0)
    chunk = max((math.prod(u.chunks) * u.itemsize for u in units if u.chunks is not None and u.is_packed), default=0)
    return Memory(aligned(largest), 1, 1, part, 2 * chunk * n_threads)


def least_memory(arrays: Sequence[Held | Sent], units: Sequence[Unit]) -> int:
    """Fewest bytes of staging memory with which these arrays can be saved."""
    return _least(arrays, units, 1).nbytes


def plan_memory(arrays: Sequence[Held | Sent], units: Sequence[Unit], cap_nbytes: int, n_threads: int) -> tuple[Memory, int]:
    """How the memory under a cap is used, and how many threads encode. The cap is at least `least_memory`."""
    while n_threads > 1 and 2 * _least(arrays, units, n_threads).nbytes > cap_nbytes:
        n_threads -= 1
    least = _least(arrays, units, n_threads)
    left = cap_nbytes - least.scratch_nbytes
    n_slots, n_packs = _SLOTS, _PACKS
    room = min(left // 4, left - ROUNDS_HELD * least.round_nbytes)
    while (n_slots > 1 or n_packs > 1) and (n_slots + n_packs) * least.slot_nbytes > room:
        n_slots, n_packs = max(1, n_slots - 1), max(1, n_packs - 1)
    left -= (n_slots + n_packs) * least.slot_nbytes
    return Memory(
        max(least.round_nbytes, left // ROUNDS_HELD), n_slots, n_packs, least.slot_nbytes, least.scratch_nbytes
    ), n_threads


@dataclass(frozen=True)
class Item:
    """What of one array is in a round: its units number `number` times `per_round` and following, on each rank.

    Attributes
    ----------
    array : int
        Number of the array.
    number, per_round : int
        Which round of this array it is, and units of a rank in it.
    """

    array: int
    number: int
    per_round: int


def plan_rounds(arrays: Sequence[Held | Sent], round_nbytes: int) -> list[list[Item]]:
    """The rounds of a save: small arrays share one, large ones have several."""
    rounds: list[list[Item]] = []
    left = 0
    for k, one in enumerate(arrays):
        per_round, size = one.per_round(round_nbytes), aligned(one.unit_nbytes)
        for number in range(one.n_rounds(round_nbytes)):
            nbytes = min(per_round, one.most_units - number * per_round) * size
            if nbytes > left or not rounds:
                rounds.append([])
                left = round_nbytes
            rounds[-1].append(Item(k, number, per_round))
            left -= nbytes
    return rounds
