"""How do the parts of a block leave? In order, each over the channel of the rank that gets it.

What can go at once from where it lies does so (shared memory); the rest waits in one queue for room to be packed. Receivers
count parts through, so what goes at once must not meet parts for the same rank in the queue: `exchange` begins no such block
before they have left. Each receiver gets a receipt in the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from shardload.planning.schedule import Part
from shardload.transfer.buffers import StagedBlock
from shardload.transfer.channels import Channel, Channels, one_less

__all__ = ["Sender"]


class Sender:
    """The parts that still have to leave this rank, in order.

    Parameters
    ----------
    channels : Channels
        Of this exchange.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels, self._rank = channels, channels.transport.rank
        self._waiting: deque[tuple[Channel, int, StagedBlock, Sequence[Part]]] = deque()
        self._receivers: dict[int, Channel] = {}

    @property
    def is_empty(self) -> bool:
        """Whether everything has been handed over to MPI or offered."""
        return not self._waiting

    def put(self, array: int, block: StagedBlock) -> None:
        """Send what can go at once of a block of an array, and queue its other parts."""
        block.n_sending = 1
        together: dict[int, list[Part]] = {}
        for part in block.read.parts:
            if part.rank == self._rank:
                continue
            channel = self._channels.route(part.rank)
            if channel.takes_as_it_lies(block):
                together.setdefault(part.rank, []).append(part)
            else:
                block.n_sending += 1
                self._waiting.append((channel, array, block, (part,)))
        for rank, parts in together.items():
            block.n_sending += 1
            self._send(self._channels.route(rank), array, block, parts)
        one_less(block)

    def send_queued(self) -> bool:
        """Send what is queued, in order, as far as there is room to pack it; whether anything was."""
        posted = False
        while self._waiting and self._send(*self._waiting[0]):
            self._waiting.popleft()
            posted = True
        return posted

    def clear(self, parts: Iterable[Part]) -> None:
        """Send no more; whoever still expects one of `parts` gets a receipt that says so."""
        self._waiting.clear()
        for part in parts:
            if part.rank != self._rank:
                self._receivers[part.rank] = self._channels.route(part.rank)

    def send_receipts(self, went_well: bool) -> None:
        """Nothing more will come."""
        for channel in self._receivers.values():
            channel.send_receipt(went_well)

    def _send(self, channel: Channel, array: int, block: StagedBlock, parts: Sequence[Part]) -> bool:
        if not channel.send(array, block, parts):
            return False
        self._receivers[channel.rank] = channel
        return True
