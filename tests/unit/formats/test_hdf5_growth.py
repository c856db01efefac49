"""What does a reader find in an HDF5 or netCDF4 file that grows, at any moment? The old arrays or the new ones, whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
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
from shardload.formats.hdf5 import chunks as hdf5_chunks
from shardload.formats.hdf5 import sink as hdf5_sink
from shardload.formats.hdf5.growth import Hdf5Growth, read_file
from shardload.formats.hdf5.ledger import Ledger
from shardload.formats.hdf5.sink import LedgerSink
from shardload.formats.lookup import find_array, format_of
from shardload.storage import target
from shardload.storage.changes import _BEFORE_NBYTES, changes_of, complete_append
from shardload.storage.leftovers import find_leftover
from tests.tiers import IS_QUICK, quick_ones
from tests.unit.files import early, flat, plain_edges, raw_dataset, stored_in, write_hdf5
from tests.unit.growing import Content, Disk, coming, grow, sink_of
from tests.unit.saving import forked, quick_fsync, write_all  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_fsync")

OLD, NEW, Y, X = 5, 11, 6, 7
VALUES = {
    "/time": np.arange(NEW) / 4,
    "/g/rho": flat((NEW, Y, X), "float32"),
    "/g/vel": -flat((NEW, Y, X), "int16"),
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
    "h5py latest": lambda path: by_h5py(path, libver="latest"),  # an extensible array
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


def state_of(disk: Disk, content: Content) -> str:
    """What a reader finds: "old", "new", or "marked" for a file that no library opens, and that becomes the new one."""
    data, path = content[disk.path.name], disk.path
    disk.put(content)
    if h5py.is_hdf5(path):
        (n,) = set(lengths(path).values())  # all arrays have one length
        assert n == NEW or data.startswith(disk.before)  # byte for byte
        return "new" if n == NEW else "old"
    left = find_leftover(str(changes_of(str(path))))
    assert left is not None and left.kind == "changes" and f"shardload info {path}" in str(left)
    assert complete_append(str(path)) and not complete_append(str(path))
    assert path.read_bytes() == disk.after(range(len(disk.events)))[path.name]
    assert set(lengths(path).values()) == {NEW}
    return "marked"


@pytest.fixture
def disk_of(tmp_path: Path) -> Callable[..., Disk]:
    """Makes a file, lets it grow, and gives what happened."""

    def made(maker: str, sign: int = 1) -> Disk:
        path = tmp_path / "d" / "x.h5"
        path.parent.mkdir(exist_ok=True)
        MAKERS[maker](path)
        disk = Disk(path)
        with disk.watched():
            grow(path, {name: sign * values for name, values in VALUES.items()}, seed=3)
        assert path.read_bytes() == disk.after(range(len(disk.events)))["x.h5"]
        assert os.listdir(path.parent) == ["x.h5"]
        return disk

    return made


@pytest.mark.parametrize("maker", quick_ones(MAKERS, "h5py", "h5py latest", "netCDF4"))
def test_every_state_of_the_disk(disk_of: Callable[..., Disk], maker: str) -> None:
    """Wrong if at any moment a reader found a row without its values, other old values, arrays of two lengths, or a file that
    neither opens nor says how it will.
    """
    disk = disk_of(maker)
    seen = [state_of(disk, content) for _, content in disk.after_kills()]
    assert seen == sorted(seen, key=["old", "marked", "new"].index)  # one after the other
    assert seen.count("old") > len(disk.events) // 2 and {"marked", "new"} <= set(seen)
    found = set()
    for what, content in disk.after_power_cuts() if maker in ("h5py", "h5py latest", "netCDF4") else ():
        try:
            found.add(state_of(disk, content))
        except Exception as error:
            raise AssertionError(f"after {what}") from error
    assert found in (set(), {"old", "marked", "new"})


@pytest.mark.parametrize("maker", quick_ones(MAKERS, "h5py", "h5py latest"))
def test_old_bytes_change_between_two_writes_of_the_head(disk_of: Callable[..., Disk], maker: str) -> None:
    """Wrong if a byte that the old arrays have were written before the mark is on disk, or the mark went before all were."""
    disk = disk_of(maker)
    inside = [
        (k, more[0], len(more[1]))
        for k, (kind, file, *more) in enumerate(disk.events)
        if kind == "write" and file == disk.file and more[0] < len(disk.before)
    ]
    (first, *mark), *_, (last, *head) = inside
    assert mark == head == [0, 512]  # one write, which a kill cannot cut
    assert [k for k, *_ in inside] == list(range(first, last + 1))
    synced = {n for n, file in disk.syncs if file == disk.file}
    assert {first + 1, last, last + 1} <= synced
    before = max(n for n in synced if n <= first)
    assert all(file != disk.file for kind, file, *_ in disk.events[before:first] if kind != "name")
    assert any(n == first and file is None for n, file in disk.syncs)  # the name of the file of changes is on disk
    disk.put(disk.after(range(len(disk.events))))
    if maker == "h5py" and shutil.which("h5dump"):  # most often of another version of HDF5
        command = ["h5dump", "-y", "-w", "0", "-d", "/g/vel", disk.path]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = shown.stdout.partition("DATA {")[2].partition("}")[0].split(",")
        assert not shown.stderr and [int(row) for row in rows] == VALUES["/g/vel"].ravel().tolist()


@pytest.mark.parametrize("maker", ["h5py", "h5py latest"])
def test_an_append_after_a_kill(disk_of: Callable[..., Disk], maker: str) -> None:
    """Wrong if what a killed append left (bytes behind the end) were in the way of the next append, or in the arrays."""
    disk = disk_of(maker, -1)
    for n in range(3, len(disk.events), 5):
        content = {"x.h5": disk.after(range(n))["x.h5"]}
        disk.put(content)
        if not h5py.is_hdf5(disk.path):
            break
        with h5py.File(disk.path, "r+") as file:
            for name, values in VALUES.items():
                file[name][...] = values[:OLD]
        grow(disk.path, VALUES)
        assert set(lengths(disk.path).values()) == {NEW}
        disk.put(content)
        with h5py.File(disk.path, "r+") as file:  # what h5py makes longer has no values of the killed append
            file["g/vel"].resize(NEW, 0)
            assert not file["g/vel"][OLD:].any()
    else:
        raise AssertionError("the mark was never there")


# --- a file whose append was killed at its very end


@pytest.fixture
def marked(disk_of: Callable[..., Disk]) -> Disk:
    """Such a file, in the middle of its changes."""
    disk = disk_of("h5py")
    for _, content in disk.after_kills():
        if b"shardload append" in content["x.h5"][:16]:
            disk.put(content | {"x.h5": content["x.h5"]})
            return disk
    raise AssertionError("the mark was never there")


@pytest.mark.parametrize("how", ["format", "array", "append", "renamed"])
def test_whoever_reads_it_completes_it(marked: Disk, how: str) -> None:
    """Wrong if a load, `shardload info` or the next append did not open it; or if another name were the end of it."""
    path = marked.path
    if how == "renamed":
        path = path.rename(path.with_name("y.h5"))
    if how == "append":
        assert read_file(str(path), list(VALUES))["arrays"]["/time"]["shape"] == (NEW,)
    elif how == "array":
        assert find_array(str(path), "/g/rho").shape == (NEW, Y, X)
    else:
        assert format_of(str(path)).name == "HDF5"
    assert set(lengths(path).values()) == {NEW}
    assert not list(path.parent.glob("*.changes"))


def test_a_kill_while_it_is_completed(marked: Disk) -> None:
    """Wrong if changes that are made for the second time gave anything else."""
    content = {one.name: one.read_bytes() for one in marked.folder.iterdir()}
    again = Disk(marked.path)
    with again.watched():
        complete_append(str(marked.path))
    whole = marked.path.read_bytes()
    for n in range(len(again.events)):
        marked.put(content | {"x.h5": again.after(range(n))["x.h5"]})
        assert complete_append(str(marked.path)) == (n < len(again.events) - 1)  # the last event removes the file of changes
        assert marked.path.read_bytes() == whole


def test_two_processes_complete_it(marked: Disk) -> None:
    """Wrong if both wrote at once: one that wakes up late would change a file that has grown again meanwhile."""
    children = []
    for _ in range(3):
        children.append(forked())
        if not children[-1]:
            os._exit(0 if complete_append(str(marked.path)) else 1)
    for child in children:
        os.waitpid(child, 0)
    assert set(lengths(marked.path).values()) == {NEW} and not complete_append(str(marked.path))


def test_one_that_is_not_killed_is_waited_for(marked: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a reader wrote while the append itself does."""
    monkeypatch.setattr("shardload.storage.changes._WAIT_SECONDS", 0.2)
    (changes,) = marked.folder.glob("*.changes")
    data = marked.path.read_bytes()
    with changes.open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SourceError, match="is being changed by an append"):
            complete_append(str(marked.path))
    assert marked.path.read_bytes() == data


def test_changes_that_are_gone_damaged_or_not_allowed(marked: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the error did not name the file that is needed, and what to type; or if half of the changes were made."""
    (changes,) = marked.folder.glob("*.changes")
    data, content = marked.path.read_bytes(), changes.read_bytes()
    before, (line, new) = content[:_BEFORE_NBYTES], content[_BEFORE_NBYTES:].split(b"\n", 1)
    header = json.loads(line)
    places: Any
    for places in ([[1e400, 8]], [[-8, len(new)]], [[0, len(new) + 1]], [[0, 2 * len(new)], [8, -len(new)]], "nested"):
        text = b"[" * 100_000 if places == "nested" else json.dumps(header | {"places": places}).encode()
        changes.write_bytes(before + text + b"\n" + new)
        with pytest.raises(SourceError, match="changes' is damaged"):
            complete_append(str(marked.path))
    changes.write_bytes(content[:-1] + b"?")
    with pytest.raises(SourceError, match="changes' is damaged"):
        complete_append(str(marked.path))
    changes.write_bytes(content)
    marked.path.write_bytes(data[: max(offset for offset, _ in header["places"])])
    with pytest.raises(SourceError, match=r"changes end at byte \d+: it was cut"):
        complete_append(str(marked.path))
    marked.path.write_bytes(data)
    changes.unlink()
    with pytest.raises(SourceError, match=r"x\.h5\.[0-9a-f]{16}\.changes.*shardload info"):
        format_of(str(marked.path))
    changes.write_bytes(content)
    opened = os.open

    def refuses(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags, *more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuses)
        with pytest.raises(SourceError, match=r"Permission denied.*Who may write to both types: shardload info"):
            complete_append(str(marked.path))
    assert marked.path.read_bytes() == data
    assert complete_append(str(marked.path)) and set(lengths(marked.path).values()) == {NEW}


@pytest.mark.parametrize("what", ["load", "append"])
def test_changes_that_were_made_and_cannot_be_removed(marked: Disk, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Wrong if a load were an error, or an append promised its rows to the next load, though the file is whole."""
    if what == "append":
        marked.put({"x.h5": marked.before})
    unlink = os.unlink

    def refuses(path: Any, **how: Any) -> None:
        if str(path).endswith(".changes"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        unlink(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuses)
        if what == "append":
            grow(marked.path, VALUES)
        else:
            assert format_of(str(marked.path)).name == "HDF5"
    assert set(lengths(marked.path).values()) == {NEW}
    (left,) = marked.folder.glob("*.changes")
    assert f"rm {left}" in str(find_leftover(str(left)))


def test_a_file_that_begins_like_a_mark(tmp_path: Path) -> None:
    """Wrong if its text led to another folder."""
    path = tmp_path / "x.h5"
    for told in (b"", b"is in '../x.0123456789abcdef.changes' beside it.", b"is in 'x.h5' beside it."):
        path.write_bytes(b"shardload append\n" + told)
        assert not complete_append(str(path))


# --- kinds of files


INDEXES: dict[str, dict[str, Any]] = {
    "fixed array": {"maxshape": (40, 6, 7)},
    "fixed array, filtered": {"maxshape": (40, 6, 7), "compression": "gzip"},
    "extensible array": {"maxshape": (None, 6, 7)},
    "extensible array, filtered": {"maxshape": (None, 6, 7), "compression": "gzip", "fletcher32": True},
    "B-tree": {"maxshape": (None, 40, 7)},
    "B-tree, filtered": {"maxshape": (None, 40, None), "compression": "gzip"},
    "B-tree of two axes": {"maxshape": (None, None, 7)},
    "one chunk at first": {"maxshape": (10, 6, 7), "chunks": (5, 6, 7)},
}


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_every_index_of_chunks(tmp_path: Path, index: str, libver: Any) -> None:
    """Wrong if a chunk were lost or mixed up in one of HDF5's indexes, as a file grows again and again along each axis."""
    path, axes = tmp_path / "x.h5", [0, 1] if (INDEXES[index]["maxshape"][1] or 40) > 6 else [0]
    values = flat((10, 13, 7), "float32")[:, : 13 if len(axes) > 1 else 6]
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("x", data=values[:5, :6], **({"chunks": (2, 4, 3)} | INDEXES[index]))
    shape = [5, 6, 7]
    for axis, n in ((0, 6), (1, 9), (0, 8), (0, 10), (1, 13)):
        if axis in axes:
            shape[axis] = n
            grow(path, {"/x": values[: shape[0], : shape[1]]}, axis, seed=n)
            np.testing.assert_array_equal(stored_in(path, "x"), values[: shape[0], : shape[1]])
    with h5py.File(path, "r+") as file:  # and HDF5 goes on
        file["x"][...] = -values[: shape[0], : shape[1]]
        file["x"].resize(7, 0)
    grow(path, {"/x": -values[:10, : shape[1]]})
    np.testing.assert_array_equal(stored_in(path, "x"), -values[:10, : shape[1]])


def test_a_file_that_is_shorter_than_its_first_write(tmp_path: Path) -> None:
    """Wrong if a chunk got its place among the first 512 bytes, which the end of an append writes as a whole: other values."""
    path, values = tmp_path / "x.h5", 1 + flat((8,), "int32")
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", (0,), "int32", chunks=(4,), maxshape=(10,))
    assert path.stat().st_size < 512
    for n in (5, 8):
        grow(path, {"/x": values[:n]})
        np.testing.assert_array_equal(stored_in(path, "x"), values[:n])


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
            values[f"/{name}"] = flat(tuple(whole), dtype)
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
    write_hdf5(path, {"x": flat((4, 8), dtype)}, chunks=(2, 8), maxshape=(None, 8), **filters)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"{told}.*--compression gzip"):
        grow(path, {"/x": flat((8, 8), dtype)})
    assert path.read_bytes() == before


def test_an_array_that_has_several_names(tmp_path: Path) -> None:
    """Wrong if only the first name were known, if arrays with one scale for strangers, or if a link led elsewhere."""
    path, time, rho = tmp_path / "x.h5", np.arange(7.0), flat((7, 3), "int16")
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
    with pytest.raises(ConfigError, match=r"'/a' and '/time' in .* are one array with two names"):
        read_file(str(path), ["/time", "/a"])
    grow(path, {"/time": time[:6], "/rho": rho[:6]})
    grow(path, {"/a": time, "/g/b": rho})
    with h5py.File(path) as file:
        for one, other, values in (("time", "a", time), ("rho", "g/b", rho)):
            assert file[one] == file[other]
            np.testing.assert_array_equal(file[one][...], values)


def test_bytes_in_the_other_byte_order(tmp_path: Path) -> None:
    """Wrong if integers of one byte were refused because a netCDF file with `endian="big"` says an order of them, too."""
    path, values = tmp_path / "x.nc", {"/u": flat((7, 3), "uint8"), "/i": flat((7, 3), "int8"), "/s": flat((7, 3), "int16")}
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
    values = flat((7, 6), "f4")
    for name, one in filters.items():
        for path in (tmp_path / f"{name}.h5", tmp_path / f"open-{name}.h5"):
            write_hdf5(path, {"x": values[:4]}, chunks=(3, 6), maxshape=(None, 6), **one)
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
        np.testing.assert_array_equal(stored_in(tmp_path / f"{name}.h5", "x"), values)


# --- what is refused, and what goes wrong


@pytest.mark.parametrize(
    ("of_file", "of_array", "words"),
    [
        ({"userblock_size": 512}, {}, "a user block"),
        ({"fs_strategy": "page", "libver": ("earliest", "v110")}, {}, "its space in pages"),
        ({"fs_strategy": "fsm", "fs_persist": True, "libver": ("earliest", "v110")}, {}, "a list of its free space"),
        ({}, {"setting": early}, "places for all of its chunks"),
        ({"libver": "latest"}, {"setting": plain_edges, "filters": [(1, 0, (4,))]}, "not filtered"),
        ({}, {"dtype": h5py.string_dtype()}, "append does not write"),
        ({}, {"dtype": np.dtype([("a", "f4"), ("b", "i2")])}, "append does not write"),
        ({}, {"compression": 307}, "307"),
    ],
)
def test_what_cannot_grow(tmp_path: Path, of_file: dict[str, Any], of_array: dict[str, Any], words: str) -> None:
    """Wrong if such a file were changed, or the error said neither what was found nor what to do."""
    path, most = tmp_path / "x.h5", (h5py.h5s.UNLIMITED, 3)
    with h5py.File(path, "w", **of_file) as file:
        if "setting" in of_array:
            raw_dataset(file, "x", h5py.h5t.NATIVE_FLOAT, (4, 3), chunks=(2, 3), most=most, **of_array)
        else:
            file.create_dataset("x", (4, 3), **({"maxshape": (None, 3), "chunks": (2, 3), "dtype": "f4"} | of_array))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=words) as found:
        read_file(str(path), ["/x"])
    assert any(word in str(found.value) for word in ("shardload copy", "append with h5py"))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_array_that_has_the_name_of_an_axis(tmp_path: Path) -> None:
    """Wrong if the netCDF dimension of that name, which has no chunks, were taken for the array, which has."""
    path, values = tmp_path / "x.nc", np.arange(12.0).reshape(2, 3, 2)
    with netCDF4.Dataset(path, "w") as file:
        for name, n in (("time", None), ("y", 3), ("x", 2)):
            file.createDimension(name, n)
        file.createVariable("x", "f8", ("time", "y", "x"))[:] = values[:1]
    with pytest.raises(ConfigError, match=r"'/x' .* axis without values.* stored as '/_nc4_non_coord_x'") as found:
        read_file(str(path), ["/x"])
    assert "chunks" not in str(found.value)
    grow(path, {"/_nc4_non_coord_x": values}, dimensions={"/time": 2})  # what is advised works
    with netCDF4.Dataset(path) as file:
        np.testing.assert_array_equal(file["x"][...], values)
    with pytest.raises(ConfigError, match=r"'/y' .* grows with the arrays that have it$"):
        read_file(str(path), ["/y"])


def test_another_program_has_it_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a file grew that somebody writes, or that HDF5 would not open for writing; or if a reader got metadata of which
    some are old and some new.
    """
    path = tmp_path / "x.h5"
    by_h5py(path)
    for mode in ("r", "r+"):
        sink = sink_of(path, VALUES)
        with h5py.File(path, mode), pytest.raises(ConfigError, match="is open in another program") as found:
            sink.create()
        assert "Close it" in str(found.value) and [one.name for one in tmp_path.iterdir()] == ["x.h5"]
    # While chunks are written others can read, and none can write. The end waits for them, but not for ever.
    monkeypatch.setattr("shardload.storage.changes._WAIT_SECONDS", 0.2)
    sink = sink_of(path, VALUES)
    with sink.create() as catalog:
        with h5py.File(path) as reader:
            with path.open("r+b") as other, pytest.raises(BlockingIOError):  # as HDF5 does it
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(sink, catalog, coming(sink, VALUES))
            catalog.finish()
            with pytest.raises(ConfigError, match=r"is still open there.*Nothing was appended"):
                catalog.commit()
            assert len(reader["time"]) == OLD
            np.testing.assert_array_equal(reader["g/rho"][...], VALUES["/g/rho"][:OLD])
        catalog.commit()
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
    with sink.create() as catalog:
        write_all(sink, catalog, coming(sink, VALUES))
        catalog.finish()
        fcntl.flock(catalog._file.descriptor, fcntl.LOCK_UN)  # type: ignore[attr-defined]  # a system without locks
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
        write_all(sink, catalog, coming(sink, VALUES))
        catalog.finish()
        at = path.read_bytes().index(OLD.to_bytes(8, "little") + b"\xff" * 8)  # the length of "time", in its header
        with path.open("r+b") as file:  # a program that changes one number, and nothing else
            file.seek(at)
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
        write_all(sink, catalog, coming(sink, VALUES))
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
    for is_early in (True, False):
        write_hdf5(other, {"much": flat((9000,), "f8")})
        data, sink = other.read_bytes(), sink_of(path, VALUES)
        with sink.create() as catalog:
            if is_early:
                os.replace(other, path)
                with pytest.raises(ConfigError, match="changed by somebody else"):
                    write_all(sink, catalog, coming(sink, VALUES))
            else:
                write_all(sink, catalog, coming(sink, VALUES))
                catalog.finish()
                os.replace(other, path)
                with pytest.raises(ConfigError, match="changed by somebody else"):
                    catalog.commit()
        assert path.read_bytes() == data and [one.name for one in tmp_path.iterdir()] == ["x.h5"]
        by_h5py(path)


def test_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if an error at any write left a lock, a longer file, or one that the next append cannot complete; or if the error
    promised rows to the next load where not even the mark was written.
    """
    path = tmp_path / "d" / "x.h5"
    path.parent.mkdir()
    right, n_marked = target.WritableFile.write_at, 0
    for fails_at in range(1, 200, 2 if IS_QUICK else 1):
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        by_h5py(path)
        before, n = path.read_bytes(), [0]

        def write_at(file: Any, data: Any, offset: int, fails_at: int = fails_at, n: list[int] = n) -> None:
            n[0] += 1
            if n[0] == fails_at:
                raise OSError(5, "no such luck")
            right(file, data, offset)

        with monkeypatch.context() as patch:
            patch.setattr(target.WritableFile, "write_at", write_at)
            try:
                grow(path, VALUES)
            except SourceError as error:
                told = str(error)
            else:
                break
        if path.read_bytes() == before:
            assert "EIO" in told and os.listdir(path.parent) == ["x.h5"]
            continue
        assert "All values are on disk" in told and f"shardload info {path}" in told
        if not h5py.is_hdf5(path):
            n_marked += 1
            assert read_file(str(path), [])["arrays"]["/time"]["shape"] == (NEW,)
        assert set(lengths(path).values()) == {NEW} and os.listdir(path.parent) == ["x.h5"]
    else:
        raise AssertionError("it never went well")
    assert n_marked > 2
    assert set(lengths(path).values()) == {NEW}


# --- wrong implementations, which are found before anything is changed


def _swapped(self: Any, *args: Any) -> Any:
    return _place(self, *args)[::-1]


def _shifted(self: Any, name: str, starts: Any, sizes: Any, masks: Any) -> Any:
    starts = np.array(starts)
    starts[:, 0] = starts[::-1, 0]
    return _place(self, name, starts, sizes, masks)


_place = LedgerSink.place


@pytest.mark.parametrize(
    ("holder", "name", "wrong", "error", "words"),
    [
        (LedgerSink, "place", _swapped, (SourceError, RuntimeError), "chunk|twice"),
        (LedgerSink, "place", _shifted, (SourceError, RuntimeError), "chunk|twice"),
        (Hdf5Growth, "_shorten", lambda self, file: None, ConfigError, "among old bytes"),
        (Hdf5Growth, "_give_end_back", lambda self: None, ConfigError, "among old bytes"),
        (Ledger, "changes", lambda self: [(0, os.pread(self.file.descriptor, 512, 0))], SourceError, "shape"),
    ],
)
@pytest.mark.parametrize("n_few", [0, 16])
def test_metadata_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, wrong: Any, error: Any, words: str, n_few: int
) -> None:
    """Wrong if what is written here were believed without having HDF5 read it, be there few new chunks or many."""
    monkeypatch.setattr(hdf5_sink, "FEW", n_few)
    path, values = tmp_path / "x.h5", flat((11, 40), "float32")
    with h5py.File(path, "w", libver="latest") as file:  # its last bytes are the chunk at the edge
        file.create_dataset("x", data=values[:5], chunks=(2, 40), maxshape=(None, 40), compression="gzip")
    before = path.read_bytes()
    monkeypatch.setattr(holder, name, wrong)
    with pytest.raises(error, match=words):
        grow(path, {"/x": values})
    assert path.read_bytes() == before


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_step_does_not_list_all_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libver: Any) -> None:
    """Wrong if each of many appends made a list of all chunks of the file: they would take the longer, the more there are."""
    path, values, starts = tmp_path / "x.h5", flat((101, 4), "float32"), list[int]()

    def list_chunks(dataset: Any, take: Any, *args: Any, **how: Any) -> None:
        def noting(rows: Any, *more: Any) -> None:
            starts.extend(rows[:, 0].tolist())
            take(rows, *more)

        hdf5_chunks.list_chunks(dataset, noting, *args, **how)

    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("x", data=values[:100], chunks=(1, 4), maxshape=(None, 4))
    monkeypatch.setattr(hdf5_sink, "list_chunks", list_chunks)
    grow(path, {"/x": values})
    assert starts == [100]
    np.testing.assert_array_equal(stored_in(path, "x"), values)


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
