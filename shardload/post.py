"""How do ranks tell each other that they are alive, or that a call is dead? Short texts over MPI; nothing waits for anybody."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["MpiOffice", "leave_at_exit"]

_LONGEST_LEAVE_SECONDS = 15.0
# MPICH takes in one message per call, of whatever kind; where nothing else calls MPI, ours may stand behind others.
_PROBES = 64
_FLUSH_SECONDS, _NAP_SECONDS = 0.25, 1e-3


class MpiOffice:
    """An `Office` (see `watch`) over an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Of the ranks.
    mpi : module
        ``mpi4py.MPI``.
    tag : int
        For this use alone.
    """

    def __init__(self, comm: Any, mpi: Any, tag: int) -> None:
        self._comm, self._mpi, self._tag = comm, mpi, tag
        self._under_way: list[tuple[Any, Any]] = []

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """Send one. What it is sent from is kept until it is gone."""
        self._forget()
        data = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8)
        self._under_way.append((self._comm.Isend(data, dest=rank, tag=self._tag), data))

    def receive(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Those that have come, and who sent each."""
        status = self._mpi.Status()
        n_empty = 0
        while n_empty < _PROBES:
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, self._tag, status)
            if message is None:
                n_empty += 1
                continue
            found = np.empty(status.Get_count(self._mpi.BYTE), dtype=np.uint8)
            message.Recv(found)
            yield status.Get_source(), json.loads(found.tobytes())
        self._forget()

    def flush(self) -> None:
        """Call MPI until all that was sent has left, for a moment at most: who should take it may be held up."""
        end = time.monotonic() + _FLUSH_SECONDS
        self._forget()
        while self._under_way and time.monotonic() < end:
            time.sleep(_NAP_SECONDS)
            self._forget()

    def _forget(self) -> None:
        self._under_way = [(request, data) for request, data in self._under_way if not request.Test()]


def leave_at_exit(mpi: Any, seconds: float) -> None:
    """When the interpreter ends, end this process at once, and with MPI the whole job: else it would wait for who is held up.

    Parameters
    ----------
    mpi : module or None
        ``mpi4py.MPI``; None where there is no MPI.
    seconds : float
        That the other ranks have then to learn of it and to say so.
    """
    atexit.register(_leave, mpi, seconds)  # the last to be registered is the first to be called


def _leave(mpi: Any, seconds: float) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if mpi is None:
        os._exit(1)
    if not mpi.Is_finalized():
        end = time.monotonic() + min(_LONGEST_LEAVE_SECONDS, seconds + 2 * _FLUSH_SECONDS)
        while time.monotonic() < end:
            mpi.COMM_WORLD.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG)  # what this rank has sent may need a call to go on
            time.sleep(_NAP_SECONDS)
        mpi.COMM_WORLD.Abort(1)
