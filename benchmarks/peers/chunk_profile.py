"""What does one small chunk cost a rank: its decoder, the system's calls, and the rest, which is Python?

CPU time of all threads of a rank, in user mode and in the kernel, as the system counts it (`getrusage`; by samples, so many
loads are summed up). From the first the decoder's own time is taken away: the same stored chunks are decoded by the library
alone, in a list comprehension, by all ranks at once; and so are NumPy's copies: out of the batch, and for other ranks once more
out of the staging buffer. What is left is Python.
"""

from __future__ import annotations

import importlib
import resource
import time
from collections.abc import Callable
from typing import Any

import deflate
import numcodecs
import numpy as np

from shardload.formats.codecs import unshuffle
from shardload.formats.lookup import open_source
from shardload.planning.batches import cut_box
from shardload.transfer.chunk_batches import copy_rows

_BATCH, _MOST = 64, 2048  # chunks


def spent() -> tuple[float, float]:
    """CPU seconds of this process so far: in user mode, and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


def decoder_seconds(path: str, dataset: str, repeats: int = 3) -> float:
    """CPU seconds that the decoders of a file take for one chunk, and nothing else."""
    source = open_source(path, dataset)
    try:
        info, reader = source.info, source.chunk_reader()
        chunk = info.chunks or ()
        grid = [range(-(-n // c)) for n, c in zip(info.shape, chunk, strict=True)]
        fetched: Any = reader
        stored = [bytes(one) for one in fetched.fetch_many(next(cut_box(grid, _MOST)))]
        decode = _decoder(info.codec, int(np.prod(chunk)) * source.dtype.itemsize, source.dtype.itemsize)
        return min(_timed(decode, stored) for _ in range(repeats)) / len(stored)
    finally:
        source.close()


def copy_seconds(chunk: tuple[int, ...], dtype: np.dtype[Any], repeats: int = 3) -> float:
    """CPU seconds for moving the values of one chunk out of a batch into a larger array, and nothing else."""
    n, ndim = 4, len(chunk)
    batches = [np.ones((*(n,) * ndim, *chunk), dtype) for _ in range(2)]
    wholes = [np.zeros([n * c for c in chunk], dtype) for _ in range(8)]
    order = [*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)]
    places = [one.reshape([size for c in chunk for size in (n, c)]).transpose(order) for one in wholes]
    best = float("inf")
    for _ in range(repeats):
        began = time.thread_time()
        for k, place in enumerate(places):
            copy_rows(place, batches[k % 2])
        best = min(best, time.thread_time() - began)
    return best / len(places) / n**ndim


def _timed(decode: Callable[[list[bytes]], Any], stored: list[bytes]) -> float:
    began = time.thread_time()
    for first in range(0, len(stored), _BATCH):
        decode(stored[first : first + _BATCH])
    return time.thread_time() - began


def _decoder(codec: str, nbytes: int, itemsize: int) -> Callable[[list[bytes]], Any]:
    """What decodes some chunks with the library that shardload uses, without a check."""
    if "zstd" in codec and "blosc" not in codec:
        try:
            decompress = importlib.import_module("zstandard").ZstdDecompressor().decompress
        except ImportError:
            decompress = numcodecs.zstd.decompress
        return lambda stored: [decompress(one) for one in stored]
    if "gzip" in codec:
        shuffled, out = unshuffle(itemsize).undo_many, np.empty((_BATCH, nbytes), dtype=np.uint8)

        def inflate(stored: list[bytes]) -> None:
            found = [deflate.zlib_decompress(one, nbytes) for one in stored]
            if "shuffle" in codec and shuffled is not None:
                shuffled(found, out[: len(stored)])

        return inflate
    if "blosc" in codec:
        return lambda stored: [numcodecs.blosc.decompress(one) for one in stored]
    raise ValueError(f"no decoder of {codec} is known here")
