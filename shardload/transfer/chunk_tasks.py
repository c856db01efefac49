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

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardload.errors import ShardloadError
from shardload.formats.contract.chunk_reader import BatchReader, ChunkReader, Room
from shardload.formats.contract.dtypes import settle_bools
from shardload.planning.blocks import aligned
from shardload.planning.grid import numbers_in
from shardload.planning.region import Region
from shardload.planning.schedule import Block, Part
from shardload.planning.source_layout import SourceLayout
from shardload.system.scratch import ThreadScratch
from shardload.transfer.buffers import StagedBlock, Tile
from shardload.transfer.chunk_batches import ChunkBatches
from shardload.transfer.counters import Counters
from shardload.transfer.decode import Convert
from shardload.transfer.local_pieces import Copy, LocalPieces
from shardload.transfer.missing import Counter
from shardload.transfer.read_errors import Naming

__all__ = ["ChunkTasks"]

Array = np.ndarray[Any, Any]


_TOGETHER = 32  # chunks that are prepared before the first of them is read: each takes some KiB of Python objects


@dataclass(slots=True)
class _Chunk:
    """A chunk that is to be read. All that can be known before is prepared for several chunks together.

    Decoding a chunk puts everything else out of the core's caches: then Python takes several times as long.

    Attributes
    ----------
    number, region, in_file, index, parts
        The chunk in the loaded array, in the coordinates of the file, in the file's grid; and the parts that it meets.
    target : ndarray
        Where it is decoded.
    raw : ndarray or None
        What is cast from there into `values`, if values are cast.
    values : ndarray
        The values of the region, for a tile.
    is_tile : bool
        Whether `values` become a tile of the block.
    stays : bool
        Whether the values stay where they are when the next chunk is decoded.
    own, sent : list
        What is copied to pieces of this rank, and into the tile of the whole block.
    """

    number: int
    region: Region
    in_file: Region
    index: tuple[int, ...]
    parts: list[Part]
    target: Any = None
    raw: Any = None
    values: Any = None
    is_tile: bool = False
    stays: bool = False
    own: Sequence[Copy] = ()
    sent: Sequence[tuple[Array, Array]] = ()


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
                self._read_chunks(staged, enumerate(numbers_in(box, self._layout.chunks.counts).tolist()), counters)

    def _read_chunks(self, staged: StagedBlock, places: Iterable[tuple[int, int]], counters: Counters) -> None:
        left = iter(places)
        while some := list(itertools.islice(left, _TOGETHER)):
            self._read_together(staged, self._chunks(staged, some), counters)

    def _chunks(self, staged: StagedBlock, places: Iterable[tuple[int, int]]) -> list[_Chunk]:
        """Chunks that are to be read, by their places in the block and their numbers."""
        block, found = staged.block, []
        for place, number in places:
            region = self._layout.chunks.region(number).intersect(block.region)
            parts = [] if region is None else [part for part in block.parts if part.region.meets(region)]
            if region is not None and parts:  # else the chunk lies between the shards of this rank
                found.append(self._chunk(staged, place, number, region, parts))
        return found

    def _chunk(self, staged: StagedBlock, place: int, number: int, region: Region, parts: list[Part]) -> _Chunk:
        """Where a chunk is decoded, and what is copied from there."""
        layout, whole = self._layout, staged.whole
        in_file = layout.selection.to_file(region)
        index = tuple([a // c for a, c in zip(in_file.start, self._chunk_shape, strict=True)])
        chunk = _Chunk(number, region, in_file, index, parts)
        into = self._in_place(parts, region)
        if into is not None:
            chunk.target = into.reshape(self._chunk_shape)
            return chunk
        travels = staged.slot is not None and self._local.sends(parts)
        room = None if whole is None or not travels else whole.view(region)
        if room is not None and not layout.casts and room.size == layout.chunk_size and room.flags.c_contiguous:
            chunk.target, chunk.stays = room.reshape(self._chunk_shape), True
            chunk.own = self._local.copies(parts, region, room)
            return chunk
        is_tile = travels and whole is None
        if is_tile and not layout.casts:
            chunk.target, chunk.stays = self._cut(staged, place, self._chunk_shape, layout.file_dtype), True
        else:
            chunk.target = self._scratch.array("chunk", self._chunk_shape, layout.file_dtype)
        corner = [i * c for i, c in zip(index, self._chunk_shape, strict=True)]
        inside: Any = (*in_file.slices(corner), ...)  # an array, also when 0-d
        values = layout.selection.drop_axes(chunk.target[inside])
        if layout.casts:
            cast = room
            if cast is None and travels:
                cast = self._cut(staged, place, region.shape, layout.dtype)
            elif cast is None:
                most = self._scratch.array("cast", (layout.chunk_size,), layout.dtype)  # the same memory for all chunks
                cast = most[: region.size].reshape(region.shape)
            chunk.raw, chunk.stays = values, travels
            values = cast
        chunk.values, chunk.is_tile = values, is_tile
        chunk.own = self._local.copies(parts, region, values)
        if whole is not None and not (layout.casts and travels):
            chunk.sent = self._in_whole(whole, parts, Tile(region, values))
        return chunk

    def _read_together(self, staged: StagedBlock, chunks: Sequence[_Chunk], counters: Counters) -> None:
        """Read chunks one after the other. What stays in memory when it is decoded is delivered when all of them are."""
        room = partial(self._scratch.bytes, "stored")
        for chunk in chunks:
            self._names.begin(chunk.region)
            try:
                self._read_chunk(staged, chunk, room, counters)
            except (ShardloadError, MemoryError):
                raise
            except Exception as error:
                raise self._names.unreadable(error, chunk.region, chunk.index) from error
            finally:
                self._names.end()
        started = time.perf_counter()
        for chunk in chunks:
            if chunk.stays:
                self._local.copy(chunk.own, counters)
        counters.copy_seconds += time.perf_counter() - started

    def _read_chunk(self, staged: StagedBlock, chunk: _Chunk, room: Room, counters: Counters) -> None:
        """Fetch and decode a chunk, and copy what does not stay where it was decoded."""
        started = time.perf_counter()
        encoded = self._reader.fetch(chunk.index, room)
        fetched = time.perf_counter()
        self._reader.decode(encoded, chunk.target)
        settle_bools(chunk.target)
        if chunk.raw is not None:
            self._convert(chunk.raw, chunk.values, self._names.elements(chunk.in_file))
        if chunk.is_tile:
            staged.tiles.append(Tile(chunk.region, chunk.values))  # from several threads: list.append is atomic
        decoded = time.perf_counter()
        counters.read_seconds += fetched - started
        counters.decode_seconds += decoded - fetched
        if not chunk.stays:
            self._local.copy(chunk.own, counters)
            counters.copy_seconds += time.perf_counter() - decoded
            for values, into in chunk.sent:
                np.copyto(into, values, casting="no")
        counters.chunks_decoded += 1
        counters.nbytes_read += chunk.region.size * self._layout.file_dtype.itemsize
        if encoded is None:
            counters.add_missing(self._counts(staged.block, np.array([chunk.number]), self._layout.chunks))
        else:
            counters.nbytes_stored += len(encoded.data)

    def _in_whole(self, whole: Tile, parts: Iterable[Part], tile: Tile) -> list[tuple[Array, Array]]:
        """What other ranks need of a chunk, and its place in the tile of the whole block."""
        common = {part.region.intersect(tile.region) for part in parts if not self._local.is_own(part)}
        return [(tile.view(region), whole.view(region)) for region in common if region is not None]

    def _in_place(self, parts: list[Part], region: Region) -> Array | None:
        """The region of the chunk in this rank's own piece, if it can be decoded straight into it; else None."""
        if self._layout.casts or region.size != self._layout.chunk_size:
            return None
        return self._local.in_place(parts, region)

    def _cut(self, staged: StagedBlock, place: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The room for chunk number `place` in the block's staging buffer."""
        if staged.slot is None:
            raise ValueError("a block without a slot has no room")
        start = place * self._chunk_room
        nbytes = math.prod(shape) * dtype.itemsize
        return staged.slot.data[start : start + nbytes].view(dtype).reshape(shape)
