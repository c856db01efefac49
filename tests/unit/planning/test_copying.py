"""Slabs of a copy: each element once, whole units, and as many decoded chunks as the plan says; against brute force."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.copying import CopiedArray, plan_copy_rounds, plan_slab_layout
from shardload.planning.region import Grid, Region, aligned
from shardload.planning.saving import plan_rows
from shardload.planning.staging import least_memory, plan_memory
from tests.tiers import examples, quick_ones
from tests.unit.files import python_memory_below


@st.composite
def cases(draw: Any) -> tuple[CopiedArray, int, int]:
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 14)) for _ in range(ndim))
    unit = tuple(draw(st.integers(1, n)) for n in shape)
    chunk = tuple(draw(st.integers(1, n + 2)) for n in shape)
    phase = tuple(draw(st.integers(0, c - 1)) for c in chunk)
    n_ranks = draw(st.integers(1, 5))
    made = CopiedArray(shape, unit, Grid(shape, chunk, phase), True, 64, draw(st.booleans()))
    return made, n_ranks, draw(st.integers(made.unit_nbytes, made.unit_nbytes * 30))


@given(cases())
@examples(150)
def test_every_element_is_copied_once_in_whole_units(case: tuple[CopiedArray, int, int]) -> None:
    """Wrong if slabs overlapped, left out a last remainder, cut a unit, took more memory, or counted decoded chunks wrongly."""
    unit, n_ranks, room = case
    planned = plan_slab_layout(unit, n_ranks, room)
    rounds = [list(plan_copy_rounds([planned], n_ranks, room, rank)) for rank in range(n_ranks)]
    assert len({sum(is_together for _, is_together in mine) for mine in rounds}) == 1
    count, decoded = np.zeros(unit.shape, dtype=int), 0
    seen: set[Region] = set()
    for rank, mine in enumerate(rounds):
        for items, is_together in mine:
            held = 0
            for slab in (planned.slabs.region(number) for item in items for number in item.units):
                if not is_together or slab not in seen:
                    decoded += unit.chunks.n_meeting(slab)
                    seen.add(slab)
                if not is_together:
                    pieces = [Region.whole(slab.shape)]
                else:
                    shards = planned.pieces(slab, n_ranks)
                    found = (shards.region(k).intersect(Region.whole(slab.shape)) for k in shards.shards_of(rank))
                    pieces = [piece for piece in found if piece is not None]
                for piece in pieces:
                    held += aligned(piece.size * unit.itemsize)
                    whole = piece.moved(slab.start)
                    count[whole.slices()] += 1
                    for a, b, u, n in zip(whole.start, whole.stop, unit.unit, unit.shape, strict=True):
                        assert a % u == 0
                        assert b % u == 0 or b == n
            assert held <= room
            assert not unit.is_alone or rank == 0
    assert (count == 1).all()
    assert decoded == planned.n_decoded
    assert planned.factor == decoded / unit.chunks.n_cells


def test_slabs_follow_chunks_of_both_wherever_that_fits() -> None:
    """Wrong if an alignment that exists were not found: also with a selection that begins inside a chunk."""
    for shape, unit, chunk, phase in [
        ((24, 30), (4, 5), (6, 10), (0, 0)),
        ((24, 30), (4, 5), (6, 10), (2, 5)),
        ((100,), (6,), (10,), (4,)),
    ]:
        planned = plan_slab_layout(
            CopiedArray(shape, unit, Grid(shape, chunk, phase), True, 8), 1, 12 * 60 * 8 // (4 if len(shape) > 1 else 12)
        )
        assert planned.factor == 1, (shape, planned)


@pytest.mark.parametrize("page", [1, 64, 4096])
def test_runs_of_an_array_in_one_piece(page: int) -> None:
    """Wrong if a unit were not one run of the file, or began inside a page that another rank writes."""
    for shape, itemsize in itertools.product(
        [(7,), (300,), (5, 9), (40, 33), (3, 50, 16), (2, 3, 1000), (2, 48, 32), (70, 1)], [1, 8]
    ):
        unit, fits = plan_rows(shape, itemsize, 256, page)
        lead = next((k for k, n in enumerate(unit) if n > 1), len(shape))
        assert unit[lead + 1 :] == shape[lead + 1 :], (shape, unit)
        starts = [0]
        for n, u, step in zip(shape, unit, [math.prod(shape[k + 1 :]) for k in range(len(shape))], strict=True):
            starts = [at + a * step for at in starts for a in range(0, n, u)]
        assert not fits or all(at * itemsize % page == 0 for at in starts), (shape, unit)


def test_memory_is_what_was_asked_for() -> None:
    for staging, chunk, reading, threads in itertools.product([40 << 20, 512 << 20], [1 << 20, 4 << 20], [4 << 20], [1, 2, 64]):
        memory = plan_memory(max(staging, least_memory(chunk, chunk, reading)), chunk, chunk, reading, threads)
        assert memory.nbytes <= staging
        assert memory.round_nbytes >= chunk
        assert memory.n_threads >= 1
    least = least_memory(3 << 20, 3 << 20, 4 << 20)
    assert plan_memory(least, 3 << 20, 3 << 20, 4 << 20, 8).nbytes <= least


def small_arrays(sizes: list[int], n_ranks: int, room: int, *, is_alone: bool = False) -> list[Any]:
    shapes = [(n,) for n in sizes]
    return [
        plan_slab_layout(CopiedArray(shape, (1,), Grid(shape, shape, (0,)), True, 64, is_alone), n_ranks, room)
        for shape in shapes
    ]


LENGTHS = st.integers(1, 40)


@given(st.lists(LENGTHS, max_size=12), st.lists(LENGTHS, max_size=2), st.integers(1, 5), st.integers(1, 50))
@examples(150)
def test_many_arrays_are_shared_out_evenly(sizes: list[int], alone: list[int], n_ranks: int, room: int) -> None:
    """Wrong if a slab had two owners or none, or if a rank had much more than others."""
    arrays = small_arrays(sizes, n_ranks, 64 * room) + small_arrays(alone, n_ranks, 64 * room, is_alone=True)
    rounds = [list(plan_copy_rounds(arrays, n_ranks, 64 * room, rank)) for rank in range(n_ranks)]
    slabs = [
        [(item.array, number) for items, is_together in mine if not is_together for item in items for number in item.units]
        for mine in rounds
    ]
    expected = [(k, n) for k, array in enumerate(arrays) if not array.is_together for n in range(array.slabs.n_cells)]
    assert sorted(itertools.chain(*slabs)) == expected
    loads = [sum(arrays[array].slab_nbytes for array, _ in mine) for mine in slabs]
    largest = max((array.slab_nbytes for array in arrays), default=0)
    if not alone:
        assert max(loads) - min(loads) <= largest


HUGE = (
    ((25_000_000, 1000, 1000), (1, 500, 500), (1, 1000, 1000)),
    ((25_000_000, 1000, 1000), (64, 64, 64), (1, 1000, 1000)),
    ((25 * 10**12,), (1 << 20,), (999_999,)),
)


@pytest.mark.parametrize(("shape", "unit", "chunk"), quick_ones(HUGE, HUGE[1]))
def test_a_rank_plans_its_own_rounds_of_100_terabytes(shape: Any, unit: Any, chunk: Any) -> None:
    """Wrong if a rank made those of others, or anything for each chunk of the file: both are 10 to 100 GB of lists."""
    started = time.process_time()
    with python_memory_below(8 << 20):
        array = plan_slab_layout(CopiedArray(shape, unit, Grid(shape, chunk, (0,) * len(shape)), True, 4), 1024, 64 << 20)
        mine = sum(1 for _ in plan_copy_rounds([array], 1024, 64 << 20, 1023))
    assert mine < 60_000
    assert time.process_time() - started < 30
