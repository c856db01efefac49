"""Which numbers prove that two ranks mean the same regions and hold the same values?

For a part that is sent, both sides compute an `identity` of its region and a `checksum` of its values. Both numbers start from
a seed that is different for each array of each load (`seed_of`), so that a part is never taken for one of another array.
"""

from __future__ import annotations

import struct
import zlib

import deflate
import numpy as np

from shardload.planning.region import Array, Region
from shardload.system.scratch import ThreadScratch

_AT_ONCE_NBYTES = 1 << 19  # a copy of this size stays in the core's own cache
_scratch = ThreadScratch()


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
    for region in Region.whole(data.shape).split(max(1, _AT_ONCE_NBYTES // data.itemsize)):
        part = _scratch.array("checksum", region.shape, data.dtype)
        np.copyto(part, data[region.slices()], casting="no")
        crc = int(deflate.crc32(part.reshape(-1).view(np.uint8).data, crc))
    return crc
