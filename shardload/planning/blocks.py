"""Which chunks form a block, which chunks does a new array get, and how many contiguous runs of the file is a region?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardload.planning.region import Grid, Region
from shardload.planning.shards import Shards

# Enough blocks per owner that an uneven last one costs at most a quarter, and that reading overlaps sending.
BLOCKS_PER_OWNER = 4

# Runs that start at most this far apart are read together with the gaps (`formats.hdf5.contiguous`): reading this much more
# takes less time than another system call (docs/design/decode.md).
NEAR_NBYTES = 32 << 10

LONGEST_ROW_NBYTES = 1 << 20  # of a run that stands for a chunk
ALIGNMENT = 64  # bytes: of values in a staging buffer, and of pieces
_MOST_CHUNKS = 1 << 14  # in a block: each chunk takes some hundred bytes of Python objects, in addition to its own bytes


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def most_chunks(chunk_nbytes: int, max_nbytes: int) -> int:
    """How many chunks a block of at most `max_nbytes` may meet. Each is decoded as a whole, however little of it is wanted.

    >>> most_chunks(1000, 4096), most_chunks(1 << 30, 4096), most_chunks(1, 1 << 40)
    (4, 1, 16384)
    """
    return max(1, min(_MOST_CHUNKS, max_nbytes // max(1, aligned(chunk_nbytes))))


def plan_row_chunks(shape: Sequence[int], itemsize: int, row_nbytes: int = LONGEST_ROW_NBYTES) -> tuple[int, ...]:
    """Shape of stand-in chunks for an array that has none: runs of the last axis, at most `row_nbytes` long.

    >>> plan_row_chunks((512, 512, 512), 4), plan_row_chunks((10**9,), 4)
    ((1, 1, 512), (262144,))
    """
    if not shape:
        return ()
    return (1,) * (len(shape) - 1) + (max(1, min(shape[-1], row_nbytes // itemsize)),)


def plan_blocks(
    chunks: Grid,
    itemsize: int,
    *,
    max_nbytes: int,
    n_owners: int | None = None,
    within: Sequence[int] | None = None,
    max_cells: int = 1 << 62,
    per_owner: int = BLOCKS_PER_OWNER,
    per_shard: Sequence[int] | None = None,
) -> Grid:
    """Group chunks into blocks, which a rank reads or writes at once.

    A block consists of whole chunks, contiguous in the file's (C) order. It has at most `max_nbytes` (but at least one chunk),
    and is small enough that each owner has several blocks.

    Parameters
    ----------
    chunks : Grid
        The array cut into the file's chunks.
    itemsize : int
        Bytes per element.
    max_nbytes : int
        Cap on a block.
    n_owners : int, optional
        Number of ranks that share the blocks; None if each rank reads its own shards.
    within : sequence of int, optional
        Shape of the shards, if only the part of a block inside a shard is wanted: the caps then count only that part.
    max_cells : int
        Cap on the number of chunks that one block meets, because each chunk has a cost beside its bytes.
    per_owner : int
        Fewest blocks for each owner. With fewer than `BLOCKS_PER_OWNER` all owners have equally many blocks, or there are as
        many blocks as otherwise.
    per_shard : sequence of int, optional
        Chunks along each axis of an object in a store: a block lies in one, where a cube of chunks mostly is one run of bytes.

    Examples
    --------
    >>> planes = Grid((512, 512, 512), (1, 512, 512), (0, 0, 0))
    >>> plan_blocks(planes, 4, max_nbytes=16 << 20, n_owners=8).cell
    (16, 512, 512)
    >>> plan_blocks(planes, 4, max_nbytes=64 << 20, n_owners=8, per_owner=1).cell
    (64, 512, 512)
    >>> plan_blocks(Grid((8, 8), (1, 1), (0, 0)), 4, max_nbytes=16, n_owners=1, per_shard=(4, 4)).cell
    (2, 2)
    """
    counts = chunks.counts
    extent = chunks.shape if within is None else [min(n, w) for n, w in zip(chunks.shape, within, strict=True)]
    cell_size = [min(c, e) for c, e in zip(chunks.cell, extent, strict=True)]
    room = max(1, min(max_cells, max_nbytes // max(1, math.prod(cell_size) * itemsize)))
    reach = list(counts)  # chunks along each axis that one block can meet: all of them, or those that one shard meets
    if within is not None:
        reach = [min(n, -(-e // c) + 1) for n, e, c in zip(counts, extent, chunks.cell, strict=True)]
    if per_shard is not None:
        grouped = _cube(per_shard, room if n_owners is None else min(room, chunks.n_cells // (BLOCKS_PER_OWNER * n_owners)))
    elif n_owners is None:
        grouped = _group(counts, reach, room)
    else:
        for n in range(min(per_owner, BLOCKS_PER_OWNER), BLOCKS_PER_OWNER + 1):
            grouped = _group(counts, reach, max(1, min(room, chunks.n_cells // (n * n_owners))))
            if math.prod(-(-n // g) for n, g in zip(counts, grouped, strict=True)) % n_owners == 0:
                break
    cell = tuple(g * c for g, c in zip(grouped, chunks.cell, strict=True))
    return Grid(chunks.shape, cell, chunks.phase)


def _group(counts: Sequence[int], reach: Sequence[int], room: int) -> list[int]:
    """How many chunks along each axis form a block that meets at most `room` of them: contiguous in the file's order."""
    grouped = [1] * len(counts)
    for axis in reversed(range(len(counts))):
        if reach[axis] > room:
            n_groups = -(-counts[axis] // room)
            grouped[axis] = -(-counts[axis] // n_groups)  # even groups instead of full ones and a small last one
            break
        grouped[axis] = max(1, counts[axis])
        room //= max(1, reach[axis])
    return grouped


def _cube(per_shard: Sequence[int], room: int) -> list[int]:
    """How many chunks along each axis form a block of at most `room` of them, as even as may be, without rest in a shard.

    >>> _cube((4, 4, 4), 20), _cube((3, 10), 31), _cube((4, 4), 1)
    ([4, 2, 2], [3, 10], [1, 1])
    """
    cube, axes = [1] * len(per_shard), list(range(len(per_shard)))
    while axes:
        axis = axes.pop(0)
        rest = per_shard[axis] // cube[axis]
        factor = next((k for k in range(2, rest + 1) if rest % k == 0), room + 1)
        if math.prod(cube) * factor <= room:
            cube[axis] *= factor
            axes.append(axis)
    return cube


def count_runs(shape: Sequence[int], extent: Sequence[int]) -> int:
    """The number of contiguous runs of the file that a box is made of.

    >>> count_runs((8, 8, 8), (4, 8, 8)), count_runs((8, 8, 8), (8, 4, 8)), count_runs((8, 8, 8), (8, 8, 4))
    (1, 8, 64)
    """
    runs, whole = 1, True
    for n, e in zip(reversed(shape), reversed(extent), strict=True):
        if not whole:
            runs *= min(n, e)
        whole = whole and e >= n
    return runs


def run_stride(shape: Sequence[int], extent: Sequence[int]) -> int:
    """Elements from the start of one run of a box to the start of the next.

    A run is what the box has of the last axis that is cut and all axes after it. The next run is one step further along the
    last earlier axis of which the box has more than one element.

    >>> run_stride((8, 8, 8), (4, 8, 8)), run_stride((8, 8, 8), (8, 4, 8)), run_stride((8, 8, 8), (8, 8, 4))
    (512, 64, 8)
    """
    cut = [k for k, (n, e) in enumerate(zip(shape, extent, strict=True)) if e < n]
    if not cut:
        return 0
    steps = [k for k in range(cut[-1]) if extent[k] > 1]
    return math.prod(shape[steps[-1] + 1 :] if steps else shape[cut[-1] :])


def run_of(shape: tuple[int, ...], region: Region) -> tuple[int, int] | None:
    """Where a region that is contiguous in an array in C order starts, and its length, in elements; None if it has several
    pieces, or none.

    >>> run_of((4, 6), Region((1, 0), (3, 6))), run_of((4, 6), Region((1, 2), (3, 4))), run_of((4, 6), Region((1, 2), (2, 4)))
    ((6, 12), None, (8, 2))
    """
    start, length, step, is_cut = 0, 1, 1, False
    for a, b, n in zip(region.start[::-1], region.stop[::-1], shape[::-1], strict=True):
        if b == a or (is_cut and b - a > 1):
            return None
        start, length, step, is_cut = start + a * step, length * (b - a), step * n, is_cut or b - a < n
    return start, length


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
