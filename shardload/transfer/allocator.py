"""Can the memory of an array that was deleted be reused for the next load?

New memory is expensive: the kernel clears every page when it is first touched, which takes about as long as reading it from the
page cache, and on a virtual machine the host may have to find it first. A script that loads one snapshot after another would
pay that each time. So when no JAX array and no view uses a piece any more, its memory is kept for the next load that asks for
exactly the same size:

* It is marked as free (MADV_FREE): the kernel takes it as soon as any process needs memory, and until then it stays warm. It
  still counts in the resident set.
* What the next load does not ask for is released before new memory is allocated.
* At most a quarter of what this process may use is kept, and nothing if addresses are limited: kept memory would then be
  missing elsewhere, even if the kernel could take its pages (`memory_limit`).

Small pieces use ordinary memory. ``SHARDLOAD_KEEP_MEMORY=0`` in the environment turns this off.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from shardload.planning.region import Array
from shardload.system.memory_limit import keeps_addresses, limit_nbytes
from shardload.transfer.buffers import aligned_empty

_WORTH_NBYTES = 1 << 20  # smaller pieces use ordinary memory, which the system's allocator reuses itself
_SHARE = 4  # at most 1 / _SHARE of the memory that a process may use is kept


class _Use:
    """The base object of all arrays over a block of memory. When it is deleted, no array uses the block any more."""

    def __init__(self, block: mmap.mmap) -> None:
        address = np.frombuffer(block, dtype=np.uint8).ctypes.data
        self.__array_interface__ = {"shape": (len(block),), "typestr": "|u1", "data": (address, False), "version": 3}


class Reserve:
    """Blocks of memory that were used and are free now. Thread-safe.

    A block comes back when Python deletes the last array over it, which may happen in any thread at any point. So nothing here
    waits for a lock.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque()
        self._most_nbytes = 0.0  # to be kept: as of the last load, because the kernel's files take longer than a small array

    @property
    def nbytes(self) -> int:
        """Number of bytes that are kept."""
        return sum(map(len, tuple(self._free)))

    def take(self, sizes: Sequence[int]) -> list[Array]:
        """Memory for one load: uninitialised arrays of `sizes` bytes, on page boundaries. Blocks of other sizes are released.

        Raises
        ------
        MemoryError
            If there is not enough memory.
        """
        self._most_nbytes = 0.0 if keeps_addresses() else limit_nbytes() / _SHARE
        block_sizes = [-(-max(n, 1) // mmap.PAGESIZE) * mmap.PAGESIZE for n in sizes]
        free: dict[int, list[mmap.mmap]] = {}
        with suppress(IndexError):  # none is left; another thread may have been first
            while True:
                block = self._free.popleft()
                free.setdefault(len(block), []).append(block)
        blocks = [same.pop() if (same := free.get(size)) else None for size in block_sizes]
        for same in free.values():  # before anything new is made
            for block in same:
                block.close()
        return [self._lend(block or _new(size))[:n] for block, size, n in zip(blocks, block_sizes, sizes, strict=True)]

    def _lend(self, block: mmap.mmap) -> Array:
        use = _Use(block)
        weakref.finalize(use, self._give_back, block).atexit = False
        return np.asarray(use)

    def _give_back(self, block: mmap.mmap) -> None:
        with suppress(OSError, RuntimeError):  # the kernel cannot; another block came back while the bytes were summed
            if self.nbytes + len(block) <= self._most_nbytes:
                block.madvise(mmap.MADV_FREE)
                self._free.append(block)
        # A block that is not kept is not closed, but unmapped as nobody has it: a signal may come when it is kept already.


def _new(size: int) -> mmap.mmap:
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size} bytes: {error.strerror}") from error
    with suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does
    return block


_reserve = Reserve()


def empty_pieces(arrays: Sequence[tuple[Sequence[tuple[int, ...]], np.dtype[Any]]]) -> list[list[Array]]:
    """Uninitialised arrays for one load: for each of its arrays the shapes of the pieces, and their dtype.

    JAX on CPU can use them as they are instead of copying them. All of it is mapped before any of it is touched: blocks that
    lie side by side are then one region for the kernel, which can take huge pages where a single block is too short for one.
    """
    sizes = [[math.prod(shape) * dtype.itemsize for shape in shapes] for shapes, dtype in arrays]
    large = [nbytes for of_array in sizes for nbytes in of_array if nbytes >= _WORTH_NBYTES]
    if not large or os.environ.get("SHARDLOAD_KEEP_MEMORY") == "0":
        return [[aligned_empty(shape, dtype) for shape in shapes] for shapes, dtype in arrays]
    gc.collect(0)  # JAX releases the memory of deleted arrays at a garbage collection of Python, of any generation
    large_arrays = iter(_reserve.take(large))
    return [
        [
            next(large_arrays).view(dtype).reshape(shape) if nbytes >= _WORTH_NBYTES else aligned_empty(shape, dtype)
            for shape, nbytes in zip(shapes, of_array, strict=True)
        ]
        for (shapes, dtype), of_array in zip(arrays, sizes, strict=True)
    ]
