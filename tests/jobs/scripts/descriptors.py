"""Load while one rank may open only so many files more: none, one, two, ... Print what each rank met, one line of JSON each.

``descriptors.py FOLDER``. Every load has a communicator of its own, so that shared memory is made anew under the limit.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import zarr
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from tests.mpi.support import check, mesh_of, on_root, ramp
from tests.tiers import IS_QUICK
from tests.tuning import tune
from tests.unit.files import write_hdf5

SHAPE, CHUNKS = (16, 24, 20), (8, 12, 10)  # two chunks for each of 4 ranks
WAYS = (("chunks.h5", "parallel"), ("plain.h5", "parallel"), ("chunks.zarr", "parallel"), ("chunks.h5", "direct"))
WAYS = WAYS[:: 2 if IS_QUICK else 1]
MOST = 12  # descriptors that a load needs at the same time, and a few more

comm = MPI.COMM_WORLD
tune(worth_sharing_nbytes=0, min_chunk_nbytes=1)  # blocks are small here


def prepare() -> None:
    """Make the files."""
    values = ramp(SHAPE)
    write_hdf5("chunks.h5", {"x": values}, chunks=CHUNKS, compression="gzip")
    write_hdf5("plain.h5", {"x": values})
    zarr.create_array("chunks.zarr", data=np.asarray(values), chunks=CHUNKS)


@contextmanager
def descriptors_left(n: int) -> Iterator[None]:
    """Let this process open `n` files at a time, whatever it has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    limit = 0
    while limit - len([number for number in used if number < limit]) < n:
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main(folder: str) -> None:
    os.chdir(folder)
    shardload.initialize()
    on_root(comm, prepare)
    for path, readers in WAYS:
        n_loaded = 0
        for left in range(MOST):
            if n_loaded == 2:  # with more it loads as well
                break
            own = comm.Dup()
            plan = shardload.plan(path, mesh_of(), P("a", "b"), readers=readers, comm=own)
            said = {"path": path, "readers": readers, "left": left, "type": None}
            try:
                with descriptors_left(left) if comm.rank == 2 else nullcontext():
                    x = plan.execute()
            except shardload.ShardloadError as error:
                said |= {"type": type(error).__name__, "text": str(error)}
            else:
                n_loaded += 1
                check(x, ramp(SHAPE), mesh_of(), P("a", "b"), str(said))
            print(json.dumps(said), flush=True)
            check(plan.execute(), ramp(SHAPE), mesh_of(), P("a", "b"), str(said))
            own.Free()


if __name__ == "__main__":
    main(*sys.argv[1:])
