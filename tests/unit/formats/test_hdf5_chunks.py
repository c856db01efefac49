"""Are values that are read past HDF5 what HDF5 reads itself, and is the library asked where that is not sure?"""

from __future__ import annotations

import ctypes
import itertools
import os
import zlib
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardload.formats.contract.chunk_reader import ChunkReader
from shardload.formats.contract.format import Source
from shardload.formats.hdf5 import chunks as hdf5_chunks
from shardload.formats.hdf5 import source as hdf5_source
from shardload.formats.hdf5.chunks import list_chunks
from shardload.formats.hdf5.opened import OpenFacts
from shardload.formats.hdf5.source import open_contiguous
from shardload.formats.lookup import open_file, open_source
from shardload.jobs.described import read_values
from shardload.planning.region import Region
from tests.unit.files import (
    SHAPES,
    SIZES,
    assert_same,
    box_of,
    check_source,
    chunks_of,
    early,
    flat,
    load_all,
    missing_in,
    plain_edges,
    raw_dataset,
    read_all,
    write_hdf5,
)

LIBVERS: tuple[Any, ...] = ("earliest", "latest")

# Filters in the order in which they are applied. Each is one call on a creation property list.
FILTERS: dict[str, Any] = {
    "gzip": lambda p, size: p.set_deflate(4),
    "shuffle": lambda p, size: p.set_shuffle(),
    "fletcher32": lambda p, size: p.set_fletcher32(),
    "zstd": lambda p, size: p.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,)),
    "blosc": lambda p, size: p.set_filter(32001, h5py.h5z.FLAG_OPTIONAL, (0, 0, 0, 0, 5, 1, 1)),
    "lz4": lambda p, size: p.set_filter(32004, h5py.h5z.FLAG_OPTIONAL, (0,)),
    "lzf": lambda p, size: p.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL),
}
PIPELINES = (
    "",
    *("gzip", "shuffle", "fletcher32", "zstd", "blosc", "lz4"),
    *("shuffle gzip", "shuffle zstd", "shuffle blosc", "gzip shuffle", "shuffle fletcher32", "fletcher32 shuffle"),
    *("fletcher32 gzip", "gzip fletcher32", "shuffle gzip fletcher32", "fletcher32 shuffle gzip", "gzip shuffle fletcher32"),
    *("blosc fletcher32", "zstd fletcher32 shuffle"),
)


def make(file: h5py.File, name: str, data: np.ndarray[Any, Any], chunk: tuple[int, ...], filters: str, **more: Any) -> Any:
    """A chunked dataset with these filters in this order."""

    def setting(creation: Any) -> None:
        for key in filters.split():
            FILTERS[key](creation, data.dtype.itemsize)
        more.get("setting", lambda creation: None)(creation)

    most = tuple(h5py.h5s.UNLIMITED if n is None else n for n in more.get("maxshape") or data.shape)
    kind = h5py.h5t.py_create(data.dtype, logical=True)
    made = raw_dataset(file, name, kind, data.shape, chunks=chunk, setting=setting, most=most)
    made[...] = data
    return made


def native(data: Any) -> np.ndarray[Any, Any]:
    data = np.asarray(data)
    return data.astype(data.dtype.newbyteorder("="))


def check(path: Path | str, name: str) -> np.ndarray[Any, Any]:
    """Raise AssertionError unless a dataset is read without HDF5, and as h5py reads it; returns its values."""
    return check_all(path, [name])[name]


def check_all(path: Path | str, names: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The same of several datasets."""
    with h5py.File(path) as file:
        by_h5py = {name: native(file[name][...]) for name in names}
    for name, expected in by_h5py.items():
        with closing(open_source(str(path), name)) as source:
            assert source.chunk_reader() is not None, name
            check_source(source, expected)
    return by_h5py


@pytest.mark.each_value
@pytest.mark.parametrize("filters", PIPELINES)
def test_every_filter_type_and_rank(tmp_path: Path, filters: str) -> None:
    path = tmp_path / "a.h5"
    cases = [(dtype, SHAPES[1 + (at + at // 5) % 5]) for at, dtype in enumerate(SIZES)]
    long = (">i4", (40, 30, 50))  # compressors leave out what they cannot shorten: here they can
    with h5py.File(path, "w") as file:
        for dtype, shape in cases:
            make(file, f"{dtype} {len(shape)}", flat(shape, dtype), chunks_of(shape), filters)
        made = make(file, ">i4 3", flat(long[1], long[0]), (16, 16, 32), filters)
        file.flush()
        assert {made.id.get_chunk_info(k).filter_mask for k in range(made.id.get_num_chunks())} == {0}
        if {"gzip", "zstd", "blosc"} & set(filters.split()):
            assert made.id.get_storage_size() < made.nbytes
    cases.append(long)
    found = check_all(path, [f"{dtype} {len(shape)}" for dtype, shape in cases])
    for (dtype, shape), values in zip(cases, found.values(), strict=True):
        assert_same(values, native(flat(shape, dtype)))


@pytest.mark.each_value
@pytest.mark.parametrize("libver", LIBVERS)
@pytest.mark.parametrize("maxshape", [None, (None, 7), (None, None), (11, 14), (5, None), (11, None)])
def test_every_chunk_index(tmp_path: Path, libver: Any, maxshape: Any) -> None:
    path, data = tmp_path / "a.h5", flat((5, 7), ">i4", first=1000)
    with h5py.File(path, "w", libver=libver) as file:
        for filters, chunk in itertools.product(("", "shuffle gzip"), ((2, 3), (5, 7), (1, 1), (4, 14))):
            if chunk[1] <= ((maxshape or (5, 7))[1] or 14):  # chunks may be larger than the array only where it can grow
                make(file, f"{filters} {chunk}", data, chunk, filters, maxshape=maxshape and tuple(maxshape))
        # With "latest", its chunks need no index.
        raw_dataset(file, "early", h5py.h5t.STD_I32BE, (5, 7), native(data), chunks=(2, 3), setting=early)
        names = list(file)
    for values in check_all(path, names).values():
        assert_same(values, native(data))


def set_fill_value(creation: Any, kind: Any, value: bytes | None) -> None:
    """Of types that h5py has no values of; or none, unlike one that nobody has set."""
    library = ctypes.CDLL(h5py.h5d.__file__)
    library.H5Pset_fill_value.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    assert library.H5Pset_fill_value(creation.id, kind.id, value) >= 0


def test_missing_chunks_of_types_that_hdf5_does_not_convert(tmp_path: Path) -> None:
    """Wrong if the fill value is asked for in this machine's byte order: HDF5 has no conversion for these types."""
    path, filled = tmp_path / "a.h5", {"bits": np.arange(8, dtype="u2")}
    fill_bits = partial(set_fill_value, kind=h5py.h5t.STD_B16BE, value=bytes([0, 5]))
    with h5py.File(path, "w") as file:
        bits = {"chunks": (4,), "setting": fill_bits, "memory_kind": h5py.h5t.NATIVE_B16}
        space = h5py.h5s.create_simple((8,))
        space.select_hyperslab((0,), (4,))
        made = raw_dataset(file, "bits", h5py.h5t.STD_B16BE, (8,), **bits)
        made.id.write(h5py.h5s.create_simple((4,)), space, filled["bits"][:4].copy(), h5py.h5t.NATIVE_B16)
        if hasattr(h5py.h5t, "COMPLEX"):  # the complex type of HDF5 2.0
            filled["complex"] = flat((8,), "complex64")
            kind, fill = h5py.h5t.COMPLEX_IEEE_F32BE, np.array(5, ">c8")
            made = raw_dataset(file, "complex", kind, (8,), chunks=(4,), setting=lambda creation: creation.set_fill_value(fill))
            values = filled["complex"][:4].copy()
            made.id.write(h5py.h5s.create_simple((4,)), space, values, h5py.h5t.NATIVE_FLOAT_COMPLEX)
    for name, data in filled.items():
        data[4:] = 5
        with closing(open_source(str(path), name)) as source:
            assert source.chunk_reader() is not None, name
            assert_same(read_all(source), data, name)


@pytest.mark.parametrize("maxshape", [None, (None, 4)])
def test_a_few_chunks_are_found_without_a_list_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maxshape: Any) -> None:
    """Wrong if a cell of a large file took longer, the more chunks there are: HDF5's list takes a microsecond for each."""
    path, data, starts = tmp_path / "a.h5", flat((100, 4), "float32"), list[int]()

    def noting(dataset: Any, take: Any, *args: Any) -> None:
        list_chunks(dataset, lambda rows, *more: (starts.extend(rows[:, 0].tolist()), take(rows, *more)), *args)

    with h5py.File(path, "w", libver="latest") as file:
        made = file.create_dataset("x", (100, 4), "float32", chunks=(1, 4), maxshape=maxshape, fillvalue=-1)
        made[:90] = data[:90]
    data[90:] = -1
    monkeypatch.setattr(hdf5_chunks, "list_chunks", noting)
    for first, last, n_listed in ((57, 57, 1), (88, 91, 2), (20, 60, 90)):
        region = Region((first, 0), (last + 1, 4))
        starts.clear()
        with closing(open_source(str(path), "x")) as source:
            source.expect(region)
            out = np.empty(region.shape, "float32")
            assert source.read_into(region, out) == [(k, 0) for k in range(90, last + 1)]
            assert_same(out, data[first : last + 1])
        with open_file(str(path)) as file:  # as `append` reads the end of a coordinate
            assert_same(read_values(file, "x", region), data[first : last + 1])
        assert len(starts) == 2 * n_listed


@pytest.mark.each_value
@pytest.mark.parametrize("libver", LIBVERS)
@pytest.mark.parametrize("growing", [0, 1, 2])
def test_which_chunks_are_missing_whichever_axis_can_grow(tmp_path: Path, libver: Any, growing: int) -> None:
    """HDF5 lists the chunks of an extensible array in the places of others, unless the first axis is the one that can grow."""
    path, shape, chunk = tmp_path / "a.h5", (5, 7, 4), (2, 3, 1)
    maxshape = tuple(None if axis == growing else n + 3 for axis, n in enumerate(shape))
    stored = {(0, 0, 0), (1, 2, 0), (2, 0, 3), (2, 1, 1)}
    missing = {*np.ndindex(3, 3, 4)} - stored
    with h5py.File(path, "w", libver=libver) as file:
        for name, options in {"plain": {}, "gzip": {"compression": "gzip"}, "left to HDF5": {"compression": "lzf"}}.items():
            made = file.create_dataset(name, shape, "int32", chunks=chunk, maxshape=maxshape, fillvalue=-1, **options)
            for k, index in enumerate(sorted(stored)):
                made[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk, strict=True))] = k
    for name in ("plain", "gzip", "left to HDF5"):
        with h5py.File(path) as file:
            expected = file[name][...]
            whole = open_source(file[name], name)
            assert set(missing_in(whole)) == missing
        with closing(open_source(str(path), name)) as source:
            assert_same(read_all(source), expected, name)
            assert set(missing_in(source)) == missing


def test_read_into_leaves_nothing_in_the_buffer(tmp_path: Path) -> None:
    """Where HDF5 is asked never to fill, it leaves the buffer as it is, with another block's values."""
    no_fill_value = partial(set_fill_value, kind=h5py.h5t.STD_I16LE, value=None)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, options in {"chunked": {"chunks": (2, 3)}, "contiguous": {}}.items():
            file.create_dataset(name, (4, 6), "int16", fillvalue=5, fill_time="never", **options)
        for name in ("undefined", "nothing at all"):
            made = raw_dataset(file, name, h5py.h5t.STD_I16LE, (4, 6), chunks=(2, 3), setting=no_fill_value)
            if name == "undefined":
                made[:2, :3] = 0
    for name in ("chunked", "contiguous", "undefined"):
        np.testing.assert_array_equal(load_all(tmp_path / "a.h5", name), np.zeros((4, 6), "int16"), err_msg=name)
    check(tmp_path / "a.h5", "undefined")
    with closing(open_source(str(tmp_path / "a.h5"), "nothing at all")) as source:
        assert source.chunk_reader() is None  # HDF5 has something to say
        with pytest.raises(OSError, match="no data can be read"):
            read_all(source)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["int16", ">f8"])
@pytest.mark.parametrize("filters", [f for f in PIPELINES if f and "blosc" not in f])  # HDF5 fails to write them with it
def test_edge_chunks_that_are_not_filtered(tmp_path: Path, filters: str, dtype: str) -> None:
    path, data = tmp_path / "a.h5", flat((5, 7), dtype)
    with h5py.File(path, "w", libver="latest") as file:
        for name, most in {"fixed": (5, 7), "grows": (None, 7)}.items():
            make(file, name, data, (2, 4), filters, maxshape=most, setting=plain_edges)
        file["grows"].resize((6, 7))
        file["grows"][5] = flat((7,), dtype, first=2)
    np.testing.assert_array_equal(check(path, "fixed"), native(data))
    check(path, "grows")


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0, 7)])
def test_no_chunks_at_all(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("a", shape, maxshape=(None,) * len(shape), chunks=(2,) * len(shape), dtype="f4")
    assert check(path, "a").shape == shape
    with closing(open_source(str(path), "a")) as source:
        reader = source.chunk_reader()
        assert reader is not None
        for index in ((0,) * len(shape), (0,) * (len(shape) + 1), (-1,) * len(shape)):
            with pytest.raises(ValueError, match="there are no chunks"):
                reader.fetch(box_of(index))


def damaged(path: Path, name: str, at: int, change: Any) -> tuple[Source, ChunkReader]:
    """Change the stored bytes of the chunk at row `at`, then open it."""
    with h5py.File(path) as file:
        stored = file[name].id.get_chunk_info_by_coord((at, 0))
    raw = bytearray(path.read_bytes())
    raw[stored.byte_offset : stored.byte_offset + stored.size] = change(
        raw[stored.byte_offset : stored.byte_offset + stored.size]
    )
    path.write_bytes(raw)
    source = open_source(str(path), name)
    reader = source.chunk_reader()
    assert reader is not None
    return source, reader


def flip(where: int) -> Any:
    def change(raw: bytearray) -> bytearray:
        raw[where] ^= 0x10
        return raw

    return change


@pytest.mark.parametrize(
    ("filters", "change", "message"),
    [
        ("fletcher32", flip(3), "Fletcher"),
        ("fletcher32", flip(-1), "Fletcher"),
        ("shuffle gzip fletcher32", flip(9), "Fletcher"),
        ("fletcher32 gzip", flip(-2), "gzip"),  # its Adler-32
        ("shuffle gzip", flip(-1), "gzip"),
        ("gzip", flip(0), "gzip"),
        ("gzip", lambda raw: zlib.compress(b"short").ljust(len(raw), b"\0"), "gzip"),
        ("gzip", lambda raw: zlib.compress(bytes(5000)).ljust(len(raw), b"\0"), "gzip"),
        ("zstd", flip(0), "zstd"),
        ("zstd", flip(5), "zstd"),
        ("blosc", flip(4), "blosc"),
        ("blosc", flip(12), "blosc"),
        ("lz4", flip(7), "lz4"),
        ("lz4", flip(13), "lz4"),
    ],
)
def test_damage_is_a_value_error_that_says_what(tmp_path: Path, filters: str, change: Any, message: str) -> None:
    path = tmp_path / "a.h5"
    data = np.random.default_rng(1).integers(0, 1000, (6, 120)).astype("int32")
    with h5py.File(path, "w") as file:
        make(file, "a", data, (1, 120), filters)
    source, reader = damaged(path, "a", 2, change)
    out = np.empty((1, 120), "int32")
    for row in (0, 1, 3):
        reader.decode(reader.fetch(box_of((row, 0))), out)
        np.testing.assert_array_equal(out, data[row : row + 1])
    for box, room in ((box_of((2, 0)), out), ((range(6), range(1)), np.empty((6, 1, 1, 120), "int32"))):
        with pytest.raises(ValueError, match=message):
            reader.decode(reader.fetch(box), room)
    if "fletcher32" in filters:  # HDF5 finds that, too
        with pytest.raises((OSError, ValueError)):
            read_all(source)
    source.close()


def test_the_checksum_of_old_versions_is_accepted(tmp_path: Path) -> None:
    """HDF5 before 1.6.3 swapped the bytes of each half of a Fletcher-32."""
    path, data = tmp_path / "a.h5", flat((6, 5), "int16", first=500)
    with h5py.File(path, "w") as file:
        make(file, "a", data, (2, 5), "fletcher32")
    damaged(path, "a", 2, lambda raw: raw[:-4] + bytes([raw[-3], raw[-4], raw[-1], raw[-2]]))[0].close()
    np.testing.assert_array_equal(check(path, "a"), data)


# --- contiguous values


def test_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read where the region is one run; many short runs share one; small planes that are far apart share a copy."""
    data = flat((6, 50, 40))
    path = write_hdf5(tmp_path / "a.h5", {"a": data})
    with h5py.File(path) as file:
        reader = open_contiguous(OpenFacts(file, is_ours=False).dataset(file["a"].id), np.dtype("f4"))
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
        monkeypatch.setattr(hdf5_source, "NEAR_NBYTES", near)
        monkeypatch.setattr(hdf5_source, "_SPAN_NBYTES", span)
        out = np.empty(region.shape, "f4")
        sizes.clear(), copies.clear()
        reader.read_into(region, out)
        assert (sizes, len(copies)) == (expected, expected_copies)
        np.testing.assert_array_equal(out, data[region.slices()])
