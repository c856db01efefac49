"""How do parts arrive in the pieces, and how is it known that all have?

Messages are received straight into the pieces (derived datatypes: no unpacking). For ranks of the same machine, a note says
where the values lie in the sender's shared memory: they are copied from there, once. Every part is compared with the plan:
the sender's number of it must name the region that this rank expects there. In the end the receipts and the number of
elements must agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.shared_memory import Segment
from shardload.errors import PeerError, ShardloadError
from shardload.planning.region import Region
from shardload.planning.schedule import Part, Schedule
from shardload.transfer.buffers import Piece
from shardload.transfer.messages import checksum, identity
from shardload.transfer.messages import message as message_of
from shardload.transfer.requests import ACK, Integers, Requests

__all__ = ["Receiver"]

_WINDOW = 256  # receives posted at a time, over all senders (at least one per sender)

Array = np.ndarray[Any, Any]


@dataclass
class _Peer:
    """One rank that sends to this one: what comes from it, in order, and how much of it is posted or here."""

    rank: int
    parts: Sequence[Part]
    n_coming: int
    identity: int
    receipt: Array
    sums: list[int]
    shares: Segment | None
    n_posted: int = 0
    posted: dict[int, Any] = field(default_factory=dict)
    n_seen: int = 0  # parts that notes have named
    has_receipt: bool = False

    def is_done(self) -> bool:
        return self.has_receipt and (self.shares is None or self.n_seen >= self.receipt[1])


class Receiver:
    """What this rank's pieces still need from others.

    Parameters
    ----------
    traffic : Traffic
        Of this exchange.
    plan : Schedule
        Who reads what, and who needs which part of it.
    segments : mapping of int to Segment
        The memory of each rank of this machine; empty where none is shared.
    pieces : mapping of int to Piece
        This rank's pieces, by shard number.
    checksums : bool
        Whether each part is compared by checksum too.
    advance : callable
        Called with the bytes of each part that has arrived.
    on_piece : callable
        Called with each piece that has all its elements.
    """

    def __init__(
        self,
        traffic: Requests,
        plan: Schedule,
        segments: Mapping[int, Segment],
        pieces: Mapping[int, Piece],
        checksums: bool,
        advance: Callable[[int], None],
        on_piece: Callable[[Piece], None],
    ) -> None:
        self._traffic, self._plan, self._segments, self._pieces = traffic, plan, segments, pieces
        self._checksums, self._advance, self._on_piece = checksums, advance, on_piece
        self._senders: dict[int, _Peer] = {}
        self.n_arrived = dict.fromkeys(pieces, 0)
        held = ((shard, plan.true_region(shard)) for shard in pieces)
        self._n_wanted = {shard: region.size if region else 0 for shard, region in held}
        self.problem: Exception | None = None
        self.copy_seconds, self.nbytes, self.n_checksums = 0.0, 0, 0

    def expect(self) -> None:
        """Post the first receives of every sender."""
        incoming = self._plan.remote_parts(self._traffic.group.rank)
        window = max(1, _WINDOW // max(1, len(incoming)))
        for rank, parts in incoming.items():
            proof = self._traffic.seed
            for part in parts:
                proof = identity(part.region, proof)
            shares = self._segments.get(rank)
            n_sums = len(parts) if self._checksums and shares is None else 0
            receipt = np.zeros(3 + n_sums, dtype=np.uint32)
            sender = _Peer(rank, parts, len(parts), proof, receipt, [0] * n_sums, shares)
            self._senders[rank] = sender
            request = self._traffic.group.comm.Irecv(receipt, source=rank, tag=self._traffic.receipt_tag)
            self._traffic.add(request, partial(self._expect_no_more, sender), receipt)
            for _ in range(0 if shares else window):
                self._receive_next(sender)

    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return all(sender.is_done() for sender in self._senders.values())

    def is_watching(self) -> bool:
        """Whether notes may still come."""
        return any(sender.shares is not None and not sender.is_done() for sender in self._senders.values())

    def delivered(self, part: Part) -> None:
        """A part of this rank's own blocks is in its piece."""
        self._arrived(part.shard, part.region)

    # --- messages

    def _receive_next(self, sender: _Peer) -> None:
        if sender.n_posted >= sender.n_coming:
            return
        number = sender.n_posted
        part = sender.parts[number]
        sender.n_posted += 1
        view = self._pieces[part.shard].view(part.region)
        message, datatype = message_of(self._traffic.group.mpi, view)
        request = self._traffic.group.comm.Irecv(message, source=sender.rank, tag=self._traffic.data_tag)
        if datatype is not None:
            datatype.Free()

        def arrived() -> None:
            del sender.posted[number]
            if number >= sender.n_coming:
                return  # cancelled
            if self._checksums:
                sender.sums[number] = checksum(view, self._traffic.seed)
            self._count(part, part.region)
            self._receive_next(sender)

        sender.posted[number] = request
        self._traffic.add_data(request, arrived, view)

    def _count(self, part: Part, region: Region) -> None:
        self.nbytes += region.size * self._plan.itemsize
        self.n_checksums += self._checksums
        self._arrived(part.shard, region)

    def _arrived(self, shard: int, region: Region) -> None:
        self.n_arrived[shard] += region.size
        self._advance(region.size * self._plan.itemsize)
        if self.n_arrived[shard] == self._n_wanted[shard]:
            self._on_piece(self._pieces[shard])

    def _expect_no_more(self, sender: _Peer) -> None:
        """A receipt has come: what its sender did not send will never come."""
        sender.has_receipt = True
        sender.n_coming = min(sender.n_coming, int(sender.receipt[1]))
        for number, request in sender.posted.items():
            if number >= sender.n_coming:
                request.Cancel()

    # --- notes

    def look(self, rank: int, note: Integers) -> None:
        """Copy what a note names out of the sender's memory, and say so."""
        started = time.perf_counter()
        sender = self._senders.get(rank)
        width = 3 + 3 * len(self._plan.blocks.shape)
        n_rows, n_more = divmod(len(note) - 3, width)
        if n_more:
            self._report_list(None, rank)
        tiles: dict[int, list[Region]] = {}
        for row in note[3 : 3 + n_rows * width].reshape(n_rows, width).tolist():
            region = self._take(sender, rank, row)
            if region is not None:
                tiles.setdefault(row[0], []).append(region)
        if sender is not None:
            numbers = range(sender.n_seen, sender.n_seen + int(note[2]))
            for number, part in enumerate(sender.parts[numbers.start : numbers.stop], numbers.start):
                if not _are_all_of(part.region, tiles.pop(number, [])):
                    self._report_list(part.region, rank)
            for number in tiles:  # notes come in order
                self._report_list(sender.parts[number].region, rank)
            sender.n_seen = numbers.stop
        self.copy_seconds += time.perf_counter() - started
        shares = self._segments.get(rank)
        self._traffic.tell(rank, np.array([ACK, note[1]], dtype=np.int64), None if shares is None else shares.bell)

    def _take(self, sender: _Peer | None, rank: int, row: list[int]) -> Region | None:
        """Copy what one row of a note names. What cannot be is reported, never raised: the sender waits for the answer."""
        n = len(self._plan.blocks.shape)
        try:
            region = Region(tuple(row[1 : 1 + n]), tuple(row[1 + n : 1 + 2 * n]))
        except ValueError:
            self._report_list(None, rank)
            return None
        part = sender.parts[row[0]] if sender is not None and 0 <= row[0] < len(sender.parts) else None
        if sender is None or sender.shares is None or part is None or not part.region.contains(region):
            self._report_list(region, rank)
            return None
        piece = self._pieces[part.shard].view(region)
        try:
            values: Array = np.ndarray(region.shape, piece.dtype, sender.shares.data, row[1 + 2 * n], row[2 + 2 * n : -1])
        except (TypeError, ValueError):  # outside the sender's memory
            self._report_list(region, rank)
            return None
        np.copyto(piece, values, casting="no")
        if self._checksums and (found := checksum(piece, self._traffic.seed)) != row[-1]:
            self._report_sum(part, rank, found, row[-1])
        self._count(part, region)
        return region

    # --- is it all there?

    def check(self, is_whole: bool) -> None:
        """Compare receipts and counts; `is_whole`: whether this rank itself read all that it should have."""
        for sender in self._senders.values():
            self._check_receipt(sender)
        if is_whole and all(sender.receipt[0] for sender in self._senders.values()):
            self._check_coverage()

    def _check_receipt(self, sender: _Peer) -> None:
        went_well, n_sent, proof, *sums = (int(v) for v in sender.receipt)
        if not went_well:
            return  # that rank raises, and all ranks agree on its error
        if (n_sent, proof) != (len(sender.parts), sender.identity):
            self._report_list(sender.parts[0].region, sender.rank)
        for part, theirs, ours in zip(sender.parts, sums, sender.sums, strict=False):
            if theirs != ours:
                self._report_sum(part, sender.rank, ours, theirs)

    def _check_coverage(self) -> None:
        """Every element of every piece must have arrived: what nobody sent is whatever was in memory before."""
        for shard, found in self.n_arrived.items():
            wanted = self._n_wanted[shard]
            if found != wanted and self.problem is None:
                region = self._plan.true_region(shard)
                self.problem = ShardloadError(
                    f"{found} elements arrived for the shard {region}, which has {wanted}: nothing was loaded. This is a "
                    "defect in shardload; please report it with the shape, the mesh and the spec"
                )

    def _report_list(self, region: Region | None, rank: int) -> None:
        if self.problem is None:
            which = "without a region" if region is None else str(region)
            self.problem = PeerError(
                f"the part {which} that came from rank {rank} is not what this rank expects: the sender's list of regions "
                "is not "
                "the one that was expected. Nothing was loaded. This is a defect in shardload; please report it with the "
                "shape, "
                "the mesh and the spec",
                rank=rank,
            )

    def _report_sum(self, part: Part, rank: int, ours: int, theirs: int) -> None:
        if self.problem is None:
            self.problem = PeerError(
                f"the part {part.region} that came from rank {rank} is not what was sent: its checksum is {ours:08x}, the "
                "sender's "
                f"is {theirs:08x}. The load is void; if it happens again, suspect the network or memory of these two nodes",
                rank=rank,
            )


def _are_all_of(region: Region, tiles: list[Region]) -> bool:
    """Whether these, as cells of a grid, are all of a region, each element once.

    >>> half = Region((0,), (2,))
    >>> _are_all_of(Region((0,), (4,)), [half, Region((2,), (4,))]), _are_all_of(Region((0,), (4,)), [half, half])
    (True, False)
    """
    n_cells = 1
    for axis in range(region.ndim):
        cuts = sorted({(tile.start[axis], tile.stop[axis]) for tile in tiles})
        ends = [region.start[axis], *(stop for _, stop in cuts)]
        if [start for start, _ in cuts] != ends[:-1] or ends[-1] != region.stop[axis]:
            return False
        n_cells *= len(cuts)
    return len(tiles) == len(set(tiles)) == n_cells
