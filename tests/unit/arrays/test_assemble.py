"""Is every shard the one that JAX asked for, and what is read back of it? On eight devices: `tests.unit.test_eight_devices`."""

from __future__ import annotations

import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardload.arrays.assemble import assemble, copy_from_device, device_values
from shardload.errors import ShardloadError
from shardload.planning.region import Region


def test_what_jax_makes_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should JAX come to give back something else than was asked for, that is an error too."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("a",)), P("a"))
    data = np.zeros((4, 3), "f4")
    piece = Region.whole((4, 3)), data
    make = jax.make_array_from_callback
    assert assemble((4, 3), sharding, data.dtype, [piece]).shape == (4, 3)
    for shape, dtype in (((3, 4), "f4"), ((4, 3), "i4")):
        wrong = np.zeros(shape, dtype)

        def another(*_: object, wrong: np.ndarray = wrong, **__: object) -> jax.Array:  # type: ignore[type-arg]
            return make(wrong.shape, sharding, lambda index: wrong[index])

        monkeypatch.setattr(jax, "make_array_from_callback", another)
        with pytest.raises(ShardloadError, match=r"JAX made an array of .*; expected \(4, 3\), float32"):
            assemble((4, 3), sharding, data.dtype, [piece])


@pytest.mark.parametrize(
    "index",
    [
        (slice(None),),
        (slice(None),) * 3,
        *((part, slice(None)) for part in (np.s_[0:4:2], np.s_[::-1], np.s_[0:5], np.s_[-2:4], np.s_[3:2], 0, ...)),
    ],
)
def test_an_index_that_is_no_region_is_an_error(monkeypatch: pytest.MonkeyPatch, index: Any) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("a",)), P("a"))
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, sharding, answer, dtype: answer(index))
    with pytest.raises(ValueError, match="index"):
        assemble((4, 3), sharding, np.dtype("f4"), [(Region.whole((4, 3)), np.zeros((4, 3), "f4"))])


# --- read back


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
