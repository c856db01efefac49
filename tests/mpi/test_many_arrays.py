"""Do several arrays of one call share its memory and its ranks, and do all end with the one that fails?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError
from shardload.units import format_nbytes
from tests.mpi.support import check, mesh_of, on_root, ramp, same_error, unit
from tests.unit.files import write_hdf5

pytestmark = pytest.mark.usefixtures("moved_as_large")


def test_arrays_that_fit_alone_but_not_together(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if buffers for the needs of all were larger than what the caller allowed: each array alone takes all of it."""
    n, path = unit(), str(shared_tmp_path / "a.h5")
    staging = 20 * 15 * 64 * n

    def write() -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("wide", data=np.ones((15 * 64 * n,), "f4"), chunks=(15 * 64 * n,))
            file.create_dataset("cast", data=np.ones((20 * 64 * n,), "u1"), chunks=(20 * 64 * n,))

    on_root(comm, write)
    load = partial(shardload.load, path, mesh_of(), P(("a", "b")), dtype="f4", staging=staging)
    for alone in ("wide", "cast"):
        assert float(load(dataset=alone).addressable_shards[0].data[0]) == 1
    together = ["wide", "cast"]
    # Two blocks of the larger one, and one to cast; stored, decompressed and decoded chunks of the other, and a cast one.
    block = 20 * 64 * n // len(jax.devices())
    needed = 2 * 4 * block + block + 3 * 4 * 15 * 64 * n + 4 * 20 * 64 * n
    says = f"these 2 arrays share their staging buffers, which takes {format_nbytes(needed)}"
    same_error(comm, lambda: load(dataset=together), ConfigError, says, "staging='")
    assert len(load(dataset=together, staging=needed)) == 2
    same_error(comm, lambda: load(dataset=together, staging=needed - 1), ConfigError, says)


@pytest.mark.mpi(min_size=2)
def test_each_of_many_small_arrays_is_read_by_one_rank(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if two ranks read an array or none did, or if the arrays beyond a multiple of the ranks were left out; and if a
    plan without a job said that all ranks read each.
    """
    n, size = 2 * comm.size + 1, unit()

    def values(k: int) -> Any:
        return ramp((size, 3 * size, 2)) + 1000 * k

    names, spec = [f"v{k:02d}" for k in range(n)], P(None, ("a", "b"))
    arrays = {name: values(k) for k, name in enumerate(names)}
    path = on_root(comm, lambda: write_hdf5(shared_tmp_path / "turns.h5", arrays, chunks=(1, size, 2), compression="gzip"))
    plan = shardload.plan(path, mesh_of(), spec, dataset=names, readers="parallel")
    abstract = shardload.plan(path, mesh_of().abstract_mesh, spec, dataset=names, readers="parallel", processes=comm.size)
    assert [one.why for one in abstract.leaves] == [one.why for one in plan.leaves]
    assert abstract.peak_nbytes >= plan.peak_nbytes, "on a machine of many cores it may take more"
    for verify in ("index", "checksum"):
        arrays = shardload.load(path, mesh_of(), spec, dataset=names, readers="parallel", verify=verify)
        for k, x in enumerate(arrays):
            check(x, values(k), mesh_of(), spec, k)
    owners = [[rank for rank in range(comm.size) if one.schedule.is_owner(rank)] for one in plan.leaves]
    assert owners[:-1] == [[k // 2] for k in range(n - 1)]
    assert [one.n_readers for one in plan.leaves] == [1] * (n - 1) + [len(owners[-1])]
    assert len(owners[-1]) == min(comm.size, plan.leaves[-1].schedule.blocks.n_cells)
    plan.execute()
    of_array = [one.chunks_decoded for one in plan.report.arrays]
    assert of_array == [3 * size] * n and plan.report.chunks_decoded == 3 * size * n
    check(plan.leaves[1].execute(), values(1), mesh_of(), spec)
    assert plan.leaves[1].costs["parallel"].n_readers == 1 and "by one rank, this one by rank 0" in plan.leaves[1].why
