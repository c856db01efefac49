"""What does ``shardload plan`` print? The plan of a load for a mesh without devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

from jax.sharding import AbstractMesh, PartitionSpec

import shardload
from shardload.cli.info import to_json
from shardload.errors import printable
from shardload.formats.lookup import open_file, split_path
from shardload.jobs.loading.plan import Plan, TreePlan, describe_plan
from shardload.options import Options
from shardload.system.terminal import tell, width_of, wrap


def run(out: IO[str], file: str, axes: Mapping[str, int], spec: Any, as_json: bool, **how: Any) -> None:
    """Plan, and print the plan."""
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    if how.get("dataset") is None:
        file, how["dataset"] = _of_group(file, how)
    plan = shardload.plan(file, mesh, spec if isinstance(spec, dict) else PartitionSpec(*spec), **how)
    if isinstance(plan, TreePlan):
        totals = {name: getattr(plan, name) for name in ("nbytes", "peak_nbytes", "staging_nbytes")}
        tell(to_json(described_each(plan) | totals) if as_json else plan.describe(width_of(out)), out)
    else:
        tell(to_json(described(plan)) if as_json else describe_plan(plan, width_of(out)), out)
    leaves = plan.leaves if isinstance(plan, TreePlan) else [plan]
    if not as_json and (wide := [leaf for leaf in leaves if _needs_64_bits(leaf)]):
        text = (
            f"'{wide[0].info.dataset}' would be {wide[0].dtype}: the load needs JAX's 64-bit types, by JAX_ENABLE_X64=1 in the "
        )
        text += f"environment, or --dtype {_NARROW.get(wide[0].dtype.kind, 'int32')} if its values fit"
        tell("\n" + "\n".join(wrap(printable(text), width_of(out), "", "  ")), out)


_NARROW = {"f": "float32", "c": "complex64", "u": "uint32"}


def _needs_64_bits(plan: Plan) -> bool:
    return plan.dtype.kind in "iufc" and plan.dtype.itemsize // (2 if plan.dtype.kind == "c" else 1) > 4


def _of_group(file: str, how: Mapping[str, Any]) -> tuple[str, str | None]:
    """The file and the pattern for all arrays of a group, if FILE:NAME names one; else the same, and None."""
    path, name = split_path(file)
    if name is None or name.endswith("*"):
        return file, None
    access = Options.check(**{key: how[key] for key in ("allow_external", "allow_filters", "untrusted", "storage")}).access
    with open_file(path, access) as opened:
        group = f"/{name.strip('/')}".rstrip("/")
        names = [info.dataset for info in opened.list_arrays()]
    is_group = group not in names and any(known.startswith(f"{group}/") for known in names)
    return (path, f"{group}/*".lstrip("/")) if is_group else (file, None)


def described(plan: Plan) -> dict[str, Any]:
    """What a plan says of its array, for JSON."""
    names = ("shape", "shape_global", "chunks", "decomposition", "shard_shape", "n_ranks", "readers", "n_readers", "why")
    told = {"path": plan.info.path, "dataset": plan.info.dataset, "dtype": plan.dtype}
    told |= {name: getattr(plan, name) for name in names} | {"needs_64_bits": _needs_64_bits(plan)}
    return {**told, "costs": {mode: asdict(cost) for mode, cost in plan.costs.items()}}


def described_each(plan: TreePlan) -> dict[str, Any]:
    """The same of each array of a tree, and which arrays were left out."""
    arrays = [{"where": where, **described(leaf)} for where, leaf in zip(plan.where, plan.leaves, strict=True)]
    return {"arrays": arrays, "left_out": [info.dataset for info in plan.left_out]}
