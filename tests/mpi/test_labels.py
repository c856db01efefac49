"""Are parts of an array selected by names and coordinates, and do loaded arrays get their names back?"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cftime
import h5py
import jax
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, LeftOutWarning, PaddingWarning, SourceError, between, near
from shardload.formats.labelling import Labeller
from shardload.jobs.loading.call import LoadCall
from tests.mpi.support import check, mesh_of, on_root, padded, put, same_error, turned, unit, warned_once
from tests.tuning import tuned
from tests.unit.files import write_hdf5

pytestmark = [pytest.mark.any_library, pytest.mark.any_number]


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


def test_a_list_of_positions(comm: Any, path: str) -> None:
    """What the error about a list says to type: wrong if an array of the list were another one."""
    mesh, positions = mesh_of(), (1, 0, 1)
    how: dict[str, Any] = {"decode": True, "pad": -3}
    same_error(
        comm,
        lambda: shardload.load(path, mesh, P("a"), dataset="t", select={"time": [1, 0, 1]}, **how),
        ConfigError,
        "select=[{'time': 3}, {'time': 17}]",
    )
    each = shardload.load(path, mesh, P("a"), dataset=["t"] * 3, select=[{"time": t} for t in positions], **how)
    for x, t in zip(each, positions, strict=True):
        check(x, padded(climate().t.values[t], mesh, P("a"), -3), mesh, P("a"))


def test_a_spec_by_names_of_axes(comm: Any, path: str) -> None:
    """Wrong if an axis were cut by its number in the file, or by nothing; if axes of different arrays, as of a staggered
    grid, could not be cut alike; or if a tuple of mesh axes were taken for the spec of an array.
    """
    made, mesh = climate(), mesh_of()
    for select, spec, wanted in (
        (None, {"lon": "b", "lat": "a"}, P(None, "a", "b")),
        ({"time": 1}, {"lat": ("a", "b")}, P(("a", "b"))),
        ((slice(None), 2), {"time": None, "lon": "a"}, P(None, "a")),
    ):
        values = made.t.values.astype("f4") if select is None else made.t.values[select if isinstance(select, tuple) else 1]
        x = shardload.load(path, mesh, spec, dataset="t", select=select, decode=True, pad=-3, verify="full")
        check(x, padded(values, mesh, wanted, -3), mesh, wanted, select)
    both = shardload.load(path, mesh, {"lat": "a"}, dataset=["t", "lat", "lon"], decode=True, pad=0, dtype="float32")
    assert [x.sharding.spec for x in both] == [P(None, "a"), P("a"), P()]
    alike = shardload.load(path, mesh, {"lat": "a", "lon": "a"}, dataset=["lat", "lon"], decode=True, pad=0, dtype="float32")
    assert [x.sharding.spec for x in alike] == [P("a"), P("a")]
    for spec, wanted in (({"lon": "a"}, P(None, None, "a")), ({"lon": ("a", "b")}, P(None, None, ("a", "b")))):
        n = shardload.plan(path, mesh, spec, dataset="*", decode=True, pad=0, dtype="float32")
        assert {where: leaf.sharding.spec for where, leaf in zip(n.where, n.leaves, strict=True)}["['t']"] == wanted
        (leaf,) = shardload.plan(path, mesh, spec, dataset=["t"], decode=True, pad=0, dtype="float32").leaves
        assert leaf.sharding.spec == wanted
    how = {"along": "time", "batch": mesh.shape["a"], "window": (0, 1), "decode": True, "pad": 0}
    with iter(shardload.stream(path, mesh, {"time": "a", "lat": "b"}, dataset="t", **how)) as batches:  # type: ignore[arg-type]
        batch = next(batches)
    assert batch.sharding.is_equivalent_to(NamedSharding(mesh, P("a", None, "b")), 4)

    def refused(spec: Any, *words: str, **how: Any) -> None:
        same_error(
            comm, lambda: shardload.load(path, mesh, spec, **{"dataset": "t", "decode": True} | how), ConfigError, *words
        )

    refused({"lats": "a"}, "names the axis 'lats'", "Did you mean 'lat'?")
    refused({"lats": "a"}, "names the axis 'lats'", "'lat'", dataset=["t", "lon"])
    refused({"t": P("a")}, "a tree, but there is one array", "Pass one spec: ")
    refused({"depth": "a"}, "names the axis 'depth'", "pass one of these, or P(...), with an entry for each axis")
    refused({"lat": "c"}, "'c'", "axes of the mesh")
    refused({"lat": "a", "lon": "a"}, "twice")
    refused({"lat": "a"}, "it is selected away", select={"lat": 0})
    same_error(comm, lambda: shardload.scatter(made.t.values, mesh, {"lat": "a"}), ConfigError, "an array in memory has none")


def test_selected_by_name_and_coordinate(comm: Any, path: str) -> None:
    """Wrong if a rank resolved names by itself, or a kept plan were used for another coordinate."""
    made, mesh = climate(), mesh_of()
    dated = xr.decode_cf(made)["t"]
    second = cftime.DatetimeNoLeap(2000, 1, 1, 7)
    for select, wanted in (
        (
            {"time": between("2000-01-01T07", "2000-01-01"), "lat": 0},
            dated.sel(time=slice("2000-01-01T07", "2000-01-01"))[:, 0],
        ),
        ({"time": between(second, "2000")}, dated.sel(time=slice(second, "2000"))),
        ({"time": near("2000-01-01T07", within=timedelta(hours=2))}, dated.sel(time=second, method="nearest")),
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
        ({"lat": slice(45.0, 41.0)}, "For coordinates and dates pass select={'lat': shardload.near("),
        ({"time": slice("2001", None)}, "or shardload.between(LOW, HIGH)"),
        (
            {"time": "2001-02"},
            "shardload.near('2001-02'), the nearest one, or shardload.between('2001-02', '2001-02'), all of a",
        ),
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
        same_error(comm, both, ConfigError, "array [1]", "'time', which has 3 elements in the array, but its coordinate 5")
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
    wanted = opened(Path(path), decode_times=False).t.isel(select)
    assert found.data is x
    xr.testing.assert_identical(found.copy(data=np.asarray(x.addressable_shards[0].data)), wanted)
    assert found.encoding["scale_factor"] == 0.5
    both = shardload.to_xarray({"t": x, "u": x}, {"t": made, "u": made})
    assert isinstance(both, xr.Dataset) and both["u"].dims == ("time", "lat") and set(both.coords) == set(wanted.coords)


def test_what_is_done_to_an_object_is_not_done_to_the_plan(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the next object that is made with the plan had what the caller wrote into this one."""
    path = str(shared_tmp_path / "x.nc")
    made = xr.Dataset(
        {"x": (("y", "z"), np.zeros((4, 3), "f4"), {"levels": [1, 2]})},
        coords={"height": (("y", "z"), np.arange(12.0).reshape(4, 3), {"range": [0, 9]})},
    )
    on_root(comm, lambda: made.to_netcdf(path, engine="h5netcdf"))
    plan = shardload.plan(path, mesh_of(), P(), dataset="x")
    x = plan.execute()
    with pytest.raises(ValueError, match="read-only"):
        plan.info.coords["height"].values[...] = -1
    for _ in range(2):
        found = shardload.to_xarray(x, plan)
        np.testing.assert_array_equal(found["height"], made["height"])
        assert list(found.attrs["levels"]) == [1, 2] and list(found["height"].attrs["range"]) == [0, 9]
        found["height"].values[...] = -1
        found.attrs["levels"][0] = found["height"].attrs["range"][0] = -1


def test_objects_of_json_are_dicts(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if an attribute of Zarr that xarray has as a dict became its text, which a save would then write."""
    path, attrs = shared_tmp_path / "a.zarr", {"grid": {"levels": [1, {"top": 0.5}]}}
    made = xr.Dataset({"x": ("y", np.arange(4.0, dtype="f4"), attrs)}, attrs=attrs)
    on_root(comm, lambda: made.to_zarr(path, zarr_format=3, consolidated=False) and None)
    found = shardload.load_dataset(path, mesh_of())
    assert found.attrs == found.x.attrs == attrs
    shardload.save(shared_tmp_path / "b.zarr", found)
    assert on_root(comm, lambda: xr.open_zarr(shared_tmp_path / "b.zarr").x.attrs) == attrs


def test_to_xarray_of_stored_numbers_and_padding(comm: Any, path: str) -> None:
    made = shardload.plan(path, mesh_of(), P("a", None, "b"), dataset="t", decode=False, pad=-1, select={"time": slice(0, -1)})
    found = shardload.to_xarray(made.execute(), made)
    assert found.attrs == {"units": "K", "scale_factor": 0.5, "_FillValue": -1}
    n = made.shape[0]
    np.testing.assert_array_equal(found["time"].values[:n], np.arange(n) * 6.0)
    assert np.isnan(found["time"].values[n:]).all() and found.shape == made.shape_global
    n = made.shape[2]  # of integers, which NaN makes floating point numbers
    np.testing.assert_array_equal(found["lon"].values[:n], np.arange(n))
    assert np.isnan(found["lon"].values[n:]).all() and found["lon"].size == made.shape_global[2]


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_to_xarray_of_time_spans(comm: Any, shared_tmp_path: Path, suffix: str) -> None:
    """Wrong if they lost the attribute by which xarray reads them as such, so that a save made plain numbers of them."""
    where = shared_tmp_path / f"in{suffix}"
    spans = np.arange(5) * np.timedelta64(90, "s").astype("m8[ns]")
    made = xr.Dataset({"age": ("x", spans, {"long_name": "age"})}, coords={"lag": ("x", spans[::-1])})
    how: dict[str, Any] = {"consolidated": False} if suffix == ".zarr" else {"engine": "h5netcdf"}
    on_root(comm, lambda: made.to_zarr(where, zarr_format=3, **how) if suffix == ".zarr" else made.to_netcdf(where, **how))
    plan = shardload.plan(where, mesh_of(), P(), dataset="age", decode=True, dtype="int32")
    found = shardload.to_xarray(plan.execute(), plan)
    assert found.attrs["dtype"] == "timedelta64[ns]" and found["lag"].attrs["dtype"] == "timedelta64[ns]"
    shardload.save(shared_tmp_path / f"out{suffix}", found)
    xr.testing.assert_identical(opened(shared_tmp_path / f"out{suffix}"), made)


def test_to_xarray_of_stored_numbers_of_zarr_2(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if they lost the fill value, which marks missing data in this format, so that nothing was masked any more."""
    where = shared_tmp_path / "in.zarr"
    made = xr.Dataset({"t": ("x", np.array([1, np.nan, 3], "f4"))}, coords={"c": ("x", np.array([2, np.nan, 1], "f4"))})
    for name, fill in (("t", np.int16(-9)), ("c", np.float32(-1))):
        made[name].encoding.update(dtype=fill.dtype, _FillValue=fill)
    on_root(comm, lambda: made.to_zarr(where, zarr_format=2, consolidated=False))
    plan = shardload.plan(where, mesh_of(), P(), dataset="t", decode=False)
    found = shardload.to_xarray(plan.execute(), plan)
    assert found.attrs == {"_FillValue": -9} and shardload.open(where)["c"].attrs == {"_FillValue": -1.0}
    shardload.save(shared_tmp_path / "out.nc", found)
    xr.testing.assert_identical(opened(shared_tmp_path / "out.nc"), made)


def test_to_xarray_of_coordinates_that_are_no_axes(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if those too large for a plan, or along an axis of their own, became data variables, and a save forgot whose they
    are; or if they kept the attribute ``coordinates``, which WRF gives to coordinates, too. Or if the file's own attributes
    were lost, or long ones cut.
    """
    where = shared_tmp_path / "wrf.nc"
    n = 2, 136, 136  # more than 64 KiB of latitudes
    values = np.arange(np.prod(n), dtype="f4").reshape(n)
    made = xr.Dataset(
        {"t": (("time", "y", "x"), values, {"coordinates": "lat hour band"})},
        coords={
            "lat": (("y", "x"), values[0], {"units": "degrees_north", "coordinates": "lat hour", "comment": "y" * 3000}),
            "hour": ("time", np.arange(2.0), {"coordinates": "lat hour"}),
            "band": ("number", np.arange(3, dtype="i2"), {"units": "1"}),
        },
        attrs={"title": "a run", "levels": [1, 2], "history": "2026: made\n" * 500},
    ).reset_coords()
    on_root(comm, lambda: made.to_netcdf(where, engine="h5netcdf"))
    plan = shardload.plan(where, mesh_of(), P(), dataset={name: name for name in ("t", "lat", "band")}, decode=True)
    given = shardload.to_xarray(plan.execute(), plan)
    assert set(given.coords) == {"lat", "hour", "band"}
    found = given.map(lambda one: one.copy(data=np.asarray(one.data.addressable_shards[0].data)))
    local = {name: one.copy(data=np.asarray(one.data)) for name, one in given.coords.items()}
    of_file = opened(where, decode_times=False)
    xr.testing.assert_identical(found.assign_coords({name: one.variable for name, one in local.items()}), of_file)
    shardload.save(shared_tmp_path / "saved.nc", given)
    xr.testing.assert_identical(opened(shared_tmp_path / "saved.nc", decode_times=False), of_file)


@pytest.mark.parametrize("name", ["a.nc", "a.h5", "a.zarr"])
def test_a_coordinate_by_itself(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if the coordinate of an axis could not be selected by itself, or had no index."""
    path, mesh, dates = str(shared_tmp_path / name), mesh_of(), pd.date_range("2001-01-01", periods=24, freq="MS")
    ds = xr.Dataset({"t2m": (("time", "lat"), np.ones((24, 3)))}, {"time": dates, "lat": [1, 2, 3]})
    shardload.save(path, ds)
    select, how = {"time": between("2001-06", "2002-05")}, {"dtype": "i4"}
    numbers = (dates - dates[0]).days.values
    for given, place in ((["t2m", "time"], 1), (["time"], 0)):
        found = shardload.load(path, mesh, P(), dataset=given, select=select, **how)
        np.testing.assert_array_equal(found[place], numbers[5:17])
    assert int(shardload.load(path, mesh, P(), dataset="lat", select={"lat": near(2.2)}, **how)) == 2
    plan = shardload.plan(path, mesh, P(), dataset={"time": "time", "lat": "lat"}, **how)
    wrapped = shardload.to_xarray(plan.execute(), plan)
    assert set(wrapped.indexes) == {"time", "lat"}
    xr.testing.assert_equal(xr.decode_cf(wrapped), ds.drop_vars("t2m"))
    alone = shardload.plan(path, mesh, P(), dataset="time", select=select, **how)
    xr.testing.assert_equal(shardload.to_xarray(alone.execute(), alone).time, wrapped.time[5:17])


@pytest.mark.parametrize("name", ["a.nc", "a.zarr"])
def test_coordinates_that_the_file_names(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if a coordinate that shares no axis with a variable came back as a variable."""
    path, mesh = str(shared_tmp_path / name), mesh_of()
    ds = xr.Dataset({"v": ("x", np.arange(3.0, dtype="f4"))}, {"y": ("a", np.float32([42, 43]))}, {"title": "a run"})
    shardload.save(path, ds)
    plan = shardload.plan(path, mesh, P(), dataset={"v": "v", "y": "y"}, decode=True)
    xr.testing.assert_identical(shardload.to_xarray(plan.execute(), plan).compute(), ds)


@pytest.mark.any_version
@pytest.mark.any_library
def test_to_xarray_of_attributes_that_are_too_long(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if a note that they are too long were saved in their place, or they were lost without a word."""
    where = shared_tmp_path / "in.zarr"
    attrs = {"table": "x" * (1 << 19), "units": "K"}
    made = xr.Dataset({"t": ("x", np.arange(3.0), attrs), "u": ("x", np.arange(3.0))}, {"x": np.arange(3.0)}, attrs)
    on_root(comm, lambda: made.to_zarr(where, zarr_format=3, consolidated=False))
    plan = shardload.plan(where, mesh_of(), P(), dataset={"t": "t", "u": "u"}, dtype="float32")
    tree = plan.execute()
    with warned_once(comm, LeftOutWarning) as told:
        found = shardload.to_xarray(tree, plan)
    assert all("'table' of /t, 'table' of the group" in text for text in told)
    assert found.attrs == {"units": "K"} and found["t"].attrs["units"] == "K"
    assert "table" not in {**found["t"].attrs, **found["u"].attrs}


def labelled_without(comm: Any, plan: Any, name: str) -> Any:
    """What `to_xarray` makes of a plan. It names the coordinate that is left out, on rank 0."""
    with warned_once(comm, LeftOutWarning) as told:
        labelled = shardload.to_xarray(plan.execute(), plan)
    assert all(text.endswith(f": {name}") for text in told), told
    return labelled


def test_to_xarray_of_coordinates_without_names_of_axes(comm: Any, shared_tmp_path: Path) -> None:
    """Plain HDF5 has none. Wrong if latitudes and longitudes were left out, or lay along an axis that only has their length."""
    n, where = (2, 4, 6), shared_tmp_path / "plain.h5"
    values = np.arange(np.prod(n), dtype="f4").reshape(n)

    def write() -> None:
        with h5py.File(where, "w") as file:
            file["t"], file["square"] = values, values[0, :, :4]
            file["lat"], file["lon"], file["level"], file["short"] = values[0], values[1], np.arange(4.0), np.arange(3.0)
            file["t"].attrs["coordinates"] = "lat lon level short"
            file["square"].attrs["coordinates"] = "level"  # along which of its axes?
            file["half"] = values[0]
            file["half"].dims[0].label = "level"
            file["half"].attrs["coordinates"] = "lat level"

    on_root(comm, write)
    plan = shardload.plan(where, mesh_of(), P(), dataset="t", select=(slice(0, 2), slice(1, 3)))
    found = labelled_without(comm, plan, "/short")
    with xr.open_dataset(where, engine="h5netcdf", phony_dims="access") as theirs:  # names axes by their lengths
        wanted = theirs["t"][:, 1:3]
        for name in ("lat", "lon", "level"):
            axes = [wanted.dims.index(dim) for dim in wanted[name].dims]
            assert [found.dims.index(dim) for dim in found[name].dims] == axes, name
            np.testing.assert_array_equal(found[name].values, wanted[name].values, err_msg=name)
    assert "short" not in found.coords
    plan = shardload.plan(where, mesh_of(), P(), dataset="square")
    assert not labelled_without(comm, plan, "/level").coords
    plan = shardload.plan(where, mesh_of(), P(), dataset="half")
    found = shardload.to_xarray(plan.execute(), plan)
    assert {name: one.dims for name, one in found.coords.items()} == {"lat": ("level", "dim_1"), "level": ("level",)}


def test_to_xarray_of_what_does_not_fit(comm: Any, path: str) -> None:
    made = shardload.plan(path, mesh_of(), P(), dataset="t", decode=False)
    x = shardload.scatter(np.zeros((1, 2), "f4"), mesh_of(), P())
    for call, says in (
        (lambda: shardload.to_xarray(x, made), "the array has shape (1, 2)"),
        (lambda: shardload.to_xarray({"a": x}, {"b": made}), "found arrays ['a'] and plans ['b']"),
        (lambda: shardload.to_xarray([x], made), "found list and Plan"),
        (lambda: shardload.to_xarray(x, None), "found ArrayImpl and NoneType"),
        (lambda: shardload.to_xarray({"g": [x]}, {"g": [None]}), "expected arrays and the plan that loaded them at ['g'][0]"),
    ):
        with pytest.raises(ConfigError) as raised:
            call()
        assert says in str(raised.value)


# --- objects of xarray are saved


def test_to_xarray_of_axes_that_only_padding_makes_alike(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if padding of one array were in the same rows as values of another, without a word."""
    path, mesh = str(shared_tmp_path / "a.h5"), mesh_of(names=("a",))
    on_root(comm, lambda: write_hdf5(path, {"one": np.zeros(1), "two": np.zeros(2)}))
    plan = shardload.plan(path, mesh, P("a"), dataset={"one": "one", "two": "two"}, pad=0, dtype="float32")
    says = "'dim_0' has 1 elements in ['one'] and 2 in ['two']", "cannot share a Dataset"
    same_error(comm, lambda: shardload.to_xarray(plan.execute(), plan), ConfigError, *says)


def many_kinds(put: Callable[..., Any]) -> xr.Dataset:
    """What a Dataset may hold; its large arrays as `put` makes them."""
    n = 2 * unit(), 3 * unit(), unit() + 1
    values = np.arange(np.prod(n), dtype="f4").reshape(n)
    values[0, 0, 0] = np.nan
    time = pd.date_range("2001-01-31", periods=n[0], freq="6h").as_unit("ns")
    return xr.Dataset(
        {
            "t": (
                ("time", "lat", "lon"),
                put(values),
                {"units": "K", "grid_mapping": "crs", "flags": np.arange(3, dtype="i2")},
            ),
            "is_warm": (("time", "lat", "lon"), put(values > 50)),
            "count": (("time", "lat"), put(values[:, :, 1].astype("i4"))),
            "mean": ((), put(np.float32(3))),
            "land": (("lat",), np.arange(n[1]) > 2),
            "time_bnds": (("time", "nv"), np.stack([time, time + pd.Timedelta("6h")], 1)),
            "crs": ((), np.int32(0), {"grid_mapping_name": "latitude_longitude"}),
        },
        coords={
            "time": ("time", time, {"bounds": "time_bnds", "standard_name": "time"}),
            "lat": ("lat", np.linspace(60, 40, n[1]), {"units": "degrees_north"}),
            "lon": np.arange(n[2]),
            "area": (("lat", "lon"), put(np.full(n[1:], 2, "f4"))),
            "rotated": (("lat", "lon"), np.full(n[1:], 3.0)),
            "height": ((), 2.0, {"units": "m"}),
            "lead": ("time", np.arange(n[0]) * np.timedelta64(3600, "s").astype("m8[ns]")),
            "model_time": ("time", xr.date_range("2000-02-28", periods=n[0], calendar="noleap", use_cftime=True)),
        },
        attrs={"title": "a run", "version": 3},
    )


def opened(path: Path, **how: Any) -> xr.Dataset:
    """What xarray reads."""
    engine: Any = "zarr" if path.suffix == ".zarr" else "h5netcdf"
    found = xr.load_dataset(path, **{"engine": engine, "decode_timedelta": True} | how)
    for one in found.variables.values():
        one.attrs.pop("DIMENSION_LABELS", None)  # names of axes without a coordinate, in plain HDF5
    return found


@pytest.mark.parametrize("mesh", [mesh_of(), turned()], ids=["in order", "turned"])
@pytest.mark.parametrize("name", ["a.nc", "a.h5", "a.zarr"])
def test_a_dataset_is_saved(comm: Any, shared_tmp_path: Path, mesh: Any, name: str) -> None:
    """Wrong if xarray did not read back the same object: a date in other units, a coordinate or attribute less."""

    def sharded(values: Any) -> Any:
        values = np.asarray(values)
        return put(values, mesh, P(*("a", "b")[: values.ndim]) if values.shape[-1:] != (unit() + 1,) else P())

    path = shared_tmp_path / name
    given, wanted = many_kinds(sharded), many_kinds(lambda values: values)
    text = shardload.plan_save(path, given)
    assert "is_warm" in str(text) and not path.exists()
    shardload.save(path, given, compression="gzip", chunks=dict.fromkeys(["t", "is_warm"], (1, 3, 5)))
    on_root(comm, lambda: xr.testing.assert_identical(opened(path), wanted))
    shardload.save(path, given["t"], mode="w", dataset="warm/t", attrs={"units": "mK"}, chunks=(2, 2, 2))

    def look() -> None:
        found = opened(path, group="warm")
        assert found["t"].attrs["units"] == "mK" and set(found.coords) == set(wanted.t.coords)
        np.testing.assert_array_equal(found["t"].values, wanted["t"].values)
        xr.testing.assert_equal(found["model_time"].variable, wanted["model_time"].variable)

    on_root(comm, look)


def packed(comm: Any, folder: Path) -> tuple[str, xr.Dataset]:
    """A file of packed values with coordinates of many types, and what xarray makes of it; no axis divides."""
    n = 2 * unit() + 1, 3 * unit() - 1, 3
    values = 280 + np.random.default_rng(0).normal(0, 10, n)
    values[0, 1, 1] = np.nan
    made = xr.Dataset(
        {
            "t": (("time", "lat", "lon"), values, {"units": "K", "valid_range": np.array([-30000, 30000], "i2")}),
            "u": (("time", "lat", "lon"), values.astype("f4") - 270, {"units": "m/s", "valid_range": np.array([-99.0, 99])}),
        },
        coords={
            "time": ("time", np.arange(n[0]) * 6, {"units": "hours since 2000-01-01", "calendar": "noleap"}),
            "lat": ("lat", np.linspace(60, 40, n[1]), {"units": "degrees_north"}),
            "lon": np.arange(n[2], dtype="i4"),
            "area": (("lat", "lon"), np.arange(n[1] * n[2], dtype="f4").reshape(n[1:])),
            "zone": (("lat",), np.arange(n[1], dtype="i2")),
        },
        attrs={"title": "packed"},
    )
    made["t"].encoding.update(dtype="i2", scale_factor=0.01, add_offset=280.0, _FillValue=np.int16(-32768))
    path = str(folder / "packed.nc")
    on_root(comm, lambda: made.to_netcdf(path, engine="h5netcdf"))
    wanted = opened(Path(path), decode_times=False)
    del wanted["t"].attrs["valid_range"]  # of the packed numbers
    return path, wanted.assign(t=wanted["t"].astype("f4"))


@pytest.mark.parametrize("mesh", [mesh_of(), turned()], ids=["in order", "turned"])
@pytest.mark.parametrize("name", ["a.nc", "a.zarr"])
def test_arithmetic_between_a_load_and_a_save(comm: Any, shared_tmp_path: Path, name: str, mesh: Any) -> None:
    """Wrong if padding were written, a coordinate were cut or lost, or decoded values were marked as packed ones."""
    path, wanted = packed(comm, shared_tmp_path)
    how: dict[str, Any] = {"dataset": {"t": "t", "u": "u"}, "decode": True, "dtype": "float32", "pad": 0}
    plan = shardload.plan(path, mesh, P("a", "b"), **how)
    given = shardload.to_xarray(plan.execute(), plan)
    out = shared_tmp_path / name

    def same(expected: xr.Dataset) -> None:
        def look() -> None:
            found = opened(out, decode_times=False)
            found.attrs.clear()
            xr.testing.assert_identical(found, expected.drop_attrs(deep=False))
            assert (
                all(np.isnan(one.encoding["_FillValue"]) for one in found.values())
                and "_FillValue" not in found["lat"].encoding
            )

        on_root(comm, look)

    shardload.save(out, given, plan=plan, compression="gzip")
    same(wanted)
    shardload.save(out, given, mode="w")  # arrays that a load returned know their padding
    same(wanted)

    def compute(ds: xr.Dataset) -> xr.Dataset:
        with xr.set_options(keep_attrs=True):
            anomaly = ds - ds.isel(time=0)
            return anomaly.assign(speed=2 * anomaly["u"].transpose("lat", "lon", "time"), first=ds["t"].isel(time=0))

    computed, expected = compute(given), compute(wanted)
    shardload.save(out, computed, plan=plan, mode="w", chunks={"t": (1, 4, 2)}, compression="gzip")
    same(expected)
    shardload.save(out, computed["speed"], plan=plan.plans["u"], mode="w", attrs={"long_name": "speed"})
    same(expected["speed"].assign_attrs(long_name="speed").to_dataset())


def test_a_plan_whose_file_is_gone(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if one rank went on, or the error called it a wrong argument."""
    path, _ = packed(comm, shared_tmp_path)
    plan = shardload.plan(path, mesh_of(), P("a", "b"), dataset="u", decode=True, pad=0)
    u = xr.DataArray(plan.execute() + 1, dims=("time", "lat", "lon"), name="u")
    on_root(comm, lambda: Path(path).rename(shared_tmp_path / "gone.nc"))
    same_error(comm, lambda: shardload.save(shared_tmp_path / "a.nc", u, plan=plan), SourceError, "packed.nc")
    on_root(comm, lambda: (shared_tmp_path / "gone.nc").rename(path))
    shardload.save(shared_tmp_path / "a.nc", u, plan=plan)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_a_file_that_is_replaced(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Wrong if what the coordinates of one version select was taken from another, or values got the other's coordinates."""
    first = climate().assign(t=lambda one: one["t"].astype("f4"))
    second = first.assign(t=first["t"] + 1000).assign_coords(lat=first["lat"].values[::-1], time=first["time"].values + 6)
    at, beside = (str(shared_tmp_path / f"{name}{suffix}") for name in ("at", "beside"))

    def write() -> None:
        for one, where in ((first, at), (second, beside)):
            one.to_netcdf(where, engine="h5netcdf") if suffix == ".nc" else one.to_zarr(where, consolidated=False)

    def swap() -> None:
        Path(at).rename(shared_tmp_path / "away")
        Path(beside).rename(at)
        (shared_tmp_path / "away").rename(beside)

    def replace_it() -> None:
        comm.barrier()  # ranks look names up by themselves
        on_root(comm, swap)

    def wrapped(x: jax.Array, plan: shardload.Plan, wanted: xr.Dataset) -> None:
        found = shardload.to_xarray(x, plan)
        xr.testing.assert_equal(found.copy(data=np.asarray(x.addressable_shards[0].data)), wanted["t"])

    on_root(comm, write)
    mesh, lat = mesh_of(), {"lat": between(55, 60)}
    for small in (0, 1 << 20):
        with tuned(small_nbytes=small, tiny_nbytes=small):
            named, whole = (shardload.plan(at, mesh, P(), dataset="t", select=select) for select in (lat, None))
            plans = [named]
            if suffix == ".nc" and not small:  # a helper process says more of it at once
                plans.append(shardload.plan(at, mesh, P(), dataset="t", select=lat, untrusted=True))
            old, again = shardload.load(at, mesh, P(), dataset="t"), whole.execute()
            wrapped(again, whole, first)
            replace_it()
            for plan in plans:
                same_error(comm, plan.execute, SourceError, "has changed since its axes and coordinates were looked up")
            with pytest.raises(SourceError, match="has changed since its axes and coordinates were looked up"):
                _ = named.info.dims
            wrapped(old, whole, first)  # whose names were looked up before
            unseen = shardload.plan(at, mesh, P(), dataset="t")
            new, computed = whole.execute(), unseen.execute() + 1
            wrapped(new, whole, second)
            with pytest.raises(SourceError, match="has changed since it was loaded"):
                shardload.to_xarray(old, whole)
            replace_it()
            for x, plan in ((computed, unseen), (new, shardload.plan(at, mesh, P(), dataset="t"))):
                with pytest.raises(SourceError, match="has changed since it was loaded"):
                    shardload.to_xarray(x, plan)

    comm.barrier()
    right = LoadCall.make

    def late(self: LoadCall, *given: Any) -> Any:
        on_root(comm, swap)
        return right(self, *given)

    with tuned(small_nbytes=0, tiny_nbytes=0), monkeypatch.context() as patch:
        patch.setattr(LoadCall, "make", late)
        call = lambda: shardload.load(at, mesh, P(), dataset="t", select=lat)  # noqa: E731
        same_error(comm, call, SourceError, "has changed since its axes and coordinates were looked up")
    check(shardload.load(at, mesh, P(), dataset="t", select=lat), second["t"].sel(lat=slice(55, 60)).values, mesh, P())


def test_what_nothing_says_of_padding(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if padding were written as values, or other elements were taken for it."""
    path, _ = packed(comm, shared_tmp_path)
    plan = shardload.plan(path, mesh_of(), P("a", "b"), dataset="u", decode=True, pad=0)
    u = shardload.to_xarray(plan.execute(), plan)
    if plan.shape[1] == plan.shape_global[1]:
        return  # one device: no padding
    out = shared_tmp_path / "a.nc"
    for given, how in ((2 * u, {}), (2 * u[:, ::-1], {"plan": plan}), (2 * u[:, 1:], {"plan": plan})):
        same_error(comm, lambda g=given, h=how: shardload.save(out, g, **h), ConfigError, "NaN among", "plan=")  # type: ignore[misc]
    same_error(comm, lambda: shardload.save(out, (2 * u)[:, 2:], plan=plan), ConfigError, "where it was loaded", "shape=")
    one, other = (
        shardload.plan(path, mesh_of(), P(None, ("a", "b")), dataset="u", decode=True, pad=0, select={"lat": slice(k, None)})
        for k in range(2)
    )
    if one.extent.shape_without_halo == other.extent.shape_without_halo:
        both = lambda: shardload.save(out, 2 * u, plan={"a": one, "b": other})  # noqa: E731
        same_error(comm, both, ConfigError, "the axis 'lat' of", "without padding by one array or plan")
    x = 2 * shardload.load(path, mesh_of(), P(None, ("a", "b")), dataset="u", decode=True, pad=0)
    cells = xr.DataArray(x, dims=("time", "cell", "lon"), name="u")  # an unstructured grid: no coordinate has that name
    for bare in (cells, cells.mean("time")):
        same_error(comm, lambda b=bare: shardload.save(out, b), PaddingWarning, "saved with the whole shape: 'u'")  # type: ignore[misc]
    shardload.save(shared_tmp_path / "named.nc", cells.assign_coords(cell=np.arange(x.shape[1])))  # its name says it is whole
    same_error(comm, lambda: shardload.save(out, 2 * u[:, ::-1]), ConfigError, "NaN among", "before an axis is flipped")
    assert not out.exists()
    shardload.save(out, 2 * u, shape=plan.shape)
    on_root(comm, lambda: np.testing.assert_array_equal(opened(out)["u"].shape, plan.shape))
    how = {"decode": True, "select": {"lat": slice(1, None)}}
    haloed = shardload.plan(path, mesh_of(), P(None, "b"), dataset="u", halo=(0, 1), **how)
    x = shardload.to_xarray(haloed.execute(), haloed)
    for given, more in ((x, {}), (2 * x, {"plan": haloed}), (x.sum("time"), {"plan": haloed})):
        call = lambda g=given, h=more: shardload.save(out, g, mode="w", **h)  # noqa: E731
        same_error(comm, call, ConfigError, "'u' has halos", "shardload.unpad")


@pytest.mark.parametrize("name", ["out.h5", "out.zarr"])
def test_a_dataset_with_bfloat16_of_numpy(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if it were refused as records are, which have the same kind in NumPy; one with `jax.Array`s was saved."""
    values = np.arange(6).astype("bfloat16")
    shardload.save(shared_tmp_path / name, xr.Dataset({"w": ("x", values), "first": values[0]}))
    found = shardload.load(shared_tmp_path / name, like={"w": values, "first": values[0]})
    np.testing.assert_array_equal(found["w"], values, strict=True)
    assert found["first"] == values[0]


@pytest.mark.parametrize(
    ("make", "how", "says"),
    [
        (lambda ds: ds.assign_coords(name=("lat", ["a", "b", "c"])), {}, "'name' holds strings, and save writes numbers"),
        (lambda ds: ds.stack(z=("lat", "lon")), {}, "an index of several levels, which no file has"),
        (lambda ds: ds.assign(kind=("lat", pd.Categorical(["a"] * ds.sizes["lat"]))), {}, "Leave it out: ds.drop_vars('kind')"),
        (lambda ds: xr.DataTree(ds), {}, "found a DataTree; expected a Dataset"),
        (lambda ds: xr.Dataset(), {}, "there are no arrays to save"),
        (lambda ds: {"t": ds.t}, {}, "or a tree of them. Pass x.data, or a Dataset in place of the dict"),
        (lambda ds: ds.rename(t=3), {}, "a variable is called 3"),
        (lambda ds: ds.rename(t="u/v"), {}, "a variable is called 'u/v'; expected text without '/'"),
        (lambda ds: ds.t.rename("u/v"), {}, "the DataArray is called 'u/v'; expected text without '/'"),
        (lambda ds: ds.drop_vars("lat").rename_dims(lon=("x", 1)), {}, "expected text for each"),
        (lambda ds: ds.t.rename("lat"), {}, "the name of a coordinate of its own, 'lat'"),
        (lambda ds: ds, {"shape": {"u": (3, 4)}}, "only shape has ['u']"),
        (lambda ds: ds, {"plan": {"t": 7}}, "plan has a int; expected the Plan"),
        (lambda ds: ds.t, {"attrs": "K"}, "'/t': attrs is 'K'"),
        (lambda ds: ds.assign(t=ds.t.astype("c8")), {}, "complex64"),
    ],
)
def test_objects_that_cannot_be_saved(comm: Any, shared_tmp_path: Path, make: Any, how: Any, says: str) -> None:
    made = make(xr.Dataset({"t": (("lat", "lon"), np.zeros((3, 4), "f4"))}, coords={"lat": np.arange(3.0)}))
    same_error(comm, lambda: shardload.save(shared_tmp_path / "a.nc", made, **how), ConfigError, says)
    assert not (shared_tmp_path / "a.nc").exists()


HOURS = np.arange(4) * np.timedelta64(6, "h").astype("m8[ns]")
DATES = np.datetime64("2000-02-28", "ns") + HOURS
KINDS = {
    "numbers": xr.Dataset({k: ("time", np.arange(4).astype(k)) for k in ("i1", "i2", "i8", "u1", "u4", "f4", "f8")}),
    "booleans": xr.Dataset({"a": ("time", np.arange(4) > 1)}, {"flag": ("time", np.arange(4) > 2), "one": True}),
    "spans of time": xr.Dataset({"a": ("time", HOURS)}, {"time": HOURS, "step": ("time", HOURS)}),
    "missing times": xr.Dataset(
        {"a": ("time", np.where([0, 1, 0, 1], np.datetime64("NaT", "ns"), DATES)), "b": ("time", HOURS * 2)}
    ),
    "dates": xr.Dataset({"a": (("time", "two"), np.stack([DATES, DATES + HOURS], 1))}, {"time": DATES, "first": DATES[0]}),
    "dates of cftime": xr.Dataset(
        {"a": ("time", [cftime.DatetimeNoLeap(2000, 2, 26 + k) for k in range(3)] + [cftime.DatetimeNoLeap(2000, 3, 1)])}
    ),
    "no axes": xr.Dataset(
        {
            "a": ("time", np.arange(4)),
            "b": cftime.Datetime360Day(2000, 2, 30),
            "c": 3.0,
            "d": np.timedelta64(3, "h").astype("m8[ns]"),
        }
    ),
    "other axes": xr.Dataset(
        {"a": (("x", "time"), np.arange(8.0).reshape(2, 4)), "b": ("x", DATES[:2])}, {"lat": (("x", "time"), np.ones((2, 4)))}
    ),
}


@pytest.mark.parametrize("name", ["a.nc", "a.h5", "a.zarr"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_appended_to(comm: Any, shared_tmp_path: Path, name: str, kind: str) -> None:
    """Wrong if a kind of values that `save` writes were refused by `append`, or came back as another kind."""
    whole, path = KINDS[kind].copy(), shared_tmp_path / name
    for dim in set(whole.dims) - set(whole.coords):  # else plain HDF5 has no names of axes for xarray
        whole[dim] = np.arange(whole.sizes[dim])
    shardload.save(path, whole.isel(time=slice(3)), unlimited="time")
    shardload.append(path, whole.isel(time=slice(3, None)), dim="time")
    on_root(comm, lambda: xr.testing.assert_identical(opened(path), whole))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["a.nc", "a.zarr"])
def test_names_in_another_order_on_another_rank(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if the order of a Dataset, or of a dict, had to be that of rank 0."""
    path, mesh = shared_tmp_path / name, mesh_of()

    def turned(given: Any) -> Any:
        return dict(list(given.items())[:: -1 if comm.rank else 1])

    def made(start: int) -> xr.Dataset:
        values = {key: ("t", np.arange(3.0) + start + k) for k, key in enumerate("ba")}
        return xr.Dataset(turned(values), attrs=turned({"one": 1, "two": 2}))

    shardload.save(path, made(0), unlimited="t", attrs=turned({"a": turned({"k": 1, "j": 2}), "b": {}}))
    shardload.append(path, made(3), dim="t")
    shardload.append(path, turned({"a": np.arange(3.0) + 7, "b": np.arange(3.0) + 6}), dim="t")
    how: dict[str, Any] = {"dataset": turned({"x": "a", "y": "b"}), "select": turned({"t": slice(2, 8)}), "dtype": "f4"}
    found = shardload.load(path, mesh, P(), **how)
    np.testing.assert_array_equal(found["x"], np.arange(3, 9))
    np.testing.assert_array_equal(found["y"], np.arange(2, 8))
    shardload.save(shared_tmp_path / "b.nc", {"z": np.zeros((2, 3))}, dims={"z": ("t", "x")})
    part = shardload.load(shared_tmp_path / "b.nc", mesh, P(), select=turned({"t": 1, "x": slice(0, 2)}), dtype="f4")
    assert part.shape == (2,)
    saved = on_root(comm, lambda: opened(path))
    assert name == "a.zarr" or list(saved.variables) == ["b", "a"]
    np.testing.assert_array_equal(saved["b"], np.arange(9))


@pytest.mark.parametrize("name", ["a.nc", "a.zarr"])
def test_a_dataset_is_appended(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if rows went along another axis, or numbers in other units were added; or if a time of a Dataset, an array without
    axes, were no date from which on rows are replaced.
    """
    path, n = shared_tmp_path / name, unit()

    def make(start: int, put: Any = lambda values: values) -> xr.Dataset:
        values = np.arange(n * n * 3, dtype="f4").reshape(n, n, 3) + start
        hours = (np.arange(n) + start) * 6
        attrs = {"units": "hours since 2000-01-01", "calendar": "noleap", "bounds": "ends"}
        ends = ("time", "two"), np.stack([hours - 3, hours + 3], 1)
        return xr.Dataset(
            {"t": (("time", "lat", "lon"), put(values), {"units": "K"}), "ends": ends},
            {"time": ("time", hours, attrs), "lat": np.arange(float(n))},
        )

    def sharded(values: Any) -> Any:
        return put(values, mesh_of(), P("a", "b"))

    shardload.save(path, make(0, sharded), unlimited="time", compression="gzip")
    more = make(n, sharded)
    numbers, days = dict.fromkeys(("time", "packed", "other"), np.arange(n)), np.full(n, "2000-01-11", "M8[D]")
    attrs = {"time": {"units": "days since 2000-01-01"}}
    attrs["packed"] = attrs["time"] | {"scale_factor": 0.5}
    how = {"dims": dict.fromkeys(numbers, ("time",)), "unlimited": "time", "chunks": 3, "attrs": attrs}
    shardload.save(out := shared_tmp_path / "b.h5", numbers, **how)
    for key, says in (("packed", "holds packed numbers, with scale_factor=0.5"), ("other", "has no units")):  # no bounds
        same_error(comm, lambda k=key: shardload.append(out, numbers | {k: days}), ConfigError, says)  # type: ignore[misc]

    def dated(**attrs: str) -> xr.Dataset:
        """With dates, which become numbers by the units of the file, as a save makes them."""
        return xr.decode_cf(more.assign_coords(time=more.time.assign_attrs(attrs)))

    for given, *says in (
        (more.transpose("lat", "time", ...), "Pass it with .transpose('time', 'lat', 'lon')"),
        (more.rename(lat="y"), "has the axes ('time', 'lat', 'lon')"),
        (more.drop_vars("time"), "Pass 'time' too"),
        (more.drop_vars("ends"), "Pass 'ends' too"),
        (more.drop_dims("time"), "the axes of the object that is appended are 'lat'. Pass one of these"),
        (more.isel(time=-1), "the axes of the object that is appended are 'lat', 'lon', 'two'", "by .isel(time=[-1])"),
        (dated(calendar="360_day"), "these times cannot be appended to '/ends'", "this is a date of the calendar '360_day'"),
        (dated(units="minutes since 2000-01-01"), "in these units, which int64 does not have. Convert them"),
        (more.assign_coords(time=more.time.assign_attrs(units="days since 2000-01-01")), "has the units 'hours since"),
        (more.assign_coords(time=more.time.assign_attrs(calendar="360_day")), "has the calendar 'noleap'"),
    ):
        same_error(comm, lambda g=given: shardload.append(path, g), ConfigError, *says)  # type: ignore[misc]
    rows = dated() if name == "a.nc" else more
    assert shardload.append(path, rows).grown == dict.fromkeys(("/t", "/ends", "/time"), (n, 2 * n))
    first = dated().time[0]
    for at in (first, first.values, np.array(first.item().isoformat(), "M8[s]")):
        assert set(shardload.append(path, rows, at=at).kept.values()) == {n}
    wanted = xr.concat([make(0), make(n)], "time", data_vars=None, coords="minimal", compat="override", join="exact")
    on_root(comm, lambda: xr.testing.assert_identical(opened(path, decode_times=False), wanted))
