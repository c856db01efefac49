"""Does this file load correctly on this machine? ``shardload verify``: load it, compare it with the file, print the result."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardload.api import plan
from shardload.cli.info import to_json
from shardload.cli.plan import described, described_each
from shardload.comm.group import group_of
from shardload.comm.launch import initialize
from shardload.comm.mpi import world_rank_and_size
from shardload.errors import ConfigError, printable
from shardload.jobs.loading.plan import Plan, TreePlan
from shardload.system.terminal import tell, width_of, wrap, wrap_parts
from shardload.units import counted

_MOST_DEVICES = 4096  # of a process: JAX takes 5 s to simulate so many, 37 s for 10,000


def run(out: IO[str], file: str, axes: Mapping[str, int], parts: Any, as_json: bool, **how: Any) -> None:
    """Load, verify, and print on rank 0 what was checked.

    Collective: yes, all processes of the job.

    Parameters
    ----------
    file : str
        The file, with or without the name of the array.
    axes : mapping of str to int
        Mesh axes and their sizes. The mesh takes the first devices of the job; on CPU a process has as many as it needs.
    parts : tuple
        The parts of the PartitionSpec.
    as_json : bool
        Print one JSON document in place of text.
    **how
        Keywords of `shardload.plan`.
    """
    n_devices = math.prod(axes.values())
    how["decode"] = bool(how["decode"])  # None would warn of packed numbers, which nobody gets here
    with mesh_of(axes) as mesh:
        made = plan(file, mesh, parts if isinstance(parts, dict) else PartitionSpec(*parts), **how)
        made.execute()
    if group_of().rank == 0:
        tell(_as_json(made, n_devices) if as_json else "\n".join(_lines(made, n_devices, width_of(out))), out)


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


def _lines(made: Plan | TreePlan, n_devices: int, width: int) -> list[str]:
    """What each array is, what was proven of it, and what of all together."""
    report: Any = made.report
    leaves: Any = [(made, report.proven)]
    if is_tree := isinstance(made, TreePlan):
        leaves = zip(made.leaves, (array.proven for array in report.arrays), strict=True)
    lines = []
    for leaf, proven in leaves:
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        what = (
            f"{shape} {leaf.dtype} as {leaf.decomposition} on {counted(n_devices, 'device')} of {counted(leaf.n_ranks, 'rank')}"
        )
        lines += wrap(f"{printable(str(leaf.info))}: {what}", width, "", "  ")
        lines += wrap_parts(str(proven).split("; "), width, "", "  ")
    return [*lines, *(wrap_parts(f"all: {report.proven}".split("; "), width, "", "  ") if is_tree else [])]


def _as_json(made: Plan | TreePlan, n_devices: int) -> str:
    report = asdict(made.report) if made.report else {}
    arrays = report.pop("arrays", ())
    told = described_each(made) if isinstance(made, TreePlan) else described(made)
    for of_array, array in zip(told.get("arrays", ()), arrays, strict=True):
        of_array["proven"] = array["proven"]
    return to_json({"ok": True, "n_devices": n_devices, **told, "proven": report.pop("proven", None), "report": report})


def _have_devices(n: int, axes: Mapping[str, int]) -> None:
    """Have JAX simulate `n` devices on this process's CPU, if JAX runs on the CPU and has not started yet."""
    if n > _MOST_DEVICES:
        raise ConfigError(
            f"--mesh {_sizes_text(axes)} needs {n:,} devices of each process; expected at most {_MOST_DEVICES:,}. Use a "
            "smaller mesh, or start more processes; shardload plan takes a mesh of any size"
        )
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except (AttributeError, RuntimeError, ValueError):  # an older JAX without this option, or devices that are in use already
        return


def _sizes_text(axes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes.items())


def _mesh(axes: Mapping[str, int], n: int) -> Mesh:
    try:
        devices = jax.devices()
    except (AssertionError, RuntimeError) as error:  # JAX asserts where a plugin is not installed
        asked = os.environ.get("JAX_PLATFORMS")
        hint = f"JAX_PLATFORMS is '{asked}': JAX_PLATFORMS=cpu takes the CPU" if asked else "JAX_PLATFORMS=cpu takes the CPU"
        raise ConfigError(
            f"JAX has no devices here ({str(error) or type(error).__name__}). {hint}; shardload doctor says more"
        ) from error
    if len(devices) < n:
        raise ConfigError(
            f"--mesh {_sizes_text(axes)} needs {n} devices, but this job has {len(devices)}. Use a smaller mesh, or start "
            f"more processes: mpiexec -n {n} shardload verify ..."
        )
    return Mesh(np.array(devices[:n], dtype=object).reshape(tuple(axes.values())), tuple(axes))
