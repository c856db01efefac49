"""`scatter`: an array in one rank's memory instead of a file."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError
from tests.mpi.support import (
    DECOMPOSITIONS,
    VERIFY,
    check,
    cube,
    distinct,
    mesh_of,
    padded,
    ramp,
    same_error,
    share,
    unit,
)
from tests.mpi.test_values import X64

Array = np.ndarray[Any, Any]


def strided(values: Array) -> Array:
    """The same values, every other element of a larger array whose rest is wrong."""
    large = np.full(tuple(2 * n for n in values.shape), -99, values.dtype)
    view = large[tuple(slice(None, None, 2) for _ in values.shape)]
    view[...] = values
    return view


def backwards(values: Array) -> Array:
    """The same values, stored backwards along every axis."""
    return np.flip(np.flip(values).copy())


def partly_backwards(values: Array) -> Array:
    """The same values, stored backwards along axis 1."""
    return np.flip(np.flip(values, 1).copy(), 1)


def moved(values: Array) -> Array:
    """The same values, with axes stored in another order that is its own inverse nowhere."""
    return np.ascontiguousarray(values.transpose(1, 2, 0)).transpose(2, 0, 1)


def read_only(values: Array) -> Array:
    """The same values, not to be written."""
    values = values.copy()
    values.flags.writeable = False
    return values


def repeated(values: Array) -> Array:
    """One plane seen many times: a stride of 0."""
    return np.broadcast_to(values[:1], values.shape)


LAYOUTS: tuple[Callable[[Array], Array], ...] = (
    np.copy,
    np.asfortranarray,
    strided,
    backwards,
    partly_backwards,
    moved,
    read_only,
    repeated,
)
SENT = ("float32", ">f4", "bool", "int8", "complex64", "float16")


@pytest.mark.parametrize("spec", distinct(DECOMPOSITIONS).values(), ids=distinct(DECOMPOSITIONS))
def test_decomposition(comm: Any, spec: Any) -> None:
    """Wrong in the table of this decomposition, or if views were cut wrongly."""
    values, mesh = ramp(cube()), mesh_of()
    for root, verify in share(range(comm.size), VERIFY):
        x = shardload.scatter(values if comm.rank == root else None, mesh, spec, root=root, verify=verify)
        check(x, values, mesh, spec, (root, verify))


@pytest.mark.any_library
@pytest.mark.parametrize("dtype", SENT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout(comm: Any, layout: Callable[[Array], Array], dtype: str) -> None:
    """Wrong if strides were mistaken, or bytes swapped twice or not at all."""
    given, mesh = layout(ramp(cube(), dtype)), mesh_of()
    expected = np.array(given, order="C")
    for (spec,) in share((P("b", "a"), P(None, None, ("a", "b")), P()), first=LAYOUTS.index(layout) + SENT.index(dtype)):
        x = shardload.scatter(given if comm.rank == 0 else None, mesh, spec, verify="checksum")
        check(x, expected, mesh, spec, spec)


def test_some_blocks_are_thin(comm: Any, tune: Callable[..., Any]) -> None:
    """Wrong if blocks of one row, whose strides go forward, were sent as they are, before those that must be packed."""
    tune(worth_sharing_nbytes=0)
    values, mesh, spec = ramp((60, 7, 720))[:, ::-1], mesh_of(), P(None, None, ("a", "b"))
    for readers in ("root", "parallel"):
        check(shardload.load(values, mesh, spec, readers=readers, staging="60KiB"), values, mesh, spec, readers)
    check(shardload.scatter(values if comm.rank == 0 else None, mesh, spec, staging="60KiB"), values, mesh, spec)


@pytest.mark.parametrize("layout", [np.copy, moved, backwards])
def test_padding_and_cast(comm: Any, layout: Callable[[Array], Array]) -> None:
    """Wrong if the views were sent as they are although the values must change."""
    given, mesh = layout(ramp((2 * unit() - 1, 3 * unit() + 1, 5), "int16")), mesh_of()
    for spec in (P("a", "b"), P(None, ("b", "a"))):
        for dtype, pad in ((None, -3), ("float32", 0.5), ("float32", np.nan)):
            x = shardload.scatter(given if comm.rank == 0 else None, mesh, spec, dtype=dtype, pad=pad, staging="4KiB")
            check(x, padded(given.astype(dtype or "int16"), mesh, spec, pad), mesh, spec, (spec, dtype, pad))


@pytest.mark.parametrize("shape", [(4, 2000), (8000,)])
def test_rows_longer_than_a_staging_buffer(comm: Any, shape: tuple[int, ...]) -> None:
    """Values that are swapped or cast go through staging buffers, which are as small as `staging` asks for."""
    mesh, spec = mesh_of(), P(None, ("a", "b")) if len(shape) == 2 else P(("a", "b"))
    kinds = ((">f4", None), ("uint16", "float32"), ("float32", "bfloat16"), ("float32", "float64"))
    for (kind, dtype), staging in share(kinds, ("1KiB", "4KiB", "16KiB", "auto")):
        values = (ramp(shape, "int32") % 100).astype(kind)
        expected = values if dtype is None else values.astype(dtype)
        with X64(True):
            x = shardload.scatter(values if comm.rank == 0 else None, mesh, spec, dtype=dtype, pad=0, staging=staging)
        check(x, padded(expected, mesh, spec, 0), mesh, spec, (kind, staging))


@pytest.mark.parametrize("layout", [np.copy, np.asfortranarray, strided, moved])
@pytest.mark.parametrize("spec", [P(), P("a", "b")], ids=str)
def test_the_callers_array_is_not_the_jax_array(comm: Any, layout: Callable[[Array], Array], spec: Any) -> None:
    """Wrong if JAX were handed the caller's memory: on CPU it keeps it, and what is written there changes the array."""
    values, mesh = ramp(cube()), mesh_of()
    given = layout(values)
    x = shardload.scatter(given if comm.rank == 0 else None, mesh, spec)
    given[...] = -1
    check(x, values, mesh, spec)
    del given
    gc.collect()
    check(x, values, mesh, spec)


def test_the_callers_array_is_not_written(comm: Any) -> None:
    """Wrong if a donated or updated jax.Array shared memory with the caller's."""
    values, mesh = ramp(cube()), mesh_of()
    x = shardload.scatter(values, mesh, P("a"))
    y = jax.jit(lambda a: a * 2 + 1, donate_argnums=0)(x)
    y.block_until_ready()
    np.testing.assert_array_equal(values, ramp(cube()))
    check(y, values * 2 + 1, mesh, P("a"))


def test_function_is_called_on_root_alone(comm: Any) -> None:
    """Wrong if every rank made the array: the reason for handing in a function is that there is room for one."""
    values, mesh = ramp(cube()), mesh_of()
    for root in {0, comm.size - 1}:
        calls: list[int] = []

        def make(calls: list[int] = calls) -> Array:
            calls.append(comm.rank)
            return values

        check(shardload.scatter(make, mesh, P("b", "a"), root=root), values, mesh, P("b", "a"))
        assert calls == ([root] if comm.rank == root else [])


def test_zero_d_scalars_and_lists(comm: Any) -> None:
    """Wrong if what NumPy takes for an array were not taken here."""
    for given in (np.float32(3.5), np.array(7, "int32"), [[1.5, 2.5]], True, np.array(2.5, ">f4"), np.array(3, "int16")[...]):
        values = np.asarray(given)
        dtype = "float32" if values.dtype == "float64" else None
        x = shardload.scatter(given if comm.rank == 0 else None, mesh_of(), P(), dtype=dtype)
        check(x, values.astype(dtype or values.dtype), mesh_of(), P(), given)


def test_jax_array_on_root(comm: Any) -> None:
    """Wrong if an array that JAX has already were refused or aliased."""
    values = ramp(cube())
    given = jax.device_put(values, jax.local_devices()[0])
    check(shardload.scatter(given, mesh_of(), P("a", "b")), values, mesh_of(), P("a", "b"))


def test_root_that_is_not_a_rank(comm: Any) -> None:
    """Wrong if nobody sent, and all waited."""
    for root in (comm.size, -1, 0.5, True, "0"):
        same_error(
            comm, lambda root=root: shardload.scatter(None, mesh_of(), P(), root=root), ConfigError, "root is", repr(root)
        )


def test_array_that_jax_cannot_hold(comm: Any) -> None:
    """Wrong if strings or objects were sent as bytes."""
    for given in (np.array(["a"]), np.array([object()]), np.zeros(3, "M8[s]"), np.zeros(3, [("x", "f4")])):
        same_error(comm, lambda given=given: shardload.scatter(given, mesh_of(), P()), shardload.SourceError, "holds")
    # Wrong if the root told of an unforeseen error, in JAX's words alone.
    deleted, spread = jax.numpy.zeros(3), shardload.scatter(np.zeros(len(jax.devices())), mesh_of(), P(("a", "b")), dtype="f4")
    deleted.delete()
    for given in (deleted, jax.random.key(0), *([spread] if comm.size > 1 else ())):
        same_error(
            comm, lambda given=given: shardload.scatter(given, mesh_of(), P()), ConfigError, "NumPy gets no values", "Array"
        )


def test_masked_arrays(comm: Any) -> None:
    """Wrong if what lies below a mask came out as a value: netCDF4-python returns fill values so, JAX refuses such arrays."""
    values = ramp(cube())
    plain, masked = np.ma.masked_array(values), np.ma.masked_equal(values, 3)
    for call in (shardload.load, shardload.scatter):
        check(call(plain, mesh_of(), P("a")), values, mesh_of(), P("a"))
        says = f"the array of shape {values.shape} in memory has masked elements"
        same_error(comm, lambda call=call: call(masked, mesh_of(), P("a")), shardload.SourceError, says, "filled")
