"""What does ``shardload plan`` print? The plan of a load for a mesh without devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any

from jax.sharding import AbstractMesh, PartitionSpec

import shardload
from shardload.cli.info import to_json
from shardload.jobs.loading.describe import describe_plan
from shardload.jobs.loading.tree_plan import TreePlan
from shardload.system.terminal import tell, width_of

_NAMES = ("shape", "shape_global", "dtype", "chunks", "decomposition", "shard_shape", "n_ranks", "readers", "n_readers", "why")


def run(
    out: IO[str], file: str, axes: Mapping[str, int], spec: Sequence[str | tuple[str, ...] | None], as_json: bool, **how: Any
) -> None:
    """Plan, and print the plan."""
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    plan = shardload.plan(file, mesh, PartitionSpec(*spec), **how)
    if isinstance(plan, TreePlan):
        tell(to_json(_tree_described(plan)) if as_json else plan.describe(width_of(out)), out)
    else:
        tell(to_json(_described(plan)) if as_json else describe_plan(plan, width_of(out)), out)


def _described(plan: Any) -> dict[str, Any]:
    costs = {mode: asdict(cost) for mode, cost in plan.costs.items()}
    told = {name: getattr(plan, name) for name in _NAMES}
    return {"path": plan.info.path, "dataset": plan.info.dataset, **told, "costs": costs}


def _tree_described(plan: TreePlan) -> dict[str, Any]:
    totals = {name: getattr(plan, name) for name in ("nbytes", "peak_nbytes", "staging_nbytes")}
    arrays = [{"where": where, **_described(leaf)} for where, leaf in zip(plan.where, plan.leaves, strict=True)]
    return {"arrays": arrays, **totals, "left_out": [info.dataset for info in plan.left_out]}
