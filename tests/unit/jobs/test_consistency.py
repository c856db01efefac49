"""Does a file that changes between or during the reads of several ranks become an error?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import example, given
from hypothesis import strategies as st

from shardload.errors import SourceError
from shardload.formats.access import STRICT
from shardload.formats.hdf5.source import Hdf5Source
from shardload.formats.lookup import find_array, open_source
from shardload.formats.memory import MemorySource
from shardload.jobs.consistency import ArrayToRead, KeptSources, check_same, check_unchanged, contents_of, is_open, to_sums
from shardload.planning.region import Grid
from shardload.planning.selection import select_axes
from tests.unit.files import raising, read_small, write_hdf5


def added(states: list[tuple[int, ...] | None]) -> list[int]:
    return [sum(column) for column in zip(*map(to_sums, states), strict=True)]


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))), min_size=1))
@example([(5, 1, 0), (5, 2, 0)])
@example([(5, 1, 0)] * 999 + [(5, 2, 0)])
@example([None, (5, 1, 7), (5, 1, 8)])  # inodes may differ from machine to machine
def test_all_must_be_the_same(states: list[tuple[int, ...] | None]) -> None:
    """Wrong if one rank of many were not noticed, or ranks that read nothing, or another inode, counted."""
    if len({state[:2] for state in states if state is not None}) <= 1:
        check_same("'x'", added(states), "f.h5", "/x")
        return
    n = sum(state is not None for state in states)
    with pytest.raises(SourceError, match=f"the {n} ranks that read it did not see the same file") as raised:
        check_same("'x'", added(states), "f.h5", "/x")
    assert (raised.value.path, raised.value.dataset) == ("f.h5", "/x")


@pytest.mark.parametrize(
    ("after", "text"),
    [(None, "(it is gone)"), ((5, 1, 1, 1), "(it had 4 bytes and has 5)"), ((4, 2, 1, 1), "read. "), ((4, 1, 2, 1), "read. ")],
)
def test_changed(after: tuple[int, ...] | None, text: str) -> None:
    before = 4, 1, 1, 1
    with pytest.raises(SourceError) as raised:
        check_unchanged("'x' in 'f.h5'", before, after, "f.h5", "/x")
    assert text in str(raised.value)
    for is_same in ((before, before), (None, after)):
        check_unchanged("'x'", *is_same, "f.h5", "/x")


def test_state_of_hdf5(tmp_path: Path) -> None:
    """Wrong if a rename, which leaves the open file as it is, were an error, or a write that keeps the size none."""
    path = write_hdf5(tmp_path / "x.h5", {"x": np.arange(9.0)})
    other = shutil.copy(path, tmp_path / "y.h5")
    source = open_source(path, "/x")
    before = source.state()
    assert before is not None and before[0] == os.path.getsize(path)
    os.replace(other, path)
    assert source.state() == before != open_source(path, "/x").state()
    source.close()
    assert source.state() is None

    source = open_source(path, "/x")
    before = source.state()
    os.utime(path, ns=(0, before[1] + 1))
    assert source.state() != before


@pytest.mark.parametrize("changes", [False, True])
def test_a_small_array_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: bool) -> None:
    """Wrong if what rank 0 reads for all were looked at less closely: then it is left to the ordinary way."""
    path = write_hdf5(tmp_path / "x.h5", {"x": np.arange(9.0)})
    info = find_array(path, "/x")
    read_into = Hdf5Source.read_into

    def read_and_change(source: Hdf5Source, *arguments: object) -> None:
        read_into(source, *arguments)
        os.utime(path, ns=(0, 5))

    if changes:
        monkeypatch.setattr(Hdf5Source, "read_into", read_and_change)
    assert read_small(path, info) == (None if changes else np.arange(9.0).tobytes())


def test_what_is_open() -> None:
    """Wrong if an array of the caller's were taken for what all ranks find under one name."""
    assert not any(map(is_open, ("x.h5", Path("x.h5"), "s3://bucket/x.zarr", None, MemorySource(np.zeros(3)))))
    assert all(map(is_open, (np.zeros(3), zarr.create_array({}, shape=(3,), dtype="f4"))))


def contents(array: Any, select: Any = None) -> tuple[int, int]:
    source = open_source(array, "/x")
    selection = select_axes(select, source.info.shape)
    chunks = source.info.chunks and Grid(selection.shape, source.info.chunks, (0,) * len(source.info.chunks))
    return contents_of(source, array, selection, chunks)


@pytest.mark.parametrize("kind", ["C", "F", "big-endian", "reversed", "0-d"])
def test_every_element_of_an_array_in_memory_counts(kind: str) -> None:
    """Wrong if it were sampled: one element that differs would go into one rank's shard and no other's."""
    values = np.arange(210, dtype=">f8" if kind == "big-endian" else "f8").reshape(5, 6, 7)
    if kind == "F":
        values = np.asfortranarray(values)
    if kind == "0-d":
        values = values[0, 0, 1:2].reshape(())
    array = values[::-1] if kind == "reversed" else values
    before = contents(array)
    for index in np.ndindex(array.shape):
        keep = array[index].copy()
        array[index] = -1.5
        assert contents(array) != before, index
        array[index] = keep
    assert contents(array) == before


def test_of_an_array_in_memory_what_is_selected_counts() -> None:
    """Wrong if ranks whose arrays differ only elsewhere, where nothing is loaded, were refused."""
    array = np.arange(42.0).reshape(6, 7)
    before = contents(array, (slice(1, 3), 2))
    array[0], array[:, 3:] = -1, -1
    assert contents(array, (slice(1, 3), 2)) == before
    array[2, 2] = -1
    assert contents(array, (slice(1, 3), 2)) != before


def test_a_memory_map_is_not_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if every rank read all of a file that each should read a part of."""
    np.save(tmp_path / "x.npy", np.arange(1 << 20, dtype="f4"))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    read: list[int] = []
    monkeypatch.setattr(MemorySource, "read_into", lambda self, region, out: read.append(region.size) or out.fill(1))
    for array in (mapped, mapped[1:], mapped.view(np.ndarray)[2:]):
        read.clear()
        contents(array)
        assert 0 < sum(read) <= array.size // 4


def test_an_open_file_is_known_by_its_file(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "x.h5", {"x": np.arange(9.0)})
    with h5py.File(tmp_path / "x.h5", "r") as file:
        found = os.stat(tmp_path / "x.h5")
        assert contents(file["x"]) == (found.st_size, found.st_mtime_ns)


@pytest.mark.parametrize("driver", ["core", "stdio"])
def test_an_open_array_that_cannot_be_read(tmp_path: Path, driver: str) -> None:
    """Wrong if the error named neither the array nor the chunk, and called the cause the rank's."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("a", data=np.arange(64, dtype="i4"), chunks=(32,), compression="gzip")
        made.id.write_direct_chunk((32,), b"no gzip")
    names_it = pytest.raises(SourceError, match=r"chunk \(1,\) of '/a' in .*a.h5' could not be read")
    with h5py.File(tmp_path / "a.h5", driver=driver) as file, names_it:
        contents(file["a"])


def test_an_array_that_cannot_be_closed_keeps_no_other_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the others stayed open until the garbage collector came: who writes them next would find them locked."""
    paths = [write_hdf5(tmp_path / f"{name}.h5", {"x": np.arange(9.0)}) for name in "abc"]
    kept = KeptSources([ArrayToRead(path, find_array(path, "/x"), STRICT) for path in paths])
    sources = [kept.open(number) for number in range(3)]
    monkeypatch.setattr(sources[1], "close", raising(OSError("Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        kept.close()
    for path, source in zip(paths, sources, strict=True):
        assert (source.state() is None) == (source is not sources[1]), path
