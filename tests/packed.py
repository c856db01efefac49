"""Packed variables as files have them: one table, and files of it by each library that writes such files.

Stored numbers are their own flat index (modulo what their type can hold), so that a value in the wrong place shows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import xarray as xr
import zarr

__all__ = ["DIMS", "VARIABLES", "WRITERS", "open_by_xarray", "stored"]

Array = np.ndarray[Any, Any]
DIMS = ("time", "lat", "lon")

# Stored type and attributes of twelve variables of a climate file.
VARIABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "t2m": ("i2", {"scale_factor": np.float64(0.00168), "add_offset": np.float64(273.2), "_FillValue": np.int16(-32767)}),
    "sst": ("i2", {"scale_factor": np.float32(0.01), "add_offset": np.float32(20.0), "_FillValue": np.int16(11)}),
    "ice": ("i1", {"_Unsigned": "true", "scale_factor": np.float32(0.1), "_FillValue": np.int8(-1)}),
    "cloud": ("u1", {"scale_factor": np.float32(0.4), "missing_value": np.uint8(255)}),
    "rain": ("i4", {"scale_factor": np.float32(1e-3), "add_offset": np.float32(5), "_FillValue": np.int32(-9)}),
    "snow": ("u2", {"_FillValue": np.uint16(65535), "missing_value": np.uint16(4)}),
    "u10": ("f4", {"_FillValue": np.float32(np.nan), "scale_factor": np.float64(0.1)}),
    "v10": ("f4", {"_FillValue": np.float32(1e20), "missing_value": np.float32(1e20)}),
    "pressure": (">f8", {"_FillValue": np.float64(7.0), "valid_range": np.array([0, 1e6])}),
    "runoff": (">i2", {"scale_factor": np.float64(0.5), "missing_value": np.array([3, 5, 8], ">i2")}),
    "mask": ("i1", {"dtype": "bool"}),
    "elevation": ("i8", {"add_offset": np.float64(-0.25), "valid_min": np.int64(4)}),
}


def stored(name: str, shape: tuple[int, ...]) -> Array:
    """The stored numbers of a variable, with some fill values among them."""
    dtype, attributes = VARIABLES[name]
    index = np.arange(math.prod(shape), dtype="i8")
    values = (index % {"i1": 127, "u1": 255}.get(dtype, 32000)).astype(dtype)
    for fill in np.ravel(attributes.get("_FillValue", attributes.get("missing_value", values[:0]))):
        values[index % 13 == 5] = fill
    return (values % 2 if name == "mask" else values).reshape(shape)


def by_netcdf4(path: Path, shape: tuple[int, ...], group: str = "", unlimited: bool = False) -> None:
    """A netCDF4 file by the netCDF library, in gzip chunks."""
    with netCDF4.Dataset(path, "w") as file:
        for dim, n in zip(DIMS, shape, strict=True):
            file.createDimension(dim, None if unlimited and dim == "time" else n)
        at = file.createGroup(group) if group else file
        for name, (dtype, attributes) in VARIABLES.items():
            fill = attributes.get("_FillValue")
            made = at.createVariable(
                name, np.dtype(dtype), DIMS, fill_value=fill, zlib=True, chunksizes=[max(1, n // 2) for n in shape],
                endian="big" if dtype.startswith(">") else "native",
            )  # fmt: skip
            made.setncatts({key: value for key, value in attributes.items() if key != "_FillValue"})
            made.set_auto_maskandscale(False)
            made[:] = stored(name, shape)


def by_h5py(path: Path, shape: tuple[int, ...], group: str = "") -> None:
    """The same by h5py, contiguous, with every attribute in an array of one element or as a scalar, in either byte order."""
    with h5py.File(path, "w") as file:
        scales = []
        for dim, n in zip(DIMS, shape, strict=True):
            file[dim] = np.zeros(n, "f4")
            file[dim].make_scale(dim)
            scales.append(file[dim])
        for k, (name, (_, attributes)) in enumerate(VARIABLES.items()):
            made = file.create_dataset(f"{group}/{name}", data=stored(name, shape))
            for axis, scale in enumerate(scales):
                made.dims[axis].attach_scale(scale)
            for key, value in attributes.items():
                if isinstance(value, str):
                    made.attrs[key] = value  # of variable length
                else:
                    kind = value.dtype.newbyteorder(">" if k % 2 else "<")
                    made.attrs[key] = np.atleast_1d(np.asarray(value, kind)) if k % 3 else np.asarray(value, kind)


def _as_dataset(shape: tuple[int, ...]) -> xr.Dataset:
    """The decoded dataset; xarray packs it again with the same attributes."""
    found = {}
    for name, (dtype, attributes) in VARIABLES.items():
        variable = xr.Variable(DIMS, stored(name, shape), attributes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = xr.conventions.decode_cf_variable(name, variable, decode_times=False).load()
        made.encoding["dtype"] = np.dtype(dtype)
        if name == "runoff":  # xarray writes one value
            made.encoding["missing_value"] = np.int16(3)
        if name == "snow":
            del made.encoding["missing_value"]
        if name == "u10":
            made.encoding["_FillValue"] = np.float32(np.nan)
        if name == "mask":
            del made.encoding["dtype"]
        found[name] = made
    return xr.Dataset(found)


def by_xarray(engine: str) -> Callable[..., None]:
    """A netCDF4 file by xarray, through one of its engines."""

    def write(path: Path, shape: tuple[int, ...], group: str = "", unlimited: bool = False) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _as_dataset(shape).to_netcdf(
                path,
                engine=engine,
                group=group or None,
                unlimited_dims=["time"] if unlimited else None,  # type: ignore[call-overload]
            )

    return write


def by_to_zarr(zarr_format: int) -> Callable[..., None]:
    """A Zarr store by xarray."""

    def write(path: Path, shape: tuple[int, ...], group: str = "") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = _as_dataset(shape)
            for variable in made.variables.values():
                variable.encoding["chunks"] = tuple(max(1, n // 2) for n in shape)
            made.to_zarr(path, group=group or None, zarr_format=zarr_format, consolidated=False)  # type: ignore[call-overload]

    return write


def by_zarr(zarr_format: int) -> Callable[..., None]:
    """A Zarr store by zarr-python, whose own fill value is not ``_FillValue``, with a chunk that is not stored."""

    def write(path: Path, shape: tuple[int, ...]) -> None:
        root = zarr.open_group(path, mode="w", zarr_format=zarr_format)  # type: ignore[arg-type]
        for name in ("t2m", "cloud", "rain", "runoff"):
            dtype, attributes = VARIABLES[name]
            more: dict[str, Any] = {"dimension_names": DIMS} if zarr_format == 3 else {}
            made = root.create_array(
                name, shape=shape, dtype=dtype, chunks=tuple(-(-n // 2) for n in shape), fill_value=17, **more
            )
            told = {key: np.asarray(value).tolist() for key, value in attributes.items()}
            made.attrs.update(told if zarr_format == 3 else {**told, "_ARRAY_DIMENSIONS": list(DIMS)})
            half = -(-shape[0] // 2)
            made[:half] = stored(name, shape)[:half]

    return write


# By name: what writes the file, and the name of the file.
WRITERS: Mapping[str, tuple[Callable[..., None], str]] = {
    "netCDF4": (by_netcdf4, "a.nc"),
    "h5py": (by_h5py, "a.h5"),
    "xarray, netCDF4": (by_xarray("netcdf4"), "a.nc"),
    "xarray, h5netcdf": (by_xarray("h5netcdf"), "a.nc"),
    "to_zarr, format 2": (by_to_zarr(2), "a.zarr"),
    "to_zarr, format 3": (by_to_zarr(3), "a.zarr"),
    "zarr, format 2": (by_zarr(2), "a.zarr"),
    "zarr, format 3": (by_zarr(3), "a.zarr"),
}


def open_by_xarray(path: Path, group: str = "") -> dict[str, Array]:
    """All variables as xarray decodes them, in native byte order."""
    engine: Any = "zarr" if path.suffix == ".zarr" else "h5netcdf"
    more: dict[str, Any] = {"consolidated": False} if engine == "zarr" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with xr.open_dataset(
            path, engine=engine, group=group or None, mask_and_scale=True, decode_times=False, **more
        ) as opened:
            found = {str(name): np.asarray(opened[name].values) for name in opened.data_vars}
    return {name: values.astype(values.dtype.newbyteorder("=")) for name, values in found.items()}
