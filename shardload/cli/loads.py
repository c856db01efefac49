"""What do ``shardload plan`` and ``shardload verify`` print? The plan of a load, for a mesh without devices; what it proved."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardload.api import plan
from shardload.cli.info import to_json
from shardload.comm.group import group_of
from shardload.comm.launch import initialize
from shardload.comm.mpi import world_rank_and_size
from shardload.errors import ConfigError, printable
from shardload.jobs.loading.plan import Plan, TreePlan, describe_plan
from shardload.system.terminal import width_of, wrap
from shardload.transfer.cast import is_wide
from shardload.units import counted

_MOST_DEVICES = 4096  # of a process: JAX takes 5 s to simulate so many, 37 s for 10,000


def run_plan(out: IO[str], file: str, axes: Mapping[str, int], spec: Any, as_json: bool, **options: Any) -> None:
    """Plan, and print the plan."""
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    load_plan = plan(file, mesh, spec if isinstance(spec, dict) else PartitionSpec(*spec), **options)
    if as_json:
        print(to_json(_described(load_plan)), file=out)
        return
    text = load_plan.describe(width_of(out)) if isinstance(load_plan, TreePlan) else describe_plan(load_plan, width_of(out))
    print(text, file=out)
    if wide := [leaf for leaf in _leaves(load_plan) if is_wide(leaf.dtype)]:
        fix = f"JAX_ENABLE_X64=1 in the environment, or --dtype {_NARROW.get(wide[0].dtype.kind, 'int32')} if its values fit"
        text = f"'{wide[0].info.dataset}' would be {wide[0].dtype}: the load needs JAX's 64-bit types, by {fix}"
        print("\n" + "\n".join(wrap(printable(text), width_of(out), "", "  ")), file=out)


def _leaves(load_plan: Plan | TreePlan) -> Sequence[Plan]:
    return load_plan.leaves if isinstance(load_plan, TreePlan) else [load_plan]


_NARROW = {"f": "float32", "c": "complex64", "u": "uint32"}


def _described(load_plan: Plan | TreePlan) -> dict[str, Any]:
    """The fields of a plan for JSON: of its array, or of each array of a tree and the names of those that were left out."""
    if isinstance(load_plan, TreePlan):
        arrays = [{"where": where, **_described(leaf)} for where, leaf in zip(load_plan.where, load_plan.leaves, strict=True)]
        totals = {name: getattr(load_plan, name) for name in ("nbytes", "peak_nbytes", "staging_nbytes")}
        return {"arrays": arrays, "left_out": [info.dataset for info in load_plan.left_out], **totals}
    names = ("shape", "shape_global", "chunks", "decomposition", "shard_shape", "n_ranks", "readers", "n_readers", "why")
    document = {"path": load_plan.info.path, "dataset": load_plan.info.dataset, "dtype": load_plan.dtype}
    document |= {name: getattr(load_plan, name) for name in names} | {"needs_64_bits": is_wide(load_plan.dtype)}
    return {**document, "costs": {mode: asdict(cost) for mode, cost in load_plan.costs.items()}}


def run_verify(out: IO[str], file: str, axes: Mapping[str, int], spec: Any, as_json: bool, **options: Any) -> None:
    """Load, verify, and print on rank 0 what was checked.

    Collective: yes, all processes of the job.

    Parameters
    ----------
    out : file
        Where to print.
    file : str
        The file, with or without the name of the array.
    axes : mapping of str to int
        Mesh axes and their sizes. The mesh takes the first devices of the job; on CPU a process has as many as it needs.
    spec : tuple or dict
        The parts of the PartitionSpec, or a spec by names of axes.
    as_json : bool
        Print one JSON document in place of text.
    **options
        Keywords of `shardload.plan`.
    """
    n_devices = math.prod(axes.values())
    options["decode"] = bool(options["decode"])  # None would warn of packed numbers, which nobody gets here
    with mesh_of(axes) as mesh:
        load_plan = plan(file, mesh, spec if isinstance(spec, dict) else PartitionSpec(*spec), **options)
        load_plan.execute()
    report: Any = load_plan.report
    if group_of().rank:
        return
    if as_json:
        print(to_json({"ok": True, "n_devices": n_devices, **_described(load_plan), "report": asdict(report)}), file=out)
        return
    lines = []
    for leaf, array in zip(_leaves(load_plan), report.arrays or (report,), strict=True):
        size = f"{' x '.join(map(str, leaf.shape)) or 'scalar'} {leaf.dtype} as {leaf.decomposition}"
        where = f"{counted(n_devices, 'device')} of {counted(leaf.n_ranks, 'rank')}"
        lines += [f"{printable(str(leaf.info))}: {size} on {where}", str(array.proven)]
    lines += [f"all: {report.proven}"] if report.arrays else []
    print("\n".join(part for line in lines for part in wrap(line, width_of(out), "", "  ")), file=out)


@contextmanager
def mesh_of(axes: Mapping[str, int]) -> Iterator[Mesh]:
    """A mesh of the first devices of the job, in a JAX that keeps float64 and int64. Collective: yes."""
    n_devices = math.prod(axes.values())
    before = jax.config.read("jax_enable_x64")
    if "JAX_ENABLE_X64" not in os.environ:
        jax.config.update("jax_enable_x64", True)
    try:
        _have_devices(-(-n_devices // world_rank_and_size()[1]), axes)
        initialize()
        yield _mesh(axes, n_devices)
    finally:
        jax.config.update("jax_enable_x64", before)


def _have_devices(n: int, axes: Mapping[str, int]) -> None:
    """Have JAX simulate `n` devices on this process's CPU, if JAX runs on the CPU and has not started yet."""
    if n > _MOST_DEVICES:
        raise ConfigError(
            f"--mesh {_sizes_text(axes)} needs {n:,} devices of each process; expected at most {_MOST_DEVICES:,}. Use a "
            "smaller mesh, or start more processes; shardload plan takes a mesh of any size"
        )
    with suppress(AttributeError, RuntimeError, ValueError):  # an older JAX without this option, or devices that are in use
        jax.config.update("jax_num_cpu_devices", n)


def _sizes_text(axes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes.items())


def _mesh(axes: Mapping[str, int], n: int) -> Mesh:
    try:
        devices = jax.devices()
    except (AssertionError, RuntimeError) as error:  # JAX asserts where a plugin is not installed
        platforms = os.environ.get("JAX_PLATFORMS")
        hint = f"JAX_PLATFORMS is '{platforms}': " if platforms else ""
        raise ConfigError(
            f"JAX has no devices here ({str(error) or type(error).__name__}). {hint}JAX_PLATFORMS=cpu takes the CPU; shardload "
            "doctor says more"
        ) from error
    if len(devices) < n:
        raise ConfigError(
            f"--mesh {_sizes_text(axes)} needs {n} devices, but this job has {len(devices)}. Use a smaller mesh, or start "
            f"more processes: mpiexec -n {n} shardload verify ..."
        )
    return Mesh(np.array(devices[:n], dtype=object).reshape(tuple(axes.values())), tuple(axes))
