"""How does one rank turn its blocks of the file into blocks in memory, inside the staging cap?

1. If the source hands out whole chunks as they are stored, threads decode them, a box of chunks at a time (`BoxReader`).
   Otherwise the format's library reads whole blocks, one at a time (`BlockReader`).
2. The thread that read a block copies the parts of this rank's own pieces (`pieces`). Parts for other ranks wait in a
   staging buffer.
3. Blocks are returned in the order in which they were started. What was really read is counted. The error of a failed read
   names the chunk of the file.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import cached_property, partial
from typing import Any

import numpy as np

from shardload.comm.watchdog import Activity
from shardload.errors import PeerError, ShardloadError, StallError
from shardload.formats.contract.array import settle_bools
from shardload.formats.contract.chunk_reader import ChunkReader, Encoded, as_chunks, copy_chunks, region_in_box
from shardload.formats.contract.format import Source
from shardload.planning.region import Array, Region, cut_box, numbers_of
from shardload.planning.schedule import Block, Part, SourceLayout
from shardload.planning.tuning import Tuning
from shardload.storage.remote import RemoteError
from shardload.system.thread_pool import done_here
from shardload.transfer.buffers import Piece, Resources, StagedBlock, sendable, view_of
from shardload.transfer.cast import conversion
from shardload.transfer.counters import Counter, Counters, chunk_numbers
from shardload.transfer.pieces import LocalPieces
from shardload.transfer.read_errors import Naming

Box = tuple[range, ...]
PartsMet = Sequence[tuple[Part, Region]]  # parts that a box meets, and what they have in common with it
Task = Callable[[Counters], None]


class SourceReader(ABC):
    """Reads the blocks of one rank from one open source. A context manager: leaving it waits for the tasks that were started.

    A job makes one reader for each of its arrays (`open_reader`); all readers share the same resources.

    Attributes
    ----------
    n_tasks : int
        Number of tasks that run at once.
    counters : Counters
        What was read.
    """

    n_tasks = 1

    def __init__(
        self,
        source: Source,
        layout: SourceLayout,
        local: LocalPieces,
        resources: Resources,
        *,
        tuning: Tuning,
        counts: Counter,
    ) -> None:
        self._source, self._layout, self._local, self._resources = source, layout, local, resources
        self._inline_nbytes, self._counts, self._convert = tuning.inline_nbytes, counts, conversion(layout.decoding)
        self._names = Naming(source, layout.selection, layout.chunks if layout.has_chunks else None)
        self._scratch = resources.scratch
        self._tasks: list[Future[None]] = []  # tasks that were started and may not have ended
        self._lock = threading.Lock()
        self.counters = Counters()

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The tasks call this object when they are done: a reference cycle that would keep the pieces' memory alive.
        tasks, self._tasks = self._tasks, []
        running = [task for task in tasks if not task.cancel()]
        if kind is None or not issubclass(kind, StallError):  # after a stall a task may never end
            wait(running)

    @abstractmethod
    def expect(self, blocks: Iterable[Block]) -> None:
        """Announce the blocks that will be read, in this order, so that they are fetched ahead. For a file in a store."""

    @abstractmethod
    def _needs_slot(self, block: Block) -> bool:
        """True if a block needs a staging buffer."""

    @abstractmethod
    def _tasks_of(self, staged: StagedBlock) -> list[Task]:
        """The tasks that read a block; they may run at the same time."""

    def activity(self) -> Activity:
        """See `Producer`."""
        return self._names.activity()

    @property
    def n_ahead(self) -> int:
        """Number of blocks to start before the first is done: one for each thread, and one that waits to be delivered."""
        return self.n_tasks + 1

    def has_room(self, block: Block) -> bool:
        """True if a staging buffer is free for this block, or it needs none."""
        return self._resources.slots.has_room() or not self._needs_slot(block)

    def start(self, block: Block) -> StagedBlock:
        """Begin to read one block. When it is done, the parts of this rank's own pieces are in place."""
        if not all(block.region.contains(part.region) for part in block.parts):
            raise ValueError(f"a part reaches outside its block {block.region}: the plan is wrong")
        staged, slots = StagedBlock(block), self._resources.slots
        if self._needs_slot(block):
            slot = slots.take()
            if slot is None:
                raise ValueError("no slot is free")
            staged.slot, staged.is_shared, staged.release = slot, slots.is_shared, partial(slots.give, slot)
        work = self._tasks_of(staged)
        self._tasks = [task for task in self._tasks if not task.done()]
        if self._is_free and block.region.size * self._layout.file_dtype.itemsize <= self._inline_nbytes:
            staged.tasks = [done_here(self._run, task, block) for task in work]
            return staged
        staged.tasks = [self._resources.pool.submit(self._run, task, block) for task in work]
        bell = self._resources.bell
        for task in staged.tasks:  # ring when the future is done, not when its work ends: who waits checks `done` at once
            task.add_done_callback(lambda _: bell.ring())
        self._tasks += staged.tasks
        return staged

    @property
    def _is_free(self) -> bool:
        """Whether a task would run at once."""
        return len(self._tasks) < self.n_tasks

    def _run(self, work: Task, block: Block) -> None:
        counters = Counters()
        try:
            work(counters)
        except (ShardloadError, MemoryError):
            raise
        except Exception as error:
            raise self._names.explain(error, block.region) from error
        finally:
            with self._lock:
                self.counters.add(counters)

    def _in_slot(self, staged: StagedBlock) -> Array:
        """The memory of a block in its staging buffer."""
        if staged.slot is None:
            raise ValueError("only a staged block can be filled")
        region, dtype = staged.block.region, self._layout.dtype
        return staged.slot[: region.size * dtype.itemsize].view(dtype).reshape(region.shape)


def open_reader(
    source: Source,
    layout: SourceLayout,
    local: LocalPieces,
    resources: Resources,
    *,
    tuning: Tuning,
    counts: Counter,
    library: threading.Lock | None = None,
) -> SourceReader:
    """The reader of one array: chunk by chunk, if the source has a reader of chunks and these are not too small for that.

    Parameters
    ----------
    source : Source
        Open array.
    layout : SourceLayout
        The selected elements, how they lie in the file, and how they become values.
    local : LocalPieces
        This rank's pieces of the array.
    resources : Resources
        Threads, scratch memory and staging buffers, shared by all arrays of the job.
    tuning : Tuning
        Sizes at which the way of reading changes.
    counts : callable
        Chooses which missing chunks of a block this rank counts (`counters.counter_of`).
    library : Lock, optional
        Held while the format's library reads: the same one for all readers of a source that read at the same time.
    """
    chunk_reader = None
    if layout.has_chunks and layout.chunk_nbytes >= tuning.min_chunk_nbytes:
        try:
            chunk_reader = source.chunk_reader()
        except (OSError, RuntimeError) as error:
            if isinstance(error, ShardloadError):
                raise
            raise Naming(source, layout.selection, layout.chunks).unreadable(error) from error
    options: dict[str, Any] = {"tuning": tuning, "counts": counts}
    if chunk_reader is None:
        return BlockReader(source, layout, local, resources, library=library, **options)
    return BoxReader(chunk_reader, source, layout, local, resources, **options)


# --- by the format's library


class BlockReader(SourceReader):
    """Has the format's own library read blocks, one at a time: `Source.read_into` is never called in parallel.

    If the values are in memory already (`scatter`), the block is a view and nothing is copied. Otherwise the library reads the
    block: into the piece if the block lies there without gaps, else into a staging buffer.
    """

    def __init__(self, *arguments: Any, library: threading.Lock | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._library = library or threading.Lock()

    @property
    def _is_free(self) -> bool:
        return super()._is_free and not self._library.locked()

    def _needs_slot(self, block: Block) -> bool:
        return self._in_place(block) is None and self._view(block) is None

    def _tasks_of(self, staged: StagedBlock) -> list[Task]:
        return [partial(self._read_block, staged)]

    def _run(self, work: Task, block: Block) -> None:
        with self._library:  # also while the damaged chunk is looked for
            super()._run(work, block)

    def expect(self, blocks: Iterable[Block]) -> None:
        """Tell the source what these blocks need, in the order in which it is read."""
        regions = (part.region for block in blocks for part in (self._parts_alone(block) or [block]))
        self._source.expect_in_order(map(self._layout.selection.to_file, regions))

    def _parts_alone(self, block: Block) -> list[Block]:
        """The parts of a block as blocks, if it has parts of this rank with gaps between them, which nobody needs."""
        if self._local.sends(block.parts):
            return []
        parts = tuple(block.parts)
        has_gaps = len(parts) > 1 and sum(part.region.size for part in parts) < block.region.size
        return [Block(part.region, (part,)) for part in parts] if has_gaps and not self._share_chunks(block) else []

    def _read_block(self, staged: StagedBlock, counters: Counters) -> None:
        block = staged.block
        if parts := self._parts_alone(block):
            for part in parts:
                self._read_block(StagedBlock(part, slot=staged.slot), counters)
            return
        view = self._in_place(block)
        if view is not None:
            self._read(block, view, counters)
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
        view = self._source.view(self._layout.selection.to_file(block.region))
        return None if view is None else view.reshape(block.region.shape)  # without the axes that the selection drops

    @cached_property
    def _has_views(self) -> bool:
        """Whether all blocks can be sent from where they are.

        Asked of the whole array, because the parts of some blocks must not overtake those of others: parts of a view are packed
        when there is room, those of a slot leave at once.
        """
        whole = None if self._layout.casts else self._source.view(self._layout.selection.region)
        return whole is not None and sendable(whole)

    def _fill(self, staged: StagedBlock, counters: Counters) -> Array:
        region, data = staged.block.region, self._in_slot(staged)
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
            indices = self._source.read_into(place, out.reshape(place.shape))
            settle_bools(out)
        seconds = time.perf_counter() - started
        if layout.has_chunks:
            counters.chunks_decoded += layout.chunks.n_meeting(region)
            counters.decode_seconds += seconds  # the library does not say how much of this was reading
        else:
            counters.read_seconds += seconds
        counters.nbytes_read += region.size * layout.file_dtype.itemsize
        if indices and layout.chunk_shape is not None:
            numbers = chunk_numbers(indices, layout.selection, layout.chunk_shape, layout.chunks)
            counters.add_missing(self._counts(block, numbers, layout.chunks))
        elif indices:  # an array without chunks has one, number 0, whose first element is the array's
            counters.add_missing(self._counts(block, np.array([0]), layout.chunks))


# --- chunk by chunk


class BoxReader(SourceReader):
    """Decodes stored chunks in several threads, a box of them at a time: many small ones, or one large one.

    They are fetched with few requests, and decoded

    1. straight into a piece, if all of them belong to that piece and lie there as in the file;
    2. else into the block's staging buffer, if other ranks need them and they lie there as in the file, as planes do;
    3. else into the scratch memory of the thread, which is still in the core's cache when it is copied into the pieces, and
       into the staging buffer for other ranks.

    If anything is wrong with a box of several chunks, they are read one by one. So an error names its chunk.
    """

    def __init__(
        self, chunk_reader: ChunkReader, source: Source, layout: SourceLayout, *arguments: Any, tuning: Tuning, **options: Any
    ) -> None:
        super().__init__(source, layout, *arguments, tuning=tuning, **options)
        self._chunk_reader, self.n_tasks = chunk_reader, self._resources.n_threads
        self._allocate = partial(self._scratch.bytes, "stored")
        batch_nbytes = self._resources.batch_nbytes if layout.chunk_nbytes <= tuning.batched_chunk_nbytes else 0
        self._chunks_per_box = batch_nbytes // max(1, layout.chunk_nbytes)
        selection, chunk_shape = layout.selection, layout.chunk_shape or ()
        self._chunk_shape = chunk_shape
        self._first_chunk = tuple(a // c for a, c in zip(selection.region.start, chunk_shape, strict=True))
        kept_axes, n = set(selection.kept), len(chunk_shape)
        # Of a buffer with an axis for each axis of the box, then one for each axis of a chunk: what the selection keeps.
        inside = (slice(None) if k in kept_axes else selection.region.start[k] % chunk_shape[k] for k in range(n))
        self._chunk_index: tuple[Any, ...] = (*(slice(None) if k in kept_axes else 0 for k in range(n)), *inside, ...)
        # Whether chunks have more than what is loaded of them, or other values: then they are never decoded into a piece.
        self._is_cut = layout.casts or layout.chunk_size != math.prod(layout.chunks.cell)

    def _needs_slot(self, block: Block) -> bool:
        return self._local.sends(block.parts)

    def _tasks_of(self, staged: StagedBlock) -> list[Task]:
        if staged.slot is not None:
            staged.tiles.append(Piece(staged.block.region, self._in_slot(staged)))
        axes = self._layout.chunks.meeting_axes(staged.block.region)
        chunks_per_box = max(1, min(self._chunks_per_box, -(-math.prod(map(len, axes)) // self.n_tasks)))
        boxes = list(cut_box(axes, chunks_per_box))  # of chunks that are read together
        # Each task takes every n-th box, so that all end at about the same time.
        n = min(self.n_tasks, len(boxes))
        return [partial(self._read_boxes, staged, boxes[k::n]) for k in range(n)]

    def expect(self, blocks: Iterable[Block]) -> None:
        """Tell the reader what these blocks need, in their order; where all of a block is needed, as one box."""
        boxes = ((block, [tuple(self._layout.chunks.meeting_axes(block.region))]) for block in blocks)
        boxes_in_file = (self._in_file(box) for block, whole in boxes for box, _, _ in self._needed(block, whole))
        self._chunk_reader.expect(boxes_in_file)

    def _needed(self, block: Block, boxes: Iterable[Box]) -> Iterator[tuple[Box, Region, PartsMet]]:
        """The boxes that parts of a block need. A box of which they need only some chunks is cut into smaller ones."""
        chunks = self._layout.chunks
        for box in boxes:
            region = region_in_box(box, chunks.cell, block.region, chunks.phase)
            parts_met = [(part, common) for part in block.parts if (common := part.region.intersect(region)) is not None]
            if not parts_met:  # it lies between the shards of this rank
                continue
            # Shards do not overlap; replicas have equal regions.
            is_whole = sum(common.size for common in {common for _, common in parts_met}) == region.size
            if (n := math.prod(map(len, box))) == 1 or is_whole:
                yield box, region, parts_met
            else:
                yield from self._needed(block, cut_box(box, n // 2))

    def _read_boxes(self, staged: StagedBlock, boxes: Iterable[Box], counters: Counters) -> None:
        for box, region, parts_met in self._needed(staged.block, boxes):
            self._read_box(staged, box, region, parts_met, counters)

    def _read_box(self, staged: StagedBlock, box: Box, region: Region, parts_met: PartsMet, counters: Counters) -> None:
        with self._names.at(region):
            try:
                self._read(staged, box, region, parts_met, counters)
                return
            except (MemoryError, PeerError):
                raise
            except Exception as error:
                is_one = math.prod(map(len, box)) == 1 or isinstance(error, RemoteError)  # which was tried often enough
                if is_one and isinstance(error, ShardloadError):
                    raise
                if is_one:
                    raise self._names.unreadable(error, region, self._names.index(region)) from error
        self._read_boxes(staged, cut_box(box, 1), counters)

    def _read(self, staged: StagedBlock, box: Box, region: Region, parts_met: PartsMet, counters: Counters) -> None:
        """Read a box of chunks and deliver its values: all of them, or none."""
        layout, local, n = self._layout, self._local, math.prod(map(len, box))
        started = time.perf_counter()
        copies = [(common, local.view(part, common)) for part, common in parts_met if local.is_own(part)]
        sent = {common for part, common in parts_met if not local.is_own(part)}
        place = None
        if sent:
            place = staged.tiles[0].view(region)
        elif len(copies) == 1 and copies[0][0] == region:
            place = copies[0][1]
        target = None if place is None or self._is_cut else as_chunks(place, box, layout.chunks.cell)
        is_in_place = target is not None
        if target is None:
            target = self._scratch.array("chunk", (n, *self._chunk_shape), layout.file_dtype)
        in_file = self._in_file(box)
        encoded: Encoded | None = None
        if not (layout.codec == "none" and self._chunk_reader.read_plain(in_file, target)):
            encoded = self._chunk_reader.fetch(in_file, self._allocate)
        fetched = time.perf_counter()
        if encoded is not None:
            self._chunk_reader.decode(encoded, target)
        settle_bools(target)
        decoded = time.perf_counter()
        if not is_in_place:
            copies += [(common, staged.tiles[0].view(common)) for common in sent]
        if not is_in_place or sent:
            values = target.reshape((*map(len, in_file), *self._chunk_shape))[self._chunk_index]
            self._deliver(values, box, region, copies, counters)
        counters.read_seconds += fetched - started
        counters.decode_seconds += decoded - fetched
        counters.copy_seconds += time.perf_counter() - decoded
        counters.chunks_decoded += n
        counters.nbytes_read += region.size * layout.file_dtype.itemsize
        self._count_stored(staged, box, encoded, target, counters)

    def _count_stored(self, staged: StagedBlock, box: Box, encoded: Encoded | None, target: Array, counters: Counters) -> None:
        if encoded is None:
            counters.nbytes_stored += target.nbytes
            return
        counters.nbytes_stored += sum(len(data) for data in encoded.data if data is not None)
        if encoded.has_missing:
            is_missing = [data is None for data in encoded.data]
            numbers = np.fromiter(numbers_of(box, self._layout.chunks.counts), np.int64)[is_missing]
            counters.add_missing(self._counts(staged.block, numbers, self._layout.chunks))

    def _in_file(self, box: Box) -> list[range]:
        """A box of the file's grid of chunks, from one of the grid of the loaded array."""
        axes = [range(first, first + 1) for first in self._first_chunk]
        for k, axis in zip(self._layout.selection.kept, box, strict=True):
            axes[k] = range(self._first_chunk[k] + axis.start, self._first_chunk[k] + axis.stop)
        return axes

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
