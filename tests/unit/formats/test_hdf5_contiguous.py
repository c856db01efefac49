"""Are contiguous HDF5 datasets, read past the library, what h5py reads, and is the library asked where that is not sure?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.formats.hdf5 import source as hdf5_contiguous
from shardload.formats.hdf5.opened import OpenFacts
from shardload.formats.hdf5.source import Hdf5Contiguous, merged_axes, open_contiguous
from shardload.formats.lookup import open_source
from shardload.planning.region import Region
from shardload.storage.local import LocalFile
from tests.tiers import examples
from tests.unit.files import DTYPES, check_source, compact, flat, raw_dataset, write_hdf5


def reader_of(path: Path | str, name: str = "a", dtype: Any = "float32") -> Hdf5Contiguous | None:
    """What reads it past HDF5; the descriptor goes with it."""
    with h5py.File(path) as file:
        return reader_of_open(file[name], dtype)


def reader_of_open(dataset: h5py.Dataset, dtype: Any = "int32") -> Hdf5Contiguous | None:
    return open_contiguous(OpenFacts(dataset.file, is_ours=False).dataset(dataset.id), np.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_is_read_past_hdf5(tmp_path: Path, dtype: str) -> None:
    path = write_hdf5(tmp_path / "a.h5", {"a": flat((5, 7), dtype)})
    assert reader_of(path, "a", np.dtype(dtype).newbyteorder("=")) is not None


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=5)))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    return shape, Region(start, stop)


@examples(200)
@given(boxes(), st.integers(0, 400), st.integers(1, 400), st.sampled_from([(0, "u1"), (2, "u2"), (4, "c8"), (0, "c16")]))
def test_any_region(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], Region], near: int, span: int, kind: tuple[int, str]
) -> None:
    shape, region = case
    swap, dtype = kind
    data = flat(shape, dtype)
    path = tmp_path_factory.getbasetemp() / "any.raw"
    path.write_bytes(b"offset" + (data.byteswap() if swap else data).tobytes())
    with open(path, "rb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdf5_contiguous, "NEAR_NBYTES", near)
        patch.setattr(hdf5_contiguous, "_SPAN_NBYTES", span)
        out = np.full(region.shape, 99, dtype)
        raw = LocalFile(os.dup(file.fileno()))
        Hdf5Contiguous(raw, 6, shape, swap).read_into(region, out)
        raw.close()
    np.testing.assert_array_equal(out, data[region.slices()])


@given(boxes())
def test_merged_axes_cover_the_same_elements(case: tuple[tuple[int, ...], Region]) -> None:
    shape, region = case
    axes = merged_axes(shape, region.start, region.stop)
    data = np.arange(np.prod(shape))
    found = data.reshape([n for n, _, _ in axes])[tuple(slice(a, a + n) for _, a, n in axes)]
    np.testing.assert_array_equal(found.reshape(-1), data.reshape(shape)[region.slices()].reshape(-1))
    assert all(n < length for length, _, n in axes[1:])


def test_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read where the region is one run; many short runs share one; small planes that are far apart share a copy."""
    data = flat((6, 50, 40))
    path = write_hdf5(tmp_path / "a.h5", {"a": data})
    reader = reader_of(path)
    assert reader is not None
    sizes: list[int] = []
    copies: list[tuple[int, ...]] = []
    read, copy = os.preadv, np.copyto

    def counted_read(descriptor: int, buffers: Any, at: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return read(descriptor, buffers, at)

    def counted_copy(target: Any, values: Any) -> None:
        copies.append(target.shape)
        copy(target, values)

    monkeypatch.setattr(os, "preadv", counted_read)
    monkeypatch.setattr(np, "copyto", counted_copy)
    plane, row = 50 * 40 * 4, 40 * 4
    for near, span, region, expected, expected_copies in (
        (1 << 15, 1 << 20, Region((0, 0, 0), (6, 50, 40)), [6 * plane], 0),
        (1 << 15, 1 << 20, Region((2, 0, 0), (4, 50, 40)), [2 * plane], 0),
        (1 << 15, 1 << 20, Region((2, 10, 0), (3, 20, 40)), [10 * row], 0),
        (1 << 15, 1 << 20, Region((0, 0, 3), (6, 50, 9)), [6 * plane], 1),
        (1 << 15, 1 << 20, Region((1, 7, 3), (5, 11, 9)), [4 * plane], 1),
        (row, 1 << 20, Region((1, 7, 3), (6, 11, 9)), [4 * row] * 5, 1),
        (row, 8 * row, Region((1, 7, 3), (6, 11, 9)), [4 * row] * 5, 3),
        (row, 3 * row, Region((1, 7, 3), (3, 11, 9)), [3 * row, row] * 2, 4),
        (1, 1 << 20, Region((1, 7, 0), (3, 9, 40)), [2 * row] * 2, 0),
    ):
        monkeypatch.setattr(hdf5_contiguous, "NEAR_NBYTES", near)
        monkeypatch.setattr(hdf5_contiguous, "_SPAN_NBYTES", span)
        out = np.empty(region.shape, "f4")
        sizes.clear(), copies.clear()
        reader.read_into(region, out)
        assert (sizes, len(copies)) == (expected, expected_copies)
        np.testing.assert_array_equal(out, data[region.slices()])


def test_a_file_that_lost_its_end(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", {"a": flat((50, 100))})
    source = open_source(path, "/a")
    os.truncate(path, os.path.getsize(path) - 500)
    out = np.empty((10, 100), "f4")
    source.read_into(Region((0, 0), (10, 100)), out)
    np.testing.assert_array_equal(out, flat((10, 100)))
    with pytest.raises(OSError, match=r"the file ends at byte \d+, but values are stored up to byte"):
        source.read_into(Region((0, 5), (50, 7)), np.empty((50, 2), "f4"))
    source.close()


def test_what_is_left_to_hdf5(tmp_path: Path) -> None:
    data = flat((5, 7), "int32")
    path = write_hdf5(tmp_path / "a.h5", {"a": data, "enum": data.astype(bool)})
    with h5py.File(path, "r+") as file:
        file.create_dataset("chunked", data=data, chunks=(2, 3))
        file.create_dataset("unwritten", data.shape, "int32", fillvalue=3)
        raw_dataset(file, "compact", h5py.h5t.STD_I32LE, data.shape, data, setting=compact)
        odd = h5py.h5t.STD_I32LE.copy()
        odd.set_precision(24)
        raw_dataset(file, "odd", odd, data.shape, data)
        assert reader_of_open(file["a"]) is None  # a writer
    assert reader_of(path, "a", "int32") is not None and reader_of(path, "enum", "bool") is not None
    for name in ("chunked", "unwritten", "compact", "odd"):
        assert reader_of(path, name, "int32") is None, name
        source = open_source(path, name)
        check_source(source, np.full_like(data, 3) if name == "unwritten" else data)
        source.close()
    assert reader_of(path, "a", "int64") is None


def test_a_dataset_that_the_caller_writes_is_read_by_hdf5(tmp_path: Path) -> None:
    """What it wrote may not be in the file yet."""
    path = write_hdf5(tmp_path / "a.h5", {"a": flat((5, 7))})
    with h5py.File(path, "r+") as file:
        file["a"][2, 3:5] = (-1, -2)
        source = open_source(file["a"], "/a")
        out = np.empty((1, 7), "f4")
        source.read_into(Region((2, 0), (3, 7)), out)
        assert out[0].tolist() == [14, 15, 16, -1, -2, 19, 20]
        source.close()
