"""What does a reader find in an HDF5 or netCDF4 file that grows, at any moment? The old arrays or the new ones, whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5netcdf
import h5py
import hdf5plugin
import netCDF4
import numpy as np
import pytest
import xarray as xr

from shardload.errors import ConfigError, SourceError
from shardload.formats.hdf5 import growable, growth, on_disk
from shardload.formats.hdf5.chunk_tree import ChunkTree
from shardload.formats.hdf5.growable import Facts, read_file
from shardload.formats.hdf5.growth import GrowthCatalog
from shardload.formats.hdf5.on_disk import PAGE, Patch, Spot, read_superblock
from shardload.formats.leftovers import find_leftover
from shardload.formats.locks import FileLock
from tests.tiers import quick_ones
from tests.unit.growing import Disk, grow, sink_of
from tests.unit.saving import forked, quick_fsync, ramp, write_all  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_fsync")

OLD, NEW, Y, X = 5, 11, 6, 7
VALUES = {
    "/time": np.arange(NEW) / 4,
    "/g/rho": ramp((NEW, Y, X), "float32"),
    "/g/vel": -ramp((NEW, Y, X), "int16"),
}


def by_h5py(path: Path, **how: Any) -> None:
    """Scales, a group, gzip with shuffle, an array without filters; room at the edge, and none."""
    with h5py.File(path, "w", **how) as file:
        order = how.get("track_order")
        file.create_dataset("time", data=VALUES["/time"][:OLD], maxshape=(None,), chunks=(4,), track_order=order)
        file["time"].make_scale("time")
        for name, chunks, more in (("rho", (2, 4, 7), {"compression": "gzip", "shuffle": True}), ("vel", (5, 3, 2), {})):
            one = file.create_dataset(
                f"g/{name}", data=VALUES[f"/g/{name}"][:OLD], chunks=chunks, maxshape=(None, Y, X), track_order=order, **more
            )
            one.dims[0].attach_scale(file["time"])
            one.attrs["units"] = "kg m-3"


def by_netcdf4(path: Path) -> None:
    with netCDF4.Dataset(path, "w") as file:
        for name, n in (("time", None), ("y", Y), ("x", X)):
            file.createDimension(name, n)
        file.createVariable("time", "f8", ("time",), chunksizes=(4,))[:] = VALUES["/time"][:OLD]
        group = file.createGroup("g")
        for name, chunks, zlib in (("rho", (2, 4, 7), True), ("vel", (5, 3, 2), False)):
            values = VALUES[f"/g/{name}"]
            one = group.createVariable(name, values.dtype, ("time", "y", "x"), zlib=zlib, chunksizes=chunks)
            one.units = "kg m-3"
            one[:] = values[:OLD]


def by_xarray(path: Path, engine: Any, has_time: bool = True) -> None:
    """All in the root, where xarray looks."""
    arrays = {name: (("time", "y", "x"), VALUES[f"/g/{name}"][:OLD], {"units": "kg"}) for name in ("rho", "vel")}
    coords = {"time": VALUES["/time"][:OLD]} if has_time else {}
    xr.Dataset(arrays, coords).to_netcdf(path, engine=engine, unlimited_dims=["time"])


MAKERS: dict[str, Callable[[Path], None]] = {
    "h5py": by_h5py,
    "h5py 1.8": lambda path: by_h5py(path, libver=("v108", "v108")),
    "h5py, creation order": lambda path: by_h5py(path, track_order=True),
    "netCDF4": by_netcdf4,
}


def lengths(path: Path) -> dict[str, int]:
    """The lengths that plain h5py finds. All values and attributes are right."""
    found = {}
    with h5py.File(path) as file:
        for name, values in VALUES.items():
            one = file[name]
            assert one.shape[1:] == values.shape[1:] and len(one) in (OLD, NEW)
            np.testing.assert_array_equal(one[...], values[: len(one)])
            found[name] = len(one)
            assert one.ndim == 1 or one.dims[0][0] == file["time"]
            assert one.ndim == 1 or one.attrs["units"] in ("kg m-3", b"kg m-3")
    return found


@pytest.mark.parametrize("maker", quick_ones(MAKERS, "h5py", "netCDF4"))
def test_every_state_of_the_disk(tmp_path: Path, maker: str) -> None:
    """Wrong if at any moment a reader found a row without its values, other old values, another length, or no file."""
    path, state = tmp_path / "x.h5", tmp_path / "state.h5"
    MAKERS[maker](path)
    disk = Disk(path)
    with disk.watched():
        grow(path, VALUES, seed=3)
    assert path.read_bytes() == disk.after(range(len(disk.writes)))
    assert set(lengths(path).values()) == {NEW}
    seen = []
    for what, data in disk.after_kills():
        state.write_bytes(data)
        try:
            seen.append(tuple(lengths(state).values()))
        except Exception as error:
            raise AssertionError(f"after {what}") from error
    # One after the other, the coordinate last; before that nothing.
    order = [(OLD, OLD, OLD), (OLD, NEW, OLD), (OLD, NEW, NEW), (NEW, NEW, NEW)]
    assert sorted(set(seen), key=seen.index) == order and seen == sorted(seen, key=order.index)
    assert seen.count(order[0]) > len(disk.writes) // 2
    for what, data in disk.after_power_cuts() if maker in ("h5py", "netCDF4") else ():
        state.write_bytes(data)
        try:
            assert set(lengths(state).values()) <= {OLD, NEW}
        except Exception as error:
            raise AssertionError(f"after {what}") from error


@pytest.mark.parametrize("maker", MAKERS)
def test_each_change_is_one_small_write(tmp_path: Path, maker: str) -> None:
    """Wrong if bytes of the old file were changed by a write that a kill can cut in two, before all others, or unsynced."""
    path = tmp_path / "x.h5"
    MAKERS[maker](path)
    disk = Disk(path)
    with disk.watched():
        grow(path, VALUES)
    inside = [k for k, (at, new) in enumerate(disk.writes) if new is not None and at < len(disk.before)]
    sizes = [(disk.writes[k][0], len(disk.writes[k][1] or b"")) for k in inside]
    assert all(at // PAGE == (at + n - 1) // PAGE for at, n in sizes)
    first = inside[0]
    assert first in disk.syncs and first + 1 in disk.syncs  # after all that is new, and after the end of the file
    if maker == "h5py":  # the end of the file, an index and a length of each dataset; synced in this order
        assert inside == list(range(first, len(disk.writes))) and len(inside) == 7 and {n for _, n in sizes} == {8}
        assert [n for n in disk.syncs if n > first] == [first + 1, first + 4, first + 7]
    if shutil.which("h5dump"):  # most often of another version of HDF5
        found = subprocess.run(["h5dump", "-y", "-w", "0", "-d", "/g/vel", path], capture_output=True, text=True, check=True)
        rows = found.stdout.partition("DATA {")[2].partition("}")[0].split(",")
        assert not found.stderr and [int(one) for one in rows] == VALUES["/g/vel"].ravel().tolist()


def test_an_append_after_a_kill(tmp_path: Path) -> None:
    """Wrong if what a killed append left (bytes behind the end, chunks beyond the shape) were in the way of the next, or in the
    arrays.
    """
    path = tmp_path / "x.h5"
    by_h5py(path)
    disk = Disk(path)
    with disk.watched():
        grow(path, {name: -values for name, values in VALUES.items()})
    n_commit = next(k for k, (at, new) in enumerate(disk.writes) if new is not None and at < 100)
    for n in (3, n_commit, n_commit + 1, n_commit + 3, n_commit + 4):  # also with the new indexes, and the old lengths
        path.write_bytes(disk.after(range(n)))
        with h5py.File(path) as file:
            assert len(file["g/rho"]) == OLD
        with h5py.File(path, "r+") as file:
            for name, values in VALUES.items():
                file[name][...] = values[:OLD]
        grow(path, VALUES)
        assert set(lengths(path).values()) == {NEW}


@pytest.mark.each_value
@pytest.mark.parametrize("engine", ["netcdf4", "h5netcdf"])
@pytest.mark.parametrize("has_time", [True, False])
def test_files_of_xarray(tmp_path: Path, engine: Any, has_time: bool) -> None:
    """Wrong if a library of netCDF saw another length, of the dimension too: with a coordinate, and without."""
    path = tmp_path / "x.nc"
    by_xarray(path, engine, has_time)
    values = {name.replace("/g", ""): one for name, one in VALUES.items() if has_time or name != "/time"}
    with h5py.File(path) as file:
        before = len(file["time"])
    assert before == (0 if engine == "netcdf4" and not has_time else OLD)
    grow(path, values, dimensions={} if has_time or not before else {"/time": NEW})
    for other in ("netcdf4", "h5netcdf"):
        with xr.open_dataset(path, engine=other) as found:
            assert dict(found.sizes) == {"time": NEW, "y": Y, "x": X}
            for name, one in values.items():
                np.testing.assert_array_equal(found[name[1:]].values, one)
    with netCDF4.Dataset(path, "a") as file:  # and netCDF goes on from there
        file["rho"][NEW + 2] = 3
        assert len(file.dimensions["time"]) == NEW + 3
    with h5netcdf.File(path) as file:
        assert file.dimensions["time"].size == NEW + 3 and np.all(file["rho"][NEW + 2] == 3)
        np.testing.assert_array_equal(file["rho"][:NEW], values["/rho"])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes_edges_and_filters(tmp_path: Path, axis: int) -> None:
    """Wrong if chunks along another axis than the slowest were mixed up, an edge was begun anew, or a filter was left out."""
    path = tmp_path / "x.h5"
    shape, new = [4, 6, 7], 4
    values = {}
    filters: dict[str, dict[str, Any]] = {
        "plain": {},
        "gzip": {"compression": "gzip", "compression_opts": 1, "shuffle": True, "fletcher32": True},
        "lzf": {"compression": "lzf"},
        "scaled": {"scaleoffset": 0},
        "szip": {"compression": "szip"},
        "big": {"dtype": ">i4", "fillvalue": -3},
    }
    with h5py.File(path, "w") as file:
        for k, (name, more) in enumerate(filters.items()):
            dtype = np.dtype(more.pop("dtype", "<i4"))
            whole = [n + (new + (k % 3 == 1)) * (a == axis) for a, n in enumerate(shape)]
            values[f"/{name}"] = ramp(tuple(whole), dtype)
            old = tuple(slice(0, n) for n in shape)
            maxshape = [None if a == axis else n for a, n in enumerate(shape)]
            file.create_dataset(
                name, data=values[f"/{name}"][old], dtype=dtype, chunks=(3, 4, 2 + k), maxshape=maxshape, **more
            )
    grow(path, values, axis, alignment=1 + 4095 * (axis == 1))
    with h5py.File(path) as file:
        for name, one in values.items():
            assert file[name].dtype == one.dtype
            np.testing.assert_array_equal(file[name][...], one, err_msg=name)
            chunks: list[Any] = []
            file[name].id.chunk_iter(chunks.append)
            assert axis != 1 or sum(one.byte_offset % 4096 == 0 for one in chunks) >= len(chunks) // 2


@pytest.mark.parametrize(
    ("dtype", "filters", "told"),
    [
        ("f4", {"scaleoffset": 2}, "'/x' is encoded by scaleoffset, which could change the values once more"),
        ("f4", dict(hdf5plugin.Zfp(accuracy=0.5)), "'/x' is encoded by zfp, which could change the values once more"),
        ("i4", {"scaleoffset": 5}, "which append does not write"),
    ],
)
def test_filters_that_change_values(tmp_path: Path, dtype: str, filters: dict[str, Any], told: str) -> None:
    """Wrong if rows were rounded that had been rounded before, or cut to few bits: only some chunks are read back as values."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=ramp((4, 8), dtype), chunks=(2, 8), maxshape=(None, 8), **filters)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"{told}.*--compression gzip"):
        grow(path, {"/x": ramp((8, 8), dtype)})
    assert path.read_bytes() == before


def test_rows_one_by_one_and_what_hdf5_does_then(tmp_path: Path) -> None:
    """Wrong if an append did not begin where the one before it ended; or if HDF5 could not go on with such a file."""
    path, values = tmp_path / "x.h5", ramp((200, 3), "int64")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (0, 3), values.dtype, maxshape=(None, 3), chunks=(2, 2))
    sizes = []
    for n in range(1, 120, 3):
        grow(path, {"/x": values[:n]})
        sizes.append(os.path.getsize(path))
    assert max(np.diff(sizes)) < 3 * 2616 + 4 * 32 + 16  # a leaf, another that begins, and the root: not the whole index
    with h5py.File(path, "r+") as file:
        assert len(file["x"]) == 118
        file["x"].resize(200, 0)
        file["x"][118:] = values[118:]
    with h5py.File(path, "r+") as file:
        np.testing.assert_array_equal(file["x"][...], values)
        file["x"].resize(77, 0)
    grow(path, {"/x": values[:90]})
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["x"][...], values[:90])
    if shutil.which("h5repack"):
        subprocess.run(["h5repack", path, tmp_path / "y.h5"], check=True)
        assert os.path.getsize(tmp_path / "y.h5") < 20_000 < os.path.getsize(path)
        with h5py.File(tmp_path / "y.h5") as file:
            np.testing.assert_array_equal(file["x"][...], values[:90])


def test_an_array_that_has_several_names(tmp_path: Path) -> None:
    """Wrong if only the first name were known, if arrays with one scale for strangers, or if a link led elsewhere."""
    path, time, rho = tmp_path / "x.h5", np.arange(7.0), ramp((7, 3), "int16")
    with h5py.File(path, "w") as file:
        file.create_dataset("time", data=time[:4], maxshape=(None,), chunks=(3,)).make_scale("time")
        file.create_dataset("rho", data=rho[:4], maxshape=(None, 3), chunks=(3, 2)).dims[0].attach_scale(file["time"])
        file["a"], file["g/b"] = file["time"], file["rho"]  # HDF5 lists these first
        file["soft"], file["else"] = h5py.SoftLink("/rho"), h5py.ExternalLink("/dev/null", "/rho")
    for names in (["/time", "/rho"], ["/a", "/g/b"], ["/rho"], []):
        found = read_file(str(path), [*names, "/soft", "/else", "/rho/x", "/g"])["arrays"]
        assert len(found) == 2 and set(names) <= set(found)
        assert len({one["scopes"][0] for one in found.values()}) == 1  # so that both must be passed
    assert read_file(str(path), ["/time", "/rho"])["arrays"]["/rho"]["dims"] == ["time", None]
    with pytest.raises(ConfigError, match=r"'/time' and '/a' in .* are one array with two names"):
        read_file(str(path), ["/time", "/a"])
    grow(path, {"/time": time[:6], "/rho": rho[:6]})
    grow(path, {"/a": time, "/g/b": rho})
    with h5py.File(path) as file:
        for one, other, values in (("time", "a", time), ("rho", "g/b", rho)):
            assert file[one] == file[other]
            np.testing.assert_array_equal(file[one][...], values)


def test_bytes_in_the_other_byte_order(tmp_path: Path) -> None:
    """Wrong if integers of one byte were refused because a netCDF file with `endian="big"` says an order of them, too."""
    path, values = tmp_path / "x.nc", {"/u": ramp((7, 3), "uint8"), "/i": ramp((7, 3), "int8"), "/s": ramp((7, 3), "int16")}
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        file.createDimension("x", 3)
        for name, one in values.items():
            new = file.createVariable(name[1:], one.dtype.newbyteorder(">"), ("time", "x"), endian="big", chunksizes=(2, 3))
            new[:] = one[:3]
    grow(path, values)
    with netCDF4.Dataset(path) as file:
        for name, one in values.items():
            np.testing.assert_array_equal(file[name[1:]][:], one)


def test_filters_that_netcdf4_has_brought(tmp_path: Path) -> None:
    """Wrong if a file with zstd were refused because the program had imported netCDF4, whose filter HDF5 finds first then; or
    if the error did not say that another file keeps that filter. In a process of its own: HDF5 finds filters once.
    """
    filters = {"zstd": hdf5plugin.Zstd(), "blosc": hdf5plugin.Blosc(), "bzip2": hdf5plugin.BZip2()}
    values = ramp((7, 6), "f4")
    for name, one in filters.items():
        for path in (tmp_path / f"{name}.h5", tmp_path / f"open-{name}.h5"):
            with h5py.File(path, "w") as file:
                file.create_dataset("x", data=values[:4], chunks=(3, 6), maxshape=(None, 6), **one)
    code = (
        "import netCDF4, sys, h5py, numpy as np\nimport shardload\n"
        "values = np.arange(42, dtype='f4').reshape(7, 6)\n"
        "for name in sys.argv[1:]:\n"
        "    kept = h5py.File(f'open-{name}.h5')\n    dataset = kept['x']\n"
        "    for call in (lambda: shardload.append(f'{name}.h5', {'x': values[4:]}, dim=0),\n"
        "                 lambda: shardload.save('new.h5', {'x': values}, chunks=(3, 6), compression=name)):\n"
        "        try: call()\n        except shardload.ConfigError as error: print(error)\n"
        "    kept.close()\n"
        "    shardload.append(f'{name}.h5', {'x': values[4:]}, dim=0)\n"
    )
    command = [sys.executable, "-c", code, *filters]
    path = ":".join([str(Path(__file__).parents[3]), *sys.path])
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2 * len(filters) and all("Close the files of h5py that have it" in line for line in said), said
    for name in filters:
        with h5py.File(tmp_path / f"{name}.h5") as file:
            np.testing.assert_array_equal(file["x"][...], values)


# --- what is refused, and what goes wrong


def _make(path: Path, **how: Any) -> None:
    more = {key: how.pop(key) for key in ("maxshape", "chunks", "dtype", "compression") if key in how}
    with h5py.File(path, "w", **how) as file:
        file.create_dataset("x", (4, 3), **({"maxshape": (None, 3), "chunks": (2, 3), "dtype": "f4"} | more))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"libver": "latest"}, "an extensible array"),
        ({"libver": "latest", "maxshape": (4, 3)}, "a fixed array"),
        ({"libver": "latest", "maxshape": (None, None)}, "a B-tree of version 2"),
        ({"libver": "latest", "maxshape": (4, 3), "chunks": (4, 3)}, "a single chunk"),
        ({"userblock_size": 512}, "a user block"),
        ({"fs_strategy": "page", "libver": ("earliest", "v110")}, "its space in pages"),
        ({"dtype": h5py.string_dtype()}, "append does not write"),
        ({"dtype": np.dtype([("a", "f4"), ("b", "i2")])}, "append does not write"),
        ({"compression": 307}, "307"),
    ],
)
def test_what_cannot_grow(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    """Wrong if such a file were changed, or the error said neither what was found nor what to do."""
    path = tmp_path / "x.h5"
    _make(path, **how)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=words) as found:
        read_file(str(path), ["/x"])
    assert any(word in str(found.value) for word in ("shardload copy", "append with h5py"))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def _spots(path: Path, name: str) -> tuple[bytes, int, Any]:
    """The file's bytes, the address of a dataset's header, and where it has what changes."""
    data = path.read_bytes()

    def read(offset: int, nbytes: int) -> bytes:
        return data[offset : offset + nbytes]

    with h5py.File(path) as file:
        facts = Facts.of(file[name], read_superblock(read))
    return data, facts.address, facts.spots(read)


def _is_cut(spot: Spot, page: int) -> bool:
    start, stop = spot.range
    return start // page != (stop - 1) // page


@pytest.mark.parametrize("block", ["OHDR", "OCHK", "both"])
def test_headers_in_two_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    """Wrong if a header with a checksum were changed by a write that is in two pages; or were lost when it moves first."""
    path, state = tmp_path / "x.nc", tmp_path / "state.nc"
    with netCDF4.Dataset(path, "w") as made:
        for k in range(5):
            made.createDimension(f"before{k}", 3)
        made.createDimension("t", None)
        variable = made.createVariable("t", "f8", ("t",))  # its header goes on elsewhere: there the place of its index is
        variable.units, variable.long_name = "days since 2000-01-01", "b" * 70
        variable[:] = np.arange(4.0)
        for k in range(3):
            made.createVariable(f"x{k}", "f4", ("t",))
    data, address, spots = _spots(path, "t")
    assert data[spots.dims[0].block[0]] == data[address] and data[spots.index.block[0] :].startswith(b"OCHK")
    # A length of pages with which one block is cut, or both.
    at = next(
        n
        for n in range(600, 4000)
        if [_is_cut(spots.dims[0], n), _is_cut(spots.index, n)] == [block != "OCHK", block != "OHDR"]
        and address // n == (address + 45) // n  # its beginning is not cut
    )
    for module in (on_disk, growable, growth):  # as if the file lay otherwise
        monkeypatch.setattr(module, "PAGE", at)
    disk = Disk(path)
    with disk.watched():
        grow(path, {"/t": np.arange(9.0)})
    inside = [(offset, len(new or b"")) for offset, new in disk.writes if new is not None and offset < len(disk.before)]
    assert all(start // growth.PAGE == (start + n - 1) // growth.PAGE for start, n in inside)
    for what, content in [*disk.after_kills(), *disk.after_power_cuts()]:
        state.write_bytes(content)
        with h5py.File(state) as file:
            n = len(file["t"])
            assert n in (4, 9), what
            np.testing.assert_array_equal(file["t"][...], np.arange(float(n)), err_msg=what)
            assert file["t"].attrs["long_name"] == b"b" * 70 and h5py.h5ds.is_scale(file["t"].id)
    with netCDF4.Dataset(path, "a") as file:  # the netCDF library goes on with such a header
        file["t"][9:12] = 3
        file["t"].setncattr("more", "c" * 300)
        file["t"].delncattr("units")
    grow(path, {"/t": np.arange(20.0)})
    with netCDF4.Dataset(path) as file:
        np.testing.assert_array_equal(file["t"][12:], np.arange(12.0, 20))
        assert file["t"].ncattrs() == ["long_name", "more"]


def test_a_header_that_cannot_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a header that begins right before a page's end were changed by a write in two pages."""
    path = tmp_path / "x.h5"
    by_h5py(path, libver=("v108", "v108"))
    before, address, _ = _spots(path, "g/rho")
    for module in (on_disk, growable, growth):
        monkeypatch.setattr(module, "PAGE", address + 20)
    with pytest.raises(ConfigError, match=r"in two pages of .*shardload copy"):
        sink_of(path, {"/g/rho": VALUES["/g/rho"]})
    assert path.read_bytes() == before


def test_another_program_has_it_open(tmp_path: Path) -> None:
    """Wrong if a file grew that somebody writes, or that HDF5 would not open for writing; or if a reader of the moment were in
    the way of the end.
    """
    path = tmp_path / "x.h5"
    by_h5py(path)
    for mode in ("r", "r+"):
        sink = sink_of(path, VALUES)
        with h5py.File(path, mode), pytest.raises(ConfigError, match="is open in another program") as found:
            sink.create()
        assert "Close it" in str(found.value) and [one.name for one in tmp_path.iterdir()] == ["x.h5"]
    # While chunks are written others can read, and none can write.
    sink = sink_of(path, VALUES)
    come = {name: one[sink.arrays[name].base :] for name, one in VALUES.items()}
    with sink.create() as catalog, h5py.File(path) as reader:
        rho = reader["g/rho"]
        with path.open("r+b") as other, pytest.raises(BlockingIOError):  # as HDF5 does it
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_all(sink, catalog, come)
        catalog.finish()
        assert len(reader["time"]) == OLD
        catalog.commit()
        assert len(rho) == OLD
        np.testing.assert_array_equal(rho[...], VALUES["/g/rho"][:OLD])
        with contextlib.suppress(OSError):  # opened later, in a session that takes the file to be shorter
            np.testing.assert_array_equal(reader["g/vel"][...], VALUES["/g/vel"])
    assert set(lengths(path).values()) == {NEW}
    with h5py.File(path, "r+"):  # the lock was given back
        pass


def test_a_file_that_somebody_else_changes(tmp_path: Path) -> None:
    """Wrong if an append went on from a state that the file no longer has."""
    path = tmp_path / "x.h5"
    by_h5py(path)
    sink = sink_of(path, VALUES)
    with h5py.File(path, "r+") as file:
        file["time"].resize(6, 0)
    with pytest.raises(ConfigError, match="changed by somebody else"):
        sink.create()
    by_h5py(path)
    sink = sink_of(path, VALUES)
    come = {name: one[sink.arrays[name].base :] for name, one in VALUES.items()}
    with sink.create() as catalog:
        write_all(sink, catalog, come)
        catalog.finish()
        fcntl.flock(catalog._descriptor, fcntl.LOCK_UN)  # type: ignore[attr-defined]  # a system without locks
        with h5py.File(path, "r+") as file:
            file["time"].resize(6, 0)
        data = path.read_bytes()
        with pytest.raises(ConfigError, match="changed by somebody else"):
            catalog.commit()
    assert path.read_bytes()[: len(data)] == data[: os.path.getsize(path)]
    assert [one.name for one in tmp_path.iterdir()] == ["x.h5"]
    by_h5py(path)
    sink = sink_of(path, VALUES)
    with sink.create() as catalog:
        write_all(sink, catalog, come)
        catalog.finish()
        data, _, spots = _spots(path, "time")  # a program that changes one number, and nothing else
        with path.open("r+b") as file:
            file.seek(spots.dims[0].offset)
            file.write((4).to_bytes(8, "little"))
        with pytest.raises(ConfigError, match="changed by somebody else"):
            catalog.commit()
    with h5py.File(path) as file:
        assert (len(file["time"]), len(file["g/rho"])) == (4, OLD)


def test_an_append_that_is_given_up_leaves_what_somebody_else_has_appended(tmp_path: Path) -> None:
    """Wrong if the file were cut to the length that it had before: h5py would not open it any more."""
    path = tmp_path / "x.h5"
    by_h5py(path)
    sink = sink_of(path, VALUES)
    with sink.create() as catalog:
        write_all(sink, catalog, {name: one[sink.arrays[name].base :] for name, one in VALUES.items()})
        with h5py.File(path, "r+", locking=False) as file:
            file["g/rho"].resize(OLD + 30, 0)
            file["g/rho"][OLD:] = 7
    with h5py.File(path) as file:
        assert len(file["g/rho"]) == OLD + 30 and (file["g/rho"][OLD:] == 7).all()
        np.testing.assert_array_equal(file["g/rho"][:OLD], VALUES["/g/rho"][:OLD])


def test_a_file_that_takes_the_place_of_this_one(tmp_path: Path) -> None:
    """Wrong if chunks were written into it, over its own bytes; or if rows were said to be in it that went into the old one."""
    path, other = tmp_path / "x.h5", tmp_path / "other.h5"
    by_h5py(path)
    come = {name: one[sink_of(path, VALUES).arrays[name].base :] for name, one in VALUES.items()}
    for is_early in (True, False):
        with h5py.File(other, "w") as file:
            file["much"] = ramp((9000,), "f8")
        data, sink = other.read_bytes(), sink_of(path, VALUES)
        with sink.create() as catalog:
            if is_early:
                os.replace(other, path)
                with pytest.raises(ConfigError, match="changed by somebody else"):
                    write_all(sink, catalog, come)
            else:
                write_all(sink, catalog, come)
                catalog.finish()
                os.replace(other, path)
                with pytest.raises(ConfigError, match="changed by somebody else"):
                    catalog.commit()
        assert path.read_bytes() == data and [one.name for one in tmp_path.iterdir()] == ["x.h5"]
        by_h5py(path)


def test_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if an error at any write of the commit left arrays of two lengths, a lock, or a longer file."""
    path = tmp_path / "x.h5"
    right = growth.put_at
    for fails_at in range(1, 8):
        by_h5py(path)
        before = path.read_bytes()
        n = [0]

        def put(
            descriptor: int, data: Any, offset: int, fails_at: int = fails_at, before: bytes = before, n: list[int] = n
        ) -> None:
            n[0] += offset < len(before) and len(data) == 8
            if n[0] == fails_at:
                n[0] += 1
                raise OSError(5, "no such luck")
            right(descriptor, data, offset)

        with monkeypatch.context() as patch:
            patch.setattr(growth, "put_at", put)
            with pytest.raises(SourceError, match="EIO"):
                grow(path, VALUES)
        assert set(lengths(path).values()) == {OLD}
        assert path.read_bytes()[100 : len(before)] == before[100:]  # all but the end of the file, in the superblock
        assert [one.name for one in tmp_path.iterdir()] == ["x.h5"]
    grow(path, VALUES)
    assert set(lengths(path).values()) == {NEW}


def test_a_commit_that_fails_and_cannot_be_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the error said that the file is as it was: some arrays have their new length."""
    path, right = tmp_path / "x.h5", growth.put_at
    by_h5py(path)
    n, n_written, most = [0], path.stat().st_size, 6

    def put(descriptor: int, data: Any, offset: int) -> None:
        n[0] += offset < n_written and len(data) == 8
        if n[0] > most:
            raise OSError(5, "no such luck")
        right(descriptor, data, offset)

    monkeypatch.setattr(growth, "put_at", put)
    with pytest.raises(SourceError, match=r"could not be undone .*look at their shapes") as found:
        grow(path, VALUES)
    assert "as it was" not in str(found.value)
    assert set(lengths(path).values()) == {OLD, NEW}


def test_an_append_that_is_given_up(tmp_path: Path) -> None:
    """Wrong if it left bytes behind the end, or did not say what the file beside it is."""
    path = tmp_path / "x.h5"
    by_h5py(path)
    before = path.read_bytes()
    sink = sink_of(path, VALUES)
    with sink.create() as catalog:
        left = find_leftover(catalog.ticket.temporary)
        assert left is not None and left.what == "appended" and "append" in str(left) and "rm " in str(left)
        write_all(sink, catalog, {name: one[sink.arrays[name].base :] for name, one in VALUES.items()})
        assert os.path.getsize(path) > len(before)
        catalog.finish()
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["x.h5"]


def test_chunks_that_are_missing_or_doubled(tmp_path: Path) -> None:
    """Wrong if an array grew without values, or a chunk had two owners."""
    path = tmp_path / "x.h5"
    by_h5py(path)
    sink = sink_of(path, {"/time": VALUES["/time"]})
    with sink.create() as catalog:
        catalog.allocate("/time", [0], [32])
        with pytest.raises(ValueError, match="has a place already"):
            catalog.allocate("/time", [0], [32])
        with pytest.raises(ValueError, match="have no place"):
            catalog.finish()
        with pytest.raises(ValueError, match="finish"):
            catalog.commit()


# --- wrong implementations, which HDF5 itself finds before anything is changed


def _swapped(self: Any, index: Any, offsets: Any, nbytes: Any, masks: Any = 0) -> Any:
    return _entries(self, index, offsets[::-1], nbytes, masks)


def _shifted(self: Any, index: Any, offsets: Any, nbytes: Any, masks: Any = 0) -> Any:
    index = np.array(index)
    index[:, -1] += 1
    return _entries(self, index, offsets, nbytes, masks)


_entries = ChunkTree.entries


@pytest.mark.parametrize(
    ("holder", "name", "wrong", "words"),
    [
        (ChunkTree, "entries", _swapped, "chunk"),
        (ChunkTree, "entries", _shifted, "outside"),
        (growth.GrowthSink, "order", property(lambda self: ["/g/rho", "/g/rho", "/time"]), "shape"),
        (
            Spot,
            "changed",
            lambda self, read, value: Patch(self.offset, read(self.offset, 8), (value + 1).to_bytes(8, "little")),
            "HDF5",
        ),
    ],
)
def test_metadata_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, wrong: Any, words: str
) -> None:
    """Wrong if what is written here were believed without having HDF5 read it."""
    path = tmp_path / "x.h5"
    by_h5py(path)
    before = path.read_bytes()
    monkeypatch.setattr(holder, name, wrong)
    with pytest.raises(SourceError, match=words):
        grow(path, VALUES)
    assert path.read_bytes() == before


def test_a_process_that_is_killed_lets_the_next_one_say_so(tmp_path: Path) -> None:
    """Wrong if the second append did not see the first's lock; a real process ends in the middle here."""
    path = tmp_path / "x.h5"
    by_h5py(path)
    child = forked()
    if not child:
        GrowthCatalog(sink_of(path, VALUES))
        os._exit(0)
    os.waitpid(child, 0)
    names = sorted(one.name for one in tmp_path.iterdir())
    assert len(names) == 3 and any(one.endswith(".unfinished") for one in names) and {names[0], "x.h5.appending"} < set(names)
    with pytest.raises(ConfigError, match=r"rm .*x\.h5\.appending"):
        sink_of(path, VALUES).create()
    assert set(lengths(path).values()) == {OLD}


def test_who_can_open_a_file_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if somebody could open it while its numbers change, or write to it at any time."""
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    path = tmp_path / "x.h5"
    by_h5py(path)

    def opens(mode: Any) -> bool:
        try:
            h5py.File(path, mode).close()
        except OSError:  # by flock, or HDF5 itself, which has it open to read
            return False
        return True

    descriptor, other = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    try:
        lock = FileLock(descriptor, str(path))
        assert not opens("r")
        lock.share()
        assert opens("r") and not opens("r+")
        lock.exclude()
        assert not opens("r")
        lock.share()
        with h5py.File(path):  # somebody reads
            lock.exclude()
            assert not opens("r+")
            with pytest.raises(ConfigError, match="open in another program"):
                FileLock(other, str(path))
    finally:
        os.close(descriptor)
        os.close(other)
    assert opens("r+")


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_lock_that_is_lost_as_it_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    """The system gives one lock back before it takes the other. Wrong if an append went on behind a program that took it then,
    or did not see what that one had changed.
    """
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    path, taken = tmp_path / "x.h5", fcntl.flock
    by_h5py(path)
    with contextlib.ExitStack() as others:

        def flock(descriptor: int, kind: int) -> None:
            if kind == fcntl.LOCK_SH | fcntl.LOCK_NB:
                taken(descriptor, fcntl.LOCK_UN)
                other = others.enter_context(h5py.File(path, "r+"))
                other["time"].resize(6, 0)
                if is_shared:  # it has ended before the other lock is taken
                    others.close()
            taken(descriptor, kind)

        sink = sink_of(path, VALUES)
        monkeypatch.setattr(fcntl, "flock", flock)
        says = "changed by somebody else" if is_shared else "opened for writing by another program"
        with pytest.raises(ConfigError, match=says):
            sink.create()
    assert [one.name for one in tmp_path.iterdir()] == ["x.h5"]
    with h5py.File(path) as file:
        assert len(file["time"]) == 6


def test_names_of_axes_that_are_damaged_beside_it(tmp_path: Path) -> None:
    """Wrong if an attribute of another array ended the process: HDF5's own function takes these numbers for addresses."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        file["other"] = np.zeros((2, 3))
        file["other"].attrs["DIMENSION_LIST"] = np.full(2, 1 << 40)
        file["other"].attrs["DIMENSION_LABELS"] = np.full(2, 1 << 40)
        file.create_dataset("a", data=np.arange(3.0), chunks=(2,), maxshape=(None,)).dims[0].label = "t"
    found = read_file(str(path), ["/a"])["arrays"]
    assert found["/other"]["dims"] == [None, None] and found["/a"]["dims"] == ["t"]
