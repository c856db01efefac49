"""Parallel HDF5: every rank reads or writes its own hyperslab, collectively. Needs an h5py built with MPI; NumPy, no JAX."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from mpi4py import MPI

from benchmarks.cases.cells import box
from benchmarks.cases.saves import GZIP_LEVEL, SaveLayout
from benchmarks.remote import serve

NAME = "x"
comm = MPI.COMM_WORLD
kept: dict[str, Any] = {}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """One request."""
    return save(request) if request["do"] == "save" else load(request)


def save(request: dict[str, Any]) -> dict[str, Any]:
    """Create, write, close. The values are in memory before."""
    layout = SaveLayout.of(request["layout"])
    key = request["reference"], request["spec"]
    if kept.get("key") != key:
        kept.clear()
        whole = np.load(request["reference"], mmap_mode="r")
        mine = box(whole.shape, request["spec"], comm.size, comm.rank)
        kept.update(key=key, shape=whole.shape, mine=mine, values=np.array(whole[mine]))
    more = {} if layout.chunks is None else {"compression": layout.codec, "compression_opts": GZIP_LEVEL}
    before = resident_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    comm.Barrier()
    start, cpu = time.perf_counter(), time.process_time()
    with h5py.File(request["path"], "w", driver="mpio", comm=comm) as opened:
        data = opened.create_dataset(NAME, kept["shape"], kept["values"].dtype, chunks=layout.chunks, **more)
        with data.collective:
            data[kept["mine"]] = kept["values"]
    end, cpu = time.perf_counter(), time.process_time() - cpu
    return {"start": start, "end": end, "cpu": cpu, "peak_nbytes": resident_nbytes("VmHWM") - before}


def resident_nbytes(which: str) -> int:
    """Of this process: now (VmRSS), or the most since it was reset (VmHWM)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[which].split()[0]) << 10


def load(request: dict[str, Any]) -> dict[str, Any]:
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
