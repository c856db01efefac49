"""Is a note where to look followed only where it names what is expected there, and is every note answered?

Rank 0 reads, rank 1 receives; both are here, and what they tell each other is passed by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardload.comm.shared_memory import Segment
from shardload.comm.transport import MpiTransport
from shardload.errors import PeerError
from shardload.planning.region import Grid, Region
from shardload.planning.schedule import Owners, Schedule
from shardload.planning.shards import plan_shards
from shardload.transfer.buffers import Packer, Piece, Slots, StagedBlock
from shardload.transfer.channels import ACK, HEAD_SIZE, Channels
from shardload.transfer.moves import ArrayMove, Arrivals
from tests.unit.fakes import TABLE

F4 = np.dtype("f4")
N = 2  # axes
START, STOP, AT, STRIDES = slice(0, 2), slice(2, 4), 4, slice(5, 7)  # of a row
N_PARTS = 2  # in the head of an offer
INFINITY = 1 << 62


class FakeTransport(MpiTransport):
    """Keeps notes, instead of sending them."""

    def __init__(self, rank: int, segments: dict[int, Segment]) -> None:
        super().__init__(rank, None, None, (0, 1), segments)
        self.messages: list[tuple[int, Any]] = []

    def send(self, rank: int, values: Any, on_done: Any) -> None:
        raise AssertionError("a message with values")

    def send_note(self, rank: int, note: Any) -> None:
        self.messages.append((rank, note))


class Ranks:
    """TABLE, cut into rows of chunks; rank 0 reads all of it, rank 1 holds the right half, in one piece or two."""

    def __init__(self, checksums: bool = True, seeds: tuple[int, int] = (77, 77), n_pieces: int = 1) -> None:
        shards = plan_shards((8, 4), [(), (0,)], np.repeat([0, 1], n_pieces))
        self.plan = Schedule(Grid((8, 4), (4, 4), (0, 0)), shards, 4, 2, Owners())
        made = Segment.create(4096)
        self.segments = {0: made, 1: Segment.attach(made.handle)}
        made.seal()
        self.own = made.data
        self.own[...] = 200
        self.slots = Slots(2, 256, self.own)
        self.there, self.here = FakeTransport(0, self.segments), FakeTransport(1, {0: self.segments[1]})
        self.piece = Piece(Region((0, 2), (8, 4)), np.full((8, 2), -1, F4))
        self.advanced: list[int] = []
        self.complete: list[Piece] = []
        flow, self.packs = self.plan, Slots(2, 256, self.own[512:])
        sent, arriving = (ArrayMove(0, flow, F4, seed=seed) for seed in seeds)
        halves = {2: Region((0, 2), (8, 3)), 3: Region((0, 3), (8, 4))}
        pieces = {k: Piece(region, self.piece.view(region)) for k, region in halves.items()}
        arriving.targets, arriving.on_complete = {1: self.piece} if n_pieces == 1 else pieces, self.complete.append
        self.sending = Channels(self.there, [sent], Arrivals([sent]), Packer(self.packs), checksums)
        self.arrivals = Arrivals([arriving], self.advanced.append)
        self.receiving = Channels(self.here, [arriving], self.arrivals, Packer(self.packs), checksums)
        self.receiving.expect()

    def put(self) -> list[Any]:
        """Send both blocks; the notes."""
        for read in self.plan.outgoing(0):
            slot: Any = self.slots.take()
            data = slot[: 4 * read.region.size].view(F4).reshape(read.region.shape)
            data[...] = TABLE[read.region.slices()]
            block = StagedBlock(
                read, [Piece(read.region, data)], slot, self.slots.is_shared, lambda slot=slot: self.slots.give(slot)
            )
            self.sending.send(0, block)
            self.sending.send_queued()
        return [note for _, note in self.there.messages]

    def receipt(self) -> None:
        """Let the sender's receipt arrive."""
        self.there.messages.clear()
        self.sending.send_receipts(True)
        ((_, receipt),) = self.there.messages
        self.receiving.hear(0, receipt)

    def answer(self) -> list[int]:
        """Let the answers arrive; which notes they are of."""
        found = [(rank, *message.tolist()) for rank, message in self.here.messages]
        self.here.messages.clear()
        assert all(answer[:2] == (0, ACK) for answer in found)
        for *_, number in found:
            self.sending.acknowledged(1, number)
        return [number for *_, number in found]


def rows_of(note: Any) -> Any:
    return note[HEAD_SIZE:].reshape(-1, 1 + 3 * N)


def test_a_receipt_that_counts_parts_which_no_note_named() -> None:
    """Wrong if the receiver waited for them: notes and receipts have one tag and come in order, so no more will come."""
    ranks = Ranks()
    first, _ = ranks.put()
    ranks.receiving.hear(0, first)
    ranks.answer()
    ranks.receipt()
    assert ranks.receiving.is_done and not ranks.receiving._open
    ranks.receiving.check(True)
    assert isinstance(ranks.arrivals.errors.error, PeerError)
    assert "the sender's list of regions is not the one that was expected" in str(ranks.arrivals.errors.error)


HOSTILE: dict[str, tuple[Any, Any]] = {
    "below zero": (START, -1),
    "ends before it begins": (STOP, 0),
    "far outside": (STOP, INFINITY),
    "beside the part": (1, 1),
    "of another part": (slice(0, 4), (4, 2, 8, 4)),
    "before the memory": (AT, -4),
    "behind the memory": (AT, 4096),
    "reaches behind the memory": (AT, 4096 - 4),
    "far behind the memory": (AT, INFINITY),
    "strides behind the memory": (STRIDES, (4096, 4)),
    "strides before the memory": (STRIDES, (-16, 4)),
    "strides that overflow": (STRIDES, (INFINITY, INFINITY)),
}


@pytest.mark.each_value
@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("checksums", [False, True])
def test_a_note_that_cannot_be_right(what: str, checksums: bool) -> None:
    """Wrong if anything were written, or raised (the sender waits for the answer), or believed."""
    ranks = Ranks(checksums)
    notes = ranks.put()
    where, value = HOSTILE[what]
    rows_of(notes[0])[:, where] = value
    ranks.receiving.hear(0, notes[0])
    assert (ranks.piece.data == -1).all() and sum(ranks.advanced) == 0
    assert isinstance(ranks.arrivals.errors.error, PeerError) and ranks.arrivals.errors.error.rank == 0
    assert "the sender's list of regions is not the one that was expected" in str(ranks.arrivals.errors.error)
    ranks.receiving.hear(0, notes[1])
    assert ranks.answer() == [1, 2] and len(ranks.sending._offered) == 0
    np.testing.assert_array_equal(ranks.piece.data[4:], TABLE[4:, 2:])
    assert (ranks.piece.data[:4] == -1).all()
    ranks.receipt()
    assert ranks.receiving.is_done


ROWS: dict[str, Callable[[Any], Any]] = {
    "one twice": lambda rows: rows[[0, *range(len(rows) - 1)]],
    "swapped": lambda rows: rows[::-1],
    "without the last": lambda rows: rows[:-1],
    "without the first": lambda rows: rows[1:],
    "one more": lambda rows: rows[[*range(len(rows)), -1]],
    "none": lambda rows: rows[:0],
    "cut short": lambda rows: rows[:, :-1],
}


@pytest.mark.each_value
@pytest.mark.parametrize("change", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("checksums", [False, True])
def test_a_note_with_other_rows(change: Callable[[Any], Any], checksums: bool) -> None:
    """Wrong if one stood for another of the same size, or the receiver waited for what is not named."""
    ranks = Ranks(checksums, n_pieces=2)
    for k, note in enumerate(ranks.put()):
        rows = rows_of(note)
        assert len(rows) == 2
        if k == 0:
            changed = change(rows)
            note = np.concatenate([note[:HEAD_SIZE], changed.ravel()])
            note[N_PARTS] = len(changed)
        ranks.receiving.hear(0, note)
    assert ranks.answer() == [1, 2]
    ranks.receipt()
    assert ranks.receiving.is_done and not ranks.receiving._open
    ranks.receiving.check(True)
    assert isinstance(ranks.arrivals.errors.error, PeerError) and ranks.arrivals.errors.error.rank == 0


def test_a_note_of_a_rank_that_should_send_nothing() -> None:
    ranks = Ranks()
    note = ranks.put()[0]
    ranks.receiving.hear(5, note)
    assert (ranks.piece.data == -1).all()
    assert isinstance(ranks.arrivals.errors.error, PeerError) and ranks.arrivals.errors.error.rank == 5
    assert [rank for rank, _ in ranks.here.messages] == [5]


def test_other_values_than_when_the_checksum_was_taken() -> None:
    for checksums, is_elsewhere in itertools.product((False, True), (False, True)):
        ranks = Ranks(checksums)
        notes = ranks.put()
        if is_elsewhere:
            rows_of(notes[0])[0, AT] -= 4  # the element beside
        else:
            ranks.own[rows_of(notes[0])[0, AT]] ^= 1
        for note in notes:
            ranks.receiving.hear(0, note)
        assert ranks.answer() == [1, 2]
        ranks.receipt()
        ranks.receiving.check(True)
        assert (ranks.arrivals.errors.error is not None) == checksums
        assert not checksums or "is not what was sent: its checksum is" in str(ranks.arrivals.errors.error)


def test_an_answer_to_what_was_not_asked_names_who_gave_it() -> None:
    """Wrong if it were a KeyError, which says nothing, or were believed."""
    ranks = Ranks()
    ranks.put()
    for note in (3, 0, -1):
        with pytest.raises(PeerError, match=rf"^rank 1 answers note {note}, which rank 0 did not send.*defect") as found:
            ranks.sending.acknowledged(1, note)
        assert found.value.rank == 1
    ranks.sending.acknowledged(1, 2)
    with pytest.raises(PeerError, match="answered before"):
        ranks.sending.acknowledged(1, 2)
    assert len(ranks.sending._offered) == 1
