"""Is a part of a shard read back from its device the part that was asked for, copied or viewed?"""

from __future__ import annotations

import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardload.arrays.assemble import device_values
from shardload.planning.region import Region

HELD = Region((4, 10, 1), (7, 15, 3))
PARTS = [HELD, Region((5, 11, 2), (6, 15, 3)), Region((6, 14, 2), (7, 15, 3)), Region((5, 11, 2), (5, 11, 2))]


@pytest.mark.each_value
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("region", PARTS, ids=str)
@pytest.mark.parametrize("dtype", ["bool", "float32", "complex64", "bfloat16"])
def test_a_part_of_a_shard(region: Region, dtype: Any, view: bool) -> None:
    shard = jnp.arange(30).reshape(HELD.shape).astype(dtype)
    expected = np.asarray(shard)[region.slices(HELD.start)]
    np.testing.assert_array_equal(device_values(shard, region, HELD, view), expected, strict=True)


@pytest.mark.parametrize("view", [True, False])
def test_of_a_scalar(view: bool) -> None:
    found = device_values(jnp.float32(3), Region((), ()), Region((), ()), view)
    assert (found.shape, found[()]) == ((), 3)


def test_beyond_what_32_bits_can_count() -> None:
    """Wrong if JAX's 32-bit indices wrapped: of a long axis other elements would be saved, and verified."""
    n = 2**31 + 4096
    values = np.frombuffer(mmap.mmap(-1, n), dtype=np.uint8)  # takes memory only where it is written
    place = Region((2**31 + 5,), (2**31 + 9,))
    values[:4], values[place.slices()] = [1, 2, 3, 4], [11, 12, 13, 14]
    found = device_values(jax.device_put(values), place, Region.whole((n,)), view_on_cpu=False)
    np.testing.assert_array_equal(found, values[place.slices()], strict=True)
