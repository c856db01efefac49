"""Load a field as the pencils that jaxDecomp wants, with halos, and compare each shard, bit by bit, with jaxDecomp's exchange
of the plain load. (Its FFT: `examples/clients/with_jaxdecomp.py`.)

``jaxdecomp_client.py FOLDER``. Prints how many shards were compared, a line of JSON a rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxdecomp
import numpy as np
import zarr
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from tests.mpi.support import grid_shape, on_root
from tests.unit.files import write_hdf5

SHAPE = (8, 12, 16)
HALO = (3, 2)  # of axes x and y, for those that are cut: jaxDecomp exchanges no others
PERIODS = ((True, False), (True, True), (False, False))


def main(folder: str) -> None:
    jax.config.update("jax_disable_most_optimizations", True)  # to compile is most of this program's time
    shardload.initialize()
    comm = MPI.COMM_WORLD
    values = np.random.default_rng(3).normal(size=SHAPE).astype("float32")
    paths = [str(Path(folder, name)) for name in ("field.h5", "field.zarr")]

    def write() -> None:
        write_hdf5(paths[0], {"density": values}, chunks=(1, *SHAPE[1:]), compression="gzip")
        zarr.create_array(paths[1], data=values, chunks=(3, 5, 7))

    on_root(comm, write)
    # As in jaxDecomp's README.
    mesh = jax.make_mesh(grid_shape(comm.size), axis_names=("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
    print(json.dumps({"halos": compare_halos(paths, mesh)}))


def compare_halos(paths: list[str], mesh: Any) -> int:
    """Loads with halos against the plain load, padded and exchanged by jaxDecomp; returns how many shards were compared."""
    width = tuple(h if n > 1 else 0 for h, n in zip(HALO, mesh.shape.values(), strict=True))
    padding, spec = [(h, h) for h in (*width, 0)], P("x", "y")
    pad = jax.shard_map(lambda shard: jnp.pad(shard, padding, constant_values=-9), mesh=mesh, in_specs=spec, out_specs=spec)

    @jax.jit  # one program: each is compiled on every rank
    def exchanged(x: jax.Array) -> list[jax.Array]:
        padded = pad(x)
        return [jaxdecomp.halo_exchange(padded, width, periods) for periods in PERIODS]

    n = 0
    for periods, expected in zip(PERIODS, exchanged(shardload.load(paths[0], mesh, spec)), strict=True):
        by_device = {shard.device: np.asarray(shard.data) for shard in expected.addressable_shards}
        for path in paths:
            found = shardload.load(path, mesh, spec, halo=width, edge=["wrap" if p else 0 for p in periods], verify="full")
            assert found.shape == expected.shape, (found.shape, expected.shape)
            for shard in found.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), by_device[shard.device], strict=True)
                n += 1
    return n


if __name__ == "__main__":
    main(sys.argv[1])
