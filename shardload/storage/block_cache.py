"""How does a library that seeks and reads small pieces read an object that is far away? Through blocks, which are kept.

The first request takes the beginning, where metadata mostly are. Others take the blocks that are asked for; after a block comes
its neighbour, then two at a time, then four: an index that is read in order takes few requests.

HDF5 asks while it holds its lock, and waits for a thread that fetches. Python may collect an object of h5py, which waits for
that lock, in any thread: so nothing is collected meanwhile.
"""

from __future__ import annotations

import copy
import io
import threading

import numpy as np

from shardload.storage.objects import Bytes, Ranges, StoredObject
from shardload.system.garbage import collections_wait

_BLOCK_NBYTES = 1 << 16
_FIRST_BLOCKS, _MOST_AHEAD = 16, 16  # 1 MiB: its bytes take as long as the way there and back
_MOST_BLOCKS = 512  # 32 MiB


class BlockCache:
    """An object (`StoredObject`) that is also a file object for libraries. Small reads go through blocks, large ones do not.

    Parameters
    ----------
    stored : StoredObject
        The object; this one closes it.

    Attributes
    ----------
    start : int
        Bytes at the object's beginning that are left out: offsets are counted from there. Set it before anything but
        `read_at_most` is called.
    """

    def __init__(self, stored: StoredObject) -> None:
        self.below, self.start, self._lock = stored, 0, threading.RLock()
        self.most_gap_nbytes = stored.most_gap_nbytes
        self._blocks: dict[int, bytes] = {}  # by number, the last used ones last
        self._next = self._n_ahead = self._position = 0

    # --- as a StoredObject

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.below.nbytes - self.start

    @property
    def version(self) -> tuple[int, ...] | None:
        """See `StoredObject`."""
        return self.below.version

    def read_at_most(self, offset: int, nbytes: int) -> bytes:
        """The bytes at `offset`, from blocks: fewer than `nbytes` where the object ends."""
        with self._lock:
            numbers = self._blocks_of(offset, nbytes)
            content = b"".join(self._read_blocks(numbers))
        first = offset + self.start - numbers.start * _BLOCK_NBYTES
        return content[first : first + nbytes]

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fill `out`: see `StoredObject`."""
        if not self._fill(out, offset):
            self.below.read_into(out, offset + self.start)

    def read_ranges(self, ranges: Ranges, memory: Bytes) -> list[memoryview]:
        """Read the pieces into `memory`: see `StoredObject`."""
        if not all(self._fill(memory[begin : begin + nbytes], offset) for begin, nbytes, offset in ranges.requests):
            moved = copy.copy(ranges)
            moved.requests = [(begin, nbytes, offset + self.start) for begin, nbytes, offset in ranges.requests]
            return self.below.read_ranges(moved, memory)
        return ranges.pieces(memory)

    def close(self) -> None:
        """Close the object."""
        self._blocks.clear()
        self.below.close()

    def _blocks_of(self, offset: int, nbytes: int) -> range:
        first = offset + self.start
        return range(first // _BLOCK_NBYTES, -(-(first + nbytes) // _BLOCK_NBYTES))

    def _fill(self, out: Bytes, offset: int) -> bool:
        """Fill `out`, and return True, if all of it is in blocks that are kept."""
        with self._lock:
            if not all(map(self._blocks.__contains__, self._blocks_of(offset, len(out)))):
                return False
            content = self.read_at_most(offset, len(out))
        if len(content) < len(out):
            return False
        out[:] = np.frombuffer(content, dtype=np.uint8)
        return True

    def _read_blocks(self, numbers: range) -> list[bytes]:
        """The blocks with these numbers, in order; those that are missing here are fetched with one request."""
        missing = [number for number in numbers if number not in self._blocks]
        if missing:
            first, stop = missing[0], missing[-1] + 1
            self._n_ahead = min(max(2, 2 * self._n_ahead), _MOST_AHEAD) if self._next == first > 0 else 1
            stop = max(stop, first + self._n_ahead, 0 if self._blocks else _FIRST_BLOCKS)
            with collections_wait():
                content = self.below.read_at_most(first * _BLOCK_NBYTES, (stop - first) * _BLOCK_NBYTES)
            self._next = stop
            for number in range(first, stop):
                start = (number - first) * _BLOCK_NBYTES
                self._blocks[number] = content[start : start + _BLOCK_NBYTES]
        blocks = [self._blocks.pop(number) for number in numbers]
        self._blocks.update(zip(numbers, blocks, strict=True))
        while len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return blocks

    # --- as a file object, for one thread at a time (HDF5's)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position}.get(whence, self.nbytes)
        return self._position

    def tell(self) -> int:
        """The byte to be read next."""
        return self._position

    def read(self, nbytes: int) -> bytes:
        """Read so many bytes: fewer at the end."""
        content = self.read_at_most(self._position, nbytes)
        self._position += len(content)
        return content

    def readinto(self, out: memoryview) -> int:
        """Read as many bytes as `out` has: fewer at the end."""
        content = self.read(len(out))
        out[: len(content)] = content
        return len(content)
