"""Load, scatter and save on all ranks, on several meshes; print what was checked, one line of JSON a rank.

``modes.py FOLDER [mpi|backwards [few]]``: how JAX is started. ``backwards``: process k is rank size - 1 - k.

Each mesh takes a third of the decompositions, and both ways to scatter. One of them takes its third with every kind of reader:
half of these combinations on an even number of ranks, the others on an odd one. What was scattered is saved, in chunks that
shards share.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import zarr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from tests.mpi.support import DECOMPOSITIONS, READERS, check, cube, mesh_of, on_root, padded, ramp
from tests.unit.files import write_hdf5


def start(how: str) -> None:
    """Start JAX on all ranks."""
    if how == "mpi":
        shardload.initialize()
        shardload.initialize()  # a second time does nothing
        return
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    port = world.bcast(int(os.environ["TEST_PORT"]), root=0)
    jax.distributed.initialize(f"127.0.0.1:{port}", world.size, world.size - 1 - world.rank)
    shardload.initialize()  # somebody else has done it


def meshes() -> dict[str, Mesh]:
    """Meshes over all devices, with devices of one process beside each other, apart, and as replicas of each other."""
    devices = jax.devices()
    by_place = sorted(devices, key=lambda d: (d.id % jax.local_device_count(), -d.process_index))
    n_local = jax.local_device_count()
    shuffled = [devices[k] for k in np.random.default_rng(7).permutation(len(devices))]
    return {
        "plain": mesh_of(),
        "mixed": mesh_of(by_place),
        "shuffled": mesh_of(shuffled),
        "replicas inside processes": Mesh(np.array(devices, dtype=object).reshape(-1, n_local), ("a", "b")),
        "replicas across processes": Mesh(np.array(devices, dtype=object).reshape(-1, n_local).T, ("a", "b")),
        "one device each": mesh_of(devices[n_local - 1 :: n_local]),
        "all but two": mesh_of(shuffled[:-2]) if len(devices) > 2 else mesh_of(),
    }


def write_files(folder: Path, values: np.ndarray[Any, Any]) -> tuple[str, str]:
    """HDF5 and Zarr, in few chunks, which divide no axis. The array is ``x`` in both."""
    chunks = tuple(1 + n // 3 for n in values.shape)
    zarr.open_group(folder / "x.zarr", mode="w", zarr_format=3).create_array("x", data=values, chunks=chunks)
    return write_hdf5(folder / "x.h5", {"x": values}, chunks=chunks, compression="gzip", shuffle=True), str(folder / "x.zarr")


def main(folder: str, how: str, few: str) -> None:
    start(how)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    assert jax.process_count() == comm.size
    expected = comm.rank if how == "mpi" else comm.size - 1 - comm.rank
    assert jax.process_index() == expected, (jax.process_index(), comm.rank)
    values = ramp(cube())
    paths = on_root(comm, lambda: write_files(Path(tempfile.mkdtemp(dir=folder)), values))
    n_loads = n_scatters = 0
    # A third of the decompositions on each mesh, another on the next.
    thirds = [[*DECOMPOSITIONS.values()][k::3] for k in range(3)]
    pairs = [(*mesh, k, spec) for at, mesh in enumerate(meshes().items()) for k, spec in enumerate(thirds[at % 3])]
    if few:  # all meshes, each with a decomposition of its own or two
        pairs = pairs[::3]
    for where, mesh, k, spec in pairs:
        for readers in READERS[(k + comm.size) % 2 :: 2] if where == "mixed" else (("parallel", "root")[n_loads % 2],):
            path, sure = paths[n_loads % 2], ("index", "checksum")[n_loads // 2 % 2]
            x = shardload.load(path, mesh, spec, dataset="x", readers=readers, pad=-1, verify=sure)
            check(x, padded(values, mesh, spec, -1), mesh, spec, (where, readers))
            n_loads += 1
    for (where, mesh), spec in itertools.product(meshes().items(), (P("b"), P("a"))):
        root = n_scatters % comm.size
        x = shardload.scatter(values if comm.rank == root else None, mesh, spec, root=root, pad=-1)
        check(x, padded(values, mesh, spec, -1), mesh, spec, where)
        saved, chunks = Path(folder, f"saved {n_scatters}.h5"), tuple(1 + n // 2 for n in values.shape)
        shardload.save(saved, {"x": x}, chunks=chunks, verify="full" if root else "index")
        with h5py.File(saved) as file:
            np.testing.assert_array_equal(file["x"][...], values, str(where))
        n_scatters += 1
    print(json.dumps({"rank": comm.rank, "loads": n_loads, "scatters": n_scatters, "devices": len(jax.local_devices())}))


if __name__ == "__main__":
    main(sys.argv[1], *(sys.argv[2:] + ["mpi", ""][len(sys.argv) - 2 :]))
