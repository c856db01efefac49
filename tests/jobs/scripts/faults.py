"""Break something in the middle of loads, on one rank or in the file; print what every rank sees, one line of JSON each.

``faults.py FOLDER [CASE ...]``: faults that a job survives. After each one a good load must work.
``faults.py FOLDER die PHASE RANK``: one that it does not survive.
``faults.py FOLDER interrupt 0|1``: Ctrl-C in each second phase, from that on, and an alarm in the others.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import jax
import zarr
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from shardload.comm.group import Group
from shardload.comm.shared_memory import Segment
from shardload.formats.hdf5.chunks import Hdf5Chunks
from shardload.formats.zarr.chunks import ChunkFiles, ZarrChunks
from tests.mpi.support import check, mesh_of, on_root, ramp
from tests.tuning import as_large
from tests.unit.files import write_hdf5

PATIENCE_SECONDS = 8.0  # longer than until a rank hears of another one (the heartbeat, 5 s)
SHAPE, CHUNKS, SPEC = (16, 24, 20), (4, 6, 20), P(None, "a", "b")
READERS = ("root", "parallel", "direct", 2)
BAD = (1, 2, 0)  # the chunk that is damaged in the files that are
DAMAGED = -1  # in place of a rank: nothing happens but that the file is what it is

comm = MPI.COMM_WORLD
consistency = importlib.import_module("shardload.jobs.consistency")
THIRD = int(os.environ.get("FAULTS_THIRD", 0))  # of the ways of reading: for the first fault; for the next one it is the next
as_large(batched_chunk_nbytes=0)  # faults happen at a chunk


def load(path: Any = "good.h5", readers: Any = "parallel", **options: Any) -> Any:
    return shardload.load(path, mesh_of(), SPEC, readers=readers, staging="48KiB", **options)


def damage_hdf5(path: str, change: Callable[[bytes], bytes]) -> None:
    """Write the bytes of one chunk again, changed."""
    with h5py.File(path, "r+") as file:
        at = tuple(i * c for i, c in zip(BAD, CHUNKS, strict=True))
        mask, stored = file["x"].id.read_direct_chunk(at)
        file["x"].id.write_direct_chunk(at, change(stored), mask)


def damage_zarr(path: str, change: Callable[[bytes], bytes]) -> None:
    file = Path(path, "c", *map(str, BAD))
    file.write_bytes(change(file.read_bytes()))


def flip(stored: bytes) -> bytes:
    middle = len(stored) // 2
    return stored[:middle] + bytes([stored[middle] ^ 16]) + stored[middle + 1 :]


def cut(stored: bytes) -> bytes:
    return stored[: len(stored) // 2]


def prepare() -> None:
    """Make the files."""
    values = ramp(SHAPE)
    write_hdf5("good.h5", {"x": values}, chunks=CHUNKS, compression="gzip")
    write_hdf5("other.h5", {"x": values + 1}, chunks=CHUNKS, compression="gzip")
    write_hdf5("checked.h5", {"x": values}, chunks=CHUNKS, fletcher32=True)
    zarr.create_array("good.zarr", data=values, chunks=CHUNKS)
    shutil.copy("good.h5", "beside.h5")
    zarr.create_array("beside.zarr", data=values, chunks=CHUNKS)
    zarr.create_array("other.zarr", data=values + 1, chunks=CHUNKS)
    checked = {"compressors": (zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec())}
    zarr.create_array("checked.zarr", data=values, chunks=CHUNKS, **checked)
    for kind, make, ends in (("h5", damage_hdf5, shutil.copy), ("zarr", damage_zarr, shutil.copytree)):
        for name, change in (("cut", cut), ("flipped", flip)):
            source = f"good.{kind}" if name == "cut" or kind == "h5" else f"checked.{kind}"
            ends(source, f"{name}.{kind}")
            make(f"{name}.{kind}", change)
    shutil.copy("checked.h5", "flipped-checked.h5")
    damage_hdf5("flipped-checked.h5", flip)


def on_call(right: Callable[..., Any], k: int, fault: Callable[[], None], stays: bool = False) -> Callable[..., Any]:
    """The same function, with something that happens before its k-th call (of a chunk reader: for the file at fault), and, if
    it stays, before each call after that: several chunks that could not be read are read again one by one.
    """
    n = [0]

    def call(*arguments: Any, **options: Any) -> Any:
        is_met = not arguments or file_of(arguments[0]) in (None, at_fault[0])
        n[0] += is_met
        if is_met and (n[0] == k or (stays and n[0] > k)):
            met[0] += 1
            fault()
        return right(*arguments, **options)

    return call


at_fault = ["good.h5"]  # the path of the array that something happens to
met = [0]  # how often it has happened


def file_of(reader: Any) -> str | None:
    """The file of a reader of chunks; None for anything else."""
    if isinstance(reader, Hdf5Chunks):
        path = os.readlink(f"/proc/self/fd/{reader._stored.descriptor}")
        return os.path.relpath(path.removesuffix(" (deleted)"))
    return os.path.normpath(reader._folder.path) if isinstance(reader, ZarrChunks) else None


def io_error() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def no_memory() -> None:
    raise MemoryError("cannot allocate 512 GiB")


def no_space(nbytes: int) -> Segment:
    met[0] += 1
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def short(right: Callable[..., int]) -> Callable[..., int]:
    """A file system that gives at most 7 bytes at a time."""

    def call(descriptor: int, buffers: Any, offset: int) -> int:
        met[0] += 1
        return right(descriptor, [memoryview(buffers[0]).cast("B")[:7]], offset)

    return call


def truncate() -> None:
    os.truncate("changing.h5", os.path.getsize("changing.h5") // 2)


def replace() -> None:
    shutil.copy("other.h5", "new.h5")
    os.replace("new.h5", "changing.h5")


def write() -> None:
    """The file is written in place, and is as long as before."""
    with open("changing.h5", "r+b") as file:
        stored = file.read()
        file.seek(0)
        file.write(stored)


def replace_store() -> None:
    shutil.copytree("other.zarr", "new.zarr")
    os.rename("changing.zarr", "old.zarr")
    os.rename("new.zarr", "changing.zarr")
    shutil.rmtree("old.zarr")


def changing_store() -> str:
    on_root(comm, lambda: shutil.copytree("good.zarr", "changing.zarr", dirs_exist_ok=True))
    return "changing.zarr"


def changing() -> str:
    on_root(comm, lambda: shutil.copy("good.h5", "changing.h5"))
    return "changing.h5"


def at_second(kind: Any, name: str, fault: Callable[[], None], stays: bool = False) -> Callable[[], Any]:
    """Something that happens before the second call of a method of a chunk reader."""
    return lambda: patch.object(kind, name, on_call(getattr(kind, name), 2, fault, stays))


# Each: on which ranks it happens (None: on the first that reads), what is patched there, and which file is loaded.
FAULTS: dict[str, tuple[int | None, Callable[[], Any], Callable[[], str]]] = {
    "EIO at a reader's 2nd chunk, HDF5": (None, at_second(Hdf5Chunks, "fetch", io_error, stays=True), lambda: "good.h5"),
    "EIO at a reader's 2nd chunk, Zarr": (None, at_second(ChunkFiles, "fetch", io_error, stays=True), lambda: "good.zarr"),
    "no memory at a reader's 2nd chunk": (None, at_second(Hdf5Chunks, "decode", no_memory), lambda: "good.h5"),
    "reads of 7 bytes at a time": (None, lambda: patch.object(os, "preadv", short(os.preadv)), lambda: "good.h5"),
    "no space for shared memory on rank 1": (1, lambda: patch.object(Segment, "create", no_space), lambda: "good.h5"),
    "file truncated during the load": (None, at_second(Hdf5Chunks, "fetch", truncate), changing),
    "file replaced during the load": (None, at_second(Hdf5Chunks, "fetch", replace), changing),
    "file written during the load": (None, at_second(Hdf5Chunks, "fetch", write), changing),
    "store replaced during the load": (None, at_second(ChunkFiles, "fetch", replace_store), changing_store),
    **{
        f"{what}, {kind}": (DAMAGED, ExitStack, lambda path=path: path)
        for what, kind, path in (
            ("chunk cut short", "gzip in HDF5", "cut.h5"),
            ("chunk cut short", "zstd in Zarr", "cut.zarr"),
            ("flipped bit", "gzip in HDF5", "flipped.h5"),
            ("flipped bit", "Fletcher-32 in HDF5", "flipped-checked.h5"),
            ("flipped bit", "CRC-32C in Zarr", "flipped.zarr"),
        )
    },
}


def first_reader(readers: Any, in_tree: bool) -> int:
    """The first rank that reads the array at fault. Of five arrays in a tree, each of the first four is read by one rank."""
    return 0 if readers == "root" or (readers == 2 and not in_tree) else 2


def load_tree(path: str, readers: Any, comm: Any) -> jax.Array:
    """Load five arrays, of which the third is at fault; the others have files like it. Returns the third."""
    beside = f"beside{os.path.splitext(path)[1]}"
    names = [f"{k}, {'bad' if k == 2 else 'good'}" for k in range(5)]  # sorted by JAX
    found = load({name: path if "bad" in name else beside for name in names}, readers, comm=comm)
    for name in names:
        if "good" in name:
            check(found[name], ramp(SHAPE), mesh_of(), SPEC, name)
    return found["2, bad"]


def survive(names: list[str]) -> None:
    """Each fault is met once by the first load over a communicator, and else over one that has met others before."""
    used = comm.Dup()
    for k, name in enumerate(names or FAULTS):
        makes_memory = "shared memory" in name  # which the first load does
        all_readers = READERS if FAULTS[name][0] != DAMAGED else READERS[k % 2 :: 2]  # test_errors has each with damaged files
        ways = [*((one, False) for one in all_readers), (READERS[k % len(READERS)], True)]
        for readers, in_tree in ways[(k + THIRD) % 3 :: 3]:
            own = comm.Dup() if makes_memory or (readers, in_tree) == ("parallel", False) else used
            survive_one(name, readers, own, in_tree)
            if own is not used:
                own.Free()
    used.Free()


def survive_one(name: str, readers: Any, own: Any, in_tree: bool) -> None:
    where, apply, path_of = FAULTS[name]
    path = at_fault[0] = path_of()
    rank = first_reader(readers, in_tree) if where is None else where
    said: dict[str, Any] = {"rank": comm.rank, "case": name, "readers": readers, "tree": in_tree, "type": None, "text": ""}
    met[0] = 0
    try:
        with apply() if comm.rank == rank else ExitStack():
            x = (load_tree if in_tree else load)(path, readers, comm=own)
        check(x, ramp(SHAPE), mesh_of(), SPEC, name)
    except shardload.ShardloadError as error:
        said |= {"type": type(error).__name__, "text": str(error), "chunk": getattr(error, "chunk", None)}
    print(json.dumps(said | {"met": met[0]}), flush=True)
    check(load(comm=own), ramp(SHAPE), mesh_of(), SPEC, name)


# Where a rank is when it dies, or Ctrl-C comes.
PHASES: dict[str, tuple[Any, str]] = {
    "metadata": (importlib.import_module("shardload.jobs.loading.call"), "Finder"),
    "planning": (importlib.import_module("shardload.jobs.loading.call").LoadCall, "plan_file"),
    "opening": (consistency, "open_source"),
    "reading": (Hdf5Chunks, "fetch"),
    "exchange": (importlib.import_module("shardload.transfer.channels").Channels, "check"),
    "assembly": (importlib.import_module("shardload.jobs.loading.endpoints"), "assemble"),
}


def die(phase: str, rank: str) -> None:
    where, name = PHASES[phase]
    if comm.rank == int(rank):
        setattr(where, name, on_call(getattr(where, name), 1, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    load(timeout=None)
    print("went on", flush=True)


class Alarm(BaseException):
    """What the handler of a signal raises: no error of a load, since it is no Exception."""


def alarm(*_: Any) -> None:
    raise Alarm


def interrupt(phase: str, sent: signal.Signals) -> None:
    """Ctrl-C, or an alarm, on all ranks while all are in a load; each catches it, and they load again."""
    check(load(), ramp(SHAPE), mesh_of(), SPEC)
    where, name = PHASES[phase]
    right = getattr(where, name)

    hitter = 0 if phase == "metadata" else 2
    pids = comm.allgather(os.getpid())
    begin = Group.begin

    def arrive(*arguments: Any) -> Any:
        comm.isend(None, dest=hitter)  # this rank is in the load now
        return begin(*arguments)

    def hit() -> None:
        for rank in range(comm.size):
            comm.recv(source=rank)
        for pid in sorted(pids, key=os.getpid().__eq__):  # itself last
            os.kill(pid, sent)

    Group.begin = arrive  # type: ignore[method-assign]
    if comm.rank == hitter:
        setattr(where, name, on_call(right, 1, hit))
    outcome = "loaded"
    try:
        load()
    except (KeyboardInterrupt, Alarm):
        outcome = "interrupted"
    except shardload.StallError as error:  # Python has dropped that of this rank, which hears of another rank's
        outcome = "interrupted" if "has left this call by an error of its own" in str(error) else str(error)
    finally:
        setattr(where, name, right)
        Group.begin = begin  # type: ignore[method-assign]
    wait_for_all(phase, pids, sent)
    check(load(), ramp(SHAPE), mesh_of(), SPEC)
    print(json.dumps({"phase": phase, "signal": sent.name, "outcome": outcome}), flush=True)


def wait_for_all(phase: str, pids: list[int], sent: signal.Signals) -> None:
    """A barrier; a rank that does not come has Ctrl-C pressed again: Python drops what it raises in a destructor."""
    done = [Path(f"{phase}-{sent}-{rank}") for rank in range(comm.size)]
    done[comm.rank].touch()
    request, deadline = comm.Ibarrier(), time.monotonic() + PATIENCE_SECONDS
    while not request.Test():
        if time.monotonic() > deadline and not any(one.exists() for one in done[: comm.rank]):  # one of them presses
            for pid, one in zip(pids, done, strict=True):
                if not one.exists():
                    os.kill(pid, sent)
            deadline += PATIENCE_SECONDS
        time.sleep(0.001)


def main(folder: str, *what: str) -> None:
    os.chdir(folder)
    shardload.initialize()
    on_root(comm, prepare)
    if what[:1] == ("die",):
        die(*what[1:])
    elif what[:1] == ("interrupt",):
        signal.signal(signal.SIGALRM, alarm)
        for k, phase in enumerate(PHASES):
            interrupt(phase, (signal.SIGINT, signal.SIGALRM)[(k + int(what[1])) % 2])
    else:
        survive(list(what))


if __name__ == "__main__":
    main(*sys.argv[1:])
