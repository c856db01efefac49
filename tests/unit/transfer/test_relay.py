"""Do parts that travel in bundles over relays arrive, each once and where it belongs, and is found what relays do wrong?

Ranks in threads. The value of an element is its own flat index, with an offset for each array; meshes are permuted.
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardload.errors import PeerError, ShardloadError
from shardload.planning.halo import Halo, HaloShards
from shardload.planning.hops import N_HOPS, NODES, TWO_HOPS, EvenNodes, Hops, least_bundle_nbytes, node_map
from shardload.planning.schedule import Grid, RankBoxes, Schedule, plan_shards
from shardload.planning.selection import select_axes
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import Parallel
from shardload.transfer import bundles, exchange, relay
from shardload.transfer.arrivals import Arrivals
from shardload.transfer.buffers import Piece, StagedBlock, Tile
from shardload.transfer.bundles import BLOCK, NBYTES, RECEIVER, SECTION, Outbox, groups_of
from shardload.transfer.channels import Channels
from shardload.transfer.local_pieces import LocalPieces
from shardload.transfer.moves import ArrayMove, BlocksToPieces
from shardload.transfer.reader import SourceReader
from shardload.transfer.resources import Resources
from tests.unit.fakes import FakeSource, pieces_of
from tests.unit.transfer.network import FakeTransport, Network, exchange_all, leave_no_memory, ranks_of

Array = np.ndarray[Any, Any]
NBYTES_OF_SLOT = 1 << 12
# Which ranks are on a node: also of different sizes, and in any order.
NODES_OF = {
    "two of two": [[0, 1], [2, 3]],
    "in turns": [[0, 2], [1, 3]],
    "three of different sizes": [[0, 3, 4], [1], [2, 5]],
    "seven": [[0, 8], [1], [2, 7], [3], [4], [5], [6]],
}


@dataclass(frozen=True)
class Given:
    """One array: its values, and how it is cut. `n_readers`: None for all."""

    values: Array
    block: tuple[int, ...]
    axes: list[tuple[int, ...]]
    n_readers: int | None = None
    halo: int = 0

    def schedule(self, n: int) -> Schedule:
        mesh = np.random.default_rng(7).permutation(n).reshape({4: (2, 2), 6: (3, 2), 9: (3, 3)}[n])
        shape = self.values.shape
        cut = plan_shards(shape, self.axes, mesh)
        if self.halo:
            cut = HaloShards.around(cut, Halo((self.halo, self.halo), ("wrap", "wrap")))
        readers = Parallel(min(n, self.n_readers or n))
        return Schedule(Grid(shape, self.block, (0,) * len(shape)), cut, self.values.itemsize, n, readers)


def ramp(shape: tuple[int, ...], dtype: str, first: int) -> Array:
    return np.arange(first, first + np.prod(shape), dtype=dtype).reshape(shape)


# The first and the last differ by their values alone; the second is held by several ranks; the third has sections that overlap.
GIVEN = [
    Given(ramp((18, 36), "f4", 0), (1, 36), [(0,), (1,)]),
    Given(ramp((6, 12, 2), "i8", 1 << 40), (1, 12, 2), [(), (1,), ()], 2),
    Given(ramp((12, 18), "u2", 3), (2, 18), [(0,), (1,)], halo=1),
    Given(ramp((36,), "u1", 3), (7,), [(1, 0)], 1),
    Given(ramp((18, 36), "f4", 500), (1, 36), [(0,), (1,)]),
]


@pytest.fixture(autouse=True)
def _no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "Transport", FakeTransport)


@dataclass
class Loads:
    """An exchange of arrays over relays. `bundle_nbytes`: little, so that a bundle leaves often."""

    nodes: list[list[int]]
    way: str
    given: list[Given] = field(default_factory=lambda: GIVEN)
    bundle_nbytes: int = 400
    n_slots: int = 2
    shares: bool = True
    straight: tuple[int, ...] = ()  # arrays without relays
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        self.n = sum(map(len, self.nodes))
        leaders = [min(node) for rank in range(self.n) for node in self.nodes if rank in node]
        self.hops = Hops.of(node_map(leaders), self.way)
        self.ranks = ranks_of(self.nodes, self.n_slots, NBYTES_OF_SLOT, self.bundle_nbytes, self.shares)
        self.arrays = [[self.move(rank, k) for k in range(len(self.given))] for rank in self.ranks]

    def move(self, rank: Any, k: int) -> ArrayMove:
        given, schedule = self.given[k], self.given[k].schedule(self.n)
        pieces = pieces_of(schedule, rank.number, given.values.dtype, 99)
        source = FakeSource(given.values, given.block)
        layout = SourceLayout(select_axes(None, given.values.shape), schedule.blocks, None, source.dtype, given.values.dtype)
        local, resources = LocalPieces(rank.number, pieces), Resources(rank.slots, rank.bell)
        reader = SourceReader(source, layout, local, resources)  # type: ignore[arg-type]
        flow = BlocksToPieces(schedule, None if k in self.straight else self.hops)
        return ArrayMove(flow, reader, pieces, given.values.dtype, None, 5 + k, f"array {k}")

    def run(self, checksums: bool = False) -> list[Any]:
        with ExitStack() as stack:
            for move in (move for arrays in self.arrays for move in arrays):
                stack.enter_context(move.producer)  # type: ignore[arg-type]
            return exchange_all(self.ranks, self.arrays, self.network, checksums)

    def errors(self, checksums: bool = False) -> list[BaseException]:
        """What the ranks find; AssertionError if none finds anything."""
        found = [error for error, _ in self.run(checksums) if error is not None]
        assert found, "nobody noticed"
        return found

    def check(self) -> None:
        for arrays in self.arrays:
            for given, move in zip(self.given, arrays, strict=True):
                for piece in move.targets.values():
                    np.testing.assert_array_equal(piece.data, given.values[piece.region.slices()], move.name)


@pytest.mark.each_value
@pytest.mark.parametrize("shares", [True, False], ids=["shared memory", "messages inside nodes"])
@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
@pytest.mark.parametrize("where", NODES_OF)
@pytest.mark.parametrize("checksums", [False, True])
def test_every_part_arrives_once(where: str, way: str, shares: bool, checksums: bool) -> None:
    """Wrong if a part were lost, doubled or given to another rank, an array taken for another, or a rank waited for ever."""
    n = sum(map(len, NODES_OF[where]))
    schedules = [given.schedule(n) for given in GIVEN]
    wanted = sum(
        part.region.size * given.values.itemsize
        for given, schedule in zip(GIVEN, schedules, strict=True)
        for rank in range(n)
        for parts in schedule.remote_parts(rank).values()
        for part in parts
    )
    loads = Loads(NODES_OF[where], way, shares=shares)
    found = loads.run(checksums)
    assert [error for error, _ in found] == [None] * loads.n
    loads.check()
    assert sum(moved.nbytes for _, moved in found) == wanted
    for rank in loads.ranks:
        assert rank.relay is not None
        assert rank.slots.n_taken == 0 and all(s.n_taken == 0 for s in (*rank.relay.arriving, *rank.relay.leaving))
    assert {hop for _, _, hop, _ in loads.network.bundles} >= ({0} if way == NODES else {0, 1})
    assert any(hop == 2 for _, _, hop, _ in loads.network.bundles) == (not shares)


@pytest.mark.each_value
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
def test_an_array_without_axes(way: str, checksums: bool) -> None:
    """Wrong if its one element were copied into a scalar that NumPy made, and what was in the bundle were sent."""
    loads = Loads(NODES_OF["three of different sizes"], way, [Given(np.array(41, "f4"), (), [], 1), GIVEN[3]])
    assert [error for error, _ in loads.run(checksums)] == [None] * loads.n
    loads.check()


@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
def test_arrays_with_and_without_relays_in_one_exchange(way: str) -> None:
    """Wrong if parts that go straight were lost beside those that do not."""
    loads = Loads(NODES_OF["three of different sizes"], way, straight=(0, 3))
    assert [error for error, _ in loads.run(True)] == [None] * loads.n
    loads.check()


def test_one_bundle_for_a_node_where_there_was_a_message_for_each_part() -> None:
    """Wrong if a sender still sent each part by itself: with room for all, one bundle goes to each other node."""
    for way, most in ((NODES, 6), (TWO_HOPS, 3 + 2)):
        loads = Loads(NODES_OF["seven"], way, bundle_nbytes=1 << 14)
        for rank in loads.ranks:
            assert rank.relay is not None
            for slots in rank.relay.leaving:
                slots._n_left = 8
        assert [error for error, _ in loads.run()] == [None] * loads.n
        sent = Counter(sender for sender, _, _, _ in loads.network.bundles)
        assert max(sent.values()) <= most


@pytest.mark.each_value
@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
@pytest.mark.parametrize("where", ["in turns", "seven"])
def test_a_sender_that_fails_keeps_its_promises(where: str, way: str) -> None:
    """Wrong if a rank waited for ever, took what it has for all there is, or blamed a relay."""
    for shares in (True, False):
        loads = Loads(NODES_OF[where], way, shares=shares)
        loads.arrays[2][0].producer._ways._source.fails = lambda region: OSError("gone")  # type: ignore[attr-defined]
        found = [error for error, _ in loads.run()]
        assert isinstance(found[2], ShardloadError) and "gone" in str(found[2])
        assert [error for k, error in enumerate(found) if k != 2] == [None] * (loads.n - 1)


@pytest.mark.each_value
@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
@pytest.mark.parametrize("shares", [True, False])
def test_a_receiver_that_fails_keeps_its_promises(way: str, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a rank that has no memory left while a part arrives let a relay wait, or lost what it is to pass on."""
    loads = Loads(NODES_OF["two of two"], way, shares=shares)
    leave_no_memory(monkeypatch, loads.arrays[1])
    errors = [error for error, _ in loads.run()]
    assert isinstance(errors.pop(1), MemoryError)
    assert errors == [None] * 3


def patch_relays(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], Any], rank: int = 1) -> None:
    """Let one rank pass on other groups than came to it."""
    right = relay.Relays._pass_on

    def wrong(self: Any, inbox: Any, sender: int, held: Any, message: Any) -> Iterator[None]:
        if self._rank == rank:
            message = change(self, message)
        return right(self, inbox, sender, held, message)

    monkeypatch.setattr(relay.Relays, "_pass_on", wrong)


def sealed(message: Any, change: Callable[[Any, Any], None]) -> Any:
    """The same bundle with other rows or values, and a head that says that these are right."""
    flags, groups = groups_of(message)
    for rows, values in groups:
        change(rows, values)
    made = bundles.Bundle(bundles.Slot(message, True))
    at = 16
    for rows, values in groups:
        made.groups.append((at + 8, len(rows)))
        at += 8 + rows.nbytes + -(-len(values) // 4) * 4
    made.n_used = at
    return made.seal(flags)


def swap_receivers(rows: Any, values: Any) -> None:
    for row in rows:
        row[RECEIVER] ^= 1  # both are on the relay's node


def swap_blocks(rows: Any, values: Any) -> None:
    rows[:, [BLOCK, SECTION]] = np.roll(rows[:, [BLOCK, SECTION]], 1, axis=0)


def of_another_array(rows: Any, values: Any) -> None:
    rows[rows[:, bundles.ARRAY] == 0, bundles.ARRAY] = 4


LISTS = "the sender's list of regions is not the one that was expected"
DEFECTS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "a relay swaps two ranks of its node": (swap_receivers, LISTS),
    "a relay swaps parts": (swap_blocks, LISTS),
    "a relay takes one array for another": (of_another_array, LISTS),
}


@pytest.mark.each_value
@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
@pytest.mark.parametrize("name", DEFECTS)
def test_what_a_relay_confuses_is_found(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checksums. Wrong if the receiver believed a relay instead of its own plan. The error names part and sender."""
    change, text = DEFECTS[name]
    patch_relays(monkeypatch, lambda self, message: sealed(message, change))
    found = Loads(NODES_OF["two of two"], way).errors()
    assert all(isinstance(error, PeerError) for error in found)
    assert any(text in str(error) or "did not arrive" in str(error) for error in found), found


@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
def test_a_relay_that_drops_its_last_bundle(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if what a relay lost were not missed: it says itself that all went well."""

    def drop(self: Any, message: Any) -> Any:
        flags, groups = groups_of(message)
        if not flags & bundles.LAST or not groups:
            return message
        made = bundles.Bundle(bundles.Slot(message, True))
        return made.seal(flags)

    patch_relays(monkeypatch, drop)
    found = Loads(NODES_OF["two of two"], way, bundle_nbytes=1 << 13).errors()
    assert all(isinstance(error, PeerError) and "did not arrive" in str(error) and "of array" in str(error) for error in found)


@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
def test_a_relay_that_passes_on_the_bundle_before_again(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that was used again too early, or too late: wrong if a part were taken twice."""
    last: list[Any] = []

    def stale(self: Any, message: Any) -> Any:
        kept = message.copy()
        _, groups = groups_of(message)
        if groups and not last:
            last.append(kept)
            return message
        flags, _ = groups_of(message)
        return message if flags & bundles.LAST or not last else last[0]

    patch_relays(monkeypatch, stale)
    found = Loads(NODES_OF["two of two"], way).errors()
    assert all(isinstance(error, PeerError) for error in found) and any(LISTS in str(error) for error in found)


@pytest.mark.each_value
@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
@pytest.mark.parametrize("what", ["a value", "a row", "a receiver", "the head"])
def test_a_byte_that_changes_in_a_relay(what: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a damaged row led a part elsewhere (found always), or a changed value were believed (found by checksums)."""
    done: list[int] = []

    def flip(self: Any, message: Any) -> Any:
        _, groups = groups_of(message)
        if groups and not done:
            done.append(1)
            _, values = groups[-1]
            if what == "a value":
                values[len(values) // 2] ^= 1
            else:
                row = 16 + 8  # the first one
                message[{"a row": row + 4 * NBYTES, "a receiver": row + 4 * RECEIVER, "the head": 8}[what]] ^= 1
        return message

    patch_relays(monkeypatch, flip)
    found = Loads(NODES_OF["two of two"], way).errors(checksums=True)
    assert all(isinstance(error, PeerError) for error in found)
    text = "its checksum is" if what == "a value" else "a bundle of parts that came from rank"
    assert any(text in str(error) for error in found), found


def test_a_value_that_changes_is_not_found_without_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of what is checked always: places, not values."""

    def change(self: Any, message: Any) -> Any:
        for _, values in groups_of(message)[1]:
            values[0] ^= 1
        return message

    patch_relays(monkeypatch, change)
    loads = Loads(NODES_OF["two of two"], NODES, [GIVEN[0]])
    assert [error for error, _ in loads.run()] == [None] * 4
    with pytest.raises(AssertionError):
        loads.check()


@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
def test_a_relay_that_fails_passes_on_what_it_still_can(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the others waited for ever for a relay that could not handle a bundle."""
    right, done = groups_of, []

    def wrong(message: Any) -> Any:
        if not done:
            done.append(1)
            raise MemoryError("no memory")
        return right(message)

    monkeypatch.setattr(relay, "groups_of", wrong)
    found = [error for error, _ in Loads(NODES_OF["seven"], way).run()]
    assert [type(error) for error in found if error is not None] == [MemoryError]


def test_a_slow_relay_holds_up_its_senders_and_nothing_is_lost() -> None:
    """Wrong if what waits for a relay got lost: rank 1 gets nothing until the others have sent what they can."""
    loads = Loads(NODES_OF["seven"], NODES)
    turns = Counter[int]()

    def late(sender: int, receiver: int) -> bool:
        turns[receiver] += 1
        return receiver != 1 or turns[1] % 50 == 0

    loads.network = Network(may_arrive=late)
    assert [error for error, _ in loads.run(True)] == [None] * loads.n
    loads.check()


@pytest.mark.parametrize("way", [NODES, TWO_HOPS])
def test_relays_that_have_ended_keep_no_target(way: str) -> None:
    """Wrong if they made a circle: the memory of the pieces would then stay until Python looks for circles."""
    loads = Loads(NODES_OF["two of two"], way)
    gc.collect()
    gc.disable()
    try:
        loads.run()
        pieces = [weakref.ref(piece) for arrays in loads.arrays for move in arrays for piece in move.targets.values()]
        loads.arrays.clear()
        assert len(pieces) > 16 and [piece() for piece in pieces] == [None] * len(pieces)
    finally:
        gc.enable()


def test_a_part_that_no_bundle_has_room_for() -> None:
    box = Outbox(None, 0, bundles.Slots(2, 100))  # type: ignore[arg-type]
    assert least_bundle_nbytes(44) == 100
    assert box.reserve(3, np.array([44, 4])) is not None
    with pytest.raises(ValueError, match="a part of 45 bytes for bundles of 100"):
        Outbox(None, 0, bundles.Slots(2, 100)).reserve(3, np.array([45]))  # type: ignore[arg-type]


class Counting(FakeTransport):
    """Keeps what is sent; nothing arrives."""

    def __init__(self, rank: int) -> None:
        super().__init__(SimpleNamespace(rank=rank, size=1, network=Network()), (0, 1, 2), {})


def relays_of(rank: int, n: int, per_node: int) -> tuple[relay.Relays, Schedule, Hops]:
    """One rank of a job of n x n, for planes loaded as pencils over two hops."""
    shape, f4 = (2 * n, n, 2 * n), np.dtype("f4")
    shards = plan_shards(shape, [(), (0,), (1,)], RankBoxes.in_order((n, n)))  # type: ignore[arg-type]
    schedule = Schedule(Grid(shape, (1, n, 2 * n), (0, 0, 0)), shards, 4, n * n, Parallel(2 * n))
    hops = Hops.of(EvenNodes(n * n, per_node), TWO_HOPS)
    targets = {s: Piece(shards.region(s), np.zeros(shards.shard_shape, f4)) for s in shards.shards_of(rank)}
    move = ArrayMove(BlocksToPieces(schedule, hops), None, targets, f4)  # type: ignore[arg-type]
    arrivals = Arrivals([move], lambda nbytes: None, [lambda piece: None])
    channels = Channels(Counting(rank), [move], arrivals, None, None, False)  # type: ignore[arg-type]
    slots = [[bundles.Slots(2, 1 << 14) for _ in range(N_HOPS)] for _ in range(2)]
    slots[1][0] = bundles.Slots(2 * hops.n_columns, 1 << 16)
    return relay.Relays(channels, [move], relay.RelayBuffers(*slots)), schedule, hops


@pytest.mark.parametrize("rank", [0, 128, 40_001, 65_535])
def test_tables_of_a_rank_of_many_are_as_long_as_its_partners(rank: int) -> None:
    """65,536 ranks on 16,384 nodes. Objects are counted: wrong if a rank had one for each rank, node or sender."""
    relays, schedule, hops = relays_of(rank, 256, 4)
    tracemalloc.start()
    try:
        relays.expect()
        near = BlocksToPieces(schedule, hops).incoming(rank)
        n_objects = sum(stat.count for stat in tracemalloc.take_snapshot().statistics("filename"))
    finally:
        tracemalloc.stop()
    n_partners = 128 + 127
    waiting = [len(inbox.waiting) for inbox in relays._inboxes]
    assert len(near) <= 3 and waiting[1] == 127 and waiting[0] <= 128 and sum(map(len, relays._relayed.values())) <= 512
    assert n_objects < 4 * n_partners


def test_a_block_for_65_536_ranks_is_sent_to_as_many_partners_as_there_are_columns() -> None:
    """Wrong if a message, or an object that stays, were made for each part."""
    relays, schedule, hops = relays_of(128, 256, 4)
    (block,) = schedule.owned_blocks(128)
    values = np.arange(block.region.size, dtype="f4").reshape(block.region.shape)
    staged = StagedBlock(block, [Tile(block.region, values)], n_sending=1)
    assert len(relays.for_reading(0, block).parts) == 2, "its own part, and one for all others"
    near = relays.put(0, staged)
    assert near is not None and len(near) == 4
    tracemalloc.start()
    try:
        assert relays.send_queued() and relays.is_empty
        n_objects = sum(stat.count for stat in tracemalloc.take_snapshot().statistics("filename"))
    finally:
        tracemalloc.stop()
    assert n_objects < 40 * hops.n_columns
    relays.end_sending(True)
    for ending in relays._ending:
        assert [*ending] == []
    sent = relays._transport._sends  # type: ignore[attr-defined]
    assert len(sent) == hops.n_columns
    seen = np.zeros(1 << 16, dtype=int)
    for (message, _), _ in sent:
        for rows, packed in groups_of(message)[1]:
            for receiver, one in zip(rows[:, RECEIVER].tolist(), packed.view("f4").reshape(-1, 2).tolist(), strict=True):
                seen[receiver] += 1
                assert one == [2 * receiver, 2 * receiver + 1]
    seen[128:132] += 1
    assert (seen == 1).all()
