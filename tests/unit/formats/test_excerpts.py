"""Are some values of a chunk the same as those of the whole chunk, however it is encoded? Is damage never taken for values?"""

from __future__ import annotations

import itertools
import math
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numcodecs
import numpy as np
import pytest
import zarr

from shardload.formats.base import ArrayInfo, ExcerptReader, Source, fresh
from shardload.formats.codecs import Chain, blosc, inflate, swap_bytes, unshuffle
from shardload.formats.excerpts import Excerpts, excerpt_nbytes
from shardload.formats.lookup import open_source
from shardload.formats.zarr import chunks as zarr_chunks

Array = np.ndarray[Any, Any]
BEFORE = 37  # bytes of something else in the file, before the chunk


def values_of(n: int, dtype: str = "<i4", seed: int = 0) -> Array:
    """Numbers that can be compressed, and are nowhere the same for long."""
    numbers = np.arange(n) // 3 + np.random.default_rng(seed).integers(0, 5, n)
    return numbers.astype(dtype)


def a_file(tmp_path: Path, stored: bytes) -> Any:
    """An open file with a chunk, and its descriptor's number."""
    path = tmp_path / "chunk"
    path.write_bytes(b"\xee" * BEFORE + stored + b"\xee" * 50)
    return path.open("rb")


def excerpt_of(excerpts: Excerpts, tmp_path: Path, stored: bytes, first: int, n: int, dtype: str) -> Array | None:
    """Values `first` to `first + n` of a stored chunk; None if it must be read whole."""
    out = np.full(n, 77, dtype)
    with a_file(tmp_path, stored) as file:
        found = excerpts.fetch(file.fileno(), BEFORE, len(stored), first, out, fresh)
    if found is None:
        return None
    excerpts.decode(found, out)
    return out


def some_ranges(n: int, block: int, seed: int) -> list[tuple[int, int]]:
    """Ranges of `n` values: at the ends, around the bounds of blocks, and anywhere."""
    rng = np.random.default_rng(seed)
    ends = sorted({0, 1, n - 1, n, *(k + d for k in range(0, n, max(1, block)) for d in (-1, 0, 1) if 0 <= k + d <= n)})
    pairs = [(a, b) for a, b in itertools.combinations(ends, 2) if b - a < n]
    chosen = [pairs[k] for k in rng.choice(len(pairs), min(len(pairs), 12), replace=False)]
    return chosen + [(a, a + int(rng.integers(1, n - a + 1))) for a in rng.integers(0, n - 1, 4).tolist()]


@pytest.mark.each_value
@pytest.mark.parametrize("blocksize", [0, 1 << 16])
@pytest.mark.parametrize("shuffle", [0, 1, 2])
@pytest.mark.parametrize("cname", numcodecs.blosc.list_compressors())
def test_blocks_of_blosc(tmp_path: Path, cname: str, shuffle: int, blocksize: int) -> None:
    """Wrong if blocks were taken from other places, or the last, shorter one was decoded like the others."""
    for dtype, n in (("<i4", 70_000), ("<f8", 33_333), ("<i2", 1 << 17), ("<i4", 5000)):
        values = values_of(n, dtype)
        stored = bytes(numcodecs.Blosc(cname, 5, shuffle, blocksize).encode(values))
        excerpts, (block,) = Excerpts(Chain([blosc()], values.nbytes)), struct.unpack_from("<I", stored, 8)
        for first, stop in some_ranges(n, block // values.itemsize, n):
            found = excerpt_of(excerpts, tmp_path, stored, first, stop - first, dtype)
            leaves_a_block = first * values.itemsize >= block or stop * values.itemsize <= (values.nbytes - 1) // block * block
            # Not of two blocks, because a short one at the end is never decoded alone.
            assert found is not None or not leaves_a_block or values.nbytes < 2 * block
            if found is not None:
                np.testing.assert_array_equal(found, values[first:stop], strict=True)


def shuffled_blocks(stored: bytes, order: list[int]) -> bytes:
    """The same Blosc buffer with its blocks in another order, as several threads write them."""
    *_, nbytes, block, total = struct.unpack_from("<BBBBIII", stored)
    n = -(-nbytes // block)
    starts = struct.unpack_from(f"<{n}I", stored, 16)
    assert list(starts) == sorted(starts) and len(order) == n
    blocks = [stored[a:b] for a, b in itertools.pairwise([*starts, total])]
    at, where = 16 + 4 * n, [0] * n
    for k in order:
        where[k] = at
        at += len(blocks[k])
    return stored[:16] + struct.pack(f"<{n}I", *where) + b"".join(blocks[k] for k in order)


def test_blocks_in_any_order(tmp_path: Path) -> None:
    """Wrong if a block was taken to end where the one with the next number starts."""
    values = values_of(1 << 16)
    stored = bytes(numcodecs.Blosc("zstd", 1, 1).encode(values))
    order = np.random.default_rng(1).permutation(8).tolist()
    mixed = shuffled_blocks(stored, order)
    assert mixed != stored and len(mixed) == len(stored)
    whole = np.empty_like(values)
    Chain([blosc()], values.nbytes).decode(mixed, whole)
    np.testing.assert_array_equal(whole, values)
    excerpts = Excerpts(Chain([blosc()], values.nbytes))
    for low, high in itertools.combinations(range(9), 2):
        first, stop = (low << 13) + 3, (high << 13) - 5
        found = excerpt_of(excerpts, tmp_path, mixed, first, stop - first, "<i4")
        assert (found is None) == (high - low == 8)
        if found is not None:
            np.testing.assert_array_equal(found, values[first:stop])


def test_more_blocks_than_one_read_knows(tmp_path: Path) -> None:
    values = values_of(1 << 20)
    stored = bytes(numcodecs.Blosc("zstd", 1, 1).encode(values))
    assert struct.unpack_from("<I", stored, 8)[0] * 124 < values.nbytes, "the table of blocks is longer than 512 bytes"
    excerpts = Excerpts(Chain([blosc()], values.nbytes))
    found = excerpt_of(excerpts, tmp_path, stored, 100_001, 11_111, "<i4")
    assert found is not None
    np.testing.assert_array_equal(found, values[100_001:111_112])


def test_a_header_cannot_ask_for_memory(tmp_path: Path) -> None:
    """Where each of very many blocks starts would be numbers of Python, which take many times the memory of the chunk."""
    for n_blocks, is_alone in ((1 << 14, True), ((1 << 14) + 1, False)):
        values = values_of(64 * n_blocks, "<i2")
        stored = bytes(numcodecs.Blosc("zstd", 1, 0, 128).encode(values))
        assert struct.unpack_from("<I", stored, 8) == (128,)
        found = excerpt_of(Excerpts(Chain([blosc()], values.nbytes)), tmp_path, stored, 5, 3000, "<i2")
        assert (found is not None) == is_alone
        if found is not None:
            np.testing.assert_array_equal(found, values[5:3005])
    # A chunk of 16 MiB, of which each block has 2 bytes
    nbytes, n = 1 << 24, 1 << 23
    head = struct.pack("<BBBBIII", 2, 1, 16, 1, nbytes, 2, 16 + 4 * n)
    excerpts, path = Excerpts(Chain([blosc()], nbytes)), tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(16 + 4 * n)
    tracemalloc.start()
    try:
        with path.open("rb") as file:
            assert excerpts.fetch(file.fileno(), 0, 16 + 4 * n, 0, np.empty(100, "u1"), fresh) is None
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def test_a_buffer_that_could_not_be_compressed(tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(0, 256, 40_000, dtype=np.uint8)
    stored = bytes(numcodecs.Blosc("lz4", 1, 0, 4096).encode(values))
    assert len(stored) == len(values) + 16
    excerpts = Excerpts(Chain([blosc()], values.nbytes))
    for first, n in ((0, 1), (1, 5), (30_000, 10_000), (0, 40_000), (17, 20_000)):
        found = excerpt_of(excerpts, tmp_path, stored, first, n, "u1")
        assert found is not None
        np.testing.assert_array_equal(found, values[first : first + n])


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("dtype", "part"), [(">i2", 2), (">f8", 8), (">c16", 8)])
def test_the_other_byte_order(tmp_path: Path, dtype: str, part: int, compressed: bool) -> None:
    """Wrong if bytes were not swapped, or those of a complex number as a whole."""
    values = values_of(60_000, dtype)
    stored = bytes(numcodecs.Blosc("zstd", 1, 1).encode(values)) if compressed else values.tobytes()
    stages = [blosc(), swap_bytes(part)] if compressed else [swap_bytes(part)]
    excerpts, native = Excerpts(Chain(stages, values.nbytes)), dtype.replace(">", "<")
    for first, n in ((0, 100), (100, 3000), (50_000, 10_000)):
        found = excerpt_of(excerpts, tmp_path, stored, first, n, native)
        assert found is not None
        np.testing.assert_array_equal(found, values[first : first + n].astype(native), strict=True)


def test_what_is_possible() -> None:
    assert Excerpts(Chain([], 8)).are_possible and Excerpts(Chain([blosc()], 8)).are_possible
    for stages in ([inflate()], [unshuffle(4)], [inflate(), unshuffle(4)], [blosc(), unshuffle(4)], [blosc(), inflate()]):
        assert not Excerpts(Chain(stages, 8)).are_possible
    large = ArrayInfo("f.h5", "/x", "HDF5", (64, 512, 512), "float32", (1, 512, 512))
    assert all(excerpt_nbytes(replace(large, codec=codec)) > 0 for codec in ("none", "blosc"))
    for codec in ("gzip+shuffle", "zstd", "blosc+shuffle", "blosc2", "fletcher32"):
        assert excerpt_nbytes(replace(large, codec=codec)) == 0
    for other in ({"chunks": None}, {"refused": "text"}, {"chunks": (1, 64, 512)}):  # the last are read in batches
        assert excerpt_nbytes(replace(large, **other)) == 0


def with_head(stored: bytes, **changes: int) -> bytes:
    names = ("version", "compressor", "flags", "itemsize", "nbytes", "block", "total")
    known = dict(zip(names, struct.unpack_from("<BBBBIII", stored), strict=True)) | changes
    return struct.pack("<BBBBIII", *(known[name] for name in names)) + stored[16:]


def with_starts(stored: bytes, *starts: int) -> bytes:
    return stored[:16] + struct.pack(f"<{len(starts)}I", *starts) + stored[16 + 4 * len(starts) :]


def test_damage_is_never_taken_for_values(tmp_path: Path) -> None:
    """A header that lies about sizes would make the library read and write past the end of its buffers."""
    values = values_of(1 << 15)
    stored = bytes(numcodecs.Blosc("lz4", 1, 1).encode(values))
    excerpts = Excerpts(Chain([blosc()], values.nbytes))
    assert excerpt_of(excerpts, tmp_path, stored, 0, 1024, "<i4") is not None
    damaged = {
        "version": with_head(stored, version=3),
        "other length": with_head(stored, nbytes=values.nbytes * 2),
        "other stored length": with_head(stored, total=len(stored) + 1),
        "block of nothing": with_head(stored, block=0),
        "block longer than the chunk": with_head(stored, block=values.nbytes + 1),
        "stored as it is, but shorter": with_head(stored, flags=2),
        "many small blocks": with_head(stored, block=1),
        "a block in the header": with_starts(stored, 0),
        "a block behind the end": with_starts(stored, len(stored)),
        "a block far away": with_starts(stored, 2**32 - 1),
        "less than a header": stored[:15],
        "nothing": b"",
    }
    for what, one in damaged.items():
        assert excerpt_of(excerpts, tmp_path, one, 0, 1024, "<i4") is None, what
    rng = np.random.default_rng(5)
    n_found = 0
    for _ in range(300):  # any byte: values that are found are of the right length, and nothing crashes
        one = bytearray(stored)
        one[int(rng.integers(0, len(one)))] ^= int(rng.integers(1, 256))
        try:
            n_found += excerpt_of(excerpts, tmp_path, bytes(one), 1000, 1024, "<i4") is not None
        except ValueError as error:
            assert "blosc data is damaged" in str(error) or "which numcodecs" in str(error)
    assert 0 < n_found < 300


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    values = values_of(1 << 15)
    stored = bytes(numcodecs.Blosc("lz4", 1, 1).encode(values))
    out = np.empty(1024, "<i4")
    for chain, content, n in (
        (Chain([blosc()], values.nbytes), stored, len(stored)),
        (Chain([], 1 << 14), b"\1" * 9000, 1 << 14),
    ):
        path = tmp_path / "short"
        path.write_bytes(content[:5000])
        with path.open("rb") as file, pytest.raises(OSError, match="the file ends at byte 5000"):
            Excerpts(chain).fetch(file.fileno(), 0, n, 3000, out, fresh)


def test_a_range_outside_of_the_chunk(tmp_path: Path) -> None:
    excerpts = Excerpts(Chain([], 400))
    for first, n in ((0, 101), (-1, 5), (99, 2), (5, 0)):
        with pytest.raises(ValueError, match="of a chunk of 400"):
            excerpt_of(excerpts, tmp_path, bytes(400), first, n, "<i4")


# --- in files


def files(tmp_path: Path) -> dict[str, tuple[Source, Array]]:
    """Sources with chunks of which excerpts can be read, and their values by the format's own library."""
    data, chunks = values_of(9 * 70 * 150, "<f4").reshape(9, 70, 150), (4, 64, 150)
    big, many = data.astype(">f4"), np.tile(data % 2 == 0, (4, 1, 1))
    found: dict[str, tuple[Source, Array]] = {}
    kinds: dict[str, tuple[Array, dict[str, Any]]] = {
        "plain": (data, {}),
        "plain, big-endian": (big, {}),
        "blosc": (data, dict(hdf5plugin.Blosc("zstd", 1, 1))),
        "blosc, big-endian": (big, dict(hdf5plugin.Blosc("zstd", 1, 2))),
        "blosc, booleans": (many, {"chunks": many.shape, **hdf5plugin.Blosc("zstd", 1, 1)}),
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, (values, options) in kinds.items():
            one = file.create_dataset(name, values.shape, values.dtype, fillvalue=True, **({"chunks": chunks} | options))
            one[...] = values
        half = file.create_dataset("half", data.shape, "<f4", chunks=chunks, fillvalue=7, **hdf5plugin.Blosc("zstd", 1, 1))
        half[:4, :64], half[8:] = data[:4, :64], data[8:]
        half.id.write_direct_chunk((4, 0, 0), np.full(chunks, 3, "<f4").tobytes(), 1)  # without its filter
    with h5py.File(tmp_path / "a.h5") as file:
        known = {name: file[name][()] for name in file}
    for name, values in known.items():
        found[f"hdf5 {name}"] = open_source(str(tmp_path / "a.h5"), name), values
    three = zarr.codecs.BloscCodec(typesize=4, cname="zstd", clevel=1)
    zarrs: dict[str, dict[str, Any]] = {
        "v2": {"zarr_format": 2, "compressors": numcodecs.Blosc("zstd", 1, 1)},
        "v2, big-endian": {"zarr_format": 2, "compressors": numcodecs.Blosc("zstd", 1, 1), "dtype": ">f4"},
        "v2, plain": {"zarr_format": 2, "compressors": None},
        "v3": {"compressors": three},
        "v3, shards": {"compressors": three, "shards": (8, 128, 150)},
        "v3, plain shards": {"compressors": None, "shards": (8, 128, 150)},
    }
    for name, options in zarrs.items():
        path = str(tmp_path / f"{name}.zarr")
        array = zarr.create_array(path, shape=data.shape, chunks=chunks, fill_value=5, **({"dtype": "<f4"} | options))
        array[:3], array[8:, :64] = data[:3], data[8:, :64]  # the rest is missing
        found[f"zarr {name}"] = open_source(path, "/"), np.asarray(zarr.open_array(path, mode="r")[:])
    return found


def test_excerpts_of_files_are_the_values_of_their_libraries(tmp_path: Path) -> None:
    rng, counts = np.random.default_rng(9), {}
    for name, (source, values) in files(tmp_path).items():
        reader, chunks = source.chunk_reader(), source.info.chunks
        assert isinstance(reader, ExcerptReader) and reader.has_excerpts and chunks is not None, name
        assert source.info.excerpt_nbytes > 0, name
        grid = [range(-(-n // c)) for n, c in zip(values.shape, chunks, strict=True)]
        size, counts[name] = math.prod(chunks), 0
        for index in itertools.product(*grid):
            inside = [slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True)]
            cell = values[tuple(inside)]
            whole, is_known = np.zeros(chunks, source.dtype), np.zeros(chunks, bool)
            part: Any = tuple(slice(0, n) for n in cell.shape)
            whole[part], is_known[part] = cell, True
            for _ in range(6):
                first = int(rng.integers(0, size - 1))
                n = int(rng.integers(1, min(size - first, size - 1) + 1))
                out = np.zeros(n, source.dtype)
                found = reader.fetch_excerpt(index, first, out)
                if found is None:
                    continue
                counts[name] += 1
                reader.decode_excerpt(found, out)
                here = is_known.reshape(-1)[first : first + n]
                np.testing.assert_array_equal(out[here], whole.reshape(-1)[first : first + n][here], name, strict=True)
    assert all(n > 3 for n in counts.values()), counts


def test_files_of_chunks_of_one_block_are_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of such chunks no part can be decoded alone. Wrong if each was opened to see that, and again to be read whole."""
    data = values_of(8 << 12, "<i4").reshape(8, 1 << 12)
    path = str(tmp_path / "a.zarr")
    zarr.create_array(path, data=data, chunks=(1, 1 << 12), compressors=zarr.codecs.BloscCodec(typesize=4, cname="lz4"))
    head = struct.unpack_from("<BBBBIII", Path(path, "c", "0", "0").read_bytes())
    assert not head[2] & 2 and head[4] == head[5] == 1 << 14, "one block, that was compressed"
    source, opened = open_source(path, "/"), list[str]()
    reader: Any = source.chunk_reader()

    def count(path: str, fence: Any) -> Any:
        opened.append(path)
        return open_file(path, fence)

    open_file = zarr_chunks._open_file
    monkeypatch.setattr(zarr_chunks, "_open_file", count)
    for k in range(8):
        out = np.empty(1000, "<i4")
        assert reader.fetch_excerpt((k, 0), 500, out) is None
        whole = np.empty((1, 1 << 12), "<i4")
        reader.decode(reader.fetch((k, 0)), whole)
        np.testing.assert_array_equal(whole, data[k : k + 1])
    assert len(opened) == 8 + 1


def test_other_chunks_have_none(tmp_path: Path) -> None:
    data = values_of(1 << 17, "<f4").reshape(32, 4096)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("gzip", data=data, chunks=(16, 4096), compression="gzip")
        file.create_dataset("both", data=data, chunks=(16, 4096), shuffle=True, **hdf5plugin.Blosc("lz4", 5, 0))
        file.create_dataset("contiguous", data=data)
    for name in ("gzip", "both", "contiguous"):
        source = open_source(str(tmp_path / "a.h5"), name)
        reader: Any = source.chunk_reader()
        assert source.info.excerpt_nbytes == 0
        assert reader is None or (not reader.has_excerpts and reader.fetch_excerpt((0, 0), 0, np.empty(5, "<f4")) is None)


@pytest.mark.parametrize("address", [10_000_000, 2**63 - 300, 2**63, 2**64 - 2])
def test_a_chunk_behind_the_end_of_its_file_is_left_to_the_whole_chunk(tmp_path: Path, address: int) -> None:
    """Which says where the file ends, and where the chunk should be. No read takes numbers of more than 63 bits."""
    data, path = values_of(1 << 12, "<i4").reshape(4, 32, 32), tmp_path / "far.h5"
    with h5py.File(path, "w") as file:
        for name, options in (("plain", {}), ("blosc", dict(hdf5plugin.Blosc("lz4", 5, 1)))):
            file.create_dataset(name, data=data, chunks=(1, 32, 32), **options)
        places = [file[name].id.get_chunk_info_by_coord((2, 0, 0)).byte_offset for name in file]
    stored = path.read_bytes()
    for place in places:
        assert stored.count(struct.pack("<Q", place)) == 1, "the index alone has it"
        stored = stored.replace(struct.pack("<Q", place), struct.pack("<Q", address))
    path.write_bytes(stored)
    for name in ("plain", "blosc"):
        reader: Any = open_source(str(path), name).chunk_reader()
        assert reader.fetch_excerpt((1, 0, 0), 0, np.empty(5, "<i4")) is not None or name == "blosc"  # of one block
        assert reader.fetch_excerpt((2, 0, 0), 0, np.empty(5, "<i4")) is None
        with pytest.raises(OSError, match=f"the file ends at byte {len(stored)}, but the chunk is stored at bytes {address}"):
            reader.fetch((2, 0, 0))


def only_by_libraries(tmp_path: Path) -> dict[str, Any]:
    """Arrays without a filter or with Blosc that only HDF5 or zarr-python can decode: chunk by whole chunk."""
    data, chunks, blosc_filter = (
        values_of(4 * 40_000, "<i4").reshape(4, 200, 200),
        (1, 200, 200),
        dict(hdf5plugin.Blosc("lz4", 5, 1)),
    )
    found: dict[str, Any] = {}
    few_bits = h5py.h5t.NATIVE_INT32.copy()
    few_bits.set_precision(20)
    with h5py.File(tmp_path / "block.h5", "w", userblock_size=512) as file:
        for name, options in (("plain", {}), ("blosc", blosc_filter)):
            file.create_dataset(name, data=data, chunks=chunks, **options)
            found[f"behind a user block, {name}"] = (str(tmp_path / "block.h5"), name)
    with h5py.File(tmp_path / "types.h5", "w") as file:
        colours = h5py.enum_dtype({"red": 0, "blue": 1}, basetype="<i4")
        file.create_dataset("colours", data=data % 2, chunks=chunks, dtype=colours, **blosc_filter)
        file.create_dataset("plain", data=data, chunks=chunks)
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_chunk(chunks)
        h5py.Dataset(h5py.h5d.create(file.id, b"bits", few_bits, h5py.h5s.create_simple(data.shape), layout))[...] = data
    for name in ("colours", "bits"):
        found[f"type {name}"] = (str(tmp_path / "types.h5"), name)
    for driver in ("core", "stdio"):
        found[f"the caller's, driver {driver}"] = (h5py.File(tmp_path / "types.h5", driver=driver)["plain"], "")
    for name, options in (("blosc", numcodecs.Blosc()), ("plain", None)):
        path = str(tmp_path / f"{name}.zarr")
        array = zarr.create_array(path, data=data, chunks=chunks, zarr_format=2, order="F", compressors=options)
        assert array.metadata.order == "F"
        found[f"order F, {name}"] = (path, "/")
    found["in memory"] = (zarr.create_array(zarr.storage.MemoryStore(), data=data, chunks=chunks, compressors=None), "")
    return found


def test_a_plan_expects_no_excerpts_from_a_library(tmp_path: Path) -> None:
    """Else each rank decodes whole chunks, twice as much in all as the plan says, instead of sharing them."""
    for what, (path, name) in only_by_libraries(tmp_path).items():
        source = open_source(path, name)
        assert source.info.codec in ("none", "blosc") and source.info.excerpt_nbytes == 0, what
        assert source.chunk_reader() is None
        if isinstance(path, h5py.Dataset):
            path.file.close()
