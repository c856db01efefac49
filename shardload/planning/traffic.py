"""How much does a schedule make the job read and send?

Pure, like `schedule`. An axis is cut independently of the others, so most counts are products of counts along the axes, and
cost the same for eight ranks and for a million. Only the amount that stays on its rank or node depends on all axes at once. It
is counted pair by pair if there are few pairs of a block and a shard, otherwise estimated from a fixed sample of elements.

* `count_held`: how many ranks hold any shard, and how many shards does the fullest rank hold?
* `count_direct`: how many chunks are decoded if each rank reads what it holds?
* `count_direct_of_nodes`: how many of them differ on each node?
* `count_traffic`: how many messages and bytes go between ranks, and how much of that stays inside a node?
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardload.planning.grid import IntArray
from shardload.planning.rank_tables import RankBoxes
from shardload.planning.schedule import Schedule
from shardload.planning.shards import Shards
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import Direct

__all__ = ["Traffic", "count_direct", "count_direct_of_nodes", "count_held", "count_traffic"]

# Above this many (block, shard, device) triples, counts are bounds and fractions are sampled, so that planning stays fast.
_MAX_TRIPLES = 1 << 14
_N_SAMPLES = 1 << 12
# Above this many ranks whose shards do not form a grid, chunks that several of their shards share are counted several times.
_MAX_ODD_RANKS = 256


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent between different ranks.

    Attributes
    ----------
    handovers : int
        Number of pairs of a block and another rank of the same node that needs some of it: one message each.
    parts : int
        Number of parts that go to another node (before long ones are split): one message each.
    moved_nbytes : int
        Bytes in both.
    same_node : float
        Fraction of `moved_nbytes` that stays inside a node; 1.0 if nothing moves.
    stays : float
        Fraction of all parts (by size) that do not move, because their block and piece are on one rank.
    is_exact : bool
        Whether all these are exact. Otherwise counts are upper bounds (as if nothing stayed), and fractions are estimates.
    """

    handovers: int
    parts: int
    moved_nbytes: int
    same_node: float
    stays: float
    is_exact: bool


def count_held(shards: Shards) -> tuple[int, int]:
    """The number of ranks that hold any shard, and the number of shards that the fullest rank holds."""
    return shards.table.n_holding, shards.most_held


# --- direct


def count_direct(schedule: Schedule, layout: SourceLayout) -> tuple[int, int]:
    """Number of chunks (elements, without chunks) that all ranks together, and the busiest rank, read in mode ``"direct"``.

    Exact, except for merged blocks over meshes in which more than some hundred ranks hold shards that do not form a grid, and
    for merged blocks of ranks that hold several shards with halos: for these ranks each shard is counted by itself, which gives
    an upper bound.
    """
    shards, chunks = schedule.shards, layout.chunks
    if shards.has_halo:
        return _count_direct_sections(schedule, layout)
    axes = zip(schedule.blocks.shape, shards.cuts, shards.shard_shape, chunks.cell, chunks.phase, strict=True)
    per_cut = [_met_by_cuts(*axis, has_chunks=layout.has_chunks) for axis in axes]
    is_merged = schedule.strategy == Direct(is_merged=True) and layout.has_chunks
    if shards.table.boxes is not None:
        return _direct_in_boxes(per_cut, shards.table.boxes, shards.table.n_holders or 1, is_merged)
    if is_merged:
        counts = _met_by_ranks(per_cut, shards)
        return int(counts.sum()), int(counts.max(initial=0))
    shard, rank = shards.table.holdings()
    lengths = [high - low for low, high in per_cut]
    if all(along.size and (along == along[0]).all() for along in lengths):  # all shards alike
        each = math.prod(int(along[0]) for along in lengths)
        return each * len(shard), each * shards.most_held
    per_holding = _outer(lengths)[shard]
    return int(per_holding.sum()), int(np.bincount(rank, weights=per_holding).max(initial=0))


def count_direct_of_nodes(schedule: Schedule, layout: SourceLayout, ranks_per_node: int) -> tuple[int, int]:
    """As `count_direct`, of nodes instead of ranks: what several ranks of a node read counts once.

    An upper bound where the ranks of a node do not hold an equal box of an abstract mesh, and for shards with halos.
    """
    shards = schedule.shards
    if ranks_per_node == 1 and shards.sections_held == 1:
        return count_direct(schedule, layout)
    ranks = shards.ranks
    nodes: IntArray | RankBoxes | None = None
    if not shards.has_halo:
        nodes = ranks.on_nodes(ranks_per_node) if isinstance(ranks, RankBoxes) else ranks // ranks_per_node
    n_nodes = -(-schedule.n_ranks // ranks_per_node)
    if nodes is None:
        met, busiest = count_direct(schedule, layout)
        everything = layout.chunks.n_cells if layout.has_chunks else math.prod(schedule.blocks.shape)
        return min(met, everything * n_nodes), min(busiest * ranks_per_node, everything)
    of_nodes = Shards(shards.shape_global, shards.cuts, nodes)
    return count_direct(replace(schedule, shards=of_nodes, n_ranks=n_nodes, strategy=Direct(is_merged=True)), layout)


def _met_by_cuts(size: int, n_cut: int, extent: int, cell: int, phase: int, *, has_chunks: bool) -> tuple[IntArray, IntArray]:
    """Along one axis: the first chunk (or element) that each shard meets, and the one after the last."""
    low = np.minimum(np.arange(n_cut, dtype=np.int64) * extent, size)
    high = np.minimum(low + extent, size)
    return _cells_met(low, high, cell, phase) if has_chunks else (low, high)


def _cells_met(low: IntArray, high: IntArray, cell: int, phase: int) -> tuple[IntArray, IntArray]:
    """Along one axis of a grid: the first cell that each interval meets, and the one after the last."""
    first: IntArray = (low + phase) // cell
    return first, np.where(high > low, -(-(high + phase) // cell), first)


def _outer(lengths: list[IntArray]) -> IntArray:
    """Products of the numbers along each axis, flat, in C order."""
    counts: IntArray = np.ones((), dtype=np.int64)
    for along in lengths:
        counts = np.multiply.outer(counts, along)
    return counts.ravel()


def _union(first: IntArray, last: IntArray) -> IntArray:
    """Number of chunks in the union of each row of intervals, which are in ascending order."""
    before = np.maximum.accumulate(last, axis=-1)[..., :-1]
    met: IntArray = (last - first)[..., 0] + np.maximum(0, last[..., 1:] - np.maximum(first[..., 1:], before)).sum(axis=-1)
    return met


def _direct_in_boxes(
    per_cut: list[tuple[IntArray, IntArray]],
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]],
    n_holders: int,
    is_merged: bool,
) -> tuple[int, int]:
    """A rank's box is a product over the axes, so the total is a product of sums and the largest count a product of maxima."""
    total, busiest = n_holders, 1
    for (first, last), (sizes, box) in zip(per_cut, boxes, strict=True):
        # The axes of the mesh, each as the ranks along it and the places of one of them; ranks first.
        split = [m for n, b in zip(sizes, box, strict=True) for m in (n // b, b)]
        order = [*range(0, len(split), 2), *range(1, len(split), 2)]
        rows = [along.reshape(split).transpose(order).reshape(-1, math.prod(box)) for along in (first, last)]
        per_rank = _union(*rows) if is_merged else (rows[1] - rows[0]).sum(axis=1)
        total *= int(per_rank.sum())
        busiest *= int(per_rank.max(initial=0))
    return total, busiest


def _met_by_ranks(per_cut: list[tuple[IntArray, IntArray]], shards: Shards) -> IntArray:
    """For each rank that holds any shard: the number of chunks that its shards meet, each counted once."""
    shard, rank = shards.table.holdings()
    order = np.argsort(rank, kind="stable")
    shard, n_held = shard[order], np.bincount(rank)
    of_rank = n_held[rank[order]]
    found = []
    for n in np.unique(n_held[n_held > 0]).tolist():
        rows = shard[of_rank == n].reshape(-1, n)
        total, n_places = np.ones(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.int64)
        for (first, last), index in zip(per_cut, _places(rows, shards), strict=True):
            along = np.sort(index, axis=1)
            total *= _union(first[along], last[along])
            n_places *= 1 + (np.diff(along, axis=1) != 0).sum(axis=1)
        odd = np.flatnonzero(n_places != n)  # shards that do not form a grid: counted one by one if few
        if len(odd) > _MAX_ODD_RANKS:
            total[odd] = _outer([last - first for first, last in per_cut])[rows[odd]].sum(axis=1)
        else:
            total[odd] = [_union_of_boxes(per_cut, _places(row, shards)) for row in rows[odd]]
        found.append(total)
    return np.concatenate(found)


def _places(numbers: IntArray, shards: Shards) -> list[IntArray]:
    """The index of shards along each axis."""
    return [numbers // math.prod(shards.cuts[axis + 1 :]) % n for axis, n in enumerate(shards.cuts)]


def _union_of_boxes(per_cut: list[tuple[IntArray, IntArray]], index: list[IntArray]) -> int:
    """Number of chunks in the union of a few boxes anywhere. The bounds of all boxes cut it into cells, in a box or not."""
    bounds = [(first[i], last[i]) for (first, last), i in zip(per_cut, index, strict=True)]
    edges = [np.unique(np.concatenate(axis)) for axis in bounds]
    is_met = np.zeros([max(0, len(e) - 1) for e in edges], dtype=bool)
    for k in range(len(index[0])):
        is_met[tuple(slice(*np.searchsorted(e, [a[k], b[k]])) for e, (a, b) in zip(edges, bounds, strict=True))] = True
    sizes = _outer([np.diff(e) for e in edges])
    return int(sizes[is_met.ravel()].sum())


def _count_direct_sections(schedule: Schedule, layout: SourceLayout) -> tuple[int, int]:
    """`count_direct` if shards have halos. Where a rank holds several shards, an upper bound: shards are counted one by one."""
    shards, chunks, shape = schedule.shards, layout.chunks, schedule.blocks.shape
    is_merged = schedule.strategy == Direct(is_merged=True) and layout.has_chunks
    lengths = []
    for axis, (n_cut, cell, phase) in enumerate(zip(shards.cuts, chunks.cell, chunks.phase, strict=True)):
        first, last, place = shards.along(axis, shape)
        if layout.has_chunks:
            first, last = _cells_met(first, last, cell, phase)
        along = np.bincount(place, weights=last - first, minlength=n_cut).astype(np.int64)
        for i in np.unique(place[n_cut:]).tolist() if is_merged else ():  # the shards that have several sections here
            of_shard = np.flatnonzero(place == i)
            of_shard = of_shard[np.argsort(first[of_shard], kind="stable")]
            along[i] = _union(first[of_shard], last[of_shard])
        lengths.append(along)
    if shards.table.boxes is not None:
        total = (shards.table.n_holders or 1) * math.prod(int(along.sum()) for along in lengths)
        return total, shards.most_held * math.prod(int(along.max(initial=0)) for along in lengths)
    shard, rank = shards.table.holdings()
    per_holding = _outer(lengths)[shard]
    return int(per_holding.sum()), int(np.bincount(rank, weights=per_holding).max(initial=0))


# --- root and parallel


def count_traffic(schedule: Schedule, ranks_per_node: int) -> Traffic:
    """Count what a schedule whose blocks have owners sends, if rank ``r`` runs on node ``r // ranks_per_node``."""
    shards = schedule.shards
    if schedule.is_direct or schedule.blocks.n_cells == 0:
        return Traffic(0, 0, 0, 1.0, 1.0, True)
    n_pairs = math.prod(_count_axis_pairs(schedule))
    if n_pairs * shards.n_replicas <= _MAX_TRIPLES:
        return _count_triples(schedule, ranks_per_node)
    stays, same_node = _sample_shares(schedule, ranks_per_node)
    n_holders = shards.table.n_holders or shards.n_replicas
    n_handovers = math.ceil(n_pairs * n_holders * same_node)
    n_wanted = [int(size.sum()) for _, _, size in _section_pairs(schedule)] if shards.has_halo else schedule.blocks.shape
    moved_nbytes = math.prod(n_wanted) * schedule.itemsize * n_holders
    return Traffic(n_handovers, n_pairs * n_holders - n_handovers, moved_nbytes, same_node, stays, False)


def _axes(schedule: Schedule) -> list[tuple[int, int, int, int]]:
    blocks = schedule.blocks
    return list(zip(blocks.shape, blocks.cell, blocks.phase, schedule.shards.core_shape, strict=True))


def _n_axis_pairs(size: int, cell: int, phase: int, extent: int) -> int:
    """Along one axis: the number of (block, shard) pairs that share elements. One more than the boundaries of both cuts."""
    n_edges = (-(-(size + phase) // cell) - 1) + (-(-size // extent) - 1)
    common = math.gcd(cell, extent)
    if phase % common:
        return n_edges + 1
    # Boundaries of both: multiples of `extent` that are -phase modulo `cell`, from the first positive one on.
    every = extent * (cell // common)
    n_shards = -phase // common * pow(extent // common, -1, cell // common) % (cell // common)
    first = n_shards * extent or every
    return n_edges + 1 - max(0, -(-(size - first) // every))


def _axis_pairs(size: int, cell: int, phase: int, extent: int) -> tuple[IntArray, IntArray, IntArray]:
    """Along one axis: the (block, shard) pairs that share elements, and how many they share."""
    edges = np.union1d(np.arange(cell - phase, size, cell), np.arange(extent, size, extent))
    bounds = np.concatenate([[0], edges, [size]]).astype(np.int64)
    low = bounds[:-1]
    return (low + phase) // cell, low // extent, np.diff(bounds)


def _count_axis_pairs(schedule: Schedule) -> list[int]:
    """Along each axis: the number of pairs of a block and a section that share elements."""
    if schedule.shards.has_halo:
        return [len(block) for block, _, _ in _section_pairs(schedule)]
    return [_n_axis_pairs(*axis) for axis in _axes(schedule)]


def _all_axis_pairs(schedule: Schedule) -> list[tuple[IntArray, IntArray, IntArray]]:
    """Along each axis: the pairs of a block and a section that share elements, as block and shard, and how many they share."""
    if schedule.shards.has_halo:
        return _section_pairs(schedule)
    return [_axis_pairs(*axis) for axis in _axes(schedule)]


def _section_pairs(schedule: Schedule) -> list[tuple[IntArray, IntArray, IntArray]]:
    """`_all_axis_pairs` where sections overlap: section by section."""
    shards, blocks = schedule.shards, schedule.blocks
    found = []
    for axis, (cell, phase) in enumerate(zip(blocks.cell, blocks.phase, strict=True)):
        low, high, place = shards.along(axis, blocks.shape)
        first, last = _cells_met(low, high, cell, phase)
        n_met = last - first
        section = np.repeat(np.arange(len(low)), n_met)
        block = first[section] + np.arange(len(section)) - np.repeat(np.cumsum(n_met) - n_met, n_met)
        start = block * cell - phase
        size = np.minimum(high[section], start + cell) - np.maximum(low[section], start)
        found.append((block, place[section], size))
    return found


def _count_triples(schedule: Schedule, ranks_per_node: int) -> Traffic:
    """Count exactly, over each block, shard and device."""
    block: Any = np.zeros((), dtype=np.int64)
    shard, size = block, block + 1
    for pairs, n_blocks, n_cut in zip(_all_axis_pairs(schedule), schedule.blocks.counts, schedule.shards.cuts, strict=True):
        b, s, n = pairs
        block = np.add.outer(block * n_blocks, b)
        shard = np.add.outer(shard * n_cut, s)
        size = np.multiply.outer(size, n)
    block, shard, size = block.reshape(-1, 1), shard.reshape(-1, 1), size.reshape(-1, 1)
    owner = schedule.owners(block)
    holder = np.sort(schedule.shards.table.ranks_at(shard, np.arange(schedule.shards.n_replicas)), axis=1)
    once = np.diff(holder, axis=1, prepend=-1) != 0
    moves = once & (holder != owner)
    near = moves & (holder // ranks_per_node == owner // ranks_per_node)
    total, moved, near_size = (int((which * size).sum()) for which in (once, moves, near))
    handovers = np.unique((block * schedule.n_ranks + holder)[near])
    return Traffic(
        handovers=len(handovers),
        parts=int(moves.sum() - near.sum()),
        moved_nbytes=moved * schedule.itemsize,
        same_node=near_size / moved if moved else 1.0,
        stays=1 - moved / total,
        is_exact=True,
    )


def _sample_shares(schedule: Schedule, ranks_per_node: int) -> tuple[float, float]:
    """The fraction of all parts (by size) that stays on its rank, and the fraction of the others that stays on its node.

    Every rank samples the same elements: a Kronecker sequence with the powers of the generalised golden ratio (M. Roberts,
    "The unreasonable effectiveness of quasirandom sequences", 2018), in integers.
    """
    shape = (*schedule.blocks.shape, schedule.shards.n_replicas)
    ratio = 2.0
    for _ in range(64):
        ratio = (1 + ratio) ** (1 / (len(shape) + 1))
    numbers = np.arange(1, _N_SAMPLES + 1, dtype=np.int64)
    points = [
        (numbers * int((1 << 32) * ratio ** -(k + 1)) % (1 << 32) / (1 << 32) * n).astype(np.int64) for k, n in enumerate(shape)
    ]
    block: Any = np.zeros(_N_SAMPLES, dtype=np.int64)
    shard = block
    for x, (_, cell, phase, extent), n_blocks, n_cut in zip(
        points, _axes(schedule), schedule.blocks.counts, schedule.shards.cuts, strict=False
    ):
        block = block * n_blocks + (x + phase) // cell
        shard = shard * n_cut + x // extent
    owner, holder = schedule.owners(block), schedule.shards.table.ranks_at(shard, points[-1])
    moves = owner != holder
    near = moves & (owner // ranks_per_node == holder // ranks_per_node)
    n_moves, n_near = int(moves.sum()), int(near.sum())
    if ranks_per_node >= schedule.n_ranks:
        return 1 - n_moves / _N_SAMPLES, 1.0
    return 1 - n_moves / _N_SAMPLES, n_near / n_moves if n_moves else 1.0
