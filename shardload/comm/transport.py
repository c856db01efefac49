"""Which messages does one exchange send and receive, and which of them are still pending?

There are two kinds, each with its own tag: values, and notes, which are arrays of integers. Nothing here waits, and nothing
here knows what they mean. Ranks of one machine can also read each other's memory (`Segment`); a note says where.

No receive is posted before its message has come: so a rank that waits for thousands of others has nothing pending for them, and
nothing has to be cancelled if one of them fails. An exchange calls MPI through `MpiTransport` alone. Without MPI there is the
`StoreTransport` of `store`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.collectives import Array, IntArray
from shardload.comm.shared_memory import Segment

# Receives one message that has come into a view with any strides of its size, and calls a function when that is done.
Receive = Callable[[Array, Callable[[], None]], None]


class Transport(ABC):
    """The pending messages of one exchange: each with its buffer, which is kept alive, and a callback for when it is done.

    Parameters
    ----------
    rank : int
        This rank.
    segments : mapping of int to Segment
        The shared memory of each rank of this machine, including this rank; empty if none is shared.
    """

    def __init__(self, rank: int, segments: Mapping[int, Segment]) -> None:
        self.rank, self._segments = rank, segments
        segment = segments.get(rank)
        self._address = 0 if segment is None else segment.data.ctypes.data

    @abstractmethod
    def __bool__(self) -> bool:
        """True if any message is pending."""

    # --- values

    @abstractmethod
    def send(self, rank: int, values: Array, on_done: Callable[[], None]) -> None:
        """Send values without gaps. They must not change until they have left; then `on_done` is called."""

    @abstractmethod
    def receive(self) -> Iterator[tuple[int, int, Receive]]:
        """Iterate over the messages with values that have come: the sender, the bytes, and a function that receives it.

        That function must be called for each of them. Messages of one rank come in the order in which it sent them.
        """

    @abstractmethod
    def test(self) -> bool:
        """Call what waits for the messages that are done. Return True if there were any. Call it before the others."""

    # --- notes and shared memory

    @abstractmethod
    def send_note(self, rank: int, note: IntArray) -> None:
        """Send a note, and wake the rank if it is on this machine."""

    @abstractmethod
    def receive_notes(self) -> Iterator[tuple[int, IntArray]]:
        """Iterate over the notes that have come, each with its sender."""

    def in_use(self) -> tuple[Any, ...]:
        """The buffers, and what else must be kept, that may still be used after an interruption. By default nothing."""
        return ()

    def shares_memory(self, rank: int) -> bool:
        """True if this rank and `rank` can read each other's memory."""
        return rank in self._segments

    def offset_of(self, view: Array) -> int:
        """The offset of values in this rank's shared memory, in bytes."""
        return int(view.ctypes.data) - self._address

    def view_at(self, rank: int, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, strides: list[int]) -> Array:
        """A view of values in another rank's memory. ValueError or TypeError if it is not inside that memory."""
        return np.ndarray(shape, dtype, self._segments[rank].data, offset, strides)

    def _wake(self, rank: int) -> None:
        segment = self._segments.get(rank)
        if segment is not None:
            segment.bell.ring()


class MpiTransport(Transport):
    """A transport over MPI.

    Parameters
    ----------
    rank : int
        This rank.
    comm : mpi4py.MPI.Comm or None
        The ranks that take part; None for a process alone.
    mpi : module
        ``mpi4py.MPI``.
    tags : tuple of int
        Tags of this exchange for values and for notes (`Group.next_tags`).
    segments : mapping of int to Segment
        As for `Transport`.
    """

    def __init__(self, rank: int, comm: Any, mpi: Any, tags: tuple[int, int], segments: Mapping[int, Segment]) -> None:
        super().__init__(rank, segments)
        self._comm, self._mpi = comm, mpi
        self._data_tag, self._note_tag = tags
        self._requests: list[Any] = []
        self._pending: list[tuple[Callable[[], None], Any]] = []  # of each request: what to call when it is done, its buffer
        self._status: Any = None if comm is None else mpi.Status()

    def __bool__(self) -> bool:
        """See `Transport`."""
        return bool(self._requests)

    def send(self, rank: int, values: Array, on_done: Callable[[], None]) -> None:
        """See `Transport`."""
        message, _ = mpi_message(self._mpi, values)
        self._add(self._comm.Isend(message, dest=rank, tag=self._data_tag), on_done, values)

    def receive(self) -> Iterator[tuple[int, int, Receive]]:
        """See `Transport`."""
        # One thread receives with this tag, so the message that was seen is the one that the receive takes. (MPI's matched
        # receives would do for several threads, but those of MPICH 5.0 crash between nodes, with datatypes that have gaps.)
        mpi, status = self._mpi, self._status
        while self._comm.Iprobe(mpi.ANY_SOURCE, self._data_tag, status):
            source = status.Get_source()
            yield source, status.Get_count(mpi.BYTE), partial(self._receive, source)

    def _receive(self, source: int, into: Array, on_done: Callable[[], None]) -> None:
        message, datatype = mpi_message(self._mpi, into)
        request = self._comm.Irecv(message, source, self._data_tag)
        if datatype is not None:
            datatype.Free()
        self._add(request, on_done, into)

    def test(self) -> bool:
        """See `Transport`."""
        if not self._requests:
            return False
        done = self._mpi.Request.Testsome(self._requests)
        if not done:
            return False
        callbacks = [self._pending[k][0] for k in done]
        for k in sorted(done, reverse=True):  # the last one takes the place of each that is done
            for entries in (self._requests, self._pending):
                entries[k] = entries[-1]
                entries.pop()
        for callback in callbacks:
            callback()
        return True

    def _add(self, request: Any, on_done: Callable[[], None], buffer: Any) -> None:
        self._requests.append(request)
        self._pending.append((on_done, buffer))

    def send_note(self, rank: int, note: IntArray) -> None:
        """See `Transport`."""
        request = self._comm.Isend(note, dest=rank, tag=self._note_tag)
        if not request.Test():  # a short message has nearly always left
            self._add(request, lambda: None, note)
        self._wake(rank)

    def receive_notes(self) -> Iterator[tuple[int, IntArray]]:
        """See `Transport`."""
        mpi, status = self._mpi, self._status
        while (message := self._comm.Improbe(mpi.ANY_SOURCE, self._note_tag, status)) is not None:
            rank, note = status.Get_source(), np.empty(status.Get_count(mpi.INT64_T), dtype=np.int64)
            message.Recv(note)
            yield rank, note

    def in_use(self) -> tuple[Any, ...]:
        """See `Transport`: the requests and buffers that MPI may still use."""
        return self._requests, [buffer for _, buffer in self._pending]


def mpi_message(mpi: Any, view: Array) -> tuple[list[Any], Any]:
    """An mpi4py message for `view`, and its datatype, which must be freed after posting (None: plain bytes).

    The datatype is made from the strides of the view, so any region of any buffer can be sent or received without packing.
    """
    if view.flags.c_contiguous:
        return [mpi.buffer.fromaddress(view.ctypes.data, view.nbytes), view.nbytes, mpi.BYTE], None
    run, axis = view.itemsize, view.ndim
    while axis and (view.strides[axis - 1] == run or view.shape[axis - 1] == 1):
        axis -= 1
        run *= view.shape[axis]
    datatype = mpi.BYTE.Create_contiguous(run)
    for n, stride in zip(reversed(view.shape[:axis]), reversed(view.strides[:axis]), strict=True):
        inner, datatype = datatype, datatype.Create_hvector(n, 1, stride)
        inner.Free()
    datatype.Commit()
    span = view.itemsize + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    return [mpi.buffer.fromaddress(view.ctypes.data, span), 1, datatype], datatype
