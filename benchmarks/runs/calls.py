"""What does one small load cost, in CPU time of all ranks, and which step of it how much?

    mpiexec -n 4 python -m benchmarks.runs.calls [--repeats 200] [--steps]

Loads of 1 KiB, of the real field, and of a small gzip array: of one file, and of a series of files of the same kind, beside
slicing in every process, in one warm job, in turns of 20. Arrays of 16 and 64 MiB without chunks, sharded along the last two
axes. And one time step after the other of a file with 2,000 of them, by
position and by name, beside slicing of a file that each process opens each time, or keeps open. Another version is measured
with its folder in PYTHONPATH. With ``--steps``: seconds on the wall inside each step of ranks 0 and 1, with the steps that it
calls, and what the clock takes.

CPU time says more than seconds on a machine that has other work, but it too grows, by half, when caches are shared: compare
with slicing in the same job, and the least tenth of the calls.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload

N_FILES, N_STEPS, TURN = 24, 2000, 20
FIELD = "air_temperature"
PLAIN = {"16 MiB": 16, "64 MiB": 64}
STEPS = {
    "jobs.loading.call": ("LoadCall._read", "LoadCall.find", "LoadCall.make", "LoadCall.plan_file"),
    "jobs.loading.execution": ("Loader.run", "Loader._agree"),
    "jobs.loading.endpoints": ("ShardedArray.make_room", "ShardedArray.fill", "ShardedArray.assemble"),
    "arrays.assemble": ("_verify_shards",),
    "comm.group": ("Group.all_same", "Group._send_bytes", "Invocation.digest"),
    "comm.collectives": ("MpiCollectives.broadcast", "MpiCollectives.reduce"),
    "formats.lookup": ("Finder.find", "Finder.file", "Finder._values", "Finder.__exit__", "format_of"),
    "formats.hdf5.file": ("open_explained", "Hdf5File._look_up", "Hdf5File._describe"),
    "formats.hdf5.source": ("Hdf5Source.chunk_reader",),
    "formats.hdf5.chunks": ("ChunkPlaces._listed", "Hdf5Chunks.read_plain"),
}


def make_files(folder: Path) -> dict[str, tuple[list[str], str]]:
    """For each kind: its files, and the name of the array in them."""
    import iris_sample_data

    gzip = np.arange(64 * 64 * 16, dtype=np.float32).reshape(64, 64, 16)
    for k in range(N_FILES):
        with h5py.File(folder / f"kib{k}.h5", "w") as file:
            file["x"] = np.arange(256, dtype=np.float32).reshape(16, 16) + k
        with h5py.File(folder / f"gzip{k}.h5", "w") as file:
            file.create_dataset("x", data=gzip + k, chunks=(16, 16, 16), compression="gzip", shuffle=True)
        shutil.copy(Path(iris_sample_data.path) / "A1B_north_america.nc", folder / f"field{k}.nc")
    smooth = np.cumsum(np.random.default_rng(0).normal(size=(192, 288)), axis=1, dtype=np.float32)
    with h5py.File(folder / "steps0.h5", "w") as file:
        steps = file.create_dataset("x", (N_STEPS, *smooth.shape), "f4", chunks=(1, *smooth.shape), compression=1, shuffle=True)
        for axis, dim in enumerate(("time", "lat", "lon")):
            file[dim] = np.arange(steps.shape[axis], dtype=np.float64)
            file[dim].make_scale(dim)
            steps.dims[axis].attach_scale(file[dim])
        for k in range(N_STEPS):
            steps[k] = smooth + k
    with h5py.File(folder / "plain0.h5", "w") as file:
        for name, n in PLAIN.items():
            file[name] = np.arange(n << 18, dtype=np.float32).reshape(-1, 128, 128)
    names = {"kib": (".h5", "x"), "field": (".nc", FIELD), "gzip": (".h5", "x"), "steps": (".h5", "x")}
    found = {kind: ([str(folder / f"{kind}{k}{end}") for k in range(N_FILES)], name) for kind, (end, name) in names.items()}
    return found | {name: ([str(folder / "plain0.h5")] * N_FILES, name) for name in PLAIN}


def slicing(path: str, name: str, sharding: NamedSharding) -> jax.Array:
    """What people do: every process opens the file, and slices it in the callback."""
    with h5py.File(path) as file:
        data = file[name]
        return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


def step_of(file: h5py.File, name: str, k: int, sharding: NamedSharding) -> jax.Array:
    """The same for one time step of an open file."""
    data = file[name]
    return jax.make_array_from_callback(data.shape[1:], sharding, lambda index: data[(k, *index)])


def reopened(path: str, name: str, k: int, sharding: NamedSharding) -> jax.Array:
    """The same for a file that is opened for it."""
    with h5py.File(path) as file:
        return step_of(file, name, k, sharding)


def ways_of(kind: str, sharding: NamedSharding, files: list[str], name: str) -> dict[str, Callable[[int], jax.Array]]:
    """Call number k, of each way."""
    mesh, spec = sharding.mesh, sharding.spec
    if kind == "steps":
        path, opened = files[0], h5py.File(files[0])
        return {
            "by position": lambda k: shardload.load(path, mesh, spec, dataset=name, select=(7 * k % N_STEPS,)),
            "by name": lambda k: shardload.load(path, mesh, spec, dataset=name, select={"time": 7 * k % N_STEPS}),
            "slicing": lambda k: reopened(path, name, 7 * k % N_STEPS, sharding),
            "slicing, kept open": lambda k: step_of(opened, name, 7 * k % N_STEPS, sharding),
        }
    if kind in PLAIN:
        sharding = NamedSharding(mesh, P(None, *spec))
        return {
            "one file": lambda k: shardload.load(files[0], mesh, sharding.spec, dataset=name),
            "slicing": lambda k: slicing(files[0], name, sharding),
        }
    return {
        "one file": lambda k: shardload.load(files[0], mesh, spec, dataset=name),
        "series": lambda k: shardload.load(files[k % N_FILES], mesh, spec, dataset=name),
        "slicing": lambda k: slicing(files[k % N_FILES], name, sharding),
    }


def turns(comm: Any, ways: dict[str, Callable[[int], jax.Array]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of this rank, call by call."""
    took: dict[str, list[float]] = {way: [] for way in ways}
    for way in ways.values():
        for k in range(N_FILES):
            way(k)
    gc.collect()
    gc.freeze()
    for first in range(0, repeats, TURN):
        for name, way in ways.items():
            for k in range(first, min(repeats, first + TURN)):
                comm.Barrier()
                began = time.process_time()
                array = way(k)
                took[name].append(time.process_time() - began)
                del array
        gc.collect()
    return took


def watch(spent: dict[str, float]) -> None:
    """From now on, add the seconds inside each step to `spent`."""
    for module, names in STEPS.items():
        owner = importlib.import_module(f"shardload.{module}")
        for name in names:
            holder: Any = owner
            *above, last = name.split(".")
            for part in above:
                holder = getattr(holder, part, None)
            if holder is not None and last in vars(holder):
                _wrap(holder, last, f"{module.rpartition('.')[2]}: {name}", spent)
    _wrap(jax, "make_array_from_callback", "jax.make_array_from_callback", spent)


def _wrap(holder: Any, name: str, label: str, spent: dict[str, float]) -> None:
    raw = vars(holder)[name]
    kind = type(raw) if isinstance(raw, (classmethod, staticmethod, functools.cached_property)) else None
    inner = raw.func if kind is functools.cached_property else raw if kind is None else raw.__func__

    def timed(*args: Any, **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*args, **more)
        finally:
            spent[label] += time.perf_counter() - began

    made = timed if kind is None else kind(timed)
    setattr(holder, name, made)
    if kind is functools.cached_property:
        made.__set_name__(holder, name)


def main() -> None:
    """See above."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--steps", action="store_true")
    asked = parser.parse_args()
    shardload.initialize()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    b = 2 if len(devices) % 2 == 0 else 1
    pencils = NamedSharding(Mesh(np.array(devices).reshape(-1, b), ("a", "b")), P("a", "b"))
    slabs = NamedSharding(Mesh(np.array(devices), ("a",)), P("a"))
    with tempfile.TemporaryDirectory() as folder:
        files = comm.bcast(make_files(Path(folder)) if comm.rank == 0 else None)
        for kind, (paths, name) in files.items():
            ways = ways_of(kind, slabs if kind == "field" else pencils, paths, name)
            if asked.steps:
                way = next(ways[name] for name in ("series", "by name", "one file") if name in ways)
                _tell_steps(comm, kind, way, asked.repeats)
                continue
            took = turns(comm, ways, asked.repeats)
            for way, seconds in took.items():
                everyone = comm.gather(seconds)
                if comm.rank == 0:
                    ms = np.array(everyone) * 1e3
                    total = ms.sum(0)
                    least, tenth, middle = total.min(), np.quantile(total, 0.1), np.median(total)
                    text = f"CPU ms of all ranks: least {least:.2f}, tenth {tenth:.2f}, median {middle:.2f}"
                    if comm.size > 1:
                        text += f"; rank 0 {np.quantile(ms[0], 0.1):.2f}, another {np.quantile(ms[1:], 0.1):.2f}"
                    print(f"{kind}, {way}: {text}", flush=True)
        comm.Barrier()


def _tell_steps(comm: Any, kind: str, way: Callable[[int], jax.Array], repeats: int) -> None:
    spent: dict[str, float] = defaultdict(float)
    if not getattr(shardload, "_is_watched", False):
        watch(spent)
        shardload._is_watched = spent  # type: ignore[attr-defined]
    spent = shardload._is_watched  # type: ignore[attr-defined]
    found: dict[str, list[float]] = defaultdict(list)
    for k in range(repeats + N_FILES):
        comm.Barrier()
        spent.clear()
        array = way(k)
        del array
        if k >= N_FILES:
            for label, seconds in spent.items():
                found[label].append(seconds)
    if comm.rank < 2:
        lines = [f"{kind}, rank {comm.rank}, us: least and median"]
        lines += [
            f"  {label:48s} {min(values) * 1e6:7.0f} {np.median(values) * 1e6:7.0f}"
            for label, values in sorted(found.items(), key=lambda pair: -float(np.median(pair[1])))
        ]
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
