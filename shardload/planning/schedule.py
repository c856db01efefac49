"""Which rank owns which block of the file, and which parts of shards lie in it?

Pure: integers in, frozen dataclasses out. No JAX, no MPI, no files. Ranks with the same integers make the same schedule. A
schedule does not say in which direction values go: a load moves them from blocks to pieces, a save from pieces to blocks.

1. An array is cut in three ways, each a `Grid`: into the chunks of the file, into blocks for the owners (whole chunks, so that
   no chunk is decoded twice; `blocks`), and into shards. Each axis is cut independently of the others.
2. `Shards` is the cut into shards, with the ranks that hold each shard.
3. A `Strategy` says which ranks own the blocks: one rank, several ranks, or every rank what it holds.
4. `Schedule` answers for one rank at a time, at the cost of that rank's own work: which blocks it owns, with their parts
   (`owned_blocks`), and which parts of its pieces lie in the blocks of other ranks (`remote_parts`), in the order in which
   these ranks process them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardload.planning.blocks import (
    BLOCKS_PER_OWNER,
    NEAR_NBYTES,
    count_runs,
    most_chunks,
    plan_blocks,
    plan_row_chunks,
    run_stride,
)
from shardload.planning.grid import Grid, IntArray
from shardload.planning.parts import Block, Part, Parts
from shardload.planning.region import Region
from shardload.planning.shards import RankBoxes, Shards, plan_shards
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import MODES, ROOT, Direct, Parallel, Root, Strategy

__all__ = [
    "MAX_MESSAGE_NBYTES",
    "Block",
    "Grid",
    "Part",
    "Parts",
    "RankBoxes",
    "Schedule",
    "Shards",
    "plan_blocks",
    "plan_direct",
    "plan_row_chunks",
    "plan_schedules",
    "plan_shards",
]

# MPI counts are C ints, and some transports are slow or wrong near their limits: half of 2 GiB is safe everywhere.
MAX_MESSAGE_NBYTES = 1 << 30


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

    def true_region(self, section: int) -> Region | None:
        """The elements of a section of a shard, without padding; None if all of it is padding."""
        return self.shards.section(section).intersect(Region.whole(self.blocks.shape))

    def owned_blocks(self, rank: int) -> Iterator[Block]:
        """The blocks that a rank owns, in file order, each with its parts. `Part.rank` is the rank that holds the piece."""
        return self.strategy.owned_blocks(self, rank)

    def remote_parts(self, rank: int, owners: Sequence[int] | None = None) -> Mapping[int, Sequence[Part]]:
        """The parts of a rank's pieces that lie in blocks of other ranks, by owner, in the order of the owner's blocks.

        If `owners` are given, only the parts in their blocks.
        """
        return self.strategy.remote_parts(self, rank, owners)

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

    @property
    def can_relay(self) -> bool:
        """True if parts can go over relays (`hops`): none is split, and each is named by a block and a section in 32 bits."""
        return self.is_never_split and max(self.blocks.n_cells, self.shards.grid.n_cells, self.n_ranks) < 1 << 32

    @cached_property
    def max_part_nbytes(self) -> int:
        """Upper bound on the bytes of a part."""
        return math.prod(map(min, self.blocks.cell, self.blocks.shape, self.shards.section_shape)) * self.itemsize

    def messages(self, block: Region, shard: int) -> Iterator[Region]:
        """The region that a block and a section have in common, cut into messages."""
        region = block.intersect(self.shards.section(shard))
        cap = min(self.max_message_nbytes, MAX_MESSAGE_NBYTES)
        return iter(()) if region is None else region.split(max(1, cap // self.itemsize))


def plan_direct(layout: SourceLayout, shards: Shards, n_ranks: int, *, max_nbytes: int) -> Schedule:
    """Every rank reads what it holds. Blocks are read once for all shards of a rank if reading each shard by itself costs more.

    That is so if a chunk may lie in two shards, or if runs are so close that the gaps between them are read too. Otherwise each
    shard is read by itself: without a copy if it lies in the file as in memory, and the first shard is complete early.

    Parameters
    ----------
    layout : SourceLayout
        How the array lies in its file.
    shards : Shards
        Which rank holds which shard.
    n_ranks : int
        Number of ranks in the job.
    max_nbytes : int
        Cap on a block.
    """
    chunks, file_itemsize = layout.chunks, layout.file_dtype.itemsize

    def cut(is_merged: bool) -> Schedule:
        within = shards.reach if is_merged else shards.section_shape
        blocks = _cut_blocks(layout, max_nbytes, within=within)
        return Schedule(blocks, shards, layout.dtype.itemsize, n_ranks, Direct(is_merged))

    if shards.sections_held == 1:
        return cut(False)
    if shards.has_halo:  # sections of one rank overlap
        return cut(layout.has_chunks)
    extent = shards.shard_shape
    if layout.has_chunks:
        axes = zip(shards.cuts, extent, chunks.cell, chunks.phase, strict=True)
        return cut(any(n > 1 and (phase or e % cell) for n, e, cell, phase in axes))
    is_near = run_stride(chunks.shape, extent) * file_itemsize <= NEAR_NBYTES
    return cut(count_runs(chunks.shape, extent) > 1 and is_near)


def plan_schedules(
    layout: SourceLayout,
    shards: Shards,
    n_ranks: int,
    *,
    max_nbytes: int,
    n_owners: int | None = None,
    ranks_per_node: int | None = None,
    per_owner: int = BLOCKS_PER_OWNER,
    modes: Sequence[str] = MODES,
) -> dict[str, Schedule]:
    """The schedule of each strategy, by the strategy's name, in the order of `modes`.

    Parameters
    ----------
    layout, shards, n_ranks, max_nbytes
        As for `plan_direct`.
    n_owners : int, optional
        Number of ranks that own blocks in mode ``"parallel"``; default: all.
    ranks_per_node : int, optional
        Over whose nodes these are spread.
    per_owner : int
        Fewest blocks for each of them, as for `plan_blocks`.
    modes : sequence of str
        Names of strategies: ``"root"``, ``"parallel"``, ``"direct"``.
    """
    owners = Parallel(n_ranks if n_owners is None else min(n_owners, n_ranks), ranks_per_node)

    def shared(strategy: Root | Parallel) -> Schedule:
        blocks = _cut_blocks(layout, max_nbytes, n_owners=strategy.n_owners, per_owner=per_owner)
        return Schedule(blocks, shards, layout.dtype.itemsize, n_ranks, strategy)

    return {
        mode: plan_direct(layout, shards, n_ranks, max_nbytes=max_nbytes)
        if mode == Direct.mode
        else shared(Root() if mode == ROOT else owners)
        for mode in modes
    }


def _cut_blocks(layout: SourceLayout, max_nbytes: int, **how: Any) -> Grid:
    """Blocks that fit into a staging buffer of `max_nbytes`, with all chunks that they meet."""
    max_cells = most_chunks(layout.chunk_size * layout.wide_itemsize, max_nbytes) if layout.has_chunks else 1 << 62
    return plan_blocks(layout.chunks, layout.wide_itemsize, max_nbytes=max_nbytes, max_cells=max_cells, **how)
