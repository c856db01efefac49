"""Are parts of an array selected by names and coordinates, and do loaded arrays get their names back?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray as xr
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, between, near
from shardload.formats.lookup import Labeller
from tests.mpi.support import check, mesh_of, on_root, padded, same_error, unit

pytestmark = pytest.mark.any_library


def climate() -> xr.Dataset:
    n = 2 * unit(), 3 * unit(), unit() + 1
    values = np.arange(np.prod(n), dtype="i2").reshape(n)
    made = xr.Dataset(
        {"t": (("time", "lat", "lon"), values * np.float32(0.5), {"units": "K"})},
        coords={
            "time": ("time", np.arange(n[0]) * 6.0, {"units": "hours since 2000-01-01", "calendar": "noleap"}),
            "lat": np.linspace(60, 40, n[1]),
            "lon": np.arange(n[2], dtype="i4"),
        },
    )
    made["t"].encoding.update(dtype="i2", scale_factor=np.float32(0.5), _FillValue=np.int16(-1))
    return made


@pytest.fixture
def path(comm: Any, shared_tmp_path: Path) -> str:
    where = str(shared_tmp_path / "a.nc")
    made = climate()  # on every rank: it asks for JAX's devices, which all must do at first
    on_root(comm, lambda: made.to_netcdf(where, engine="h5netcdf"))
    return where


def test_selected_by_name_and_coordinate(comm: Any, path: str) -> None:
    """Wrong if a rank resolved names by itself, or a kept plan were used for another coordinate."""
    made, mesh = climate(), mesh_of()
    for select, wanted in (
        ({"time": -1, "lat": slice(1, 3)}, made.t.isel(time=-1, lat=slice(1, 3))),
        ({"lon": 2, "time": slice(2, None)}, made.t.isel(lon=2, time=slice(2, None))),
        ({"lat": between(44, 57)}, made.t.sel(lat=slice(57, 44))),
        ({"lat": between(50, 57)}, made.t.sel(lat=slice(57, 50))),
        ({"lat": near(51.3), "time": near(6, within=0.5)}, made.t.sel(lat=51.3, time=6, method="nearest")),
    ):
        for readers in ("parallel", "direct"):
            x = shardload.load(
                path, mesh, P("a"), dataset="t", select=select, decode=True, pad=-3, readers=readers, verify="full"
            )
            check(x, padded(wanted.values, mesh, P("a"), -3), mesh, P("a"), select)
    shardload.verify(x, path, dataset="t", select=select, decode=True, pad=-3)


@pytest.mark.parametrize(
    ("select", "says"),
    [
        ({"depth": 0}, "names the axis 'depth', but the array has the axes 'time', 'lat', 'lon'"),
        ({"time": slice(None, None, 2)}, "step 2"),
        ({"time": 10**6}, "1000000"),
        ({"lat": slice(41.0, 45.0)}, "for a range of coordinates pass shardload.between()"),
        ({"time": "2001-02-01"}, "for dates see docs/values.md"),
        ({"time": shardload.between("2001-02", "2001-03")}, "for dates see docs/values.md"),
        ({"lat": near(0, within=1)}, "the nearest coordinate is 40.0"),
    ],
)
def test_selection_that_cannot_be(comm: Any, path: str, select: dict[str, Any], says: str) -> None:
    call = lambda: shardload.load(path, mesh_of(), P(), dataset="t", select=select, decode=True)  # noqa: E731
    same_error(comm, call, ConfigError, "select", says, "'/t' in")


def test_axes_that_are_longer_elsewhere(comm: Any, shared_tmp_path: Path) -> None:
    """A run that died while it wrote. Wrong if -1 were the last step of each array: for netCDF it is that of the longest."""
    path = str(shared_tmp_path / "died.nc")

    def write() -> None:
        with h5py.File(path, "w") as file:
            for name, n in (("time", 5), ("short", 3), ("long", 5)):
                file.create_dataset(name, data=np.arange(n, dtype="f4"), maxshape=(None,), chunks=(2,))
            file["time"].make_scale("time")
            for name in ("short", "long"):
                file[name].dims[0].attach_scale(file["time"])

    on_root(comm, write)
    for select in ({"time": -1}, {"time": slice(0, -2)}, {"time": near(1)}):
        both = lambda select=select: shardload.load(path, mesh_of(), P(), dataset=["long", "short"], select=select)  # noqa: E731
        same_error(comm, both, ConfigError, "array 1", "'time', which has 3 elements in the array, but its coordinate 5")
        shardload.load(path, mesh_of(), P(), dataset="long", select=select)
    short, long = shardload.load(path, mesh_of(), P(), dataset=["short", "long"], select={"time": slice(1, 3)})
    assert np.array_equal(short, [1, 2]) and np.array_equal(long, [1, 2]), "positions from the beginning are the same in both"
    assert float(shardload.load(path, mesh_of(), P(), dataset="short", select=-1)) == 2


def test_arrays_of_that_name_along_another_axis(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the numbers of the stations along "obs" were searched for a position along "station"."""
    path = str(shared_tmp_path / "a.zarr")

    def write() -> None:
        for name, dim in (("v", "station"), ("station", "obs")):
            made = zarr.create_array(path, name=name, shape=(4,), dtype="f4", dimension_names=(dim,), zarr_format=3)
            made[:] = np.arange(4.0)

    on_root(comm, write)
    call = lambda: shardload.load(path, mesh_of(), P(), dataset="v", select={"station": near(2)})  # noqa: E731
    same_error(comm, call, ConfigError, "'station', which has no coordinate of that name")


def test_a_plan_knows_names_and_calendars(comm: Any, path: str) -> None:
    info = shardload.plan(path, mesh_of(), P(), dataset="time", dtype="float32").info
    assert info.attrs["units"] == "hours since 2000-01-01" and info.attrs["calendar"] == "noleap"
    info = shardload.plan(path, mesh_of(), P(), dataset="t").info
    assert info.dims == ("time", "lat", "lon") and set(info.coords) == {"time", "lat", "lon"}
    with h5py.File(path, "r") as file:  # an open array has the same
        assert shardload.plan(file["t"], mesh_of(), P()).info.dims == info.dims
    assert shardload.plan(np.ones((4, 4), "f4"), mesh_of(), P()).info.dims == (None, None)


def test_a_plan_reads_names_when_they_are_looked_at(comm: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a plan, its text or its execution read them: a thousand arrays would take a second more."""
    labelled, right = [], Labeller.label
    monkeypatch.setattr(Labeller, "label", lambda self, at, info: (labelled.append(info.dataset), right(self, at, info))[1])
    plan = shardload.plan(path, mesh_of(), P(), dataset="t", decode=True)
    plan.execute()
    assert "/t" in str(plan) and not labelled
    tree = shardload.plan(path, mesh_of(), P(), dataset=["t", "lat"], dtype="float32", decode=True)
    assert "/lat" in str(tree) and not labelled
    if comm.rank == comm.size - 1:  # by itself
        assert tree.plans[0].info.dims == ("time", "lat", "lon") and tree.plans[0].info.attrs["units"] == "K"
        assert labelled == ["/t"] and tree.plans[1].info.dims == ("lat",)
    assert len(labelled) == 2 * (comm.rank == comm.size - 1)


def test_to_xarray(comm: Any, path: str) -> None:
    """What a load gives, wrapped, is identical with what xarray opens: values, names, coordinates, attributes."""
    select = {"lat": slice(1, -1), "lon": 2}
    made = shardload.plan(path, mesh_of(), P(), dataset="t", select=select, decode=True)
    x = made.execute()
    found = shardload.to_xarray(x, made)
    with xr.open_dataset(path, decode_times=False, engine="h5netcdf") as opened:
        wanted = opened.t.isel(select).load()
    assert found.data is x
    xr.testing.assert_identical(found.copy(data=np.asarray(x.addressable_shards[0].data)), wanted)
    assert found.encoding["scale_factor"] == 0.5
    both = shardload.to_xarray({"t": x, "u": x}, {"t": made, "u": made})
    assert isinstance(both, xr.Dataset) and both["u"].dims == ("time", "lat") and set(both.coords) == set(wanted.coords)


def test_to_xarray_of_stored_numbers_and_padding(comm: Any, path: str) -> None:
    made = shardload.plan(path, mesh_of(), P("a", None, "b"), dataset="t", decode=False, pad=-1, select={"time": slice(0, -1)})
    found = shardload.to_xarray(made.execute(), made)
    assert found.attrs == {"units": "K", "scale_factor": 0.5, "_FillValue": -1}
    n = made.shape[0]
    np.testing.assert_array_equal(found["time"].values[:n], np.arange(n) * 6.0)
    assert np.isnan(found["time"].values[n:]).all() and found.shape == made.shape_global
    assert ("lon" in found.coords) == (made.shape_global[2] == made.shape[2]), "integers cannot be padded with NaN"


def test_to_xarray_of_what_does_not_fit(comm: Any, path: str) -> None:
    made = shardload.plan(path, mesh_of(), P(), dataset="t", decode=False)
    x = shardload.scatter(np.zeros((1, 2), "f4"), mesh_of(), P())
    for call, says in (
        (lambda: shardload.to_xarray(x, made), "the array has shape (1, 2)"),
        (lambda: shardload.to_xarray({"a": x}, {"b": made}), "no plan for ['a']; there is no array for ['b']"),
        (lambda: shardload.to_xarray([x], made), "found list and Plan"),
        (lambda: shardload.to_xarray(x, None), "found ArrayImpl and NoneType"),
        (lambda: shardload.to_xarray({"g": [x]}, {"g": [None]}), "expected arrays and the plan that loaded them at ['g'][0]"),
    ):
        with pytest.raises(ConfigError) as raised:
            call()
        assert says in str(raised.value)
