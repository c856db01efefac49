"""What the command line prints, what it refuses, and with which exit code."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import netCDF4
import numpy as np
import pytest
import typer
import zarr
from typer.testing import CliRunner

import shardload
from shardload.cli import arguments
from shardload.cli.arguments import as_typed, parse_mesh, parse_plain, parse_select, parse_spec
from shardload.cli.main import app
from shardload.formats.access import Access
from shardload.formats.lookup import open_file
from shardload.storage.local import TARGET_HINT
from shardload.values.decoding import ATTRIBUTES
from tests.tiers import quick_ones
from tests.unit.copies import run_copy
from tests.unit.files import raising, write_hdf5


def run(*args: str, columns: int = 80) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": str(columns)})
    return result.exit_code, result.stdout, result.stderr


def ok(*args: str, columns: int = 80) -> str:
    """What a command prints that succeeds."""
    code, printed, said = run(*args, columns=columns)
    assert code == 0, said
    return printed


def unwrapped(text: str) -> str:
    """A message in a box of 80 columns, as one line."""
    return " ".join(text.replace("│", " ").split())


def refused(*args: str) -> str:
    """What a command says that fails, as one line."""
    code, _, said = run(*args)
    assert code == 1
    return unwrapped(said)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.h5"
    with h5py.File(path, "w") as h5:
        rho = h5.create_dataset(
            "fields/density",
            data=np.arange(12 * 8 * 20, dtype="f4").reshape(12, 8, 20),
            chunks=(1, 8, 20),
            compression=4,
        )
        rho.attrs["units"] = "kg m-3"
        rho.attrs["scale_factor"] = np.float32(0.5)
        rho.attrs["_FillValue"] = np.float32("nan")
        h5.create_dataset("big", (16384, 16384, 16384), "f4", chunks=(64, 64, 64), compression=4)  # allocates nothing
        h5["words"] = ["a", "bc"]
        x = h5.create_dataset("x", data=np.arange(12.0))
        x.make_scale("x")
        rho.dims[0].attach_scale(x)
    return str(path)


# --- what was typed


def test_what_can_be_read() -> None:
    assert list(parse_mesh("b=2, a=16").items()) == [("b", 2), ("a", 16)], "in their order"
    assert parse_spec(" b + a , - ") == (("b", "a"), None) and parse_spec("-,b,a") == (None, "b", "a")
    assert parse_select("[5:, :-3]") == (slice(5, None), slice(None, -3))
    assert parse_select("-1,...") == (-1, ...) and parse_select("::2") == (slice(None, None, 2),)
    assert (parse_plain("0"), type(parse_plain("0")), parse_plain("-9.99e8")) == (0, int, -9.99e8)
    assert np.isnan(parse_plain("nan"))


WRONG: list[tuple[Callable[[str], Any], tuple[str, ...], str]] = [
    (parse_mesh, ("", "a", "a=", "a=x", "a=0", "a=-1", "=4", "a=4,", "4", "a=1.5", "a=4;b=2"), "--mesh a=4,b=2"),
    (parse_mesh, ("a=4,a=2",), "'a' twice"),
    # JAX failed with a C++ cast that did not fit, or took all memory.
    (parse_mesh, ("a=99999999999", "a=4096,b=8192"), r"is a mesh of [\d,]+ devices; expected at most 16,777,216"),
    (parse_select, ("", "x", "0,,1", "1:2:3:4", "1.5", "a:b", "t=1,3", "=1", "t=x", "t=1..x"), '"time=-1,lat=10:50", or by'),
    (parse_spec, ("a,,b", "", "a+"), "--spec -,a,b"),
    (parse_spec, ("lat=a,b", "=a", "lat=a,lat=b"), "--spec lat=a,lon=b"),
    (parse_select, ("time=0,lat=3:5,time=-1",), "'time' twice"),
    (parse_select, ("time=2001..2002",), "years or numbers. Type 2001-01..2002-12, or 2001.0..2002.0"),  # were days, silently
]


@pytest.mark.parametrize(("parse", "texts", "said"), WRONG)
def test_what_cannot_be_read_says_what_to_type(parse: Callable[[str], Any], texts: tuple[str, ...], said: str) -> None:
    for text in texts:
        with pytest.raises(typer.BadParameter, match=said):
            parse(text)


# --- info


def test_info_shows_control_characters_as_escapes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as made:
        made["rho\x1b[2J"] = np.zeros(2)
        made["rho\x1b[2J"].attrs["units"] = np.bytes_(b"K\x1b[1m\r")
    for path in (tmp_path / "f.h5", f"{tmp_path}/f.h5:/rho\x1b[2J"):
        out = ok("info", str(path))
        assert "\x1b" not in out and r"/rho\x1b[2J" in out and r"K\x1b[1m\r" in out


@pytest.mark.parametrize("columns", [40, 60, 80, 132, 200, 1000])
def test_info_fits_and_loses_nothing(file: str, columns: int) -> None:
    """Wrong if a line were longer than the terminal, or if what did not fit were left out or cut in two."""
    out = ok("info", file, columns=columns)
    lines = out.splitlines()
    assert max(map(len, lines[1:])) <= columns and all(line == line.rstrip() for line in lines)
    names = [line.split()[0] for line in lines if line.startswith("/")]
    assert [name for name in names if name != file + ":"] == ["/big", "/fields/density", "/words", "/x"]
    text = " ".join(out.split())
    sizes = ("12 x 8 x 20", "1 x 8 x 20", "16384 x 16384 x 16384", "7.5 KiB", "16.0 TiB")
    for whole in (*sizes, "scale_factor=0.5", "_FillValue=nan", "units=kg m-3", "cannot be loaded", "coordinate"):
        assert text.count(whole) == 1
    assert text.count("float32") == 2 and text.count("gzip") == 2 and "HDF5, 4 arrays" in text
    if columns == 80:
        assert [line for line in lines if "/big" in line and "16384 x 16384 x 16384" in line and "float32" in line]


def test_info_says_the_same_in_a_pipe_and_in_80_columns(file: str) -> None:
    """Wrong if what goes to a log, a mail or a pager were laid out for a screen that nobody has."""
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = run_copy(["-m", "shardload", "info", file], capture_output=True, check=True, env=environ)
    assert done.stdout == run("info", file)[1]


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_info_lists_what_changes_what_values_mean(tmp_path: Path, suffix: str) -> None:
    """Wrong if a list showed the numbers of an array and not that they are unsigned: every attribute that xarray decodes by."""
    told: dict[str, Any] = dict.fromkeys(("scale_factor", "add_offset"), 0.5) | {"_Unsigned": "true", "dtype": "bool"}
    told |= dict.fromkeys(("_FillValue", "missing_value", "valid_min", "valid_max"), -1) | {"valid_range": [0, 7]}
    assert set(told) == set(ATTRIBUTES)
    path = tmp_path / f"a.{suffix}"
    if suffix == "h5":
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(3, dtype="i1")
            file["x"].attrs.update(told)
    else:
        zarr.open_group(path, mode="w").create_array("x", data=np.arange(3, dtype="i1")).attrs.update(told)
    out = ok("info", str(path))
    said = " ".join(out.split())
    for key, value in told.items():
        assert f"{key}={value if isinstance(value, str) else json.dumps(value)}" in said, key
    assert json.loads(run("info", str(path), "--json")[1])[0]["attributes"] == told


def test_info_of_numbers_that_numpy_does_not_have(tmp_path: Path) -> None:
    """Wrong if one such array were a traceback, and hid the others."""
    odd = h5py.h5t.STD_I32LE.copy()
    odd.set_size(3)
    bits, pair = h5py.h5t.STD_B32LE.copy(), h5py.h5t.create(h5py.h5t.COMPOUND, 3)
    bits.set_size(5)
    pair.insert(b"odd", 0, odd)
    kinds = {
        "odd": odd,
        "bits": bits,
        "pair": pair,
        "list": h5py.h5t.vlen_create(odd),
        "array": h5py.h5t.array_create(odd, (2,)),
    }
    with h5py.File(tmp_path / "f.h5", "w") as file:
        for name, kind in {**kinds, "quad": h5py.h5t.IEEE_F128BE, "opaque": h5py.h5t.create(h5py.h5t.OPAQUE, 3)}.items():
            h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple((4,)))
        file["good"] = np.zeros(3)
    out = ok("info", str(tmp_path / "f.h5"), columns=1000)
    assert "8 arrays" in out and out.count("cannot be loaded") == 7
    assert {line.split()[0]: line.split()[2] for line in out.splitlines()[2:]}["/odd"] == "24-bit"
    told = json.loads(run("info", str(tmp_path / "f.h5"), "--json")[1])
    assert {one["dataset"]: one["nbytes"] for one in told if one["dataset"] in ("/good", "/odd")} == {"/good": 24, "/odd": None}
    assert run("info", f"{tmp_path / 'f.h5'}:/odd")[0] == 0


def test_a_name_is_never_cut(tmp_path: Path) -> None:
    name = "/" + "long" * 80
    write_hdf5(tmp_path / "f.h5", {name: np.zeros(3)})
    out = ok("info", str(tmp_path / "f.h5"))
    assert name in out.splitlines()
    out = ok("info", str(tmp_path / "f.h5"), columns=1000)
    assert [line for line in out.splitlines() if name in line and "float64" in line]


def test_info_of_one_array_shows_every_attribute_once(tmp_path: Path) -> None:
    """Wrong if one were left out, were said to be applied by --decode, or took the place of the array's own shape or dtype."""
    with h5py.File(tmp_path / "f.h5", "w") as h5:
        h5["t"] = np.zeros(3, "i2")
        h5["t"].attrs.update({"scale_factor": 0.5, "units": "K", "long_name": "temperature", "shape": "round", "dtype": "bool"})
    out = ok("info", f"{tmp_path / 'f.h5'}:/t", columns=300)
    rows = [tuple(line.split(maxsplit=1)) for line in out.splitlines()]
    assert {("shape", "3"), ("shape", "round"), ("dtype", "int16"), ("units", "K"), ("long_name", "temperature")} <= set(rows)
    assert ("scale_factor", "0.5  (reported, not applied)") in rows and len(rows) == len(set(rows))
    assert max(map(len, run("info", f"{tmp_path / 'f.h5'}:/t", columns=40)[1].splitlines()[2:])) <= 40


def test_a_dimension_without_a_variable_is_no_array_of_zeros(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "f.nc", "w") as made:
        made.createDimension("x", 3)
        made.createVariable("t", "f4", ("x",))[:] = 1
    assert "/x  (x=3)  dimension without a variable" in str(shardload.open(tmp_path / "f.nc"))
    told = run("info", str(tmp_path / "f.nc"), columns=300)[1]
    assert [line.endswith("dimension without a variable") for line in told.splitlines() if line.startswith("/x ")] == [True]
    assert "it holds no values" in run("info", f"{tmp_path / 'f.nc'}:/x")[1]


def test_info_says_the_ends_of_the_coordinates_of_axes(tmp_path: Path) -> None:
    """Wrong if corners of a curvilinear grid were said to be its ends, or if a scalar one were not shown."""
    path = tmp_path / "ocean.nc"
    with netCDF4.Dataset(path, "w") as file:
        for name, n in (("time", 3), ("y", 3), ("x", 3), ("large", 20_000)):
            file.createDimension(name, n)
        for name, dims, values in (
            ("time", ("time",), [9, 1, 5]),
            ("lat", ("y", "x"), np.zeros((3, 3))),
            ("mean", ("time",), [2, 1, -3]),
            ("height", (), 2.0),
            ("far", ("large",), np.zeros(20_000)),
        ):
            made = file.createVariable(name, "f4", dims, fill_value=-999.0)
            made[:] = values
            made.units = {"height": "m", "time": "hours since 2000-02-28"}.get(name, "")
        file.createVariable("t", "f4", ("time", "y", "x")).coordinates = "lat mean height far"
    out = ok("info", f"{path}:/t", columns=200)
    told = next(line for line in out.splitlines() if line.startswith("coords "))
    expected = ["lat(y, x)", "mean(time)", "height 2.0 m", "far(large)"]
    dates = "hours since 2000-02-28 (2000-02-28T09:00:00 to 2000-02-28T05:00:00)"
    assert sorted(told.removeprefix("coords").strip().split("; ")) == sorted([*expected, f"time 9.0 to 5.0 {dates}"])


def test_info_json(file: str) -> None:
    out = ok("info", file, "--json")
    arrays = {array["dataset"]: array for array in json.loads(out)}
    rho = arrays["/fields/density"]
    assert (rho["shape"], rho["chunks"], rho["nbytes"]) == ([12, 8, 20], [1, 8, 20], 12 * 8 * 20 * 4)
    assert rho["attributes"]["_FillValue"] == "nan"  # JSON has no NaN
    assert arrays["/words"]["refused"]
    assert json.loads(run("info", f"{file}:/x", "--json")[1])[0]["is_coordinate"] is True


def test_info_of_zarr_shows_shards(tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "z.zarr"), shape=(8, 8), chunks=(2, 4), shards=(4, 8), dtype="i2")
    out = ok("info", str(tmp_path / "z.zarr"), columns=200)
    header, row = out.splitlines()[1:]
    assert "shards" in header
    assert all(part in row for part in ("8 x 8", "2 x 4", "4 x 8", "int16"))


# --- plan


def test_plan_of_several_arrays(file: str) -> None:
    """Wrong if only the first name counted, or a pattern were taken for a name."""
    args = ("--mesh", "a=4", "--spec", "-,a")
    code, out, err = run("plan", file, "--dataset", "fields/density", "--dataset", "fields/*", *args, "--pad", "0", columns=200)
    assert (code, err) == (0, "")
    assert "[0]" in out and "[1]['density']" in out and "total:" in out and out.count("/fields/density") == 2
    found = json.loads(ok("plan", f"{file}:/fields/*", *args, "--pad", "0", "--json"))
    assert "['density']" in [one["where"] for one in found["arrays"]] and found["nbytes"] > 0
    said = refused("plan", file, "--dataset", "fields/density", "--dataset", "fields/densty", *args)
    assert "array [1]" in said and "(nearest first): '/fields/density'" in said


def test_verify_of_several_arrays(file: str) -> None:
    """Wrong if an array were not compared, or said to be another."""
    args = ("--dataset", "fields/density", "--dataset", "fields/*", "--mesh", "n=1", "--spec", "n")
    out = ok("verify", file, *args, columns=200)
    assert out.count("'/fields/density' in") == 2 and "all: verified by full" in out
    found = json.loads(ok("verify", f"{file}:/fields/*", "--mesh", "n=1", "--spec", "n", "--json"))
    assert found["ok"] and "['density']" in [one["where"] for one in found["arrays"]]
    assert all(one["proven"]["n_elements"] > 0 for one in found["report"]["arrays"])


def test_plan_json(file: str) -> None:
    args = ("--dataset", "fields/density", "--mesh", "a=4,b=2", "--spec", "-,a,b", "--json")
    out = ok("plan", file, *args, "--select", ":10,...", "--readers", "parallel")
    plan = json.loads(out)
    assert (plan["shape"], plan["shard_shape"], plan["n_ranks"]) == ([10, 8, 20], [10, 2, 10], 8)
    assert (plan["dtype"], plan["readers"], plan["decomposition"]) == ("float32", "parallel", "pencil")
    assert plan["costs"]["direct"]["amplification"] == 8
    assert plan["costs"]["parallel"]["chunks_decoded"] == 10
    plan = json.loads(run("plan", file, *args, "--readers", "2")[1])
    assert (plan["readers"], plan["n_readers"]) == ("parallel", 2)


@pytest.mark.parametrize(("processes", "decoded"), [((), 96), (("--processes", "2"), 24), (("--processes", "1"), 12)])
def test_plan_for_processes_of_several_devices(file: str, processes: tuple[str, ...], decoded: int) -> None:
    """Wrong if every device were a process of its own whatever was said, or a process decoded a chunk for each device."""
    out = ok("plan", f"{file}:/fields/density", "--mesh", "a=4,b=2", "--spec", "-,a,b", *processes, "--json")
    plan = json.loads(out)
    assert plan["n_ranks"] == int(processes[1] if processes else 8)
    assert (plan["costs"]["direct"]["chunks_decoded"], plan["costs"]["parallel"]["chunks_decoded"]) == (decoded, 12)


def test_a_plan_for_one_process_has_one_way_to_read(file: str) -> None:
    """Wrong if it had a table of three equal columns."""
    out = ok("plan", f"{file}:fields/density", "--mesh", "a=1", "--spec", "a")
    assert "-> direct" in out and "parallel" not in out
    assert "parallel" in run("plan", f"{file}:fields/density", "--mesh", "a=2", "--spec", "a")[1]


def test_plan_of_a_group_says_what_to_type(file: str) -> None:
    """Wrong if `plan` took a name that a load refuses."""
    for command in ("plan", "verify"):
        assert "('/fields/*' are all in it)" in refused(command, f"{file}:fields", "--mesh", "a=1", "--spec", "a")


def test_plan_says_if_the_load_needs_64_bits(tmp_path: Path) -> None:
    """Wrong if a plan were printed without a word, and the load of it were an error."""
    write_hdf5(tmp_path / "a.h5", {"x": np.arange(4.0), "y": np.arange(4.0, dtype="f4")})
    how = ("--mesh", "a=2", "--spec", "a")
    told = {name: run("plan", f"{tmp_path / 'a.h5'}:/{name}", *how)[1] for name in "xy"}
    assert "JAX_ENABLE_X64=1" in told["x"] and "--dtype float32" in told["x"] and "X64" not in told["y"]
    assert "X64" not in run("plan", f"{tmp_path / 'a.h5'}:/x", *how, "--dtype", "float32")[1]
    assert json.loads(run("plan", f"{tmp_path / 'a.h5'}:/x", *how, "--json")[1])["needs_64_bits"] is True


def dated(path: Path) -> str:
    """A file with an array "t" (time, lat), a step each half month; its name."""
    with h5py.File(path, "w") as h5:
        h5["t"] = np.arange(12 * 6, dtype="f4").reshape(12, 6)
        for axis, (name, values) in enumerate((("time", np.arange(12.0) * 15), ("lat", np.linspace(60, 10, 6)))):
            h5[name] = values
            h5[name].make_scale(name)
            h5["t"].dims[axis].attach_scale(h5[name])
        h5["time"].attrs["units"] = "days since 2001-01-01"
    return str(path)


def test_a_spec_and_a_selection_by_names(tmp_path: Path) -> None:
    how = ("plan", f"{dated(tmp_path / 'a.h5')}:/t", "--mesh", "a=2", "--json", "--pad", "0")

    def shape(*more: str) -> list[int]:
        out = ok(*how, *more)
        return list(json.loads(out)["shape"])

    assert shape("--spec", "lat=a", "--select", "time=2001-02") == [1, 6]
    assert shape("--spec", "None,a", "--select", "time=2001-02..2001-03-20,lat=20..55") == [3, 4]
    assert shape("--spec", "a", "--select", "time=2001-01-31T06:00,lat=1:3") == [2]
    assert "names the axis 'lon'" in refused(*how, "--spec", "lon=a")


@pytest.mark.parametrize("command", ["info", "plan", "verify", "bench-stream", "copy", "join", "doctor"])
def test_examples_can_be_pasted(command: str) -> None:
    """Wrong if an example were wrapped without a backslash, or a switch said that it takes a value."""
    code, out, _ = run(command, "--help")
    lines = [line.rstrip() for line in out.splitlines()]
    assert code == 0
    for line, after in itertools.pairwise(lines):
        if line.startswith(("   shardload", "   mpiexec", "     --")):
            assert not after.strip() or line.endswith("\\"), line
    assert not [line for line in lines if "<bool>" in line and "--help" not in line]


@pytest.mark.parametrize(
    ("typed", "code", "text"),
    [
        ("--mesh a4 --spec a", 2, "Type --mesh a=4,b=2"),
        ("--mesh a=4 --spec z", 1, "P('z') names mesh axis 'z', but the axes of the mesh are a=4"),
        ("--mesh a=4 --spec a=a,a=-", 2, "each once: --spec lat=a,lon=b"),
        ("--mesh a=4 --spec a --select x", 2, "--select"),
        ("--mesh a=4 --spec a --readers 0", 1, "readers is 0"),
        ("--mesh a=4 --spec a --readers all", 1, "readers is 'all'"),
        ("--mesh a=4 --spec a --staging much", 1, "staging is 'much'"),
        ("--mesh a=4 --spec a --staging 1", 1, "--staging 1MiB or more"),
        ("--mesh a=8 --spec a", 1, "Pass --pad nan (or another fill value)"),
        ("--mesh a=4 --spec a --select 99", 1, "99"),
        ("--mesh a=4 --spec a --processes 8", 1, "as many as the others: expected a number that divides 4"),
        ("--mesh a=1 --spec a --processes 2", 1, "has 1 device, and each process must have as many as the others: e"),
        ("--mesh a=4 --spec a --processes x", 2, "--processes"),
        ("--mesh a=4 --spec a --ranks-per-node 0", 1, "ranks_per_node is 0; expected"),
    ],
)
def test_plan_refuses(file: str, typed: str, code: int, text: str) -> None:
    found, out, err = run("plan", f"{file}:/fields/density", *typed.split())
    assert (found, out) == (code, "")
    assert text in unwrapped(err)
    assert "Traceback" not in err


# --- the command itself


def test_a_mesh_or_spec_that_is_missing(file: str) -> None:
    """Wrong if it were only named: nobody knows what to type then."""
    for given in ((), ("--mesh", "a=2")):
        for command in ("plan", "verify"):
            code, _, err = run(command, file, *given)
            assert code == 2 and "Type for example --mesh a=4,b=2 --spec -,a,b: " in unwrapped(err)


def test_a_plan_for_65536_devices(file: str) -> None:
    """Wrong if devices that nobody has were needed, or each looked at the pieces of all others: a minute is the limit."""
    command = ["plan", f"{file}:/big", "--mesh", "a=256,b=256", "--spec", "-,a,b", "--json"]
    done = run_copy(["-W", "error", "-m", "shardload", *command], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n_ranks"] == 65536


PRINTED = [["--help"], ["--version"], ["info", "FILE", "--json"], ["plan", "FILE:/big", "--mesh", "a=2", "--spec", "a"]]


@pytest.mark.parametrize("asked", quick_ones(PRINTED, PRINTED[2]), ids=lambda asked: asked[0])
def test_output_that_nobody_reads(file: str, asked: list[str]) -> None:
    """Wrong if it ended in a traceback where the reader has enough (``| head``)."""
    # Or typer looks for a shell among the ten nearest ancestors of the process, and says that there is none.
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    reading, writing = os.pipe()
    os.close(reading)
    command = ["-m", "shardload", *(word.replace("FILE", file) for word in asked)]
    try:
        done = run_copy(command, env=env, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


# Commands one after the other, in one process that starts as in a shell.
SEVERAL = """
import sys
from shardload.cli.main import main

words = sys.argv[1:]
while words:
    n = words.index("then")
    sys.argv = ["shardload", *words[:n]]
    words = words[n + 1:]
    try:
        main()
    except SystemExit as end:
        for stream in (sys.stdout, sys.stderr):
            print("exit code", end.code or 0, file=stream, flush=True)
"""


@pytest.mark.parametrize(
    "coded", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=str
)
def test_names_that_the_terminal_or_the_locale_does_not_have(tmp_path: Path, coded: dict[str, str]) -> None:
    """They are shown as escapes. HDF5's own are UTF-8 whatever the locale is: wrong if the file were damaged there."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/\u4e2d\u03c1"] = np.zeros(3)
        file["link"] = h5py.SoftLink("/g/\u4e2d\u03c1")
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(".", "/g/\u4e2d\u03c1", (3,))
        file.create_virtual_dataset("all", layout)
    names = ("", ":/g/\u4e2d\u03c1", ":/link", ":/all")
    typed = [word for name in names for word in ("info", f"{tmp_path}/a.h5{name}", "then")]
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, *typed], env=os.environ | coded, capture_output=True, encoding="latin-1", check=False
    )
    assert (done.returncode, done.stderr) == (0, "exit code 0\n" * len(names)), done
    for name, printed in zip(names, done.stdout.split("exit code 0\n")[:-1], strict=True):
        said = printed.replace("\\udce4\\udcb8\\udcad\\udccf\\udc81", "\\u4e2d\\u03c1")  # typed in an ASCII locale
        assert "float64" in said and "refused" not in said and (r"/g/\u4e2d\u03c1" in said or name in (":/link", ":/all"))


GONE = """
import os

os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
"""


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    """As in a shell after another one has made the folder anew. Wrong if it ended in a traceback of the message itself."""
    commands = (["info", "x.h5"], ["plan", "x.h5:/x", "--mesh", "a=1", "--spec", "a"])
    program = SEVERAL.replace("words =", f"{GONE}\nwords =", 1)
    typed = [word for command in commands for word in (*command, "then")]
    done = run_copy(["-c", program, *typed], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done
    *each, rest = done.stderr.split("exit code 1\n")
    assert len(each) == len(commands) and not rest, done
    for said in each:
        assert said.startswith("error: ") and "the working folder is gone" in said and 'cd "$PWD"' in said, done


# A variable of JAX's, as if it had been set when JAX was imported.
SET = """
import os, sys
import jax

name, value = sys.argv.pop(1).split("=")
os.environ[name] = value
jax.config.update(name.lower(), {"0": False}.get(value, value))

from shardload.cli.main import main
main()
"""


def test_verify_where_jax_has_no_devices(file: str) -> None:
    """Wrong if it ended in a traceback that says nothing: a batch script asks for GPUs, and no plugin is installed."""
    for platform in ("cuda", "no-such"):
        command = ["-c", SET, f"JAX_PLATFORMS={platform}", "verify", f"{file}:/x", "--mesh", "a=1", "--spec", "a"]
        done = run_copy(command, capture_output=True, check=False)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done
        assert f"JAX_PLATFORMS is '{platform}'" in done.stderr and "JAX_PLATFORMS=cpu" in done.stderr, done


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("plan f.h5 --readers ", ["auto", "root", "parallel", "direct"]),
        ("plan f.h5 --readers d", ["direct"]),
        ("verify f.h5 --how f", ["file", "full"]),
        ("verify f.h5 --missing ", ["warn", "error", "fill"]),
        ("pl", ["plan"]),
        ("plan f", []),  # the shell itself knows files
    ],
)
def test_what_a_shell_completes(typed: str, expected: list[str]) -> None:
    words = ["shardload", *typed.split(" ")]
    env = {"_SHARDLOAD_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    printed = CliRunner().invoke(app, [], env=env, prog_name="shardload").stdout
    assert printed.split() == expected


def test_a_message_names_what_can_be_typed() -> None:
    """Wrong if the command told people to pass Python's keywords, or changed what is in quotes."""
    for said, typed in (
        ("Pass readers='direct' (or 'auto')", "Pass --readers direct (or 'auto')"),
        ("Pass the same select=, dtype=, decode= and pad= as", "Pass the same --select, --dtype, --decode and --pad as"),
        ("there is no file 'pad=0.h5'. Near it: '/a/dtype=x'.", "there is no file 'pad=0.h5'. Near it: '/a/dtype=x'."),
        (TARGET_HINT, "pass --allow-external if you trust it"),
        ("pass allow_filters='zfp'.", "pass --allow-filters zfp."),
        ("pass allow_filters='a; b'", "pass --allow-filters 'a; b'"),
        ("untrusted=True opens files; load without untrusted=True.", "--untrusted opens files; load without --untrusted."),
        ("staging is what it is; padding=0", "staging is what it is; padding=0"),
    ):
        assert as_typed(said) == typed


@pytest.mark.each_value
@pytest.mark.parametrize("wrong", [("verif",), ("verify", "x.h5", "--oops"), ("verify", "x.h5", "--mesh", "a", "--spec", "a")])
@pytest.mark.parametrize(
    ("of_task", "n_slept", "is_said"),
    [
        ({}, 0, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, 0, True),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, 1, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 0, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, 0, True),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, 1, True),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, 1, True),
    ],
)
def test_what_is_wrong_with_options_is_said_by_the_first_task_first(
    monkeypatch: pytest.MonkeyPatch, wrong: tuple[str, ...], of_task: dict[str, str], n_slept: int, is_said: bool
) -> None:
    """Wrong if each of a thousand tasks printed it, or if a launcher could end the job before task 0 has."""
    slept: list[float] = []
    monkeypatch.setattr(arguments.time, "sleep", slept.append)
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in of_task.items():
        monkeypatch.setenv(name, value)
    code, out, err = run(*wrong)
    assert (code, out, len(slept), "Usage: " in err) == (2, "", n_slept, is_said)


@pytest.mark.parametrize(
    ("number", "is_connected", "n_slept", "is_said"), [("0", False, 0, True), ("3", False, 1, True), ("3", True, 0, False)]
)
def test_an_error_of_tasks_that_are_apart_is_said_by_the_first_task_first(
    monkeypatch: pytest.MonkeyPatch, number: str, is_connected: bool, n_slept: int, is_said: bool
) -> None:
    """Wrong if a task that says nothing could end the job (``srun -K``) before the first one has said why: nobody would."""
    slept: list[float] = []
    monkeypatch.setattr(arguments.time, "sleep", slept.append)
    monkeypatch.setattr(arguments, "is_connected", lambda: is_connected)
    monkeypatch.setenv("SLURM_PROCID", number)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    code, _, err = run("copy", "gone.h5", "new.h5")
    assert (code, len(slept), "srun started 4 tasks" in unwrapped(err)) == (1, n_slept, is_said)


@pytest.mark.parametrize(
    "wrong", [("doctor", "--timeout", "inf"), ("bench-stream", "x.h5", "--mesh", "a=1", "--spec", "-", "--step-ms", "inf")]
)
def test_times_that_no_clock_has_are_wrong_options(wrong: tuple[str, ...]) -> None:
    """Wrong if they ended in a traceback of what waits for so long."""
    code, _, said = run(*wrong)
    assert code == 2 and f"Invalid value for '{wrong[-2]}'" in unwrapped(said)


def test_an_array_without_axes_has_a_spec(tmp_path: Path) -> None:
    """Wrong if there were nothing to type for it: P(None) names an axis."""
    write_hdf5(tmp_path / "x.h5", {"scalar": 3.0})
    assert "P() on mesh a=2, 2 replicas" in ok("plan", f"{tmp_path}/x.h5", "--mesh", "a=2", "--spec", "-")


@pytest.mark.parametrize("command", [("info",), ("plan", "--mesh", "a=2", "--spec", "a")])
def test_what_needs_no_job_is_printed_once_in_a_job(
    file: str, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Wrong if each task printed it: their documents of JSON together are none."""
    monkeypatch.setenv("PMI_SIZE", "4")
    printed = []
    for rank in range(4):
        monkeypatch.setenv("PMI_RANK", str(rank))
        printed.append(ok(command[0], f"{file}:/fields/density", *command[1:], "--json"))
    assert json.loads("".join(printed)) and printed[1:] == [""] * 3


def test_64_bit_types_in_a_shell(tmp_path: Path) -> None:
    """Wrong if values were compared as float32, if a file of float64 needed a variable, or if a command told people to write
    Python.
    """
    write_hdf5(tmp_path / "x.h5", {"x": np.arange(4.0) + 2.0**-40})

    env = {k: v for k, v in os.environ.items() if k != "JAX_ENABLE_X64"} | {"JAX_PLATFORMS": "cpu"}
    command = ["verify", f"{tmp_path}/x.h5", "--mesh", "a=2", "--spec", "a"]
    done = run_copy(["-m", "shardload", *command], env=env, capture_output=True, check=False)
    assert done.returncode == 0 and "4 float64 as slab" in " ".join(done.stdout.split()), done
    done = run_copy(["-c", SET, "JAX_ENABLE_X64=0", *command], env=env, capture_output=True, check=False)
    assert done.returncode == 1, done
    assert "or JAX_ENABLE_X64=1 in the environment. Or pass --dtype float32" in done.stderr


def test_info_of_a_group_lists_its_arrays(file: str) -> None:
    out = ok("info", f"{file}:/fields/*")
    assert "HDF5, 1 array" in " ".join(out.split()) and "/fields/density" in out and "/words" not in out
    names = [array["dataset"] for array in json.loads(run("info", f"{file}:*", "--json")[1])]
    assert sorted(names) == ["/big", "/fields/density", "/words", "/x"]
    assert "holds no array '/nothing/*'" in refused("info", f"{file}:/nothing/*")
    with h5py.File(file, "a") as h5:
        h5["latest"] = h5py.SoftLink("/fields")
    listed = [run("info", f"{file}:/{group}")[1] for group in ("fields/*", "latest/*", "fields", "latest")]
    assert "/fields/density" in listed[0] and listed[1] == listed[0].replace("/fields/", "/latest/")
    assert listed[2:] == listed[:2]


def test_info_shows_attributes_of_groups(file: str) -> None:
    """Where snapshots have their header. Wrong if a group of attributes were an error, or nobody were told of it."""
    with h5py.File(file, "a") as h5:
        h5.create_group("Header").attrs["BoxSize"] = 100.0
        h5["fields"].attrs["by"], h5.attrs["title"] = np.bytes_("x"), "a run"
        h5["fields"].attrs["to"] = h5["x"].ref
    assert "attributes of groups: / (title), /Header (BoxSize), /fields (by); shardload info" in unwrapped(run("info", file)[1])
    for group, count, told in (
        ("", "4 arrays", "title a run"),
        ("Header", "no arrays", "BoxSize 100.0"),
        ("fields", "1 array", "by x not shown attribute 'to' of '/fields' (neither text nor numbers)"),
    ):
        out = unwrapped(ok("info", f"{file}:/{group}"))
        assert count in out and out.endswith(told)


def test_info_of_a_group_beside_a_damaged_one(tmp_path: Path) -> None:
    """Wrong if one group whose metadata cannot be read hid the arrays and attributes of the others."""
    path = tmp_path / "a.zarr"
    root = zarr.open_group(path, mode="w")
    root.create_group("ok").attrs["step"] = 3
    root["ok"].create_array("x", data=np.arange(4.0))
    root.create_group("bad").create_array("y", data=np.arange(3.0))
    (path / "bad" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": "text"}')
    out = ok("info", f"{path}:/ok")
    assert "/ok/x" in out and unwrapped(out).endswith("step 3")
    assert shardload.open(f"{path}:/ok").attrs == {"step": 3}
    out = ok("info", f"{path}:/bad")
    assert "/bad/y" in out and "not shown what is in attributes and groups of '/bad' (" in unwrapped(out)
    for reason in ("sequence", "nested too deeply"):
        with open_file(str(path), Access()) as opened:
            groups, unread = opened.groups()
            assert set(groups) == {"/", "/ok"} and "'/bad'" in unread[0] and reason in unread[0]
        (path / "bad" / "zarr.json").write_text("[" * 100_000)


def test_a_spec_for_arrays_of_several_shapes(file: str) -> None:
    """Wrong if it did not say which array the spec does not fit."""
    how = ("--dataset", "x", "--dataset", "big", "--mesh", "a=2", "--spec=-,a", "--dtype", "float32")
    said = refused("plan", file, *how)
    assert "array [0], '/x' in" in said and "what is asked for counts for several arrays" in said


def test_info_names_no_flag_that_it_lacks(file: str) -> None:
    """Its flags are those of its help; what is said of arrays in its table, too."""
    text = refused("info", f"{file}:/fields/densty")
    assert "holds no array" in text and "nearest first" in text
    assert "--" not in text and "dataset=" not in text
    with h5py.File(file, "a") as h5:
        h5.create_dataset("packed", data=np.arange(64.0), chunks=(64,), **hdf5plugin.Bitshuffle())
        h5["far"] = h5py.ExternalLink("/elsewhere/a.h5", "/x")
    for where in ("", ":/packed"):
        _, printed, _ = run("info", file + where)
        assert "pass --allow-filters bitshuffle" in unwrapped(printed) and "allow_filters" not in printed
        printed = ok("info", file + where, "--allow-filters", "bitshuffle")
        assert "bitshuffle" in printed and "--allow" not in printed
    _, printed, _ = run("info", file, "--json")
    assert "pass allow_filters='bitshuffle'" in printed
    assert "pass --allow-external if" in refused("info", f"{file}:/far")


@pytest.mark.parametrize("command", [("info",), ("plan", "--mesh", "a=2", "--spec", "a")])
def test_a_link_out_of_the_folder_is_followed_where_that_is_typed(file: str, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Wrong if the flag did nothing, or the message did not name it."""
    inside = tmp_path / "inside"
    inside.mkdir()
    with h5py.File(inside / "links.h5", "w") as h5:
        h5["far"] = h5py.ExternalLink(file, "/fields/density")
    name, *flags = command
    assert "pass --allow-external if you trust it" in refused(name, f"{inside}/links.h5:/far", *flags)
    printed = ok(name, f"{inside}/links.h5:/far", "--allow-external", *flags)
    assert "12" in printed and "float32" in printed


@pytest.mark.parametrize("command", [("info",), ("plan", "--mesh", "a=2", "--spec", "a", "--dataset", "fields/density")])
def test_a_file_that_nobody_vouches_for_is_opened_by_another_process(
    file: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if the flag did nothing: no format can be asked in this process."""
    name, *flags = command
    _, printed, _ = run(name, file, *flags)

    monkeypatch.setattr("shardload.formats.registry.formats", raising(AssertionError("opened in this process")))
    assert run(name, file, *flags)[0] == 1
    assert ok(name, file, "--untrusted", *flags) == printed


def test_more_devices_than_a_process_can_simulate_are_refused_at_once(file: str) -> None:
    said = refused("verify", f"{file}:/fields/density", "--mesh", "a=100000", "--spec", "a", "--pad", "0")
    assert said.startswith("error: --mesh a=100000 needs 100,000 devices of each process; expected at most 4,096.")


@pytest.mark.parametrize("args", [("info",), ("plan", "--mesh", "a=2", "--spec", "a")])
def test_json_says_what_went_wrong(file: str, args: tuple[str, ...]) -> None:
    code, out, said = run(args[0], f"{file}:/no", *args[1:], "--json")
    told = json.loads(out)
    assert (code, told["ok"], told["error"]) == (1, False, "ConfigError")
    assert said == f"error: {told['message']}\n"
