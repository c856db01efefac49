"""What did reading and moving cost, and which chunks are missing? Each task counts; `SourceReader` and `Session` add up.

A missing chunk is not stored, so that its values are the file's fill value. A file that lost chunks looks like a file that
never had them; only its author knows. So the job counts them. Each is counted once, however many ranks read it: by the rank
whose block has the chunk's first selected element or, if every rank reads its own shards, by the first rank that holds that
element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import numpy as np

from shardload.errors import MissingChunksWarning, SourceError
from shardload.formats.contract.array import ArrayInfo
from shardload.planning.region import Grid, IntArray, Region
from shardload.planning.schedule import Block, Schedule
from shardload.planning.selection import Selection
from shardload.system.caller import warn_once
from shardload.units import counted

_NONE = 2**63 - 1  # above all numbers of chunks

_JOINED_BY: dict[str, Callable[[Any, Any], Any]] = {"peak_nbytes": max, "first_missing": min}  # the others are added

Counter = Callable[[Block, IntArray, Grid], IntArray]


@dataclass
class Counters:
    """What reading and moving cost on this rank. Seconds are summed over the threads.

    `exchange_seconds` is how long exchanges took, `nbytes_received` what came from other ranks, `peak_nbytes` the most bytes in
    staging buffers at a time, `first_missing` the least number of a missing chunk.
    """

    chunks_decoded: int = 0
    nbytes_read: int = 0
    nbytes_stored: int = 0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    copy_seconds: float = 0.0
    nbytes_copied: int = 0
    n_checksums: int = 0
    chunks_missing: int = 0
    exchange_seconds: float = 0.0
    nbytes_received: int = 0
    peak_nbytes: int = 0
    first_missing: int = _NONE

    def add(self, other: Counters) -> None:
        """Add what one task, array or round counted."""
        for name, value in vars(other).items():
            join = _JOINED_BY.get(name, add)
            setattr(self, name, join(getattr(self, name), value))

    def add_missing(self, numbers: np.ndarray[Any, Any]) -> None:
        """Count missing chunks, given their numbers in ascending order."""
        self.chunks_missing += len(numbers)
        self.first_missing = min([self.first_missing, *numbers[:1].tolist()])


def counter_of(plan: Schedule, rank: int, is_cut: Sequence[bool] = ()) -> Counter:
    """A function that chooses which missing chunks of a block `rank` counts. Each chunk is counted by one rank, in one read.

    That is the read that has its first element. If each rank reads its own shards, the first holder of that shard counts.
    `is_cut`: along which axes chunks may begin before the array, in another part of a longer one, where they are counted.
    """

    def counts(read: Block, numbers: IntArray, chunks: Grid) -> IntArray:
        if not plan.is_direct:
            return _beginning_in(read.region, numbers, chunks, is_cut)
        shards = plan.shards
        first_held = (part for part in read.parts if shards.holders(shards.shard_of(part.target))[0] == rank)
        regions = [shards.own(part.target, part.region) for part in first_held]
        begin = (_beginning_in(region, numbers, chunks, is_cut) for region in regions if region is not None)
        return np.sort(np.concatenate([numbers[:0], *begin]))

    return counts


def _beginning_in(region: Region, numbers: IntArray, chunks: Grid, is_cut: Sequence[bool] = ()) -> IntArray:
    """The chunks whose first element (of those that are selected) is in a region.

    >>> _beginning_in(Region((3,), (9,)), np.array([0, 1, 2]), Grid((12,), (4,), (0,))).tolist()
    [1, 2]
    """
    remaining, begins = numbers, np.ones(len(numbers), dtype=bool)
    cuts = is_cut or (False,) * len(chunks.counts)
    axes = zip(chunks.counts, chunks.cell, chunks.phase, region.start, region.stop, cuts, strict=True)
    for count, cell, phase, start, stop, begins_before in reversed(list(axes)):
        remaining, index = np.divmod(remaining, count)
        first = np.maximum(index * cell - phase, -phase if begins_before else 0)
        begins &= (start <= first) & (first < stop)
    return numbers[begins]


def chunk_numbers(
    indices: Sequence[tuple[int, ...]], selection: Selection, chunk_shape: Sequence[int], chunks: Grid
) -> IntArray:
    """The numbers of chunks of the file in the grid of the selected array.

    >>> from shardload.planning.selection import select_axes
    >>> selection = select_axes((5, slice(4, 12)), (8, 16))
    >>> chunk_numbers([(1, 2)], selection, (4, 4), Grid((8,), (4,), (0,))).tolist()
    [1]
    """
    table, numbers = np.array(indices, dtype=np.int64), np.zeros(len(indices), dtype=np.int64)
    for k, count in zip(selection.kept, chunks.counts, strict=True):
        numbers = numbers * count + table[:, k] - selection.region.start[k] // chunk_shape[k]
    return numbers


def describe_missing(n: int, first: int, info: ArrayInfo, selection: Selection, chunks: Grid) -> str:
    """Text that says how many chunks are missing, of how many, and which is the first."""
    if info.chunks is None:
        return f"{info} was made but never written: every value is its fill value"
    place = selection.to_file(chunks.region(first))
    index = tuple(a // c for a, c in zip(place.start, info.chunks, strict=True))
    of_all = f"{n:,} of {counted(chunks.n_cells, 'chunk')}"
    are, have, more = ("is", "has", "") if n == 1 else ("are", "have", ", ...")
    return f"{of_all} {are} not stored in {info}, and {have} its fill value: {index} (elements {place}){more}"


def settle_missing(text: str, missing: str, rank: int, info: ArrayInfo) -> None:
    """Warn about missing chunks once in the job, or raise an error on every rank. The text says which option to pass.

    Raises
    ------
    SourceError
        If `missing` is "error".
    """
    advice = "missing='fill' if you know that they were never written (writers leave out chunks that are all fill value, too)"
    if missing == "error":
        text = f"{text}. Nothing was loaded. Pass {advice}; missing='warn' to have such a file all the same"
        raise SourceError(text, path=info.path, dataset=info.dataset)
    if missing == "warn":
        text = f"{text}. Pass missing='error' to refuse such a file, {advice}"
        warn_once(text, MissingChunksWarning, rank)
