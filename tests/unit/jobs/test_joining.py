"""`shardload.join`: what goes on from part to part, what must be the same, what is refused. Compared with h5py and xarray."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import xarray as xr

import shardload
from shardload import ConfigError, SourceError
from shardload.formats import lookup
from shardload.formats.access import Access
from shardload.formats.lookup import open_source
from shardload.jobs.copying.request import CopyRequest, describe, find
from shardload.planning.region import Region
from shardload.storage.leftovers import find_leftover
from shardload.values.dates import in_other_units
from tests.unit.cli import test_main as command
from tests.unit.files import raising, stored_in, write_hdf5

LENGTHS = (5, 7, 4)


@pytest.fixture
def snapshot(tmp_path: Path) -> list[str]:
    """A snapshot in three files, the values of which are their places in the whole."""
    first, paths = 0, []
    for k, n in enumerate(LENGTHS):
        paths.append(str(tmp_path / f"snap.{k}.h5"))
        with h5py.File(paths[-1], "w") as file:
            file.attrs["code"] = "x"
            header = file.create_group("Header")
            header.attrs["Time"], header.attrs["NumPart_ThisFile"] = 0.5, [n]
            file["dm/pos"] = np.arange(first * 3, (first + n) * 3, dtype="f4").reshape(n, 3)
            file.create_dataset("dm/id", data=np.arange(first, first + n, dtype=">u8"), chunks=(3,), compression="gzip")
            file["dm/pos"].attrs["unit"], file["dm/pos"].attrs["n"] = "kpc", n
            if k != 1:
                file["stars/mass"] = np.full(k + 1, k, dtype="f8")
                file["stars/age"] = np.full(k + 1, k, dtype="f4")
            file["table"] = 7
        first += n
    return paths


def refused(said: str, path: Any, parts: Any, error: type[Exception] = ConfigError, **options: Any) -> None:
    """The parts are not joined, and the error says why."""
    with pytest.raises(error, match=said):
        shardload.join(path, parts, **options)


def read(path: Any, name: str, start: tuple[int, ...], stop: tuple[int, ...], **access: Any) -> Any:
    """Values of a file, as a load reads them in both of its ways."""
    source, region = open_source(str(path), name, Access(**access)), Region(start, stop)
    values = np.empty(region.shape, source.dtype)
    source.read_into(region, values)
    np.testing.assert_array_equal(source.plain(region), values)
    source.close()
    return values


def climate(
    folder: Path, years: Sequence[int], units: str = "", lat: Sequence[float] = (10.0, 20, 30), scale: float = 0.5
) -> list[str]:
    """Monthly data, a file for each year, each of which counts from its own new year."""
    paths = []
    for year in years:
        paths.append(str(folder / f"y{year}.nc"))
        with netCDF4.Dataset(paths[-1], "w") as file:
            file.title, file.history = "monthly", f"made in {year}"
            for dim, n in (("time", None), ("lat", 3), ("lon", 4), ("nv", 2)):
                file.createDimension(dim, n)
            time = file.createVariable("time", "f8", ("time",))
            time.units, time.calendar, time.bounds = units or f"days since {year}-01-01", "noleap", "time_bnds"
            time[:] = np.arange(12) * 30
            file.createVariable("time_bnds", "f8", ("time", "nv"))[:] = np.stack(
                [np.arange(12) * 30, np.arange(12) * 30 + 30], 1
            )
            file.createVariable("lat", "f8", ("lat",))[:] = lat
            t2m = file.createVariable("t2m", "i2", ("time", "lat", "lon"), zlib=True, chunksizes=(1, 3, 4), fill_value=-9)
            t2m.scale_factor, t2m.units = np.float32(scale), "K"
            t2m.set_auto_maskandscale(False)
            t2m[:] = (np.arange(12 * 3 * 4) + 12 * 3 * 4 * (year - 2001)).reshape(12, 3, 4)
            file.createVariable("land", "i1", ("lat", "lon"))[:] = np.arange(12).reshape(3, 4)
    return paths


def test_a_snapshot_of_several_files(snapshot: list[str], tmp_path: Path) -> None:
    whole = str(tmp_path / "snap.h5")
    report = shardload.join(whole, snapshot)
    assert report.axis == 0 and not report.needs_external
    assert {row.name: (row.shape, row.how) for row in report.rows}["/stars/mass"] == ((4,), "in 2 of 3 parts")
    assert any("'NumPart_ThisFile'" in note for note in report.notes) and any("'n'" in note for note in report.notes)
    with h5py.File(whole) as file:
        np.testing.assert_array_equal(file["dm/pos"][...], np.arange(48, dtype="f4").reshape(16, 3))
        np.testing.assert_array_equal(file["dm/id"][...], np.arange(16))
        assert file["dm/id"].dtype == ">u8" and file["dm/id"].is_virtual
        np.testing.assert_array_equal(file["stars/mass"][...], [0, 2, 2, 2])
        assert file["table"][()] == 7 and not file["table"].is_virtual
        assert dict(file["Header"].attrs) == {"Time": 0.5} and dict(file.attrs) == {"code": "x"}
        assert dict(file["dm/pos"].attrs) == {"unit": "kpc"}
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in [*snapshot, whole]:
        shutil.move(path, moved)
    np.testing.assert_array_equal(read(moved / "snap.h5", "/dm/id", (3,), (12,)), np.arange(3, 12))


def test_progress(snapshot: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, int]] = []
    shardload.join(tmp_path / "a.h5", snapshot, progress=lambda *done: told.append(done))
    assert told == [(1, 3), (2, 3), (3, 3)]
    shardload.join(tmp_path / "b.h5", snapshot)
    assert capfd.readouterr().err == ""
    shardload.join(tmp_path / "c.h5", snapshot, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "c.h5" in err and "3/3" in err
    refused("progress is 'yes'", tmp_path / "d.h5", snapshot, progress="yes")


@pytest.mark.parametrize("suffix", [".nc", ".h5"])
def test_years_of_a_climate_model(tmp_path: Path, suffix: str) -> None:
    paths, whole = climate(tmp_path, (2001, 2002, 2003)), str(tmp_path / f"all{suffix}")
    report = shardload.join(whole, paths)
    assert report.axis == "time" and any("'history'" in note for note in report.notes)
    opened = [xr.open_dataset(path, engine="netcdf4", mask_and_scale=False).load() for path in paths]
    expected = xr.concat(opened, "time", data_vars="minimal", combine_attrs="drop_conflicts")
    for engine in ("netcdf4", "h5netcdf") if suffix == ".nc" else ("h5netcdf",):
        with xr.open_dataset(whole, engine=engine, mask_and_scale=False) as found:
            xr.testing.assert_equal(found.load().drop_attrs(), expected.drop_attrs())  # dates too
            assert found.t2m.attrs["scale_factor"] == np.float32(0.5) and found.attrs == {"title": "monthly"}
            assert found.t2m.dtype == np.int16
    with h5py.File(whole) as file:
        np.testing.assert_array_equal(file["time"][[0, 12, 35]], [0, 365, 730 + 330])
        assert [file[name].is_virtual for name in ("t2m", "time", "time_bnds", "land", "lat")] == [True, *[False] * 4]
    edit(whole, lambda file: file["time"].attrs.update(list=np.arange(9000)))  # as a scale that many arrays have
    info = shardload.open(whole)["t2m"]
    assert info.dims == ("time", "lat", "lon") and info.chunks == (1, 3, 4)
    np.testing.assert_array_equal(info.coords["time"].values, np.concatenate([np.arange(12) * 30 + 365 * k for k in range(3)]))


def test_a_large_array_that_is_the_same_in_all_parts_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardload.jobs.joining.parts._STORED_NBYTES", 8)
    monkeypatch.setattr("shardload.jobs.joining.parts._AT_ONCE_NBYTES", 8)
    paths, whole = climate(tmp_path, (2001, 2002)), str(tmp_path / "all.nc")
    shardload.join(whole, paths)
    with h5py.File(whole) as file:
        assert file["land"].is_virtual and len(file["land"].virtual_sources()) == 1
        np.testing.assert_array_equal(file["land"][...], np.arange(12).reshape(3, 4))
    with h5py.File(paths[1], "r+") as file:
        file["land"][2, 3] = 0  # the last element
    refused(r"the value of '/land' differs: one in .*y2001\.nc', another in .*y2002", str(tmp_path / "other.nc"), paths)


def test_a_part_is_compared_in_one_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a part were opened for each array that must be the same in all: file servers take longest for that."""
    paths, opened = climate(tmp_path, (2001, 2002, 2003)), list[str]()
    for path in paths:
        edit(path, lambda file: file.update({f"same{k}": np.arange(4.0) for k in range(5)}))

    open_checked = lookup._CheckedFile

    def noting(path: str, *args: Any) -> Any:
        opened.append(path)
        return open_checked(path, *args)

    monkeypatch.setattr(lookup, "_CheckedFile", noting)
    monkeypatch.setattr("shardload.jobs.joining.parts._STORED_NBYTES", 0)
    shardload.concat(paths, "time", dataset=["t2m", *(f"same{k}" for k in range(5))])
    assert sorted(set(opened)) == sorted(paths) and len(opened) <= 3 * len(paths)


def test_steps_become_a_new_axis(tmp_path: Path) -> None:
    """A file for each output of a simulation, none of which has the axis of time."""
    paths, whole, opened = [], str(tmp_path / "steps.nc"), []
    for k in range(3):
        paths.append(str(tmp_path / f"step{k}.nc"))
        rho = (("z", "x"), np.arange(8, dtype="f4").reshape(2, 4) + 8 * k, {"units": "g", "step": k})
        coords = {"x": [1.0, 2, 3, 4], "t": ((), 0.5 * k, {"units": "s"})}
        opened.append(xr.Dataset({"rho": rho, "n": ((), np.int32(k))}, coords))
        opened[-1].to_netcdf(paths[-1], engine="netcdf4")
    report = shardload.join(whole, paths, stack="t")
    assert report.axis == "t" and {row.name: row.shape for row in report.rows}["/rho"] == (3, 2, 4)
    expected = xr.concat(opened, "t", combine_attrs="drop_conflicts")
    for engine in ("netcdf4", "h5netcdf"):
        with xr.open_dataset(whole, engine=engine) as found:
            xr.testing.assert_equal(found.load(), expected)
            assert found.rho.dims == ("t", "z", "x") and found.rho.attrs == {"units": "g"} and found.t.attrs == {"units": "s"}
    with h5py.File(whole) as file:
        assert [file[name].is_virtual for name in ("rho", "n", "t", "x")] == [True, False, False, False]
    np.testing.assert_array_equal(read(whole, "/rho", (1, 1, 0), (3, 2, 4)), expected.rho[1:, 1:])
    for change, said in (
        ({"stack": "x"}, r"stack is 'x', but '/rho' has an axis of that name.*Pass axis='x' in its place"),
        ({"stack": "t", "axis": "x"}, r"axis is 'x' and stack 't'\. Pass one"),
        ({"stack": 0}, "stack is 0; expected the name of the new axis"),
    ):
        refused(said, str(tmp_path / "no.nc"), paths, **change)
    refused(r"'/t' does not go on from part to part", str(tmp_path / "no.nc"), [paths[0], paths[2], paths[1]], stack="t")
    (opened[1].isel(x=slice(3))).to_netcdf(paths[1], engine="netcdf4")
    refused(
        r"the shape of '/rho' differs: \(2, 4\) in .*step0.*, \(2, 3\) in .*step1.* may not differ: ",
        str(tmp_path / "no.nc"),
        paths,
        stack="t",
    )


def test_coordinates_of_axes_of_a_group_above_are_not_stacked(tmp_path: Path) -> None:
    """Wrong if only what HDF5 calls a scale were a coordinate: that of an axis of another group is none."""
    paths = [str(tmp_path / "a.nc"), str(tmp_path / "b.nc")]
    for k, path in enumerate(paths):
        with netCDF4.Dataset(path, "w") as file:
            file.createDimension("lat", 3)
            group = file.createGroup("g")
            group.createVariable("lat", "f4", ("lat",))[:] = np.arange(3)
            group.createVariable("x", "f4", ("lat",))[:] = np.arange(3) + 10 * k
    shardload.join(tmp_path / "whole.nc", paths, stack="step")
    with netCDF4.Dataset(tmp_path / "whole.nc") as file:
        assert file["g/lat"].dimensions == ("lat",) and file["g/x"].dimensions == ("step", "lat")
        np.testing.assert_array_equal(file["g/lat"][:], np.arange(3))
        np.testing.assert_array_equal(file["g/x"][:], [[0, 1, 2], [10, 11, 12]])


def test_the_netcdf_library_does_not_read_lzf(tmp_path: Path) -> None:
    """Wrong if a netCDF file were made of which the netCDF library, which lacks h5py's filter, reads no values."""
    paths = [str(tmp_path / "a.h5"), str(tmp_path / "b.h5")]
    for path, compression in zip(paths, (None, "lzf"), strict=True):
        write_hdf5(path, {"x": np.arange(4.0)}, chunks=(2,), compression=compression)
    refused(r"'/x' by lzf.*suffix \.h5", tmp_path / "whole.nc", paths)
    shardload.join(tmp_path / "whole.h5", paths)
    assert sorted(os.listdir(tmp_path)) == ["a.h5", "b.h5", "whole.h5"]


def test_names_with_percent_signs_and_parts_elsewhere(snapshot: list[str], tmp_path: Path) -> None:
    """HDF5 takes ``%b`` in a name for the number of a block."""
    paths = [str(Path(path).rename(tmp_path / f"100%b {k}.h5")) for k, path in enumerate(snapshot)]
    for path in paths:
        edit(path, lambda file: file.move("dm/pos", "dm/50%"))
    folder = tmp_path / "below"
    folder.mkdir()
    whole = str(folder / "whole%.h5")
    report = shardload.join(whole, paths, dataset="dm/*", axis=0)
    assert report.needs_external and "allow_external=True" in str(report)
    np.testing.assert_array_equal(stored_in(whole, "dm/50%"), np.arange(48, dtype="f4").reshape(16, 3))
    values = read(whole, "/dm/50%", (4, 0), (6, 3), allow_external=True)
    np.testing.assert_array_equal(values, np.arange(12, 18).reshape(2, 3))


def edit(path: str, change: Callable[[h5py.File], None]) -> None:
    with h5py.File(path, "r+") as file:
        change(file)


def replaced(name: str, values: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = values

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.__delitem__("dm/id"), r"'/dm/id' is not in '.*snap\.1\.h5', which has '/dm/pos'.*row by row"),
        (
            replaced("dm/pos", np.zeros((7, 2), "f4")),
            r"the shape of '/dm/pos' differs: \(5, 3\) in '.*0\.h5', \(7, 2\) in '.*1\.h5'\. They may differ along axis 0",
        ),
        (replaced("dm/pos", np.zeros((7, 3), "f8")), r"the type of '/dm/pos' differs: float32 in .* float64 in '.*1\.h5'"),
        (replaced("dm/id", np.zeros(7, "<u8")), r"the type of '/dm/id' differs: >u8 in .*, uint64 in"),
        (
            replaced("table", 8),
            r"the value of '/table' differs: one in .*, another in .*\. It does not have an axis 0",
        ),
        (replaced("table", [8]), r"the number of axes of '/table' differs: 0 in .*, 1 in"),
        (
            lambda file: file["dm/id"].attrs.update(scale_factor=2.0),
            "'scale_factor' of '/dm/id' differs: None in .*, .*2.0.* in",
        ),
        (lambda file: file["dm/id"].attrs.update(units="m"), "the attribute 'units' of '/dm/id' differs"),
        (
            lambda file: file["dm/pos"].attrs.update(unit="Mpc"),
            "the attribute 'unit' of '/dm/pos' differs: 'kpc' in .*'Mpc' in",
        ),
        (lambda file: file["dm/id"].attrs.update(flag_meanings="a b"), "the attribute 'flag_meanings' of '/dm/id' differs"),
    ],
)
def test_what_does_not_belong_together(
    snapshot: list[str], tmp_path: Path, change: Callable[[h5py.File], None], said: str
) -> None:
    edit(snapshot[1], change)
    refused(said, str(tmp_path / "whole.h5"), snapshot)
    assert sorted(os.listdir(tmp_path)) == sorted(map(os.path.basename, snapshot))


def test_what_a_climate_model_may_not_change(tmp_path: Path) -> None:
    whole = str(tmp_path / "all.nc")
    first, second = climate(tmp_path, (2001, 2002))
    climate(tmp_path, (2002,), scale=0.25)
    refused(r"the attribute 'scale_factor' of '/t2m' differs: .*0\.5.* in '.*2001.*0\.25.* in '.*2002", whole, [first, second])
    climate(tmp_path, (2002,), lat=[10.0, 20, 31])
    said = r"the value of '/lat' differs: one in '.*2001.*', another in '.*2002.*', so which are right\? Name the arrays"
    refused(said, whole, [first, second])
    climate(tmp_path, (2002,), units="months since 2002-01-01")
    refused(r"differs: 'days since 2001-01-01' in .*, 'months since 2002-01-01' in .*2002.*because", whole, [first, second])
    climate(tmp_path, (2002,))
    edit(second, lambda file: file.move("t2m", "T2M"))
    refused(
        r"'/t2m' is not in '.*2002.*', which has '/time'.*, and '/T2M', which no other part has: joined", whole, [first, second]
    )


def netcdf(path: Path, unlimited: int | None = None, **variables: tuple[tuple[str, ...], Any, Mapping[str, Any]]) -> str:
    """A file with the dimensions time, level and nv; a value of each variable's attributes with the name fill is its own."""
    with netCDF4.Dataset(str(path), "w") as file:
        for dim, n in (("time", unlimited), ("level", 3), ("nv", 2)):
            file.createDimension(dim, n)
        for name, (dims, values, attrs) in variables.items():
            one = file.createVariable(name, np.asarray(values).dtype, dims, fill_value=attrs.get("fill"))
            one.setncatts({key: value for key, value in attrs.items() if key != "fill"})
            one[: len(values)] = values
    return str(path)


def test_what_is_no_time_is_not_counted(tmp_path: Path) -> None:
    """Marks of missing times stay; bounds with units of their own are counted by these."""
    whole = str(tmp_path / "whole.nc")

    def parts(values: Any, bounds: Callable[[int], Mapping[str, Any]] = lambda _: {}, **attrs: Any) -> list[str]:
        return [
            netcdf(
                tmp_path / f"p{k}.nc",
                3,
                time=(("time",), values, {"units": f"days since {2001 + k}-01-01", "bounds": "b", **attrs}),
                b=(("time", "nv"), np.arange(6.0).reshape(3, 2) + (365 * k if bounds(k) else 0), bounds(k)),
            )
            for k in range(2)
        ]

    def times() -> tuple[list[Any], list[Any]]:
        return stored_in(whole, "time").tolist(), stored_in(whole, "b")[:, 0].tolist()

    shardload.join(whole, parts([0.0, 10, 20], fill=np.nan), axis="time")
    assert times() == ([0, 10, 20, 365, 375, 385], [0, 2, 4, 365, 367, 369])
    first, without = parts([0.0, 10, 20], fill=np.nan)
    edit(without, lambda file: file["time"].attrs.__delitem__("_FillValue"))  # of another writer: NaN is NaN all the same
    shardload.join(whole, [first, without], axis="time", mode="w")
    assert times()[0] == [0, 10, 20, 365, 375, 385]
    shardload.join(whole, parts(np.array([0, -9, 20], "i4"), fill=-9), axis="time", mode="w")
    assert times()[0] == [0, -9, 20, 365, -9, 385]
    shardload.join(whole, parts(np.array([0, 10], "i4")), axis="time", mode="w")  # the last was never written
    assert times()[0] == [0, 10, -(2**31) + 1, 365, 375, -(2**31) + 1]
    os.remove(whole)
    shardload.join(whole, parts([0.0, 10, 20], lambda _: {"units": "days since 2001-01-01"}), axis="time")
    assert times() == ([0, 10, 20, 365, 375, 385], [0, 2, 4, 365, 367, 369])
    refused("and is packed", whole, parts([0.0, 10, 20], scale_factor=2.0), axis="time", mode="w")


def test_bounds_that_only_some_parts_name(tmp_path: Path) -> None:
    """Wrong if only the first part's word counted: the bounds of the second would be those of the first's days."""
    paths = [
        netcdf(
            tmp_path / f"p{k}.nc",
            time=(("time",), [0.0, 10], {"units": f"days since {2001 + k}-01-01"} | ({"bounds": "b"} if k else {})),
            b=(("time", "nv"), [[0.0, 10], [10, 20]], {}),
        )
        for k in range(2)
    ]
    shardload.join(tmp_path / "whole.nc", paths, axis="time")
    whole = tmp_path / "whole.nc"
    assert stored_in(whole, "b")[:, 0].tolist() == stored_in(whole, "time").tolist() == [0, 10, 365, 375]


def test_whole_numbers_of_64_bits_are_compared_exactly(tmp_path: Path) -> None:
    """Nanoseconds since 1970: as floating point numbers, steps of 10 are none."""
    units = {"units": "nanoseconds since 1970-01-01"}
    paths = [
        netcdf(tmp_path / f"p{k}.nc", time=(("time",), 1_700_000_000_000_000_000 + 40 * n + 10 * np.arange(4), units))
        for k, n in enumerate((0, 1, 0))
    ]
    shardload.join(str(tmp_path / "whole.nc"), paths[:2])
    refused(r"ends with 1700000000000000070, and .* begins with 1700000000000000000", str(tmp_path / "other.nc"), paths[1:])


def test_files_that_have_no_array_in_common(snapshot: list[str], tmp_path: Path) -> None:
    """Wrong if they became one file with the arrays of both, each from one part."""
    other = write_hdf5(tmp_path / "other.h5", {"gas/rho": np.arange(6.0)})
    refused(
        r"no array is in two of the parts.*'/dm/pos' in '.*snap.0.h5'.*'/gas/rho' in '.*other",
        str(tmp_path / "all.h5"),
        [snapshot[0], other],
    )
    assert not (tmp_path / "all.h5").exists()


def test_a_part_that_leads_to_the_new_file(snapshot: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would consist of itself."""
    first, second = str(tmp_path / "first.h5"), str(tmp_path / "second.h5")
    shardload.join(first, snapshot[:2], dataset="dm/*")
    shardload.join(second, [first, snapshot[2]], dataset="dm/*")
    np.testing.assert_array_equal(stored_in(second, "dm/id"), np.arange(16))
    before = Path(first).read_bytes()
    refused(
        r"first\.h5' is the new file, and the parts of '/dm/(id|pos)' lead to it",
        first,
        [second, snapshot[2]],
        dataset="dm/*",
        mode="w",
    )
    assert Path(first).read_bytes() == before
    (tmp_path / "else").mkdir()
    shutil.copy(snapshot[0], tmp_path / "else" / "snap.0.h5")
    monkeypatch.setenv("HDF5_VDS_PREFIX", str(tmp_path / "else"))
    refused(
        r"part 'snap\.0\.h5', of shape \(5,.*\), is not where .* HDF5_VDS_PREFIX",
        str(tmp_path / "third.h5"),
        snapshot,
        error=SourceError,
        dataset="dm/*",
    )


def test_a_link_in_place_of_the_new_file(snapshot: list[str], tmp_path: Path) -> None:
    """What it leads to is replaced, and names its parts from there."""
    (tmp_path / "else").mkdir()
    shardload.join(str(tmp_path / "else" / "whole.h5"), snapshot)
    os.symlink("else/whole.h5", tmp_path / "whole.h5")
    assert shardload.join(str(tmp_path / "whole.h5"), snapshot, mode="w").needs_external
    for path in ("whole.h5", "else/whole.h5"):
        np.testing.assert_array_equal(stored_in(tmp_path / path, "dm/id"), np.arange(16))


def test_the_first_part_may_have_no_stars(snapshot: list[str], tmp_path: Path) -> None:
    edit(snapshot[0], lambda file: file.__delitem__("stars"))
    shardload.join(str(tmp_path / "whole.h5"), snapshot, dataset="stars/*")
    np.testing.assert_array_equal(stored_in(tmp_path / "whole.h5", "stars/mass"), [2, 2, 2])
    refused("holds no arrays below '/gas'", str(tmp_path / "other.h5"), snapshot, dataset="gas/*")


def test_times_are_counted_exactly() -> None:
    days = {"units": "days since 2000-01-01", "calendar": "standard"}
    hours = {"units": "hours since 2001-01-01 06:00", "calendar": "gregorian"}
    np.testing.assert_array_equal(in_other_units(np.array([18, 42], "i4"), hours, days), [367, 368])
    np.testing.assert_array_equal(in_other_units(np.array([0.0, np.nan]), hours, days), [366.25, np.nan])
    with pytest.raises(ValueError, match=r"2001-01-01T06:00:00 is 366\.25 in these units, which int32 does not have"):
        in_other_units(np.array([0], "i4"), hours, days)
    with pytest.raises(ValueError, match="rounded by more than a millisecond, as float32"):
        in_other_units(np.array([0.1], "f4"), days, {"units": "days since 1900-01-01"})
    with pytest.raises(ValueError, match="'noleap', the other of 'standard'"):
        in_other_units(np.array([1.0]), {**days, "calendar": "noleap"}, days)


def test_what_to_pass(snapshot: list[str], tmp_path: Path) -> None:
    whole = str(tmp_path / "whole.h5")
    years = climate(tmp_path, (2001, 2002))

    def wrong(said: str, parts: Any = snapshot, path: Any = whole, **given: Any) -> None:
        refused(said, path, parts, **given)

    wrong(r"no file matches 'nap\.\*\.h5' .*Pass another pattern, or a list", "nap.*.h5")
    for url in ("s3://bucket/a.h5", "s3://bucket/*.h5"):  # not looked for in the working folder
        wrong(r"'s3://bucket/.\.h5' is a URL, and the parts of a file are files in folders. shardload.concat takes URLs", url)
    wrong("parts is empty", [])
    wrong("parts is 5; expected the paths", [5])
    wrong(r"path is \['a.nc'\]; expected the name of the new file, .* before the parts", "whole.nc", ["a.nc"])
    wrong("dataset is 5; expected the name of an array", dataset=5)
    wrong("'x.zarr' would be an HDF5 file", path="x.zarr")
    wrong("is among the parts twice", [*snapshot, snapshot[0]])
    wrong("is the new file, and one of the parts", path=snapshot[1], mode="w")
    wrong("names an array; pass dataset='/dm/id'", [f"{snapshot[0]}:/dm/id"])
    wrong("axis is 'time', which no array has; there are: none with a name. Pass its number", axis="time")
    wrong(r"no array of '.*' has an axis 2: '/dm/id' \(5,\)", axis=np.int64(2))
    wrong("axis is -1; expected the name of an axis, or its number from 0 on", axis=-1)
    wrong(r"axis is True; expected", axis=True)
    wrong(r"axis is 'tiem', which no array has; there are: .*'time'", years, axis="tiem")
    wrong(r"axis is 0, but the axes have names", years, axis=0)
    wrong("mode is 'x'", mode="x")
    times = np.arange(2.0)
    square = [
        netcdf(tmp_path / f"s{k}.nc", time=(("time",), times + 2 * k, {}), x=(("time", "time"), np.eye(2), {})) for k in (0, 1)
    ]
    wrong(r"'/x' has the axis 'time' twice", square)
    fixed = netcdf(tmp_path / "fixed.nc", 2, x=(("time",), times, {}))
    wrong("along which axis do the parts follow each other.* one of 'time' .there are none that can grow", [fixed])
    refused("there is no file", whole, [str(tmp_path / "snap.9.h5")], error=SourceError)
    ten = [shutil.copy(snapshot[0], str(tmp_path / f"ten.{k}.h5")) for k in (0, 1, 10, 2)]
    wrong(r"not of their numbers: '.*ten\.10\.h5' comes before '.*ten\.2\.h5'", ten)
    assert not os.path.exists(whole)


def test_no_values_are_lost(snapshot: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = str(tmp_path / "whole.h5")
    shardload.join(whole, snapshot)
    refused(r"exists, and mode is 'w-'", whole, snapshot)
    shardload.join(whole, snapshot[:2], mode="w")
    assert stored_in(whole, "dm/id").shape == (12,)
    said = r"snap\.2\.h5' exists, and has values of '/dm/(id|pos)' itself"
    for mode in ("w", "w-"):  # not that mode='w' would help, where the new name was forgotten
        refused(f"{said}: is it one of the parts", snapshot[2], snapshot[:2], mode=mode)

    (tmp_path / "text.h5").write_text("text")
    for mode in ("w", "w-"):
        refused(
            r"text\.h5' exists, and cannot be read .* is not replaced\. Choose another name",
            tmp_path / "text.h5",
            snapshot,
            mode=mode,
        )
    (tmp_path / "text.h5").unlink()

    before = Path(whole).read_bytes()
    monkeypatch.setattr("shardload.storage.target.WritableFile.write_at", raising(OSError(28, "no space")))
    refused("no space is left", whole, snapshot, error=SourceError, mode="w")
    assert Path(whole).read_bytes() == before and len(os.listdir(tmp_path)) == 4


def test_a_temporary_is_recognised(snapshot: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A join that was killed leaves what says of itself what it is, until all of it is written."""
    from shardload.storage.target import WritableFile

    seen, write_at = [], WritableFile.write_at

    def look(file: WritableFile, data: Any, offset: int) -> None:
        write_at(file, data, offset)
        path = next(str(one) for one in tmp_path.iterdir() if one.name.endswith(".unfinished"))
        found = find_leftover(path)
        seen.append(None if found is None else found.is_whole)

    monkeypatch.setattr(WritableFile, "write_at", look)
    shardload.join(str(tmp_path / "whole.h5"), snapshot)
    assert not any(seen[:-1]) and seen[-1]


def test_a_part_that_changes_meanwhile(tmp_path: Path) -> None:
    """Wrong if the time that the new file stores were that of the old part, beside values of the new one."""
    parts = climate(tmp_path, (2001, 2002))
    for part in parts:
        os.utime(part, ns=(0, 0))
    kept = sorted(os.listdir(tmp_path))

    def change(n_done: int, n_parts: int) -> None:
        if n_done == n_parts:
            edit(parts[0], lambda file: file["t2m"].write_direct(np.zeros((12, 3, 4), "i2")))

    refused(
        r"2001.*' has changed while it was joined, or was replaced\. .* was not made",
        tmp_path / "all.nc",
        parts,
        error=SourceError,
        axis="time",
        progress=change,
    )
    assert sorted(os.listdir(tmp_path)) == kept
    shardload.join(tmp_path / "all.nc", parts, axis="time")


def test_what_is_joined_does_not_grow(tmp_path: Path) -> None:
    paths, whole = climate(tmp_path, (2001, 2002)), str(tmp_path / "all.nc")
    shardload.join(whole, paths)
    with pytest.raises(ConfigError, match=r"'/t2m' in .* is virtual.*Append to the last part, and join the parts anew"):
        shardload.append(whole, {"t2m": np.zeros((1, 3, 4), "i2"), "time": np.array([730.0])}, dim="time")


def test_a_copy_does_not_go_on_with_other_parts(snapshot: list[str], tmp_path: Path) -> None:
    whole = str(tmp_path / "whole.h5")
    shardload.join(whole, snapshot)
    request = CopyRequest.check(whole, tmp_path / "out.h5")

    def about() -> dict[str, str]:
        found, groups, _ = find(request)
        return describe(request, found, groups)

    before = about()
    assert about() == before
    os.utime(snapshot[1], (1, 1))
    changed = {key for key, text in about().items() if text != before[key]}  # there are no stars in that part
    assert changed == {f"the digest of sizes and times of the parts of '{name}'" for name in ("/dm/id", "/dm/pos")}


def test_a_part_that_is_gone_is_an_error(snapshot: list[str], tmp_path: Path) -> None:
    """HDF5 gives fill values in its place."""
    whole = str(tmp_path / "whole.h5")
    shardload.join(whole, snapshot)
    os.remove(snapshot[1])
    with pytest.raises(SourceError, match=r"snap\.1\.h5"):
        open_source(whole, "/dm/id")


def test_the_command(snapshot: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = str(tmp_path / "whole.h5")
    code, printed, said = command.run("join", *snapshot, whole, "--axis", "0", "--dataset", "dm/*")
    assert code == 0, said
    assert f"joined 3 files along axis 0: '{whole}'" in command.unwrapped(printed) and "(16, 3)" in printed
    assert "'NumPart_ThisFile'" in command.unwrapped(printed) and not said
    assert max(map(len, printed.splitlines())) <= 80 or len(str(tmp_path)) > 40
    assert "in 3 parts" in command.unwrapped(command.ok("info", whole))
    assert "Pass --mode w to replace it" in command.refused("join", *snapshot, whole)
    assert json.loads(command.ok("join", *snapshot, whole, "--mode", "w", "--json"))["rows"][0]["shape"] == [16]
    years = climate(tmp_path, (2001, 2002))
    assert "one of 'lat'" in command.refused("join", *years, str(tmp_path / "y.nc"), "--axis", "0")
    code, _, said = command.run("join", whole)
    assert code == 2 and "then the new file" in command.unwrapped(said)
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert command.run("join", *snapshot, str(tmp_path / "never.h5")) == (0, "", "")
    assert not (tmp_path / "never.h5").exists()


def test_what_belongs_to_an_array_is_joined_with_it(tmp_path: Path) -> None:
    """Wrong if parts in another order, or on another grid, were joined because only one array was named, or if that array lost
    its coordinates, their bounds, or its projection.
    """
    paths = climate(tmp_path, (2001, 2002))
    for year, path in enumerate(paths):
        with netCDF4.Dataset(path, "a") as file:
            crs = file.createVariable("crs", "S1")
            crs.spatial_ref, crs.history = "PROJCS[...]", f"of {year}"
            file["t2m"].grid_mapping = "crs"
            file["t2m"].ancillary_variables = "code"
            file.createVariable("code", str, ("lat",))[:] = np.array([f"a{year}", "b", "c"], object)
    whole = tmp_path / "t2m.nc"
    refused(r"'/time' does not go on from part to part", whole, paths[::-1], dataset="t2m")
    (tmp_path / "flipped").mkdir()
    flipped = climate(tmp_path / "flipped", (2002,), lat=[30.0, 20, 10])
    refused(r"the value of '/lat' differs: .* belongs to what is", whole, [paths[0], *flipped], dataset="t2m")
    with pytest.warns(shardload.LeftOutWarning, match="'/code' was left out: it is text, and differs from part to part"):
        report = shardload.join(whole, paths, dataset="t2m")
    assert "attributes of '/crs' that differ from part to part were left out: 'history'" in report.notes
    with netCDF4.Dataset(whole) as file:
        assert set(file.variables) == {"t2m", "time", "time_bnds", "lat", "crs"} and file["crs"].spatial_ref == "PROJCS[...]"
        np.testing.assert_array_equal(file["lat"][:], [10, 20, 30])
        np.testing.assert_array_equal(file["time_bnds"][12], [365, 395])
        np.testing.assert_array_equal(file["t2m"][:], [step for path in paths for step in netCDF4.Dataset(path)["t2m"][:]])


@pytest.mark.parametrize("suffix", [".nc", ".h5"])
def test_booleans_and_coordinates_of_other_groups(tmp_path: Path, suffix: str) -> None:
    """Wrong if booleans had other values, or if what can be selected by coordinate in the parts cannot be in the new file."""
    wet, paths = np.arange(12).reshape(6, 2) % 3 > 0, [str(tmp_path / f"{k}.h5") for k in range(2)]
    for k, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file["scales/t"] = np.arange(3.0) + 3 * k
            file["scales/t"].make_scale("t")
            file["tasks/wet"] = wet[3 * k : 3 * k + 3]
            file["tasks/wet"].dims[0].attach_scale(file["scales/t"])
            file["mask"], file["soft"] = wet[:2], h5py.SoftLink("/mask")
    whole = tmp_path / f"whole{suffix}"
    with pytest.warns(shardload.LeftOutWarning, match="'/soft' was left out: it is a link"):
        shardload.join(whole, paths, axis="t")
    with h5py.File(whole) as file:
        np.testing.assert_array_equal(file["tasks/wet"][...].astype(bool), wet)
        np.testing.assert_array_equal(file["mask"][...].astype(bool), wet[:2])
        scales = [scale.name for scale in file["tasks/wet"].dims[0].values()]
    assert scales == (["/scales/t"] if suffix == ".h5" else ["/t"])
    np.testing.assert_array_equal(shardload.open(whole)["tasks/wet"].coords["t"].values, np.arange(6))
