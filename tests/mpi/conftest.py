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

# xarray would import it on each rank, for half a second, to ask whether an array is one of its own. (Copies have it already.)
if MPI.COMM_WORLD.size > 1 and "xarray" not in sys.modules:
    sys.modules["dask"] = None  # type: ignore[assignment]


@pytest.fixture
def own_comm(comm: Any) -> Iterator[Any]:
    """A communicator of this test alone, so that shared memory is made for what it does."""
    from shardload.comm.group import group_of  # when MPI and JAX have been started

    own = comm.Dup()
    yield own
    group_of(own).forget_shared_memory()
    own.Free()


@pytest.fixture
def shared(comm: Any, shared_tmp_path: Path) -> Iterator[Any]:
    """A server of new HDF5 files."""
    from tests.mpi.servers import Shared  # where obstore is installed

    server = Shared(comm, shared_tmp_path)
    yield server
    server.end()


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that begin from now on, as a rank that waits prints them."""
    from shardload.comm.group import Group

    begin, begun = Group.begin, list[str]()

    def noted(group: Group, asked: Any, *arguments: Any) -> Any:
        begun.append(f"{asked.title}: {asked}")
        return begin(group, asked, *arguments)

    monkeypatch.setattr(Group, "begin", noted)
    return begun


@pytest.fixture
def moved_as_large(tune: Any) -> None:
    """Small arrays are moved as large ones are, and small chunks decoded here."""
    tune(small_nbytes=0, worth_sharing_nbytes=0, min_chunk_nbytes=1, inline_nbytes=-1)


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
