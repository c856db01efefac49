"""How fast could a save be here? Each chunk copied, encoded by the library that shardload uses on all cores, and written once.

Without any code of shardload, messages, metadata or a comparison. Chunks lie in warm memory, one after the other. As many
processes as the save has ranks share the chunks, and the cores; all threads write into one file, each in a part of its own. An
array in one piece is written as it is.
"""

from __future__ import annotations

import importlib
import math
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numcodecs.zstd
import numpy as np

from benchmarks.cases.layouts import boxes
from benchmarks.cases.saves import GZIP_LEVEL, SaveLayout

PART_NBYTES = 8 << 20  # of an array in one piece
ZSTD_LEVEL = 3  # zarr-python's 0 is the same level
Encode = Callable[[Any], Any]


def deflater() -> tuple[str, Encode]:
    """The fastest deflate that is installed."""
    try:
        deflate: Any = importlib.import_module("deflate")
    except ImportError:
        return "zlib", lambda data: zlib.compress(data, GZIP_LEVEL)
    return "libdeflate", lambda data: deflate.zlib_compress(data, GZIP_LEVEL)


def zstd_compressor() -> tuple[str, Encode]:
    """The fastest Zstandard that is installed, for one thread."""
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        return "numcodecs", lambda data: numcodecs.zstd.compress(data, ZSTD_LEVEL)
    return "zstandard", zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress


def encoder(codec: str | None) -> Encode:
    """Bytes to stored bytes, for one thread."""
    if codec == "gzip":
        return deflater()[1]
    return zstd_compressor()[1] if codec == "zstd" else lambda data: data


class SaveFloor:
    """The chunks of one process, in warm memory, from request to request."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads, self.pool = n_threads, ThreadPoolExecutor(n_threads)
        self.made_of: Any = None
        self.chunks: np.ndarray[Any, Any] = np.empty((0, 0), np.uint8)
        self.first = 0

    def prepare(self, reference: str, layout: SaveLayout, rank: int, n: int) -> None:
        """Read this process's chunks, if they are not there."""
        if self.made_of == (reference, layout):
            return
        self.made_of, self.chunks = None, np.empty((0, 0), np.uint8)  # the old ones first
        values = np.load(reference, mmap_mode="r")
        if layout.chunks is None:
            flat = values.reshape(-1).view(np.uint8)
            step = math.gcd(PART_NBYTES, flat.nbytes)
            parts, total = flat.reshape(-1, step), flat.nbytes // step
            self.first, stop = total * rank // n, total * (rank + 1) // n
            self.chunks = np.array(parts[self.first : stop])
        else:
            places = list(boxes(values.shape, layout.chunks))
            self.first, stop = len(places) * rank // n, len(places) * (rank + 1) // n
            own = [np.ascontiguousarray(values[place]).reshape(-1).view(np.uint8) for place in places[self.first : stop]]
            self.chunks = np.stack(own) if own else np.empty((0, 0), np.uint8)
        self.made_of = reference, layout

    def run(self, path: str, codec: str | None) -> int:
        """Encode and write all chunks; returns the number of bytes."""
        descriptor = os.open(path, os.O_WRONLY)
        try:
            return sum(self.pool.map(lambda share: self._write(descriptor, codec, share), range(self.n_threads)))
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int, codec: str | None, share: int) -> int:
        encode, n = encoder(codec), len(self.chunks)
        first, stop = n * share // self.n_threads, n * (share + 1) // self.n_threads
        nbytes = self.chunks.shape[1]
        room = nbytes + nbytes // 8 + 1024 if codec else nbytes  # what does not shrink gets a little longer
        at = start = (self.first + first) * room
        scratch = np.empty(nbytes, np.uint8)
        for chunk in self.chunks[first:stop]:
            data: Any = chunk
            if codec:
                np.copyto(scratch, chunk)
                data = encode(scratch)
            rest = memoryview(data).cast("B")
            while len(rest):
                done = os.pwrite(descriptor, rest, at)
                rest, at = rest[done:], at + done
        return at - start
