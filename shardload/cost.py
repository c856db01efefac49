"""What does each way of reading cost, and which one should be taken?

Pure, like `plan`: the same numbers on every rank, so every rank takes the same way. Counts (chunks, bytes, messages) are
exact where that costs little, and say so where they are bounds. Seconds are a model with round constants (see
docs/design/auto.md): good for choosing between ways, not for promising a time.

1. Count, axis by axis, how many chunks each shard meets: products of these are the decodes of the direct way.
2. Count the (block, shard) pairs that meet and whose owner is not the holder: these are the messages of the other two.
3. Turn both into seconds of the busiest rank and take the least.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.plan import Grid, ReadPlan, Shards
from shardload.units import format_nbytes

__all__ = ["DIRECT", "MODES", "PARALLEL", "ROOT", "Cost", "choose_mode", "plan_cost"]

ROOT, PARALLEL, DIRECT = "root", "parallel", "direct"
MODES = (ROOT, PARALLEL, DIRECT)

# Decoded bytes per second of one reading rank, page cache warm (measured with h5py and zarr-python; rounded).
_CONTIGUOUS_RATE = 4e9
_CODEC_RATES = {"none": 2e9, "zstd": 7e8, "blosc": 7e8, "lz4": 7e8, "lzf": 4e8, "gzip": 2e8, "zlib": 2e8}
_OTHER_CODEC_RATE = 3e8
_EXCHANGE_RATE = 1.5e9  # bytes per second into or out of one rank
_MESSAGE_SECONDS = 3e-5  # per message, both ends
_RUN_SECONDS = 1e-6  # per contiguous run of a strided read
# A way must be this much better than a simpler one to be taken: the model is no better than that.
_MARGIN = 0.9
# Above this many (block, shard) pairs the counts of messages are bounds, so that planning stays fast.
_MAX_PAIRS = 4_000_000

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way of reading costs the job.

    Attributes
    ----------
    mode : str
        ``"root"``, ``"parallel"`` or ``"direct"``.
    n_readers : int
        Ranks that read.
    chunks_decoded : int
        Chunk decodes in the whole job (0 where the file has no chunks).
    decoded_nbytes : int
        Bytes decoded or, without chunks, read, in the whole job.
    amplification : float
        `decoded_nbytes` over the bytes of the array; 1.0 is each byte once.
    messages, moved_nbytes : int
        Messages between different ranks (before long ones are split) and the bytes in them.
    is_exact : bool
        Whether these two are exact; else they are upper bounds.
    reader_nbytes : int
        Bytes decoded by the busiest rank (at most: the last blocks may be cut short).
    peak_nbytes : int
        Host memory of the fullest rank: its pieces and its staging blocks.
    seconds : float
        Estimate for the busiest rank, by the model.
    """

    mode: str
    n_readers: int
    chunks_decoded: int
    decoded_nbytes: int
    amplification: float
    messages: int
    moved_nbytes: int
    is_exact: bool
    reader_nbytes: int
    peak_nbytes: int
    seconds: float


def plan_cost(
    mode: str,
    plan: ReadPlan,
    chunks: Grid,
    *,
    has_chunks: bool,
    file_itemsize: int,
    codec: str,
    chunk_nbytes: int | None = None,
    casts: bool = False,
    staging_blocks: int = 2,
) -> Cost:
    """Count what a plan costs.

    Parameters
    ----------
    mode : str
        Name of the way of reading that `plan` is for.
    plan : ReadPlan
        Who reads what.
    chunks : Grid
        The file's chunks (or the stand-ins for them).
    has_chunks : bool
        Whether they are real: without real chunks any part can be read by itself.
    file_itemsize : int
        Bytes per element in the file.
    codec : str
        `ArrayInfo.codec`.
    chunk_nbytes : int, optional
        Bytes of one chunk in the file, where that is more than a cell of `chunks`: a selection may drop axes.
    casts : bool
        Whether values are cast to another dtype on the way, in a buffer of their own.
    staging_blocks : int
        Blocks that a reader holds at once.
    """
    array_nbytes = math.prod(plan.blocks.shape) * file_itemsize
    chunk_nbytes = chunk_nbytes or math.prod(chunks.cell) * file_itemsize
    held = _shards_per_rank(plan.shards, plan.n_ranks)
    piece_nbytes = math.prod(plan.shards.shard_shape) * plan.itemsize * int(held.max(initial=0))
    if plan.is_direct:
        decodes, busiest = _direct_decodes(plan, chunks, has_chunks)
        unit = chunk_nbytes if has_chunks else file_itemsize
        decoded_nbytes, reader_nbytes = decodes * unit, busiest * unit
        n_readers = int(np.count_nonzero(held))
        messages, moved_nbytes, is_exact = 0, 0, True
    else:
        decodes = chunks.n_cells
        decoded_nbytes = chunks.n_cells * chunk_nbytes if has_chunks else array_nbytes
        n_readers = min(plan.n_readers, max(1, plan.blocks.n_cells))
        most_chunks = -(-plan.blocks.n_cells // n_readers) * math.prod(plan.blocks.cell) // math.prod(chunks.cell)
        reader_nbytes = min(decoded_nbytes, most_chunks * chunk_nbytes)
        messages, moved_nbytes, is_exact = _count_messages(plan)
    staging_nbytes = 0
    if casts or not plan.is_direct or _is_staged(plan):
        staging_nbytes = plan.max_read_size * (staging_blocks * plan.itemsize + casts * file_itemsize)
    seconds = reader_nbytes / _decode_rate(codec, has_chunks)
    if plan.is_direct and not has_chunks:
        seconds += _runs_per_piece(plan) * _RUN_SECONDS
    elif not plan.is_direct:
        ends = max(1, n_readers if mode == ROOT else min(n_readers, plan.n_ranks))
        seconds += moved_nbytes / ends / _EXCHANGE_RATE + messages / ends * _MESSAGE_SECONDS
    return Cost(
        mode=mode,
        n_readers=n_readers,
        chunks_decoded=decodes if has_chunks else 0,
        decoded_nbytes=decoded_nbytes,
        amplification=decoded_nbytes / array_nbytes if array_nbytes else 1.0,
        messages=messages,
        moved_nbytes=moved_nbytes,
        is_exact=is_exact,
        reader_nbytes=reader_nbytes,
        peak_nbytes=piece_nbytes + staging_nbytes,
        seconds=seconds,
    )


def choose_mode(costs: dict[str, Cost], n_ranks: int) -> tuple[str, str]:
    """Which way to take, and why, in words for a person.

    The simplest way wins unless another is clearly better: direct needs no messages, root needs one rank to see the file.
    """
    direct, parallel = costs[DIRECT], costs[PARALLEL]
    if n_ranks == 1:
        return DIRECT, "one process: it reads what it holds"
    if direct.decoded_nbytes == 0:
        return DIRECT, "the array is empty"
    ratio = direct.seconds / parallel.seconds
    verb = "decode" if direct.chunks_decoded else "read"
    sent = format_nbytes(parallel.moved_nbytes)
    if ratio * _MARGIN <= 1:
        return DIRECT, (
            f"each rank {verb}s what it holds, {direct.amplification:.3g}x the array in all: "
            f"no dearer than sending {sent} between ranks"
        )
    return PARALLEL, (
        f"each rank by itself would {verb} {direct.amplification:.3g}x the array in all; "
        f"once in the job, and {sent} sent between ranks, is about {ratio:.1f}x faster"
    )


def _decode_rate(codec: str, has_chunks: bool) -> float:
    if not has_chunks:
        return _CONTIGUOUS_RATE
    names = codec.lower().split("+")
    return min(
        (next((r for known, r in _CODEC_RATES.items() if known in n), _OTHER_CODEC_RATE) for n in names if n != "shuffle"),
        default=_CODEC_RATES["none"],
    )


def _unique_holders(shards: Shards) -> tuple[IntArray, IntArray]:
    return shards.holdings


def _shards_per_rank(shards: Shards, n_ranks: int) -> IntArray:
    _, ranks = _unique_holders(shards)
    return np.bincount(ranks, minlength=n_ranks)


def _direct_decodes(plan: ReadPlan, chunks: Grid, has_chunks: bool) -> tuple[int, int]:
    """Chunks (or elements, without chunks) that all ranks together, and the busiest one, read by themselves."""
    counts: IntArray = np.ones((), dtype=np.int64)
    shards = plan.shards
    for size, n_cut, extent, cell, phase in zip(
        plan.blocks.shape, shards.cuts, shards.shard_shape, chunks.cell, chunks.phase, strict=True
    ):
        low = np.minimum(np.arange(n_cut, dtype=np.int64) * extent, size)
        high = np.minimum(low + extent, size)
        n_chunks = np.where(high > low, -(-(high + phase) // cell) - (low + phase) // cell, 0)
        counts = np.multiply.outer(counts, n_chunks if has_chunks else high - low)
    shard, rank = _unique_holders(shards)
    per_holder = counts.reshape(-1)[shard]
    if per_holder.size == 0:
        return 0, 0
    per_rank = np.bincount(rank, weights=per_holder)
    return int(per_holder.sum()), int(per_rank.max())


def _axis_pairs(plan: ReadPlan) -> list[tuple[IntArray, IntArray, IntArray]]:
    """Along each axis: the (block, shard) pairs that share elements, and how many they share."""
    pairs = []
    blocks = plan.blocks
    for size, cell, phase, extent in zip(blocks.shape, blocks.cell, blocks.phase, plan.shards.shard_shape, strict=True):
        # Every boundary of either cut starts a new pair.
        edges = {0, size, *range(cell - phase, size, cell), *range(extent or 1, size, extent or 1)}
        bounds = np.array(sorted(e for e in edges if e <= size), dtype=np.int64)
        low = bounds[:-1]
        pairs.append(((low + phase) // cell, low // max(1, extent), np.diff(bounds)))
    return pairs


def _count_messages(plan: ReadPlan) -> tuple[int, int, bool]:
    """Messages between different ranks, bytes in them, and whether both are exact (else upper bounds)."""
    if plan.blocks.n_cells == 0:
        return 0, 0, True
    pairs = _axis_pairs(plan)
    n_pairs = math.prod(len(p[0]) for p in pairs)
    n_replicas = plan.shards.n_replicas
    if n_pairs * n_replicas > _MAX_PAIRS:
        total = math.prod(plan.blocks.shape) * plan.itemsize * n_replicas
        return n_pairs * n_replicas, total, False
    block: Any = np.zeros((), dtype=np.int64)
    shard: Any = block
    size: Any = np.ones((), dtype=np.int64)
    strides = itertools.accumulate(reversed(plan.blocks.counts), lambda a, b: a * b, initial=1)
    cut_strides = itertools.accumulate(reversed(plan.shards.cuts), lambda a, b: a * b, initial=1)
    # The last axis first, so that strides build up; order does not matter for sums.
    for (b, s, n), block_stride, shard_stride in zip(reversed(pairs), strides, cut_strides, strict=False):
        block = np.add.outer(block, b * block_stride)
        shard = np.add.outer(shard, s * shard_stride)
        size = np.multiply.outer(size, n)
    block, shard, size = block.reshape(-1), shard.reshape(-1), size.reshape(-1)
    reader = ((block + 1) * plan.n_readers - 1) // plan.blocks.n_cells
    owner = np.full_like(reader, plan.root) if plan.n_readers == 1 else reader * plan.n_ranks // plan.n_readers
    holders = np.sort(plan.shards.table(), axis=1)
    repeated = np.zeros(holders.shape, dtype=bool)
    repeated[:, 1:] = holders[:, 1:] == holders[:, :-1]
    remote = ((holders[shard] != owner[:, None]) & ~repeated[shard]).sum(axis=1)
    return int(remote.sum()), int((remote * size).sum()) * plan.itemsize, True


def _is_staged(plan: ReadPlan) -> bool:
    """Whether some direct read has gaps in its piece, so that it cannot be read straight into it."""
    blocks, gapless = plan.blocks, True
    axes = zip(blocks.shape, blocks.cell, blocks.phase, plan.shards.shard_shape, strict=True)
    for size, cell, phase, extent in reversed(list(axes)):
        if not gapless and min(size, cell, extent) > 1:
            return True
        # A block that ends inside a shard leaves a gap between the runs of the axes before; so does padding.
        gapless = gapless and size % max(1, extent) == 0 and not any(e % extent for e in range(cell - phase, size, cell))
    return False


def _runs_per_piece(plan: ReadPlan) -> int:
    """Contiguous runs of the file that the fullest piece is made of."""
    shape, extent = plan.blocks.shape, plan.shards.shard_shape
    runs, whole = 1, True
    for n, e in zip(reversed(shape), reversed(extent), strict=True):
        if not whole:
            runs *= min(n, e)
        whole = whole and e >= n
    return runs
