"""How do ranks tell each other that they are alive, that a call is dead, or that they leave?

Short texts over MPI for the first two. A rank that leaves is soon in JAX's shutdown, where it calls MPI no more, and it may
leave while nobody waits: that is kept by JAX's coordinator, until somebody asks. Nothing here waits for anybody.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

__all__ = ["Departures", "MpiMailbox", "leave_alone_at_exit", "leave_at_exit"]

_LONGEST_LEAVE_SECONDS = 15.0
# MPICH takes in one message per call, of whatever kind; where nothing else calls MPI, ours may stand behind others.
_PROBES = 64
_FLUSH_SECONDS, _NAP_SECONDS = 0.25, 1e-3


class MpiMailbox:
    """A `Mailbox` (see `watch`) over an MPI communicator.

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


class Departures:
    """Which ranks of a group have come to the end of their program, and what they had done by then.

    Parameters
    ----------
    rank : int
        This rank.
    client : callable
        JAX's client of its coordinator, or None.
    """

    def __init__(self, rank: int, client: Callable[[], Any]) -> None:
        self._rank, self._client = rank, client
        self._place = ""
        self._n_agreed: Callable[[], int] = int
        self._pid = os.getpid()
        self._found: Mapping[int, int] = {}
        self._asking: threading.Thread | None = None

    def begin(self, name: str, n_agreed: Callable[[], int]) -> None:
        """From now on this rank's end is told, and others' known.

        `name` is the group's, the same on all its ranks and no other group's; `n_agreed` how many collectives this rank has
        finished.
        """
        self._place, self._n_agreed = f"shardload/left/{name}/", n_agreed
        _see_off().add(self)

    def known(self) -> Mapping[int, int]:
        """What was known when this was asked last; asks again. A coordinator that does not answer holds up a thread."""
        client = self._client() if self._place else None
        if client is not None and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(target=self._ask, args=(client,), name="shardload-departures", daemon=True)
            self._asking.start()
        return self._found

    def _ask(self, client: Any) -> None:
        with suppress(Exception):  # a coordinator that is gone is JAX's to speak of
            found = client.key_value_dir_get(self._place)
            self._found = {int(key.rpartition("/")[2]): int(value) for key, value in found}

    def leave(self) -> None:
        """Say that this rank has come to its end. Once."""
        client = self._client()
        if client is not None and os.getpid() == self._pid:  # a fork's end is not this process's
            with suppress(Exception):
                client.key_value_set(f"{self._place}{self._rank}", str(self._n_agreed()))


@cache
def _see_off() -> weakref.WeakSet[Departures]:
    """Those that are told when the interpreter ends: before JAX's own function is called, which was registered before."""
    present: weakref.WeakSet[Departures] = weakref.WeakSet()

    def leave() -> None:
        for one in [*present]:
            one.leave()

    atexit.register(leave)
    return present


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


def leave_alone_at_exit(_seconds: float) -> None:
    """The same for a process alone, but only if a thread of it is then still held up in a read.

    The end of the interpreter would wait for the HDF5 library, whose lock that thread has. Where the thread has got out of it,
    the program ends as any other.
    """
    atexit.register(_leave_if_held_up)


def _leave_if_held_up() -> None:
    if any(thread.name.startswith("shardload-read") for thread in threading.enumerate()):
        _leave(None, 0.0)


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
