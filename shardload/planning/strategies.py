"""Which rank owns which block of the file, and how is an array cut into blocks for that?

There are three strategies:

- `Root`: one rank owns all blocks.
- `Parallel`: several ranks own a contiguous range of blocks each.
- `Direct`: every rank reads what it holds. Nothing is sent, and a chunk that several ranks need is decoded by each of them.

In the first two each block has one owner, and parts are sent between the owner and the ranks that hold the pieces.

A strategy is a few integers. It answers for one rank at a time, at the cost of that rank's own work: the owner of a block is a
formula, so no rank ever lists the work of the others.

`plan_schedules` cuts an array into blocks for each strategy.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from shardload.planning.blocks import BLOCKS_PER_OWNER, NEAR_NBYTES, count_runs, most_chunks, plan_blocks, run_stride
from shardload.planning.grid import Grid, IntArray
from shardload.planning.parts import Block, Part, Parts, PartsByRank
from shardload.planning.region import Region
from shardload.planning.schedule import Schedule
from shardload.planning.shards import Shards
from shardload.planning.source_layout import SourceLayout

__all__ = [
    "DIRECT", "MODES", "PARALLEL", "ROOT", "Alone", "Direct", "OneOwnerEach", "Parallel", "Root", "plan_direct",
    "plan_schedules",
]  # fmt: skip

ROOT, PARALLEL, DIRECT = "root", "parallel", "direct"
MODES = (ROOT, PARALLEL, DIRECT)


class OneOwnerEach(ABC):
    """Each block has one owner. An owner's blocks are contiguous in C order, which is the file's order."""

    is_direct: ClassVar[bool] = False

    n_owners: int

    @abstractmethod
    def owner_rank(self, owner: int, n_ranks: int) -> int:
        """The rank of an owner (owners are counted from 0); increases with the owner."""

    @abstractmethod
    def owner_at(self, rank: int, n_ranks: int) -> int | None:
        """The inverse: the owner that a rank is; None if it is no owner."""

    def n_owners_of(self, n_ranks: int) -> int:
        """The number of owners."""
        return self.n_owners

    def extent(self, schedule: Schedule) -> tuple[int, ...]:
        """The shape of the array."""
        return schedule.blocks.shape

    def owner(self, schedule: Schedule, block: int) -> int:
        """The rank that owns a block."""
        return self.owner_rank(((block + 1) * self.n_owners - 1) // schedule.blocks.n_cells, schedule.n_ranks)

    @abstractmethod
    def owners(self, schedule: Schedule, blocks: IntArray) -> IntArray:
        """`owner` of many blocks."""

    def blocks_of(self, schedule: Schedule, rank: int) -> range:
        """The inverse of `owner`."""
        owner, n = self.owner_at(rank, schedule.n_ranks), schedule.blocks.n_cells
        return range(0) if owner is None else range(owner * n // self.n_owners, (owner + 1) * n // self.n_owners)

    def around(self, schedule: Schedule, rank: int) -> Region | None:
        """A box around the rank's blocks."""
        blocks = self.blocks_of(schedule, rank)
        return schedule.blocks.around(blocks) if blocks else None

    def is_owner(self, schedule: Schedule, rank: int) -> bool:
        """True if a rank owns blocks."""
        return len(self.blocks_of(schedule, rank)) > 0

    def owned_blocks(self, schedule: Schedule, rank: int) -> Iterator[Block]:
        """The rank's blocks, each with the parts of all pieces that meet it."""
        for block in self.blocks_of(schedule, rank):
            yield Block(schedule.blocks.region(block), _meeting_parts(schedule, block))

    def remote_parts(self, schedule: Schedule, rank: int) -> Mapping[int, Sequence[Part]]:
        """The parts of the rank's pieces, except those in its own blocks."""
        blocks = schedule.blocks
        block, shard = schedule.pairs_of(rank)
        owner = self.owners(schedule, block)
        # Owners ascend with blocks, so the pairs of one owner are contiguous.
        starts = np.flatnonzero(np.diff(owner, prepend=-1)).tolist()
        stops = [*starts, len(owner)][1:]
        runs = {rank_: range(a, b) for rank_, a, b in zip(owner[starts].tolist(), starts, stops, strict=True)}
        runs.pop(rank, None)
        if not schedule.is_never_split:
            return {
                rank_: [
                    Part(region, int(shard[k]), rank_)
                    for k in run
                    for region in schedule.messages(blocks.region(int(block[k])), int(shard[k]))
                ]
                for rank_, run in runs.items()
            }

        def make(k: int) -> Part:
            return schedule.part(blocks.bounds(int(block[k])), int(shard[k]), int(owner[k]))

        return PartsByRank(make, runs)


def _meeting_parts(schedule: Schedule, block: int) -> Sequence[Part]:
    """The parts of all pieces that meet a block, with the rank of each piece."""
    shards, region = schedule.shards, schedule.blocks.region(block)
    n_holders = shards.table.n_holders
    if n_holders is None or not schedule.is_never_split:
        return tuple(
            Part(piece, shard, holder)
            for shard in shards.grid.meeting(region)
            for holder in shards.section_holders(shard)
            for piece in schedule.messages(region, shard)
        )
    met, counts, bounds = shards.grid.meeting_axes(region), shards.grid.counts, schedule.blocks.bounds(block)
    holder = shards.section_holder

    def make(i: int) -> Part:
        i, k = divmod(i, n_holders)
        shard, stride = 0, 1
        for axis, count in zip(reversed(met), reversed(counts), strict=True):
            i, step = divmod(i, len(axis))
            shard, stride = shard + axis[step] * stride, stride * count
        return schedule.part(bounds, shard, holder(shard, k))

    return Parts(make, range(math.prod(map(len, met)) * n_holders))


@dataclass(frozen=True)
class Root(OneOwnerEach):
    """One rank owns all blocks.

    Parameters
    ----------
    root : int
        The rank that owns them.
    """

    mode: ClassVar[str] = ROOT
    root: int = 0
    n_owners: int = field(default=1, init=False, repr=False)

    def check(self, n_ranks: int) -> None:
        """Raise ValueError if there is no such rank."""
        if not 0 <= self.root < n_ranks:
            raise ValueError(f"rank {self.root} of {n_ranks} ranks cannot own the blocks")

    def owner_rank(self, owner: int, n_ranks: int) -> int:
        """The root."""
        return self.root

    def owner_at(self, rank: int, n_ranks: int) -> int | None:
        """0 for the root."""
        return 0 if rank == self.root else None

    def owners(self, schedule: Schedule, blocks: IntArray) -> IntArray:
        """The root, for every block."""
        return np.full(blocks.shape, self.root)


@dataclass(frozen=True)
class Alone(Root):
    """One rank owns all blocks of this array, and other ranks those of other arrays: together they read in parallel."""

    mode: ClassVar[str] = PARALLEL


@dataclass(frozen=True)
class Parallel(OneOwnerEach):
    """Several ranks share the blocks. The owners are spread evenly over the ranks, and so over the nodes.

    Parameters
    ----------
    n_owners : int
        Number of owners.
    ranks_per_node : int, optional
        If the last node has fewer ranks than this, it has its share of the owners (or all its ranks, if those are fewer), and
        the others are spread over the full nodes. Otherwise two owners could come to be on one node while another has none.
    """

    mode: ClassVar[str] = PARALLEL
    n_owners: int
    ranks_per_node: int | None = None

    def check(self, n_ranks: int) -> None:
        """Raise ValueError if there are fewer ranks than owners."""
        if not 1 <= self.n_owners <= n_ranks:
            raise ValueError(f"{self.n_owners} of {n_ranks} ranks cannot own the blocks")

    def owner_rank(self, owner: int, n_ranks: int) -> int:
        """Owner ``k`` is rank ``k * n_ranks // n_owners``, counted on the full nodes and on the last one if that has fewer."""
        n, owned = self._on_full_nodes(n_ranks)
        return owner * n // owned if owner < owned else n + (owner - owned) * (n_ranks - n) // (self.n_owners - owned)

    def owner_at(self, rank: int, n_ranks: int) -> int | None:
        """The owner that has this rank; None if none does."""
        n, owned = self._on_full_nodes(n_ranks)
        first, n_before, n_here, n_owners = (0, 0, n, owned) if rank < n else (n, owned, n_ranks - n, self.n_owners - owned)
        owner = n_before - (-(rank - first) * n_owners // n_here)  # the first one whose rank is not below this one
        return owner if owner < n_before + n_owners and self.owner_rank(owner, n_ranks) == rank else None

    def owners(self, schedule: Schedule, blocks: IntArray) -> IntArray:
        """`owner` of many blocks."""
        owners = ((blocks + 1) * self.n_owners - 1) // schedule.blocks.n_cells
        n, owned = self._on_full_nodes(schedule.n_ranks)
        found: IntArray = owners * n // max(1, owned)
        if owned < self.n_owners:
            last = n + (owners - owned) * (schedule.n_ranks - n) // (self.n_owners - owned)
            found = np.where(owners < owned, found, last)
        return found

    def most_on_node(self, n_ranks: int, per_node: int) -> int:
        """Owners on the node that has most."""
        n, owned = self._on_full_nodes(n_ranks)
        return max(min(per_node, -(-owned * per_node // n)), self.n_owners - owned)

    def _on_full_nodes(self, n_ranks: int) -> tuple[int, int]:
        """Ranks and owners on nodes that are full; all of them, if the last one is or nothing is known of nodes."""
        per_node = self.ranks_per_node or n_ranks
        n_nodes, last = -(-n_ranks // per_node), n_ranks % per_node
        if not last or n_nodes == 1:
            return n_ranks, self.n_owners
        return n_ranks - last, self.n_owners - min(last, self.n_owners // n_nodes)


@dataclass(frozen=True)
class Direct:
    """Every rank reads what it holds.

    Parameters
    ----------
    is_merged : bool
        Whether a rank reads a block once for all of its shards, or once for each shard.
    """

    mode: ClassVar[str] = DIRECT
    is_direct: ClassVar[bool] = True
    is_merged: bool = False

    def check(self, n_ranks: int) -> None:
        """Works for any number of ranks."""

    def n_owners_of(self, n_ranks: int) -> int:
        """All ranks."""
        return n_ranks

    def extent(self, schedule: Schedule) -> tuple[int, ...]:
        """The shape of a section; if merged, the extent of what a rank holds."""
        return schedule.shards.reach if self.is_merged else schedule.shards.section_shape

    def is_owner(self, schedule: Schedule, rank: int) -> bool:
        """True if a rank holds any shard."""
        return bool(schedule.shards.shards_of(rank))

    def owner(self, schedule: Schedule, block: int) -> int:
        """-1: every rank may read it."""
        return -1

    def owners(self, schedule: Schedule, blocks: IntArray) -> IntArray:
        """-1 for every block."""
        return np.full(blocks.shape, -1)

    def blocks_of(self, schedule: Schedule, rank: int) -> range:
        """No block has an owner."""
        return range(0)

    def around(self, schedule: Schedule, rank: int) -> Region | None:
        """A box around the sections of the rank's shards."""
        held = [schedule.true_region(section) for section in schedule.shards.sections_of(rank)]
        regions = [region for region in held if region is not None]
        if not regions:
            return None
        start, stop = zip(*[region.start for region in regions], strict=True), zip(*[r.stop for r in regions], strict=True)
        return Region(tuple(map(min, start)), tuple(map(max, stop)))

    def owned_blocks(self, schedule: Schedule, rank: int) -> Iterator[Block]:
        """The regions of blocks that a rank needs."""
        if self.is_merged:
            yield from self._merged(schedule, rank)
            return
        for shard in schedule.shards.sections_of(rank):
            held = schedule.true_region(shard)
            for block in schedule.blocks.meeting(held) if held else ():
                region = schedule.blocks.region(block).intersect(held) if held else None
                if region is not None:
                    yield Block(region, (Part(region, shard, rank),))

    def _merged(self, schedule: Schedule, rank: int) -> Iterator[Block]:
        """Each block once, with a part for each shard that it meets. There may be gaps between the parts."""
        block, shard = (found.tolist() for found in schedule.pairs_of(rank))
        for number, pairs in itertools.groupby(zip(block, shard, strict=True), key=operator.itemgetter(0)):
            bounds = schedule.blocks.bounds(number)
            parts = tuple(schedule.part(bounds, met, rank) for _, met in pairs)
            start = tuple(map(min, zip(*(part.region.start for part in parts), strict=True)))
            stop = tuple(map(max, zip(*(part.region.stop for part in parts), strict=True)))
            yield Block(Region(start, stop), parts)

    def remote_parts(self, schedule: Schedule, rank: int) -> Mapping[int, Sequence[Part]]:
        """Empty: nothing is sent."""
        return {}


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
