"""What does a plan make the job do, in whole numbers?

Pure, like `plan`. An axis is cut independently of the others, so most counts are products of counts along the axes, and cost
the same for eight ranks and for a million. Only who sends to itself or to its own node depends on all axes at once: that is
counted pair by pair where there are few pairs of a block and a shard, and else estimated from a fixed sample of elements.

* `count_held`: how many ranks hold anything, and how much does the fullest hold?
* `count_direct`: how many chunks are decoded where each rank reads what it holds?
* `count_traffic`: how many messages and bytes go between ranks, and how much of that stays inside a node?
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.grid import Grid
from shardload.plan import ReadPlan
from shardload.shards import RankBoxes, Shards

__all__ = ["Traffic", "count_direct", "count_held", "count_traffic"]

# Above this many (block, shard, device) triples messages are bounds and shares are sampled, so that planning stays fast.
_MAX_TRIPLES = 1 << 14
_N_SAMPLES = 1 << 12

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What goes between different ranks.

    Attributes
    ----------
    handovers : int
        Pairs of a block and another rank of the same node that needs some of it: one message each.
    parts : int
        Parts that go to another node (before long ones are split): one message each.
    moved_nbytes : int
        Bytes in both.
    same_node : float
        The share of `moved_nbytes` that stays inside a node; 1.0 where nothing moves.
    stays : float
        The share of all parts that the reader itself holds, and which do not move.
    is_exact : bool
        Whether all these are exact. Else counts are upper bounds, in which nothing stays, and shares are estimates.
    """

    handovers: int
    parts: int
    moved_nbytes: int
    same_node: float
    stays: float
    is_exact: bool


def count_held(shards: Shards) -> tuple[int, int]:
    """Ranks that hold anything, and how many shards the fullest of them holds."""
    if isinstance(shards.ranks, RankBoxes):
        return math.prod(shards.ranks.counts), math.prod(shards.ranks.box[: shards.n_cut_axes])
    held = shards.held_by_rank
    return int(np.count_nonzero(held)), int(held.max(initial=0))


# --- direct


def count_direct(plan: ReadPlan, chunks: Grid, *, has_chunks: bool) -> tuple[int, int]:
    """Chunks (or elements, without chunks) that all ranks together, and the busiest one, read by themselves."""
    axes = zip(plan.blocks.shape, plan.shards.cuts, plan.shards.shard_shape, chunks.cell, chunks.phase, strict=True)
    per_cut = [_met_by_cuts(*axis, has_chunks=has_chunks) for axis in axes]
    if isinstance(plan.shards.ranks, RankBoxes):
        return _direct_in_boxes(per_cut, plan.shards, plan.shards.ranks)
    shard, rank = plan.shards.holdings
    if all(along.strides == (0,) for along in per_cut):  # all shards alike
        each = math.prod(int(along[0]) for along in per_cut)
        return each * len(shard), each * count_held(plan.shards)[1]
    counts: IntArray = np.ones((), dtype=np.int64)
    for along in per_cut:
        counts = np.multiply.outer(counts, along)
    per_holding = counts.ravel()[shard]
    return int(per_holding.sum()), int(np.bincount(rank, weights=per_holding).max(initial=0))


def _met_by_cuts(size: int, n_cut: int, extent: int, cell: int, phase: int, *, has_chunks: bool) -> IntArray:
    """Along one axis: how many chunks (or elements) each of the cuts meets."""
    if size == n_cut * extent and size and (not has_chunks or (phase == 0 and (cell % extent == 0 or extent % cell == 0))):
        each = max(1, extent // cell) if has_chunks else extent
        alike: IntArray = np.broadcast_to(np.array(each, dtype=np.int64), (n_cut,))
        return alike
    low = np.minimum(np.arange(n_cut, dtype=np.int64) * extent, size)
    high = np.minimum(low + extent, size)
    met: IntArray = np.where(high > low, -(-(high + phase) // cell) - (low + phase) // cell, 0) if has_chunks else high - low
    return met


def _direct_in_boxes(per_cut: list[IntArray], shards: Shards, ranks: RankBoxes) -> tuple[int, int]:
    """A rank's box of shards is a product of intervals, so its sum is a product of sums and the largest one of maxima."""
    total, busiest = math.prod(ranks.counts[shards.n_cut_axes :]), 1
    mesh = iter(zip(ranks.counts, ranks.box, strict=True))
    for along in per_cut:
        shape: list[int] = []
        while math.prod(shape) < len(along):  # the mesh axes that cut this axis
            shape += next(mesh)
        per_rank = along.reshape(shape).sum(axis=tuple(range(1, len(shape), 2)))
        total *= int(along.sum())
        busiest *= int(per_rank.max(initial=0))
    return total, busiest


# --- the other ways


def count_traffic(plan: ReadPlan, ranks_per_node: int) -> Traffic:
    """Count what a plan with readers sends, where rank ``r`` runs on node ``r // ranks_per_node``."""
    shards = plan.shards
    if plan.is_direct or plan.blocks.n_cells == 0:
        return Traffic(0, 0, 0, 1.0, 1.0, True)
    n_pairs = math.prod(_n_axis_pairs(*axis) for axis in _axes(plan))
    if n_pairs * shards.n_replicas <= _MAX_TRIPLES:
        return _count_triples(plan, ranks_per_node)
    stays, same_node = _sample_shares(plan, ranks_per_node)
    n_holders = shards.n_holders or shards.n_replicas
    n_handovers = math.ceil(n_pairs * n_holders * same_node)
    moved_nbytes = math.prod(plan.blocks.shape) * plan.itemsize * n_holders
    return Traffic(n_handovers, n_pairs * n_holders - n_handovers, moved_nbytes, same_node, stays, False)


def _axes(plan: ReadPlan) -> list[tuple[int, int, int, int]]:
    blocks = plan.blocks
    return list(zip(blocks.shape, blocks.cell, blocks.phase, plan.shards.shard_shape, strict=True))


def _n_axis_pairs(size: int, cell: int, phase: int, extent: int) -> int:
    """Along one axis: how many pairs of a block and a shard share elements. One more than the boundaries of either cut."""
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


def _count_triples(plan: ReadPlan, ranks_per_node: int) -> Traffic:
    """Look at each block, shard and device."""
    block: Any = np.zeros((), dtype=np.int64)
    shard, size = block, block + 1
    for axis, n_blocks, n_cut in zip(_axes(plan), plan.blocks.counts, plan.shards.cuts, strict=True):
        b, s, n = _axis_pairs(*axis)
        block = np.add.outer(block * n_blocks, b)
        shard = np.add.outer(shard * n_cut, s)
        size = np.multiply.outer(size, n)
    block, shard, size = block.reshape(-1, 1), shard.reshape(-1, 1), size.reshape(-1, 1)
    owner = plan.owners(block)
    holder = np.sort(plan.shards.ranks_at(shard, np.arange(plan.shards.n_replicas)), axis=1)
    once = np.diff(holder, axis=1, prepend=-1) != 0
    moves = once & (holder != owner)
    near = moves & (holder // ranks_per_node == owner // ranks_per_node)
    total, moved, near_size = (int((which * size).sum()) for which in (once, moves, near))
    handovers = np.unique((block * plan.n_ranks + holder)[near])
    return Traffic(
        handovers=len(handovers),
        parts=int(moves.sum() - near.sum()),
        moved_nbytes=moved * plan.itemsize,
        same_node=near_size / moved if moved else 1.0,
        stays=1 - moved / total,
        is_exact=True,
    )


def _sample_shares(plan: ReadPlan, ranks_per_node: int) -> tuple[float, float]:
    """Of all parts, by their size: the share that stays on its rank, and of the others the share that stays on its node.

    The same elements on every rank: a Kronecker sequence with the powers of the generalised golden ratio (M. Roberts, "The
    unreasonable effectiveness of quasirandom sequences", 2018), in integers.
    """
    shape = (*plan.blocks.shape, plan.shards.n_replicas)
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
        points, _axes(plan), plan.blocks.counts, plan.shards.cuts, strict=False
    ):
        block = block * n_blocks + (x + phase) // cell
        shard = shard * n_cut + x // extent
    owner, holder = plan.owners(block), plan.shards.ranks_at(shard, points[-1])
    moves = owner != holder
    near = moves & (owner // ranks_per_node == holder // ranks_per_node)
    n_moves, n_near = int(moves.sum()), int(near.sum())
    if ranks_per_node >= plan.n_ranks:
        return 1 - n_moves / _N_SAMPLES, 1.0
    return 1 - n_moves / _N_SAMPLES, n_near / n_moves if n_moves else 1.0
