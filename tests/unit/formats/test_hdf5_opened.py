"""Is what an open HDF5 file is asked once true of each of its datasets, and of no other?"""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from shardload import SourceError
from shardload.formats import Region, small
from shardload.formats.access import STRICT
from shardload.formats.contract.chunk_reader import read_by_chunks
from shardload.formats.hdf5 import source as hdf5
from shardload.formats.lookup import Finder, open_file
from shardload.planning.tuning import Tuning

NAMES = ["x", "a/x", "b/x", "a/b/x", "b/a/x", "a/b/y"]


def write(path: Path, shift: int = 0) -> None:
    with h5py.File(path, "w") as file:
        for k, name in enumerate(NAMES):
            file[name] = np.arange(6, dtype=["<i4", ">i4"][k % 2]).reshape(2, 3) + 100 * k + shift
        file["a/soft"] = h5py.SoftLink("/b/x")
        file["c"] = h5py.SoftLink("/a")
        file["loop"] = h5py.SoftLink("/loop")
        file["a/hard"] = file["b/a/x"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    write(tmp_path / "x.h5")
    return str(tmp_path / "x.h5")


def test_a_group_that_is_kept_is_that_of_its_name(path: str) -> None:
    """Wrong if groups were kept by less than their whole name, or if one that a soft link led to were kept for another."""
    names = [*NAMES, "a/soft", "c/x", "c/b/x", "a/hard", "c/soft", "//a//./b/x/"]
    with h5py.File(path) as file, open_file(path) as opened:
        for name in [*names, *reversed(names), *names[::2], *names[1::2]]:
            source = opened.open(f"/{name.strip('/')}")
            found = np.empty((2, 3), source.dtype)
            source.read_into(Region((0, 0), (2, 3)), found)
            np.testing.assert_array_equal(found, file[name.replace("/./", "/")][...])
            assert source.info.dtype == "int32" and source.state() is not None
            source.close()
        for name in ("/a/none", "/none/x", "/x/x", "/loop"):
            with pytest.raises((KeyError, SourceError)):
                opened.open(name)


def test_what_is_kept_is_closed_with_the_file(path: str) -> None:
    """Wrong if a descriptor or a group stayed open, or if the state were that of another file with its number."""
    before = set(os.listdir("/proc/self/fd"))
    file = open_file(path)
    source = file.open("/a/x")
    source.read_into(Region((0, 0), (2, 3)), np.empty((2, 3), "i4"))
    assert set(os.listdir("/proc/self/fd")) > before
    file.close()
    assert set(os.listdir("/proc/self/fd")) == before
    others = [os.open(__file__, os.O_RDONLY) for _ in range(8)]  # they get the numbers that are free now
    try:
        assert file.state() is None and source.state() is None
        with pytest.raises(Exception, match=r".+"):
            source.read_into(Region((0, 0), (2, 3)), np.empty((2, 3), "i4"))
    finally:
        for other in others:
            os.close(other)
    with h5py.File(path, "a"):  # no lock of HDF5 is left
        pass


CHUNKED = {
    "even": ((6, 8), (2, 4), {"shuffle": True}),
    "ragged": ((40, 33), (16, 10), {"compression": "gzip", "shuffle": True}),
    "planes": ((12, 3, 5), (1, 3, 5), {"fletcher32": True}),
    "long": ((37,), (4,), {"compression": "gzip"}),
    "deep": ((4, 6, 10), (2, 2, 3), {"fletcher32": True}),
    "large": ((3, 4), (5, 6), {"shuffle": True}),
    "plain": ((6, 8), (2, 4), {}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("dtype", ["<i4", ">i2"])
def test_small_arrays_of_many_chunks_are_read_in_batches(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong with the axes of chunks and elements exchanged, or chunks at the edge not cut."""
    shape, chunks, how = CHUNKED[name]
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=chunks, maxshape=(None,) * len(shape), **how)
    path, batches = str(tmp_path / "x.h5"), []
    monkeypatch.setattr(small, "read_by_chunks", lambda *a: (batches.append(True), read_by_chunks(*a))[1])
    monkeypatch.setattr(small, "_WORTH_BATCHES", 2)
    if name not in ("large", "plain"):
        monkeypatch.setattr(hdf5.Hdf5Source, "_read_into", lambda *_: pytest.fail("read by the library"))
    with Finder(STRICT, Tuning()) as finder:
        _, found, _ = finder.find(path, "x")
    assert batches == ([] if name == "large" else [True])
    assert found is not None and bytes(found) == values.astype(values.dtype.newbyteorder("=")).tobytes()


def test_a_missing_or_a_damaged_chunk_is_left_to_the_normal_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the values of a chunk that is not stored, or cannot be decoded, were sent."""
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("missing", (40,), "i4", chunks=(4,), fillvalue=7)[:36] = 1
        bad = file.create_dataset("bad", data=np.arange(40), chunks=(4,), compression="gzip")
        bad.id.write_direct_chunk((4,), b"\xff" * 20)
    with Finder(STRICT, Tuning()) as finder:
        assert finder.find(path, "missing")[1] is None
        assert finder.find(path, "bad")[1] is None


def test_what_is_asked_of_a_dataset_does_not_go_through_its_chunks(tmp_path: Path) -> None:
    """Wrong if opening it read the index of its chunks: each load of a time step would take longer, the more there are."""
    path, n = str(tmp_path / "x.h5"), 30_000
    with h5py.File(path, "w", libver=("v108", "v108")) as file:
        made = file.create_dataset("x", (n, 2), "i4", chunks=(1, 2))
        for k in range(0, n, 10):
            made.id.write_direct_chunk((k, 0), np.full(2, k, "i4").tobytes())
        for k in range(20):
            made.attrs[f"a{k}"] = "x" * 500
    read_before, region = _bytes_read(), Region((20_000, 0), (20_001, 2))
    with Finder(STRICT, Tuning()) as finder:
        found = finder.find(path, "x", look=lambda info, _: (info, region))
    assert found.values is not None and np.frombuffer(found.values, "i4").tolist() == [20_000, 20_000]
    n_read = _bytes_read() - read_before
    with h5py.File(path) as file:
        made, before = file["x"], _bytes_read()
        made.id.get_storage_size()
        assert n_read < (_bytes_read() - before) / 3, "HDF5 has gone through the index"


def _bytes_read() -> int:
    """Bytes that calls of the system have read for this process."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
