"""Random plans, and what they must do, counted element by element: nothing here uses the planner's own arithmetic."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shardload.planning.region import Grid, Region, plan_blocks
from shardload.planning.schedule import (
    DIRECT,
    MAX_MESSAGE_NBYTES,
    PARALLEL,
    ROOT,
    Owners,
    Schedule,
    SourceLayout,
    plan_direct,
    plan_shared,
)
from shardload.planning.selection import Selection
from shardload.planning.shards import Halo, Shards, plan_shards

MAX_SIZE = 1500  # elements of the global array
MAX_DEVICES = 24
PAD = -7


@dataclass(frozen=True)
class Case:
    """The integers that a plan is made of. `ranks` has the shape of the mesh; `axes` cut each array axis, major first."""

    shape: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    ranks: np.ndarray[Any, Any]
    n_ranks: int
    cell: tuple[int, ...]
    phase: tuple[int, ...]
    n_readers: int
    root: int = 0
    itemsize: int = 4
    block_nbytes: int = 64
    is_merged: bool = False

    @property
    def shape_global(self) -> tuple[int, ...]:
        parts = [math.prod(self.ranks.shape[m] for m in cut) for cut in self.axes]
        return tuple(-(-n // p) * p for n, p in zip(self.shape, parts, strict=True))

    @property
    def owners(self) -> Owners | None:
        """0 readers: every rank what it holds."""
        if self.n_readers == 0:
            return None
        return Owners(root=self.root) if self.n_readers == 1 else Owners(self.n_readers)

    @property
    def chunks(self) -> Grid:
        return Grid(self.shape, self.cell, self.phase)

    def plan(
        self,
        blocks: Grid | None = None,
        kind: type[Schedule] = Schedule,
        owners: Owners | None = None,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
    ) -> Schedule:
        shards = plan_shards(self.shape_global, self.axes, self.ranks)
        if blocks is None:
            blocks = plan_blocks(
                self.chunks,
                self.itemsize,
                max_nbytes=self.block_nbytes,
                n_owners=self.n_readers or None,
                within=None if self.n_readers else shards.reach if self.is_merged else shards.shard_shape,
            )
        owners = owners or self.owners
        is_merged = self.is_merged and owners is None
        return kind(blocks, shards, self.itemsize, self.n_ranks, owners, max_message_nbytes, is_merged)

    def layout(self, has_chunks: bool = True) -> SourceLayout:
        """How the array lies in a file, with an axis more that the selection drops."""
        n, dtype = len(self.shape), np.dtype(f"V{self.itemsize}")
        selection = Selection(Region((0,) * (n + 1), (*self.shape, 1)), tuple(range(n)))
        chunk_shape = (*self.cell, 1) if has_chunks else None
        return SourceLayout(selection, self.chunks, chunk_shape, dtype, dtype, "gzip")


def every_way(
    layout: SourceLayout, shards: Shards, n_ranks: int, max_nbytes: int, n_readers: int | None = None
) -> dict[str, Schedule]:
    """The schedule of each way of reading."""
    owners = {ROOT: Owners(), PARALLEL: Owners(n_readers or n_ranks)}
    shared = {way: plan_shared(layout, shards, n_ranks, owners[way], max_nbytes=max_nbytes) for way in owners}
    return {**shared, DIRECT: plan_direct(layout, shards, n_ranks, max_nbytes=max_nbytes)}


# Strategies are kept: hypothesis looks at each new one closely, which takes longer than to draw from it.
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= MAX_DEVICES)
ITEMSIZES, MESSAGE_SIZES = st.sampled_from([1, 4, 8]), st.sampled_from([1, 16, 64, 256, 1 << 20])


@functools.cache
def orders(n: int) -> st.SearchStrategy[list[int]]:
    return st.permutations(range(n))


@functools.cache
def ranks_of_devices(n_ranks: int, n_devices: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, n_ranks - 1), min_size=n_devices, max_size=n_devices)


@functools.cache
def reader_counts(n_ranks: int) -> st.SearchStrategy[int]:
    return st.sampled_from([0, 1, n_ranks]) | st.integers(0, n_ranks)


@functools.cache
@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(SIZES)
    ndim = draw(st.integers(0, 4))
    pool = list(draw(orders(len(sizes))))
    axes = []
    for _ in range(ndim):
        n = draw(st.integers(0, min(2, len(pool))))
        axes.append(tuple(pool[:n]))
        pool = pool[n:]
    shape: list[int] = []
    for k in range(ndim):
        parts = math.prod(sizes[m] for m in axes[k])
        room = MAX_SIZE // max(1, math.prod(shape)) // parts
        n = draw(st.integers(0, 9) if k % 2 else st.integers(1, 12))
        shape.append(min(n, max(1, room) * parts))
    cell = tuple(draw(st.integers(1, n + 2)) for n in shape)
    phase = tuple(draw(st.integers(0, c - 1)) for c in cell)
    n_devices = math.prod(sizes)
    if draw(st.booleans()):  # a rank per device, in any order, some ranks without any
        n_ranks = n_devices + draw(st.integers(0, 2))
        ranks = draw(orders(n_ranks))[:n_devices]
    else:  # several devices of a rank anywhere in the mesh
        n_ranks = draw(st.integers(1, 6))
        ranks = draw(ranks_of_devices(n_ranks, n_devices))
    n_readers = draw(reader_counts(n_ranks))
    return Case(
        tuple(shape),
        tuple(axes),
        np.array(ranks, dtype=np.int64).reshape(sizes),
        n_ranks,
        cell,
        phase,
        n_readers,
        draw(st.integers(0, n_ranks - 1)) if n_readers == 1 else 0,
        draw(ITEMSIZES),
        draw(MESSAGE_SIZES),
        n_readers == 0 and draw(st.booleans()),
    )


@functools.cache
@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> Grid:
    """Any cut of `shape`, whether anybody would read in such blocks or not."""
    cell = tuple(draw(st.integers(1, n + 2)) for n in shape)
    return Grid(shape, cell, tuple(draw(st.integers(0, c - 1)) for c in cell))


def held_regions(case: Case) -> list[set[Region]]:
    """What each rank holds: device after device, by where it stands in the mesh."""
    held: list[set[Region]] = [set() for _ in range(case.n_ranks)]
    for place in np.ndindex(case.ranks.shape):
        start, stop = [], []
        for n, cut in zip(case.shape_global, case.axes, strict=True):
            index, parts = 0, 1
            for m in cut:  # major first
                index = index * case.ranks.shape[m] + place[m]
                parts *= case.ranks.shape[m]
            start.append(index * (n // parts))
            stop.append((index + 1) * (n // parts))
        held[int(case.ranks[place])].add(Region(tuple(start), tuple(stop)))
    return held


def cell_numbers(grid: Grid) -> np.ndarray[Any, Any]:
    """For each element the C-order number of the cell of `grid` that it lies in."""
    places = [(np.arange(n) + p) // c for n, c, p in zip(grid.shape, grid.cell, grid.phase, strict=True)]
    counts = [int(p.max(initial=-1)) + 1 for p in places]
    numbers: np.ndarray[Any, Any] = np.zeros((), dtype=np.int64)
    for place, count in zip(places, counts, strict=True):
        numbers = np.add.outer(numbers * count, place)
    return numbers


def flat_index(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The array whose value is its own flat index."""
    return np.arange(math.prod(shape)).reshape(shape)


def beyond_its_ends(values: np.ndarray[Any, Any], widths: Sequence[int], edges: Sequence[Any]) -> np.ndarray[Any, Any]:
    """An array beyond its ends, by NumPy: axis by axis what the edge rule says."""
    for axis, (h, edge) in enumerate(zip(widths, edges, strict=True)):
        pad = [(h, h) if k == axis else (0, 0) for k in range(values.ndim)]
        if h and isinstance(edge, str):
            values = np.pad(values, pad, mode=edge)  # type: ignore[call-overload]
        elif h:
            values = np.pad(values, pad, constant_values=edge)
    return values


def expected_of(case: Case, halo: Halo) -> dict[int, np.ndarray[Any, Any]]:
    """Each shard, by its number: a window of the table beyond its ends."""
    parts = [math.prod(case.ranks.shape[m] for m in cut) for cut in case.axes]
    table = flat_index(case.shape)
    if table.ndim:
        table = np.pad(table, [(0, m - n) for n, m in zip(case.shape, case.shape_global, strict=True)], constant_values=PAD)
    around = beyond_its_ends(table, halo.widths, halo.edges)
    shards = {}
    for number, place in enumerate(np.ndindex(*parts)):
        window = []
        for i, n, p, h in zip(place, case.shape_global, parts, halo.widths, strict=True):
            window.append(slice(i * (n // p), (i + 1) * (n // p) + 2 * h))
        shards[number] = around[tuple(window)]
    return shards


def simulate(case: Case, plan: Schedule, halo: Halo | None = None) -> Counter[str]:
    """Carry a plan out on the index table, rank by rank, and AssertionError at the first thing that is not right.

    Returns what was counted on the way: messages, moved elements, reads.
    """
    shards, table, held = plan.shards, flat_index(case.shape), held_regions(case)
    expected = expected_of(case, halo or Halo((0,) * len(case.shape), (PAD,) * len(case.shape)))
    assert math.prod(shards.cuts) == len(expected)
    buffers: list[dict[int, np.ndarray[Any, Any]]] = []
    for rank in range(case.n_ranks):
        mine = shards.shards_of(rank)
        regions = {shards.region(s) for s in mine}
        # As elements: where an axis is empty several shards are the same (empty) region.
        assert halo or regions == held[rank], f"rank {rank} holds {held[rank]}, the plan says {regions}"
        assert {s: expected[s].shape for s in mine} == dict.fromkeys(mine, shards.shard_shape)
        buffers.append({s: np.full(shards.shard_shape, -1, dtype=np.int64) for s in mine})
        for section in shards.sections_of(rank):
            assert shards.shard_of(section) in mine
            assert rank in shards.holders(shards.shard_of(section))
    writes = [{s: np.zeros(b.shape, dtype=int) for s, b in mine.items()} for mine in buffers]

    counts: Counter[str] = Counter()
    sent: dict[tuple[int, int], list[tuple[Region, int]]] = {}
    for sender in range(case.n_ranks):
        for read in plan.outgoing(sender):
            counts["reads"] += 1
            assert read.region.size > 0
            assert Region.whole(case.shape).contains(read.region), f"{read.region} reaches outside the array"
            assert read.region.size <= plan.max_block_size
            block = table[read.region.slices()]
            for part in read.parts:
                assert read.region.contains(part.region) and part.region.size > 0
                assert plan.is_direct or part.region.size * case.itemsize <= plan.max_message_nbytes, "a long message"
                section, shard = shards.grid.region(part.target), shards.shard_of(part.target)
                assert shard in buffers[part.rank], f"rank {part.rank} does not hold shard {shard}"
                assert section.contains(part.region), f"{part} reaches outside"
                starts = zip(section.start, shards.place_of(part.target).start, shards.region(shard).start, strict=True)
                place = part.region.slices([start - held + origin for start, held, origin in starts])
                buffers[part.rank][shard][place] = block[part.region.slices(read.region.start)]
                writes[part.rank][shard][place] += 1
                if part.rank != sender:
                    sent.setdefault((sender, part.rank), []).append((part.region, part.target))
                    counts["messages"] += 1
                    counts["moved"] += part.region.size

    for rank in range(case.n_ranks):
        promised = {s: [(p.region, p.target) for p in parts] for s, parts in plan.incoming(rank).items()}
        got = {s: messages for (s, receiver), messages in sent.items() if receiver == rank}
        assert got == promised, f"rank {rank} gets {got}, but waits for {promised}"
        assert all(p.rank == s for s, parts in plan.incoming(rank).items() for p in parts)
        for shard, buffer in buffers[rank].items():
            filled, once = np.zeros(buffer.shape, dtype=int), np.zeros(buffer.shape, dtype=int)
            origin = shards.region(shard).start
            assert halo or plan.target(shard) == shards.region(shard).intersect(Region.whole(case.shape))
            for content in shards.contents(shard, case.shape):
                place = content.place.slices(origin)
                filled[place] += 1
                if content.source is None:
                    buffer[place] = PAD if content.fill is None else content.fill
                elif content.is_repeated:
                    buffer[place] = table[content.source.slices()]
                else:
                    once[place] = 1
            assert (filled == 1).all(), "the contents of a shard overlap, or leave something out"
            np.testing.assert_array_equal(writes[rank][shard], once, err_msg=f"writes to shard {shard} of rank {rank}")
            np.testing.assert_array_equal(buffer, expected[shard], err_msg=f"shard {shard} of rank {rank}: {halo}")
    return counts


def chunks_read(plan: Schedule, chunks: Grid, rank: int) -> list[list[int]]:
    """The chunks that each read of a rank decodes, by looking at each of the elements that somebody needs of it."""
    numbers = cell_numbers(chunks)
    return [
        np.unique(np.concatenate([numbers[p.region.slices()].ravel() for p in read.parts])).tolist()
        for read in plan.outgoing(rank)
    ]
