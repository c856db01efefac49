"""Load a field as the pencils that jaxDecomp wants, transform it with jaxDecomp, and compare each shard with NumPy.

``jaxdecomp_client.py FOLDER``. Prints the largest error relative to the largest mode, one line of JSON a rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import h5py
import jax
import jaxdecomp
import numpy as np
import zarr
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from tests.mpi.support import check, grid_shape, on_root

SHAPE = (8, 12, 16)


def main(folder: str) -> None:
    shardload.initialize()
    comm = MPI.COMM_WORLD
    values = np.random.default_rng(3).normal(size=SHAPE).astype("float32")
    paths = [str(Path(folder, name)) for name in ("field.h5", "field.zarr")]

    def write() -> None:
        with h5py.File(paths[0], "w") as file:
            file.create_dataset("density", data=values, chunks=(1, *SHAPE[1:]), compression="gzip")
        zarr.create_array(paths[1], data=values, chunks=(3, 5, 7))

    on_root(comm, write)
    # As in jaxDecomp's README.
    mesh = jax.make_mesh(grid_shape(comm.size), axis_names=("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
    modes_of = np.fft.fftn(values.astype("float64"))
    errors = []
    for path in paths:
        x = shardload.load(path, mesh, P("x", "y"), verify="checksum")
        check(x, values, mesh, P("x", "y"))
        modes = jaxdecomp.fft.pfft3d(x)
        expected = modes_of.transpose(1, 2, 0)  # jaxDecomp leaves them so; with equal axes nobody would see it
        assert modes.shape == expected.shape, (modes.shape, expected.shape)
        for shard in modes.addressable_shards:
            errors.append(float(np.abs(np.asarray(shard.data) - expected[shard.index]).max() / np.abs(expected).max()))
        back = jaxdecomp.fft.pifft3d(modes)
        assert back.shape == SHAPE
        for shard in back.addressable_shards:
            errors.append(float(np.abs(np.asarray(shard.data) - values[shard.index]).max() / np.abs(values).max()))
    print(json.dumps({"error": max(errors), "shards": len(errors)}))


if __name__ == "__main__":
    main(sys.argv[1])
