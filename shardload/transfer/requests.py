"""What is under way in MPI? Every request of one exchange, and the short control messages between ranks of a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shardload.comm.group import Group
from shardload.comm.shared_memory import Bell

__all__ = ["ACK", "LOOK", "Requests"]

LOOK, ACK = 0, 1  # "look there for these parts", "I have them"

Integers = np.ndarray[Any, np.dtype[np.int64]]


class Requests:
    """Requests, with what to do when each is done; the buffers that MPI reads or writes live as long.

    Attributes
    ----------
    data_tag, receipt_tag, control_tag : int
        Of this exchange alone.
    seed : int
        What its receipts and checksums begin with.
    n_data : int
        Messages with values that are under way.
    """

    def __init__(self, group: Group, tags: tuple[int, int, int], seed: int = 0) -> None:
        self.group, self.seed = group, seed
        self.data_tag, self.receipt_tag, self.control_tag = tags
        self._requests: list[Any] = []
        self._on_done: list[Callable[[], None]] = []
        self._keep: list[Any] = []
        self._status: Any = None if group.comm is None else group.mpi.Status()
        self.n_data = 0

    def __bool__(self) -> bool:
        """Whether anything is under way."""
        return bool(self._requests)

    def add(self, request: Any, on_done: Callable[[], None], buffer: Any) -> None:
        """Watch a request; `buffer` is kept until it is done."""
        self._requests.append(request)
        self._on_done.append(on_done)
        self._keep.append(buffer)

    def add_data(self, request: Any, on_done: Callable[[], None], buffer: Any) -> None:
        """The same for a message with values."""

        def done() -> None:
            self.n_data -= 1
            on_done()

        self.n_data += 1
        self.add(request, done, buffer)

    def test(self) -> bool:
        """Deal with what is done; whether anything was."""
        if not self._requests:
            return False
        done = self.group.mpi.Request.Testsome(self._requests)
        if not done:
            return False
        callbacks = [self._on_done[i] for i in done]
        gone = set(done)
        for name in ("_requests", "_on_done", "_keep"):
            setattr(self, name, [v for i, v in enumerate(getattr(self, name)) if i not in gone])
        for callback in callbacks:
            callback()
        return True

    def tell(self, rank: int, message: Integers, bell: Bell | None) -> None:
        """Send a control message, and ring."""
        request = self.group.comm.Isend(message, dest=rank, tag=self.control_tag)
        self.add(request, _nothing, message)
        if bell is not None:
            bell.ring()

    def told(self) -> Iterator[tuple[int, Integers]]:
        """The control messages that have come, and who sent each."""
        mpi, status = self.group.mpi, self._status
        while (message := self.group.comm.Improbe(mpi.ANY_SOURCE, self.control_tag, status)) is not None:
            found = np.empty(status.Get_count(mpi.INT64_T), dtype=np.int64)
            message.Recv(found)
            yield status.Get_source(), found

    def remains(self) -> tuple[Any, ...]:
        """What MPI may still use after an interruption."""
        return (self._requests, self._keep)


def _nothing() -> None:
    return None
