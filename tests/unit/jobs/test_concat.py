"""`shardload.concat`: which files are one, in which order, and what is refused. The files are h5py's, the values NumPy's."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import h5py
import jax
import netCDF4
import numpy as np
import pytest
import zarr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, SourceError
from shardload.formats import lookup
from shardload.formats.hdf5 import tiles
from tests.servers import ObjectServer
from tests.unit.cli.test_main import ok, run
from tests.unit.files import stored_in

LENGTHS = (5, 3, 4)
WHOLE = np.arange(12 * 2, dtype="f4").reshape(12, 2)
STARTS = (0, 5, 8)


def write(path: Path, k: int, **changes: Any) -> str:
    """The k-th part of `WHOLE`, as "x" in an HDF5 file; `changes` are further arrays, or others."""
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        x = changes.pop("x", WHOLE[STARTS[k] : STARTS[k] + LENGTHS[k]])
        file.create_dataset("x", data=x, chunks=(min(2, len(x)), 2), compression="gzip")
        for name, values in changes.items():
            file[name] = values
    return str(path)


def load(path: Any, dataset: str | None = "x", **options: Any) -> np.ndarray[Any, Any]:
    return np.asarray(shardload.load(path, Mesh(np.array(jax.devices()[:1]), "a"), P(), dataset=dataset, **options))


def refused(said: str, *parts: Any, error: type[Exception] = ConfigError, **how: Any) -> None:
    """The parts are not taken for one file, and the error says why."""
    with pytest.raises(error, match=said):
        shardload.concat(*parts, **how)


def test_a_pattern_is_put_into_the_order_of_numbers(tmp_path: Path) -> None:
    """Without a coordinate; wrong if run.10 came before run.2. `join` has the same order."""
    for k, number in enumerate((1, 2, 10)):
        write(tmp_path / f"run.{number}.h5", k)
    pattern = tmp_path / "run.*.h5"
    one = shardload.concat(pattern)
    assert [os.path.basename(part) for part in one.parts] == ["run.1.h5", "run.2.h5", "run.10.h5"]
    np.testing.assert_array_equal(load(one), WHOLE)
    np.testing.assert_array_equal(load(one, select=slice(4, 9)), WHOLE[4:9])
    shardload.join(tmp_path / "whole.h5", pattern)
    np.testing.assert_array_equal(stored_in(tmp_path / "whole.h5", "x"), WHOLE)
    refused("not of their numbers", sorted(map(str, tmp_path.glob("run.*.h5"))))
    only = shardload.concat(tmp_path / "run.2.h5")
    np.testing.assert_array_equal(load(only), WHOLE[5:8])
    assert shardload.concat([tmp_path / "run.2.h5"]) == only


def levels(path: Path, z: Any) -> str:
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("z", len(z))
        file.createDimension("y", 2)
        file.createVariable("z", "f4", ("z",))[:] = z
        file.createVariable("x", "f4", ("y", "z"))[:] = np.stack([10.0 * np.asarray(z) + row for row in range(2)])
    return str(path)


def test_a_pattern_is_put_into_the_order_of_the_numbers(tmp_path: Path) -> None:
    """The coordinate falls here, along the second axis; if it has another order, nothing is joined."""
    files = [levels(tmp_path / f"{k}.nc", z) for k, z in ((8, [9, 8]), (9, []), (10, [7, 6, 5, 4]), (11, [3, 2, 1]))]
    whole = shardload.concat(str(tmp_path / "*.nc"), along="z")
    z = np.arange(9.0, 0, -1)
    np.testing.assert_array_equal(load(whole, "z"), z)
    np.testing.assert_array_equal(load(whole), [10 * z, 10 * z + 1])
    np.testing.assert_array_equal(load(whole, select={"z": shardload.near(6)}), [60, 61])
    said = r"'/z' does not go on .* '.*{}.nc' ends with 1.0, and '.*{}.nc'.*Pass a list of the parts in"
    refused(said.format(1, 8), [files[-1], *files[:-1]], along="z")
    levels(tmp_path / "o1.nc", [2, 1]), levels(tmp_path / "o2.nc", [4, 3])
    refused(said.format("o1", "o2"), str(tmp_path / "o*.nc"), along="z")
    levels(tmp_path / "rises.nc", [10, 11])
    refused(r"'/z' rises in '.*rises.nc' and falls in '.*8.nc'", [tmp_path / "rises.nc", files[0]], along="z")
    joined = shardload.join(tmp_path / "whole.h5", str(tmp_path / "[0-9]*.nc"), axis="z").path
    np.testing.assert_array_equal(stored_in(joined, "z"), z)
    np.testing.assert_array_equal(stored_in(joined, "x"), [10 * z, 10 * z + 1])


def test_each_file_a_step(tmp_path: Path) -> None:
    for k in range(3):
        write(tmp_path / f"step{k}.h5", 0, x=WHOLE[k : k + 1], t=float(30 - k))
    steps = shardload.concat(tmp_path / "step*.h5", stack="t")  # whose time falls, and is known by its values alone
    np.testing.assert_array_equal(load(steps), WHOLE[:3, None])
    np.testing.assert_array_equal(load(steps, "t", dtype="f4"), [30, 29, 28])
    refused(r"along is 0 and stack 't'. Pass one: along= if", tmp_path / "step*.h5", 0, stack="t")


def test_it_is_a_path_of_its_own(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{k}.h5", k) for k in range(3)]
    one = shardload.concat(files)
    assert re.fullmatch(r"concat://0.h5 to 2.h5 \(3 files along 0, [0-9a-f]{8}\)", str(one))
    assert "/x (12, 2) float32: in all parts" in one.summary and one.parts == tuple(files)
    for other in (pickle.loads(pickle.dumps(one)), copy.copy(one)):
        assert other == one and other.image == one.image
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.fingerprint = ""  # type: ignore[misc]
    some = shardload.concat(files[1:])
    two = shardload.load([one, some], Mesh(np.array(jax.devices()[:1]), "a"), P(), dataset="x")
    for x, expected in zip(two, (WHOLE, WHOLE[5:]), strict=True):
        np.testing.assert_array_equal(np.asarray(x), expected)
    listed = shardload.open(one)
    assert list(listed) == ["/x"] and listed["x"].shape == (12, 2) and listed["x"].n_parts == 3
    with pytest.raises(SourceError, match=r"is the text of a concatenation.* Pass what shardload.concat returned"):
        shardload.open(f"{one}:/x")
    with pytest.raises(ConfigError, match="holds 2 arrays; name one, as in dataset='/x'"):
        load(shardload.concat([write(tmp_path / "two.h5", 0, y=WHOLE[:5])]), None)
    refused("parts is 5; expected the paths of the files, or a pattern", 5)
    for call in (shardload.open, load):
        with pytest.raises(ConfigError, match="untrusted=True opens a file in another process"):
            call(one, untrusted=True)


def test_files_in_other_folders_and_outside_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be anywhere; what one of them leads to has to be in a folder of theirs."""
    files = [write(tmp_path / f"f{k}" / "x.h5", k) for k in range(3)]
    np.testing.assert_array_equal(load(shardload.concat(str(tmp_path / "f*" / "x.h5"))), WHOLE)
    monkeypatch.chdir(tmp_path / "f0")
    relative = shardload.concat(["x.h5", "../f1/x.h5", "../f2/x.h5"])
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(load(relative), WHOLE)
    (tmp_path / "links").mkdir()
    os.symlink(files[0], tmp_path / "links" / "soft.h5")
    np.testing.assert_array_equal(load(shardload.concat([tmp_path / "links" / "soft.h5", files[1]])), WHOLE[:8])
    leading = [str(tmp_path / "links" / f"l{k}.h5") for k in (0, 1)]
    for k, path in enumerate(leading):
        with h5py.File(path, "w") as file:
            file["x"] = h5py.ExternalLink(files[k], "/x")
    refused("links/l0.h5.*outside the folder of this file; pass allow_external=True", leading, error=SourceError, dataset="x")
    np.testing.assert_array_equal(load(shardload.concat(leading, dataset="x", allow_external=True)), WHOLE[:8])


def test_what_is_the_same_in_all_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first file, if it is long; else the concatenation has it."""
    files = [write(tmp_path / f"{k}.h5", k, g=np.arange(30.0), n=7) for k in range(3)]
    long = {"dataset": ["x", "n"]}
    assert "/n () int64: stored here, the same in all parts" in shardload.concat(files, **long).summary  # type: ignore[arg-type]
    refused("dataset=", [*files[:2], write(tmp_path / "9.h5", 2, n=7)])  # "g" has an axis 0, too
    monkeypatch.setattr("shardload.jobs.joining.parts._STORED_NBYTES", 8)
    nets = [levels(tmp_path / f"{k}.nc", [k]) for k in range(2)]
    for path in nets:
        with netCDF4.Dataset(path, "a") as file:
            file.createVariable("mask", "f4", ("y",))[:] = [4, 5]
    pair = shardload.concat(nets, "z")
    assert "/mask (2,) float32: the same in all parts" not in pair.summary  # 8 bytes
    monkeypatch.setattr("shardload.jobs.joining.parts._STORED_NBYTES", 7)
    pair = shardload.concat(nets, "z")
    assert "/mask (2,) float32: the same in all parts" in pair.summary
    np.testing.assert_array_equal(load(pair, "mask"), [4, 5])


def test_each_file_is_opened_once_to_look_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if it were opened again for its arrays, and to read their coordinate: five times, for two arrays."""
    for k, z in enumerate(([9, 8], [3, 2, 1])):
        levels(tmp_path / f"{k}.nc", z)
    opened_paths, right = list[str](), lookup.format_of
    monkeypatch.setattr(
        lookup, "format_of", lambda path, *rest: (opened_paths.append(os.path.basename(path)), right(path, *rest))[1]
    )
    pair = shardload.concat(str(tmp_path / "*.nc"), "z")
    assert sorted(opened_paths) == ["0.nc", "1.nc"]
    monkeypatch.undo()
    np.testing.assert_array_equal(load(pair, "z"), [9, 8, 3, 2, 1])


def test_a_copy_of_a_pattern(tmp_path: Path) -> None:
    for k, z in enumerate(([9, 8], [3, 2, 1])):
        levels(tmp_path / f"{k}.nc", z)
    pattern, z = str(tmp_path / "*.nc"), np.array([9.0, 8, 3, 2, 1])
    for source, target, names in ((pattern, "all.zarr", {"x", "z"}), (f"{pattern}:/z", "z.zarr", {"z"})):
        ok("copy", source, str(tmp_path / target), "--along", "z")
        group = zarr.open_group(tmp_path / target, mode="r")
        assert set(group) == names
        np.testing.assert_array_equal(group["z"][...], z)
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "all.zarr")["x"][...], [10 * z, 10 * z + 1])
    code, _, said = run("copy", str(tmp_path / "no*.nc"), str(tmp_path / "no.zarr"), columns=400)
    assert code and "no file matches" in said


def test_zarr_is_copied_first(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("x", data=WHOLE)
    refused("only HDF5 and netCDF4 files can be joined. Copy it first: `shardload copy", [tmp_path / "a.zarr"])


@pytest.mark.parametrize("most_kept", [2, 4])
def test_files_at_urls_are_opened_together_however_many_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_kept: int
) -> None:
    """Wrong if those beyond the ones that stay open were opened one after the other; also where what is the same in all is
    compared. Each answer comes only when the next file of its pair is asked for, too.
    """
    pytest.importorskip("obstore")
    monkeypatch.setattr("shardload.jobs.joining.parts._MOST_KEPT", most_kept)
    for k in range(5):
        with h5py.File(tmp_path / f"f{k}.h5", "w") as file:
            for name, values in {"time": np.arange(2.0) + 2 * k, "lat": np.arange(3.0)}.items():
                file[name] = values
                file[name].make_scale(name)
            file["x"] = np.arange(6 * k, 6 * k + 6, dtype="f4").reshape(2, 3)
            for axis, name in enumerate(("time", "lat")):
                file["x"].dims[axis].attach_scale(file[name])
    pairs = [threading.Barrier(2), threading.Barrier(2)]

    def hold(key: str) -> bool:
        if key[:-3] != "f0":
            pairs[(int(key[1]) - 1) // 2].wait(20)
        return False

    with ObjectServer(tmp_path) as server:
        server.faults.only = hold
        one = shardload.concat([f"{server.url}/f{k}.h5" for k in range(5)], "time")
        server.faults.only = lambda key: False
        n_again = 4 if most_kept == 2 else 0  # all but the first, if not all stay open
        assert len(server.log) == 5 + n_again + 5, "each is opened, and asked for its version in the end"
        np.testing.assert_array_equal(load(one), np.arange(30.0).reshape(10, 3))


def test_what_belongs_to_a_named_array_is_at_urls_too(tmp_path: Path) -> None:
    """Wrong if only the arrays that are named were known there: bounds, or a large coordinate, are joined with them."""
    pytest.importorskip("obstore")
    for k in range(2):
        with netCDF4.Dataset(tmp_path / f"f{k}.nc", "w") as file:
            for dim, n in {"time": None, "y": 3, "nv": 2}.items():
                file.createDimension(dim, n)
            for name, dims in {"time": ["time"], "bounds": ["time", "nv"], "height": ["time", "y"], "t": ["time", "y"]}.items():
                shape = tuple({"time": 4, "y": 3, "nv": 2}[dim] for dim in dims)
                variable = file.createVariable(name, "f4", dims)
                variable[...] = np.arange(np.prod(shape)).reshape(shape) + 100 * k
            file["time"].bounds, file["t"].coordinates = "bounds", "height"
    paths = [f"{tmp_path}/f{k}.nc" for k in range(2)]
    local = shardload.concat(paths, dataset="t")
    with ObjectServer(tmp_path) as server:
        one = shardload.concat([f"{server.url}/f{k}.nc" for k in range(2)], dataset="t")
        for name in ("t", "height", "bounds", "time"):
            np.testing.assert_array_equal(load(one, name), load(local, name), name)
    assert load(local, "height")[5, 1] == 104


def test_few_values_in_many_files_at_urls_are_asked_for_together(tmp_path: Path) -> None:
    """Wrong if what rank 0 reads itself (small arrays, coordinates) came from one file after the other. Each answer comes only
    when all files are asked.
    """
    pytest.importorskip("obstore")
    for k in range(3):
        with netCDF4.Dataset(tmp_path / f"f{k}.nc", "w") as file:
            for dim, n in {"time": None, "y": 3}.items():
                file.createDimension(dim, n)
            for name in ("height", "t"):
                file.createVariable(name, "f4", ["time", "y"])[...] = np.arange(12).reshape(4, 3) + 12 * k
            file["t"].coordinates = "height"
    with ObjectServer(tmp_path) as server:
        one = shardload.concat([f"{server.url}/f{k}.nc" for k in range(3)], "time")
        barrier = threading.Barrier(3)
        server.faults.only = lambda key: barrier.wait(20) < 0
        np.testing.assert_array_equal(load(one, "t"), np.arange(36).reshape(12, 3))
        np.testing.assert_array_equal(shardload.open(one)["t"].coords["height"].values, np.arange(36).reshape(12, 3))


def test_a_part_at_a_url_is_opened_without_a_look_at_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if each were looked through for some to close, though none may be: of 2000 files that is 6 million looks a load."""
    pytest.importorskip("obstore")
    looks = list[Any]()
    monkeypatch.setattr(tiles, "_MOST_OPEN", 1)
    monkeypatch.setattr(tiles.Tiles, "_may_close", lambda _, part: looks.append(part))
    paths = [write(tmp_path / f"f{k}.h5", k) for k in range(3)]
    with ObjectServer(tmp_path) as server:
        np.testing.assert_array_equal(load(shardload.concat([f"{server.url}/f{k}.h5" for k in range(3)])), WHOLE)
    assert not looks
    np.testing.assert_array_equal(load(shardload.concat(paths)), WHOLE)
    assert looks


def test_a_store_that_refuses_the_last_question_is_an_error_of_the_file(tmp_path: Path) -> None:
    """Wrong if it were a rank's, as the error of a defect is."""
    pytest.importorskip("obstore")
    for k in range(2):
        write(tmp_path / f"f{k}.h5", k)
    with ObjectServer(tmp_path) as server:
        server.faults.status, server.faults.only = 403, lambda key: len(server.log) > 1
        urls = [f"{server.url}/f{k}.h5" for k in range(2)]
        refused(r"f[01]\.h5' cannot be read: access is denied", urls, error=SourceError)
        assert len(server.gets()) == 2
