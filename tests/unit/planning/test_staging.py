"""Do the buffers and threads of a rank stay under the staging cap, for one array and for several?"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.schedule import Schedule, SourceLayout
from shardload.planning.selection import select_axes
from shardload.planning.shards import plan_shards
from shardload.planning.staging import plan_staging
from tests.tiers import examples
from tests.unit.brute_force import every_way

Array = tuple[Schedule, SourceLayout]


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    shape = tuple(draw(st.integers(1, 300)) for _ in range(draw(st.integers(1, 3))))
    chunks = draw(st.none() | st.tuples(*(st.integers(1, n) for n in shape)))
    file_dtype, dtype = (np.dtype(draw(st.sampled_from(["u1", "f4", "f8"]))) for _ in range(2))
    layout = SourceLayout.cut(select_axes(None, shape), chunks, file_dtype, dtype)
    shards = plan_shards(shape, [()] * len(shape), np.arange(3))
    mode = draw(st.sampled_from(["root", "parallel", "direct"]))
    return every_way(layout, shards, 3, draw(st.sampled_from([1 << 10, 1 << 16])))[mode], layout


def scratch_nbytes(planned: list[Array]) -> int:
    """What one thread may hold, counted buffer by buffer: each grows to the largest that any array needs."""
    stored, decompressed, chunk, cast, block = [0], [0], [0], [0], [0]
    for schedule, layout in planned:
        stored.append(layout.chunk_nbytes)
        decompressed.append(layout.chunk_nbytes)
        chunk.append(layout.chunk_nbytes)
        if layout.casts:
            cast.append(layout.chunk_size * layout.dtype.itemsize)
            block.append(schedule.max_block_size * layout.file_dtype.itemsize)
    by_chunks = sum(map(max, (stored, decompressed, chunk, cast)))
    return max(by_chunks, max(block)) if len(planned) == 1 else by_chunks + max(block)


@examples(150)
@given(st.lists(arrays(), min_size=1, max_size=3), st.integers(1, 40), st.integers(0, 1 << 22))
def test_all_of_it_is_under_the_cap_if_one_of_each_is(planned: list[Array], n_threads: int, more: int) -> None:
    least = plan_staging(planned, 0, n_threads)
    assert (least.n_threads, least.n_slots, least.n_pack) == (1, 1, 1), "what cannot be had less of"
    one = 2 * least.slot_nbytes + scratch_nbytes(planned)
    found = plan_staging(planned, one + more, n_threads)
    used = found.n_threads * scratch_nbytes(planned) + found.n_blocks * found.slot_nbytes
    assert used <= one + more
    assert 1 <= found.n_threads <= min(n_threads, 16) and found.n_blocks == found.n_slots + found.n_pack
