"""Is anything of one call left in the next? Not what the file of that name held then."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from shardload import SourceError
from tests.mpi.support import check, mesh_of, on_root, ramp, same_error, unit
from tests.unit.files import write_hdf5

pytestmark = pytest.mark.any_library


def write(path: Path, values: np.ndarray[Any, Any], in_place: bool = False, **how: Any) -> str:
    """A file with the array x: a new one that takes the name, or the same one with other values."""
    if in_place:
        with h5py.File(path, "r+") as file:
            file["x"][...] = values
        return str(path)
    part = path.with_suffix(".part")
    write_hdf5(part, {"x": values}, **how)
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
