"""Are the counts what a plan really does, and is the way that is chosen the better one?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardload import cost as costs
from shardload import count
from shardload.cost import DIRECT, MODES, PARALLEL, ROOT, Cost, choose_mode, plan_cost
from shardload.plan import Grid, ReadPlan, plan_blocks, plan_row_chunks, plan_shards
from shardload.region import Region
from tests.unit.planning import Case, cases, chunks_read, flat_index, grids, held_regions, simulate


def mode_of(case: Case) -> str:
    return {0: DIRECT, 1: ROOT}.get(case.n_readers, PARALLEL)


def cost_of(case: Case, plan: ReadPlan, **more: Any) -> Cost:
    options: dict[str, Any] = dict(has_chunks=True, file_itemsize=case.itemsize, codec="gzip") | more
    return plan_cost(mode_of(case), plan, case.chunks, **options)


@settings(max_examples=200)
@given(cases())
def test_counts_are_those_of_the_plan_carried_out(case: Case) -> None:
    plan = case.plan()
    done = simulate(case, plan)
    cost = cost_of(case, plan)
    assert cost.is_exact
    assert cost.messages <= done["messages"] == cost_of(case, plan, ranks_per_node=1).messages
    assert cost.moved_nbytes == done["moved"] * case.itemsize
    decoded = [sum(map(len, chunks_read(plan, case.chunks, rank))) for rank in range(case.n_ranks)]
    chunk_nbytes = math.prod(case.cell) * case.itemsize
    assert cost.chunks_decoded == sum(decoded)
    assert cost.decoded_nbytes == sum(decoded) * chunk_nbytes
    array_nbytes = math.prod(case.shape) * case.itemsize
    assert cost.amplification == pytest.approx(cost.decoded_nbytes / array_nbytes if array_nbytes else 1.0)
    if case.n_readers:
        assert cost.n_readers == max(1, sum(n > 0 for n in decoded))
        # Blocks are shared out evenly; only such as are cut short at the end of the array make it less.
        per_block = math.prod(plan.blocks.cell) // math.prod(case.cell)
        assert (
            max(decoded) * chunk_nbytes
            <= cost.reader_nbytes
            <= (max(decoded) + per_block - 1) * chunk_nbytes * max(1, per_block)
        )
        if per_block == 1:
            assert cost.reader_nbytes == max(decoded) * chunk_nbytes
    else:
        assert cost.n_readers == sum(map(bool, held_regions(case)))
        assert cost.reader_nbytes == max(decoded) * chunk_nbytes


@settings(max_examples=100)
@given(cases())
def test_without_chunks_each_byte_counts_as_often_as_it_is_read(case: Case) -> None:
    plan = case.plan()
    cost = cost_of(case, plan, has_chunks=False, file_itemsize=2)
    read = [sum(r.region.size for r in plan.reads(rank)) for rank in range(case.n_ranks)]
    assert cost.chunks_decoded == 0
    assert cost.decoded_nbytes == 2 * sum(read)
    if not case.n_readers:
        assert cost.reader_nbytes == 2 * max(read)
    else:
        assert 2 * max(read) <= cost.reader_nbytes <= 2 * sum(read)
    pieces = [sum(r.size for r in held) for held in held_regions(case)]
    if math.prod(case.shape):
        assert cost.peak_nbytes >= max(pieces) * case.itemsize


@settings(max_examples=150)
@given(cases())
def test_peak_memory_is_pieces_and_staging_where_reads_are_staged(case: Case) -> None:
    case = replace(case, n_readers=0)
    plan = case.plan()
    held = held_regions(case)
    staged = False
    for rank in range(case.n_ranks):
        for read in plan.reads(rank):
            region = plan.shards.region(read.parts[0].shard)
            piece: np.ndarray[Any, Any] = np.empty(region.shape, dtype=np.int8)
            staged |= not piece[read.region.slices(region.start)].flags.c_contiguous
    pieces = max(sum(r.size for r in mine) for mine in held) * case.itemsize
    if 0 in case.shape:
        return  # several shards are one empty region
    full = plan.max_read_size * case.itemsize
    cost = cost_of(case, plan)
    assert cost.peak_nbytes in (pieces, pieces + 2 * full)
    if staged:
        assert cost.peak_nbytes == pieces + 2 * full
    cast = cost_of(case, plan, casts=True, file_itemsize=8, staging_blocks=4)
    assert cast.peak_nbytes == pieces + plan.max_read_size * (4 * case.itemsize + 8)


def test_a_direct_read_without_gaps_needs_no_staging() -> None:
    case = Case((8, 6), ((0,), ()), np.arange(4), 4, (1, 6), (0, 0), 0)
    assert cost_of(case, case.plan()).peak_nbytes == 2 * 6 * 4
    columns = replace(case, axes=((), (0,)), shape=(8, 8), cell=(2, 8))
    assert cost_of(columns, columns.plan()).peak_nbytes == 8 * 2 * 4  # whole rows of the piece, if not of the file
    tiles = replace(columns, ranks=np.arange(2), n_ranks=2, cell=(2, 2), block_nbytes=1)
    assert cost_of(tiles, tiles.plan()).peak_nbytes == (8 * 4 + 2 * 4) * 4


def test_chunks_along_dropped_axes_are_decoded_too() -> None:
    """``select=5`` of a file with chunks (100, 4, 4): each chunk that is decoded is 100 planes, for one that is wanted."""
    case = Case((8, 8), ((0,), (1,)), np.arange(4).reshape(2, 2), 4, (4, 4), (0, 0), 4)
    cost = cost_of(case, case.plan(), chunk_nbytes=100 * 4 * 4 * 4)
    assert (cost.chunks_decoded, cost.amplification) == (4, 100.0)
    assert cost.reader_nbytes == 100 * 4 * 4 * 4
    assert cost.seconds > 50 * cost_of(case, case.plan()).seconds - 1e-3


@settings(max_examples=100)
@given(st.data())
def test_bounds_are_bounds(data: st.DataObject) -> None:
    case = replace(data.draw(cases()), n_readers=data.draw(st.integers(1, 2)))
    case = replace(case, n_readers=min(case.n_readers, case.n_ranks), root=0)
    plan = case.plan(data.draw(grids(case.shape)))
    exact = cost_of(case, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count, "_MAX_TRIPLES", 0)
        bound = cost_of(case, plan)
    assert exact.is_exact
    assert bound.is_exact == (plan.blocks.n_cells == 0)
    assert bound.messages >= exact.messages and bound.moved_nbytes >= exact.moved_nbytes
    same: dict[str, Any] = dict(messages=0, moved_nbytes=0, is_exact=True, seconds=0.0, same_node=1.0)
    assert replace(bound, **same) == replace(exact, **same)


@settings(max_examples=100)
@given(cases())
def test_runs_of_a_piece_against_its_elements(case: Case) -> None:
    if math.prod(case.shape) == 0:
        return
    plan = case.plan()
    first = plan.shards.region(0).intersect(Region.whole(case.shape))
    assert first is not None
    flat = flat_index(case.shape)[first.slices()].ravel()
    assert costs._runs_per_piece(plan) == 1 + int((np.diff(flat) != 1).sum())


# --- which way


def plan_all(
    shape: tuple[int, ...], cell: tuple[int, ...] | None, axes: Any, mesh: tuple[int, ...], codec: str
) -> tuple[dict[str, Cost], int]:
    """The costs of a float32 array over a mesh with a rank per device, as `prepare` counts them."""
    n_ranks = math.prod(mesh)
    shards = plan_shards(shape, axes, np.arange(n_ranks).reshape(mesh))
    chunks = Grid(shape, cell or plan_row_chunks(shape, 4), (0,) * len(shape))
    found = {}
    for mode, n_readers in {ROOT: 1, PARALLEL: n_ranks, DIRECT: 0}.items():
        within = shards.shard_shape if mode == DIRECT else None
        blocks = plan_blocks(chunks, 4, max_nbytes=16 << 20, n_readers=n_readers, within=within)
        plan = ReadPlan(blocks, shards, 4, n_ranks, n_readers)
        found[mode] = plan_cost(mode, plan, chunks, has_chunks=cell is not None, file_itemsize=4, codec=codec)
    return found, n_ranks


CUBE = (512, 512, 512)
PENCIL = ((), (0,), (1,))


@pytest.mark.parametrize(
    ("shape", "cell", "axes", "mesh", "codec", "expected", "text"),
    [
        (CUBE, (1, 512, 512), PENCIL, (2, 2), "gzip", PARALLEL, "decode 4x the array"),
        (CUBE, (1, 512, 512), PENCIL, (4, 4), "zstd+shuffle", PARALLEL, "decode 16x the array"),
        (CUBE, (64, 64, 64), PENCIL, (2, 2), "gzip", DIRECT, "1x the array"),
        (CUBE, (1, 512, 512), ((0,), (), ()), (4,), "gzip", DIRECT, "1x the array"),
        (CUBE, None, ((0,), (1,), ()), (2, 2), "none", DIRECT, "1x the array"),
        (CUBE, (1, 512, 512), PENCIL, (1, 1), "gzip", DIRECT, "one process"),
        ((0, 512, 512), (1, 512, 512), PENCIL, (2, 2), "gzip", DIRECT, "the array is empty"),
        (CUBE, (64, 512, 512), ((), (), ()), (8,), "gzip", PARALLEL, "decode 8x the array"),
        (CUBE, (512, 512, 512), ((), (), ()), (8,), "gzip", DIRECT, "8x the array"),  # others would only wait
    ],
)
def test_choice(shape: Any, cell: Any, axes: Any, mesh: Any, codec: str, expected: str, text: str) -> None:
    found, n_ranks = plan_all(shape, cell, axes, mesh, codec)
    mode, why = choose_mode(found, n_ranks)
    assert mode == expected and text in why, (mode, why, found)
    assert choose_mode(dict(reversed(found.items())), n_ranks) == (mode, why), "the order of the ways decides nothing"
    assert tuple(found) == MODES


def test_a_simpler_way_wins_unless_another_is_clearly_better() -> None:
    found, _ = plan_all(CUBE, (1, 512, 512), PENCIL, (2, 2), "gzip")
    parallel = found[PARALLEL]
    for factor, expected in ((1.0, DIRECT), (1.1, DIRECT), (1.2, PARALLEL)):
        tried = found | {DIRECT: replace(found[DIRECT], seconds=factor * parallel.seconds)}
        mode, why = choose_mode(tried, 4)
        assert mode == expected
        assert ("about 1.2x faster" in why) == (mode == PARALLEL)


def test_slower_codecs_cost_more_and_unknown_ones_are_not_free() -> None:
    rates = {c: costs._decode_rate(c, True) for c in ("none", "zstd", "gzip", "gzip+shuffle", "shuffle+zstd", "new-codec")}
    assert rates["none"] > rates["zstd"] > rates["gzip"] == rates["gzip+shuffle"]
    assert rates["shuffle+zstd"] == rates["zstd"] and 0 < rates["new-codec"] < rates["gzip"]
    assert costs._decode_rate("shuffle", True) == rates["none"]
    assert costs._decode_rate("gzip", False) > rates["none"]


def test_a_large_plan_is_counted_within_bounds_at_once() -> None:
    """16384**3 on 256 x 256 ranks: three ways and two kinds of chunks. (No timing here; the timeout is the limit.)"""
    shape = (16384,) * 3
    for cell in ((256,) * 3, (1, 16384, 16384)):
        found, n_ranks = plan_all(shape, cell, PENCIL, (256, 256), "gzip")
        assert not found[PARALLEL].is_exact and found[DIRECT].is_exact
        assert found[DIRECT].chunks_decoded == math.prod(shape) // math.prod(cell) * (16 if cell[0] > 1 else 65536)
        assert choose_mode(found, n_ranks)[0] == PARALLEL
