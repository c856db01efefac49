"""How does each way load from a store? What people use today, as it is usually written, and shardload.

A way is a function ``(file, sharding, comm) -> jax.Array``, as those of `ways`. `file` says where the server is, the key, the
dataset, and where VirtualiZarr's references lie. What a process uses for all its loads (a filesystem of fsspec, a store of
obstore) is made once and kept, with its connections: only the array is opened anew. shardload, too, keeps the store alone.
"""

from __future__ import annotations

import dataclasses
import http.client
import importlib.util
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np
import tensorstore
import zarr
from jax.sharding import NamedSharding

import shardload
from benchmarks.cases.cells import OURS
from benchmarks.peers.floor import job_of
from benchmarks.peers.store_server import BUCKET
from benchmarks.peers.ways import Way, last_report

REGION = "us-east-1"
BLOCK_NBYTES, PIECE_NBYTES = 4 << 20, 8 << 20
CONCURRENCY, CONNECTIONS = 64, 16
_NEEDED = {
    OURS: ("obstore",),
    "h5netcdf": ("xarray", "h5netcdf", "s3fs"),
    "virtualizarr": ("virtualizarr", "kerchunk", "obstore"),
    "zarr-obstore": ("obstore",),
    "zarr-fsspec": ("s3fs",),
}


def missing(way: str) -> str:
    """What to install; empty if nothing."""
    absent = [name for name in _NEEDED.get(way, ()) if importlib.util.find_spec(name) is None]
    return f"pip install {' '.join(absent)}" if absent else ""


def storage_of(url: str) -> dict[str, Any]:
    """How shardload and obstore reach the server."""
    return {"endpoint": url, "region": REGION, "skip_signature": True}


def shardload_way(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """`shardload.load`: it is plan and execute, and the plan has the report."""
    plan = shardload.plan(
        f"s3://{BUCKET}/{file['key']}", sharding, dataset=file["dataset"] or None, storage=storage_of(file["url"])
    )
    array = plan.execute()
    last_report.clear()
    last_report.update(readers=plan.readers, n_readers=plan.n_readers)
    if plan.report is not None:
        last_report.update(dataclasses.asdict(plan.report))
    return array


def put(shape: tuple[int, ...], sharding: NamedSharding, read: Callable[[Any], Any]) -> jax.Array:
    """The global array, of which each device's part is read here."""
    return jax.make_array_from_callback(shape, sharding, lambda index: np.asarray(read(index)))


@cache
def file_system(url: str) -> Any:
    import s3fs

    return s3fs.S3FileSystem(anon=True, endpoint_url=url, client_kwargs={"region_name": REGION})


@cache
def object_store(url: str, prefix: str | None = None) -> Any:
    from obstore.store import S3Store

    return S3Store(BUCKET, prefix=prefix, client_options={"allow_http": True}, **storage_of(url))


def h5netcdf(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """A lazy dataset over a file object, of which each process computes its part."""
    import xarray

    system = file_system(file["url"])
    with (
        system.open(f"{BUCKET}/{file['key']}", block_size=BLOCK_NBYTES, cache_type="blockcache") as opened,
        xarray.open_dataset(opened, engine="h5netcdf", phony_dims="access", cache=False) as dataset,
    ):
        variable = dataset[file["dataset"]]
        return put(variable.shape, sharding, lambda index: variable[index].values)


def virtualizarr(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """References in kerchunk's JSON, opened as a store of Zarr."""
    from virtualizarr.parsers import KerchunkJSONParser

    store = KerchunkJSONParser()(f"file://{file['references']}", _registry(file["url"]))
    with zarr.config.set({"async.concurrency": CONCURRENCY}):
        array = zarr.open_group(store, mode="r")[file["dataset"]]
        return put(array.shape, sharding, lambda index: array[index])


@cache
def _registry(url: str) -> Any:
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore

    return ObjectStoreRegistry({f"s3://{BUCKET}": object_store(url), "file://": LocalStore()})


def make_references(file: dict[str, Any]) -> None:
    """Write VirtualiZarr's references to `file`, if they are not there."""
    from virtualizarr.parsers import HDFParser

    path = Path(file["references"])
    if not path.exists():
        store = HDFParser()(f"s3://{BUCKET}/{file['key']}", _registry(file["url"]))
        part = path.with_suffix(".part")
        store.to_virtual_dataset(loadable_variables=[]).vz.to_kerchunk(str(part), format="json")
        part.rename(path)


def zarr_obstore(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """zarr-python's ObjectStore."""
    from zarr.storage import ObjectStore

    return _zarr(ObjectStore(object_store(file["url"], file["key"]), read_only=True), sharding)


def zarr_fsspec(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """zarr-python's default for URLs."""
    options = {"anon": True, "endpoint_url": file["url"], "client_kwargs": {"region_name": REGION}}
    return _zarr(f"s3://{BUCKET}/{file['key']}", sharding, storage_options=options)


def _zarr(store: Any, sharding: NamedSharding, **options: Any) -> jax.Array:
    with zarr.config.set({"async.concurrency": CONCURRENCY}):
        array = zarr.open_array(store, mode="r", **options)
        return put(array.shape, sharding, lambda index: array[index])


def tensorstore_way(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """Default context: so many requests and copy threads as it chooses."""
    kvstore = {
        "driver": "s3", "bucket": BUCKET, "path": f"{file['key']}/", "endpoint": file["url"], "aws_region": REGION,
        "aws_credentials": {"type": "anonymous"},
    }  # fmt: skip
    store = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True, read=True).result()
    return put(store.shape, sharding, lambda index: store[index].read().result())


STORE_WAYS: dict[str, Way] = {
    OURS: shardload_way,
    "h5netcdf": h5netcdf,
    "virtualizarr": virtualizarr,
    "tensorstore": tensorstore_way,
    "zarr-obstore": zarr_obstore,
    "zarr-fsspec": zarr_fsspec,
}


def fetch(file: dict[str, Any], rank: int, n: int) -> int:
    """Fetch this process's share of what is stored, in pieces of 8 MiB, and throw it away; its bytes."""
    share = iter(_pieces(file["path"], file["dataset"])[rank::n])
    lock, nbytes = threading.Lock(), [0] * CONNECTIONS
    host, root = urlsplit(file["url"]).netloc, Path(file["path"])

    def run(k: int) -> None:
        connection, memory = http.client.HTTPConnection(host), memoryview(bytearray(PIECE_NBYTES))
        while True:
            with lock:
                piece = next(share, None)
            if piece is None:
                connection.close()
                return
            name, start, stop = piece
            below = Path(name).relative_to(root).as_posix() if name != str(root) else ""
            key = f"/{BUCKET}/{file['key']}" + (f"/{below}" if below else "")
            connection.request("GET", key, headers={"range": f"bytes={start}-{stop - 1}"})
            answer = connection.getresponse()
            found = 0
            while found < stop - start and (read := answer.readinto(memory[found : stop - start])):
                found += read
            answer.read()
            if answer.status != 206 or found != stop - start:
                raise OSError(f"{key} was answered by {answer.status} with {found} of {stop - start} bytes")
            nbytes[k] += found

    threads = [threading.Thread(target=run, args=(k,)) for k in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(nbytes)


@cache
def _pieces(path: str, dataset: str) -> list[tuple[str, int, int]]:
    """Of each file its first byte that is a chunk's to its last one, cut."""
    extents: dict[str, tuple[int, int]] = {}
    for name, offset, size in job_of(path, dataset).places:
        start, stop = extents.get(name, (offset, offset + size))
        extents[name] = min(start, offset), max(stop, offset + size)
    return [
        (name, begin, min(begin + PIECE_NBYTES, stop))
        for name, (start, stop) in extents.items()
        for begin in range(start, stop, PIECE_NBYTES)
    ]
