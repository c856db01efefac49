"""What comes out of loading one damaged file? In a process of its own, which may crash.

Reads numbers of cases from standard input, one per line, and writes one line of JSON for each. ``right``: the good file's
values. ``value``: the damaged chunk has no checksum and other values; all other chunks are right. ``as declared``: the metadata
declares something else now, and h5py (zarr-python) reads the same values. ``missing``: a chunk was removed, has the fill
value, and is counted by the report. ``large``: a shape is declared that is not loaded here, only planned. ``refused``: a
ShardloadError. All other outcomes are defects.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import zarr
from jax.sharding import Mesh, PartitionSpec

import shardload
from benchmarks.fuzz.files import Case, make_case, make_kinds
from tests.tuning import tuned

Array = np.ndarray[Any, Any]
MEMORY_NBYTES = 256 << 20  # that a case may take: far more than files of 10 KiB need
MOST_NBYTES = 64 << 20  # of an array that is loaded; a mutation may declare any shape
_STAGING = 16 << 20


def outcome(case: Case, folder: Path, mesh: Mesh) -> tuple[str, str]:
    """What came out, and a text."""
    path = case.write(folder)
    with tuned(min_chunk_nbytes=0 if case.number % 2 else 1 << 15):  # chunk by chunk, or by the format's library
        return _load(path, case, mesh)


def _load(path: str, case: Case, mesh: Mesh) -> tuple[str, str]:
    dataset = None if case.number % 7 == 0 and "hdf5" not in case.kind.name else "a"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        plan = shardload.plan(path, mesh, PartitionSpec(), dataset=dataset, readers="direct", staging=_STAGING, missing="fill")
        if math.prod(plan.shape) * plan.dtype.itemsize > MOST_NBYTES:
            return "large", f"{plan.shape} {plan.dtype}"
        found = np.asarray(plan.execute())
        n_missing = plan.report.chunks_missing if plan.report else 0
    except shardload.ShardloadError as error:
        if isinstance(error.__cause__, MemoryError):
            return "MEMORY", str(error)
        kind, text = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "OTHER ERROR", f"{type(error).__name__}: {error}"
    else:
        kind, text = judge(case, path, found, n_missing)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return ("MEMORY", f"{grown} bytes; {kind}: {text}") if grown > MEMORY_NBYTES else (kind, text)


def judge(case: Case, path: str, found: Array, n_missing: int) -> tuple[str, str]:
    """Whether the values are what they should be."""
    expected = case.kind.values.astype(case.kind.values.dtype.newbyteorder("="))
    if same(found, expected):
        return "right", ""
    if case.touched is not None and found.shape == expected.shape and found.dtype == expected.dtype:
        rest, lost = untouched(case), "lost" in case.what
        if same(found[rest], expected[rest]) and (n_missing > 0 if lost else not case.kind.checked or "exchanged" in case.what):
            return ("missing" if lost else "value"), ""
        return "WRONG", f"chunks {sorted(case.touched)} were damaged; values differ elsewhere, or in spite of a checksum"
    try:
        said = by_library(path)
    except Exception as error:
        return "WRONG", f"not the good values, and the library refuses it ({type(error).__name__}: {error})"
    return ("as declared", "") if same(found, said) else ("WRONG", "neither the good values nor what the library reads")


def same(a: Array, b: Array) -> bool:
    """Equal in shape, type and bits (NaN may be anywhere after damage)."""
    return a.shape == b.shape and a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def untouched(case: Case) -> Any:
    """Where the chunks are that were not damaged."""
    rest = np.ones(case.kind.values.shape, dtype=bool)
    for index in case.touched or ():
        rest[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, case.kind.chunks, strict=True))] = False
    return rest


def by_library(path: str) -> Array:
    """What the format's own library reads, in native byte order."""
    if path.endswith(".h5"):
        with h5py.File(path, "r") as file:
            values = np.asarray(file["a"][()])
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = np.asarray(zarr.open_array(path, mode="r", path="a")[...])
    return values.astype(values.dtype.newbyteorder("="))


def limit_memory() -> None:
    """Cap the address space at what is used now and four times what a case may take."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * MEMORY_NBYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Read numbers, write outcomes."""
    seed = int(sys.argv[1])
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    with tempfile.TemporaryDirectory() as made:
        good = Path(made) / "good"
        good.mkdir()
        kinds = make_kinds(good)
        for kind in kinds:  # the good files themselves; imports everything, too
            for number in (0, 1):
                came, text = outcome(Case(number, kind, "nothing", kind.files, set()), Path(tempfile.mkdtemp(dir=made)), mesh)
                if came != "right":
                    raise SystemExit(f"{kind.name} undamaged: {came} {text}")
        limit_memory()
        print(json.dumps([kind.name for kind in kinds]), flush=True)
        for line, turn in zip(sys.stdin, itertools.count()):
            case, folder = make_case(kinds, seed, int(line)), Path(made) / str(turn)
            folder.mkdir()
            came, text = outcome(case, folder, mesh)
            shutil.rmtree(folder)
            print(json.dumps([case.number, case.kind.name, case.what, came, text[:300]]), flush=True)


if __name__ == "__main__":
    main()
