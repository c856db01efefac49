"""How are the stored chunks of an array read and decoded? By a `ChunkReader`, a box of chunks at a time, in any thread.

`read_by_chunks` reads a region from the chunks that it meets.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import numpy as np

from shardload.planning.region import Region, cut_box, stretches
from shardload.system.scratch import ThreadScratch, empty_bytes

Room = Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]]
"""Gives memory of so many bytes."""

fresh: Room = empty_bytes
"""New memory: a `Room` that is never used again."""


@dataclass(slots=True)
class Encoded:
    """The chunks of a box as they are stored.

    Attributes
    ----------
    data : sequence of bytes-like or None
        The bytes of each chunk, in C order; None for a chunk that is missing.
    skipped : mapping of int to frozenset of int
        For chunks to which some stages of the decoding chain were not applied, by their number in the box: which stages.
    """

    data: Sequence[Any]
    skipped: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @property
    def has_missing(self) -> bool:
        """True if a chunk is missing. (Without a Python loop over the chunks.)"""
        return any(map(is_, self.data, itertools.repeat(None)))


class ChunkReader(abc.ABC):
    """Reads the chunks of one open array. Several threads may call all methods at once.

    If reading or decoding a box of several chunks fails, the caller reads the same chunks one by one, to name the one that is
    damaged.
    """

    @abc.abstractmethod
    def fetch(self, box: Sequence[range], room: Room = fresh) -> Encoded:
        """Read the chunks of a box of the file's grid of chunks as they are stored.

        `room` gives the memory to read into: memory that was used before is much faster than new memory. What was read is valid
        until `room` is called again. Raises OSError or ValueError if the file is damaged or ends too early.
        """

    def expect(self, boxes: Iterator[Sequence[range]]) -> None:
        """Called if the file is in a store: these boxes will be fetched, in about this order. The default does nothing."""
        return None

    @abc.abstractmethod
    def decode(self, encoded: Encoded, out: np.ndarray[Any, Any]) -> None:
        """Decode what `fetch` returned into `out`, which is C-contiguous and has the source's `dtype`. The chunks lie in it one
        after the other, each with its full shape, also at the array's edge. Raises ValueError if one is damaged.
        """

    def read_plain(self, box: Sequence[range], out: np.ndarray[Any, Any]) -> bool:
        """Read a box of chunks that are stored as plain values, one after the other, straight into `out`, as for `decode`.

        False, and `out` may hold anything, if they must be fetched and decoded. The default is False.
        """
        return False


def check_box(box: Sequence[range], counts: Sequence[int]) -> None:
    """Raise ValueError unless all chunks of a box are in a grid of `counts` chunks along each axis."""
    if len(box) != len(counts) or not all(0 <= axis.start < axis.stop <= n for axis, n in zip(box, counts, strict=True)):
        raise ValueError(f"there are no chunks {tuple(box)} in a grid of {tuple(counts)}")


_MOST_RUN_NBYTES = 1 << 31  # NumPy's items are shorter
_AT_ONCE_NBYTES = 1 << 20  # of the decoded values of small chunks that are read together


def chunks_met(region: Region, chunk_shape: Sequence[int]) -> list[range]:
    """The chunks that a non-empty region meets, along each axis.

    >>> chunks_met(Region((0, 5), (2, 30)), (1, 10))
    [range(0, 2), range(0, 3)]
    """
    return [range(a // c, -(-b // c)) for a, b, c in zip(region.start, region.stop, chunk_shape, strict=True)]


def read_by_chunks(
    reader: ChunkReader, chunk_shape: tuple[int, ...], region: Region, out: np.ndarray[Any, Any]
) -> list[tuple[int, ...]]:
    """Read a non-empty region into a buffer of its shape, some chunks at a time; returns the indices of missing chunks."""
    missing, scratch = list[tuple[int, ...]](), ThreadScratch()
    most = max(1, _AT_ONCE_NBYTES // max(1, math.prod(chunk_shape) * out.dtype.itemsize))
    for box in cut_box(chunks_met(region, chunk_shape), most):
        common = region_in_box(box, chunk_shape, region)
        into: Any = (*common.slices(region.start), ...)
        values = as_chunks(out[into], box, chunk_shape)
        is_in_place = values is not None
        if values is None:
            shape = (*map(len, box), *chunk_shape)
            values = scratch.array("decoded", shape, out.dtype)
        elif reader.read_plain(box, values):
            continue
        encoded = reader.fetch(box, partial(scratch.bytes, "encoded"))
        reader.decode(encoded, values)
        if encoded.has_missing:
            missing += [index for index, data in zip(itertools.product(*box), encoded.data, strict=True) if data is None]
        if not is_in_place:
            copy_chunks(values, box, chunk_shape, common, out[into])
    return missing


def region_in_box(box: Sequence[range], cell: Sequence[int], within: Region, phase: Sequence[int] | None = None) -> Region:
    """Where a region and a box of chunks meet. The grid of chunks begins `phase` elements before the array.

    >>> within = Region((5,), (20,))
    >>> str(region_in_box((range(1, 3),), (4,), within)), str(region_in_box((range(1, 3),), (4,), within, phase=(3,)))
    ('[5:12]', '[5:9]')
    """
    axes = list(zip(box, cell, phase or (0,) * len(box), within.start, within.stop, strict=True))
    return Region(
        tuple([max(axis.start * c - p, low) for axis, c, p, low, _ in axes]),
        tuple([min(axis.stop * c - p, high) for axis, c, p, _, high in axes]),
    )


def as_chunks(view: np.ndarray[Any, Any], box: Sequence[range], cell: Sequence[int]) -> np.ndarray[Any, Any] | None:
    """`view`, the memory for a region, with the axes of a box of chunks, then those of a chunk; None unless the view is all of
    these chunks, one after the other. (A single chunk has its own axes alone, because NumPy has at most 64.)

    >>> view = np.zeros((4, 6))
    >>> as_chunks(view, [range(2), range(1)], (2, 6)).shape, as_chunks(view, [range(1), range(2)], (4, 3))
    ((2, 1, 2, 6), None)
    """
    n, ndim = [len(axis) for axis in box], len(box)
    if view.size != math.prod(n) * math.prod(cell) or not view.flags.c_contiguous:
        return None
    if math.prod(n) == 1:
        return view
    cut = view.reshape([size for pair in zip(n, cell, strict=True) for size in pair])
    chunks = cut.transpose([*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)])
    return chunks if chunks.flags.c_contiguous else None


def copy_chunks(
    values: np.ndarray[Any, Any],
    box: Sequence[range],
    cell: Sequence[int],
    region: Region,
    out: np.ndarray[Any, Any],
    phase: Sequence[int] | None = None,
) -> None:
    """Copy a region out of decoded chunks.

    Parameters
    ----------
    values : ndarray
        It has the axes of the box, then those of a chunk.
    box : sequence of range
        The chunks, by their numbers along each axis.
    cell : sequence of int
        Shape of a chunk.
    region : Region
        Inside of the box.
    out : ndarray
        Of the shape of the region.
    phase : sequence of int, optional
        Elements of the first chunk that lie before the array, along each axis. By default none.
    """
    ndim = len(box)
    cuts = [
        stretches(a + p, b + p, c, axis.start)
        for a, b, p, c, axis in zip(region.start, region.stop, phase or (0,) * ndim, cell, box, strict=True)
    ]
    order = [*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)]
    for chosen in itertools.product(*cuts):
        source: Any = (
            *(slice(part.chunk, part.chunk + part.n) for part in chosen),
            *(slice(part.start, part.start + part.length) for part in chosen),
            ...,
        )
        target: Any = (*(slice(part.at, part.at + part.n * part.length) for part in chosen), ...)
        cut = out[target].reshape([size for part in chosen for size in (part.n, part.length)])
        copy_rows(cut.transpose(order), values[source])


def copy_rows(out: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    """Copy between arrays of one shape. Each run along the last axis is moved as one item: that is faster for short runs."""
    if out.ndim and out.dtype == values.dtype and out.shape[-1] > 1:
        itemsize = out.itemsize
        if out.strides[-1] == values.strides[-1] == itemsize and itemsize * out.shape[-1] < _MOST_RUN_NBYTES:
            item = np.dtype((np.void, itemsize * out.shape[-1]))
            out, values = out.view(item), values.view(item)
    np.copyto(out, values, casting="no")


def a_few_chunks(region: Region, chunk_shape: Sequence[int], most: int) -> Iterator[Region]:
    """Cut a non-empty region into regions of about equal size that meet at most `most` chunks each, in C order.

    Libraries need some kilobytes for each chunk of one read, however small the chunks are.

    >>> [str(part) for part in a_few_chunks(Region((0, 1), (2, 30)), (1, 10), most=2)]
    ['[0:1, 1:20]', '[0:1, 20:30]', '[1:2, 1:20]', '[1:2, 20:30]']
    """
    for box in cut_box(chunks_met(region, chunk_shape), most):
        yield region_in_box(box, chunk_shape, region)


def index_in_parts(array: Any, region: Region, parts: Callable[[Region], Iterator[Region]]) -> np.ndarray[Any, np.dtype[Any]]:
    """The values of a region, by the indexing of a library's open array, of one part at a time, as `parts` cuts the region."""
    first = itertools.islice(parts(region), 2) if region.ndim and region.size else ()
    if len(list(first)) < 2:
        return np.asarray(array[region.slices()])
    out = np.empty(region.shape, array.dtype)
    for part in parts(region):
        out[part.slices(region.start)] = array[part.slices()]
    return out
