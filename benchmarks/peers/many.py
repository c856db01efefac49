"""How does each way load many arrays of a file, or a small one? A way: ``(file, sharding, comm) -> list of jax.Array``.

`file` has ``path`` and ``names``. Every rank calls it; it opens the file once, loads all arrays, and closes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h5py
import jax
from jax.sharding import NamedSharding

import shardload

Way = Callable[[dict[str, Any], NamedSharding, Any], list[jax.Array]]


def one_call(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> list[jax.Array]:
    """All names in one call of shardload."""
    names = file["names"]
    if len(names) == 1:
        return [shardload.load(file["path"], sharding, dataset=names[0])]
    return list(shardload.load(file["path"], sharding, dataset=names))


def a_loop(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> list[jax.Array]:
    """A call of shardload for each name."""
    return [shardload.load(file["path"], sharding, dataset=name) for name in file["names"]]


def slice_everywhere(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> list[jax.Array]:
    """Every process slices every array in the callback."""
    with h5py.File(file["path"]) as opened:
        arrays = []
        for name in file["names"]:
            data = opened[name]
            arrays.append(jax.make_array_from_callback(data.shape, sharding, lambda index, data=data: data[index]))
    return arrays


def rank_0_scatter(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> list[jax.Array]:
    """Rank 0 reads all arrays and scatters the pieces of all of them at once, pickled."""
    pieces, shapes = None, None
    if comm.rank == 0:
        with h5py.File(file["path"]) as opened:
            whole = [opened[name][...] for name in file["names"]]
        shapes = [values.shape for values in whole]
        pieces = [[] for _ in range(comm.size)]
        for values in whole:
            for device, index in sharding.devices_indices_map(values.shape).items():
                pieces[device.process_index].append(values[index])
    shapes, mine = comm.bcast(shapes), comm.scatter(pieces)
    return [
        jax.make_array_from_callback(shape, sharding, lambda index, piece=piece: piece)
        for shape, piece in zip(shapes, mine, strict=True)
    ]


MANY: dict[str, Way] = {
    "shardload": one_call,
    "shardload-loop": a_loop,
    "slice": slice_everywhere,
    "scatter": rank_0_scatter,
}
