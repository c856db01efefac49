"""What does each way of reading cost, and which one should be chosen?

Pure, like `schedule`: the numbers are the same on every rank, so every rank chooses the same way. An axis is cut independently
of the others, so counts are products of counts along the axes, and take as long for eight ranks as for a million.

The rule (`choose_mode`) compares bytes: each rank reads what it holds, unless that is clearly more than its share of the array;
then the ranks share the reads and send each other the parts. Why so simple: docs/design/auto.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardload.planning.region import NEAR_NBYTES, Grid, IntArray, count_runs, run_stride
from shardload.planning.schedule import DIRECT, PARALLEL, Schedule, SourceLayout
from shardload.units import format_nbytes, number_text

# To share reads pays off if each rank then reads so much less, in bytes and as a factor of the array. From the page cache,
# reading twice what is not encoded takes no longer than sending it once.
_WORTH_NBYTES, _WORTH_FACTOR, _WORTH_FACTOR_CACHED = 1 << 20, 1.25, 2.0
_CALL_NBYTES = 8 << 10  # to read a run by itself takes as long as so many bytes of the page cache
_FETCH_NBYTES = 1 << 20  # several nodes share a file system, which fetches about as much at a time


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way of reading makes the job do.

    Attributes
    ----------
    n_readers : int
        Number of ranks that read.
    chunks_decoded : int
        Number of chunk decodes in the whole job (0 if the file has no chunks).
    decoded_nbytes : int
        Bytes decoded or, without chunks, read with what lies between near runs, in the whole job. (A run that is far from the
        next one counts as 8 KiB at least, on several nodes as 1 MiB.)
    amplification : float
        `decoded_nbytes` divided by the bytes of the array; 1.0 means each byte once.
    reader_nbytes : int
        The same bytes of the busiest rank, at most.
    messages, moved_nbytes : int
        At most so many parts travel from one rank to another, with so many bytes.
    peak_nbytes : int
        Host memory of the fullest rank, at most: its pieces, its staging blocks, and what its threads decode in.
    """

    n_readers: int
    chunks_decoded: int
    decoded_nbytes: int
    amplification: float
    reader_nbytes: int
    messages: int
    moved_nbytes: int
    peak_nbytes: int


def plan_cost(schedule: Schedule, layout: SourceLayout, *, staging_nbytes: int = 0, is_one_node: bool = True) -> Cost:
    """Compute what a load by this schedule costs.

    Parameters
    ----------
    schedule : Schedule
        Which rank owns which block.
    layout : SourceLayout
        How the array lies in its file.
    staging_nbytes : int
        Bytes of staging memory that an owner uses.
    is_one_node : bool
        Whether all ranks are on one node, whose page cache has the file.
    """
    shards, itemsize, file_itemsize = schedule.shards, schedule.itemsize, layout.file_dtype.itemsize
    units = layout.chunks if layout.has_chunks else _elements(layout.chunks.shape)
    unit_nbytes = layout.chunk_nbytes if layout.has_chunks else file_itemsize
    if schedule.is_direct:
        n_units, of_reader = _count_direct(schedule, units)
        read_nbytes = 1.0 if layout.has_chunks else _with_gaps(schedule, file_itemsize, is_one_node)
        messages = moved = 0
    else:
        reader_size = schedule.most_blocks * math.prod(schedule.blocks.cell)
        n_units = units.n_cells
        of_reader, read_nbytes = min(n_units, reader_size // math.prod(units.cell)), 1.0
        messages, moved = (shards.most_holders * _count(schedule, g)[0] for g in (schedule.blocks, _elements(units.shape)))
    array_nbytes = math.prod(units.shape) * file_itemsize
    decoded_nbytes = int(n_units * unit_nbytes * read_nbytes)
    return Cost(
        n_readers=schedule.n_readers,
        chunks_decoded=n_units if layout.has_chunks else 0,
        decoded_nbytes=decoded_nbytes,
        amplification=decoded_nbytes / array_nbytes if array_nbytes else 1.0,
        reader_nbytes=int(of_reader * unit_nbytes * read_nbytes),
        messages=messages,
        moved_nbytes=moved * itemsize,
        peak_nbytes=math.prod(shards.shard_shape) * itemsize * shards.most_held + staging_nbytes,
    )


def choose_mode(costs: Mapping[str, Cost], n_ranks: int, *, is_one_node: bool = True) -> tuple[str, str]:
    """Return the way to choose, and the reason as text.

    Direct is simplest, because it needs no messages. Parallel is taken if it is clearly less to read for each rank.
    """
    direct = costs[DIRECT]
    if direct.decoded_nbytes == 0:
        return DIRECT, "the array is empty"
    verb = "decode" if direct.chunks_decoded else "read"
    factor = number_text(direct.amplification, 3)
    if n_ranks == 1:  # there is no other rank to share reads with
        return DIRECT, f"one process: it {verb}s what its devices hold, {factor}x the array"
    shared = costs[PARALLEL]
    saved_nbytes = direct.reader_nbytes - shared.reader_nbytes
    worth = _WORTH_FACTOR_CACHED if is_one_node and not direct.chunks_decoded else _WORTH_FACTOR
    if direct.amplification <= worth * shared.amplification:
        return DIRECT, f"each rank {verb}s what it holds, {factor}x the array in all, and nothing is sent"
    if saved_nbytes <= _WORTH_NBYTES:
        return DIRECT, f"so little data that each rank best {verb}s what it holds, {factor}x the array in all"
    return PARALLEL, (
        f"each rank by itself would {verb} {factor}x the array in all; once in the job, and at most "
        f"{format_nbytes(shared.moved_nbytes)} sent between ranks, is {format_nbytes(saved_nbytes)} less for the busiest rank"
    )


def _elements(shape: tuple[int, ...]) -> Grid:
    return Grid(shape, (1,) * len(shape), (0,) * len(shape))


def _cells_along(schedule: Schedule, grid: Grid, axis: int) -> tuple[IntArray, IntArray, IntArray]:
    """Along one axis, for each section: the first cell of a grid that it meets, the one after the last, its shard's place."""
    low, high, place = schedule.shards.grid.along(axis, grid.shape[axis])
    cell, phase = grid.cell[axis], grid.phase[axis]
    first: IntArray = (low + phase) // cell
    return first, np.where(high > low, -(-(high + phase) // cell), first), place


def _count(schedule: Schedule, grid: Grid) -> tuple[int, int]:
    """The number of pairs of a cell of a grid and a section that share elements, and the largest number for one shard."""
    total = most = 1
    for axis in range(len(grid.shape)):
        first, last, place = _cells_along(schedule, grid, axis)
        total *= int((last - first).sum())
        most *= int(np.bincount(place, weights=last - first).max())
    return total, most


def _count_direct(schedule: Schedule, grid: Grid) -> tuple[int, int]:
    """How many cells all ranks together, and the busiest rank, read if each reads what it holds.

    Exact if all shards have equally many holders, and each rank holds one shard, or as large a box of them as any other. Else
    an upper bound if each shard is read by itself, and an estimate if a rank reads for all of its shards at once.
    """
    shards = schedule.shards
    total, most = _count(schedule, grid)
    total, most = total * shards.most_holders, most * shards.most_held
    if not schedule.is_merged:
        return total, most
    n_boxes = merged = merged_most = 1
    for axis, span in enumerate(shards.spans):
        first, last, place = _cells_along(schedule, grid, axis)
        # The shards of a rank side by side; what wraps around comes on top.
        n = shards.cuts[axis]
        begins = np.arange(0, n, span)
        per_box = np.maximum.reduceat(last[:n], begins) - np.minimum.reduceat(first[:n], begins)
        np.add.at(per_box, place[n:] // span, last[n:] - first[n:])
        per_box = np.minimum(per_box, grid.counts[axis])
        n_boxes *= len(begins)
        merged *= int(per_box.sum())
        merged_most *= int(per_box.max())
    return min(total, -(-merged * shards.n_holding // n_boxes)), min(most, merged_most)


def _with_gaps(schedule: Schedule, itemsize: int, is_one_node: bool) -> float:
    """How many bytes are read for each byte of a file without chunks, if runs are read with what lies between near ones."""
    near_nbytes, least_nbytes = (NEAR_NBYTES, _CALL_NBYTES) if is_one_node else (_FETCH_NBYTES, _FETCH_NBYTES)
    shape, extent = schedule.blocks.shape, schedule.extent
    n_runs = count_runs(shape, extent)
    if n_runs <= 1 or 0 in extent:
        return 1.0
    run_nbytes = math.prod(map(min, shape, extent)) * itemsize / n_runs
    stride_nbytes = run_stride(shape, extent) * itemsize
    return max(1.0, (stride_nbytes if stride_nbytes <= near_nbytes else least_nbytes) / run_nbytes)
