"""Is what six ranks save read back bit for bit by the format's own library: types x shardings x layouts x meshes?

Six is the first number of ranks that two primes divide: the axes of a mesh differ, so that rows taken for columns show. No axis
of the array is divided by 2, 3, 4 or 6, so that every shard at the end has padding, and every chunk there is short.

`test_ways_of_travelling.py` runs this in its job of six ranks, which are on five nodes of different sizes. Smaller numbers of
ranks are those of `test_save.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from tests.mpi.support import DECOMPOSITIONS, compare, padded, put, ramp
from tests.mpi.test_save import KINDS, file_at

SHAPE = (13, 17, 23)
PLACES = [2, 0, 5, 1, 4, 3]  # device of each place of a mesh: never the place's own number, but for one
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, P]]] = {
    "2 x 3": ((2, 3), ("a", "b"), DECOMPOSITIONS),
    "3 x 2": ((3, 2), ("a", "b"), DECOMPOSITIONS),
    "6": ((6,), ("a",), {f"axis {k}": P(*[None] * k, "a") for k in range(3)} | {"replicated": P()}),
}
DTYPES = ("float32", "int16", "complex64", "uint8", "float16", "int32", "bool", "int8", "uint32", "uint16", "bfloat16")
NETCDF = ("float32", "int16", "uint8", "int32", "int8", "uint32", "uint16")
N_ARRAYS = 4  # of each file: other shardings and types in each


def cells() -> list[tuple[str, str, int]]:
    """Each layout with a mesh of two axes, every second with that of one axis; a number that says which arrays come next."""
    pairs = [(("2 x 3", "3 x 2")[k // 2 % 2], kind) for k, kind in enumerate(KINDS)]
    pairs += [("6", kind) for kind in list(KINDS)[::2]]
    return [(mesh, kind, N_ARRAYS * k) for k, (mesh, kind) in enumerate(pairs)]


def of_type(dtype: str) -> np.ndarray[Any, Any]:
    """Flat indices in a type, as far as it has them."""
    if dtype == "bfloat16":
        return (ramp(SHAPE, "int32") % 251).astype(ml_dtypes.bfloat16)
    return ramp(SHAPE, dtype)


SOME = slice(None, None, 3)  # both meshes of two axes and that of one, HDF5 and Zarr


@pytest.mark.mpi(min_size=6)
@pytest.mark.parametrize("which", ["some", pytest.param("the others", marks=pytest.mark.thorough)])
def test_a_grid_of_saves(comm: Any, shared_tmp_path: Path, which: str) -> None:
    """Wrong if rows of a mesh were taken for columns, devices for ranks, an owner of the last, short chunk had none, or padding
    were written."""
    some = cells()[SOME]
    rounds: list[int] = []
    for mesh_name, kind, first in some if which == "some" else [cell for cell in cells() if cell not in some]:
        path, how = file_at(shared_tmp_path, kind, f"{first}")
        shape, names, specs = MESHES[mesh_name]
        mesh = Mesh(np.array(jax.devices()[:6])[PLACES].reshape(shape), names)
        known = NETCDF if kind == "netCDF4" else DTYPES[: None if path.suffix == ".h5" else -1]
        tree, values = {}, {}
        for k in range(first, first + N_ARRAYS):
            dtype, spec = known[k % len(known)], specs[spec_of(mesh_name, k)]
            name = f"g{k % 2}/{dtype}"
            values[name] = of_type(dtype)
            tree[name] = put(padded(values[name], mesh, spec, 1), mesh, spec)
        report = shardload.save(path, tree, shape=SHAPE, staging="64KiB", **how)
        assert report.n_read_back == report.n_chunks
        rounds.append(report.n_rounds)
        read = {n: v.astype("float32") if v.dtype == ml_dtypes.bfloat16 else v for n, v in values.items()}  # as h5py does
        compare(comm, path, read)
    assert sum(n > 1 for n in rounds) >= len(rounds) // 3, rounds
    seen = {(mesh_name, spec_of(mesh_name, first + k)) for mesh_name, _, first in cells() for k in range(N_ARRAYS)}
    assert seen == {(mesh_name, name) for mesh_name, (*_, specs) in MESHES.items() for name in specs}


def spec_of(mesh_name: str, k: int) -> str:
    """The name of the k-th array's sharding."""
    specs = list(MESHES[mesh_name][2])
    return specs[k % len(specs)]
