"""Which buffers hold values between the file and their piece, and what else do all arrays of a round share?

1. A `StagedBlock` is one block in memory, as one or more tiles: one if it was read from a file, views of shards otherwise.
2. The tiles lie in `Slots`: a few staging buffers that are reused, in shared memory if there is any, else in the memory of this
   process.
3. A part with gaps is packed into a slot before it is sent (`Packer`); one without is sent from its block.
4. A `Piece` is the data of a shard on the host, where all values end up.
5. `Resources` are the slots and threads of a round, which all its arrays share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.shared_memory import Bell, Segment
from shardload.errors import StallError
from shardload.planning.region import Array, Region, aligned
from shardload.planning.schedule import Block
from shardload.planning.tuning import default_tuning
from shardload.system.scratch import ThreadScratch, aligned_bytes
from shardload.system.thread_pool import Pool

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array on a 64-byte boundary, which JAX on CPU can use as it is instead of copying it."""
    return aligned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def view_of(data: Array, region: Region, whole: Region) -> Array:
    """The view of `region` in a buffer that holds the region `whole`."""
    # Ending the index in `...` keeps a 0-d view an array: `data[()]` would be a scalar, hence a copy.
    index: tuple[Any, ...] = (*region.slices(whole.start), ...)
    view: Array = data[index]
    return view


@dataclass
class Piece:
    """The values of `region`, such as a shard or a chunk, in a buffer of that shape."""

    region: Region
    data: Array

    def view(self, region: Region) -> Array:
        """The view of `region` in the buffer."""
        return view_of(self.data, region, self.region)


@dataclass
class StagedBlock:
    """One block in memory. Each part for another rank lies in one of the `tiles`; those for this rank's pieces are there.

    `is_shared`: whether other processes of this machine can read the tiles, which then lie in the `slot`.
    """

    block: Block
    tiles: list[Piece] = field(default_factory=list)
    slot: Bytes | None = None
    is_shared: bool = False
    release: Callable[[], None] = lambda: None
    n_sending: int = 0
    tasks: list[Future[None]] = field(default_factory=list)

    def done(self) -> bool:
        """True if the block is complete, or a task that reads it has failed."""
        return all(task.done() for task in self.tasks)

    def result(self) -> StagedBlock:
        """Return the block, or raise the error of a task."""
        for task in self.tasks:
            task.result()
        return self

    def view(self, region: Region) -> Array:
        """The values of a part. ValueError if they are not here."""
        for tile in self.tiles:
            if tile.region.contains(region):
                return tile.view(region)
        raise ValueError(f"{region} is not in the block that is to be sent")


class Slots:
    """A fixed number of staging buffers of equal size, which are handed out and given back.

    Parameters
    ----------
    n : int
        Number of buffers.
    nbytes : int
        Size of each.
    shared : ndarray of uint8, optional
        Shared memory to cut them from. Without it, each buffer is allocated when it is first needed.

    Attributes
    ----------
    n_taken : int
        Number of buffers in use.
    is_shared : bool
        Whether they lie in shared memory.
    """

    def __init__(self, n: int, nbytes: int, shared: Bytes | None = None) -> None:
        self.nbytes, self.is_shared = nbytes, shared is not None
        self._n, self._shared, self._free = n, shared, list[Bytes]()
        self.n_taken = self._n_most = 0

    @property
    def peak_nbytes(self) -> int:
        """Peak number of bytes in use."""
        return self._n_most * self.nbytes

    def has_room(self) -> bool:
        """True if a buffer is free."""
        return self.n_taken < self._n

    def take(self) -> Bytes | None:
        """Take a free buffer, the last used first (its memory is warm). Return None if none is free."""
        if not self.has_room():
            return None
        self.n_taken += 1
        self._n_most = max(self._n_most, self.n_taken)
        if self._free:
            return self._free.pop()
        start = (self.n_taken - 1) * aligned(self.nbytes)  # behind all others, which are taken
        return aligned_bytes(self.nbytes) if self._shared is None else self._shared[start : start + self.nbytes]

    def give(self, slot: Bytes) -> None:
        """Give a buffer back."""
        self.n_taken -= 1
        self._free.append(slot)


def sendable(view: Array) -> bool:
    """True if a view can be sent as it is: it has native byte order and positive strides.

    >>> import numpy as np
    >>> sendable(np.zeros((3, 4))[:, 1:3]), sendable(np.zeros(4)[::-1])
    (True, False)
    """
    return view.dtype.isnative and all(s > 0 or n == 1 for s, n in zip(view.strides, view.shape, strict=True))


@dataclass
class _Buffer:
    """A slot that parts are packed into, one after the other. It is given back when all of them have been sent."""

    slot: Bytes
    n_used: int = 0
    n_sending: int = 0


class Packer:
    """Packs parts without gaps into a few slots, which are reused: memory stays the same, however much is sent."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._open: _Buffer | None = None
        self._last: tuple[Block, Region, Array, _Buffer] | None = None

    def pack(self, block: StagedBlock, region: Region) -> tuple[Array, Callable[[], None]] | None:
        """Return a packed copy of `region` of the block, and a function to call when it has been sent. None: there is no room.

        If the same region was packed last (replicas), the same copy is returned.
        """
        last = self._last
        if last is not None and last[0] is block.block and last[1] == region and last[3].n_sending:
            _, _, data, buffer = last  # compared by block too: another array may have the same region
        else:
            view = block.view(region)
            free_buffer = self._open_buffer(view.nbytes)
            if free_buffer is None:
                return None
            buffer = free_buffer
            data = buffer.slot[buffer.n_used : buffer.n_used + view.nbytes].view(view.dtype).reshape(view.shape)
            np.copyto(data, view, casting="no")
            buffer.n_used += aligned(view.nbytes)
            self._last = (block.block, region, data, buffer)
        buffer.n_sending += 1
        return data, partial(self._count_down, buffer)

    def _open_buffer(self, nbytes: int) -> _Buffer | None:
        if nbytes > self._slots.nbytes:
            raise ValueError(f"a part of {nbytes} bytes for slots of {self._slots.nbytes}")
        if self._open is not None and self._open.n_used + nbytes <= self._slots.nbytes:
            return self._open
        slot = self._slots.take()
        if slot is None:
            return None
        self._open = _Buffer(slot)
        return self._open

    def _count_down(self, buffer: _Buffer) -> None:
        buffer.n_sending -= 1
        if not buffer.n_sending:
            if buffer is self._open:
                self._open = None
            self._slots.give(buffer.slot)


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
        segments: Mapping[int, Segment] | None = None,
    ) -> None:
        self.slots, self.pack_slots = slots, pack_slots or Slots(0, 0)
        self.bell, self.segments, self.n_threads = bell or Bell(), segments or {}, n_threads
        self.batch_nbytes = default_tuning().batch_nbytes if batch_nbytes is None else batch_nbytes
        self.pool = Pool(n_threads, "shardload-read")
        self.scratch = ThreadScratch()

    def __enter__(self) -> Resources:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a stall a thread may hang in a read for ever: do not wait for it.
        self.pool.close(wait=kind is None or not issubclass(kind, StallError))
