"""Where does a rank put what is too long for one message, if all ranks are on its machine? In memory that they all see.

A broadcast of a megabyte copies it several times on each rank, through buffers of MPI and into new memory. A rank that needs a
quarter of it copies that quarter from here instead. The bytes stay as they are until the same rank begins the next call: it does
not begin before all ranks have said, in the last message of this one, that they are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardload.comm.collectives import Collectives
from shardload.comm.node_memory import NodeMemory

__all__ = ["Shelf"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_LEAST_NBYTES, _MOST_NBYTES = 1 << 20, 1 << 24


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

    def room(self, nbytes: int) -> Bytes | None:
        """So many bytes of this rank that the others can read; None if there are not as many."""
        own = self._memory.segments.get(self._rank)
        return None if own is None or own.data.nbytes < nbytes else own.data[:nbytes]

    def may_make(self, nbytes: int) -> bool:
        """True if it is worth a try to `make` room for so many bytes."""
        return self._memory.can_share and nbytes <= _MOST_NBYTES

    def make(self, root: int, nbytes: int) -> None:
        """Make room for so many bytes of `root`, if that is possible. Collective."""
        wanted = max(_LEAST_NBYTES, 1 << (nbytes - 1).bit_length()) if self._rank == root else 0
        self._memory.at_least(wanted, self._ranks, self._on_node)

    def look(self, root: int, nbytes: int) -> memoryview:
        """What `root` has put into its first bytes. It cannot be written."""
        return memoryview(self._memory.segments[root].data[:nbytes]).toreadonly()

    def forget(self) -> None:
        """Use none of this memory again, because a rank may still read it."""
        self._memory.forget()
