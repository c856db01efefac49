"""What does one small chunk cost a rank: its decoder, the system's calls, and the rest, which is Python?

CPU time of all threads of a rank, in user mode and in the kernel, as the system counts it (`getrusage`; by samples, so many
loads are summed up). From the first the decoder's own time is taken away: the same stored chunks are decoded by the library
alone, in a list comprehension, by all ranks at once, and un-shuffled if they were shuffled: that is a filter of the file too.
So are NumPy's copies: out of the batch, and for other ranks once more out of the staging buffer. What is left is Python.

The decoders run in a thread, as in a load: in the main thread shuffled bytes are put in order in another way.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import deflate
import numcodecs
import numpy as np
import zstandard

from shardload.formats.codecs.algorithms import decode_shuffle
from shardload.formats.contract.chunk_reader import copy_rows
from shardload.formats.lookup import open_source
from shardload.planning.region import cut_box

_BATCH, _MOST = 64, 2048  # chunks


def spent() -> tuple[float, float]:
    """CPU seconds of this process so far: in user mode, and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


def decoder_seconds(path: str, dataset: str, repeats: int = 3) -> tuple[float, float]:
    """CPU seconds for one chunk of a file: for its decoder, and for the un-shuffle; nothing else."""
    source = open_source(path, dataset)
    try:
        info, reader = source.info, source.chunk_reader()
        chunk, itemsize = info.chunks or (), source.dtype.itemsize
        nbytes = int(np.prod(chunk)) * itemsize
        grid = [range(-(-n // c)) for n, c in zip(info.shape, chunk, strict=True)]
        if reader is None:
            raise ValueError(f"{info} has no reader of chunks")
        stored = [bytes(data) for data in reader.fetch(next(cut_box(grid, _MOST))).data]
        decode, shuffled = _decoder(info.codec, nbytes), _unshuffler(info.codec, nbytes, itemsize)
        with ThreadPoolExecutor(1) as thread:
            found = [thread.submit(_timed, decode, shuffled, stored).result() for _ in range(repeats)]
        decoding, ordering = min(found, key=sum)
        return decoding / len(stored), ordering / len(stored)
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


def _timed(decode: Callable[[Any], Any], shuffled: Callable[[Any], Any] | None, stored: list[bytes]) -> tuple[float, float]:
    decoding = ordering = 0.0
    for first in range(0, len(stored), _BATCH):
        began = time.thread_time()
        found = [decode(one) for one in stored[first : first + _BATCH]]
        decoded = time.thread_time()
        decoding += decoded - began
        if shuffled is not None:
            shuffled(found)
            ordering += time.thread_time() - decoded
    return decoding, ordering


def _decoder(codec: str, nbytes: int) -> Callable[[Any], Any]:
    """What decodes a chunk with the library that shardload uses, without a check."""
    if "zstd" in codec and "blosc" not in codec:
        return zstandard.ZstdDecompressor().decompress
    if "gzip" in codec:
        return partial(_inflate, nbytes)
    if "blosc" in codec:
        return numcodecs.blosc.decompress  # type: ignore[no-any-return]
    raise ValueError(f"no decoder of {codec} is known here")


def _inflate(nbytes: int, stored: bytes) -> bytearray:
    return deflate.zlib_decompress(stored, nbytes)


def _unshuffler(codec: str, nbytes: int, itemsize: int) -> Callable[[Any], Any] | None:
    """What puts the bytes of shuffled chunks in order; None if they are not shuffled, or blosc does it."""
    undo = decode_shuffle(itemsize).undo if "gzip" in codec and "shuffle" in codec else None
    if undo is None:
        return None
    out = np.empty((_BATCH, nbytes), dtype=np.uint8)
    return lambda found: undo(found, out[: len(found)])
