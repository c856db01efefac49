"""Are several arrays loaded by one job: one agreement before, one exchange, one agreement after, one cap on memory?

The arrays are passed as lists, with a mesh and options of its own for each; `load` hides the report.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, PeerError, SourceError
from shardload.comm.group import group_of
from shardload.jobs.loading.call import LoadCall
from shardload.jobs.loading.plan import Loaded
from shardload.options import DEFAULTS, PER_LOADED_ARRAY, keywords_of
from tests.mpi.support import READERS, check, mesh_of, on_root, padded, peak_nbytes, ramp, same_error, unit

EXTRA_NBYTES = 256 << 10  # Python objects, and what h5py makes for itself


@pytest.fixture(autouse=True)
def as_large(tune: Any) -> None:
    """Small arrays are moved as large ones are."""
    tune(small_nbytes=0, worth_sharing_nbytes=0, min_chunk_nbytes=1, inline_nbytes=-1)


def shapes() -> dict[str, tuple[int, ...]]:
    n = unit()
    return {"rho": (n, 2 * n, 3), "mask": (2 * n, n), "wave": (n, 3, n), "odd": (n + 1, 2 * n)}


DTYPES = {"rho": "float32", "mask": "uint8", "wave": "complex64", "odd": "int16"}
SPECS = {"rho": P("b", "a"), "mask": P(None, ("a", "b")), "wave": P(None, None, "a"), "odd": P("a", "b")}


@pytest.fixture(scope="module")
def paths(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three arrays in one file, one in another, one damaged."""

    shape_of = shapes()  # asks JAX for its devices, which all ranks do together

    def write() -> dict[str, str]:
        folder = tmp_path_factory.mktemp("many")
        with h5py.File(folder / "one.h5", "w") as file:
            for name in ("rho", "mask", "wave"):
                how = {} if name == "mask" else {"chunks": (3, 3, 2), "compression": "gzip"}
                file.create_dataset(name, data=ramp(shape_of[name], DTYPES[name]), **how)
            bad = file.create_dataset("bad", data=ramp(shape_of["rho"]), chunks=(3, 3, 2), compression="gzip")
            bad.id.write_direct_chunk((3, 3, 0), b"\xff" * 20)
        zarr.create_array(folder / "two.zarr", name="odd", data=ramp(shape_of["odd"], DTYPES["odd"]), chunks=(3, 5))
        return {name: str(folder / ("two.zarr" if name == "odd" else "one.h5")) for name in (*DTYPES, "bad")}

    return on_root(comm, write)


def load_many(arrays: list[tuple[Any, Any, Any, dict[str, Any]]], comm: Any = None) -> Loaded:
    """Load arrays of which each has a path, a mesh, a spec and keywords of `load`."""
    paths, meshes, specs, given = map(list, zip(*arrays, strict=True))
    options = keywords_of("load", vars(DEFAULTS) | given[0] | {"comm": comm, "dataset": [one["dataset"] for one in given]})
    options |= {o.name: [one.get(o.name, o.default) for one in given] for o in PER_LOADED_ARRAY}
    with LoadCall("load", paths, meshes, specs, options).begin() as call:
        return call.loader(call.plan()).run(time.perf_counter())


def load(paths: dict[str, str], names: tuple[str, ...], comm: Any = None, **common: Any) -> Loaded:
    own = {"odd": {"pad": -1}}
    calls = [(paths[n], mesh_of(), SPECS.get(n, P("a")), {"dataset": n, **own.get(n, {}), **common}) for n in names]
    return load_many(calls, comm)


def check_all(loaded: Loaded, names: tuple[str, ...], note: object = "") -> None:
    arrays, _ = loaded
    assert len(arrays) == len(names)
    for x, name in zip(arrays, names, strict=True):
        values = ramp(shapes()[name], DTYPES[name])
        values = padded(values, mesh_of(), SPECS[name], -1) if name == "odd" else values
        check(x, values, mesh_of(), SPECS[name], (name, note))


@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("names", [("rho", "mask", "wave"), ("wave", "odd", "rho", "mask")], ids=["one file", "two files"])
def test_arrays_of_different_type_shape_and_sharding(paths: dict[str, str], names: tuple[str, ...], readers: Any) -> None:
    """Wrong if a part of one array reached another, or one array's dtype, padding or sharding were used for all."""
    for verify in ("index", "checksum", "full"):
        loaded = load(paths, names, readers=readers, verify=verify, staging="64KiB")
        check_all(loaded, names, verify)
        _, report = loaded
        nbytes = sum(int(np.prod(shapes()[n])) * np.dtype(DTYPES[n]).itemsize for n in names)
        if readers in ("root", "parallel", 2):
            assert report.nbytes_read == nbytes, "one report, for all arrays"
        proven = [one.proven for one in report.arrays]
        assert report.proven.how == verify and len(proven) == len(names)
        if verify == "full":
            assert report.proven.n_elements == sum(one.n_elements for one in proven) > 0
            assert all(one.digest is not None for one in proven)


@pytest.mark.parametrize("readers", READERS)
def test_one_of_them_fails(comm: Any, paths: dict[str, str], readers: Any) -> None:
    """Wrong if a rank hung, raised another error, or if what came before or after were touched."""
    before = load(paths, ("rho", "mask"), readers=readers)
    error = same_error(
        comm, lambda: load(paths, ("rho", "bad", "wave"), readers=readers), SourceError, "chunk (1, 1, 0) of '/bad'"
    )
    assert isinstance(error, SourceError) and error.dataset == "/bad" and error.chunk == (1, 1, 0)
    check_all(load(paths, ("wave", "rho"), readers=readers), ("wave", "rho"))
    check_all(before, ("rho", "mask"))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_ask_for_other_arrays(comm: Any, paths: dict[str, str]) -> None:
    """Wrong if a rank with fewer arrays were left waiting, or if the order did not matter."""
    mine = lambda usual, other: other if comm.rank == 1 else usual  # noqa: E731
    same_error(
        comm, lambda: load(paths, mine(("rho", "mask"), ("rho",))), PeerError, "rank 1 called load of", "rank 0 called load of"
    )
    same_error(comm, lambda: load(paths, mine(("rho", "mask"), ("rho", "wave"))), PeerError, "of array 1 = ")
    check_all(load(paths, ("mask", "rho")), ("mask", "rho"))


@pytest.mark.any_version
@pytest.mark.any_library
def test_staging_bounds_all_of_them_together(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if each array had staging buffers or threads of its own."""
    n, names, staging = unit(), ("a", "b", "c", "d"), 1 << 20
    shape = (4 * n, 8 * n, -(-32768 // (8 * n * n)) * n)
    path = str(shared_tmp_path / "a.h5")

    def write() -> None:
        with h5py.File(path, "w") as file:
            for k, name in enumerate(names):
                chunks = tuple(max(1, s // 5) for s in shape)
                file.create_dataset(
                    name, data=ramp(shape, "float32") + k, chunks=chunks, compression="gzip", compression_opts=1
                )

    on_root(comm, write)
    own = comm.Dup() if hasattr(comm, "Dup") else None  # so that shared memory is made for this load
    how: dict[str, Any] = {"dataset": list(names), "readers": "parallel", "staging": staging, "comm": own}
    plan = shardload.plan(path, mesh_of(), P(None, "b", "a"), **how)
    gc.collect()
    arrays, extra = peak_nbytes(plan, monkeypatch)
    assert max(comm.allgather(extra)) <= staging + EXTRA_NBYTES, comm.allgather(extra)
    assert plan.report.peak_staging_nbytes <= staging
    for k, x in enumerate(arrays):
        check(x, ramp(shape, "float32") + np.float32(k), mesh_of(), P(None, "b", "a"))
    if own is not None:
        group_of(own).forget_shared_memory()
        own.Free()


def test_arrays_that_fit_alone_but_not_together(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if buffers for the needs of all were larger than what the caller allowed: each array alone takes all of it."""
    n, path = unit(), str(shared_tmp_path / "a.h5")
    staging = 20 * 15 * 64 * n

    def write() -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("wide", data=np.ones((15 * 64 * n,), "f4"), chunks=(15 * 64 * n,))
            file.create_dataset("cast", data=np.ones((20 * 64 * n,), "u1"), chunks=(20 * 64 * n,))

    on_root(comm, write)
    wide, cast = ((path, mesh_of(), P(("a", "b")), {"dataset": d, "dtype": "f4", "staging": staging}) for d in ("wide", "cast"))
    for alone in (wide, cast):
        assert float(load_many([alone])[0][0].addressable_shards[0].data[0]) == 1
    same_error(comm, lambda: load_many([wide, cast]), ConfigError, "these 2 arrays share their staging buffers", "staging='")


@pytest.mark.mpi(min_size=2)
def test_each_of_many_small_arrays_is_read_by_one_rank(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if two ranks read an array or none did, or if the arrays beyond a multiple of the ranks were left out."""
    n, size = 2 * comm.size + 1, unit()

    def values(k: int) -> Any:
        return ramp((size, 3 * size, 2)) + 1000 * k

    def write() -> None:
        with h5py.File(shared_tmp_path / "turns.h5", "w") as file:
            for k in range(n):
                file.create_dataset(f"v{k:02d}", data=values(k), chunks=(1, size, 2), compression="gzip")

    on_root(comm, write)
    names, spec = [f"v{k:02d}" for k in range(n)], P(None, ("a", "b"))
    path = str(shared_tmp_path / "turns.h5")
    plan = shardload.plan(path, mesh_of(), spec, dataset=names, readers="parallel")
    for verify in ("index", "checksum"):
        arrays = shardload.load(path, mesh_of(), spec, dataset=names, readers="parallel", verify=verify)
        for k, x in enumerate(arrays):
            check(x, values(k), mesh_of(), spec, k)
    owners = [[rank for rank in range(comm.size) if one.schedule.is_owner(rank)] for one in plan.leaves]
    assert owners[:-1] == [[k // 2] for k in range(n - 1)]
    assert [one.n_readers for one in plan.leaves] == [1] * (n - 1) + [len(owners[-1])]
    assert len(owners[-1]) == min(comm.size, plan.leaves[-1].schedule.blocks.n_cells)
    plan.execute()
    of_array = [one.chunks_decoded for one in plan.report.arrays]
    assert of_array == [3 * size] * n and plan.report.chunks_decoded == 3 * size * n
    check(plan.leaves[1].execute(), values(1), mesh_of(), spec)
    assert plan.leaves[1].costs["parallel"].n_readers == 1 and "by one rank, this one by rank 0" in plan.leaves[1].why
