"""Does HDF5 read the index of chunks that is written here, and does the old one stay as it was?"""

from __future__ import annotations

import io
import itertools
import math
import random
from typing import Any

import h5py
import numpy as np
import pytest

from shardload.formats.hdf5.chunk_tree import ChunkTree, Grown
from shardload.formats.hdf5.growable import Facts
from shardload.formats.hdf5.on_disk import UNDEFINED, UnknownError, read_superblock
from tests.tiers import quick_ones

Place = tuple[int, int, int]
CHUNKS = (3, 2, 5, 4)
GRIDS = ((5000,), (40, 130), (9, 10, 60), (5, 6, 7, 30))  # of 5000 chunks and more


class File:
    """The bytes of a file with one dataset, which has its first chunks."""

    def __init__(self, grid: tuple[int, ...], n: int = 0) -> None:
        self.grid, self.chunks = grid, CHUNKS[: len(grid)]
        file = io.BytesIO()
        with h5py.File(file, "w", libver="earliest") as made:
            shape = self.at(grid)
            x = made.create_dataset("x", shape, "u1", chunks=self.chunks, maxshape=[None] * len(grid))
            for index in itertools.islice(np.ndindex(*grid), n):
                x.id.write_direct_chunk(self.at(index), bytes(math.prod(self.chunks)))
        self.data = bytearray(file.getvalue())
        self.superblock = read_superblock(self.read)
        self.look()
        self.expected = self.told() if n else {}

    def at(self, index: Any) -> tuple[int, ...]:
        """Where a chunk begins."""
        return tuple(int(k) * c for k, c in zip(index, self.chunks, strict=True))

    def look(self) -> None:
        """Read the header."""
        with h5py.File(io.BytesIO(self.data), "r") as file:
            self.spots = Facts.of(file["x"], self.superblock).spots(self.read)

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.data[offset : offset + nbytes])

    def put(self, data: bytes, offset: int) -> None:
        assert offset >= len(self.data)  # nothing old is written over
        self.data += bytes(offset - len(self.data)) + data

    def grow(self, index: Any, axis: int = 0, base: int = 0, *, links: bool = True) -> Grown:
        """Add chunks at made-up places, in place of all from `base` on."""
        places: list[Place] = [(1000 + 7 * k, 11 + k, k % 4) for k in range(len(index))]
        tree, place = self.spots.tree, -(-len(self.data) // 8) * 8
        new = tree.entries(np.array(index), *map(np.array, zip(*places, strict=True)))
        grown = tree.grown(self.read, self.spots.root, axis, base * self.chunks[axis], new, place)
        grown.write(self.put)
        assert len(self.data) == grown.end
        end, root = self.superblock.end_spot, self.spots.index
        for patch in (end.changed(self.read, grown.end), root.changed(self.read, grown.root), *(grown.links if links else ())):
            assert self.read(patch.offset, len(patch.old)) == patch.old
            self.data[patch.offset : patch.offset + len(patch.new)] = patch.new
        kept = {at: one for at, one in self.expected.items() if at[axis] < base * self.chunks[axis]}
        self.expected = kept | {self.at(one): place for one, place in zip(index, places, strict=True)}
        self.look()
        return grown

    def told(self) -> dict[tuple[int, ...], Place]:
        """What HDF5 finds, when it goes through all; and when it looks up some, and some that are not there."""
        found: list[Any] = []
        with h5py.File(io.BytesIO(self.data), "r") as file:
            x = file["x"].id
            x.chunk_iter(found.append)
            places = {one.chunk_offset: (one.byte_offset, one.size, one.filter_mask) for one in found}
            assert list(places) == sorted(places) and x.get_num_chunks() == len(found) == len(places)
            for index in random.Random(1).sample(list(np.ndindex(*self.grid)), min(200, math.prod(self.grid))):
                one = x.get_chunk_info_by_coord(self.at(index))
                expected = places.get(self.at(index), (None, 0, one.filter_mask))  # of a missing chunk it is undefined
                assert (one.byte_offset, one.size, one.filter_mask) == expected, index
        return places

    def walk(self) -> list[list[int]]:
        """The nodes of each level, the root's first, by their links to the right. Those to the left must be the same."""
        levels, node = [], self.spots.root
        while True:
            level, entries, left = self.spots.tree.node(self.read, node)
            assert left == UNDEFINED
            row = [node]
            while (right := int.from_bytes(self.read(row[-1] + 16, 8), "little")) != UNDEFINED:
                assert self.spots.tree.node(self.read, right)[2] == row[-1]
                row.append(right)
            if levels:  # and by what is above
                above = [child for one in levels[-1] for child in self.spots.tree.node(self.read, one)[1]["child"].tolist()]
                assert row == above
            levels.append(row)
            if level == 0:
                return levels
            node = int(entries["child"][0])


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{len(grid)} axes")
def test_a_first_index(grid: tuple[int, ...]) -> None:
    """Wrong if a node were too full, a key not that of its child, a level missing, or axes were exchanged."""
    every = list(np.ndindex(*grid))
    for n, nodes in ((1, [1]), (63, [1]), (64, [1]), (65, [1, 2]), (5000, [1, 2, 79])):
        file = File(grid)
        grown = file.grow(random.Random(n).sample(every, n))
        assert file.told() == file.expected and len(file.expected) == n and not grown.links
        assert [len(row) for row in file.walk()] == nodes


GROWING = [(grid, axis) for grid in GRIDS for axis in range(len(grid))]


@pytest.mark.parametrize(("grid", "axis"), quick_ones(GROWING, *GROWING[::2]))
def test_an_index_that_grows(grid: tuple[int, ...], axis: int) -> None:
    """Wrong if old chunks were lost, doubled or in the wrong order; if old nodes changed; if those before the edge were copied
    along the slowest axis.
    """
    for n, base in ((65, 2), (700, max(1, grid[axis] // 2 - 1))):
        file = File(grid, n)
        before = bytes(file.data)
        new = [k for k in np.ndindex(*grid) if base <= k[axis] < base + 2]
        random.Random(n).shuffle(new)
        grown = file.grow(new[:300], axis, base)
        assert file.told() == file.expected
        file.walk()
        changed = [k for k, (a, b) in enumerate(zip(before, file.data, strict=False)) if a != b]
        end, root = file.superblock.end_spot.offset, file.spots.index.offset
        allowed = [at for at in (end, root, *(one.offset for one in grown.links)) for at in range(at, at + 8)]
        assert set(changed) <= set(allowed)
        # Once more, on a tree of which a part is old.
        file.grow([k for k in new if k[axis] == base + 1][:5], axis, base + 1, links=False)
        assert file.told() == file.expected


def test_what_is_before_the_edge_is_not_copied() -> None:
    """Wrong if the cost of one more row were that of all rows."""
    file = File((4000,), 3999)
    before = len(file.data)
    file.grow([(3999,)], 0, 3999)
    assert file.told() == file.expected
    assert len(file.data) - before < 4 * file.spots.tree.node_nbytes  # a leaf, a node of each level above it


@pytest.mark.parametrize("links", [True, False])
def test_hdf5_goes_on_from_there(links: bool) -> None:
    """Wrong if HDF5 could not add chunks to such an index, or remove them: its links between nodes are used then."""
    file = File((300, 2), 400)
    file.grow([(k, m) for k in range(200, 260) for m in range(2)], 0, 200, links=links)
    room = io.BytesIO(file.data)
    with h5py.File(room, "r+") as made:
        x = made["x"]
        size = math.prod(file.chunks)
        for k in range(299, 260, -1):
            x.id.write_direct_chunk(file.at((k, 1)), bytes([k % 251]) * size)
        found: list[Any] = []
        x.id.chunk_iter(found.append)
        assert len(found) == len(file.expected) + 39
        np.testing.assert_array_equal(x[261 * 3 :: 3, 2], np.arange(261, 300) % 251)
    if not links:
        return
    with h5py.File(room, "r+") as made:
        made["x"].resize((30, 4))
        found = []
        made["x"].id.chunk_iter(found.append)
        assert len(found) == 20


def test_a_damaged_index() -> None:
    """Wrong if something that is no index of chunks were taken for one."""
    file = File((70,), 65)
    tree, new = file.spots.tree, file.spots.tree.entries(np.array([[69]]), 8, 3)
    for root in (0, len(file.data) - 8, len(file.data) + 8):
        with pytest.raises(UnknownError, match="without a node"):
            tree.grown(file.read, root, 0, 69 * 3, new, 10**6)
    level, entries, _ = tree.node(file.read, file.spots.root)
    assert level == 1
    file.data[int(entries["child"][-1]) + 5] = 1
    with pytest.raises(UnknownError, match="level"):
        tree.grown(file.read, file.spots.root, 0, 69 * 3, new, 10**6)
    with pytest.raises(ValueError, match="before"):
        tree.grown(file.read, file.spots.root, 0, 70 * 3, new, 10**6)
    assert ChunkTree((3, 2), 8).node_nbytes == 24 + 65 * 32 + 64 * 8  # its head, keys, and the places of children
