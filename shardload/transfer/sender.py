"""How do the parts of a block leave? To a rank of the same machine as a note where to look, to any other as a message.

A note (`LOOK`) names, for every part and tile, the region and where its values lie in this rank's shared memory; the receiver
copies them from there and answers (`ACK`), and then the slot is used again. A message carries the values: from the block
itself where they lie in it without gaps, else packed. (MPI could send with gaps too, but MPICH then moves a few KiB per call:
measured, packing is 10 times faster.) Each receiver gets a receipt in the end: whether all went well, how many parts there
were, of which regions and, for messages, a checksum of each where asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.shared_memory import Segment
from shardload.errors import PeerError
from shardload.planning.region import Region
from shardload.planning.schedule import Part
from shardload.transfer.buffers import StagedBlock
from shardload.transfer.messages import Packer, checksum, identity
from shardload.transfer.messages import message as message_of
from shardload.transfer.requests import LOOK, Integers, Requests

__all__ = ["Sender"]

Array = np.ndarray[Any, Any]


@dataclass
class _Sent:
    """What went to one rank: enough for its receipt."""

    n_parts: int = 0
    identity: int = 0
    sums: list[int] = field(default_factory=list)


class Sender:
    """The parts that still have to leave this rank, in order.

    Parameters
    ----------
    traffic : Traffic
        Of this exchange.
    segments : mapping of int to Segment
        The memory of each rank of this machine; empty where none is shared.
    packer, shared_packer : Packer
        For messages; for values that have to be brought into shared memory.
    dtype : dtype
        Of the values.
    checksums : bool
        Whether each part gets a checksum.
    """

    def __init__(
        self,
        traffic: Requests,
        segments: Mapping[int, Segment],
        packer: Packer,
        shared_packer: Packer,
        dtype: np.dtype[Any],
        checksums: bool,
    ) -> None:
        self._traffic, self._segments, self._packer, self._shared_packer = traffic, segments, packer, shared_packer
        self._rank, self._dtype, self._checksums = traffic.group.rank, dtype, checksums
        own = segments.get(self._rank)
        self._base = 0 if own is None else own.data.ctypes.data
        self._waiting: deque[tuple[StagedBlock, Part]] = deque()
        self._looking: dict[int, Callable[[], None]] = {}
        self._n_notes = 0
        self.sent: dict[int, _Sent] = {}

    @property
    def is_empty(self) -> bool:
        """Whether everything has been posted."""
        return not self._waiting

    @property
    def n_looking(self) -> int:
        """Notes that have not been answered."""
        return len(self._looking)

    def put(self, block: StagedBlock) -> None:
        """Post what can be posted at once, and queue the other parts."""
        block.n_sending = 1
        notes: dict[int, list[Part]] = {}
        for part in block.block.parts:
            if part.rank == self._rank:
                continue
            if part.rank in self._segments and block.is_shared:
                notes.setdefault(part.rank, []).append(part)
            else:
                block.n_sending += 1
                self._waiting.append((block, part))
        for rank, parts in notes.items():
            block.n_sending += 1
            self._note(rank, parts, (block.views(part.region) for part in parts), partial(one_less, block))
        one_less(block)

    def post(self) -> bool:
        """Post what is queued, in order, as far as there is room to pack it; whether anything was."""
        posted = False
        while self._waiting:
            block, part = self._waiting[0]
            if not (self._post_note(block, part) if part.rank in self._segments else self._post_message(block, part)):
                break
            self._waiting.popleft()
            posted = True
        return posted

    def clear(self, parts: Iterable[Part]) -> None:
        """Post no more; whoever still expects one of `parts` gets a receipt that says so."""
        self._waiting.clear()
        for part in parts:
            if part.rank != self._rank:
                self.sent.setdefault(part.rank, _Sent(identity=self._traffic.seed))

    def answered(self, rank: int, note: int) -> None:
        """A receiver has what a note named. PeerError if there is no such note."""
        done = self._looking.pop(note, None)
        if done is None:
            raise PeerError(
                f"rank {rank} answers note {note}, which rank {self._rank} did not send or which was answered before. Nothing "
                "was loaded. This is a defect in shardload; please report it with the shape, the mesh and the spec",
                rank=rank,
            )
        done()

    def send_receipts(self, went_well: bool) -> None:
        """Nothing more will come."""
        for rank, sent in self.sent.items():
            receipt = np.array([went_well, sent.n_parts, sent.identity, *sent.sums], dtype=np.uint32)
            request = self._traffic.group.comm.Isend(receipt, dest=rank, tag=self._traffic.receipt_tag)
            self._traffic.add(request, _nothing, receipt)

    def _count(self, part: Part) -> _Sent:
        sent = self.sent.setdefault(part.rank, _Sent(identity=self._traffic.seed))
        sent.n_parts += 1
        sent.identity = identity(part.region, sent.identity)
        return sent

    def _note(
        self, rank: int, parts: list[Part], views: Iterable[Iterable[tuple[Region, Array]]], done: Callable[[], None]
    ) -> None:
        rows: list[int] = []
        first = self.sent[rank].n_parts if rank in self.sent else 0
        for number, places in enumerate(views, first):
            for region, view in places:
                proof = checksum(view, self._traffic.seed) if self._checksums else 0
                at = view.ctypes.data - self._base
                rows += [number, *region.start, *region.stop, at, *view.strides, proof]
        message: Integers = np.array([LOOK, self._n_notes + 1, len(parts), *rows], dtype=np.int64)
        self._traffic.tell(rank, message, self._segments[rank].bell)
        # Only now: a receipt must not promise what could not be sent.
        self._n_notes += 1
        self._looking[self._n_notes] = done
        for part in parts:
            self._count(part)

    def _post_note(self, block: StagedBlock, part: Part) -> bool:
        """Bring a part into shared memory first: its block is somewhere else."""
        packed = self._shared_packer.pack(block, part.region, self._dtype)
        if packed is None:
            return False
        data, done = packed
        self._note(part.rank, [part], [[(part.region, data)]], done)
        one_less(block)
        return True

    def _post_message(self, block: StagedBlock, part: Part) -> bool:
        tile = block.tile_of(part.region)
        view = None if tile is None else tile.view(part.region)
        done: Callable[[], None] = partial(one_less, block)
        if view is None or not view.flags.c_contiguous:
            packed = self._packer.pack(block, part.region, self._dtype)
            if packed is None:
                return False
            data, done = packed
        else:
            data = view
        sums = [checksum(data if view is None else view, self._traffic.seed)] if self._checksums else []
        message, _ = message_of(self._traffic.group.mpi, data)
        request = self._traffic.group.comm.Isend(message, dest=part.rank, tag=self._traffic.data_tag)
        self._traffic.add_data(request, done, data)
        self._count(part).sums += sums  # only now: a receipt must not promise what could not be sent
        if data is not view:
            one_less(block)  # the block itself is no longer needed for this part
        return True


def one_less(block: StagedBlock) -> None:
    """One receiver less needs the block; without any its slot is free."""
    block.n_sending -= 1
    if block.n_sending == 0:
        block.release()


def _nothing() -> None:
    return None
