"""Is the length that a stored chunk declares possible? This is checked before HDF5 decodes the chunk.

Some of HDF5's filters trust the first bytes of a chunk: they take as much memory, or read and write as many bytes, as those
bytes declare. So for each chunk that a read meets, `check_heads` does this:

1. Read the stored chunk.
2. Undo the filters that were applied after such a filter.
3. Compare the declared length with the chunk's real length.

Chunks that are decoded without HDF5 (`chunks`) do not need it. Nor do chunks over the array's edge, if the dataset's creator
asked HDF5 not to filter them (``H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS``).
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from shardload.formats.codecs.compressors import check_blosc, decode_zstd
from shardload.formats.codecs.transforms import decode_shuffle
from shardload.formats.contract.by_chunks import chunks_met
from shardload.formats.contract.format import UndecodedError
from shardload.formats.hdf5.chunk_order import is_listed, is_over_edge
from shardload.formats.hdf5.filters import NAMES, scaleoffset_is_idle
from shardload.formats.hdf5.missing import MISSING_WORDS
from shardload.formats.hdf5.opened import creation_of, kind_of
from shardload.formats.hdf5.unwrapped import are_edges_plain
from shardload.planning.region import Region

__all__ = ["check_heads"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_SHUFFLE, _FLETCHER = 2, 3


def check_heads(dataset: h5py.Dataset, region: Region) -> None:
    """Check the stored chunks of `dataset` that meet `region`.

    Raises
    ------
    ValueError
        If a chunk declares an impossible length, or other filters hide what it declares: the texts say which.
    """
    creation = creation_of(dataset)
    if creation.get_layout() != h5py.h5d.CHUNKED or region.size == 0:
        return
    filters = [creation.get_filter(k)[:3:2] for k in range(creation.get_nfilters())]
    if not any(number in _CHECKS for number, _ in filters):
        return
    chunk = tuple(creation.get_chunk())
    size = int(kind_of(dataset).get_size())
    edges = dataset.shape if are_edges_plain(creation) else None
    axes = chunks_met(region, chunk)
    for index in itertools.product(*axes):
        offsets = tuple(k * c for k, c in zip(index, chunk, strict=True))
        found = _stored(dataset, offsets)
        if found is None:
            continue
        mask, data = found
        if edges is not None and is_over_edge(offsets, chunk, edges):
            mask = -1  # no filter was applied
        applied = [found for k, found in enumerate(filters) if not mask >> k & 1]
        try:
            _check_chunk(np.frombuffer(data, dtype=np.uint8), applied, math.prod(chunk), size)
        except UndecodedError as error:
            raise UndecodedError(f"chunk {index} cannot be decoded safely: {error}") from None
        except ValueError as error:
            raise ValueError(f"chunk {index} is damaged: {error}") from None


def _unchecked(applied: list[tuple[int, tuple[int, ...]]]) -> UndecodedError:
    """What a chunk declares cannot be seen behind its other filters, whether it is damaged or not."""
    told = ", then ".join(NAMES.get(number, str(number)) for number, _ in applied)
    return UndecodedError(
        f"it is encoded twice or more ({told}), so what it declares of its length cannot be checked before HDF5 believes it. "
        "Write the file again with one compressor: `h5repack -f GZIP=4 in.h5 out.h5`"
    )


def _stored(dataset: h5py.Dataset, offsets: tuple[int, ...]) -> tuple[int, bytes] | None:
    """Filter mask and bytes of a chunk; None if it is missing.

    It asks HDF5 for the bytes first, because HDF5 walks the list of all chunks to say where one is.
    """
    try:
        with phil:
            mask, data = dataset.id.read_direct_chunk(offsets)
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        if any(words in str(error) for words in MISSING_WORDS):
            return None
        if not is_listed(dataset, offsets):  # the texts of HDF5's versions differ
            return None
        raise
    return mask, data


def _check_chunk(stored: Bytes, applied: list[tuple[int, tuple[int, ...]]], n: int, size: int) -> None:
    """Undo the filters of one chunk, the last one first, down to the filter that needs a check."""
    at = next((k for k, (number, _) in enumerate(applied) if number in _CHECKS), None)
    if not applied and len(stored) != n * size:
        raise ValueError(f"{len(stored)} bytes are stored without a filter, expected {n * size}")
    if at is None:
        return
    before = [number for number, _ in applied[:at]]
    if not set(before) <= {_SHUFFLE, _FLETCHER}:
        raise _unchecked(applied)
    nbytes = n * size + 4 * before.count(_FLETCHER)
    for number, values in reversed(applied[at + 1 :]):
        if number not in _UNDO:
            raise _unchecked(applied)
        stored = _UNDO[number](stored, nbytes + nbytes // 2 + 4096, values)
    _CHECKS[applied[at][0]](stored, nbytes, applied[at][1], n)


def _without_checksum(stored: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    return stored[: max(0, len(stored) - 4)]


def _unshuffled(stored: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    """h5py shuffles what scale-offset has packed, as if these were elements."""
    if not values or values[0] < 1:
        raise ValueError("a shuffle of elements of unknown size hides what it says of its length")
    out = np.empty_like(stored)
    decode_shuffle(values[0]).undo(stored, out)
    return out


def _inflated(stored: Bytes, most: int, values: tuple[int, ...]) -> Bytes:
    try:
        return np.frombuffer(zlib.decompressobj().decompress(stored.tobytes(), most), dtype=np.uint8)
    except zlib.error as error:
        raise ValueError(f"its gzip stream is damaged ({error})") from None


def _szip(stored: Bytes, nbytes: int, values: tuple[int, ...], n: int) -> None:
    """The header is 4 bytes: the decoded length."""
    said = int.from_bytes(stored[:4].tobytes(), "little")
    if len(stored) <= 4 or said != nbytes:
        raise ValueError(f"szip declares {said} bytes, the chunk has {nbytes}")


def _nbit(stored: Bytes, nbytes: int, values: tuple[int, ...], n: int) -> None:
    """There is no header, only bits, as many as the parameters say (`filters` has checked that these fit the type)."""
    needed = nbytes if values[1] else -(-n * _bits(values[3:])[0] // 8)
    if len(stored) < needed or (values[1] and len(stored) != needed):
        raise ValueError(f"{len(stored)} bytes are stored, its n-bit numbers take {needed}")


def _bits(values: tuple[int, ...]) -> tuple[int, int]:
    """Bits of an element by the n-bit filter's parameters, and how many of the parameters describe it."""
    if values[0] == 1:  # a number: size, byte order, precision, offset
        return values[3], 5
    if values[0] == 2:  # a small array: size, its numbers
        bits, length = _bits(values[2:])
        return bits * (values[1] // values[3]), 2 + length
    if values[0] == 3:  # a record: size, members, each with its place
        bits, at = 0, 3
        for _ in range(values[2]):
            more, length = _bits(values[at + 1 :])
            bits, at = bits + more, at + 1 + length
        return bits, at
    return 8 * values[1], 2


def _scaleoffset(stored: Bytes, nbytes: int, values: tuple[int, ...], n: int) -> None:
    """The header: bits per number (4 bytes), bytes of the minimum (1), the minimum (8), 8 unused bytes. Then the bits."""
    size = values[4]
    if scaleoffset_is_idle(values):
        raise ValueError(f"it is said to be encoded by scale-offset, whose parameters {values} encode no chunk")
    if values[0] == 2 and values[1] == 8 * size:  # all bits are kept, so the filter did nothing
        if len(stored) != nbytes:
            raise ValueError(f"{len(stored)} bytes are stored, expected {nbytes}")
        return
    bits = int.from_bytes(stored[:4].tobytes(), "little")
    needed = 21 + -(-n * bits // 8)
    if len(stored) < 21 or stored[4] != 8 or bits > 8 * size or len(stored) < needed:
        raise ValueError(f"scale-offset declares {bits} bits for each number; {len(stored)} bytes are stored")


def _lz4(stored: Bytes, nbytes: int, values: tuple[int, ...], n: int) -> None:
    """The header: bytes of the chunk (8), bytes of a block (4). Then blocks, each after its length (4)."""
    head = stored[:12].tobytes()
    said, block = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
    if len(head) < 12 or said != nbytes or not 0 < block < 1 << 31:
        raise ValueError(f"lz4 declares {said} bytes in blocks of {block}, the chunk has {nbytes}")
    at, left = 12, nbytes
    while left > 0:
        length = int.from_bytes(stored[at : at + 4].tobytes(), "big")
        if at + 4 + length > len(stored) or (length == 0):
            raise ValueError(f"lz4 declares a block of {length} bytes at byte {at} of {len(stored)}")
        at, left = at + 4 + length, left - block


def _blosc(stored: Bytes, nbytes: int, values: tuple[int, ...], n: int) -> None:
    check_blosc(stored, nbytes)


def _zstd(stored: Bytes, nbytes: int, values: tuple[int, ...], n: int) -> None:
    """Decode here: HDF5's filter ignores damage that the library below it reports, and then gives old memory."""
    decode_zstd().undo(stored, np.empty(nbytes, dtype=np.uint8))


_CHECKS: dict[int, Callable[[Bytes, int, tuple[int, ...], int], None]] = {
    4: _szip,
    5: _nbit,
    6: _scaleoffset,
    32001: _blosc,
    32004: _lz4,
    32015: _zstd,
}
# Filters that may come after those.
_UNDO: dict[int, Callable[[Bytes, int, tuple[int, ...]], Bytes]] = {
    1: _inflated,
    2: _unshuffled,
    3: _without_checksum,
}
