"""Which chunks form a block, and in how many contiguous runs does a region lie in the file?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardload.planning.grid import Grid

__all__ = [
    "ALIGNMENT",
    "BLOCKS_PER_OWNER",
    "NEAR_NBYTES",
    "aligned",
    "count_runs",
    "most_chunks",
    "plan_blocks",
    "plan_row_chunks",
    "run_stride",
]

# Enough blocks per owner that the uneven last one costs at most a quarter, and that reading overlaps sending.
BLOCKS_PER_OWNER = 4

# Runs that start no further apart are read with what lies between them, as formats.hdf5.contiguous does.
NEAR_NBYTES = 32 << 10

ALIGNMENT = 64  # bytes: of what waits in a staging buffer, and of pieces
_MOST_CHUNKS = 1 << 14  # in a block: each takes some hundred bytes of Python, beside its own


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def most_chunks(chunk_nbytes: int, max_nbytes: int) -> int:
    """Chunks that a block of at most `max_nbytes` may meet: of each all is decoded, however little of it is wanted.

    >>> most_chunks(1000, 4096), most_chunks(1 << 30, 4096), most_chunks(1, 1 << 40)
    (4, 1, 16384)
    """
    return max(1, min(_MOST_CHUNKS, max_nbytes // max(1, aligned(chunk_nbytes))))


def plan_row_chunks(shape: Sequence[int], itemsize: int, row_nbytes: int = 1 << 20) -> tuple[int, ...]:
    """Stand-in chunks for an array that has none: runs of the last axis, at most `row_nbytes` long.

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
) -> Grid:
    """Group chunks into blocks: what a rank reads or writes at once.

    A block is whole chunks, contiguous in the file's (C) order, at most `max_nbytes` (but at least one chunk), and small
    enough that each owner has several.

    Parameters
    ----------
    chunks : Grid
        The array cut into the file's chunks.
    itemsize : int
        Bytes per element.
    max_nbytes : int
        Cap on a block.
    n_owners : int, optional
        How many ranks share the blocks; None where each takes its own shards.
    within : sequence of int, optional
        Shape of the shards, where only the parts of blocks inside a shard are wanted: the caps then count those.
    max_cells : int
        Cap on the chunks that one block meets, where each costs something beside its bytes.

    Examples
    --------
    >>> planes = Grid((512, 512, 512), (1, 512, 512), (0, 0, 0))
    >>> plan_blocks(planes, 4, max_nbytes=16 << 20, n_owners=8).cell
    (16, 512, 512)
    """
    counts = chunks.counts
    extent = chunks.shape if within is None else [min(n, w) for n, w in zip(chunks.shape, within, strict=True)]
    cell_size = [min(c, e) for c, e in zip(chunks.cell, extent, strict=True)]
    room = max(1, min(max_cells, max_nbytes // max(1, math.prod(cell_size) * itemsize)))
    if n_owners is not None:
        room = max(1, min(room, chunks.n_cells // (BLOCKS_PER_OWNER * n_owners)))
    grouped = [1] * len(counts)
    for axis in reversed(range(len(counts))):
        # Chunks along this axis that one block can meet: all of them, or those that one shard reaches into.
        reach = counts[axis] if within is None else min(counts[axis], -(-extent[axis] // chunks.cell[axis]) + 1)
        if reach > room:
            n_groups = -(-counts[axis] // room)
            grouped[axis] = -(-counts[axis] // n_groups)  # even groups, not full ones and a small last one
            break
        grouped[axis] = max(1, counts[axis])
        room //= max(1, reach)
    cell = tuple(g * c for g, c in zip(grouped, chunks.cell, strict=True))
    return Grid(chunks.shape, cell, chunks.phase)


def count_runs(shape: Sequence[int], extent: Sequence[int]) -> int:
    """Contiguous runs of the file that a box of it is made of.

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
    """Elements from the start of one run of a box to the next: one step along the last axis before the last that is cut.

    A run is what the box has of that axis and all after it. An axis of which it has one element is no step.

    >>> run_stride((8, 8, 8), (4, 8, 8)), run_stride((8, 8, 8), (8, 4, 8)), run_stride((8, 8, 8), (8, 8, 4))
    (512, 64, 8)
    """
    cut = [k for k, (n, e) in enumerate(zip(shape, extent, strict=True)) if e < n]
    if not cut:
        return 0
    steps = [k for k in range(cut[-1]) if extent[k] > 1]
    return math.prod(shape[steps[-1] + 1 :] if steps else shape[cut[-1] :])
