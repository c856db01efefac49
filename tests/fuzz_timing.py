"""Random programs of several calls, in which ranks and threads are held up at random lines. On any number of ranks:

    mpiexec -n 4 python -m tests.fuzz_timing --programs 20 --seed 1

All ranks draw the same program: loads, saves in the background, streams that are left in the middle, threads. Each rank draws
its own pauses, before lines of shardload and of Python's threads. Results are compared with NumPy, h5py and zarr-python. The
first difference ends the job. A program that waits for ever is ended from outside (``tests.jobs.launch --timeout``).
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import h5py
import jax
import numpy as np
import zarr
from jax.sharding import NamedSharding, PartitionSpec

import shardload
from shardload import ConfigError, PeerError, SourceError
from shardload.comm.launch import free_port
from tests.fuzz_loads import comm, compare, folder_in_memory, padded, pick, sharding
from tests.mpi.support import on_root, ramp, same_error
from tests.tuning import as_large
from tests.unit.files import stored_in

SHAPE, CHUNKS = (24, 8, 6), (2, 4, 6)
VALUES = ramp(SHAPE)
TIMEOUT = 100.0
CALLS = "load scatter verify copy append save save wait stream stream go_on damaged progress other_call"
OF_THREADS = ("load", "scatter", "verify", "copy", "save", "stream")

Array = np.ndarray[Any, Any]
Draw = np.random.Generator


def hold_up(seed: int, share: float, longest_seconds: float) -> None:
    """From now on, threads of this rank sleep before some of their lines, mostly shortly."""
    draw = random.Random(seed)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            is_held_up = frame.f_globals.get("__name__", "").startswith(("shardload", "threading", "concurrent"))
            return trace if is_held_up else None
        if event == "line" and draw.random() < share:
            time.sleep(draw.random() ** 4 * longest_seconds)
        return trace

    sys.setswitchinterval(1e-5)
    threading.settrace(trace)
    sys.settrace(trace)


class Program:
    """The calls of a program, and what it has open."""

    def __init__(self, draw: Draw, sources: Path, folder: Path, ranks: Any = None) -> None:
        self.draw, self.sources, self.folder, self.ranks = draw, sources, folder, ranks
        self.options: dict[str, Any] = {"comm": ranks, "timeout": TIMEOUT, "progress": False}
        self.saves: list[tuple[Any, Path, Array]] = []
        self.streams: list[tuple[Any, int]] = []
        self.rows = VALUES[:0]  # of the store that grows
        self.n_files = 0

    def new_path(self) -> Path:
        self.n_files += 1
        return self.folder / f"{self.n_files}{pick(self.draw, ['.h5', '.zarr'])}"

    def source(self) -> Path:
        return Path(self.sources, pick(self.draw, ["x.h5", "x.zarr"]))

    def array(self, values: Array) -> jax.Array:
        mesh, spec, cuts = sharding(self.draw, values.ndim)
        whole = padded(values, cuts)
        return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), whole.__getitem__)

    def load(self) -> None:
        mesh, spec, cuts = sharding(self.draw, 3)
        how = {"readers": pick(self.draw, ["auto", "root", "parallel", "direct"]), "verify": pick(self.draw, ["index", "full"])}
        x = shardload.load(self.source(), mesh, spec, dataset="x", pad=0, **how, **self.options)
        compare(f"load {spec} {how}", x, padded(VALUES, cuts))

    def scatter(self) -> None:
        mesh, spec, cuts = sharding(self.draw, 3)
        root, rank = int(self.draw.integers(comm.size)), (self.ranks or comm).rank
        x = shardload.scatter(VALUES if rank == root else None, mesh, spec, root=root, pad=0, **self.options)
        compare(f"scatter {spec}", x, padded(VALUES, cuts))

    def verify(self) -> None:
        x = self.array(VALUES)
        shardload.verify(x, self.source(), dataset="x", pad=0, how=pick(self.draw, ["file", "full"]), comm=self.ranks)

    def copy(self) -> None:
        path = self.new_path()
        shardload.copy(self.source(), path, chunks=pick(self.draw, [CHUNKS, (5, 3, 2)]), **self.options)
        check_file(path, VALUES)

    def append(self) -> None:
        path, new = self.folder / "run.zarr", VALUES[: int(self.draw.integers(1, 5))] + len(self.rows)
        x = self.array(new)
        if len(self.rows):
            shardload.append(path, {"x": x}, dim=0, shape=new.shape, **self.options)
        else:
            shardload.save(path, {"x": x}, chunks=CHUNKS, shape=new.shape, **self.options)
        self.rows = np.concatenate([self.rows, new])
        check_file(path, self.rows)

    def save(self) -> None:
        path, values = self.new_path(), VALUES + self.n_files
        how = {"compression": pick(self.draw, [None, "gzip"]), "background": pick(self.draw, [True, True, False])}
        report = shardload.save(path, {"x": self.array(values)}, chunks=CHUNKS, shape=SHAPE, **how, **self.options)
        if how["background"]:
            self.saves.append((report, path, values))
        else:
            check_file(path, values)

    def wait(self) -> None:
        for save, path, values in self.saves:
            save.wait()
            check_file(path, values)
        self.saves.clear()

    # --- streams

    def open_stream(self, name: str) -> tuple[Any, int]:
        draw = self.draw
        how = {"shuffle": pick(draw, [None, 3]), "prefetch": pick(draw, [0, 1, 3]), "pool": pick(draw, ["auto", 4096])}
        mesh, spec = sharding(draw, 3)[0], PartitionSpec(pick(draw, ["a", "b", None]))
        batch, path = 2 * comm.size * pick(draw, [1, 2]), self.sources / f"{name}.h5"
        options = {"comm": self.ranks, "timeout": TIMEOUT}
        data = shardload.stream(path, mesh, spec, dataset=name, batch=batch, remainder="drop", epochs=2, **how, **options)
        return iter(data), len(data)

    def take(self, batches: Any, n_left: int) -> int:
        """Take some batches. Returns how many are left."""
        n = int(self.draw.integers(0, n_left + 1))
        for _ in range(n):
            batch = next(batches)
            compare(f"batch {batches.index}", batch, VALUES[batches.index])
        return n_left - n

    def stream(self) -> None:
        batches, n = self.open_stream("x")
        n_left, how = self.take(batches, n), pick(self.draw, ["kept", "closed", "left", "raised", "dropped", "cycle"])
        if how == "kept":
            self.streams.append((batches, n_left))
        elif how == "closed":
            batches.close()
        elif how in ("left", "raised"):
            with suppress(KeyError), batches:
                self.take(batches, n_left)
                if how == "raised":  # by the user's own code
                    raise KeyError
        elif how == "cycle":
            cycle: list[Any] = [batches]
            cycle.append(cycle)

    def go_on(self) -> None:
        for number, (batches, n_left) in enumerate(self.streams):
            self.streams[number] = batches, self.take(batches, n_left)

    def damaged(self) -> None:
        batches, (mesh, spec, _) = self.open_stream("bad")[0], sharding(self.draw, 3)
        load = {"dataset": "bad", "pad": 0, **self.options}
        same_error(comm, lambda: [*batches], SourceError, "chunk (5, ")
        same_error(comm, lambda: shardload.load(self.sources / "bad.h5", mesh, spec, **load), SourceError, "chunk (5, ")

    # --- errors of one rank, and threads

    def progress(self) -> None:
        """A function of the user that fails on one rank."""
        bad, (mesh, spec, _) = int(self.draw.integers(comm.size)), sharding(self.draw, 3)

        def advance(*_: Any) -> None:
            if comm.rank == bad:
                raise KeyError("of the user")

        load = {"dataset": "x", "pad": 0, **self.options, "progress": advance}
        same_error(
            comm, lambda: shardload.load(self.source(), mesh, spec, readers="parallel", **load), PeerError, "of the user"
        )

    def other_call(self) -> None:
        """One rank makes another call."""
        bad, (mesh, spec, _) = int(self.draw.integers(comm.size)), sharding(self.draw, 3)
        load = {"dataset": "y" if comm.rank == bad else "x", "pad": 0, **self.options}
        same_error(comm, lambda: shardload.load(self.source(), mesh, spec, **load), PeerError, "all ranks must")

    def threads(self) -> None:
        """Threads of the user, each with a communicator of its own, which is new."""
        programs, names = [], [[pick(self.draw, OF_THREADS) for _ in range(2)] for _ in range(2)]
        for _ in names:
            folder, order = self.new_path(), pick(self.draw, [1, -1])
            folder.mkdir(exist_ok=True)
            draw = np.random.default_rng(self.draw.integers(1 << 30))
            programs.append(Program(draw, self.sources, folder, comm.Split(0, order * comm.rank)))
        in_threads([lambda k=k: programs[k].run(names[k]) for k in range(2)])  # type: ignore[misc]
        comm.Barrier()
        for program in programs:
            program.ranks.Free()

    def threads_at_once(self) -> None:
        """Threads that make one call over one communicator: each is refused on all ranks, or on none."""
        seed, n_loaded = int(self.draw.integers(1 << 30)), list[int]()

        def call() -> None:
            try:
                Program(np.random.default_rng(seed), self.sources, self.folder).load()
                n_loaded.append(1)
            except ConfigError as error:
                assert "another thread of this process" in str(error), error

        in_threads([call, call])
        assert n_loaded and len(set(comm.allgather(len(n_loaded)))) == 1, n_loaded

    def run(self, names: list[str]) -> None:
        """Make the calls, and close what is open."""
        for name in names:
            getattr(self, name)()
            if self.ranks is None and self.draw.random() < 0.3:
                gc.collect()
        self.wait()
        for batches, _ in self.streams:
            batches.close()


def in_threads(calls: list[Callable[[], None]]) -> None:
    """Make calls in threads, and raise the first error of one."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


def check_file(path: Path, expected: Array) -> None:
    """Compare a file with what it should have."""
    if not np.array_equal(stored_in(path, "x"), expected):
        raise ValueError(f"rank {comm.rank}: WRONG {path.name}")


def write_sources(folder: Path) -> None:
    for name in ("x", "bad"):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset(name, data=VALUES, chunks=CHUNKS, compression="gzip")
            if name == "bad":
                file[name].id.write_direct_chunk((10, 0, 0), b"no deflate stream")
    zarr.open_group(folder / "x.zarr", mode="w").create_array("x", data=VALUES, chunks=CHUNKS)


def main() -> None:
    """Run as many programs as the caller says."""
    parser = argparse.ArgumentParser()
    for name, default in (("--programs", 20), ("--first", 0), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    for name, seconds in (("--share", 0.002), ("--longest", 0.05)):
        parser.add_argument(name, type=float, default=seconds)
    given = parser.parse_args()
    names = CALLS.split()
    if os.environ.get("SHARDLOAD_MPI") == "0":
        jax.distributed.initialize(comm.bcast(f"127.0.0.1:{free_port()}"), comm.size, comm.rank)
    else:
        shardload.initialize()
        names += ["threads", "threads", "threads_at_once"]
    if given.seed % 2:
        as_large(small_nbytes=0)
    with folder_in_memory() as sources:
        on_root(comm, lambda: write_sources(sources))
        for number in range(given.first, given.first + given.programs):
            draw, folder = np.random.default_rng([given.seed, number]), sources / f"{number}"
            on_root(comm, folder.mkdir)
            calls = [pick(draw, names) for _ in range(8)]
            if int(draw.integers(comm.size + 1)) in (comm.rank, comm.size):  # one rank alone, or all
                hold_up(hash((given.seed, number, comm.rank)), given.share, given.longest)
            try:
                Program(draw, sources, folder).run(calls)
            except BaseException as error:
                error.add_note(f"rank {comm.rank}: --seed {given.seed} --first {number} --programs 1: {calls}")
                raise
            sys.settrace(None)
            threading.settrace(None)
            comm.Barrier()
    if comm.rank == 0:
        print(f"{given.programs} programs ran on {comm.size} ranks", flush=True)


if __name__ == "__main__":
    main()
