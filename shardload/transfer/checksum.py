"""Which numbers prove that two ranks mean the same regions and hold the same values?

For a part that is sent, both sides compute an `identity` of its region and a `checksum` of its values. Both numbers start from
a seed that is different for each array of each load (`seed_of`), so that a part is never taken for one of another array.

For a whole array, the checksum is the CRC-32 of its bytes in C order, as `zlib.crc32` returns it for the whole. It is computed
from the shards, however the array is cut, without gathering them:

1. A CRC without its usual inversions is linear: the CRC of an array is the exclusive or of the CRCs of its runs of bytes, each
   taken as if all other bytes were zero (`sum_shard`, `join_sums`).
2. The run's own CRC is turned into that CRC by a multiplication by ``x**(8 n)`` for the ``n`` bytes after it, modulo the CRC's
   polynomial.
3. Runs at a constant distance are joined in pairs, so a shard takes a few multiplications of whole NumPy arrays per axis.

The result does not depend on ranks or shardings. (zlib's ``crc32_combine`` has the same idea, for pieces of a stream.)
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

import deflate
import numpy as np

from shardload.planning.region import Array, Region, ravel
from shardload.system.scratch import ThreadScratch

_AT_ONCE_NBYTES = 1 << 19  # a copy of this size stays in the core's own cache
_scratch = ThreadScratch()

_POLYNOMIAL = 0xEDB88320  # bit 31 is the coefficient of x**0
_ONE = 1 << 31
_ALL = 0xFFFFFFFF

Sums = np.ndarray[Any, np.dtype[np.uint32]]
SomeSums = TypeVar("SomeSums", int, Sums)


def identity(region: Region, seed: int, previous: int) -> int:
    """A running CRC-32 of the coordinates of regions, each with a seed: equal if the same regions came in the same order."""
    return zlib.crc32(struct.pack(f"<I{2 * region.ndim}q", seed, *region.start, *region.stop), previous)


def seed_of(array: int, seed: int) -> int:
    """The start value of the identities and checksums of one array of an exchange, from its number and the seed of the load."""
    return zlib.crc32(struct.pack("<q", array), seed)


def checksum(data: Array, crc: int = 0) -> int:
    """CRC-32 (continuing `crc`) of an array's bytes in C order, for any strides. Copies at most 512 KiB at a time.

    Uses libdeflate, which runs at the speed of memory (docs/design/verify.md).

    >>> import numpy as np
    >>> checksum(np.arange(4, dtype="<u2")[::-1]) == checksum(np.array([3, 2, 1, 0], dtype="<u2"))
    True
    """
    if data.flags.c_contiguous:
        return int(deflate.crc32(data.reshape(-1).view(np.uint8).data, crc))
    if data.nbytes <= _AT_ONCE_NBYTES:
        return _checksum_of_copy(data, crc)
    for region in Region.whole(data.shape).split(max(1, _AT_ONCE_NBYTES // data.itemsize)):
        crc = _checksum_of_copy(data[region.slices()], crc)
    return crc


def _checksum_of_copy(data: Array, crc: int) -> int:
    part = _scratch.bytes("checksum", _AT_ONCE_NBYTES)[: data.nbytes]
    np.copyto(part.view(data.dtype).reshape(data.shape), data, casting="no")
    return int(deflate.crc32(part.data, crc))


def sum_shard(data: Array, region: Region, shape: tuple[int, ...]) -> int:
    """The contribution of the elements of one region to the CRC of an array of `shape`.

    Parameters
    ----------
    data : ndarray, C-contiguous, of the region's shape
        The values.
    region : Region
        Where the values lie in the array.
    shape : tuple of int
        Shape of the array.

    Returns
    -------
    int
        The contribution; `join_sums` joins those of all regions.
    """
    if not region.size:
        return 0
    n_outer, run = _runs_of(region.shape, shape)
    length = run * data.itemsize
    raw = data.reshape(-1).view(np.uint8).data
    sums = np.fromiter((deflate.crc32(raw[k : k + length], 0) for k in range(0, raw.nbytes, length)), np.uint32)
    sums ^= np.uint32(_zeros(length))
    sums = sums.reshape(region.shape[:n_outer])
    for axis in reversed(range(n_outer)):
        sums = _join_axis(sums, math.prod(shape[axis + 1 :]) * data.itemsize)
    behind = math.prod(shape) - 1 - ravel([b - 1 for b in region.stop], shape)  # elements after the region's last one
    return _times(int(sums), _power(8 * behind * data.itemsize))


def join_sums(sums: Iterable[int], nbytes: int) -> int:
    """The CRC-32 of an array of `nbytes` bytes, from the contributions of its regions.

    >>> import zlib
    >>> table = np.arange(24, dtype="<i2").reshape(4, 6)
    >>> halves = [Region((0, 0), (4, 2)), Region((0, 2), (4, 6))]
    >>> sums = [sum_shard(np.ascontiguousarray(table[h.slices()]), h, table.shape) for h in halves]
    >>> join_sums(sums, table.nbytes) == zlib.crc32(table)
    True
    """
    joined = _zeros(nbytes)
    for value in sums:
        joined ^= value
    return joined


def _runs_of(shape: tuple[int, ...], shape_global: tuple[int, ...]) -> tuple[int, int]:
    """The number of axes that count the runs of a box of `shape` in the memory of the array, and the elements of a run.

    >>> _runs_of((2, 3, 8), (4, 6, 8)), _runs_of((2, 6, 8), (4, 6, 8)), _runs_of((), ())
    ((1, 24), (0, 96), (0, 1))
    """
    n_outer, run = len(shape), 1
    while n_outer:
        n_outer -= 1
        run *= shape[n_outer]
        if shape[n_outer] != shape_global[n_outer]:
            break
    return n_outer, run


def _join_axis(sums: Sums, stride: int) -> Sums:
    """Join sums that lie `stride` bytes apart along the last axis, in pairs. Zeros before the first change nothing."""
    while sums.shape[-1] > 1:
        if sums.shape[-1] % 2:
            sums = np.concatenate([np.zeros((*sums.shape[:-1], 1), np.uint32), sums], axis=-1)
        sums = _times_each(sums[..., 0::2], _power(8 * stride)) ^ sums[..., 1::2]
        stride *= 2
    return sums[..., 0]


def _zeros(nbytes: int) -> int:
    """The CRC-32 of `nbytes` zero bytes."""
    return _times(_ALL, _power(8 * nbytes)) ^ _ALL


@lru_cache(maxsize=256)
def _power(n: int) -> int:
    """``x**n`` modulo the polynomial."""
    result, square = _ONE, _ONE >> 1
    while n:
        if n & 1:
            result = _times(result, square)
        square = _times(square, square)
        n >>= 1
    return result


def _times(values: SomeSums, factor: int) -> SomeSums:
    """The product of two polynomials, or of each of a few and one, modulo the CRC's polynomial."""
    result = values ^ values  # 0, or an array of them
    for bit in range(31, -1, -1):
        result ^= (values >> bit & 1) * factor
        factor = factor >> 1 ^ (_POLYNOMIAL if factor & 1 else 0)
    return result


def _times_each(values: Sums, factor: int) -> Sums:
    """The same of many values, with one table for each of the four bytes of a value."""
    result = np.zeros(values.shape, np.uint32)
    for k, table in enumerate(_tables(factor)):
        result ^= table[values >> np.uint32(8 * k) & np.uint32(255)]
    return result


@lru_cache(maxsize=64)
def _tables(factor: int) -> list[Sums]:
    numbers = np.arange(256, dtype=np.uint32)
    return [_times(numbers << np.uint32(8 * k), factor) for k in range(4)]
