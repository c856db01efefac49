"""What does a rank do to measure a stream? It takes batches from a way, does a step with each, and says what that took."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

from benchmarks.cases.streams import MAP, MESHES, StreamFile
from benchmarks.peers.streamers import WAYS, Asked, missing

comm = MPI.COMM_WORLD


@cache
def mesh_of(name: str) -> Mesh:
    """Device i of the mesh is process i."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    sizes = MESHES[name]
    return Mesh(np.array(devices, dtype=object).reshape(tuple(sizes.values())), tuple(sizes))


def asked_of(request: dict[str, Any]) -> Asked:
    """What a cell asks of a way."""
    cell = request["cell"]
    sizes = MESHES[cell["mesh"]]
    names = [name if sizes[name] > 1 else None for name in ("data", "lat", "lon")]
    spec = P(names[0], *[None] * (1 + cell["has_window"]), *names[1:])
    sharding = NamedSharding(mesh_of(cell["mesh"]), spec)
    file = StreamFile.of(request["file"])
    return Asked(file, sharding, cell["batch"], cell["shuffled"], cell["has_window"], request.get("first", 0), comm)


@cache
def convolution(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Two layers of 3 x 3 over latitude and longitude, and the mean of squares: its sum goes over all ranks."""
    key = jax.random.key(0)
    first, second = (jax.random.normal(key, (*channels, 3, 3)) * 0.1 for channels in ((16, MAP[0]), (MAP[0], 16)))

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        out = jax.nn.gelu(jax.lax.conv(x, first, (1, 1), "SAME"))
        out = jax.lax.conv(out, second, (1, 1), "SAME")
        return jnp.mean(jnp.square(out - x))

    return step


def stepper(seconds: float, sharding: NamedSharding) -> Callable[[jax.Array], Any]:
    """What the program does with a batch."""
    if seconds < 0:
        step = convolution(sharding)
        return lambda batch: jax.block_until_ready(step(batch))
    return (lambda batch: time.sleep(seconds)) if seconds else (lambda batch: None)


def stream(request: dict[str, Any]) -> dict[str, Any]:
    """Take `n` batches; with `check`, compare each with the values that its samples have."""
    asked, n, is_checked = asked_of(request), request["n"], request.get("check", False)
    step = stepper(0 if is_checked else request["step"], asked.sharding)
    if request["step"] < 0:
        step(WAYS["memory"](asked).batches.__next__()[0])  # compiles
    comm.Barrier()
    start, waited, n_taken = time.perf_counter(), 0.0, 0
    feed = WAYS[request["way"]](asked)
    opened, cpu, first = time.perf_counter(), time.process_time(), 0.0
    given: list[list[int]] = []
    try:
        for _ in range(n):
            before = time.perf_counter()
            batch, anchors = next(feed.batches)
            jax.block_until_ready(batch)
            now = time.perf_counter()
            waited += now - before
            first = first or now
            n_taken += 1
            if is_checked:
                given.append([int(a) for a in anchors])
                _check(asked, batch, anchors)
            step(batch)
            del batch
        end, n_decoded = time.perf_counter(), feed.n_decoded()
    finally:
        feed.close()
    cpu = time.process_time() - cpu
    comm.Barrier()
    times = {"start": start, "opened": opened, "first": first, "end": end, "waited": waited, "cpu": cpu}
    return {**times, "n": n_taken, "decoded": n_decoded, "part": asked.part, "given": given, **feed.told}


def missing_ways(request: dict[str, Any]) -> dict[str, Any]:
    """Of each way that cannot run here, what to install."""
    return {way: why for way in WAYS if (why := missing(way))}


def _check(asked: Asked, batch: jax.Array, anchors: Any) -> None:
    if batch.shape != asked.shape or not batch.sharding.is_equivalent_to(asked.sharding, batch.ndim):
        raise ValueError(f"the batch is {batch.shape} as {batch.sharding}; expected {asked.shape} as {asked.sharding}")
    (shard,) = batch.addressable_shards
    expected = asked.expected(np.asarray(anchors))
    found = np.asarray(shard.data)
    if found.shape != expected.shape or not np.array_equal(found, expected):
        raise ValueError(f"samples {list(anchors)} do not have the values of the file")


def settle(request: dict[str, Any]) -> dict[str, Any]:
    """Have the allocator return free memory, so that what the way before has left does not hide what the next one takes."""
    gc.collect()
    with suppress(AttributeError):  # it is glibc's
        ctypes.CDLL(None).malloc_trim(0)
    comm.Barrier()
    return {}
