"""Which messages does one exchange send and receive, and which of them are still pending?

There are three kinds of messages, each with its own tag: values, receipts and control messages. All are NumPy arrays. Nothing
here waits, and nothing here knows what the values mean. Ranks of one machine can also read each other's memory (`Segment`); a
control message says where.

This is the only module through which an exchange calls MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.group import Group
from shardload.comm.shared_memory import Segment

__all__ = ["Integers", "Transport", "message_of"]

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Transport:
    """The pending messages of one exchange: each with its buffer, which is kept alive, and a callback for when it is done.

    Parameters
    ----------
    group : Group
        The ranks that take part.
    tags : tuple of int
        Tags of this exchange for values, receipts and control messages (`Group.next_tags`).
    segments : mapping of int to Segment
        The shared memory of each rank of this machine, including this rank; empty if none is shared.

    Attributes
    ----------
    rank : int
        This rank.
    n_data : int
        Number of pending messages with values.
    n_leaving : int
        Number of control messages and receipts of this rank that MPI has not taken yet.
    """

    def __init__(self, group: Group, tags: tuple[int, int, int], segments: Mapping[int, Segment]) -> None:
        self.rank = group.rank
        self._comm, self._mpi, self._segments = group.comm, group.mpi, segments
        self._data_tag, self._receipt_tag, self._control_tag = tags
        self._requests: list[Any] = []
        self._on_done: list[Callable[[], None]] = []
        self._keep: list[Any] = []
        self._status: Any = None if group.comm is None else group.mpi.Status()
        own = segments.get(self.rank)
        self._base = 0 if own is None else own.data.ctypes.data
        self.n_data = self.n_leaving = 0

    def __bool__(self) -> bool:
        """True if any message is pending."""
        return bool(self._requests)

    def shares_memory(self, rank: int) -> bool:
        """True if this rank and `rank` can read each other's memory."""
        return rank in self._segments

    # --- values and receipts

    def send(self, rank: int, values: Array, on_done: Callable[[], None]) -> None:
        """Send values without gaps. They must not change until they have left; then `on_done` is called."""
        message, _ = message_of(self._mpi, values)
        self._add_data(self._comm.Isend(message, dest=rank, tag=self._data_tag), on_done, values)

    def receive(self, rank: int, into: Array, on_done: Callable[[], None]) -> Callable[[], None]:
        """Receive the next values of a rank into a view with any strides. Return a function that cancels it.

        `on_done` is called when the values have arrived, and also when the receive was cancelled.
        """
        message, datatype = message_of(self._mpi, into)
        request = self._comm.Irecv(message, source=rank, tag=self._data_tag)
        if datatype is not None:
            datatype.Free()
        self._add_data(request, on_done, into)
        return request.Cancel  # type: ignore[no-any-return]

    def send_receipt(self, rank: int, receipt: Array) -> None:
        """Send a receipt, and wake the rank if it is on this machine and not busy."""
        self._send_note(rank, receipt, self._receipt_tag)

    def receive_receipt(self, rank: int, receipt: Array, on_done: Callable[[], None]) -> None:
        """Receive the receipt of a rank."""
        self._add(self._comm.Irecv(receipt, source=rank, tag=self._receipt_tag), on_done, receipt)

    def test(self) -> bool:
        """Call `on_done` of the messages that are done. Return True if there were any."""
        if not self._requests:
            return False
        done = self._mpi.Request.Testsome(self._requests)
        if not done:
            return False
        callbacks = [self._on_done[i] for i in done]
        gone = set(done)
        for name in ("_requests", "_on_done", "_keep"):
            setattr(self, name, [v for i, v in enumerate(getattr(self, name)) if i not in gone])
        for callback in callbacks:
            callback()
        return True

    def _add(self, request: Any, on_done: Callable[[], None], buffer: Any) -> None:
        self._requests.append(request)
        self._on_done.append(on_done)
        self._keep.append(buffer)

    def _add_data(self, request: Any, on_done: Callable[[], None], buffer: Any) -> None:
        self.n_data += 1
        self._add(request, partial(self._data_done, on_done), buffer)

    def _data_done(self, on_done: Callable[[], None]) -> None:
        self.n_data -= 1
        on_done()

    # --- control messages and shared memory

    def tell(self, rank: int, message: Integers) -> None:
        """Send a control message, and wake the rank if it is on this machine and not busy."""
        self._send_note(rank, message, self._control_tag)

    def wake(self, rank: int) -> None:
        """Wake a rank of this machine, even if it is busy."""
        self._segments[rank].bell.ring()

    def _send_note(self, rank: int, message: Array, tag: int) -> None:
        request = self._comm.Isend(message, dest=rank, tag=tag)
        if not request.Test():  # a short message has nearly always left
            self.n_leaving += 1
            self._add(request, self._has_left, message)
        segment = self._segments.get(rank)
        if segment is not None:
            segment.ring()

    def _has_left(self) -> None:
        self.n_leaving -= 1

    def told(self) -> Iterator[tuple[int, Integers]]:
        """Iterate over the control messages that have come, each with its sender."""
        mpi, status = self._mpi, self._status
        while (message := self._comm.Improbe(mpi.ANY_SOURCE, self._control_tag, status)) is not None:
            found = np.empty(status.Get_count(mpi.INT64_T), dtype=np.int64)
            message.Recv(found)
            yield status.Get_source(), found

    def place_of(self, view: Array) -> int:
        """The offset of values in this rank's shared memory, in bytes."""
        return int(view.ctypes.data) - self._base

    def look(self, rank: int, shape: tuple[int, ...], dtype: np.dtype[Any], place: int, strides: list[int]) -> Array:
        """A view of values in another rank's memory. ValueError or TypeError if it is not inside that memory."""
        return np.ndarray(shape, dtype, self._segments[rank].data, place, strides)

    def remains(self) -> tuple[Any, ...]:
        """The requests and buffers that MPI may still use after an interruption."""
        return (self._requests, self._keep)


def message_of(mpi: Any, view: Array) -> tuple[list[Any], Any]:
    """An mpi4py message for `view`, and its datatype, which must be freed after posting (None: plain bytes).

    The datatype is made from the strides of the view, so any region of any buffer can be sent or received without packing.
    """
    if view.flags.c_contiguous:
        return [_memory(mpi, view, view.nbytes), view.nbytes, mpi.BYTE], None
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
    return [_memory(mpi, view, span), 1, datatype], datatype


def _memory(mpi: Any, view: Array, nbytes: int) -> Any:
    buffer = getattr(mpi, "buffer", None) or mpi.memory  # the class was renamed in mpi4py 4
    return buffer.fromaddress(view.ctypes.data, nbytes)
