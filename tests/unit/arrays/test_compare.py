"""Are values compared bit by bit, and are the checked regions inside the shard, in one chunk, the same on every rank?"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.arrays.verification import first_difference, true_values
from shardload.errors import ShardloadError
from shardload.formats.memory import MemorySource
from shardload.planning.region import Grid, Region
from shardload.planning.samples import sample_regions
from shardload.planning.schedule import SourceLayout
from shardload.planning.selection import select_axes

TABLE = np.arange(30, dtype=np.float32).reshape(5, 6)


@pytest.mark.parametrize("dtype", ["bool", "i1", "u2", "f2", "f4", "f8", "c8", "c16", ml_dtypes.bfloat16])
def test_the_first_of_two_that_differ(dtype: Any) -> None:
    values = (np.arange(30) % 2).astype(dtype).reshape(5, 6)
    other = np.array(values.T, order="C").T  # other strides, the same values
    assert first_difference(values, other) is None
    for place in ((4, 5), (2, 3)):
        other[place] = 0 if values[place] else 1
    assert first_difference(values, other) == (2, 3)


def test_bits_count_not_values() -> None:
    nan, other_nan = np.array([0x7FC00000, 0x7FC00001], "u4").view("f4")
    assert first_difference(np.array([1, nan]), np.array([1, nan])) is None
    assert first_difference(np.array([1, nan]), np.array([1, other_nan])) == (1,)
    assert first_difference(np.float32([1, 0.0]), np.float32([1, -0.0])) == (1,)
    assert first_difference(np.array(3), np.array(4)) == ()
    with pytest.raises(ShardloadError, match="cannot be compared"):
        first_difference(np.zeros(3), np.zeros(4))


shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=0, max_size=3)


@given(shapes, st.booleans(), st.integers(0, 5), st.data())
def test_boxes_lie_in_one_chunk_of_the_shard(
    axes: list[tuple[int, int]], chunked: bool, seed: int, data: st.DataObject
) -> None:
    shape, cell = tuple(n for n, _ in axes), tuple(c for _, c in axes)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    shard = Region(start, shape)
    grid = Grid(shape, cell, (0,) * len(shape)) if chunked else None
    found = list(sample_regions(shard, grid, 1 << 12, seed, 3))  # boxes of 16 elements at most
    assert found == list(sample_regions(shard, grid, 1 << 12, seed, 3))
    assert 1 <= len(found) <= 3
    for box in found:
        assert shard.contains(box)
        assert 1 <= box.size <= 16
        assert grid is None or grid.n_meeting(box) == 1


def test_true_values_are_selected_swapped_and_cast() -> None:
    source = MemorySource(TABLE.astype(">i8"))
    layout = SourceLayout.cut(select_axes((slice(1, 4),), (5, 6)), None, source.dtype, np.dtype("i2"))
    found = true_values(source, layout, Region((1, 2), (3, 4)))
    np.testing.assert_array_equal(found, TABLE[2:4, 2:4].astype("i2"), strict=True)
