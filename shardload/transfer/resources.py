"""What do all readers of one job share? Threads, their scratch memory, staging buffers, a bell for the thread that waits."""

from __future__ import annotations

from shardload.comm.shared_memory import Bell
from shardload.errors import StallError
from shardload.system.scratch import Scratch
from shardload.system.thread_pool import Pool
from shardload.transfer.buffers import Slots

__all__ = ["Resources"]


class Resources:
    """Made once for a job and handed to the reader of each of its arrays. A context manager: leaving it ends the threads.

    Enter it after the sources were opened and before the readers: threads then end before what they read is closed.

    Parameters
    ----------
    slots : Slots
        Staging buffers, for blocks that other ranks need parts of.
    bell : Bell, optional
        Rung when something that was started is done.
    n_threads : int
        How many chunks are decoded at once, over all arrays.
    """

    def __init__(self, slots: Slots, bell: Bell | None = None, n_threads: int = 1) -> None:
        self.slots, self.bell, self.n_threads = slots, bell, n_threads
        self.pool = Pool(n_threads, "shardload-read")
        self.scratch = Scratch()

    def ring(self) -> None:
        """Wake the thread that waits."""
        if self.bell is not None:
            self.bell.ring()

    def __enter__(self) -> Resources:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a stall a thread may be held up in a read for ever: it is left behind.
        self.pool.close(wait=kind is None or not issubclass(kind, StallError))
