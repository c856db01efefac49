"""Does the formula for the ranks of a mesh agree with the table that it replaces?"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.blocks import plan_blocks
from shardload.planning.cost import Nodes, plan_cost
from shardload.planning.region import Region
from shardload.planning.schedule import Grid, Part, Parts, RankBoxes, Schedule, Shards, plan_shards
from shardload.planning.selection import select_axes
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import Parallel
from tests.tiers import examples
from tests.unit.brute_force import Case, cases, simulate


@st.composite
def regular_cases(draw: st.DrawFn) -> tuple[Case, int]:
    """Cases whose ranks hold as many consecutive devices each, whether these are equal boxes or not."""
    case = draw(cases())
    n_devices = case.ranks.size
    per_rank = draw(st.sampled_from([1, 1, 2, 3, 4, 6, n_devices]))
    ranks = (np.arange(n_devices) // per_rank).reshape(case.ranks.shape)
    n_ranks = int(ranks.max()) + 1 + draw(st.integers(0, 2))
    n_readers = draw(st.sampled_from([0, 1, n_ranks]) | st.integers(0, n_ranks))
    return replace(case, ranks=ranks, n_ranks=n_ranks, n_readers=n_readers, root=0), per_rank


@examples(150)
@given(regular_cases())
def test_a_formula_is_the_table_it_stands_for(drawn: tuple[Case, int]) -> None:
    case, per_rank = drawn
    boxes = RankBoxes.in_order(case.ranks.shape, per_rank)
    if boxes is None:
        mine = [np.argwhere(case.ranks == r) for r in range(int(case.ranks.max()) + 1)]
        sizes = [np.prod(np.ptp(places, axis=0) + 1) for places in mine]
        assert {len(places) for places in mine} != {per_rank} or sizes != [per_rank] * len(mine), "these are equal boxes"
        return
    assert (boxes.table() == case.ranks).all()
    table = plan_shards(case.shape_global, case.axes, case.ranks)
    formula = plan_shards(case.shape_global, case.axes, boxes)
    assert isinstance(formula.ranks, RankBoxes) and (formula.table.written_out() == table.ranks).all()
    assert (formula.cuts, formula.n_shards, formula.n_replicas) == (table.cuts, table.n_shards, table.n_replicas)
    assert (formula.reach, formula.most_held) == (table.reach, table.most_held)
    assert table.most_held == max(len(table.shards_of(rank)) for rank in range(case.n_ranks))
    for shard in range(table.n_shards):
        assert formula.holders(shard) == table.holders(shard)
        assert [formula.table.holder(shard, k) for k in range(formula.table.n_holders or 0)] == list(table.holders(shard))
    for rank in range(-1, case.n_ranks + 1):
        assert formula.shards_of(rank) == table.shards_of(rank)
    shards, replicas = np.arange(table.n_shards)[:, None], np.arange(table.n_replicas)
    assert (formula.table.ranks_at(shards, replicas) == table.table.ranks_at(shards, replicas)).all()


@examples(150)
@given(regular_cases(), st.integers(1, 4))
def test_a_plan_from_a_formula_is_the_plan_from_the_table(drawn: tuple[Case, int], per_node: int) -> None:
    case, per_rank = drawn
    boxes = RankBoxes.in_order(case.ranks.shape, per_rank)
    table = case.plan()
    if boxes is None:
        return
    formula = replace(table, shards=plan_shards(case.shape_global, case.axes, boxes))
    assert simulate(case, formula) == simulate(case, table)
    for rank in range(case.n_ranks):
        assert list(formula.owned_blocks(rank)) == list(table.owned_blocks(rank))
        assert formula.remote_parts(rank) == table.remote_parts(rank)
    for has_chunks in (True, False):
        layout = case.layout(has_chunks, file_itemsize=4)
        assert plan_cost(formula, layout, Nodes(per_node)) == plan_cost(table, layout, Nodes(per_node))


def test_nothing_is_as_long_as_the_mesh() -> None:
    """A mesh of 2**30 devices: whatever lists them does not end (or does not fit into memory)."""
    boxes = RankBoxes.in_order((1 << 15, 1 << 15))
    assert boxes is not None
    shape = (1 << 15, 1 << 15, 64)
    shards = plan_shards(shape, [(1,), (0,), ()], boxes)
    rank = (1 << 29) + 12345  # at place (2**14, 12345), hence shard (12345, 2**14)
    (shard,) = shards.shards_of(rank)
    assert shards.region(shard) == Region((12345, 1 << 14, 0), (12346, (1 << 14) + 1, 64))
    assert shards.holders(shard) == (rank,)
    chunks = Grid(shape, (1, 1 << 15, 64), (0, 0, 0))
    blocks = plan_blocks(chunks, 4, max_nbytes=1, n_owners=1 << 30)
    plan = Schedule(blocks, shards, 4, 1 << 30, Parallel(1 << 30))
    (sender, (part,)), *others = plan.remote_parts(rank).items()
    assert not others and part.region == shards.region(shard)
    (read,) = plan.owned_blocks(sender)
    assert len(read.parts) == 1 << 15
    assert read.parts[1 << 14] == replace(part, rank=rank)
    f4 = np.dtype("f4")
    cost = plan_cost(plan, SourceLayout.cut(select_axes(None, shape), (1, 1 << 15, 64), f4, f4, "gzip"))
    assert cost.messages == 1 << 30 and not cost.is_exact


@pytest.mark.parametrize(
    ("shape", "per_rank", "fits"),
    [((2, 4), 2, True), ((2, 4), 8, True), ((4, 3), 2, False), ((3, 4), 3, False), ((2, 2), 8, False), ((4, 6), 12, True)],
)
def test_which_ranks_are_boxes(shape: tuple[int, ...], per_rank: int, fits: bool) -> None:
    assert (RankBoxes.in_order(shape, per_rank) is not None) == fits


def test_boxes_that_do_not_fit_the_cuts() -> None:
    boxes = RankBoxes.in_order((2, 3))
    assert boxes is not None
    with pytest.raises(ValueError, match=r"rank table of shape \(2, 3\) does not fit cuts \(3,\)"):
        Shards((6,), (3,), boxes)


def test_ranks_below_zero_are_no_ranks() -> None:
    with pytest.raises(ValueError, match="negative rank"):
        Shards((4,), (2,), np.array([[0], [-1]])).shards_of(0)


@given(regular_cases())
def test_tables_are_told_apart(drawn: tuple[Case, int]) -> None:
    case, _ = drawn
    shards = plan_shards(case.shape_global, case.axes, case.ranks)
    again = plan_shards(case.shape_global, case.axes, case.ranks.copy())
    other = plan_shards(case.shape_global, case.axes, case.ranks + 1)
    assert shards.table.describe() == again.table.describe() != other.table.describe()


def test_parts_are_a_sequence() -> None:
    def part(i: int) -> Part:
        return Part(Region((i,), (i + 1,)), i, 0)

    parts = Parts(part, range(2, 6))
    assert list(parts) == [part(2), part(3), part(4), part(5)] == list(reversed(parts))[::-1]
    assert parts == (part(2), part(3), part(4), part(5)) and parts != [part(2)] and parts != [part(3)] * 4
    assert parts[1:3] == [part(3), part(4)] and parts[-1] == part(5) and len(parts) == 4
    assert math.prod(p.shard for p in parts) == 120 and parts != 4
    with pytest.raises(IndexError):
        parts[4]
