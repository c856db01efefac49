"""Means over the globe of packed variables, none of which any process holds as a whole; compared with xarray.

::

    mpiexec -n 4 python examples/climate.py                     # a small file that is made for it
    mpiexec -n 4 python examples/climate.py era5.nc t2m tp      # your own, with axes (time, lat, lon)

Each variable is stored as 16-bit integers with a factor, an offset and a fill value. One call loads all of them as the values
that their author meant (``decode=True``), cut along latitude and longitude. Where a pole or a meridian is left over, the shards
are padded with NaN: what has no value in the file, and what is not in the file, are then the same to a mean.

Needs xarray and h5netcdf beside shardload.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload


def write_example(path: str, shape: tuple[int, int, int] = (4, 73, 144)) -> None:
    """Write a file with two packed variables, one of them with land that has no value."""
    time, lat, lon = (np.arange(n, dtype="f8") for n in shape)
    lat, lon = 90 - lat * 180 / (shape[1] - 1), lon * 360 / shape[2]
    warm = 250 + 50 * np.cos(np.radians(lat))[:, None] + 5 * np.sin(np.radians(lon) + time[:, None, None])
    rain = np.exp(-(((lat[:, None] - 10) / 15) ** 2) - ((lon - 120) / 40) ** 2) * (1 + time[:, None, None])
    rain[:, :, lon > 300] = np.nan
    dims = ("time", "lat", "lon")
    made = xr.Dataset(
        {"t2m": (dims, warm, {"units": "K"}), "tp": (dims, rain, {"units": "mm"})},
        coords={"time": ("time", 6 * time, {"units": "hours since 2000-01-01"}), "lat": lat, "lon": lon},
    )
    for name, scale in (("t2m", 0.002), ("tp", 0.0001)):
        packing = {"dtype": "i2", "scale_factor": scale, "add_offset": float(made[name].mean()), "_FillValue": np.int16(-32768)}
        made[name].encoding.update(packing, chunksizes=(1, 20, 50), zlib=True)
    made.to_netcdf(path, engine="h5netcdf")


@jax.jit
def mean_and_centre(x: jax.Array, lat: jax.Array, lon: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The mean by area, and the latitude and longitude of the centre of mass, of what has a value. Times are taken together."""
    area = jnp.cos(jnp.radians(lat))[:, None] * jnp.ones_like(lon)
    weight = jnp.where(jnp.isnan(x), 0, area)
    mass = jnp.where(jnp.isnan(x), 0, x) * area
    total = mass.sum()
    return total / weight.sum(), (mass * lat[:, None]).sum() / total, (mass * lon).sum() / total


def by_xarray(path: str, name: str) -> tuple[float, float, float]:
    """The same, by a process that reads all of it."""
    with xr.open_dataset(path, engine="h5netcdf", decode_times=False) as opened:
        x = opened[name].astype("f8").load()
    _, lat, lon = x.dims
    mass = x * np.cos(np.radians(x[lat]))
    weight = np.cos(np.radians(x[lat])) * x.notnull()
    return tuple(
        float(v) for v in (mass.sum() / weight.sum(), (mass * x[lat]).sum() / mass.sum(), (mass * x[lon]).sum() / mass.sum())
    )


def load(path: str, names: list[str], mesh: Mesh) -> tuple[dict[str, jax.Array], Any]:
    """The variables, decoded and sharded, and the plan that says what their axes are. Collective."""
    how: dict[str, Any] = {"dataset": {name: name for name in names}, "decode": True, "dtype": "float32", "pad": np.nan}
    plan = shardload.plan(path, mesh, P(None, "a", "b"), **how)
    return plan.execute(), plan


def main() -> None:
    """Load, compute, and compare on rank 0."""
    shardload.initialize()
    with tempfile.TemporaryDirectory() as folder:
        path, *names = sys.argv[1:] or [f"{folder}/climate.nc"]
        names = names or ["t2m", "tp"]
        if len(sys.argv) == 1:
            path = _made_once(path)
        n = len(jax.devices())
        pb = max(k for k in range(1, n + 1) if n % k == 0 and k * k <= n)
        x, plan = load(path, names, Mesh(np.array(jax.devices()).reshape(-1, pb), ("a", "b")))
        wrapped = shardload.to_xarray(x, plan)
        if jax.process_index() == 0:
            print(plan)
        for name in names:
            _, lat, lon = wrapped[name].dims
            # Coordinates of the padding are NaN, and weigh nothing.
            axes = [jnp.nan_to_num(wrapped[dim].values.astype("f4")) for dim in (lat, lon)]
            found = [float(v) for v in mean_and_centre(x[name], *axes)]
            if jax.process_index() == 0:
                expected = by_xarray(path, name)
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
                units = wrapped[name].attrs.get("units", "")
                mean, north, east = found
                print(f"{name}: mean {mean:.5g} {units}, centre {north:.3f} north, {east:.3f} east; xarray says the same")


def _made_once(path: str) -> str:
    """The example's file, made by the first process; its name on every process."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    path = comm.bcast(path)
    if comm.rank == 0:
        Path(path).parent.mkdir(exist_ok=True)
        write_example(path)
    comm.Barrier()
    return path


if __name__ == "__main__":
    main()
