"""Does this file load right on this machine? What ``shardload verify`` does, on the processes there are."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardload.errors import ConfigError, ShardloadError
from shardload.group import group_of, world
from shardload.launch import initialize
from shardload.load import plan

__all__ = ["run"]


def run(file: str, axes: Mapping[str, int], parts: tuple[Any, ...], **how: Any) -> int:
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
    **how
        Keywords of `shardload.plan`.

    Returns
    -------
    int
        Exit code: 0 if all was proven, else 1.
    """
    rank = 0
    try:
        comm = world()
        rank, size = (0, 1) if comm is None else (int(comm.rank), int(comm.size))
        n_wanted = math.prod(axes.values())
        _have_devices(-(-n_wanted // size))
        initialize()
        rank = group_of().rank
        made = plan(file, _mesh(axes, n_wanted), PartitionSpec(*parts), **how)
        made.execute()
    except ShardloadError as error:  # the same on every rank
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    if rank == 0:
        shape = " x ".join(map(str, made.shape)) or "scalar"
        print(f"{made.info}: {shape} {made.dtype} as {made.decomposition} on {n_wanted} devices of {made.n_ranks} ranks")
        print(f"{made.report.proven if made.report else ''}", flush=True)
    return 0


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
