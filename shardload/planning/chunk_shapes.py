"""Which chunks does a new array get, and which runs of it are written at once if it has none?

Pure: integers in, integers out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardload.planning.shards import Shards

SHARE_OF_CAP = 32  # of the staging memory, for one chunk: five rounds of it, buffers for parts of it, and scratch memory
_MOST_NBYTES, _LEAST_NBYTES = 4 << 20, 1 << 18
_FACTORS = (2, 3, 5, 7)
_LEAST_ROWS = 512  # of a chunk along an axis that can grow, if rows are short: a time axis gets no chunk for each step
_MOST_ROWS = 4  # times the bytes that are asked for, if rows have to begin at pages


def plan_chunks(shape: Sequence[int], itemsize: int, shards: Shards, cap_nbytes: int = 1 << 62) -> tuple[int, ...]:
    """Chunks of at most 4 MiB (less if the staging memory is small), each inside one shard if shards are not much smaller than
    that and can be divided.

    Examples
    --------
    Pencils of 512^3 float32 on 2 x 2 ranks; then small shards, which are joined:

    >>> import numpy as np
    >>> from shardload.planning.shards import plan_shards
    >>> pencils = plan_shards((512, 512, 512), [(0,), (1,), ()], np.arange(4).reshape(2, 2))
    >>> plan_chunks((512, 512, 512), 4, pencils)
    (64, 128, 128)
    >>> plan_chunks((64, 64), 4, plan_shards((64, 64), [(0,), ()], np.arange(64)))
    (64, 64)
    """
    cell = [max(1, min(n, s)) for n, s in zip(shape, shards.shard_shape, strict=True)]
    is_cut = [c > 1 for c in shards.cuts]
    most = max(itemsize, min(_MOST_NBYTES, cap_nbytes // SHARE_OF_CAP))
    while math.prod(cell) * itemsize > most:
        axis, step = _next_cut(cell, is_cut)
        cell[axis] = -(-cell[axis] // step)
    # Join small shards: the last axes first, whose chunks then are runs of the file.
    for axis in reversed(range(len(cell))):
        while cell[axis] < shape[axis] and 2 * math.prod(cell) * itemsize <= min(2 * _LEAST_NBYTES, most):
            cell[axis] = min(shape[axis], 2 * cell[axis])
    return tuple(cell)


def _next_cut(cell: Sequence[int], is_cut: Sequence[bool]) -> tuple[int, int]:
    """The axis to make shorter, the longest that can be, and by which factor: one that divides it if a mesh axis cuts it."""
    for axis in sorted(range(len(cell)), key=lambda k: -cell[k]):
        if cell[axis] == 1:
            break
        if not is_cut[axis]:
            return axis, 2
        for factor in _FACTORS:
            if cell[axis] % factor == 0:
                return axis, factor
    return max(range(len(cell)), key=lambda k: cell[k]), 2


def growing_chunks(shape: Sequence[int], axis: int, itemsize: int) -> tuple[int, ...]:
    """Chunks for an array that was in one piece and shall be able to grow along an axis: as few rows of that axis as are worth
    a chunk, whole along the others up to 4 MiB.

    >>> growing_chunks((8760, 721, 1440), 0, 4), growing_chunks((30, 721, 720), 0, 4), growing_chunks((8760,), 0, 8)
    ((1, 721, 1440), (1, 721, 720), (8760,))
    >>> growing_chunks((100, 2), 0, 8), growing_chunks((3, 4000, 4000), 0, 4)
    ((512, 2), (1, 1000, 1000))
    """
    cell = [1 if k == axis else max(1, n) for k, n in enumerate(shape)]
    while math.prod(cell) * itemsize > _MOST_NBYTES and max(cell) > 1:
        longest = max(range(len(cell)), key=lambda k: cell[k])
        cell[longest] = -(-cell[longest] // 2)
    rows = _LEAST_NBYTES // (math.prod(cell) * itemsize)
    cell[axis] = max(1, min(rows, max(shape[axis], _LEAST_ROWS)))
    return tuple(cell)


def plan_rows(shape: tuple[int, ...], itemsize: int, most_nbytes: int, page: int = 1) -> tuple[tuple[int, ...], bool]:
    """Units of a contiguous array, which are runs of the file, of about so many bytes; and whether all begin at multiples of
    `page` bytes.

    >>> plan_rows((512, 512, 512), 4, 4 << 20), plan_rows((3, 5), 8, 4 << 20), plan_rows((3, 5), 8, 4 << 20, page=4096)
    (((4, 512, 512), True), ((3, 5), True), ((3, 5), True))
    """
    for axis in range(len(shape)):
        row = max(1, math.prod(shape[axis + 1 :]) * itemsize)
        if row > most_nbytes:
            continue
        step, n = page // math.gcd(row, page), most_nbytes // row
        paged = n // step * step or (step if step * row <= _MOST_ROWS * most_nbytes else 0)
        n = min(paged or n, shape[axis])
        fits = not axis and n == shape[axis]  # one unit, which begins where the array does
        fits = fits or (paged > 0 and (not axis or not shape[axis] * row % page))
        return ((1,) * axis + (n,) + tuple(shape[axis + 1 :])), fits
    return (1,) * len(shape), page == 1
