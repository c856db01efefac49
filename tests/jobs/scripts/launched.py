"""Try to start and to load the way that is named; print what comes of it, one line of JSON a rank.

``launched.py WHAT PATH``: ``initialize`` (then load), ``load`` (without), ``late`` (devices first), or
``jax ADDRESS N K`` (JAX started by itself as process K of N, then load).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

import shardload
from tests.mpi.support import check, mesh_of, ramp

SHAPE = (8, 12, 20)


def attempt(call: Callable[[], object]) -> None:
    """Print what `call` raises, or that it does not."""
    try:
        call()
        said = {"type": None, "text": ""}
    except Exception as error:
        said = {"type": type(error).__name__, "text": str(error)}
    print(json.dumps(said), flush=True)


def load(path: str) -> None:
    x = shardload.load(path, mesh_of(), P("a"), dataset="x")
    check(x, ramp(SHAPE), mesh_of(), P("a"))


def main(path: str, what: str, *more: str) -> None:
    if what == "initialize":
        attempt(shardload.initialize)
    elif what == "late":
        jax.devices()
        attempt(shardload.initialize)
        return
    elif what == "jax":
        address, n, k = more
        jax.distributed.initialize(address, int(n), int(k))
    attempt(lambda: load(path))
    attempt(lambda: shardload.scatter(ramp(SHAPE), mesh_of(), P("a")))


if __name__ == "__main__":
    main(*sys.argv[1:])
