"""Does memory stay in proportion to what is read, even with tiny chunks or extreme compression?

What libraries take for themselves is measured in a process of its own (`python -m tests.unit.formats.memory_cases FOLDER`), as
what the system gave it.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401 - it registers its filters, which files are made with here
import jax
import jax.numpy as jnp
import numcodecs
import numpy as np
import pytest
import zarr
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest

import shardload
from shardload.cli.main import app
from shardload.errors import SourceError
from shardload.formats.access import Access, Limits
from shardload.formats.codecs.table import HDF5_CODECS
from shardload.formats.hdf5.filters import is_counted
from shardload.formats.hdf5.source import Hdf5Source
from shardload.formats.lookup import find_array, list_arrays, open_source
from shardload.formats.zarr import metadata as zarr_layout
from shardload.formats.zarr.store import open_store
from shardload.planning.region import Region
from tests.unit.files import (
    change_json,
    flat,
    load_all,
    missing_in,
    python_memory_below,
    raw_dataset,
    read,
    read_all,
    read_small,
    write_hdf5,
    write_zarr,
)
from tests.unit.formats.memory_cases import CASES, FINE, first_chunk, with_filters, write_cases

LIMITED = "in a process of which memory is limited"

ROOT = Path(__file__).parents[3]
MOST_GROWTH = 32 << 20  # bytes; a case that is not capped takes three times as much, or more


# --- what the system gives


def test_memory_of_libraries_is_capped(tmp_path: Path) -> None:
    write_cases(tmp_path)
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.formats.memory_cases", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == set(CASES)
    assert {name: growth for name, (growth, _) in found.items() if growth > MOST_GROWTH} == {}
    assert {name for name, (_, error) in found.items() if not error} == FINE, found
    expected = r"at most|between two compressors|compressed more than once|holds no array|longer than the chunk"
    for name, (_, error) in found.items():
        assert not error or re.search(expected, error), (name, error)


# --- a few chunks at a time


@pytest.mark.each_value
@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["f4", ">i2", "c8", "bool"])
def test_hdf5_read_in_parts(tmp_path: Path, most: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardload.formats.hdf5.source._MOST_AT_ONCE", most)
    data = flat((7, 10, 3), dtype)
    path = write_hdf5(tmp_path / "a.h5", {"x": data}, chunks=(2, 4, 3), compression="lzf")
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((2, 7, 10, 3), dtype)
        layout[0] = layout[1] = h5py.VirtualSource(".", "x", shape=data.shape)
        file.create_virtual_dataset("virtual", layout)
    for name, whole in (("x", data), ("virtual", np.stack([data, data]))):
        with closing(open_source(path, name)) as source:
            assert isinstance(source, Hdf5Source)
            for region in (Region.whole(whole.shape), Region((0,) * (whole.ndim - 3) + (1, 3, 1), whole.shape)):
                np.testing.assert_array_equal(read(source, region), whole[region.slices()])
                np.testing.assert_array_equal(source.plain(region), whole[region.slices()])


@pytest.mark.each_value
@pytest.mark.parametrize(
    "more", [{"order": "F"}, {"shards": (4, 8, 6), "filters": [zarr.codecs.TransposeCodec(order=(2, 1, 0))]}]
)
@pytest.mark.parametrize("most", [1, 3, 100])
def test_zarr_read_in_parts(tmp_path: Path, most: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardload.formats.zarr.source._MOST_AT_ONCE", most)
    data = flat((7, 10, 6))
    path = Path(write_zarr(tmp_path / "a.zarr", {"a": data}, 3 if "shards" in more else 2, chunks=(2, 4, 3), **more))
    key = "a/c/1/0/0" if "shards" in more else "a/2.1.0"
    expected = [(2, 0, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1), (3, 0, 0), (3, 0, 1), (3, 1, 0), (3, 1, 1)]
    with closing(open_source(path, "a")) as source:
        assert source.chunk_reader() is None
        for region in (Region.whole(data.shape), Region((1, 3, 1), data.shape)):
            np.testing.assert_array_equal(read(source, region), data[region.slices()])
            np.testing.assert_array_equal(source.plain(region), data[region.slices()])
        (path / key).unlink()
        assert sorted(missing_in(source)) == (expected if "shards" in more else [(2, 1, 0)])


def test_parts_of_a_value(tmp_path: Path) -> None:
    """As zarr-python gives them, but for ranges over the end."""
    (tmp_path / "x").write_bytes(bytes(range(50)))
    prototype = zarr.core.buffer.default_buffer_prototype()
    plain, looked_at = zarr.storage.LocalStore(tmp_path), open_store(str(tmp_path))
    ranges = (None, RangeByteRequest(3, 9), RangeByteRequest(0, 50), RangeByteRequest(7, 7), OffsetByteRequest(45))
    for part in (*ranges, SuffixByteRequest(5), SuffixByteRequest(99), RangeByteRequest(48, 99)):
        found = [asyncio.run(store.get("x", prototype, part)).to_bytes() for store in (plain, looked_at)]
        assert found[0] == found[1], part
    assert asyncio.run(looked_at.get("y", prototype)) is None
    looked_at.most_nbytes = 20
    with pytest.raises(ValueError, match="'x' has 50 bytes, what is stored there 20 at most"):
        asyncio.run(looked_at.get("x", prototype))
    assert len(asyncio.run(looked_at.get("x", prototype, RangeByteRequest(0, 20)))) == 20


@pytest.mark.parametrize("name", ["zstd", "blosc", "gzip"])
def test_a_damaged_chunk_over_the_edge(tmp_path: Path, name: str) -> None:
    """It is as long as its values, as one is that was stored without filters. HDF5 gives zeros for such Zstandard data."""
    data = np.random.default_rng(1).bytes(4096)
    stored = {
        "zstd": numcodecs.Zstd().encode(data),
        "blosc": numcodecs.Blosc().encode(data),
        "gzip": zlib.compress(data),
    }[name]
    numbers = {"gzip": (1, (4,)), "zstd": (32015, ()), "blosc": (32001, (2, 2, 1, 4096))}
    cut = bytearray(stored[:4096])
    if name == "blosc":
        cut[12:16] = struct.pack("<I", 4096)  # so much is there
    with h5py.File(tmp_path / "a.h5", "w") as file:
        with_filters(file, "x", bytes(cut), [numbers[name]], 4096, 6)
    with closing(open_source(tmp_path / "a.h5", "x")) as source:
        for read_values in (read_all, first_chunk):
            with pytest.raises((OSError, ValueError)):
                read_values(source)
    short = zlib.compress(bytes(4096))
    with h5py.File(tmp_path / "b.h5", "w") as file:
        with_filters(file, "x", short, [(1, (4,))], len(short), 1)  # makes more than there can be
    with (
        closing(open_source(tmp_path / "b.h5", "x")) as source,
        pytest.raises(ValueError, match="gzip stream is damaged, or longer"),
    ):
        first_chunk(source)


@pytest.mark.parametrize(
    ("names", "allowed", "is_bounded"),
    [
        (("gzip", "zstd"), (), False),
        (("gzip", "zstd"), ("gzip",), False),  # what may be used unasked counts, whatever is allowed
        (("gzip", "zstd"), ("all",), False),
        (("zfp", "zstd"), ("zfp",), True),  # what does as it likes, and may
        (("zfp", "zstd"), ("all",), True),
        (("zfp", "zstd"), ("bitshuffle",), False),
        (("gzip", "zstd"), ("all", LIMITED), True),  # a helper process, of which memory is limited
    ],
)
def test_compressors_that_were_allowed(names: tuple[str, ...], allowed: tuple[str, ...], is_bounded: bool) -> None:
    """One rule for both formats."""
    numbers = {codec.word: number for number, codec in HDF5_CODECS.items()}

    def access(words: tuple[str, ...]) -> Access:
        return Access(allow_filters=set(words) - {LIMITED}, is_limited=LIMITED in words)

    n_counted = sum(is_counted(number, access(allowed)) for number in [2, 3, *(numbers[name] for name in names)])
    assert (n_counted < 2) == is_bounded
    for words in (allowed, tuple(f"numcodecs.{word}" if word in numbers else word for word in allowed)):
        for prefix in ("", "numcodecs."):
            chain = [{"name": "bytes"}, *({"name": prefix + name} for name in names)]
            assert zarr_layout.is_stacked({"zarr_format": 3, "codecs": chain}, access(words)) != is_bounded
        filters, compressor = [{"id": "delta"}, {"id": names[0]}], {"id": names[1]}
        assert (
            zarr_layout.is_stacked({"zarr_format": 2, "filters": filters, "compressor": compressor}, access(words))
            != is_bounded
        )


def test_base64_is_no_compressor(tmp_path: Path) -> None:
    data = flat((8, 6), "int16")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    filters, zstd = [numcodecs.Base64()], numcodecs.Zstd()
    group.create_array("x", data=data, chunks=(3, 4), filters=filters, compressors=zstd)
    np.testing.assert_array_equal(load_all(tmp_path / "a.zarr", "x"), data)


def test_what_is_allowed_reaches_every_look_at_compressors(tmp_path: Path) -> None:
    data = flat((4096,), "u1").tobytes()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        with_filters(file, "x", zlib.compress(zlib.compress(data)), [(1, (4,)), (1, (4,))])
        with_filters(file, "lzf", zlib.compress(data), [(32000, (4, 0, 4096)), (1, (4,))], mask=1)  # LZF left out
        for name in ("x", "lzf"):
            layout = h5py.VirtualLayout((4096,), "u1")
            layout[:] = h5py.VirtualSource(".", name, shape=(4096,))
            file.create_virtual_dataset(f"virtual {name}", layout)
    for name in ("x", "lzf", "virtual x", "virtual lzf"):
        for allow in ((), ("all",), ("gzip", "lzf")):
            with pytest.raises(SourceError, match="compressed more than once"):
                find_array(str(tmp_path / "a.h5"), name, Access(allow_filters=allow))
        for access in (Access(allow_filters={"all"}, is_limited=True), Access(untrusted=Limits())):
            with closing(open_source(tmp_path / "a.h5", name, access)) as source:
                np.testing.assert_array_equal(read_all(source), flat((4096,), "u1"))
                np.testing.assert_array_equal(source.plain(Region.whole((4096,))), flat((4096,), "u1"))


# --- small arrays, which one rank reads before `staging` is looked at


@pytest.mark.parametrize(("nbytes", "is_small"), [(1 << 21, True), (1 << 22, False)])
def test_a_small_array_of_large_chunks_is_not_read_first(tmp_path: Path, nbytes: int, is_small: bool) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=flat((4,), "u1"), chunks=(nbytes,), maxshape=(None,), compression="gzip")
        file.create_dataset("nan", data=flat((4,), "f4"), chunks=(nbytes // 4,), maxshape=(None,)).attrs["_FillValue"] = np.nan
    write_zarr(tmp_path / "chunk.zarr", {"a": flat((4,), "u1")}, 3, chunks=(nbytes,))
    write_zarr(tmp_path / "shard.zarr", {"a": flat((4,), "u1")}, 3, chunks=(nbytes // 2,), shards=(nbytes,))
    for name, array in (("a.h5", "a"), ("chunk.zarr", "a"), ("shard.zarr", "a"), ("a.h5", "nan")):
        path, values = str(tmp_path / name), flat((4,), "f4" if array == "nan" else "u1")
        assert read_small(path, find_array(path, array)) == (values.tobytes() if is_small else None), name


# --- compressors over compressors


@pytest.mark.parametrize(
    ("zarr_format", "options", "is_refused"),
    [
        (3, {"compressors": [zarr.codecs.GzipCodec(), zarr.codecs.ZstdCodec()]}, True),
        (3, {"compressors": [zarr.codecs.BloscCodec(), zarr.codecs.GzipCodec()], "shards": (4, 6)}, True),
        (2, {"filters": [numcodecs.Shuffle(4), numcodecs.GZip()], "compressors": numcodecs.Blosc()}, True),
        (2, {"filters": [numcodecs.Shuffle(4), numcodecs.Shuffle(2)]}, False),
    ],
)
def test_zarr_arrays_that_are_compressed_twice(
    tmp_path: Path, zarr_format: int, options: dict[str, Any], is_refused: bool
) -> None:
    data = flat((4, 6), "int32")
    path = Path(write_zarr(tmp_path / "a.zarr", {"a": data}, zarr_format, **{"chunks": (2, 3), **options}))
    assert ("compressed more than once" in str(list_arrays(str(path))[0].refused)) == is_refused
    np.testing.assert_array_equal(load_all(path, "a", Access(untrusted=Limits())), data)


def test_shards_around_compressed_shards_and_long_indices(tmp_path: Path) -> None:
    sharding = zarr.codecs.ShardingCodec(chunk_shape=(2, 3), codecs=[zarr.codecs.BytesCodec(), zarr.codecs.GzipCodec()])
    for name, compressors in (("fine", None), ("twice", zarr.codecs.ZstdCodec())):
        more = {"serializer": sharding, "compressors": compressors, "chunks": (4, 6)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zarr-python's, that parts of such shards cannot be read
            path = write_zarr(tmp_path / f"{name}.zarr", {"a": flat((4, 6))}, 3, **more)
        (info,) = list_arrays(path)
        assert (info.refused is None) == (name == "fine"), info.refused
    shape = [1 << 14, 3 << 10]
    grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
    change_json(tmp_path / "fine.zarr/a/zarr.json", shape=shape, chunk_grid=grid)
    (info,) = list_arrays(str(tmp_path / "fine.zarr"))
    assert info.refused == "8388608 chunks in each shard, more than are read"


# --- metadata, attributes


def test_metadata_of_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write_zarr(tmp_path / "a.zarr", {"a": flat((4, 6)), "b": flat((4, 6))}))
    change_json(path / "a/zarr.json", attributes={"long": [[]] * 300})
    assert find_array(str(path), "a").shape == (4, 6)
    monkeypatch.setattr("shardload.formats.zarr.store._MOST_VALUES", 300)
    for attempt in (find_array, open_source):
        with pytest.raises(OSError, match=r"has some \d+ values; metadata has 300 at most"):
            attempt(str(path), "a")
    listed = {info.dataset: info.refused for info in list_arrays(str(path))}
    assert "300 at most" in str(listed["/a"]) and listed["/b"] is None


def test_attributes_that_are_long(tmp_path: Path) -> None:
    """Told by their length, where they are told at all; the array can be loaded."""
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        for name, value in (("a", np.zeros(20000)), ("b", np.zeros(2000)), ("c", np.zeros(4 << 20)), ("d", 1.5)):
            file.create_dataset(name, data=[1]).attrs["_FillValue"] = value
        file["b"].attrs["units"] = "m" * 5000
    found = {info.dataset: info.attributes for info in list_arrays(str(tmp_path / "a.h5"))}
    assert found["/a"]["_FillValue"] == "160000 bytes, not shown" and found["/b"]["_FillValue"] == "2000 values, not shown"
    assert found["/c"]["_FillValue"] == "33554432 bytes, not shown" and found["/d"] == {"_FillValue": 1.5}
    assert found["/b"]["units"] == "m" * 1024 + "... (not all shown)"
    path = write_zarr(tmp_path / "a.zarr", {"a": flat((4, 6))})
    zarr.open_array(path, path="a").attrs.update({"_FillValue": [0] * 2000, "units": "m" * 5000, "scale_factor": 2})
    assert find_array(path, "a").attributes == {
        "scale_factor": 2,
        "_FillValue": "2000 values, not shown",
        "units": found["/b"]["units"],
    }


@pytest.mark.parametrize("key", ["dtype", "_Unsigned"])
def test_many_texts_that_are_one_in_the_file(tmp_path: Path, key: str) -> None:
    """A load reads these two attributes, also if they are of variable length. Wrong if each text took memory for itself."""
    n, nbytes = 300, 1 << 20
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.arange(4)
        file["a"].attrs[key] = np.array(["m" * nbytes, *["x"] * (n - 1)], object)
    content = bytearray((tmp_path / "a.h5").read_bytes())
    collections = [match.start() for match in re.finditer(b"GCOL", content)]  # of the heap
    at = max(content.find(struct.pack("<IQ", nbytes, collection)) for collection in collections)
    content[at : at + 16 * n] = content[at : at + 16] * n
    (tmp_path / "a.h5").write_bytes(content)
    with python_memory_below(16 << 20):
        found = find_array(tmp_path / "a.h5", "a")
    assert found.packing[key] == ["unreadable", ["text, or another type that is no number"]]


# --- shapes that nothing can count


def hdf5_of(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...] | None, dtype: str = "f4") -> str:
    with h5py.File(path, "w", libver="latest") as file:
        raw_dataset(file, "x", h5py.h5t.py_create(np.dtype(dtype)), shape, chunks=chunks)
    return str(path)


def zarr_of(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...] | None, dtype: str = "f4") -> str:
    zarr.create_array(path, name="x", shape=(4,), chunks=(4,), dtype=dtype, zarr_format=2)
    change_json(path / "x/.zarray", shape=shape, chunks=chunks or shape)
    return str(path)


@pytest.mark.parametrize(
    ("make", "shape", "chunks", "dtype"),
    [
        (hdf5_of, (2**62,), (2**20,), "u1"),
        (hdf5_of, (2**62, 4), (2**20, 1), "f4"),
        (hdf5_of, (0, 2**62), (1, 2**20), "f4"),
        (hdf5_of, (2**60,), None, "u1"),
        (zarr_of, (2**62,), (2**20,), "f4"),
        (zarr_of, (2**62, 2**62), (4, 4), "f4"),
        (zarr_of, (2**70,), (4,), "f4"),
        (zarr_of, (0, 2**70), (1, 4), "f4"),
        (zarr_of, (4,), (2**62,), "f4"),
        (zarr_of, (4, 4), (2**62, 2**62), "f4"),
        (zarr_of, (1,) * 65, (1,) * 65, "f4"),
        (zarr_of, (1,) * 70, (1,) * 70, "f4"),
    ],
)
def test_shapes_that_nothing_can_hold(tmp_path: Path, make: Any, shape: Any, chunks: Any, dtype: str) -> None:
    path = make(tmp_path / "a.data", shape, chunks, dtype)
    mesh, abstract = Mesh(np.array(jax.devices()[:1]), ("a",)), AbstractMesh((2,), ("a",))
    message = (
        r"more than any machine can address|NumPy has 64 at most|which 64 bits cannot count|64 bits cannot count the bytes"
    )
    for call in (
        lambda: shardload.load(path, mesh, P(), dataset="x"),
        lambda: shardload.plan(path, abstract, P(), dataset="x"),
    ):
        with pytest.raises(SourceError, match=message):
            call()
    assert [info.shape for info in list_arrays(path)] == [shape]
    assert CliRunner().invoke(app, ["info", path]).exit_code == 0


def test_a_part_of_what_is_too_large_as_a_whole(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    for path in (hdf5_of(tmp_path / "a.h5", (2**62,), (2**10,)), zarr_of(tmp_path / "a.zarr", (2**62, 2**62), (2**10, 4))):
        with pytest.warns(shardload.MissingChunksWarning):
            x = shardload.load(
                path, mesh, P(), dataset="x", select=slice(2**61, 2**61 + 5) if path.endswith("h5") else (7, slice(5))
            )
        assert x.shape == (5,)
    path = zarr_of(tmp_path / "axes.zarr", (1,) * 64, None)
    assert shardload.load(path, mesh, P(), dataset="x", missing="fill").shape == (1,) * 64


# --- booleans


ODD = np.array([0, 1, 2, 128, 255, 3, 0, 1] * 2048, dtype="u1").view(bool)


def write_bools(path: Path, how: str) -> str:
    """`ODD` in a file, or behind a fill value."""
    if how.startswith("zarr"):
        made = zarr.create_array(path, shape=ODD.shape, chunks=(8192,), dtype=bool, zarr_format=int(how[-1]))
        made[:] = ODD
        return str(path)
    kind = h5py.h5t.py_create(np.dtype(bool), logical=True)
    filters = {"gzip": [(1, 0, (1,))], "lzf": [(32000, 0)]}.get(how, [])
    chunks, fill = None if how == "contiguous" else (ODD.size // 2,), np.array(2 * (how == "fill"), "u1").view(bool)
    with h5py.File(path, "w") as file:
        raw_dataset(
            file, "x", kind, ODD.shape, None if how == "fill" else ODD, chunks=chunks, filters=filters,
            setting=lambda creation: creation.set_fill_value(fill), memory_kind=kind,
        )  # fmt: skip
    return str(path)


def check_bools(x: jax.Array, expected: np.ndarray[Any, Any]) -> None:
    """Wrong for XLA if a byte is other than 0 or 1."""
    assert x.dtype == bool and set(np.unique(np.asarray(x).view("u1")).tolist()) <= {0, 1}
    np.testing.assert_array_equal(np.asarray(x), expected)
    np.testing.assert_array_equal(np.asarray(jnp.where(x, 1.5, 2.5)), np.where(expected, 1.5, 2.5))


@pytest.mark.each_value
@pytest.mark.parametrize("readers", ["direct", "root"])
@pytest.mark.parametrize("how", ["contiguous", "chunks", "gzip", "lzf", "fill", "zarr 2", "zarr 3"])
def test_booleans_other_than_0_and_1(tmp_path: Path, how: str, readers: str, tune: Callable[..., Any]) -> None:
    path, mesh = write_bools(tmp_path / "a", how), Mesh(np.array(jax.devices()[:1]), ("a",))
    expected = np.ones(ODD.shape, bool) if how == "fill" else ODD.view("u1") != 0
    if readers == "direct":
        tune(min_chunk_nbytes=1)  # chunk by chunk
    for more in ({"verify": "full"}, {"verify": "checksum"}, {"select": slice(3, 9)}, {"select": slice(3, 9000)}):
        x = shardload.load(path, mesh, P(), readers=readers, missing="fill", **more)
        check_bools(x, expected[more.get("select", slice(None))])
    for dtype in ("float32", "int8"):
        x = shardload.load(path, mesh, P(), readers=readers, missing="fill", dtype=dtype, verify="full")
        np.testing.assert_array_equal(np.asarray(x), expected.astype(dtype))
    array = shardload.load(path, mesh, P(), missing="fill")
    assert shardload.verify(array, path).n_elements == ODD.size
