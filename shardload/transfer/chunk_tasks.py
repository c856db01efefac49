"""How is a block decoded from stored chunks, in several threads?

A thread reads a box of chunks at a time (`planning.batches`): many small ones, or one large one. They are fetched with few
requests, and decoded

1. straight into a piece, if all of them belong to that piece and lie there as in the file;
2. else into the block's staging buffer, if other ranks need them and they lie there as in the file, as planes do;
3. else into the scratch memory of the thread, which is still in the core's cache when it is copied into the pieces, and into
   the staging buffer for other ranks.

If anything is wrong with a box of several chunks, they are read one by one. So an error names its chunk.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardload.errors import PeerError, ShardloadError
from shardload.formats.contract.chunk_reader import ChunkReader, Encoded, copy_chunks
from shardload.formats.contract.dtypes import settle_bools
from shardload.planning.batches import cut_box
from shardload.planning.grid import numbers_in
from shardload.planning.parts import Block, Part
from shardload.planning.region import Region
from shardload.planning.source_layout import SourceLayout
from shardload.storage.remote import RemoteError
from shardload.system.interruption import let_interruption_pass
from shardload.system.scratch import ThreadScratch
from shardload.transfer.buffers import Piece, StagedBlock, view_of
from shardload.transfer.cast import Convert
from shardload.transfer.counters import Counters
from shardload.transfer.missing import Counter
from shardload.transfer.pieces import LocalPieces
from shardload.transfer.read_errors import Naming

Array = np.ndarray[Any, Any]
Box = tuple[range, ...]
Met = Sequence[tuple[Part, Region]]  # parts that a box meets, and what they have in common with it


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
        Decodes and casts (`cast.conversion`), if the layout says that values are.
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
        self._names, self._counts, self._convert, self.n_at_a_time = names, counts, convert, n_threads
        self._room = partial(scratch.bytes, "stored")
        self._chunks_per_box = batch_nbytes // max(1, layout.chunk_nbytes)
        self._is_plain = layout.codec == "none"
        selection, chunk_shape = layout.selection, layout.chunk_shape or ()
        self._chunk_shape = chunk_shape
        self._first_chunk = tuple(a // c for a, c in zip(selection.region.start, chunk_shape, strict=True))
        kept, n = set(selection.kept), len(chunk_shape)
        # Of a buffer with an axis for each axis of the box, then one for each axis of a chunk: what the selection keeps.
        inside = (slice(None) if k in kept else selection.region.start[k] % chunk_shape[k] for k in range(n))
        self._kept: tuple[Any, ...] = (*(slice(None) if k in kept else 0 for k in range(n)), *inside, ...)

    def needs_slot(self, block: Block) -> bool:
        """True if a block needs a staging buffer, for the parts that other ranks need."""
        return self._local.sends(block.parts)

    def tasks(self, staged: StagedBlock) -> list[Callable[[Counters], None]]:
        """The tasks that read a block; they may run at the same time."""
        dtype, region = self._layout.dtype, staged.block.region
        if staged.slot is not None:
            data = staged.slot.data[: region.size * dtype.itemsize].view(dtype).reshape(region.shape)
            staged.tiles.append(Piece(region, data))
        boxes = list(self._boxes(region))
        # Each task takes every n-th box, so that all end at about the same time.
        n = min(self.n_at_a_time, len(boxes))
        return [partial(self._read_boxes, staged, boxes[k::n]) for k in range(n)]

    def expect(self, blocks: Iterable[Block]) -> None:
        """Tell the reader what these blocks need, in their order; where all of a block is needed, as one box."""
        boxes = ((block, [tuple(self._layout.chunks.meeting_axes(block.region))]) for block in blocks)
        found = (self._in_file(box) for block, whole in boxes for box, _, _ in self._needed(block, whole))
        self._reader.expect(found)

    def _boxes(self, region: Region) -> Iterator[Box]:
        """The boxes of chunks of a block that are read together."""
        axes = self._layout.chunks.meeting_axes(region)
        most = max(1, min(self._chunks_per_box, -(-math.prod(map(len, axes)) // self.n_at_a_time)))
        return cut_box(axes, most)

    def _needed(self, block: Block, boxes: Iterable[Box]) -> Iterator[tuple[Box, Region, Met]]:
        """Those boxes that parts of a block need, and smaller ones of those that they need no more than a part of."""
        for box in boxes:
            region = self._region(block, box)
            met = [(part, common) for part in block.parts if (common := part.region.intersect(region)) is not None]
            if not met:  # it lies between the shards of this rank
                continue
            # Shards do not overlap; replicas have equal regions.
            is_whole = sum(common.size for common in {common for _, common in met}) == region.size
            if (n := math.prod(map(len, box))) == 1 or is_whole:
                yield box, region, met
            else:
                yield from self._needed(block, cut_box(box, n // 2))

    def _read_boxes(self, staged: StagedBlock, boxes: Iterable[Box], counters: Counters) -> None:
        for box, region, met in self._needed(staged.block, boxes):
            self._read_box(staged, box, region, met, counters)

    def _read_box(self, staged: StagedBlock, box: Box, region: Region, met: Met, counters: Counters) -> None:
        with self._names.at(region):
            try:
                self._read(staged, box, region, met, counters)
                return
            except (MemoryError, PeerError):
                raise
            except Exception as error:
                let_interruption_pass(error)
                is_one = math.prod(map(len, box)) == 1 or isinstance(error, RemoteError)  # which was tried often enough
                if is_one and isinstance(error, ShardloadError):
                    raise
                if is_one:
                    raise self._names.unreadable(error, region, self._names.index(region)) from error
        self._read_boxes(staged, _ones(box), counters)

    def _region(self, block: Block, box: Box) -> Region:
        """What a block has of a box of chunks."""
        chunks, whole = self._layout.chunks, block.region
        axes = list(zip(box, chunks.cell, chunks.phase, whole.start, whole.stop, strict=True))
        return Region(
            tuple([max(axis.start * c - p, low) for axis, c, p, low, _ in axes]),
            tuple([min(axis.stop * c - p, high) for axis, c, p, _, high in axes]),
        )

    def _read(self, staged: StagedBlock, box: Box, region: Region, met: Met, counters: Counters) -> None:
        """Read a box of chunks and deliver its values: all of them, or none."""
        layout, local, n = self._layout, self._local, math.prod(map(len, box))
        started = time.perf_counter()
        own = [(common, local.view(part, common)) for part, common in met if local.is_own(part)]
        sent = {common for part, common in met if not local.is_own(part)}
        place = None
        if sent:
            place = staged.tiles[0].view(region)
        elif len(own) == 1 and own[0][0] == region:
            place = own[0][1]
        target = None if place is None else self._as_chunks(place, box)
        is_in_place = target is not None
        if target is None:
            target = self._scratch.array("chunk", (n, *self._chunk_shape), layout.file_dtype)
        in_file = self._in_file(box)
        encoded: Encoded | None = None
        if not (self._is_plain and self._reader.read_plain(in_file, target)):
            encoded = self._reader.fetch(in_file, self._room)
        fetched = time.perf_counter()
        if encoded is not None:
            self._reader.decode(encoded, target)
        settle_bools(target)
        decoded = time.perf_counter()
        if not is_in_place:
            own += [(common, staged.tiles[0].view(common)) for common in sent]
        if not is_in_place or sent:
            values = target.reshape((*map(len, in_file), *self._chunk_shape))[self._kept]
            self._deliver(values, box, region, own, counters)
        counters.read_seconds += fetched - started
        counters.decode_seconds += decoded - fetched
        counters.copy_seconds += time.perf_counter() - decoded
        counters.chunks_decoded += n
        counters.nbytes_read += region.size * layout.file_dtype.itemsize
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

    def _as_chunks(self, view: Array, box: Box) -> Array | None:
        """The memory of a region as whole chunks, one after the other, if they lie there like that; else None."""
        layout, n = self._layout, [len(axis) for axis in box]
        if layout.casts or view.size != layout.chunk_size * math.prod(n) or not view.flags.c_contiguous:
            return None
        ndim = len(box)
        cut = view.reshape([size for pair in zip(n, layout.chunks.cell, strict=True) for size in pair])
        chunks = cut.transpose([*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)])
        return chunks if chunks.flags.c_contiguous else None

    def _deliver(
        self, values: Array, box: Box, region: Region, copies: Iterable[tuple[Region, Array]], counters: Counters
    ) -> None:
        """Copy decoded values of a box, chunk after chunk, to where regions of them belong."""
        layout, cell, phase = self._layout, self._layout.chunks.cell, self._layout.chunks.phase
        if not (layout.casts or self._local.has_checksums):
            for common, into in copies:
                copy_chunks(values, box, cell, common, into, phase)
                counters.nbytes_copied += into.nbytes
            return
        if math.prod(map(len, box)) == 1:
            first = [axis.start * c - p for axis, c, p in zip(box, cell, phase, strict=True)]
            joined = values[(0,) * len(box)][(*region.slices(first), ...)]
        else:
            joined = self._scratch.array("joined", region.shape, layout.file_dtype)
            copy_chunks(values, box, cell, region, joined, phase)
        if layout.casts:
            raw, joined = joined, self._scratch.array("cast", region.shape, layout.dtype)
            self._convert(raw, joined, self._names.elements(layout.selection.to_file(region)))
        for common, into in copies:
            self._local.copy(common, view_of(joined, common, region), into, counters)


def _ones(box: Box) -> Iterator[Box]:
    """Each chunk of a box as a box."""
    for index in itertools.product(*box):
        yield tuple([range(k, k + 1) for k in index])
