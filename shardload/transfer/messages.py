"""How is a part made ready to be sent? A part with gaps is packed into a slot; one without is sent from its block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardload.planning.blocks import aligned
from shardload.planning.parts import Block
from shardload.planning.region import Region
from shardload.transfer.buffers import Slot, Slots, StagedBlock

Array = np.ndarray[Any, Any]


def sendable(view: Array) -> bool:
    """True if a view can be sent as it is: it has native byte order and positive strides.

    >>> import numpy as np
    >>> sendable(np.zeros((3, 4))[:, 1:3]), sendable(np.zeros(4)[::-1])
    (True, False)
    """
    return view.dtype.isnative and all(s > 0 or n == 1 for s, n in zip(view.strides, view.shape, strict=True))


@dataclass
class _Buffer:
    """A slot that parts are packed into, one after the other. It is given back when all of them have been sent."""

    slot: Slot
    n_used: int = 0
    n_sending: int = 0


class Packer:
    """Packs parts without gaps into a few slots, which are reused: memory stays the same, however much is sent."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._open: _Buffer | None = None
        self._last: tuple[Block, Region, Array, _Buffer] | None = None

    def pack(self, block: StagedBlock, region: Region) -> tuple[Array, Callable[[], None]] | None:
        """Return a packed copy of `region` of the block, and a function to call when it has been sent. None: there is no room.

        If the same region was packed last (replicas), the same copy is returned.
        """
        last = self._last
        if last is not None and last[0] is block.block and last[1] == region and last[3].n_sending:
            _, _, data, buffer = last  # compared by block too: another array may have the same region
        else:
            view = block.view(region)
            found = self._room(view.nbytes)
            if found is None:
                return None
            buffer = found
            data = buffer.slot.data[buffer.n_used : buffer.n_used + view.nbytes].view(view.dtype).reshape(view.shape)
            np.copyto(data, view, casting="no")
            buffer.n_used += aligned(view.nbytes)
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
