"""How do the parts of many arrays reach the ranks that need them?

One `exchange` moves every part of every array from its block to its target (`moves`). A single thread calls MPI:

1. Find out from whom parts come, as the plan says (`open_channels`): before the ranks agree that all can exchange.
2. Stage as many blocks as there are slots and threads: the blocks of array 0, then those of array 1, and so on, as one
   sequence. When a block is done, send its parts in order, each over the channel to its receiver (`channels`).
3. As parts arrive, targets fill and slots become free. No call blocks, so no order of ranks can deadlock. A rank with nothing
   to do begins with what comes after this exchange, or sleeps instead of spinning. There is no wait between two arrays.
4. Each sender ends by sending each receiver a receipt. The receiver compares it with the plan.

A sender that fails stops sending and marks its receipts as failed. These say how many parts have left, so no rank waits for
the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from shardload.comm.collectives import abandoned
from shardload.comm.group import Group
from shardload.comm.watchdog import Activity
from shardload.planning.schedule import Block
from shardload.system.interruption import FirstError
from shardload.system.undo import Undo
from shardload.transfer.buffers import Packer, Resources, StagedBlock
from shardload.transfer.channels import Channels
from shardload.transfer.counters import Counters
from shardload.transfer.moves import ArrayMove, Arrivals


def open_channels(
    group: Group,
    moves: Sequence[ArrayMove],
    resources: Resources,
    *,
    tags: tuple[int, int],
    checksums: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Channels:
    """The channels of an exchange, which find out from whom parts come. If that fails on a rank, none may begin to exchange.

    Parameters
    ----------
    group : Group
        The ranks that take part.
    moves : sequence of ArrayMove
        The arrays to move: the same ones in the same order on every rank.
    resources : Resources
        Memory that the arrays share.
    tags : tuple of int
        Result of `Group.next_tags`. Every rank must have called it, even a rank that fails before this call.
    checksums : bool
        Whether each part is checksummed on both sides.
    on_progress : callable, optional
        Called with the number of bytes of each part that has arrived in a target.
    """
    transport = group.transport(tags, resources.segments)
    channels = Channels(transport, moves, Arrivals(moves, on_progress), Packer(resources.pack_slots), checksums)
    with Undo(channels.close):
        channels.expect()
    return channels


def exchange(
    group: Group,
    channels: Channels,
    resources: Resources,
    outgoing: Outgoing,
    begin_next: Callable[[], bool] = lambda: False,
) -> tuple[BaseException | None, Counters]:
    """Move every part of every array to its target. Collective over `group`. Errors are returned, not raised.

    Parameters
    ----------
    group : Group
        The ranks that take part.
    channels : Channels
        Between this rank and the others. They are closed in the end.
    resources : Resources
        Memory that the arrays share.
    outgoing : Outgoing
        The blocks that this rank stages. It may have begun with some.
    begin_next : callable, optional
        Called while this rank has begun with all its blocks, and has nothing to do. Returns whether it has done something.

    Returns
    -------
    BaseException or None
        The failure of this rank, or the one that its receipts report. The ranks still have to agree on it.
    Counters
        What this rank received.
    """
    started, arrivals = time.perf_counter(), channels.arrivals
    moving = _Exchange(group, channels, resources, outgoing)
    with Undo(group.forget_shared_memory), Undo(lambda: abandoned.append(channels.transport.in_use())):
        moving.run(begin_next)
    channels.close()
    arrivals.counters.exchange_seconds = time.perf_counter() - started
    arrivals.counters.peak_nbytes = resources.slots.peak_nbytes + resources.pack_slots.peak_nbytes
    return moving.failure.error or arrivals.errors.error, arrivals.counters


class Outgoing:
    """The blocks that this rank stages, of all arrays, in order: which follows, and which are under way.

    Attributes
    ----------
    following : (int, Block) or None
        The number of an array, and its block that is started next; None if all are.
    under_way : deque of (int, StagedBlock)
        Those that are started and not delivered.
    """

    def __init__(self, moves: Sequence[ArrayMove], rank: int) -> None:
        self._moves, self._blocks = moves, _outgoing(moves, rank)
        self.following = next(self._blocks, None)
        self.under_way: deque[tuple[int, StagedBlock]] = deque()

    def start_one(self) -> bool:
        """Start the next block. False if there is none, or no room for it."""
        if self.following is None:
            return False
        array, block = self.following
        producer = self._moves[array].producer
        if len(self.under_way) >= producer.n_ahead or not producer.has_room(block):
            return False
        self.under_way.append((array, producer.start(block)))
        self.following = next(self._blocks, None)
        return True


class _Exchange:
    """The main loop of one rank: stage, send and receive until everything has arrived."""

    def __init__(self, group: Group, channels: Channels, resources: Resources, outgoing: Outgoing) -> None:
        self.channels, self.moves, self.arrivals, self.outgoing = channels, channels.moves, channels.arrivals, outgoing
        self.bell, self.watch, self.rank = resources.bell, group.watch, group.rank
        self.failure = FirstError()  # when this rank staged or sent
        self.has_sent_receipts = False

    def _activity(self) -> Activity:
        """What the threads of all arrays do."""
        activities = [move.producer.activity() for move in self.moves]
        return Activity(sum(each.n_done for each in activities), next((each.doing for each in activities if each.doing), ""))

    def run(self, begin_next: Callable[[], bool]) -> None:
        self.watch.enter("exchange")
        n_idle = 0
        with self.watch.attend(self._activity):
            while not (self.has_sent_receipts and self.channels.is_done):
                if self._step():
                    self.watch.moved()
                    n_idle = 0
                else:
                    n_idle += 1
                self.watch.look()
                has_begun = n_idle > 0 and self.outgoing.following is None and begin_next()
                if has_begun or (n_idle and self.channels.wait(self.bell, n_idle, self.watch.nap_seconds)):
                    n_idle = 0  # what the bell rings for can come a moment later: the next sleep is short
        self.channels.check(not self.failure)

    def _step(self) -> bool:
        has_moved = self.channels.receive()
        try:
            has_moved |= self._stage()
            has_moved |= self.channels.send_queued()
        except Exception as error:
            self._fail(error)
            has_moved = True
        has_staged_all = self.outgoing.following is None and not self.outgoing.under_way
        if has_staged_all and self.channels.is_empty and not self.has_sent_receipts:
            self.channels.send_receipts(not self.failure)
            self.has_sent_receipts = has_moved = True
        return has_moved

    def _stage(self) -> bool:
        """Deliver the blocks that are staged, in order, and start the next ones. Return True if any were."""
        has_moved, under_way = False, self.outgoing.under_way
        while under_way and under_way[0][1].done():
            array, staged = under_way.popleft()
            has_moved = True
            if not self.failure:
                self._deliver(array, staged)
        while self.outgoing.start_one():
            has_moved = True
        return has_moved

    def _deliver(self, array: int, staged: StagedBlock) -> None:
        """Count the parts of a block that stay, and send the others. An error of staging it names the array."""
        with self.moves[array].naming_errors():
            staged.result()
        for part in staged.block.parts:
            if part.rank == self.rank:
                self.arrivals.count(array, part)
        self.channels.send(array, staged)

    def _fail(self, error: Exception) -> None:
        """Stop staging and sending. Each rank that still expects parts will get a receipt that reports the failure."""
        self.failure.keep(error)
        self.outgoing.following = None
        self.channels.give_up(block for _, block in _outgoing(self.moves, self.rank))


def _outgoing(moves: Sequence[ArrayMove], rank: int) -> Iterator[tuple[int, Block]]:
    """Iterate over the blocks of all arrays as one sequence; each comes with the number of its array."""
    for number, move in enumerate(moves):
        for block in move.flow.outgoing(rank):
            yield number, block
