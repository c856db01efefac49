"""Is a plan facts alone, with the report of its last execution, and does it go by the sizes that it was made with?"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.errors import ConfigError, SourceError
from tests.unit.files import write_hdf5


@pytest.fixture
def path(tmp_path: Path) -> str:
    values = np.arange(96, dtype="f4").reshape(8, 12)
    return write_hdf5(tmp_path / "a.h5", {"x": values}, chunks=(2, 5), compression="gzip")


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("a",))


def test_each_copy_knows_the_version_that_it_has_read(path: str) -> None:
    """Wrong if a copy that reads a newer file let the names of that be given to values which the plan has read before."""
    plan = shardload.plan(path, mesh(), P("a"))
    first = plan.execute()
    later = copy.copy(plan)
    with h5py.File(path, "r+") as file:
        file["more"] = np.ones(1000)
    later.execute()
    with pytest.raises(SourceError, match="has changed since it was loaded"):
        shardload.to_xarray(2 * first, plan)


def test_a_plan_without_devices_can_be_sent_elsewhere(path: str) -> None:
    """A plan over an abstract mesh is numbers and text: pickled, as a scheduler or a notebook does it, it says the same."""
    plan = shardload.plan(path, AbstractMesh((2, 2), ("a", "b")), P("a", "b"))
    other = pickle.loads(pickle.dumps(plan))
    assert str(other) == str(plan) and repr(other) == repr(plan)
    for one in (plan, other, copy.copy(plan)):
        with pytest.raises(ConfigError, match="an AbstractMesh has no devices, so there is nothing to execute this plan on"):
            one.execute()


def test_an_empty_mesh(path: str) -> None:
    """Wrong if it were a division by zero: JAX gives one where no mesh is set."""
    with pytest.raises(ConfigError, match="the mesh is empty, as jax"):
        shardload.plan(path, jax.sharding.get_abstract_mesh(), P())


@pytest.mark.parametrize(
    ("n_planes", "n_ranks", "staging", "planes"),
    [
        (512, 4, "auto", 16),  # 512 MiB: no more than that, though a quarter of a rank's 128 is more
        (512, 8, "auto", 16),  # a quarter of 64 MiB
        (256, 8, "auto", 8),  # a quarter of 32
        (2048, 4, "auto", 16),
        (64, 4, "auto", 4),  # 64 MiB: four blocks for each rank, as before
        (512, 4, "32MiB", 4),  # the cap on memory counts first
    ],
)
def test_blocks_grow_with_the_array_inside_of_a_machine(
    tmp_path: Path, n_planes: int, n_ranks: int, staging: str, planes: int
) -> None:
    """Wrong if a large array were cut into thousands of blocks, or a rank had too few to read one while it sends another."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (n_planes, 512, 512), "f4", chunks=(1, 512, 512), compression="gzip")
    mesh = AbstractMesh((n_ranks,), ("a",))
    plan = shardload.plan(str(tmp_path / "a.h5"), mesh, P(None, "a"), readers="parallel", staging=staging)
    assert plan.schedule.blocks.cell == (planes, 512, 512)
