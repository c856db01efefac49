"""Is an HDF5 file at a URL read as the same file on disk is: by one who opens it, and by all others without opening it?"""

from __future__ import annotations

import gc
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import ml_dtypes
import numpy as np
import pytest

from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access, Limits
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.hdf5 import skeleton
from shardload.formats.lookup import Finder, find_array, format_of, list_arrays, open_file, open_source, split_path
from shardload.planning.region import Region
from shardload.storage.block_cache import BlockCache
from shardload.storage.objects import Ranges
from shardload.storage.remote import RemoteObject
from tests.mpi.support import counted
from tests.servers import ObjectServer
from tests.unit.fakes import ObjectInMemory
from tests.unit.files import (
    assert_same,
    check_source,
    compact,
    early,
    flat,
    missing_in,
    raw_dataset,
    read,
    read_all,
    write_hdf5,
)

pytest.importorskip("obstore")

SHAPE, CHUNK = (6, 10), (4, 3)  # a part of a chunk is beyond each edge
DATA = flat(SHAPE)
FILTERS = Access(allow_filters={"all"})


def simple(**options: Any) -> Callable[[h5py.File], None]:
    return lambda file: file.create_dataset("g/x", data=DATA, **options)


def low_level(kind: Any = h5py.h5t.IEEE_F32LE, **how: Any) -> Callable[[h5py.File], None]:
    return lambda file: raw_dataset(file.create_group("g"), "x", kind, SHAPE, DATA % 97, **{"chunks": CHUNK} | how)


def twelve_bits() -> Any:
    kind = h5py.h5t.STD_I16LE.copy()
    kind.set_precision(12)
    return kind


def some_chunks(file: h5py.File) -> None:
    made = file.create_dataset("g/x", SHAPE, "f4", chunks=CHUNK, fillvalue=-3, compression="gzip")
    made[:4, 3:9] = DATA[:4, 3:9]
    made.id.write_direct_chunk((4, 0), DATA[:4, :3].tobytes(), filter_mask=1)


def left_out(file: h5py.File) -> None:
    """As LZF leaves chunks that it cannot make shorter. One that HDF5 reads last, and by itself, had its filter undone."""
    made = file.create_dataset("g/x", SHAPE, "f4", chunks=CHUNK, compression="lzf")
    for row, column in ((0, 0), (0, 3), (0, 6), (0, 9), (4, 0), (4, 3), (4, 6), (4, 9)):
        chunk = np.zeros(CHUNK, "f4")
        values = DATA[row : row + 4, column : column + 3]
        chunk[: values.shape[0], : values.shape[1]] = values
        made.id.write_direct_chunk((row, column), chunk.tobytes(), filter_mask=1)


def of_type(dtype: Any, values: Any = None, **options: Any) -> Callable[[h5py.File], None]:
    values = DATA.astype(dtype) if values is None else values
    return lambda file: file.create_dataset("g/x", data=values, dtype=dtype, **options)


def named_type(file: h5py.File) -> None:
    file["type"] = np.dtype(">f8")
    file.create_dataset("g/x", data=DATA, dtype=file["type"], chunks=CHUNK, scaleoffset=None)


LATEST = {"libver": "latest"}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[h5py.File], None]]] = {
    "gzip": ({}, simple(chunks=CHUNK, compression="gzip", shuffle=True)),
    "plain chunks": ({}, simple(chunks=CHUNK)),
    "checksum": ({}, simple(chunks=CHUNK, fletcher32=True)),
    "one piece": ({}, simple()),
    "big-endian piece": ({}, of_type(">f4")),
    "big-endian chunks": ({}, of_type(">i2", chunks=CHUNK)),
    "one chunk": (LATEST, simple(chunks=SHAPE, compression="gzip")),
    "fixed array": (LATEST, simple(chunks=CHUNK, compression="gzip")),
    "extensible array": (LATEST, simple(chunks=CHUNK, compression="gzip", maxshape=(6, None))),
    "B-tree 2": (LATEST, simple(chunks=CHUNK, maxshape=(None, None))),
    "implicit": (LATEST, low_level(setting=early)),
    "early": ({}, low_level(setting=early)),
    "lzf": ({}, simple(chunks=CHUNK, compression="lzf")),
    "lzf left out": ({}, left_out),
    "scaleoffset": ({}, of_type("i4", chunks=CHUNK, scaleoffset=0)),
    "nbit": ({}, low_level(twelve_bits(), filters=[(h5py.h5z.FILTER_NBIT, 0)])),
    "12 bits": ({}, low_level(twelve_bits())),
    "szip": ({}, of_type("i4", chunks=(4, 4), compression="szip")),
    "bitshuffle": ({}, simple(chunks=CHUNK, **hdf5plugin.Bitshuffle(nelems=8, cname="lz4"))),
    "blosc": ({}, simple(chunks=CHUNK, **hdf5plugin.Blosc(cname="zstd"))),
    "blosc2": ({}, simple(chunks=CHUNK, **hdf5plugin.Blosc2())),
    "bzip2": ({}, simple(chunks=CHUNK, **hdf5plugin.BZip2())),
    "zfp": ({}, simple(chunks=(4, 4), **hdf5plugin.Zfp(rate=24))),
    "some chunks": ({}, some_chunks),
    "no chunk": ({}, lambda file: file.create_dataset("g/x", SHAPE, "f4", chunks=CHUNK, fillvalue=7)),
    "no piece": ({}, lambda file: file.create_dataset("g/x", SHAPE, "f4", fillvalue=7)),
    "compact": ({}, low_level(chunks=None, setting=compact)),
    "number": ({}, lambda file: file.create_dataset("g/x", data=np.float64(3.5))),
    "nothing": ({}, lambda file: file.create_dataset("g/x", (0, 4), "f4", maxshape=(None, 4))),
    "nothing, latest": (LATEST, lambda file: file.create_dataset("g/x", (0, 4), "f4", maxshape=(None, 4))),
    "bool": ({}, of_type("?", DATA % 3 == 0, chunks=CHUNK)),
    "complex": ({}, of_type("c8", DATA + 1j, chunks=CHUNK, compression="gzip")),
    "bfloat16": ({}, lambda file: write_bfloat16(file)),
    "named type": ({}, named_type),
    "user block": ({"userblock_size": 1024}, simple(chunks=CHUNK, compression="gzip")),
    "user block, one piece": ({"userblock_size": 512}, simple()),
    "pages": ({"fs_strategy": "page", "fs_page_size": 4096}, simple(chunks=CHUNK, compression="gzip")),
}


def write_bfloat16(file: h5py.File) -> None:
    from shardload.formats.hdf5.opened import BFLOAT16, type_in_file

    kind, values = type_in_file(BFLOAT16), DATA.astype(ml_dtypes.bfloat16)
    raw_dataset(file.create_group("g"), "x", kind, SHAPE, values, memory_kind=kind)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


def stored(server: ObjectServer, tmp_path: Path, layout: str) -> tuple[str, str]:
    """The URL of a file, and its path on disk."""
    how, make = LAYOUTS[layout]
    with h5py.File(tmp_path / "a.h5", "w", **how) as file:
        make(file)
    server.objects["b/a.h5"] = (tmp_path / "a.h5").read_bytes()
    return f"{server.url}/b/a.h5", str(tmp_path / "a.h5")


def told_of(url: str, region: Region | None = None) -> ArrayInfo:
    """What a rank that has the file open tells another one, which will read a region."""
    with Finder(FILTERS, tells=True) as finder:
        found = finder.find(url, "g/x", lambda info, _: (info, region or Region.whole(info.shape)))
    assert found.values is None
    return ArrayInfo.from_dict(json.loads(json.dumps(found.info.to_dict())))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_requests(tmp_path: Path, server: ObjectServer, layout: str) -> None:
    """Wrong if a value, or which chunks are missing, were not as on disk, or if the second rank opened the file."""
    url, path = stored(server, tmp_path, layout)
    info = told_of(url)
    assert len(server.log) == 1, "a small file is opened by one request"
    server.clear()
    with closing(open_source(url, "/g/x", FILTERS, info)) as source, closing(open_source(path, "/g/x", FILTERS)) as local:
        assert not server.log, "nothing is read before values are"
        whole = Region.whole(info.shape)
        expected = local.plain(whole)
        check_source(source, expected)
        assert missing_in(source) == missing_in(local)
        if "user block" not in layout:  # on disk, HDF5 reads it
            assert (source.chunk_reader() is None) == (local.chunk_reader() is None)
        assert min((r.first for r in server.log), default=1) > 0, "the file was opened"
        assert_same(np.asarray(source.plain(whole)), expected)  # this opens it
        assert source.labels().dims == local.labels().dims and source.state() == source.opened_in is not None
    for one in (info, None):  # who was not told opens it
        with closing(open_source(url, "/g/x", FILTERS, one)) as source:
            assert_same(read_all(source), expected.astype(expected.dtype.newbyteorder("=")))


def test_a_region_is_told_and_no_more(tmp_path: Path, server: ObjectServer) -> None:
    """Wrong if chunks that nobody told of were taken for missing ones: fill values in place of stored ones."""
    url, _ = stored(server, tmp_path, "gzip")
    part = Region((1, 4), (4, 7))
    with closing(open_source(url, "/g/x", FILTERS, told_of(url, part))) as source:
        assert_same(read(source, part), DATA[part.slices()])
        with pytest.raises(ValueError, match="were not asked for"):
            read_all(source)


def test_what_no_chunk_can_have_is_not_fetched_ahead(
    tmp_path: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a size in a damaged index were cut into requests, any number of them, before anybody compared it."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("g/x", data=np.arange(4000.0), chunks=(1000,), compression="lzf")
    server.objects["b/a.h5"] = (tmp_path / "a.h5").read_bytes()
    info = told_of(f"{server.url}/b/a.h5")
    parts = dict(info.parts or {})
    table = skeleton._unpacked(parts["chunks"])
    table[1, 2] = 1 << 40
    damaged = replace(info, parts={**parts, "chunks": skeleton._packed(table)})
    monkeypatch.setattr(skeleton, "expect", list)  # what takes the ranges, in another thread, takes an error for their end
    source, wrong = open_source(f"{server.url}/b/a.h5", "/g/x", FILTERS, damaged), f"a stored chunk of {1 << 40} bytes"
    with closing(source), pytest.raises(ValueError, match=wrong):
        source.expect_in_order(iter([Region.whole(info.shape)]))


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_many_chunks_are_found_in_few_rounds(
    tmp_path: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch, libver: str
) -> None:
    """Wrong if each node of an index were a round of its own: there are more than a hundred."""
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        file.create_dataset("before", data=np.zeros(150_000))  # metadata of the next are behind it
        made = file.create_dataset("g/x", (9000, 100), "u1", chunks=(1, 100))
        for k in range(len(made)):
            made.id.write_direct_chunk((k, 0), bytes([k % 251]) * 100)
    content = (tmp_path / "a.h5").read_bytes()
    assert libver == "latest" or content.count(b"TREE\x01\x00") > 100
    server.objects["b/a.h5"] = content
    counts: Counter[str] = Counter()
    for name in ("read_at_most", "read_ranges"):
        counted(monkeypatch, counts, RemoteObject, name)
    info = told_of(f"{server.url}/b/a.h5")
    assert counts.total() <= 8, counts
    with closing(open_source(f"{server.url}/b/a.h5", "/g/x", FILTERS, info)) as source:
        found = read(source, Region((0, 3), (9000, 5)))
    assert (found[:, 1] == np.arange(9000) % 251).all()


def test_formats_of_urls(tmp_path: Path, server: ObjectServer) -> None:
    url, _ = stored(server, tmp_path, "user block")
    server.objects |= {"b/run": server.objects["b/a.h5"], "b/other": b"no file of HDF5"}
    assert format_of(f"{url}?token=secret").name == "HDF5" and not server.log
    info = find_array(f"{server.url}/b/run", "g/x")
    assert info.format == "HDF5"
    server.clear()
    with closing(open_source(f"{server.url}/b/run", "/g/x", Access(), info)) as source:
        assert_same(read_all(source), DATA)
    assert format_of(f"{server.url}/b/other").name == format_of(f"{server.url}/b/none").name == "Zarr"
    for url, parts in {
        "s3://b/a.h5:/g/x": ("s3://b/a.h5", "/g/x"),
        "http://h:80/a.h5": ("http://h:80/a.h5", None),
        "https://h:443/a.h5?to=http://other:80/b": ("https://h:443/a.h5?to=http://other:80/b", None),
        "https://h/a.h5?sign=1:/x": ("https://h/a.h5?sign=1", "/x"),
    }.items():
        assert split_path(url) == parts


def test_errors_say_what_to_do(tmp_path: Path, server: ObjectServer) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = DATA
        file["link"] = h5py.ExternalLink("x.h5", "x")
        file["lost"] = h5py.SoftLink("/nowhere")
        layout = h5py.VirtualLayout(SHAPE, "f4")
        layout[...] = h5py.VirtualSource("x.h5", "x", SHAPE)
        file.create_virtual_dataset("v", layout)
    write_hdf5(tmp_path / "x.h5", {"x": DATA})
    content = (tmp_path / "a.h5").read_bytes()
    server.objects |= {"b/a.h5": content, "b/cut.h5": content[:-100], "b/no.h5": b"<html>not a file</html>" * 100}
    server.objects |= {"b/old.nc": b"CDF\x01" + bytes(600), "b/empty.nc": b""}
    url = f"{server.url}/b/a.h5"
    for name, said in {
        "v": "cannot be loaded: it holds values of other files .* Load each by its own URL",
        "link": "'x' in 'x.h5'; load that object by its own URL",
        "lost": f"^'/lost' in '{url}' cannot be loaded: .* is a link to '/nowhere', which .* Restore the target",
    }.items():
        with pytest.raises(SourceError, match=said) as caught:
            find_array(url, name, Access(allow_external=True))
        assert " object at 0x" not in str(caught.value)  # Python's text of what HDF5 reads from
    assert {info.dataset: info.refused is None for info in list_arrays(url)} == {"/x": True, "/v": False}
    for key, said in {
        "cut.h5": "shorter than its own header says",
        "no.h5": "is not an HDF5 file: it begins with b'<html>",
        "none.h5": "none.h5' is not there",
        "old.nc": "old.nc' is a netCDF-3 classic file, which cannot be loaded. Convert it: `nccopy",
        "empty.nc": "empty.nc' cannot be read: it is empty",
    }.items():
        with pytest.raises(SourceError, match=said), open_file(f"{server.url}/b/{key}?sign=SECRET") as opened:
            opened.list_arrays()
    with pytest.raises(ConfigError, match="holds no array '/z'"):
        find_array(url, "z")
    with pytest.raises(ConfigError, match="another process, which gets no keys"):
        find_array(f"{url}?sign=SECRET", "x", Access(untrusted=Limits()))
    info = told_of_x(url)
    server.objects["b/a.h5"] = content[::-1]
    with closing(open_source(url, "/x", Access(), info)) as source, pytest.raises(OSError, match="another object"):
        read_all(source)


def told_of_x(url: str) -> ArrayInfo:
    with Finder(Access(), tells=True) as finder:
        return finder.find(url, "x").info


def test_blocks_that_are_kept() -> None:
    """Wrong if bytes of a block came from another place, or what is kept were fetched again."""
    content = np.random.default_rng(3).bytes(5 << 20)
    far = ObjectInMemory(content)
    cache = BlockCache(far)
    cache.start = 777
    assert cache.read_at_most(0, 10) == content[777:787] and far.n_reads == 1
    for offset in (100, (1 << 20) - 800):
        assert cache.read_at_most(offset, 20) == content[777 + offset : 797 + offset]
    assert far.n_reads == 1
    for offset in range(3 << 20, 4 << 20, 5000):  # in order: few requests
        cache.seek(offset)
        assert cache.read(100) == content[777 + offset : 877 + offset] and cache.tell() == offset + 100
    assert far.n_reads <= 8
    n_reads, out = far.n_reads, np.empty(300, "u1")
    cache.read_into(out, 3 << 20)
    assert out.tobytes() == content[777 + (3 << 20) :][:300] and far.n_reads == n_reads
    ranges = Ranges(np.array([2 << 20, 50]), np.array([9, 5]))
    pieces = cache.read_ranges(ranges, np.empty(ranges.nbytes, "u1"))
    assert [bytes(piece) for piece in pieces] == [content[777 + (2 << 20) :][:9], content[827:832]]
    assert cache.seek(0, io.SEEK_END) == cache.nbytes == len(content) - 777
    assert cache.read_at_most(cache.nbytes - 5, 100) == content[-5:]
    assert cache.readinto(memoryview(bytearray(7))) == 0


def test_nothing_is_collected_while_blocks_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a thread collected an object of h5py while HDF5, which has the lock, waits for a block: both would wait."""
    far, was = ObjectInMemory(bytes(10)), gc.isenabled()
    seen: list[bool] = []
    monkeypatch.setattr(ObjectInMemory, "read_at_most", lambda self, *_: seen.append(gc.isenabled()) or self.content)
    gc.enable()
    try:
        assert BlockCache(far).read_at_most(0, 10) == far.content and gc.isenabled()
    finally:
        if not was:
            gc.disable()
    assert seen == [False]
