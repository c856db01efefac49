"""How do the parts reach their owners?

One `exchange` moves every part of a plan from the block it was read in to the piece it belongs to:

1. Post receives for the first parts of every sender, straight into the pieces (derived datatypes: no unpacking here).
2. Read blocks in a thread, at most as many at a time as there are staging buffers; as each one is ready, copy the parts that
   stay and send the others: from the block itself where they lie in it without gaps, else packed. (MPI could send with gaps
   too, but MPICH then moves a few KiB per call: measured, packing is 10 times faster.) MPI is called from one thread alone.
3. As messages complete, post the next receives and give buffers back. Nothing blocks, so no order of ranks can deadlock, and a
   rank with nothing to do sleeps instead of spinning.
4. Each sender ends with a receipt for each receiver: whether all went well, how many parts it sent, of which regions (so parts
   that went to the wrong rank are found, not believed) and, where asked, a checksum of each. The receiver compares.

A sender that fails stops, and says so in its receipts: the receivers cancel what will not come. Nobody waits for it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from shardload.errors import PeerError, ShardloadError
from shardload.group import Group
from shardload.plan import Part, Read, ReadPlan
from shardload.region import Region
from shardload.wire import Packer, checksum, identity
from shardload.wire import message as message_of

__all__ = ["Block", "BlockReader", "Piece", "exchange"]

Array = np.ndarray[Any, Any]

_WINDOW = 256  # receives posted at a time, over all senders (at least one per sender)
# Waiting: give the core away at first, because a message under way needs calls into MPI to go on; then sleep ever longer.
_YIELDS = 50
_NAP_SECONDS, _LONGEST_NAP_SECONDS, _NAPS_BEFORE_DOUBLING = 5e-5, 1e-3, 100

# Requests of an exchange that was interrupted (Ctrl-C): MPI may still write into their buffers, so they are never freed.
_abandoned: list[Any] = []


@dataclass
class Piece:
    """A shard's data on the host: `region` in global coordinates and the buffer of exactly its shape."""

    region: Region
    data: Array

    def view(self, region: Region) -> Array:
        """The part of the buffer that holds `region`."""
        return _box(self.data, region, self.region)


@dataclass
class Block:
    """One block in memory. `data` is None where the read went straight into the piece."""

    read: Read
    data: Array | None
    release: Callable[[], None]
    n_sending: int = 0

    def view(self, region: Region) -> Array:
        """The part of the block that holds `region`."""
        if self.data is None:
            raise ValueError("a block that went straight into a piece has no other parts")
        return _box(self.data, region, self.read.region)


class BlockReader(Protocol):
    """Gives the blocks of one rank, in order."""

    def has_room(self) -> bool:
        """Whether a buffer is free for another block."""
        ...

    def fetch(self, read: Read) -> Block:
        """Read one block. Called in a thread, one call at a time; not called again after it has raised."""
        ...


def exchange(
    group: Group,
    plan: ReadPlan,
    reader: BlockReader,
    pieces: Mapping[int, Piece],
    *,
    pack_nbytes: int,
    n_pack: int = 2,
    checksums: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> BaseException | None:
    """Move every part of `plan` to where it belongs. Collective over `group`; returns, never raises, what went wrong.

    Parameters
    ----------
    group : Group
        The ranks.
    plan : ReadPlan
        Who reads what, and who needs which part of it.
    reader : BlockReader
        Gives this rank's blocks.
    pieces : mapping of int to Piece
        This rank's pieces, by shard number. Filled in place.
    pack_nbytes, n_pack : int
        Parts with gaps are packed into at most `n_pack` buffers of this size (or of one part, where that is larger).
    checksums : bool
        Whether each part is checksummed on both sides.
    on_progress : callable, optional
        Called with the bytes of each part that has arrived in a piece.

    Returns
    -------
    BaseException or None
        This rank's own failure, or what its receipts say; the ranks still have to agree on it.
    """
    packer = Packer(pack_nbytes, n_pack)
    moving = _Exchange(group, plan, reader, pieces, packer, checksums, on_progress or (lambda _: None))
    try:
        moving.run()
    except BaseException:
        moving.abandon()
        raise
    return moving.failure or moving.problem


@dataclass
class _Sent:
    """What went to one rank: enough for its receipt."""

    n_parts: int = 0
    identity: int = 0
    sums: list[int] = field(default_factory=list)


@dataclass
class _Sender:
    """One rank that sends to this one: what comes from it, in order, and how much of it has a receive posted."""

    rank: int
    parts: Sequence[Part]
    n_coming: int
    identity: int
    sums: list[int]
    receipt: Array
    n_posted: int = 0
    posted: dict[int, Any] = field(default_factory=dict)


class _Exchange:
    def __init__(
        self,
        group: Group,
        plan: ReadPlan,
        reader: BlockReader,
        pieces: Mapping[int, Piece],
        packer: Packer,
        checksums: bool,
        on_progress: Callable[[int], None],
    ) -> None:
        self.group, self.plan, self.reader, self.pieces = group, plan, reader, pieces
        self.packer, self.checksums, self.on_progress = packer, checksums, on_progress
        self.outbox: deque[tuple[Block, Part]] = deque()
        self.tag, self.receipt_tag = group.next_tags()
        self.requests: list[Any] = []
        self.on_done: list[Callable[[], None]] = []
        self.keep: list[Any] = []
        self.sent: dict[int, _Sent] = {}
        self.senders: list[_Sender] = []
        self.failure: Exception | None = None  # of this rank's own reading or sending
        self.problem: Exception | None = None  # with what came
        self.reads = plan.reads(group.rank)
        self.reading: Future[Block] | None = None
        self.following = next(self.reads, None)
        self.n_arrived = dict.fromkeys(pieces, 0)

    def run(self) -> None:
        self._expect(self.plan.incoming(self.group.rank))
        with ThreadPoolExecutor(1, thread_name_prefix="shardload-read") as pool:
            self._progress(pool)
        for sender in self.senders:
            self._check_receipt(sender)
        self._check_coverage()

    def _progress(self, pool: ThreadPoolExecutor) -> None:
        receipts_sent = False
        idle = 0
        while not receipts_sent or self.requests:
            moved = self._test()
            try:
                moved |= self._read(pool)
                moved |= self._post_sends()
            except Exception as error:
                self._fail(error)
                moved = True
            if not receipts_sent and self.reading is None and self.following is None and not self.outbox:
                self._send_receipts()
                receipts_sent = moved = True
            idle = 0 if moved else idle + 1
            if idle:
                _nap(idle, self.reading, bool(self.requests))

    # --- reading

    def _read(self, pool: ThreadPoolExecutor) -> bool:
        """Take the block that has been read, and have the next one read."""
        moved = False
        if self.reading is not None and self.reading.done():
            done, self.reading, moved = self.reading, None, True
            if self.failure is None:
                self._deliver(done.result())
        if self.reading is None and self.following is not None and self.reader.has_room():
            self.reading = pool.submit(self.reader.fetch, self.following)
            self.following, moved = next(self.reads, None), True
        return moved

    def _fail(self, error: Exception) -> None:
        """Read and send no more. Whoever still expects something from this rank gets a receipt that says so."""
        self.failure = self.failure or error
        self.outbox.clear()
        self.following = None
        for read in self.plan.reads(self.group.rank):
            for part in read.parts:
                if part.rank != self.group.rank:
                    self.sent.setdefault(part.rank, _Sent())

    # --- sending

    def _deliver(self, block: Block) -> None:
        """Copy the parts that stay, and put the others in the outbox."""
        block.n_sending = 1
        for part in block.read.parts:
            if part.rank == self.group.rank:
                self._copy(block, part)
            else:
                block.n_sending += 1
                self.outbox.append((block, part))
        self._one_less(block)

    def _copy(self, block: Block, part: Part) -> None:
        nbytes = part.region.size * self.plan.itemsize
        if block.data is not None:
            piece = self.pieces[part.shard].view(part.region)
            view = block.view(part.region)
            np.copyto(piece, view, casting="no")
            if self.checksums and checksum(view) != checksum(piece):
                self._report(part, self.group.rank, "a checksum after the copy differs from the one before it")
        self.n_arrived[part.shard] += part.region.size
        self._advance(nbytes)

    def _post_sends(self) -> bool:
        """Send what is in the outbox, in order, as far as there is room to pack it."""
        posted = False
        while self.outbox:
            block, part = self.outbox[0]
            view = block.view(part.region)
            data: Array = view
            done: Callable[[], None] = partial(self._one_less, block)
            if not view.flags.c_contiguous:
                packed = self.packer.pack(view, part.region)
                if packed is None:
                    break
                data, done = packed
            self._send(part, view, data, done)
            self.outbox.popleft()
            if data is not view:
                self._one_less(block)  # the block itself is no longer needed for this part
            posted = True
        return posted

    def _send(self, part: Part, view: Array, data: Array, done: Callable[[], None]) -> None:
        sent = self.sent.setdefault(part.rank, _Sent())
        sent.n_parts += 1
        sent.identity = identity(part.region, sent.identity)
        if self.checksums:
            sent.sums.append(checksum(view))
        message, _ = message_of(self.group.mpi, data)
        self._add(self.group.comm.Isend(message, dest=part.rank, tag=self.tag), done, data)

    def _one_less(self, block: Block) -> None:
        block.n_sending -= 1
        if block.n_sending == 0:
            block.release()

    def _send_receipts(self) -> None:
        for rank, sent in self.sent.items():
            went_well = int(self.failure is None)
            receipt = np.array([went_well, sent.n_parts, sent.identity, *sent.sums], dtype=np.uint32)
            request = self.group.comm.Isend(receipt, dest=rank, tag=self.receipt_tag)
            self._add(request, _nothing, receipt)

    # --- receiving

    def _expect(self, incoming: Mapping[int, Sequence[Part]]) -> None:
        window = max(1, _WINDOW // max(1, len(incoming)))
        for rank, parts in incoming.items():
            proof = 0
            for part in parts:
                proof = identity(part.region, proof)
            n_sums = len(parts) if self.checksums else 0
            receipt = np.zeros(3 + n_sums, dtype=np.uint32)
            sender = _Sender(rank, parts, len(parts), proof, [0] * n_sums, receipt)
            self.senders.append(sender)
            request = self.group.comm.Irecv(receipt, source=rank, tag=self.receipt_tag)
            self._add(request, partial(self._expect_no_more, sender), receipt)
            for _ in range(window):
                self._receive_next(sender)

    def _receive_next(self, sender: _Sender) -> None:
        if sender.n_posted >= sender.n_coming:
            return
        number = sender.n_posted
        part = sender.parts[number]
        sender.n_posted += 1
        view = self.pieces[part.shard].view(part.region)
        message, datatype = message_of(self.group.mpi, view)
        request = self.group.comm.Irecv(message, source=sender.rank, tag=self.tag)
        if datatype is not None:
            datatype.Free()

        def arrived() -> None:
            del sender.posted[number]
            if number >= sender.n_coming:
                return  # cancelled
            if self.checksums:
                sender.sums[number] = checksum(view)
            self.n_arrived[part.shard] += part.region.size
            self._advance(view.nbytes)
            self._receive_next(sender)

        sender.posted[number] = request
        self._add(request, arrived, view)

    def _expect_no_more(self, sender: _Sender) -> None:
        """A receipt has come: what its sender did not send will never come."""
        sender.n_coming = min(sender.n_coming, int(sender.receipt[1]))
        for number, request in sender.posted.items():
            if number >= sender.n_coming:
                request.Cancel()

    def _check_receipt(self, sender: _Sender) -> None:
        went_well, n_sent, proof, *sums = (int(v) for v in sender.receipt)
        if not went_well:
            return  # that rank raises, and all ranks agree on its error
        if (n_sent, proof) != (len(sender.parts), sender.identity):
            self._report(sender.parts[0], sender.rank, "the sender's list of regions is not the one that was expected")
        for part, theirs, ours in zip(sender.parts, sums, sender.sums, strict=False):
            if theirs != ours:
                self._report(part, sender.rank, f"its checksum is {ours:08x}, the sender's is {theirs:08x}")

    def _check_coverage(self) -> None:
        """Every element of every piece must have arrived: what nobody sent is whatever was in memory before."""
        if self.failure is not None or not all(sender.receipt[0] for sender in self.senders):
            return  # then something is missing, and it is known why
        for shard, found in self.n_arrived.items():
            region = self.plan.true_region(shard)
            wanted = region.size if region else 0
            if found != wanted and self.problem is None:
                self.problem = ShardloadError(
                    f"{found} elements arrived for the shard {region}, which has {wanted}: nothing was loaded. This is a "
                    "defect in shardload; please report it with the shape, the mesh and the spec"
                )

    def _report(self, part: Part, sender: int, what: str) -> None:
        if self.problem is None:
            self.problem = PeerError(
                f"the part {part.region} that came from rank {sender} is not what was sent: {what}. The load is void; "
                "if it happens again, suspect the network or memory of these two nodes"
            )

    def _advance(self, nbytes: int) -> None:
        try:
            self.on_progress(nbytes)
        except Exception as error:  # the caller's function: others still wait for this rank's messages
            self.problem = self.problem or error
            self.on_progress = lambda _: None

    # --- requests

    def _add(self, request: Any, on_done: Callable[[], None], buffer: Any) -> None:
        self.requests.append(request)
        self.on_done.append(on_done)
        self.keep.append(buffer)

    def _test(self) -> bool:
        if not self.requests:
            return False
        done = self.group.mpi.Request.Testsome(self.requests)
        if not done:
            return False
        callbacks = [self.on_done[i] for i in done]
        gone = set(done)
        for name in ("requests", "on_done", "keep"):
            setattr(self, name, [v for i, v in enumerate(getattr(self, name)) if i not in gone])
        for callback in callbacks:
            callback()
        return True

    def abandon(self) -> None:
        """Leave an interrupted exchange: what MPI may still write into stays alive."""
        if self.requests:
            _abandoned.append((self.requests, self.keep, self.pieces, self.reader))


def _box(data: Array, region: Region, held: Region) -> Array:
    """The part of a buffer, which holds `held`, that is `region`."""
    # Ending the index in `...` keeps a 0-d view an array: `data[()]` would be a scalar, hence a copy.
    index: tuple[Any, ...] = (*region.slices(held.start), ...)
    view: Array = data[index]
    return view


def _nothing() -> None:
    return None


def _nap(idle: int, reading: Future[Block] | None, has_requests: bool) -> None:
    """Wait a little, the longer the longer nothing has happened; the end of a read wakes at once."""
    if reading is not None and not has_requests:
        wait([reading])  # nothing else can happen
        return
    if idle <= _YIELDS:
        os.sched_yield()
        return
    doublings = (idle - _YIELDS) // _NAPS_BEFORE_DOUBLING
    seconds = min(_LONGEST_NAP_SECONDS, _NAP_SECONDS * 2 ** min(doublings, 10))
    if reading is None:
        time.sleep(seconds)
    else:
        wait([reading], timeout=seconds)
