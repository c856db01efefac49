"""What should a load give? The values, meshes and the one check that all tests here share.

Every value is its element's own flat index (hashed, where the type is too small for that), and every axis has a length of
its own: a value in the wrong place says which place is its own.
"""

from __future__ import annotations

import itertools
import math
import os
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import h5py
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.unit.files import raising, stored_in

if TYPE_CHECKING:
    import pytest

READERS: tuple[str | int, ...] = ("root", "parallel", "direct", "auto", 2)
VERIFY = ("index", "checksum")

# Every way in which two mesh axes can cut three array axes, up to what the code treats alike.
DECOMPOSITIONS = {
    "slab of axis 0, replicated over b": P("a"),
    "slab of axis 1, replicated over a": P(None, "b"),
    "pencil along axis 2": P("a", "b"),
    "pencil along axis 0": P(None, "a", "b"),
    "pencil, mesh axes exchanged": P("b", "a"),
    "slab over both mesh axes": P(("a", "b")),
    "slab over both, b major": P(("b", "a")),
    "slab of the last axis": P(None, None, ("a", "b")),
    "slab of the middle axis, replicated": P(None, "a"),
    "replicated": P(),
}

Array = np.ndarray[Any, Any]


def ramp(shape: tuple[int, ...], dtype: Any = "float32") -> Array:
    """An array whose values are their own flat index, or a hash of it where `dtype` cannot hold that exactly."""
    dtype = np.dtype(dtype)
    index = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    hashed = (index * 2654435761 >> 7) % 251
    if dtype.kind == "b":
        return np.asarray(hashed % 2 == 1)
    if dtype.itemsize == 1 or (dtype.kind == "f" and dtype.itemsize == 2):
        return np.asarray((hashed % 127 if dtype == np.int8 else hashed).astype(dtype))
    if dtype.kind == "c":
        return np.asarray((index + 1j * (index + (0.1 if dtype.itemsize == 16 else 0.5))).astype(dtype))
    if dtype.kind in "fiu" and dtype.itemsize == 8:  # values that 32 bits would change
        return np.asarray(index.astype(dtype) + (dtype.type(0.1) if dtype.kind == "f" else 1 << 40)).astype(dtype)
    return np.asarray(index.astype(dtype))


def unit() -> int:
    """What every axis length is a multiple of, so that it divides over all devices: at least 4."""
    n = len(jax.devices())
    return n * -(-4 // n)


def cube() -> tuple[int, int, int]:
    """A small shape that every decomposition divides, with three different lengths."""
    return 2 * unit(), 3 * unit(), 5 * unit()


def grid_shape(n: int, ndim: int = 2) -> tuple[int, ...]:
    """`n` devices as a mesh, as square as it goes, the longer axis first.

    >>> grid_shape(4), grid_shape(6), grid_shape(2), grid_shape(8, 3)
    ((2, 2), (3, 2), (2, 1), (2, 2, 2))
    """
    if ndim == 1:
        return (n,)
    last = max(d for d in range(1, math.floor(n ** (1 / ndim) + 1e-9) + 1) if n % d == 0)
    return (*grid_shape(n // last, ndim - 1), last)


def mesh_of(devices: Any = None, names: tuple[str, ...] = ("a", "b")) -> Mesh:
    """A mesh of all devices (or of these, in this order)."""
    devices = np.array(jax.devices() if devices is None else devices, dtype=object)
    return Mesh(devices.reshape(grid_shape(devices.size, len(names))), names)


def turned() -> Mesh:
    """A mesh of all devices in another order, so that rank, device and place differ."""
    return mesh_of([*jax.devices()[1:], jax.devices()[0]])


def backwards() -> Mesh:
    """A mesh of all devices, the last one first."""
    return mesh_of(jax.devices()[::-1])


def distinct(specs: dict[str, Any]) -> dict[str, Any]:
    """Those of some specs that give the devices of this run other parts than the ones before: on one device all are alike.

    For parametrizing tests, when JAX has been started. Of `DECOMPOSITIONS` 10 differ on 4 devices, 4 on 2, and 1 on one.
    """
    parts: dict[str, str] = {}
    for name, spec in specs.items():
        parts.setdefault(str([*sharding_of(mesh_of(), spec).devices_indices_map(cube()).items()]), name)
    return {name: specs[name] for name in parts.values()}


def sharding_of(mesh: Any, spec: Any) -> NamedSharding:
    """The sharding that is meant."""
    return NamedSharding(mesh, spec)


def check(x: jax.Array, expected: Array, mesh: Any, spec: Any, note: object = "") -> None:
    """Raise AssertionError unless each addressable shard of `x` is that part of `expected`, bit for bit.

    The index of a shard is JAX's own, and `expected` is NumPy's: nothing of shardload is believed.
    """
    sharding = sharding_of(mesh, spec)
    native = expected.astype(expected.dtype.newbyteorder("="))
    assert isinstance(x, jax.Array)
    assert x.shape == native.shape, note
    assert x.dtype == native.dtype, note
    assert x.sharding == sharding, note
    index_of = sharding.addressable_devices_indices_map(native.shape)
    assert {s.device for s in x.addressable_shards} == set(index_of), note
    for shard in x.addressable_shards:
        assert shard.index == (index_of[shard.device] or ()), note
    check_shards(x, native, note)


def check_shards(x: jax.Array, expected: Array, note: object = "") -> None:
    """Raise AssertionError unless each addressable shard of `x`, whatever its sharding, is that part of `expected`."""
    for shard in x.addressable_shards:
        said = f"{note} {shard.device} {shard.index}"
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index], err_msg=said, strict=True)


def put(values: Array, mesh: Any, spec: Any) -> jax.Array:
    """Values as JAX's array, made by JAX alone."""
    # With the type, which a process without a device of the mesh cannot tell.
    return jax.make_array_from_callback(values.shape, sharding_of(mesh, spec), lambda index: values[index], dtype=values.dtype)


def damage_chunk(path: Path | str, name: str, *begin: int) -> None:
    """Write bytes that no filter makes over the chunk of an HDF5 file that begins at this element."""
    with h5py.File(path) as file:
        chunk = file[name].id.get_chunk_info_by_coord(begin)
    with open(path, "r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)


def compare(comm: Any, path: Path, values: dict[str, Array]) -> None:
    """Raise on all ranks unless the format's library reads these values."""

    def look() -> None:
        for name, expected in values.items():
            np.testing.assert_array_equal(stored_in(path, name), expected, err_msg=f"{path} {name}", strict=True)

    on_root(comm, look)


def padded(expected: Array, mesh: Any, spec: Any, value: Any) -> Array:
    """`expected` with each axis padded up to what the mesh divides: how NumPy would do it."""
    width = [(0, -n % parts) for n, parts in zip(expected.shape, parts_of(mesh, spec, expected.ndim), strict=True)]
    return np.pad(expected, width, constant_values=value) if width else expected


def parts_of(mesh: Any, spec: Any, ndim: int) -> list[int]:
    """How many shards each axis is cut into."""
    names = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [math.prod(mesh.shape[name] for name in names[k]) if k < len(names) else 1 for k in range(ndim)]


def share(*axes: Iterable[Any], first: int | None = None) -> list[tuple[Any, ...]]:
    """Of all combinations that a test tries in a loop, half in a stage of ``make test``; all of them in any other run.

    ``TESTS_SHARE=0/2`` takes the black fields of a chessboard, and ``1/2`` the white ones. So each value is in each stage;
    of three axes, each pair of values too. Whether the first field is black (`first`, even) differs from test to test.
    ``3/8``, an eighth of what is parametrized, is the half ``1/2`` here.
    """
    k, n = map(int, (os.environ.get("TESTS_SHARE") or "0/1").split("/"))
    k, n = k % 2, min(n, 2)
    if first is None:
        first = crc32(os.environ.get("PYTEST_CURRENT_TEST", "").encode())  # the same on every rank, and in every stage
    fields = itertools.product(*(enumerate(axis) for axis in axes))
    return [tuple(value for _, value in field) for field in fields if (first + sum(at for at, _ in field)) % n == k]


def on_root(comm: Any, make: Callable[[], Any]) -> Any:
    """What `make` returns on rank 0, on all ranks; what it raises there fails them all."""
    value, error = None, None
    jax.devices()  # the first time, JAX waits until all processes ask for them
    if comm.rank == 0:
        try:
            value = make()
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
    value, error = comm.bcast((value, error), root=0)
    if error:
        raise RuntimeError(f"rank 0 could not prepare the test: {error}")
    return value


def raised(call: Callable[[], Any]) -> Exception | None:
    """What `call` raises; None if it returns."""
    try:
        call()
    except Exception as error:
        return error
    return None


def same_error(comm: Any, call: Callable[[], Any], kind: type[Exception], *parts: str) -> Exception:
    """The error that `call` raises: of `kind`, with `parts` in its text, and the same on every rank."""
    error = raised(call)
    mine = None if error is None else (type(error).__name__, str(error))
    everyone = comm.allgather(mine)
    assert set(everyone) == {mine}, "the ranks raise different errors"
    assert error is not None, "nothing was raised"
    assert type(error) is kind, error
    for part in parts:
        assert part in str(error), f"{part!r} is not in {error}"
    return error


@contextmanager
def warned_once(comm: Any, kind: type[Warning]) -> Iterator[list[str]]:
    """What a warning of this kind says, when the block has ended: rank 0 gives one, the others none."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    found = [one for one in caught if one.category is kind]
    assert all(Path(one.filename).parent == Path(__file__).parent for one in found), "it is not of the caller's line"
    told += [str(one.message) for one in found]
    assert len(told) == (comm.rank == 0), told


def peak_nbytes(plan: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """What a plan loads, and the most that this process had at a time beyond what it had before and its pieces."""
    x, most = peak_of(plan.execute, monkeypatch)
    held = sum(sum({str(s.index): s.data.nbytes for s in one.addressable_shards}.values()) for one in jax.tree.leaves(x))
    return x, most - held


def peak_of(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """What a call returns, and the most that this process had at a time beyond what it had before."""
    from shardload.comm.shared_memory import Segment  # programs that import this module decide themselves when MPI starts

    shared: list[int] = []
    create = Segment.create

    def count(nbytes: int) -> Segment:
        shared.append(nbytes)
        return create(nbytes)

    monkeypatch.setattr(Segment, "create", count)
    monkeypatch.setenv("SHARDLOAD_KEEP_MEMORY", "0")  # memory that is kept for the next load is not traced
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        x = call()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        monkeypatch.undo()
    return x, most - before + sum(shared)


def counted(monkeypatch: pytest.MonkeyPatch, counts: Counter[str], where: Any, name: str) -> None:
    """From now on, count the calls of a function or method under its name."""
    right = getattr(where, name)

    def call(*args: Any, **options: Any) -> Any:
        counts[name] += 1
        return right(*args, **options)

    monkeypatch.setattr(where, name, call)


def refuse_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, let a load fail that opens an array to read its values."""
    from shardload.jobs import consistency  # programs that import this module decide themselves

    for name in ("open_source", "open_file"):
        monkeypatch.setattr(consistency, name, raising(AssertionError("values were read")))


def on_disk(comm: Any, folder: Path) -> list[str]:
    """What is in a folder, when all ranks have done what they do."""
    comm.barrier()
    found = sorted(os.listdir(folder))
    comm.barrier()
    return found
