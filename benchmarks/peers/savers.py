"""How does each way save the array? What people use today, as it is usually written, and shardload.

A way is a function ``(array, path, layout, spec, comm)``, which every rank calls. It writes one new file. Ways that write Zarr
from every process need whole chunks (or shards) there: where the pieces are none, they are exchanged first, in packed messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h5py
import jax
import numpy as np
import tensorstore
import zarr

import shardload
from benchmarks.cases.cells import box
from benchmarks.cases.layouts import NAME
from benchmarks.cases.saves import GZIP_LEVEL, SaveLayout, is_aligned, own_box
from benchmarks.runs.environments import add_peers

Way = Callable[[jax.Array, str, SaveLayout, str, Any], None]
Array = np.ndarray[Any, Any]

last_report: dict[str, Any] = {}  # what shardload said of its last save


def piece_of(array: jax.Array) -> Array:
    """This process's only shard, in its memory."""
    (shard,) = array.addressable_shards
    return np.asarray(shard.data)


def h5py_options(layout: SaveLayout) -> dict[str, Any]:
    """For `create_dataset`."""
    if layout.chunks is None:
        return {}
    return {"chunks": layout.chunks, "compression": layout.codec, "compression_opts": GZIP_LEVEL}


def new_zarr(path: str, layout: SaveLayout, shape: tuple[int, ...], dtype: Any) -> Any:
    """The array in a new store, without values."""
    root = zarr.create_group(path)
    compressor = zarr.codecs.ZstdCodec()
    return root.create_array(NAME, shape=shape, dtype=dtype, chunks=layout.chunks, shards=layout.shards, compressors=compressor)


def gather(array: jax.Array, path: str, layout: SaveLayout, spec: str, comm: Any) -> None:
    """All pieces to rank 0, which puts them into one array and writes it."""
    piece = piece_of(array)
    pieces = np.empty((comm.size, *piece.shape), piece.dtype) if comm.rank == 0 else None
    comm.Gather(np.ascontiguousarray(piece), pieces)
    if pieces is None:
        return
    whole = np.empty(array.shape, piece.dtype)
    for rank, one in enumerate(pieces):
        whole[box(array.shape, spec, comm.size, rank)] = one
    if layout.is_zarr:
        new_zarr(path, layout, array.shape, whole.dtype)[...] = whole
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset(NAME, data=whole, **h5py_options(layout))


def exchanged(piece: Array, shape: tuple[int, ...], unit: tuple[int, ...], spec: str, comm: Any) -> tuple[Any, Array]:
    """This rank's whole units: their place and values. Pieces that consist of whole units stay where they are."""
    mine = box(shape, spec, comm.size, comm.rank)
    if is_aligned(shape, unit, spec, comm.size):
        return mine, piece
    wanted = [own_box(shape, unit, comm.size, rank) for rank in range(comm.size)]
    held = [box(shape, spec, comm.size, rank) for rank in range(comm.size)]
    sent = [np.ascontiguousarray(piece[_within(_meet(mine, other), mine)]) for other in wanted]
    place = wanted[comm.rank]
    out = np.empty([s.stop - s.start for s in place], piece.dtype)
    parts = [_meet(place, other) for other in held]
    got = [np.empty([s.stop - s.start for s in part], piece.dtype) for part in parts]
    requests = [comm.Irecv(room, source=rank) for rank, room in enumerate(got) if room.size]
    requests += [comm.Isend(part, dest=rank) for rank, part in enumerate(sent) if part.size]
    for request in requests:
        request.Wait()
    for part, room in zip(parts, got, strict=True):
        if room.size:
            out[_within(part, place)] = room
    return place, out


def _meet(a: tuple[slice, ...], b: tuple[slice, ...]) -> tuple[slice, ...]:
    """What two boxes have in common."""
    starts = [max(s.start, t.start) for s, t in zip(a, b, strict=True)]
    return tuple(slice(k, max(k, min(s.stop, t.stop))) for k, s, t in zip(starts, a, b, strict=True))


def _within(part: tuple[slice, ...], whole: tuple[slice, ...]) -> tuple[slice, ...]:
    """A box as an index into the values of another that holds it."""
    return tuple(slice(s.start - t.start, s.stop - t.start) for s, t in zip(part, whole, strict=True))


def zarr_python(array: jax.Array, path: str, layout: SaveLayout, spec: str, comm: Any) -> None:
    """Rank 0 makes the store, then every process writes."""
    place, values = exchanged(piece_of(array), array.shape, layout.unit(array.shape), spec, comm)
    if comm.rank == 0:
        new_zarr(path, layout, array.shape, values.dtype)
    comm.Barrier()
    if values.size:
        zarr.open_group(path, mode="r+")[NAME][place] = values


def tensorstore_everywhere(array: jax.Array, path: str, layout: SaveLayout, spec: str, comm: Any) -> None:
    """The same with TensorStore: default context."""
    place, values = exchanged(piece_of(array), array.shape, layout.unit(array.shape), spec, comm)
    if comm.rank == 0:
        new_zarr(path, layout, array.shape, values.dtype)
    comm.Barrier()
    if values.size:
        found = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{NAME}"}}
        store = tensorstore.open(found, open=True, read=True, write=True).result()
        store[place].write(values).result()


def orbax(array: jax.Array, path: str, layout: SaveLayout, spec: str, comm: Any) -> None:
    """A checkpoint: Orbax's own format, its own chunks."""
    add_peers()
    from orbax import checkpoint

    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {NAME: array})
        checkpointer.wait_until_finished()


def shardload_way(**options: Any) -> Way:
    """`shardload.save`."""

    def way(array: jax.Array, path: str, layout: SaveLayout, spec: str, comm: Any) -> None:
        more = {"shards": layout.shards} if layout.shards else {}
        report = shardload.save(path, {NAME: array}, chunks=layout.chunks, compression=layout.codec, **more, **options)
        last_report.clear()
        for name in ("seconds", "writers", "n_chunks", "phases", "nbytes_stored", "nbytes_sent", "staging_nbytes"):
            if hasattr(report, name):
                last_report[name] = getattr(report, name)

    return way


SAVES: dict[str, Way] = {
    "shardload": shardload_way(),
    "shardload-unread": shardload_way(verify="index"),
    "gather": gather,
    "zarr-python": zarr_python,
    "tensorstore": tensorstore_everywhere,
    "orbax": orbax,
}
