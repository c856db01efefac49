"""How fast could a load be here? Each chunk decoded once by the fastest decoder, on all cores, and one copy in memory.

Without any code of shardload: chunk offsets from h5py, or the chunk files of the Zarr store; positional reads from the page
cache; ISA-L (or zlib-ng, or zlib) and numcodecs into reused buffers, one set per thread. Then the array's bytes are copied once
between buffers that were used before. A contiguous file is read directly into such a buffer, and that is the copy.

As many processes as the load has ranks share the chunks, and the cores: each takes one run of them, and has at least one
thread. The time is from the first process's start to the last one's end. Listing the chunks and starting the threads are not
timed.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  (h5py opens Blosc files with it)
import numcodecs
import numpy as np

from benchmarks.cases.saves import SaveLayout
from benchmarks.peers.save_floor import SaveFloor, deflater, zstd_compressor
from benchmarks.remote import serve

CORES = len(os.sched_getaffinity(0))
PART_NBYTES = 8 << 20  # of a copy or of a contiguous read
MISSING = (1 << 64) - 1  # in the index of a Zarr shard

numcodecs.blosc.use_threads = False  # one decoder per thread here, outside the GIL
Decode = Callable[[Any, "Scratch"], None]


def aligned_ones(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory where the kernel copies a file fast: not 16 bytes after the beginning of a page (docs/design/decode.md)."""
    raw = np.ones(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


class Scratch(threading.local):
    """A thread's own buffers: a raw chunk, two decoded ones."""

    raw_nbytes = 0
    chunk_nbytes = 0

    def fit(self, raw_nbytes: int, chunk_nbytes: int) -> None:
        if self.raw_nbytes < raw_nbytes:
            self.raw, self.raw_nbytes = aligned_ones(raw_nbytes), raw_nbytes
        if self.chunk_nbytes != chunk_nbytes:
            self.out, self.chunk_nbytes = np.ones(chunk_nbytes, np.uint8), chunk_nbytes


@dataclass(frozen=True)
class Job:
    """What is decoded: where each raw chunk lies, and how a chunk is decoded."""

    places: tuple[tuple[str, int, int], ...]  # file, offset, bytes
    chunk_nbytes: int
    decode: Decode | None  # None: plain values
    nbytes: int

    def share(self, rank: int, n: int) -> Job:
        """What one of `n` processes decodes: chunks that follow each other in the file."""
        total = len(self.places)
        first, stop = total * rank // n, total * (rank + 1) // n
        own = self.places[first:stop]
        if self.decode is None:
            return replace(self, places=own, nbytes=sum(size for _, _, size in own))
        return replace(self, places=own, nbytes=self.nbytes * stop // total - self.nbytes * first // total)


def inflate() -> tuple[str, Callable[[Any, int], Any]]:
    """The fastest inflate that is installed: measured one by one in docs/design/decode.md."""
    try:
        deflate: Any = importlib.import_module("deflate")
    except ImportError:
        return "zlib", lambda data, nbytes: zlib.decompress(data, zlib.MAX_WBITS, nbytes)
    return "libdeflate", lambda data, nbytes: deflate.zlib_decompress(data, nbytes)


def decode_nothing(raw: Any, scratch: Scratch) -> None:
    """Chunks of plain values: reading is all."""


def decode_zstd(raw: Any, scratch: Scratch) -> None:
    numcodecs.Zstd().decode(raw, out=scratch.out)


def decode_blosc(raw: Any, scratch: Scratch) -> None:
    numcodecs.Blosc().decode(raw, out=scratch.out)


def decode_gzip(shuffled: int) -> Decode:
    """Inflate, then put the bytes of each value together again (`shuffled` of them; 1: they never were apart)."""
    decompress = inflate()[1]

    def decode(raw: Any, scratch: Scratch) -> None:
        plain = np.frombuffer(decompress(raw, scratch.chunk_nbytes), np.uint8)
        if shuffled == 4:
            unshuffle_4(plain, scratch.out)
        elif shuffled > 1:
            numcodecs.Shuffle(shuffled).decode(plain, out=scratch.out)
        else:
            np.copyto(scratch.out, plain)

    return decode


def unshuffle_4(plain: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Four planes of bytes to 32-bit words. NumPy lets other threads run meanwhile; numcodecs' own keeps the GIL."""
    planes, words = plain.reshape(4, -1), out.view("<u4")
    np.copyto(words, planes[3])
    for plane in planes[2::-1]:
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)


@cache
def job_of(path: str, dataset: str) -> Job:
    """Find all chunks of an array."""
    return _zarr_job(Path(path)) if Path(path).is_dir() else _hdf5_job(path, dataset)


def _hdf5_job(path: str, dataset: str) -> Job:
    with h5py.File(path) as file:
        data = file[dataset]
        if data.chunks is None:
            start, nbytes = data.id.get_offset(), data.nbytes
            parts = [(path, start + i, min(PART_NBYTES, nbytes - i)) for i in range(0, nbytes, PART_NBYTES)]
            return Job(tuple(parts), PART_NBYTES, None, nbytes)
        found: list[tuple[str, int, int]] = []
        data.id.chunk_iter(lambda chunk: found.append((path, chunk.byte_offset, chunk.size)))
        creation = data.id.get_create_plist()
        filters = [creation.get_filter(i)[0] for i in range(creation.get_nfilters())]
        chunk_nbytes = math.prod(data.chunks) * data.dtype.itemsize
        if not filters:
            decode = decode_nothing
        elif filters == [32001]:
            decode = decode_blosc
        elif filters in ([1], [2, 1]):
            decode = decode_gzip(data.dtype.itemsize if 2 in filters else 1)
        else:
            raise ValueError(f"the floor knows no decoder for HDF5 filters {filters} of {dataset} in {path}")
        return Job(tuple(found), chunk_nbytes, decode, data.nbytes)


def _zarr_job(path: Path) -> Job:
    metadata = json.loads((path / "zarr.json").read_text())
    shape, codecs = metadata["shape"], metadata["codecs"]
    outer = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    itemsize = np.dtype(metadata["data_type"]).itemsize
    files = sorted(p for p in (path / "c").rglob("*") if p.is_file())
    places = [(str(p), 0, p.stat().st_size) for p in files]
    inner = outer
    if codecs[0]["name"] == "sharding_indexed":
        inner, codecs = codecs[0]["configuration"]["chunk_shape"], codecs[0]["configuration"]["codecs"]
        n = math.prod(o // i for o, i in zip(outer, inner, strict=True))
        places = [place for file in files for place in _in_shard(file, n)]
    if [codec["name"] for codec in codecs] != ["bytes", "zstd"]:
        raise ValueError(f"the floor knows no decoder for the Zarr codecs {codecs}")
    return Job(tuple(places), math.prod(inner) * itemsize, decode_zstd, math.prod(shape) * itemsize)


def _in_shard(file: Path, n: int) -> list[tuple[str, int, int]]:
    """The index stands at the end: n pairs of offset and size, and a checksum of 4 bytes."""
    with file.open("rb") as opened:
        opened.seek(-(16 * n + 4), os.SEEK_END)
        index = np.frombuffer(opened.read(16 * n), "<u8").reshape(n, 2).tolist()
    return [(str(file), offset, size) for offset, size in index if offset != MISSING]


class Floor:
    """Threads and warm buffers of one process, kept from request to request."""

    def __init__(self, n_threads: int = CORES) -> None:
        self.n_threads = n_threads
        self.pool = ThreadPoolExecutor(n_threads)
        self.scratch = Scratch()
        self.source = self.target = np.empty(0, np.uint8)

    def make_room(self, nbytes: int) -> None:
        if self.target.nbytes != nbytes:
            self.source = self.target = np.empty(0, np.uint8)  # the old ones first
            self.source, self.target = aligned_ones(nbytes), aligned_ones(nbytes)

    def run(self, job: Job) -> tuple[float, float]:
        """Seconds for reading and decoding, and for the copy."""
        self.make_room(job.nbytes)
        raw_nbytes = max((size for _, _, size in job.places), default=0)
        handles = {name: os.open(name, os.O_RDONLY) for name in {name for name, _, _ in job.places[:1]}}
        opened = handles if len({name for name, _, _ in job.places}) == 1 else {}
        try:
            start = time.perf_counter()
            list(self.pool.map(lambda share: self._decode(job, share, raw_nbytes, opened), range(self.n_threads)))
            middle = time.perf_counter()
            if job.decode is not None:
                list(self.pool.map(self._copy, range(self.n_threads)))
            return middle - start, time.perf_counter() - middle
        finally:
            for handle in handles.values():
                os.close(handle)

    def _decode(self, job: Job, share: int, raw_nbytes: int, opened: dict[str, int]) -> None:
        """Every n-th chunk; in a contiguous file straight to its place."""
        scratch = self.scratch
        if job.decode is not None:
            scratch.fit(raw_nbytes, job.chunk_nbytes)
        for i in range(share, len(job.places), self.n_threads):
            name, offset, size = job.places[i]
            into = self.target[i * job.chunk_nbytes :][:size] if job.decode is None else scratch.raw[:size]
            handle = opened.get(name)
            file = os.open(name, os.O_RDONLY) if handle is None else handle
            try:
                if os.preadv(file, [into], offset) != size:
                    raise OSError(f"{name} is shorter than its index says")
            finally:
                if handle is None:
                    os.close(file)
            if job.decode is not None:
                job.decode(into, scratch)

    def _copy(self, share: int) -> None:
        step = -(-self.target.nbytes // self.n_threads)
        np.copyto(self.target[share * step : (share + 1) * step], self.source[share * step : (share + 1) * step])


def main() -> None:
    """Wait for requests."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    n_threads = max(1, CORES // comm.size)
    floor, saves = Floor(n_threads), SaveFloor(n_threads)

    def save(request: dict[str, Any]) -> dict[str, Any]:
        layout, path = SaveLayout.of(request["layout"]), request["path"]
        saves.prepare(request["reference"], layout, comm.rank, comm.size)
        if comm.rank == 0:
            Path(path).touch()
        comm.Barrier()
        start, cpu = time.perf_counter(), time.process_time()
        saves.run(path, layout.codec)
        return {"start": start, "end": time.perf_counter(), "cpu": time.process_time() - cpu}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "save":
            return save(request)
        file = request["file"]
        job = job_of(file["path"], file["dataset"]).share(comm.rank, comm.size)
        floor.make_room(job.nbytes)
        comm.Barrier()
        start, cpu = time.perf_counter(), time.process_time()
        decode, copy = floor.run(job)
        cpu = time.process_time() - cpu
        return {"start": start, "end": start + decode + copy, "cpu": cpu, "report": {"decode": decode, "copy": copy}}

    libraries = {"inflate": inflate()[0], "deflate": deflater()[0], "zstd": zstd_compressor()[0]}
    serve(handle, comm.rank, libraries | {"cores": str(CORES), "threads": str(n_threads)})


if __name__ == "__main__":
    main()
