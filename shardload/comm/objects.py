"""How do the ranks of COMM_WORLD send Python objects? Pickled. For the demo, which compares loads with the usual way."""

from __future__ import annotations

import time
from typing import Any

from shardload.comm.mpi import abort, world, world_rank_and_size

__all__ = ["ObjectRanks"]

_NAP_SECONDS = 0.01


class ObjectRanks:
    """The ranks of COMM_WORLD; without MPI, a single rank. Every method is collective.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    """

    def __init__(self) -> None:
        self._comm = world()
        self.rank, self.size = world_rank_and_size()

    def wait(self) -> None:
        """A barrier that sleeps: a spinning rank would take the core from rank 0, which is busy."""
        if self._comm:
            request = self._comm.Ibarrier()
            while not request.Test():
                time.sleep(_NAP_SECONDS)

    def allgather(self, value: Any) -> Any:
        """Gather the objects of all ranks, on every rank."""
        return self._comm.allgather(value) if self._comm else [value]

    def gather(self, value: Any) -> list[Any] | None:
        """Gather the objects of all ranks, on rank 0; None on other ranks."""
        return self._comm.gather(value) if self._comm else [value]

    def scatter(self, values: list[Any] | None) -> Any:
        """Return this rank's object from the list of rank 0."""
        return self._comm.scatter(values) if self._comm else (values or [None])[0]

    def abort(self) -> None:
        """End all ranks. Not collective."""
        if self._comm:
            abort(self._comm)
