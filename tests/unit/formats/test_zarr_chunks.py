"""Does reading Zarr chunk by chunk give what zarr-python and TensorStore give, once each, and never believe a damaged file?"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs
import zarr.storage

from shardload.errors import SourceError
from shardload.formats.access import Access
from shardload.formats.contract.chunk_reader import Encoded
from shardload.formats.contract.format import Source
from shardload.formats.lookup import open_source
from shardload.formats.zarr import chunks as zarr_chunks
from shardload.formats.zarr.metadata import ZarrLayout
from shardload.planning.region import cut_box
from tests.tiers import some_of
from tests.unit.files import (
    assert_same,
    box_of,
    change_json,
    flat,
    read_all,
    write_tensorstore,
    write_zarr,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The data type", "ignore:The codec", "ignore:Numcodecs codecs", "ignore:Combining"
)

MISSING = 2**64 - 1
ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": True}}
GZIP = {"name": "gzip", "configuration": {"level": 5}}
BLOSC = {
    "name": "blosc",
    "configuration": {"cname": "zstd", "clevel": 3, "shuffle": "shuffle", "typesize": 4, "blocksize": 0},
}
BITS = {
    "name": "blosc",
    "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "typesize": 4, "blocksize": 0},
}
CRC = {"name": "crc32c"}
BYTES_TO_BYTES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "zstd": [ZSTD],
    "gzip": [GZIP],
    "blosc": [BLOSC],
    "bitshuffle": [BITS],
    "crc32c": [CRC],
    "gzip+crc32c": [GZIP, CRC],
    "crc32c+zstd+crc32c": [CRC, ZSTD, CRC],
}


def chunk_indices(source: Source) -> list[tuple[int, ...]]:
    assert source.info.chunks is not None
    return list(np.ndindex(*(-(-n // m) for n, m in zip(source.info.shape, source.info.chunks, strict=True))))


def reader_of(source: Source) -> zarr_chunks.ZarrChunks:
    reader = source.chunk_reader()
    assert isinstance(reader, zarr_chunks.ZarrChunks)
    return reader


def place(reader: zarr_chunks.ZarrChunks, source: Source, out: np.ndarray[Any, Any], box: tuple[range, ...]) -> None:
    """Fetch and decode a box of chunks together, and put what is inside the array in its place."""
    chunks = source.info.chunks
    assert chunks is not None
    buffer = np.full((*map(len, box), *chunks, source.dtype.itemsize), 0xA5, np.uint8).view(source.dtype)[..., 0]
    encoded = reader.fetch(box, lambda nbytes: np.full(nbytes, 0xA5, np.uint8))
    assert len(encoded.data) == np.prod([len(axis) for axis in box], dtype=int)
    reader.decode(encoded, buffer)
    for at in np.ndindex(*map(len, box)):
        first = [axis[k] * m for axis, k, m in zip(box, at, chunks, strict=True)]
        region = tuple(slice(a, min(a + m, n)) for a, m, n in zip(first, chunks, source.info.shape, strict=True))
        out[region] = buffer[at][tuple(slice(0, s.stop - s.start) for s in region)]


def read_chunks(source: Source, most: int = 1) -> np.ndarray[Any, Any]:
    """The whole array: chunk after chunk, the last one first, each with a reader of its own; or in batches, with one."""
    out = np.empty(source.info.shape, source.dtype)
    grid = [range(-(-n // m)) for n, m in zip(source.info.shape, source.info.chunks or (), strict=True)]
    reader = reader_of(source)
    for box in reversed(list(cut_box(grid, most))):
        place(reader_of(source) if most == 1 else reader, source, out, box)
    return out


def check(path: str | Path, name: str, expected: np.ndarray[Any, Any]) -> None:
    """Chunk by chunk, in batches, and by zarr-python, comes what was written, to the bit."""
    native = expected.astype(expected.dtype.newbyteorder("="))
    with contextlib.closing(open_source(path, name)) as source:
        for found in (*(read_chunks(source, most) for most in (1, 5, 1000)), read_all(source)):
            assert_same(found, native)


def regular(*shape: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": shape}}


def sharding(chunk_shape: tuple[int, ...], codecs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, CRC]
    configuration = {"chunk_shape": chunk_shape, "codecs": codecs, "index_codecs": index_codecs, **more}
    return {"name": "sharding_indexed", "configuration": configuration}


def serial(endian: str = "little") -> dict[str, Any]:
    return {"name": "bytes", "configuration": {"endian": endian}}


@pytest.mark.each_value
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("codec", BYTES_TO_BYTES)
def test_format_3_codecs_in_chunks_and_shards(tmp_path: Path, codec: str, endian: str) -> None:
    data, codecs = flat((5, 7, 11), "float32"), [serial(endian), *BYTES_TO_BYTES[codec]]
    bare_index = [serial()]
    ways = {
        "plain": {"chunk_grid": regular(2, 4, 3), "codecs": codecs},
        "end": {"chunk_grid": regular(2, 4, 6), "codecs": [sharding((1, 2, 3), codecs)]},
        "start": {"chunk_grid": regular(4, 6, 6), "codecs": [sharding((2, 6, 3), codecs, index_location="start")]},
        "bare": {"chunk_grid": regular(5, 8, 4), "codecs": [sharding((5, 4, 2), codecs, index_codecs=bare_index)]},
    }
    for name, metadata in ways.items():
        write_tensorstore(tmp_path / name, data, **metadata)
        check(tmp_path / name, "/", data)


COMPRESSORS_2 = (None, numcodecs.Zstd(3), numcodecs.Zlib(1), numcodecs.GZip(1), numcodecs.Blosc("lz4", shuffle=2))


@pytest.mark.each_value
@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("compressor", COMPRESSORS_2, ids=str)
def test_format_2(tmp_path: Path, compressor: Any, separator: str) -> None:
    sizes = {"<i4": 4, ">c16": 8, ">i4": 4, "bool": 1}
    for dtype, is_shuffled in some_of(itertools.product(sizes, (False, True)), 3):
        filters = [numcodecs.Shuffle(sizes[dtype])] if is_shuffled else None
        if filters and compressor is None:
            filters.append(numcodecs.Zlib(1))  # two, which are undone in the other order
        data = flat((5, 7, 3), dtype)
        options = {"filters": filters, "compressors": compressor}
        encoding = {"name": "v2", "separator": separator}
        path = write_zarr(tmp_path / "a.zarr", {"a": data}, 2, chunk_key_encoding=encoding, **options)
        check(path, "a", data)
        codecs = [*filter(None, [compressor]), *reversed(filters or [])]
        assert open_source(path, "a").info.codec == ("+".join(codec.codec_id for codec in codecs) or "none")
    assert (tmp_path / "a.zarr" / "a" / separator.join("110")).exists()


def test_codecs_of_numcodecs_in_format_3(tmp_path: Path) -> None:
    data = flat((5, 7, 3), "int32", first=1)
    path = write_zarr(tmp_path / "a.zarr", {"a": data}, chunks=(2, 3, 2), compressors=None)
    shuffle = {"name": "numcodecs.shuffle", "configuration": {"elementsize": 4}}
    zlib = {"name": "numcodecs.zlib", "configuration": {"level": 3}}
    change_json(tmp_path / "a.zarr" / "a" / "zarr.json", codecs=[serial(), shuffle, zlib])
    for chunk in (tmp_path / "a.zarr" / "a" / "c").glob("*/*/*"):
        chunk.write_bytes(numcodecs.Zlib(3).encode(numcodecs.Shuffle(4).encode(chunk.read_bytes())))
    source = open_source(path, "a")
    assert reader_of(source).chain.names == ("gzip", "shuffle")
    np.testing.assert_array_equal(read_chunks(source), data)


FILLS = {
    "bool": [True, False],
    "int8": [-128, 5],
    "uint64": [2**64 - 1, 0],
    "int64": [-(2**63), 2**53 + 1],
    "float16": [0.5, float("nan")],
    "float32": [float("nan"), float("-inf"), -0.0, 0.1],
    "float64": [float("inf"), 0.1, float("nan")],
    "complex64": [1 - 2j, complex(float("nan"), -0.0), complex(float("-inf"), 3)],
    "complex128": [0.1 + 1j],
}


@pytest.mark.each_value
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", FILLS)
def test_fill_values(tmp_path: Path, dtype: str, zarr_format: Any) -> None:
    group = zarr.open_group(tmp_path, mode="w", zarr_format=zarr_format)
    orders = ("<", ">") if zarr_format == 2 else ("<",)
    for k, (fill, order) in enumerate(itertools.product(FILLS[dtype], orders)):
        stored = np.dtype(dtype).newbyteorder(order)
        made = group.create_array(f"a{k}", shape=(4, 5), chunks=(2, 3), dtype=stored, fill_value=fill)
        made[1:3, 4:] = flat((2, 1), dtype, first=1)
        source = open_source(tmp_path, f"a{k}")
        assert sum(reader_of(source).fetch(box_of(index)).has_missing for index in chunk_indices(source)) >= 2
        found = read_chunks(source)
        expected = zarr.open_array(tmp_path, path=f"a{k}", mode="r")[...]
        assert found.tobytes() == expected.astype(source.dtype).tobytes()
        np.testing.assert_array_equal(found[0], np.full(5, fill, dtype))
    assert k + 1 == len(FILLS[dtype]) * len(orders)


@pytest.mark.parametrize("shards", [None, (4, 4, 6), (2, 8, 12), (6, 16, 12)])
def test_chunks_shards_and_folders_that_are_missing(tmp_path: Path, shards: tuple[int, ...] | None) -> None:
    """Wrong if chunks of two shards changed places, or if a value of another batch stayed."""
    data, path = flat((5, 14, 11)), tmp_path / "a.zarr"
    made = zarr.create_array(path, shape=data.shape, dtype="f4", chunks=(2, 4, 3), shards=shards, fill_value=7)
    made[:, :9, 2:] = data[:, :9, 2:]
    made[4, 12, 10] = -3
    if shards is None:
        shutil.rmtree(path / "c" / "1")
        shutil.rmtree(path / "c" / "2" / "3")
    expected = zarr.open_array(path, mode="r")[...]
    assert (expected == 7).any() and (expected == -3).any() == (shards is not None)
    check(path, "/", expected)


def write_shards(path: Path, index_codecs: list[dict[str, Any]] | None = None) -> tuple[Path, np.ndarray[Any, Any]]:
    """Four shards of four chunks of 2 x 3; the path of the first one's file."""
    data = flat((8, 12), "int32", first=1)
    more = {} if index_codecs is None else {"index_codecs": index_codecs}
    write_tensorstore(path, data, chunk_grid=regular(4, 6), codecs=[sharding((2, 3), [serial(), ZSTD], **more)])
    return path / "c" / "0" / "0", data


def test_a_damaged_index_is_found_by_its_checksum(tmp_path: Path) -> None:
    file, data = write_shards(tmp_path / "a")
    whole = file.read_bytes()
    for position in range(len(whole) - 4 * 16 - 4, len(whole)):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with contextlib.closing(open_source(tmp_path / "a", "/")) as source:
            for _ in range(2):  # and again, for the next thread that asks
                with pytest.raises(ValueError, match=r"the index of '.*c/0/0' is damaged: CRC-32C is [0-9a-f]{8}, stored is"):
                    reader_of(source).fetch(box_of((0, 0)))
            out = np.empty((8, 12), "int32")
            place(reader_of(source), source, out, box_of((2, 2)))
            np.testing.assert_array_equal(out[4:6, 6:9], data[4:6, 6:9])


@pytest.mark.parametrize(
    "entry",
    [(2**40, 10), (0, 2**40), (2**63, 2**63), (2**64 - 2, 2), (MISSING, 5), (0, MISSING), (0, 10**9), (10, 2**64 - 5)],
)
def test_an_index_that_points_outside_its_shard(tmp_path: Path, entry: tuple[int, int]) -> None:
    file, _ = write_shards(tmp_path / "a", [serial()])
    whole = file.read_bytes()
    file.write_bytes(whole[: -4 * 16] + np.array(entry, "<u8").tobytes() + whole[-3 * 16 :])
    reader = reader_of(open_source(tmp_path / "a", "/"))
    with pytest.raises((OSError, ValueError), match=r"index of|the file ends at byte"):
        reader.fetch(box_of((0, 0)))
    assert not reader.fetch(box_of((0, 1))).has_missing


def test_a_chunk_that_claims_most_of_a_large_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the file, and still nothing is allocated: no chunk of 24 bytes is that long."""
    file, _ = write_shards(tmp_path / "a", [serial()])
    index = np.full((4, 2), MISSING, "<u8")
    index[0] = (0, 2**30)
    with file.open("wb") as opened:
        opened.seek(2**31)
        opened.write(index.tobytes())
    reader = reader_of(open_source(tmp_path / "a", "/"))
    assert reader.fetch(box_of((0, 1))).data == [None]
    monkeypatch.setattr(os, "preadv", None)
    with pytest.raises(ValueError, match=f"stored in {2**30} bytes; its codecs can make {2 * 24 + 2**16} at most"):
        reader.fetch(box_of((0, 0)))


def test_plain_chunks_of_wrong_sizes_are_not_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if values were moved, because two chunks have as many bytes together as they should."""
    monkeypatch.setattr("shardload.formats.stored_chunks._LEAST_NBYTES", 1)
    codecs = [sharding((2,), [serial()], index_codecs=[serial()])]
    write_tensorstore(tmp_path / "a", flat((4,), "int64", first=1), chunk_grid=regular(4), codecs=codecs)
    file = tmp_path / "a" / "c" / "0"
    file.write_bytes(file.read_bytes()[:32] + np.array([0, 8, 16, 24], "<u8").tobytes())
    with pytest.raises(ValueError, match="other sizes are stored than the 16 bytes of a chunk"):
        read_all(open_source(tmp_path / "a", "/"))


def test_shards_too_short_for_their_index(tmp_path: Path) -> None:
    file, _ = write_shards(tmp_path / "a")
    whole = file.read_bytes()
    for n in (0, 1, 3, 67):
        file.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=f"has {n} bytes, its index alone would take 68"):
            reader_of(open_source(tmp_path / "a", "/")).fetch(box_of((0, 0)))


@pytest.mark.parametrize("codec", ["crc32c", "gzip+crc32c"])
def test_a_damaged_chunk_is_found_by_its_checksum(tmp_path: Path, codec: str) -> None:
    codecs = [serial(), *BYTES_TO_BYTES[codec]]
    write_tensorstore(tmp_path / "a", flat((4, 6), "int32"), chunk_grid=regular(4, 6), codecs=codecs)
    file = tmp_path / "a" / "c" / "0" / "0"
    whole, reader = file.read_bytes(), reader_of(open_source(tmp_path / "a", "/"))
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 64]) + whole[position + 1 :])
        with pytest.raises(ValueError, match=r"CRC-32C"):
            reader.decode(reader.fetch(box_of((0, 0))), np.empty((4, 6), "int32"))


def test_a_chunk_file_that_is_long_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_zarr(tmp_path / "a.zarr", {"a": flat((4, 6), "int32", first=1)}, chunks=(2, 6))
    file = tmp_path / "a.zarr" / "a" / "c" / "1" / "0"
    reader = reader_of(open_source(path, "a"))
    with file.open("wb") as opened:
        opened.truncate(2**40)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", None)  # it is not read
        with pytest.raises(ValueError, match=f"stored in {2**40} bytes; its codecs can make {2 * 48 + 2**16} at most"):
            reader.fetch(box_of((1, 0)))
    file.unlink()
    assert reader.fetch(box_of((1, 0))).data == [None]
    file.parent.rmdir()
    assert reader.fetch(box_of((1, 0))).data == [None]
    assert not reader.fetch(box_of((0, 0))).has_missing


@pytest.mark.parametrize("shards", [None, (4, 6)])
def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: Any) -> None:
    data = flat((8, 12), "int32", first=1)
    path = write_zarr(tmp_path / "a.zarr", {"a": data}, chunks=(2, 3), shards=shards)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    check(path, "a", data)
    reader = reader_of(open_source(path, "a"))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(OSError, match=r"the file ends at byte \d+, but values are stored up to byte.*c/0/0"):
        reader.fetch(box_of((0, 0)))


def test_requests_that_make_no_sense(tmp_path: Path) -> None:
    path = write_zarr(tmp_path / "a.zarr", {"a": flat((5, 7), "int32")}, chunks=(2, 3), shards=(2, 6))
    reader = reader_of(open_source(path, "a"))
    for index in ((3, 0), (0, 3), (-1, 0), (0,), (0, 0, 0)):
        with pytest.raises(ValueError, match=r"there are no chunks .* in a grid of \(3, 3\)"):
            reader.fetch(box_of(index))
    found = reader.fetch(box_of((1, 2)))
    for out in (np.empty((2, 1), "i4"), np.empty((2, 3), "u4"), np.empty((3, 2), "i4").T):
        for encoded in (found, Encoded([None])):
            with pytest.raises(ValueError, match=r"a buffer of .* for 1 chunks of 24 of int32"):
                reader.decode(encoded, out)
    with pytest.raises(ValueError, match="zstd data is damaged"):
        reader.decode(Encoded([b""]), np.empty((2, 3), "i4"))


@pytest.mark.parametrize("shards", [None, (4, 6, 8)])
def test_many_threads_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: Any) -> None:
    monkeypatch.setattr(zarr_chunks, "_MOST_SHARDS", 2)  # so that shards come and go
    data = flat((15, 17, 19), "float64", first=1)
    path = write_zarr(tmp_path / "a.zarr", {"a": data}, chunks=(2, 3, 4), shards=shards)
    source = open_source(path, "a")
    reader_of(source)
    with ThreadPoolExecutor(8) as pool:
        for seed in range(2):
            out = np.full(data.shape, -1.0)
            indices = chunk_indices(source)
            np.random.default_rng(seed).shuffle(indices)
            list(pool.map(lambda index, out=out: place(reader_of(source), source, out, box_of(index)), indices))
            np.testing.assert_array_equal(out, data)
    source.close()
    assert not any(path in str(file) for file in open_files())


def open_files() -> list[Path]:
    return [link.resolve() for link in Path("/proc/self/fd").iterdir()]


def test_only_the_last_few_shards_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_chunks, "_MOST_SHARDS", 2)
    data = flat((12, 6), "int16", first=1)
    path = write_zarr(tmp_path / "a.zarr", {"a": data}, chunks=(1, 2), shards=(3, 6))
    source = open_source(path, "a")
    reader = reader_of(source)
    for row in range(12):
        reader.fetch(box_of((row, 1)))
        names = sorted(file.parent.name for file in open_files() if path in str(file))
        assert names == [str(k) for k in range(max(0, row // 3 - 1), row // 3 + 1)]
    reader.close()
    for row in (0, 3, 0, 6):  # the one that was not used for longest has to go
        reader.fetch(box_of((row, 1)))
    assert sorted(file.parent.name for file in open_files() if path in str(file)) == ["0", "2"]
    monkeypatch.setattr(zarr_chunks, "_MOST_INDICES_NBYTES", 9 * 16)  # room for one index
    reader = reader_of(open_source(path, "a"))
    source.close()
    for row in (0, 3, 6):
        reader.fetch(box_of((row, 1)))
        assert [file.parent.name for file in open_files() if path in str(file)] == [str(row // 3)]


class Derived(zarr.storage.LocalStore):
    """May do anything."""


def test_stores_other_than_plain_folders_are_left_to_zarr_python(tmp_path: Path) -> None:
    path = write_zarr(tmp_path / "a.zarr", {"a": flat((4, 6))})
    archive = zarr.storage.ZipStore(shutil.make_archive(str(tmp_path / "a"), "zip", path))
    zipped = zarr.open_array(archive, path="a", mode="r")
    memory = zarr.create_array(zarr.storage.MemoryStore(), shape=(4, 6), chunks=(2, 3), dtype="i4")
    derived = zarr.open_array(Derived(path), path="a", mode="r")
    with pytest.raises(SourceError, match="a Derived was handed in, which may read files anywhere"):
        open_source(derived, "/a")
    trusted = open_source(derived, "/a", Access(allow_external=True))
    for source in (open_source(zipped, "a"), open_source(memory, "/"), trusted):
        assert source.chunk_reader() is None
        source.close()
    for opened in (zarr.open_array(path, path="a", mode=mode) for mode in ("r", "r+")):
        with contextlib.closing(open_source(opened, "/a")) as source:
            np.testing.assert_array_equal(read_chunks(source), flat((4, 6)))
    assert open_source(path, "a").chunk_reader() is not None


LEFT: dict[str, tuple[int, dict[str, Any]]] = {
    "order": (2, {"order": "F"}),
    "order, not compressed": (2, {"order": "F", "compressors": None, "filters": None}),
    "delta": (2, {"filters": [numcodecs.Delta("i4")]}),
    "two filters": (2, {"filters": [numcodecs.Shuffle(4), numcodecs.Delta("i4")]}),
    "lz4": (2, {"compressors": numcodecs.LZ4()}),
    "bz2": (2, {"compressors": numcodecs.BZ2()}),
    "transposed": (3, {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]}),
    "transposed in shards": (3, {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))], "shards": (4, 6)}),
    "shards and more": (
        3,
        {
            "chunks": (4, 6),
            "serializer": zarr.codecs.ShardingCodec(chunk_shape=(2, 3)),
            "compressors": zarr.codecs.Crc32cCodec(),
        },
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_encodings_that_are_left_to_zarr_python(tmp_path: Path, name: str) -> None:
    data, (zarr_format, options) = flat((4, 6), "int32"), LEFT[name]
    path = write_zarr(tmp_path / "a.zarr", {"a": data}, zarr_format, **{"chunks": (2, 3), **options})
    source = open_source(path, "a")
    assert source.chunk_reader() is None
    np.testing.assert_array_equal(read_all(source), data)


TINY = sharding((1, 1), [{"name": "bytes"}])


def test_shards_inside_of_shards_are_refused(tmp_path: Path) -> None:
    codecs = [sharding((32, 32), [TINY])]
    write_tensorstore(tmp_path / "a.zarr", flat((32, 32), "uint8"), chunk_grid=regular(32, 32), codecs=codecs)
    with pytest.raises(SourceError, match="it holds shards inside of shards, which only zarr-python reads"):
        open_source(str(tmp_path / "a.zarr"), "/")


def metadata_of(tmp_path: Path, zarr_format: Any, **options: Any) -> dict[str, Any]:
    path = write_zarr(tmp_path / "m.zarr", {"a": flat((4, 6), "int32")}, zarr_format, **options)
    found: dict[str, Any] = copy.deepcopy(dict(zarr.open_array(path, path="a", mode="r").metadata.to_dict()))
    _ = ZarrLayout.of(found, np.dtype("int32")).stages
    return found


def check_not_covered(good: dict[str, Any], changes: list[dict[str, Any]]) -> None:
    for change in changes:
        with contextlib.suppress(ValueError):
            pytest.fail(f"{change} was taken for {ZarrLayout.of(good | change, np.dtype('int32')).stages}")


def test_unknown_metadata_of_format_3_is_not_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = metadata_of(tmp_path, 3, chunks=(2, 3), shards=(4, 6))
    shards = good["codecs"][0]["configuration"]
    encoding = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}
    changes: list[dict[str, Any]] = [
        {"new": {"must_understand": True}},
        {"data_type": "int64"},
        {"data_type": {"name": "int32", "configuration": {}}},
        {"storage_transformers": [{"name": "x"}]},
        {"chunk_grid": {"name": "rectilinear", "configuration": {"chunk_shape": [4, 6]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6], "origin": [0, 0]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 0]}}},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "-"}}},
        {"chunk_key_encoding": {"name": "suffix", "configuration": {}}},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/", "prefix": "x"}}},
        {"codecs": [good["codecs"][0], {"name": "crc32c"}]},
        {"codecs": [{"name": "bytes"}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]},
        {"codecs": [{"name": "packbits"}]},
        {"codecs": [serial(), {"name": "zstd", "configuration": {"level": 0, "dictionary": "x"}}]},
        {"codecs": [serial(), {"name": "zstd", "must_understand": False}]},
        {"codecs": [serial(), {"name": "numcodecs.shuffle", "configuration": {"elementsize": 7}}]},
        {"codecs": [encoding, serial()]},
        *(
            {"codecs": [{"name": "sharding_indexed", "configuration": shards | change}]}
            for change in (
                {"chunk_shape": [3, 3]},
                {"chunk_shape": [2]},
                {"index_location": "middle"},
                {"index_codecs": [serial("big")]},
                {"index_codecs": [serial(), encoding]},
                {"codecs": [good["codecs"][0]]},
                {"order": "morton"},
            )
        ),
    ]
    check_not_covered(good, changes)


def test_unknown_metadata_of_format_2_is_not_covered(tmp_path: Path) -> None:
    good = metadata_of(tmp_path, 2, chunks=(2, 3))
    changes: list[dict[str, Any]] = [
        {"dtype": "<i8"},
        {"dtype": [["a", "<i4"]]},
        {"order": "F"},
        {"dimension_separator": ":"},
        {"chunks": [0, 3]},
        {"compressor": {"id": "lzma"}},
        {"compressor": {"id": "zstd", "dictionary": "x"}},
        {"filters": [{"id": "lzma"}]},
        {"filters": [{"id": "zlib", "level": 1, "strategy": 0}]},
        {"filters": [{"id": "shuffle", "elementsize": 0}]},
    ]
    check_not_covered(good, changes)


def test_metadata_in_its_short_forms(tmp_path: Path) -> None:
    """Extension points may be names alone, and options that have a default may be left out."""
    data = flat((4, 6), "int32", first=1)
    path = write_zarr(tmp_path / "a.zarr", {"a": data}, compressors=[zarr.codecs.GzipCodec(), zarr.codecs.Crc32cCodec()])
    good = dict(zarr.open_array(path, path="a", mode="r").metadata.to_dict())
    short = good | {"chunk_key_encoding": "default", "codecs": [serial(), "gzip", "crc32c"]}
    del short["storage_transformers"]
    layout = ZarrLayout.of(short, np.dtype("int32"))
    assert layout.key((1, 2)) == "c/1/2" and layout.key(()) == "c"
    assert [stage.name for stage in layout.stages] == ["crc32c", "gzip"]
    layout = ZarrLayout.of(short | {"chunk_key_encoding": {"name": "v2"}}, np.dtype("int32"))
    assert layout.key((1, 2)) == "1.2" and layout.key(()) == "0"
