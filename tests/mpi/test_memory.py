"""Does a load stay under its pieces and `staging`, and does a save? Counted by Python's own tracer, which NumPy tells.

Shared memory is not traced: it is counted where it is made.
"""

from __future__ import annotations

import gc
import itertools
import math
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, SourceError
from tests.mpi.support import check, damage_chunk, mesh_of, on_root, peak_nbytes, peak_of, put, ramp, same_error, unit
from tests.unit.files import write_hdf5

pytestmark = pytest.mark.any_library

EXTRA_NBYTES = 256 << 10  # Python objects, and what h5py and zarr-python make for themselves: 90 KiB are usual
CAST_NBYTES = 128 << 10  # what checking a cast takes


@pytest.fixture(scope="module")
def field(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], np.ndarray]:
    """Some 4 MiB of float32, in files of three kinds; each was loaded once, so that what Python imports is not counted."""
    n = unit()
    values = ramp((4 * n, 8 * n, -(-65536 // (8 * n * n)) * n))

    def write() -> dict[str, str]:
        folder = tmp_path_factory.mktemp("memory")
        chunks = tuple(max(1, s // k) for s, k in zip(values.shape, (4, 3, 5), strict=True))
        write_hdf5(folder / "chunks.h5", {"x": values}, chunks=chunks, compression="gzip", compression_opts=1, shuffle=True)
        write_hdf5(folder / "plain.h5", {"x": values})
        zarr.create_array(folder / "planes.zarr", data=values, chunks=(1, *values.shape[1:]))
        return {name: str(folder / name) for name in ("chunks.h5", "plain.h5", "planes.zarr")}

    paths = on_root(comm, write)
    for path in paths.values():
        shardload.load(path, mesh_of(), P("a", "b"), readers="parallel")
    return paths, values


CASES = list(
    itertools.product(
        ("chunks.h5", "plain.h5", "planes.zarr"), ("root", "parallel", "direct", 2), (P("a", "b"), P(None, "b", "a"))
    )
)


@pytest.mark.parametrize(("name", "readers", "spec"), CASES, ids=str)
def test_peak(
    own_comm: Any, field: tuple[dict[str, str], np.ndarray], name: str, readers: Any, spec: P, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if rank 0 held more than it was allowed, buffers were made for every block, or pieces were copied; and if the plan
    left out what threads decode in.
    """
    paths, values = field
    mesh, random = mesh_of(), np.random.default_rng(CASES.index((name, readers, spec)))
    staging = int(random.integers(3 << 19, 5 << 19))
    dtype = random.choice(["float32", "int32"])
    plan = shardload.plan(paths[name], mesh, spec, readers=readers, staging=staging, dtype=dtype, comm=own_comm)
    x, extra = peak_nbytes(plan, monkeypatch)
    check(x, values.astype(dtype), mesh, spec)
    said = plan.costs[plan.readers].peak_nbytes - plan.pieces_nbytes
    of_ranks = own_comm.allgather(extra)
    assert max(of_ranks) <= min(said + CAST_NBYTES, staging) + EXTRA_NBYTES, (of_ranks, said, staging)


def resident_nbytes(which: str) -> int:
    """Memory of this process, as the system counts it: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[which].split()[0]) << 10


@pytest.mark.parametrize("readers", ["auto", "root"])
def test_tree_of_40_arrays(comm: Any, own_comm: Any, shared_tmp_path: Path, readers: str) -> None:
    """Wrong if each array had buffers of its own, or one rank held all arrays. By the resident set: of whatever makes it."""
    shape, staging, extra = (6 * unit(), 2 * unit(), 18432 // unit() ** 2 * unit()), 8 << 20, 64 << 20
    base = np.resize(ramp(shape[2:]) % 64, shape)  # compresses at once, so that it is written at once
    names = [f"v{k:02d}" for k in range(40)]

    def write() -> str:
        with h5py.File(shared_tmp_path / "tree.h5", "w") as file:
            for k, name in enumerate(names):
                how = {"chunks": (1, *shape[1:]), "compression": "gzip", "compression_opts": 1}
                file.create_dataset(name, data=base + np.float32(k), **how)
        return str(shared_tmp_path / "tree.h5")

    path = on_root(comm, write)
    load = partial(shardload.load, path, mesh_of(), P(None, "a", "b"), readers=readers, comm=own_comm)
    load(dataset=names[:2], staging=1 << 20)
    gc.collect()
    before = resident_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    found = load(dataset=names, staging=staging)
    peak = resident_nbytes("VmHWM") - before
    pieces = sum(shard.data.nbytes for x in found for shard in x.addressable_shards)
    assert max(comm.allgather(peak - pieces)) <= staging + extra, (comm.allgather((peak, pieces)), staging)
    if readers == "root" and comm.size > 2:  # else the test could not see that one rank holds all
        assert 40 * base.nbytes > pieces + staging + extra
    for k in (0, 17, 39):
        check(found[k], base + np.float32(k), mesh_of(), P(None, "a", "b"))


def test_chunk_larger_than_staging(comm: Any, field: tuple[dict[str, str], np.ndarray]) -> None:
    """Wrong if a chunk that cannot be had under the cap were decoded all the same."""
    paths, values = field
    chunk_nbytes = math.prod(values.shape[1:]) * 4
    call = lambda: shardload.load(paths["planes.zarr"], mesh_of(), P("a", "b"), staging=2 * chunk_nbytes)  # noqa: E731
    same_error(comm, call, ConfigError, "one chunk of", "staging is", "Pass staging='")


@pytest.mark.parametrize(
    ("name", "readers"),
    [
        *((name, "parallel") for name in ("chunks.h5", "plain.h5", "planes.zarr")),
        ("chunks.h5", "root"),
        ("chunks.h5", "direct"),
    ],
)
def test_nothing_waits_for_the_garbage_collector(
    comm: Any, field: tuple[dict[str, str], np.ndarray], name: str, readers: Any
) -> None:
    """Wrong if objects that refer to each other kept a dropped array's memory until Python looks for such."""
    paths, values = field
    spec = P(None, "a", "b")
    check(shardload.load(paths[name], mesh_of(), spec, readers=readers, verify="checksum"), values, mesh_of(), spec)
    assert garbage_of(lambda: shardload.load(paths[name], mesh_of(), spec, readers=readers, verify="checksum")) == []


@pytest.mark.parametrize("readers", ["auto", "parallel", "root", "direct"])
@pytest.mark.parametrize("what", ["chunk", "callback", "small"])
def test_what_failed_waits_for_no_garbage_collector(
    comm: Any, field: tuple[dict[str, str], np.ndarray], shared_tmp_path: Path, what: str, readers: str
) -> None:
    """Wrong if an error kept the memory and the descriptors of its load: a script that goes on would need the memory twice."""
    path = field[0]["chunks.h5"]

    def make() -> str:
        if what == "small":
            return write_hdf5(shared_tmp_path / "small.h5", {"x": np.zeros((unit(), unit(), unit()), "f4")})
        shutil.copy(path, shared_tmp_path / "damaged.h5")
        damage_chunk(shared_tmp_path / "damaged.h5", "x", 0, 0, 0)
        return str(shared_tmp_path / "damaged.h5")

    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    bad = on_root(comm, make)
    given: dict[str, Any] = {} if what == "chunk" else {"progress": fail}

    def call() -> None:
        with pytest.raises(shardload.ShardloadError):
            shardload.load(path if what == "callback" else bad, mesh_of(), P(None, "a", "b"), readers=readers, **given)

    call()
    assert garbage_of(call) == []


def test_an_array_that_is_not_the_files_can_be_dropped(comm: Any, field: tuple[dict[str, str], np.ndarray]) -> None:
    """Wrong if the error kept the array until Python looks for garbage: loading it again would need its memory twice."""
    paths, values = field
    x = put(np.zeros_like(values), mesh_of(), P("a", "b"))
    kept = weakref.ref(x)
    with without_collector():
        with pytest.raises(shardload.VerifyError):
            shardload.verify(x, paths["plain.h5"])
        del x
        assert kept() is None


@contextmanager
def without_collector() -> Iterator[None]:
    """Python looks for garbage before, and not meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def garbage_of(call: Callable[[], object]) -> list[str]:
    """The types of this package's objects that only a garbage collection frees after a call."""
    with without_collector():
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            call()
            gc.collect()
            return [type(found).__name__ for found in gc.garbage if type(found).__module__.startswith("shardload")]
        finally:
            gc.garbage.clear()
            gc.set_debug(0)


# --- saves

SAVE_EXTRA_NBYTES = EXTRA_NBYTES + (1 << 20)  # and a buffer for reading back

SAVES: dict[str, tuple[str, dict[str, Any]]] = {
    "contiguous": ("h5", {}),
    "gzip planes": ("h5", {"chunks": (1, 10**6, 10**6), "compression": {"name": "gzip", "level": 1}}),
    "gzip cubes": ("h5", {"chunks": (7, 11, 90), "compression": {"name": "gzip", "level": 1}}),
    "Zarr": ("zarr", {"chunks": (7, 11, 90), "compression": "zstd"}),
    "sharded": ("zarr", {"chunks": (7, 11, 90), "shards": (14, 22, 180), "compression": "zstd"}),
}


@pytest.fixture(scope="module")
def big(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """8 MiB; each kind of file was saved once, so that what Python imports is not counted."""
    n = unit()
    values = ramp((16 * n, 4 * n, -(-32768 // (n * n)) // n * n))
    folder = on_root(comm, lambda: tmp_path_factory.mktemp("saves"))
    x = put(values, mesh_of(), P(None, "a", "b"))
    for kind in ("contiguous", "Zarr"):
        suffix, how = SAVES[kind]
        shardload.save(folder / f"first.{suffix}", {"x": x}, **how)
    return values


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("spec", [P(None, "a", "b"), P("a", "b")], ids=str)
@pytest.mark.parametrize("kind", SAVES)
def test_peak_of_a_save(
    own_comm: Any, shared_tmp_path: Path, big: np.ndarray, kind: str, spec: P, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if rank 0 held what others have, a round had no limit, or what was written stayed until the end."""
    (suffix, how), staging = SAVES[kind], 2 << 20
    x = put(big, mesh_of(), spec)
    path, n = shared_tmp_path / f"out.{suffix}", own_comm.size
    report, extra = peak_of(lambda: shardload.save(path, {"x": x}, staging=staging, comm=own_comm, **how), monkeypatch)
    most = staging + SAVE_EXTRA_NBYTES
    assert max(own_comm.allgather(extra)) <= most, (own_comm.allgather(extra), staging)
    # Else the test could not see a round without a limit, or that one rank holds all.
    assert report.n_rounds > 3 and big.nbytes * (n - 1) // n > most


@pytest.mark.mpi(min_size=2)
def test_peak_of_a_copy_by_all_ranks_together(
    comm: Any, own_comm: Any, shared_tmp_path: Path, big: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if the memory that ranks share had room for all that moves, and threads decoded beside it."""
    before, staging = shared_tmp_path / "in.h5", 8 << 20
    chunks = (big.shape[0] // 8, *big.shape[1:])
    on_root(comm, lambda: write_hdf5(before, {"x": big}, chunks=chunks, compression="gzip", compression_opts=1))
    how = {"chunks": (7, 11, 90), "staging": staging, "progress": False}
    shardload.copy(before, shared_tmp_path / "first.h5", comm=comm, **how)
    report, extra = peak_of(lambda: shardload.copy(before, shared_tmp_path / "out.h5", comm=own_comm, **how), monkeypatch)
    assert report.plan.arrays[0].is_together
    assert max(comm.allgather(extra)) <= staging + SAVE_EXTRA_NBYTES, (comm.allgather(extra), staging)


FAULTS = {
    "arguments": "shardload.jobs.saving.arguments.Options.check",
    "what is there": "shardload.jobs.saving.like.find_array",
    "plan": "shardload.jobs.saving.plan.shards_of",
    "buffers": "shardload.jobs.saving.save.LocalShards",
    "create": "shardload.formats.hdf5.sink.Hdf5Sink.create",
    "open": "shardload.formats.hdf5.sink.Hdf5Sink.writer",
    "exchange": "shardload.arrays.local_shards.ShardSender.start",
    "encode": "shardload.formats.hdf5.sink.Hdf5Encoder.encode",
    "place": "shardload.formats.hdf5.sink.Hdf5Sink.allocate",
    "put": "shardload.formats.sink.Writer.put",
    "sync": "shardload.formats.sink.Writer.sync",
    "finish": "shardload.formats.hdf5.sink.Hdf5Sink.finish",
    "read back": "shardload.engine.read_back.ReadBack._compare_stored",
    "decode": "shardload.engine.read_back.ReadBack._compare_values",
    "commit": "shardload.formats.hdf5.sink.Hdf5Sink.commit",
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.mpi(min_size=2)) if what == "exchange" else what for what in FAULTS]
)
def test_what_was_not_saved_can_be_dropped(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Wrong if the error kept the array until Python looks for garbage: a script that goes on would need its memory twice."""
    n, kept = unit(), list[weakref.ref[Any]]()
    values = ramp((2 * n, 3 * n, 5 * n))
    shardload.save(shared_tmp_path / "like.h5", {"x": values})

    def fails(*_: Any, **__: Any) -> Any:
        raise SourceError("this fails") if what != "arguments" else ConfigError("this fails")

    def call() -> None:
        x = put(values, mesh_of(), P(None, "a", "b"))
        kept.append(weakref.ref(x))
        how: dict[str, Any] = {"like": f"{shared_tmp_path}/like.h5:/x"} if what == "what is there" else {}
        with pytest.raises((SourceError, ConfigError), match="this fails"):
            shardload.save(shared_tmp_path / "out.h5", {"x": x}, chunks=(1, 3 * n, 5 * n), compression="gzip", **how)

    if comm.rank == comm.size - 1 or what in ("what is there", "create", "place", "finish", "commit"):  # those are rank 0's
        monkeypatch.setattr(FAULTS[what], fails)
    call()  # what the first one keeps is for the next
    with without_collector():
        call()
        left = [one() is not None for one in kept]
    garbage = garbage_of(call)  # before anything is asserted: all ranks must make this call
    assert left == [False] * 2 and garbage == []


def test_what_was_saved_can_be_dropped(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if a save kept the array until Python looks for garbage: the next step of a run would need its memory twice."""
    values = ramp((2 * unit(), 3 * unit()))
    x = put(values, mesh_of(), P("a", "b"))
    kept = weakref.ref(x)
    shardload.save(shared_tmp_path / "first.h5", {"g": {"x": x}})
    with without_collector():
        shardload.save(shared_tmp_path / "out.h5", {"g": {"x": x}})
        del x
        assert kept() is None
