"""Do many writers and one catalog make the Zarr store that zarr-python, TensorStore and xarray read?"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

from shardload.errors import ConfigError, SourceError
from shardload.formats.likeness import marked
from shardload.formats.lookup import open_source
from shardload.formats.saving import format_for, make_sink
from shardload.formats.sink import ArraySpec, Compression
from shardload.storage import new_folder, target
from shardload.storage.local import LocalFile
from tests.tiers import quick_ones, some_of
from tests.unit.files import flat, missing_in, read_all
from tests.unit.saving import put_whole, quick_fsync, save, write_all  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_fsync")

SHAPE, CHUNKS, SHARDS = (5, 7, 6), (2, 3, 4), (4, 6, 4)
DTYPES = ("?", "i1", "<u2", ">i4", "<i8", "<f2", "<f4", ">f8", "<c8", ">c16")
BLOSC_ZSTD = {"name": "blosc", "level": 1, "shuffle": False, "options": {"cname": "zstd", "bitshuffle": True}}
COMMON: dict[str, Any] = {
    "none": None,
    "gzip": "gzip",
    "gzip0": {"name": "gzip", "level": 0},
    "zstd": {"name": "zstd", "level": 9},
    "blosc": "blosc",
    "bits": BLOSC_ZSTD,
}
LAYOUTS = [(name, sharded) for name in COMMON for sharded in (False, True)]
QUICK = [one for k, one in enumerate(LAYOUTS) if one[1] or k % 3 == 0]


def spec(dtype: Any, compression: Any = None, chunks: Any = CHUNKS, shape: Any = SHAPE, **more: Any) -> ArraySpec:
    return ArraySpec(shape, np.dtype(dtype), chunks, compression=Compression.of(compression), **more)


def by_tensorstore(path: Path) -> Any:
    return tensorstore.open({"driver": "zarr3", "kvstore": f"file://{path}"}).result().read().result()


@pytest.mark.parametrize(("name", "sharded"), quick_ones(LAYOUTS, *QUICK))
def test_every_type_is_read_back(tmp_path: Path, name: str, sharded: bool) -> None:
    """Wrong if an index had other offsets, an edge chunk were cut, or metadata did not say what was done to the bytes."""
    more: dict[str, Any] = {"dims": ("z", None, "x"), "attrs": {"units": "K"}}
    if sharded:
        more["shards"] = SHARDS
    values = {f"g/x{k}": flat(SHAPE, kind) for k, kind in some_of(enumerate(DTYPES), 1 if name == "none" else 3)}
    specs = {key: spec(one.dtype, COMMON[name], checksum=k % 2 == 1, **more) for k, (key, one) in enumerate(values.items())}
    sink = save(tmp_path / "x.zarr", values, specs, group_attrs={"/": {"title": "a test"}})
    group = zarr.open_group(tmp_path / "x.zarr", mode="r")
    assert dict(group.attrs) == {"title": "a test"}
    for key, expected in values.items():
        found = group[key]
        assert found.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=") and found.chunks == CHUNKS
        assert found.attrs["units"] == "K" and found.shards == (SHARDS if sharded else None)
        np.testing.assert_array_equal(found[...], expected)
        np.testing.assert_array_equal(by_tensorstore(tmp_path / "x.zarr" / key), expected)
    with closing(open_source(str(tmp_path / "x.zarr"), "/g/x6")) as source:
        np.testing.assert_array_equal(read_all(source), values["g/x6"])
        told = attrgetter("format", "shape", "dtype", "chunks", "shards")
        assert told(sink.arrays["/g/x6"].info) == told(source.info)
        assert not missing_in(source) and source.labels().dims[0] == "z"


def test_metadata_is_that_of_zarr_python(tmp_path: Path) -> None:
    """Key by key, for an array that zarr-python makes with the same wishes."""
    values = flat((5, 4), "<f4")
    save(tmp_path / "x.zarr", {"x": values}, {"x": spec("<f4", "blosc", (2, 2), (5, 4), shards=(4, 4), fill_value=np.nan)})
    codec = zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=4, blocksize=0)
    made = zarr.create_array(
        tmp_path / "y.zarr",
        shape=(5, 4),
        dtype="f4",
        chunks=(2, 2),
        shards=(4, 4),
        compressors=codec,
        fill_value=np.nan,
        dimension_names=("dim_0", "dim_1"),
    )
    assert made.shards == (4, 4)
    ours, theirs = (json.loads(path.read_text()) for path in (tmp_path / "x.zarr/x/zarr.json", tmp_path / "y.zarr/zarr.json"))
    assert ours.keys() <= theirs.keys() and {key: theirs[key] for key in ours} == ours


def test_fill_values_that_json_does_not_have(tmp_path: Path) -> None:
    """Wrong if one became another: it is the value of chunks that nobody has written."""
    for fill in map(np.float32, ("nan", "inf", "-inf")):
        for value in (fill, np.complex64(complex(1, fill))):
            values = np.full(SHAPE, 3, value.dtype)
            save(tmp_path / "x.zarr", {"x": values}, {"x": spec(value.dtype, fill_value=value)}, mode="w")
            found = zarr.open_array(tmp_path / "x.zarr" / "x", mode="r").fill_value
            np.testing.assert_array_equal(found, value)
            np.testing.assert_array_equal(np.imag(found), np.imag(value))


def test_a_chunk_is_written_once(tmp_path: Path) -> None:
    sink = make_sink(str(tmp_path / "x.zarr"), {"x": spec("f4", None)})
    with sink.create() as catalog, closing(sink.writer(catalog.ticket)) as writer:
        first = sink, writer, catalog, "/x", flat(SHAPE, "f4"), sink.arrays["/x"].region((0, 0, 0))
        put_whole(*first)
        with pytest.raises(SourceError, match=r"chunk \(0, 0, 0\) of '/x' .*EEXIST"):
            put_whole(*first)
    with pytest.raises(ValueError, match="is closed"):
        put_whole(*first)


def test_a_store_that_is_abandoned_while_another_rank_writes_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a chunk that comes last were left beside the name, or made the folder again."""
    sink = make_sink(str(tmp_path / "x.zarr"), {"x": spec("f4", None)})
    one, values, right = sink.arrays["/x"], flat(SHAPE, "f4"), shutil.rmtree
    catalog = sink.create()
    with closing(sink.writer(catalog.ticket)) as writer:
        put_whole(sink, writer, catalog, "/x", values, one.region((0, 0, 0)))
        late = iter([1, 2])

        def remove(path: str, **how: Any) -> None:  # a file comes when the folders were listed
            right(path, **how)
            if (number := next(late, None)) is not None:
                os.makedirs(os.path.join(path, "x/c/0/0"))
                Path(path, f"x/c/0/0/{number}").touch()

        monkeypatch.setattr(target.shutil, "rmtree", remove)
        monkeypatch.setattr(target, "_PAUSES", (0.0,) * 3)
        catalog.abandon()
        assert os.listdir(tmp_path) == []
        with pytest.raises(SourceError, match="ENOENT"):
            put_whole(sink, writer, catalog, "/x", values, one.region((0, 0, 1)))
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("asked", "version", "words"),
    [
        (spec("f4", {"name": "gzip", "shuffle": True}), "zarr", "which Zarr format 3 does not have. Pass compression='blosc'"),
        (spec("f4", "lz4"), "zarr", r"is 'lz4'; Zarr has gzip, zstd, blosc. Pass compression='blosc\(lz4\)'"),
        (spec("f4", "szip"), "zarr", "is 'szip'; Zarr has gzip, zstd, blosc. Pass compression='zstd'"),
        (spec("f4", {"name": "gzip", "options": {"a": 1}}), "zarr", "gzip has no option 'a' in Zarr"),
        (spec("f4"), "zarr2", r"format is 'zarr2'; .*xarray's to_zarr\(path, zarr_format=2\)"),
        (spec("f4", shards=(3, 3, 4)), "zarr", r"shards of '/x' are \(3, 3, 4\); expected a multiple of the chunks"),
        (spec("f4", attrs={"a": np.nan}), "zarr", "the attribute 'a' of '/x' is nan, which Zarr's JSON cannot hold"),
        (spec("f4", attrs={"a": np.datetime64("NaT", "s")}), "zarr", "'a' of '/x' is .*NaT.*, which Zarr's JSON cannot hold"),
    ],
)
def test_what_zarr_cannot_hold(tmp_path: Path, asked: ArraySpec, version: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_sink(str(tmp_path / "x.zarr"), {"x": asked}, format=version)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("zarr", "/..", "is no name"),
        ("zarr", "/g/../../out", "is no name"),
        ("hdf5", "/./g", "is no name"),
        ("zarr", "/zarr.json", "has files of such names"),
        ("zarr", "/a/.zgroup", "has files of such names"),
        ("zarr", "/" + "q" * 256, "too long for a folder"),
        ("netcdf4", "/ g", "begins with a space"),
        ("netcdf4", "/" + "q" * 256, "of 256 bytes"),
        *((kind, "/g/x", "is an array, or below one") for kind in ("hdf5", "netcdf4", "zarr")),
        *((kind, "/g/x/y", "is an array, or below one") for kind in ("hdf5", "netcdf4", "zarr")),
        ("netcdf4", "/lon", "is a group, and the name of an axis"),
    ],
)
def test_groups_that_a_file_cannot_have(tmp_path: Path, kind: str, name: str, says: str) -> None:
    """Wrong if a group called ".." were written beside a Zarr store, or attributes of a group replaced an array."""
    asked = {"g/x": spec("i4", None, None, (3,), dims=("lon",))}
    with pytest.raises(ConfigError, match=says):
        make_sink(str(tmp_path / "out"), asked, format=kind, group_attrs={name: {"t": 1}})
    make_sink(str(tmp_path / "out"), asked, format=kind, group_attrs={"/": {"t": 1}, "/g": {"t": 2}, "/h/..i": {"t": 3}})


@pytest.mark.parametrize("value", [-9, np.float64(-9), "AAAAAAAAIsA="])
def test_what_marks_missing_data_may_be_said_as_xarray_writes_it(value: Any) -> None:
    """Wrong if the text that Zarr format 3 has for a number in floating point were refused."""
    assert marked("zarr", "/x", {"_FillValue": value}, np.dtype("f4")) == ({"_FillValue": "AAAAAAAAIsA="}, None)
    for text in ("AAAA", "none"):
        with pytest.raises(ConfigError, match="expected one value of type float32"):
            marked("zarr", "/x", {"_FillValue": text}, np.dtype("f4"))


def test_names_and_formats(tmp_path: Path) -> None:
    one = spec("f4", None, None, (2,))
    for names in (["../x"], ["a//b"], ["a", "/a"], ["/", "a"], [], ["a", "a/b"], ["g/zarr.json"], [".zgroup/x"], ["a\\b"]):
        with pytest.raises(ConfigError):
            make_sink(str(tmp_path / "x.zarr"), dict.fromkeys(names, one))
    for names in (["/"], ["a", "a/b"]):
        with pytest.raises(ConfigError):
            make_sink(str(tmp_path / "x.h5"), dict.fromkeys(names, one))
    with pytest.raises(ConfigError, match="does not tell a format"):
        format_for("x.bin")
    with pytest.raises(ConfigError, match="format is 'hdf4'"):
        format_for("x.h5", "hdf4")
    with pytest.raises(ConfigError, match="is a URL"):
        make_sink("s3://a/x.h5", {"x": one})


def test_chunks_of_a_shard_are_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if each chunk opened its shard file and waited for the disk; or if a file was closed that a thread writes to."""
    values = flat((32, 32), "<i4")
    spec = ArraySpec(values.shape, values.dtype, (2, 2), (16, 16), Compression.of("zstd"))
    sink = make_sink(str(tmp_path / "x.zarr"), {"x": spec})
    one, synced, opened, os_open = sink.arrays["/x"], [], [], os.open
    monkeypatch.setattr(new_folder, "_MOST_UNSYNCED", 100)
    with sink.create() as catalog, closing(sink.writer(catalog.ticket)) as writer:
        monkeypatch.setattr(new_folder.os, "fsync", synced.append)
        monkeypatch.setattr(new_folder.os, "open", lambda *arguments: opened.append(arguments) or os_open(*arguments))
        stored = {k: one.encode(one.region(k), values[one.region(k).slices()]) for k in np.ndindex(*one.spec.grid)}
        numbers = [one.number(one.region(k)) for k in stored]
        offsets = catalog.allocate("/x", numbers, [part.nbytes for part in stored.values()]).tolist()
        puts = list(zip(numbers, offsets, stored.values(), strict=True))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda put: writer.put("/x", *put), puts))
        # Twice in between: four files, and those that the four threads still had from before.
        assert 1 <= len(synced) <= 16 and len(puts) == 256
        assert len(opened) <= 4 * 12  # four threads may open a file at the same time
        writer.sync()
        assert not writer._storage._unsynced and 4 <= len(synced) <= 24
        catalog.finish()
        catalog.commit()
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "x.zarr", mode="r")["x"][...], values)


def test_a_file_that_another_thread_closes_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a weak reference gave a file to a thread while it is being closed: a save failed with "the file was closed"."""
    folder, n_closed = new_folder.NewFolder(str(tmp_path / "x"), "w"), 0
    folder.create()

    def closed(file: LocalFile) -> None:
        nonlocal n_closed
        file.close()
        if file._path.endswith("/c") and (n_closed := n_closed + 1) == 1:
            folder.write_at("c", b"second", 5)  # what another thread may do now

    monkeypatch.setattr(LocalFile, "__del__", closed)
    folder.write_at("c", b"first", 0)
    folder.sync()
    assert n_closed == 1  # else this test shows nothing
    folder.sync()
    assert Path(folder.path, "c").read_bytes() == b"firstsecond"
    folder.discard()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_sync_right_before_a_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """Wrong if the folder counted as synced by that, and the name of the file never got to the disk."""
    values = flat(SHAPE, "f4")
    sink = make_sink(str(tmp_path / "x.zarr"), {"x": spec("f4", None, shards=SHARDS if sharded else None)})
    one, os_open, synced = sink.arrays["/x"], os.open, set[str]()  # what was synced after the file was there
    with sink.create() as catalog, closing(sink.writer(catalog.ticket)) as writer:

        def opened(path: str, flags: int, *more: Any) -> int:
            if flags & os.O_CREAT:
                writer.sync()  # another thread's
                synced.clear()
            return os_open(path, flags, *more)

        with monkeypatch.context() as patch:
            patch.setattr(new_folder, "sync_folder", synced.add)
            patch.setattr(new_folder.os, "open", opened)
            put_whole(sink, writer, catalog, "/x", values, one.region((0, 0, 0)))
            patch.setattr(new_folder.os, "open", os_open)
            writer.sync()
        folder = os.path.join(catalog.ticket.temporary, os.path.dirname(sink.key_of(catalog.ticket, "/x", 0)))
        while len(folder) >= len(catalog.ticket.temporary):
            assert folder in synced
            folder = os.path.dirname(folder)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_sync_while_other_threads_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """Wrong if a file was closed that a thread writes to: its bytes would go into the one that gets its number."""
    values, write, n_written = flat(SHAPE, "f4"), target.WritableFile.write_at, 0
    sink = make_sink(str(tmp_path / "x.zarr"), {"x": spec("f4", None, shards=SHARDS if sharded else None)})
    one = sink.arrays["/x"]
    with sink.create() as catalog, closing(sink.writer(catalog.ticket)) as writer:

        def write_at(file: target.WritableFile, data: Any, offset: int) -> None:
            nonlocal n_written
            with ThreadPoolExecutor(1) as pool:
                pool.submit(writer.sync).result()
            write(file, data, offset)
            n_written += 1

        monkeypatch.setattr(target.WritableFile, "write_at", write_at)
        for index in np.ndindex(*one.spec.grid):
            put_whole(sink, writer, catalog, "/x", values, one.region(index))
        writer.sync()
        assert not writer._storage._unsynced
        catalog.finish()
        catalog.commit()
    assert n_written >= np.prod(one.spec.grid)
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "x.zarr", mode="r")["x"][...], values)
