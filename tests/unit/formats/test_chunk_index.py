"""Where the chunks are, by the file's own index: always what HDF5 says, or nothing, or an error if it is damaged."""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import shardload
from shardload.errors import SourceError
from shardload.formats.hdf5.chunks import tree_of
from shardload.formats.lookup import open_source
from tests.tuning import tuned
from tests.unit.fakes import ObjectInMemory
from tests.unit.files import missing_in, python_memory_below, read_all


def make(path: Path, libver: str, shape: tuple[int, ...], chunk: tuple[int, ...], written: Any = ..., **how: Any) -> str:
    """A dataset with attributes enough for a header of several blocks."""
    with h5py.File(path, "w", libver=libver) as file:
        data = file.create_dataset("g/x", shape, "f4", chunks=chunk, **how)
        values = np.arange(np.prod(shape), dtype="f4").reshape(shape)
        data[written] = values[written]
        for k in range(7):
            data.attrs[f"a{k}"] = "x" * 300
    return str(path)


def said_by_hdf5(path: str) -> dict[tuple[int, ...], tuple[int, int, int]]:
    with h5py.File(path) as file:
        found: list[Any] = []
        file["g/x"].id.chunk_iter(found.append)
    return {one.chunk_offset: (one.byte_offset, one.size, one.filter_mask) for one in found}


def header_of(path: str) -> int:
    with h5py.File(path) as file:
        return int(h5py.h5o.get_info(file["g/x"].id).addr)


def listed(path: str, box: list[range] | None = None, stored: Any = None) -> dict[tuple[int, ...], tuple[int, int, int]] | None:
    """What the index says, with positions of chunks by their first element."""
    with h5py.File(path) as file:
        shape, chunk = file["g/x"].shape, file["g/x"].chunks
    tree = tree_of(stored or ObjectInMemory(Path(path).read_bytes()), header_of(path), chunk)
    if tree is None:
        return None
    positions, entries = tree.chunks_in(box or [range(-(-n // c)) for n, c in zip(shape, chunk, strict=True)])
    assert not entries["start"][:, -1].any()
    np.testing.assert_array_equal(entries["start"][:, :-1], positions * np.array(chunk))
    return {tuple(one["start"][:-1].tolist()): (int(one["child"]), int(one["nbytes"]), int(one["mask"])) for one in entries}


@pytest.mark.each_value
@pytest.mark.parametrize("libver", ["earliest", "v108"])
@pytest.mark.parametrize(
    ("shape", "chunk", "written"),
    [
        ((3,), (5,), ...),
        ((30, 41), (4, 9), ...),
        ((9, 1, 25, 6), (2, 1, 3, 6), ...),
        ((5000,), (1,), ...),
        ((200, 41), (2, 3), ...),
        ((30, 9, 26), (1, 2, 5), ...),
        ((300, 20), (1, 3), np.s_[7:250:3, 4:]),
        ((300, 20), (1, 3), np.s_[290:, :3]),
        ((300, 20), (1, 3), np.s_[:0]),
    ],
)
def test_chunks_of_a_box(tmp_path: Path, shape: tuple[int, ...], chunk: tuple[int, ...], written: Any, libver: str) -> None:
    """Wrong if a chunk at a border of the box, or of a node, were left out, or one beside the box listed; or if coordinates, an
    address, a size or a mask were taken from another place.
    """
    how: dict[str, Any] = {"maxshape": (None, *shape[1:]), "compression": "gzip", "shuffle": True}
    path = make(tmp_path / "x.h5", libver, shape, chunk, written=written, **how)
    said, stored = said_by_hdf5(path), ObjectInMemory(Path(path).read_bytes())
    grid = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
    rng = np.random.default_rng(3)
    firsts = [[int(rng.integers(0, n)) for n in grid] for _ in range(12)]
    boxes = [[range(a, int(rng.integers(a, n)) + 1) for a, n in zip(one, grid, strict=True)] for one in firsts]
    boxes += [[range(n) for n in grid], [range(n - 1, n) for n in grid], [range(1) for _ in grid]]
    for box in boxes:
        inside = {at: one for at, one in said.items() if all(k // c in axis for k, c, axis in zip(at, chunk, box, strict=True))}
        assert listed(path, box=box) == inside, box
    listed(path, stored=stored)
    n_all, n_rounds = stored.n_ranges, stored.n_reads
    listed(path, box=[range(n // 2, n // 2 + 1) for n in grid], stored=stored)
    assert stored.n_ranges - n_all <= min(n_all, 12), "it goes down to one chunk, by as few nodes as there are levels"
    assert n_rounds <= 9, "all nodes of a level are read at once"


@pytest.mark.parametrize("limits", [None, (9, 5)])
def test_headers_of_the_newer_kind(tmp_path: Path, limits: Any) -> None:
    """Wrong if the numbers in front of the messages (creation order, limits on attributes) were taken for messages."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if limits:
        creation.set_attr_phase_change(*limits)
    path = make(tmp_path / "x.h5", "v108", (40, 30), (8, 10), dcpl=creation, track_order=True)
    assert listed(path) == said_by_hdf5(path)
    content, header, chunk = Path(path).read_bytes(), header_of(path), (8, 10)
    assert tree_of(ObjectInMemory(content), header, chunk) is not None
    assert tree_of(ObjectInMemory(content), header + 4, chunk) is None
    assert tree_of(ObjectInMemory(content[: header + 40]), header, chunk) is None


FILL = -1


class Tree:
    """A file whose index has two levels, or one, and where its parts are."""

    def __init__(self, folder: Path, n: int) -> None:
        self.path = make(folder / "x.h5", "earliest", (2 * n,), (2,), fillvalue=FILL)
        self.content = bytearray(Path(self.path).read_bytes())
        self.n, self.values = n, np.arange(2 * n, dtype="f4")
        nodes = [at for at in range(len(self.content)) if self.content[at : at + 5] == b"TREE\x01"]
        self.root = max(nodes, key=lambda at: self.content[at + 5])
        self.leaf = min(at for at in nodes if self.content[at + 5] == 0)

    def number(self, at: int) -> int:
        return int.from_bytes(self.content[at : at + 8], "little")

    def key(self, node: int, k: int) -> int:
        """Where the position in a key is; -1 is the last one, behind all entries."""
        n = int.from_bytes(self.content[node + 6 : node + 8], "little")
        return node + 24 + (k % (n + 1)) * 32 + 8

    def child(self, node: int, k: int) -> int:
        return self.key(node, k) + 16

    def put(self, at: int, value: int) -> None:
        self.content[at : at + 8] = value.to_bytes(8, "little")
        Path(self.path).write_bytes(self.content)


DAMAGES: dict[str, Callable[[Tree], tuple[int, int]]] = {
    "last key of the last leaf": lambda tree: (tree.key(tree.number(tree.child(tree.root, -2)), -1), 2 * tree.n - 4),
    "key above the leaves, too large": lambda tree: (tree.key(tree.root, 1), tree.number(tree.key(tree.root, 1)) + 20),
    "key above the leaves, too small": lambda tree: (tree.key(tree.root, 1), tree.number(tree.key(tree.root, 1)) - 20),
    "last key of the root": lambda tree: (tree.key(tree.root, -1), 2 * tree.n - 40),
    "first key of the root": lambda tree: (tree.key(tree.root, 0), 2),
    "key in a leaf, of another chunk": lambda tree: (tree.key(tree.leaf, 7), 4),
    "key in a leaf, outside of the array": lambda tree: (tree.key(tree.leaf, 7), 2**40),
    "address of another chunk": lambda tree: (tree.child(tree.leaf, 7), tree.number(tree.child(tree.leaf, 8))),
    "address inside of another chunk": lambda tree: (tree.child(tree.leaf, 7), tree.number(tree.child(tree.leaf, 8)) + 4),
    "address of the dataset": lambda tree: (tree.child(tree.leaf, 7), header_of(tree.path) + 8),
    "address inside of the index": lambda tree: (tree.child(tree.leaf, 7), tree.leaf + 32),
    "position inside of an element": lambda tree: (tree.key(tree.leaf, 7) + 8, 4),
    "root without entries": lambda tree: (tree.root + 6, tree.number(tree.root + 6) >> 16 << 16),
    "leaf without entries": lambda tree: (tree.leaf + 6, tree.number(tree.leaf + 6) >> 16 << 16),
    "root that leads to itself": lambda tree: (tree.child(tree.root, 0), tree.root),
    "root that leads out of the file": lambda tree: (tree.child(tree.root, 0), len(tree.content) + 8),
    "root that leads to one leaf twice": lambda tree: (tree.child(tree.root, 0), tree.number(tree.child(tree.root, 1))),
    "another mark": lambda tree: (tree.leaf, tree.number(tree.leaf) ^ 1),
    "another kind of node": lambda tree: (tree.leaf, tree.number(tree.leaf) ^ 1 << 32),
    "another level": lambda tree: (tree.leaf, tree.number(tree.leaf) ^ 5 << 40),
}


@pytest.mark.each_value
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("least", [0, 1 << 15], ids=["chunk by chunk", "by HDF5"])
def test_an_index_that_contradicts_itself(tmp_path: Path, damage: str, least: int) -> None:
    """Wrong if fill values came in the place of stored chunks, or one chunk's values in another place, as h5py gives them."""
    tree = Tree(tmp_path, 150)
    wrong = tree.number(tree.key(tree.leaf, 7))  # if HDF5 itself finds the damage, or does not look there
    tree.put(*DAMAGES[damage](tree))
    with h5py.File(tree.path) as file, contextlib.suppress(OSError):
        differs = file["g/x"][...] != tree.values
        wrong = int(differs.argmax()) if differs.any() else wrong
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    region = slice(max(0, wrong - 50), wrong + 50)
    for select in (None, (region,)):
        with tuned(min_chunk_nbytes=least), pytest.raises(SourceError, match="index of chunks is damaged"):
            shardload.load(tree.path, mesh, PartitionSpec(), dataset="/g/x", select=select, missing="fill")


def test_nodes_that_share_bytes_take_no_memory(tmp_path: Path) -> None:
    """Wrong if a root whose entries all lead to one leaf were followed: the leaf's entries once for each, of a small file."""
    tree, n = Tree(tmp_path, 3000), 2000
    keys = [struct.pack("<IIQQ", 8, 0, 2 * k, 0) for k in range(n + 1)]
    root = len(tree.content)
    leaf = root + 24 + 32 * n + 24
    for level, child in ((1, leaf), (0, tree.number(tree.child(tree.leaf, 0)))):
        tree.content += struct.pack("<4sBBHQQ", b"TREE", 1, level, n, 2**64 - 1, 2**64 - 1)
        tree.content += b"".join(key + child.to_bytes(8, "little") for key in keys[:-1]) + keys[-1]
    tree.put(tree.content.index(tree.root.to_bytes(8, "little")), root)
    said = pytest.raises(ValueError, match="the 2000 nodes of level 0 have more bytes than the file")
    with contextlib.closing(open_source(tree.path, "/g/x")) as source, python_memory_below(16 << 20), said:
        read_all(source)


@pytest.mark.parametrize("maxshape", [(20, 6), (20, None)])
def test_a_chunk_that_is_outside_of_the_array(tmp_path: Path, maxshape: tuple[int, int | None]) -> None:
    """Wrong if its place in the array had fill values and were not counted as missing: there are as many chunks as places."""
    path = make(tmp_path / "x.h5", "earliest", (20, 6), (4, 4), maxshape=maxshape, fillvalue=FILL)
    content = bytearray(Path(path).read_bytes())
    at = content.index(b"TREE\x01\x00") + 24 + 5 * 40 + 16  # of chunk (2, 1)
    assert content[at] == 4
    content[at] = 132
    Path(path).write_bytes(content)
    expected = np.arange(120, dtype="f4").reshape(20, 6)
    expected[8:12, 4:] = FILL
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["g/x"][...], expected)
        assert file["g/x"].id.get_num_chunks() == 10
    source = open_source(path, "/g/x")
    if maxshape[1] is not None:
        with pytest.raises(ValueError, match="where none begins"):
            read_all(source)
    else:  # as after an append that was killed
        np.testing.assert_array_equal(read_all(source), expected)
        assert missing_in(source) == [(2, 1)]
    source.close()


@pytest.mark.parametrize("seed", range(12))
def test_what_hdf5_writes_and_cuts_is_no_damage(tmp_path: Path, seed: int) -> None:
    """Wrong if an index that HDF5 has made, in any order, or from which it took chunks, were called damaged."""
    rng = random.Random(seed)
    path, grid, chunk = str(tmp_path / "x.h5"), *rng.choice([((700,), (3,)), ((40, 15), (3, 2)), ((8, 9, 10), (3, 2, 2))])
    shape, nbytes = tuple(n * c for n, c in zip(grid, chunk, strict=True)), 4 * math.prod(chunk)
    with h5py.File(path, "w", libver="earliest") as file:
        made = file.create_dataset("g/x", shape, "f4", chunks=chunk, maxshape=[None] * len(grid), fillvalue=FILL)
        for _ in range(rng.randint(1, 4)):
            index = list(np.ndindex(*grid))
            for one in rng.sample(index, rng.randrange(len(index))):
                data = np.full(nbytes // 4, len(index), "f4").tobytes()
                made.id.write_direct_chunk(tuple(k * c for k, c in zip(one, chunk, strict=True)), data)
            made.resize([rng.choice([n, n, rng.randint(0, n)]) for n in shape])
            made.resize(shape)
    assert (listed(path) or {}) == said_by_hdf5(path)
    with h5py.File(path) as file:
        expected = file["g/x"][...]
    with contextlib.closing(open_source(path, "/g/x")) as source:
        np.testing.assert_array_equal(read_all(source), expected)
        assert len(missing_in(source)) == math.prod(grid) - len(said_by_hdf5(path))


def test_nodes_of_two_entries(tmp_path: Path) -> None:
    """The file's creator chooses how many a node has. Wrong if no tree could have so many levels."""
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    library = ctypes.CDLL(h5py.h5d.__file__)
    library.H5Pset_istore_k.argtypes = [ctypes.c_int64, ctypes.c_uint]
    assert library.H5Pset_istore_k(creation.id, 1) >= 0
    with h5py.File(h5py.h5f.create(str(tmp_path / "x.h5").encode(), h5py.h5f.ACC_TRUNC, creation)) as file:
        file.create_dataset("g/x", data=np.arange(200), chunks=(2,))
    content = (tmp_path / "x.h5").read_bytes()
    assert max(content[at + 5] for at in range(len(content)) if content[at : at + 5] == b"TREE\x01") > 16
    assert listed(str(tmp_path / "x.h5")) == said_by_hdf5(str(tmp_path / "x.h5"))
