"""Is an array that a load returned known for as long as it exists, and no other taken for it?"""

from __future__ import annotations

import gc

import jax.numpy as jnp
import numpy as np
import pytest

from shardload.arrays import padding
from shardload.arrays.padding import Extent, extent_of, padded_like, remember

EXTENT = Extent((5,), (6,), (2,), (0,))


def test_an_array_is_forgotten_with_its_extent() -> None:
    """Wrong if an entry stayed: another array at the same address would be taken for the one before."""
    gc.collect()  # arrays of other tests
    before = len(padding._loaded)
    array = jnp.zeros(6)
    remember(array, EXTENT)
    assert extent_of(array, None, "x") is EXTENT
    assert len(padding._loaded) == before + 1
    del array
    gc.collect()
    assert len(padding._loaded) == before


def test_padded_shapes_outlive_their_arrays() -> None:
    """Wrong if it depended on garbage collection, or on donation, whether what was computed from an array is known as such; or
    if a transposed array were not.
    """
    padded = Extent((7, 3), (8, 3), (1, 1), (0, 0))
    for gone in (True, False):
        remember(array := jnp.zeros((8, 3)), padded)
        array.delete()
        if gone:
            del array
            gc.collect()
    remember(whole := jnp.zeros(5), Extent((5,), (5,), (1,), (0,)))
    others = [jnp.zeros((8, 2, 2)), jnp.zeros((8, 8)), jnp.zeros((3, 8)), jnp.zeros((3, 7)), jnp.zeros(()), whole]
    alike = [(padded, {0: 0}), (padded, {0: 0}), (padded, {1: 0}), None, None, None]
    assert [padded_like(one) for one in others] == alike
    assert len(padding._padded) == 1
    remember(jnp.zeros((39, 14)), both := Extent((37, 13), (39, 14), (1, 1), (0, 0)))
    assert padded_like(jnp.zeros((14, 2, 39))) == (both, {0: 1, 2: 0})


@pytest.mark.parametrize("halo", [0, 1, 2])
@pytest.mark.parametrize(("n", "cuts"), [(12, 3), (11, 3), (5, 4), (6, 1)])
def test_places_against_a_loop(n: int, cuts: int, halo: int) -> None:
    """Wrong if the halo were counted once for the axis and not for each shard, or padding in the middle were the file's."""
    own = -(-n // cuts)
    expected = []
    for shard in range(cuts):
        expected += [-1] * halo + [i if i < n else -1 for i in range(shard * own, shard * own + own)] + [-1] * halo
    extent = Extent((n,), (len(expected),), (cuts,), (halo,))
    np.testing.assert_array_equal(extent.places(0), expected)
    np.testing.assert_array_equal(extent.places(0, 2, 5), expected[2:5])
