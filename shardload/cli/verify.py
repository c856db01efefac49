"""Does this file load correctly on this machine? ``shardload verify``: load it, compare it with the file, print the result."""

from __future__ import annotations

import json
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
from shardload.cli.arguments import as_typed, show_error
from shardload.comm.group import group_of
from shardload.comm.launch import initialize
from shardload.comm.mpi import world_rank_and_size
from shardload.errors import ConfigError, ShardloadError, printable
from shardload.jobs.loading.plan import Plan
from shardload.jobs.loading.tree_plan import TreePlan
from shardload.system.terminal import own_stdout, tell, width_of, wrap, wrap_parts
from shardload.units import counted

__all__ = ["run"]

_MOST_DEVICES = 4096  # of a process: JAX takes 5 s to simulate so many, 37 s for 10,000


def run(file: str, axes: Mapping[str, int], parts: tuple[Any, ...], as_json: bool = False, **how: Any) -> int:
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
        Print one JSON document in place of text, also for an error.
    **how
        Keywords of `shardload.plan`.

    Returns
    -------
    int
        Exit code: 0 if the check passed, else 1.
    """
    with own_stdout() as out, _with_64_bit_types():
        return _run(out, file, axes, parts, as_json, how)


@contextmanager
def _with_64_bit_types() -> Iterator[None]:
    """Have JAX keep the types of files of float64 or int64, unless the environment says whether it should."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", before if "JAX_ENABLE_X64" in os.environ else True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _run(out: IO[str], file: str, axes: Mapping[str, int], parts: tuple[Any, ...], as_json: bool, how: dict[str, Any]) -> int:
    rank = 0
    try:
        rank, size = world_rank_and_size()
        n_wanted = math.prod(axes.values())
        _have_devices(-(-n_wanted // size), axes)
        initialize()
        rank = group_of().rank
        made = plan(file, _mesh(axes, n_wanted), PartitionSpec(*parts), **how)
        made.execute()
    except ShardloadError as error:  # the same on every rank
        if rank == 0:
            show_error(error, as_typed(str(error)), out, as_json)
        return 1
    if rank == 0:
        if isinstance(made, TreePlan):
            text = _tree_as_json(made, n_wanted) if as_json else _tree_as_text(made, n_wanted, width_of(out))
        else:
            text = _as_json(made, n_wanted) if as_json else _as_text(made, n_wanted, width_of(out))
        tell(text, out)
    return 0


def _as_text(made: Plan, n_devices: int, width: int) -> str:
    return "\n".join(_lines(made, n_devices, width, str(made.report and made.report.proven)))


def _lines(made: Plan, n_devices: int, width: int, proven: str) -> list[str]:
    shape = " x ".join(map(str, made.shape)) or "scalar"
    what = f"{shape} {made.dtype} as {made.decomposition} on {counted(n_devices, 'device')} of {counted(made.n_ranks, 'rank')}"
    lines = wrap(f"{printable(str(made.info))}: {what}", width, "", "  ")
    return [*lines, *wrap_parts(proven.split("; "), width, "", "  ")]


def _tree_as_text(made: TreePlan, n_devices: int, width: int) -> str:
    """A line that says what each array is, lines that say what was proven of it, and the totals."""
    lines = []
    for one, proven in zip(made.leaves, made.report.arrays if made.report else (), strict=True):
        lines += _lines(one, n_devices, width, str(proven.proven))
    return "\n".join([*lines, *wrap_parts(f"all: {made.report and made.report.proven}".split("; "), width, "", "  ")])


def _tree_as_json(made: TreePlan, n_devices: int) -> str:
    report = asdict(made.report) if made.report else {}
    arrays = [
        {"where": where, **_facts(one, n_devices), "proven": proven["proven"]}
        for where, one, proven in zip(made.where, made.leaves, report.pop("arrays", ()), strict=True)
    ]
    left_out = [one.dataset for one in made.left_out]
    what = {"ok": True, "arrays": arrays, "left_out": left_out, "proven": report.pop("proven", None), "report": report}
    return json.dumps(what, indent=2)


def _facts(made: Plan, n_devices: int) -> dict[str, Any]:
    names = ("shape", "shape_global", "decomposition", "shard_shape", "n_ranks", "readers", "n_readers")
    return {
        "path": made.info.path,
        "dataset": made.info.dataset,
        "dtype": str(made.dtype),
        **{name: getattr(made, name) for name in names},
        "n_devices": n_devices,
    }


def _as_json(made: Plan, n_devices: int) -> str:
    report = asdict(made.report) if made.report else {}
    report.pop("arrays", None)
    what = {
        "ok": True,
        **_facts(made, n_devices),
        "proven": report.pop("proven", None),
        "report": report,
    }
    return json.dumps(what, indent=2)


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
