"""Which values arrive, for every dtype and shape, padded, selected or cast?"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, SourceError
from tests.mpi.support import READERS, VERIFY, check, cube, mesh_of, on_root, padded, ramp, same_error, share, unit
from tests.unit.files import write_hdf5

PLAN = importlib.import_module("shardload.planning.schedule")

X64 = jax.enable_x64 if hasattr(jax, "enable_x64") else None
if X64 is None:
    from jax.experimental import enable_x64 as X64

Array = np.ndarray[Any, Any]


def write(
    comm: Any, folder: Path, values: Array, *, chunks: tuple[int, ...] | None = None, name: str = "x.h5", **attrs: Any
) -> str:
    """`values` in a file, written by rank 0: HDF5, or Zarr where the name says so. Returns the path."""
    path = str(folder / name)

    def make() -> None:
        if name.endswith(".zarr"):
            told = {key: np.asarray(value).tolist() for key, value in attrs.items()}
            zarr.create_array(path, data=values, chunks=chunks or "auto", attributes=told)
            return
        write_hdf5(path, {"x": values}, chunks=chunks, compression="gzip" if chunks else None)
        with h5py.File(path, "r+") as file:
            file["x"].attrs.update(attrs)

    on_root(comm, make)
    return path


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.any_library
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int16", "int32", "uint8", "uint32", "float16", "float32", "complex64", ">i2", ">u4", ">c8"]
)
def test_type_is_kept(comm: Any, shared_tmp_path: Path, dtype: str) -> None:
    """Wrong if bytes were counted, swapped or cast wrongly for one type."""
    mesh, values = mesh_of(), ramp(cube(), dtype)
    paths = {c: write(comm, shared_tmp_path, values, chunks=c, name=f"{c}.h5") for c in (None, (3, 5, 7))}
    for chunks, readers, verify in share(paths, ("root", "parallel", "direct"), VERIFY):
        x = shardload.load(paths[chunks], mesh, P("b", "a"), readers=readers, verify=verify)
        check(x, values, mesh, P("b", "a"), (chunks, readers, verify))


@pytest.mark.parametrize("readers", READERS)
def test_booleans_other_than_0_and_1(comm: Any, shared_tmp_path: Path, readers: Any) -> None:
    """Wrong if such bytes came to a device, by whatever way: XLA computes something else with them than NumPy."""
    mesh, truth = mesh_of(), ramp(cube(), "uint8") % 3 != 0
    odd = np.where(truth, ramp(cube(), "uint8") % 251 | 2, 0).astype("u1").view(bool)
    files = (("a.h5", None), ("b.h5", (3, 5, 7)), ("c.zarr", (3, 5, 7)))
    paths = [write(comm, shared_tmp_path, odd, chunks=chunks, name=name) for name, chunks in files]
    for path, verify in share(paths, ("checksum", "full")):
        x = shardload.load(path, mesh, P("b", "a"), readers=readers, verify=verify)
        check(x.view("uint8"), truth.view("u1"), mesh, P("b", "a"), path)
    x = shardload.scatter(lambda: odd, mesh, P("a", "b"))
    check(x.view("uint8"), truth.view("u1"), mesh, P("a", "b"))


def test_a_shape_that_nothing_can_hold(comm: Any, shared_tmp_path: Path) -> None:
    def make() -> str:
        with h5py.File(shared_tmp_path / "a.h5", "w") as file:
            file.create_dataset("x", (4 * unit(), 2**60), "f4", chunks=(1, 2**10))
        return str(shared_tmp_path / "a.h5")

    path = on_root(comm, make)
    same_error(comm, lambda: shardload.load(path, mesh_of(), P("a", "b")), SourceError, "more than any machine", "pass select=")


@pytest.mark.any_library
@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128", ">f8", ">i8", ">c16"])
@pytest.mark.parametrize("name", ["x.h5", "x.zarr"])
def test_64_bits_arrive_exactly_where_jax_has_them(comm: Any, shared_tmp_path: Path, dtype: str, name: str) -> None:
    """Wrong if a value passed through 32 bits on its way: none of these would survive."""
    values = ramp(cube(), dtype)
    small = {"f": "float32", "i": "int32", "u": "uint32", "c": "complex64"}[values.dtype.kind]
    assert not np.array_equal(values.astype(small), values)
    path = write(comm, shared_tmp_path, values, chunks=(3, 5, 7), name=name)
    with X64(True):
        for readers in ("root", "parallel", "direct"):
            x = shardload.load(path, mesh_of(), P("a", "b"), readers=readers)
            check(x, values, mesh_of(), P("a", "b"), readers)
        check(shardload.scatter(values, mesh_of(), P("a", "b")), values, mesh_of(), P("a", "b"))


@pytest.mark.any_library
@pytest.mark.parametrize(
    ("dtype", "loss", "named"),
    [
        ("float64", "half the digits", ["float32"]),  # with its limits
        ("int64", "wrap", []),
        ("uint64", "wrap", []),
        ("complex128", "half the digits", ["complex64"]),
    ],
)
def test_64_bits_are_refused_where_jax_would_cut_them(
    comm: Any, shared_tmp_path: Path, dtype: str, loss: str, named: list[str]
) -> None:
    """Wrong if JAX were left to turn 2**40 into 0, or if what to type were a dtype that 2**40 does not fit into either."""
    values = np.zeros(cube(), dtype)
    path = write(comm, shared_tmp_path, values)
    said = (f" {dtype},", loss, "jax.config.update('jax_enable_x64', True)", "JAX_ENABLE_X64=1", "does not fit is an error")
    calls: list[Any] = [
        lambda: shardload.load(path, mesh_of(), P("a")),
        lambda: shardload.plan(path, mesh_of(), P("a")),
        lambda: shardload.scatter(values, mesh_of(), P("a")),
        lambda: shardload.load(path, mesh_of(), P("a"), dtype=dtype),
    ]
    for call in calls:
        text = str(same_error(comm, call, ConfigError, *said))
        assert text.startswith("the array on rank 0" if call is calls[2] else "'/x' in")
        before, _, after = text.partition("jax_enable_x64")
        assert "dtype=" not in before and "dtype=" in after, "64-bit types are named first"
        assert re.findall(r"dtype='(\w+)'", text) == named
        assert not re.search(r"\bu?int32\b", text)


@pytest.mark.any_library
@pytest.mark.parametrize(
    ("dtype", "to"),
    [
        ("float64", "float32"),
        ("int64", "int32"),
        ("float32", "float16"),
        ("int16", "float32"),
        ("float32", np.int32),
        ("bool", "uint8"),
        (">f8", "<f4"),
        ("float32", ">f4"),
        ("float32", "complex64"),
    ],
)
def test_cast_is_numpys(comm: Any, shared_tmp_path: Path, dtype: str, to: Any) -> None:
    """Wrong if a cast were done twice, in the wrong byte order, or with buffers of the wrong item size."""
    values = ramp(cube(), dtype)
    if to == "float16":
        values = values % 2048
    if to == "int32" and values.dtype == "int64":
        values = values - (1 << 40)
    expected = values.astype(to)
    paths = {c: write(comm, shared_tmp_path, values, chunks=c, name=f"{c}.h5") for c in (None, (3, 5, 7))}
    for chunks, readers in share(paths, READERS):
        x = shardload.load(paths[chunks], mesh_of(), P(None, "a", "b"), dtype=to, readers=readers, verify="checksum")
        check(x, expected, mesh_of(), P(None, "a", "b"), (chunks, readers))


@pytest.mark.parametrize(
    ("dtype", "to", "value"),
    [("int64", "int32", 1 << 40), ("float32", "int32", np.nan), ("float64", "uint8", -1.0), ("int16", "int8", 200)],
)
def test_cast_that_would_change_a_value_is_refused(comm: Any, shared_tmp_path: Path, dtype: str, to: str, value: float) -> None:
    """Wrong if one value in a large array wrapped round, and nobody was told."""
    values = np.ones(cube(), dtype)
    values[-1, -1, -1] = value  # where the last reader finds it
    paths = [write(comm, shared_tmp_path, values, chunks=c, name=f"{c}.h5") for c in (None, (3, 5, 7))]
    for path, readers in share(paths, READERS):
        call = lambda path=path, readers=readers: shardload.load(path, mesh_of(), P("a"), dtype=to, readers=readers)  # noqa: E731
        same_error(comm, call, ConfigError, "'/x' in", f"that {to} cannot hold")
    same_error(comm, lambda: shardload.scatter(values, mesh_of(), P("a"), dtype=to), ConfigError, f"that {to} cannot hold")


# --- shapes -----------------------------------------------------------------------------------------------------------


def shapes() -> dict[str, tuple[tuple[int, ...], tuple[int, ...] | None, Any]]:
    """Shapes with their chunks and a spec, by what is special."""
    u = unit()
    return {
        "0-d": ((), None, P()),
        "1-d, cut by both": ((9 * u,), (7,), P(("a", "b"))),
        "1-d, cut by one": ((9 * u,), None, P("b")),
        "2-d": ((2 * u, 3 * u), (5, 3), P("b", "a")),
        "4-d": ((u, 3, 2 * u, 5), (3, 2, 5, 2), P("a", None, "b")),
        "4-d, inner axes": ((3, u, 5, 2 * u), (2, 3, 5, 7), P(None, "b", None, "a")),
        "5-d": ((2, u, 3, 2 * u, 5), (1, 3, 2, 3, 5), P(None, "a", None, "b")),
        "5-d, first and last": ((u, 2, 3, 5, 2 * u), None, P("b", None, None, None, "a")),
        "length 1": ((1, 2 * u, 1, 3 * u, 1), (1, 3, 1, 5, 1), P(None, "a", None, "b")),
        "all length 1": ((1, 1, 1), (1, 1, 1), P()),
        "empty": ((0, 3), None, P("a")),
        "empty inside": ((2 * u, 0, 3 * u), None, P("a", None, "b")),
        "empty, cut by both": ((0, 2 * u), None, P(("a", "b"))),
        "empty 1-d": ((0,), None, P()),
        "0-d, Zarr": ((), None, P()),
        "empty, Zarr": ((0, 3), None, P()),
        "empty 1-d, Zarr": ((0,), None, P()),
    }


@pytest.mark.parametrize("case", shapes())
def test_shape(comm: Any, shared_tmp_path: Path, case: str) -> None:
    """Wrong for ranks that are not 3, or for axes of length 0 or 1, whose arithmetic is all corner cases."""
    shape, chunks, spec = shapes()[case]
    values = ramp(shape) + np.float32(1)  # not the fill value of Zarr, of which no chunk is stored
    path = write(comm, shared_tmp_path, values, chunks=chunks, name="x.zarr" if "Zarr" in case else "x.h5")
    for readers, verify in share(READERS, VERIFY):
        x = shardload.load(path, mesh_of(), spec, readers=readers, verify=verify)
        check(x, values, mesh_of(), spec, (readers, verify))
    check(shardload.scatter(values, mesh_of(), spec), values, mesh_of(), spec)


# --- padding ----------------------------------------------------------------------------------------------------------


def uneven() -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes that the mesh does not divide (where it has more than one device)."""
    u = unit()
    return {
        "one axis": ((2 * u + 1, 3 * u, 5), P("a", "b")),
        "two axes": ((2 * u - 1, 3 * u + 1, 5), P("a", "b")),
        "two axes, exchanged": ((3, 2 * u - 1, 3 * u + 1), P(None, "b", "a")),
        "over both": ((7, 3 * u + 1), P(None, ("a", "b"))),
        "one element": ((1, 1, 1), P("a", "b")),
        "shards all padding": ((u + 1, 3), P(("b", "a"))),
        "replicated": ((2 * u + 1, 5), P("b")),
        "nothing to pad": ((2 * u, 3 * u), P("a", "b")),
        "empty": ((0, 2 * u + 1), P(None, "a")),
    }


@pytest.mark.parametrize("case", uneven())
def test_padding(comm: Any, shared_tmp_path: Path, case: str) -> None:
    """Wrong if a tail were left as it was in memory, or written over true values."""
    shape, spec = uneven()[case]
    values, mesh = ramp(shape, "int32"), mesh_of()
    expected = padded(values, mesh, spec, -7)
    chunkings = {None, tuple(min(n, c) for n, c in zip(shape, (3, 5, 7), strict=False)) if 0 not in shape else None}
    paths = {c: write(comm, shared_tmp_path, values, chunks=c, name=f"{c}.h5") for c in sorted(chunkings, key=str)}
    for chunks, readers in share(paths, READERS):
        x = shardload.load(paths[chunks], mesh, spec, pad=-7, readers=readers, verify="checksum")
        check(x, expected, mesh, spec, (chunks, readers))
    for path in paths.values():
        assert shardload.plan(path, mesh, spec, pad=-7).shape == shape
    check(shardload.scatter(values, mesh, spec, pad=-7), expected, mesh, spec)


# --- selections -------------------------------------------------------------------------------------------------------

SELECTIONS: dict[str, Any] = {
    "one plane": 3,
    "last plane": -1,
    "inner plane": (slice(None), 4),
    "column": (2, ..., -3),
    "one element": (1, 2, 3),
    "inside chunks": (slice(1, 6), slice(4, 11), slice(9, 19)),
    "one slice": slice(2, 5),
    "negative": (slice(-5, -1), slice(-7, None), slice(None, -2)),
    "past the end": (slice(3, 10**6), ..., slice(0, 10**6)),
    "ellipsis first": (..., slice(3, 8)),
    "ellipsis alone": ...,
    "empty": (slice(3, 3),),
    "numpy integers": (np.int64(2), slice(np.int32(1), np.int64(5))),
}


@pytest.mark.any_library
@pytest.mark.parametrize("case", SELECTIONS)
def test_selection_is_numpys(comm: Any, shared_tmp_path: Path, case: str) -> None:
    """Wrong if an offset inside a chunk were lost, a dropped axis kept, or a block read outside of the selection."""
    select, mesh, values = SELECTIONS[case], mesh_of(), ramp(cube(), "int32")
    wanted = np.asarray(values[select])
    specs = [P(), P("a"), P("b", "a")][: wanted.ndim + 1]
    files = (("plain.h5", None), ("chunked.h5", (3, 5, 7)), ("x.zarr", (3, 5, 7)))
    paths = {name: write(comm, shared_tmp_path, values, chunks=chunks, name=name) for name, chunks in files}
    ways = [(name, r) for name in paths for r in (("root", "parallel", "direct") if name == "chunked.h5" else ("parallel",))]
    for spec, (name, readers) in share(specs, ways):
        x = shardload.load(paths[name], mesh, spec, select=select, pad=-1, readers=readers)
        check(x, padded(wanted, mesh, spec, -1), mesh, spec, (name, spec, readers))


@pytest.mark.parametrize("readers", READERS)
def test_selection_padding_and_cast_together(comm: Any, shared_tmp_path: Path, readers: Any) -> None:
    """Wrong if two of the three work in each other's coordinates."""
    values = ramp((3, *cube(), 4), ">i4")
    select, spec, mesh = (-1, slice(1, None), slice(2, -2), slice(8, 8 + unit() + 1), 2), P("b", None, "a"), mesh_of()
    wanted = padded(values[select].astype("float32"), mesh, spec, 0.5)
    files = (("plain.h5", None), ("chunked.h5", (2, 3, 5, 7, 3)), ("x.zarr", (2, 3, 5, 7, 3)))
    paths = [write(comm, shared_tmp_path, values, chunks=chunks, name=name) for name, chunks in files]
    for path, verify in share(paths, VERIFY):
        how: dict[str, Any] = {"select": select, "dtype": "float32", "pad": 0.5, "staging": "1MiB"}
        x = shardload.load(path, mesh, spec, readers=readers, verify=verify, **how)
        check(x, wanted, mesh, spec, (path, verify))
        assert shardload.verify(x, path, how="file", **how).n_elements, "in the file's coordinates, before the cast"


@pytest.mark.parametrize("trace", [jax.jit, jax.vmap, jax.grad], ids=["jit", "vmap", "grad"])
def test_options_that_are_traced(comm: Any, shared_tmp_path: Path, trace: Any) -> None:
    """Wrong if a number that has no value yet were taken for one, or an error did not show what it is."""
    path = write(comm, shared_tmp_path, ramp(cube()))
    given: list[Callable[[Any], dict[str, Any]]] = [
        lambda k: {"select": k},
        lambda k: {"select": (0, slice(k, None))},
        lambda k: {"pad": k},
        lambda k: {"halo": 1, "edge": {0: k}},
    ]
    for how in given:
        name = list(how(0))[-1]
        call = trace(lambda k, how=how: shardload.load(path, mesh_of(), P("a"), **how(k)))
        value = np.zeros(2 if trace is jax.vmap else (), "f4" if trace is jax.grad else "i4")
        same_error(comm, lambda f=call, v=value: f(v), ConfigError, f"{name} ", "Trace")


# --- many small blocks and messages -----------------------------------------------------------------------------------


TINY_CHUNKS: tuple[tuple[int, ...] | None, ...] = (None, (3, 5, 7), (1, 12, 20), (2, 3, 1))


def tiny_staging(chunks: tuple[int, ...] | None) -> int:
    """The least staging that the library takes for these chunks of 4-byte values."""
    return 20 * math.prod(chunks) if chunks else 1 << 10


@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("chunks", TINY_CHUNKS)
def test_tiny_staging(comm: Any, shared_tmp_path: Path, chunks: tuple[int, ...] | None, readers: Any) -> None:
    """Wrong if a buffer is taken again before its last message has left, or a remainder block is forgotten."""
    values = ramp(cube(), "int32")
    path = write(comm, shared_tmp_path, values, chunks=chunks)
    first = TINY_CHUNKS.index(chunks) + READERS.index(readers)
    for (spec,) in share((P("b", "a"), P(None, "a", "b"), P()), first=first):
        made = shardload.plan(path, mesh_of(), spec, readers=readers, staging=tiny_staging(chunks), verify="checksum")
        if made.readers != "direct":  # there a block is cut by the shards as well
            assert made.schedule.blocks.n_cells >= 8
        check(made.execute(), values, mesh_of(), spec, spec)


@pytest.mark.parametrize("readers", ["root", "parallel", 2])
@pytest.mark.parametrize("nbytes", [4, 12, 100, 1000])
def test_messages_are_split(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, readers: Any
) -> None:
    """Wrong if sender and receiver cut what is above MPI's limit differently, or the rest of a cut is not sent."""
    shape = (unit(), 2 * unit(), 3) if nbytes < 100 else cube()
    values = ramp(shape, "int32")
    path = write(comm, shared_tmp_path, values, chunks=(3, 5, 2))
    monkeypatch.setattr(PLAN, "MAX_MESSAGE_NBYTES", nbytes)
    for spec, verify in share((P("b", "a"), P("a")), VERIFY):
        made = shardload.plan(path, mesh_of(), spec, readers=readers, verify=verify)
        sent = [part for parts in made.schedule.incoming(comm.rank).values() for part in parts]
        assert all(part.region.size * 4 <= nbytes for part in sent)
        check(made.execute(), values, mesh_of(), spec, (spec, verify))
    spec = P("b", "a")
    for view in (values, values.T, values[:, ::-1]):
        x = shardload.scatter(view if comm.rank == 0 else None, mesh_of(), P(), verify="checksum")
        check(x, view, mesh_of(), P(), "scatter")
