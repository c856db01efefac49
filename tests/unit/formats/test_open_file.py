"""Is a file opened once for several of its arrays, and is each of them what it is by itself?"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from shardload.errors import SourceError
from shardload.formats import Access, Region
from shardload.formats.access import Limits
from shardload.formats.hdf5 import file as hdf5_module
from shardload.formats.lookup import Finder, open_file, open_source
from shardload.formats.zarr import source as zarr_module
from shardload.planning.tuning import Tuning
from tests.unit.files import check_source, flat, read_all, write_hdf5, write_zarr

ARRAYS = {"a": flat((5, 7)), "group/b": flat((4, 3), "int32", 100), "group/c": flat((6,), ">f8", 200)}


def zipped(path: Path) -> str:
    with zarr.storage.ZipStore(path, mode="w") as store:
        group = zarr.open_group(store, mode="w")
        for name, values in ARRAYS.items():
            group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=(2,) * values.ndim)[...] = values
    return str(path)


KINDS: dict[str, tuple[Callable[[Path], str], Any, str]] = {
    "HDF5": (lambda folder: write_hdf5(folder / "a.h5", ARRAYS), hdf5_module, "open_explained"),
    "HDF5, chunked": (
        lambda folder: write_hdf5(folder / "b.h5", ARRAYS, chunks=True, compression="gzip"), hdf5_module, "open_explained",
    ),
    "Zarr": (lambda folder: write_zarr(folder / "a.zarr", ARRAYS), zarr_module, "open_store"),
    "Zarr in a zip file": (lambda folder: zipped(folder / "a.zip"), zarr_module, "open_store"),
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


def test_what_is_missing_is_noted_for_each_array_by_itself(tmp_path: Path) -> None:
    """Wrong if two arrays of a Zarr store shared what `read_into` of one of them did not find."""
    group = zarr.open_group(zarr.storage.ZipStore(tmp_path / "a.zip", mode="w"), mode="w")
    for name, fill in (("full", 0), ("holes", 7)):
        made = group.create_array(name, shape=(8,), chunks=(4,), dtype="i4", fill_value=fill)
        made[:4] = 1
        if name == "full":
            made[4:] = 2
    group.store.close()
    whole, out = Region((0,), (8,)), np.empty(8, "i4")
    with open_file(tmp_path / "a.zip") as file:
        holes, full = file.open("holes"), file.open("full")
        holes.read_into(whole, out)
        full.read_into(whole, np.empty(8, "i4"))
        assert list(holes.missing(whole)) == [(1,)] and list(full.missing(whole)) == []
    assert out.tolist() == [1] * 4 + [7] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_between_small_arrays(kind: str, tmp_path: Path) -> None:
    """Wrong if the values of two small arrays could be of two versions of a file, each of them complete."""
    write, *_ = KINDS[kind]
    path = write(tmp_path)
    mark = Path(path, "zarr.json") if Path(path).is_dir() else Path(path)
    for is_changed in (False, True):
        with Finder(Access(), Tuning(), keeps_states=True) as finder:
            values = [finder.find(path, name)[1] for name in ARRAYS]
            assert [one is not None for one in values] == [True] * 3
            if is_changed:
                os.utime(mark, ns=(1, 1))
            ((_, before, now),) = finder.states()
            assert finder.state_of(path) == before
            assert (before != now) == is_changed


@pytest.mark.parametrize("tuning", [None, Tuning()])
def test_a_name_in_the_path_of_an_untrusted_file(tuning: Tuning | None, tmp_path: Path) -> None:
    """Wrong if the name were taken for a part of the file's name."""
    path = write_hdf5(tmp_path / "a.h5", ARRAYS)
    with Finder(Access(untrusted=Limits(1 << 26)), tuning) as finder:
        info, values, _ = finder.find(f"{path}:/group/b", None)
    assert info.dataset == "/group/b"
    assert values is None if tuning is None else bytes(values or b"") == ARRAYS["group/b"].tobytes()
