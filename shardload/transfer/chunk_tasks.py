"""How is a block decoded chunk by chunk, in several threads?

The source hands out whole chunks as they are stored (`Source.chunk_reader`). Each chunk is decoded

1. straight into a piece, if the whole chunk belongs to that piece and lies there without gaps;
2. else into a staging buffer, if another rank needs some of it;
3. else into the scratch memory of the thread, which is still in the core's cache when it is copied into the pieces.

In the staging buffer, the chunks become one tile of the whole block if they lie in it one after the other, as planes do. Then a
receiver copies its part of the block at once.

Small chunks are read in batches (`chunk_batches`), if the format can do that; one by one only if a batch can not be read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from shardload.errors import ShardloadError
from shardload.formats.base import BatchReader, ChunkReader, settle_bools
from shardload.planning.blocks import aligned
from shardload.planning.region import Region
from shardload.planning.schedule import Block, Part
from shardload.planning.source_layout import SourceLayout
from shardload.system.scratch import Scratch
from shardload.transfer.buffers import StagedBlock, Tile
from shardload.transfer.chunk_batches import ChunkBatches
from shardload.transfer.counters import Counters
from shardload.transfer.decode import Convert
from shardload.transfer.local_pieces import LocalPieces
from shardload.transfer.missing import Counter
from shardload.transfer.read_errors import Naming

__all__ = ["ChunkTasks"]

Array = np.ndarray[Any, Any]


class ChunkTasks:
    """Reads blocks, in tasks of some chunks each.

    Parameters
    ----------
    reader : ChunkReader
        Hands out whole chunks as they are stored, and decodes them.
    layout : SourceLayout
        How the array lies in its file. It must have chunks.
    local : LocalPieces
        This rank's pieces.
    scratch : Scratch
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
        scratch: Scratch,
        names: Naming,
        counts: Counter,
        convert: Convert,
        n_threads: int,
        batch_nbytes: int = 0,
    ) -> None:
        self._reader, self._layout, self._local, self._scratch = reader, layout, local, scratch
        self._names, self._counts, self._convert, self._n_threads = names, counts, convert, n_threads
        self._chunk_shape = layout.chunk_shape or ()
        self._batches: ChunkBatches | None = None
        if isinstance(reader, BatchReader) and 2 * layout.chunk_nbytes <= batch_nbytes:
            self._batches = ChunkBatches(reader, layout, local, scratch, names, counts, convert, batch_nbytes)
        self._chunk_room = aligned(layout.chunk_size * layout.wide_itemsize)
        # Axes behind the first one along which a chunk has several elements: see `_lie_as_in`.
        cell = layout.chunks.cell
        self._inner = range(next((k for k, n in enumerate(cell) if n > 1), len(cell)) + 1, len(cell))
        self._is_cell = math.prod(cell) == layout.chunk_size

    def needs_slot(self, block: Block) -> bool:
        """True if a block needs a staging buffer, for the parts that other ranks need."""
        return self._local.sends(block.parts)

    def tasks(self, staged: StagedBlock) -> list[Callable[[Counters], None]]:
        """The tasks that read a block; they may run at the same time."""
        batches = self._batches
        if batches is not None:
            boxes = batches.boxes(staged, self._n_threads)
            if boxes:
                n = min(self._n_threads, len(boxes))
                return [partial(self._read_batches, batches, staged, boxes[k::n]) for k in range(n)]
        self._make_whole(staged)
        numbers = list(self._layout.chunks.meeting(staged.block.region))
        # Each task takes every n-th chunk, so that all end at about the same time.
        n = min(self._n_threads, len(numbers))
        places = list(enumerate(numbers))
        return [partial(self._read_chunks, staged, places[k::n]) for k in range(n)]

    def _make_whole(self, staged: StagedBlock) -> None:
        """Make one tile of the whole block, if its chunks lie one after the other in it: then each part needs one copy."""
        layout, region = self._layout, staged.block.region
        if staged.slot is None or staged.whole is not None or not (layout.casts or self._is_cell):
            return
        axes = layout.chunks.meeting_axes(region)
        nbytes = region.size * layout.dtype.itemsize
        is_one = all(len(axis) == 1 for axis in axes)
        if is_one or nbytes > staged.slot.data.nbytes or not (layout.casts or all(len(axes[k]) == 1 for k in self._inner)):
            return
        staged.whole = Tile(region, staged.slot.data[:nbytes].view(layout.dtype).reshape(region.shape))
        staged.tiles.append(staged.whole)

    def _read_batches(
        self, batches: ChunkBatches, staged: StagedBlock, boxes: Iterable[tuple[range, ...]], counters: Counters
    ) -> None:
        for box in boxes:
            if not batches.read(staged, box, counters):
                self._read_chunks(staged, enumerate(batches.numbers(box).tolist()), counters)

    def _read_chunks(self, staged: StagedBlock, places: Iterable[tuple[int, int]], counters: Counters) -> None:
        block = staged.block
        for place, number in places:
            region = self._layout.chunks.region(number).intersect(block.region)
            if region is None:
                continue
            parts = [part for part in block.parts if part.region.meets(region)]
            if not parts:  # the chunk lies between the shards of this rank
                continue
            index = self._names.index(region)
            try:
                with self._names.at(region):
                    self._read_chunk(staged, place, region, parts, index, counters)
            except (ShardloadError, MemoryError):
                raise
            except Exception as error:
                raise self._names.unreadable(error, region, index) from error

    def _read_chunk(
        self,
        staged: StagedBlock,
        place: int,
        region: Region,
        parts: list[Part],
        index: tuple[int, ...],
        counters: Counters,
    ) -> None:
        """Fetch and decode chunk number `place` of the block, and deliver the parts that stay on this rank."""
        started = time.perf_counter()
        encoded = self._reader.fetch(index, partial(self._scratch.bytes, "stored"))
        fetched = time.perf_counter()
        into = self._in_place(parts, region)
        if into is not None:
            self._reader.decode(encoded, into.reshape(self._chunk_shape))
            settle_bools(into)
            decoded = time.perf_counter()
        else:
            values, is_staged = self._decode(encoded, staged, place, region, parts, index)
            decoded = time.perf_counter()
            self._local.deliver(parts, region, values, counters)
            if staged.whole is not None and not is_staged:
                self._copy_into(staged.whole, parts, Tile(region, values))
        counters.read_seconds += fetched - started
        counters.decode_seconds += decoded - fetched
        counters.chunks_decoded += 1
        counters.nbytes_read += region.size * self._layout.file_dtype.itemsize
        if encoded is None:
            number = next(self._layout.chunks.meeting(region))
            counters.add_missing(self._counts(staged.block, np.array([number]), self._layout.chunks))
        else:
            counters.nbytes_stored += len(encoded.data)

    def _decode(
        self, encoded: Any, staged: StagedBlock, place: int, region: Region, parts: list[Part], index: tuple[int, ...]
    ) -> tuple[Array, bool]:
        """The values of `region`, and True if they lie in the block's staging buffer: then another rank needs some of them."""
        layout, in_file, whole = self._layout, self._layout.selection.to_file(region), staged.whole
        travels = staged.slot is not None and self._local.sends(parts)
        room = None if whole is None or not travels else whole.view(region)
        if room is not None and not layout.casts and room.size == layout.chunk_size and room.flags.c_contiguous:
            self._reader.decode(encoded, room.reshape(self._chunk_shape))
            settle_bools(room)
            return room, True
        is_staged = travels and (whole is None or layout.casts)
        if is_staged and not layout.casts:
            target = self._cut(staged, place, self._chunk_shape, layout.file_dtype)
        else:
            target = self._scratch.array("chunk", self._chunk_shape, layout.file_dtype)
        self._reader.decode(encoded, target)
        settle_bools(target)
        inside = tuple(
            slice(a - i * c, b - i * c)
            for a, b, i, c in zip(in_file.start, in_file.stop, index, self._chunk_shape, strict=True)
        )
        index_in: Any = (*inside, ...)  # an array, also when 0-d
        values = layout.selection.drop_axes(target[index_in])
        if layout.casts:
            cast = room
            if cast is None and travels:
                cast = self._cut(staged, place, region.shape, layout.dtype)
            elif cast is None:
                cast = self._scratch.array("cast", region.shape, layout.dtype)
            self._convert(values, cast, self._names.elements(in_file))
            values = cast
        if is_staged and whole is None:
            staged.tiles.append(Tile(region, values))  # from several threads: list.append is atomic
        return values, is_staged

    def _copy_into(self, whole: Tile, parts: Iterable[Part], tile: Tile) -> None:
        """Copy what other ranks need of a chunk into the tile of the whole block."""
        for common in {part.region.intersect(tile.region) for part in parts if not self._local.is_own(part)}:
            if common is not None:
                np.copyto(whole.view(common), tile.view(common), casting="no")

    def _in_place(self, parts: list[Part], region: Region) -> Array | None:
        """The region of the chunk in this rank's own piece, if it can be decoded straight into it; else None."""
        if self._layout.casts or self._layout.chunk_size != region.size:
            return None
        return self._local.in_place(parts, region)

    def _cut(self, staged: StagedBlock, place: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The room for chunk number `place` in the block's staging buffer."""
        if staged.slot is None:
            raise ValueError("a block without a slot has no room")
        start = place * self._chunk_room
        nbytes = math.prod(shape) * dtype.itemsize
        return staged.slot.data[start : start + nbytes].view(dtype).reshape(shape)
