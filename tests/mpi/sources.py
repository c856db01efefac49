"""Which files do the tests here load? One small file for each way in which HDF5, netCDF4 and Zarr store an array."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.mpi.support import ramp
from tests.unit.files import write_hdf5, write_zarr

CHUNKS = (3, 5, 7)  # divide no axis, so there are partial chunks at the edges
NAME = "group/field"

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]


def _hdf5(path: Path, shape: Shape, dtype: str = "float32", **options: Any) -> str:
    return write_hdf5(path, {NAME: ramp(shape, dtype)}, **options)


def netcdf4(folder: Path, shape: Shape) -> str:
    import netCDF4

    path = folder / "field.nc"
    with netCDF4.Dataset(path, "w") as file:
        group = file.createGroup("group")
        for name, size in zip("zyx", shape, strict=True):
            group.createDimension(name, size)
            group.createVariable(name, "f8", (name,))[:] = np.arange(size)
        variable = group.createVariable("field", "f4", tuple("zyx"), zlib=True, chunksizes=CHUNKS)
        variable[:] = ramp(shape)
    return str(path)


def virtual(folder: Path, shape: Shape) -> str:
    """One plane of axis 0 in each of several files, in chunks, put together."""
    layout = h5py.VirtualLayout(shape, "f4")
    values = ramp(shape)
    for k in range(shape[0]):
        write_hdf5(folder / f"plane-{k}.h5", {"plane": values[k]}, chunks=CHUNKS[1:], compression="gzip")
        layout[k] = h5py.VirtualSource(f"plane-{k}.h5", "plane", shape=shape[1:])
    path = folder / "virtual.h5"
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset(NAME, layout)
    return str(path)


def _zarr(path: Path, shape: Shape, **options: Any) -> str:
    return write_zarr(path, {NAME: ramp(shape)}, **{"chunks": CHUNKS, **options})


SOURCES: dict[str, Callable[[Path, Shape], str]] = {
    "contiguous": lambda folder, shape: _hdf5(folder / "contiguous.h5", shape),
    "chunked": lambda folder, shape: _hdf5(folder / "chunked.h5", shape, chunks=CHUNKS),
    "gzip_shuffle": lambda folder, shape: _hdf5(folder / "gzip.h5", shape, chunks=CHUNKS, compression="gzip", shuffle=True),
    "big_endian": lambda folder, shape: _hdf5(folder / "big.h5", shape, ">f4", chunks=CHUNKS),
    "netcdf4": netcdf4,
    "virtual": virtual,
    "zarr_v2": lambda folder, shape: _zarr(folder / "v2.zarr", shape, zarr_format=2),
    "zarr_v3": lambda folder, shape: _zarr(folder / "v3.zarr", shape),
    "zarr_sharded": lambda folder, shape: _zarr(folder / "sharded.zarr", shape, chunks=(2, 3, 4), shards=(4, 6, 12)),
    "zarr_v2_fortran": lambda folder, shape: _zarr(folder / "fortran.zarr", shape, zarr_format=2, order="F"),
}
