"""Where are all chunks of an HDF5 dataset, by the file's own index?

HDF5 tells where its chunks are one by one, each as an object of Python: 1.3 microseconds for each, on every rank that reads.
The index of most files is a version 1 B-tree: nodes of some 60 entries, which NumPy takes as they are, in a twentieth of that
time.

1. Read the object header of the dataset (`on_disk`), and find the message that says where its B-tree is.
2. Read the nodes level by level, down to the leaves: all of them, or those below which a box of chunks may be, because the
   chunks are in the order of their numbers. A leaf has an entry for each chunk: size, filter mask, coordinates and address.
3. Refuse whatever is not exactly as expected. Then HDF5 lists the chunks (`chunks`), unless the index is damaged.

Damaged is an index in which HDF5 would not find each chunk that is stored. HDF5 goes down from the root by the keys, which are
positions: an entry has those between its key and the next one. If a key is wrong, a search ends in another node, finds nothing
there, and HDF5 gives fill values, without an error and without counting the chunk as missing. A list of all leaves would have
the chunk. So a load would have both, depending on which parts of it HDF5 reads. `_Search` goes through a tree that is not as
expected, node by node, and says where it contradicts itself. Chunks that share bytes of the file are damage too.

Source: HDF5 File Format Specification, version 3.0, sections III.A.1 (version 1 B-trees) and IV.A.2.i (layout message).
A list of all chunks is compared with what HDF5 has counted in the same open file (`chunks`).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.formats.hdf5.on_disk import DATASPACE, LAYOUT, UNDEFINED, Read, read_header
from shardload.planning.grid import IntArray, ravel

__all__ = ["MOST_ENTRIES", "DamagedIndexError", "Entries", "ListedChunks", "entry_of", "list_tree"]

UIntArray = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
Entries = np.ndarray[Any, Any]
MOST_ENTRIES = 1 << 17  # to read at once: they take 50 bytes for each, twice
_MOST_CHILDREN = 64  # of a node, unless the file's creator chose another number
_CHUNKED = 2
_MOST_LEVELS = 16
_MARK = b"TREE\x01"
_SUPERBLOCK_NBYTES, _HEADER_NBYTES = 48, 16  # at least
_ABOVE_ALL = 256  # a level
_HEAD = struct.Struct("<4sBBHQQ")  # of a node: mark, type, level, number of entries, siblings


def entry_of(ndim: int) -> np.dtype[Any]:
    """An entry of a node, as it is in the file: bytes of the stored chunk, filters left out, the first element's position
    (with a zero behind), and the chunk's offset. Above the leaves: those of a child's first chunk, and the child's offset.
    """
    return np.dtype([("nbytes", "<u4"), ("mask", "<u4"), ("at", "<u8", (ndim + 1,)), ("child", "<u8")])


class DamagedIndexError(ValueError):
    """An index of chunks contradicts itself. Its text says where."""


class _OtherError(Exception):
    """The file is not as this module expects."""


class _TooManyError(Exception):
    """There are more entries than may be read."""


@dataclass(frozen=True, slots=True)
class ListedChunks:
    """Stored chunks, in ascending order of their numbers in the grid of all chunks.

    `entries` has a record for each, as `entry_of` says; ``child`` is the chunk's address.
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

    Raises
    ------
    DamagedIndexError
        If the index contradicts itself, so that HDF5 would not find all stored chunks, or would take one for another.
    """
    try:
        found = _root_of(read, header, len(grid))
    except (struct.error, IndexError, OSError, ValueError):
        return None
    if found is None:
        return None
    root, itemsize, shape = found
    entry = entry_of(len(grid))
    if root == UNDEFINED:  # nothing was ever written
        return ListedChunks(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=entry))
    tree = _Tree(read, header, (*chunk, itemsize), tuple(grid), entry, most)
    try:
        return tree.listed(root, box)
    except DamagedIndexError:
        raise
    except _TooManyError:
        return None
    except (_OtherError, struct.error, IndexError, OSError, ValueError):
        return _Search(tree, shape).listed(root, box)


def _root_of(read: Read, header: int, ndim: int) -> tuple[int, int, tuple[int, ...]] | None:
    """Address of the B-tree (`UNDEFINED` if no chunk was ever written), bytes of an element, shape to which the array may grow.
    None if the index is of another kind.
    """
    shape: tuple[int, ...] = (UNDEFINED,) * ndim
    found = None
    for message in read_header(read, header):
        if message.kind == DATASPACE and not message.is_shared:
            version, n_axes, flags = message.data[:3]
            first = (8 if version == 1 else 4) + (8 * ndim if flags & 1 else 0)
            if n_axes == ndim:
                shape = struct.unpack_from(f"<{ndim}Q", message.data, first)
        if message.kind == LAYOUT:
            version, layout, n_axes = message.data[:3]
            if message.is_shared or (version, layout, n_axes) != (3, _CHUNKED, ndim + 1):
                return None
            root, *_, itemsize = struct.unpack_from(f"<Q{ndim + 1}I", message.data, 3)
            found = (root, itemsize) if itemsize else None
    return None if found is None else (*found, shape)


def _in_order(starts: UIntArray, sizes: UIntArray) -> tuple[UIntArray, UIntArray]:
    """Places of chunks in the order in which they are in the file."""
    if not (starts[1:] < starts[:-1]).any():
        return starts, sizes
    if int(starts.max()) >> 40 == 0 and int(sizes.max()) >> 24 == 0:  # one number for both is sorted in half of the time
        both = np.sort(starts << np.uint64(24) | sizes)
        return both >> np.uint64(24), both & np.uint64((1 << 24) - 1)
    order = np.argsort(starts)
    return starts[order], sizes[order]


def _scaled(at: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """A key as HDF5 compares it: the position in the grid of all chunks, and a last number that is 0 for a chunk."""
    return tuple([a // c for a, c in zip(at, chunk, strict=True)])


@dataclass(frozen=True, slots=True)
class _Tree:
    """See `list_tree`. The last number of `chunk` is the bytes of an element, as in keys."""

    read: Read
    header: int
    chunk: tuple[int, ...]
    grid: tuple[int, ...]
    entry: np.dtype[Any]
    most: int

    def listed(self, root: int, box: Sequence[range] | None) -> ListedChunks:
        """The chunks of a box, or all, in the leaves below a node."""
        first = last = None
        if box is not None:
            first, last = ravel([axis.start for axis in box], self.grid), ravel([axis.stop - 1 for axis in box], self.grid)
        nodes, lows, highs = [root], None, None  # and the keys on both sides of each, as the node above says
        seen: list[tuple[int, int]] = []  # nodes: where, and bytes of their entries
        level = int(_HEAD.unpack_from(self.read(root, _HEAD.size))[2])
        for _ in range(_MOST_LEVELS):
            parts, last_keys = zip(*[self._node(node, level) for node in nodes], strict=True)
            found = np.frombuffer(b"".join(parts), dtype=self.entry)
            rights = np.frombuffer(b"".join(last_keys), dtype="<u8").reshape(len(parts), -1)
            seen += zip(nodes, map(len, parts), strict=True)
            if len(found) > self.most:
                raise _TooManyError
            numbers, keys = self._numbers(found), found["at"]
            if (numbers[1:] <= numbers[:-1]).any() or not self._is_behind(rights[-1], keys[-1]):
                raise _OtherError
            ends = list(itertools.accumulate([len(part) // self.entry.itemsize for part in parts]))
            if lows is not None and ((keys[[0, *ends[:-1]]] != lows).any() or (rights != highs).any()):
                raise _OtherError
            low, high = 0, len(found)  # of what is wanted
            if first is not None and last is not None:
                # A child has the numbers from its own up to that of the next one, which may be the node's that comes after.
                low = (
                    max(0, int(np.searchsorted(numbers, first, "right")) - 1) if level else int(np.searchsorted(numbers, first))
                )
                high = int(np.searchsorted(numbers, last, "right"))
            if level == 0:
                self.check_places(found[low:high], seen)
                return self._inside(numbers[low:high], found[low:high], box)
            nexts = np.concatenate([keys[1:], rights[-1:]])
            nexts[np.array(ends) - 1] = rights
            found, lows, highs = found[low:high], keys[low:high], nexts[low:high]
            nodes = found["child"].tolist()
            if len(set(nodes)) < len(nodes):
                raise _OtherError
            if not nodes:
                return ListedChunks(numbers[low:high], found)
            level -= 1
        raise _OtherError

    def _node(self, node: int, level: int) -> tuple[bytes, bytes]:
        """Its entries, and the position in the key behind the last of them."""
        size = self.entry.itemsize
        usual = _HEAD.size + (_MOST_CHILDREN + 1) * size - 8  # the last key leads to no child
        data = self.read(node, usual)
        mark, kind, its_level, n, _, _ = _HEAD.unpack_from(data)
        if (mark, kind, its_level) != (b"TREE", 1, level) or not n:
            raise _OtherError
        stop = _HEAD.size + (n + 1) * size - 8
        if stop > usual:
            data = self.read(node, stop)
        if len(data) < stop:
            raise _OtherError
        return data[_HEAD.size : stop - size + 8], data[stop - size + 16 : stop]

    def _is_behind(self, key: IntArray, entry: IntArray) -> bool:
        """True if a key is behind the chunk that begins at another one. The keys between nodes are those of entries."""
        return _scaled(key.tolist(), self.chunk) > _scaled(entry.tolist(), self.chunk)

    def check_places(self, entries: Entries, nodes: list[tuple[int, int]]) -> None:
        """DamagedIndexError if bytes of the file belong to two chunks, or to a chunk and to the index, header or superblock."""
        starts, sizes = _in_order(np.ascontiguousarray(entries["child"]), np.ascontiguousarray(entries["nbytes"]))
        stops = starts + sizes
        overlaps = np.flatnonzero((stops[:-1] > starts[1:]) & (starts[1:] != UNDEFINED))
        if len(overlaps):
            k = int(overlaps[0])
            raise DamagedIndexError(
                f"its index of chunks is damaged: {self._told(entries, starts[k], sizes[k])}, "
                f"{self._told(entries, starts[k + 1], sizes[k + 1], last=True)}"
            )
        at, nbytes = np.array([(0, _SUPERBLOCK_NBYTES), (self.header, _HEADER_NBYTES), *nodes], dtype=np.uint64).T
        before = np.searchsorted(starts, at + nbytes)  # the last chunk that begins before one of them ends, and 1
        overlaps = np.flatnonzero((before > 0) & (stops[before - 1] > at)) if len(stops) else before[:0]
        if len(overlaps):
            k, place = int(before[overlaps[0]]) - 1, int(at[overlaps[0]])
            told = self._told(entries, starts[k], sizes[k])
            raise DamagedIndexError(f"its index of chunks is damaged: {told}, where the file's metadata is (at byte {place})")

    def _told(self, entries: Entries, start: Any, nbytes: Any, *, last: bool = False) -> str:
        found = np.flatnonzero((entries["child"] == start) & (entries["nbytes"] == nbytes))
        place = tuple(entries["at"][found[-1 if last else 0], :-1].tolist())
        return f"the chunk that begins at element {place} is stored at bytes {start} to {int(start) + int(nbytes)}"

    def _numbers(self, entries: Entries) -> IntArray:
        """The numbers of chunks in the grid."""
        at = entries["at"]
        numbers: IntArray = np.zeros(len(entries), dtype=np.int64)
        for k, (c, count) in enumerate(zip(self.chunk[:-1], self.grid, strict=True)):
            axis = np.ascontiguousarray(at[:, k])
            place = axis // c  # much faster than divmod
            if place.max() >= count or (place * c != axis).any():
                raise _OtherError
            numbers = place.view(np.int64) if k == 0 else numbers * count + place.view(np.int64)
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


@dataclass(frozen=True, slots=True)
class _Search:
    """Goes through a tree, node by node, and asks whether HDF5's search finds each of its entries. Slower than `_Tree`, with
    whatever HDF5 allows.

    After an append that was killed, for instance, chunks are outside of the array. `largest` is the shape that it may grow to.
    """

    tree: _Tree
    largest: tuple[int, ...]

    def listed(self, root: int, box: Sequence[range] | None) -> ListedChunks | None:
        """The chunks of a box, or all that are inside of the array; None if they are too many. DamagedIndexError if one of the
        tree would not be found.
        """
        wanted = [range(n) for n in self.tree.grid] if box is None else box
        chunk = self.tree.chunk
        # Nodes, the level above each, and the keys between which all of its entries must be.
        todo: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [(root, _ABOVE_ALL, (-1,), (UNDEFINED + 1,))]
        stored: list[Any] | None = []
        nodes: list[tuple[int, int]] = []
        while todo:
            node, above, low, high = todo.pop()
            level, rows = self._node(node, above)
            nodes.append((node, rows.nbytes))
            keys = [_scaled(at, chunk) for at in rows["at"].tolist()]
            if len(keys) < 2 and (level > 0 or above < _ABOVE_ALL):  # an array that was cut to nothing has an empty root
                raise self._damaged(node, "it has no entries")
            for k, (key, following) in enumerate(itertools.pairwise(keys)):
                *at, rest = rows["at"][k].tolist()
                what = f"entry {k}, at element {tuple(at)}, is"
                if not key < following:
                    raise self._damaged(node, f"{what} not before the next one", lost=True)
                if level > 0:
                    todo.append((int(rows["child"][k]), level, max(low, key), min(high, following)))
                elif rest or any(a % c for a, c in zip(at, chunk, strict=False)):
                    raise self._damaged(node, f"{what} where no chunk begins", lost=True)
                elif any(a >= n for a, n in zip(at, self.largest, strict=True)):
                    raise self._damaged(node, f"{what} outside of the array, whose largest shape is {self.largest}", lost=True)
                elif not low <= key < high:
                    raise self._damaged(node, f"{what} not between the keys that lead to this node", lost=True)
                elif stored is not None and all(a in axis for a, axis in zip(key, wanted, strict=False)):
                    stored.append(rows[k])
                    stored = None if len(stored) > self.tree.most else stored
        if stored is None:
            return None
        entries = np.array(stored, dtype=self.tree.entry)
        numbers = np.array([ravel(_scaled(at, chunk)[:-1], self.tree.grid) for at in entries["at"].tolist()], dtype=np.int64)
        order = np.argsort(numbers)
        self.tree.check_places(entries[order], nodes)
        return ListedChunks(numbers[order], entries[order])

    def _node(self, node: int, above: int) -> tuple[int, Entries]:
        """The level of a node, and its entries with a last one that leads nowhere."""
        size = self.tree.entry.itemsize
        try:
            head = self.tree.read(node, _HEAD.size)
            mark, kind, level, n, _, _ = _HEAD.unpack(head)
            data = self.tree.read(node + _HEAD.size, (n + 1) * size - 8)
        except (struct.error, OSError, OverflowError, ValueError):
            raise self._damaged(node, "it lies outside of the file") from None
        if (mark, kind) != (b"TREE", 1):
            raise self._damaged(node, f"it begins with {head[:5]!r} in place of {_MARK!r}")
        if above < _ABOVE_ALL and level != above - 1:
            raise self._damaged(node, f"it is of level {level}, below one of level {above}")
        if len(data) < (n + 1) * size - 8:
            raise self._damaged(node, f"its {n} entries reach past the end of the file")
        return level, np.frombuffer(data + bytes(8), self.tree.entry)

    def _damaged(self, node: int, what: str, *, lost: bool = False) -> DamagedIndexError:
        more = ". The HDF5 library would not find a stored chunk, and give fill values in its place" if lost else ""
        return DamagedIndexError(f"its index of chunks is damaged: in the node at byte {node} of the file, {what}{more}")
