"""How is a block read as a whole, by the format's own library?

If the values are in memory already (`scatter`), the block is a view and nothing is copied. Otherwise the library reads the
block: into the piece if the block lies there without gaps, else into a staging buffer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import numpy as np

from shardload.formats.contract.dtypes import settle_bools
from shardload.formats.contract.format import Source
from shardload.planning.parts import Block
from shardload.planning.source_layout import SourceLayout
from shardload.system.scratch import ThreadScratch
from shardload.transfer.buffers import Piece, StagedBlock, sendable
from shardload.transfer.cast import Convert
from shardload.transfer.counters import Counters
from shardload.transfer.missing import Counter, chunk_numbers
from shardload.transfer.pieces import LocalPieces
from shardload.transfer.read_errors import Naming

Array = np.ndarray[Any, Any]


class BlockTasks:
    """Reads blocks, one task each, and one at a time: `Source.read_into` is never called in parallel.

    Parameters
    ----------
    source : Source
        Open array.
    layout, local, scratch, names, counts, convert
        As for `ChunkTasks`.
    """

    n_at_a_time = 1

    def __init__(
        self,
        source: Source,
        layout: SourceLayout,
        local: LocalPieces,
        scratch: ThreadScratch,
        names: Naming,
        counts: Counter,
        convert: Convert,
    ) -> None:
        self._source, self._layout, self._local, self._scratch = source, layout, local, scratch
        self._names, self._counts, self._convert = names, counts, convert
        self._lock = threading.Lock()

    def needs_slot(self, block: Block) -> bool:
        """True if a block needs a staging buffer."""
        return self._in_place(block) is None and self._view(block) is None

    def tasks(self, staged: StagedBlock) -> list[Callable[[Counters], None]]:
        """The task that reads a block."""
        return [partial(self._read_alone, staged)]

    def _read_alone(self, staged: StagedBlock, counters: Counters) -> None:
        with self._lock:
            self._read_block(staged, counters)

    def expect(self, blocks: Iterable[Block]) -> None:
        """Tell the source what these blocks need, in the order in which it is read."""
        regions = (part.region for block in blocks for part in (self._parts_alone(block) or [block]))
        self._source.expect_in_order(map(self._layout.selection.to_file, regions))

    def _parts_alone(self, block: Block) -> list[Block]:
        """The parts of a block as blocks, if it has parts of this rank with gaps between them, which nobody needs."""
        has_gaps = len(block.parts) > 1 and sum(part.region.size for part in block.parts) < block.region.size
        if not has_gaps or self._local.sends(block.parts) or self._share_chunks(block):
            return []
        return [Block(part.region, (part,)) for part in block.parts]

    def _read_block(self, staged: StagedBlock, counters: Counters) -> None:
        block = staged.block
        if parts := self._parts_alone(block):
            for part in parts:
                self._read_block(StagedBlock(part, slot=staged.slot), counters)
            return
        own = self._in_place(block)
        if own is not None:
            self._read(block, own, counters)
            return
        values = self._view(block)
        if values is None:
            values = self._fill(staged, counters)
        staged.tiles.append(Piece(block.region, values))
        self._local.deliver(block.parts, block.region, values, counters)

    def _share_chunks(self, block: Block) -> bool:
        """True if some chunks have several parts of a block: read part by part, they would be decoded several times."""
        layout = self._layout
        n_of_parts = sum(layout.chunks.n_meeting(part.region) for part in block.parts) if layout.has_chunks else 0
        return n_of_parts > layout.chunks.n_meeting(block.region)

    def _in_place(self, block: Block) -> Array | None:
        """The region of the block in this rank's own piece, if the values can be read straight into it; else None."""
        return None if self._layout.casts else self._local.in_place(block.parts, block.region)

    def _view(self, block: Block) -> Array | None:
        """The values themselves, where they are in memory already and can be sent from there."""
        if not self._has_views:
            return None
        selection = self._layout.selection
        view = self._source.view(selection.to_file(block.region))
        return None if view is None else selection.drop_axes(view)

    @cached_property
    def _has_views(self) -> bool:
        """Whether all blocks can be sent from where they are.

        Asked of the whole array, because the parts of some blocks must not overtake those of others: parts of a view are packed
        when there is room, those of a slot leave at once.
        """
        whole = None if self._layout.casts else self._source.view(self._layout.selection.region)
        return whole is not None and sendable(whole)

    def _fill(self, staged: StagedBlock, counters: Counters) -> Array:
        if staged.slot is None:
            raise ValueError("only a staged block can be filled")
        region, dtype = staged.block.region, self._layout.dtype
        data = staged.slot.data[: region.size * dtype.itemsize].view(dtype).reshape(region.shape)
        if not self._layout.casts:
            self._read(staged.block, data, counters)
            return data
        raw = self._scratch.array("block", region.shape, self._layout.file_dtype)
        self._read(staged.block, raw, counters)
        self._convert(raw, data, self._names.elements(self._layout.selection.to_file(region)))
        return data

    def _read(self, block: Block, out: Array, counters: Counters) -> None:
        layout, region = self._layout, block.region
        place = layout.selection.to_file(region)
        started = time.perf_counter()
        with self._names.at(region):
            self._source.read_into(place, out.reshape(place.shape))
            settle_bools(out)
        seconds = time.perf_counter() - started
        if layout.has_chunks:
            counters.chunks_decoded += layout.chunks.n_meeting(region)
            counters.decode_seconds += seconds  # the library does not say how much of this was reading
        else:
            counters.read_seconds += seconds
        counters.nbytes_read += region.size * layout.file_dtype.itemsize
        indices = self._source.missing(place)
        if indices and layout.chunk_shape is not None:
            numbers = chunk_numbers(indices, layout.selection, layout.chunk_shape, layout.chunks)
            counters.add_missing(self._counts(block, numbers, layout.chunks))
        elif indices:  # an array without chunks has one, number 0, whose first element is the array's
            counters.add_missing(self._counts(block, np.array([0]), layout.chunks))
