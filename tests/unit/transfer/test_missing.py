"""Are missing chunks counted, each once, in every way of reading?"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings

from shardload.errors import MissingChunksWarning, SourceError
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.lookup import open_source
from shardload.planning.region import Grid, Region
from shardload.planning.selection import select_axes
from shardload.transfer.counters import chunk_numbers, counter_of, describe_missing, settle_missing
from tests.unit.brute_force import Case, cases

SHAPE, CHUNKS = (7, 10, 3), (2, 4, 3)


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


@pytest.mark.parametrize("select", [None, (slice(3, 6), slice(5, 9)), (slice(1, None), 7), (4, slice(2, 10), 1)])
def test_number_of_a_chunk_in_the_selection(select: Any) -> None:
    selection = select_axes(select, SHAPE)
    cell = tuple(CHUNKS[k] for k in selection.kept)
    chunks = Grid(selection.shape, cell, tuple(o % c for o, c in zip(selection.offset, cell, strict=True)))
    boxes = [selection.to_file(chunks.region(number)) for number in range(chunks.n_cells)]
    indices = [tuple(a // c for a, c in zip(box.start, CHUNKS, strict=True)) for box in boxes]
    assert chunk_numbers(indices, selection, CHUNKS, chunks).tolist() == list(range(chunks.n_cells))


def test_what_is_said() -> None:
    info, selection = ArrayInfo("f.h5", "/a", "HDF5", SHAPE, "float32", CHUNKS), select_axes(None, SHAPE)
    chunks = Grid(SHAPE, CHUNKS, (0, 0, 0))
    text = describe_missing(5, 1, info, selection, chunks)
    assert "5 of 12 chunks are not stored in '/a' in 'f.h5'" in text
    assert text.endswith("and have its fill value: (0, 1, 0) (elements [0:2, 4:8, 0:3]), ...")
    one = describe_missing(1, 1, info, selection, chunks)
    assert "1 of 12 chunks is not stored in '/a' in 'f.h5', and has its fill value: (0" in one
    settle_missing(text, "fill", 0, info)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        settle_missing(text, "warn", 1, info)
    assert not said  # rank 0 says it for all ...
    with warnings.catch_warnings(), pytest.raises(MissingChunksWarning):
        warnings.simplefilter("error")
        settle_missing(text, "warn", 1, info)  # ... but where it is raised, by all
    with pytest.warns(MissingChunksWarning, match=r"5 of 12 .* Pass missing='error' to refuse") as found:
        settle_missing(text, "warn", 0, info)
    assert found[0].filename == __file__
    with pytest.raises(SourceError, match=r"5 of 12 .* Nothing was loaded. Pass missing='fill'") as error:
        settle_missing(text, "error", 1, info)
    assert error.value.path == "f.h5" and error.value.dataset == "/a"


# --- sources say which


def test_open_zarr_arrays_too() -> None:
    array = zarr.create_array(store=zarr.storage.MemoryStore(), shape=(6, 4), chunks=(2, 4), dtype="i4", fill_value=9)
    array[2:4] = 1
    source = open_source(array, "/")
    source.read_into(Region.whole((6, 4)), np.empty((6, 4), "i4"))
    assert list(source.missing(Region.whole((6, 4)))) == [(0, 0), (2, 0)]
