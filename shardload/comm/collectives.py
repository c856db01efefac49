"""How do all ranks learn what each of them knows? Small buffers, gathered, reduced or broadcast.

Two ways of the same three calls: over MPI, and over the service that coordinates the processes of JAX, for a job without MPI.
Nothing here spins: a rank that waits sleeps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol

import numpy as np

from shardload.comm.backoff import Backoff
from shardload.comm.stall_report import notice_before_first, text_before_first
from shardload.errors import PeerError, StallError
from shardload.system.interruption import let_interruption_pass

__all__ = ["Collectives", "JaxCollectives", "MpiCollectives", "duplicate", "jax_processes"]

_log = logging.getLogger("shardload")
_BACKOFF = Backoff(n_awake=16, first_seconds=2e-5, longest_seconds=2e-3, n_before_doubling=16)
_NOTICE_SECONDS = 20.0
_LOOK_SECONDS = 0.5  # between two looks, while JAX waits
_LONGEST_WAIT_MS = 7 * 24 * 3600 * 1000  # JAX wants a number; a process that is gone is noticed long before

# What was given up while MPI might still write into its buffers (a stall, Ctrl-C): they are never freed.
_abandoned: list[Any] = []

Integers = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Collectives(Protocol):
    """What a group needs of the ranks together. Every method is collective."""

    def gather(self, mine: Integers) -> Integers:
        """The values of every rank: shape ``(size, *mine.shape)``."""
        ...

    def reduce(self, mine: Integers, op: str) -> Integers:
        """The ``"sum"``, ``"min"`` or ``"max"`` of each value over the ranks."""
        ...

    def broadcast(self, data: Bytes, root: int) -> None:
        """Fill `data` with that of `root`."""
        ...


class MpiCollectives:
    """Over an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Of the ranks, for this use alone.
    mpi : module
        ``mpi4py.MPI``.
    look : callable
        Called all the time while this rank waits; may raise, and then nobody can use the communicator again.
    done : callable, optional
        Called after each collective.
    generation : int
        How many such objects the processes have made before: names in the store are used once.
    """

    def __init__(self, comm: Any, mpi: Any, look: Callable[[], None], done: Callable[[], None] | None = None) -> None:
        self._comm, self._mpi, self._look, self._done = comm, mpi, look, done

    def gather(self, mine: Integers) -> Integers:
        """See `Collectives`."""
        everyone = np.empty((self._comm.size, *mine.shape), dtype=mine.dtype)
        self._finish(lambda: self._comm.Iallgather(mine, everyone), mine, everyone)
        return everyone

    def reduce(self, mine: Integers, op: str) -> Integers:
        """See `Collectives`."""
        found = np.empty_like(mine)
        self._finish(lambda: self._comm.Iallreduce(mine, found, getattr(self._mpi, op.upper())), mine, found)
        return found

    def broadcast(self, data: Bytes, root: int) -> None:
        """See `Collectives`."""
        self._finish(lambda: self._comm.Ibcast(data, root), data)

    def _finish(self, start: Callable[[], Any], *buffers: Any) -> None:
        self._look()  # or a group that is dead would be asked once more
        request = start()
        try:
            _finish(request, self._look)
        except BaseException:
            _abandoned.append((request, buffers))
            raise
        if self._done is not None:
            self._done()


def _finish(request: Any, look: Callable[[], None]) -> None:
    """Wait without spinning: a rank that is late may need this very core. `look` is called all the time."""
    idle = 0
    while not request.Test():
        look()
        idle += 1
        if (seconds := _BACKOFF.seconds(idle)) > 0:
            time.sleep(seconds)


def duplicate(comm: Any, timeout: float | None) -> Any:
    """A duplicate of a communicator, for this use alone. Collective; StallError if not all come within `timeout` seconds."""
    if timeout is None or comm.size == 1:
        return comm.Dup()
    started = time.monotonic()
    is_said = comm.rank > 0  # one says it; which others wait, nobody knows

    def look() -> None:
        nonlocal is_said
        waited = time.monotonic() - started
        if waited > timeout:  # without a communicator of their own the ranks cannot tell each other more
            raise StallError(text_before_first(timeout))
        if waited > _NOTICE_SECONDS and not is_said:
            is_said = True
            _log.warning("%s", notice_before_first(_NOTICE_SECONDS, timeout))

    made, request = comm.Idup()
    _finish(request, look)
    return made


def jax_processes() -> tuple[Any, int, int]:
    """The client of JAX's own coordination, this process and how many there are. JAX has no public name for the first."""
    from jax._src import distributed  # here: this module is read before JAX is started

    state = distributed.global_state
    return (None, 0, 1) if state.client is None else (state.client, int(state.process_id), int(state.num_processes))


class JaxCollectives:
    """Over the key-value store of ``jax.distributed``: a few milliseconds a call, and no MPI.

    Parameters
    ----------
    client : object
        JAX's client of the store.
    rank, size : int
        This process, and how many there are.
    look : callable, optional
        Called now and then while this process waits; may raise.
    done : callable, optional
        Called after each collective.
    """

    def __init__(
        self,
        client: Any,
        rank: int,
        size: int,
        look: Callable[[], None] = lambda: None,
        done: Callable[[], None] = lambda: None,
        generation: int = 0,
    ) -> None:
        self._place = f"shardload/{generation}"
        self._client, self._rank, self._size, self._look, self._done = client, rank, size, look, done
        self._n = 0
        self._old: list[str] = []

    def gather(self, mine: Integers) -> Integers:
        """See `Collectives`."""
        place = self._next()
        try:
            self._set(f"{place}/{self._rank:09d}", mine.tobytes())
            self._wait(lambda: self._client.wait_at_barrier(place, _LONGEST_WAIT_MS))
            found = dict(self._client.key_value_dir_get_bytes(f"{place}/"))
            self._forget()
        except StallError:
            raise
        except Exception as error:
            let_interruption_pass(error)
            raise _gone(error) from error
        self._done()
        values = [np.frombuffer(found[name], dtype=mine.dtype) for name in sorted(found)]
        return np.stack(values).reshape(self._size, *mine.shape)

    def reduce(self, mine: Integers, op: str) -> Integers:
        """See `Collectives`."""
        values: Integers = getattr(np, op)(self.gather(mine), axis=0, keepdims=False)
        return values.astype(mine.dtype)

    def broadcast(self, data: Bytes, root: int) -> None:
        """See `Collectives`."""
        key = f"{self._next()}/{root:09d}"
        try:
            if self._rank == root:
                self._set(key, data.tobytes())
            else:
                found = self._wait(lambda: self._client.blocking_key_value_get_bytes(key, _LONGEST_WAIT_MS))
                data[...] = np.frombuffer(found, dtype=np.uint8)
        except StallError:
            raise
        except Exception as error:
            let_interruption_pass(error)
            raise _gone(error) from error
        self._done()

    def _wait(self, call: Callable[[], Any]) -> Any:
        """What `call` returns or raises. JAX gives no sign of life while it waits, so that a thread does it."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, name="shardload-wait", daemon=True).start()
        while not future.done():
            wait([future], _LOOK_SECONDS)
            self._look()
        return future.result()

    def _next(self) -> str:
        self._n += 1  # all processes count alike
        return f"{self._place}/{self._n}"

    def _set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value)
        self._old.append(key)

    def _forget(self) -> None:
        """Delete what this process set before: whoever is past a barrier has read all that was set before it."""
        for key in self._old[:-1]:
            self._client.key_value_delete(key)
        del self._old[:-1]


def _gone(error: Exception) -> PeerError:
    return PeerError(f"the processes of JAX could not agree, since one of them is gone or far behind: {error}")
