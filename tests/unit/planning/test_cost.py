"""Are the counts what a plan really does, and is the chosen way of reading the better one?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardload.planning import traffic as count
from shardload.planning.blocks import count_runs, plan_row_chunks, run_stride
from shardload.planning.cost import Cost, Nodes, choose_mode, plan_cost
from shardload.planning.rates import EXCHANGE_SECONDS, decode_rate
from shardload.planning.region import Region
from shardload.planning.schedule import Grid, Schedule, plan_shards
from shardload.planning.selection import select_axes
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import DIRECT, MODES, PARALLEL, ROOT, Direct, Parallel, plan_schedules
from tests.tiers import examples
from tests.unit.brute_force import (
    MAX_DEVICES,
    MAX_SIZE,
    Case,
    cases,
    chunks_read,
    elements_read,
    flat_index,
    grids,
    held_regions,
    simulate,
)
from tests.unit.eight_devices import CHECKS, outcome


@pytest.fixture(autouse=True, scope="module")
def _counts_of_cases_are_exact() -> Iterator[None]:
    """A random case may have more parts than are counted one by one otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count, "_MAX_TRIPLES", MAX_SIZE * MAX_DEVICES)
        yield


def cost_of(
    case: Case,
    plan: Schedule,
    ranks_per_node: int | None = None,
    n_cores: int | None = None,
    staging_blocks: int = 2,
    **more: Any,
) -> Cost:
    return plan_cost(plan, case.layout(**more), Nodes(ranks_per_node, n_cores), staging_blocks=staging_blocks)


@examples(80)
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


# Rank 0 holds the first and the last of three shards, and rank 1 the one between: a merged block of rank 0 has a gap.
WITH_A_GAP = Case((3, 1), ((0,), ()), np.array([0, 1, 0]), 2, (1, 1), (0, 0), 0, is_merged=True)


@examples(50)
@given(cases())
@example(WITH_A_GAP)
def test_without_chunks_each_byte_counts_as_often_as_it_is_read(case: Case) -> None:
    plan = case.plan()
    cost = cost_of(case, plan, has_chunks=False, file_itemsize=2)
    read = [elements_read(plan, rank) for rank in range(case.n_ranks)]
    assert cost.chunks_decoded == 0
    assert cost.decoded_nbytes == 2 * sum(read)
    if not case.n_readers:
        assert cost.reader_nbytes == 2 * max(read)
    else:
        assert 2 * max(read) <= cost.reader_nbytes <= 2 * sum(read)
    pieces = [sum(r.size for r in held) for held in held_regions(case)]
    if math.prod(case.shape):
        assert cost.peak_nbytes >= max(pieces) * case.itemsize


@examples(60)
@given(cases())
def test_peak_memory_is_pieces_and_staging_where_reads_are_staged(case: Case) -> None:
    case = replace(case, n_readers=0, is_merged=False)
    plan = case.plan()
    held = held_regions(case)
    staged = False
    for rank in range(case.n_ranks):
        for read in plan.owned_blocks(rank):
            region = plan.shards.region(read.parts[0].shard)
            piece: np.ndarray[Any, Any] = np.empty(region.shape, dtype=np.int8)
            staged |= not piece[read.region.slices(region.start)].flags.c_contiguous
    pieces = max(sum(r.size for r in mine) for mine in held) * case.itemsize
    if 0 in case.shape:
        return  # several shards are one empty region
    full = plan.max_block_size * case.itemsize
    cost = cost_of(case, plan)
    assert cost.peak_nbytes in (pieces, pieces + 2 * full)
    if staged:
        assert cost.peak_nbytes == pieces + 2 * full
    cast = cost_of(case, plan, casts=True, file_itemsize=8, staging_blocks=4)
    assert cast.peak_nbytes == pieces + plan.max_block_size * (4 * case.itemsize + 8)


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
    cost = cost_of(case, case.plan(), rows=100)
    assert (cost.chunks_decoded, cost.amplification) == (4, 100.0)
    assert cost.reader_nbytes == 100 * 4 * 4 * 4
    plain = cost_of(case, case.plan()).seconds
    assert cost.seconds - EXCHANGE_SECONDS > 50 * (plain - EXCHANGE_SECONDS) - 1e-3


@examples(50)
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


@examples(50)
@given(cases())
def test_runs_of_a_piece_against_its_elements(case: Case) -> None:
    if math.prod(case.shape) == 0:
        return
    plan = case.plan()
    first = plan.shards.region(0).intersect(Region.whole(case.shape))
    assert first is not None
    flat = flat_index(case.shape)[first.slices()].ravel()
    assert count_runs(case.shape, plan.shards.shard_shape) == 1 + int((np.diff(flat) != 1).sum())


# --- which way


@pytest.mark.parametrize("name", [n for n in CHECKS if n.startswith("load_")])
def test_on_eight_devices(name: str) -> None:
    assert not outcome(name), outcome(name)


def plan_all(
    shape: tuple[int, ...],
    cell: tuple[int, ...] | None,
    axes: Any,
    mesh: tuple[int, ...],
    codec: str,
    per_rank: int = 1,
    nodes: Nodes | None = None,
) -> tuple[dict[str, Cost], int]:
    """The costs of a float32 array over a mesh with a rank for every so many devices, as `prepare` counts them."""
    n_ranks = math.prod(mesh) // per_rank
    shards = plan_shards(shape, axes, np.arange(math.prod(mesh)).reshape(mesh) // per_rank)
    f4 = np.dtype("f4")
    chunks = Grid(shape, cell or plan_row_chunks(shape, 4), (0,) * len(shape))
    layout = SourceLayout(select_axes(None, shape), chunks, cell, f4, f4, codec)
    plans = plan_schedules(layout, shards, n_ranks, max_nbytes=16 << 20)
    return {mode: plan_cost(plan, layout, nodes) for mode, plan in plans.items()}, n_ranks


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


@pytest.mark.parametrize(
    ("cell", "axes", "per_rank", "expected", "decoded"),
    [
        ((1, 512, 512), PENCIL, 8, DIRECT, 512),  # each plane once, for all eight devices
        ((1, 512, 512), PENCIL, 4, PARALLEL, 2 * 512),  # once in each of two processes
        ((1, 512, 512), PENCIL, 2, PARALLEL, 4 * 512),
        ((1, 512, 512), ((0,), (1,), ()), 4, DIRECT, 512),  # each process has whole planes, its devices have not
        ((1, 512, 512), ((0,), (1,), ()), 2, PARALLEL, 2 * 512),
        ((96, 96, 96), ((0,), (1,), ()), 8, DIRECT, 6**3),
        (None, ((), (), (1,)), 8, DIRECT, 0),
        (None, ((), (0,), (1,)), 4, DIRECT, 0),
    ],
)
def test_a_process_of_several_devices_reads_once_for_all_of_them(
    cell: Any, axes: Any, per_rank: int, expected: str, decoded: int
) -> None:
    """Wrong if a chunk counted, or was decoded, once for each device that needs some of it."""
    found, n_ranks = plan_all(CUBE, cell, axes, (2, 4), "gzip", per_rank)
    mode, why = choose_mode(found, n_ranks)
    assert (mode, found[DIRECT].chunks_decoded) == (expected, decoded), (why, found)
    if n_ranks == 1:
        assert found[DIRECT].amplification == (1 if cell is None or 512 % cell[0] == 0 else pytest.approx((576 / 512) ** 3))
        assert found[DIRECT].seconds <= 1.1 * min(found[PARALLEL].seconds, found[ROOT].seconds)


def test_what_odd_sets_of_shards_share_is_counted_while_they_are_few() -> None:
    """Three of four shards are no grid. Above a number of such ranks, each shard counts by itself: more, never less."""
    shards = plan_shards((8, 8), ((0,), (1,)), np.array([[0, 0], [0, 1]]))
    plan = Schedule(Grid((8, 8), (8, 8), (0, 0)), shards, 4, 2, Direct(is_merged=True))
    f4 = np.dtype("f4")
    layout = SourceLayout.cut(select_axes(None, (8, 8)), (8, 2), f4, f4)  # columns: two of them in each shard
    assert count.count_direct(plan, layout) == (6, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count, "_MAX_ODD_RANKS", 0)
        assert count.count_direct(plan, layout) == (8, 6)


def test_a_simpler_way_wins_unless_another_is_clearly_better() -> None:
    found, _ = plan_all(CUBE, (1, 512, 512), PENCIL, (2, 2), "gzip")
    parallel = found[PARALLEL]
    for factor, expected in ((1.0, DIRECT), (1.1, DIRECT), (1.2, PARALLEL)):
        tried = found | {DIRECT: replace(found[DIRECT], seconds=factor * parallel.seconds)}
        mode, why = choose_mode(tried, 4)
        assert mode == expected
        assert ("about 1.2x faster" in why) == (mode == PARALLEL)


def test_slower_codecs_cost_more_and_unknown_ones_are_not_free() -> None:
    rates = {c: decode_rate(c, True) for c in ("none", "zstd", "gzip", "gzip+shuffle", "shuffle+zstd", "new-codec")}
    assert rates["none"] > rates["zstd"] > rates["gzip"] == rates["gzip+shuffle"]
    assert rates["shuffle+zstd"] == rates["zstd"] and 0 < rates["new-codec"] < rates["gzip"]
    assert decode_rate("shuffle", True) == rates["none"]
    assert decode_rate("gzip", False) > rates["none"]


def test_a_large_plan_is_counted_within_bounds_at_once() -> None:
    """16384**3 on 256 x 256 ranks: three ways and two kinds of chunks. (No timing here; the timeout is the limit.)"""
    shape = (16384,) * 3
    for cell in ((256,) * 3, (1, 16384, 16384)):
        found, n_ranks = plan_all(shape, cell, PENCIL, (256, 256), "gzip")
        assert not found[PARALLEL].is_exact and found[DIRECT].is_exact
        assert found[DIRECT].chunks_decoded == math.prod(shape) // math.prod(cell) * (16 if cell[0] > 1 else 65536)
        assert choose_mode(found, n_ranks)[0] == PARALLEL


# --- nodes and cores


# Each of 1,440 chunks goes to twelve devices of one rank: 17,280 parts.
MANY_PARTS = Case((4, 5, 8, 9), ((), (), (), ()), np.zeros((3, 4), np.int64), 1, (1,) * 4, (0,) * 4, 1, block_nbytes=1)


@examples(60)
@given(cases(), st.integers(1, 7))
@example(MANY_PARTS, 1)
def test_traffic_of_nodes_is_that_of_the_parts(case: Case, per_node: int) -> None:
    case = replace(case, n_readers=max(1, case.n_readers))
    plan = case.plan()
    near: set[tuple[int, Region, int]] = set()
    far, near_size, moved, stays = 0, 0, 0, 0
    for rank in range(case.n_ranks):
        for read in plan.owned_blocks(rank):
            for part in read.parts:
                size = part.region.size
                if part.rank == rank:
                    stays += size
                elif part.rank // per_node == rank // per_node:
                    near.add((rank, read.region, part.rank))
                    near_size += size
                else:
                    far += 1
                moved += size * (part.rank != rank)
    found = count.count_traffic(plan, per_node)
    assert (found.handovers, found.parts, found.moved_nbytes) == (len(near), far, moved * case.itemsize)
    assert found.is_exact and found.same_node == pytest.approx(near_size / moved if moved else 1)
    assert found.stays == pytest.approx(stays / (stays + moved) if stays + moved else 1)
    cost = cost_of(case, plan, ranks_per_node=per_node)
    assert cost.messages == len(near) + far and cost.same_node == found.same_node


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 19), st.integers(1, 20))
def test_pairs_along_an_axis_against_its_elements(size: int, cell: int, phase: int, extent: int) -> None:
    phase %= cell
    pairs = [((x + phase) // cell, x // extent) for x in range(size)]
    assert count._n_axis_pairs(size, cell, phase, extent) == len(set(pairs))
    block, shard, shared = count._axis_pairs(size, cell, phase, extent)
    assert list(zip(block.tolist(), shard.tolist(), strict=True)) == sorted(set(pairs))
    assert shared.tolist() == [pairs.count(p) for p in sorted(set(pairs))]


@pytest.mark.each_value
@pytest.mark.parametrize("axes", [((0,), (1,), ()), ((), (0,), (1,)), ((), (), (1, 0)), ((1,), (), ())])
@pytest.mark.parametrize("per_node", [1, 4, 64])
def test_sampled_shares_are_near_the_exact_ones(axes: Any, per_node: int) -> None:
    shards = plan_shards((96, 80, 128), axes, np.random.default_rng(1).permutation(64).reshape(8, 8).T)
    plan = Schedule(Grid((96, 80, 128), (2, 20, 128), (1, 0, 0)), shards, 4, 64, Parallel(64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count, "_MAX_TRIPLES", 1 << 30)
        exact = count.count_traffic(plan, per_node)
        patch.setattr(count, "_MAX_TRIPLES", 0)
        sampled = count.count_traffic(plan, per_node)
    assert exact.is_exact and not sampled.is_exact
    assert sampled.same_node == pytest.approx(exact.same_node, abs=0.02)
    assert sampled.stays == pytest.approx(exact.stays, abs=0.02)
    assert (per_node == 64) == (sampled.same_node == 1.0)


@examples(50)
@given(cases(), st.integers(1, 8), st.integers(1, 8))
def test_more_of_what_is_fast_is_never_slower(case: Case, per_node: int, n_cores: int) -> None:
    plan = case.plan()

    def seconds(**more: Any) -> float:
        return cost_of(case, plan, **{"ranks_per_node": per_node, "n_cores": n_cores} | more).seconds

    assert seconds(n_cores=n_cores + 1) <= seconds() * (1 + 1e-12)
    assert seconds(codec="blosc") <= seconds(codec="zstd") <= seconds(codec="gzip") <= seconds(codec="unheard-of")
    assert seconds(rows=10**5) <= seconds(rows=10**6)
    same_node = [cost_of(case, plan, ranks_per_node=n).same_node for n in (1, case.n_ranks)]
    assert same_node[0] in (0.0, 1.0) and same_node[1] == 1.0
    # With a core for each rank, what crosses nodes costs more than what does not.
    assert seconds(ranks_per_node=case.n_ranks, n_cores=case.n_ranks) <= seconds(ranks_per_node=1, n_cores=1) * (1 + 1e-12)


def test_cores_are_shared_by_the_ranks_of_a_node() -> None:
    case = Case((64, 64), ((), (0,)), np.arange(8), 8, (1, 64), (0, 0), 0)
    cost = {n: cost_of(case, case.plan(), n_cores=n, rows=1 << 22).seconds for n in (2, 4, 8, 16)}
    assert cost[2] == pytest.approx(2 * cost[4]) and cost[4] == pytest.approx(2 * cost[8], rel=1e-3)
    assert cost[8] == pytest.approx(2 * cost[16], rel=1e-3), "a rank with two cores decodes with two threads"
    alone = replace(case, n_readers=1)
    one = {n: cost_of(alone, alone.plan(), n_cores=n, rows=1 << 22).seconds for n in (2, 8)}
    assert one[2] == pytest.approx(one[8], rel=1e-3), "one rank that reads uses one core as long as ranks have no more each"


def test_nodes_change_what_is_chosen() -> None:
    """Chunks that are stored as they are, shared by two shards: cheap to read twice, dear to send to another node."""
    for per_node, expected in ((2, PARALLEL), (1, DIRECT)):
        found, n_ranks = plan_all(CUBE, (64, 512, 512), ((), (0,), ()), (2,), "none", nodes=Nodes(per_node))
        mode, why = choose_mode(found, n_ranks)
        assert mode == expected and ("inside nodes" in why) == (per_node == 1), (why, found)


@pytest.mark.parametrize(
    ("axes", "expected", "text"),
    [
        (((0,), (), ()), DIRECT, "1x the array in all: no dearer"),
        (((0,), (1,), ()), DIRECT, "1x the array in all: no dearer"),
        (((), (), (0,)), PARALLEL, "1x the array in all in 262,144 runs of 512 B; once in the job"),
    ],
)
def test_contiguous_files_are_read_in_pieces_unless_these_are_small(axes: Any, expected: str, text: str) -> None:
    found, n_ranks = plan_all(CUBE, None, axes, (4,) if len(axes[1]) == 0 else (2, 2), "none")
    mode, why = choose_mode(found, n_ranks)
    assert mode == expected and text in why, (why, found)


def test_a_large_factor_is_written_out() -> None:
    """Wrong if it were 2.05e+03."""
    found, n_ranks = plan_all(CUBE, (1, 512, 512), PENCIL, (32, 64), "gzip")
    assert " 2,048x the array in all" in choose_mode(found, n_ranks)[1]


def test_small_chunks_cost_more_than_their_bytes() -> None:
    """Planes of 7 KiB, which pencils would fetch twice: too small for their bytes to matter."""
    found, n_ranks = plan_all((2400, 36, 48), (1, 36, 48), PENCIL, (1, 2), "none")
    assert choose_mode(found, n_ranks)[0] == PARALLEL
    rate = found[DIRECT].reader_nbytes / found[DIRECT].seconds
    large, _ = plan_all((2400, 36, 48), (100, 36, 48), PENCIL, (1, 2), "none")
    assert large[DIRECT].reader_nbytes / large[DIRECT].seconds > 2 * rate


ONE_BY_ONE = Case((2, 2, 2), ((), (0,), (1,)), np.arange(4).reshape(2, 2), 4, (1, 1, 1), (0, 0, 0), 0)


@examples(50)
@given(cases())
@example(ONE_BY_ONE)  # the axis before the last that is cut is no step: a piece has one element of it
def test_distance_of_runs_against_elements(case: Case) -> None:
    if math.prod(case.shape) == 0:
        return
    plan = case.plan()
    first = plan.shards.region(0).intersect(Region.whole(case.shape))
    assert first is not None
    flat = flat_index(case.shape)[first.slices()].ravel()
    starts = flat[np.flatnonzero(np.diff(flat, prepend=-2) != 1)]
    if len(starts) > 1:
        assert run_stride(case.shape, plan.shards.shard_shape) == starts[1] - starts[0]


def test_what_lies_between_near_runs_is_read_too() -> None:
    """A quarter of each row: of rows of 2 KiB all is read, of rows of 2 MiB only the quarter, in calls of their own."""
    seconds = {}
    for shape in ((512, 512, 512), (4, 64, 1 << 19)):
        for n in (4, 8):
            found, _ = plan_all(shape, None, ((), (), (0,)), (n,), "none")
            seconds[shape[0], n] = found[DIRECT].seconds
    assert seconds[512, 8] > 0.75 * seconds[512, 4], "all is read, however little of it is held"
    assert seconds[4, 8] < 0.6 * seconds[4, 4]


def test_root_is_taken_only_where_it_is_clearly_the_best() -> None:
    found, _ = plan_all(CUBE, (1, 512, 512), PENCIL, (2, 2), "gzip")
    best = found[PARALLEL].seconds
    for factor, expected in ((1.0, PARALLEL), (0.95, PARALLEL), (0.85, ROOT)):
        mode, why = choose_mode(found | {ROOT: replace(found[ROOT], seconds=factor * best)}, 4)
        assert mode == expected and ("by one rank for all" in why) == (mode == ROOT)
