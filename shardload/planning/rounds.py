"""What is written in which round, and how is the staging memory divided?

A save and a copy write unit by unit: chunks, blocks of them, or slabs. A rank collects units up to some bytes, which are
encoded and written while it collects the next: that is a round.

Pure: integers in, integers out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardload.planning.blocks import aligned

KEPT_ROUNDS = 3
"""The values of a round may change when the third round after it is asked for: a ring of three buffers is enough."""

ROUNDS_HELD = KEPT_ROUNDS + 2  # stored bytes take up to two rounds more


@dataclass(frozen=True)
class Item:
    """Part of a round: some units of one array.

    Attributes
    ----------
    array : int
        Number of the array.
    units : range
        Numbers of the units.
    """

    array: int
    units: range


def plan_rounds(arrays: Iterable[tuple[int, range, int]], round_nbytes: int) -> Iterator[list[Item]]:
    """Rounds of units: small arrays share one, large ones have several. A unit that is larger than a round has its own.

    Parameters
    ----------
    arrays : iterable of (int, range, int)
        Number of each array, numbers of its units, and bytes of a unit.
    round_nbytes : int
        Bytes of a round.

    Examples
    --------
    >>> for items in plan_rounds([(0, range(3), 100), (1, range(0, 10, 5), 50), (2, range(1), 500)], 200):
    ...     print(*items)
    Item(array=0, units=range(0, 2))
    Item(array=0, units=range(2, 3)) Item(array=1, units=range(0, 10, 5))
    Item(array=2, units=range(0, 1))
    """
    items: list[Item] = []
    left = round_nbytes
    for array, units, nbytes in arrays:
        while units:
            n = min(len(units), max(left // max(1, nbytes), 0 if items else 1))
            if n:
                items.append(Item(array, units[:n]))
                left, units = left - n * nbytes, units[n:]
            if units:
                yield items
                items, left = [], round_nbytes
    if items:
        yield items


@dataclass(frozen=True)
class RoundMemory:
    """How a rank uses its staging memory.

    Attributes
    ----------
    round_nbytes : int
        Bytes of the values of a round.
    moving_nbytes : int
        For values on their way into a round: chunks that are decoded, blocks and parts that are sent.
    encoding_nbytes : int
        For chunks that are encoded.
    n_threads : int
        Threads that decode, and threads that encode.
    """

    round_nbytes: int
    moving_nbytes: int
    encoding_nbytes: int
    n_threads: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return ROUNDS_HELD * self.round_nbytes + self.moving_nbytes + self.encoding_nbytes


def least_memory(unit_nbytes: int, chunk_nbytes: int, moving_nbytes: int, n_threads: int = 1) -> int:
    """Fewest bytes of staging memory, if the largest unit and the largest chunk to encode have so many bytes."""
    return RoundMemory(aligned(unit_nbytes), moving_nbytes, 2 * n_threads * chunk_nbytes, n_threads).nbytes


def plan_memory(
    cap_nbytes: int,
    unit_nbytes: int,
    chunk_nbytes: int,
    moving_nbytes: int,
    n_threads: int,
    most_moving_nbytes: int | None = None,
) -> RoundMemory:
    """Divide the staging memory, which is at least `least_memory`.

    Parameters
    ----------
    cap_nbytes : int
        The staging memory.
    unit_nbytes, chunk_nbytes : int
        Bytes of the largest unit, and of the largest chunk that is work to encode.
    moving_nbytes, most_moving_nbytes : int
        What moving values takes at least, and what it can use.
    n_threads : int
        Threads of a rank.
    """
    while n_threads > 1 and least_memory(unit_nbytes, chunk_nbytes, moving_nbytes, n_threads) > cap_nbytes * 3 // 4:
        n_threads -= 1
    unit, encoding = aligned(unit_nbytes), 2 * n_threads * chunk_nbytes
    moving = max(moving_nbytes, min(cap_nbytes // 4, cap_nbytes - encoding - ROUNDS_HELD * unit))
    if most_moving_nbytes is not None:
        moving = min(moving, most_moving_nbytes)
    return RoundMemory(max(unit, (cap_nbytes - encoding - moving) // ROUNDS_HELD), moving, encoding, n_threads)
