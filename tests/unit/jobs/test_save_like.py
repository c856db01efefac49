"""What does a new array take from the one that it is like?"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import jax
import netCDF4
import numpy as np
import pytest
import xarray
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload.formats.access import STRICT
from shardload.jobs.saving.arguments import SavedArray
from shardload.jobs.saving.like import _like, _read
from tests.tiers import quick_ones


def test_attributes_of_json_that_are_no_arrays(tmp_path: Path) -> None:
    """Wrong if like= failed, or left out a value, where the array that it names has attributes that NumPy has no type for; or
    if HDF5, which does not have them, were refused.
    """
    attrs = {"rows": [[1, 2], [3]], "large": 10**30, "mixed": [1, "a"], "object": {"a": [1, {}]}, "no": None, "units": "K"}
    zarr.open_group(tmp_path / "in.zarr", mode="w").create_array("x", shape=(4,), dtype="f4").attrs.update(attrs)
    how: dict[str, Any] = {"like": f"{tmp_path}/in.zarr:/x", "dataset": "x"}
    shardload.save(tmp_path / "out.zarr", np.zeros(4, "f4"), **how)
    assert dict(zarr.open_group(tmp_path / "out.zarr")["x"].attrs) == attrs
    with pytest.warns(shardload.LeftOutWarning, match="attribute 'no'"):
        shardload.save(tmp_path / "out.h5", np.zeros(4, "f4"), **how)
    with h5py.File(tmp_path / "out.h5") as file:
        assert dict(file["x"].attrs) == {"units": "K"}


@pytest.mark.parametrize("name", ["out.h5", "out.nc", "out.zarr"])
def test_complex_and_empty_attributes_of_an_array_in_like(tmp_path: Path, name: str) -> None:
    """Wrong if they were lost without a word, as the complex number that marks missing values, or text without a character."""
    kind = "f4" if name == "out.nc" else "c8"
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["x"] = np.arange(4, dtype=kind)
        file["x"].attrs.update({"none": h5py.Empty("S1"), "_FillValue": file["x"][1]})
        if name == "out.h5":
            file["x"].attrs.update({"z": np.complex64(2 + 3j), "row": np.array([1j, 2])})
    shardload.save(tmp_path / name, np.arange(4, dtype=kind), like=f"{tmp_path}/in.h5:/x", dataset="x")
    if name == "out.zarr":
        found = dict(zarr.open_group(tmp_path / name)["x"].attrs)
        assert found == {"none": "", "_FillValue": ["AAAAAAAA8D8=", "AAAAAAAAAAA="]}
        return
    with h5py.File(tmp_path / name) as file:
        found = {key: value for key, value in file["x"].attrs.items() if key in ("none", "_FillValue", "z", "row")}
    assert isinstance(found.pop("none"), h5py.Empty) and found.pop("_FillValue") == 1
    if name == "out.h5":
        assert found["z"].dtype == "c8" and found["z"] == 2 + 3j and found["row"].tolist() == [1j, 2]


@pytest.mark.parametrize("name", ["out.h5", "out.nc", "out.zarr"])
def test_text_that_netcdf_has_as_an_array_of_one(tmp_path: Path, name: str) -> None:
    """Wrong if it became a list in JSON: so the netCDF library stores text that is not ASCII."""
    with netCDF4.Dataset(tmp_path / "in.nc", "w") as file:
        file.createDimension("n", 4)
        file.createVariable("x", "f4", ("n",)).setncatts({"long_name": "Größe", "two": ["a", "ö"]})
    shardload.save(tmp_path / name, np.arange(4, dtype="f4"), like=f"{tmp_path}/in.nc:/x", dataset="x")
    found = shardload.open(tmp_path / name)["x"].attrs
    assert found["long_name"] == "Größe" and found["two"] == ["a", "ö"]


def test_decoded_values_like_those_that_were_unsigned(tmp_path: Path) -> None:
    """Wrong if unsigned values kept a valid range up to -6: no reader would find one that is valid."""
    path = f"{tmp_path}/in.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4, dtype="i1")
        file["x"].attrs.update({"_Unsigned": "true", "valid_max": np.int8(-6), "units": "K"})
    found = {}
    for kind in ("u1", "i1", "f4"):
        x = np.arange(4, dtype=kind)
        one = SavedArray("/x", x, x.shape, x.dtype, None, None, None, None, {})
        found[kind] = {*_like(one, _read(f"{path}:/x", STRICT).array, "hdf5")[0].attrs}
    assert found == {"u1": {"units"}, "i1": {"_Unsigned", "valid_max", "units"}, "f4": {"units"}}


@pytest.mark.parametrize("name", ["in.nc", "in.zarr"])
def test_coordinates_that_are_not_passed(tmp_path: Path, name: str) -> None:
    """Wrong if any were left out without a word; or if one were missed that is passed, or whose axis the new array has not."""
    lon, flags = np.arange(6.0).reshape(2, 3), np.array([True, False, True])
    coords = {
        "x": ["p", "q", "r"],  # texts along an axis
        "lon": (("y", "x"), lon, {"units": "degrees_east"}),
        "flags": ("x", flags),
        "height": ((), 2.0),
        "years": ("year", [1, 2]),  # of an axis that the array has not
    }
    old = xarray.Dataset({"t": (("y", "x"), np.zeros((2, 3))), "u": (("y", "x", "year"), np.zeros((2, 3, 2)))}, coords)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python: texts have no final form there
        old.to_netcdf(tmp_path / name) if name == "in.nc" else old.to_zarr(tmp_path / name)
    like = f"{tmp_path}/{name}:"
    with pytest.warns(shardload.LeftOutWarning) as said:
        shardload.plan_save(tmp_path / "out.nc", {"v": np.ones((2, 3))}, like=f"{like}/t")
    (told,) = (str(one.message) for one in said)
    assert all(f"'/{key}'" in told for key in ("x", "lon", "flags", "height")) and "years" not in told
    with pytest.warns(shardload.LeftOutWarning) as said:
        shardload.save(
            tmp_path / "out.nc",
            {"v": np.ones((2, 3)), "lon": lon, "height": 2.0},
            like={"v": f"{like}/t", "lon": f"{like}/lon"},
        )
    (told,) = (str(one.message) for one in said)
    assert "'/x'" in told and "'/flags'" in told and "lon" not in told and "height" not in told
    with xarray.open_dataset(tmp_path / "out.nc") as new:
        assert new.v.dims == ("y", "x") and set(new.v.coords) == {"lon", "height"}
        np.testing.assert_array_equal(new.lon, lon)
        assert new.lon.attrs == {"units": "degrees_east"}


def climate(path: Path) -> None:
    """A file of which each variable is named by attributes of others, in each way that CF has."""
    with netCDF4.Dataset(path, "w") as file:

        def add(name: str, kind: str, dims: tuple[str, ...], **attrs: Any) -> None:
            one = file.createVariable(name, kind, dims, fill_value=attrs.pop("_FillValue", None))
            one[:] = np.arange(one.size).reshape(one.shape)
            one.setncatts(attrs)

        for dim, n in {"time": 2, "lev": 3, "y": 4, "x": 5, "bnds": 2, "corners": 4, "n": 1000}.items():
            file.createDimension(dim, n)
        names = {"coordinates": "lon lat", "grid_mapping": "crs", "ancillary_variables": "flag large"}
        names["cell_measures"] = "area: area volume: elsewhere"
        add("t", "f4", ("time", "lev", "y", "x"), _FillValue=np.float32(1e20), **names)
        add("time", "f8", ("time",), units="days since 2000-01-01", climatology="time_bnds", valid_max=np.float32(1e6))
        add("time_bnds", "f8", ("time", "bnds"))
        add("lev", "f8", ("lev",), bounds="lev_bnds", formula_terms="a: a b: b ps: ps p0: p0")
        add("lev_bnds", "f4", ("lev", "bnds"))
        for name in ("a", "b"):
            add(name, "f4", ("lev",), units="1")
        add("p0", "f4", ())
        add("ps", "f4", ("time", "y", "x"), _FillValue=np.float32(1e20))
        add("lon", "f4", ("y", "x"), bounds="corners_of_lon", units="degrees_east")
        add("corners_of_lon", "f4", ("y", "x", "corners"))
        add("lat", "i2", ("y", "x"), scale_factor=np.float32(0.5), _FillValue=np.int16(-1))
        add("crs", "i4", (), grid_mapping_name="rotated_latitude_longitude", grid_north_pole_latitude=np.float32(39.25))
        add("flag", "i1", ("time", "lev", "y", "x"), flag_values=np.array([0, 1], "i1"), flag_meanings="bad good")
        add("large", "f4", ("y", "x", "n"))
        add("area", "f4", ("y", "x"))
        add("other", "f4", ("y", "x"), units="of nobody")


@pytest.mark.parametrize("suffix", quick_ones([".nc", ".h5", ".zarr"], ".nc", ".zarr"))
def test_variables_that_attributes_name(tmp_path: Path, suffix: str) -> None:
    """Wrong if an attribute named a variable that is not in the new file (the bounds of its times), and nothing said so; or if
    one that is packed, or an attribute, changed its type where each is passed.
    """
    climate(tmp_path / "in.nc")
    how: dict[str, Any] = {"engine": "zarr"} if suffix == ".zarr" else {"engine": "h5netcdf"}
    how |= {"phony_dims": "access"} if suffix == ".h5" else {}
    with xarray.open_dataset(tmp_path / "in.nc", decode_cf=False) as old:
        beside = set(old.variables) - {"t", "other"}
        with pytest.warns(shardload.LeftOutWarning) as said:
            shardload.plan_save(tmp_path / f"out{suffix}", {"t": old["t"].values}, like=f"{tmp_path}/in.nc:/t")
        text = str(said[0].message)
        n_more = int(text.partition(" and ")[2].partition(" more")[0])
        assert len(said) == 1 and sum(f"'/{name}'" in text for name in beside) + n_more == len(beside)
        with pytest.warns(shardload.LeftOutWarning, match="'/flag'") as said:  # the attribute stays
            shardload.plan_save(
                tmp_path / f"new{suffix}", {"t": old["t"].values[0]}, like=f"{tmp_path}/in.nc:/t", dims=("lev", "y", "x")
            )
        assert "time" not in str(said[0].message)
        passed = {name: old[name].values for name in beside | {"t"}}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shardload.save(tmp_path / f"out{suffix}", passed, like={name: f"{tmp_path}/in.nc:/{name}" for name in passed})
        with xarray.open_dataset(tmp_path / f"out{suffix}", decode_cf=False, **how) as new:
            assert set(new.variables) == set(passed)
            for name, one in new.variables.items():
                np.testing.assert_array_equal(one.values, old[name].values, strict=True)
                attrs = {key: value for key, value in one.attrs.items() if key != "DIMENSION_LABELS"}
                assert attrs.keys() == old[name].attrs.keys()
                for key, value in attrs.items():
                    np.testing.assert_array_equal(value, old[name].attrs[key], strict=suffix != ".zarr")
                assert suffix == ".h5" or one.dims == old[name].dims


@pytest.mark.parametrize("plan_name", [None, "t", "g/t"])
def test_the_plan_of_an_array_of_xarray_in_a_group(tmp_path: Path, plan_name: str | None) -> None:
    """Wrong if the plan were not found by the array's name, so that nothing said that the values were decoded."""
    packed = np.arange(8, dtype="f4")
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["t"] = packed
        file["t"].attrs["scale_factor"] = np.float32(0.5)
    like = f"{tmp_path}/in.h5:/t"
    plan = shardload.plan(like, jax.make_mesh((1,), ("a",)), P("a"), decode=True)
    computed = xarray.DataArray(plan.execute() + 1, dims="x")  # a load returned other values
    plans = plan if plan_name is None else {plan_name: plan}
    shardload.save(tmp_path / "out.h5", computed, dataset="g/t", plan=plans, like=like)
    with h5py.File(tmp_path / "out.h5") as file:
        np.testing.assert_array_equal(file["g/t"][()], packed * np.float32(0.5) + 1)
        assert "scale_factor" not in file["g/t"].attrs
