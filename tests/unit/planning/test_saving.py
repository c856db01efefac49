"""Who writes which chunk in which round? Compared with lists of everything, for shapes and shardings by chance."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from shardload.planning.region import Region, run_of
from shardload.planning.saving import (
    StoredArray,
    least_save_memory,
    plan_chunks,
    plan_save_memory,
    plan_save_rounds,
    plan_write_layout,
)
from shardload.planning.shards import Shards, plan_shards

PAGE = 4096


def any_shards(chance: random.Random, n_ranks: int) -> tuple[tuple[int, ...], Shards]:
    """A true shape and shards of it: padded, permuted, replicated, several for a rank, none for some."""
    ndim = chance.randint(1, 3)
    mesh = chance.choice([(n_ranks,), (2, n_ranks), (2, 3), (4, 1)])
    axes: list[tuple[int, ...]] = [()] * ndim
    for k in range(len(mesh)):
        if chance.random() < 0.7:
            at = chance.randrange(ndim)
            axes[at] = (*axes[at], k)
    shape = [chance.randint(1, 40) for _ in range(ndim)]
    parts = [math.prod(mesh[m] for m in cut) for cut in axes]
    padded = [-(-n // p) * p for n, p in zip(shape, parts, strict=True)]
    ranks = [k % n_ranks for k in range(math.prod(mesh))]
    chance.shuffle(ranks)
    return tuple(shape), plan_shards(tuple(padded), axes, np.array(ranks).reshape(mesh))


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 6])
def test_each_chunk_is_written_once_in_one_round(n_ranks: int) -> None:
    """Wrong if a chunk had no owner or two, came in no round or two, or an owner of what does not travel did not hold it."""
    chance = random.Random(n_ranks)
    kinds: Counter[str] = Counter()
    for _ in range(150):
        shape, shards = any_shards(chance, n_ranks)
        chunks = None if chance.random() < 0.3 else tuple(chance.randint(1, n) for n in shape)
        if chance.random() < 0.4 and chunks is not None:
            chunks = tuple(min(n, s) for n, s in zip(shape, shards.shard_shape, strict=True))
        unit = StoredArray(shape, chunks, 4, chance.random() < 0.5)
        cap = chance.choice([1 << 12, 1 << 15, 1 << 28])
        n_nodes = chance.choice([1, n_ranks, -(-n_ranks // 2)])
        made = plan_write_layout(unit, shards, n_ranks, n_nodes, cap)
        kinds["alone" if made.schedule is None else "travels"] += 1
        memory = plan_save_memory([made], max(cap, least_save_memory([made])), 2)
        assert memory.nbytes <= max(cap, least_save_memory([made]))
        rounds = plan_save_rounds([made], memory.round_nbytes)
        seen = np.zeros(shape, dtype=int)
        for rank in range(n_ranks):
            held = [shards.region(s) for s in shards.shards_of(rank)]
            if made.schedule is None:
                units = made.units_of(rank)
                mine = [u for items in rounds for item in items for u in itertools.islice(units, len(item.units))]
                assert list(units) == []
                regions = [made.units.region(unit) for unit, _ in mine]
                assert all(any(one.contains(region) for one in held) for region in regions)
                assert made.nbytes_of(rank) == 4 * sum(region.size for region in regions)
            else:
                owned = made.schedule.blocks_of(rank)
                mine_ = [k for items in rounds for i in items for k in owned[i.units.start : i.units.stop]]
                assert mine_ == list(owned)
                regions = [made.schedule.blocks.region(k) for k in owned]
            for region in regions:
                seen[region.slices()] += 1
                if chunks is None:
                    assert run_of(shape, region) is not None
        assert (seen == 1).all(), (shape, chunks, made)
    assert min(kinds.values()) > 10, kinds


def test_two_nodes_never_write_to_one_page() -> None:
    """Wrong if clients of a network file system could lose each other's bytes."""
    chance = random.Random(5)
    for _ in range(200):
        shape = tuple(chance.choice([3, 8, 64, 96, 1024, 1000]) for _ in range(chance.randint(1, 3)))
        cut = chance.randrange(len(shape))
        if shape[cut] % 4:
            continue
        shards = plan_shards(shape, [(0,) if k == cut else () for k in range(len(shape))], np.arange(4))
        made = plan_write_layout(StoredArray(shape, None, 4, False), shards, 4, 2)
        pages: dict[int, set[int]] = {}
        if made.schedule is None:
            regions = [(rank, made.units.region(unit)) for rank in range(4) for unit, _ in made.units_of(rank)]
        else:
            blocks = made.schedule.blocks
            regions = [(rank, blocks.region(k)) for rank in range(4) for k in made.schedule.blocks_of(rank)]
        for rank, region in regions:
            start, length = run_of(shape, region) or (-1, 0)
            for page in {start * 4 // PAGE, (start + length) * 4 // PAGE - (not (start + length) * 4 % PAGE)}:
                pages.setdefault(page, set()).add(rank // 2)
        assert all(len(nodes) == 1 for nodes in pages.values()), (shape, cut, made)


def test_chunks_follow_shards() -> None:
    """Wrong if a chunk of 4 MiB or less lay in two shards where it need not, or was larger."""
    for shape, mesh in itertools.product([(512, 512, 512), (1024, 96, 640), (4096, 4096)], [(2, 2), (4, 3), (8, 1)]):
        axes = [(0,), (1,), ()][: len(shape)]
        padded = tuple(-(-n // m) * m for n, m in zip(shape, (*mesh, 1), strict=False))
        shards = plan_shards(padded, axes, np.arange(math.prod(mesh)).reshape(mesh))
        chunks = plan_chunks(shape, 4, shards)
        assert 1 << 18 <= math.prod(chunks) * 4 <= 4 << 20
        made = plan_write_layout(StoredArray(shape, chunks, 4, True), shards, math.prod(mesh))
        assert made.schedule is None, (shape, mesh, chunks)


def test_a_file_of_chunks_has_one_writer_on_several_nodes() -> None:
    """Wrong if two nodes wrote to one file of Zarr shards, in which chunks lie at any byte."""
    shards = plan_shards((64, 64), [(0,), (1,)], np.arange(4).reshape(2, 2))
    unit = StoredArray((64, 64), (4, 5), 4, True, (8, 10))
    for n_nodes, size in ((1, 20), (2, 80)):
        made = plan_write_layout(unit, shards, 4, n_nodes)
        assert made.schedule is not None
        assert all(cell % n == 0 for cell, n in zip(made.schedule.blocks.cell, (8, 10) if n_nodes > 1 else (4, 5), strict=True))
        assert size <= math.prod(made.schedule.blocks.cell)


def test_empty_and_scalar() -> None:
    """Wrong if an array without elements or axes had no plan."""
    for shape in ((), (0, 3)):
        shards = plan_shards(shape, [()] * len(shape), np.arange(3))
        made = plan_write_layout(StoredArray(shape, None, 8, False), shards, 3)
        assert made.schedule is None
        found = [made.units.region(u) for rank in range(3) for u, _ in made.units_of(rank)]
        assert found == ([Region((), ())] if not shape else [])


def test_a_region_that_is_one_run() -> None:
    """Wrong if it were written elsewhere than its elements lie, or a region of several runs as one."""
    for shape in [(), (4,), *itertools.product((1, 2, 4), repeat=2), *itertools.product((1, 2, 3), repeat=3)]:
        for start in itertools.product(*(range(n + 1) for n in shape)):
            for stop in itertools.product(*(range(a, n + 1) for a, n in zip(start, shape, strict=True))):
                region = Region(start, stop)
                at = np.arange(math.prod(shape)).reshape(shape)[region.slices()].ravel()
                pieces = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1) if at.size else []
                expected = (int(pieces[0][0]), len(pieces[0])) if len(pieces) == 1 else None
                assert run_of(shape, region) == expected, (shape, start, stop)
