"""Copies between formats and layouts: read back by each format's own library, and compared with the source read by its own."""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import netCDF4
import numpy as np
import pytest
import xarray
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, SourceError
from shardload.engine.session import Session
from shardload.jobs.copying import copy as copying
from shardload.jobs.copying.copy import CopySource
from shardload.storage.leftovers import find_leftover
from tests.mpi.support import compare, mesh_of, on_disk, on_root, ramp, same_error
from tests.tiers import thorough
from tests.unit.files import stored_in, write_hdf5

pytestmark = pytest.mark.any_library

Array = np.ndarray[Any, Any]

SHAPE = (13, 22, 17)
VALUES = ramp(SHAPE)
BIG = ramp((31, 9), "i4").astype(">i4")


LARGE = ramp((29, 48, 32))


def make_h5(path: Path, values: Array = VALUES, **layout: Any) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["title"] = "a file"
        rho = file.create_dataset("rho", data=values, **layout)
        rho.attrs["scale_factor"] = np.float32(0.1)
        rho.attrs["names"] = ["a", "b"]
        rho.attrs["three"] = np.arange(3, dtype="i2")
        group = file.create_group("g")
        group.attrs["kind"] = np.bytes_("of a group")
        group["big"] = BIG
        file["scalar"] = 3.5
        file["empty"] = np.empty((0, 3), "i2")


def make_zarr(path: Path, version: int, shards: tuple[int, ...] | None = None) -> None:
    root = zarr.open_group(str(path), mode="w", zarr_format=version, attributes={"title": "a file"})
    rho = root.create_array("rho", shape=SHAPE, dtype="f4", chunks=(4, 5, 6), shards=shards)
    rho[...] = VALUES
    rho.attrs["names"] = ["a", "b"]
    how: dict[str, Any] = {"serializer": zarr.codecs.BytesCodec(endian="big")} if version == 3 else {}
    root.create_group("g").create_array("big", shape=BIG.shape, dtype=">i4", chunks=(7, 4), **how)[...] = BIG


SOURCES: dict[str, Callable[[Path], None]] = {
    "gzip.h5": lambda path: make_h5(path, chunks=(4, 5, 6), compression="gzip", shuffle=False),
    "plain.h5": make_h5,
    "two.zarr": lambda path: make_zarr(path, 2),
    "three.zarr": lambda path: make_zarr(path, 3),
    "sharded.zarr": lambda path: make_zarr(path, 3, (8, 10, 12)),
}
TARGETS: dict[str, dict[str, Any]] = {
    "out.h5": {},
    "out.nc": {"chunks": (5, 7, 3), "compression": {"name": "gzip", "shuffle": True}},
    "out.zarr": {"chunks": (5, 7, 3), "compression": "zstd"},
    "sharded.zarr": {"chunks": (3, 4, 6), "shards": (6, 8, 18), "compression": "gzip"},
}


def opened(path: Path) -> Any:
    return zarr.open_group(str(path), mode="r") if path.suffix == ".zarr" else h5py.File(path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for rounds of a few chunks."""
    monkeypatch.setattr(copying, "_LEAST_READING_NBYTES", 1 << 14)


def copy(comm: Any, source: Path | str, target: Path, **options: Any) -> shardload.CopyReport:
    """The report, when all ranks have it. On rank 0, a warning has said what was left out."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("error")
        warnings.simplefilter("always", shardload.LeftOutWarning)
        report = shardload.copy(str(source), str(target), timeout=60.0, comm=comm, progress=False, **options)
    comm.barrier()
    notes = report.plan.notes if comm.rank == 0 else ()
    assert [str(warning.message) for warning in said] == [f"'{target}': {'; '.join(notes)}"] * bool(notes)
    return report


@pytest.mark.parametrize("where", ["on all ranks", "on the last rank"])
def test_a_warning_that_is_an_error(comm: Any, shared_tmp_path: Path, where: str) -> None:
    """Wrong if ranks raised different errors, some waited for the others, a file were left, or the next call failed."""
    before, after = shared_tmp_path / "in.h5", shared_tmp_path / "out.h5"

    def make() -> None:
        make_h5(before)
        with h5py.File(before, "a") as file:
            file["link"] = h5py.SoftLink("/rho")

    on_root(comm, make)
    is_error = where == "on all ranks" or comm.rank == comm.size - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error" if is_error else "ignore")
        with pytest.raises(shardload.LeftOutWarning, match="links were left out"):
            shardload.copy(before, after, timeout=30)
    assert on_disk(comm, shared_tmp_path) == ["in.h5"]
    copy(comm, before, after)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.usefixtures("small")
def test_from_each_format_to_each(comm: Any, shared_tmp_path: Path, source: str, target: str) -> None:
    """Wrong if a chunk went to another's place, kept values of an earlier round, or an attribute or a byte order were lost."""
    before, after = shared_tmp_path / f"in-{source}", shared_tmp_path / target
    on_root(comm, lambda: SOURCES[source](before))
    staging = 60_000 if "plain" not in source else 400_000
    report = copy(comm, before, after, staging=staging, verify="full" if target == "out.h5" else "checksum", **TARGETS[target])
    assert sorted(os.listdir(shared_tmp_path)) == sorted({before.name, after.name})
    assert report.written is not None
    assert report.written.n_read_back == report.written.n_chunks
    assert target != "out.h5" or report.written.n_decoded == report.written.n_chunks
    if comm.rank == 0:
        first, second = opened(before), opened(after)
        names = ["rho", "g/big", *(["scalar", "empty"] if before.suffix == ".h5" else [])]
        for name in names:
            np.testing.assert_array_equal(second[name][...], first[name][...], err_msg=name)
            assert np.dtype(second[name].dtype).newbyteorder("=") == np.dtype(first[name].dtype).newbyteorder("="), name
        assert second["rho"].chunks == TARGETS[target].get("chunks", first["rho"].chunks)
        assert list(second["rho"].attrs["names"]) == ["a", "b"]
        assert second.attrs["title"] in ("a file", b"a file")
        if before.suffix == ".h5":
            scale = second["rho"].attrs["scale_factor"]
            assert np.float32(scale) == np.float32(0.1)
            assert after.suffix == ".zarr" or scale.dtype == np.float32
            assert list(second["rho"].attrs["three"]) == [0, 1, 2]
            assert second["g"].attrs["kind"] in ("of a group", b"of a group")
        if after.name == "out.h5":
            assert second["g/big"].dtype == np.dtype(">i4")
            assert second["rho"].compression == {"gzip.h5": "gzip"}.get(source, second["rho"].compression)
        if after.name == "sharded.zarr":
            assert second["rho"].shards == (6, 8, 18)
        if after.suffix in (".h5", ".nc"):
            second.close()


def climate(path: Path) -> None:
    lat, lon, time = np.linspace(-40, 40, 9), np.arange(0, 360, 30.0), np.arange(7.0)
    values = ramp((7, 9, 12))
    values[2, 3, 4] = np.nan
    counts = ramp((7, 9), "i2")
    counts[1, 1] = -7
    made = xarray.Dataset(
        {"u": (("time", "lat", "lon"), values, {"units": "m/s"}), "n": (("time", "lat"), counts)},
        {"time": ("time", time, {"units": "days since 2001-01-01"}), "lat": lat, "lon": ("lon", lon, {"axis": "X"})},
        {"Conventions": "CF-1.8"},
    )
    encoding = {
        "u": {"zlib": True, "chunksizes": (2, 9, 5), "_FillValue": np.float32(-999), "shuffle": False},
        "n": {"_FillValue": np.int16(-7), "chunksizes": (3, 4)},
    }
    if path.suffix == ".nc":
        made.to_netcdf(path, encoding=encoding, unlimited_dims=["time"], engine="netcdf4")
    else:
        version = 2 if path.name.startswith("two") else 3
        encoding = {"u": {"chunks": (2, 9, 5), "_FillValue": np.float32(-999)}, "n": {"_FillValue": -7, "chunks": (3, 4)}}
        made.to_zarr(path, zarr_format=version, encoding=encoding, consolidated=False)


def open_climate(path: Path, **how: Any) -> xarray.Dataset:
    if path.suffix == ".zarr":
        return xarray.open_zarr(path, consolidated=False if "in" in path.name else None, **how)
    return xarray.open_dataset(path, engine="h5netcdf" if path.suffix == ".h5" else "netcdf4", **how)


@pytest.mark.parametrize("target", ["out.nc", "out.zarr"])
@pytest.mark.parametrize("source", ["in.nc", "two-in.zarr", "in.zarr"])
@pytest.mark.usefixtures("small")
def test_xarray_reads_the_same(comm: Any, shared_tmp_path: Path, source: str, target: str) -> None:
    """Wrong if dims, coordinates or missing data were others: xarray says that, decoded and as stored."""
    before, after = shared_tmp_path / source, shared_tmp_path / target
    on_root(comm, lambda: climate(before))
    copy(comm, before, after, staging=100_000)
    if comm.rank == 0:
        with open_climate(before) as first, open_climate(after) as second:
            xarray.testing.assert_identical(first.load(), second.load())
            assert np.isnan(second["n"][1, 1])
            assert np.isnan(second["u"][2, 3, 4])
            for name in first.variables:
                assert first[name].encoding.get("_FillValue") == pytest.approx(
                    second[name].encoding.get("_FillValue"), nan_ok=True
                ), name
        if before.suffix == after.suffix == ".nc":
            with xarray.open_dataset(after, engine="netcdf4") as second:
                assert second.encoding["unlimited_dims"] == {"time"}


def test_an_untrusted_file(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if names of axes, types or missing data were lost because helpers read the file."""
    before, after = shared_tmp_path / "in.nc", shared_tmp_path / "out.nc"
    on_root(comm, lambda: climate(before))
    report = copy(comm, before, after, untrusted=True, staging=256 << 20)
    assert any("untrusted" in note for note in report.notes)
    if comm.rank == 0:
        with open_climate(before) as first, open_climate(after) as second:
            xarray.testing.assert_identical(first.drop_attrs(deep=False).load(), second.load())
            assert second["n"].encoding["_FillValue"].dtype == "i2"
            assert second["u"].encoding["zlib"]


def test_a_coordinate_that_was_never_written_in_an_untrusted_file(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if it were taken for a dimension without a variable, because nothing of it is stored, and left out."""
    before, after = shared_tmp_path / "in.h5", shared_tmp_path / "out.h5"

    def write() -> None:
        with h5py.File(before, "w") as file:
            file["x"] = np.arange(3.0)
            file.create_dataset("t", (3,), "f8", fillvalue=7.0).make_scale("t")
            file["x"].dims[0].attach_scale(file["t"])

    on_root(comm, write)
    copy(comm, before, after, untrusted=True)
    if comm.rank == 0:
        with h5py.File(after) as file:
            assert file["t"][...].tolist() == [7.0] * 3


@pytest.mark.parametrize(
    ("dataset", "select", "dtype"),
    [
        ((), {"time": -1, "lat": slice(2, 7)}, None),
        (("u",), (slice(1, 6), 3, slice(2, 11)), "float64"),
        (("/u",), (-2, slice(None), slice(5, 6)), None),
        (("n", "u"), {"lat": slice(1, 8)}, "float32"),
    ],
)
@pytest.mark.usefixtures("small")
def test_a_part_in_another_type(
    comm: Any, shared_tmp_path: Path, dataset: tuple[str, ...], select: Any, dtype: str | None
) -> None:
    """Wrong if a selection began at another place, left out coordinates, or cut an array and not its coordinates."""
    before, after = shared_tmp_path / "in.nc", shared_tmp_path / "out.nc"
    on_root(comm, lambda: climate(before))
    copy(comm, before, after, dataset=dataset, select=select, dtype=dtype, staging=100_000)
    if comm.rank == 0:
        with open_climate(before, decode_cf=False) as first, open_climate(after, decode_cf=False) as second:
            names = [name.strip("/") for name in dataset] or list(first.data_vars)
            index = select if isinstance(select, dict) else dict(zip(("time", "lat", "lon"), select, strict=True))
            expected = first[names].isel(index).load()
            for name in names:
                cast = expected[name].astype(dtype or expected[name].dtype)
                np.testing.assert_array_equal(second[name].values, cast.values, strict=True)
                assert second[name].dims == expected[name].dims
                for coordinate in expected[name].coords:
                    np.testing.assert_array_equal(second[coordinate].values, expected[coordinate].values, strict=True)


@pytest.fixture
def planes(comm: Any, shared_tmp_path: Path) -> tuple[Path, Path, Array]:
    """A file of planes; where the copy goes; the values."""
    before, values = shared_tmp_path / "in.h5", ramp((24, 30, 20))
    on_root(comm, lambda: write_hdf5(before, {"x": values}, chunks=(1, 30, 20), compression="gzip"))
    return before, shared_tmp_path / "out.h5", values


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("small")
def test_ranks_read_together_what_fits_none_alone(comm: Any, planes: tuple[Path, Path, Array]) -> None:
    """Wrong if a chunk of the source were decoded twice though the memory of all ranks has room for whole slabs."""
    before, after, values = planes
    slab = 8 * 30 * 20 * 4
    unit = 8 * 5 * 4 * 4
    staging = 5 * (slab // comm.size + unit * 8) + (1 << 14) + 8 * unit * 16
    report = copy(comm, before, after, staging=staging, chunks=(8, 5, 4))
    (one,) = report.plan.arrays
    assert one.is_together
    assert report.n_decoded == 24
    assert one.factor == 1
    assert "each chunk of the source is decoded once" in str(report.plan)
    if comm.rank == 0:
        with h5py.File(after) as file:
            np.testing.assert_array_equal(file["x"][...], values)
            assert file["x"].chunks == (8, 5, 4)
            assert (file["x"].compression, file["x"].compression_opts) == ("gzip", 4)


@pytest.mark.usefixtures("small")
def test_a_plan_says_how_often_chunks_are_decoded(comm: Any, shared_tmp_path: Path, planes: tuple[Path, Path, Array]) -> None:
    """Wrong if the number differed from what is really decoded."""
    before, after, values = planes
    options = {"staging": 60_000, "chunks": (24, 5, 4)}
    planned = shardload.copy(str(before), str(after), timeout=60.0, comm=comm, only_plan=True, **options)
    assert on_disk(comm, shared_tmp_path) == ["in.h5"]
    assert planned.plan.arrays[0].factor > 1
    assert f"is decoded {planned.plan.arrays[0].factor:.2g} times" in str(planned.plan)
    report = copy(comm, before, after, **options)
    assert report.n_decoded == planned.plan.arrays[0].n_decoded
    compare(comm, after, {"x": values})


@pytest.mark.parametrize("how", [{}, {"select": (slice(1, 9), slice(1, 8)), "chunks": (3, 3), "staging": 16_900}], ids=str)
@pytest.mark.usefixtures("small")
def test_chunks_that_the_source_does_not_store(comm: Any, shared_tmp_path: Path, how: dict[str, Any]) -> None:
    """Wrong if nobody were told, or a chunk were counted in each part of the array that is copied at once."""
    before, after = shared_tmp_path / "in.h5", shared_tmp_path / "out.zarr"

    def make() -> None:
        with h5py.File(before, "w") as file:
            made = file.create_dataset("x", (10, 8), "i4", chunks=(5, 4), fillvalue=-3)
            made[:5, :4] = 7

    on_root(comm, make)
    report = copy(comm, before, after, **how)
    assert (report.n_decoded > 4) == bool(how), "chunks that are read twice"
    assert any("3 chunks of '/x'" in note and "not stored" in note for note in report.notes), report.notes
    if comm.rank == 0:
        found = zarr.open_group(str(after), mode="r")["x"]
        assert found.fill_value == -3
        with h5py.File(before) as file:
            np.testing.assert_array_equal(found[...], file["x"][how.get("select", ...)])


@pytest.mark.parametrize("name", ["out.h5", "out.nc"])
def test_text_keeps_its_encoding(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if text of a fixed length in UTF-8 became ASCII with other bytes in it, which no reader knows how to show."""
    before, after = shared_tmp_path / "in.h5", shared_tmp_path / name
    utf8 = h5py.string_dtype("utf-8", 8)

    def make() -> None:
        with h5py.File(before, "w") as file:
            file["x"] = np.arange(6.0)
            for owner in (file, file["x"]):
                owner.attrs["place"] = np.array("Zürich".encode(), utf8)
                owner.attrs["plain"] = np.bytes_("Bern")

    def told(owner: Any, key: str) -> tuple[int, int, bytes]:
        kind = h5py.h5a.open(owner.id, key.encode()).get_type()
        return kind.get_cset(), kind.get_size(), bytes(owner.attrs[key])

    on_root(comm, make)
    copy(comm, before, after)
    if comm.rank == 0:
        with h5py.File(before) as first, h5py.File(after) as second:
            for path in ("/", "x"):
                for key in ("place", "plain"):
                    assert told(second[path], key) == told(first[path], key)
        if name.endswith(".nc"):
            with netCDF4.Dataset(after) as read:
                assert (read.place, read["x"].place) == ("Zürich", "Zürich")


def test_blosc_that_says_no_compressor(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the parameters that PyTables leaves out, those that are Blosc's own, were not known: no Zarr store has numbers
    in their place.
    """
    before, after = shared_tmp_path / "in.h5", shared_tmp_path / "out.zarr"

    def make() -> None:
        with h5py.File(before, "w") as file:
            blosc = {"compression": hdf5plugin.Blosc.filter_id, "compression_opts": (2, 2, 4, 32, 7, 1)}
            file.create_dataset("x", data=ramp((6, 8)), chunks=(2, 4), **blosc)

    on_root(comm, make)
    copy(comm, before, after)
    found = zarr.open_group(str(after), mode="r")["x"]
    assert [codec.to_dict()["configuration"] for codec in found.compressors] == [
        {"typesize": 4, "cname": "blosclz", "clevel": 7, "shuffle": "shuffle", "blocksize": 0}
    ]
    np.testing.assert_array_equal(found[...], ramp((6, 8)))


@pytest.mark.parametrize("encoding", ["utf-8", "latin1"])
@pytest.mark.parametrize("name", ["out.zarr", "out.nc", "out.h5"])
def test_characters_of_netcdf(comm: Any, shared_tmp_path: Path, name: str, encoding: str) -> None:
    """Wrong if text kept the attribute that says how bytes are text (xarray does not open that), if its bytes were taken for
    UTF-8, or if the axis of the characters lost its name: in HDF5 the coordinate is a scale of two axes.
    """
    before, after = shared_tmp_path / "in.nc", shared_tmp_path / name
    lat = np.array([47.0, 46.0])

    def make() -> None:
        names = [text.encode(encoding).ljust(7, b"\0") for text in ("Zürich", "Bern")]
        with netCDF4.Dataset(before, "w", format="NETCDF4_CLASSIC") as file:
            file.createDimension("station", 2)
            file.createDimension("length", 7)
            file.createVariable("lat", "f8", ("station",))[:] = lat
            station = file.createVariable("station", "S1", ("station", "length"))
            station[:] = np.array([list(name) for name in names], "u1").view("S1")
            station.setncattr("_Encoding", encoding)

    on_root(comm, make)
    notes = copy(comm, before, after).notes
    if comm.rank == 0:
        assert not [note for note in notes if "what axes" in note]
        if name == "out.h5":
            with h5py.File(after) as file:
                assert b"".join(file["station"][0]).decode(encoding) == "Zürich"
                assert [axis.label for axis in file["station"].dims] == ["station", "length"]
        else:
            with xarray.open_dataset(before, engine="netcdf4") as first, xarray.open_dataset(after) as second:
                assert first["station"].values.tolist() == second["station"].values.tolist() == ["Zürich", "Bern"]
                xarray.testing.assert_equal(first.drop_vars("station"), second.drop_vars("station"))
    comm.barrier()


@pytest.mark.parametrize("name", ["in.zarr", "in.nc"])
def test_axes_without_a_coordinate(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if notes told of arrays that were never there, or if a coordinate that is there were not copied."""
    before, after = shared_tmp_path / name, shared_tmp_path / "out.nc"

    def make() -> None:
        found = xarray.Dataset({"t": (("y", "x"), ramp((3, 4)), {"coordinates": "none lat"})}, {"x": np.arange(4)})
        found["lat"] = ("y", np.arange(3))
        found.to_netcdf(before) if name == "in.nc" else found.to_zarr(before, zarr_format=2)

    on_root(comm, make)
    assert copy(comm, before, after, dataset=("t",)).notes == ()
    comm.barrier()
    with xarray.open_dataset(after) as found:
        assert set(found.variables) == {"t", "x", "lat"} and found["t"].dims == ("y", "x")


def test_a_netcdf_file_of_a_run_that_died(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if a store that xarray does not open were made without a word, or if no way out were told."""
    before, with_text = shared_tmp_path / "in.nc", shared_tmp_path / "text.nc"

    def make() -> None:
        with netCDF4.Dataset(before, "w") as file, netCDF4.Dataset(with_text, "w") as texts:
            file.createDimension("time", None)
            for name, n in (("a", 5), ("b", 3)):
                file.createVariable(name, "i4", ("time",))[:n] = np.arange(n)
            texts.createDimension("time", None)
            texts.createVariable("a", "i4", ("time",))[:5] = np.arange(5)
            texts.createVariable("name", str, ("time",))[:2] = np.array(["x", "y"], dtype=object)

    on_root(comm, make)
    told = "axis 'time' has 2 elements in '/name', but 5 in '/a': xarray opens no group with both"
    assert told in copy(comm, with_text, shared_tmp_path / "text.zarr").notes
    notes = copy(comm, before, shared_tmp_path / "out.zarr").notes
    assert "axis 'time' has 3 elements in '/b', but 5 in '/a': xarray opens no group with both" in notes
    same_error(comm, lambda: copy(comm, before, shared_tmp_path / "out.nc"), ConfigError, "one length")
    assert not copy(comm, before, shared_tmp_path / "part.zarr", select={"time": slice(0, 3)}).notes
    copy(comm, before, shared_tmp_path / "out.nc", select={"time": slice(0, 3)})
    for name in ("out.nc", "part.zarr"):
        with xarray.open_dataset(shared_tmp_path / name) as found:
            np.testing.assert_array_equal(found["a"], np.arange(3))
            np.testing.assert_array_equal(found["b"], np.arange(3))


@pytest.mark.parametrize("coordinate", ["none", "of the file", "of each group"])
@pytest.mark.parametrize("target", ["out.nc", "out.h5", "out.zarr"])
def test_groups_of_netcdf_with_axes_of_their_own(comm: Any, shared_tmp_path: Path, target: str, coordinate: str) -> None:
    """Wrong if axes of one name in several groups had to be equally long, or one group got the coordinate of another."""
    before, after = shared_tmp_path / "in.nc", shared_tmp_path / target
    lengths = {"": 4, "a": 3, "b": 5, "b/c": 4}

    def make() -> None:
        with netCDF4.Dataset(before, "w") as file:
            for name, n in lengths.items():
                group = file.createGroup(name) if name else file
                group.createDimension("t", n)
                group.createDimension("x", 2)
                if coordinate == "of each group" or (coordinate == "of the file" and not name):
                    group.createVariable("t", "f8", ("t",))[:] = np.arange(n) * 2.0
                group.createVariable("v", "i4", ("t", "x"))[:] = np.arange(2 * n).reshape(n, 2)

    on_root(comm, make)
    copy(comm, before, after)
    how = {"out.nc": {}, "out.h5": {"engine": "h5netcdf", "phony_dims": "sort"}, "out.zarr": {"engine": "zarr"}}[target]
    for name in lengths:
        with xarray.open_dataset(before, group=name) as one, xarray.open_dataset(after, group=name, **how) as other:
            np.testing.assert_array_equal(one["v"], other["v"])
            assert target == "out.h5" or (one["v"].dims == other["v"].dims and one.sizes == other.sizes)
            assert set(one.coords) <= set(other.coords) or name == "b/c"
            for key in set(one.coords) & set(other.coords):
                np.testing.assert_array_equal(one[key], other[key])


def test_groups_that_the_new_file_cannot_have(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if anything were written beside the new store, or netCDF programs could not open the new file."""
    inside = shared_tmp_path / "a" / "b"
    before = inside / "in.h5"

    def make() -> None:
        inside.mkdir(parents=True)
        with h5py.File(before, "w") as file:
            file["x"] = np.arange(6.0)
            file["x"].dims[0].label = "lon"
            for name in (" blank", "Header", "lon"):
                file.create_group(name).attrs["t"] = 1
            up = h5py.Group(h5py.h5g.create(file.id, b".."))
            up.attrs["t"] = 2
            h5py.Group(h5py.h5g.create(up.id, b"..")).attrs["t"] = 3

    on_root(comm, make)
    for name in ("out.zarr", "out.nc", "out.h5"):
        notes = "\n".join(copy(comm, before, inside / name).notes)
        assert "the attributes of group '/..', which is no name" in notes and "'/../..'" in notes
        assert ("group ' blank'" in notes or "group '/ blank'" in notes) == (name == "out.nc") == ("group '/lon'" in notes)
        assert "Header" not in notes
    comm.barrier()
    if comm.rank == 0:
        assert sorted(os.listdir(inside)) == ["in.h5", "out.h5", "out.nc", "out.zarr"]
        assert os.listdir(inside.parent) == ["b"] and "a" in os.listdir(shared_tmp_path)
        assert not {"zarr.json", ".zgroup", ".zattrs"} & set(os.listdir(shared_tmp_path))
        with netCDF4.Dataset(inside / "out.nc") as found:
            assert list(found.groups) == ["Header"] and found["Header"].t == 1


def test_what_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if anything were written, or only rank 0 raised. What else is refused: `tests/unit/cli/test_copy.py`."""
    before = shared_tmp_path / "in.h5"
    on_root(comm, lambda: make_h5(before, chunks=(4, 5, 6), compression="gzip", shuffle=True))
    folder = shared_tmp_path / "in.zarr"
    on_root(comm, lambda: make_zarr(folder, 3))
    cases: list[tuple[Any, str, dict[str, Any], type[Exception], str]] = [
        (before, "in.h5", {"mode": "w"}, ConfigError, "is the file that is to be copied"),
        (folder, "in.zarr/new.zarr", {}, ConfigError, "lies in"),
        (folder / "rho", "in.zarr", {"mode": "w"}, ConfigError, "lies in"),
        (shared_tmp_path / "no.h5", "out.h5", {}, SourceError, "no.h5"),
        (before, "out.dat", {}, ConfigError, "suffix"),
        (before, "out.nc/out.nc", {}, ConfigError, "does not exist"),
        (before, "out.h5", {"dataset": ("rh",)}, ConfigError, "'/rho'"),
        (before, "out2.h5", {"chunks": (4, 5, 6, 7)}, ConfigError, "no array has 4 axes"),
        (before, "out2.h5", {"dataset": ("scalar", "g/big"), "compression": "gzip"}, ConfigError, "such as chunks=(31, 9)"),
        (before, "out2.h5", {"chunks": "4,5,6"}, ConfigError, "chunks is '4,5,6'; expected 'keep' or None (or a size"),
        (before, "out2.zarr", {"shards": {"rho": (4, 5, 6)}}, ConfigError, "shards is {'rho': (4, 5, 6)}; expected a size"),
        (f"{before}:/rho", "out2.h5", {"dataset": ("g/big",)}, ConfigError, "names another"),
        (before, "in.zarr", {"compression": "zstd"}, ConfigError, "exists, and mode is 'w-'"),
    ]
    for source, target, options, kind, text in cases:
        same_error(comm, lambda s=source, t=target, o=options: copy(comm, s, shared_tmp_path / t, **o), kind, text)
    copy(comm, before, shared_tmp_path / "out.h5", chunks=(4, 5))  # of '/g/big'
    assert on_disk(comm, shared_tmp_path) == ["in.h5", "in.zarr", "out.h5"]


@pytest.mark.usefixtures("small")
def test_a_source_that_changes_meanwhile(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the copy were a mixture."""
    before = shared_tmp_path / "in.h5"
    on_root(comm, lambda: make_h5(before, chunks=(4, 5, 6), compression="gzip"))
    chunks = CopySource._chunks

    def change(self: Any, *moves: Any) -> Any:
        if comm.rank == 0:
            os.utime(before, ns=(time.time_ns(), time.time_ns() + 10**9))
        yield from chunks(self, *moves)

    monkeypatch.setattr(CopySource, "_chunks", change)
    target = shared_tmp_path / "out.h5"
    options = {"staging": 60_000, "dataset": ("rho",)}  # no other array is opened later and finds it
    same_error(comm, lambda: copy(comm, before, target, **options), SourceError, "changed while it was read")
    assert on_disk(comm, shared_tmp_path) == ["in.h5"]


class Stopped(KeyboardInterrupt):
    """What stops a job at once: as Ctrl-C on all ranks."""


RESUMED: dict[str, dict[str, Any]] = {
    "out.zarr": {"chunks": (5, 7, 6), "compression": "zstd"},
    "plain.zarr": {"chunks": (5, 7, 6), "compression": None, "dtype": "float64"},
}


@pytest.fixture
def stopped(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Begins a copy, stops it after some rounds, and returns the path of the source."""

    def run(target: Path, n: int, **options: Any) -> Path:
        before = shared_tmp_path / "in.h5"
        on_root(comm, lambda: make_h5(before, LARGE, chunks=(8, 11, 9), compression="gzip"))
        move = Session.move

        def stop(self: Any, *more: Any) -> None:
            if self._n_rounds == n:
                comm.barrier()
                raise Stopped
            move(self, *more)

        with monkeypatch.context() as patch:
            patch.setattr(Session, "move", stop)
            with pytest.raises(Stopped) as held:  # and with it all that its frames hold, as at the end of a process
                copy(comm, before, target, **options)
        # An HDF5 file that is open when the process ends calls Python, which has ended by then: a crash.
        assert held.value.__traceback__ is not None
        files = h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)
        n_open = sum(one.get_access_plist().get_driver() == h5py.h5fd.fileobj_driver for one in files)
        assert comm.allgather(n_open) == [0] * comm.size
        comm.barrier()
        return before

    return run


def left_of(target: Path) -> Path:
    (left,) = target.parent.glob("*.unfinished")
    return left


def damage(left: Path) -> None:
    """Cut a chunk, take one away, and spoil what the other job wrote last."""
    (left / "zarr.json").write_text("{}")
    torn, gone, *_ = sorted(path for path in (left / "rho" / "c").rglob("*") if path.is_file())
    torn.with_name(f"{torn.name}.part").write_bytes(torn.read_bytes()[:-1])
    torn.unlink()
    gone.unlink()


@pytest.mark.parametrize("name", thorough(["out.zarr", "damaged.zarr", "plain.zarr"], ["plain.zarr"]))
@pytest.mark.usefixtures("small")
def test_a_copy_that_was_stopped_goes_on(comm: Any, shared_tmp_path: Path, stopped: Callable[..., Path], name: str) -> None:
    """Wrong if anything were trusted that is not whole, written twice, in the way or left behind; or if all were done again."""
    target, options = shared_tmp_path / name, RESUMED["plain.zarr" if name == "plain.zarr" else "out.zarr"]
    before = stopped(target, 4, staging=45_000, **options)
    assert not target.exists()
    assert f"shardload copy IN {target} --resume" in str(find_leftover(str(left_of(target))))
    comm.barrier()
    if name == "damaged.zarr":
        on_root(comm, lambda: damage(left_of(target)))
    report = copy(comm, before, target, staging=100_000, resume=True, verify="full", **options)
    n_all = sum(int(np.prod(array.spec.grid)) for array in report.plan.sources)
    assert report.written is not None
    assert 0 < report.n_resumed < n_all
    assert report.written.n_chunks == report.written.n_read_back == n_all - report.n_resumed
    told = f"{report.n_resumed:,} of {n_all:,} chunks were there already, and were not read back"
    assert told in report.notes
    assert on_disk(comm, shared_tmp_path) == sorted(["in.h5", name])
    for one in ("rho", "g/big", "scalar", "empty"):
        np.testing.assert_array_equal(stored_in(target, one), stored_in(before, one), err_msg=one)


@pytest.mark.usefixtures("small")
def test_a_copy_into_a_folder_by_a_link_goes_on(comm: Any, shared_tmp_path: Path, stopped: Callable[..., Path]) -> None:
    """Wrong if what was left were taken for that of another file: home folders often have links to large file systems."""

    def make() -> None:
        (shared_tmp_path / "large").mkdir()
        (shared_tmp_path / "link").symlink_to("large")

    on_root(comm, make)
    target, options = shared_tmp_path / "link" / "out.zarr", RESUMED["out.zarr"]
    before = stopped(target, 4, staging=45_000, **options)
    report = copy(comm, before, target, staging=45_000, resume=True, **options)
    assert report.n_resumed > 0
    assert os.listdir(shared_tmp_path / "large") == ["out.zarr"]


@pytest.mark.usefixtures("small")
def test_chunks_that_another_job_has_written_are_on_disk(
    comm: Any, shared_tmp_path: Path, stopped: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a chunk got its name while it was in memory alone: after the machine stopped, a part of it would be trusted."""
    target, options = shared_tmp_path / "out.zarr", RESUMED["out.zarr"]
    synced: set[tuple[int, int]] = set()
    unsynced: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        synced.add((found.st_dev, found.st_ino))

    def named(before: str, after: str) -> None:
        found = os.stat(before)
        if (found.st_dev, found.st_ino) not in synced:
            unsynced.append(after)
        rename(before, after)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        patch.setattr(os, "rename", named)
        before = stopped(target, 4, staging=45_000, **options)
        synced_before = set().union(*comm.allgather(synced))
        synced.clear()
        assert copy(comm, before, target, staging=45_000, resume=True, **options).n_resumed > 0
    assert not unsynced
    synced_now = set().union(*comm.allgather(synced))
    comm.barrier()
    for path in [target, *target.rglob("*")]:
        found = path.stat()
        known = synced_now if path.is_dir() else synced_now | synced_before  # names are synced by the job that goes on
        assert (found.st_dev, found.st_ino) in known, path
    comm.barrier()


@pytest.mark.usefixtures("small")
def test_what_cannot_go_on(comm: Any, shared_tmp_path: Path, stopped: Callable[..., Path]) -> None:
    """Wrong if a copy went on with another source, other options, or beside another job, or touched what was left."""
    target, options = shared_tmp_path / "out.zarr", RESUMED["out.zarr"]
    before = stopped(target, 2, staging=45_000, **options)
    left = sorted(os.listdir(shared_tmp_path))

    def refused(text: str, **more: Any) -> None:
        call = lambda: copy(comm, before, target, staging=60_000, resume=True, **(options | more))  # noqa: E731
        same_error(comm, call, ConfigError, text)
        assert sorted(os.listdir(shared_tmp_path)) == left

    refused("what is made of '/rho'", chunks=(5, 7, 4))
    refused("and is nothing", dataset="g/big", chunks="keep", compression="keep")  # files of '/rho' would stay
    with open(left_of(target) / "shardload-unfinished", "r+b") as mark:
        if comm.rank == 0:
            fcntl.flock(mark, fcntl.LOCK_EX)
        comm.barrier()
        refused("another job is writing")
    on_root(comm, lambda: os.utime(before, (1, 1)))
    refused("size and time of the source")
    report = copy(comm, before, target, staging=60_000, **options)
    assert report.n_resumed == 0
    assert sorted(os.listdir(shared_tmp_path)) == sorted([*left, "out.zarr"])


@pytest.mark.parametrize("name", ["out.h5", "out.nc", "sharded.zarr"])
@pytest.mark.usefixtures("small")
def test_a_copy_that_begins_anew_says_so(comm: Any, shared_tmp_path: Path, stopped: Callable[..., Path], name: str) -> None:
    """Wrong if it left anything after Ctrl-C that nobody can use, or did all again without a word."""
    target = shared_tmp_path / name
    options = {"chunks": (6, 8, 9), "shards": (6, 8, 18)} if name == "sharded.zarr" else {"chunks": (6, 8, 9)}
    before = stopped(target, 2, staging=60_000, **options)
    assert os.listdir(shared_tmp_path) == ["in.h5"]
    text = "cannot go on after a kill: only one to a Zarr store in a folder, without shards, can"
    same_error(comm, lambda: copy(comm, before, target, staging=60_000, resume=True, **options), ConfigError, text)


@pytest.mark.parametrize("left", ["a whole store", "a save", "a mark that was cut", "a link"])
@pytest.mark.usefixtures("small")
def test_nothing_to_resume(comm: Any, shared_tmp_path: Path, stopped: Callable[..., Path], left: str) -> None:
    """Wrong if a script that always asks for it failed the first time, or was not told; or if a whole store, which lacks its
    name alone, or what a killed save or a stopped machine has left, were in the way; or if it wrote to where a link leads.
    """
    target, options = shared_tmp_path / "out.zarr", RESUMED["out.zarr"]
    before = stopped(target, 2, staging=45_000, **options)

    def change() -> None:
        folder = left_of(target)
        if left == "a whole store":
            (folder / "shardload-unfinished").unlink()
        elif left == "a link":
            folder.rename(shared_tmp_path / "elsewhere")
            folder.symlink_to("elsewhere")
        else:
            os.truncate(folder / "shardload-unfinished", 64 if left == "a save" else 70)

    on_root(comm, change)
    report = copy(comm, before, target, resume=True, **options)
    assert report.n_resumed == 0
    assert any("began anew" in note for note in report.notes)
    same_error(comm, lambda: copy(comm, before, target, resume=True), ConfigError, "exists")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("who", ["all", "the last"])
@pytest.mark.parametrize(
    ("wrong", "said"), [({"mode": "a"}, "mode is 'a'; expected"), ({"source": 5}, "source is 5; expected")]
)
def test_arguments_that_one_rank_refuses_are_refused_by_all(
    comm: Any, shared_tmp_path: Path, who: str, wrong: dict[str, Any], said: str
) -> None:
    """Wrong if each rank printed the message, or if the others waited for a rank that makes no copy."""
    source, target = shared_tmp_path / "in.h5", shared_tmp_path / "out.h5"
    on_root(comm, lambda: make_h5(source))

    def call() -> None:
        is_wrong = who == "all" or comm.rank == comm.size - 1
        right: dict[str, Any] = {"source": source, "target": target, "mode": "w"}
        shardload.copy(**right | (wrong if is_wrong else {}), comm=comm, timeout=60.0)

    same_error(comm, call, ConfigError, said)
    assert not target.exists()


def elsewhere(folder: Path) -> None:
    """Coordinates in another group than their array: of HDF5, as Dedalus writes them, and of netCDF."""
    with h5py.File(folder / "in.h5", "w") as file:
        for name, values in (("sim_time", np.arange(20) * 0.1), ("wall_time", np.arange(20) * 9.0), ("y", np.arange(8.0))):
            file["scales/" + name] = values
            file["scales/" + name].make_scale(name)
        b = file.create_dataset("tasks/b", data=ramp((20, 8), "f8"))
        b.dims[0].label = "t"
        for axis, name in ((0, "sim_time"), (0, "wall_time"), (1, "y")):
            b.dims[axis].attach_scale(file["scales/" + name])
    with netCDF4.Dataset(folder / "in.nc", "w") as file:
        file.createDimension("sim_time", 20)
        file.createDimension("y", 8)
        file.createVariable("sim_time", "f8", ("sim_time",))[:] = np.arange(20) * 0.1
        file.createGroup("tasks").createVariable("b", "f8", ("sim_time", "y"))[:] = ramp((20, 8), "f8")


@pytest.mark.parametrize(
    ("source", "target"), [("in.h5", "out.h5"), ("in.h5", "o.nc"), ("in.h5", "o.zarr"), ("in.nc", "o.zarr")]
)
def test_coordinates_of_other_groups(comm: Any, shared_tmp_path: Path, source: str, target: str) -> None:
    """Wrong if nothing could be selected by them in the copy of an array that is named. (Copies of all arrays, and that h5py
    finds the same scales and labels there: `tests/unit/jobs/test_nothing_left_out.py`.)
    """
    on_root(comm, lambda: elsewhere(shared_tmp_path))
    copy(comm, shared_tmp_path / source, shared_tmp_path / target, dataset=("tasks/b",))
    select = {"sim_time": shardload.near(0.31)}
    row = shardload.load(shared_tmp_path / target, mesh_of(), P(), dataset="tasks/b", select=select, dtype="float32")
    np.testing.assert_array_equal(np.asarray(row), ramp((20, 8), "f8")[3].astype("f4"))


def test_text_along_an_axis_that_can_grow(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if texts were counted as numbers, of which chunks for growth are made: an error of NumPy; or if an array that gives
    up its chunks lost its growth without a word.
    """
    before, after = shared_tmp_path / "in.nc", shared_tmp_path / "out.nc"

    def make() -> None:
        with netCDF4.Dataset(before, "w") as file:
            file.createDimension("time", 3)
            file.createVariable("name", str, ("time",))[:] = np.array(["a", "bc", "d"], dtype=object)
            file.createVariable("x", "f4", ("time",), contiguous=True)[:] = np.arange(3)

    on_root(comm, make)
    copy(comm, before, after, unlimited="time")

    def look() -> None:
        with netCDF4.Dataset(after) as file:
            assert file.dimensions["time"].isunlimited() and file["name"][:].tolist() == ["a", "bc", "d"]
            np.testing.assert_array_equal(file["x"][:], np.arange(3))

    on_root(comm, look)
    notes = copy(comm, after, shared_tmp_path / "fixed.nc", chunks=None).notes
    assert len(notes) == 1 and "'/x'" in notes[0] and "can grow no longer" in notes[0]


@pytest.mark.parametrize("target", ["out.h5", "out.nc", "out.zarr"])
def test_a_single_step(comm: Any, shared_tmp_path: Path, target: str) -> None:
    """Wrong if the number that is left of a coordinate were a dimension scale of HDF5, or attached as one: xarray opens no such
    file. Or if it were no coordinate any more.
    """
    before, after = shared_tmp_path / "in.h5", shared_tmp_path / target

    def make() -> None:
        with h5py.File(before, "w") as file:
            for name in ("x", "time", "steps"):
                file[name] = np.arange(4.0)
                file[name].make_scale(name)
            for name, scales in (("rho", ("time", "x")), ("total", ("steps",))):
                file[name] = ramp((4,) * len(scales))
                for axis, scale in enumerate(scales):
                    file[name].dims[axis].attach_scale(file[scale])
            file["total"].dims[0].attach_scale(file["time"])

    on_root(comm, make)
    copy(comm, before, after, select={"time": -1})

    def look() -> None:
        with xarray.open_dataset(after, engine=None if target == "out.zarr" else "h5netcdf") as found:
            assert found.rho.dims == ("x",) and found.total.dims == ("steps",) and found.coords["time"].item() == 3
            assert found.rho.encoding["coordinates"] == "time"
            np.testing.assert_array_equal(found.rho.values, ramp((4, 4))[-1])

    on_root(comm, look)


def test_the_grid_mapping(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the projection of an array that is named were lost: CF has it in the attributes of a character."""
    before = shared_tmp_path / "in.nc"

    def make() -> None:
        with netCDF4.Dataset(before, "w") as file:
            file.createDimension("y", 4)
            file.createDimension("bnds", 2)
            crs = file.createVariable("crs", "S1")
            crs.spatial_ref, crs.earth_radius = "PROJCS[...]", 6.371e6
            y = file.createVariable("y", "f4", ("y",))
            y.bounds, y[:] = "y_bnds", np.arange(4)
            file.createVariable("y_bnds", "f4", ("y", "bnds"))[:] = np.arange(8).reshape(4, 2)
            band = file.createVariable("band", "f4", ("y",))
            band.grid_mapping, band[:] = "crs", np.arange(4)
            file.createVariable("other", "f4", ("y",))[:] = 0

    on_root(comm, make)
    for target in ("o.nc", "o.h5", "o.zarr"):
        copy(comm, before, shared_tmp_path / target, dataset=("band",))
        comm.barrier()
        found = opened(shared_tmp_path / target)
        with nullcontext(found) if target == "o.zarr" else found as file:
            attrs = dict(file["crs"].attrs)
            assert attrs["spatial_ref"] in ("PROJCS[...]", b"PROJCS[...]") and attrs["earth_radius"] == 6.371e6
            assert set(file) - {"bnds"} == {"crs", "y", "y_bnds", "band"}
    attrs = shardload.open(before)["crs"].attrs
    assert attrs == {"spatial_ref": "PROJCS[...]", "earth_radius": 6.371e6}
