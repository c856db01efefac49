"""Where does a rank put what is too long for one message, if all ranks are on its machine? In memory that they all see.

A broadcast of a megabyte copies it several times on each rank, through buffers of MPI and into new memory. A rank that needs a
quarter of it copies that quarter from here instead.

The bytes stay as they are until the same rank begins the next call, so one message of a call is put here, and others are
broadcast. It begins the next call only after all ranks have said, in the last message of this call, that they are done. An
interrupted call, in which a rank may not have said so, ends the group, and a new group has other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardload.comm.collectives import Collectives
from shardload.comm.node_memory import NodeMemory

__all__ = ["Shelf", "lay"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_LEAST_NBYTES, _MOST_NBYTES = 1 << 20, 1 << 24
_FRONT_NBYTES = 1 << 16  # what comes before values that were read straight into their place


class Shelf:
    """Memory of each rank that all ranks of a group can read.

    Parameters
    ----------
    rank : int
        This rank.
    ranks : sequence of int
        All ranks. They are on one machine.
    on_node : Collectives
        The same ranks.
    """

    def __init__(self, rank: int, ranks: Sequence[int], on_node: Collectives) -> None:
        self._rank, self._ranks, self._on_node = rank, tuple(ranks), on_node
        self._memory = NodeMemory(rank)
        self._given = 0  # bytes of `room`
        self._is_taken = False  # by a message of this call

    def begin(self) -> None:
        """Begin a call: forget what this rank has put here, for all ranks are done with it."""
        self._given, self._is_taken = 0, False

    def room(self, nbytes: int) -> Bytes | None:
        """Memory to read into what will be sent: `lay` need not copy it then. Once after each `begin`; otherwise None."""
        own = self._memory.segments.get(self._rank)
        if own is None or self._given or self._is_taken or own.data.nbytes < _FRONT_NBYTES + nbytes:
            return None
        self._given = nbytes
        return own.data[_FRONT_NBYTES : _FRONT_NBYTES + nbytes]

    def lay(self, parts: Sequence[Any]) -> tuple[int, int] | None:
        """Put bytes-like parts here, one after the other. Returns where they begin and end; None if there is no room.

        Once after each `begin`.
        """
        own = self._memory.segments.get(self._rank)
        if own is None or self._is_taken:
            return None
        length = sum(map(len, parts))
        last = np.frombuffer(parts[-1], dtype=np.uint8)
        front = length - len(last)
        is_there = 0 < self._given == len(last) and last.ctypes.data == own.data.ctypes.data + _FRONT_NBYTES
        if is_there and front <= _FRONT_NBYTES:
            self._is_taken = True
            lay(parts[:-1], own.data[_FRONT_NBYTES - front :])
            return _FRONT_NBYTES - front, _FRONT_NBYTES + len(last)
        start = 0 if not self._given else _FRONT_NBYTES + self._given  # some of the parts may be where they were read
        if own.data.nbytes < start + length:
            return None
        self._is_taken = True
        lay(parts, own.data[start:])
        return start, start + length

    def may_make(self, nbytes: int) -> bool:
        """True if it is worth a try to `make` room for so many bytes."""
        return self._memory.can_share and not self._is_taken and nbytes + _FRONT_NBYTES <= _MOST_NBYTES

    def make(self, root: int, nbytes: int) -> None:
        """Make room for so many bytes of `root`, if that is possible. Collective."""
        wanted = max(_LEAST_NBYTES, 1 << (nbytes + _FRONT_NBYTES - 1).bit_length()) if self._rank == root else 0
        self._memory.at_least(wanted, self._ranks, self._on_node)

    def look(self, root: int, start: int, stop: int) -> memoryview:
        """What `root` has put there. It cannot be written."""
        return self._memory.segments[root].data[start:stop].data.toreadonly()


def lay(parts: Sequence[Any], into: Bytes) -> None:
    """Put bytes-like parts one after the other.

    >>> into = np.zeros(4, dtype=np.uint8)
    >>> lay([b"a", b"", memoryview(b"bc")], into)
    >>> into.tolist()
    [97, 98, 99, 0]
    """
    at = 0
    for part in parts:
        into[at : at + len(part)] = np.frombuffer(part, dtype=np.uint8)
        at += len(part)
