"""Many loads in one process, and loads beside each other; print what was counted, one line of JSON a rank.

``many.py FOLDER loads N`` or ``many.py FOLDER threads``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from tests.mpi.support import check, mesh_of, on_root, ramp
from tests.tuning import tune
from tests.unit.files import write_hdf5

SHAPE, CHUNKS, SPEC = (16, 48, 40), (4, 12, 40), P(None, "a", "b")

comm = MPI.COMM_WORLD
tune(min_chunk_nbytes=1, inline_nbytes=-1)


def prepare() -> None:
    for k in range(2):
        write_hdf5(f"{k}.h5", {"x": ramp(SHAPE) + k}, chunks=CHUNKS, compression="gzip")


def load(k: int = 0, own: Any = None, checks: bool = True) -> None:
    x = shardload.load(f"{k}.h5", mesh_of(), SPEC, readers="parallel", staging="256KiB", comm=own)
    if checks:
        check(x, ramp(SHAPE) + k, mesh_of(), SPEC)


def count() -> dict[str, int]:
    """What this process has."""
    gc.collect()
    process = psutil.Process()
    with open("/proc/self/maps") as maps:
        shared = sum("memfd:" in line or "/dev/shm" in line for line in maps)
    first = comm.Dup()  # MPICH gives out context numbers one after the other, and takes them back
    number = first.py2f()
    first.Free()
    return {
        "rss": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "threads": threading.active_count(),
        "mappings": shared,
        "communicators": number,
    }


def loads(n: int) -> None:
    for _ in range(n // 10):
        load()
    before = count()
    for k in range(n - n // 10):
        load(checks=k % 10 == 0)
    print(json.dumps({"loads": n, "before": before, "after": count()}), flush=True)


def threads() -> None:
    owns = [comm.Dup(), comm.Dup()]
    right = {0: 0, 1: 0}
    sharding = NamedSharding(mesh_of(), P(None, "a", "b"))
    field = jax.device_put(jnp.zeros((8, 8 * comm.size, 8 * comm.size)), sharding)
    rolling = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: jnp.roll(y, 1, axis=1) + 1, x))(field)

    def work(k: int) -> None:
        for _ in range(4):
            load(k, owns[k])
            right[k] += 1

    in_two_threads(work)
    computed = all(bool((shard.data == 100).all()) for shard in rolling.addressable_shards)
    outcomes = [on_one_communicator(own) for own in (comm.Dup(), comm)]
    load()
    print(json.dumps({"right": right, "computed": computed, "outcomes": outcomes}), flush=True)


def in_two_threads(work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def on_one_communicator(own: Any) -> list[str]:
    """What two threads get that make the first calls over a communicator at the same time, twice each."""
    start, found = threading.Barrier(2), []

    def work(k: int) -> None:
        for _ in range(2):
            start.wait()
            try:
                load(k, own)
                found.append("right")
            except (shardload.ConfigError, shardload.PeerError) as error:
                found.append(str(error))

    in_two_threads(work)
    load(0, own)  # in step again
    return sorted(found)


def main(folder: str, what: str, *more: str) -> None:
    os.chdir(folder)
    shardload.initialize()
    on_root(comm, prepare)
    loads(int(more[0])) if what == "loads" else threads()


if __name__ == "__main__":
    main(*sys.argv[1:])
