"""How are bytes put in another order, or checked by a sum? Both ways: ``decode_NAME`` gives a stage, ``encode_NAME`` a step."""

from __future__ import annotations

import importlib
import struct
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import google_crc32c
import numpy as np

from shardload.formats.codecs.chains import Bytes, Many, Stage, Step, have_other_sizes
from shardload.system.scratch import shared_scratch


@cache
def numcodecs() -> Any:
    """The library of this name. It takes as long to import as h5py, and most files need nothing of it."""
    return importlib.import_module("numcodecs")


def decode_shuffle(itemsize: int) -> Stage:
    """The byte shuffle: the first byte of each element, then the second, ... Bytes of an incomplete element come last."""

    def undo(data: Many, out: Bytes) -> Many:
        n, nbytes = out.shape[1] // itemsize, out.shape[1]
        if have_other_sizes(data, nbytes):
            raise ValueError(f"shuffled data of other sizes than {nbytes} bytes")
        if itemsize in (2, 4, 8, 16) and n * itemsize == nbytes and out.flags.c_contiguous and _blosc_takes(*out.shape):
            _unshuffle_by_blosc(data, out, itemsize)
            return out
        for one, row in zip(data, out, strict=True):
            planes, elements = np.frombuffer(one, dtype=np.uint8), row[: n * itemsize].reshape(n, itemsize)
            for k in range(itemsize):  # NumPy releases the GIL here; measured as fast as numcodecs, which does not release it
                elements[:, k] = planes[k * n : (k + 1) * n]
            row[n * itemsize :] = planes[n * itemsize :]
        return out

    return Stage("shuffle", undo, 0)


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
    if len(data) != n:
        raise ValueError(f"{len(data)} chunks for {n}")
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
    kind = np.dtype(f"u{itemsize}")

    def undo(data: Many, out: Bytes) -> Many:
        if have_other_sizes(data, out.shape[1]):
            raise ValueError(f"other sizes are stored than the {out.shape[1]} bytes of a chunk")
        for one, row in zip(data, out, strict=True):
            np.copyto(row.view(kind), np.frombuffer(one, kind.newbyteorder()))
        return out

    return Stage("byte order", undo, 0)


def _checked(name: str, check: Callable[[Bytes], None]) -> Stage:
    """A stage that takes away a checksum of 4 bytes, after `check` of the data with it. ValueError if that is wrong."""

    def undo(data: Many, out: Bytes) -> Many:
        chunks = [np.frombuffer(one, dtype=np.uint8) for one in data]
        for chunk in chunks:
            if len(chunk) < 4:
                raise ValueError(f"{len(chunk)} bytes are too few to hold a checksum of {name}")
            check(chunk)
        return [chunk[:-4] for chunk in chunks]

    return Stage(name, undo, 4)


def decode_fletcher32() -> Stage:
    """HDF5's Fletcher-32 checksum, after the data. Uses numcodecs."""
    codec = numcodecs().Fletcher32()

    def check(data: Bytes) -> None:
        try:
            codec.decode(data)
        except RuntimeError as error:
            # HDF5 before 1.6.3 wrote the bytes of each half in the other order, and later versions accept both.
            a, b, c, d = data[-4:].tolist()
            try:
                codec.decode(np.concatenate([data[:-4], np.array([b, a, d, c], dtype=np.uint8)]))
            except RuntimeError:
                raise ValueError(f"Fletcher-32: {error}") from None

    return _checked("fletcher32", check)


def encode_fletcher32() -> Step:
    """HDF5's Fletcher-32 checksum, after the data. Uses numcodecs."""
    codec = numcodecs().Fletcher32()
    return lambda data: codec.encode(np.frombuffer(data, dtype=np.uint8))


def decode_crc32c() -> Stage:
    """Zarr's CRC-32C checksum, after the data. Uses google-crc32c, on which zarr-python depends."""

    def check(data: Bytes) -> None:
        stored = int.from_bytes(data[-4:].tobytes(), "little")
        found = google_crc32c.value(data[:-4])  # takes arrays, but no memoryview
        if stored != found:
            raise ValueError(f"CRC-32C is {found:08x}, stored is {stored:08x}")

    return _checked("crc32c", check)


def encode_crc32c() -> Step:
    """Zarr's CRC-32C checksum, after the data. Uses google-crc32c."""

    def step(data: Any) -> Any:
        source = np.frombuffer(data, dtype=np.uint8)
        out = np.empty(len(source) + 4, dtype=np.uint8)
        out[:-4] = source
        out[-4:] = np.frombuffer(int(google_crc32c.value(source)).to_bytes(4, "little"), dtype=np.uint8)
        return out

    return step
