"""How are bytes in memory read as an object?"""

from __future__ import annotations

import numpy as np

from shardload.storage.objects import Bytes, Content, Ranges


class MemoryObject:
    """Bytes as an object (`StoredObject`)."""

    most_gap_nbytes = 0

    def __init__(self, content: Content) -> None:
        self._content = np.frombuffer(content, dtype=np.uint8).data
        self.nbytes = len(self._content)
        self.version: tuple[int, ...] | None = None

    def read_into(self, out: Bytes, offset: int) -> None:
        """See `StoredObject`."""
        if offset + len(out) > self.nbytes:
            raise OSError(f"a value of {self.nbytes} bytes ends before byte {offset + len(out)}")
        out.data[:] = self._content[offset : offset + len(out)]

    def read_at_most(self, offset: int, nbytes: int) -> bytes:
        """See `StoredObject`."""
        return bytes(self._content[offset : offset + nbytes])

    def read_ranges(self, ranges: Ranges, memory: Bytes) -> list[memoryview]:
        """See `StoredObject`."""
        for begin, length, offset in ranges.requests:
            self.read_into(memory[begin : begin + length], offset)
        return ranges.pieces(memory)

    def close(self) -> None:
        """See `StoredObject`."""
