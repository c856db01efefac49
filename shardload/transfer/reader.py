"""How does one rank turn its blocks of the file into blocks in memory, inside the staging cap?

1. If the source hands out whole chunks as they are stored, threads decode them one by one (`chunk_tasks`). Otherwise the
   format's library reads whole blocks, one at a time (`block_tasks`).
2. The thread that read a block copies the parts of this rank's own pieces (`pieces`). Parts for other ranks wait in a
   staging buffer.
3. Blocks are returned in the order in which they were started. What was really read is counted. The error of a failed read
   names the chunk of the file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial

from shardload.comm.watchdog import Activity
from shardload.errors import ShardloadError, StallError
from shardload.formats.contract.chunk_reader import ChunkReader
from shardload.formats.contract.format import Source
from shardload.planning.parts import Block
from shardload.planning.source_layout import SourceLayout
from shardload.planning.tuning import Tuning, default_tuning
from shardload.system.thread_pool import done_here
from shardload.transfer.block_tasks import BlockTasks
from shardload.transfer.buffers import Resources, StagedBlock
from shardload.transfer.cast import Convert, cast_into
from shardload.transfer.chunk_tasks import ChunkTasks
from shardload.transfer.counters import Counters
from shardload.transfer.missing import Counter, count_by_region
from shardload.transfer.pieces import LocalPieces
from shardload.transfer.read_errors import Naming


class SourceReader:
    """Reads the blocks of one rank from one open source. A context manager: leaving it waits for the tasks that were started.

    A job makes one reader for each of its arrays; all readers share the same resources.

    Parameters
    ----------
    source : Source
        Open array.
    layout : SourceLayout
        The selected elements, how they lie in the file, and the dtype to load them as.
    local : LocalPieces
        This rank's pieces of the array.
    resources : Resources
        Threads, scratch memory and staging buffers, shared by all arrays of the job.
    tuning : Tuning, optional
        Sizes at which the way of reading changes.
    counts : callable, optional
        Chooses which missing chunks of a block this rank counts (`missing.counter_of`).
    convert : callable, optional
        Turns stored numbers into values (`cast.conversion`). By default a cast.
    """

    def __init__(
        self,
        source: Source,
        layout: SourceLayout,
        local: LocalPieces,
        resources: Resources,
        *,
        tuning: Tuning | None = None,
        counts: Counter = count_by_region,
        convert: Convert = cast_into,
    ) -> None:
        tuning = tuning or default_tuning()
        self._names = Naming(source, layout.selection, layout.chunks if layout.has_chunks else None)
        self._resources, self._inline_nbytes = resources, tuning.inline_nbytes
        self._itemsize = layout.file_dtype.itemsize
        try:
            chunk_reader = _chunk_reader(source, layout, tuning)
        except (OSError, RuntimeError) as error:
            raise error if isinstance(error, ShardloadError) else self._names.unreadable(error) from error
        shared = (layout, local, resources.scratch, self._names, counts, convert)
        if chunk_reader is None:
            self._ways: BlockTasks | ChunkTasks = BlockTasks(source, *shared)
        else:
            batch_nbytes = resources.batch_nbytes if layout.chunk_nbytes <= tuning.batched_chunk_nbytes else 0
            self._ways = ChunkTasks(chunk_reader, *shared, resources.n_threads, batch_nbytes)
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

    def expect(self, blocks: Iterable[Block]) -> None:
        """Told which blocks will be read, in this order, of a file in a store: they are fetched ahead."""
        self._ways.expect(blocks)

    def activity(self) -> Activity:
        """See `Producer`."""
        return self._names.activity()

    @property
    def n_at_once(self) -> int:
        """Number of blocks to start before the first is done: one for each thread, and one that waits to be delivered."""
        return self._ways.n_at_a_time + 1

    def has_room(self, block: Block) -> bool:
        """True if a staging buffer is free for this block, or it needs none."""
        return self._resources.slots.has_room() or not self._ways.needs_slot(block)

    def start(self, block: Block) -> StagedBlock:
        """Begin to read one block. When it is done, the parts of this rank's own pieces are in place."""
        if not all(block.region.contains(part.region) for part in block.parts):
            raise ValueError(f"a part reaches outside its block {block.region}: the plan is wrong")
        staged, slots = StagedBlock(block), self._resources.slots
        if self._ways.needs_slot(block):
            slot = slots.take()
            if slot is None:
                raise ValueError("no slot is free")
            staged.slot, staged.release = slot, partial(slots.give, slot)
        work = self._ways.tasks(staged)
        self._tasks = [task for task in self._tasks if not task.done()]
        is_free = len(self._tasks) < self._ways.n_at_a_time
        if is_free and block.region.size * self._itemsize <= self._inline_nbytes:
            staged.tasks = [done_here(self._run, task, block) for task in work]
            return staged
        staged.tasks = [self._resources.pool.submit(self._run, task, block) for task in work]
        for task in staged.tasks:  # ring when the future is done, not when its work ends: who waits checks `done` at once
            task.add_done_callback(self._tell)
        self._tasks += staged.tasks
        return staged

    def _tell(self, _: Future[None]) -> None:
        self._resources.bell.ring()

    def _run(self, work: Callable[[Counters], None], block: Block) -> None:
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


def _chunk_reader(source: Source, layout: SourceLayout, tuning: Tuning) -> ChunkReader | None:
    """The source's chunk reader; None if it has none, or if chunks are too small to be decoded one by one."""
    return source.chunk_reader() if layout.has_chunks and layout.chunk_nbytes >= tuning.min_chunk_nbytes else None
