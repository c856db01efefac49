"""How is an array cut into blocks for each way of reading?

- ``"root"``: one rank reads all blocks.
- ``"parallel"``: several ranks read some blocks each.
- ``"direct"``: every rank reads what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardload.planning.blocks import BLOCKS_PER_OWNER, NEAR_NBYTES, count_runs, most_chunks, plan_blocks, run_stride
from shardload.planning.grid import Grid
from shardload.planning.schedule import Direct, Owners, Schedule
from shardload.planning.shards import Shards
from shardload.planning.source_layout import SourceLayout

ROOT, PARALLEL, DIRECT = "root", "parallel", "direct"
MODES = (ROOT, PARALLEL, DIRECT)


def plan_direct(
    layout: SourceLayout, shards: Shards, n_ranks: int, *, max_nbytes: int, per_shard: Sequence[int] | None = None
) -> Schedule:
    """Every rank reads what it holds. Blocks are read once for all shards of a rank if reading each shard by itself costs more.

    That is so if a chunk may lie in two shards, or if runs are so close that the gaps between them are read too. Otherwise each
    shard is read by itself: without a copy if it lies in the file as in memory, and the first shard is complete early.

    Parameters
    ----------
    layout : SourceLayout
        How the array lies in its file.
    shards : Shards
        Which rank holds which shard.
    n_ranks : int
        Number of ranks in the job.
    max_nbytes : int
        Cap on a block.
    per_shard : sequence of int, optional
        As for `plan_blocks`.
    """
    is_merged = shards.sections_held > 1 and _shares_reads(layout, shards)
    blocks = _cut_blocks(layout, max_nbytes, within=shards.reach if is_merged else shards.section_shape, per_shard=per_shard)
    return Schedule(blocks, shards, layout.dtype.itemsize, n_ranks, Direct(is_merged))


def _shares_reads(layout: SourceLayout, shards: Shards) -> bool:
    """True if something that is read at once may lie in two sections of a rank."""
    chunks, extent = layout.chunks, shards.shard_shape
    if shards.has_halo:  # sections overlap
        return layout.has_chunks
    if layout.has_chunks:
        axes = zip(shards.cuts, extent, chunks.cell, chunks.phase, strict=True)
        return any(n > 1 and (phase or e % cell) for n, e, cell, phase in axes)
    is_near = run_stride(chunks.shape, extent) * layout.file_dtype.itemsize <= NEAR_NBYTES
    return count_runs(chunks.shape, extent) > 1 and is_near


def plan_shared(
    layout: SourceLayout,
    shards: Shards,
    n_ranks: int,
    owners: Owners,
    *,
    max_nbytes: int,
    per_owner: int = BLOCKS_PER_OWNER,
    per_shard: Sequence[int] | None = None,
) -> Schedule:
    """Some ranks own the blocks, and parts are sent between them and the ranks that hold the pieces.

    Parameters
    ----------
    layout, shards, n_ranks, max_nbytes
        As for `plan_direct`.
    owners : Owners
        The ranks that own blocks.
    per_owner : int
        Fewest blocks for each of them, as for `plan_blocks`; `per_shard` too.
    """
    blocks = _cut_blocks(layout, max_nbytes, n_owners=owners.n, per_owner=per_owner, per_shard=per_shard)
    return Schedule(blocks, shards, layout.dtype.itemsize, n_ranks, owners)


def _cut_blocks(layout: SourceLayout, max_nbytes: int, **how: Any) -> Grid:
    """Blocks that fit into a staging buffer of `max_nbytes`, with all chunks that they meet."""
    max_cells = most_chunks(layout.chunk_size * layout.wide_itemsize, max_nbytes) if layout.has_chunks else 1 << 62
    blocks = plan_blocks(layout.chunks, layout.wide_itemsize, max_nbytes=max_nbytes, max_cells=max_cells, **how)
    if how.get("per_shard") is None:
        return blocks
    return replace(blocks, phase=tuple(o % c for o, c in zip(layout.selection.offset, blocks.cell, strict=True)))
