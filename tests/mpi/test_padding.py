"""Which elements of a padded array are the file's? Compared with NumPy's padding of the file's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError
from tests.mpi.support import check, grid_shape, mesh_of, on_root, padded, ramp, same_error
from tests.unit.files import write_hdf5

pytestmark = pytest.mark.any_library

SPECS = (P("a"), P("b", "a"), P(None, ("b", "a")), P())
MOVED = (P("b", "a"), P(None, ("b", "a")))  # for tests in which JAX compiles a program for each


def uneven() -> tuple[int, int]:
    """A shape of which no axis divides over two devices or more, except that all divides over one."""
    return 8 * len(jax.devices()) + 1, 4 * len(jax.devices()) - 1


def meshes() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "turned": mesh_of(devices[1:] + devices[:1]),
        "Explicit": jax.make_mesh(grid_shape(len(devices)), ("a", "b")),
        "without the last device": Mesh(np.array(devices[: max(1, len(devices) - 1)]).reshape(-1, 1), ("a", "b")),
    }


@pytest.fixture
def file(comm: Any, shared_tmp_path: Path) -> str:
    """A file with an array that is its own flat index."""
    return on_root(comm, lambda: write_hdf5(shared_tmp_path / "uneven.h5", {"x": ramp(uneven())}))


@pytest.mark.parametrize("mesh", meshes().values(), ids=meshes())
def test_mask_is_numpys(file: str, mesh: Any) -> None:
    """Wrong if an axis were cut at another's length, the mask were that of another device, or its padding came first."""
    for spec in SPECS:
        plan = shardload.plan(file, mesh, spec, pad=-1)
        x = plan.execute()
        expected = padded(np.ones(uneven(), dtype=bool), mesh, spec, False)
        for found in (shardload.mask(x), shardload.mask(x, plan), shardload.mask(x, uneven())):
            check(found, expected, mesh, spec, spec)
        computed = x + 5  # JAX may write its sharding in another way
        found = shardload.mask(computed, plan)
        assert found.sharding == computed.sharding
        for shard, at in zip(computed.addressable_shards, found.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data) != 4, np.asarray(at.data))


@pytest.mark.parametrize("mesh", meshes().values(), ids=meshes())
def test_unpad_is_the_file(file: str, mesh: Any) -> None:
    """Wrong if padding were taken off in the wrong place, or shards were put together in another order than the mesh's."""
    values = ramp(uneven())
    if jax.process_index() not in {device.process_index for device in mesh.devices.flat}:
        for spec in MOVED:
            x = shardload.load(file, mesh, spec, pad=-1)
            with pytest.raises(ConfigError, match="holds no device"):
                shardload.unpad(x, numpy=True)
        return
    for spec in MOVED:
        x = shardload.load(file, mesh, spec, pad=-1)
        np.testing.assert_array_equal(shardload.unpad(x, numpy=True), values, strict=True)
        whole = NamedSharding(mesh, P())
        check(shardload.unpad(x, sharding=whole), values, mesh, P())


@pytest.mark.parametrize("dtype", ["float32", "complex64", "bfloat16", "float16"])
def test_unpad_keeps_every_bit(comm: Any, dtype: str) -> None:
    """Wrong if what moves between devices were added to zeros, which makes 0.0 of -0.0, or widened, which changes some NaN."""
    n = len(jax.devices())
    kind = np.dtype(dtype)
    words = {"float32": [0x80000000, 0x7F800001], "bfloat16": [0x8000, 0x7F81], "float16": [0x8000, 0x7C01]}
    word = np.array(words.get(dtype, words["float32"]), f"u{kind.itemsize // (2 if kind.kind == 'c' else 1)}")
    for rows in (max(1, n // 2), n + 1):
        values = np.broadcast_to(word, (rows, 3 * kind.itemsize // word.itemsize, 2)).reshape(rows, -1).copy().view(kind)
        mesh = Mesh(np.array(jax.devices()), "a")
        x = shardload.scatter(values, mesh, P("a"), pad=1)
        for found in (shardload.unpad(x, numpy=True), shardload.unpad(x, sharding=NamedSharding(mesh, P()))):
            assert np.asarray(found).dtype == kind
            assert np.asarray(found).tobytes() == values.tobytes(), rows


def test_unpad_of_what_the_mesh_cannot_hold(comm: Any, file: str) -> None:
    """Wrong if JAX raised its own error, on some ranks, or an array of another shape were returned."""
    n = len(jax.devices())
    mesh = Mesh(np.array(jax.devices()), "a")
    x = shardload.load(file, mesh, P(None, "a"), pad=0)
    if n > 1:
        text = f"axis 1 of x has {uneven()[1]} elements, which do not divide over {n} devices"
        same_error(comm, lambda: shardload.unpad(x), ConfigError, text, "numpy=True", "P(None, None)", "use mask")
    else:
        assert shardload.unpad(x) is x
    even = shardload.load(file, mesh, P(None, "a"), select=np.s_[:, :n], pad=0)
    assert shardload.unpad(even) is even  # without padding there is nothing to do
    # A shape that divides although another one was padded: its elements have to move to other devices.
    check(shardload.unpad(x, (uneven()[0], n)), ramp(uneven())[:, :n], mesh, P(None, "a"))


def test_unpad_to_other_devices(comm: Any, file: str) -> None:
    """Wrong if JAX's own error about a jitted function were raised, or what was asked for were called missing."""
    devices, n = jax.devices(), len(jax.devices())
    x = shardload.load(file, mesh_of(), P("a"), pad=0)
    for others in (devices[1:], devices[::-1]) if n > 1 else ():
        moved = NamedSharding(Mesh(np.array(others), "a"), P())
        ids = ",".join(str(device.id) for device in others)
        text = f"sharding is over the devices [{ids}], but x is on ["
        same_error(comm, lambda s=moved: shardload.unpad(x, sharding=s), ConfigError, text, "jax.device_put")
    empty = shardload.scatter(np.empty((n, 0), "float32"), mesh_of(), P("a"))
    check(shardload.unpad(empty, sharding=NamedSharding(mesh_of(), P(("a", "b")))), ramp((n, 0)), mesh_of(), P(("a", "b")))
    alone = jnp.arange(4.0)  # on one device of each process, without a mesh
    mesh = Mesh(np.array(list(alone.devices())), "a")
    check(shardload.unpad(alone, (3,), sharding=NamedSharding(mesh, P())), ramp((3,)), mesh, P())


@pytest.mark.parametrize("name", ["Explicit", "Auto"])
def test_unpad_where_a_mesh_is_set(file: str, name: str) -> None:
    """Wrong if JAX took the mesh that is set for that of the array, or of one of its shards."""
    kinds = (getattr(jax.sharding.AxisType, name),) * 2
    mesh = jax.make_mesh(grid_shape(len(jax.devices())), ("a", "b"), axis_types=kinds)
    rows = 2 * len(jax.devices())
    with jax.set_mesh(jax.make_mesh((len(jax.devices()),), ("c",), axis_types=kinds[:1])):
        x = shardload.load(file, mesh, P("a"), pad=-1)
        check(shardload.unpad(x, sharding=NamedSharding(mesh, P())), ramp(uneven()), mesh, P())
        y = shardload.load(file, mesh, P("a"), select=np.s_[:rows], halo=1)
        check(shardload.unpad(y), ramp(uneven())[:rows], mesh, P("a"))


def test_arrays_of_every_function_are_known(file: str) -> None:
    """Wrong if only one of the ways to an array remembered its padding."""
    mesh, spec = mesh_of(), P("b", "a")
    expected = padded(np.ones(uneven(), dtype=bool), mesh, spec, False)
    for readers in ("root", "parallel", "direct", "auto"):
        check(shardload.mask(shardload.load(file, mesh, spec, pad=0, readers=readers)), expected, mesh, spec)
    check(shardload.mask(shardload.scatter(ramp(uneven()), mesh, spec, pad=0)), expected, mesh, spec)


def test_an_array_that_nothing_is_known_of(comm: Any, file: str) -> None:
    """Wrong if the mask of another array were returned, which would be wrong without a word."""
    mesh = mesh_of()
    plan = shardload.plan(file, mesh, P("a"), pad=0)
    x = plan.execute()
    for other in (x + 0, jax.jit(lambda v: v)(x), jnp.zeros_like(x)):
        same_error(comm, lambda y=other: shardload.mask(y), ConfigError, "x of shape", "not an array that shardload", "plan")
        same_error(comm, lambda y=other: shardload.unpad(y), ConfigError, "not an array that shardload")
    same_error(comm, lambda: jax.jit(shardload.mask)(x), ConfigError, "traced", "outside of jax.jit")
    same_error(comm, lambda: shardload.mask(np.zeros(3)), ConfigError, "x is a ndarray; expected a jax.Array")
    same_error(comm, lambda: shardload.mask({"p": [x, 3]}), ConfigError, "x['p'][1] is a int")
    same_error(comm, lambda: shardload.mask([]), ConfigError, "no arrays")
    small = shardload.plan(file, mesh, P("a"), pad=0, select=np.s_[1:, :])
    if small.shape_global != plan.shape_global:
        same_error(comm, lambda: shardload.unpad(x, small), ConfigError, str(x.shape), str(small.shape_global))
    same_error(comm, lambda: shardload.mask([x, x], [plan]), ConfigError, "do not match")
    same_error(comm, lambda: shardload.mask(plan), ConfigError, "x is a Plan; expected a jax.Array")
    for shape in ((3,), (10**6, 1), (-1, 1), (True, 1), "ab", 3):
        same_error(comm, lambda s=shape: shardload.mask(x, s), ConfigError, str(shape))
    same_error(comm, lambda: shardload.unpad(x, numpy=1), ConfigError, "numpy is 1")
    same_error(comm, lambda: shardload.unpad(x, numpy=True, sharding=x.sharding), ConfigError, "pass one of them")
    same_error(comm, lambda: shardload.unpad(x, sharding=P("a")), ConfigError, "expected a NamedSharding")
    even = shardload.scatter(ramp((x.shape[0],)), mesh, P("a"))
    for gone in (x, even):
        gone.delete()
        for how in ({"numpy": True}, {"sharding": NamedSharding(mesh, P())}, {}):
            same_error(comm, lambda y=gone, h=how: shardload.unpad(y, **h), ConfigError, "x was deleted (donated")
