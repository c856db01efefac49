"""Zarr at URLs: what is loaded is what is on disk, each byte is asked for once in the job, and a fault is one error of all."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, MissingChunksWarning, SourceError
from shardload.formats.zarr.references import ReferenceFolder
from tests.mpi.servers import SharedServer
from tests.mpi.sources import NAME
from tests.mpi.support import DECOMPOSITIONS, check, cube, distinct, mesh_of, on_root, ramp, same_error, unit, warned_once
from tests.servers import Request
from tests.tuning import tuned

pytest.importorskip("obstore")
pytestmark = [pytest.mark.any_library, pytest.mark.any_number]

LAYOUTS: dict[str, dict[str, Any]] = {
    "v2": {"zarr_format": 2, "chunks": (3, 5, 7)},
    "v3": {"chunks": (3, 5, 7)},
    "fortran": {"zarr_format": 2, "chunks": (3, 5, 7), "order": "F"},
    "sharded": {"chunks": (2, 3, 4), "shards": (4, 6, 12)},
}
CUBES = (64, 64, 128)  # 2 shards of 512 chunks of 2 KiB


class Bucket(SharedServer):
    """Stores of all layouts."""

    def __init__(self, comm: Any, folder: Path) -> None:
        super().__init__(comm, folder, self._write)

    def _write(self) -> None:
        for name, options in LAYOUTS.items():
            group = zarr.open_group(self.folder / f"bucket/{name}.zarr", mode="w", zarr_format=options.get("zarr_format", 3))
            made = {key: value for key, value in options.items() if key != "zarr_format"}
            group.create_array(NAME, shape=cube(), dtype="f4", **made)[...] = ramp(cube())
        group = zarr.open_group(self.folder / "bucket/cubes.zarr", mode="w")
        cubes = {"chunks": (8, 8, 8), "shards": (64, 64, 64), "compressors": None}
        group.create_array(NAME, shape=CUBES, dtype="f4", **cubes)[...] = ramp(CUBES)

    def load(self, layout: str, spec: Any, readers: str = "parallel", **options: Any) -> Any:
        """The array of a layout, from the bucket."""
        options = {"dataset": NAME, "storage": self.storage, "readers": readers, **options}
        return shardload.load(f"s3://bucket/{layout}.zarr", mesh_of(), spec, **options)

    def local(self, layout: str) -> str:
        return str(self.folder / f"bucket/{layout}.zarr")


@pytest.fixture
def bucket(comm: Any, shared_tmp_path: Path) -> Iterator[Bucket]:
    made = Bucket(comm, shared_tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("readers", ["direct", "parallel"])
@pytest.mark.parametrize("spec", [P("a"), P(None, "a", "b")])
def test_chunks_of_a_shard_are_fetched_together(bucket, monkeypatch, readers, spec):
    """They lie in Morton order, and are read, here 32 at once, in an order in which those of a request follow each other."""
    monkeypatch.setattr("shardload.storage.remote.ahead._AT_ONCE_NBYTES", 1 << 16)
    plan = shardload.plan(
        "s3://bucket/cubes.zarr", mesh_of(), spec, dataset=NAME, storage=bucket.storage, readers=readers, pad=0
    )
    assert readers == "direct" or "some 4 requests for" in str(plan), "the index of each shard, and its chunks"
    bucket.asked()
    check(plan.execute(), ramp(CUBES), mesh_of(), spec)
    asked = [request for request in bucket.asked() if "/c/" in request.key]
    n_copies = plan.schedule.shards.n_replicas if readers == "direct" else 1
    index_nbytes = 2 * 4 * (16 * 512 + 4)
    assert len(asked) <= 40
    assert sum(request.nbytes for request in asked) <= 1.05 * n_copies * 4 * np.prod(CUBES) + index_nbytes


def is_chunk(request: Request) -> bool:
    return not request.key.rpartition("/")[2].startswith((".z", "zarr.json"))


@pytest.mark.each_value
@pytest.mark.parametrize("name", list(distinct(DECOMPOSITIONS))[::3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loads_are_those_of_the_local_store(bucket: Bucket, layout: str, name: str) -> None:
    """Each chunk is asked for once in the job, and metadata by rank 0 alone: others compare its version, by a byte."""
    mesh, spec = mesh_of(), DECOMPOSITIONS[name]
    of_http = f"{bucket.url}/bucket/{layout}.zarr", bucket.of_http
    for url, storage in ((f"s3://bucket/{layout}.zarr", bucket.storage), of_http):
        bucket.asked()
        x = shardload.load(url, mesh, spec, dataset=NAME, storage=storage, readers="parallel")
        asked = bucket.asked()
        check(x, ramp(cube()), mesh, spec, url)
        assert {request.client for request in asked if not is_chunk(request) and request.nbytes > 1} == {"rank 0"}
        times = Counter(request.key for request in asked if is_chunk(request))
        files = sum(1 for file in Path(bucket.local(layout), NAME).rglob("*") if file.is_file())
        assert len(times) == files - (2 if layout in ("v2", "fortran") else 1)
        if layout != "sharded":
            assert set(times.values()) == {1}


def test_everything_that_takes_a_path(comm: Any, bucket: Bucket, shared_tmp_path: Path) -> None:
    url, mesh, spec, how = "s3://bucket/v3.zarr", mesh_of(), P("a", "b"), {"storage": bucket.storage}
    plan = shardload.plan(url, mesh, spec, dataset=NAME, **how)
    check(plan.execute(), ramp(cube()), mesh, spec)
    x = shardload.load(f"{url}:/{NAME}", mesh, spec, select=np.s_[1:5], pad=0, verify="file", **how)
    assert x.shape[1:] == cube()[1:]
    tree = shardload.load({"x": f"{url}:/*"}, mesh, spec, **how)
    check(tree["x"]["group"]["field"], ramp(cube()), mesh, spec)
    shardload.verify(plan.execute(), url, dataset=NAME, **how)
    contents = shardload.open(url, **how)
    assert contents[NAME].shape == cube()
    steps = shardload.stream(f"{url}:/{NAME}", mesh, P(), along=0, batch=2, window=(0,), shuffle=None, **how)
    batch = next(iter(steps))
    np.testing.assert_array_equal(np.asarray(batch).reshape(2, *cube()[1:]), ramp(cube())[:2])
    shardload.copy(url, str(shared_tmp_path / "copy.h5"), comm=comm, **how)
    y = shardload.load(str(shared_tmp_path / "copy.h5"), mesh, spec, dataset=NAME)
    check(y, ramp(cube()), mesh, spec)


def test_a_stream_of_a_server_that_fails_for_a_while(comm: Any, bucket: Bucket, monkeypatch: Any) -> None:
    """Wrong if a stream were made without the checksum by which its states know the file: they would not go on later."""
    monkeypatch.setattr("shardload.storage.remote.client._MOST_TRIES", 1)
    bucket.on_server(lambda server: vars(server.faults).update(status=500, only=lambda key: "/c/" in key))
    how = {"dataset": NAME, "storage": bucket.storage}
    same_error(comm, lambda: shardload.stream("s3://bucket/v3.zarr", mesh_of(), P(), **how), SourceError, "answers 500")


def test_a_dataset_of_a_server_that_lists_nothing(comm: Any, bucket: Bucket) -> None:
    """Wrong if the arrays of the store were listed to find those that are named, which a plain HTTP server does not."""
    pytest.importorskip("xarray")

    def write() -> None:
        group = zarr.open_group(bucket.folder / "bucket/named.zarr", mode="w").create_group("run")
        for name, dims in {"x": ("time", "lat"), "y": ("lat",), "time": ("time",), "lat": ("lat",)}.items():
            values = ramp(tuple({"time": 3, "lat": 2 * unit()}[dim] for dim in dims))
            group.create_array(name, data=values, chunks=values.shape, dimension_names=dims)

    bucket.on_server(lambda server: write())
    url, how = f"{bucket.url}/bucket/named.zarr", {"storage": bucket.of_http}
    for names in (["x"], "x"):
        ds = shardload.load_dataset(f"{url}:/run", mesh_of(), {"lat": "a"}, dataset=names, **how)
        check(ds.x.data, ramp((3, 2 * unit())), mesh_of(), P(None, "a"))
        assert list(ds.data_vars) == ["x"] and ds.lat.values.tolist() == ramp((2 * unit(),)).tolist() and ds.time.size == 3
    same_error(comm, lambda: shardload.load_dataset(url, mesh_of(), dataset="z", **how), SourceError, "holds no array '/z'")


def test_missing_chunks(comm: Any, bucket: Bucket) -> None:
    bucket.on_server(lambda server: (bucket.folder / "bucket/v3.zarr" / NAME / "c/0/0/0").unlink())
    expected = ramp(cube()).copy()
    expected[:3, :5, :7] = 0
    bucket.asked()
    with warned_once(comm, MissingChunksWarning):
        x = bucket.load("v3", P("a", "b"))
    check(x, expected, mesh_of(), P("a", "b"))
    asked = Counter(request.key for request in bucket.asked() if request.status == 404 and "/." not in request.key)
    assert asked == {f"bucket/v3.zarr/{NAME}/c/0/0/0": 1}  # and metadata of format 2


def test_a_store_that_refuses(comm: Any, bucket: Bucket) -> None:
    """Of one chunk, and of metadata: the same error on all ranks, without a key."""
    key = f"bucket/v3.zarr/{NAME}/c/1/0/0"
    bucket.fails(status=403, code="AccessDenied", only=lambda found: found == key)
    load = partial(bucket.load, "v3", P("a"))
    error = same_error(comm, load, SourceError, "access is denied (403 AccessDenied)", "s3://bucket/v3.zarr", "(1, 0, 0)")
    assert "TOPSECRET" not in str(error) and "AKIATEST" not in str(error)
    bucket.fails(only=lambda found: True)
    same_error(comm, load, SourceError, "access is denied (403 AccessDenied)", "s3://bucket/v3.zarr")


def test_a_store_that_refuses_everything(comm: Any, bucket: Bucket) -> None:
    """Wrong if the error were that of the question whether the array has changed, which the store refuses as well: a rank's."""
    plan = shardload.plan("s3://bucket/v3.zarr", mesh_of(), P("a"), dataset=NAME, storage=bucket.storage)
    bucket.fails(status=403, code="AccessDenied")
    same_error(comm, plan.execute, SourceError, "chunk (", "could not be read", "access is denied")


def test_a_shard_that_changes_while_it_is_read(comm: Any, bucket: Bucket) -> None:
    """Between its index and its chunks: they are asked for as that version."""
    key, lock, seen = f"bucket/sharded.zarr/{NAME}/c/0/0/0", threading.Lock(), list[str]()
    path = bucket.folder / key

    def change(found: str) -> bool:
        with lock:
            if found == key:
                seen.append(found)
                if len(seen) == 2:  # once: turned round again it would be what it was
                    path.write_bytes(path.read_bytes()[::-1])
        return False

    bucket.fails(only=change)
    load = partial(bucket.load, "sharded", P("a"), "root")
    same_error(comm, load, SourceError, "it was replaced", "s3://bucket/sharded.zarr")


def write_references(bucket: Bucket) -> None:
    """A set of references in the bucket, to chunks of an HDF5 file beside it; and that file with other values, as y.h5."""
    for name, values in (("y.h5", ramp(cube()) + 1), ("x.h5", ramp(cube()))):
        with h5py.File(bucket.folder / "bucket" / name, "w") as file:
            made = file.create_dataset("x", data=values, chunks=(3, 5, 7))
            infos = [made.id.get_chunk_info(k) for k in range(made.id.get_num_chunks())]
    array = {"zarr_format": 2, "shape": cube(), "chunks": (3, 5, 7), "dtype": "<f4", "fill_value": None, "order": "C"}
    refs: dict[str, Any] = {"x/.zarray": json.dumps(array | {"filters": None, "compressor": None})}
    for info in infos:
        index = ".".join(str(a // c) for a, c in zip(info.chunk_offset, (3, 5, 7), strict=True))
        refs[f"x/{index}"] = ["x.h5", info.byte_offset, info.size]
    (bucket.folder / "bucket/refs.json").write_text(json.dumps({"version": 1, "refs": refs}))


def test_references_to_chunks_in_another_file(comm: Any, bucket: Bucket) -> None:
    on_root(comm, lambda: write_references(bucket))
    bucket.asked()
    x = shardload.load("s3://bucket/refs.json:/x", mesh_of(), P("a", "b"), storage=bucket.storage, readers="parallel")
    check(x, ramp(cube()), mesh_of(), P("a", "b"))
    nbytes = sum(request.nbytes for request in bucket.asked() if request.key == "bucket/x.h5")
    assert nbytes <= 1.05 * (bucket.folder / "bucket/x.h5").stat().st_size + 4096 * comm.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_local", [False, True])
def test_references_to_a_file_that_ranks_see_in_two_versions(
    comm: Any, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path, is_local: bool
) -> None:
    """Wrong if the values of both were mixed: each rank opens the file when it comes to it, and by then it may be another."""
    on_root(comm, lambda: write_references(bucket))
    opened = ReferenceFolder._open
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(ReferenceFolder, "_open", lambda self, url, pin: opened(self, url.replace("x.h5", "y.h5"), pin))
    where = str(bucket.folder / "bucket") if is_local else "s3://bucket"
    storage = None if is_local else bucket.storage
    with tuned(small_nbytes=0, tiny_nbytes=0):
        load = partial(shardload.load, f"{where}/refs.json:/x", mesh_of(), P("a", "b"), storage=storage, readers="direct")
        copied = shared_tmp_path / "copied.zarr"
        copy = partial(shardload.copy, f"{where}/refs.json", copied, chunks=(1, 5, 7), storage=storage)
        stream = shardload.stream(
            f"{where}/refs.json:/x", mesh_of(), P(None, "a", "b"), along=0, batch=1, storage=storage, readers=comm.size
        )

        def read_all() -> None:
            with iter(stream) as batches:
                for _ in batches:
                    pass

        for call in (load, copy, read_all):
            same_error(comm, call, SourceError, "x.h5', to which references lead, is not the same on all ranks")
        assert not copied.exists()


def test_each_rank_that_reads_compares_the_metadata(comm: Any, bucket: Bucket) -> None:
    """The store is replaced when a rank has read all that it needs, and another one has not. Wrong if the first one alone
    compared the metadata, as soon as it has its own values.
    """
    if comm.size == 1:
        return
    has_compared, n_asked, last = threading.Event(), itertools.count(), (cube()[0] - 1) // 3

    def watch(server: Any) -> None:
        content = server.content

        def replaced(key: str) -> Any:
            if key.endswith(f"{NAME}/zarr.json"):
                n = next(n_asked)
                if n == 1:  # 0 is when the array was found
                    has_compared.set()
                return content(key) + b" " * (n > 1)
            if f"/c/{last}/" in key:
                has_compared.wait(60)
                return content(f"bucket/v3.zarr/{NAME}/c/0/0/0")
            return content(key)

        server.content = replaced

    bucket.on_server(watch)
    load = partial(bucket.load, "v3", P("a"), readers="direct", verify="index")
    same_error(comm, load, SourceError, "changed while it was read")


# --- saves


def saved(bucket: Bucket, name: str, **options: Any) -> Any:
    """A sharded array that is saved to a new store, with a small one beside it."""
    x = bucket.load("v3", P("a", "b"))
    tree = {"g/x": x, "t": np.arange(3.0)}
    return shardload.save(f"s3://bucket/{name}.zarr", tree, storage=bucket.storage, chunks={"g/x": (3, 5, 7)}, **options)


def test_a_save_to_a_new_store(comm: Any, bucket: Bucket) -> None:
    """All ranks put, another rank reads back; the root's metadata come last, and must be new."""
    bucket.load("v3", P())
    bucket.asked()
    saved(bucket, "new", verify="full", attrs={"g/x": {"units": "m"}, "/": {"title": "run 7"}})
    asked = bucket.asked()
    puts = [request for request in asked if request.method == "PUT" and request.status == 200]
    assert puts[-1].key == ("bucket/new.zarr/zarr.json")
    assert len({request.client for request in puts if is_chunk(request)}) == comm.size
    root = zarr.open_group(bucket.local("new"), mode="r")
    np.testing.assert_array_equal(root["g/x"][...], ramp(cube()))
    np.testing.assert_array_equal(root["t"][...], [0, 1, 2])
    assert (root["g/x"].attrs["units"], root.attrs["title"], root["g/x"].chunks) == ("m", "run 7", (3, 5, 7))
    assert not [file for file in Path(bucket.local("new")).rglob("*unfinished*")]
    y = shardload.load("s3://bucket/new.zarr:/g/x", mesh_of(), P("b"), storage=bucket.storage)
    check(y, ramp(cube()), mesh_of(), P("b"))


def test_a_store_that_is_an_array(comm: Any, bucket: Bucket) -> None:
    """Of which all metadata are those of the root, so that it is read back without. Wrong if reading back took two requests of
    a chunk: one for a byte of it, to see whether it is there.
    """
    bucket.asked()
    report = shardload.copy(f"{bucket.local('v3')}/{NAME}", "s3://bucket/one.zarr", comm=comm, storage=bucket.storage)
    requests = [request for request in bucket.asked() if is_chunk(request)]
    n_chunks, written = len({request.key for request in requests}), report.written
    assert written is not None and len(requests) == 2 * n_chunks + written.n_decoded
    np.testing.assert_array_equal(zarr.open_array(bucket.local("one"), mode="r")[...], ramp(cube()))


def files_of(bucket: Bucket, name: str) -> list[str]:
    return list(bucket.on_server(lambda _: sorted(str(file) for file in Path(bucket.local(name)).rglob("*") if file.is_file())))


def test_what_is_not_saved_to_a_store(comm: Any, bucket: Bucket) -> None:
    """Each says what to do, and leaves what is there as it was."""
    before = files_of(bucket, "v3")
    same_error(
        comm, lambda: saved(bucket, "v3"), ConfigError, "exists: there is '", "aws s3 rm --recursive s3://bucket/v3.zarr"
    )
    same_error(
        comm, lambda: saved(bucket, "v3", mode="w"), ConfigError, "mode='w' replaces nothing in a store", "choose another"
    )
    assert files_of(bucket, "v3") == before
    x = bucket.load("v3", P("a"))
    how = {"storage": bucket.storage}
    same_error(comm, lambda: shardload.save("s3://bucket/a.h5", x, **how), ConfigError, "Zarr is saved alone", "and upload it")
    same_error(comm, lambda: shardload.save(f"{bucket.url}/a.zarr", x), ConfigError, "is on an HTTP server", "and upload it")
    sharded = {"shards": (6, 10, 14), "chunks": (3, 5, 7), **how}
    same_error(comm, lambda: shardload.save("s3://bucket/a.zarr", x, **sharded), ConfigError, "Leave out shards=")
    same_error(
        comm, lambda: shardload.append("s3://bucket/v3.zarr", {NAME: x}), ConfigError, "is a URL; append writes to files"
    )
    bucket.fails(status=501, code="NotImplemented", only=lambda found: found == "bucket/v3.zarr/shardload-unfinished")
    same_error(comm, lambda: saved(bucket, "v3"), SourceError, "cannot be put: the server answers 501 NotImplemented")
    bucket.fails(status=0, code="", only=lambda found: True)
    assert files_of(bucket, "v3") == before
    bucket.on_server(lambda server: (bucket.folder / "bucket/begun.zarr").mkdir())
    bucket.on_server(lambda server: (bucket.folder / "bucket/begun.zarr/shardload-unfinished").write_text("x"))
    same_error(comm, lambda: saved(bucket, "begun"), ConfigError, "by another job, or one that was killed")


def test_a_save_that_fails_leaves_nothing(comm: Any, bucket: Bucket) -> None:
    """A chunk that is refused; the others are removed."""
    key = "bucket/new.zarr/g/x/c/1/1/1"
    bucket.fails(status=403, code="AccessDenied", only=lambda found: found == key)
    same_error(
        comm, lambda: saved(bucket, "new"), SourceError, "cannot be put: access is denied (403 AccessDenied)", "(1, 1, 1)"
    )
    assert files_of(bucket, "new") == []
    bucket.fails(status=0, busy=0.2, only=lambda found: True)
    saved(bucket, "new")
    np.testing.assert_array_equal(zarr.open_group(bucket.local("new"), mode="r")["g/x"][...], ramp(cube()))
