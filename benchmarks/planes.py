"""Plane-chunked gzip HDF5 as pencils: shardload's ways of reading against slicing in every process.

    mpiexec -n 8 python -m benchmarks.planes            # 512^3 float32, chunks (1, 512, 512), P(None, 'a', 'b')
    mpiexec -n 4 python -m benchmarks.planes --size 128

Prints a line per way: seconds (median over repeats of the slowest rank, page cache warm), chunks decoded (counted, not
planned), and the ratio to slicing. Every array is compared with the file, shard by shard, outside the timed part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload.group import world


def write_planes(path: Path, size: int) -> None:
    """A smooth field with noise, one gzip chunk per plane: compresses about as well as simulation output does."""
    rng = np.random.default_rng(0)
    wave = np.sin(np.linspace(0, 8 * np.pi, size, dtype=np.float32))
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (size,) * 3, "f4", chunks=(1, size, size), compression="gzip", shuffle=True)
        for i in range(size):
            noise = rng.integers(0, 64, (size, size)).astype(np.float32) / 256
            data[i] = wave[i] + wave[:, None] * wave[None, :] + noise


def slice_in_every_process(path: Path, sharding: NamedSharding) -> jax.Array:
    """What tutorials do: each process opens the file and slices it in the callback."""
    with h5py.File(path) as file:
        data = file["x"]
        return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


def seconds(comm: Any, load: Callable[[], jax.Array], check: Callable[[jax.Array], None], repeats: int) -> list[float]:
    """The slowest rank's time of each repeat; the first, which warms the page cache, is not counted."""
    times = []
    for repeat in range(repeats + 1):
        comm.Barrier()
        start = time.perf_counter()
        array = jax.block_until_ready(load())
        mine = np.array([time.perf_counter() - start])
        slowest = np.empty_like(mine)
        comm.Allreduce(mine, slowest, op=_max())
        if repeat:
            times.append(float(slowest[0]))
        else:
            check(array)
        del array
    return times


def _max() -> Any:
    from mpi4py import MPI

    return MPI.MAX


def main() -> None:
    """Run all ways in one job and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512, help="elements along each axis (default 512)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--file", type=Path, help="where the file is, or is to be made (default: a temporary one)")
    options = parser.parse_args()
    shardload.initialize()
    comm = world()
    devices = np.array(jax.devices())
    n = len(devices)
    rows = max(d for d in range(1, int(n**0.5) + 1) if n % d == 0)
    sharding = NamedSharding(Mesh(devices.reshape(rows, -1), ("a", "b")), P(None, "a", "b"))
    name = options.file or Path(tempfile.gettempdir()) / f"shardload-planes-{os.getpid() if n == 1 else os.getppid()}.h5"
    path = Path(comm.bcast(str(name)))
    if comm.rank == 0 and not path.exists():
        print(f"writing {path} ...", flush=True)
        write_planes(path, options.size)
    comm.Barrier()

    def check(array: jax.Array) -> None:
        with h5py.File(path) as file:
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), file["x"][shard.index])

    try:
        results: dict[str, tuple[float, str, str]] = {}
        times = seconds(comm, lambda: slice_in_every_process(path, sharding), check, options.repeats)
        baseline = statistics.median(times)
        results["slice in every process"] = (baseline, "", "")
        for mode in ("parallel", "direct", "root"):
            plan = shardload.plan(path, sharding, readers=mode, staging="256MiB")
            times = seconds(comm, plan.execute, check, options.repeats)
            report = plan.report
            decoded = "" if report is None else f"{report.chunks_decoded} (planned {plan.costs[mode].chunks_decoded})"
            results[f"shardload {mode}"] = (
                statistics.median(times),
                decoded,
                f"{baseline / statistics.median(times):.1f}x",
            )
        if comm.rank == 0:
            print(f"{options.size}^3 float32, gzip planes, P(None, 'a', 'b') on {rows} x {n // rows}, {n} ranks")
            for way, (took, decoded, ratio) in results.items():
                print(f"  {way:24} {took:7.3f} s   chunks decoded {decoded or '-':24} {ratio}")
    finally:
        comm.Barrier()
        if comm.rank == 0 and options.file is None:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
