"""Which memory do the ranks of a machine share? It is made once, kept for the next call, and made anew if more is needed."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from shardload.comm.collectives import Collectives
from shardload.comm.shared_memory import HANDLE_SIZE, Segment


class NodeMemory:
    """The shared memory segments of the ranks of this machine.

    Parameters
    ----------
    rank : int
        This rank.

    Attributes
    ----------
    segments : dict of int to Segment
        The segment of each rank of this machine, including this rank; empty if none is shared (yet).
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.segments: dict[int, Segment] = {}
        self._nbytes = 0
        self._can_share = True  # the same on every rank
        self._is_wanted = os.environ.get("SHARDLOAD_SHARED_MEMORY", "1") != "0"  # on this rank

    def at_least(self, nbytes: int, ranks: Sequence[int], on_node: Collectives) -> dict[int, Segment]:
        """Shared memory of at least `nbytes` of every rank, by rank; empty if it cannot be shared. Collective over `ranks`."""
        if len(ranks) == 1 or not self._can_share:
            return {}
        # A rank whose exchange was interrupted has dropped its segments: then all ranks make new ones.
        state = np.array([nbytes > self._nbytes or not self.segments, nbytes, not self._is_wanted], dtype=np.int64)
        state = on_node.reduce(state, "max")
        self._can_share = not state[2]
        if state[0] and state[1] and self._can_share:
            self._make(nbytes, ranks, on_node)
        return self.segments

    def forget(self) -> None:
        """Drop the segments without reusing them, because other ranks may still read them."""
        self.segments = {}

    def _make(self, nbytes: int, ranks: Sequence[int], on_node: Collectives) -> None:
        self.segments = {}
        own, problem = None, False
        try:
            own = Segment.create(max(nbytes, self._nbytes))
        except (OSError, AttributeError):
            problem = True
        handles = on_node.gather(np.zeros(HANDLE_SIZE, dtype=np.int64) if own is None else own.handle)
        found: dict[int, Segment] = {}
        try:
            for rank, handle in zip(ranks, handles, strict=True):
                found[rank] = own if rank == self._rank and own is not None else Segment.attach(handle)
        except (OSError, ValueError):
            problem = True
        failed = on_node.reduce(np.array([problem], dtype=np.int64), "max")
        if own is not None:
            own.seal()
        self._can_share = not failed[0]
        if self._can_share:
            self.segments, self._nbytes = found, max(nbytes, self._nbytes)
