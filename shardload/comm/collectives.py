"""How do ranks gather, reduce and broadcast small buffers?

There are two implementations of the same collectives: over MPI and, for a job without MPI, over the service that coordinates
the processes of JAX. A rank that waits sleeps; it does not spin.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol

import numpy as np

from shardload.comm.backoff import Backoff
from shardload.comm.stall_report import NOTICE_SECONDS, notice_before_first, text_before_first
from shardload.errors import PeerError, StallError
from shardload.system.interruption import let_interruption_pass

__all__ = ["Collectives", "JaxCollectives", "MpiCollectives", "duplicate", "jax_processes"]

_log = logging.getLogger("shardload")
_BACKOFF = Backoff(n_awake=4, first_seconds=2e-5, longest_seconds=2e-3, n_before_doubling=4)
_PASS_ON_TAG = (1 << 15) - 2  # no exchange has it: see `Group.next_tags`
_MOST_NBYTES = 1 << 30  # of a message
_LONGEST_STEP_SECONDS = 1.0  # between two looks at the clock; if it was more, this process was stopped, and nobody is late
_LOOK_SECONDS = 0.5  # between two looks, while JAX waits
_LONGEST_WAIT_MS = 7 * 24 * 3600 * 1000  # JAX needs a number; a process that has died is noticed long before

# Requests that were abandoned (a stall, Ctrl-C): MPI may still write into their buffers, so they are never freed.
_abandoned: list[Any] = []

Integers = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Collectives(Protocol):
    """The collectives that a group needs. Every method is collective."""

    def gather(self, mine: Integers) -> Integers:
        """Return the values of every rank, of shape ``(size, *mine.shape)``."""
        ...

    def reduce(self, mine: Integers, op: str) -> Integers:
        """Return the ``"sum"``, ``"min"`` or ``"max"`` of each value over the ranks."""
        ...

    def broadcast(self, data: Bytes, root: int) -> None:
        """Fill `data` with the `data` of `root`."""
        ...

    def gather_rows(self, mine: Integers, root: int) -> list[Integers] | None:
        """On `root`: the integers of every rank, of which each may have another number. None on the others."""
        ...

    def scatter_rows(self, rows: list[Integers] | None, root: int) -> Integers:
        """The opposite: return what `root` has for this rank."""
        ...

    def pass_on(self, mine: Integers, to: int, source: int) -> Integers:
        """Send integers to a rank, and return those that `source` sends. Every rank sends once and receives once."""
        ...

    def send(self, data: Bytes, to: int) -> None:
        """Send bytes to a rank, which calls `receive`. Not collective."""
        ...

    def receive(self, into: Bytes, source: int) -> None:
        """Receive as many bytes from a rank."""
        ...


class MpiCollectives:
    """Collectives over an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Communicator of the ranks, used for nothing else.
    mpi : module
        ``mpi4py.MPI``.
    look : callable
        Called repeatedly while this rank waits. It may raise; then the communicator must not be used again.
    done : callable, optional
        Called after each collective.
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

    def gather_rows(self, mine: Integers, root: int) -> list[Integers] | None:
        """See `Collectives`."""
        kind, is_root = self._mpi.INT64_T, self._comm.rank == root
        sizes = self.gather(np.array([len(mine)], dtype=np.int64))[:, 0]
        everyone = np.empty(int(sizes.sum()) if is_root else 0, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        into = [everyone, sizes.tolist(), starts.tolist(), kind] if is_root else None
        self._finish(lambda: self._comm.Igatherv([mine, len(mine), kind], into, root), mine, everyone)
        return np.split(everyone, starts[1:]) if is_root else None

    def scatter_rows(self, rows: list[Integers] | None, root: int) -> Integers:
        """See `Collectives`."""
        kind, given, size = self._mpi.INT64_T, None, np.empty(1, dtype=np.int64)
        sizes = np.array([len(row) for row in rows or []], dtype=np.int64)
        everyone = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        self._finish(lambda: self._comm.Iscatter(sizes if rows else None, size, root), sizes, size)
        mine = np.empty(int(size[0]), dtype=np.int64)
        if rows:
            given = [everyone, sizes.tolist(), (np.cumsum(sizes) - sizes).tolist(), kind]
        self._finish(lambda: self._comm.Iscatterv(given, [mine, len(mine), kind], root), everyone, mine)
        return mine

    def pass_on(self, mine: Integers, to: int, source: int) -> Integers:
        """See `Collectives`."""
        self._look()
        told, size = np.array([len(mine)], dtype=np.int64), np.empty(1, dtype=np.int64)
        # Both at once: who receives them knows the order.
        sent = [self._comm.Isend(one, to, _PASS_ON_TAG) for one in (told, mine)]
        self._finish(lambda: self._comm.Irecv(size, source, _PASS_ON_TAG), size, told, mine, sent)
        found = np.empty(int(size[0]), dtype=np.int64)
        self._finish(lambda: self._comm.Irecv(found, source, _PASS_ON_TAG), found, told, mine, sent)
        for request in sent:
            self._finish(lambda request=request: request, told, mine, sent)  # type: ignore[misc]
        return found

    def send(self, data: Bytes, to: int) -> None:
        """See `Collectives`."""
        for at in range(0, len(data), _MOST_NBYTES):
            some = data[at : at + _MOST_NBYTES]
            self._finish(lambda some=some: self._comm.Isend(some, to, _PASS_ON_TAG), some)  # type: ignore[misc]

    def receive(self, into: Bytes, source: int) -> None:
        """See `Collectives`."""
        for at in range(0, len(into), _MOST_NBYTES):
            some = into[at : at + _MOST_NBYTES]
            self._finish(lambda some=some: self._comm.Irecv(some, source, _PASS_ON_TAG), some)  # type: ignore[misc]

    def _finish(self, start: Callable[[], Any], *buffers: Any) -> None:
        self._look()  # raises if the group has stalled, before another collective is started
        request = start()
        try:
            _finish(request, self._look)
        except BaseException:
            _abandoned.append((request, buffers))
            raise
        if self._done is not None:
            self._done()


def _finish(request: Any, look: Callable[[], None]) -> None:
    """Wait without spinning: a late rank may need this core. `look` is called repeatedly."""
    idle = 0
    while not request.Test():
        look()
        idle += 1
        if (seconds := _BACKOFF.seconds(idle)) > 0:
            time.sleep(seconds)


def duplicate(comm: Any, timeout: float | None) -> Any:
    """A private duplicate of a communicator. Collective; StallError if some rank does not call within `timeout` seconds."""
    if timeout is None or comm.size == 1:
        return comm.Dup()
    waited, seen = 0.0, time.monotonic()
    is_said = comm.rank > 0  # only rank 0 warns; it cannot know which ranks wait

    def look() -> None:
        nonlocal waited, seen, is_said
        now = time.monotonic()
        waited, seen = waited + min(now - seen, _LONGEST_STEP_SECONDS), now
        if waited > timeout:  # without the duplicate, ranks cannot tell each other who is late
            raise StallError(text_before_first(timeout))
        if waited > NOTICE_SECONDS and not is_said:
            is_said = True
            _log.warning("%s", notice_before_first(timeout))

    made, request = comm.Idup()
    _finish(request, look)
    return made


def jax_processes() -> tuple[Any, int, int]:
    """JAX's coordination client, the index of this process, and the number of processes. The client has no public name."""
    if "jax" not in sys.modules:  # a copy of a file needs no JAX: it is not imported to find out that it was not started
        return None, 0, 1
    from jax._src import distributed  # imported here because this module is imported before JAX is started

    state = distributed.global_state
    return (None, 0, 1) if state.client is None else (state.client, int(state.process_id), int(state.num_processes))


class JaxCollectives:
    """Collectives over the key-value store of ``jax.distributed``, without MPI. A call takes a few milliseconds.

    Parameters
    ----------
    client : object
        JAX's client of the store.
    rank, size : int
        This process, and the number of processes.
    look : callable, optional
        Called from time to time while this process waits; may raise.
    done : callable, optional
        Called after each collective.
    generation : int
        How many such objects the processes have made before: each name in the store is used only once.
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

    def gather_rows(self, mine: Integers, root: int) -> list[Integers] | None:
        """See `Collectives`. Every process gets all of them: there is no other way."""
        found = self._gather_rows(mine)
        return found if self._rank == root else None

    def scatter_rows(self, rows: list[Integers] | None, root: int) -> Integers:
        """See `Collectives`."""
        sizes = [len(row) for row in rows or []]
        found = self._gather_rows(np.array([*sizes, *np.concatenate(rows)] if rows else [], dtype=np.int64))[root]
        starts = np.cumsum([self._size, *found[: self._size]])
        return found[starts[self._rank] : starts[self._rank + 1]]

    def pass_on(self, mine: Integers, to: int, source: int) -> Integers:
        """See `Collectives`."""
        return self._gather_rows(mine)[source]

    def send(self, data: Bytes, to: int) -> None:
        """Without MPI there is no way."""
        raise PeerError("processes without MPI cannot send each other values: start the job under MPI")

    def receive(self, into: Bytes, source: int) -> None:
        """Without MPI there is no way."""
        self.send(into, source)

    def _gather_rows(self, mine: Integers) -> list[Integers]:
        sizes = self.gather(np.array([len(mine)], dtype=np.int64))[:, 0]
        padded = np.zeros(int(sizes.max()), dtype=np.int64)
        padded[: len(mine)] = mine
        return [row[:size] for row, size in zip(self.gather(padded), sizes.tolist(), strict=True)]

    def _wait(self, call: Callable[[], Any]) -> Any:
        """Return or raise the result of `call`, which runs in a thread: JAX has no way to call `look` while it waits."""
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
        self._n += 1  # the same on all processes
        return f"{self._place}/{self._n}"

    def _set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value)
        self._old.append(key)

    def _forget(self) -> None:
        """Delete older keys of this process: every process that has passed a barrier has read all keys set before it."""
        for key in self._old[:-1]:
            self._client.key_value_delete(key)
        del self._old[:-1]


def _gone(error: Exception) -> PeerError:
    return PeerError(f"the processes of JAX could not agree, because one of them has ended or is far behind: {error}")
