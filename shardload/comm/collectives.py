"""How do ranks gather, reduce and broadcast small buffers?

There are two implementations of the same collectives: over MPI and, for a job without MPI, over the service that coordinates
the processes of JAX. A rank that waits sleeps; it does not spin.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.backoff import Backoff
from shardload.comm.stall_report import NOTICE_SECONDS, notice_of, text_of
from shardload.errors import PeerError, StallError
from shardload.system.interruption import let_interruption_pass

_log = logging.getLogger("shardload")
_FIRST, _SOME = "the first one", "not all ranks of this communicator have made their first call"
_BACKOFF = Backoff(n_awake=4, first_seconds=2e-5, longest_seconds=2e-3, n_before_doubling=4)
_ROW_TAG = (1 << 15) - 2  # no exchange has it: see `Group.next_tags`
_MOST_NBYTES = 1 << 30  # of a message
_LONGEST_STEP_SECONDS = 1.0  # between two looks at the clock; if it was more, this process was stopped, and nobody is late
_LOOK_SECONDS = 0.5  # between two looks, while JAX waits
_LONGEST_WAIT_MS = 7 * 24 * 3600 * 1000  # JAX needs a number; a process that has died is noticed long before

# Requests that were abandoned (a stall, Ctrl-C): MPI may still write into their buffers, so they are never freed.
_abandoned: list[Any] = []

Integers = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Collectives:
    """The collectives that a group needs, and messages of single ranks. Those of this class are of a process alone."""

    def gather(self, mine: Integers) -> Integers:
        """Return the values of every rank, of shape ``(size, *mine.shape)``. Collective."""
        return mine[None]

    def reduce(self, mine: Integers, op: str) -> Integers:
        """Return the ``"sum"``, ``"min"`` or ``"max"`` of each value over the ranks. Collective."""
        values: Integers = getattr(np, op)(self.gather(mine), axis=0)
        return values.astype(mine.dtype)

    def broadcast(self, data: Bytes, root: int) -> None:
        """Fill `data` with the `data` of `root`. Collective."""

    def exchange_rows(self, rows: Mapping[int, Integers], sources: Sequence[int]) -> dict[int, Integers]:
        """Send integers to ranks, and return those that `sources` send. Every rank calls it, also with nothing to send."""
        raise PeerError("processes without MPI cannot send each other values: start the job under MPI")


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
    done : callable, optional
        Called after each collective.
    """

    def __init__(self, comm: Any, mpi: Any, look: Callable[[], None], done: Callable[[], None] = lambda: None) -> None:
        self._comm, self._mpi, self._look, self._done = comm, mpi, look, done

    def gather(self, mine: Integers) -> Integers:
        """See `Collectives`."""
        everyone = np.empty((self._comm.size, *mine.shape), dtype=mine.dtype)
        self._finish(lambda: self._comm.Iallgather(mine, everyone), mine, everyone)
        self._done()
        return everyone

    def reduce(self, mine: Integers, op: str) -> Integers:
        """See `Collectives`."""
        result = np.empty_like(mine)
        self._finish(lambda: self._comm.Iallreduce(mine, result, getattr(self._mpi, op.upper())), mine, result)
        self._done()
        return result

    def broadcast(self, data: Bytes, root: int) -> None:
        """See `Collectives`."""
        self._finish(lambda: self._comm.Ibcast(data, root), data)
        self._done()

    def exchange_rows(self, rows: Mapping[int, Integers], sources: Sequence[int]) -> dict[int, Integers]:
        """See `Collectives`."""
        self._look()
        sent = [self._comm.Isend(row, to, _ROW_TAG) for to, row in rows.items()]
        received: dict[int, Integers] = {}
        try:
            for source in sources:
                status = self._mpi.Status()
                _wait_for(partial(self._comm.Iprobe, source, _ROW_TAG, status), self._look)
                received[source] = row = np.empty(status.Get_count(self._mpi.INT64_T), dtype=np.int64)
                self._finish(partial(self._comm.Irecv, row, source, _ROW_TAG), row)
            for request in sent:
                _wait_for(request.Test, self._look)
        except BaseException:
            _abandoned.append((sent, rows))
            raise
        self._done()
        return received

    def _finish(self, start: Callable[[], Any], *buffers: Any) -> None:
        self._look()  # raises if the group has stalled, before another message is started
        request = start()
        try:
            _wait_for(request.Test, self._look)
        except BaseException:
            _abandoned.append((request, buffers))
            raise


def _wait_for(is_done: Callable[[], bool], look: Callable[[], None]) -> None:
    """Wait without spinning: a late rank may need this core. `look` is called repeatedly."""
    n_idle = 0
    while not is_done():
        look()
        n_idle += 1
        if (seconds := _BACKOFF.seconds(n_idle)) > 0:
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
            raise StallError(text_of(_FIRST, timeout, _SOME))
        if waited > NOTICE_SECONDS and not is_said:
            is_said = True
            _log.warning("%s", notice_of(_FIRST, NOTICE_SECONDS, _SOME, timeout))

    made, request = comm.Idup()
    _wait_for(request.Test, look)
    return made


def jax_processes() -> tuple[Any, int, int]:
    """JAX's coordination client, the index of this process, and the number of processes. The client has no public name."""
    if "jax" not in sys.modules:  # a copy of a file needs no JAX: it is not imported to find out that it was not started
        return None, 0, 1
    from jax._src import distributed  # imported here because this module is imported before JAX is started

    state = distributed.global_state
    return (None, 0, 1) if state.client is None else (state.client, int(state.process_id), int(state.num_processes))


class JaxCollectives(Collectives):
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
        with self._next() as place:
            self._set(f"{place}/{self._rank:09d}", mine.tobytes())
            self._wait(lambda: self._client.wait_at_barrier(place, _LONGEST_WAIT_MS))
            texts = dict(self._client.key_value_dir_get_bytes(f"{place}/"))
            for key in self._old[:-1]:  # every process that has passed a barrier has read all keys set before it
                self._client.key_value_delete(key)
            del self._old[:-1]
        values = [np.frombuffer(texts[name], dtype=mine.dtype) for name in sorted(texts)]
        return np.stack(values).reshape(self._size, *mine.shape)

    def broadcast(self, data: Bytes, root: int) -> None:
        """See `Collectives`."""
        with self._next() as place:
            key = f"{place}/{root:09d}"
            if self._rank == root:
                self._set(key, data.tobytes())
            else:
                value = self._wait(lambda: self._client.blocking_key_value_get_bytes(key, _LONGEST_WAIT_MS))
                data[...] = np.frombuffer(value, dtype=np.uint8)

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

    @contextmanager
    def _next(self) -> Iterator[str]:
        """A name in the store for one collective, the same on all processes."""
        self._n += 1
        try:
            yield f"{self._place}/{self._n}"
        except StallError:
            raise
        except Exception as error:
            let_interruption_pass(error)
            text = "the processes of JAX could not agree, because one of them has ended or is far behind"
            raise PeerError(f"{text}: {error}") from error
        self._done()

    def _set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value)
        self._old.append(key)
