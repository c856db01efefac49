"""How do processes without MPI agree, and send each other messages? Through the key-value store of JAX's coordinator.

A message is a value under a key that its sender sets and its receiver deletes. All of them pass through the coordinator, in
process 0. JAX has its clients compress them, so a rank sends 3 to 60 MB/s, as its values are. Ranks of one machine share memory
all the same, and send only notes this way.

JAX has no calls that return before the coordinator has answered, so a thread makes them: no rank waits here for a coordinator
that has been stopped without looking at its watchdog.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.collectives import Array, Bytes, Collectives, IntArray
from shardload.comm.shared_memory import Segment
from shardload.comm.transport import Receive, Transport
from shardload.errors import ConfigError, PeerError, StallError
from shardload.system.thread_pool import Pool, done_here
from shardload.units import format_nbytes

RATE = "3 to 60 MB/s a sender"  # values that no compressor can shorten, and zeros
MOST_NBYTES = 256 << 20  # that a call may send between machines: up to a minute, if one rank sends it all
_PIECE_NBYTES = 1 << 20  # of a message; the store takes larger values at a third of the speed
_WINDOW_NBYTES = 32 << 20  # that all ranks together keep in the memory of the coordinator
_LOOK_SECONDS = 0.05  # between two looks at the watchdog, while this rank waits for the coordinator
_ANSWER_SECONDS = 0.1  # how long a rank waits for an answer without a look; one takes 0.4 ms
_PAUSE_SECONDS = 1e-3  # between two questions for messages, if the first found none
_LONGEST_WAIT_MS = 7 * 24 * 3600 * 1000  # JAX needs a number; the watchdog ends a wait long before
_PIECE, _LAST, _NOTE, _ACK = "plna"  # kinds of messages: a piece of values, their last piece, ...


def jax_processes() -> tuple[Any, int, int]:
    """JAX's coordination client, the index of this process, and the number of processes. The client has no public name."""
    if "jax" not in sys.modules:  # a copy of a file needs no JAX: it is not imported to find out that it was not started
        return None, 0, 1
    from jax._src import distributed  # imported here because this module is imported before JAX is started

    state = distributed.global_state
    return (None, 0, 1) if state.client is None else (state.client, int(state.process_id), int(state.num_processes))


def check_sent(title: str, nbytes: int, fix: str = "") -> None:
    """Raise ConfigError if a call would send more bytes between machines than the coordinator can pass on in a short time."""
    if nbytes > MOST_NBYTES:
        raise ConfigError(
            f"{title} would send up to {format_nbytes(nbytes)} through JAX's coordinator, because these processes have no MPI: "
            f"at most {format_nbytes(MOST_NBYTES)} between nodes. Start the job under MPI{fix}"
        )


class StoreCollectives(Collectives):
    """Collectives over the store. Each takes a few milliseconds.

    Parameters
    ----------
    client : object
        JAX's client of the store.
    rank, size : int
        This process, and how many there are.
    prefix : str
        Beginning of the keys, which nobody else uses.
    look, on_done : callable
        As for `MpiCollectives`.
    """

    def __init__(
        self, client: Any, rank: int, size: int, prefix: str, look: Callable[[], None], on_done: Callable[[], None]
    ) -> None:
        self._client, self._rank, self._size, self._prefix = client, rank, size, prefix
        self._look, self._on_done = look, on_done
        self._pool = Pool(1, "shardload-store")  # makes one call after the other
        self._n_calls = 0
        self._old_keys: list[str] = []

    def gather(self, values: Array) -> Array:
        """See `Collectives`."""
        with self._next() as key_prefix:
            self._set(f"{key_prefix}/{self._rank:09d}", values.tobytes())
            self._wait(self._client.wait_at_barrier, key_prefix, _LONGEST_WAIT_MS)
            texts = dict(self._wait(self._client.key_value_dir_get_bytes, f"{key_prefix}/"))
            for key in self._old_keys[:-1]:  # every process that has passed a barrier has read all keys set before it
                self._wait(self._client.key_value_delete, key)
            del self._old_keys[:-1]
        rows = [np.frombuffer(texts[name], dtype=values.dtype) for name in sorted(texts)]
        return np.stack(rows).reshape(self._size, *values.shape)

    def broadcast(self, data: Bytes, root: int) -> None:
        """See `Collectives`."""
        with self._next() as key_prefix:
            key = f"{key_prefix}/{root:09d}"
            if self._rank == root:
                self._set(key, data.tobytes())
            else:
                value = self._wait(self._client.blocking_key_value_get_bytes, key, _LONGEST_WAIT_MS)
                data[...] = np.frombuffer(value, dtype=np.uint8)

    def _set(self, key: str, value: bytes) -> None:
        self._wait(self._client.key_value_set_bytes, key, value)
        self._old_keys.append(key)

    def _wait(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._look()  # raises if the group has stalled: then its thread may wait for ever
        future = _submit(self._pool, function, *arguments)
        while not wait([future], _LOOK_SECONDS).done:
            self._look()
        return future.result()

    @contextmanager
    def _next(self) -> Iterator[str]:
        """A place in the store for one collective, the same on all processes."""
        self._n_calls += 1
        with _naming_errors():
            yield f"{self._prefix}/{self._n_calls}"
        self._on_done()


def _submit(pool: Pool, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Make a call in the thread of a pool. If none can be started, in this one: the other ranks wait for what it sends."""
    try:
        return pool.submit(call, *arguments)
    except RuntimeError:
        return done_here(call, *arguments)


@contextmanager
def _naming_errors() -> Iterator[None]:
    """Raise an error of JAX's client as PeerError."""
    try:
        yield
    except StallError:
        raise
    except Exception as error:
        text = "the processes of JAX cannot reach each other, because one of them has ended or is far behind"
        raise PeerError(f"{text}: {error}") from error


def _take_all(client: Any, prefix: str) -> list[tuple[str, bytes]]:
    messages = sorted(client.key_value_dir_get_bytes(prefix))
    for key, _ in messages:
        client.key_value_delete(key)
    return messages


class StoreTransport(Transport):
    """A `Transport` over the store. Values leave in pieces, of which only a few are in the store at a time. They are copied
    before they leave, and before they are received, so that no buffer is in use after an interruption.

    Parameters
    ----------
    client : object
        JAX's client of the store.
    rank, size : int
        This process, and how many there are.
    prefix : str
        Beginning of the keys, which nobody else uses.
    segments : mapping of int to Segment
        As for `Transport`.
    """

    def __init__(self, client: Any, rank: int, size: int, prefix: str, segments: Mapping[int, Segment]) -> None:
        super().__init__(rank, segments)
        self._client, self._prefix, self._most_nbytes = client, prefix, max(_PIECE_NBYTES, _WINDOW_NBYTES // size)
        self._pool = Pool(1, "shardload-store")  # makes one call after the other
        self._n_set: Counter[int] = Counter()  # messages to each rank, which come in this order
        self._answer: Future[list[tuple[str, bytes]]] | None = None
        self._queue: deque[tuple[int, Array, Callable[[], None] | None]] = deque()  # pieces; the last one has a callback
        self._in_store: dict[int, deque[tuple[int, Callable[[], None] | None]]] = defaultdict(deque)  # by receiver
        self._in_store_nbytes = 0
        self._calls: list[Future[None]] = []
        self._pieces: dict[int, list[bytes]] = defaultdict(list)  # of values that have not come whole, by sender
        self._values: deque[tuple[int, bytes]] = deque()
        self._notes: deque[tuple[int, IntArray]] = deque()
        self._next_seconds = 0.0

    def __bool__(self) -> bool:
        """See `Transport`."""
        return bool(self._queue or any(self._in_store.values()) or self._calls)

    def send(self, rank: int, values: Array, on_done: Callable[[], None]) -> None:
        """See `Transport`."""
        data = values.reshape(-1).view(np.uint8)
        starts = range(0, max(1, data.nbytes), _PIECE_NBYTES)
        for start in starts:
            piece = data[start : start + _PIECE_NBYTES]
            self._queue.append((rank, piece, on_done if start == starts[-1] else None))
        self._fill_store()

    def receive(self) -> Iterator[tuple[int, int, Receive]]:
        """See `Transport`."""
        while self._values:
            rank, values = self._values.popleft()
            yield rank, len(values), partial(_copy, values)

    def test(self) -> bool:
        """See `Transport`. Takes what has come from the store, too."""
        with _naming_errors():
            done = [call for call in self._calls if call.done()]
            for call in done:
                call.result()
            self._calls = [call for call in self._calls if call not in done]
            messages = self._take() if time.monotonic() >= self._next_seconds else []
        if not messages:
            self._next_seconds = time.monotonic() + _PAUSE_SECONDS
        callbacks: list[Callable[[], None]] = []
        n_taken: Counter[int] = Counter()
        for rank, kind, message in messages:
            if kind == _NOTE:
                self._notes.append((rank, np.frombuffer(message, dtype=np.int64)))
            elif kind == _ACK:  # of so many pieces
                pieces = [self._in_store[rank].popleft() for _ in range(int(message))]
                self._in_store_nbytes -= sum(nbytes for nbytes, _ in pieces)
                callbacks += [on_done for _, on_done in pieces if on_done is not None]
            else:
                n_taken[rank] += 1
                self._pieces[rank].append(message)
                if kind == _LAST:
                    self._values.append((rank, b"".join(self._pieces.pop(rank))))
        for rank, n in n_taken.items():
            self._set(rank, _ACK, str(n).encode())
        self._fill_store()
        for callback in callbacks:
            callback()
        return bool(done or callbacks)

    def _set(self, rank: int, kind: str, message: bytes) -> Future[None]:
        """Have a message for a rank set in the store, soon."""
        key = f"{self._prefix}/{rank}/{self.rank}/{self._n_set[rank]:09d}{kind}"
        self._n_set[rank] += 1
        self._calls.append(_submit(self._pool, self._client.key_value_set_bytes, key, message))
        return self._calls[-1]

    def _take(self) -> list[tuple[int, str, bytes]]:
        """The messages that have come: the sender, the kind, the message."""
        if self._answer is None:
            self._answer = _submit(self._pool, _take_all, self._client, f"{self._prefix}/{self.rank}/")
        if not wait([self._answer], _ANSWER_SECONDS).done:
            return []
        answer, self._answer = self._answer, None
        paths = [(key.split("/"), message) for key, message in answer.result()]
        return [(int(sender), number[-1], message) for (*_, sender, number), message in paths]

    def _fill_store(self) -> None:
        while self._queue and self._in_store_nbytes + self._queue[0][1].nbytes <= self._most_nbytes:
            rank, piece, on_done = self._queue.popleft()
            self._set(rank, _PIECE if on_done is None else _LAST, piece.tobytes())
            self._in_store[rank].append((piece.nbytes, on_done))
            self._in_store_nbytes += piece.nbytes

    def send_note(self, rank: int, note: IntArray) -> None:
        """See `Transport`."""
        self._set(rank, _NOTE, note.tobytes()).add_done_callback(lambda _: self._wake(rank))

    def receive_notes(self) -> Iterator[tuple[int, IntArray]]:
        """See `Transport`."""
        while self._notes:
            yield self._notes.popleft()


def _copy(values: bytes, into: Array, on_done: Callable[[], None]) -> None:
    into[...] = np.frombuffer(values, dtype=np.uint8).view(into.dtype).reshape(into.shape)
    on_done()
