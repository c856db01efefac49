"""How are the parts of a block sent? In order, each over the channel of the rank that receives it.

Parts that can be sent from where they lie (shared memory) are sent at once. The others wait in one queue until there is room to
pack them. Receivers number the parts in order, so a part must not be sent at once while parts for the same rank are in the
queue: `exchange` does not start such a block before they have left. At the end each receiver gets a receipt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from shardload.planning.schedule import Part
from shardload.transfer.buffers import StagedBlock
from shardload.transfer.channels import Channel, Channels, one_less

__all__ = ["Sender"]


class Sender:
    """Sends the parts of this rank's blocks, in order, and keeps the queue of parts that still have to leave.

    Parameters
    ----------
    channels : Channels
        The channels of this exchange.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels, self._rank = channels, channels.transport.rank
        self._waiting: deque[tuple[Channel, int, StagedBlock, Sequence[Part]]] = deque()
        self._receivers: dict[int, Channel] = {}

    @property
    def is_empty(self) -> bool:
        """True if every part has been handed to MPI or offered."""
        return not self._waiting

    def put(self, array: int, block: StagedBlock) -> None:
        """Send the parts of a block that can be sent at once, and queue the others."""
        block.n_sending = 1
        together: dict[int, list[Part]] = {}
        for part in block.block.parts:
            if part.rank == self._rank:
                continue
            channel = self._channels.route(part.rank)
            if channel.takes_as_it_lies(block):
                together.setdefault(part.rank, []).append(part)
            else:
                block.n_sending += 1
                self._waiting.append((channel, array, block, (part,)))
        for rank, of_rank in together.items():
            block.n_sending += 1
            self._send(self._channels.route(rank), array, block, of_rank)
        one_less(block)

    def send_queued(self) -> bool:
        """Send queued parts, in order, while there is room to pack them. Return True if any was sent."""
        posted = False
        while self._waiting and self._send(*self._waiting[0]):
            self._waiting.popleft()
            posted = True
        return posted

    def clear(self, parts: Iterable[Part]) -> None:
        """Drop the queue. Each rank that still expects one of `parts` will get a receipt that reports the failure."""
        self._waiting.clear()
        for part in parts:
            if part.rank != self._rank:
                self._receivers[part.rank] = self._channels.route(part.rank)

    def send_receipts(self, went_well: bool) -> None:
        """Send each receiver its receipt: no more parts follow."""
        for channel in self._receivers.values():
            channel.send_receipt(went_well)

    def _send(self, channel: Channel, array: int, block: StagedBlock, parts: Sequence[Part]) -> bool:
        if not channel.send(array, block, parts):
            return False
        self._receivers[channel.rank] = channel
        return True
