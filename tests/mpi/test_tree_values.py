"""Are the arrays of a tree decoded, selected by name, padded and wrapped, each by its own rules?

Compared with xarray and NumPy.
"""

from __future__ import annotations

import math
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
from shardload import ConfigError, PackedWarning, SourceError, VerifyError, between, near
from shardload.transfer.reader import BoxReader
from tests.mpi import test_labels
from tests.mpi.support import check, cube, mesh_of, on_root, ramp, refuse_reads, same_error, turned, unit, warned_once
from tests.mpi.test_decode import by_xarray
from tests.mpi.test_halo import with_halos
from tests.mpi.test_values import X64
from tests.packed import VARIABLES, by_netcdf4, by_to_zarr, open_by_xarray

pytestmark = [pytest.mark.any_library, pytest.mark.any_number, pytest.mark.usefixtures("moved_as_large")]

Array = np.ndarray[Any, Any]


# --- twelve packed variables in one call


@pytest.fixture(scope="module", params=["netCDF4", "Zarr"])
def twelve(request: pytest.FixtureRequest, comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def write() -> Path:
        path = tmp_path_factory.mktemp("twelve") / ("a.nc" if request.param == "netCDF4" else "a.zarr")
        (by_netcdf4 if request.param == "netCDF4" else by_to_zarr(3))(path, cube())
        return path

    return on_root(comm, write)


def test_twelve_variables_in_one_call(twelve: Path) -> None:
    """Wrong if an array were decoded by the rule of another, or not, on a mesh in order or permuted."""
    expected = open_by_xarray(twelve)
    assert set(expected) == set(VARIABLES) and len(expected) == 12
    names = {f"{k:02}": name for k, name in enumerate(sorted(VARIABLES, reverse=True))}
    with X64(True):
        for mesh, spec, verify in ((mesh_of(), P("a", "b"), "full"), (turned(), P(None, ("b", "a")), "checksum")):
            plan = shardload.plan(twelve, mesh, spec, dataset=names, decode=True, verify=verify)
            x = plan.execute()
            for key, name in names.items():
                check(x[key], expected[name], mesh, spec, (key, name))
                for shard in x[key].addressable_shards:
                    assert np.asarray(shard.data).tobytes() == expected[name][shard.index].tobytes(), (
                        f"the bits of NaN in {name}"
                    )
        shardload.verify(x, twelve, dataset=names, decode=True)


def test_decode_as_a_prefix_tree(comm: Any, twelve: Path) -> None:
    """Wrong if one array's answer counted for its neighbour, or a kept plan were used for the same kind with another answer."""
    expected = open_by_xarray(twelve)
    names = {"a": {"x": "sst", "y": ["sst", "cloud"]}, "b": "sst", "c": "rain"}
    with X64(True):
        stored = shardload.load(twelve, mesh_of(), P("b"), dataset=names, decode=False)
        x = shardload.load(
            twelve, mesh_of(), P("b"), dataset=names, decode={"a": {"x": True, "y": [False, True]}, "b": False, "c": True}
        )
        shardload.verify(x, twelve, dataset=names, decode={"a": {"x": True, "y": [False, True]}, "b": False, "c": True})
        wrong = {"dataset": names, "decode": {"a": {"x": True, "y": [False, True]}, "b": True, "c": True}}
        same_error(comm, lambda: shardload.verify(x, twelve, **wrong), ConfigError, "array ['b']", "decode=")
    check(x["a"]["x"], expected["sst"], mesh_of(), P("b"))
    check(x["a"]["y"][1], expected["cloud"], mesh_of(), P("b"))
    check(x["c"], expected["rain"], mesh_of(), P("b"))
    for one in (x["a"]["y"][0], x["b"]):
        assert one.dtype == np.int16
        for shard, same in zip(one.addressable_shards, stored["b"].addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(same.data))


def test_one_warning_for_the_tree_names_its_packed_arrays(comm: Any, twelve: Path) -> None:
    """Wrong if each array warned, or one that is not packed, or that the caller spoke about, were named."""
    names = {"a": "sst", "b": "cloud", "c": "sst", "d": "mask", "e": "snow"}
    with warned_once(comm, PackedWarning) as told:
        shardload.load(
            twelve, mesh_of(), P("b"), dataset=names, decode={"a": None, "b": None, "c": False, "d": None, "e": None}
        )
        shardload.load(twelve, mesh_of(), P("b"), dataset=names, decode=False)
    for text in told:
        assert "array ['a'], '/sst' in" in text and "array ['b'], '/cloud' in" in text
        assert not any(f"['{key}']" in text for key in "cde")


# --- small chunks, halos, padding


def small_chunks(comm: Any, folder: Path, kind: str) -> tuple[str, dict[str, tuple[Array, dict[str, Any]]]]:
    """Arrays in chunks of 120 bytes or less: of two the values have the type and size of what is stored."""
    made = {
        "same": (ramp(cube()), {"_FillValue": np.float32(17)}),
        "wider": (
            ramp(cube(), "int16"),
            {"_FillValue": np.int16(11), "scale_factor": np.float32(0.5), "add_offset": np.float32(3)},
        ),
        "plain": (ramp(cube(), "int32"), {}),
        "row": (ramp((40 * unit(),)), {"_FillValue": np.float32(17)}),
    }
    path = folder / f"small.{kind}"

    def write() -> None:
        if kind == "h5":
            with h5py.File(path, "w") as file:
                for name, (data, attributes) in made.items():
                    file.create_dataset(
                        name, data=data, chunks=(2, 3, 5)[: data.ndim], compression="gzip", shuffle=True
                    ).attrs.update(attributes)
        else:
            root = zarr.open_group(path, mode="w")
            for name, (data, attributes) in made.items():
                told = {key: value.item() for key, value in attributes.items()}
                root.create_array(name, data=data, chunks=(2, 3, 5)[: data.ndim], attributes=told)

    on_root(comm, write)
    return str(path), made


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_small_chunks_are_decoded_in_batches(
    comm: Any, shared_tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a batch left values as they are stored, above all where they are as long as the decoded ones."""
    path, made = small_chunks(comm, shared_tmp_path, kind)
    read, right = [], BoxReader._read

    def spy(self: Any, staged: Any, box: Any, *more: Any) -> None:
        right(self, staged, box, *more)
        read.append((self._layout.decoding is not None, math.prod(map(len, box)) > 1))

    monkeypatch.setattr(BoxReader, "_read", spy)
    names, dtype = {"p": "plain", "s": "same", "w": "wider"}, {"p": None, "s": None, "w": "float32"}
    for spec in (P("a", "b"), P(None, None, ("b", "a")), P()):
        for readers in ("parallel", "direct"):
            read.clear()
            how: dict[str, Any] = {"dataset": names, "dtype": dtype, "readers": readers, "verify": "full"}
            x = shardload.load(path, mesh_of(), spec, decode=True, **how)
            for key, name in names.items():
                values, attributes = made[name]
                check(x[key], by_xarray(values, attributes).astype(x[key].dtype), mesh_of(), spec, (name, spec, readers))
            everyone = [one for found in comm.allgather(read) for one in found]
            assert (True, True) in everyone and (False, True) in everyone, "no batch was read"
            row = shardload.load(path, mesh_of(), P("a"), dataset="row", decode=True, readers=readers)
            check(row, by_xarray(*made["row"]), mesh_of(), P("a"), "its batches lie in a piece as in the file")
    assert np.isnan(by_xarray(*made["same"])).sum() == 1 and by_xarray(*made["same"]).dtype == np.float32


@pytest.mark.parametrize("edge", ["wrap", "edge", -5])
def test_halos_of_decoded_arrays(comm: Any, shared_tmp_path: Path, edge: Any) -> None:
    """Wrong if the rows of the neighbours, or what lies beyond the ends, were stored numbers."""
    path, made = small_chunks(comm, shared_tmp_path, "h5")
    names, spec = ["wider", "same", "plain"], P("b", "a")
    x = shardload.load(
        path, mesh_of(), spec, dataset=names, decode=True, dtype=["float32", None, None], halo=[(2, 1), 1, 0], edge=edge,
        verify="full",
    )  # fmt: skip
    for one, name, widths in zip(x, names, ((2, 1, 0), (1, 1, 0), (0, 0, 0)), strict=True):
        expected = by_xarray(*made[name]).astype(one.dtype)
        check(one, with_halos(expected, mesh_of(), spec, widths, (edge,) * 3), mesh_of(), spec, name)


# --- by name


def climate() -> xr.Dataset:
    """The variable of `test_labels`, and one whose axes are in another order."""
    made = test_labels.climate()
    n = made.sizes["lon"], made.sizes["time"]
    return made.assign(s=(("lon", "time"), np.float32(1000) + np.arange(n[0] * n[1], dtype="f4").reshape(n)))


@pytest.fixture(scope="module")
def file(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    made = climate()

    def write() -> str:
        path = str(tmp_path_factory.mktemp("named") / "a.nc")
        made.to_netcdf(path, engine="h5netcdf")
        return path

    return on_root(comm, write)


def test_one_selection_by_name_for_all(file: str) -> None:
    """Wrong if names were looked up in one array and used for another, whose axes are in another order."""
    made, mesh = climate(), mesh_of()
    for select, of in (
        ({"time": -1, "lon": slice(1, 3)}, lambda one: one.isel(time=-1, lon=slice(1, 3))),
        ({"time": near(7), "lon": between(1, 2)}, lambda one: one.sel(time=6, lon=slice(1, 2))),
    ):
        x = shardload.load(file, mesh, P(), dataset={"u": "t", "v": ["s", "t"]}, select=select, decode=True)
        for one, name in ((x["u"], "t"), (x["v"][0], "s"), (x["v"][1], "t")):
            check(one, of(made[name]).values, mesh, P(), (name, select))


WRONG = [
    ({"select": {"tiem": 0}}, ("array ['s']", "names the axis 'tiem', but the array has the axes 'lon', 'time'")),
    ({"select": {"lat": 0}}, ("array ['s']", "names the axis 'lat', but the array has the axes 'lon', 'time'")),
    ({"select": {"t": {"depth": 0}, "s": None}}, ("array ['t']", "names the axis 'depth'")),
    ({"select": {"t": 10**6, "s": 0}}, ("array ['t']", "1000000")),
    ({"select": {"t": near(3), "s": 0}}, ("array ['s']", "names the axis 's'")),
    ({"select": near(3)}, ("array ['s']", "near(3) on axis 0", "pass select={'lat': shardload.near(VALUE)}")),
    ({"decode": "yes"}, ("decode is 'yes'", "expected None, True or False")),
    ({"decode": {"t": True, "s": 1}}, ("array ['s']", "decode is 1")),
]


@pytest.mark.parametrize(("how", "parts"), WRONG, ids=[str(k) for k in range(len(WRONG))])
def test_what_a_tree_cannot_take(
    comm: Any, file: str, how: dict[str, Any], parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_reads(monkeypatch)
    call = lambda: shardload.load(file, mesh_of(), P(), dataset={"t": "t", "s": "s"}, **{"decode": True, **how})  # noqa: E731
    same_error(comm, call, ConfigError, *parts)


@pytest.mark.parametrize("untrusted", [False, True])
@pytest.mark.parametrize(
    ("name", "says"),
    [("text", ("holds strings", "loads numbers only")), ("flags", ("which has no NaN", "decode=False"))],
)
def test_the_third_of_five_cannot_be_decoded(
    comm: Any, shared_tmp_path: Path, name: str, untrusted: bool, says: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a rank went on, anything were read, or the error were about another array."""
    path = shared_tmp_path / "a.h5"

    def write() -> None:
        with h5py.File(path, "w") as made:
            for k in range(4):
                made[f"x{k}"] = ramp((4, 3), "int16")
            made["text"] = np.array([b"abc", b"de"])
            made["flags"] = ramp((4, 3), "bool")
            made["flags"].attrs["_FillValue"] = np.int8(1)

    on_root(comm, write)
    refuse_reads(monkeypatch)
    names = ["x0", "x1", name, "x2", "x3"]
    call = lambda: shardload.load(str(path), mesh_of(), P(), dataset=names, decode=True, untrusted=untrusted)  # noqa: E731
    same_error(comm, call, SourceError if "holds" in says[0] else ConfigError, "array [2]", f"'/{name}' in", *says)


def test_a_wrong_element_of_a_decoded_tree_is_found(comm: Any, file: str) -> None:
    x = shardload.load(file, mesh_of(), P(), dataset={"t": "t", "s": "s"}, decode=True, select={"time": 1})
    wrong = {**x, "s": x["s"].at[1].set(-1)}
    call = lambda y: lambda: shardload.verify(y, file, dataset={"t": "t", "s": "s"}, decode=True, select={"time": 1})  # noqa: E731
    call(x)()
    same_error(comm, call(wrong), VerifyError, "array ['s']", "'/s' in")


# --- back to xarray


def test_what_cannot_share_a_dataset(comm: Any, file: str) -> None:
    """Wrong if arrays of different parts were put beside each other, or an index made of an array that no process holds."""
    names = {"a": "t", "b": "t"}
    plan = shardload.plan(file, mesh_of(), P("a"), dataset=names, decode=True, select={"a": {"lat": 0}, "b": {"lat": 1}})
    x = plan.execute()
    with pytest.raises(ConfigError, match=r"different coordinates 'lat'.*jax\.tree\.map\(shardload\.to_xarray"):
        shardload.to_xarray(x, plan)
    apart = jax.tree.map(shardload.to_xarray, x, plan.plans)
    assert [float(apart[key]["lat"]) for key in "ab"] == [60.0, float(climate().lat[1])]
    nested = shardload.to_xarray({"g": [x["a"]]}, {"g": [plan.plans["a"]]})
    assert type(nested["g"]) is list and nested["g"][0].dims == ("time", "lon")
    plan = shardload.plan(file, mesh_of(), P(), dataset=names, decode=True, select={"a": slice(0, 2), "b": slice(0, 1)})
    with pytest.raises(ConfigError, match=r"'time' has 2 elements in \['a'\] and 1 in \['b'\]"):
        shardload.to_xarray(plan.execute(), plan)
    plan = shardload.plan(file, mesh_of(), P(), dataset={"lat": "t", "s": "s"}, decode=True)
    with pytest.raises(ConfigError, match=r"\['lat'\] has the name of a coordinate"):
        shardload.to_xarray(plan.execute(), plan)


def test_an_axis_with_a_halo_has_no_coordinates(file: str) -> None:
    """Wrong if coordinates stood beside other rows: the array has the neighbours' rows between its own."""
    made = climate()
    plan = shardload.plan(file, mesh_of(), P(("a", "b")), dataset={"t": "t"}, decode=True, halo=1)
    x = plan.execute()
    found = shardload.to_xarray(x, plan)["t"]
    assert found.dims == ("time", "lat", "lon") and set(found.coords) == {"lat", "lon"}
    np.testing.assert_array_equal(found["lat"].values, made["lat"].values)
    back = shardload.to_xarray(shardload.unpad(x, plan, numpy=True), plan)["t"]
    np.testing.assert_array_equal(back.values, made["t"].values, strict=True)
    np.testing.assert_array_equal(back["time"].values, made["time"].values)


def test_a_coordinate_that_is_too_large_for_a_plan(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardload.formats.labelling.COORDINATE_NBYTES", 1 << 10)
    n = 300 * unit()
    path = str(shared_tmp_path / "long.nc")
    made = xr.Dataset({"v": ("time", np.arange(n, dtype="f4"))}, coords={"time": np.arange(n, dtype="f4")})
    on_root(comm, lambda: made.to_netcdf(path, engine="h5netcdf"))
    plan = shardload.plan(path, mesh_of(), P("a"), dataset="*", decode=True)
    x = plan.execute()
    found = shardload.to_xarray(x, plan)
    assert set(found.data_vars) == {"v"} and found["time"].variable.data is x["time"] and not found.indexes
    assert "time" in repr(found)
