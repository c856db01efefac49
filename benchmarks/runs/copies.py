"""Is a large array copied in little memory, also if the job is killed on the way? And beside h5repack, how fast?

    python -m benchmarks.runs.copies --folder /scratch/copies

1. A file of ``--size`` planes is written: gzip, each plane another one, cheap to compress.
2. ``shardload copy`` makes a Zarr store with other chunks of it, on several ranks whose staging memory together is a
   fraction of the array.
   When half of the file is there, one rank is killed with SIGKILL.
3. The same command with ``--resume`` goes on. The peak memory of each rank is measured in both.
4. The copy is read by zarr, without shardload, and compared element by element.
5. Ways that are installed do the same in one process: ``h5repack``, and h5py in a loop over slabs of target chunks.

All that was written is removed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import zarr

__all__ = ["main"]

# A rank that says how much memory it had at most, whatever it does.
RANK = """
import atexit, os, resource, sys
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))

def tell():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"rank {rank} peak {peak} jax {'jax' in sys.modules}", file=sys.stderr, flush=True)

atexit.register(tell)
sys.argv[0] = "shardload"
from shardload.cli.main import main
main()
"""


def plane(number: int, size: int) -> np.ndarray[Any, Any]:
    """The values of a plane: each has others, and compresses well."""
    row = np.arange(size, dtype=np.float32) % 251 + np.float32(number)
    made = np.broadcast_to(row, (size, size)).copy()
    made[:, 0] = np.arange(size, dtype=np.float32) * size + number
    return made


def make(path: Path, n: int, size: int) -> None:
    """The source."""
    with h5py.File(path, "w") as file:
        made = file.create_dataset("rho", (n, size, size), "f4", chunks=(1, size, size), compression="gzip", compression_opts=1)
        made.attrs["units"] = "kg m-3"
        for k in range(n):
            made.id.write_direct_chunk((k, 0, 0), zlib.compress(plane(k, size).tobytes(), 1))


def command(ranks: int, *arguments: object) -> list[str]:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    start = [str(mpiexec if mpiexec.exists() else "mpiexec"), "-n", str(ranks)]
    return [*start, sys.executable, "-c", RANK, "copy", *map(str, arguments)]


def unfinished(target: Path) -> list[Path]:
    return [one for one in target.parent.glob(f"{target.name}.*.unfinished")]


def run_and_kill(arguments: list[str], target: Path, enough: int) -> tuple[float, int]:
    """Start a copy, and kill one of its ranks when so many chunks have their names. Returns seconds and chunks."""
    started = time.perf_counter()
    job = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    there = 0
    while job.poll() is None:
        there = sum(path.name.isdecimal() and path.is_file() for left in unfinished(target) for path in left.rglob("*"))
        if there >= enough:
            os.kill(_a_rank(job.pid), signal.SIGKILL)
            break
        time.sleep(0.2)
    job.wait(timeout=120)
    return time.perf_counter() - started, there


def _a_rank(launcher: int) -> int:
    """The process of one rank: a descendant of the launcher that runs Python."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                name = os.readlink(f"/proc/{entry}/exe")
            except OSError:
                continue
            parents[int(entry)] = int(fields[1]), name
    for pid, (parent, name) in sorted(parents.items(), reverse=True):
        if "python" not in name:
            continue
        while parent in parents and parent != launcher:
            parent = parents[parent][0]
        if parent == launcher:
            return pid
    raise RuntimeError("no rank was found")


def compare(target: Path, n: int, size: int, chunks: tuple[int, ...]) -> None:
    """Compare the copy with what was to be in it. RuntimeError if anything differs."""
    found = zarr.open_group(str(target), mode="r")["rho"]
    if found.chunks != chunks or found.attrs["units"] != "kg m-3":
        raise RuntimeError(f"chunks {found.chunks}, attributes {dict(found.attrs)}")
    for low in range(0, n, chunks[0]):
        values = found[low : low + chunks[0]]
        for k, one in enumerate(values):
            if not np.array_equal(one, plane(low + k, size)):
                raise RuntimeError(f"plane {low + k} differs")


def others(source: Path, target: Path, chunks: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    """What one process takes, by ways that are installed."""
    tool = shutil.which("h5repack")
    if tool:
        started = time.perf_counter()
        shape = "x".join(map(str, chunks))
        subprocess.run([tool, "-f", "GZIP=1", "-l", f"CHUNK={shape}", source, target], check=True)
        yield "h5repack", time.perf_counter() - started
        target.unlink()
    started = time.perf_counter()
    with h5py.File(source) as before, h5py.File(target, "w") as after:
        old = before["rho"]
        new = after.create_dataset("rho", old.shape, old.dtype, chunks=chunks, compression="gzip", compression_opts=1)
        for low in range(0, old.shape[0], chunks[0]):
            new[low : low + chunks[0]] = old[low : low + chunks[0]]
    yield "h5py, a loop over slabs", time.perf_counter() - started
    target.unlink()


def main() -> None:
    """Do it, and print a line of JSON for each step."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--folder", type=Path, required=True)
    parse.add_argument("--size", type=int, default=1024, help="planes, and elements along each axis of a plane")
    parse.add_argument("--ranks", type=int, default=4)
    parse.add_argument("--staging", default="128MiB", help="of each rank")
    parse.add_argument("--chunks", default="16,256,256")
    parse.add_argument("--beside", action="store_true", help="also do it by other ways")
    given = parse.parse_args()
    folder = given.folder / f"shardload-copy-{os.getpid()}"
    folder.mkdir(parents=True)
    source, target = folder / "in.h5", folder / "out.zarr"
    size, chunks = given.size, tuple(int(n) for n in given.chunks.split(","))
    os.environ["HDF5_PLUGIN_PATH"] = hdf5plugin.PLUGIN_PATH

    def say(what: str, **told: Any) -> None:
        print(json.dumps({"what": what, **told}), flush=True)

    try:
        started = time.perf_counter()
        make(source, size, size)
        nbytes = size**3 * 4
        say("source", nbytes=nbytes, nbytes_stored=source.stat().st_size, seconds=round(time.perf_counter() - started, 1))
        asked = [source, target, "--chunks", given.chunks, "--compression", "gzip:1", "--staging", given.staging]
        plan = subprocess.run(command(given.ranks, *asked, "--dry-run"), capture_output=True, text=True, check=True).stdout
        print(plan, flush=True)
        seconds, there = run_and_kill(command(given.ranks, *asked), target, math.prod(-(-size // n) for n in chunks) // 2)
        (left,) = unfinished(target)
        say("killed", seconds=round(seconds, 1), chunks_noted=there, exists=target.exists(), left=left.name)
        started = time.perf_counter()
        job = subprocess.run(command(given.ranks, *asked, "--resume", "--json"), capture_output=True, text=True, check=False)
        if job.returncode:
            raise RuntimeError(job.stderr)
        told = json.loads(job.stdout)
        peaks = [int(peak) >> 10 for peak in re.findall(r"peak (\d+)", job.stderr)]
        say(
            "resumed",
            seconds=round(time.perf_counter() - started, 1),
            chunks_resumed=told["chunks_resumed"],
            chunks_written=told["written"]["n_chunks"],
            chunks_read_back=told["written"]["n_read_back"],
            source_chunks_decoded=told["chunks_decoded"],
            peak_mib_of_ranks=peaks,
            jax_imported="jax True" in job.stderr,
            left=[one.name for one in folder.iterdir()],
        )
        started = time.perf_counter()
        compare(target, size, size, chunks)
        say("compared with the source's values by zarr", seconds=round(time.perf_counter() - started, 1), equal=True)
        shutil.rmtree(target)
        if given.beside:
            started = time.perf_counter()
            subprocess.run(command(given.ranks, *asked), capture_output=True, check=True)
            say("shardload copy, undisturbed", seconds=round(time.perf_counter() - started, 1))
            shutil.rmtree(target)
            for what, seconds in others(source, folder / "out.h5", chunks):
                say(what, seconds=round(seconds, 1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
