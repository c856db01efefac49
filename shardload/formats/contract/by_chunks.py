"""How is a region read from the chunks that it meets?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import numpy as np

from shardload.formats.contract.chunk_reader import BatchReader, ChunkReader, PlainReader, Scratch
from shardload.planning.batches import cut_box
from shardload.planning.region import Region

__all__ = [
    "a_few_chunks",
    "check_chunk",
    "chunks_met",
    "has_missing",
    "index_in_parts",
    "read_by_chunks",
    "read_chunks",
    "read_plain_chunks",
]


def has_missing(stored: Sequence[Any] | np.ndarray[Any, Any]) -> bool:
    """True if a chunk that `BatchReader.fetch_many` returned is missing. It takes no step of Python for each chunk.

    >>> has_missing([b"", None]), has_missing([b"", b"1"])
    (True, False)
    """
    return any(map(is_, stored, itertools.repeat(None)))


def check_chunk(index: Sequence[int], counts: Sequence[int]) -> None:
    """Raise ValueError if there is no chunk at `index` in a grid of so many chunks along each axis."""
    if len(index) != len(counts) or not all(0 <= k < n for k, n in zip(index, counts, strict=True)):
        raise ValueError(f"there is no chunk {tuple(index)} in a grid of {tuple(counts)}")


def chunks_met(region: Region, chunk_shape: Sequence[int]) -> list[range]:
    """The chunks that a non-empty region meets, along each axis.

    >>> chunks_met(Region((0, 5), (2, 30)), (1, 10))
    [range(0, 2), range(0, 3)]
    """
    return [range(a // c, -(-b // c)) for a, b, c in zip(region.start, region.stop, chunk_shape, strict=True)]


def read_by_chunks(
    reader: ChunkReader, chunk_shape: tuple[int, ...], region: Region, out: np.ndarray[Any, Any]
) -> list[tuple[int, ...]]:
    """Read a non-empty region into a buffer of its shape, chunk by chunk; returns the indices of missing chunks."""
    whole, missing, room = np.empty(chunk_shape, out.dtype), [], Scratch()
    for index in itertools.product(*chunks_met(region, chunk_shape)):
        encoded = reader.fetch(index, room)
        if encoded is None:
            missing.append(index)
        reader.decode(encoded, whole)
        start = tuple(i * c for i, c in zip(index, chunk_shape, strict=True))
        common = Region(start, tuple(a + c for a, c in zip(start, chunk_shape, strict=True))).intersect(region)
        if common is not None:
            into: Any = (*common.slices(region.start), ...)
            part: Any = (*common.slices(start), ...)
            out[into] = whole[part]
    return missing


def read_plain_chunks(reader: Any, chunk_shape: tuple[int, ...], region: Region, out: np.ndarray[Any, Any]) -> bool:
    """Read a region straight into a buffer of its shape, if its chunks are plain values and lie there as in the buffer.

    False, and the buffer may hold anything, if the region must be read another way. Errors are those of `PlainReader`.

    >>> read_plain_chunks(None, (2,), Region((0,), (4,)), np.empty(4))
    False
    """
    box = chunks_met(region, chunk_shape)
    return _lies_as_chunks(box, chunk_shape, out) and isinstance(reader, PlainReader) and reader.read_plain(box, out)


def _lies_as_chunks(box: Sequence[range], chunk_shape: tuple[int, ...], out: np.ndarray[Any, Any]) -> bool:
    """True if the chunks of a box, one after the other, lie as in the buffer `out` of a region that meets them."""
    counts = list(map(len, box))
    return out.size == math.prod(counts) * math.prod(chunk_shape) and all(n == 1 for n in counts[1:])


def read_chunks(reader: Any, chunk_shape: tuple[int, ...], region: Region, out: np.ndarray[Any, Any]) -> bool:
    """Read a region of many small chunks with few calls of its `ChunkReader`, into a buffer of its shape.

    False, and the buffer may hold anything, if the chunks must be read another way: the reader is no `BatchReader`, or there
    is anything unusual, such as a missing chunk. Errors are those of `BatchReader`.

    >>> read_chunks(None, (2,), Region((0,), (4,)), np.empty(4))
    False
    """
    if not isinstance(reader, BatchReader):
        return False
    box = chunks_met(region, chunk_shape)
    stored = reader.fetch_many(box)
    if stored is None or has_missing(stored):
        return False
    if _lies_as_chunks(box, chunk_shape, out):
        reader.decode_many(stored, out.reshape(-1, *chunk_shape))
        return True
    counts, ndim = list(map(len, box)), len(box)
    chunks = np.empty((math.prod(counts), *chunk_shape), out.dtype)
    reader.decode_many(stored, chunks)
    order = [axis for k in range(ndim) for axis in (k, ndim + k)]  # the chunks along an axis, then the elements of a chunk
    padded = (
        chunks.reshape((*counts, *chunk_shape))
        .transpose(order)
        .reshape([n * c for n, c in zip(counts, chunk_shape, strict=True)])
    )
    np.copyto(out, padded[region.slices([axis.start * c for axis, c in zip(box, chunk_shape, strict=True)])])
    return True


def a_few_chunks(region: Region, chunk_shape: Sequence[int], most: int) -> Iterator[Region]:
    """Cut a non-empty region into regions of about equal size that meet at most `most` chunks each, in C order.

    Libraries need some kilobytes for each chunk of one read, however small the chunks are.

    >>> [str(part) for part in a_few_chunks(Region((0, 1), (2, 30)), (1, 10), most=2)]
    ['[0:1, 1:20]', '[0:1, 20:30]', '[1:2, 1:20]', '[1:2, 20:30]']
    """
    for box in cut_box(chunks_met(region, chunk_shape), most):
        start = tuple(max(a, axis.start * c) for a, axis, c in zip(region.start, box, chunk_shape, strict=True))
        yield Region(start, tuple(min(b, axis.stop * c) for b, axis, c in zip(region.stop, box, chunk_shape, strict=True)))


def index_in_parts(array: Any, region: Region, parts: Callable[[Region], Iterator[Region]]) -> np.ndarray[Any, np.dtype[Any]]:
    """The values of a region by the own indexing of a library's open array, a part at a time, as `parts` cuts the region."""
    first = itertools.islice(parts(region), 2) if region.ndim and region.size else ()
    if len(list(first)) < 2:
        return np.asarray(array[region.slices()])
    out = np.empty(region.shape, array.dtype)
    for part in parts(region):
        out[part.slices(region.start)] = array[part.slices()]
    return out
