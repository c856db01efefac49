"""Missing chunks: counted in the whole job, reported once, or refused by all ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import MissingChunksWarning, SourceError
from tests.mpi.support import READERS, check, cube, mesh_of, on_root, ramp, same_error, share, warned_once

pytestmark = pytest.mark.any_library

Array = np.ndarray[Any, Any]


@pytest.fixture
def torn(comm: Any, shared_tmp_path: Path) -> dict[str, str]:
    """Files of which only the first rows, of half the columns, were written: 3 of 12 chunks. Small chunks, and large ones."""
    shape = cube()  # asks JAX for its devices, which the first time takes all ranks

    def make() -> dict[str, str]:
        values, chunks = ramp(shape), (shape[0] // 2, shape[1] // 6 + 1, shape[2])
        rows, columns = chunks[0], 3 * chunks[1]
        with h5py.File(shared_tmp_path / "a.h5", "w") as file:
            made = file.create_dataset("rho", shape, "f4", chunks=chunks, compression="gzip", fillvalue=-1)
            made[:rows, :columns] = values[:rows, :columns]
            file.create_dataset("never", shape, "f4", fillvalue=5)
        array = zarr.open_group(shared_tmp_path / "a.zarr", mode="w").create_array(
            "rho", shape=shape, dtype="f4", chunks=chunks, fill_value=-1
        )
        array[:rows, :columns] = values[:rows, :columns]
        return {name: str(shared_tmp_path / f"a.{name}") for name in ("h5", "zarr")}

    return on_root(comm, make)


def expected(shape: tuple[int, ...]) -> tuple[Array, int, int]:
    """The values, how many chunks are missing, and of how many."""
    values, n_columns = np.full(shape, -1, "f4"), shape[1] // 6 + 1
    values[: shape[0] // 2, : 3 * n_columns] = ramp(shape)[: shape[0] // 2, : 3 * n_columns]
    n = 2 * -(-shape[1] // n_columns)
    return values, n - 3, n


@pytest.mark.parametrize("chunk_by_chunk", [False, True])
@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_counted_once_and_said_once(
    torn: dict[str, str], comm: Any, kind: str, readers: Any, chunk_by_chunk: bool, tune: Any
) -> None:
    """Wrong if a chunk that several ranks read, or that replicas share, were counted twice."""
    tune(min_chunk_nbytes=0 if chunk_by_chunk else 1 << 30)
    values, n_missing, n = expected(cube())
    for (spec,) in share((P("a", "b"), P(None, "b"), P())):
        with warned_once(comm, MissingChunksWarning) as told:
            plan = shardload.plan(torn[kind], mesh_of(), spec, dataset="rho", readers=readers)
            check(plan.execute(), values, mesh_of(), spec)
        assert plan.report is not None and plan.report.chunks_missing == n_missing
        assert f"({n_missing:,} not stored)" in str(plan.report)
        for text in told:
            assert f"{n_missing} of {n} chunks are not stored" in text and "(0, 3, 0) (elements " in text


@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_refused_or_expected(torn: dict[str, str], comm: Any, kind: str, readers: Any) -> None:
    values, n_missing, n = expected(cube())
    load = partial(shardload.load, torn[kind], mesh_of(), dataset="rho", readers=readers)
    text = f"{n_missing} of {n} chunks are not stored in '/rho'"
    same_error(comm, lambda: load(P("b"), missing="error"), SourceError, text)
    check(load(P("b"), missing="fill"), values, mesh_of(), P("b"))  # warnings are errors
    part = np.s_[: cube()[0] // 2, 0, :]
    check(load(P(), select=part, missing="error"), values[part], mesh_of(), P())


@pytest.mark.parametrize("readers", READERS)
def test_never_written_without_chunks(torn: dict[str, str], comm: Any, readers: Any) -> None:
    plan = shardload.plan(torn["h5"], mesh_of(), P("a", "b"), dataset="never", readers=readers, missing="fill")
    check(plan.execute(), np.full(cube(), 5, "f4"), mesh_of(), P("a", "b"))
    assert plan.report is not None and plan.report.chunks_missing == 1
    call = lambda: shardload.load(torn["h5"], mesh_of(), P("a"), dataset="never", readers=readers, missing="error")  # noqa: E731
    same_error(comm, call, SourceError, "was made but never written")
