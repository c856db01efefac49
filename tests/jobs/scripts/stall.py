"""Hold one rank up and see what all of them do; print it, one line of JSON per rank and step.

``stall.py FOLDER CASE [READERS]``. After a stall each rank calls once more, and then lets the error end it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from h5py._objects import phil
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from tests.mpi.support import check, mesh_of, on_root, ramp
from tests.tuning import tune
from tests.unit.files import write_hdf5

SHAPE, CHUNKS = (24, 36, 40), (4, 6, 10)
TIMEOUT = 4.0
BEATS_A_CHUNK = 1

comm = MPI.COMM_WORLD
consistency = importlib.import_module("shardload.jobs.consistency")
tune(min_chunk_nbytes=1, worth_sharing_nbytes=0, batched_chunk_nbytes=0)  # chunks are small here, and read one by one
if "inline" not in sys.argv[2]:
    tune(inline_nbytes=-1)

cases: dict[str, Callable[[Any], object]] = {}
again_on: dict[str, Any] = {}  # the communicator of the call after the stall, if not the usual one


def case(make: Callable[[Any], object]) -> Callable[[Any], object]:
    cases[make.__name__] = make
    return make


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def hold(*_: Any, **__: Any) -> Any:
    """What a file system that does not answer does."""
    say(held=comm.rank)
    threading.Event().wait()


def load(readers: Any = "parallel", **more: Any) -> Any:
    return shardload.load("x.h5", mesh_of(), P("a", "b"), readers=readers, timeout=TIMEOUT, **more)


class Chunks:
    """The chunks of a source, with something to wait for before each."""

    def __init__(self, chunks: Any, wait: Callable[..., None]) -> None:
        self.fetches, self.decode, self.read_plain, self.wait = chunks.fetch, chunks.decode, lambda *_: False, wait

    def fetch(self, box: Any, *room: Any) -> Any:
        self.wait(tuple(axis.start for axis in box))
        return self.fetches(box, *room)


class Source:
    """A source of which every chunk has to be waited for."""

    def __init__(self, source: Any, wait: Callable[..., None]) -> None:
        self._source, self._wait = source, wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def chunk_reader(self) -> Chunks:
        return Chunks(self._source.chunk_reader(), self._wait)

    def read_into(self, region: Any, out: Any) -> Any:
        self._wait(region)
        return self._source.read_into(region, out)


def slow_source(wait: Callable[..., None]) -> None:
    opens = consistency.open_source
    consistency.open_source = lambda *arguments: Source(opens(*arguments), wait)


@case
def thread(readers: Any) -> None:
    """The last rank that reads is held up in a thread, at its second chunk (where it is to be found again in the text)."""
    plan = shardload.plan("x.h5", mesh_of(), P("a", "b"), readers=readers, timeout=TIMEOUT).schedule
    late = max(rank for rank in range(min(comm.size, 3)) if plan.is_owner(rank))
    seen: list[Any] = []

    def second(index: Any) -> None:
        seen.append(index)
        if len(seen) == 2:
            say(held=comm.rank, chunk=index)
            threading.Event().wait()

    if comm.rank == late:
        slow_source(second)
    load(readers)


@case
def inline(readers: Any) -> None:
    """A read so small that the thread that calls MPI does it: that rank says nothing any more."""
    if comm.rank == 2:
        slow_source(hold)
    load(readers)


@case
def metadata(_: Any) -> None:
    if comm.rank == 0:
        importlib.import_module("shardload.jobs.loading.call").Finder = hold
    load()


@case
def absent(_: Any) -> None:
    load()
    if comm.rank == 3:
        hold()
    load()


@case
def duplicated(_: Any) -> None:
    """When there is a communicator, before the first message over it."""
    mine, _ = comm.Dup(), mesh_of()  # JAX itself waits for all processes when it is first asked for devices
    if comm.rank == 0:
        importlib.import_module("shardload.comm.group").Group.send_text = hold  # type: ignore[method-assign]
    again_on["comm"] = mine
    load(comm=mine)


@case
def left(ranks: Any) -> None:
    """Some ranks come to the end of their program, and the others make a call. All have a stream open, which is read ahead."""
    batches = iter(shardload.stream("x.h5", mesh_of(), P("a"), batch=comm.size, epochs=None, timeout=60))
    next(batches)
    while batches.report.rounds < 3:  # then it waits for the program, not for other ranks
        time.sleep(0.01)
    comm.Barrier()
    if str(comm.rank) in str(ranks).split(","):
        say(held=comm.rank)
        sys.exit(0)
    shardload.load("x.h5", mesh_of(), P("a", "b"), timeout=24)


@case
def inside(readers: Any) -> None:
    """A thread is held up in the HDF5 library, which lets nobody else in, also not at the end of the interpreter."""

    def wait(_: Any) -> None:
        phil.acquire()
        hold()

    slow_source(wait)
    load(readers)


@case
def saving(what: Any) -> None:
    """The same as a file is written: a thread that encodes, or HDF5 as it makes the metadata. Then Ctrl-C, or a stall."""

    def wait(*_: Any, **__: Any) -> None:
        phil.acquire()
        if what == "interrupted":
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        hold()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    sink = importlib.import_module("shardload.formats.hdf5.sink")
    if what == "metadata":
        sink.Hdf5Sink.finish = wait
    else:
        sink.Hdf5Encoder.encode = wait
    shardload.save("new.h5", {"x": ramp(SHAPE)}, chunks=CHUNKS, timeout=TIMEOUT)


@case
def scatter(_: Any) -> None:
    shardload.scatter(hold if comm.rank == 1 else None, mesh_of(), P("a"), root=1, timeout=TIMEOUT)


class Beats(logging.Handler):
    """Counts what the log says of beats."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.n, self.changed = 0, threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.DEBUG and record.getMessage().startswith(f"rank {comm.rank}, call "):
            with self.changed:
                self.n += 1
                self.changed.notify_all()


@case
def slow(readers: Any) -> None:
    """Each chunk of rank 0 takes a few beats; all of them together more than the timeout."""
    beats, log = Beats(), logging.getLogger("shardload")
    log.addHandler(beats)
    log.setLevel(logging.DEBUG)

    def wait(_: Any) -> None:
        with beats.changed:
            goal = beats.n + BEATS_A_CHUNK
            beats.changed.wait_for(lambda: beats.n >= goal)

    if comm.rank == 0:
        slow_source(wait)
    check(load(readers), ramp(SHAPE), mesh_of(), P("a", "b"))
    say(beats=beats.n)


def main(folder: str, name: str, readers: str = "parallel") -> None:
    os.chdir(folder)
    shardload.initialize()
    on_root(comm, lambda: write_hdf5("x.h5", {"x": ramp(SHAPE)}, chunks=CHUNKS, compression="gzip"))
    started, worked = time.monotonic(), time.process_time()
    try:
        cases[name](int(readers) if readers.isdigit() else readers)
    except shardload.StallError as error:
        say(
            type=type(error).__name__, text=str(error), rank=error.rank,
            seconds=time.monotonic() - started, cpu_seconds=time.process_time() - worked,
        )  # fmt: skip
        try:
            load(comm=again_on.get("comm"))
        except shardload.PeerError as again:
            say(again=type(again).__name__, same=str(again) == str(error))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
