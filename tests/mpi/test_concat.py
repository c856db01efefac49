"""Are several files, taken for one by `concat`, loaded, planned, copied and streamed as the one that they would be?

Yearly netCDF files of different lengths, whose names are in another order than their times; netCDF4's library and NumPy are the
judges. Every value is its flat index in the whole, and all axes have lengths of their own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, PeerError, SourceError
from tests.mpi.support import backwards, check, on_root, ramp, same_error

LENGTHS = (("y8", 2001, 7), ("y9", 2002, 4), ("y10", 2003, 9))  # in the order of the numbers, which is that of time
N, LAT, LON = 20, 6, 8
DATA = ramp((N, LAT, LON))
N_CHUNKS = {"t2m": N * 2 * 2, "flux": 20}
Array = np.ndarray[Any, Any]


def write(folder: Path, chunk: int = 1) -> str:
    """A file for each year; returns the pattern. The packed variable has two chunks along each axis but time."""
    start = 0
    for name, year, n in LENGTHS:
        with netCDF4.Dataset(folder / f"{name}.nc", "w") as file:
            for dim, length in (("time", None), ("lat", LAT), ("lon", LON)):
                file.createDimension(dim, length)
            time = file.createVariable("time", "f8", ("time",))
            time.units, time.calendar = f"days since {year}-01-01", "noleap"
            time[:] = np.arange(n) * 30.0
            file.createVariable("lat", "f4", ("lat",))[:] = np.arange(LAT) * 10
            t2m = file.createVariable("t2m", "i2", ("time", "lat", "lon"), zlib=True, chunksizes=(chunk, 3, 5), fill_value=-9)
            t2m.scale_factor, t2m.add_offset = np.float32(0.5), np.float32(20)
            t2m.set_auto_maskandscale(False)
            t2m[:] = DATA[start : start + n].astype("i2")
            flux = file.createVariable("flux", "f4", ("lat", "time", "lon"), chunksizes=(LAT, 1, LON))
            flux[:] = np.moveaxis(DATA[start : start + n], 0, 1)
            file.createVariable("land", "i4", ("lat", "lon"))[:] = ramp((LAT, LON), "i4")
        start += n
    return str(folder / "*.nc")


@pytest.fixture(scope="module")
def pattern(comm: Any, tmp_path_factory: Any) -> str:
    found: str = on_root(comm, lambda: write(tmp_path_factory.mktemp("years")))
    return found


@pytest.fixture(scope="module")
def years(pattern: str) -> shardload.Concatenation:
    return shardload.concat(pattern, along="time")


def test_all_ranks_have_the_same(comm: Any, pattern: str, years: shardload.Concatenation) -> None:
    assert [os.path.basename(part) for part in years.parts] == ["y8.nc", "y9.nc", "y10.nc"], "not in the order of the numbers"
    assert comm.allgather((years, years.image)) == [(years, years.image)] * comm.size
    listed = shardload.concat([pattern.replace("*", name) for name, *_ in LENGTHS], "time")
    assert listed == years and listed.fingerprint == years.fingerprint


@pytest.mark.parametrize("readers", ["root", "parallel", "direct", 2])
@pytest.mark.parametrize("spec", [P("a"), P(None, "b", "a")])
def test_load(years: shardload.Concatenation, readers: Any, spec: Any) -> None:
    mesh = backwards()
    x = shardload.load(years, mesh, spec, dataset="t2m", decode=True, readers=readers, verify="checksum", pad=-1)
    whole = shardload.unpad(x, numpy=True)
    np.testing.assert_array_equal(whole, DATA * np.float32(0.5) + np.float32(20))
    flux = shardload.load(years, mesh, P("b", None, "a"), dataset="flux", readers=readers)
    check(flux, np.moveaxis(DATA, 0, 1), mesh, P("b", None, "a"))
    shardload.verify(flux, years, dataset="flux")
    tree = shardload.load(years, mesh, P(), dataset=["land", "lat"], readers=readers)
    check(tree[0], ramp((LAT, LON), "i4"), mesh, P())
    check(tree[1], np.arange(LAT, dtype="f4") * 10, mesh, P())


def test_each_chunk_is_decoded_once(years: shardload.Concatenation) -> None:
    """Also if steps are taken across the new year, of which two files have some."""
    mesh = backwards()
    plan = shardload.plan(years, mesh, P(None, None, "a"), dataset="t2m", decode=False, readers="parallel")
    check(plan.execute(), DATA.astype("i2"), mesh, P(None, None, "a"))
    assert plan.report is not None and plan.report.chunks_decoded == N_CHUNKS["t2m"]
    select = {"time": shardload.between("2001-06-01", "2002-03-31"), "lat": slice(1, 5)}
    plan = shardload.plan(years, mesh, P(None, "b"), dataset="t2m", decode=False, select=select, readers="parallel")
    check(plan.execute(), DATA[6:10, 1:5].astype("i2"), mesh, P(None, "b"))
    assert plan.report is not None and plan.report.chunks_decoded == 4 * 2 * 2


def test_chunks_that_do_not_end_with_their_file(comm: Any, shared_tmp_path: Path) -> None:
    pattern = on_root(comm, lambda: write(shared_tmp_path, chunk=3))
    mesh, years = backwards(), shardload.concat(pattern)
    for readers in ("root", "parallel", "direct"):
        x = shardload.load(years, mesh, P(None, "b", "a"), dataset="t2m", decode=False, readers=readers)
        check(x, DATA.astype("i2"), mesh, P(None, "b", "a"))


def test_copy(comm: Any, years: shardload.Concatenation, shared_tmp_path: Path) -> None:
    target = str(shared_tmp_path / "all.zarr")
    report = shardload.copy(years, target, comm=comm, chunks=(4, 6, 8), dataset=("t2m", "flux"))
    group = zarr.open_group(target, mode="r")
    np.testing.assert_array_equal(group["t2m"][...], DATA.astype("i2"))
    np.testing.assert_array_equal(group["flux"][...], np.moveaxis(DATA, 0, 1))
    counted = [30 * k + (0, 365, 730)[year] for year, (_, _, n) in enumerate(LENGTHS) for k in range(n)]
    np.testing.assert_array_equal(group["time"][...], counted)
    assert report.n_decoded == sum(N_CHUNKS.values())


@pytest.mark.parametrize("prefetch", [0, 1])
def test_stream_and_resume(comm: Any, years: shardload.Concatenation, prefetch: int) -> None:
    mesh, spec = backwards(), P(None, None, "a")
    how: dict[str, Any] = {"dataset": "t2m", "along": "time", "batch": 3, "window": (-1, 1), "shuffle": 5, "decode": True}
    how |= {"gaps": "ignore", "prefetch": prefetch}
    values = DATA * np.float32(0.5) + np.float32(20)
    given = []
    with iter(shardload.stream(years, mesh, spec, **how)) as it:
        for k, batch in enumerate(it):
            check(batch, values[it.index[:, None] + np.array([-1, 1])], mesh, spec)
            given.append(it.index.tolist())
            if k == 1:
                state = json.loads(json.dumps(it.get_state()))
        assert it.report.chunks_decoded == N_CHUNKS["t2m"]
    assert len(given) == 6
    with iter(shardload.stream(shardload.concat(years.parts, "time"), mesh, spec, **how)) as it:
        it.set_state(state)
        assert [it.index.tolist() for _ in it] == given[2:]
    fewer = shardload.stream(shardload.concat(years.parts[:2], "time"), mesh, spec, **how)
    with iter(fewer) as it:
        same_error(
            comm, lambda: it.set_state(state), ConfigError, "files is ['2 files, y8.nc to y9.nc", "was ['3 files, y8.nc to y10"
        )
    one = shardload.stream(years.parts[0], mesh, spec, **how)
    with iter(one) as it:
        same_error(comm, lambda: it.set_state(state), ConfigError, "files is None, was ['3 files")


def test_what_is_wrong_is_the_same_error_on_all_ranks(comm: Any, pattern: str) -> None:
    gone = [pattern.replace("*", name) for name in ("y8", "x")]
    same_error(comm, lambda: shardload.concat(gone, "time"), SourceError, "x.nc")
    same_error(comm, lambda: shardload.concat(pattern, "tiem"), ConfigError, "along is 'tiem'", "'time'")
    same_error(comm, lambda: shardload.concat(pattern, 1.5), ConfigError, "along is 1.5")  # type: ignore[arg-type]
    if comm.size > 1:  # by the name of the argument
        same_error(comm, lambda: shardload.concat(pattern, "time" if comm.rank else "lat"), PeerError, "along = 'time'")


def test_a_file_that_changes(comm: Any, shared_tmp_path: Path) -> None:
    """Between what was found and a load, and between a plan and its execution."""
    mesh, years = backwards(), shardload.concat(on_root(comm, lambda: write(shared_tmp_path)), "time")
    plan = shardload.plan(years, mesh, P(None, "b"), dataset="flux")
    on_root(comm, lambda: os.utime(shared_tmp_path / "y9.nc", (1, 1)))
    same_error(comm, plan.execute, SourceError, "y9.nc' has changed since it was looked at")
    for name in ("flux", "lat"):  # the second one lies in the concatenation itself
        load = lambda name=name: shardload.load(years, mesh, P(), dataset=name)  # noqa: E731
        error = same_error(comm, load, SourceError, "y9.nc' has changed since shardload.concat looked at it. Call concat again")
        assert "network" not in str(error)  # wrong if files were taken for a URL, because of concat://
    on_root(comm, lambda: os.remove(shared_tmp_path / "y10.nc"))
    same_error(comm, lambda: shardload.load(years, mesh, P(), dataset="flux"), SourceError, "nc' has changed")
