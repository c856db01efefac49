"""Which values must an array have, and where does it differ first?

1. `Truth` reads the expected values of a region from the file, by the format's own library.
2. `sample_regions` picks the regions to compare.
3. `first_difference` compares bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from shardload.errors import ShardloadError, SourceError
from shardload.formats.contract.array import settle_bools
from shardload.formats.contract.format import Source
from shardload.planning.region import Array, Grid, Region
from shardload.planning.schedule import SourceLayout
from shardload.transfer.cast import conversion

_REGION_NBYTES = 1 << 16
_DECODED_AT_MOST = 32  # samples decode at most 1/32 of the region that they are in, or one chunk


class Truth:
    """The file's values, read by the format's own library alone."""

    def __init__(self, source: Source, layout: SourceLayout) -> None:
        self._source, self._layout = source, layout
        self.name = str(source.info)

    def values(self, region: Region) -> Array:
        """The values of a region of the array, decoded, and cast to the array's dtype."""
        place = self._layout.selection.to_file(region)
        info = self._source.info
        try:
            raw = np.ascontiguousarray(self._source.plain(place), dtype=self._source.dtype).reshape(region.shape)
        except Exception as error:
            raise SourceError(
                f"{info} could not be read again to verify it (elements {place}): {type(error).__name__}: {error}",
                path=info.path,
                dataset=info.dataset,
            ) from error
        if raw.dtype.kind == "b":
            raw = raw.copy()
            settle_bools(raw)
        if not self._layout.casts:
            return raw
        out = np.empty(region.shape, dtype=self._layout.dtype)
        conversion(self._layout.decoding)(raw, out, f"{info}, elements {place},")
        return out

    def explain(self, region: Region, from_file: Array, piece: Array | None, found: Array) -> str:
        """Say which side is likelier wrong, if the device's values `found` differ from those that were read, `from_file`."""
        info = self._source.info
        if first_difference(from_file, self.values(region)) is not None:
            raise SourceError(
                f"{info} gives other values each time that {region} of the array is read: somebody writes it, or its storage "
                "is failing. Nothing that was loaded from it can be trusted",
                path=info.path,
                dataset=info.dataset,
            )
        if piece is None:
            return "The file gives the same twice: the array was changed since it was loaded, is of another file, or is corrupt"
        if first_difference(piece, found) is not None:
            return "The host's piece differs from the device: likelier wrong is the device, or the way to it"
        return (
            "The file gives the same twice, and the host's piece is as on the device: likelier wrong is how the values were "
            "read or travelled, on the rank that read them"
        )


def sample_regions(within: Region, chunks: Grid | None, itemsize: int, seed: int, most: int) -> Iterator[Region]:
    """A few small random regions inside a region, each inside one chunk. The same arguments always give the same regions.

    Parameters
    ----------
    within : Region
        The region to pick from.
    chunks : Grid or None
        The chunks, so that each sample decodes one chunk; None if any region can be read by itself.
    itemsize : int
        Bytes per element.
    seed : int
        Seed of the random choice.
    most : int
        How many regions at most.

    Examples
    --------
    >>> [str(r) for r in sample_regions(Region((4,), (12,)), Grid((16,), (5,), (0,)), 4, seed=0, most=2)]
    ['[5:10]']
    """
    if not within.size:
        return
    random = np.random.default_rng([seed, *within.start, *within.stop])
    size = max(1, _REGION_NBYTES // itemsize)
    cost = size if chunks is None else math.prod(min(c, n) for c, n in zip(chunks.cell, chunks.shape, strict=True))
    for _ in range(max(1, min(most, within.size // (_DECODED_AT_MOST * max(1, cost))))):
        point = [int(random.integers(a, b)) for a, b in zip(within.start, within.stop, strict=True)]
        element = Region(tuple(point), tuple(p + 1 for p in point))
        cell = within if chunks is None else chunks.region(next(chunks.meeting(element))).intersect(within) or element
        yield _around(point, cell, size, random)


def _around(point: list[int], cell: Region, size: int, random: np.random.Generator) -> Region:
    """A region of at most `size` elements inside `cell` that contains `point`; the longest axes are cut first."""
    start, stop = list(cell.start), list(cell.stop)
    while math.prod(b - a for a, b in zip(start, stop, strict=True)) > size:
        axis = max(range(len(start)), key=lambda k: stop[k] - start[k])
        n = -(-(stop[axis] - start[axis]) // 2)
        low = int(random.integers(max(start[axis], point[axis] - n + 1), min(point[axis], stop[axis] - n) + 1))
        start[axis], stop[axis] = low, low + n
    return Region(tuple(start), tuple(stop))


def first_difference(expected: Array, found: Array) -> tuple[int, ...] | None:
    """The first index, in C order, where two arrays of one shape and dtype differ in any bit; None if they are the same.

    >>> first_difference(np.array([0.0, np.nan]), np.array([-0.0, np.nan]))
    (0,)
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise ShardloadError(f"{found.shape} {found.dtype} cannot be compared with {expected.shape} {expected.dtype}")
    differ = (words_of(expected) != words_of(found)).any(axis=-1)
    if not differ.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), expected.shape))


def words_of(data: Array) -> Array:
    """The bits of each element: shape ``(size, words per element)``."""
    width = math.gcd(data.itemsize, 8)
    flat = np.ascontiguousarray(data).reshape(-1)
    return flat.view(f"u{width}").reshape(data.size, data.itemsize // width)


def value_text(value: Any) -> str:
    """A value and its bytes. The bytes tell values apart that look alike as text, for example NaNs.

    >>> value_text(np.int16(258))
    '258 (bytes 0201)'
    """
    return f"{value} (bytes {np.asarray(value).tobytes().hex()})"
