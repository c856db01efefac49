"""How long does a copy to other chunks take, beside h5repack, nccopy, dask and loops, and how much memory?

The source is gzip planes, the target cubes: gzip in HDF5, zstd in Zarr. Each way is a command of its own, from its start to its
end. What it wrote is compared with the plain values by the format's own library, every time. Memory is the most that a process
had at a time, Python and libraries included; of several ranks that of the largest, and of all together.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hdf5plugin

from benchmarks.cases.layouts import NAME, File
from benchmarks.cases.saves import GZIP_LEVEL, save_layout
from benchmarks.runs.copies import command
from benchmarks.runs.environments import ROOT, add_peers
from benchmarks.runs.measure import Say, median, new_record, turns, warm_free_memory, without_folders, write_record
from benchmarks.runs.saves import MIB, check, remove

Record = dict[str, Any]
LIMIT_SECONDS = 300.0
# Of each way: the target it writes, and what it is.
COPY_WAYS = {
    "shardload": ("hdf5-gzip-cubes", "`shardload copy`, all ranks"),
    "h5repack": ("hdf5-gzip-cubes", "h5repack, as it comes"),
    "nccopy": ("hdf5-gzip-cubes", "nccopy, as it comes"),
    "nccopy-cache": ("hdf5-gzip-cubes", "nccopy with a chunk cache and a buffer of 512 MiB each"),
    "h5py": ("hdf5-gzip-cubes", "h5py in a loop over slabs"),
    "shardload-zarr": ("zarr-zstd-cubes", "`shardload copy`, all ranks"),
    "zarr-python": ("zarr-zstd-cubes", "h5py and zarr-python in a loop over slabs"),
    "dask": ("zarr-zstd-cubes", "h5py, dask, and zarr-python in its threads"),
}


def missing(way: str) -> str:
    """Why a way cannot run here; empty if it can."""
    if way.startswith("nccopy") and shutil.which("nccopy") is None:
        return "on Debian and Ubuntu, apt-get install netcdf-bin"
    if way == "h5repack" and shutil.which("h5repack") is None:
        return "on Debian and Ubuntu, apt-get install hdf5-tools"
    if way == "dask":
        add_peers()
        from importlib.util import find_spec

        return "" if find_spec("dask") else "pip install 'dask[array]'"
    return ""


def arguments(way: str, source: Path, target: Path, edge: int, ranks: int, staging: str) -> list[str]:
    """The command of a way."""
    if way.startswith("shardload"):
        how = f"gzip:{GZIP_LEVEL}" if way == "shardload" else "zstd"
        cubes = ["--chunks", f"{edge},{edge},{edge}", "--compression", how]
        return command(ranks, source, target, *cubes, "--staging", staging, "--json")
    if way == "h5repack":
        return [
            "h5repack",
            "-l",
            f"{NAME}:CHUNK={edge}x{edge}x{edge}",
            "-f",
            f"{NAME}:GZIP={GZIP_LEVEL}",
            str(source),
            str(target),
        ]
    if way.startswith("nccopy"):
        more = ["-h", str(512 * MIB), "-m", str(512 * MIB)] if way == "nccopy-cache" else []
        return ["nccopy", "-4", "-d", str(GZIP_LEVEL), "-c", f"{NAME}:{edge},{edge},{edge}", *more, str(source), str(target)]
    return [sys.executable, "-m", "benchmarks.peers.copiers", way, str(source), str(target), str(edge)]


def run(arguments: Sequence[str]) -> Record:
    """Seconds, and the peak of memory of each process that tells it. RuntimeError if it fails or takes too long."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HDF5_PLUGIN_PATH": hdf5plugin.PLUGIN_PATH}
    began = time.perf_counter()
    job = subprocess.Popen(
        arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = job.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        raise RuntimeError(f"not done after {LIMIT_SECONDS:.0f} s") from None
    seconds = time.perf_counter() - began
    if job.returncode:
        raise RuntimeError((err or out).strip().splitlines()[-1] if (err or out).strip() else f"exit status {job.returncode}")
    found: Record = {"seconds": seconds}
    peaks = [int(peak) << 10 for peak in re.findall(r"rank \d+ peak (\d+)", err)]
    if peaks:
        told = json.loads(out)
        found |= {"of_copy": told["seconds"]} if "seconds" in told else {}
    else:
        peaks = [int(re.findall(r"peak (\d+)", err)[-1]) << 10]
    return found | {"peaks_nbytes": peaks}


WATCHED = """
import os, resource, subprocess, sys
job = subprocess.run(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(job.returncode)
"""


def measure_copies(
    file: File,
    folder: Path,
    ways: Sequence[str],
    *,
    ranks: int,
    staging: str,
    repeats: int,
    out: Path | None = None,
    say: Say = lambda _: None,
) -> Record:
    """All ways take turns. A way that takes longer than a minute is not repeated."""
    size = file.shape[0]
    record = new_record("copy", {}, repeats=repeats, shape=list(file.shape), nbytes=file.nbytes, ranks=ranks, staging=staging)
    took: dict[str, Record] = {way: {"seconds": [], "peaks_nbytes": []} for way in ways}
    record["cells"] = [{"layout": COPY_WAYS[way][0], "spec": "", "ranks": ranks, "way": way, **took[way]} for way in ways]
    folder.mkdir(parents=True, exist_ok=True)
    for repeat in range(repeats):
        for way in turns(ways, repeat):
            cell = next(cell for cell in record["cells"] if cell["way"] == way)
            if "error" in cell or (repeat and max(cell["seconds"]) > 60):
                continue
            layout = save_layout(COPY_WAYS[way][0], size)
            edge = (layout.chunks or (0,))[0]
            target = folder / f"{way}{layout.suffix}"
            remove(target)
            warm_free_memory(file.nbytes)
            asked = arguments(way, file.path, target, edge, ranks, staging)
            watched = asked if way.startswith("shardload") else [sys.executable, "-c", WATCHED, *asked]
            try:
                found = run(watched)
                check(target, layout, file.reference)
            except (OSError, RuntimeError, ValueError) as error:
                cell["error"] = without_folders(error)
                say(f"{way} failed: {error}")
                continue
            finally:
                remove(target)
            cell["seconds"].append(found["seconds"])
            cell["peaks_nbytes"].append(found["peaks_nbytes"])
            if "of_copy" in found:
                cell.setdefault("of_copy", []).append(found["of_copy"])
            say(f"{way}: {found['seconds']:.2f} s, {max(found['peaks_nbytes']) // MIB} MiB")
            if out is not None:
                write_record(out, record)
    return record


def copy_table(record: Record | None) -> list[str]:
    """A row per way."""
    if record is None:
        return []
    shape = " x ".join(map(str, record["shape"]))
    lines = [
        f"## Copying {shape} float32, gzip planes to cubes, {record['ranks']} ranks with staging {record['staging']}",
        "",
        f"{shape} float32 from gzip planes to cubes, {record['ranks']} ranks with staging {record['staging']}; "
        f"{record['machine']['cores']} cores of {record['machine']['processor']}. Seconds of the whole command, with the "
        "start of Python and MPI (without it: what `copy` says itself); in brackets how many times as long as shardload. "
        "MiB: the largest process, and all together. Only shardload reads back what it has written.",
        "",
        "| to | by | s | MiB |",
        "|---|---|--:|--:|",
    ]
    ours = {c["layout"]: median(c["seconds"]) for c in record["cells"] if c["way"].startswith("shardload") and c["seconds"]}
    for cell in record["cells"]:
        if "error" in cell or not cell["seconds"]:
            row = [cell["layout"], COPY_WAYS[cell["way"]][1], f"failed: {cell.get('error', 'not measured')}", ""]
        else:
            value, peaks = median(cell["seconds"]), cell["peaks_nbytes"]
            times = f" ({value / ours[cell['layout']]:.1f}x)" if cell["layout"] in ours else ""
            most, together = max(max(one) for one in peaks) / MIB, max(sum(one) for one in peaks) / MIB
            own = f", without the start {median(cell['of_copy']):.2f}" if cell.get("of_copy") else ""
            row = [cell["layout"], COPY_WAYS[cell["way"]][1], f"{value:.2f}{own or times}"]
            row.append(f"{most:.0f}" + (f", {together:.0f}" if len(peaks[0]) > 1 else ""))
        lines.append("| " + " | ".join(row) + " |")
    return [*lines, ""]
