"""Random loads and saves, each compared element by element with NumPy, h5py and zarr-python. On any number of ranks:

    mpiexec -n 4 python -m tests.fuzz_loads --loads 10000 --saves 2000 --seed 1

Files of random shapes, chunks, codecs and types; random meshes (permuted, with axes that cut nothing), specs, selections, ways
of reading, padding. All ranks draw the same numbers. The first difference ends the job, and its seed repeats it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import zarr
from jax.sharding import Mesh, PartitionSpec
from mpi4py import MPI

import shardload
from tests.unit.files import stored_in

comm = MPI.COMM_WORLD
TYPES = ("f4", "i2", ">f4", "u1", "c8", ">i4", "f2", "bool")
HDF5: tuple[dict[str, Any], ...] = (
    {},
    {"compression": "gzip"},
    {"compression": "gzip", "shuffle": True},
    {"compression": "lzf"},
    {"fletcher32": True},
)
ZARR: tuple[dict[str, Any], ...] = ({}, {"compressors": None}, {"zarr_format": 2, "compressors": None})


def pick(draw: np.random.Generator, options: Sequence[Any]) -> Any:
    return options[int(draw.integers(len(options)))]


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder for all ranks, which are on one machine. A rank that fails removes it: it may be the one that ends the job."""
    folder = Path(comm.bcast(tempfile.mkdtemp(prefix="shardload-fuzz-", dir="/dev/shm") if comm.rank == 0 else None))
    try:
        yield folder
        comm.Barrier()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(draw: np.random.Generator, path: Path) -> tuple[str, np.ndarray[Any, Any]]:
    """A file on rank 0, and its values on all."""
    shape = tuple(draw.integers(1, 25, draw.integers(1, 4)).tolist())
    values = np.arange(np.prod(shape)).reshape(shape).astype(draw.choice(TYPES))
    chunks = tuple(int(draw.integers(1, n + 1)) for n in shape)
    is_hdf5, how = draw.random() < 0.6, int(draw.integers(5))
    name = path / ("a.h5" if is_hdf5 else "a.zarr")
    is_whole = draw.random() < 0.2
    if comm.rank == 0:
        name.unlink(missing_ok=True) if is_hdf5 else shutil.rmtree(name, ignore_errors=True)
        if is_hdf5:
            with h5py.File(name, "w") as file:
                file.create_dataset("x", data=values, **({} if is_whole else {"chunks": chunks, **HDF5[how]}))
        else:
            sharded = {"shards": tuple(2 * c for c in chunks)} if how == 4 else {}
            array = zarr.create_array(
                name, shape=shape, chunks=chunks, dtype=values.dtype, **ZARR[how % 3 if how < 4 else 0], **sharded
            )
            array[...] = values
    comm.Barrier()
    return str(name), values


def sharding(draw: np.random.Generator, ndim: int) -> tuple[Mesh, PartitionSpec, list[int]]:
    """A mesh of permuted devices, a spec, and into how many parts each axis is cut."""
    devices = np.array(jax.devices())
    n = len(devices)
    first = int(draw.choice([k for k in range(1, n + 1) if n % k == 0]))
    mesh = Mesh(draw.permutation(devices).reshape(first, n // first), ("a", "b"))
    choices = [("a",), ("b",), ("a", "b"), ("b", "a"), ()]
    entries: list[Any] = [None] * ndim
    left = {"a", "b"}
    for axis in draw.permutation(ndim).tolist():
        names = pick(draw, choices)
        if set(names) <= left:
            entries[axis], left = (names or None), left - set(names)
    cuts = [int(np.prod([mesh.shape[name] for name in entry or ()], dtype=int)) for entry in entries]
    return mesh, PartitionSpec(*entries), cuts


def compare(what: str, array: jax.Array, expected: np.ndarray[Any, Any]) -> None:
    """Compare each shard of this process. NaN is itself."""
    for shard in array.addressable_shards:
        wanted = expected[shard.index]
        if not np.array_equal(
            np.asarray(shard.data), wanted, equal_nan=wanted.dtype.kind in "fc"
        ) or array.dtype != wanted.dtype.newbyteorder("="):
            raise ValueError(f"rank {comm.rank}: WRONG {what}, shard {shard.index}")


def padded(values: np.ndarray[Any, Any], cuts: list[int]) -> np.ndarray[Any, Any]:
    """The values with zeros at the end of axes that do not divide."""
    return np.pad(values, [(0, -n % cut) for n, cut in zip(values.shape, cuts, strict=True)])


def one_load(draw: np.random.Generator, folder: Path) -> None:
    """Write a file, and load it five times."""
    name, values = write(draw, folder)
    for _ in range(5):
        select = tuple(slice(a := int(draw.integers(n)), int(draw.integers(a, n)) + 1) for n in values.shape)
        select = select if draw.random() < 0.5 else None
        mesh, spec, cuts = sharding(draw, values.ndim)
        readers = pick(draw, ["auto", "root", "parallel", "direct", 2])
        verify = pick(draw, ["index", "checksum", "full"])
        found = shardload.load(
            name, mesh, spec, select=select, readers=readers, verify=verify, pad=0 if values.dtype != bool else False
        )
        expected = padded(values if select is None else values[select], cuts)
        compare(f"{name} {values.shape} {values.dtype} {spec} {select} {readers}", found, expected)


def one_save(draw: np.random.Generator, folder: Path) -> None:
    """Load a file, save it in other chunks, and let h5py or zarr-python read it."""
    name, values = write(draw, folder)
    mesh, spec, _ = sharding(draw, values.ndim)
    array = shardload.load(name, mesh, spec, pad=0 if values.dtype != bool else False)
    target = folder / pick(draw, ["b.h5", "b.zarr"])
    chunks = tuple(int(draw.integers(1, n + 1)) for n in values.shape) if draw.random() < 0.7 else None
    compression = pick(draw, [None, "gzip", "zstd"] if target.suffix == ".zarr" else [None, "gzip"])
    how = {"chunks": chunks} if chunks else {}
    shardload.save(target, {"x": array}, mode="w", compression=compression, **how)
    if comm.rank == 0 and not np.array_equal(stored_in(target, "x"), values):  # without the padding
        raise ValueError(f"WRONG save of {values.shape} {values.dtype} {spec} to {target.name} {chunks} {compression}")
    comm.Barrier()


def main() -> None:
    """Do as many as the caller says."""
    parser = argparse.ArgumentParser()
    for name, default in (("--loads", 1000), ("--saves", 200), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    shardload.initialize()
    draw = np.random.default_rng(given.seed)
    with folder_in_memory() as folder:
        for n in range(0, given.loads, 5):
            one_load(draw, folder)
            if comm.rank == 0 and n % 1000 == 0:
                print(f"{n} loads are right", flush=True)
        for n in range(given.saves):
            one_save(draw, folder)
            if comm.rank == 0 and n % 200 == 0:
                print(f"{n} saves are right", flush=True)
    if comm.rank == 0:
        print(f"{given.loads} loads and {given.saves} saves were compared on {comm.size} ranks", flush=True)


if __name__ == "__main__":
    main()
