"""How do the parts of many arrays reach the ranks that need them?

One `exchange` moves every part of every array from its block to its target (`moves`). A single thread calls MPI:

1. Post receives for the first parts of every sender, as the plan says (`receiver`).
2. Stage as many blocks as there are slots and threads: the blocks of array 0, then those of array 1, and so on, as one
   sequence. When a block is done, send its parts in order (`sender`), each over the channel to its receiver (`channels`).
3. As parts arrive, targets fill and slots become free. No call blocks, so no order of ranks can deadlock. A rank with nothing
   to do sleeps instead of spinning. There is no wait between two arrays.
4. Each sender ends by sending each receiver a receipt. The receiver compares it with the plan.

A sender that fails stops sending and marks its receipts as failed. The receivers then cancel what will not come, so no rank
waits for it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardload.comm.backoff import Backoff
from shardload.comm.group import Group
from shardload.comm.shared_memory import Bell, Segment
from shardload.comm.transport import Transport
from shardload.planning.schedule import Block
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.arrivals import Arrivals
from shardload.transfer.buffers import Slots, StagedBlock
from shardload.transfer.channels import ACK, Channels
from shardload.transfer.messages import Packer
from shardload.transfer.moves import ArrayMove, Staged
from shardload.transfer.receiver import Receiver
from shardload.transfer.sender import Sender

__all__ = ["Buffers", "Moved", "exchange"]

# Waiting for messages: at first only yield the core, because a pending message needs calls into MPI to progress; then sleep
# for longer and longer.
_BACKOFF = Backoff(n_awake=50, first_seconds=5e-5, longest_seconds=1e-3, n_before_doubling=100)
# Waiting for the bell. If it does not ring, look all the same, less and less often. Soon at first if it rang for nothing: then
# a message is on its way. The shortest waits are skipped otherwise.
_LISTENING = Backoff(n_awake=0, first_seconds=2e-3, longest_seconds=3.2e-2, n_before_doubling=1)
_N_SKIPPED = 2
_ALONE_SECONDS = 1.0
# Waiting while a block is being read: when it is done, that wakes this rank, and notes of others are handled at the same time.
_BUSY_SECONDS = 0.1

# Buffers of interrupted exchanges (Ctrl-C): MPI may still write into them, so they are never freed.
_abandoned: list[Any] = []


@dataclass(frozen=True)
class Buffers:
    """Memory and bell that all arrays of an exchange share.

    Attributes
    ----------
    slots, pack_slots : Slots
        Staging buffers for blocks (in shared memory if there is any), and buffers for packed messages. Each is large enough for
        the largest block of any array.
    segments : mapping of int to Segment
        The shared memory of each rank of this machine; empty if none is shared.
    bell : Bell
        Wakes this rank. Rung by the producers' threads and, with shared memory, by the ranks of this machine.
    """

    slots: Slots
    pack_slots: Slots
    segments: Mapping[int, Segment]
    bell: Bell


@dataclass(frozen=True)
class Moved:
    """Statistics of an exchange on this rank: seconds of copying, bytes received from other ranks, peak bytes in slots, and
    number of parts whose checksum was compared.
    """

    seconds: float
    nbytes: int
    peak_nbytes: int
    n_checksums: int = 0


def exchange(
    group: Group,
    arrays: Sequence[ArrayMove],
    buffers: Buffers,
    *,
    tags: tuple[int, int, int],
    checksums: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[BaseException | None, Moved]:
    """Move every part of every array to its target. Collective over `group`. Errors are returned, not raised.

    Parameters
    ----------
    group : Group
        The ranks that take part.
    arrays : sequence of ArrayMove
        The arrays to move: the same ones in the same order on every rank.
    buffers : Buffers
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
    Moved
        Statistics of the exchange.
    """
    transport = Transport(group, tags, buffers.segments)
    progress = _Callback(on_progress)
    complete = [_Callback(array.on_complete) for array in arrays]
    arrivals = Arrivals(arrays, progress, complete)
    packers = Packer(buffers.pack_slots), Packer(buffers.slots)
    channels = Channels(transport, arrays, arrivals, *packers, checksums)
    moving = _Exchange(group, transport, channels, arrays, arrivals, buffers)
    try:
        moving.run()
    except BaseException:
        _abandoned.append((transport.remains(), arrays, buffers))
        group.forget_shared_memory()
        raise
    channels.close()
    peak_nbytes = buffers.slots.peak_nbytes + buffers.pack_slots.peak_nbytes
    moved = Moved(arrivals.copy_seconds, arrivals.nbytes, peak_nbytes, arrivals.n_checksums)
    problems = [moving.failure, arrivals.problem, progress.problem]
    problems += [_named(array, callback.problem) for array, callback in zip(arrays, complete, strict=True) if callback.problem]
    return next((problem for problem in problems if problem is not None), None), moved


class _Callback:
    """A callback of the caller. If it fails, the exchange goes on, because other ranks still wait for this rank."""

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
    """The main loop of one rank: stage, send and receive until everything has arrived."""

    def __init__(
        self,
        group: Group,
        transport: Transport,
        channels: Channels,
        arrays: Sequence[ArrayMove],
        arrivals: Arrivals,
        buffers: Buffers,
    ) -> None:
        self.transport, self.channels, self.arrays = transport, channels, arrays
        self.sender, self.receiver = Sender(channels), Receiver(channels, arrays, arrivals)
        self.slots, self.bell, self.watch, self.rank = buffers.slots, buffers.bell, group.watch, group.rank
        self.shares_memory, self.segment = bool(buffers.segments), buffers.segments.get(group.rank)
        self.failure: BaseException | None = None  # when this rank staged or sent
        self.blocks = _outgoing(arrays, self.rank)
        self.following = next(self.blocks, None)
        self.under_way: deque[tuple[int, Block, Staged]] = deque()
        self.to_be_packed: int | None = None  # an array whose parts may need slots, to be copied into shared memory
        self.has_sent_receipts = False
        self.is_woken = False  # True if all from whom this rank expects something ring its bell
        self.n_silent = 0  # place in `_LISTENING`
        self.is_busy = False  # whether this rank has said that it need not be rung
        self.is_starved = False  # whether this rank waits for a free slot, and has hurried those who have its blocks

    def _now(self) -> tuple[int, str]:
        """Return how much has been staged of all arrays, and a text that says what is being read."""
        found = [array.producer.now() for array in self.arrays]
        return sum(n for n, _ in found), next((text for _, text in found if text), "")

    def run(self) -> None:
        self.watch.enter("exchange")
        self.receiver.expect()
        self.is_woken = self.receiver.is_woken()
        idle = 0
        try:
            with self.watch.attend(self._now):
                while not self._is_done():
                    if self._step():
                        self.watch.moved()
                        idle = 0
                    else:
                        idle += 1
                    self.watch.look()
                    if idle:
                        self._nap(idle)
        finally:
            self._set_busy(False)
        self.receiver.check(self.failure is None)

    def _is_done(self) -> bool:
        return self.has_sent_receipts and not self.transport and not self.channels.n_offered and self.receiver.is_done()

    def _step(self) -> bool:
        moved = self.transport.test()
        try:
            moved |= self._listen()
            moved |= self._stage()
            moved |= self.sender.send_queued()
        except Exception as error:
            let_interruption_pass(error)
            self._fail(error)
            moved = True
        if not self.has_sent_receipts and not self.under_way and self.following is None and self.sender.is_empty:
            self.sender.send_receipts(self.failure is None)
            self.has_sent_receipts = moved = True
        return moved

    def _listen(self) -> bool:
        """Handle the control messages from ranks of this machine. Return True if there were any."""
        heard = False
        if self.channels.n_offered or self.receiver.is_listening():
            for rank, message in self.transport.told():
                heard = True
                if message[0] == ACK:
                    self.channels.acknowledged(rank, int(message[1]))
                else:
                    self.receiver.look(rank, message)
        return heard

    def _stage(self) -> bool:
        """Deliver the blocks that are staged, in order, and start the next ones. Return True if any were."""
        moved = False
        while self.under_way and self.under_way[0][2].done():
            array, block, staged = self.under_way.popleft()
            moved = True
            if self.failure is None:
                ready = self._result(array, staged)
                ready.block = block
                self._deliver(array, ready)
        while self.following is not None:
            array, block = self.following
            producer = self.arrays[array].producer
            if len(self.under_way) >= producer.n_at_once:
                break
            if not producer.has_room(block) or self._keeps_slots(array):
                break
            n_taken = self.slots.n_taken
            self.under_way.append((array, block, producer.start(block)))
            self.is_starved = False
            is_unstaged = self.shares_memory and self.slots.n_taken == n_taken
            if is_unstaged and any(part.rank != self.rank for part in block.parts):
                self.to_be_packed = array
            self.following, moved = next(self.blocks, None), True
        return moved

    def _result(self, array: int, staged: Staged) -> StagedBlock:
        """The staged block, or the error of staging it, which names the array."""
        try:
            found: StagedBlock = staged.result()
            return found
        except Exception as error:
            let_interruption_pass(error)
            named = _named(self.arrays[array], error)
            if named is error:
                raise
            raise named from error

    def _keeps_slots(self, array: int) -> bool:
        """True if the blocks of this array must wait for those of another array, which need slots to be packed.

        Otherwise they would take these slots and then wait behind the other blocks in the sender's queue. (This happens only
        if one array is in memory already and the next one is not.)
        """
        if self.to_be_packed in (None, array):
            return False
        if self.under_way or not self.sender.is_empty:
            return True
        self.to_be_packed = None
        return False

    def _deliver(self, array: int, block: StagedBlock) -> None:
        for part in block.block.parts:
            if part.rank == self.rank:
                self.receiver.delivered(array, part)
        self.sender.put(array, block)

    def _fail(self, error: Exception) -> None:
        """Stop staging and sending. Each rank that still expects parts will get a receipt that reports the failure."""
        self.failure = self.failure or error
        self.following = None
        for _, block in _outgoing(self.arrays, self.rank):
            self.sender.clear(block.parts)

    def _nap(self, idle: int) -> None:
        """Sleep until the bell rings if nothing else can happen; otherwise sleep briefly, longer each time."""
        if not self.transport.n_data:
            # The bell may ring before the message can be received, and other machines do not ring it: look again after a while.
            alone = not self.transport and not self.channels.n_offered and not self.receiver.is_listening()
            if alone:
                self.bell.wait(min(_ALONE_SECONDS, self.watch.nap_seconds))
                return
            self._listen_for_bell(idle)
            return
        seconds = _BACKOFF.seconds(idle)
        if seconds:
            self.bell.wait(seconds)
        else:
            os.sched_yield()

    def _listen_for_bell(self, idle: int) -> None:
        if self._set_busy(self.is_woken and bool(self.under_way) and not self.transport.n_leaving):
            if self.is_busy:
                self.bell.wait(_BUSY_SECONDS)
            return  # else look first: who has sent something until now did not ring
        if self.following is not None and not self.is_starved:  # the others may be busy, but this rank has nothing to do
            self.is_starved = True
            self.channels.hurry()
        if not self.is_woken or self.transport.n_leaving:  # what MPI still has of this rank may need its calls
            self.n_silent = 0
        elif idle == 1:  # the last ring was for what the step before found
            self.n_silent = _N_SKIPPED
        is_rung = self.bell.wait(_LISTENING.seconds(self.n_silent + 1))
        self.n_silent = 0 if is_rung else self.n_silent + 1

    def _set_busy(self, is_busy: bool) -> bool:
        """Say whether others need not ring. Return True if this rank was busy, or is now."""
        was_busy, self.is_busy = self.is_busy, is_busy and self.segment is not None
        if self.segment is not None and was_busy != self.is_busy:
            self.segment.set_busy(self.is_busy)
        return was_busy or self.is_busy


def _named(array: ArrayMove, error: BaseException) -> BaseException:
    return error if array.named is None else array.named(error)


def _outgoing(arrays: Sequence[ArrayMove], rank: int) -> Iterator[tuple[int, Block]]:
    """Iterate over the blocks of all arrays as one sequence; each comes with the number of its array."""
    for number, array in enumerate(arrays):
        for block in array.flow.outgoing(rank):
            yield number, block
