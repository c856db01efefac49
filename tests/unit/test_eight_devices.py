"""Checks against JAX itself on eight host devices, in a process of their own: pytest's has one device.

``python -W error -m tests.unit.test_eight_devices`` runs them all and prints what went wrong as JSON, a line per check.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import jax
import ml_dtypes
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload.arrays import assemble as assembling
from shardload.arrays import local_shards
from shardload.arrays.assemble import assemble, copy_from_device, early_devices, put_shard
from shardload.arrays.sharding import layout_shards, read_sharding, read_spec, verify_layout
from shardload.errors import ShardloadError
from shardload.planning.region import Region
from shardload.planning.shards import Shards, plan_shards
from shardload.transfer.buffers import aligned_empty
from tests.tiers import IS_QUICK, some_of
from tests.unit.copies import run_copy
from tests.unit.files import stored_in, write_hdf5

ROOT = Path(__file__).parents[2]


@cache
def outcomes() -> dict[str, str]:
    """What went wrong in each check on eight devices; empty if nothing did."""
    flags = "--xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = run_copy(["-W", "error", "-m", "tests.unit.test_eight_devices"], cwd=ROOT, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


# --- layouts

MESHES: dict[str, Callable[[], Mesh]] = {
    "line": lambda: Mesh(np.array(jax.devices()), ("a",)),
    "2x4": lambda: Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b")),
    "4x2": lambda: Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b")),
    "2x4 permuted": lambda: Mesh(np.array(jax.devices())[[5, 2, 7, 0, 1, 4, 3, 6]].reshape(2, 4), ("a", "b")),
    "4x2 transposed": lambda: Mesh(np.array(jax.devices()).reshape(2, 4).T, ("a", "b")),
    "2x2 of the last": lambda: Mesh(np.array(jax.devices())[4:].reshape(2, 2), ("a", "b")),
    "2x2 of some": lambda: Mesh(np.array(jax.devices())[[6, 1, 4, 3]].reshape(2, 2), ("a", "b")),
    "one device": lambda: Mesh(np.array(jax.devices())[3:4].reshape(1, 1), ("a", "b")),
    "1x8": lambda: Mesh(np.array(jax.devices()).reshape(1, 8), ("a", "b")),
    "2x2x2": lambda: Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c")),
    "2x2x2 permuted": lambda: Mesh(np.array(jax.devices())[[3, 6, 0, 5, 7, 1, 2, 4]].reshape(2, 2, 2), ("b", "c", "a")),
    "make_mesh": lambda: jax.make_mesh((2, 4), ("a", "b")),
    "make_mesh explicit": lambda: jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2),
    "make_mesh auto": lambda: jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3),
}
SPECS = {
    1: [P(), P(None), P("a"), P("b"), P(("a", "b")), P(("b", "a")), P(("c", "a", "b")), P(("b", "c"))],
    2: [P(), P("a"), P("a", "b"), P("b", "a"), P(None, "b"), P(("a", "b")), P(None, ("b", "a")), P("c", ("b", "a"))],
    3: [
        P(), P("a"), P("a", "b"), P("b", "a"), P(None, "a", "b"), P(None, "b", "a"), P("a", None, "b"), P("b", None, "a"),
        P(("a", "b")), P(("b", "a")), P(None, ("a", "b")), P(None, None, ("b", "a")), P("a", "b", "c"), P("c", "a", "b"),
        P(("a", "c"), None, "b"), P("b", (), ("c", "a")), P(("c",), "a"),
    ],
}  # fmt: skip
SHAPES = {1: [(16,)], 2: [(16, 16), (8, 24)], 3: [(8, 8, 8), (16, 8, 24)]}
ONE_OF = 5  # layouts
PLACES = [3, 0, 6, 1, 7, 5, 2, 4]  # of device k, as process or as rank: never k itself for most


def layouts() -> list[tuple[str, NamedSharding, tuple[int, ...]]]:
    """Every mesh with every spec that fits it; in `make test` some of them, among which is each mesh."""
    return some_of(all_layouts(), ONE_OF)


def all_layouts() -> Iterator[tuple[str, NamedSharding, tuple[int, ...]]]:
    for name, make in MESHES.items():
        mesh = make()
        for ndim, specs in SPECS.items():
            for spec in specs:
                entries: Any = tuple(spec)
                named = {n for e in entries for n in ((e,) if isinstance(e, str) else e or ())}
                if named <= set(mesh.axis_names):
                    for shape in SHAPES[ndim]:
                        yield f"{name} {spec} {shape}", read_sharding(mesh, spec), shape


def jax_regions(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Any, Region]:
    """What each device holds, by JAX's word."""
    found = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [part.indices(n) for part, n in zip(index or (), shape, strict=True)]
        found[device] = Region(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))
    return found


def with_processes(sharding: NamedSharding, process_of: Callable[[int], int]) -> Any:
    """The same sharding over devices that say they belong to several processes."""
    devices = np.empty(sharding.mesh.devices.shape, dtype=object)
    for place, device in np.ndenumerate(sharding.mesh.devices):
        devices[place] = SimpleNamespace(process_index=process_of(device.id))
    return SimpleNamespace(mesh=SimpleNamespace(devices=devices, shape=sharding.mesh.shape), spec=sharding.spec)


def check_table(shards: Shards, sharding: NamedSharding, shape: tuple[int, ...], rank_of: Callable[[int], int]) -> None:
    """The table against JAX, device by device, both ways."""
    held: dict[int, set[Region]] = {}
    holders: dict[Region, set[int]] = {}
    for device, region in jax_regions(sharding, shape).items():
        held.setdefault(rank_of(device.id), set()).add(region)
        holders.setdefault(region, set()).add(rank_of(device.id))
    for rank in range(8):
        assert {shards.region(s) for s in shards.shards_of(rank)} == held.get(rank, set()), (rank, held)
    assert {shards.region(s): set(shards.holders(s)) for s in range(shards.n_shards)} == holders


def layout_of_devices_of_processes() -> None:
    """A process per device, and several devices per process; ranks are neither processes nor devices."""
    each, several = [7 - p for p in range(8)], [4, 0, 5, 1]  # the rank of each process
    tried = layouts()
    for name, sharding, shape in tried:
        for process_of, ranks in ((PLACES, each), ([d % 3 for d in range(8)], several)):
            with in_case(name):
                processes = with_processes(sharding, process_of.__getitem__)
                shards = layout_shards(processes, read_spec(sharding, len(shape)), shape, dict(enumerate(ranks)))
                check_table(shards, sharding, shape, [ranks[process] for process in process_of].__getitem__)
    assert len(tried) > 250 // (ONE_OF if IS_QUICK else 1), f"only {len(tried)} layouts were tried"


def layout_of_an_abstract_mesh() -> None:
    """Devices in mesh order are dealt to ranks: the same as a mesh of the devices in order."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    for per_rank in (1, 2, 4):
        for spec in SPECS[3][:12]:
            sharding = read_sharding(AbstractMesh((2, 4), ("a", "b")), spec)
            shards = layout_shards(sharding, read_spec(sharding, 3), (8, 8, 8), None, devices_per_rank=per_rank)
            check_table(shards, NamedSharding(mesh, spec), (8, 8, 8), lambda d, n=per_rank: d // n)  # type: ignore[misc]


def layout_of_a_process_is_verified() -> None:
    """Each process compares the table with JAX's map of its own devices."""

    class OfProcess:
        """A sharding as the process with these devices sees it."""

        def __init__(self, sharding: NamedSharding, ids: set[int]) -> None:
            self.sharding, self.ids = sharding, ids

        def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, Any]:
            return {d: i for d, i in self.sharding.devices_indices_map(shape).items() if d.id in self.ids}

    for name, sharding, shape in layouts():
        axes = read_spec(sharding, len(shape))
        shards = layout_shards(with_processes(sharding, lambda d: d // 2), axes, shape, {p: p for p in range(4)})
        for rank in range(4):
            seen: Any = OfProcess(sharding, {2 * rank, 2 * rank + 1})
            with in_case(name):
                verify_layout(shards, seen, rank)
    square = NamedSharding(Mesh(np.array(jax.devices())[:4].reshape(2, 2), ("a", "b")), P("a", "b"))
    swapped = plan_shards((8, 8), [(0,), (1,)], np.array([[0, 2], [1, 3]]))
    seen = OfProcess(square, {1})
    text = r"the plan gives rank 1 the regions \[4:8, 0:4\], but JAX's index map says that its devices hold \[0:4, 4:8\]"
    with pytest.raises(ShardloadError, match=text):
        verify_layout(swapped, seen, 1)
    greedy = plan_shards((8, 8), [(0,), (1,)], np.array([[0, 1], [1, 3]]))
    with pytest.raises(ShardloadError, match=r"rank 1 the regions \[0:4, 4:8\], \[4:8, 0:4\], but JAX.* hold \[0:4, 4:8\]: n"):
        verify_layout(greedy, seen, 1)
    with pytest.raises(ShardloadError, match=r"the regions none, but .* hold \[0:4, 4:8\]: nothing was loaded"):
        verify_layout(swapped, seen, 7)


# --- assembling


def table_of(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape)).astype(dtype).reshape(shape)


def pieces_of(sharding: NamedSharding, table: np.ndarray[Any, Any]) -> dict[Region, np.ndarray[Any, Any]]:
    """Each region that the devices hold, once, in memory that JAX on CPU uses as it is."""
    pieces = {}
    for region in set(jax_regions(sharding, table.shape).values()):
        data = aligned_empty(region.shape, table.dtype)
        data[...] = table[region.slices()]
        pieces[region] = data
    return pieces


def assemble_every_layout() -> None:
    n_aliased = 0
    for name, sharding, shape in layouts():
        table = table_of(shape)
        pieces = pieces_of(sharding, table)
        array = assemble(shape, sharding, table.dtype, pieces.items())
        assert array.sharding == sharding and array.shape == shape and array.dtype == table.dtype
        np.testing.assert_array_equal(np.asarray(array), table, err_msg=name)
        regions = jax_regions(sharding, shape)
        for shard in array.addressable_shards:
            region = regions[shard.device]
            np.testing.assert_array_equal(np.asarray(shard.data), table[region.slices()], err_msg=f"{name} {shard.device}")
            n_aliased += shard.data.unsafe_buffer_pointer() == pieces[region].ctypes.data
    assert n_aliased > 0, "no piece was used as it is: the promise of no copy on CPU is broken"


def assemble_refuses_a_transposed_layout() -> None:
    """Held by P('b', 'a') where the sharding is P('a', 'b'): JAX alone would take them, where the shapes are equal."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    pieces = pieces_of(NamedSharding(mesh, P("b", "a")), table_of((8, 8)))
    first, sixth = (re.escape(str(jax.devices()[k])) for k in (0, 5))
    text = rf"device {first} asks for \[0:4, 0:2\], but this process holds \[0:2, 0:4\], \[0:2, 4:8\], \[2:4, 0:4\], .*no array"
    with pytest.raises(ShardloadError, match=text):
        assemble((8, 8), NamedSharding(mesh, P("a", "b")), np.dtype("f4"), pieces.items())
    # On a square mesh each piece has the right shape, and only its region tells it from the transposed one.
    square = NamedSharding(Mesh(np.array(jax.devices())[[0, 5, 2, 7]].reshape(2, 2), ("a", "b")), P("a", "b"))
    pieces = pieces_of(square, table_of((8, 8)))
    del pieces[Region((0, 4), (4, 8))]
    text = rf"device {sixth} asks for \[0:4, 4:8\], but this process holds \[0:4, 0:4\], \[4:8, 0:4\], \[4:8, 4:8\]\. A wrong"
    with pytest.raises(ShardloadError, match=text):
        assemble((8, 8), square, np.dtype("f4"), pieces.items())
    with pytest.raises(ShardloadError, match="but this process holds nothing"):
        assemble((8, 8), square, np.dtype("f4"), [])


def assemble_names_every_device_that_asks() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b")), P("b"))
    pieces = pieces_of(sharding, table_of((8,)))
    del pieces[Region((2,), (4,))]
    both = re.escape(f"devices {jax.devices()[1]}, {jax.devices()[5]}")
    with pytest.raises(ShardloadError, match=rf"{both} ask for \[2:4\]"):
        assemble((8,), sharding, np.dtype("f4"), pieces.items())


def assemble_refuses_pieces_of_another_shape_or_type() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices())[:2], ("a",)), P("a"))
    first, second = Region((0, 0), (2, 3)), Region((2, 0), (4, 3))
    good: np.ndarray[Any, Any] = np.zeros((2, 3), "f4")
    for bad in (good.reshape(3, 2), good.astype("f8"), good.astype(">f4"), good[:1], good.ravel()):
        with pytest.raises(ShardloadError, match=r"the piece for \[2:4, 0:3\] has shape .* expected \(2, 3\) and float32"):
            assemble((4, 3), sharding, np.dtype("f4"), [(first, good), (second, bad)])


def assemble_narrows_nothing() -> None:
    """Without 64-bit types JAX makes float32 of float64 and wraps int64, with a warning (which is an error here)."""
    sharding = NamedSharding(Mesh(np.array(jax.devices())[:2], ("a",)), P("a"))
    for dtype in ("f8", "i8", "u8", "c16"):
        table = table_of((4,), dtype) + np.array(2**40 + 1, dtype)
        array = assemble((4,), sharding, table.dtype, pieces_of(sharding, table).items())
        np.testing.assert_array_equal(np.asarray(array), table, strict=True)


def assemble_then_donate() -> None:
    """A donated array's memory may be written to; the pieces that replicas share, and other arrays of them, may not."""
    for spec in (P(), P("a"), P("a", "b")):
        sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b")), spec)
        table = table_of((64, 64))
        pieces = pieces_of(sharding, table)
        array = assemble((64, 64), sharding, table.dtype, pieces.items())
        other = assemble((64, 64), sharding, table.dtype, pieces.items())
        step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0, out_shardings=sharding)
        expected = table
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Some donated buffers were not usable" is just as good
            for _ in range(3):
                array = step(array)
                expected = expected * 2 + 1
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index], err_msg=str(shard.device))
        for region, data in pieces.items():
            np.testing.assert_array_equal(data, table[region.slices()], err_msg=f"the piece for {region} was written to")
        np.testing.assert_array_equal(np.asarray(other), table)


def assemble_outlives_its_pieces() -> None:
    """The array keeps the memory it uses alive."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P("a"))
    table = table_of((8, 1 << 16))
    pieces = pieces_of(sharding, table)
    array = assemble(table.shape, sharding, table.dtype, pieces.items())
    pieces.clear()
    junk = [np.full((1, 1 << 16), -1, "f4") for _ in range(16)]
    np.testing.assert_array_equal(np.asarray(array), table)
    assert len(junk) == 16


def assemble_takes_pieces_that_left_early() -> None:
    """Some pieces are on a device already, replicas elsewhere: each still ends on every device that asks for its region."""
    mesh = Mesh(np.array(jax.devices())[[5, 2, 7, 0, 1, 6, 3, 4]].reshape(2, 4), ("a", "b"))
    table = table_of((8, 12))
    for spec, memory in itertools.product((P("a", "b"), P("b"), P(None, "a"), P()), (None, "pinned_host")):
        sharding = NamedSharding(mesh, spec, memory_kind=memory)
        pieces = pieces_of(sharding, table)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assembling, "has_host_memory", lambda device: False)
            devices = early_devices(sharding, table.shape)
        assert devices.keys() == pieces.keys()
        early = {region: put_shard(pieces[region].copy(), devices[region], sharding) for region in list(pieces)[::2]}
        array = assemble(table.shape, sharding, table.dtype, pieces.items(), early)
        assert array.sharding == sharding
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), table[shard.index], err_msg=f"{spec} {shard.device}")
            assert shard.data.sharding.memory_kind == sharding.memory_kind or memory is None
        assert not early_devices(sharding, table.shape), "on CPU JAX uses the piece itself"


# --- loading


def load_decodes_each_chunk_once() -> None:
    """However many devices of this process need some of it, in every way of reading, from the library and chunk by chunk."""
    mesh = Mesh(np.array(jax.devices())[[5, 2, 7, 0, 1, 4, 3, 6]].reshape(2, 4), ("a", "b"))
    with tempfile.TemporaryDirectory() as folder, h5py.File(f"{folder}/a.h5", "w") as file:
        for name, shape, chunks in (
            ("large", (6, 96, 128), (1, 96, 128)),  # decoded by threads, one by one
            ("small", (12, 16, 24), (1, 16, 24)),  # read by the library, block by block
            ("cubes", (16, 64, 96), (8, 40, 40)),
        ):
            table = table_of(shape)
            file.create_dataset(name, data=table, chunks=chunks, compression="gzip")
            n_chunks = math.prod(-(-n // c) for n, c in zip(shape, chunks, strict=True))
            pad = {} if shape[0] % 2 == 0 else {"pad": 0}
            specs = (P("a", "b"), P(None, "a", "b"), P(None, None, ("b", "a")), P(None, "b"), P("a"), P())
            for spec, readers in some_of(itertools.product(specs, ("auto", "direct", "parallel")), 4):
                plan = shardload.plan(file[name], mesh, spec, readers=readers, **pad)
                array = plan.execute()
                np.testing.assert_array_equal(np.asarray(array), table, err_msg=f"{name} {spec} {readers}")
                found = plan.report.chunks_decoded if plan.report else -1
                expected = plan.costs[plan.readers].chunks_decoded
                assert found == expected, f"{name} {spec} {readers}: {found} chunks were decoded, {expected} planned"
                assert found == n_chunks, f"{name} {spec} {readers}: {found} chunks were decoded of {n_chunks}"


def load_into_memory_of_the_host() -> None:
    """Shards that a sharding wants beside the devices' own memory lie there: as loaded, without padding or halos, as saved."""
    table = table_of((14, 12))
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("x.h5", "y.h5")]
        write_hdf5(paths[0], {"x": table}, chunks=(3, 5))
        for n, more in ((8, {"pad": 0}), (2, {"halo": (1,)})):
            mesh = Mesh(np.array(jax.devices()[:n]), ("a",))
            whole = NamedSharding(mesh, P(), memory_kind="pinned_host")
            x = shardload.load(paths[0], NamedSharding(mesh, P("a"), memory_kind="pinned_host"), verify="full", **more)
            for one in (x, shardload.unpad(x, sharding=whole), *([shardload.unpad(x)] if n == 2 else ())):
                kinds = {shard.data.sharding.memory_kind for shard in one.addressable_shards}
                assert kinds == {one.sharding.memory_kind} == {"pinned_host"}, kinds
                if one is not x:
                    np.testing.assert_array_equal(np.asarray(one), table)
            shardload.save(paths[1], {"x": x if n == 8 else one}, mode="w")
            np.testing.assert_array_equal(stored_in(paths[1], "x"), table)


def load_counts_chunks_that_are_not_stored_once() -> None:
    """Wrong if one that several devices need were counted for each, or one whose first element another has not at all."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    with tempfile.TemporaryDirectory() as folder, h5py.File(f"{folder}/a.h5", "w") as file:
        made = file.create_dataset("x", (8, 96, 128), "f4", chunks=(1, 96, 128), fillvalue=3)
        made[:5] = 1
        for spec in (P("a", "b"), P(None, "a", "b"), P("a"), P(None, None, "b")):
            plan = shardload.plan(made, mesh, spec, missing="fill", readers="direct")
            plan.execute()
            assert plan.report and plan.report.chunks_missing == 3, f"{spec}: {plan.report}"


def assemble_and_look_beside_a_mesh_of_the_caller() -> None:
    """Wrong if a save from a GPU failed below `jax.set_mesh`, because that mesh has other devices than a shard."""
    values = np.arange(8 * 6, dtype="f4").reshape(8, 6)
    x = jax.device_put(values, NamedSharding(MESHES["4x2"](), P("a", "b")))
    for name in ("2x4", "2x2 of the last", "make_mesh explicit"):
        with jax.set_mesh(MESHES[name]()):
            for shard in (x.addressable_shards[0], x.addressable_shards[-1]):  # in each mesh, and in all but one
                held = Region.from_index(shard.index, x.shape)
                part = Region((held.start[0] + 1, held.start[1]), held.stop)
                found = copy_from_device(shard.data, part, held)
                np.testing.assert_array_equal(found, values[part.slices()], strict=True)


def assemble_and_look_at_other_shardings() -> None:
    """Wrong if shards that are no whole arrays were taken for such, or if the devices of one were in no order."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    table, named = table_of((16, 8)), NamedSharding(mesh, P("a", "b"))
    x = jax.device_put(table, GSPMDSharding(tuple(jax.devices()), named._to_xla_hlo_sharding(2)))
    with tempfile.TemporaryDirectory() as folder:
        write_hdf5(f"{folder}/x.h5", {"x": table})
        for call in (lambda: shardload.save(f"{folder}/y.h5", x), lambda: shardload.verify(x, f"{folder}/x.h5")):
            with pytest.raises(shardload.ConfigError, match=r"GSPMDSharding, .*Pass jax\.device_put"):
                call()
        found = shardload.load(f"{folder}/x.h5", like={"x": x})["x"]
        assert found.sharding == x.sharding
        np.testing.assert_array_equal(np.asarray(found), table, strict=True)
    whole = shardload.unpad(x, (15, 8), sharding=NamedSharding(mesh, P()))
    np.testing.assert_array_equal(np.asarray(whole), table[:15], strict=True)


def assemble_and_move_integers_of_less_than_a_byte() -> None:
    """Wrong if XLA were let to move those of 2 bits from device to device: it writes beyond its memory."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    for dtype in (ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.int4, ml_dtypes.uint4):
        bounds = ml_dtypes.iinfo(dtype)
        table = np.random.default_rng(0).integers(bounds.min, bounds.max + 1, (16, 8)).astype(dtype)
        x = shardload.scatter(table, mesh, P("a", "b"))
        for _ in range(8):
            whole = shardload.unpad(x, (15, 8), sharding=NamedSharding(mesh, P()))
            for shard in whole.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), table[:15], strict=True)


def wide_types() -> Any:
    """The context in which JAX has types of 64 bits."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else import_module("jax.experimental").enable_x64(True)


def load_whatever_the_program_has_set() -> None:
    """Wrong if a NaN of the file were an error below `jax.debug_nans`, if what is asked for were a forbidden transfer, or if
    64-bit types had to be switched on in every thread, or for as long as an array of them exists.

    Once as on CPUs, and once as on GPUs, whose values JAX cuts out itself.
    """
    table = table_of((14, 12), "f8") + 2.0**40 + 1
    table[3] = np.nan
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    whole = NamedSharding(mesh, P())
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("x.h5", "y.h5")]
        write_hdf5(paths[0], {"x": table}, chunks=(2, 12))
        for is_on_host in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                for module in (assembling, local_shards):
                    patch.setattr(module, "has_host_memory", lambda device, is_on_host=is_on_host: is_on_host)
                with wide_types():
                    plan = shardload.plan(paths[0], mesh, P("b", "a"), pad=np.nan)
                    ds = shardload.stream(paths[0], mesh, P("a"), batch=2, prefetch=2)
                    with iter(ds) as batches:  # made in threads
                        np.testing.assert_array_equal(np.concatenate(list(map(np.asarray, batches))), table, strict=True)
                with jax.debug_nans(True), jax.transfer_guard("disallow"):
                    x = plan.execute()
                    assert int(shardload.mask(x).sum()) == table.size
                    y = shardload.unpad(x, sharding=whole)
                    shardload.save(paths[1], {"x": x}, mode="w", background=True).wait()
                    assert shardload.verify(x, paths[0], pad=np.nan, how="full").n_elements == table.size
                    with wide_types():
                        halos = shardload.load(paths[0], mesh, P("a"), halo=1)
                    z = shardload.unpad(halos)
                np.testing.assert_array_equal(np.asarray(y), table, strict=True)
                np.testing.assert_array_equal(np.asarray(z), table, strict=True)
                np.testing.assert_array_equal(shardload.unpad(x, numpy=True), table, strict=True)
                np.testing.assert_array_equal(stored_in(paths[1], "x"), table, strict=True)
                for traced, how in ((halos, None), (x, whole)):
                    with pytest.raises(shardload.ConfigError, match="outside of jax"):
                        jax.jit(lambda: shardload.unpad(traced, sharding=how))()  # noqa: B023


# --- streams


def stream_to_several_devices() -> None:
    """Wrong if devices were taken for ranks, replicas had chunks decoded again, or a shard were that of another device."""
    table, window = table_of((23, 8, 12)), (0, -1, 1)
    cases = {
        "2x4 permuted": P("a", None, "b"),
        "4x2 transposed": P(("b", "a")),
        "2x2 of some": P(None, None, "b", "a"),
        "2x2x2 permuted": P("c", None, "a", "b"),
        "one device": P("a", None, "b"),
        "1x8": P(None, None, None, "a"),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = write_hdf5(f"{folder}/a.h5", {"x": table}, chunks=(4, 3, 12), compression="gzip")
        for (name, spec), shuffle in itertools.product(cases.items(), (None, 5)):
            mesh = MESHES[name]()
            ds = shardload.stream(path, mesh, spec, dataset="x", batch=8, window=window, shuffle=shuffle)
            with iter(ds) as it:
                for k, batch in enumerate(it):
                    anchors = ds.order()[8 * k : 8 * k + 8]
                    assert it.index.tolist() == anchors.tolist()
                    assert batch.sharding == NamedSharding(mesh, spec)
                    expected = table[anchors[:, None] + np.array(window)]
                    assert {shard.device for shard in batch.addressable_shards} == set(mesh.devices.flat)
                    for shard in batch.addressable_shards:
                        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index], err_msg=f"{name} {shard}")
            assert k == len(ds) - 1 == 1
            n_decoded = it.report.chunks_decoded
            assert n_decoded == 5 * 3 if shuffle is None else n_decoded <= 1.5 * 6 * 3, f"{name}: {n_decoded} chunks decoded"


CHECKS = [
    n
    for n, f in globals().items()
    if n.startswith(("layout_", "assemble_", "load_", "stream_")) and getattr(f, "__module__", "") == __name__
]


@pytest.mark.parametrize("name", CHECKS)
def test_on_eight_devices(name: str) -> None:
    assert not outcomes()[name], outcomes()[name]


@contextmanager
def in_case(name: str) -> Iterator[None]:
    """Say which case failed."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {name}")
        raise


def main() -> None:
    assert jax.device_count() == 8
    found = dict.fromkeys(CHECKS, "")
    for name in CHECKS:
        try:
            globals()[name]()
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
