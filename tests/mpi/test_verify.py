"""What does verification prove, and which errors does it find, for all dtypes, shapes, meshes and numbers of ranks?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, SourceError, VerifyError
from tests.mpi.sources import NAME, SOURCES
from tests.mpi.support import DECOMPOSITIONS, check, cube, distinct, mesh_of, padded, put, ramp, same_error, unit
from tests.mpi.test_values import X64, write
from tests.unit.files import python_memory_below

pytestmark = pytest.mark.any_library

HOW = ("index", "checksum", "file", "full")


def proven(path: str, mesh: Any, spec: Any, how: str, **more: Any) -> tuple[jax.Array, shardload.VerifyReport]:
    made = shardload.plan(path, mesh, spec, verify=how, **more)
    x = made.execute()
    assert made.report is not None
    return x, made.report.proven


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_is_read_again(files: dict[str, str], source: str) -> None:
    """Wrong if one source's own library were asked for something else than what was loaded."""
    values, meshes = ramp(cube()), (mesh_of(), mesh_of(jax.devices()[::-1]))
    n = len(jax.devices())
    for mesh in meshes:
        for how in HOW if mesh is meshes[0] else ("full",):
            x, found = proven(files[source], mesh, P("b", None, "a"), how, dataset=NAME, readers="parallel")
            check(x, values, mesh, P("b", None, "a"), how)
            assert (found.how, found.n_shards) == (how, n)
            assert found.n_elements == {"index": 0, "checksum": 0, "full": values.size}.get(how, found.n_elements)
            assert found.nbytes_reread == 4 * found.n_elements
            assert (found.n_boxes > 0) == (how in ("file", "full"))
            again = shardload.verify(x, files[source], dataset=NAME, how=how)
            assert (again.n_elements, again.n_boxes) == (found.n_elements, found.n_boxes)


@pytest.mark.parametrize("name", distinct(DECOMPOSITIONS))
def test_every_element_is_compared_whatever_the_sharding(files: dict[str, str], name: str) -> None:
    """Wrong if replicas were not compared with each other, or elements of a shard were left out."""
    spec, values = DECOMPOSITIONS[name], ramp(cube())
    x, found = proven(files["gzip_shuffle"], mesh_of(), spec, "full", dataset=NAME)
    n_replicas = len(jax.devices()) * x.addressable_shards[0].data.size // x.size
    assert (found.n_devices == len(jax.devices())) == (n_replicas > 1)
    assert found.n_elements >= values.size


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "complex64", ">f8", ">c16", ">i2"])
@pytest.mark.parametrize("name", ["x.h5", "x.zarr"])
def test_types(comm: Any, shared_tmp_path: Path, dtype: str, name: str) -> None:
    """Wrong if bits of one type were compared as another's, or NaN were not equal to itself."""
    kind = np.dtype("float32" if dtype == "bfloat16" else dtype)
    values = ramp(cube(), kind)
    if kind.kind in "fc" and dtype != "bfloat16":  # NumPy does not know the NaN of that type
        values[0, 0, 0], values[1, 2, 3] = np.nan, -0.0
    path = write(comm, shared_tmp_path, values, chunks=(3, 5, 7), name=name)
    cast = {"dtype": ml_dtypes.bfloat16} if dtype == "bfloat16" else {}
    with X64(True):
        for how in ("checksum", "file", "full"):
            x, found = proven(path, mesh_of(), P("a", "b"), how, **cast)
        expected = values.astype(x.dtype)
        check(x, expected, mesh_of(), P("a", "b"))
        assert found.n_elements == expected.size
        wrong = expected.copy()
        flat = int(np.ravel_multi_index((1, 2, 3), wrong.shape))
        wrong.reshape(-1).view(np.uint8)[flat * wrong.itemsize] ^= 1  # the least that can be wrong
        bad = put(wrong, mesh_of(), P("a", "b"))
        error = same_error(comm, lambda: shardload.verify(bad, path, **cast), VerifyError, "element (1, 2, 3) is")
        assert isinstance(error, VerifyError)
        assert error.index == (1, 2, 3)


SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "0-d": ((), P()),
    "empty": ((0, 3), P()),
    "empty, cut": ((2 * unit(), 0), P("a")),
    "1-d": ((9 * unit(),), P(("b", "a"))),
    "padded": ((2 * unit() + 1, 3 * unit() - 1, 5), P("a", "b")),
    "shards all padding": ((unit() + 1, 3), P(("b", "a"))),
    "4-d, replicated": ((3, 2 * unit() - 1, 2, 5), P(None, "b")),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_and_padding(comm: Any, shared_tmp_path: Path, case: str) -> None:
    """Wrong if padding were read from the file, or not looked at."""
    shape, spec = SHAPES[case]
    values, mesh = ramp(shape), mesh_of()
    path = write(comm, shared_tmp_path, values)
    whole = padded(values, mesh, spec, -7)
    for how in HOW:
        x, found = proven(path, mesh, spec, how, pad=-7)
        check(x, whole, mesh, spec, how)
        assert found.n_padding == {"full": padding_on_devices(x, values.size)}.get(how, found.n_padding)
    if whole.size > values.size:
        place = tuple(n - 1 for n in whole.shape)
        wrong = whole.copy()
        wrong[place] = 3
        bad = put(wrong, mesh, spec)
        text = "3.0 (bytes 00004040), but the padding has -7.0"
        same_error(comm, lambda: shardload.verify(bad, path, pad=-7), VerifyError, text)


def padding_on_devices(x: jax.Array, n_true: int) -> int:
    """Distinct elements of padding that each process holds, over all."""
    held = x.sharding.devices_indices_map(x.shape)
    distinct = {(device.process_index, str(index)) for device, index in held.items()}
    n_shards = len({str(index) for index in held.values()})
    return (x.size - n_true) * len(distinct) // n_shards if x.size != n_true else 0


def test_one_element_is_found_wherever_it_is(comm: Any, files: dict[str, str]) -> None:
    """Wrong if a box were left out of "full" anywhere."""
    values, mesh, spec = ramp(cube()), mesh_of(jax.devices()[::-1]), P("b", "a")
    for flat in (0, 1, values.size // 2, values.size - 1):
        place = tuple(int(i) for i in np.unravel_index(flat, values.shape))
        wrong = values.copy()
        wrong[place] += 0.5
        x = put(wrong, mesh, spec)
        text = f"element {place} is {flat + 0.5}"
        same_error(
            comm, lambda x=x: shardload.verify(x, files["chunked"], dataset=NAME), VerifyError, text, f"has {float(flat)}"
        )


def test_only_chunks_of_the_selection_are_looked_up(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the file that is read again were asked for the places of all chunks: 80 MiB for these 4 million."""
    path, at = str(shared_tmp_path / "sparse.h5"), 1 << 20
    if comm.rank == 0:
        with h5py.File(path, "w", libver="latest") as file:
            sparse = {"chunks": (1024,), "maxshape": (None,), "compression": "gzip"}
            file.create_dataset("x", (1 << 32,), "f4", **sparse)[at : at + 4096] = np.arange(4096)
    comm.Barrier()
    n = 1024 * len(jax.devices())
    with python_memory_below(20 << 20):
        _, report = proven(path, mesh_of(), P(("b", "a")), "file", select=slice(at, at + n), missing="fill")
    assert report.n_elements > 0


def test_arrays_that_cannot_be_of_the_file(comm: Any, files: dict[str, str]) -> None:
    """Wrong if a comparison with another array began."""
    values, mesh, path = ramp(cube()), mesh_of(), files["contiguous"]

    def call(x: Any, **how: Any) -> Any:
        return lambda: shardload.verify(x, path, dataset=NAME, **how)

    x = put(values, mesh, P("a"))
    same_error(comm, call(values), ConfigError, "expected a jax.Array")
    same_error(comm, call(x, select=slice(0, 4), pad=0), ConfigError, "x has shape")
    same_error(comm, call(x.astype("float16")), ConfigError, "float16", "dtype=")
    same_error(comm, call(x, how="all"), ConfigError, "how of verify is 'all'; expected 'index', 'checksum', 'file' or 'full'")
    same_error(comm, call(x, seed=-1), ConfigError, "seed is -1")
    same_error(comm, lambda: jax.jit(lambda x: call(x)())(x), ConfigError, "x is traced", "outside of jax.jit")
    gone = put(values, mesh, P("a"))
    gone.delete()
    same_error(comm, call(gone), ConfigError, "x was deleted (donated to a jitted function?)", "Verify it before")
    same_error(comm, lambda: shardload.verify(x, path + ".none"), SourceError, "there is no file")
    same_error(comm, lambda: shardload.scatter(values, mesh, P(), verify="full"), ConfigError, "no file to read again")


def test_a_mesh_of_some_devices(comm: Any, files: dict[str, str]) -> None:
    """Wrong if a process without devices kept the others waiting."""
    mesh = mesh_of(jax.devices()[-1:])
    x, found = proven(files["zarr_v3"], mesh, P("a"), "full", dataset=NAME)
    assert (found.n_shards, found.n_elements) == (1, x.size)
    assert shardload.verify(x, files["zarr_v3"], dataset=NAME, staging="64kB").n_elements == x.size


def test_one_device_without_a_mesh(files: dict[str, str]) -> None:
    """Wrong if an array of one process alone had to be given a mesh first."""
    if len(jax.devices()) == 1:
        x = jax.device_put(ramp(cube()))
        assert shardload.verify(x, files["chunked"], dataset=NAME).n_elements == x.size
