"""How does one rank turn its reads into blocks in memory, inside the staging cap?

1. Where the source hands out whole chunks as they are stored (`Source.chunk_reader`), threads decode them one by one: into
   the piece itself where a chunk is all there is of it, else into a slot that is used again (or, where all of it stays here,
   into memory of the thread's own, still in its core's cache when it is copied into the pieces).
2. Where the values are in memory already (`scatter`): the block is a view, nothing is copied.
3. Else the library below reads the block: into the piece where it lies in it without gaps, or into a slot.

The parts of this rank's own pieces are delivered here, by the thread that read them. Reads are answered in the order in which
they were started. What was really read is counted. A failed read is explained: which chunk of the file it was.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.shared_memory import Bell
from shardload.errors import PeerError, ShardloadError, StallError
from shardload.formats.base import ChunkReader, Source, settle_bools
from shardload.planning.region import Region, Selection
from shardload.planning.schedule import Block, Grid, Part
from shardload.planning.tuning import Tuning, default_tuning
from shardload.system.thread_pool import Pool, done_here
from shardload.transfer.buffers import Piece, Slots, StagedBlock, Tile, aligned
from shardload.transfer.cast import cast_into
from shardload.transfer.checksum import checksum
from shardload.transfer.counters import MOST_NAMED, Counters
from shardload.transfer.messages import sendable
from shardload.transfer.missing import Counter, beginning_in, chunk_numbers
from shardload.transfer.read_errors import Naming

__all__ = ["Reading", "SourceReader"]

Array = np.ndarray[Any, Any]


@dataclass
class Reading:
    """One read under way."""

    block: StagedBlock
    tasks: list[Future[None]] = field(default_factory=list)

    def done(self) -> bool:
        """Whether all of it is there, or has failed."""
        return all(task.done() for task in self.tasks)

    def result(self) -> StagedBlock:
        """The block; what a task raised, if one did."""
        for task in self.tasks:
            task.result()
        return self.block


class SourceReader:
    """The blocks of one rank, read from one open source in a pool of threads. A context manager: leaving it ends the threads.

    Parameters
    ----------
    source : Source
        Open array.
    selection : Selection
        Which of its elements make up the array that is loaded.
    chunks : Grid
        The loaded array cut into the file's chunks.
    has_chunks : bool
        Whether these are real.
    slots : Slots
        Where blocks wait that other ranks need parts of.
    dtype : dtype
        What blocks hold: the source's dtype, or what it is to be cast to.
    pieces : mapping of int to Piece
        This rank's pieces, by shard.
    rank : int
        This rank.
    bell : Bell, optional
        Rung when something that was started is done.
    n_threads : int
        How many chunks are decoded at once. (The library reads in one thread, beside the one that calls MPI.)
    checksums : bool
        Whether each part that stays here is compared with what it was copied from.
    counts : callable, optional
        Which of the chunks that are not stored, and that a read met, this rank counts (`missing.counter_of`).
    tuning : Tuning, optional
        Which chunks and blocks are small.
    """

    def __init__(
        self,
        source: Source,
        selection: Selection,
        chunks: Grid,
        *,
        has_chunks: bool,
        slots: Slots,
        dtype: np.dtype[Any],
        pieces: Mapping[int, Piece],
        rank: int,
        bell: Bell | None = None,
        n_threads: int = 1,
        checksums: bool = False,
        counts: Counter = lambda read, numbers, chunks: beginning_in(read.region, numbers, chunks),
        tuning: Tuning | None = None,
    ) -> None:
        self._tuning = tuning or default_tuning()
        self._source, self._selection, self._chunks, self._has_chunks = source, selection, chunks, has_chunks
        self._slots, self._dtype, self._pieces, self._rank = slots, dtype, pieces, rank
        self._bell, self._checksums, self._counts = bell, checksums, counts
        self._names = Naming(source, selection, chunks if has_chunks else None)
        self._casts = source.dtype != dtype
        self._chunk_shape = source.info.chunks or ()
        self._chunk_reader = self._find_chunk_reader()
        self._n_threads = n_threads if self._chunk_reader is not None else 1  # `read_into` is promised one at a time
        self._pool = Pool(self._n_threads, "shardload-read")
        self._latest: list[Future[None]] = []
        self._asked: tuple[Block | None, bool] = (None, False)
        self._reading: dict[int, Region] = {}  # by thread: what it is at
        self._n_read = 0
        self._own = threading.local()
        self._lock = threading.Lock()
        self.tally = Counters()

    def _find_chunk_reader(self) -> ChunkReader | None:
        size = math.prod(self._chunk_shape) * self._source.dtype.itemsize
        return self._source.chunk_reader() if self._has_chunks and size >= self._tuning.min_chunk_nbytes else None

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a stall a thread may be held up in a read for ever: it is left behind.
        self._pool.close(wait=kind is None or not issubclass(kind, StallError))
        self._latest = []  # they call this object when they are done: a circle that would keep the pieces' memory

    def now(self) -> tuple[int, str]:
        """How many chunks and blocks have been read, and what is being read (that which was begun first; empty: nothing)."""
        for region in [*self._reading.values()][:1]:
            return self._n_read, self._names.being_read(region)
        return self._n_read, ""

    @property
    def n_at_once(self) -> int:
        """Reads worth starting before the first is done: one for each thread, and one that waits to be delivered."""
        return self._n_threads + 1

    def has_room(self, read: Block) -> bool:
        """Whether a slot is free for this read, or it needs none."""
        return not self._needs_slot(read) or self._slots.has_room()

    def start(self, read: Block) -> Reading:
        """Begin to read one block. Its own parts are in their pieces when it is done."""
        if not all(read.region.contains(part.region) for part in read.parts):
            raise ValueError(f"a part reaches outside its block {read.region}: the plan is wrong")
        block = StagedBlock(read)
        if self._needs_slot(read):
            slot = self._slots.take()
            if slot is None:
                raise ValueError("no slot is free")
            block.slot, block.release = slot, partial(self._slots.give, slot)
        if self._chunk_reader is None:
            work: list[Callable[[Counters], None]] = [partial(self._read_block, block)]
        else:
            numbers = list(self._chunks.meeting(read.region))
            # Each task takes every n-th chunk, so that all end at about the same time.
            n = min(self._n_threads, len(numbers))
            places = list(enumerate(numbers))
            work = [partial(self._read_chunks, block, self._chunk_reader, places[k::n]) for k in range(n)]
        is_free = self._chunk_reader is not None or all(task.done() for task in self._latest)  # one at a time in the library
        if is_free and read.region.size * self._source.dtype.itemsize <= self._tuning.inline_nbytes:
            return Reading(block, [done_here(self._run, task, read) for task in work])
        tasks = [self._pool.submit(self._run, task, read) for task in work]
        for task in tasks:  # told when it counts as done, not when its work ends: whoever waits looks at `done` at once
            task.add_done_callback(self._tell)
        self._latest = tasks
        return Reading(block, tasks)

    def _tell(self, _: Future[None]) -> None:
        if self._bell is not None:
            self._bell.ring()

    def _needs_slot(self, read: Block) -> bool:
        if self._asked[0] is not read:  # asked again and again while no slot is free
            if self._chunk_reader is not None:
                needs = any(part.rank != self._rank for part in read.parts)
            else:
                needs = self._own_piece(read) is None and self._view(read) is None
            self._asked = (read, needs)
        return self._asked[1]

    def _run(self, work: Callable[[Counters], None], read: Block) -> None:
        tally = Counters()
        try:
            work(tally)
        except (ShardloadError, MemoryError):
            raise
        except Exception as error:
            raise self._names.explain(error, read.region) from error
        finally:
            with self._lock:
                self.tally.add(tally)

    @contextmanager
    def _at(self, region: Region) -> Iterator[None]:
        """While this thread reads a region of the file, the others can ask for it."""
        thread = threading.get_ident()
        self._reading[thread] = region
        try:
            yield
        finally:
            del self._reading[thread]
            with self._lock:
                self._n_read += 1

    # --- chunk by chunk

    def _read_chunks(self, block: StagedBlock, reader: ChunkReader, places: Iterable[tuple[int, int]], tally: Counters) -> None:
        for place, number in places:
            region = self._chunks.region(number).intersect(block.read.region)
            if region is None:
                continue
            parts = [part for part in block.read.parts if part.region.intersect(region) is not None]
            if not parts:  # it lies between the shards of this rank
                continue
            index = self._names.index(region)
            try:
                with self._at(region):
                    self._read_chunk(block, reader, place, region, parts, index, tally)
            except (ShardloadError, MemoryError):
                raise
            except Exception as error:
                raise self._names.unreadable(error, region, index) from error

    def _read_chunk(
        self,
        block: StagedBlock,
        reader: ChunkReader,
        place: int,
        region: Region,
        parts: list[Part],
        index: tuple[int, ...],
        tally: Counters,
    ) -> None:
        started = time.perf_counter()
        encoded = reader.fetch(index, self._stored)
        fetched = time.perf_counter()
        box = self._selection.to_file(region)
        inside = tuple(
            slice(a - i * c, b - i * c) for a, b, i, c in zip(box.start, box.stop, index, self._chunk_shape, strict=True)
        )
        into = self._in_place(parts, region)
        if into is not None:
            reader.decode(encoded, into.reshape(self._chunk_shape))
            settle_bools(into)
            values = into
        else:
            travels = any(part.rank != self._rank for part in parts)
            in_slot = block.slot is not None and travels and not self._casts
            target = (
                self._cut(block, place, self._chunk_shape, self._source.dtype)
                if in_slot
                else self._scratch("chunk", self._chunk_shape, self._source.dtype)
            )
            reader.decode(encoded, target)
            settle_bools(target)
            index_in: Any = (*inside, ...)  # an array, also when 0-d
            values = self._drop_axes(target[index_in])
            if self._casts:
                cast = (
                    self._cut(block, place, region.shape, self._dtype)
                    if travels
                    else self._scratch("cast", region.shape, self._dtype)
                )
                cast_into(values, cast, self._names.elements(box))
                values = cast
            if travels:
                with self._lock:
                    block.tiles.append(Tile(region, values))
        decoded = time.perf_counter()
        if into is None:
            self._deliver(parts, region, values, tally)
        tally.read_seconds += fetched - started
        tally.decode_seconds += decoded - fetched
        tally.chunks_decoded += 1
        tally.nbytes_read += region.size * self._source.dtype.itemsize
        if encoded is None:
            self._note_missing(block.read, np.array([next(self._chunks.meeting(region))]), tally)
        else:
            tally.nbytes_stored += len(encoded.data)

    def _note_missing(self, read: Block, numbers: Array, tally: Counters) -> None:
        """Count chunks that are not stored, by their numbers, if nobody else does."""
        numbers = self._counts(read, numbers, self._chunks)
        tally.chunks_missing += len(numbers)
        tally.missing += numbers[: MOST_NAMED - len(tally.missing)].tolist()  # they come in ascending order

    def _in_place(self, parts: list[Part], region: Region) -> Array | None:
        """The part of this rank's own piece that is all of the chunk, where it can be decoded straight into it."""
        if self._casts or len(parts) != 1 or parts[0].rank != self._rank or not parts[0].region.contains(region):
            return None
        view = self._pieces[parts[0].shard].view(region)
        whole = math.prod(self._chunk_shape) == region.size
        return view if whole and view.flags.c_contiguous else None

    def _cut(self, block: StagedBlock, place: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Room in the block's slot for its chunk number `place`."""
        if block.slot is None:
            raise ValueError("a block without a slot has no room")
        wide = max(self._source.dtype.itemsize, self._dtype.itemsize)
        start = place * aligned(math.prod(self._chunk_shape) * wide)
        nbytes = math.prod(shape) * dtype.itemsize
        return block.slot.data[start : start + nbytes].view(dtype).reshape(shape)

    def _scratch(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Memory of this thread's own, used again by its next chunk."""
        nbytes = math.prod(shape) * dtype.itemsize
        held: Array | None = getattr(self._own, name, None)
        if held is None or held.nbytes < nbytes:
            held = np.empty(nbytes, dtype=np.uint8)
            setattr(self._own, name, held)
        return held[:nbytes].view(dtype).reshape(shape)

    def _stored(self, nbytes: int) -> Array:
        return self._scratch("stored", (nbytes,), np.dtype(np.uint8))

    # --- by the library, block by block

    def _read_block(self, block: StagedBlock, tally: Counters) -> None:
        read = block.read
        # Parts of several shards, and nobody needs what lies between them.
        if len(read.parts) > 1 and sum(part.region.size for part in read.parts) < read.region.size:
            for part in read.parts:
                self._read_block(StagedBlock(Block(part.region, (part,)), slot=block.slot), tally)
            return
        own = self._own_piece(read)
        if own is not None:
            self._read(read, own, tally)
            return
        values = self._view(read)
        if values is None:
            values = self._fill(block, tally)
        block.tiles.append(Tile(read.region, values))
        self._deliver(read.parts, read.region, values, tally)

    def _own_piece(self, read: Block) -> Array | None:
        """The part of this rank's own piece that is all of the block, where the values can be read straight into it."""
        if self._casts or len(read.parts) != 1:
            return None
        part = read.parts[0]
        if part.rank != self._rank or part.region != read.region:
            return None
        view = self._pieces[part.shard].view(part.region)
        return view if view.flags.c_contiguous else None

    def _view(self, read: Block) -> Array | None:
        """The values themselves, where they are in memory already and can be sent from there."""
        view = None if self._casts else self._source.view(self._selection.to_file(read.region))
        return self._drop_axes(view) if view is not None and sendable(view) else None

    def _fill(self, block: StagedBlock, tally: Counters) -> Array:
        if block.slot is None:
            raise ValueError("only a staged block can be filled")
        region = block.read.region
        data = block.slot.data[: region.size * self._dtype.itemsize].view(self._dtype).reshape(region.shape)
        if not self._casts:
            self._read(block.read, data, tally)
            return data
        raw = self._scratch("block", region.shape, self._source.dtype)
        self._read(block.read, raw, tally)
        cast_into(raw, data, self._names.elements(self._selection.to_file(region)))
        return data

    def _read(self, read: Block, out: Array, tally: Counters) -> None:
        region, box = read.region, self._selection.to_file(read.region)
        started = time.perf_counter()
        with self._at(region):
            self._source.read_into(box, out.reshape(box.shape))
            settle_bools(out)
        seconds = time.perf_counter() - started
        if self._has_chunks:
            tally.chunks_decoded += self._chunks.n_meeting(region)
            tally.decode_seconds += seconds  # the library does not say how much of it was reading
        else:
            tally.read_seconds += seconds
        tally.nbytes_read += region.size * self._source.dtype.itemsize
        indices = self._source.missing(box)
        if indices and self._has_chunks:
            self._note_missing(read, chunk_numbers(indices, self._selection, self._chunk_shape, self._chunks), tally)
        elif indices:  # an array without chunks has one, number 0, whose first element is the array's
            self._note_missing(read, np.array([0]), tally)

    # --- both

    def _deliver(self, parts: Iterable[Any], region: Region, values: Array, tally: Counters) -> None:
        """Copy what stays here of `values` (which are `region`) into the pieces."""
        started = time.perf_counter()
        for part in parts:
            common = part.region.intersect(region) if part.rank == self._rank else None
            if common is None:
                continue
            view = Tile(region, values).view(common)
            piece = self._pieces[part.shard].view(common)
            np.copyto(piece, view, casting="no")
            tally.nbytes_copied += piece.nbytes
            tally.n_checksums += self._checksums
            if self._checksums and checksum(view) != checksum(piece):
                raise PeerError(
                    f"the part {common} that stays on rank {self._rank} is not what was read: a checksum after the copy "
                    "differs "
                    "from the one before it. The load is void; if it happens again, suspect the memory of this node",
                    rank=self._rank,
                )
        tally.copy_seconds += time.perf_counter() - started

    def _drop_axes(self, view: Array) -> Array:
        """A view with the file's axes, without those that the selection dropped."""
        kept = set(self._selection.kept)
        index: Any = (*(slice(None) if k in kept else 0 for k in range(view.ndim)), ...)  # an array, also when 0-d
        values: Array = view[index]
        return values
