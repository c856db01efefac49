"""Is a sharding read correctly (compared with JAX on eight devices), and are impossible ones refused?"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload.arrays.sharding import (
    describe_decomposition,
    describe_sharding,
    devices_per_process,
    layout_shards,
    padded_shape,
    read_sharding,
    read_spec,
)
from shardload.errors import ConfigError
from shardload.planning.shards import plan_shards
from tests.unit.files import write_hdf5

MESH = AbstractMesh((2, 4), ("a", "b"))
UNCONSTRAINED = P.UNCONSTRAINED


def one_device(*axes: str) -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(axes)), axes)


# --- whose are the devices


def test_processes_are_said_of_an_abstract_mesh_alone(tmp_path: Path) -> None:
    """Wrong if it were taken, and did nothing, where the devices themselves say whose they are."""
    assert [devices_per_process(MESH, n) for n in (None, 1, 2, 8, np.int64(4))] == [1, 8, 4, 1, 2]
    assert devices_per_process(one_device("a"), None) == 1
    write_hdf5(tmp_path / "a.h5", {"x": np.zeros((8, 8), "f4")})
    for mesh in (one_device("a", "b"), NamedSharding(one_device("a", "b"), P("a"))):
        with pytest.raises(ConfigError, match=r"processes is 1, but the mesh has devices, which say that: leave it out"):
            shardload.plan(tmp_path / "a.h5", mesh, None if isinstance(mesh, NamedSharding) else P("a"), processes=1)
    with pytest.raises(TypeError, match="processes"):
        shardload.load(tmp_path / "a.h5", MESH, P("a"), processes=1)  # type: ignore[call-arg]
    held = shardload.plan(tmp_path / "a.h5", MESH, P("a", "b"), processes=4).schedule.shards
    assert [held.shards_of(rank) for rank in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize("processes", [0, -1, 3, 16, 2.0, "2", True])
def test_processes_share_the_devices_alike(processes: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"processes is {processes!r}, but the mesh has 8 devices, .* expected a number that divides 8$"
    ):
        devices_per_process(MESH, processes)


# --- what is a sharding


@pytest.mark.parametrize(
    ("mesh", "spec", "text"),
    [
        (None, P(), "expected a jax.sharding.Mesh or NamedSharding, found NoneType: None"),
        ((2, 4), P(), "expected a jax.sharding.Mesh or NamedSharding, found tuple: (2, 4)"),
        (P("a"), MESH, "expected a jax.sharding.Mesh or NamedSharding, found P"),  # the wrong way round
        (np.zeros((99, 99)), P(), "found ndarray: an array of shape (99, 99) and dtype float64. Pass it before the spec"),
        (SingleDeviceSharding(jax.devices()[0]), None, "expected a jax.sharding.Mesh or NamedSharding, found SingleDevice"),
        (MESH, None, "the spec after a mesh is None; expected a PartitionSpec such as P('a', 'b'), P() to replicate"),
        (MESH, "a", "the spec after a mesh is 'a'; expected a PartitionSpec"),
        (MESH, NamedSharding(MESH, P("a")), "the spec after a mesh is NamedSharding("),
        (MESH, P("x"), "P('x') names mesh axis 'x', but the axes of the mesh are a=2, b=4"),
        (MESH, P("a", ("b", "x")), "P('a', ('b', 'x')) names mesh axis 'x', but the axes of the mesh are"),
        (AbstractMesh((), ()), P("a"), "P('a') names mesh axis 'a', but the axes of the mesh are (none)"),
        (MESH, ("a", "a"), "P('a', 'a') names mesh axis 'a' twice; a mesh axis can cut one array axis"),
        (MESH, (("a", "b"), "b"), "names mesh axis 'b' twice"),
        (MESH, P(None, UNCONSTRAINED), "P.UNCONSTRAINED leaves the layout to the compiler"),
        (MESH, ((("a",), "b"),), "names mesh axis ('a',), but the axes of the mesh are"),
        (MESH, (0,), "P(0) names mesh axis 0, but"),  # which JAX takes for None
    ],
)
def test_what_is_no_sharding(mesh: Any, spec: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        read_sharding(mesh, spec)


def no_devices(*shape: int) -> Mesh:
    return Mesh(np.empty(shape, dtype=object), ("a", "b")[: len(shape)])


def manual(*axes: str) -> Mesh:
    """A mesh of one device, of which these axes are Manual."""
    kinds = tuple(AxisType.Manual if name in axes else AxisType.Auto for name in ("a", "b"))
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"), axis_types=kinds)


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (manual("b"), "the mesh axis 'b' is Manual, which means the inside of jax.shard_map"),
        (manual("a", "b"), "the mesh axis 'a' is Manual"),
        (AbstractMesh((2,), ("a",), axis_types=(AxisType.Manual,)), "the mesh axis 'a' is Manual"),
        (no_devices(0), "the mesh has no devices: its axis 'a' has size 0. Pass a mesh of one device or more"),
        (no_devices(2, 0), "the mesh has no devices: its axis 'b' has size 0"),
        (AbstractMesh((0,), ("a",)), "the mesh has no devices"),
        (AbstractMesh((-2,), ("a",)), "its axis 'a' has size -2"),
        (Mesh(np.array(jax.devices()[:1] * 2), ("a",)), "twice; a device can hold one shard of an array. Pass each once"),
    ],
)
def test_a_mesh_on_which_no_array_can_be(mesh: Any, text: str) -> None:
    """Wrong if JAX were left to say it: by an assertion without a word, a division by zero, or the end of the process."""
    for arguments in ((mesh, P()), (NamedSharding(mesh, P()), None)):
        with pytest.raises(ConfigError, match=re.escape(text)):
            read_sharding(*arguments)


def test_a_sharding_and_a_spec_are_too_much() -> None:
    with pytest.raises(ConfigError, match=r"together with a spec P.*'a'.*: pass the sharding alone, or a mesh and a spec"):
        read_sharding(NamedSharding(one_device("a"), P()), P("a"))


# --- what a spec cuts


@pytest.mark.parametrize(("spec", "ndim"), [(P("a"), 0), (P("a", "b"), 1), (P(None, None, None), 2)])
def test_a_spec_longer_than_the_array_has_axes(spec: Any, ndim: int) -> None:
    axes = "1 axis" if ndim == 1 else f"{ndim} axes"
    text = f"has {len(spec)} entries, but the array has {axes}. Give one entry per axis (None for an axis that is not cut)"
    with pytest.raises(ConfigError, match=re.escape(text)):
        read_spec(NamedSharding(MESH, spec), ndim)


def test_what_is_left_to_the_compiler_or_to_a_sum() -> None:
    with pytest.raises(ConfigError, match="UNCONSTRAINED"):
        read_spec(NamedSharding(one_device("a"), P(UNCONSTRAINED, "a")), 2)  # its axes are Auto, in every release of JAX
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = NamedSharding(mesh, P(None, unreduced={"a"}))
    x = jax.ShapeDtypeStruct((2,), "float32", sharding=sharding)
    text = "has unreduced or reduced axes, and what is in a file has neither"
    calls: list[Any] = [lambda: read_sharding(sharding, None), lambda: read_sharding(mesh, sharding.spec)]
    of_three = jax.device_put(np.zeros(3, "float32"), NamedSharding(mesh, P(None)))
    calls.append(lambda: shardload.unpad(of_three, (2,), sharding=sharding))
    for call in [*calls, lambda: shardload.plan_save("x.h5", {"x": x})]:  # JAX would say that *pspec is dangerous
        with pytest.raises(ConfigError, match=text):
            call()


# --- padding


@pytest.mark.parametrize(
    ("shape", "spec", "text"),
    [
        (
            (8, 30),
            P("a", "b"),
            "axis 1 of '/density' in 'a.h5' has 30 elements, but P('a', 'b') splits it over 4 devices. Pass pad=0 (or another "
            "fill value) to pad it to 32, or use a mesh axis of 2, 3, 5, 6, 10",
        ),
        (
            (30, 8),
            P(("b", "a")),
            "axis 0 of '/density' in 'a.h5' has 30 elements, but P(('b', 'a')) splits it over 8 devices. Pass pad=0",
        ),
        ((7,), P("a"), "to pad it to 8, or use a mesh axis of 7"),
        ((9,), P("b"), "to pad it to 12, or use a mesh axis of 3, 9"),
        (
            (1,),
            P("b"),
            "has 1 elements, but P('b') splits it over 4 devices. Pass pad=0 (or another fill value) to pad it to 4",
        ),
        ((5, 5), P("a", "b"), "axis 0 of"),
    ],
)
def test_an_axis_that_does_not_divide(shape: Any, spec: Any, text: str) -> None:
    sharding = NamedSharding(MESH, spec)
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        padded_shape(shape, read_spec(sharding, len(shape)), sharding, "pad=0", "'/density' in 'a.h5'")
    if shape == (1,):
        assert str(caught.value).endswith("to pad it to 4"), "there is no mesh axis to advise"


# --- ranks


def test_a_process_that_takes_no_part() -> None:
    devices = np.array([SimpleNamespace(process_index=p) for p in (0, 2, 1, 3)], dtype=object)
    sharding: Any = SimpleNamespace(mesh=SimpleNamespace(devices=devices, shape={"a": 4}), spec=P("a"))
    with pytest.raises(ConfigError, match=r"devices of JAX process 2, which takes no part.*the processes \[0, 1, 7\]"):
        layout_shards(sharding, ((0,),), (8,), {0: 0, 1: 1, 7: 2})


# --- words


@pytest.mark.parametrize(
    ("shape", "axes", "mesh", "expected"),
    [
        ((8, 8, 8), [(0,), (), ()], (2,), "slab"),
        ((8, 8, 8), [(), (0,), (1,)], (2, 2), "pencil"),
        ((8, 8, 8), [(0, 1), (), ()], (2, 2), "slab"),
        ((8, 8, 8), [(0,), (1,), (2,)], (2, 2, 2), "block"),
        ((8, 8), [(0,), (1,)], (2, 2), "block"),
        ((8, 8, 8), [(0,), (1,), ()], (2, 1), "slab"),
        ((8, 8), [(), ()], (4,), "replicated"),
        ((8, 8), [(0,), ()], (1,), "whole"),
        ((), [], (1,), "whole"),
        ((8,), [(0,)], (2,), "slab"),
    ],
)
def test_decomposition_in_a_word(shape: Any, axes: Any, mesh: Any, expected: str) -> None:
    assert describe_decomposition(plan_shards(shape, axes, np.arange(int(np.prod(mesh))).reshape(mesh))) == expected


def test_shardings_are_described_alike_only_if_they_are() -> None:
    specs = (P("a"), P("b"), P(None, "a"), P(("a", "b")), P("a", "b"))
    meshes = (AbstractMesh((4, 2), ("a", "b")), AbstractMesh((2, 4), ("b", "a")), one_device("a", "b"))
    shardings = [NamedSharding(MESH, spec) for spec in specs] + [NamedSharding(mesh, P("a")) for mesh in meshes]
    described = [describe_sharding(sharding) for sharding in shardings]
    assert len(set(described)) == len(described)
    assert describe_sharding(NamedSharding(MESH, P("a"))) == described[0]
    permuted = [np.array([SimpleNamespace(id=i) for i in ids], dtype=object) for ids in ((0, 1), (1, 0))]
    pair: list[Any] = [
        SimpleNamespace(mesh=SimpleNamespace(devices=d, shape={"a": 2}), spec=P("a"), memory_kind=None) for d in permuted
    ]
    assert describe_sharding(pair[0]) != describe_sharding(pair[1])
