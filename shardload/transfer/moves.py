"""What is one array of an exchange, in which direction do its parts go, and what has arrived of it?

The exchange moves parts between ranks and does not need to know what they mean. An `ArrayMove` names both ends: a `Producer`,
which stages what this rank sends, block by block, and the targets that this rank fills. Its `Flow` says which rank sends which
part to which rank:

- a `Schedule`, to load: the owner of each block sends, the holders of the shards receive.
- `PiecesToBlocks`, to save, the opposite: the first holder of each shard sends, the owners of the blocks receive.

`Arrivals` counts every element of every target. An error is not raised at once, because the sender still waits for an answer:
the first one is kept until the ranks agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from shardload.comm.watchdog import Activity
from shardload.errors import PeerError, ShardloadError
from shardload.planning.region import Array, IntArray, Region
from shardload.planning.schedule import Block, Part, Schedule
from shardload.system.interruption import FirstError
from shardload.transfer.buffers import Piece, StagedBlock
from shardload.transfer.counters import Counters

DEFECT = "This is a defect in shardload; please report it with the shape, the mesh and the spec"


class Producer(Protocol):
    """Stages the blocks that one rank sends, in order."""

    @property
    def n_ahead(self) -> int:
        """Number of blocks to start before the first is done."""

    def has_room(self, block: Block) -> bool:
        """True if `start` has a buffer for this block."""

    def activity(self) -> Activity:
        """What its threads do, for the watchdog."""

    def start(self, block: Block) -> StagedBlock:
        """Begin to stage one block: in a slot, which is taken at once, or in the memory where the values lie already.

        When the block is done, its parts that stay on this rank are in their targets. Not called again after a block failed.
        """


class Flow(Protocol):
    """Which rank sends which part to which rank, in which order. Each rank asks only about itself."""

    def outgoing(self, rank: int) -> Iterator[Block]:
        """The blocks that a rank stages, in order. Each part names the rank that receives it and that rank's target."""

    def incoming(self, rank: int) -> Mapping[int, Iterable[Part]]:
        """The parts that a rank receives from each other rank, in the order in which that rank sends them."""

    def target(self, number: int) -> Region | None:
        """The elements that a target needs; None if it needs none."""

    def targets(self, rank: int) -> Iterable[int]:
        """The targets that a rank fills."""


@dataclass(frozen=True)
class PiecesToBlocks:
    """The opposite of a load: the holders of the shards send, the owner of each block receives all of the block.

    An owner that holds a shard takes its values from there. Otherwise, if a shard has replicas, its first holder sends it. A
    rank stages together all that it sends of one block. The targets are blocks.

    Attributes
    ----------
    schedule : Schedule
        Blocks, owners and shards.
    places : range, optional
        Which of the blocks of each owner are moved, by their places among these; by default all.
    """

    schedule: Schedule
    places: range | None = None
    # By rank: what all rounds need.
    _pairs_by_rank: dict[int, tuple[IntArray, ...]] = field(default_factory=dict, repr=False, compare=False)

    def targets(self, rank: int) -> range:
        """See `Flow`: the blocks of the rank in this round."""
        blocks = self.schedule.blocks_of(rank)
        return blocks if self.places is None else blocks[self.places.start : self.places.stop]

    def outgoing(self, rank: int) -> Iterator[Block]:
        """See `Flow`."""
        block_of_pair, shard_of_pair, owner_of_pair = self._pairs(rank)
        ends = np.flatnonzero(np.diff(block_of_pair, append=-1)) + 1
        for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=False):
            block, owner = int(block_of_pair[start]), int(owner_of_pair[start])
            region = self.schedule.blocks.region(block)
            shards = [shard for shard in shard_of_pair[start:stop].tolist() if self._sender(shard, owner) == rank]
            parts = tuple(Part(part, block, owner) for shard in shards for part in self.schedule.messages(region, shard))
            if parts:
                yield Block(region, parts)

    def in_round(self, places: range) -> PiecesToBlocks:
        """The same for some blocks of each owner."""
        return replace(self, places=places)

    def _pairs(self, rank: int) -> tuple[IntArray, IntArray, IntArray]:
        """The blocks of this round that meet shards of a rank: block, shard, owner, by the place of the block."""
        if rank not in self._pairs_by_rank:
            block, shard = self.schedule.pairs_of(rank)
            owner = self.schedule.owner(block)
            owners, inverse = np.unique(owner, return_inverse=True)
            first = np.array([self.schedule.blocks_of(number).start for number in owners.tolist()], dtype=np.int64)
            place = block - first[inverse] if len(owners) else block
            order = np.argsort(place, kind="stable")
            self._pairs_by_rank[rank] = place[order], block[order], shard[order], owner[order]
        place, block, shard, owner = self._pairs_by_rank[rank]
        if self.places is not None:
            of_round = slice(*np.searchsorted(place, (self.places.start, self.places.stop)).tolist())
            block, shard, owner = block[of_round], shard[of_round], owner[of_round]
        return block, shard, owner

    def incoming(self, rank: int) -> Mapping[int, Sequence[Part]]:
        """See `Flow`."""
        schedule = self.schedule
        parts_by_sender = defaultdict[int, list[Part]](list)
        for number in self.targets(rank):
            region = schedule.blocks.region(number)
            for shard in schedule.shards.grid.meeting(region):
                sender = self._sender(shard, rank)
                if sender != rank:
                    parts_by_sender[sender] += [Part(part, number, sender) for part in schedule.messages(region, shard)]
        return parts_by_sender

    def target(self, number: int) -> Region | None:
        """See `Flow`."""
        return self.schedule.blocks.region(number)

    def _sender(self, shard: int, owner: int) -> int:
        """The rank that sends its part of a shard to the owner of a block."""
        holders = self.schedule.shards.holders(shard)
        return owner if owner in holders else holders[0]


@dataclass(eq=False)
class ArrayMove:
    """One array of a round. A session has its target make memory, and its source stage what this rank sends.

    Attributes
    ----------
    array : int
        Its number in the call.
    flow : Flow
        Which rank sends which part to which rank.
    dtype : dtype
        Type of the values as they are sent.
    name : str
        Name of the array in error messages.
    naming_errors : callable
        Gives what lets errors name this array.
    producer : Producer
        Stages what this rank sends. The source of a session sets it.
    targets : mapping of int to Piece
        The pieces that this rank fills in place, by number. The target of a session sets them.
    on_complete : callable, optional
        Called with each target that has all its elements.
    seed : int
        Start value of receipts and checksums: different for each round, the same on every rank, so that a part of another load
        is never taken for a part of this one. (The arrays of one exchange are told apart anyway.)
    """

    array: int
    flow: Flow
    dtype: np.dtype[Any]
    name: str = ""
    naming_errors: Callable[[], AbstractContextManager[None]] = nullcontext
    producer: Producer = field(default=None)  # type: ignore[assignment]
    targets: Mapping[int, Piece] = field(default_factory=dict)
    on_complete: Callable[[Piece], None] | None = None
    seed: int = 0


class Arrivals:
    """Counts what has arrived in this rank's targets, for all arrays of an exchange.

    Parameters
    ----------
    moves : sequence of ArrayMove
        The arrays.
    on_progress : callable, optional
        Called with the number of bytes of each part that has arrived. If it fails, the exchange goes on without it.

    Attributes
    ----------
    errors : FirstError
        The first problem.
    counters : Counters
        For parts from other ranks: bytes, compared checksums, seconds of copying out of shared memory.
    """

    def __init__(self, moves: Sequence[ArrayMove], on_progress: Callable[[int], None] | None = None) -> None:
        self._moves, self._on_progress = moves, on_progress
        self._n_left = [{number: _size(move.flow.target(number)) for number in move.targets} for move in moves]
        self.errors, self.counters = FirstError(), Counters()

    def view(self, array: int, part: Part) -> Array:
        """The memory of a part in its target."""
        return self._moves[array].targets[part.target].view(part.region)

    def count(self, array: int, part: Part) -> None:
        """Count a part, which is in its target now."""
        move, n_left, target, size = self._moves[array], self._n_left[array], part.target, part.region.size
        n_left[target] -= size
        if self._on_progress is not None and not self.errors:
            with self.errors:
                self._on_progress(size * move.dtype.itemsize)
        if n_left[target] == 0 and move.on_complete is not None and not self.errors:
            with self.errors, move.naming_errors():
                move.on_complete(move.targets[target])

    def receive(self, array: int, part: Part, is_summed: bool) -> None:
        """Count a part that came from another rank. `is_summed`: whether its checksum was computed."""
        self.counters.nbytes_received += part.region.size * self._moves[array].dtype.itemsize
        self.counters.n_checksums += is_summed
        self.count(array, part)

    def check_coverage(self) -> None:
        """Check that every element of every target has arrived. One that nobody sent holds whatever was in memory before."""
        for move, n_left_of in zip(self._moves, self._n_left, strict=True):
            for number, n_left in n_left_of.items():
                if n_left:
                    n = _size(move.flow.target(number))
                    self._report(
                        f"{n - n_left} elements arrived for the shard {move.targets[number].region}{_of(move)}, which has {n}"
                    )

    def report_list(self, region: Region | None, rank: int, array: int | None = None) -> None:
        """Report that a rank sends parts which this rank does not expect."""
        which = "without a region" if region is None else str(region)
        of_array = "" if array is None else _of(self._moves[array])
        self._report(
            f"the part {which}{of_array} that came from rank {rank} is not what this rank expects: the sender's list of "
            "regions is not the one that was expected",
            rank,
        )

    def _report(self, text: str, rank: int | None = None) -> None:
        text = f"{text}. Nothing was loaded. {DEFECT}"
        self.errors.keep(ShardloadError(text) if rank is None else PeerError(text, rank=rank))

    def report_sum(self, array: int, part: Part, rank: int, ours: int, theirs: int) -> None:
        """Report that the values of a part differ from those that were sent."""
        self.errors.keep(
            PeerError(
                f"the part {part.region}{_of(self._moves[array])} that came from rank {rank} is not what was sent: its "
                f"checksum is {ours:08x}, the sender's is {theirs:08x}. The load is void; if it happens again, suspect the "
                "network or memory of these two nodes",
                rank=rank,
            )
        )


def _size(region: Region | None) -> int:
    return 0 if region is None else region.size


def _of(move: ArrayMove) -> str:
    return f" of {move.name}" if move.name else ""
