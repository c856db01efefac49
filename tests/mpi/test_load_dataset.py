"""Is what `load_dataset` gives what xarray opens, sharded, and do labels never give padding?"""

from __future__ import annotations

import contextlib
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import h5py
import jax
import netCDF4
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, LeftOutWarning, PaddingWarning, SourceError, between, near
from shardload.formats.labelling import Labeller
from shardload.jobs.dataset.loading import DatasetCall
from tests.mpi.support import mesh_of, on_root, same_error, unit, warned_once

pytestmark = [pytest.mark.any_library, pytest.mark.any_number]
N_FILES = 3
UNITS = "hours since 2000-01-01"


def climate(n_lat: int) -> xr.Dataset:
    """Packed values, a variable without time, bounds, coordinates of integers and of two axes; longer than it is wide."""
    n = 2 * N_FILES, n_lat, unit()
    values = np.arange(np.prod(n), dtype="i2").reshape(n)
    made = xr.Dataset(
        {
            "t": (("time", "lat", "lon"), values * np.float32(0.5), {"units": "K"}),
            "orog": (("lat", "lon"), np.arange(n[1] * n[2], dtype="f4").reshape(n[1:]), {"units": "m"}),
            "time_bnds": (("time", "nv"), np.arange(2.0 * n[0]).reshape(-1, 2)),
            "days": ("time", np.arange(n[0], dtype="i4")),  # integers, to which padding with NaN of other axes is nothing
        },
        coords={
            "time": ("time", pd.date_range("2000-01-30", periods=n[0])),
            "lat": ("lat", np.linspace(60, 40, n[1]), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(n[2], dtype="i4") * 10),
            "height": (("lat", "lon"), np.arange(n[1] * n[2], dtype="i4").reshape(n[1:])),
        },
        attrs={"title": "a run"},
    )
    made["time"].attrs["bounds"] = "time_bnds"
    made["t"].encoding.update(dtype="i2", scale_factor=np.float32(0.5), _FillValue=np.int16(-1))
    return made


def write(comm: Any, folder: Path, n_lat: int) -> list[str]:
    made = climate(n_lat)  # on every rank: it asks for JAX's devices
    paths = [str(folder / f"run_{k}.nc") for k in range(N_FILES)]

    def files() -> None:
        for k, path in enumerate(paths):
            made.isel(time=slice(2 * k, 2 * k + 2)).to_netcdf(
                path, engine="h5netcdf", encoding={"time": {"dtype": "i8", "units": UNITS}}, unlimited_dims=["time"]
            )

    on_root(comm, files)
    return paths


def opened(paths: list[str]) -> xr.Dataset:
    """What xarray has of the files, without the bounds: as from open_mfdataset, which needs dask."""
    how: dict[str, Any] = {"data_vars": "minimal", "coords": "minimal", "compat": "override", "join": "exact"}
    parts = [xr.load_dataset(path, engine="h5netcdf") for path in paths]
    return xr.combine_by_coords(parts, **how).drop_vars("time_bnds")


def gathered(ds: xr.Dataset) -> xr.Dataset:
    """The same with NumPy arrays, whole on each process."""
    return shardload.unpad(ds, numpy=True)


def test_files_are_one_dataset(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong, too, if only a pattern with ``*`` were one, or a file were one whose name has the signs of a pattern."""
    paths = write(comm, shared_tmp_path, 2 * unit())
    wanted, mesh = opened(paths), mesh_of()
    patterns = [(str(shared_tmp_path / name), along) for name, along in (("run_*.nc", "time"), ("run_?.nc", None))]
    for files, along in (*patterns, (paths, "time"), (shardload.concat(paths, "time"), None)):
        ds = shardload.load_dataset(files, mesh, {"lat": "a", "lon": "b"}, along=along)
        assert isinstance(ds.t.data, jax.Array) and ds.t.data.sharding.spec == P(None, "a", "b")
        assert ds.orog.data.sharding.spec == P("a", "b")
        xr.testing.assert_identical(gathered(ds), wanted)

    def without_orog() -> None:
        with h5py.File(paths[-1], "r+") as file:
            del file["orog"]

    on_root(comm, without_orog)
    named = shardload.load_dataset(paths, mesh, {"lon": "b"}, along="time", dataset=["t"])  # which all files have
    assert gathered(named).t.equals(wanted.t)
    odd = str(shared_tmp_path / "run[0].nc")
    on_root(comm, lambda: shutil.copy(paths[0], odd))
    one = shardload.load_dataset(f"{odd}:/", mesh, {"lon": "b"}, dataset="t", select={"time": near("2000-01-31"), "lat": 1})
    xr.testing.assert_identical(
        gathered(one), wanted[["t"]].isel(time=1, lat=1).drop_attrs(deep=False).assign_attrs(wanted.attrs)
    )


def test_each_variable_takes_what_it_has_of_a_selection(comm: Any, shared_tmp_path: Path) -> None:
    paths = write(comm, shared_tmp_path, 2 * unit())
    select = {"time": between("2000-01-31", "2000-02-02"), "lat": slice(0, unit())}
    ds = shardload.load_dataset(paths, mesh_of(), {"lat": "a"}, along="time", select=select, verify="full")
    wanted = opened(paths).sel(time=slice("2000-01-31", "2000-02-02")).isel(lat=slice(0, unit()))
    xr.testing.assert_identical(gathered(ds), wanted)
    names = ["orog", "days"]  # which have no axis in common, as those of a staggered grid
    ds = shardload.load_dataset(paths, mesh_of(), {"lat": "a", "time": "a"}, along="time", dataset=names, pad=0)
    assert [x.data.sharding.spec for x in (ds.orog, ds.days)] == [P("a"), P("a")]
    xr.testing.assert_equal(gathered(ds), opened(paths)[names])


def test_padding_beside_a_dropped_axis(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the coordinate of the dropped axis, a single number, were padded too: an error of NumPy."""
    n = 2 * unit() + 1
    paths = write(comm, shared_tmp_path, n)
    ds = shardload.load_dataset(paths[0], mesh_of(), {"lat": ("a", "b")}, select={"time": 1}, pad=float("nan"))
    xr.testing.assert_identical(gathered(ds), opened(paths[:1]).isel(time=1))


def test_dates_that_xarray_does_not_decode(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if it were an error of xarray, which names no file and says to open it with an option that is not there; or if what
    the error says to type did not load the values.
    """
    files, mesh, spec = str(shared_tmp_path / "months.nc"), mesh_of(), None
    time = ("time", np.arange(4.0), {"units": "months since 2000-01-01"})
    made = xr.Dataset({"t": (("time", "lat"), np.ones((4, 3), "f4"))}, {"time": time})
    on_root(comm, lambda: made.to_netcdf(files, engine="h5netcdf"))
    error = same_error(comm, lambda: shardload.load_dataset(files, mesh), SourceError, "months.nc", "'months since")
    names = {"shardload": shardload, "files": files, "mesh": mesh, "spec": spec}
    exec(str(error).partition("they are loaded by: ")[2].replace("; shardload", "; t = shardload"), names)
    assert names["t"].time.values.tolist() == [0, 1, 2, 3] and names["t"].shape == (4, 3)


def test_labels_never_give_padding(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the index had NaN, of which `nearest` makes an error, or numbers for the padding, which it would find."""
    n = 2 * unit() + 1
    paths = write(comm, shared_tmp_path, n)
    wanted = opened(paths)
    mesh = mesh_of()
    ds = shardload.load_dataset(paths, mesh, {"lat": ("a", "b"), "time": None}, along="time", pad=float("nan"))
    padded = ds.sizes["lat"] > n
    assert padded == (len(jax.devices()) > 1)
    assert np.isnan(ds.lat.values[n:]).all() and np.isnan(ds.height.values[n:]).all() and "lon" in ds.coords
    index, right = (each.drop_vars(["t", "orog", "height"]) for each in (ds, wanted))  # arrays would be compiled for each
    for labels in ({"lat": -90.0}, {"lat": 90.0}, {"lat": 51.3}, {"lat": [41.0, 59.0]}, {"time": "2031-01-01"}):
        nearest, expected = (each.sel(labels, method="nearest") for each in (index, right))  # type: ignore[arg-type]
        for name in labels:
            np.testing.assert_array_equal(nearest[name], expected[name])
    for ends in (slice(None, 0), slice(55, None), slice(55, 45), slice(None)):
        assert index.sel(lat=ends).sizes == right.sel(lat=ends).sizes
    assert ds.sel(lat=slice(55, 45)).sizes == wanted.sel(lat=slice(55, 45)).sizes
    assert index.isel(lat=slice(2, None)).sel(lat=0, method="nearest").lat == 40
    assert index.isel(lat=[1, 2, 3]).sel(lat=0, method="nearest").lat == wanted.lat[3]
    assert index.rename(lat="y").sel(y=100, method="nearest").y == 60
    np.testing.assert_array_equal(index.isel(lat=slice(2, n)).lat, wanted.lat[2:])
    twice = 2 * ds
    assert (twice.orog + ds.orog).sizes == ds.orog.sizes
    xr.testing.assert_identical(gathered(ds), wanted)
    xr.testing.assert_identical(gathered(twice), 2 * wanted)
    alone = shardload.unpad(twice.t, numpy=True)
    xr.testing.assert_identical(alone, 2 * wanted.t)
    xr.testing.assert_identical(gathered(twice.rename_dims(lat="y")), 2 * wanted.rename_dims(lat="y"))
    half = shardload.unpad(ds.orog.rename("h"), sharding=jax.sharding.NamedSharding(mesh, P()))
    assert half.shape == (n, unit()) and isinstance(half.data, jax.Array) and half.name == "h"


def test_points_along_an_axis_of_their_own(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the index of the padded axis stayed: the coordinate of the points would be along that axis, not along theirs."""
    paths = write(comm, shared_tmp_path, 2 * unit() + 1)
    ds = shardload.load_dataset(paths, mesh_of(), {"lat": ("a", "b")}, along="time", pad=float("nan"))
    index, right = (each.drop_vars(["t", "orog", "height"]) for each in (ds, opened(paths)))
    for dims, lats in (("points", [59.0, 41.0]), (("p", "q"), [[59.0, 41.0]])):
        points = {"lat": xr.DataArray(lats, dims=dims)}
        xr.testing.assert_equal(index.sel(points, method="nearest"), right.sel(points, method="nearest"))


def test_means_and_groups_leave_padding_out(comm: Any, shared_tmp_path: Path) -> None:
    """Along time, whose rows with NaT belong to no month; and of what has the axis still, the padding can be taken off."""
    paths = write(comm, shared_tmp_path, 2 * unit() + 1)
    mesh = mesh_of(names=("a",))
    wanted = opened(paths)
    ds = shardload.load_dataset(paths, mesh, {"time": "a"}, along="time", dataset="t", pad=float("nan"))
    months = ds.t.groupby("time.month").mean("time").compute()
    xr.testing.assert_allclose(gathered(months), wanted.t.groupby("time.month").mean("time"))
    mean = ds.t.mean(("lat", "lon"))
    assert mean.sizes["time"] == ds.sizes["time"]
    xr.testing.assert_allclose(gathered(mean), wanted.t.mean(("lat", "lon")))


def test_a_dataset_with_padding_is_saved_without_it(comm: Any, shared_tmp_path: Path) -> None:
    n = 2 * unit() + 1
    paths = write(comm, shared_tmp_path, n)
    ds = shardload.load_dataset(paths, mesh_of(), {"lat": ("a", "b")}, along="time", pad=float("nan"))
    out = shared_tmp_path / "out.nc"
    shardload.save(out, 2 * ds)
    xr.testing.assert_equal(xr.load_dataset(out, engine="h5netcdf"), 2 * opened(paths))
    shardload.save(out, (2 * ds).rename_dims(lat="y"), mode="w")
    assert xr.load_dataset(out, engine="h5netcdf").sizes["y"] == n
    for moved in (ds.isel(lat=slice(None, None, -1)), ds.roll(lat=1, roll_coords=True)):
        if ds.sizes["lat"] > n:
            same_error(comm, lambda m=moved: shardload.save(out, m, mode="w"), ConfigError, "coordinate 'lat' has", "shape=")  # type: ignore[misc]


@pytest.mark.parametrize("name", ["out.nc", "out.zarr"])
def test_integers_of_an_axis_with_padding_are_saved_as_integers(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if the labels of stations became floating point numbers, as which they go on with NaN, and were rounded by that.
    So were other identifiers, also in the Dataset. Wrong, too, if what is no index were saved, or unpadded, as float64.
    """
    path, n = shared_tmp_path / "in.nc", 2 * unit() + 1
    numbers = 2**53 + 1 + np.arange(n)
    coords = {"station": numbers, "owner": ("station", -numbers), "key": ("station", numbers.astype("u8") + 2**63)}
    coords |= {"height": ("station", np.arange(n, dtype="i2")), "is_open": ("station", np.arange(n) % 2 == 0)}
    stations = xr.Dataset({"t": ("station", np.arange(n, dtype="f4"))}, coords)
    on_root(comm, lambda: stations.to_netcdf(path, engine="h5netcdf"))
    is_padded = mesh_of().shape["a"] > 1
    with warned_once(comm, PaddingWarning) if is_padded else contextlib.nullcontext([]) as told:
        ds = shardload.load_dataset(path, mesh_of(), {"station": "a"}, pad=0)
    assert not told or "count the padding of /t, which is 0. Pass pad=np.nan (and dtype='float32' for integers)" in told[0]
    for coordinate in coords:
        assert ds[coordinate].values[:n].tolist() == stations[coordinate].values.tolist()
    shardload.save(shared_tmp_path / name, ds)
    unpadded = gathered(ds)
    for coordinate in coords:
        np.testing.assert_array_equal(unpadded[coordinate].values, stations[coordinate].values, strict=True)
    changed = gathered(ds.assign_coords(height=ds.height.copy(data=np.where(ds.height == 1, 0.5, ds.height))))
    assert changed.height.values[:3].tolist() == [0, 0.5, 2]
    saved = on_root(comm, lambda: xr.load_dataset(shared_tmp_path / name, engine="h5netcdf" if name == "out.nc" else "zarr"))
    for coordinate in coords:
        np.testing.assert_array_equal(saved[coordinate].values, stations[coordinate].values, strict=True)


def test_dates_with_padding_are_saved_in_the_units_of_the_file(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if padding dropped what is known of the dates: xarray would choose units and a type of its own. Wrong, too, if
    padding were written that is not at the end, where the axis was flipped.
    """
    paths, out = write(comm, shared_tmp_path, 3), shared_tmp_path / "out.nc"
    mesh, select = mesh_of(names=("a",)), {"time": slice(0, 5)}
    ds = shardload.load_dataset(paths, mesh, {"time": "a"}, along="time", dataset="t", select=select, pad=float("nan"))
    shardload.save(out, ds)
    with netCDF4.Dataset(out) as file:
        assert file["time"].units == UNITS and file["time"].dtype == "i8"
        np.testing.assert_array_equal(file["time"][:], np.arange(5) * 24 + 29 * 24)
    flipped = ds.isel(time=slice(None, None, -1))
    if ds.sizes["time"] > 5:
        same_error(comm, lambda: shardload.save(out, flipped, mode="w"), ConfigError, "coordinate 'time' has", "NaN among")


@pytest.mark.parametrize("name", ["out.nc", "out.zarr"])
def test_bounds_keep_their_times(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if bounds, numbers that count as their coordinate does, were taken for numbers in the units of another file, or in
    those that a changed coordinate gets.
    """
    years, mesh, out = [], mesh_of(names=("a",)), shared_tmp_path / name
    for year in (2001, 2002):
        time = pd.date_range(f"{year}-01-01 12:00", periods=3)
        bounds = ("time", "nv"), np.stack([time, time + pd.Timedelta("1D")], 1)
        made = xr.Dataset({"t": (("time", "x"), np.ones((3, unit()), "f4")), "ends": bounds}, {"time": time})
        made["time"].attrs["bounds"] = "ends"
        for dates in (made["time"], made["ends"]):
            dates.encoding |= {"units": f"hours since {year}-01-01 12:00:00", "dtype": "i4"}
        on_root(comm, lambda made=made, year=year: made.to_netcdf(shared_tmp_path / f"{year}.nc", engine="h5netcdf"))  # type: ignore[misc]
        years.append(shardload.load_dataset(shared_tmp_path / f"{year}.nc", mesh, {"x": "a"}, dataset=["t", "ends"]))
    first, second = years

    def saved() -> xr.Dataset:
        return on_root(comm, lambda: xr.load_dataset(out, engine="zarr" if name == "out.zarr" else "h5netcdf"))

    shardload.save(out, first.assign_coords(time=(first.time + np.timedelta64(1, "h")).assign_attrs(first.time.attrs)))
    np.testing.assert_array_equal(saved().ends, xr.decode_cf(first[["ends"]]).ends)
    shardload.save(out, first, unlimited="time", mode="w")
    same_error(comm, lambda: shardload.append(out, second), ConfigError, "'/ends' in", "the units 'hours since 2001-01-01")
    later = xr.decode_cf(second[["ends"]]).ends
    shardload.append(out, second.assign(ends=later))
    np.testing.assert_array_equal(saved().ends[3:], later)
    shardload.append(out, first, at="2001")  # its units are the same in other words
    np.testing.assert_array_equal(saved().ends, xr.decode_cf(first[["ends"]]).ends)


def test_a_group_and_what_holds_no_numbers(comm: Any, shared_tmp_path: Path) -> None:
    path = str(shared_tmp_path / "g.h5")

    def groups() -> None:
        with h5py.File(path, "w") as file:
            for name in ("a", "b"):
                file[f"{name}/rho"] = np.arange(4 * unit(), dtype="f4").reshape(unit(), -1)
            file["a/names"] = ["x", "y"]

    on_root(comm, groups)
    with warned_once(comm, LeftOutWarning) as told:
        ds = shardload.load_dataset(f"{path}:/a", mesh_of())
    assert all("/a/names" in text for text in told)
    assert list(ds.variables) == ["rho"] and ds.rho.dims == ("dim_0", "dim_1")
    for call, *says in (
        (lambda: shardload.load_dataset(path, mesh_of()), "has no data variables"),
        (lambda: shardload.load_dataset(path, mesh_of(), dataset="rho"), "holds no array '/rho'", "/a/rho"),
        (
            lambda: shardload.load_dataset(path, mesh_of(), dataset=["a/rho", "b/rho"]),
            "have the same last name",
        ),  # not one alone
        (lambda: shardload.load_dataset(f"{path}:/b", mesh_of(), select={"tim": 0}), "select names the axis 'tim'"),
        (lambda: shardload.load_dataset(f"{path}:/b", mesh_of(), {"lat": "a"}), "names the axis 'lat'"),
        (lambda: shardload.load_dataset(f"{path}:/b", mesh_of(), select=slice(2)), "expected a dict by names of axes"),
    ):
        same_error(comm, call, ConfigError, *says)


def test_odd_variables_of_netcdf(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if `dtype` were asked of a grid mapping or a mesh: what netCDF has where nothing was written does not fit into
    float32. Wrong if a variable that has an axis twice were an error of all, or if one with the name of an axis were lost.
    """
    path, n = str(shared_tmp_path / "crs.nc"), 4 * unit()

    def make() -> None:
        with netCDF4.Dataset(path, "w") as file:
            file.createDimension("x", n)
            file.createDimension("y", 2)
            packed = file.createVariable("t", "i2", ("x",))
            packed.scale_factor, packed.grid_mapping = 0.5, "crs"
            packed[:] = np.arange(n)
            packed.mesh = "mesh"
            file.createVariable("crs", "i4", ()).grid_mapping_name = "rotated_latitude_longitude"
            file.createVariable("mesh", "i4", ()).cf_role = "mesh_topology"
            file.createVariable("x", "f4", ("y", "x"))[:] = 1  # no coordinate of x
            file.createVariable("y", "f4", ("y", "x"))[:] = 2  # for netCDF one of y, of two axes
            file.createVariable("covariance", "f4", ("y", "y"))[:] = 3

    on_root(comm, make)
    with warned_once(comm, LeftOutWarning) as told:
        ds = shardload.load_dataset(path, mesh_of(), {"x": "a"}, dtype="float32")
    assert all("have an axis twice" in text and "/covariance" in text for text in told)
    assert ds.t.dtype == np.float32 and ds.crs.dtype == np.int32
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Duplicate dimension")
        expected = xr.load_dataset(path)
        np.testing.assert_array_equal(shardload.unpad(ds.t, numpy=True), expected.t.values.astype("f4"))
        for name in ("crs", "mesh"):
            assert int(ds[name]) == int(expected[name]) and ds[name].attrs == expected[name].attrs
        for name in ("x", "y"):
            assert ds[name].dims == expected[name].dims == ("y", "x")
            np.testing.assert_array_equal(shardload.unpad(ds, numpy=True)[name], expected[name])


def test_short_words_of_units_are_saved(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the units of the file went to xarray's encoder as they are: it fails with KeyError: 'hs'."""
    path, saved = shared_tmp_path / "short.nc", shared_tmp_path / "saved.nc"
    times = {word: (word, np.arange(3.0), {"units": f"{word} since 2000-01-01 12:00"}) for word in ("h", "hr", "sec", "day")}
    made = xr.Dataset({f"t_{word}": (word, np.arange(3.0)) for word in times}, times)
    on_root(comm, lambda: made.to_netcdf(path, engine="h5netcdf"))
    shardload.save(saved, shardload.load_dataset(path, mesh_of(), dtype="float32"))
    found, expected = on_root(comm, lambda: [xr.load_dataset(name, engine="h5netcdf") for name in (saved, path)])
    xr.testing.assert_equal(found, expected)
    assert found.hr.encoding["units"].startswith("hours since 2000-01-01")


def test_a_year_of_hours_has_its_times(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if coordinates that take more than a page or two were left out: hours of a year, a curvilinear grid."""
    n, path = 8784, str(shared_tmp_path / "hours.nc")
    made = xr.Dataset(
        {"t": (("time", "x"), np.arange(n * unit(), dtype="f4").reshape(n, -1))},
        {"time": pd.date_range("2000-01-01", periods=n, freq="h"), "lat": (("time", "x"), np.zeros((n, unit())))},
    )
    on_root(comm, lambda: made.to_netcdf(path, engine="h5netcdf"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = shardload.load_dataset(path, mesh_of(), {"x": "a"})
    xr.testing.assert_identical(loaded.coords.to_dataset(), made.coords.to_dataset())


def test_coordinates_that_are_left_out_are_named(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a coordinate of texts, or one that is too large, was left out without a word."""
    path = str(shared_tmp_path / "stations.nc")
    made = xr.Dataset(
        {"t": (("station",), np.arange(float(unit()), dtype="f4"))},
        {"station": [f"s{k}" for k in range(unit())], "height": ("station", np.arange(float(unit())))},
    )
    on_root(comm, lambda: made.to_netcdf(path, engine="h5netcdf"))
    monkeypatch.setattr("shardload.jobs.dataset.loading.COORDINATE_NBYTES", 8 * unit() - 1)
    with warned_once(comm, LeftOutWarning) as told:
        loaded = shardload.load_dataset(path, mesh_of(), {"station": "a"})
    assert all("/height, /station" in text for text in told)
    assert not loaded.coords


def test_coordinates_that_no_variable_has_are_named(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if what is a coordinate along axes that no variable has, or of other coordinates alone, were left out without a
    word; or if a variable were taken for the bounds of a coordinate that names none.
    """
    path, names = str(shared_tmp_path / "apart.nc"), ["elev", "lat", "lon", "plev"]

    def make() -> None:
        with netCDF4.Dataset(path, "w") as file:
            for name, n in (("time", 3), ("station", 2), ("plev", 4), ("y", unit())):
                file.createDimension(name, n)
            for name, dim in (("time", "time"), ("plev", "plev"), ("elev", "station"), ("lat", "y"), ("lon", "y")):
                file.createVariable(name, "f4", (dim,))[:] = 1
            file["lat"].coordinates = file["lon"].coordinates = "lon lat"
            for name in ("t", "None"):
                file.createVariable(name, "f4", ("time", "y"))[:] = 2
            file["t"].coordinates = "elev"

    on_root(comm, make)
    with warned_once(comm, LeftOutWarning) as told:
        loaded = shardload.load_dataset(path, mesh_of(), {"y": "a"})
    assert all(f"/{name}" in text for text in told for name in names)
    assert set(loaded.variables) == {"None", "t", "time"}
    by_name = shardload.load_dataset(path, mesh_of(), {"y": "a"}, dataset=["t", *names])
    assert set(by_name.coords) == set(xr.load_dataset(path).coords) == {"time", *names}


@pytest.mark.parametrize("dtype", ["i4", "f8"])
def test_a_coordinate_that_is_shorter_than_its_axis(comm: Any, shared_tmp_path: Path, dtype: str) -> None:
    """Wrong if times of whole numbers were left out, a position behind the last time were NumPy's error, or rows behind it were
    taken for padding of what was computed.
    """
    path, n, data = str(shared_tmp_path / "grows.nc"), unit(), np.arange(5 * unit(), dtype="f4").reshape(5, -1)

    def make() -> None:
        with netCDF4.Dataset(path, "w") as file:
            file.createDimension("time", None)
            file.createDimension("x", n)
            file.createVariable("time", dtype, ("time",))[:3] = [0, 1, 2]
            file["time"].units = "days since 2000-01-30"
            file.createVariable("t", "f4", ("time", "x"))[:] = data

    on_root(comm, make)
    ds = shardload.load_dataset(path, mesh_of(names=("a",)), {"x": "a"})
    assert str(ds.time.values[2])[:10] == "2000-02-01" and np.isnat(ds.time.values).tolist() == [False] * 3 + [True] * 2
    np.testing.assert_array_equal(shardload.unpad(ds, numpy=True).t, data)
    shardload.save(shared_tmp_path / "out.nc", ds)
    saved = on_root(comm, lambda: xr.load_dataset(shared_tmp_path / "out.nc"))
    assert np.isnat(saved.time.values).tolist() == [False] * 3 + [True] * 2 and saved.t.values.tolist() == data.tolist()
    same_error(comm, lambda: shardload.unpad(2 * ds, numpy=True), ConfigError, "Pass the plan too, or the shape")
    np.testing.assert_array_equal(shardload.unpad(2 * ds, {"t": (5, n)}, numpy=True).t, 2 * data)
    last = shardload.load_dataset(path, mesh_of(names=("a",)), {"x": "a"}, select={"time": 4})
    assert np.isnat(last.time.values)
    np.testing.assert_array_equal(shardload.unpad(last, numpy=True).t, data[4])


@pytest.mark.parametrize(("name", "value"), [("timeout", "soon"), ("dataset", 5), ("dataset", ["t", 5])])
def test_a_wrong_option_on_one_rank_is_one_error(comm: Any, shared_tmp_path: Path, name: str, value: Any) -> None:
    """Wrong if one rank raised before the ranks have met, and the others waited for it."""
    (path, *_) = write(comm, shared_tmp_path, 2 * unit())
    options: dict[str, Any] = {"timeout": 60} | ({name: value} if comm.rank == comm.size - 1 else {})
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}")):
        shardload.load_dataset(path, mesh_of(), **options)


def test_only_what_is_loaded_is_looked_at(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the coordinates of all arrays of a file were read, up to 16 MiB each, for the variable that was named; or those
    of other groups, of which none is loaded.
    """
    path = str(shared_tmp_path / "groups.nc")

    def groups() -> None:
        for group, name, mode in (("/", "x", "w"), ("/", "y", "a"), ("/below", "z", "a")):
            made = xr.Dataset({f"of_{name}": (name, np.ones(3, "f4"))}, {name: np.arange(3.0)})
            made.to_netcdf(path, group=group, mode=mode, engine="h5netcdf")

    on_root(comm, groups)
    read, read_coordinate = list[str](), Labeller._coordinate

    def reading(labeller: Labeller, file: Any, dataset: str) -> Any:
        read.append(dataset)
        return read_coordinate(labeller, file, dataset)

    monkeypatch.setattr(Labeller, "_coordinate", reading)
    for dataset, names in (("of_x", ["/x"]), (None, ["/x", "/y"])):
        read.clear()
        loaded = shardload.load_dataset(path, mesh_of(), dataset=dataset)
        assert comm.allgather(sorted(read)) == [names, *[[]] * (comm.size - 1)]
        assert set(loaded.coords) == {name[1:] for name in names}


def test_what_a_save_has_left_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the file were opened for its names first, and loaded then without another look: it may be half of a file."""
    path = str(shared_tmp_path / "run.nc.0123456789abcdef.unfinished")
    on_root(comm, lambda: xr.Dataset({"t": ("x", np.ones(3, "f4"))}).to_netcdf(path, engine="h5netcdf"))
    same_error(comm, lambda: shardload.load_dataset(path, mesh_of()), SourceError, "that a save to")


def test_a_file_that_is_replaced_before_its_values_are_read(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if values of one version got coordinates of another; or if the error spoke of a selection, where there is none."""
    path, make = shared_tmp_path / "run.nc", DatasetCall.make

    def write_version(n: int) -> None:
        made = xr.Dataset({"t": ("x", np.full(3, n, "f4"))}, {"x": np.arange(3) + n}, {"history": "x" * n})
        made.to_netcdf(shared_tmp_path / "new.nc", engine="h5netcdf")
        (shared_tmp_path / "new.nc").rename(path)

    def replacing(call: DatasetCall, arrays: Any) -> Any:
        on_root(comm, lambda: write_version(1000))
        return make(call, arrays)

    on_root(comm, lambda: write_version(1))
    monkeypatch.setattr(DatasetCall, "make", replacing)
    error = same_error(
        comm, lambda: shardload.load_dataset(path, mesh_of()), SourceError, "has changed since its axes and coord"
    )
    assert "select" not in str(error)
