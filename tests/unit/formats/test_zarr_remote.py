"""Is a Zarr store at a URL read as the same store on disk is: with few requests, and errors that say what to do?"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access
from shardload.formats.contract.format import Source
from shardload.formats.labelling import read_labels
from shardload.formats.lookup import Finder, find_array, list_arrays, open_file, open_source
from shardload.formats.zarr.chunks import ShardFiles
from shardload.formats.zarr.nodes import quiet
from shardload.formats.zarr.store import WatchedStore
from shardload.jobs.consistency import ArrayToRead, KeptSources
from shardload.jobs.contents import open as open_contents
from shardload.planning.region import Region
from shardload.storage.remote import StorageOptions
from tests.servers import ObjectServer
from tests.unit.files import change_json, check_source, flat, read_all, write_hdf5, write_zarr

pytest.importorskip("obstore")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Consolidated metadata"),
    pytest.mark.filterwarnings("ignore:The codec"),
]

DATA = flat((6, 10))
SHARDS = {"chunks": (1, 5), "shards": (2, 10)}
FIRST = [zarr.codecs.ShardingCodec(chunk_shape=(1, 5), index_location="start")]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"chunks": (2, 5), "compressors": numcodecs.Zlib()}),
    "2 by columns": (2, {"chunks": (4, 3), "order": "F"}),  # zarr-python reads it
    "3": (3, {"chunks": (2, 5)}),
    "3 plain": (3, {"chunks": (2, 5), "compressors": None}),
    "3 in one chunk": (3, {"chunks": (6, 10)}),
    "shards": (3, SHARDS),
    "shards, index first": (3, {"chunks": (2, 10), "serializer": FIRST[0], "compressors": None}),
}


class Store:
    """A store that a server has: in a bucket, or on a plain HTTP server, which lists nothing."""

    def __init__(self, server: ObjectServer, scheme: str) -> None:
        self.server = server
        self.url = "s3://b/a.zarr" if scheme == "s3" else f"{server.url}/b/a.zarr"
        self.access = Access(storage=StorageOptions(server.storage if scheme == "s3" else {}))

    def open(self, name: str) -> Source:
        """An array as a rank opens it that was told of it: nothing is asked for."""
        info = find_array(self.url, name, self.access)
        self.server.clear()
        source = open_source(self.url, name, self.access, type(info).from_dict(json.loads(json.dumps(info.to_dict()))))
        assert not self.server.log
        return source

    def asked(self, *status: int) -> list[str]:
        """The keys that were asked for, in the store."""
        return sorted(r.key.removeprefix("b/a.zarr/") for r in self.server.log if not status or r.status in status)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    with ObjectServer(tmp_path) as server:
        yield server


@pytest.fixture(params=["s3", "http"])
def store(server: ObjectServer, request: pytest.FixtureRequest) -> Store:
    return Store(server, request.param)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_requests(tmp_path: Path, store: Store, layout: str) -> None:
    version, options = LAYOUTS[layout]
    path = write_zarr(tmp_path / "b/a.zarr", {"g/x": DATA}, version, **options)
    source = store.open("g/x")
    check_source(source, DATA)
    store.server.clear()
    assert (read_all(source) == read_all(open_source(path, "g/x"))).all()
    files = [str(file.relative_to(path)) for file in Path(path, "g/x").rglob("*") if file.is_file()]
    chunks = sorted(file for file in files if not file.endswith((".json", ".zarray", ".zattrs")))
    assert store.asked() == chunks
    if "shards" in layout:
        assert (read_all(store.open("g/x")) == DATA).all()
        assert store.asked() == sorted(chunks * 2)  # the index, then all chunks in one range


@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_are_asked_for_once(tmp_path: Path, store: Store, version: int) -> None:
    path = Path(write_zarr(tmp_path / "b/a.zarr", {"x": DATA}, version, chunks=(2, 5), fill_value=7))
    expected = DATA.copy()
    expected[2:4, 5:] = 7
    key = "x/c/1/1" if version == 3 else "x/1.1"
    (path / key).unlink()
    source = store.open("x")
    out = np.empty((6, 10), source.dtype)
    assert source.read_into(Region.whole((6, 10)), out) == [(1, 1)]
    assert (out == expected).all()
    assert store.asked(404) == [key]


def test_a_missing_shard(tmp_path: Path, store: Store) -> None:
    path = Path(write_zarr(tmp_path / "b/a.zarr", {"x": DATA}, 3, fill_value=7, **SHARDS))
    (path / "x/c/1/0").unlink()
    source = store.open("x")
    assert (read_all(source)[2:4] == 7).all() and (read_all(source)[4:] == DATA[4:]).all()
    assert store.asked(404) == ["x/c/1/0"]


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_are_found(tmp_path: Path, store: Store, version: int) -> None:
    """As on disk: where folders can be listed, whatever consolidated metadata say; of these only the names count."""
    path = write_zarr(tmp_path / "b/a.zarr", {"g/x": DATA, "g/h/y": DATA, "z": flat((3,))}, version)
    zarr.open_group(path).attrs["title"] = "all"
    zarr.consolidate_metadata(path)
    zarr.open_array(path, path="z").resize((5,))
    infos = [(info.dataset, info.shape) for info in list_arrays(store.url, store.access)]
    assert infos == [("/g/h/y", (6, 10)), ("/g/x", (6, 10)), ("/z", (5,))]
    with open_file(store.url, store.access) as file:
        assert file.groups()[0]["/"] == {"title": "all"}
    write_zarr(path + "/new", {"n": flat((2,))}, version)
    is_listed = store.url.startswith("s3")
    names = [info.dataset for info in list_arrays(store.url, store.access)]
    assert ("/new/n" in names) == is_listed
    assert find_array(store.url, "new/n", store.access).shape == (2,)
    with pytest.raises(ConfigError, match=r"holds no array '/g/z'. Arrays in the file \(nearest first\): .*/z"):
        find_array(store.url, "g/z", store.access)


def test_metadata_of_many_arrays_are_asked_for_at_once(tmp_path: Path, store: Store) -> None:
    """Once each, however often they are needed."""
    path = write_zarr(tmp_path / "b/a.zarr", {f"g/x{k}": flat((3,)) for k in range(20)})
    zarr.consolidate_metadata(path)
    with open_file(store.url, store.access) as file:
        assert len(file.list_arrays()) == 20
        for info in file.list_arrays():
            file.open(info.dataset).close()
    asked = [key for key in store.asked() if key != "b"]
    of_root = [".zarray", ".zattrs", ".zgroup", "zarr.json"]  # until it is known which format it is
    assert asked == sorted([*of_root, "g/zarr.json", *(f"g/x{k}/zarr.json" for k in range(20))])


def test_http_without_consolidated_metadata(tmp_path: Path, server: ObjectServer) -> None:
    store = Store(server, "http")
    write_zarr(tmp_path / "b/a.zarr", {"x": DATA})
    with pytest.raises(SourceError, match=r"plain HTTP server, which .*no consolidated metadata.* Pass the name of one"):
        list_arrays(store.url, store.access)
    with pytest.raises(SourceError, match=r"'http.*a.zarr' holds no array '/y'. .*plain HTTP server"):
        find_array(store.url, "y", store.access)
    assert find_array(f"{store.url}:/x", None, store.access).shape == (6, 10)
    # As the error says: wrong if the whole store were listed first.
    assert [*open_contents(f"{store.url}:/x", storage=store.access.storage)] == ["/x"]
    with pytest.raises(SourceError, match=r"holds no array '/y'. .*plain HTTP server"):
        open_contents(f"{store.url}:/y", storage=store.access.storage)
    write_zarr(tmp_path / "b/one.zarr", {"x": DATA})
    assert find_array(f"{server.url}/b/one.zarr/x", None, store.access).dataset == "/"  # the store is the array


@pytest.mark.parametrize("version", [2, 3])
def test_a_bucket_that_may_not_be_listed(tmp_path: Path, server: ObjectServer, version: int) -> None:
    """S3 then says 403 of keys that are absent: of metadata that matters not, of a chunk it cannot be told what it means."""
    path = Path(write_zarr(tmp_path / "b/a.zarr", {"x": DATA}, version, chunks=(2, 5)))
    zarr.consolidate_metadata(path)
    store = Store(server, "s3")
    server.faults.status, server.faults.code = 403, "AccessDenied"
    server.faults.only = lambda key: server.content(key) is None
    server.lists = False
    assert [info.dataset for info in list_arrays(store.url, store.access)] == ["/x"]
    assert (read_all(store.open("x")) == DATA).all()
    (path / ("x/c/1/1" if version == 3 else "x/1.1")).unlink()
    with pytest.raises(OSError, match=r"access is denied \(403 AccessDenied\).*S3 says so of an object that is missing, too"):
        read_all(store.open("x"))
    with pytest.raises(SourceError, match=r"access is denied \(403 AccessDenied\)"):
        find_array("s3://b/none.zarr", "x", store.access)


def test_a_server_that_has_no_store_or_refuses_it(tmp_path: Path, store: Store) -> None:
    """Wrong if the metadata were called damaged that nobody has got."""
    for attempt in (list_arrays, find_array):
        with pytest.raises(SourceError, match=r"a.zarr' cannot be read: .*there is no Zarr store: none of zarr.json, .zarray"):
            attempt(store.url, access=store.access)
    write_zarr(tmp_path / "b/a.zarr", {"x": DATA})
    store.server.faults.status = 401
    with pytest.raises(SourceError, match=r"the server asks who you are \(401\)"):
        find_array(store.url, "x", store.access)
    store.server.faults.status = 0
    (tmp_path / "b/a.zarr/x/zarr.json").write_text("{not JSON")
    with pytest.raises(SourceError, match=r"'/x' in '.*a.zarr' cannot be opened: its metadata is damaged"):
        find_array(store.url, "x", store.access)


def test_an_array_that_was_replaced_is_noticed(tmp_path: Path, store: Store) -> None:
    path = Path(write_zarr(tmp_path / "b/a.zarr", {"x": DATA}))
    source = store.open("x")
    assert source.opened_in == source.state()
    change_json(path / "x/zarr.json", attributes={"a": 1})
    assert source.opened_in != source.state()


def test_what_a_killed_save_has_left_is_no_store(tmp_path: Path, server: ObjectServer) -> None:
    """Wrong if the arrays were listed whose metadata were there already: others may not be, and none was read back."""
    path, store = Path(write_zarr(tmp_path / "b/a.zarr", {"x": DATA, "y": DATA})), Store(server, "s3")
    for name in ("zarr.json", "y/zarr.json"):
        (path / name).unlink()
    assert [info.dataset for info in list_arrays(store.url, store.access)] == ["/x"]
    (path / "shardload-unfinished").write_text("0123")
    for search in (list_arrays, lambda url, access: find_array(url, "y", access)):
        with pytest.raises(
            SourceError,
            match=r"^'s3://b/a\.zarr' is no store yet: .*'shardload-unfinished' is there, and no metadata of the root\)$",
        ):
            search(store.url, store.access)


def test_a_store_that_was_replaced_by_one_with_the_same_metadata_is_noticed(tmp_path: Path, store: Store) -> None:
    """As a program that runs again writes it: their ETag is the same. Wrong if chunks of both could be mixed."""
    write_zarr(tmp_path / "b/a.zarr", {"x": DATA}, 3, chunks=(2, 5))
    source = store.open("x")
    assert source.opened_in == source.state() is not None
    store.server.dates["b/a.zarr/x/zarr.json"] = 1.1e9
    assert source.opened_in != source.state() is not None


def test_urls_of_other_kinds(tmp_path: Path) -> None:
    for url, how in (
        ("hf://a/b.zarr", "Open it with zarr-python and pass"),
        *((f"{scheme}://x", "Pass the file of references itself") for scheme in ("simplecache::reference", "Reference")),
    ):
        for attempt in (list_arrays, find_array):
            with pytest.raises(SourceError, match=f"is a URL of an unknown kind: those of S3, Google, Azure and HTTP.* {how}"):
                attempt(url)


def together(server: ObjectServer, *keys: str) -> list[str]:
    """Answer the first request for each of some keys when all are there. Returns them, and more if one waited in vain."""
    barrier, lock, came = threading.Barrier(len(keys)), threading.Lock(), list[str]()

    def hold(key: str) -> bool:
        with lock:
            is_first = key in keys and key not in came
            came.extend([key] if is_first else [])
        try:
            barrier.wait(20) if is_first else None
        except threading.BrokenBarrierError:
            came.append("one that waited in vain")
        return False

    server.faults.only = hold
    return came


def test_the_indices_of_shards_are_fetched_together(tmp_path: Path, store: Store) -> None:
    """Wrong if each index was asked for when the one before had come: hundreds of shards would take hundreds of answers."""
    write_zarr(tmp_path / "b/a.zarr", {"x": DATA}, 3, **SHARDS)
    source = store.open("x")
    keys = [f"b/a.zarr/x/c/{k}/0" for k in range(3)]
    came = together(store.server, *keys)
    reader = source.chunk_reader()
    assert reader is not None
    reader.expect(iter([[range(2 * k, 2 * k + 2), range(2)] for k in range(3)]))
    assert (read_all(source) == DATA).all() and sorted(came) == keys
    source.close()


def test_names_and_coordinates_of_all_arrays_are_fetched_together(tmp_path: Path, store: Store) -> None:
    """Wrong if metadata of format 2 were asked for after those of format 3, or one coordinate after the other."""
    arrays = {name: DATA[:, 1] for name in ("a", "b", "c")}
    write_zarr(tmp_path / "b/a.zarr", arrays, 2, chunks=(6,))
    for name in arrays:
        (tmp_path / f"b/a.zarr/{name}/.zattrs").write_text(json.dumps({"_ARRAY_DIMENSIONS": [name]}))
    zarr.consolidate_metadata(tmp_path / "b/a.zarr", zarr_format=2)
    for files in (["zarr.json", ".zarray", ".zattrs"], ["0"]):
        keys = [f"b/a.zarr/{name}/{file}" for name in arrays for file in files]
        came = together(store.server, *keys)
        contents = open_contents(store.url, storage=store.access.storage)
        assert [contents[name].coords[name].values.tolist() for name in arrays] == [DATA[:, 1].tolist()] * 3
        assert sorted(came) == sorted(keys)


def test_many_arrays_are_found_and_compared_together(tmp_path: Path, store: Store) -> None:
    """Wrong if the metadata of named arrays, or their versions in the end, were asked for one after the other."""
    write_zarr(tmp_path / "b/a.zarr", {f"x{k}": DATA for k in range(4)})
    keys = [f"b/a.zarr/x{k}/zarr.json" for k in range(4)]
    came = together(store.server, *keys)
    with Finder(store.access) as finder:
        finder.expect((store.url, f"x{k}") for k in range(4))
        assert sorted(came) == keys
        infos = [finder.find(store.url, f"x{k}").info for k in range(4)]
    kept = KeptSources([ArrayToRead(store.url, info, store.access) for info in infos])
    for k in range(4):
        kept.open(k)
    came = together(store.server, *keys)
    kept.check_unchanged()
    assert sorted(came) == keys
    (tmp_path / keys[2]).write_text((tmp_path / keys[2]).read_text() + " ")
    with pytest.raises(SourceError, match=r"/x2' in .* changed while it was read"):
        kept.check_unchanged()


def test_shards_are_opened_ahead_as_their_boxes_are_needed(tmp_path: Path, store: Store) -> None:
    """Wrong if all boxes of a few large shards were taken, and kept, before the first was read; or if the indices of the next
    shards were asked for after the reader was closed.
    """
    write_zarr(tmp_path / "b/a.zarr", {"x": DATA}, 3, **SHARDS)
    source = store.open("x")
    reader, taken = source.chunk_reader(), list[int]()
    assert isinstance(reader, ShardFiles)

    def boxes() -> Iterator[list[range]]:
        for shard in range(3):
            for _ in range(5000):
                taken.append(shard)
                yield [range(2 * shard, 2 * shard + 1), range(1)]

    opened_ahead = reader._opened_ahead(boxes())
    assert next(opened_ahead) == [range(1), range(1)] and len(taken) < 2000
    reader.close()
    assert len(list(opened_ahead)) < 2000 and store.asked() == ["x/c/0/0"]
    source.close()


def test_which_format_a_store_has_is_seen_while_another_thread_reads_metadata(tmp_path: Path, store: Store) -> None:
    """Wrong if the table of metadata were gone through itself, to which other threads add: Python's error about that would be
    taken for a coordinate that cannot be read.
    """
    write_zarr(tmp_path / "b/a.zarr", {"x": DATA}, 2)
    with open_file(store.url, store.access) as file:
        watched: WatchedStore = file._file._store  # type: ignore[attr-defined]
        watched.node("x")
        n = len(watched._remote_files)

        def has(key: str) -> bool:
            watched._remote_files[f"{key} of another thread"] = None, None
            return False

        watched._has = has  # type: ignore[method-assign]
        assert not watched._is_format_3 and len(watched._remote_files) == 2 * n


def test_an_error_of_the_last_question_names_its_array(tmp_path: Path, store: Store) -> None:
    """Wrong if the present state were asked for outside of what names errors: of many arrays nobody knew which one it was. And
    if a store that refuses it, which is no rank's fault, were another error than where it refuses values.
    """
    write_zarr(tmp_path / "b/a.zarr", {f"x{k}": DATA for k in range(3)})

    @contextmanager
    def naming(k: int) -> Iterator[None]:
        try:
            yield
        except SourceError as error:
            raise SourceError(f"array {k}: {error}") from error

    sources = [store.open(f"x{k}") for k in range(3)]
    kept = KeptSources(
        [ArrayToRead(None, s.info, store.access, values=s, naming=partial(naming, k)) for k, s in enumerate(sources)]
    )
    for k in range(3):
        kept.open(k)
    store.server.faults.only, store.server.faults.status = lambda key: "x1" in key, 403
    with pytest.raises(SourceError, match=r"array 1: .*x1/zarr.json' cannot be read"):
        kept.check_unchanged()


def test_arrays_that_zarr_has_open_at_a_url_have_labels(tmp_path: Path, server: ObjectServer) -> None:
    """Wrong if these were looked for in a file named '' together: an error, of a single array and of several."""
    fsspec, asyn_wrapper = (pytest.importorskip(name) for name in ("fsspec", "fsspec.implementations.asyn_wrapper"))
    files = asyn_wrapper.AsyncFileSystemWrapper(fsspec.filesystem("memory"), asynchronous=True)
    write_zarr(tmp_path / "a.zarr", {"x": DATA, "y": DATA}, dimension_names=("t", "lat"))
    store = zarr.storage.FsspecStore(files, path=f"{server.url}/a.zarr")  # as zarr-python has it for a URL
    for name in ("x", "y"):
        made = zarr.create_array(store, name=name, shape=DATA.shape, dtype=DATA.dtype, dimension_names=("t", "lat"))
        made[...] = DATA
    opened = {name: zarr.open_array(store, path=name, mode="r") for name in ("x", "y")}
    for arrays in (opened, {"x": opened["x"]}):
        plan = shardload.plan(arrays, Mesh(np.array(jax.devices()), "a"), P(), allow_external=True)
        dataset = shardload.to_xarray(plan.execute(), plan)
        assert [dataset[name].dims for name in arrays] == [("t", "lat")] * len(arrays)
        assert (dataset.x.values == DATA).all()


def test_names_that_were_read_are_not_asked_for_again(tmp_path: Path, store: Store) -> None:
    """Wrong if metadata and coordinates were fetched each time that arrays are wrapped, or a file is shown."""
    data = DATA.astype("f4")
    write_zarr(tmp_path / "b/a.zarr", {"x": data, "y": data}, dimension_names=("t", "lat"))
    how = {"dataset": {"x": "x", "y": "y"}, "storage": store.access.storage}
    plan = shardload.plan({"x": store.url, "y": store.url}, Mesh(np.array(jax.devices()), "a"), P(), **how)
    arrays = plan.execute()
    assert shardload.to_xarray(arrays, plan).x.dims == ("t", "lat")
    store.server.clear()
    assert shardload.to_xarray(arrays, plan).x.dims == ("t", "lat") and not store.asked()


def test_threads_that_parse_metadata_leave_warnings_as_they_were(tmp_path: Path, store: Store) -> None:
    """Wrong if two threads changed the filters of warnings, which are the process's, in turn: they stayed changed, and no
    warning of this package was ever seen again.
    """
    before, first, second = list(warnings.filters), threading.Event(), threading.Event()

    def hold() -> None:
        with quiet():
            first.set()
            second.wait(0.5)  # which comes only if the other thread need not wait for this one

    def follow() -> None:
        first.wait()
        with quiet():
            second.set()
            thread.join()

    thread, other = threading.Thread(target=hold), threading.Thread(target=follow)
    thread.start(), other.start()
    thread.join(), other.join()
    assert warnings.filters == before


@pytest.mark.parametrize("status", [403, 500])
def test_a_coordinate_that_a_store_refuses_is_an_error_of_the_file(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Wrong if a busy server were a rank's error, or one that refuses the values left them out as if they were no numbers."""
    monkeypatch.setattr("shardload.storage.remote.client._MOST_TRIES", 1)
    write_zarr(tmp_path / "b/a.zarr", {"x": DATA[:, 1]}, dimension_names=("t",))
    write_zarr(tmp_path / "c.zarr", {"t": DATA[:, 0]}, dimension_names=("t",))
    (tmp_path / "c.zarr/t").rename(tmp_path / "b/a.zarr/t")
    zarr.consolidate_metadata(tmp_path / "b/a.zarr")
    info = find_array(store.url, "x", store.access)
    assert read_labels(store.url, info, store.access).coords["t"].values is not None
    store.server.faults.status, store.server.faults.only = status, lambda key: "/t/c/" in key
    for read in (read_labels, lambda url, _, access: open_contents(url, storage=access.storage)):
        with pytest.raises(SourceError, match=r"/t/c/0' cannot be read"):
            read(store.url, info, store.access)


def test_a_copy_puts_as_many_chunks_together_as_a_save(tmp_path: Path, server: ObjectServer) -> None:
    """Wrong if it put one for each core at a time: each waits for an answer."""
    write_hdf5(tmp_path / "x.h5", {"x": flat((16, 5))}, chunks=(1, 5))
    came = together(server, *(f"b/c.zarr/x/c/{k}/0" for k in range(16)))
    shardload.copy(str(tmp_path / "x.h5"), "s3://b/c.zarr", storage=server.storage)
    assert len(came) == 16
    assert (zarr.open_array(tmp_path / "b/c.zarr/x", mode="r")[...] == flat((16, 5))).all()
