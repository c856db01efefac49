"""How do ranks gather, reduce and broadcast small buffers?

These are over MPI; `store` has the same for a job without MPI. A rank that waits sleeps; it does not spin (`backoff`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shardload.system.undo import Undo

_MOST_DOUBLINGS = 30

# Requests that were abandoned (a stall, Ctrl-C): MPI may still write into their buffers, so they are never freed.
abandoned: list[Any] = []

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def backoff(n_idle: int, *, n_awake: int = 0, first_seconds: float, longest_seconds: float, n_alike: int = 1) -> float:
    """How long to sleep after look number `n_idle` in a row that found nothing, counted from 1; 0: do not sleep yet.

    After `n_awake` looks come sleeps of `first_seconds`, and of twice as long after `n_alike` of one length, up to the longest.

    >>> [backoff(n, n_awake=1, first_seconds=0.25, longest_seconds=1.0, n_alike=2) for n in range(1, 8)]
    [0.0, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0]
    """
    n_slept = n_idle - n_awake - 1
    if n_slept < 0:
        return 0.0
    doublings = min(_MOST_DOUBLINGS, n_slept // n_alike)
    return min(longest_seconds, first_seconds * 2.0**doublings)


_pause_seconds = partial(backoff, n_awake=4, first_seconds=2e-5, longest_seconds=2e-3, n_alike=4)


class Collectives:
    """The collectives that a group needs. Those of this class are of a process alone."""

    def gather(self, values: Array) -> Array:
        """Return the values of every rank, of shape ``(size, *mine.shape)``. Collective."""
        return values[None]

    def reduce(self, values: Array, op: str) -> Array:
        """Return the ``"sum"``, ``"min"`` or ``"max"`` of each value over the ranks. Collective."""
        reduced: Array = getattr(np, op)(self.gather(values), axis=0)
        return reduced.astype(values.dtype)

    def broadcast(self, data: Bytes, root: int) -> None:
        """Fill `data` with the `data` of `root`. Collective."""


class MpiCollectives(Collectives):
    """Collectives over an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Communicator of the ranks, used for nothing else.
    mpi : module
        ``mpi4py.MPI``.
    look : callable
        Called repeatedly while this rank waits. It may raise; then the communicator must not be used again.
    on_done : callable, optional
        Called after each collective.
    """

    def __init__(self, comm: Any, mpi: Any, look: Callable[[], None], on_done: Callable[[], None] = lambda: None) -> None:
        self._comm, self._mpi, self._look, self._on_done = comm, mpi, look, on_done

    def gather(self, values: Array) -> Array:
        """See `Collectives`."""
        rows = np.empty((self._comm.size, *values.shape), dtype=values.dtype)
        self._finish(lambda: self._comm.Iallgather(values, rows), values, rows)
        return rows

    def reduce(self, values: Array, op: str) -> Array:
        """See `Collectives`."""
        result = np.empty_like(values)
        self._finish(lambda: self._comm.Iallreduce(values, result, getattr(self._mpi, op.upper())), values, result)
        return result

    def broadcast(self, data: Bytes, root: int) -> None:
        """See `Collectives`."""
        self._finish(lambda: self._comm.Ibcast(data, root), data)

    def _finish(self, start: Callable[[], Any], *buffers: Any) -> None:
        self._look()  # raises if the group has stalled, before another message is started
        _complete(start(), self._look, *buffers)
        self._on_done()


def _complete(request: Any, look: Callable[[], None], *kept: Any) -> None:
    """Wait for a request. What is `kept` lives on if that is interrupted."""
    with Undo(lambda: abandoned.append((request, kept))):
        wait_for(request.Test, look)


def wait_for(is_done: Callable[[], bool], look: Callable[[], None]) -> None:
    """Wait without spinning: a late rank may need this core. `look` is called repeatedly."""
    n_idle = 0
    while not is_done():
        look()
        n_idle += 1
        if (seconds := _pause_seconds(n_idle)) > 0:
            time.sleep(seconds)


def duplicate(comm: Any, look: Callable[[], None]) -> Any:
    """A private duplicate of a communicator. Collective; `look` is called while this rank waits, and may raise.

    Not by MPI's own `Dup`, which spins until all ranks call it: Ctrl-C would not end that.
    """
    private, request = comm.Idup()
    _complete(request, look, private)
    return private
