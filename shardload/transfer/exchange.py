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

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardload.comm.group import Group
from shardload.comm.shared_memory import Bell, Segment
from shardload.comm.transport import Transport
from shardload.planning.schedule import Block
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.arrivals import Arrivals
from shardload.transfer.buffers import Slots, StagedBlock
from shardload.transfer.channels import Channels
from shardload.transfer.messages import Packer
from shardload.transfer.moves import ArrayMove, Staged

__all__ = ["Buffers", "Moved", "exchange"]

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

    seconds: float = 0.0
    nbytes: int = 0
    peak_nbytes: int = 0
    n_checksums: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.seconds + other.seconds,
            self.nbytes + other.nbytes,
            max(self.peak_nbytes, other.peak_nbytes),
            self.n_checksums + other.n_checksums,
        )


def exchange(
    group: Group,
    arrays: Sequence[ArrayMove],
    buffers: Buffers,
    *,
    tags: tuple[int, int],
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
    moving = _Exchange(group, channels, arrays, arrivals, buffers)
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
        channels: Channels,
        arrays: Sequence[ArrayMove],
        arrivals: Arrivals,
        buffers: Buffers,
    ) -> None:
        self.channels, self.arrays, self.arrivals = channels, arrays, arrivals
        self.slots, self.bell, self.watch, self.rank = buffers.slots, buffers.bell, group.watch, group.rank
        self.packs_into_slots = bool(buffers.segments)
        self.failure: BaseException | None = None  # when this rank staged or sent
        self.blocks = _outgoing(arrays, self.rank)
        self.following = next(self.blocks, None)
        self.under_way: deque[tuple[int, Block, Staged]] = deque()
        self.to_be_packed: int | None = None  # an array whose parts may need slots, to be copied into shared memory
        self.has_sent_receipts = False

    def _now(self) -> tuple[int, str]:
        """Return how much has been staged of all arrays, and a text that says what is being read."""
        found = [array.producer.now() for array in self.arrays]
        return sum(n for n, _ in found), next((text for _, text in found if text), "")

    def run(self) -> None:
        self.watch.enter("exchange")
        self.channels.expect()
        idle = 0
        try:
            with self.watch.attend(self._now):
                while not (self.has_sent_receipts and self.channels.is_done):
                    if self._step():
                        self.watch.moved()
                        idle = 0
                    else:
                        idle += 1
                    self.watch.look()
                    if idle:
                        self.channels.wait(
                            self.bell,
                            idle,
                            is_reading=bool(self.under_way),
                            has_more=self.following is not None,
                            longest=self.watch.nap_seconds,
                        )
        finally:
            self.channels.set_busy(False)
        self.channels.check(self.failure is None)

    def _step(self) -> bool:
        moved = self.channels.test()
        try:
            moved |= self._stage()
            moved |= self.channels.send_queued()
        except Exception as error:
            let_interruption_pass(error)
            self._fail(error)
            moved = True
        if not self.has_sent_receipts and not self.under_way and self.following is None and self.channels.is_empty:
            self.channels.send_receipts(self.failure is None)
            self.has_sent_receipts = moved = True
        return moved

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
            self.channels.started()
            is_unstaged = self.packs_into_slots and self.slots.n_taken == n_taken
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
        if self.under_way or not self.channels.is_empty:
            return True
        self.to_be_packed = None
        return False

    def _deliver(self, array: int, block: StagedBlock) -> None:
        for part in block.block.parts:
            if part.rank == self.rank:
                self.arrivals.count(array, part, part.region)
        self.channels.send(array, block)

    def _fail(self, error: Exception) -> None:
        """Stop staging and sending. Each rank that still expects parts will get a receipt that reports the failure."""
        self.failure = self.failure or error
        self.following = None
        self.channels.give_up(block for _, block in _outgoing(self.arrays, self.rank))


def _named(array: ArrayMove, error: BaseException) -> BaseException:
    return error if array.named is None else array.named(error)


def _outgoing(arrays: Sequence[ArrayMove], rank: int) -> Iterator[tuple[int, Block]]:
    """Iterate over the blocks of all arrays as one sequence; each comes with the number of its array."""
    for number, array in enumerate(arrays):
        for block in array.flow.outgoing(rank):
            yield number, block
