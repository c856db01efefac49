"""Is anything of one call left in the next? Neither what the file said, nor other arguments."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import SourceError, near
from shardload.planning.tuning import tuned
from tests.mpi.support import check, mesh_of, on_root, padded, ramp, same_error, unit

pytestmark = pytest.mark.any_library


def write(path: Path, values: np.ndarray[Any, Any], in_place: bool = False, **how: Any) -> str:
    """A file with the array x: a new one that takes the name, or the same one with other values."""
    if in_place:
        with h5py.File(path, "r+") as file:
            file["x"][...] = values
        return str(path)
    part = path.with_suffix(".part")
    with h5py.File(part, "w") as file:
        file.create_dataset("x", data=values, **how)
    part.rename(path)
    return str(path)


def shape() -> tuple[int, int]:
    return 2 * unit(), 3 * unit()


@pytest.mark.parametrize("chunks", [None, (2, 3)], ids=["one piece", "chunks"])
def test_a_file_that_changes_between_two_calls(shared_tmp_path: Path, comm: Any, chunks: Any) -> None:
    """Wrong if a call used the values, the shape or the type that the file of this name had in the last one."""
    path, mesh, first = shared_tmp_path / f"x{chunks}.h5", mesh_of(), ramp(shape())
    wide = ramp((shape()[0], 2 * shape()[1]))
    versions: list[tuple[Any, dict[str, Any]]] = [
        (first, {}),
        (first + 1, {}),  # as many bytes, another file
        (first + 2, {"in_place": True}),  # the same file
        (wide, {}),
        (wide.astype("int16"), {}),
        (first, {"chunks": (1, shape()[1])}),
        (first[::-1].copy(), {"compression": "gzip"}),
        (first.astype(">f4"), {}),
    ]
    for values, how in versions:
        given = how if how else {"chunks": chunks}
        name = on_root(comm, partial(write, path, values, **given))
        native = values.astype(values.dtype.newbyteorder("="))
        check(shardload.load(name, mesh, P("a", "b"), dataset="x"), native, mesh, P("a", "b"), how)
    on_root(comm, lambda: path.unlink() or "")
    same_error(comm, lambda: shardload.load(str(path), mesh, P("a", "b"), dataset="x"), SourceError, path.name)
    on_root(comm, partial(write, path, first))
    check(shardload.load(str(path), mesh, P("a", "b"), dataset="x"), first, mesh, P("a", "b"))


def parts_of(values: np.ndarray[Any, Any]) -> list[tuple[Any, np.ndarray[Any, Any]]]:
    """Selections of an array with axes time, lat and lon, and what NumPy says of each."""
    rows = [(k,) for k in (0, 1, 5, len(values) - 1, 2, -2)]
    by_position = [*rows, *(slice(k, k + 4) for k in (0, 2, 3, 4)), (..., slice(1, 3)), (4, 2)]
    by_name: list[tuple[Any, Any]] = [({"time": k}, values[k]) for k in (3, -1, 0)]
    by_name += [({"time": slice(k, k + 2)}, values[k : k + 2]) for k in (1, 2, 7)]
    by_name += [({"time": near(60.0 * k)}, values[k]) for k in (5, 6)] + [({"lat": 1, "time": 2}, values[2, 1])]
    return [(select, values[select]) for select in by_position] + by_name


@pytest.mark.parametrize("kind", ["contiguous", "steps", "cubes", "blosc", "zarr", "shards"])
def test_parts_of_one_array(shared_tmp_path: Path, comm: Any, kind: str) -> None:
    """Wrong if a part came from where an earlier one was."""
    values, mesh = ramp((12, 2 * unit(), 3 * unit())), mesh_of()
    chunks = {"contiguous": None, "cubes": (5, 2, 2)}.get(kind, (1, *values.shape[1:]))

    def write_hdf5() -> str:
        with h5py.File(shared_tmp_path / "x.nc", "w") as file:
            how = {"contiguous": {}, "blosc": hdf5plugin.Blosc()}.get(kind, {"compression": "gzip"})
            made = file.create_dataset("x", data=values, chunks=chunks, **how)
            for k, name in enumerate(("time", "lat", "lon")):
                file[name] = np.arange(values.shape[k]) * 60.0
                file[name].make_scale(name)
                made.dims[k].attach_scale(file[name])
        return str(shared_tmp_path / "x.nc")

    def write_zarr() -> str:
        path = str(shared_tmp_path / "x.zarr")
        root = zarr.open_group(path, mode="w")
        how: dict[str, Any] = {"shards": (4, *values.shape[1:])} if kind == "shards" else {}
        root.create_array("x", data=values, chunks=chunks, dimension_names=("time", "lat", "lon"), **how)
        root.create_array("time", data=np.arange(12) * 60.0, dimension_names=("time",))
        return path

    path = on_root(comm, write_zarr if kind in ("zarr", "shards") else write_hdf5)
    usual = {"worth_sharing_nbytes": 1, "min_chunk_nbytes": 1}
    for small in (1 << 20, 0):  # with the metadata, and read by several ranks
        with tuned(small_nbytes=small, **usual):
            for select, expected in parts_of(values)[:: 1 if small else 2]:
                spec = P(*("a", "b")[: expected.ndim])
                x = shardload.load(path, mesh, spec, dataset="x", select=select, pad=-1)
                check(x, padded(expected, mesh, spec, -1), mesh, spec, (small, select))
            for select, how in (((3,), {"dtype": "int32"}), (slice(2, 5), {"verify": "full"}), ((..., 2), {"halo": 1})):
                expected = values[select].astype(how.get("dtype", "float32"))
                given = {"pad": 0, **how} if "halo" not in how else {"edge": "wrap", **how}
                if "halo" in how and any(n % k for n, k in zip(expected.shape, mesh.shape.values(), strict=True)):
                    continue
                spec = P(*("a", "b")[: expected.ndim])
                x = shardload.load(path, mesh, spec, dataset="x", select=select, **given)
                if "halo" not in how:
                    check(x, padded(expected, mesh, spec, 0), mesh, spec, (small, select, how))
                    continue
                around = np.pad(expected, 1, mode="wrap")
                for one in x.addressable_shards:
                    at = [(s.start or 0) // one.data.shape[k] for k, s in enumerate(one.index)]
                    size = [n - 2 for n in one.data.shape]
                    window = tuple(slice(i * n, (i + 1) * n + 2) for i, n in zip(at, size, strict=True))
                    np.testing.assert_array_equal(np.asarray(one.data), around[window])
    first, second = (shardload.plan(path, mesh, P("a"), dataset="x", select=(k,), pad=0, verify="full") for k in (4, 9))
    for plan, k in ((first, 4), (second, 9), (first, 4)):
        check(plan.execute(), padded(values[k], mesh, P("a"), 0), mesh, P("a"), k)
