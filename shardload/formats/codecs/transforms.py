"""How are bytes put in another order, or checked by a sum? Both ways: ``decode_NAME`` gives a stage, ``encode_NAME`` a step."""

from __future__ import annotations

import importlib
import struct
import sys
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import google_crc32c
import numpy as np

from shardload.formats.codecs.chains import Bytes, Many, Stage, Step, have_other_sizes
from shardload.system.scratch import shared_scratch

__all__ = [
    "decode_byte_order",
    "decode_crc32c",
    "decode_fletcher32",
    "decode_shuffle",
    "encode_crc32c",
    "encode_fletcher32",
    "encode_shuffle",
    "numcodecs",
    "one_by_one",
]


@cache
def numcodecs() -> Any:
    """The library of this name. It takes as long to import as h5py, and most files need nothing of it."""
    return importlib.import_module("numcodecs")


def decode_shuffle(itemsize: int) -> Stage:
    """The byte shuffle: the first byte of each element, then the second, ... Bytes of an incomplete element come last."""

    def undo(data: Bytes, out: Bytes) -> None:
        n = len(out) // itemsize
        if len(data) != len(out):
            raise ValueError(f"shuffled data of {len(data)} bytes for {len(out)}")
        elements = out[: n * itemsize].reshape(n, itemsize)
        for k in range(itemsize):  # NumPy releases the GIL here; measured as fast as numcodecs, which does not release it
            elements[:, k] = data[k * n : (k + 1) * n]
        out[n * itemsize :] = data[n * itemsize :]

    def undo_many(data: Many, out: Bytes) -> Many:
        n = out.shape[1] // itemsize
        is_whole = n * itemsize == out.shape[1]
        if itemsize in (2, 4, 8, 16) and is_whole and out.flags.c_contiguous and _blosc_takes(*out.shape):
            _unshuffle_by_blosc(data, out, itemsize)
            return out
        planes = _joined(data, out)
        if itemsize in (2, 4, 8) and is_whole and sys.byteorder == "little":
            # Words are put together from the last byte to the first: NumPy does that in vector registers. Measured with 48
            # chunks of 4096 words: 3.2 microseconds a chunk, byte by byte as above 7.
            words = out.view(f"<u{itemsize}")
            np.copyto(words, planes[:, (itemsize - 1) * n :])
            for k in reversed(range(itemsize - 1)):
                np.left_shift(words, 8, out=words)
                np.bitwise_or(words, planes[:, k * n : (k + 1) * n], out=words)
            return out
        for one, row in zip(planes, out, strict=True):
            undo(one, row)
        return out

    return Stage("shuffle", undo, 0, None, undo_many)


_MOST_BLOCKS, _MOST_BY_BLOSC = 1024, 1 << 26  # chunks, and bytes: it counts with 32 bits


def _blosc_takes(n: int, nbytes: int) -> bool:
    """True if Blosc may un-shuffle `n` chunks. In the main thread it would start threads of its own."""
    is_little = 0 < n <= _MOST_BLOCKS and 0 < n * nbytes <= _MOST_BY_BLOSC
    return is_little and threading.current_thread() is not threading.main_thread()


def _unshuffle_by_blosc(data: Many, out: Bytes, itemsize: int) -> None:
    """Un-shuffle chunks as long as the rows of `out`, with Blosc's code for vector registers: 0.9 microseconds for 16 KiB.

    They become the blocks of one Blosc 1 buffer. A block that could not be compressed is stored as it is, with its length
    before it, and is then only un-shuffled.
    """
    n, nbytes = out.shape
    if len(data) != n or have_other_sizes(data, nbytes):
        raise ValueError(f"data of other sizes than {nbytes} bytes")
    head, length = _blosc_head(n, nbytes, itemsize)
    parts = [length] * (2 * n)
    parts[0], parts[1::2] = head, data
    try:
        numcodecs().blosc.decompress(b"".join(parts), out.reshape(-1))
    except RuntimeError as error:
        raise ValueError(f"blosc cannot un-shuffle {n} chunks of {nbytes} bytes ({error})") from None


@lru_cache(maxsize=64)
def _blosc_head(n: int, nbytes: int, itemsize: int) -> tuple[bytes, bytes]:
    """What comes before the first of `n` shuffled blocks that are stored as they are, and what before each of the others.

    See c-blosc's README_CHUNK_FORMAT: version, version of the compressor (BloscLZ), flags (1: shuffled; 16: a block is one
    stream), bytes of an element; decoded bytes, bytes of a block, bytes of all; where each block begins.
    """
    first, length = 16 + 4 * n, struct.pack("<I", nbytes)
    size = first + n * (4 + nbytes)
    head = struct.pack("<BBBBIII", 2, 1, 1 | 16, itemsize, n * nbytes, nbytes, size)
    return head + struct.pack(f"<{n}I", *range(first, size, 4 + nbytes)) + length, length


def _joined(data: Many, out: Bytes) -> Bytes:
    """The bytes of several chunks as one array, with a row for each. ValueError unless each is as long as a row of `out`."""
    if isinstance(data, np.ndarray) and data.shape == out.shape:
        return data
    if have_other_sizes(data, out.shape[1]):
        raise ValueError(f"data of other sizes than {out.shape[1]} bytes")
    return np.frombuffer(b"".join(data), dtype=np.uint8).reshape(out.shape)


def one_by_one(undo: Callable[[Bytes, Bytes], Bytes | None]) -> Callable[[Many, Bytes], Many]:
    """The `undo_many` of a stage that is not worth more than a loop."""

    def undo_many(data: Many, out: Bytes) -> Many:
        found = []
        for one, row in zip(data, out, strict=True):
            values = undo(np.frombuffer(one, dtype=np.uint8), row)
            found.append(row if values is None else values)
        return found

    return undo_many


def encode_shuffle(itemsize: int) -> Step:
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


def decode_byte_order(itemsize: int) -> Stage:
    """The other byte order, for numbers (or real and imaginary parts) of `itemsize` bytes."""

    def undo(data: Bytes, out: Bytes) -> None:
        if len(data) != len(out):  # one element alone would be repeated
            raise ValueError(f"{len(data)} bytes are stored for a chunk of {len(out)}")
        kind = np.dtype(f"u{itemsize}")
        np.copyto(out.view(kind), data.view(kind.newbyteorder()))

    def undo_many(data: Many, out: Bytes) -> Many:
        undo(_joined(data, out).reshape(-1), out.reshape(-1))
        return out

    return Stage("byte order", undo, 0, None, undo_many)


def decode_fletcher32() -> Stage:
    """HDF5's Fletcher-32 checksum, after the data. Uses numcodecs."""
    codec = numcodecs().Fletcher32()

    def undo(data: Bytes, out: Bytes) -> Bytes:
        if len(data) < 4:
            raise ValueError(f"{len(data)} bytes are too few to hold a Fletcher-32 checksum")
        try:
            codec.decode(data)
        except RuntimeError as error:
            # HDF5 before 1.6.3 wrote the bytes of each half in the other order, and later versions accept both.
            a, b, c, d = data[-4:].tolist()
            try:
                codec.decode(np.concatenate([data[:-4], np.array([b, a, d, c], dtype=np.uint8)]))
            except RuntimeError:
                raise ValueError(f"Fletcher-32: {error}") from None
        return data[:-4]

    return Stage("fletcher32", undo, 4, None, one_by_one(undo))


def encode_fletcher32() -> Step:
    """HDF5's Fletcher-32 checksum, after the data. Uses numcodecs."""
    codec = numcodecs().Fletcher32()
    return lambda data: codec.encode(np.frombuffer(data, dtype=np.uint8))


def decode_crc32c() -> Stage:
    """Zarr's CRC-32C checksum, after the data. Uses google-crc32c, on which zarr-python depends."""

    def undo(data: Bytes, out: Bytes) -> Bytes:
        if len(data) < 4:
            raise ValueError(f"{len(data)} bytes are too few to hold a CRC-32C checksum")
        stored = int.from_bytes(data[-4:].tobytes(), "little")
        found = google_crc32c.value(data[:-4])  # takes arrays, but no memoryview
        if stored != found:
            raise ValueError(f"CRC-32C is {found:08x}, stored is {stored:08x}")
        return data[:-4]

    return Stage("crc32c", undo, 4, None, one_by_one(undo))


def encode_crc32c() -> Step:
    """Zarr's CRC-32C checksum, after the data. Uses google-crc32c."""

    def step(data: Any) -> Any:
        source = np.frombuffer(data, dtype=np.uint8)
        out = np.empty(len(source) + 4, dtype=np.uint8)
        out[:-4] = source
        out[-4:] = np.frombuffer(int(google_crc32c.value(source)).to_bytes(4, "little"), dtype=np.uint8)
        return out

    return step
