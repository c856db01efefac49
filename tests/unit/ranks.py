"""Ranks of a group as threads of this process: with a stand-in for MPI, or for the key-value store of JAX."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from shardload.comm.group import Group


class Done:
    """A request of what has been done at once; not seen to be when it is first tested."""

    def __init__(self, _: None) -> None:
        self._tests = iter([False, False])

    def Test(self) -> bool:
        return next(self._tests, True)


class ThreadComm:
    """The collectives that a group uses, between threads."""

    def Improbe(self, *_: Any) -> None:
        """No message has come: nobody sends any."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._slots = rank, size, barrier, slots

    def _gather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait(20)
        found = list(self._slots)
        self._barrier.wait(20)
        return found

    def Allgather(self, mine: Any, everyone: Any) -> None:
        everyone[:] = np.concatenate(self._gather(mine.copy())).reshape(everyone.shape)

    def Allreduce(self, mine: Any, total: Any, op: str = "sum") -> None:
        found = np.stack(self._gather((total if isinstance(mine, str) else mine).copy()))
        total[:] = {"min": found.min, "max": found.max, "sum": found.sum}[op](axis=0)

    def Free(self) -> None:
        self._barrier, self._slots = threading.Barrier(1), []

    def Iallgather(self, *arguments: Any) -> Done:
        return Done(self.Allgather(*arguments))

    def Iallreduce(self, *arguments: Any) -> Done:
        return Done(self.Allreduce(*arguments))

    def Ibcast(self, *arguments: Any) -> Done:
        return Done(self.Bcast(*arguments))

    def Bcast(self, data: Any, root: int) -> None:
        assert data.flags.writeable
        found = self._gather(data.copy())
        assert all(f.shape == found[root].shape and f.dtype == found[root].dtype for f in found)
        data[:] = found[root]


class ThreadGroup(Group):
    mpi = SimpleNamespace(IN_PLACE="in place", SUM="sum", MIN="min", MAX="max", Status=object, ANY_SOURCE=-1)  # type: ignore[assignment]


class Store:
    """JAX's key-value store, for threads. What was deleted is gone; what was set twice is an error, as there."""

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self.values: dict[str, bytes] = {}
        self._names: dict[str, threading.Barrier] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, 20), key
            return self.values[key]

    def wait_at_barrier(self, name: str, timeout_ms: int) -> None:
        with self._changed:
            barrier = self._names.setdefault(name, threading.Barrier(self._size))
        barrier.wait(20)

    def key_value_dir_get_bytes(self, place: str) -> list[tuple[str, bytes]]:
        with self._changed:
            return [(key, value) for key, value in reversed(self.values.items()) if key.startswith(place)]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            del self.values[key]


way = "mpi"  # how the ranks of `on_ranks` agree: by MPI's calls (`ThreadComm`), or through JAX's store (`Store`)


def in_threads(n: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns, or raises, in each of `n` threads, which it gets the number of."""

    def run(number: int) -> Any:
        try:
            return work(number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(n) as threads:
        return [*threads.map(run, range(n))]


def on_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work` returns, or raises, on each of `size` ranks. A rank that waits for nobody fails after 20 s."""
    barrier, slots, store = threading.Barrier(size), [None] * size, Store(size)

    def on_rank(rank: int) -> Any:
        comm = ThreadComm(rank, size, barrier, slots)
        return work(ThreadGroup(comm) if way == "mpi" else ThreadGroup(None, (store, rank, size)))

    found = in_threads(size, on_rank)
    assert not any(isinstance(f, threading.BrokenBarrierError) for f in found), "ranks went different ways"
    return found
