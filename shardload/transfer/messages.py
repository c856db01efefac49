"""What does a part look like on the wire?

Its bytes, without gaps on the sender's side, by the strides of the piece on the receiver's; and what both sides compute over it
to prove that they mean the same: an identity of its region, a checksum of its values. Knows MPI's datatypes, but is handed MPI.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import deflate
import numpy as np

from shardload.planning.region import Region
from shardload.transfer.buffers import Slot, Slots, StagedBlock, aligned, view_of

__all__ = ["Packer", "checksum", "identity", "message", "sendable"]

Array = np.ndarray[Any, Any]

_CHECKSUM_NBYTES = 1 << 19  # what is put together at a time stays in the core's own cache
_own = threading.local()


def identity(region: Region, previous: int) -> int:
    """A running CRC-32 of the coordinates of regions: equal where the same regions came in the same order."""
    return zlib.crc32(struct.pack(f"<{2 * region.ndim}q", *region.start, *region.stop), previous)


def checksum(data: Array, crc: int = 0) -> int:
    """CRC-32 (after `crc`) of an array's bytes in C order, whatever its strides; never copies more than 512 KiB at a time.

    By libdeflate, which takes it at the speed of memory (docs/design/verify.md).

    >>> import numpy as np
    >>> checksum(np.arange(4, dtype="<u2")[::-1]) == checksum(np.array([3, 2, 1, 0], dtype="<u2"))
    True
    """
    if data.flags.c_contiguous:
        return int(deflate.crc32(data.reshape(-1).view(np.uint8).data, crc))
    if data.nbytes <= _CHECKSUM_NBYTES:
        return _checksum_of_copy(data, crc)
    for region in Region.whole(data.shape).split(max(1, _CHECKSUM_NBYTES // data.itemsize)):
        crc = _checksum_of_copy(data[region.slices()], crc)
    return crc


def _checksum_of_copy(data: Array, crc: int) -> int:
    part = _scratch(data.nbytes)
    np.copyto(part.view(data.dtype).reshape(data.shape), data, casting="no")
    return int(deflate.crc32(part.data, crc))


def _scratch(nbytes: int) -> Array:
    """Memory of this thread's own, used again by its next checksum."""
    held: Array | None = getattr(_own, "scratch", None)
    if held is None or held.nbytes < nbytes:
        held = _own.scratch = np.empty(max(nbytes, _CHECKSUM_NBYTES), dtype=np.uint8)
    return held[:nbytes]


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
    """A slot that parts are packed into one after the other. Given back when all of them have been sent."""

    slot: Slot
    n_used: int = 0
    n_sending: int = 0


class Packer:
    """Puts parts together without gaps, in a few slots that are used again: no more memory than that, however much is sent."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._open: _Buffer | None = None
        self._last: tuple[Region, Array, _Buffer] | None = None

    @property
    def peak_nbytes(self) -> int:
        """Most bytes of slots that were in use at a time."""
        return self._slots.peak_nbytes

    def pack(self, block: StagedBlock, region: Region, dtype: np.dtype[Any]) -> tuple[Array, Callable[[], None]] | None:
        """A copy of what `block` holds of `region`, and what to call when it has been sent; None while there is no room.

        Asked again for the region that was packed last (replicas), the same copy is shared.
        """
        if self._last is not None and self._last[0] == region and self._last[2].n_sending:
            _, data, buffer = self._last
        else:
            nbytes = region.size * dtype.itemsize
            found = self._room(nbytes)
            if found is None:
                return None
            buffer = found
            data = buffer.slot.data[buffer.n_used : buffer.n_used + nbytes].view(dtype).reshape(region.shape)
            missing = region.size
            for part, view in block.views(region):
                np.copyto(view_of(data, part, region), view, casting="no")
                missing -= part.size
            if missing:
                raise ValueError(f"{missing} elements of {region} are not in the block that is to be sent")
            buffer.n_used += aligned(nbytes)
            self._last = (region, data, buffer)
        buffer.n_sending += 1
        return data, partial(self._one_less, buffer)

    def _room(self, nbytes: int) -> _Buffer | None:
        if nbytes > self._slots.nbytes:
            raise ValueError(f"a part of {nbytes} bytes for slots of {self._slots.nbytes}")
        if self._open is not None and self._open.n_used + nbytes <= self._slots.nbytes:
            return self._open
        slot = self._slots.take()
        if slot is None:
            return None
        self._open = _Buffer(slot)
        return self._open

    def _one_less(self, buffer: _Buffer) -> None:
        buffer.n_sending -= 1
        if not buffer.n_sending:
            if buffer is self._open:
                self._open = None
            self._slots.give(buffer.slot)
