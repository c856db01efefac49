"""Leave a stream in some way and see what all ranks do; each prints lines of JSON. ``streams.py FOLDER CASE PREFETCH``."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from shardload.comm import watchdog
from shardload.jobs.streaming import reader
from tests.mpi.support import check_shards, on_root, ramp
from tests.unit.files import write_hdf5

N_STEPS, BATCH, TIMEOUT = 48, 4, 4.0
SHAPE = (N_STEPS, 12, 10)

comm = MPI.COMM_WORLD
LAST = comm.size - 1
cases: dict[str, Callable[[Any], object]] = {}


def case(make: Callable[[Any], object]) -> Callable[[Any], object]:
    cases[make.__name__] = make
    return make


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def stream(**more: Any) -> Any:
    devices = np.array(jax.devices())[::-1]
    mesh = Mesh(devices.reshape(2 if devices.size % 2 == 0 else 1, -1), ("data", "lat"))
    options = {"batch": BATCH, "timeout": TIMEOUT, "dataset": "x", "prefetch": PREFETCH} | more
    return shardload.stream("x.h5", mesh, P("data", "lat"), **options)


def check_batch(batch: jax.Array, index: Any) -> None:
    check_shards(batch, ramp(SHAPE)[index])


def take(batches: Any, n: int) -> None:
    for _ in range(n):
        batch = next(batches)
        check_batch(batch, batches.index)
        say(batch=int(batches.index[0]) // BATCH)


@case
def left_open(batches: Any) -> None:
    """The program ends in the middle, on one rank a while after the others, and the iterator is a global variable."""
    globals()["kept"] = batches
    take(batches, 2)
    if comm.rank == LAST:
        time.sleep(2)


@case
def hangs(batches: Any) -> None:
    """A rank computes for ever."""
    take(batches, 2)
    if comm.rank == LAST:
        say(held=comm.rank)
        threading.Event().wait()
    take(batches, N_STEPS)


@case
def computes(batches: Any) -> None:
    """All ranks compute for longer than the timeout, and then come to the end."""
    take(batches, 2)
    time.sleep(1.5 * TIMEOUT)
    take(batches, N_STEPS // BATCH - 2)
    assert next(batches, None) is None


@case
def interrupted(batches: Any) -> None:
    """Ctrl-C on all ranks, as they wait for a batch that does not come."""
    take(batches, 2)
    slow_reads()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        take(batches, N_STEPS)
    except KeyboardInterrupt:
        say(interrupted=True)
    say(threads=[thread.name for thread in threading.enumerate() if thread.name.startswith("shardload-stream")])


def slow_reads() -> None:
    """From now on every read of a file takes a second."""
    from shardload.jobs.streaming.endpoints import StreamSource

    opens = StreamSource.open

    def slow(self: Any, *arguments: Any) -> Any:
        time.sleep(1)
        return opens(self, *arguments)

    StreamSource.open = slow  # type: ignore[method-assign]


@case
def threads(_: Any) -> None:
    """MPI was started without threads (see the test)."""
    try:
        stream(prefetch=2)
    except shardload.ConfigError as error:
        say(text=str(error))
    take(iter(stream(prefetch=0)), 2)


@case
def departs(batches: Any) -> None:
    """A rank comes to the end of its program early, without an error."""
    take(batches, 2)
    if comm.rank == LAST:
        say(held=comm.rank)
        del batches
        return
    take(batches, N_STEPS)


@case
def breaks(batches: Any) -> None:
    """A rank leaves the loop. The others are in their step, which waits for it: until somebody has warned of that."""
    in_step(batches, n_rounds=0)


@case
def breaks_later(batches: Any) -> None:
    """The same, after all that may be read ahead was read: no rank takes part in a round any more."""
    in_step(batches, n_rounds=PREFETCH + 4)


def in_step(batches: Any, n_rounds: int) -> None:
    watchdog.NOTICE_SECONDS = reader.NOTICE_SECONDS = 0.1  # type: ignore[attr-defined]
    warned = Path("warned")
    handler = logging.Handler()
    handler.emit = lambda record: warned.write_text(record.getMessage())  # type: ignore[method-assign,assignment,return-value]
    logging.getLogger("shardload").addHandler(handler)
    take(batches, 2)
    if comm.rank == LAST:
        wait_until(lambda: batches.report.rounds >= n_rounds)
        batches.close()
    wait_until(warned.exists)
    if comm.rank != LAST:
        take(batches, N_STEPS)


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not is_so() and time.monotonic() < limit:
        time.sleep(0.01)


def main(folder: str, name: str) -> None:
    os.chdir(folder)
    shardload.initialize()
    on_root(comm, lambda: write_hdf5("x.h5", {"x": ramp(SHAPE)}, chunks=(2, 12, 6), compression="gzip"))
    __import__("shardload.jobs.streaming.plan").jobs.streaming.plan._ROUND_NBYTES = 1  # many rounds
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    began = time.monotonic()
    try:
        cases[name](iter(stream(prefetch=0 if name == "threads" else PREFETCH)))
    except shardload.PeerError as error:
        say(type=type(error).__name__, text=str(error), rank=error.rank, seconds=time.monotonic() - began)
        raise
    say(done=True)


if __name__ == "__main__":
    PREFETCH = int(sys.argv[3])
    main(*sys.argv[1:3])
