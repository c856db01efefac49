"""What do type checkers and editors know of a call? Checked by mypy, never run."""

from pathlib import Path
from typing import Any, assert_type

import jax
import numpy as np

import shardload


def calls(
    mesh: jax.sharding.Mesh, spec: jax.sharding.PartitionSpec, field: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None
) -> None:
    """Wrong if what a call returns could not be declared, or an option were unknown."""
    x: jax.Array = shardload.load("data.h5", mesh, spec, dataset="rho", pad=0, verify="full", halo=(1, 1))
    tree: dict[str, jax.Array] = shardload.load(Path("data.h5"), mesh, spec, dataset={"rho": "rho"})
    plan: shardload.Plan = shardload.plan("data.h5", mesh, spec, dataset="rho", ranks_per_node=4)
    assert_type(plan.execute(), jax.Array)
    plans: shardload.TreePlan = shardload.plan("data.h5", mesh, spec, dataset=["rho", "vel"])
    whole: np.ndarray[Any, Any] = shardload.unpad(tree["rho"], plan, numpy=True)
    print(x, whole, shardload.mask(tree, plans), shardload.scatter(field, mesh, spec, root=1, dtype="float32"))
    shardload.load("data.h5", mesh, spec, chunk=3)  # type: ignore[call-arg]
