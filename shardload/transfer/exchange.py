"""How do the parts reach their owners?

One `exchange` moves every part of a plan from the file to the piece it belongs to. One thread alone calls MPI:

1. Expect what the plan says (`inbox`): post receives for the first parts of every sender.
2. Start reads (`reader`), as many as there are slots and threads for. As each is done, in order, its parts leave (`outbox`):
   as notes where to look to ranks of the same machine, as messages to others.
3. As messages and notes come, parts reach the pieces and slots become free. Nothing blocks, so no order of ranks can
   deadlock, and a rank with nothing to do sleeps instead of spinning.
4. Each sender ends with a receipt for each receiver, which the receiver compares with the plan.

A sender that fails stops, and says so in its receipts: the receivers cancel what will not come. Nobody waits for it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardload.comm.group import Group
from shardload.comm.shared_memory import Bell, Segment
from shardload.planning.schedule import Block, Schedule
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.buffers import Piece, Slots, StagedBlock
from shardload.transfer.messages import Packer
from shardload.transfer.receiver import Receiver
from shardload.transfer.requests import ACK, Requests
from shardload.transfer.sender import Sender

__all__ = ["BlockReader", "Moved", "exchange"]

# Waiting for messages: give the core away at first, because one under way needs calls into MPI to go on; then sleep ever
# longer.
_YIELDS = 50
_NAP_SECONDS, _LONGEST_NAP_SECONDS, _NAPS_BEFORE_DOUBLING = 5e-5, 1e-3, 100
# Waiting for rings.
_LISTEN_SECONDS, _ALONE_SECONDS = 2e-3, 1.0

# What an interrupted exchange (Ctrl-C) left behind: MPI may still write into its buffers, so they are never freed.
_abandoned: list[Any] = []


class BlockReader(Protocol):
    """Gives the blocks of one rank, in order."""

    @property
    def n_at_once(self) -> int:
        """Reads worth starting before the first is done."""
        ...

    def has_room(self, read: Block) -> bool:
        """Whether `start` has a buffer for this read."""
        ...

    def now(self) -> tuple[int, str]:
        """A number that grows with what has been read, and what is being read."""
        ...

    def start(self, read: Block) -> Any:
        """Begin to read one block: `done()`, `result()`. Not called again after one has failed."""
        ...


@dataclass(frozen=True)
class Moved:
    """What an exchange did on this rank: seconds of copying, bytes that came from other ranks, most bytes in slots at a
    time, parts whose checksum was compared.
    """

    seconds: float
    nbytes: int
    peak_nbytes: int
    n_checksums: int = 0


def exchange(
    group: Group,
    plan: Schedule,
    reader: BlockReader,
    pieces: Mapping[int, Piece],
    *,
    tags: tuple[int, int, int],
    dtype: np.dtype[Any],
    slots: Slots,
    pack_slots: Slots,
    segments: Mapping[int, Segment],
    bell: Bell,
    checksums: bool = False,
    on_progress: Callable[[int], None] | None = None,
    on_piece: Callable[[Piece], None] | None = None,
    seed: int = 0,
) -> tuple[BaseException | None, Moved]:
    """Move every part of `plan` to where it belongs. Collective over `group`; returns, never raises, what went wrong.

    Parameters
    ----------
    group : Group
        The ranks.
    plan : Schedule
        Who reads what, and who needs which part of it.
    reader : BlockReader
        Gives this rank's blocks.
    pieces : mapping of int to Piece
        This rank's pieces, by shard number. Filled in place.
    tags : tuple of int
        `Group.next_tags`, which every rank has called, whether it comes this far or not.
    dtype : dtype
        Of the values.
    slots, pack_slots : Slots
        Where blocks wait (in shared memory where there is some), and where messages are packed.
    segments : mapping of int to Segment
        The memory of each rank of this machine; empty where none is shared.
    bell : Bell
        Where this rank waits: rung by the reader's threads and, with shared memory, by the ranks of this machine.
    checksums : bool
        Whether each part is checksummed on both sides.
    on_progress : callable, optional
        Called with the bytes of each part that has arrived in a piece.
    on_piece : callable, optional
        Called with each piece that is complete.
    seed : int
        Of this load alone, the same on every rank: what receipts and checksums begin with, so that no part of another load is
        taken for one of this.

    Returns
    -------
    BaseException or None
        This rank's own failure, or what its receipts say; the ranks still have to agree on it.
    Moved
        What it cost.
    """
    traffic = Requests(group, tags, seed)
    advance = _Advance(on_progress)
    complete = _Advance(on_piece)
    inbox = Receiver(traffic, plan, segments, pieces, checksums, advance, complete)
    packer, shared_packer = Packer(pack_slots), Packer(slots)
    outbox = Sender(traffic, segments, packer, shared_packer, dtype, checksums)
    moving = _Exchange(traffic, plan, reader, inbox, outbox, bell)
    try:
        moving.run()
    except BaseException:
        _abandoned.append((traffic.remains(), pieces, slots, pack_slots, reader))
        group.forget_shared_memory()
        raise
    moved = Moved(inbox.copy_seconds, inbox.nbytes, slots.peak_nbytes + pack_slots.peak_nbytes, inbox.n_checksums)
    return moving.failure or inbox.problem or advance.problem or complete.problem, moved


class _Advance:
    """A function that is told how far it is. If it fails, the exchange goes on: others still wait for this rank."""

    def __init__(self, tell: Callable[[Any], None] | None) -> None:
        self._tell = tell
        self.problem: Exception | None = None

    def __call__(self, what: Any) -> None:
        if self._tell is None or self.problem is not None:
            return
        try:
            self._tell(what)
        except Exception as error:
            let_interruption_pass(error)
            self.problem = error


class _Exchange:
    def __init__(
        self, traffic: Requests, plan: Schedule, reader: BlockReader, inbox: Receiver, outbox: Sender, bell: Bell
    ) -> None:
        self.traffic, self.plan, self.reader, self.inbox, self.outbox = traffic, plan, reader, inbox, outbox
        self.bell, self.watch = bell, traffic.group.watch
        self.rank = traffic.group.rank
        self.failure: Exception | None = None  # of this rank's own reading or sending
        self.reads = plan.owned_blocks(self.rank)
        self.following = next(self.reads, None)
        self.under_way: deque[Any] = deque()
        self.has_sent_receipts = False

    def run(self) -> None:
        self.watch.enter("exchange")
        self.inbox.expect()
        idle = 0
        with self.watch.attend(self.reader.now):
            while not self._is_done():
                if self._step():
                    self.watch.moved()
                    idle = 0
                else:
                    idle += 1
                self.watch.look()
                if idle:
                    self._nap(idle)
        self.inbox.check(self.failure is None)

    def _is_done(self) -> bool:
        return self.has_sent_receipts and not self.traffic and not self.outbox.n_looking and self.inbox.is_done()

    def _step(self) -> bool:
        moved = self.traffic.test()
        try:
            moved |= self._listen()
            moved |= self._read()
            moved |= self.outbox.post()
        except Exception as error:
            let_interruption_pass(error)
            self._fail(error)
            moved = True
        if not self.has_sent_receipts and not self.under_way and self.following is None and self.outbox.is_empty:
            self.outbox.send_receipts(self.failure is None)
            self.has_sent_receipts = moved = True
        return moved

    def _listen(self) -> bool:
        """Deal with what ranks of this machine say."""
        heard = False
        if self.outbox.n_looking or self.inbox.is_watching():
            for rank, message in self.traffic.told():
                heard = True
                if message[0] == ACK:
                    self.outbox.answered(rank, int(message[1]))
                else:
                    self.inbox.look(rank, message)
        return heard

    def _read(self) -> bool:
        """Take the blocks that have been read, in order, and have the next ones read."""
        moved = False
        while self.under_way and self.under_way[0].done():
            reading, moved = self.under_way.popleft(), True
            if self.failure is None:
                self._deliver(reading.result())
        while (
            self.following is not None and len(self.under_way) < self.reader.n_at_once and self.reader.has_room(self.following)
        ):
            self.under_way.append(self.reader.start(self.following))
            self.following, moved = next(self.reads, None), True
        return moved

    def _deliver(self, block: StagedBlock) -> None:
        for part in block.block.parts:
            if part.rank == self.rank:
                self.inbox.delivered(part)
        self.outbox.put(block)

    def _fail(self, error: Exception) -> None:
        """Read and send no more. Whoever still expects something from this rank gets a receipt that says so."""
        self.failure = self.failure or error
        self.following = None
        for read in self.plan.owned_blocks(self.rank):
            self.outbox.clear(read.parts)

    def _nap(self, idle: int) -> None:
        """Wait: for a ring, where that is all that can come; else a little, the longer the longer nothing has happened."""
        if not self.traffic.n_data:
            # A note may still be on its way when its ring is heard, and receipts do not ring: look again after a while.
            alone = not self.traffic and not self.outbox.n_looking and not self.inbox.is_watching()
            self.bell.wait(min(_ALONE_SECONDS, self.watch.nap_seconds) if alone else _LISTEN_SECONDS)
            return
        if idle <= _YIELDS:
            os.sched_yield()
            return
        doublings = min(10, (idle - _YIELDS) // _NAPS_BEFORE_DOUBLING)
        self.bell.wait(min(_LONGEST_NAP_SECONDS, _NAP_SECONDS * 2**doublings))
