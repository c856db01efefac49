"""What does ``shardload plan`` print? The plan of a load for a mesh without devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any

from jax.sharding import AbstractMesh, PartitionSpec

import shardload
from shardload.cli.info import to_json
from shardload.jobs.loading.describe import describe_plan
from shardload.jobs.loading.plan import Plan
from shardload.jobs.loading.tree_plan import TreePlan
from shardload.system.terminal import tell, width_of


def run(
    out: IO[str], file: str, axes: Mapping[str, int], spec: Sequence[str | tuple[str, ...] | None], as_json: bool, **how: Any
) -> None:
    """Plan, and print the plan."""
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    plan = shardload.plan(file, mesh, PartitionSpec(*spec), **how)
    if isinstance(plan, TreePlan):
        totals = {name: getattr(plan, name) for name in ("nbytes", "peak_nbytes", "staging_nbytes")}
        tell(to_json(described_each(plan) | totals) if as_json else plan.describe(width_of(out)), out)
    else:
        tell(to_json(described(plan)) if as_json else describe_plan(plan, width_of(out)), out)


def described(plan: Plan) -> dict[str, Any]:
    """What a plan says of its array, for JSON."""
    names = ("shape", "shape_global", "chunks", "decomposition", "shard_shape", "n_ranks", "readers", "n_readers", "why")
    told = {"path": plan.info.path, "dataset": plan.info.dataset, "dtype": plan.dtype}
    told |= {name: getattr(plan, name) for name in names}
    return {**told, "costs": {mode: asdict(cost) for mode, cost in plan.costs.items()}}


def described_each(plan: TreePlan) -> dict[str, Any]:
    """The same of each array of a tree, and which arrays were left out."""
    arrays = [{"where": where, **described(leaf)} for where, leaf in zip(plan.where, plan.leaves, strict=True)]
    return {"arrays": arrays, "left_out": [info.dataset for info in plan.left_out]}
