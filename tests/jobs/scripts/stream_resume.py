"""Some batches of a stream, from a state if there is one, and then its state: ``stream_resume.py FOLDER N_BATCHES BATCH``."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from tests.mpi.support import check_shards
from tests.unit.files import write_hdf5

SHAPE = (83, 8, 5)


def main(folder: Path, n_batches: int, batch: int) -> None:
    """Compare each batch with NumPy, and say which anchors it had."""
    shardload.initialize()
    data = np.arange(np.prod(SHAPE), dtype="float32").reshape(SHAPE)
    path, state = folder / "a.h5", folder / "state.json"
    if jax.process_index() == 0 and not path.exists():
        write_hdf5(path, {"x": data}, chunks=(6, 3, 5), compression="gzip")
    shape = {1: (1, 1), 2: (1, 2), 4: (2, 2)}[jax.device_count()]
    mesh = Mesh(np.array(jax.devices())[::-1].reshape(shape), ("data", "lat"))
    ds = shardload.stream(
        path, mesh, P("data", None, "lat"), dataset="x", batch=batch, window=(-1, 2), shuffle=7, epochs=3, pool=60 * 8 * 5 * 4
    )
    with iter(ds) as it:
        if state.exists():
            it.set_state(json.loads(state.read_text()))
        for values in islice(it, n_batches):
            expected = data[it.index[:, None] + np.array((-1, 2))]
            check_shards(values, expected)
            print(json.dumps({"index": it.index.tolist()}), flush=True)
        after = it.get_state()
    print(json.dumps({"state": after, "orders": [ds.order(epoch).tolist() for epoch in range(3)]}), flush=True)
    if jax.process_index() == 0:
        state.write_text(json.dumps(after))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
