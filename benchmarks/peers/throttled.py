"""The ranks that load with JAX from a file system and over a network of known limits (`benchmarks.throttle`).

They are started by `benchmarks.runs.grid`, and answer its requests; all requests are collective.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

import shardload
from benchmarks.peers.job import comm, sharding_of, timed, verify, versions
from benchmarks.remote import serve
from benchmarks.throttle.network import slow_down

kept: list[Any] = []


def load(request: dict[str, Any]) -> dict[str, Any]:
    """Plan and load once; the times, and what the plan said of this way of reading."""
    file, sharding = request["file"], sharding_of(request["spec"])
    made: list[shardload.Plan] = []

    def way() -> Any:
        options = {"dataset": file["dataset"] or None, "readers": request["readers"]}
        made.append(shardload.plan(file["path"], sharding, **options))
        return made[0].execute()

    array, times = timed(way)
    kept[:] = [array]
    return {**times, **said(made[0])}


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Compare every value of the last load with the plain ones, and drop it."""
    verify(kept.pop(), request["spec"], np.load(request["file"]["reference"], mmap_mode="r"))
    comm.Barrier()
    return {}


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Plan only: which way would be taken."""
    file = request["file"]
    options = {"dataset": file["dataset"] or None}
    return said(shardload.plan(file["path"], sharding_of(request["spec"]), **options))


def said(plan: shardload.Plan) -> dict[str, Any]:
    """What a plan says of the way that it takes."""
    cost = plan.costs[plan.readers]
    return {"readers": plan.readers, "n_readers": plan.n_readers, "cost": dataclasses.asdict(cost)}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """One request."""
    return {"load": load, "check": check, "ask": ask}[request["do"]](request)


def main() -> None:
    """Start JAX, then wait for requests."""
    import gc

    import jax

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    address = os.environ.get("SHARDLOAD_GRID_COORDINATOR")
    if address is None:
        slow_down()
        shardload.initialize()
    else:  # the kernel slows the messages down
        jax.distributed.initialize(address, comm.size, comm.rank)
    jax.devices()
    gc.collect()
    gc.freeze()
    serve(handle, comm.rank, versions())


if __name__ == "__main__":
    main()
