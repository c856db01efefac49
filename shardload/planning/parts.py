"""Which parts do a block and the shards have in common? Lists of parts are in an order that every rank agrees on.

A list of parts can be long. Its parts are made only when they are accessed, so a block that a million ranks share is planned as
fast as a block that two ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from shardload.planning.region import Region

__all__ = ["Block", "Part", "Parts", "PartsByRank"]

# Lists of parts up to this length are kept after the first iteration, because they are iterated over several times.
_MAX_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """Elements that go from one block to one piece.

    Attributes
    ----------
    region : Region
        The elements, in global coordinates: all inside the block and inside the shard.
    shard : int
        The shard whose piece they belong to; with a halo, the section of a shard (`Shards.sections_of`).
    rank : int
        The rank at the other end: in the list of a block, the rank that holds the piece; in the list of a piece, the rank that
        owns the block.
    """

    region: Region
    shard: int
    rank: int


class Parts(Sequence[Part]):
    """Parts in order, made when they are accessed; long lists are not kept. Equal to any sequence of the same parts.

    Parameters
    ----------
    make : callable
        Makes the part at a place.
    places : range
        The places.
    """

    __slots__ = ("_kept", "_make", "_places")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, make: Callable[[int], Part], places: range) -> None:
        self._make, self._places = make, places
        self._kept: tuple[Part, ...] | None = None

    def __iter__(self) -> Iterator[Part]:
        if len(self._places) > _MAX_KEPT:
            return map(self._make, self._places)
        if self._kept is None:
            self._kept = tuple(map(self._make, self._places))
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, key: int) -> Part: ...
    @overload
    def __getitem__(self, key: slice) -> Parts: ...
    def __getitem__(self, key: int | slice) -> Part | Parts:
        if self._kept is not None and not isinstance(key, slice):
            return self._kept[key]
        found = self._places[key]
        return Parts(self._make, found) if isinstance(found, range) else self._make(found)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"Parts({list(self)})"


class PartsByRank(Mapping[int, Sequence[Part]]):
    """The parts of each rank, ascending by rank. Like `Parts`, they are made when they are accessed.

    Parameters
    ----------
    make : callable
        Makes the part at a place.
    runs : mapping of int to range
        The places of each rank's parts.
    """

    __slots__ = ("_make", "_runs")

    def __init__(self, make: Callable[[int], Part], runs: Mapping[int, range]) -> None:
        self._make, self._runs = make, runs

    def __getitem__(self, rank: int) -> Parts:
        return Parts(self._make, self._runs[rank])

    def __iter__(self) -> Iterator[int]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"PartsByRank({dict(self)})"


@dataclass(frozen=True, slots=True)
class Block:
    """One block of the file, and its parts, in the order in which they are sent."""

    region: Region
    parts: Sequence[Part]
