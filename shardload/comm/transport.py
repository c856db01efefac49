"""What is under way between this rank and the others in one exchange?

Three kinds of messages, each with a tag of its own: values, receipts and control messages. NumPy arrays go in and come out;
nothing here waits, and nothing here knows what the values are. Ranks of one machine can also look into each other's memory
(`Segment`): a control message says where.

The only place that an exchange calls MPI from.
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
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Transport:
    """The messages of one exchange, with what to do when each is done; the buffers that MPI reads or writes live as long.

    Parameters
    ----------
    group : Group
        The ranks.
    tags : tuple of int
        Of this exchange alone (`Group.next_tags`): for values, receipts and control messages.
    segments : mapping of int to Segment
        The memory of each rank of this machine, this one among them; empty where none is shared.

    Attributes
    ----------
    rank : int
        This rank.
    n_data : int
        Messages with values that are under way.
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
        self.n_data = 0

    def __bool__(self) -> bool:
        """Whether anything is under way."""
        return bool(self._requests)

    def shares_memory(self, rank: int) -> bool:
        """Whether this rank and another one can look into each other's memory."""
        return rank in self._segments

    # --- values and receipts

    def send(self, rank: int, values: Array, on_done: Callable[[], None]) -> None:
        """Send values without gaps. They stay as they are until they have left, which is when `on_done` is called."""
        message, _ = message_of(self._mpi, values)
        self._add_data(self._comm.Isend(message, dest=rank, tag=self._data_tag), on_done, values)

    def receive(self, rank: int, into: Array, on_done: Callable[[], None]) -> Callable[[], None]:
        """Receive the next values of a rank into a view with any strides; what to call for them not to come any more.

        `on_done` is called when they are there, and also when they have been cancelled.
        """
        message, datatype = message_of(self._mpi, into)
        request = self._comm.Irecv(message, source=rank, tag=self._data_tag)
        if datatype is not None:
            datatype.Free()
        self._add_data(request, on_done, into)
        return request.Cancel  # type: ignore[no-any-return]

    def send_receipt(self, rank: int, receipt: Array) -> None:
        """Send a receipt."""
        self._add(self._comm.Isend(receipt, dest=rank, tag=self._receipt_tag), _nothing, receipt)

    def receive_receipt(self, rank: int, receipt: Array, on_done: Callable[[], None]) -> None:
        """Receive the receipt of a rank."""
        self._add(self._comm.Irecv(receipt, source=rank, tag=self._receipt_tag), on_done, receipt)

    def test(self) -> bool:
        """Deal with what is done; whether anything was."""
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
        """Send a control message, and wake the rank where it is of this machine."""
        self._add(self._comm.Isend(message, dest=rank, tag=self._control_tag), _nothing, message)
        segment = self._segments.get(rank)
        if segment is not None:
            segment.bell.ring()

    def told(self) -> Iterator[tuple[int, Integers]]:
        """The control messages that have come, and who sent each."""
        mpi, status = self._mpi, self._status
        while (message := self._comm.Improbe(mpi.ANY_SOURCE, self._control_tag, status)) is not None:
            found = np.empty(status.Get_count(mpi.INT64_T), dtype=np.int64)
            message.Recv(found)
            yield status.Get_source(), found

    def place_of(self, view: Array) -> int:
        """Where values lie in the memory that this rank shares: bytes from its beginning."""
        return int(view.ctypes.data) - self._base

    def look(self, rank: int, shape: tuple[int, ...], dtype: np.dtype[Any], place: int, strides: list[int]) -> Array:
        """Values in another rank's memory. ValueError or TypeError if that is not inside it."""
        return np.ndarray(shape, dtype, self._segments[rank].data, place, strides)

    def remains(self) -> tuple[Any, ...]:
        """What MPI may still use after an interruption."""
        return (self._requests, self._keep)


def message_of(mpi: Any, view: Array) -> tuple[list[Any], Any]:
    """An mpi4py message that is `view`, and its datatype to be freed after posting (None: plain bytes).

    The datatype is made from the view's own strides, so any region of any buffer travels without packing.
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


def _nothing() -> None:
    return None
