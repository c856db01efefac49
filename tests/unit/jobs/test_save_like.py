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
def test_attributes_of_coordinates_that_a_format_does_not_hold(tmp_path: Path, name: str) -> None:
    """Wrong if one of them were an error, of an array that nobody passed, or were lost without a word."""
    old = zarr.open_group(tmp_path / "in.zarr", mode="w")
    for key in ("x", "t"):
        old.create_array(key, shape=(4,), dtype="f4", dimension_names=["t"])
    old["t"].attrs.update({"units": "s", "rows": [[1, 2], [3]], "null": None, "mixed": [1, "a"], "object": {"a": [1, {}]}})
    old["t"].attrs.update({"many": list(range(5000)), "long": "l" * 5000})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shardload.save(tmp_path / name, {"y": np.zeros(4)}, like=f"{tmp_path}/in.zarr:/x")
    if name == "out.zarr":
        assert not said and dict(zarr.open_group(tmp_path / name)["t"].attrs) == dict(old["t"].attrs)
        return
    with xarray.open_dataset(tmp_path / name, engine="h5netcdf", decode_cf=False) as new:
        assert new["t"].attrs.pop("many").tolist() == list(range(5000))
        assert new["t"].attrs == {"units": "s", "long": "l" * 5000}
    (told,) = (str(one.message) for one in said)
    assert all(f"attribute {key!r} of '/t' in" in told for key in ("rows", "null", "mixed", "object"))


@pytest.mark.parametrize("name", ["out.h5", "out.nc", "out.zarr"])
def test_text_that_netcdf_has_as_an_array_of_one(tmp_path: Path, name: str) -> None:
    """Wrong if it became a list in JSON: so the netCDF library stores text that is not ASCII."""
    with netCDF4.Dataset(tmp_path / "in.nc", "w") as file:
        file.createDimension("n", 4)
        file.createVariable("x", "f4", ("n",)).setncatts({"long_name": "Größe", "two": ["a", "ö"]})
    shardload.save(tmp_path / name, np.arange(4, dtype="f4"), like=f"{tmp_path}/in.nc:/x", dataset="x")
    found = shardload.open(tmp_path / name)["x"].attrs
    assert found["long_name"] == "Größe" and found["two"] == ["a", "ö"]


@pytest.mark.parametrize("units", ["hours", "days"])
def test_two_arrays_in_like_with_coordinates_of_one_name(tmp_path: Path, units: str) -> None:
    """Wrong if one array got the coordinate of the other without a word."""
    for name, unit in (("a.nc", "hours"), ("b.nc", units)):
        dims, attrs = {"x": ("t",), "t": ("t",)}, {"t": {"units": f"{unit} since 2000-01-01"}}
        shardload.save(tmp_path / name, {"x": np.zeros(3), "t": np.array([np.nan, 2, 3])}, dims=dims, attrs=attrs)
    dims = {"x": ("t",), "t": ("t",)}
    shardload.save(tmp_path / "c.nc", {"x": np.zeros(3), "t": np.array([1.0, 2, 4])}, dims=dims)
    like = {"u": f"{tmp_path}/a.nc:/x", "v": f"{tmp_path}/b.nc:/x"}
    tree: dict[str, Any] = {"u": np.zeros(3), "v": np.ones(3)}
    if units == "hours":
        shardload.save(tmp_path / "same.nc", tree, like=like)
        like["v"] = f"{tmp_path}/c.nc:/x"
    with pytest.raises(shardload.ConfigError, match=r"have different coordinates 't'\. Pass its values, 't', with dims="):
        shardload.save(tmp_path / "out.nc", tree, like=like)
    shardload.save(tmp_path / "groups.nc", {"u": tree["u"], "g/v": tree["v"]}, like={"u": like["u"], "g/v": like["v"]})
    shardload.save(tmp_path / "out.nc", tree | {"t": np.arange(3)}, like=like, dims={"t": ("t",)})
    assert shardload.open(tmp_path / "out.nc")["u"].coords["t"].values.tolist() == [0, 1, 2]


def test_decoded_values_like_those_that_were_unsigned(tmp_path: Path) -> None:
    """Wrong if unsigned values were compared with -6: decode="valid" would find none that is valid."""
    path = f"{tmp_path}/in.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4, dtype="i1")
        file["x"].attrs.update({"_Unsigned": "true", "valid_max": np.int8(-6), "units": "K"})
    found = {}
    for kind in ("u1", "i1", "f4"):
        x = np.arange(4, dtype=kind)
        one = SavedArray("/x", x, x.shape, x.dtype, None, None, None, None, {})
        found[kind] = {*_like(one, _read(f"{path}:/x", STRICT), "hdf5")[0].attrs}
    assert found == {"u1": {"units"}, "i1": {"_Unsigned", "valid_max", "units"}, "f4": {"units"}}


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["in.nc", "in.zarr"])
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_coordinates_that_are_no_axes(tmp_path: Path, name: str, suffix: str) -> None:
    """Wrong if xarray found other ones in the new file, or if any were left out without a word."""
    lon, flags = np.arange(6.0).reshape(2, 3), np.array([True, False, True])
    coords = {
        "x": ["p", "q", "r"],  # texts along an axis
        "letters": ("x", np.array([b"a", b"b", b"c"])),  # netCDF has an axis of letters
        "lon": (("y", "x"), lon, {"units": "degrees_east"}),
        "flags": ("x", flags),
        "height": ((), 2.0),
        "run": ((), "first"),
        "years": ("year", [1, 2]),  # of an axis that the new array has not
    }
    old = xarray.Dataset({"t": (("y", "x"), np.zeros((2, 3))), "u": (("y", "x", "year"), np.zeros((2, 3, 2)))}, coords)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python: texts have no final form there
        old.to_netcdf(tmp_path / name) if name == "in.nc" else old.to_zarr(tmp_path / name)
    with pytest.warns(shardload.LeftOutWarning) as said:
        shardload.save(tmp_path / f"out{suffix}", {"v": np.ones((2, 3))}, like=f"{tmp_path}/{name}:/t")
    (told,) = (str(one.message) for one in said)
    assert all(f"'/{key}', with the axes" in told for key in ("x", "letters", "run")) and told.count("is text") == 3
    how: dict[str, Any] = {"engine": "zarr"} if suffix == ".zarr" else {}
    with xarray.open_dataset(tmp_path / f"out{suffix}", **how) as new:
        assert set(new.v.coords) == {"lon", "flags", "height"}
        xarray.testing.assert_identical(
            new.lon.drop_vars(("flags", "height")), old.lon.drop_vars(("x", "letters", "flags", "height", "run"))
        )
        assert new.flags.dtype == bool and new.flags.values.tolist() == flags.tolist() and new.height == 2.0
    with pytest.warns(
        shardload.LeftOutWarning,
        match=r"'/lon', with the axes .* and shape \(2, 3\), does not fit the axes of '/v'",
    ):
        shardload.plan_save(tmp_path / f"out{suffix}", {"v": np.ones((2, 2))}, like=f"{tmp_path}/{name}:/t")


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
def test_variables_that_attributes_name(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if an attribute named a variable that is not in the new file (the bounds of its times), and nothing said so; or if
    one that is packed, or an attribute, changed its type.
    """
    monkeypatch.setattr("shardload.jobs.saving.like.COORDINATE_NBYTES", 1 << 16)
    climate(tmp_path / "in.nc")
    how: dict[str, Any] = {"engine": "zarr"} if suffix == ".zarr" else {"engine": "h5netcdf"}
    how |= {"phony_dims": "access"} if suffix == ".h5" else {}
    with xarray.open_dataset(tmp_path / "in.nc", decode_cf=False) as old:
        with pytest.warns(shardload.LeftOutWarning) as said:
            shardload.save(tmp_path / f"out{suffix}", {"t": old["t"].values}, like=f"{tmp_path}/in.nc:/t")
        (told,) = (str(one.message) for one in said)
        assert "'/large', with the axes ('y', 'x', 'n') and shape (4, 5, 1000), is too large" in told
        with xarray.open_dataset(tmp_path / f"out{suffix}", decode_cf=False, **how) as new:
            assert set(new.variables) == set(old.variables) - {"large", "other"}
            for name, one in new.variables.items():
                np.testing.assert_array_equal(one.values, old[name].values, strict=True)
                attrs = {key: value for key, value in one.attrs.items() if key != "DIMENSION_LABELS"}
                assert attrs.keys() == old[name].attrs.keys()
                for key, value in attrs.items():
                    np.testing.assert_array_equal(value, old[name].attrs[key], strict=suffix != ".zarr")
                assert suffix == ".h5" or one.dims == old[name].dims
        with pytest.warns(shardload.LeftOutWarning, match=r"'/flag', with the axes .* does not fit the axes of '/t'") as said:
            shardload.plan_save(
                tmp_path / f"new{suffix}", {"t": old["t"].values[0]}, like=f"{tmp_path}/in.nc:/t", dims=("lev", "y", "x")
            )
        assert "'/ps', with the axes ('time'," in str(said[0].message) and "bnds" not in str(said[0].message)
        more = {"t": old["t"].values, "large": old["large"].values}
        more_dims = {"t": ("time", "lev", "y", "x"), "large": old["large"].dims}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shardload.plan_save(tmp_path / f"new{suffix}", more, like={"t": f"{tmp_path}/in.nc:/t"}, dims=more_dims)


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
