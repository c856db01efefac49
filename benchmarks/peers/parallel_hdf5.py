"""Parallel HDF5: every rank reads its own hyperslab, collectively, into NumPy. Needs an h5py built with MPI; no JAX."""

from __future__ import annotations

import time
from typing import Any

import h5py
import numpy as np
from mpi4py import MPI

from benchmarks.cases.cells import box
from benchmarks.remote import serve

comm = MPI.COMM_WORLD


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Open, read, close; compare outside the timing."""
    file = request["file"]
    comm.Barrier()
    start = time.perf_counter()
    with h5py.File(file["path"], "r", driver="mpio", comm=comm) as opened:
        data = opened[file["dataset"]]
        mine = box(data.shape, request["spec"], comm.size, comm.rank)
        with data.collective:
            values = data[mine]
    end = time.perf_counter()
    if request.get("verify") and not np.array_equal(values, np.load(file["reference"], mmap_mode="r")[mine]):
        raise ValueError(f"parallel HDF5 read other values than the file has at {mine}")
    return {"start": start, "end": end}


if __name__ == "__main__":
    serve(
        handle,
        comm.rank,
        {"h5py": h5py.__version__, "HDF5": h5py.version.hdf5_version, "MPI": MPI.Get_library_version().split(",")[0]},
    )
