"""What does a save give? One file that the format's own library reads, with the values that JAX has, bit for bit."""

from __future__ import annotations

import errno
import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import netCDF4
import numpy as np
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, LeftOutWarning, PaddingWarning, PeerError, ShardloadError, SourceError, VerifyError
from shardload.arrays.local_shards import ShardSender
from shardload.comm.collectives import MpiCollectives
from shardload.comm.group import group_of
from shardload.engine.read_back import ReadBack
from shardload.formats.hdf5.sink import Hdf5Sink
from shardload.formats.sink import Encoder, Ticket
from shardload.formats.zarr.sink import ZarrSink
from shardload.planning.saving import WriteLayout
from shardload.planning.tuning import Tuning
from shardload.transfer.moves import PiecesToBlocks
from tests.mpi.support import (
    DECOMPOSITIONS,
    check,
    compare,
    counted,
    cube,
    distinct,
    mesh_of,
    on_disk,
    on_root,
    padded,
    put,
    raised,
    ramp,
    same_error,
    sharding_of,
    share,
    turned,
    unit,
)
from tests.unit.files import raising, stored_in, system_error

# xarray, and pandas with it, is imported where it is used: six ranks import this file for what else is here.
Array = np.ndarray[Any, Any]
DTYPES = ("float32", "int16", "bool", "complex64", "float16", "uint8", "int32", "int8")
# How it is stored: the suffix, and keywords of `save`. Chunks that fit into shards, and such that do not.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "HDF5 in one piece": ("h5", {}),
    "HDF5 gzip, auto": ("h5", {"compression": "gzip"}),
    "HDF5 gzip, odd chunks": ("h5", {"compression": {"name": "gzip", "level": 1, "shuffle": True}, "chunks": (3, 5, 7)}),
    "HDF5 planes": ("h5", {"chunks": (1, 10**6, 10**6)}),
    "netCDF4": ("nc", {"compression": "zstd", "chunks": (5, 7, 3)}),
    "Zarr": ("zarr", {}),
    "Zarr blosc": ("zarr", {"chunks": (7, 3, 11), "compression": "blosc"}),
    "Zarr shards": ("zarr", {"chunks": (2, 3, 5), "shards": (6, 9, 10), "compression": "gzip"}),
}


def test_replicas_that_device_put_made(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if they were asked for their shards as JAX 0.10 has them: of a process with one device that is an error of JAX."""
    mesh, path = mesh_of(), shared_tmp_path / "replicas.h5"
    x = jax.device_put(jnp.arange(6, dtype="float32"), NamedSharding(mesh, P()))
    shardload.save(path, {"x": x})
    on_root(comm, lambda: np.testing.assert_array_equal(h5py.File(path)["x"][...], np.arange(6, dtype="float32"), strict=True))
    assert shardload.verify(x, path, how="full").n_elements
    assert shardload.verify(x, path, how="full").n_shards == len(jax.devices())
    np.testing.assert_array_equal(shardload.unpad(x, (5,), numpy=True), np.arange(5, dtype="float32"))
    check(shardload.unpad(x, (5,)), np.arange(5, dtype="float32"), mesh, P())
    if comm.size > 1:  # Wrong if a rank that has none of it took part, or if what cannot be done were proposed.
        alone = jax.device_put(np.zeros(3), jax.devices()[0])
        same_error(
            comm, lambda: shardload.save(path, alone, mode="w"), ConfigError, "SingleDeviceSharding", "shardload.scatter"
        )


def file_at(folder: Path, kind: str, name: str = "out") -> tuple[Path, dict[str, Any]]:
    """The path of a file of this kind, and the keywords."""
    suffix, how = KINDS[kind]
    return folder / f"{name}.{suffix}", how


@pytest.mark.parametrize("mesh", [mesh_of(), turned()], ids=["in order", "turned"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_and_dtype_in_one_file(comm: Any, shared_tmp_path: Path, kind: str, mesh: Any) -> None:
    """Wrong if a part went to another's place, an axis were another's, a replica were added, or a remainder were left out."""
    path, how = file_at(shared_tmp_path, kind)
    tree, values = {}, {}
    known = [dtype for dtype in DTYPES if kind != "netCDF4" or dtype not in ("bool", "complex64", "float16")]
    for k, spec in enumerate(distinct(DECOMPOSITIONS).values()):
        name = f"g{k % 2}/x{k}"
        values[name] = ramp(cube(), known[k % len(known)])
        tree[name] = put(values[name], mesh, spec)
    report = shardload.save(path, tree, staging="300KiB" if kind != "Zarr" else "auto", **how)
    assert report.nbytes == sum(one.nbytes for one in values.values())
    assert report.n_read_back == report.n_chunks >= len(tree)
    assert min(2, comm.size) <= report.n_decoded < max(2, report.n_chunks)  # one device has one chunk
    assert on_disk(comm, shared_tmp_path) == [path.name]
    compare(comm, path, values)


@pytest.mark.parametrize("kind", ["HDF5 in one piece", "HDF5 gzip, odd chunks", "Zarr shards"])
def test_large_arrays_in_many_rounds(comm: Any, shared_tmp_path: Path, kind: str) -> None:
    """Wrong if the memory of a round were used again before it was stored, or a chunk were in two rounds."""
    path, how = file_at(shared_tmp_path, kind)
    n = unit()
    values = ramp((8 * n, 6 * n, 10 * n), "int32")
    tree = {
        str(k): put(values + k, mesh_of(), spec)
        for k, spec in enumerate((P(None, "a", "b"), P("a", "b"), P(None, None, ("a", "b"))))
    }
    if "chunks" in how:
        how = how | {"chunks": (4, 5, 9)} | ({"shards": (8, 10, 18)} if "shards" in how else {})
    plan = shardload.plan_save(path, tree, staging="96KiB", **how)
    assert plan.n_rounds >= 6 and (any(plan.travels) or comm.size < 4), plan
    shardload.save(path, tree, staging="96KiB", **how)
    compare(comm, path, {str(k): values + k for k in range(3)})


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("kind", "most"), [("HDF5 in one piece", 13), ("Zarr", 13), ("HDF5 gzip, auto", 17)])
def test_how_often_ranks_wait_for_each_other(
    comm: Any, shared_tmp_path: Path, kind: str, most: int, tune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a save of one small array agreed once more than it must: each time costs what the latest rank costs."""
    tune(**asdict(Tuning()))  # small arrays travel as small ones do
    (path, how), x = file_at(shared_tmp_path, kind), put(ramp(cube()), mesh_of(), P("a", "b"))
    shardload.save(path, x, **how)
    counts: Counter[str] = Counter()
    counted(monkeypatch, counts, MpiCollectives, "_finish")
    shardload.save(path, x, mode="w", **how)
    assert max(waits := comm.allgather(counts["_finish"])) <= most, waits


@pytest.mark.any_version
@pytest.mark.any_library
@pytest.mark.mpi(min_size=4)
def test_another_node_reads_back(own_comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: Any) -> None:
    """Wrong if a node read back what it wrote itself, from its own memory; or if nodes wrote over each other's pages."""
    pairs, right = list[tuple[int, int]](), ReadBack.__init__

    def noted(self: Any, sink: Any, ticket: Any, rows: Any, writer: int, reader: int) -> None:
        pairs.append((writer // 2, reader // 2))
        right(self, sink, ticket, rows, writer, reader)

    monkeypatch.setenv("SHARDLOAD_RANKS_PER_NODE", "2")
    tune(worth_sharing_nbytes=1)  # as 0, with which tests/jobs/scripts/ways.py counts: here messages are right
    monkeypatch.setattr(ReadBack, "__init__", noted)
    tree = {str(k): put(ramp(cube()), mesh, P(None, "b", "a")) for k, mesh in enumerate((mesh_of(), turned()))}
    for kind in ("HDF5 in one piece", "HDF5 gzip, odd chunks", "Zarr shards"):
        path, how = file_at(shared_tmp_path, kind, kind[-3:])
        report = shardload.save(path, tree, comm=own_comm, **how)
        assert report.n_read_back == report.n_chunks and report.n_read_back >= 2
        compare(own_comm, path, dict.fromkeys(tree, ramp(cube())))
    assert all(writer != reader for writer, reader in pairs) and len(pairs) == 3


@pytest.mark.any_library
def test_others_open_it(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if xarray, netCDF4, TensorStore or zarr found other names, coordinates, attributes or values."""
    import xarray

    nz, ny, nx = cube()
    values, z = ramp(cube()), np.arange(nz, dtype="float64") / 4
    tree = {"rho": put(values, mesh_of(), P(None, "a", "b")), "z": z, "run": jnp.int32(7)}
    how: dict[str, Any] = {
        "dims": {"rho": ("z", "y", "x"), "z": ("z",)},
        "attrs": {"rho": {"units": "kg/m3"}, "/": {"title": "a run"}, "Header/": {"BoxSize": 100.0}},
        "compression": {"rho": "gzip"},
    }
    how["attrs"] |= {"g/": {"step": 3}, "g": {"n": {"units": "m"}}}  # nested as the arrays are
    how["dims"]["g"] = {"n": ("i",)}
    tree["g"] = {"n": np.arange(3)}
    for name in ("out.nc", "out.zarr"):
        shardload.save(shared_tmp_path / name, tree, **how)

    def look() -> None:
        for name, engine in (("out.nc", "h5netcdf"), ("out.zarr", "zarr")):
            with xarray.open_dataset(shared_tmp_path / name, engine=engine) as found:  # type: ignore[arg-type]
                assert dict(found.sizes) == {"z": nz, "y": ny, "x": nx}
                assert found.attrs["title"] == "a run" and found.rho.attrs["units"] == "kg/m3"
                np.testing.assert_array_equal(found.rho.values, values, strict=True)
                np.testing.assert_array_equal(found.rho.z.values, z, strict=True)
                assert int(found.run) == 7
            for group, attrs in (("Header", {"BoxSize": 100.0}), ("g", {"step": 3})):
                with xarray.open_dataset(shared_tmp_path / name, engine=engine, group=group) as found:  # type: ignore[arg-type]
                    assert found.attrs == attrs and (group != "g" or (found.n.attrs, found.n.dims) == ({"units": "m"}, ("i",)))
        with netCDF4.Dataset(shared_tmp_path / "out.nc") as file:
            np.testing.assert_array_equal(file["rho"][...].data, values)
            assert file["rho"].dimensions == ("z", "y", "x") and file["rho"].filters()["zlib"]
        kvstore = {"driver": "file", "path": str(shared_tmp_path / "out.zarr" / "rho")}
        store = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result()
        np.testing.assert_array_equal(store.read().result(), values)

    on_root(comm, look)


@pytest.mark.any_version
@pytest.mark.any_library
def test_padding_is_not_written(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the file had the padded shape, or lost what the last shard has of the file."""
    shape = (8 * len(jax.devices()) + 1, 5, 4 * len(jax.devices()) - 1)
    values, mesh, spec = ramp(shape), mesh_of(), P("b", None, "a")
    source = shared_tmp_path / "source.h5"
    shardload.save(source, values)
    plan = shardload.plan(source, mesh, spec, pad=-1)
    x = plan.execute()
    twice = put(padded(2 * values, mesh, spec, 99), mesh, spec)
    whole = {"shape": {"data": twice.shape}}
    for k, (given, how) in enumerate([(x, {}), (twice, {"plan": plan}), (twice, {"shape": shape}), (twice, whole)]):
        for kind in ("HDF5 in one piece", "HDF5 gzip, odd chunks", "Zarr"):
            path, more = file_at(shared_tmp_path, kind, f"out{k}")
            shardload.save(path, given, mode="w", **how, **more)
            other = padded(2 * values, mesh, spec, 99) if how is whole else 2 * values
            compare(comm, path, {"data": values if given is x else other})
    path = shared_tmp_path / "no.h5"
    x.delete()  # as one that was donated
    if comm.size > 1:  # or nothing is padded
        says = ("only with its padding", f"pass shape={{'data': {shape}}}; if not, shape={{'data': {twice.shape}}}")
        same_error(comm, lambda: shardload.save(path, twice), PaddingWarning, *says)
        # Wrong if a sum over an axis, behind which the others have other numbers, were saved with padding without a word.
        total, says_of_total = twice.sum(1), f"pass shape={{'data': {(shape[0], shape[2])}}}; if not, shape={{'data': "
        same_error(comm, lambda: shardload.save(path, total), PaddingWarning, says_of_total)
        shardload.save(path, total, mode="w", shape=(shape[0], shape[2]))
        compare(comm, path, {"data": 2 * values.sum(1)})
        on_root(comm, path.unlink)
        same_error(comm, lambda: shardload.save(path, {"a\0b": twice}), ConfigError, "an array is called '/a\\x00b'")
        many, says = {f"a{k}": twice for k in range(99)}, (f"'a0' {twice.shape}", "and ")
        assert len(str(same_error(comm, lambda: shardload.save(path, many), PaddingWarning, *says))) < 2000
    same_error(comm, lambda: shardload.save(path, twice, shape=(1, 2)), ConfigError, "cannot be (1, 2) with padding")
    tree = shardload.plan(source, mesh, spec, dataset={"a": "data"}, pad=-1)
    says = ("plan does not match the arrays: only plan has ['a']",)
    same_error(comm, lambda: shardload.save(path, {"b": twice}, plan=tree), ConfigError, *says)
    halo = shardload.load(source, mesh_of(), P(None, None, None), halo=(0, 1))
    same_error(comm, lambda: shardload.save(path, halo), ConfigError, "has halos", "shardload.unpad(x)")
    planned = {"plan": shardload.plan(source, mesh_of(), P(None, None, None), halo=(0, 1))}
    same_error(comm, lambda: shardload.save(path, 2 * halo, **planned), ConfigError, "has halos", "shardload.unpad(x, plan)")
    same_error(comm, lambda: shardload.save(path, 2 * halo), PaddingWarning, "only with its halos", "shardload.unpad(x, plan)")
    assert not path.exists()


@pytest.mark.mpi(min_size=2)
def test_replicas_that_differ(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if one of them were written, and nobody knew that another was there."""
    values = ramp(cube())
    mine = values + (np.arange(values.size).reshape(values.shape) == values.size - 1) * (comm.rank == comm.size - 1)
    path = shared_tmp_path / "out.h5"
    for x in (put(mine, mesh_of(), P()), mine):
        same_error(comm, lambda x=x: shardload.save(path, {"a/b": x}), VerifyError, "'/a/b' have other values")  # type: ignore[misc]
        assert on_disk(comm, shared_tmp_path) == []


def test_a_mesh_of_some_ranks(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if ranks without a device of the mesh were not asked to encode, or had to hold what they do not."""
    devices = jax.devices()[: max(1, len(jax.devices()) // 2)]
    values, mesh = ramp(cube()), Mesh(np.array(devices[::-1]), "a")
    for how in ({"compression": "gzip", "chunks": (4, 4, 4)}, {}):
        x = put(values, mesh, P(None, "a"))
        report = shardload.save(shared_tmp_path / "out.h5", x, mode="w", verify="full", **how)
        assert report.n_decoded == report.n_chunks
        compare(comm, shared_tmp_path / "out.h5", {"data": values})


def test_empty_scalar_and_numpy_arrays(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if an array without elements or axes could not be saved."""
    tree = {"empty": put(np.empty((0, 3), "float32"), mesh_of(), P()), "one": jnp.float32(2.5), "np": np.arange(5)}
    for name in ("out.h5", "out.zarr", "out.nc"):
        shardload.save(shared_tmp_path / name, tree, compression="gzip")
        values = {"empty": np.empty((0, 3), "float32"), "one": np.array(2.5, "float32"), "np": np.arange(5)}
        compare(comm, shared_tmp_path / name, values)


@pytest.mark.any_library
def test_like_another_array(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the new array had another layout, a coordinate were left out without a word, or what the caller passes did not
    count.
    """
    import xarray

    shape, values = cube(), ramp(cube())

    def make() -> None:
        z = xarray.DataArray(np.arange(float(shape[0])), dims="z", attrs={"units": "m"})
        rho = (("z", "y", "x"), np.zeros(shape, "float32"), {"units": "kg", "long": "density"})
        chunks = {"rho": {"zlib": True, "shuffle": True, "fletcher32": True, "chunksizes": (2, 3, 5)}}
        xarray.Dataset({"rho": rho}, coords={"z": z}).to_netcdf(shared_tmp_path / "in.nc", engine="h5netcdf", encoding=chunks)

    on_root(comm, make)
    x = put(values, mesh_of(), P("a", "b"))
    like = f"{shared_tmp_path}/in.nc:/rho"
    tree, z = {"vel": x, "z": np.arange(float(shape[0]))}, like.replace("rho", "z")
    shardload.save(shared_tmp_path / "out.nc", tree, like={"vel": like, "z": z}, attrs={"vel": {"units": "m/s"}})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        shardload.save(shared_tmp_path / "own.h5", x, like=like, chunks=(1, 2, 3), compression="zstd", verify="full")
    assert comm.rank or any("'/z'" in str(warning.message) for warning in told)

    def look() -> None:
        with xarray.open_dataset(shared_tmp_path / "out.nc", engine="h5netcdf") as found:
            np.testing.assert_array_equal(found.vel.values, values)
            assert found.vel.attrs == {"units": "m/s", "long": "density"} and found.z.attrs == {"units": "m"}
            np.testing.assert_array_equal(found.vel.z.values, np.arange(float(shape[0])))
        with h5py.File(shared_tmp_path / "out.nc") as file:
            one = file["vel"]
            assert (one.chunks, one.compression, one.shuffle, one.fletcher32) == ((2, 3, 5), "gzip", True, True)
        with h5py.File(shared_tmp_path / "own.h5") as file:
            assert file["data"].chunks == (1, 2, 3) and file["data"].attrs["units"] == "kg" and set(file) == {"data"}

    on_root(comm, look)
    no, says = shared_tmp_path / "no.h5", "in.nc' holds no array '/rhoo'. Arrays in the file"
    same_error(comm, lambda: shardload.save(no, x, like=f"{shared_tmp_path}/no.nc"), SourceError, "no.nc")
    same_error(comm, lambda: shardload.save(no, x, like=7), ConfigError, "'/data': like is 7")
    same_error(comm, lambda: shardload.save(no, x, like=f"{like}o"), ConfigError, "like of '/data': '", says)
    assert not no.exists()


@pytest.mark.parametrize("where", ["on all ranks", "on the last rank"])
@pytest.mark.parametrize("call", ["save", "plan_save"])
def test_a_warning_that_is_an_error(comm: Any, shared_tmp_path: Path, call: str, where: str) -> None:
    """Wrong if ranks raised different errors, some went on without the others, a file were left, or the next call failed."""
    path = shared_tmp_path / "out.h5"
    shardload.save(shared_tmp_path / "in.nc", {"x": np.arange(3), "t": np.arange(3)}, dims={"x": ("t",), "t": ("t",)})
    is_error = where == "on all ranks" or comm.rank == comm.size - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error" if is_error else "ignore")
        with pytest.raises(LeftOutWarning, match="'/t'"):
            getattr(shardload, call)(path, np.arange(2), like=f"{shared_tmp_path}/in.nc:/x")
    assert not group_of(comm).is_torn
    assert on_disk(comm, shared_tmp_path) == ["in.nc"]
    shardload.save(path, np.arange(2))
    compare(comm, path, {"data": np.arange(2)})


@pytest.mark.parametrize("kind", ["h5", "nc", "zarr"])
def test_what_marks_missing_data(comm: Any, shared_tmp_path: Path, kind: str) -> None:
    """Wrong if xarray could not open the file, or did not see which values are missing."""
    import xarray

    name, engine = f"x.{kind}", {"h5": "h5netcdf", "nc": "netcdf4", "zarr": "zarr"}[kind]
    shape = cube()
    values = ramp(shape, "int16")
    values[0, 0, 0] = -9

    def make() -> None:
        with netCDF4.Dataset(shared_tmp_path / "in.nc", "w") as file:
            for dim, n in zip("zyx", shape, strict=True):
                file.createDimension(dim, n)
            one = file.createVariable("t", "i2", ("z", "y", "x"), fill_value=-9)
            one.setncatts({"scale_factor": np.float32(0.1), "units": "K"})
            level = file.createVariable("z", "i2", ("z",))
            level.scale_factor = 0.5
            for variable, whole in ((one, values), (level, np.arange(shape[0]))):
                variable.set_auto_maskandscale(False)
                variable[...] = whole

    on_root(comm, make)
    packed, like = put(values, mesh_of(), P("a", "b")), f"{shared_tmp_path}/in.nc:/t"
    decoded = put(np.where(values == -9, np.nan, values * np.float32(0.1)).astype("float32"), mesh_of(), P("a", "b"))
    level, likes = np.arange(shape[0], dtype="int16"), {"t": like, "z": like.removesuffix("t") + "z"}
    plain = put(values.astype("float32"), mesh_of(), P("a", "b"))
    whole = np.ma.masked_array(np.arange(3.0), False)  # as netCDF4-python gives it
    shardload.save(shared_tmp_path / f"packed-{name}", {"t": packed, "z": level}, like=likes)
    shardload.save(shared_tmp_path / f"decoded-{name}", {"t": decoded, "z": level}, like=likes)
    for k, fill in enumerate((-9, -9.0, np.float32(-9), np.nan, None)):
        shardload.save(shared_tmp_path / f"{k}-{name}", {"t": plain, "w": whole}, attrs={"t": {"_FillValue": fill}})

    def look() -> None:
        with xarray.open_dataset(shared_tmp_path / "in.nc", engine="netcdf4") as found:
            wanted, levels = found.t.values, found.z.values
        for start in ("packed", "decoded"):
            with xarray.open_dataset(shared_tmp_path / f"{start}-{name}", engine=engine) as found:
                exact = start == "decoded" or not kind.startswith("zarr")  # JSON makes the scale factor a float64
                np.testing.assert_allclose(found.t.values, wanted, rtol=0 if exact else 1e-6)
                np.testing.assert_array_equal(found.z.values, levels)
                assert found.t.units == "K" and (found.t.dtype == wanted.dtype or not exact)
        for k in range(5):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # h5netcdf: axes have no names
                with xarray.open_dataset(shared_tmp_path / f"{k}-{name}", engine=engine) as found:
                    assert np.isnan(found.t.values[0, 0, 0]) == (k < 3)
                    if k == 4:
                        assert "_FillValue" not in found.t.encoding | found.t.attrs
                    else:
                        assert kind == "zarr" or found.t.encoding["_FillValue"].dtype == np.float32
                    np.testing.assert_array_equal(found.w.values, whole)

    on_root(comm, look)


@pytest.mark.parametrize(("stored", "factor"), [("f4", np.float32(0.5)), ("i2", np.int16(3)), ("i2", np.float32(0.5))])
@pytest.mark.parametrize("suffix", ["h5", "nc", "zarr"])
def test_like_knows_whether_a_load_decoded(comm: Any, shared_tmp_path: Path, stored: str, factor: Any, suffix: str) -> None:
    """Wrong if decoded numbers got the factor of the packed ones again, or packed ones lost it: where both have one type, or
    stored integers were loaded as floating point numbers, only the load tells.
    """
    values = ramp(cube(), stored)

    def make() -> None:
        with h5py.File(shared_tmp_path / "in.h5", "w") as file:
            file["t"] = values
            file["t"].attrs["scale_factor"] = factor

    on_root(comm, make)
    like = f"{shared_tmp_path}/in.h5:/t"
    for decode in (True, False):
        how: dict[str, Any] = {"dtype": "float32"} if np.dtype(type(factor)).kind == "f" else {}
        plan = shardload.plan(like, mesh_of(), P("a", "b"), decode=decode, **how)
        x = plan.execute()
        made = {"t": x, "computed": x + 0} if decode else {"t": x}
        path = shared_tmp_path / f"{decode}.{suffix}"
        shardload.save(path, made, like=dict.fromkeys(made, like), plan=dict.fromkeys(made, plan))
        for name in made:
            found = shardload.load(path, mesh_of(), P("a", "b"), dataset=name, decode=True, dtype="float32")
            check(found, values.astype("f4") * np.float32(factor), mesh_of(), P("a", "b"), (decode, name))
        if stored == "f4":
            save = partial(shardload.save, shared_tmp_path / f"no-{decode}.{suffix}", like=like)
            same_error(
                comm, lambda x=x, save=save: save(x + 0), ConfigError, "nothing says whether", "scale_factor=0.5", "plan="
            )
            save({"u": x + 0}, like={"u": like}, attrs={"u": {"scale_factor": factor}})


def test_progress_counts_what_a_rank_writes(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the bar stopped before the end, or went beyond it; an error of the caller's function is one of all ranks."""
    x = {"a": put(ramp(cube()), mesh_of(), P("a")), "b": put(ramp(cube()), mesh_of(), P(None, None, ("a", "b")))}
    how: dict[str, Any] = {"compression": "gzip", "chunks": (1, 3, 100), "staging": "32KiB"}
    told: list[tuple[int, int]] = []
    shardload.save(shared_tmp_path / "out.h5", x, progress=lambda *one: told.append(one), **how)
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(told))
    totals = comm.allgather(told[-1] if told else (0, 0))
    assert all(done == total for done, total in totals)
    assert sum(done for done, _ in totals) == 2 * ramp(cube()).nbytes

    def fails(done: int, total: int) -> None:
        if comm.rank == comm.size - 1:
            raise RuntimeError("no bar")

    call = lambda: shardload.save(shared_tmp_path / "no.h5", x, progress=fails, **how)  # noqa: E731
    same_error(comm, call, PeerError, "no bar")
    assert on_disk(comm, shared_tmp_path) == ["out.h5"]


# --- the name


def test_a_name_that_is_taken(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if "w-" replaced a file, or "w" left anything of the old one, or either left a temporary."""
    path, x = shared_tmp_path / "out.h5", put(ramp(cube()), mesh_of(), P("a"))
    shardload.save(path, {"old": x})
    same_error(comm, lambda: shardload.save(path, x), ConfigError, "exists, and mode is 'w-'", "mode='w'")
    compare(comm, path, {"old": ramp(cube())})
    shardload.save(path, {"new": x}, mode="w")
    compare(comm, path, {"new": ramp(cube())})
    assert on_root(comm, lambda: list(h5py.File(path))) == ["new"]
    assert on_disk(comm, shared_tmp_path) == ["out.h5"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mode", ["w-", "w"])
@pytest.mark.parametrize("kind", ["HDF5 gzip, odd chunks", "Zarr"])
def test_two_saves_to_one_name_at_once(comm: Any, shared_tmp_path: Path, kind: str, mode: str) -> None:
    """Wrong if the file had chunks of both, both believed that the name was theirs, or one removed what was the other's."""
    half = comm.Split(comm.rank % 2)
    try:
        mine = [one for one in jax.devices() if one.process_index % 2 == jax.process_index() % 2]
        values = ramp(cube()) + 1000 * (comm.rank % 2)
        x = put(values, Mesh(np.array(mine), "a"), P(None, "a"))
        path, how = file_at(shared_tmp_path, kind)
        comm.barrier()
        error = raised(lambda: shardload.save(path, x, mode=mode, comm=half, **how))
        assert error is None or isinstance(error, ConfigError)
        said = comm.allgather((comm.rank % 2, error and str(error)))
        of_half = [{text for which, text in said if which == k} for k in (0, 1)]
        assert all(len(texts) == 1 for texts in of_half)
        failed = [next(iter(texts)) for texts in of_half]
        assert failed == [None, None] if mode == "w" else sum(text is None for text in failed) == 1, failed
        assert on_disk(comm, shared_tmp_path) == [path.name]
        found = on_root(comm, lambda: stored_in(path, "data"))
        expected = [ramp(cube()) + 1000 * k for k in (0, 1) if mode == "w" or failed[k] is None]
        assert any(np.array_equal(found, one) for one in expected)
    finally:
        half.Free()


# --- what is wrong


def test_bad_arguments(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if an argument were found wrong on one rank only, after the file was begun, or in words that do not help."""
    x = put(ramp(cube()), mesh_of(), P("a"))
    path = shared_tmp_path / "out.h5"
    deleted = put(ramp(cube()), mesh_of(), P("a"))
    deleted.delete()
    paths: list[tuple[Any, Any, str]] = [
        (7, x, "path is 7"),
        (f"{path}\0.h5", x, "path is "),
        ("hf://b/out.zarr", x, "is a URL"),
        (shared_tmp_path / "no" / "out.h5", x, "mkdir -p"),
        ({"rho": x}, path, "path is {'rho': an array of shape"),  # the wrong way round; not all values of the array
        (f"{path}:/rho", x, f"the file alone, '{path}'. `save` takes names of arrays as keys, such as {{'rho': x}}"),
    ]
    trees: list[tuple[Any, str]] = [
        ({}, "the dict is empty"),
        ({"a": object()}, "'/a' is a object; expected a jax.Array, a number, a NumPy array"),
        ({"a": memoryview(b"abc")}, "or a tree of them. Pass numpy.asarray(x)"),  # as of h5py, zarr and others
        ({"a": SimpleNamespace(xindexes={})}, "Pass x.data, or a Dataset"),  # as xarray's
        (np.array(["2001-01-01"], "M8[s]"), "which cannot be saved. Save numbers"),
        (np.array(["2001-01-01"]), "strings, which cannot be saved. Save texts as an attribute"),
        ({"a": np.ma.masked_less(np.arange(3.0), 1)}, "'/a' has masked elements, and files have none. Save x.filled"),
        ({"a": x, "/a": x}, "'a' is there twice"),
        ({3.5: x}, "a key is 3.5"),
        ({"model": {"w": x, "activation": jax.nn.relu}}, "of Equinox, eqx.filter(module, eqx.is_array)"),
        (jax.random.key(0), "jax.random.key_data"),
        (deleted, "was deleted"),
    ]
    options: list[tuple[Any, dict[str, Any], str]] = [
        ({"a": x}, {"dataset": "b"}, "dataset is 'b', the name of an array that is passed by itself"),
        (x, {"compression": {"rho": "gzip"}}, "compression does not match the arrays: only compression has ['rho']"),
        ({"g": {"a": x}}, {"attrs": {"g/": {"step": 1}, "g": {"run": 2}}}, "only attrs has ['run']"),
        ({"g": {"a": x}}, {"attrs": {"g/a": {"step": 1}, "g": {"a": {"run": 2}}}}, "attrs: 'g' is there twice"),
        ({"g": {"a": x}}, {"attrs": {"g/": {"step": 1}, "/g/": {"step": 1}}}, "the group '/g' twice"),
        ({"a": x}, {"chunks": {"a": (2, 2, 2), "/a": None}}, "chunks: 'a' is there twice"),
        *(
            (tree, {"format": kind}, "is in an array, and an array holds no other")
            for kind in ("hdf5", "netcdf4", "zarr")
            for tree in ({"a": x, "a/b/c": x}, {"a/b/c": x, "a": x})
        ),
        (x, {"dataset": ""}, "dataset is ''"),
        (x, {"chunks": "big"}, "'/data': chunks is 'big'"),
        (x, {"chunks": {"rho": (3, 3, 3)}}, "only chunks has ['rho']"),
        (x, {"compression": "gzip:x"}, "compression is 'gzip:x'; expected a name such as compression='gzip'"),
        (x, {"dims": 3}, "'/data': dims is 3"),
        *(
            ({"a": np.zeros((2, 3))}, {"dims": {"a": ("t", "t")}, "format": kind}, "axis 't' has 3 elements in '/a', but 2")
            for kind in ("netcdf4", "zarr")
        ),
        ({"a": np.zeros(3), "t": np.zeros(())}, {"dims": {"a": "t"}, "format": "zarr"}, "the name of '/t', a single number"),
        *(
            (tree, {"attrs": attrs, "format": kind}, f"'{name}': an attribute is called {key!r}; expected text")
            for kind in ("hdf5", "zarr")
            for key in (3, (1, 2), "")
            for tree, attrs, name in (
                (x, {key: 1}, "/data"),
                ({"a": x}, {"a": {key: 1}}, "/a"),
                ({"a": x}, {"/": {key: 1}}, "/"),
            )
        ),
        ({"x": x}, {"attrs": {"units": "kg"}}, "attrs={'/': {'units': 'kg'}}"),
        ({"x": x}, {"attrs": {"Header": {"n": 3}}}, "The name of a group has / behind it, and '/' is the file"),
        (x, {"verify": "yes"}, "verify is 'yes'"),
        (x, {"staging": "1KiB", "chunks": (4, 4, 4)}, "but staging is 1.0 KiB"),
        (x, {"shape": (1, 1, 1), "plan": 3}, "both shape and plan"),
        (x, {"plan": 3}, "plan is a int"),
        (x, {"timeout": -1}, "timeout"),
        (x, {"progress": 3}, "progress is 3"),
    ]
    bad = [(where, tree, {}, text) for where, tree, text in paths] + [(path, tree, {}, text) for tree, text in trees]
    bad += [(path, *case) for case in options]
    for ((where, tree, how, text),) in share(bad):
        same_error(comm, lambda w=where, t=tree, h=how: shardload.save(w, t, **h), ConfigError, text)  # type: ignore[misc]
    for attrs in (lambda y: {"a": y}, lambda y: {"a": [1, y]}):
        traced = jax.jit(lambda y, attrs=attrs: shardload.save(path, np.zeros(3), attrs=attrs(y)))
        same_error(comm, lambda f=traced: f(1.0), ConfigError, "attribute 'a' of '/data' is", "traced array")  # type: ignore[misc]
    assert on_disk(comm, shared_tmp_path) == []


@pytest.mark.mpi(min_size=2)
def test_ranks_that_do_not_ask_for_the_same(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if a rank wrote chunks of another shape, or under another name."""
    x, last = put(ramp(cube()), mesh_of(), P("a")), comm.rank == comm.size - 1
    path = shared_tmp_path / "out.h5"
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: shardload.save(f"{path}{comm.rank}.h5", x), "was called with path"),
        (lambda: shardload.save(path, x, chunks=(2, 2, 2 + last)), "was called with chunks of '/data'"),
        (lambda: shardload.save(path, x, attrs={"a": np.arange(3 + last)}), "was called with attrs of '/data'"),
        (lambda: shardload.save(path, {"a": x}, attrs={"h/": {"a": 3 + last}}), "was called with attrs of groups"),
        (lambda: shardload.save(path, {"a": x, "b" if last else "c": x}), "was called with array number 2 = /b"),
        (lambda: shardload.save(path, x, verify="full" if last else "index"), "was called with verify"),
        (lambda: shardload.plan_save(path, x) if last else shardload.save(path, x), "called save"),
    ]
    for call, text in calls:
        same_error(comm, call, PeerError, text)
    same_error(comm, lambda: shardload.save(path, x, mode="x" if last else "w"), ConfigError, "mode is 'x'")
    assert on_disk(comm, shared_tmp_path) == []


def test_a_plan_says_what_is_done(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if it said that nothing travels, and something did; or touched the disk."""
    n = unit()
    shape = (2 * n, 3 * n, 5 * n)
    x = {
        "a": put(ramp(shape), mesh_of(), P("a", "b")),
        "b": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding_of(mesh_of(), P(None, "a"))),
    }
    path = shared_tmp_path / "out.h5"
    plan = shardload.plan_save(path, x, chunks={"a": (1, 3 * n, 5 * n)}, compression={"a": "gzip"})
    assert plan.n_ranks == comm.size and [one.chunks for one in plan.arrays] == [(1, 3 * n, 5 * n), None]
    assert plan.nbytes == 2 * 4 * int(np.prod(shape))
    for text in ("save 2 arrays as", "gzip", "in one piece", "must not exist", "read back by another rank"):
        assert text in " ".join(str(plan).split()), str(plan)
    same_error(comm, lambda: shardload.save(path, x), ConfigError, "ShapeDtypeStruct")
    n_devices = len(jax.devices())
    none = jax.ShapeDtypeStruct((n_devices + 1,), jnp.float32, sharding=sharding_of(mesh_of(), P(("a", "b"))))
    if n_devices > 1:  # JAX makes such a description, but holds no such array
        same_error(comm, lambda: shardload.plan_save(path, none), ConfigError, "'/data' can be no jax.Array")
    same = shardload.save(path, x["a"], chunks=(2, 3, 5), compression="gzip")
    fits = shardload.plan_save(path, x["a"], chunks=(2, 3, 5), compression="gzip", mode="w")
    assert fits.travels == (False,) and comm.allreduce(same.nbytes_sent) == 0
    assert on_disk(comm, shared_tmp_path) == ["out.h5"]


# --- what the disk does


class Disk:
    """Stands for `os.pwrite` and `os.fsync` on one rank."""

    def __init__(self, comm: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pwrite, self.fsync, self.what, self.n = os.pwrite, os.fsync, what, 0
        if comm.rank == comm.size - 1:
            monkeypatch.setattr(os, "pwrite", self.put)
            monkeypatch.setattr(os, "fsync", self.sync)

    def put(self, descriptor: int, data: Any, offset: int) -> int:
        self.n += len(data) > 64  # not the mark of the temporary
        if self.what == "short":
            return self.pwrite(descriptor, bytes(data)[: max(1, len(data) // 2)], offset)
        if self.what in ("ENOSPC", "EDQUOT", "EIO") and self.n == 2:
            raise system_error(getattr(errno, self.what))
        return self.pwrite(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        if self.what == "fsync":
            raise system_error(errno.EIO)
        self.fsync(descriptor)


@pytest.mark.any_version
@pytest.mark.any_library
@pytest.mark.parametrize(
    ("what", "kind"),
    [  # the numbers of errors differ in what is said of them
        *itertools.product(("ENOSPC", "fsync", "short"), ("HDF5 in one piece", "HDF5 gzip, odd chunks", "Zarr", "Zarr shards")),
        ("EDQUOT", "HDF5 gzip, odd chunks"),
        ("EIO", "Zarr"),
    ],
)
def test_a_disk_that_fails_on_one_rank(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    """Wrong if a rank went on, the old file were gone, a temporary stayed, or a short write lost the rest."""
    n = unit()
    values = ramp((4 * n, 32, 8 * n))  # rows of a page on four ranks, as writers on several nodes need them
    path, how = file_at(shared_tmp_path, kind)
    if kind == "Zarr":
        how = how | {"chunks": (n, 32, n)}
    shardload.save(path, np.arange(3), **{k: v for k, v in how.items() if k == "format"})
    x = put(values, mesh_of(), P(None, None, ("a", "b")))
    staging = "160KiB" if "piece" in kind else "200KiB"  # so that each rank has something to write
    call = lambda: shardload.save(path, {"a": x, "b": x, "c": x, "d": x}, mode="w", staging=staging, **how)  # noqa: E731
    Disk(comm, what, monkeypatch)
    if what == "short":
        call()
        monkeypatch.undo()
        compare(comm, path, dict.fromkeys("abcd", values))
    else:
        names = {"ENOSPC": "no space is left", "EDQUOT": "quota", "EIO": "(EIO)", "fsync": "(EIO)"}
        same_error(comm, call, SourceError, names[what], "What had this name before is as it was")
        monkeypatch.undo()
        compare(comm, path, {"data": np.arange(3)})
    assert on_disk(comm, shared_tmp_path) == [path.name]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["HDF5 in one piece", "HDF5 gzip, auto", "Zarr"])
@pytest.mark.parametrize("what", ["writing", "encoding", "reading back"])
def test_what_fails_in_the_only_round(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    """Wrong if the ranks, who agree less often then, missed an error of one, or did not end together."""
    n = unit()
    values = ramp((16 * n, 32, 8 * n))
    (path, how), x = file_at(shared_tmp_path, kind), put(values, mesh_of(), P(("a", "b")))
    how = how if "piece" in kind else {**how, "chunks": (16 * n // comm.size, 32, 8 * n)}  # one for each rank
    assert shardload.plan_save(path, x, **how).n_rounds == 1
    places: dict[str, tuple[Any, str]] = {"writing": (os, "pwrite"), "encoding": (Encoder, "encode")}
    places["reading back"] = ReadBack, "_compare_stored"

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(*places[what], raising(system_error(errno.EIO)))
    expected = (SourceError, "(EIO)") if what == "writing" else (PeerError, "Input/output error")
    same_error(comm, lambda: shardload.save(path, x, **how), *expected)
    monkeypatch.undo()
    assert on_disk(comm, shared_tmp_path) == []
    shardload.save(path, x, **how)  # in step again
    compare(comm, path, {"data": values})


@pytest.mark.mpi(min_size=2)
@pytest.mark.any_version
@pytest.mark.any_library
@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("kind", ["HDF5 gzip, odd chunks", "Zarr"])
def test_a_temporary_that_one_rank_cannot_open(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_gone: bool
) -> None:
    """Wrong if chunks of a rank that does not see the file were in another one; or if the error were only the system's, which
    names no file that the caller knows.
    """
    path, how = file_at(shared_tmp_path, kind)
    x, kind_of_sink = put(ramp(cube()), mesh_of(), P("b", "a")), ZarrSink if kind == "Zarr" else Hdf5Sink
    whole: Any = kind_of_sink.writer

    def writer(self: Any, ticket: Ticket) -> Any:
        if not is_gone:
            raise system_error(errno.ESTALE)
        return whole(self, replace(ticket, temporary=f"{ticket.temporary}-elsewhere"))

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(kind_of_sink, "writer", writer)
    says = (ConfigError, "is not to be seen here") if is_gone else (SourceError, f"'{path}' cannot be written", "ESTALE")
    same_error(comm, lambda: shardload.save(path, x, **how), *says)
    monkeypatch.undo()
    assert on_disk(comm, shared_tmp_path) == []


# --- implementations that are wrong


WRONG: dict[str, Any] = {
    "a shard's last unit is dropped": (
        lambda m: m.setattr(WriteLayout, "units_of", _without_last(WriteLayout.units_of)),
        {"compression": "gzip", "chunks": (2, 3, 5)},
    ),
    "two holders write a unit": (
        lambda m: m.setattr(WriteLayout, "units_of", lambda self, rank: Held_all(self, rank)),
        {"compression": "gzip", "chunks": (2, 3, 5)},
    ),
    "parts swapped in a block": (
        lambda m: m.setattr(ShardSender, "start", _swapped(ShardSender.start)),
        {"compression": "gzip", "chunks": (3, 10**6, 10**6)},
    ),
    "the next round's memory": (
        lambda m: m.setattr(PiecesToBlocks, "in_round", _next_round(PiecesToBlocks.in_round)),
        {"compression": "gzip", "chunks": (1, 10**6, 10**6), "staging": "8KiB"},
    ),
}


def _without_last(whole: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, rank: iter([*whole(self, rank)][:-1])


def Held_all(self: Any, rank: int) -> Any:
    for shard in self.shards.shards_of(rank):
        for number in self.units.meeting(self.shards.region(shard)):
            yield number, shard


def _swapped(start: Callable[..., Any]) -> Callable[..., Any]:
    def swapped(self: Any, block: Any) -> Any:
        found = start(self, block)
        for tile in found.tiles:
            tile.data = np.flip(tile.data)
        for part in block.parts:
            if part.rank == self._rank:
                view = self._targets[part.target].view(part.region)
                view[...] = np.flip(view).copy()
        return found

    return swapped


def _next_round(whole: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, places: whole(self, range(max(0, places.start - 1), max(1, places.stop - 1)))


@pytest.mark.parametrize("what", WRONG)
def test_wrong_implementations_are_found(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Either the save itself finds it, or the comparison with the format's library does: what the grid of tests rests on."""
    spoil, how = WRONG[what]
    values = ramp(cube())
    mesh = mesh_of()
    x = put(values, mesh, P() if "two holders" in what else P(None, None, ("a", "b")))
    spoil(monkeypatch)
    error = raised(lambda: shardload.save(shared_tmp_path / "out.h5", x, timeout=30, **how))
    monkeypatch.undo()
    assert len(set(comm.allgather(error and str(error)))) == 1
    assert error is None or isinstance(error, ShardloadError)
    if error is None:
        is_equal = comm.bcast(comm.rank == 0 and np.array_equal(stored_in(shared_tmp_path / "out.h5", "data"), values))
        assert not is_equal or comm.size == 1, "not found"
        assert "swapped" in what or comm.size == 1  # only who knows the values can know
    else:
        assert on_disk(comm, shared_tmp_path) == []
