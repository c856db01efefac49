"""How do many small parts become one message, and how are they found in it again?

A `Bundle` is a message to a relay (`planning.hops`). It has a head, and groups of parts: how many, a row of integers for each,
and their values one after the other. A row says who is to have the part, who sent it, which array, block and section it is of,
how many bytes it has, a proof of its place and a checksum of its values. So a relay passes on what it need not understand: it
looks at who is to have a part. Rows and proofs are made by the first sender, and compared with the plan by the last receiver.

A checksum in the head covers head and rows, so that no relay sends a part to where a damaged row leads.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from shardload.planning.grid import IntArray
from shardload.planning.hops import GROUP_NBYTES, HEAD_NBYTES, ROW_NBYTES
from shardload.planning.region import Region
from shardload.transfer.buffers import Slot, Slots
from shardload.transfer.checksum import crcs_of_rows, identity

__all__ = [
    "ARRAY",
    "BLOCK",
    "FAILED",
    "LAST",
    "NBYTES",
    "PROOF",
    "RECEIVER",
    "ROW_SIZE",
    "SECTION",
    "SENDER",
    "SUM",
    "Bundle",
    "Outbox",
    "Reserved",
    "groups_of",
    "proof_of",
    "proofs_of",
]

RECEIVER, SENDER, ARRAY, BLOCK, SECTION, NBYTES, PROOF, SUM = range(8)  # columns of a row
ROW_SIZE = ROW_NBYTES // 4
LAST, FAILED = 1, 2  # flags: the rank sends no more bundles in this hop; a rank before this hop has failed
_MAGIC = 0x53484231

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Rows = np.ndarray[Any, np.dtype[np.uint32]]


def proof_of(row: Any, region: Region, seed: int) -> int:
    """The proof of a part's place: a CRC-32 of whom it is from and for, of what it is, and of its region.

    `seed` is that of the array in this load, so a part of another load is never taken for one of this.
    """
    return identity(region, zlib.crc32(struct.pack("<6I", *row[:PROOF]), seed))


def proofs_of(rows: Rows, start: IntArray, stop: IntArray, seed: int) -> Rows:
    """`proof_of` of many rows at once; `start` and `stop` are the corners of their regions."""
    corners = np.ascontiguousarray(np.concatenate([start, stop], axis=1), dtype="<i8").view("<u4")
    return crcs_of_rows(np.concatenate([rows[:, :PROOF], corners], axis=1), seed)


class Posts(Protocol):
    """Sends bundles."""

    def send_bundle(self, rank: int, hop: int, data: Bytes, on_done: Callable[[], None]) -> None:
        """Send a bundle; `on_done` is called when its memory may be used again."""
        ...


@dataclass
class Bundle:
    """A bundle that is being filled."""

    slot: Slot
    n_used: int = HEAD_NBYTES
    groups: list[tuple[int, int]] = field(default_factory=list)  # of each, where it begins, and how many rows it has

    def n_fitting(self, nbytes: IntArray) -> int:
        """How many of these parts, from the first on, still fit."""
        room = (len(self.slot.data) - self.n_used - GROUP_NBYTES) // 4 * 4
        return int(np.searchsorted(np.cumsum(nbytes + ROW_NBYTES), room, side="right"))

    def reserve(self, nbytes: IntArray) -> tuple[Rows, Bytes]:
        """Room for a group of parts: their rows, and their values."""
        n, total, at = len(nbytes), int(nbytes.sum()), self.n_used
        head = self.slot.data[at : at + GROUP_NBYTES].view(np.uint32)
        head[:] = n, total
        first = at + GROUP_NBYTES
        values = first + n * ROW_NBYTES
        self.groups.append((first, n))
        self.n_used = values + -(-total // 4) * 4
        return self.slot.data[first:values].view(np.uint32).reshape(n, ROW_SIZE), self.slot.data[values : values + total]

    def seal(self, flags: int) -> Bytes:
        """The message."""
        data = self.slot.data[: self.n_used]
        head = data[:HEAD_NBYTES].view(np.uint32)
        head[:] = _MAGIC, flags, len(self.groups), 0
        crc = zlib.crc32(data[: HEAD_NBYTES - 4].data)
        for first, n in self.groups:
            crc = zlib.crc32(data[first - GROUP_NBYTES : first + n * ROW_NBYTES].data, crc)
        head[3] = crc
        return data


def groups_of(message: Bytes) -> tuple[int, list[tuple[Rows, Bytes]]]:
    """The flags of a message, and its groups: rows and values.

    Raises
    ------
    ValueError
        If it is damaged.
    """
    if len(message) < HEAD_NBYTES:
        raise ValueError(f"{len(message)} bytes are no bundle")
    magic, flags, n_groups, expected = (int(v) for v in message[:HEAD_NBYTES].view(np.uint32))
    crc, at, found = zlib.crc32(message[: HEAD_NBYTES - 4].data), HEAD_NBYTES, []
    for _ in range(n_groups if magic == _MAGIC else 0):
        if at + GROUP_NBYTES > len(message):
            raise ValueError("a group lies outside the bundle")
        n, total = (int(v) for v in message[at : at + GROUP_NBYTES].view(np.uint32))
        values = at + GROUP_NBYTES + n * ROW_NBYTES
        if values + total > len(message):
            raise ValueError("a group lies outside the bundle")
        crc = zlib.crc32(message[at:values].data, crc)
        rows = message[at + GROUP_NBYTES : values].view(np.uint32).reshape(n, ROW_SIZE)
        if int(rows[:, NBYTES].sum(dtype=np.int64)) != total:
            raise ValueError("a group has more or fewer bytes than its parts")
        found.append((rows, message[values : values + total]))
        at = values + -(-total // 4) * 4
    if magic != _MAGIC or crc != expected or at != len(message):
        raise ValueError("its head or rows are not what was sent")
    return flags, found


@dataclass(frozen=True)
class Reserved:
    """Room for some parts in a bundle: their rows, their values, and where each one's values begin."""

    rows: Rows
    values: Bytes
    starts: IntArray


class Outbox:
    """The bundles of one hop that this rank fills and sends.

    A bundle leaves when it is full, when its buffer is needed for another receiver, or at the end.

    Parameters
    ----------
    posts : Posts
        Sends them.
    hop : int
        Which hop.
    slots : Slots
        Their memory.
    """

    def __init__(self, posts: Posts, hop: int, slots: Slots) -> None:
        self._posts, self._hop, self._slots = posts, hop, slots
        self._open: dict[int, Bundle] = {}
        self.ranks: set[int] = set()  # to whom anything was sent

    def reserve(self, rank: int, nbytes: IntArray) -> Reserved | None:
        """Room for the first of some parts for `rank`, at least one. None: there is none now."""
        while True:
            bundle = self._open.get(rank) or self._begin(rank)
            if bundle is None:
                return None
            n = bundle.n_fitting(nbytes)
            if n:
                rows, values = bundle.reserve(nbytes[:n])
                ends = np.cumsum(nbytes[:n])
                return Reserved(rows, values, ends - nbytes[:n])
            if not bundle.groups:
                raise ValueError(f"a part of {int(nbytes[0])} bytes for bundles of {self._slots.nbytes}")
            self._send(rank, 0)

    def _begin(self, rank: int) -> Bundle | None:
        if not self._slots.has_room() and len(self._open) == self._slots.n_taken:  # none is on its way: let the fullest go
            fullest = sorted(self._open, key=lambda k: self._open[k].n_used)
            for one in fullest[len(fullest) // 2 :]:
                self._send(one, 0)
        slot = self._slots.take()
        if slot is None:
            return None
        self._open[rank] = Bundle(slot)
        return self._open[rank]

    def _send(self, rank: int, flags: int) -> None:
        bundle = self._open.pop(rank)
        self.ranks.add(rank)
        self._posts.send_bundle(rank, self._hop, bundle.seal(flags), partial(self._slots.give, bundle.slot))

    def discard(self) -> None:
        """Empty the bundles that have not left: this rank has failed."""
        for bundle in self._open.values():
            bundle.groups.clear()
            bundle.n_used = HEAD_NBYTES

    def finish(self, ranks: Iterable[int], flags: int) -> Iterator[None]:
        """Send these ranks, and all that were sent anything, their last bundles. Yields where it has to wait for room."""
        for rank in sorted({*ranks, *self._open, *self.ranks}, key=lambda k: k not in self._open):
            while rank not in self._open and self._begin(rank) is None:
                yield
            self._send(rank, LAST | flags)
