"""Do decoded values arrive on every device, bit by bit as xarray decodes them, whoever reads and however they travel?"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
import xarray as xr
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, PackedWarning
from tests.mpi.support import READERS, check, cube, mesh_of, on_root, padded, ramp, same_error, warned_once
from tests.mpi.test_values import write

pytestmark = [pytest.mark.any_library, pytest.mark.any_number]

Array = np.ndarray[Any, Any]

PACKED = {"scale_factor": np.float32(0.25), "add_offset": np.float32(-7), "_FillValue": np.int16(11)}


def by_xarray(values: Array, attributes: dict[str, Any]) -> Array:
    variable = xr.Variable(tuple("pqrst"[: values.ndim]), values, attributes)
    return np.asarray(xr.conventions.decode_cf_variable("x", variable, decode_times=False).values)


@pytest.fixture(params=[1, 1 << 30], ids=["chunk by chunk", "by the library"])
def as_large(request: pytest.FixtureRequest, tune: Any) -> None:
    """Small chunks are decoded one by one, as large ones are; or by the format's library, as small ones are."""
    tune(min_chunk_nbytes=request.param, inline_nbytes=-1)


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize("readers", READERS)
def test_every_way_of_reading(comm: Any, shared_tmp_path: Path, readers: Any) -> None:
    """Wrong if one of the ways (in place, from a staging buffer, by the library) left numbers as they are stored, or decoded
    them twice.
    """
    values, mesh = ramp(cube(), "int16"), mesh_of()
    expected = by_xarray(values, PACKED)
    assert expected.dtype == np.float32 and np.isnan(expected).sum() == 1
    for name, chunks in (("plain.h5", None), ("chunked.h5", (3, 5, 7)), ("x.zarr", (3, 5, 7))):
        path = write(comm, shared_tmp_path, values, chunks=chunks, name=name, **PACKED)
        # The types of JSON's numbers are Python's, so xarray's choice for Zarr is float64: cast to the same.
        for spec, verify in ((P("b", "a"), "index"), (P("a"), "full")):
            x = shardload.load(path, mesh, spec, decode=True, dtype="float32", readers=readers, verify=verify)
            check(x, expected, mesh, spec, (name, verify))
        x = shardload.load(path, mesh, P("a"), decode=False, readers=readers)
        check(x, values, mesh, P("a"), name)


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize("readers", ["root", "parallel", "direct"])
def test_selected_padded_and_cast(comm: Any, shared_tmp_path: Path, readers: Any) -> None:
    """Wrong if the padding were decoded, or the selection applied to decoded chunks in other coordinates."""
    values, mesh, spec = ramp((3, *cube()), ">i2"), mesh_of(), P("b", None, "a")
    select = (-1, slice(1, None), slice(2, -2), slice(8, -1))
    attributes = {"scale_factor": np.float64(0.5), "_FillValue": np.array([50], ">i2"), "add_offset": np.float64(3)}
    wanted = by_xarray(values[select], {**attributes, "_FillValue": np.int16(50)}).astype("float32")
    for name, chunks in (("plain.h5", None), ("chunked.h5", (2, 3, 5, 7))):
        path = write(comm, shared_tmp_path, values, chunks=chunks, name=name, **attributes)
        for pad in (11, np.nan):
            x = shardload.load(
                path, mesh, spec, select=select, decode=True, dtype="float32", pad=pad, readers=readers, staging="1MiB",
                verify="file",
            )  # fmt: skip
            check(x, padded(wanted, mesh, spec, pad), mesh, spec, (name, pad))


def test_a_small_array_and_one_that_is_open(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if values that come with the metadata were not decoded."""
    values = ramp((4, 3), "int16")
    path = write(comm, shared_tmp_path, values, **PACKED)
    expected = by_xarray(values, PACKED)
    check(shardload.load(path, mesh_of(), P(), decode=True, verify="full"), expected, mesh_of(), P())
    with h5py.File(path, "r") as file:
        check(shardload.load(file["x"], mesh_of(), P(), decode=True, verify="full"), expected, mesh_of(), P())
    x = shardload.load(path, mesh_of(), P(), decode=True, dtype="float16")
    check(x, expected.astype("float16"), mesh_of(), P())


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize("name", ["a.h5", "a.zarr"])
def test_missing_chunks_are_what_the_fill_value_decodes_to(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if chunks that are not stored were left undecoded."""
    path, shape = str(shared_tmp_path / name), cube()
    values = np.full(shape, -5, "i2")
    values[: shape[0] // 2] = ramp(shape, "i2")[: shape[0] // 2]

    def make() -> None:
        attributes = {"_FillValue": -5, "scale_factor": 0.5, "add_offset": 1.0}
        made: Any
        if name == "a.zarr":
            made = zarr.create_array(path, shape=shape, dtype="i2", chunks=(shape[0] // 2, 5, 7), fill_value=-5)
            made[: shape[0] // 2] = values[: shape[0] // 2]
            made.attrs.update(attributes)
            return
        with h5py.File(path, "w") as file:
            made = file.create_dataset("x", shape, "i2", chunks=(shape[0] // 2, 5, 7), fillvalue=-5)
            made[: shape[0] // 2] = values[: shape[0] // 2]
            made.attrs.update({**attributes, "_FillValue": np.int16(-5)})

    on_root(comm, make)
    expected = by_xarray(values, {"_FillValue": np.int16(-5), "scale_factor": 0.5, "add_offset": 1.0}).astype("f4")
    assert np.isnan(expected[shape[0] // 2 :]).all()
    for readers in ("root", "parallel", "direct"):
        made = shardload.plan(
            path, mesh_of(), P("b", "a"), decode=True, dtype="float32", readers=readers, missing="fill", verify="full"
        )
        check(made.execute(), expected, mesh_of(), P("b", "a"), readers)
        assert made.report is not None and made.report.chunks_missing > 0


def test_the_valid_range_is_the_callers(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if it were applied, which xarray does not, or if what it once was asked for by did something else."""
    values = ramp(cube(), "int16")
    attributes = {**PACKED, "valid_range": np.array([3, 90], "i2")}
    path = write(comm, shared_tmp_path, values, chunks=(3, 5, 7), **attributes)
    expected = by_xarray(values, PACKED)
    check(shardload.load(path, mesh_of(), P("a"), decode=True), expected, mesh_of(), P("a"))
    load = partial(shardload.load, path, mesh_of(), P("a"), decode="valid")
    same_error(comm, load, ConfigError, "decode is 'valid'", "jax.numpy.where")


# --- the warning


def test_packed_numbers_are_warned_of_once(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if a rank were silent where warnings are errors, or if fill values alone were warned of."""
    values = ramp(cube(), "int16")
    path = write(comm, shared_tmp_path, values, **PACKED)
    with warned_once(comm, PackedWarning) as told:
        check(shardload.load(path, mesh_of(), P("a")), values, mesh_of(), P("a"))
        shardload.load(path, mesh_of(), P("a"), decode=False)
        shardload.load(path, mesh_of(), P("a"), decode=True)
    assert all("(scale_factor=0.25, add_offset=-7.0). Pass decode=True" in text for text in told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PackedWarning):
            shardload.load(path, mesh_of(), P("a"))
    path = write(comm, shared_tmp_path, values, name="b.h5", _FillValue=np.int16(3), valid_min=np.int16(0))
    check(shardload.load(path, mesh_of(), P("a")), values, mesh_of(), P("a"))


def test_decoded_values_that_do_not_fit(comm: Any, shared_tmp_path: Path) -> None:
    """NaN is no integer; and a double is no float of JAX's, unless it is asked for."""
    values = ramp(cube(), "int16")
    path = write(comm, shared_tmp_path, values, chunks=(3, 5, 7), **PACKED)
    for readers in ("root", "parallel", "direct"):
        call = lambda readers=readers: shardload.load(  # noqa: E731
            path, mesh_of(), P("a"), decode=True, dtype="int32", readers=readers
        )
        same_error(comm, call, ConfigError, "once decoded have values that int32 cannot hold", "nan")
    path = write(comm, shared_tmp_path, values, name="b.h5", scale_factor=np.float64(0.5))
    if not jax.config.read("jax_enable_x64"):
        call = lambda: shardload.load(path, mesh_of(), P("a"), decode=True)  # noqa: E731
        same_error(comm, call, ConfigError, "decoded, would be loaded as float64", "dtype='float32'")
