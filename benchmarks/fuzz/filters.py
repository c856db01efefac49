"""Which decoders survive damaged chunks and parameters? Thousands of cases for each filter, in processes that may die of them.

1. A process with everything imported, and no thread, makes the good files (`filter_files`) in a child, and keeps them.
2. It forks a child, which runs case after case and tells what came out of each. Forking takes milliseconds, so a filter that
   crashes at every tenth case does not hold up the others. A child has limits: 4 GiB of address space beyond its own, 5 s of
   processor time a case (the kernel ends it then, also inside a C library), and a minute of time.
3. A child that ends in any other way than by its last case, ``exit(0)`` included, is the outcome of the case it was at.

Numbers go round: case n is of kind ``n % kinds``, so that a run that is ended early has as many of each.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr.registry

from benchmarks.fuzz.filter_files import FilterCase, FilterKind, filter_case, filter_kinds
from shardload.formats import lookup as sources
from shardload.formats.access import Access
from shardload.formats.contract.chunk_reader import read_by_chunks
from shardload.formats.hdf5 import filters as hdf5_filters
from shardload.formats.zarr import metadata as zarr_metadata
from shardload.planning.region import Region

__all__ = ["SURVIVED", "FilterOutcomes", "fuzz_filters", "good_kinds", "is_listed"]

SURVIVED = ("right", "value", "as declared", "refused")
MEMORY_NBYTES = 256 << 20  # that a case may take: far more than files of 10 KiB need
CPU_SECONDS, WALL_SECONDS = 5.0, 60.0
_ADDRESSES_NBYTES = 4 << 30
_MOST_PER_CHILD = 3000
_MOST_KEPT = 10  # cases that are kept, per filter and outcome
# What libraries say where they could not have the memory that a file made them ask for.
_MEMORY_WORDS = (
    "memory allocation",
    "unable to allocate",
    "can't allocate",
    "cannot allocate",
    "out of memory",
    "malloc failed",
)


@dataclass
class FilterOutcomes:
    """What came out: how often, by filter, and some of the cases that must not happen."""

    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    damage: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, number: int, case: FilterCase, came: str, text: str) -> None:
        """Note one case."""
        name = case.kind.filter
        self.counts.setdefault(name, Counter())[came] += 1
        if came not in SURVIVED:
            where = case.what.partition(" ")[0].rstrip(":")
            self.damage.setdefault(name, Counter())[f"{came}, {where}"] += 1
            if self.counts[name][came] <= _MOST_KEPT:
                told = {"number": number, "kind": case.kind.name, "what": case.what, "came": came, "text": text[-300:]}
                self.bad.append(told)

    @property
    def n_cases(self) -> int:
        """Cases so far."""
        return sum(sum(found.values()) for found in self.counts.values())

    def total(self) -> Counter[str]:
        """Over all filters."""
        return sum(self.counts.values(), Counter())

    def survived(self) -> list[str]:
        """The filters of which no case came out wrong."""
        return sorted(name for name, found in self.counts.items() if set(found) <= set(SURVIVED))

    def broken_promises(self) -> list[str]:
        """Those of them that are decoded without a word from the caller."""
        return sorted(name for name in self.counts if is_listed(name) and name not in self.survived())

    def table(self) -> str:
        """For a person and for Markdown: a row for each filter."""
        total = self.total()
        columns = [*SURVIVED, *sorted(name for name in total if name not in SURVIVED)]
        rows = [["filter", "cases", *columns]]
        for name in [*sorted(self.counts), "all"]:
            found = total if name == "all" else self.counts[name]
            rows.append([name, f"{sum(found.values()):,}", *(f"{found[c]:,}" for c in columns)])
        rows.insert(1, ["---", *["--:"] * (len(columns) + 1)])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def record(self) -> dict[str, Any]:
        """For a file."""
        packages = ("h5py", "hdf5plugin", "zarr", "numcodecs", "deflate", "numpy")
        return {
            "kind": "fuzz-filters",
            "seed": self.seed,
            "cases": self.n_cases,
            "seconds": round(self.seconds),
            "outcomes": dict(self.total()),
            "by_filter": {name: dict(found) for name, found in sorted(self.counts.items())},
            "by_damage": {name: dict(found) for name, found in sorted(self.damage.items())},
            "survived": self.survived(),
            "listed": sorted(filter(is_listed, self.counts)),
            "bad": sorted(self.bad, key=lambda case: case["number"]),
            "versions": {name: version(name) for name in packages} | {"HDF5": h5py.version.hdf5_version},
        }


def is_listed(name: str) -> bool:
    """Whether a filter, by its name in the results, is decoded without a word from the caller."""
    own, _, where = name.rstrip(")").partition(" (")
    if where.startswith("Zarr"):
        return own == "none" or own.removeprefix("numcodecs.") in zarr_metadata.SURVIVED
    return own == "none" or hdf5_filters.filter_of(int(where.rpartition(" ")[2])).is_safe


def fuzz_filters(
    seed: int,
    n_cases: int,
    *,
    first: int = 0,
    seconds: float = float("inf"),
    only: str = "",
    kinds: list[FilterKind] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> FilterOutcomes:
    """Run the cases `first` to ``first + n_cases`` of a seed, or as many as there is time for.

    Parameters
    ----------
    seed, n_cases, first : int
        Which cases.
    seconds : float
        Time after which no more are begun.
    only : str
        Part of the names of the kinds that are run; the numbers of their cases are other ones then.
    kinds : list of FilterKind, optional
        What `good_kinds` gave; made here otherwise.
    say : callable
        Is told of progress.
    """
    _import_all()
    kinds = [kind for kind in (kinds or good_kinds()) if only in kind.name]
    if not kinds:
        raise ValueError(f"no kind has {only!r} in its name")
    outcomes, started, told = FilterOutcomes(seed), time.monotonic(), 0
    until, last = started + seconds, first + n_cases
    for begin in range(first, last, _MOST_PER_CHILD):
        numbers = range(begin, min(begin + _MOST_PER_CHILD, last))
        for with_listed in (True, False):  # apart: others may damage the memory of a child, which dies of it some cases later
            left = [number for number in numbers if is_listed(kinds[number % len(kinds)].filter) == with_listed]
            while left and time.monotonic() < until:
                n_done = 0
                for came, text in _run_child(kinds, seed, left, until):
                    if came == "MEMORY" and n_done > 0:
                        break  # what earlier cases left may have taken it: once more, in a child of its own
                    number = left[n_done]
                    outcomes.add(number, filter_case(kinds[number % len(kinds)], seed, number // len(kinds)), came, text)
                    n_done += 1
                left = left[n_done:]
                outcomes.seconds = time.monotonic() - started
        if outcomes.n_cases // 1000 > told:
            told = outcomes.n_cases // 1000
            say(f"{outcomes.n_cases} cases in {outcomes.seconds:.0f} s: {dict(outcomes.total())}")
    return outcomes


def _import_all() -> None:
    """Import what reading needs, which each child would otherwise do for itself; starts no thread."""
    for name in ("hdf5.file", "memory", "zarr.source"):
        importlib.import_module(f"shardload.formats.{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("bytes", "transpose", "sharding_indexed", "zstd", "gzip", "blosc", "crc32c", "numcodecs.zlib"):
            zarr.registry.get_codec_class(name)
    gc.collect()
    gc.freeze()


def good_kinds() -> list[FilterKind]:
    """The good files, made in a child: libraries that write start threads, and a process with threads should not fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            with tempfile.TemporaryDirectory(dir=_fast()) as made, open(writing, "wb") as pipe:
                pickle.dump(filter_kinds(Path(made)), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the good files could not be made (status {status})")
    found: list[FilterKind] = pickle.loads(data)
    return found


def _fast() -> str | None:
    """Where files take no time."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _run_child(kinds: list[FilterKind], seed: int, numbers: Sequence[int], until: float) -> list[tuple[str, str]]:
    """What came out of the cases of these numbers, up to the first that the child did not survive."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(dir=_fast()) as folder, tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                _work(kinds, seed, numbers, until, Path(folder), writing)
            finally:
                os._exit(77)
        os.close(writing)
        found: list[tuple[str, str]] = []
        was_late, is_done, rest = False, False, b""
        while True:
            if not select.select([reading], [], [], WALL_SECONDS)[0]:
                was_late = True
                os.kill(child, signal.SIGKILL)
                break
            data = os.read(reading, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                is_done = line == b"done"
                if not is_done:
                    came, text = json.loads(line)
                    found.append((came, text))
        os.close(reading)
        _, status = os.waitpid(child, 0)
        if is_done:
            return found
        said.seek(max(0, said.tell() - 300))
        return [*found, _how_it_ended(status, was_late, said.read().decode(errors="replace"))]


def _how_it_ended(status: int, was_late: bool, said: str) -> tuple[str, str]:
    if was_late:
        return "HANG", f"no answer for {WALL_SECONDS:.0f} s"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        if name == "SIGPROF":
            return "HANG", f"{CPU_SECONDS:.0f} s of processor time"
        return "CRASH", f"{name}: {said}"
    return "EXIT", f"the process ended itself, status {os.WEXITSTATUS(status)}: {said}"


def _work(kinds: list[FilterKind], seed: int, numbers: Sequence[int], until: float, folder: Path, pipe: int) -> None:
    """The child: run cases, tell each. Ends early after one that took much memory, which it may still have."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESSES_NBYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for number in numbers:
        if time.monotonic() > until:
            break
        kind, turn = kinds[number % len(kinds)], number // len(kinds)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        before = _forget_peak()
        came, text = _outcome(kind, seed, turn, folder)
        grown = _peak() - before
        if grown > MEMORY_NBYTES and came in SURVIVED:
            came, text = "MEMORY", f"{grown >> 20} MiB; {came}: {text}"
        os.write(pipe, json.dumps([came, text[:400]]).encode() + b"\n")
        if came == "MEMORY":
            break
    signal.setitimer(signal.ITIMER_PROF, 0)
    os.write(pipe, b"done\n")


def _outcome(kind: FilterKind, seed: int, turn: int, folder: Path) -> tuple[str, str]:
    """What comes out of one case, and a text."""
    try:
        case = filter_case(kind, seed, turn)
        path = case.write(folder / f"{kinds_folder(kind)}")
    except (OSError, RuntimeError, ValueError) as error:  # HDF5 does not write such a chunk
        return "refused", f"in writing: {error}"
    way = ("region", "chunks", "plain")[turn % 3]
    try:
        values = read(path, way, case.kind.filter.rstrip(")").rpartition(" ")[2])  # damage may make a file name another one
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        for_memory = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
        if for_memory or any(word in text.lower() for word in _MEMORY_WORDS):
            return "MEMORY", text
        return "refused", text
    return _judge(case, path, values, way)


def kinds_folder(kind: FilterKind) -> str:
    """A folder for each format: one case leaves nothing for the next that this does not write anew."""
    return kind.format


def read(path: str, way: str, number: str) -> np.ndarray[Any, Any]:
    """The values of ``a``, in one of the three ways in which shardload reads, its own filter allowed."""
    source = sources.open_source(path, "/a", Access(allow_filters={number}))
    try:
        for shape in (source.info.shape, source.info.chunks or (), source.info.shards or ()):
            if math.prod(shape) * source.dtype.itemsize > MEMORY_NBYTES >> 2:
                raise ValueError("another shape is declared, too large to load here")  # a load compares chunks with its staging
        region = Region.whole(source.info.shape)
        if way == "plain":
            found = source.plain(region)
            return found.astype(found.dtype.newbyteorder("="))
        out = np.zeros(region.shape, source.dtype)
        chunks = source.chunk_reader() if way == "chunks" else None
        if chunks is not None and region.size:
            read_by_chunks(chunks, source.info.chunks or (), region, out)
        else:
            source.read_into(region, out)
        return out
    finally:
        source.close()


def _judge(case: FilterCase, path: str, values: np.ndarray[Any, Any], way: str) -> tuple[str, str]:
    """Whether these values may be."""
    good = case.kind.values.astype(case.kind.values.dtype.newbyteorder("="))
    if same(values, good):
        return "right", ""
    if case.touched is None:
        return "as declared", way  # metadata without a checksum, which declares something else now
    rest = np.ones(good.shape, dtype=bool)
    rest[tuple(slice(i * n, (i + 1) * n) for i, n in zip(case.touched, _chunk_of(case.kind), strict=True))] = False
    if values.shape == good.shape and values.dtype == good.dtype and same(values[rest], good[rest]):
        return "value", ""
    return "WRONG", f"chunk {case.touched} was damaged; values differ elsewhere"


def _chunk_of(kind: FilterKind) -> tuple[int, ...]:
    counts = [max(index[axis] for index in kind.chunks) + 1 for axis in range(len(kind.values.shape))]
    return tuple(-(-n // count) for n, count in zip(kind.values.shape, counts, strict=True))


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Equal in shape, type and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _forget_peak() -> int:
    """Bytes that this process has now; the peak is counted from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    sys.exit("python -m benchmarks fuzz-filters")
