"""How are many small chunks read with little Python for each?

A batch is a box of chunks of one block (`planning.batches`). Its chunks are fetched with few calls, decoded one after the
other into one buffer, which stays in the core's cache, and copied from there with a few strided copies: into this rank's
pieces, and into the block's staging buffer for other ranks. If it lies in one piece as in the buffer, it is decoded there.

A batch is all or nothing until its values are copied. If anything is wrong or unusual (a damaged chunk, a link, a filter that
was left out, a value that a cast can not hold), `read` returns False, and `chunk_tasks` reads the same chunks one by one. So an
error names its chunk, and no rule has to be written twice.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardload.formats.contract.by_chunks import has_missing
from shardload.formats.contract.chunk_reader import BatchReader
from shardload.formats.contract.dtypes import settle_bools
from shardload.planning.batches import cut_box, stretches
from shardload.planning.grid import numbers_in
from shardload.planning.region import Region
from shardload.planning.schedule import Part
from shardload.planning.source_layout import SourceLayout
from shardload.system.interruption import let_interruption_pass
from shardload.system.scratch import ThreadScratch
from shardload.transfer.buffers import StagedBlock, Tile
from shardload.transfer.counters import Counters
from shardload.transfer.decode import Convert
from shardload.transfer.local_pieces import LocalPieces
from shardload.transfer.missing import Counter
from shardload.transfer.read_errors import Naming

__all__ = ["ChunkBatches", "copy_rows"]

Array = np.ndarray[Any, Any]
Box = tuple[range, ...]


class ChunkBatches:
    """Reads batches of small chunks.

    Parameters
    ----------
    reader : BatchReader
        Fetches and decodes many chunks at a time.
    layout, local, scratch, names, counts, convert
        As for `ChunkTasks`.
    most_nbytes : int
        Decoded bytes of a batch.
    """

    def __init__(
        self,
        reader: BatchReader,
        layout: SourceLayout,
        local: LocalPieces,
        scratch: ThreadScratch,
        names: Naming,
        counts: Counter,
        convert: Convert,
        most_nbytes: int,
    ) -> None:
        self._reader, self._layout, self._local, self._scratch = reader, layout, local, scratch
        self._names, self._counts, self._convert = names, counts, convert
        self._most = most_nbytes // max(1, layout.chunk_nbytes)
        selection, chunk_shape = layout.selection, layout.chunk_shape or ()
        self._chunk_shape = chunk_shape
        self._first = tuple(a // c for a, c in zip(selection.region.start, chunk_shape, strict=True))
        kept, n = set(selection.kept), len(chunk_shape)
        # Of a buffer with an axis for each axis of the box, then one for each axis of a chunk: what the selection keeps.
        inside = (slice(None) if k in kept else selection.region.start[k] % chunk_shape[k] for k in range(n))
        self._kept: tuple[Any, ...] = (*(slice(None) if k in kept else 0 for k in range(n)), *inside, ...)

    def boxes(self, staged: StagedBlock, n_threads: int) -> list[Box]:
        """The batches of a block; empty if its chunks are to be read one by one. Prepares the block's staging buffer."""
        axes = self._layout.chunks.meeting_axes(staged.block.region)
        n_chunks = math.prod(map(len, axes))
        most = min(self._most, -(-n_chunks // n_threads))
        if most < 2:
            return []
        region, dtype = staged.block.region, self._layout.dtype
        if staged.slot is not None:
            nbytes = region.size * dtype.itemsize
            if nbytes > staged.slot.data.nbytes:
                return []
            staged.whole = Tile(region, staged.slot.data[:nbytes].view(dtype).reshape(region.shape))
            staged.tiles.append(staged.whole)
        return list(cut_box(axes, most))

    def region(self, staged: StagedBlock, box: Box) -> Region:
        """What a block has of a box of chunks."""
        chunks, whole = self._layout.chunks, staged.block.region
        axes = list(zip(box, chunks.cell, chunks.phase, whole.start, whole.stop, strict=True))
        return Region(
            tuple([max(axis.start * c - p, low) for axis, c, p, low, _ in axes]),
            tuple([min(axis.stop * c - p, high) for axis, c, p, _, high in axes]),
        )

    def read(self, staged: StagedBlock, box: Box, counters: Counters) -> bool:
        """Read a batch and deliver its values. False, and nothing is delivered, if its chunks must be read one by one."""
        region = self.region(staged, box)
        met = [(part, common) for part in staged.block.parts if (common := part.region.intersect(region)) is not None]
        # Chunks between the shards of this rank are not read at all. Shards do not overlap; replicas have equal regions.
        if not met or sum(common.size for common in {common for _, common in met}) < region.size:
            return False
        own = [(part, common) for part, common in met if self._local.is_own(part)]
        sent = {common for part, common in met if not self._local.is_own(part)}
        if sent and staged.whole is None:
            return False
        started = time.perf_counter()
        with self._names.at(region):
            try:
                stored = self._reader.fetch_many(self._in_file(box), partial(self._scratch.bytes, "stored"))
                fetched = time.perf_counter()
                if stored is None:
                    return False
                into = None if sent or len(own) != 1 else self._in_place(own[0][0], region, box)
                values = self._decode(stored, into, region, box)
            except MemoryError:
                raise
            except Exception as error:
                let_interruption_pass(error)
                return False
        decoded = time.perf_counter()
        if into is None:
            self._deliver(staged, own, sent, region, box, values, counters)
        counters.read_seconds += fetched - started
        counters.decode_seconds += decoded - fetched
        counters.copy_seconds += time.perf_counter() - decoded
        counters.chunks_decoded += len(stored)
        counters.nbytes_read += region.size * self._layout.file_dtype.itemsize
        if not has_missing(stored):
            counters.nbytes_stored += sum(map(len, stored))
        else:
            counters.nbytes_stored += sum(len(one) for one in stored if one is not None)
            is_missing = [one is None for one in stored]
            numbers = numbers_in(box, self._layout.chunks.counts)[is_missing]
            counters.add_missing(self._counts(staged.block, numbers, self._layout.chunks))
        return True

    def _in_file(self, box: Box) -> list[range]:
        """A box of the file's grid of chunks, from one of the grid of the loaded array."""
        axes = [range(first, first + 1) for first in self._first]
        for k, axis in zip(self._layout.selection.kept, box, strict=True):
            axes[k] = range(self._first[k] + axis.start, self._first[k] + axis.stop)
        return axes

    def _in_place(self, part: Part, region: Region, box: Box) -> Array | None:
        """The memory of a batch in a piece, if its chunks lie there one after the other as in a buffer; else None."""
        layout = self._layout
        if layout.casts or region.size != layout.chunk_size * math.prod(map(len, box)):
            return None
        view = self._local.in_place((part,), region)
        if view is None:
            return None
        n, ndim = [len(axis) for axis in box], len(box)
        cut = view.reshape([size for pair in zip(n, layout.chunks.cell, strict=True) for size in pair])
        chunks = cut.transpose([*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)])
        return chunks if chunks.flags.c_contiguous else None

    def _decode(self, stored: Sequence[Any], into: Array | None, region: Region, box: Box) -> Array:
        """The values: chunk after chunk, with the axes of the box first; or, if they were cast, in the shape of the region."""
        layout = self._layout
        if into is not None:
            self._reader.decode_many(stored, into)
            settle_bools(into)
            return into
        shape = (*map(len, self._in_file(box)), *self._chunk_shape)
        buffer = self._scratch.array("chunk", shape, layout.file_dtype)
        self._reader.decode_many(stored, buffer)
        settle_bools(buffer)
        values: Array = buffer[self._kept]
        if not layout.casts:
            return values
        raw = self._scratch.array("joined", region.shape, layout.file_dtype)
        self._copy(values, box, region, raw)
        cast = self._scratch.array("cast", region.shape, layout.dtype)
        self._convert(raw, cast, self._names.elements(layout.selection.to_file(region)))
        return cast

    def _deliver(
        self,
        staged: StagedBlock,
        own: Sequence[tuple[Part, Region]],
        sent: set[Region],
        region: Region,
        box: Box,
        values: Array,
        counters: Counters,
    ) -> None:
        """Copy decoded values into this rank's pieces, and into the block's tile."""
        if staged.whole is not None:
            for common in sent:
                self._copy_part(values, box, region, common, staged.whole.view(common))
        if self._local.has_checksums:
            parts, spent = [part for part, _ in own], counters.copy_seconds
            for tile in self._tiles(values, box, region):
                self._local.deliver(parts, tile.region, tile.data, counters)
            counters.copy_seconds = spent  # the caller counts
            return
        for part, common in own:
            piece = self._local.view(part, common)
            self._copy_part(values, box, region, common, piece)
            counters.nbytes_copied += piece.nbytes

    def _copy_part(self, values: Array, box: Box, region: Region, common: Region, out: Array) -> None:
        if self._layout.casts:
            np.copyto(out, Tile(region, values).view(common), casting="no")
        else:
            self._copy(values, box, common, out)

    def _tiles(self, values: Array, box: Box, region: Region) -> Iterator[Tile]:
        """The values as tiles: one for each chunk or, if they were cast, one."""
        if self._layout.casts:
            yield Tile(region, values)
            return
        chunks = self._layout.chunks
        for place, number in zip(
            itertools.product(*map(range, map(len, box))), numbers_in(box, chunks.counts).tolist(), strict=True
        ):
            common = chunks.region(number).intersect(region)
            if common is not None:
                low = [
                    a + p - (axis.start + i) * c
                    for a, p, axis, i, c in zip(common.start, chunks.phase, box, place, chunks.cell, strict=True)
                ]
                inside: Any = (*place, *(slice(a, a + n) for a, n in zip(low, common.shape, strict=True)), ...)
                yield Tile(common, values[inside])

    def _copy(self, values: Array, box: Box, region: Region, out: Array) -> None:
        """Copy a region out of a batch. `values` has the axes of the box, then those of a chunk; `out` those of the region."""
        chunks, ndim = self._layout.chunks, len(box)
        cuts = [
            stretches(a + p, b + p, c, axis.start)
            for a, b, p, c, axis in zip(region.start, region.stop, chunks.phase, chunks.cell, box, strict=True)
        ]
        order = [*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)]
        for chosen in itertools.product(*cuts):
            source: Any = (
                *(slice(one.chunk, one.chunk + one.n) for one in chosen),
                *(slice(one.start, one.start + one.length) for one in chosen),
                ...,
            )
            target: Any = (*(slice(one.at, one.at + one.n * one.length) for one in chosen), ...)
            cut = out[target].reshape([size for one in chosen for size in (one.n, one.length)])
            copy_rows(cut.transpose(order), values[source])


def copy_rows(out: Array, values: Array) -> None:
    """Copy between arrays of one shape. Runs along the last axis are moved as one item each: that is faster for short runs."""
    if out.ndim and out.dtype == values.dtype and out.shape[-1] > 1:
        itemsize = out.itemsize
        if out.strides[-1] == values.strides[-1] == itemsize:
            item = np.dtype((np.void, itemsize * out.shape[-1]))
            out, values = out.view(item), values.view(item)
    np.copyto(out, values, casting="no")
