"""Are the counts what a plan really does, and is the chosen way of reading the better one?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given

from shardload.planning.cost import Cost, choose_mode, plan_cost
from shardload.planning.region import Region, count_runs, run_stride
from shardload.planning.schedule import DIRECT, PARALLEL, SourceLayout
from shardload.planning.selection import select_axes
from shardload.planning.shards import plan_shards
from tests.tiers import examples
from tests.unit.brute_force import Case, cases, chunks_read, every_way, flat_index, held_regions, simulate


@examples(150)
@given(cases())
def test_counts_are_those_of_the_plan_carried_out(case: Case) -> None:
    plan, layout = case.plan(), case.layout()
    done = simulate(case, plan)
    cost = plan_cost(plan, layout)
    decoded = [sum(map(len, chunks_read(plan, case.chunks, rank))) for rank in range(case.n_ranks)]
    assert cost.moved_nbytes >= done["moved"] * case.itemsize and (
        cost.messages >= done["messages"] or plan.max_part_nbytes > plan.max_message_nbytes
    )
    assert cost.decoded_nbytes == cost.chunks_decoded * layout.chunk_nbytes
    assert plan.is_merged or cost.reader_nbytes >= max(decoded) * layout.chunk_nbytes
    array_nbytes = math.prod(case.shape) * case.itemsize
    assert cost.amplification == pytest.approx(cost.decoded_nbytes / array_nbytes if array_nbytes else 1.0)
    pieces = max(sum(region.size for region in held) for held in held_regions(case))
    assert cost.peak_nbytes >= pieces * case.itemsize
    if case.n_readers:
        assert cost.n_readers == sum(n > 0 for n in decoded) and cost.chunks_decoded == sum(decoded)
        return
    assert (cost.n_readers, cost.messages, cost.moved_nbytes) == (sum(map(bool, held_regions(case))), 0, 0)
    holders = {len(plan.shards.holders(shard)) for shard in range(plan.shards.n_shards)}
    if plan.shards.most_held == len(holders) == 1:  # otherwise an upper bound
        assert (cost.chunks_decoded, cost.reader_nbytes) == (sum(decoded), max(decoded) * layout.chunk_nbytes)
    assert plan.is_merged or cost.chunks_decoded >= sum(decoded)


ONE_BY_ONE = Case((2, 2, 2), ((), (0,), (1,)), np.arange(4).reshape(2, 2), 4, (1, 1, 1), (0, 0, 0), 0)


@examples(50)
@given(cases())
@example(ONE_BY_ONE)  # the axis before the last that is cut is no step: a piece has one element of it
def test_runs_of_a_piece_against_its_elements(case: Case) -> None:
    if math.prod(case.shape) == 0:
        return
    plan = case.plan()
    first: Any = plan.shards.region(0).intersect(Region.whole(case.shape))
    flat = flat_index(case.shape)[first.slices()].ravel()
    starts = flat[np.flatnonzero(np.diff(flat, prepend=-2) != 1)]
    assert count_runs(case.shape, plan.shards.shard_shape) == len(starts)
    if len(starts) > 1:
        assert run_stride(case.shape, plan.shards.shard_shape) == starts[1] - starts[0]


# --- which way


def plan_all(
    shape: tuple[int, ...], cell: tuple[int, ...] | None, axes: Any, mesh: tuple[int, ...], per_rank: int = 1, n_nodes: int = 1
) -> tuple[dict[str, Cost], int]:
    """The costs of a float32 array over a mesh with a rank for every so many devices."""
    n_ranks = math.prod(mesh) // per_rank
    shards = plan_shards(shape, axes, np.arange(math.prod(mesh)).reshape(mesh) // per_rank)
    f4 = np.dtype("f4")
    layout = SourceLayout.cut(select_axes(None, shape), cell, f4, f4, "gzip" if cell else "none")
    n_readers = n_ranks if n_nodes == 1 else max(1, min(n_ranks, -(-4 * math.prod(shape) // (2 << 20))))
    plans = every_way(layout, shards, n_ranks, 16 << 20, n_readers)
    return {mode: plan_cost(plan, layout, is_one_node=n_nodes == 1) for mode, plan in plans.items()}, n_ranks


CUBE = (512, 512, 512)
PENCIL = ((), (0,), (1,))
COLUMNS = ((), (), (0,))


@pytest.mark.parametrize(
    ("shape", "cell", "axes", "mesh", "expected", "text"),
    [
        (CUBE, (1, 512, 512), PENCIL, (2, 2), PARALLEL, "would decode 4x the array in all"),
        (CUBE, (64, 64, 64), PENCIL, (2, 2), DIRECT, "1x the array"),
        (CUBE, (1, 512, 512), ((0,), (), ()), (4,), DIRECT, "1x the array"),
        (CUBE, None, ((0,), (1,), ()), (2, 2), DIRECT, "1x the array"),
        (CUBE, None, COLUMNS, (4,), PARALLEL, "would read 4x the array"),  # and what lies between
        (CUBE, (1, 512, 512), PENCIL, (1, 1), DIRECT, "one process"),
        ((0, 512, 512), (1, 512, 512), PENCIL, (2, 2), DIRECT, "the array is empty"),
        (CUBE, (64, 512, 512), ((), (), ()), (8,), PARALLEL, "decode 8x the array"),
        (CUBE, (512, 512, 512), ((), (), ()), (8,), DIRECT, "8x the array"),  # others would only wait
        ((4, 64, 512), (1, 64, 512), PENCIL, (2, 2), DIRECT, "so little data"),
        ((2400, 36, 48), (1, 36, 48), PENCIL, (1, 2), PARALLEL, "2x the array"),
        (CUBE, (1, 512, 512), PENCIL, (32, 64), PARALLEL, " 2,048x the array in all"),  # not 2.05e+03
        ((510, 510, 510), (60, 60, 60), ((0,), (), ()), (2,), DIRECT, "1.32x the array"),
    ],
)
def test_choice(shape: Any, cell: Any, axes: Any, mesh: Any, expected: str, text: str) -> None:
    found, n_ranks = plan_all(shape, cell, axes, mesh)
    mode, why = choose_mode(found, n_ranks)
    assert mode == expected and text in why, (mode, why, found)


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
        (None, PENCIL, 4, DIRECT, 0),
    ],
)
def test_a_process_of_several_devices_reads_once_for_all_of_them(
    cell: Any, axes: Any, per_rank: int, expected: str, decoded: int
) -> None:
    """Wrong if a chunk counted, or was decoded, once for each device that needs some of it."""
    found, n_ranks = plan_all(CUBE, cell, axes, (2, 4), per_rank)
    mode, why = choose_mode(found, n_ranks)
    assert (mode, found[DIRECT].chunks_decoded) == (expected, decoded), (why, found)


def test_no_file_is_read_many_times_however_many_ranks_there_are() -> None:
    """16384**3 on 256 x 256 ranks, and a small file on a quarter of a million. (No timing here; the timeout is the limit.)"""
    for shape, cell, mesh, factor in (
        ((16384,) * 3, (256,) * 3, (256, 256), 16),
        ((16384,) * 3, (1, 16384, 16384), (256, 256), 65536),
        (CUBE, (1, 512, 512), (512, 512), 262_144),
    ):
        found, n_ranks = plan_all(shape, cell, PENCIL, mesh, n_nodes=math.prod(mesh) // 4)
        assert found[DIRECT].amplification == factor and found[PARALLEL].amplification == 1
        assert choose_mode(found, n_ranks)[0] == PARALLEL
