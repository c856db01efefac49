"""What do type checkers and editors know of a call? Checked by mypy, never run."""

from pathlib import Path
from typing import Any, assert_type

import jax
import numpy as np

import shardload


def calls(
    mesh: jax.sharding.Mesh, spec: jax.sharding.PartitionSpec, field: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None
) -> None:
    """Wrong if a single array were no `jax.Array`, a tree were one, or an option were unknown."""
    x = shardload.load("data.h5", mesh, spec)
    assert_type(x, jax.Array)
    assert_type(shardload.load(Path("data.h5"), mesh, spec, dataset="rho", pad=0, verify="full", halo=(1, 1)), jax.Array)
    assert_type(shardload.load("data.h5", mesh, spec, dataset={"rho": "rho"}), Any)
    assert_type(shardload.load(["a.h5", "b.h5"], mesh, spec), Any)
    plan = shardload.plan("data.h5", mesh, spec, dataset="rho", ranks_per_node=4)
    assert_type(plan, shardload.Plan)
    assert_type(plan.execute(), jax.Array)
    assert_type(shardload.plan("data.h5", mesh, spec, dataset=["rho", "vel"]), Any)
    assert_type(shardload.scatter(field, mesh, spec, root=1, dtype="float32"), jax.Array)
    assert_type(shardload.mask(x), jax.Array)
    assert_type(shardload.mask(plan), jax.Array)
    assert_type(shardload.unpad(x, plan), jax.Array)
    assert_type(shardload.unpad(x, plan, numpy=True), np.ndarray[Any, Any])
    assert_type(shardload.unpad({"x": x}), Any)
    shardload.load("data.h5", mesh, spec, chunk=3)  # type: ignore[call-overload]
