"""Where are all chunks of an HDF5 dataset, by the file's own index?

HDF5 tells where its chunks are one by one, each as an object of Python: 1.3 microseconds for each, on every rank that reads.
The index of most files is a version 1 B-tree: nodes of some 60 entries, which NumPy takes as they are, in a tenth of that time.

1. Read the object header of the dataset, of version 1 or 2, in all its blocks, and find the message that says where its B-tree
   is.
2. Read the nodes level by level, down to the leaves: those below which a box of chunks may be, because the chunks are in the
   order of their positions. A leaf has an entry for each chunk: size, filter mask, position and address. The nodes of a level
   are read at once: of an object in a store that takes as long as reading one.
3. An index that contradicts itself is damaged, and an error. HDF5 goes down from the root by the keys, which are positions: an
   entry has those between its key and the next one. If a key is wrong, a search ends in another node, finds nothing there, and
   HDF5 gives fill values, without an error. Chunks that share bytes of the file are damage too.

Source: HDF5 File Format Specification, version 3.0, sections III.A.1 (version 1 B-trees), IV.A (object headers) and IV.A.2.i
(layout message).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.storage.objects import Ranges, StoredObject

UNDEFINED = 2**64 - 1  # an address that is none
_DATASPACE, _LAYOUT, _CONTINUATION = 0x01, 0x08, 0x10  # messages of an object header
_SHARED = 2  # a bit of a message's flags: its content is elsewhere
_MOST_BLOCKS, _MOST_HEADER_NBYTES = 1024, 1 << 20  # of a header; all of its messages are kept
Ints = np.ndarray[Any, np.dtype[np.int64]]
Entries = np.ndarray[Any, Any]
MOST_ENTRIES = 1 << 17  # chunks to look for at once: they take 50 bytes for each, twice
_MOST_CHILDREN = 64  # of a node, unless the file's creator chose another number
_CHUNKED = 2
_MOST_LEVELS = 16
_LOST = "The HDF5 library would not find a stored chunk, and give fill values in its place"
_SUPERBLOCK_NBYTES, _HEADER_NBYTES = 48, 16  # at least
_HEAD = struct.Struct("<4sBBHQQ")  # of a node: mark, type, level, number of entries, siblings


class DamagedIndexError(ValueError):
    """An index of chunks contradicts itself. Its text says where."""

    def __init__(self, what: str) -> None:
        super().__init__(f"its index of chunks is damaged: {what}")


@dataclass(frozen=True)
class ChunkTree:
    """A version 1 B-tree of chunks.

    Attributes
    ----------
    stored : StoredObject
        The file.
    header, root : int
        Addresses of the dataset's object header, and of the tree; `UNDEFINED` if no chunk was ever written.
    chunk : tuple of int
        Elements of a chunk along each axis, then the bytes of an element, as in keys.
    largest : tuple of int
        The shape that the array may grow to.
    """

    stored: StoredObject
    header: int
    root: int
    chunk: tuple[int, ...]
    largest: tuple[int, ...]

    def chunks_in(self, box: Sequence[range]) -> tuple[Ints, Entries]:
        """The position in the grid, and the entry, of each stored chunk of a box, in C order. DamagedIndexError if the index
        contradicts itself on the way to them.
        """
        # An entry of a node, as it is in the file: bytes of the stored chunk, filters left out, the first element's position
        # (with a zero behind), and the chunk's offset. Above the leaves: those of a child's first chunk, and the child's
        # offset.
        entry = np.dtype([("nbytes", "<u4"), ("mask", "<u4"), ("at", "<u8", (len(box) + 1,)), ("child", "<u8")])
        if self.root == UNDEFINED:
            return np.zeros((0, len(box)), dtype=np.int64), np.zeros(0, dtype=entry)
        first, last = (np.array([[*(end(axis) for axis in box), 0]], dtype=np.int64) for end in (min, max))
        nodes, lows, highs = [self.root], None, None  # and the keys on both sides of each, as the node above says
        seen: list[tuple[int, int]] = []  # nodes: where, and bytes of their entries
        head = self.stored.read_at_most(self.root, _HEAD.size) if self.root < self.stored.nbytes else b""
        level = int(_HEAD.unpack(head)[2]) if len(head) == _HEAD.size else 0  # `_nodes` says that it is outside of the file
        if level > _MOST_LEVELS:
            raise DamagedIndexError(f"it has {level} levels")
        while True:
            parts = self._entries(nodes, level, entry)
            entries = np.concatenate([part for part, _ in parts])
            counts = np.array([len(part) for part, _ in parts])
            seen += zip(nodes, (counts * entry.itemsize).tolist(), strict=True)
            if not len(entries) and not level and nodes == [self.root]:  # an array that was cut to nothing has an empty root
                return np.zeros((0, len(box)), dtype=np.int64), entries
            if not counts.all():
                raise DamagedIndexError("a node has no entries")
            keys, rights = self._scaled(entries["at"]), self._scaled(np.concatenate([right for _, right in parts]))
            ends = np.cumsum(counts)
            nexts = np.concatenate([keys[1:], rights[-1:]])
            nexts[ends - 1] = rights
            self._check_order(keys, nexts, ends, lows, highs)
            # A child has the positions from its key up to the next one.
            is_wanted = ~_is_before(last, keys) & (_is_before(first, nexts) if level else ~_is_before(keys, first))
            if level == 0:
                self._check_leaves(entries, keys)
                at = keys[:, :-1]
                for axis, places in zip(box, at.T, strict=True):
                    is_wanted &= (places >= axis.start) & (places < axis.stop)
                self._check_places(entries[is_wanted], seen)
                return at[is_wanted], entries[is_wanted]
            entries, lows, highs = entries[is_wanted], keys[is_wanted], nexts[is_wanted]
            nodes = entries["child"].tolist()
            if len(set(nodes)) < len(nodes):
                raise DamagedIndexError("two entries lead to one node")
            if not nodes:
                return np.zeros((0, len(box)), dtype=np.int64), entries
            level -= 1

    def _nodes(self, nodes: list[int], nbytes: int) -> list[memoryview]:
        """So many bytes of each node, fewer where the file ends."""
        n_all = self.stored.nbytes
        for node in nodes:
            if node + _HEAD.size > n_all:
                raise DamagedIndexError(f"a node at byte {node} lies outside of the file")
        offsets = np.array(nodes, dtype=np.int64)
        ranges = Ranges(offsets, np.minimum(nbytes, n_all - offsets))
        return self.stored.read_ranges(ranges, np.empty(ranges.nbytes, dtype=np.uint8))

    def _entries(self, nodes: list[int], level: int, entry: np.dtype[Any]) -> list[tuple[Entries, Ints]]:
        """The entries of each node, and the position in the key behind the last of them."""
        usual = _HEAD.size + (_MOST_CHILDREN + 1) * entry.itemsize - 8  # the last key leads to no child
        contents, stops = self._nodes(nodes, usual), list[int]()
        for node, data in zip(nodes, contents, strict=True):
            mark, kind, found, n, _, _ = _HEAD.unpack_from(data)
            if (mark, kind, found) != (b"TREE", 1, level):
                raise DamagedIndexError(f"the node at byte {node} is {mark!r} of level {found}, expected level {level}")
            stops.append(_HEAD.size + (n + 1) * entry.itemsize - 8)
        if max(stops) > usual:
            contents = self._nodes(nodes, max(stops))
        parts = []
        for node, data, stop in zip(nodes, contents, stops, strict=True):
            if len(data) < stop:
                n = (stop + 8 - _HEAD.size) // entry.itemsize - 1
                raise DamagedIndexError(f"the {n} entries of the node at byte {node} reach past the end of the file")
            entries = np.frombuffer(bytes(data[_HEAD.size : stop]) + bytes(8), dtype=entry)
            parts.append((entries[:-1], entries["at"][-1:]))
        return parts

    def _scaled(self, at: Entries) -> Ints:
        """Keys as HDF5 compares them: positions in the grid of all chunks, and a last number that is 0 for a chunk."""
        return (at // np.array(self.chunk, dtype=np.uint64)).astype(np.int64)

    def _check_order(self, keys: Ints, nexts: Ints, ends: Ints, lows: Ints | None, highs: Ints | None) -> None:
        is_lost = ~_is_before(keys, nexts)
        if lows is not None and highs is not None:
            firsts = np.concatenate([[0], ends[:-1]])
            is_lost[firsts] |= _is_before(keys[firsts], lows)
            is_lost[ends - 1] |= ~_is_before(keys[ends - 1], highs)
        if is_lost.any():
            raise DamagedIndexError(
                f"the entry for the chunk at {tuple(keys[is_lost.argmax(), :-1].tolist())} is out of order. {_LOST}"
            )

    def _check_leaves(self, entries: Entries, keys: Ints) -> None:
        at = entries["at"]
        is_wrong = (keys * np.array(self.chunk, dtype=np.int64) != at.astype(np.int64)).any(axis=1) | (at[:, -1] != 0)
        is_wrong |= (at[:, :-1] >= np.array(self.largest, dtype=np.uint64)).any(axis=1)
        if is_wrong.any():
            raise DamagedIndexError(
                f"a chunk at element {tuple(at[is_wrong.argmax(), :-1].tolist())}, where none begins. {_LOST}"
            )

    def _check_places(self, entries: Entries, nodes: list[tuple[int, int]]) -> None:
        """DamagedIndexError if bytes of the file belong to two chunks, or to a chunk and to the index, header or superblock."""
        others = np.array([(0, _SUPERBLOCK_NBYTES), (self.header, _HEADER_NBYTES), *nodes], dtype=np.uint64)
        starts = np.concatenate([entries["child"], others[:, 0]])
        stops = starts + np.concatenate([entries["nbytes"].astype(np.uint64), others[:, 1]])
        order = np.argsort(starts)
        starts, stops = starts[order], stops[order]
        overlaps = (stops[:-1] > starts[1:]) & (starts[1:] != UNDEFINED)
        if overlaps.any():
            k = int(overlaps.argmax())
            raise DamagedIndexError(f"a chunk and another one, or metadata, share the bytes {starts[k + 1]} to {stops[k]}")


def _is_before(one: Ints, other: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each row: does it come before the other one in C order?

    >>> _is_before(np.array([[0, 4], [1, 0], [2, 2]]), np.array([[0, 5], [0, 9], [2, 2]])).tolist()
    [True, False, False]
    """
    is_less, is_equal = np.zeros((), dtype=bool), np.ones((), dtype=bool)
    for a, b in zip(one.T, other.T, strict=True):
        is_less = is_less | (is_equal & (a < b))
        is_equal = is_equal & (a == b)
    return is_less


def _messages_of(stored: StoredObject, address: int) -> list[tuple[int, bytes]]:
    """The messages of an object header that are in it: type and content. ValueError if it is of an unknown kind, or damaged.

    Checksums are not looked at: HDF5 does that when it opens a dataset.
    """
    head = stored.read_at_most(address, 16)
    is_newer = head.startswith(b"OHDR\2")
    if is_newer:
        flags, at = head[5], 6 + (16 if head[5] & 32 else 0) + (4 if head[5] & 16 else 0)
        width, prefix = 1 << (flags & 3), 6 if flags & 4 else 4
        blocks = [(address + at + width, int.from_bytes(stored.read_at_most(address + at, width), "little"))]
    elif head[:1] == b"\1":
        prefix, blocks = 8, [(address + 16, int.from_bytes(head[8:12], "little"))]
    else:
        raise ValueError(f"an object header that begins with {head[:4]!r} at {address}")
    found = []
    for k, (start, nbytes) in enumerate(blocks):  # grows: each continuation is one more block
        if k > _MOST_BLOCKS or sum(length for _, length in blocks) > _MOST_HEADER_NBYTES:
            raise ValueError(f"an object header that is too long, at {start}")
        data, at = stored.read_at_most(start, nbytes), 0
        if len(data) < nbytes:
            raise ValueError(f"an object header that is cut off, at {start}")
        while at + prefix <= nbytes:  # what is left may be a gap that is too short for a message
            kind, size, flags = struct.unpack_from("<BHB" if is_newer else "<HHB", data, at)
            content = data[at + prefix : at + prefix + size]
            if len(content) < size:
                raise ValueError(f"an object header with a message that is too long, at {start + at}")
            if not flags & _SHARED:
                found.append((kind, content))
            if kind == _CONTINUATION:  # in the newer version with a mark before its messages, and a checksum behind
                start_next, nbytes_next = struct.unpack_from("<QQ", content)
                blocks.append((start_next + 4, nbytes_next - 8) if is_newer else (start_next, nbytes_next))
            at += prefix + size
    return found


def tree_of(stored: StoredObject, header: int, chunk: Sequence[int]) -> ChunkTree | None:
    """The index of a dataset; None if it is of another kind, or anything is unusual.

    Parameters
    ----------
    stored : StoredObject
        The file.
    header : int
        Address of the dataset's object header.
    chunk : sequence of int
        Elements of a chunk along each axis.
    """
    ndim = len(chunk)
    largest: tuple[int, ...] = (UNDEFINED,) * ndim
    found = None
    try:
        for kind, content in _messages_of(stored, header):
            if kind == _DATASPACE:
                version, n_axes, flags = content[:3]
                first = (8 if version == 1 else 4) + (8 * ndim if flags & 1 else 0)
                if n_axes == ndim:
                    largest = struct.unpack_from(f"<{ndim}Q", content, first)
            if kind == _LAYOUT:
                version, layout, n_axes = content[:3]
                if (version, layout, n_axes) != (3, _CHUNKED, ndim + 1):
                    return None
                root, *_, itemsize = struct.unpack_from(f"<Q{ndim + 1}I", content, 3)
                found = (root, itemsize) if itemsize else None
    except (struct.error, IndexError, OSError, ValueError):
        return None
    return None if found is None else ChunkTree(stored, header, found[0], (*chunk, found[1]), largest)
