"""What else has goals? `scatter` from rank 0's memory, the fixed cost of a small load, and the peak of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks.cases.cells import MANY, OURS, spec_text
from benchmarks.cases.layouts import File, make
from benchmarks.remote import RemoteError
from benchmarks.runs.measure import Jobs, Say, median, new_record, turns, without_folders

SCATTER_WAYS = (OURS, "scatter", "scatterv")
SCATTER_SPECS = ("a", "-,a,b")  # slabs, which Scatterv takes as they lie, and pencils, which it must have packed
READERS = ("auto", "root", "parallel", "direct")
SMALL = (16, 16)  # float32: 1 KiB
MIB = 1 << 20
ALLOWANCE_NBYTES = 64 * MIB
TINY = 32  # a first load of everything, so that imports and start-up are not what is measured


def measure_scatter(size: int, ranks: int, repeats: int, say: Say) -> dict[str, Any]:
    """From a size^3 float32 array in rank 0's memory to a jax.Array."""
    record = new_record("scatter", {}, size=size, ranks=ranks, repeats=repeats)
    with Jobs(ranks) as jobs:
        for spec in SCATTER_SPECS:
            request = {"spec": spec, "shape": [size] * 3}
            ways: dict[str, list[float]] = {way: [] for way in SCATTER_WAYS}
            for way in ways:
                jobs.time(way, "scatter", verify=True, **request)
            for repeat in range(repeats):
                for way in turns(SCATTER_WAYS, repeat):
                    ways[way].append(jobs.time(way, "scatter", **request)["seconds"])
            say(f"scatter {size}^3, {spec_text(spec)}: " + ", ".join(f"{w} {median(s):.3f}" for w, s in ways.items()))
            record["cells"].append({"spec": spec, "nbytes": 4 * size**3, "ways": {w: {"seconds": s} for w, s in ways.items()}})
        record["versions"] = jobs.versions
    return record


def measure_small(folder: Path, ranks: int, repeats: int, say: Say) -> dict[str, Any]:
    """1 KiB: what a load costs before it reads a value. Each way in a job that has not loaded anything."""
    folder.mkdir(parents=True, exist_ok=True)
    file = File("hdf5-contiguous", folder / "small.h5", "x", folder / "small.npy")
    values = np.arange(np.prod(SMALL), dtype=np.float32).reshape(SMALL)
    np.save(file.reference, values)
    with h5py.File(file.path, "w") as opened:
        opened[file.dataset] = values
    record = new_record("small", {file.layout: file}, ranks=ranks, repeats=repeats)
    request = {"spec": "a,b", "file": file.request()}
    for way in (OURS, "slice"):
        with Jobs(ranks) as jobs:
            first = jobs.time(way, "run", **request)["seconds"]
            seconds = [jobs.time(way, "run", **request)["seconds"] for _ in range(max(2, repeats))]
            jobs.time(way, "run", verify=True, **request)
            record["versions"] |= jobs.versions
        record["cells"].append({"way": way, "first": first, "second": seconds[0], "seconds": seconds})
        say(
            f"1 KiB, {ranks} ranks, {way}: first {first * 1e3:.1f} ms, second {seconds[0] * 1e3:.1f} ms, "
            f"later {median(seconds) * 1e3:.1f} ms"
        )
    return record


def measure_many(
    files: dict[str, dict[str, Any]], ranks: Sequence[int], ways: Sequence[str], repeats: int, say: Say
) -> dict[str, Any]:
    """Many arrays in one call, and small ones: a loop of calls and the peers take turns with it. All are warm."""
    record = new_record("many", {}, repeats=repeats)
    for n in ranks:
        with Jobs(n) as jobs:
            for name, file in files.items():
                request = {"spec": MANY[name], "file": file}
                took: dict[str, dict[str, Any]] = {way: {"seconds": [], "cpu_seconds": []} for way in ways}
                for way in ways:
                    try:
                        found = jobs.ask(way, "many", verify=True, **request)[0]
                        took[way]["verified"] = True
                    except RemoteError as error:
                        took[way]["error"] = without_folders(error)
                        say(f"{name}, {n} ranks: {way} failed: {error}")
                for repeat in range(repeats):
                    for way in turns(ways, repeat):
                        if "error" not in took[way]:
                            found_now = jobs.time(way, "many", **request)
                            took[way]["seconds"].append(found_now["seconds"])
                            took[way]["cpu_seconds"].append(found_now["cpu_seconds"])
                told = ", ".join(f"{w} {median(t['seconds']) * 1e3:.1f}" for w, t in took.items() if t["seconds"])
                say(f"{name}, {n} ranks, ms: {told}")
                cell = {"layout": name, "spec": MANY[name], "ranks": n, "n_arrays": len(file["names"])}
                record["cells"].append({**cell, "nbytes": found["nbytes"], "ways": took})
            record["versions"] |= jobs.versions
    return record


def profile_chunks(files: dict[str, File], ranks: Sequence[int], spec: str, repeats: int, say: Say) -> dict[str, Any]:
    """CPU microseconds of all ranks for one small chunk: the decoder's, the kernel's, and the rest."""
    record = new_record("chunk-profile", files, repeats=repeats)
    for n in ranks:
        with Jobs(n) as jobs:
            for file in files.values():
                request = {"spec": spec, "file": file.request()}
                jobs.ask(OURS, "chunk_profile", repeats=1, **request)
                found = jobs.ask(OURS, "chunk_profile", repeats=repeats, **request)
                n_chunks = found[0]["chunks"]
                user, system = (sum(one[part] for one in found) / repeats / n_chunks * 1e6 for part in ("user", "system"))
                parts = {part: sum(one[part] for one in found) / n * 1e6 for part in ("decoder", "unshuffle", "copies")}
                parts |= {"kernel": system, "python": user - sum(parts.values())}
                record["cells"].append({"layout": file.layout, "ranks": n, "chunks": n_chunks, **parts})
                told = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
                say(f"{file.layout}, {n} ranks, CPU us for each chunk: {user + system:.1f}: {told}")
            record["versions"] |= jobs.versions
    return record


def measure_memory(
    folder: Path, size: int, layouts: Sequence[str], ranks: int, spec: str, staging_nbytes: int, say: Say
) -> dict[str, Any]:
    """Every way of reading, every layout: the peak of each rank's resident set over its base line, and what it may be."""
    tiny = make(folder, TINY, layouts)
    files = make(folder, size, layouts, say)
    record = new_record("memory", files, ranks=ranks, spec=spec, staging_nbytes=staging_nbytes)
    options = {"spec": spec, "staging": staging_nbytes}
    for file in files.values():
        for readers in READERS:
            cell: dict[str, Any] = {"layout": file.layout, "readers": readers}
            record["cells"].append(cell)
            try:
                # A job of its own each: what an earlier load left behind is neither counted nor forgotten.
                with Jobs(ranks) as jobs:
                    options = {"spec": spec, "staging": staging_nbytes, "readers": readers}
                    jobs.ask(OURS, "memory", file=tiny[file.layout].request(), **options)
                    found = jobs.ask(OURS, "memory", file=file.request(), **options)
                    record["versions"] |= jobs.versions
            except RemoteError as error:
                cell["error"] = without_folders(error)
                say(f"memory: {file.layout}, {readers} failed: {error}")
                continue
            over = [r["peak_nbytes"] - r["pieces_nbytes"] - staging_nbytes - ALLOWANCE_NBYTES for r in found]
            cell |= {"ranks": found, "ok": max(over) <= 0}
            say(f"memory: {file.layout}, {readers}: {memory_text(cell)}")
    return record


def memory_text(cell: dict[str, Any]) -> str:
    """The rank with the highest peak."""
    worst = max(cell["ranks"], key=lambda r: r["peak_nbytes"] - r["pieces_nbytes"])
    pieces = worst["pieces_nbytes"]
    more = worst["peak_nbytes"] - pieces
    return f"pieces {pieces / MIB:.0f} MiB and {more / MIB:.0f} MiB more" + ("" if cell["ok"] else ": OVER")
