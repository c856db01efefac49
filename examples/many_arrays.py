"""Positions, velocities and ids of particles in one call; their centre of mass, without what padding added.

::

    mpiexec -n 4 python examples/many_arrays.py               # 10,007 particles that are made for it
    mpiexec -n 4 python examples/many_arrays.py snap.h5       # your own, in Gadget's layout (64-bit ids: JAX_ENABLE_X64=1)
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python examples/many_arrays.py      # without MPI: eight simulated devices

10,007 is a prime number: it divides over no number of devices, so ``pad=0`` adds particles at the origin until it does.
``shardload.mask`` is True for the particles of the file, and keeps the others out of means and counts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload

NAMES = {"pos": "PartType1/Coordinates", "vel": "PartType1/Velocities", "id": "PartType1/ParticleIDs"}
MADE = "many-arrays-example.h5"  # in the working folder, which all ranks see; removed at the end


def write_example(path: str, n: int = 10_007) -> None:
    """Write `n` particles. Positions are multiples of 1/1024, so that float32 adds them up exactly, in any order."""
    random = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        group = file.create_group("PartType1")
        arrays = {
            "Coordinates": random.integers(0, 1024, (n, 3)).astype("f4") / 1024,
            "Velocities": random.normal(0, 100, (n, 3)).astype("f4"),
            "ParticleIDs": random.permutation(n).astype("u4"),
        }
        for name, values in arrays.items():
            chunks = (min(n, 1000), *values.shape[1:])
            group.create_dataset(name, data=values, chunks=chunks, compression="gzip")


@jax.jit
def centre_of(x: jax.Array, real: jax.Array) -> jax.Array:
    """The mean over the particles for which `real` is True. All have the same mass."""
    return jnp.sum(x, axis=0, where=real) / jnp.sum(real, axis=0)


def centres(snap: dict[str, jax.Array]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """The centre of mass, its velocity, and the number of particles. Collective: yes, over the processes of the mesh."""
    real = shardload.mask(snap)  # the same tree: one mask for each array
    centre, velocity = (np.asarray(centre_of(snap[name], real[name])) for name in ("pos", "vel"))
    return centre, velocity, int(jnp.sum(real["id"]))


def main() -> None:
    """Load, compute, and compare with NumPy on rank 0."""
    shardload.initialize()
    path, is_made = (sys.argv[1], False) if len(sys.argv) > 1 else (MADE, True)
    if is_made and jax.process_index() == 0:
        write_example(path)  # the others wait: rank 0 opens the file first, in the load
    mesh = Mesh(np.array(jax.devices()), "n")
    snap = shardload.load(path, mesh, P("n"), dataset=NAMES, pad=0)
    centre, velocity, n = centres(snap)
    if jax.process_index() == 0:
        with h5py.File(path) as file:
            positions = file[NAMES["pos"]][...]
        expected = positions.sum(axis=0) / np.float32(len(positions))
        np.testing.assert_allclose(centre, expected, rtol=1e-3)
        print(f"arrays   {', '.join(f'{name} {x.shape} {x.dtype}' for name, x in snap.items())} on {mesh.size} devices")
        print(f"real     {n} particles; {snap['id'].size - n} of padding")
        print(f"centre   {centre}, moving with {velocity}")
        print(f"NumPy    {expected}, {'the same' if np.array_equal(centre, expected) else 'differs by rounding'}")
        if is_made:
            Path(path).unlink()


if __name__ == "__main__":
    main()
