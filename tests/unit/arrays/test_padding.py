"""Is an array that a load returned known for as long as it exists, and no other taken for it?"""

from __future__ import annotations

import gc

import jax.numpy as jnp

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
