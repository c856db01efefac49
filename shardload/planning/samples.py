"""Which few small regions stand for a large one? For values that are looked at again: ``verify="file"``, fingerprints of files.

No I/O, no MPI, no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from shardload.planning.region import Grid, Region

_REGION_NBYTES = 1 << 16
_DECODED_AT_MOST = 32  # samples decode at most 1/32 of the region that they are in, or one chunk


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
