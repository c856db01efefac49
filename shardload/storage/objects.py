"""How are bytes read from an object, wherever it is, and how is a folder of new objects written? In any number of threads.

1. An object is read by ranges. It is one version: `StoredObject.version` changes if its bytes may have changed.
2. A new folder (`WritableFolder`) is written by many ranks. Nobody takes it for a store before one of them publishes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Content = bytes | Bytes
Ints = np.ndarray[Any, np.dtype[np.int64]]

_MOST_GAP_NBYTES = 1 << 12  # in a file: less than a call of the system costs


class Ranges:
    """Pieces of one object that are read with few requests: pieces that follow each other, or almost, are read together.

    Parameters
    ----------
    offsets, sizes : ndarray of int64
        Where each piece begins in the object, and its bytes.
    most_gap : int
        The most bytes between two pieces that are read together.

    Attributes
    ----------
    nbytes : int
        Bytes of memory that all need.
    requests : list of (int, int, int)
        What is read: its offset in that memory, its bytes, its offset in the object.
    are_in_order : bool
        Whether the pieces were given in the order of the object. Then they have this order in memory, too.

    Examples
    --------
    >>> ranges = Ranges(np.array([40, 10, 20]), np.array([2, 10, 5]), most_gap=4)
    >>> ranges.nbytes, ranges.requests
    (17, [(0, 15, 10), (15, 2, 40)])
    >>> [piece.tolist() for piece in ranges.pieces(np.arange(17, dtype=np.uint8))]
    [[15, 16], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    """

    def __init__(self, offsets: Ints, sizes: Ints, most_gap: int = _MOST_GAP_NBYTES) -> None:
        self.nbytes, self.requests, self.are_in_order = 0, list[tuple[int, int, int]](), True
        self._slices: list[slice] = []
        if len(offsets) == 1:  # as most large chunks are: it takes no step of NumPy
            self.nbytes = int(sizes[0])
            self.requests, self._slices = [(0, self.nbytes, int(offsets[0]))], [slice(0, self.nbytes)]
            return
        if not len(offsets):
            return
        stops = offsets + sizes
        self.are_in_order = bool((offsets[1:] >= stops[:-1]).all())
        n, order = len(offsets), np.argsort(offsets, kind="stable")
        start, stop = offsets[order], np.maximum.accumulate(stops[order])  # pieces may overlap
        first = np.flatnonzero(np.concatenate([[True], start[1:] > stop[:-1] + most_gap]))
        last = np.append(first[1:], n) - 1
        length = stop[last] - start[first]
        begin = np.cumsum(length) - length
        position = np.empty(n, dtype=np.int64)  # of each piece in memory
        position[order] = start - np.repeat(start[first] - begin, last - first + 1)
        self.requests = list(zip(begin.tolist(), length.tolist(), start[first].tolist(), strict=True))
        self._slices = list(map(slice, position.tolist(), (position + sizes).tolist()))
        self.nbytes = int(length.sum())

    @classmethod
    def of_rows(cls, offset: int, step: int, n_rows: int, nbytes: int) -> Ranges:
        """Rows of `nbytes` bytes, which begin `step` bytes apart, each read by itself. Their memory is not cut into pieces.

        >>> Ranges.of_rows(100, 50, 3, 8).requests
        [(0, 8, 100), (8, 8, 150), (16, 8, 200)]
        """
        rows = cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        rows.nbytes = n_rows * nbytes
        rows.requests = [(k * nbytes, nbytes, offset + k * step) for k in range(n_rows)]
        return rows

    def pieces(self, memory: Bytes) -> list[memoryview]:
        """The pieces, in the order in which they were given, in memory that was read into."""
        return list(map(memory.data.__getitem__, self._slices))


class StoredObject(Protocol):
    """The bytes of one object. Several threads may read at once. After `close`, reads raise OSError.

    Attributes
    ----------
    most_gap_nbytes : int
        The `most_gap` of the `Ranges` that it reads best.
    """

    most_gap_nbytes: int

    @property
    def nbytes(self) -> int:
        """Its size now."""

    @property
    def version(self) -> tuple[int, ...] | None:
        """Numbers that change when its bytes may have changed; None if it is gone."""

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fill `out`, which is C-contiguous, from `offset` on. OSError if the object ends before, or cannot be read."""

    def read_at_most(self, offset: int, nbytes: int) -> bytes:
        """The bytes at `offset`: fewer than `nbytes` where the object ends."""

    def read_ranges(self, ranges: Ranges, memory: Bytes) -> list[memoryview]:
        """The pieces, in the order in which they were given, read into `memory`. OSError as for `read_into`."""

    def close(self) -> None:
        """Let go of what it holds. May be called again."""


def read_content(stored: StoredObject, key: str, most_nbytes: int, extent: tuple[int, int] | None = None) -> Bytes:
    """All bytes of an object, or those from a first one to a last one. ValueError, before memory is allocated, if it has more
    than there may be.
    """
    start, stop = extent or (0, stored.nbytes)
    if stop - start > most_nbytes:
        raise ValueError(f"'{key}' has {stop - start} bytes, what is stored there {most_nbytes} at most")
    memory = np.empty(stop - start, dtype=np.uint8)
    stored.read_into(memory, start)
    return memory


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


class ObjectFolder(Protocol):
    """Objects that have keys. Several threads may use it at once."""

    def version(self, key: str) -> tuple[int, ...] | None:
        """`StoredObject.version` of an object; None if there is none."""

    def open(self, key: str, ahead: int = 1) -> StoredObject | None:
        """An object; None if there is none. OSError if it cannot be opened, or may not.

        The caller will read `ahead` bytes at its beginning next; at its end, if `ahead` is negative. A store sends them with
        its first answer.
        """

    def read_many(self, keys: Iterable[str], most_nbytes: int) -> list[Content | None]:
        """The content of each; None of one that is not there.

        Raises OSError as `open` does; ValueError if one has more bytes, before memory is allocated.
        """

    def folders(self, key: str) -> list[str]:
        """The names of the folders directly below `key` ("": the root), sorted. No part of an object is among them.

        Raises OSError if they cannot be listed; `NoListingError` if they never can, as those of a plain HTTP server.
        """


class NoListingError(OSError):
    """Folders cannot be listed: HTTP has no word for that, and a store may not allow it."""


class RemoteError(OSError):
    """A store refuses a request, or cannot be reached. The text names the object, says why and what to pass, and no secret."""

    def __str__(self) -> str:
        return str(self.args[-1])


class UnsyncedError(OSError):
    """An object cannot be written that an earlier call has put.

    Attributes
    ----------
    key : str
        Its key.
    """

    def __init__(self, error: OSError, key: str) -> None:
        super().__init__(error.errno, error.strerror)
        self.key = key


class WritableFolder(ObjectFolder, Protocol):
    """A new folder of objects that many ranks write, and read back, before it is published under its name.

    One rank calls `create` and tells all ranks the address. Each rank, that one too, makes a `WritableFolder` of its own and
    calls `join` with the address. So `create`, `finish`, `publish` and `discard` are for one rank; `join`, `put`, `write_at`,
    `sync` and `close` are for all. The methods of an `ObjectFolder` read what has been synced on any rank.

    Where names cannot be changed (an object store), objects have their final keys from the beginning: the folder is no store
    until `publish` puts its last object, which must not exist.

    Errors of the storage are OSErrors; an `UnsyncedError` is about another object than that of the call.
    """

    def create(self) -> str:
        """Begin a new folder, or go on with what was taken up. Returns its address: text for other ranks, without secrets.

        Raises
        ------
        ConfigError
            If the name is taken or cannot be made.
        """

    def join(self, address: str) -> None:
        """Write to the folder that another rank has begun. ConfigError if this rank does not see it."""

    def read_back(self, address: str) -> ObjectFolder:
        """The folder that another rank has begun, to read it once it is finished."""

    def put(self, key: str, data: Any) -> None:
        """Put a whole object, C-contiguous bytes, which must not exist. FileExistsError if it does."""

    def write_at(self, key: str, data: Any, offset: int) -> None:
        """Write a part of an object that several threads or ranks write together, and make the object if it is not there.

        NotImplementedError in a store, where objects are put as a whole.
        """

    def sync(self) -> None:
        """Return when all ranks see what this rank has put until now, and it would survive a power failure. Other threads may
        put meanwhile.
        """

    def keys(self, below: str) -> Iterable[str]:
        """The keys of all objects below a folder (``""``: the root), in any order."""

    def finish(self, key: str, data: bytes) -> None:
        """Sync all else, and put the object that makes this a store; or keep this object for `publish`."""

    def publish(self) -> None:
        """Give the finished folder its name. ConfigError if the name is taken by now, and must not be replaced."""

    def discard(self, *, keeps: bool = False) -> None:
        """Remove what was put, unless it was published. May be called again. Never raises OSError.

        With `keeps`, as after Ctrl-C, it stays if another job can take it up.
        """

    def close(self) -> None:
        """Close what this rank has open. What was put and not synced may be lost. May be called again."""
