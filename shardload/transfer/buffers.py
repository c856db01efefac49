"""Which buffers hold values between the file and their piece?

1. A `StagedBlock` is one block in memory, as one or more tiles: one if it was read from a file, views of shards otherwise.
2. The tiles lie in `Slots`: a few staging buffers that are reused, in shared memory if there is any, else in the memory of this
   process.
3. A `Piece` is the data of a shard on the host, where all values end up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.planning.blocks import aligned
from shardload.planning.parts import Block
from shardload.planning.region import Region
from shardload.system.scratch import aligned_bytes

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array on a 64-byte boundary, which JAX on CPU can use as it is instead of copying it."""
    return aligned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def view_of(data: Array, region: Region, held: Region) -> Array:
    """The view of `region` in a buffer that holds the region `held`."""
    # Ending the index in `...` keeps a 0-d view an array: `data[()]` would be a scalar, hence a copy.
    index: tuple[Any, ...] = (*region.slices(held.start), ...)
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
class Slot:
    """One buffer for one block."""

    data: Bytes
    is_shared: bool


@dataclass
class StagedBlock:
    """One block in memory. Each part for another rank lies in one of the `tiles`; those for this rank's pieces are there."""

    block: Block
    tiles: list[Piece] = field(default_factory=list)
    slot: Slot | None = None
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

    @property
    def is_shared(self) -> bool:
        """True if other processes of this machine can read the tiles."""
        return self.slot is not None and self.slot.is_shared

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
    """

    def __init__(self, n: int, nbytes: int, shared: Bytes | None = None) -> None:
        self.nbytes = nbytes
        self._n_left = n if shared is None else 0
        self._free: list[Slot] = []
        self.n_taken = self._n_most = 0
        if shared is not None:
            size = aligned(nbytes)
            self._free = [Slot(shared[k * size : k * size + nbytes], True) for k in reversed(range(n))]

    @property
    def peak_nbytes(self) -> int:
        """Peak number of bytes in use."""
        return self._n_most * self.nbytes

    def has_room(self) -> bool:
        """True if a buffer is free."""
        return bool(self._free) or self._n_left > 0

    def take(self) -> Slot | None:
        """Take a free buffer, the last used first (its memory is warm). Return None if none is free."""
        if not self.has_room():
            return None
        self.n_taken += 1
        self._n_most = max(self._n_most, self.n_taken)
        if self._free:
            return self._free.pop()
        self._n_left -= 1
        return Slot(aligned_empty((self.nbytes,), np.dtype(np.uint8)), False)

    def give(self, slot: Slot) -> None:
        """Give a buffer back."""
        self.n_taken -= 1
        self._free.append(slot)
