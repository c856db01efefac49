"""How do parts travel between this rank and one other rank?

`Channels.route` returns one `Channel` per rank, which serves both directions: what this rank sends there, and what comes from
there.

- `SharedMemoryChannel`, to a rank of the same machine: the sender makes an *offer*, a control message that names for every part
  and tile the region and the place of its values in the sender's shared memory. The receiver copies the values out of it and
  acknowledges the offer; then the slot is used again.
- `MessageChannel`, to any other rank: an MPI message carries the values, straight from the block if they lie there without
  gaps, otherwise packed. (MPI could send with gaps too, but MPICH then moves a few KiB per call: measured, packing is 10 times
  faster.) The message is received straight into the target.

Both ends number the parts of one sender, from the first part of array 0 to the last part of the last array. At the end each
sender sends each receiver a receipt: whether all went well, how many parts were sent, a digest of their arrays and regions and,
for messages, a checksum of each part if checksums are on.
"""

from __future__ import annotations

import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.transport import Integers, Transport
from shardload.errors import PeerError
from shardload.planning.region import Region
from shardload.planning.schedule import Part
from shardload.transfer.arrivals import DEFECT, Arrivals
from shardload.transfer.buffers import StagedBlock
from shardload.transfer.checksum import checksum, identity, seed_of
from shardload.transfer.messages import Packer
from shardload.transfer.moves import ArrayMove, Expected

__all__ = ["ACK", "HEAD_SIZE", "OFFER", "Channel", "Channels", "MessageChannel", "SharedMemoryChannel", "one_less"]

OFFER, ACK = range(2)  # kinds of control messages: "these parts lie there", "I have them"
HEAD_SIZE = 4  # of an offer: OFFER, its number, how many parts, which array; then a row of integers for each tile
_RECEIPT_HEAD_SIZE = 3

Array = np.ndarray[Any, Any]


class Channels:
    """The channels of one exchange.

    Parameters
    ----------
    transport : Transport
        Carries the messages.
    arrays : sequence of ArrayMove
        What moves.
    arrivals : Arrivals
        What has arrived on this rank.
    packer, shared_packer : Packer
        Pack messages, and values that have to be copied into shared memory.
    checksums : bool
        Whether each part is checksummed on both sides.

    Attributes
    ----------
    seeds : sequence of int
        For each array, the start value of its identities and checksums.
    """

    def __init__(
        self,
        transport: Transport,
        arrays: Sequence[ArrayMove],
        arrivals: Arrivals,
        packer: Packer,
        shared_packer: Packer,
        checksums: bool,
    ) -> None:
        self.transport, self.arrays, self.arrivals, self.checksums = transport, arrays, arrivals, checksums
        self.packer, self.shared_packer = packer, shared_packer
        self.seeds = [seed_of(number, array.seed) for number, array in enumerate(arrays)]
        self._known: dict[int, Channel] = {}
        self._offered: dict[int, tuple[int, Callable[[], None]]] = {}
        self._n_offers = 0

    def route(self, rank: int) -> Channel:
        """The channel to and from a rank."""
        found = self._known.get(rank)
        if found is None:
            kind = SharedMemoryChannel if self.transport.shares_memory(rank) else MessageChannel
            found = self._known[rank] = kind(self, rank)
        return found

    def close(self) -> None:
        """Release the channels: each references this object, and a reference cycle would keep the targets' memory alive."""
        self._known.clear()

    @property
    def n_offered(self) -> int:
        """Number of offers of this rank that have not been acknowledged."""
        return len(self._offered)

    def offer(self, rank: int, n_parts: int, array: int, rows: list[int], on_done: Callable[[], None]) -> None:
        """Tell `rank` where parts lie. `on_done` is called when the receiver has copied them."""
        message: Integers = np.array([OFFER, self._n_offers + 1, n_parts, array, *rows], dtype=np.int64)
        self.transport.tell(rank, message)
        self._n_offers += 1
        self._offered[self._n_offers] = rank, on_done

    def hurry(self) -> None:
        """Wake all ranks that have not acknowledged an offer yet, also those that need not be rung."""
        for rank in {rank for rank, _ in self._offered.values()}:
            self.transport.wake(rank)

    def acknowledged(self, rank: int, offer: int) -> None:
        """Handle the acknowledgement of an offer. PeerError if there is no such offer."""
        _, done = self._offered.pop(offer, (rank, None))
        if done is None:
            raise PeerError(
                f"rank {rank} answers note {offer}, which rank {self.transport.rank} did not send or which was answered "
                f"before. Nothing was loaded. {DEFECT}",
                rank=rank,
            )
        done()


class Channel(ABC):
    """How parts travel between this rank and one other, with the counts and receipts of both directions.

    Parameters
    ----------
    common : Channels
        The channels of this exchange.
    rank : int
        The other rank.
    """

    _sums_in_receipt = False
    rings = False  # whether the other rank wakes this one after each message

    def __init__(self, common: Channels, rank: int) -> None:
        self.rank, self._common, self._transport, self._checksums = rank, common, common.transport, common.checksums
        self._n_sent, self._identity, self._array = 0, 0, -1
        self._sent_sums: list[int] = []
        self.expected = Expected()
        self._n_coming, self._expected_identity = 0, 0
        self._sums: list[int] = []
        self._receipt: Array = np.zeros(0, dtype=np.uint32)
        self._has_receipt = False

    # --- to the other rank

    @abstractmethod
    def takes_as_it_lies(self, block: StagedBlock) -> bool:
        """True if all parts of a block can be sent together, from where they lie."""

    @abstractmethod
    def send(self, array: int, block: StagedBlock, parts: Sequence[Part]) -> bool:
        """Send parts of a block. Return False if there is no room to pack them. `one_less` is called when they have left."""

    def send_receipt(self, went_well: bool) -> None:
        """Send the receipt: no more parts follow it."""
        receipt = np.array([went_well, self._n_sent, self._identity, *self._sent_sums], dtype=np.uint32)
        self._transport.send_receipt(self.rank, receipt)

    def _count_sent(self, array: int, part: Part) -> None:
        """Count a part in the receipt. Call this after it was sent: a receipt must not count a part that could not be sent."""
        if array != self._array:
            self._array = array
            self._identity = begin_array(self._common.seeds[array], self._identity)
        self._n_sent += 1
        self._identity = identity(part.region, self._identity)

    # --- from the other rank

    def expect(self, window: int) -> None:
        """Begin to receive the expected parts. `window` is the number of receives to post at a time."""
        self._n_coming = len(self.expected)
        for array, parts in self.expected.lists:
            self._expected_identity = begin_array(self._common.seeds[array], self._expected_identity)
            for part in parts:
                self._expected_identity = identity(part.region, self._expected_identity)
        self._sums = [0] * (self._n_coming if self._checksums and self._sums_in_receipt else 0)
        self._receipt = np.zeros(_RECEIPT_HEAD_SIZE + len(self._sums), dtype=np.uint32)
        self._transport.receive_receipt(self.rank, self._receipt, self._expect_no_more)

    def is_done(self) -> bool:
        """True if nothing more will come."""
        return self._has_receipt

    @property
    def is_offered(self) -> bool:
        """True if offers may still come."""
        return False

    @property
    def went_well(self) -> bool:
        """True if the receipt says that the sender did not fail."""
        return bool(self._receipt[0])

    def look(self, offer: Integers) -> None:
        """Copy what an offer names, and acknowledge it. In this base class no offer is expected: report it as an error."""
        self._common.arrivals.report_list(None, self.rank)
        self._transport.tell(self.rank, np.array([ACK, offer[1]], dtype=np.int64))

    def _expect_no_more(self) -> None:
        """Handle the arrival of the receipt: the parts that it does not count will never come."""
        self._has_receipt = True
        self._n_coming = min(self._n_coming, int(self._receipt[1]))

    def check(self) -> None:
        """Compare the receipt with what was expected."""
        went_well, n_sent, proof, *sums = (int(v) for v in self._receipt)
        if not went_well:
            return  # the sender raises its error, and all ranks agree on it
        arrivals, expected = self._common.arrivals, self.expected
        if (n_sent, proof) != (len(expected), self._expected_identity):
            array, part = expected[0]
            arrivals.report_list(part.region, self.rank, array)
        for (array, part), theirs, ours in zip(expected, sums, self._sums, strict=False):
            if theirs != ours:
                arrivals.report_sum(array, part, self.rank, ours, theirs)


class MessageChannel(Channel):
    """Sends each part as a message. It is received straight into its target (derived datatypes, no unpacking)."""

    _sums_in_receipt = True

    def __init__(self, common: Channels, rank: int) -> None:
        super().__init__(common, rank)
        self._n_posted = 0
        self._cancel: dict[int, Callable[[], None]] = {}

    def takes_as_it_lies(self, block: StagedBlock) -> bool:
        """See `Channel`."""
        return False

    def send(self, array: int, block: StagedBlock, parts: Sequence[Part]) -> bool:
        """See `Channel`."""
        (part,) = parts
        tile = block.tile_of(part.region)
        view = None if tile is None else tile.view(part.region)
        done: Callable[[], None] = partial(one_less, block)
        if view is None or not view.flags.c_contiguous:
            packed = self._common.packer.pack(block, part.region, self._common.arrays[array].dtype)
            if packed is None:
                return False
            data, done = packed
        else:
            data = view
        sums = [checksum(data if view is None else view, self._common.seeds[array])] if self._checksums else []
        self._transport.send(self.rank, data, done)
        self._count_sent(array, part)
        self._sent_sums += sums
        if data is not view:
            one_less(block)  # the part was copied, so it no longer needs the block
        return True

    def expect(self, window: int) -> None:
        """See `Channel`."""
        super().expect(window)
        for _ in range(window):
            self._receive_next()

    def _receive_next(self) -> None:
        number = self._n_posted
        if number >= self._n_coming:
            return
        array, part = self.expected[number]
        self._n_posted += 1
        view = self._common.arrivals.view(array, part, part.region)
        arrived = partial(self._arrived, number, array, part, view)
        self._cancel[number] = self._transport.receive(self.rank, view, arrived)

    def _arrived(self, number: int, array: int, part: Part, view: Array) -> None:
        del self._cancel[number]
        if number >= self._n_coming:
            return  # cancelled
        try:
            if self._checksums:
                self._sums[number] = checksum(view, self._common.seeds[array])
            self._common.arrivals.count_sent(array, part, part.region, self._checksums)
        except Exception as error:
            self._common.arrivals.keep(error)
        self._receive_next()

    def _expect_no_more(self) -> None:
        super()._expect_no_more()
        for number, cancel in self._cancel.items():
            if number >= self._n_coming:
                cancel()


class SharedMemoryChannel(Channel):
    """Sends an offer. The receiver copies the values out of the sender's memory, from where the offer says they lie."""

    rings = True

    def __init__(self, common: Channels, rank: int) -> None:
        super().__init__(common, rank)
        self._n_seen = 0  # parts that offers have named

    def takes_as_it_lies(self, block: StagedBlock) -> bool:
        """See `Channel`."""
        return block.is_shared

    def send(self, array: int, block: StagedBlock, parts: Sequence[Part]) -> bool:
        """See `Channel`."""
        if block.is_shared:
            self._offer(array, parts, (block.views(part.region) for part in parts), partial(one_less, block))
            return True
        # The block lies elsewhere: copy the part into shared memory first.
        (part,) = parts
        packed = self._common.shared_packer.pack(block, part.region, self._common.arrays[array].dtype)
        if packed is None:
            return False
        data, done = packed
        self._offer(array, parts, [[(part.region, data)]], done)
        one_less(block)
        return True

    def _offer(
        self,
        array: int,
        parts: Sequence[Part],
        views: Iterable[Iterable[tuple[Region, Array]]],
        on_done: Callable[[], None],
    ) -> None:
        rows: list[int] = []
        seed, place_of = self._common.seeds[array], self._transport.place_of
        for number, places in enumerate(views, self._n_sent):
            for region, view in places:
                proof = checksum(view, seed) if self._checksums else 0
                rows += [number, *region.start, *region.stop, place_of(view), *view.strides, proof]
        self._common.offer(self.rank, len(parts), array, rows, on_done)
        for part in parts:
            self._count_sent(array, part)

    def is_done(self) -> bool:
        """See `Channel`."""
        return self._has_receipt and self._n_seen >= self._receipt[1]

    @property
    def is_offered(self) -> bool:
        """See `Channel`."""
        return len(self.expected) > 0 and not self.is_done()

    def look(self, offer: Integers) -> None:
        """See `Channel`. Copies the values out of the sender's memory."""
        started = time.perf_counter()
        arrivals, rank, expected = self._common.arrivals, self.rank, self.expected
        array = int(offer[3])
        is_known = 0 <= array < len(self._common.arrays) and len(expected) > 0
        width = 3 + 3 * (self._common.arrays[array].flow.ndim if is_known else 0)
        n_rows, n_more = divmod(len(offer) - HEAD_SIZE, width)
        if n_more or not is_known:
            arrivals.report_list(None, rank)
        tiles: dict[int, list[Region]] = {}
        if is_known:
            for row in offer[HEAD_SIZE : HEAD_SIZE + n_rows * width].reshape(n_rows, width).tolist():
                region = self._take(array, row)
                if region is not None:
                    tiles.setdefault(row[0], []).append(region)
        last = min(self._n_seen + int(offer[2]), len(expected))
        for number in range(self._n_seen, last):
            of, part = expected[number]
            if not _are_all_of(part.region, tiles.pop(number, [])):
                arrivals.report_list(part.region, rank, of)
        for number in tiles:  # offers come in order
            of, part = expected[number]
            arrivals.report_list(part.region, rank, of)
        self._n_seen += int(offer[2])
        arrivals.copy_seconds += time.perf_counter() - started
        self._transport.tell(rank, np.array([ACK, offer[1]], dtype=np.int64))

    def _take(self, array: int, row: list[int]) -> Region | None:
        """Copy the values that one row of an offer names. Problems are reported, not raised: the sender waits for an answer."""
        try:
            return self._copy(array, row)
        except Exception as error:
            self._common.arrivals.keep(error)
            return None

    def _copy(self, array: int, row: list[int]) -> Region | None:
        n, arrivals = self._common.arrays[array].flow.ndim, self._common.arrivals
        try:
            region = Region(tuple(row[1 : 1 + n]), tuple(row[1 + n : 1 + 2 * n]))
        except ValueError:
            arrivals.report_list(None, self.rank, array)
            return None
        of, part = self.expected[row[0]] if 0 <= row[0] < len(self.expected) else (-1, None)
        if part is None or of != array or not part.region.contains(region):
            arrivals.report_list(region, self.rank, array)
            return None
        target = arrivals.view(array, part, region)
        try:
            values = self._transport.look(self.rank, region.shape, target.dtype, row[1 + 2 * n], row[2 + 2 * n : -1])
        except (TypeError, ValueError):  # outside the sender's memory
            arrivals.report_list(region, self.rank, array)
            return None
        np.copyto(target, values, casting="no")
        if self._checksums and (found := checksum(target, self._common.seeds[array])) != row[-1]:
            arrivals.report_sum(array, part, self.rank, found, row[-1])
        arrivals.count_sent(array, part, region, self._checksums)
        return region


def begin_array(seed: int, previous: int) -> int:
    """The running identity of regions, advanced to the beginning of the next array."""
    return zlib.crc32(struct.pack("<I", seed), previous)


def one_less(block: StagedBlock) -> None:
    """Count down the receivers that need the block. When none does, free its slot."""
    block.n_sending -= 1
    if block.n_sending == 0:
        block.release()


def _are_all_of(region: Region, tiles: list[Region]) -> bool:
    """True if the tiles, as cells of a grid, cover the region, each element once.

    >>> half = Region((0,), (2,))
    >>> _are_all_of(Region((0,), (4,)), [half, Region((2,), (4,))]), _are_all_of(Region((0,), (4,)), [half, half])
    (True, False)
    """
    if len(tiles) == 1:
        return tiles[0] == region
    n_cells = 1
    for axis in range(region.ndim):
        cuts = sorted({(tile.start[axis], tile.stop[axis]) for tile in tiles})
        ends = [region.start[axis], *(stop for _, stop in cuts)]
        if [start for start, _ in cuts] != ends[:-1] or ends[-1] != region.stop[axis]:
            return False
        n_cells *= len(cuts)
    return len(tiles) == len(set(tiles)) == n_cells
