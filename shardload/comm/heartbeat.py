"""How do ranks tell each other that they are alive, that a call has stalled, or that their program ends?

1. The first two are short notes (`NoteMailbox`).
2. A rank whose program ends is soon in JAX's shutdown, where it no longer calls MPI, and perhaps no rank waits yet. So it
   leaves a note with JAX's coordinator, where other ranks can look it up later (`Departures`).

No method waits for another rank.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from shardload.comm.mpi import abort
from shardload.comm.transport import Transport
from shardload.errors import ShardloadError
from shardload.system.thread_pool import flush

_LONGEST_LEAVE_SECONDS = 15.0
# MPICH receives one message per call, of any kind. If nothing else calls MPI, ours may be queued behind others.
_PROBES = 64
_FLUSH_SECONDS, _NAP_SECONDS = 0.25, 1e-3


class NoteMailbox:
    """Carries messages between ranks, as notes, over a transport that carries nothing else. Nothing waits for another rank."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """Send a message."""
        text = json.dumps(message).encode()
        self._transport.send_note(rank, np.frombuffer(text.ljust(-(-len(text) // 8) * 8), dtype=np.int64))

    def receive(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Iterate over the messages that have come, each with its sender."""
        n_empty = 0
        while n_empty < _PROBES:
            self._transport.test()
            n_empty += 1
            for rank, note in self._transport.receive_notes():
                n_empty = 0
                yield rank, json.loads(note.tobytes())

    def flush(self) -> None:
        """Let sent messages leave, even if MPI is never called again. It takes a moment at most: a receiver may hang."""
        end = time.monotonic() + _FLUSH_SECONDS
        with suppress(ShardloadError):  # of JAX's coordinator
            while self._transport and time.monotonic() < end:
                self._transport.test()
                time.sleep(_NAP_SECONDS)


class Departures:
    """Which ranks of a group have reached the end of their program, and how many collectives they had finished by then.

    Parameters
    ----------
    rank : int
        This rank.
    client : callable
        Returns JAX's client of its coordinator, or None.
    """

    def __init__(self, rank: int, client: Callable[[], Any]) -> None:
        self._rank, self._client = rank, client
        self._prefix = ""
        self._n_agreed: Callable[[], int] = int
        self._pid = os.getpid()
        self._departed: Mapping[int, int] = {}
        self._query: threading.Thread | None = None

    def begin(self, name: str, n_agreed: Callable[[], int]) -> None:
        """From now on, report the end of this rank, and look up that of others.

        `name` is the name of the group: the same on all its ranks, and different for each group. `n_agreed` returns how many
        collectives this rank has finished.
        """
        self._prefix, self._n_agreed = f"shardload/left/{name}/", n_agreed
        _leaving_at_exit().add(self)

    def departed(self) -> Mapping[int, int]:
        """Return the result of the last look-up, and start another one in a thread, because the coordinator may not answer."""
        client = self._client() if self._prefix else None
        if client is not None and (self._query is None or not self._query.is_alive()):
            query = threading.Thread(target=self._look_up, args=(client,), name="shardload-departures", daemon=True)
            with suppress(RuntimeError):  # no thread can be started now; perhaps the next time
                query.start()
                self._query = query
        return self._departed

    def _look_up(self, client: Any) -> None:
        with suppress(Exception):  # if the coordinator is gone, JAX reports it
            entries = client.key_value_dir_get(self._prefix)
            self._departed = {int(key.rpartition("/")[2]): int(value) for key, value in entries}

    def leave(self) -> None:
        """Report that this rank has reached the end of its program. The first call counts."""
        client = self._client()
        if client is not None and os.getpid() == self._pid:  # the end of a forked process does not count
            with suppress(Exception):
                client.key_value_set(f"{self._prefix}{self._rank}", str(self._n_agreed()))


@cache
def _leaving_at_exit() -> weakref.WeakSet[Departures]:
    """Objects whose `leave` is called when the interpreter exits. JAX registered its exit function first, so it runs later."""
    atexit.register(leave_all)
    return weakref.WeakSet()


def leave_all() -> None:
    """Report to all groups that this rank has reached the end of its program."""
    for departures in [*_leaving_at_exit()]:
        departures.leave()


def leave_at_exit(mpi: Any, seconds: float, rank: int = 0) -> None:
    """End this process, and with MPI the whole job, when the interpreter exits. It would otherwise wait for a stalled rank.

    Parameters
    ----------
    mpi : module or None
        ``mpi4py.MPI``; None without MPI.
    seconds : float
        Time that the other ranks get to learn of the stall and to report it.
    rank : int
        This rank. Without MPI the others learn of it through JAX's coordinator, in the process of rank 0, which ends last.
    """
    atexit.register(_leave, mpi, seconds, rank)  # the last to be registered is the first to be called


def _leave(mpi: Any, seconds: float, rank: int) -> None:
    flush()
    seconds = min(_LONGEST_LEAVE_SECONDS, seconds + 2 * _FLUSH_SECONDS)
    if mpi is None:
        if rank == 0:
            time.sleep(seconds)
        os._exit(1)
    if not mpi.Is_finalized():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            mpi.COMM_WORLD.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG)  # messages of this rank may need calls into MPI to progress
            time.sleep(_NAP_SECONDS)
        abort(mpi)
