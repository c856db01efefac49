"""Take batches of a stream through another library, keep its state there, and go on: ``stream_checkpoints.py FOLDER CASE``."""

from __future__ import annotations

import json
import pickle
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from tests.mpi.support import check_shards
from tests.unit.files import write_hdf5

DATA = np.arange(37 * 6 * 5, dtype="f4").reshape(37, 6, 5)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices())[::-1].reshape(1, -1), ("data", "lat"))


def check(batch: Any, anchors: Any) -> None:
    """Compare a batch with NumPy's samples."""
    check_shards(batch, DATA[np.asarray(anchors)[:, None] + np.array((-1, 1))])


def through_grain(ds: Any, folder: Path) -> None:
    """The same batches as without, changed by a transformation of Grain's; from a state on; and twice from the same one."""
    batches = ds.to_grain().map(lambda batch: {"x": batch})
    order = np.concatenate([ds.order(0)[:32], ds.order(1)[:32]]).reshape(-1, 4)
    for anchors, batch in zip(order, batches, strict=True):
        check(batch["x"], anchors)
    it = iter(batches)
    for anchors in order[:3]:
        check(next(it)["x"], anchors)
    state = json.loads(json.dumps(it.get_state()))
    for _ in range(2):
        for anchors in order[3:6]:
            check(next(it)["x"], anchors)
        it.set_state(state)
    it.close()
    with iter(ds) as plain:  # the state is the stream's own
        plain.set_state(state)
        check(next(plain), order[3])
    try:
        pickle.dumps(ds.to_grain())  # as for a process of mp_prefetch
    except shardload.ConfigError as error:
        print(json.dumps({"refused": str(error)}))


def through_orbax(ds: Any, folder: Path) -> None:
    """Parameters and the state of a stream in one checkpoint."""
    import orbax.checkpoint as ocp

    params = jax.jit(lambda: {"w": np.arange(8.0)}, out_shardings=NamedSharding(mesh(), P("lat")))()
    order = np.concatenate([ds.order(0)[:32], ds.order(1)[:32]]).reshape(-1, 4)
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        with iter(ds) as it:
            for batch in islice(it, 5):
                check(batch, it.index)
            parts = {"params": ocp.args.StandardSave(params), "stream": ocp.args.JsonSave(it.get_state())}
            manager.save(5, args=ocp.args.Composite(**parts))
            next(it)  # what comes after it changes nothing
        manager.wait_until_finished()
        parts = {"params": ocp.args.StandardRestore(params), "stream": ocp.args.JsonRestore()}
        found = manager.restore(5, args=ocp.args.Composite(**parts))
    np.testing.assert_array_equal(found["params"]["w"].addressable_data(0), params["w"].addressable_data(0))
    with iter(ds) as it:
        it.set_state(found["stream"])
        for anchors, batch in zip(order[5:], it, strict=True):
            check(batch, anchors)


def main(folder: Path, case: str) -> None:
    shardload.initialize()
    if jax.process_index() == 0:
        write_hdf5(folder / "a.h5", {"x": DATA}, chunks=(5, 3, 5))
    MPI.COMM_WORLD.Barrier()
    ds = shardload.stream(
        folder / "a.h5", mesh(), P(None, None, "lat"), dataset="x", batch=4, window=(-1, 1), shuffle=3, epochs=2
    )
    {"grain": through_grain, "orbax": through_orbax}[case](ds, folder)
    print(json.dumps({"done": case}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
