"""Are axes, attributes and coordinates those that xarray finds, in each format?"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import h5py
import jax
import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access, Limits
from shardload.formats.contract.array import MIXED, Note
from shardload.formats.hdf5 import file, opened
from shardload.formats.hdf5.file import Hdf5File
from shardload.formats.hdf5.source import Hdf5Source
from shardload.formats.labelling import Labeller, read_labels
from shardload.formats.lookup import Finder, find_array, open_source
from shardload.formats.untrusted import UntrustedFile
from tests.unit.blocked import run_without
from tests.unit.files import raising

WRITERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "netCDF4": ("a.nc", {"engine": "netcdf4"}, {"engine": "netcdf4"}),
    "h5netcdf": ("a.nc", {"engine": "h5netcdf"}, {"engine": "h5netcdf"}),
    "Zarr, format 2": ("a.zarr", {"zarr_format": 2}, {"engine": "zarr"}),
    "Zarr, format 3": ("a.zarr", {"zarr_format": 3}, {"engine": "zarr"}),
}
# What xarray keeps in `encoding`, not in `attrs`.
ENCODING = {"_FillValue", "scale_factor", "add_offset", "coordinates", "missing_value"}


def climate() -> xr.Dataset:
    """Variables whose axes all differ in length and order, with coordinates of one and two axes, and one of text."""
    values = np.arange(4 * 5 * 7, dtype="i2").reshape(4, 5, 7)
    return xr.Dataset(
        {
            "t": (("time", "lat", "lon"), values, {"long_name": "temperature", "units": "K", "levels": [1, 2, 3]}),
            "s": (("lon", "lat"), np.ones((7, 5), "f4")),
            "n": (("nameless",), np.ones(3)),
        },
        coords={
            "time": ("time", np.arange(4.0) * 6, {"units": "hours since 2000-01-01", "calendar": "noleap"}),
            "lat": ("lat", np.linspace(60, 40, 5), {"units": "degrees_north"}),
            "lon": np.linspace(0, 30, 7, dtype="f4"),
            "area": (("lat", "lon"), np.arange(35.0).reshape(5, 7), {"units": "m2"}),
            "height": 2.0,
        },
    )


def write(path: Path, how: dict[str, Any], dataset: xr.Dataset, **more: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.suffix == ".zarr":
            dataset.to_zarr(path, consolidated=False, **how, **more)
        else:
            dataset.to_netcdf(path, **how, **more)
    return str(path)


def plain(attrs: Any) -> dict[str, Any]:
    return {key: np.asarray(value).tolist() for key, value in attrs.items() if key not in ENCODING}


@pytest.mark.parametrize("writer", WRITERS)
def test_as_xarray_finds_them(tmp_path: Path, writer: str) -> None:
    """Wrong if axes were named in another order, coordinates were those of another axis, or attributes were lost."""
    name, how, engine = WRITERS[writer]
    made = climate()
    made["t"].encoding.update(dtype="i2", scale_factor=0.5, add_offset=1.0)
    path = write(tmp_path / name, how, made)
    found = shardload.open(path)
    more = {"consolidated": False} if name == "a.zarr" else {}
    with xr.open_dataset(path, decode_times=False, **engine, **more) as expected:
        assert {info.dataset.strip("/") for info in found.values()} >= {str(name) for name in expected.variables}
        for variable in ("t", "s", "n"):
            info, wanted = found[variable], expected[variable]
            assert info.dims == wanted.dims and info.shape == wanted.shape
            assert plain(info.attrs) == plain(wanted.attrs)
            assert set(info.coords) >= {str(dim) for dim in wanted.dims if dim in expected.coords}
            assert set(info.coords) <= {str(key) for key in wanted.coords}
            for key, coordinate in info.coords.items():
                assert coordinate.values is not None and coordinate.dims == wanted[key].dims
                np.testing.assert_array_equal(coordinate.values, wanted[key].values, strict=True)
                assert plain(coordinate.attrs) == plain(wanted[key].attrs)
        assert set(found["t"].coords) >= {"time", "lat", "lon", "area"}
        assert found["t"].attrs["scale_factor"] == 0.5 and found["time"].attrs["calendar"] == "noleap"


@pytest.mark.usefixtures("quick_helpers")
@pytest.mark.parametrize("writer", WRITERS)
def test_attributes_of_the_group(tmp_path: Path, writer: str) -> None:
    """Wrong if they were those of another group, or had what the netCDF library writes for itself."""
    name, how, engine = WRITERS[writer]
    more = {"consolidated": False} if name == "a.zarr" else {}
    for group in (None, "g/h"):
        made = climate().assign_attrs(title=f"a run, {group}", levels=[1, 2], factor=0.5, history="x" * 5000)
        made.attrs |= {"nested": {"a": [1]}} if name == "a.zarr" else {}
        path = write(tmp_path / name, how, made, group=group, **({} if group is None else {"mode": "a"}))
    for group in (None, "g/h"):
        with xr.open_dataset(path, group=group, **engine, **more) as expected:
            info = find_array(path, f"{group or ''}/t")
            found = read_labels(path, info)
            of_group = plain(found.of_group)
            assert of_group | {"nested": 0} == plain(expected.attrs) | {"nested": 0} and of_group["title"].endswith(str(group))
        assert ("a" in str(found.of_group["nested"])) if name == "a.zarr" else "nested" not in found.of_group
        apart = read_labels(path, info, Access(untrusted=Limits()))
        assert apart.of_group == found.of_group
    if name == "a.zarr":
        (tmp_path / name / "g" / "h" / ("zarr.json" if "3" in writer else ".zgroup")).unlink()
        (tmp_path / name / "g" / "h" / ".zattrs").unlink(missing_ok=True)
        assert read_labels(path, info).of_group == {}


@pytest.mark.parametrize("writer", WRITERS)
def test_names_do_not_depend_on_the_group(tmp_path: Path, writer: str) -> None:
    """Wrong if all names of an array were lost where its group is damaged, or where a store is one array and has no group."""
    name, how, _ = WRITERS[writer]
    path = write(tmp_path / name, how, climate().assign_attrs(title="a run"))
    if name != "a.zarr":  # more than is read, in the group alone
        with h5py.File(path, "a", libver="latest") as file:
            file.move("t", "large/t")
            file["large"].attrs["attributes"] = np.zeros(60000)
        found = read_labels(path, find_array(path, "large/t"))
    else:
        mark = next(file for file in (Path(path) / "zarr.json", Path(path) / ".zattrs") if file.exists())
        mark.write_text(mark.read_text().replace('"title"', "title"))
        found = read_labels(path, find_array(path, "t"))
        alone = tmp_path / "alone.zarr"
        (Path(path) / "t").rename(alone)
        assert read_labels(alone, find_array(alone)).dims == ("time", "lat", "lon")
        assert read_labels(alone, find_array(alone)).of_group == {}
    assert found.dims == ("time", "lat", "lon") and found.attrs["units"] == "K"
    assert isinstance(found.of_group["attributes"], Note)


def test_names_behind_a_link_to_another_file(tmp_path: Path) -> None:
    """Wrong if coordinates or attributes were those of what has the same names in this file, or in the other file's group."""
    write(tmp_path / "other.nc", {"engine": "h5netcdf"}, climate().assign_attrs(title="other"))
    path = tmp_path / "here.h5"
    with h5py.File(path, "w") as file:
        file["t"], file["time"], file.attrs["title"] = h5py.ExternalLink("other.nc", "/t"), np.zeros(4), "here"
    found = read_labels(path, find_array(path, "t"))
    assert found.dims == ("time", "lat", "lon") and found.attrs["units"] == "K"
    assert (found.coords, found.of_group) == ({}, {})


@pytest.mark.usefixtures("quick_helpers")
def test_notes_in_the_place_of_attributes(tmp_path: Path) -> None:
    """Wrong if a text of the author were taken for one, a note for a value, or too many attributes were lost unseen."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["t"] = np.zeros(3)
        file.attrs["comment"], file.attrs["texts"] = "land, not shown", ["a" * 70000, "b"]
        file.attrs["n" * 5000] = 1
        file["g/t"] = np.zeros(3)
        for key in range(300):
            file["g"].attrs[f"{key:03}"] = key
    for access in (Access(), Access(untrusted=Limits())):
        found = read_labels(path, find_array(path, "t"), access).of_group
        assert found["comment"] == "land, not shown" and not isinstance(found["comment"], Note)
        assert [key for key, value in found.items() if isinstance(value, Note)] == ["texts", "... and 1 more"]
        many = read_labels(path, find_array(path, "g/t"), access).of_group
        assert [key for key, value in many.items() if isinstance(value, Note)] == ["... and 45 more"]
        assert {key: value for key, value in many.items() if key.isdigit()} == {f"{key:03}": key for key in range(255)}


def test_many_coordinates(tmp_path: Path) -> None:
    """Wrong if coordinates behind the first few were lost without a note."""
    path, names = str(tmp_path / "a.h5"), [f"c{k}" for k in range(260)]
    with h5py.File(path, "w") as file:
        for name, n in (("few", 100), ("many", 260)):
            file[name] = np.zeros(3)
            file[name].attrs["coordinates"] = " ".join(names[:n])
        for k, name in enumerate(names):
            file[name] = k
    few, many = (read_labels(path, find_array(path, name)) for name in ("few", "many"))
    assert [int(coord.values) for coord in few.coords.values() if coord.values is not None] == list(range(100))
    assert len(many.coords) == 256 and isinstance(many.attrs["... and 4 more coordinates"], Note)
    assert not any(isinstance(value, Note) for value in few.attrs.values())


def test_names_that_lead_to_other_files(tmp_path: Path) -> None:
    """Wrong if HDF5 itself looked up such a name: it would open any file that a link on the way leads to."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/t"] = np.zeros(3)
        file["g/lost"] = h5py.ExternalLink("nowhere.h5", "/")
        file["g/t"].dims[0].label = "lost/x"
        file["g/t"].attrs["coordinates"] = "lost/lon"
    with contextlib.closing(open_source(str(tmp_path / "a.h5"), "/g/t")) as source:
        labels = source.labels()
    assert labels.dims == ("lost/x",)
    assert {name: coordinate.dataset for name, coordinate in labels.coords.items()} == {"lon": "/g/lost/lon"}


@pytest.mark.parametrize("writer", WRITERS)
def test_coordinates_of_text(tmp_path: Path, writer: str) -> None:
    """Wrong if zarr-python's warning about text in format 3 came out, or were called damage where warnings are errors."""
    name, how, _ = WRITERS[writer]
    path = write(tmp_path / name, how, climate().assign_coords(station=("lat", np.array(list("abcde"), "U1"))))
    found = shardload.open(path)
    assert set(found["t"].coords) >= {"station", "lat"} and found["t"].coords["station"].values is None
    assert found["station"].refused is not None


@pytest.mark.parametrize("has_variable", [True, False])
def test_coordinates_of_a_group_along_axes_of_the_file(tmp_path: Path, has_variable: bool) -> None:
    """Wrong if a group's own coordinate were passed over for that of the root, or an array along another axis were taken."""
    path = tmp_path / "a.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("x", 4)
        file.createDimension("y", 4)
        if has_variable:
            file.createVariable("x", "f4", ("x",))[:] = np.arange(4)
        for name, dim in (("g", "x"), ("g/h", "y")):
            group = file.createGroup(name)
            group.createVariable("x", "f4", (dim,))[:] = [30, 20, 10, 0]
            group.createVariable("v", "f4", ("x",))[:] = np.arange(4)
    found = shardload.open(str(path))
    with xr.open_dataset(path, group="g", engine="h5netcdf") as expected:
        for name in ("g/v", "g/h/v"):
            (coordinate,) = found[name].coords.values()
            assert coordinate.dataset == "/g/x" and coordinate.dims == ("x",)
            np.testing.assert_array_equal(coordinate.values, expected["v"].coords["x"].values)


@pytest.mark.parametrize("writer", ["h5netcdf", "Zarr, format 3"])
def test_all_of_an_untrusted_file_in_one_helper(tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if each array started a process of its own, which takes a tenth of a second, or came back as another."""
    name, how, _ = WRITERS[writer]
    path = write(tmp_path / name, how, climate())
    started, right = [], UntrustedFile._start
    monkeypatch.setattr(UntrustedFile, "_start", lambda self: (started.append(self), right(self))[1])
    here, there = shardload.open(path), shardload.open(path, untrusted=True)
    assert list(there) == list(here) and repr(there) == repr(here)
    for name, info in here.items():
        assert repr(there[name].labels) == repr(info.labels), "as text, because of NaN"
    assert there["t"].dims == ("time", "lat", "lon") and len(there["t"].coords) >= 4
    assert len(started) == 1, "for the list, and for all labels"


@pytest.mark.parametrize("dims", [("lat", "lon"), ("lat", "bare"), ("lat", "lat"), ("lon", "lat"), ("bare",)])
def test_a_variable_of_netcdf_with_the_name_of_a_dimension(tmp_path: Path, dims: tuple[str, ...]) -> None:
    """Wrong if its axes had no names, or wrong ones: where the first one is that dimension, the library makes it a scale of
    several axes, to which none is attached, and keeps the numbers of the other dimensions alone.
    """
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("bare", 4)
        group = file.createGroup("g")
        for name, n in (("lat", 2), ("lon", 3)):
            group.createDimension(name, n)
        group.createVariable("v", "f4", ("lat", "lon"))[:] = 1
        group.createVariable("lat", "f4", dims)[:] = 2
    found = shardload.open(tmp_path / "a.nc")
    with netCDF4.Dataset(tmp_path / "a.nc") as file:
        assert found["g/v"].dims == file["g/v"].dimensions
        assert found["g/lat"].dims == file["g/lat"].dimensions


def test_arrays_without_names(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["plain"] = np.ones((2, 3), "f4")
        file["labelled"] = np.ones((2, 3), "f4")
        file["labelled"].dims[1].label = "energy"
        file["text"] = "abc"
        file["plain"].attrs["note"] = "as it is"
    found = shardload.open(tmp_path / "a.h5")
    assert found["plain"].dims == (None, None) and found["plain"].attrs == {"note": "as it is"}
    assert found["/labelled"].dims == (None, "energy") and not found["labelled"].coords
    assert found["text"].refused is not None
    assert "/labelled  (-=2, energy=3)  float32" in repr(found)
    assert "/plain  (2, 3)  float32" in repr(found)
    zarr.create_array(str(tmp_path / "a.zarr"), shape=(2, 3), dtype="f4", attributes={"_ARRAY_DIMENSIONS": "no list"})
    assert shardload.open(tmp_path / "a.zarr")["/"].dims == (None, None)
    with pytest.raises(KeyError, match="holds no array 'x'; it has /labelled, /plain, /text"):
        found["x"]
    with pytest.raises(KeyError, match="Did you mean '/plain'"):
        found["plane"]


def test_open_takes_what_a_load_takes(tmp_path: Path) -> None:
    """Wrong if an array could be loaded by the name of a link, and open said that it is not there."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["gas/rho"] = np.ones((2, 3), "f4")
        file["gas/rho"].attrs["units"] = "K"
        file["time"], file["link"] = 0.5, h5py.SoftLink("/gas/rho")
        file["about"], file["to"] = h5py.SoftLink("/gas"), h5py.SoftLink("/nowhere")
        file.create_group("Header").attrs.update({"BoxSize": 1.0, "by": np.bytes_("x")})
    path = f"{tmp_path}/a.h5"
    found = shardload.open(f"{path}:/link")
    assert list(found) == ["/link"] and found["link"].shape == (2, 3) and found["link"].attrs == {"units": "K"}
    for pattern, names in (
        ("/gas/*", {"/gas/rho"}),
        ("*", {"/gas/rho", "/time"}),
        ("/gas", {"/gas/rho"}),
        ("/about/*", {"/about/rho"}),
        ("/about", {"/about/rho"}),
    ):
        assert set(shardload.open(f"{path}:{pattern}")) == names
    header = shardload.open(f"{path}:/Header")
    assert not len(header) and header.attrs == {"BoxSize": 1.0, "by": "x"} and not shardload.open(path).attrs
    with pytest.raises(KeyError, match=r"'gas' in '.*a\.h5' is a group, not an array; in it are /gas/rho"):
        shardload.open(path)["gas"]
    with pytest.raises(ConfigError, match=r"holds no array '/no'. Arrays in the file"):
        shardload.open(f"{path}:/no")
    with pytest.raises(SourceError, match=r"'/to' in .* is a link to '/nowhere'"):
        shardload.open(f"{path}:/to")
    assert 0 not in found and found.get(None) is None  # type: ignore[call-overload]
    (tmp_path / "a.h5").rename(tmp_path / "b.h5")
    assert "no" not in found and found.get("Header") is None and found.get("/link") is found["link"]  # nothing is read for it
    with pytest.raises(KeyError, match="holds no array 'no'"):
        found["no"]
    with pytest.raises(KeyError, match=r"0 is no name; .* has /link"):
        found[0]  # type: ignore[index]


def test_what_arrays_have_in_common_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the file were opened anew for the labels of each array of a plan, or a coordinate read for each array that has
    it: 500 variables took seven times as long as in xarray.
    """
    made = xr.Dataset({f"v{k}": (("x",), np.full(3, k, "f4")) for k in range(5)}, {"x": ("x", [1.0, 2.0, 3.0], {"units": "m"})})
    path = write(tmp_path / "a.nc", {"engine": "h5netcdf"}, made)
    mesh, names = Mesh(np.array(jax.devices()[:1]), "a"), [f"v{k}" for k in range(5)]
    opened_names, right = list[str](), Hdf5File.open
    monkeypatch.setattr(Hdf5File, "open", lambda self, name, *rest: (opened_names.append(name), right(self, name, *rest))[1])
    assert shardload.open(path)["v3"].coords["x"].attrs["units"] == "m"
    assert opened_names.count("/x") == 2, "as an array, and as a coordinate"
    plan = shardload.plan(path, mesh, P(), dataset={name: name for name in names}, decode=True)
    arrays = plan.execute()
    opened_names.clear()
    files, open_to_read = list[str](), opened.open_to_read
    monkeypatch.setattr(file, "open_to_read", lambda path: (files.append(path), open_to_read(path))[1])
    found = shardload.to_xarray(arrays, plan)
    assert len(files) == 1 and sorted(opened_names) == ["/v0", "/v1", "/v2", "/v3", "/v4", "/x"]
    with xr.open_dataset(path, engine="h5netcdf") as expected:
        xr.testing.assert_identical(found.map(np.asarray).assign_attrs(found.attrs), expected.load())


def test_of_large_coordinates_each_array_has_what_it_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if an array without room for the values of a coordinate took them from the next one that has it, or kept all."""
    x, y = np.arange(3.0), np.arange(5.0)
    made = xr.Dataset({"v": (("x", "y"), np.zeros((3, 5))), "w": (("y",), np.zeros(5))}, {"x": x, "y": y})
    path = write(tmp_path / "a.nc", {"engine": "h5netcdf"}, made)
    monkeypatch.setattr("shardload.formats.labelling._MOST_LARGE_COORDS", 1)
    with Finder(Access()) as finder:
        labeller = Labeller(finder, small_nbytes=40)
        for name, has_values in (("v", {"x": True, "y": False}), ("w", {"y": True}), ("v", {"x": True, "y": False})):
            coords = labeller.label(path, find_array(path, name)).coords
            assert {name: coord.values is not None for name, coord in coords.items()} == has_values


def test_large_coordinates_are_named_only(tmp_path: Path) -> None:
    """Wrong if a plan of a small array had to read, and send to all ranks, the coordinates of millions of points."""
    made = xr.Dataset({"v": (("p",), np.zeros(20000, "f4"))}, coords={"p": np.arange(20000.0)})
    made["v"].attrs["long"] = "x" * 70000
    path = write(tmp_path / "a.nc", {"engine": "h5netcdf"}, made)
    info = shardload.open(path)["v"]
    assert info.coords["p"].values is None and info.coords["p"].dims == ("p",)
    assert len(pickle.dumps(info)) < 10000
    with Finder(Access()) as finder:
        labeller = Labeller(finder, small_nbytes=1 << 20)
        found = labeller.label(path, find_array(path, "v")).coords["p"].values
    assert found is not None and found.shape == (20000,)


def test_names_of_two_versions_belong_to_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if names that were read while the file changed were taken for those of the values."""
    path, labels = write(tmp_path / "a.nc", {"engine": "h5netcdf"}, climate()), Hdf5Source.labels
    info = find_array(path, "t")
    with Finder(Access()) as finder:
        before = Labeller(finder).label(path, info).labels.read_in
        monkeypatch.setattr(Hdf5Source, "labels", lambda self: (os.utime(path, ns=(1, 1)), labels(self))[1])
        assert Labeller(finder).label(path, info).labels.read_in == MIXED != before


def test_damaged_names_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.nc", {"engine": "h5netcdf"}, climate())
    monkeypatch.setattr("shardload.formats.hdf5.source.labels_of", raising(RuntimeError("bad heap")))
    assert shardload.open(path)["t"].dims == (None, None, None)


@pytest.mark.each_value
@pytest.mark.parametrize("call", ["labels_of", "Hdf5Source.read_into"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyError("file read failed: errno = 116, ...")])
def test_names_that_cannot_be_read_now(tmp_path: Path, call: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if arrays had no names, or coordinates no values, because a file server failed for a moment."""
    path = write(tmp_path / "a.nc", {"engine": "h5netcdf"}, climate())
    monkeypatch.setattr(f"shardload.formats.hdf5.source.{call}", raising(error))
    with pytest.raises(
        SourceError, match=r"'/.*' in '.*a.nc' cannot be read: .*(Input|errno = 116).*Its device or file server"
    ):
        shardload.open(path)["t"].coords  # noqa: B018


def test_open_needs_neither_jax_nor_mpi(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nc", {"engine": "h5netcdf"}, climate())
    program = f"import shardload; print(shardload.open({path!r})['t'].dims)"
    done = run_without({"jax", "mpi4py", "xarray"}, program, stop='ImportError(f"{name} is imported")')
    assert done.stdout.strip() == "('time', 'lat', 'lon')", done.stderr


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no-such\.nc"):
        shardload.open(tmp_path / "no-such.nc")
    path = write(tmp_path / "a.nc", {"engine": "h5netcdf"}, climate())
    with pytest.raises(ConfigError, match=r"a\.nc' holds no array '/tt'\. Arrays in the file \(nearest first\): '/t' "):
        shardload.open(f"{path}:/tt")  # it has no dataset=
    with pytest.raises(ConfigError, match="open takes the path of a file, found list"):
        shardload.open([])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="untrusted is 'yes'"):
        shardload.open("a.nc", untrusted="yes")  # type: ignore[arg-type]


def test_edges_of_cells_are_no_coordinates_of_centers(tmp_path: Path) -> None:
    """Wrong if the first edges were taken for the places of the values, or were left out without a word."""
    with h5py.File(tmp_path / "edges.h5", "w") as file:
        file["v"] = np.arange(4, dtype="f4")
        file["x"], file["y"] = np.arange(5.0), np.arange(4.0) + 0.5
        for name in "xy":
            file[name].make_scale(name)
            file["v"].dims[0].attach_scale(file[name])
    plan = shardload.plan(str(tmp_path / "edges.h5"), Mesh(np.array(jax.devices()[:1]), "a"), P(), dataset="v")
    with pytest.warns(shardload.LeftOutWarning, match="do not fit its axes: /x"):
        v = shardload.to_xarray(plan.execute(), plan)
    assert "x" not in v.coords
