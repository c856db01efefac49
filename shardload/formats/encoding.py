"""How are values turned into the stored bytes of one chunk? With the libraries that decode them, outside a file format's lock.

1. The values of a chunk are put into memory as the file has them: C order, its byte order, padded at the array's edge.
2. `EncodeChain` runs the steps of a format over these bytes: shuffle, compressor, checksum. It is the opposite of
   `codecs.Chain`.

Each step makes exactly what the format's own library reads; docs/design/save.md has the table. All steps but Fletcher-32
release the GIL while they work, so that several chunks can be encoded at once.
"""

from __future__ import annotations

import math
import threading
import zlib as standard_zlib
from collections.abc import Callable, Sequence
from typing import Any

import deflate
import google_crc32c
import numcodecs
import numcodecs.blosc
import numcodecs.lz4
import numpy as np
import zstandard

from shardload.errors import ConfigError
from shardload.formats.base import native_dtype
from shardload.formats.compression_words import BLOSC_CODES
from shardload.system.scratch import shared_scratch

__all__ = [
    "BLOSC_NAMES",
    "EncodeChain",
    "Step",
    "blosc",
    "crc32c",
    "fletcher32",
    "gzip",
    "level_of",
    "lz4",
    "shuffle",
    "zlib",
    "zstd",
]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Step = Callable[[Any], Any]  # bytes-like to bytes-like

BLOSC_NAMES = tuple(BLOSC_CODES)
_LZ4_BLOCK = 1 << 30


class EncodeChain:
    """How the chunks of one array are encoded. Safe to use from several threads at once.

    Parameters
    ----------
    steps : sequence of callable
        What is done to the bytes of a chunk, in order. Each takes a flat array of bytes and returns something bytes-like.
    chunk_shape : tuple of int or None
        Elements of a chunk along each axis; None if regions of any shape are encoded as they are.
    dtype : dtype
        The type as it is stored, in the file's byte order.
    fill : scalar
        What pads a chunk that reaches over the array's edge.

    Examples
    --------
    >>> chain = EncodeChain([], (2, 2), np.dtype(">i2"), 7)
    >>> bytes(chain.encode(np.array([[1], [2]], dtype="<i2"))).hex(" ", 2)
    '0001 0007 0002 0007'
    """

    def __init__(self, steps: Sequence[Step], chunk_shape: tuple[int, ...] | None, dtype: np.dtype[Any], fill: Any) -> None:
        self._steps, self._chunk_shape, self._dtype, self._fill = tuple(steps), chunk_shape, dtype, fill
        self._scratch = shared_scratch()

    def encode(self, values: np.ndarray[Any, Any]) -> Any:
        """The stored bytes of a chunk. Without steps they may be the memory of `values` itself."""
        data: Any = self._packed(values)
        for step in self._steps:
            data = step(data)
        # A step may leave its result in scratch memory, for the next step. After the last one it must stay what it is.
        is_scratch = bool(self._steps) and isinstance(data, np.ndarray) and data.base is not None
        return data.copy() if is_scratch else data

    def _packed(self, values: np.ndarray[Any, Any]) -> Bytes:
        # First, because in an array in one piece nothing else is done for a chunk.
        if values.dtype == self._dtype and values.flags.c_contiguous and self._chunk_shape in (None, values.shape):
            return values.reshape(-1).view(np.uint8)
        if native_dtype(values.dtype) != native_dtype(self._dtype):
            raise ValueError(f"values of type {values.dtype} for an array of {self._dtype}: nothing is converted silently")
        shape = values.shape if self._chunk_shape is None else self._chunk_shape
        is_whole = values.shape == shape
        if not is_whole and (len(values.shape) != len(shape) or any(n > m for n, m in zip(values.shape, shape, strict=True))):
            raise ValueError(f"values of shape {values.shape} for a chunk of {shape}")
        # Bytes that go on to a step are gone when `encode` returns, so that the next chunk can use their memory.
        nbytes = math.prod(shape) * self._dtype.itemsize
        room = self._scratch.bytes("encode", nbytes) if self._steps else np.empty(nbytes, dtype=np.uint8)
        out = room.view(self._dtype).reshape(shape)
        if not is_whole:
            _pad(out, values.shape, self._fill)
        out[tuple(slice(n) for n in values.shape)] = values
        return room


def _pad(out: np.ndarray[Any, Any], inner: tuple[int, ...], fill: Any) -> None:
    """Fill what of `out` lies outside of a box of shape `inner` at its start."""
    for k, n in enumerate(inner):
        out[(*(slice(m) for m in inner[:k]), slice(n, None))] = fill


def level_of(name: str, level: int | None, usual: int, most: int, least: int = 0) -> int:
    """A compressor's level; ConfigError if it has none of that number."""
    if level is None:
        return usual
    if isinstance(level, bool) or not isinstance(level, int) or not least <= level <= most:
        raise ConfigError(f"the level of {name} is {level!r}; expected a number from {least} to {most}")
    return level


def zlib(level: int) -> Step:
    """HDF5's gzip filter: a zlib stream. Uses libdeflate."""
    return (lambda data: deflate.zlib_compress(data, level)) if level else _not_compressed(15)


def gzip(level: int) -> Step:
    """Zarr's gzip: one gzip member. Uses libdeflate."""
    return (lambda data: deflate.gzip_compress(data, level)) if level else _not_compressed(31)


def _not_compressed(wbits: int) -> Step:
    """Level 0, which not every version of deflate has."""

    def step(data: Any) -> Any:
        stream = standard_zlib.compressobj(0, wbits=wbits)
        return stream.compress(data) + stream.flush()

    return step


class _ZstdOfThread(threading.local):
    """zstandard's compressor of this thread: two threads must not use one. One for all arrays, because each takes megabytes."""

    level: int | None = None
    compress: Step | None = None


_zstd_of_thread = _ZstdOfThread()


def zstd(level: int) -> Step:
    """One Zstandard frame that declares its size, without a checksum of the content.

    Uses zstandard: its library is newer than that of numcodecs, and its context is kept for the next chunk.
    """

    def step(data: Any) -> Any:
        mine = _zstd_of_thread
        compress = mine.compress
        if compress is None or mine.level != level:
            mine.compress = None  # free the old memory before asking for more
            kept = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)
            compress = mine.compress = kept.compress
            mine.level = level
        return compress(data)

    return step


def blosc(cname: str, level: int, shuffling: int, itemsize: int) -> Step:
    """A Blosc 1 buffer. Uses numcodecs; ``shuffling`` is 0, 1 (bytes) or 2 (bits)."""
    name, kind = cname.encode(), np.dtype(f"V{itemsize}")

    def step(data: Any) -> Any:
        elements = np.frombuffer(data, dtype=np.uint8).view(kind)  # numcodecs takes the size of an element from it
        return numcodecs.blosc.compress(elements, name, level, shuffling, 0)

    return step


def lz4() -> Step:
    """HDF5's LZ4 filter: sizes in big-endian order, then blocks of at most 1 GiB; one that does not shrink is stored as it is.
    Uses numcodecs.
    """

    def step(data: Any) -> Any:
        whole = memoryview(data).cast("B")
        size = min(len(whole), _LZ4_BLOCK)
        parts: list[Any] = [len(whole).to_bytes(8, "big"), size.to_bytes(4, "big")]
        for at in range(0, len(whole), size or 1):
            block = whole[at : at + size]
            packed = memoryview(numcodecs.lz4.compress(block))[4:]  # without the size that numcodecs puts first
            best = packed if len(packed) < len(block) else block
            parts += [len(best).to_bytes(4, "big"), best]
        return b"".join(parts)

    return step


def shuffle(itemsize: int) -> Step:
    """The byte shuffle: the first byte of each element, then the second, ... Bytes of an incomplete element come last."""
    scratch = shared_scratch()

    def step(data: Any) -> Any:
        source = np.frombuffer(data, dtype=np.uint8)
        n = len(source) // itemsize
        out = scratch.bytes("shuffled", len(source))
        elements = source[: n * itemsize].reshape(n, itemsize)
        for k in range(itemsize):  # NumPy releases the GIL here, numcodecs does not
            out[k * n : (k + 1) * n] = elements[:, k]
        out[n * itemsize :] = source[n * itemsize :]
        return out

    return step


def fletcher32() -> Step:
    """HDF5's Fletcher-32 checksum, after the data. Uses numcodecs."""
    codec = numcodecs.Fletcher32()
    return lambda data: codec.encode(np.frombuffer(data, dtype=np.uint8))


def crc32c() -> Step:
    """Zarr's CRC-32C checksum, after the data. Uses google-crc32c."""

    def step(data: Any) -> Any:
        source = np.frombuffer(data, dtype=np.uint8)
        out = np.empty(len(source) + 4, dtype=np.uint8)
        out[:-4] = source
        out[-4:] = np.frombuffer(int(google_crc32c.value(source)).to_bytes(4, "little"), dtype=np.uint8)
        return out

    return step
