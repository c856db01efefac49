"""How does the loaded array lie in its file, which rank owns which block, and which parts of shards lie in it?

Pure: integers in, frozen dataclasses out. No JAX, no MPI, no files. Ranks with the same integers make the same schedule. A
schedule does not say in which direction values go: a load moves them from blocks to pieces, a save from pieces to blocks.

1. `SourceLayout` is how the loaded array lies in its file. The array is cut in three ways: into the chunks of the file, into
   blocks for the owners (whole chunks, so that no chunk is decoded twice; `plan_blocks`), and into shards. Each axis is cut
   independently of the others.
2. `Shards` is the cut into shards, with the ranks that hold each shard. A *section* is a region of the array that lies in a
   shard as it is: without a halo, the whole shard. A *piece* is the values of a shard in memory. A *part* is what a block and a
   section have in common.
3. `Owners` are the ranks that share the blocks: one or several, each with a run of blocks that follow each other in the file.
   Without them every rank reads what it holds: nothing is sent, and a chunk that several ranks need is decoded by each.
4. `Schedule` answers for one rank at a time, at the cost of that rank's own work: which blocks it owns, with their parts
   (`outgoing`), and which parts of its pieces lie in the blocks of other ranks (`incoming`), in the order in which
   these ranks process them. The owner of a block is a formula, so no rank ever lists the work of the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from shardload.planning.region import (
    BLOCKS_PER_OWNER,
    NEAR_NBYTES,
    Grid,
    IntArray,
    Region,
    count_runs,
    most_chunks,
    plan_blocks,
    plan_row_chunks,
    run_stride,
)
from shardload.planning.selection import Selection
from shardload.planning.shards import Shards


@dataclass(frozen=True, slots=True)
class SourceLayout:
    """The loaded array, as a selection of an array in a file.

    Parameters
    ----------
    selection : Selection
        The elements of the file's array that make up the loaded array.
    chunks : Grid
        The loaded array cut into the file's chunks. If the file has none, into stand-ins: any part can be read by itself.
    chunk_shape : tuple of int or None
        Shape of a chunk in the file, including the axes that the selection drops; None if the file has no chunks.
    file_dtype, dtype : dtype
        Type in the file (in native byte order), and type of the loaded array.
    codec : str
        Encoding of the chunks: ``"none"``, ``"gzip+shuffle"``.
    decoding : Decoding or None
        How stored numbers become values (`shardload.values.decoding`); None if they are only cast.
    per_object : tuple of int or None
        If an object of a store has several chunks (a Zarr shard): how many along each axis. None if a chunk is an object, or
        the file is local.
    """

    selection: Selection
    chunks: Grid
    chunk_shape: tuple[int, ...] | None
    file_dtype: np.dtype[Any]
    dtype: np.dtype[Any]
    codec: str = "none"
    decoding: Any = None
    per_object: tuple[int, ...] | None = None

    @classmethod
    def cut(
        cls,
        selection: Selection,
        chunk_shape: tuple[int, ...] | None,
        file_dtype: np.dtype[Any],
        dtype: np.dtype[Any],
        codec: str = "none",
        decoding: Any = None,
        object_shape: tuple[int, ...] | None = None,
    ) -> SourceLayout:
        """Make the layout, with the grid of chunks that a selection of a file's array has.

        `object_shape`: elements along each axis of an object in a store that has several chunks.

        >>> from shardload.planning.selection import select_axes
        >>> f4 = np.dtype("f4")
        >>> SourceLayout.cut(select_axes((5, slice(3, 12)), (8, 16)), (4, 4), f4, f4).chunks
        Grid(shape=(9,), cell=(4,), phase=(3,))
        """
        if chunk_shape is None:
            cell, phase = plan_row_chunks(selection.shape, file_dtype.itemsize), (0,) * len(selection.kept)
        else:
            cell = tuple(chunk_shape[k] for k in selection.kept)
            phase = tuple(o % c for o, c in zip(selection.offset, cell, strict=True))
        chunks = Grid(selection.shape, cell, phase)
        per_object = None
        if object_shape is not None:
            per_object = tuple(object_shape[k] // n for k, n in zip(selection.kept, cell, strict=True))
        return cls(selection, chunks, chunk_shape, file_dtype, dtype, codec, decoding, per_object)

    @property
    def has_chunks(self) -> bool:
        """True if the file has chunks, so that `chunks` are not stand-ins."""
        return self.chunk_shape is not None

    @property
    def casts(self) -> bool:
        """True if values are decoded or cast while they are loaded."""
        return self.decoding is not None or self.dtype != self.file_dtype

    @property
    def wide_itemsize(self) -> int:
        """Bytes per element of the wider of the two types."""
        return max(self.dtype.itemsize, self.file_dtype.itemsize)

    @property
    def chunk_size(self) -> int:
        """Number of elements of one chunk in the file; 0 without chunks."""
        return 0 if self.chunk_shape is None else math.prod(self.chunk_shape)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one decoded chunk; 0 without chunks."""
        return self.chunk_size * self.file_dtype.itemsize


_MOST_CACHED = 4096
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Part:
    """Elements that go from one block to one target.

    Attributes
    ----------
    region : Region
        The elements, in global coordinates: all inside the block and inside the target.
    target : int
        The number of what they fill (`Flow.target`): a section (in a load), or a block (in a save).
    rank : int
        The rank at the other end: in the list of a block, the rank that fills the target; in the list of a target, the rank
        that stages the block.
    """

    region: Region
    target: int
    rank: int


class Parts(Iterable[Part]):
    """Parts in order, made anew in each iteration; a short list is kept, because it is iterated over several times. There are
    `n_at_most` of them: a list that may be long is never kept.

    A block that a million ranks share is planned as fast as a block that two ranks share.
    """

    def __init__(self, make: Callable[[], Iterator[Part]], n_at_most: int) -> None:
        self._make, self._n_at_most = make, n_at_most
        self._cached: tuple[Part, ...] | None = None

    def __iter__(self) -> Iterator[Part]:
        if self._n_at_most > _MOST_CACHED:
            return self._make()
        if self._cached is None:
            self._cached = tuple(self._make())
        return iter(self._cached)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of the file, and its parts, in the order in which they are sent."""

    region: Region
    parts: Iterable[Part]


# MPI counts are C ints, and some transports are slow or wrong near their limits: half of 2 GiB is safe everywhere.
MAX_MESSAGE_NBYTES = 1 << 30


@dataclass(frozen=True)
class Owners:
    """The ranks that share the blocks, spread evenly over all ranks, and so over the nodes.

    Parameters
    ----------
    n : int
        Number of owners.
    root : int
        The rank of the only owner; 0 if there are several.
    """

    n: int = 1
    root: int = 0

    def rank_of(self, owner: Any, n_ranks: int) -> Any:
        """The rank of an owner, counted from 0, or of an array of owners; increases with the owner."""
        return self.root + owner * n_ranks // self.n

    def of_block(self, block: Any, n_blocks: int, n_ranks: int) -> Any:
        """The rank that owns a block of `n_blocks`, or an array of them for an array of blocks."""
        return self.rank_of(((block + 1) * self.n - 1) // n_blocks, n_ranks)

    def blocks_of(self, rank: int, n_blocks: int, n_ranks: int) -> range:
        """The blocks that a rank owns, the inverse of `of_block`: the k-th of n owners has those from k * n_blocks // n up to
        (k + 1) * n_blocks // n.
        """
        owner = -((self.root - rank) * self.n // n_ranks)  # the first one whose rank is not below this one
        if not 0 <= owner < self.n or self.rank_of(owner, n_ranks) != rank:
            return range(0)
        return range(owner * n_blocks // self.n, (owner + 1) * n_blocks // self.n)


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which rank owns which block, and which parts of shards lie in it: the `Flow` (`transfer.moves`) of a load.

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
    owners : Owners or None
        Which ranks own the blocks. None: every rank reads what it holds.
    max_message_nbytes : int
        Cap on a message, in addition to `MAX_MESSAGE_NBYTES`.
    is_merged : bool
        Without owners: whether a rank reads a block once for all of its shards, or once for each shard.
    """

    blocks: Grid
    shards: Shards
    itemsize: int
    n_ranks: int
    owners: Owners | None
    max_message_nbytes: int = MAX_MESSAGE_NBYTES
    is_merged: bool = False

    @property
    def is_direct(self) -> bool:
        """True if every rank reads its own shards, so that nothing is sent."""
        return self.owners is None

    @property
    def n_readers(self) -> int:
        """Number of ranks that read, or write, any block."""
        return self.shards.n_holding if self.owners is None else min(self.owners.n, self.blocks.n_cells)

    @property
    def most_blocks(self) -> int:
        """The blocks of the owner with most of them."""
        return -(-self.blocks.n_cells // max(1, self.n_readers))

    @property
    def extent(self) -> tuple[int, ...]:
        """The longest that a block can be along each axis: as the array; and if each rank reads what it holds, as a section of
        it, or as the box around its sections.
        """
        if not self.is_direct:
            return self.blocks.shape
        return self.shards.reach if self.is_merged else self.shards.section_shape

    @property
    def max_block_size(self) -> int:
        """Upper bound on the elements of a `Block`: a cell of the grid, cut to `extent`."""
        return math.prod(map(min, self.blocks.cell, self.blocks.shape, self.extent))

    def targets(self, rank: int) -> Iterable[int]:
        """See `Flow`: the sections of the shards that a rank holds."""
        return self.shards.sections_of(rank)

    def target(self, section: int) -> Region | None:
        """See `Flow`: the elements of a section of a shard, without padding; None if all of it is padding."""
        return self.shards.grid.region(section).intersect(Region.whole(self.blocks.shape))

    # --- blocks

    def owner(self, block: Any) -> Any:
        """The rank that owns a block, or an array of them for an array of blocks; -1 if every rank may read it."""
        if self.owners is None:
            return block * 0 - 1  # -1, or an array of them
        return self.owners.of_block(block, self.blocks.n_cells, self.n_ranks)

    def blocks_of(self, rank: int) -> range:
        """The blocks that a rank owns: the inverse of `owner`; none if every rank may read them."""
        if self.owners is None:
            return range(0)
        return self.owners.blocks_of(rank, self.blocks.n_cells, self.n_ranks)

    def is_owner(self, rank: int) -> bool:
        """True if a rank itself reads or writes the file: as an owner, or because every rank does."""
        return bool(self.shards.shards_of(rank)) if self.is_direct else len(self.blocks_of(rank)) > 0

    def around(self, rank: int) -> Region | None:
        """A box around all that a rank reads or writes; None if that is nothing."""
        if not self.is_direct:
            blocks = self.blocks_of(rank)
            return self.blocks.around(blocks) if blocks else None
        regions = [region for section in self.targets(rank) if (region := self.target(section)) is not None]
        return _box_around(regions) if regions else None

    def outgoing(self, rank: int) -> Iterator[Block]:
        """The blocks that a rank owns, in file order, each with its parts. `Part.rank` is the rank that holds the piece."""
        if self.is_merged:
            yield from self._merged_blocks(rank)
        elif self.is_direct:
            for section in self.targets(rank):
                target = self.target(section)
                for _, region in () if target is None else self.blocks.cut(target):
                    yield Block(region, (Part(region, section, rank),))
        else:
            for number in self.blocks_of(rank):
                region = self.blocks.region(number)
                n_parts = self.shards.grid.n_meeting(region) * self.shards.most_holders
                yield Block(region, Parts(partial(self._parts_of, region), n_parts))

    def _merged_blocks(self, rank: int) -> Iterator[Block]:
        """Each block once, with a part for each section that it meets. There may be gaps between the parts."""
        pairs = zip(*(each.tolist() for each in self.pairs_of(rank)), strict=True)
        for number, pairs_of_block in itertools.groupby(pairs, key=lambda pair: pair[0]):
            block, sections = self.blocks.region(number), [section for _, section in pairs_of_block]
            common = [(block.intersect(self.shards.grid.region(section)), section) for section in sections]
            parts = tuple(Part(region, section, rank) for region, section in common if region is not None)
            yield Block(_box_around([part.region for part in parts]), parts)

    def _parts_of(self, region: Region) -> Iterator[Part]:
        """The parts of all pieces that meet a block, with the rank of each piece."""
        shards = self.shards
        for section in shards.grid.meeting(region):
            messages = list(self.messages(region, section))
            for holder in shards.holders(shards.shard_of(section)):
                for message in messages:
                    yield Part(message, section, holder)

    def incoming(self, rank: int) -> Mapping[int, Iterable[Part]]:
        """The parts of a rank's pieces that lie in blocks of other ranks, by owner, in the order of the owner's blocks."""
        if self.is_direct:
            return {}
        numbers, sections = self.pairs_of(rank)
        owners = self.owner(numbers)
        # Owners ascend with blocks, so the pairs of one owner are contiguous.
        starts = np.flatnonzero(np.diff(owners, prepend=-1)).tolist()
        stops = [*starts, len(owners)][1:]
        by_owner = zip(owners[starts].tolist(), starts, stops, strict=True)

        def make(owner: int, start: int, stop: int) -> Iterator[Part]:
            for number, section in zip(numbers[start:stop].tolist(), sections[start:stop].tolist(), strict=True):
                for message in self.messages(self.blocks.region(number), section):
                    yield Part(message, section, owner)

        return {owner: Parts(partial(make, owner, a, b), b - a) for owner, a, b in by_owner if owner != rank}

    # --- parts

    def pairs_of(self, rank: int) -> tuple[IntArray, IntArray]:
        """The pairs of a block and a section of this rank's shards that share elements, ordered by block, then section."""
        numbers, sections = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for section in self.targets(rank):
            region = self.target(section)
            if region is not None:
                numbers.append(np.fromiter(self.blocks.meeting(region), np.int64))
                sections.append(np.full(len(numbers[-1]), section))
        blocks_of_pairs, sections_of_pairs = np.concatenate(numbers), np.concatenate(sections)
        order = np.lexsort((sections_of_pairs, blocks_of_pairs))
        return blocks_of_pairs[order], sections_of_pairs[order]

    @cached_property
    def max_part_nbytes(self) -> int:
        """Upper bound on the bytes of a part."""
        return math.prod(map(min, self.blocks.cell, self.blocks.shape, self.shards.section_shape)) * self.itemsize

    def messages(self, region: Region, section: int) -> Iterator[Region]:
        """The region that a block and a section have in common, cut into messages."""
        common = region.intersect(self.shards.grid.region(section))
        cap = min(self.max_message_nbytes, MAX_MESSAGE_NBYTES)
        return iter(()) if common is None else common.split(max(1, cap // self.itemsize))


def _box_around(regions: Sequence[Region]) -> Region:
    """The smallest box around some regions, at least one."""
    start, stop = zip(*[region.start for region in regions], strict=True), zip(*[r.stop for r in regions], strict=True)
    return Region(tuple(map(min, start)), tuple(map(max, stop)))


ROOT, PARALLEL, DIRECT = "root", "parallel", "direct"
MODES = (ROOT, PARALLEL, DIRECT)


def plan_direct(layout: SourceLayout, shards: Shards, n_ranks: int, *, max_nbytes: int) -> Schedule:
    """Every rank reads what it holds.

    A block is read once for all shards of a rank if a chunk may lie in two of them, or if the gaps between runs are so short
    that they are read, too. Otherwise each shard is read by itself: without a copy if it lies in the file as in memory, and the
    first shard is complete early.

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
    hold_several_sections = shards.most_held > 1 or any(map(shards.halo.wraps, range(len(shards.cuts))))
    is_merged = hold_several_sections and _shares_reads(layout, shards)
    blocks = _cut_blocks(layout, max_nbytes, within=shards.reach if is_merged else shards.section_shape)
    return Schedule(blocks, shards, layout.dtype.itemsize, n_ranks, None, is_merged=is_merged)


def _shares_reads(layout: SourceLayout, shards: Shards) -> bool:
    """True if something that is read at once may lie in two sections of a rank."""
    chunks, extent = layout.chunks, shards.shard_shape
    if shards.has_halo:  # sections overlap
        return layout.has_chunks
    if layout.has_chunks:
        axes = zip(shards.cuts, extent, chunks.cell, chunks.phase, strict=True)
        return any(n > 1 and (phase or e % cell) for n, e, cell, phase in axes)
    is_near = run_stride(chunks.shape, extent) * layout.file_dtype.itemsize <= NEAR_NBYTES
    return count_runs(chunks.shape, extent) > 1 and is_near


def plan_shared(
    layout: SourceLayout,
    shards: Shards,
    n_ranks: int,
    owners: Owners,
    *,
    max_nbytes: int,
    per_owner: int = BLOCKS_PER_OWNER,
) -> Schedule:
    """Some ranks own the blocks, and parts are sent between them and the ranks that hold the pieces.

    Parameters
    ----------
    layout, shards, n_ranks, max_nbytes
        As for `plan_direct`.
    owners : Owners
        The ranks that own blocks.
    per_owner : int
        Fewest blocks for each of them.
    """
    blocks = _cut_blocks(layout, max_nbytes, n_owners=owners.n, per_owner=per_owner)
    return Schedule(blocks, shards, layout.dtype.itemsize, n_ranks, owners)


def _cut_blocks(layout: SourceLayout, max_nbytes: int, **options: Any) -> Grid:
    """Blocks that fit into a staging buffer of `max_nbytes`, with all chunks that they meet."""
    max_cells = most_chunks(layout.chunk_size * layout.wide_itemsize, max_nbytes) if layout.has_chunks else _NO_LIMIT
    options |= {"max_nbytes": max_nbytes, "max_cells": max_cells, "per_object": layout.per_object}
    blocks = plan_blocks(layout.chunks, layout.wide_itemsize, **options)
    if layout.per_object is None:
        return blocks
    # Blocks begin where objects do, not where the selection does.
    return replace(blocks, phase=tuple(o % c for o, c in zip(layout.selection.offset, blocks.cell, strict=True)))
