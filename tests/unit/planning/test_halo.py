"""Has each shard its neighbours' rows? Against `numpy.pad`, element by element, and each chunk is still decoded once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.cost import plan_cost
from shardload.planning.region import Region, plan_blocks
from shardload.planning.schedule import MAX_MESSAGE_NBYTES, Schedule, plan_direct
from shardload.planning.shards import Halo, plan_shards
from tests.tiers import examples
from tests.unit.brute_force import Case, cases, cell_numbers, chunks_read, every_way, flat_index, grids

Array = np.ndarray[Any, Any]
PAD = -7


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


def padded(table: Array, shape_global: tuple[int, ...], halo: Halo) -> Array:
    """The array beyond its ends, by NumPy: first the padding, then axis by axis what the edge rule says."""
    if not table.ndim:
        return table
    out = np.pad(table, [(0, m - n) for n, m in zip(table.shape, shape_global, strict=True)], constant_values=PAD)
    for axis, (h, edge) in enumerate(zip(halo.widths, halo.edges, strict=True)):
        width = [(h, h) if k == axis else (0, 0) for k in range(table.ndim)]
        if h and isinstance(edge, str):
            out = np.pad(out, width, mode=edge)  # type: ignore[call-overload]
        elif h:
            out = np.pad(out, width, constant_values=edge)
    return out


def expected_of(case: Case, halo: Halo) -> dict[int, Array]:
    """Each shard, by its number: a window of the array beyond its ends."""
    parts = [math.prod(case.ranks.shape[m] for m in cut) for cut in case.axes]
    around = padded(flat_index(case.shape), case.shape_global, halo)
    shards = {}
    for number, place in enumerate(np.ndindex(*parts)):
        window = []
        for i, n, p, h in zip(place, case.shape_global, parts, halo.widths, strict=True):
            window.append(slice(i * (n // p), (i + 1) * (n // p) + 2 * h))
        shards[number] = around[tuple(window)]
    return shards


def carry_out(case: Case, halo: Halo, plan: Schedule) -> None:
    """Move every part between the ranks' buffers, fill in the rest, and compare with NumPy's."""
    shards = plan.shards
    table, expected = flat_index(case.shape), expected_of(case, halo)
    assert math.prod(shards.cuts) == len(expected)
    buffers: list[dict[int, Array]] = []
    for rank in range(case.n_ranks):
        mine = shards.shards_of(rank)
        assert {s: expected[s].shape for s in mine} == dict.fromkeys(mine, shards.shard_shape)
        buffers.append({s: np.full(shards.shard_shape, -1, dtype=np.int64) for s in mine})
        for section in shards.sections_of(rank):
            assert shards.shard_of(section) in mine
            assert rank in shards.holders(shards.shard_of(section))
    writes = [{s: np.zeros(b.shape, dtype=int) for s, b in mine.items()} for mine in buffers]
    order: dict[tuple[int, int], list[tuple[Region, int]]] = {}
    for sender in range(case.n_ranks):
        for read in plan.outgoing(sender):
            assert read.region.size <= plan.max_block_size
            for part in read.parts:
                assert read.region.contains(part.region)
                assert part.region.size > 0
                assert plan.is_direct or part.region.size * case.itemsize <= plan.max_message_nbytes
                whole, shard = shards.grid.region(part.target), shards.shard_of(part.target)
                assert whole.contains(part.region)
                held = shards.place_of(part.target)
                place = part.region.slices([s - p + o for s, p, o in zip(
                    whole.start, held.start, shards.region(shard).start, strict=True
                )])  # fmt: skip
                buffers[part.rank][shard][place] = table[part.region.slices()]
                writes[part.rank][shard][place] += 1
                if part.rank != sender:
                    order.setdefault((sender, part.rank), []).append((part.region, part.target))
    for rank in range(case.n_ranks):
        parts_of = {s: [(p.region, p.target) for p in parts] for s, parts in plan.incoming(rank).items()}
        assert parts_of == {s: got for (s, receiver), got in order.items() if receiver == rank}
        for shard, buffer in buffers[rank].items():
            filled = np.zeros(buffer.shape, dtype=int)
            origin = shards.region(shard).start
            for content in shards.contents(shard, case.shape):
                place = content.place.slices(origin)
                filled[place] += 1
                if content.source is None:
                    buffer[place] = PAD if content.fill is None else content.fill
                elif content.is_repeated:
                    buffer[place] = table[content.source.slices()]
                else:
                    assert (writes[rank][shard][place] == 1).all(), "an element of the file arrived twice, or never"
            assert (filled == 1).all(), "the contents of a shard overlap, or leave something out"
            np.testing.assert_array_equal(buffer, expected[shard], err_msg=f"shard {shard} of rank {rank}: {halo}")


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
    carry_out(case, halo, plan)


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
