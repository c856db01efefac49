"""What is one array of an exchange, and which way do its parts go?

The engine moves parts from holders to holders and does not ask what they are. An `ArrayMove` names both ends: a `Producer`,
which stages what this rank sends, block by block, and the targets that this rank fills. Its `Flow` says who sends which part to
whom:

- `BlocksToPieces`, to load: each block's owner sends, the holders of the shards receive.
- `PiecesToBlocks`, the opposite: each shard's first holder sends, the owners of the blocks receive.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardload.planning.schedule import Block, Part, Schedule
from shardload.transfer.buffers import Piece

__all__ = ["ArrayMove", "BlocksToPieces", "Expected", "Flow", "PiecesToBlocks", "Producer", "Staged"]


class Staged(Protocol):
    """A block that is being staged."""

    def done(self) -> bool:
        """Whether all of it is there, or has failed."""
        ...

    def result(self) -> Any:
        """The `StagedBlock`; what went wrong, if something did."""
        ...


class Producer(Protocol):
    """Stages the blocks that one rank sends, in order."""

    @property
    def n_at_once(self) -> int:
        """Blocks worth starting before the first is done."""
        ...

    def has_room(self, block: Block) -> bool:
        """Whether `start` has a buffer for this block."""
        ...

    def now(self) -> tuple[int, str]:
        """A number that grows with what has been done, and what is being read (empty: nothing)."""
        ...

    def start(self, block: Block) -> Staged:
        """Begin to stage one block, in a slot that is taken at once or where it lies already.

        Its parts that stay here are in their targets when it is done. Not called again after one has failed.
        """
        ...


class Flow(Protocol):
    """Who sends which part to whom, in which order. Every rank asks for itself alone."""

    @property
    def ndim(self) -> int:
        """Axes."""
        ...

    def outgoing(self, rank: int) -> Iterator[Block]:
        """What a rank stages, in order: for each block its parts, each with the rank that gets it and that rank's target."""
        ...

    def incoming(self, rank: int) -> Mapping[int, Sequence[Part]]:
        """What a rank gets from each other rank, in the order in which that rank sends it."""
        ...

    def n_wanted(self, target: int) -> int:
        """Elements that a target needs."""
        ...


@dataclass(frozen=True)
class BlocksToPieces:
    """Loading: each block's owner sends, the holders of the shards receive."""

    schedule: Schedule

    @property
    def ndim(self) -> int:
        """See `Flow`."""
        return len(self.schedule.blocks.shape)

    def outgoing(self, rank: int) -> Iterator[Block]:
        """See `Flow`."""
        return self.schedule.owned_blocks(rank)

    def incoming(self, rank: int) -> Mapping[int, Sequence[Part]]:
        """See `Flow`."""
        return self.schedule.remote_parts(rank)

    def n_wanted(self, target: int) -> int:
        """See `Flow`."""
        region = self.schedule.true_region(target)
        return region.size if region else 0


@dataclass(frozen=True)
class PiecesToBlocks:
    """The opposite of `BlocksToPieces`: the holders of the shards send, each block's owner receives all of the block.

    Of replicas the first holder sends. What a rank stages for a block is all that it sends of it; the targets are blocks.
    """

    schedule: Schedule

    @property
    def ndim(self) -> int:
        """See `Flow`."""
        return len(self.schedule.blocks.shape)

    def outgoing(self, rank: int) -> Iterator[Block]:
        """See `Flow`."""
        blocks = self.schedule.blocks
        own = (part for block in self.schedule.owned_blocks(rank) for part in block.parts if part.rank == rank)
        lists = {**self.schedule.remote_parts(rank), rank: own}
        for owner in sorted(lists):  # owners ascend with blocks
            parts = (part for part in lists[owner] if self._sender(part.shard) == rank)
            for number, of_block in itertools.groupby(parts, key=lambda part: next(blocks.meeting(part.region))):
                yield Block(blocks.region(number), tuple(Part(part.region, number, owner) for part in of_block))

    def incoming(self, rank: int) -> Mapping[int, Sequence[Part]]:
        """See `Flow`."""
        found: dict[int, list[Part]] = {}
        for number, block in zip(self.schedule.blocks_of(rank), self.schedule.owned_blocks(rank), strict=True):
            for part in block.parts:
                if part.rank == self._sender(part.shard) != rank:
                    found.setdefault(part.rank, []).append(Part(part.region, number, part.rank))
        return found

    def n_wanted(self, target: int) -> int:
        """See `Flow`."""
        return self.schedule.blocks.region(target).size

    def _sender(self, shard: int) -> int:
        return self.schedule.shards.holders(shard)[0]


@dataclass(frozen=True)
class ArrayMove:
    """One array of an exchange.

    Attributes
    ----------
    flow : Flow
        Who sends which part to whom.
    producer : Producer
        Stages what this rank sends.
    targets : mapping of int to Piece
        What this rank fills, by number; filled in place.
    dtype : dtype
        Of the values as they travel.
    on_complete : callable, optional
        Called with each target that has all its elements.
    seed : int
        Of this load alone, the same on every rank: what receipts and checksums begin with, so that no part of another load is
        taken for one of this. (The arrays of one exchange are told apart anyway.)
    name : str
        For errors: which array it is.
    """

    flow: Flow
    producer: Producer
    targets: Mapping[int, Piece]
    dtype: np.dtype[Any]
    on_complete: Callable[[Piece], None] | None = None
    seed: int = 0
    name: str = ""


class Expected:
    """The parts that come from one rank: those of array 0 in order, then those of array 1, and so on. None of them is kept."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self.lists: list[tuple[int, Sequence[Part]]] = []
        self._n = 0

    def add(self, array: int, parts: Sequence[Part]) -> None:
        """The next array's."""
        self._starts.append(self._n)
        self.lists.append((array, parts))
        self._n += len(parts)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, number: int) -> tuple[int, Part]:
        """The array's number and the part."""
        if not 0 <= number < self._n:
            raise IndexError(number)
        k = bisect_right(self._starts, number) - 1
        array, parts = self.lists[k]
        return array, parts[number - self._starts[k]]

    def __iter__(self) -> Iterator[tuple[int, Part]]:
        for array, parts in self.lists:
            for part in parts:
                yield array, part
