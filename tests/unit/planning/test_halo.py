"""Has each shard its neighbours' rows? Against `numpy.pad`, element by element, and each chunk is still decoded once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.cost import plan_cost
from shardload.planning.region import Region, plan_blocks
from shardload.planning.schedule import MAX_MESSAGE_NBYTES, Schedule, plan_direct
from shardload.planning.shards import Halo, plan_shards
from tests.tiers import examples
from tests.unit.brute_force import Case, cases, cell_numbers, chunks_read, every_way, grids, simulate


def with_halo(data: st.DataObject, case: Case) -> tuple[Case, Halo]:
    """A case, cut down where it must be so that an axis with a halo divides evenly, and a halo for it."""
    shape, widths, edges = list(case.shape), [], []
    for axis, (n, cut) in enumerate(zip(case.shape, case.axes, strict=True)):
        parts = math.prod(case.ranks.shape[m] for m in cut)
        h = data.draw(st.integers(0, n // parts), label=f"halo of axis {axis}")
        if h:
            shape[axis] = n // parts * parts
        widths.append(h)
        edges.append(data.draw(st.sampled_from(["wrap", "edge", -3 - axis]), label=f"edge of axis {axis}"))
    return replace(case, shape=tuple(shape)), Halo(tuple(widths), tuple(edges))


@examples(150)
@given(st.data())
def test_every_shard_is_a_window_of_numpys_pad(data: st.DataObject) -> None:
    """Wrong if a halo came from the wrong neighbour, wrapped where it must not, or corners were not those of the diagonal."""
    case, halo = with_halo(data, data.draw(cases()))
    shards = plan_shards(case.shape_global, case.axes, case.ranks).with_halo(halo)
    limit = data.draw(st.sampled_from([MAX_MESSAGE_NBYTES, 3 * case.itemsize]))
    if data.draw(st.booleans()) or not case.n_readers:
        within = None if case.n_readers else shards.reach if case.is_merged else shards.section_shape
        blocks = plan_blocks(
            case.chunks, case.itemsize, max_nbytes=case.block_nbytes, n_owners=case.n_readers or None, within=within
        )
    else:
        blocks = data.draw(grids(case.shape))
    blocks = replace(blocks, shape=case.shape)
    plan = Schedule(blocks, shards, case.itemsize, case.n_ranks, case.owners, limit, case.is_merged and not case.n_readers)
    simulate(case, plan, halo)


@examples(100)
@given(st.data())
def test_what_a_load_costs(data: st.DataObject) -> None:
    """Wrong if rows that several shards have were read for each of them, in the job or by one rank, or were not counted."""
    case, halo = with_halo(data, data.draw(cases()))
    shards = plan_shards(case.shape_global, case.axes, case.ranks).with_halo(halo)
    layout = case.layout()
    for mode, plan in every_way(layout, shards, case.n_ranks, case.block_nbytes).items():
        per_rank = [[n for read in chunks_read(plan, layout.chunks, rank) for n in read] for rank in range(case.n_ranks)]
        for mine in per_rank:
            assert len(mine) == len(set(mine)), f"{mode}: a rank decodes a chunk twice"
        if mode != "direct":
            everybody = sorted(n for mine in per_rank for n in mine)
            assert everybody == np.unique(cell_numbers(layout.chunks)).tolist(), f"{mode}: each chunk once"
        cost = plan_cost(plan, layout)
        if mode == "direct":
            met, busiest = cost.chunks_decoded, cost.reader_nbytes // layout.chunk_nbytes
            decoded = list(map(len, per_rank))
            if shards.most_held == 1 and shards.n_holders:
                assert (met, busiest) == (sum(decoded), max(decoded))
            elif not plan.is_merged:
                assert met >= sum(decoded) and busiest >= max(decoded)
            continue
        sent = [part for r in range(case.n_ranks) for parts in plan.incoming(r).values() for part in parts]
        assert cost.moved_nbytes >= sum(part.region.size for part in sent) * case.itemsize
        assert cost.messages >= len(sent) or plan.max_part_nbytes > plan.max_message_nbytes


@examples(60)
@given(st.data())
def test_each_element_is_the_own_of_one_shard(data: st.DataObject) -> None:
    """Wrong if missing chunks counted the rows of a halo a second time."""
    case, halo = with_halo(data, data.draw(cases()))
    shards = plan_shards(case.shape_global, case.axes, case.ranks).with_halo(halo)
    by_section = np.zeros(case.shape, dtype=int)
    for section in range(shards.grid.n_cells):
        true = shards.grid.region(section).intersect(Region.whole(case.shape))
        own = None if true is None else shards.own(section, true)
        if own is not None:
            by_section[own.slices()] += 1
    assert (by_section == 1).all()


def test_a_contiguous_array_is_read_section_by_section() -> None:
    """Wrong if a rank read all that lies between the two ends of the array, because its shard has both."""
    case = Case((64, 8), ((0,), ()), np.arange(4), 4, (1, 8), (0, 0), 0)
    shards = plan_shards((64, 8), case.axes, case.ranks).with_halo(Halo((2, 0), ("wrap", "wrap")))
    plan = plan_direct(case.layout(has_chunks=False), shards, 4, max_nbytes=1 << 20)
    assert plan.is_direct and not plan.is_merged
    assert [str(read.region) for read in plan.outgoing(0)] == ["[0:18, 0:8]", "[62:64, 0:8]"]
    assert [str(read.region) for read in plan.outgoing(1)] == ["[14:34, 0:8]"]
