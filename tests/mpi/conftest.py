"""Fixtures of the tests that run on any number of ranks."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from tests.mpi.sources import SOURCES
from tests.mpi.support import cube, on_root

# xarray would import it on each rank, for half a second, to ask whether an array is one of its own. (Ranks that are copies have it.)
if MPI.COMM_WORLD.size > 1 and "xarray" not in sys.modules:
    sys.modules["dask"] = None  # type: ignore[assignment]


@pytest.fixture(scope="session")
def files(comm: Any) -> Iterator[dict[str, str]]:
    """The path of one file for each kind of source: made once, by rank 0."""
    shape = cube()

    def make() -> tuple[str, dict[str, str]]:
        folder = tempfile.mkdtemp(prefix="shardload-files-")
        return folder, {name: write(Path(folder), shape) for name, write in SOURCES.items()}

    folder, paths = on_root(comm, make)
    yield paths
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)
