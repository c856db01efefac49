"""``shardload copy`` in one process: what it prints, what it refuses, and that it needs no JAX."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import netCDF4
import numcodecs
import numpy as np
import pytest
import xarray as xr
import zarr

import shardload
from tests.unit.blocked import run_without
from tests.unit.cli.test_main import dated, ok, refused, run, unwrapped
from tests.unit.files import stored_in, write_hdf5

VALUES = np.arange(12 * 8 * 20, dtype="f4").reshape(12, 8, 20)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "in.h5"
    with h5py.File(path, "w") as opened:
        opened.create_dataset("rho", data=VALUES, chunks=(1, 8, 20), compression="gzip", shuffle=True)
        opened["whole"] = VALUES
        opened["words"] = ["a", "bc"]
    return str(path)


def test_it_prints_what_it_did(file: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.zarr")
    code, printed, said = run("copy", file, out, "--chunks", "5,3,7", "--compression", "zstd:9", "--verify", "full")
    assert code == 0, said
    assert " ".join(printed.split()).startswith(f"{out}: 2 arrays, 15.0 KiB (")
    assert "rank; 54 of 54 chunks read back, 54 decoded" in " ".join(printed.split())
    assert said == ""
    found = zarr.open_group(out, mode="r")
    assert found["words"][...].tolist() == ["a", "bc"]
    assert found["rho"].compressors[0].to_dict()["configuration"]["level"] == 9
    np.testing.assert_array_equal(found["rho"][...], VALUES)


def test_bounds_stay_as_their_coordinate_does(tmp_path: Path) -> None:
    """Wrong if `--dtype` rounded the ends of the intervals of a time that it leaves alone."""
    seconds, before, out = np.arange(4) * 86_401 + 978_393_601, tmp_path / "in.nc", tmp_path / "out.nc"
    with netCDF4.Dataset(before, "w") as opened:
        for name, n in (("time", None), ("bnds", 2), ("x", 3)):
            opened.createDimension(name, n)
        time = opened.createVariable("time", "i8", ("time",))
        time.units, time.bounds, time[:] = "seconds since 1970-01-01", "time_bnds", seconds
        opened.createVariable("time_bnds", "i8", ("time", "bnds"), chunksizes=(4, 2))[:] = seconds[:, None] + np.arange(2)
        opened.createVariable("t", "f8", ("time", "x"))[:] = 0.1
    code, _, said = run("copy", str(before), str(out), "--dtype", "float32", "--chunks", "2,1", "--select", "time=1:")
    assert (code, said) == (0, "")
    with h5py.File(out) as opened:
        np.testing.assert_array_equal(opened["time_bnds"][...], seconds[1:, None] + np.arange(2), strict=True)
        assert opened["time_bnds"].chunks == (4, 2) and (opened["t"].dtype, opened["t"].chunks) == ("f4", (2, 1))


def test_what_is_between_two_dates(tmp_path: Path) -> None:
    """Wrong if dates were taken for positions, or by another array's coordinate."""
    before = dated(tmp_path / "a.h5")
    ok("copy", str(before), str(tmp_path / "b.h5"), "--select", "time=2001-02..2001-03-20,lat=20..55")
    report = shardload.copy(
        before,
        tmp_path / "c.h5",
        dataset="t",
        select={"time": shardload.between("2001-02", "2001-03-20"), "lat": shardload.near(42)},
    )
    assert str(report).startswith("3 arrays, ") and repr(report) == f"<CopyReport: {report}>"
    wanted = np.arange(12 * 6, dtype="f4").reshape(12, 6)[3:6]
    with h5py.File(tmp_path / "b.h5") as found, h5py.File(tmp_path / "c.h5") as other:
        np.testing.assert_array_equal(found["t"], wanted[:, 1:5])
        np.testing.assert_array_equal(found["time"], [45, 60, 75])
        np.testing.assert_array_equal(other["t"], wanted[:, 2])
    said = refused("copy", str(before), str(tmp_path / "d.h5"), "--select", "time=1999-02..1999-03")
    assert "no coordinate is in that range" in said and not (tmp_path / "d.h5").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chunks": "auto"}, "chunks is 'auto'; expected 'keep' or None"),
        ({"chunks": (2.5, 3, 4)}, r"chunks is \(2\.5, 3, 4\); expected a size for each axis"),
        ({"chunks": 5}, r"chunks are \(5,\), but no array has 1 axes"),
        ({"shards": "all"}, "shards is 'all'; expected"),
        ({"unlimited": True}, "unlimited is True; expected an axis that can grow"),
        ({"dataset": [5]}, r"dataset is \[5\]; expected the name of an array"),
        ({"dataset": 5}, "dataset is 5; expected the name of an array"),
        ({"select": (0,)}, r"select has positions, and there are 2 arrays: .* such as select=\{'time': -1\}"),
        ({"select": {"time": 0}}, r"there are: none with a name. Pass positions, such as select=\(0,\)"),
        ({"source": ["a.nc", "b.nc"]}, r"source is \['a.nc', 'b.nc'\]; expected .* what shardload.concat returns"),
        ({"target": None}, "target is None; expected the name of the new file"),
    ],
)
def test_options_of_a_script_that_are_wrong(file: str, tmp_path: Path, options: dict[str, Any], told: str) -> None:
    """Wrong if one were left out without a word, rounded, or taken for another: the command line has words alone."""
    with pytest.raises(shardload.ConfigError, match=told):
        shardload.copy(**{"source": file, "target": tmp_path / "out.h5", **options})


def test_links_into_other_files_are_named(file: str, tmp_path: Path) -> None:
    """Wrong if a copy, or the list of arrays, were silent about what is behind them."""
    master, out = str(tmp_path / "master.h5"), str(tmp_path / "out.h5")
    with h5py.File(master, "w") as opened:
        opened["g/det"] = h5py.ExternalLink("in.h5", "/rho")
    said = refused("copy", master, out)
    assert "holds no arrays" in said and "'/g/det' (to '/rho' in 'in.h5')" in said
    assert "name it, too: --dataset 'g/det'" in said
    with h5py.File(master, "r+") as opened:
        opened["own"], opened["same"] = VALUES, h5py.SoftLink("/own")
    code, _, said = run("copy", master, out)
    assert code == 0 and "were left out: '/g/det' (to '/rho' in 'in.h5'), '/same' (to '/own'). To" in said
    assert "name it, too: --dataset '*' --dataset 'g/det', or" in said
    with pytest.warns(shardload.LeftOutWarning, match=r"name it, too: dataset=\['\*', 'g/det'\], or"):
        shardload.copy(master, out, mode="w")
    code, _, said = run("copy", master, out, "--mode", "w", "--dataset", "*", "--dataset", "g/det")
    assert code == 0 and "were left out: '/same' (to" in said and "out: '/g/det'" not in said
    np.testing.assert_array_equal(stored_in(out, "g/det"), VALUES)
    assert "not listed: /g/det (to '/rho' in 'in.h5'), /same (to '/own');" in unwrapped(ok("info", master))


def test_a_dry_run_writes_nothing(file: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.h5")
    printed = ok("copy", file, out, "--dry-run", "--chunks", "6,8,2", "--staging", "8MiB")
    text = " ".join(printed.split())
    assert f"copy of 2 arrays, 15.0 KiB, to '{out}' on 1 rank" in text
    assert "/rho: 12 x 8 x 20 float32, chunks 1 x 8 x 20 -> 6 x 8 x 2" in text
    assert "each chunk of the source is decoded once" in text
    assert "of 8.0 MiB" in text
    printed = ok("copy", file, out, "--dry-run", "--json")
    plan = json.loads(printed)["plan"]
    assert [one["name"] for one in plan["arrays"]] == ["/rho", "/whole"]
    assert plan["arrays"][0]["decoded"] == 1
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run_2002.h5", "run.zarr"], 2, "type the pattern in quotes, so that the shell does not replace it by their names: "),
        (["--chunks", "4,x"], 1, "expected a size for each axis"),
        (["--shards", "8,x"], 1, "expected a size for each axis"),
        (
            ["--compression", "gzip?", "--chunks", "2,2,2"],
            1,
            "expected a name such as --compression gzip or --compression gzip:6+shuffle",
        ),
        (["--compression", "gzip:77", "--chunks", "2,2,2"], 1, "the level of gzip is 77"),
        (
            ["--compression", "gzip(4)"],
            1,
            "compression is 'gzip(4)'; expected a name such as --compression gzip or --compression gzip:6+shuffle",
        ),
        (["--compression", "99999", "--dataset", "rho"], 1, "compression of '/rho' is '99999'; expected one of"),
        (["--dtype", "int8", "--dataset", "rho"], 1, "Pass no dtype, to keep float32"),
        (["--verify", "none"], 1, "verify is 'none'; expected 'index', 'checksum'"),
        (["--dataset", "rho,whole"], 1, "holds no array '/rho,whole'"),
        (["--select", "0"], 1, "names of axes, such as --select time=-1"),
        (["--select", "99", "--dataset", "rho"], 1, "select has 99 on axis 0, which has 12 elements"),
        (["--select", "time=0"], 1, "there are: none with a name. Pass positions, such as --select 0"),
        (["--select", "lat=35.5"], 1, "select has near(35.5) on the axis 'lat', but among what is copied is no coordinate"),
        (["--mode", "a"], 1, "mode is 'a'"),
        (["--verify", "file"], 1, "verify is 'file'"),
        (["--staging", "1KiB"], 1, "Pass --staging 5MiB or more, or smaller --chunks"),
        (["--dataset", "whole", "--compression", "zstd"], 1, "such as --chunks 12,8,20"),
        (["--format", "tiff"], 1, "format is 'tiff'"),
        (["--select", "time=1"], 1, "no array has"),
        (["--shards", "4,8,20"], 1, "Leave --shards out"),
        (["--unlimited", "time"], 1, "unlimited is 'time', an axis that no array of the new file has: /rho (-, -, -)"),
        (["--unlimited", "3"], 1, "unlimited is 3, an axis that no array of the new file has: /rho (-, -, -)"),
        (["--unlimited", "0", "--chunks", "none"], 1, "an axis that may grow, but no chunks. Pass --chunks 12,8,20"),
    ],
)
def test_what_it_refuses_says_what_to_type(file: str, tmp_path: Path, arguments: list[str], code: int, told: str) -> None:
    """Wrong if a keyword of Python were proposed to a person in a shell, or something stayed."""
    found, _, said = run("copy", file, str(tmp_path / "out.h5"), *arguments, columns=200)
    assert found == code
    assert told in unwrapped(said)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.h5"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--dataset", "g"], "('/g/*' are all in it): '/g/large' (2,) float64."),
        (["--dtype", "float16"], "such as 1e+300. Pass no dtype, to keep float64"),
    ],
)
def test_what_it_refuses_of_a_group(tmp_path: Path, arguments: list[str], told: str) -> None:
    write_hdf5(tmp_path / "in.h5", {"g/large": np.full(2, 1e300)})
    assert told in refused("copy", str(tmp_path / "in.h5"), str(tmp_path / "out.h5"), *arguments)


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("folder", "'folder' is a folder. Pass the new file's name in it, such as 'folder/out.h5'"),
        (".", "'.' is a folder. Pass the new file's name in it, such as './out.h5'"),
        ("out.h5:/rho", "'out.h5:/rho' names an array in a file; expected the file alone, 'out.h5'"),
    ],
)
def test_where_other_commands_would_write(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, told: str
) -> None:
    """As ``cp`` to a folder. Wrong if a person were asked for a suffix of the folder."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert told in refused("copy", file, out)


@pytest.mark.parametrize(
    ("name", "target", "told"),
    [
        ("psi", "out.nc", "complex64, which netCDF4 does not have. Save it as int8 or float32 (complex numbers as two"),
        ("frames", "out.zarr", "is 'lz4'; Zarr has gzip, zstd, blosc. Pass --compression 'blosc(lz4)'"),
        ("old", "out.h5", "is 'bz2'; expected one of bitshuffle,"),
        ("old", "out.h5", "Pass --compression gzip, which every HDF5 has, or another of these"),
    ],
)
def test_what_another_format_does_not_have_says_what_to_type(tmp_path: Path, name: str, target: str, told: str) -> None:
    """Wrong if a person in a shell were asked for a dict of Python, or to save what they copy."""
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["psi"] = VALUES.astype("c8")
        file.create_dataset("frames", data=VALUES, chunks=(4, 8, 20), **hdf5plugin.LZ4())
    group = zarr.open_group(tmp_path / "in.zarr", mode="w", zarr_format=2)
    group.create_array("old", data=VALUES, chunks=(4, 8, 20), compressors=numcodecs.BZ2())
    source = tmp_path / ("in.zarr" if name == "old" else "in.h5")
    assert told in refused("copy", f"{source}:/{name}", str(tmp_path / target))


@pytest.mark.parametrize(
    ("filters", "inner", "level"),
    [
        ({"compression": "gzip", "compression_opts": 7}, "zlib", 7),
        ({"compression": 32015, "compression_opts": (17,)}, "zstd", 9),
        ({"compression": 32015, "compression_opts": (3,)}, "zstd", 2),
    ],
)
def test_zarr_shuffles_inside_blosc(tmp_path: Path, filters: dict[str, Any], inner: str, level: int) -> None:
    """As most netCDF files are. Wrong if a copy to Zarr had to be asked for another compression, or did without the shuffle."""
    path, out = tmp_path / "in.h5", tmp_path / "out.zarr"
    write_hdf5(path, {"rho": VALUES}, chunks=(4, 5, 20), shuffle=True, fletcher32=True, **filters)
    ok("copy", str(path), str(out), "--verify", "full")
    found = zarr.open_group(out, mode="r")["rho"]
    np.testing.assert_array_equal(found[...], VALUES)
    blosc, checksum = (codec.to_dict() for codec in found.compressors)
    assert (blosc["name"], checksum["name"]) == ("blosc", "crc32c")
    options = blosc["configuration"]
    assert (options["cname"], options["clevel"], options["shuffle"], options["typesize"]) == (inner, level, "shuffle", 4)


FILTERS: dict[str, dict[str, Any]] = {
    "szip": {"compression": "szip"},
    "lzf": {"compression": "lzf"},
    "shuffle, gzip": {"compression": "gzip", "shuffle": True},
    "checksums": {"fletcher32": True},
    "scale-offset": {"scaleoffset": 2},
    "scale-offset, gzip": {"scaleoffset": 2, "compression": "gzip"},
    "ZFP": dict(hdf5plugin.Zfp(accuracy=0.5)),
    "SZ": dict(hdf5plugin.SZ(absolute=0.5)),
    "SPERR": dict(hdf5plugin.Sperr(rate=8)),
    "blosc2": dict(hdf5plugin.Blosc2()),
}


@pytest.mark.each_value
@pytest.mark.parametrize("target", ["out.h5", "out.nc", "out.zarr"])
@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_that_is_not_taken_over_says_what_to_type(tmp_path: Path, name: str, target: str) -> None:
    """Wrong if what is proposed failed, or a copy was of other values: a lossy filter changed them once more, without a word
    where the first chunk stayed what it was.
    """
    path, out = tmp_path / "in.h5", tmp_path / target
    with h5py.File(path, "w") as file:
        values = (np.linspace(0, 1e6, 64) + np.random.default_rng(0).normal(0, 1e3, (64, 64))).T.astype("f4")
        values[:32, :32] = 0
        file.create_dataset("x", data=values, chunks=(32, 32), **FILTERS[name])
    values = stored_in(path, "x")
    command = ["copy", str(path), str(out), "--allow-filters", "zfp,sz,sperr,szip,scaleoffset"]
    code, _, said = run(*command, columns=200)
    if code:
        assert code == 1 and "'/x'" in said
        typed = re.search(r"Pass --compression (\w+)", unwrapped(said))
        assert typed is not None, said
        code, _, said = run(*command, "--compression", typed[1])
    assert code == 0, said
    np.testing.assert_array_equal(stored_in(out, "x"), values)


@pytest.mark.parametrize("target", ["out.h5", "out.zarr"])
def test_coordinates_take_the_compression_that_is_typed(tmp_path: Path, target: str) -> None:
    """Wrong if --compression was proposed and did nothing."""
    path, out = tmp_path / "in.h5", tmp_path / target
    with h5py.File(path, "w") as file:
        rho = file.create_dataset("rho", data=VALUES, chunks=(4, 8, 20), compression="gzip")
        filters: tuple[dict[str, Any], ...] = ({"scaleoffset": 3}, {"compression": "gzip", "compression_opts": 7})
        for k, (name, more) in enumerate(zip("xy", filters, strict=True)):
            scale = file.create_dataset(name, data=np.linspace(0, 1, VALUES.shape[k]), chunks=(4,), **more)
            scale.make_scale(name)
            rho.dims[k].attach_scale(scale)
        x = file["x"][...]
    command = ("copy", str(path), str(out), "--allow-filters", "scaleoffset")
    said = refused(*command)
    assert "'/x'" in said and "Pass --compression gzip" in said
    ok(*command, "--compression", "zstd")
    np.testing.assert_array_equal(stored_in(out, "x"), x)
    if target == "out.h5":
        with h5py.File(out) as file:
            assert "32015" in file["x"]._filters and "32015" in file["y"]._filters
    else:
        group = zarr.open_group(out, mode="r")
        names = [type(group[name].compressors[0]).__name__ for name in "xy"]
        assert names == ["ZstdCodec", "ZstdCodec"]


@pytest.mark.parametrize("marker", [np.nan, -9.0])
@pytest.mark.parametrize("target", ["out.nc", "out.zarr"])
@pytest.mark.filterwarnings("ignore:.*dropping '_FillValue'")
def test_a_fill_value_of_integers_that_is_a_floating_point_number(tmp_path: Path, target: str, marker: float) -> None:
    """NCO leaves NaN where it packs. Wrong if the array were lost, or if xarray did not open the store."""
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["v"] = np.array([3, -9, 4], "i2")
        file["v"].attrs.update({"scale_factor": 0.5, "add_offset": 1.0, "_FillValue": marker})
        file["v"].make_scale("v")
    out = tmp_path / target
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", shardload.LeftOutWarning)
        shardload.copy(tmp_path / "in.h5", out)
    assert [str(warning.message).count("'_FillValue'") for warning in told] == [1] * bool(np.isnan(marker))
    with xr.open_dataset(tmp_path / "in.h5", engine="h5netcdf") as before, xr.open_dataset(out) as after:
        xr.testing.assert_equal(before.load(), after.load())


def test_integers_of_few_bits_in_larger_chunks(tmp_path: Path) -> None:
    """Wrong if they were cut off to as many bits as the smaller chunks of the source need."""
    path, out = tmp_path / "in.h5", tmp_path / "out.h5"
    values = np.repeat(np.arange(8, dtype="i4") * 1000, 16) + np.tile(np.arange(16, dtype="i4"), 8)
    write_hdf5(path, {"x": values}, chunks=(16,), scaleoffset=5)
    np.testing.assert_array_equal(stored_in(path, "x"), values)
    ok("copy", str(path), str(out), "--chunks", "64", "--allow-filters", "scaleoffset")
    with h5py.File(out) as file:
        assert file["x"].scaleoffset is not None
        np.testing.assert_array_equal(file["x"][...], values)


def test_a_variable_with_the_name_of_an_axis(tmp_path: Path) -> None:
    """Wrong if it were refused, though the netCDF library has it. That does not hold for a single number, which xarray does not
    open.
    """
    path, out = tmp_path / "in.nc", tmp_path / "out.nc"
    for dims in (("lat", "lon"), ("lon",), ()):
        with netCDF4.Dataset(path, "w") as file:
            for name, n in (("lat", 3), ("lon", 4)):
                file.createDimension(name, n)
            file.createVariable("lat", "f4", dims)[:] = 7
            file.createVariable("t", "f4", ("lat", "lon"))[:] = np.arange(12).reshape(3, 4)
        code, _, said = run("copy", str(path), str(out), columns=200)
        if dims:
            assert code == 0
            with netCDF4.Dataset(out) as file:
                assert file["lat"].dimensions == dims and (file["lat"][...] == 7).all()
            assert "was left out" not in unwrapped(said)
            out.unlink()
    assert code == 1 and "Call one of them by another name" in unwrapped(said)
    assert run("copy", str(path), str(out), "--dataset", "t")[0] == 0
    assert run("copy", str(path), str(tmp_path / "out.zarr"))[0] == 0
    for found in (netCDF4.Dataset(out)["t"], zarr.open_group(tmp_path / "out.zarr", mode="r")["t"]):
        np.testing.assert_array_equal(found[...], np.arange(12).reshape(3, 4))


def test_a_file_that_exists(file: str, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    out.write_text("mine")
    assert "Pass --mode w to replace it" in refused("copy", file, str(out))
    assert out.read_text() == "mine"
    assert run("copy", file, str(out), "--mode", "w")[0] == 0
    with h5py.File(out) as opened:
        np.testing.assert_array_equal(opened["rho"][...], VALUES)
        assert (opened["rho"].compression, opened["rho"].shuffle) == ("gzip", True)


COPY = """
import sys
sys.argv = ["shardload", "copy", *sys.argv[1:]]
from shardload.cli.main import main
try:
    main()
finally:
    print("jax" in sys.modules)
"""


def test_tasks_of_which_each_is_alone(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if each task of a launcher, of which MPI knows nothing, copied the whole file to the same name."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    said = refused("copy", file, f"{tmp_path}/out.h5")
    assert "srun started 4 tasks, but MPI was not told: srun --mpi=pmi" in said
    assert "If each task is to make a file of its own, set SHARDLOAD_MPI=0" in said, "not: to run without MPI"
    assert not (tmp_path / "out.h5").exists()
    monkeypatch.setenv("SHARDLOAD_MPI", "0")  # each is alone, as its user wants it
    assert run("copy", file, f"{tmp_path}/out.h5")[0] == 0


def test_processes_that_jax_alone_connects(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if each process of JAX, of which MPI knows nothing, copied the whole file to the same name."""
    copying = importlib.import_module("shardload.jobs.copying.copy")
    monkeypatch.setattr(copying, "jax_processes", lambda: (None, 0, 2))
    said = refused("copy", file, f"{tmp_path}/out.h5")
    assert "JAX sees 2 processes, but COMM_WORLD has size 1" in said and "To run without MPI" in said
    assert not (tmp_path / "out.h5").exists()


def test_it_needs_no_jax(file: str, tmp_path: Path) -> None:
    """Wrong if any part of a copy imported JAX: here it cannot be imported."""
    out = tmp_path / "out.h5"
    done = run_without(("jax", "jaxlib"), COPY, file, str(out), "--dataset", "rho", stop='ImportError(f"{name} is imported")')
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")
    np.testing.assert_array_equal(stored_in(out, "rho"), VALUES)
