"""How do the parts of an array reach other nodes over relays, and how does everybody know that all have arrived?

Each rank may be three things at once (`planning.hops` says for whom):

1. A *sender* puts the parts of its blocks into bundles, one for each relay, and sends a bundle when it is full.
2. A *relay* has a few buffers for the bundles that come to it, apart for each hop, so that a bundle of the second hop never
   waits for one of the first. What is for its own node it offers to the ranks there, as a staged block is offered: they copy
   the values out of its memory and acknowledge. What is for another node goes into a bundle of the next hop. (Where ranks of a
   node cannot share memory, a third hop goes from the relay to each of them.)
3. A *receiver* compares each part with its own plan: that it is expected, that it comes once, that it is for this rank and from
   the rank that owns the block; with checksums, also that its values are those which the first sender had.

The end: the last bundle to a relay says so. A relay that has got all of them ends its own next hop in the same way; then it
tells the ranks of its node. A rank that fails says so in its last bundles, and what follows from them says it too: so all
complete what they owe, and none waits for what will not come.

No call blocks, and buffers of a hop become free as those of later hops do; those of the last hop become free as the ranks of
the node copy, which need nothing for that. So no order of ranks can deadlock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.transport import Integers
from shardload.planning.grid import IntArray
from shardload.planning.hops import N_HOPS
from shardload.planning.parts import Block, Part, PartTable
from shardload.planning.region import Region
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.buffers import Slot, Slots, StagedBlock
from shardload.transfer.bundles import (
    ARRAY,
    BLOCK,
    FAILED,
    LAST,
    NBYTES,
    PROOF,
    RECEIVER,
    ROW_SIZE,
    SECTION,
    SENDER,
    SUM,
    Outbox,
    Reserved,
    groups_of,
    proof_of,
    proofs_of,
)
from shardload.transfer.channels import ACK, DONE, HEAD_SIZE, PASSED, Channels, one_less
from shardload.transfer.checksum import checksum
from shardload.transfer.moves import ArrayMove, Relayed

__all__ = ["RelayBuffers", "Relays"]

_ROW, _COLUMN, _NODE = range(N_HOPS)
_MOST_ROWS = 1 << 14  # of a part table that are looked at together
_LEAST_GATHERED, _MOST_GATHERED = 8, 1 << 10  # parts of as many elements are copied together
_MANY_PARTS = 1 << 12  # of a block: from here on its reader is not told each of them

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class RelayBuffers:
    """Memory for bundles: for each hop, slots of those that come (in shared memory, if there is any) and of those that go."""

    arriving: Sequence[Slots]
    leaving: Sequence[Slots]

    @property
    def peak_nbytes(self) -> int:
        """Peak number of bytes in use."""
        return sum(slots.peak_nbytes for slots in (*self.arriving, *self.leaving))


@dataclass
class _Held:
    """A bundle that has come, and how many still need its memory."""

    slots: Slots
    slot: Slot
    n: int = 1

    def less(self) -> None:
        self.n -= 1
        if not self.n:
            self.slots.give(self.slot)


class _Inbox:
    """The bundles of one hop that come to this rank. `waiting`: the ranks whose last bundle has not come."""

    def __init__(self, hop: int, slots: Slots, waiting: set[int]) -> None:
        self.hop, self.slots, self.waiting = hop, slots, waiting
        self.n_receiving = 0
        self.todo: deque[Iterator[None]] = deque()

    @property
    def is_done(self) -> bool:
        """True if all has come and has been passed on."""
        return not self.waiting and not self.todo and not self.n_receiving


class Relays:
    """What one rank does for parts that travel over relays.

    Parameters
    ----------
    channels : Channels
        The channels of this exchange: its messages, what has arrived, offers.
    arrays : sequence of ArrayMove
        All arrays; those whose flow has relays are meant. They have the same ones.
    buffers : RelayBuffers
        Memory for bundles.
    """

    def __init__(self, channels: Channels, arrays: Sequence[ArrayMove], buffers: RelayBuffers) -> None:
        self._channels, self._transport, self._arrivals = channels, channels.transport, channels.arrivals
        self._arrays, self._rank, self._checksums = arrays, channels.transport.rank, channels.checksums
        self._moves = {number: array for number, array in enumerate(arrays) if array.flow.hops is not None}
        self._hops = next(array.flow.hops for array in self._moves.values() if array.flow.hops is not None)
        ranks = self._hops.ranks
        self._node = ranks.node(self._rank)
        members = (ranks.rank(self._node, k) for k in range(ranks.n_members(self._node)))
        self._others = [rank for rank in members if rank != self._rank]
        self._shares = any(map(self._transport.shares_memory, self._others))
        self._out = [Outbox(self._transport, hop, slots) for hop, slots in enumerate(buffers.leaving)]
        self._queue: deque[tuple[StagedBlock, Iterator[None]]] = deque()
        self._owed: set[int] = set()  # relays that this rank has parts for, or had before it failed
        self._relay_of: dict[int, int] = {}  # of each column
        self._ending: list[Iterator[None]] = []
        self._has_ended = [False] * N_HOPS
        self.went_well = True
        self._relayed: dict[int, Relayed] = {}
        self._has_come: dict[int, Array] = {}
        self._inboxes = [_Inbox(hop, slots, set()) for hop, slots in enumerate(buffers.arriving)]
        self._not_told = {*self._others} if self._shares else set[int]()  # ranks of this node that may still offer parts

    def expect(self) -> None:
        """Find out which parts come to this rank, and which ranks send it bundles."""
        self._relayed = {number: array.flow.relayed(self._rank) for number, array in self._moves.items()}
        self._has_come = {number: np.zeros(len(parts), dtype=bool) for number, parts in self._relayed.items()}
        self._inboxes[_ROW].waiting |= self._first_senders()
        self._inboxes[_COLUMN].waiting |= {*self._hops.second_senders(self._rank)}
        if not self._shares:
            self._inboxes[_NODE].waiting |= {*self._others}

    def _first_senders(self) -> set[int]:
        """The ranks from which bundles of the first hop come."""
        hops, rank = self._hops, self._rank
        if not hops.is_one_hop:
            flows = [array.flow for array in self._moves.values()]
            return {sender for sender in hops.first_senders(rank) if any(flow.sends(sender) for flow in flows)}
        # With one hop, exactly those that have a part for a rank of this node.
        known = [parts.sender for parts in self._relayed.values()]
        known += [array.flow.relayed(other).sender for other in self._others for array in self._moves.values()]
        found = np.unique(np.concatenate(known)).tolist()
        return {sender for sender in found if hops.relay(sender, self._node) == rank}

    # --- this rank's own parts

    def put(self, array: int, block: StagedBlock) -> IntArray | None:
        """Send the parts of a block that are for other nodes, when there is room. Return the places of all other parts.

        None: this array has no relays.
        """
        if array not in self._moves:
            return None
        table = PartTable.of(block.block.parts)
        is_far = self._hops.ranks.nodes(table.rank) != self._node
        far = np.flatnonzero(is_far)
        if len(far):
            block.n_sending += 1
            self._queue.append((block, self._pack(array, block, table, far)))
        return np.flatnonzero(~is_far)

    def for_reading(self, array: int, block: Block) -> Block:
        """The block as its reader needs to know it: if it has very many parts, this rank's own, and one for all others."""
        if array not in self._moves or len(block.parts) < _MANY_PARTS:
            return block
        table = PartTable.of(block.parts)
        is_own = table.rank == self._rank
        own = [block.parts[k] for k in np.flatnonzero(is_own).tolist()]
        other = int(table.rank[int(np.argmin(is_own))])
        return Block(block.region, (*own, Part(block.region, -1, other)) if other != self._rank else tuple(own), block.number)

    @property
    def is_empty(self) -> bool:
        """True if all parts of this rank are in bundles."""
        return not self._queue

    def send_queued(self) -> bool:
        """Put queued parts into bundles while there is room. Return True if a block has left."""
        moved = False
        while self._queue and _advanced(self._queue[0][1]):
            one_less(self._queue.popleft()[0])
            moved = True
        return moved

    def clear(self, array: int, parts: Sequence[Part]) -> IntArray | None:
        """Forget what is queued. The relays that still expect `parts` will get a last bundle that reports the failure.

        Returns the places of parts that have no relay; None if this array has none.
        """
        self._queue.clear()
        if not self._has_ended[_ROW]:
            self._out[_ROW].discard()
        if array not in self._moves:
            return None
        nodes = self._hops.ranks.nodes(PartTable.of(parts).rank)
        self._owed |= {self._first_relay(self._hops.column(node)) for node in np.unique(nodes[nodes != self._node]).tolist()}
        return np.flatnonzero(nodes == self._node)

    def end_sending(self, went_well: bool) -> None:
        """No more parts follow: send the last bundles."""
        self.went_well &= went_well
        owed = self._owed
        if not self._hops.is_one_hop and any(array.flow.sends(self._rank) for array in self._moves.values()):
            owed = {*self._hops.first_relays(self._rank)}
        self._end(_ROW, owed)

    def _end(self, hop: int, ranks: Any) -> None:
        self._has_ended[hop] = True
        self._ending.append(self._out[hop].finish(ranks, 0 if self.went_well else FAILED))

    def _first_relay(self, column: int) -> int:
        """The relay of this rank's first hop to a column."""
        if column not in self._relay_of:
            self._relay_of[column] = self._hops.first_relay(self._rank, column)
        return self._relay_of[column]

    def _pack(self, array: int, block: StagedBlock, table: PartTable, far: IntArray) -> Iterator[None]:
        """Copy parts into bundles, those for the same column, node and rank together. Yields when there is no room."""
        nodes = self._hops.ranks.nodes(table.rank[far])
        columns = nodes % self._hops.n_columns
        order = np.lexsort((table.rank[far], nodes, columns))
        far, columns = far[order], columns[order]
        nbytes = table.sizes[far] * self._arrays[array].dtype.itemsize
        for low, high in _runs(columns):
            relay, k = self._first_relay(int(columns[low])), low
            while k < high:
                room = self._out[_ROW].reserve(relay, nbytes[k : min(high, k + _MOST_ROWS)])
                if room is None:
                    yield
                    continue
                self._fill(room, array, block, table, far[k : k + len(room.rows)], nbytes[k : k + len(room.rows)])
                k += len(room.rows)

    def _fill(
        self, room: Reserved, array: int, block: StagedBlock, table: PartTable, places: IntArray, nbytes: IntArray
    ) -> None:
        """Make the rows of some parts, and copy their values."""
        rows, seed, dtype = room.rows, self._channels.seeds[array], self._arrays[array].dtype
        rows[:, RECEIVER], rows[:, SENDER], rows[:, ARRAY] = table.rank[places], self._rank, array
        rows[:, BLOCK], rows[:, SECTION], rows[:, NBYTES] = block.block.number, table.shard[places], nbytes
        start, stop = table.start[places], table.stop[places]
        rows[:, PROOF] = proofs_of(rows, start, stop, seed)
        shapes = stop - start
        ends = room.starts + nbytes
        for low, high in _runs(shapes):
            values = room.values[room.starts[low] : ends[high - 1]].view(dtype)
            shape = tuple(shapes[low].tolist())
            if not _gather(block, start[low:high], shape, values.reshape(-1, *shape)):
                for k in range(low, high):
                    region = Region(tuple(start[k].tolist()), tuple(stop[k].tolist()))
                    block.copy(region, values.reshape(-1, *shape)[k - low, ...])
        rows[:, SUM] = 0
        if self._checksums:  # of the values in the block, so that a wrong copy is found too
            for k, (low, high) in enumerate(zip(room.starts.tolist(), ends.tolist(), strict=True)):
                region = Region(tuple(start[k].tolist()), tuple(stop[k].tolist()))
                tile = block.tile_of(region)
                rows[k, SUM] = checksum(room.values[low:high] if tile is None else tile.view(region), seed)

    # --- what comes to this rank

    @property
    def is_receiving(self) -> bool:
        """True if bundles may still come."""
        return any(inbox.waiting for inbox in self._inboxes)

    @property
    def is_listening(self) -> bool:
        """True if ranks of this node may still offer parts."""
        return bool(self._not_told)

    @property
    def is_done(self) -> bool:
        """True if this rank has sent, passed on and received all."""
        return (
            all(self._has_ended) and not self._ending and not self._not_told and all(inbox.is_done for inbox in self._inboxes)
        )

    def step(self) -> bool:
        """Receive bundles and pass them on, as far as there is room. Return True if anything moved."""
        moved = False
        for inbox in reversed(self._inboxes):  # what is nearest to its end first
            moved |= self._receive(inbox)
            moved |= self._work(inbox)
        if self._ending:
            left = [ending for ending in self._ending if not _advanced(ending)]
            moved |= len(left) < len(self._ending)  # else this rank would sleep, though it may be done
            self._ending = left
        if self._has_ended[_ROW] and not self._has_ended[_COLUMN] and self._inboxes[_ROW].is_done:
            self._end(_COLUMN, self._hops.second_relays(self._rank))
            moved = True
        if self._has_ended[_COLUMN] and not self._has_ended[_NODE] and self._inboxes[_COLUMN].is_done:
            self._tell_node()
            moved = True
        return moved

    def _tell_node(self) -> None:
        """Tell the ranks of this node that this rank has nothing more for them."""
        if not self._shares:
            self._end(_NODE, self._others)
            return
        self._has_ended[_NODE] = True
        for rank in self._others:
            self._transport.tell(rank, np.array([DONE, self.went_well], dtype=np.int64))

    def told(self, rank: int, message: Integers) -> None:
        """Handle the message of a rank of this node that it has nothing more."""
        self._not_told.discard(rank)
        self.went_well &= bool(message[1])

    def _receive(self, inbox: _Inbox) -> bool:
        moved = False
        while inbox.waiting and inbox.slots.has_room():
            found = self._transport.arrival(inbox.hop)
            if found is None:
                break
            sender, nbytes, receive = found
            slot = inbox.slots.take()
            if slot is None:
                raise ValueError("a buffer that was free is not")
            into = slot.data if nbytes <= len(slot.data) else np.empty(nbytes, dtype=np.uint8)
            inbox.n_receiving += 1
            receive(into, partial(self._arrived, inbox, sender, slot, into[:nbytes]))
            moved = True
        return moved

    def _arrived(self, inbox: _Inbox, sender: int, slot: Slot, message: Bytes) -> None:
        inbox.n_receiving -= 1
        inbox.todo.append(self._pass_on(inbox, sender, _Held(inbox.slots, slot), message))

    def _work(self, inbox: _Inbox) -> bool:
        moved = False
        while inbox.todo:
            try:
                if not _advanced(inbox.todo[0]):
                    break
            except Exception as error:
                let_interruption_pass(error)
                inbox.todo.popleft()
                self.went_well = False  # what the bundle had is lost: others must know before they miss it
                raise
            inbox.todo.popleft()
            moved = True
        return moved

    def _pass_on(self, inbox: _Inbox, sender: int, held: _Held, message: Bytes) -> Iterator[None]:
        """Give the parts of a bundle to whom they are for. Yields when there is no room in a bundle of the next hop."""
        flags = int(message[4:8].view(np.uint32)[0]) if len(message) >= 8 else LAST
        try:
            try:
                flags, groups = groups_of(message)
            except ValueError as error:
                self._report(sender, str(error))
                groups = []
            if flags & FAILED:
                self.went_well = False
            notes: dict[int, list[list[int]]] = {}
            for rows, values in groups:
                receivers = rows[:, RECEIVER].astype(np.int64)
                if (receivers >= self._hops.ranks.n_ranks).any():
                    self._report(sender, "a part of it is for no rank")
                    continue
                nbytes = rows[:, NBYTES].astype(np.int64)
                starts = np.cumsum(nbytes) - nbytes
                nodes = self._hops.ranks.nodes(receivers)
                for low, high in _runs(np.where(nodes == self._node, receivers, -1 - nodes)):
                    receiver = int(receivers[low])
                    if receiver == self._rank:
                        for row, start in zip(rows[low:high].tolist(), starts[low:high].tolist(), strict=True):
                            self._take(row, values[start : start + row[NBYTES]])
                    elif self._shares and self._transport.shares_memory(receiver):
                        at = self._transport.place_of(values)
                        notes.setdefault(receiver, []).extend(
                            [*row, at + start]
                            for row, start in zip(rows[low:high].tolist(), starts[low:high].tolist(), strict=True)
                        )
                    else:
                        yield from self._forward(
                            inbox.hop, sender, receiver, rows[low:high], values[starts[low] :], nbytes[low:high]
                        )
            for receiver, found in notes.items():
                held.n += 1
                self._channels.offer(receiver, len(found), 0, [v for row in found for v in row], held.less, PASSED)
        finally:
            if flags & LAST:
                inbox.waiting.discard(sender)
            held.less()

    def _forward(self, hop: int, sender: int, receiver: int, rows: Array, values: Bytes, nbytes: IntArray) -> Iterator[None]:
        """Copy parts into a bundle of the next hop."""
        node = self._hops.ranks.node(receiver)
        if node == self._node:
            following, relay = _NODE, receiver
        elif hop == _ROW and self._hops.column(node) == self._hops.column(self._node):
            following, relay = _COLUMN, self._hops.relay(self._rank, node)
        else:
            self._report(sender, f"a part of it is for rank {receiver}, which is not on the way")
            return
        k = 0
        starts = np.cumsum(nbytes) - nbytes
        while k < len(rows):
            room = self._out[following].reserve(relay, nbytes[k:])
            if room is None:
                yield
                continue
            n = len(room.rows)
            room.rows[...] = rows[k : k + n]
            room.values[...] = values[starts[k] : starts[k] + len(room.values)]
            k += n

    def _report(self, sender: int, why: str) -> None:
        self._arrivals.report_bundle(sender, why)
        self.went_well = False

    def look(self, rank: int, note: Integers) -> None:
        """Copy the parts that a relay of this node offers, and acknowledge."""
        started = time.perf_counter()
        width = ROW_SIZE + 1
        if (len(note) - HEAD_SIZE) % width:
            self._arrivals.report_list(None, rank)
        else:
            for row in note[HEAD_SIZE:].reshape(-1, width).tolist():
                try:
                    values = self._transport.look(rank, (row[NBYTES],), np.dtype(np.uint8), row[ROW_SIZE], [1])
                except (TypeError, ValueError):  # outside the relay's memory
                    self._arrivals.report_list(None, rank)
                    continue
                self._take(row, values)
        self._arrivals.copy_seconds += time.perf_counter() - started
        self._transport.tell(rank, np.array([ACK, note[1]], dtype=np.int64))

    def _take(self, row: list[int], values: Bytes) -> None:
        """Copy a part into its target if the plan of this rank expects it. Problems are reported, not raised."""
        try:
            self._copy(row, values)
        except Exception as error:
            self._arrivals.keep(error)

    def _copy(self, row: list[int], values: Bytes) -> None:
        receiver, sender, array, block, section, nbytes = row[:PROOF]
        arrivals, parts = self._arrivals, self._relayed.get(array)
        place = None if parts is None else parts.find(block, section)
        if parts is None or place is None:
            arrivals.report_list(None, sender, None if parts is None else array)
            return
        part, seed = parts[place], self._channels.seeds[array]
        dtype = self._arrays[array].dtype
        is_meant = (receiver, part.rank) == (self._rank, sender) and part.region.size * dtype.itemsize == nbytes
        if not is_meant or proof_of(row, part.region, seed) != row[PROOF] or self._has_come[array][place]:
            arrivals.report_list(part.region, sender, array)
            return
        target = arrivals.view(array, part, part.region)
        np.copyto(target, values.view(dtype).reshape(target.shape), casting="no")
        if self._checksums and (found := checksum(target, seed)) != row[SUM]:
            arrivals.report_sum(array, part, sender, found, row[SUM])
        self._has_come[array][place] = True
        arrivals.count_sent(array, part, part.region, self._checksums)

    def check(self) -> None:
        """Check that all has come, if no rank on the way has failed."""
        if not self.went_well:
            return
        for array, has_come in self._has_come.items():
            lost = np.flatnonzero(~has_come)
            if len(lost):
                self._arrivals.report_lost(array, self._relayed[array][int(lost[0])])


def _gather(block: StagedBlock, start: IntArray, shape: tuple[int, ...], into: Array) -> bool:
    """Copy many small parts of one shape at once. False if they are few or large, or lie in several tiles."""
    if len(start) < _LEAST_GATHERED or math.prod(shape) > _MOST_GATHERED or len(block.tiles) != 1:
        return False
    (tile,) = block.tiles
    first = start - np.array(tile.region.start)
    if first.min(initial=0) < 0 or ((first + shape) > tile.region.shape).any():
        raise ValueError(f"a part reaches outside of the tile {tile.region} of the block that is to be sent")
    index = [
        first[:, axis].reshape(-1, *[1] * len(shape))
        + np.arange(n).reshape([1, *[n if k == axis else 1 for k in range(len(shape))]])
        for axis, n in enumerate(shape)
    ]
    into[...] = tile.data[tuple(index)]
    return True


def _advanced(work: Iterator[None]) -> bool:
    """Go on with some work. True if it is done."""
    for _ in work:
        return False
    return True


def _runs(values: IntArray) -> Iterator[tuple[int, int]]:
    """Where equal values, or equal rows, follow each other, as bounds."""
    differ = values[1:] != values[:-1]
    cuts = (np.flatnonzero(differ if values.ndim == 1 else differ.any(axis=1)) + 1).tolist()
    yield from zip([0, *cuts], [*cuts, len(values)], strict=True) if len(values) else ()
