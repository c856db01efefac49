"""Which rank reads which block in a round of a stream, and which steps of it go to which rank?

The array of the file, (..., steps, ...), is cut into *columns*: all of it between two borders of chunks along the stream's
axis. A round reads some columns. The batch, (samples, ...), is cut into shards. A rank receives of each column the steps that
samples of its shards need, as runs of steps that follow each other, each run once for each of its shards.

Pure, like `schedule`; ranks with the same integers make the same flow, each at the cost of its own work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardload.planning.grid import Grid, IntArray
from shardload.planning.parts import Block, Part
from shardload.planning.region import Region
from shardload.planning.schedule import Owners
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

    def with_steps(self, rest: Region, start: int, stop: int) -> Region:
        """The region of the array that has these steps, and of the other axes a region."""
        k = self.axis
        return Region(
            (*rest.start[:k], start, *rest.start[k:]),
            (*rest.stop[:k], stop, *rest.stop[k:]),
        )

    def held(self, shard: int) -> Region | None:
        """What a shard has of the other axes of the array, without padding; None if that is nothing."""
        if shard not in self._held:
            region = self.shards.region(shard)
            self._held[shard] = Region(region.start[1:], region.stop[1:]).intersect(Region.whole(self.rest.shape))
        return self._held[shard]

    @cached_property
    def _held(self) -> dict[int, Region | None]:
        """Of the shards that this rank has asked for: every round asks again."""
        return {}

    def part_of_batch(self, shard: int) -> int:
        """Which part of the samples of a batch a shard has, from 0 to `n_parts`."""
        return self.shards.grid.index(shard)[0]

    @property
    def n_parts(self) -> int:
        """Into how many parts the samples of a batch are cut."""
        return self.shards.cuts[0]

    def part_of_samples(self, slots: IntArray) -> IntArray:
        """The part of the batch in which each slot lies."""
        return slots // self.shards.shard_shape[0]

    @cached_property
    def max_block_size(self) -> int:
        """Most elements of a block."""
        return int(np.prod([min(c, n) for c, n in zip(self.blocks.cell, self.blocks.shape, strict=True)]))


@dataclass(frozen=True, eq=False)
class Runs:
    """Steps that follow each other in a column, for one part of the batch.

    Attributes
    ----------
    column : ndarray of int
        The place of each run's column among those of the round; they ascend.
    start, stop : ndarray of int
        The steps of each run.
    last : ndarray of int
        The last sample that needs a step of each run.
    """

    column: IntArray
    start: IntArray
    stop: IntArray
    last: IntArray

    def __len__(self) -> int:
        return len(self.column)

    @classmethod
    def of(cls, column: IntArray, step: IntArray, sample: IntArray, most: int = 1 << 30) -> Runs:
        """The runs of at most `most` steps of some steps, which ascend in each column; each may be given for several samples.

        >>> runs = Runs.of(np.array([0, 0, 0, 0, 1]), np.array([3, 4, 4, 6, 7]), np.array([9, 2, 5, 1, 3]))
        >>> list(zip(runs.column.tolist(), runs.start.tolist(), runs.stop.tolist(), runs.last.tolist()))
        [(0, 3, 5, 9), (0, 6, 7, 1), (1, 7, 8, 3)]
        """
        is_new = np.ones(len(step), dtype=bool)
        is_new[1:] = (np.diff(step) != 0) | (np.diff(column) != 0)
        last = np.maximum.reduceat(sample, np.flatnonzero(is_new)) if len(step) else sample
        column, step = column[is_new], step[is_new]
        begins = np.ones(len(step), dtype=bool)
        begins[1:] = (np.diff(step) != 1) | (np.diff(column) != 0)
        if most < len(step):
            place = np.arange(len(step)) - np.maximum.accumulate(np.where(begins, np.arange(len(step)), 0))
            begins |= place % most == 0
        first = np.flatnonzero(begins)
        end = np.append(first[1:], len(step))[: len(first)] - 1
        last_sample = np.maximum.reduceat(last, first) if len(first) else last
        return cls(column[first], step[first], step[end] + 1, last_sample)


@dataclass(frozen=True, eq=False)
class BatchFlow:
    """The `Flow` of an array in one round: the owners of the blocks of some columns send, the holders of shards receive.

    A target is a run of steps of a shard.

    Parameters
    ----------
    schedule : BatchSchedule
        Blocks, owners and shards.
    columns : sequence of int
        The columns that are read, by their place along the stream's axis.
    runs : sequence of Runs
        What each part of the batch needs.
    """

    schedule: BatchSchedule
    columns: Sequence[int]
    runs: Sequence[Runs]

    is_direct = False

    @property
    def ndim(self) -> int:
        """See `Flow`."""
        return len(self.schedule.blocks.shape)

    def around(self, rank: int) -> Region | None:
        """A box around all that a rank ever reads."""
        return Region.whole(self.schedule.blocks.shape)

    @cached_property
    def _most_runs(self) -> int:
        return max(map(len, self.runs), default=0)

    @cached_property
    def _n_blocks(self) -> int:
        return len(self.columns) * self.schedule.rest.n_cells

    @cached_property
    def _owners(self) -> Owners:
        """The ranks that read in this round: no more than there are blocks."""
        owners = self.schedule.owners
        return Owners(min(owners.n, self._n_blocks), owners.root)

    @property
    def n_readers(self) -> int:
        """Number of ranks that read in this round."""
        return self._owners.n

    def owner(self, block: int) -> int:
        """The rank that reads a block of the round."""
        rank: int = self._owners.of_block(block, self._n_blocks, self.schedule.n_ranks)
        return rank

    def blocks_of(self, rank: int) -> range:
        """The blocks that a rank reads."""
        return self._owners.blocks_of(rank, self._n_blocks, self.schedule.n_ranks)

    def _bounds(self, place: int) -> tuple[int, int]:
        """The steps of a column."""
        cell, phase, axis = self.schedule.blocks.cell, self.schedule.blocks.phase, self.schedule.axis
        start = self.columns[place] * cell[axis] - phase[axis]
        return max(0, start), min(self.schedule.blocks.shape[axis], start + cell[axis])

    @staticmethod
    def _of(runs: Runs, place: int) -> tuple[int, int]:
        a, b = np.searchsorted(runs.column, (place, place + 1)).tolist()
        return a, b

    def outgoing(self, rank: int) -> Iterator[Block]:
        """See `Flow`."""
        for block in self.blocks_of(rank):
            if parts := self.parts_of(block):
                yield Block(self.region(block), tuple(parts))

    def region(self, block: int) -> Region:
        """The region of a block of the round."""
        place, number = divmod(block, self.schedule.rest.n_cells)
        return self.schedule.with_steps(self.schedule.rest.region(number), *self._bounds(place))

    def parts_of(self, block: int) -> list[Part]:
        """Which parts of a block of the round go where."""
        schedule = self.schedule
        shards = schedule.shards
        place, number = divmod(block, schedule.rest.n_cells)
        rest = schedule.rest.region(number)
        parts = []
        for shard in shards.grid.meeting(Region((0, *rest.start), (shards.shape_global[0], *rest.stop))):
            held = schedule.held(shard)
            common = None if held is None else held.intersect(rest)
            if common is None:
                continue
            runs = self.runs[schedule.part_of_batch(shard)]
            for k in range(*self._of(runs, place)):
                region = schedule.with_steps(common, int(runs.start[k]), int(runs.stop[k]))
                parts += [Part(region, self.number(shard, k), holder) for holder in shards.holders(shard)]
        return parts

    def incoming(self, rank: int) -> Mapping[int, Sequence[Part]]:
        """See `Flow`."""
        return _by_sender(part for _, _, part in sorted(self.awaited(rank), key=lambda item: item[:2]))

    def awaited(self, rank: int) -> Iterator[tuple[int, int, Part]]:
        """What comes from other ranks, in any order: the block, the target, and the part, whose rank is the sender."""
        schedule, n_rest = self.schedule, self.schedule.rest.n_cells
        for shard in schedule.shards.shards_of(rank):
            held = schedule.held(shard)
            if held is None:
                continue
            runs = self.runs[schedule.part_of_batch(shard)]
            met = [(number, held.intersect(schedule.rest.region(number))) for number in schedule.rest.meeting(held)]
            for k, (place, start, stop) in enumerate(
                zip(runs.column.tolist(), runs.start.tolist(), runs.stop.tolist(), strict=True)
            ):
                for number, common in met:
                    block = place * n_rest + number
                    sender = self.owner(block)
                    if sender != rank and common is not None:
                        target = self.number(shard, k)
                        yield block, target, Part(schedule.with_steps(common, start, stop), target, sender)

    def number(self, shard: int, run: int) -> int:
        """The number of the target for a run of a shard."""
        return shard * self._most_runs + run

    def target(self, number: int) -> Region | None:
        """See `Flow`."""
        shard, k = divmod(number, self._most_runs)
        held, runs = self.schedule.held(shard), self.runs[self.schedule.part_of_batch(shard)]
        return None if held is None else self.schedule.with_steps(held, int(runs.start[k]), int(runs.stop[k]))

    def targets(self, rank: int) -> list[int]:
        """See `Flow`."""
        return [
            self.number(shard, k)
            for shard in self.schedule.shards.shards_of(rank)
            if self.schedule.held(shard) is not None
            for k in range(len(self.runs[self.schedule.part_of_batch(shard)]))
        ]


def _by_sender(parts: Iterable[Part]) -> dict[int, list[Part]]:
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(part.rank, []).append(part)
    return found


@dataclass(frozen=True, eq=False)
class SharedFlow:
    """The flows of batches that are cut in several ways, as one `Flow`: a block is read once, and goes to the shards of all.

    Parameters
    ----------
    flows : sequence of BatchFlow
        With the same columns, blocks and owners.
    """

    flows: Sequence[BatchFlow]

    is_direct = False

    @property
    def ndim(self) -> int:
        """See `Flow`."""
        return self.flows[0].ndim

    @property
    def n_readers(self) -> int:
        """Number of ranks that read in this round."""
        return self.flows[0].n_readers

    def around(self, rank: int) -> Region | None:
        """A box around all that a rank ever reads."""
        return self.flows[0].around(rank)

    def blocks_of(self, rank: int) -> range:
        """The blocks that a rank reads."""
        return self.flows[0].blocks_of(rank)

    def number(self, cut: int, target: int) -> int:
        """The number of the target that has a number in the flow of one of the cuts."""
        return target * len(self.flows) + cut

    def _numbered(self, cut: int, part: Part) -> Part:
        return Part(part.region, self.number(cut, part.target), part.rank)

    def outgoing(self, rank: int) -> Iterator[Block]:
        """See `Flow`."""
        for block in self.blocks_of(rank):
            parts = [self._numbered(cut, part) for cut, flow in enumerate(self.flows) for part in flow.parts_of(block)]
            if parts:
                yield Block(self.flows[0].region(block), tuple(parts))

    def incoming(self, rank: int) -> Mapping[int, Sequence[Part]]:
        """See `Flow`."""
        awaited = [
            (block, cut, target, self._numbered(cut, part))
            for cut, flow in enumerate(self.flows)
            for block, target, part in flow.awaited(rank)
        ]
        return _by_sender(part for *_, part in sorted(awaited, key=lambda item: item[:3]))

    def target(self, number: int) -> Region | None:
        """See `Flow`."""
        target, cut = divmod(number, len(self.flows))
        return self.flows[cut].target(target)

    def targets(self, rank: int) -> list[int]:
        """See `Flow`."""
        return [self.number(cut, target) for cut, flow in enumerate(self.flows) for target in flow.targets(rank)]
