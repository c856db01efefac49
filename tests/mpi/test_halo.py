"""Has each shard its neighbours' rows? Each against a window of what `numpy.pad` makes of the file's values."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import zarr
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, MissingChunksWarning, SourceError
from tests.mpi.sources import NAME
from tests.mpi.support import check, cube, mesh_of, on_root, padded, parts_of, ramp, same_error, turned, unit, warned_once
from tests.unit.brute_force import beyond_its_ends

Array = np.ndarray[Any, Any]


def with_halos(values: Array, mesh: Any, spec: Any, widths: tuple[int, ...], edges: tuple[Any, ...]) -> Array:
    """The whole jax.Array: the shards with their halos side by side."""
    parts, out = parts_of(mesh, spec, values.ndim), beyond_its_ends(values, widths, edges)
    for axis, (n, p, h) in enumerate(zip(values.shape, parts, widths, strict=True)):
        rows = [i * (n // p) + k for i in range(p) for k in range(n // p + 2 * h)]
        out = np.take(out, rows, axis=axis)
    return out


CASES: dict[str, tuple[Any, Any, Any]] = {
    "pencil, widths differ": (P("a", "b"), (2, 3), "wrap"),
    "mesh axes exchanged, edge": (P("b", "a"), 2, "edge"),
    "both axes on one, b major, a value": (P(None, ("b", "a")), 1, -5),
    "replicas over b": (P("a"), 2, "wrap"),
    "axis 0 not cut, corners differ": (P(None, "a", "b"), (3, 1, 2), ("edge", "wrap", 0)),
    "only an axis that is not cut": (P("a"), (0, 0, 4), "wrap"),
    "not cut at all": (P(), (2, 0, 1), ("wrap", 0, "edge")),
}


@pytest.mark.parametrize("name", CASES)
def test_halos_are_numpys(files: dict[str, str], name: str) -> None:
    """Wrong if rows came from the wrong neighbour, wrapped where they must not, lay transposed, or corners were the sides'."""
    spec, halo, edge = CASES[name]
    if isinstance(halo, int):
        widths = tuple(halo if k < len(spec) and spec[k] else 0 for k in range(3))
    else:
        widths = (*halo, 0, 0, 0)[:3]
    edges = edge if isinstance(edge, tuple) else (edge,) * 3
    mesh, values = turned(), ramp(cube())
    expected = with_halos(values, mesh, spec, widths, edges)
    for source, readers in itertools.product(("contiguous", "chunked", "zarr_v3"), ("root", "parallel", "direct")):
        x = shardload.load(
            files[source], mesh, spec, dataset=NAME, halo=halo, edge=edge, readers=readers, verify="checksum"
        )  # fmt: skip
        check(x, expected, mesh, spec, (source, readers))


def test_with_select_dtype_and_pad(files: dict[str, str]) -> None:
    """Wrong if a halo reached beyond the selection, was not cast, or padding on another axis lay where a halo is."""
    mesh, n = turned(), unit()
    select = np.s_[3, 1 : 1 + 2 * n, n:-1]
    values = ramp(cube())[select].astype("float16" if cube()[2] < 30 else "float32")
    spec, widths, edges = P("a", "b"), (2, 0), ("wrap", 0)
    expected = padded(values, mesh, spec, -1)
    x = shardload.load(
        files["gzip_shuffle"], mesh, spec, dataset=NAME, select=select, dtype=values.dtype, pad=-1, halo=(2,), verify="full"
    )
    check(x, with_halos(expected, mesh, spec, widths, edges), mesh, spec)
    check(shardload.load(
        files["big_endian"], mesh, spec, dataset=NAME, select=select, dtype=values.dtype, pad=-1, halo=(1,), edge="edge"
    ), with_halos(expected, mesh, spec, (1, 0), ("edge", 0)), mesh, spec)  # fmt: skip


@pytest.mark.any_library
def test_verify_mask_and_unpad_of_halos(comm: Any, files: dict[str, str]) -> None:
    """Wrong if a level of verification looked at other elements than those that a shard must hold, or counted some twice."""
    mesh, spec, values = turned(), P("b", None, "a"), ramp(cube())
    options: dict[str, Any] = {"dataset": NAME, "halo": (2, 1, 3), "edge": ("wrap", "edge", 9)}
    plan = shardload.plan(files["chunked"], mesh, spec, verify="full", **options)
    x = plan.execute()
    assert plan.report is not None
    found = shardload.verify(x, files["chunked"], **options)
    n_local = sum(shard.data.size for shard in x.addressable_shards)
    assert found.n_elements + found.n_padding == comm.allreduce(n_local)
    mask = shardload.mask(x)
    assert int(mask.sum()) == values.size
    same = shardload.mask(x + 0, plan)
    for shard, at, again in zip(x.addressable_shards, mask.addressable_shards, same.addressable_shards, strict=True):
        assert np.isin(np.asarray(shard.data)[np.asarray(at.data)], values).all()
        np.testing.assert_array_equal(np.asarray(at.data), np.asarray(again.data))
    check(shardload.unpad(x), values, mesh, spec)
    np.testing.assert_array_equal(shardload.unpad(x, numpy=True), values, strict=True)
    # Cut along other axes: a shard has the halos of several, with what they surround in between.
    for other in (P(), P("a", "b")):
        moved = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, other))(x)
        np.testing.assert_array_equal(shardload.unpad(moved, plan, numpy=True), values, strict=True)


@pytest.mark.parametrize("at", ["own", "wrapped", "repeated", "value"])
def test_a_wrong_element_is_found(comm: Any, files: dict[str, str], at: str) -> None:
    """Wrong if verification believed the halo, or looked for the file's elements where there are none."""
    mesh = Mesh(np.array(jax.devices()), "a")
    options: dict[str, Any] = {"dataset": NAME, "halo": (1, 1, 1), "edge": ("wrap", "edge", 0)}
    x = shardload.load(files["chunked"], mesh, P("a"), **options)
    place = {"own": (1, 1, 1), "wrapped": (0, 1, 1), "repeated": (1, 0, 1), "value": (1, 1, 0)}[at]

    def shard(index: Any) -> Array:
        data = next(np.array(s.data) for s in x.addressable_shards if s.index == index)
        if not (index[0].start or 0):
            data[place] += 1
        return data

    wrong = jax.make_array_from_callback(x.shape, x.sharding, shard, dtype=x.dtype)
    same_error(comm, lambda: shardload.verify(wrong, files["chunked"], **options), shardload.VerifyError, f"element {place}")
    shardload.verify(x, files["chunked"], **options)


def test_each_chunk_is_decoded_and_counted_once(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the rows that several shards have were read, or were reported missing, once for each of them."""
    n, path = unit(), shared_tmp_path / "holes.zarr"

    def write() -> None:
        array = zarr.create_array(path, shape=(2 * n, 8), chunks=(1, 8), dtype="f4", fill_value=0)
        array[1::2] = ramp((n, 8)) + 1

    on_root(comm, write)
    mesh = Mesh(np.array(jax.devices()), "a")
    for readers in ("parallel", "root", "direct"):
        plan = shardload.plan(path, mesh, P("a"), halo=2, readers=readers)
        with warned_once(comm, MissingChunksWarning):
            plan.execute()
        assert plan.report is not None
        if readers != "direct":
            assert plan.report.chunks_decoded == 2 * n
        assert plan.report.chunks_missing == n, readers
        assert plan.report.chunks_decoded == plan.costs[readers].chunks_decoded
    same_error(comm, lambda: shardload.load(path, mesh, P("a"), halo=2, missing="error"), SourceError, f"{n} of {2 * n} chunks")


def test_bad_halos(comm: Any, files: dict[str, str]) -> None:
    """Wrong if a halo that cannot be were cut down without a word, or an error came from one rank, or after reading."""
    mesh, path = mesh_of(), files["chunked"]
    n = len(jax.devices())
    shape, line, slab = cube(), Mesh(np.array(jax.devices()), "a"), P("a")

    def error(*parts: str, mesh: Any = line, spec: Any = slab, **options: Any) -> None:
        for call in (shardload.load, shardload.plan):
            same_error(comm, lambda call=call: call(path, mesh, spec, dataset=NAME, **options), ConfigError, *parts)

    core = shape[0] // n
    error(f"halo is {core + 1} on axis 0", f"a shard has {core} elements", f"at most {core}", halo=core + 1)
    error("4 axes", "has 3", halo=(1, 0, 0, 0))
    error("it cuts none", "halo=(2,)", halo=2, spec=P(), mesh=mesh)
    error("edge is (0,)", "nothing of that axis", halo=(0, 1), edge=(0,), spec=P(None, "a"))
    error("edge is nan, which an array of int16 cannot hold", halo=1, edge=float("nan"), dtype="int16")
    if n > 1:
        error("do not divide", "no halo on that axis", halo=1, pad=0, select=np.s_[1:])
    abstract = shardload.plan(path, AbstractMesh((2, 2), ("a", "b")), P("a", "b"), dataset=NAME, halo=(1, 2))
    assert abstract.shape_global == (shape[0] + 4, shape[1] + 8, shape[2])
    assert abstract.shape == shape
    assert "halo 1 on axis 0 (wrap), 2 on axis 1 (wrap)" in str(abstract).replace("\n", " ").replace("            ", "")
