"""Which rank owns which block of the file, and which parts of shards lie in it?

Pure: integers in, frozen dataclasses out. No JAX, no MPI, no files. Ranks with the same integers make the same schedule. A
schedule does not say in which direction values go: a load moves them from blocks to pieces, a save from pieces to blocks.

1. An array is cut in three ways, each a `Grid`: into the chunks of the file, into blocks for the owners (whole chunks, so that
   no chunk is decoded twice; `blocks`), and into shards. Each axis is cut independently of the others.
2. `Shards` is the cut into shards, with the ranks that hold each shard.
3. A `Strategy` says which ranks own the blocks: one rank, several ranks, or every rank what it holds (`strategies`).
4. `Schedule` answers for one rank at a time, at the cost of that rank's own work: which blocks it owns, with their parts
   (`owned_blocks`), and which parts of its pieces lie in the blocks of other ranks (`remote_parts`), in the order in which
   these ranks process them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from shardload.planning.grid import Grid, IntArray
from shardload.planning.parts import Block, Part, Parts
from shardload.planning.region import Region
from shardload.planning.shards import RankBoxes, Shards, plan_shards

__all__ = [
    "MAX_MESSAGE_NBYTES",
    "Block",
    "Grid",
    "Part",
    "Parts",
    "RankBoxes",
    "Schedule",
    "Shards",
    "Strategy",
    "plan_shards",
]

# MPI counts are C ints, and some transports are slow or wrong near their limits: half of 2 GiB is safe everywhere.
MAX_MESSAGE_NBYTES = 1 << 30


class Strategy(Protocol):
    """Which rank owns which block. The blocks and shards are those of the schedule that is passed."""

    mode: ClassVar[str]
    """Name of the strategy."""
    is_direct: ClassVar[bool]
    """True if every rank reads its own shards, so that nothing is sent."""

    def check(self, n_ranks: int) -> None:
        """Raise ValueError unless the strategy works for `n_ranks` ranks."""
        ...

    def n_owners_of(self, n_ranks: int) -> int:
        """How many of `n_ranks` ranks may own blocks."""
        ...

    def extent(self, schedule: Schedule) -> tuple[int, ...]:
        """Along each axis, the elements that are cut into blocks: those of the array, of one shard, or of what a rank holds."""
        ...

    def is_owner(self, schedule: Schedule, rank: int) -> bool:
        """True if a rank reads or writes the file."""
        ...

    def owner(self, schedule: Schedule, block: int) -> int:
        """The rank that owns a block; -1 if every rank may read it."""
        ...

    def owners(self, schedule: Schedule, blocks: IntArray) -> IntArray:
        """`owner` of many blocks."""
        ...

    def blocks_of(self, schedule: Schedule, rank: int) -> range:
        """The blocks that only this rank owns: the inverse of `owner`."""
        ...

    def around(self, schedule: Schedule, rank: int) -> Region | None:
        """A box around all that a rank reads or writes; None if that is nothing."""
        ...

    def owned_blocks(self, schedule: Schedule, rank: int) -> Iterator[Block]:
        """A rank's blocks in file order, each with its parts."""
        ...

    def remote_parts(self, schedule: Schedule, rank: int) -> Mapping[int, Sequence[Part]]:
        """The parts of a rank's pieces that lie in blocks of other ranks, by owner, in the order of the owner's blocks."""
        ...


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which rank owns which block, and which parts of shards lie in it.

    Parameters
    ----------
    blocks : Grid
        The true array (without padding) cut into blocks of whole chunks.
    shards : Shards
        The padded array cut into shards.
    itemsize : int
        Bytes per element as they are sent.
    n_ranks : int
        Number of ranks in the job.
    strategy : Strategy
        Which rank owns which block.
    max_message_nbytes : int
        Cap on a message, in addition to `MAX_MESSAGE_NBYTES`.
    """

    blocks: Grid
    shards: Shards
    itemsize: int
    n_ranks: int
    strategy: Strategy
    max_message_nbytes: int = 1 << 62

    def __post_init__(self) -> None:
        self.strategy.check(self.n_ranks)

    @property
    def is_direct(self) -> bool:
        """True if every rank reads its own shards, so that nothing is sent."""
        return self.strategy.is_direct

    @property
    def max_block_size(self) -> int:
        """Upper bound on the elements of a `Block`: a cell of the grid, cut to `extent`."""
        return math.prod(map(min, self.blocks.cell, self.blocks.shape, self.extent))

    @property
    def extent(self) -> tuple[int, ...]:
        """Along each axis, the elements that are cut into blocks: those of the array, of one shard, or of what a rank holds."""
        return self.strategy.extent(self)

    def blocks_of(self, rank: int) -> range:
        """The blocks that only this rank owns."""
        return self.strategy.blocks_of(self, rank)

    def owner(self, block: int) -> int:
        """The rank that owns a block; -1 if every rank may read it."""
        return self.strategy.owner(self, block)

    def owners(self, blocks: IntArray) -> IntArray:
        """`owner` of many blocks."""
        return self.strategy.owners(self, blocks)

    def is_owner(self, rank: int) -> bool:
        """True if a rank reads or writes the file."""
        return self.strategy.is_owner(self, rank)

    def around(self, rank: int) -> Region | None:
        """A box around all that a rank reads or writes; None if that is nothing."""
        return self.strategy.around(self, rank)

    def true_region(self, section: int) -> Region | None:
        """The elements of a section of a shard, without padding; None if all of it is padding."""
        return self.shards.section(section).intersect(Region.whole(self.blocks.shape))

    def owned_blocks(self, rank: int) -> Iterator[Block]:
        """The blocks that a rank owns, in file order, each with its parts. `Part.rank` is the rank that holds the piece."""
        return self.strategy.owned_blocks(self, rank)

    def remote_parts(self, rank: int) -> Mapping[int, Sequence[Part]]:
        """The parts of a rank's pieces that lie in blocks of other ranks, by owner, in the order of the owner's blocks."""
        return self.strategy.remote_parts(self, rank)

    # --- for strategies

    def pairs_of(self, rank: int) -> tuple[IntArray, IntArray]:
        """The pairs of a block and a section of this rank's shards that share elements, ordered by block, then section."""
        blocks, shards = [], []
        for shard in self.shards.sections_of(rank):
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

    def part(self, block: list[tuple[int, int]], shard: int, rank: int) -> Part:
        """The part that a block (given by its bounds) and a section have in common, if it is one message."""
        met = list(zip(block, self.shards.grid.bounds(shard), strict=True))
        start = tuple([max(a, c) for (a, _), (c, _) in met])
        return Part(Region(start, tuple([min(b, d) for (_, b), (_, d) in met])), shard, rank)

    @cached_property
    def is_never_split(self) -> bool:
        """True if every part fits into one message."""
        return self.max_part_nbytes <= min(self.max_message_nbytes, MAX_MESSAGE_NBYTES)

    @cached_property
    def max_part_nbytes(self) -> int:
        """Upper bound on the bytes of a part."""
        return math.prod(map(min, self.blocks.cell, self.blocks.shape, self.shards.section_shape)) * self.itemsize

    def messages(self, block: Region, shard: int) -> Iterator[Region]:
        """The region that a block and a section have in common, cut into messages."""
        region = block.intersect(self.shards.section(shard))
        cap = min(self.max_message_nbytes, MAX_MESSAGE_NBYTES)
        return iter(()) if region is None else region.split(max(1, cap // self.itemsize))
