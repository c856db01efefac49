"""The ranks that load with JAX. They answer the requests of the benchmark (`benchmarks.remote`); all requests are collective.

mpiexec -n 4 python -m benchmarks.peers.job         # started by benchmarks.runs.measure
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from benchmarks.cases.cells import OURS, box, mesh_shape
from benchmarks.cases.saves import SaveLayout
from benchmarks.cases.stores import FETCH, STORE_PEERS
from benchmarks.cases.streams import NAME, StreamFile
from benchmarks.peers import savers, store_ways
from benchmarks.peers.chunk_profile import copy_seconds, decoder_seconds, spent
from benchmarks.peers.many import MANY
from benchmarks.peers.store_server import BUCKET
from benchmarks.peers.stream_run import mesh_of, missing_ways, settle, stream
from benchmarks.peers.ways import SCATTERS, WAYS, last_report
from benchmarks.remote import serve

PACKAGES = (
    "jax",
    "numpy",
    "mpi4py",
    "h5py",
    "zarr",
    "numcodecs",
    "tensorstore",
    "hdf5plugin",
    "deflate",
    "zstandard",
    "grain",
    "xbatcher",
    "xarray",
    "mosaicml-streaming",
    "obstore",
    "s3fs",
    "h5netcdf",
    "virtualizarr",
)
comm = MPI.COMM_WORLD
kept: dict[str, Any] = {}


@cache
def sharding_of(spec: str) -> NamedSharding:
    """Device i of the mesh is process i: the order that every peer assumes."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    names = [None if name == "-" else name for name in spec.split(",")]
    axes = ("a", "b")[: len(mesh_shape(spec, len(devices)))]
    return NamedSharding(Mesh(np.array(devices).reshape(mesh_shape(spec, len(devices))), axes), P(*names))


def timed(load: Any) -> tuple[Any, dict[str, float]]:
    """All ranks start together; the clock is the machine's, so that the conductor may compare ranks."""
    gc.collect()
    comm.Barrier()
    start, cpu = time.perf_counter(), time.process_time()
    array = jax.block_until_ready(load())
    # CPU time is of all threads: other work on the machine does not count.
    return array, {"start": start, "end": time.perf_counter(), "cpu": time.process_time() - cpu}


def verify(array: jax.Array, spec: str, values: np.ndarray[Any, Any]) -> None:
    """Every shard against the plain values, and every place in the sharding taken."""
    if array.shape != values.shape or array.dtype != values.dtype:
        raise ValueError(f"loaded {array.shape} {array.dtype}; the file has {values.shape} {values.dtype}")
    sharding = sharding_of(spec)
    if not array.sharding.is_equivalent_to(sharding, array.ndim):
        raise ValueError(f"the sharding is {array.sharding}; expected {sharding}")
    places = {device: place for place, device in enumerate(sharding.mesh.devices.flat)}
    for shard in array.addressable_shards:
        wanted = box(values.shape, spec, len(places), places[shard.device])
        if bounds(shard.index, values.shape) != bounds(wanted, values.shape):
            raise ValueError(f"JAX wants {shard.index} here; ways without JAX would read another piece")
        found, expected = np.asarray(shard.data), values[shard.index]
        if not np.array_equal(found, expected):
            n = int((found != expected).sum()) if found.shape == expected.shape else found.size
            raise ValueError(f"{n} of {found.size} values of shard {shard.index} are not those of the file")


def bounds(index: Any, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Start and stop along each axis: JAX writes slice(None) for a whole one."""
    return [s.indices(n) for s, n in zip(index, shape, strict=True)]


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Load once; return start and end, or compare with the plain values instead."""
    sharding = sharding_of(request["spec"])
    way = WAYS[request["way"]]
    array, times = timed(lambda: way(request["file"], sharding, comm))
    report = dict(last_report) if request["way"].startswith("shardload") else {}
    if request.get("verify"):
        verify(array, request["spec"], np.load(request["file"]["reference"], mmap_mode="r"))
    del array  # before the next load, on every rank
    comm.Barrier()
    return {**times, "report": report}


def many(request: dict[str, Any]) -> dict[str, Any]:
    """Load all arrays of a file once; return start and end, or compare each with what h5py reads instead."""
    file, sharding = request["file"], sharding_of(request["spec"])
    way = MANY[request["way"]]
    arrays, times = timed(lambda: way(file, sharding, comm))
    if request.get("verify"):
        with h5py.File(file["path"]) as opened:
            for array, name in zip(arrays, file["names"], strict=True):
                verify(array, request["spec"], opened[name][...])
    nbytes = sum(array.nbytes for array in arrays)
    del arrays
    comm.Barrier()
    return {**times, "nbytes": nbytes}


def chunk_profile(request: dict[str, Any]) -> dict[str, Any]:
    """Load some times; the CPU seconds of this rank in user mode and in the kernel, and what its decoder takes alone."""
    sharding, way, file = sharding_of(request["spec"]), WAYS[OURS], request["file"]
    user = system = 0.0
    for _ in range(request["repeats"]):
        gc.collect()
        comm.Barrier()
        before = spent()
        array = jax.block_until_ready(way(file, sharding, comm))
        user, system = (total + now - then for total, now, then in zip((user, system), spent(), before, strict=True))
        del array
    comm.Barrier()
    plan = shardload.plan(file["path"], sharding, dataset=file["dataset"] or None)
    copies = (2 - 1 / comm.size) * copy_seconds(plan.chunks or (), plan.dtype)
    decoder, unshuffle = decoder_seconds(file["path"], file["dataset"])
    alone = {"decoder": decoder, "unshuffle": unshuffle, "copies": copies}
    return {"user": user, "system": system, **alone, "chunks": last_report["chunks_decoded"]}


def scatter(request: dict[str, Any]) -> dict[str, Any]:
    """From an array in rank 0's memory, kept from the first request on."""
    shape = tuple(request["shape"])
    if comm.rank == 0 and (kept.get("whole") is None or kept["whole"].shape != shape):
        kept["whole"] = np.arange(int(np.prod(shape)), dtype=np.uint32).view(np.float32).reshape(shape)
    sharding = sharding_of(request["spec"])
    array, times = timed(lambda: SCATTERS[request["way"]](kept.get("whole"), sharding, comm, shape))
    if request.get("verify"):
        for shard in array.addressable_shards:
            here = np.ravel_multi_index(
                np.ix_(*(np.arange(*s.indices(n)) for s, n in zip(shard.index, shape, strict=True))), shape
            )
            if not np.array_equal(np.asarray(shard.data).view(np.uint32), here):
                raise ValueError(f"{request['way']} put wrong values at {shard.index}")
    return times


def memory(request: dict[str, Any]) -> dict[str, Any]:
    """Peak resident set of this rank, over what it was before, for one load."""
    gc.collect()
    before = _resident_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    sharding = sharding_of(request["spec"])
    options = {"readers": request["readers"], "staging": request["staging"], "dataset": request["file"]["dataset"] or None}
    comm.Barrier()
    array = shardload.load(request["file"]["path"], sharding, **options).block_until_ready()
    pieces = sum(shard.data.nbytes for shard in array.addressable_shards)
    return {"peak_nbytes": _resident_nbytes("VmHWM") - before, "pieces_nbytes": pieces}


def _resident_nbytes(which: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[which].split()[0]) << 10


def verification(request: dict[str, Any]) -> dict[str, Any]:
    """Load with one level of ``verify=``; what was proven."""
    sharding, file = sharding_of(request["spec"]), request["file"]
    made: list[shardload.Plan] = []

    def load() -> jax.Array:
        made.append(shardload.plan(file["path"], sharding, dataset=file["dataset"] or None, verify=request["level"]))
        return made[0].execute()

    array, times = timed(load)
    if request.get("verify"):
        verify(array, request["spec"], np.load(file["reference"], mmap_mode="r"))
    del array
    comm.Barrier()
    return {**times, "report": dataclasses.asdict(made[0].report) if made[0].report else {}}


def save(request: dict[str, Any]) -> dict[str, Any]:
    """Save an array that is on the devices, kept from the first request on; the peak of this rank's memory meanwhile."""
    way, layout, key = request["way"], SaveLayout.of(request["layout"]), (request["reference"], request["spec"])
    if kept.get("saved") != key:
        kept.clear()
        values = np.load(request["reference"], mmap_mode="r")
        # A copy each: a save that reads the pages of a file would not be of memory.
        array = jax.make_array_from_callback(values.shape, sharding_of(request["spec"]), lambda index: np.array(values[index]))
        kept.update(saved=key, array=jax.block_until_ready(array))
    gc.collect()
    before = _resident_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    comm.Barrier()
    start, cpu = time.perf_counter(), time.process_time()
    save_it = savers.shardload_way(staging=request["staging"]) if request.get("staging") else savers.SAVES[way]
    save_it(kept["array"], request["path"], layout, request["spec"], comm)
    end, cpu = time.perf_counter(), time.process_time() - cpu
    peak = _resident_nbytes("VmHWM") - before
    comm.Barrier()
    report = dict(savers.last_report) if way.startswith("shardload") else {}
    return {"start": start, "end": end, "cpu": cpu, "peak_nbytes": peak, "report": report}


def store(request: dict[str, Any]) -> dict[str, Any]:
    """Load once from a store, or only fetch; the peak of this rank's memory meanwhile. Or compare with the plain values."""
    way, file, sharding = request["way"], request["file"], sharding_of(request["spec"])
    gc.collect()
    before = _resident_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    last_report.clear()
    array: Any = None
    if way == FETCH:
        comm.Barrier()
        start, cpu = time.perf_counter(), time.process_time()
        store_ways.fetch(file, comm.rank, comm.size)
        times = {"start": start, "end": time.perf_counter(), "cpu": time.process_time() - cpu}
    else:
        array, times = timed(lambda: store_ways.STORE_WAYS[way](file, sharding, comm))
    peak = _resident_nbytes("VmHWM") - before
    if request["verify"] and way != FETCH:
        verify(array, request["spec"], np.load(file["reference"], mmap_mode="r"))
    array = None  # before the next load
    comm.Barrier()
    return {**times, "peak_nbytes": peak, "report": dict(last_report)}


def store_stream(request: dict[str, Any]) -> dict[str, Any]:
    """All batches of a file, in sequence, from the page cache or from the store."""
    file, mesh = StreamFile.of(request["file"]), mesh_of("lat=2,lon=2")
    path, storage = str(file.path), None
    if request["way"] == "stream-store":
        path, storage = f"s3://{BUCKET}/{request['file']['key']}", store_ways.storage_of(request["file"]["url"])
    comm.Barrier()
    start, n = time.perf_counter(), 0
    opened = shardload.stream(path, mesh, P(None, None, "lat", "lon"), dataset=NAME, batch=8, storage=storage)
    with opened.__iter__() as batches:
        for batch in batches:
            jax.block_until_ready(batch)
            n += 1
    return {"start": start, "end": time.perf_counter(), "n": n}


def store_missing(request: dict[str, Any]) -> dict[str, Any]:
    """Of each way that cannot run here, what to install."""
    return {way: why for way in (OURS, *STORE_PEERS) if (why := store_ways.missing(way))}


def store_references(request: dict[str, Any]) -> dict[str, Any]:
    """VirtualiZarr's, made by one rank."""
    if comm.rank == 0:
        store_ways.make_references(request["file"])
    comm.Barrier()
    return {}


HANDLERS = {
    "run": run,
    "many": many,
    "scatter": scatter,
    "memory": memory,
    "chunk_profile": chunk_profile,
    "verification": verification,
    "save": save,
    "stream": stream,
    "missing_ways": missing_ways,
    "settle": settle,
    "store": store,
    "store_stream": store_stream,
    "store_missing": store_missing,
    "store_references": store_references,
}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """One request."""
    return HANDLERS[request["do"]](request)


def versions() -> dict[str, str]:
    """Of the libraries in this environment."""
    found = {"shardload": importlib.metadata.version("shardload")} if _is_installed("shardload") else {}
    found |= {name: importlib.metadata.version(name) for name in PACKAGES if _is_installed(name)}
    return found | {"MPI": " ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split())}


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Start JAX, then wait for requests."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    shardload.initialize()
    jax.devices()
    gc.collect()
    gc.freeze()  # so that collecting before each load costs little
    serve(handle, comm.rank, versions())


if __name__ == "__main__":
    main()
