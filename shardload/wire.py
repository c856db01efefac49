"""What does a part look like on the wire?

Its bytes, without gaps on the sender's side, by the strides of the piece on the receiver's; and what both sides compute over it
to prove that they mean the same: an identity of its region, a checksum of its values. Knows MPI's datatypes, but is handed MPI.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardload.region import Region

__all__ = ["Packer", "checksum", "identity", "message", "sendable"]

Array = np.ndarray[Any, Any]

_CHECKSUM_NBYTES = 1 << 20
_ALIGNMENT = 64


def identity(region: Region, previous: int) -> int:
    """A running CRC-32 of the coordinates of regions: equal where the same regions came in the same order."""
    return zlib.crc32(struct.pack(f"<{2 * region.ndim}q", *region.start, *region.stop), previous)


def checksum(data: Array) -> int:
    """CRC-32 of an array's bytes in C order, whatever its strides; never copies more than 1 MiB at a time.

    >>> import numpy as np
    >>> checksum(np.arange(4, dtype="<u2")[::-1]) == checksum(np.array([3, 2, 1, 0], dtype="<u2"))
    True
    """
    crc = 0
    for region in Region.whole(data.shape).split(max(1, _CHECKSUM_NBYTES // data.itemsize)):
        part = np.ascontiguousarray(data[region.slices()])
        crc = zlib.crc32(part.reshape(-1).view(np.uint8).data, crc)
    return crc


def message(mpi: Any, view: Array) -> tuple[list[Any], Any]:
    """An mpi4py message that is `view`, and its datatype to be freed after posting (None: plain bytes).

    The datatype is made from the view's own strides, so any box of any buffer travels without packing.
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


def sendable(view: Array) -> bool:
    """Whether a view can be sent as it is: native byte order, and strides that only go forward.

    >>> import numpy as np
    >>> sendable(np.zeros((3, 4))[:, 1:3]), sendable(np.zeros(4)[::-1])
    (True, False)
    """
    return view.dtype.isnative and all(s > 0 or n == 1 for s, n in zip(view.strides, view.shape, strict=True))


@dataclass
class _Buffer:
    """Memory that parts are packed into one after the other. Free again when all of them have been sent."""

    data: Array
    n_used: int = 0
    n_sending: int = 0


class Packer:
    """A few buffers for parts that have gaps, reused: no more memory than that, however much is sent."""

    def __init__(self, nbytes: int, n_buffers: int) -> None:
        self._nbytes, self._n_buffers = nbytes, n_buffers
        self._buffers: list[_Buffer] = []
        self._last: tuple[Any, Array, _Buffer] | None = None

    def pack(self, view: Array, key: Any) -> tuple[Array, Callable[[], None]] | None:
        """A copy without gaps, and what to call when it has been sent; None while there is no room.

        `key` names the values: asked again for the ones that were packed last (replicas), the same copy is shared.
        """
        if self._last is not None and self._last[0] == key and self._last[2].n_sending:
            _, data, buffer = self._last
        else:
            found = self._room(view.nbytes)
            if found is None:
                return None
            buffer = found
            raw = buffer.data[buffer.n_used : buffer.n_used + view.nbytes]
            data = raw.view(view.dtype).reshape(view.shape)
            np.copyto(data, view, casting="no")
            buffer.n_used += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
            self._last = (key, data, buffer)
        buffer.n_sending += 1
        return data, partial(self._one_less, buffer)

    def _room(self, nbytes: int) -> _Buffer | None:
        for buffer in self._buffers:
            if buffer.n_used + nbytes <= len(buffer.data):
                return buffer
        if len(self._buffers) < self._n_buffers:
            self._buffers.append(_Buffer(np.empty(max(nbytes, self._nbytes), dtype=np.uint8)))
            return self._buffers[-1]
        for buffer in self._buffers:
            if not buffer.n_sending:  # too small: a block of another size came before
                buffer.data, buffer.n_used = np.empty(nbytes, dtype=np.uint8), 0
                return buffer
        return None

    def _one_less(self, buffer: _Buffer) -> None:
        buffer.n_sending -= 1
        if not buffer.n_sending:
            buffer.n_used = 0
