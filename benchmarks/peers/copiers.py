"""How do people copy a gzip file of planes to cubes in one process? ``python -m benchmarks.peers.copiers WAY IN OUT EDGE``.

Ways without a program of their own: ``h5py`` and ``zarr-python`` in a loop over slabs as thick as the new chunks, and ``dask``,
which cuts the array into such slabs, these into cubes, and writes them with zarr-python from its threads.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import h5py

from benchmarks.cases.saves import GZIP_LEVEL, NAME


def slabs(data: Any, target: Any, edge: int) -> None:
    """Slab by slab: each plane is decoded once."""
    for low in range(0, len(data), edge):
        target[low : low + edge] = data[low : low + edge]


def new_zarr(out: str, data: Any, edge: int) -> Any:
    """The array in a new store, without values."""
    import zarr  # here: who writes HDF5 does not need its memory

    how = {"chunks": (edge,) * data.ndim, "compressors": zarr.codecs.ZstdCodec()}
    return zarr.create_group(out).create_array(NAME, shape=data.shape, dtype=data.dtype, **how)


def dask(data: Any, out: str, edge: int) -> None:
    """The array in dask's chunks: slabs of whole planes, then cubes."""
    sys.path.append(os.environ.get("SHARDLOAD_BENCHMARK_PEERS", ""))
    import dask.array

    lazy = dask.array.from_array(data, chunks=(edge, *data.shape[1:]), lock=True)
    dask.array.store(lazy.rechunk((edge,) * data.ndim), new_zarr(out, data, edge), lock=False)


def main(way: str, source: str, out: str, edge: int) -> None:
    """Copy."""
    with h5py.File(source) as file:
        data = file[NAME]
        if way == "dask":
            dask(data, out, edge)
        elif way == "zarr-python":
            slabs(data, new_zarr(out, data, edge), edge)
        else:
            how = {"chunks": (edge,) * data.ndim, "compression": "gzip", "compression_opts": GZIP_LEVEL}
            with h5py.File(out, "w") as file_out:
                slabs(data, file_out.create_dataset(NAME, data.shape, data.dtype, **how), edge)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
