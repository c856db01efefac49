"""How do the parts of many arrays reach the ranks that need them?

One `exchange` moves every part of every array from its block to its target (`moves`). A single thread calls MPI:

1. Find out from whom parts come, as the plan says.
2. Stage as many blocks as there are slots and threads: the blocks of array 0, then those of array 1, and so on, as one
   sequence. When a block is done, send its parts in order, each over the channel to its receiver (`channels`).
3. As parts arrive, targets fill and slots become free. No call blocks, so no order of ranks can deadlock. A rank with nothing
   to do sleeps instead of spinning. There is no wait between two arrays.
4. Each sender ends by sending each receiver a receipt. The receiver compares it with the plan.

A sender that fails stops sending and marks its receipts as failed. These say how many parts have left, so no rank waits for
the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardload.comm.group import Group
from shardload.comm.watchdog import Activity
from shardload.planning.schedule import Block
from shardload.system.interruption import FirstError
from shardload.transfer.buffers import Packer, Resources, StagedBlock
from shardload.transfer.channels import Channels
from shardload.transfer.counters import Counters
from shardload.transfer.moves import ArrayMove, Arrivals

# Buffers of interrupted exchanges (Ctrl-C): MPI may still write into them, so they are never freed.
_abandoned: list[Any] = []


def exchange(
    group: Group,
    moves: Sequence[ArrayMove],
    resources: Resources,
    *,
    tags: tuple[int, int],
    checksums: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[BaseException | None, Counters]:
    """Move every part of every array to its target. Collective over `group`. Errors are returned, not raised.

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

    Returns
    -------
    BaseException or None
        The failure of this rank, or the one that its receipts report. The ranks still have to agree on it.
    Counters
        What this rank received.
    """
    transport = group.transport(tags, resources.segments)
    arrivals = Arrivals(moves, on_progress)
    channels = Channels(transport, moves, arrivals, Packer(resources.pack_slots), checksums)
    started = time.perf_counter()
    moving = _Exchange(group, channels, moves, arrivals, resources)
    try:
        moving.run()
    except BaseException:
        _abandoned.append((transport.remains(), moves, resources))
        group.forget_shared_memory()
        raise
    channels.close()
    arrivals.counters.exchange_seconds = time.perf_counter() - started
    arrivals.counters.peak_nbytes = resources.slots.peak_nbytes + resources.pack_slots.peak_nbytes
    return moving.failure.error or arrivals.errors.error, arrivals.counters


class _Exchange:
    """The main loop of one rank: stage, send and receive until everything has arrived."""

    def __init__(
        self, group: Group, channels: Channels, moves: Sequence[ArrayMove], arrivals: Arrivals, resources: Resources
    ) -> None:
        self.channels, self.moves, self.arrivals = channels, moves, arrivals
        self.bell, self.watch, self.rank = resources.bell, group.watch, group.rank
        self.failure = FirstError()  # when this rank staged or sent
        self.blocks = _outgoing(moves, self.rank)
        self.following = next(self.blocks, None)
        self.under_way: deque[tuple[int, StagedBlock]] = deque()
        self.has_sent_receipts = False

    def _activity(self) -> Activity:
        """What the threads of all arrays do."""
        activities = [move.producer.activity() for move in self.moves]
        return Activity(sum(each.n_done for each in activities), next((each.doing for each in activities if each.doing), ""))

    def run(self) -> None:
        self.watch.enter("exchange")
        self.channels.expect()
        n_idle = 0
        with self.watch.attend(self._activity):
            while not (self.has_sent_receipts and self.channels.is_done):
                if self._step():
                    self.watch.moved()
                    n_idle = 0
                else:
                    n_idle += 1
                self.watch.look()
                if n_idle:
                    self.channels.wait(self.bell, n_idle, self.watch.nap_seconds)
        self.channels.check(not self.failure)

    def _step(self) -> bool:
        has_moved = self.channels.receive()
        try:
            has_moved |= self._stage()
            has_moved |= self.channels.send_queued()
        except Exception as error:
            self._fail(error)
            has_moved = True
        if not self.has_sent_receipts and not self.under_way and self.following is None and self.channels.is_empty:
            self.channels.send_receipts(not self.failure)
            self.has_sent_receipts = has_moved = True
        return has_moved

    def _stage(self) -> bool:
        """Deliver the blocks that are staged, in order, and start the next ones. Return True if any were."""
        has_moved = False
        while self.under_way and self.under_way[0][1].done():
            array, staged = self.under_way.popleft()
            has_moved = True
            if not self.failure:
                self._deliver(array, staged)
        while self.following is not None:
            array, block = self.following
            producer = self.moves[array].producer
            if len(self.under_way) >= producer.n_at_once or not producer.has_room(block):
                break
            self.under_way.append((array, producer.start(block)))
            self.following, has_moved = next(self.blocks, None), True
        return has_moved

    def _deliver(self, array: int, staged: StagedBlock) -> None:
        """Count the parts of a block that stay, and send the others. An error of staging it names the array."""
        try:
            staged.result()
        except Exception as error:
            self.moves[array].fail(error)
        for part in staged.block.parts:
            if part.rank == self.rank:
                self.arrivals.count(array, part)
        self.channels.send(array, staged)

    def _fail(self, error: Exception) -> None:
        """Stop staging and sending. Each rank that still expects parts will get a receipt that reports the failure."""
        self.failure.keep(error)
        self.following = None
        self.channels.give_up(block for _, block in _outgoing(self.moves, self.rank))


def _outgoing(moves: Sequence[ArrayMove], rank: int) -> Iterator[tuple[int, Block]]:
    """Iterate over the blocks of all arrays as one sequence; each comes with the number of its array."""
    for number, move in enumerate(moves):
        for block in move.flow.outgoing(rank):
            yield number, block
