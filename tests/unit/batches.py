"""Chunks of an open array read in batches, and compared one by one with what was written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardload.formats.contract.chunk_reader import ChunkReader
from shardload.formats.contract.format import Source
from shardload.planning.region import cut_box
from tests.unit.files import assert_same

Array = np.ndarray[Any, Any]


_MEMORY = np.empty(1 << 22, np.uint8)


def read_box(source: Source, box: tuple[range, ...], reader: ChunkReader | None = None) -> Array:
    """The values of a box of chunks, with the axes of the box first."""
    reader, chunks = reader or source.chunk_reader(), source.info.chunks or ()
    assert reader is not None

    def room(nbytes: int) -> Array:
        memory = _MEMORY[:nbytes]
        memory[...] = 0xA5  # the same memory each time: what was read before is gone
        return memory

    encoded = reader.fetch(box, room)
    shape = (*map(len, box), *chunks)
    assert len(encoded.data) == math.prod(map(len, box))
    out = np.full(math.prod(shape) * source.dtype.itemsize, 0xA5, np.uint8).view(source.dtype).reshape(shape)
    reader.decode(encoded, out)
    return out


def check_batches(source: Source, expected: Array, most: int = 5) -> int:
    """Compare all chunks, read in batches of at most `most`, with what was written. Returns how many were read in batches."""
    chunks = source.info.chunks or ()
    grid = [range(-(-n // c)) for n, c in zip(expected.shape, chunks, strict=True)]
    n_read, reader = 0, None
    for k, box in enumerate(cut_box(grid, most)):
        # One reader begins with the first box, another one in the middle; for each box a new one would list all chunks again.
        reader = source.chunk_reader() if k < 2 else reader
        found = read_box(source, box, reader)
        for place in np.ndindex(*map(len, box)):
            index = [axis[k] for axis, k in zip(box, place, strict=True)]
            region = tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(index, chunks, expected.shape, strict=True))
            inside = tuple(slice(0, s.stop - s.start) for s in region)
            assert_same(found[place][inside], expected[region])
            n_read += 1
    return n_read
