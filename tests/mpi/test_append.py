"""What does an append give? What numpy.concatenate gives, bit for bit, for the format's libraries; or what was there before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import jax
import ml_dtypes
import netCDF4
import numcodecs
import numpy as np
import pytest
import xarray
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, SourceError, VerifyError
from shardload.formats.hdf5.source import Hdf5Source
from shardload.formats.zarr.growth import GrowthEncoder, GrowthSink
from shardload.formats.zarr.source import ZarrSource
from shardload.storage import new_folder
from tests.mpi.support import check, compare, mesh_of, on_disk, on_root, padded, put, ramp, same_error, turned
from tests.tiers import IS_QUICK, thorough
from tests.unit.files import change_json, raising, write_hdf5

pytestmark = pytest.mark.any_library

Array = np.ndarray[Any, Any]
Y, X = 24, 12  # axes of different lengths, which every mesh of these tests divides
# How the old store is made, by zarr-python: version, chunks, shards, compressor, fill value.
KINDS: dict[str, dict[str, Any]] = {
    "v3": {"chunks": (4, 5, 7)},
    "v3 gzip, large chunks": {"chunks": (9, 100, 100), "compressors": zarr.codecs.GzipCodec(level=1), "fill_value": -7},
    "v3 blosc": {"chunks": (3, 24, 9), "compressors": zarr.codecs.BloscCodec(cname="zstd", clevel=1, typesize=4)},
    "v3 big-endian": {"chunks": (2, 7, 20), "compressors": None, "serializer": zarr.codecs.BytesCodec(endian="big")},
    "v3 shards": {"chunks": (2, 5, 8), "shards": (6, 10, 16)},
    "v2": {"zarr_format": 2, "chunks": (4, 10, 7)},
    "v2 gzip, shuffle": {
        "zarr_format": 2,
        "chunks": (4, 10, 7),
        "filters": [numcodecs.Shuffle(4)],
        "compressors": numcodecs.GZip(1),
    },
    "v2 in folders": {"zarr_format": 2, "chunks": (4, 10, 7), "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "v2 plain": {"zarr_format": 2, "chunks": (5, 9, 11), "compressors": None, "fill_value": 1},
}
# The same for files, by h5py and xarray.
FILES: dict[str, dict[str, Any]] = {
    "HDF5": {"chunks": (4, 5, 7)},
    "HDF5 gzip, shuffle": {"chunks": (3, 24, 5), "compression": "gzip", "shuffle": True},
    "HDF5 gzip, latest": {"chunks": (5, 9, 11), "libver": "latest", "compression": "gzip"},
    "HDF5 zstd, 1.8": {"chunks": (5, 9, 11), "libver": ("v108", "v108"), **hdf5plugin.Zstd()},
    "HDF5 big-endian, checksums": {"chunks": (2, 7, 12), "dtype": ">f4", "fletcher32": True},
    "netCDF4": {"chunks": (4, 5, 7), "compression": "zlib"},
}
# Old and new rows: an edge that is full and one that is not (for chunks of 2, 3, 4, 5, 6, 9), few and many rows, none before.
LENGTHS = ((12, 5), (7, 12), (5, 1))
SPECS = (P(None, "a", "b"), P(None, ("b", "a")), P(None, None, "a"))


def make(path: Path, old: Array, *, version: int = 3, is_consolidated: bool = True, **how: Any) -> None:
    """A store as zarr-python makes it: rho (time, y, x), its coordinate, and a group with the same; and what does not grow."""
    how = {"chunks": (4, 5, 7)} | how
    version = how.pop("zarr_format", version)
    root = zarr.open_group(str(path), mode="w", zarr_format=version)  # type: ignore[arg-type]
    root.attrs["title"] = "a run"
    for group in (root, root.create_group("g")):
        arrays = (("rho", old, ("time", "y", "x"), how), ("time", _times(len(old)), ("time",), {"chunks": (4,)}))
        for name, values, dims, more in (*arrays, ("y", np.arange(Y), ("y",), {"chunks": (Y,)})):
            if version == 3:
                one = group.create_array(name, shape=values.shape, dtype=values.dtype, dimension_names=dims, **more)
            else:
                one = group.create_array(name, shape=values.shape, dtype=values.dtype, **more)
                one.attrs["_ARRAY_DIMENSIONS"] = list(dims)
            one[...] = values
    if is_consolidated:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # not in the specification of format 3
            zarr.consolidate_metadata(str(path))


def make_file(path: Path, old: Array, kind: str) -> None:
    """The same as an HDF5 or netCDF4 file, as others make it."""
    how = dict(FILES[kind])
    chunks = how.pop("chunks")
    if kind.startswith("HDF5"):
        with h5py.File(path, "w", libver=how.pop("libver", None)) as file:
            file.attrs["title"] = "a run"
            for group in (file, file.create_group("g")):
                time = group.create_dataset("time", data=_times(len(old)), chunks=(4,), maxshape=(None,))
                time.make_scale("time")
                rho = group.create_dataset("rho", data=old, chunks=chunks, maxshape=(None, Y, X), **how)
                rho.dims[0].attach_scale(time)
        return
    rho, time = (("time", "y", "x"), old), ("time", _times(len(old)))
    rho_of = {"rho": {"chunksizes": tuple(map(min, chunks, old.shape)), **how}}
    # In a group alone: a dimension of the root would be that of the group, too.
    made = xarray.Dataset({"rho": rho}, {"time": time, "y": np.arange(Y)}, {"title": "a run"})
    made.to_netcdf(path, group="g", engine="netcdf4", encoding=rho_of, unlimited_dims=["time"])


def path_of(folder: Path, kind: str) -> Path:
    """Where a store or file of this kind is."""
    return folder / ("run.zarr" if kind in KINDS else "run.h5" if kind.startswith("HDF5") else "run.nc")


def begin(path: Path, old: Array, kind: str) -> None:
    """Make a store or file of this kind."""
    make(path, old, **KINDS[kind]) if kind in KINDS else make_file(path, old, kind)


def look_file(path: Path, values: Array, group: str = "g") -> None:
    """Raise unless h5py, and of netCDF4 xarray with both of its libraries, read these values."""
    with h5py.File(path) as file:
        assert file.attrs.get("title", file["g"].attrs.get("title")) in ("a run", b"a run")
        np.testing.assert_array_equal(file[f"{group}/rho"][...], values)
        np.testing.assert_array_equal(file[f"{group}/time"][...], _times(len(values)))
        assert file[f"{group}/rho"].dims[0][0] == file[f"{group}/time"]
    for engine in ("netcdf4", "h5netcdf") if path.suffix == ".nc" else ():
        with xarray.open_dataset(path, group=group or None, engine=engine) as found:
            assert dict(found.sizes) == {"time": len(values), "y": Y, "x": X}
            np.testing.assert_array_equal(found.rho.values, values)


def _times(n: int) -> Array:
    return np.arange(n, dtype="float64") / 4


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tree_of(values: Array, n: int, spec: Any, mesh: Any = None) -> dict[str, Any]:
    """What is appended to the first `n` rows."""
    mesh = mesh_of() if mesh is None else mesh
    return {"g": {"rho": put(values[n:], mesh, spec), "time": _times(len(values))[n:]}}


def look(path: Path, values: Array, group: str = "g") -> None:
    """Raise unless these libraries read these values: of a store through consolidated metadata and without."""
    if path.suffix != ".zarr":
        look_file(path, values, group)
        return
    for one in (
        zarr.open_group(str(path), mode="r")[f"{group}/rho".strip("/")],
        zarr.open_array(str(path / group / "rho"), mode="r"),
    ):
        np.testing.assert_array_equal(np.asarray(one[...]), values, strict=True)  # type: ignore[index]
    with xarray.open_zarr(path, group=group or None, mask_and_scale=False) as found:
        assert dict(found.sizes) == {"time": len(values), "y": Y, "x": X} and "time" in found.coords
        np.testing.assert_array_equal(found.time.values, _times(len(values)))
        assert found.rho.dims == ("time", "y", "x")
        np.testing.assert_array_equal(found.rho.values, values, strict=True)


@pytest.mark.parametrize("kind", [*KINDS, *FILES])
def test_every_layout_sharding_and_edge(comm: Any, shared_tmp_path: Path, kind: str) -> None:
    """Wrong if the chunk at the edge lost its old rows, new rows were shifted, or a shard or another rank's chunk were lost."""
    is_zarr = kind in KINDS
    path = path_of(shared_tmp_path, kind)
    turns = list(zip(LENGTHS, SPECS, (mesh_of(), turned(), turned()), strict=True))
    left_out = turns[[*KINDS, *FILES].index(kind) % 3] if IS_QUICK else None  # another one of each kind
    for (old, new), spec, mesh in (turn for turn in turns if turn is not left_out):
        values = ramp((old + new, Y, X), "float32")
        on_root(comm, partial(begin, path, values[:old], kind))
        report = shardload.append(path, tree_of(values, old, spec, mesh), verify="full", staging="8MiB")
        assert report.grown == {"/g/rho": (old, old + new), "/g/time": (old, old + new)}
        assert report.n_read_back == report.n_decoded == report.n_chunks
        assert is_zarr or report.format == kind.split()[0]
        assert on_disk(comm, shared_tmp_path) == [path.name]

        def check(values: Array = values, first: Array = values[:old]) -> None:
            look(path, values)
            if path.suffix != ".nc":
                look(path, first, "")  # the other group is as it was
            assert not is_zarr or zarr.open_group(str(path), mode="r").attrs["title"] == "a run"

        on_root(comm, check)


@pytest.mark.any_version
def test_rows_one_by_one_by_number_and_without_values(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if an append did not begin where the one before it has ended; if an axis without a name, one in the middle, or one
    with a limit could not grow; or a dimension without values stayed behind.
    """
    path, values = shared_tmp_path / "run.h5", ramp((7, 5, X), "int16")
    stores = {shared_tmp_path / "chunks.zarr": None, shared_tmp_path / "shards.zarr": (6, 8, 32)}

    def begin() -> None:
        write_hdf5(path, {"x": values[:, :1]}, chunks=(3, 2, 16), maxshape=(7, 5, None))
        for store, shards in stores.items():
            root = zarr.open_group(str(store), mode="w")
            root.create_array("x", data=np.ascontiguousarray(values[:, :1]), chunks=(3, 4, 16), shards=shards)
        xarray.Dataset({"rho": (("time", "x"), values[:3, 0])}).to_netcdf(
            shared_tmp_path / "run.nc", engine="h5netcdf", unlimited_dims=["time"]
        )

    on_root(comm, begin)
    for k in range(1, 5):
        for one in (path, *stores):
            shardload.append(one, put(values[:, k : k + 1], mesh_of(), P(None, None, "a")), dim=-2, dataset="x")
        x = shardload.load(path, mesh_of(), P(None, None, "a"), dataset="x")  # and leaves no lock
        assert x.shape == (7, k + 1, X)
    more = put(values[:, :1], mesh_of(), P(None, None, "a"))
    same_error(
        comm,
        lambda: shardload.append(path, more, dim=1, dataset="x"),
        ConfigError,
        "may have 5",
        "--unlimited AXIS",
        "maxshape=(None",
    )
    rho = put(values[3:, 0], mesh_of(), P(None, "a"))
    assert shardload.append(shared_tmp_path / "run.nc", {"rho": rho}).grown == {"/rho": (3, 7)}

    for one in (path, *stores):
        compare(comm, one, {"x": values})
    compare(comm, shared_tmp_path / "run.nc", {"rho": values[:, 0]})
    assert on_root(comm, lambda: h5py.File(shared_tmp_path / "run.nc")["time"].shape) == (7,)


@pytest.mark.any_version
def test_what_does_not_fit_into_a_file(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if a file changed although there was an error. What else cannot grow: tests/unit/formats/test_hdf5_growth.py."""
    path, values = shared_tmp_path / "run.h5", ramp((7, Y, X), "float32")

    def begin() -> None:
        make_file(path, values[:5], "HDF5")
        with netCDF4.Dataset(shared_tmp_path / "run.nc", "w") as file:  # two groups with one dimension
            file.createDimension("time", None)
            for group in (file, file.createGroup("g")):
                group.createVariable("x", "f8", ("time",))[:] = np.arange(5)

    on_root(comm, begin)
    before = on_root(comm, lambda: files(shared_tmp_path))
    time = _times(7)[5:]
    whole = {"g/rho": put(values[5:], mesh_of(), P(None, "a")), "g/time": time}
    same_error(comm, lambda: shardload.append(path, whole, dim="t"), ConfigError, "no such axis", "('time', None, None)")
    nc = shared_tmp_path / "run.nc"
    same_error(comm, lambda: shardload.append(nc, {"g/x": time}), ConfigError, "'/x'", "would not grow with", "Pass 'x'")
    assert on_root(comm, lambda: files(shared_tmp_path)) == before
    saved = shared_tmp_path / "saved.h5"  # a copy of which would be like it
    shardload.save(saved, {"x": values[:5]}, chunks=(4, 5, 7))
    same_error(
        comm, lambda: shardload.append(saved, {"x": values[5:]}, dim=0), ConfigError, "(its maxshape)", "--unlimited AXIS"
    )


def test_texts_along_the_axis(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the error asked for the texts only, as WRF has them for times: no append takes them. A copy may have none."""
    old, new, rows = shared_tmp_path / "old.nc", shared_tmp_path / "new.nc", np.arange(12, dtype="f4").reshape(4, 3)

    def make() -> None:
        with netCDF4.Dataset(old, "w") as file:
            for name, n in (("Time", None), ("x", 3), ("DateStrLen", 2)):
                file.createDimension(name, n)
            file.createVariable("Times", "S1", ("Time", "DateStrLen"))[:] = np.full((3, 2), b"0")
            file.createVariable("T2", "f4", ("Time", "x"))[:] = rows[:3]

    on_root(comm, make)
    last = {"T2": rows[3:]}
    says = (
        "'/Times'",
        "would not grow with",
        "If it holds text",
        "--dataset NAME`, with each array to keep, makes a file without it",
    )
    same_error(comm, lambda: shardload.append(old, last, dim="Time"), ConfigError, *says)
    shardload.copy(str(old), str(new), dataset=("T2",), timeout=60.0, comm=comm, progress=False)
    shardload.append(new, last, dim="Time")
    compare(comm, new, {"T2": rows})


@pytest.mark.parametrize(
    ("name", "axis"), [("run.nc", "time"), ("run.h5", "time"), ("run.nc", 0), ("run.h5", 0), ("plain.h5", 0)]
)
def test_a_copy_that_can_grow(comm: Any, shared_tmp_path: Path, name: str, axis: str | int) -> None:
    """Wrong if only some of the arrays with that axis could grow (a coordinate, if the axis is named by its number), another
    axis did, or a value were lost on the way.
    """
    values, has_names = ramp((7, Y, X)), name != "plain.h5"
    old, new = shared_tmp_path / f"old-{name}", shared_tmp_path / name
    more = {"chunks": (2, 5, 7), "compression": "gzip"} if has_names else {}

    def make() -> None:
        with h5py.File(old, "w") as file:  # an array with chunks, others in one piece
            file.create_dataset("rho", data=values[:4], **more)
            file["time"] = _times(4)
            file["still"] = values[0]
            if has_names:
                file["time"].make_scale("time")
                file["rho"].dims[0].attach_scale(file["time"])

    on_root(comm, make)
    dataset = () if axis == "time" else ("rho",) if has_names else ("rho", "time")
    shardload.copy(str(old), str(new), dataset=dataset, unlimited=(axis,), timeout=60.0, comm=comm, progress=False)
    # Two rows, then one: the new chunks are not full after either.
    for part in (slice(4, 6), slice(6, 7)):
        rows = {"rho": put(values[part], mesh_of(), P(None, "a")), "time": _times(7)[part]}
        shardload.append(new, rows, dim="time" if has_names else 0)

    def look() -> None:
        with h5py.File(new) as file:
            np.testing.assert_array_equal(file["rho"][...], values)
            np.testing.assert_array_equal(file["time"][...], _times(7))
            assert (file["rho"].maxshape, file["time"].maxshape) == ((None, Y, X), (None,))
            if has_names:
                assert file["rho"].chunks == (2, 5, 7)
            if axis == "time":
                np.testing.assert_array_equal(file["still"][...], values[0])
                assert file["still"].maxshape == (Y, X)
        if name == "run.nc":
            with xarray.open_dataset(new, decode_times=False) as opened:
                assert opened.encoding["unlimited_dims"] == {"time"} and dict(opened.sizes)["time"] == 7

    on_root(comm, look)


def test_after_a_save_and_with_padding(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if padding were appended; what `save` makes can grow, and loads again."""
    path, mesh, spec = shared_tmp_path / "run.zarr", mesh_of(), P("a", "b")
    old, new = ramp((2 * len(jax.devices()), X)), 5000 + ramp((2 * len(jax.devices()) + 1, X))
    shardload.save(path, {"rho": put(old, mesh, spec)}, dims={"rho": ("time", "x")}, compression="blosc", chunks=(3, 11))
    shardload.append(path, {"rho": put(padded(new, mesh, spec, 99), mesh, spec)}, shape=new.shape)
    x = shardload.load(path, mesh, P(None, "b"), dataset="rho")
    assert x.shape == (len(old) + len(new), X)
    compare(comm, path, {"rho": np.concatenate([old, new])})


@pytest.mark.parametrize("n", [1, 0])
@pytest.mark.parametrize(("kind", "shards"), [("zarr", None), ("zarr", (8, 16)), ("zarr2", None)])
def test_chunks_that_are_longer_than_a_store_is_yet(comm: Any, shared_tmp_path: Path, kind: Any, shards: Any, n: int) -> None:
    """Wrong if chunks were cut to the first step of a run, which would then have a file for each step and time."""
    path, mesh, values = shared_tmp_path / "run.zarr", mesh_of(), ramp((7, X))
    first = {"rho": put(values[:n], mesh, P(None, "a")), "time": _times(n)}
    dims, chunks = {"rho": ("time", "x"), "time": ("time",)}, {"rho": (4, 8)} if n else {"rho": (4, 8), "time": (512,)}
    more = {} if shards is None else {"shards": {"rho": shards}}

    def make_2() -> None:
        root = zarr.open_group(str(path), mode="w", zarr_format=2)
        for name, x in (("rho", values[:n]), ("time", _times(n))):
            array = root.create_array(name, shape=x.shape, dtype=x.dtype, chunks=(chunks | {"time": (512,)})[name])
            array[...], array.attrs["_ARRAY_DIMENSIONS"] = x, list(dims[name])

    if kind == "zarr2":
        on_root(comm, make_2)
    else:
        shardload.save(path, first, dims=dims, chunks=chunks, unlimited="time", **more)
    shardload.append(path, {"rho": put(values[n:], mesh, P(None, "a")), "time": _times(7)[n:]}, dim="time")

    compare(comm, path, {"rho": values, "time": _times(7)})

    def layout() -> Any:
        rho, time = (zarr.open_array(str(path / name), mode="r") for name in ("rho", "time"))
        return rho.chunks, rho.shards, time.chunks

    assert on_root(comm, layout) == ((4, 8), shards, (512,))


@pytest.mark.parametrize("name", ["run.h5", "run.nc"])
def test_after_a_save_with_axes_that_can_grow(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if `unlimited` meant another axis, were forgotten for the coordinate, or gave a chunk to each element of it."""
    path, mesh, spec, values = shared_tmp_path / name, mesh_of(), P(None, "b", "a"), ramp((9, Y, X))
    dims = {"g/rho": ("time", "y", "x"), "g/time": ("time",)}
    first = {"g": {"rho": put(values[:4], mesh, spec), "time": _times(4)}}
    shardload.save(path, first, dims=dims, unlimited="time", attrs={"/": {"title": "a run"}})

    def sizes() -> None:
        with h5py.File(path) as file:
            assert file["g/rho"].maxshape == (None, Y, X) and file["g/time"].maxshape == (None,)
            assert file["g/time"].chunks[0] > 100

    on_root(comm, sizes)
    shardload.append(path, tree_of(values, 4, spec))
    on_root(comm, lambda: look(path, values))
    by_number = shared_tmp_path / "numbers.h5"
    shardload.save(by_number, put(values, mesh, spec), unlimited=(0, -1), chunks=(4, 50, 7))

    compare(comm, by_number, {"data": values})
    layout = on_root(comm, lambda: [getattr(h5py.File(by_number)["data"], name) for name in ("maxshape", "chunks")])
    assert layout == [(None, Y, None), (4, Y, 7)]
    wrong: tuple[tuple[Any, str], ...] = (
        ("t", "'t'; the axes are called 'time', 'x', 'y'"),
        (3, "axis 3"),
        (1.5, "by its name or number"),
    )
    for given, text in wrong:
        same_error(comm, lambda given=given: shardload.save(by_number, first, dims=dims, unlimited=given), ConfigError, text)


@pytest.mark.parametrize("n_old", [0, 3])
@pytest.mark.parametrize("version", [3, 2])
@pytest.mark.parametrize("name", ["/", "/g/rho"])
def test_names_of_chunks_are_on_disk_before_the_length(
    comm: Any, shared_tmp_path: Path, name: str, version: Any, n_old: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a machine that stops could keep the new length without its chunks: they would be read as the fill value."""
    path, values = shared_tmp_path / "a.zarr", ramp((n_old + 4, X), np.float32)

    def old() -> None:
        kind = {"zarr_format": version, "shape": (n_old, X), "chunks": (2, X), "dtype": "f4"}
        if name != "/":
            zarr.open_group(str(path), mode="w", zarr_format=version).create_group("g")
        zarr.create_array(str(path), name=name.strip("/") or None, **kind)[...] = values[:n_old]

    on_root(comm, old)
    waiting: set[str] = set()  # folders with new names that are not on disk
    at_length: list[set[str]] = []
    rename, fsync, mkdir = os.rename, os.fsync, os.mkdir

    def replaced(source: Any, target: Any) -> None:
        rename(source, target)
        if os.path.basename(target) in ("zarr.json", ".zarray"):
            at_length.append(set(waiting))
        waiting.add(os.path.dirname(os.path.realpath(target)))

    def made(folder: Any, mode: int = 0o777) -> None:
        mkdir(folder, mode)
        if os.path.realpath(folder).startswith(f"{os.path.realpath(path)}{os.sep}"):
            waiting.add(os.path.dirname(os.path.realpath(folder)))

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        waiting.discard(os.path.realpath(f"/proc/self/fd/{descriptor}"))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", replaced)
        patch.setattr(os, "mkdir", made)
        patch.setattr(os, "fsync", synced)
        shardload.append(path, put(values[n_old:], mesh_of(), P(None, "a")), dim=0, dataset=name)
    assert at_length == [set()] * (comm.rank == 0) and not waiting
    np.testing.assert_array_equal(zarr.open_array(str(path / name.strip("/")), mode="r")[...], values)


def test_chunks_that_a_killed_append_left_are_replaced(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if chunks beyond the old length were in the way, or stayed."""
    path, values = shared_tmp_path / "run.zarr", ramp((9, Y, X), "float32")

    def begin() -> None:
        make(path, values[:5], chunks=(4, Y, X))
        (path / "g" / "rho" / "c" / "2" / "0").mkdir(parents=True)
        (path / "g" / "rho" / "c" / "2" / "0" / "0").write_bytes(b"of an append that was killed")

    on_root(comm, begin)
    shardload.append(path, tree_of(values, 5, P(None, "a")))
    on_root(comm, lambda: look(path, values))


# --- the order of the coordinate


@pytest.mark.parametrize("kind", thorough(["v3", "v3 shards", "v2", "HDF5", "netCDF4"], ["v3", "netCDF4"]))
@pytest.mark.parametrize(("n_old", "first", "n_new"), [(12, 7, 2), (9, 4, 8), (5, 5, 2), (6, 0, 3)])
def test_rows_are_replaced(comm: Any, shared_tmp_path: Path, kind: str, n_old: int, first: int, n_new: int) -> None:
    """Wrong if a row before `at` changed, one behind it stayed, or a file of chunks that has no place any more."""
    is_file = kind in FILES
    path = path_of(shared_tmp_path, kind)
    values = ramp((first + n_new, Y, X), "float32")
    old = np.concatenate([values[:first], -1 - ramp((n_old - first, Y, X), "float32")])
    on_root(comm, lambda: begin(path, old, kind))
    new = tree_of(values, first, P(None, "a"))
    report = shardload.append(path, new, at=float(_times(first + 1)[first]))
    assert report.grown["/g/rho"] == (n_old, first + n_new) and report.kept["/g/rho"] == first
    assert ("replaced" in str(report)) == (first < n_old)
    on_root(comm, lambda: look(path, values))
    if is_file:
        return

    def lengthen() -> None:
        """Make it as long as it was: what comes has the fill value, and not what was there."""
        array = zarr.open_array(str(path / "g" / "rho"), mode="r+")
        array.resize((40, Y, X))
        assert (array[first + n_new :] == array.fill_value).all()

    on_root(comm, lengthen)


@pytest.mark.parametrize("name", ["run.h5", "run.zarr"])
@pytest.mark.parametrize("spec", [None, P()])
def test_time_does_not_go_backwards(comm: Any, shared_tmp_path: Path, name: str, spec: Any) -> None:
    """Wrong if a row got a time before the last one, or if the file changed."""
    path, rho = shared_tmp_path / name, put(ramp((2, Y, X), "float32"), mesh_of(), P(None, "a"))
    n = mesh_of().size

    def time(*values: float, dtype: str = "float32") -> Any:
        one = np.array(values, dtype)
        return one if spec is None else put(one, mesh_of(), spec)

    dims = {"rho": ("time", "y", "x"), "time": ("time",)}
    how = {"dims": dims, "unlimited": "time"} if path.suffix == ".h5" else {"dims": dims}
    shardload.save(path, {"rho": rho, "time": time(0.26, 0.28)}, attrs={"time": {"units": "hours since 2001-01-01"}}, **how)
    shardload.append(path, {"rho": rho, "time": time(0.30, 0.32)})
    before = on_root(comm, lambda: files(path) if path.is_dir() else path.read_bytes())

    def refused(times: Any, *words: str, **how: Any) -> None:
        same_error(comm, lambda: shardload.append(path, {"rho": rho, "time": times}, **how), ConfigError, *words)

    refused(
        time(0.28, 0.30),
        "'/time'",
        "ends with 2001-01-01T00:19:12",
        "begins with 2001-01-01T00:16:48",
        "at='2001-01-01T00:16:48'",
    )
    refused(time(0.32, 0.34), "ends with", "append(..., at=")
    refused(time(0.36, 0.34), "then 2001-01-01T00:20:24", "Sort it")
    refused(time(np.nan, 0.34), "begins with nan", "would find wrong rows. Give each row its value")
    refused(time(0.34, np.nan), "then nan", "would find wrong rows. Give each row its value")
    # Of what stays, not of the file: that goes on until 0.32.
    refused(time(0.26, 0.28), "ends with 2001-01-01T00:16:48 before at=0.3, and", "begins with 2001-01-01T00:15:36", at=0.3)
    refused(time(0.30, 0.32), "begins with", at=0.32)
    refused(time(0.30, 0.32), "no date", at="soon")
    for nan in (np.nan, np.float32("nan"), np.array(np.nan)):  # all rows would be replaced: none lies before it
        refused(time(0.30, 0.32), "at is nan", at=nan)
    refused(time(0.30, 0.32), "dim is a number", at=0.3, dim=0)
    if comm.size > 1:
        tree = {"rho": ramp((n, Y, X), "float32"), "time": put(np.arange(1, n + 1, dtype="float32"), mesh_of(), P(("a", "b")))}
        same_error(comm, lambda: shardload.append(path, tree), ConfigError, "'/time' is cut over processes", "a NumPy array")
    assert on_root(comm, lambda: files(path) if path.is_dir() else path.read_bytes()) == before
    shardload.append(path, {"rho": 2 * rho, "time": time(0.28, 0.29)}, at=0.28)  # of float32 it is another number
    found = shardload.load(path, mesh_of(), P(), dataset=["rho", "time"])
    np.testing.assert_array_equal(found[1], np.array([0.26, 0.28, 0.29], "float32"))
    np.testing.assert_array_equal(found[0][1:], 2 * ramp((2, Y, X), "float32"))
    if path.suffix == ".h5":
        shardload.append(path, {"rho": rho, "time": time(0.36, 0.34)}, dim=0)  # by number: rows without an order


def test_rows_that_stay_are_not_all_of_the_file(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if an error said that a file is as short as what stays of it, or of new rows that ascend that they are unsorted."""
    path, rho = shared_tmp_path / "run.h5", ramp((3, Y), "float32")

    def make_file() -> None:
        with h5py.File(path, "w") as file:
            time = file.create_dataset("time", data=np.arange(3.0), maxshape=(4,), chunks=(2,))
            file.create_dataset("rho", data=rho, maxshape=(4, Y), chunks=(2, Y)).dims[0].attach_scale(time)
            file["rho"].dims[0].label = "time"

    on_root(comm, make_file)

    def refused(new: Any, *words: str, begin: float = 1.0) -> None:
        tree = {"rho": new, "time": begin + np.arange(len(new))}
        same_error(comm, lambda: shardload.append(path, tree, dim="time", at=1.0), ConfigError, *words)

    refused(np.ones((4, Y), "float32"), "has 1 elements before at=1.0 and may have 4 (its maxshape)")
    refused(np.ones((2, Y), "float32"), "ends with 0.0 before at=1.0", "begins with -5.0", begin=-5.0)
    refused(np.ones((2, Y + 1), "float32"), f"has the shape (3, {Y}) and can grow along axis 0")


@pytest.mark.parametrize("what", ["shorter", "new chunks", "longer", "files behind"])
def test_replacing_that_is_not_confirmed(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Wrong if the error said that the store has only what stays, or is as it was, when it has its new rows; or the reverse. Or
    if a store that was killed while files of chunks are replaced had a row that is neither old nor new.
    """
    path, values = shared_tmp_path / "run.zarr", ramp((9, Y, X), "float32")
    on_root(comm, lambda: make(path, values))
    array = path / "g" / "rho"
    unlink, fsync = os.unlink, os.fsync

    def refused(file: Any, **how: Any) -> None:
        if str(file).startswith(f"{array}/c") and what == "files behind":
            raise OSError(5, "no such luck")
        unlink(file, **how)

    def unconfirmed(descriptor: int) -> None:
        is_its_folder = os.readlink(f"/proc/self/fd/{descriptor}") == str(array)
        n_rows = json.loads((array / "zarr.json").read_text())["shape"][0] if is_its_folder else 0
        if n_rows == {"shorter": 5, "longer": 7}.get(what):
            raise OSError(5, "no such luck")
        fsync(descriptor)

    def replace() -> Any:
        return shardload.append(path, tree_of(values[:7] * 2, 5, P(None, "a")), at=float(_times(6)[5]))

    monkeypatch.setattr(os, "unlink", refused)
    monkeypatch.setattr(os, "fsync", unconfirmed)
    if what == "new chunks":
        monkeypatch.setattr(new_folder.AddedFolder, "add", raising(OSError(5, "no such luck")))
    has_old_alone = what in ("shorter", "new chunks")
    if what == "files behind":
        replace()
        assert comm.rank or "has its new rows" in caplog.text
    else:
        told = "the first 5 alone" if has_old_alone else "has its new content"
        error = same_error(comm, replace, SourceError, told)
        assert ("alone" in str(error)) == has_old_alone and "as it was" not in str(error)
    monkeypatch.undo()
    new = np.concatenate([values[:5], 2 * values[5:7]])
    on_root(comm, lambda: look(path, values[:5] if has_old_alone else new))


# --- what is refused


def test_what_does_not_fit(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if a store got arrays of different lengths, values of another type, or changed although there was an error."""
    path, values = shared_tmp_path / "run.zarr", ramp((7, Y, X), "float32")

    def begin() -> None:
        make(path, values[:5])
        (shared_tmp_path / "file.h5").write_bytes(b"")
        make(shared_tmp_path / "delta.zarr", values[:5], is_consolidated=False)
        zarr.create_array(
            str(shared_tmp_path / "t.zarr"), data=values[:5], filters=[zarr.codecs.TransposeCodec(order=(2, 1, 0))]
        )

    on_root(comm, begin)
    before = files(path)
    rho, time = put(values[5:], mesh_of(), P(None, "a")), _times(7)[5:]

    def refused(tree: Any, *words: str, error: type[Exception] = ConfigError, to: Path = path, **how: Any) -> None:
        same_error(comm, lambda: shardload.append(to, tree, **how), error, *words)  # type: ignore[arg-type]

    whole = {"g/rho": rho, "g/time": time}
    refused(whole, "no such axis", "('time', 'y', 'x')", dim="t")
    refused({"g/rho": rho}, "'/g/time'", "would not grow with", "Pass 'g/time' too")
    refused({"g/vel": rho, **whole}, "no array '/g/vel'", "'/g/rho'")
    refused({"g/rho": rho, "g/time": time[:1]}, "from 5 to 7", "from 5 to 6", "equally long")
    refused({"g/rho": rho[:, :-8], "g/time": time}, "(5, 24, 12)", "(2, 16, 12)", "along axis 0 only")
    row = put(values[5], mesh_of(), P("a"))
    refused({"g/rho": row, "g/time": time[:1]}, "(5, 24, 12)", "(24, 12)", "For a single row", "expand_dims(x, 0)")
    refused({"g/rho": rho[:1], "g/time": 5.0}, "For a single row, give it that axis: numpy.expand_dims(x, 0)")  # float64 stays
    refused({"g/rho": rho.astype("int32"), "g/time": time}, "holds float32", "x.astype('float32')")
    narrow = put(time.astype("f4"), mesh_of(), P())
    refused({"g/rho": rho, "g/time": narrow}, "x.astype('float64'), which needs jax.config.update('jax_enable_x64', True)")
    refused(whole, "at is '2001', which says no place in '/g/time' in", ": its coordinate has no units", at="2001")
    refused({"g/rho": rho[:0], "g/time": time[:0]}, "none without elements")
    refused({"rho": rho, "time": time}, "part of the Zarr store", to=path / "g")
    refused(whole, "neither HDF5 nor netCDF4", "Zarr stores in folders", to=shared_tmp_path / "file.h5")
    refused(whole, "does not exist", to=shared_tmp_path / "none.zarr", error=SourceError)
    refused(whole, "no Zarr store", to=shared_tmp_path, error=SourceError)
    refused(rho, "'transpose'", "append does not write", to=shared_tmp_path / "t.zarr", dataset="/", dim=0)
    refused(whole, "dim is None", dim=None)
    assert on_root(comm, lambda: files(path)) == before


def test_a_folder_into_which_this_user_may_not_look(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a file that is there were said not to exist, and should be made by a save."""
    path, values = shared_tmp_path / "run.zarr", ramp((7, Y, X), "float32")
    on_root(comm, lambda: make(path, values[:5]))
    for name in ("stat", "open"):  # the tests run as root, too, who may look everywhere
        monkeypatch.setattr(os, name, partial(_forbidden, getattr(os, name), str(path)))
    error = same_error(
        comm, lambda: shardload.append(path, tree_of(values, 5, P())), SourceError, "may not be read", "Ask for access"
    )
    assert "does not exist" not in str(error)


def _forbidden(call: Any, path: str, given: Any, *args: Any, **how: Any) -> Any:
    """A call of the system, which may not look at `path`."""
    if given == path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return call(given, *args, **how)


@pytest.mark.any_version
def test_arrays_that_a_killed_append_left_with_two_lengths(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the error said nothing of the lengths that are there (also where consolidated metadata tell another one), or if
    what it says to type did not help.
    """
    values = ramp((7, Y, X), "float32")
    paths = [shared_tmp_path / name for name in ("run.h5", "run.zarr", "told.zarr")]

    def begin() -> None:
        make_file(paths[0], values[:5], "HDF5")
        make(paths[1], values[:5], is_consolidated=False)
        make(paths[2], values[:5])
        with h5py.File(paths[0], "r+") as file:
            file["g/rho"].resize(6, axis=0)
        for path in paths[1:]:
            zarr.open_array(str(path / "g" / "rho"), mode="r+").resize((6, Y, X))

    def mend(told: str, path: Path) -> None:
        if path.suffix == ".h5":
            with h5py.File(path, "r+") as file:
                file["g/rho"].resize(5, axis=0)
        elif path == paths[1]:
            zarr.open_array(path / "g" / "rho").resize((5, Y, X))
        else:
            exec(told.split('python -c "')[1].partition('"')[0])

    on_root(comm, begin)
    for path in paths:
        told = (
            ("'/g/rho' from 6", "'/g/time' would grow from 5 to 7", "killed at its very end")
            if path != paths[2]
            else ("(5, 24, 12)", "(6, 24, 12)", "consolidate")
        )
        error = same_error(comm, lambda p=path: shardload.append(p, tree_of(values, 5, P(None, "a"))), ConfigError, *told)
        on_root(comm, lambda error=error, path=path: mend(str(error), path))
        shardload.append(path, tree_of(values, 5, P(None, "a")))

    compare(comm, paths[1], {"g/rho": values})
    on_root(comm, lambda: look(paths[0], values) or look(paths[2], values))


@pytest.mark.parametrize("version", [3, 2])
def test_a_store_that_takes_the_place_of_this_one(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Wrong if old rows at the edge were put into a new store that has the same metadata, as one of the same run has."""
    path, other, values = shared_tmp_path / "run.zarr", shared_tmp_path / "new.zarr", ramp((7, Y, X), "float32")
    on_root(comm, lambda: make(path, values[:5], version=version))
    commit = GrowthSink.commit

    def replaced(self: Any) -> None:
        make(other, -values[:5], version=version)
        shutil.rmtree(path)
        other.rename(path)
        commit(self)

    monkeypatch.setattr(GrowthSink, "commit", replaced)
    same_error(comm, lambda: shardload.append(path, tree_of(values, 5, P())), ConfigError, "changed by somebody else")
    on_root(comm, lambda: look(path, -values[:5]))
    assert on_disk(comm, shared_tmp_path) == ["run.zarr"]


@pytest.mark.parametrize("is_undone", [True, False])
def test_metadata_that_cannot_be_renamed(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_undone: bool
) -> None:
    """Wrong if the error said that the store is as it was, and an array of it has its new length."""
    path, values, rename = shared_tmp_path / "run.zarr", ramp((7, Y, X), "float32"), os.rename
    on_root(comm, lambda: make(path, values[:5]))

    def fails(source: Any, into: Any) -> None:
        is_back = "-back" in str(source)
        if (str(into).endswith("time/zarr.json") and not is_back) or (not is_undone and is_back):
            raise OSError(5, "no such luck")
        rename(source, into)

    monkeypatch.setattr(os, "rename", fails)
    says = ("as it was",) if is_undone else ("could not be undone", "look at their shapes")
    error = same_error(comm, lambda: shardload.append(path, tree_of(values, 5, P())), SourceError, *says)
    assert ("as it was" in str(error)) == is_undone
    monkeypatch.undo()
    lengths = on_root(comm, lambda: [zarr.open_array(str(path / "g" / name), mode="r").shape[0] for name in ("rho", "time")])
    assert lengths == [5 if is_undone else 7, 5]
    assert on_disk(comm, shared_tmp_path) == ["run.zarr"]


@pytest.mark.parametrize("kind", ["v3", "v3 shards", "HDF5"])
def test_renames_that_a_file_server_made_and_reports_as_failed(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Over NFS the answer can be lost. Wrong if an append failed that was made, or left a file of changes without a mark."""
    path, values = path_of(shared_tmp_path, kind), ramp((12, Y, X), "float32")
    on_root(comm, lambda: begin(path, values[:7], kind))
    rename = os.rename

    def twice(source: Any, into: Any) -> None:
        rename(source, into)
        rename(source, into)

    monkeypatch.setattr(os, "rename", twice)
    shardload.append(path, tree_of(values, 7, P(None, "a"), mesh_of()))
    monkeypatch.undo()
    assert on_disk(comm, shared_tmp_path) == [path.name]
    on_root(comm, lambda: look(path, values))


# --- wrong implementations


@pytest.mark.parametrize("kind", ["v3", "v3 shards", "HDF5"])
def test_old_values_that_cannot_be_read(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Wrong if the error were the library's alone, which names no file, or anything were appended."""
    path, values = path_of(shared_tmp_path, kind), ramp((12, Y, X), "float32")
    on_root(comm, lambda: begin(path, values[:7], kind))
    tree = tree_of(values, 7, P(None, "a"), mesh_of())

    source: Any = Hdf5Source if kind == "HDF5" else ZarrSource
    plain = source.plain

    def fails(self: Any, region: Any) -> Any:
        if region.ndim == 1:  # the coordinate, which is looked at before
            return plain(self, region)
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(source, "plain", fails)
    says = f"in '{path}', which share a chunk or shard with new ones, cannot be read: elements "
    same_error(comm, lambda: shardload.append(path, tree), SourceError, "old values of '/g/rho'", says, "Nothing was appended")
    monkeypatch.undo()
    assert on_disk(comm, shared_tmp_path) == [path.name]
    on_root(comm, lambda: look(path, values[:7]))


def test_an_encoder_that_stores_something_else(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if chunks of other values got into the store: zarr-python decodes them before, with the store's own metadata."""
    path, values = shared_tmp_path / "run.zarr", ramp((9, Y, X), "float32")
    on_root(comm, lambda: make(path, values[:5]))
    before = files(path)
    right = GrowthEncoder.encode
    monkeypatch.setattr(GrowthEncoder, "encode", lambda self, region, values: right(self, region, values + 1))
    same_error(comm, lambda: shardload.append(path, tree_of(values, 5, P(None, "a"))), VerifyError, "other values")
    assert on_root(comm, lambda: files(path)) == before
    assert on_disk(comm, shared_tmp_path) == ["run.zarr"]


@pytest.mark.parametrize("name", ["a.nc", "a.zarr"])
@pytest.mark.parametrize("kind", ["int16", "float32"])
def test_decoded_values_are_no_packed_numbers(comm: Any, shared_tmp_path: Path, name: str, kind: str) -> None:
    """Wrong if they were appended as they are: readers would apply factor and offset to them a second time."""
    path = shared_tmp_path / name

    def make() -> None:
        x = xarray.Dataset({"t": (("time", "y", "x"), ramp((2, Y, X)).astype(kind))})
        x["t"].attrs = {"scale_factor": np.float32(0.5), "add_offset": np.float32(10)}
        x.to_zarr(path, consolidated=False) if name == "a.zarr" else x.to_netcdf(path, unlimited_dims=["time"])

    on_root(comm, make)
    mesh, spec = mesh_of(), P(None, "a", "b")
    stored = shardload.load(path, mesh, spec, dataset="t", decode=False)
    decoded = shardload.load(
        path, mesh, spec, dataset="t", decode=True, dtype="float32"
    )  # float64 of Zarr, as JSON has no types
    says = ("holds packed numbers", "scale_factor=0.5", "Pack them first")
    same_error(comm, lambda: shardload.append(path, {"t": decoded}), ConfigError, *says, "values that were decoded")
    if kind == "int16":
        same_error(comm, lambda: shardload.append(path, {"t": decoded + 0}), ConfigError, *says, "is float32")
        cast = shardload.load(path, mesh, spec, dataset="t", decode=False, dtype="float32")  # packed numbers all the same
        same_error(comm, lambda: shardload.append(path, {"t": cast}), ConfigError, "Cast it: x.astype('int16')")
    shardload.append(path, {"t": stored})

    def look() -> None:
        with xarray.open_dataset(path, **({"engine": "zarr", "consolidated": False} if name == "a.zarr" else {})) as found:
            np.testing.assert_array_equal(found["t"], np.concatenate([ramp((2, Y, X))] * 2).astype(kind) * 0.5 + 10)

    on_root(comm, look)


@pytest.mark.parametrize("how", [hdf5plugin.Bitshuffle(), hdf5plugin.BZip2()], ids=["bitshuffle", "bzip2"])
def test_arrays_that_a_load_refuses_grow(comm: Any, shared_tmp_path: Path, how: Any) -> None:
    """Wrong if an append to whole chunks, which decodes no old value, needed a filter that loads do not trust."""
    path, values = shared_tmp_path / "a.h5", ramp((8, Y, X))
    on_root(comm, lambda: write_hdf5(path, {"t": values[:4]}, chunks=(4, Y, X), maxshape=(None, Y, X), **how))
    with pytest.raises(SourceError, match="allow_filters"):
        shardload.load(path, mesh_of(), P(None, "a"), dataset="t")
    shardload.append(path, {"t": put(values[4:], mesh_of(), P(None, "a"))}, dim=0)
    compare(comm, path, {"t": values})


# Metadata in a store: the file, what is done to it, and what the error says beside its name.
DAMAGE: dict[str, tuple[str, Any, str]] = {
    "type": ("g/rho/zarr.json", lambda file: change_json(file, data_type=True), ""),
    "grid": ("g/rho/zarr.json", lambda file: change_json(file, chunk_key_encoding="x"), ""),
    "consolidated": ("zarr.json", lambda file: change_json(file, consolidated_metadata=[1]), ""),
    "a pipe": ("g/y/zarr.json", lambda file: file.unlink() or os.mkfifo(file), "is a pipe, expected a file"),
    "long": ("g/y/zarr.json", lambda file: os.truncate(file, 1 << 40), "33554432 at most"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_an_error_that_names_the_file(comm: Any, shared_tmp_path: Path, damage: str) -> None:
    """Wrong if it were an error of zarr-python or NumPy, which says neither which file nor which array; if it changed anything;
    or if the append waited for the writer of a pipe, or read gigabytes.
    """
    path, values = shared_tmp_path / "run.zarr", ramp((7, Y, X), "float32")
    name, spoil, says = DAMAGE[damage]

    def begin() -> dict[str, bytes]:
        make(path, values[:5], is_consolidated=damage == "consolidated")
        spoil(path / name)
        return files(path / "g" / "rho")

    before = on_root(comm, begin)
    same_error(comm, lambda: shardload.append(path, tree_of(values, 5, P())), SourceError, str(path), says)
    assert on_root(comm, lambda: files(path / "g" / "rho")) == before


def test_a_damaged_index_of_chunks(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if it were an error of HDF5, which names no file, or if it changed anything."""
    path, values = shared_tmp_path / "run.h5", ramp((7, Y, X), "float32")

    def begin() -> bytes:
        make_file(path, values[:4], "HDF5")
        content = path.read_bytes()
        node = content.rindex(b"TREE\x01\x00")  # of chunks: the first one begins where the bytes from the 32nd on say
        path.write_bytes(content[: node + 33] + b"\x51" + content[node + 34 :])
        return path.read_bytes()

    before = on_root(comm, begin)
    same_error(comm, lambda: shardload.append(path, tree_of(values, 4, P())), SourceError, str(path))
    assert on_root(comm, path.read_bytes) == before


@pytest.mark.parametrize("version", [3, 2])
def test_a_time_in_the_group_above(comm: Any, shared_tmp_path: Path, version: int) -> None:
    """Wrong if one array grew alone, so that xarray could not open the store any more."""
    path = shared_tmp_path / "run.zarr"

    def begin() -> None:
        tree = xarray.DataTree.from_dict(
            {
                "/": xarray.Dataset(coords={"time": np.arange(4.0)}),
                "/product": xarray.Dataset({"no2": (("time", "x"), np.zeros((4, 8)))}),
                "/aux": xarray.Dataset({"q": (("time",), np.zeros(4)), "n": (("time_of_day",), np.zeros(4))}),
            }
        )
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            tree.to_zarr(path, write_inherited_coords=False, zarr_format=version)

    on_root(comm, begin)
    before = on_root(comm, lambda: files(path))
    one = {"product/no2": np.ones((1, 8))}
    same_error(comm, lambda: shardload.append(path, one, dim="time"), ConfigError, "'/aux/q', '/time'", "'time'", "'aux/q'")
    assert on_root(comm, lambda: files(path)) == before
    shardload.append(path, one | {"aux/q": np.ones(1), "time": np.array([4.0])}, dim="time")

    def check() -> None:
        with xarray.open_datatree(path, engine="zarr") as tree:
            assert {name: node.sizes.get("time") for name, node in tree.children.items()} == {"product": 5, "aux": 5}

    on_root(comm, check)


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_bfloat16_grows(comm: Any, shared_tmp_path: Path, suffix: str) -> None:
    path, values = shared_tmp_path / f"a{suffix}", ramp((7, X), "float32").astype(ml_dtypes.bfloat16)
    how = {"unlimited": {"x": 0}} if suffix == ".h5" else {}
    shardload.save(path, {"x": put(values[:5], mesh_of(), P(None, "a"))}, dims={"x": ("t", "x")}, chunks={"x": (2, X)}, **how)
    shardload.append(path, {"x": put(values[5:], mesh_of(), P(None, "a"))}, dim="t")
    check(shardload.load(path, mesh_of(), P("a"), dataset="x", pad=0), padded(values, mesh_of(), P("a"), 0), mesh_of(), P("a"))
