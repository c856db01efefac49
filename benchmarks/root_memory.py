"""How much host memory does rank 0 use when it reads for everybody?

    mpiexec -n 4 python -m benchmarks.root_memory       # 1 GiB, readers="root", staging 256 MiB

Prints, per rank, the growth of the peak resident set during the load, what it may be (piece + staging + 64 MiB), and exits with
status 1 if any rank is over.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from pathlib import Path

import h5py
import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.group import world
from shardload.units import format_nbytes, parse_nbytes

ALLOWANCE_NBYTES = 64 << 20


def peak_nbytes() -> int:
    """Peak resident set of this process so far (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def resident_nbytes() -> int:
    """Resident set of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Write, load, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", default="1GiB", help="size of the array (default 1GiB)")
    parser.add_argument("--staging", default="256MiB")
    parser.add_argument("--readers", default="root")
    parser.add_argument("--layout", choices=("contiguous", "gzip"), default="gzip")
    options = parser.parse_args()
    shardload.initialize()
    comm = world()
    planes = parse_nbytes(options.nbytes) // (512 * 512 * 4)
    path = Path(comm.bcast(str(Path(tempfile.gettempdir()) / f"shardload-memory-{os.getpid()}.h5")))
    if comm.rank == 0:
        layout = {"chunks": (1, 512, 512), "compression": "gzip", "compression_opts": 1} if options.layout == "gzip" else {}
        with h5py.File(path, "w") as file:
            data = file.create_dataset("x", (planes, 512, 512), "f4", **layout)
            for i in range(planes):
                data[i] = np.arange(i, i + 512 * 512, dtype="f4").reshape(512, 512) % 4096
    comm.Barrier()
    devices = np.array(jax.devices())
    n = len(devices)
    rows = max(d for d in range(1, int(n**0.5) + 1) if n % d == 0)
    mesh = Mesh(devices.reshape(rows, -1), ("a", "b"))
    try:
        with h5py.File(path) as file:  # h5py's and JAX's own start-up is not what is measured
            small = file["x"][0]
        shardload.scatter(small if comm.rank == 0 else None, mesh, P("a", "b")).block_until_ready()
        # The baseline is the resident set now, or an older peak where that was higher: only growth beyond both counts.
        baseline = max(resident_nbytes(), peak_nbytes()) if comm.rank else resident_nbytes()
        before = peak_nbytes()
        array = shardload.load(path, mesh, P(None, "a", "b"), readers=options.readers, staging=options.staging)
        array.block_until_ready()
        piece = sum(shard.data.nbytes for shard in array.addressable_shards)
        growth = max(peak_nbytes(), before) - baseline
        cap = piece + parse_nbytes(options.staging) + ALLOWANCE_NBYTES
        rows_of = comm.gather((comm.rank, growth, piece, cap))
        over = comm.allreduce(int(growth > cap))
        if comm.rank == 0:
            print(f"{options.nbytes}, {options.layout}, readers={options.readers!r}, staging {options.staging}, {n} ranks")
            for rank, grown, held, most in rows_of:
                print(
                    f"  rank {rank}: peak RSS grew by {format_nbytes(grown)} (piece {format_nbytes(held)}), "
                    f"cap {format_nbytes(most)}: {'OVER' if grown > most else 'ok'}"
                )
    finally:
        comm.Barrier()
        if comm.rank == 0:
            path.unlink(missing_ok=True)
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
