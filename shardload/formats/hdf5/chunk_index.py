"""Where are all chunks of an HDF5 dataset, by the file's own index?

HDF5 tells where its chunks are one by one, each as an object of Python: 1.3 microseconds for each, on every rank that reads.
The index of most files is a version 1 B-tree: nodes of some 60 entries, which NumPy takes as they are, in a twentieth of that
time.

1. Read the object header of the dataset (`on_disk`), and find the message that says where its B-tree is.
2. Read the nodes level by level, down to the leaves: all of them, or those below which a box of chunks may be, because the
   chunks are in the order of their numbers. A leaf has an entry for each chunk: size, filter mask, coordinates and address.
3. Refuse whatever is not exactly as expected. Then HDF5 lists the chunks (`chunks`), or says what is damaged.

Source: HDF5 File Format Specification, version 3.0, sections III.A.1 (version 1 B-trees) and IV.A.2.i (layout message).
A list of all chunks is compared with what HDF5 has counted in the same open file (`chunks`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.formats.hdf5.chunk_tree import MOST_CHILDREN, Entries, entry_of
from shardload.formats.hdf5.on_disk import LAYOUT, UNDEFINED, Read, read_header
from shardload.planning.grid import IntArray, ravel

__all__ = ["MOST_ENTRIES", "ListedChunks", "list_tree"]

MOST_ENTRIES = 1 << 17  # to read at once: they take 50 bytes for each, twice
_CHUNKED = 2
_MOST_LEVELS = 16
_HEAD = struct.Struct("<4sBBHQQ")  # of a node: mark, type, level, number of entries, siblings


class _OtherError(Exception):
    """The file is not as this module expects."""


@dataclass(frozen=True, slots=True)
class ListedChunks:
    """Stored chunks, in ascending order of their numbers in the grid of all chunks.

    `entries` has a record for each, as `chunk_tree.entry_of` says; ``child`` is the chunk's address.
    """

    numbers: IntArray
    entries: Entries


def list_tree(
    read: Read, header: int, chunk: Sequence[int], grid: Sequence[int], most: int, box: Sequence[range] | None = None
) -> ListedChunks | None:
    """Where the stored chunks are; None if the index is of another kind, or anything is unusual.

    Parameters
    ----------
    read : callable
        Reads bytes of the file.
    header : int
        Address of the dataset's object header.
    chunk, grid : sequence of int
        Elements of a chunk, and chunks of the dataset, along each axis.
    most : int
        Most entries to read; None is returned if there are more.
    box : sequence of range, optional
        Only these chunks are listed. By default all are.
    """
    try:
        root = _root_of(read, header, len(grid))
        if root is None:
            return None
        entry = entry_of(len(grid))
        if root == UNDEFINED:  # nothing was ever written
            return ListedChunks(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=entry))
        found = _Tree(read, tuple(chunk), tuple(grid), entry, most).list(root, box)
    except (_OtherError, struct.error, IndexError, OSError, ValueError):
        return None
    return found


def _root_of(read: Read, header: int, ndim: int) -> int | None:
    """Address of the B-tree; `UNDEFINED` if no chunk was ever written; None if the index is of another kind."""
    for message in read_header(read, header, is_checked=False):
        if message.kind == LAYOUT:
            version, layout, n_axes = message.data[:3]
            if message.is_shared or (version, layout, n_axes) != (3, _CHUNKED, ndim + 1):
                return None
            return int.from_bytes(message.data[3:11], "little")
    return None


@dataclass(frozen=True, slots=True)
class _Tree:
    """See `list_tree`."""

    read: Read
    chunk: tuple[int, ...]
    grid: tuple[int, ...]
    entry: np.dtype[Any]
    most: int

    def list(self, root: int, box: Sequence[range] | None) -> ListedChunks:
        """The chunks of a box, or all, in the leaves below a node."""
        first = last = None
        if box is not None:
            first, last = ravel([axis.start for axis in box], self.grid), ravel([axis.stop - 1 for axis in box], self.grid)
        nodes, firsts = [root], None  # and the numbers of their first chunks
        level = int(_HEAD.unpack_from(self.read(root, _HEAD.size))[2])
        for _ in range(_MOST_LEVELS):
            parts = [self._node(node, level) for node in nodes]
            found = np.frombuffer(b"".join(parts), dtype=self.entry)
            numbers = self._numbers(found)
            if len(found) > self.most or (numbers[1:] <= numbers[:-1]).any():
                raise _OtherError
            begins = np.cumsum([0, *[len(part) // self.entry.itemsize for part in parts[:-1]]])
            if firsts is not None and (numbers[begins] != firsts).any():
                raise _OtherError
            if first is not None and last is not None:
                # A child has the numbers from its own up to that of the next one, which may be the node's that comes after.
                low = max(0, int(np.searchsorted(numbers, first, "right")) - 1) if level else np.searchsorted(numbers, first)
                high = np.searchsorted(numbers, last, "right")
                found, numbers = found[low:high], numbers[low:high]
            if level == 0:
                return self._inside(numbers, found, box)
            nodes, firsts = found["child"].tolist(), numbers
            if len(set(nodes)) < len(nodes):
                raise _OtherError
            if not nodes:
                return ListedChunks(numbers, found)
            level -= 1
        raise _OtherError

    def _node(self, node: int, level: int) -> bytes:
        usual = _HEAD.size + MOST_CHILDREN * self.entry.itemsize
        data = self.read(node, usual)
        mark, kind, its_level, n, _, _ = _HEAD.unpack_from(data)
        if (mark, kind, its_level) != (b"TREE", 1, level) or not n:
            raise _OtherError
        stop = _HEAD.size + n * self.entry.itemsize
        return data[_HEAD.size : stop] if stop <= usual else self.read(node + _HEAD.size, n * self.entry.itemsize)

    def _numbers(self, entries: Entries) -> IntArray:
        """The numbers of chunks in the grid."""
        at = entries["at"]
        numbers = np.zeros(len(entries), dtype=np.int64)
        for k, (c, count) in enumerate(zip(self.chunk, self.grid, strict=True)):
            axis = at[:, k].astype(np.int64)
            place = axis // c  # much faster than divmod
            if (place * c != axis).any() or (place < 0).any() or (place >= count).any():
                raise _OtherError
            numbers = numbers * count + place
        if at[:, -1].any():
            raise _OtherError
        return numbers

    def _inside(self, numbers: IntArray, entries: Entries, box: Sequence[range] | None) -> ListedChunks:
        """Those of the box: the numbers between its corners have others, too."""
        if box is None:
            return ListedChunks(numbers, entries)
        is_inside, rest = np.ones(len(numbers), dtype=bool), numbers
        for axis, count in zip(reversed(box), reversed(self.grid), strict=True):
            place = rest % count
            is_inside &= (place >= axis.start) & (place < axis.stop)
            rest = rest // count
        return ListedChunks(numbers[is_inside], entries[is_inside])
