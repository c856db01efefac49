"""Are missing chunks counted, each once, in every way of reading?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zarr

from shardload.formats.lookup import open_source
from shardload.planning.region import Grid, Region
from shardload.planning.selection import select_axes
from shardload.transfer.counters import chunk_numbers

SHAPE, CHUNKS = (7, 10, 3), (2, 4, 3)


@pytest.mark.parametrize("select", [None, (slice(3, 6), slice(5, 9)), (slice(1, None), 7), (4, slice(2, 10), 1)])
def test_number_of_a_chunk_in_the_selection(select: Any) -> None:
    selection = select_axes(select, SHAPE)
    cell = tuple(CHUNKS[k] for k in selection.kept)
    chunks = Grid(selection.shape, cell, tuple(o % c for o, c in zip(selection.offset, cell, strict=True)))
    boxes = [selection.to_file(chunks.region(number)) for number in range(chunks.n_cells)]
    indices = [tuple(a // c for a, c in zip(box.start, CHUNKS, strict=True)) for box in boxes]
    assert chunk_numbers(indices, selection, CHUNKS, chunks).tolist() == list(range(chunks.n_cells))


# --- sources say which


def test_open_zarr_arrays_too() -> None:
    array = zarr.create_array(store=zarr.storage.MemoryStore(), shape=(6, 4), chunks=(2, 4), dtype="i4", fill_value=9)
    array[2:4] = 1
    source = open_source(array, "/")
    assert list(source.read_into(Region.whole((6, 4)), np.empty((6, 4), "i4"))) == [(0, 0), (2, 0)]
