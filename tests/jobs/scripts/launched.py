"""Try to start and to load the way that is named; print what comes of it, one line of JSON a rank.

``launched.py PATH WHAT``: ``initialize`` (then load), ``load`` (without), ``late [RANK]`` (devices first, everywhere or
there), ``never RANK [copied]`` (which starts MPI and not JAX; after a call of all ranks), ``finalized [imported]`` (MPI,
before a load), ``own jax`` (each rank a JAX of its own), ``jax ADDRESS N K`` (JAX started by itself as process K of N, then
load), ``mistyped [initialize]`` (an error of all ranks, which nobody catches), ``waits`` (for the test to end it: idle, in a
load, in JAX's barrier), ``leaves`` (process 1 ends, the others load), or ``busy`` (process 1 does something else meanwhile).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable

import h5py
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from tests.mpi.support import check, mesh_of, ramp
from tests.ports import free_ports

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


def without_mpi(path: str) -> None:
    """Everything that sends values, on a permuted mesh. h5py judges what is written."""
    values, n = ramp(SHAPE), jax.process_count()
    devices = np.random.default_rng(n).permutation(np.array(jax.devices()))
    mesh, spec = Mesh(devices, ("a",)), P(None, "a")
    loaded = [shardload.load(path, mesh, spec, dataset="x", readers=readers) for readers in ("parallel", "root", "direct")]
    loaded.append(shardload.scatter(values if jax.process_index() == 1 % n else None, mesh, spec, root=1 % n))
    for x in loaded:
        check(x, values, mesh, spec)
        shardload.verify(x, path, dataset="x")
    where = "through JAX's coordinator"
    assert n == 1 or where in str(shardload.plan(path, mesh, spec, dataset="x", readers="parallel"))
    out, chunks = f"{path}.out.h5", {"x": (3, 12, 20)}
    assert n == 1 or where in str(shardload.plan_save(out, {"x": loaded[0]}, chunks=chunks))
    unlimited = {"unlimited": "t", "dims": {"x": ("t", "y", "z")}}
    shardload.save(out, {"x": loaded[0]}, chunks=chunks, mode="w", **unlimited)
    shardload.append(out, {"x": loaded[1]}, dim="t")
    if jax.process_index() == 0:
        with h5py.File(out) as file:
            np.testing.assert_array_equal(file["x"][...], np.concatenate([values, values]))
    if importlib.import_module("shardload.comm.group").group_of().machine.n_nodes > 1:
        large = np.repeat(np.arange(17 * n, dtype="f4"), 1 << 18).reshape(n, -1)
        check(shardload.scatter(large, mesh, P("a")), large, mesh, P("a"))  # more than is in the store at a time


def too_much(path: str) -> None:
    """More than may go through the coordinator, if there are several nodes."""
    store = importlib.import_module("shardload.comm.store")
    before, store.MOST_NBYTES = store.MOST_NBYTES, 1000
    try:
        shardload.load(path, mesh_of(), P("a"), dataset="x", readers="parallel")
    finally:
        store.MOST_NBYTES = before


def patched_load(path: str, seen: str, readers: str | int) -> None:
    """Load where one process sees no such file, which only it finds out."""
    consistency = importlib.import_module("shardload.jobs.consistency")
    before = consistency.open_source
    consistency.open_source = lambda _, *more: before(seen, *more)
    try:
        shardload.load(path, mesh_of(), P("a"), dataset="x", readers=readers)
    finally:
        consistency.open_source = before


def main(path: str, what: str, *more: str) -> None:
    if what == "dies":
        shardload.initialize()
        if jax.process_index() == 1:
            raise RuntimeError("only here")
        load(path)
        return
    if what == "mistyped":
        if more == ("initialize",):
            shardload.initialize()
        shardload.load(path, mesh_of(), P("a"), dataset="y" if more else "x")
    if what in ("initialize", "finalized"):
        attempt(shardload.initialize)
    if what == "finalized":
        mpi = importlib.import_module("mpi4py.MPI")
        finalize = mpi.Finalize  # as ``from mpi4py.MPI import Finalize``
        x = shardload.load(path, mesh_of(), P("a"), dataset="x")
        batches = iter(shardload.stream(path, mesh_of(), P(None, "a"), dataset="x", along=0, batch=2))
        check(next(batches), ramp(SHAPE)[:2], mesh_of(), P(None, "a"))
        saving, still_there = shardload.save(f"{path}.saved.h5", {"x": x}, background=True), list[str]()

        def note(*_: object) -> None:
            still_there.extend(thread.name for thread in threading.enumerate())
            still_there.extend([] if saving.is_done else ["the save"])

        mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=note), None)  # the first that MPI deletes
        (finalize if "imported" in more else mpi.Finalize)()
        ours = [name for name in still_there if name.startswith(("shardload-stream", "the save"))]
        assert still_there and ("imported" in more or not ours), ours
        with h5py.File(f"{path}.saved.h5") as file:
            np.testing.assert_array_equal(file["x"][...], ramp(SHAPE))
        attempt(lambda: load(path))
        attempt(lambda: shardload.load(path, mesh_of(), P("a"), dataset="x", comm=mpi.COMM_WORLD))
        return
    if what == "late":
        if not more or os.environ["PMI_RANK"] in more:
            jax.devices()
        attempt(shardload.initialize)
        return
    elif what == "never":
        importlib.import_module("shardload.comm.launch")._MEET_SECONDS = 4.0
        if "copied" in more:
            shardload.copy(path, f"{path}.copied.h5")
        if os.environ["PMI_RANK"] not in more:
            attempt(shardload.initialize)
        else:
            importlib.import_module("mpi4py.MPI")
            time.sleep(600)  # the test does not wait so long: the others end the job
        return
    elif what == "own jax":
        jax.distributed.initialize(f"127.0.0.1:{free_ports(1)[0]}", 1, 0)
        attempt(lambda: load(path))
        return
    elif what == "jax":
        address, n, k = more
        jax.distributed.initialize(address, int(n), int(k))
    elif what in ("leaves", "busy"):
        shardload.initialize()
        load(path)
        if jax.process_index() != 1:
            attempt(lambda: shardload.load(path, mesh_of(), P("a"), dataset="x", timeout=4))
        elif what == "busy":
            time.sleep(600)  # the test does not wait so long
        return
    elif what == "waits":
        shardload.initialize()
        jax.devices()  # all of them must be there for that
        print("waits", flush=True)
        if jax.process_index() == 1:
            load(path)
        elif jax.process_index() == 2:
            multihost_utils.sync_global_devices("nobody else comes")
        time.sleep(600)
    attempt(lambda: load(path))
    if os.environ.get("SHARDLOAD_MPI") == "0" or what == "jax":
        other = path if jax.process_index() != 1 else "gone.h5"
        attempt(lambda: patched_load(path, other, "direct"))
        attempt(lambda: patched_load(path, other, jax.process_count()))
        attempt(lambda: without_mpi(path))
        attempt(lambda: too_much(path))
    attempt(lambda: shardload.scatter(ramp(SHAPE), mesh_of(), P("a")))


if __name__ == "__main__":
    main(*sys.argv[1:])
