"""Make every mistake there is, on all ranks; print what each of them leads to, one line of JSON per case and rank.

``errors.py FOLDER [CASE ...]``: these cases, or all but those of `ALONE`. After each case a good load must work, so that
nothing of a failure is left behind.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import jax
import numpy as np
import zarr
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload.api  # now: what is imported while a name is patched would keep the patch
from shardload.comm.transport import MpiTransport
from shardload.formats.lookup import open_source
from shardload.transfer.channels import OFFER
from tests.mpi.support import check, damage_chunk, mesh_of, on_root, ramp
from tests.tuning import tune, tuned
from tests.unit.files import write_hdf5

SHAPE, CHUNKS = (8, 12, 20), (3, 5, 7)
LAYERS = (8, 12, 5)  # chunks of which each of 4 ranks reads one, and has a part for each other rank
DAMAGED = (1, 2, 1)  # index of the chunk that cannot be decoded
# Cases in which a rank fails in the middle of an exchange: should one hang, it takes none of the others with it.
ALONE = (
    "no memory for a block on rank 2",
    "no memory to pack on rank 0",
    "no memory for a checksum on rank 0",
    "no memory for a note or message on rank 0",
    "no memory to decode a chunk on rank 1",
    "assembly fails on rank 3",
)

comm = MPI.COMM_WORLD
tune(worth_sharing_nbytes=0, reader_nbytes=1)  # blocks are small here
cases: dict[str, Callable[[], object]] = {}


def case(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register a mistake."""

    def register(make: Callable[[], object]) -> Callable[[], object]:
        cases[name] = make
        return make

    return register


PENCIL = P("a", "b")


def load(path: Any = "good.h5", spec: Any = PENCIL, mesh: Any = None, **options: Any) -> jax.Array:
    return shardload.load(path, mesh or mesh_of(), spec, **options)


def prepare() -> None:
    """Write the files, on rank 0."""
    for name, chunks in (("good", LAYERS), ("fine", CHUNKS)):
        write_hdf5(f"{name}.h5", {"x": ramp(SHAPE)}, chunks=chunks, compression="gzip")
    write_hdf5("several.h5", dict.fromkeys(("density", "group/pressure"), ramp(SHAPE)))
    write_hdf5("odd.h5", {"x": ramp((7, 12, 20))})
    write_hdf5("plain.h5", {"x": ramp((200, 300))})
    whole = Path("plain.h5").read_bytes()
    Path("truncated.h5").write_bytes(whole[: len(whole) // 2])
    write_hdf5("damaged.h5", {"group/x": ramp(SHAPE)}, chunks=CHUNKS, compression="gzip", shuffle=True)
    damage_chunk("damaged.h5", "group/x", *(i * c for i, c in zip(DAMAGED, CHUNKS, strict=True)))
    zarr.open_group("damaged.zarr", mode="w").create_array("group/x", data=ramp(SHAPE) + 1, chunks=CHUNKS)
    Path("damaged.zarr/group/x/c", *map(str, DAMAGED)).write_bytes(b"\xff" * 50)
    sharded = zarr.create_array("sharded.zarr", data=ramp(SHAPE) + 1, chunks=(2, 3, 4), shards=(4, 6, 12))
    assert sharded.shards == (4, 6, 12)
    file = Path("sharded.zarr/c/1/1/1")
    raw_bytes = bytearray(file.read_bytes())
    raw_bytes[-4:] = b"\xff" * 4  # the checksum of the shard's index
    file.write_bytes(raw_bytes)
    for rank in range(comm.size):
        Path(f"dir{rank}").mkdir()
        if rank != 2:
            Path(f"dir{rank}/some.h5").symlink_to("../good.h5")
        if rank != 0:
            Path(f"dir{rank}/not-on-0.h5").symlink_to("../good.h5")
        Path(f"dir{rank}/other.h5").symlink_to("../odd.h5" if rank == 3 else "../good.h5")


# --- the file ---------------------------------------------------------------------------------------------------------

case("truncated")(lambda: load("truncated.h5", P("a", "b")))
case("damaged chunk")(lambda: load("damaged.h5", readers="root", verify="full"))
case("damaged Zarr chunk")(lambda: load("damaged.zarr", P("b", "a"), readers="parallel", verify="checksum"))
case("damaged Zarr shard")(lambda: load("sharded.zarr", P(), readers=2, verify="checksum"))
case("damaged chunk, cast and selected")(
    lambda: load("damaged.h5", P("b"), select=np.s_[2:6, 11], dtype="float16", readers="parallel", verify="full")
)


# --- what only some ranks see -----------------------------------------------------------------------------------------


def from_own_folder(path: str, readers: Any) -> None:
    """Load a path that is relative to a folder of this rank's own."""
    here = os.getcwd()
    os.chdir(f"dir{comm.rank}")
    try:
        load(path, readers=readers)
    finally:
        os.chdir(here)


case("not on rank 2")(lambda: from_own_folder("some.h5", "parallel"))
case("not on rank 0")(lambda: from_own_folder("not-on-0.h5", "direct"))
case("another file on rank 3")(lambda: from_own_folder("other.h5", "parallel"))


def patched(module: str, name: str, value: Any, call: Callable[[], object], ranks: tuple[int, ...]) -> None:
    """Call with something else in the place of a name, on some ranks."""
    with patch(f"{module}.{name}", value) if comm.rank in ranks else nullcontext():
        call()


def gone(*_: Any, **__: Any) -> None:
    raise PermissionError("the disk went away")


def full(*_: Any) -> None:
    raise MemoryError("cannot allocate 512 GiB")


# In these modules a name fails on some ranks while such a load goes on.
FAILING: dict[str, tuple[str, str, Any, dict[str, Any], tuple[int, ...]]] = {
    "open fails on ranks 1 and 3 alone": ("jobs.consistency", "open_source", gone, {"readers": "parallel"}, (1, 3)),
    "a file cannot be closed on rank 1": ("jobs.consistency", "KeptSources.close", gone, {"readers": "parallel"}, (1,)),
    "metadata cannot be read on rank 0": ("jobs.loading.call", "Finder", gone, {}, (0,)),
    "no memory for the pieces on rank 1": ("jobs.loading.endpoints", "empty_pieces", full, {"readers": "root"}, (1,)),
    "assembly fails on rank 3": ("jobs.loading.endpoints", "assemble", full, {"path": "fine.h5"}, (3,)),
    "no memory for a block on rank 2": (
        "transfer.buffers",
        "aligned_bytes",
        full,
        {"path": "fine.h5", "readers": "parallel"},
        (2,),
    ),
    "no memory for a checksum on rank 0": (
        "transfer.channels",
        "checksum",
        full,
        {"path": "fine.h5", "readers": "root", "verify": "checksum"},
        (0,),
    ),
}
for failing, (where, what, error, how, on) in FAILING.items():
    case(failing)(partial(patched, f"shardload.{where}", what, error, partial(load, **how), on))


@case("no memory to pack on rank 0")
def _() -> None:
    packs = lambda *_: (_ for _ in ()).throw(MemoryError("cannot allocate 512 GiB"))  # noqa: E731
    patched("shardload.transfer.buffers", "_Buffer", packs, lambda: load("fine.h5", P(None, "b", "a"), readers="root"), (0,))


@case("no memory for a note or message on rank 0")
def _() -> None:
    """Of the first of three parts only: the others have left, and must be counted in the receipts."""
    call = lambda: patched("shardload.comm.transport", "mpi_message", full, lambda: load("fine.h5", readers="root"), (0,))  # noqa: E731
    before = MpiTransport.send_note

    def send_note(self: Any, rank: int, note: Any) -> None:
        if note[0] == OFFER:
            full()
        before(self, rank, note)

    with patch.object(MpiTransport, "send_note", send_note if comm.rank == 0 else before):
        call()


@case("no memory to decode a chunk on rank 1")
def _() -> None:
    call = lambda: load("fine.h5", readers="parallel", staging="8KiB")  # noqa: E731
    with tuned(min_chunk_nbytes=1):
        patched("shardload.transfer.reader", "settle_bools", full, call, (1,))


class Slow:
    """A source of which one read is late, so that the others are long done."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read_into(self, region: Any, out: np.ndarray) -> Any:
        time.sleep(0.3)
        return self._source.read_into(region, out)


@case("a slow reader meets the damaged chunk last")
def _() -> None:
    call = lambda: load("damaged.h5", P("b", "a"), readers="parallel", staging="3KiB")  # noqa: E731
    patched("shardload.jobs.consistency", "open_source", lambda *a: Slow(open_source(*a)), call, (1, 2))


# --- ranks that pass something else -----------------------------------------------------------------------------------


def mine(usual: Any, other: Any, rank: int = 2) -> Any:
    """`other` on one rank, `usual` on the others."""
    return other if comm.rank == rank else usual


def turned() -> Mesh:
    return mine(mesh_of(), mesh_of(jax.devices()[::-1]))


case("path differs")(lambda: load(mine("good.h5", "odd.h5")))
case("spec differs")(lambda: load(spec=mine(P("a", "b"), P("b", "a"))))
case("mesh differs")(lambda: load(mesh=turned()))
case("readers differ")(lambda: load(readers=mine("root", "direct", 3)))
case("rank 0 differs from all")(lambda: load(spec=mine(P("a", "b"), P("b", "a"), 0)))
case("scatter cannot verify, on one rank")(
    lambda: shardload.scatter(ramp(SHAPE), mesh_of(), P("a"), verify=mine("index", "full"))
)
case("an abstract mesh on one rank")(lambda: load(mesh=mine(None, AbstractMesh((2, 2), ("a", "b")), 1)))
case("an argument that nobody thought of")(lambda: load(spec=mine(P("a"), (np.array([1, 2]),), 1)))


@case("what should be verified is no array, on one rank")
def _() -> None:
    x = load()
    shardload.verify(mine(x, None, 3), "good.h5")


case("one spec is wrong")(lambda: load(spec=mine(P("a", "b"), P("a", "q"), 1)))
case("all wrong, each its own way")(lambda: load(spec=P(f"q{comm.rank}")))
case("scatter root differs")(lambda: shardload.scatter(ramp(SHAPE), mesh_of(), P("a"), root=mine(0, 1)))
case("load here, scatter there")(lambda: mine(load, lambda: shardload.scatter(ramp(SHAPE), mesh_of(), P("a", "b")))())


def plans(*datasets: str, **options: Any) -> list[shardload.Plan]:
    """Of arrays of one geometry, so that nothing but their name tells one plan from another."""
    return [shardload.plan("several.h5", mesh_of(), P("a"), dataset=name, **options) for name in datasets]


@case("plans in another order")
def _() -> None:
    one, two = plans("density", "group/pressure")
    mine((one, two), (two, one), 1)[0].execute()


@case("plans with other options")
def _() -> None:
    few, many = (plans("density", readers=2, staging=staging)[0] for staging in ("1MiB", "2MiB"))
    mine(few, many).execute()


@case("load here, execute there")
def _() -> None:
    made = plans("density", readers="parallel")[0]
    mine(made.execute, lambda: load("several.h5", P("a"), dataset="density", readers="parallel"), 3)()


@case("execute on rank 0, verify elsewhere")
def _() -> None:
    made = plans("density", readers="parallel")[0]
    x = made.execute()
    mine(lambda: shardload.verify(x, "several.h5", dataset="density"), made.execute, 0)()


@case("plan here, load there")
def _() -> None:
    mine(load, lambda: shardload.plan("good.h5", mesh_of(), PENCIL))()


@case("the caller fails between plan and execute on one rank")
def _() -> None:
    """... and goes on with the next array, as a loop with a `try` does."""
    for name in ("density", "group/pressure"):
        made = plans(name)[0]
        try:
            if comm.rank == 2 and name == "density":
                raise ZeroDivisionError
            made.execute()
        except ZeroDivisionError:
            continue


def memory_file(values: np.ndarray) -> Any:
    file = h5py.File("nowhere.h5", "w", driver="core", backing_store=False)
    return file.create_dataset("x", data=values, chunks=LAYERS, compression="gzip")


def one_off(values: np.ndarray) -> np.ndarray:
    """The same on all ranks but 2, where the last element is another."""
    values[(-1,) * values.ndim] += comm.rank == 2
    return values


case("pieces in place of the array, root")(lambda: load(ramp(SHAPE) + comm.rank, readers="root"))
case("HDF5 in memory differs, parallel")(lambda: load(memory_file(ramp(SHAPE) + comm.rank), readers="parallel"))
case("Zarr in memory differs, direct")(
    lambda: load(zarr.create_array({}, data=ramp(SHAPE) + comm.rank, chunks=LAYERS), readers="direct")
)
case("verify against other arrays")(lambda: shardload.verify(load(), one_off(ramp(SHAPE))))


def diverges() -> np.ndarray:
    raise FloatingPointError("the field diverged")


case("scatter's function raises")(lambda: shardload.scatter(diverges, mesh_of(), P("a"), root=2))


def main(folder: str, *names: str) -> None:
    os.chdir(folder)
    shardload.initialize()
    on_root(comm, prepare)
    for name in names or [name for name in cases if name not in ALONE]:
        call = cases[name]
        said: dict[str, Any] = {"case": name, "type": None}
        try:
            call()
        except Exception as error:
            more = {key: getattr(error, key, None) for key in ("rank", "path", "dataset", "chunk")}
            said |= {"type": type(error).__name__, "text": str(error), **more}
        print(json.dumps(said), flush=True)
        again = "fine.h5" if name in ALONE else "good.h5"
        check(load(again, readers="parallel", verify="checksum"), ramp(SHAPE), mesh_of(), P("a", "b"), name)


if __name__ == "__main__":
    main(*sys.argv[1:])
