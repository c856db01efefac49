"""How do parts travel between this rank and the others, and how does each know that all have arrived?

`Channels` is what an exchange sees: `send`, `receive`, `wait`. Below it there is one `Channel` for each other rank, for both
directions. Values go in one of two ways, and nothing else knows in which:

- to a rank of the same machine, with which this one shares memory: the sender makes an *offer*, a note that names for every
  part the region and the place of its values in the sender's shared memory. The receiver copies the values out of it and
  acknowledges the offer; then the slot is used again.
- to any other rank: an MPI message carries the values, straight from the block if they lie there without
  gaps, otherwise packed. (MPI could send with gaps too, but MPICH then moves a few KiB per call: measured, packing is 10 times
  faster.) The message is received straight into the target, when it has come.

Both ends number the parts of one sender, from the first part of array 0 to the last part of the last array. At the end each
sender sends each receiver a receipt: whether all went well, how many parts were sent, a digest of their arrays and regions and,
if checksums are on, a checksum of each part. The receiver compares it with the plan.

All parts go through one queue, in order. Some have to be packed first, and wait there until there is room.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from shardload.comm.collectives import backoff
from shardload.comm.shared_memory import Bell
from shardload.comm.transport import Receive, Transport
from shardload.errors import PeerError
from shardload.planning.region import Array, IntArray
from shardload.planning.schedule import Block, Part
from shardload.transfer.buffers import Packer, StagedBlock
from shardload.transfer.checksum import checksum, identity, seed_of
from shardload.transfer.moves import DEFECT, ArrayMove, Arrivals

OFFER, ACK, RECEIPT = range(3)  # kinds of notes: "these parts lie there", "I have them", "no more, and these were all"
HEAD_SIZE = 4  # of an offer: OFFER, its number, how many parts, which array; then a row of integers for each part

# Waiting for messages: at first only yield the core, because a pending message needs calls into MPI to progress; then sleep
# for longer and longer.
_pause_seconds = partial(backoff, n_awake=50, first_seconds=5e-5, longest_seconds=1e-3, n_alike=100)
# Waiting for the bell, which may ring before the message can be received: look all the same, less and less often.
_listening_seconds = partial(backoff, first_seconds=2e-3, longest_seconds=3.2e-2)


class Channels:
    """The parts that one rank sends and receives in one exchange.

    Parameters
    ----------
    transport : Transport
        Carries the messages.
    moves : sequence of ArrayMove
        What moves.
    arrivals : Arrivals
        What has arrived on this rank.
    packer : Packer
        Packs parts with gaps, and values that do not lie in shared memory.
    checksums : bool
        Whether each part is checksummed on both sides.

    Attributes
    ----------
    seeds : sequence of int
        For each array, the start value of its identities and checksums.
    """

    def __init__(
        self, transport: Transport, moves: Sequence[ArrayMove], arrivals: Arrivals, packer: Packer, checksums: bool
    ) -> None:
        self.transport, self.moves, self.arrivals, self.checksums = transport, moves, arrivals, checksums
        self.packer = packer
        self.seeds = [seed_of(number, move.seed) for number, move in enumerate(moves)]
        self._channels: dict[int, Channel] = {}
        self._senders: list[Channel] = []
        self._open: set[int] = set()  # ranks from which something is still to come
        self._n_by_message = 0  # of these, the ones that send messages
        self._receivers: set[int] = set()
        self._queue: deque[tuple[Channel, int, StagedBlock, Sequence[Part]]] = deque()
        self._offered: dict[int, Callable[[], None]] = {}
        self._n_offers = 0

    def route(self, rank: int) -> Channel:
        """The channel to and from a rank."""
        if rank not in self._channels:
            self._channels[rank] = Channel(self, rank)
        return self._channels[rank]

    def close(self) -> None:
        """Release the channels: each references this object, and a reference cycle would keep the targets' memory alive."""
        self._channels.clear()
        self._senders.clear()

    # --- to other ranks

    @property
    def is_empty(self) -> bool:
        """True if every part has been handed to MPI or offered."""
        return not self._queue

    def send(self, array: int, block: StagedBlock) -> None:
        """Queue the parts of a block that other ranks need. When all have left, the block's slot is released."""
        block.n_sending += 1
        of_rank: dict[int, list[Part]] = {}
        for part in block.block.parts:
            if part.rank != self.transport.rank:
                of_rank.setdefault(part.rank, []).append(part)
        for rank, parts in of_rank.items():
            channel = self.route(rank)
            for group in channel.together(block, parts):
                block.n_sending += 1
                self._queue.append((channel, array, block, group))
        count_down(block)

    def send_queued(self) -> bool:
        """Send queued parts, in order, while there is room to pack them. Return True if any was sent."""
        has_sent = False
        while self._queue:
            channel, array, block, parts = self._queue[0]
            if not channel.send(array, block, parts):
                break
            self._queue.popleft()
            self._receivers.add(channel.rank)
            has_sent = True
        return has_sent

    def offer(self, rank: int, n_parts: int, array: int, rows: list[int], on_done: Callable[[], None]) -> None:
        """Tell `rank` where parts lie. `on_done` is called when the receiver has copied them."""
        note: IntArray = np.array([OFFER, self._n_offers + 1, n_parts, array, *rows], dtype=np.int64)
        self.transport.send_note(rank, note)
        self._n_offers += 1
        self._offered[self._n_offers] = on_done

    def acknowledged(self, rank: int, offer: int) -> None:
        """Handle the acknowledgement of an offer. PeerError if there is no such offer."""
        done = self._offered.pop(offer, None)
        if done is None:
            raise PeerError(
                f"rank {rank} answers note {offer}, which rank {self.transport.rank} did not send or which was answered "
                f"before. Nothing was loaded. {DEFECT}",
                rank=rank,
            )
        done()

    def give_up(self, blocks: Iterable[Block]) -> None:
        """Drop the queue. Each rank that still expects parts of `blocks` will get a receipt that reports the failure."""
        self._queue.clear()
        self._receivers |= {part.rank for block in blocks for part in block.parts} - {self.transport.rank}

    def send_receipts(self, went_well: bool) -> None:
        """Send each receiver its receipt: no more parts follow."""
        for rank in self._receivers:
            self.route(rank).send_receipt(went_well)

    # --- from other ranks

    def expect(self) -> None:
        """Find out from whom parts come."""
        for number, move in enumerate(self.moves):
            for rank, parts in move.flow.incoming(self.transport.rank).items():
                self._open.add(rank)
                self.route(rank).expected.append((number, parts))
        self._senders = [self._channels[rank] for rank in self._open]
        for channel in self._senders:
            channel.expect()
        self._n_by_message = sum(channel.uses_messages for channel in self._senders)

    def receive(self) -> bool:
        """Handle what has left and what has come. Return True if there was anything."""
        has_moved = self.transport.test()
        if self._n_by_message:
            for rank, nbytes, receive in self.transport.receive():
                has_moved = True
                self.route(rank).take_message(nbytes, receive)
        if self._open or self._offered:
            for rank, note in self.transport.receive_notes():
                has_moved = True
                self.hear(rank, note)
        return has_moved

    def hear(self, rank: int, note: IntArray) -> None:
        """Handle a note. What goes wrong is kept: others wait for this rank."""
        with self.arrivals.errors:
            if note[0] == ACK:
                self.acknowledged(rank, int(note[1]))
            elif note[0] == RECEIPT:
                self.route(rank).take_receipt(note)
            else:
                self.route(rank).take_offer(note)

    def closed(self, channel: Channel) -> None:
        """Called by a channel from which nothing more will come."""
        if channel.rank in self._open:
            self._open.remove(channel.rank)
            self._n_by_message -= channel.uses_messages

    @property
    def is_done(self) -> bool:
        """True if nothing more will come or leave, once all receipts are sent."""
        return not self._open and not self._offered and not self.transport

    def check(self, is_whole: bool) -> None:
        """Compare receipts and counts with the plan. `is_whole`: whether this rank itself staged all its blocks."""
        for channel in self._senders:
            channel.check()
        if is_whole and all(channel.went_well for channel in self._senders):
            self.arrivals.check_coverage()

    def wait(self, bell: Bell, n_idle: int, longest_seconds: float) -> bool:
        """Sleep until this rank's threads or the ranks of this machine ring the bell; with messages pending, only briefly.

        `n_idle` is how many looks in a row have found nothing. Returns whether the bell has rung.
        """
        if self.transport or self._n_by_message:
            seconds = _pause_seconds(n_idle)
            if not seconds:
                os.sched_yield()
                return False
        else:
            seconds = _listening_seconds(n_idle) if self._open or self._offered else longest_seconds
        return bell.wait(seconds)


class Channel:
    """How parts travel between this rank and one other, with the counts and receipts of both directions.

    Parameters
    ----------
    common : Channels
        The channels of this exchange.
    rank : int
        The other rank.

    Attributes
    ----------
    uses_messages : bool
        True if values travel as messages; False if as offers, after each of which the other rank wakes this one.
    """

    def __init__(self, common: Channels, rank: int) -> None:
        self.rank, self._common, self._transport, self._checksums = rank, common, common.transport, common.checksums
        self.uses_messages = not common.transport.shares_memory(rank)
        self._n_sent = self._identity = 0
        self._sent_sums: list[int] = []
        self.expected: list[tuple[int, Iterable[Part]]] = []  # of each array
        self._following = _in_order(self.expected)  # of these, what has not begun to come
        self._n_expected = self._n_seen = 0  # parts; and those that have come, or that offers have named
        self._expected_identity = 0
        self._sums: list[int] = []
        self._receipt: list[int] | None = None

    # --- to the other rank

    def together(self, block: StagedBlock, parts: list[Part]) -> list[list[Part]]:
        """The parts of a block in groups, each of which is sent at once."""
        return [[part] for part in parts] if self.uses_messages or not block.is_shared else [parts]

    def send(self, array: int, block: StagedBlock, parts: Sequence[Part]) -> bool:
        """Send parts of a block. Return False if there is no room to pack them. `count_down` is called when they have left."""
        views = [block.view(part.region) for part in parts]
        done: Callable[[], None] = partial(count_down, block)
        packed = None
        if not (views[0].flags.c_contiguous if self.uses_messages else block.is_shared):
            packed = self._common.packer.pack(block, parts[0].region)
            if packed is None:
                return False
            views, done = [packed[0]], packed[1]
        seed = self._common.seeds[array]
        sums = [checksum(view, seed) for view in views] if self._checksums else []
        if self.uses_messages:
            self._transport.send(self.rank, views[0], done)
        else:
            rows: list[int] = []
            for part, view in zip(parts, views, strict=True):
                rows += [*part.region.start, *part.region.stop, self._transport.offset_of(view), *view.strides]
            self._common.offer(self.rank, len(parts), array, rows, done)
        # Now that they were sent: a receipt must not count a part that could not be sent.
        for part in parts:
            self._identity = identity(part.region, seed, self._identity)
        self._n_sent += len(parts)
        self._sent_sums += sums
        if packed is not None:
            count_down(block)  # the part was copied, so it no longer needs the block
        return True

    def send_receipt(self, went_well: bool) -> None:
        """Send the receipt: no more parts follow it."""
        receipt = [RECEIPT, went_well, self._n_sent, self._identity, *self._sent_sums]
        self._transport.send_note(self.rank, np.array(receipt, dtype=np.int64))

    # --- from the other rank

    def expect(self) -> None:
        """Get ready for the expected parts."""
        for _, array, part in _in_order(self.expected):
            self._expected_identity = identity(part.region, self._common.seeds[array], self._expected_identity)
            self._n_expected += 1
        self._sums = [0] * (self._n_expected if self._checksums else 0)

    def take_message(self, nbytes: int, receive: Receive) -> None:
        """Receive a message with the values of the next part. One that is not expected is reported, and thrown away."""
        number, array, part = next(self._following, (0, -1, None)) if self.uses_messages else (0, -1, None)
        view = None if part is None else self._common.arrivals.view(array, part)
        if part is None or view is None or view.nbytes != nbytes:
            self._common.arrivals.report_list(None, self.rank)
            receive(np.empty(nbytes, dtype=np.uint8), partial(self._count_parts, 1))
        else:
            receive(view, partial(self._received, number, array, part, view))

    def _received(self, number: int, array: int, part: Part, view: Array) -> None:
        with self._common.arrivals.errors:
            self._arrived(number, array, part, view)
        self._count_parts(1)

    def take_offer(self, offer: IntArray) -> None:
        """Copy what an offer names out of the sender's memory, and acknowledge it. What is not expected is reported."""
        started = time.perf_counter()
        arrivals, array, n_parts, rows = self._common.arrivals, int(offer[3]), int(offer[2]), offer[HEAD_SIZE:]
        if self.uses_messages or n_parts < 1 or len(rows) % n_parts:
            arrivals.report_list(None, self.rank)
        else:
            for row in rows.reshape(n_parts, -1).tolist():
                with arrivals.errors:  # the sender waits for an answer
                    self._copy(array, row)
        arrivals.counters.copy_seconds += time.perf_counter() - started
        self._transport.send_note(self.rank, np.array([ACK, offer[1]], dtype=np.int64))
        self._count_parts(n_parts)

    def _copy(self, array: int, row: list[int]) -> None:
        """Copy the values of the next part, which a row of an offer names."""
        arrivals = self._common.arrivals
        number, expected_array, part = next(self._following, (0, -1, None))
        if part is None:
            arrivals.report_list(None, self.rank)
            return
        n = part.region.ndim
        if expected_array != array or row[: -1 - n] != [*part.region.start, *part.region.stop]:
            arrivals.report_list(part.region, self.rank, expected_array)
            return
        target = arrivals.view(array, part)
        try:
            values = self._transport.view_at(self.rank, target.shape, target.dtype, row[2 * n], row[2 * n + 1 :])
        except (TypeError, ValueError):  # outside the sender's memory
            arrivals.report_list(part.region, self.rank, array)
            return
        np.copyto(target, values, casting="no")
        self._arrived(number, array, part, target)

    def _arrived(self, number: int, array: int, part: Part, view: Array) -> None:
        """Count a part that is in its target."""
        if self._checksums:
            self._sums[number] = checksum(view, self._common.seeds[array])
        self._common.arrivals.receive(array, part, self._checksums)

    def take_receipt(self, receipt: IntArray) -> None:
        """Take the receipt: no more parts than it counts will come. It may overtake messages with values.

        Notes come in order, so nothing follows it where there are offers: not even parts that it counts and no offer named.
        """
        self._receipt = receipt[1:].tolist()
        self._count_parts(0)
        if not self.uses_messages:
            self._common.closed(self)

    def _count_parts(self, n_parts: int) -> None:
        """Count parts that have come."""
        self._n_seen += n_parts
        if self._receipt is not None and self._n_seen >= self._receipt[1]:
            self._common.closed(self)

    @property
    def went_well(self) -> bool:
        """True if the receipt says that the sender did not fail."""
        return self._receipt is not None and bool(self._receipt[0])

    def check(self) -> None:
        """Compare the receipt with what was expected."""
        if self._receipt is None or not self.went_well:
            return  # the sender raises its error, and all ranks agree on it
        _, n_sent, proof, *sums = self._receipt
        arrivals = self._common.arrivals
        if (n_sent, proof) != (self._n_expected, self._expected_identity) or self._n_seen != n_sent:
            _, array, part = next(_in_order(self.expected))
            arrivals.report_list(part.region, self.rank, array)
        for (_, array, part), theirs, ours in zip(_in_order(self.expected), sums, self._sums, strict=False):
            if theirs != ours:
                arrivals.report_sum(array, part, self.rank, ours, theirs)


def _in_order(expected: Sequence[tuple[int, Iterable[Part]]]) -> Iterator[tuple[int, int, Part]]:
    """The expected parts in the order in which they come: number, array, part."""
    every = ((array, part) for array, parts in expected for part in parts)
    return ((number, array, part) for number, (array, part) in enumerate(every))


def count_down(block: StagedBlock) -> None:
    """Count down the receivers that need the block. When none does, free its slot."""
    block.n_sending -= 1
    if block.n_sending == 0:
        block.release()
