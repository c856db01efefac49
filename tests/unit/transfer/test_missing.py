"""Are missing chunks counted, each once, in every way of reading?"""

from __future__ import annotations

from collections import Counter

import numpy as np
import zarr
from hypothesis import given, settings

from shardload.formats.lookup import open_source
from shardload.planning.region import Region
from shardload.transfer.counters import counter_of
from tests.unit.brute_force import Case, cases


@given(cases())
@settings(deadline=None)
def test_each_chunk_is_counted_by_one_rank_in_one_read(case: Case) -> None:
    """Wrong if a chunk that several ranks, or blocks, read is counted twice, or one that no block holds wholly not at all."""
    plan, counted = case.plan(), Counter[int]()
    for rank in range(case.n_ranks):
        counts = counter_of(plan, rank)
        for read in plan.outgoing(rank):
            met = np.fromiter(case.chunks.meeting(read.region), np.int64)
            counted.update(counts(read, met, case.chunks).tolist())
    assert counted == Counter(range(case.chunks.n_cells))


# --- sources say which


def test_open_zarr_arrays_too() -> None:
    array = zarr.create_array(store=zarr.storage.MemoryStore(), shape=(6, 4), chunks=(2, 4), dtype="i4", fill_value=9)
    array[2:4] = 1
    source = open_source(array, "/")
    source.read_into(Region.whole((6, 4)), np.empty((6, 4), "i4"))
    assert list(source.missing(Region.whole((6, 4)))) == [(0, 0), (2, 0)]
