"""Do the parts of several arrays all arrive in one exchange, each where it belongs, and is what is mixed up found?

Four ranks in threads. The value of an element is its own flat index, with an offset for each array; the mesh is permuted.
"""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardload.comm.transport import MpiTransport
from shardload.errors import PeerError
from shardload.planning.region import Grid, Region
from shardload.planning.schedule import Owners, Schedule, SourceLayout
from shardload.planning.selection import select_axes
from shardload.planning.shards import plan_shards
from shardload.transfer import exchange
from shardload.transfer.buffers import Piece, Resources, Slots
from shardload.transfer.moves import ArrayMove
from shardload.transfer.pieces import LocalPieces
from shardload.transfer.reader import SourceReader
from tests.unit.fakes import FakeSource, pieces_of, reader_as_planned
from tests.unit.files import raising
from tests.unit.transfer.network import Network, Rank, exchange_all, leave_no_memory, ranks_of

Array = np.ndarray[Any, Any]
MESH = np.array([[2, 0], [3, 1]])
WAYS = {"messages": [[0], [1], [2], [3]], "shared memory": [[0, 1, 2, 3]], "both": [[0, 1], [2, 3]]}
NBYTES = 256  # of a slot: room for the largest block of all arrays


@dataclass(frozen=True)
class Given:
    """One array: its values, and how it is cut."""

    values: Array
    block: tuple[int, ...]
    axes: list[tuple[int, ...]]
    n_readers: int = 4
    is_fast: bool = True

    @property
    def schedule(self) -> Schedule:
        shape = self.values.shape
        cut = plan_shards(shape, self.axes, MESH)
        return Schedule(Grid(shape, self.block, (0,) * len(shape)), cut, self.values.itemsize, 4, Owners(self.n_readers))


def ramp(shape: tuple[int, ...], dtype: str, first: int) -> Array:
    return np.arange(first, first + np.prod(shape), dtype=dtype).reshape(shape)


# The first and the last look alike: they differ by their values alone.
GIVEN = [
    Given(ramp((8, 12), "f4", 0), (2, 12), [(0,), (1,)]),
    Given(ramp((6, 4, 2), "i8", 1 << 40), (3, 4, 2), [(1,), (), ()], 2),
    Given(ramp((16,), "u1", 3), (16,), [(1, 0)], 1),
    Given(ramp((8, 12), "f4", 500), (2, 12), [(0,), (1,)]),
]


@dataclass
class Loads:
    """An exchange of arrays from readers to pieces, on four ranks that hold the sources too."""

    way: str
    given: list[Given] = field(default_factory=lambda: GIVEN)
    n_slots: int = 2
    seeds: list[int] = field(default_factory=lambda: [5, 6, 7, 8])
    complete: list[list[tuple[int, Piece]]] = field(default_factory=lambda: [[] for _ in range(4)])

    def __post_init__(self) -> None:
        self.ranks = ranks_of(WAYS[self.way], self.n_slots, NBYTES)
        self.arrays = [[self.move(rank, k) for k in range(len(self.given))] for rank in self.ranks]

    def move(self, rank: Rank, k: int) -> ArrayMove:
        given, pieces = self.given[k], pieces_of(self.given[k].schedule, rank.number, self.given[k].values.dtype, 99)
        source, shape = FakeSource(given.values, given.block), given.values.shape
        layout = SourceLayout(select_axes(None, shape), given.schedule.blocks, None, source.dtype, given.values.dtype)
        local, resources = LocalPieces(rank.number, pieces), Resources(rank.slots, rank.bell)
        reader = reader_as_planned(source, layout, local, resources)
        note = lambda piece: self.complete[rank.number].append((k, piece))  # noqa: E731
        move = ArrayMove(k, given.schedule, given.values.dtype, f"array {k}")
        move.producer, move.targets, move.on_complete, move.seed = reader, pieces, note, self.seeds[k]
        return move

    def run(self, network: Network | None = None, checksums: bool = False) -> list[Any]:
        with ExitStack() as stack:
            for move in (move for arrays in self.arrays for move in arrays):
                if isinstance(move.producer, SourceReader):
                    stack.enter_context(move.producer)
            return exchange_all(self.ranks, self.arrays, network, checksums)

    def check(self) -> None:
        """All pieces of all ranks hold what is theirs."""
        for arrays in self.arrays:
            for given, move in zip(self.given, arrays, strict=True):
                for piece in move.targets.values():
                    np.testing.assert_array_equal(piece.data, given.values[piece.region.slices()], move.name)


@pytest.mark.each_value
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_every_part_of_every_array_arrives(way: str, n: int, checksums: bool) -> None:
    """Wrong if parts of arrays with equal regions were confused, or if the types of two arrays were."""
    loads = Loads(way, GIVEN[-n:], seeds=[5] * n)
    found = loads.run(checksums=checksums)
    assert [error for error, _ in found] == [None] * 4
    loads.check()
    pieces = [piece for arrays in loads.arrays for move in arrays for piece in move.targets.values()]
    told = [piece for complete in loads.complete for _, piece in complete]
    assert {id(piece) for piece in told} == {id(piece) for piece in pieces} and len(told) == len(pieces)
    from_others = sum(
        part.region.size * given.values.itemsize
        for given in loads.given
        for rank in range(4)
        for parts in given.schedule.incoming(rank).values()
        for part in parts
    )
    assert sum(counters.nbytes_received for _, counters in found) == from_others
    assert all((counters.n_checksums > 0) == checksums for _, counters in found if counters.nbytes_received)
    assert all(rank.slots.has_room() and rank.pack_slots.has_room() for rank in loads.ranks)


@pytest.mark.parametrize("way", WAYS)
def test_reading_goes_on_with_the_next_array_while_parts_still_travel(way: str) -> None:
    """Wrong if ranks waited for each other between two arrays: nothing arrives before the last array is being read."""
    loads = Loads(way, [GIVEN[0], GIVEN[3]], n_slots=8)
    begun = threading.Barrier(4)
    last_is_begun = threading.Event()

    def begin(region: Region) -> None:
        begun.wait(20)
        last_is_begun.set()

    for arrays in loads.arrays:
        arrays[1].producer._source.fails = begin  # type: ignore[attr-defined]
        assert arrays[1].producer._source.reads == []  # type: ignore[attr-defined]
    network = Network(may_arrive=lambda sender, receiver: last_is_begun.is_set())
    assert [error for error, _ in loads.run(network)] == [None] * 4
    loads.check()


@pytest.mark.parametrize("way", WAYS)
def test_a_receiver_that_fails_keeps_its_promises(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a rank that has no memory left while a part arrives did not answer: its sender would wait for ever."""
    loads = Loads(way)
    leave_no_memory(monkeypatch, loads.arrays[1])
    errors = [error for error, _ in loads.run()]
    assert isinstance(errors.pop(1), MemoryError)
    assert errors == [None] * 3


@pytest.mark.each_value
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_has_two_arrays_in_another_order(way: str, checksums: bool) -> None:
    """Wrong if receipts ignored which array a region is of: these two look alike, and only their values would differ."""
    loads = Loads(way, [GIVEN[0], GIVEN[3]], seeds=[5, 6])
    loads.arrays[2].reverse()
    found = [error for error, _ in loads.run(checksums=checksums) if error is not None]
    assert found and all(isinstance(error, PeerError) for error in found)


@pytest.mark.each_value
@pytest.mark.parametrize("n_slots", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_overtakes_what_waits_for_the_same_rank(way: str, n_slots: int) -> None:
    """Wrong if the parts of an array that can go at once were sent before those of the one before, which wait to be packed.

    One slot: wrong too if the next array's block took it and then waited for them.
    """
    loads = Loads(way, [GIVEN[1], GIVEN[0], GIVEN[3]], n_slots=n_slots)
    for arrays in loads.arrays:
        arrays[1].producer._source.shows = GIVEN[0].values  # type: ignore[attr-defined]
    assert [error for error, _ in loads.run()] == [None] * 4
    loads.check()


def test_equal_regions_of_two_blocks_are_packed_each() -> None:
    """Wrong if the copy made for one array were sent for another one that has the same region."""
    whole = [replace(given, block=(8, 3), axes=[(), (0, 1)], n_readers=1) for given in (GIVEN[0], GIVEN[3])]
    loads = Loads("messages", [replace(given, block=(4, 12)) for given in whole], n_slots=4)
    assert [error for error, _ in loads.run()] == [None] * 4
    loads.check()


@pytest.mark.parametrize("way", WAYS)
def test_an_exchange_that_has_ended_keeps_no_target(way: str) -> None:
    """Wrong if its objects made a circle: the memory of the pieces would then stay until Python looks for circles."""
    loads = Loads(way)
    loads.arrays = [[replace(move, on_complete=None) for move in arrays] for arrays in loads.arrays]
    gc.collect()
    gc.disable()
    try:
        loads.run()
        pieces = [weakref.ref(piece) for arrays in loads.arrays for move in arrays for piece in move.targets.values()]
        loads.arrays.clear()
        assert len(pieces) == 16 and [piece() for piece in pieces] == [None] * len(pieces)
    finally:
        gc.enable()


def test_what_mpi_may_write_into_is_kept_after_an_interruption_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a buffer of a message that is under way were freed, or if all pieces were kept for ever, Ctrl-C after Ctrl-C."""
    monkeypatch.setattr(exchange, "abandoned", [])
    monkeypatch.setattr(exchange, "_Exchange", lambda *_: SimpleNamespace(run=raising(KeyboardInterrupt())))
    transport = MpiTransport(0, None, None, (2, 3), {})
    of_message, of_piece = np.zeros(8), np.zeros(8)
    transport._add(SimpleNamespace(), lambda: None, of_message[2:4])
    transports = [transport]
    group: Any = SimpleNamespace(transport=lambda *_: transports.pop(), forget_shared_memory=lambda: None)
    move = ArrayMove(0, GIVEN[2].schedule, of_piece.dtype, targets={0: Piece(Region((0,), (8,)), of_piece)})
    outgoing: Any = None
    with pytest.raises(KeyboardInterrupt), Resources(Slots(0, 0)) as resources:
        exchange.exchange(group, exchange.open_channels(group, [move], resources, tags=(2, 3)), resources, outgoing)
    memory = [weakref.ref(of_message), weakref.ref(of_piece)]
    del transport, group, move, resources, of_message, of_piece
    gc.collect()  # pytest keeps the error, and with it the call, for a while
    assert [reference() is not None for reference in memory] == [True, False]
