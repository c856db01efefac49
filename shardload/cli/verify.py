"""Does this file load right on this machine? What ``shardload verify`` does, on the processes there are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardload.api import plan
from shardload.cli.arguments import as_typed
from shardload.comm.group import group_of
from shardload.comm.launch import initialize
from shardload.comm.mpi import world_rank_and_size
from shardload.errors import ConfigError, ShardloadError, printable
from shardload.jobs.plan import Plan
from shardload.system.terminal import own_stdout, say_error, width_of, wrap, wrap_parts

__all__ = ["run"]


def run(file: str, axes: Mapping[str, int], parts: tuple[Any, ...], as_json: bool = False, **how: Any) -> int:
    """Load, verify, and say on rank 0 what was proven.

    Collective: yes, all processes of the job.

    Parameters
    ----------
    file : str
        The file, with or without the name of the array.
    axes : mapping of str to int
        Mesh axes and their sizes. The mesh is made of the first devices of the job; on CPU a process has as many as it needs.
    parts : tuple
        Of the PartitionSpec.
    as_json : bool
        Print one JSON document, also of what went wrong, in place of text.
    **how
        Keywords of `shardload.plan`.

    Returns
    -------
    int
        Exit code: 0 if all was proven, else 1.
    """
    with own_stdout() as out:
        return _run(out, file, axes, parts, as_json, how)


def _run(out: IO[str], file: str, axes: Mapping[str, int], parts: tuple[Any, ...], as_json: bool, how: dict[str, Any]) -> int:
    rank = 0
    try:
        rank, size = world_rank_and_size()
        n_wanted = math.prod(axes.values())
        _have_devices(-(-n_wanted // size))
        initialize()
        rank = group_of().rank
        made = plan(file, _mesh(axes, n_wanted), PartitionSpec(*parts), **how)
        made.execute()
    except ShardloadError as error:  # the same on every rank
        if rank == 0:
            message = as_typed(str(error))
            if as_json:
                told = {"ok": False, "error": type(error).__name__, "message": message}
                print(json.dumps(told, indent=2), file=out, flush=True)
            say_error(message)
        return 1
    if rank == 0:
        print(_as_json(made, n_wanted) if as_json else _as_text(made, n_wanted, width_of(out)), file=out, flush=True)
    return 0


def _as_text(made: Plan, n_devices: int, width: int) -> str:
    shape = " x ".join(map(str, made.shape)) or "scalar"
    what = f"{shape} {made.dtype} as {made.decomposition} on {n_devices} devices of {made.n_ranks} ranks"
    lines = wrap(f"{printable(str(made.info))}: {what}", width, "", "  ")
    return "\n".join([*lines, *wrap_parts(str(made.report and made.report.proven).split("; "), width, "", "  ")])


def _as_json(made: Plan, n_devices: int) -> str:
    names = ("shape", "shape_global", "decomposition", "shard_shape", "n_ranks", "readers", "n_readers")
    report = asdict(made.report) if made.report else {}
    what = {
        "ok": True,
        "path": made.info.path,
        "dataset": made.info.dataset,
        "dtype": str(made.dtype),
        **{name: getattr(made, name) for name in names},
        "n_devices": n_devices,
        "proven": report.pop("proven", None),
        "report": report,
    }
    return json.dumps(what, indent=2)


def _have_devices(n: int) -> None:
    """Let JAX make `n` devices of this process's CPU, if that is where it runs and has not looked yet."""
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except (AttributeError, RuntimeError, ValueError):  # a release without it, or devices that are in use already
        return


def _mesh(axes: Mapping[str, int], n: int) -> Mesh:
    devices = jax.devices()
    if len(devices) < n:
        sizes = ",".join(f"{name}={size}" for name, size in axes.items())
        raise ConfigError(
            f"--mesh {sizes} has {n} devices, but this job has {len(devices)}. Type a smaller mesh, or start more processes: "
            f"mpiexec -n {n} shardload verify ..."
        )
    return Mesh(np.array(devices[:n], dtype=object).reshape(tuple(axes.values())), tuple(axes))
