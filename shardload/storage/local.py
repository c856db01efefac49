"""How is a local file read by ranges? By position, so that threads share no file offset, and without a lock."""

from __future__ import annotations

import errno
import os

import numpy as np

from shardload.storage.objects import Bytes, Ranges


def state_of(file: int | str) -> tuple[int, ...] | None:
    """Size and time of last change of a file, by its descriptor or path; None if the file does not exist.

    For a descriptor, inode and device follow. For a path they do not, because some network file systems give a new inode each
    time.
    """
    try:
        found = os.stat(file)
    except OSError:
        return None
    state = found.st_size, found.st_mtime_ns
    return (*state, found.st_ino, found.st_dev) if isinstance(file, int) else state


def read_at(descriptor: int, out: Bytes, offset: int) -> int:
    """Fill `out`, a C-contiguous array of bytes, from an open file at `offset`; returns the number of bytes read."""
    memory, done = out.data, 0
    while done < len(memory):  # one call reads 2 GiB at the most, and less on some file systems
        n = os.preadv(descriptor, [memory[done:]], offset + done)
        if n == 0:
            break
        done += n
    return done


class LocalFile:
    """An open file (`StoredObject`). It is closed with its last reference, so that no thread loses it while it reads.

    Parameters
    ----------
    descriptor : int
        Open for reading; it belongs to this object from now on.
    path : str
        For messages.
    """

    def __init__(self, descriptor: int, path: str = "the file") -> None:
        self._held: int | None = descriptor
        self._path = path

    @property
    def _descriptor(self) -> int:
        if self._held is None:
            raise OSError("the file was closed")  # its number may mean another file by now
        return self._held

    @property
    def nbytes(self) -> int:
        """Size of the file now."""
        return os.fstat(self._descriptor).st_size

    @property
    def version(self) -> tuple[int, ...] | None:
        """`state_of` the open file."""
        return state_of(self._descriptor)

    def place_now(self, path: str) -> str:
        """The real path of the open file, also if it was renamed; `path` if the system does not say."""
        try:
            return os.readlink(f"/proc/self/fd/{self._descriptor}")
        except OSError:  # no /proc here
            return path

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fill `out`, C-contiguous bytes. OSError if the file ends before, or cannot be read."""
        done = read_at(self._descriptor, out, offset)
        if done < len(out):
            expected = f"but values are stored up to byte {offset + len(out)}"
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}, {expected}", self._path)

    def read_at_most(self, offset: int, nbytes: int) -> bytes:
        """The bytes at `offset`: fewer than `nbytes` where the file ends."""
        memory = np.empty(nbytes, dtype=np.uint8)
        return memory[: read_at(self._descriptor, memory, offset)].tobytes()

    def read_ranges(self, ranges: Ranges, memory: Bytes) -> list[memoryview]:
        """The pieces, read into `memory`. OSError as for `read_into`."""
        descriptor, whole = self._descriptor, memory.data
        for begin, length, offset in ranges.requests:
            if os.preadv(descriptor, [whole[begin : begin + length]], offset) < length:  # it may give less than was asked for
                self.read_into(memory[begin : begin + length], offset)
        return ranges.pieces(memory)

    def close(self) -> None:
        """Close the descriptor."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    __del__ = close
