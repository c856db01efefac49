"""The pencil FFT of the examples, against numpy.fft.fftn, with every axis of a different length."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from examples import pencil_fft as example
from tests.mpi.support import put
from tests.mpi.test_values import X64
from tests.tiers import IS_QUICK

pytestmark = pytest.mark.any_library

TOLERANCE: dict[type, float] = {np.float32: 2e-6, np.float64: 2e-15}  # of the largest mode


def meshes() -> list[Mesh]:
    """Every pa x pb there is for these devices, and one with the devices in another order."""
    devices = np.array(jax.devices())
    n = devices.size
    found = [Mesh(devices.reshape(n // pb, pb), ("a", "b")) for pb in range(1, n + 1) if n % pb == 0]
    return [*found, Mesh(devices[::-1].reshape(found[0].devices.shape[::-1]), ("p", "q"))]


def field(dtype: type) -> np.ndarray[Any, Any]:
    n = len(jax.devices())
    return np.random.default_rng(1).normal(1, 1, (2 * n, 3 * n, 5 * n)).astype(dtype)


def worst(modes: jax.Array, expected: np.ndarray[Any, Any]) -> float:
    """Largest error on the shards of this process, relative to the largest mode."""
    errors = [np.abs(np.asarray(s.data) - expected[s.index]).max(initial=0) for s in modes.addressable_shards]
    return float(max(errors) / np.abs(expected).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_numpy_on_every_mesh(dtype: type) -> None:
    with X64(dtype is np.float64):
        values = field(dtype)
        expected = np.fft.fftn(values.astype(np.float64))
        for mesh in meshes()[1::2] if IS_QUICK else meshes() if dtype is np.float32 else meshes()[-1:]:
            a, b = mesh.axis_names
            pa, pb = mesh.devices.shape
            modes = example.fft3d(put(values, mesh, P(None, a, b)))
            assert modes.dtype == np.result_type(dtype, np.complex64)
            n0, n1, n2 = values.shape
            assert modes.sharding.shard_shape(modes.shape) == (n0 // pa, n1 // pb, n2)
            assert worst(modes, expected) < TOLERANCE[dtype], mesh


def test_explicit_mesh() -> None:
    """What jax.make_mesh gives today has axes of another type than Mesh(...) has."""
    mesh = jax.make_mesh((1, len(jax.devices())), ("a", "b"))
    values = field(np.float32)
    modes = example.fft3d(put(values, mesh, P(None, "a", "b")))
    assert worst(modes, np.fft.fftn(values)) < TOLERANCE[np.float32]


def test_plane_wave_has_two_modes() -> None:
    x = example.plane_wave(example.square_mesh(), (1, 2, 3))
    expected = np.zeros(x.shape)
    expected[1, 2, 3] = expected[-1, -2, -3] = x.size / 2
    assert worst(example.fft3d(x), expected) < TOLERANCE[np.float32]


def test_refuses_what_is_not_a_pencil() -> None:
    mesh = example.square_mesh()
    values = field(np.float32)
    for spec in (P("a", "b"), P(None, "a"), P(None, ("a", "b"), None), P()):
        with pytest.raises(ValueError, match=re.escape("P(None, 'a', 'b')")):
            example.fft3d(put(values, mesh, spec))


@pytest.mark.mpi(min_size=4)
def test_refuses_axes_that_do_not_divide() -> None:
    mesh = example.square_mesh()
    pa = mesh.shape["a"]
    values = np.zeros((pa + 1, 4 * pa, 4 * pa), np.float32)
    with pytest.raises(ValueError, match=f"axis 0 has {pa + 1} elements"):
        example.fft3d(put(values, mesh, P(None, "a", "b")))
