"""How are some of a chunk's values read and decoded, without the rest of the chunk?

A rank that holds half of each plane needs half of each chunk. That is possible, if the values that are wanted follow each other
in the chunk, for two kinds of chunks:

1. Chunks without filters: the values are read from where they are.
2. One Blosc 1 buffer: it consists of blocks that are compressed by themselves. The blocks that hold the values are read, and
   become a shorter Blosc 1 buffer. (See c-blosc's README_CHUNK_FORMAT: a header of 16 bytes; where each block starts, as
   32-bit numbers from the start of the buffer, in any order; the blocks. Only the last one may be shorter, and is encoded
   otherwise.)

In either case the values may be in the other byte order.

Anything unusual or damaged is left to the caller, which then reads the whole chunk: that says what is wrong.
"""

from __future__ import annotations

import errno
import math
import os
import struct
from typing import Any

import numpy as np

from shardload.formats.base import ArrayInfo, Excerpt, Room, read_at
from shardload.formats.codecs import SWAP, Chain, blosc_error, numcodecs
from shardload.planning.tuning import Tuning
from shardload.system.scratch import shared_scratch

__all__ = ["Excerpts", "excerpt_nbytes"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# The header of a Blosc buffer: version, version of the compressor, flags, bytes of an element; decoded bytes, bytes of a block,
# stored bytes.
_HEAD = struct.Struct("<BBBBIII")
_VERSION, _IS_STORED = 2, 2  # the format; the flag of a buffer that could not be compressed
_FIRST_READ = 512  # holds the header, and where each block starts, of nearly all buffers
# Of a buffer. Numbers of Python for where each of very many tiny blocks starts would take more memory than the chunk.
_MOST_BLOCKS = 1 << 14

# How much is decoded together at least, for the plan. Blosc's blocks are from 32 KiB to some MiB long.
_TOGETHER = {"none": 1, "blosc": 1 << 19}


def excerpt_nbytes(info: ArrayInfo) -> int:
    """`ArrayInfo.excerpt_nbytes`, if this package decodes the array's chunks: the plan asks for it where they are not small.

    >>> from dataclasses import replace
    >>> one = ArrayInfo("f.h5", "/x", "HDF5", (64, 512, 512), "float32", (1, 512, 512))
    >>> excerpt_nbytes(one), excerpt_nbytes(replace(one, codec="gzip")), excerpt_nbytes(replace(one, chunks=(1, 8, 8)))
    (1, 0, 0)
    """
    if info.refused is not None or info.chunks is None or info.codec not in _TOGETHER:
        return 0
    is_batched = math.prod(info.chunks) * np.dtype(info.dtype).itemsize <= Tuning.batched_chunk_nbytes
    return 0 if is_batched else _TOGETHER[info.codec]


class Excerpts:
    """Reads excerpts of the chunks of one array. Safe to use from several threads at once.

    Parameters
    ----------
    chain : Chain
        How its chunks are decoded.
    """

    def __init__(self, chain: Chain) -> None:
        self._nbytes, self._scratch = chain.nbytes, shared_scratch()
        swaps = chain.names[-1:] == (SWAP,)
        self._swap = chain.stages[-1] if swaps else None
        self._is_plain = len(chain.names) == swaps
        self.are_possible = self._is_plain or chain.names[: len(chain.names) - swaps] == ("blosc",)
        """False if chunks can only be decoded whole."""

    def fetch(
        self, descriptor: int, offset: int, nbytes_stored: int, first: int, out: np.ndarray[Any, Any], room: Room
    ) -> Excerpt | None:
        """Read what is needed for the values of `out`. Only if `are_possible`.

        Parameters
        ----------
        descriptor, offset : int
            The open file, and where the chunk is in it.
        nbytes_stored : int
            Bytes of the stored chunk.
        first : int
            Number of the first value, in C order of the chunk.
        out : ndarray
            C-contiguous. Values that are stored as they are are read straight into it.
        room : callable
            Gives the memory to read into.

        Returns
        -------
        Excerpt or None
            None if the whole chunk must be read instead.

        Raises
        ------
        OSError
            If the file is too short, or cannot be read.
        """
        start = first * out.itemsize
        stop = start + out.nbytes
        if not 0 <= start < stop <= self._nbytes:
            raise ValueError(f"bytes {start} to {stop} of a chunk of {self._nbytes}")
        if self._is_plain:
            if nbytes_stored != self._nbytes:
                return None
            _fill(out.reshape(-1).view(np.uint8), descriptor, offset + start)
            return Excerpt(None, 0, out.nbytes, out.nbytes)
        return self._fetch_blocks(descriptor, offset, nbytes_stored, start, stop, room)

    def decode(self, excerpt: Excerpt, out: np.ndarray[Any, Any]) -> None:
        """Decode what `fetch` returned into the same `out`. ValueError if it is damaged."""
        target: Bytes = out.reshape(-1).view(np.uint8)
        if excerpt.data is not None:
            self._decode_blocks(excerpt, target)
        if self._swap is not None:
            self._swap.undo(target, target)

    def _decode_blocks(self, excerpt: Excerpt, target: Bytes) -> None:
        is_all = excerpt.nbytes == len(target)
        decoded = target if is_all else self._scratch.bytes("excerpt", excerpt.nbytes)
        try:
            numcodecs().blosc.decompress(excerpt.data, decoded)
        except (RuntimeError, ValueError) as error:
            raise blosc_error(excerpt.data, error) from None
        if not is_all:
            target[...] = decoded[excerpt.before : excerpt.before + len(target)]

    def _fetch_blocks(
        self, descriptor: int, offset: int, nbytes_stored: int, start: int, stop: int, room: Room
    ) -> Excerpt | None:
        """The blocks that hold bytes `start` to `stop`, as a Blosc buffer of its own.

        Numbers in plain Python: there are few blocks, and right after a chunk was decoded each call of NumPy takes long.
        """
        head = os.pread(descriptor, min(_FIRST_READ, nbytes_stored), offset)
        if len(head) < _HEAD.size:
            return None
        *marks, nbytes, block_nbytes, declared = _HEAD.unpack_from(head)
        # The library trusts these: see `codecs.check_blosc`.
        if marks[0] != _VERSION or nbytes != self._nbytes or declared != nbytes_stored or not 0 < block_nbytes <= nbytes:
            return None
        if marks[2] & _IS_STORED:
            if nbytes + _HEAD.size != nbytes_stored:
                return None
            data = room(_HEAD.size + stop - start)
            _fill(data[_HEAD.size :], descriptor, offset + _HEAD.size + start)
            _HEAD.pack_into(data.data, 0, *marks, stop - start, min(block_nbytes, stop - start), len(data))
            return Excerpt(data, 0, stop - start, len(data))
        n = -(-nbytes // block_nbytes)
        if n == 1:  # so are the other chunks, for the compressor chose by their size: asking each would open each file twice
            self.are_possible = False
            return None
        low, high = start // block_nbytes, -(-stop // block_nbytes)
        if high == n and low == n - 1 and nbytes % block_nbytes:
            low -= 1  # a buffer of a short block alone would be decoded like one of whole blocks
        begin = _HEAD.size + 4 * n
        if (low <= 0 and high == n) or n > _MOST_BLOCKS or begin > nbytes_stored:
            return None
        if begin > len(head):
            head = os.pread(descriptor, begin, offset)
            if len(head) < begin:
                return None
        starts = struct.unpack_from(f"<{n}I", head, _HEAD.size)
        wanted = starts[low:high]
        first, last = min(wanted), max(wanted)
        end = min([at for at in starts if at > last], default=nbytes_stored)  # a block ends where the next one starts
        if first < begin or end > nbytes_stored or last >= nbytes_stored:
            return None
        table = _HEAD.size + 4 * (high - low)
        data = room(table + end - first)
        _fill(data[table:], descriptor, offset + first)
        struct.pack_into(f"<{high - low}I", data.data, _HEAD.size, *[at - first + table for at in wanted])
        decoded = min(high * block_nbytes, nbytes) - low * block_nbytes
        _HEAD.pack_into(data.data, 0, *marks, decoded, min(block_nbytes, decoded), len(data))
        return Excerpt(data, start - low * block_nbytes, decoded, len(data))


def _fill(out: Bytes, descriptor: int, offset: int) -> None:
    """Read exactly as many bytes as `out` has."""
    if read_at(descriptor, out, offset) < len(out):
        end = os.fstat(descriptor).st_size
        raise OSError(errno.EIO, f"the file ends at byte {end}, but values are stored up to byte {offset + len(out)}")
