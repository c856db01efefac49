"""How does each way load the file? What people use today, as it is usually written, and shardload.

A way is a function ``(file, sharding, comm) -> jax.Array``. Every rank calls it; it opens the file, loads, and closes it.
Ways that need another environment are modules beside this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  (registers Blosc with HDF5)
import jax
import numpy as np
import tensorstore
import zarr
from jax.sharding import NamedSharding

import shardload

Way = Callable[[dict[str, Any], NamedSharding, Any], jax.Array]

last_report: dict[str, Any] = {}  # what shardload said of its last load


@contextmanager
def opened(file: dict[str, Any]) -> Iterator[Any]:
    """The array in the file, to be sliced, through the format's own library."""
    if Path(file["path"]).is_dir():
        yield zarr.open_array(file["path"], mode="r")
    else:
        with h5py.File(file["path"]) as found:
            yield found[file["dataset"]]


def slice_everywhere(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """Every process slices the file in the callback: what JAX's documentation shows."""
    with opened(file) as data:
        return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


def read_and_put(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """All of the file into NumPy, then `device_put`: what a notebook does, which has all devices."""
    with opened(file) as data:
        whole = data[...]
    return jax.device_put(whole, sharding)


def rank_0_scatter(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """Rank 0 reads everything and scatters a list of pieces, pickled."""
    pieces, shape = None, None
    if comm.rank == 0:
        with opened(file) as data:
            whole = data[...]
        shape = whole.shape
        by_device = sharding.devices_indices_map(shape)
        by_process = {device.process_index: index for device, index in by_device.items()}
        pieces = [whole[by_process[rank]] for rank in range(comm.size)]
    shape = comm.bcast(shape)
    piece = comm.scatter(pieces)
    return jax.make_array_from_callback(shape, sharding, lambda index: piece)


def jax_power(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """Rank 0 reads everything and sends each device its part, as jax-power's `scatter_array` does it.

    The steps are those of jaxpower/mesh.py (June 2026): gather who needs which slices, and for one rank after the other
    make the part contiguous and send it, blocking. The index that JAX asks for is not looked at.
    """
    whole = None
    if comm.rank == 0:
        with opened(file) as data:
            whole = data[...]
    shape, dtype = comm.bcast(None if whole is None else (whole.shape, whole.dtype))
    mine = sharding.devices_indices_map(shape)
    devices = sharding.mesh.local_devices
    arrays = []
    for device in devices:
        wanted = comm.gather(tuple((s.start, s.stop) for s in mine[device]))
        part = np.empty(sharding.shard_shape(shape), dtype)
        if whole is None:
            comm.Recv(part, source=0)
        else:
            for rank in range(comm.size):
                sent = np.ascontiguousarray(whole[tuple(slice(*bounds) for bounds in wanted[rank])])
                if rank:
                    comm.Send(sent, dest=rank)
                else:
                    part[...] = sent
        arrays.append(jax.device_put(part, device, donate=True))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def tensorstore_per_device(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
    """Every process reads its devices' parts with TensorStore: default context, so as many copy threads as cores, no cache."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": file["path"]}}
    store = tensorstore.open(spec, open=True, read=True).result()
    return jax.make_array_from_callback(store.shape, sharding, lambda index: store[index].read().result())


def shardload_way(readers: str) -> Way:
    """`shardload.load`: it is plan and execute, and the plan has the report."""

    def way(file: dict[str, Any], sharding: NamedSharding, comm: Any) -> jax.Array:
        plan = shardload.plan(file["path"], sharding, dataset=file["dataset"] or None, readers=readers)
        array = plan.execute()
        last_report.clear()
        last_report.update(readers=plan.readers, n_readers=plan.n_readers)
        if plan.report is not None:
            last_report.update(dataclasses.asdict(plan.report))
        return array

    return way


WAYS: dict[str, Way] = {
    "shardload": shardload_way("auto"),
    "shardload-root": shardload_way("root"),
    "shardload-parallel": shardload_way("parallel"),
    "shardload-direct": shardload_way("direct"),
    "slice": slice_everywhere,
    "device-put": read_and_put,
    "scatter": rank_0_scatter,
    "jax-power": jax_power,
    "tensorstore": tensorstore_per_device,
}


def scatter_shardload(whole: Any, sharding: NamedSharding, comm: Any, shape: tuple[int, ...]) -> jax.Array:
    """`shardload.scatter`."""
    return shardload.scatter(whole, sharding)


def scatter_pickle(whole: Any, sharding: NamedSharding, comm: Any, shape: tuple[int, ...]) -> jax.Array:
    """`comm.scatter` of a list of pieces."""
    pieces = [whole[index] for index in _in_rank_order(sharding, shape)] if comm.rank == 0 else None
    piece = comm.scatter(pieces)
    return jax.make_array_from_callback(shape, sharding, lambda index: piece)


def scatter_buffers(whole: Any, sharding: NamedSharding, comm: Any, shape: tuple[int, ...]) -> jax.Array:
    """`comm.Scatterv`: slabs as they lie; anything else must be packed into one buffer first."""
    shard_shape = sharding.shard_shape(shape)
    sent = None
    if comm.rank == 0:
        if shard_shape[1:] == shape[1:]:
            sent = whole
        else:
            sent = np.empty((comm.size, *shard_shape), whole.dtype)
            for place, index in zip(sent, _in_rank_order(sharding, shape), strict=True):
                place[...] = whole[index]
    piece = np.empty(shard_shape, np.float32)
    counts = [piece.size] * comm.size
    comm.Scatterv(None if sent is None else [sent, counts], piece)
    return jax.make_array_from_callback(shape, sharding, lambda index: piece)


def _in_rank_order(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Any]:
    by_device = sharding.devices_indices_map(shape)
    return [by_device[device] for device in sorted(by_device, key=lambda device: device.process_index)]


SCATTERS = {"shardload": scatter_shardload, "scatter": scatter_pickle, "scatterv": scatter_buffers}
