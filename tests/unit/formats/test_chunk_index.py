"""Where the chunks are, by the file's own index: always what HDF5 says, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardload.formats.hdf5 import chunks as module
from shardload.formats.hdf5.chunk_index import ListedChunks, list_tree
from shardload.formats.lookup import open_source
from shardload.planning.region import Region


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


def read_from(path: str) -> Any:
    content = Path(path).read_bytes()
    return lambda offset, nbytes: content[offset : offset + nbytes]


def header_of(path: str) -> int:
    with h5py.File(path) as file:
        return int(h5py.h5o.get_info(file["g/x"].id).addr)


def listed(
    path: str, most: int = 1 << 20, box: list[range] | None = None, read: Any = None
) -> dict[tuple[int, ...], tuple[int, int, int]] | None:
    """What the index says, with positions of chunks by their first element."""
    with h5py.File(path) as file:
        shape, chunk = file["g/x"].shape, file["g/x"].chunks
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    found = list_tree(read or read_from(path), header_of(path), chunk, grid, most, box)
    if found is None:
        return None
    entries = found.entries
    assert not entries["at"][:, -1].any()
    places = np.stack(np.unravel_index(found.numbers, grid), axis=1) * np.array(chunk)
    np.testing.assert_array_equal(entries["at"][:, :-1], places)
    return {tuple(one["at"][:-1].tolist()): (int(one["child"]), int(one["nbytes"]), int(one["mask"])) for one in entries}


@pytest.mark.parametrize("libver", ["earliest", "v108"])
@pytest.mark.parametrize(
    ("shape", "chunk"), [((100,), (7,)), ((30, 41), (4, 9)), ((9, 1, 25, 6), (2, 1, 3, 6)), ((5000,), (1,)), ((3,), (5,))]
)
def test_as_hdf5_says(tmp_path: Path, libver: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> None:
    """Wrong if coordinates, an address, a size or a mask were taken from another place, or a level of the tree left out."""
    maxshape = (None, *shape[1:])
    path = make(tmp_path / "x.h5", libver, shape, chunk, maxshape=maxshape, compression="gzip", shuffle=True)
    assert listed(path) == said_by_hdf5(path) != {}


@pytest.mark.parametrize(
    ("shape", "chunk", "written"),
    [
        ((5000,), (1,), ...),
        ((200, 41), (2, 3), ...),
        ((30, 9, 26), (1, 2, 5), ...),
        ((300, 20), (1, 3), np.s_[7:250:3, 4:]),
        ((300, 20), (1, 3), np.s_[290:, :3]),
        ((300, 20), (1, 3), np.s_[:0]),
    ],
)
def test_chunks_of_a_box(tmp_path: Path, shape: tuple[int, ...], chunk: tuple[int, ...], written: Any) -> None:
    """Wrong if a chunk at a border of the box, or of a node, were left out, or one beside the box listed."""
    path = make(tmp_path / "x.h5", "earliest", shape, chunk, written=written, compression="gzip")
    said, content = said_by_hdf5(path), Path(path).read_bytes()
    grid = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
    rng = np.random.default_rng(3)
    firsts = [[int(rng.integers(0, n)) for n in grid] for _ in range(60)]
    boxes = [[range(a, int(rng.integers(a, n)) + 1) for a, n in zip(one, grid, strict=True)] for one in firsts]
    boxes += [[range(n) for n in grid], [range(n - 1, n) for n in grid], [range(1) for _ in grid]]
    for box in boxes:
        inside = {at: one for at, one in said.items() if all(k // c in axis for k, c, axis in zip(at, chunk, box, strict=True))}
        assert listed(path, box=box) == inside, box
    n_read = 0

    def read(offset: int, nbytes: int) -> bytes:
        nonlocal n_read
        n_read += 1
        return content[offset : offset + nbytes]

    listed(path, read=read)
    n_all, n_read = n_read, 0
    listed(path, box=[range(n // 2, n // 2 + 1) for n in grid], read=read)
    assert n_read <= min(n_all, 12), "it goes down to one chunk, by as few nodes as there are levels"
    assert listed(path, most=10, box=[range(n) for n in grid]) == (said if len(said) <= 10 else None)


def test_chunks_that_are_missing_or_not_filtered(tmp_path: Path) -> None:
    """Wrong if a missing chunk were listed, or the mask of a chunk without its filter were lost."""
    path = make(tmp_path / "x.h5", "earliest", (40, 30), (8, 10), written=np.s_[:16, 10:], compression="gzip")
    with h5py.File(path, "r+") as file:
        file["g/x"].id.write_direct_chunk((32, 20), np.ones(80, "f4").tobytes(), filter_mask=1)
    found = listed(path)
    assert found == said_by_hdf5(path)
    assert found is not None and found[32, 20][2] == 1 and (0, 0) not in found


def test_another_kind_of_index(tmp_path: Path) -> None:
    """Wrong if an index of a newer kind were read as a tree."""
    path = make(tmp_path / "x.h5", "latest", (40, 30), (8, 10))
    assert listed(path) is None


def test_what_a_damaged_file_says(tmp_path: Path) -> None:
    """Wrong if a damaged node gave a list, or one that leads to itself were followed for ever."""
    path = make(tmp_path / "x.h5", "earliest", (5000,), (1,))
    content, header = bytearray(Path(path).read_bytes()), header_of(path)
    right = listed(path, 5000)
    assert right is not None and len(right) == 5000
    assert listed(path, 4999) is None, "more chunks than there can be"
    nodes = [at for at in range(len(content)) if content[at : at + 5] == b"TREE\x01"]
    top = [at for at in nodes if content[at + 5] == max(content[k + 5] for k in nodes)]
    assert len(top) == 1

    def damaged(at: int, value: bytes) -> Any:
        changed = bytes(content[:at]) + value + bytes(content[at + len(value) :])
        return list_tree(lambda offset, nbytes: changed[offset : offset + nbytes], header, (1,), (5000,), 5000)

    leaf = next(at for at in nodes if content[at + 5] == 0)
    for node in (top[0], leaf):
        assert damaged(node, b"TRIE") is None
        assert damaged(node + 4, b"\x00") is None, "a node of groups"
        assert damaged(node + 5, b"\x05") is None, "another level"
        assert damaged(node + 6, b"\x00\x00") is None, "no entries"
    first_child = top[0] + 24 + 8 + 16
    assert damaged(first_child, top[0].to_bytes(8, "little")) is None, "a node that leads to itself"
    assert damaged(first_child, (len(content) + 8).to_bytes(8, "little")) is None, "a node behind the end"
    assert damaged(first_child, content[first_child + 32 : first_child + 40]) is None, "the same node twice"
    assert damaged(header, b"\x07") is None
    for node in (top[0], leaf):
        second = node + 24 + 32 + 8  # the position of its second entry
        value = int.from_bytes(content[second : second + 8], "little")
        assert damaged(second, value.to_bytes(8, "little")) is not None
        for other in (value - 20, value + 3000, 2**63, 5000):
            assert damaged(second, (other % 2**64).to_bytes(8, "little")) is None, "not in order, or outside"
        assert damaged(second + 8, b"\x04") is None, "inside of an element"


@pytest.mark.parametrize(("entry", "place"), [(20, 10), (20, 21), (3, 45), (49, 0)])
def test_a_tree_that_is_not_in_order(tmp_path: Path, entry: int, place: int) -> None:
    """Wrong if a chunk in the place of another one were read where HDF5, which looks for the place, finds the other or none."""
    path = make(tmp_path / "x.h5", "earliest", (400,), (8,), fillvalue=-1)
    content = bytearray(Path(path).read_bytes())
    leaf = content.index(b"TREE\x01\x00")
    at = leaf + 24 + entry * 32 + 8
    assert int.from_bytes(content[at : at + 8], "little") == entry * 8
    content[at : at + 8] = (place * 8).to_bytes(8, "little")
    Path(path).write_bytes(content)
    source, out = open_source(path, "/g/x"), np.empty(8, "f4")
    reader = source.chunk_reader()
    assert isinstance(reader, module.Hdf5Chunks)
    with h5py.File(path) as file:
        for k in range(50):
            reader.decode(reader.fetch((k,)), out)
            np.testing.assert_array_equal(out, file["g/x"][8 * k : 8 * k + 8], str(k))
    source.close()


@pytest.mark.parametrize("change", ["size", "left out"])
def test_what_contradicts_hdf5_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Wrong if a list were used although HDF5 has counted something else in the same file."""
    path = make(tmp_path / "x.h5", "earliest", (40, 30), (8, 10), compression="gzip")
    right = module.list_tree

    def other(*given: Any) -> Any:
        found = right(*given)
        assert found is not None
        entries = found.entries.copy()
        if change == "size":
            entries["nbytes"][3] += 1
            return ListedChunks(found.numbers, entries)
        return ListedChunks(found.numbers[1:], entries[1:])

    monkeypatch.setattr(module, "list_tree", other)
    source = open_source(path, "/g/x")
    reader = source.chunk_reader()
    assert isinstance(reader, module.Hdf5Chunks)
    assert reader._list_by_index() is None
    out = np.empty((40, 30), "f4")
    source.read_into(Region.whole((40, 30)), out)
    stored = reader.fetch_many([range(5), range(3)])
    assert stored is not None and all(one is not None for one in stored)
    source.close()
    with h5py.File(path) as file:
        np.testing.assert_array_equal(out, file["g/x"][...])


def test_a_load_uses_it(tmp_path: Path) -> None:
    """Wrong if a chunk were taken from the place of another one."""
    path = make(tmp_path / "x.h5", "earliest", (40, 33), (8, 10), compression="gzip")
    source = open_source(path, "/g/x")
    reader = source.chunk_reader()
    assert isinstance(reader, module.Hdf5Chunks)
    by_index, by_hdf5 = reader._list_by_index(), reader._list_by_hdf5()
    assert by_index is not None and by_hdf5 is not None
    for name in ("offsets", "sizes", "masks"):
        np.testing.assert_array_equal(getattr(by_index, name), getattr(by_hdf5, name))
    chunk = np.empty((8, 10), "f4")
    with h5py.File(path) as file:
        for index in np.ndindex(5, 4):
            reader.decode(reader.fetch(index), chunk)
            place = tuple(slice(k * c, min(n, (k + 1) * c)) for k, c, n in zip(index, (8, 10), (40, 33), strict=True))
            expected = file["g/x"][place]
            np.testing.assert_array_equal(chunk[tuple(map(slice, expected.shape))], expected)
    source.close()
