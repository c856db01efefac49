"""Do the attributes of whole files reach the rule that decodes them, whichever library wrote the file?

Compared with ``xarray.open_dataset``, variable by variable, bit by bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr
from xarray.backends.zarr import FillValueCoder

from shardload.errors import ConfigError
from shardload.formats.access import STRICT, Access, Limits
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.lookup import find_array, list_arrays
from shardload.values.decoding import ATTRIBUTES, decoding_of, packed_by
from tests.packed import WRITERS, by_netcdf4, by_xarray, open_by_xarray
from tests.unit.files import load_all

Array = np.ndarray[Any, Any]
SHAPE = (4, 6, 10)


def decoded(path: Path, name: str | None, access: Access = STRICT) -> Array:
    """A variable, as its metadata says after it went through JSON to another rank."""
    info = ArrayInfo.from_dict(json.loads(json.dumps(find_array(path, name, access).to_dict())))
    raw = load_all(path, info.dataset, access)
    rule = decoding_of(raw.dtype, info.packing, str(info))
    return raw if rule is None else rule.values(raw)


def assert_same(found: Array, expected: Array, name: str) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    assert found.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("write", [by_netcdf4, by_xarray("h5netcdf")], ids=["netCDF4", "h5netcdf"])
def test_in_a_group_with_an_unlimited_axis(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "a.nc"
    write(path, SHAPE, group="model/run1", unlimited=True)
    for variable, values in open_by_xarray(path, "model/run1").items():
        assert_same(decoded(path, f"model/run1/{variable}"), values, variable)


@pytest.mark.usefixtures("quick_helpers")
@pytest.mark.parametrize("writer", ["xarray, h5netcdf", "to_zarr, format 3"])
def test_in_a_helper_process(tmp_path: Path, writer: str) -> None:
    """Wrong if a helper's answer lacked the attributes, or could not be told from a lie."""
    write, name = WRITERS[writer]
    write(tmp_path / name, SHAPE)
    access = Access(untrusted=Limits())
    found = {info.dataset: info for info in list_arrays(str(tmp_path / name), access)}
    for info in list_arrays(str(tmp_path / name)):
        assert repr(found[info.dataset].packing) == repr(info.packing)
    assert sum("scale_factor" in info.packing for info in found.values()) >= 5
    assert_same(decoded(tmp_path / name, "ice", access), open_by_xarray(tmp_path / name)["ice"], "ice")


def test_attributes_that_are_not_read_are_not_passed_over(tmp_path: Path) -> None:
    """Wrong if an array were left as it is, because its attributes were too long to look at."""
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_dataset("a", data=[1]).attrs["_FillValue"] = np.zeros(20000)
    with pytest.raises(ConfigError, match="_FillValue is 160000 bytes, not shown"):
        decoded(tmp_path / "a.h5", "a")


@pytest.mark.parametrize("value", [np.longdouble(0.5), np.array([0.5, 1], "longdouble"), np.clongdouble(1)])
def test_numbers_of_extended_precision(tmp_path: Path, value: Any) -> None:
    """Wrong if an array could not be loaded at all, because its attributes cannot be sent as JSON."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.arange(3, dtype="i2")
        file["a"].attrs["add_offset"] = value
    found = find_array(tmp_path / "a.h5", "a")
    assert ArrayInfo.from_dict(json.loads(json.dumps(found.to_dict()))).packing == found.packing
    with pytest.raises(ConfigError, match=r"its attribute add_offset is (\d values of type c?\w+128|text, or another type)"):
        decoded(tmp_path / "a.h5", "a")


@pytest.mark.parametrize("empty", [np.zeros(0), h5py.Empty("f8"), h5py.Empty("S1")])
def test_attributes_without_a_value_pack_nothing(tmp_path: Path, empty: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.arange(3, dtype="i2")
        for key in ATTRIBUTES:
            if not key.startswith("valid"):
                file["a"].attrs[key] = empty
    assert packed_by(np.dtype("i2"), find_array(tmp_path / "a.h5", "a").packing) == []
    assert_same(decoded(tmp_path / "a.h5", "a"), np.arange(3, dtype="i2"), "a")


@pytest.mark.parametrize("more", [{"scale_factor": np.int32(2)}, {"scale_factor": np.float64(0.5)}, {"add_offset": 0.5}, {}])
def test_a_list_of_no_missing_values(tmp_path: Path, more: dict[str, Any]) -> None:
    """The netCDF library stores it without a place for values; wrong if it were taken for no attribute."""
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("x", 4)
        for dtype in ("i2", "u4", "f4", "f8"):
            made = file.createVariable(dtype, dtype, ("x",))
            made.set_auto_maskandscale(False)
            made[:] = np.arange(4)
            made.setncatts({"missing_value": np.array([], dtype)} | more)
    with h5py.File(tmp_path / "a.nc") as file:
        assert isinstance(file["f4"].attrs["missing_value"], h5py.Empty)
    for variable, values in open_by_xarray(tmp_path / "a.nc").items():
        assert_same(decoded(tmp_path / "a.nc", variable), values, variable)


def test_a_fill_value_with_a_fraction(tmp_path: Path) -> None:
    """xarray takes it as an integer where Zarr format 3 holds integers; wrong if another number, or none, became NaN."""
    made = zarr.create_array(str(tmp_path / "a.zarr"), data=np.arange(6, dtype="i2"), attributes={"_FillValue": 2.5})
    made.attrs["scale_factor"] = 0.5
    wanted = xr.Variable("x", np.arange(6, dtype="i2"), {"_FillValue": FillValueCoder.decode(2.5, "i2"), "scale_factor": 0.5})
    values = np.asarray(xr.conventions.decode_cf_variable("a", wanted, decode_times=False).values)
    assert np.isnan(values).tolist() == [False, False, True, False, False, False]
    assert_same(decoded(tmp_path / "a.zarr", None), values, "a")
