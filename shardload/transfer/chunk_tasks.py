"""How is a block decoded from stored chunks, in several threads?

A thread reads a box of chunks at a time (`planning.batches`): many small ones, or one large one. They are fetched with few
requests, and decoded

1. straight into a piece, if all of them belong to that piece and lie there as in the file;
2. else into the block's staging buffer, if other ranks need them and they lie there one after the other, as planes do;
3. else into the scratch memory of the thread, which is still in the core's cache when it is copied into the pieces, and into
   the staging buffer for other ranks.

In the staging buffer there is one tile of the whole block, or, if chunks are large and do not lie there one after the other, a
tile for each: then they need not be copied.

If anything is wrong with a box of several chunks, they are read one by one. So an error names its chunk.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardload.errors import PeerError, ShardloadError
from shardload.formats.contract.by_chunks import copy_chunks
from shardload.formats.contract.chunk_reader import ChunkReader, Encoded
from shardload.formats.contract.dtypes import settle_bools
from shardload.planning.batches import cut_box
from shardload.planning.blocks import aligned
from shardload.planning.grid import numbers_in, ravel
from shardload.planning.parts import Block, Part
from shardload.planning.region import Region
from shardload.planning.source_layout import SourceLayout
from shardload.system.interruption import let_interruption_pass
from shardload.system.scratch import ThreadScratch
from shardload.transfer.buffers import Piece, StagedBlock
from shardload.transfer.counters import Counters
from shardload.transfer.decode import Convert
from shardload.transfer.local_pieces import LocalPieces
from shardload.transfer.missing import Counter
from shardload.transfer.read_errors import Naming

Array = np.ndarray[Any, Any]
Box = tuple[range, ...]

_TOGETHER = (
    32  # boxes that are prepared together: decoding puts everything else out of the core's caches, and Python then crawls
)


@dataclass(slots=True)
class _Read:
    """A box of chunks that is to be read, prepared before other chunks are decoded.

    Attributes
    ----------
    box, region, in_file
        The chunks in the grid of the loaded array, their elements in the block, and the chunks in the file's grid.
    own, sent
        What goes to pieces of this rank, and what must still be copied into the tile for other ranks.
    target : ndarray or None
        Where the chunks are decoded; None for scratch memory.
    stays : bool
        Whether that is their place in a piece, so that nothing is copied.
    """

    box: Box
    region: Region
    in_file: list[range]
    own: Sequence[tuple[Part, Region]]
    sent: set[Region]
    target: Any = None
    stays: bool = False


class ChunkTasks:
    """Reads blocks, in tasks of some boxes of chunks each.

    Parameters
    ----------
    reader : ChunkReader
        Fetches and decodes chunks.
    layout : SourceLayout
        How the array lies in its file. It must have chunks.
    local : LocalPieces
        This rank's pieces.
    scratch : ThreadScratch
        Scratch memory of the threads.
    names : Naming
        Names the chunks, and keeps which of them is being read.
    counts : callable
        Chooses which missing chunks of a block this rank counts (`missing.counter_of`).
    convert : callable
        Decodes and casts (`decode.conversion`), if the layout says that values are.
    n_threads : int
        Number of tasks that run at once.
    batch_nbytes : int
        Decoded bytes of the small chunks that are read together.
    """

    def __init__(
        self,
        reader: ChunkReader,
        layout: SourceLayout,
        local: LocalPieces,
        scratch: ThreadScratch,
        names: Naming,
        counts: Counter,
        convert: Convert,
        n_threads: int,
        batch_nbytes: int = 0,
    ) -> None:
        self._reader, self._layout, self._local, self._scratch = reader, layout, local, scratch
        self._names, self._counts, self._convert, self._n_threads = names, counts, convert, n_threads
        self._room = partial(scratch.bytes, "stored")
        self._chunks_per_box = batch_nbytes // max(1, layout.chunk_nbytes)
        self._chunk_room = aligned(layout.chunk_size * layout.wide_itemsize)
        self._is_plain = layout.codec == "none"
        selection, chunk_shape = layout.selection, layout.chunk_shape or ()
        self._chunk_shape = chunk_shape
        self._first_chunk = tuple(a // c for a, c in zip(selection.region.start, chunk_shape, strict=True))
        kept, n = set(selection.kept), len(chunk_shape)
        # Of a buffer with an axis for each axis of the box, then one for each axis of a chunk: what the selection keeps.
        inside = (slice(None) if k in kept else selection.region.start[k] % chunk_shape[k] for k in range(n))
        self._kept: tuple[Any, ...] = (*(slice(None) if k in kept else 0 for k in range(n)), *inside, ...)
        # Axes behind the first one along which a chunk has several elements: see `_stage`.
        cell = layout.chunks.cell
        self._inner = range(next((k for k, length in enumerate(cell) if length > 1), len(cell)) + 1, len(cell))
        self._keeps_whole_chunks = math.prod(cell) == layout.chunk_size

    def needs_slot(self, block: Block) -> bool:
        """True if a block needs a staging buffer, for the parts that other ranks need."""
        return self._local.sends(block.parts)

    def tasks(self, staged: StagedBlock) -> list[Callable[[Counters], None]]:
        """The tasks that read a block; they may run at the same time."""
        axes = self._layout.chunks.meeting_axes(staged.block.region)
        most = max(1, min(self._chunks_per_box, -(-math.prod(map(len, axes)) // self._n_threads)))
        self._stage(staged, axes, most > 1)
        boxes = list(cut_box(axes, most))
        # Each task takes every n-th box, so that all end at about the same time.
        n = min(self._n_threads, len(boxes))
        return [partial(self._read_boxes, staged, boxes[k::n]) for k in range(n)]

    def _stage(self, staged: StagedBlock, axes: Sequence[range], are_small: bool) -> None:
        """Make one tile of the whole block, if chunks are small or lie in it one after the other."""
        layout, region = self._layout, staged.block.region
        if staged.slot is None:
            return
        nbytes = region.size * layout.dtype.itemsize
        if nbytes > staged.slot.data.nbytes or all(len(axis) == 1 for axis in axes):
            return
        if are_small or layout.casts or (self._keeps_whole_chunks and all(len(axes[k]) == 1 for k in self._inner)):
            staged.whole = Piece(region, staged.slot.data[:nbytes].view(layout.dtype).reshape(region.shape))
            staged.tiles.append(staged.whole)

    def _read_boxes(self, staged: StagedBlock, boxes: Iterable[Box], counters: Counters) -> None:
        reads = self._reads(staged, boxes)
        while together := list(itertools.islice(reads, _TOGETHER)):
            for read in together:
                self._read_box(staged, read, counters)

    def _reads(self, staged: StagedBlock, boxes: Iterable[Box]) -> Iterator[_Read]:
        """A `_Read` for each box. A box that is not needed as a whole is split into single chunks."""
        for box in boxes:
            is_one = math.prod(map(len, box)) == 1
            region = self._region(staged, box)
            met = [(part, common) for part in staged.block.parts if (common := part.region.intersect(region)) is not None]
            # Shards do not overlap; replicas have equal regions.
            is_needed = is_one or sum(common.size for common in {common for _, common in met}) == region.size
            if met and (not is_needed or (not is_one and staged.slot is not None and staged.whole is None)):
                yield from self._reads(staged, _ones(box))
            elif met:  # else it lies between the shards of this rank
                yield self._prepared(staged, box, region, met)

    def _read_box(self, staged: StagedBlock, read: _Read, counters: Counters) -> None:
        is_one = math.prod(map(len, read.box)) == 1
        with self._names.at(read.region):
            try:
                self._read(staged, read, counters)
                return
            except (MemoryError, PeerError):
                raise
            except Exception as error:
                let_interruption_pass(error)
                if is_one and isinstance(error, ShardloadError):
                    raise
                if is_one:
                    index = tuple([axis.start for axis in read.in_file])
                    raise self._names.unreadable(error, read.region, index) from error
        self._read_boxes(staged, _ones(read.box), counters)

    def _region(self, staged: StagedBlock, box: Box) -> Region:
        """What a block has of a box of chunks."""
        chunks, whole = self._layout.chunks, staged.block.region
        axes = list(zip(box, chunks.cell, chunks.phase, whole.start, whole.stop, strict=True))
        return Region(
            tuple([max(axis.start * c - p, low) for axis, c, p, low, _ in axes]),
            tuple([min(axis.stop * c - p, high) for axis, c, p, _, high in axes]),
        )

    def _prepared(self, staged: StagedBlock, box: Box, region: Region, met: Sequence[tuple[Part, Region]]) -> _Read:
        layout, whole = self._layout, staged.whole
        own = [(part, common) for part, common in met if self._local.is_own(part)]
        sent = {common for part, common in met if not self._local.is_own(part)}
        read = _Read(box, region, self._in_file(box), own, sent)
        if not sent and len(own) == 1:
            read.target = self._as_chunks(self._local.in_place([own[0][0]], region), region, box)
            read.stays = read.target is not None
        elif sent and whole is not None:
            read.target = self._as_chunks(whole.view(region), region, box)
            read.sent = set() if read.target is not None else sent
        elif sent and not layout.casts:
            read.target = self._cut(staged, box, self._chunk_shape, layout.file_dtype)
        return read

    def _read(self, staged: StagedBlock, read: _Read, counters: Counters) -> None:
        """Read a box of chunks and deliver its values: all of them, or none."""
        layout, box, in_file = self._layout, read.box, read.in_file
        n = math.prod(map(len, box))
        started = time.perf_counter()
        target = read.target
        if target is None:
            target = self._scratch.array("chunk", (n, *self._chunk_shape), layout.file_dtype)
        encoded: Encoded | None = None
        if not (self._is_plain and self._reader.read_plain(in_file, target)):
            encoded = self._reader.fetch(in_file, self._room)
        fetched = time.perf_counter()
        if encoded is not None:
            self._reader.decode(encoded, target)
        settle_bools(target)
        values, tile = target, None
        if not read.stays:
            values = target.reshape((*map(len, in_file), *self._chunk_shape))[self._kept]
            if n == 1 or layout.casts or (read.own and self._local.has_checksums):
                tile = Piece(read.region, self._joined(staged, read, values))
        decoded = time.perf_counter()
        if not read.stays:
            self._deliver(staged, read, values, tile, counters)
        counters.read_seconds += fetched - started
        counters.decode_seconds += decoded - fetched
        counters.copy_seconds += time.perf_counter() - decoded
        counters.chunks_decoded += n
        counters.nbytes_read += read.region.size * layout.file_dtype.itemsize
        self._count_stored(staged, box, encoded, target, counters)

    def _count_stored(self, staged: StagedBlock, box: Box, encoded: Encoded | None, target: Array, counters: Counters) -> None:
        if encoded is None:
            counters.nbytes_stored += target.nbytes
        elif not encoded.has_missing:
            counters.nbytes_stored += sum(map(len, encoded.data))
        else:
            counters.nbytes_stored += sum(len(data) for data in encoded.data if data is not None)
            is_missing = [data is None for data in encoded.data]
            numbers = numbers_in(box, self._layout.chunks.counts)[is_missing]
            counters.add_missing(self._counts(staged.block, numbers, self._layout.chunks))

    def _in_file(self, box: Box) -> list[range]:
        """A box of the file's grid of chunks, from one of the grid of the loaded array."""
        axes = [range(first, first + 1) for first in self._first_chunk]
        for k, axis in zip(self._layout.selection.kept, box, strict=True):
            axes[k] = range(self._first_chunk[k] + axis.start, self._first_chunk[k] + axis.stop)
        return axes

    def _as_chunks(self, view: Array | None, region: Region, box: Box) -> Array | None:
        """The memory of a region as whole chunks, one after the other, if they lie there like that; else None."""
        layout, n = self._layout, [len(axis) for axis in box]
        if view is None or layout.casts or region.size != layout.chunk_size * math.prod(n) or not view.flags.c_contiguous:
            return None
        ndim = len(box)
        cut = view.reshape([size for pair in zip(n, layout.chunks.cell, strict=True) for size in pair])
        chunks = cut.transpose([*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)])
        return chunks if chunks.flags.c_contiguous else None

    def _cut(self, staged: StagedBlock, box: Box, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The room for a chunk in the block's staging buffer, when each has its own."""
        if staged.slot is None:
            raise ValueError("a block without a slot has no room")
        axes = self._layout.chunks.meeting_axes(staged.block.region)
        place = ravel([axis.start - first.start for axis, first in zip(box, axes, strict=True)], list(map(len, axes)))
        start = place * self._chunk_room
        nbytes = math.prod(shape) * dtype.itemsize
        return staged.slot.data[start : start + nbytes].view(dtype).reshape(shape)

    def _joined(self, staged: StagedBlock, read: _Read, values: Array) -> Array:
        """Decoded values in the shape of their region: those of a chunk as they lie, or all of a box cast."""
        box, region = read.box, read.region
        layout = self._layout
        inside = tuple(
            slice(a + p - axis.start * c, b + p - axis.start * c)
            for a, b, p, axis, c in zip(region.start, region.stop, layout.chunks.phase, box, layout.chunks.cell, strict=True)
        )
        if math.prod(map(len, box)) == 1:
            place: Any = (*(0 for _ in box), *inside, ...)
            raw: Array = values[place]
        else:
            raw = self._scratch.array("joined", region.shape, layout.file_dtype)
            copy_chunks(values, box, layout.chunks.cell, region, raw, layout.chunks.phase)
        if not layout.casts:
            return raw
        if read.sent and staged.whole is None:
            cast = self._cut(staged, box, region.shape, layout.dtype)
        else:
            cast = self._scratch.array("cast", region.shape, layout.dtype)
        self._convert(raw, cast, self._names.elements(layout.selection.to_file(region)))
        return cast

    def _deliver(self, staged: StagedBlock, read: _Read, values: Array, tile: Piece | None, counters: Counters) -> None:
        """Copy decoded values into this rank's pieces, and into the block's tile. `tile` has them as their region has them."""
        box, own, sent = read.box, read.own, read.sent
        whole, cell, phase = staged.whole, self._layout.chunks.cell, self._layout.chunks.phase
        if tile is not None and sent and whole is None:
            staged.tiles.append(tile)  # from several threads: list.append is atomic
        for room in [(common, whole.view(common)) for common in sent] if whole is not None else ():
            if tile is None:
                copy_chunks(values, box, cell, *room, phase)
            else:
                np.copyto(room[1], tile.view(room[0]), casting="no")
        if tile is not None:
            self._local.copy(self._local.copies([part for part, _ in own], tile.region, tile.data), counters)
            return
        for part, common in own:
            piece = self._local.view(part, common)
            copy_chunks(values, box, cell, common, piece, phase)
            counters.nbytes_copied += piece.nbytes


def _ones(box: Box) -> Iterator[Box]:
    """Each chunk of a box as a box."""
    for index in itertools.product(*box):
        yield tuple([range(k, k + 1) for k in index])
