"""How do parts arrive in the targets, and how does this rank know that all have arrived?

Every part is compared with the plan: the number that the sender gives it must stand for the region that this rank expects. At
the end, the receipts and the number of elements must agree with the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardload.comm.transport import Integers
from shardload.planning.schedule import Part
from shardload.transfer.arrivals import Arrivals
from shardload.transfer.channels import Channel, Channels
from shardload.transfer.moves import ArrayMove

__all__ = ["Receiver"]

_WINDOW = 256  # receives posted at a time, over all senders (at least one per sender)


class Receiver:
    """Receives the parts that this rank's targets need from other ranks.

    Parameters
    ----------
    channels : Channels
        The channels of this exchange.
    arrays : sequence of ArrayMove
        The arrays to move.
    arrivals : Arrivals
        Counts what has arrived.
    """

    def __init__(self, channels: Channels, arrays: Sequence[ArrayMove], arrivals: Arrivals) -> None:
        self._channels, self._arrays, self._arrivals = channels, arrays, arrivals
        self._senders: list[Channel] = []

    def expect(self) -> None:
        """Post the first receives for every sender."""
        senders: dict[int, Channel] = {}
        for number, array in enumerate(self._arrays):
            for rank, parts in array.flow.incoming(self._channels.transport.rank).items():
                channel = senders[rank] = self._channels.route(rank)
                channel.expected.add(number, parts)
        window = max(1, _WINDOW // max(1, len(senders)))
        self._senders = list(senders.values())
        for channel in self._senders:
            channel.expect(window)

    def is_woken(self) -> bool:
        """True if every sender wakes this rank after each message."""
        return all(channel.rings for channel in self._senders)

    def is_done(self) -> bool:
        """True if nothing more will come."""
        return all(channel.is_done() for channel in self._senders)

    def is_listening(self) -> bool:
        """True if offers may still come."""
        return any(channel.is_offered for channel in self._senders)

    def look(self, rank: int, offer: Integers) -> None:
        """Copy what a rank offers, and acknowledge it."""
        self._channels.route(rank).look(offer)

    def delivered(self, array: int, part: Part) -> None:
        """Count a part of this rank's own blocks, which is in its target now."""
        self._arrivals.count(array, part, part.region)

    def check(self, is_whole: bool) -> None:
        """Compare receipts and counts with the plan. `is_whole`: whether this rank itself staged all its blocks."""
        for channel in self._senders:
            channel.check()
        if is_whole and all(channel.went_well for channel in self._senders):
            self._arrivals.check_coverage()
