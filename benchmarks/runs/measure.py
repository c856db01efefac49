"""How are times measured? All ways of a cell take turns, repeat by repeat, each alone on the machine.

1. For one number of ranks start all jobs (JAX's ranks, Heat's, parallel HDF5's, the floor's process); they wait in a
   socket.
2. For each cell, each way loads once untimed: that warms the page cache, and every shard is compared with the plain
   values.
3. Then, `repeats` times: each way once, in another order each time. A time is from the first rank's
   start to the last rank's end. Before each load, as much memory as the largest way needs is allocated, written and freed: on a
   virtual machine whose host has taken back free pages, the next process to use them waits up to a second, by chance.
   With `cold` the file's pages are dropped from the page cache before each load.
4. Results are written after every cell. A way that fails is recorded with its error and left out of the cell.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.cases.cells import FLOOR, OURS, PEERS, Cell
from benchmarks.cases.layouts import File
from benchmarks.remote import RemoteError, RemoteJob
from benchmarks.runs.environments import missing, start

_WORTH_WARMING_NBYTES = 16 << 20
LOAD_SECONDS = 300.0  # for one load; then it has hung
OWN_JOB = ("heat", "parallel-hdf5", FLOOR)
Say = Callable[[str], None]


class Jobs:
    """The jobs of one number of ranks, started when first asked for."""

    def __init__(self, n: int, program: Sequence[str] | None = None, devices: int = 1) -> None:
        self.n, self.program, self.devices = n, program, devices
        self.running: dict[str, RemoteJob] = {}
        self.broken: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}

    def __enter__(self) -> Jobs:
        self._stack = ExitStack()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, way: str, do: str, **request: Any) -> list[dict[str, Any]]:
        """All replies. RemoteError if it failed; a job that was killed is started anew next time, an absent one is not."""
        name = way if way in OWN_JOB else "jax"
        if name in self.broken:
            raise RemoteError(self.broken[name])
        if name not in self.running:
            try:
                self.running[name] = self._stack.enter_context(start(name, self.n, self.program, self.devices))
            except RemoteError as error:
                self.broken[name] = str(error)
                raise
            self.versions[name] = self.running[name].versions
        try:
            return self.running[name].ask(LOAD_SECONDS, way=way, do=do, **request)
        except RemoteError:
            if not self.running[name].is_alive:
                del self.running[name]
            raise

    def time(self, way: str, do: str, **request: Any) -> dict[str, Any]:
        """Seconds from the first rank's start to the last one's end, and rank 0's report."""
        replies = self.ask(way, do, **request)
        seconds = max(r["end"] for r in replies) - min(r["start"] for r in replies)
        cpu = sum(r.get("cpu", 0.0) for r in replies)
        return {"seconds": seconds, "cpu_seconds": cpu, "report": replies[0].get("report") or {}}


def measure(
    cells: Sequence[Cell],
    files: dict[str, File],
    ways: Sequence[str],
    *,
    repeats: int,
    cold: bool = False,
    out: Path | None = None,
    say: Say = lambda _: None,
    program: Sequence[str] | None = None,
    kind: str = "run",
) -> dict[str, Any]:
    """Time all cells; return (and write to `out`) the record of all samples."""
    record = new_record(kind, files, repeats=repeats, cold=cold)
    for n, of_n in groupby(cells, key=lambda cell: cell.ranks):
        with Jobs(n, program) as jobs:
            for cell in of_n:
                record["cells"].append(measure_cell(jobs, cell, files[cell.layout], ways, repeats=repeats, cold=cold, say=say))
                record["versions"] |= jobs.versions
                if out is not None:
                    write_record(out, record)
    return record


def measure_cell(
    jobs: Jobs, cell: Cell, file: File, ways: Sequence[str], *, repeats: int, cold: bool, say: Say
) -> dict[str, Any]:
    """Warm, verify, take turns."""
    took: dict[str, dict[str, Any]] = {}
    wanted = [way for way in ways if cell.has_way(way)]
    requests = {way: {"spec": cell.spec, "file": file.request()} for way in wanted}

    def attempt(way: str, **more: Any) -> None:
        if "error" in took[way]:
            return
        if not more:
            warm_free_memory(file.nbytes)
        if cold and not more:
            drop_from_page_cache(file)
        try:
            found = jobs.time(way, "run", **requests[way], **more)
        except RemoteError as error:
            took[way]["error"] = without_folders(error)
            say(f"  {cell.label}: {way} failed: {error}")
            return
        if more:
            took[way]["verified"] = way != FLOOR
        else:
            took[way]["seconds"].append(found["seconds"])
            took[way].setdefault("cpu_seconds", []).append(found["cpu_seconds"])
            took[way]["report"] = found["report"]

    for way in wanted:
        took[way] = {"seconds": []}
        attempt(way, verify=True)
    for repeat in range(repeats):
        for way in turns(wanted, repeat):
            attempt(way)
    say(f"{cell.label}: " + ", ".join(f"{way} {median(t['seconds']):.3f}" for way, t in took.items() if t["seconds"]))
    return {**vars(cell), "stored_nbytes": file.stored_nbytes, "nbytes": file.nbytes, "ways": took}


def turns(ways: Sequence[str], repeat: int) -> list[str]:
    """The order of the ways: another one begins each time, and every second time in reverse: none always follows the same one.

    >>> turns("abc", 0), turns("abc", 1)
    (['a', 'b', 'c'], ['a', 'c', 'b'])
    """
    begin = repeat % max(len(ways), 1)
    order = [*ways[begin:], *ways[:begin]]
    return order[::-1] if repeat % 2 else order


def without_folders(error: Exception) -> str:
    """The first line, with file names instead of paths: records are published.

    >>> without_folders(ValueError("no chunk in /data/x/rho.h5"))
    'no chunk in rho.h5'
    """
    return re.sub(r"/\S*/", "", str(error).splitlines()[0] if str(error) else type(error).__name__)


def default_ways(say: Say = lambda _: None) -> list[str]:
    """All ways that are installed here."""
    for way in PEERS:
        if missing(way):
            say(f"without {way}: {missing(way)}")
    return [OURS, *(way for way in PEERS if not missing(way)), FLOOR]


def median(samples: Sequence[float]) -> float:
    """Of an even number: the lower middle and the upper middle, halved."""
    ordered = sorted(samples)
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def warm_free_memory(nbytes: int) -> None:
    """Allocate, write and free three times `nbytes` in a child process, so that the host has provided these pages.

    Not for a small file: so much is always warm.
    """
    if nbytes < _WORTH_WARMING_NBYTES:
        return
    touch = f"import numpy; numpy.ones({3 * nbytes}, 'u1')"
    subprocess.run([sys.executable, "-c", touch], check=True)


def drop_from_page_cache(file: File) -> None:
    """Needs no rights: the pages are clean, and nobody has them mapped."""
    for path in file.paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def new_record(kind: str, files: dict[str, File], **what: Any) -> dict[str, Any]:
    """The head of a record: what a reader of the figures must know."""
    shapes = {file.layout: list(file.shape) for file in files.values()}
    return {
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {},
        "shapes": shapes,
        **what,
        "cells": [],
    }


def machine() -> dict[str, Any]:
    """Cores, memory, processor: no names."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": models[0] if models else platform.machine(),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.rename(path)
