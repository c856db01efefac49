"""What do all readers of one job share? Threads, their scratch memory, staging buffers, and a bell that wakes the main loop."""

from __future__ import annotations

from shardload.comm.shared_memory import Bell
from shardload.errors import StallError
from shardload.planning.tuning import default_tuning
from shardload.system.scratch import ThreadScratch
from shardload.system.thread_pool import Pool
from shardload.transfer.buffers import Slots

__all__ = ["Resources"]


class Resources:
    """Resources that a job makes once and passes to the reader of each array. A context manager: leaving it ends the threads.

    Enter it after the sources are opened and before the readers: the threads then end before the sources are closed.

    Parameters
    ----------
    slots : Slots
        Staging buffers, for blocks with parts that other ranks need.
    bell : Bell, optional
        Rung when a task is done.
    n_threads : int
        Number of chunks that are decoded at once, over all arrays.
    batch_nbytes : int, optional
        Decoded bytes of the small chunks that a thread holds at once.
    """

    def __init__(self, slots: Slots, bell: Bell | None = None, n_threads: int = 1, batch_nbytes: int | None = None) -> None:
        self.slots, self.bell, self.n_threads = slots, bell, n_threads
        self.batch_nbytes = default_tuning().batch_nbytes if batch_nbytes is None else batch_nbytes
        self.pool = Pool(n_threads, "shardload-read")
        self.scratch = ThreadScratch()

    def ring(self) -> None:
        """Wake the thread that waits at the bell."""
        if self.bell is not None:
            self.bell.ring()

    def __enter__(self) -> Resources:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a stall a thread may hang in a read for ever: do not wait for it.
        self.pool.close(wait=kind is None or not issubclass(kind, StallError))
