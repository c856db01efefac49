"""Does every element of every shard arrive once, from the right place, and is each chunk decoded once?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardload.planning.region import BLOCKS_PER_OWNER, Grid, Region, plan_blocks
from shardload.planning.schedule import MAX_MESSAGE_NBYTES, Block, Owners, Part, Schedule, SourceLayout, plan_direct
from shardload.planning.selection import select_axes
from shardload.planning.shards import Shards, plan_shards
from tests.tiers import examples
from tests.unit.brute_force import Case, cases, cell_numbers, chunks_read, grids, held_regions, simulate


def check_chunks_and_owners(case: Case, plan: Schedule) -> None:
    """Each chunk once in the job, by readers whose blocks are runs in C order, shared out evenly."""
    n_blocks = plan.blocks.n_cells
    owned = [list(plan.blocks_of(rank)) for rank in range(case.n_ranks)]
    assert sorted(b for mine in owned for b in mine) == list(range(n_blocks)), "each block has one reader"
    for rank, mine in enumerate(owned):
        assert all(plan.owner(b) == rank for b in mine)
        assert plan.is_owner(rank) == bool(mine)
        assert mine == list(range(mine[0], mine[-1] + 1)) if mine else True
    firsts = [mine[0] for mine in owned if mine]
    if case.n_readers > 1:
        assert firsts == sorted(firsts), "readers go through the file in rank order"
        busy = [len(mine) for mine in owned if mine]
        assert len(busy) == min(case.n_readers, n_blocks)
        assert not busy or max(busy) - min(busy) <= 1
    elif n_blocks:
        assert [rank for rank, mine in enumerate(owned) if mine] == [case.root]
    decoded = [number for rank in range(case.n_ranks) for read in chunks_read(plan, case.chunks, rank) for number in read]
    assert len(decoded) == len(set(decoded)), "a chunk is decoded twice"
    assert set(decoded) == set(np.unique(cell_numbers(case.chunks)).tolist()), "a chunk is not read"
    for rank in range(case.n_ranks):
        mine = [number for read in chunks_read(plan, case.chunks, rank) for number in read]
        assert mine == list(range(mine[0], mine[-1] + 1)) if mine else True, "reads are not a run of the file"


@examples(250)
@given(cases())
def test_every_element_arrives_once_from_the_right_place(case: Case) -> None:
    plan = case.plan()
    simulate(case, plan)
    for rank in range(case.n_ranks):
        regions, around = [read.region for read in plan.outgoing(rank)], plan.around(rank)
        assert bool(regions) == (around is not None)
        assert around is None or all(around.contains(region) for region in regions), "a file would not be asked about a block"
        assert len(regions) != 1 or around == regions[0]
        if around is not None and around.ndim:  # no larger than the rows of blocks that it goes through
            assert around.start[0] == min(region.start[0] for region in regions)
            assert around.stop[0] == max(region.stop[0] for region in regions)
    if case.n_readers:
        check_chunks_and_owners(case, plan)
    else:
        for rank in range(case.n_ranks):
            assert plan.incoming(rank) == {}
            assert len(plan.blocks_of(rank)) == 0
            assert plan.is_owner(rank) == bool(held_regions(case)[rank])
            assert all(part.rank == rank for read in plan.outgoing(rank) for part in read.parts)


# --- plans that are wrong in the ways in which one might get them wrong, and must be found out

SQUARE = np.arange(4).reshape(2, 2)
UNEVEN = Case((7, 6), ((0,), (1,)), SQUARE, 4, (1, 6), (0, 0), 3, block_nbytes=1)
REPLICAS = Case((6, 4), ((0,), ()), SQUARE[::-1], 4, (2, 3), (1, 2), 4, block_nbytes=1)
PADDED = Case((5, 3), ((0,), (1,)), SQUARE.T, 4, (2, 2), (0, 0), 2, block_nbytes=1)
DIRECT = Case((5, 6), ((0,), (1,)), SQUARE, 4, (2, 4), (1, 3), 0, block_nbytes=1)


class RemainderDropped(Schedule):
    owners: Owners

    def blocks_of(self, rank: int) -> range:
        share = self.blocks.n_cells // self.owners.n
        return range(rank * share, (rank + 1) * share) if rank < self.owners.n else range(0)


class OneReplicaOnly(Schedule):
    def outgoing(self, rank: int) -> Iterator[Block]:
        for read in super().outgoing(rank):
            first: dict[int, Part] = {}
            for part in read.parts:
                first.setdefault(part.target, part)
            yield Block(read.region, tuple(first.values()))


class PaddingIsRead(Schedule):
    def target(self, shard: int) -> Region | None:
        return self.shards.region(shard)


class SwappedPlaces(Schedule):
    """Parts go to the right rank but to the region of the transposed shard."""

    def outgoing(self, rank: int) -> Iterator[Block]:
        for read in super().outgoing(rank):
            yield Block(read.region, tuple(Part(p.region, [0, 2, 1, 3][p.target], p.rank) for p in read.parts))


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (UNEVEN, RemainderDropped),
        (REPLICAS, OneReplicaOnly),
        (PADDED, PaddingIsRead),
        (UNEVEN, SwappedPlaces),
        (DIRECT, PaddingIsRead),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_wrong_plan_is_found_out(case: Case, kind: type[Schedule]) -> None:
    def check(plan: Schedule) -> None:
        simulate(case, plan)
        if case.n_readers:
            check_chunks_and_owners(case, plan)

    check(case.plan(max_message_nbytes=2 * case.itemsize))
    with pytest.raises(AssertionError):
        check(case.plan(kind=kind, max_message_nbytes=2 * case.itemsize))


@pytest.mark.parametrize("wrong", ["transposed", "a replica elsewhere"])
def test_a_wrong_rank_table_is_found_out(wrong: str) -> None:
    case = REPLICAS if wrong == "a replica elsewhere" else UNEVEN
    right = case.plan()
    ranks = right.shards.ranks.copy()
    if wrong == "transposed":
        ranks[[1, 2]] = ranks[[2, 1]]
    else:
        ranks[0, 1], ranks[1, 1] = ranks[1, 1], ranks[0, 1]
    shards = Shards(right.shards.shape_global, right.shards.cuts, ranks)
    simulate(case, right)
    with pytest.raises(AssertionError, match="the plan says"):
        simulate(case, Schedule(right.blocks, shards, 4, case.n_ranks, case.owners))


@pytest.mark.each_value
@pytest.mark.parametrize("n_readers", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("n_blocks", [1, 2, 5, 7, 8, 100])
def test_readers_are_spread_over_the_ranks(n_readers: int, n_blocks: int) -> None:
    shards = plan_shards((n_blocks,), [()], np.arange(7))
    plan = Schedule(Grid((n_blocks,), (1,), (0,)), shards, 4, 7, Owners(root=3) if n_readers == 1 else Owners(n_readers))
    readers = [rank for rank in range(7) if plan.is_owner(rank)]
    assert len(readers) == min(n_readers, n_blocks)
    if n_readers == 1:
        assert readers == [3]
    elif n_blocks >= n_readers:
        gaps = np.diff([*readers, 7 + readers[0]])
        assert gaps.max() - gaps.min() <= 1


# --- grids


@examples(200)
@given(st.data())
def test_grid_against_every_element(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
    grid = data.draw(grids(shape))
    numbers = cell_numbers(grid)
    assert grid.n_cells == math.prod(grid.counts) == (int(numbers.max()) + 1 if numbers.size else 0)
    for number in range(grid.n_cells):
        region = grid.region(number)
        assert (numbers == number).sum() == region.size > 0
        assert (numbers[region.slices()] == number).all()
        assert grid.index(number) == tuple(int(i) for i in np.unravel_index(number, grid.counts)) if shape else True
    bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    region = Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    met = np.unique(numbers[region.slices()]).tolist()
    assert list(grid.meeting(region)) == met
    assert grid.n_meeting(region) == len(met)


@pytest.mark.parametrize(
    ("shape", "cell", "phase"),
    [((4,), (0,), (0,)), ((4,), (2,), (2,)), ((4,), (2,), (-1,)), ((-1,), (2,), (0,)), ((4,), (2, 2), (0,)), ((4,), (2,), ())],
)
def test_grids_that_cannot_be(shape: tuple[int, ...], cell: tuple[int, ...], phase: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="grid of shape"):
        Grid(shape, cell, phase)


# --- shards


@examples(150)
@given(cases())
def test_shards_against_every_device(case: Case) -> None:
    shards = plan_shards(case.shape_global, case.axes, case.ranks)
    held = held_regions(case)
    shards_held = [shards.shards_of(rank) for rank in range(case.n_ranks)]
    n_holders = [len(shards.holders(shard)) for shard in range(shards.n_shards)]
    assert len(shards.ranks) == math.prod(shards.cuts)
    assert shards.ranks.size == case.ranks.size
    covered = np.zeros(case.shape_global, dtype=int)
    for shard in range(len(shards.ranks)):
        region = shards.region(shard)
        covered[region.slices()] += 1
        assert list(shards.holders(shard)) == sorted(set(shards.ranks[shard].tolist()))
        assert all(shard in shards.shards_of(rank) for rank in shards.holders(shard))
        assert shards.grid.region(shard) == region
        if region.size:
            assert {rank for rank, regions in enumerate(held) if region in regions} == set(shards.holders(shard))
    assert (covered == 1).all()
    for rank in range(case.n_ranks):
        assert {shards.region(s) for s in shards_held[rank]} == held[rank]
        assert list(shards_held[rank]) == sorted(set(shards_held[rank]))
    assert shards.shards_of(-1) == shards.shards_of(case.n_ranks) == ()
    assert (shards.n_holding, shards.most_held) == (sum(map(bool, held)), max(map(len, shards_held)))
    assert shards.most_holders == max(n_holders)
    assert shards.n_holders == (n_holders[0] if len(set(n_holders)) == 1 else None)
    for axis, span in enumerate(shards.spans):
        places = [[int(np.unravel_index(s, shards.cuts)[axis]) for s in mine] for mine in shards_held if mine]
        assert span == max(max(mine) - min(mine) + 1 for mine in places)
    again, other = (plan_shards(case.shape_global, case.axes, case.ranks + k) for k in (0, 1))
    assert shards.describe_ranks() == again.describe_ranks() != other.describe_ranks()


# --- blocks


@examples(250)
@given(cases(), st.integers(1, 4000), st.integers(1, 9), st.integers(1, BLOCKS_PER_OWNER))
def test_blocks_are_whole_chunks_in_file_order_below_the_cap(case: Case, cap: int, n_readers: int, per_owner: int) -> None:
    """Wrong, too, if one reader had to read more than the others where there are fewer blocks than usual."""
    chunks = case.chunks
    usual = plan_blocks(chunks, case.itemsize, max_nbytes=cap, n_owners=n_readers)
    blocks = plan_blocks(chunks, case.itemsize, max_nbytes=cap, n_owners=n_readers, per_owner=per_owner)
    assert blocks.shape == chunks.shape and blocks.phase == chunks.phase
    of_chunk, of_block = cell_numbers(chunks), cell_numbers(blocks)
    pairs = {(int(b), int(c)) for b, c in zip(of_block.flat, of_chunk.flat, strict=True)}
    assert len(pairs) == chunks.n_cells, "a chunk lies in two blocks"
    # In the order of the file: block after block is chunk after chunk.
    assert [c for _, c in sorted(pairs)] == list(range(chunks.n_cells))
    held = np.bincount(of_block.ravel(), minlength=blocks.n_cells)
    per_block = np.bincount([b for b, _ in pairs], minlength=blocks.n_cells)
    assert all(per_block[held * case.itemsize > cap] == 1), "a block above the cap has more than one chunk"
    # Several blocks per reader where there are chunks for it, else a block per chunk.
    assert usual.n_cells >= min(chunks.n_cells, BLOCKS_PER_OWNER * n_readers)
    if usual.n_cells >= BLOCKS_PER_OWNER * n_readers:
        assert -(-usual.n_cells // n_readers) <= 1.25 * usual.n_cells / n_readers, "the busiest has a quarter more"
    assert blocks == usual or (blocks.n_cells % n_readers == 0 and blocks.n_cells <= usual.n_cells)
    assert blocks.n_cells >= min(chunks.n_cells, per_owner * n_readers)


@examples(150)
@given(cases(), st.integers(1, 4000), st.booleans())
def test_direct_reads_stay_below_the_cap(case: Case, cap: int, is_merged: bool) -> None:
    """Wrong if a chunk were decoded twice for one shard or, merged, for two shards of one rank."""
    assume(case.n_readers == 0 or math.prod(case.shape) > 0)
    shards = plan_shards(case.shape_global, case.axes, case.ranks)
    within = shards.reach if is_merged else shards.shard_shape
    blocks = plan_blocks(case.chunks, case.itemsize, max_nbytes=cap, within=within)
    plan = Schedule(blocks, shards, case.itemsize, case.n_ranks, None, is_merged=is_merged)
    simulate(replace(case, n_readers=0), plan)
    largest = 0
    for rank in range(case.n_ranks):
        found = list(zip(plan.outgoing(rank), chunks_read(plan, case.chunks, rank), strict=True))
        for read, numbers in found:
            largest = max(largest, read.region.size)
            assert read.region.size * case.itemsize <= cap or len(numbers) == 1
        for shard in [None] if is_merged else shards.shards_of(rank):
            decoded = [n for read, numbers in found for n in numbers if shard in (None, read.parts[0].target)]
            assert len(decoded) == len(set(decoded))
    assert largest <= plan.max_block_size
    cell_nbytes = math.prod(map(min, case.cell, within)) * case.itemsize
    # ... and the bound on a read, which staging buffers are made of, is no looser than the cap.
    assert plan.max_block_size * case.itemsize <= max(cap, cell_nbytes) * 2 ** len(case.shape)


@pytest.mark.parametrize(
    ("cell", "axes", "per_rank", "merged"),
    [
        ((1, 64, 64), ((), (0,), (1,)), 8, True),  # planes as pencils
        ((1, 64, 64), ((), (0,), (1,)), 4, True),
        ((1, 64, 64), ((), (0,), (1,)), 1, False),  # a device each: nothing to share
        ((1, 64, 64), ((0,), (), ()), 8, False),  # no chunk is in two shards
        ((16, 16, 16), ((), (0,), (1,)), 8, False),
        ((16, 16, 24), ((), (0,), (1,)), 8, True),
        (None, ((0,), (), ()), 8, False),  # each shard lies in the file as in memory
        (None, ((0,), (1,), ()), 8, True),  # its runs begin every 16 KiB
        (None, ((), (), (1,)), 8, True),  # of each row a part: between them lies what others need
        (None, ((), (), (1,)), 2, True),
        (None, ((), (), (1,)), 1, False),
    ],
)
def test_what_shards_of_a_rank_share_is_read_once(cell: Any, axes: Any, per_rank: int, merged: bool) -> None:
    shape, devices = (64, 64, 64), np.arange(8).reshape(2, 4)
    shards = plan_shards(shape, axes, devices // per_rank)
    f4 = np.dtype("f4")
    layout = SourceLayout.cut(select_axes(None, shape), cell, f4, f4)
    plan = plan_direct(layout, shards, 8 // per_rank, max_nbytes=1 << 18)
    assert plan.is_direct and plan.is_merged == merged


def test_a_message_of_more_than_a_gibibyte_is_split() -> None:
    assert MAX_MESSAGE_NBYTES == 1 << 30
    shards = plan_shards((3, 1 << 28), [(), ()], np.array([1]))
    plan = Schedule(Grid((3, 1 << 28), (3, 1 << 28), (0, 0)), shards, 8, 2, Owners())
    (read,) = plan.outgoing(0)
    assert all(p.region.size * 8 <= MAX_MESSAGE_NBYTES for p in read.parts)
    assert sum(p.region.size for p in read.parts) == 3 << 28
    assert [(p.region, p.target) for p in read.parts] == [(p.region, p.target) for p in plan.incoming(1)[0]]
