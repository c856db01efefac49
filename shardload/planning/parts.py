"""Which parts do a block and the shards have in common? Lists of parts are in an order that every rank agrees on.

A list of parts can be long. Its parts are made only when they are accessed, so a block that a million ranks share is planned as
fast as a block that two ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardload.planning.region import Region

# Lists of parts up to this length are kept after the first iteration, because they are iterated over several times.
_MAX_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """Elements that go from one block to one target.

    Attributes
    ----------
    region : Region
        The elements, in global coordinates: all inside the block and inside the target.
    target : int
        The number of what they fill (`Flow.target`): in a load of a section of a shard, in a save of a block.
    rank : int
        The rank at the other end: in the list of a block, the rank that fills the target; in the list of a target, the rank
        that stages the block.
    """

    region: Region
    target: int
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

    def __getitem__(self, key: Any) -> Any:
        """The part at an index; a slice is a tuple of parts."""
        return tuple(map(self._make, self._places[key])) if isinstance(key, slice) else self._make(self._places[key])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"Parts({list(self)})"


@dataclass(frozen=True, slots=True)
class Block:
    """One block of the file, and its parts, in the order in which they are sent."""

    region: Region
    parts: Sequence[Part]
