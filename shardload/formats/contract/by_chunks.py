"""How is a region read from the chunks that it meets?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardload.formats.contract.chunk_reader import ChunkReader, Scratch
from shardload.planning.grid import cut_box, stretches
from shardload.planning.region import Region

_AT_ONCE_NBYTES = 1 << 20  # decoded, of small chunks that are read together


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
    missing, room, memory = list[tuple[int, ...]](), Scratch(), Scratch()
    chunk_size = math.prod(chunk_shape)
    most = max(1, _AT_ONCE_NBYTES // max(1, chunk_size * out.dtype.itemsize))
    for box in cut_box(chunks_met(region, chunk_shape), most):
        n = math.prod(map(len, box))
        values = _as_chunks(box, chunk_shape, region, out)
        is_in_place = values is not None
        if values is None:
            values = memory(n * chunk_size * out.dtype.itemsize).view(out.dtype).reshape(*map(len, box), *chunk_shape)
        elif reader.read_plain(box, values):
            continue
        encoded = reader.fetch(box, room)
        reader.decode(encoded, values)
        if encoded.has_missing:
            is_stored = [data is not None for data in encoded.data]
            missing += [index for index, stored in zip(itertools.product(*box), is_stored, strict=True) if not stored]
        if not is_in_place:
            common = region_of(box, chunk_shape, region)
            into: Any = (*common.slices(region.start), ...)
            copy_chunks(values, box, chunk_shape, common, out[into])
    return missing


def region_of(box: Sequence[range], chunk_shape: Sequence[int], within: Region) -> Region:
    """What a region has of a box of chunks.

    >>> str(region_of((range(1, 3),), (4,), Region((5,), (20,))))
    '[5:12]'
    """
    axes = list(zip(box, chunk_shape, within.start, within.stop, strict=True))
    return Region(
        tuple([max(axis.start * c, low) for axis, c, low, _ in axes]),
        tuple([min(axis.stop * c, high) for axis, c, _, high in axes]),
    )


def _as_chunks(
    box: Sequence[range], chunk_shape: Sequence[int], region: Region, out: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any] | None:
    """The memory of a box of chunks in the buffer of a region, if its whole chunks lie there one after the other; else None."""
    axes = list(zip(box, chunk_shape, strict=True))
    whole = Region(tuple([axis.start * c for axis, c in axes]), tuple([axis.stop * c for axis, c in axes]))
    if any(len(axis) > 1 for axis in box[1:]) or not region.contains(whole):
        return None
    at: Any = (*whole.slices(region.start), ...)
    view: np.ndarray[Any, Any] = out[at]
    return view if view.flags.c_contiguous else None


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
        The chunks, of a grid with `phase` elements of the first chunk before the array (none by default).
    cell : sequence of int
        Shape of a chunk.
    region : Region
        Inside of the box.
    out : ndarray
        Of the shape of the region.
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
    """Copy between arrays of one shape. Runs along the last axis are moved as one item each: that is faster for short runs."""
    if out.ndim and out.dtype == values.dtype and out.shape[-1] > 1:
        itemsize = out.itemsize
        if out.strides[-1] == values.strides[-1] == itemsize:
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
        yield region_of(box, chunk_shape, region)


def index_in_parts(array: Any, region: Region, parts: Callable[[Region], Iterator[Region]]) -> np.ndarray[Any, np.dtype[Any]]:
    """The values of a region by the own indexing of a library's open array, a part at a time, as `parts` cuts the region."""
    first = itertools.islice(parts(region), 2) if region.ndim and region.size else ()
    if len(list(first)) < 2:
        return np.asarray(array[region.slices()])
    out = np.empty(region.shape, array.dtype)
    for part in parts(region):
        out[part.slices(region.start)] = array[part.slices()]
    return out
