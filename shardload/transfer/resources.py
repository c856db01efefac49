"""What do all arrays of a round share? Buffers for blocks and packed parts, threads with scratch memory, and a bell."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardload.comm.shared_memory import Bell, Segment
from shardload.errors import StallError
from shardload.planning.tuning import default_tuning
from shardload.system.scratch import ThreadScratch
from shardload.system.thread_pool import Pool
from shardload.transfer.buffers import Slots

_NOT_SHARED: Mapping[int, Segment] = MappingProxyType({})


class Resources:
    """What a session makes, and passes to the readers of all arrays and to the exchange. Leaving it ends the threads.

    Parameters
    ----------
    slots, pack_slots : Slots
        Staging buffers for blocks with parts that other ranks need, and buffers for packed parts. Each is large enough for the
        largest block of any array.
    bell : Bell, optional
        Wakes this rank. Rung when a task is done and, with shared memory, by the ranks of this machine.
    n_threads : int
        Number of chunks that are decoded at once, over all arrays.
    batch_nbytes : int, optional
        Decoded bytes of the small chunks that a thread holds at once.
    segments : mapping of int to Segment
        The shared memory of each rank of this machine; empty if none is shared.
    """

    def __init__(
        self,
        slots: Slots,
        bell: Bell | None = None,
        n_threads: int = 1,
        batch_nbytes: int | None = None,
        *,
        pack_slots: Slots | None = None,
        segments: Mapping[int, Segment] = _NOT_SHARED,
    ) -> None:
        self.slots, self.pack_slots = slots, Slots(0, 0) if pack_slots is None else pack_slots
        self.bell, self.segments, self.n_threads = Bell() if bell is None else bell, segments, n_threads
        self.batch_nbytes = default_tuning().batch_nbytes if batch_nbytes is None else batch_nbytes
        self.pool = Pool(n_threads, "shardload-read")
        self.scratch = ThreadScratch()

    def __enter__(self) -> Resources:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a stall a thread may hang in a read for ever: do not wait for it.
        self.pool.close(wait=kind is None or not issubclass(kind, StallError))
