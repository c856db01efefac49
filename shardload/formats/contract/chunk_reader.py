"""How are the stored chunks of an array read and decoded? By a `ChunkReader`, from several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shardload.system.scratch import empty_bytes

__all__ = ["BatchReader", "ChunkReader", "Encoded", "Room", "Scratch", "fresh"]


def fresh(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """New memory."""
    return empty_bytes(nbytes)


Room = Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]]


class Scratch:
    """A `Room` that uses its memory again, because new memory is slow. For one thread at a time.

    Each call may give the same bytes as the call before, and so end the use of the earlier ones.
    """

    def __init__(self) -> None:
        self._memory = fresh(0)

    def __call__(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Memory of `nbytes` bytes, with any content."""
        if len(self._memory) < nbytes:
            self._memory = fresh(0)  # free the old memory before asking for more
            self._memory = fresh(nbytes)
        return self._memory[:nbytes]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One chunk as stored.

    Attributes
    ----------
    data : bytes-like
        Its bytes in the file.
    skipped : frozenset of int
        Stages of the decoding chain that were not applied to this chunk.
    """

    data: Any
    skipped: frozenset[int] = frozenset()


class ChunkReader(Protocol):
    """Reads the chunks of one open array, one by one. Several threads may call both methods at once."""

    def fetch(self, index: tuple[int, ...], room: Room = fresh) -> Encoded | None:
        """Read the chunk at `index` (its position along each axis of the file's chunk grid) as it is stored.

        `room` gives the memory to read into: memory that was used before is much faster than new memory. Returns None if the
        chunk is missing: its values are the fill value. Errors in the file are OSError (also for a short read) or ValueError.
        """
        ...

    def decode(self, encoded: Encoded | None, out: np.ndarray[Any, Any]) -> None:
        """Decode a chunk that `fetch` returned into `out`, which is C-contiguous, has the chunk's full shape (also at the
        array's edge) and the source's `dtype`. Raises ValueError if the chunk is damaged.
        """
        ...


@runtime_checkable
class BatchReader(Protocol):
    """What a `ChunkReader` may do in addition: many small chunks with few calls. Several threads may call both methods at once.

    If a method finds anything wrong or unusual, the caller reads the same chunks one by one: that names the chunk.
    """

    def fetch_many(self, box: Sequence[range], room: Room = fresh) -> list[Any] | None:
        """Read all chunks of a box of the file's chunk grid as they are stored, in C order.

        The result has a bytes-like object for each chunk, or None if it is missing. They are valid until `room` is called
        again. The result as a whole is None if these chunks must be read one by one. Errors are those of `ChunkReader.fetch`.
        """
        ...

    def decode_many(self, stored: Sequence[Any], out: np.ndarray[Any, Any]) -> None:
        """Decode what `fetch_many` returned into `out`, which is C-contiguous and has the chunks one after the other, each with
        its full shape. Raises ValueError if one is damaged.
        """
        ...


@runtime_checkable
class PlainReader(Protocol):
    """What a `ChunkReader` may do in addition: chunks that are stored as plain values need not be copied."""

    def read_plain(self, box: Sequence[range], out: np.ndarray[Any, Any]) -> bool:
        """Read all chunks of a box of the file's chunk grid into `out`, which is C-contiguous and has them one after the other.

        False, and `out` may hold anything, if they are encoded, missing, scattered or unusual. Raises OSError if a read fails.
        """
        ...
