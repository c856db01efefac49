"""How is a part made ready to be sent? Without gaps: from its block as it lies there, else packed into a slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardload.planning.region import Region
from shardload.planning.schedule import Block
from shardload.transfer.buffers import Slot, Slots, StagedBlock, aligned, view_of

__all__ = ["Packer", "sendable"]

Array = np.ndarray[Any, Any]


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
        self._last: tuple[Block, Region, Array, _Buffer] | None = None

    @property
    def peak_nbytes(self) -> int:
        """Most bytes of slots that were in use at a time."""
        return self._slots.peak_nbytes

    def pack(self, block: StagedBlock, region: Region, dtype: np.dtype[Any]) -> tuple[Array, Callable[[], None]] | None:
        """A copy of what `block` holds of `region`, and what to call when it has been sent; None while there is no room.

        Asked again for the region of the block that was packed last (replicas), the same copy is shared.
        """
        last = self._last
        if last is not None and last[0] is block.block and last[1] == region and last[3].n_sending:
            _, _, data, buffer = last  # of this very block: another array may have the same region
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
            self._last = (block.block, region, data, buffer)
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
