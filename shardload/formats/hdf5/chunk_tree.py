"""How does the index of a dataset's chunks get new entries, when none of its bytes may change? By a new path to the old nodes.

The index is a B-tree of version 1. Its entries are in the order of the chunks' positions, and each node has up to 64 children.
The new tree takes over all old nodes that lie before the first chunk that is new. The others are written again elsewhere, with
the new entries, and so are the nodes above them up to the root:

1. `grown` goes down to the leaf where the first new chunk belongs. What is before it stays; what comes behind it is collected.
2. Entries that the new ones replace are left out, the new ones sorted in.
3. Leaves are packed full, then the nodes above them. All links to siblings are those of the new tree, but one for each
   level: the old node before the first new one leads to the node that came there before. `Grown.links` has the writes
   that change this. No reader needs them: HDF5 goes down from the root for each chunk, and to list all.

References
----------
The HDF Group, "HDF5 File Format Specification Version 3.0", section III.A.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.formats.hdf5.on_disk import UNDEFINED, Patch, Read, UnknownError

__all__ = ["MOST_CHILDREN", "ChunkTree", "Entries", "Grown", "entry_of"]

Entries = np.ndarray[Any, Any]
MOST_CHILDREN = 64  # of a node, unless the file's creator chose another number
_HEAD = 24  # bytes of a node before its entries
_AT_ONCE = 1024  # nodes that are made together
_MOST_LEVELS = 32


def entry_of(ndim: int) -> np.dtype[Any]:
    """An entry of a node, as it is in the file: bytes of the stored chunk, filters left out, the first element's position
    (with a zero behind), and the chunk's offset. Above the leaves: those of a child's first chunk, and the child's offset.
    """
    return np.dtype([("nbytes", "<u4"), ("mask", "<u4"), ("at", "<u8", (ndim + 1,)), ("child", "<u8")])


@dataclass(frozen=True)
class ChunkTree:
    """The index of one dataset.

    Parameters
    ----------
    chunks : tuple of int
        Elements of a chunk.
    itemsize : int
        Bytes of an element.
    n_children : int
        Children that a node has at most.
    """

    chunks: tuple[int, ...]
    itemsize: int
    n_children: int = MOST_CHILDREN

    @property
    def entry(self) -> np.dtype[Any]:
        """See `entry_of`."""
        return entry_of(len(self.chunks))

    @property
    def node_nbytes(self) -> int:
        """Bytes of a node, full or not."""
        return _HEAD + self.n_children * self.entry.itemsize + self.entry.itemsize - 8

    def entries(self, index: Any, offsets: Any, nbytes: Any, masks: Any = 0) -> Entries:
        """Entries of chunks, given by their positions in the grid of chunks."""
        found = np.zeros(len(index), self.entry)
        found["at"][:, :-1] = np.asarray(index).reshape(len(index), -1) * np.array(self.chunks)
        found["child"], found["nbytes"], found["mask"] = offsets, nbytes, masks
        return found

    def grown(self, read: Read, root: int, axis: int, base: int, new: Entries, place: int) -> Grown:
        """The tree with new entries.

        Parameters
        ----------
        read : callable
            Reads the file.
        root : int
            Offset of the old tree's root, or `UNDEFINED`.
        axis, base : int
            Old entries from this element on along this axis are left out. All new ones are there.
        new : ndarray of `entry`
            New entries, in any order; at least one if the tree has some.
        place : int
            Where new nodes go: all behind this offset.

        Raises
        ------
        UnknownError
            If the old tree is damaged.
        """
        if np.any(new["at"][:, axis] < base):
            raise ValueError(f"a new chunk lies before element {base} of axis {axis}")
        first = [0] * (len(self.chunks) + 1)
        first[axis] = base
        path = _Path(self, read, root, tuple(first))
        rest = path.rest
        rest = rest[rest["at"][:, axis] < base]
        entries = np.concatenate([rest, new])
        entries = entries[np.lexsort(entries["at"].T[::-1])]
        return self._built(entries, path, place)

    def _built(self, entries: Entries, path: _Path, place: int) -> Grown:
        made = Grown(UNDEFINED, place)
        if not len(entries):
            return made
        last = np.zeros(1, self.entry)  # behind the last entry: nothing, from the next chunk along each axis on
        last["at"][0] = entries["at"][-1] + np.array([*self.chunks, self.itemsize], "<u8")
        level = 0
        while True:
            n_nodes = -(-len(entries) // self.n_children)
            offsets = made.end + np.arange(n_nodes, dtype=np.uint64) * np.uint64(self.node_nbytes)
            left = path.left[level] if level < len(path.left) else UNDEFINED
            made.nodes.append((made.end, level, entries, left, last, self))
            if left != UNDEFINED and n_nodes:
                made.links.append(path.link(left, int(offsets[0])))
            made.end += n_nodes * self.node_nbytes
            above = entries[:: self.n_children].copy()
            above["child"] = offsets
            level += 1
            shared = path.shared[level] if level < len(path.shared) else entries[:0]
            entries = np.concatenate([shared, above])
            if len(entries) == 1 and not any(len(one) for one in path.shared[level:]):
                made.root = int(entries["child"][0])
                return made

    def node(self, read: Read, offset: int) -> tuple[int, Entries, int]:
        """A node: its level, its entries, and where the one before it on its level is. UnknownError if there is none."""
        data = read(offset, self.node_nbytes)
        n = int.from_bytes(data[6:8], "little")
        if len(data) < self.node_nbytes or data[:5] != b"TREE\1" or n > self.n_children or data[5] >= _MOST_LEVELS:
            raise UnknownError(f"an index of chunks without a node at {offset}")
        return data[5], np.frombuffer(data, self.entry, n, _HEAD), int.from_bytes(data[8:16], "little")


class _Path:
    """The way down an old tree to where the first new entry belongs.

    Attributes
    ----------
    shared : list of ndarray
        By level: the entries of the node on the way that lie before it. They lead to nodes that stay.
    left : list of int
        By level: the node before that on the way.
    rest : ndarray
        The entries of leaves from the one on the way on.
    """

    def __init__(self, tree: ChunkTree, read: Read, root: int, first: tuple[int, ...]) -> None:
        self._tree, self._read = tree, read
        self.shared: list[Entries] = []
        self.left: list[int] = []
        self.rest: Entries = np.zeros(0, tree.entry)
        if root == UNDEFINED:
            return
        level, entries, left = tree.node(read, root)
        self.shared, self.left = [entries[:0]] * (level + 1), [UNDEFINED] * (level + 1)
        behind: list[Entries] = []  # of each level, from the root: what comes after the way
        while True:
            self.left[level] = left
            if level == 0:
                break
            # A child that begins with the first new entry is on the way; so is the last, if all begin before it.
            at = max(0, sum(tuple(one) <= first for one in entries["at"].tolist()) - 1)
            self.shared[level] = entries[:at]
            behind.append(entries[at + 1 :])
            below, entries, left = tree.node(read, int(entries["child"][at]))
            if below != level - 1:
                raise UnknownError(f"an index of chunks with a node of level {below} below one of level {level}")
            level = below
        leaves = [entries]
        for one in reversed(behind):
            level += 1
            for child in one["child"].tolist():
                leaves += self._leaves(child, level - 1)
        self.rest = np.concatenate(leaves)

    def _leaves(self, offset: int, level: int) -> Iterator[Entries]:
        found, entries, _ = self._tree.node(self._read, offset)
        if found != level:
            raise UnknownError(f"an index of chunks with a node of level {found} in place of {level}")
        if level == 0:
            yield entries
            return
        for child in entries["child"].tolist():
            yield from self._leaves(child, level - 1)

    def link(self, node: int, to: int) -> Patch:
        """The write that makes a node lead to the one behind it."""
        return Patch(node + 16, self._read(node + 16, 8), to.to_bytes(8, "little"))


@dataclass
class Grown:
    """A tree with new entries.

    Attributes
    ----------
    root : int
        Offset of its root.
    end : int
        Behind the last new node.
    links : list of Patch
        Writes into old nodes, which may be left out.
    """

    root: int
    end: int
    links: list[Patch] = field(default_factory=list)
    nodes: list[tuple[int, int, Entries, int, Entries, ChunkTree]] = field(default_factory=list)

    def write(self, put: Callable[[bytes, int], None]) -> None:
        """``put(data, offset)`` all new nodes."""
        for place, level, entries, left, last, tree in self.nodes:
            size, n_most = tree.node_nbytes, tree.n_children
            n_nodes = -(-len(entries) // n_most)
            for begin in range(0, n_nodes, _AT_ONCE):
                some = range(begin, min(begin + _AT_ONCE, n_nodes))
                data = np.zeros((len(some), size), np.uint8)
                for k, node in enumerate(some):
                    mine = entries[node * n_most : (node + 1) * n_most]
                    following = entries[(node + 1) * n_most : (node + 1) * n_most + 1]
                    before = left if node == 0 else place + (node - 1) * size
                    after = UNDEFINED if node == n_nodes - 1 else place + (node + 1) * size
                    head = b"TREE\1" + bytes([level]) + len(mine).to_bytes(2, "little")
                    head += before.to_bytes(8, "little") + after.to_bytes(8, "little")
                    key = (following if len(following) else last).tobytes()[:-8]
                    row = head + mine.tobytes() + key
                    data[k, : len(row)] = np.frombuffer(row, np.uint8)
                put(data.tobytes(), place + begin * size)
