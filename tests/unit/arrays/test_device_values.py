"""Is a part of a shard read back from its device the part that was asked for, copied or viewed?"""

from __future__ import annotations

import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardload.arrays.assemble import copy_from_device, device_values
from shardload.planning.region import Region


@pytest.mark.parametrize("values_of", [device_values, copy_from_device])
def test_of_a_scalar(values_of: Any) -> None:
    found = values_of(jnp.float32(3), Region((), ()), Region((), ()))
    assert (found.shape, found[()]) == ((), 3)


def test_beyond_what_32_bits_can_count() -> None:
    """Wrong if JAX's 32-bit indices wrapped: of a long axis other elements would be saved, and verified."""
    n = 2**31 + 4096
    values = np.frombuffer(mmap.mmap(-1, n), dtype=np.uint8)  # takes memory only where it is written
    place = Region((2**31 + 5,), (2**31 + 9,))
    values[:4], values[place.slices()] = [1, 2, 3, 4], [11, 12, 13, 14]
    found = copy_from_device(jax.device_put(values), place, Region.whole((n,)))
    np.testing.assert_array_equal(found, values[place.slices()], strict=True)
