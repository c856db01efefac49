"""Which rank reads which block in a round of a stream, and which steps of it go to which rank?

The array of the file, (..., steps, ...), is cut into *columns*: all of it between two borders of chunks along the stream's
axis. A round reads some columns. The batch, (samples, ...), is cut into shards. A rank receives of each column the steps that
samples of its shards need, as runs of steps that follow each other, each run once for each of its shards. A block is read by a
rank that needs it, if all readers then have equally many: what one rank alone needs is not sent.

Pure, like `schedule`; ranks with the same integers make the same flow, each at the cost of its own work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from shardload.planning.region import Grid, IntArray, Region
from shardload.planning.schedule import Block, Owners, Part
from shardload.planning.shards import Shards


@dataclass(frozen=True, eq=False)
class BatchSchedule:
    """How the columns of an array are cut into blocks, and the batches into shards.

    Parameters
    ----------
    blocks : Grid
        The array cut into blocks of whole chunks. Along the stream's axis a block is a column.
    axis : int
        The stream's axis.
    shards : Shards
        A batch, without the axis of its window: samples first, then the other axes of the array, padding included.
    n_ranks : int
        Number of ranks in the job.
    owners : Owners
        Which ranks read.
    """

    blocks: Grid
    axis: int
    shards: Shards
    n_ranks: int
    owners: Owners

    @cached_property
    def rest(self) -> Grid:
        """The other axes, cut into blocks."""
        grid = self.blocks
        return Grid(self._without(grid.shape), self._without(grid.cell), self._without(grid.phase))

    def _without(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return (*numbers[: self.axis], *numbers[self.axis + 1 :])

    def with_steps(self, other_axes: Region, start: int, stop: int) -> Region:
        """The region of the array that has these steps, and of the other axes a region."""
        k = self.axis
        return Region(
            (*other_axes.start[:k], start, *other_axes.start[k:]),
            (*other_axes.stop[:k], stop, *other_axes.stop[k:]),
        )

    @cached_property
    def n_tiles(self) -> int:
        """Into how many tiles the other axes are cut. Shard `n_tiles * i + k` has tile `k` of part `i` of the samples."""
        return math.prod(self.shards.cuts[1:])

    @cached_property
    def tiles(self) -> list[Region | None]:
        """The region of the other axes of the array that each tile has, without padding; None if it has only padding."""
        regions, whole = map(self.shards.region, range(self.n_tiles)), Region.whole(self.rest.shape)
        return [Region(region.start[1:], region.stop[1:]).intersect(whole) for region in regions]

    def held(self, shard: int) -> Region | None:
        """The region of the other axes of the array that a shard has, without padding; None if it has only padding."""
        return self.tiles[shard % self.n_tiles]

    @cached_property
    def tiles_met(self) -> list[list[tuple[int, Region]]]:
        """The tiles that have something of each cell of `rest`, ascending, and what they have in common."""
        tiles_of_cell: list[list[tuple[int, Region]]] = [[] for _ in range(self.rest.n_cells)]
        for tile, tile_region in enumerate(self.tiles):
            for cell, common in () if tile_region is None else self.rest.cut(tile_region):
                tiles_of_cell[cell].append((tile, common))
        return tiles_of_cell

    @cached_property
    def met(self) -> tuple[IntArray, IntArray]:
        """The same tiles, those of one cell after the other, each with its cell."""
        pairs = [(cell, tile) for cell, met in enumerate(self.tiles_met) for tile, _ in met]
        cells, tiles = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return cells, tiles


@dataclass(frozen=True, eq=False)
class Runs:
    """Steps that follow each other in a column, each for one part of the batch. They ascend by column, part and step.

    Attributes
    ----------
    column : ndarray of int
        The place of each run's column among those of the round.
    part : ndarray of int
        Which part of the samples of a batch needs it.
    start, stop : ndarray of int
        The steps of each run.
    last : ndarray of int
        The last sample that needs a step of each run.
    """

    column: IntArray
    part: IntArray
    start: IntArray
    stop: IntArray
    last: IntArray

    def __len__(self) -> int:
        return len(self.column)

    @classmethod
    def of(
        cls, column: IntArray, part: IntArray, step: IntArray, sample: IntArray, most: int = 1 << 30, batch: int | None = None
    ) -> Runs:
        """The runs of at most `most` steps of some steps, each of which may be given for several samples.

        With `batch`, the samples of a run follow each other, too, in one batch of so many.

        >>> column, part, step = np.array([0, 0, 0, 0, 1]), np.array([1, 1, 1, 1, 0]), np.array([3, 4, 4, 6, 7])
        >>> runs = Runs.of(column, part, step, np.array([9, 2, 5, 1, 3]))
        >>> list(zip(*(each.tolist() for each in (runs.column, runs.part, runs.start, runs.stop, runs.last))))
        [(0, 1, 3, 5, 9), (0, 1, 6, 7, 1), (1, 0, 7, 8, 3)]
        >>> Runs.of(np.zeros(4, int), np.zeros(4, int), np.arange(4), np.array([1, 2, 3, 5]), batch=3).steps
        [(0, 2), (2, 3), (3, 4)]
        """
        order = np.lexsort((step, part, column))
        column, part, step, sample = column[order], part[order], step[order], sample[order]
        is_other = _differs(column) | _differs(part)
        first = np.flatnonzero(is_other | _differs(step))  # of each step
        sample = np.maximum.reduceat(sample, first) if len(first) else sample
        column, part, step, is_other = column[first], part[first], step[first], is_other[first]
        begins = is_other | (np.diff(step, prepend=0) != 1)
        if batch is not None:
            begins |= (np.diff(sample, prepend=0) != 1) | _differs(sample // batch)
        if most < len(step):
            place = np.arange(len(step)) - np.maximum.accumulate(np.where(begins, np.arange(len(step)), 0))
            begins |= place % most == 0
        first = np.flatnonzero(begins)
        n_steps = np.diff(first, append=len(step))
        last = np.maximum.reduceat(sample, first) if len(first) else sample
        return cls(column[first], part[first], step[first], step[first] + n_steps, last)

    @cached_property
    def steps(self) -> list[tuple[int, int]]:
        """The first step of each run, and the one behind its last."""
        return list(zip(self.start.tolist(), self.stop.tolist(), strict=True))


def _differs(numbers: IntArray) -> np.ndarray[Any, np.dtype[np.bool]]:
    """True where a number differs from the one before it, and for the first."""
    differs: np.ndarray[Any, np.dtype[np.bool]] = np.diff(numbers, prepend=-1) != 0
    return differs


def share_blocks(schedule: BatchSchedule, runs: Runs, n_columns: int) -> IntArray:
    """The rank that reads each block of a round: one that needs it itself, as long as all readers have equally many."""
    first = np.searchsorted(runs.column, np.arange(n_columns + 1))
    cells, tiles = schedule.met
    n_met = np.bincount(cells, minlength=schedule.rest.n_cells)
    place, cell = np.divmod(np.arange(n_columns * schedule.rest.n_cells), schedule.rest.n_cells)
    run = first[place] + (place + cell) % np.diff(first)[place]  # of several that need it, each in its turn
    tile = tiles[(np.cumsum(n_met) - n_met)[cell] + place % n_met[cell]]
    preferred = schedule.shards.holder_of(runs.part[run] * schedule.n_tiles + tile, place)
    return _level(preferred, schedule.owners, schedule.n_ranks)


def _level(preferred: IntArray, owners: Owners, n_ranks: int) -> IntArray:
    """The owner of each of some blocks: the wanted one, or another one that has fewer than its share.

    >>> _level(np.array([3, 3, 0, 3]), Owners(4), 4), _level(np.array([1, 1, 0]), Owners(2), 4)
    (array([3, 1, 0, 2]), array([2, 2, 0]))
    """
    owners = Owners(min(owners.n, len(preferred)), owners.root)
    ranks: IntArray = owners.rank_of(np.arange(owners.n), n_ranks)
    n_free = np.diff(np.arange(owners.n + 1) * len(preferred) // owners.n, append=0)  # the last is of those that read nothing
    n_free[-1] = 0
    owner = np.minimum(np.searchsorted(ranks, preferred), owners.n - 1)
    owner = np.where(ranks[owner] == preferred, owner, owners.n)
    order = np.argsort(owner, kind="stable")
    number = np.arange(len(owner)) - np.searchsorted(owner[order], owner[order])  # among the blocks with the same owner
    stays = np.empty(len(owner), dtype=bool)
    stays[order] = number < n_free[owner[order]]
    owner[~stays] = np.repeat(np.arange(owners.n + 1), n_free - np.bincount(owner[stays], minlength=owners.n + 1))
    return ranks[owner]


@dataclass(frozen=True, eq=False)
class CutFlow:
    """What goes where in one round if the batch is cut in one way: runs of steps, from the owners of blocks to the shards.

    A target is a run of a tile, in this cut: number ``(run * n_tiles + tile) * n_cuts + cut``.

    Parameters
    ----------
    schedule : BatchSchedule
        Blocks, owners and shards.
    columns : sequence of int
        The columns that are read, by their place along the stream's axis.
    runs : Runs
        What each part of the batch needs.
    owners : ndarray of int
        The rank that reads each block: those of the first column, then those of the next one.
    cut, n_cuts : int
        Which of all cuts this is, and how many there are.
    """

    schedule: BatchSchedule
    columns: Sequence[int]
    runs: Runs
    owners: IntArray
    cut: int = 0
    n_cuts: int = 1

    def region(self, block: int) -> Region:
        """The region of a block of the round."""
        place, cell = divmod(block, self.schedule.rest.n_cells)
        length, phase, axis = self.schedule.blocks.cell, self.schedule.blocks.phase, self.schedule.axis
        start = self.columns[place] * length[axis] - phase[axis]
        stop = min(self.schedule.blocks.shape[axis], start + length[axis])
        return self.schedule.with_steps(self.schedule.rest.region(cell), max(0, start), stop)

    def parts_of(self, block: int) -> Iterator[Part]:
        """Which parts of a block of the round go where."""
        schedule = self.schedule
        place, cell = divmod(block, schedule.rest.n_cells)
        first, stop = np.searchsorted(self.runs.column, (place, place + 1)).tolist()
        for run, part in enumerate(self.runs.part[first:stop].tolist(), first):
            for tile, common in schedule.tiles_met[cell]:
                region = schedule.with_steps(common, *self.runs.steps[run])
                for holder in schedule.shards.holders(part * schedule.n_tiles + tile):
                    yield Part(region, self.number(tile, run), holder)

    @cached_property
    def stays(self) -> bool:
        """True if no part is needed by another rank than the one that reads it, so that nothing is sent."""
        schedule, runs = self.schedule, self.runs
        cells, tiles = schedule.met
        owners = self.owners[runs.column[:, None] * schedule.rest.n_cells + cells]
        shards = runs.part[:, None] * schedule.n_tiles + tiles
        holders = schedule.shards.holder_of(shards, np.zeros_like(shards))
        return schedule.shards.most_holders == 1 and np.array_equal(owners, holders)

    def awaited(self, rank: int) -> Iterator[tuple[int, int, Part]]:
        """The parts that come from other ranks, in any order, each after its block and cut. `Part.rank` is the sender."""
        schedule, n_cells = self.schedule, self.schedule.rest.n_cells
        for shard, shard_region in self._held_by(rank):
            runs = self.runs_of(shard)
            for cell, common in schedule.rest.cut(shard_region):
                blocks = self.runs.column[runs] * n_cells + cell
                senders = self.owners[blocks]
                for k in np.flatnonzero(senders != rank).tolist():
                    run = int(runs[k])
                    region = schedule.with_steps(common, *self.runs.steps[run])
                    yield int(blocks[k]), self.cut, Part(region, self.number(shard, run), int(senders[k]))

    def _held_by(self, rank: int) -> Iterator[tuple[int, Region]]:
        """The shards of a rank that have something of the array, and what of its other axes."""
        for shard in self.schedule.shards.shards_of(rank):
            region = self.schedule.held(shard)
            if region is not None:
                yield shard, region

    def runs_of(self, shard: int) -> IntArray:
        """The runs that a shard needs."""
        return np.flatnonzero(self.runs.part == shard // self.schedule.n_tiles)

    def number(self, shard: int, run: int) -> int:
        """The number of the target for a run of a shard."""
        return (run * self.schedule.n_tiles + shard % self.schedule.n_tiles) * self.n_cuts + self.cut

    def target(self, number: int) -> Region | None:
        """The elements that a target needs; None if it needs none."""
        run, tile = divmod(number // self.n_cuts, self.schedule.n_tiles)
        tile_region = self.schedule.tiles[tile]
        return None if tile_region is None else self.schedule.with_steps(tile_region, *self.runs.steps[run])

    def runs_held_by(self, rank: int) -> Iterator[tuple[int, int]]:
        """The shards of a rank that have something of the array, each with the runs that it needs."""
        for shard, _ in self._held_by(rank):
            for run in self.runs_of(shard).tolist():
                yield shard, run


@dataclass(frozen=True, eq=False)
class BatchFlow:
    """The `Flow` of an array in one round, for batches that are cut in one way or several: each block is read once for all.

    Parameters
    ----------
    cuts : sequence of CutFlow
        With the same columns, blocks and owners.
    """

    cuts: Sequence[CutFlow]

    is_direct = False

    def around(self, rank: int) -> Region | None:
        """A box around all that a rank ever reads."""
        return Region.whole(self.cuts[0].schedule.blocks.shape)

    def blocks_of(self, rank: int) -> list[int]:
        """The blocks that a rank reads."""
        return np.flatnonzero(self.cuts[0].owners == rank).tolist()

    def outgoing(self, rank: int) -> Iterator[Block]:
        """See `Flow`."""
        for block in self.blocks_of(rank):
            yield Block(self.cuts[0].region(block), tuple(part for cut in self.cuts for part in cut.parts_of(block)))

    def incoming(self, rank: int) -> Mapping[int, Sequence[Part]]:
        """See `Flow`."""
        awaited = chain.from_iterable(cut.awaited(rank) for cut in self.cuts)
        parts_by_sender: dict[int, list[Part]] = {}
        for _, _, part in sorted(awaited, key=lambda each: (*each[:2], each[2].target)):
            parts_by_sender.setdefault(part.rank, []).append(part)
        return parts_by_sender

    def target(self, number: int) -> Region | None:
        """See `Flow`."""
        return self.cuts[number % len(self.cuts)].target(number)

    def targets(self, rank: int) -> list[int]:
        """See `Flow`."""
        return [cut.number(*each) for cut in self.cuts for each in cut.runs_held_by(rank)]
