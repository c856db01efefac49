"""Is the CRC-32 of an array the same however it was cut, and that of all its bytes in one piece?"""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.region import Region
from shardload.transfer.checksum import join_sums, sum_shard

axes = st.lists(st.integers(1, 7), max_size=4)


def boxes(draw: Any, shape: tuple[int, ...]) -> list[Region]:
    """The shape cut at random places along each axis."""
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    pairs = itertools.product(*[list(itertools.pairwise(axis)) for axis in cuts])
    return [Region(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in pairs]


@given(st.data(), axes, st.sampled_from(["u1", "<i2", "<f4", "<c8", "<c16"]))
def test_it_is_zlibs_of_the_whole(data: st.DataObject, shape: list[int], dtype: str) -> None:
    whole = np.arange(np.prod(shape, dtype=int) * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype).reshape(shape)
    sums = [
        sum_shard(np.ascontiguousarray(whole[(*r.slices(), ...)]).reshape(r.shape), r, whole.shape)
        for r in boxes(data.draw, whole.shape)
    ]
    assert join_sums(sums[::-1], whole.nbytes) == zlib.crc32(whole.tobytes())


def test_of_nothing() -> None:
    assert join_sums([], 0) == zlib.crc32(b"")
    assert sum_shard(np.empty((0, 3), "f4"), Region((0, 0), (0, 3)), (0, 3)) == 0


@pytest.mark.parametrize("start", [0, 5])
def test_a_region_in_another_place_is_another_sum(start: int) -> None:
    """Wrong if two shards that took each other's place went unseen."""
    values = np.arange(5, dtype="<i4")
    here = Region((start,), (start + 5,))
    there = Region((5 - start,), (10 - start,))
    assert sum_shard(values, here, (10,)) != sum_shard(values, there, (10,))
