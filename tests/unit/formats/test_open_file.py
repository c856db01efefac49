"""Is a file opened once for several of its arrays, and is what it is asked once true of each of them, and of no other?"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardload.errors import SourceError
from shardload.formats.access import STRICT, Access, Limits
from shardload.formats.hdf5 import file as hdf5_module
from shardload.formats.labelling import labelling, read_labels
from shardload.formats.lookup import Finder, find_array, open_file, open_source
from shardload.formats.zarr import source as zarr_module
from shardload.planning.region import Region
from shardload.planning.tuning import Tuning
from tests.unit.files import check_source, flat, read_all, write_hdf5, write_zarr

ARRAYS = {"a": flat((5, 7)), "group/b": flat((4, 3), "int32", 100), "group/c": flat((6,), ">f8", 200)}


KINDS: dict[str, tuple[Callable[[Path], str], Any, str]] = {
    "HDF5": (lambda folder: write_hdf5(folder / "a.h5", ARRAYS), hdf5_module, "open_explained"),
    "HDF5, chunked": (
        lambda folder: write_hdf5(folder / "b.h5", ARRAYS, chunks=True, compression="gzip"), hdf5_module, "open_explained",
    ),
    "Zarr": (lambda folder: write_zarr(folder / "a.zarr", ARRAYS), zarr_module, "open_store"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_several_arrays_take_one_open_of_the_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if an array opened the file by itself, closed it for the others, or noted for them what it saw."""
    make, module, name = KINDS[kind]
    path, opened, plain = make(tmp_path), [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *how: opened.append(how) or plain(*how))
    with open_file(path) as file:
        sources = {name: file.open(name) for name in ARRAYS}
        for name, source in sources.items():
            check_source(source, ARRAYS[name])
            assert source.info == open_source(path, name).info
        assert len(opened) == 1 + len(ARRAYS), "one open_file, and open_source for each to compare with"
        for name in reversed(ARRAYS):  # in turns, and after one of them was closed
            np.testing.assert_array_equal(read_all(sources[name]), ARRAYS[name])
        sources.pop("a").close()
        for name, source in sources.items():
            np.testing.assert_array_equal(read_all(source), ARRAYS[name])
            assert source.state() == open_source(path, name).state() is not None
        with pytest.raises(KeyError, match="/lost"):
            file.open("lost")
        with pytest.raises(SourceError, match=r"holds no array '/lost', which was found in it before") as caught:
            file.open("lost", replace(sources["group/b"].info, dataset="/lost"))
        assert (caught.value.path, caught.value.dataset) == (path, "/lost")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_between_small_arrays(kind: str, tmp_path: Path) -> None:
    """Wrong if the values of two small arrays could be of two versions of a file, each of them complete."""
    write, *_ = KINDS[kind]
    path = write(tmp_path)
    mark = Path(path, "zarr.json") if Path(path).is_dir() else Path(path)
    for is_changed in (False, True):
        with Finder(Access(), Tuning(), keeps_states=True) as finder:
            found = [finder.find(path, name) for name in ARRAYS]
            assert [array.values is not None for array in found] == [True] * 3
            if is_changed:
                os.utime(mark, ns=(1, 1))
            ((_, before, now),) = finder.states()
            assert [array.read_in for array in found] == [before] * 3
            assert (before != now) == is_changed


@pytest.mark.parametrize("tuning", [None, Tuning()])
def test_a_name_in_the_path_of_an_untrusted_file(tuning: Tuning | None, tmp_path: Path) -> None:
    """Wrong if the name were taken for a part of the file's name."""
    path = write_hdf5(tmp_path / "a.h5", ARRAYS)
    with Finder(Access(untrusted=Limits(1 << 26)), tuning) as finder:
        info, values, *_ = finder.find(f"{path}:/group/b", None)
    assert info.dataset == "/group/b"
    assert (values is None) == (tuning is None)
    assert values is None or values.tobytes() == ARRAYS["group/b"].tobytes()


# --- what an open HDF5 file is asked once


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
            with closing(opened.open(f"/{name.strip('/')}")) as source:
                np.testing.assert_array_equal(read_all(source), file[name.replace("/./", "/")][...])
                assert source.info.dtype == "int32" and source.state() is not None
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


def test_what_is_asked_of_a_dataset_does_not_go_through_its_chunks(tmp_path: Path) -> None:
    """Wrong if opening it, or what has it as a scale, read the index of its chunks: each load of a time step would
    take longer, the more there are.
    """
    path, n = str(tmp_path / "x.h5"), 30_000
    with h5py.File(path, "w", libver=("v108", "v108")) as file:
        made = file.create_dataset("x", (n, 2), "i4", chunks=(1, 2))
        for k in range(0, n, 10):
            made.id.write_direct_chunk((k, 0), np.full(2, k, "i4").tobytes())
        for k in range(20):
            made.attrs[f"a{k}"] = "x" * 500
        made.make_scale()
        file.create_dataset("y", (n, 2), "i4", chunks=(n, 2)).dims[0].attach_scale(made)
    read_before, region = _bytes_read(), Region((20_000, 0), (20_001, 2))
    with Finder(STRICT, Tuning()) as finder:
        found = finder.find(path, "x", look=lambda info, _: (info, region))
    with labelling(STRICT) as labeller:
        assert read_labels(path, find_array(path, "y"), STRICT, labeller).dims == ("x", None)
    assert found.values is not None and np.frombuffer(found.values, "i4").tolist() == [20_000, 20_000]
    n_read = _bytes_read() - read_before
    with h5py.File(path) as file:
        made, before = file["x"], _bytes_read()
        made.id.get_storage_size()
        assert n_read < (_bytes_read() - before) / 3, "HDF5 has gone through the index"


def _bytes_read() -> int:
    """Bytes that calls of the system have read for this process."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
